"""What is wrong with a run is said all at once, before torch is loaded; Ctrl-C in a script says the
way on.
"""

import functools
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ttrl import GRPOConfig, Task, TrainConfig, plan, train
from ttrl.errors import ConfigError, ModelFolderError
from ttrl.loop import checks
from ttrl.tasks.humaneval.tasks import HumanEvalGrader, HumanEvalProblem
from ttrl.tasks.rewards import gated, weighted

RIGHT = {"run": "runs/not_made", "model": "tiny", "iterations": 1, "tasks_per_iteration": 2}
TASKS = [
    Task([{"role": "user", "content": str(number)}], lambda choice: 1.0) for number in range(2)
]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"iteratons": 3, "seed": -1, "dtype": "fp64"},
            ["did you mean 'iterations'?", "seed is -1", "dtype is 'fp64'"],
        ),
        (
            {"sample_per_task": 4, "training": {"lrr": 1}, "server": {"max_num_sequences": 8}},
            [
                "did you mean 'samples_per_task'?",
                "did you mean 'lr'?",
                "server: vLLM has no argument 'max_num_sequences'",
            ],
        ),
        (
            {
                "model": "/not/there",
                "tasks_per_iteration": 3,
                "server": {"gpu_memory_utilisation": 0.5},
            },
            [
                "/not/there does not exist",
                "there are only 2 tasks",
                "did you mean 'gpu_memory_utilization'?",
            ],
        ),
        (
            {
                "server": {
                    "max_num_seqs": "many",
                    "enforce_eager": "yes",
                    "gpu_memory_utilization": 90,
                }
            },
            [
                "vLLM wants a whole number",
                "vLLM wants true or false",
                "vLLM wants a number at most 1",
            ],
        ),
        (
            {"early_stop": {"alpha": 2, "threshold": 1, "treshold": -3}},
            ["early_stop: alpha is 2", "early_stop: threshold is 1", "unknown key 'treshold'"],
        ),
        (
            {"server": {"port": 8000}, "sampling": {"top_q": 1}, "stop_at": 0.9},
            [
                "server: extra_args: port is set by ttrl",
                "did you mean 'top_p'?",
                "stop_at needs validation tasks",
            ],
        ),
        (
            {"model": "no slash here", "max_tokens": 0, "loggers": ["wanbd"]},
            ["no slash here does not exist", "max_tokens is 0", "did you mean 'wandb'?"],
        ),
        (
            {"training": GRPOConfig(lr=-1.0, kl_inn="reward"), "iteratons": 3},
            ["lr is -1.0", "did you mean 'kl_in'?", "did you mean 'iterations'?"],
        ),
        (
            {"chat_template": "not/there.jinja", "server": {"chat_template": "x", "port": 1}},
            [
                "chat_template not/there.jinja: the file cannot be read: No such file",
                "chat-template: use the setting chat_template",
                "port is set by ttrl",
            ],
        ),
        (
            {"servers": 0, "nnodes": 2, "tasks_per_iteration": 64},
            ["no server would sample", "needs a Ray cluster", "there are only 2 tasks"],
        ),
        (
            {"mirror": " ", "advantage_clip": 0, "model": "a/folder/deep/down"},
            ["mirror is empty", "advantage_clip is 0.0", "a/folder/deep/down does not exist"],
        ),
        (
            {"server": {"kv_cache_dtype": "fp7"}, "drift_limits": {"meen": 1}, "temperature": 0.0},
            ["vLLM wants one of 'auto'", "unknown limit 'meen'", "temperature is 0"],
        ),
        (
            # The constructor knows no tasks.
            {"iteratons": 3, "model": "/not/there", "max_tokens": 0},
            [
                "did you mean 'iterations'?",
                "model folder /not/there does not exist",
                "max_tokens is 0",
            ],
        ),
    ],
    ids=range(1, 14),
)
def test_three_mistakes_are_named_at_once(wrong, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        train(TrainConfig(**RIGHT | wrong), TASKS)
    assert [sum(text in problem for problem in caught.value.problems) for text in said] == [
        1,
        1,
        1,
    ], str(caught.value)
    assert len(caught.value.problems) == 3 and not list(tmp_path.iterdir())


def test_a_misspelt_setting_is_not_missing_too():
    with pytest.raises(ConfigError) as caught:
        TrainConfig(run="r", model="tiny", iteratons=3)
    assert caught.value.problems == ["unknown key 'iteratons'; did you mean 'iterations'?"]


def test_a_config_is_made_by_names():
    with pytest.raises(ConfigError) as caught:
        TrainConfig("runs/x", model="tiny", iterations=0)
    assert caught.value.problems[0] == "'runs/x' has no name; write settings by name, such as run=…"
    assert "iterations is 0" in caught.value.problems[2] and len(caught.value.problems) == 3
    with pytest.raises(
        ConfigError, match=r"the config is of type dict; make it with ttrl.TrainConfig"
    ):
        train(RIGHT, TASKS)


def test_tests_that_a_program_can_read_are_no_training_reward():
    """A program of HumanEval runs beside its tests, and passes them by looking into their frames: a
    model would learn that.
    """
    cheat = (
        "import sys\ndef add(a, b):\n    code = sys._getframe(1).f_code\n    return next(c for c "
        "in code.co_consts if c == 3)"
    )
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    with pytest.raises(AssertionError):
        exec(f"def add(a, b):\n    return 4\n\n{test}\ncheck(add)", {})
    exec(f"{cheat}\n\n{test}\ncheck(add)", {})
    problem = HumanEvalProblem("x/1", "def add(a, b):\n", "add", test, "    return a + b\n")
    for_evaluation = [
        Task([{"role": "user", "content": "Add."}], HumanEvalGrader(problem), id="x/1")
    ]
    config = TrainConfig(**RIGHT)
    with pytest.raises(
        ConfigError,
        match=r"1 of 3 tasks \(such as 'x/1'\) are for evaluation only.*give them as "
        r"validation_tasks",
    ):
        checks.checked(config, [*TASKS, *for_evaluation], [], model=False)
    assert len(checks.checked(config, TASKS, for_evaluation, model=False)[2]) == 1
    grader = HumanEvalGrader(problem)
    with_bonus = functools.partial(lambda grader, choice: grader(choice) + 0.1, grader)
    within = (
        weighted(code=(1.0, grader)),
        gated(grader, lambda _: 1.0),
        lambda choice: grader(choice),
        with_bonus,
        grader.__call__,
    )
    for wrapped in within:
        with pytest.raises(
            ConfigError, match=r"1 of 3 tasks \(such as 'x/2'\) are for evaluation only"
        ):
            checks.checked(
                config,
                [*TASKS, Task([{"role": "user", "content": "Add."}], wrapped, id="x/2")],
                [],
                model=False,
            )


def test_one_task_is_a_task():
    with pytest.raises(ConfigError, match=r"tasks_per_iteration is 2, but there is only 1 task$"):
        train(TrainConfig(**RIGHT), TASKS[:1])


def test_one_mistake_of_a_kind_of_its_own_keeps_its_kind():
    with pytest.raises(ModelFolderError, match="not/there/at/all does not exist"):
        train(TrainConfig(**RIGHT | {"model": "not/there/at/all"}), TASKS)


SCRIPT = """
import sys, time
from ttrl import Task, TrainConfig, train
assert "torch" not in sys.modules
import ttrl.loop.train
def work(*_, **__):
    print("at work", flush=True)
    time.sleep(60)
ttrl.loop.train.local_model = work
config = TrainConfig(
    run=sys.argv[1], model="tiny", iterations=1, tasks_per_iteration=1, max_tokens=9
)
train(config, [Task([{"role": "user", "content": "x"}], max)], quiet=False)
"""


def test_an_interrupted_script_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, run],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None and "loading PyTorch" in script.stdout.readline()
    assert script.stdout.readline() == "at work\n"
    script.send_signal(signal.SIGINT)
    _, said = script.communicate(timeout=60)
    assert (
        said.strip().splitlines()[-1] == f"interrupted; the same command continues {run}"
        and "Traceback" not in said
    )
    assert script.returncode == -signal.SIGINT  # 130, in a shell


def test_an_overfitting_run_has_the_first_tasks_alone():
    """For training and validation, in one level, with no more in an iteration than there are."""
    tasks = [
        Task([{"role": "user", "content": str(number)}], lambda choice: 1.0, level=number)
        for number in range(6)
    ]
    config = TrainConfig(**RIGHT | {"tasks_per_iteration": 32, "overfit": 3})
    for _ in range(2):  # a checked run is checked once more where it is trained
        config, trained, held_out = checks.checked(config, tasks, tasks[4:], model=False)
        assert [task.id for task in trained] == [task.id for task in held_out]
        assert [(task.messages, task.level) for task in trained] == [
            (task.messages, 0) for task in tasks[:3]
        ]
        assert (config.overfit, config.tasks_per_iteration) == (3, 3)
    made = plan(TrainConfig(**RIGHT | {"tasks_per_iteration": 32, "overfit": 3}), tasks, tasks[4:])
    assert made.work.tasks == 3
    with pytest.raises(ConfigError, match="overfit is 7, and there are 6 tasks; give a number fro"):
        checks.checked(TrainConfig(**RIGHT | {"overfit": 7}), tasks, tasks, model=False)
