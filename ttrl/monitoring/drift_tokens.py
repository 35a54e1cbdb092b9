"""The tokens on which sampler and trainer differ most, with what stands around them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ttrl.data.packing.pack import PackedTensors, unpack
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.reader import read_run
from ttrl.run_folder.token_text import run_token_text
from ttrl.system.files import read_jsonl

_BEFORE, _AFTER = 12, 4  # tokens of context


@dataclass(frozen=True)
class WorstToken:
    """One token that was sampled."""

    task_id: str
    sample: int
    place: int
    """Its number among the generated tokens, from 0."""
    position: int
    """In the whole sequence."""
    token_id: int
    text: str
    before: str
    after: str
    trainer: float | None
    sampler: float | None
    as_sent: bool | None
    """Whether the packed sequence up to it is, id by id, what the server said it sampled from; None where the server gave no ids
    or the sample has several turns."""


def worst_tokens(folder: RunFolder, number: int, drift: dict[str, Any], version: int) -> list[WorstToken]:
    """Of the tokens that policy `version` sampled, the furthest first. Raises PackError where the pack cannot be read."""
    chosen = [one for one in drift.get("worst") or [] if one["version"] == version]
    if not chosen:
        return []
    path = folder.iteration(number).path
    packed = PackedTensors.load(path / "packed.safetensors")
    text = run_token_text(read_run(folder.path), number) or (lambda token: f"⟨{token}⟩")
    sent = _sent(path, {packed.samples[int(packed.sample_ids[one["row"], one["position"]])].task_id for one in chosen})
    found = [_described(packed, one, text, sent) for one in chosen]
    # Samples of a group that begin alike have the same worst token: the first of them is enough.
    same: dict[tuple[str, int, int, str], WorstToken] = {}
    for token in found:
        same.setdefault((token.task_id, token.position, token.token_id, token.before), token)
    return list(same.values())


def _sent(path: Any, tasks: set[str]) -> dict[tuple[str, int], list[int]]:
    """Prompt and completion ids of single-turn samples of some tasks, as the server gave them."""
    found: dict[tuple[str, int], list[int]] = {}
    for row in read_jsonl(path / "rollouts.jsonl"):
        if row["task_id"] in tasks and row.get("prompt_token_ids") and row.get("token_ids") and not row.get("turns"):
            found[row["task_id"], row["sample"]] = [*row["prompt_token_ids"], *row["token_ids"]]
    return found


def _described(
    packed: PackedTensors, one: dict[str, Any], text: Callable[[int], str], sent: dict[tuple[str, int], list[int]]
) -> WorstToken:
    row, position = one["row"], one["position"]
    alone = packed.rows([row])
    number = int(alone.sample_ids[0, position])
    sample = unpack(alone)[number]
    place = int(alone.input_pos[0, position]) + 1  # of the token that is predicted from here
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
        trainer=one["trainer"],
        sampler=one["sampler"],
        as_sent=None if known is None else known[: place + 1] == ids[: place + 1],
    )


def describe(token: WorstToken) -> str:
    """One line for people."""

    def shown(text: str) -> str:
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

    def value(number: float | None) -> str:
        return "not finite" if number is None else f"{number:.4f}"

    return (
        f"  sampler {value(token.sampler)}, trainer {value(token.trainer)}: task {token.task_id!r}, sample {token.sample}, token "
        f"{token.place} (position {token.position}, id {token.token_id}): …{shown(token.before)}[{shown(token.text)}]"
        f"{shown(token.after)}…"
    )
