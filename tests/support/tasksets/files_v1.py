"""Stages: setup writes into the runtime, finalize reads from it."""

import verifiers.v1 as vf


class FileTask(vf.Task[vf.TaskData]):
    async def setup(self, trace, runtime):
        await runtime.write("given.txt", f"task {self.data.idx}".encode())

    async def finalize(self, trace, runtime):
        trace.info["found"] = (await runtime.read("given.txt")).decode()

    @vf.reward
    async def kept(self, trace: vf.Trace) -> float:
        return float(trace.info["found"] == f"task {self.data.idx}")


class FilesTaskset(vf.Taskset[FileTask, vf.TasksetConfig]):
    def load(self):
        messages = [
            vf.UserMessage(content="Say a word."),
            vf.AssistantMessage(content="what"),
            vf.UserMessage(content="Enough?"),
        ]
        return [
            FileTask(vf.TaskData(prompt=messages, name=f"file {number}"), self.config.task)
            for number in range(3)
        ]


__all__ = ["FilesTaskset"]
