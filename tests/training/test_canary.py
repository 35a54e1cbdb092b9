"""The canary's guess saves passes and changes nothing else."""

import pytest
import torch

from ttrl.training import canary
from ttrl.training.canary import GREEDY_LENGTH, canary_tokens, compute_canary, known_continuation
from ttrl.training.policy.policy import HeadOptions

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
            rows = policy(row, zeros, zeros, zeros, positions, HeadOptions(distributions=True)).logprobs
        if number == 0:
            logprobs = rows[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
        if number < GREEDY_LENGTH:
            best = rows[-1].topk(2)
            found.append((int(best.indices[0]), float(best.values[0]), float(best.values[0] - best.values[1])))
            tokens.append(found[-1][0])
    return logprobs, *map(list, zip(*found, strict=True))


def test_any_guess_leads_to_the_greedy_continuation(policy, monkeypatch):
    tokens = canary_tokens(policy.decoder.tok_embeddings.num_embeddings, policy.decoder.max_seq_len)
    logprobs, greedy, greedy_logprobs, margins = token_by_token(policy, tokens)
    assert min(margins) > 1e-4  # of this model: no tie that rounding could decide
    passes, original = [], canary._distributions
    monkeypatch.setattr(canary, "_distributions", lambda *args: passes.append(args) or original(*args))
    guesses = [(), greedy, [*greedy[:4], *[(token + 1) % 5 for token in greedy[4:]]], [0] * GREEDY_LENGTH, greedy[:-1]]
    most = [GREEDY_LENGTH, 1, GREEDY_LENGTH - 3, GREEDY_LENGTH, 1]
    for guess, count in zip(guesses, most, strict=True):
        passes.clear()
        found = compute_canary(policy, CPU, guess)
        assert 1 <= len(passes) <= count
        assert found["greedy_token_ids"] == greedy
        assert found["logprobs"][0] is None
        torch.testing.assert_close(torch.tensor(found["logprobs"][1:]), logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(found["greedy_logprobs"], greedy_logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(found["greedy_margins"], margins, atol=1e-5, rtol=0)


def test_what_a_folder_knows_of_the_continuation(tmp_path):
    assert known_continuation(tmp_path, 100) == []
    for text, expected in (("{", []), ("[]", []), ('{"greedy_token_ids": [3, 99, 100, -1]}', [3, 99])):
        (tmp_path / "canary.json").write_text(text)
        assert known_continuation(tmp_path, 100) == expected
