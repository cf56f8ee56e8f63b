"""Machines as SkyPilot rents them, on namespaces: what its task says is put there, and its script is run, by hand."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from hosts import Bed, HostsRun
from launched import LIMIT_S

from launcher.planning.plan import Plan
from launcher.road import Request, make_run, prepared
from launcher.runs.rundir import RunDir

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "recipes" / "mnist_ddp.yaml"
TOKEN = "LAUNCH_TOKEN"


class Rented(HostsRun):
    """The main recipe with `--on sky`, on machines with disks and homes of their own."""

    def __init__(self, bed: Bed, *overrides: str, target: Path = MAIN, nodes: int = 2, is_script: bool = False) -> None:
        self.store = bed.folder / "bucket"
        self.home = bed.folder / "caller"
        store = () if is_script else (f"checkpoint.store=file://{self.store}",)
        given = (f"sky.python={sys.executable}", *store, *overrides)
        request = Request(
            target=str(target), overrides=given, nodes=nodes, where="sky", name="rented", runs_dir=str(self.home)
        )
        with prepared(request, warm=False) as ready:
            plan, run = ready.plan, make_run(ready, command=["launch", str(target)])
        super().__init__(bed, plan, run)
        assert plan.sky is not None
        self.task: dict[str, Any] = yaml.safe_load(plan.sky.task)
        self.disks = [bed.folder / "disks" / host.name for host in bed.hosts[:nodes]]
        for host, disk in zip(bed.hosts, self.disks, strict=False):
            disk.mkdir(parents=True)
            host.give_disk(disk, self.home)
        self.processes: list[subprocess.Popen[bytes]] = []

    def homes(self, number: int) -> Path:
        """The home of whoever SkyPilot logs in as, on a machine."""
        return self.bed.folder / "homes" / str(number)

    def rent(self, **environment: str) -> None:
        """What SkyPilot does on machines that are new: copies, then the script on each, with its variables."""
        addresses = "\n".join(host.address for host in self.bed.hosts[: len(self.disks)])
        self.processes = []
        for number, host in enumerate(self.bed.hosts[: len(self.disks)]):
            home = self.homes(number)
            shutil.rmtree(home, ignore_errors=True)
            for target, source in self.task["file_mounts"].items():
                place = home / target.removeprefix("~/")
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(source, place) if Path(source).is_dir() else shutil.copy(source, place)
            script = self.bed.folder / f"run-{number}.sh"
            script.write_text(self.task["run"])
            variables = {
                **{name: str(value) for name, value in self.task["envs"].items()},
                "HOME": str(home),
                TOKEN: self.run.token.read_text(),
                "SKYPILOT_NODE_RANK": str(number),
                "SKYPILOT_NODE_IPS": addresses,
                "SKYPILOT_NUM_NODES": str(len(self.disks)),
                **self.env,
                **environment,
            }
            output = self.bed.folder / f"said-{number}.log"
            self.processes.append(host.start(["bash", str(script)], env=variables, output=output))

    def lose_machines(self) -> None:
        """They are taken away, with all that is on them, and others come in their place."""
        for host, disk in zip(self.bed.hosts, self.disks, strict=False):
            host.kill()
            for path in disk.iterdir():
                shutil.rmtree(path)
            host.boot()

    def codes(self) -> list[int]:
        """Wait for the end of the scripts; their exit codes."""
        return [process.wait(LIMIT_S) for process in self.processes]

    def on(self, number: int) -> RunDir:
        """The run directory that a machine has."""
        return RunDir(self.disks[number] / self.run.run_id)

    def said(self) -> str:
        """What the scripts have said."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.bed.folder.glob("said-*.log")))

    def cancel(self) -> None:
        """As SkyPilot does it: TERM to every process there is, at once."""
        for host in self.bed.hosts[: len(self.disks)]:
            for pid in host.pids().values():
                try:
                    os.kill(pid, signal.SIGTERM)
                except ProcessLookupError:
                    continue


def plan_of(*overrides: str, target: Path = MAIN, nodes: int = 1) -> Plan:
    """The plan of a recipe on rented machines; nothing is made."""
    with prepared(Request(target=str(target), overrides=overrides, nodes=nodes, where="sky"), warm=False) as ready:
        return ready.plan
