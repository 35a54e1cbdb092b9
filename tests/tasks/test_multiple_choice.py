"""Multiple choice: which letter a reply chooses, and which it only mentions."""

import json

import pytest

from ttrl.errors import TaskError
from ttrl.tasks.multiple_choice import (
    MultipleChoiceGrader,
    get_arc_tasks,
    get_mmlu_tasks,
    parse_row,
    read_choice,
)

CHOICES = ("A magnet", "Paris", "I am 12", "None of the above")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("B", 1),
        ("b", 1),
        ("A. a magnet\nB. Paris\nC. I am 12\n\nB", 1),  # the options again, then the answer
        ("The options are:\n(A) a magnet\n(B) Paris\n\nB. Paris", 1),
        (" B \n", 1),
        ("B.", 1),
        ("(B)", 1),
        ("(b)", 1),
        ("[B]", 1),
        ("**B**", 1),
        ("**(B)**", 1),
        ("`B`", 1),
        ("B) Paris", 1),
        ("B. Paris", 1),
        ("B: Paris", 1),
        ("b) Paris", 1),
        ("B - Paris", 1),
        ("B Paris", 1),
        ("Ｂ", 1),
        ("（Ｂ）", 1),
        ("Paris", 1),
        ("paris.", 1),
        ("A magnet", 0),
        ("A", 0),
        ("A.", 0),
        ("A. A magnet", 0),
        ("A A magnet", 0),
        ("I am 12", 2),
        ("Option B", 1),
        ("option (B)", 1),
        ("Answer: B", 1),
        ("answer:b", 1),
        ("ANSWER: B.", 1),
        ("The answer is B.", 1),
        ("The correct answer is (B) Paris.", 1),
        ("The answer is **B**", 1),
        ("The answer is: B", 1),
        ("Answer:\nB", 1),
        ("Answer = B", 1),
        ("\\boxed{B}", 1),
        ("$\\boxed{\\text{B}}$", 1),
        ("<answer>B</answer>", 1),
        ("<answer>\nB. Paris\n</answer>", 1),
        ("<answer>B", 1),
        ("<answer>(B)</answer> since A is wrong", 1),
        ("<think>A</think>B", 1),
        ("<think>Answer: A</think>\nAnswer: B", 1),
        ("A is wrong, C too.\nAnswer: B", 1),
        ("Answer: A\nNo, wait.\nAnswer: B", 1),
        ("Die Antwort ist klar.\n\nAnswer: B", 1),
        ("答案：\nB", 1),
        ("```\nB\n```\nAnswer: B", 1),
        ("The answer is Paris.", 1),
        ("Answer: A magnet", 0),
        ("B\n\nBecause A is a word.", 1),
        ("Let us see.\nB", 1),
        ("Answer: B" + " " * 100_000, 1),
        ("x" * 100_000 + "\nAnswer: B", 1),
        ("Answer: B, since 2 > 1", 1),
        ("Answer: B and not because of luck", 1),
        ("The answer is B because A is absurd", 1),
        ("Answer: B (B)", 1),
        ("D", 3),
        ("Answer: B, I think", 1),
        ("B, since A and C are wrong", 1),
        ("Answer: B, not A or C.", 1),
        ("Answer: B. Paris, and C: that is for others", 1),
        ("Answer: B - A", None),
        ("Answer: B: Paris - a city", 1),
        ("B\n\nC is too far away.", 1),
        ("B\nso it is\nB", 1),
    ],
)
def test_choices(content, place):
    assert read_choice(content, CHOICES) == place


@pytest.mark.parametrize(
    "content",
    [
        "",
        "E",
        "Z",
        "AB",
        "A or B",
        "A, or B",
        "Answer: B, or maybe C",
        "B or possibly C",
        "B C",
        "B A D C",
        "A. a magnet\nB. Paris",  # the options again, and no answer
        "Answer: B C.",
        "B; C",
        "either B or C",
        "B oder C",
        "A, B",
        "A/B",
        "A and B",
        "A & B",
        "(A) or (B)",
        "Answer: A or B",
        "Answer: B, C",
        "\\boxed{A, B}",
        "<answer>A, B, C, D</answer>",
        "<answer></answer>",
        "<answer>B</answer><answer>none</answer>",
        "Answer: none",
        "Answer: E",
        "2",
        "１",
        "I think it is hard.",
        "A hard question",
        "a magnet is strong",
        "Because B is a letter",
        "Bananas",
        "The answer is not known to B",
        "<think>B",
        "<think>B</think>",
        "<think>Answer: B",
        "Answer: B or A",
        "Б",
        "В",
        "I'm sure",
        "C'est Paris",
        "\\boxed{B",
        "B_2",
        "B-C",
        "B–C",
        "B~C",
        "B \\ C",
        "Answer: B = C",
        "Answer: B:C",
        "Answer: B。C",
        "Answer: B (or C)",
        "Answer: B OR C",
        "Answer: B AND C",
        "<answer>(B)(C)</answer>",
        "<answer>B)C)</answer>",
        "<answer>B. Paris or C. I am 12</answer>",
        "B\nC",
        "B\nor rather\n**C**",
    ],
)
def test_no_choice(content):
    assert read_choice(content, CHOICES) is None


def test_grader(reply):
    grader = MultipleChoiceGrader(1, CHOICES)
    assert grader(reply("B")) == (1.0, {"answered": 1.0})
    assert grader(reply("C")) == (0.0, {"answered": 1.0})
    assert grader(reply(None)) == (0.0, {"answered": 0.0})


