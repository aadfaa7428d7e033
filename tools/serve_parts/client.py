"""A client of SGLang's HTTP server, on the standard library."""

from __future__ import annotations

import http.client
import json
from typing import Any


class Failed(Exception):
    """What the server has said or done is wrong."""


class Client:
    """One connection per request, each of which ends within `patience` seconds between two of its bytes."""

    def __init__(self, port: int, patience: float) -> None:
        self.port, self.patience = port, patience

    def _asked(self, method: str, path: str, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection, connection.getresponse()

    def _read(self, method: str, path: str, body: Any, *, errors: bool = False) -> str:
        connection, response = self._asked(method, path, body)
        try:
            text = response.read().decode(errors="replace")
        finally:
            connection.close()
        if response.status != 200 and not errors:
            raise Failed(f"{path}: {response.status} {text[:200]}")
        return text

    def get(self, path: str) -> str:
        """The answer as text."""
        return self._read("GET", path, None)

    def post(self, path: str, body: Any, *, errors: bool = False) -> Any:
        """The answer as JSON, or as text where it is none; with `errors` any status will do."""
        text = self._read("POST", path, body, errors=errors)
        try:
            return json.loads(text)
        except ValueError:
            return text

    def healthy(self) -> bool:
        return self.ok("/health")

    def ok(self, path: str) -> bool:
        """Whether a GET succeeds."""
        try:
            self.get(path)
        except (OSError, Failed, http.client.HTTPException):
            return False
        return True

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """A whole answer. Raises Failed where there is none."""
        result = self.post("/generate", request)
        if not isinstance(result, dict) or "output_ids" not in result:
            raise Failed(f"/generate: {str(result)[:200]}")
        return result

    def stream(self, request: dict[str, Any], *, leave_after: int = 0) -> list[int]:
        """Output ids of a streamed answer, which grow; it is left after `leave_after` pieces (0: never)."""
        connection, response = self._asked("POST", "/generate", request | {"stream": True})
        ids: list[int] = []
        pieces, ended = 0, False
        try:
            if response.status != 200:
                raise Failed(f"/generate: {response.status} {response.read()[:200]!r}")
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    ended = True
                    break
                found = json.loads(data)
                if "output_ids" not in found:
                    raise Failed(f"/generate: {data[:200]!r}")
                if found["output_ids"][: len(ids)] != ids:
                    raise Failed("a streamed answer changed what it had said")
                ids = found["output_ids"]
                pieces += 1
                if leave_after and pieces >= leave_after:
                    return ids
        finally:
            connection.close()
        if not ended and not leave_after:
            raise Failed("a streamed answer broke off")
        return ids

    def metrics(self) -> dict[str, float]:
        """Sums of /metrics by name; counters of eaglex with their labels."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line.startswith("#") or " " not in line:
                continue
            name, value = line.rsplit(" ", 1)
            if not name.startswith("eaglex:"):
                name = name.split("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
        return found
