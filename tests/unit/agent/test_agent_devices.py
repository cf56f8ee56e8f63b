"""What a node measures of its devices: from /proc, and from NVML."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import devices
from launcher.agent.cpumeter import CpuMeter
from launcher.agent.gpumeter import GpuMeter, NoMeterError

MIB = 2**20
AGENT, ZYGOTE, WATCHER, WORKER, LOADER = 10, 11, 12, 20, 21


class Proc:
    """A /proc with an agent, its zygote, a worker with a loader process, and the process that measures."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for pid, children in {AGENT: "11 12", ZYGOTE: "20", WATCHER: "", WORKER: "21", LOADER: ""}.items():
            task = path / str(pid) / "task" / str(pid)
            task.mkdir(parents=True)
            (task / "children").write_text(children)
            self.process(pid, ticks=0)
        (path / "loadavg").write_text("1.25 0.5 0.1 1/100 77\n")
        (path / "meminfo").write_text("MemTotal: 4096 kB\nMemFree: 100 kB\nMemAvailable: 3072 kB\n")
        self.cpus(busy=0, idle=0)

    def process(self, pid: int, *, ticks: int, pages: int = 256, state: str = "S") -> None:
        fields = [state, *["0"] * 10, str(ticks), "0", *["0"] * 6, "5", "0", str(pages)]
        (self.path / str(pid) / "stat").write_text(f"{pid} (a (b) c) {' '.join(fields)}\n")

    def cpus(self, *, busy: int, idle: int) -> None:
        ours = f"cpu1 {busy} 0 0 {idle} 0 0 0 0 99 0"
        (self.path / "stat").write_text(f"cpu 0 0 0 0\ncpu0 500 0 0 0 0 0 0 0 0 0\n{ours}\nintr 7\n")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def test_the_cpus_of_the_node_and_its_workers_are_measured(proc: Proc) -> None:
    meter = CpuMeter(AGENT, [1], skip=WATCHER, proc=proc.path)
    proc.cpus(busy=30, idle=70)
    proc.process(WORKER, ticks=40)
    found = meter.measure()
    assert found["cpu/util"] == 30.0
    assert found["cpu/load"] == 1.25
    assert (found["memory/used_bytes"], found["memory/total_bytes"]) == (MIB, 4 * MIB)
    assert found["workers/cpu_util"] > 0
    assert found["workers/rss_bytes"] == 2 * 256 * 4096  # the worker and its loader process, not the zygote


def test_what_was_used_before_does_not_count_again(proc: Proc) -> None:
    proc.process(WORKER, ticks=1_000_000)
    meter = CpuMeter(AGENT, [1], skip=WATCHER, proc=proc.path)
    assert meter.measure()["workers/cpu_util"] == 0
    assert "cpu/util" not in meter.measure()  # no time has passed there


def test_a_process_that_has_ended_or_a_kernel_that_tells_less_is_left_out(proc: Proc) -> None:
    meter = CpuMeter(AGENT, [1], skip=WATCHER, proc=proc.path)
    proc.process(LOADER, ticks=5, state="Z")
    (proc.path / str(WORKER) / "stat").unlink()
    (proc.path / "loadavg").unlink()
    (proc.path / "meminfo").write_text("MemTotal: 4096 kB\n")
    assert meter.measure() == {}


def test_the_real_processes_of_this_machine_are_found() -> None:
    """A child of this process stands for the zygote, its child for a worker."""
    inner = "import time; x = bytearray(50_000_000); print(flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, start_new_session=True) as zygote:
        assert zygote.stdout is not None
        zygote.stdout.readline()
        meter = CpuMeter(os.getpid(), [0])
        found = meter.measure()
        os.killpg(zygote.pid, signal.SIGKILL)
    assert 50_000_000 < found["workers/rss_bytes"] < 500_000_000
    assert found["memory/total_bytes"] > found["memory/used_bytes"] > 0


