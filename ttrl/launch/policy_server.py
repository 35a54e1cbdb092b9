"""The run's inference servers: started when first needed, always serving the checkpoint that is
asked for, and proven to.

Requests name the weights that they are for (`ttrl.server.auth`), so a server that is lost and comes
back with others cannot answer them. A thread looks after the servers while they serve: one of ours
that died is started anew, once per policy, with the reason in the log; one that somebody else
started is synced when it is back. Until then the others serve.
"""

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from ttrl.configs.machines import divided_devices, gpus_of_a_server, shares_of_devices
from ttrl.configs.run import TrainConfig
from ttrl.configs.vllm_arguments import LORA_RANKS, lora_rank_there
from ttrl.errors import ServerDiedError, ServerError, WeightSyncError
from ttrl.launch.server_member import ServerMember, ServerTools
from ttrl.launch.tune import visible_devices
from ttrl.records import Endpoint
from ttrl.server.connection import ServerConnection
from ttrl.server.cpu import is_cpu_build, thread_variables
from ttrl.server.model_folder import base_of_adapter, merge_adapter
from ttrl.server.transfer import Handover
from ttrl.server.vllm import VLLMServer
from ttrl.system.console import Console

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"
MAX_DOWNTIME = 240.0
"""Seconds for which requests of a rollout wait for a server that is being started anew."""


def make_server(
    config: TrainConfig,
    model_folder: Path,
    log_path: Path,
    *,
    env: dict[str, str] | None = None,
    adapters: bool = False,
    kind: type[VLLMServer] = VLLMServer,
) -> VLLMServer:
    """Return a server of a run, not started yet. Raises ConfigError for arguments in
    `config.server` that ttrl sets itself.
    """
    extra: dict[str, Any] = {}
    if adapters:
        rank = lora_rank_there(model_folder, config.recipe_config({}).lora_rank or 1)
        extra["max_lora_rank"] = next(
            allowed for allowed in LORA_RANKS if allowed >= rank or allowed == LORA_RANKS[-1]
        )
    if config.recipe_config({}).router_replay:
        extra["enable_return_routed_experts"] = True
    if config.server_sleeps and not is_cpu_build():
        extra["enable_sleep_mode"] = True
    return kind(
        model_folder,
        served_model_name=MODEL_NAME,
        log_path=log_path,
        dtype=_dtype(config),
        extra_args=extra
        | {name: value for name, value in config.server.items() if name != "max_model_len"},
        max_model_len=config.server.get("max_model_len"),
        seed=config.seed,
        env=env,
        serves_adapters=adapters,
        start_timeout=config.start_timeout,
    )


def _dtype(config: TrainConfig) -> str:
    if config.dtype == "bf16":
        return "bfloat16"
    return "float32"


