"""The run's trainer, resident and once, on a recipe that only pretends: a script that follows the
same folder without torch.
"""

import errno
import os
import signal
import threading
import time

import msgspec
import pytest
import yaml
from support import os_calls
from support.fake_vllm import canary_of
from support.pretended_tune import PretendedTune

from ttrl import TrainConfig
from ttrl.errors import StorageError, TrainerDiedError, TrainerError
from ttrl.launch.nodes import torchrun_arguments
from ttrl.launch.trainer import Trainer
from ttrl.launch.tune import TrainerProcess, tune_command
from ttrl.records import Handover
from ttrl.run_folder.folder import RunFolder
from ttrl.system.console import Console

# What each test lets happen in an iteration is Python in the setting "do", with the names of this
# script.
RECIPE = """
import contextlib, itertools, os, pathlib, sys, time, traceback, yaml
from ttrl.system.request_folder import RequestFolder

def train(config):
    exec(config.get("do") or "")
    output = pathlib.Path(config["output_dir"])
    if config.get("handover"):
        folder.put_handover(number, config["handover"])
        exec(config.get("do_beside") or "")
    (output / "checkpoint").mkdir(parents=True)
    (output / "checkpoint" / "config.json").write_text("{}")
    (output / "pid").write_text(str(os.getpid()))

start = yaml.safe_load(open(sys.argv[-1]))
print("started", flush=True)
if start.get("follow") is None:
    train(start)
    sys.exit()
folder = RequestFolder(start["follow"])
(folder.path.parent.parent / "waits").write_text(str(os.getpid()))
exec(start.get("do_at_start") or "")
for number in itertools.count(1):
    request = folder.next_request(number)
    if request is None:
        break
    config = yaml.safe_load(open(request))
    log = open(pathlib.Path(config["output_dir"], "train.log"), "a")
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            train(config)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        finally:
            log.flush()
    folder.put_answer(number, {})
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """`made("resident")`: a trainer, ended after the test; `made.config(number, **more)`: an
    iteration's config.
    """
    trainers = []
    PretendedTune(monkeypatch, tmp_path).runs(RECIPE)

    def make(form="resident", elsewhere=None, **settings):
        config = TrainConfig(
            run=str(tmp_path / "run"), model="m", iterations=3, trainer=form, **settings
        )
        trainers.append(
            Trainer(config, RunFolder(tmp_path / "run"), Console(quiet=True), elsewhere)
        )
        return trainers[-1]

    def config(number, **more):
        return {
            "output_dir": str(tmp_path / f"run/iterations/{number:04d}"),
            "iteration": number,
            "device": "cpu",
        } | more

    make.config, make.run = config, tmp_path / "run"
    yield make
    for trainer in trainers:
        trainer.stop()


def wait_until(condition):
    """Long, where the machine is busy; a test never depends on how long."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("nothing happened for a minute")


def pid_of(made, number):
    return int((made.run / f"iterations/{number:04d}/pid").read_text())


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("form", ["resident", "once"])
def test_iterations_leave_their_files(made, form):
    trainer = made(form)
    for number in (1, 2):
        config = made.config(number, lr=1e-5, state=None)
        assert (
            trainer.make_checkpoint(number, config)
            == made.run / f"iterations/{number:04d}/checkpoint"
        )
        folder = made.run / f"iterations/{number:04d}"
        assert yaml.safe_load((folder / "grpo.yaml").read_text()) == config
        assert (folder / "train.log").exists()
    assert (pid_of(made, 1) == pid_of(made, 2)) == (form == "resident")
    assert is_alive(pid_of(made, 2)) == (form == "resident")
    trainer.stop()
    assert not is_alive(pid_of(made, 2))
    assert not (made.run / "trainer").exists()
    trainer.stop()


SAID = {
    "memory": "/proc/7/fd/3",
    "parts": [["w", [0], [2], "sha"]],
    "canary": canary_of(0.5),
}


def test_weights_that_are_handed_over_before_they_are_written(made):
    trainer, hold = made(), made.run / "hold"
    hold.parent.mkdir(exist_ok=True)
    hold.touch()
    wait = f"while os.path.exists({str(hold)!r}): time.sleep(0.01)"
    checkpoint = trainer.make_checkpoint(1, made.config(1, handover=SAID, do_beside=wait))
    assert trainer.handover(1) == msgspec.convert(SAID, Handover) and trainer.handover(0) is None
    trainer.check()
    assert not checkpoint.exists()
    hold.unlink()
    trainer.wait_until_saved()
    assert checkpoint.exists()
    trainer.wait_until_saved()
    trainer.make_checkpoint(2, made.config(2))
    # There was no memory for them.
    assert trainer.handover(1) is None and trainer.handover(2) is None
    trainer.wait_until_saved()
    trainer.make_checkpoint(
        3, made.config(3, handover=SAID | {"compared": {"mean": 0.1}}, save=False)
    )
    assert trainer.holding == 3 and trainer.compared.mean == 0.1
    trainer.make_checkpoint(4, made.config(4, handover=SAID))
    assert trainer.holding is None and trainer.wait_until_saved()
    trainer.stop()
    assert trainer.handover(4) is None


