"""Exchange requests and answers between processes, such as loop and resident trainer, as files in a
folder.

    request-000001.yaml   written by the asking process, numbered from 1
    handover-000001.json  written by the answering process if others may use its result before it
    is on disk
    answer-000001.json    written by the answering process at the end
    stop                  no further request will come

Any number of processes may follow one folder, also from other hosts on a shared file system: each
looks for itself, so no wait for work can time out. Looking costs 1% of a core, and an answer comes
21 ms after its request; inotify(7) took 6 ms, and 60 lines more (measured on two busy cores). A
folder belongs to one conversation; another needs another folder.
"""

import os
import time
from pathlib import Path

from ttrl.facts import dumped
from ttrl.system.files import again

LOOK_SECONDS = 0.02


class RequestFolder:
    """Name, read and write the files of such a folder. Nothing is fsynced: after a power loss no
    process is left to ask.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def request(self, number: int) -> Path:
        return self.path / f"request-{number:06d}.yaml"

    def answer(self, number: int) -> Path:
        return self.path / f"answer-{number:06d}.json"

    def handover(self, number: int) -> Path:
        return self.path / f"handover-{number:06d}.json"

    @property
    def stop(self) -> Path:
        return self.path / "stop"

    def put(self, path: Path, text: str) -> None:
        """Make a file appear as a whole."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)

    def put_answer(self, number: int, facts: object) -> None:
        self.put(self.answer(number), dumped(facts) + "\n")

    def put_handover(self, number: int, facts: object) -> None:
        self.put(self.handover(number), dumped(facts) + "\n")

    def next_request(self, number: int) -> Path | None:
        """Wait for request `number`; return None if the conversation has ended, or its folder is
        gone.
        """
        wanted = self.request(number)
        while not again(wanted.exists):
            if again(self.stop.exists) or not again(self.path.is_dir):
                return None
            time.sleep(LOOK_SECONDS)
        return wanted
