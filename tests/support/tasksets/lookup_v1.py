"""Tools: a server of the taskset's own, which verifiers starts for each rollout."""

import verifiers.v1 as vf


class PhoneBook(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "book"

    @vf.tool
    def number_of(self, person: str) -> str:
        """Return a person's telephone number."""
        return {"Ada": "1815", "Alan": "1912"}.get(person, "unknown")


class LookupTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LookupData(vf.TaskData):
    answer: str


class LookupTask(vf.Task[LookupData, vf.State, LookupTaskConfig]):
    @classmethod
    def toolsets(cls, config: LookupTaskConfig) -> list[vf.Toolset]:
        return [PhoneBook(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class LookupConfig(vf.TasksetConfig):
    task: LookupTaskConfig = LookupTaskConfig()


class LookupTaskset(vf.Taskset[LookupTask, LookupConfig]):
    def load(self):
        pairs = (("Ada", "1815"), ("Alan", "1912"))
        return [
            LookupTask(
                LookupData(prompt=f"Which number has {name}?", answer=number), self.config.task
            )
            for name, number in pairs
        ]


__all__ = ["LookupTaskset"]

if __name__ == "__main__":
    PhoneBook.run()
