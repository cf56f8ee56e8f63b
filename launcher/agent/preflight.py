"""The preflight, as the head agent decides it: who is asked, who has answered, which node or link does not do. Pure.

begin: every node listens and measures itself (`preflight_node.py`)
all are there: each is told of the others, connects to them, and sends to the next one
all have said what came of it, or the time is over: nothing is wrong, or a sentence for each fault
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.agent import addresses
from launcher.agent.effects import Effect, Record, Send
from launcher.wording import size

Report = Mapping[str, Any]
LIMIT_S = 8.0
"""For each of the two rounds. A node in order takes a tenth of it."""
_SLOW_CPU = 4.0
"""So many times as slow as the fastest node: CPUs of one cluster differ by less, a quota or a neighbour by more."""
_FEW_BYTES_PER_S = 10e6
"""With less than that no collective is worth its wait."""
_LEAST_SHARE = 0.1
"""Of what the link says it can do."""
_LEAST_OF_OTHERS = 0.2
"""Of the median of the links, from three on."""
_HW_SLOWDOWN = 0x08 | 0x40 | 0x80
"""Of NVML's reasons: the hardware holds the clocks back, for its heat or its power supply."""
_SHOWN = 3
_FIX = "`launch doctor` says more; `faults.preflight: false` starts all the same"


