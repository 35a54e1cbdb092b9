"""A first task of one's own: a file to start from (`ttrl tasks new`); prompts, replies and grades (`ttrl tasks try`)."""

import asyncio
import inspect
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from ttrl.errors import UserError
from ttrl.rollouts.task_results import get_task_results
from ttrl.server.serving import ServedModel, is_address, serving
from ttrl.system.files import write_text
from ttrl.tasks.task import Grade, Task
from ttrl.text import short

TEMPLATE = Path(__file__).with_name("task_template.txt")
_WIDTH = 100

Say = Callable[[str], None]


def write_template(path: Path) -> Path:
    """Write the template. Raises UserError where the file exists, or is not named so that Python can import it."""
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(f"{path}: give a name that Python can import: letters, digits and underscores, ending in .py")
    if path.exists():
        raise UserError(f"{path} exists already; give another name, or remove it first")
    write_text(path, TEMPLATE.read_text(encoding="utf-8").replace("my_task", path.stem))
    return path


def try_tasks(
    tasks: Sequence[Task],
    say: Say,
    *,
    model: str | None = None,
    replies: Sequence[str] = (),
    samples: int = 1,
    max_tokens: int = 512,
    temperature: float = 1.0,
) -> bool:
    """Show each task's prompt, replies and grades; return True where every reply was graded.

    model: the address of a server ("http://127.0.0.1:8000/v1"), or a model folder, for which a vLLM server is started here; it
        replies `samples` times to each task. None: the `replies` given are graded, and without any only the prompts are said.
    Raises UserError, ServerError.
    """
    if model is None:
        return _grade_given(tasks, say, replies)
    if replies:
        raise UserError("give a model or replies, not both: replies are for grading without a model")
    options = {"n": samples, "params": {"max_tokens": max_tokens, "temperature": temperature}, "pbar": False}
    if not is_address(model):
        say(f"starting a vLLM server for {model} (half a minute or more) ...")
    with serving(model) as served:
        return asyncio.run(_ask(tasks, say, served, {**options, "token_ids": served.is_ours}))


async def _ask(tasks: Sequence[Task], say: Say, served: ServedModel, options: dict[str, Any]) -> bool:
    results = await get_task_results(list(tasks), served.endpoint, served.model, **options)
    fine = True
    for number, (task, result) in enumerate(zip(tasks, results), 1):
        _say_task(say, task, number, len(tasks))
        for sample in result.samples:
            text = sample.text + ("" if sample.finish_reason in ("stop", None) else f" [ended: {sample.finish_reason}]")
            _say_block(say, "reply", text)
            fine = fine and sample.error is None
            say(_grade_line(sample.reward, sample.metrics) if sample.error is None else f"  no grade: {sample.error}")
    return fine


def _grade_given(tasks: Sequence[Task], say: Say, replies: Sequence[str]) -> bool:
    fine = True
    for number, task in enumerate(tasks, 1):
        _say_task(say, task, number, len(tasks))
        for reply in replies:
            _say_block(say, "reply given", reply)
            if task.grader is None:
                fine = False
                say("  no grade: this task's reward comes from its rollout, which needs a model: --model")
                continue
            try:
                grade = asyncio.run(_grade(task, reply))
            except Exception as error:  # noqa: BLE001 - whatever a person's grader raises is what they want to see
                fine = False
                say(f"  no grade: {type(error).__name__}: {error}")
            else:
                say(_grade_line(grade.reward, grade.metrics))
    if not replies:
        say("\nThese are the prompts. To see grades: --reply TEXT for a reply of your own, or --model URL_OR_FOLDER.")
    return fine


async def _grade(task: Task, reply: str) -> Grade:
    message = ChatCompletionMessage(role="assistant", content=reply)
    assert task.grader is not None
    output: Any = task.grader(Choice(finish_reason="stop", index=0, message=message))
    return Grade.of(await output if inspect.isawaitable(output) else output, f"task {task.id!r}")


def _say_task(say: Say, task: Task, number: int, count: int) -> None:
    say(f"\n━━ task {number} of {count}: {task.id}")
    for message in task.messages:
        content = message.get("content")
        _say_block(say, message["role"], content if isinstance(content, str) else short(content or message.get("tool_calls")))


def _say_block(say: Say, title: str, text: str) -> None:
    say(f"  {title}:")
    for line in text.splitlines() or [""]:
        say(
            textwrap.fill(line, _WIDTH, initial_indent="    ", subsequent_indent="    ", replace_whitespace=False)
            or "    (empty)"
        )


def _grade_line(reward: float | None, metrics: dict[str, float]) -> str:
    shown = "".join(f", {name} {value:g}" for name, value in metrics.items())
    return f"  reward {reward:g}{shown}"
