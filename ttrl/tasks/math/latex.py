r"""Write an answer as LaTeX without layout, with its unit, or as plain words.

This module settles or refuses every guess of math-verify's parser: mixed numbers (the parser reads
`11 5/6` as 8/3), numbers next to each other (`1 2 3` is 6 to it), percent, units, number bases, and
words around a formula.
"""

import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

from ttrl.tasks.numerals import ascii_digits, last_number, raised

LONGEST = 1000
"""Limit on the characters of an answer. Longer ones are not read."""
_DEEPEST = 30
_LARGEST_EXPONENT = 9999
_LARGEST_IN_TOWER = 4
_LONGEST_NUMBER = 100

_UNICODE = {
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "φ": r"\phi ",
    "√": r"\sqrt ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": "/", "–": "-", "°": r"^\circ ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "（": "(", "）": ")", "：": ":", "；": ";", "。": ".", "“": "", "”": "",
}  # fmt: skip

_FORMULA = re.compile(
    r"\$\$([^$]+)\$\$|(?<!\\)\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]",
    re.DOTALL,
)
_DELIMITERS = re.compile(r"(?<!\\)\$+|\\[()\[\]]")
_TEXT = r"\\(?:text(?:bf|it|rm|tt|sf|normal)?|mathrm|mbox|hbox|emph)\s*\{([^{}]*)\}"
# Layout, and its replacements. A macro's name ends at its last letter.
_LAYOUT = [
    (re.compile(pattern.replace("END", "(?![A-Za-z])")), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)END\s*\.?", ""),
        (r"\\[dtc]fracEND", r"\\frac"),
        (r"\\!\s*|\{\}", ""),
        (r"\s*\{,\}\s*", ","),
        (r"(?<!\\)\\(?:[,;: ]|q?quadEND|hspace\*?\{[^{}]*\})|~", " "),
        (r"\\(?:\$|pounds|euro|textdollar)|[€£¥₹]", ""),
        (r"\\varnothingEND", r"\\emptyset"),
        (r"\\langleEND", "("),
        (r"\\rangleEND", ")"),
        (r"\\[lr]vertEND", "|"),
        (r"\^\s*(?:\\circEND|\{\s*\\circ\s*\})|\\degreeEND", r" degrees "),
        (r"\\(?:mathrm|mathsf|operatorname|text)\{([A-Za-z])\}", r"\1 "),
        (_TEXT, r" \1 "),
        (r"\\(?:boxed|fbox|underline)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:leqslant|leq)END", r"\\le"),
        (r"\\(?:geqslant|geq)END", r"\\ge"),
        (r"\\neqEND", r"\\ne"),
    )
]
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"(?<=\d)\s*(?:\\text)?\s*({'|'.join(_SCALES)})s?\b", re.IGNORECASE)
_PERCENT = re.compile(r"\s*(?:\\?%|\b(?:percent|percentage|pct)\b)\s*$", re.IGNORECASE)
_JOINT = re.compile(r"\s*,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*,?\s*")
_BASE = re.compile(r"^(-?[0-9A-Z]+)_\{?([0-9]{1,2})\}?$")
_MARKUP = " \t\r\n*`"
_NUMBER = re.compile(
    r"\(?[-+]?\s*(?:[0-9.,'/\s]|\\frac(?![A-Za-z])|[{}]|(?<=[0-9])e[-+]?(?=[0-9]))+"
    r"(?:\\times\s*10\s*\^\s*\{?[-+]?[0-9]{1,2}\}?)?\)?"
)
_LETTER = re.compile(r"[(\[]?\s*([A-Za-z])\s*[)\]]?")