def test_options_that_are_letters_or_alike():
    assert read_choice("B", ("B", "A")) == 1  # the letter, not the text
    assert read_choice("same", ("same", "same")) is None


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("Answer:\n\nAnswer: B", 1),
        ("**Answer:**\n\n**Answer:** B", 1),
        ("The answer is:\r\n\r\nAnswer: (B)", 1),
        ("Answer: B\n\nAnswer:", 1),  # cut off, or announced once more
        ("Answer: B\n\n**Answer:**\n\nAnswer:\n", 1),
        ("Answer: B\n\nThe answer is: ", 1),
        ("Answer: B\n\n<answer></answer>", None),
        ("Answer:", None),
        ("Answer:\n\nAnswer:", None),
        ("Answer: B\n\nAnswer: none", None),
    ],
)
def test_marks_behind_which_nothing_follows(content, place):
    assert read_choice(content, CHOICES) == place


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("Answer: Hund's rule", 0),
        ("Hund’s rule", 0),
        ("Answer: co-op", 1),
        ("Answer: CO\u2010OP", 1),
        ("Answer: Re\u0301sume\u0301", 2),
        ("Answer: Resume", None),
        ("Answer: \u200bC", 2),
        ("\ufeffC", 2),
        ("Answer\u200b: C", 2),
    ],
)
def test_typography_does_not_matter(content, place):
    assert read_choice(content, ("Hund’s rule", "co‑op", "Résumé")) == place


def test_long_replies(grade_long_replies):
    grade_long_replies(MultipleChoiceGrader(1, CHOICES), "B, ", "B or C ", "Answer: ", "(", "B) ")


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"choices": ["x", "y"], "answer": 1}, 1),
        ({"choices": ["x", "y"], "answer": "B"}, 1),
        ({"choices": ["x", "y"], "answer": "1"}, 1),
        ({"choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}, 1),
        ({"choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "1"}, 0),
        ({"choices": '["x", "y"]', "answer": "0"}, 0),
    ],
)
def test_rows(row, answer):
    question = parse_row({"question": "Q?", **row})
    assert (question.choices, question.answer) == (("x", "y"), answer)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"choices": ["x", "y"], "answer": 2},
            "answer is 2; it must be the place of one of 2 choices",
        ),
        ({"choices": ["x", "y"], "answer": -1}, "answer is -1"),
        ({"choices": ["x", "y"], "answer": "C"}, "answer is 'C'; .*A, B"),
        ({"choices": ["x", "y"]}, "answer is None"),
        ({"choices": ["x"], "answer": 0}, "list of 2 to 10 texts"),
        ({"choices": ["x", 3], "answer": 0}, "list of 2 to 10 texts"),
        ({"answer": 0}, "no field 'choices'"),
        (
            {"choices": {"text": ["x", "y"], "label": ["A"]}, "answerKey": "A"},
            "2 choices with 1 labels",
        ),
        ({"question": "", "choices": ["x", "y"], "answer": 0}, "question is ''"),
    ],
)
def test_bad_rows(tmp_path, row, words):
    (tmp_path / "x.json").write_text(json.dumps([{"question": "Q?", **row}]))
    with pytest.raises(TaskError, match=r"x\.json, row 1: .*" + words):
        get_mmlu_tasks(path=tmp_path / "x.json")


@pytest.fixture
def file(tmp_path):
    rows = [
        {
            "question": f"{i}?",
            "choices": ["a", "b", "c"],
            "answer": i % 3,
            "subject": f"s{i % 2}",
            "id": i,
        }
        for i in range(200)
    ]
    path = tmp_path / "test.json"
    path.write_text(json.dumps(rows))
    return path


def test_splits(file, reply):
    train, validation, test = (
        get_mmlu_tasks(split, path=file, style="reasoning")
        for split in ("train", "validation", "test")
    )
    assert len(test) == 200 == len(train) + len(validation) and 4 < len(validation) < 60
    assert not {t.id for t in train} & {t.id for t in validation}
    assert [t.id for t in get_arc_tasks("test", path=file.parent)] != [t.id for t in test]
    assert {t.id.partition("/")[2] for t in get_arc_tasks("test", path=file.parent)} == {
        t.id.partition("/")[2] for t in test
    }
    for task in test:
        assert task.grader(reply(task.grader.reference()))[0] == 1.0
        assert (
            f"{'ABC'[task.grader.answer]}. {'abc'[task.grader.answer]}\n"
            in task.messages[0]["content"]
        )
    assert len(get_mmlu_tasks(path=file, subjects=["s1"])) == 100
    with pytest.raises(TaskError, match="no questions of s2; there are s0, s1"):
        get_mmlu_tasks(path=file, subjects=["s2"])
    with pytest.raises(TaskError, match="style is 'R1'"):
        get_arc_tasks(path=file, style="R1")
    with pytest.raises(TaskError, match="arc has 'train', 'validation', 'test'"):
        get_arc_tasks("dev", path=file)


def test_published_questions(shared, reply):
    paths = [
        shared / "mmlu" / "mmlu_redux_sample.jsonl",
        *sorted((shared / "arc_easy_challenge").glob("*.jsonl")),
    ]
    assert len(paths) == 5
    for path in paths:
        for task in get_mmlu_tasks(path=path):
            letter = "ABCDE"[task.grader.answer]
            option = task.grader.choices[task.grader.answer]
            for answer in (
                letter,
                f"({letter})",
                f"The answer is {letter}.",
                f"{letter}. {option}",
                f"<answer>{letter}</answer>",
            ):
                assert task.grader(reply(answer))[0] == 1.0
