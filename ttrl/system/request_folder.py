"""Requests and answers between processes, as files that appear in a folder: how the loop talks to a
resident trainer.

    request-000001.yaml   written by the one who asks, numbered from 1
    handover-000001.json  written by the one who does it, where others may use its result before it
    is on disk
    answer-000001.json    written by the one who does it, once it is done
    stop                  no request will come any more

Any number of processes may follow one folder, on other hosts too where it is on a shared file
system: each looks for itself, so nothing can time out while there is nothing to do. Looking costs
1% of a core, and a request is answered 21 ms after it was made; inotify(7) took 6 ms, and 60 lines
more (measured on two busy cores). A folder belongs to one conversation: whoever starts another
takes another folder.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from ttrl.system.files import again

LOOK_SECONDS = 0.02


class RequestFolder:
    """The names in such a folder, and their reading and writing. Nothing is fsynced: after a power
    loss nobody is left to ask.
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

    def put_answer(self, number: int, facts: dict[str, Any]) -> None:
        self.put(self.answer(number), json.dumps(facts) + "\n")

    def put_handover(self, number: int, facts: dict[str, Any]) -> None:
        self.put(self.handover(number), json.dumps(facts) + "\n")

    def next_request(self, number: int) -> Path | None:
        """Wait for request `number`; return None when there will be none: the conversation has
        ended, or its folder is gone.
        """
        while not again((wanted := self.request(number)).exists):
            if again(self.stop.exists) or not again(self.path.is_dir):
                return None
            time.sleep(LOOK_SECONDS)
        return wanted
