"""The probe: a short run of the real loop on fake parts, and what a plan takes from it."""

import pytest

from ttrl.errors import TtrlError, UserError
from ttrl.facts import MetricsRow, TrainFigures
from ttrl.loop.plan_probe import ProcessMemory, _kind, _scaled, probe
from ttrl.loop.run_plan import plan
from ttrl.plans.expected_lengths import Assumptions
from ttrl.plans.measured import Seconds
from ttrl.plans.planner import make_plan


def probed_plan(world, config, tasks=(), held_out=(), assumptions=None, most_seconds=1e9):
    """What `plan(probe=True)` returns, on a world's parts.

    The speed of this machine is not looked at, and two iterations show what four do.
    """
    assumptions = assumptions or Assumptions()
    rough = make_plan(config, tasks, held_out, assumptions=assumptions)
    found = probe(
        rough,
        config,
        assumptions,
        list(tasks),
        list(held_out),
        most_seconds=most_seconds,
        iterations=2,
        parts=world.parts,
    )
    return make_plan(config, tasks, held_out, assumptions=assumptions, probed=found)


def test_a_probe_is_a_run_of_its_own(world, tmp_path):
    world.answer = lambda prompt, k, version: "yes" * (k + 1)
    world.grade = lambda choice: (
        float("task 1" not in str(choice)) * len(choice.message.content),
        {},
    )
    config, tasks = world.config(stop_at=0.0, cache=[str(tmp_path / "cache")]), world.tasks(6)
    made = probed_plan(world, config, tasks, world.tasks(2, "held-out"))
    assert not world.run.exists() and not (tmp_path / "cache").exists()
    assert made.completions_from == made.signal_from == "probe" and made.prompts_from == "tasks"
    assert {phase.source for name, phase in made.seconds.phases.items() if name != "other"} <= {
        "probe",
        "rough",
    }
    assert made.seconds.phases["sample"].source == made.seconds.phases["train"].source == "probe"
    assert (made.work.tasks, made.work.samples, made.work.validation_samples) == (2, 8, 2)
    lengths = [len(world.tokenizer.encode("yes" * (k + 1))) + 1 for k in range(4)]
    assert made.work.completion_mean == pytest.approx(sum(lengths) / 4)
    assert made.iterations == config.iterations == 3  # of the run that is planned


def test_long_iterations_are_probed_in_part(world):
    config = world.config(tasks_per_iteration=8)
    made = probed_plan(world, config, world.tasks(8), most_seconds=0.0)
    sampled = {prompt for _, prompt in world.requests}
    assert len(sampled) == 8 and len(world.requests) == 2 * 4  # two iterations of four tasks
    assert (made.work.tasks, made.work.samples) == (8, 32)


@pytest.mark.parametrize("every", [1, 8])
def test_a_probe_pays_for_whole_validations(world, every):
    """It validates in each iteration, whatever the run does."""
    config = world.config(tasks_per_iteration=8, validate_every=every)
    tasks, held_out = world.tasks(8), world.tasks(400, "held-out")
    seconds = make_plan(config, tasks, held_out, assumptions=Assumptions()).seconds
    whole = seconds.iteration + (every - 1) * seconds.phases["validate"].seconds
    probed_plan(world, config, tasks, held_out, most_seconds=whole)
    assert len({prompt for _, prompt in world.requests if "held-out" in str(prompt)}) == 200


def test_without_tasks_some_are_made_up(world):
    assumed = Assumptions(prompt_tokens=10, completion_tokens=3)
    made = probed_plan(world, world.config(), assumptions=assumed)
    assert made.completions_from == "assumed" and made.work.samples == 8
    assert all(prompt for _, prompt in world.requests)
    # Rewards differ, whatever is said.
    assert made.work.signal_share == 1.0 and made.signal_from == "probe"


def test_rewards_that_never_differ_are_planned_as_assumed(world):
    world.grade = lambda choice: (1.0, {})
    made = probed_plan(world, world.config(), world.tasks(6))
    assert made.work.signal_share == 1.0 and made.signal_from == "assumed"
    assert made.warnings[0].startswith(
        "nothing would be trained: in none of the 4 groups of the probe did rewards differ"
    )
    assumed = Assumptions(signal_share=0.5)
    half = probed_plan(world, world.config(), world.tasks(6), assumptions=assumed)
    assert half.work.signal_share == 0.5 and half.signal_from == "assumed"


def test_a_probe_that_samples_nothing_is_no_plan(world):
    world.refused = {task.messages[-1]["content"] for task in world.tasks(6)}
    with pytest.raises(TtrlError, match="all 8 samples of 2 tasks failed"):
        probed_plan(world, world.config(), world.tasks(6))


def test_only_whole_iterations_on_this_machine_are_probed(world):
    with pytest.raises(UserError, match="leave out recipe_only"):
        plan(world.config(), recipe_only=True, probe=True)
    elsewhere = world.config(joined_servers=["http://10.0.0.7:8000"])
    with pytest.raises(UserError, match="only this machine: leave out nnodes and joined_servers"):
        plan(elsewhere, world.tasks(4), probe=True)


def test_what_grows_with_tasks_is_scaled():
    seconds = {
        name: Seconds(value, "probe")
        for name, value in dict(sample=2.0, train=3.0, sync=0.5, iteration=5.0).items()
    }
    train = TrainFigures(seconds_by_part={"checkpoint": 1.0})
    rows = [MetricsRow(iteration=1, train=train), MetricsRow(iteration=2)]
    scaled = {name: value.seconds for name, value in _scaled(seconds, rows, 4.0, 2.0).items()}
    assert scaled == {
        "sample": 8.0,
        "train": 1.0 + 2.0 * 4,
        "sync": 0.5,
        "iteration": pytest.approx(5.0 * 17.5 / 5.5),
    }
    assert {name: value.seconds for name, value in _scaled(seconds, rows, 1.0, 1.0).items()} == {
        name: value.seconds for name, value in seconds.items()
    }


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["python", "-m", "vllm.entrypoints.openai.api_server"], "server"),
        (["VLLM::EngineCore"], "server"),
        (["python", "-m", "torchtune._cli.tune", "run", "ttrl/grpo_recipe"], "trainer"),
        (["python", "-I", "ttrl/system/process_guard.py", "vllm"], None),
        (["bash"], None),
    ],
)
def test_whose_memory_it_is(command, kind):
    assert _kind(command) == kind


def test_memory_is_watched_until_the_end():
    with ProcessMemory() as memory:
        assert memory.peaks == {}
    assert not memory._thread.is_alive()
