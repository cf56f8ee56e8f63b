"""What the GPUs of a node do, from NVML, by the package nvidia-ml-py (`pynvml`) where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Values = dict[str, float]


class NoMeterError(Exception):
    """The GPUs cannot be measured, and why."""


class GpuMeter:
    """Measures the GPUs of `visible`, named as CUDA_VISIBLE_DEVICES does; None = all. Raises NoMeterError.

    Names begin with `gpu<index>/`, by the index of nvidia-smi. What a GPU does not tell is left out; of one that does
    not answer any more there is `lost` alone.
    """

    def __init__(self, visible: str | None) -> None:
        try:
            import pynvml
        except ImportError:
            raise NoMeterError("the package nvidia-ml-py is not installed for the agent's Python") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._gpus = dict(self._find(visible))
        except pynvml.NVMLError as error:
            raise NoMeterError(f"NVML: {error}") from None
        if not self._gpus:
            raise NoMeterError(f"NVML shows no GPU of CUDA_VISIBLE_DEVICES={visible}")

    def _find(self, visible: str | None) -> Iterator[tuple[int, Any]]:
        nvml = self._nvml
        names = list(map(str, range(nvml.nvmlDeviceGetCount()))) if visible is None else visible.split(",")
        for name in filter(None, map(str.strip, names)):
            by_index = name.isdecimal()
            gpu = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else nvml.nvmlDeviceGetHandleByUUID(name)
            yield int(name) if by_index else self._index_of(gpu), gpu

    def _index_of(self, gpu: Any) -> int:
        """Of a part of a GPU (MIG): that of the whole one."""
        nvml = self._nvml
        if nvml.nvmlDeviceIsMigDeviceHandle(gpu):
            gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu)
        return int(nvml.nvmlDeviceGetIndex(gpu))

    def measure(self) -> Values:
        """What there is now."""
        return {f"gpu{index}/{name}": value for index, gpu in self._gpus.items() for name, value in self._of(gpu)}

    def _of(self, gpu: Any) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        for part in (self._load, self._power, self._clocks, self._errors, self._links):
            try:
                yield from part(gpu)
            except nvml.NVMLError_GpuIsLost:
                yield "lost", 1
                return

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The answer; none where this GPU, or its driver, does not give one. Raises where the GPU is lost."""
        nvml = self._nvml
        try:
            return [question(*arguments)]
        except nvml.NVMLError_GpuIsLost:
            raise
        except nvml.NVMLError:
            return []

    def _load(self, gpu: Any) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        for load in self._ask(nvml.nvmlDeviceGetUtilizationRates, gpu):
            yield "util", load.gpu
        for memory in self._ask(nvml.nvmlDeviceGetMemoryInfo, gpu):
            yield "memory_used_bytes", memory.used
            yield "memory_total_bytes", memory.total

    def _power(self, gpu: Any) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        for power_mw in self._ask(nvml.nvmlDeviceGetPowerUsage, gpu):
            yield "power_w", round(power_mw / 1000, 1)
        for limit_mw in self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, gpu):
            yield "power_limit_w", round(limit_mw / 1000, 1)
        for temperature_c in self._ask(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU):
            yield "temperature_c", temperature_c

    def _clocks(self, gpu: Any) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        for clock_mhz in self._ask(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM):
            yield "sm_clock_mhz", clock_mhz
        for clock_mhz in self._ask(nvml.nvmlDeviceGetMaxClockInfo, gpu, nvml.NVML_CLOCK_SM):
            yield "sm_clock_max_mhz", clock_mhz
        for reasons in self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu):
            yield "throttle_reasons", reasons

    def _errors(self, gpu: Any) -> Iterator[tuple[str, float]]:
        """ECC errors since the driver was loaded."""
        nvml = self._nvml
        kinds = {
            "ecc_corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            "ecc_uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        }
        for name, kind in kinds.items():
            for number in self._ask(nvml.nvmlDeviceGetTotalEccErrors, gpu, kind, nvml.NVML_VOLATILE_ECC):
                yield name, number

    def _links(self, gpu: Any) -> Iterator[tuple[str, float]]:
        """NVLinks that work, and that do not, of a GPU that has some."""
        nvml = self._nvml
        links = range(nvml.NVML_NVLINK_MAX_LINKS)
        states = [state for link in links for state in self._ask(nvml.nvmlDeviceGetNvLinkState, gpu, link)]
        if states:
            up = sum(state == nvml.NVML_FEATURE_ENABLED for state in states)
            yield "nvlinks_up", up
            yield "nvlinks_down", len(states) - up
