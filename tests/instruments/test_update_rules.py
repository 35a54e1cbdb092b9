"""Each optimizer's vector against its own steps in float64: the vector, its parts, its moments, and
their split by age.
"""

import pytest
import torch
from torchao.optim import AdamW8bit
from torchao.optim.adam import single_param_adam

from ttrl.configs import TrainingConfig
from ttrl.instruments.linear_response import agreement, inner, moved
from ttrl.instruments.update_rules import rule_of
from ttrl.training.optimizer.optimizer import _maker

LR = 1e-3
CASES = {
    "AdamW": {"optimizer": "adamw"},
    "AdamW with decay": {"optimizer": "adamw", "weight_decay": 0.1, "beta1": 0.8},
    "AdamW without momentum": {"optimizer": "adamw", "beta1": 0.0},
    "SGD": {"optimizer": "sgd"},
    "SGD with decay": {"optimizer": "sgd", "weight_decay": 0.1},
    "SGD with momentum": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    "RMSprop": {"optimizer": "rmsprop"},
    "RMSprop with momentum": {"optimizer": "rmsprop", "momentum": 0.8, "weight_decay": 0.1},
}


def config_of(**settings):
    return TrainingConfig.parse({"model": "", "output_dir": "", "lr": LR, **settings}, "test")


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.nn.Parameter(torch.randn(4, 3, generator=generator, dtype=dtype)),
        "b": torch.nn.Parameter(torch.randn(3, generator=generator, dtype=dtype)),
    }


def made(config, weights):
    groups = [
        {"params": [weights["w"]], "weight_decay": config.weight_decay},
        {"params": [weights["b"]], "weight_decay": 0.0},
    ]
    return _maker(config)(groups)


def state_of(optimizer, weights):
    return {
        f"{name}.{part}": value.clone()
        for name, weight in weights.items()
        for part, value in optimizer.state.get(weight, {}).items()
        if value is not None
    }


def steps(config, count=5):
    """Yield for each step (rule, weights before, gradients, moments before, true v, moments
    after)."""
    weights = parameters()
    optimizer = made(config, weights)
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        gradients = {}
        for name, weight in weights.items():
            size = 10.0 ** (number - 2)
            gradients[name] = size * torch.randn(
                weight.shape, generator=generator, dtype=torch.float64
            )
            weight.grad = gradients[name].clone()
        moments = state_of(optimizer, weights)
        optimizer.step()
        true = {name: (weights[name].detach() - before[name]) / LR for name in weights}
        rule = rule_of(config, number)
        yield rule, before, gradients, moments, true, state_of(optimizer, weights)


@pytest.mark.parametrize("case", CASES)
def test_the_vector_is_that_of_the_optimizers_own_step(case):
    config = config_of(**CASES[case])
    for rule, before, gradients, moments, true, after in steps(config):
        update = rule.update(before, gradients, moments)
        whole = update.whole()
        for name, vector in true.items():
            # Steps of a thousandth leave 13 digits of a difference.
            torch.testing.assert_close(whole[name], vector, rtol=1e-10, atol=1e-10)
        found = agreement(whole, true)
        assert found.cosine == pytest.approx(1, abs=1e-12)
        assert found.norm_ratio == pytest.approx(1, abs=1e-10)
        assert sum(inner(part, whole) for part in update.parts().values()) == pytest.approx(
            inner(whole, whole), rel=1e-12
        )
        assert bool(update.decay["w"].any()) == (config.weight_decay > 0)
        assert not update.decay["b"].any()
        remembers = rule.step > 1 and rule.memory > 0
        assert bool(update.earlier["w"].any()) == remembers
        torch.testing.assert_close(
            moved(before, whole, LR)["w"], before["w"] + LR * true["w"], rtol=1e-13, atol=1e-13
        )
        for name in before:
            own = rule.stepped(name, before[name], gradients[name], moments).after
            for part, value in own.items():
                if f"{name}.{part}" in after:
                    torch.testing.assert_close(value, after[f"{name}.{part}"], rtol=1e-12, atol=0)
                else:
                    assert part == "momentum_buffer" and not config.momentum


