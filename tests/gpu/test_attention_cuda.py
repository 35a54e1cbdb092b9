"""The CUDA way of attention against the CPU's, in float32. Written without a GPU at hand: never run yet."""

import pytest
import torch
from support.tiny_models import random_samples

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.training.kernels.attention import attend, attention_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (30, None), (None, 1.5), (30, 1.5)])
def test_flex_attention_equals_the_cpu_forward_and_backward(window, soft_cap):
    packed = packed_tensors_from_tokenized_results(random_samples(1, prompts=(40, 90, 1), longest=60), seq_len=512, pad_id=0)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(packed.num_rows, 4, 512, 64, generator=generator)
    k, v = (torch.randn(packed.num_rows, 2, 512, 64, generator=generator) for _ in range(2))
    weight = torch.randn(q.shape, generator=generator)
    results = []
    for device in ("cpu", "cuda"):
        inputs = [part.to(device).requires_grad_() for part in (q.clone(), k.clone(), v.clone())]
        ids = (tensor.to(device) for tensor in (packed.group_ids, packed.parent_ids, packed.input_pos))
        out = attend(*inputs, attention_plan(*ids, torch.float32), soft_cap=soft_cap, window=window)
        out = out * (packed.group_ids >= 0).to(device)[:, None, :, None]  # what stands at padding is of no use
        (out * weight.to(device)).sum().backward()
        results.append([out.detach().cpu(), *(part.grad.cpu() for part in inputs)])
    for expected, flex in zip(*results, strict=True):
        torch.testing.assert_close(flex, expected, rtol=1e-3, atol=1e-3)
