"""Reading the answer out of a reply: where it stands, and which number it is. For graders; every function takes linear time.

Replies come from a model that is paid for whatever a grader takes for right, so one rule holds for all of them: the last answer
counts, what a model thinks aloud does not, and what cannot be read for certain is not an answer.
"""

import re
import unicodedata
from fractions import Fraction

from ttrl.tasks.task import Choice

LONGEST_NUMBER = 60
"""Characters. Longer runs of digits are no answer to any question here, and arithmetic with them would take long."""

_SIGNS = str.maketrans(
    {
        "−": "-", "－": "-", "﹣": "-", "‐": "-", "‑": "-",
        "＋": "+", "＄": "$", "％": "%", "，": ",", "．": ".", "／": "/", "⁄": "/", "∕": "/", "＃": "#",
        "٬": ",", "٫": ".", "’": "'", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u2007": " ", "\u200b": "",
    }
)  # fmt: skip
# The digits of a number with its separators, an exponent, and what may not follow a number that is to be read.
_RUN = re.compile(r"[0-9][0-9,.'_]*|\.[0-9]+")
_PLAIN = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
_GROUPED = re.compile(r"[0-9]{1,3}(?:(?:,[0-9]{3})+|(?:'[0-9]{3})+|(?:_[0-9]{3})+)(?:\.[0-9]*)?")
_EXPONENT = re.compile(r"[eE][+-]?[0-9]{1,2}(?![0-9A-Za-z.])")
_SPACED = re.compile(r"(?<![0-9.,'_])([0-9]{1,3})((?: [0-9]{3})+)(?![0-9,'_])")
# The exponent of a unit, "18 m^2", and degrees: no part of the number before them.
_UNIT_EXPONENT = re.compile(
    r"(?<![A-Za-z])((?:[mcdk]?m|in|ft|yd|mi|inch(?:es)?|feet|foot|met(?:er|re)s?|units?)\}?) ?\^\{?[23]\b\}?"
)
_ALTERNATIVES = ("or", "oder", "ou", "または", "或")
_RANGES = ("-", "–", "—", "~", "to", "bis")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,60})\}\{([^{}]{1,60})\}")


def reply_text(choice: Choice) -> str:
    """Return the text of a reply; "" where there is none."""
    return choice.message.content or ""


def after_thinking(text: str) -> str:
    """Return what follows the last `</think>`; "" for thinking that never ends; everything where there is none."""
    end, start = text.rfind("</think>"), text.rfind("<think>")
    if start > end:
        return ""
    return text if end < 0 else text[end + len("</think>") :]


def find_tagged(text: str) -> tuple[int, int] | None:
    """Return (start, end) of what the last `<answer>` tags hold, open ones too (a stop string cuts the closing tag off)."""
    lower = ascii_lower(text)
    start = lower.rfind("<answer>")
    if start < 0:
        return None
    start += len("<answer>")
    end = lower.find("</answer>", start)
    return start, len(text) if end < 0 else end


def find_after(text: str, mark: str, *, skip: str = "", most: int = 0) -> tuple[int, int] | None:
    """Find the rest of the line after the last `mark`, in either case, less up to `most` characters of `skip` at its start."""
    start = ascii_lower(text).rfind(mark)
    if start < 0:
        return None
    start += len(mark)
    rest = text[start : start + most]
    start += len(rest) - len(rest.lstrip(skip)) if skip else 0
    return start, _line_end(text, start)


def latest(text: str, *places: tuple[int, int] | None) -> str | None:
    """Return what stands at that of these places that begins last; None where there are none."""
    start, end = max((place for place in places if place is not None), default=(0, -1))
    return text[start:end] if end >= 0 else None


def last_line(text: str) -> str:
    """Return the last line that is not empty, nor the end of a code block."""
    text = text.rstrip(" \t\r\n`")
    return text[text.rfind("\n") + 1 :]


