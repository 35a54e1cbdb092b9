"""Write a Modelfile: Ollama's description of a model, next to its GGUF file.

Ollama has templates of its own, in Go's language. The chat template is a program; so it is not
translated but observed: rendered with marks in the place of texts, it shows the text around each
role's message. A template made of these is simulated, and used only if it writes longer
conversations like the original.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.data.chat.rendering import ChatTemplate
from ttrl.errors import ModelFolderError, TemplateRefusalError
from ttrl.exports.gguf_tokenizer import load_tokenizer

_MARK = "Xq7z"
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Turns:
    """The texts around each role's text."""

    without_system: str
    """Before a conversation without a system message: often a default one."""
    around: Mapping[str, tuple[str, str]]
    answer: str
    """Before the reply to write."""

    def write(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a conversation as the template of `go` writes it."""
        text = ""
        if messages[0]["role"] != "system":
            text = self.without_system
        for message in messages:
            before, after = self.around[message["role"]]
            text += before + message["content"] + after
        return text + self.answer

    def go(self) -> str:
        """Return the template in Go's language."""
        branches = []
        for number, role in enumerate(_ROLES):
            before, after = self.around[role]
            choice = "if" if number == 0 else "else if"
            branches.append(
                f'{{{{ {choice} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            )
        default = ""
        if self.without_system:
            default = f"{{{{ if not .System }}}}{self.without_system}{{{{ end }}}}"
        return (
            f"{default}{{{{ range .Messages }}}}{''.join(branches)}"
            f"{{{{ end }}}}{{{{ end }}}}{self.answer}"
        )


def turns_of(template: ChatTemplate) -> Turns | None:
    """Return the texts around each role's text; None for a template with more to it."""

    def write(*roles: str, answer: bool = True) -> str:
        messages: list[Any] = [
            template.message(role, f"{_MARK}{number}") for number, role in enumerate(roles)
        ]
        return template.render(messages, answer_next=answer)

    try:
        with_system = write("system", "user", "assistant", "user", answer=False)
        plain = write("user", answer=False)
        answer = write("user").removeprefix(plain)
        parts = _between(with_system, 4)
        alone = _between(plain, 1)
        if parts is None or alone is None:
            return None
        # "…0 A 1 B 2 C 3 D": each border is the end of one text and the start of the next.
        after_assistant = _between(write("user", "assistant", answer=False), 2)
        system_alone = _between(write("system", "user", answer=False), 2)
        if after_assistant is None or system_alone is None:
            return None
        ends = {"user": alone[1], "assistant": after_assistant[2]}
        before_user = parts[3].removeprefix(ends["assistant"])
        turns = Turns(
            without_system=alone[0].removesuffix(before_user),
            around={
                "system": (parts[0], parts[1].removesuffix(before_user)),
                "user": (before_user, ends["user"]),
                "assistant": (parts[2].removeprefix(ends["user"]), ends["assistant"]),
            },
            answer=answer,
        )
        for roles in (
            ("user", "assistant") * 2 + ("user",),
            ("system", *("user", "assistant") * 2, "user"),
        ):
            messages = [
                {"role": role, "content": f"{_MARK}{number}"} for number, role in enumerate(roles)
            ]
            if turns.write(messages) != write(*roles):
                return None
    except TemplateRefusalError:
        return None
    return turns


def _between(text: str, marks: int) -> list[str] | None:
    """Return the texts before, between and after the marks; None unless each is there once."""
    parts = []
    for number in range(marks):
        before, mark, text = text.partition(f"{_MARK}{number}")
        if not mark:
            return None
        parts.append(before)
    if _MARK in text:
        return None
    return [*parts, text]


def modelfile(folder: Path, file: str, *, stops: Sequence[str], temperature: float) -> str:
    """Return the Modelfile of a GGUF file. stops: the end tokens of a reply. temperature: of the
    held-out samples.
    """
    lines = [f"FROM ./{file}"]
    turns = _turns_in(folder)
    if turns is None:
        lines.append(
            "# No TEMPLATE: Ollama uses the chat template of the GGUF file, if it knows it."
        )
    else:
        lines.append(f'TEMPLATE """{turns.go()}"""')
    lines += [f'PARAMETER stop "{_quoted(stop)}"' for stop in stops]
    lines.append(f"PARAMETER temperature {temperature:g}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _turns_in(folder: Path) -> Turns | None:
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template:
        return None
    try:
        turns = turns_of(ChatTemplate(tokenizer))
    except ModelFolderError:
        return None
    # Such texts would be commands, or end the template.
    if turns is None or any(mark in turns.go() for mark in ('"""', "{{{", "}}}")):
        return None
    return turns
