"""The docs: links within them lead somewhere, and the page of settings is what the source says."""

import argparse
import ast
import asyncio
import contextlib
import dataclasses
import doctest
import importlib
import inspect
import io
import json
import math
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import picture_report
import pytest
import yaml
from support.chat_server import ChatHandler, choice, completion, threaded
from support.readme import first_task
from transformers import AutoTokenizer

import ttrl
from ttrl import PackedTensors, TrainConfig, plan
from ttrl.cli.commands import SUBCOMMANDS, main
from ttrl.cli.recipe_script import script_arguments
from ttrl.configs import GRPOConfig
from ttrl.families.table import COMPOSITES, OWN_DECODERS
from ttrl.ready_models import READY_MODELS
from ttrl.system.files import read_jsonl
from ttrl.tasks.reference import load_tasks
from ttrl.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
DOCS = ROOT / "docs"
GENERATED = {DOCS / "reference" / "settings.md", DOCS / "reference" / "hardware.md"}
HAND_WRITTEN = {page for page in PAGES if page.is_relative_to(DOCS)} - GENERATED


def name_of(page: Path) -> str:
    """Return a page's path from the root."""
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and (
            not target.exists() or (anchor and anchor not in anchors(target))
        ):
            dead.append(link)
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_as_short_as_those_of_the_code(page: Path) -> None:
    """Tables and examples may be wider."""
    assert not [
        line
        for line in prose(page).split("\n")
        if len(line) > 100 and not line.startswith(("|", "    "))
    ]


@pytest.mark.parametrize("page", sorted(HAND_WRITTEN), ids=name_of)
def test_a_page_answers_one_question(page: Path) -> None:
    """A page of more than 150 lines answers several, and is split."""
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)#\s]+)", index))
    pages = {page.relative_to(DOCS).as_posix() for page in HAND_WRITTEN | GENERATED}
    assert pages - linked == {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_nothing_is_hidden_as_a_tag(page: Path) -> None:
    """Outside of code, a page shows <answer> as nothing at all."""
    assert not re.findall(r"</?[A-Za-z]\w*>?", re.sub(r"`[^`]*`", "", prose(page)))


SETTINGS = {
    field.name for config in (TrainConfig, GRPOConfig) for field in dataclasses.fields(config)
}


def options_of_scripts() -> set[str]:
    """Return the options of recipes; `ttrl train SCRIPT` passes them on."""
    given: dict[str, Any] = {"run": "r", "iterations": 1, "model": "m", "data": ""}
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit):
        script_arguments(None, **given, presets={"one": {}}, argv=["--help"])
    return set(re.findall(r"--[a-z-]+", said.getvalue()))


SCRIPTS = options_of_scripts()


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    nested = [
        one
        for action in parser._actions
        if isinstance(action.choices, dict)
        for one in action.choices.values()
    ]
    return set(parser._option_string_actions).union(*map(options_of, nested))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_named_exist(page: Path) -> None:
    """In code: subcommands of ttrl and their options, scripts, settings given with --set."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [
        line.partition("#")[0]
        for language, block in blocks
        if not language
        for line in block.split("\n")
    ]
    wrong = []
    for line in lines + re.findall(r"`([^`]+)`", prose(page)):
        wrong += [
            name
            for name in re.findall(r"\b(?:recipes|tools)/[a-z_]+\.py", line)
            if not (ROOT / name).exists()
        ]
        if (found := re.match(r"(?:\.venv/bin/)?ttrl ([a-z]+)\b(.*)", line, re.DOTALL)) and found[
            1
        ] not in SUBCOMMANDS:
            wrong.append(found[0])
        elif found:
            SUBCOMMANDS[found[1]][0](parser := argparse.ArgumentParser())
            # These hand further options to scripts.
            hands_on = found[1] in ("train", "sweep", "plan")
            known = options_of(parser) | (SCRIPTS if hands_on else set())
            wrong += [
                f"{found[1]} {one}" for one in set(re.findall(r"--[a-z-]+", found[2])) - known
            ]
        wrong += set(re.findall(r"([a-z_]+)=", line.partition("--set ")[2])) - SETTINGS
    assert not wrong


def test_the_first_task_of_the_readme_tells_right_from_wrong() -> None:
    """That a real model learns it: tests/e2e/test_real_model.py."""
    task = first_task()(41, 17)
    assert task.messages[0]["content"].startswith("What is 41 + 17?")
    expected = {
        "41 + 17 = 58": 1.0,
        "58": 1.0,
        "The sum is 58.": 1.0,
        "58, or 59": 0.1,
        "I do not know.": 0.0,
        "": 0.0,
    }
    for text, reward in expected.items():
        choice = types.SimpleNamespace(message=types.SimpleNamespace(content=text))
        assert task.grader(choice) == (reward, {"right": float(reward == 1)}), text


def test_the_example_of_a_tool_is_a_file_of_tasks(tmp_path: Path) -> None:
    """As docs/how-to/conversations.md names it, with a conversation in which the model calls it."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/how-to/conversations.md").read_text(), re.DOTALL
    )
    (code,) = (block for block in blocks if "MULTIPLY" in block)
    (tmp_path / "tools.py").write_text(code)
    tasks = load_tasks(str(tmp_path / "tools.py"), 4)
    assert len({task.id for task in tasks}) == 4

    def reply(content: str | None, *arguments: str) -> types.SimpleNamespace:
        calls = [
            types.SimpleNamespace(id="c", function=types.SimpleNamespace(arguments=text))
            for text in arguments
        ]
        return types.SimpleNamespace(
            message=types.SimpleNamespace(content=content, tool_calls=calls)
        )

    replies, told = [reply(None, '{"a": 20, "b": 30}', "{"), reply("It is 1,200.")], []

    async def chat(new: object = None, **options: object) -> types.SimpleNamespace:
        told.append(new)
        return replies.pop(0)

    asyncio.run(tasks[0].rollout(chat))
    assert [result["content"][:6] for result in told[1]] == ["600", "error:"] and not replies
    products = load_tasks(str(tmp_path / "tools.py"), 211)
    # 20 * 30, 30 * 40.
    assert [products[number].grader(reply("It is 1,200.")) for number in (0, 210)] == [0.0, 1.0]


