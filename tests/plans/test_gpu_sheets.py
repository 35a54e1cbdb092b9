"""GPUs by a driver's or a user's name for them, and read without a CUDA context."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pynvml
import pytest
import torch

from ttrl import TrainConfig
from ttrl.cli import main
from ttrl.errors import UserError
from ttrl.loop.environment import describe_environment
from ttrl.loop.run_plan import plan
from ttrl.plans.gpu_sheets import SHEETS, sheet_of
from ttrl.plans.plan_machine import devices_here, gpu_named, gpus_here, this_machine
from ttrl.system.gpus import Gpu, in_child

GIB = 2**30
SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
DRIVERS_NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe",
    "NVIDIA A100-PCIE-40GB": "A100-40GB",
    "NVIDIA A800-SXM4-80GB": "A800",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H800": "H800",
    "NVIDIA H20": "H20",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200-NVL",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA GH200 120GB": "GH200",
    "NVIDIA GH200 144G HBM3e": "GH200-144GB",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB300": "GB300",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A30": "A30",
    "NVIDIA A40": "A40",
    "NVIDIA RTX A6000": "A6000",
    "NVIDIA RTX A5000": "A5000",
    "NVIDIA RTX 6000 Ada Generation": "RTX6000-Ada",
    "NVIDIA RTX 5000 Ada Generation": "RTX5000-Ada",
    "NVIDIA GeForce RTX 3090": "RTX3090",
    "NVIDIA GeForce RTX 3090 Ti": "RTX3090Ti",
    "NVIDIA GeForce RTX 4080 SUPER": "RTX4080-SUPER",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 5090": "RTX5090",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": "H100 MIG 3g.40gb",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": "A100-40GB MIG 1g.5gb",
    # None is better than another card's figures: these are measured.
    "Tesla T4": None,
    "Tesla V100-SXM2-16GB": None,
    "Tesla V100-SXM2-32GB": None,
    "Quadro RTX 6000": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 2080 Ti": None,
    "AMD Instinct MI300X": None,
    "AMD Instinct MI250X/MI250": None,
    "AMD Radeon RX 7900 XTX": None,
    "AMD Radeon PRO W7900": None,
    "Intel(R) Arc(TM) A770 Graphics": None,
}


@pytest.mark.parametrize("name", DRIVERS_NAMES)
def test_a_drivers_name_finds_its_own_sheet_and_no_other(name):
    sheet = sheet_of(name)
    assert (None if sheet is None else sheet.name) == DRIVERS_NAMES[name]


def test_a_data_sheet_gives_the_makers_figures():
    figures = {sheet.name: (sheet.flops, sheet.memory, sheet.bandwidth) for sheet in SHEETS}
    assert len(figures) == len(SHEETS)
    assert figures["H100"] == (989e12, 80e9, 3350e9)
    assert figures["L40S"] == (362e12, 48e9, 864e9)
    assert figures["A100-40GB"] == (312e12, 40e9, 1555e9)


def test_an_instance_in_mig_mode_has_its_share():
    part, whole = sheet_of("NVIDIA H100 80GB HBM3 MIG 3g.40gb"), sheet_of("NVIDIA H100 80GB HBM3")
    assert part.flops == pytest.approx(3 / 7 * whole.flops)
    assert (part.memory, part.bandwidth) == (40e9, whole.bandwidth / 2)
    assert sheet_of("NVIDIA A30 MIG 2g.12gb").flops == pytest.approx(165e12 / 2)


@pytest.mark.parametrize(
    ("typed", "count", "name", "gigabytes"),
    [
        ("H100", 1, "H100", 80),
        ("8xH100", 8, "H100", 80),
        ("2 x RTX 4090", 2, "RTX4090", 24),
        ("4090", 1, "RTX4090", 24),
        ("rtx4090", 1, "RTX4090", 24),
        ("3090ti", 1, "RTX3090Ti", 24),
        ("A100", 1, "A100-80GB", 80),
        ("a100_40gb", 1, "A100-40GB", 40),
        ("A100 40 GB", 1, "A100-40GB", 40),
        ("4xA100-80G", 4, "A100-80GB", 80),
        ("l40s", 1, "L40S", 48),
        ("L4", 1, "L4", 24),
        ("RTXA6000", 1, "A6000", 48),
        ("rtx6000ada", 1, "RTX6000-Ada", 48),
        ("rtxpro6000", 1, "RTX-PRO-6000", 96),
        ("h100-nvl", 1, "H100-NVL", 94),
        ("GH200", 1, "GH200", 96),
        ("NVIDIA H100 80GB HBM3", 1, "H100", 80),
        ("1x24GB", 1, "24GB (as RTX4090)", 24),
        ("24 GB", 1, "24GB (as RTX4090)", 24),
        ("8x80GB", 8, "80GB (as H100)", 80),
        ("2x20g", 2, "20GB (as RTX4090)", 20),
    ],
)
def test_what_users_type(typed, count, name, gigabytes):
    machine = gpu_named(typed)
    assert (machine.gpus, machine.name, machine.memory) == (count, name, gigabytes * 1e9)
    assert machine.cuda and machine.source == "data sheet"


def test_a_name_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(UserError, match=r"gpu 'H900' is unknown; choose one of .*H100.* 1x24GB"):
        gpu_named("H900")
    with pytest.raises(UserError, match=r"gpu 'Tesla V100' computes no bf16.* capability 8\.0"):
        gpu_named("Tesla V100")
    for wrong in ("", "x", "0x", "0GB", "8x"):
        with pytest.raises(UserError):
            gpu_named(wrong)


def test_the_command_plans_for_a_size(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    lines = [f"run: {tmp_path}/r", f"model: {tmp_path}", "iterations: 2", "training: {}"]
    config.write_text("\n".join(lines))
    assert main(["plan", str(config), "--gpu", "2x24GB"]) == 0
    assert "24GB (as RTX4090), 22.4 GiB, 2 of them" in " ".join(capsys.readouterr().out.split())


# Reading this machine's GPUs


class Driver:
    """NVML of a machine with GPUs, as pynvml shows it."""

    def __init__(self, *gpus, divided=()):
        self.gpus, self.divided = gpus, divided

    def install(self, monkeypatch):
        def memory(handle, version=None):
            total = self.gpus[handle][1]
            return SimpleNamespace(total=total, reserved=GIB // 2 if version else None)

        def mode(handle):
            if handle not in self.divided:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return [pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE]

        fakes = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetName": lambda handle: self.gpus[handle][0],
            "nvmlDeviceGetMemoryInfo": memory,
            "nvmlDeviceGetMigMode": mode,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(pynvml, name, fake)


@pytest.fixture
def parent(monkeypatch):
    """A process with GPUs and no right to a context; its children answer with `parent.answer`."""
    here = SimpleNamespace(answer="", asked=[])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("a context in the parent"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    in_child.cache_clear()

    run_program = subprocess.run

    def run(command, **how):
        if command[0] != sys.executable:
            return run_program(command, **how)
        here.asked.append(command)
        return SimpleNamespace(stdout="a warning of some library\n" + here.answer)

    monkeypatch.setattr(subprocess, "run", run)
    yield here
    in_child.cache_clear()


def config_on_cuda():
    return TrainConfig(run="r", model="m", iterations=1, device="cuda", dtype="bf16")


def test_the_driver_names_gpus_and_the_memory_that_programs_can_have(parent, monkeypatch):
    Driver(*[("NVIDIA A100-SXM4-80GB", 80 * GIB)] * 2).install(monkeypatch)
    assert devices_here() == [Gpu("NVIDIA A100-SXM4-80GB", 79.5 * GIB)] * 2
    machine = this_machine(config_on_cuda(), (4096, 4096))
    assert (machine.matmul, machine.bandwidth, machine.memory) == (312e12, 2039e9, 79.5 * GIB)
    assert (machine.gpus, machine.source, parent.asked) == (2, "data sheet", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus_here() == [79.5 * GIB]


def test_a_card_without_a_sheet_is_measured_by_a_child(parent, monkeypatch):
    Driver(("NVIDIA GeForce RTX 9999", 24 * GIB)).install(monkeypatch)
    parent.answer = "5e13"
    machine = this_machine(config_on_cuda(), (4096, 4096))
    assert (machine.name, machine.matmul) == ("NVIDIA GeForce RTX 9999", 5e13)
    assert machine.source == "measured"
    assert this_machine(config_on_cuda(), (4096, 4096)) == machine
    assert len(parent.asked) == 1  # once


@pytest.mark.parametrize(
    "driver",
    [
        Driver(("NVIDIA H100 80GB HBM3", 80 * GIB), divided=(0,)),
        Driver(("NVIDIA L4", 24 * GIB), ("NVIDIA H100 80GB HBM3", 80 * GIB)),
        None,
    ],
    ids=["MIG mode", "several kinds", "no NVML"],
)
def test_a_child_asks_pytorch_where_the_driver_knows_too_little(parent, monkeypatch, driver):
    if driver is not None:
        driver.install(monkeypatch)
    parent.answer = json.dumps([["NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10e9]])
    assert devices_here() == [Gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10e9)]
    assert len(parent.asked) == 1


def test_gpus_of_several_kinds_have_an_order_where_it_is_asked_for(parent, monkeypatch):
    Driver(("NVIDIA L4", 24 * GIB), ("NVIDIA H100 80GB HBM3", 80 * GIB)).install(monkeypatch)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [gpu.name for gpu in devices_here()] == ["NVIDIA L4", "NVIDIA H100 80GB HBM3"]
    assert not parent.asked


def test_the_environment_and_a_plan_make_no_context_either(parent, monkeypatch, tmp_path):
    Driver(("NVIDIA H200", 141 * GIB)).install(monkeypatch)
    assert describe_environment()["gpus"] == ["NVIDIA H200"]
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    made = plan(TrainConfig(run="r", model=str(tmp_path), iterations=1))
    assert (made.machine.name, made.machine.gpus) == ("NVIDIA H200", 1) and not parent.asked


def test_a_child_that_fails_is_told():
    with pytest.raises(UserError, match=r"cannot use the GPU: RuntimeError: driver too old; `ttrl"):
        in_child("raise RuntimeError('driver too old')")
    with pytest.raises(UserError, match=r"did not report the GPU within 0\.2 s"):
        in_child("import time; time.sleep(60)", seconds=0.2)
