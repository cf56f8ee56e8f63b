"""The channel between agents and the head agent: JSON lines over TCP, after an HMAC challenge with the run's token.

    head -> agent   {"challenge": nonce}
    agent -> head   {"answer": HMAC(token, "agent" + nonce), "challenge": nonce2}
    head -> agent   {"answer": HMAC(token, "head" + nonce2)}          then messages both ways
                    {"refused": reason}                               and the end of the connection, instead

Whoever does not know the token is refused and logged; nothing is unpickled, nothing is read before the answer but one
short line. The token itself never travels.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from launcher.agent.loop import Loop
from launcher.agent.members import SILENCE_S

Message = dict[str, Any]
_MAX_LINE_BYTES = 4 << 20
_MAX_STRANGER_BYTES = 512
_MAX_STRANGERS = 64
"""That have not answered yet. Each holds a descriptor of the head agent, which also needs some for its workers."""
_HANDSHAKE_S = 10.0
_SEND_S = 10.0


class ChannelError(Exception):
    """The other side is not who it should be, or broke the protocol."""


class Connection:
    """One authenticated connection: sends and receives messages; calls back on each and once at its end."""

    def __init__(self, sock: socket.socket, loop: Loop) -> None:
        self.sock = sock
        self.peer = _peer(sock)
        self.on_message: Callable[[Message], None] = _nobody_listens
        self.on_end: Callable[[str], None] = _nobody_listens
        self._loop = loop
        self._buffer = b""
        self._open = True
        sock.settimeout(_SEND_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # On a node that is cut off nobody says so: what was sent, a heartbeat too, stays without an answer of its
        # kernel. A process that is suspended still has one that answers.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_S * 1000))
        loop.add(sock, self._read)

    def send(self, message: Message) -> None:
        """Send one message. A connection that breaks here ends through `on_end` like any other."""
        if not self._open:
            return
        try:
            self.sock.sendall(_encode(message))
        except OSError as error:
            self.end(str(error))

    def check(self) -> None:
        """Notice now whether the other side has gone (a node that joins twice may be its own successor)."""
        if self._open:
            self._read()

    def end(self, reason: str) -> None:
        """Close and report the end, once."""
        if self._open:
            self._open = False
            self._loop.remove(self.sock)
            self.sock.close()
            self.on_end(reason)

    def _read(self) -> None:
        try:
            data = _receive(self.sock, 1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(str(error))
            return
        if not data:
            self.end("closed by the other side")
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _MAX_LINE_BYTES:
            self.end("a message without an end")
            return
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                self.end("not a message of ours")
                return
            self.on_message(message)


class Server:
    """The head's side: accepts, challenges, and hands over those that know the token."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        loop: Loop,
        *,
        on_connection: Callable[[Connection], None],
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._listener = listener
        self._token = token
        self._loop = loop
        self._on_connection = on_connection
        self._on_refused = on_refused
        self._strangers: set[_Stranger] = set()
        listener.setblocking(False)
        loop.add(listener, self._accept)
        loop.every(_HANDSHAKE_S / 2, self._expire)

    def close(self) -> None:
        """Stop accepting."""
        self._loop.remove(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._make_room()
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._make_room()
        self._strangers.add(_Stranger(sock, self._token, self._loop, self))

    def _make_room(self) -> None:
        """Drop who has been silent for longest: one of ours answers at once, and comes again if it could not."""
        if self._strangers:
            min(self._strangers, key=lambda stranger: stranger.since_s).drop()

    def _expire(self) -> None:
        for stranger in list(self._strangers):
            stranger.expire(time.monotonic() - _HANDSHAKE_S)

    def admit(self, stranger: _Stranger, connection: Connection) -> None:
        """A stranger has answered the challenge."""
        self._strangers.discard(stranger)
        self._on_connection(connection)

    def refuse(self, stranger: _Stranger, peer: str, reason: str) -> None:
        """A stranger was turned away."""
        self._strangers.discard(stranger)
        self._on_refused(peer, reason)


class _Stranger:
    """A connection that has not answered the challenge yet. Never blocks the loop."""

    def __init__(self, sock: socket.socket, token: bytes, loop: Loop, server: Server) -> None:
        self._sock, self._token, self._loop, self._server = sock, token, loop, server
        self._nonce = secrets.token_hex(32)
        self._buffer = b""
        self.since_s = time.monotonic()
        sock.settimeout(_HANDSHAKE_S)
        loop.add(sock, self._read)
        # A stranger that is gone already is noticed by the first read.
        with contextlib.suppress(OSError):
            sock.sendall(_encode({"challenge": self._nonce}))

    def expire(self, before_s: float) -> None:
        """Turn away one that has been silent since before then."""
        if self.since_s < before_s:
            self._refuse("did not answer the challenge")

    def _read(self) -> None:
        try:
            data = _receive(self._sock, _MAX_STRANGER_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._refuse(str(error))
            return
        self._buffer += data
        line, line_end, rest = self._buffer.partition(b"\n")
        if not line_end:
            if not data or len(self._buffer) >= _MAX_STRANGER_BYTES:
                self._refuse("did not answer the challenge")
            return
        try:
            reply = json.loads(line)
            answer, counter = str(reply["answer"]), str(reply["challenge"])
        except (ValueError, KeyError, TypeError):
            self._refuse("did not answer the challenge")
            return
        if rest or not _same(answer, _sign(self._token, "agent", self._nonce)):
            self._refuse("does not know the token of this run")
            return
        try:
            self._sock.sendall(_encode({"answer": _sign(self._token, "head", counter)}))
        except OSError as error:
            self._refuse(str(error))
            return
        self._loop.remove(self._sock)
        self._server.admit(self, Connection(self._sock, self._loop))

    def drop(self) -> None:
        """End it without a word, which one of ours takes for a reason to come again."""
        self._close("too many others wait to be let in")

    def _refuse(self, reason: str) -> None:
        with contextlib.suppress(OSError):  # it may be gone, which is fine
            self._sock.sendall(_encode({"refused": reason}))
        self._close(reason)

    def _close(self, reason: str) -> None:
        self._loop.remove(self._sock)
        peer = _peer(self._sock)
        self._sock.close()
        self._server.refuse(self, peer, reason)


def connect(address: tuple[str, int], token: bytes, loop: Loop, *, timeout_s: float) -> Connection:
    """Connect to the head and prove the token both ways. Raises OSError when it cannot be reached (it may be later),
    ChannelError when it is somebody else or refuses this agent (it will again)."""
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        sock.settimeout(min(_HANDSHAKE_S, timeout_s))
        nonce = str(_receive_line(sock).get("challenge"))
        counter = secrets.token_hex(32)
        sock.sendall(_encode({"answer": _sign(token, "agent", nonce), "challenge": counter}))
        reply = _receive_line(sock)
        if "refused" in reply:
            raise ChannelError(f"{address[0]}:{address[1]} refuses this agent: it {reply['refused']}")
        if not _same(str(reply.get("answer")), _sign(token, "head", counter)):
            raise ChannelError(f"{address[0]}:{address[1]} does not know the token of this run")
    except BaseException:
        sock.close()
        raise
    return Connection(sock, loop)


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket for the head; port 0 = a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def _receive(sock: socket.socket, max_bytes: int) -> bytes:
    """What is there. Raises BlockingIOError when that is nothing.

    Not `sock.recv`, which waits for the socket's timeout, MSG_DONTWAIT or not. The descriptor of a socket with a
    timeout does not block.
    """
    return os.read(sock.fileno(), max_bytes)


def _receive_line(sock: socket.socket) -> Message:
    # One byte at a time, so that nothing that follows the handshake is swallowed.
    line = b""
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte:
            raise ConnectionError("the other side left in the middle of the handshake")
        if len(line) > _MAX_STRANGER_BYTES:
            raise ChannelError("the other side does not speak this protocol")
        line += byte
    try:
        message = json.loads(line)
    except ValueError:
        raise ChannelError("the other side does not speak this protocol") from None
    if not isinstance(message, dict):
        raise ChannelError("the other side does not speak this protocol")
    return message


def _sign(token: bytes, role: str, nonce: str) -> str:
    # The role keeps an answer from being sent back to the one who asked.
    text = f"{role}:{nonce}".encode(errors="backslashreplace")  # a stranger's nonce may be no text at all
    return hmac.new(token, text, hashlib.sha256).hexdigest()


def _same(answer: str, expected: str) -> bool:
    # As bytes: compare_digest refuses strings that are not ASCII, and a stranger may send anything.
    return hmac.compare_digest(answer.encode(errors="backslashreplace"), expected.encode())


def _encode(message: Message) -> bytes:
    # A lone surrogate (a file name that is no UTF-8, in an exception) becomes JSON's own escape.
    return json.dumps(message, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _peer(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _nobody_listens(_: object) -> None:
    return None
