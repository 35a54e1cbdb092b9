"""Chat templates that would take all memory are stopped before they do; real ones write what they
write for transformers.
"""

import contextlib
import datetime
import subprocess
import sys
import tracemalloc
from pathlib import Path

import check_chat_templates
import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from ttrl.data.chat.generation_tags import with_generation_tags
from ttrl.data.chat.rendering import ChatTemplate
from ttrl.errors import ModelFolderError, TemplateRefusalError, TokenizationError

ROOT = Path(__file__).parents[3]
REAL = ROOT.parent / "shared" / "data" / "chat_templates"
NOW = datetime.datetime(2024, 7, 26)
HI = [{"role": "user", "content": "hi"}]
MOST = 80e6
"""Bytes; each of these took hundreds of megabytes, or all that there are."""

DOUBLED = (
    "{% set ns = namespace(x=['x' * 1000]) %}{% for i in range(50) %}{% set ns.x = [ns.x, ns.x] "
    "%}{% endfor %}"
)
"""A list that holds the same text 2⁵⁰ times, in no memory."""
ATTACKS = {
    # operators
    "text * number": "{{ 'x' * 10**9 }}",
    "number * text": "{{ 10**9 * 'x' }}",
    "list * number": "{{ ([0] * 10**9) | length }}",
    "tuple * number": "{{ ((0,) * 10**9) | length }}",
    "messages * number": "{{ (messages * 10**8) | length }}",
    "+": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% "
    "endfor %}",
    "~": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% "
    "endfor %}",
    "list + list": "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% "
    "endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% "
    "endfor %}",
    # widths
    "%d": "{{ '%1000000000d' % 1 }}",
    "%f": "{{ '%.1000000000f' % 1.0 }}",
    "%*d": "{{ '%*d' % (10**9, 1) }}",
    "%(a(b))d": "{{ '%(a(b))1000000000d' % {'a(b)': 1} }}",
    "% of bytes": "{{ 'x%1000000000d'.encode() % 1 }}",
    "format filter": "{{ '%1000000000s' | format('a') }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format, width in a value": "{{ '{:{}}'.format(1, 10**9) }}",
    "format, width in a text": "{{ '{:{}}'.format(1, '1000000000') }}",
    "format, width deep in a value": "{{ '{:{0[a][b]}}'.format({'a': {'b': 10**9}}) }}",
    "format, width in parts": "{{ '{0:{1}000000000}'.format(1, 5) }}",
    "format of markup": "{{ ('{:1000000000}' | safe).format(1) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format, many fields": "{{ ('{0}' * 10**4).format('x' * 10**4) }}",
    "%, many fields": "{{ ('%(a)s' * 10**4) % {'a': 'x' * 10**4} }}",
    "center filter": "{{ 'x' | center(1000000000) }}",
    "center": "{{ 'x'.center(10**9) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "rjust of bytes": "{{ 'x'.encode().rjust(10**9) }}",
    "zfill, by attr": "{{ ('x' | attr('zfill'))(10**9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "indent": "{{ '\\n\\n' | indent(10**9) }}",
    "indent by a text": "{{ ('\\n' * 10**4) | indent('x' * 10**5) }}",
    "tojson, indent": "{{ {'a': {'b': 1}} | tojson(indent=10**9) }}",
    "tojson, indent by a text": "{{ [[[[[[[[[[1]]]]]]]]]] | tojson(indent='x' * 10**6) }}",
    "tojson, separators": "{{ range(100) | list | tojson(separators=('x' * 10**6, 'y')) }}",
    "batch": "{{ range(10) | batch(10**9, 'x') | list | length }}",
    "round": "{{ 1 | round(-10**9) }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') | length }}",
    "strftime": "{{ strftime_now('%c' * 10**6) }}",
    # products
    "replace": "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
    "replace filter": "{{ ('a' * 10**5) | replace('', 'b' * 10**5) }}",
    "join": "{{ ('b' * 10**5).join('a' * 10**5) }}",
    "join filter": "{{ (('b' * 10**5,) * 10**5) | join }}",
    "wordwrap": "{{ ('a ' * 10**5) | wordwrap(1, true, 'b' * 10**5) | length }}",
    "translate": "{{ ('a' * 10**5).translate({97: 'b' * 10**5}) | length }}",
    "urlize": "{{ ('http://a.bc ' * 10**4) | urlize(10**9, rel='b' * 10**5) | length }}",
    "filter block": "{% filter replace('a', 'b' * 10**6) %}{% for i in range(1000) %}a{% endfor %}{% "
    "endfilter %}",
    "sort, by small letters": "{{ (['A' * 10**6] * 10**4) | sort | length }}",
    "map": "{{ (['A' * 10**6] * 10**4) | map('upper') | list | length }}",
    "map with arguments": "{{ range(99999) | map('center', 10**6) | list | length }}",
    "sum of lists": "{{ ([range(10**5) | list] * 10**4) | sum(start=[]) | length }}",
    # one text, shown often
    "nested, written": DOUBLED + "{{ ns.x }}",
    "nested, its namespace written": DOUBLED + "{{ ns }}",
    "nested, its values written": DOUBLED + "{{ {'a': ns.x}.values() }}",
    "nested, string": DOUBLED + "{{ ns.x | string | length }}",
    "nested, tojson": DOUBLED + "{{ ns.x | tojson }}",
    "nested, ~": DOUBLED + "{{ (ns.x ~ '') | length }}",
    "nested, %": DOUBLED + "{{ '%s' % [ns.x] }}",
    "nested, pprint": DOUBLED + "{{ ns.x | pprint }}",
    "nested, upper": DOUBLED + "{{ ns.x | upper }}",
    # little by little
    "a long list of texts": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + ['x' * 10**6] %}{% endfor %}",
    "slices": "{% set ns = namespace(l=[]) %}{% set x = 'x' * 10**6 %}{% for i in range(99999) %}"
    "{% set ns.l = [ns.l, x[1:]] %}{% endfor %}",
    "literals": "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l, ["
    + "0, " * 99
    + "]] %}{% endfor %}",
    "many names": "".join(f"{{% set a{i} = 'x' * 9000000 %}}" for i in range(100)),
    "a block": "{% set x %}"
    + "{% for i in range(99999) %}" * 2
    + "a{% endfor %}{% endfor %}{% endset %}",
    "what is written": "{% for i in range(99999) %}" * 2 + "a{{ i }}{% endfor %}{% endfor %}",
    "a macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) * 2 }}{% else %}x{% endif %}{% endmacro %}{{ "
    "m(60) }}",
    "slice filter": "{{ 'abc' | slice(10**9) | list | length }}",
    "the length of a loop": "{% for a in 'abc' | slice(10**9) %}{% if loop.length %}{% endif %}{% endfor %}",
    "letters": "{{ ('x' * 10**6) | list | length }}",
    "split": "{{ ('x ' * 10**6).split(' ') | length }}",
    "lines": "{{ ('\\n' * 10**6).splitlines() | length }}",
    "wide characters": "{% set a = '\U0001f600' * 4000000 %}{{ a }}",
    "an error": "{{ raise_exception('x' * 10**9) }}",
    "a long template": "{# " + "x" * 10**6 + " #}",
}


