"""A small run that is written by hand, and a folder with modules of a test's own.

The run has three iterations of two tasks with four answers each. The answers are "yes" and "no",
and "yes" earned 1.
"""

from support.facts import mark

from ttrl import Sample
from ttrl.loop.phases import Phases
from ttrl.replays.replay import replay
from ttrl.run_folder.folder import RunFolder
from ttrl.system.console import Console
from ttrl.system.files import digest, read_jsonl, write_jsonl
from ttrl.weights.policy_server import PolicyServer

ANSWERS = {
    1: ("yes", "yes", "no", "no"),
    2: ("yes", "no", "no", "no"),
    3: ("no", "yes", "yes", "yes"),
}


class Run:
    """The run, its fake world, and what a test wants to know of it."""

    def __init__(self, world):
        self.world, self.folder = world, RunFolder(world.run)
        self.config = world.config().resolved(cuda=False)
        self.folder.path.mkdir(parents=True)
        self.folder.remember_config(self.config.to_dict())
        self.start = self.folder.iteration(0)
        checkpoint = self.start.path / "checkpoint"
        checkpoint.mkdir(parents=True)
        for path in world.model.iterdir():
            (checkpoint / path.name).symlink_to(path)
        mark(self.start, "prepare", ["checkpoint"], {"seconds": 0.0})
        for number in (1, 2, 3):
            self.write(number, [self.sample(number, task, k) for task in (0, 1) for k in range(4)])

    def sample(self, number, task, k, **changes):
        text = ANSWERS[number][k]
        prompt = self.world.tokenizer.encode(f"<|user|>question {task}<|end|><|assistant|>")
        ids = [*self.world.tokenizer.encode(text), self.world.tokenizer.eos_token_id]
        values = {
            "text": text,
            "prompt_token_ids": prompt,
            "token_ids": ids,
            "logprobs": [-1.0] * len(ids),
        }
        values |= {
            "finish_reason": "stop",
            "reward": float(text == "yes"),
            "metrics": {"right": float(text == "yes")},
        }
        messages = [{"role": "user", "content": f"question {task}"}]
        return Sample(
            task_id=f"task/{task}",
            sample=k,
            messages=messages,
            weights_version=number - 1,
            **(values | changes),
        )

    def write(self, number, samples):
        iteration = self.folder.iteration(number)
        write_jsonl(iteration.path / "rollouts.jsonl", [sample.to_json() for sample in samples])
        iteration.unmark("rollouts")
        mark(iteration, "rollouts", ["rollouts.jsonl"], {"seconds": 0.0, "stats": {}})

    def change(self, number, place, **changes):
        """Another row `place` in an iteration's rollouts."""
        rows = read_jsonl(self.folder.iteration(number).path / "rollouts.jsonl")
        rows[place] |= changes
        self.write(number, [Sample.from_json(row) for row in rows])

    def train(self, numbers=(1, 2, 3)):
        """As the run itself would have."""
        console = Console(quiet=True)
        server = PolicyServer(self.config, self.folder.path / "logs", console)
        work = Phases(self.config, self.folder, self.world.model, server=server, console=console)
        for number in numbers:
            work.pack(number)
            work.train_policy(number)
        self.world.recipes.clear()
        self.world.events.clear()

    def files(self):
        """Every file of the run but those of its replays, with its digest."""
        paths = [
            path
            for path in self.folder.path.rglob("*")
            if path.is_file() and "replays" not in path.parts
        ]
        return {str(path): digest(path) for path in paths}

    def replay(self, grader=None, **arguments):
        return replay(self.folder.path, grader=grader, quiet=True, **arguments)

    def rows(self, result, number):
        return read_jsonl(result.folder / f"iterations/{number:04d}/rollouts.jsonl")
