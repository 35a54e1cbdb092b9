"""reasoning-gym: whole answers alone are paid for, nothing that a model writes is run, and the
splits are kept apart.
"""

import inspect
import json
import pickle
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from ttrl.agents import reasoning_gym as adapter
from ttrl.agents.reasoning_gym import REFUSED, ReasoningGymGrader, families, get_reasoning_gym_tasks
from ttrl.errors import TaskError
from ttrl.rollouts.graders.pickling import pickled

EVALUATE = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
PARSE = {"countdown", "polynomial_multiplication", "simple_integration"}


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process had been started so."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def choice(text: str) -> Any:
    return types.SimpleNamespace(message=types.SimpleNamespace(content=text))


def one(family: str, **options: Any) -> ReasoningGymGrader:
    grader = get_reasoning_gym_tasks(family, "validation", 1, **options)[0].grader
    assert isinstance(grader, ReasoningGymGrader)
    return grader


def package_score(grader: ReasoningGymGrader, answer: str) -> float:
    """What the package by itself would pay."""
    return float(
        adapter._dataset(grader.family, grader.options, 0, 1).score_answer(answer, grader.entry)
    )


@pytest.mark.parametrize(
    "family",
    [
        "course_schedule",
        "chain_sum",
        "word_sorting",
        "needle_haystack",
        "spell_backward",
        "graph_color",
    ],
)
def test_right_and_wrong(family: str) -> None:
    tasks = get_reasoning_gym_tasks(family, "train", 6, 3)
    for task in tasks:
        assert task.messages[0]["content"].startswith(task.grader.entry["question"])
        assert task.grader(choice(task.grader.reference())) == (
            1.0,
            {"exact": 1.0, "answered": 1.0, "lenient": 1.0},
        )
        assert task.grader(choice("<answer>zzz</answer>"))[0] == 0.0
        assert task.grader(choice(""))[1] == {"exact": 0.0, "answered": 0.0, "lenient": 0.0}


def test_where_the_answer_stands() -> None:
    grader = one("chain_sum")
    right = grader.expected
    replies = {
        f"<answer>0.5</answer> no: <answer>\n {right} \n</answer>": 1.0,
        f"<answer>{right}</answer> no: <answer>0.5</answer>": 0.0,
        f"<think><answer>{right}</answer></think> I do not know": 0.0,
        f"<think>It is <answer>{right}</answer>": 0.0,
        f"It is <ANSWER>{right}": 1.0,  # the closing tag was a stop string
        f"<answer>{right} or 0.5</answer>": 0.0,
    }
    assert {reply: grader(choice(reply))[0] for reply in replies} == replies
    assert grader(choice(f"So the sum is\n{right}")) == (
        0.0,
        {"exact": 0.0, "answered": 0.0, "lenient": 1.0},
    )


def test_an_answer_that_only_contains_the_right_one_earns_nothing() -> None:
    """Also with partial credit. The package pays for it: if it ever stops, the adapter may, too."""
    for family, wrong in (
        ("course_schedule", "True or False"),
        ("gcd", "1 2 3 4 5 6 7 8 9"),
        ("acre", None),
    ):
        grader = next(
            task.grader
            for task in get_reasoning_gym_tasks(family, "validation", 20, partial=True)
            if task.grader.expected
        )
        answer = (
            wrong if wrong is not None and grader.expected in wrong else f"{grader.expected} or not"
        )
        assert 0.0 < package_score(grader, answer) < 1.0
        assert grader(choice(f"<answer>{answer}</answer>"))[0] == 0.0


def test_partial_credit_is_the_verifiers() -> None:
    grader = one("word_sorting", partial=True)
    words = grader.entry["metadata"]["sorted_words"]
    swapped = ", ".join([*words[:-2], words[-1], words[-2]])
    reward, metrics = grader(choice(f"<answer>{swapped}</answer>"))
    assert (
        reward == pytest.approx(max(0.2, (len(words) - 2) / len(words))) and metrics["exact"] == 0.0
    )
    assert one("word_sorting")(choice(f"<answer>{swapped}</answer>"))[0] == 0.0


def test_what_evaluates_answers_is_known() -> None:
    """A new version of the package that evaluates answers elsewhere is noticed here."""
    found: dict[str, set[str]] = {"literal": set(), "arithmetic": set()}
    for family in families():
        kind = adapter._package().factory.DATASETS[family][0]
        if (gate := adapter._gate(kind.score_answer)) is adapter._is_literal:
            found["literal"].add(family)
        elif gate is adapter._is_arithmetic:
            found["arithmetic"].add(family)
    assert found["literal"] - {"number_sorting"} == EVALUATE and found["arithmetic"] == PARSE
    folder = Path(inspect.getfile(adapter._package())).parent
    files = [
        path
        for path in folder.rglob("*.py")
        if re.search(r"\b(eval|exec|sympify|parse_expr)\(", path.read_text())
    ]
    # The last ones evaluate what the package itself has made.
    others = {"number_sorting", "bitwise_arithmetic", "basic_arithmetic"} | set(REFUSED)
    generators = {"generators_50_99", "generators_00_49"}
    assert {path.stem for path in files} - others - generators <= EVALUATE | PARSE | {"verify"}


