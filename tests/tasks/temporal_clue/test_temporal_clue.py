"""Temporal-clue: grades of odd replies, the published puzzles, and puzzles of our own against
trying out every possible night.
"""

import json
import random
from itertools import permutations, product

import pytest

from ttrl.errors import TaskError
from ttrl.records import ANSWER_END
from ttrl.tasks.temporal_clue import (
    SIZES,
    PuzzleSize,
    TemporalClueGrader,
    get_temporal_clue_tasks,
    load_puzzles,
    make_puzzle,
)
from ttrl.tasks.temporal_clue.generator import draw_size
from ttrl.tasks.temporal_clue.grading import normalise, read_answers
from ttrl.tasks.words import in_validation

SOLUTION = {"A": "Miss Violet", "B": "Fire Iron", "C": "11:30 PM", "D": "Tea Room"}
RIGHT = "A. Miss Violet\nB. Fire Iron\nC. 11:30 PM\nD. Tea Room"


@pytest.fixture(scope="module")
def tool():
    import check_puzzles

    return check_puzzles


@pytest.mark.parametrize(
    ("content", "right"),
    [
        (RIGHT, 4),
        (RIGHT.lower(), 4),
        (RIGHT.upper(), 4),
        (RIGHT.replace("\n", "\r\n"), 4),
        (RIGHT.replace("\n", "\n\n"), 4),
        (f"<answer>{RIGHT}</answer>", 4),
        (f"<think>\n{RIGHT}", 0),
        ("**A. Miss Violet**\n**B. Fire Iron**\n**C. 11:30 PM**\n**D. Tea Room**", 4),
        ("A. **Miss Violet**\nB. **Fire Iron**\nC. **11:30 PM**\nD. **Tea Room**", 4),
        ("**A.** Miss Violet\n**B.** *Fire Iron*\n**C.** `11:30 PM`\n**D**. __Tea Room__", 4),
        ("- A. Miss Violet\n* B. Fire Iron\n• C. 11:30 PM\n> D. Tea Room", 4),
        ("A) Miss Violet\n(B) Fire Iron\nC: 11:30 PM\nD.Tea Room", 4),
        ("A. Miss Violet.\nB. Fire Iron,\nC. 11:30 PM!\nD. Tea Room;", 4),
        ("A. \"Miss Violet\"\nB. 'Fire Iron'\nC. “11:30 PM”\nD. (Tea Room)", 4),
        ("A.  Miss   Violet\n  B. Fire\tIron\n\tC. 11:30  PM\nD. Tea Room   ", 4),
        (f"```\n{RIGHT}\n```", 4),
        (f"# Answers\n\n{RIGHT}\n\nBest wishes!", 4),
        (RIGHT.replace("11:30 PM", "11:30 p.m."), 4),
        (RIGHT.replace("11:30 PM", "11:30PM"), 4),
        (RIGHT.replace("11:30 PM", "11.30 pm"), 4),
        (RIGHT.replace("11:30 PM", "１１:３０ PM"), 4),  # digits of full width
        (RIGHT.replace("11:30 PM", "23:30"), 3),
        (RIGHT.replace("11:30 PM", "11:30 AM"), 3),
        (RIGHT.replace("11:30 PM", "11:30"), 3),
        (RIGHT.replace("11:30 PM", "1:30 PM"), 3),
        (RIGHT.replace("Miss Violet", "Violet"), 3),
        (RIGHT.replace("Miss Violet", "Miss Violet or Mr. Cobalt"), 3),
        (RIGHT.replace("Miss Violet", "Miss Violet (she had the Fire Iron)"), 3),
        (RIGHT.replace("Tea Room", "the Tea Room"), 3),
        ("A. Mr. Cobalt\n" + RIGHT, 4),  # in the reasoning; the last counts
        (RIGHT + "\nA. Mr. Cobalt", 3),
        (RIGHT + "\n\nOn second thoughts:\n**B.** Bow\n**C.** 11:45 PM", 2),
        (f"<think>\n{RIGHT}\n</think>\nA. Mr. Cobalt", 0),
        ("A. SUSPECT\nB. WEAPON\nC. TIME\nD. ROOM", 0),  # the form, not filled in
        (RIGHT + "\nA.\nB. \n**C.**\nD)", 4),  # lines without an answer are none
        (RIGHT.replace("\n", ", "), 0),
        (RIGHT.replace("\n", "; "), 0),
        ("Miss Violet\nFire Iron\n11:30 PM\nTea Room", 0),
        ("1. Miss Violet\n2. Fire Iron\n3. 11:30 PM\n4. Tea Room", 0),
        ("| A | Miss Violet |\n| B | Fire Iron |", 0),
        ("The answers are A. Miss Violet and so on.", 0),
        ("А. Miss Violet", 0),  # a Cyrillic letter
        ("B. Miss Violet\nA. Fire Iron\nD. 11:30 PM\nC. Tea Room", 0),
        ("A. Fräulein Violett\nB. 鉄\nC. двадцать\nD. Salon de thé", 0),
        ('{"A": "Miss Violet", "B": "Fire Iron"}', 0),
        ("A. Miss Violet\u200b\nE. Tea Room\nZ. Tea Room", 1),  # nobody sees a space of no width
        (RIGHT.replace("\n", "\n\u200b").replace("Tea Room", "Tea\u2060 Room\ufeff"), 4),
        ("A. " + "Miss Violet " * 40, 0),
        ("", 0),
        (None, 0),
        ("I cannot solve this.", 0),
        ("\ud83d A. Miss Violet", 0),
    ],
)
def test_grades(content, right, reply):
    reward, metrics = TemporalClueGrader(SOLUTION)(reply(content))
    assert reward == right / 4 == metrics["accuracy"]
    assert metrics["solved"] == (right == 4)


