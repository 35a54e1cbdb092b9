"""The report's HTML: escaping, sections, figures.

What a model wrote is untrusted. All text goes through `text_html`; nothing else here or on the pages makes HTML out of text.
"""

import re
from html import escape

_FOLD, _CUT = 700, 20_000  # characters of a message: folded away from, cut off at
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def text_html(value: object) -> str:
    """Any text as HTML: escaped, control characters as their visible symbols, lone surrogates as question marks."""
    text = _CONTROL.sub(lambda match: chr(0x2421 if match[0] == "\x7f" else 0x2400 + ord(match[0])), str(value))
    return escape(text.encode("utf-8", "replace").decode("utf-8"))


def section(title: str, body: str, lead: str = "") -> str:
    """A titled section, nothing when its body is empty. title, lead and body are HTML."""
    if not body:
        return ""
    return f"<section><h2>{title}</h2>{f'<p class=lead>{lead}</p>' if lead else ''}{body}</section>"


def figure(title: str, chart: str | None, caption: str, keys: str = "") -> str:
    """A chart with its title, an explaining caption and its legend; nothing without a chart. All are HTML."""
    if chart is None:
        return ""
    return f"<figure><figcaption><b>{title}</b><p>{caption}</p></figcaption>{keys}{chart}</figure>"


def grid(*figures: str) -> str:
    """Figures beside each other, as many as fit."""
    body = "".join(figures)
    return f'<div class="grid-of-charts">{body}</div>' if body else ""


def folded(text: str, css: str) -> str:
    """Model text; long text is folded, very long text is cut with a word about it."""
    cut = f"\n… ({len(text) - _CUT:,} more characters in the run folder)" if len(text) > _CUT else ""
    body = f'<div class="{css}" dir="auto">{text_html(text[:_CUT] + cut)}</div>'
    if len(text) <= _FOLD:
        return body
    return f"<details><summary>{text_html(text[:160].strip())} … <em>({len(text):,} characters)</em></summary>{body}</details>"
