"""ttrl's extension of vLLM's worker, which tells a test what `ttrl.vllm_shared_prompts` does."""

from typing import Any

from ttrl import vllm_shared_prompts
from ttrl.vllm_worker import WeightSync


class Sharing(WeightSync):
    """`shared_tokens` over /collective_rpc."""

    def shared_tokens(self, share: bool = False, damage: bool = False) -> dict[str, Any]:
        """Tokens that were not computed so far. share: switches it on; damage: one token of the next step stands for another."""
        if share:
            vllm_shared_prompts.share_prompts(self)
        way: Any = self.model_runner._model_forward  # type: ignore[attr-defined]
        if damage:
            way._is_proven, plan = False, way._plan

            def damaged(input_ids: Any) -> Any:
                found = plan(input_ids)
                if found is not None:
                    found[0][-1] = 0
                return found

            way._plan = damaged
        shares = isinstance(way, vllm_shared_prompts.SharedPrompts)
        return {"saved": way.saved if shares else None, "active": shares and way.active}
