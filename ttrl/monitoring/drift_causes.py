"""Find the tokens with the largest drift between sampler and trainer, and check each likely cause.

`ttrl.monitoring.drift` calls this beyond a limit. Checks read the run folder, the model and the
server. A check says "found" if it saw the cause, "ruled out" if it saw its absence, and "could not
be checked" if its evidence was unavailable. The size of the difference proves no cause.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrl.data.packing.pack import PackedTensors, unpack
from ttrl.errors import ModelFolderError
from ttrl.facts import (
    ComparedTokens,
    PackFacts,
    PrepareFacts,
    RolloutsFacts,
    SampledFacts,
    Sync,
    ValidateFacts,
    WorstPlace,
)
from ttrl.families.values import has_experts
from ttrl.monitoring.drift_report import Cause, Verdict, WorstToken
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.reader import read_mapping, read_run
from ttrl.run_folder.token_text import run_token_text
from ttrl.system.files import read_jsonl
from ttrl.system.weight_files import EMBEDDINGS, StoredTensor, stored_tensors

if TYPE_CHECKING:
    from ttrl.configs.run import TrainConfig

_BEFORE, _AFTER = 12, 4  # tokens of context


def worst_tokens(
    folder: RunFolder, number: int, drift: ComparedTokens, version: int
) -> list[WorstToken]:
    """Return the tokens of policy `version` with the largest differences, the furthest first.
    Raises PackError for an unreadable pack."""
    chosen = [one for one in drift.worst or [] if one.version == version]
    if not chosen:
        return []
    path = folder.iteration(number).path
    packed = PackedTensors.load(path / "packed.safetensors")
    text = run_token_text(read_run(folder.path), number) or (lambda token: f"⟨{token}⟩")
    tasks = {
        packed.samples[int(packed.sample_ids[one.row, one.position])].task_id for one in chosen
    }
    sent = {  # prompt and completion ids of single-turn samples, as sent by the server
        (row["task_id"], row["sample"]): [*row["prompt_token_ids"], *row["token_ids"]]
        for row in read_jsonl(path / "rollouts.jsonl")
        if row["task_id"] in tasks
        and row.get("prompt_token_ids")
        and row.get("token_ids")
        and not row.get("turns")
    }
    # Samples of a group with the same beginning share their worst token: keep the first.
    found: dict[tuple[str, int, int, str], WorstToken] = {}
    for one in chosen:
        token = _worst_token(packed, one, text, sent)
        found.setdefault((token.task_id, token.position, token.token_id, token.before), token)
    return list(found.values())


def _worst_token(
    packed: PackedTensors,
    one: WorstPlace,
    text: Callable[[int], str],
    sent: Mapping[tuple[str, int], list[int]],
) -> WorstToken:
    position = one.position
    alone = packed.rows([one.row])
    sample = unpack(alone)[int(alone.sample_ids[0, position])]
    place = int(alone.input_pos[0, position]) + 1  # of the token predicted from here
    ids = list(sample.token_ids)
    known = sent.get((sample.task_id, sample.sample))
    return WorstToken(
        task_id=sample.task_id,
        sample=sample.sample,
        place=place - sample.prompt_length,
        position=place,
        token_id=ids[place],
        text=text(ids[place]),
        before="".join(map(text, ids[max(0, place - _BEFORE) : place])),
        after="".join(map(text, ids[place + 1 : place + 1 + _AFTER])),
        trainer=one.trainer,
        sampler=one.sampler,
        as_sent=None if known is None else known[: place + 1] == ids[: place + 1],
    )


_ORDER = {"found": 0, "could not be checked": 1, "ruled out": 2}
_NEUTRAL = {
    "top_p": (1, 1.0), "top_k": (0, -1), "min_p": (0, 0.0), "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0), "repetition_penalty": (1, 1.0), "logit_bias": (None, {}),
    "min_tokens": (0,), "bad_words": (None, []), "allowed_token_ids": (None,),
    "structured_outputs": (None,), "response_format": (None,),
}  # fmt: skip
"""Sampling parameters able to change the distribution, and their neutral values."""
_SCALED_ROPE = {"yarn", "longrope", "su", "dynamic", "llama3", "linear", "mrope"}


@dataclass(frozen=True)
class Evidence:
    """The input of the checks. Unavailable parts are None or empty."""

    config: "TrainConfig"
    version: int
    drift: ComparedTokens
    model: Path
    """The checkpoint for both sampler and trainer."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's config in this iteration."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Its config.json, reduced to the text part if there are several."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Its generation_config.json."""
    sync: Sync | None = None
    """The facts of the weight sync to the server."""
    server: Mapping[str, Any] | None = None
    """vLLM's own description (vllm_config)."""
    tokenization: Mapping[str, int] = field(default_factory=dict)
    """The pack marker's counts."""
    tokens: tuple[WorstToken, ...] = ()

    def argument(self, name: str) -> Any:
        """Return an argument of the run's config for vLLM; None if unset."""
        return next(
            (value for key, value in self.config.server.items() if key.replace("_", "-") == name),
            None,
        )

    def by_default(self, value: str) -> str | None:
        """Return ttrl's default for its own servers; None for a server started by others or with a
        known configuration.
        """
        if self.server is None and not self.config.joined_servers:
            return value
        return None

    def told(self, *path: str) -> Any:
        """Return the server's value at a path of its configuration; None if unknown."""
        value: Any = self.server
        for key in path:
            if isinstance(value, Mapping):
                value = value.get(key)
            else:
                value = None
        return value


