"""Render chat templates, and stop any exhausting memory.

A template is a program out of a model's folder. Jinja's sandbox keeps it from files and code, but
`{{ 'x' * 10**9 }}` takes a gigabyte. Here the result of each step is estimated before it runs and
counted after: operators, `~`, slices, literals, calls, filters, the text written. A template may
build some megabytes, more for longer conversations (`allowance`); then TemplateSizeError ends it.

The text equals that of transformers' `apply_chat_template`: same settings of Jinja, same filters.
`render` also returns the places of `{% generation %}` blocks.

Left out: time. A single step may still be slow, such as comparing deeply nested lists.
"""

# ruff: noqa: N802 - names of nodes are Jinja's
import functools
import json
import re
import types
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Namespace
from markupsafe import Markup

_MOST_SOURCE = 2**16
"""Characters of a template; the largest known ones have a third of it."""
_ELEMENT = 64
"""The size of an element of a list, and of any other small object; a character has size 1."""
_AT_LEAST = 2**22
"""The least allowance."""
_MOST_BITS = 2**16
"""Of a whole number; arithmetic with longer ones takes minutes."""
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


_Estimate = Callable[..., int]


class TemplateSizeError(Exception):
    """A template builds, or is about to build, more than its conversation can need.

    The message goes on after a name: "builds more than 4,194,304 characters".
    """


@dataclass(slots=True)
class _Meter:
    """The allowance of one rendering, the rest of it, and the text so far."""

    most: int
    left: int
    written: int = 0
    regions: list[tuple[int, int]] = field(default_factory=list)

    def check(self, size: int) -> None:
        if size > self.left:
            raise TemplateSizeError(f"builds more than {self.most:,} characters")

    def charge(self, size: int) -> None:
        if size > self.left:
            self.check(size)
        self.left -= size


_meter: ContextVar[_Meter] = ContextVar("_meter")
_UNLIMITED = 2**62


def allowance(variables: Mapping[str, Any], times: int) -> int:
    """Return a template's limit on built text from these variables, in characters.

    It may copy the conversation once per message: some append each message to a variable. times: 2
    for templates with our tags: they render the conversation twice per message.
    """
    size = len(repr(variables))
    messages = len(variables["messages"])
    return _AT_LEAST + 4 * size * (messages + 4) * times


def render(
    source: str,
    variables: Mapping[str, Any],
    most: int,
) -> tuple[str, list[tuple[int, int]]]:
    """Return a template's text, and the places of its `{% generation %}` blocks, in characters.

    most: its `allowance`. Raises TemplateSizeError, and any error of the template.
    """
    if len(source) > _MOST_SOURCE:
        problem = f"has {len(source):,} characters; the limit is {_MOST_SOURCE:,}"
        raise TemplateSizeError(problem)
    meter = _Meter(most, most)
    token = _meter.set(meter)
    try:
        template = _compiled(source)
        pieces = _Buffer()
        for piece in template.root_render_func(template.new_context(dict(variables))):
            pieces.append(piece)
            meter.written += len(piece)
        return "".join(pieces), meter.regions
    finally:
        _meter.reset(token)


def compile_problem(source: str) -> str | None:
    """Say why a text is no template of messages; None if it is one."""
    if not source.strip():
        return "it is empty, so every prompt would be empty"
    if len(source) > _MOST_SOURCE:
        return f"it has {len(source):,} characters; the limit is {_MOST_SOURCE:,}"
    try:
        _compiled(source)
        names = meta.find_undeclared_variables(parsed(source))
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno} is not valid Jinja: {error.message}"
    except (SyntaxError, RecursionError, UnicodeError) as error:  # of Python's compiler
        return f"it cannot be compiled: {error}"
    if "messages" not in names:
        return "it never reads `messages`, so every prompt would be equal"
    return None


def parsed(source: str) -> nodes.Template:
    """Return a template's syntax tree. Raises TemplateSyntaxError."""
    return _environment().parse(source)


@functools.lru_cache(32)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


# Sizes


