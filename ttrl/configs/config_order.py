"""In which order phases run, and which of them at the same time. A part of a run's config."""

from dataclasses import dataclass
from typing import Any, Literal

from ttrl.configs import Config

OFF_POLICY_CORRECTION = "token"
"""What `training["off_policy"]` is with `off_policy_steps` where nobody says otherwise: truncated importance sampling."""


@dataclass(kw_only=True)
class OrderConfig(Config):
    """A part of TrainConfig."""

    off_policy_steps: Literal[0, 1] = 0
    """1: while the trainer works on an iteration, the server samples the next one's rollouts, with the weights before that
    update; so the policy that is trained is one update ahead of the one that sampled. Where they have devices of their own,
    server and trainer then hardly wait for each other. The loss knows what the tokens were sampled with: `training["off_policy"]`
    is "token" then (truncated importance sampling) unless it is given. 0: each iteration samples from the newest policy."""

    def order_problems(self, weight_sync: str) -> list[str]:
        """What is wrong with these settings, a line each."""
        if self.off_policy_steps and weight_sync == "sleep":
            return [
                "off_policy_steps is 1 with weight_sync 'sleep'; the server samples while the trainer works, so it cannot sleep: "
                "choose weight_sync 'reload', or off_policy_steps 0"
            ]
        return []

    def policy_of_rollouts(self, number: int) -> int:
        """The iteration whose policy samples the rollouts of iteration `number`."""
        return max(0, number - 1 - self.off_policy_steps)

    def rollouts_of_policy(self, number: int) -> list[int]:
        """The iterations whose rollouts are sampled by the policy after iteration `number`: the inverse."""
        return [later for later in range(number + 1, number + 3) if self.policy_of_rollouts(later) == number]

    def correction(self) -> dict[str, Any]:
        """Settings of the recipe that go with the order, where the person gives no others."""
        return {"off_policy": OFF_POLICY_CORRECTION} if self.off_policy_steps else {}
