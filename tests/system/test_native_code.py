"""How our C code is compiled, kept and loaded, mostly with a compiler that copies a library that is
there.
"""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ttrl.cli import doctor
from ttrl.loop.environment import describe_environment
from ttrl.system import native_code

needs_avx512 = pytest.mark.skipif(
    native_code.attention_kernel().library is None, reason="no C compiler, or a CPU without AVX-512"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ttrl"


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Makes a copier the compiler; returns the file in which it writes a line for each call."""
    library = native_code.attention_kernel().library
    assert library is not None
    compiler, log = tmp_path / "copier", tmp_path / "calls"
    compiler.write_text(
        f'#!/bin/sh\necho >> {log}\nwhile [ "$1" != -o ]; do shift; done\ncp {tmp_path}/built '
        '"$2"\n'
    )
    compiler.chmod(0o755)
    (tmp_path / "built").write_bytes(Path(library._name).read_bytes())
    monkeypatch.setenv("CC", str(compiler))
    log.touch()
    return log


def count(log):
    return len(log.read_text().splitlines())


def works(kernel):
    return kernel.library is not None and kernel.library.workspace() > 0


@needs_avx512
def test_compiled_once_and_again_where_the_file_is_damaged(cache, calls, caplog):
    assert works(native_code._find()) and works(native_code._find())
    assert count(calls) == 1 and cache.stat().st_mode & 0o777 == 0o700
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], whole[: len(whole) // 2], whole[:5000] + b"x" + whole[5001:]):
        file.unlink()  # not overwritten in place: this process has it mapped
        file.write_bytes(damaged)
        assert works(native_code._find()) and file.read_bytes() == whole
    assert count(calls) == 5 and not caplog.records


@needs_avx512
@pytest.mark.parametrize(
    "trouble", ["a file in its place", "others can write", "somebody else's", "no home"]
)
def test_without_a_usable_cache_each_process_compiles(trouble, cache, calls, monkeypatch, caplog):
    assert works(native_code._find())
    (file,) = cache.iterdir()
    if trouble == "a file in its place":
        monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    elif trouble == "others can write":
        cache.chmod(0o777)
    elif trouble == "somebody else's":
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        cache.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(cache, 12345, -1)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "~")
    before = file.read_bytes()
    for number in (2, 3):
        kernel = native_code._find()
        assert works(kernel) and kernel.library._name != str(file) and count(calls) == number
    assert file.read_bytes() == before
    assert "no usable cache" in caplog.text


@needs_avx512
def test_processes_that_compile_at_the_same_time(cache, calls):
    code = (
        "from ttrl.system import native_code; assert "
        "native_code.attention_kernel().library.workspace() > 0"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert len(list(cache.iterdir())) == 1


@needs_avx512
def test_a_compiler_that_fails_is_a_warning_with_its_last_lines(
    cache, tmp_path, monkeypatch, caplog
):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho first >&2\necho unknown option -mavx512f >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    kernel = native_code.attention_kernel.__wrapped__()
    assert kernel.library is None and kernel.name == "PyTorch's kernel"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "exit code 3: first / unknown option -mavx512f" in record.getMessage()
    assert not list(cache.iterdir())
    compiler.write_text("#!/bin/sh\necho nonsense > /dev/null\n")  # succeeds, and writes nothing
    assert "could not be compiled" in native_code._find().why


@needs_avx512
@pytest.mark.parametrize(
    ("environment", "why", "trouble"),
    [
        ({"TTRL_NATIVE": "0"}, "TTRL_NATIVE", ""),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, "ATEN_CPU_CAPABILITY", ""),
        ({"CC": "none", "PATH": ""}, "no C compiler", "no compiler"),
    ],
)
def test_what_doctor_says_where_there_is_none(environment, why, trouble, cache, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    kernel = native_code._find()
    assert kernel.library is None and why in kernel.why and kernel.trouble == trouble
    native_code.attention_kernel.cache_clear()
    (finding,) = doctor.check_attention()
    native_code.attention_kernel.cache_clear()
    assert finding.mark == ("note" if trouble else "ok") and bool(finding.advice) is bool(trouble)
    assert why in finding.fact
    assert not cache.exists()


def test_a_cpu_without_avx512(monkeypatch):
    monkeypatch.setattr(native_code, "_cpu_line", lambda name: "avx2 fma")
    kernel = native_code._find()
    assert kernel.library is None and "AVX-512" in kernel.why


def test_environments_name_the_kernel():
    kernel = native_code.attention_kernel()
    facts = describe_environment()
    assert facts["cpu_attention"] == (None if facts["gpus"] else kernel.name)
    (finding,) = doctor.check_attention()
    assert kernel.name in finding.fact and kernel.why in finding.fact
