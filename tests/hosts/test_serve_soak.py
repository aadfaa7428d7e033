"""tools/serve_soak.py against a stand-in for the server: what must make it fail does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import serve_soak
from serve_parts.client import Client

METRICS = 'eaglex:lanes_total{outcome="drafted"} 5.0\neaglex:lanes_total{outcome="not_finite"} %d\n'


class Fake(ThreadingHTTPServer):
    """Answers a prompt with numbers that depend on it alone, unless `wrong` says otherwise after so many requests."""

    daemon_threads = True
    alive = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.wrong_after, self.not_finite, self.busy, self.log = 0, 1 << 30, 0, False, [""]

    def faults(self) -> list[str]:
        return [line for line in self.log if "Leak" in line]

    def answer(self, request: dict[str, Any]) -> list[int]:
        self.asked += 1
        new = request["sampling_params"].get("max_new_tokens", 4)
        return [sum(request["input_ids"]) + i + (self.asked > self.wrong_after and i > 1) for i in range(new)]


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, *_: Any) -> None:
        pass

    def said(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/flush_cache" and self.server.busy:
            return self.said("busy", 400)
        self.said(METRICS % self.server.not_finite if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/completions":
            return self.said(json.dumps({"choices": [{"text": "pass"}]}))
        if self.path != "/generate":
            return self.said("")
        ids = self.server.answer(request)
        if not request.get("stream"):
            return self.said(json.dumps({"output_ids": ids}))
        pieces = [json.dumps({"output_ids": ids[: i + 1]}) for i in range(len(ids))]
        self.said("".join(f"data: {piece}\n\n" for piece in [*pieces, "[DONE]"]))


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def report_of(fake: Fake, monkeypatch: pytest.MonkeyPatch, *, clients: int = 3) -> dict[str, Any]:
    monkeypatch.setattr(serve_soak.time, "sleep", lambda seconds: None)
    traffic = serve_soak.Traffic(Client(fake.server_address[1], 5), list(range(3000)), 5)
    return serve_soak.soak(fake, traffic, clients=clients, seconds=0.5)


def test_a_server_that_answers_alike_passes(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(fake, monkeypatch)
    assert report["failures"] == []
    assert report["counts"]["afterwards"] == 25
    assert {"plain", "plain, not compared", "sampled"} <= set(report["counts"])
    assert report["completion"] == "pass"
    assert report["traffic_s"] > 0.3


def test_a_wrong_token_is_seen(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.wrong_after = 40
    assert "wrong token" in report_of(fake, monkeypatch)["failures"][0]


def test_a_dead_server_is_seen(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.alive = False
    assert report_of(fake, monkeypatch)["failures"] == ["the server has died"]


def test_a_leak_in_the_log_is_seen(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.log = ["AssertionError: Full Pool Mem Leak Detected!"]
    assert report_of(fake, monkeypatch)["failures"] == fake.log


def test_a_draft_that_was_not_finite_is_seen(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.not_finite = 2
    assert report_of(fake, monkeypatch)["failures"] == ['eaglex:lanes_total{outcome="not_finite"} 2.0']


def test_requests_that_never_end_are_seen(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.busy = True
    now = [0.0]

    def clock() -> float:
        now[0] += 0.2
        return now[0]

    traffic = serve_soak.Traffic(Client(fake.server_address[1], 5), list(range(3000)), 5)
    monkeypatch.setattr(serve_soak.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(serve_soak.time, "monotonic", clock)
    assert serve_soak.left_over(traffic.client) == ["the cache cannot be flushed 20 s after the last request"]


def test_faults_of_a_log(tmp_path: Any) -> None:
    server = serve_soak.Server.__new__(serve_soak.Server)
    server.log = tmp_path / "server.log"
    server.log.write_text("fine\nTraceback (most recent call last)\nEAGLEX: drafting failed, 1 times\n")
    assert len(server.faults()) == 2
