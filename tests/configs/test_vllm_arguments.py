"""Arguments of vLLM that it would refuse after 20 s; against its own parser:
tests/e2e/test_vllm_arguments.py.
"""

import importlib.util

import pytest

from ttrl.configs.vllm_arguments import argument_problems, lacks_argument

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "gpu_memory_utilisation",
            0.5,
            "vLLM has no argument 'gpu_memory_utilisation'; did you mean 'gpu_memory_utilization'?",
        ),
        ("max_num_seqs", "many", "max_num_seqs is 'many'; vLLM wants a whole number"),
        ("tensor-parallel-size", 1.5, "tensor-parallel-size is 1.5; vLLM wants a whole number"),
        (
            "gpu_memory_utilization",
            90,
            "gpu_memory_utilization is 90; vLLM wants a number at most 1",
        ),
        ("enforce_eager", "yes", "enforce_eager is 'yes'; vLLM wants true or false"),
        (
            "scheduling_policy",
            "prio",
            "scheduling_policy is 'prio'; vLLM wants one of 'fcfs', 'priority'",
        ),
    ],
)
def test_what_vllm_would_refuse(name, value, said):
    assert argument_problems({name: value}) == [said]


def test_what_it_takes_is_left_to_it():
    right = {
        "max_num_seqs": 8,
        "max-model-len": "8k",
        "enable_prefix_caching": False,
        "no_enable_prefix_caching": True,
    }
    right |= {
        "compilation_config.mode": 3,
        "compilation_config": {"mode": 3},
        "gpu_memory_util": 0.5,
        "gpu_memory_utilization": 1,
    }
    right |= {
        "kv_cache_dtype": "fp8",
        "middleware": ["a.B"],
        "chat_template": "x",
        "headless": True,
        "load_format": None,
    }
    assert argument_problems(right) == []


def test_a_vllm_that_is_written_in_another_way_decides_by_itself(tmp_path):
    assert argument_problems({"what": "ever"}, tmp_path) == []
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text("parser.add_argument('--x')")
    assert argument_problems({"what": "ever"}, tmp_path) == []


def test_an_argument_of_a_newer_vllm_is_missed(monkeypatch):
    assert lacks_argument("enable_a_feature_of_tomorrow")
    assert not lacks_argument("enable_nccl_comm_suspend")
    monkeypatch.setattr("ttrl.configs.vllm_arguments._installed", lambda: None)
    assert not lacks_argument("enable_a_feature_of_tomorrow")  # nothing is known without a vLLM
