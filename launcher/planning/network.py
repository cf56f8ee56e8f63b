"""The variables of NCCL, gloo and torch's NCCL layer, each with its origin; endpoints and address families. Pure.

An explicit recipe value or flag beats the environment, the environment beats presets and defaults. What loses is said.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.planning.engine import major_minor
from launcher.planning.nccl_names import KNOWN, RENAMED
from launcher.planning.plan import EnvVar
from launcher.planning.presets import PRESETS, Choice, choose_preset, missing_for, preset_values, why_one_machine
from launcher.planning.topology import Finding, Remarks

if TYPE_CHECKING:
    from launcher.planning.facts import Facts, Interface
    from launcher.recipe.schema import NetworkSection, Recipe, Scalar

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_FR_", "TP_", "FI_")
"""Names that belong to this module, wherever they are set."""

DEFAULTS: Mapping[str, str] = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""What torchrun sets, too."""

NOT_A_CABLE = re.compile(r"(docker|veth|br-|virbr|cni|flannel|cali|tun|tap|ifb)")
"""Bridges and tunnels of containers: up, with an address, and leading to no other node."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value that someone gave a variable."""

    name: str
    """As it was written."""
    value: str
    origin: str
    rank: int
    """0 recipe or flag, 1 environment, 2 preset or `network.interface: auto`, 3 default. The lowest wins."""
    weight: int = 0
    """Within a rank: the lowest wins. A variable named in full beats `network.interface`."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The resolved network part of a plan."""

    interface: str
    """Of the collectives; `auto` = bound on the node."""
    interface_origin: str
    preset: str
    preset_origin: str
    """Why it is that one, where the recipe leaves it open."""
    env: tuple[EnvVar, ...]
    unset: tuple[str, ...]
    """Old spellings in the environment, forwarded under the new one; torch would complain about them in every rank."""
    setup: tuple[str, ...] = ()
    """Lines of bash of the preset, for each node before its agent: a provider's own script."""


def resolve_network(
    recipe: Recipe, facts: Facts, *, one_machine: bool, origins: Mapping[str, str], remarks: Remarks
) -> Network:
    """All network variables of the workers. `origins` tells where a key of the recipe was set, if it was."""
    network = recipe.network
    choice = _choose_preset(network, facts, one_machine=one_machine)
    preset = choice.preset
    _check_hosts(network, facts, origins, remarks)
    interface, why = _choose_interface(network, preset, facts, one_machine=one_machine, remarks=remarks)
    explicit = network.interface != "auto"
    interface_origin = origins.get("network.interface", "default") if explicit else why
    settings = [
        *_recipe_settings(network, recipe.env, origins, remarks),
        *_interface_settings(interface, interface_origin, explicit=explicit),
        *(
            Setting(name=name, value=value, origin="environment", rank=1)
            for name, value in facts.environment.items()
            if name.startswith(PREFIXES)
        ),
        *(
            Setting(name=known.name, value=known.value, origin=f"preset {network.preset}", rank=2)
            for known in preset_values(network.preset, facts.hosts)
        ),
        *(Setting(name=name, value=value, origin=f"auto: {choice.why}", rank=2) for name, value in choice.off.items()),
        *(Setting(name=name, value=value, origin="default", rank=3) for name, value in DEFAULTS.items()),
    ]
    env, unset = _settle(settings, facts.torch_version, remarks)
    env = _one_watch(env, facts.torch_version, remarks)
    if one_machine:
        _check_gloo_interface(env, facts, remarks)
    if choice.off:
        remarks.notes.append(f"NCCL goes over {preset} on all nodes: {choice.why}")
    return Network(
        interface=interface,
        interface_origin=interface_origin,
        preset=preset,
        preset_origin=f"auto: {choice.why}" if choice.why else "auto",
        env=env,
        unset=unset,
        setup=() if one_machine else PRESETS[preset].setup,
    )


def current_name(name: str, torch_version: str | None) -> str:
    """The spelling of a variable that this torch reads without complaint (F071). Unknown torch: the newest spelling."""
    version = major_minor(torch_version)
    for old, new, since in RENAMED:
        if name in (old, new):
            return new if version is None or version >= since else old
    return name


