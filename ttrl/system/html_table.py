"""Write small tables as HTML for notebooks, with every text escaped.

Notebooks style tables by themselves, in light and dark; so there are no styles here but alignment.
"""

import re
from collections.abc import Sequence
from html import escape

from ttrl.text import harmless

_LONG = 40
_NUMBER = re.compile(r"[-+<$]?[\d.,]+(?:e[-+]?\d+)?\s?[%kMGTP]?")


def html_table(
    rows: Sequence[Sequence[str]], *, caption: str = "", notes: Sequence[str] = ()
) -> str:
    """Return a table with its heading in the first row, a caption above and notes below.

    >>> from ttrl.system.html_table import html_table
    >>> html_table([["task", "reward"], ["<b>", "1"]]).count("&lt;b&gt;")
    1
    """
    heads = "".join(f'<th style="text-align:left">{_escaped(head)}</th>' for head in rows[0])
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[1:])
    parts = []
    if caption:
        parts.append(f"<p><b>{_escaped(caption)}</b></p>")
    parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>")
    parts += [f"<p>{_escaped(note)}</p>" for note in notes]
    return "".join(parts)


def html_text(text: str) -> str:
    """Return a text as HTML with its line breaks and spaces, in a fixed width."""
    return f"<pre>{_escaped(text)}</pre>"


def _cell(text: str) -> str:
    if _NUMBER.fullmatch(text):
        return f"<td>{_escaped(text)}</td>"
    style = "text-align:left"
    if len(text) > _LONG:  # else columns of short words would be cut into letters
        style += ";overflow-wrap:anywhere"
    return f'<td style="{style}">{_escaped(text)}</td>'


def _escaped(text: str) -> str:
    return escape(harmless(text))
