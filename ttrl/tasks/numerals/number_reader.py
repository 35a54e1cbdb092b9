r"""Arithmetic in a text: the last piece of it, if it is a single number.

A text is words with arithmetic between them. A single number may have a sign and be a decimal, a
fraction, a mixed number, or in scientific notation. A sum, a power, a root, a product, or a number
at a variable (`2\sqrt{3}`, `3\pi`, `4x`) is not a number. Reading its last digits would reward a
wrong answer.
"""

import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from fractions import Fraction

from ttrl.tasks.numerals.number_tokens import AT_A_NUMBER, Token, is_digit, simplified, tokens

_BEFORE = 600
_AFTER = 120
"""Characters read around the last digit of a text."""
_READ = 240
"""Characters read before the last digit, without LaTeX and repeated blanks."""
_DEEPEST = 12
"""Limit on nested brackets and fractions."""
_LARGEST_EXPONENT = 99


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FRACTIONS = _words(r"\frac \dfrac \tfrac \cfrac \sfrac \nicefrac")
# Macros to end arithmetic: relations, arrows, dots, layout.
_ENDS = _words(
    r"\approx \simeq \sim \cong \equiv \doteq \to \rightarrow \longrightarrow \Rightarrow"
    r" \Longrightarrow \implies \iff \leftrightarrow \Leftrightarrow \mapsto \therefore \because"
    r" \hfill \newline \par \item \noindent"
    r" \hline \ldots \dots \cdots \dotsc \cr \colon \( \) \[ \] \& \# \' \` \| \circ \prime"
) | {'\\"'}
# No number is read before or after one of these.
_SPOILERS = frozenset("±∓≠≤≥≪≫∈∉∪∩<⌊⌋⌈⌉")
_ARITHMETIC = frozenset("+-*/^")
_AT_VARIABLES = _ARITHMETIC | {"_"}
_BINARY = frozenset("+-*/^_:~>") | {"**"} | _SPOILERS
_FUNCTIONS = _words(
    "sqrt cbrt root log ln lg exp sin cos tan cot sec arcsin arccos arctan abs floor ceil",
)
_FUNCTION_SYMBOLS = frozenset("√∛∜∑∏∫∂∇")
_ALTERNATIVES = _words("or oder ou または 或")
_RANGES = _words("to bis")
_BY_THEMSELVES = frozenset("xyzn")
"""Letters for variables, even apart from a number."""
_UNITS_OF_TIME_AND_SIZE = frozenset("hsdmlgLKACVWyw")
_MARKUP = _words("* ** *** _ ` \" ' { ~")
_CURRENCIES = _words("US USD EUR GBP INR RS CAD AUD NZD CNY RMB JPY CHF A C HK NT R")
_BEFORE_MINUS = _words("is are be equals answer exactly")
# A sign after one of these belongs to the number behind it.
_BEFORE_A_SIGN = frozenset("=:#|&`\"'“„«≈≡→⇒∴")


def last_number(text: str) -> Fraction | None:
    r"""Return the last number of a text exactly. Return None without one, and if it cannot be read
    for certain.

    It reads signs, decimals, thousands separators (comma, apostrophe, underscore, space), fractions
    (3/4, `\frac34`, ¾), mixed numbers (2 3/4), exponents (1e3, `3 \times 10^{-2}`), digits of any
    script, and units around a number (m^2, too). It does not read "1,5", "1.2.3", "10^3", "4 10/3",
    "2 or 3", "2-3" and "3:2", nor roots, variables and sums.
    """
    last = next((place for place in range(len(text) - 1, -1, -1) if is_digit(text[place])), None)
    if last is None:
        return None
    start = max(0, last - _BEFORE)
    piece = re.sub(r"[^\S\n]+", " ", simplified(text[start : last + _AFTER]))
    end = next((place for place in range(len(piece) - 1, -1, -1) if piece[place].isdigit()), 0)
    cut = max(0, end - _READ)
    reader = _Reader(tokens(piece[cut:]), is_cut=start > 0 or cut > 0)
    return reader.last_number()


@dataclass
class _Read:
    """A piece of arithmetic. Its number is None unless it is a single number."""

    number: Fraction | None
    has_digits: bool
    is_whole: bool = False
    """It is a bare whole number. A fraction may follow."""
    is_compound: bool = False
    """It is a quotient, a mixed number or in scientific notation. No further division is read."""

    def spoil(self, other: "_Read | None" = None) -> None:
        """Make it no number, because it belongs to `other` or to something unreadable."""
        self.number = None
        self.is_whole = False
        if other is not None:
            self.has_digits = self.has_digits or other.has_digits


