"""Offer Python functions as tools of a rollout: describe them to the model and run its calls.

A function is described by its type hints and its docstring, in Google's style (`Args:`). The model
is told of exceptions and invalid arguments as {"error": …} and may try again; a RolloutError fails
the sample. Plain functions run in a thread, one call of a rollout at a time, and block no other
rollout; such a thread cannot be stopped.
"""

import asyncio
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union

from ttrl.errors import RolloutError, TaskError
from ttrl.messages import Message, Tool
from ttrl.tasks.task import Chat, Choice

_SIMPLE = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
}
_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE
)
_ARGUMENT = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*(?:\n[ \t]+.*)*)", re.MULTILINE)


class Tools:
    """Hold functions by name. Raises TaskError for those without a docstring or a type hint: a
    model could not call them.

    calls, failures: counts so far.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.descriptions: list[Tool] = []
        self.calls = self.failures = 0
        for function in functions:
            self.add(function, describe_tool(function))

    def add(self, function: Callable[..., Any], description: Tool) -> None:
        """Add a function described in the format of OpenAI's API. Raises TaskError."""
        name = description["function"]["name"]
        if name in self.functions:
            raise TaskError(f"two tools are named {name}; rename one of them")
        self.functions[name] = function
        self.descriptions.append(description)

    async def answer(self, choice: Choice) -> list[Message]:
        """Run the calls of a reply in order; return the answering messages, [] without calls."""
        told = []
        for call in choice.message.tool_calls or []:
            function: Any = getattr(call, "function", None)
            content = await self._call(
                getattr(function, "name", ""), getattr(function, "arguments", "")
            )
            told.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return told

    async def talk(self, chat: Chat) -> Choice:
        """Ask the model until it calls no more tools; return its last choice."""
        choice = await chat(tools=self.descriptions or None)
        while told := await self.answer(choice):
            choice = await chat(told)
        return choice

    async def _call(self, name: str, arguments: str) -> str:
        self.calls += 1
        try:
            if name not in self.functions:
                raise ValueError(f"there is no tool {name}; there are {', '.join(self.functions)}")
            given = json.loads(arguments or "{}")
            if not isinstance(given, dict):
                raise ValueError(f"arguments must be a JSON object, not {arguments[:80]}")
            function = self.functions[name]
            inspect.signature(function).bind(**given)
            if inspect.iscoroutinefunction(function):
                result = await function(**given)
            else:
                result = await asyncio.to_thread(function, **given)
        except RolloutError:
            raise  # not the model's fault
        except Exception as error:  # noqa: BLE001 - of a tool, whatever it is: the model is told
            self.failures += 1
            return json.dumps({"error": str(error) or type(error).__name__}, ensure_ascii=False)
        if isinstance(result, str):
            return result
        return _text(result)


def cut(text: str, most: int) -> str:
    """Return a text, or its beginning and the length of the rest."""
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[{len(text) - most} characters more are left out]"


def _text(result: object) -> str:
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def describe_tool(function: Callable[..., Any]) -> Tool:
    """Return the description of a function in the format of OpenAI's API. Raises TaskError."""
    name = function.__name__
    text = inspect.getdoc(function) or ""
    if not text:
        raise TaskError(
            f"tool {name} has no docstring; describe the tool in one, and its arguments under Args:"
        )
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise TaskError(f"tool {name}: its type hints cannot be read: {error}") from error
    first, *sections = _SECTION.split(text)
    parts = dict(zip(sections[::2], sections[1::2]))
    told = next((parts[key] for key in ("Args", "Arguments", "Parameters") if key in parts), "")
    said = {
        match[1]: " ".join(match[2].split())
        for match in _ARGUMENT.finditer(textwrap.dedent(told.strip("\n")))
    }
    properties = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name not in hints:
            raise TaskError(
                f"tool {name}: its argument {parameter.name} has no type hint; add one, such as "
                f"{parameter.name}: str"
            )
        properties[parameter.name] = {
            **json_type(hints[parameter.name], f"tool {name}, {parameter.name}")
        }
        if parameter.name in said:
            properties[parameter.name]["description"] = said[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return tool_of(name, " ".join(first.split()), parameters)


def tool_of(name: str, description: str, parameters: Mapping[str, Any]) -> Tool:
    """Return a tool in the format of OpenAI's API. parameters: JSON Schema."""
    described = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


def json_type(hint: Any, where: str) -> Mapping[str, Any]:
    """Return a type hint as JSON Schema. Raises TaskError, naming `where`, for types unknown to
    JSON.
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is Literal:
        return {"enum": list(arguments), **json_type(type(arguments[0]), where)}
    if origin in (Union, types.UnionType):
        kinds = [json_type(one, where) for one in arguments if one is not type(None)]
        rest: Mapping[str, Any]
        if len(kinds) == 1:
            rest = kinds[0]
        else:
            rest = {"anyOf": kinds}
        if type(None) in arguments:
            return {**rest, "nullable": True}
        return rest
    kind = _SIMPLE.get(origin or hint)
    if kind is None:
        raise TaskError(
            f"{where}: JSON has no type {hint}; use int, float, str, bool, list, dict, Literal"
        )
    items = [one for one in arguments if one is not Ellipsis]
    if kind == "array" and items:
        return {"type": kind, "items": json_type(items[0], where)}
    if kind == "object" and len(items) == 2:
        return {"type": kind, "additionalProperties": json_type(items[1], where)}
    return {"type": kind}
