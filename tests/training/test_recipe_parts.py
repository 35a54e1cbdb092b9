"""The parts of the recipe: what goes wrong, what is measured, what is found out before a step."""

import dataclasses
import json
import logging
import math

import pytest
import torch
from support.training_steps import training_flops
from transformers import Qwen2Config
from transformers.pytorch_utils import Conv1D

from ttrl.configs import GRPOConfig
from ttrl.configs.recipe import PROGRESS_VARIABLE
from ttrl.costs.parameters import model_shape
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.packing.packed_file import TOKENIZER_KEY, tokenizer_digest
from ttrl.data.packing.placement import balance
from ttrl.errors import (
    ConfigError,
    DivergedError,
    ModelFolderError,
    PackError,
    TrainerMemoryError,
)
from ttrl.training.batches import Update, check_pack, updates
from ttrl.training.counts import row_flops, token_counts, work_counts
from ttrl.training.faults import Finite, Skipped, advice, memory_advice, savings, somewhere
from ttrl.training.gradient_parts import GradientParts
from ttrl.training.parallel.distributed import Ranks, check_here, ranks
from ttrl.training.references import model_digest
from ttrl.training.step_metrics import Range, effective_sample_size
from ttrl.training.timing import Profiler, Stopwatch, largest_product, matmul_peak, memory_peaks
from ttrl.training.train_log import TrainProgress

HERE = Ranks(0, 1, torch.device("cpu"))


def config(**settings):
    return GRPOConfig.parse(
        {"model": "m", "packed": "p", "output_dir": "o", "device": "cpu", **settings}, "test"
    )


@pytest.fixture
def packed(samples):
    """Several rows of shared prompts."""
    pack = packed_tensors_from_tokenized_results(samples, seq_len=24, pad_id=0)
    assert pack.num_rows > 3
    return pack


# What is not finite


def test_the_first_bad_loss_is_named_by_microbatch_row_and_sample(packed):
    finite = Finite()
    trained = packed.labels != -100
    for start in range(0, packed.num_rows, 2):
        losses = torch.zeros(int(trained[start : start + 2].sum()))
        # The last label of the second row of the second microbatch, and the one before.
        if start == 2:
            losses[-2:] = torch.tensor([math.nan, math.inf])
        finite.look(losses)
    numbers = list(range(10, 10 + packed.num_rows))
    position = int(trained[3].nonzero()[-2])
    sample = packed.samples[int(packed.sample_ids[3, position])]
    assert int(finite.count()) == 2
    assert finite.described(packed, numbers, 2) == (
        f"the first is in microbatch 1, row 13, position {position}, of task {sample.task_id!r}, "
        f"sample {sample.sample}"
    )


def test_finite_losses_are_nothing_to_speak_of(packed):
    finite = Finite()
    assert finite.described(packed, list(range(packed.num_rows)), 1) is None
    assert int(finite.count()) == 0
    finite.look(torch.zeros(0))  # a microbatch of padding
    finite.look(torch.ones(3))
    assert (
        int(finite.count()) == 0
        and finite.described(packed, list(range(packed.num_rows)), 1) is None
    )


def test_somewhere_is_the_first_rank_that_knows():
    assert somewhere("here", HERE) == "here"


class Model:
    """Stands for a policy: only its parameters are looked at."""

    def __init__(self, value=1.0):
        values = {"a": torch.ones(2), "b": torch.tensor([1.0, value])}
        self._parameters = {name: torch.nn.Parameter(tensor) for name, tensor in values.items()}

    def parameters_by_name(self):
        return self._parameters


def test_steps_in_a_row_are_counted_until_there_are_too_many(caplog):
    skipped = Skipped(2, in_a_row=1)
    with caplog.at_level(logging.WARNING):
        skipped.skip(7, "the gradient norm is nan", Model(), HERE)
    assert "optimizer step 7 is skipped (2 in a row): the gradient norm is nan" in caplog.text
    with pytest.raises(
        DivergedError,
        match=r"step 8: the loss is inf; .* like the 2 before it: .* max_skipped_steps \(2\)",
    ):
        skipped.skip(8, "the loss is inf", Model(), HERE)


def test_a_step_that_is_taken_begins_the_count_anew():
    skipped = Skipped(1)
    for step in range(4):
        skipped.skip(step, "bad", Model(), HERE)
        skipped.taken()
    assert skipped.in_a_row == 0 and skipped.total == 4


