"""A `tune` that only pretends: a script in the place of torchtune's, found first by the processes
that ttrl starts.
"""

import json
import os
import textwrap


class PretendedTune:
    """`tune = PretendedTune(monkeypatch, folder)`, then `tune.runs(code)`; its arguments are
    `sys.argv[1:]`.
    """

    def __init__(self, monkeypatch, folder):
        self._script = folder / "pretended" / "torchtune" / "_cli" / "tune.py"
        self._record = folder / "pretended" / "starts.jsonl"
        self._script.parent.mkdir(parents=True)
        for package in (self._script.parent, self._script.parents[1]):
            (package / "__init__.py").touch()
        path = [str(folder / "pretended"), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))

    def runs(self, code):
        """Let every start of it run this code."""
        record = (
            f"import json, sys; open({str(self._record)!r}, 'a').write(json.dumps(sys.argv[1:]) "
            "+ '\\n')"
        )
        self._script.write_text(f"{record}\n{textwrap.dedent(code)}")
        return self

    @property
    def starts(self):
        """The arguments of every start so far."""
        return (
            [json.loads(line) for line in self._record.read_text().splitlines()]
            if self._record.exists()
            else []
        )
