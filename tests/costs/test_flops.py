"""Counts of FLOPs against brute force, and against PyTorch's counter on a decoder whose attention
is plain matrix products.
"""

import copy
import functools
import json

import check_parity
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import load_policy_in, random_samples
from support.training_steps import attention_pairs, training_flops
from torch.utils.flop_counter import FlopCounterMode

from ttrl.configs import GRPOConfig
from ttrl.costs.flops import (
    Flops,
    consecutive_pairs,
    decode_flops,
    forward_flops,
    pass_flops,
    prefill_flops,
    recomputed_flops,
    sampling_flops,
)
from ttrl.costs.parameters import decoder_parameters, model_shape
from ttrl.data.packing.masks import dense_mask, subtree_ends
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.errors import ModelFolderError
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.policy.activations import checkpoint_layers
from ttrl.training.policy.lora import apply_lora

SHAPE = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "model_type": "llama",
}


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("seed", range(3))
def test_pairs_are_those_of_the_mask(seed, window):
    """Trees of prompts, over several rows."""
    packed = packed_tensors_from_tokenized_results(random_samples(seed), seq_len=32, pad_id=0)
    real = packed.group_ids >= 0
    allowed = dense_mask(packed.group_ids, packed.parent_ids) & real.unsqueeze(1)
    if window is not None:
        allowed &= packed.input_pos.unsqueeze(1) > packed.input_pos.unsqueeze(2) - window
    assert attention_pairs(packed.input_pos[real].tolist(), window) == int(allowed.sum())
    if window is None:
        seen_by = subtree_ends(packed.group_ids, packed.parent_ids) - torch.arange(packed.seq_len)
        assert int(allowed.sum()) == int(seen_by[real].sum())


@given(st.integers(0, 20), st.integers(0, 20), st.one_of(st.none(), st.integers(1, 25)))
def test_consecutive_pairs(start, more, window):
    assert consecutive_pairs(start, start + more, window) == attention_pairs(
        range(start, start + more), window
    )


def attend_plainly(policy, monkeypatch):
    """Attention and projections as matrix products, which PyTorch counts."""

    def plain_attention(q, k, v, plan, **_):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return torch.softmax(q @ k.mT, dim=-1) @ v

    for module in policy.modules():
        module_globals = getattr(type(module).forward, "__globals__", {})
        if "attend" in module_globals:
            monkeypatch.setitem(module_globals, "attend", plain_attention)


FAMILIES = [
    "qwen2",
    "qwen2-tied",
    "qwen3",
    "llama",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3",
    "phi",
    "phi3",
    "gpt2",
    "nanochat",
]


def some_long(*short: str) -> list:
    """Return all families, of which only those that are named are tried by `make test`."""
    return [
        name if name in short else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES
    ]


