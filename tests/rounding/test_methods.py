"""Rounding methods: one file each, chosen by name, with options from the text or from settings."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

import chipfit
from chipfit import Settings
from chipfit.errors import ConfigError, PlanError, UnknownNameError
from chipfit.plan.record import Plan
from chipfit.registry import option, register
from chipfit.rounding import method
from chipfit.rounding.compare import limit_samples
from chipfit.rounding.method import RoundingContext, RoundingResult, create_methods, default_method, fits_weights
from chipfit.rounding.methods import gptq
from chipfit.rounding.methods.gptq import Gptq
from chipfit.rounding.methods.learned import BlockReconstruction, Learned
from chipfit.rounding.methods.nearest import Nearest
from tests.build import graph_of, plan_of, randn, small_cnn, stored

BEFORE = graph_of("y = Linear(x, w)", "z = Linear(y, w2)", weights={"w": torch.eye(2), "w2": torch.eye(2)})
AFTER = replace(BEFORE, weights={**BEFORE.weights, "w": 2 * torch.eye(2)})
PLAN = plan_of(x=stored(), w=stored(), w2=stored())
FOUR = {"*": {"bits": 4, "activation_bits": 8}}


def batches(*sizes):
    return [[torch.arange(float(n)).view(-1, 1)] for n in sizes]


def context(given=None, **more):
    return RoundingContext(original=BEFORE, batches=given or batches(8, 4), stats={"x": 1}, choose=None, **more)


def quantized(settings, **options):
    options = {"platform": "tflite_int8", "overrides": FOUR, "progress": False, **options}
    return chipfit.quantize(small_cnn(), [randn(8, 3, 8, 8, seed=k) for k in range(2)], settings=settings, **options)


# ---------------------------------------------------------------- names and options


def test_a_text_names_methods_one_behind_the_other_with_their_options():
    assert create_methods("gptq", {}) == [Gptq()] and create_methods("nearest(ridge=None)", {}) == [Nearest(ridge=None)]
    both = create_methods("gptq(samples=5000) + learned(scope='layer', floats=0.0)", {})
    assert both == [Gptq(samples=5000), Learned(scope="layer")]


def test_settings_stand_for_the_options_that_methods_declare():
    given = {"rounding_samples": 7.0, "rounding_guard": False, "reconstruct_steps": 3, "smooth": 0.5}
    nearest, learned = create_methods("nearest + learned", given)
    assert nearest == Nearest(samples=7, guard=False) and learned == Learned(steps=3, guard=False)


@pytest.mark.parametrize(
    "text, error, message",
    [
        ("gpqt", UnknownNameError, "no rounding method named 'gpqt'.*'gptq'"),
        ("gptq + lerned", UnknownNameError, "'lerned'.*'learned'"),
        ("gptq(sample=3)", UnknownNameError, "setting of rounding method 'gptq' named 'sample'"),
        ("gptq(samples=2.5)", ConfigError, "'samples' of rounding method 'gptq'.*an integer above 0"),
        ("learned(scope='unit')", ConfigError, "[Ss]cope.*layer, block, network"),
        ("learned(scope=3)", ConfigError, "'scope' of rounding method 'learned'.*a text"),
        (4, PlanError, "'rounding' is not allowed.*'gptq', 'learned', 'nearest', 'off'"),
    ],
)
def test_a_method_that_does_not_exist_is_refused(text, error, message):
    with pytest.raises(error, match=message):
        Settings(rounding=text)


@pytest.mark.parametrize(
    "bits, rule, name",
    [([8, 5], "mse", "gptq"), ([2], "mse", "gptq"), ([6], "mse", None), ([], "mse", None), ([4], "kl", None)],
)
def test_weights_of_fewer_than_6_bits_are_fitted_unless_another_rule_was_chosen(bits, rule, name):
    assert default_method(bits, rule) == name


def test_methods_say_whether_they_fit_weights():
    assert all(map(fits_weights, ("gptq", "nearest", "learned + gptq")))
    assert not any(map(fits_weights, ("learned", "off", None)))


def test_methods_one_behind_the_other_do_what_the_settings_for_it_do():
    one = quantized(Settings(rounding="nearest + learned(scope='layer', steps=5)"))
    other = quantized(Settings(rounding="nearest", reconstruct="layer", reconstruct_steps=5))
    assert one.plan.rewrites == other.plan.rewrites
    corrected = [r.plan.provenance["corrected"] for r in (one, other)]
    assert corrected == [["rounding"], ["rounding", "reconstruct"]]
    assert all(torch.equal(w, other.graph.weights[name]) for name, w in one.graph.weights.items())
    assert {n: t.origin for n, t in one.plan.tensors.items()} == {n: t.origin for n, t in other.plan.tensors.items()}


# ---------------------------------------------------------------- a method of one's own


@pytest.fixture
def shrinking(drop_ins):
    @register("rounding", "shrink")
    @dataclass(frozen=True)
    class Shrink:
        """Nearest quantized values of weights that were made smaller."""

        factor: float = option("shrink_factor", 0.5, "factor of all weights")

        def __call__(self, graph, plan, context):
            graph = graph.copy()
            for t in plan.tensors.values():
                if t.role == "weight" and t.quantized:
                    graph.weights[t.name] = plan[t.name].round(graph.weights[t.name].detach() * self.factor)
            return RoundingResult(graph, plan, [f"shrunk {len(context.batches)} batches by {self.factor}"])


@pytest.mark.parametrize("text, given", [("shrink", {"shrink_factor": 0.25}), ("shrink(factor=0.25)", {})])
def test_a_method_outside_the_package_is_taken_by_its_name(shrinking, text, given):
    result, plain = quantized(Settings(rounding=text, **given)), quantized(Settings(rounding="off"))
    stored, w = plain.plan["0.weight"], plain.graph.weights["0.weight"].detach()
    torch.testing.assert_close(result.graph.weights["0.weight"], stored.round(0.25 * w))
    assert result.plan.rewrites[-1] == "shrunk 2 batches by 0.25"
    assert result.plan.provenance["corrected"] == ["rounding"] and not fits_weights(text)
    assert result.edit({"0": "float"}).plan.rewrites[-1] == "shrunk 2 batches by 0.25"


# ---------------------------------------------------------------- GPTQ and nearest


GPTQ = Gptq()


def rounded(monkeypatch, chosen=GPTQ, *, better=True, notes=(), plan=PLAN, moved=0.5, **more):
    """The result of a method in which all that it calls is replaced, and what they were given."""
    seen = {}

    def reconstruct(g, p, settings, stats, seed):
        def run(images):
            seen["images"] = images_in(images)
            return SimpleNamespace(graph=AFTER, plan=p, tensors={"w": plan.tensors["w"]}, notes=list(notes))

        seen.update(settings=settings, scores=stats != (), seed=seed, placed=p is not plan)
        return SimpleNamespace(run=run)

    def choose(g, known):
        seen["known"] = sorted(known)
        return {**plan.tensors, "w": plan.tensors["w"].with_(scale=torch.tensor(moved))}

    def compare(original, images, old, new):
        seen["held_out"] = images_in(images)
        return better, "losses"

    monkeypatch.setattr(gptq, "SequentialReconstruction", reconstruct)
    monkeypatch.setattr(method, "compare_plans", compare)
    monkeypatch.setattr(gptq, "fit_to_time", lambda g, p, n, seconds: (n - 1, 100, 5.0))
    monkeypatch.setattr(gptq, "with_weighted_ranges", lambda *a: replace(plan, ties=(("x", "y"),)))
    found = chosen(BEFORE, plan, replace(context(**more), choose=choose))
    return found, seen


def images_in(given):
    return sum(len(b[0]) for b in given)


def test_gptq_holds_out_an_eighth_and_places_scores_and_activations_by_effect(monkeypatch):
    found, seen = rounded(monkeypatch, seed=3)
    assert found.graph is AFTER and found.notes == ["1 weights are rounded by gptq: losses"]
    given = {"settings": Gptq(), "images": 11, "held_out": 1, "scores": True, "placed": True, "seed": 3}
    assert seen == {**given, "known": ["w", "x"]}
    assert rounded(monkeypatch, moved=0.25)[0].notes[0].startswith("warning: scales moved")
    found, _ = rounded(monkeypatch, better=False)
    assert found.graph is BEFORE and found.plan is PLAN
    assert found.notes == ["warning: weights are rounded to the nearest codes after all: losses"]


@pytest.mark.parametrize(
    "chosen, rule", [(Nearest(scores=False, effect=False, guard=False), "mse"), (Nearest(guard=False), "kl")]
)
def test_what_is_turned_off_or_ruled_by_the_user_is_left_out(chosen, rule, monkeypatch):
    found, seen = rounded(monkeypatch, chosen, rule=rule)
    assert (seen["scores"], seen["placed"], seen["images"]) == (False, False, 12)
    assert "held_out" not in seen and found.notes == []


@pytest.mark.parametrize("seconds, warns", [(4.9, True), (5.0, False)])
def test_a_time_says_how_many_images_and_positions(monkeypatch, seconds, warns):
    plan = replace(PLAN, provenance={"settings": {"steps": {"seconds": seconds, "rounding": "gptq"}}})
    found, seen = rounded(monkeypatch, Gptq(seconds=seconds, images=3, guard=False), plan=plan)
    assert seen["images"] == 11 and seen["settings"].samples == 100
    assert found.notes[0].startswith("warning: " if warns else "rounding is expected to take 5 s")
    steps = {"rounding": "gptq", "rounding_images": 11, "rounding_samples": 100}
    assert found.plan.provenance["settings"]["steps"] == steps


@pytest.mark.parametrize("most, sizes", [(12, [8, 4]), (13, [8, 4]), (11, [8, 3]), (8, [8]), (7, [7]), (2.9, [2])])
def test_the_first_samples(most, sizes):
    given, found = batches(8, 4), limit_samples(batches(8, 4), most)
    assert [len(b[0]) for b in found] == sizes
    assert all(torch.equal(b[0], x[0][: len(b[0])]) for b, x in zip(found, given, strict=False))


def test_batches_whose_tensors_differ_in_size_are_not_cut():
    assert [len(x) for x in limit_samples([[torch.zeros(8, 1), torch.zeros(3, 1)]], 2)[0]] == [8, 3]
    assert [len(x) for x in limit_samples([[torch.zeros(8, 1), torch.zeros(8)]], 2)[0]] == [2, 2]
    assert len(limit_samples([[torch.zeros(8), torch.tensor(1.0)]], 2)[0][0]) == 8


# ---------------------------------------------------------------- the guard


@pytest.mark.parametrize(
    "better, notes, held_out, kept, note",
    [
        (True, [], batches(1), AFTER, ["kept: losses"]),
        (False, [], batches(1), BEFORE, ["warning: left out: losses"]),
        (False, ["warning: interrupted"], batches(1), AFTER, ["warning: interrupted"]),  # what was done so far stays
        (False, [], [], AFTER, []),  # nothing to compare with
    ],
)
def test_the_weights_from_before_are_kept_where_they_are_better(monkeypatch, better, notes, held_out, kept, note):
    seen = []
    monkeypatch.setattr(method, "compare_plans", lambda *given: seen.append(given) or (better, "losses"))
    after = RoundingResult(AFTER, Plan(), notes)
    found = method.keep_better(after, (BEFORE, PLAN), BEFORE, held_out, "kept", "left out")
    assert found.graph is kept and (found.plan is PLAN) is (kept is BEFORE) and found.notes == note
    assert all(given == (BEFORE, held_out, (BEFORE, PLAN), (AFTER, after.plan)) for given in seen)


def test_learned_weights_tell_their_scope_and_others_stay_as_they_were(monkeypatch):
    monkeypatch.setattr(BlockReconstruction, "run", lambda self, _: (AFTER, [f"seed {self.random.initial_seed()}"]))
    found = Learned(scope="layer", guard=False)(BEFORE, PLAN, context(seed=5))
    assert found.graph is AFTER and found.notes == ["seed 5"]
    assert [n for n, t in found.plan.tensors.items() if "codes learned by layer" in t.origin] == ["w"]


def test_an_interruption_ends_the_methods_behind_it(monkeypatch):
    monkeypatch.setattr(Gptq, "__call__", lambda self, g, p, c: RoundingResult(g, p, ["warning: interrupted: half"]))
    given = {"original": BEFORE, "stats": {}, "choose": None, "settings": Settings(), "batches": batches(8)}
    assert method.apply_methods("gptq + gptq", BEFORE, Plan(), **given)[2] == ["warning: interrupted: half"]
