from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jobs.data.download import DownloadError, RemoteFile, download
from jobs.data.mnist import SAMPLE, mnist

CONTENT = {f"part-{k}.gz": os.urandom(200_000) for k in range(4)}
FILES = [RemoteFile(name, hashlib.md5(raw).hexdigest()) for name, raw in CONTENT.items()]
PROGRAM = """
import json, sys
from pathlib import Path
from jobs.data.download import RemoteFile, download
files, folder, mirror = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
download([RemoteFile(*file) for file in files], folder, [mirror])
"""


@dataclass
class Mirror:
    url: str
    root: Path
    served: Counter[str] = field(default_factory=Counter)
    stall: threading.Event = field(default_factory=threading.Event)
    """Set: answers go through. Clear: they stop half-way."""
    half_way: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    root = tmp_path / "mirror"
    root.mkdir()
    for name, raw in CONTENT.items():
        (root / name).write_bytes(gzip.compress(raw))
    serving = Mirror("", root)
    serving.stall.set()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, serving))
    serving.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield serving
    serving.stall.set()
    server.shutdown()
    server.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, mirror: Mirror, *args: object) -> None:
        self.mirror = mirror
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        content = (self.mirror.root / self.path.lstrip("/")).read_bytes()
        self.mirror.served[self.path.lstrip("/")] += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        try:
            self.wfile.write(content[: len(content) // 2])
            self.mirror.half_way.set()
            self.mirror.stall.wait(30)
            self.wfile.write(content[len(content) // 2 :])
        except OSError:
            pass  # the other side was killed

    def log_message(self, *args: object) -> None: ...


def start(folder: Path, mirror: Mirror) -> subprocess.Popen[bytes]:
    import json

    files = json.dumps([[file.name, file.md5] for file in FILES])
    command = [sys.executable, "-c", PROGRAM, files, str(folder), mirror.url]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def assert_all_there(folder: Path) -> None:
    assert {path.name: gzip.decompress(path.read_bytes()) for path in folder.glob("*.gz")} == CONTENT
    assert not list(folder.glob("*.part"))


def test_many_processes_download_each_file_once(mirror: Mirror, tmp_path: Path) -> None:
    """F006: two nodes with two ranks each, on an empty folder that they share."""
    processes = [start(tmp_path / "data", mirror) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0, 0, 0, 0]
    assert_all_there(tmp_path / "data")
    assert set(mirror.served.values()) == {1}
    assert len(mirror.served) == 4


def test_a_download_that_was_killed_half_way_is_made_again(mirror: Mirror, tmp_path: Path) -> None:
    """F006: the lock of a dead process frees itself."""
    mirror.stall.clear()
    killed = start(tmp_path / "data", mirror)
    assert mirror.half_way.wait(30)
    killed.send_signal(signal.SIGKILL)
    killed.wait(10)
    mirror.stall.set()
    download(FILES, tmp_path / "data", [mirror.url])
    assert_all_there(tmp_path / "data")


def test_the_wrong_content_leads_to_the_next_mirror(mirror: Mirror, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    for name, raw in CONTENT.items():
        (good / name).write_bytes(gzip.compress(raw))
    (mirror.root / FILES[1].name).write_bytes(gzip.compress(b"something else"))
    (mirror.root / FILES[2].name).write_bytes(b"<html>not found</html>")
    download(FILES, tmp_path / "data", [mirror.url, good.as_uri()])
    assert_all_there(tmp_path / "data")


def test_without_any_mirror_the_message_says_what_each_answered(tmp_path: Path) -> None:
    with pytest.raises(DownloadError) as caught:
        download(FILES, tmp_path / "data", ["http://127.0.0.1:9", tmp_path.as_uri()], hint=", or use the sample")
    message = str(caught.value)
    assert "part-0.gz: no mirror served it" in message
    assert "127.0.0.1:9" in message
    assert tmp_path.as_uri() in message
    assert message.endswith("by hand, or use the sample")
    assert not list((tmp_path / "data").glob("*.gz*"))


def test_what_is_there_is_not_asked_for_again(mirror: Mirror, tmp_path: Path) -> None:
    download(FILES, tmp_path / "data", [mirror.url])
    download(FILES, tmp_path / "data", ["http://127.0.0.1:9"])
    assert set(mirror.served.values()) == {1}


def test_the_shipped_sample_needs_no_network() -> None:
    source = mnist()
    source.prepare()
    data = source.load()
    assert source.folder == SAMPLE
    assert data.evaluation is not None
    assert (len(data.train), len(data.evaluation)) == (10_000, 2_000)
    image, label = data.train[0]
    assert image.shape == (1, 28, 28)
    assert abs(float(image.mean())) < 1
    assert int(label) == 5