@pytest.mark.long(but=["phi", "gpt2", "qwen2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_flops_equal_what_pytorch_counts(family, model_folder, monkeypatch):
    """With all pairs, since plain products compute them all. PyTorch counts nothing for its CPU
    attention kernel.

    Long for the other families: each only counts its own layers.
    """
    policy = load_policy_in(model_folder(family), torch.float32)
    attend_plainly(policy, monkeypatch)
    packed = (
        packed_tensors_from_tokenized_results(random_samples(0), seq_len=64, pad_id=0)
        .rows([0])
        .trim()
    )
    trained = packed.labels != IGNORE
    with FlopCounterMode(display=False) as counter:
        h = policy.decoder.hidden_states(packed.tokens, packed.input_pos, None)
        policy.decoder.output(h[trained]).sum().backward()
    shape = model_shape(json.loads((model_folder(family) / "config.json").read_text()))
    T = packed.seq_len
    counted = forward_flops(shape, T, dict.fromkeys(shape.windows, T * T), int(trained.sum())) * 3
    assert counter.get_total_flops() == counted.total
    real = training_flops(
        shape, packed.input_pos[packed.group_ids >= 0].tolist(), int(trained.sum())
    )
    assert (real.layers, real.head) == (counted.layers, counted.head)
    positions = packed.input_pos[packed.group_ids >= 0].tolist()
    seen = sum(attention_pairs(positions, window) for window in shape.windows)
    assert real.attention * T * T * shape.layers == counted.attention * seen


@pytest.mark.long(but=["phi-2-lora1", "gpt2-1-None"])
@pytest.mark.parametrize(
    ("every", "lora"), [(1, None), (2, ["q_proj"]), pytest.param(1, ["w2"], marks=pytest.mark.long)]
)
@pytest.mark.parametrize("family", some_long("qwen2", "gemma3", "phi", "gpt2", "nanochat"))
def test_recomputation_is_what_pytorch_counts_more(family, every, lora, model_folder, monkeypatch):
    """Checkpointed layers, against the same pass without: attention is plain products, so nothing
    else is made twice.

    Long for seven of twelve families, and adapters of w2: only these recompute their layers. Their
    passes are counted above.

    Long for the other families: each only counts its own layers.
    """
    policy = load_policy_in(model_folder(family), torch.float32)
    adapters = {} if lora is None else {"lora_rank": 3, "lora_targets": lora}
    given = {"model": "m", "packed": "p", "output_dir": "o", **adapters}
    recipe = GRPOConfig(**given, activation_checkpointing=True, checkpoint_every=every)
    if lora is not None:
        apply_lora(policy.decoder, recipe)
        for name, parameter in policy.named_parameters():
            parameter.data.normal_() if "lora" in name else None
    attend_plainly(policy, monkeypatch)
    T, N = 12, 5
    tokens, positions = torch.zeros(1, T, dtype=torch.int64), torch.arange(T).unsqueeze(0)

    def count():
        with FlopCounterMode(display=False) as counter:
            policy.decoder.output(
                policy.decoder.hidden_states(tokens, positions, None)[0, :N]
            ).sum().backward()
        return counter.get_total_flops()

    plain = count()
    checkpoint_layers(policy.decoder.layers, recipe)
    decoder = decoder_parameters(json.loads((model_folder(family) / "config.json").read_text()))
    pairs = dict.fromkeys(decoder.shape.windows, T * T)
    again = recomputed_flops(decoder, recipe, T, pairs, N, fused_attention=False)
    assert again.total == pytest.approx(count() - plain, rel=1e-3)
    fused = recomputed_flops(decoder, GRPOConfig(**given), T, pairs, N, head_again=1)
    assert fused == Flops(0, *(part for part in _half_of_attention_and_head(decoder.shape, T, N)))
    assert plain == pytest.approx(pass_flops(decoder, recipe, T, pairs, N).total, rel=1e-3)


def _half_of_attention_and_head(shape, T, N):
    return (
        2 * shape.layers * shape.heads * shape.head_dim * T * T,
        2 * shape.width * shape.vocabulary * N,
    )


ALL_TARGETS = ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]


@pytest.mark.parametrize(
    "targets",
    [ALL_TARGETS, ["q_proj"], ["v_proj"], ["output_proj"], ["w1"], ["w2"], ["k_proj", "output"]],
)
@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "gpt2-untied",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "phi")),
    ],
)
def test_with_adapters_frozen_matrices_have_no_gradient(family, targets, model_folder, monkeypatch):
    """Every product that PyTorch makes, and no other, but for the head's merging, which is made
    once in a pass.

    Long for two of four families: only these have adapters without biases, and beside a parallel
    MLP.
    """
    folder = model_folder(family)
    policy = load_policy_in(folder, torch.float32)
    recipe = GRPOConfig(model="m", packed="p", output_dir="o", lora_rank=3, lora_targets=targets)
    apply_lora(policy.decoder, recipe)
    attend_plainly(policy, monkeypatch)
    T, N = 12, 5
    tokens, positions = torch.zeros(1, T, dtype=torch.int64), torch.arange(T).unsqueeze(0)
    with FlopCounterMode(display=False) as counter:
        h = policy.decoder.hidden_states(tokens, positions, None)[0, :N]
        head = policy.decoder.output
        weight = head.merged(head.weight) if "output" in targets else head.weight
        torch.nn.functional.linear(h, weight).sum().backward()
    decoder = decoder_parameters(json.loads((folder / "config.json").read_text()))
    counted = pass_flops(decoder, recipe, T, {None: T * T}, N).total
    # Forward, and both gradients.
    merging = 3 * 2 * 3 * decoder.vocabulary_matrix if "output" in targets else 0
    assert counter.get_total_flops() == counted + merging
    assert (
        counted
        < pass_flops(
            decoder, GRPOConfig(model="m", packed="p", output_dir="o"), T, {None: T * T}, N
        ).total
    )


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 11),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_generating_costs_what_its_passes_cost(prompt, completion, cached, window):
    shape = model_shape(SHAPE | {"sliding_window": window, "model_type": "mistral"})
    cached = min(cached, prompt - 1)
    read = prefill_flops(shape, prompt, cached)
    pairs = {window: attention_pairs(range(cached, prompt), window)}
    assert read == forward_flops(shape, prompt - cached, pairs, 1)
    one_by_one = [
        forward_flops(shape, 1, {window: attention_pairs([position], window)}, 1)
        for position in range(prompt, prompt + completion - 1)
    ]
    assert decode_flops(shape, prompt, completion).total == sum(step.total for step in one_by_one)


