"""The addresses of this node, and which of them leads to another one. Standard library only."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40
"""Of `struct ifreq`, on a machine with pointers of 64 bits."""
_MAX_ENTRIES = 1024
_ANY_PORT = 9
"""Of a peer, for a question to the routing table; nothing is sent there."""


@dataclass(frozen=True)
class Address:
    """An address of this node."""

    interface: str
    address: str

    def __str__(self) -> str:
        return f"{self.interface} ({self.address})"


def own_addresses() -> tuple[Address, ...]:
    """All addresses of this node, IPv4 first; none that counts on one link only (fe80::)."""
    return (*_ipv4(), *_ipv6())


def _ipv4() -> list[Address]:
    buffer = array.array("B", bytes(_ENTRY_BYTES * _MAX_ENTRIES))
    place, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        filled = fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, struct.pack("iL", len(buffer), place))
    size = struct.unpack("iL", filled)[0]
    entries = (buffer[begin : begin + _ENTRY_BYTES].tobytes() for begin in range(0, size, _ENTRY_BYTES))
    return [Address(_name(entry[:16]), socket.inet_ntoa(entry[20:24])) for entry in entries]


def _name(field: bytes) -> str:
    """A label of a second address, `eth0:1`, names the interface before the colon."""
    return field.split(b"\0", 1)[0].decode(errors="replace").partition(":")[0]


def _ipv6() -> list[Address]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except FileNotFoundError:  # a kernel without IPv6
        return []
    found = []
    for line in lines:
        number, *_, name = line.split()
        address = ipaddress.IPv6Address(int(number, 16))
        if not address.is_link_local:
            found.append(Address(name, str(address)))
    return found


def leads_to(peer: str) -> str | None:
    """The address of this node that packets to a peer come from, by the routing table; nothing is sent.

    None: the name of the peer is unknown, there is no way to it, or it is this node itself by a loopback address.
    """
    try:
        known = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, where in known:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(where)
                address: str = sock.getsockname()[0]
        except OSError:
            continue
        if not is_loopback(address):
            return address
    return None


def is_loopback(address: str) -> bool:
    """Whether nobody else reaches it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str, known: tuple[Address, ...]) -> str | None:
    """Which interface has an address."""
    return next((each.interface for each in known if each.address == address), None)


def listed(known: tuple[Address, ...]) -> str:
    """For people: `eth0 (10.0.0.1), lo (127.0.0.1)`."""
    return ", ".join(map(str, known)) or "none"