@dataclass
class Preflight:
    """Before the first attempt on several nodes. Call the methods as things happen; carry out the effects."""

    nonce: str
    """Known to the nodes of the run alone: nobody else is measured."""
    began_s: float | None = None
    is_over: bool = False
    faults: tuple[str, ...] = ()
    """Sentences, when it is over. Empty: all is well."""
    _hosts: Mapping[int, str] = field(default_factory=dict)
    _here: dict[int, Report] = field(default_factory=dict)
    _links: dict[int, Report] = field(default_factory=dict)
    _told: bool = False
    _until_s: float = 0.0

    def begin(self, hosts: Mapping[int, str], now_s: float) -> list[Effect]:
        """Ask these nodes, by index. Nothing where they are asked already."""
        if self.began_s is not None:
            return []
        self._hosts, self.began_s, self._until_s = dict(hosts), now_s, now_s + LIMIT_S
        self._here, self._links, self._told = {}, {}, False
        return [Send({"type": "preflight", "nonce": self.nonce}, node) for node in hosts]

    def lost(self) -> None:
        """A node has gone in between: all begin again when they are complete."""
        self.began_s = None

    def heard(self, node: int, report: Report, now_s: float) -> list[Effect]:
        """A node has something to say."""
        if self.began_s is None or self.is_over or node not in self._hosts:
            return []
        if report["kind"] == "fault":
            return self._end([f"{self._who(node)}: {report['fault']}"], now_s)
        (self._here if report["kind"] == "here" else self._links)[node] = report
        return self._go_on(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Time has passed."""
        if self.began_s is None or self.is_over or now_s < self._until_s:
            return []
        heard = self._links if self._told else self._here
        silent = [self._who(node) for node in self._hosts if node not in heard]
        return self._end([f"{who} has not answered within {LIMIT_S:g} s; its driver may hang" for who in silent], now_s)

    def _go_on(self, now_s: float) -> list[Effect]:
        if len(self._here) < len(self._hosts):
            return []
        if not self._told:
            faults = [*_nodes_that_do_not_do(self._here, self._hosts)]
            if faults:
                return self._end(faults, now_s)
            self._told, self._until_s = True, now_s + LIMIT_S
            return [Send({"type": "preflight_go", "peers": self._peers_of(node)}, node) for node in self._hosts]
        if len(self._links) < len(self._hosts):
            return []
        return self._end([*judge(self._here, self._links, self._hosts)], now_s)

    def _peers_of(self, node: int) -> list[dict[str, Any]]:
        """All others, the next one first: together that is a ring."""
        order = list(self._hosts)
        place = order.index(node)
        others = [*order[place + 1 :], *order[:place]]
        return [
            {"node": each, "address": self._here[each]["address"], "port": self._here[each]["port"]} for each in others
        ]

    def _end(self, faults: Sequence[str], now_s: float) -> list[Effect]:
        assert self.began_s is not None
        self.is_over, self.faults = True, tuple(faults)
        measured = {
            str(node): {
                "host": host,
                "interface": self._here.get(node, {}).get("interface"),
                "cpu_rate": _cpu(self._here.get(node, {}), self._links.get(node, {})),
                "bytes_per_s": self._links.get(node, {}).get("bytes_per_s"),
            }
            for node, host in self._hosts.items()
        }
        took_s = round(now_s - self.began_s, 3)
        return [Record("preflight", {"took_s": took_s, "faults": list(faults), "nodes": measured})]

    def _who(self, node: int) -> str:
        return f"node {node} ({self._hosts[node]})"

    @property
    def words(self) -> str:
        """What came of it, as a line for people."""
        if self.faults:
            more = f" (and {len(self.faults) - _SHOWN} more)" if len(self.faults) > _SHOWN else ""
            return f"the preflight: {'; '.join(self.faults[:_SHOWN])}{more}. {_FIX}"
        rates = [rate for each in self._links.values() if (rate := each.get("bytes_per_s"))]
        slowest = f", the slowest link {size(int(min(rates)))}/s" if rates else ""
        return f"preflight: {len(self._hosts)} nodes reach each other{slowest}"


def judge(here: Mapping[int, Report], links: Mapping[int, Report], hosts: Mapping[int, str]) -> Iterator[str]:
    """What is wrong between the nodes, or with one beside the others; a sentence without a full stop each."""
    unreached = list(_unreached(here, links, hosts))
    yield from unreached
    if not unreached:
        yield from _slow_links(here, links, hosts)
    yield from _slow_nodes(here, links, hosts)


def _one_machine(hosts: Mapping[int, str]) -> bool:
    return len(set(hosts.values())) < len(hosts)


def _nodes_that_do_not_do(here: Mapping[int, Report], hosts: Mapping[int, str]) -> Iterator[str]:
    for node, report in here.items():
        who = f"node {node} ({hosts[node]})"
        if addresses.is_loopback(report["address"]) and not _one_machine(hosts):
            yield (
                f"{who}: {report['said_by']} is loopback, and no other node reaches {report['address']}; interfaces "
                f"there: {report['known']}"
            )
        yield from (f"{who}: {text}" for text in _gpu_faults(report.get("gpus", {})))
    up = {node: _links_up(report) for node, report in here.items()}
    for node, count in up.items():
        if count < max(up.values()):
            yield f"node {node} ({hosts[node]}): {count} NVLinks work, and {max(up.values())} on other nodes"


def _links_up(report: Report) -> int:
    values = report.get("gpus", {}).get("values", {})
    return int(sum(value for name, value in values.items() if name.endswith("/nvlinks_up")))


def _gpu_faults(gpus: Report) -> Iterator[str]:
    values = gpus.get("values")
    if values is None:
        return  # nobody could ask NVML, or the workers use CPUs
    names = dict.fromkeys(name.partition("/")[0] for name in values)
    if len(names) < gpus["wanted"]:
        yield f"{gpus['wanted']} workers need a GPU each, and {len(names)} are there"
    for name in names:
        shown = name.replace("gpu", "GPU ")
        if values.get(f"{name}/lost"):
            yield f"{shown} has fallen off its bus; restart the node"
        if errors := values.get(f"{name}/ecc_uncorrected"):
            yield f"{shown} has {int(errors)} memory errors that ECC could not correct; reset it (nvidia-smi -r)"
        if int(values.get(f"{name}/throttle_reasons", 0)) & _HW_SLOWDOWN:
            yield f"{shown} is held back by its hardware, for heat or power"


def _unreached(here: Mapping[int, Report], links: Mapping[int, Report], hosts: Mapping[int, str]) -> Iterator[str]:
    failed = [(node, int(peer), error) for node, report in links.items() for peer, error in report["failed"].items()]
    alone = [node for node in hosts if {other for other, peer, _ in failed if peer == node} == set(hosts) - {node}]
    if len(alone) == len(hosts):
        alone = []  # each is as alone as the other: say the pairs
    for node in alone:
        error = next(error for _, peer, error in failed if peer == node)
        yield f"no other node reaches {_place(node, here, hosts)}: {error}; {_why(node, here)}"
    for node, peer, error in failed:
        if peer not in alone and node not in alone:
            yield (
                f"node {node} ({hosts[node]}) by {here[node]['interface'] or here[node]['address']} does not reach "
                f"{_place(peer, here, hosts)}: {error}; {_why(peer, here)}"
            )


def _place(node: int, here: Mapping[int, Report], hosts: Mapping[int, str]) -> str:
    report = here[node]
    by = f" ({report['interface']})" if report["interface"] else ""
    return f"node {node} ({hosts[node]}) at {report['address']}{by}"


def _why(node: int, here: Mapping[int, Report]) -> str:
    return f"a firewall, or the wrong interface: {here[node]['said_by']}; interfaces there: {here[node]['known']}"


def _slow_links(here: Mapping[int, Report], links: Mapping[int, Report], hosts: Mapping[int, str]) -> Iterator[str]:
    rates = {node: float(report["bytes_per_s"]) for node, report in links.items() if report["bytes_per_s"] is not None}
    median = statistics.median(rates.values()) if rates else 0.0
    for node, rate in rates.items():
        peer = links[node]["to"]
        way = f"from node {node} ({hosts[node]}) to node {peer} ({hosts[peer]})"
        speed = here[node].get("speed_mbps")
        mtus = here[node].get("mtu"), here[peer].get("mtu")
        if rate == 0.0:
            differ = f": the MTU is {mtus[0]} there and {mtus[1]} here" if mtus[0] != mtus[1] else ", whatever the MTU"
            yield f"{way} small messages get through, and large ones do not{differ}"
        elif rate < _FEW_BYTES_PER_S:
            yield f"{way} the link carries {size(int(rate))}/s"
        elif speed is not None and rate < _LEAST_SHARE * speed * 1e6 / 8:
            yield f"{way} the link carries {size(int(rate))}/s, and {here[node]['interface']} is one of {speed} Mb/s"
        elif len(rates) > 2 and not _one_machine(hosts) and rate < _LEAST_OF_OTHERS * median:
            yield f"{way} the link carries {size(int(rate))}/s, and half of the others more than {size(int(median))}/s"


def _slow_nodes(here: Mapping[int, Report], links: Mapping[int, Report], hosts: Mapping[int, str]) -> Iterator[str]:
    """The better of two measurements: a moment's neighbour is no fault."""
    if _one_machine(hosts):
        return
    rates = {node: _cpu(report, links[node]) for node, report in here.items()}
    fastest = max(rates, key=lambda node: rates[node])
    for node, rate in rates.items():
        if rate * _SLOW_CPU < rates[fastest]:
            share = max(here[node]["cpu_share"], links[node]["cpu_share"])
            why = f": it gets {share:.0%} of a CPU, for a quota or for what else runs there" if share < 0.5 else ""
            times = rates[fastest] / max(rate, 1e-9)
            yield f"node {node} ({hosts[node]}) is {times:.1f} times as slow as node {fastest} ({hosts[fastest]}){why}"


def _cpu(here: Report, links: Report) -> float:
    return max(float(here.get("cpu_rate", 0.0)), float(links.get("cpu_rate", 0.0)))
