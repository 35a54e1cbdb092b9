"""A run of 64 sessions that a test kills: `killed_sessions.py FOLDER SERVER_ARGUMENTS`.

The agents of odd tasks are programs, the others functions. 5% of the sessions crash after their
replies, 5% hang. While FOLDER/hold is there, those of the second half of the tasks do not end.
"""

import asyncio
import json
import sys
import textwrap
from pathlib import Path

import aiohttp
import check_agents

import ttrl
from ttrl.tasks.task import RolloutLimits

CRASHES, HANGS = 3, 6
"""Of a session's number modulo 20."""
PROGRAM = textwrap.dedent(
    """
    import json, os, sys, time, urllib.request
    task = json.load(open(os.environ["TTRL_AGENT_TASK"]))
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"messages": task["messages"]}).encode()
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
    number = int(task["id"].split("/")[1]) * 8 + task["sample"]
    while os.path.exists(sys.argv[1]) and number >= 32:
        time.sleep(0.05)
    assert number % 20 != 3, "crashed"
    if number % 20 == 6:
        time.sleep(600)
    """
)


def main(folder: Path, server: dict) -> None:
    hold = folder / "hold"

    async def agent(session):
        number = int(session.task_id.split("/")[1]) * 8 + session.sample
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {session.api_key}"}
        ) as http:
            for text in ("one", "two"):
                body = {"messages": [*session.messages, {"role": "user", "content": text}]}
                async with http.post(session.base_url + "/chat/completions", json=body) as answer:
                    assert answer.status == 200
        while hold.exists() and number >= 32:
            await asyncio.sleep(0.05)
        assert number % 20 != CRASHES, "crashed"
        if number % 20 == HANGS:
            await asyncio.Event().wait()

    program = [sys.executable, "-S", "-c", PROGRAM, str(hold)]
    limits = RolloutLimits(seconds=15)
    tasks = [
        ttrl.agent_task(
            program if n % 2 else agent,
            check_agents.letters,
            messages="write",
            id=f"s/{n}",
            limits=limits,
        )
        for n in range(8)
    ]
    config = ttrl.TrainConfig(
        run=str(folder / "run"),
        model=str(folder / "model"),
        iterations=1,
        tasks_per_iteration=8,
        samples_per_task=8,
        max_tokens=8,
        seq_len=512,
        num_threads=1,
        training={"lr": 1e-3, "rows_per_microbatch": 1},
        server={"max_num_seqs": 64, **server},
    )
    ttrl.train(config, tasks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