def find_boxed(text: str) -> tuple[int, int] | None:
    r"""Return (start, end) of what stands in the last `\boxed{…}` (LaTeX), braces balanced; None where none is complete."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return start, start + match.start()
    return None


def marked(text: str) -> str | None:
    r"""Return what the reply marks as its answer, by `<answer>` tags, `\boxed{}` or `####`, whichever begins last, or None.

    After `####` that is the rest of the line, or the next line that is not empty where the rest holds no digit.
    """
    text = text.replace("＃", "#")
    after = find_after(text, "####")
    if after is not None and not any(character.isdecimal() for character in text[after[0] : after[1]]):
        rest = text[after[1] :]
        after = after[0], _line_end(text, after[1] + len(rest) - len(rest.lstrip()))
    return latest(text, find_tagged(text), find_boxed(text), after)


def ascii_lower(text: str) -> str:
    """Lower the letters a to z alone: `str.lower` can change the length of a text ("İ")."""
    return text.lower() if text.isascii() else "".join(c.lower() if c.isascii() else c for c in text)


def ascii_digits(text: str) -> str:
    """Write decimal digits of all scripts (full-width, Arabic-Indic, …) as 0–9, and signs as ASCII.

    A superscript becomes `^2` and a fraction in one character `^`: no number can be read where they stand.
    """
    if text.isascii():
        return text
    return "".join(c if c.isascii() else _as_ascii(c) for c in text.translate(_SIGNS))


def _as_ascii(character: str) -> str:
    decimal = unicodedata.decimal(character, None)
    if decimal is not None:
        return str(decimal)
    digit = unicodedata.digit(character, None)
    if digit is not None:
        return f"^{digit}"
    if unicodedata.category(character) == "No":
        return "^"
    return character


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly; None without one, or when it cannot be read for certain.

    Read are signs, decimals, thousands separators (comma, apostrophe, underscore, space), fractions (3/4, LaTeX's too), exponents
    (1e3), digits of any script, whatever units stand around (also m^2). "1,5", "1.2.3", "10^3", "2½", "2 or 3" and "2-3" cannot
    be read.
    """
    text = ascii_digits(text)
    text = _FRACTION.sub(r" \1/\2 ", text).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    text = _UNIT_EXPONENT.sub(r"\1", text).replace("^\\circ", "").replace("^{\\circ}", "")
    text = _SPACED.sub(lambda match: match[1] + match[2].replace(" ", ""), text)
    last = before = None
    for match in _RUN.finditer(text):
        before, last = last, match
    if last is None:
        return None
    if before is not None and _is_exponent(text, before, last):
        return _scale(_value(text, before), text[before.end() : last.end()])
    if before is not None:
        between = _between(text, before, last)
        if between in _ALTERNATIVES or (between in _RANGES and "\n" not in text[before.end() : last.start()]):
            return None
    value = _value(text, last)
    if value is not None and before is not None and _rstrip_digits(text, last.start()).endswith("/"):
        between = text[before.end() : last.start()]
        if between.strip(" $") == "/":  # 3/4: a fraction, not the number 4
            top = _value(text, before)
            return None if top is None or value == 0 else top / value
    return value


def _between(text: str, before: "re.Match[str]", last: "re.Match[str]") -> str:
    """Return a short text between two numbers, without spaces and currency signs around it."""
    return text[before.end() : min(last.start(), before.end() + 20)].strip(" \n$€£¥\\").lower()


def _rstrip_digits(text: str, end: int) -> str:
    return text[max(0, end - 3) : end].rstrip(" $")


def _is_exponent(text: str, before: "re.Match[str]", last: "re.Match[str]") -> bool:
    place = _EXPONENT.match(text, before.end())
    return place is not None and place.end() == last.end()


def _scale(value: Fraction | None, exponent: str) -> Fraction | None:
    return None if value is None else value * Fraction(10) ** int(exponent[1:])


def _value(text: str, match: "re.Match[str]") -> Fraction | None:
    """Return the number that stands at a run of digits, with its sign."""
    digits = match[0].rstrip(".,'_")
    end = match.start() + len(digits)
    if (
        len(digits) > LONGEST_NUMBER
        or text[end : end + 1] == "^"
        or (text[end : end + 2] == "**" and text[end + 2 : end + 3].isdigit())
    ):
        return None
    if _GROUPED.fullmatch(digits):
        digits = re.sub("[,'_]", "", digits)
    elif not _PLAIN.fullmatch(digits):
        return None
    start = match.start()
    head = text[max(0, start - 8) : start]
    if head.endswith("^") or (head.endswith("**") and head[-3:-2].isdigit()) or head.rstrip("{(").endswith("^"):
        return None
    return Fraction(digits) * (-1 if _is_negative(head) else 1)


def _is_negative(head: str) -> bool:
    """Return whether the text before a number ends with its sign: "-", "-$", "$-"; not a hyphen ("a-5") or a minus ("7-5")."""
    if head.endswith("-"):
        body = head[:-1]
    else:
        body = head.rstrip("$€£¥₹\\")
        if body == head or not body.endswith("-"):
            return False
        body = body[:-1]
    return not body or not (body[-1].isalnum() or body[-1] in ")-")


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end
