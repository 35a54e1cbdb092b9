"""Trainers on several machines: what torchrun is told, and which network is used."""

import psutil
import pytest

from ttrl.configs.run import TrainConfig
from ttrl.errors import UserError
from ttrl.launch import nodes


def config(**settings) -> TrainConfig:
    return TrainConfig(**{"run": "runs/x", "model": "m", "iterations": 1} | settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"nproc_per_node": 2}, None),
        ({"nnodes": 2, "cluster": "auto"}, None),
        ({"nnodes": 0}, "nnodes is 0; it must be at least 1"),
        ({"nnodes": 2}, "nnodes is 2, but that needs a Ray cluster"),
        ({"nnodes": 2, "cluster": "auto", "trainer": "once"}, "set trainer to 'resident'"),
    ],
)
def test_settings(settings, expected):
    problems = config(**settings).node_problems()
    assert (
        (problems == []) if expected is None else (len(problems) == 1 and expected in problems[0])
    ), problems


def test_rows_are_dealt_to_all_processes():
    assert config(nnodes=3, nproc_per_node=4).processes == 12


def test_what_torchrun_is_told():
    from torch.distributed.run import get_args_parser

    arguments = nodes.torchrun_arguments(2, "127.0.0.1:29400", "a1b2", leads=True, join_timeout=90)
    parsed = get_args_parser().parse_args([*arguments, "script.py"])
    assert (parsed.nnodes, parsed.rdzv_backend, parsed.rdzv_endpoint) == (
        "2",
        "ttrl",
        "127.0.0.1:29400",
    )
    assert (parsed.rdzv_id, parsed.local_addr, parsed.standalone) == ("a1b2", "127.0.0.1", False)
    assert parsed.rdzv_conf == "is_host=true,join_timeout=90"
    assert (
        nodes.torchrun_arguments(2, "[::1]:29400", "a1b2", leads=False, join_timeout=90)[-1]
        == "::1"
    )


def test_the_network_is_that_of_the_meeting_point(monkeypatch):
    loopback = next(
        n
        for n, found in psutil.net_if_addrs().items()
        if any(one.address == "127.0.0.1" for one in found)
    )
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen")  # by the user
    assert nodes.network_environment("127.0.0.1:29400") == {"GLOO_SOCKET_IFNAME": loopback}
    with pytest.raises(UserError, match=r"nowhere\.invalid:1 cannot be reached from this machine"):
        nodes.local_address("nowhere.invalid:1")