def test_a_death_before_what_was_handed_over_is_written(made):
    trainer = made()
    trainer.make_checkpoint(1, made.config(1, handover=SAID, do_beside="os.kill(os.getpid(), 9)"))
    with pytest.raises(TrainerDiedError):
        trainer.wait_until_saved()
    assert trainer.handover(1) is None
    trainer.make_checkpoint(1, made.config(1, handover=SAID))
    trainer.wait_until_saved()
    trainer.make_checkpoint(2, made.config(2, handover=SAID, do_beside="os.kill(os.getpid(), 9)"))
    with pytest.raises(TrainerDiedError):  # somebody else looks first
        while True:
            trainer.check()
    assert not trainer.wait_until_saved()


def test_it_can_be_started_before_it_is_needed(made):
    trainer = made()
    trainer.start(made.config(1, packed="not/there/yet"))
    trainer.start(made.config(1))
    wait_until((made.run / "waits").exists)
    trainer.check()
    (start,) = (made.run / "trainer").glob("*/start.yaml")
    assert yaml.safe_load(start.read_text())["packed"] == ""
    trainer.make_checkpoint(1, made.config(1))
    assert pid_of(made, 1) == int((made.run / "waits").read_text())
    once = made("once")
    once.start(made.config(2))
    once.check()
    assert once._resident is None


def death_of(trainer):
    """What `check` says, once it does."""
    found = []

    def died():
        try:
            trainer.check()
        except TrainerError as error:
            found.append(str(error))
        return bool(found)

    wait_until(died)
    return found[0]


def test_the_death_of_one_that_waits_is_noticed_and_another_takes_its_place(made):
    trainer = made()
    trainer.make_checkpoint(1, made.config(1))
    os.kill(pid_of(made, 1), signal.SIGKILL)
    message = death_of(trainer)
    assert "(killed by signal 9, perhaps out of memory)" in message
    assert f"The end of its log, {made.run / 'logs/trainer.log'}:\nstarted" in message
    trainer.check()
    trainer.make_checkpoint(2, made.config(2))
    assert pid_of(made, 1) != pid_of(made, 2)


def test_a_death_that_nobody_noticed_comes_to_light_with_the_next_iteration(made):
    trainer = made()
    trainer.make_checkpoint(1, made.config(1))
    os.kill(pid_of(made, 1), signal.SIGKILL)
    wait_until(lambda: not is_alive(pid_of(made, 1)))
    with pytest.raises(TrainerError, match="killed by signal 9"):
        trainer.make_checkpoint(2, made.config(2))
    trainer.make_checkpoint(2, made.config(2))


@pytest.mark.long(but=["exception-once", "exception-resident", "signal-once", "signal-resident"])
@pytest.mark.parametrize("form", ["resident", "once"])
@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (
            "print('line'); sys.exit(3)",
            TrainerError,
            r"(?s)\(exit code 3\): .*train\.log:\n(started\n)?line$",
        ),
        ("1 / 0", TrainerError, r"(?s)\(exit code 1\): .*ZeroDivisionError: division by zero$"),
        ("os.kill(os.getpid(), 11)", TrainerError, r"\(killed by signal 11\): "),
        (
            "print('r: StorageError: could not write /x'); print('more'); sys.exit(1)",
            StorageError,
            "^could not write /x$",
        ),
    ],
    ids=["exit", "exception", "signal", "disk"],
)
def test_faults_end_it_with_their_own_message(made, form, code, error, text):
    """Long for exits and full disks: only these have no exception to tell of."""
    trainer = made(form)
    with pytest.raises(error, match=text):
        trainer.make_checkpoint(1, made.config(1, do=code))
    trainer.check()
    if "exit(3)" in code:  # the others have left nothing behind either
        trainer.make_checkpoint(1, made.config(1))  # by another process


def test_errors_of_an_earlier_attempt_in_the_same_log_are_not_this_one(made):
    trainer = made()
    with pytest.raises(StorageError):
        trainer.make_checkpoint(1, made.config(1, do="print('StorageError: full'); sys.exit(1)"))
    with pytest.raises(TrainerError, match=r"another$") as caught:
        trainer.make_checkpoint(1, made.config(1, do="print('another'); sys.exit(1)"))
    assert "StorageError" not in str(caught.value)
    assert (made.run / "iterations/0001/train.log").read_text() == "StorageError: full\nanother\n"


def test_what_torchrun_has_to_say_is_shown_too(made):
    """It goes to the process's own log: a rank that was killed says nothing."""
    do = (
        "print('rank 0 was here'); sys.stdout.flush(); os.write(1, b'rank 1 was killed by signal "
        "9\\n'); os._exit(1)"
    )
    with pytest.raises(TrainerError) as caught:
        made().make_checkpoint(1, made.config(1, do=do))
    logs = [made.run / "iterations/0001/train.log", made.run / "logs/trainer.log"]
    assert str(caught.value).endswith(f"The end of its log, {logs[0]}:\nrank 0 was here")
    assert f"The end of {logs[1]}:\nstarted\nrank 1 was killed by signal 9\n" in str(caught.value)


