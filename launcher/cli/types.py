"""Kinds of values that several commands take."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    _ParamType = click.ParamType[int | str]
else:
    _ParamType = click.ParamType  # generic since click 8.4

_RANGE = re.compile(r"[0-9]{1,9}:[0-9]{1,9}")


class NodesType(_ParamType):
    """`2`, or `1:4`, whose ends the recipe checks."""

    name = "nodes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """A number from 1 on, or the text of a range."""
        if isinstance(value, str) and _RANGE.fullmatch(value):
            return value
        try:
            number: int = click.IntRange(min=1).convert(value, param, ctx)
        except click.BadParameter as error:
            if isinstance(value, str) and ":" in value:
                self.fail(f"{value!r} is not a range of nodes; write MIN:MAX, as in 1:4", param, ctx)
            raise error from None
        return number


NODES = NodesType()