def gather_evidence(
    config: "TrainConfig",
    folder: RunFolder,
    number: int,
    drift: ComparedTokens,
    version: int,
    tokens: list[WorstToken],
    server: Mapping[str, Any] | None,
) -> Evidence:
    """Read all available evidence; never raises for missing parts."""
    model = folder.checkpoint(folder.written_version(version))
    iteration = folder.iteration(number)
    shape = read_mapping(model / "config.json")
    # The policy reached the server for one of these iterations. An iteration without training keeps
    # the previous policy.
    markers: list[PrepareFacts | SampledFacts | None] = [
        folder.iteration(version).marker(PrepareFacts)
    ]
    markers += [
        folder.iteration(n).marker(ValidateFacts)
        for n in range(version, number)
        if folder.policy_version(n) == version
    ]
    markers.append(iteration.marker(RolloutsFacts))
    syncs = [marker.sync for marker in markers if marker is not None and marker.sync]
    packed = iteration.marker(PackFacts) or PackFacts()
    return Evidence(
        config=config,
        version=version,
        drift=drift,
        recipe=read_mapping(iteration.path / "grpo.yaml"),
        model=model,
        shape=shape["text_config"] if isinstance(shape.get("text_config"), dict) else shape,
        generation=read_mapping(model / "generation_config.json"),
        sync=syncs[-1] if syncs else None,
        server=server,
        tokenization=packed.tokenization or {},
        tokens=tuple(tokens),
    )


def likely_causes(evidence: Evidence) -> list[Cause]:
    """Check all likely causes and return the found ones first."""
    checks: dict[str, Callable[[Evidence], _Checked]] = {
        "temperature": _temperature,
        "top-p, top-k and penalties": _sampling,
        "generation_config.json of the model": _generation_config,
        "logprobs mode of the server": _logprobs_mode,
        "chat template and tokenization": _tokens,
        "stale or wrong weights": _weights,
        "dtype": _dtype,
        "RoPE parameters and max_model_len": _positions,
        "padding of the vocabulary": _vocabulary,
        "scale of LoRA adapters": _adapters,
        "choice of experts": _routing,
    }
    causes = [Cause(name, *check(evidence)) for name, check in checks.items()]
    return sorted(causes, key=lambda cause: _ORDER[cause.verdict])


_Checked = tuple[Verdict, str] | tuple[Verdict, str, str]
"""Verdict, detail and, if there is one, the way out of a cause."""


def _temperature(e: Evidence) -> _Checked:
    sampled = e.config.temperature
    trained = e.recipe.get("temperature")
    if trained is None:
        return (
            "could not be checked",
            f"sampled with {sampled:g}; the recipe's config sets none",
        )
    if float(trained) != sampled:
        way = "use one temperature: the loop copies TrainConfig.temperature to the recipe"
        return ("found", f"sampled with {sampled:g}, trained with {float(trained):g}", way)
    return ("ruled out", f"{sampled:g} on both sides")


def _sampling(e: Evidence) -> _Checked:
    asked = dict(e.config.sampling)
    asked |= asked.pop("extra_body", None) or {}
    wrong = {
        key: asked[key]
        for key, neutral in _NEUTRAL.items()
        if key in asked and asked[key] not in neutral
    }
    if wrong:
        listed = ", ".join(f"{key}={value!r}" for key, value in wrong.items())
        return ("found", f"requests set {listed}", "remove them from `sampling`")
    return ("ruled out", "requests set none of them")


