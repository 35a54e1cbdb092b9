"""The names that ttrl exports: a promise to its users, so a change must be made here too."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ttrl

PUBLIC = [
    "AdvantageConfig",
    "Cache",
    "Chat",
    "GRPOConfig",
    "Grade",
    "InferenceEarlyStop",
    "Logger",
    "Objective",
    "PackedTensors",
    "Prices",
    "RolloutLimits",
    "Run",
    "Sample",
    "Task",
    "TaskFamily",
    "TaskResult",
    "TaskResultTokenizer",
    "TaskResults",
    "TokenBudget",
    "TokenizedResult",
    "TrainConfig",
    "advantages_of",
    "agent_task",
    "compare",
    "consume_chat_completion_stream",
    "evaluate",
    "get_chat_completion",
    "get_task_results",
    "iter_task_results",
    "packed_tensors_from_tokenized_results",
    "plan",
    "plot_packed_tensors",
    "replay",
    "run_recipe",
    "script_arguments",
    "train",
    "tune",
]


def test_exactly_these_names_are_public() -> None:
    assert sorted(set(ttrl.__all__) - {"__version__"}) == PUBLIC
    assert dir(ttrl) == sorted(ttrl.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_can_be_loaded_and_is_the_one_of_its_home(name: str) -> None:
    value = getattr(ttrl, name)
    home = importlib.import_module(ttrl._HOME[name])
    assert value is getattr(home, name)
    assert value.__doc__, f"ttrl.{name} is public and has no docstring"


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(ttrl.__file__).read_text(encoding="utf-8"))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == ttrl._HOME


def test_train_says_what_it_does_before_it_loads_what_takes_seconds() -> None:
    script = (
        "import sys\nfrom ttrl import Task, TrainConfig, train\n"
        "class Out:\n"
        "    def write(self, text):\n"
        "        sys.stderr.write(str('torch' in sys.modules) + ' ' + text)\n"
        "        raise SystemExit\n"
        "    flush = lambda self: None\n"
        "sys.stdout = Out()\n"
        "config = TrainConfig(run='runs/x', model='tiny', iterations=3, tasks_per_iteration=1)\n"
        "train(config, [Task([{'role': 'user', 'content': 'x'}], max)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr.startswith("False runs/x: 3 iterations of tiny")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_ours"):
        _ = ttrl.nothing_of_ours


def test_what_a_process_loads_for_a_run_on_one_machine() -> None:
    """ttrl.launch.tune and ttrl.loop.train are modules; ttrl.tune and ttrl.train must stay the
    functions.

    Nothing that `train` loads loads Ray: the loop, its servers and trainers, and the recipes'
    command line.
    """
    script = (
        "import sys, ttrl, ttrl.launch.tune, ttrl.loop.train, ttrl.replays.replay\n"
        "assert all(map(callable, [ttrl.tune, ttrl.train, ttrl.replay]))\n"
        "import ttrl.loop.start, ttrl.cli.recipe_script\n"
        "print('ray' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "False", done.stderr
