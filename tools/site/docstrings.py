"""Turn ttrl's docstrings into Markdown for the site (hooks.py applies it).

They are written for `help()`: a paragraph explains arguments as lines of `name: meaning`, and an
example is a paragraph of doctest or an indented block. Markdown would run the first together, and
take the second for quotations.
"""

import re

ARGUMENT = re.compile(r"(?=^\w+: )", re.MULTILINE)
CONTINUED = re.compile(r"\n+ +")


def as_markdown(text: str) -> str:
    """Return a docstring as Markdown."""
    return "\n\n".join(_paragraph(one) for one in re.split(r"\n\n(?! )", text))


def _paragraph(text: str) -> str:
    if text.startswith(">>> "):
        return f"```pycon\n{text.rstrip()}\n```"
    if re.match(r"\w+: ", text):
        return _arguments(text)
    if re.search(r"\n    \w+ {2,}", text):
        return _choices(text)
    return text


def _arguments(text: str) -> str:
    """Return lines of `name: meaning` as a list."""
    items = []
    for one in ARGUMENT.split(text):
        name, mark, meaning = one.strip().partition(": ")
        if mark:
            items.append(f"- `{name}`: {CONTINUED.sub(' ', meaning)}")
        elif name:
            items.append(f"{name}\n")
    return "\n".join(items)


def _choices(text: str) -> str:
    """Return a text with an indented table of choices as preformatted below its first line."""
    before, _, rest = text.partition("\n    ")
    lines = ("    " + rest).split("\n")
    inside = [line.removeprefix("    ") for line in lines if line.startswith("    ")]
    after = [line for line in lines if not line.startswith("    ")]
    table = "\n".join(inside)
    return f"{before}\n\n```text\n{table}\n```\n\n" + "\n".join(after)
