"""What a bare word of YAML is: the core schema of YAML 1.2, and numbers as people write them (`1e-3`, `.5`, `1_000`).

`yes`, `no`, `on`, `off` are text. So are `.inf` and `.nan`: no setting of a training means something with them, and
JSON, which the plan is kept in, has no words for them.
"""

from __future__ import annotations

import math
import re

_INT = re.compile(r"[-+]?[0-9]{1,30}(?:_[0-9]{1,30}){0,10}")
_BASED = {re.compile(r"0x[0-9a-fA-F]{1,30}"): 16, re.compile(r"0o[0-7]{1,30}"): 8}
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?")
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


def is_null(text: str) -> bool:
    """Whether a bare word is null."""
    return text in _NULLS


def as_bool(text: str) -> bool | None:
    """The boolean a bare word is, if it is one."""
    return _BOOLS.get(text)


def as_int(text: str) -> int | None:
    """The whole number a bare word is, if it is one. `5e6` and `10.0` are."""
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    for pattern, base in _BASED.items():
        if pattern.fullmatch(text):
            return int(text[2:], base)
    number = as_float(text)
    return int(number) if number is not None and number.is_integer() else None


def as_float(text: str) -> float | None:
    """The number a bare word is, if it is a finite one."""
    if not _FLOAT.fullmatch(text):
        return None
    number = float(text.replace("_", ""))
    return number if math.isfinite(number) else None


def plain_value(text: str) -> str | int | float | bool:
    """What a bare word is where the schema wants nothing in particular. Null is decided elsewhere."""
    flag = as_bool(text)
    if flag is not None:
        return flag
    number = as_float(text)
    if number is not None and not _INT.fullmatch(text):
        return number
    whole = as_int(text)
    return text if whole is None else whole
