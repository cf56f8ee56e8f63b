"""What of a run has to be uploaded to W&B, and in which order. Standard library only; the tracking process uses it too.

Runs of the built-in job are rebuilt as one W&B run from metrics.jsonl: it has every step once, whatever was killed.
Scripts talk to W&B themselves: the folders that their attempts have left are uploaded one after the other, as one run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.runs.metrics import Record
from launcher.wording import count

FOLDER = "tracking"
"""In the run directory: what was sent, and what the trackers print."""
ORDER = "order.json"
"""In that folder: what the tracking process was told, the newest attempt's."""

UPLOAD = "wandb-upload"
"""The ledger of an upload in progress; it takes the place of W&B's own when it is through."""

_PART = re.compile(r"offline-run-(?P<time>\d{8}_\d{6})-(?P<id>.+)")
_PARTS = ("train", "eval")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A folder that one attempt has left, offline."""

    path: Path
    time: str
    """When the attempt began: part of the folder's name."""
    wandb_id: str
    synced: bool
    """Whether it was uploaded."""


def find_parts(folder: Path) -> list[Part]:
    """The offline folders in a `wandb` folder, those of one id together, in the order of the attempts."""
    parts = []
    for path in folder.glob("offline-run-*"):
        found = _PART.fullmatch(path.name)
        if found and any(path.glob("*.wandb")):
            parts.append(Part(path=path, time=found["time"], wandb_id=found["id"], synced=is_synced(path)))
    return sorted(parts, key=lambda part: (part.wandb_id, part.time))


def is_synced(path: Path) -> bool:
    """Whether W&B's mark says that a folder was uploaded."""
    return all(synced_mark(file).exists() for file in path.glob("*.wandb"))


def synced_mark(file: Path) -> Path:
    """W&B's own mark of a file that was uploaded."""
    return file.with_suffix(".wandb.synced")


def mark_synced(parts: Iterable[Part]) -> None:
    """Their content was uploaded another way: neither `wandb sync` nor this is to do it again."""
    for part in parts:
        for file in part.path.glob("*.wandb"):
            synced_mark(file).touch()


def sent_path(folder: Path, ledger: str) -> Path:
    """Where it stands how far a tracker has got."""
    return folder / f"{ledger}.sent"


def read_sent(path: Path) -> dict[str, int]:
    """The last steps whose training and evaluation values were sent; 0 = none."""
    try:
        numbers = [int(number) for number in path.read_bytes().split()[: len(_PARTS)]]
    except FileNotFoundError:
        numbers = []
    return dict(zip(_PARTS, [*numbers, 0, 0], strict=False))


def unsent_steps(metrics: Sequence[Record], sent: Mapping[str, int]) -> list[int]:
    """The steps with values that were not sent yet."""
    return [
        record["step"]
        for record in metrics
        if any(
            "/" in name and record["step"] > sent["eval" if name.startswith("eval/") else "train"] for name in record
        )
    ]


def parts_text(parts: Sequence[Part], run_id: str) -> list[str]:
    """The parts as lines, each with its place in the order."""
    lines = []
    for number, part in enumerate(parts, start=1):
        whose = "" if part.wandb_id == run_id else f", its own id {part.wandb_id}"
        state = "already uploaded" if part.synced else "to upload"
        lines.append(f"part {number} of {len(parts)}  {part.path.name}  {state}{whose}")
    return lines


def steps_text(steps: Sequence[int]) -> str:
    """`120 steps, 101 to 220`."""
    if not steps:
        return "nothing: every step was sent"
    return f"{count(len(steps), 'step')}, {steps[0]:,} to {steps[-1]:,}"
