"""Pack files of rollouts without a run, by the loop's own pack phase: `ttrl pack`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.data.chat.rendering import ChatTemplate
from ttrl.errors import ModelFolderError, TokenizationError, UserError
from ttrl.facts import Groups, PackFacts
from ttrl.loop.pack_phase import packed_groups
from ttrl.loop.train import local_model
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.results import TaskResults
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import read_jsonl
from ttrl.text import counted, percent

_DEFAULT_TEMPERATURE: float = TrainConfig.defaults()["temperature"]
_COMPARED = 100
"""The most prompts to compare with the chat template's: each takes milliseconds."""


@dataclass(frozen=True, kw_only=True)
class PromptCheck:
    """Prompts as the server tokenized them, compared with the model's chat template."""

    compared: int = 0
    """Tasks with a prompt to compare: with token ids, and without an opening of the reply."""
    differing: int = 0
    first: str = ""
    """The id of the first task with another prompt."""


@dataclass(frozen=True, kw_only=True)
class PackedRollouts:
    """A written pack, and the facts about it."""

    out: Path
    facts: PackFacts
    positions: int
    """seq_len of all rows together."""
    samples: int
    """The samples in the rows."""
    saved: int
    """Prompt tokens saved by sharing."""
    prompts: PromptCheck
    digest: str | None
    """SHA-256 of the model's tokenizer.json; None without one."""
    temperature: float
    """Of all samples."""
    assumed: Sequence[str]
    """Samples of an unknown temperature, in words."""

    def lines(self) -> list[str]:
        """Return the facts in words, a line each."""
        facts = self.facts
        tokens = facts.row_tokens or 0
        made = [
            f"{self.out}: {facts.rows:,} rows, {tokens:,} tokens ({percent(self._fill)} of the "
            f"positions), {facts.trained_tokens:,} of them trained",
            f"groups    {_told(facts.groups)}",
            f"samples   {self.samples:,} packed" + _counted(facts.dropped or {}),
            f"prompts   {self.saved:,} tokens saved: a row stores a shared beginning once",
            f"template  {self._template()}",
        ]
        counts = facts.tokenization or {}
        if counts.get("mismatches"):
            made.append(
                f"warning   the ids of {counts['mismatches']:,} of {counts['turns']:,} replies "
                "decode to another text than the server's; training uses the ids"
            )
        if self.assumed:
            made.append(
                f"warning   nothing says at which temperature {' and '.join(self.assumed)} were "
                f"sampled; {self.temperature:g} is assumed (--set temperature=… states another)"
            )
        if self.digest is None:
            made.append("warning   the model has no tokenizer.json, so the pack holds no digest")
        else:
            made.append(f"tokenizer {self.digest[:12]}; the recipe refuses a model with another")
        return made

    @property
    def _fill(self) -> float:
        return (self.facts.row_tokens or 0) / self.positions

    def _template(self) -> str:
        prompts = self.prompts
        if not prompts.compared:
            return "not compared: no chat template, or no prompts with token ids"
        if not prompts.differing:
            return f"makes the same ids for the prompts of all {prompts.compared:,} compared tasks"
        return (
            f"makes other ids for the prompts of {prompts.differing:,} of {prompts.compared:,} "
            f"compared tasks, first {prompts.first!r}; training uses the server's. If you sampled "
            "with tools, another template or template arguments, this is expected"
        )


def read_rollouts(file: Path) -> TaskResults:
    """Read the groups of a file in the form of rollouts.jsonl. Raises UserError, naming file and
    line.
    """
    if not file.is_file():
        raise UserError(
            f"{file} is no file; give rollouts.jsonl of a run's iteration, or the lines of "
            "TaskResults.to_jsonl_lines()"
        )
    try:
        rows = read_jsonl(file, appended=False)
    except ValueError as error:
        raise UserError(f"{error}; the file is damaged or of another kind") from error
    samples = []
    for number, row in enumerate(rows, 1):
        try:
            samples.append(Sample.from_json(row))
        except (AttributeError, KeyError, TypeError) as error:
            said = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{file}, sample {number}: this is no sample ({said}); each line needs at least "
                "task_id, sample, messages and reward"
            ) from error
    return TaskResults.from_samples(samples)


def _temperature(samples: Mapping[Path, int], stated: float | None) -> tuple[float, list[str]]:
    """Return the sampling temperature of all files: that of their runs, or else the stated one; and
    the samples without either, for which it is assumed. Raises UserError for several temperatures.

    samples: the number of samples in each file.
    """
    places: dict[float, list[str]] = {}
    unknown = []
    for file, count in samples.items():
        place = f"{counted(count, 'sample')} in {file}"
        temperature = _recorded_temperature(file)
        if temperature is not None:
            places.setdefault(temperature, []).append(place)
        elif stated is None:
            unknown.append(place)
    if stated is not None and stated not in places:
        places[stated] = ["--set or --config"]
    if len(places) > 1:
        told = "; ".join(f"{value:g} for {' and '.join(at)}" for value, at in places.items())
        raise UserError(
            f"the trainer needs one sampling temperature, and there are several: {told}. Pack "
            "files of each temperature apart, and leave --set temperature out for files of a run"
        )
    return next(iter(places), _DEFAULT_TEMPERATURE), unknown


