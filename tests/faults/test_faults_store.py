"""Machines without a shared folder: each has a disk of its own at the path of the run directory, and may lose it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import criteria
import pytest
from criteria import Reference
from hosts import Bed, HostsRun, MakeBed
from launched import LIMIT_S
from test_faults_hosts import EVERY, STEPS, left, planned, recipe_of

from jobs.folders import complete
from jobs.manifest import verify
from launcher.runs.events import Event, read_events
from launcher.runs.rundir import RunDir

pytestmark = [pytest.mark.process, pytest.mark.needs("netns"), pytest.mark.timeout(240)]

REPLICATE = {"checkpoint": {"every": f"{EVERY} steps", "store": "replicate"}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """On two nodes of one machine."""
    return criteria.undisturbed(tmp_path_factory.mktemp("reference"), recipe_of(), nodes=2)


class Apart:
    """A run on machines that share no folder. What is copied to each before its agent starts is the executor's part."""

    def __init__(self, run: HostsRun) -> None:
        self.inner, self._skeleton = run, run.run.path
        self.disks = [run.bed.folder / "disks" / host.name / run.run.run_id for host in run.bed.hosts]
        for host, disk in zip(run.bed.hosts, self.disks, strict=True):
            self.fill(disk)
            host.give_disk(disk, self._skeleton)
        run.run = RunDir(self.disks[0])

    def fill(self, disk: Path) -> None:
        """Bring what a node needs to begin to an empty disk."""
        shutil.copytree(self._skeleton, disk, dirs_exist_ok=True)

    def wipe(self, number: int) -> None:
        """Another disk is in its place, and empty but for that."""
        for path in self.disks[number].iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.fill(self.disks[number])

    @property
    def events(self) -> list[Event]:
        """Of all disks."""
        return sorted((event for disk in self.disks for event in read_events(disk)), key=lambda event: event["time"])

    def happened(self, name: str, **fields: Any) -> list[Event]:
        """The events of a name with these fields."""
        return [e for e in self.events if e["event"] == name and all(e.get(k) == v for k, v in fields.items())]

    def whole(self, number: int) -> list[str]:
        """The checkpoints of a disk, every bit of them verified."""
        folder = self.disks[number] / "checkpoints"
        for name in complete(folder):
            verify(folder / name)
        return complete(folder)

    def bring_ledgers(self) -> None:
        """What the ranks of the other machines have trained on, for `criteria`."""
        for disk in self.disks[1:]:
            for path in disk.glob("ledger-*"):
                shutil.copy(path, self.disks[0])


def apart(bed: Bed, **more: Any) -> Apart:
    return Apart(planned(bed, **{**REPLICATE, **more}))


def test_two_machines_without_a_shared_folder_have_every_checkpoint_on_both(
    make_bed: MakeBed, reference: Reference
) -> None:
    run = apart(make_bed(2), step_s=0.0)
    run.inner.start()
    assert run.inner.wait() == 0, run.inner.text
    run.bring_ledgers()
    criteria.assert_bit(run.inner.run, reference)
    criteria.assert_once(run.inner.run, reference)
    assert run.whole(0) == run.whole(1) == [f"step-{STEPS - EVERY}", f"step-{STEPS}"]
    criteria.assert_clean(lambda: left(run.inner))


def test_node_0_and_its_disk_are_lost_and_the_run_goes_on_from_what_the_other_machine_has(
    make_bed: MakeBed, reference: Reference
) -> None:
    """The newest step, which it keeps in its memory; the numbers of the attempts, and the curve, which were written on
    the disk that is gone."""
    run = apart(make_bed(2))
    run.inner.start()
    run.inner.until(lambda: run.happened("checkpoint_saved", step=20), LIMIT_S)
    host = run.inner.bed.hosts[0]
    host.kill()
    before = run.inner.step
    (given_up,) = run.inner.until(lambda: run.happened("workers_given_up", node=1))
    assert given_up["kept"] >= before - 1, "all ranks are within a step"
    run.wipe(0)
    host.boot()
    run.inner.start(0)
    assert run.inner.wait() == 0, run.inner.text
    criteria.assert_bit(run.inner.run, reference)
    started = run.happened("training_started")
    assert [event["attempt"] for event in started] == [1, 2], "the attempts go on, and the first is in the record"
    assert started[-1]["step"] == given_up["kept"]
    assert (started[-1]["memory"] or {"node": 1})["node"] == 1, "or it is a checkpoint, where it was due just then"
    assert [event["known_by"] for event in run.happened("record_lost")] == [1]
    assert run.inner.result["attempts"] == 2
    assert run.whole(0) == run.whole(1)
    criteria.assert_clean(lambda: left(run.inner))


