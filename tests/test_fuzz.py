"""A small share of the bad input that `make fuzz` draws, and its four kinds of failure, which are noticed."""

import ast
import os
import time

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("keras")
pytest.importorskip("ai_edge_litert")

from benchmarks.fuzz import sense
from benchmarks.fuzz.__main__ import KINDS, plan, run, share
from benchmarks.fuzz.run import FOREIGN, FORESEEN, SOURCE, Case, all_of

from chipfit.errors import PlanError
from chipfit.plan.record import Plan, TensorPlan


def untyped(case: Case) -> None:
    {}["planted"]


def wrapped(case: Case) -> None:
    try:
        untyped(case)
    except KeyError as e:
        raise PlanError("It is malformed") from e


def hang(case: Case) -> None:
    while True:
        time.sleep(0.01)


def dies(case: Case) -> None:
    os._exit(3)


def nonsense(case: Case) -> None:
    sense.check_plan(Plan(tensors={"x": TensorPlan(name="x", role="activation", low=2.0, high=1.0)}))


def refused(case: Case) -> None:
    raise PlanError("No such thing")


def sound(case: Case) -> None:
    sense.check_plan(Plan(tensors={"x": TensorPlan(name="x", role="activation", low=1.0, high=2.0)}))


@pytest.mark.parametrize(
    "planted, what",
    [
        (untyped, "untyped"),
        (wrapped, "untyped"),
        (hang, "hang"),
        (nonsense, "nonsense"),
        (refused, "refused"),
        (sound, "accepted"),
    ],
)
def test_what_a_case_does_is_told_apart(planted, what):
    (outcome,) = all_of({"planted": planted}, [("planted", 0)], seed=1, limit=1)
    assert outcome.what == what, outcome
    assert outcome.what != "hang" or "test_fuzz.py" in outcome.detail


def test_a_case_that_ends_the_process_is_told_and_the_next_ones_still_run():
    kinds = {"dies": dies, "sound": sound}
    outcomes = list(all_of(kinds, [("sound", 0), ("dies", 0), ("sound", 1)], seed=1, limit=1))
    assert [o.what for o in outcomes] == ["accepted", "died", "accepted"]


def test_the_same_seed_draws_the_same_case_and_another_seed_another(tmp_path):
    def numbers(seed: int) -> list[float]:
        return [Case("saved", k, seed, tmp_path).random.random() for k in range(4)]

    assert numbers(7) == numbers(7) != numbers(8)


def test_drawn_input_of_every_kind_ends_in_a_result_or_in_a_refusal():
    outcomes = run(seed=1001, cases=200, minutes=30, limit=60)
    assert [o for o in outcomes if o.failed] == [] and len(outcomes) == 200
    for kind in KINDS:
        assert {o.what for o in outcomes if o.kind == kind} == {"accepted", "refused"}


def test_several_processes_share_the_cases_and_go_on_where_they_stopped():
    whole = plan(1000)
    parts = [share(whole, f"{k}/3", 0) for k in (1, 2, 3)]
    assert sorted(x for p in parts for x in p) == sorted(whole) and max(map(len, parts)) - min(map(len, parts)) <= 1
    assert share(whole, "2/3", 10) == parts[1][10:] and {k for k, _ in parts[2]} == set(KINDS)


def test_what_may_stand_behind_a_refusal_is_said_of_functions_that_catch_something():
    """An entry for a function that has moved would let nothing pass, and hide nothing: it is only out of date."""
    for key in (*FORESEEN, *FOREIGN):
        file, _, name = key.partition(":")
        functions = [
            n
            for n in ast.walk(ast.parse((SOURCE / file).read_text()))
            if isinstance(n, ast.FunctionDef) and n.name == name
        ]
        assert any(isinstance(n, ast.ExceptHandler) for f in functions for n in ast.walk(f)), key
