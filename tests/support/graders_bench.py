"""Graders in processes of their own, on an event loop that a test holds."""

import asyncio
import json
from typing import Any

import pytest

from ttrl.errors import GraderError
from ttrl.tasks.task import Task

WHERE = "task 't', sample 2"


def vllm_choice(content: str | None = "hello", **changes: Any) -> Any:
    """A choice as graders get it, from vLLM's JSON."""
    from ttrl.rollouts.client.choices import openai_choice
    from ttrl.rollouts.client.wire import Answer

    entries = [
        {
            "token": "h",
            "logprob": -0.5,
            "bytes": [104],
            "top_logprobs": [{"token": "h", "logprob": -0.5, "bytes": None}],
        }
    ]
    fields = {
        "index": 3,
        "finish_reason": "stop",
        "message": {
            "role": "assistant",
            "content": content,
            "reasoning": "I thought",
            "tool_calls": [],
        },
        "logprobs": {"content": entries},
        "token_ids": [5, 6],
        "stop_reason": None,
    }
    return openai_choice(Answer(choice=json.dumps({**fields, **changes}).encode()))


class GradersBench:
    """Graders in processes, and the loop that they live on."""

    where, choice = WHERE, staticmethod(vllm_choice)

    def __init__(self, **settings: Any) -> None:
        from ttrl.rollouts.graders.grading import Graders

        self.runner = asyncio.Runner()
        self.graders = Graders(isolated=True, **settings)
        self.graders.__enter__()

    async def grading(self, grader: Any, choice: Any = None) -> Any:
        task = Task(messages=[{"role": "user", "content": "x"}], grader=grader)
        return await self.graders.grade(task, choice or vllm_choice(), WHERE)

    def grade(self, grader: Any, choice: Any = None) -> Any:
        return self.runner.run(self.grading(grader, choice))

    def error(self, grader: Any, choice: Any = None) -> str:
        with pytest.raises(GraderError) as caught:
            self.grade(grader, choice)
        return str(caught.value)

    def grade_all(self, graders: list[Any]) -> list[Any]:
        """All at once: rewards and errors."""

        async def one(grader: Any) -> Any:
            try:
                return (await self.grading(grader)).reward
            except GraderError as error:
                return str(error)

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*map(one, graders))

        return self.runner.run(all_of_them())

    @property
    def keeper(self) -> int:
        """The pid of the process that starts the others."""
        return self.graders._processes._keeper._child.pid

    def close(self) -> None:
        self.graders.__exit__(None, None, None)
        self.runner.close()
