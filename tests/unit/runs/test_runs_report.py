"""The page of a failed run: golden texts (accept a change with `--force-regen`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import runs_values as values
from pytest_regressions.file_regression import FileRegressionFixture

from launcher.planning.plan import CodePlan, Limits, NodePlan, Plan
from launcher.runs.fold import fold
from launcher.runs.observed import GONE
from launcher.runs.remedies import changed_value, remedies
from launcher.runs.report import failure_page, short_id, shown_place
from launcher.runs.states import POLICIES, Cause

RUNS = Path("/home/ada/runs")
RUN_ID = "lora-8b-1130-1412-m3xd"
AT_S = 1_000_000.0
OOM = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.36 GiB. GPU 1 has a total capacity of 79.3 GiB of which "
    "187.00 MiB is free. Including non-PyTorch memory, this process has 79.1 GiB memory in use. Of the allocated ..."
)
PEER = "RuntimeError: Connection closed by peer [10.0.0.1]:3535"


def script_plan(**fields: Any) -> Plan:
    """Two nodes of four GPUs each, a script with a batch size and a `resume:`."""
    made = values.plan(RUNS, run_id=RUN_ID)
    nodes = tuple(
        NodePlan(index=index, host=f"gcn3{index + 1}", address="10.0.0.1", cpus=(), gpus=(0, 1, 2, 3))
        for index in (0, 1)
    )
    worker = dataclasses.replace(
        made.worker, kind="script", module=None, script=f"{RUNS}/{RUN_ID}/code/finetune.py", cwd="/home/ada/ft"
    )
    known: dict[str, Any] = {
        "nodes": nodes,
        "nproc_per_node": 4,
        "device": "cuda",
        "backend": "nccl",
        "worker": worker,
        "code": CodePlan(root="/home/ada/ft", snapshot=True, reason="", sha256="ab"),
        "recipe": {"name": "lora-8b", "args": {"lr": 2e-4, "per_device_train_batch_size": 8}},
        "limits": Limits(max_restarts=2, grace_s=30.0, network_timeout_s=600.0, join_timeout_s=300.0),
    }
    return dataclasses.replace(made, **{**known, **fields})


def failure(rank: int = 5, cause: str = "oom", message: str = OOM, **fields: Any) -> dict[str, Any]:
    known = {
        "attempt": 2,
        "node": rank // 4,
        "rank": rank,
        "cause": cause,
        "exit_code": 1,
        "message": message,
        "place": f"{RUNS}/{RUN_ID}/code/finetune.py:214 in compute_loss",
        "log": f"logs/attempt-2/node-{rank // 4}/rank-{rank}.log",
        "log_line": 88412,
        "step": 4180,
        "last_words": "",
        "time": AT_S,
    }
    return {**known, **fields}


def result(first: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    known = {
        "state": "FAILED",
        "cause": first["cause"] if first else "rendezvous",
        "exit_code": first["exit_code"] if first else 1,
        "reason": "",
        "policy": POLICIES[Cause(first["cause"])].why_not if first else "",
        "first_failure": first,
        "step": 4180,
        "attempts": 2,
        "restarts": 0,
        "time": {"total_s": 6 * 3600 + 12 * 60 + 40.0},
        "checkpoint": {"latest": 4000, "best": None, "path": None},
    }
    return {**known, **fields}


LOST = [failure(rank, "peer_lost", PEER) for rank in (0, 1, 2, 3, 4, 6, 7)]
KILLED = failure(
    cause="signal",
    message="killed by SIGSEGV",
    exit_code=139,
    place="",
    last_words="warning: fused kernel\nFatal Python error: Segmentation fault",
)
ENDED = [{"event": "worker_ended", "attempt": 2, "rank": rank, "exit_code": 137} for rank in (0, 1, 2)]
NO_RESUME = "the script declares no `resume:`, and a restart from zero over old outputs is worse than a stop"
NODE = failure(
    -1, "node_lost", "the agent of node 1 (gcn32) was lost: nothing heard for 20 s", node=1, place="", log=""
)
BUILT_IN = {
    "recipe": {"data": {"global_batch_size": 128, "loader_workers": 4}, "train": {"optimizer": {"lr": 2e-3}}},
    "worker": values.plan(RUNS).worker,
}

PASSED_ON = (
    "IndexError: Caught IndexError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
    '  File "/x/worker.py", line 374, in _worker_loop\n    data = fetcher.fetch(index)\nIndexError: bad sample 5\n'
)

CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None, list[dict[str, Any]], dict[str, Any]]] = {
    "out-of-memory": (failure(), {}, LOST, {}),
    "signal": (KILLED, {"policy": "no restart is left", "restarts": 2}, ENDED, {}),
    "of-a-loader": (failure(cause="worker_error", message=PASSED_ON), {}, [], {}),
    "exit-3": (
        failure(cause="worker_error", message="exited with code 3", exit_code=3, place="", last_words="no data in /x"),
        {"policy": NO_RESUME, "step": None, "checkpoint": {}},
        [],
        {"resumable": False},
    ),
    "several-errors": (
        failure(2, "worker_error", "ValueError: boom\nmore\nof\nit", place="/opt/lib/x.py:3 in f"),
        {
            "cause": "repeated",
            "policy": POLICIES[Cause.REPEATED].why_not,
            "restarts": 1,
            "checkpoint": {"path": "out/c-9"},
        },
        [failure(3, "worker_error", "ValueError: boom"), failure(4, "worker_error", "ValueError: boom"), *LOST[:2]],
        {},
    ),
    "killed-by-the-kernel": (
        failure(1, "oom_killed", "killed by SIGKILL: the kernel was out of memory (limit 2.0 GiB)", exit_code=137),
        {"checkpoint": {"latest": None}},
        [],
        BUILT_IN,
    ),
    "built-in-nan": (failure(0, "nan", "FloatingPointError: loss is nan at step 4180"), {}, [], BUILT_IN),
    "built-in-recipe": (
        failure(
            0,
            "recipe",
            "OptionError: model.vocabulary: 100, and the data has 256 tokens; make it 256",
            place="",
            log_line=1,
            step=None,
        ),
        {"step": None, "checkpoint": {}},
        [],
        BUILT_IN,
    ),
    "no-checkpoint-usable": (
        failure(0, "checkpoint", "CheckpointError: step-40, step-20: every checkpoint is broken"),
        {"cause": "checkpoint", "policy": POLICIES[Cause.CHECKPOINT].why_not},
        [],
        BUILT_IN,
    ),
    "disk": (failure(0, "disk", "OSError: [Errno 28] No space left on device"), {}, [], {}),
    "node-lost": (NODE, {"policy": "no restart is left", "restarts": 2}, [], {}),
    "not-together": (None, {"reason": "node 1 (gcn32) did not come within 300 s", "step": None}, [], {}),
    "setup": (
        None,
        {"cause": "setup", "exit_code": 127, "reason": "`module load cuda` failed", "attempts": 0, "step": None},
        [],
        {},
    ),
    "out-of-memory-of-a-script-without-a-recipe": (failure(), {}, [], {"resumable": False, "recipe": {"args": []}}),
    "silent": (
        failure(cause="worker_error", message="exited with code 3", exit_code=3, place="", log_line=None),
        {"policy": NO_RESUME, "step": None, "checkpoint": {}},
        [],
        {"resumable": False},
    ),
    "hang": (
        failure(
            cause="hang",
            message="no step for 31 s (limit 30 s, learned) at step 4,180: rank 5 on node 1 (gcn32) is in __next__ at "
            "finetune.py:214 in compute_loss, 7 others wait in all_reduce at finetune.py:220 in step",
            log_line=None,
            exception="hang",
        ),
        {"policy": "no restart is left", "restarts": 2},
        ENDED,
        {},
    ),
    "vanished": (None, None, LOST[:1], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_page(case: str, file_regression: FileRegressionFixture) -> None:
    """F001"""
    first, fields, more, changes = CASES[case]
    told = [
        {"event": "created", "host": "gcn31"},
        *({"event": "agent_started", "node": node, "host": f"gcn3{node + 1}", "pid": node} for node in (0, 1)),
        *([] if case == "setup" else [{"event": "attempt_started", "attempt": 2}]),
        *([{"event": "failure", **first}] if first else []),
        *({"event": "failure", **event} for event in more),
        {"event": "submitted", "ref": "x"},
    ]
    ended = None if fields is None else {**result(first), **fields}
    record = fold([{"time": AT_S, **event} for event in told], GONE, ended, run_id=RUN_ID)
    page = failure_page(record, ended or {}, script_plan(**changes), run=f"./runs/{RUN_ID}", clock=lambda _: "03:12:44")
    file_regression.check("\n".join(page) + "\n", extension=".txt", basename=case)


def test_a_run_is_named_by_its_last_four_characters_where_it_has_them() -> None:
    assert short_id(RUN_ID) == "m3xd"
    assert short_id("my-own-name") == "my-own-name"


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        (f"{RUNS}/{RUN_ID}/code/pkg/m.py:3 in f", "pkg/m.py:3 in f"),
        ("/home/ada/ft/m.py:3 in f", "m.py:3 in f"),
        ("/opt/lib/m.py:3 in f", "/opt/lib/m.py:3 in f"),
        ("", ""),
    ],
)
def test_a_place_is_shown_relative_to_the_code(place: str, shown: str) -> None:
    assert shown_place(place, script_plan()) == shown


class TestWhatToChange:
    @pytest.mark.parametrize(
        ("args", "change"),
        [
            ({"batch_size": 64}, "args.batch_size=32"),
            ({"per-device-train-batch-size": 4, "batch_size": 64}, "args.per-device-train-batch-size=2"),
            ({"batch_size": 1}, None),
            ({"batch_size": True}, None),
            ({"lr": 1e-3}, None),
            (["--batch-size", "8"], None),
        ],
    )
    def test_of_a_script_the_batch_that_its_arguments_name(self, args: Any, change: str | None) -> None:
        assert changed_value(Cause.OOM, script_plan(recipe={"args": args})) == change

    @pytest.mark.parametrize(
        ("batch", "accumulate", "change"),
        [(128, 1, "train.accumulate=2"), (128, 8, "train.accumulate=16"), (8, 1, "train.precision=bf16")],
    )
    def test_of_the_built_in_job_accumulation_where_the_batch_divides(
        self, batch: int, accumulate: int, change: str | None
    ) -> None:
        recipe = {"data": {"global_batch_size": batch}, "train": {"accumulate": accumulate}}
        assert changed_value(Cause.OOM, script_plan(recipe=recipe, worker=values.plan(RUNS).worker)) == change

    def test_the_keys_come_in_their_order_without_those_that_are_set_already(self) -> None:
        job = values.plan(RUNS).worker
        message = OOM + "1.53 GiB is reserved by PyTorch but unallocated."
        recipe = {"data": {"global_batch_size": 128, "loader_workers": 4}, "train": {}}
        assert [each.change for each in remedies(Cause.OOM, script_plan(recipe=recipe, worker=job), message)] == [
            "train.accumulate=2",
            "train.precision=bf16",
            "train.activation_checkpointing=true",
            "parallelism.strategy=fsdp",
            "resources.alloc=expandable_segments",
        ]
        assert remedies(Cause.OOM, script_plan(recipe=recipe, worker=job), message)[-1].brings.endswith(
            ": 1.53 GiB were held and not in use"
        )
        recipe["train"] = {"precision": "fp16", "activation_checkpointing": True, "accumulate": 16}
        recipe |= {"parallelism": {"strategy": "fsdp"}, "resources": {"alloc": "expandable_segments"}}
        assert remedies(Cause.OOM, script_plan(recipe=recipe, worker=job)) == []
        killed = remedies(Cause.OOM_KILLED, script_plan(recipe=recipe, worker=job))
        assert [each.change for each in killed] == ["data.loader_workers=2", "checkpoint.asynchronous=false"]

    def test_ranks_that_work_on_the_same_samples_do_not_divide_the_batch(self) -> None:
        recipe = {"data": {"global_batch_size": 8}, "parallelism": {"strategy": "fsdp", "tp": 4}}
        assert changed_value(Cause.OOM, script_plan(recipe=recipe, worker=values.plan(RUNS).worker)) == (
            "train.accumulate=2"
        )

    def test_nothing_where_nothing_is_known_to_help(self) -> None:
        assert changed_value(Cause.WORKER_ERROR, script_plan()) is None
        assert changed_value(None, script_plan()) is None
