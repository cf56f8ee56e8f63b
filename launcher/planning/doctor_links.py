"""What an all-reduce between machines means: who failed first, and how fast it was beside the hardware. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launcher.planning.all_reduce import Tried, against_peak, judge_products
from launcher.planning.doctor import Diagnosis, Level
from launcher.planning.doctor_speed import Peak, peak_between_gpus, peak_between_nodes
from launcher.planning.host_facts import HostFacts
from launcher.wording import count as numbered

_WHAT = "all-reduce"
_CONSEQUENCES = ("Connection closed by peer", "Connection reset", "did not join", "has not ended", "Timed out")
"""What ranks say that have only lost the others."""
_SOCKETS = "Socket"


def judge_between(
    tried: Mapping[str, Tried], facts: Mapping[str, HostFacts], addresses: Sequence[str], *, ranks: int, on_gpus: bool
) -> Iterator[Diagnosis]:
    """By the names of the machines, in the order of the nodes. ranks: on each."""
    count = ranks * len(tried)
    where = f"{numbered(len(tried), 'host')}, {count} {'GPUs over NCCL' if on_gpus else 'processes over gloo'}"
    failed = {name: each for name, each in tried.items() if not each.ok}
    if failed:
        causes = {name: each for name, each in failed.items() if not any(text in each.said for text in _CONSEQUENCES)}
        first = causes or failed
        message = f"{where}: {'; '.join(f'{name}: {each.said}' for name, each in first.items())}"
        fix = (
            "a firewall between the hosts, or an interface that leads elsewhere: GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME on the hosts; `faults.preflight: true` names the link"
        )
        yield Diagnosis(level=Level.PROBLEM, what=_WHAT, message=message, fix=fix)
        return
    slowest = max(tried.values(), key=lambda each: each.reduce_s or 0.0)
    hosts = list(facts.values())
    yield against_peak(slowest, count, where, _peak(hosts, addresses, on_gpus=on_gpus))
    if on_gpus and len(hosts) > 1 and all(host.active_ports for host in facts.values()) and slowest.network == _SOCKETS:
        kinds = facts[next(iter(facts))].active_ports[0].kind
        message = f"NCCL goes over sockets between the hosts, though each has ports of {kinds}"
        fix = "/dev/infiniband and locked memory on each; for EFA the libfabric plugin; NCCL_DEBUG=INFO says why"
        yield Diagnosis(level=Level.PROBLEM, what=_WHAT, message=message, fix=fix)
    flops = [each for host in tried.values() for each in host.flops]
    names = [f"{name}, rank {rank}" for name, host in tried.items() for rank in range(len(host.flops))]
    if flops:
        gpus = [gpu.name for host in facts.values() for gpu in host.gpus[:ranks]] if on_gpus else []
        yield from judge_products(flops, gpus=gpus, names=names)


def _peak(hosts: Sequence[HostFacts], addresses: Sequence[str], *, on_gpus: bool) -> Peak | None:
    if len(hosts) > 1:
        return peak_between_nodes(hosts, addresses)
    return peak_between_gpus(hosts[0]) if on_gpus else None
