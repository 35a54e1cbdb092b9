"""`tune` and the process below it: exit codes are read, logs are shown, and nothing is left
running.
"""

import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import yaml
from support.pretended_tune import PretendedTune
from tqdm.auto import tqdm

from ttrl.errors import ConfigError, StorageError, TrainerError
from ttrl.launch.tune import GRPO_RECIPE, SFT_RECIPE, TrainerProcess, follow_progress, tune


def run(tmp_path, code, pbar=False):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with TrainerProcess(command, tmp_path / "train.log", tmp_path / "progress") as process:
        process.show(process.ended, pbar=pbar, pbar_desc="training")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Replaces the recipe's process by a script of the test's: `recipe.runs(code)`,
    `recipe.starts`.
    """
    return PretendedTune(monkeypatch, tmp_path)


SAVE = """
import pathlib, sys, yaml
config = yaml.safe_load(open(sys.argv[-1]))
folder = pathlib.Path(config["output_dir"], "checkpoint")
folder.mkdir()
(folder / "config.json").write_text("{}")
print("saved")
"""


def test_a_recipe_that_succeeds(tmp_path, recipe):
    recipe.runs(SAVE)
    config = {"output_dir": str(tmp_path), "lr": 1e-5, "state": None, "betas": [0.9, 0.95]}
    assert tune(config, tmp_path / "grpo.yaml") == tmp_path / "checkpoint"
    assert recipe.starts == [["run", GRPO_RECIPE, "--config", str(tmp_path / "grpo.yaml")]]
    assert yaml.safe_load((tmp_path / "grpo.yaml").read_text()) == config
    assert (tmp_path / "train.log").read_text() == "saved\n"


def test_torchrun_and_another_recipe_and_log(tmp_path, recipe):
    recipe.runs(SAVE)
    tune(
        {"output_dir": str(tmp_path)},
        tmp_path / "sft.yaml",
        recipe=SFT_RECIPE,
        nproc_per_node=2,
        torchrun_args=["--nnodes", "2"],
        log_path=tmp_path / "other.log",
    )
    assert recipe.starts == [
        [
            "run",
            "--nproc_per_node",
            "2",
            "--nnodes",
            "2",
            SFT_RECIPE,
            "--config",
            str(tmp_path / "sft.yaml"),
        ]
    ]
    assert (tmp_path / "other.log").is_file()


def test_success_without_a_checkpoint_is_no_success(tmp_path, recipe):
    recipe.runs("print('nothing to do')")
    with pytest.raises(TrainerError, match="holds no checkpoint"):
        tune({"output_dir": str(tmp_path)}, tmp_path / "grpo.yaml")


def test_a_failed_recipe_is_an_error_even_where_a_checkpoint_lies(tmp_path, recipe):
    recipe.runs(SAVE + "sys.exit(1)")
    with pytest.raises(TrainerError, match=r"exit code 1"):
        tune({"output_dir": str(tmp_path)}, tmp_path / "grpo.yaml")


def test_configs_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="output_dir is missing"):
        tune({"lr": 1}, tmp_path / "grpo.yaml")
    with pytest.raises(ConfigError, match="use plain values"):
        tune({"output_dir": str(tmp_path), "model": Path("x")}, tmp_path / "grpo.yaml")
    assert not (tmp_path / "grpo.yaml").exists()


def test_an_exit_code_raises_with_the_end_of_the_log(tmp_path):
    with pytest.raises(TrainerError) as caught:
        run(tmp_path, "for n in range(100): print('line', n)\nraise SystemExit(3)")
    message = str(caught.value)
    assert message.startswith("the trainer failed (exit code 3): ")
    assert str(tmp_path / "train.log") in message
    assert message.endswith("line 98\nline 99")
    assert "\nline 70\n" in message
    assert "\nline 69\n" not in message


def test_an_exception_shows_its_traceback(tmp_path):
    with pytest.raises(
        TrainerError, match=r"(?s)exit code 1.*Traceback.*ZeroDivisionError: division by zero"
    ):
        run(tmp_path, "1 / 0")


@pytest.mark.parametrize(
    ("number", "text"),
    [(9, "killed by signal 9, perhaps out of memory"), (11, r"killed by signal 11\)")],
)
def test_a_signal_is_named(tmp_path, number, text):
    with pytest.raises(TrainerError, match=text):
        run(tmp_path, f"import os\nos.kill(os.getpid(), {number})")


def test_a_full_disk_stays_a_storage_error_however_much_is_said_after_it(tmp_path):
    code = """
        import sys
        print("rank 0 ttrl.grpo_recipe: StorageError: could not write /x/checkpoint: No space left on device; make room")
        for n in range(60): print("torchrun has a page of its own", n)
        sys.exit(1)
    """
    with pytest.raises(
        StorageError, match=r"^could not write /x/checkpoint: No space left on device; make room$"
    ):
        run(tmp_path, code)


def test_errors_of_earlier_attempts_in_the_same_log_are_not_this_one(tmp_path):
    with pytest.raises(StorageError):
        run(tmp_path, "print('StorageError: full')\nraise SystemExit(1)")
    with pytest.raises(TrainerError, match="another") as caught:
        run(tmp_path, "print('another')\nraise SystemExit(1)")
    assert "StorageError" not in str(caught.value).split("train.log:")[1]
    # Appended all the same.
    assert (tmp_path / "train.log").read_text() == "StorageError: full\nanother\n"


def test_a_command_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match="cannot start '/no/such/program'"):
        TrainerProcess(["/no/such/program"], tmp_path / "log", tmp_path / "p").start()


def test_the_process_is_told_where_to_report_progress_and_to_keep_compiled_code(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = (
        "import os\nopen(os.environ['TTRL_PROGRESS_FILE'], "
        "'w').write(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    )
    run(tmp_path, code + "\nassert os.environ['PATH']")
    assert (tmp_path / "progress").read_text() == str(tmp_path / "ttrl" / "inductor")


def test_the_bar_follows_the_progress_file(tmp_path, capsys):
    progress = tmp_path / "progress"
    with tqdm(desc="x", total=None, file=open(os.devnull, "w")) as bar:
        for content in ("", "3", "a b", "3 10 4"):
            progress.write_text(content)
            follow_progress(progress, bar)
            assert (bar.n, bar.total) == (0, None)
        for content, expected in (("3 10", (3, 10)), ("7 10", (7, 10)), ("7 12", (7, 12))):
            progress.write_text(content)
            follow_progress(progress, bar)
            assert (bar.n, bar.total) == expected


def test_no_bar_outside_of_terminals(tmp_path, capfd):
    run(tmp_path, "import os\nopen(os.environ['TTRL_PROGRESS_FILE'], 'w').write('3 10')", pbar=True)
    assert capfd.readouterr() == ("", "")


def test_interrupted_nothing_is_left_running(tmp_path):
    code = f"""
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}\\n")
        time.sleep(600)
    """

    def interrupt():
        while not ((tmp_path / "pids").exists() and (tmp_path / "pids").read_text().endswith("\n")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, code)
    thread.join()
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
