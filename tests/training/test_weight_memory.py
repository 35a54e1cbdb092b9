"""Weights held out in memory: what others read there is the policy, by its names, whoever holds
which part of it.
"""

import dataclasses
import hashlib
import os

import pytest
import torch
from safetensors.torch import load_file, save
from support.handing_over import HandingOver
from support.tiny_models import load_policy_in

from ttrl.errors import StorageError
from ttrl.training.checkpoints import hand_over, save_checkpoint
from ttrl.training.parallel import weight_memory
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.weight_memory import Held, WeightMemory

HERE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def read(path, parts):
    """The tensors, with each part held to its digest, and every element in one part."""
    weights = load_file(path)
    left = {name: torch.ones(tensor.shape, dtype=torch.int) for name, tensor in weights.items()}
    for name, starts, lengths, sha in parts:
        part = tuple(
            slice(start, start + length) for start, length in zip(starts, lengths, strict=True)
        )
        assert digest(weights[name][part]) == sha
        left[name][part] -= 1
    assert not any(map(torch.any, left.values()))
    return weights


@pytest.mark.long(but=["fp32-gpt2", "bf16-phi3"])
@pytest.mark.parametrize("family", ["qwen2", "qwen2-tied", "phi3", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_is_what_a_checkpoint_would_be(family, dtype, model_folder, tmp_path):
    """Long for the other families: each only has other names for the same matrices."""
    start, memory = model_folder(family), WeightMemory(HERE)
    policy = load_policy_in(start, torch.float32)
    save_checkpoint(tmp_path / "checkpoint", policy, start, HERE, checkpoint_dtype=dtype)
    stored = load_file(tmp_path / "checkpoint" / "model.safetensors")
    if policy.decoder.config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)  # the worker makes it from the embeddings
    parts = hand_over(memory, policy, start, dtype)
    held = read(memory.path, parts)
    assert held.keys() == stored.keys() and all(
        torch.equal(held[name], stored[name]) for name in held
    )
    memory.close()


def test_parts_of_any_number_of_dimensions_are_named_with_their_place():
    memory = WeightMemory(HERE)
    tensors = [
        Held("v", (torch.ones(5), torch.zeros(2))),
        Held("m", (torch.ones(3, 4),)),
        Held("c", (torch.ones(2, 3, 4, 5),)),
    ]
    parts = memory.write(tensors, torch.float32)
    assert [part[:3] for part in parts] == [
        *(("v", [0], [5]), ("v", [5], [2]), ("m", [0, 0], [3, 4])),
        ("c", [0, 0, 0, 0], [2, 3, 4, 5]),
    ]
    read(memory.path, parts)
    memory.close()


def test_the_next_weights_lie_in_the_same_place_and_it_is_gone_with_its_process():
    memory = WeightMemory(HERE)
    first = memory.write(
        [Held("a", (torch.ones(3, 2),)), Held("b", (torch.ones(4),))], torch.float32
    )
    place = memory.path
    read(place, first)
    second = memory.write(
        [Held("a", (torch.full((3, 2), 2.0),)), Held("b", (torch.ones(4),))], torch.float32
    )
    assert memory.path == place and second[0] != first[0]
    assert torch.equal(read(place, second)["a"], torch.full((3, 2), 2.0))
    # Another layout.
    fused = memory.write([Held("a", (torch.zeros(1, 2), torch.ones(2, 2)))], torch.bfloat16)
    assert read(memory.path, fused)["a"].tolist() == [[0, 0], [1, 1], [1, 1]]
    memory.close()
    assert not os.path.exists(memory.path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_copied_in_pieces(dtype):
    """Of whole rows, also where the part lies apart in the whole; its digest is that of all of
    them.
    """
    for shape, columns in (
        ((100,), slice(None)),
        ((37, 5), slice(None)),
        ((37, 50), slice(20, 44)),
        ((3, 4, 5), slice(1, 3)),
    ):
        whole, part = torch.zeros(shape, dtype=dtype), torch.randn(shape)
        rows = (slice(None), columns)[: len(shape)]
        digested = weight_memory._copy(part[rows], whole[rows], piece_bytes=64)
        assert torch.equal(whole[rows], part[rows].to(dtype)) and digested.hex() == digest(
            part[rows].to(dtype)
        )
        assert whole.count_nonzero() <= part[rows].numel()


def test_without_memory_for_it(files_of_at_most):
    free = [10.0]
    memory = WeightMemory(dataclasses.replace(HERE, memory=lambda: (1e9, free[0])))
    held = [Held("a", (torch.ones(3),))]
    refused = r"no 0\.0 GiB of memory for them: "
    with pytest.raises(StorageError, match=refused + "not enough"):
        memory.write(held, torch.float32)
    free[0] = 1e9
    with files_of_at_most(10), pytest.raises(StorageError, match=refused + "File too large"):
        memory.write(held, torch.float32)
    parts = memory.write(held, torch.float32)
    read(memory.path, parts)
    memory.close()


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family, tensor_parallel, processes", [("phi3", 2, 2), ("gpt2", 2, 4)])
def test_ranks_write_what_they_hold(family, tensor_parallel, processes, model_folder):
    """Only several ranks hold parts.

    Long: only this divides columns, and with four processes a tensor twice. Ranks that hold rows:
    tests/e2e/test_resident.py. What they write, without processes: above.
    """
    start, whole = model_folder(family), WeightMemory(HERE)
    with HandingOver(start, processes, tensor_parallel) as trainer:
        said = [trainer.hold_out(start) for _ in range(2)][1]
        held = read(said["memory"], said["parts"])
        assert len(said["parts"]) > len(held)  # nothing was gathered
        parts = hand_over(whole, load_policy_in(start, torch.float32), start, "fp32")
        alone = read(whole.path, parts)
        assert save(held) == save(alone)
    whole.close()
    assert not os.path.exists(said["memory"])