@pytest.mark.long(but=["gpt2", "phi"])
@pytest.mark.parametrize("family", some_long("qwen2", "gemma3", "phi", "gpt2", "nanochat"))
def test_sampling_costs_what_pytorch_counts(family, model_folder, monkeypatch):
    """Against a model that reads a prompt and then token after token, with plain attention over all
    that came before: each pass without a cache computes T x T pairs and T tokens, of which the last
    row alone is new.

    Long for seven of twelve families: only these sample. Their training is counted above.

    Long for the other families: each only counts its own layers.
    """
    policy = load_policy_in(model_folder(family), torch.float32)
    attend_plainly(policy, monkeypatch)
    decoder = decoder_parameters(json.loads((model_folder(family) / "config.json").read_text()))
    shape, prompt, known, completion = decoder.shape, 7, 4, 5

    @functools.cache
    def counted(T):
        tokens, positions = torch.zeros(1, T, dtype=torch.int64), torch.arange(T).unsqueeze(0)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            policy.decoder.output(policy.decoder.hidden_states(tokens, positions, None)[0, -1:])
        return counter.get_total_flops()

    # By the counter, the pass over T tokens less that over T - 1, which leaves one token and 2T - 1
    # pairs.
    def step(T):
        return counted(T) - counted(T - 1) + head - extra(T)

    head = 2 * shape.width * shape.vocabulary

    def extra(T):
        seen = sum(consecutive_pairs(T - 1, T, window) for window in shape.windows)
        return 4 * shape.heads * shape.head_dim * (shape.layers * (2 * T - 1) - seen)

    reading = sum(step(T) for T in range(known + 1, prompt + 1)) - head * (prompt - known - 1)
    writing = sum(step(T) for T in range(prompt + 1, prompt + completion))
    assert sampling_flops(shape, [(prompt, known, completion)]) == (reading, writing)
    assert sampling_flops(shape, [(prompt, known, completion)] * 3 + [(prompt, prompt, 1)]) == (
        3 * reading + head,
        3 * writing,
    )


