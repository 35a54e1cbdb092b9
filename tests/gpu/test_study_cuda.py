"""Float64 on a GPU: the proof before a study, and what it must notice."""

import pytest
import torch

from ttrl.errors import ConfigError
from ttrl.instruments.precision import DEVICE_LIMIT, float64_error, prove_device

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


def test_float64_is_that_of_the_cpu(record_property):
    error = float64_error(GPU, lambda policy: None)
    record_property("error", f"{error:.1e}")
    assert error <= DEVICE_LIMIT
    prove_device(GPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_that_rounds_is_noticed(dtype):
    def round_a_layer(policy):
        layer = policy.decoder.layers[1]
        layer.register_forward_hook(lambda _module, _inputs, out: out.to(dtype).double())

    with pytest.raises(ConfigError, match="some kernel there rounds"):
        prove_device(GPU, round_a_layer)