class FakeNvml(types.ModuleType):
    """Two GPUs as NVML would show them: the second tells little."""

    class NVMLError(Exception): ...

    class NVMLError_GpuIsLost(NVMLError): ...  # noqa: N801, N818 - its name

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 3

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.lost = False
        self.ids = {0: "GPU-aa", 1: "GPU-bb"}

    def nvmlInit(self) -> None: ...  # noqa: N802

    def __getattr__(self, name: str) -> Any:
        known: dict[str, Any] = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": lambda name: {v: k for k, v in self.ids.items()}[name],
            "nvmlDeviceIsMigDeviceHandle": lambda gpu: False,
            "nvmlDeviceGetIndex": lambda gpu: gpu,
            "nvmlDeviceGetUtilizationRates": lambda gpu: types.SimpleNamespace(gpu=97 + gpu),
            "nvmlDeviceGetMemoryInfo": lambda gpu: types.SimpleNamespace(used=3, total=4),
            "nvmlDeviceGetPowerUsage": self.only_first(690_120),
            "nvmlDeviceGetEnforcedPowerLimit": self.only_first(700_000),
            "nvmlDeviceGetTemperature": lambda gpu, kind: 64,
            "nvmlDeviceGetClockInfo": self.only_first(1755),
            "nvmlDeviceGetMaxClockInfo": self.only_first(1980),
            "nvmlDeviceGetCurrentClocksThrottleReasons": self.only_first(0x44),
            "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, since: kind,
            "nvmlDeviceGetNvLinkState": lambda gpu, link: int(link != 1),
        }
        if name.startswith("__") or name not in known:
            raise AttributeError(name)
        return known[name]

    def only_first(self, value: int) -> Any:
        def ask(gpu: int, *kind: int) -> int:
            if self.lost:
                raise self.NVMLError_GpuIsLost
            if gpu:
                raise self.NVMLError("Not Supported")
            return value

        return ask


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_all_that_nvml_tells_of_a_gpu_is_noted_with_its_unit(nvml: FakeNvml) -> None:
    assert GpuMeter("0").measure() == {
        "gpu0/util": 97,
        "gpu0/memory_used_bytes": 3,
        "gpu0/memory_total_bytes": 4,
        "gpu0/power_w": 690.1,
        "gpu0/power_limit_w": 700.0,
        "gpu0/temperature_c": 64,
        "gpu0/sm_clock_mhz": 1755,
        "gpu0/sm_clock_max_mhz": 1980,
        "gpu0/throttle_reasons": 0x44,
        "gpu0/ecc_corrected": 0,
        "gpu0/ecc_uncorrected": 1,
        "gpu0/nvlinks_up": 2,
        "gpu0/nvlinks_down": 1,
    }


def test_what_a_gpu_does_not_tell_is_left_out(nvml: FakeNvml) -> None:
    found = GpuMeter(None).measure()
    assert found["gpu1/util"] == 98
    assert "gpu1/power_w" not in found
    assert "gpu0/power_w" in found


def test_gpus_are_found_by_the_names_of_cuda_visible_devices(nvml: FakeNvml) -> None:
    assert {name.partition("/")[0] for name in GpuMeter("GPU-bb").measure()} == {"gpu1"}
    with pytest.raises(NoMeterError, match="no GPU of CUDA_VISIBLE_DEVICES="):
        GpuMeter("")


def test_a_gpu_that_is_lost_says_only_that(nvml: FakeNvml) -> None:
    nvml.lost = True
    found = GpuMeter("0").measure()
    assert found["gpu0/lost"] == 1
    assert "gpu0/sm_clock_mhz" not in found


def test_without_nvml_a_line_says_why_gpus_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter, note = devices._gpus({"gpus": True, "visible": "0"})
    assert meter is None
    assert note == {"note": "GPUs are not measured: the package nvidia-ml-py is not installed for the agent's Python"}
    assert devices._gpus({"gpus": False}) == (None, {})


def test_a_line_that_cannot_be_written_is_lost_alone(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text("a file")
    devices._append(tmp_path / "devices" / "node-0.jsonl", "x\n")
    devices._append(tmp_path / "other" / "node-0.jsonl", json.dumps({}) + "\n")
    assert (tmp_path / "other" / "node-0.jsonl").read_text() == "{}\n"


@pytest.mark.gpu
def test_a_real_gpu_is_measured() -> None:
    found = GpuMeter("0").measure()
    assert 0 <= found["gpu0/util"] <= 100
    assert 0 < found["gpu0/memory_used_bytes"] < found["gpu0/memory_total_bytes"]
