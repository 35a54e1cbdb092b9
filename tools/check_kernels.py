"""Compile our kernels for GPUs that are not there: `python tools/check_kernels.py [--gpus 89 120]
[--head-dims 128 256]`.

Attention's: tensors without memory on a GPU without a driver are enough for PyTorch to generate
FlexAttention's kernels, forward and backward, with our masks and options; Triton and its ptxas
compile them for each architecture. Each must fit the shared memory that the architecture has for a
block. Needs g++ and triton, and about a minute for a line of the table. The output head's
(`ttrl.training.kernels.fused_head`) take seconds, and nothing else is done after `--head-dims`
without a number. Exits with 1 if one does not fit.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SHARED = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory for a block, by compute capability (CUDA programming guide, technical
specifications).
"""

# PyTorch without CUDA has no devices, streams and events of that name.
STAND_IN = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/detail/CUDAHooksInterface.h>
namespace c10::impl {
struct Guard : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
  Stream getDefaultStream(Device d) const override { return getStream(d); }
  Stream exchangeStream(Stream s) const noexcept override { return s; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard); }
struct Hooks : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
};
namespace at { using StandIn = ::Hooks; C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, StandIn) }
"""  # noqa: E501


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=list(SHARED), help="compute capabilities"
    )
    parser.add_argument("--head-dims", type=int, nargs="*", default=[64, 96, 128, 256])
    parser.add_argument("--window", action="store_true", help="with the mask of sliding windows")
    # In a process that has the stand-in.
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        return in_this_process(arguments.gpus[0], arguments.head_dims[0], arguments.window)
    torch_folder = Path(torch.__file__).parent
    wrong = sum(output_head(gpu) for gpu in arguments.gpus)
    if not arguments.head_dims:
        return int(wrong > 0)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "stand_in.cpp")
        library = Path(folder, "stand_in.so")
        source.write_text(STAND_IN)
        include = [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
        command = [
            "g++",
            "-std=c++20",
            "-shared",
            "-fPIC",
            *include,
            source,
            "-o",
            library,
            f"-L{torch_folder}/lib",
        ]
        subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
        environment = os.environ | {
            "LD_PRELOAD": str(library),
            "LD_LIBRARY_PATH": str(torch_folder / "lib"),
        }
        for gpu in arguments.gpus:
            for head_dim in arguments.head_dims:
                one = [
                    sys.executable,
                    "-W",
                    "ignore",
                    __file__,
                    "--here",
                    "--gpus",
                    str(gpu),
                    "--head-dims",
                    str(head_dim),
                ]
                wrong += (
                    subprocess.run(
                        one + ["--window"] * arguments.window, env=environment, check=False
                    ).returncode
                    != 0
                )
    return int(wrong > 0)


def output_head(gpu: int) -> int:
    """Print a line for each of the output head's kernels, for logits in fp32 of products in bf16,
    with all that they can do.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ttrl.training.kernels import fused_head

    of_tensors = {"raw": "*fp32", "out": "*bf16", "labels": "*i64"}
    of_numbers = {
        "V": "i32",
        "stride": "i64",
        "out_stride": "i64",
        "cap": "fp32",
        "temperature": "fp32",
    }
    constants = {"CAPPED": True, "ENTROPY": True, "BLOCK": fused_head.BLOCK}
    wrong = 0
    for kernel in (fused_head.measure_kernel, fused_head.gradient_kernel):
        given = {name: value for name, value in constants.items() if name in kernel.arg_names}
        signature = {
            name: (of_tensors | of_numbers).get(name, "*fp32")
            for name in kernel.arg_names
            if name not in given
        }
        source = ASTSource(kernel, signature | dict.fromkeys(given, "constexpr"), given)
        result = triton.compile(
            source, target=GPUTarget("cuda", gpu, 32), options={"num_warps": fused_head.WARPS}
        )
        shared = result.metadata.shared
        size = len(result.asm["cubin"])
        wrong += shared > SHARED[gpu] * 1024
        print(
            f"sm_{gpu:<4} {kernel.__name__:<18} {shared / 1024:6.1f} of {SHARED[gpu]} KiB, "
            f"{size} bytes of code",
            flush=True,
        )
    return wrong


def in_this_process(gpu: int, head_dim: int, window: bool) -> int:
    """Print a line for each kernel. Returns 1 if one does not fit."""
    pretend(gpu)
    wrong = 0
    for name, text in generated(head_dim, window):
        sizes = dict(re.findall(r"\b(BLOCK_\w+) : tl.constexpr = (\d+)", text))
        tiles = " ".join(f"{what} {size}" for what, size in sizes.items())
        shared, stages, warps = compiled(text, gpu)
        fits = shared <= SHARED[gpu] * 1024
        wrong += not fits
        print(
            f"sm_{gpu:<4} heads of {head_dim:<4} {name:<9} {tiles:<52} stages {stages} warps "
            f"{warps} "
            f"{shared / 1024:6.1f} of {SHARED[gpu]} KiB {'' if fits else '  TOO MUCH'}",
            flush=True,
        )
    return int(wrong > 0)


