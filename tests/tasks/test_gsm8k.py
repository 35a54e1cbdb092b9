"""GSM8K: what counts as the answer, the formats, the splits."""

import json
import re
from fractions import Fraction

import pytest

from ttrl.errors import TaskError
from ttrl.tasks.datasets import RowError
from ttrl.tasks.gsm8k import (
    GSM8KGrader,
    follows_format,
    get_gsm8k_tasks,
    gsm8k_examples,
    parse_row,
    write_number,
)

ROWS = [
    {
        "question": f"What is {i} + {i}?",
        "answer": f"{i}+{i} = <<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i:,}",
    }
    for i in range(400, 700)
]


@pytest.fixture
def folder(tmp_path):
    for split, rows in (("train", ROWS[:250]), ("test", ROWS[250:])):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ("#### 1234", True),
        ("She earns 4 * 5.\n#### 1,234", True),
        ("####1234", True),
        ("####\n1234", True),
        ("#### $1,234", True),
        ("#### 1,234 dollars", True),
        ("#### 1234.00", True),
        ("#### **1234**", True),
        ("＃＃＃＃ １２３４", True),
        ("#### ١٢٣٤", True),
        ("#### Final Answer: 1234", True),
        ("#### 1000 + 234 = 1234", True),
        ("\\boxed{1234}", True),
        ("$\\boxed{\\$1{,}234}$", True),
        ("\\boxed{1234 \\text{ eggs}}", True),
        ("<answer>1234</answer>", True),
        ("<think>#### 5</think>\n<answer> 1 234 </answer>", True),
        ("<answer>1234", True),  # a stop string has cut the tag off
        ("<think>hm 17</think> #### 1234", True),
        ("```\n#### 1234\n```", True),
        ("Antwort auf Deutsch: zwölf.\n#### 1234", True),
        ("答案是\\boxed{1234}。", True),
        ("#### 1\n#### 2\n#### 1234", True),  # the last counts
        ("#### 1234\n\nI hope this helps! Ask me 5 more.", True),
        ("-" * 50_000 + "\n#### 1234", True),
        ("#### 1234\nWait, no:\n#### 1235", False),
        ("#### 1235", False),
        ("#### -1234", False),
        ("#### 12,34", False),
        ("#### 123.4", False),
        ("#### 1234/2", False),
        ("#### 1234^2", False),
        ("#### 1234 or 1235", False),
        ("#### 01234567", False),
        ("1234", False),  # not marked
        ("The answer is 1234.", False),
        ("<think>#### 1234</think> I do not know.", False),
        ("<think>#### 1234", False),  # ran out of tokens while thinking
        ("<think>so <answer>1234</answer></think><answer>7</answer>", False),
        ("<answer>1234</answer><answer></answer>", False),
        ("<answer>twelve hundred and thirty-four</answer>", False),
        ("#### one thousand", False),
        ("\\boxed{1234", False),
        ("\\boxed{} 1234", False),
        ("####", False),
        ("", False),
        (None, False),
        ("#### " + "1" * 100_000, False),
        ("#### 1234" + "0" * 100_000, False),
    ],
)
def test_grader(reply, content, right):
    reward, metrics = GSM8KGrader(Fraction(1234))(reply(content))
    assert (reward, metrics["exact"]) == (float(right), float(right)) and metrics[
        "lenient"
    ] >= metrics["exact"]


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("#### - 18", "-18"),
        ("\\boxed{-(18)}", "-18"),
        ("\\boxed{-\\frac{36}{2}}", "-18"),
        ("#### -$ 18", "-18"),
        ("#### 11 5/6", "71/6"),
        ("<answer>3 1/2 hours</answer>", "7/2"),
        ("\\boxed{2\\frac{2}{3}}", "8/3"),
        ("#### -1 1/2", "-3/2"),
        ("\\boxed{\\frac12}", "1/2"),
        ("\\boxed{\\frac1{72}}", "1/72"),
        ("\\boxed{\\frac{1}{-2}}", "-1/2"),
        ("\\boxed{\\cfrac{3}{4}}", "3/4"),
        ("#### ½", "1/2"),
    ],
)
def test_an_answer_is_its_value_and_not_its_last_digits(reply, content, value):
    right = Fraction(value)
    assert GSM8KGrader(right)(reply(content))[0] == 1.0
    digits = [Fraction(run) for run in re.findall("[0-9]+", content)]
    for wrong in {*digits, -right, *(-run for run in digits)} - {right}:
        assert GSM8KGrader(wrong)(reply(content))[0] == 0.0
        assert GSM8KGrader(wrong, flexible=True)(reply(content))[0] == 0.0


