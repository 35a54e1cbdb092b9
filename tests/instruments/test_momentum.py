"""The momentum's parts by age, against the gradients of torch's own steps."""

import pytest
import torch
import yaml
from safetensors.torch import save_file

from ttrl.instruments.momentum import by_age, kept_product, kept_products

BETA = 0.9


def steps(count):
    """Gradients of some steps, and AdamW's momentum after each."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(BETA, 0.99))
    gradients, momenta = [], []
    for _ in range(count):
        parameter.grad = torch.randn(6, 4, dtype=torch.float64)
        gradients.append(parameter.grad.clone())
        optimizer.step()
        momenta.append(optimizer.state[parameter]["exp_avg"].clone())
    return gradients, momenta


def save(folder, number, momentum, taken, state):
    """An iteration with one state, as a run keeps it."""
    iteration = folder / f"{number:04d}"
    (iteration / "state").mkdir(parents=True)
    tensors = {"w.exp_avg": momentum, "w.step": torch.tensor([float(taken)])}
    save_file(tensors, iteration / "state" / "optimizer.safetensors")
    (iteration / "grpo.yaml").write_text(yaml.safe_dump({"state": state}))
    return str(iteration / "state")


def test_parts_by_age_are_those_of_the_gradients_and_sum_to_the_momentum():
    gradients, momenta = steps(5)
    weights = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    products = [(0, 0.0)] + [
        (taken, float((weights * momentum).sum())) for taken, momentum in enumerate(momenta, 1)
    ]
    ages = by_age(products, BETA)
    assert [(one.newest, one.oldest) for one in ages] == [(k, k) for k in range(1, 6)]
    for one, gradient in zip(ages, gradients[::-1], strict=True):
        wanted = (1 - BETA) * BETA ** (one.newest - 1) * float((weights * gradient).sum())
        assert one.value == pytest.approx(wanted, rel=1e-9)
    assert sum(one.value for one in ages) == pytest.approx(products[-1][1], rel=1e-12)
    # Without the first three: the older steps are one part.
    some = by_age(products[3:], BETA)
    assert [(one.newest, one.oldest) for one in some] == [(1, 1), (2, 2), (3, None)]
    assert some[2].value == pytest.approx(sum(one.value for one in ages[2:]), rel=1e-12)
    # Iterations of two steps.
    two = by_age([products[0], products[2], products[4], products[5]], BETA)
    assert [(one.newest, one.oldest) for one in two] == [(1, 1), (2, 3), (4, 5)]
    assert sum(one.value for one in two) == pytest.approx(products[-1][1], rel=1e-12)


def test_momenta_are_found_in_a_runs_states(tmp_path):
    _, momenta = steps(4)
    state = None
    for number, momentum in enumerate(momenta, 1):
        state = save(tmp_path, number, momentum, number, state)
    weights = {"w": torch.rand(6, 4, dtype=torch.float64)}
    found, is_all = kept_products(state, weights, "exp_avg", 4, BETA)
    assert sorted(found) == [1, 2, 3, 4] and is_all
    for taken, momentum in enumerate(momenta, 1):
        assert found[taken] == pytest.approx(float((weights["w"] * momentum).sum()))
    # A decay that forgets: 0.1² is 1%, and no state before that one is looked up.
    found, is_all = kept_products(state, weights, "exp_avg", 4, 0.09)
    assert sorted(found) == [2, 3, 4] and not is_all
    # A pruned state.
    (tmp_path / "0002" / "state" / "optimizer.safetensors").unlink()
    found, is_all = kept_products(state, weights, "exp_avg", 4, BETA)
    assert sorted(found) == [3, 4] and not is_all
    assert kept_products(None, weights, "exp_avg", 0, BETA) == ({}, True)


def test_codes_of_8_bits_are_no_momentum(tmp_path):
    state = save(tmp_path, 1, torch.zeros(6, 4, dtype=torch.uint8), 1, None)
    weights = {"w": torch.ones(6, 4)}
    with pytest.raises(KeyError, match="U8"):
        kept_product(tmp_path / "0001" / "state", weights, "exp_avg")
    assert kept_products(state, weights, "exp_avg", 1, BETA) == ({}, False)
