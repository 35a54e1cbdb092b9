"""The canary: a text that every checkpoint keeps, a guess that saves passes and changes nothing
else, a measure of bf16.
"""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from ttrl.facts import dumped
from ttrl.records import Canary
from ttrl.training import trainer_canary as canary
from ttrl.training.policy.policy import HeadOptions
from ttrl.training.trainer_canary import (
    CANARY_LENGTH,
    GREEDY_LENGTH,
    canary_tokens,
    compute_canary,
    half_precision,
)

CPU = torch.device("cpu")


@pytest.fixture
def policy(model_folder, load_policy):
    return load_policy(model_folder(), torch.float32)


def token_by_token(policy, tokens):
    """Log-probabilities, and a greedy continuation, one plain pass for each of its tokens."""
    tokens, found = list(tokens), []
    for number in range(GREEDY_LENGTH + 1):
        row = torch.tensor([tokens])
        zeros, positions = torch.zeros_like(row), torch.arange(len(tokens)).unsqueeze(0)
        with torch.no_grad():
            rows = policy(
                row, zeros, zeros, zeros, positions, HeadOptions(distributions=True)
            ).logprobs
        if number == 0:
            logprobs = rows[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
        if number < GREEDY_LENGTH:
            best = rows[-1].topk(2)
            found.append(
                (
                    int(best.indices[0]),
                    float(best.values[0]),
                    float(best.values[0] - best.values[1]),
                )
            )
            tokens.append(found[-1][0])
    return logprobs, *map(list, zip(*found, strict=True))


def write_canary(folder, tokens, greedy, **more):
    logprobs, zeros = [None, *[-1.0] * (len(tokens) - 1)], [0.0] * len(greedy)
    canary = Canary(1, "float32", tokens, logprobs, greedy, zeros, zeros, **more)
    (folder / "canary.json").write_text(dumped(canary))


def test_any_guess_leads_to_the_greedy_continuation(policy, tmp_path):
    tokens = canary_tokens(
        tmp_path, policy.decoder.tok_embeddings.num_embeddings, policy.decoder.max_seq_len
    )
    logprobs, greedy, greedy_logprobs, margins = token_by_token(policy, tokens)
    assert min(margins) > 1e-4  # of this model: no tie that rounding could decide
    passes = []
    counting = policy.register_forward_pre_hook(lambda *_: passes.append(1))
    guesses = [
        [0],
        greedy,
        [*greedy[:4], *[(token + 1) % 5 for token in greedy[4:]]],
        [0] * GREEDY_LENGTH,
        greedy[:-1],
        [-1, 10**6],
    ]
    most = [GREEDY_LENGTH, 1, GREEDY_LENGTH - 3, GREEDY_LENGTH, 1, GREEDY_LENGTH]
    for guess, count in zip(guesses, most, strict=True):
        passes.clear()
        write_canary(tmp_path, tokens, guess)
        found = compute_canary(policy, CPU, tmp_path)
        assert 1 <= len(passes) <= count
        assert found.token_ids == tokens and found.greedy_token_ids == greedy
        assert found.logprobs[0] is None
        torch.testing.assert_close(torch.tensor(found.logprobs[1:]), logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.greedy_logprobs, greedy_logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.greedy_margins, margins, atol=1e-5, rtol=0)
    counting.remove()


def test_the_text_of_a_model_with_a_tokenizer(tmp_path):
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    noise = canary_tokens(tmp_path, 500, 512)
    # A tokenizer that knows none of the words: random tokens.
    assert len(noise) == CANARY_LENGTH and len(set(noise)) > 100
    vocabulary = {
        word: number
        for number, (word, _) in enumerate(words.pre_tokenizer.pre_tokenize_str(canary._TEXT))
    }
    known = Tokenizer(models.WordLevel({**vocabulary, "[UNK]": 499}, unk_token="[UNK]"))
    known.pre_tokenizer = words.pre_tokenizer
    known.save(str(tmp_path / "tokenizer.json"))
    tokens = canary_tokens(tmp_path, 500, 512)
    assert (
        known.decode(tokens).startswith("The lighthouse keeper counted 214 steps")
        and len(tokens) == CANARY_LENGTH
    )
    assert canary_tokens(tmp_path, 500, 40) == tokens[: 40 - GREEDY_LENGTH]
    assert canary_tokens(tmp_path, 100, 512) != tokens  # ids that the model lacks


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"token_ids": [3, "x"], "greedy_token_ids": []}', '{"token_ids": [3, 100]}'],
)
def test_a_canary_that_is_no_use_is_left_alone(tmp_path, text):
    noise = canary_tokens(tmp_path, 100, 512)
    (tmp_path / "canary.json").write_text(text)
    assert canary_tokens(tmp_path, 100, 512) == noise
    write_canary(tmp_path, [3, 99], [1, 2])
    assert canary_tokens(tmp_path, 100, 512) == [3, 99]


def test_what_bf16_costs_is_measured_and_kept(policy, tmp_path):
    tokens = canary_tokens(
        tmp_path, policy.decoder.tok_embeddings.num_embeddings, policy.decoder.max_seq_len
    )
    cost = half_precision(policy, tokens, CPU)
    assert 0 < cost.mean < cost.p99 < 1 and policy.compute_dtype == torch.float32
    exact, rounded = (half_of(policy, tokens, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert cost.mean == pytest.approx((exact - rounded).abs().mean().item(), rel=1e-4)
    write_canary(tmp_path, tokens, [1], half_precision=cost)
    assert compute_canary(policy, CPU, tmp_path).half_precision == cost


def half_of(policy, tokens, dtype):
    policy.compute_dtype = dtype
    logprobs = token_by_token(policy, tokens)[0]
    policy.compute_dtype = torch.float32
    return logprobs
