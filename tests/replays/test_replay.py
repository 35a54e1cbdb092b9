"""New grades for old rollouts: what is written, what is said to differ, what is not done twice; and
the command.
"""

import asyncio
import json
import os
import subprocess
import sys

import pytest

from ttrl.cli import main
from ttrl.errors import GraderError, RunFolderError
from ttrl.replays.replay import replay
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import digest, read_jsonl


def inverse(choice):
    return float(choice.message.content == "no"), {"length": len(choice.message.content)}


def kept_for_odd(choice, sample):
    """Keeps the order in odd iterations; makes all equal in even ones."""
    return sample.reward * 0.5 if sample.weights_version % 2 == 0 else 0.25


def test_new_grades_lie_in_a_folder_of_their_own(run):
    before = run.files()
    result = run.replay(inverse)
    assert run.files() == before
    assert result.folder.parent == run.folder.path / "replays"
    for number in (1, 2, 3):
        old = read_jsonl(run.folder.iteration(number).path / "rollouts.jsonl")
        new = run.rows(result, number)
        assert [row["reward"] for row in new] == [1 - row["reward"] for row in old]
        assert [row["metrics"] for row in new] == [{"length": len(row["text"])} for row in old]
        for row in (*old, *new):
            del row["reward"], row["metrics"]
        assert new == old
        RunFolder(result.folder).iteration(number).verify("rollouts")


def test_what_differs(run):
    result = run.replay(kept_for_odd)
    one, two, three = result.iterations
    assert [c.iteration for c in result.iterations] == [1, 2, 3] and result.total.iteration is None
    assert (one.rollouts, one.compared, one.changed, one.groups) == (8, 8, 4, 2)
    assert (one.mean_before, one.mean_after) == (0.5, 0.25)
    assert (one.signal_before, one.signal_after, one.signal_disappeared) == (2, 2, 0)
    assert (one.pairs_ordered, one.pairs_kept, one.pairs_flipped, one.pairs_tied) == (8, 8, 0, 0)
    assert one.advantage_correlation == pytest.approx(1)  # half the reward is the same advantage
    assert (two.changed, two.signal_before, two.signal_after, two.signal_disappeared) == (
        8,
        2,
        0,
        2,
    )
    assert (two.pairs_ordered, two.pairs_tied, two.advantage_correlation) == (6, 6, None)
    total = result.total
    assert (total.rollouts, total.changed, total.groups) == (24, 4 + 8 + 6, 6)
    assert (total.mean_before, total.mean_after) == (0.5, pytest.approx((2 + 2 + 3) / 24))
    assert (
        total.pairs_ordered
        == total.pairs_kept + total.pairs_flipped + total.pairs_tied
        == 8 + 6 + 6
    )
    assert total.metrics_before == {"right": 0.5} and total.metrics_after == {}
    assert three.pairs_kept == 6


def test_flipped_order(run):
    result = run.replay(inverse)
    assert list(result.to_pandas()["pairs_flipped"]) == [
        one.pairs_flipped for one in result.iterations
    ]
    assert "flipped" in result.text and "flipped" in result._repr_html_()
    assert result.total.pairs_flipped == result.total.pairs_ordered == 20
    assert result.total.flipped_share == 1.0
    assert result.total.advantage_correlation == pytest.approx(-1)


def test_tasks_with_the_largest_changes_come_first(run):
    def grader(choice, sample):
        return sample.reward + (0.5 if sample.task_id == "task/1" else 0.25 * (sample.sample == 0))

    tasks = run.replay(grader).tasks
    assert [(task.task_id, task.rollouts, task.changed) for task in tasks] == [
        ("task/1", 12, 12),
        ("task/0", 12, 3),
    ]
    assert tasks[0].total_change == pytest.approx(6)
    assert tasks[1].question == "question 0"
    assert (
        tasks[1].iteration,
        tasks[1].sample,
        tasks[1].before,
        tasks[1].after,
        tasks[1].answer,
    ) == (1, 0, 1, 1.25, "yes")


def test_two_replays_are_the_same_byte_for_byte(run, tmp_path):
    first, second = (run.replay(inverse, output=tmp_path / name) for name in ("a", "b"))
    assert (first.folder / "replay.json").read_bytes() == (
        second.folder / "replay.json"
    ).read_bytes()
    for number in (1, 2, 3):
        name = f"iterations/{number:04d}/rollouts.jsonl"
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()