_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
_MIXED = re.compile(r"(?<![0-9.,/^_])([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9.,/])")
_MIXED_MACRO = re.compile(r"(?<![0-9.,/^_])([0-9]+)\s*\\frac\{([0-9]+)\}\{([0-9]+)\}")
_SIDE_BY_SIDE = re.compile(r"[0-9]\s+[0-9.]")
_WORD = re.compile(r"(?<![A-Za-z\\{])[A-Za-z]{3,}")
_FUNCTIONS = frozenset(
    re.findall(
        "[a-z]+",
        """sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp max min gcd lcm mod
        det""",
    )
)
_ENVIRONMENT = re.compile(
    r"""\\(?:begin|end|mathbb|mathbf|mathcal|operatorname)
    \s*\{[^{}]*\}(?:\{[clr|]*\})?""",
    re.VERBOSE,
)
_ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1}
_PIECE = re.compile(r"\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)

_UNITS = {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre",
    "dm": "dm decimeter decimetre", "m": "m meter metre", "km": "km kilometer kilometre",
    "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "mg": "mg milligram", "g": "g gram", "kg": "kg kilogram", "oz": "oz ounce", "lb": "lb pound",
    "ml": "ml mL milliliter millilitre", "l": "l L liter litre", "s": "s sec second",
    "min": "min minute", "h": "h hr hour", "day": "day", "week": "week", "month": "month",
    "year": "yr year", "degree": "degree deg", "radian": "radian rad", "dollar": "dollar",
    "cent": "cent", "mph": "mph", "km/h": "kmh kmph kph",
}  # fmt: skip
_UNIT_OF = {word: unit for unit, words in _UNITS.items() for word in words.split()}
_UNIT = re.compile(
    r"(?:\b(?P<before>square|sq\.?|cubic|cu\.?)\s+)?(?<![A-Za-z\\])(?P<name>[A-Za-z]+?)(?:s|es)?\.?"
    r"\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?|\b(?P<after>squared|cubed)\b)?\s*$"
)
_POWERS = {"2": "^2", "3": "^3", "s": "^2", "c": "^3", "squared": "^2", "cubed": "^3"}
_BEFORE_A_LETTER = tuple(" 0123456789")
_TRAILING_WORDS = re.compile(
    r"""(?:(?<=[0-9})\]])\s*|\s+)
    [A-Za-z][A-Za-z'-]*(?:\s+[A-Za-z][A-Za-z'-]*)*\.?\s*$""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Answer:
    """An answer without layout. Either `latex` or `words` is set."""

    latex: str = ""
    number: Fraction | None = None
    """The value of a single-number answer."""
    words: str = ""
    """A text answer, in lower case, with single spaces."""
    unit: str = ""
    """The canonical name of a known unit, with its power: "cm^2"."""
    is_percent: bool = False
    base: str = ""
    """The base of a number such as `204_5`."""


def read_answer(text: str) -> Answer | None:
    """Read an answer. Return None for anything else, or a number too large to compute with."""
    if len(text) > LONGEST:
        return None
    text = _only_formula(_spelled(text).strip(_MARKUP))
    if _is_too_large(text):
        return None
    text = _plain(_DELIMITERS.sub(" ", text))
    letter = _LETTER.fullmatch(text)
    if letter is not None:
        return Answer(latex=letter[1])
    if _is_text(text):
        return Answer(words=" ".join(re.sub(r"[\s()\[\].,'\"!*]+", " ", text).split()).lower())
    is_percent = _PERCENT.search(text) is not None
    text = _SCALE.sub(_power_of_ten, _PERCENT.sub("", text))
    text, unit = _without_unit(text)
    base = _BASE.match(text)
    if base is not None:
        return Answer(latex=base[1], unit=unit, base=base[2])
    if _NUMBER.fullmatch(text):
        number = last_number(text)
    else:
        number = None
    latex = _settled(_JOINT.sub(",", text))
    if latex is None:
        return None
    return Answer(latex=latex, number=number, unit=unit, is_percent=is_percent)


def _spelled(text: str) -> str:
    """Write Unicode's mathematical characters in LaTeX."""
    if text.isascii():
        return text
    return ascii_digits("".join(map(_spelled_character, raised(text))))


def _spelled_character(character: str) -> str:
    if character in _UNICODE:
        return _UNICODE[character]
    if unicodedata.category(character) == "No":
        top, slash, bottom = unicodedata.normalize("NFKC", character).partition("⁄")
        if slash:
            return f"\\frac{{{top}}}{{{bottom}}}"
        return character
    return character


def _only_formula(text: str) -> str:
    """Return the formula of a text such as "The value is $5$.", and any other text unchanged."""
    formulas = list(_FORMULA.finditer(text))
    if len(formulas) != 1:
        return text
    before = text[: formulas[0].start()]
    around = before + text[formulas[0].end() :]
    if not re.search("[A-Za-z]{2,}", before) or re.search(r"[0-9\\]", around):
        return text
    return next(group for group in formulas[0].groups() if group is not None)


def _is_too_large(text: str) -> bool:
    """Return whether it has a tower of powers, a huge exponent, or deep nesting."""
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    numbers = re.findall("[0-9]+", text)
    if deepest > _DEEPEST or any(len(number) > _LONGEST_NUMBER for number in numbers):
        return True
    powers = re.findall(r"(?:\^|\*\*)\s*[{(]*\s*[-+]?\s*([0-9]+)", text)
    factorials = re.findall(r"([0-9]+)\s*[)}]*\s*!", text)
    is_tower = re.search(r"(?:\^|\*\*)[\s{(]*[-+]?\s*[0-9]+[\s})]*(?:\^|\*\*)", text) is not None
    has_large = any(int(number) > _LARGEST_EXPONENT for number in (*powers, *factorials))
    return has_large or (is_tower and any(int(number) > _LARGEST_IN_TOWER for number in powers))


def _plain(text: str) -> str:
    for pattern, replacement in _LAYOUT:
        text = pattern.sub(replacement, text)
    return text.strip(_MARKUP).rstrip(".,;:").strip()


def _is_text(text: str) -> bool:
    """Return whether an answer consists of words: "Evelyn", "no solution", "(C)"."""
    letters = re.sub(r"[\s()\[\].,'\"!*-]+", "", text)
    if not letters.isalpha():
        return False
    return any(word.lower() not in _FUNCTIONS for word in _WORD.findall(text))


def _power_of_ten(match: "re.Match[str]") -> str:
    return f" \\times 10^{{{_SCALES[match[1].lower()]}}}"


def _without_unit(text: str) -> tuple[str, str]:
    """Take a unit, or other words, off the end. Return the rest, and the unit's canonical name."""
    match = _UNIT.search(text)
    if match is not None:
        rest = text[: match.start()]
        unit = _canonical_unit(match, rest[-1:])
        if unit and re.search(r"[0-9\\]", rest):
            return rest.strip(), unit
    words = _TRAILING_WORDS.search(text)
    if words is None or not re.search("[0-9}]", text[: words.start()]):
        return text, ""
    found = _WORD.findall(words[0])
    if not found or any(word in _FUNCTIONS for word in found) or _JOINT.search(words[0]):
        return text, ""
    return text[: words.start()].strip(), ""


def _canonical_unit(match: "re.Match[str]", before: str) -> str:
    """Return "cm^2" for "square centimeters", and "" for no unit, such as the m of "n+m"."""
    name = match["name"]
    unit = _UNIT_OF.get(name) or _UNIT_OF.get(name.lower())
    if unit is None or before.isalpha() or (len(name) == 1 and before not in _BEFORE_A_LETTER):
        return ""
    prefix = (match["before"] or "")[:1].lower()
    return unit + _POWERS.get(prefix or match["after"] or match["power"] or "", "")


def _settled(text: str) -> str | None:
    """Write mixed numbers and arguments without ambiguity. Return None if impossible."""
    text = re.sub(r",(?:\s*,)+", ",", text)
    text = _GROUPED.sub(lambda match: match[0].replace(" ", ""), text)
    text = _braced(text)
    for pattern in (_MIXED, _MIXED_MACRO):
        if any(int(match[2]) >= int(match[3]) for match in pattern.finditer(text)):
            return None
        text = pattern.sub(r"(\1+\\frac{\2}{\3})", text)
    if _SIDE_BY_SIDE.search(text):
        return None
    words = _WORD.findall(_ENVIRONMENT.sub("", text))
    if any(word not in _FUNCTIONS for word in words):
        return None
    return text.strip() or None


def _braced(text: str) -> str:
    r"""Put braces around arguments of one character or macro: `\frac12` becomes `\frac{1}{2}`."""
    return _rewritten(deque(_PIECE.findall(text)), is_group=False)


def _rewritten(pieces: deque[str], *, is_group: bool) -> str:
    """Take pieces up to the end of the group, or all of them. Return them with braces."""
    written: list[str] = []
    while pieces:
        piece = pieces.popleft()
        if piece == "}" and is_group:
            return "{" + "".join(written) + "}"
        if piece == "{":
            written.append(_rewritten(pieces, is_group=True))
        elif piece in _ARGUMENTS:
            written.append(_with_arguments(piece, pieces))
        else:
            written.append(piece)
    return "".join(written)


def _with_arguments(macro: str, pieces: deque[str]) -> str:
    written = [macro]
    for _ in range(_ARGUMENTS[macro]):
        while pieces and pieces[0].isspace():
            pieces.popleft()
        if macro == "\\sqrt" and pieces and pieces[0] == "[":
            while pieces and written[-1] != "]":
                written.append(pieces.popleft())
        if not pieces:
            break
        piece = pieces.popleft()
        if piece == "{":
            written.append(_rewritten(pieces, is_group=True))
        elif piece in _ARGUMENTS:
            written.append("{" + _with_arguments(piece, pieces) + "}")
        else:
            written.append("{" + piece + "}")
    return "".join(written)


def canonical(latex: str) -> str:
    """Return LaTeX without spaces, to compare two formulas by their letters."""
    return re.sub(r"\s+", "", latex)
