"""Write the model card of a checkpoint: its training, its results, and the way to repeat them.

Every figure is from the run's files. Paths, addresses and keys of this machine stay out: a card is
read by everyone.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ttrl.configs.base import without_secrets
from ttrl.configs.objective_settings import ObjectiveConfig
from ttrl.errors import RunFolderError
from ttrl.exports.base_model import Base
from ttrl.exports.checkpoint import Chosen
from ttrl.facts import number
from ttrl.ready_models import READY_MODELS
from ttrl.report import phrases
from ttrl.report.figures import Figure, learning
from ttrl.report.page import css
from ttrl.run_folder.reader import held_out_metric, held_out_text, read_mapping
from ttrl.system.files import read_jsonl
from ttrl.text import counted

CURVE = "learning_curve.svg"
_OF_THIS_MACHINE = {
    "run", "model", "cache", "mirror", "joined_servers", "cluster", "server", "loggers",
    "requests_log", "sample_files", "join_timeout", "start_timeout", "num_threads",
}  # fmt: skip
"""Settings that tell others nothing, or too much."""
_COLOURS = {
    "f1": "blue", "f2": "orange", "f3": "green", "f4": "red", "f5": "purple", "f6": "grey",
}  # fmt: skip
_PATH = re.compile(r"(^|[\s'\"=:(])(~|\.{0,2}/|[A-Za-z]:\\|\w+://)|^[^\s]+/[^\s]+/")
_SVG = re.compile(r"<svg ([^>]*)>")


def write_card(
    chosen: Chosen, base: Base, repository: str, *, adapter: bool
) -> tuple[str, str | None]:
    """Return the card of a checkpoint (README.md), and its picture as SVG; None for a run with
    nothing to draw. repository: its name on the hub. adapter: whether it holds an adapter alone.
    """
    charts = learning(chosen.run)
    curve = None
    picture = ""
    if charts:
        curve = standalone(charts[0])
        picture = _picture(charts[0])
    sections = [
        _front_matter(base, adapter=adapter),
        f"# {repository.rsplit('/', 1)[-1]}",
        _opening(chosen, base, adapter=adapter),
        picture,
        _results(chosen),
        _use(chosen, base, repository, adapter=adapter),
        _training(chosen),
        _settings(chosen, base),
        _versions(chosen),
        _licence(base),
    ]
    return "\n\n".join(filter(None, sections)) + "\n", curve


def _front_matter(base: Base, *, adapter: bool) -> str:
    tags = ["ttrl", "reinforcement-learning", "grpo"]
    library, relation = "transformers", "finetune"
    if adapter:
        library, relation = "peft", "adapter"
        tags.append("lora")
    values: dict[str, Any] = {"library_name": library}
    if base.hub is not None:
        values["base_model"] = base.hub
        values["base_model_relation"] = relation
    if base.licence is not None:
        values["license"] = base.licence
    values["pipeline_tag"] = "text-generation"
    values["tags"] = tags
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _opening(chosen: Chosen, base: Base, *, adapter: bool) -> str:
    kind = "An adapter to" if adapter else "This is"
    start = f"`{base.name}`"
    if base.hub is not None:
        start = f"[{base.name}](https://huggingface.co/{base.hub})"
    return (
        f"{kind} {start}, trained by reinforcement learning with ttrl. "
        f"{phrases.summary(chosen.run)}\n\n"
        f"The weights are those after iteration {chosen.iteration} ({chosen.why})."
    )


def _picture(figure: Figure) -> str:
    keys = [
        f"{_COLOURS[css_class.split()[-1]]}: {name}" if "band" not in css_class else f"band: {name}"
        for css_class, name in figure.keys
    ]
    legend = f" ({'; '.join(keys)})" if keys else ""
    return f"![{figure.title}, by iteration]({CURVE})\n\n*{figure.title}{legend}. {figure.caption}*"


def _results(chosen: Chosen) -> str:
    metric = held_out_metric(chosen.run)
    rows = [row for row in chosen.run.rows if metric and number(metric.of(row)) is not None]
    if metric is None or not rows:
        return ""
    names = [metric.name, *sorted(set(rows[-1].validation or {}) - {metric.name})]
    if "reward" not in names:
        names.append("reward")
    lines = [
        "## Held-out results",
        "",
        "| metric | starting model | this checkpoint |",
        "|---|---|---|",
    ]
    first, last = rows[0], rows[-1]
    for name in names:
        if number(first.held_out(name)) is None or number(last.held_out(name)) is None:
            continue
        lines.append(f"| {name} | {held_out_text(first, name)} | {held_out_text(last, name)} |")
    lines += ["", "Brackets hold the 95% interval of the mean over other tasks of this kind."]
    return "\n".join(lines)


def _use(chosen: Chosen, base: Base, repository: str, *, adapter: bool) -> str:
    if adapter:
        loading = (
            "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained("{repository}")\n'
        )
        serving = f"vllm serve {base.hub} --enable-lora --lora-modules trained={repository}"
    else:
        loading = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{repository}")\n'
        )
        serving = f"vllm serve {repository}"
    question = _question(chosen) or "Your question"
    return f"""## Use