def test_replay_json_says_what_it_is(run, place, tmp_path):
    place("graders", "def half(choice): return 0.5")
    result = run.replay("graders:half", iterations="2-3")
    written = json.loads((result.folder / "replay.json").read_text())
    assert written["grader"]["grader"] == "graders:half"
    assert written["grader"]["files"] == {"graders.py": digest(tmp_path / "graders.py")}
    assert (result.folder / written["run"]).resolve() == run.folder.path.resolve()
    assert [row["iteration"] for row in written["iterations"]] == [2, 3]
    assert written["total"]["rollouts"] == 16 and written["training"] is None


def test_failed_requests_stay_failed_and_failed_graders_get_another_chance(run):
    failed = "RequestError: no answer"
    run.change(
        1,
        0,
        text="",
        token_ids=None,
        logprobs=None,
        finish_reason=None,
        reward=None,
        metrics={},
        error=failed,
    )
    run.change(
        1,
        1,
        reward=None,
        metrics={},
        error="GraderError: task 'task/0', sample 1: the grader raised KeyError: 1\n…",
    )
    run.change(1, 2, reward=None, metrics={}, finish_reason="unfinished")
    asked = []

    def grader(choice, sample):
        asked.append(sample.sample)
        if sample.sample == 3:
            raise ValueError("three")
        return 0.5

    result = run.replay(grader, iterations=[1])
    rows = run.rows(result, 1)
    assert sorted(asked) == [0, 1, 1, 2, 3, 3]
    assert rows[0]["error"] == failed and rows[0]["reward"] is None
    assert rows[1]["error"] is None and rows[1]["reward"] == 0.5
    assert (
        rows[2]["finish_reason"] == "unfinished" and rows[2]["reward"] is rows[2]["error"] is None
    )
    assert rows[3]["error"].startswith(
        "GraderError: task 'task/0', sample 3: the grader raised ValueError: three\n"
    )
    one = result.iterations[0]
    assert (
        one.rollouts,
        one.compared,
        one.still_failed,
        one.newly_graded,
        one.unfinished,
        one.newly_failed,
    ) == (
        8,
        3,
        1,
        1,
        1,
        2,
    )
    assert result.failures == {"the grader raised ValueError: three": 2} or list(
        result.failures.values()
    ) == [2]
    assert "2 rollouts had a reward and have none now" in result.text and "2 × " in result.text


def test_a_grader_that_always_raises_leaves_no_folder_and_accuses_no_other_process(run, caplog):
    def broken(choice):
        raise KeyError("x")

    with pytest.raises(GraderError, match=r"iteration 1: .*KeyError"):
        run.replay(broken)
    assert not list((run.folder.path / "replays").iterdir())
    assert caplog.records == []


async def later(choice):
    await asyncio.sleep(0)
    return 0.25


async def later_with_sample(choice, sample):
    await asyncio.sleep(0)
    return 0.25 * (sample.task_id in ("task/0", "task/1"))


class Judge:
    def __call__(self, choice, tolerance=3):
        return 0.25


@pytest.mark.parametrize(
    "grader",
    [
        lambda choice: 0.25,
        lambda choice, sample: 0.25,
        lambda *args: 0.25 / len(args),
        later,
        later_with_sample,
        Judge(),
    ],
)
def test_graders_of_one_or_two_arguments_now_or_later(run, grader):
    result = run.replay(grader)
    assert result.total.mean_after == 0.25 and result.total.compared == 24


def test_a_grader_cannot_change_the_rollouts(run):
    def grader(choice, sample):
        sample.text, sample.reward = "other", 9.0
        sample.metrics.clear()
        return 0.5

    result = run.replay(grader, iterations=[1])
    assert [row["text"] for row in run.rows(result, 1)] == ["yes", "yes", "no", "no"] * 2
    assert result.total.metrics_before == {"right": 0.5} and result.total.mean_before == 0.5