@pytest.mark.parametrize("family", sorted(EVALUATE | PARSE))
def test_no_answer_is_run(family: str, tmp_path: Path) -> None:
    grader, marker = one(family), tmp_path / "was_here"
    attack = (
        f"[open({str(marker)!r}, 'w')]"
        if family in EVALUATE
        else f"__import__('os').mkdir({str(marker)!r})"
    )
    for answer in (
        attack,
        f"[x for x in {attack}]",
        "().__class__.__base__.__subclasses__()",
        "9**9**9**9",
        "(((9**9)**9)**9)**9",
    ):
        began = time.monotonic()
        assert grader(choice(f"<answer>{answer}</answer>"))[0] == 0.0
        assert not marker.exists() and time.monotonic() - began < 5
    package_score(grader, attack)
    assert marker.exists()  # without the gate it is run


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ("3*x**2 - x/4 + C", True),
        ("-4*(-2*x - 8)**(3/2)/3 + C", True),
        ("exp(2*x)*sin(3*x)/13 + log(x) + C", True),
        ("94*4 - 61 - 6", True),
        ("x^2", False),
        ("x.is_real", False),
        ("exit()", False),
        ("lambda: 0", False),
        ("'a'*9", False),
        ("2**(10**9)", False),
        ("((x+1)**99)**99", False),
        ("1e400", False),
        ("(" * 500, False),
        ("1+" * 600 + "1", False),
    ],
)
def test_which_expressions_are_handed_on(answer: str, fits: bool) -> None:
    assert adapter._is_arithmetic(answer) is fits


def test_splits_and_seeds() -> None:
    def asked(*arguments: Any) -> list[str]:
        return [
            task.messages[0]["content"]
            for task in get_reasoning_gym_tasks("letter_counting", *arguments)
        ]

    held_out = asked("validation", 60)
    assert asked("validation", 20, 5) == held_out[:20] and len(set(held_out)) == 60
    assert asked("train", 60, 1) == asked("train", 60, 1) != asked("train", 60, 2)
    assert not set(held_out) & {text for seed in range(5) for text in asked("train", 60, seed)}


def test_tasks_are_the_same_in_every_process() -> None:
    """This one hashes strings in another way than the one with a seed."""
    names = ("family_relationships", "knights_knaves", "shortest_path", "zebra_puzzles")
    code = (
        "from ttrl.agents.reasoning_gym import get_reasoning_gym_tasks as get\n"
        f"for name in {names}:\n"
        "    print([task.id for task in get(name, 'train', 4, 1)])\n"
        "print(hash('x'))\n"
    )
    command = [sys.executable, "-c", code]
    there = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"}
    ).stdout
    *lists, hashed = there.splitlines()
    assert int(hashed) != hash("x")
    assert lists == [
        str([task.id for task in get_reasoning_gym_tasks(name, "train", 4, 1)]) for name in names
    ]
    assert len(set(re.findall(r"\b[0-9a-f]{12}\b", there))) == 16


def test_difficulty() -> None:
    def terms(**options: Any) -> list[int]:
        return [
            task.grader.entry["metadata"]["num_terms"]
            for task in get_reasoning_gym_tasks("chain_sum", "train", 40, **options)
        ]

    assert set(terms(level=0)) == {2} and 4 in terms(level=2) and max(terms(level=2)) == 4
    # Their configs hold enums, dates and objects.
    for family in ("aiw", "word_sorting", "time_intervals", "rearc"):
        assert one(family, level=1).expected
    assert (
        set(terms(min_terms=5, max_terms=5)) == set(terms(level=1, min_terms=5, max_terms=5)) == {5}
    )


def test_puzzles_that_differ_from_process_to_process_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(get_reasoning_gym_tasks("ransom_note", n=2)) == 2
    for seed in (None, "random"):
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED")
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        with pytest.raises(
            TaskError,
            match="ransom_note makes different puzzles in each process; set PYTHONHASHSEED=0",
        ):
            get_reasoning_gym_tasks("ransom_note", n=2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sums", {}, "name is 'chain_sums'; reasoning_gym has .*'chain_sum'"),
        ("composite", {}, "composite is refused: it mixes other families"),
        ("puzzle24", {}, "puzzle24 is refused: .*numbers"),
        (
            "chain_sum",
            {"terms": 3},
            r"no option 'terms'; choose from .*max_terms, min_digits, min_terms, level and partial",
        ),
        ("chain_sum", {"min_terms": 9}, "rejects .*'min_terms': 9.*max_terms must be >= min_terms"),
        ("chain_sum", {"level": 99}, "level is 99; reasoning_gym:chain_sum has levels 0 to 10"),
        ("gsm_symbolic", {"level": 1}, "gsm_symbolic has no levels; its options are"),
        ("chain_sum", {"split": "test"}, "split is 'test'"),
        ("chain_sum", {"n": 0}, "n is 0"),
        (
            "coin_flip",
            {"n": 300, "split": "validation"},
            "found only [0-9]+ different ones; ask for fewer",
        ),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        get_reasoning_gym_tasks(name, **options)


def test_a_grader_travels() -> None:
    grader = one("figlet_font", level=0)
    for copy in (pickle.loads(pickle.dumps(grader)), pickle.loads(pickled(grader, "here"))):
        assert copy(choice(grader.reference()))[0] == 1.0
    json.loads(grader.options)
