"""What the steps of `tools/gpu_day` compute: models, samples, kinds of kernels, outcomes."""

import itertools
import json
import types

import made_model
import pytest
import step_attention
import step_checks
import step_kernels
import step_runs
import torch
from record import Report
from steps import Place
from transformers import AutoConfig, AutoTokenizer

from ttrl.training.kernels.attention import dense_attend


def test_a_random_model_has_a_token_for_every_id_and_encodes_any_text(tmp_path):
    folder = made_model.random_model(tmp_path, made_model.TINY, "cpu")
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    size = made_model.TINY["vocab_size"]
    assert config.vocab_size == len(tokenizer) == size
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    assert len(set(tokens)) == size and tokens[-5:] == made_model.SPECIAL
    assert config.pad_token_id == tokenizer.pad_token_id
    assert config.eos_token_id == tokenizer.eos_token_id
    for text in ("What is 17 + 25?", "naïve — 東京\n\x00", "<|user|>"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert made_model.random_model(tmp_path, made_model.TINY, "cpu") == folder


def test_a_vocabulary_of_published_size_is_a_byte_pair_encoding():
    alphabet = [chr(number) for number in range(256)]
    vocabulary, merges = made_model.byte_pairs(alphabet, 151_931)
    assert sorted(vocabulary.values()) == list(range(151_931))
    for one, two in merges:
        assert one in vocabulary and two in vocabulary and one + two in vocabulary
    assert len(merges) == 151_931 - 256


def test_answers_of_a_random_model_end_after_as_many_tokens_as_gsm8ks():
    for vocabulary in (2048, 151_936):
        ids = step_runs.endings(vocabulary)
        assert vocabulary / len(ids) == pytest.approx(step_runs.MEAN_ANSWER, rel=0.2)
        assert max(ids) < vocabulary - len(made_model.SPECIAL)
    prompts = {task.messages[0]["content"] for task in step_runs.questions(96)}
    assert len(prompts) == 96 and {len(text) for text in prompts} == {step_runs.QUESTION_CHARACTERS}


@pytest.mark.parametrize("rehearse", [True, False])
@pytest.mark.parametrize("step", [step_runs.whole_run, step_runs.lora_run])
def test_a_run_asks_for_what_a_run_may_have(step, rehearse, tmp_path):
    asked = []

    class Here(Place):
        models = tmp_path / "models"

    def make(folder, *_):
        folder.mkdir(parents=True)
        return folder

    def train(config, *_, **__):
        asked.append(config.check("TrainConfig"))

    place = Here(Report(tmp_path / "logs"), tmp_path, rehearse)
    step(place, step_runs.Means(make, train))
    assert asked[0].iterations > 1


@pytest.mark.long
@pytest.mark.parametrize("mask", step_attention.SMALL, ids=lambda mask: mask.name)
def test_every_way_computes_attention_of_the_same_samples(mask):
    """Long: only this compares the kit's ways with dense attention before a GPU does. The recipe's own:
    tests/training/kernels.
    """
    place = types.SimpleNamespace(device="cpu", rehearse=True)
    inputs = step_attention.make_inputs(mask, place)
    starts, longest, places = step_attention.samples_of(inputs.rows)
    in_row = inputs.rows.input_pos[0]
    positions = [in_row[places[a:b]].tolist() for a, b in itertools.pairwise(starts)]
    assert positions == [list(range(mask.prompt + mask.answer - 1))] * len(positions)
    assert len(positions) % step_attention.GROUP == 0 and longest == len(positions[0])
    wide = [x.double() for x in (inputs.q, inputs.k, inputs.v)]
    scale = step_attention.WIDTH**-0.5
    exact = dense_attend(*wide, inputs.plan, scale, None, None)[0].transpose(0, 1)[places]
    for way in step_attention.ways(inputs, place):
        with torch.no_grad():
            out = way.compute()
        own = out if way.alone else out[0].transpose(0, 1)[places]
        assert float((own.double() - exact).norm() / exact.norm()) < 0.01, way.name


def test_tiles_of_the_backward_pass_are_multiples_of_each_other():
    """FlexAttention's backward kernels walk one side of a tile in steps of the other."""
    for forward, backward in zip(step_attention.TILES, step_attention.BACKWARD_TILES, strict=True):
        options = step_attention.tile_options(forward, backward)
        assert options["bwd_BLOCK_N1"] % options["bwd_BLOCK_M1"] == 0
        assert options["bwd_BLOCK_M2"] % options["bwd_BLOCK_N2"] == 0
        assert 128 % options["fwd_BLOCK_M"] == 128 % options["fwd_BLOCK_N"] == 0


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n", "matrix products"),
        ("triton_tem_fused_flex_attention_backward_zeros_0", "attention"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("gradient_kernel", "head"),
        ("at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("triton_red_fused__to_copy_mean_pow_rsqrt_3", "norms and sums"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float>>", "norms and sums"),
        ("triton_poi_fused_mul_silu_5", "element by element"),
        ("void at::native::vectorized_elementwise_kernel<4, SiluFunctor>", "element by element"),
        ("something new", "others"),
    ],
)
def test_kernels_have_the_kind_that_their_name_says(kernel, kind):
    assert step_kernels.kind_of(kernel) == kind


def test_a_trace_is_summed_by_kind(tmp_path):
    events = [
        {"cat": "kernel", "name": "nvjet_a", "dur": 3000.0},
        {"cat": "kernel", "name": "nvjet_a", "dur": 1000.0},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH", "dur": 500.0},
        {"cat": "cpu_op", "name": "aten::mm", "dur": 9000.0},
        {"ph": "M", "name": "process_name"},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    kinds, longest = step_kernels.by_kind(tmp_path / "trace.json", on_gpu=True)
    assert list(kinds) == ["matrix products", "copies"]
    assert kinds["matrix products"] == (pytest.approx(0.004), 2)
    assert longest[0] == ["nvjet_a", pytest.approx(0.004)]
    kinds, _ = step_kernels.by_kind(tmp_path / "trace.json", on_gpu=False)
    assert list(kinds) == ["matrix products"]


def test_tests_that_were_cut_off_keep_their_names():
    lines = [
        {"test": "a", "event": "start"},
        {"test": "a", "event": "end", "outcome": "passed"},
        {"test": "a", "event": "end", "outcome": "error", "reason": "a fixture"},
        {"test": "b", "event": "start"},
        {"test": "c", "event": "start"},
        {"test": "c", "event": "end", "outcome": "skipped"},
    ]
    ended, unfinished = step_checks.outcomes_of(lines)
    assert {name: line["outcome"] for name, line in ended.items()} == {"a": "error", "c": "skipped"}
    assert unfinished == ["b"]
