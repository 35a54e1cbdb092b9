"""The loss of a step, Σ w·ℓ / Z, against the means that the aggregations stand for."""

import math
import random

import pytest
import torch

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.packing.packed import normaliser
from ttrl.records import TokenizedResult


def samples() -> list[TokenizedResult]:
    rng = random.Random(1)
    out = []
    for number in range(9):
        prompt, length = [1, 2, 3 + number % 3], rng.randint(1, 6)
        mask = [False] * 3 + [True] * length
        if length > 2:
            mask[4] = False
        ids = prompt + [10 * number + i for i in range(length)]
        total = len(ids)
        out.append(
            TokenizedResult(
                task_id=str(number),
                sample=0,
                token_ids=ids,
                assistant_mask=mask,
                input_pos=list(range(total)),
                logprobs=[math.nan] * total,
                prompt_length=3,
                reward=0.0,
                advantage=1.0,
            )
        )
    return out


@pytest.mark.parametrize(
    ("aggregation", "length"),
    [("token", None), ("sequence", None), ("constant", 7)],
)
def test_the_weighted_sum_is_the_mean_it_is_named_after(aggregation, length):
    results = samples()
    packed = packed_tensors_from_tokenized_results(
        results, seq_len=14, pad_id=0, aggregation=aggregation, constant_length=length
    )
    assert packed.num_rows > 2
    # Any function of the label: a loss per token that the reference can know.
    loss = (packed.labels + 1.0) ** 1.5
    per_sample = [
        [(token + 1.0) ** 1.5 for token, trained in zip(r.token_ids, r.assistant_mask) if trained]
        for r in results
    ]
    expected = {
        "token": sum(map(sum, per_sample)) / sum(map(len, per_sample)),
        "sequence": sum(sum(one) / len(one) for one in per_sample) / len(per_sample),
        "constant": sum(map(sum, per_sample)) / (len(per_sample) * 7),
    }[aggregation]
    trained = packed.labels >= 0
    assert float(torch.where(trained, loss * packed.weights, 0.0).sum()) / normaliser(
        packed
    ) == pytest.approx(expected, rel=1e-5)

    # Rows of a step in any division: weights and Z add up to those of the whole; rows of padding
    # change nothing.
    z = normaliser(packed)
    parts = [packed.pad_rows_to_multiple(4).rows(slice(rank, None, 4)) for rank in range(4)]
    assert sum(normaliser(part) for part in parts) == z
    summed = sum(
        float((part.weights * torch.where(part.labels >= 0, (part.labels + 1.0) ** 1.5, 0.0)).sum())
        for part in parts
    )
    assert summed / z == pytest.approx(expected, rel=1e-5)


def test_rows_of_padding_alone_weigh_nothing():
    packed = packed_tensors_from_tokenized_results(
        samples(), seq_len=200, pad_id=0
    ).pad_rows_to_multiple(2)
    padding = packed.rows([1])
    assert normaliser(padding) == 0.0