@pytest.mark.parametrize(
    "content",
    [
        "#### 4 10/3",
        "\\boxed{\\frac{\\sqrt{3}}{2}}",
        "\\boxed{10^{-3}}",
        "#### 1e400",
        "\\boxed{\\sqrt{2}}",
        "\\boxed{3\\pi}",
    ],
)
def test_an_answer_that_is_no_number_earns_nothing(reply, content):
    for run in map(Fraction, re.findall("[0-9]+", content)):
        for wrong in (run, -run):
            assert GSM8KGrader(wrong)(reply(content))[0] == 0.0


def test_answers_in_the_data_are_read_like_replies(reply):
    for text, value in (
        ("11 5/6", "71/6"),
        ("- 18", "-18"),
        ("$2\\frac{2}{3}$", "8/3"),
        ("-1 1/2", "-3/2"),
    ):
        problem = parse_row({"question": "How many?", "answer": f"So.\n#### {text}"})
        assert problem.answer == Fraction(value)
        assert GSM8KGrader(problem.answer)(reply(f"#### {text}"))[0] == 1.0
    with pytest.raises(RowError, match="must end with #### and a number"):
        parse_row({"question": "How many?", "answer": "So.\n#### 4 10/3"})


def test_flexible_takes_the_last_number_where_nothing_is_marked(reply):
    grader = GSM8KGrader(Fraction(18), flexible=True)
    # What a strict one says of it.
    for text, lenient in (("So it is 18.", 1.0), ("18, then 3", 0.0), ("#### 18", 1.0)):
        assert (
            GSM8KGrader(Fraction(18))(reply(text))[1]["lenient"]
            == lenient
            == grader(reply(text))[0]
        )
        assert "lenient" not in grader(reply(text))[1]
    assert [
        grader(reply(text))[0]
        for text in ("So it is 18.", "3 and 18 eggs", "18, then 3", "18 #### 3", "#### 18")
    ] == [
        1,
        1,
        0,
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("style", "content", "formed"),
    [
        ("plain", "so\n#### 5", True),
        ("plain", "so #### 5", False),
        ("plain", "#### 4\n#### 5", False),
        ("plain", "#### five", False),
        ("plain", "", False),
        ("boxed", "so \\boxed{5}", True),
        ("boxed", "\\boxed{5} \\boxed{5}", False),
        ("boxed", "5", False),
        ("r1", "<think>so</think>\n<answer>5</answer>\n", True),
        ("r1", "so</think><answer>5</answer>", False),
        ("r1", "<think>so</think><answer>five</answer>", False),
        ("r1", "<think>so</think><answer>5</answer> Bye", False),
        ("r1", "<answer>5</answer><think>so</think>", False),
        ("r1", "<think>so</think><answer>5</answer><answer>5</answer>", False),
        ("r1", "<think><think>so</think><answer>5</answer>", False),
    ],
)
def test_formats(reply, style, content, formed):
    assert follows_format(content, style) == formed
    reward, metrics = GSM8KGrader(Fraction(7), style, format_reward=0.2)(reply(content))
    assert (reward, metrics) == (
        0.2 * formed,
        {"exact": 0.0, "format": float(formed), "lenient": 0.0},
    )


@pytest.mark.parametrize(
    ("opening", "content", "formed"),
    [
        ("<think>\n", "so</think>\n<answer>5</answer>", True),
        ("<think>\nWell, ", "so</think><answer>5</answer>", True),
        ("<think>so</think>", "<answer>5</answer>", True),
        ("<think>so</think>\n<answer>", "5</answer>", True),
        # The model's own tags.
        ("<think>so</think>\n", "<think>so</think><answer>5</answer>", True),
        ("", "so</think><answer>5</answer>", False),
        ("so</think>", "<answer>5</answer>", False),
        ("<think>\n", "<think>so</think><answer>5</answer>", False),  # opened twice
        ("<think>\n", "so</think></think><answer>5</answer>", False),
        ("<think>\n", "so <answer>5</answer>", False),
        ("<think>\n", "so</think><answer>five</answer>", False),
        ("Well: ", "<think>so</think><answer>5</answer>", False),
    ],
)
def test_the_format_of_a_turn_that_the_prompt_opened(reply, opening, content, formed):
    choice = reply(content)
    choice.opening = opening
    assert follows_format(opening + content, "r1", opening) == formed
    assert GSM8KGrader(Fraction(7), "r1", format_reward=0.2)(choice)[1]["format"] == float(formed)


