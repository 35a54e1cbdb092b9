"""Tool calls in streams: by the book, cut anywhere, they are what a whole answer says; and so they
are from servers that number them wrongly, repeat names or send arguments twice."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.rollouts.client.stream import consume_chat_completion_stream
from ttrl.rollouts.client.tool_calls import whole_arguments


def streamed(*parts, finish="tool_calls"):
    """The calls that a stream of these parts makes: (id, name, arguments)."""

    async def chunks():
        for delta in [*({"tool_calls": [part]} for part in parts), {}]:
            end = None if delta else finish
            choice = {"index": 0, "delta": delta, "finish_reason": end}
            yield {"id": "c", "created": 5, "model": "m", "choices": [choice]}

    completion = asyncio.run(consume_chat_completion_stream(chunks()))
    calls = completion.choices[0].message.tool_calls
    return [(call.id, call.function.name, call.function.arguments) for call in calls]


def part(index=0, id=None, name=None, arguments=None):
    """A part without the fields that are None."""
    function = {
        key: one for key, one in (("name", name), ("arguments", arguments)) if one is not None
    }
    fields = {"index": index, "id": id, "function": function or None}
    return {key: one for key, one in fields.items() if one is not None}


TWO = [("a", "f", '{"x":1}'), ("b", "g", '{"y":2}')]
ONE = TWO[:1]


def more(arguments, index=0):
    return part(index, None, None, arguments)


@pytest.mark.parametrize(
    ("parts", "calls"),
    [
        # Two calls, both of index 0, whole or in parts, which carry their id or not.
        ([part(0, *TWO[0]), part(0, *TWO[1])], TWO),
        ([part(0, "a", "f", '{"x"'), more(":1}"), part(0, "b", "g", '{"y"'), more(":2}")], TWO),
        (
            [
                part(0, "a", "f", ""),
                part(0, "b", "g", ""),
                part(0, "a", None, '{"x":1}'),
                part(0, "b", None, '{"y":2}'),
            ],
            TWO,
        ),
        ([part(0, "a", "f", "{}"), part(0, "b", "f", "{}")], [("a", "f", "{}"), ("b", "f", "{}")]),
        ([part(0, "a", "f", '{"x":1}'), part(0, "b", "", ""), part(0, None, "g", '{"y":2}')], TWO),
        ([part(0, None, *one[1:]) for one in TWO], [(None, *one[1:]) for one in TWO]),
        (
            [part(0, "a", "f", "{}"), part(1, "b", "g", "{}"), part(0, "c", "h", "{}")],
            [("a", "f", "{}"), ("c", "h", "{}"), ("b", "g", "{}")],
        ),
        # The name in every part, also while the arguments have not begun.
        ([part(0, "a", "f", ""), part(0, None, "f", '{"x":'), part(0, None, "f", "1}")], ONE),
        ([part(0, "a", "f"), part(0, "a", "f"), part(0, *ONE[0]), part(0, "a", "f", "")], ONE),
        # The arguments once more at the end, written alike or not.
        ([part(0, *ONE[0]), more('{"x":1}')], ONE),
        ([part(0, "a", "f", ""), more('{"x":'), more("1}"), part(0, "a", "f", '{"x": 1}')], ONE),
        ([part(0, *ONE[0]), part(0, *ONE[0]), part(0, *ONE[0])], ONE),
        ([part(0, "a", "f", "{}"), part(0, "a", "f", "{}")], [("a", "f", "{}")]),
        # All of the arguments so far in every part.
        ([part(0, "a", "f", '{"'), part(0, "a", "f", '{"x"'), part(0, *ONE[0])], ONE),
        # Ids made up for every part.
        ([part(0, "a", "f", ""), part(0, "b", None, '{"x"'), part(0, "c", None, ":1}")], ONE),
        # An id that comes late; a name in pieces; no index.
        ([part(0, None, "f", ""), part(0, "a", None, '{"x":1}')], ONE),
        ([part(0, "a", "get_"), part(0, None, "it", ""), more("{}")], [("a", "get_it", "{}")]),
        ([part(None, *TWO[0]), part(None, *TWO[1])], TWO),
        ([part(None, "a", "f", '{"x"'), more(":1}", None), part(None, *TWO[1])], TWO),
    ],
)
def test_ways_of_servers(parts, calls):
    assert streamed(*parts) == calls


@pytest.mark.parametrize(
    "pieces",
    [
        ["1", "1"],
        ['{"x":', "1", "1", "}"],
        ['{"x": "', "ha", "ha", '"}'],
        ['{"x":', '{"x":', "1}", "}"],
        ['{"x":', '{"x": 1}', "}"],
        ['{"x":', '{"x": 1}'],  # cut off by the limit of tokens
        ['{"', '{":":1}'],
        ["[{}", ",", "{}", "]"],
        ["{}", " "],
        ["{}{}", "{}"],  # no JSON, and no object sent again
        ['{"x":1}', '{"y":1}'],
        ['{"x":1}{', '"x":1}'],
        ["", "abc", "abc"],
    ],
)
def test_pieces_that_are_all_of_the_arguments(pieces):
    assert whole_arguments(pieces) == "".join(pieces)
    given = [part(0, None, None, piece) for piece in pieces]
    assert streamed(part(0, "a", "f", ""), *given) == [("a", "f", "".join(pieces))]


keys = st.text('a{":', max_size=2)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-11, 11) | st.text('ab1{}":,\\', max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(keys, values, max_size=3)


def cut(draw, text):
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]


@st.composite
def calls_in_pieces(draw):
    """Calls with ids of their own, and the pieces of their arguments, which may be cut off."""
    calls, pieces = [], []
    for number in range(draw(st.integers(1, 3))):
        separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
        text = json.dumps(draw(objects), separators=separators)
        if draw(st.booleans()):
            text = text[: draw(st.integers(1, len(text)))]
        calls.append((f"id{number}", draw(st.sampled_from(["f", "ff", "get"])), text))
        pieces.append(cut(draw, text))
    return calls, pieces


@settings(max_examples=300, deadline=None)
@given(given=calls_in_pieces(), data=st.data())
def test_property_streams_by_the_book(given, data):
    """Cut anywhere, and the calls' parts in any order: what a whole answer says."""
    calls, pieces = given
    parts = [part(k, id, name, "") for k, (id, name, _) in enumerate(calls)]
    waiting = [[part(k, None, None, piece) for piece in own] for k, own in enumerate(pieces)]
    while any(waiting):
        parts.append(data.draw(st.sampled_from([own for own in waiting if own])).pop(0))
    assert streamed(*parts) == calls


