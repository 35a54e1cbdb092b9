"""The layouts in which data sets of mathematics are shared, and what is taken from them."""

import json

import pytest

from ttrl.errors import TaskError
from ttrl.evaluation.families import TaskSpec
from ttrl.tasks.math import get_aime_tasks, get_dapo_tasks, get_math_tasks
from ttrl.tasks.math.tasks import parse_row

pytest.importorskip("math_verify")

CHAT = [{"role": "user", "content": "Solve it. The last line is Answer: $Answer.\n\nHow many?"}]
ROWS = {
    "MATH": (
        {
            "problem": "P?",
            "level": "Level 5",
            "type": "Algebra",
            "solution": "So $\\boxed{\\frac{1}{2}}$, not $\\boxed{3}$ or 4.",
        },
        "3",
    ),
    "MATH, a box without braces": (
        {"problem": "P?", "level": "Level ?", "type": "A", "solution": "It is $\\boxed 2$."},
        "2",
    ),
    "MATH-500": (
        {
            "problem": "P?",
            "solution": "…",
            "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
            "subject": "Precalculus",
            "level": 2,
        }
        | {"unique_id": "test/precalculus/807.json"},
        "\\left( 3, \\frac{\\pi}{2} \\right)",
    ),
    "aime_2024": (
        {"id": 60, "problem": "P?", "solution": "…", "answer": "073", "url": "…", "year": "2024"},
        "073",
    ),
    "AIME_2024": ({"ID": "2024-I-4", "Problem": "P?", "Solution": "…", "Answer": 116}, "116"),
    "aime_2025": (
        {"problem_idx": 1, "problem": "P?", "answer": 70, "problem_type": ["Number Theory"]},
        "70",
    ),
    "AIME2025": ({"question": "P?", "answer": "70"}, "70"),
    "AIME_1983_2024": (
        {"ID": "1983-1", "Year": 1983, "Question": "P?", "Answer": "60", "Part": None},
        "60",
    ),
    "DAPO-Math-17k": (
        {
            "data_source": "math_dapo",
            "prompt": CHAT,
            "ability": "MATH",
            "extra_info": {"index": "a-1"},
        }
        | {"reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}},
        "34",
    ),
    "DAPO-Math-17k-Processed": (
        {
            "prompt": "P?",
            "solution": "34",
            "data_source": "math_dapo",
            "source_prompt": CHAT,
            "ability": "MATH",
        }
        | {"reward_model": {"ground_truth": "34", "style": "rule"}, "extra_info": {"index": "a-1"}},
        "34",
    ),
    "a csv file": (
        {"prompt": "P?", "reward_model": '{"ground_truth": "34", "style": "rule"}'},
        "34",
    ),
    "a plain solution": ({"problem": "P?", "solution": "\\sqrt{2}"}, "\\sqrt{2}"),
    "GSM8K": ({"question": "P?", "answer": "9 + 9 = 18\n#### 18"}, "18"),
}


@pytest.mark.parametrize(("row", "answer"), ROWS.values(), ids=ROWS)
def test_layouts(row, answer):
    problem = parse_row(row)
    assert problem.answer == answer
    assert problem.question == (CHAT[0]["content"] if isinstance(row.get("prompt"), list) else "P?")


def test_levels_subjects_and_names():
    problem = parse_row(ROWS["MATH"][0])
    assert (problem.level, problem.subject, problem.id) == (5, "Algebra", "")
    problem = parse_row(ROWS["MATH-500"][0])
    assert (problem.level, problem.subject, problem.id) == (
        2,
        "Precalculus",
        "test/precalculus/807.json",
    )
    assert parse_row(ROWS["MATH, a box without braces"][0]).level == 0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"problem": "P?"}, "no field 'answer'.*it has"),
        ({"answer": "5"}, "no field 'problem' or"),
        ({"problem": " ", "answer": "5"}, "the problem is ' '"),
        ({"problem": "P?", "answer": ""}, "the answer is ''"),
        ({"problem": "P?", "answer": "x" * 1001}, "or a text of 1 to 1000 characters"),
        (
            {
                "problem": "P?",
                "solution": "We see that it is clearly proven, which ends the proof.",
            },
            "the answer is ''",
        ),
        ({"prompt": [], "answer": "5"}, "prompt is an empty list"),
        ({"prompt": ["P?"], "answer": "5"}, "prompt has 'P\\?'; it must be a text, or a list"),
        ({"prompt": [{"role": "user"}], "answer": "5"}, "a list of messages with role and content"),
        ({"prompt": "P?", "reward_model": "rule", "solution": None}, "no field"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, words):
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    with pytest.raises(TaskError, match=r"test\.jsonl, line 1: .*" + words):
        get_math_tasks("test", path=tmp_path)


