"""Print a table of how many lines of each room were run, from the .coverage file that `pytest --cov=ttrl` leaves.

Lines that run only in other processes (servers, trainers, graders) count as missed: only pytest's own processes are measured.
"""

from collections import Counter
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    measured = Coverage(data_file=str(ROOT / ".coverage"))
    measured.load()
    lines: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for path in (ROOT / "ttrl").rglob("*.py"):
        _, statements, _, missing, _ = measured.analysis2(str(path))
        room = path.parent.relative_to(ROOT).as_posix()
        lines[room] += len(statements)
        missed[room] += len(missing)
    lines["all"], missed["all"] = lines.total(), missed.total()
    print(f"{'room':<32}{'statements':>12}{'missed':>8}{'run':>8}")
    for room in [*sorted(lines.keys() - {"all"}), "all"]:
        if lines[room]:
            print(f"{room:<32}{lines[room]:>12,}{missed[room]:>8,}{1 - missed[room] / lines[room]:>8.1%}")


if __name__ == "__main__":
    main()
