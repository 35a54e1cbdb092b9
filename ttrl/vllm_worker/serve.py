"""Start vLLM's API server as `python -m vllm.entrypoints.openai.api_server` does, in less time on a CPU.

There its engine is forked from the API server, which has imported everything, instead of importing it all again."""

import contextlib
import multiprocessing
import os
import socket


def fork_engines() -> None:
    """Have vLLM fork its engine. vLLM itself forks where nothing else is set, but insists on a new interpreter on CPUs."""
    import vllm.v1.engine.core
    import vllm.v1.engine.utils
    import vllm.v1.worker.cpu_worker  # noqa: F401  what the engine would import

    os.register_at_fork(after_in_child=close_listening_sockets)
    vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def close_listening_sockets() -> None:
    """Close the API server's port in this process: else it would stay in use as long as the engine lives."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family != socket.AF_UNIX and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                os.close(int(name))


def main() -> None:
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        fork_engines()
    entry.main()


if __name__ == "__main__":
    main()
