"""What does a request cost the process that sends it, with 1 to 1,000 servers?

    python tools/bench_servers.py [--most 1000]

Microseconds of CPU per request of `ttrl.rollouts.scheduling.servers` alone: the servers answer at
once or when they are told to, in a random order, and say what their KV caches hold. "room": every
server has some, "full": none has, and requests wait. Without HTTP, JSON and graders. The third
column is what one look at /metrics costs, of which there is one per server and second: reading it,
and adapting to it.
"""

import argparse
import asyncio
import random
import time

from ttrl.rollouts.client.wire import Answer
from ttrl.rollouts.scheduling.server_state import Pauses
from ttrl.rollouts.scheduling.servers import Servers, Size

_SIZE = Size(prompt=1200, n=1, max_tokens=512)
_TOKENS = 256


class StandIn:
    """A transport to nobody; its /metrics say how large its KV cache is."""

    def __init__(self, number: int, capacity: int) -> None:
        self.base_url = f"http://server-{number}/v1"
        self._capacity = capacity
        self.running = 0

    async def get(self, path: str, *, root: bool = False, timeout: float = 10.0) -> bytes:
        blocks = self._capacity // 16
        config = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n'
        counts = f"vllm:num_requests_running {self.running}\nvllm:generation_tokens_total 0\n"
        return f"{config}{counts}".encode()


async def microseconds(
    count: int, *, full: bool, requests: int, seed: int = 0
) -> tuple[float, float]:
    """Return the CPU time per request of `count` servers with 8 requests in flight to each at the
    most, and that of a look at /metrics."""
    generator = random.Random(seed)
    transports = [
        StandIn(number, 8 * (300 + _TOKENS) if full else 10**6) for number in range(count)
    ]
    in_flight: list[asyncio.Future[None]] = []

    async def attempt(transport: StandIn) -> list[Answer | None]:
        done = asyncio.get_running_loop().create_future()
        in_flight.append(done)
        transport.running += 1
        await done
        transport.running -= 1
        return [Answer(b"{}", prompt_tokens=300, completion_tokens=_TOKENS)]

    pauses = Pauses(poll=1e9)
    async with Servers(transports, concurrency=None, pauses=pauses) as servers:  # type: ignore[arg-type]
        waiting = set()

        def send() -> None:
            task = asyncio.create_task(servers.send(attempt, size=_SIZE, max_retries=0))  # type: ignore[arg-type]
            waiting.add(task)
            task.add_done_callback(waiting.discard)

        for _ in range((12 if full else 6) * count):
            send()
        await asyncio.sleep(0.01)
        began = time.process_time()
        for _ in range(requests):
            number = generator.randrange(len(in_flight))
            in_flight[number], in_flight[-1] = in_flight[-1], in_flight[number]
            in_flight.pop().set_result(None)
            send()
            await asyncio.sleep(0)
            while not in_flight:
                await asyncio.sleep(0)
        taken = time.process_time() - began
        began = time.process_time()
        for server in servers.servers:
            await server._poll()
        looks = time.process_time() - began
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return taken / requests * 1e6, looks / count * 1e6


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--most", type=int, default=1000, metavar="N", help="servers at the most (1000)"
    )
    parser.add_argument(
        "--requests", type=int, default=4000, metavar="N", help="measured requests (4000)"
    )
    arguments = parser.parse_args()
    print(f"{'servers':>8}{'room, µs':>12}{'full, µs':>12}{'a look, µs':>12}")
    count = 1
    while count <= arguments.most:
        taken = [
            asyncio.run(microseconds(count, full=full, requests=arguments.requests))
            for full in (False, True)
        ]
        print(f"{count:8d}{taken[0][0]:12.1f}{taken[1][0]:12.1f}{taken[1][1]:12.1f}", flush=True)
        count *= 10


if __name__ == "__main__":
    main()
