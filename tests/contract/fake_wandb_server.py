"""As much of a W&B server as the real package needs to upload a run. What it was sent is all that tests look at."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_NODE = {"id": "UA==", "name": "demo", "entity": {"id": "RQ==", "name": "me"}}


class FakeWandbServer(ThreadingHTTPServer):
    """Keeps the history lines of each run by their number, as the real one does, and says how many it has."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.histories: dict[str, dict[int, dict[str, Any]]] = {}
        self.authorised = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def history(self, run: str) -> list[dict[str, Any]]:
        """The lines of a run, in order."""
        lines = self.histories.get(run, {})
        return [lines[number] for number in sorted(lines)]

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL operation."""
        name = str(variables.get("name") or "")
        known = self.histories.get(name)
        bucket = {"id": "Qg==", "name": name, "displayName": name, "config": "{}", "project": _NODE}
        bucket |= {"description": None, "sweepName": None, "historyLineCount": len(known or {})}
        if operation == "UpsertBucket":
            self.histories.setdefault(name, {})
            return {"upsertBucket": {"bucket": bucket, "inserted": known is None}}
        if operation == "RunResumeStatus":
            tail = {"summaryMetrics": json.dumps({"_step": len(known or {}) - 1}), "historyTail": "[]"}
            tail |= {"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "tags": [], "wandbConfig": '{"t": 1}'}
            return {"model": {**_NODE, "bucket": None if known is None else bucket | tail}}
        if operation == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/up/{file}"} for file in variables["files"]]
            return {"createRunFiles": {"runID": "Qg==", "uploadHeaders": [], "files": files}}
        if "iewer" in operation:
            return {"viewer": {"id": "V", "entity": "me", "flags": "{}", "teams": {"edges": []}, "username": "me"}}
        return {"serverInfo": {"features": []}}

    def stream(self, run: str, body: dict[str, Any]) -> None:
        """Lines of a run's files."""
        for name, file in body.get("files", {}).items():
            if "history" in name:
                for number, line in enumerate(file["content"], start=file["offset"]):
                    self.histories.setdefault(run, {})[number] = json.loads(line)


class _Handler(BaseHTTPRequestHandler):
    server: FakeWandbServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Nothing."""

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self._read()
        self._reply({})

    def do_POST(self) -> None:
        body = self._read()
        if not self.server.authorised:
            self._reply({"errors": [{"message": "permission denied"}]}, 403)
        elif self.path.startswith("/graphql"):
            query = json.loads(body)
            found = re.search(r"(?:query|mutation)\s+(\w+)", query["query"])
            self._reply({"data": self.server.answer(found[1] if found else "", query.get("variables") or {})})
        else:
            if self.path.endswith("/file_stream"):
                self.server.stream(self.path.split("/")[-2], json.loads(body))
            self._reply({"exitcode": None, "limits": {}})

    def _read(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def _reply(self, value: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def fake_wandb_server() -> Iterator[FakeWandbServer]:
    """One that runs inside."""
    with FakeWandbServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
