"""A model as the judge: it learns to mark replies, and the policy learns from its marks alone.

    python recipes/json_judge.py [--model smollm2-135m] [--run runs/json_judge] [--seed 0]

Both begin as the same chat model. The judge is trained with supervision on marked replies to the
quickstart's task: right objects, and those with one of sixteen mistakes, on one line or several.
It is asked about replies to held-out sentences first, and then serves while the policy trains. The
exact grader only watches. In a run, the judge recognized code blocks, words around an object and
replies without an end, but no wrong value. Exact replies rose until the policy had the form, and
fell while the judge gave all replies full marks (docs/results.md). The examples must look like the
policy's own replies: with objects on one line only, and no reply without an end, exact replies fell
to 0 within two iterations. Interrupt it at any time; the same command continues.
"""

import argparse
import json
import os
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from ttrl import Task, evaluate
from ttrl.cli.recipe_script import recipe_config, run_recipe, script_arguments, supervised_start
from ttrl.judges.judge import Judge, read_score
from ttrl.server.serving import serving
from ttrl.tasks.answers import reply_text
from ttrl.tasks.rewards import weighted
from ttrl.tasks.structured_output import get_structured_output_tasks
from ttrl.tasks.task import question
from ttrl.tiny_model import make_tiny_model

KEY = "JSON_JUDGE_KEY"
RUBRIC = "One JSON object, with the keys asked for and the facts of the sentence as values."
FORM = {
    "temperature": 0.0,
    "max_tokens": 8,
    "structured_outputs": {"regex": "Score: ([0-9]|10)"},
}
CONTEXT = 1024
ENDLESS = 160
"""Letters of a reply that is cut off."""
STEPS = 120
"""Of the judge, on 8 examples each."""
NOWHERE = "http://127.0.0.1/v1"
"""The judge's address before it is served."""


def judge_of(task: Task, address: str = NOWHERE) -> Judge:
    """The judge of one task's replies."""
    asked = task.messages[-1]["content"]
    return Judge(
        model="policy", rubric=RUBRIC, task=asked, base_url=address, key_variable=KEY, params=FORM
    )


def replies(task: Task, other: Task, indent: int | None) -> dict[str, str]:
    """A right reply, and one of each kind of mistake, by kind. `other` has the same keys."""
    facts = json.loads(task.grader.reference())
    others = json.loads(other.grader.reference())
    first, second, third = facts
    sentence = task.messages[-1]["content"].partition("\n")[0]
    right = json.dumps(facts, indent=indent)
    nested = {first: {second: facts[second], third: facts[third]}}
    objects = {
        "another value": facts | {second: others[second]},
        "another number": facts | {third: others[third]},
        "two other values": facts | {first: others[first], third: others[third]},
        "a number as text": {key: str(value) for key, value in facts.items()},
        "a missing key": {key: facts[key] for key in (first, second)},
        "a wrong key": {"id": facts[first], second: facts[second], third: facts[third]},
        "an object within": nested,
    }
    return {
        "right": right,
        **{kind: json.dumps(found, indent=indent) for kind, found in objects.items()},
        "no commas": right.replace(",", ""),
        "no closing brace": right.rstrip("}\n"),
        "an object without an end": f"{right[:-1]},\n{right[1:-1]},\n{right[1:-1]}"[:ENDLESS],
        "a code block": f"```json\n{right}\n```",
        "a code block without an end": f"```json\n{json.dumps(nested, indent=indent)[:-1]},",
        "no object": sentence,
        "prose without an end": " ".join([sentence] * 6)[:ENDLESS],
        "words before it": f"{sentence}\n\n{right}",
        "words after it": f"{right}\n\n{sentence}",
    }


class Marked(NamedTuple):
    """A reply as the judge is asked about it."""

    prompt: str
    answer: str
    """The exact grader's mark."""
    kind: str
    name: str


