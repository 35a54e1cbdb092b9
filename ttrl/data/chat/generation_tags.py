"""`{% generation %}` tags for any chat template, put in without reading what the template says.

The template, whatever it does, becomes a macro of `messages` and `add_generation_prompt`. Around it
stands a short program, the same for all templates, that renders with it three texts for every
assistant message: the prompt that a server would be sent (`add_generation_prompt` on), the
conversation up to this message, and the whole. Where the whole begins with the second, and the
second with the first, what lies between the prompt and the end-of-turn token is what the model
wrote, and is tagged. Where a template rewrites an earlier turn (strips its thinking, moves the
system prompt) the whole does not begin so, and nothing is tagged. The result is an ordinary chat
template: `tokenizer.apply_chat_template(..., return_assistant_tokens_mask=True)` reads it.

Left out: moving tags into the template's own statements. Literals such as `'<|im_end|>\\n'` would
have to be cut, macros that write whole messages cannot carry tags (transformers counts characters
at the top level alone), and where a turn begins depends on variables (`enable_thinking`), so such
tags would need the rendered prompts to be checked against all the same.

The program alone cannot know that a template changes what a message says, or what the end-of-turn
token is: `ttrl.data.chat.turns` finds that out by rendering, and the tags are checked against it on
each use.
"""

import re
from collections.abc import Collection, Iterable

from ttrl.data.chat.rendering import ChatTemplate
from ttrl.errors import TokenizationError
from ttrl.messages import Message

_OWN_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_LAST_NEWLINE = re.compile(r"(\r\n|\r|\n)\Z")

# trim_blocks, which every chat template is rendered with, takes the newline behind the first line;
# `+` keeps lstrip_blocks from taking blanks that stand at the end of the template.
_PROGRAM = """{%% macro ttrl_render(messages, add_generation_prompt) %%}
%(source)s{%%+ endmacro %%}
{%%- set ttrl_whole = ttrl_render(messages, add_generation_prompt) -%%}
{%%- set ttrl = namespace(written=0, end=0) -%%}
{%%- for ttrl_message in messages -%%}
  {%%- if ttrl_message['role'] == 'assistant' and not loop.first -%%}
    {%%- set ttrl_prompt = ttrl_render(messages[:loop.index0], true) -%%}
    {%%- set ttrl_answered = ttrl_render(messages[:loop.index], false) -%%}
    {%%- set ttrl.end = 0 -%%}
    {%%- for ttrl_token in [%(ends)s] -%%}
      {%%- set ttrl_at = ttrl_answered.rfind(ttrl_token) -%%}
      {%%- if ttrl_at >= 0 and ttrl_at + ttrl_token | length > ttrl.end -%%}
        {%%- set ttrl.end = ttrl_at + ttrl_token | length -%%}
      {%%- endif -%%}
    {%%- endfor -%%}
    {%%- if ttrl_answered.startswith(ttrl_prompt) and ttrl.end > ttrl_prompt | length
            and ttrl_whole.startswith(ttrl_answered[:ttrl.end]) -%%}
      {{- ttrl_whole[ttrl.written:ttrl_prompt | length] -}}
      {%%- generation -%%}{{- ttrl_whole[ttrl_prompt | length:ttrl.end] -}}{%%- endgeneration -%%}
      {%%- set ttrl.written = ttrl.end -%%}
    {%%- endif -%%}
  {%%- endif -%%}
{%%- endfor -%%}
{{- ttrl_whole[ttrl.written:] -}}"""


def has_generation_tags(source: str) -> bool:
    """Tell whether the template `source` itself marks what the assistant wrote."""
    return _OWN_TAG.search(source) is not None


def with_generation_tags(source: str, ends_of_turn: Iterable[str]) -> str:
    """Return the chat template `source` with tags around each assistant turn, its end-of-turn token
    included.

    `ends_of_turn` are the end-of-turn tokens as the template writes them, such as "<|im_end|>"; a
    turn ends with the last of them in its message. Tags that `source` has are made no-ops of the
    same shape.
    """
    source = _OWN_TAG.sub(lambda tag: tag[1] + ("endif" if tag[2] else "if true") + tag[3], source)
    ends = ", ".join(_jinja_string(end) for end in sorted(set(ends_of_turn)))
    return _PROGRAM % {"source": _LAST_NEWLINE.sub("", source), "ends": ends}


def _jinja_string(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def checked_tags(
    template: ChatTemplate,
    messages: list[Message],
    whole: str,
    wanted: Collection[tuple[int, int]],
    others: int,
    ends_of_turn: Iterable[str],
) -> str:
    """Return the template with tags, checked on this conversation: the text that it writes is
    `whole`, and its tags are exactly around `wanted` (characters). Tags that the template already
    has are kept where they are right.

    Up to `others` more regions may be tagged: answers that cannot be trained for reasons that a
    template cannot know.

    Raises TokenizationError where the tags are wrong: so would be the mask of everyone who reads
    them.
    """
    if has_generation_tags(template.source):
        sources = [template.source]
    else:
        sources = []
    for source in [*sources, with_generation_tags(template.source, ends_of_turn)]:
        text, regions = template.render_tagged(source, messages)
        if text == whole and set(wanted) <= set(regions) and len(regions) <= len(wanted) + others:
            return source
    raise TokenizationError(
        f"{template.place}: with {{% generation %}} tags it writes "
        f"{'the same' if text == whole else 'another'} text, marked at "
        f"{sorted(regions)}; what the model wrote stands at {sorted(wanted)}"
    )