def pretend(gpu: int) -> None:
    """Let PyTorch and Triton believe in a GPU of this compute capability."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import compile_fx
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = divmod(gpu, 10)
    shared = SHARED[gpu] * 1024
    properties = types.SimpleNamespace(
        **{
            "name": f"sm_{gpu}",
            "major": major,
            "minor": minor,
            "multi_processor_count": 100,
            "warp_size": 32,
        },
        **{
            "regs_per_multiprocessor": 65536,
            "max_threads_per_multi_processor": 1536,
            "max_threads_per_block": 1024,
        },
        **{
            "gcnArchName": "",
            "total_memory": 24 << 30,
            "shared_memory_per_block": 48 << 10,
            "shared_memory_per_block_optin": shared,
        },
    )
    cuda: Any = torch.cuda
    cuda.get_device_properties, cuda.get_device_capability = (
        lambda *_: properties,
        lambda *_: (major, minor),
    )
    cuda.current_device, cuda.device_count = lambda: 0, lambda: 1
    for interface in (CudaInterface, CudaInterface.Worker):
        answers = {
            "get_device_properties": properties,
            "current_device": 0,
            "get_compute_capability": gpu,
        }
        for name, answer in (answers | {"is_triton_capable": True, "is_available": True}).items():
            setattr(interface, name, staticmethod(lambda *_, answer=answer: answer))
    compile_fx._check_triton_bf16_support = lambda *_: None
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", gpu, 32), get_current_device=lambda: 0
        )
    )


def generated(head_dim: int, window: bool) -> list[tuple[str, str]]:
    """Return the modules of the forward and the backward kernel, by name."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ttrl.training.kernels.attention import attention_plan, compiled_flex, flex_attend

    sources: list[str] = []

    class EnoughError(Exception):
        """The source is there."""

    def keep(self: Any) -> None:
        sources.append(self.codegen()[0].value)
        raise EnoughError

    GraphLowering._compile_to_module = keep  # type: ignore[assignment, method-assign]

    def generate(graph: Any, inputs: Any) -> Callable[..., Any]:
        before = len(sources)
        try:
            compile_fx_inner(graph, inputs)
        except Exception:
            if len(sources) == before:
                raise
        boxed: Callable[..., Any] = make_boxed_func(graph.forward)
        return boxed

    backend = aot_autograd(
        fw_compiler=generate, bw_compiler=generate, decompositions=select_decomp_table
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (
            torch.empty(2, 640, heads, head_dim, device="cuda", dtype=torch.bfloat16)
            for heads in (8, 2, 2)
        )
        heads_first = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
        ids = [torch.empty(2, 640, dtype=torch.int64, device="cuda") for _ in range(3)]
        plan = attention_plan(ids[0], ids[1], ids[2], torch.bfloat16)
        out = flex_attend(
            heads_first[0],
            heads_first[1],
            heads_first[2],
            plan,
            0.1,
            None,
            99 if window else None,
            compiled_flex(backend),
        )
        out.sum().backward()
    kernels = [
        dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", source, re.DOTALL))
        for source in sources
    ]
    forward, backward = (
        next(text for name, text in found.items() if "_tem_" in name) for found in kernels
    )
    return [("forward", forward), ("backward", backward)]


def compiled(text: str, gpu: int) -> tuple[int, int, int]:
    """Compile a kernel's module. Returns bytes of shared memory for a block, stages and warps."""
    import triton
    from torch._inductor.runtime import triton_heuristics
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found: list[tuple[Any, dict[str, Any]]] = []
    triton_heuristics.template = lambda **settings: (
        lambda kernel: found.append((kernel, settings)) or kernel
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(text)
        file.flush()
        spec = importlib.util.spec_from_file_location("kernel", file.name)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        kernel, settings = found[0]
        meta = settings["triton_meta"]
        sizes = {name: settings[name] for name in ("num_stages", "num_warps")}
        source = ASTSource(kernel, dict(meta["signature"]), meta["constants"], meta["configs"][0])
        result = triton.compile(source, target=GPUTarget("cuda", gpu, 32), options=sizes)
    return result.metadata.shared, sizes["num_stages"], sizes["num_warps"]


if __name__ == "__main__":
    sys.exit(main())
