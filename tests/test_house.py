"""Who imports whom: the checker on our tree, the checker on a tree that breaks every rule, and
sys.modules of real processes.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import check_imports as tool
import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "check_imports.py"


LONG_ENOUGH = "x = 1\n" * 40


def make_tree(root: Path, files: dict[str, str], dependencies: str = '"torch", "openai"') -> Path:
    """Make up a house; every file not given is missing. Files that are not about their length are
    long enough.
    """
    for name, text in {"ttrl/__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            text if text.startswith("x = 1\n") else text + LONG_ENOUGH, encoding="utf-8"
        )
    (root / "pyproject.toml").write_text(
        f"[project]\ndependencies = [{dependencies}]\n[project.optional-dependencies]\ndev = "
        '["pytest"]\n'
    )
    return root


@pytest.mark.long
def test_our_house_is_in_order() -> None:
    """Long: it is what `make lint` does, with the same tool."""
    done = subprocess.run([sys.executable, TOOL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, "\n" + done.stdout


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


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(
            {"ttrl/rollouts/a.py": "import os\nimport torch\n"},
            "ttrl/rollouts/a.py:2: rollouts must not import torch",
            id="package",
        ),
        pytest.param(
            {"ttrl/tasks/a.py": "def f():\n    from transformers import AutoModel\n"},
            "ttrl/tasks/a.py:2: tasks must not import transformers",
            id="inside a function",
        ),
        pytest.param(
            {"ttrl/server/a.py": "import importlib\nx = importlib.import_module('torch.nn')\n"},
            "ttrl/server/a.py:2: server must not import torch.nn".removesuffix(".nn"),
            id="import_module",
        ),
        pytest.param(
            {"ttrl/data/a.py": "from ttrl.rollouts.b import c\n", "ttrl/rollouts/b.py": ""},
            "ttrl/data/a.py:1: data must not import rollouts",
            id="room",
        ),
        pytest.param(
            {"ttrl/data/a.py": "from ..rollouts import b\n", "ttrl/rollouts/b.py": ""},
            "ttrl/data/a.py:1: data must not import rollouts",
            id="relative",
        ),
        pytest.param(
            {"ttrl/data/a.py": "from ttrl import rollouts\n", "ttrl/rollouts/__init__.py": ""},
            "ttrl/data/a.py:1: data must not import rollouts",
            id="room from ttrl",
        ),
        pytest.param(
            {
                "ttrl/__init__.py": "_HOME = {'Task': ''}\n",
                "ttrl/data/a.py": "from ttrl import Task\n",
            },
            "ttrl/data/a.py:1: takes Task from ttrl; inside the package, import from the file "
            "that defines it",
            id="public name",
        ),
        pytest.param(
            {"ttrl/loop/a.py": "import torchtune\n"},
            "ttrl/loop/a.py:1: loop must not import torchtune",
            id="torchtune",
        ),
        pytest.param(
            {"ttrl/rollouts/cache/a.py": "import obstore\n"},
            "ttrl/rollouts/cache/a.py:1: imports obstore, which pyproject.toml does not declare",
            id="undeclared",
        ),
        pytest.param(
            {"ttrl/system/files.py": "import ttrl.records\n", "ttrl/records.py": ""},
            "ttrl/system/files.py:1: system must not import records",
            id="system",
        ),
        pytest.param(
            {"ttrl/new_room/a.py": "import torch\n"},
            "ttrl/new_room/a.py:1: ttrl.new_room has no line in the table of "
            "tools/check_imports.py",
            id="new room",
        ),
        pytest.param(
            {"ttrl/__init__.py": "import torch\n"},
            "ttrl/__init__.py:1: ttrl/__init__.py imports torch; importing ttrl must cost nothing",
            id="top",
        ),
        pytest.param(
            {"ttrl/data/a.py": "x = 1\n" * 1667},
            "ttrl/data/a.py:1667: 5,001 tokens of code; 5,000 at the most",
            id="long",
        ),
        pytest.param(
            {"ttrl/data/a.py": "x = 1\n" * 39},
            "ttrl/data/a.py:39: 39 lines; at least 40, or a line in SMALL_FILES: which noun is it?",
            id="small",
        ),
        pytest.param(
            {f"ttrl/data/a{number}.py": LONG_ENOUGH for number in range(21)},
            "ttrl/data:1: 21 files; 20 at the most: which two ideas live here?",
            id="full room",
        ),
        pytest.param(
            {
                "ttrl/data/chat/a.py": "from ttrl.data.packing.b import c\n",
                "ttrl/data/packing/b.py": "",
            },
            "ttrl/data/chat/a.py:1: data.chat must not import data.packing",
            id="room in a room",
        ),
        pytest.param(
            {"ttrl/data/a.py": "# See `ttrl.data.gone.f`.\n"},
            "ttrl/data/a.py:1: there is no ttrl.data.gone.f",
            id="dotted name",
        ),
        pytest.param(
            {"ttrl/data/a.py": "# ttrl/data/gone.py\n"},
            "ttrl/data/a.py:1: there is no ttrl/data/gone.py",
            id="path in a comment",
        ),
        pytest.param(
            {"tests/test_a.py": "code = 'from ttrl import gone'\n"},
            "tests/test_a.py:1: there is no ttrl.gone",
            id="code in a string",
        ),
        pytest.param(
            {
                "ttrl/data/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ttrl.data.b "
                "import B\n",
                "ttrl/data/b.py": "from ttrl.data.a import A\n",
            },
            "ttrl/data/b.py:1: import circle ttrl.data.a → ttrl.data.b → ttrl.data.a",
            id="circle of types",
        ),
        pytest.param(
            {
                "ttrl/data/a.py": "from ttrl.data import b\n",
                "ttrl/data/b.py": "def f():\n    import ttrl.data.a\n",
            },
            "ttrl/data/b.py:2: import circle ttrl.data.a → ttrl.data.b → ttrl.data.a",
            id="lazy cycle",
        ),
        pytest.param(
            {"recipes/__init__.py": ""},
            "recipes/__init__.py:1: recipes/ must not be a package (torchtune ships a top-level "
            "one of that name)",
            id="package",
        ),
        pytest.param(
            {"recipes/random.py": ""},
            "recipes/random.py:1: hides the library random for every script in its folder",
            id="stdlib",
        ),
        pytest.param(
            {"recipes/openai.py": ""},
            "recipes/openai.py:1: hides the library openai for every script in its folder",
            id="library",
        ),
    ],
)
def test_each_rule_can_be_broken(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    assert tool.Checker(make_tree(tmp_path, files)).problems() == [expected]


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    tree = {
        "ttrl/errors.py": "",
        "ttrl/system/files.py": "from ttrl.errors import StorageError\n",
        "ttrl/records.py": "import dataclasses\nfrom ttrl.errors import UserError\n",
        "ttrl/tasks/task.py": "import typing\nfrom ttrl.records import Sample\nif typing.TYPE_CHECKING:\n    "
        "import torch\n",
        "ttrl/rollouts/a.py": "import openai\nfrom ttrl.tasks.task import Task\nfrom ttrl import __version__\n",
        "ttrl/data/packing/a.py": "import torch.nn\nfrom . import b\n",
        "ttrl/data/packing/b.py": "from ttrl.system.files import digest\n",
        "recipes/sort_letters.py": "from ttrl import __version__\n",
    }
    assert tool.Checker(make_tree(tmp_path, tree)).problems() == []


def test_the_else_branch_of_type_checking_counts(tmp_path: Path) -> None:
    text = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    "
        "import torch\n"
    )
    assert tool.Checker(make_tree(tmp_path, {"ttrl/tasks/a.py": text})).problems() == [
        "ttrl/tasks/a.py:5: tasks must not import torch"
    ]


def test_the_command_exits_with_one_and_lists_the_places(tmp_path: Path) -> None:
    make_tree(tmp_path, {"ttrl/tasks/a.py": "import torch\n"})
    done = subprocess.run(
        [sys.executable, TOOL, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["ttrl/tasks/a.py:1: tasks must not import torch"]


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
    "ttrl/rollouts/graders/worker.py": "ttrl's own graders",
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
