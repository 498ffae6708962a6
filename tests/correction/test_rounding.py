"""What the steps that fit weights hand on to what fits them, and which of the two plans they keep."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from chipfit.correction import reconstruct, rounding
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored

GRID = Grid(bits=8, qmin=-128, qmax=127)


def tensor(name, role, scale=0.5):
    zero = torch.tensor(0, dtype=torch.int32)
    stored = Stored(format="f", grid=GRID, scale=torch.tensor(scale), zero_point=zero)
    return TensorPlan(name=name, role=role, stored=stored, origin="mse")


def graph(number):
    return Graph([], ["x"], ["x"], {}, {"w": torch.tensor(number), "v": torch.tensor(1.0)})


BEFORE, AFTER = graph(1.0), graph(2.0)
AFTER.weights["v"] = BEFORE.weights["v"]
PLAN = Plan(tensors={n: tensor(n, r) for n, r in (("x", "activation"), ("w", "weight"), ("v", "weight"))})


def batches(*sizes):
    return [[torch.arange(float(n)).view(-1, 1)] for n in sizes]


def rounded(monkeypatch, *, fits=True, notes=(), plan=PLAN, moved=0.5, held=((1,),), **given):
    """`round_weights` where all that it calls is replaced; what it gives, and what the others were told."""
    told = {}

    def walk(g, p, images, how, stats):
        told.update(how=how, images=sum(len(b[0]) for b in images), scores=stats != (), placed=p is not plan)
        return SimpleNamespace(graph=AFTER, tensors={"w": tensor("w", "weight")}, notes=list(notes))

    def choose(g, known):
        told["known"] = sorted(known)
        return {**plan.tensors, "w": tensor("w", "weight", moved)}

    def better(original, images, old, new):
        told["compared"] = images
        return fits, "said"

    monkeypatch.setattr(rounding, "reconstruct", walk)
    monkeypatch.setattr(rounding, "compare_plans", better)
    monkeypatch.setattr(rounding, "split_holdout", lambda images: (images, list(held)))
    monkeypatch.setattr(rounding, "interruption_note", lambda notes: "stopped" in notes)
    monkeypatch.setattr(rounding, "fit_to_time", lambda g, p, n, seconds: (n - 1, 100, 5.0))
    monkeypatch.setattr(
        rounding.activation_ranges, "with_weighted_ranges", lambda *a: replace(plan, ties=(("x", "y"),))
    )
    found = rounding.round_weights(
        BEFORE, plan, stats={"x": 1}, batches=given.pop("batches", batches(8, 4)), choose=choose, **given
    )
    return found, told


def test_what_is_not_said_is_as_the_pages_tell(monkeypatch):
    (after, _, notes), told = rounded(monkeypatch)
    how = told["how"]
    assert (how.gptq, how.samples, how.ridge, how.residual, how.seed) == (True, 4096, 0.1, True, 0)
    assert (told["images"], told["scores"], told["placed"]) == (12, True, True)
    assert after is AFTER and notes == ["1 weights are rounded by gptq: said"] and told["known"] == ["w", "x"]


def test_each_option_reaches_what_it_is_about(monkeypatch):
    (_, _, notes), told = rounded(
        monkeypatch,
        rounding="nearest",
        samples=7.0,
        ridge=None,
        residual=False,
        scores=False,
        effect=False,
        guard=False,
    )
    how = told["how"]
    assert (how.gptq, how.samples, how.ridge, how.residual) == (False, 7, None, False)
    assert not told["scores"] and not told["placed"] and "compared" not in told and notes == []


def test_ranges_that_the_user_chose_are_not_chosen_by_errors(monkeypatch):
    plan = replace(PLAN, provenance={"settings": {"rule": "kl", "seed": 3}})
    _, told = rounded(monkeypatch, plan=plan)
    assert (told["scores"], told["placed"], told["how"].seed) == (False, False, 3)


@pytest.mark.parametrize(
    "fits, notes, held, kept, compared",
    [
        (True, (), ((1,),), AFTER, True),
        (False, (), ((1,),), BEFORE, True),
        (False, ("stopped",), ((1,),), AFTER, False),  # what was fitted so far is kept
        (False, (), (), AFTER, False),  # nothing to compare with
    ],
)
def test_the_plain_plan_is_kept_where_it_is_better(monkeypatch, fits, notes, held, kept, compared):
    (after, plan, said), told = rounded(monkeypatch, fits=fits, notes=notes, held=held)
    assert after is kept and (plan is PLAN) is (kept is BEFORE) and ("compared" in told) is compared
    assert any("after all: said" in n for n in said) is (kept is BEFORE)


@pytest.mark.parametrize("seconds, warns", [(4.9, True), (5.0, False), (6.0, False)])
def test_a_time_says_how_many_images_and_positions(monkeypatch, seconds, warns):
    plan = replace(PLAN, provenance={"settings": {"steps": {"seconds": seconds, "rounding": "gptq"}}})
    (_, after, notes), told = rounded(monkeypatch, plan=plan, seconds=seconds, most=3)
    assert told["images"] == 11 and told["how"].samples == 100
    assert notes[0].startswith("warning: " if warns else "rounding is expected to take 5 s")
    steps = {"rounding": "gptq", "rounding_images": 11, "rounding_samples": 100}
    assert after.provenance["settings"]["steps"] == steps


def test_a_scale_that_the_platform_moved_afterwards_is_said(monkeypatch):
    (_, _, notes), _ = rounded(monkeypatch, moved=0.25)
    assert notes[0].startswith("warning: the scale of 'w' moved")


@pytest.mark.parametrize(
    "most, sizes",
    [(None, [8, 4]), (12, [8, 4]), (13, [8, 4]), (11, [8, 3]), (9, [8, 1]), (8, [8]), (7, [7]), (1, [1]), (2.9, [2])],
)
def test_the_first_images(most, sizes):
    assert [len(b[0]) for b in rounding._first(batches(8, 4), most)] == sizes


def test_batches_whose_tensors_differ_in_size_are_not_cut():
    pair = [torch.zeros(8, 1), torch.zeros(3, 1)]
    assert [len(x) for x in rounding._first([pair], 2)[0]] == [8, 3]
    alike = [torch.zeros(8, 1), torch.zeros(8)]
    assert [len(x) for x in rounding._first([alike], 2)[0]] == [2, 2]
    assert len(rounding._first([[torch.zeros(8), torch.tensor(1.0)]], 2)[0][0]) == 8


@pytest.mark.parametrize(
    "fits, notes, held, guard, kept, compared",
    [
        (True, [], [1], True, AFTER, True),
        (False, [], [1], True, BEFORE, True),
        (False, ["stopped"], [1], True, AFTER, False),
        (False, [], [], True, AFTER, False),
        (False, [], [1], False, AFTER, False),
    ],
)
def test_learned_codes_are_kept_where_they_are_better(monkeypatch, fits, notes, held, guard, kept, compared):
    told = {}

    def learn(original, g, p, images, how):
        told.update(how=how, images=len(images))
        return AFTER, list(notes)

    monkeypatch.setattr(reconstruct, "learn_rounding", learn)
    monkeypatch.setattr(reconstruct, "split_holdout", lambda images: (images[1:], held))
    monkeypatch.setattr(reconstruct, "interruption_note", lambda notes: "stopped" in notes)
    monkeypatch.setattr(reconstruct, "compare_plans", lambda *a: told.update(compared=True) or (fits, "said"))
    given = {} if guard else {"guard": False}
    after, plan, said = reconstruct.learn_codes(BEFORE, PLAN, original=BEFORE, batches=batches(8, 4, 2), **given)
    assert (told["how"].steps, told["how"].seed, told["images"]) == (1000, 0, 2 if guard else 3)
    assert after is kept and (plan is PLAN) is (kept is BEFORE) and ("compared" in told) is compared
    assert any("kept: said" in n for n in said) is (compared and fits)
    if kept is AFTER:
        learned = {n for n, t in plan.tensors.items() if "codes learned by" in t.origin}
        assert learned == {"w"}  # v is as it was