def variable_value(value: Scalar) -> str:
    """A recipe value as these libraries read it: true and false are 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Family:
    """One address of each node, all of one family."""

    version: int
    """4 or 6."""
    addresses: tuple[str, ...]


def pick_family(addresses: Sequence[Iterable[str]]) -> Family | None:
    """One family for all nodes, given the addresses of each: IPv4 where every node has it, else IPv6 (F096).

    None where the nodes have no family in common.
    """
    for version in (4, 6):
        chosen = [next((text for text in node if _ip_version(text) == version), None) for node in addresses]
        if chosen and None not in chosen:
            return Family(version, tuple(text for text in chosen if text is not None))
    return None


_ENDPOINT = re.compile(r"(?:\[([^\[\]]+)\]|([^\s:\[\]/]+))(?::(\d+))?")


@dataclass(frozen=True)
class Endpoint:
    """A host and perhaps a port: `n1:29500`, `10.0.0.1`, `[::1]:29500`, `::1`."""

    host: str
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read an endpoint. Raises ValueError, for an IPv6 address with a port but no brackets among others."""
        if _ip_version(text) == 6:
            return cls(text)
        match = _ENDPOINT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not HOST, HOST:PORT, an IPv6 address or [IPV6]:PORT")
        bracketed, name, port = match.groups()
        if bracketed is not None and _ip_version(bracketed) != 6:
            raise ValueError(f"{text!r}: only an IPv6 address stands in brackets")
        if port is not None and not 0 < int(port) < 65536:
            raise ValueError(f"{text!r}: the port {port} is not between 1 and 65535")
        return cls(bracketed or name, None if port is None else int(port))

    def __str__(self) -> str:
        if self.port is None:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _ip_version(text: str) -> int | None:
    """4 or 6 for a literal address, None for a name."""
    for version, family in ((4, socket.AF_INET), (6, socket.AF_INET6)):
        try:
            socket.inet_pton(family, text.partition("%")[0])
        except OSError:
            continue
        return version
    return None


def _choose_preset(network: NetworkSection, facts: Facts, *, one_machine: bool) -> Choice:
    """The recipe's; else what fits the hosts. Where nobody asked them, `ethernet` only says that it is no loopback."""
    if network.preset != "auto":
        return Choice(preset=network.preset, why="", off={})
    if one_machine:
        return Choice(preset="loopback", why=why_one_machine(facts.hosts), off={})
    if not facts.hosts:
        return Choice(preset="ethernet", why="", off={})
    return choose_preset(facts.hosts)


def _check_hosts(network: NetworkSection, facts: Facts, origins: Mapping[str, str], remarks: Remarks) -> None:
    """What the recipe asks for and a host does not have. Hosts that nobody could ask are seen when the run is there."""
    if network.preset != "auto":
        for text in missing_for(network.preset, facts.hosts):
            hint = f"preset auto takes what is there: {choose_preset(facts.hosts).preset}"
            remarks.problems.append(Finding("network.preset", f"network.preset: {network.preset}: {text}", hint))
    if network.interface == "auto" or facts.docker:
        return  # containers have interfaces of their own
    for index, host in enumerate(facts.hosts):
        known = {each.name: each.addresses for each in host.interfaces}
        if host.knows_addresses and not known.get(network.interface):
            what = "has no address" if network.interface in known else "does not exist (or is down)"
            message = f"network.interface: the interface {network.interface!r} {what} on node {index} ({host.hostname})"
            listed = ", ".join(f"{name} ({', '.join(found)})" for name, found in known.items() if found) or "none"
            remarks.problems.append(Finding("network.interface", message, f"interfaces with an address: {listed}"))


def _choose_interface(
    network: NetworkSection, preset: str, facts: Facts, *, one_machine: bool, remarks: Remarks
) -> tuple[str, str]:
    """The interface and where it comes from. One that is not here is a problem (F037), except for other machines."""
    usable = [interface for interface in facts.interfaces if interface.addresses]
    if network.interface != "auto":
        if one_machine and network.interface not in {interface.name for interface in usable}:
            remarks.problems.append(_no_interface("network.interface", network.interface, facts))
        return network.interface, "recipe"
    if not one_machine:
        return "auto", "auto: the one that leads to node 0, found on each node"
    found = [interface.name for interface in _fitting(preset, usable)]
    if not found:
        remarks.problems.append(
            Finding(
                "network.preset",
                f"network.preset: no interface of this machine fits {preset}",
                f"interfaces with an address: {_listed(facts)}",
            )
        )
        return "auto", "auto"
    return found[0], "auto: all ranks are on this machine" if preset == "loopback" else f"preset {preset}"


def _fitting(preset: str, usable: Sequence[Interface]) -> list[Interface]:
    """Interfaces of a preset, the best first."""
    if preset == "loopback":
        return [interface for interface in usable if interface.loopback]
    cables = [item for item in usable if not item.loopback and not NOT_A_CABLE.match(item.name)]
    if preset == "infiniband":
        cables.sort(key=lambda item: not item.name.startswith("ib"))
    return cables


def _no_interface(key: str, name: str, facts: Facts) -> Finding:
    known = {interface.name for interface in facts.interfaces}
    what = "has no address" if name in known else "does not exist (or is down)"
    return Finding(
        key,
        f"{key}: the interface {name!r} {what} on {facts.hostname}",
        f"interfaces with an address: {_listed(facts)}",
    )


def _listed(facts: Facts) -> str:
    names = [f"{item.name} ({', '.join(item.addresses)})" for item in facts.interfaces if item.addresses]
    return ", ".join(names) or "none"


