"""What a worker's end means."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.agent import causes
from launcher.agent.adapters import ranks
from launcher.agent.causes import classify, describe
from launcher.errors import ExitCode
from launcher.runs.states import Cause


def error(name: str, text: str, *bases: str) -> dict[str, Any]:
    return {
        "message": {"message": f"{name}: {text}", "extraInfo": {}},
        "exception": name,
        "exception_bases": [name, *bases, "Exception", "BaseException", "object"],
    }


@pytest.mark.parametrize(
    ("exit_code", "raised", "cause"),
    [
        (1, error("ValueError", "boom"), Cause.WORKER_ERROR),
        (1, error("RuntimeError", "CUDA error: device-side assert triggered"), Cause.WORKER_ERROR),
        (7, None, Cause.WORKER_ERROR),
        (1, None, Cause.WORKER_ERROR),
        (2, None, Cause.USAGE),  # argparse
        (137, None, Cause.SIGNAL),
        (139, None, Cause.SIGNAL),
        (134, None, Cause.SIGNAL),
        (1, error("ImportError", "cannot import name 'x'"), Cause.USAGE),
        (1, error("ModuleNotFoundError", "No module named 'x'", "ImportError"), Cause.USAGE),
        (1, error("SyntaxError", "invalid syntax"), Cause.USAGE),
        (1, error("DataError", "data.path: there is no /nowhere", "UntrainableError"), Cause.RECIPE),
        (1, error("OptionError", "model.heads: 3", "UntrainableError"), Cause.RECIPE),
        (1, error("StoreError", "checkpoint.store: shared, and /x is another folder on node 1"), Cause.RECIPE),
        (1, error("DataError", "of a script", "Exception"), Cause.WORKER_ERROR),
        (1, error("IndentationError", "unexpected indent", "SyntaxError"), Cause.USAGE),
        (1, error("OutOfMemoryError", "CUDA out of memory. Tried to allocate", "RuntimeError"), Cause.OOM),
        (1, error("DistBackendError", "NCCL error: Cuda failure 2 'out of memory'", "RuntimeError"), Cause.OOM),
        (1, error("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), Cause.OOM),
        (1, error("MemoryError", ""), Cause.OOM_HOST),
        (1, error("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory"), Cause.OOM_HOST),
        (1, error("OSError", "[Errno 28] No space left on device"), Cause.DISK),
        (1, error("OSError", "[Errno 122] Disk quota exceeded: 'x'"), Cause.DISK),
        (1, error("RuntimeError", "PytorchStreamWriter failed writing file data/3: file write failed"), Cause.DISK),
        (1, error("CheckpointError", "step-4: rank-0 is missing", "RuntimeError"), Cause.CHECKPOINT),
        (1, error("SaveError", "step-4 could not be written", "CheckpointError", "RuntimeError"), Cause.SAVE),
        (1, error("SaveError", "rank 1: OSError: [Errno 28] No space left", "CheckpointError"), Cause.DISK),
        (1, error("OSError", "[Errno 12] Cannot allocate memory"), Cause.OOM_HOST),
        (1, error("ValueError", "MemoryError is what I say"), Cause.WORKER_ERROR),
        (1, error("NotFinite", "loss is nan at step 3", "FloatingPointError"), Cause.NAN),
        (1, error("RuntimeError", "[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), Cause.PEER_LOST),
        (1, error("RuntimeError", "Read error [127.0.0.1]:1234: Connection reset by peer"), Cause.PEER_LOST),
        (1, error("DistNetworkError", "failed to recv, got 0 bytes", "DistError"), Cause.PEER_LOST),
        (1, error("DistBackendError", "NCCL remote process exited", "DistError"), Cause.PEER_LOST),
        (1, error("RuntimeError", "[unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"), Cause.HANG),
        (1, error("RuntimeError", "[pair.cc:534] Application timeout caused pair closure"), Cause.HANG),
        (1, error("DistStoreError", "Timed out after 6 seconds waiting for clients. 1/2 clients joined."), Cause.HANG),
        (1, error("DistStoreError", "wait timeout after 5000ms, keys: /a", "DistError"), Cause.HANG),
        (1, error("DistBackendError", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7"), Cause.HANG),
        (1, error("BrokenPipeError", "[Errno 32] Broken pipe", "ConnectionError", "OSError"), Cause.PEER_LOST),
    ],
)
def test_cause_of_an_end(exit_code: int, raised: dict[str, Any] | None, cause: Cause) -> None:
    assert classify(exit_code, raised) is cause


@pytest.mark.parametrize("left", [{}, {"message": "torch's short form"}, {"message": {}}, {"message": None}])
def test_an_error_file_of_another_shape_is_a_worker_error(left: dict[str, Any]) -> None:
    assert classify(1, left) is Cause.WORKER_ERROR
    assert isinstance(describe(1, left), str)


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (0, "exited with code 0"),
        (7, "exited with code 7"),
        (137, "killed by SIGKILL"),
        (139, "killed by SIGSEGV"),
        (134, "killed by SIGABRT"),
        (128 + 33, "killed by signal 33"),
    ],
)
def test_an_end_without_an_exception_is_described_by_its_code(exit_code: int, text: str) -> None:
    assert describe(exit_code, None) == text


def test_an_exception_is_described_by_itself() -> None:
    assert describe(1, error("ValueError", "boom-2")) == "ValueError: boom-2"
    assert describe(1, {"message": "RuntimeError: short"}) == "RuntimeError: short"


def test_of_a_long_exception_its_begin_and_its_end_are_kept() -> None:
    text = describe(1, error("ValueError", f"begin {'x' * 5_000} end"))
    assert text.startswith("ValueError: begin")
    assert text.endswith("end")
    assert "(5,022 characters)" in text


def test_an_exception_gives_no_orders_to_the_terminal() -> None:
    assert describe(1, error("ValueError", "\x1b[31mbad\x1b[0m\x00")) == "ValueError: bad"


LOADER = error("RuntimeError", "DataLoader worker (pid(s) 77) is killed by signal: Killed. ")


@pytest.mark.parametrize(
    ("exit_code", "raised", "oom_killed", "cause"),
    [
        (137, None, True, Cause.OOM_KILLED),
        (137, None, False, Cause.SIGNAL),
        (139, None, True, Cause.SIGNAL),
        (1, None, True, Cause.WORKER_ERROR),
        (1, error("ValueError", "boom"), True, Cause.WORKER_ERROR),
        (1, LOADER, True, Cause.OOM_KILLED),
        (1, LOADER, False, Cause.WORKER_ERROR),
    ],
)
def test_a_kill_by_the_kernel_is_told_from_another(
    exit_code: int, raised: dict[str, Any] | None, oom_killed: bool, cause: Cause
) -> None:
    """F001: a death without an exception."""
    assert classify(exit_code, raised, oom_killed=oom_killed) is cause


def test_the_only_worker_loses_no_peer() -> None:
    """A loader process that is killed can be seen first by the connection to it."""
    lost = error("ConnectionResetError", "[Errno 104] Connection reset by peer", "ConnectionError", "OSError")
    assert classify(1, lost) is Cause.PEER_LOST
    assert classify(1, lost, alone=True) is Cause.WORKER_ERROR
    assert classify(1, lost, oom_killed=True, alone=True) is Cause.OOM_KILLED


def test_an_abort_by_the_watchdog_of_nccl_is_a_hang() -> None:
    """F072."""
    assert classify(134, None, timed_out=True) is Cause.HANG
    assert classify(134, None) is Cause.SIGNAL
    assert classify(1, None, timed_out=True) is Cause.WORKER_ERROR, "it went on, and ended by itself"
    assert classify(1, error("ValueError", "boom"), timed_out=True) is Cause.WORKER_ERROR


def test_an_adapter_which_has_no_import_of_ours_knows_the_code_of_a_saved_stop() -> None:
    assert ranks.STOPPED_EXIT_CODE == causes.STOPPED_EXIT_CODE == ExitCode.STOPPED