@pytest.mark.long(but=["gpt2"])
@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "gemma",
        "gpt2",
        "nanochat",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("qwen2-tied", "llama", "qwen3", "phi")
        ),
    ],
)
def test_an_iteration_costs_what_transformers_counts(family, model_folder):
    """The server's model reads each prompt once and writes every answer from its cache, token by
    token; then a training pass over packed rows. Its attention is dense: what the masks hide is
    counted by them, and taken off.

    Long for four families: only these compare transformers' own layers of theirs. Ours are counted
    above.

    Long for the other families: each only counts its own layers, which the tests above count one by
    one.
    """
    model = check_parity.reference_model(model_folder(family), torch.float32)
    shape = model_shape(json.loads((model_folder(family) / "config.json").read_text()))
    samples, pair = (
        random_samples(0, prompts=(3, 7), completions=3),
        4 * shape.layers * shape.heads * shape.head_dim,
    )
    reads, counted = [], 0
    with FlopCounterMode(display=False) as server, torch.no_grad():
        for task in dict.fromkeys(one.task_id for one in samples):
            group = [one for one in samples if one.task_id == task]
            length = group[0].prompt_length
            read = model.base_model(torch.tensor([group[0].token_ids[:length]]), use_cache=True)
            counted -= pair * (length**2 - sum(range(length + 1)))
            for number, one in enumerate(group):
                cache, last = copy.deepcopy(read.past_key_values), read.last_hidden_state[:, -1]
                model.lm_head(last)
                for token in one.token_ids[length:-1]:  # the last one is never read
                    last = model.base_model(
                        torch.tensor([[token]]), past_key_values=cache, use_cache=True
                    ).last_hidden_state
                    model.lm_head(last)
                reads.append((length, length if number else 0, len(one.token_ids) - length))
    packed = packed_tensors_from_tokenized_results(samples, seq_len=48, pad_id=0)
    with FlopCounterMode(display=False) as trainer:
        for row in (packed.rows([number]).trim() for number in range(packed.num_rows)):
            allowed = dense_mask(row.group_ids, row.parent_ids)
            hidden = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf).unsqueeze(1)
            states = model.base_model(
                row.tokens, attention_mask=hidden, position_ids=row.input_pos
            ).last_hidden_state
            model.lm_head(states[row.labels != IGNORE]).sum().backward()
            counted -= 3 * pair * int((~allowed).sum())
    counted += server.get_total_flops() + trainer.get_total_flops()
    positions = packed.input_pos[packed.group_ids >= 0].tolist()
    ours = (
        sum(sampling_flops(shape, reads))
        + training_flops(shape, positions, packed.num_trained).total
    )
    assert ours == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, (None, None, None)),
        ({"sliding_window": 5, "model_type": "mistral"}, (5, 5, 5)),
        (
            {"sliding_window": 5, "use_sliding_window": False, "model_type": "qwen2"},
            (None, None, None),
        ),
        # Transformers' default is none.
        ({"sliding_window": 5, "model_type": "qwen3"}, (None, None, None)),
        (
            {
                "sliding_window": 5,
                "use_sliding_window": True,
                "max_window_layers": 2,
                "model_type": "qwen2",
            },
            (None, None, 5),
        ),
        ({"sliding_window": 5, "model_type": "gemma2"}, (5, None, 5)),
        (
            {"sliding_window": 5, "model_type": "gemma3_text", "sliding_window_pattern": 3},
            (5, 5, None),
        ),
        (
            {
                "sliding_window": 5,
                "model_type": "ministral",
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 5, None),
        ),
        ({"sliding_window": 5}, (None, None, None)),  # transformers' Llama has none
    ],
)
def test_windows_of_the_families(config, windows):
    assert model_shape(SHAPE | config).windows == windows


def test_shapes_by_hand():
    shape = model_shape(SHAPE)
    assert shape.layer_weights == 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12
    assert (
        model_shape(SHAPE | {"head_dim": 5}).layer_weights == 2 * 8 * 20 + 2 * 8 * 10 + 3 * 8 * 12
    )
    ungated = model_shape(SHAPE | {"model_type": "phi"})
    assert ungated.layer_weights == 8 * 8 + 2 * 8 * 4 + 8 * 8 + 2 * 8 * 12
    assert model_shape({"model_type": "gemma3", "text_config": SHAPE}) == shape
    with pytest.raises(ModelFolderError, match="hidden_size is None"):
        model_shape({"num_hidden_layers": 3})