def test_broken_weights_stop_at_once():
    with pytest.raises(
        DivergedError, match=r"weights of the model are not finite \(b and 0 more\)"
    ):
        Skipped(100).skip(1, "the loss is nan", Model(math.nan), HERE)


def test_broken_weights_of_another_process_stop_all_of_them():
    """Those that share layers see the same losses, but each holds weights of its own: one that went
    on would wait for ever.
    """

    class WithAnother(Ranks):
        def sum_of_all(self, values):
            return values + 1

    with pytest.raises(
        DivergedError, match="weights of the model are not finite; nothing was saved"
    ):
        Skipped(100).skip(1, "the loss is nan", Model(), WithAnother(0, 1, torch.device("cpu")))


# Memory


SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 10,
    "vocab_size": 100_000,
}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 2}


def test_what_a_setting_would_save(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    used = config(model=str(tmp_path), rows_per_microbatch=4, num_output_chunks=4)
    saved = savings(used, 4096)
    assert {
        "rows_per_microbatch: 2",
        "activation_checkpointing: true",
        "2 processes with different rows",
    } <= saved.keys()
    assert list(saved.values()) == sorted(saved.values(), reverse=True)
    # Bytes that the layers keep at the very least.
    layers = 4 * 4096 * 10 * (3 * 4096 + 6 * 1024) * 4
    assert saved["activation_checkpointing: true"] > 0.7 * layers
    assert saved["rows_per_microbatch: 2"] > layers / 2
    without = savings(
        dataclasses.replace(
            used, activation_checkpointing=True, rows_per_microbatch=1, dtype="bf16"
        ),
        4096,
    )
    assert not {"activation_checkpointing: true", "dtype: bf16"} & without.keys()
    assert not [name for name in without if name.startswith("rows_per_microbatch")]
    assert "num_output_chunks: null" in saved
    assert "lora_rank: 16 (adapters alone are trained)" in saved
    own_chunks = dataclasses.replace(
        used, num_output_chunks=None, rows_per_microbatch=1, activation_checkpointing=True
    )
    # Four times as many as of 1024 positions.
    assert "num_output_chunks: 8" in savings(own_chunks, 2048, cuda=True)
    adapted = dataclasses.replace(used, lora_rank=8)
    assert not [name for name in savings(adapted, 4096) if name.startswith("lora_rank")]
    assert "optimizer: adamw_8bit" in savings(used, 512, cuda=True).keys() - saved.keys()
    in_four_bits = dataclasses.replace(adapted, lora_base_dtype="nf4")
    assert "cpu_offload: true" not in savings(in_four_bits, 512, cuda=True)  # which it excludes
    shared = dataclasses.replace(in_four_bits, tensor_parallel=2)
    assert "2 processes with different rows" not in savings(shared, 512, cuda=True)
    assert "cpu_offload: true" in savings(adapted, 512, cuda=True)
    assert "rows of 4096 positions" in advice(
        used, 4096
    ) and "rows_per_microbatch: 2 would save about" in advice(used, 4096)
    assert "shorter rows" in advice(config(model=str(tmp_path / "nowhere")), 10)


def run_out(kind):
    if kind == "allocator":
        torch.empty(1 << 55)
    raise {
        "python": MemoryError(),
        "cuda": torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("allocator", "this machine's"),
        ("python", "this process"),
        ("cuda", r"GPU's memory ran out \(CUDA out"),
    ],
)
def test_running_out_of_memory_names_settings(kind, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with (
        pytest.raises(TrainerMemoryError, match=says) as caught,
        memory_advice(config(model=str(tmp_path)), 512),
    ):
        run_out(kind)
    assert "would save about" in str(caught.value) and "\n" not in str(caught.value)


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match=r"^shapes$"), memory_advice(config(), 512):
        raise RuntimeError("shapes")


# Work and time

MODEL = Qwen2Config(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
)


