"""Store the files of a mirrored run folder as objects, by the same relative paths. See
`ttrl.run_folder.mirror`.

Addresses, credentials (only from the environment) and redaction in messages are those of the
completions cache.
"""

import contextlib
import fcntl
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import obstore
from obstore import exceptions
from obstore.store import LocalStore, ObjectStore

from ttrl.errors import StorageError
from ttrl.system.files import atomic_file
from ttrl.system.object_store import Limits, Store, reason
from ttrl.text import gib

logger = logging.getLogger(__name__)

LIMITS = Limits(request=180.0)
T = TypeVar("T")


class Tag(NamedTuple):
    """Changes with every write of an object; Google's store compares the version, the others the
    e_tag.
    """

    e_tag: str | None
    version: str | None


class MirrorStore:
    """Whole objects by key. Every method raises OSError with the reason for a failure."""

    part_bytes = 16 * 2**20
    """Larger objects are moved in parts, each with its own request."""
    most_read = 2**30
    """Largest object to read into memory, such as a marker, in bytes: any writer to a mirror could
    make one of any size.
    """
    first_pause = 0.5
    longest_pause = 60.0
    beat_seconds = 10.0
    last_wait_seconds = 600.0
    """The longest wait of a finished run for its mirror."""

    def __init__(self, address: str) -> None:
        self._store = Store(address, what="a mirror", limits=LIMITS)
        self.shown = self._store.shown

    def keys(self) -> dict[str, int]:
        """Return the sizes of all objects by key."""
        return (
            self._doing(
                "list",
                lambda store: {
                    one["path"]: one["size"] for page in obstore.list(store) for one in page
                },
            )
            or {}
        )

    def read(self, key: str) -> bytes | None:
        """Return an object's content; None without such an object."""
        return self.read_tagged(key)[0]

    def read_tagged(self, key: str) -> tuple[bytes | None, Tag | None]:
        """Return an object's content and its tag; None twice without such an object."""

        def get(store: ObjectStore) -> tuple[bytes, Tag] | None:
            try:
                found = obstore.get(store, key)
                if found.meta["size"] > self.most_read:
                    size = gib(found.meta["size"])
                    most = gib(self.most_read)
                    raise ValueError(
                        f"it has {size}, and ttrl reads at most {most}; no run writes that much "
                        "there: remove it"
                    )
                return bytes(found.bytes()), Tag(found.meta["e_tag"], found.meta["version"])
            except FileNotFoundError:
                return None

        return self._doing(f"read {key}", get) or (None, None)

    def write(self, key: str, content: bytes | Path) -> None:
        """Replace an object in one step. Raises FileNotFoundError if the file `content` is gone."""
        if isinstance(content, Path):
            content = content.resolve(strict=True)  # store the targets of links
        self._doing(
            f"write {key}",
            lambda store: obstore.put(store, key, content, chunk_size=self.part_bytes),
            make=True,
        )

    def swap(self, key: str, content: bytes, tag: Tag | None) -> Tag | None:
        """Write an object if it still has this tag (None: if there is none); return its new tag,
        None if it has another. Also None if the store did it and its first answer was lost: read it
        to tell. A store without tags or conditions overwrites.
        """

        def put(store: ObjectStore) -> Tag | None:
            with contextlib.ExitStack() as stack:
                mode: Any = "create"
                if tag is not None:
                    known = {name: value for name, value in tag._asdict().items() if value}
                    mode = known or "overwrite"
                if isinstance(store, LocalStore) and tag is not None:  # it only knows creating
                    if (
                        not stack.enter_context(self._locked(key))
                        or obstore.head(store, key)["e_tag"] != tag.e_tag
                    ):
                        return None
                    mode = "overwrite"
                try:
                    done = obstore.put(store, key, content, mode=mode, use_multipart=False)
                except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                    return None
                except (exceptions.BaseError, OSError, NotImplementedError) as error:
                    if not self._store.refuses_conditions(error):
                        raise
                    done = obstore.put(store, key, content, use_multipart=False)
                return Tag(done["e_tag"], done["version"])

        return self._doing(f"write {key}", put, make=True)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[bool]:
        """Block other swaps of this object, within the reach of flock; yield whether the object
        exists.
        """
        assert self._store.folder is not None
        path = self._store.folder / key
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    file = stack.enter_context(open(path, "rb"))
                except FileNotFoundError:
                    yield False
                    return
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                with contextlib.suppress(FileNotFoundError):
                    # Else it was replaced during our wait.
                    if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                        yield True
                        return

    def fetch(self, key: str, size: int, target: Path) -> None:
        """Write an object to a file, atomically."""

        def get(store: ObjectStore) -> None:
            with atomic_file(target, size) as temporary, open(temporary, "wb") as file:
                for start in range(0, size, self.part_bytes):
                    try:
                        part = obstore.get_range(
                            store, key, start=start, end=min(size, start + self.part_bytes)
                        )
                    except OSError as error:  # such as "not found": not from our disk
                        raise ValueError(reason(error)) from error
                    file.write(part)

        self._doing(f"read {key}", get)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects. Harmless for missing ones."""

        def delete(store: ObjectStore) -> None:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(store, key)

        self._doing("remove", delete)

    def _doing(
        self, what: str, work: Callable[[ObjectStore], T], *, make: bool = False
    ) -> T | None:
        """Return the result of `work` with the store; None if the store is a missing folder, not to
        be made.
        """
        try:
            store = self._store.open(make=make)
            if store is None:
                return None
            return work(store)
        except StorageError:
            raise  # from our own disk
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise OSError(f"{self.shown}: could not {what}: {reason(error)}") from error

    def patiently(self, work: Callable[[], T], tries: int = 4) -> T:
        """Return the result of `work`, with retries after growing pauses. Raises the last try's
        error.
        """
        for number in range(1, tries):
            try:
                return work()
            except StorageError:
                raise
            except OSError as error:
                logger.warning("%s; trying again", error)
                time.sleep(self.pause_before(number))
        return work()

    def pause_before(self, number: int) -> float:
        """Return the seconds before the n-th retry, slightly random to spread many runs."""
        return float(
            min(self.longest_pause, self.first_pause * 2 ** (number - 1))
            * random.uniform(0.75, 1.25)
        )