```python
{loading}tokenizer = AutoTokenizer.from_pretrained("{repository}")
messages = [{{"role": "user", "content": {question!r}}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
reply = model.generate(**inputs, max_new_tokens={chosen.config.max_tokens}, do_sample=False)
print(tokenizer.decode(reply[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

```
{serving}
```"""


def _first_samples(chosen: Chosen) -> Sequence[Mapping[str, Any]]:
    """Return some samples of the run's training."""
    for row in chosen.run.trained:
        path = chosen.run.iteration_folder(row.iteration) / "rollouts.jsonl"
        try:
            return [line for line in read_jsonl(path)[:50] if isinstance(line, dict)]
        except (OSError, ValueError, RunFolderError):
            continue
    return []


def _question(chosen: Chosen) -> str | None:
    """Return a short prompt of the run's tasks."""
    for sample in _first_samples(chosen):
        messages = sample.get("messages") or []
        content = messages[-1].get("content") if len(messages) == 1 else None
        if isinstance(content, str) and len(content) <= 300 and not _PATH.search(content):
            return content
    return None


def _training(chosen: Chosen) -> str:
    counts = read_mapping(chosen.run.folder / "tasks.json")
    kinds = sorted(
        {
            str(sample["task_id"]).split("/")[0]
            for sample in _first_samples(chosen)
            if "/" in str(sample.get("task_id", ""))
        }
    )
    lines = ["## Training", "", "| | |", "|---|---|"]
    parts = [
        f"{count['count']:,} {use}"
        for name, use in (("tasks", "for training"), ("validation_tasks", "held out"))
        if isinstance(count := counts.get(name), Mapping) and count.get("count")
    ]
    names = [f"`{kind}`" for kind in kinds]
    lines.append(f"| Tasks | {': '.join(filter(None, [', '.join(names), ', '.join(parts)]))} |")
    last = chosen.run.trained[-1]
    graded = ", ".join(["the reward", *(f"`{name}`" for name in last.metrics or {})])
    lines.append(f"| Graded | {graded} |")
    steps = sum(row.train.steps or 0 for row in chosen.run.trained)
    method = "GRPO"
    training = chosen.config.to_dict().get("training")
    if isinstance(training, Mapping):  # otherwise the name of a file
        method += f" with the objective `{training.get('objective', ObjectiveConfig.objective)}`"
    lines.append(f"| Method | {method}; {counted(steps, 'optimizer step')} |")
    lines += [f"| {name} | {value} |" for name, value in phrases.tiles(chosen.run)]
    return "\n".join(lines)


def public_settings(chosen: Chosen) -> dict[str, Any]:
    """Return the settings other than the defaults, without keys, paths and addresses."""
    usual = chosen.config.defaults()
    values = without_secrets(chosen.config.to_dict())
    return {
        name: value
        for name, value in values.items()
        if name not in _OF_THIS_MACHINE and value != usual.get(name) and not _tells(value)
    }


def _tells(value: Any) -> bool:
    """Tell whether a value holds a path or an address."""
    if isinstance(value, Mapping):
        return any(_tells(one) for one in value.values())
    if isinstance(value, list | tuple):
        return any(_tells(one) for one in value)
    return isinstance(value, str) and _PATH.search(value) is not None


def _settings(chosen: Chosen, base: Base) -> str:
    settings = public_settings(chosen)
    lines = ["## Settings", "", "Other than the defaults:", "", "| setting | value |", "|---|---|"]
    for name, value in settings.items():
        shown = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
        lines.append(f"| `{name}` | `{shown.removesuffix('...').strip()}` |")
    given = chosen.config.model
    model = given if given in READY_MODELS else base.hub or base.name
    whole = {"run": "runs/again", "model": model, **settings}
    lines += [
        "",
        "To train it again, save this as run.yaml, add your tasks, and run `ttrl train run.yaml`:",
        "",
        "```yaml",
        yaml.safe_dump(whole, sort_keys=False, allow_unicode=True).strip(),
        "tasks: tasks.py",
        "```",
    ]
    return "\n".join(lines)


def _versions(chosen: Chosen) -> str:
    known = chosen.run.environment
    packages = known.get("packages")
    versions = {"ttrl": known.get("ttrl"), "python": known.get("python")}
    versions |= packages if isinstance(packages, Mapping) else {}
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if not shown:
        return ""
    gpus = known.get("gpus") or []
    machine = ", ".join(sorted(set(map(str, gpus)))) or f"CPU ({known.get('system', 'unknown')})"
    count = f"{len(gpus)} × " if len(gpus) > 1 else ""
    return f"## Versions\n\n{shown}. Trained on {count}{machine}."


def _licence(base: Base) -> str:
    if base.licence is not None:
        return f"## License\n\n{base.licence}, as {base.name}."
    return (
        f"## License\n\nThe license of {base.name}: see its own page. The program behind this card "
        "does not know it."
    )


def standalone(figure: Figure) -> str:
    """Return a chart of the report as a file of its own, with the report's colours."""
    style = f"<style>{css()} svg text {{ fill: var(--muted); font: 13px sans-serif; }}</style>"
    background = '<rect width="100%" height="100%" fill="var(--card)"/>'
    opened = r'<svg xmlns="http://www.w3.org/2000/svg" width="810" height="405" \1>'
    return _SVG.sub(lambda tag: tag.expand(opened) + style + background, str(figure.chart), count=1)
