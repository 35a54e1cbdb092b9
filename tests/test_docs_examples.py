"""The blocks of the docs: Python runs, commands are understood, settings exist, or a comment says
why not.

A comment above a block, `<!-- not run: a reason -->`, exempts it from running, not from being well
formed. The site shows the reason below the block. Blocks marked `text` illustrate.
"""

import ast
import asyncio
import dataclasses
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jinja2
import pytest
import yaml

import ttrl
from ttrl import GRPOConfig, TrainConfig
from ttrl.cli.commands import make_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- not run: (.*?) -->\n)?^(```+)([^\n]*)\n(.*?)^\2$", re.DOTALL | re.MULTILINE
)
NAMES = {name: getattr(ttrl, name) for name in ttrl.__all__}
PROGRAMS = {
    *("cd", "export", "git", "hf", "llama-cli", "lm_eval", "ollama"),
    *("pip", "pre-commit", "ray", "source", "tune", "uv"),
}
"""Programs of others, whose arguments are not checked here."""


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    not_run: str

    @property
    def name(self) -> str:
        """Return the place of the block, for the names of tests."""
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start(2)) + 1
            name = page.relative_to(ROOT).as_posix()
            yield Block(name, line, found[3], found[4], found[1] or "")


BLOCKS = list(blocks())
PYTHON = [block for block in BLOCKS if block.language == "python"]


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    """A block of another language would be checked by nobody."""
    known = {"", "jinja", "python", "text", "toml", "yaml"}
    assert {block.name: block.language for block in BLOCKS if block.language not in known} == {}
    assert len(PYTHON) > 30


def test_reasons_stand_above_blocks_and_say_something() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        reasons = [block.not_run for block in BLOCKS if page == ROOT / block.page]
        written = re.findall(r"^<!-- not run:", text, re.MULTILINE)
        assert len(written) == len([one for one in reasons if one]), page
        assert all(len(one) > 15 for one in reasons if one), page


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_is_python(block: Block) -> None:
    """Also where it is not run. Names of ttrl that it imports exist, and its calls fit them."""
    tree = compile(
        block.text, block.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    )
    known = dict(NAMES)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ttrl":
            exec(compile(ast.Module([node], []), block.name, "exec"), known)
    for node in ast.walk(tree):
        called = known.get(getattr(node.func, "id", "")) if isinstance(node, ast.Call) else None
        if called is None:
            continue
        spread = [*node.args, *(one.value for one in node.keywords if one.arg is None)]
        words = {one.arg for one in node.keywords if one.arg}
        accepted = inspect.signature(called).parameters.values()
        if not any(one.kind is one.VAR_KEYWORD for one in accepted):
            assert words <= {one.name for one in accepted}, ast.unparse(node)
        if not any(isinstance(one, ast.Starred | ast.Name | ast.Constant) for one in spread):
            inspect.signature(called).bind_partial(*node.args, **dict.fromkeys(words))


class Fragments(ast.NodeTransformer):
    """Fills in `...` of an example, where it stands for the rest of a run's settings."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if getattr(node.func, "id", "") == "TrainConfig" and ast.unparse(node.args) == "...":
            given = {one.arg for one in node.keywords}
            rest = {"run": "runs/example", "model": "smollm2-135m", "iterations": 1}
            node.args = []
            node.keywords += [
                ast.keyword(name, ast.Constant(value))
                for name, value in rest.items()
                if name not in given
            ]
        return node


@pytest.mark.parametrize(
    "block", [block for block in PYTHON if not block.not_run], ids=lambda block: block.name
)
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, with the public names at hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    monkeypatch.setenv("TTRL_SERVER_KEY", "a key")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "tools.jinja").write_text("{{ messages[0]['content'] }}")
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    # Not "__main__": no training starts.
    names = NAMES | {"__name__": "example", "messages": messages}
    tree = compile(block.text, block.name, "exec", flags | ast.PyCF_ONLY_AST)
    tree = ast.fix_missing_locations(Fragments().visit(tree))
    running = eval(compile(tree, block.name, "exec", flags), names)
    if inspect.iscoroutine(running):
        asyncio.run(running)


def lines_of(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command of a block; in illustrations, those after a prompt."""
    for line in block.text.replace("\\\n", " ").split("\n"):
        prompt = re.match(r"[\w-]+\$ ", line)
        if block.language == "text":
            if not prompt:
                continue
        elif block.language:
            return
        words = shlex.split(line.removeprefix(prompt[0] if prompt else ""), comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words:
            yield words


COMMANDS = [(block, words) for block in BLOCKS if not block.not_run for words in lines_of(block)]


def named(command: tuple[Block, list[str]]) -> str:
    return f"{command[0].name} {' '.join(command[1][:3])}"


@pytest.mark.parametrize(
    ("block", "words"),
    COMMANDS,
    ids=[f"{number}-{named(one)}" for number, one in enumerate(COMMANDS)],
)
def test_commands_are_understood(
    block: Block, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By ttrl's own parser, whole; scripts exist, and so do the Makefile's targets."""
    program = words[0].rpartition("/")[2]
    if program == "ttrl":
        try:
            arguments, others = make_parser().parse_known_args(words[1:])
        except SystemExit:
            pytest.fail(f"{' '.join(words)}: {capsys.readouterr().err}")
        assert not others or getattr(arguments, "takes_others", False), others
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        wanted = {one for one in words[1:] if "=" not in one}
        assert wanted <= set(targets)
    elif program in {"python", "python3"}:
        script = words[1]
        ours = script.startswith(("recipes/", "tools/", "tests/"))
        assert not ours or (ROOT / script).is_file(), script
    else:
        assert program in PROGRAMS, f"mark the block `text` if it shows no commands: {words}"


SETTINGS = {
    field.name for config in (TrainConfig, GRPOConfig) for field in dataclasses.fields(config)
}


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.language in {"yaml", "toml", "jinja"}],
    ids=lambda block: block.name,
)
def test_settings_exist(block: Block) -> None:
    """In YAML, each is one of a run or of its recipe; everything else is well formed."""
    if block.language == "toml":
        assert tomllib.loads(block.text)
    elif block.language == "jinja":
        jinja2.Environment(autoescape=True).parse(block.text)
    else:
        given = yaml.safe_load(block.text)
        assert given
        if not block.not_run:
            assert set(given) <= SETTINGS | {"tasks", "validation_tasks"}
            assert set(given.get("training", {})) <= SETTINGS