def _generation_config(e: Evidence) -> _Checked:
    values = {
        key: e.generation[key]
        for key, neutral in _NEUTRAL.items()
        if e.generation.get(key, neutral[0]) not in neutral
    }
    served = (
        e.told("model_config", "generation_config")
        or e.argument("generation-config")
        or e.by_default("vllm")
    )
    override = e.told("model_config", "override_generation_config") or e.argument(
        "override-generation-config"
    )
    way = 'server={"generation_config": "vllm"}'
    if override:
        return (
            "found",
            f"the server overrides sampling defaults: {override}",
            "remove override_generation_config",
        )
    if served not in (None, "vllm", "auto"):
        return ("found", f"the server takes sampling defaults from {served}", way)
    if served == "vllm":
        return ("ruled out", "the server ignores it (--generation-config vllm)")
    if not values:
        return (
            "ruled out",
            "it leaves the distribution as it is" if e.generation else "the model has none",
        )
    listed = ", ".join(f"{key}={value!r}" for key, value in values.items())
    if served is None:
        return (
            "could not be checked",
            f"the server does not report its use ({listed})",
            way,
        )
    return ("found", f"the server takes {listed} from it", way)


def _logprobs_mode(e: Evidence) -> _Checked:
    mode = (
        e.told("model_config", "logprobs_mode")
        or e.argument("logprobs-mode")
        or e.by_default("processed_logprobs")
    )
    if mode is None:
        return ("could not be checked", "the server does not report it")
    if mode == "processed_logprobs" or (mode == "raw_logprobs" and e.config.temperature == 1.0):
        return ("ruled out", f"{mode} at temperature {e.config.temperature:g}")
    return (
        "found",
        f"{mode}: not the server's sampling distribution",
        'server={"logprobs_mode": "processed_logprobs"}',
    )


def _tokens(e: Evidence) -> _Checked:
    other = [token for token in e.tokens if token.as_sent is False]
    if other:
        return (
            "found",
            f"{len(other)} of the {len(e.tokens)} worst tokens follow other ids in the pack than "
            f"on the server, such as sample {other[0].sample} of task {other[0].task_id!r}",
            "the server and the model folder differ in chat template or tokenizer; pack the "
            "server's own ids (return_token_ids)",
        )
    unaligned = e.tokenization.get("unaligned")
    if unaligned:
        way = "with token ids from the server (return_token_ids), no template is needed here"
        return (
            "found",
            f"the server returned no ids: the texts were tokenized again, and {unaligned} tokens "
            "could not be aligned",
            way,
        )
    if e.tokens and all(token.as_sent for token in e.tokens):
        return (
            "ruled out",
            "up to the worst tokens, the pack holds the server's ids",
        )
    return (
        "could not be checked",
        "the server returned no ids for these samples, or they have several turns",
    )


def _weights(e: Evidence) -> _Checked:
    if e.sync is None:
        return (
            "could not be checked",
            f"no record of a sync to policy {e.version}",
            "weight_sync='restart'",
        )
    apart = e.sync.canary_max_difference
    if apart is None:
        return ("could not be checked", "the sync reports no canary", "weight_sync='restart'")
    how = f"after {e.sync.mode or 'the sync'} the canary differed by at most {apart:.2g} nats"
    limit = 1e-3 if e.config.dtype == "fp32" else 1.0
    if apart > limit:
        return ("found", f"{how}, more than {limit:g}", "weight_sync='restart'")
    return ("ruled out", f"{how}; all judged tokens are of policy {e.version}")


def _dtype(e: Evidence) -> _Checked:
    mine = {"fp32": "float32", "bf16": "bfloat16"}[e.config.dtype]
    rounded = {
        "quantization": ("model_config", "quantization"),
        "kv-cache-dtype": ("cache_config", "cache_dtype"),
    }
    for argument, path in rounded.items():
        value = e.told(*path) or e.argument(argument)
        if value not in (None, "auto", "none", mine):
            way = (
                f"remove {argument}, or correct for it with truncated importance sampling and "
                "drift='warn'"
            )
            return (
                "found",
                f"the server computes with {argument} {value}, the trainer in {mine}",
                way,
            )
    served = e.told("model_config", "dtype")
    if isinstance(served, str) and served.removeprefix("torch.") != mine:
        return (
            "found",
            f"the server computes in {served.removeprefix('torch.')}, the trainer in {mine}",
            "use one dtype for both",
        )
    stored = {tensor.dtype for tensor in _tensors(e.model)} if mine == "float32" else set()
    if stored - {"F32"}:
        found = (
            f"the server loads weights in {', '.join(sorted(stored))}; a trainer with float32 "
            "weights has other values"
        )
        if e.recipe.get("checkpoint_dtype") == "bf16":
            return ("found", found, "training={'checkpoint_dtype': 'fp32'}")
    if isinstance(served, str):
        where = "as the server reports"
    else:
        where = "as the run's config sets"
    return ("ruled out", f"{mine} on both sides, {where}")


