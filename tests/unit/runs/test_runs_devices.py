"""What is made of the measurements of nodes: averages, peaks, warnings, lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.runs.devices import fold_measured, measured_nodes, newest_of, read_use, use_fields, warnings_of
from launcher.runs.devices_text import now_text, uses_text
from launcher.runs.rundir import RunDir

GIB = 2**30
NODE = {
    "time": 100.0,
    "cpu/util": 43.0,
    "cpu/load": 1.2,
    "memory/used_bytes": 3 * GIB,
    "memory/total_bytes": 16 * GIB,
    "workers/cpu_util": 187.0,
    "workers/rss_bytes": 1.5 * GIB,
}


def gpu(index: int = 0, **fields: float) -> dict[str, float]:
    known = {
        "util": 97,
        "memory_used_bytes": 71 * GIB,
        "memory_total_bytes": 80 * GIB,
        "power_w": 690.0,
        "power_limit_w": 700.0,
        "temperature_c": 64,
        "sm_clock_mhz": 1755,
        "throttle_reasons": 0,
        "ecc_uncorrected": 0,
        "nvlinks_down": 0,
    }
    return {f"gpu{index}/{name}": value for name, value in {**known, **fields}.items()}


def write(run: RunDir, node: int, *lines: dict[str, Any]) -> None:
    path = run.devices(node)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_nodes_are_in_order_and_the_newest_line_counts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert measured_nodes(run) == {}
    for node in (10, 2):
        write(run, node, NODE, {**NODE, "cpu/util": node})
    with run.devices(2).open("a") as file:
        file.write('{"cpu/util": 9')  # a line that is being written
    assert list(measured_nodes(run)) == [2, 10]
    assert [newest_of(path)["cpu/util"] for path in measured_nodes(run).values()] == [2, 10]  # type: ignore[index]


def test_averages_and_peaks(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write(run, 0, {**NODE, **gpu(util=90)}, {**NODE, "cpu/util": 45.0, **gpu(util=100)})
    (use,) = read_use(run)
    fields = use_fields(use)
    assert fields["values"]["cpu/util"] == {"mean": 44.0, "peak": 45.0}
    assert fields["values"]["gpu0/util"] == {"mean": 95.0, "peak": 100}
    assert fields["warnings"] == []
    assert uses_text([use]).splitlines() == [
        "devices  util   peak    memory      peak        of  workers  power   peak  limit  heat     clock",
        "node 0   44 %   45 %   3.0 GiB   3.0 GiB  16.0 GiB  1.5 GiB",
        "  gpu 0  95 %  100 %  71.0 GiB  71.0 GiB  80.0 GiB           690 W  690 W  700 W  64 C  1755 MHz",
    ]


@pytest.mark.parametrize(
    ("lines", "warning"),
    [
        ([gpu(throttle_reasons=0x40), gpu()], "gpu 0: throttled, too hot (hardware), in 50 % of the measurements"),
        ([gpu(throttle_reasons=0x4)] * 2, "clocks held down by its power limit of 700 W in 100 % of the measurements"),
        ([gpu(ecc_uncorrected=2)], "gpu 0: 2 ECC errors that could not be corrected"),
        ([gpu(nvlinks_down=0), gpu(nvlinks_down=2)], "gpu 0: 2 of its NVLinks went down"),
        ([gpu(util=3)], "gpu 0: idle: on average 3 % in use"),
        ([{"gpu1/lost": 1}], "gpu 1: it has fallen off the bus"),
        ([{**NODE, "memory/used_bytes": 15.9 * GIB}], "node 7: its memory was 99 % full"),
        ([{"note": "GPUs are not measured: no"}] * 2, "node 7: GPUs are not measured: no"),
    ],
)
def test_what_is_wrong_is_a_warning(lines: list[dict[str, Any]], warning: str) -> None:
    found = warnings_of(fold_measured(7, lines))
    assert len(found) == 1
    assert warning in found[0]


def test_links_that_never_worked_and_a_short_power_peak_are_none() -> None:
    lines = [gpu(nvlinks_down=12), *[gpu(nvlinks_down=12)] * 18, gpu(nvlinks_down=12, throttle_reasons=0x4)]
    assert warnings_of(fold_measured(0, lines)) == []


def test_a_node_in_one_line() -> None:
    assert now_text(NODE, now_s=101.0) == "cpu 43 %   memory 3.0 of 16.0 GiB   workers 1.5 GiB"
    two = {"time": 100.0, **gpu(0, util=95), **gpu(1, util=99, throttle_reasons=0x8)}
    assert now_text(two, now_s=400.0) == (
        "2 GPUs   util 95 to 99 %   71.0 of 80.0 GiB   690 of 700 W   64 C   "
        "gpu 1: throttled, hardware slowdown   measured 5 min ago"
    )


def test_of_a_long_run_every_so_many_measurements_are_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write(run, 0, *[{**NODE, "cpu/util": k % 100, "padding": "x" * 1000} for k in range(10_000)])
    (use,) = read_use(run)
    series = use.own.series["cpu/util"]
    assert 2_000 < series.count < 5_000
    assert abs(series.mean - 49.5) < 2