class _Reader:
    """Reads tokens from left to right. `is_cut`: the text before them is missing."""

    def __init__(self, tokens: list[Token], is_cut: bool) -> None:
        self.tokens = tokens
        self.is_cut = is_cut
        self.place = 0
        self.depth = 0

    def last_number(self) -> Fraction | None:
        number = None
        closes_what_is_missing = False
        while self.place < len(self.tokens):
            token = self.tokens[self.place]
            read = self.expression()
            if read is None:
                closes_what_is_missing = closes_what_is_missing or token.kind == "close"
            elif read.has_digits:
                number = read.number
        if self.is_cut and closes_what_is_missing:
            return None
        return number

    def peek(self, ahead: int = 0) -> Token | None:
        place = self.place + ahead
        if 0 <= place < len(self.tokens):
            return self.tokens[place]
        return None

    def next_is(self, symbols: Container[str], ahead: int = 0) -> bool:
        token = self.peek(ahead)
        return token is not None and token.is_symbol(symbols)

    # Whole pieces of arithmetic

    def expression(self) -> _Read | None:
        """Read the arithmetic here. If there is none, pass a token and return None."""
        begun = self.place
        sign = self.sign()
        read = self.operand()
        if read is None:
            self.place = max(self.place, begun + 1)
            return None
        if sign is None:
            read.spoil()
        elif read.number is not None:
            read.number *= sign
        self.operations(read)
        return read

    def operations(self, left: _Read) -> None:
        """Read operators and their right sides. A quotient is a single number."""
        operator = self.operator()
        while operator is not None:
            is_power_of_ten = self.next_is("^", 1) and self.tokens[self.place].text == "10"
            if operator == "*" and is_power_of_ten:
                self.power_of_ten(left)
                self.factors(left)
            else:
                self.operation(operator, left)
            operator = self.operator()

    def operation(self, operator: str, left: _Read) -> None:
        sign = self.signs()
        right = self.operand()
        assert right is not None, "operator() looks for one"
        is_readable = operator == "/" and not left.is_compound and not right.is_compound
        if is_readable and sign is not None and left.number is not None and right.number:
            left.number = sign * left.number / right.number
            left.is_compound = True
            left.is_whole = False
        else:
            left.spoil(right)

    def operator(self) -> str | None:
        """Take an operator with an operand behind it. Return None if the arithmetic ends here."""
        token = self.peek()
        following = self.peek(1)
        if token is None or following is None:
            return None
        is_times = self.is_times_sign(token)
        if not is_times and not token.is_symbol(_BINARY) and token.kind != "dash":
            return None
        if token.text[0] in "*:" and token.gap != following.gap:
            return None  # emphasis, or the colon of a label
        place = self.place
        self.place += 1
        self.signs()
        if not self.begins_operand():
            self.place = place
            return None
        self.place = place + 1
        if is_times:
            return "*"
        return token.text

    def is_times_sign(self, token: Token) -> bool:
        """Return whether a token is the x of "3 x 4"."""
        following = self.peek(1)
        if token.kind != "word" or token.text not in ("x", "X") or following is None:
            return False
        return following.kind == "number" and token.gap == following.gap

    def power_of_ten(self, left: _Read) -> None:
        r"""Read the `10^{-2}` of `3 \times 10^{-2}` and scale the number before it."""
        self.place += 2
        sign = self.signs()
        exponent = self.atom()
        is_readable = sign is not None and exponent is not None and not left.is_compound
        if not is_readable or sign is None or exponent is None or exponent.number is None:
            left.spoil(exponent)
            return
        power = sign * exponent.number
        if left.number is None or power.denominator != 1 or abs(power) > _LARGEST_EXPONENT:
            left.spoil()
            return
        left.number *= Fraction(10) ** int(power)
        left.is_compound = True
        left.is_whole = False

    # Signs

    def signs(self) -> int | None:
        """Pass the sign of an operand. Return 1 or -1, and None for several signs."""
        sign = 1
        count = 0
        while self.next_is("+-"):
            if self.tokens[self.place].text == "-":
                sign = -1
            count += 1
            self.place += 1
        if count < 2:
            return sign
        return None

    def sign(self) -> int | None:
        """Pass the signs before a number. Return 1 or -1, and None if they make it unreadable."""
        token = self.peek()
        if token is None:
            return 1
        if self.follows_alternative():
            return None
        if token.kind == "dash":
            return self.after_dash()
        is_spoiler = token.is_symbol(_SPOILERS | {"/", "^"})
        if is_spoiler or self.is_greater_than(token) or self.is_stray(token):
            self.place += 1
            self.signs()
            return None
        is_word = token.kind == "word" and token.text.lower() in ("minus", "negative")
        if not is_word and not token.is_symbol("+-"):
            return 1
        meaning = self.meaning_of_sign(token, is_word)
        self.place += 1
        if self.next_is("+-"):
            self.signs()
            return None
        while self.next_is(_MARKUP) or self.is_currency():
            self.place += 1
        if meaning is not None and token.text == "+":
            return 1
        return meaning

    def after_dash(self) -> int | None:
        """Pass a long dash: punctuation behind words or before a space, else perhaps a minus."""
        before = self.peek(-1)
        following = self.peek(1)
        self.place += 1
        if before is not None and before.kind in ("word", "close"):
            return 1
        if following is None or following.gap:
            return 1
        return None

    def meaning_of_sign(self, token: Token, is_word: bool) -> int | None:
        """Return -1 for a sign, 1 for a hyphen or a bullet, and None for anything else."""
        before = self.peek(-1)
        following = self.peek(1)
        is_spaced = following is not None and following.gap and not is_word
        if before is None or before.kind in ("arrow", "tag", "open"):
            return -1
        if before.text == "|" and not token.gap:
            return None  # an absolute value, perhaps
        if before.is_symbol(_BEFORE_A_SIGN | _MARKUP):
            return -1
        if before.kind == "macro":
            if before.text in _ENDS:
                return -1
            return None
        if before.kind == "newline":
            is_below_text = any(one.kind != "newline" for one in self.tokens[: self.place])
            if is_spaced and is_below_text:
                return 1
            return -1
        if before.kind == "word":
            return self.after_word(before, token, is_spaced, is_word)
        if token.gap and not is_spaced:
            return -1
        return None

    def after_word(
        self,
        word: Token,
        token: Token,
        is_spaced: bool,
        is_word: bool,
    ) -> int | None:
        """Return the same after a word: an operator in "5 kg - 3 kg", a hyphen in "COVID-19"."""
        before = self.peek(-2)
        if before is not None and before.kind == "number":
            return None
        if not token.gap:
            if token.text == "-" and len(word.text) > 1:
                return 1
            return None
        if is_word:
            if word.text.lower() in _BEFORE_MINUS:
                return -1
            return None
        if is_spaced:
            return None
        return -1

    def is_currency(self) -> bool:
        """Return whether a currency's code stands here: "-US$18"."""
        token = self.peek()
        following = self.peek(1)
        if token is None or following is None or token.kind != "word":
            return False
        return token.text.upper() in _CURRENCIES and following.kind in ("number", "symbol")

    def is_greater_than(self, token: Token) -> bool:
        """Return whether this is the sign of "x > 18", not of a quotation or of ">>18"."""
        before = self.peek(-1)
        if not token.is_symbol(">") or self.next_is(">", 1):
            return False
        return before is None or (before.kind != "newline" and before.text != ">")

    def is_stray(self, token: Token) -> bool:
        """Return whether this multiplies words ("eggs x 3"), or begins a subscript ("a_3")."""
        before = self.peek(-1)
        following = self.peek(1)
        if before is None or following is None or before.kind not in ("word", "close"):
            return False
        if token.is_symbol("_"):
            return not token.gap
        is_times = token.is_symbol("*") or (token.kind == "word" and token.text == "x")
        return is_times and token.gap and following.gap and following.kind == "number"

    def follows_alternative(self) -> bool:
        """Return whether the second of two numbers begins here: "2 or 18", "17 to 18"."""
        place = self._before_newlines(self.place - 1)
        is_on_line = place == self.place - 1
        if place < 1 or self.tokens[place].kind != "word":
            return False
        word = self.tokens[place].text.lower()
        if word not in _ALTERNATIVES and not (word in _RANGES and is_on_line):
            return False
        place = self._before_newlines(place - 1)
        while place > 0 and self.tokens[place].is_symbol("*_`%"):
            place -= 1
        return self.tokens[place].kind in ("number", "close")

    def _before_newlines(self, place: int) -> int:
        while place > 0 and self.tokens[place].kind == "newline":
            place -= 1
        return place

    # Operands

    def begins_operand(self) -> bool:
        token = self.peek()
        if token is None:
            return False
        return token.kind in ("number", "open") or self.is_symbolic(token)

    def is_symbolic(self, token: Token) -> bool:
        """Return whether a macro, a function or a variable begins here."""
        is_macro = token.kind == "macro" and token.text not in _ENDS
        return is_macro or self.is_function(token) or self.is_variable(token)

    def operand(self) -> _Read | None:
        """Read a number and everything at it. Return None if none begins here."""
        read = self.atom()
        if read is None:
            return None
        if read.is_whole:
            self.mixed(read)
        self.factors(read)
        return read

    def factors(self, read: _Read) -> None:
        """Read units at a number, and factors; with factors it is no number."""
        token = self.peek()
        while token is not None:
            if token.is_symbol("%°") and not token.apart:
                self.place += 1
            elif self.joins(token, read):
                factor = self.atom()
                assert factor is not None, "joins() looks for one"
                if factor.has_digits or factor.number is None:  # else a unit in brackets
                    read.spoil(factor)
            else:
                break
            token = self.peek()

    def joins(self, token: Token, read: _Read) -> bool:
        """Return whether the next operand multiplies the number before it."""
        if self.is_times_sign(token):
            return False
        if self.is_symbolic(token):
            return True
        if token.kind == "open" and token.apart:
            return read.is_whole and self.is_number_in_brackets()
        return token.kind in ("open", "number") and not token.apart

    def is_number_in_brackets(self) -> bool:
        number = self.peek(1)
        close = self.peek(2)
        if number is None or close is None:
            return False
        return number.kind == "number" and close.kind == "close"

    def mixed(self, whole: _Read) -> None:
        """Read the fraction behind a whole number. Unless it is below 1, there is no number."""
        joint = self.peek()
        if joint is None:
            return
        skipped = 0
        if joint.text.lower() == "and" or joint.is_symbol("&"):
            skipped = 1
        token = self.peek(skipped)
        bottom = self.peek(skipped + 2)
        if token is None:
            return
        if token.kind == "macro" and token.text in _FRACTIONS:
            self.place += skipped
            part = self.atom()
        elif self.next_is("/", skipped + 1) and bottom is not None and token.kind == "number":
            if token.priced or not token.gap or bottom.kind != "number":
                return  # "$3 and $1/3"
            self.place += skipped + 3
            part = _Read(None, True)
            if token.is_whole and bottom.is_whole and token.value is not None and bottom.value:
                part.number = token.value / bottom.value
        else:
            return
        assert part is not None
        is_readable = part.number is not None and 0 <= part.number < 1
        if is_readable and part.number is not None and whole.number is not None:
            whole.number += part.number
        else:
            whole.spoil(part)
        whole.is_whole = False
        whole.is_compound = True

    def atom(self) -> _Read | None:
        """Read a number, a bracket, a fraction, a variable, or a function with its argument."""
        token = self.peek()
        if token is None:
            return None
        if token.kind == "number":
            return self.number(token)
        if token.kind == "open":
            return self.nested(self.group)
        if token.kind == "macro" and token.text in _FRACTIONS:
            return self.nested(self.fraction)
        if self.is_variable(token):
            self.place += 1
            return _Read(None, False)
        if self.is_symbolic(token):
            return self.nested(self.function)
        return None

    def number(self, token: Token) -> _Read:
        before = self.peek(-1)
        self.place += 1
        is_index = before is not None and before.kind == "word" and before.text in _BY_THEMSELVES
        if is_index and not token.apart:
            return _Read(None, True)  # x2
        if self.is_within_a_name(token, before):
            return _Read(None, True)
        if " " in token.text and self.next_is("/"):
            return self.whole_before_fraction(token)
        return _Read(token.value, True, token.is_whole and token.value is not None)

    def is_within_a_name(self, token: Token, before: Token | None) -> bool:
        """Return whether letters touch the number just passed on both sides: "H2O"."""
        following = self.peek()
        if before is None or following is None or before.kind != "word" or following.kind != "word":
            return False
        return not token.apart and not following.apart and (before.text + following.text).isascii()

    def whole_before_fraction(self, token: Token) -> _Read:
        """Read the 2 of "2 100/300". "1 200 300/400" is unclear."""
        whole, *groups = token.text.split(" ")
        if len(groups) > 1 or token.value is None:
            return _Read(None, True)
        self.place -= 1
        top = Token("number", groups[0], True, False, Fraction(groups[0]), groups[0].isdigit())
        self.tokens[self.place] = top
        return _Read(Fraction(whole), True, True)

    def nested(self, read: Callable[[], _Read]) -> _Read:
        """Read something with parts. Below a limit of depth, nothing is read."""
        if self.depth >= _DEEPEST:
            self.place = len(self.tokens)
            return _Read(None, True)
        self.depth += 1
        try:
            return read()
        finally:
            self.depth -= 1

    def group(self) -> _Read:
        """Read a bracket. One with words only has the number 0 and no digits."""
        opening = self.tokens[self.place]
        self.place += 1
        reads: list[_Read] = []
        has_comma = False
        token = self.peek()
        while token is not None and token.kind != "close":
            read = self.expression()
            if read is not None:
                reads.append(read)
            has_comma = has_comma or token.is_symbol(",;")
            token = self.peek()
        self.place += 1
        if not reads:
            return _Read(Fraction(0), False)
        if len(reads) == 1:
            is_whole = reads[0].is_whole and opening.text == "{"
            return _Read(reads[0].number, reads[0].has_digits, is_whole)
        with_digits = [read for read in reads if read.has_digits]
        if has_comma or not with_digits:
            return _Read(None, bool(with_digits))
        return _Read(with_digits[-1].number, True)

    def fraction(self) -> _Read:
        r"""Read `\frac{1}{2}`, `\frac12`, `\frac1{72}`."""
        self.place += 1
        top = self.argument()
        bottom = self.argument()
        if top is None or bottom is None or not (top.has_digits and bottom.has_digits):
            return _Read(None, True)
        if top.number is None or not bottom.number:
            return _Read(None, True)
        return _Read(top.number / bottom.number, True)

    def argument(self) -> _Read | None:
        """Read the argument of a macro as TeX does: a group, a macro, or a single digit."""
        token = self.peek()
        if token is None or token.kind != "number" or len(token.text) == 1:
            return self.atom()
        rest = token.text[1:]
        if not token.text[0].isdigit() or not rest.isdigit() or token.value is None:
            self.place += 1
            return _Read(None, True)
        self.tokens[self.place] = Token("number", rest, False, False, Fraction(rest), True)
        return _Read(Fraction(token.text[0]), True)

    def function(self) -> _Read:
        r"""Read a macro or function with its argument (`\log_2 8`, √2). It is no number."""
        read = _Read(None, False)
        self.place += 1
        has_argument = False
        token = self.peek()
        while token is not None:
            is_script = token.is_symbol("^_")
            if is_script:
                self.place += 1
                self.signs()
            elif token.kind not in ("open", "number") or (has_argument and token.apart):
                break
            part = self.atom()
            if part is None:
                break
            if part.is_whole and not is_script:
                self.mixed(part)
            read.spoil(part)
            has_argument = has_argument or not (is_script or token.text == "[")
            if token.kind == "number":
                break
            token = self.peek()
        return read

    def is_function(self, token: Token) -> bool:
        """Return whether this is a root, or a word with an argument: "f(2)", not "egg(s)"."""
        if token.kind == "symbol":
            return token.text in _FUNCTION_SYMBOLS
        following = self.peek(1)
        argument = self.peek(2)
        if token.kind != "word" or following is None:
            return False
        if token.text.lower() in _FUNCTIONS:
            return following.kind in ("number", "open")
        if len(token.text) > 1 and argument is not None and argument.kind == "word":
            return False
        return token.text.isascii() and following.text == "(" and not following.apart

    def is_variable(self, token: Token) -> bool:
        """Return whether letters stand for a number: `4x`, `x - 5`, not "5 m", "5/h", "B5"."""
        if token.kind != "word":
            return False
        before = self.peek(-1)
        following = self.peek(1)
        if len(token.text) > 1:
            is_product = set(token.text) <= set("xyz") and not token.apart
            return is_product and before is not None and before.kind == "number"
        is_greek = "Ͱ" <= token.text <= "Ͽ" and token.text not in "Ωµ"
        if before is not None and before.kind == "number":
            return is_greek or token.text in (_BY_THEMSELVES if token.apart else AT_A_NUMBER)
        if before is not None and not token.apart:
            if before.is_symbol("/") and token.text in _UNITS_OF_TIME_AND_SIZE:
                return False
            if before.is_symbol(_ARITHMETIC) or before.kind == "close":
                return True
        if following is not None and not following.apart and following.is_symbol(_AT_VARIABLES):
            return True
        if not is_greek and token.text not in _BY_THEMSELVES:
            return False
        around = [one for one in (before, following) if one is not None]
        return any(one.is_symbol(_AT_VARIABLES) or one.kind == "close" for one in around)
