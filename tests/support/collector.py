"""A collector of OpenTelemetry spans, and what it must have received for two requests."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{PARENT}-01"


class Receiver:
    """A collector that accepts OTLP over HTTP and keeps the spans."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces":
                    receiver.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self.thread.start()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resource(self) -> dict[str, str]:
        found = self.requests[0].resource_spans[0].resource.attributes
        return {each.key: each.value.string_value for each in found}


def check_exported(spans: list[Any], model: str) -> None:
    """Those of two requests with 5 output tokens each, one of them with HEADER."""
    wholes = [span for span in spans if span.name == "llm_request"]
    (whole,) = [span for span in wholes if span.parent_span_id.hex() == PARENT]
    assert len(wholes) == 2 and whole.trace_id.hex() == TRACE
    assert all(w.trace_id.hex() != TRACE and not w.parent_span_id for w in wholes if w is not whole)
    parts = [span for span in spans if span.parent_span_id == whole.span_id]
    assert [span.name for span in parts] == ["queue", "prefill", "decode"]
    assert {span.trace_id.hex() for span in parts} == {TRACE}
    found = {each.key: each.value for each in whole.attributes}
    assert found["gen_ai.request.model"].string_value == model
    assert found["gen_ai.usage.output_tokens"].int_value == 5
    assert found["gen_ai.request.max_tokens"].int_value == 5
    reasons = found["gen_ai.response.finish_reasons"].array_value.values
    assert [each.string_value for each in reasons] == ["length"]
    seconds = (whole.end_time_unix_nano - whole.start_time_unix_nano) / 1e9
    assert 0 < found["gen_ai.latency.time_to_first_token"].double_value <= seconds