def test_the_example_of_judges_makes_tasks() -> None:
    """And asks no judge about a reply that is not well-formed."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/how-to/judges.md").read_text(), re.DOTALL
    )
    (code,) = (block for block in blocks if "Ranking" in block)
    names: dict[str, object] = {}
    exec(compile(code, "docs/how-to/judges.md", "exec"), names)
    reply = types.SimpleNamespace(message=types.SimpleNamespace(content="No."), token_ids=[1] * 250)
    grade = names["marked"].grader(reply)
    assert grade.reward == pytest.approx(-0.05) and grade.metrics["quality/gate"] == 0.0
    assert names["compared"].grader is None and names["compared"].group_grader.orders == 1


@pytest.fixture
def stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], ModuleType]]:
    """`stand_in(name, code)`: a module of that name, for a package that is not installed."""
    made: list[str] = []

    def write(name: str, code: str) -> ModuleType:
        assert name not in sys.modules
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(tmp_path)
        made.append(name)
        return importlib.import_module(name)

    yield write
    for name in made:
        del sys.modules[name]


def test_the_example_of_a_game_reads_its_moves(stand_in: Callable[[str, str], ModuleType]) -> None:
    """Without Gymnasium, which is none of ours; what it would make is not played."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/how-to/conversations.md").read_text(), re.DOTALL
    )
    (code,) = (block for block in blocks if "gym_tasks" in block)
    fake = stand_in(
        "gymnasium",
        """
        from types import SimpleNamespace

        made = []

        def make(name, **options):
            made.append(options)
            return SimpleNamespace(reset=len, step=len)
        """,
    )
    names: dict[str, object] = {}
    exec(compile(code, "docs/how-to/conversations.md", "exec"), names)
    assert (
        fake.made == [{"render_mode": "ansi", "is_slippery": False}] and len(names["tasks"]) == 100
    )
    move = names["tasks"][0].rollout.game.action
    assert [move("I go down"), move("Up")] == [1, 3]
    with pytest.raises(ValueError):
        move("I go down.")


def test_the_example_of_trl_is_graded(tmp_path: Path) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/how-to/trl.md").read_text(), re.DOTALL
    )
    (code,) = (block for block in blocks if "trl_tasks" in block)
    (tmp_path / "made_for_trl.py").write_text(code)
    task = load_tasks(str(tmp_path / "made_for_trl.py"), 22)[21]
    replies = {
        "It is 42.": (1.1, {"right": 1.0, "short": 1.0}),
        "42" + "!" * 200: (1.0, {"right": 1.0}),
    }
    for text, expected in replies.items():
        output = task.grader(types.SimpleNamespace(message=types.SimpleNamespace(content=text)))
        assert asyncio.run(output) == expected


