"""Keep the run's inference servers at the policy asked for, with proof. They are started when first
needed.

Requests name their weights (`ttrl.server.auth`), so a server with other weights cannot answer them.
A thread looks after the servers while they serve. If one of ours died, it is started again, once
per policy, with the reason in the log. A server of others is synced when it is back. Until then the
rest serve.
"""

import dataclasses
import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ttrl.configs.machines import divided_devices, gpus_of_a_server, shares_of_devices
from ttrl.configs.run import TrainConfig
from ttrl.configs.vllm_arguments import LORA_RANKS, lora_rank_there
from ttrl.errors import ServerDiedError, ServerError, WeightSyncError
from ttrl.facts import Sync
from ttrl.records import Endpoint, Handover
from ttrl.server.connection import Bring, JoinedServer, ServerConnection
from ttrl.server.cpu import is_cpu_build, thread_variables
from ttrl.server.model_folder import base_of_adapter, merge_adapter
from ttrl.server.vllm import VLLMServer
from ttrl.system.console import Console
from ttrl.system.gpus import visible_devices
from ttrl.weights.member import Member, Policy, in_thread
from ttrl.weights.sync import SyncReport, sync_weights

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"
MAX_DOWNTIME = 240.0
"""Seconds: requests of a rollout wait so long for a server to be back."""


def make_server(
    config: TrainConfig,
    model_folder: Path,
    log_path: Path,
    *,
    env: dict[str, str] | None = None,
    adapters: bool = False,
    kind: type[VLLMServer] = VLLMServer,
    cpu: bool | None = None,
) -> VLLMServer:
    """Return a server of a run, not started yet. Raises ConfigError for arguments in
    `config.server` set by ttrl itself.

    cpu: whether vLLM is built for CPUs; None: as the installed one.
    """
    if cpu is None:
        cpu = is_cpu_build()
    extra: dict[str, Any] = {}
    if adapters:
        rank = lora_rank_there(model_folder, config.recipe_config({}).lora_rank or 1)
        extra["max_lora_rank"] = next(
            allowed for allowed in LORA_RANKS if allowed >= rank or allowed == LORA_RANKS[-1]
        )
    if config.recipe_config({}).router_replay:
        extra["enable_return_routed_experts"] = True
    if config.server_sleeps and not cpu:
        extra["enable_sleep_mode"] = True
    extra.update(config.server)
    max_model_len = extra.pop("max_model_len", None)
    return kind(
        model_folder,
        served_model_name=MODEL_NAME,
        log_path=log_path,
        dtype=served_dtype(config),
        max_model_len=max_model_len,
        extra_args=extra,
        seed=config.seed,
        env=env,
        serves_adapters=adapters,
        start_timeout=config.start_timeout,
        cpu=cpu,
    )


def joined_servers(config: TrainConfig, bring: Bring | None = None) -> list[JoinedServer]:
    """Return the run's `joined_servers`. bring: brings them adapters; None: they read whole weights
    on a shared file system.
    """
    keys = config.joined_keys()
    return [
        JoinedServer(
            url,
            served_model_name=MODEL_NAME,
            dtype=served_dtype(config),
            api_key=keys[url],
            serves_adapters=bring is not None,
            bring=bring,
        )
        for url in config.joined_servers
    ]


def served_dtype(config: TrainConfig) -> str:
    """Return the dtype of a run's servers, as vLLM calls it."""
    if config.dtype == "bf16":
        return "bfloat16"
    return "float32"


