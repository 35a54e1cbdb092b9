"""Tasks of inspect_ai for tests: a question, tools in an agent's loop, choices, and what fails."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, choice, includes, scorer
from inspect_ai.solver import generate, multiple_choice, system_message, use_tools
from inspect_ai.tool import tool


@task
def sums(largest: int = 3):
    samples = [
        Sample(input=f"What is {k} + {k}?", target=str(2 * k), id=f"sum-{k}")
        for k in range(1, largest + 1)
    ]
    return Task(
        dataset=samples,
        solver=[system_message("Answer with a number."), generate()],
        scorer=includes(),
    )


@tool
def number_of():
    async def execute(person: str):
        """Tell a person's telephone number.

        Args:
            person: Whose number.
        """
        return {"Ada": "1815"}.get(person, "unknown")

    return execute


@scorer(metrics={"right": [accuracy()], "short": [accuracy()]})
def two_scores():
    async def score(state, target):
        text = state.output.completion
        return Score(value={"right": float(target.text in text), "short": float(len(text) < 10)})

    return score


@task
def lookup():
    sample = Sample(input="Which number has Ada?", target="1815")
    return Task(dataset=[sample], solver=[use_tools(number_of()), generate()], scorer=two_scores())


@task
def choices():
    sample = Sample(input="Which is a bird?", choices=["cat", "wren"], target="B")
    return Task(dataset=[sample], solver=multiple_choice(), scorer=choice())


@scorer(metrics=[accuracy()])
def broken_scorer():
    async def score(state, target):
        raise ValueError("the scales are broken")

    return score


@task
def broken():
    return Task(
        dataset=[Sample(input="Say a word.", target="x")], solver=generate(), scorer=broken_scorer()
    )
