"""Starting, watching and stopping a server process; vLLM's place is taken by a small script
(conftest.py).
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ttrl.errors import (
    ConfigError,
    ModelFolderError,
    ServerDiedError,
    ServerError,
    ServerStartError,
)
from ttrl.server.vllm import VLLMServer, own_argument_problems, seconds_to_start


def test_start_ask_and_stop(fake_server, tmp_path):
    with fake_server() as server:
        server.check()
        assert server.base_url == f"http://127.0.0.1:{server.port}/v1"
        pid = server._child.pid
        with pytest.raises(ServerError, match=r"POST /nothing: the server"):
            server.request("POST", "/nothing")
        for path in tmp_path.rglob("*"):
            assert path.is_dir() or server.api_key.encode() not in path.read_bytes()
    assert not psutil.pid_exists(pid)
    with pytest.raises(ServerDiedError, match="never started, or was stopped"):
        server.check()


def test_a_proxy_in_the_environment_is_not_used(fake_server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    with fake_server(start_timeout=60) as server:
        server.request("GET", "/v1/models")
        assert not server.endpoint().uses_proxy


def test_death_at_start_shows_the_last_lines_and_the_first_error(fake_server):
    server = fake_server("die")
    with pytest.raises(ServerStartError) as error:
        server.start()
    text = str(error.value)
    assert "ended with exit code 3" in text
    assert [int(n) for n in re.findall(r"line (\d+)", text)] == list(range(10, 40))
    assert "ValueError: the root of it all" in text  # 40 lines earlier


def test_not_healthy_in_time(fake_server):
    # Long enough to say "loading" on a busy machine.
    server = fake_server("hang", start_timeout=5.0)
    with pytest.raises(
        ServerStartError,
        match=r"(?s)not healthy after 5 s \(it never answered\).*start_timeout.*loading",
    ):
        server.start()
    assert server._child is None


def test_large_models_may_take_longer_to_start(tmp_path):
    for number in range(2):
        with open(tmp_path / f"model-{number}.safetensors", "wb") as file:
            file.truncate(70 * 10**9)  # no bytes are written
    assert seconds_to_start(tmp_path) == 300 + 1400
    assert seconds_to_start("Qwen/Qwen2.5-7B") == 1800


def test_stopped_from_another_thread_while_it_starts(fake_server):
    server, errors = fake_server("hang"), []

    def start():
        try:
            server.start()
        except ServerStartError as error:
            errors.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    while not server.is_started:
        time.sleep(0.01)
    pid = server._child.pid
    server.stop()
    thread.join(30)
    assert not thread.is_alive() and errors == ["the server was stopped during its start"]
    assert not server.is_started and not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    "host, url",
    [
        ("10.0.0.7", "http://10.0.0.7:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("fe80::7", "http://[fe80::7]:1"),
    ],
)
def test_the_address_to_listen_on_is_the_users(tmp_path, host, url):
    server = VLLMServer(
        tmp_path, served_model_name="m", log_path=tmp_path / "log", port=1, host=host, api_key="k"
    )
    command = server._command()
    assert command[command.index("--host") + 1] == host and (server.root_url, server.api_key) == (
        url,
        "k",
    )
    default = VLLMServer(tmp_path, served_model_name="m", log_path=tmp_path / "log")._command()
    assert default[default.index("--host") + 1] == "127.0.0.1"


def test_what_servers_of_adapters_are_started_with(tmp_path):
    server = VLLMServer(
        tmp_path, served_model_name="m", log_path=tmp_path / "log", serves_adapters=True
    )
    assert (
        "--enable-lora" in server._command()
        and server._environment()["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    )
    server.stop()


def test_what_servers_that_fetch_adapters_are_started_with(tmp_path):
    given = {
        "served_model_name": "m",
        "log_path": tmp_path / "log",
        "extra_args": {"middleware": "their.own"},
    }
    server = VLLMServer(tmp_path, **given, adapters_from="s3://bucket/run")
    command = server._command()
    assert "--enable-lora" in command
    added = [command[place + 1] for place, word in enumerate(command) if word == "--middleware"]
    # The last is outermost.
    assert added == ["their.own", "ttrl.server.sites.FetchAdapters", "ttrl.server.auth.RequireKey"]
    environment = server._environment()
    address, folder, model = json.loads(environment["TTRL_ADAPTERS"])
    assert (address, model) == ("s3://bucket/run", str(tmp_path)) and Path(
        folder
    ).parent == server._private
    server.stop()


def test_further_names_are_served_once_each_and_never_the_adapters(tmp_path):
    """An adapter cannot be loaded under a name that the base has."""

    def names(*others, **arguments):
        server = VLLMServer(
            tmp_path, served_model_name="m", other_names=others, log_path="x", **arguments
        )
        command = server._command()
        server.stop()
        return command[command.index("--served-model-name") + 1 : command.index("--host")]

    assert names() == ["m"] and names("org/n", "m") == ["m", "org/n"]
    assert names("org/n", "policy-adapter", serves_adapters=True) == ["m", "org/n"]


def test_a_server_that_answers_without_the_key_is_refused(fake_server):
    with pytest.raises(ServerStartError, match="it answers without a key"):
        fake_server("open", start_timeout=5.0).start()


def test_port_in_use(fake_server, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ServerStartError,
            match=rf"127\.0\.0\.1:{port}: Address already in use; use another port",
        ):
            fake_server(port=port).start()
    assert not (tmp_path / "server.log").exists()  # nothing was started


@pytest.mark.parametrize("host", ["203.0.113.1", "2001:db8::1"])
def test_an_address_of_another_machine(checkpoints, tmp_path, host):
    server = VLLMServer(checkpoints[0], served_model_name="m", log_path=tmp_path / "log", host=host)
    with pytest.raises(
        ServerStartError,
        match=rf"cannot serve at {host}:any port: .*check that it is an address of this machine",
    ):
        server.start()


def test_nobody_else_listens_at_the_port_of_a_dead_server(fake_server):
    """And is sent its key. Another user says, as vLLM does, that the port may be shared."""
    with fake_server() as server:
        os.kill(server._child.pid, signal.SIGKILL)
        with pytest.raises(ServerDiedError):
            server.request("GET", "/v1/models")
        options = (
            (socket.SO_REUSEADDR, socket.SO_REUSEPORT)
            if os.getuid() == 0
            else (socket.SO_REUSEADDR,)
        )
        os.seteuid(65534 if os.getuid() == 0 else os.getuid())
        try:
            with socket.socket() as squatter:
                for option in options:
                    squatter.setsockopt(socket.SOL_SOCKET, option, 1)
                with pytest.raises(OSError, match="Address already in use"):
                    squatter.bind(("127.0.0.1", server.port))
        finally:
            os.seteuid(os.getuid())
        server.restart()
        server.request("GET", "/v1/models")
    socket.create_server(("127.0.0.1", server.port)).close()  # it is given back
    other = VLLMServer("m", served_model_name="m", log_path="x", port=server.port)
    # Of one user, too, each server has its own.
    assert other._hold_port() == server.port != server._hold_port()
    other.stop()


def test_a_bad_model_folder_is_refused_before_anything_starts(fake_server, checkpoints, tmp_path):
    (checkpoints[0] / "chat_template.jinja").unlink()
    with pytest.raises(ModelFolderError, match="no chat template"):
        fake_server().start()
    assert not (tmp_path / "server.log").exists()


def test_a_server_that_dies_later(fake_server):
    with fake_server() as server:
        with pytest.raises(ServerDiedError, match=r"(?s)exit code 9.*last lines.*loading"):
            server.request("POST", "/crash")
            server._child.wait(60)
            server.check()
        with pytest.raises(ServerDiedError):
            server.request("GET", "/metrics")


def test_a_server_whose_engine_is_dead(fake_server):
    with (
        fake_server("dead-engine") as server,
        pytest.raises(ServerDiedError, match="engine is dead"),
    ):
        server.check()


def test_restart_keeps_port_and_key(fake_server, checkpoints):
    with fake_server() as server:
        before = server.port, server.api_key, server._child.pid
        server.restart(checkpoints[1])
        assert (server.port, server.api_key) == before[:2] and server._child.pid != before[2]
        assert server.model_folder == checkpoints[1]


def test_the_command(checkpoints, tmp_path):
    arguments = {
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "seed_x": None,
        "overrides": {"a": 1},
        "sizes": [1, 2],
    }
    server = VLLMServer(
        checkpoints[0],
        served_model_name="m",
        log_path=tmp_path / "log",
        extra_args={**arguments, "logprobs_mode": "raw_logprobs", "middleware": "a.B"},
    )
    command = server._command()
    line = " ".join(command)
    assert (
        "--max-num-seqs 8" in line
        and "--no-enable-prefix-caching" in line
        and "--seed-x" not in line
    )
    assert '--overrides {"a": 1}' in line and "--sizes 1 2" in line
    assert (
        "--generation-config vllm" in line
        and "--logprobs-mode raw_logprobs" in line
        and "processed" not in line
    )
    assert (
        line.endswith("--middleware a.B --middleware ttrl.server.auth.RequireKey")
        and "--host 127.0.0.1" in line
    )
    assert server.api_key not in line
    environment = server._environment()
    assert environment["VLLM_API_KEY"] == server.api_key
    assert environment["VLLM_RPC_BASE_PATH"] == str(server._private)  # sockets go with the server
    with pytest.raises(ConfigError, match=r"api-key is set by ttrl(?s:.)*host is set by ttrl"):
        VLLMServer(
            "m", served_model_name="m", log_path="x", extra_args={"api_key": "x", "host": "0.0.0.0"}
        )


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        ({"hf_token": "sesame"}, "hf-token .*; export HF_TOKEN"),
        (
            {"kv_transfer_config": {"kv_connector_extra_config": {"password": "sesame"}}},
            "into the environment or a file",
        ),
        (
            {"kv_transfer_config": '{"extra": [{"api_key": "sesame"}]}'},
            "into the environment or a file",
        ),
        ({"otlp_traces_endpoint": "https://me:sesame@host/v1"}, "remove the credentials"),
        (
            {"speculative_config": {"model": "https://host/m?token=sesame"}},
            "remove the credentials",
        ),
    ],
)
def test_a_secret_is_never_on_a_command_line(arguments, way_out, tmp_path):
    """Nor in vLLM's log, where it writes its arguments."""
    with pytest.raises(ConfigError, match=way_out) as refused:
        VLLMServer(tmp_path, served_model_name="m", log_path=tmp_path / "log", extra_args=arguments)
    assert "sesame" not in str(refused.value)
    harmless = {
        "allowed_headers": ["*"],
        "chat_template_content_format": "{{ x }}?y=1",
        "speculative_config": {"model": "m", "num_speculative_tokens": 3},
        "max_num_seqs": 8,
    }
    assert own_argument_problems(harmless) == []