def test_typography_of_a_name_does_not_matter(reply):
    grader = TemporalClueGrader({"A": "Señor O’Hara", "B": "Co‑op"})
    assert grader(reply("A. Sen\u0303or O'Hara\nB. co-op"))[0] == 1.0
    assert grader(reply("A. Senor O'Hara\nB. coop"))[0] == 0.0


def test_power_and_share_of_answered(reply):
    reward, metrics = TemporalClueGrader(SOLUTION, power=2.0)(reply("A. Miss Violet\nB. Bow"))
    assert reward == 0.0625
    assert metrics == {"accuracy": 0.25, "solved": 0.0, "answered": 0.5, "answer_end": 21.0}


@pytest.mark.parametrize("before", ["", "Well.\r\n\n", "<think>A. Bow\n</think>\n", "<answer>"])
@pytest.mark.parametrize("last", ["D. Tea Room", "- **d) tea room**", "D. a wrong one"])
@pytest.mark.parametrize("after", ["", " \n", "</answer>", "\nI hope so.\nZ. Not asked for"])
def test_where_the_last_answer_ends(before, last, after, reply):
    """So that the surprise of a completion is that of what led to its answer."""
    text = f"{before}A. Miss Violet\nB. Bow\n{last}"
    _, metrics = TemporalClueGrader(SOLUTION)(reply(text + after))
    assert metrics[ANSWER_END] == len(text)
    assert (
        ANSWER_END not in TemporalClueGrader(SOLUTION)(reply(before + after.replace("Z.", "")))[1]
    )


def test_long_replies_take_linear_time(grade_long_replies):
    grade_long_replies(
        TemporalClueGrader(SOLUTION),
        "A. ",
        "A.\n",
        "A. **",
        "A. 1:11 ",
        "*A",
        "A. Miss Violet\n",
        "A.m.",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({},), "the solution is empty"),
        (({"AB": "x"},), "'AB': 'x'; letters are A to Z"),
        (({"a": "x"},), "letters are A to Z"),
        (({"A": " * "},), "values short texts"),
        (({"A": "x"}, 0.0), "power is 0.0; give a number above 0"),
        (({"A": "x"}, float("nan")), "power is nan"),
    ],
)
def test_solutions_that_cannot_be_graded(arguments, message):
    with pytest.raises(TaskError, match="temporal-clue") as caught:
        TemporalClueGrader(*arguments)
    assert message in str(caught.value)


def test_published_solutions_are_right_in_plain_and_in_bold(shared, reply):
    puzzles = load_puzzles(shared / "temporal_clue" / "val.jsonl")
    assert len(puzzles) == 64
    times = 0
    for puzzle in puzzles:
        grader = TemporalClueGrader(puzzle.solution)
        plain = [f"{letter}. {value}" for letter, value in puzzle.solution.items()]
        for text in (
            "\n".join(plain),
            "\n".join(f"**{line}**" for line in plain),
            "Well.\n\n- " + "\n- ".join(plain),
        ):
            assert grader(reply(text)) == (
                1.0,
                {"accuracy": 1.0, "solved": 1.0, "answered": 1.0, "answer_end": len(text)},
            )
        # The form at the prompt's end, filled in by somebody who forgets to fill it in:
        form = puzzle.prompt[puzzle.prompt.index("final answers in the following format") :]
        assert list(read_answers(form)) == list(puzzle.solution)
        assert grader(reply(form))[0] == 0.0
        times += sum(value.endswith("M") and ":" in value for value in puzzle.solution.values())
    assert times > 20


