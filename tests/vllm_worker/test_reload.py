"""Reloads of parameters that a model writes itself, without a server. tools/check_models.py serves
a real gpt-oss.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.e2e  # vLLM is imported


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(2, 4, 3))
        self.w2_bias = nn.Parameter(torch.zeros(2, 3))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4))


class GptOssForCausalLM(nn.Module):
    """Loads as vLLM's class of this name does: its experts are turned and copied, its sinks written
    through `.data`.
    """

    def __init__(self):
        super().__init__()
        self.experts, self.attention, self.norm = (
            Experts(),
            Attention(),
            nn.LayerNorm(3, bias=False),
        )

    @torch.no_grad()
    def load_weights(self, weights):
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameter = parameters[name]
            if "w13" in name:
                parameter.copy_(weight.permute(0, 2, 1).contiguous())
            elif "w2" in name:
                parameter.copy_(weight)
            elif "sinks" in name:
                parameter.data.copy_(weight.narrow(0, 0, 4))
            else:
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)


def test_what_a_model_writes_itself_is_kept_at_every_reload():
    """The parameters stay the same objects, and captured graphs see the new numbers."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    from ttrl.vllm_worker.reload import KeepDirectWrites

    model = GptOssForCausalLM()
    record_metadata_for_reloading(model)
    held = dict(model.named_parameters())
    addresses = {name: parameter.data_ptr() for name, parameter in held.items()}
    for _ in range(2):
        new = {"experts.w13_weight": torch.randn(2, 3, 4), "experts.w2_bias": torch.randn(2, 3)}
        new |= {"attention.sinks": torch.randn(6), "norm.weight": torch.randn(3)}
        initialize_layerwise_reload(model)
        with KeepDirectWrites(model):
            model.load_weights(new.items())
        finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))
        found = dict(model.named_parameters())
        assert {name: parameter.data_ptr() for name, parameter in found.items()} == addresses
        assert torch.equal(found["experts.w13_weight"], new["experts.w13_weight"].permute(0, 2, 1))
        assert torch.equal(found["experts.w2_bias"], new["experts.w2_bias"])
        assert torch.equal(found["attention.sinks"], new["attention.sinks"][:4])
        assert torch.equal(found["norm.weight"], new["norm.weight"])
