"""Grade with a reward model: a classifier with one output, served by vLLM (`ttrl serve MODEL --vllm
runner=pooling`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ttrl.errors import GraderError
from ttrl.judges.asking import Asked
from ttrl.messages import request_messages
from ttrl.tasks.task import Choice
from ttrl.text import is_number, short


@dataclass(frozen=True, kw_only=True)
class RewardModel(Asked):
    """Return the model's reward for the conversation with its reply, unscaled: its scale is
    unknown.

    base_url: with /v1, as for other servers; vLLM's pooling endpoint is next to it.
    messages: the task's own; a rollout's choice has them.
    params: added to the request; {"use_activation": True} gives vLLM's own default, for most models
        the sigmoid of the reward.

    If a model gives one number for each position, the last one counts. Several numbers for one
    position are no reward, as from an embedding model or a classifier with more labels.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)

    async def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, metrics). Raises GraderError."""
        reply = {"role": "assistant", "content": choice.message.content or ""}
        messages = getattr(choice, "messages", None) or [*request_messages(self.messages), reply]
        body = {"model": self.model, "messages": messages, "use_activation": False, **self.params}
        answer = await self.post(self.base_url.rstrip("/").removesuffix("/v1") + "/pooling", body)
        try:
            numbers: Any = answer.body["data"][0]["data"]
            while isinstance(numbers[-1], list):
                numbers = numbers[-1]
        except (LookupError, TypeError):
            numbers = None
        if isinstance(numbers, list) and len(numbers) > 1:
            raise GraderError(
                f"the reward model {self.model} sent {len(numbers)} numbers; serve a classifier "
                "with one output"
            )
        if not isinstance(numbers, list) or not is_number(numbers[0]):
            raise GraderError(
                f"the reward model {self.model} sent no number: {short(answer.body, 120)}"
            )
        return float(numbers[0]), self.costs([answer])
