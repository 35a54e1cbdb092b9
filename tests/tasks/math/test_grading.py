"""What a reply's answer is, which form it has, and that it is graded in a process of its own."""

import asyncio
import os
import pickle

import pytest

from ttrl.rollouts.client.choices import openai_choice
from ttrl.rollouts.client.wire import Answer, encoded
from ttrl.rollouts.graders.grading import Graders
from ttrl.tasks.math import MathGrader
from ttrl.tasks.math.grading import read_reply
from ttrl.tasks.rewards import declared, gated, weighted
from ttrl.tasks.task import Task

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("so \\boxed{\\frac{\\sqrt{3}}{2}}.", "\\frac{\\sqrt{3}}{2}"),
        ("\\boxed {5}", "5"),
        ("\\boxed{1}, no: \\boxed{2}", "2"),
        ("\\boxed{1} and \\boxed{2}", "1, 2"),
        ("$\\boxed{1}$ and $\\boxed{2}$", "1, 2"),
        ("\\[ \\boxed{1}, \\boxed{2} \\text{ or } \\boxed{3} \\]", "1, 2, 3"),
        ("\\boxed{1}\n\nBut the second case gives \\boxed{2}", "2"),
        ("\\boxed{\\boxed{5}}", "\\boxed{5}"),
        ("\\boxed{5", None),
        ("<answer> $x=5$ </answer>", " $x=5$ "),
        ("<answer>\\boxed{5}</answer>", "5"),
        ("\\boxed{4}\n<answer>5</answer>", "5"),
        ("Answer: $\\sqrt{2}$", "$\\sqrt{2}$"),
        ("**Answer:** 5\n", "5"),
        ("Answer:\n\n5", "5"),
        ("Answer:\n\n5\n\nThat is all.", "5"),
        ("Answer: the answer is 5", "5"),
        ("Answer: 4\nAnswer: 5", "5"),
        ("Answer: The largest $n$ is 34. I am sure.", "34/1"),
        ("Answer: The set is $\\{1, 2\\}$.", "The set is $\\{1, 2\\}$"),
        ("#### 5", "5"),
        ("<think>\\boxed{4}</think>\\boxed{5}", "5"),
        ("<think>\\boxed{4}", None),
        ("The answer is 5.", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_answer_of_a_reply(content, answer):
    assert read_reply(content) == answer


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("So the answer is $\\sqrt{2}$. Nice!", "$\\sqrt{2}$"),
        ("The final answer is: 5", "5"),
        ("Hence $x = 3$, so there are 34 of them", "34/1"),
        ("So $a=3$ and \\(b = 4\\).", "b = 4"),
        ("either 3 or 4", None),
        ("none", None),
        ("\\boxed{5}, the answer is 6", "5"),
    ],
)
def test_flexible_finds_an_answer_that_nothing_marks(content, answer):
    assert read_reply(content, flexible=True) == answer


@pytest.mark.parametrize(
    ("style", "opening", "content", "formed"),
    [
        ("boxed", "", "so \\boxed{\\sqrt{2}}", True),
        ("boxed", "", "\\boxed{1} \\boxed{2}", False),
        ("boxed", "", "\\boxed{}", False),
        ("boxed", "", "5", False),
        ("answer", "", "so\nAnswer: $\\pi$", True),
        ("answer", "", "so\n**Answer: 5**", True),
        ("answer", "", "Answer: 5\nso", False),
        ("answer", "", "Answer: 4\nAnswer: 5", False),
        ("answer", "", "Answer:", False),
        ("r1", "", "<think>so</think><answer>$\\pi$</answer>", True),
        ("r1", "<think>\n", "so</think><answer>$\\pi$</answer>", True),
        ("r1", "", "so</think><answer>$\\pi$</answer>", False),
        ("r1", "", "<think>so</think><answer> </answer>", False),
    ],
)
def test_formats(reply, style, opening, content, formed):
    choice = reply(content)
    choice.opening = opening
    reward, metrics = MathGrader("7", style, format_reward=0.25)(choice)
    assert (reward, metrics["format"], metrics["exact"]) == (0.25 * formed, float(formed), 0.0)