def _parts(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values and all values in them, shared ones repeatedly."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, str | bytes | int | float):
            continue
        if isinstance(value, Namespace):
            value = getattr(value, "_Namespace__attrs", {})  # its text shows them
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            waiting.extend(value)


def _size(*values: Any) -> int:
    """Return the size of values and of all values in them, counting shared ones repeatedly."""
    meter = _meter.get()
    found = 0
    for value in _parts(values):
        found += len(value) if isinstance(value, str | bytes) else _ELEMENT
        if isinstance(value, int):
            found += value.bit_length() // 3
        meter.check(found)
    return found


def _refuse_number() -> None:
    raise TemplateSizeError(f"computes numbers of more than {_MOST_BITS:,} bits")


def _text_size(value: Any) -> int:
    """Return at least the length of a value's text: in a list, a character can become ten."""
    if isinstance(value, str):
        return len(value)
    return 10 * _size(value)


def _counted(value: Any) -> Any:
    """Count the result of a step, and return it; an iterator's items count as they come."""
    if isinstance(value, str | bytes):
        _meter.get().charge(len(value))
    elif isinstance(value, list | tuple | set | frozenset):
        _meter.get().charge(_ELEMENT * (1 + len(value)))
    elif isinstance(value, dict):
        _meter.get().charge(2 * _ELEMENT * (1 + len(value)))
    elif isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            _refuse_number()
    elif isinstance(value, types.GeneratorType):
        return _counted_items(value)
    return value


def _counted_items(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        _meter.get().charge(_ELEMENT)
        yield _counted(value)


def _measurable(values: Iterable[Any], estimate: _Estimate) -> list[Any]:
    """Return arguments of a call, with lists for iterators if the call exhausts them anyway."""
    if estimate not in (_everything, _join, _method_join):
        return list(values)
    return [list(value) if isinstance(value, Iterator) else value for value in values]


# Estimates of results of filters and methods, none of them too small


def _linear(*values: Any, **named: Any) -> int:
    """Escapes make at most twelve characters of one."""
    return 12 * _size(*values, *named.values())


def _product(value: Any, *others: Any, **named: Any) -> int:
    return (_size(value) + 2) * (_size(*others, *named.values()) + 1000)


def _nothing(*_values: Any, **_named: Any) -> int:
    return 0


def _elements(value: Any, *_others: Any, **_named: Any) -> int:
    known = hasattr(value, "__len__")
    if known:
        return _ELEMENT * len(value)
    return 0


def _everything(value: Any, *_others: Any, **_named: Any) -> int:
    """Sorting takes a key of each element, in small letters."""
    return _size(value)


def _batch(value: Any, linecount: int, *_others: Any, **_named: Any) -> int:
    return _ELEMENT * max(linecount, 0)


def _join(values: Any, d: Any = "", attribute: Any = None) -> int:
    if isinstance(values, str):
        return len(values) * (1 + _text_size(d))
    texts = sum(_text_size(value) for value in values)
    return texts + len(values) * _text_size(d)


def _method_join(text: Any, values: Any) -> int:
    return _join(values, text)


def _replace(text: Any, old: Any, new: Any, count: Any = None) -> int:
    if not isinstance(text, str) or not isinstance(old, str):
        return _product(text, old, new)
    times = text.count(old) if old else len(text) + 1
    return len(text) + times * _text_size(new)


def _indent(text: Any, width: Any = 4, *_others: Any, **_named: Any) -> int:
    if isinstance(width, int):
        added = width
    else:
        added = _text_size(width)
    return (_text_size(text) + 2) * (1 + added)


def _padded(text: Any, width: int = 80, *_others: Any) -> int:
    return _text_size(text) + width


def _wordwrap(
    text: Any,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: Any = None,
    *_others: Any,
    **_named: Any,
) -> int:
    return (_text_size(text) + 1) * (1 + _text_size(wrapstring or "\n"))


def _expandtabs(text: Any, tabsize: int = 8) -> int:
    tabs = text.count("\t" if isinstance(text, str) else b"\t")
    return int(len(text) + tabs * max(tabsize, 0))


def _translate(text: Any, table: Any, *_others: Any) -> int:
    return (len(text) + 1) * (_size(table) + 1)


def _split(text: Any, sep: Any = None, *_others: Any, **named: Any) -> int:
    sep = named.get("sep", sep)
    if sep:
        pieces = text.count(sep) + 1
    else:
        pieces = len(text) // 2 + 1
    return len(text) + _ELEMENT * int(pieces)


def _splitlines(text: Any, *_others: Any, **_named: Any) -> int:
    if isinstance(text, str):
        ends = sum(map(text.count, _LINE_ENDS))
    else:
        ends = len(text)
    return len(text) + _ELEMENT * (ends + 1)


def _strftime(_moment: Any, format: Any = "", *_others: Any) -> int:
    return 256 * len(format)  # Python gives up there


def _widths(text: str) -> list[int]:
    """Return the numbers in a format: each may be a width or a precision."""
    found = re.findall(r"\d+", text)
    return [_UNLIMITED if len(digits) > 9 else int(digits) for digits in found]


def _printf(text: Any, *values: Any, **named: Any) -> int:
    """Estimate `text % values`: each field may show all values, at the largest width."""
    size = 10 * _size(text, *values, *named.values())
    if not isinstance(text, str | bytes):
        return size
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    widths = _widths(text)
    if "*" in text:  # a value is the width
        widths += [abs(part) for part in _parts(values) if isinstance(part, int)]
    return int(sum(widths) + text.count("%") * (size + max(widths, default=0)))


def _fromkeys(_mapping: Any, keys: Any, *_others: Any) -> int:
    return 2 * _elements(keys)


def _maketrans(_text: Any, *values: Any) -> int:
    return 2 * _ELEMENT * _size(*values)


def _to_bytes(_number: Any, length: int = 1, *_others: Any, **named: Any) -> int:
    return int(named.get("length", length))


def _round(value: Any, precision: Any = 0, *_others: Any, **_named: Any) -> int:
    if isinstance(precision, int) and abs(precision) > 1000:
        _refuse_number()
    return 0


_FILTERS_BY_ESTIMATE: dict[_Estimate, str] = {
    _nothing: "abs attr count d default first float last length max min random safe tojson",
    _elements: "items list map reject rejectattr reverse select selectattr slice",
    _everything: "dictsort groupby sort sum unique",
    _product: "pprint urlize xmlattr",
    _batch: "batch",
    _printf: "format",
    _indent: "indent",
    _join: "join",
    _padded: "center",
    _replace: "replace",
    _round: "round",
    _wordwrap: "wordwrap",
}
_FILTERS: dict[str, _Estimate] = {
    name: estimate for estimate, names in _FILTERS_BY_ESTIMATE.items() for name in names.split()
}
"""Of all other filters: `_linear`."""
_METHODS_BY_ESTIMATE: dict[_Estimate, str] = {
    _expandtabs: "expandtabs",
    _fromkeys: "fromkeys",
    _maketrans: "maketrans",
    _method_join: "join",
    _padded: "center ljust rjust zfill",
    _replace: "replace",
    _split: "rsplit split",
    _splitlines: "splitlines",
    _strftime: "strftime",
    _to_bytes: "to_bytes",
    _translate: "translate",
}
_METHODS: dict[str, _Estimate] = {
    name: estimate for estimate, names in _METHODS_BY_ESTIMATE.items() for name in names.split()
}
"""Of all other methods of texts: `_linear`; other objects return existing values."""


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does; Jinja's own filter escapes for HTML."""
    meter = _meter.get()
    meter.check(_linear(value))
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, sort_keys=sort_keys, indent=indent, separators=separators
    )
    if indent is None and separators is None:
        return encoder.encode(value)
    if isinstance(indent, int):
        step = indent
    else:
        step = len(indent or "")
    meter.check(1000 * step)  # a list in lists is indented by a multiple
    pieces = _Buffer()
    pieces.extend(encoder.iterencode(value))
    return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# Jinja


class _Buffer(list[str]):
    """The text of a macro, a block or the template, in pieces."""

    def append(self, text: str) -> None:
        _meter.get().charge(_ELEMENT + len(text))
        super().append(text)

    def extend(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.append(text)


class _Code(CodeGenerator):
    """Route each value-building step through the environment."""

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.buffer()")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined(")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._counted(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._counted(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._counted(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._counted(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _counted(self, visit: Callable[[Any, Frame], Any], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.counted(")
        visit(node, frame)
        self.write(")")


class _Formatter(SandboxedFormatter):
    """Check each field of `text.format(…)` before it is written."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            _meter.get().check(10 * _text_size(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        _meter.get().check(_text_size(value) + sum(_widths(format_spec)))
        return _counted(super().format_field(value, format_spec))


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """Escape values for a text marked as safe."""


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Code
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    counted = staticmethod(_counted)
    buffer = _Buffer

    def joined(self, *values: Any) -> Any:
        """Return `a ~ b`."""
        _meter.get().check(sum(map(_text_size, values)))
        return _counted("".join(map(str, values)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):  # most, by far
            _meter.get().charge(len(left) + len(right))
            return left + right
        _meter.get().check(_ESTIMATES[operator](left, right))
        return _counted(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, types.BuiltinMethodType) and not isinstance(owner, types.ModuleType):
            if isinstance(owner, str | bytes):
                usual = _linear
            else:
                usual = _nothing
            estimate = _METHODS.get(obj.__name__, usual)
            args = tuple(_measurable(args, estimate))
            _meter.get().check(estimate(owner, *args, **kwargs))
        return _counted(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        formatter = _Formatter(self)
        if isinstance(text, Markup):
            formatter = _EscapeFormatter(self, escape=text.escape)

        def format_map(mapping: Mapping[str, Any]) -> Any:
            return type(text)(formatter.vformat(text, (), mapping))

        def format(*args: Any, **kwargs: Any) -> Any:
            return type(text)(formatter.vformat(text, args, kwargs))

        if value.__name__ == "format_map":
            return format_map
        return format


def _shown(value: Any) -> Any:
    """Check a value before it is written as text."""
    if not isinstance(value, str):
        _meter.get().check(_text_size(value))
    return value


def _shallow(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return _elements(value)


def _plus(left: Any, right: Any) -> int:
    return _shallow(left) + _shallow(right)


def _times(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return 0  # both are short, so the product is
    if isinstance(left, int):
        return _times(right, left)
    if not isinstance(left, str | bytes | list | tuple) or not isinstance(right, int):
        return 0
    return _shallow(left) * max(right, 0)


def _power(left: Any, right: Any) -> int:
    both = isinstance(left, int) and isinstance(right, int)
    if both and left.bit_length() * right > 2 * _MOST_BITS:
        _refuse_number()
    return 0


def _modulo(left: Any, right: Any) -> int:
    if isinstance(left, str | bytes):
        return _printf(left, right)
    return 0


_ESTIMATES: dict[str, _Estimate] = {"+": _plus, "*": _times, "**": _power, "%": _modulo}


def _guarded(function: Callable[..., Any], estimate: _Estimate) -> Callable[..., Any]:
    """Return a filter with its result checked before and counted after."""
    own = int(hasattr(function, "jinja_pass_arg"))  # the first is Jinja's, not the template's

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        given = _measurable(args[own:], estimate)
        _meter.get().check(estimate(*given, **kwargs))
        return _counted(function(*args[:own], *given, **kwargs))

    return guarded


class _Generation(Extension):
    """Note the places of `{% generation %}` blocks; like transformers, only at the top level."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("noted"), [], [], body).set_lineno(line)

    def noted(self, caller: Callable[[], str]) -> str:
        meter = _meter.get()
        text = caller()
        meter.regions.append((meter.written, meter.written + len(text)))
        return text


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # it would compute constants uncounted
        finalize=_shown,
        extensions=[_Generation, LoopControlExtension],
    )
    filters = environment.filters | {"tojson": _tojson}
    for name, function in filters.items():
        environment.filters[name] = _guarded(function, _FILTERS.get(name, _linear))
    environment.globals["raise_exception"] = _raise_exception
    del environment.globals["lipsum"]
    return environment
