"""Layers, divided into parts that follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced(sizes: Sequence[int], parts: int) -> list[range]:
    """As many ranges of neighbours as parts, the largest as small as it can be; each has a layer of some size.

    Raises ValueError where there are more parts than such layers.
    """
    count = len(sizes)
    of_some_size = sum(1 for size in sizes if size)
    if not 0 < parts <= of_some_size:
        raise ValueError(f"{parts} parts, and {of_some_size} layers with parameters")
    before = [0, *accumulate(sizes)]

    def size(start: int, stop: int) -> int:
        return before[stop] - before[start] or before[-1] + 1  # one without any is worse than all others

    # best[stop]: (largest part, where the last one begins), for the parts so far over the layers before `stop`
    best = [(size(0, stop), 0) for stop in range(count + 1)]
    cuts = []
    for part in range(1, parts):
        best = [
            min(
                ((max(best[cut][0], size(cut, stop)), cut) for cut in range(part, stop)),
                default=(before[-1] + 1, 0),
            )
            for stop in range(count + 1)
        ]
        cuts.append([cut for _, cut in best])
    ends, stop = [count], count
    for row in reversed(cuts):
        stop = row[stop]
        ends.append(stop)
    ends.reverse()
    return [range(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
