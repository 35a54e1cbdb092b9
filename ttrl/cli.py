"""The command `ttrl`: thin. Each subcommand imports what it needs when it runs, so that `ttrl --help` is instant.

Exit codes: 0 done; 1 the answer is no (doctor: this machine cannot run ttrl); 2 something given is wrong, or ttrl stopped for a
reason that it knows, which is said in a line or two without a traceback; 130 interrupted.
"""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ttrl import __version__
from ttrl.errors import TtrlError


def _doctor(arguments: argparse.Namespace) -> int:
    from ttrl import doctor

    print("Looking at this machine (about 15 s) ...", file=sys.stderr, flush=True)
    findings = doctor.examine(Path.cwd())
    print(doctor.render(findings))
    return 1 if any(finding.mark == "bad" for finding in findings) else 0


def _report(arguments: argparse.Namespace) -> int:
    from ttrl.loop.report import write_report

    print(write_report(arguments.run))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The subcommands that exist, and nothing else."""
    parser = argparse.ArgumentParser(
        prog="ttrl", description="Train a language model by reinforcement learning on your own machine."
    )
    parser.add_argument("--version", action="version", version=f"ttrl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="say whether this machine can run ttrl, and what to do if not")
    doctor.set_defaults(run_command=_doctor)

    report = commands.add_parser("report", help="write a run's report.html again and print where it is")
    report.add_argument("run", type=Path, metavar="RUN", help="a run folder, such as runs/sort_letters")
    report.set_defaults(run_command=_report)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return int(arguments.run_command(arguments))
    except TtrlError as error:
        print(f"ttrl: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ttrl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `ttrl doctor | head`: the reader has seen enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
