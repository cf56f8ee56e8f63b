"""A forward proxy for HTTP and HTTPS: the way out for whoever has no other one, as in many companies."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from urllib.parse import urlsplit

_CHUNK_BYTES = 1 << 16
_CONNECT_S = 30.0


class ForwardProxy:
    """Listens on one address, on a free port, until `close`."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0))
        host, port = self._listener.getsockname()
        self.url = f"http://{host}:{port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=_serve, args=(client,), daemon=True).start()


def _serve(client: socket.socket) -> None:
    """One connection: `CONNECT host:port`, or requests that name the whole address."""
    with client, contextlib.suppress(OSError):
        head = _head(client)
        if not head:
            return
        line, _, rest = head.partition(b"\r\n")
        method, target, version = line.decode("latin-1").split(" ", 2)
        if method == "CONNECT":
            host, _, port = target.rpartition(":")
            with socket.create_connection((host, int(port)), _CONNECT_S) as server:
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                _join(client, server)
            return
        url = urlsplit(target)
        path = f"{url.path or '/'}{'?' + url.query if url.query else ''}"
        kept = [each for each in rest.split(b"\r\n") if not each.lower().startswith((b"connection:", b"proxy-"))]
        # One request for each connection: the next may be for another server.
        request = [f"{method} {path} {version}".encode("latin-1"), b"Connection: close", *kept]
        with socket.create_connection((url.hostname or "", url.port or 80), _CONNECT_S) as server:
            server.sendall(b"\r\n".join(request))
            _join(client, server)


def _head(client: socket.socket) -> bytes:
    """A request up to the empty line, and what came with it."""
    head = b""
    while b"\r\n\r\n" not in head:
        piece = client.recv(_CHUNK_BYTES)
        if not piece:
            return b""
        head += piece
    return head


def _join(one: socket.socket, other: socket.socket) -> None:
    """Pass on what either says, until both have said all."""
    with selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ, other)
        selector.register(other, selectors.EVENT_READ, one)
        while selector.get_map():
            for key, _ in selector.select():
                source, sink = key.fileobj, key.data
                assert isinstance(source, socket.socket)
                data = source.recv(_CHUNK_BYTES)
                if data:
                    sink.sendall(data)
                else:
                    selector.unregister(source)
                    with contextlib.suppress(OSError):
                        sink.shutdown(socket.SHUT_WR)
