"""Packed rows through our policy against the same samples, one by one, through transformers, in
float64.
"""

import pytest
import torch
from support import tiny_models
from support.tiny_models import load_policy_in, random_samples

from ttrl.configs import TrainingConfig
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.packing.packed import normaliser
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.models.weights import to_hugging_face_names
from ttrl.training.objective.losses import clipped_ratio_loss

CASES = {
    "groups with prompts of 1, 2 and 7 tokens": (random_samples(0), 64),
    "one sample": (random_samples(1, prompts=(5,), completions=1 + 1)[:1], 64),
    "identical samples": (
        [
            tiny_models.sample([3, 4, 5], [6, 7, 8], advantage=a, logprobs=[-1.0, -2.0, -0.5])
            for a in (1, 1, -2)
        ],
        64,
    ),
    "a sample that fills the row": (
        [tiny_models.sample([3, 4, 5], [9] * 14, logprobs=[-1.0] * 14)],
        16,
    ),
    "groups split over rows": (random_samples(2, prompts=(6, 6), completions=8), 24),
}


def policy_inputs(packed):
    return packed.tokens, packed.labels, packed.group_ids, packed.parent_ids, packed.input_pos


def reference_logprobs(model, result):
    """Log-probabilities of the completion's tokens, one plain sequence at a time."""
    logits = model(torch.tensor([result.token_ids])).logits[0, :-1]
    everything = torch.log_softmax(logits, -1).gather(
        1, torch.tensor(result.token_ids[1:])[:, None]
    )[:, 0]
    return everything[result.prompt_length - 1 :]


def unpacked(packed, values):
    """{(task, sample, number of occurrence): values of its labels in order} from a flat tensor over
    trained positions.
    """
    grid = torch.full(packed.labels.shape, torch.nan, dtype=values.dtype)
    grid[packed.labels != IGNORE] = values
    return [
        grid[(packed.sample_ids == n) & (packed.labels != IGNORE)]
        for n in range(len(packed.samples))
    ]


@pytest.mark.parametrize("family", ["qwen2", "qwen2-tied", "gemma2-untied", "phi"])
def test_logprobs_of_the_policy_equal_transformers(family, model_folder, float64_reference):
    """Through the head, in chunks: a tied one, one with a soft cap, one with a bias."""
    samples = random_samples(3)
    packed = packed_tensors_from_tokenized_results(samples, seq_len=64, pad_id=0)
    with torch.no_grad():
        logprobs, entropy, *_ = load_policy_in(model_folder(family))(*policy_inputs(packed))
        reference = float64_reference(model_folder(family))
        expected = [reference_logprobs(reference, result) for result in samples]
    for ours, theirs in zip(unpacked(packed, logprobs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert (entropy > 0).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_loss_and_gradients_equal_transformers(case, aggregation, model_folder, float64_reference):
    """Faults 1, 2 and 9 of the predecessor (a sibling's first token, tokens at chunk borders, the
    last token) would all show here."""
    samples, seq_len = CASES[case]
    packed = packed_tensors_from_tokenized_results(
        samples, seq_len=seq_len, pad_id=0, aggregation=aggregation
    )
    policy = load_policy_in(model_folder())
    logprobs = policy(*policy_inputs(packed)).logprobs
    trained = packed.labels != IGNORE
    old, advantages, weights = (
        t[trained].double() for t in (packed.logprobs, packed.advantages, packed.weights)
    )
    loss = (
        clipped_ratio_loss(logprobs, old, advantages, 0.2, 0.3)[0] * weights
    ).sum() / normaliser(packed)
    loss.backward()

    reference = float64_reference(model_folder())
    total, count = torch.zeros((), dtype=torch.float64), 0
    for result in samples:
        new = reference_logprobs(reference, result)
        was = torch.tensor(result.logprobs[result.prompt_length :], dtype=torch.float32).double()
        advantage = torch.tensor(result.advantage, dtype=torch.float32).double()
        ratio = (new - was).exp()
        per_token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        total = total + (per_token.sum() if aggregation == "token" else per_token.mean())
        count += len(per_token) if aggregation == "token" else 1
    expected = total / count
    expected.backward()

    # Weights 1/length are stored in float32.
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=1e-9)
    ours = to_hugging_face_names(
        {name: p.grad for name, p in policy.parameters_by_name().items()}, policy.decoder.config
    )
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(
            ours[name],
            parameter.grad,
            rtol=1e-6,
            atol=1e-8,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 1000])
def test_chunks_lose_no_token(chunks, model_folder):
    """Fault 2 of the predecessor: labels were shifted inside each chunk, which dropped one token
    per border.
    """
    packed = packed_tensors_from_tokenized_results(random_samples(4), seq_len=64, pad_id=0)
    results = []
    for n in (1, chunks):
        policy = load_policy_in(model_folder(), num_output_chunks=n)
        logprobs, entropy, *_ = policy(*policy_inputs(packed))
        (logprobs.sum() + entropy.sum()).backward()
        results.append((logprobs, entropy, policy.decoder.output.weight.grad))
    assert (
        len(results[1][0])
        == packed.num_trained
        == sum(len(s.token_ids) - s.prompt_length for s in random_samples(4))
    )
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(one, many, rtol=0, atol=1e-12)


def test_siblings_do_not_see_each_other(model_folder):
    """Changing the tokens of one completion changes no other sample's log-probabilities, not even
    in the last bit.
    """
    prompt = [5, 6, 7, 8]
    policy = load_policy_in(model_folder(), torch.float32)

    def logprobs(second):
        packed = packed_tensors_from_tokenized_results(
            [
                tiny_models.sample(prompt, c, number=i)
                for i, c in enumerate([[1, 2, 3], second, [9, 10]])
            ],
            seq_len=32,
            pad_id=0,
        )
        with torch.no_grad():
            return unpacked(packed, policy(*policy_inputs(packed))[0])

    before, after = logprobs([20, 21, 22, 23]), logprobs([30, 31, 32, 33])
    assert torch.equal(before[0], after[0]) and torch.equal(before[2], after[2])
    assert not torch.equal(before[1], after[1])


def test_a_row_without_labels_keeps_the_graph(model_folder):
    """Zero-weight rows must take part in the backward pass: other ranks wait for it."""
    packed = packed_tensors_from_tokenized_results(
        random_samples(5), seq_len=64, pad_id=0
    ).pad_rows_to_multiple(7)
    policy = load_policy_in(model_folder())
    logprobs = policy(*policy_inputs(packed.rows([packed.num_rows - 1]))).logprobs
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in policy.parameters()
    )


def test_kl_of_a_model_with_itself_is_zero(model_folder):
    """Fault 3 of the predecessor: reference logprobs were shifted twice, and this was 2.37."""
    from ttrl.training.batches import Update
    from ttrl.training.objective.divergences import k3_divergence
    from ttrl.training.prepass import row_signals

    packed = packed_tensors_from_tokenized_results(random_samples(6), seq_len=48, pad_id=0)
    policy = load_policy_in(model_folder(), torch.float32)
    config = TrainingConfig(model="", output_dir="", rows_per_microbatch=2)
    reference = row_signals(policy, Update(packed, 1.0, 1), config, torch.device("cpu"))[
        "start_logprobs"
    ]
    logprobs = policy(*policy_inputs(packed)).logprobs
    trained = packed.labels != IGNORE
    assert torch.isnan(reference[~trained]).all()
    assert k3_divergence(logprobs, reference[trained]).abs().max() < 1e-9
