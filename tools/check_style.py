"""Measure how plain the code of ttrl/ is, by room, and hold limits.

    python tools/check_style.py [FOLDER]

    ternaries   conditional expressions per 1,000 statements
    tuples      assignments of tuples to tuples per 1,000 statements
    walruses    assignments within expressions per 1,000 statements
    wide        lines of more than 100 columns per 1,000 lines
    relatives   that, which, what, who, where … per 1,000 words of docstrings and comments
    archaic     anew, beside, nobody, thereby … per 1,000 words of docstrings and comments
    m_relative  the words of `relatives` per 1,000 words of messages: all other strings of 3 words
    m_archaic   the words of `archaic` per 1,000 words of messages
    dicts       times that dict[str, Any] is written

Exit status 1 if all rooms together exceed a limit: a target, or a better figure once reached.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

RELATIVES = re.compile(r"\b(that|which|what|who|whom|whose|where|wherever|whatever)\b", re.I)
ARCHAIC = re.compile(
    r"\b(anew|beside|nobody|alone|thereby|therefore|hence|whence|thereof|herein)\b", re.I
)
WIDTH = 100
MEASURES = (
    "ternaries",
    "tuples",
    "walruses",
    "wide",
    "relatives",
    "archaic",
    "m_relative",
    "m_archaic",
    "dicts",
)
PER = {
    "ternaries": "statements",
    "tuples": "statements",
    "walruses": "statements",
    "wide": "lines",
    "relatives": "words",
    "archaic": "words",
    "m_relative": "message words",
    "m_archaic": "message words",
}
LIMITS = {
    "ternaries": 22.0,
    "tuples": 4.0,
    "walruses": 1.2,
    "wide": 0.0,
    "relatives": 14.0,
    "archaic": 0.2,
    "m_relative": 5.0,
    "m_archaic": 0.6,
    "dicts": 60.0,
}


def is_pair(node: ast.Assign) -> bool:
    """Tell whether several names are bound to several values at once."""
    targets = (isinstance(target, ast.Tuple) for target in node.targets)
    return isinstance(node.value, ast.Tuple) and any(targets)


def prose_of(source: str, tree: ast.AST) -> str:
    """Return docstrings and comments."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.append(str(node.value.value))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append(token.string.lstrip("# "))
    return "\n".join(found)


def messages_of(tree: ast.AST) -> str:
    """Return the strings of at least three words outside of docstrings: errors, help, findings."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found.append(node.value)
    return "\n".join(text for text in found if len(text.split()) >= 3)


def count(source: str) -> Counter[str]:
    """Count what is measured, and what it is measured by."""
    tree = ast.parse(source)
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        found["statements"] += isinstance(node, ast.stmt)
        found["ternaries"] += isinstance(node, ast.IfExp)
        found["walruses"] += isinstance(node, ast.NamedExpr)
        found["tuples"] += isinstance(node, ast.Assign) and is_pair(node)
    lines = source.splitlines()
    prose = prose_of(source, tree)
    messages = messages_of(tree)
    found["lines"] = len(lines)
    found["wide"] = sum(len(line) > WIDTH for line in lines)
    found["words"] = len(prose.split())
    found["relatives"] = len(RELATIVES.findall(prose))
    found["archaic"] = len(ARCHAIC.findall(prose))
    found["message words"] = len(messages.split())
    found["m_relative"] = len(RELATIVES.findall(messages))
    found["m_archaic"] = len(ARCHAIC.findall(messages))
    found["dicts"] = source.count("dict[str, Any]")
    return found


def rate(found: Counter[str], measure: str) -> float:
    """Return a measure per 1,000 of what it is measured by, or its count."""
    if measure not in PER:
        return float(found[measure])
    return 1000 * found[measure] / max(1, found[PER[measure]])


def main() -> int:
    """Print a line for each room, and what exceeds its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1] / "ttrl")
    folder = parser.parse_args().folder
    rooms: dict[str, Counter[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        room = parts[0] if len(parts) > 1 else "."
        rooms.setdefault(room, Counter()).update(count(path.read_text(encoding="utf-8")))
    rooms["all"] = sum(rooms.values(), Counter())
    print(f"{'':12}" + "".join(f"{measure:>11}" for measure in MEASURES))
    for room, found in rooms.items():
        print(f"{room:12}" + "".join(f"{rate(found, measure):11.1f}" for measure in MEASURES))
    high = [measure for measure in MEASURES if rate(rooms["all"], measure) > LIMITS[measure]]
    for measure in high:
        figure = rate(rooms["all"], measure)
        print(f"check_style: {measure} are {figure:.1f}; {LIMITS[measure]:.1f} at the most")
    return int(bool(high))


if __name__ == "__main__":
    sys.exit(main())
