"""Support a first task of one's own: a file to start from (`ttrl tasks new`); prompts, replies and
grades (`ttrl tasks try`).
"""

import asyncio
import dataclasses
import inspect
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from ttrl.errors import TtrlError, UserError
from ttrl.messages import text_of
from ttrl.ready_models import model_named
from ttrl.records import Sample
from ttrl.rollouts.task_results import get_task_results
from ttrl.server.model_folder import check_model_folder
from ttrl.server.serving import is_address, serving
from ttrl.tasks.task import Grade, Grader, Task
from ttrl.text import short

_WIDTH = 100

Say = Callable[[str], None]


def try_tasks(
    tasks: Sequence[Task],
    say: Say,
    *,
    model: str | None = None,
    replies: Sequence[str] = (),
    samples: int = 1,
    max_tokens: int = 512,
    temperature: float = 1.0,
    server_args: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> bool:
    """Show each task's prompt, replies and grades; return True if every reply was graded.

    model: the address of a server ("http://127.0.0.1:8000/v1"), or a model folder or name; for
    these a vLLM server is started here with `server_args` and `chat_template`. It replies `samples`
    times to each task. None: grade the given `replies`, or without any, show only the prompts.
    Raises UserError, ServerError.
    """
    if model is None:
        answers = [[_graded(task, reply) for reply in replies] for task in tasks]
    elif replies:
        raise UserError("give a model or replies, not both: replies are graded without a model")
    else:
        folder = model_named(model)
        if not is_address(folder):
            check_model_folder(folder, chat_template=chat_template is None)
            say(f"starting a vLLM server for {model} (half a minute or more) ...")
        params = {"max_tokens": max_tokens, "temperature": temperature}
        with serving(folder, server_args=server_args, chat_template=chat_template) as served:
            if served.parsers:
                say(served.parsers)
            results = get_task_results(
                tasks,
                served.endpoint,
                served.model,
                n=samples,
                params=params,
                token_ids=served.is_ours,
                pbar=False,
            )
            answers = [result.samples for result in asyncio.run(results)]
    for number, (task, of_task) in enumerate(zip(tasks, answers, strict=True), 1):
        _say_task(say, task, number, len(tasks))
        for sample in of_task:
            _say_block(
                say, "reply given" if model is None else "reply", sample.text + _ending(sample)
            )
            say(_grade_line(sample))
    if model is None and not replies:
        say(
            "\nThese are the prompts. To see grades, use --reply TEXT for a reply of your own, or "
            "--model URL_OR_FOLDER."
        )
    return all(sample.error is None for of_task in answers for sample in of_task)


def _graded(task: Task, reply: str) -> Sample:
    """Grade a reply not written by a model."""
    sample = Sample(task_id=task.id, sample=0, messages=task.messages, text=reply)
    if task.grader is None:
        return dataclasses.replace(
            sample,
            error="this task's reward comes from its rollout or its group_grader, which need a "
            "model: --model",
        )
    try:
        grade = asyncio.run(_grade(task.grader, reply, task.id))
    except Exception as error:  # noqa: BLE001
        # Users want to see whatever their grader raises.
        frames = traceback.extract_tb(error.__traceback__)
        libraries = (sys.prefix, sys.base_prefix)
        where = [frame for frame in frames if not frame.filename.startswith(libraries)][-1]
        if isinstance(error, TtrlError):
            at = ""
        else:
            at = f"{Path(where.filename).name}, line {where.lineno}: "
        return dataclasses.replace(sample, error=f"{at}{type(error).__name__}: {error}")
    return dataclasses.replace(sample, reward=grade.reward, metrics=grade.metrics)


def _say_task(say: Say, task: Task, number: int, count: int) -> None:
    say(f"\n━━ task {number} of {count}: {task.id}")
    for message in task.messages:
        content = message.get("content")
        text = text_of(content)
        shown_short = content or message.get("tool_calls")
        if not text and shown_short:
            text = short(shown_short)
        _say_block(say, message["role"], text)


def _say_block(say: Say, title: str, text: str) -> None:
    say(f"  {title}:")
    for line in text.splitlines() or [""]:
        say(
            textwrap.fill(
                line,
                _WIDTH,
                initial_indent="    ",
                subsequent_indent="    ",
                replace_whitespace=False,
            )
            or "    (empty)"
        )


def _ending(sample: Sample) -> str:
    if sample.finish_reason in ("stop", None):
        return ""
    return f" [ended: {sample.finish_reason}]"


def _grade_line(sample: Sample) -> str:
    if sample.error is not None:
        return f"  no grade: {sample.error}"
    return f"  reward {sample.reward:g}" + "".join(
        f", {name} {value:g}" for name, value in sample.metrics.items()
    )


async def _grade(grader: Grader, reply: str, name: str) -> Grade:
    message = ChatCompletionMessage(role="assistant", content=reply)
    output: Any = grader(Choice(finish_reason="stop", index=0, message=message))
    return Grade.of(await output if inspect.isawaitable(output) else output, f"task {name!r}")