def test_published_puzzles_as_tasks(shared):
    path = shared / "temporal_clue" / "val.jsonl"
    train, held_out = (
        get_temporal_clue_tasks(split, None, path=path) for split in ("train", "validation")
    )
    assert len(train) + len(held_out) == 64 and held_out
    assert not {task.id for task in train} & {task.id for task in held_out}
    assert all(in_validation("temporal-clue " + task.messages[0]["content"]) for task in held_out)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"solution": {"A": "x"}}, "no field 'prompt'"),
        ({"prompt": "p"}, "solution is 'None'; it must be an object"),
        ({"prompt": "p", "solution": "x"}, "solution is 'x'; it must be an object"),
        ({"prompt": "p", "solution": {"A": 3}}, "its values must be texts"),
        ({"prompt": "p", "solution": {}}, "the solution is empty"),
        ({"prompt": "p", "solution": {"AA": "x"}}, "letters are A to Z"),
    ],
)
def test_rows_that_are_no_puzzles_are_named(tmp_path, row, message):
    path = write(tmp_path / "p.jsonl", {"prompt": "p", "solution": {"A": "x", "B": None}}, row)
    with pytest.raises(TaskError) as caught:
        load_puzzles(path)
    assert f"{path}, line 2: " in str(caught.value) and message in str(caught.value)


def test_wrong_arguments(tmp_path):
    with pytest.raises(TaskError, match="'test'; temporal_clue has 'train', 'validation'"):
        get_temporal_clue_tasks("test")
    with pytest.raises(TaskError, match="n is None; ask for at least one puzzle"):
        get_temporal_clue_tasks(n=None)
    with pytest.raises(TaskError, match="has its own"):
        get_temporal_clue_tasks(path=tmp_path, size=SIZES["tiny"])
    with pytest.raises(TaskError, match="suspects is 1; give a whole number from 2 to"):
        PuzzleSize(1, 2, 2, 1)
    with pytest.raises(TaskError, match="motives is 'many'"):
        PuzzleSize(2, 2, 2, 1, "many")
    with pytest.raises(TaskError, match="10 suspects are too many for 3 rooms"):
        PuzzleSize(10, 2, 3, 1)


def test_puzzles_are_made_again_by_the_same_seed_and_split(reply):
    size = SIZES["tiny"]
    one, again, other, held_out, same = (
        get_temporal_clue_tasks(split, 2, seed, size=size)
        for split, seed in (
            ("train", 1),
            ("train", 1),
            ("train", 2),
            ("validation", 1),
            ("validation", 2),
        )
    )
    ids = [[task.id for task in tasks] for tasks in (one, again, other, held_out, same)]
    assert ids[0] == ids[1] and ids[3] == ids[4]
    assert len({*ids[0], *ids[2], *ids[3]}) == 6
    for task in one:
        written = "\n".join(f"{letter}. {value}" for letter, value in task.grader.solution.items())
        assert task.grader(reply(written))[0] == 1.0


def test_the_clock_passes_midnight():
    assert normalise("**01:00 A.M.**") == normalise("1:00 am") == "1:00 am" != normalise("11:00 am")


def holders(mystery, night, subject):
    """Who a subject may be, that night."""
    _, motives, murderer, weapon, _ = night
    kind, name = subject
    if kind == "motive":
        return [s for s, motive in enumerate(motives) if motive == name]
    return {
        "mover": [name],
        "murderer": [murderer],
        "murder weapon": [weapon + len(mystery.suspects) + 1],
    }[kind]


