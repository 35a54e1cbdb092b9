"""What fails: scoring raises, or the process ends, as the task says."""

import os

import verifiers.v1 as vf


class BrokenTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.name == "dies":
            os._exit(7)
        raise ValueError("the scales are broken")


class BrokenTaskset(vf.Taskset[BrokenTask, vf.TasksetConfig]):
    def load(self):
        return [
            BrokenTask(vf.TaskData(prompt=name, name=name), self.config.task)
            for name in ("raises", "dies")
        ]


__all__ = ["BrokenTaskset"]
