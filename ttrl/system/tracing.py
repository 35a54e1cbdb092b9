"""Send OpenTelemetry spans to a collector: iterations, phases, requests and graders.

OTEL_EXPORTER_OTLP_ENDPOINT turns it on, OTEL_SDK_DISABLED=true off, as the standard has it; its
other variables (headers, protocol, sampler, resource) hold, too. Without an endpoint, nothing of
OpenTelemetry is loaded, and a span costs about a microsecond. Names follow the GenAI semantic
conventions where they exist. Spans hold names, numbers and kinds of errors; never a prompt, a
completion, an error's text or a key.

A provider that the script has set is used as it is. Otherwise a thread of our own sends the spans,
and the script's current span stays current inside them: its spans may go elsewhere. A collector
that is down costs one line in the log, and at most FLUSH_SECONDS at the end.
"""

import atexit
import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from ttrl.version import __version__

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
Attributes: TypeAlias = Mapping[str, str | int | float | bool | None]
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_NO_HEADERS: Mapping[str, str] = {}
_OWN = "ttrl-span"
"""Holds the current span of our own provider in OpenTelemetry's context."""


class Span:
    """A piece of work. This one records nothing; with an endpoint, `span` makes one that does.

    As a context manager, it is the parent of the spans begun inside, and ends with the block.
    """

    __slots__ = ()
    records = False
    """Whether anything comes of its attributes."""

    def __enter__(self) -> "Span":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(kind)

    def set(self, attributes: Attributes) -> None:
        """Add attributes; None leaves one out."""

    def end(self, failure: type[BaseException] | None = None) -> None:
        """End the span, with the kind of error that ended the work."""


_NOTHING = Span()


class _RecordedSpan(Span):
    """A span of OpenTelemetry."""

    __slots__ = ("_token", "recorded")
    records = True

    def __init__(self, recorded: Any) -> None:
        self.recorded = recorded
        self._token: Any = None

    def __enter__(self) -> "Span":
        from opentelemetry import context, trace

        if _tracing.is_own:
            within = context.set_value(_OWN, self.recorded)
        else:
            within = trace.set_span_in_context(self.recorded)
        self._token = context.attach(within)
        return self

    def set(self, attributes: Attributes) -> None:
        for name, value in attributes.items():
            if value is not None:
                self.recorded.set_attribute(name, value)

    def end(self, failure: type[BaseException] | None = None) -> None:
        from opentelemetry import context
        from opentelemetry.trace import StatusCode

        if self._token is not None:
            context.detach(self._token)
            self._token = None
        if failure is not None:
            self.recorded.set_attribute("error.type", failure.__qualname__)
            self.recorded.set_status(StatusCode.ERROR)
        self.recorded.end()


class _Tracing:
    """This process's tracer, made at its first span."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_known = False
        self.tracer: Any = None
        self.is_own = False
        """Whether its provider is ours, not the script's."""

    def find(self) -> Any:
        """Return the tracer; None without an endpoint."""
        with self._lock:
            if not self.is_known:
                self.tracer, self.is_own = _tracer()
                self.is_known = True
        return self.tracer


_tracing = _Tracing()


def span(
    name: str, attributes: Attributes | None = None, *, parent: Span | None = None, kind: str = ""
) -> Span:
    """Begin a span within the current one, or within `parent`. kind: "client" for a request to a
    server.
    """
    tracer = _tracing.tracer
    if tracer is None and (_tracing.is_known or _tracing.find() is None):
        return _NOTHING
    from opentelemetry import trace

    if isinstance(parent, _RecordedSpan):
        context = trace.set_span_in_context(parent.recorded)
    else:
        context = _around()
    begun = _RecordedSpan(
        _tracing.tracer.start_span(
            name,
            context=context,
            kind=trace.SpanKind.CLIENT if kind == "client" else trace.SpanKind.INTERNAL,
        )
    )
    if attributes is not None:
        begun.set(attributes)
    return begun


def _around() -> Any:
    """Return the context with our own provider's current span; None for OpenTelemetry's current
    one.
    """
    from opentelemetry import context, trace

    own: Any = context.get_value(_OWN)
    if own is None:
        return None
    return trace.set_span_in_context(own)


def trace_headers() -> Mapping[str, str]:
    """Return the headers that tell a server the current span (`traceparent`); none without an
    endpoint.
    """
    if _tracing.tracer is None:
        return _NO_HEADERS
    from opentelemetry.trace.propagation import tracecontext

    headers: dict[str, str] = {}
    tracecontext.TraceContextTextMapPropagator().inject(headers, _around())
    return headers


@contextlib.contextmanager
def spans_to(processor: Any) -> Iterator[None]:
    """Send this process's spans to a span processor of OpenTelemetry's SDK inside the block."""
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    before = _tracing.tracer, _tracing.is_known, _tracing.is_own
    _tracing.tracer = provider.get_tracer("ttrl", __version__)
    _tracing.is_known = True
    _tracing.is_own = True
    try:
        yield
    finally:
        _tracing.tracer, _tracing.is_known, _tracing.is_own = before
        provider.shutdown()


def _tracer() -> tuple[Any, bool]:
    """Return the tracer, None without an endpoint, and whether its provider is ours."""
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if endpoint is None or disabled or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None, False
    try:
        from opentelemetry import trace

        provider = trace.get_tracer_provider()
        is_own = isinstance(provider, trace.ProxyTracerProvider)  # the script has set none
        if is_own:
            provider = _own_provider(endpoint)
    except ModuleNotFoundError as error:
        logger.warning(
            "no spans are sent to the OpenTelemetry collector, because %s is missing: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp",
            error.name,
        )
        return None, False
    except Exception as error:  # noqa: BLE001
        # A wrong variable is said once; a run does not end for it.
        kind = type(error).__name__
        logger.warning("no spans are sent: OpenTelemetry refuses its settings (%s)", kind)
        return None, False
    return provider.get_tracer("ttrl", __version__), is_own


def _own_provider(endpoint: str) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    given = Resource.create()
    if str(given.attributes.get("service.name", "")).startswith("unknown_service"):
        given = given.merge(Resource({"service.name": "ttrl"}))
    provider = TracerProvider(resource=given, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
    # It waits longer for a collector that is down, and so would the end of a run.
    atexit.register(end_within, provider, FLUSH_SECONDS)
    return provider


def end_within(provider: Any, seconds: float) -> bool:
    """Let a provider send its last spans for at most this long; return whether it was done."""
    ending = threading.Thread(target=provider.shutdown, daemon=True)
    ending.start()
    ending.join(seconds)
    return not ending.is_alive()


def _exporter(endpoint: str) -> Any:
    """Return the exporter for the standard's protocol. It says once that the collector is down."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if protocol != "grpc":
        protocol = "http"
    module = f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter"
    base: Any = importlib.import_module(module).OTLPSpanExporter
    for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
        quiet = logging.getLogger(name)  # they write a traceback for every batch
        quiet.propagate = False
        quiet.addHandler(logging.NullHandler())
    host = urlsplit(endpoint).hostname or "the collector"

    class Exporter(base):  # type: ignore[misc]
        """Says once that spans are lost."""

        _is_said = False

        def export(self, spans: Any) -> Any:
            result = super().export(spans)
            if result is not SpanExportResult.SUCCESS and not self._is_said:
                self._is_said = True
                logger.warning(
                    "OpenTelemetry: spans cannot be sent to %s; the run goes on without them", host
                )
            return result

    return Exporter()
