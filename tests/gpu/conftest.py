"""All of these need a GPU, and are skipped without one: `pytest tests/gpu` on a machine that has
one.
"""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(240))  # each process compiles its kernels
            item.add_marker(
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
            )