def math_rows(count):
    return [
        {
            "problem": f"What is {k}?",
            "level": f"Level {k % 5 + 1}",
            "type": "Algebra",
            "solution": f"$\\boxed{{{k}}}$",
        }
        for k in range(count)
    ]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))


def test_splits_and_filters(tmp_path):
    write(tmp_path / "train.jsonl", math_rows(200))
    write(tmp_path / "test.jsonl", math_rows(230)[200:])
    train, validation, test = (
        get_math_tasks(split, path=tmp_path) for split in ("train", "validation", "test")
    )
    ids = [{task.id for task in tasks} for tasks in (train, validation, test)]
    assert (
        len(ids[0] | ids[1]) == 200
        and not ids[0] & ids[1]
        and 5 < len(ids[1]) < 50
        and len(ids[2]) == 30
    )
    hard = get_math_tasks("test", path=tmp_path, levels=[5])
    assert len(hard) == 6 and all(int(task.grader.expected) % 5 == 4 for task in hard)
    assert "\\boxed{}" in train[0].messages[0]["content"]
    tagged = get_math_tasks("test", 1, path=tmp_path, style="r1", format_reward=0.1)[0]
    assert "<answer>" in tagged.messages[0]["content"] and tagged.grader.format_reward == 0.1
    for wrong in (
        {"levels": [9]},
        {"style": "R1"},
        {"format_reward": 2},
        {"split": "dev"},
        {"subjects": ["Botany"]},
    ):
        with pytest.raises(TaskError):
            get_math_tasks(**{"split": "test", "path": tmp_path, **wrong})


def test_the_published_folders_of_json_files(tmp_path):
    for split, count in (("train", 6), ("test", 3)):
        for number, row in enumerate(math_rows(count)):
            write(
                tmp_path
                / split
                / ("algebra" if number % 2 else "geometry")
                / f"{number // 2}.json",
                [row],
            )
    train = get_math_tasks("train", path=tmp_path) + get_math_tasks("validation", path=tmp_path)
    assert len(train) == len({task.id for task in train}) == 6
    assert len(get_math_tasks("test", path=tmp_path)) == 3


def test_a_contest_has_one_split(tmp_path):
    rows = [{"ID": f"2024-I-{k}", "Problem": f"P{k}?", "Answer": k} for k in range(15)]
    write(tmp_path / "train.jsonl", rows)
    tasks = get_aime_tasks(path=tmp_path)
    assert len(tasks) == 15 and tasks[0].id.startswith("aime/2024-I-")


def test_chats_are_used_as_they_are_and_once(tmp_path):
    row, answer = ROWS["DAPO-Math-17k"]
    write(tmp_path / "dapo.jsonl", [row] * 100)
    tasks = get_dapo_tasks("test", path=tmp_path / "dapo.jsonl")
    assert (
        tasks[0].messages == CHAT
        and tasks[0].grader.expected == answer
        and tasks[0].grader.style == "answer"
    )
    assert len({id(task.grader.expected) for task in tasks}) == 1


@pytest.mark.parametrize("family", ["math", "aime", "dapo"])
def test_families(tmp_path, family):
    write(tmp_path / "test.jsonl", math_rows(5))
    (tmp_path / "train.jsonl").write_text((tmp_path / "test.jsonl").read_text())
    spec = TaskSpec.parse(f"{family}@test={tmp_path}").with_option("style", "r1")
    assert len(spec.tasks(3)) == 3
    assert TaskSpec.parse(family).tasks.__self__.family == family