def _positions(e: Evidence) -> _Checked:
    means = e.drift.by_position or []
    grows = ""
    if len(means) == 4 and means[0] > 0:
        grows = (
            f"; the mean difference in the last quarter of positions is {means[3] / means[0]:.2g} "
            "times the one in the first quarter"
        )
    for argument in ("hf-overrides", "rope-scaling", "rope-theta"):
        if e.argument(argument) is not None:
            way = "put it into the model folder's config.json: both read it"
            return (
                "found",
                f"the server starts with {argument} {e.argument(argument)!r}{grows}",
                way,
            )
    rope = e.shape.get("rope_parameters") or e.shape.get("rope_scaling") or {}
    parts = [part for part in [rope, *rope.values()] if isinstance(part, Mapping)]
    kinds = _SCALED_ROPE.intersection(
        str(part.get("rope_type") or part.get("type")) for part in parts
    )
    length = e.told("model_config", "max_model_len")
    context = e.recipe.get("context") or e.shape.get("max_position_embeddings")
    if not kinds:
        return ("ruled out", f"plain RoPE, the same for any length{grows}")
    if length is None:
        return (
            "could not be checked",
            f"{', '.join(sorted(kinds))} depends on the context length{grows}",
        )
    if "longrope" in kinds and context is not None and int(length) != int(context):
        way = f"server={{'max_model_len': {context}}}"
        return (
            "found",
            f"the context is {length} on the server and {context} in the trainer, and the model's "
            "RoPE depends on it",
            way,
        )
    return (
        "ruled out",
        f"{', '.join(sorted(kinds))} with a context of {length} on the server, {context} in "
        f"the trainer{grows}",
    )


def _vocabulary(e: Evidence) -> _Checked:
    rows = _embedding_rows(e.model)
    size = e.shape.get("vocab_size")
    if rows is None or not isinstance(size, int):
        return (
            "could not be checked",
            "the checkpoint's embedding or its config.json cannot be read",
        )
    if rows != size:
        way = (
            "give the checkpoint as many rows as config.json says; padded rows take probability "
            "on one side only"
        )
        return ("found", f"the embedding has {rows} rows; config.json says {size}", way)
    return ("ruled out", f"{size} rows in the checkpoint and in config.json")


def _adapters(e: Evidence) -> _Checked:
    rank = e.recipe.get("lora_rank")
    if rank is None:
        return ("ruled out", "the run has none")
    folders = (e.model, e.model / "adapter")
    settings = (read_mapping(folder / "adapter_config.json") for folder in folders)
    adapter = next(filter(None, settings), {})
    if not adapter:
        return (
            "could not be checked",
            "the checkpoint has no adapters: the trainer merged them into it",
        )
    mine = float(e.recipe.get("lora_alpha", 16.0)) / float(rank)
    theirs = float(adapter.get("lora_alpha", 0)) / (
        float(adapter.get("r", 1)) ** (0.5 if adapter.get("use_rslora") else 1.0)
    )
    if abs(mine - theirs) > 1e-9:
        way = "write the lora_alpha and rank of the training to adapter_config.json"
        return ("found", f"{theirs:g} in adapter_config.json, {mine:g} in the trainer", way)
    return ("ruled out", f"{mine:g} on both sides")


def _routing(e: Evidence) -> _Checked:
    if not has_experts(e.shape):
        return ("ruled out", "the model has none")
    if e.recipe.get("router_replay"):
        return (
            "ruled out",
            "the trainer uses the server's experts (router_replay)",
        )
    way = (
        "set router_replay=true: trainer and server then use the same experts, and ttrl counts "
        "the differences"
    )
    return (
        "could not be checked",
        "rounding alone can change an undecided router's choice",
        way,
    )


def _tensors(model: Path) -> list[StoredTensor]:
    """Read only the headers of a checkpoint's safetensors files; for a bare adapter, those of its
    base.
    """
    tensors = []
    base = read_mapping(model / "adapter" / "ttrl_adapter.json").get("lora_base")
    folders = [Path(folder) for folder in (model, base) if folder is not None]
    files = (sorted(folder.glob("*.safetensors")) for folder in folders)
    for path in next(filter(None, files), []):
        with contextlib.suppress(OSError, ModelFolderError):
            tensors += stored_tensors(path)
    return tensors


def _embedding_rows(model: Path) -> int | None:
    for tensor in _tensors(model):
        if tensor.name.endswith(EMBEDDINGS):
            return tensor.shape[0]
    return None
