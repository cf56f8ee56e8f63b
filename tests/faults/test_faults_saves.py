"""Faults in saves (F009, rows 14 and 15 of the fault model): whatever happens to a save, the restart loads the correct
bytes of a step that was saved, by itself. `saves_ranks.py` has the faults and says what was not as it should be.

Each kind is drawn by chance from its seed: a kill at some write, a full disk, a file that is cut off, one bit that is
flipped, a rename that is lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("saves_ranks.py")
SEEDS = {"kill": 50, "full": 20, "truncate": 20, "flip": 20, "rename": 20}
SHORT = {"kill": 3, "full": 3, "truncate": 1, "flip": 2, "rename": 3}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """FOLDER/disk is a file system of its own, small enough to be filled at once."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a disk that can be full: needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a disk that can be full: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(disk)], check=True)


def inject(folder: Path, *wanted: str) -> list[dict[str, Any]]:
    """One result per fault."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *wanted], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["wanted"] for result in results] == list(wanted)
    return results


def check(results: list[dict[str, Any]]) -> None:
    assert [result for result in results if result["problems"]] == []


def numbered(kind: str, seeds: dict[str, int]) -> list[str]:
    return [f"{kind}:{seed}" for seed in range(seeds[kind])]


def test_after_a_fault_in_a_save_the_restart_loads_correct_bytes(tmp_path: Path) -> None:
    kinds = [kind for kind in SHORT if kind != "full"]
    check(inject(tmp_path, *(wanted for kind in kinds for wanted in numbered(kind, SHORT))))


def test_a_disk_that_is_full_in_the_middle_of_a_save_costs_no_checkpoint(small_disk: Path) -> None:
    """All ranks end at the same step with SaveError, or go on where the recipe allows that and save again."""
    check(inject(small_disk, *numbered("full", SHORT)))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", sorted(SEEDS))
def test_of_all_faults_in_saves_none_costs_more_than_its_own_save(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    folder: Path = request.getfixturevalue("small_disk") if kind == "full" else tmp_path
    results = inject(folder, *numbered(kind, SEEDS))
    check(results)
    faults = [result["fault"] for result in results]
    assert {fault["ranks"] for fault in faults} == {1, 2, 3}
    if kind in ("truncate", "flip"):
        assert len({fault["file"] for fault in faults}) == 5
    else:
        assert len({(fault["rank"], fault.get("where"), fault["at"]) for fault in faults if "at" in fault}) >= 3
