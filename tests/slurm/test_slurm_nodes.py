"""On the nodes of a job: one set of ranks, the head agent where its peers reach it, and a bad node that is named."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import Recipe
from slurm_cluster import SlurmCluster
from slurm_launched import Login, OnSlurm, SlurmLaunched, cancel_jobs_below

from launcher.planning.plan import Plan
from launcher.runs.events import read_events
from launcher.runs.explain import rank_environment
from launcher.runs.rundir import RunDir

pytestmark = [pytest.mark.process, pytest.mark.needs("slurm"), pytest.mark.timeout(180)]

OUT_OF_THE_QUEUE_S = 60.0

TELLS = """
import json, os, tempfile
from toy import RANK, RUN, join
group = join()
told = {"env": dict(os.environ), "host": os.uname().nodename, "cpus": len(os.sched_getaffinity(0)),
        "tmp": tempfile.gettempdir()}
(RUN / f"told-{RANK}.json").write_text(json.dumps(told))
group.barrier()
"""
TASK_SCOPED = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID", "SLURM_GTIDS", "SLURM_NTASKS",
               "SLURM_NPROCS", "SLURM_STEP", "SLURM_TASKS_PER_NODE", "SLURM_LAUNCH_NODE_IPADDR", "PMI")  # fmt: skip


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a short path, as disks of nodes have."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as folder:
        yield Path(folder)


def told(run: SlurmLaunched) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run.run.path.glob("told-*.json"))]


def test_ranks_variables_cpus_interface_and_scratch(
    on_slurm: OnSlurm, recipe: Recipe, tmp_path: Path, scratch: Path
) -> None:
    """F014 F031 F032 F034 F035: nothing contradicts our ranks; the tasks need no tool of SLURM, nor a PATH with one."""
    path = recipe(TELLS, nodes=2, nproc=2, setup=[f"export PATH={tmp_path}/no-tools"])
    run = on_slurm(path, "slurm.cpus_per_node=2", "scratch=/tmp/$MINE", env={"MINE": scratch.name})
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    ranks = told(run)
    hosts = run.happened("allocation_started")[0]["nodes"]
    assert [rank["host"] for rank in ranks] == [hosts[0], hosts[0], hosts[1], hosts[1]]
    assert [rank["env"]["RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    for rank in ranks:
        env = rank["env"]
        assert [name for name in env if name.startswith((*TASK_SCOPED, "LAUNCH_HEAD", "LAUNCH_SECONDS"))] == []
        assert env["LAUNCH_ALLOCATION"] == "1"
        assert (env["SLURM_JOB_ID"], env["SLURM_JOB_NUM_NODES"]) == (run.job, "2")
        assert env["SLURM_JOB_NODELIST"]
        assert env["MASTER_ADDR"] == run.happened("allocation_started")[0]["head"]["address"]
        assert not env["MASTER_ADDR"].startswith("127.")
        assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")
        assert rank["cpus"] == 2
        assert Path(rank["tmp"]).parent == scratch
    plan = Plan.from_json(run.run.plan.read_text())
    for number, rank in enumerate(ranks):
        shown = {row.name: row.value for row in rank_environment(plan, run.events, number)}
        assert {"GLOO_SOCKET_IFNAME", "LAUNCH_ALLOCATION", "TMPDIR", "RANK"} <= shown.keys()
        assert shown == {name: rank["env"].get(name) for name in shown}, "`launch explain --rank`"
    run.cluster.wait_for(run.job, "COMPLETED")
    assert list(scratch.iterdir()) == []
    log = run.run.agents_log.read_text()
    assert f"node 0 is {hosts[0]}: python 3" in log
    assert f"node 1 is {hosts[1]}: python 3" in log


WHO = """
import os, pathlib
name = pathlib.Path(os.environ["LAUNCH_RUN_DIR"]).name
note = pathlib.Path(os.environ["LAUNCH_RUN_DIR"]) / f"rank-{os.environ['RANK']}"
note.write_text(os.uname().nodename)
"""


@pytest.mark.timeout(300)
def test_rank_0_is_on_the_first_node_ten_times_of_ten(
    login: Login, slurm_cluster: SlurmCluster, recipe: Recipe
) -> None:
    """F032: two nodes of two workers; the order of the ranks is the order of the nodes in each of ten jobs."""
    path = recipe(WHO, nodes=2, nproc=2, preload=False, args={"number": 0})
    numbers = ",".join(map(str, range(10)))
    runs = ("--runs-dir", str(path.parent / "runs"))
    done = login(str(path), "--on", "slurm", *runs, "--json", "--sweep", f"args.number={numbers}")
    try:
        assert done.returncode == 0, done.stderr
        sweep = Path(json.loads(done.stdout.splitlines()[-1])["run_dir"])
        points = [RunDir(sweep.with_name(f"{sweep.name}.{index}")) for index in range(10)]
        slurm_cluster.wait_until(
            lambda: all(point.result.exists() for point in points),
            lambda: login("ls", str(sweep)).stdout,
            limit_s=240,
        )
        for point in points:
            (started,) = [event for event in read_events(point.path) if event["event"] == "allocation_started"]
            first, second = started["nodes"]
            hosts = [(point.path / f"rank-{rank}").read_text() for rank in range(4)]
            assert hosts == [first, first, second, second]
    finally:
        cancel_jobs_below(slurm_cluster, path.parent)


def left_the_queue(run: SlurmLaunched) -> float:
    """Wait for it; seconds since the allocation began."""
    began_s = float(run.wait_for_event("allocation_started")["time"])
    run.cluster.wait_until(lambda: run.state not in ("PENDING", "RUNNING", "COMPLETING"), lambda: run.state)
    return time.time() - began_s


def test_a_setup_line_that_fails_on_one_node_ends_the_job(on_slurm: OnSlurm, recipe: Recipe) -> None:
    """F012 F055: in under 60 s, with the node, the line and its exit code, for SLURM too."""
    path = recipe(TELLS, nodes=2, nproc=1, setup=['[ "$SLURM_PROCID" = 0 ] || (echo no module torch >&2; exit 9)'])
    run = on_slurm(path)
    assert left_the_queue(run) < OUT_OF_THE_QUEUE_S
    result = run.wait_for_result()
    node = run.happened("allocation_started")[0]["nodes"][1]
    assert (result["state"], result["cause"], result["exit_code"]) == ("FAILED", "setup", 9), run.console
    assert result["reason"].startswith(f"node 1 ({node}): line 1 of `setup`")
    assert result["reason"].endswith("ended with exit code 9: no module torch")
    assert "ExitCode=9:0" in run.cluster.run("scontrol", "show", "job", run.job)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("network.interface=nope0", "has no interface nope0 with an address; it has lo (127.0.0.1), eth0 (198.18.77."),
        ("network.interface=lo", "network.interface: by lo (127.0.0.1) no other node reaches n"),
    ],
)
def test_an_interface_that_does_not_serve_is_an_error(on_slurm: OnSlurm, recipe: Recipe, value: str, said: str) -> None:
    """F033 F035 F037: before anything starts, and no world of one."""
    run = on_slurm(recipe(TELLS, nodes=2, nproc=1), value)
    result = run.wait_for_result()
    assert (result["state"], result["cause"]) == ("FAILED", "rendezvous"), run.console
    assert said in result["reason"]
    assert run.happened("attempt_started") == []


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "no route"])
def test_a_node_that_does_not_reach_the_head_node(
    on_slurm: OnSlurm, recipe: Recipe, slurm_cluster: SlurmCluster, tmp_path: Path, *, silent: bool
) -> None:
    """F012 F033: each node proves it in 10 s, or the error names node, address and interface."""
    nodes = sorted(
        set(slurm_cluster.run("sinfo", "-h", "-N", "-o", "%N").split()), key=lambda name: int(name.lstrip("n"))
    )[-2:]
    # A second address of the first node, on an interface of its own, to which the other node has no way that answers.
    inside = [f"nsenter --net={slurm_cluster.scratch}/net/{node} " for node in nodes]
    route = "198.19.7.1/32 dev eth0" if silent else "unreachable 198.19.7.1/32"
    neighbour = "ip neigh replace 198.19.7.1 lladdr 02:00:00:00:00:99 nud permanent dev eth0"
    begin = [
        f"{inside[0]} ip link add launch-x type veth peer name launch-y",
        f"{inside[0]} ip addr add 198.19.7.1/32 dev launch-x",
        f"{inside[0]} ip link set launch-x up",
        f"{inside[0]} ip link set launch-y up",
        f"{inside[1]} ip route add {route}",
        *([f"{inside[1]} {neighbour}"] if silent else []),
    ]
    end = [
        f"{inside[0]} ip link del launch-x",
        f"{inside[1]} ip route del {route}",
        *([f"{inside[1]} ip neigh del 198.19.7.1 dev eth0"] if silent else []),
    ]
    try:
        for line in begin:
            assert os.system(line) == 0, line
        nodelist = ",".join(nodes)
        run = on_slurm(
            recipe(TELLS, nodes=2, nproc=1),
            "network.interface=launch-x",
            f'slurm.sbatch={{nodelist: "{nodelist}"}}',
            *(f"env.{name}_SOCKET_IFNAME=eth0" for name in ("GLOO", "NCCL", "TP")),
        )
        assert left_the_queue(run) < OUT_OF_THE_QUEUE_S
        result = run.wait_for_result()
    finally:
        for line in end:
            os.system(line)
    assert (result["state"], result["cause"]) == ("FAILED", "rendezvous"), run.console
    assert f"node 1 ({nodes[1]}):" in result["reason"]
    assert "198.19.7.1" in result["reason"]
    assert "eth0 (198.18.77." in result["reason"]
    if silent:
        (failed,) = run.happened("node_failed")
        started = next(event for event in run.happened("agent_started") if event["node"] == 1)
        assert failed["time"] - started["time"] < 15


def test_a_heterogeneous_job_is_refused(on_slurm: OnSlurm, recipe: Recipe, slurm_cluster: SlurmCluster) -> None:
    """F054: whoever starts the script of a run as a part of one."""
    run = on_slurm(recipe(TELLS, nodes=1, nproc=1), "--begin", "2099-01-01T00:00:00")
    script = run.until(lambda: run.refs and run.run.slurm / "batch.sh")
    slurm_cluster.run("scancel", run.job)
    slurm_cluster.run("sbatch", "--nodes=1", ":", "--nodes=1", "--begin=now", str(script))
    result = run.wait_for_result()
    assert (result["state"], result["cause"], result["exit_code"]) == ("FAILED", "refused", 3), run.console
    assert "a part of a heterogeneous job" in result["reason"]


def test_another_number_of_nodes_than_planned_starts_nothing(
    on_slurm: OnSlurm, recipe: Recipe, slurm_cluster: SlurmCluster
) -> None:
    """F034: never a smaller world than was asked for."""
    run = on_slurm(recipe(TELLS, nodes=2, nproc=1), "--begin", "2099-01-01T00:00:00")
    script = run.until(lambda: run.refs and run.run.slurm / "batch.sh")
    slurm_cluster.run("scancel", run.job)
    slurm_cluster.run("sbatch", "--nodes=1", "--begin=now", str(script))
    result = run.wait_for_result()
    assert (result["state"], result["cause"]) == ("FAILED", "refused"), run.console
    assert "2 nodes were asked for (resources.nodes), and the job has 1" in result["reason"]
    assert run.happened("agent_started") == []


def test_a_node_whose_torch_cannot_be_imported_is_named(on_slurm: OnSlurm, recipe: Recipe, tmp_path: Path) -> None:
    """F012 F055: another image, a half-installed environment; the others do not wait for it."""
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    setup = [f'[ "$SLURM_PROCID" = 0 ] || export PYTHONPATH={tmp_path}/broken']
    run = on_slurm(recipe(TELLS, nodes=2, nproc=1, setup=setup))
    assert left_the_queue(run) < OUT_OF_THE_QUEUE_S
    result = run.wait_for_result()
    node = run.happened("allocation_started")[0]["nodes"][1]
    assert (result["state"], result["cause"], result["exit_code"]) == ("FAILED", "usage", 1), run.console
    assert result["reason"].startswith(
        f"node 1 ({node}): torch.distributed.elastic.agent.server.api cannot be imported"
    )
    assert "libcudart.so.13: cannot open" in result["reason"]