def is_true(mystery, night, clue):
    """A clue, by its plain meaning: of those whom it may speak of, somebody did so."""
    where, motives, _, weapon, time = night
    kind = clue[0]
    if kind in ("or", "iff"):
        first, second = (is_true(mystery, night, part) for part in clue[1:])
        return first or second if kind == "or" else first == second
    if kind == "killed":
        return weapon + len(mystery.suspects) + 1 == clue[1][1]
    if kind == "murdered":
        return time == clue[1]
    who = holders(mystery, night, clue[1])
    if kind == "motive":
        return any(motives[x] == clue[2] for x in who)
    if kind == "in":
        return any(where[x][clue[3]] == clue[2] for x in who)
    if kind == "never":
        return any(clue[2] not in where[x] for x in who)
    if kind == "stayed":
        return any({clue[2]} == set(where[x][clue[3] : clue[4] + 1]) for x in who)
    if kind == "moved":
        _, _, thing, before, after, t = clue
        things = [None] if thing is None else holders(mystery, night, thing)
        return any(
            all(y is None or where[y][t - 1 : t + 1] == (before, after) for y in (x, z))
            for x in who
            for z in things
        )
    others = holders(mystery, night, clue[3] if kind == "beside" else clue[2])
    pairs = [(x, y) for x in who for y in others if x != y]
    if kind == "together":
        return any(
            here == there == clue[3] for x, y in pairs for here, there in zip(where[x], where[y])
        )
    if kind == "same":
        return any(where[x][clue[3]] == where[y][clue[3]] for x, y in pairs)
    assert kind == "beside"
    right, down = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}[clue[2]]
    width, t = mystery.width, clue[4]
    for x, y in pairs:
        (row, column), (base, side) = divmod(where[x][t], width), divmod(where[y][t], width)
        if (row - base, column - side) == (down, right):
            return True
    return False


def nights(mystery):
    """Every night that the rules allow: (rooms by mover and time, motives by suspect, murderer,
    weapon, time).
    """
    suspects, rooms, times = (
        len(mystery.suspects),
        range(len(mystery.rooms)),
        range(len(mystery.times)),
    )

    def near(r, s):
        return (
            abs(r // mystery.width - s // mystery.width)
            + abs(r % mystery.width - s % mystery.width)
            <= 1
        )

    walks = [
        walk
        for walk in product(rooms, repeat=len(times))
        if all(near(*walk[t : t + 2]) for t in times[:-1])
    ]
    all_motives = [name for name, count in mystery.motives.items() for _ in range(count)]
    for people in product(walks, repeat=suspects + 1):
        body = people[-1]
        alone = [
            (t, s)
            for t in times
            for s in range(suspects)
            if [x[t] == body[t] for x in people[:-1]] == [y == s for y in range(suspects)]
        ]
        steps = {(*walk[t : t + 2], t) for walk in people[:-1] for t in times[:-1]}
        if not alone:
            continue
        lying = [
            walk
            for walk in walks
            if all(walk[t] == walk[t + 1] or (*walk[t : t + 2], t) in steps for t in times[:-1])
        ]
        for things in product(lying, repeat=len(mystery.weapons)):
            for t, s in alone:
                for w, walk in enumerate(things):
                    if walk[t] == body[t]:
                        for motives in sorted(set(permutations(all_motives))):
                            yield (*people, *things), motives, s, w, t


def answers(mystery, night):
    """To all questions."""
    where, motives, murderer, weapon, time = night
    for question in mystery.questions.values():
        words = question.rstrip("?")
        if words.startswith("Who murdered"):
            yield mystery.suspects[murderer]
        elif words.startswith("What weapon"):
            yield mystery.weapons[weapon]
        elif words.startswith("Where was the murder committed"):
            yield mystery.rooms[where[murderer][time]]
        elif words.startswith("When"):
            yield mystery.times[time]
        elif words.startswith("Why"):
            yield motives[murderer]
        elif words.startswith("Who was motivated by "):
            yield mystery.suspects[motives.index(words.removeprefix("Who was motivated by "))]
        elif words.startswith("What was the motive of "):
            yield motives[mystery.suspects.index(words.removeprefix("What was the motive of "))]
        else:
            name, _, at = words.removeprefix("Where was ").partition(" at ")
            named = name.removeprefix("the ")
            if named.startswith("suspect motivated by "):
                mover = motives.index(named.removeprefix("suspect motivated by "))
            else:
                mover = [*mystery.suspects, mystery.victim, *mystery.weapons].index(named)
            yield mystery.rooms[where[mover][mystery.times.index(at)]]


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (PuzzleSize(2, 2, 2, 2, "own"), 6),
        (PuzzleSize(2, 2, 2, 2, "none"), 6),
        (PuzzleSize(2, 2, 2, 1, "shared"), 4),
        (PuzzleSize(3, 2, 2, 1, "shared"), 6),
        (PuzzleSize(3, 2, 4, 1, "none"), 4),
    ],
    ids=lambda value: value.motives if isinstance(value, PuzzleSize) else str(value),
)
def test_one_answer_and_no_clue_too_many(tool, size, count):
    """Every night is tried out, from the prompt alone."""
    for seed in range(count):
        row = make_puzzle(seed, size)
        mystery = tool.read_mystery(row["prompt"])
        assert len(mystery.clues) == row["num_clues"]
        possible, without = set(), [set() for _ in mystery.clues]
        for night in nights(mystery):
            false = [
                number
                for number, clue in enumerate(mystery.clues)
                if not is_true(mystery, night, clue)
            ]
            if len(false) <= 1:
                found = tuple(answers(mystery, night))
                for answered in without if not false else [without[false[0]]]:
                    answered.add(found)
                if not false:
                    possible.add(found)
        assert possible == {tuple(row["solution"].values())}
        assert all(len(answered) > 1 for answered in without)


