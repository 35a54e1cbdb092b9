r"""Whether two mathematical answers are equal, by math-verify (Hugging Face, Apache-2.0), which asks SymPy.

`math_verify.parse` is not used: it finds a formula in a text and guesses. Of its guesses, some reward wrong answers: it reads
`1 + \frac{1}{\mathrm{e}}` as 1, R/r as r/r, 0.\overline{3} as 0. Its parser is given one formula at a time instead, as
`ttrl.tasks.math.latex` writes it, and what the parser does not understand is equal to nothing but itself. Numbers are compared
exactly without the library, and what `math_verify.verify` calls equal is compared once more in relative terms, where both are
numbers: it takes 2^{-99} for 2^{-98}.
"""

import contextlib
import logging
import re
import signal
import threading
import types
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from ttrl.errors import GraderError
from ttrl.tasks.datasets import optional_package
from ttrl.tasks.math.latex import Answer, canonical, read_answer

_CLOCK = re.compile("[0-9]{1,2}:[0-9]{2}")
_DIGITS = 30
_CLOSE = Fraction(1, 10**5)
"""Largest relative difference between numbers of which one is a decimal."""
_ROUNDING = Fraction(1, 2 * 10**6)
"""Largest absolute difference, as of math-verify's `float_rounding=6`."""


class _TookTooLong(BaseException):
    """No Exception, which SymPy would catch."""


def same_answer(expected: str, given: str, seconds: float) -> bool | None:
    """Return whether an answer is equal to the expected one; None if that took longer than `seconds`.

    Answers are LaTeX, with or without `$`, or plain text. Raises GraderError outside of a process's main thread, as the time is
    limited by a signal, and TaskError without the package math-verify.
    """
    right, answer = read_answer(expected), read_answer(given)
    if right is None or answer is None:
        return canonical(expected) == canonical(given) != ""
    verdict = _by_form(right, answer)
    if verdict is not None:
        return verdict
    library = load()
    try:
        with _time_limit(seconds):
            return library.equal(right.latex, answer.latex)
    except _TookTooLong:
        return None
    except (RecursionError, MemoryError):
        return False


def _by_form(right: Answer, answer: Answer) -> bool | None:
    """Compare words, units, bases and numbers. Return None if that does not decide."""
    if right.words or answer.words:
        return right.words == answer.words
    if right.unit and answer.unit and right.unit != answer.unit:
        return False
    if answer.base and right.base != answer.base:
        return False
    if right.number is not None and answer.number is not None:
        return _are_same_number(right, answer)
    are_letters = right.latex.isalpha() and answer.latex.isalpha() and len(right.latex) == len(answer.latex) == 1
    if are_letters or _CLOCK.fullmatch(right.latex):
        return right.latex == answer.latex  # E is not e, and a time is no ratio
    if right.is_percent != answer.is_percent:
        return False
    return True if canonical(right.latex) == canonical(answer.latex) else None


def _are_same_number(right: Answer, answer: Answer) -> bool:
    """Compare two numbers. With a percent sign, both 28 and 0.28 count: data sets leave it out as they like."""
    assert right.number is not None and answer.number is not None
    wanted = [right.number, right.number / 100] if right.is_percent else [right.number]
    given = [answer.number, answer.number / 100] if answer.is_percent else [answer.number]
    is_exact = "." not in right.latex + answer.latex
    return any(_are_close(one, other, is_exact) for one in wanted for other in given)


def _are_close(a: Fraction, b: Fraction, is_exact: bool) -> bool:
    if is_exact or a == b:
        return a == b
    return abs(a - b) <= _ROUNDING and abs(a - b) <= _CLOSE * abs(a)


class _Library:
    """math-verify, its parser, and SymPy, loaded."""

    def __init__(self) -> None:
        needs = "mathematical answers need"
        self.verify: Any = optional_package("math_verify", needs, "math-verify").verify
        self.grader: Any = optional_package("math_verify.grader", needs, "math-verify")
        self.parser: Any = optional_package("latex2sympy2_extended.latex2sympy2", needs, "math-verify")
        self.sympy: Any = optional_package("sympy", needs, "math-verify")
        self.normalization = self.parser.NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
        )
        self.conversion = self.parser.ConversionConfig(lowercase_symbols=False)
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that it has no time limit, which is ours

    def equal(self, right: str, answer: str) -> bool:
        expected, given = self.read(right), self.read(answer)
        if expected is None or given is None:
            return False
        if not self.verify(expected, given, timeout_seconds=None):
            return False
        return self.are_close(expected, given)

    def read(self, latex: str) -> Any:
        """Return SymPy's expression; None where the parser does not understand the formula."""
        is_real = not self.grader.should_treat_as_complex(latex)
        try:
            return self.parser.latex2sympy(
                latex, is_real=is_real, normalization_config=self.normalization, conversion_config=self.conversion
            )
        except Exception:  # noqa: BLE001 - the parser raises anything: its own Exception, AttributeError, ValueError
            return None

    def are_close(self, expected: Any, given: Any) -> bool:
        """Return False for two numbers that differ by more than decimals do."""
        expected, given = self.value(expected), self.value(given)
        if expected is None or given is None:
            return True
        difference = abs(expected - given)
        return bool(difference <= abs(expected) * float(_CLOSE))

    def value(self, expression: Any) -> Any:
        """Return a number of SymPy's with enough digits, None for what is none."""
        if isinstance(expression, self.sympy.Eq) and isinstance(expression.lhs, self.sympy.Symbol):
            expression = expression.rhs
        is_scalar = isinstance(expression, self.sympy.Expr) and not isinstance(expression, self.sympy.MatrixExpr)
        if not is_scalar or not expression.is_number:
            return None
        value = self.sympy.N(expression, _DIGITS)
        return value if value.is_number and value.is_finite else None


_loaded: list[_Library] = []


def load() -> _Library:
    """Return the library, which takes a second or more to import. Raises TaskError without it."""
    if not _loaded:
        _loaded.append(_Library())
    return _loaded[0]


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TookTooLong in the block after so many seconds, and again every tenth of a second should it be caught there."""
    if threading.current_thread() is not threading.main_thread():
        raise GraderError("mathematical answers are graded in a process of their own, not in a thread: set isolated=True")

    def stop(number: int, frame: types.FrameType | None) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
