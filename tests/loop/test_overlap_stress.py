"""A run one step off policy with the real trainer class, a process that follows its folder, and
pauses at random everywhere: it ends, whatever waits for what, and comes to the same as without
pauses. On fake parts otherwise (see conftest.py).
"""

import os
import random
import time

import pytest
from support.pretended_tune import PretendedTune

from ttrl.launch import trainer
from ttrl.system.files import digest, read_jsonl

# A recipe that only pretends, without torch. It pauses as its environment says.
RECIPE = """
import itertools, json, os, pathlib, random, sys, time, yaml
from ttrl.system.request_folder import RequestFolder

pause = random.Random(os.environ["TTRL_TEST_SEED"])
folder = RequestFolder(yaml.safe_load(open(sys.argv[-1]))["follow"])
for number in itertools.count(1):
    request = folder.next_request(number)
    if request is None:
        break
    config = yaml.safe_load(open(request))
    output = pathlib.Path(config["output_dir"])
    time.sleep(pause.choice((0, 0, 0.002, 0.05)))
    if not config["packed"]:
        (output / "checkpoint" / "canary.json").write_text("{}")
        folder.put_answer(number, {})
        continue
    for name, file, text in (
        ("checkpoint", "config.json", "{}"), ("checkpoint", "version.txt", config["iteration"]), ("state", "state.txt", "s"),
    ):
        (output / name).mkdir(exist_ok=True)
        (output / name / file).write_text(str(text))
    row = dict(global_step=config["iteration"], iteration=config["iteration"], lr=1e-4, loss=0.5, grad_norm=1.0)
    (output / "train.jsonl").write_text(json.dumps(row) + "\\n")
    (output / "trainer_logprobs.safetensors").write_text("")
    folder.put_answer(number, {})
"""


@pytest.fixture
def run(world, monkeypatch, tmp_path):
    """`run(seed)`: what a run with these pauses came to; without any for None."""
    PretendedTune(monkeypatch, tmp_path).runs(RECIPE)
    world.trainer_class = trainer.Trainer
    serve, iterations = (
        vars(type(world))["note"],
        int(os.environ.get("TTRL_STRESS_ITERATIONS", "6")),
    )

    def made(seed):
        chance, until = random.Random(seed), {}

        def hold(prompt):
            wait = 0 if seed is None else chance.choice((0, 0, 0.001, 0.02, 0.1))
            return time.monotonic() < until.setdefault(
                (prompt, world.server_version()), time.monotonic() + wait
            )

        def note(event):
            time.sleep(0 if seed is None else chance.choice((0, 0.01)))
            serve(world, event)

        monkeypatch.setenv("TTRL_TEST_SEED", str(seed))
        world.hold, world.note = hold, note
        world.run = tmp_path / f"run{seed}"
        world.train(iterations=iterations, off_policy_steps=1)
        files = sorted((world.run / "iterations").rglob("*.safetensors")) + sorted(
            (world.run / "iterations").rglob("*.txt")
        )
        found = {str(path.relative_to(world.run)): digest(path) for path in files}
        rollouts = sorted((world.run / "iterations").glob("*/rollouts.jsonl"))
        return found | {
            path.parent.name: [row["weights_version"] for row in read_jsonl(path)]
            for path in rollouts
        }

    return made


def test_it_ends_and_comes_to_the_same_whoever_waits_for_whom(run):
    seeds = range(int(os.environ.get("TTRL_STRESS_RUNS", "1")))
    assert [
        seed for seed, came in zip(seeds, map(run, seeds), strict=True) if came != run(None)
    ] == []