class PolicyServer:
    """One vLLM server or several, which follow the run's checkpoints."""

    def __init__(
        self, config: TrainConfig, logs: Path, console: Console, tools: ServerTools | None = None
    ) -> None:
        self._config, self._logs, self._console, self._tools = (
            config,
            logs,
            console,
            tools or ServerTools(),
        )
        self._members: list[ServerMember] = []
        self._folder: Path | None = None
        self._version: str | None = None
        self._adapters = config.gives_adapters
        self._watching: threading.Thread | None = None
        self._over = threading.Event()
        self._handover: Handover | None = None
        """Where the trainer holds out the weights of the last checkpoint that was asked for."""
        self._start_from: Path | None = None
        self._serving: tuple[Path, str] | None = None
        """The checkpoint and version of requests, while they are served: one value, so that no
        thread mixes two of them.
        """

    def start(self, model_folder: Path) -> None:
        """Begin to start the servers in the background: it takes half a minute, in which the caller
        can do something else.
        """
        self._merge(model_folder)
        if not self._members:
            self._members = self._make_members(model_folder)
        for member in self._members:
            if not member.is_up:
                member.start(self._base(model_folder))

    def serve(
        self, checkpoint: Path, handover: Handover | None = None, start_from: Path | None = None
    ) -> dict[str, Any] | None:
        """Make the servers compute with `checkpoint`, all at the same time, and hold each of them
        to it.

        handover: where a trainer on this machine holds out its weights.
        start_from: where nobody writes it, another checkpoint of the model, for servers that have
            to be started.

        Returns what the sync has to say (mode, seconds, the canary's largest difference, why it
        fell back, and for several servers how many serve and what is wrong with the others), None
        where they had these weights already. A server that fails is left out with a warning while
        others serve. Raises ServerStartError, ServerDiedError, WeightSyncError where none is left.
        """
        if not self._members:
            if handover is not None and start_from is None:
                handover.wait_for_files(checkpoint)
            self.start(checkpoint if start_from is None else start_from)
        self._merge(checkpoint)
        if handover is not None:
            handover = dataclasses.replace(handover, is_written=start_from is None)
        self._serving = None
        self._handover = handover
        self._start_from = start_from
        if checkpoint != self._folder or self._version is None:
            self._version = secrets.token_hex(16)
            self._folder = None
        if any(member.ours is not None for member in self._members):
            with self._console.waiting("starting the vLLM server"):
                for member in self._members:  # all of them start at the same time
                    with member.lock:
                        member.wait_for_start()
        had_adapters = self._adapters
        results = self._for_each(lambda member: self._bring(member, checkpoint))
        if had_adapters and not self._adapters:  # requests ask all servers for one name
            self._merge(checkpoint)
            results = self._for_each(lambda member: self._bring_merged(member, checkpoint))
        errors = [result for result in results if isinstance(result, ServerError)]
        if len(errors) == len(results):
            raise errors[0]
        self._folder = checkpoint
        assert self._version is not None
        self._serving = checkpoint, self._version
        self._watch()
        return self._facts(results)

    def rest(self) -> None:
        """Free a device that the trainer shares with the servers: they stop, sleep or stay, as
        `weight_sync` says.
        """
        self._serving = None
        self._for_each(ServerMember.rest)

    # What rollouts ask. All of it raises ServerError where no server has the policy that was asked
    # for last.

    @property
    def servers(self) -> list[ServerConnection]:
        """Return those that are proven now."""
        version = self._served_version()
        return [
            member.server
            for member in self._members
            if member.proven is not None and member.version == version
        ]

    @property
    def model_name(self) -> str:
        """Return what requests ask for."""
        return self._any().model_name

    def endpoints(self) -> list[Endpoint]:
        """Return where all servers are asked: also those that are out, which take part when they
        are back with these weights. Requests are for these weights, so none goes to a server that
        may not know what that means.
        """
        version = self._served_version()
        return [member.server.endpoint(version) for member in self._members if member.is_fenced]

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request to the first of them, see `ServerConnection.request`."""
        return self._any().request(method, path, body)

    def weights_digest(self) -> str:
        """Return the digest of their weights, see `ServerConnection.weights_digest`."""
        return self._any().weights_digest()

    def check(self) -> None:
        """Raise ServerDiedError where all of them are gone, with what is known of each."""
        self._served_version()
        gone = []
        for member in self._members:
            try:
                if member.proven is None:
                    raise member.problem or ServerDiedError(
                        f"{member.server.base_url} does not serve this policy"
                    )
                member.server.check()
                return
            except ServerError as error:
                gone.append(str(error))
        raise ServerDiedError("; ".join(gone))

    def _any(self) -> ServerConnection:
        servers = self.servers
        if not servers:
            self.check()
            raise ServerDiedError("all servers are gone")
        return servers[0]

    def _served_version(self) -> str:
        serving = self._serving
        if serving is None:
            raise ServerError("no server runs; serve() starts one")
        return serving[1]

    def stop(self) -> None:
        """End the servers, also those that are just starting. Harmless when there are none."""
        self._serving = None
        self._over.set()
        members = self._members
        self._members = []
        self._folder = None
        self._version = None
        for member in members:  # first of all: whatever waits for one of them ends, too
            if member.ours is not None:
                member.ours.stop()
        for member in members:
            # A request to somebody else's server may take half an hour; nothing here needs its end.
            while not (has_lock := member.lock.acquire(timeout=0.2)) and member.ours is not None:
                member.ours.stop()
            try:
                member.stop()
            finally:
                if has_lock:
                    member.lock.release()
        if self._watching is not None:
            self._watching.join(5.0)
            self._watching = None

    # Inside

    def _make_members(self, model_folder: Path) -> list[ServerMember]:
        config = self._config
        own = [
            make_server(
                config,
                model_folder,
                self._logs / ("server.log" if config.servers_here == 1 else f"server_{number}.log"),
                env=env,
                adapters=self._adapters,
                kind=self._tools.own,
            )
            for number, env in enumerate(_environments(config))
        ]
        keys = config.joined_keys()
        tools = self._tools
        others = [
            tools.joined(url, served_model_name=MODEL_NAME, dtype=_dtype(config), api_key=keys[url])
            for url in config.joined_servers
        ]
        compare = config.weight_check == "all"
        others += (
            [] if tools.elsewhere is None else tools.elsewhere(self._base(model_folder), self._logs)
        )
        mode: Literal["reload", "restart", "sleep"]
        if config.server_sleeps:
            mode = "sleep"
        else:
            mode = "reload"
        if config.weight_sync == "restart":
            mode = "restart"
        return [ServerMember(server, mode=mode, compare=compare, tools=tools) for server in own] + [
            ServerMember(server, mode="reload", compare=compare, tools=tools) for server in others
        ]

    def _base(self, model_folder: Path) -> Path:
        """Return what a server is started with: the base of the run's adapters where it is given
        those, another checkpoint where this one is not written."""
        if self._start_from is not None:
            return self._start_from
        of_this_run = model_folder.absolute().is_relative_to(
            Path(self._config.run, "iterations").absolute()
        )
        if self._adapters and of_this_run:
            base = base_of_adapter(model_folder)
        else:
            base = None
        # A starting model may be what was merged once.
        if base is None:
            return model_folder
        return base

    def _merge(self, checkpoint: Path) -> None:
        if not self._adapters:
            merge_adapter(checkpoint)

    def _bring(self, member: ServerMember, checkpoint: Path) -> dict[str, Any] | None:
        assert self._version is not None
        try:
            return member.bring(checkpoint, self._version, self._base(checkpoint), self._handover)
        except ServerError as error:
            fetched = self._config.adapters == "mirror"  # nobody there would find merged weights
            if (
                member.ours is None
                and member.server.serves_adapters
                and isinstance(error, WeightSyncError)
                and not fetched
            ):
                raise WeightSyncError(
                    f'{error}; if vLLM does not serve this adapter, say adapters="merged"'
                ) from error
            if member.ours is None or not member.server.serves_adapters or fetched:
                raise
            logger.warning(
                "vLLM does not serve this run's adapters; it is given merged weights from now "
                "on: %s",
                error,
            )
            self._adapters = False
            return None

    def _bring_merged(self, member: ServerMember, checkpoint: Path) -> dict[str, Any] | None:
        assert self._version is not None
        member.serve_merged()
        facts = member.bring(checkpoint, self._version, checkpoint)
        if facts is None:
            return None
        return facts | {"fell_back": "vLLM does not serve this run's adapters"}

    def _for_each(self, work: Callable[[ServerMember], Any]) -> list[Any]:
        """Do some work for all members concurrently; a ServerError is a result like any other."""

        def one(member: ServerMember) -> Any:
            with member.lock:
                try:
                    return work(member)
                except ServerError as error:
                    return error

        if len(self._members) <= 1:
            return [one(member) for member in self._members]
        done: dict[ServerMember, Future[Any]] = {member: Future() for member in self._members}

        def settle(member: ServerMember) -> None:
            try:
                done[member].set_result(one(member))
            except BaseException as error:  # noqa: BLE001 - raised below
                done[member].set_exception(error)

        # Threads of their own: Ctrl-C and the end of the program do not wait for them, as they
        # would for those of a pool.
        for member in done:
            threading.Thread(target=settle, args=(member,), name="server sync", daemon=True).start()
        return [future.result() for future in done.values()]

    def _facts(self, results: list[Any]) -> dict[str, Any] | None:
        left_out = {}
        for member, result in zip(self._members, results, strict=True):
            if isinstance(result, ServerError):
                left_out[member.server.base_url] = str(result).splitlines()[0]
                logger.warning(
                    "%s is left out of the rollouts until it is back: %s",
                    member.server.base_url,
                    result,
                )
        facts = [result for result in results if isinstance(result, dict)]
        if not facts:
            return None
        if len(results) == 1:
            return facts[0]
        worst = max(facts, key=lambda one: one["canary_max_difference"])
        reasons = [one["fell_back"] for one in facts if one["fell_back"]]
        return worst | {
            "seconds": max(one["seconds"] for one in facts),
            "fell_back": "; ".join(reasons) or None,
            "servers": len(results) - len(left_out),
            "left_out": left_out,
        }

    def _watch(self) -> None:
        if self._watching is not None and self._watching.is_alive():
            return
        self._over = over = threading.Event()
        self._watching = threading.Thread(
            target=self._look_after_all, args=(over,), name="server watch", daemon=True
        )
        self._watching.start()

    def _look_after_all(self, over: threading.Event) -> None:
        looked_at_others = time.monotonic()
        while not over.wait(self._tools.look_seconds):
            others_too = time.monotonic() - looked_at_others >= self._tools.look_at_others_seconds
            for member in list(self._members):
                if (member.ours is None and not others_too) or not member.lock.acquire(
                    blocking=False
                ):
                    continue
                # What is to be served is read with the lock held: whoever changes it waits for the
                # lock before it syncs.
                try:
                    serving = self._serving
                    if serving is not None and not over.is_set():
                        member.look_after(*serving, self._base(serving[0]), self._handover)
                except Exception:  # the thread must not end; the loop will find what is wrong
                    logger.exception("looking after %s failed", member.server.base_url)
                finally:
                    member.lock.release()
            if others_too:
                looked_at_others = time.monotonic()


def _environments(config: TrainConfig) -> list[dict[str, str]]:
    """Return, for each of our servers, the environment variables that give it its share of this
    machine.
    """
    split = config.placement == "split" and not is_cpu_build()
    servers = config.servers_here
    if servers == 0 or (servers == 1 and not split):
        return [{} for _ in range(servers)]
    if is_cpu_build():
        return [thread_variables(servers) for _ in range(servers)]
    # It gives out the devices.
    if "ray" in (config.server.get(f"distributed{dash}executor{dash}backend") for dash in "_-"):
        return [{} for _ in range(servers)]
    devices = visible_devices()
    if split:
        devices = divided_devices(devices, config.processes_here)[1]
    return [
        {"CUDA_VISIBLE_DEVICES": share}
        for share in shares_of_devices(servers, gpus_of_a_server(config.server), devices)
    ]