@pytest.mark.parametrize("case", CASES)
def test_the_preconditioner_is_that_of_the_gradients_part(case):
    """It is there where the gradient is 0, too."""
    config = config_of(**CASES[case])
    for rule, before, gradients, moments, _, _ in steps(config):
        gradients["b"][1] = 0.0
        update = rule.update(before, gradients, moments)
        scale = update.preconditioner
        for name, tensor in scale.items():
            assert bool((tensor > 0).all())
            torch.testing.assert_close(update.current[name], -tensor * gradients[name])
        if config.optimizer == "sgd":
            assert bool((scale["w"] == 1).all())


@pytest.mark.parametrize("case", CASES)
def test_the_earlier_part_is_linear_in_the_momentum(case):
    """So the ages of its gradients (`ttrl.instruments.momentum`) sum to it."""
    config = config_of(**CASES[case])
    rule, before, gradients, moments, _, _ = list(steps(config))[-1]
    ends = f".{rule.momentum}"
    halved = {n: 0.25 * m if n.endswith(ends) else m for n, m in moments.items()}
    update, part = (rule.update(before, gradients, one) for one in (moments, halved))
    for name, tensor in update.earlier.items():
        torch.testing.assert_close(part.earlier[name], 0.25 * tensor, rtol=1e-12, atol=0)
        assert torch.equal(part.current[name], update.current[name])


@pytest.mark.parametrize("case", CASES)
def test_two_states_tell_the_gradient_between_them(case):
    """The momentum forgets by `memory`, and takes up what a step pushes into it."""
    config = config_of(**CASES[case])
    for rule, before, gradients, moments, _, after in steps(config):
        if f"w.{rule.momentum}" not in after:
            continue
        ends = f".{rule.momentum}"
        without = {n: m for n, m in moments.items() if not n.endswith(ends)}
        pushed = rule.stepped("w", before["w"], gradients["w"], without).after[rule.momentum]
        kept = moments.get(f"w{ends}", torch.zeros_like(pushed))
        expected = after[f"w{ends}"] - rule.memory * kept
        torch.testing.assert_close(pushed, expected, rtol=1e-9, atol=1e-9)


def test_moments_of_8_bits_make_the_same_vector_as_torchaos_step():
    """The step itself reads them out of their codes, and rounds only what it writes."""
    config = config_of(optimizer="adamw_8bit", weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 128, generator=generator))
    optimizer = AdamW8bit([weight], lr=LR)
    state = {part: optimizer._new_buffer(weight, part == "exp_avg") for part in RULES_MOMENTS}
    for part, values in state.items():
        values.copy_(1e-3 * torch.rand(weight.shape, generator=generator) ** (1 + len(part) % 3))
    before = weight.detach().clone()
    gradient = 1e-2 * torch.randn(weight.shape, generator=generator)
    moments = {f"w.{part}": values.dequantize() for part, values in state.items()}
    update = rule_of(config, taken=6).update({"w": before}, {"w": gradient}, moments).whole()
    settings = (torch.tensor(LR), config.beta1, config.beta2, config.weight_decay, config.eps)
    single_param_adam(
        weight.detach(), gradient, torch.tensor(7.0), *state.values(), None, *settings, True, False
    )
    true = {"w": (weight.detach().double() - before.double()) / LR}
    found = agreement(update, true)
    assert found.cosine > 1 - 1e-6 and found.norm_ratio == pytest.approx(1, abs=1e-4)
    after = rule_of(config, taken=6).stepped("w", before, gradient, moments).after
    rounded = state["exp_avg"].dequantize().double()
    error = (rounded - after["exp_avg"]).norm() / after["exp_avg"].norm()
    assert 1e-4 < float(error) < 0.05


RULES_MOMENTS = rule_of(config_of(optimizer="adamw_8bit"), taken=0).moments
