"""Durations, lengths and ranges of nodes as people write them, with units in code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

_DURATION_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# At most 15 digits, so that a number of seconds or steps is always exact.
_DURATION = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(ms|s|m|h|d)")
# As SLURM writes them: `1-12`, `1-12:30`, `1-12:30:00`; `30:00` (minutes and seconds), `2:30:00`.
_DAYS_AND_CLOCK = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")
_CLOCK = re.compile(r"(?:([0-9]{1,9}):)?([0-9]{1,9}):([0-9]{1,9})")
_LENGTH = re.compile(r"([0-9](?:_?[0-9]){0,14}(?:\.[0-9]{1,15})?)\s*([kM]?)\s*(steps?|epochs?)")
_SCALE = {"": 1, "k": 1_000, "M": 1_000_000}
_RANGE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")


class UnfitError(ValueError):
    """Text that was clearly meant as this unit, but does not fit: among the members of a union its words count."""


@dataclass(frozen=True)
class Duration:
    """A span of time: `90s`, `10m`, `1h 30m`."""

    time_s: float
    text: str

    @classmethod
    def parse(cls, value: object) -> Duration:
        """Read `10m` or `1h30m`. Raises ValueError for a bare number, since its unit would be a guess."""
        if isinstance(value, Duration):
            return value
        parts = list(_DURATION.finditer(value)) if isinstance(value, str) else []
        if not parts or re.sub(r"\s", "", "".join(p.group() for p in parts)) != re.sub(r"\s", "", str(value)):
            raise ValueError(f"{value!r} is not a duration; {_as_here(str(value))}")
        return cls(sum(float(p.group(1)) * _DURATION_S[p.group(2)] for p in parts), str(value))

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _text_schema(cls.parse)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "examples": ["30s", "10m", "1h30m"]}


def _as_here(text: str) -> str:
    """How to write a duration; of one as SLURM writes it (`1-12:00:00`, `02:30:00`), the same one."""
    found = _DAYS_AND_CLOCK.fullmatch(text) or _CLOCK.fullmatch(text)
    if found is None:
        return "write a number and a unit, as in `30s`, `10m`, `2h`"
    numbers = [int(part or 0) for part in found.groups()]
    units = "dhms" if len(numbers) == 4 else "hms"
    parts = [f"{number}{unit}" for number, unit in zip(numbers, units, strict=True) if number]
    return f"write it with units; as SLURM reads it, `{''.join(parts) or '0s'}`"


@dataclass(frozen=True)
class Length:
    """A length of training: `8 epochs`, `500 steps`, `10k steps`. A step is one optimizer update."""

    count: float
    unit: Literal["steps", "epochs"]
    text: str

    @classmethod
    def parse(cls, value: object) -> Length:
        """Read `8 epochs` or `10k steps`. Raises ValueError for a bare number, since its unit would be a guess."""
        if isinstance(value, Length):
            return value
        match = _LENGTH.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None or not isinstance(value, str):
            raise ValueError(f"{value!r} is not a length; write a number and a unit, as in `500 steps`, `8 epochs`")
        number, scale, unit = match.groups()
        count = float(number.replace("_", "")) * _SCALE[scale]
        if unit.startswith("step"):
            if count != int(count):
                raise ValueError(f"{value!r} is not a whole number of steps")
            return cls(int(count), "steps", value.strip())
        return cls(count, "epochs", value.strip())

    def steps(self, steps_per_epoch: int) -> int:
        """The same length in optimizer steps, rounded up for part of an epoch."""
        if self.unit == "steps":
            return int(self.count)
        return -int(-(self.count * steps_per_epoch) // 1)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _text_schema(cls.parse)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "examples": ["8 epochs", "500 steps", "10k steps"]}


@dataclass(frozen=True)
class NodeRange:
    """Numbers of nodes that a run goes on with: `1:4` takes four, and one is enough."""

    min: int
    max: int

    @classmethod
    def parse(cls, value: object) -> NodeRange:
        """Read `1:4`. Raises ValueError for anything else, UnfitError for one that is empty or begins at zero."""
        if isinstance(value, NodeRange):
            return value
        match = _RANGE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"{value!r} is not a range of nodes; write MIN:MAX, as in `1:4`")
        low, high = (int(part) for part in match.groups())
        if low < 1:
            raise UnfitError(f"{value} begins at {low}; a run needs at least one node: `1:{max(high, 1)}`")
        if low > high:
            raise UnfitError(f"{value} begins above its end; write MIN:MAX, as in `{high}:{low}`")
        return cls(low, high)

    def __str__(self) -> str:
        return f"{self.min}:{self.max}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _text_schema(cls.parse)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "pattern": "^[1-9][0-9]*:[1-9][0-9]*$", "examples": ["1:4"]}


def _text_schema(parse: Any) -> CoreSchema:
    return core_schema.no_info_plain_validator_function(parse, serialization=core_schema.to_string_ser_schema())