def test_flops_are_those_of_the_cost_model_and_logical_tokens_those_of_unshared_rows(
    packed, samples
):
    counted = work_counts(packed, MODEL, config())
    positions = packed.input_pos[packed.group_ids >= 0].tolist()
    assert (
        counted["flops"]
        == training_flops(model_shape(MODEL.to_dict()), positions, packed.num_trained).total
    )
    assert counted["logical_tokens"] == sum(len(sample.token_ids) - 1 for sample in samples)
    assert counted["logical_tokens"] > packed.num_tokens
    assert (
        3 * sum(each := row_flops(packed, MODEL)) == counted["flops"]
        and len(each) == packed.num_rows
    )
    ranks = [
        updates(packed, 1, (0, 1), Ranks(rank, 2, torch.device("cpu")), MODEL)[0].numbers
        for rank in (0, 1)
    ]
    assert [[number for number in numbers if number >= 0] for numbers in ranks] == [
        balance(each, 2)[rank::2] for rank in (0, 1)
    ]
    adapters = work_counts(packed, MODEL, config(lora_rank=2))
    # No gradients of frozen matrices.
    assert counted["flops"] / 3 < adapters["flops"] < 0.8 * counted["flops"]


def test_token_counts(packed):
    batch = next(
        Update(packed, 1.0, 1).microbatches(config(rows_per_microbatch=2), torch.device("cpu"))
    )
    first = packed.rows([0, 1]).trim()
    assert {name: int(count) for name, count in token_counts(batch).items()} == {
        "trained_tokens": first.num_trained,
        "row_tokens": first.num_tokens,
        "padding_tokens": first.tokens.numel() - first.num_tokens,
    }


def test_rows_are_rounded_up_to_a_multiple(packed):
    plain, rounded = (
        next(
            Update(packed, 1.0, 1).microbatches(
                config(rows_per_microbatch=1, row_length_multiple=m), torch.device("cpu")
            )
        )
        for m in (1, 7)
    )
    length = plain["tokens"].shape[1]
    assert rounded["tokens"].shape[1] == min(24, -(-length // 7) * 7)
    assert (rounded["group_ids"][:, length:] == -1).all()


def test_what_the_recipe_adds_travels_with_the_microbatches(packed):
    (step,) = updates(packed, 1, (0, 1), HERE)
    step.signals["place"] = torch.arange(step.rows.tokens.numel()).reshape(step.rows.tokens.shape)
    step.reference_hidden = [
        torch.full((int(n), 2), float(row))
        for row, n in enumerate((step.rows.labels != -100).sum(1))
    ]
    assert step.numbers == list(range(packed.num_rows)) and step.num_rows == packed.num_rows
    start = 0
    for batch in step.microbatches(config(rows_per_microbatch=2), torch.device("cpu")):
        rows, length = batch["tokens"].shape
        assert torch.equal(batch["place"], step.signals["place"][start : start + rows, :length])
        owners = torch.nonzero(batch["labels"] != -100)[:, 0] + start
        assert torch.equal(batch["reference_hidden"][:, 0], owners.float())
        start += rows
    assert start == packed.num_rows


@pytest.mark.parametrize(("count", "world_size"), [(1, 1), (3, 1), (2, 2), (3, 3), (100, 2)])
def test_every_row_is_trained_in_one_step_by_one_rank(count, world_size, packed):
    """Fault 8 of the predecessor: drop_last and left-over microbatches lost data silently."""
    seen, normalisers, rows = [], set(), 0
    for rank in range(world_size):
        dealt = updates(packed, count, (0, 1), Ranks(rank, world_size, torch.device("cpu")), MODEL)
        assert len(dealt) == min(count, packed.num_rows)
        batches = [
            list(step.microbatches(config(rows_per_microbatch=2), torch.device("cpu")))
            for step in dealt
        ]
        rows += sum(len(batch["tokens"]) for step in batches for batch in step)
        seen += [number for step in dealt for number in step.numbers if number >= 0]
        normalisers.add(tuple(step.normaliser for step in dealt))
        assert sum(step.num_rows for step in dealt) == packed.num_rows
    assert sorted(seen) == list(range(packed.num_rows))
    assert len(normalisers) == 1 and sum(normalisers.pop()) == packed.num_trained
    assert rows >= packed.num_rows and rows % world_size == 0


def test_rows_of_padding_have_no_number(packed):
    count = packed.num_rows
    ranks = [Ranks(rank, 2, torch.device("cpu")) for rank in (0, 1)]
    dealt = [
        updates(packed.rows(range(count if count % 2 else count - 1)), 1, (0, 1), rank, MODEL)[0]
        for rank in ranks
    ]
    numbers = [number for step in dealt for number in step.numbers]
    assert sorted(numbers) == [-1, *range(len(numbers) - 1)]
    for step in dealt:
        for place, number in enumerate(step.numbers):
            expected = packed.tokens[number] if number >= 0 else torch.zeros(24, dtype=torch.int64)
            assert torch.equal(step.rows.tokens[place], expected)


def test_seconds_by_part_add_up_until_they_are_taken():
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch.part("forward"):
            sum(range(1000))
    with watch.part("backward"):
        pass
    taken = watch.take()
    assert taken.keys() == {"forward", "backward"} and taken["forward"] > 0
    assert watch.take() == {}


def test_memory_peaks_are_bytes():
    before = memory_peaks(torch.device("cpu"))["host"]
    held = torch.ones(40 * 2**20, dtype=torch.uint8)
    after = memory_peaks(torch.device("cpu"))["host"]
    assert 20 * 2**20 < before <= after < 2**40 and held.numel() == 40 * 2**20


def test_the_peak_is_measured_once_with_the_largest_product():
    model = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList([torch.nn.Linear(8, 16), torch.nn.Linear(32, 8)])}
    )
    model["output"] = torch.nn.Linear(32, 1000)
    assert largest_product(model, torch.device("cpu")) == (2048, 32, 8)
    gpt2 = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Conv1D(48, 16)])})  # no nn.Linear
    assert largest_product(gpt2, torch.device("cpu")) == (2048, 16, 48)
    peak = matmul_peak((16, 32, 8), torch.float32, torch.device("cpu"))
    assert 0 < peak < 1e16
    assert matmul_peak((16, 32, 8), torch.float32, torch.device("cpu")) == peak