@settings(max_examples=300, deadline=None)
@given(
    given=calls_in_pieces(),
    zeros=st.booleans(),
    names=st.booleans(),
    ids=st.booleans(),
    again=st.integers(0, 2),
)
def test_property_streams_of_other_servers(given, zeros, names, ids, again):
    """One call after the other: all of index 0, names and ids in every part, arguments sent
    again.
    """
    calls, pieces = given
    parts = []
    for number, ((id, name, text), own) in enumerate(zip(calls, pieces)):
        index = 0 if zeros else number
        try:
            again_here = again if isinstance(json.loads(text), dict) else 0
        except ValueError:
            again_here = 0
        parts.append(part(index, id, name, ""))
        said = (index, id if ids else None, name if names else None)
        parts += [part(*said, one) for one in [*own, *[text] * again_here]]
    assert streamed(*parts) == calls


@pytest.mark.parametrize(
    "pieces",
    [
        ['{"x": ', "9" * 5000, "}"],  # more digits than Python reads
        ['{"x": ', "[" * 100_000],
        ['{"x": 1}', "[2]"],
    ],
)
def test_arguments_that_cannot_be_read_are_joined(pieces):
    assert whole_arguments(pieces) == "".join(pieces)


def test_a_part_may_only_carry_the_id_of_its_call():
    parts = [part(0, "a", "f", ""), {"index": 0, "id": "a"}, more('{"x":1}')]
    assert streamed(*parts) == ONE