@pytest.mark.parametrize("style", ["plain", "boxed", "r1"])
def test_references_earn_all_and_keep_the_format(reply, style):
    for value in (Fraction(18), Fraction(-5, 2), Fraction(1, 3), Fraction(3, 100)):
        grader = GSM8KGrader(value, style, format_reward=0.3)
        assert grader(reply(grader.reference())) == (
            1.0,
            {"exact": 1.0, "format": 1.0, "lenient": 1.0},
        )
    assert [write_number(Fraction(x)) for x in ("18", "-2.5", "0.03", "-1/3")] == [
        "18",
        "-2.5",
        "0.03",
        "-1/3",
    ]


def test_long_replies(grade_long_replies):
    grade_long_replies(
        GSM8KGrader(Fraction(18), "r1", flexible=True),
        "1" * 61 + " ",
        "1,111",
        "\\frac{1}{2}",
        "1e5",
    )


def test_splits(folder):
    train, validation, test = (
        get_gsm8k_tasks(split, path=folder) for split in ("train", "validation", "test")
    )
    ids = [{task.id for task in tasks} for tasks in (train, validation, test)]
    assert [len(ids[0] | ids[1]), len(ids[2])] == [250, 50]
    assert not ids[0] & ids[1] and 5 < len(validation) < 60
    assert [t.id for t in get_gsm8k_tasks("train", 9, path=folder)] == [t.id for t in train[:9]]
    assert [t.id for t in get_gsm8k_tasks("train", seed=1, path=folder)] != [t.id for t in train]
    assert [t.id for t in get_gsm8k_tasks("validation", seed=1, path=folder)] == [
        t.id for t in validation
    ]


def test_prompts(folder, reply):
    task = get_gsm8k_tasks("test", 1, path=folder, style="r1", few_shot=2)[0]
    assert [message["role"] for message in task.messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert "<answer>" in task.messages[1]["content"] and "<<" not in task.messages[1]["content"]
    validation = {
        t.messages[0]["content"] for t in get_gsm8k_tasks("validation", path=folder, style="r1")
    }
    for task in get_gsm8k_tasks("train", path=folder, style="r1", few_shot=2):
        questions = [message["content"] for message in task.messages[::2]]
        assert len(set(questions)) == 3 and not validation & set(questions)
    examples = gsm8k_examples(20, path=folder, style="plain")
    assert all(
        message["messages"][1]["content"].rpartition("\n")[2].startswith("####")
        for message in examples
    )
    assert not validation & {
        example["messages"][0]["content"] for example in gsm8k_examples(path=folder, style="r1")
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": "dev"}, "split is 'dev'; gsm8k has 'train', 'validation', 'test'"),
        ({"n": 0}, "n is 0"),
        ({"n": 1000}, "1000 tasks of gsm8k, split train, but there are only"),
        ({"style": "R1"}, "style is 'R1'"),
        ({"few_shot": -1}, "few_shot is -1"),
        ({"format_reward": 1.5}, "format_reward is 1.5"),
    ],
)
def test_refusals(folder, changes, words):
    with pytest.raises(TaskError, match=words):
        get_gsm8k_tasks(path=folder, **changes)


def test_a_bad_row_is_named(folder):
    with open(folder / "test.jsonl", "a", encoding="utf-8") as file:
        file.write('\n{"question": "Why?", "answer": "Because."}\n')
    with pytest.raises(
        TaskError,
        match=r"test\.jsonl, line 51: answer ends with 'Because\.'; it must end with ####",
    ):
        get_gsm8k_tasks("test", path=folder)


def test_published_rows(shared, reply):
    for split in ("train", "test"):
        rows = [
            json.loads(line)
            for line in (shared / "gsm8k" / f"{split}.jsonl")
            .read_text(encoding="utf-8")
            .split("\n")
            if line
        ]
        problems = [parse_row(row) for row in rows]
        assert all(
            GSM8KGrader(problem.answer)(reply(row["answer"]))[0] == 1.0
            for problem, row in zip(problems, rows, strict=True)
        )
        assert not any("<<" in problem.solution for problem in problems)
