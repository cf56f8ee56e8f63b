"""When a training collects garbage, and what is deterministic about it."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch

from jobs.hygiene import EVERY, Garbage, set_deterministic


class Circle:
    def __init__(self) -> None:
        self.own = self


def test_garbage_is_collected_between_steps_and_never_within() -> None:
    with Garbage() as garbage:
        assert not gc.isenabled()
        for step, pauses, is_gone in ((EVERY - 1, False, False), (EVERY, False, True), (EVERY + 1, True, True)):
            seen = weakref.ref(Circle())
            [[each] for each in range(10_000)]  # many times what would start a collection
            assert seen() is not None
            garbage.collect(step, pauses=pauses)
            assert (seen() is None) == is_gone
    assert gc.isenabled()


def test_deterministic_is_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        set_deterministic(True)
        assert torch.are_deterministic_algorithms_enabled()
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_has_no_deterministic_algorithm_is_an_error_on_a_gpu() -> None:
    try:
        set_deterministic(True)
        indices = torch.zeros(4, dtype=torch.long, device="cuda")
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.bincount(indices, weights=torch.ones(4, device="cuda"))
    finally:
        set_deterministic(False)
