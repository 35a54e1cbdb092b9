"""Make temporal-clue puzzles: a scene, questions, and a minimal set of clues to settle them.

The puzzle's scope is the part settled by the clues. "answers": with all clues, the rules allow
exactly one combination of answers to the questions asked (of the rest of the scene there may be
several); without any one of them, more than one. "night": the same with the whole scene, every
room, motive and fact of the murder, instead of the answers, as in the published puzzles; these have
twice as many clues, many of them unnecessary for a given question. Clues are drawn at random until
all is settled; then each in turn is left out if the puzzle stays settled without it.
"""

import random
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from ttrl.errors import TaskError
from ttrl.tasks.datasets import Row
from ttrl.tasks.temporal_clue.clues import Clue, draw_clue, told_facts
from ttrl.tasks.temporal_clue.rules import Rules, Subject
from ttrl.tasks.temporal_clue.scene import VICTIM, PuzzleSize, Scene, describe, draw_scene
from ttrl.tasks.words import in_validation, pick, shuffled

SIZES: Mapping[str, PuzzleSize] = {
    "tiny": PuzzleSize(suspects=2, weapons=2, rooms=2, times=2, motives="own"),
    "small": PuzzleSize(suspects=3, weapons=3, rooms=4, times=3, motives="own"),
    "medium": PuzzleSize(suspects=6, weapons=5, rooms=9, times=4, motives="own"),
    "large": PuzzleSize(suspects=10, weapons=8, rooms=13, times=8, motives="own"),
}
Scope = Literal["answers", "night"]
_BATCH = 40  # clues drawn before checking whether they settle the answers
_MOST_CLUES = 1200
_REPEATED = 80  # repeats in one batch; a small scene has no more to say then
_FACTS_FIRST = 0.1


class Question(NamedTuple):
    """A question, the kind of its answer, the right answer, and its variable."""

    text: str
    kind: str
    answer: str
    variable: int


class Draft(NamedTuple):
    """A puzzle before its text is written."""

    scene: Scene
    clues: tuple[Clue, ...]
    questions: tuple[Question, ...]
    foundational: int
    """The number of questions about the murder; the others are bonus questions."""


def make_puzzle(
    seed: int | str,
    size: PuzzleSize | None = None,
    scope: Scope = "answers",
    held_out: bool | None = None,
) -> Row:
    """Make {"prompt", "solution" (letters and answers), "num_clues"}: the same for the same seed
    and size, on every machine.

    size: None draws one, from 2 suspects, 2 weapons and 2 rooms at one time to 10, 8 and 15 at 8
        times.
    scope: the part settled by the clues, see above.
    held_out: True makes one for validation, False one for training, None either. A hash of the
        setting (everything of the prompt before its clues) decides; one scene in ten is held out:
        with any seeds, no puzzle is ever made for both.
    Raises TaskError for another scope, or a size without a possible murder.
    """
    if scope not in get_args(Scope):
        raise TaskError(f"temporal-clue: scope is {scope!r}; give 'answers' or 'night'")
    for attempt in range(50):
        rng = random.Random(
            f"ttrl temporal clue 1 {seed} {attempt}" + ("" if scope == "answers" else f" {scope}")
        )
        # Kept: hard sizes must not become rare.
        if size is None:
            size = draw_size(rng, scope)
        draft = _try(rng, size, scope, held_out)
        if draft is not None:
            letters = [chr(ord("A") + number) for number in range(len(draft.questions))]
            solution = {
                letter: question.answer for letter, question in zip(letters, draft.questions)
            }
            return {
                "prompt": _prompt(draft, letters),
                "solution": solution,
                "num_clues": len(draft.clues),
            }
    raise TaskError(
        f"temporal-clue: {_MOST_CLUES} clues were not enough for 50 puzzles of {size}; choose "
        "another size"
    )


