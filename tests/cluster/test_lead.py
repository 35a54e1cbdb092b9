"""The lead of a run on a cluster: one at a time, and it goes on when its machine or the program
that began it dies.
"""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray")
import ray
from support.fake_ray import FakeRay, actor
from support.ray_cluster import RayCluster, cluster_of

from ttrl import TrainConfig
from ttrl.cluster import lead
from ttrl.cluster import ray_connection as connection
from ttrl.cluster.lead import Lead
from ttrl.errors import ConfigError, RunFolderError, RunFolderInUseError, ServerDiedError, UserError
from ttrl.system.console import Console

SCRIPT = textwrap.dedent(
    """
    import sys
    from ttrl import TrainConfig
    from ttrl.cluster.lead import run_detached
    from ttrl.errors import RunFolderError
    from ttrl.system.console import Console

    folder, address, iterations = sys.argv[1:]

    def work(folder, tasks, take_over):
        import os, time
        assert len(tasks) == 4000
        from pathlib import Path
        import ray
        place = f"{ray.get_runtime_context().get_node_id()} {os.getpid()} {take_over}"
        with open(Path(folder, "began"), "a") as file:
            print(place, file=file, flush=True)
        while not Path(folder, "gate").exists():
            time.sleep(0.05)
        if Path(folder, "fails").exists():
            raise RunFolderError("the disk is gone")
        Path(folder, "finished").write_text(place)
        return place

    config = TrainConfig(run=folder + "/run", model="tiny", iterations=int(iterations), cluster=address)
    tasks = [f"{n} " * 50 for n in range(4000)]  # what is large stays with the driver, if Ray has it as an argument
    print("result", run_detached(config, work, {"folder": folder, "tasks": tasks}, Console()), flush=True)
    """
)


