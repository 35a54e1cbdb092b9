"""The choice among many servers, against the one that asking all of them gives."""

import asyncio
import copy
import cProfile
import random

import bench_servers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.rollouts.scheduling.capacity import Load, Metrics, ServerRoom
from ttrl.rollouts.scheduling.emptiest import Emptiest
from ttrl.rollouts.scheduling.lengths import Lengths
from ttrl.rollouts.scheduling.server_state import Pauses, Server


class Nobody:
    base_url = "http://nobody/v1"


def asked_one_by_one(
    index: Emptiest,
    servers: list[Server],
    load: Load,
    now: float,
    last: Server | None,
    slack: float,
) -> int | None:
    """The place of the emptiest server with room, by the index's lengths; of copies, since asking
    leaves traces.
    """
    found = []
    for place, server in enumerate(servers):
        room = copy.copy(server.room)
        room.loads = set(room.loads)
        if server.is_open(now) and room.admits(load, index._known):
            found.append((room.share(index._known), place))
    if not found:
        return None
    least, best = min(found)
    kept = [place for share, place in found if servers[place] is last and share <= least + slack]
    return kept[0] if kept else best


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.booleans())
def test_the_choice_is_that_of_asking_all(seed: int, count: int, mixed: bool) -> None:
    generator = random.Random(seed)
    lengths, now = Lengths(), 0.0
    servers = [Server(Nobody(), lengths, lambda server: None, Pauses()) for _ in range(count)]  # type: ignore[arg-type]
    for server in servers:
        server.room.limit = float(generator.randint(1, 6))
    index = Emptiest(servers, lengths)
    loads: list[tuple[Server, Load]] = []
    refusals = 0
    for _ in range(120):
        now += generator.choice([0.0, 0.001, 0.1, 0.3]) * generator.random()
        server = generator.choice(servers)
        what = generator.random()
        if what < 0.5:
            n = generator.choice([1, 4, 16]) if mixed else 4
            load = Load(1000, n, 400)  # a refusal counts for as many samples
            last, slack = (server, 0.1) if generator.random() < 0.3 else (None, 0.0)
            known, best = index._known, asked_one_by_one(index, servers, load, now, last, slack)
            chosen = index.choose(load, now, last, slack)
            # A renewal of the lengths within the call would be another question.
            assert (
                None if chosen is None else servers.index(chosen)
            ) == best or index._known != known
            refusals += chosen is None
            if chosen is not None:
                chosen.room.add(load, now)
                loads.append((chosen, load))
                index.changed(chosen)
        elif what < 0.75 and loads:
            server, load = loads.pop(generator.randrange(len(loads)))
            server.room.remove(load)
            server.room.succeeded()
            lengths.observe(load.chars, load.chars // 3, [generator.randint(1, 400)] * load.n)
            index.changed(server)
        elif what < 0.8:
            server.room.refused(now)  # nobody is told: it is fuller than it was
        elif what < 0.9:
            running, waiting = generator.randint(0, 20), generator.choice([0, 0, 30])
            server.room.update(
                Metrics(
                    generator.choice([2000, 9000, 50_000]), 16, running, waiting, 0.5, 0, 10 * now
                ),
                now,
            )
            index.changed(server)
        elif what < 0.95:
            server.up = False  # nobody is told before it is back
        else:
            server.up = True
            index.changed(server)


@pytest.mark.parametrize("full", [False, True])
def test_a_request_asks_few_of_many_servers(full: bool) -> None:
    """The number of servers that are asked, not the time, which tests never assert."""
    with cProfile.Profile() as calls:
        asyncio.run(bench_servers.microseconds(100, full=full, requests=500))
    (asked,) = [
        entry.callcount for entry in calls.getstats() if entry.code is ServerRoom.admits.__code__
    ]
    sent = 500 + (12 if full else 6) * 100
    assert sent / 2 < asked < 4 * sent  # of 100 each before