def test_the_best_peak_of_a_machine_is_kept(tmp_path, monkeypatch):
    """It was measured beside a busy server, or is; and a cache that cannot be used, or is damaged,
    costs nothing.
    """

    def measured():
        matmul_peak.cache_clear()
        return matmul_peak((16, 32, 8), torch.float32, torch.device("cpu"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured()
    file = tmp_path / "ttrl" / "peaks.json"
    (name,) = json.loads(file.read_text())
    assert f"{torch.get_num_threads()} threads" in name and name.endswith("torch.float32 16x32x8")
    file.write_text(json.dumps({name: 1e17, "other": 1.0}))
    assert measured() == 1e17
    assert json.loads(file.read_text()) == {name: 1e17, "other": 1.0}
    for damaged in ("{", "[]", json.dumps({name: "fast"})):
        file.write_text(damaged)
        assert 0 < measured() < 1e16 and json.loads(file.read_text())[name] < 1e16
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    assert 0 < measured() < 1e16
    matmul_peak.cache_clear()


def test_ranges_and_effective_sample_sizes():
    values = Range()
    assert values.over_ranks(HERE) == (math.inf, -math.inf)
    values.add(torch.zeros(0))
    values.add(torch.tensor([0.5, 2.0]))
    values.add(torch.tensor([1.0]))
    assert values.over_ranks(HERE) == (0.5, 2.0)
    assert effective_sample_size(3.0, 5.0, 2) == 0.9  # weights 1 and 2
    assert effective_sample_size(0.0, 0.0, 0) is None


def test_a_trace_of_the_first_steps(tmp_path):
    profiler = Profiler(tmp_path, 2, HERE)
    for number in range(3):
        with profiler.step(f"optimizer step {number}"):
            torch.ones(2) + 1
    profiler.close()
    trace = (tmp_path / "profile" / "rank-0.json").read_text()
    assert "optimizer step 1" in trace and "optimizer step 2" not in trace
    plain = Profiler(tmp_path / "no", 0, HERE)
    with plain.step("x"):
        pass
    plain.close()
    assert not (tmp_path / "no").exists()


def test_a_trace_of_fewer_steps_than_asked_for(tmp_path):
    profiler = Profiler(tmp_path, 5, HERE)
    with profiler.step("only one"):
        torch.ones(2) + 1
    profiler.close()
    assert "only one" in (tmp_path / "profile" / "rank-0.json").read_text()


# Several processes


def test_how_long_processes_wait_for_each_other_follows_from_the_model(tmp_path, monkeypatch):
    def join(backend, timeout, **_):
        raise TimeoutError(timeout.total_seconds())

    monkeypatch.setenv("WORLD_SIZE", "2")
    model, base = tmp_path / "model", tmp_path / "base"
    for folder in (model, base):
        folder.mkdir()
    with open(base / "model.safetensors", "wb") as file:
        file.truncate(int(15.2e9))  # 7B in bf16
    given, lora = {"collective_timeout": 50}, {"lora_rank": 4, "lora_base": str(base)}
    for folder, more, seconds in (
        (model, {}, 600),
        (base, {}, 1208),
        (base, given, 50),
        (model, lora, 1208),
    ):
        with (
            pytest.raises(TimeoutError, match=f"^{seconds}.0$"),
            ranks(config(model=str(folder), **more), join),
        ):
            pass


# Packs that are of another model


def test_a_pack_of_another_tokenizer_is_refused(packed, model_folder, load_policy, tmp_path):
    policy = load_policy(model_folder())
    check_pack(packed, policy, tmp_path)  # neither says which tokenizer
    (tmp_path / "tokenizer.json").write_text("{}")
    packed.metadata[TOKENIZER_KEY] = tokenizer_digest(tmp_path)
    check_pack(packed, policy, tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(PackError, match="the pack was made with another tokenizer than that of"):
        check_pack(packed, policy, tmp_path)


def test_a_training_goes_on_where_its_progress_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / "gone" / "progress"))
    progress = TrainProgress(2, HERE)
    progress.advance()
    (tmp_path / "gone").mkdir()
    progress.advance()
    assert (tmp_path / "gone" / "progress").read_text() == "2 2\n"


def test_a_pack_without_trained_tokens_or_beyond_the_context_is_refused(
    packed, model_folder, load_policy
):
    policy = load_policy(model_folder())
    untrained = dataclasses.replace(packed, labels=torch.full_like(packed.labels, -100))
    with pytest.raises(PackError, match=r"none of the pack's \d+ rows has a trained token; check"):
        check_pack(untrained, policy)
    context = policy.decoder.max_seq_len
    far = dataclasses.replace(packed, input_pos=packed.input_pos + context)
    with pytest.raises(PackError, match=rf"positions, but the model's context is {context}; low"):
        check_pack(far, policy)


# A trainer that stays


@pytest.mark.parametrize(
    ("settings", "here", "problem"),
    [
        ({}, HERE, None),
        (
            {},
            Ranks(0, 1, torch.device("cuda")),
            "device is 'cpu', but this trainer was started on 'cuda'",
        ),
        (
            {},
            Ranks(0, 1, torch.device("cpu"), tensor_ranks=2),
            "tensor_parallel is 1, but this trainer was started with 2",
        ),
        (
            {"num_threads": 77},
            HERE,
            r"num_threads is 77, but this trainer was started with \d+",
        ),
    ],
)
def test_a_trainer_is_kept_for_configs_that_it_was_started_for(
    settings, here, problem, model_folder
):
    asked = config(model=str(model_folder()), **settings)
    if problem is None:
        check_here(asked, here)
        return
    with pytest.raises(ConfigError, match=problem + "; start it again"):
        check_here(asked, here)


def test_a_process_alone_is_in_no_group():
    assert (HERE.host_group, HERE.data_group, HERE.tensor_group) == (None, None, None)


def test_a_reference_model_is_a_folder_with_a_config(tmp_path):
    with pytest.raises(ModelFolderError, match=r"has no config\.json; reference_model must be a"):
        model_digest(tmp_path)


@pytest.mark.parametrize("from_folder", [False, True])
def test_weights_that_were_set_aside_are_put_back(from_folder, model_folder, load_policy):
    """Out of the CPU's memory, or where files have them, out of the files."""
    folder = model_folder()
    policy = load_policy(folder)
    before = {name: tensor.clone() for name, tensor in policy.full_weights().items()}
    put_back = policy.set_aside(folder if from_folder else None)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    assert not torch.equal(policy.full_weights()["norm.scale"], before["norm.scale"])
    put_back()
    after = policy.full_weights()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_gradient_without_parts_has_no_share():
    parts = GradientParts({"policy", "kl"})
    assert parts.share(HERE) is None
