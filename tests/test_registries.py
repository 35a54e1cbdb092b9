"""Names of other packages work like ttrl's own, and what is wrong with one is a clear error.

Whole runs with such names: tests/e2e/test_registered.py.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.facts import rows_of
from support.packages import block, install, install_from_the_page

from ttrl import TrainConfig, cli, train
from ttrl.configs.logger_settings import logger_problems
from ttrl.configs.objective_settings import ObjectiveConfig
from ttrl.errors import ConfigError, UserError
from ttrl.evaluation.families import TaskSpec
from ttrl.monitoring.loggers import make_loggers
from ttrl.registries import FAMILIES, LOGGERS, OBJECTIVES
from ttrl.system.console import Console
from ttrl.training.objective.objective import objective_from


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def vowels(site: Path) -> Iterator[None]:
    """The package of docs/how-to/register.md, installed."""
    install_from_the_page(site)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "ttrl_vowels"]:
        del sys.modules[name]


def test_the_page_is_checked_as_it_says(
    vowels: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.yaml").write_text(block("yaml"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "run.yaml", "--check", "--set", "model=tiny"]) == 0
    assert "1024 tasks, 200 held out" in capsys.readouterr().out


def test_a_registered_objective(vowels: None) -> None:
    assert OBJECTIVES.names()[-1] == "one_sided"
    config = ObjectiveConfig.parse({"objective": "one_sided"}, "here")
    assert config.policy_settings() == {"clip_high": 1.0}
    assert objective_from(config).per_token
    own = ObjectiveConfig(objective="one_sided", clip_high=0.5)
    assert objective_from(own).policy_loss.function.keywords == {"clip_high": 0.5}
    with pytest.raises(ConfigError, match=r"clip_low is 0.1, but has no effect with objective"):
        ObjectiveConfig.parse({"objective": "one_sided", "clip_low": 0.1}, "here")
    with pytest.raises(
        ConfigError, match=r"no 'two_sided'; choose one of ppo, .*kl_cov, one_sided"
    ):
        ObjectiveConfig.parse({"objective": "two_sided"}, "here")


def test_a_registered_family(vowels: None) -> None:
    assert "vowels" in FAMILIES.names() and FAMILIES["vowels"].score == "right"
    tasks = TaskSpec.parse("vowels@train").with_option("length", 3).tasks(4, seed=1)
    assert len(tasks) == 4 and len(tasks[0].id.rpartition("/")[2]) == 3
    with pytest.raises(UserError, match=r"leave =words\.txt out"):
        TaskSpec.parse("vowels=words.txt")


WRONG_FAMILIES = {
    "def get(split, n, seed): return 1 / 0": r"failed: ZeroDivisionError.* \(its_tasks.py, line 1\)$",
    "def get(split, n, seed): pass": "is of type NoneType; give a list of Task",
    "def get(split, n, seed): return []": "has no tasks; choose another split",
    "def get(): return []": r"its_tasks:get takes other arguments \(too many .* needs split, n, seed",
    "other = 1": "'its' of one 1.0 names its_tasks:get, and it cannot be loaded: AttributeError",
}


@pytest.mark.parametrize("code", WRONG_FAMILIES)
def test_a_wrong_family(site: Path, code: str) -> None:
    entry = "from ttrl import TaskFamily\nITS = TaskFamily('its_tasks:get')\n"
    groups = {"ttrl.tasks": {"its": "its_entry:ITS"}}
    install(site, "one", groups, its_entry=entry, its_tasks=f"{code}\n")
    try:
        with pytest.raises(UserError, match=WRONG_FAMILIES[code]):
            TaskSpec.parse("its").tasks(2)
    finally:
        for name in ("its_entry", "its_tasks"):
            sys.modules.pop(name, None)


def test_an_option_of_a_wrong_type_is_told(vowels: None) -> None:
    spec = TaskSpec.parse("vowels").with_option("length", "three")
    with pytest.raises(UserError, match=r"tasks failed: TypeError.*; check the types of its opt"):
        spec.tasks(2)


def test_the_names_of_other_packages_are_listed(
    vowels: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, other in (("objective", "one_sided"), ("loggers", "rewards")):
        assert cli.main(["config", name]) == 0
        assert f"Of other packages here: {other}\n" in capsys.readouterr().out


def test_a_registered_logger(vowels: None, tmp_path: Path) -> None:
    entry = {"name": "rewards", "file": "own.txt"}
    loggers = make_loggers([entry], tmp_path, Console(quiet=True), {})
    loggers.log(rows_of([{"iteration": 3, "reward": 0.5}]))
    loggers.close()
    assert (tmp_path / "own.txt").read_text() == "3 0.5\n"
    (problem,) = logger_problems({"name": "rewards", "colour": 1})
    assert problem == "loggers: rewards has no argument 'colour'; choose from file"
    (problem,) = logger_problems("reward")
    assert "did you mean 'rewards'?" in problem


def test_a_config_loads_no_code_of_its_entries(tmp_path: Path) -> None:
    """Nor PyTorch. By processes that only get a PYTHONPATH, as trainers and Ray's workers do."""
    install_from_the_page(tmp_path)
    script = (
        "import json, sys, yaml\n"
        "from ttrl import TrainConfig\n"
        "values = yaml.safe_load(sys.argv[1]) | {'run': 'r'}\n"
        "values = {key: value for key, value in values.items() if 'tasks' not in key[-5:]}\n"
        "assert TrainConfig(**values).problems() == []\n"
        "names = {name.partition('.')[0] for name in sys.modules} & {'torch', 'openai'}\n"
        "print(json.dumps([*names, *(name for name in sys.modules if 'ttrl_vowels' in name)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, block("yaml")],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["ttrl_vowels"]


ENTRY = "from ttrl import Objective\nLOSS = Objective('one_loss:loss', settings=('clip_low',))\n"


def test_an_entry_that_cannot_be_loaded_harms_only_its_users(site: Path) -> None:
    broken = {
        "ttrl.objectives": {"mine": "broken_entries:LOSS"},
        "ttrl.tasks": {"its": "broken_entries:get"},
    }
    install(site, "broken", broken, broken_entries="import no_such_module\n")
    said = (
        "objective is 'mine'; ttrl.objectives: 'mine' of broken 1.0 cannot be loaded from broken_entries:LOSS: "
        "ModuleNotFoundError: No module named 'no_such_module'; fix that package"
    )
    with pytest.raises(ConfigError) as caught:
        ObjectiveConfig.parse({"objective": "mine"}, "here")
    (problem,) = caught.value.problems
    assert problem.startswith(said)
    assert ObjectiveConfig().problems() == []
    config = TrainConfig(run="r", model="m", iterations=1, training={"objective": "mine"})
    (problem,) = config.problems()
    assert problem.startswith(f"training: {said}")
    with pytest.raises(UserError, match=r"'its' of broken 1\.0 cannot be loaded"):
        TaskSpec.parse("its")
    TaskSpec.parse("countdown")


def test_an_entry_of_another_kind(site: Path) -> None:
    groups = {"ttrl.loggers": {"mine": "other_kind:Mine"}}
    install(site, "other-kind", groups, other_kind="class Mine:\n    pass\n")
    with pytest.raises(UserError, match=r"of type type; it must be a ttrl\.Logger"):
        LOGGERS["mine"]
    (problem,) = logger_problems("mine")
    assert problem.startswith("ttrl.loggers: 'mine' of other-kind 1.0: other_kind:Mine is of type")


@pytest.mark.parametrize(
    ("name", "owners"), [("mine", "one 1.0 and two 1.0"), ("gspo", "ttrl and one 1.0 and two 1.0")]
)
def test_a_name_that_two_packages_claim(site: Path, name: str, owners: str) -> None:
    for package in ("one", "two"):
        install(site, package, {"ttrl.objectives": {name: "one_entry:LOSS"}})
    with pytest.raises(ConfigError) as caught:
        ObjectiveConfig.parse({"objective": name}, "here")
    (problem,) = caught.value.problems
    assert f"; ttrl.objectives: {name!r} is claimed by {owners}; rename" in problem
    assert OBJECTIVES.names().count(name) == 1


def test_an_entry_with_a_setting_that_is_none(site: Path) -> None:
    entry = "from ttrl import Objective\nLOSS = Objective('a:b', settings=('clip_hi',))\n"
    install(site, "one", {"ttrl.objectives": {"mine": "no_setting:LOSS"}}, no_setting=entry)
    (problem,) = ObjectiveConfig(objective="mine").problems()
    assert problem.startswith("objective 'mine': its entry names the setting 'clip_hi'; it may")


WRONG_LOSSES = {
    "def loss(logprobs_N, clip_low, temperature): pass": "takes temperature; it may take only "
    "logprobs_N, old_logprobs_N, advantages_N, samples_N, and the settings of its entry: "
    "clip_low",
    "def loss(logprobs_N, chosen_N, clip_low): pass": "takes chosen_N; it may take only",
    "def loss(logprobs_N): pass": "does not take clip_low; remove",
    "def loss(logprobs_N, clip_low): return -logprobs_N.sum(), {}": r"returns \(tensor\(3",
    "def loss(logprobs_N, clip_low): return -logprobs_N": r"returns tensor\(\[1., 2.\]",
    "def loss(logprobs_N, clip_low): return logprobs_N.detach(), {}": r"returns \(tensor\(\[",
    "def loss(logprobs_N, clip_low): return 1 / 0": r"fails on 2 tokens: ZeroDivisionError.* "
    r"\(one_loss.py, line 1\)",
    "def loss(logprobs_N, clip_low): return logprobs_N * float('nan'), {}": "returns .*nan.* for 2 "
    "tokens; it must return the loss of each token, a finite",
    "import torch\n\ndef loss(logprobs_N, clip_low): return -logprobs_N * torch.ones(2), {}": "fails "
    "on 5 tokens: RuntimeError",
    "import no_such_module": "cannot be loaded: ModuleNotFoundError: No module named",
}


@pytest.fixture
def install_loss(site: Path) -> Iterator[Callable[[str], None]]:
    """Install a loss, as the objective "mine"."""

    def put(code: str) -> None:
        groups = {"ttrl.objectives": {"mine": "one_entry:LOSS"}}
        install(site, "one", groups, one_entry=ENTRY, one_loss=f"{code}\n")

    yield put
    for name in ("one_entry", "one_loss"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("code", WRONG_LOSSES)
def test_a_wrong_loss(code: str, install_loss: Callable[[str], None]) -> None:
    install_loss(code)
    where = r"^ttrl\.objectives: 'mine' of one 1\.0(: | names )one_loss:loss(, and it)?"
    with pytest.raises(UserError, match=f"{where} {WRONG_LOSSES[code]}"):
        objective_from(ObjectiveConfig(objective="mine"))


def test_a_wrong_loss_is_told_before_a_run_starts(
    install_loss: Callable[[str], None], tmp_path: Path
) -> None:
    install_loss("def loss(logprobs_N, clip_low): return None")
    settings = {"model": "tiny", "iterations": 1, "tasks_per_iteration": 1}
    config = TrainConfig(run=str(tmp_path / "run"), training={"objective": "mine"}, **settings)
    with pytest.raises(ConfigError, match=r"one 1\.0: one_loss:loss returns None for 2 tokens"):
        train(config, TaskSpec.parse("countdown").tasks(1))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", OBJECTIVES.names())
def test_the_entries_of_ttrls_objectives(name: str) -> None:
    objective_from(ObjectiveConfig(objective=name))


@pytest.mark.parametrize("name", LOGGERS.names())
def test_the_entries_of_ttrls_loggers(name: str) -> None:
    assert callable(LOGGERS.load(name, LOGGERS[name].make))