def wait_for(condition: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def begun(folder: Path) -> list[str]:
    path = folder / "began"
    return path.read_text().splitlines() if path.exists() else []


def driver(
    folder: Path, cluster: RayCluster, iterations: int = 1, **environment: str
) -> subprocess.Popen[str]:
    (folder / "drive.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(folder / "drive.py"), str(folder), cluster.address, str(iterations)],
        env=cluster.environment | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_one_lead_that_outlives_its_machine_and_its_driver(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """Only this kills a machine of Ray's under a lead, and comes with another token."""
    first = driver(tmp_path, cluster)
    wait_for(lambda: begun(tmp_path))
    second, stranger = driver(tmp_path, cluster), driver(tmp_path, cluster, RAY_AUTH_TOKEN="f" * 64)
    assert (
        "another program waits for it; to end it: ray kill-" in second.communicate(timeout=90)[0]
        and second.returncode
    )
    assert "cannot be used" in stranger.communicate(timeout=90)[0] and stranger.returncode
    assert len(begun(tmp_path)) == 1
    # The driver dies, and then the lead's machine.
    first.send_signal(signal.SIGKILL)
    first.communicate()
    nodes = cluster.ask("look")["nodes"]
    home = begun(tmp_path)[0].split()[0]
    victim = next(name for name, node in nodes.items() if node == home)
    pid = int(begun(tmp_path)[0].split()[1])
    cluster.ask(f"kill {victim}")
    cluster.ask(f"add {victim} 2")
    wait_for(lambda: len(begun(tmp_path)) == 2)
    place, _, take_over = begun(tmp_path)[1].split()
    assert place != home and take_over == "True"
    assert not os.path.exists(f"/proc/{pid}")  # two were never there at once
    (tmp_path / "gate").touch()
    wait_for((tmp_path / "finished").exists)
    # Nobody asked for the result: the same command takes the name over, and goes on where the run
    # is.
    third = driver(tmp_path, cluster)
    said = third.communicate(timeout=90)[0]
    assert "result" in said and third.returncode == 0, said
    assert len(begun(tmp_path)) == 3


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(400)
def test_drivers_that_die(cluster: RayCluster, tmp_path: Path) -> None:
    """Long: only this kills several drivers of a run. What the next one finds and says, without
    Ray: below.
    """
    first = driver(tmp_path, cluster)
    wait_for(lambda: len(begun(tmp_path)) == 1)
    # The same command waits for the run in its place; one that wants another run does not.
    first.send_signal(signal.SIGKILL)
    first.communicate()
    time.sleep(10.5)
    other = driver(tmp_path, cluster, iterations=2)
    assert "it has other settings" in other.communicate(timeout=90)[0] and other.returncode
    second = driver(tmp_path, cluster)
    assert second.stdout is not None and any(
        "the run is already active" in line for line in second.stdout
    )
    (tmp_path / "gate").touch()
    assert "result" in second.communicate(timeout=90)[0] and second.returncode == 0
    assert len(begun(tmp_path)) == 1
    # A run that fails while nobody waits: the same command says why, and starts it anew.
    (tmp_path / "gate").unlink()
    third = driver(tmp_path, cluster)
    wait_for(lambda: len(begun(tmp_path)) == 2)
    third.send_signal(signal.SIGKILL)
    third.communicate()
    (tmp_path / "fails").touch()
    (tmp_path / "gate").touch()
    time.sleep(10.5)
    (tmp_path / "fails").unlink()
    fourth = driver(tmp_path, cluster)
    said = fourth.communicate(timeout=90)[0]
    assert (
        "note: the run ended with no program waiting for it: the disk is gone" in said
        and fourth.returncode == 0
    ), said
    assert len(begun(tmp_path)) == 3


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_cluster_that_asks_for_no_token_is_refused_unless_that_is_accepted(
    tmp_path: Path,
) -> None:
    """Long, as it starts another cluster: only this shows that Ray tells a lead so. What a lead
    does then: below.
    """
    with cluster_of(tmp_path, {"a": 1}, RAY_AUTH_MODE="disabled") as cluster:
        careful = driver(tmp_path, cluster, RAY_AUTH_MODE="token")
        said = careful.communicate(timeout=90)[0]
        assert careful.returncode and "this Ray cluster needs no token" in said, said
        assert not begun(tmp_path)
        (tmp_path / "gate").touch()
        knowing = driver(tmp_path, cluster)
        said = knowing.communicate(timeout=90)[0]
        assert knowing.returncode == 0 and "result" in said, said


def test_a_name_that_is_said_to_be_taken_late(tmp_path: Path) -> None:
    """By ray:// an actor is there at once, and its first method raises."""
    taken = ray.exceptions.ActorAlreadyExistsError("the name is taken")
    cluster = FakeRay(Mock(__ray_ready__=Mock(remote=Mock(side_effect=taken))))
    cluster.named = actor(looked_at=lambda config: (False, "another program waits for it"))
    config = TrainConfig(
        run=str(tmp_path / "run"),
        model="tiny",
        iterations=1,
        cluster="ray://127.0.0.1:10001",
        device="cpu",
    )
    with pytest.raises(RunFolderError, match="another program waits for it"):
        lead._begin(config, print, {}, Console(), cluster)


def config_of(folder: Path, iterations: int = 1) -> TrainConfig:
    return TrainConfig(
        run=str(folder / "run"), model="tiny", iterations=iterations, cluster="auto", device="cpu"
    )


def end_of(lead: Any) -> Any:
    wait_for(lambda: lead._done)
    return lead._done


def test_who_may_wait_for_a_lead(tmp_path: Path) -> None:
    """Nobody while another program asks; then who wants the same run."""
    gate, now = threading.Event(), [0.0]

    def work(take_over: bool) -> str:
        assert take_over and gate.wait(30)
        return "result"

    one = Lead(config_of(tmp_path), work, {}, True, clock=lambda: now[0])
    now[0] = 9.0
    assert (
        one.looked_at(config_of(tmp_path)) == (False, "another program waits for it")
        and one.done() is None
    )
    now[0] += 10.0
    assert one.looked_at(config_of(tmp_path, iterations=2)) == (False, "it has other settings")
    assert one.looked_at(config_of(tmp_path)) == (False, None)
    gate.set()
    assert end_of(one) == ("result", None) == one.done()
    now[0] += 10.0
    assert one.looked_at(config_of(tmp_path)) == (True, None)


def test_a_lead_refuses_a_cluster_that_asks_for_no_token(tmp_path: Path) -> None:
    work = Mock(return_value="result")
    name, said = end_of(Lead(config_of(tmp_path), work, {}, False, authentication=""))[1]
    assert name == "UserError" and "this Ray cluster needs no token" in said and not work.called
    accepting = Lead(config_of(tmp_path), work, {}, True, authentication="")
    assert end_of(accepting) == ("result", None)


def test_a_lead_waits_for_an_owner_that_has_just_died(tmp_path: Path) -> None:
    work = Mock(side_effect=[RunFolderInUseError("by another"), RunFolderError("the disk is gone")])
    one = Lead(config_of(tmp_path), work, {}, True)
    assert end_of(one) == (None, ("RunFolderError", "the disk is gone")) and work.call_count == 2


def test_the_next_driver_joins_a_lead_or_says_how_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [(False, None), (True, None)]
    other = actor(
        looked_at=lambda config: answers.pop(0),
        done=lambda: (None, ("RunFolderError", "the disk is gone")),
    )
    new = actor()
    cluster = FakeRay(ValueError("taken"), ValueError("taken"), new)
    cluster.named = other
    assert lead._begin(config_of(tmp_path), print, {}, Console(), cluster) == (other, False)
    assert lead._begin(config_of(tmp_path), print, {}, Console(), cluster) == (new, True)
    assert (
        "note: the run ended with no program waiting for it: the disk is gone"
        in capsys.readouterr().out
    )
    assert cluster.killed == [other]


def test_errors_travel_as_words() -> None:
    died = connection.from_words(connection.as_words(ServerDiedError("it is gone")))
    assert type(died) is ServerDiedError and str(died) == "it is gone"
    both = connection.from_words(connection.as_words(ConfigError("config", ["a", "b"])))
    assert isinstance(both, UserError) and "2 problems" in str(both)
    assert "ZeroDivisionError: by 0" in str(
        connection.from_words(connection.as_words(ZeroDivisionError("by 0")))
    )


def test_tasks_too_large_for_a_cluster_are_refused() -> None:
    with pytest.raises(UserError, match=r"at most 0 MB of a run; make tasks smaller"):
        lead._lead_of(None, print, {"tasks": [os.urandom(2000)]}, False, largest=1000)
