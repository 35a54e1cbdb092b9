"""Spans for OpenTelemetry: what they hold and never hold, who gets them, and what a collector that is
down costs.
"""

import asyncio
import http.server
import os
import socket
import subprocess
import sys
import threading

import pytest
from support.chat_server import ChatHandler, threaded

from ttrl import Task, get_task_results
from ttrl.errors import GraderError
from ttrl.system.tracing import Span, end_within, span, spans_to, trace_headers

pytest.importorskip("opentelemetry.sdk")
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture
def kept():
    exporter = InMemorySpanExporter()
    with spans_to(SimpleSpanProcessor(exporter)):
        yield exporter


def test_without_an_endpoint_nothing_is_recorded_and_nothing_is_loaded():
    code = (
        "import sys\nfrom ttrl.system.tracing import span, trace_headers\n"
        "with span('a', {'b': 1}) as one:\n    one.set({'c': 2})\n"
        "assert not one.records and not trace_headers()\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
    )
    at = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    for environment in (
        {},
        {**at, "OTEL_SDK_DISABLED": "TRUE"},
        {**at, "OTEL_TRACES_EXPORTER": "none"},
    ):
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, check=True)


def test_a_span_has_its_parent_and_the_kind_of_its_error_alone(kept):
    outer = span("outer", {"a": 1, "left out": None})
    with pytest.raises(ValueError), span("inner", parent=outer):
        with span("innermost"):
            pass
        raise ValueError("a secret completion")
    outer.end()
    innermost, inner, parent = kept.get_finished_spans()
    assert innermost.parent.span_id == inner.context.span_id
    assert inner.parent.span_id == parent.context.span_id
    assert dict(parent.attributes) == {"a": 1}
    assert dict(inner.attributes) == {"error.type": "ValueError"} and not inner.status.is_ok
    assert "secret" not in inner.to_json() and not inner.events


def test_the_script_s_own_span_stays_current_inside_ours(kept):
    theirs = TracerProvider().get_tracer("script")  # its spans go elsewhere
    with theirs.start_as_current_span("script") as script, span("outer"):
        assert trace.get_current_span() is script
        with theirs.start_as_current_span("grader's") as within, span("inner"):
            assert trace.get_current_span() is within
        assert within.parent.span_id == script.get_span_context().span_id
        headers = trace_headers()
    inner, outer = kept.get_finished_spans()
    assert inner.parent.span_id == outer.context.span_id
    assert f"{outer.context.span_id:016x}" in headers["traceparent"]
    assert trace.get_current_span() is trace.INVALID_SPAN


SCRIPT = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

class Wrapped(trace.TracerProvider):  # as some vendors do
    inner = TracerProvider()
    def get_tracer(self, *args, **kwargs):
        return self.inner.get_tracer(*args, **kwargs)

trace.set_tracer_provider(Wrapped() if WRAPPED else TracerProvider())
from ttrl.system.tracing import span
tracer = trace.get_tracer("script")
with tracer.start_as_current_span("script") as script:
    with span("ours") as ours:
        with tracer.start_as_current_span("inner") as inner:
            pass
    assert trace.get_current_span() is script
assert ours.recorded.parent.span_id == script.get_span_context().span_id
assert inner.parent.span_id == ours.recorded.get_span_context().span_id
print(ours.recorded.resource is Wrapped.inner.resource)
"""


@pytest.mark.parametrize("wrapped", [False, True])
def test_our_spans_join_those_of_the_script_s_provider(wrapped):
    done = subprocess.run(
        [sys.executable, "-c", f"WRAPPED = {wrapped}\n{SCRIPT}"],
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(wrapped)


class Traced(ChatHandler):
    models = ("m",)
    headers_seen: list[str | None] = []  # noqa: RUF012

    def do_POST(self):  # noqa: N802
        self.headers_seen.append(self.headers["traceparent"])
        super().do_POST()

    def reply(self, body):
        return "a secret completion", "stop"


def graded(choice):
    if choice.message.content != "a secret completion":
        raise GraderError("another")
    return 0.25


def sample(address):
    tasks = [Task([{"role": "user", "content": "a secret prompt"}], graded)]
    return asyncio.run(
        get_task_results(tasks, address, "m", n=1, params={"max_tokens": 9}, token_ids=False)
    )


def test_a_request_and_its_grade_by_the_conventions(kept, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a secret key")
    Traced.headers_seen.clear()
    with threaded(Traced) as address, span("rollouts"):
        (result,) = sample(address)
    assert result.samples[0].reward == 0.25
    request, grade, phase = kept.get_finished_spans()
    assert (request.name, grade.name) == ("chat m", "grade graded")
    assert request.parent.span_id == grade.parent.span_id == phase.context.span_id
    assert request.kind.name == "CLIENT"
    attributes = dict(request.attributes)
    assert attributes.pop("gen_ai.usage.input_tokens") > 0
    assert attributes.pop("gen_ai.usage.output_tokens") > 0
    assert str(attributes.pop("server.port")) in address
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 9,
        "server.address": "127.0.0.1",
    }
    assert dict(grade.attributes) == {
        "gen_ai.evaluation.name": "graded",
        "gen_ai.evaluation.score.value": 0.25,
    }
    for one in kept.get_finished_spans():
        assert "secret" not in one.to_json()
    (header,) = {one for one in Traced.headers_seen if one}
    assert header.startswith(f"00-{request.context.trace_id:032x}-{request.context.span_id:016x}-0")


def test_without_a_span_servers_get_no_header(monkeypatch):
    Traced.headers_seen.clear()
    with threaded(Traced) as address:
        sample(address)
    assert set(Traced.headers_seen) == {None}
    assert not trace_headers() and isinstance(span("any"), Span)


SPANS = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from ttrl.system.tracing import span
for number in range(600):  # more than a batch
    with span(f"span {number}", {"number": number}):
        pass
"""


def traced_process(endpoint, **environment):
    return subprocess.run(
        [sys.executable, "-c", SPANS],
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_collector_gets_all_spans_and_the_users_headers():
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    names, keys, services = set(), set(), set()

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            keys.add(self.headers["x-key"])
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                services.update(
                    one.value.string_value
                    for one in resource.resource.attributes
                    if one.key == "service.name"
                )
                names.update(one.name for scope in resource.scope_spans for one in scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        done = traced_process(address, OTEL_EXPORTER_OTLP_HEADERS="x-key=sesame")
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0 and done.stderr == ""
    assert names == {f"span {number}" for number in range(600)}
    assert keys == {"sesame"} and services == {"ttrl"}


def test_a_collector_that_refuses_is_said_once_and_the_process_ends():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"http://me:sesame@127.0.0.1:{taken.getsockname()[1]}"
        limits = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1", "OTEL_EXPORTER_OTLP_HEADERS": "x-key=sesame"}
        done = traced_process(address, **limits)
    assert done.returncode == 0 and "sesame" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert "spans cannot be sent to 127.0.0.1; the run goes on without them" in line


def test_a_collector_that_never_answers_does_not_keep_the_process():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        done = traced_process(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert done.returncode == 0 and len(done.stderr.splitlines()) <= 1


def test_the_end_of_a_provider_is_waited_for_in_vain_only_so_long():
    release = threading.Event()

    class Provider:
        def shutdown(self):
            release.wait(60)

    assert not end_within(Provider(), 0.01)
    release.set()
    assert end_within(Provider(), 60)


def test_a_wrong_setting_is_said_and_the_work_goes_on():
    done = traced_process("http://127.0.0.1:9", OTEL_BSP_MAX_QUEUE_SIZE="1")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert "OpenTelemetry refuses its settings (ValueError)" in line
