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
from jobs.state import CheckpointError
from jobs.store_copies import Copies
from jobs.store_disks import Disks, find_disks, refuse_several, sentence
from jobs.store_record import RecordCopies
from jobs.world import Meeting
from launcher.runs.rundir import RunDir

REPLICAS = 2
"""Disks that have all of a checkpoint, with `replicate`."""


def find_store(job: Job, checkpoints: Checkpoints, meeting: Meeting) -> Disks:
    """Try the folder of the checkpoints, and find out who shares it with whom; all ranks together.

    Raises CheckpointError on all of them.
    """
    meeting.gather("try the folder of the checkpoints", lambda: checkpoints.check_writable(meeting.world.rank))
    shared = job.recipe.checkpoint.store == "shared"
    disks = find_disks(meeting, checkpoints.folder, attempt=job.attempt, must_be_one=shared)
    if shared:
        try:
            refuse_several(disks, checkpoints.folder)
        except CheckpointError:
            meeting.part("know the disks")
            raise
    return disks


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
