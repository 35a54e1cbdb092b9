"""The recipe's own step against transformers in float64, in this process: what is trained, not only
what is reported.
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import random_samples

from ttrl import grpo_recipe
from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.errors import ConfigError, DivergedError, ModelFolderError, RunFolderError
from ttrl.system.files import read_jsonl
from ttrl.training.models.architecture import read_config
from ttrl.training.models.weights import to_hugging_face_names
from ttrl.training.parallel.distributed import Ranks

pytestmark = pytest.mark.usefixtures("one_thread", "short_canaries")
HERE = Ranks(0, 1, torch.device("cpu"))
BETA1 = 0.9


def test_a_config_that_is_not_there_is_a_line_and_an_absent_model_stands_with_the_rest(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["grpo_recipe", "--config", str(tmp_path / "none.yaml")])
    assert grpo_recipe.main() == 2
    assert capsys.readouterr().err.startswith(
        f"error: --config is '{tmp_path}/none.yaml', an unreadable file: No such"
    )
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.parse({"model": "/not/there", "lr": -1}, "recipe config")
    said = [
        "output_dir is missing",
        "packed is missing",
        "lr is -1.0",
        "model folder /not/there does not exist",
    ]
    assert [problem.split(";")[0] for problem in caught.value.problems] == said


@pytest.fixture
def inputs(model_folder, tmp_path):
    """A model, a reference of the same architecture with other weights, and a pack with unknown and
    off-policy logprobs.
    """
    reference = tmp_path / "reference"
    reference.mkdir()
    tensors = load_file(model_folder() / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    save_file(
        {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()},
        reference / "model.safetensors",
        metadata={"format": "pt"},
    )
    (reference / "config.json").write_bytes((model_folder() / "config.json").read_bytes())
    samples = random_samples(8, prompts=(1, 3, 6), completions=5)
    for number, sample in enumerate(samples):
        if number % 3 == 0:
            sample.logprobs[-1] = math.nan
    packed = packed_tensors_from_tokenized_results(
        samples, seq_len=48, pad_id=0, aggregation="sequence"
    )
    assert packed.num_rows > 1
    packed.save(tmp_path / "packed.safetensors")
    return {"model": model_folder(), "reference": reference, "samples": samples, "folder": tmp_path}


def train(inputs, name="out", **settings):
    """One iteration in this process; returns its folder."""
    values = {
        "model": str(inputs["model"]),
        "packed": str(inputs["folder"] / "packed.safetensors"),
        "output_dir": str(inputs["folder"] / name),
        "device": "cpu",
        "beta1": BETA1,
        "max_grad_norm": None,
        "rows_per_microbatch": 1,
    }
    grpo_recipe.train_iteration(GRPOConfig.parse({**values, **settings}, "test"), HERE)
    return inputs["folder"] / name


def gradient(folder):
    """The gradient that the optimizer was given, under Hugging Face names: Adam's first moment
    after one step is (1 - β1)·g.
    """
    moments = load_file(folder / "state" / "optimizer.safetensors")
    ours = {
        n.removesuffix(".exp_avg"): t.double() / (1 - BETA1)
        for n, t in moments.items()
        if n.endswith(".exp_avg")
    }
    return to_hugging_face_names(ours, read_config(folder / "checkpoint"))


def distance(one, other):
    """‖one - other‖ / ‖other‖ over all parameters."""
    assert one.keys() == other.keys()
    square = sum(float((one[n] - other[n]).square().sum()) for n in one)
    return math.sqrt(square / sum(float(t.square().sum()) for t in other.values()))


def reference_gradient(inputs, load, *, temperature=1.0, kl=0.0, low=0.2, high=0.2):
    """The same loss written out for one plain sequence at a time, in float64."""
    policy, frozen = load(inputs["model"]), load(inputs["reference"])
    total = torch.zeros((), dtype=torch.float64)
    for sample in inputs["samples"]:
        ids, n = torch.tensor([sample.token_ids]), sample.prompt_length
        new, ref = (
            torch.log_softmax(m(ids).logits[0, :-1] / temperature, -1).gather(1, ids[0, 1:, None])[
                n - 1 :, 0
            ]
            for m in (policy, frozen)
        )
        sampled = torch.tensor(sample.logprobs[n:], dtype=torch.float32).double()
        advantage = float(torch.tensor(sample.advantage, dtype=torch.float32))
        losses = []
        for t in range(len(new)):
            old = new[t].detach() if math.isnan(sampled[t]) else sampled[t]
            ratio = torch.exp(new[t] - old)
            loss = -torch.min(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
            difference = ref[t].detach() - new[t]
            losses.append(loss + kl * (torch.exp(difference) - difference - 1))
        total = total + sum(losses) / len(losses)  # aggregation "sequence"
    (total / len(inputs["samples"])).backward()
    return {name: p.grad for name, p in policy.named_parameters()}


@pytest.mark.long(but=["{}"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kl_coefficient": 0.3},
        {"temperature": 0.7, "clip_low": 0.1, "clip_high": 0.5},
        {
            "kl_coefficient": 0.3,
            "activation_checkpointing": True,
            "rows_per_microbatch": 2,
            "num_output_chunks": 1,
        },
    ],
    ids=str,
)
def test_the_step_follows_the_gradient_of_the_loss(settings, inputs, float64_reference):
    """Long for the other settings: only these take the gradient at a temperature, with KL, or
    recomputed.
    """
    if settings.get("kl_coefficient"):
        settings = {**settings, "reference_model": str(inputs["reference"])}
    folder = train(inputs, **settings)
    expected = reference_gradient(
        inputs,
        float64_reference,
        temperature=settings.get("temperature", 1.0),
        kl=settings.get("kl_coefficient", 0.0),
        low=settings.get("clip_low", 0.2),
        high=settings.get("clip_high", 0.2),
    )
    assert distance(gradient(folder), expected) < 1e-5
    row = read_jsonl(folder / "train.jsonl")[0]
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)
    # … and downhill: Adam's first step moves every weight against its gradient.
    before, after = (
        load_file(f / "model.safetensors") for f in (inputs["model"], folder / "checkpoint")
    )
    for name, g in expected.items():
        moved = after[name] - before[name]
        clear = g.abs() > 1e-4 * g.abs().max()
        assert (torch.sign(moved[clear]) == -torch.sign(g[clear])).double().mean() > 0.99, name


def test_clipping_scales_the_whole_gradient(inputs):
    free, clipped = train(inputs, "free"), train(inputs, "clipped", max_grad_norm=0.05)
    norms = [read_jsonl(folder / "train.jsonl")[0]["grad_norm"] for folder in (free, clipped)]
    assert norms[0] == norms[1] > 0.05  # reported before clipping
    scaled = {name: g * 0.05 / norms[0] for name, g in gradient(free).items()}
    assert distance(gradient(clipped), scaled) < 1e-5


def test_bf16_is_close(inputs):
    """Not exact, but the same direction; parameters and state stay fp32."""
    one, half = gradient(train(inputs, "fp32")), gradient(train(inputs, "bf16", dtype="bf16"))
    assert 1e-5 < distance(half, one) < 0.1
    assert all(
        t.dtype == torch.float32
        for t in load_file(inputs["folder"] / "bf16/checkpoint/model.safetensors").values()
    )
    assert (
        json.loads((inputs["folder"] / "bf16/checkpoint/canary.json").read_text())["dtype"]
        == "bfloat16"
    )


def test_checkpoints_in_bf16_are_rounded(inputs):
    exact, rounded = (
        load_file(train(inputs, d, checkpoint_dtype=d) / "checkpoint/model.safetensors")
        for d in ("fp32", "bf16")
    )
    assert rounded.keys() == exact.keys()
    assert all(
        torch.equal(rounded[name], tensor.to(torch.bfloat16)) for name, tensor in exact.items()
    )


def test_nan_weights_stop_before_the_step(inputs, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    tensors = load_file(inputs["model"] / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "config.json").write_bytes((inputs["model"] / "config.json").read_bytes())
    with pytest.raises(
        DivergedError,
        match=r"(?s)step 1: .*weights of the model are not finite \(layers.0.mlp.w3.weight and 0",
    ):
        train(inputs, model=str(broken))
    assert not (inputs["folder"] / "out" / "checkpoint").exists()


@pytest.mark.parametrize(
    "change",
    [{"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, {"rms_norm_eps": 0.5}],
    ids=str,
)
def test_a_reference_of_another_architecture_is_refused(change, inputs):
    """The same weights under another config are another model: KL to it would be wrong, and say
    nothing.
    """
    path = inputs["reference"] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(
        ModelFolderError,
        match=f"has another architecture than the policy: {next(iter(change)).removeprefix('rms_')}",
    ):
        train(inputs, kl_coefficient=0.1, reference_model=str(inputs["reference"]))


def test_the_last_iterations_state_must_fit(inputs, model_folder):
    folder = train(inputs, "first")
    again = train(inputs, "second", state=str(folder / "state"), model=str(folder / "checkpoint"))
    assert read_jsonl(again / "train.jsonl")[0]["global_step"] == 2
    path = folder / "state" / "optimizer.safetensors"
    moments = load_file(path)
    # Would be broadcast, silently.
    save_file(moments | {"norm.scale.exp_avg": torch.zeros(1)}, path)
    with pytest.raises(RunFolderError, match=r"norm\.scale is \(1,\) there"):
        train(inputs, "third", state=str(folder / "state"))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RunFolderError, match="cannot be read"):
        train(inputs, "third", state=str(folder / "state"))
    save_file(
        load_file(
            train(inputs, "tied", model=str(model_folder("qwen2-tied")))
            / "state"
            / "optimizer.safetensors"
        ),
        path,
    )
    with pytest.raises(RunFolderError, match="belongs to another model"):
        train(inputs, "third", state=str(folder / "state"))