@pytest.mark.parametrize("style", ["boxed", "answer", "r1"])
@pytest.mark.parametrize(
    "answer",
    ["\\frac{\\sqrt{3}}{2}", "3\\pi", "(-\\infty, 2]", "\\text{Evelyn}", "12", "x=5", "\\{1,2\\}"],
)
def test_references_earn_all(reply, style, answer):
    grader = MathGrader(answer, style, format_reward=0.3)
    expected = {"exact": 1.0, "format": 1.0, "timeout": 0.0, "lenient": 1.0}
    assert grader(reply(grader.reference())) == (1.0, expected)


def test_metrics(reply):
    grader = MathGrader("\\sqrt{8}")
    assert grader(reply("It is $2\\sqrt2$.")) == (
        0.0,
        {"exact": 0.0, "format": 0.0, "timeout": 0.0, "lenient": 1.0},
    )
    assert MathGrader("\\sqrt{8}", flexible=True)(reply("It is $2\\sqrt2$."))[0] == 1.0
    slow = MathGrader("x+1", seconds=0.2)(reply("\\boxed{9^{9999 \\cdot 9999}}"))
    assert slow == (0.0, {"exact": 0.0, "format": 1.0, "timeout": 1.0, "lenient": 0.0})


def test_long_replies(grade_long_replies):
    grade_long_replies(
        MathGrader("\\sqrt{2}", "r1", flexible=True, seconds=1.0),
        "\\boxed{1} and ",
        "Answer: ",
        "$x$ ",
        "answer is",
    )


def choice_of(text):
    return openai_choice(
        Answer(encoded({"index": 0, "message": {"role": "assistant", "content": text}}))
    )


def graded(pairs, **settings):
    """The grades of texts, each by its own grader, in the same run."""

    async def main():
        with Graders(**settings) as graders:
            tasks = [
                (Task([{"role": "user", "content": "x"}], grader), choice_of(text))
                for grader, text in pairs
            ]
            return [await graders.grade(*pair, "here") for pair in tasks]

    return asyncio.run(main())


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.long)])
def test_it_is_graded_in_a_process_of_its_own_in_any_run(isolated):
    """Long for a run in which all graders are: only there nobody asks whether this one wants
    to be.
    """
    grader = MathGrader("\\frac{\\sqrt{3}}{2}", seconds=2.0)
    texts = (
        "\\boxed{\\frac{3}{2\\sqrt3}}",
        "\\boxed{\\frac{\\sqrt{2}}{2}}",
        "\\boxed{9^{9999 \\cdot 9999}}",
    )
    right, wrong, slow = graded([(grader, text) for text in texts], isolated=isolated, timeout=60.0)
    assert [grade.reward for grade in (right, wrong, slow)] == [1.0, 0.0, 0.0]
    assert slow.metrics["timeout"] == 1.0


class Where:
    """Says in which process it runs."""

    isolated = True

    def __call__(self, choice):
        return float(os.getpid())


def test_a_grader_asks_for_a_process_through_what_wraps_it():
    inner = Where()

    def closed_over(choice):
        return inner(choice)

    asking = (
        inner,
        weighted(a=(1.0, inner)),
        gated(lambda choice: float(os.getpid()), inner, least=0.0),
        closed_over,
    )
    assert all(declared("isolated", grader) for grader in asking)
    assert not declared("isolated", lambda choice: 1.0)
    *elsewhere, here = graded(
        [(grader, "x") for grader in (*asking, lambda choice: float(os.getpid()))]
    )
    assert os.getpid() not in [grade.reward for grade in elsewhere] and here.reward == os.getpid()


def test_it_travels():
    grader = MathGrader("\\pi", "r1", 0.1, True, 3.0)
    assert pickle.loads(pickle.dumps(grader)) == grader
