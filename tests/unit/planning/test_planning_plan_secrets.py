"""F060: a plan that holds a secret is refused, by the place where the user wrote it, and the value is not repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import runs_values as values

from launcher.planning.plan import Plan, Value
from launcher.planning.plan_secrets import secret_problems
from launcher.redact import Redactor

KEY = "canary-0815-cafe"
REDACTOR = Redactor([("HF_TOKEN", KEY)])


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return values.plan(tmp_path)


def test_a_plan_without_secrets_is_fine(plan: Plan) -> None:
    assert secret_problems(plan, REDACTOR) == []
    assert secret_problems(replace(plan, name=KEY), Redactor([])) == []


def test_a_key_of_the_recipe_is_named_at_its_line(plan: Plan) -> None:
    value = Value(key="args.hub_token", value=KEY, origin="ft.yaml:7:3")
    argument = replace(plan.worker, argv=("--hub_token", KEY))
    (problem,) = secret_problems(replace(plan, values=(value,), worker=argument), REDACTOR)
    assert problem.where == "ft.yaml:7:3: args.hub_token"
    assert problem.message == "this holds the value of HF_TOKEN"
    assert "secrets:" in problem.hint
    assert KEY not in str(problem)


def test_an_argument_is_named_by_its_number(plan: Plan) -> None:
    argument = replace(plan.worker, argv=("--url", f"https://me:{KEY}@host"))
    (problem,) = secret_problems(replace(plan, worker=argument), REDACTOR)
    assert problem.where == "plan.worker.argv.1"
    assert KEY not in str(problem)


def test_a_key_that_is_itself_the_secret_is_not_repeated_in_the_place(plan: Plan) -> None:
    value = Value(key=f"args.{KEY}", value="x", origin="ft.yaml:7:3")
    (problem,) = secret_problems(replace(plan, values=(value,)), REDACTOR)
    assert KEY not in str(problem)
