"""Rules of the house: rooms and what they import, sizes of files, names in docs, and sys.modules of
real processes.
"""

import ast
import importlib.util
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import grimp
import pytest
import rooms_contract
from importlinter.domain.contract import InvalidContractOptions

import ttrl

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = PYPROJECT["tool"]["importlinter"]["contracts"]
(TABLE,) = [contract["table"] for contract in CONTRACTS if "table" in contract]
SOURCES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "ttrl").rglob("*.py"))
}
MODULES = {
    ".".join(path.with_suffix("").parts).removesuffix(".__init__"): text
    for path, text in SOURCES.items()
}


@pytest.mark.long
def test_imports_keep_the_contracts() -> None:
    """Long: it is what `make lint` does, with the same tool."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, "\n" + done.stdout


def check_import(
    importer: str, imported: str, table: dict[str, list[str]] = TABLE, *more: tuple[str, str]
) -> list[str]:
    """Return the problems of a tree with this import, in line 1."""
    graph = grimp.ImportGraph()
    for name in (importer, imported):
        outside = not name.startswith("ttrl")
        graph.add_module(name, is_squashed=outside)
        while "." in name:
            name = name.rpartition(".")[0]
            graph.add_module(name)
    for one, other in [(importer, imported), *more]:
        graph.add_import(importer=one, imported=other, line_number=1, line_contents="")
    options = {"table": table, "everywhere": ["errors", "system"]}
    contract = rooms_contract.RoomsContract("rooms", {}, options)
    problems: list[str] = contract.check(graph, verbose=False).metadata["problems"]
    return [problem.partition(": ")[2] for problem in problems]


@pytest.mark.parametrize(
    ("importer", "imported", "problem"),
    [
        ("ttrl.rollouts.a", "torch", "rollouts must not import torch"),
        ("ttrl.loop.a", "torchtune", "loop must not import torchtune"),
        ("ttrl.data.a", "ttrl.rollouts.b", "data must not import rollouts"),
        ("ttrl.data.a", "ttrl.grpo_recipe", "data must not import grpo_recipe"),
        ("ttrl.data.chat.a", "ttrl.data.packing.b", "data.chat must not import data.packing"),
        ("ttrl.data.packing.a", "ttrl.data.b", "data.packing must not import data"),
        ("ttrl.system.a", "ttrl.records", "system must not import records"),
        ("ttrl.errors", "ttrl.system.a", "errors must not import system"),
        ("ttrl.new_room.a", "os", ""),
        ("ttrl.new_room.a", "torch", "new_room has no line in the table of pyproject.toml"),
        ("ttrl.data.a", "ttrl", "import public names from the file that defines them"),
        ("ttrl", "torch", "importing ttrl must cost nothing"),
        ("ttrl.rollouts.a", "openai", ""),
        ("ttrl.rollouts.a", "ttrl.tasks.task", ""),
        ("ttrl.rollouts.a", "ttrl.system.files", ""),
        ("ttrl.data.a", "ttrl.data.b", ""),
        ("ttrl", "ttrl.tasks.task", ""),
    ],
)
def test_an_import_is_looked_up_in_the_table(importer: str, imported: str, problem: str) -> None:
    assert check_import(importer, imported) == [problem] * bool(problem)


def test_a_file_and_its_package_make_a_cycle() -> None:
    """The contract of siblings does not see it."""
    assert check_import("ttrl.data.a", "ttrl.data") == []
    cycle = ("ttrl.data", "ttrl.data.a")
    assert check_import("ttrl.data.a", "ttrl.data", TABLE, cycle) == [
        "a cycle through the package of this file"
    ]


def test_rooms_make_no_cycle() -> None:
    with pytest.raises(InvalidContractOptions, match="cycle of rooms a → b → a"):
        check_import("ttrl.a.x", "os", {"a": ["b"], "b": ["a"]})


def test_each_folder_is_a_package() -> None:
    """The contracts see no other."""
    for path in SOURCES:
        assert (ROOT / path).with_name("__init__.py").exists(), path


DISTRIBUTIONS = {
    "IPython": "ipython",
    "yaml": "pyyaml",
    "pynvml": "nvidia-ml-py",
    "pysat": "python-sat",
    "opentelemetry": "opentelemetry-sdk",
}
ELSEWHERE = {"inspect_ai", "verifiers", "swanlab"}
"""Of another environment: ttrl.agents.agent_worker imports them, and swanlab wants an older
protobuf."""


def test_the_table_names_declared_packages() -> None:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    asked = [text for extra, texts in extras.items() if extra != "dev" for text in texts]
    declared = set()
    for text in [*project["dependencies"], *asked]:
        name = re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0]
        declared.add(re.sub(r"[-_.]+", "-", name).lower())
    packages = {name for names in TABLE.values() for name in names} - TABLE.keys() - ELSEWHERE
    named = {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in packages}
    assert named - declared == set()


def room_of(parts: Sequence[str]) -> str:
    """Return the room of a file of ttrl/ or of a module, by the parts of its name."""
    return ".".join(parts[1:-1]) or parts[-1]


def test_modules_imported_by_name_are_in_the_table() -> None:
    """The contracts see import statements only."""
    call = re.compile(r"""\b(?:import_module|__import__|optional_package)\(\s*["']([\w.]+)["']""")
    found = 0
    for path, text in SOURCES.items():
        room = room_of(path.with_suffix("").parts)
        for name in call.findall(text):
            found += 1
            ours = name.startswith("ttrl.")
            target = room_of(name.split(".")) if ours else name.split(".")[0]
            assert target in {room, *TABLE[room]}, f"{path}: {name}"
    assert found > 10


MAX_FILES = 20
MAX_TOKENS = 5_000
MIN_LINES = 40
SMALL_FILES = {
    # A file under MIN_LINES is a noun of its own: what it is, in a word.
    "ttrl/version.py": "the version",
    "ttrl/training/kernels/doubles.py": "float64",
    "ttrl/system/processor.py": "the processor",
}


def test_rooms_and_files_have_a_size_to_read() -> None:
    """More files in a room: which two ideas live there? A smaller file: which noun is it?"""
    files = Counter(path.parent for path in SOURCES)
    assert max(files.values()) <= MAX_FILES, files.most_common(1)
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    for path, text in SOURCES.items():
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        assert sum(token.type in kinds for token in tokens) <= MAX_TOKENS, path
        if not path.name.startswith("__") and path.as_posix() not in SMALL_FILES:
            assert len(text.splitlines()) >= MIN_LINES, path


def test_a_file_name_says_which_file_it_is() -> None:
    """Task families have the same parts, so their files share three names."""
    names = Counter(path.name for path in SOURCES if not path.name.startswith("__"))
    repeated = {name for name, files in names.items() if files > 1}
    assert repeated == {"generator.py", "grading.py", "tasks.py"}


NAMED_IN = ("ttrl/**/*.py", "tests/**/*.py", "tools/*.py", "recipes/*.py", "docs/**/*.md")
NAMED_IN_FILES = ("README.md", "CONTRIBUTING.md", "pyproject.toml", "Makefile")
NOT_OURS = {"end", "written", "objectives", "loggers"}
"""Attributes of a variable that a template calls ttrl, and groups of entry points."""
MADE_UP = {"test_house.py", "test_public_names.py"}
"""Files with names of what is not there."""
DOTTED = re.compile(r"(?<![\w./-])ttrl(?:\.[A-Za-z_]\w*)+")
FROM = re.compile(r"\bfrom (ttrl(?:\.\w+)*) import \(?(\w+(?:(?: as \w+)?, \w+)*)")
PATH = re.compile(r"(?<![\w./-])ttrl/[\w/]+\.(?:py|c|css|html|txt)\b")


@cache
def words_of(module: str) -> set[str]:
    return set(re.findall(r"\w+", MODULES[module]))


def exists(name: str) -> bool:
    """Tell whether a dotted name is a module, or something in the text of a module."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        module = ".".join(parts[:length])
        if module in MODULES:
            return length == len(parts) or parts[length] in words_of(module)
    return parts[1] in ttrl.__all__ or parts[1].startswith("_") or parts[1] in NOT_OURS


def missing_names(text: str) -> list[str]:
    """Return names and paths of ours in a text, in code or prose, without anything behind them."""
    names = DOTTED.findall(text)
    for home, imported in FROM.findall(text):
        names += [f"{home}.{name.split(' ')[0]}" for name in imported.split(", ")]
    missing = [name for name in names if not exists(name)]
    return missing + [path for path in PATH.findall(text) if not (ROOT / path).exists()]


def test_names_in_code_tests_and_docs_exist() -> None:
    paths = [ROOT / name for name in NAMED_IN_FILES]
    for pattern in NAMED_IN:
        paths += ROOT.glob(pattern)
    missing = {
        str(path.relative_to(ROOT)): names
        for path in paths
        if path.name not in MADE_UP and (names := missing_names(path.read_text(encoding="utf-8")))
    }
    assert missing == {}


def test_names_without_anything_behind_them_are_found() -> None:
    assert missing_names("See `ttrl.data.gone.f` and ttrl.data.packing.pack.gone.") == [
        "ttrl.data.gone.f",
        "ttrl.data.packing.pack.gone",
    ]
    assert missing_names("# ttrl/data/gone.py") == ["ttrl/data/gone.py"]
    assert missing_names("code = 'from ttrl import gone, Task'") == ["ttrl.gone"]
    assert missing_names("ttrl.Task, ttrl.data.packing.pack, ttrl/data/packing/pack.py") == []


def hidden_by(path: Path) -> str:
    """Return the library hidden by a file of recipes/, whose folder comes first on sys.path."""
    name = path.stem
    if name == "__init__":
        return "torchtune's recipes"
    known = name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None
    return name if known else ""


def test_recipes_hide_no_library() -> None:
    for path in sorted((ROOT / "recipes").rglob("*.py")):
        assert hidden_by(path) == "", path
    for name in ("__init__", "random", "openai"):
        assert hidden_by(Path("recipes", f"{name}.py"))


def test_a_variable_of_the_environment_is_named_in_one_place() -> None:
    named = [
        name
        for path in ROOT.glob("ttrl/**/*.py")
        for name in re.findall(r'"TTRL_\w+"', path.read_text(encoding="utf-8"))
    ]
    assert named and sorted(named) == sorted(set(named))


def is_long(expression: ast.expr) -> bool:
    return "pytest.mark.long" in ast.unparse(expression)


def test_each_long_test_says_what_only_it_proves() -> None:
    """`make test` leaves it out; the docstring of the test, or of its file, says what that
    costs.
    """
    found = 0
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.long" not in text:
            continue
        tree = ast.parse(text)
        assigned = [
            node for node in tree.body if isinstance(node, ast.Assign) and is_long(node.value)
        ]
        if any(ast.unparse(node.targets[0]) == "pytestmark" for node in assigned):
            found += 1
            assert "Long: " in (ast.get_docstring(tree) or ""), path
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(map(is_long, node.decorator_list)):
                found += 1
                assert re.search(r"\bLong\b", ast.get_docstring(node) or ""), f"{path}: {node.name}"
    assert found > 20


def loaded_by(code: str) -> set[str]:
    """Top-level modules in sys.modules of a process that ran `code`."""
    script = code + (
        "\nimport json, sys\nprint(json.dumps(sorted({name.split('.')[0] for name in "
        "sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = {"torch", "openai", "transformers", "vllm", "torchtune", "numpy"}


def test_importing_ttrl_costs_nothing() -> None:
    assert not loaded_by("import ttrl") & HEAVY
    code = "import sys, ttrl; print([name for name in sys.modules if name.startswith('ttrl')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ast.literal_eval(done.stdout)) == {"ttrl", "ttrl.version"}


def test_the_command_line_costs_nothing_until_a_command_runs() -> None:
    assert not loaded_by("import ttrl.cli; ttrl.cli.make_parser()") & HEAVY


def test_defining_tasks_loads_neither_torch_nor_openai() -> None:
    assert (
        not loaded_by(
            "from ttrl import Task; Task([{'role': 'user', 'content': 'hi'}], lambda choice: 1.0)"
        )
        & HEAVY
    )


def test_a_process_that_samples_never_loads_torch() -> None:
    loaded = loaded_by(
        "import ttrl\nfrom ttrl import Task, get_task_results\nimport ttrl.server.vllm, "
        "ttrl.weights.sync"
    )
    assert "openai" in loaded  # it does sample
    assert not loaded & {"torch", "transformers", "vllm", "torchtune"}


@pytest.mark.long
def test_a_recipe_process_never_loads_openai_or_vllm() -> None:
    """Long: only this looks at what other packages load for a recipe, which takes a process ten
    seconds. What our own files import is looked at by `make lint`.
    """
    loaded = loaded_by("import ttrl.grpo_recipe, ttrl.sft_recipe")
    assert "torchtune" in loaded  # it does train
    assert not loaded & {"openai", "vllm"}


UNPICKLES = {
    # Between us and processes that we started, through a pipe that nobody else has.
    "ttrl/rollouts/graders/grader_worker.py": "ttrl's own graders",
    "ttrl/rollouts/graders/pickling.py": "the other end of it",
    # Between processes of a cluster that only its token lets in, and in which Ray unpickles what
    # every one of them sends.
    "ttrl/cluster/lead.py": "the program's tasks, for the actor that leads its run",
    # Of a user's own file, and nothing in it is looked up but one class of ours
    # (tests/nanochat/test_convert.py attacks it).
    "ttrl/nanochat/convert.py": "nanochat's tokenizer, whose only form is a pickle",
}
PICKLES = (
    "pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "torch.distributed.checkpoint",
    "torch.package",
)


SWITCHES = ("weights_only", "allow_pickle", "trust_remote_code")


def dotted(expression: ast.expr) -> str:
    """Return what `ast.unparse` does for a name with dots, in a tenth of its time."""
    names = []
    inner = expression
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    return (
        ".".join([inner.id, *reversed(names)])
        if isinstance(inner, ast.Name)
        else ast.unparse(expression)
    )


def unpickling(path: Path) -> Iterator[str]:
    """Yield the places at which a file could run what it reads, or what another machine sends."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    meant: dict[str, str] = {}
    """By name in this file, what it was imported as."""
    for node in nodes:
        whence = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if alias.asname or whence:
                meant[alias.asname or alias.name] = whence + alias.name
            # Ray has a cloudpickle of its own.
            if any(f".{one}." in f".{whence}{alias.name}." for one in PICKLES):
                yield f"{node.lineno}: {whence}{alias.name}"
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            meant |= {ast.unparse(target): ast.unparse(node.value) for target in node.targets}
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        first, dot, rest = dotted(node.func).partition(".")
        called = meant.get(first, first) + dot + rest
        given = {
            word.arg: ast.unparse(word.value) for word in node.keywords if word.arg in SWITCHES
        }
        collective = (
            called.split(".")[-1].endswith(("_object", "_object_list")) and "distributed" in called
        )
        unsafe = called == "torch.load" and given.get("weights_only") != "True"
        unsafe |= (
            called.endswith(("yaml.load", "unsafe_load", "full_load"))
            or given.get("allow_pickle") == "True"
        )
        if collective or unsafe or given.get("trust_remote_code", "False") != "False":
            yield f"{node.lineno}: {called}"


def test_nothing_that_comes_from_outside_is_unpickled() -> None:
    """Run folders, mirrors, caches, model folders and other machines: what is unpickled does what
    it says.
    """
    files = [
        path
        for folder in ("ttrl", "tools", "recipes")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    found = {path.relative_to(ROOT).as_posix(): list(unpickling(path)) for path in files}
    assert {
        name: places for name, places in found.items() if places and name not in UNPICKLES
    } == {}
    assert all(found[name] for name in UNPICKLES)


def test_what_unpickles_is_found(tmp_path: Path) -> None:
    lines = [
        *(
            "import pickle",
            "from cloudpickle import loads",
            "import torch.distributed.checkpoint as dcp",
            "torch.load(path)",
        ),
        *(
            "distributed.all_gather_object(a, b)",
            "torch.distributed.broadcast_object_list(a)",
            "yaml.load(a, Loader=b)",
        ),
        *(
            "numpy.load(a, allow_pickle=True)",
            "AutoModel.from_pretrained(a, trust_remote_code=True)",
        ),
        *(
            "from ray import cloudpickle",
            "import torch as t; t.load(a)",
            "from torch import load; load(a)",
            "f = torch.load; f(a)",
        ),
        *(
            "from torch import distributed as dist; dist.all_gather_object(a, b)",
            "from yaml import unsafe_load as u; u(a)",
        ),
    ]
    (tmp_path / "a.py").write_text(
        "\n".join([*lines, "torch.load(a, weights_only=True)", "json.load(a)", "read_object(a)"])
    )
    assert sorted(int(place.split(":")[0]) for place in unpickling(tmp_path / "a.py")) == list(
        range(1, len(lines) + 1)
    )
