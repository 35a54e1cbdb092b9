"""Two owners of one run that stall, are killed and take over from each other at any moment: never
two leads, no marker lost.

A model-based test of both media: a disk that two machines share, whose flock does not reach, and an
object store. Each owner is a thread that stops before every operation on the medium; what
hypothesis draws is who does how many next, and what goes wrong. TTRL_TESTS_SCHEDULES=1000 tries
that many.
"""

import errno
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace
from support import os_calls

from ttrl import TrainConfig
from ttrl.errors import TtrlError
from ttrl.facts import PhaseFacts
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.lease import FolderLease
from ttrl.run_folder.mirror import Mirror
from ttrl.run_folder.mirror_resume import take_from
from ttrl.run_folder.owner import describe_process
from ttrl.system.mirror_store import MirrorStore

SCHEDULES = int(os.environ.get("TTRL_TESTS_SCHEDULES", "12"))
PHASES = [(0, "prepare"), (1, "rollouts"), (1, "pack"), (1, "validate")]
KINDS = {
    phase: msgspec.defstruct("By", [("by", str)], bases=(PhaseFacts,), namespace={"phase": phase})
    for _, phase in PHASES
}


class Killed(BaseException):
    pass


class Owner(threading.Thread):
    """A process that holds the run and does all phases; it goes on only while `step` lets it."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self._work, self._go, self._stopped = work, threading.Semaphore(0), threading.Semaphore(0)
        self.over = self.killed = False
        self.fault = None
        self.start()

    def run(self):
        self._go.acquire()
        try:
            self._work()
        except (Killed, TtrlError, OSError):
            pass
        finally:
            self.over = True
            self._stopped.release()

    def step(self):
        if not self.over:
            self._go.release()
            self._stopped.acquire()

    def kill(self):
        self.killed = True
        while not self.over:
            self.step()
        self.join()


def doing(operation):
    """Do an operation, once the owner whose thread this is is let do it. ESTALE comes in its place,
    EIO instead of its answer.
    """
    owner = threading.current_thread()
    if not isinstance(owner, Owner):
        return operation()
    owner._stopped.release()
    owner._go.acquire()
    if owner.killed:
        raise Killed
    fault, owner.fault = owner.fault, None
    result = None if fault == errno.ESTALE else operation()
    if fault is not None:
        raise OSError(fault, os.strerror(fault))
    return result


class SteppedStore(MirrorStore):
    first_pause, beat_seconds = 0.0, 0.0

    def write(self, *arguments):
        return doing(lambda: super(SteppedStore, self).write(*arguments))

    def swap(self, *arguments):
        return doing(lambda: super(SteppedStore, self).swap(*arguments))

    def read(self, *arguments):
        return doing(lambda: super(SteppedStore, self).read(*arguments))

    def remove(self, *arguments):
        return doing(lambda: super(SteppedStore, self).remove(*arguments))


def on_its_machine(path):
    """The run folder of an owner on a machine of its own. In the worst case: no heartbeat is ever
    seen.
    """
    boot = uuid4().hex
    return RunFolder(
        path, FolderLease(path, 0.0, describe=lambda: replace(describe_process(), boot=boot))
    )


class Disk(RuleBasedStateMachine):
    """A shared disk, and the rules of both media."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.folder = Path(tempfile.mkdtemp())
        self.address = f"memory://{uuid4().hex}"
        self.owners = [None, None]
        self.leads = []
        """Names of those that have held the run, in order."""
        self.seen, self.tokens = {}, [None]
        self.started = 0
        self.without_locks = os_calls.refused("fcntl.flock", errno.ENOLCK)
        self.without_locks.__enter__()
        self.prepare()

    def prepare(self):
        for name in ("mkdir", "rmdir", "link", "unlink", "rename", "replace", "listdir"):
            original = getattr(os, name)

            def stepped(*arguments, original=original, **options):
                return doing(lambda: original(*arguments, **options))

            self.patch.setattr(os, name, stepped)

    def work(self, name):
        """Hold the run and do what is left of it, as the process `name`."""
        folder = on_its_machine(self.folder / "run")
        with folder.locked(take_over=True):
            self.do(folder, name, lambda: None)

    def do(self, folder, name, uploaded):
        self.leads.append(name)
        for number, phase in PHASES:
            if not folder.iteration(number).is_done(phase):
                folder.iteration(number).mark(KINDS[phase](by=name))
            uploaded()

    def markers(self):
        paths = (self.folder / "run").glob("iterations/*/done/[!.]*.json")
        return {str(path): path.read_bytes() for path in paths}

    def by(self, content):
        return json.loads(content)["facts"]["by"]

    @rule(which=st.integers(0, 1))
    def start(self, which):
        owner = self.owners[which]
        if owner is None or owner.over:
            name, self.started = f"{'AB'[which]}{self.started}", self.started + 1
            self.owners[which] = Owner(lambda: self.work(name))

    @rule(which=st.integers(0, 1), count=st.sampled_from([1, 1, 2, 3, 5, 8, 13, 40]))
    def go_on(self, which, count):
        if (owner := self.owners[which]) is not None:
            for _ in range(count):
                owner.step()
                self.nothing_is_lost()

    @rule(which=st.integers(0, 1), number=st.sampled_from([errno.ESTALE, errno.EIO]))
    def fail(self, which, number):
        if (owner := self.owners[which]) is not None:
            owner.fault = number

    @precondition(lambda self: any(self.owners))
    @rule(which=st.integers(0, 1))
    def kill(self, which):
        if (owner := self.owners[which]) is not None:
            owner.kill()

    @invariant()
    def nothing_is_lost(self):
        there, seen = self.markers(), self.seen
        self.seen = there
        for key, content in seen.items():
            assert there.get(key) == content, (
                f"{key} was overwritten, by {self.by(there[key])} after {self.by(content)}"
            )
        for key in there.keys() - seen.keys():
            assert self.by(there[key]) == self.leads[-1], (
                f"{key} is by {self.by(there[key])}, while {self.leads[-1]} leads"
            )

    def teardown(self):
        """Whatever has happened, the next one does what is left."""
        try:
            for owner in self.owners:
                if owner is not None:
                    owner.kill()
            self.work("last")
            self.nothing_is_lost()
            assert len(self.seen) == len(PHASES)
        finally:
            self.patch.undo()
            self.without_locks.__exit__(None, None, None)
            shutil.rmtree(self.folder)


