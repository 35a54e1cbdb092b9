"""Recipes without the seconds that `tune run` takes to import: each is forked from a process that
has imported everything.

The parent never computes, so its children begin at once. A child of one process runs torchtune's
own command; children of several run the recipe in the environment that torchrun would give them.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path


class RecipeWorker:
    """`with RecipeWorker() as tune: code = tune(["ttrl/grpo_recipe", "--config", file], log)`."""

    def __enter__(self) -> "RecipeWorker":
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, __file__], text=True, bufsize=1, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        assert self._process.wait(60) == 0

    def __call__(self, arguments: list[str], log: Path, processes: int = 1) -> int:
        """Return the exit code of `tune run ARGUMENTS`, or of the first process that failed; it
        prints to `log`.
        """
        self._process.stdin.write(json.dumps([arguments, str(log), processes]) + "\n")
        return int(self._process.stdout.readline())


def child(arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    try:
        if environment:
            sys.argv = arguments
            runpy.run_module(arguments[0].replace("/", "."), run_name="__main__")
        else:
            from torchtune._cli.tune import main

            sys.argv = ["tune", "run", *arguments]
            main()
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # the end of a process, as Python's own
        traceback.print_exc()
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    import torchtune._cli.tune  # noqa: F401
    from network_hosts import held_port  # beside this file

    import ttrl.grpo_recipe
    import ttrl.sft_recipe  # noqa: F401

    for name in ("ttrl.grpo_recipe", "ttrl.sft_recipe"):
        del sys.modules[name]  # each is run as __main__, with all that it imports there
    gc.collect()
    gc.freeze()
    with held_port() as port:
        for line in sys.stdin:
            arguments, log, processes = json.loads(line)
            torchrun = {
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            children = []
            for rank in range(processes):
                if (pid := os.fork()) == 0:
                    with open(log, "ab") as file:
                        os.dup2(file.fileno(), 1)
                        os.dup2(file.fileno(), 2)
                    child(
                        arguments,
                        torchrun | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                        if processes > 1
                        else {},
                    )
                children.append(pid)
            first_failure = 0
            while children:
                pid, status = os.wait()
                children.remove(pid)
                if (code := os.waitstatus_to_exitcode(status)) and not first_failure:
                    first_failure = code
                    for other in children:  # they would wait for it
                        os.kill(other, signal.SIGKILL)
            sys.stdout.write(f"{first_failure}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