def _recipe_settings(
    network: NetworkSection, recipe_env: Mapping[str, str], origins: Mapping[str, str], remarks: Remarks
) -> list[Setting]:
    """Variables that the recipe names, under `network.*` or `env`."""
    tables = (("nccl", "NCCL_", network.nccl), ("gloo", "GLOO_", network.gloo))
    settings: list[Setting] = []
    for section, prefix, table in (*tables, ("torch_nccl", "TORCH_NCCL_", network.torch_nccl)):
        for name, value in table.items():
            key = f"network.{section}.{name}"
            _check_name(key, name, prefix, remarks)
            settings.append(
                Setting(
                    name=prefix + name, value=variable_value(value), origin=origins.get(key, f"recipe:{key}"), rank=0
                )
            )
    for name, value in recipe_env.items():
        if name.startswith(PREFIXES):
            key = f"env.{name}"
            settings.append(Setting(name=name, value=value, origin=origins.get(key, f"recipe:{key}"), rank=0))
    return settings


def _check_name(key: str, name: str, prefix: str, remarks: Remarks) -> None:
    """A full name is a mistake for sure; an unknown one may be newer than our list."""
    if name.startswith(prefix):
        short = name.removeprefix(prefix)
        remarks.problems.append(Finding(key, f"{key}: names stand here without {prefix}", f"write {short}"))
    elif prefix + name not in KNOWN and prefix + name not in {old for old, _, _ in RENAMED}:
        import difflib

        options = [known.removeprefix(prefix) for known in KNOWN if known.startswith(prefix)]
        close = difflib.get_close_matches(name.upper(), options, n=1)
        guess = f"; did you mean {close[0]}?" if close else "."
        remarks.notes.append(f"{key}: {prefix}{name} is not a variable that we know{guess} It is passed on as it is.")


def _interface_settings(interface: str, origin: str, *, explicit: bool) -> list[Setting]:
    """One interface in the syntax of each library: `=` makes NCCL match the whole name, not a prefix (F037)."""
    if interface == "auto":
        return []
    spellings = {
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
    }
    rank = 0 if explicit else 2
    return [Setting(name=name, value=value, origin=origin, rank=rank, weight=2) for name, value in spellings.items()]


def _settle(
    settings: Sequence[Setting], torch_version: str | None, remarks: Remarks
) -> tuple[tuple[EnvVar, ...], tuple[str, ...]]:
    """One value for each variable under the name that torch reads now; what lost, or was renamed, is said once."""
    by_name: dict[str, list[Setting]] = {}
    for setting in settings:
        by_name.setdefault(current_name(setting.name, torch_version), []).append(setting)
    env = []
    for name, given in sorted(by_name.items()):
        winner, *losers = sorted(given, key=lambda item: (item.rank, item.weight, item.name != name))
        env.append(EnvVar(name=name, value=winner.value, origin=winner.origin))
        _report(name, winner, losers, remarks)
    unset = {item.name for item in settings if item.origin == "environment"} - by_name.keys()
    return tuple(env), tuple(sorted(unset))


def _report(name: str, winner: Setting, losers: Sequence[Setting], remarks: Remarks) -> None:
    """Say what the user set and does not get, and which old spelling should be written anew."""
    for old in sorted({item.name for item in (winner, *losers) if item.name != name and item.rank < 2}):
        remarks.notes.append(f"{old} is an old name: the workers get {name} instead, with the same value")
    for loser in losers:
        if loser.rank < 2 and loser.value.lstrip("=") != winner.value.lstrip("="):
            spelled = "" if loser.name == name else f"{loser.name}="
            remarks.notes.append(
                f"{name}={winner.value} from {winner.origin}; {spelled}{loser.value} from {loser.origin} is not used"
            )


def _one_watch(env: Sequence[EnvVar], torch_version: str | None, remarks: Remarks) -> tuple[EnvVar, ...]:
    """One of NCCL's two ways to notice a timeout: torch ignores the second without a word that anyone sees (F072)."""
    blocking, handling = (
        current_name(name, torch_version) for name in ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    )
    given = {variable.name: variable for variable in env}
    if blocking not in given or given[blocking].value.lower() not in ("1", "t", "true", "y", "yes"):
        return tuple(env)
    if given[handling].origin == "default":
        off = EnvVar(name=handling, value="0", origin=f"default beside {blocking}")
        return tuple(off if variable.name == handling else variable for variable in env)
    if given[handling].value != "0":
        values = f"{blocking}={given[blocking].value} and {handling}={given[handling].value}"
        key = given[handling].origin.removeprefix("recipe:")
        hint = "leave both out: network.timeout then ends a collective that takes longer"
        remarks.problems.append(Finding(key, f"{values}: torch obeys only the first", hint))
    return tuple(env)


def _check_gloo_interface(env: Sequence[EnvVar], facts: Facts, remarks: Remarks) -> None:
    """Gloo dies of a wrong name only in the workers, with a message that does not say so (F035)."""
    usable = {interface.name for interface in facts.interfaces if interface.addresses}
    for variable in env:
        if variable.name != "GLOO_SOCKET_IFNAME" or variable.origin != "environment":
            continue
        for name in variable.value.split(","):
            if name not in usable:
                remarks.problems.append(_no_interface("GLOO_SOCKET_IFNAME", name, facts))