def _recorded_temperature(file: Path) -> float | None:
    """Return the temperature in the settings of the run with this rollouts.jsonl; None if it is no
    run's.
    """
    folders = file.absolute().parents
    if file.name != "rollouts.jsonl" or len(folders) < 3 or folders[1].name != "iterations":
        return None
    return RunFolder(folders[2]).config().get("temperature")


def pack_files(files: Sequence[Path], config: TrainConfig, out: Path) -> PackedRollouts:
    """Pack rollouts for `tune run ttrl/grpo_recipe`, by the settings of a run: advantages, rows,
    aggregation. `config.model` is the sampling model.

    Raises UserError if the files hold no samples, no group has a signal, another model sampled
    them, or they have several temperatures.
    """
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is no folder; create it, or write elsewhere with --out")
    if any(file.exists() and out.exists() and file.samefile(out) for file in files):
        raise UserError(f"--out is {out}, one of the rollouts; give the pack a name of its own")
    groups: list[TaskResult] = []
    samples: dict[Path, int] = {}
    for file in files:
        read = read_rollouts(file)
        groups += read
        samples[file] = sum(len(group.samples) for group in read)
    if not groups:
        raise UserError(f"{', '.join(map(str, files))}: no samples; sample first")
    temperature, assumed = _temperature(samples, config.given().get("temperature"))
    model = local_model(config.model, chat_template=False)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    if config.chat_template is not None:
        tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
    prompts = _compare_prompts(groups, tokenizer)
    packed, facts = packed_groups(groups, config, model, tokenizer)
    if packed is None:
        raise UserError(
            f"nothing to pack: {_told(facts.groups)}. Sample more tasks, or more samples of each"
        )
    _check_model(facts, prompts, model)
    packed.save(out)
    return PackedRollouts(
        out=out,
        facts=facts,
        positions=packed.tokens.numel(),
        samples=len(packed.samples),
        saved=packed.num_saved,
        prompts=prompts,
        digest=packed.metadata.get("tokenizer"),
        temperature=temperature,
        assumed=assumed,
    )


def _compare_prompts(groups: Sequence[TaskResult], tokenizer: Any) -> PromptCheck:
    """Render prompts by the model's chat template, and compare their ids with the server's."""
    try:
        template = ChatTemplate(tokenizer)
    except ModelFolderError:  # a base model: ids need no template
        return PromptCheck()
    compared = 0
    differing: list[str] = []
    for group in groups:
        sample = group.samples[0]
        if sample.prompt_token_ids is None or sample.opening:
            continue
        compared += 1
        try:
            text = template.render(template.prepared(sample.messages), answer_next=True)
        except (TokenizationError, ModelFolderError):  # it refuses them; the server's did not
            differing.append(group.task_id)
        else:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if list(ids) != sample.prompt_token_ids:
                differing.append(group.task_id)
        if compared == _COMPARED:
            break
    first = differing[0] if differing else ""
    return PromptCheck(compared=compared, differing=len(differing), first=first)


def _check_model(facts: PackFacts, prompts: PromptCheck, model: Path) -> None:
    """Raise UserError if another tokenizer must have made the ids."""
    counts = facts.tokenization or {}
    turns = counts.get("turns", 0)
    mismatches = counts.get("mismatches", 0)
    none_is_same = prompts.differing == prompts.compared
    if none_is_same and mismatches > turns / 2:
        raise UserError(
            f"the ids of {mismatches:,} of {turns:,} replies mean another text to the tokenizer of "
            f"{model}, and its chat template makes none of the {prompts.compared:,} compared "
            "prompts: another model sampled these rollouts. Give its folder with --model"
        )


def _told(groups: Groups) -> str:
    """Return the counts of groups with and without a signal."""
    reasons = {
        "all right": groups.all_right,
        "all wrong": groups.all_wrong,
        "equal otherwise": groups.other_equal,
        "fewer than two graded samples": groups.too_few,
    }
    said = f"{groups.total:,} in all, {groups.no_signal:,} without a signal"
    return said + _counted(reasons)


def _counted(counts: dict[str, int]) -> str:
    """Return the counts above zero, in brackets."""
    told = [f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count]
    if not told:
        return ""
    return f" ({', '.join(told)})"
