"""Cut text into tokens: numbers, words, brackets, operators, and LaTeX's arithmetic macros."""

import re
import unicodedata
from collections.abc import Container, Mapping
from dataclasses import dataclass
from fractions import Fraction

LONGEST_NUMBER = 60
"""Limit on the characters of a number. Longer runs of digits answer no question here and make
arithmetic slow.
"""


def by_replacement(replacements: Mapping[str, str]) -> dict[int, str]:
    """Return a table for `str.translate`: from each replacement, all of its characters."""
    return {ord(one): new for new, old in replacements.items() for one in old}


_SIGNS = by_replacement(
    {
        "-": "−－﹣‐‑",
        "+": "＋",
        "$": "＄",
        "%": "％",
        ",": "，٬",
        ".": "．٫",
        "/": "／⁄∕",
        "#": "＃",
        "'": "’",
        " ": "\u00a0\u202f\u2009\u2007",
        "": "\u200b",
    }
)
_OPERATORS = by_replacement(
    {
        "-": "–‒",
        "*": "×·⋅∗✕＊\u2062",
        "/": "÷",
        ":": "∶：",
        "=": "＝",
        "(": "（",
        ")": "）",
        "[": "［",
        "]": "］",
        "{": "｛",
        "}": "｝",
        "^": "＾",
        "~": "～",
        "": "\u2060\ufeff\u2061",
    }
)
_RAISED = re.compile("[⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_RAISED_DIGITS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")

# LaTeX without a meaning for numbers.
_SPACES = re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~(?=\\)")
_STYLES = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|boxed|fbox|underline|emph|boldsymbol"
    r"|math(?:bf|it|sf|tt|normal)|text(?:bf|it|rm|tt|sf|normal)|bm|bf|rm|it)(?![A-Za-z])"
)
_TEXTS = re.compile(r"\\(?:text|mathrm|mbox|hbox|operatorname)\s*\{([^{}]*)\}")
_HIDDEN = re.compile(
    r"\\(?:begin|end|tag\*?|label|(?:text)?color|colorbox|phantom|[hv]space\*?)"
    r"\s*\{[^{}]*\}"
)
_DEGREES = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])")
# The exponent in "18 m^2" and "18 m/s^2" belongs to the unit.
_UNIT_EXPONENT = re.compile(
    r"(?<![A-Za-z])((?:[mcdk]?m|in|ft|yd|mi|s|sec|inch(?:es)?|feet|foot|met(?:er|re)s?|seconds?"
    r"|units?)\}?) ?\^\{?[23]\b\}?"
)

_PLAIN = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
_GROUPED = re.compile(
    r"[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?:'[0-9]{3})+|(?:_[0-9]{3})+|(?: [0-9]{3})+)"
    r"(?:\.[0-9]*)?"
)
_EXPONENT = re.compile(r"[eE][+-]?[0-9]{1,2}(?![0-9A-Za-z]|\.[0-9])")
_UNREADABLE_EXPONENT = re.compile(r"[eE][+-]?[0-9][0-9.]*")
_TOKEN = re.compile(
    r"""(?P<newline>\n|\\\\)
    |(?P<blank>[^\S\n]+)
    |(?P<tag></?[A-Za-z][^<>\n]{0,40}>)
    |(?P<arrow>[-=]+>)
    |(?P<dash>-{3,}|—)
    |(?P<number>(?<![0-9.,'_])[1-9][0-9]{0,2}(?:\ [0-9]{3})+(?![0-9,'_])(?:\.[0-9]+)?
        |[0-9][0-9,.'_]*|\.[0-9]+)
    |(?P<macro>\\(?:[A-Za-z]+|.))
    |(?P<word>[^\W\d_]+(?:'[^\W\d_]+)*)
    |(?P<symbol>\*+|.)""",
    re.VERBOSE,
)

# Symbols, and the macros for them.
_SYMBOLS = {
    "%": r"\%",
    "_": r"\_",
    "-": r"\-",
    "+": r"\+",
    "*": r"\* \ast \times \cdot",
    "/": r"\div \over",
    "±": r"\pm \mp",
    "≠": r"\ne \neq",
    "<": r"\lt",
    "≤": r"\le \leq \leqslant",
    "≥": r"\ge \geq \geqslant \gt",
    "∈": r"\in",
    "∪": r"\cup \setminus \mid",
    "∩": r"\cap",
}
_SYMBOL_OF = {macro: symbol for symbol, macros in _SYMBOLS.items() for macro in macros.split()}
_MONEY = frozenset({"\\$", "\\pounds", "\\euro", "\\yen", "\\textdollar", "\\cent", "\\cents"})
AT_A_NUMBER = frozenset("xyznie")
"""Letters other than units: in `4x`, `3i` and `2e` the number is multiplied."""


