"""ttrl: train a language model by reinforcement learning on your own machine, and understand the
result.

Public names are loaded on first use (PEP 562), so importing ttrl costs nothing and loads neither
torch nor openai.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from ttrl.version import __version__

# It warns of missing CUDA extensions whenever transformers loads it, in the middle of a run's own
# lines.
logging.getLogger("torchao").setLevel(logging.ERROR)

_HOME = {
    "Task": "ttrl.tasks.task",
    "agent_task": "ttrl.agents.agent_task",
    "Grade": "ttrl.tasks.task",
    "RolloutLimits": "ttrl.tasks.task",
    "Chat": "ttrl.tasks.task",
    "Sample": "ttrl.records",
    "TaskResult": "ttrl.records",
    "TokenizedResult": "ttrl.records",
    "get_task_results": "ttrl.rollouts.task_results",
    "iter_task_results": "ttrl.rollouts.task_results",
    "TaskResults": "ttrl.rollouts.task_results",
    "TokenBudget": "ttrl.rollouts.partial",
    "Prices": "ttrl.rollouts.progress",
    "InferenceEarlyStop": "ttrl.rollouts.early_stop",
    "Cache": "ttrl.rollouts.cache.completions",
    "get_chat_completion": "ttrl.rollouts.single",
    "consume_chat_completion_stream": "ttrl.rollouts.client.stream",
    "advantages_of": "ttrl.data.advantages",
    "AdvantageConfig": "ttrl.configs.data",
    "TaskResultTokenizer": "ttrl.data.tokenization",
    "PackedTensors": "ttrl.data.packing.pack",
    "packed_tensors_from_tokenized_results": "ttrl.data.packing.pack",
    "plot_packed_tensors": "ttrl.data.pictures.plot",
    "tune": "ttrl.launch.tune",
    "train": "ttrl.loop.start",
    "script_arguments": "ttrl.cli.recipe_script",
    "run_recipe": "ttrl.cli.recipe_script",
    "plan": "ttrl.loop.run_plan",
    "replay": "ttrl.replays.replay",
    "Run": "ttrl.live.run_handle",
    "evaluate": "ttrl.evaluation.evaluate",
    "compare": "ttrl.evaluation.comparison",
    "TrainConfig": "ttrl.configs.run",
    "GRPOConfig": "ttrl.configs.recipe",
    "Objective": "ttrl.registries",
    "TaskFamily": "ttrl.registries",
    "Logger": "ttrl.registries",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from ttrl.agents.agent_task import agent_task
    from ttrl.cli.recipe_script import run_recipe, script_arguments
    from ttrl.configs.data import AdvantageConfig
    from ttrl.configs.recipe import GRPOConfig
    from ttrl.configs.run import TrainConfig
    from ttrl.data.advantages import advantages_of
    from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
    from ttrl.data.pictures.plot import plot_packed_tensors
    from ttrl.data.tokenization import TaskResultTokenizer
    from ttrl.evaluation.comparison import compare
    from ttrl.evaluation.evaluate import evaluate
    from ttrl.launch.tune import tune
    from ttrl.live.run_handle import Run
    from ttrl.loop.run_plan import plan
    from ttrl.loop.start import train
    from ttrl.records import Sample, TaskResult, TokenizedResult
    from ttrl.registries import Logger, Objective, TaskFamily
    from ttrl.replays.replay import replay
    from ttrl.rollouts.cache.completions import Cache
    from ttrl.rollouts.client.stream import consume_chat_completion_stream
    from ttrl.rollouts.early_stop import InferenceEarlyStop
    from ttrl.rollouts.partial import TokenBudget
    from ttrl.rollouts.progress import Prices
    from ttrl.rollouts.single import get_chat_completion
    from ttrl.rollouts.task_results import TaskResults, get_task_results, iter_task_results
    from ttrl.tasks.task import Chat, Grade, RolloutLimits, Task


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ttrl' has no attribute {name!r}")
    # No submodule of the same name (ttrl.launch.tune) lies directly in this package, so nothing
    # shadows these names.
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