class PolicyServer:
    """One vLLM server or several at the run's newest policy.

    others: given the model to start with, returns the servers started by others; None: the run's
    `joined_servers`. own, sync: the class of the servers started here, and the function to bring
    weights to any server. merge: writes merged weights into a checkpoint with an adapter.
    look_seconds: time between two looks at our servers.
    """

    def __init__(
        self,
        config: TrainConfig,
        logs: Path,
        console: Console,
        *,
        others: Callable[[Path], Sequence[JoinedServer]] | None = None,
        own: type[VLLMServer] = VLLMServer,
        sync: Callable[..., SyncReport] = sync_weights,
        merge: Callable[[Path], None] = merge_adapter,
        look_seconds: float = 1.0,
        look_at_others_seconds: float = 5.0,
    ) -> None:
        self._config = config
        self._logs = logs
        self._console = console
        self._make_others = others
        self._own = own
        self._sync = sync
        self._merge_adapter = merge
        self._look_seconds = look_seconds
        self._look_at_others_seconds = look_at_others_seconds
        self._members: list[Member] = []
        self._adapters = config.gives_adapters
        self._proven: Policy | None = None
        """The last proven policy, until another one is asked for."""
        self._serving: Policy | None = None
        """The policy of requests, while it is served. One value: no thread mixes two of them."""
        self._watching: threading.Thread | None = None
        self._over = threading.Event()

    def start(self, model_folder: Path) -> None:
        """Begin to start the servers in the background. It takes about half a minute."""
        self._merge(model_folder)
        base = self._base(model_folder)
        if not self._members:
            self._members = self._make_members(model_folder, base)
        for member in self._members:
            member.start(base)

    def serve(
        self, checkpoint: Path, handover: Handover | None = None, start_from: Path | None = None
    ) -> Sync | None:
        """Make the servers compute with `checkpoint`, all at the same time, and prove it for each.

        handover: the same weights in the memory of a trainer on this machine.
        start_from: another checkpoint of the model to start servers with, if this one is not
            written.

        Returns the facts of the sync (mode, seconds, the canary's largest difference, the reason of
        a fallback, and for several servers the number of serving ones and the problems of the
        others), None if they had these weights already. A failed server is left out with a warning
        while others serve. Raises ServerStartError, ServerDiedError, WeightSyncError if none is
        left.
        """
        if handover is not None:
            handover = dataclasses.replace(handover, is_written=start_from is None)
        if not self._members:
            if handover is not None and start_from is None:
                handover.wait_for_files(checkpoint)
            self.start(start_from or checkpoint)
        self._merge(checkpoint)
        self._serving = None
        if self._proven is None or self._proven.checkpoint != checkpoint:
            self._proven = None
            version = secrets.token_hex(16)
        else:
            version = self._proven.version
        policy = Policy(checkpoint, version, start_from or self._base(checkpoint), handover)
        if any(member.ours is not None for member in self._members):
            with self._console.waiting("starting the vLLM server"):
                for member in self._members:  # all of them start at the same time
                    with member.lock:
                        member.wait_for_start()
        had_adapters = self._adapters
        results = self._for_each(lambda member: self._bring(member, policy))
        if had_adapters and not self._adapters:  # requests ask all servers for one name
            self._merge(checkpoint)
            policy = Policy(checkpoint, version, checkpoint)
            results = self._for_each(lambda member: self._bring_merged(member, policy))
        errors = [result for result in results if isinstance(result, ServerError)]
        if len(errors) == len(results):
            raise errors[0]
        self._proven = policy
        self._serving = policy
        self._watch()
        return self._facts(results)

    def rest(self) -> None:
        """Free a device for the trainer: the servers stop, sleep or stay, as `weight_sync` says."""
        self._serving = None
        self._for_each(Member.rest)

    # For rollouts. All of it raises ServerError if no server has the last policy.

    @property
    def servers(self) -> list[ServerConnection]:
        """Return the servers proven now."""
        version = self._served_version()
        return [member.server for member in self._members if member.proven == version]

    @property
    def model_name(self) -> str:
        """Return the name of the model in requests."""
        return self._any().model_name

    def endpoints(self) -> list[Endpoint]:
        """Return the addresses of all servers, failed ones included: they take part again once they
        have these weights. A server without a fence would answer requests with any weights, so it
        is left out.
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
        """Raise ServerDiedError if all of them are gone, with the problem of each."""
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
            raise ServerError("no server is running; serve() starts one")
        return serving.version

    def stop(self) -> None:
        """End the servers, also in the middle of their start. Harmless if there are none."""
        self._serving = None
        self._proven = None
        self._over.set()
        members = self._members
        self._members = []
        for member in members:  # first of all: requests to them end, too
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

    def _make_members(self, model_folder: Path, base: Path) -> list[Member]:
        config = self._config
        mode: Literal["reload", "restart", "sleep"] = "reload"
        if config.weight_sync == "restart":
            mode = "restart"
        elif config.server_sleeps:
            mode = "sleep"
        own = [
            make_server(
                config,
                model_folder,
                self._logs / ("server.log" if config.servers_here == 1 else f"server_{number}.log"),
                env=env,
                adapters=self._adapters,
                kind=self._own,
            )
            for number, env in enumerate(server_environments(config, cpu=is_cpu_build()))
        ]
        others = joined_servers(config) if self._make_others is None else self._make_others(base)
        compare = config.weight_check == "all"
        return [
            Member(
                server,
                mode=mode if isinstance(server, VLLMServer) else "reload",
                compare=compare,
                sync=self._sync,
            )
            for server in [*own, *others]
        ]

    def _base(self, model_folder: Path) -> Path:
        """Return the model to start a server with: with adapters, their base."""
        of_this_run = model_folder.absolute().is_relative_to(
            Path(self._config.run, "iterations").absolute()
        )
        if not (self._adapters and of_this_run):
            return model_folder  # a starting model may be merged from an adapter of another run
        return base_of_adapter(model_folder) or model_folder

    def _merge(self, checkpoint: Path) -> None:
        if not self._adapters:
            self._merge_adapter(checkpoint)

    def _bring(self, member: Member, policy: Policy) -> Sync | None:
        try:
            return member.bring(policy)
        except ServerError as error:
            fetched = self._config.adapters == "mirror"  # merged weights would not be found there
            if not member.server.serves_adapters or fetched:
                raise
            if member.ours is None and isinstance(error, WeightSyncError):
                raise WeightSyncError(
                    f'{error}; if vLLM does not serve this adapter, set adapters="merged"'
                ) from error
            if member.ours is None:
                raise
            logger.warning(
                "vLLM does not serve this run's adapters; it gets merged weights from now on: %s",
                error,
            )
            self._adapters = False
            return None

    def _bring_merged(self, member: Member, policy: Policy) -> Sync | None:
        member.serve_merged()
        facts = member.bring(policy)
        if facts is None:
            return None
        return facts.replace(fell_back="vLLM does not serve this run's adapters")

    def _for_each(self, work: Callable[[Member], Any]) -> list[Any]:
        """Do some work for all members concurrently; a ServerError is a result like any other."""

        def one(member: Member) -> Any:
            with member.lock:
                try:
                    return work(member)
                except ServerError as error:
                    return error

        if len(self._members) <= 1:
            return [one(member) for member in self._members]
        done = [
            in_thread(functools.partial(one, member), "server sync") for member in self._members
        ]
        return [future.result() for future in done]

    def _facts(self, results: list[Any]) -> Sync | None:
        left_out = {}
        for member, result in zip(self._members, results, strict=True):
            if isinstance(result, ServerError):
                left_out[member.server.base_url] = str(result).splitlines()[0]
                logger.warning(
                    "%s is left out of the rollouts until it is back: %s",
                    member.server.base_url,
                    result,
                )
        facts = [result for result in results if isinstance(result, Sync)]
        if not facts:
            return None
        if len(results) == 1:
            return facts[0]
        worst = max(facts, key=lambda one: one.canary_max_difference or 0.0)
        reasons = [one.fell_back for one in facts if one.fell_back]
        return worst.replace(
            seconds=max(one.seconds or 0.0 for one in facts),
            fell_back="; ".join(reasons) or None,
            servers=len(results) - len(left_out),
            left_out=left_out,
        )

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
        while not over.wait(self._look_seconds):
            others_too = time.monotonic() - looked_at_others >= self._look_at_others_seconds
            for member in list(self._members):
                if (member.ours is None and not others_too) or not member.lock.acquire(
                    blocking=False
                ):
                    continue
                # Read the policy with the lock held: `serve` changes it, and waits for the lock
                # before it syncs.
                try:
                    serving = self._serving
                    if serving is not None and not over.is_set():
                        member.look_after(serving)
                except Exception:  # the thread must not end; the loop will meet the problem
                    logger.exception("looking after %s failed", member.server.base_url)
                finally:
                    member.lock.release()
            if others_too:
                looked_at_others = time.monotonic()


def server_environments(config: TrainConfig, *, cpu: bool) -> list[dict[str, str]]:
    """Return environment variables for each of our servers: its share of this machine. cpu: whether
    vLLM is built for CPUs.
    """
    split = config.placement == "split" and not cpu
    servers = config.servers_here
    if servers == 0 or (servers == 1 and not split):
        return [{} for _ in range(servers)]
    if cpu:
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
