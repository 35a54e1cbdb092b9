"""Choose settings to fit a trainer and its servers into the assigned GPUs.

Memory held on a GPU by one while the other works is counted. A share of each GPU stays free: the
estimates of `ttrl.costs` are good to about 10%.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ttrl.configs.base import Settings
from ttrl.configs.run import TrainConfig
from ttrl.configs.vllm_arguments import lacks_argument
from ttrl.costs.memory import Workload, training_memory
from ttrl.costs.parameters import model_shape
from ttrl.costs.server_memory import Serving, beyond_budget, server_memory, token_cache_bytes
from ttrl.families.values import model_settings
from ttrl.plans.expected_lengths import PROMPT_TOKENS, Assumptions, completion_mean
from ttrl.plans.memory_plan import (
    argument,
    given_memory,
    host_needs,
    server_leaves,
    serving_of,
    shares_memory,
    trainer_leaves,
)
from ttrl.plans.open_settings import FULL, LADDER, Choices, recipe_of, value_of, with_values
from ttrl.text import counted, gib

_MOST = 0.95
"""Largest share of a GPU for trainer and server. On an H100, gaps between tensors took 2 to 11% of
their bytes; estimates have 6%.
"""
_IN_TURN = 0.85  # of a GPU, for a server taking turns with a trainer
_SERVED = 0.97  # of a GPU, for a server and everything else on it; the server measures its own use
_BESIDE = 0.35  # of a GPU, for a server that stays while the trainer works, if there is room
_SAMPLES = 4  # row lengths; the least room in a server's cache
_VLLM_SEQUENCES = 256  # per step: vLLM's lowest default on a GPU
_MOST_SEQUENCES = 1024  # per step: vLLM's highest default
_FEWEST_SEQUENCES = 64
_SMALL_STEP = 4096  # tokens per step on GPUs below 70 GiB; vLLM's default is 2,048
_FEWEST_TOKENS = 2048
_MOST_POSITIONS = 32_768  # per microbatch: more is hardly faster
_IN_HOST = ("cpu_offload", "optimizer_on_cpu")


@dataclass(frozen=True)
class Placed:
    """Hold the processes and their sharing of GPUs, before any memory figures."""

    values: Mapping[str, Any]
    serving: int
    """GPUs for servers."""
    reasons: Mapping[str, str]
    from_files: tuple[str, str]
    """Value of `weight_sync` when weights do not go through memory, and the reason."""


@dataclass(frozen=True)
class _Server:
    """Hold a server's needs on each of its GPUs."""

    serving: Serving
    needed: float
    """Smallest working budget in bytes."""
    length: int | None
    """The context, if the model's own is too long."""