def test_a_larger_puzzle_is_written_as_the_prompt_says(tool):
    row = make_puzzle(0, PuzzleSize(6, 5, 8, 4, "shared"))
    mystery = tool.read_mystery(row["prompt"])
    sizes = (mystery.suspects, mystery.weapons, mystery.rooms, mystery.times, list(mystery.motives))
    assert [len(names) for names in sizes] == [6, 5, 8, 4, 3]
    assert sum(mystery.motives.values()) == 6
    assert row["num_clues"] == len(mystery.clues) and list(mystery.questions) == list(
        row["solution"]
    )
    assert mystery.width == 3 and "W 7|8|- E" in row["prompt"]
    assert row["prompt"].endswith("\n".join(row["prompt"].splitlines()[-len(row["solution"]) :]))
    for letter, value in row["solution"].items():
        assert any(value in names for names in sizes), letter


@pytest.mark.parametrize(
    "size",
    [PuzzleSize(2, 2, 2, 2, "own"), PuzzleSize(3, 2, 2, 1, "shared")],
    ids=["moving", "still"],
)
def test_clues_of_the_night_leave_one_night(tool, size):
    """Every night is tried out: with scope "night", one is possible, and two or more without any
    one clue.
    """
    for seed in range(3):
        row = make_puzzle(seed, size, "night")
        mystery = tool.read_mystery(row["prompt"])
        possible, without = 0, [0] * len(mystery.clues)
        for night in nights(mystery):
            false = [
                number
                for number, clue in enumerate(mystery.clues)
                if not is_true(mystery, night, clue)
            ]
            possible += not false
            if len(false) == 1:
                without[false[0]] += 1
        assert possible == 1 and all(without)


def test_no_setting_is_made_for_both_splits():
    """Train and validation differ by a hash of what stands before the clues, so that no seeds can
    bring them together.
    """
    for split in ("train", "validation"):
        for task in get_temporal_clue_tasks(split, 20, 5, size=SIZES["tiny"]):
            setting = task.messages[0]["content"].partition("\n\nThese clues are known")[0]
            assert in_validation("temporal-clue " + setting) == (split == "validation")


def test_scopes(tmp_path):
    with pytest.raises(TaskError, match="scope is 'all'; give 'answers' or 'night'"):
        make_puzzle(0, SIZES["tiny"], "all")
    with pytest.raises(TaskError, match="size and scope apply to puzzles generated here"):
        get_temporal_clue_tasks("train", 1, path=tmp_path, scope="night")


def test_answers_are_read_by_their_letters_and_the_reference_earns_all(reply):
    assert read_answers("**A.** Miss Violet\nD. 11:30 PM") == {"A": "miss violet", "D": "11:30 pm"}
    grader = TemporalClueGrader(SOLUTION)
    assert read_answers(grader.reference()).keys() == SOLUTION.keys()
    assert grader(reply(grader.reference()))[0] == 1.0


@pytest.mark.parametrize("scope", ["answers", "night"])
def test_sizes_are_mixed_in_both_scopes(scope):
    rng = random.Random("sizes")
    sizes = [draw_size(rng, scope) for _ in range(200)]
    assert {2, 5, 9} <= {size.suspects for size in sizes} <= set(range(2, 11))
    assert all(2 <= size.weapons <= 8 for size in sizes)
