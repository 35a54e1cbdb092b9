"""Which rows each rank trains on: every row once, as many for each, steps that do not depend on the
ranks, and little waiting.
"""

import random

import pytest
import torch
from bench_packing import deal, waiting
from transformers import Qwen2Config

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.records import TokenizedResult
from ttrl.training.batches import updates
from ttrl.training.counts import row_flops
from ttrl.training.parallel.distributed import Ranks

MODEL = Qwen2Config(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
)


@pytest.fixture(scope="module")
def packed():
    draw = random.Random(3)
    samples = []
    for number in range(40):
        length = draw.randint(2, 30)
        samples.append(
            TokenizedResult(
                task_id=f"t{number}",
                sample=0,
                token_ids=[draw.randrange(50) for _ in range(length)],
                assistant_mask=[False] + [True] * (length - 1),
                input_pos=range(length),
                logprobs=[float("nan")] * length,
                prompt_length=1,
                reward=0.0,
                advantage=1.0,
            )
        )
    return packed_tensors_from_tokenized_results(samples, seq_len=30, pad_id=0)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_rows_are_dealt_out(packed, count, world_size):
    alone = updates(packed, count, (0, 1), Ranks(0, 1, torch.device("cpu")))
    ranks = [
        updates(packed, count, (0, 1), Ranks(rank, world_size, torch.device("cpu")), MODEL)
        for rank in range(world_size)
    ]
    assert len(alone) == count and all(len(mine) == count for mine in ranks)
    for step, *mine in zip(alone, *ranks, strict=True):
        assert {one.normaliser for one in mine} == {step.normaliser}
        assert {one.rows.num_rows for one in mine} == {-(-step.rows.num_rows // world_size)}
        contents = sorted(row.tolist() for one in mine for row in one.rows.tokens if row.any())
        assert contents == sorted(step.rows.tokens.tolist())
        work = row_flops(step.rows, MODEL)
        dealt = [row_flops(one.rows, MODEL) for one in mine]
        every = [cost for rank in dealt for cost in rank]
        places = [
            list(range(rank * len(dealt[0]), (rank + 1) * len(dealt[0])))
            for rank in range(world_size)
        ]
        assert waiting(every, places) == pytest.approx(waiting(work, deal(work, world_size)))
