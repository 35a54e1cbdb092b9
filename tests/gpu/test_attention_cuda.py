"""FlexAttention on a GPU against a dense mask in float64, on the same GPU."""

import pytest
import torch
from support.tiny_models import random_samples

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.training.kernels.attention import attend, attention_plan, dense_attend

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float64: 1e-13}
"""Of ‖difference‖/‖exact‖. bf16 rounds inputs of the products within, too: 2⁻⁹ each."""


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (8, torch.float32),
        (64, torch.bfloat16),
        (128, torch.float32),
        (256, torch.bfloat16),
        (64, torch.float64),
    ],
)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (30, 1.5)])
def test_forward_and_backward(window, soft_cap, width, dtype):
    samples = random_samples(1, prompts=(40, 90, 1, 700), longest=60)
    packed = packed_tensors_from_tokenized_results(samples, seq_len=1024, pad_id=0)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(packed.num_rows, heads, 1024, width, generator=generator)
        for heads in (4, 2, 2, 4)
    ]
    q, k, v, weight = (part.cuda().to(dtype) for part in inputs)
    ids = [tensor.cuda() for tensor in (packed.group_ids, packed.parent_ids, packed.input_pos)]
    real = (packed.group_ids >= 0).cuda()[:, None, :, None]  # what stands at padding is of no use
    results = []
    for wide in (True, False):
        own = [(part.double() if wide else part.clone()).requires_grad_() for part in (q, k, v)]
        plan = attention_plan(*ids, own[0].dtype)
        scale = width**-0.5
        if wide:
            out = dense_attend(*own, plan, scale, soft_cap, window) * real
        else:
            out = attend(*own, plan, soft_cap=soft_cap, window=window) * real
        (out * weight).sum().backward()
        results.append([out.detach().double(), *(part.grad.double() for part in own)])
    for exact, flex in zip(*results, strict=True):
        assert torch.isfinite(flex).all()
        assert float((flex - exact).norm() / exact.norm()) < LIMIT[dtype]


def test_other_lengths_compile_nothing_anew_and_the_same_input_gives_the_same_bits():
    from torch._dynamo.utils import counters

    from ttrl.training.kernels import attention

    assert attention.compiled_flex()
    found = []
    for seed, length in ((1, 300), (2, 900), (3, 2100), (3, 2100)):
        packed = packed_tensors_from_tokenized_results(
            random_samples(seed, prompts=(40, 90)), seq_len=length, pad_id=0
        )
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(packed.num_rows, h, length, 64, generator=generator).cuda().requires_grad_()
            for h in (4, 2, 2)
        )
        ids = [tensor.cuda() for tensor in (packed.group_ids, packed.parent_ids, packed.input_pos)]
        out = attend(q, k, v, attention_plan(*ids, torch.float32))
        out.square().sum().backward()
        found.append(([out.detach(), q.grad, k.grad, v.grad], counters["stats"]["unique_graphs"]))
    assert found[0][1] == found[-1][1]
    assert all(
        torch.equal(one, other) for one, other in zip(found[-1][0], found[-2][0], strict=True)
    )
