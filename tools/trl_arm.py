"""Train with TRL's GRPOTrainer, for tools/compare_trl.py, in TRL's own environment.

    python -m torch.distributed.run --standalone --nproc_per_node 2 tools/trl_arm.py ORDER.json

The order names the model, a folder for the results, the settings of GRPOConfig, and a row for each
prompt: its messages and the JSON that is right. The grader is ttrl's own. The folder then has
steps.json, the figures of each step, written after each step, and model/.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ttrl.tasks.structured_output import StructuredOutputGrader

GENERATE = "generate"
GRADED = "generate and grade"


class TimedTrainer(GRPOTrainer):
    """TRL's trainer; it also measures its own parts."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.seconds = {GENERATE: 0.0, GRADED: 0.0}
        self.first_prompt: list[int] = []
        super().__init__(*arguments, **settings)

    def _tokenize_prompts(self, prompts: list) -> Any:
        found = super()._tokenize_prompts(prompts)
        self.first_prompt = self.first_prompt or list(found[0][0])
        return found

    def _generate_single_turn(self, *arguments: Any, **settings: Any) -> Any:
        started = time.perf_counter()
        found = super()._generate_single_turn(*arguments, **settings)
        self.seconds[GENERATE] += time.perf_counter() - started
        return found

    def _generate_and_score_completions(self, inputs: list) -> Any:
        started = time.perf_counter()
        found = super()._generate_and_score_completions(inputs)
        self.seconds[GRADED] += time.perf_counter() - started
        return found


class StepClock(TrainerCallback):
    """Collects the seconds of each step, and writes them with TRL's own figures."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.trainer: TimedTrainer | None = None
        self.steps: list[dict[str, float]] = []
        self._started = 0.0
        self._before: dict[str, float] = {}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the time, and the seconds of the parts so far."""
        self._started = time.perf_counter()
        self._before = dict(self.trainer.seconds)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Add the step's seconds."""
        step = {"total": time.perf_counter() - self._started}
        for part, seconds in self.trainer.seconds.items():
            step[part] = seconds - self._before[part]
        self.steps.append(step)

    def on_log(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Write the figures of all steps so far."""
        logged = [row for row in state.log_history if "reward" in row]
        if not logged or not self.trainer.is_world_process_zero():
            return
        found = {
            "torch": torch.__version__,
            "dtype": str(next(self.trainer.model.parameters()).dtype),
            "first_prompt": self.trainer.first_prompt,
            "seconds": self.steps,
            "logged": logged,
        }
        self._file.write_text(json.dumps(found, indent=1), encoding="utf-8")


def reward(completions: list, expected: list[str], log_metric: Any, **_: Any) -> list[float]:
    """Grade the completions as ttrl does."""
    rewards = []
    exact = []
    for completion, facts in zip(completions, expected, strict=True):
        message = SimpleNamespace(content=completion[0]["content"])
        value, metrics = StructuredOutputGrader(json.loads(facts))(SimpleNamespace(message=message))
        rewards.append(value)
        exact.append(metrics["exact"])
    log_metric("exact", sum(exact) / len(exact))
    return rewards


def main() -> None:
    """Train as the order says."""
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    output = Path(order["output"])
    clock = StepClock(output / "steps.json")
    trainer = TimedTrainer(
        model=order["model"],
        args=GRPOConfig(output_dir=str(output / "trl"), **order["settings"]),
        reward_funcs=[reward],
        train_dataset=Dataset.from_list(order["rows"]),
        processing_class=AutoTokenizer.from_pretrained(order["model"], padding_side="left"),
        callbacks=[clock],
    )
    clock.trainer = trainer
    trainer.train()
    trainer.save_model(str(output / "model"))


if __name__ == "__main__":
    main()