def tokenizer_with(template, tokenizer_of):
    tokenizer = tokenizer_of("plain")
    tokenizer.chat_template = template
    return tokenizer


def peak_of(function):
    """Return the most bytes that Python had at once for it, and its exception."""
    tracemalloc.start()
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whichever it is, is looked at
        return tracemalloc.get_traced_memory()[1], error
    finally:
        tracemalloc.stop()
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_that_takes_all_memory_is_stopped_before(attack, tokenizer_of):
    # Not by the limit of time.
    template = ChatTemplate(tokenizer_with(ATTACKS[attack], tokenizer_of), now=NOW, seconds=600.0)
    peak, error = peak_of(lambda: template.render(HI, answer_next=True))
    assert isinstance(error, ModelFolderError), error
    assert peak < MOST
    assert "the chat template of" in str(
        error
    ) and "for one conversation; check it, or set another" in str(error)


def test_a_template_is_stopped_with_tags_too(tokenizer_of):
    template = ChatTemplate(tokenizer_with("{{ 'x' * 10**9 }}", tokenizer_of), now=NOW)
    source = with_generation_tags(template.source, ["</s>"])
    peak, error = peak_of(lambda: template.render_tagged(source, HI))
    assert isinstance(error, ModelFolderError) and peak < MOST


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(10**9) | list | length }}",
        "{{ lipsum(n=10**6) }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
)
def test_what_jinja_refuses_itself_takes_no_memory(source, tokenizer_of):
    template = ChatTemplate(tokenizer_with(source, tokenizer_of), now=NOW)
    peak, error = peak_of(lambda: template.render(HI, answer_next=True))
    assert isinstance(error, TemplateRefusalError) and peak < MOST


