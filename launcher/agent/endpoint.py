"""Where the head agent of a job will be: an address of the first node that the others reach, and a free port there.

Standard library only.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.agent import addresses, scheduler
from launcher.agent.scheduler import SchedulerError

_PORTS = range(20_000, 32_000)
_TRIES = 200


class EndpointError(Exception):
    """There is no such address, or no port."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """Where the head agent will be."""

    address: str
    interface: str
    port: int
    holder: socket.socket | None
    """Keeps the port from everybody else until the head agent, which may share it, listens. None: it is elsewhere."""

    @property
    def endpoint(self) -> tuple[str, int]:
        """Address and port."""
        return self.address, self.port


def choose_head(hosts: Sequence[str], interface: str) -> Head:
    """An address of this node, the first, that the others reach, and a free port there. Raises EndpointError."""
    known = addresses.own_addresses()
    address = "127.0.0.1" if len(hosts) == 1 and interface == "auto" else _head_address(hosts, interface, known)
    name = addresses.interface_of(address, known)
    if name is None:
        raise EndpointError(f"{address} leads to the other nodes, but is on no interface: {addresses.listed(known)}")
    holder = _hold_port(address)
    return Head(address=address, interface=name, port=int(holder.getsockname()[1]), holder=holder)


def head_elsewhere(hosts: Sequence[str]) -> Head:
    """The same from a login node, where `salloc` leaves the user: by how SLURM reaches the first node.

    Raises EndpointError. Whether the port is free there is seen when the head agent takes it.
    """
    low, high = _ephemeral()
    port = random.choice([port for port in _PORTS if not low <= port <= high] or list(range(1_025, low)))
    if len(hosts) == 1:
        return Head(address="127.0.0.1", interface="lo", port=port, holder=None)
    tried = [*_node_address(hosts[0]), hosts[0]]
    for name in tried:
        with contextlib.suppress(OSError):
            found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
            if usable := [address for address in found if not addresses.is_loopback(address)]:
                return Head(address=usable[0], interface="", port=port, holder=None)
    raise EndpointError(f"the address of {hosts[0]}, the first node, is not known here (tried {', '.join(tried)})")


def _head_address(hosts: Sequence[str], interface: str, known: tuple[addresses.Address, ...]) -> str:
    if interface != "auto":
        found = next((each.address for each in known if each.interface == interface), None)
        if found is None:
            raise EndpointError(
                f"network.interface: {hosts[0]} has no interface {interface} with an address; it has "
                f"{addresses.listed(known)}"
            )
        if len(hosts) > 1 and addresses.is_loopback(found):
            raise EndpointError(f"network.interface: by {interface} ({found}) no other node reaches {hosts[0]}")
        return found
    tried = []
    for peer in hosts[1:]:
        for name in dict.fromkeys((*_node_address(peer), peer)):
            if (address := addresses.leads_to(name)) is not None:
                return address
            tried.append(name)
    own = next(iter(_node_address(hosts[0])), None)
    if own is not None and addresses.interface_of(own, known) and not addresses.is_loopback(own):
        return own
    raise EndpointError(
        f"no address of {hosts[0]} leads to the other nodes (tried {', '.join(tried)}); it has "
        f"{addresses.listed(known)}: name one with `network.interface`"
    )


def _node_address(host: str) -> tuple[str, ...]:
    with contextlib.suppress(SchedulerError):
        found = scheduler.node_address(host)
        return (found,) if found else ()
    return ()


def _hold_port(address: str) -> socket.socket:
    """A free port outside the range that the kernel gives to connections."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    low, high = _ephemeral()
    ports = [port for port in _PORTS if not low <= port <= high] or list(range(1_025, low))
    for port in random.sample(ports, min(_TRIES, len(ports))):
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((address, port))
        except OSError:
            holder.close()
            continue
        return holder
    raise EndpointError(f"no free port was found at {address}")


def _ephemeral() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return 32_768, 60_999
    return int(low), int(high)