def marked(tasks: Sequence[Task], seed: int) -> Iterator[Marked]:
    """One reply to each task, half of them right."""
    rng = random.Random(f"json_judge {seed}")
    alike: dict[tuple[str, ...], list[Task]] = {}
    for task in tasks:
        alike.setdefault(tuple(json.loads(task.grader.reference())), []).append(task)
    for task in tasks:
        keys = tuple(json.loads(task.grader.reference()))
        found = replies(task, rng.choice(alike[keys]), rng.choice([None, 0, 2]))
        mistakes = [kind for kind, reply in found.items() if reply != found["right"]]
        kind = rng.choice(["right", rng.choice(mistakes)])
        message = ChatCompletionMessage(role="assistant", content=found[kind])
        choice = Choice(finish_reason="stop", index=0, message=message)
        reward, _ = task.grader(choice)
        answer = f"Score: {round(10 * reward)}"
        yield Marked(judge_of(task).prompt(choice), answer, kind, str(task.id))


def mark_task(one: Marked) -> Task:
    """Mark a reply as the exact grader does. A metric for its kind tells full marks from others."""
    expected = read_score(one.answer)

    def grader(choice: Choice) -> tuple[float, dict[str, float]]:
        score = read_score(reply_text(choice))
        told = float((score == 10) == (expected == 10))
        return float(score == expected), {"told": told, one.kind: told}

    return Task(question(one.prompt), grader, id=one.name)


def make_judge(arguments: argparse.Namespace) -> str:
    """Train the judge, once; return its folder."""
    tasks = get_structured_output_tasks("train", n=8 * STEPS, seed=arguments.seed + 1)
    examples = [
        {"messages": [*question(one.prompt), {"role": "assistant", "content": one.answer}]}
        for one in marked(tasks, arguments.seed)
    ]
    steps = STEPS
    model = arguments.model
    if arguments.tiny:
        steps = 1
        model = make_tiny_model(arguments.run / "random_judge", layers=1, context=CONTEXT)
    folder = supervised_start(
        arguments.run / "judge",
        examples,
        steps=steps,
        batch_size=8,
        seed=arguments.seed,
        seq_len=CONTEXT,
        lr=2e-4,
        rows_per_microbatch=2,
        model=model,
    )
    return str(folder)


def ask_judge(address: str) -> str:
    """What the judge is worth, on replies to held-out sentences."""
    held_out = get_structured_output_tasks("validation", n=256)
    tasks = [mark_task(one) for one in marked(held_out, 0)]
    found = evaluate(address, {"marks": tasks}, key_variable=KEY, params=FORM)["marks"]
    told = dict(found.metrics)
    total = told.pop("told")
    kinds = ", ".join(f"{kind} {told[kind].mean:.0%}" for kind in sorted(told))
    return (
        f"the judge gives {found.accuracy.mean:.0%} of {len(tasks)} replies the exact mark, and "
        f"tells {total.mean:.0%} of right and wrong ones apart: {kinds}"
    )


def judged(tasks: Sequence[Task], address: str = NOWHERE) -> list[Task]:
    """Tasks with the judge's marks as rewards; the exact grader's verdict is a metric."""
    return [
        Task(
            task.messages,
            weighted(judge=(1.0, judge_of(task, address)), grader=(0.0, task.grader)),
            id=task.id,
        )
        for task in tasks
    ]


if __name__ == "__main__":
    arguments = script_arguments(
        __doc__, run="runs/json_judge", iterations=16, model="smollm2-135m"
    )
    config = recipe_config(
        arguments,
        tasks_per_iteration=8,
        samples_per_task=8,
        max_tokens=48,
        seq_len=1024,
        training={"lr": 2e-5, "updates_per_iteration": 2, "drift_rows": "first_update"},
        validation_metric="grader/exact",
    )
    tasks = get_structured_output_tasks("train", n=1024, seed=arguments.task_seed)
    held_out = get_structured_output_tasks("validation", n=64)
    what = "sentences written exactly"
    # Settings are checked first: the judge takes minutes.
    check = argparse.Namespace(**{**vars(arguments), "check": True})
    found = run_recipe(check, config, judged(tasks), judged(held_out), what)
    if not arguments.check:
        log = arguments.run / "judge" / "server.log"
        with serving(make_judge(arguments), max_model_len=CONTEXT, log_path=log) as served:
            address = served.endpoint.base_url
            os.environ[KEY] = served.endpoint.api_key
            print(ask_judge(address))
            marked_tasks = judged(tasks, address)
            found = run_recipe(arguments, config, marked_tasks, judged(held_out, address), what)
    print(found)