def test_an_error_that_a_template_writes_is_short(tokenizer_of):
    template = ChatTemplate(
        tokenizer_with("{{ raise_exception('x' * 10**6) }}", tokenizer_of), now=NOW
    )
    with pytest.raises(TemplateRefusalError) as refused:
        template.render(HI, answer_next=True)
    assert 1000 < len(str(refused.value)) < 3000


LONG = [
    {
        "role": ("user", "assistant")[number % 2],
        "content": f"{number}: " + "What is said? é 世 " * 300,
    }
    for number in range(200)
]


@pytest.mark.skipif(not REAL.is_dir(), reason="the collection of templates is not here")
@pytest.mark.parametrize(
    "name", [name for name, _ in check_chat_templates.templates_in(REAL)] if REAL.is_dir() else []
)
def test_real_templates_write_what_they_write_for_transformers(name, tokenizer_of):
    """Tags included, of short conversations of every kind and of one with a megabyte."""
    source = dict(check_chat_templates.templates_in(REAL))[name]
    conversations = check_chat_templates.CONVERSATIONS | {"long": {"messages": LONG}}
    written = 0
    for title, conversation in conversations.items():
        given = {
            key: value for key, value in conversation.items() if key not in ("messages", "tools")
        }
        tokenizer = tokenizer_with(source, tokenizer_of)
        template = ChatTemplate(tokenizer, conversation.get("tools"), NOW, given)
        try:
            messages = template.prepared(conversation["messages"])
            text = template.render(messages, answer_next=True)
        except TokenizationError:
            continue
        variables = {**tokenizer.special_tokens_map, **template.variables}
        ours = {"conversations": [messages], "tools": template.tools, "chat_template": source}
        theirs, _ = render_jinja_template(**ours, add_generation_prompt=True, **variables)
        assert text == theirs[0], title
        written += 1
        if title == "long":
            continue  # the program with the tags goes through it 400 times
        tagged = with_generation_tags(source, ["<|im_end|>", "</s>", "<|eot_id|>", "<end_of_turn>"])
        ours["chat_template"] = tagged
        theirs, regions = render_jinja_template(
            **ours, return_assistant_tokens_mask=True, **variables
        )
        assert template.render_tagged(tagged, messages) == (theirs[0], regions[0]), title
    assert written >= 5


def test_a_conversation_may_be_copied_for_each_of_its_messages(tokenizer_of):
    """As by a template that appends each message to what it has: two megabytes that way make
    200.
    """
    source = (
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.content "
        "%}{% endfor %}{{ ns.x }}"
    )
    template = ChatTemplate(tokenizer_with(source, tokenizer_of), now=NOW)
    long = [{"role": "user", "content": "x" * 10_000}] * 200
    assert template.render(long, answer_next=True) == "x" * 2_000_000