def loop_of_ones_own(iterations: int) -> str:
    """Return the script in docs/how-to/recipe_alone.md."""
    page = (ROOT / "docs/how-to/recipe_alone.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = (block for block in blocks if "ITERATIONS = 2" in block)
    return code.replace("ITERATIONS = 2", f"ITERATIONS = {iterations}")


class SortsSometimes(ChatHandler):
    """Sorts the letters of each question's last word for every second sample."""

    tokenizer: ClassVar[Any]

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        word = re.findall(r"[a-z]+", body["messages"][-1]["content"])[-1]
        texts = ("".join(sorted(word)), word)
        answers = [self.answer(number, texts[number % 2]) for number in range(body["n"])]
        self.send(completion(answers).body)

    def answer(self, number: int, text: str) -> dict[str, Any]:
        """Return a choice with the ids of the served model's tokenizer."""
        ids = [
            *self.tokenizer.encode(text, add_special_tokens=False),
            self.tokenizer.eos_token_id,
        ]
        content = [
            {"token": self.tokenizer.decode([one]), "logprob": -0.5, "bytes": None}
            | {"top_logprobs": []}
            for one in ids
        ]
        return choice(number, text, token_ids=ids, logprobs={"content": content})


class StandIn:
    """In place of a vLLM server."""

    def __init__(self, model: Path, **settings: object) -> None:
        assert (model / "config.json").is_file() and settings["dtype"] == "fp32"
        self._stack = contextlib.ExitStack()
        SortsSometimes.tokenizer = AutoTokenizer.from_pretrained(model)

    def __enter__(self) -> "StandIn":
        self.address = self._stack.enter_context(threaded(SortsSometimes))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def endpoint(self) -> str:
        return self.address


@pytest.mark.e2e
def test_the_loop_of_ones_own_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One iteration, with a stand-in for vLLM and the real trainer."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "models" / "tiny")
    code = loop_of_ones_own(1).replace("from ttrl.server.vllm import VLLMServer\n", "")
    names = {"__name__": "__main__", "VLLMServer": StandIn}
    exec(compile(code, "docs/how-to/recipe_alone.md", "exec"), names)
    said = capsys.readouterr().out
    assert "128 samples of 16 tasks" in said
    assert said.endswith(f"{tmp_path}/out/1/checkpoint\n")
    (line,) = read_jsonl(tmp_path / "out" / "1" / "train.jsonl")
    assert line["grad_norm"] > 0 and line["trained_tokens"] > 128
    packed = PackedTensors.load(tmp_path / "out" / "1" / "packed.safetensors")
    # One word is sorted already, so its group has no signal.
    assert len(packed.samples) == 120 and "tokenizer" in packed.metadata


@pytest.mark.e2e
@pytest.mark.long
def test_the_loop_of_ones_own_goes_on_from_its_own_policy(tmp_path: Path) -> None:
    """Two iterations as the page has them, with real servers.

    Long: only this serves the checkpoint of such a loop. One iteration:
    test_the_loop_of_ones_own_trains.
    """
    make_tiny_model(tmp_path / "models" / "tiny")
    (tmp_path / "loop.py").write_text(loop_of_ones_own(2))
    command = [sys.executable, "loop.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = [read_jsonl(tmp_path / "out" / name / "train.jsonl") for name in "12"]
    assert [line["global_step"] for lines in steps for line in lines] == [1, 2]
    # The second one compares with what the first one's checkpoint sampled.
    assert abs(steps[1][0]["sampler_trainer"]["mean"]) < 1e-3


NAMES = {name: getattr(ttrl, name) for name in ttrl.__all__ if name != "__version__"}
SERVER = "http://127.0.0.1:8000/v1"
NOT_RUN = {
    "replay": "it needs the folder of a run: tests/replays/test_replay.py",
    "train": "it takes minutes: tests/e2e/test_real_model.py trains the README's first task",
    "tune": "it needs a model and a pack, and starts a trainer: tests/launch/test_tune.py",
}
SCRIPTS_IN_DOCSTRINGS = {"run_recipe": ["--check", "--model", "tiny"], "script_arguments": []}


class Sums(ChatHandler):
    """Answers each question with the sum of its numbers, with token ids as vLLM returns them."""

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        numbers = re.findall(r"\d+", body["messages"][-1]["content"])
        text = str(sum(map(int, numbers)))
        self.send(completion([choice(number, text) for number in range(body.get("n") or 1)]).body)


def example_of(name: str) -> str:
    """Return the example of a docstring: its last indented block."""
    return re.findall(r"(?:^ {4}.*\n|^\n)+", f"{inspect.getdoc(NAMES[name])}\n", re.MULTILINE)[-1]


@pytest.mark.parametrize(
    "name", sorted(NAMES.keys() - NOT_RUN.keys() - SCRIPTS_IN_DOCSTRINGS.keys())
)
def test_examples_of_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in at the examples' server address."""
    monkeypatch.chdir(tmp_path)
    known = NAMES | {"asyncio": asyncio, "math": math}
    with threaded(Sums) as address:
        text = (inspect.getdoc(NAMES[name]) or "").replace(SERVER, address)
        example = doctest.DocTestParser().get_doctest(text, known, name, None, 0)
        assert example.examples
        said: list[str] = []
        result = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not result.failed, "".join(said)


@pytest.mark.parametrize("name", sorted(NOT_RUN))
def test_examples_that_are_not_run_call_their_function_rightly(name: str) -> None:
    """Each with arguments of its signature."""
    (call,) = (
        node
        for node in ast.walk(ast.parse(inspect.cleandoc(example_of(name))))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == name
    )
    words = {word.arg: None for word in call.keywords}
    inspect.signature(NAMES[name]).bind(*call.args, **words)


@pytest.mark.parametrize("name", sorted(SCRIPTS_IN_DOCSTRINGS))
def test_scripts_in_docstrings(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    code = inspect.cleandoc(example_of(name))
    used = sorted(one for one in NAMES if re.search(rf"\b{one}\(", code))
    script.write_text(f"from ttrl import {', '.join(used)}\n\n{code}\n", encoding="utf-8")
    command = [sys.executable, str(script), *SCRIPTS_IN_DOCSTRINGS[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = {"run_recipe": "84 tasks", "script_arguments": "runs/sums smollm2-135m 20"}
    assert expected[name] in done.stdout


@pytest.mark.long(but=["block0"])
@pytest.mark.parametrize(
    "block",
    re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/start/machines.md").read_text(), re.DOTALL),
)
def test_configs_for_machines_fit_them(block: str, tmp_path: Path) -> None:
    """By the plan: on the GPU that their first line names, and the one without a GPU here.

    Long for the later blocks: each only fits the machine that it names.
    """
    config = TrainConfig(**yaml.safe_load(block))
    assert config.problems() == []
    for_gpu = re.match(r"# planned for: (.*)\n", block)
    if for_gpu is None:
        assert config.model in READY_MODELS
        return
    name = config.model.removeprefix("Qwen/").removesuffix("-Instruct").lower().replace("-", "_")
    shape = json.loads((ROOT / "ttrl" / "costs" / "architectures.json").read_text())[name]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    made = plan(dataclasses.replace(config, model=str(tmp_path)), gpu=for_gpu[1])
    assert not [warning for warning in made.warnings if "fit" in warning], str(made)
    assert made.memory.trainer + made.memory.left_by_server < 0.9 * made.machine.memory
    assert made.memory.peak < made.machine.memory  # of a server's budget, nothing is estimated


def test_the_page_of_settings_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert page == capsys.readouterr().out, (
        "make it again: ttrl config > docs/reference/settings.md"
    )


# README.md


README = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURES = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)


def section(heading: str) -> str:
    """Return what README.md says below a heading."""
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
    return text


def tables(text: str) -> list[list[list[str]]]:
    """Return the tables of a page: rows of cells, the heading first."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    rows = [[line.strip("|").split("|") for line in block.splitlines()] for block in blocks]
    return [[[cell.strip() for cell in row] for row in [table[0], *table[2:]]] for table in rows]


def test_the_readme_names_every_model_that_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """And no other; `ttrl models` names the same."""
    models, _ = tables(section("Models and hardware"))
    named = [name for row in models[1:] for name in re.findall(r"`(\w+)`", row[1])]
    assert sorted(named) == sorted([*OWN_DECODERS, *COMPOSITES])
    assert main(["models"]) == 0
    assert set(named) <= set(re.findall(r"\w+", capsys.readouterr().out))


def largest_that_fits(table: list[list[str]], machine: str) -> str:
    """Return the largest model in a column of a table of docs/reference/what_fits.md that is not refused."""
    column = table[0].index(machine)
    return [row[0] for row in table[1:] if row[column] != "refused"][-1]


def test_the_readmes_sizes_for_gpus_are_those_of_the_page_of_machines() -> None:
    page = (ROOT / "docs" / "reference" / "what_fits.md").read_text(encoding="utf-8")
    planned = tables(page.partition("<!-- tables -->")[2])
    _, machines = tables(section("Models and hardware"))
    rows = [row for row in machines[1:] if "GB" in row[0]]
    assert len(rows) == 3
    for machine, whole, adapters, _ in rows:
        assert whole == largest_that_fits(planned[0], machine)
        assert adapters == largest_that_fits(planned[1], machine)


def test_the_readme_claims_runs_on_measured_gpus_only() -> None:
    """Those with a section in docs/reference/hardware.md."""
    page = (ROOT / "docs" / "reference" / "hardware.md").read_text(encoding="utf-8")
    measured = set(re.findall(r"^## NVIDIA (\w+)", page, re.MULTILINE))
    card = r"\b(?:[ABHLTV]\d+S?|GH200|GB\d00|RTX \d+)\b"
    claimed = set(re.findall(card, section("Models and hardware")))
    assert measured and claimed == measured


def test_the_readmes_pictures_are_made_by_the_tool_and_load_quickly() -> None:
    made = {f"docs/{one.name}.png" for one in picture_report.readme_pictures(Path(), Path())}
    assert sorted(PICTURES) == sorted(made)
    for name in PICTURES:
        content = (ROOT / name).read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n"), name
        assert len(content) <= picture_report.README_BYTES, name
