"""What training does on a GPU and not on a CPU, on a CPU: FlexAttention in compiled graphs, and
nothing that looks at values.
"""

from collections import Counter

import check_invariance as tool
import pytest
import torch
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ttrl.data.packing import masks
from ttrl.training import batches
from ttrl.training.batches import Update, updates
from ttrl.training.kernels import attention, logprobs
from ttrl.training.objective.objective import objective_from
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy import activation_memory as activations
from ttrl.training.policy.loading import load_policy
from ttrl.training.prepass import Prepass
from ttrl.training.step import GradientStep
from ttrl.training.timing import Stopwatch
from ttrl.training.train_log import TrainProgress

HERE = Ranks(0, 1, torch.device("cpu"))


class Waits(TorchDispatchMode):
    """Counts the operations for whose results a CPU would wait for a GPU."""

    OPERATIONS = (
        "nonzero",
        "_local_scalar_dense",
        "is_nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "bincount",
        "equal",
    )

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_bools = name == "index" and any(x is not None and x.dtype is torch.bool for x in args[1])
        if name in self.OPERATIONS or by_bools:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    for module in (masks, attention, batches, logprobs):
        monkeypatch.setattr(module, "free_to_look", lambda device: False)
    # Refuses gradients on CPUs.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    compiled = attention.compiled_flex
    monkeypatch.setattr(attention, "compiled_flex", lambda: compiled("aot_eager"))
    yield
    torch._dynamo.reset()


COMPILED = {"compile": True, "row_length_multiple": tool.SEQ_LEN}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"rows_per_microbatch": 2}, id="two rows", marks=pytest.mark.long),
        pytest.param(
            {"rows_per_microbatch": 1, "activation_checkpointing": True}, id="checkpointing"
        ),
        pytest.param(COMPILED, id="compiled layers", marks=pytest.mark.long),
    ],
)
def test_the_gradient_is_that_of_transformers(settings, tmp_path):
    """Long for compiled layers: only this compiles them around FlexAttention, by a C++ compiler.

    Compiled layers around other attention: tests/e2e/test_compiled.py.

    Long for two rows: below they are moved to the CPU in between; only this leaves them where they
    are.
    """
    gradient, step = tool.errors_of(
        tool.Way("as on a GPU", settings), tool.make_inputs(tmp_path, "ppo-k3", group_size=4), HERE
    )
    assert gradient < tool.TOLERANCE
    assert step < tool.TOLERANCE


class Moved(torch.autograd.graph.saved_tensors_hooks):
    """In the place of torchtune's OffloadActivations: as strict, but nothing is moved."""

    count = 0

    def __init__(self):
        self.tracker, self.forward = {}, False
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor):
        assert self.forward or not self.tracker, (
            "backward pass should have cleared tracker of all tensors"
        )
        self.forward = True
        Moved.count += 1
        self.tracker[Moved.count] = tensor
        return Moved.count

    def unpack(self, number):
        self.forward = False
        return self.tracker.pop(number)


@pytest.mark.parametrize(
    ("objective", "checkpointing"),
    [("ppo-k3", True), pytest.param("gspo-entropy-kl", False, marks=pytest.mark.long)],
)
def test_what_is_moved_to_the_cpu_comes_back_before_the_next_microbatch(
    objective, checkpointing, tmp_path
):
    """Long for one of two: only this moves what no checkpoint recomputes. The objective:
    tests/training/test_invariance.py.
    """

    def load(config, here):
        policy = load_policy(config, here)
        activations.offload_activations(policy.decoder, Moved)
        return policy

    before, way = (
        Moved.count,
        tool.Way("moved", {"rows_per_microbatch": 2, "activation_checkpointing": checkpointing}),
    )
    assert (
        max(tool.errors_of(way, tool.make_inputs(tmp_path, objective, group_size=4), HERE, load))
        < tool.TOLERANCE
    )
    assert Moved.count > before


class Ready(Update):
    """A step whose microbatches are on the device."""

    def __init__(self, step, ready):
        super().__init__(**vars(step))
        self._ready = ready

    def microbatches(self, *_):
        return iter(self._ready)


@pytest.mark.long(but=["gspo-entropy-kl-limit1"])
@pytest.mark.parametrize(
    ("objective", "limit"), [("ppo-k3", {}), ("gspo-entropy-kl", {"_unique2": 2})]
)
def test_what_a_microbatch_waits_for(objective, limit, tmp_path, monkeypatch):
    """Twelve results at least it was before. Ratios of sequences look for the samples of a
    microbatch, in the loss, and once more where KL's share of the gradient is told.

    Long for PPO: only that waits for less.
    """

    def dense(q, k, v, plan, scale, soft_cap, window):
        assert plan.flex(window).lists  # as FlexAttention has its masks
        return attention.dense_attend(q, k, v, plan, scale, soft_cap, window)

    monkeypatch.setattr(attention, "flex_attend", dense)  # the compiler waits, too, the first time
    inputs = tool.make_inputs(tmp_path, objective, group_size=4)
    found = {}
    for rows in (1, 2):
        config, packed = inputs.config({"rows_per_microbatch": rows}), inputs.packed(0)
        policy, objective_of = load_policy(config, HERE), objective_from(config)
        (step,) = updates(packed, 1, (0, 1), HERE, policy.decoder.config)
        prepass = Prepass(policy, packed, [step], objective_of, config, HERE, 0)
        prepass.run()
        gradient = GradientStep(
            policy,
            config,
            HERE,
            Stopwatch(HERE.device),
            TrainProgress(0, HERE),
            None,
            prepass.reference_head,
        )
        ready = list(step.microbatches(config, HERE.device))  # from the pack, which no GPU holds
        with Waits() as waits:
            gradient.accumulate(Ready(step, ready), objective_of)
        found[len(ready)] = waits.counts
    (few, once), (many, twice) = sorted(found.items())
    assert {
        name: (count - once[name]) / (many - few)
        for name, count in twice.items()
        if count != once[name]
    } == limit