def test_an_allowance_is_one_conversations(tokenizer_of):
    """It does not add up over the conversations of a data set."""
    template = ChatTemplate(tokenizer_with("{{ 'x' * 1500000 }}", tokenizer_of), now=NOW)
    for _ in range(3):
        assert len(template.render(HI, answer_next=True)) == 1_500_000


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%5.2f|%-4s' % (1.5, 'a') }}{{ '%(b)03d' % {'b': 7} }}",
        "{{ '{:>5}|{:{}}|{!r}|{a[0]}'.format('x', 'y', 4, 'é', a=[1]) }}",
        "{{ '{a}'.format_map({'a': 1}) }}{{ ('<{}>' | safe).format('<b>') }}",
        "{{ 'a' ~ 1 ~ none ~ [1, 'é'] }}{{ {'a': [1, none, true]} | tojson(indent=2) }}",
        "{{ {'b': 1, 'a': [1, 2]} | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{{ 'é' | tojson(ensure_ascii=true) }}{{ 'é<' | tojson }}{{ [undefined_one] | length }}",
        "{{ [3, 1, 2] | sort | join(', ') }}{{ range(7) | batch(3, '-') | list }}",
        "{{ 'abc' | list | reverse | join }}{{ 'abc' | reverse }}{{ {'a': 1}.items() | list }}",
        "{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}{{ (1, 2)[::-1] }}",
        "{{ messages[0:1] }}{{ 2 ** 10 % 7 }}{{ 7 // 2 }}{{ 1 + 1.5 }}{{ [1] + [2] }}{{ [1] * 2 }}",
        "{% set x %}{% for i in range(3) %}{{ loop.index }}/{{ loop.length }} {% endfor %}{% "
        "endset %}{{ x | trim | upper }}",
        "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller else '' }}{% endmacro %}"
        "{{ m(1) }}{% call m(3) %}!{% endcall %}",
        "{{ 'a\\nb' | indent(2, true) }}{{ 'abc def' | wordwrap(3) }}{{ ' x ' | center(9) }}",
        "{{ 'ab'.zfill(4) }}{{ 'a,b'.split(',') }}{{ 'a b\\nc'.splitlines() }}{{ 'A'.lower() }}",
        "{{ ['b', 'A'] | map('upper') | unique | list }}{{ [[1], [2]] | sum(start=[]) }}",
        "{{ 2.567 | round(1) }}{{ undefined_one }}{{ messages | map(attribute='role') | list | "
        "first }}",
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% "
        "endif %}{{ i }}{% endfor %}",
        "{% if true %}{% break_it %}{% endif %}",
        "{{ messages[0].role.__class__ }}",
        "{{ messages | map(attribute='role') | tojson }}",
        "{{ messages.append(1) }}",
        "{{ 'a' | nothing_like_it }}",
    ],
)
def test_everything_else_works_as_for_transformers(source, tokenizer_of):
    tokenizer = tokenizer_with(source, tokenizer_of)
    template = ChatTemplate(tokenizer, now=NOW)
    theirs = None
    with contextlib.suppress(TemplateError, TypeError):
        (theirs,) = render_jinja_template(
            [HI], chat_template=source, **tokenizer.special_tokens_map
        )[0]
    if theirs is not None:
        assert template.render(HI, answer_next=False) == theirs
    else:
        with pytest.raises(TemplateRefusalError):
            template.render(HI, answer_next=False)


LARGEST = """
import resource
from ttrl.data.chat import template_sandbox as sandbox

def most():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = most()
source = "{{ a }}" * (sandbox._MOST_SOURCE // 7)
assert sandbox.render(source, {}, 2**30) == ("", [])
print(most() - before)
"""


def test_the_largest_template_takes_little_to_compile():
    """In a process of its own: Python's own counting makes it ten times as slow."""
    done = subprocess.run(
        [sys.executable, "-c", LARGEST], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 4 * MOST
