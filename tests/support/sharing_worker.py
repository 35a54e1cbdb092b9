"""ttrl's extension of vLLM's worker, which tells a test what `ttrl.vllm_worker.shared_prompts`
does.
"""

from typing import Any

from ttrl.vllm_worker import WeightSync, shared_prompts


class Sharing(WeightSync):
    """`shared_tokens` over /collective_rpc."""

    def shared_tokens(
        self, share: bool | None = None, damage: int | None = None, fail: bool = False
    ) -> dict[str, Any]:
        """Tokens that were not computed so far. share: switches it on or off; damage: one token of
        each step stands for another, after so many good steps; fail: the attention of a step that
        shares raises in its last layer.
        """
        if share:
            shared_prompts.share_prompts(self)
        way: Any = self.model_runner._model_forward  # type: ignore[attr-defined]
        if share is not None and isinstance(way, shared_prompts.SharedPrompts):
            way.active = share
        if damage is not None:
            way.active, way._steps, plan = True, damage, type(way)._plan

            def damaged(input_ids: Any) -> Any:
                found = plan(way, input_ids)
                if found is not None:
                    found[0][-1] = 0
                return found

            way._plan = damaged
        if fail:
            way.active, way._steps, way._plan = True, 2, type(way)._plan.__get__(way)
            layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
            expanded = list(layers.values())[-1].forward

            def failing(*arguments: Any) -> Any:
                if way._rows is not None:
                    raise AssertionError("of the test")
                return expanded(*arguments)

            list(layers.values())[-1].forward = failing
        shares = isinstance(way, shared_prompts.SharedPrompts)
        return {"saved": way.saved if shares else None, "active": shares and way.active}
