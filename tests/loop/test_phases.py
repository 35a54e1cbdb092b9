"""Parts of the phases that whole runs (test_train.py) do not show."""

import asyncio
import json
import shutil
import signal
import threading

import pytest
from support.fake_vllm import canary_of

from ttrl.loop.phases import Phases, _estimates
from ttrl.records import Sample
from ttrl.rollouts.results import TaskResults
from ttrl.run_folder.folder import RunFolder
from ttrl.system.console import Console
from ttrl.system.coroutines import run_async
from ttrl.system.files import write_json


async def answer():
    await asyncio.sleep(0)
    return 42, threading.current_thread().name


async def fail():
    raise KeyError("x")


def test_run_async_with_and_without_a_running_loop():
    assert run_async(answer()) == (42, "MainThread")
    with pytest.raises(KeyError):
        run_async(fail())

    async def notebook():
        return run_async(answer())

    async def failing_notebook():
        return run_async(fail())

    assert asyncio.run(notebook()) == (42, "rollouts_0")
    with pytest.raises(KeyError):
        asyncio.run(failing_notebook())


def test_run_async_ends_its_coroutine_when_a_notebook_is_interrupted():
    cancelled = threading.Event()

    async def sampling():
        threading.Timer(
            0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        ).start()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def cell():
        run_async(sampling())

    # Not asyncio.run, which hears Ctrl-C itself: a notebook's loop runs a cell with Python's own
    # handler.
    loop, before = (
        asyncio.new_event_loop(),
        signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()
    assert cancelled.is_set()


def make(world, **changes):
    config = world.config(**changes).resolved(cuda=False)
    server = world.server_class(config, world.run / "logs", Console(quiet=True))
    return Phases(
        config,
        RunFolder(world.run),
        world.model,
        tasks=world.tasks(6),
        server=server,
        trainer=world.trainer_class(),
        console=Console(quiet=True),
    )


def test_the_first_checkpoint_is_links_and_a_canary(world):
    make(world).prepare()
    checkpoint = world.run / "iterations/0000/checkpoint"
    for path in world.model.iterdir():
        assert (checkpoint / path.name).is_symlink()
        assert (checkpoint / path.name).read_bytes() == path.read_bytes()
    # A model of ours or of another's is never written to.
    assert not (checkpoint / "canary.json").is_symlink()
    assert not (world.model / "canary.json").exists()
    assert world.events == ["start", "canary", "serve 0"]


def test_a_model_inside_the_run_folder_moves_with_it(world, tmp_path):
    world.model = shutil.copytree(world.model, world.run / "model")
    make(world).prepare()
    moved = world.run.rename(tmp_path / "moved")
    assert (moved / "iterations/0000/checkpoint/config.json").read_bytes() == (
        moved / "model/config.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("dtype", "computed"), [("float32", False), ("bfloat16", True), ("damaged", True)]
)
def test_a_canary_of_the_same_dtype_is_taken_over(world, tmp_path, dtype, computed):
    world.model = shutil.copytree(world.model, tmp_path / "model")
    write_json(
        world.model / "canary.json",
        canary_of(0.5) | {"dtype": dtype, "mark": 1} if dtype != "damaged" else [],
    )
    make(world, dtype="fp32").prepare()
    assert ("canary" in world.events) == computed
    written = json.loads((world.run / "iterations/0000/checkpoint/canary.json").read_text())
    assert ("mark" in written) != computed


def test_the_reference_of_the_kl_term_is_the_starting_model(world):
    assert make(world).recipe_config(1)["reference_model"] is None
    assert make(world, training={"kl_coefficient": "0.1"}).recipe_config(1)[
        "reference_model"
    ] == str(world.model)


def test_the_trainer_is_told_how_long_the_servers_sequences_are(world, tmp_path):
    assert make(world).recipe_config(1)["context"] is None
    given = make(world, server={"max_model_len": 300})
    assert given.recipe_config(1)["context"] == 300
    world.model = shutil.copytree(world.model, tmp_path / "model")
    write_json(world.model / "canary.json", canary_of(0.5) | {"context": 200})
    make(world, dtype="fp32", server={"max_model_len": 300}).prepare()
    assert "canary" in world.events  # that one was for sequences of another length


def test_the_base_of_adapters_is_the_starting_model(world):
    assert make(world).recipe_config(1)["lora_base"] is None
    given = make(world, training={"lora_rank": 8, "kl_coefficient": 0.1}).recipe_config(1)
    assert given["lora_base"] == given["reference_model"] == str(world.model)
    assert not given["lora_merge"]  # the servers are given the adapter
    assert make(world, training={"lora_rank": 8}, adapters="merged").recipe_config(1)["lora_merge"]


def test_the_recipe_is_given_what_the_machine_was_resolved_to(world):
    given = make(world, seed=4, training={"lr": "3e-4"}).recipe_config(1)
    assert (given["device"], given["dtype"], given["num_threads"], given["seed"], given["lr"]) == (
        "cpu",
        "fp32",
        1,
        4,
        3e-4,
    )
    assert given["output_dir"] == str(world.run / "iterations/0001")
    assert given["model"] == str(world.run / "iterations/0000/checkpoint")
    assert given["state"] is None


def test_a_held_out_task_that_is_asked_often_is_one_task():
    """Else the interval of a validation would become narrower with each repeat of the same
    tasks.
    """

    def results(repeats):
        samples = []
        for task in [*"abc"] * repeats:
            for number in range(2):
                reward = float(task != "b" and number == 0)
                message = {"role": "user", "content": task}
                one = Sample(task_id=task, sample=number, messages=[message], reward=reward)
                one.metrics = {"exact": reward}
                samples.append(one)
        return TaskResults.from_samples(samples)

    once, often = (_estimates(results(repeats), "exact", 2) for repeats in (1, 16))
    assert once.keys() == often.keys() == {"reward", "exact", "pass@2"}
    for name, estimate in once.items():
        assert often[name].num_tasks == 3
        assert often[name].mean == pytest.approx(estimate.mean)
        assert often[name].high - often[name].low > 0.9 * (estimate.high - estimate.low)
