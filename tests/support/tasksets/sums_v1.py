"""Single turn: an endless taskset of sums, with an option, a system prompt, a weighted reward and a
metric.
"""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in trace.last_reply)

    @vf.reward(weight=0.5)
    async def parts(self, trace: vf.Trace) -> dict[str, float]:
        return {
            "short": float(len(trace.last_reply) < 5),
            "polite": float("please" in trace.last_reply),
        }

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    largest: int = 9


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            a, b = number % self.config.largest, number // self.config.largest
            prompt = f"What is {a} + {b}?"
            yield SumTask(
                SumData(prompt=prompt, system_prompt="Answer with a number.", answer=a + b),
                self.config.task,
            )
            number += 1


__all__ = ["SumsTaskset"]