def test_another_node_and_its_disk_are_lost_and_no_step_is(make_bed: MakeBed, reference: Reference) -> None:
    """The first node keeps the newest step in its memory meanwhile, as with a shared folder."""
    run = apart(make_bed(2))
    run.inner.start()
    run.inner.wait_for_step(25)
    host = run.inner.bed.hosts[1]
    host.kill()
    run.inner.until(lambda: run.happened("rescued"))
    run.wipe(1)
    host.boot()
    run.inner.start(1)
    assert run.inner.wait() == 0, run.inner.text
    criteria.assert_bit(run.inner.run, reference)
    assert criteria.made_twice(run.inner.run) == []
    assert run.whole(0) == run.whole(1) == [f"step-{STEPS - EVERY}", f"step-{STEPS}"]
    criteria.assert_clean(lambda: left(run.inner))


@pytest.mark.long
def test_a_run_of_one_to_two_nodes_has_one_copy_while_it_is_alone_and_two_again_after_that(
    make_bed: MakeBed, reference: Reference
) -> None:
    """The other machine comes back with an empty disk."""
    run = Apart(planned(make_bed(2), nodes="1:2", hold_at=45, **REPLICATE))
    run.inner.start()
    run.inner.wait_for_step(15)
    host = run.inner.bed.hosts[1]
    host.kill()
    run.wipe(1)
    run.inner.until(lambda: run.happened("checkpoint_saved", step=40), LIMIT_S)
    assert "step-40" in run.whole(0)
    assert run.whole(1) == []
    host.boot()
    run.inner.start(1)
    run.inner.until(lambda: len(run.happened("node_joined", node=1)) > 1, LIMIT_S)
    (run.disks[0] / "go-on").touch()
    assert run.inner.wait() == 0, run.inner.text
    started = run.happened("training_started")
    assert [event["world_size"] for event in started] == [2, 1, 2]
    criteria.assert_close(run.inner.run, reference, until=15)
    assert run.whole(0) == [f"step-{STEPS - EVERY}", f"step-{STEPS}"]
    assert run.whole(1)[-1] == f"step-{STEPS}", "the one before may have been in memory when it came"
    criteria.assert_clean(lambda: left(run.inner))


def test_all_machines_lose_their_power_and_node_0_its_disk(make_bed: MakeBed, reference: Reference) -> None:
    """Then no memory helps: the run goes on from the copy of the newest checkpoint on the other disk."""
    run = apart(make_bed(2))
    run.inner.start()
    run.inner.until(lambda: run.happened("checkpoint_saved", step=20), LIMIT_S)
    for host in run.inner.bed.hosts:
        host.kill()
    run.wipe(0)
    for host in run.inner.bed.hosts:
        host.boot()
    run.inner.start()
    assert run.inner.wait() == 0, run.inner.text
    criteria.assert_bit(run.inner.run, reference)
    started = run.happened("training_started")
    assert [event["attempt"] for event in started] == [1, 2]
    assert started[-1]["resumed_from"] in ("step-20", "step-30")
    assert started[-1]["memory"] is None
    assert "was sent from the disk of node 1 to node 0" in run.inner.text
    criteria.assert_clean(lambda: left(run.inner))


def test_what_must_be_shared_and_is_not_is_refused_before_a_step(make_bed: MakeBed) -> None:
    run = apart(make_bed(2), checkpoint={"every": f"{EVERY} steps"})
    run.inner.start()
    assert run.inner.wait() == 1
    assert run.inner.result["cause"] == "recipe"
    assert "checkpoint.store: shared, and " in run.inner.text
    assert "set checkpoint.store: replicate" in run.inner.text
    assert not run.happened("training_started")
    assert run.inner.result["attempts"] == 1, "another attempt would find the same"
    criteria.assert_clean(lambda: left(run.inner))
