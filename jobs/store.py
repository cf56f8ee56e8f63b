"""What `checkpoint.store` means for an attempt: where its checkpoints are, and on how many disks.

shared      all nodes see one folder (proved by a token), which is refused where they do not
replicate   whole on the disks of two nodes; where all see one folder, nothing is copied (`jobs.store_copies`)
URL         whole on the disk of node 0, and the newest one is copied to there as well (`jobs.store_remote`)
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from jobs.checkpoint import Checkpoints
from jobs.job import Job
from jobs.store_copies import Copies
from jobs.store_disks import Disks, StoreError, find_disks, refuse_several, sentence
from jobs.store_record import RecordCopies
from jobs.store_remote import Away, Remote, Uploader
from jobs.world import Meeting
from launcher.runs.events import EventWriter
from launcher.runs.rundir import RunDir

REPLICAS = 2
"""Disks that have all of a checkpoint, with `replicate`."""
LAST_UPLOAD_S = 3000.0
"""How long the end of a training waits for the last upload."""
_STOP_SHARE = 1 / 2
"""How much of the grace time a stop waits for it."""


def find_store(job: Job, checkpoints: Checkpoints, meeting: Meeting, run_dir: RunDir, name: str) -> Disks:
    """Try where the checkpoints are to be, and find out who shares the folder with whom; all ranks together.

    name: of the run, at a URL. Raises StoreError on all of them.
    """
    store, shared = job.recipe.checkpoint.store, job.recipe.checkpoint.store == "shared"
    meeting.gather("try the folder of the checkpoints", lambda: checkpoints.check_writable(meeting.world.rank))
    if "://" in store:
        meeting.decide("open the store of the checkpoints", lambda: _open(job, checkpoints, run_dir, store, name))
        checkpoints.away = checkpoints.away or Away(checkpoints.shelf, remote=None, uploader=None)
    disks = find_disks(meeting, checkpoints.folder, attempt=job.attempt, must_be_one=shared)
    if shared:
        try:
            refuse_several(disks, checkpoints.folder)
        except StoreError:
            meeting.part("know the disks")
            raise
    return disks


def _open(job: Job, checkpoints: Checkpoints, run_dir: RunDir, url: str, name: str) -> None:
    """On rank 0: the store at a URL, and what copies there. Raises StoreError."""
    remote = Remote(url, name)
    events, keep = EventWriter(run_dir.path, "uploader"), job.recipe.checkpoint.keep
    uploader = Uploader(remote, checkpoints.shelf, events, attempt=job.attempt, keep=keep)
    checkpoints.away = Away(checkpoints.shelf, remote=remote, uploader=uploader)


def end_uploads(job: Job, checkpoints: Checkpoints, *, finished: bool) -> None:
    """Let the newest checkpoint come to where it is copied to, for as long as there is time."""
    if checkpoints.away is not None:
        checkpoints.away.finish(LAST_UPLOAD_S if finished or job.grace_s is None else job.grace_s * _STOP_SHARE)


def use_disks(job: Job, checkpoints: Checkpoints, disks: Disks, run_dir: RunDir, group: ProcessGroup) -> None:
    """Have the checkpoints of this attempt on its disks."""
    store, rank = job.recipe.checkpoint.store, dist.get_rank()
    if rank == 0 and (told := sentence(disks, store)):
        print(told, flush=True)
    if disks.count == 1:
        return
    replicates = store == "replicate"
    record = RecordCopies(run_dir, disks, rank=rank, attempt=job.attempt, group=group) if replicates else None
    checkpoints.copies = Copies(
        checkpoints.shelf,
        disks,
        rank=rank,
        attempt=job.attempt,
        group=group,
        holders=REPLICAS if replicates else 1,
        record=record,
    )
