r"""Compare mathematical answers with math-verify (Hugging Face, Apache-2.0), which uses SymPy.

`math_verify.parse` searches a text for a formula and guesses. Some guesses reward wrong answers: it
reads `1 + \frac{1}{\mathrm{e}}` as 1, R/r as r/r, and `0.\overline{3}` as 0. So this module gives
math-verify's parser one formula at a time, as `ttrl.tasks.math.latex` writes it. A formula unknown
to the parser equals only itself.

Numbers are compared exactly, without the library. If `math_verify.verify` calls two numbers equal,
their relative difference decides once more: the library takes 2^{-99} for 2^{-98}.
"""

import contextlib
import functools
import logging
import re
import signal
import threading
import types
from fractions import Fraction
from typing import Any

from ttrl.errors import GraderError
from ttrl.tasks.datasets import optional_package
from ttrl.tasks.math.latex import Answer, canonical, read_answer

_CLOCK = re.compile("[0-9]{1,2}:[0-9]{2}")
_DIGITS = 30
_AGAIN = 0.1
"""Seconds between attempts to end a comparison."""
_CLOSE = Fraction(1, 10**5)
"""Largest relative difference if one of two numbers is a decimal."""
_ROUNDING = Fraction(1, 2 * 10**6)
"""Largest absolute difference: math-verify's `float_rounding=6`."""


class _TookTooLong(BaseException):
    """Out of time. No Exception, because SymPy catches those."""


def same_answer(expected: str, given: str, seconds: float) -> bool | None:
    """Return whether two answers are equal; None if the comparison takes longer than `seconds`.

    Answers are LaTeX, with or without `$`, or plain text. Raises GraderError in a thread, because
    no signal can end the comparison there, and TaskError without the package math-verify.
    """
    right = read_answer(expected)
    answer = read_answer(given)
    if right is None or answer is None:
        return canonical(expected) == canonical(given) != ""
    verdict = _by_form(right, answer)
    if verdict is not None:
        return verdict
    library = load()
    limit = _Limit(seconds)
    equal = False
    with contextlib.suppress(_TookTooLong, RecursionError, MemoryError), limit:
        equal = library.equal(right.latex, answer.latex)
        limit.is_running = False
    if limit.is_over:
        return None
    return equal


def _by_form(right: Answer, answer: Answer) -> bool | None:
    """Compare words, units, bases and numbers. Return None if they do not decide."""
    if right.words or answer.words:
        return right.words == answer.words
    if right.unit and answer.unit and right.unit != answer.unit:
        return False
    if answer.base and right.base != answer.base:
        return False
    if right.number is not None and answer.number is not None:
        return _are_same_number(right, answer)
    are_letters = _is_letter(right.latex) and _is_letter(answer.latex)
    if are_letters or _CLOCK.fullmatch(right.latex):
        return right.latex == answer.latex  # E is not e, and a time is no ratio
    if right.is_percent != answer.is_percent:
        return False
    if canonical(right.latex) == canonical(answer.latex):
        return True
    return None


def _is_letter(latex: str) -> bool:
    return len(latex) == 1 and latex.isalpha()


def _are_same_number(right: Answer, answer: Answer) -> bool:
    """Compare two numbers. 28% equals 28 and 0.28, because data sets often omit the sign."""
    assert right.number is not None and answer.number is not None
    wanted = [right.number]
    if right.is_percent:
        wanted.append(right.number / 100)
    given = [answer.number]
    if answer.is_percent:
        given.append(answer.number / 100)
    is_exact = "." not in right.latex + answer.latex
    return any(_are_close(one, other, is_exact) for one in wanted for other in given)


def _are_close(a: Fraction, b: Fraction, is_exact: bool) -> bool:
    if is_exact or a == b:
        return a == b
    return abs(a - b) <= _ROUNDING and abs(a - b) <= _CLOSE * abs(a)


class _Library:
    """math-verify, its parser and SymPy, imported."""

    def __init__(self) -> None:
        self.verify: Any = _module("math_verify").verify
        self.is_complex: Any = _module("math_verify.grader").should_treat_as_complex
        self.sympy: Any = _module("sympy")
        parser = _module("latex2sympy2_extended.latex2sympy2")
        self.parse: Any = parser.latex2sympy
        self.normalization: Any = parser.NormalizationConfig(
            basic_latex=True,
            units=False,
            malformed_operators=False,
            nits=False,
            boxed="none",
            equations=False,
        )
        self.conversion: Any = parser.ConversionConfig(lowercase_symbols=False)
        # Without a time limit of its own it warns. Ours is around it.
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def equal(self, right: str, answer: str) -> bool:
        """Return whether two formulas are equal."""
        expected = self.read(right)
        given = self.read(answer)
        if expected is None or given is None:
            return False
        if not self.verify(expected, given, timeout_seconds=None):
            return False
        return self.are_close(self.value(expected), self.value(given))

    def read(self, latex: str) -> Any:
        """Return the expression of a formula, and None if the parser does not understand it."""
        try:
            return self.parse(
                latex,
                is_real=not self.is_complex(latex),
                normalization_config=self.normalization,
                conversion_config=self.conversion,
            )
        except Exception:  # noqa: BLE001 - the parser raises Exception, AttributeError, and others
            return None

    def value(self, expression: Any) -> Any:
        """Return an expression's finite number, or None."""
        sympy = self.sympy
        if isinstance(expression, sympy.Eq) and isinstance(expression.lhs, sympy.Symbol):
            expression = expression.rhs
        if isinstance(expression, sympy.MatrixExpr) or not isinstance(expression, sympy.Expr):
            return None
        if not expression.is_number:
            return None
        value = sympy.N(expression, _DIGITS)
        if value.is_number and value.is_finite:
            return value
        return None

    def are_close(self, expected: Any, given: Any) -> bool:
        """Return False for two numbers differing by more than their rounding."""
        if expected is None or given is None:
            return True
        return bool(abs(expected - given) <= abs(expected) * float(_CLOSE))


def _module(name: str) -> Any:
    return optional_package(name, "mathematical answers need", "math-verify")


@functools.cache
def load() -> _Library:
    """Import the library once; it takes seconds. Raises TaskError without it."""
    return _Library()


class _Limit:
    """Raises _TookTooLong in its block after `seconds`, and again if something there catches it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_running = False
        """Set it to False at the end of the block: a later signal raises nothing."""
        self.is_over = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            problem = "mathematical answers are graded in a process, not in a thread"
            raise GraderError(f"{problem}: set isolated=True")
        self.is_running = True
        self._before = signal.signal(signal.SIGALRM, self._stop)
        signal.setitimer(signal.ITIMER_REAL, self.seconds, _AGAIN)

    def __exit__(self, *_: object) -> None:
        try:
            self.is_running = False
        except _TookTooLong:  # the signal was first
            self.is_running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _stop(self, number: int, frame: types.FrameType | None) -> None:
        if self.is_running:
            self.is_over = True
            raise _TookTooLong
