"""Tools with state: what they do is kept in the rollout's state, which the reward reads."""

import verifiers.v1 as vf
from pydantic import Field


class Basket(vf.State):
    things: list[str] = Field(default_factory=list)


class Shelf(vf.Toolset[vf.ToolsetConfig, Basket]):
    TOOL_PREFIX = "shelf"

    @vf.tool
    def take(self, thing: str) -> str:
        """Take something from the shelf."""
        if thing == "moon":
            raise ValueError("there is none")
        self.state.things.append(thing)
        return f"{len(self.state.things)} taken"


class BasketTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class BasketTask(vf.Task[vf.TaskData, Basket, BasketTaskConfig]):
    @classmethod
    def toolsets(cls, config: BasketTaskConfig) -> list[vf.Toolset]:
        return [Shelf(config.tools)]

    @vf.reward
    async def taken(self, trace: vf.Trace) -> float:
        return float(trace.state.things == ["milk", "eggs"])


class BasketConfig(vf.TasksetConfig):
    task: BasketTaskConfig = BasketTaskConfig()


class BasketTaskset(vf.Taskset[BasketTask, BasketConfig]):
    def load(self):
        return [BasketTask(vf.TaskData(prompt="Take milk, then eggs."), self.config.task)]


__all__ = ["BasketTaskset"]

if __name__ == "__main__":
    Shelf.run()
