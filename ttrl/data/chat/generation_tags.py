"""Add `{% generation %}` tags to any chat template, without reading its contents.

The template becomes a macro of `messages` and `add_generation_prompt`. A short program around it,
the same for all templates, renders three texts for every assistant message: the server's prompt
(`add_generation_prompt` on), the conversation up to this message, and the whole. If the whole
begins with the second, and the second with the first, the text between the prompt and the
end-of-turn token is the model's, and is tagged. If a template rewrites an earlier turn (strips its
thinking, moves the system prompt), the whole begins differently, and nothing is tagged. The result
is an ordinary chat template: `tokenizer.apply_chat_template(...,
return_assistant_tokens_mask=True)` reads it.

Left out: moving tags into the template's own statements. Literals such as `'<|im_end|>\\n'` would
have to be cut, macros writing whole messages cannot contain tags (transformers counts characters
only at the top level), and the beginning of a turn depends on variables (`enable_thinking`): such
tags would also need a check against the rendered prompts.

The program cannot detect changes to a message's text, or the end-of-turn token:
`ttrl.data.chat.turns` finds both by rendering, and the tags are checked against it on each use.
"""

import re
from collections.abc import Collection, Iterable

from ttrl.data.chat.rendering import ChatTemplate
from ttrl.errors import TokenizationError
from ttrl.messages import Message

_OWN_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_LAST_NEWLINE = re.compile(r"(\r\n|\r|\n)\Z")

# Chat templates are rendered with trim_blocks: it takes the newline behind the first line; `+`
# keeps lstrip_blocks from taking blanks at the end of the template.
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
    """Tell whether the template `source` itself marks the assistant's text."""
    return _OWN_TAG.search(source) is not None


def without_generation_tags(source: str) -> str:
    """Return the template with its own tags as no-ops of the same shape."""
    return _OWN_TAG.sub(lambda tag: tag[1] + ("endif" if tag[2] else "if true") + tag[3], source)


def with_generation_tags(source: str, ends_of_turn: Iterable[str]) -> str:
    """Return the chat template `source` with tags around each assistant turn, its end-of-turn token
    included.

    `ends_of_turn` are the end-of-turn tokens as written by the template, such as "<|im_end|>"; a
    turn ends with the last of them in its message. Existing tags in `source` become no-ops of the
    same shape.
    """
    source = without_generation_tags(source)
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
    """Return the template with tags, checked on this conversation: it writes `whole`, and its tags
    are exactly around `wanted` (characters). Correct tags in the template are kept.

    Up to `others` more regions may be tagged: answers untrainable for reasons unknown to a
    template.

    Raises TokenizationError for wrong tags: any reader's mask would be wrong.
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
        f"{template.place}: with {{% generation %}} tags, it writes "
        f"{'the same' if text == whole else 'another'} text and marks {sorted(regions)}, but the "
        f"model's text is at {sorted(wanted)}"
    )
