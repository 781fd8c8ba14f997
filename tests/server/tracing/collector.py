"""A collector of traces at a port of this machine: takes OTLP over HTTP and reads its protobuf."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

DEADLINE_SECONDS = 30.0
PATH = "/v1/traces"


class Collector:
    """What came, byte by byte and span by span.

    :param status: of its answers.
    """

    def __init__(self, url: str, status: int) -> None:
        self.url, self.status = url, status
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.came = threading.Condition()
        self._coming = 0

    def comes(self) -> None:
        with self.came:
            self._coming += 1

    def took(self, body: bytes, headers: dict[str, str]) -> None:
        with self.came:
            self.bodies.append(body)
            self.headers.append(headers)
            self._coming -= 1
            self.came.notify_all()

    @property
    def spans(self) -> list[Span]:
        self.settle()
        with self.came:
            sent = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for one in sent
            for of_resource in one.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    @property
    def resource(self) -> dict[str, Any]:
        self.settle()
        first = ExportTraceServiceRequest.FromString(self.bodies[0])
        return values(first.resource_spans[0].resource.attributes)

    def settle(self) -> None:
        """Wait until all that was answered is here: whoever sent it may look right after that."""
        with self.came:
            assert self.came.wait_for(lambda: not self._coming, DEADLINE_SECONDS)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        with self.came:
            while not condition():
                left = deadline - time.monotonic()
                assert left > 0, f"only {[span.name for span in self.spans]} came in time"
                self.came.wait(left)

    def trace(self, answer_id: str) -> tuple[Span, list[Span]]:
        """The span of a visit and those below it, once they are here."""

        def visits() -> list[Span]:
            return [s for s in self.spans if attributes(s).get("gen_ai.response.id") == answer_id]

        self.until(lambda: bool(visits()))
        [visit] = visits()
        return visit, [span for span in self.spans if span.parent_span_id == visit.span_id]


def attributes(span: Span) -> dict[str, Any]:
    return values(span.attributes)


def values(pairs: "Iterator[KeyValue] | Any") -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, str(kind))


@contextmanager
def collecting(status: int = 200) -> Iterator[Collector]:
    """A collector that listens while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            # Answered first: who waits for a span may end everything once it is there.
            collector.comes()
            reply = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.status if self.path == PATH else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)
            collector.took(body, {name.lower(): value for name, value in self.headers.items()})

        def log_message(self, *_said: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector = Collector(f"http://127.0.0.1:{server.server_port}{PATH}", status)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