def test_a_server_s_processes_meet_and_compile_where_nobody_else_can_reach(monkeypatch, tmp_path):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environment = VLLMServer("m", served_model_name="m", log_path="x")._environment()
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "ttrl" / "inductor")
    several = VLLMServer("m", served_model_name="m", log_path="x", extra_args={"nnodes": 2})
    assert "GLOO_SOCKET_IFNAME" not in several._environment()


def test_threads_wait_for_a_moment_before_they_sleep(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    here = {"served_model_name": "m", "log_path": "x", "cpu": True}
    environment = VLLMServer("m", **here)._environment()
    assert (
        environment["OMP_WAIT_POLICY"] == "PASSIVE"
        and 0 < int(environment["GOMP_SPINCOUNT"]) <= 5000
    )
    own = VLLMServer("m", **here, env={"GOMP_SPINCOUNT": "7"})
    assert own._environment()["GOMP_SPINCOUNT"] == "7"


def test_a_small_model_s_command_on_a_cpu(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 262, "hidden_size": 128}')

    def line(cpu, **arguments):
        given = {"served_model_name": "m", "log_path": tmp_path / "log", **arguments}
        return " ".join(VLLMServer(tmp_path, cpu=cpu, **given)._command())

    large, own = "--max-num-seqs 512 --max-num-batched-tokens 8192", {"max_num_batched_tokens": 256}
    for cpu in (True, False):
        assert (large in line(cpu)) == cpu == ("--enforce-eager" in line(cpu))
        # vLLM would end with an error where a step has fewer tokens than sequences.
        given = line(cpu, extra_args=own)
        assert "--max-num-batched-tokens 256" in given and "--max-num-seqs" not in given


TESTS = str(Path(__file__).parents[1])
OWNER = """
import pathlib, sys, time
sys.path.append(sys.argv[1])
from support.fake_vllm import FakeVLLM
folder = pathlib.Path(sys.argv[2])
server = FakeVLLM(folder / "old", served_model_name="m", log_path=folder / "server.log").start()
print(server._child.pid, server._child._guard.pid, "torch" in sys.modules, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_nothing_is_left_when_the_owner_is_killed(tmp_path, checkpoints):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, TESTS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        child, guard, loads_torch = owner.stdout.readline().split()
        processes = [psutil.Process(int(child)), psutil.Process(int(guard))]
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.communicate()
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert loads_torch == "False"


def test_it_is_started_once_and_says_whether_it_has_ended(fake_server):
    server = fake_server()
    assert not server.has_ended
    with server.start():
        with pytest.raises(RuntimeError, match="has been started already; stop"):
            server.start()
        assert not server.has_ended
        os.kill(server._child.pid, signal.SIGKILL)
        server._child.wait(30)
        assert server.has_ended


def test_the_longest_sequence_is_the_user_s(tmp_path):
    made = VLLMServer(tmp_path, served_model_name="m", log_path=tmp_path / "log", max_model_len=77)
    command = made._command()
    assert command[command.index("--max-model-len") + 1] == "77"