class Fit:
    """Choose a config's other open settings for the assigned GPUs."""

    def __init__(
        self,
        model: Mapping[str, Any],
        config: TrainConfig,
        placed: Placed,
        memory: float,
        count: int,
        host: float | None,
    ) -> None:
        """Start from a choice of GPUs. memory: bytes of each; host: bytes of the machine's own
        memory.
        """
        self.model = model
        self.given = config
        self.placed = placed
        self.memory = memory
        self.count = count
        self.host = host
        self.values: dict[str, object] = {}
        self.reasons: dict[str, str] = {}
        for name, value in placed.values.items():
            self._add(name, value, placed.reasons[name])
        config = self.config
        self.base = recipe_of(config)
        self.own = serving_of(model, config, cuda=True, memory=memory)
        self.fixed = given_memory(config, memory)
        """Server bytes set in the config."""
        self.together = shares_memory(config, cuda=True)
        self.waiting = sum(trainer_leaves(config, self.base).values())
        """Bytes of a GPU kept by the trainer while servers work."""
        longest = model_settings(model).get("max_position_embeddings")
        self.context = int(longest or config.seq_len)
        self.sample = PROMPT_TOKENS + completion_mean(config, Assumptions())
        """Assumed tokens of a sample and its prompt."""

    @property
    def config(self) -> TrainConfig:
        """Return the config with the choices made so far."""
        return with_values(self.given, self.values)

    def choices(self) -> Choices:
        """Choose the config's open settings, and name any misfit."""
        takes_the_rest = self.together and self.fixed is None
        server = self._servers(0.5 if takes_the_rest else 1.0)
        served = self._alone(server.serving)
        if not takes_the_rest:
            server = self._sequences(server, served)
        kept = self._kept(server)
        wanted = kept
        if takes_the_rest and kept:
            wanted = max(kept, _BESIDE * self.memory)
        peak = self._training(kept, wanted)
        if takes_the_rest:
            beyond = sum(beyond_budget(server.serving).values())
            served = self._share(peak + beyond, FULL)
            server = self._sequences(server, served)
        if self.config.servers:
            if self.together:
                why = "the rest, next to the trainer"
            else:
                why = "no other process needs it meanwhile"
            text = f"{gib(served)} of {gib(self.memory)}: {why}"
            self._add("server.gpu_memory_utilization", round(served / self.memory, 2), text)
        self._read_files_if_need_be()
        config = self.config
        gpus = server.serving.tensor_parallel * server.serving.stages
        problem = _missing(config, self.placed.serving, self.count, gpus)
        if problem is not None:
            return Choices(config, self.reasons, memory=self.memory, problem=problem)
        needed = server.needed if config.servers_here else 0.0
        problem = self._problem(server, peak, kept, served)
        return Choices(config, self.reasons, peak, kept, needed, self.memory, problem)

    def _add(self, name: str, value: Any, why: str) -> None:
        """Choose a setting, unless the config has set it."""
        if value_of(self.given, name) is None:
            self.values[name] = value
            self.reasons[name] = why

    # The servers

    def _share(self, taken: float, most: float) -> float:
        """Return the bytes for a server, in hundredths of a GPU; others have `taken`."""
        left = math.floor(100 * (_SERVED - taken / self.memory)) / 100
        return self.memory * max(0.05, min(most, left))

    def _alone(self, serving: Serving) -> float:
        """Return the bytes for a server while its GPUs have no working trainer."""
        if self.fixed is not None:
            return self.fixed
        if self.config.placement == "split":
            most = FULL
        else:
            most = _IN_TURN
        return self._share(self.waiting + sum(beyond_budget(serving).values()), most)

    def _servers(self, part: float) -> _Server:
        """Choose the servers and their settings.

        part: of their memory without a trainer.
        """
        server = self._spread(part)
        serving = server.serving
        each = serving.tensor_parallel * serving.stages
        servers = self.config.servers
        if servers is None:
            servers = max(1, self.placed.serving // each)
        if not servers:
            return server
        room = f"{gib(server.needed)} of each GPU for weights, steps and cache at least"
        self._add("server.tensor_parallel_size", serving.tensor_parallel, room)
        there = counted(self.placed.serving, "GPU")
        self._add("servers", servers, f"{there} for servers, {each} for each")
        if server.length is not None:
            why = "the length of a row: the cache has no room for the model's whole context"
            self._add("server.max_model_len", server.length, why)
        if _has_chunks(self.given):
            wide = gib(server_memory(self.model, serving)["activations"])
            why = f"tokens of a step, with widest activations of {wide}"
            self._add("server.max_num_batched_tokens", serving.step_tokens, why)
        if serving.suspends:
            why = "frees NCCL's buffers in sleeping servers"
            self._add("server.enable_nccl_comm_suspend", True, why)
        return server

    def _spread(self, part: float) -> _Server:
        """Find the fewest GPUs to hold a server, with a busy server's cache or else a small one.

        Prefer smaller steps to a context shorter than the model's, and a shorter context to more
        GPUs.
        """
        caches = [_SAMPLES * min(self.context, self.given.seq_len)]
        if part == 1.0:
            caches.insert(0, max(*caches, math.ceil(_FEWEST_SEQUENCES * self.sample)))
        tried = []
        for cache, parallel in itertools.product(caches, self._sizes()):
            found = []
            for tokens in self._steps():
                found += self._needs(parallel, tokens, cache)
            found.sort(key=lambda one: one.length is not None)
            tried += found
            for one in found:
                if one.needed <= part * self._alone(one.serving):
                    return one
        return min(tried, key=lambda one: one.needed)

    def _sizes(self) -> list[int]:
        """Return the possible numbers of GPUs for a server's layers, ascending."""
        if argument(self.given, "tensor_parallel_size", None) is not None:
            return [self.own.tensor_parallel]
        most = self.placed.serving // max(1, self.config.servers or 1)
        heads = model_shape(self.model).heads
        return [n for n in (1, 2, 4, 8, 16) if n <= most and heads % n == 0] or [1]

    def _steps(self) -> list[int]:
        """Return the possible tokens per step, descending."""
        if not _has_chunks(self.given) or argument(self.given, "max_num_batched_tokens", None):
            return [self.own.step_tokens]
        fewest = _FEWEST_TOKENS
        if argument(self.given, "max_num_seqs", None) is not None:
            fewest = max(fewest, self.own.sequences)  # vLLM refuses fewer tokens than sequences
        most = max(_SMALL_STEP, self.own.step_tokens)
        steps = [most // divisor for divisor in (1, 2, 4, 8)]
        return [tokens for tokens in steps if tokens >= fewest] or [fewest]

    def _needs(self, parallel: int, step_tokens: int, cache: int) -> list[_Server]:
        """Return a server's needs with the model's whole context, and with a shorter one.

        cache: least tokens in its cache.
        """
        sequences = self.own.sequences
        if argument(self.given, "max_num_seqs", None) is None:
            sequences = min(_FEWEST_SEQUENCES, step_tokens)
        serving = dataclasses.replace(
            self.own,
            tensor_parallel=parallel,
            step_tokens=step_tokens,
            sequences=sequences,
            suspends=self._suspends(parallel * self.own.stages),
        )
        fixed = sum(server_memory(self.model, serving).values())
        token = token_cache_bytes(self.model, serving)
        length = self.given.context or self.context
        whole = _Server(serving, fixed + max(cache, length) * token, None)
        if self.given.context:
            return [whole]
        row = min(self.context, self.given.seq_len + 1)
        return [whole, _Server(serving, fixed + max(cache, row) * token, row)]

    def _suspends(self, gpus: int) -> bool:
        """Return whether servers on `gpus` GPUs each free NCCL's buffers to sleep."""
        name = "enable_nccl_comm_suspend"
        if argument(self.given, name, None) is not None:
            return self.own.suspends
        return gpus > 1 and self.config.server_sleeps and not lacks_argument(name)

    def _sequences(self, server: _Server, budget: float) -> _Server:
        """Choose the sequences per step: an iteration's, if the cache has room for them."""
        config = self.config
        if argument(config, "max_num_seqs", None) is not None or not config.servers:
            return server
        serving = server.serving
        samples = config.tasks_per_iteration * config.samples_per_task
        samples = math.ceil(samples / config.servers_in_all)
        most = min(_MOST_SEQUENCES, serving.step_tokens // 4)  # leaves prompts room in a step
        wanted = min(most, max(_VLLM_SEQUENCES, 8 * math.ceil(samples / 8)))
        token = token_cache_bytes(self.model, serving)
        longest = self.given.context or server.length or self.context
        for sequences in range(wanted, min(_FEWEST_SEQUENCES, wanted) - 1, -8):
            serving = dataclasses.replace(serving, sequences=sequences)
            room = budget - sum(server_memory(self.model, serving).values())
            # vLLM only starts if its cache holds one sequence of the full context.
            if room >= max(sequences * self.sample, longest) * token:
                break
        why = f"sequences of a step; an iteration has {counted(samples, 'sample')} for a server"
        if serving.sequences < wanted:
            long = f"{self.sample:,.0f} tokens"
            why = f"sequences of a step; the cache has room for no more of {long} (assumed)"
        elif samples < _VLLM_SEQUENCES:
            why += ", and vLLM takes no fewer by itself"
        self._add("server.max_num_seqs", serving.sequences, why)
        return dataclasses.replace(server, serving=serving)

    def _kept(self, server: _Server) -> float:
        """Return the bytes of a GPU kept by servers while the trainer works."""
        if not self.config.servers_here:
            return 0.0
        if not self.together:
            return sum(server_leaves(self.model, self.config, server.serving).values())
        if self.fixed is None:
            budget = server.needed
        else:
            budget = self.fixed
        return budget + sum(beyond_budget(server.serving).values())

    # The trainer

    def _training(self, kept: float, wanted: float) -> float:
        """Choose the cheapest trainer settings that fit, or else those with the lowest need.

        kept, wanted: bytes of a GPU for servers meanwhile, at least and at best. Returns the peak.
        """
        ranks = max(1, self.config.processes // self.base.tensor_parallel)
        workload = Workload(row_length=self.given.seq_len, rows=16)
        found = []
        for settings in self._ladder():
            recipe = dataclasses.replace(self.base, **settings)
            peak = training_memory(self.model, recipe, workload, device="cuda", ranks=ranks).peak
            found.append((peak, settings))
            if peak + wanted <= FULL * self.memory:
                break
        peak, settings = found[-1]
        if peak + wanted > FULL * self.memory:
            tight = [one for one in found if one[0] + kept <= _MOST * self.memory]
            if tight:  # among equal results, the one with most room for an error
                optimizer = tight[0][1]["optimizer"]
                found = [one for one in tight if one[1]["optimizer"] == optimizer]
            peak, settings = min(found, key=lambda one: one[0])
        why = f"{gib(peak)} of {gib(self.memory)} at the trainer's peak"
        if kept:
            why += f", next to {gib(kept)} kept by servers"
        for name, value in settings.items():
            self._add(f"training.{name}", value, why)
        return peak

    def _ladder(self) -> Iterator[Settings]:
        """Yield the trainer's settings in the order of their cost.

        Settings without effect on results come before moments in 8 bits.
        """
        base = self.base
        given = {name: x for name, x in self.given.recipe_settings.items() if name in LADDER}
        optimizers = ["adamw"]
        if not (base.optimizer_on_cpu or base.cpu_offload):
            optimizers.append("adamw_8bit")
        ways = [(False, False), (True, False)]
        if base.checkpoint_every == 1 and base.checkpoint_keeps == "nothing":
            ways.append((True, True))
        rows = [n for n in (64, 32, 16, 8, 4, 2) if n * self.given.seq_len <= _MOST_POSITIONS]
        seen = []
        for optimizer, way, number in itertools.product(optimizers, ways, [*rows, 1]):
            settings = dict(zip(LADDER, (optimizer, *way, number), strict=True)) | given
            if settings not in seen and self._may_offload(settings):
                seen.append(settings)
                yield settings

    def _may_offload(self, settings: Mapping[str, Any]) -> bool:
        """Return whether activations may be placed as `settings` ask.

        The host needs room for them. Recomputation keeps them few enough for the trip there and
        back.
        """
        if not settings["activation_offloading"] or self.base.activation_offloading:
            return True
        if not settings["activation_checkpointing"]:
            return False
        if self.host is None:
            return True
        config = with_values(self.config, {f"training.{name}": x for name, x in settings.items()})
        if value_of(self.given, "weight_sync") is None:  # files take less of it than memory
            config = with_values(config, {"weight_sync": self.placed.from_files[0]})
        return self._held_in_host(config) <= self.host

    # What does not fit

    def _held_in_host(self, config: TrainConfig) -> float:
        return sum(host_needs(self.model, config, recipe_of(config)).values())

    def _read_files_if_need_be(self) -> None:
        """Choose files for the servers if the host's memory has no room for the weights."""
        if self.host is None or self.values.get("weight_sync") != "memory":
            return
        held = self._held_in_host(self.config)
        if held <= self.host:
            return
        sync, meanwhile = self.placed.from_files
        have = f"the machine's {gib(self.host)} of memory"
        room = f"without files, ttrl would need {gib(held)} of {have}"
        self.values["weight_sync"] = sync
        self.reasons["weight_sync"] = f"{meanwhile}; {room}"
        every = self.given.save_every
        if every > 1:
            why = f"not {every}, because servers read the files of each iteration: {room}"
            self.values["save_every"] = 1
            self.reasons["save_every"] = why

    def _problem(self, server: _Server, peak: float, kept: float, served: float) -> str | None:
        """Describe the misfit; None if everything fits."""
        config = self.config
        whole = gib(self.memory)
        if peak + kept > _MOST * self.memory:
            who = f"the trainer needs {gib(peak)} of each GPU"
            if kept:
                if self.together:
                    other = "a server beside it"
                else:
                    other = "a sleeping server keeps"
                who += f", and {other} {gib(kept)}"
            spare = f"{1 - _MOST:.0%} must stay free, for gaps between tensors"
            return f"does not fit: {who}, but a GPU has {whole}; {spare}"
        if config.servers_here and server.needed > served:
            parallel = f"tensor_parallel_size {server.serving.tensor_parallel}"
            what = f"{gib(server.needed)} of each GPU for weights and cache ({parallel})"
            return (
                f"does not fit: a server needs {what}, but can have only {gib(served)} of {whole}"
            )
        others = self.waiting + sum(beyond_budget(server.serving).values())
        if config.servers_here and not self.together and served + others > self.memory:
            budget = f"gpu_memory_utilization gives a server {gib(served)} of {whole}"
            lower = math.floor(100 * (1 - others / self.memory)) / 100
            way = f"set it to {lower:g} at most"
            return f"does not fit: {budget}, and contexts and NCCL take {gib(others)}; {way}"
        there = [name for name in _IN_HOST if config.recipe_settings.get(name)]
        if self.host is not None and there:
            # The trainer works there. Files can replace memory for parts merely waiting there.
            held = self._held_in_host(config)
            if held > self.host:
                room = f"the machine's own memory, but that is {gib(self.host)}"
                return f"does not fit: {there[0]} needs {gib(held)} of {room}"
        return None


def _missing(config: TrainConfig, serving: int, count: int, each: int) -> str | None:
    """Describe the missing GPUs. each: GPUs of a server."""
    there = counted(count, "GPU")
    processes = config.processes_here
    servers = config.servers_here
    if processes > count:
        has = f"this machine has {there}; each process needs one of its own"
        return f"nproc_per_node is {processes}, but {has}"
    if config.placement == "split" and processes >= count and servers:
        none = f"with {there}, none is left to serve"
        return f"placement is 'split' with nproc_per_node {processes}, but {none}"
    if servers * each > serving:
        few = f"of {there}, {serving} can serve; ask for fewer"
        return f"servers is {servers}, with {each} GPUs each, but {few}"
    return None


def _has_chunks(config: TrainConfig) -> bool:
    """Return whether servers may divide a prompt; otherwise a step must have room for all of it."""
    words = {name.replace("-", "_") for name in config.server}
    off = argument(config, "enable_chunked_prefill", True) is False
    return not off and "no_enable_chunked_prefill" not in words
