"""Several turns: an environment of its own plays the user, who says higher or lower."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return "give up" in trace.last_reply


class GuessingTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        return [
            GuessTask(GuessData(prompt=None, secret=number), self.config.task)
            for number in range(8)
        ]


class GuessingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class GuessingEnv(vf.Env[GuessingConfig]):
    async def run(self, task, agents):
        self.guesses = []
        async with agents.player.interaction(task) as player:
            said = await player.turn("Guess a number from 0 to 7.")
            while not said.terminated:
                guess = int(said.last_reply) if said.last_reply.isdecimal() else -1
                self.guesses.append(guess)
                if guess == task.data.secret:
                    break
                said = await player.turn("Higher." if guess < task.data.secret else "Lower.")

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("found", float(task.data.secret in self.guesses))
        trace.record_metric("guesses", float(len(self.guesses)))


__all__ = ["GuessingEnv", "GuessingTaskset"]
