"""Run by SkyPilot's own interpreter, with task files as standard input: `load`, or `price`. Imports SkyPilot alone.

load: has SkyPilot's own loader read it. price: prints what SkyPilot would rent, and what that costs per hour.
"""

from __future__ import annotations

import io
import os
import re
import sys
from types import TracebackType

os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST = 500


def _in_one_line(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    lines = (" ".join(line.split()) for line in _COLOURS.sub("", str(error)).splitlines())
    text = " | ".join(line for line in lines if line)
    print(f"{kind.__name__}: {text[:_LONGEST]}", file=sys.stderr)


def main(mode: str) -> None:
    """Exit 0, or say on standard error what SkyPilot does not like."""
    sys.excepthook = _in_one_line
    import sky  # type: ignore[import-not-found,unused-ignore]
    import yaml

    for document in yaml.safe_load_all(sys.stdin):
        secrets = [(name, "-") for name in document.get("secrets") or {}]
        task = sky.Task.from_yaml_config(document, secrets_overrides=secrets)
    if mode == "price":
        table = io.StringIO()
        with sky.Dag() as dag:
            dag.add(task)
        sky.stream_and_get(sky.optimize(dag), output_stream=table)
        print(_COLOURS.sub("", table.getvalue()))


if __name__ == "__main__":
    main(sys.argv[1])
