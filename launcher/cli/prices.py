"""What rented machines cost is shown, and confirmed, before anything of a run exists."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from launcher.errors import Problem, Refused

if TYPE_CHECKING:
    from launcher.planning.plan import Plan


def confirm_price(plan: Plan, *, yes: bool) -> None:
    """Show what SkyPilot would rent, and ask. Raises Refused where the answer is no, or nobody can be asked.

    yes: the answer has been given.
    """
    from launcher.executors.sky_client import price_text

    if plan.sky is None:
        return
    can_ask = sys.stdin.isatty()
    if not yes and not can_ask:
        message = "machines are rented, which costs money, and there is no terminal to ask at"
        hint = f"--yes rents them: {plan.sky.price}" if plan.sky.price else "--yes rents them"
        raise Refused([Problem(where=f"--on {plan.executor}", message=message, hint=hint)])
    print(price_text(plan), file=sys.stderr, flush=True)
    if plan.sky.price:
        print(plan.sky.price, file=sys.stderr, flush=True)
    if yes:
        return
    print("Rent them? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused([Problem(where=f"--on {plan.executor}", message="not confirmed: nothing is rented")])