@dataclass(frozen=True)
class Token:
    """A piece of text, of the kind newline, tag, arrow, dash, number, macro, word, symbol, open or
    close.
    """

    kind: str
    text: str
    gap: bool
    """White space stands before it."""
    priced: bool
    """A currency sign stands before it."""
    value: Fraction | None = None
    """The value of a number. None if it cannot be read."""
    is_whole: bool = False
    """It is a number without a point and an exponent."""

    @property
    def apart(self) -> bool:
        """Whether anything stands between it and the token before."""
        return self.gap or self.priced

    def is_symbol(self, symbols: Container[str]) -> bool:
        """Return whether it is one of these symbols."""
        return self.kind == "symbol" and self.text in symbols


def tokens(text: str) -> list[Token]:
    """Cut a text returned by `simplified` into tokens."""
    found: list[Token] = []
    place = 0
    gap = priced = False
    while place < len(text):
        match = _TOKEN.match(text, place)
        assert match is not None and match.lastgroup is not None
        kind = match.lastgroup
        piece = match[0]
        place = match.end()
        if kind == "blank":
            gap = gap or not priced
            continue
        if _is_money(kind, piece):
            priced = True
            continue
        if kind == "number":
            token, place = _number(text, match.start(), piece, gap, priced)
        else:
            token = _token(kind, piece, gap, priced)
        found.append(token)
        gap = priced = False
    return found


def _token(kind: str, piece: str, gap: bool, priced: bool) -> Token:
    if piece in _SYMBOL_OF:
        return Token("symbol", _SYMBOL_OF[piece], gap, priced)
    if piece in ("\\{", "\\}"):
        piece = piece[1]
    if piece in ("(", "[", "{"):
        kind = "open"
    elif piece in (")", "]", "}"):
        kind = "close"
    return Token(kind, piece, gap, priced)


def _is_money(kind: str, piece: str) -> bool:
    if kind == "macro":
        return piece in _MONEY
    return kind == "symbol" and unicodedata.category(piece[0]) == "Sc"


def _number(text: str, start: int, run: str, gap: bool, priced: bool) -> tuple[Token, int]:
    """Return the token of a run of digits and its end. Separators at the end of the run are
    punctuation.
    """
    digits = run.rstrip(".,'_")
    end = start + len(digits)
    plain = digits
    if _GROUPED.fullmatch(digits):
        plain = re.sub("[,'_ ]", "", digits)
    value = None
    if len(digits) <= LONGEST_NUMBER and _PLAIN.fullmatch(plain):
        value = Fraction(plain)
    exponent = _EXPONENT.match(text, end)
    if exponent is not None:
        if value is not None:
            value *= Fraction(10) ** int(exponent[0][1:])
        return Token("number", digits, gap, priced, value), exponent.end()
    unreadable = _UNREADABLE_EXPONENT.match(text, end)
    if unreadable is not None:
        return Token("number", digits, gap, priced), unreadable.end()
    return Token("number", digits, gap, priced, value, plain.isdigit()), end


def simplified(text: str) -> str:
    """Write a text with ASCII digits and operators, and without LaTeX meaningless for numbers."""
    if not text.isascii():
        text = ascii_digits("".join(map(_spelled_fraction, raised(text)))).translate(_OPERATORS)
    if "\\" in text or "{" in text:
        text = text.replace("{,}", ",").replace("\\!", "")
        text = _DEGREES.sub("", _HIDDEN.sub(" ", text))
        text = _STYLES.sub("", _SPACES.sub(" ", text))
        text = _TEXTS.sub(_shown_text, text)
    if "^" in text:
        return _UNIT_EXPONENT.sub(r"\1", text)
    return text


def raised(text: str) -> str:
    """Write superscripts as LaTeX does: "10⁻²" → "10^{-2}"."""
    return _RAISED.sub(lambda match: "^{" + match[0].translate(_RAISED_DIGITS) + "}", text)


def _spelled_fraction(character: str) -> str:
    """Return " 1/2 " for "½", and any other character unchanged."""
    if character.isascii() or unicodedata.category(character) != "No":
        return character
    spelled = unicodedata.normalize("NFKC", character)
    if re.fullmatch("[0-9]+⁄[0-9]+", spelled):
        return f" {spelled} "
    return character


def _shown_text(match: "re.Match[str]") -> str:
    r"""Return the content of `\text{…}`: words, a variable, or a group with a number in it."""
    content = match[1]
    if any(character.isdigit() for character in content):
        return "{" + content + "}"
    if content in AT_A_NUMBER:
        return content
    return f" {content} "


def ascii_digits(text: str) -> str:
    """Write decimal digits of all scripts (full-width, Arabic-Indic, …) as 0–9, and signs as ASCII.

    A superscript becomes `^2`. A fraction in one character becomes `^`: no number can be read
    there.
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


def has_digit(text: str) -> bool:
    """Return whether a text holds a digit of any script, a superscript, or a fraction in one
    character.
    """
    return any(map(is_digit, text))


def is_digit(character: str) -> bool:
    """Return whether a character is a digit of any script, a superscript, or a fraction."""
    if character.isascii():
        return character.isdigit()
    return character.isdigit() or unicodedata.category(character) == "No"
