"""The test of `launch doctor` with real ranks, which add up numbers over gloo."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from launcher.planning.all_reduce import runner

pytestmark = pytest.mark.process

BROKEN = """
import json, os, signal, time
import torch
import torch.distributed as dist
from jobs.all_reduce import try_all_reduce

def hangs(device, rank, ranks):
    if rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(4))
    return 1.0

def dies(device, rank, ranks):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.all_reduce(torch.ones(4))
    return 1.0

def adds_up_wrongly(device, rank, ranks):
    numbers = torch.ones(4)
    dist.all_reduce(numbers)
    if rank == 1:
        raise ValueError("3 of 4 sums are wrong")
    return 1.0

works = ((1.0, hangs), (20.0, dies), (20.0, adds_up_wrongly))
print(json.dumps([try_all_reduce("cpu", 2, limit_s, work) for limit_s, work in works]))
"""


def test_f074_real_ranks_add_up() -> None:
    tried = runner(sys.executable, ranks=2, on_gpus=False, loopback="lo", limit_s=30.0)({})
    assert tried.ok, tried.said
    assert tried.reduce_s is not None
    assert tried.reduce_s > 0
    assert tried.size_bytes == 64 << 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_f074_gpus_add_up_over_nccl() -> None:
    tried = runner(sys.executable, ranks=torch.cuda.device_count(), on_gpus=True, loopback="lo")({})
    assert tried.ok, tried.said


def test_f074_ranks_that_hang_die_or_are_wrong_are_named() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", BROKEN], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    hung, died, wrong = json.loads(done.stdout)
    assert [each["ok"] for each in (hung, died, wrong)] == [False] * 3
    assert [each["hung"] for each in (hung, died, wrong)] == [True, False, False]
    assert hung["said"] == "all ranks have met, and the all-reduce has not ended after 1 s"
    assert died["said"] == "rank 1 was killed by SIGSEGV"
    assert wrong["said"] == "rank 1: ValueError: 3 of 4 sums are wrong"
