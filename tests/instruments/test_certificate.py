"""What the certificate tries, on the CPU: right kernels pass, wrong ones fail, and what raises is a
failed case.
"""

import functools
import itertools

import pytest
import torch

from ttrl.instruments import certificate
from ttrl.tiny_model import make_tiny_model
from ttrl.training.kernels.attention import attend
from ttrl.training.kernels.logprobs import run_head
from ttrl.training.parallel.weight_memory import WeightMemory

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("certificate") / "model", layers=2, width=32)


def test_rows_are_ragged():
    rows = certificate.ragged_rows(320, 100)
    assert (
        rows.num_rows > 1
        and (rows.group_ids < 0).any()
        and (rows.parent_ids != rows.group_ids).any()
    )


@pytest.mark.long(but=["None-None-dtype0"])
@pytest.mark.parametrize(
    ("window", "soft_cap", "dtype"),
    [
        (None, None, torch.float32),
        (None, None, torch.bfloat16),
        (100, None, torch.bfloat16),
        (None, 20.0, torch.float32),
    ],
)
def test_attention_passes_and_a_wrong_one_fails(dtype, window, soft_cap):
    """Long for windows, soft caps and bf16: only these plant a fault in what they change."""
    passed, found = certificate._try_attention(CPU, dtype, 64, 320, window, soft_cap)
    assert passed, found
    assert float(found.split()[1].rstrip(",")) < (1e-5 if dtype is torch.float32 else 0.05)

    def unmasked(q, k, v, plan, **how):  # as if a token saw one that comes later
        out = attend(q, k, v, plan, **how)
        return torch.cat([out[:, :, :7], out[:, :, 8:9], out[:, :, 8:]], dim=2)

    passed, found = certificate._try_attention(CPU, dtype, 64, 320, window, soft_cap, unmasked)
    assert passed is False, found


def test_the_head_passes_and_a_wrong_one_fails():
    for dtype in (torch.float32, torch.bfloat16):
        passed, found = certificate._try_head(CPU, dtype)
        assert passed, found
    wrong = functools.partial(run_head, temperature=1.01)
    assert certificate._try_head(CPU, torch.float32, wrong)[0] is False


def test_every_setting_of_a_step_and_a_wrong_one(model):
    trials = list(certificate._steps(CPU, model))
    found = {case: trial() for _, case, trial in trials}
    left_out = {case for case, (passed, _) in found.items() if passed is None}
    assert left_out == {
        *(
            "compile",
            "compile, checkpointing, bf16",
            "parameters in the CPU's memory",
            "activations in the CPU's memory",
        ),
        *("AdamW, 8 bits", "AdamW on the CPU"),
    }
    assert all(passed is not False for passed, _ in found.values()), found
    assert len(found) - len(left_out) == 6

    def another_loss(policy, device, seed):
        is_bf16 = policy.compute_dtype is torch.bfloat16
        certificate._backward(policy, device, seed + is_bf16)

    trials = certificate._steps(CPU, model, another_loss)
    [bf16] = [trial for _, case, trial in trials if case == "bf16"]
    assert bf16()[0] is False


class Damaged(WeightMemory):
    """It loses the end of what was written."""

    def write(self, tensors, dtype):
        said = super().write(tensors, dtype)
        self._data[-2:].zero_()
        return said


def test_parking_is_left_out_on_a_cpu_and_weights_are_held_out(model):
    [(_, _, trial), (_, _, holding_out)] = certificate._parking(CPU, model)
    assert trial() == (None, "left out without a GPU")
    assert holding_out()[0] is True
    assert certificate._try_holding_out(CPU, Damaged)[0] is False


def test_what_raises_is_a_failed_case_and_the_others_go_on():
    trials = [("a", "raises", lambda: 1 / 0), ("b", "passes", lambda: (True, "fine"))]
    first, second = certificate.tried(trials)
    assert (first.part, first.passed) == ("a", False)
    assert first.found == "ZeroDivisionError: division by zero"
    assert (second.part, second.passed, second.found) == ("b", True, "fine")


def test_the_first_cases_are_those_of_attention():
    """Each is tried when it is asked for, and says what it found."""
    cases = list(itertools.islice(certificate.certify(CPU), 2))
    assert [case.part for case in cases] == ["attention", "attention"]
    assert [case.case for case in cases] == [
        f"float32, heads of {certificate.HEAD_DIMS[0]}, rows of {length}" for length in (320, 704)
    ]
    assert all(case.passed for case in cases), cases
