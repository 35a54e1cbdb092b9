"""Write the rules of every solution as clauses: one true room for each mover and time, and the
facts of the murder.

Indices as in scene.py. A variable is a number; lists of variables are indexed by room, suspect,
weapon, time or motive.
"""

from collections.abc import Sized
from itertools import combinations
from typing import Literal, NamedTuple

from ttrl.tasks.clauses import Clauses
from ttrl.tasks.temporal_clue.scene import VICTIM, Scene


class Subject(NamedTuple):
    """The person or thing of a clue."""

    kind: Literal["mover", "murderer", "murder weapon", "motive"]
    number: int = 0
    """The mover's or the motive's number."""

    def text(self, scene: Scene) -> str:
        """Return its name in the middle of a sentence: "the Pistol", "a suspect motivated by
        Envy".
        """
        if self.kind == "motive":
            if scene.motive_count(self.number) == 1:
                article = "the"
            else:
                article = "a"
            return f"{article} suspect motivated by {scene.motives[self.number]}"
        if self.kind != "mover":
            return f"the {self.kind}"
        if self.number == scene.victim:
            return VICTIM
        people = len(scene.suspects)
        if self.number < people:
            return scene.suspects[self.number]
        return f"the {scene.weapons[self.number - people - 1]}"

    def movers(self, scene: Scene) -> list[int]:
        """Return its true movers; several only for "a suspect motivated by"."""
        if self.kind == "mover":
            return [self.number]
        if self.kind == "murderer":
            return [scene.murderer]
        if self.kind == "murder weapon":
            return [scene.weapon(scene.murder_weapon)]
        return [s for s, m in enumerate(scene.motive_of) if m == self.number]


class Rules:
    """The clauses, and the variables for clues and questions."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.clauses = clauses = Clauses()

        def each(items: Sized) -> list[int]:
            return [clauses.new_variable() for _ in range(len(items))]

        self.at = [[each(scene.rooms) for _ in scene.times] for _ in range(scene.movers)]
        self.murderer, self.weapon = each(scene.suspects), each(scene.weapons)
        self.time, self.room = each(scene.times), each(scene.rooms)
        self.motive = [each(scene.motives) for _ in scene.motive_of]
        self.true = clauses.new_variable()
        clauses.add([self.true])
        self._role_at: dict[tuple[Subject, int], list[int]] = {}
        self._some_at: dict[tuple[Subject, int, int], int] = {}
        for places in self.at:
            for here in places:
                clauses.add_exactly_one(here)
        for choices in (self.murderer, self.weapon, self.time, self.room):
            clauses.add_exactly_one(choices)
        self._add_moves()
        self._add_motives()
        self._add_murder()

    def _add_moves(self) -> None:
        scene = self.scene
        add = self.clauses.add
        people = len(scene.suspects) + 1
        for t in range(len(scene.times) - 1):
            for r in range(len(scene.rooms)):
                reach = scene.neighbours(r)
                for mover in range(scene.movers):
                    now = self.at[mover][t]
                    then = self.at[mover][t + 1]
                    add([-now[r], then[r], *(then[other] for other in reach)])
                    add([-then[r], now[r], *(now[other] for other in reach)])
                for other in reach:
                    carriers = []
                    for s in range(people - 1):
                        carrier = self.clauses.new_variable()
                        carriers.append(carrier)
                        add([-carrier, self.at[s][t][r]])
                        add([-carrier, self.at[s][t + 1][other]])
                    for mover in range(people, scene.movers):
                        add([-self.at[mover][t][r], -self.at[mover][t + 1][other], *carriers])

    def _add_motives(self) -> None:
        """Give each suspect one motive, and each motive its number of suspects."""
        scene = self.scene
        for own in self.motive:
            self.clauses.add_exactly_one(own)
        for m in range(len(scene.motives)):
            having = [own[m] for own in self.motive]
            count = scene.motive_count(m)
            for too_many in combinations(having, count + 1):
                self.clauses.add([-x for x in too_many])
            for without in combinations(having, len(having) - count + 1):
                self.clauses.add(without)

    def _add_murder(self) -> None:
        scene = self.scene
        add = self.clauses.add
        for t, time in enumerate(self.time):
            for r, room in enumerate(self.room):
                body = self.at[scene.victim][t][r]
                add([-time, -room, body])
                add([-time, -body, room])
                for s, murderer in enumerate(self.murderer):
                    add([-time, -body, -murderer, self.at[s][t][r]])
                    add([-time, -body, murderer, -self.at[s][t][r]])
                for w, weapon in enumerate(self.weapon):
                    add([-time, -body, -weapon, self.at[scene.weapon(w)][t][r]])

    def truth(self) -> list[int]:
        """Return the true variables of the scene; together they determine it."""
        scene = self.scene
        places = [
            rooms[r] for where, there in zip(scene.where, self.at) for r, rooms in zip(where, there)
        ]
        motives = [own[m] for m, own in zip(scene.motive_of, self.motive)]
        return [
            *places,
            *motives,
            self.murderer[scene.murderer],
            self.weapon[scene.murder_weapon],
            self.time[scene.murder_time],
        ]

    def rooms_of(self, subject: Subject, t: int) -> list[int]:
        """Return variables by room: the subject, a single mover, was there. Those of a role follow
        its holder.
        """
        if subject.kind == "mover":
            return self.at[subject.number][t]
        if (subject, t) not in self._role_at:
            here = [self.clauses.new_variable() for _ in self.scene.rooms]
            for holder, mover in self.holders(subject):
                for mine, theirs in zip(here, self.at[mover][t]):
                    self.clauses.add([-holder, -mine, theirs])
                    self.clauses.add([-holder, mine, -theirs])
            self._role_at[subject, t] = here
        return self._role_at[subject, t]

    def holders(self, subject: Subject) -> list[tuple[int, int]]:
        """Return (variable for being this mover, mover) of all possible movers of the subject."""
        if subject.kind == "mover":
            return [(self.true, subject.number)]
        if subject.kind == "murderer":
            return [(variable, s) for s, variable in enumerate(self.murderer)]
        if subject.kind == "murder weapon":
            return [(variable, self.scene.weapon(w)) for w, variable in enumerate(self.weapon)]
        return [(own[subject.number], s) for s, own in enumerate(self.motive)]

    def was_at(self, subject: Subject, t: int, r: int) -> int:
        """Return a variable true exactly if the subject, or one of its possible movers, was in this
        room.
        """
        if subject.kind != "motive" or self.scene.motive_count(subject.number) == 1:
            return self.rooms_of(subject, t)[r]
        if (subject, t, r) not in self._some_at:
            some = self.clauses.new_variable()
            each = []
            for holder, mover in self.holders(subject):
                one = self.clauses.new_variable()
                each.append(one)
                self.clauses.add([-one, holder])
                self.clauses.add([-one, self.at[mover][t][r]])
                self.clauses.add([-holder, -self.at[mover][t][r], some])
            self.clauses.add([-some, *each])
            self._some_at[subject, t, r] = some
        return self._some_at[subject, t, r]
