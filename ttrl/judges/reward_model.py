"""A reward model as a grader: a classifier with one output that vLLM serves (`vllm serve MODEL --runner pooling`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ttrl.errors import GraderError
from ttrl.judges.asking import Asked
from ttrl.tasks.task import Choice
from ttrl.text import is_number, short


@dataclass(frozen=True, kw_only=True)
class RewardModel(Asked):
    """Gives the reward that the model computes for the conversation with its reply, as it is: no scale is known.

    base_url: with /v1, as of other servers; vLLM's pooling endpoint lies beside it. messages: what the reply answers, the task's
    own; a rollout's choice brings them itself. params: sent along, such as {"use_activation": False}.

    The last number of the last position is taken, which is the whole output of a model with one.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)

    async def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, metrics). Raises GraderError."""
        reply = {"role": "assistant", "content": choice.message.content or ""}
        messages = getattr(choice, "messages", None) or [*map(dict, self.messages), reply]
        body = {"model": self.model, "messages": messages, **self.params}
        answer = await self.post(self.base_url.rstrip("/").removesuffix("/v1") + "/pooling", body)
        value: Any = answer.body
        try:
            value = value["data"][0]["data"]
            while isinstance(value, list):
                value = value[-1]
        except (LookupError, TypeError):
            value = None
        if not is_number(value):
            raise GraderError(f"the reward model {self.model} sent no number: {short(answer.body, 120)}")
        return float(value), self.costs([answer])
