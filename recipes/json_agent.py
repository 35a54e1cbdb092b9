"""An agent without knowledge of ttrl, trained unchanged: OpenAI's client in a loop, until the reply
is JSON.

    python recipes/json_agent.py [--model smollm2-135m] [--run runs/json_agent] [--seed 0]

`extract` could be anybody's: it needs only the address, the key and the name of a model. ttrl gives
each sample its own endpoint in front of the policy, and trains on the requests there, over all
turns, with the reward of the last reply. Of 32 held-out sentences, 5 were written exactly before,
and 30 after seven iterations. Interrupt it at any time; the same command continues.
"""

from openai import AsyncOpenAI

from ttrl import agent_task
from ttrl.cli.recipe_script import recipe_config, run_recipe, script_arguments
from ttrl.tasks.structured_output import get_structured_output_tasks, read_object

TRIES = 3


async def extract(messages: list[dict], base_url: str, api_key: str, model: str) -> str:
    """Return what the model says at last: a JSON object, or its third answer that is none."""
    messages = list(messages)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(TRIES):
            completion = await client.chat.completions.create(model=model, messages=messages)
            answer = completion.choices[0].message.content or ""
            if read_object(answer) is not None:
                break
            again = "That is no JSON object. Write the object, and nothing else."
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": again},
            ]
    return answer


async def agent(session):
    await extract(session.messages, session.base_url, session.api_key, session.model)


def tasks(split: str, n: int, seed: int = 0) -> list:
    """What sentences say, as JSON: graded by the last answer of the agent's conversation."""
    return [
        agent_task(agent, task.grader, messages=task.messages)
        for task in get_structured_output_tasks(split, n=n, seed=seed)
    ]


if __name__ == "__main__":
    arguments = script_arguments(
        __doc__, run="runs/json_agent", iterations=12, model="smollm2-135m"
    )
    config = recipe_config(
        arguments,
        tasks_per_iteration=8,
        samples_per_task=8,
        max_tokens=48,
        seq_len=1024,
        training={"lr": 2e-5, "updates_per_iteration": 2, "drift_rows": "first_update"},
        validation_metric="exact",
        stop_at=0.9,
    )
    held_out = tasks("validation", 32)
    print(
        run_recipe(
            arguments,
            config,
            tasks("train", 1024, arguments.task_seed),
            held_out,
            "sentences written exactly",
        )
    )