def test_choices_carry_tokens_and_logprobs(run):
    def grader(choice):
        assert (
            len(choice.logprobs.content) == len(choice.token_ids) and choice.finish_reason == "stop"
        )
        return sum(entry.logprob for entry in choice.logprobs.content)

    result = run.replay(grader, iterations=[1])
    assert [row["reward"] for row in run.rows(result, 1)] == [-4.0, -4.0, -3.0, -3.0] * 2


def test_isolated_graders(run, place):
    place(
        "graders",
        "import time\ndef slow(choice, sample):\n    while sample.sample == 0: time.sleep(1)\n   "
        " return 0.5",
    )
    result = run.replay("graders.py:slow", iterations=[1], isolated=True, grader_timeout=0.3)
    assert [row["reward"] for row in run.rows(result, 1)] == [None, 0.5, 0.5, 0.5] * 2
    assert result.iterations[0].newly_failed == 2


def test_within_a_running_loop(run):
    async def notebook():
        return run.replay(inverse)

    assert asyncio.run(notebook()).total.changed == 24


# Again


def test_what_was_graded_is_not_graded_again(run, place, tmp_path, capsys):
    source = "calls = []\ndef grade(choice):\n    calls.append(1)\n    return {}"
    place("mine", source.format("0.5"))
    first = run.replay("mine:grade", iterations=[1, 2])
    calls = sys.modules["mine"].calls
    assert len(calls) == 16
    result = replay(run.folder.path, grader="mine:grade")
    assert result.folder == first.folder and len(calls) == 24
    assert "2 of 3 iterations graded before; --again grades all again" in capsys.readouterr().out
    run.replay("mine:grade", again=True)
    assert len(calls) == 48
    place("mine", source.format("0.25"))
    changed = run.replay("mine:grade")
    assert changed.folder != first.folder and changed.total.mean_after == 0.25
    with pytest.raises(RunFolderError, match="holds a replay with another grader"):
        run.replay("mine:grade", output=first.folder)
    assert (
        run.replay("mine:grade", output=first.folder, again=True, iterations=[3]).total.mean_after
        == 0.25
    )
    # Grades of two graders never lie side by side.
    assert not (first.folder / "iterations/0001").exists()


def test_other_rollouts_are_noticed(run, place):
    place("mine", "def grade(choice): return 0.5")
    run.replay("mine:grade")
    run.change(2, 0, text="maybe")
    with pytest.raises(RunFolderError, match="does not match iteration 2 of"):
        run.replay("mine:grade")


# The command


def test_the_command(run, place, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    place(
        "mine",
        "def inverse(choice, sample):\n    return 1 - sample.reward, {'length': "
        "len(choice.message.content)}",
    )
    assert (
        main(["replay", str(run.folder.path), "--grader", "mine.py:inverse", "--iterations", "1,2"])
        == 0
    )
    said = capsys.readouterr().out
    for words in (
        "iteration  rollouts  before   after  changed",
        "      all        16",
        "question 0",
        "Metrics: length - → 2.375, right",
    ):
        assert words in said
    lines = said.splitlines()
    assert all(len(line) <= 80 for line in lines if "/" not in line or "→" in line), max(
        lines, key=len
    )
    assert lines[-1] == f"replay: {next((run.folder.path / 'replays').iterdir())}"


def test_the_command_says_what_is_wrong(run, capsys):
    assert main(["replay", "/nowhere", "--grader", "a:b"]) == 2
    assert main(["replay", str(run.folder.path), "--grader", "a"]) == 2
    assert (
        main(["replay", str(run.folder.path), "--grader", "os:getcwd", "--from-checkpoints"]) == 2
    )
    assert capsys.readouterr().err.count("ttrl: error: ") == 3


def test_grading_loads_no_torch(run, place, tmp_path):
    place("mine", "def grade(choice): return 0.5")
    program = (
        "import sys; from ttrl.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules; sys.exit(code)"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "replay",
        str(run.folder.path),
        "--grader",
        "mine:grade",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_names_of_replays_are_harmless_and_the_text_too(run):
    for number in (1, 2, 3):
        run.change(
            number, 0, text="\x1b[31mred\n\tand more\u202e", task_id="../../\x07" + "長い" * 60
        )
    result = run.replay(lambda choice: 0.25)
    assert result.folder.name.startswith("lambda-")
    assert all(c.isprintable() or c == "\n" for c in result.text)