def draw_size(rng: random.Random, scope: Scope = "answers") -> PuzzleSize:
    """Draw a size: many small ones, some of the largest; for the scope "night" in the shares of the
    published puzzles.
    """
    if scope == "answers":
        if rng.random() < 0.25:
            suspects = 2
        else:
            suspects = 3 + int(rng.random() * 8)
    else:
        share = rng.random()
        suspects = 2 if share < 0.28 else 10 if share < 0.53 else 3 + int(rng.random() * 7)
    weapons = min(8, max(2, suspects - int(rng.random() * 3)))
    rooms = min(15, suspects + int(rng.random() * (suspects // 2 + 2)))
    if rng.random() < 0.17:
        times = 1
    else:
        times = 2 + int(rng.random() * min(7, suspects))
    return PuzzleSize(suspects, weapons, rooms, times, pick(rng, ("none", "own", "own", "shared")))


def _try(rng: random.Random, size: PuzzleSize, scope: Scope, held_out: bool | None) -> Draft | None:
    scene = draw_scene(rng, size)
    while held_out is not None and in_validation("temporal-clue " + describe(scene)) != held_out:
        scene = draw_scene(rng, size)
    rules = Rules(scene)
    clauses = rules.clauses
    questions, foundational, clues = _ask(rng, rules)
    # From here on, any solution differs from the true answers, or the true night.
    clauses.add(
        [-question.variable for question in questions]
        if scope == "answers"
        else [-x for x in rules.truth()]
    )
    switches: list[int] = []
    seen = {clue.text for clue in clues}
    while not switches or not clauses.contradict(switches):
        repeated = 0
        while len(clues) < len(switches) + _BATCH and repeated < _REPEATED:
            clue = draw_clue(rng, scene)
            if clue.text in seen:
                repeated += 1
            else:
                seen.add(clue.text)
                clues.append(clue)
        if len(clues) == len(switches) or len(clues) > _MOST_CLUES:
            return None
        for clue in clues[len(switches) :]:
            switch = clauses.new_variable()
            switches.append(switch)
            for clause in clue.says(rules):
                clauses.add([-switch, *clause])
    # Self-sufficient facts are left out a little earlier: the rest requires thinking of several at
    # once.
    order = {
        switch: rng.random() + _FACTS_FIRST * clue.reach for switch, clue in zip(switches, clues)
    }
    by_switch = dict(zip(switches, clues))
    needed = clauses.needed(sorted(switches, key=order.__getitem__))
    return Draft(
        scene,
        tuple(by_switch[switch] for switch in shuffled(rng, needed)),
        tuple(questions),
        foundational,
    )


def _ask(rng: random.Random, rules: Rules) -> tuple[list[Question], int, list[Clue]]:
    """Draw (questions, number of them about the murder, clues to the facts not asked)."""
    scene = rules.scene
    facts = told_facts(scene)
    asked = {name for name in ("weapon", "time", "motive") if name in facts and rng.random() < 0.75}
    told = [clue for name, clue in facts.items() if name not in asked]
    room = scene.murder_room
    questions = [
        Question(
            f"Who murdered {VICTIM}?",
            "SUSPECT",
            scene.suspects[scene.murderer],
            rules.murderer[scene.murderer],
        )
    ]
    if "weapon" in asked:
        weapon = scene.murder_weapon
        questions.append(
            Question(
                "What weapon did the murderer use?",
                "WEAPON",
                scene.weapons[weapon],
                rules.weapon[weapon],
            )
        )
    questions.append(
        Question("Where was the murder committed?", "ROOM", scene.rooms[room], rules.room[room])
    )
    if "time" in asked:
        time = scene.murder_time
        questions.append(
            Question("When did the murder happen?", "TIME", scene.times[time], rules.time[time])
        )
    if "motive" in asked:
        questions.append(_murder_motive(rules))
    foundational = len(questions)
    wanted = foundational + 1 + int(rng.random() * 4)
    for _ in range(200):
        if len(questions) == wanted:
            break
        question = _bonus(rng, rules)
        if question.text not in [other.text for other in questions]:
            questions.append(question)
    return questions, foundational, told


def _murder_motive(rules: Rules) -> Question:
    scene = rules.scene
    motive = scene.motive_of[scene.murderer]
    variable = rules.clauses.new_variable()
    for murderer, own in zip(rules.murderer, rules.motive):
        rules.clauses.add([-murderer, -own[motive], variable])
        rules.clauses.add([-murderer, own[motive], -variable])
    return Question("Why did the murderer do it?", "MOTIVE", scene.motives[motive], variable)


def _bonus(rng: random.Random, rules: Rules) -> Question:
    """Draw a question about a person or thing at some time, or sometimes about a motive."""
    scene = rules.scene
    if scene.motives and rng.random() < 0.12:
        s = int(rng.random() * len(scene.suspects))
        m = scene.motive_of[s]
        if scene.motive_count(m) == 1 and rng.random() < 0.5:
            return Question(
                f"Who was motivated by {scene.motives[m]}?",
                "SUSPECT",
                scene.suspects[s],
                rules.motive[s][m],
            )
        return Question(
            f"What was the motive of {scene.suspects[s]}?",
            "MOTIVE",
            scene.motives[m],
            rules.motive[s][m],
        )
    t = int(rng.random() * len(scene.times))
    single = [m for m in range(len(scene.motives)) if scene.motive_count(m) == 1]
    if single and rng.random() < 0.3:
        subject = Subject("motive", pick(rng, single))
    else:
        subject = Subject(
            "mover", pick(rng, [mover for mover in range(scene.movers) if mover != scene.victim])
        )
    r = scene.where[subject.movers(scene)[0]][t]
    return Question(
        f"Where was {subject.text(scene)}{scene.at(t)}?",
        "ROOM",
        scene.rooms[r],
        rules.was_at(subject, t, r),
    )


def _prompt(draft: Draft, letters: list[str]) -> str:
    lines = [f"{letter}. {question.text}" for letter, question in zip(letters, draft.questions)]
    parts = [
        describe(draft.scene),
        "These clues are known, and all of them are true:",
        "\n".join(f"- {clue.sentence()}" for clue in draft.clues),
        "Answer these questions:",
        "\n".join(lines[: draft.foundational]),
        *(
            ["and these bonus questions:", "\n".join(lines[draft.foundational :])]
            if lines[draft.foundational :]
            else []
        ),
        "End your reply with your answers, one line for each, in this form:",
        "\n".join(
            f"{letter}. {question.kind}" for letter, question in zip(letters, draft.questions)
        ),
    ]
    return "\n\n".join(parts)