def test_an_end_without_an_answer_is_no_success(made):
    trainer = made()
    with pytest.raises(TrainerError, match="ended by itself in the middle of an iteration"):
        trainer.make_checkpoint(1, made.config(1, do="os._exit(0)"))
    trainer.make_checkpoint(1, made.config(1))


def test_an_answer_without_a_checkpoint_is_no_success(made):
    trainer = made()
    with pytest.raises(TrainerError, match="holds no checkpoint"):
        trainer.make_checkpoint(1, made.config(1, do="config['output_dir'] += '/elsewhere'"))
    trainer.make_checkpoint(1, made.config(1))


def test_one_that_cannot_even_start(made):
    trainer = made()
    with pytest.raises(
        TrainerError, match=r"(?s)exit code 1.*logs/trainer\.log:.*ConfigError: no such device"
    ):
        trainer.make_checkpoint(
            1,
            made.config(
                1, do_at_start="print('ConfigError: no such device', flush=True); sys.exit(1)"
            ),
        )


@pytest.mark.parametrize("form", ["resident", "once"])
def test_its_process_sees_its_own_gpus_alone(made, form, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    for number, settings, expected in ((1, {"placement": "split"}, "2"), (2, {}, "2,3,5")):
        trainer = made(form, **settings)
        say = (
            "import os, pathlib; pathlib.Path(config['output_dir'], "
            "'gpus').write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
        )
        trainer.make_checkpoint(number, made.config(number, do=say))
        assert (made.run / f"iterations/000{number}/gpus").read_text() == expected
        trainer.stop()


def test_settings_of_the_process_itself_need_another_process(made):
    trainer = made()
    trainer.make_checkpoint(1, made.config(1, lr=1.0))
    trainer.make_checkpoint(2, made.config(2, lr=2.0))
    trainer.make_checkpoint(3, made.config(3, lr=2.0, num_threads=2))
    assert pid_of(made, 1) == pid_of(made, 2) != pid_of(made, 3)
    assert not is_alive(pid_of(made, 1))


def test_it_can_be_stopped_in_the_middle_of_an_iteration(made):
    """On a full disk, too."""
    trainer = made()
    mark = made.run / "working"

    def interrupt():
        wait_until(mark.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        trainer.make_checkpoint(
            1, made.config(1, do=f"open({str(mark)!r}, 'w').close(); time.sleep(600)")
        )
    pid = int((made.run / "waits").read_text())
    with os_calls.refused("open", errno.ENOSPC, "/.stop."):
        trainer.stop()
    assert not is_alive(pid)
    trainer.make_checkpoint(1, made.config(1))


def test_it_ends_when_its_folder_is_gone(made):
    """What another host's rank sees when the run goes on without it."""
    trainer = made()
    trainer.make_checkpoint(1, made.config(1))
    for path in (made.run / "trainer").rglob("*"):
        if path.is_file():
            path.unlink()
    for path in (made.run / "trainer").iterdir():
        path.rmdir()
    assert "ended by itself while it was idle" in death_of(trainer)


def test_the_progress_of_the_iteration_before_is_not_shown_again(made):
    trainer = made()
    write = "open(os.environ['TTRL_PROGRESS_FILE'], 'w').write('3 3'); "
    write += (
        "[int(os.environ[name]) for name in ('ONEDNN_PRIMITIVE_CACHE_CAPACITY', 'GOMP_SPINCOUNT')]"
    )
    trainer.make_checkpoint(1, made.config(1, do=write))
    (progress,) = (made.run / "trainer").glob("*/progress")
    assert progress.read_text() == "3 3"
    trainer.make_checkpoint(2, made.config(2))
    assert not progress.exists()


def test_machines_that_do_not_come(made):
    """torchrun ends with that error then; it has to be said what is wrong, and another start would
    not mend it.
    """

    def elsewhere(config, path, log, variables):
        torchrun = torchrun_arguments(2, "127.0.0.1:29400", path.name, leads=True, join_timeout=90)
        return TrainerProcess(
            tune_command(path / "start.yaml", torchrun_args=torchrun),
            log,
            path / "progress",
            variables,
        )

    trainer = made(nnodes=2, cluster="auto", join_timeout=90, elsewhere=elsewhere)
    trainer.start(
        made.config(1, do_at_start="sys.exit('torch.distributed…api.RendezvousTimeoutError')")
    )
    with pytest.raises(
        TrainerError, match=r"fewer than 2 machines joined within 90 s \(join_timeout\)"
    ) as raised:
        wait_until(trainer.check)
    assert type(raised.value) is TrainerError  # not one that is started again