class Store(Disk):
    """An object store; each owner comes on a machine of its own, with nothing of the run. What was
    under way to the store when another took over may still arrive there, but never in place of the
    other's.
    """

    def prepare(self):
        """Nothing: the store itself steps."""

    def work(self, name):
        folder = on_its_machine(self.folder / name)
        config = TrainConfig(run=str(folder.path), model="m", iterations=9, mirror=self.address)
        mirror = Mirror(SteppedStore(self.address), folder, config)
        with folder.locked(), mirror.lease.held(take_over=True):
            take_from(mirror.store, folder)
            # The owner itself uploads.
            self.do(folder, name, mirror._try_pass)

    def markers(self):
        store = MirrorStore(self.address)
        return {key: store.read(key) for key in store.keys() if "/done/" in key}  # noqa: SIM118 - not a mapping

    @invariant()
    def nothing_is_lost(self):
        there, seen, record = (
            self.markers(),
            self.seen,
            MirrorStore(self.address).read("owner.json"),
        )
        self.seen = there
        for key, content in seen.items():
            before, now = (self.leads.index(self.by(one[key])) for one in (seen, there))
            assert there[key] == content or now > before, (
                f"{key} was overwritten, by {self.leads[now]}, of {self.leads}"
            )
        if record is not None and (token := json.loads(record)["token"]) != self.tokens[-1]:
            assert token not in self.tokens, "who was taken over owns the run again"
            self.tokens.append(token)


@pytest.mark.parametrize("medium", [Disk, Store])
def test_never_two_leads_and_no_marker_lost(medium):
    run_state_machine_as_test(
        medium, settings=settings(max_examples=SCHEDULES, stateful_step_count=25)
    )
