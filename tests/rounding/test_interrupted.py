"""Ctrl-C while weights are rounded or widths searched: what was decided until then is a result that can be used."""

import pytest
import torch

import chipfit
from chipfit import Settings
from chipfit.correction import bias
from chipfit.errors import Interrupted
from chipfit.rounding import method, sequential_reconstruction
from chipfit.rounding.compare import Reference
from chipfit.rounding.methods.learned import BlockReconstruction
from chipfit.search import choose
from tests.accelerators import moved
from tests.build import NEAREST, quantized
from tests.rounding.test_sequential_reconstruction import DATA, NEW, net

FOUR = {"*": {"bits": 4, "activation_bits": 8}}
PLAIN = Settings()


def fitted(settings=PLAIN, **options):
    return quantized(net(), DATA, "mqbench_academic", overrides=FOUR, settings=settings, **options)


def ctrl_c(monkeypatch, owner, name, after=0):
    """Ctrl-C in the call of a function behind so many others."""
    inner, calls = getattr(owner, name), iter(range(1000))

    def pressed(*args, **kwargs):
        if next(calls) == after:
            raise KeyboardInterrupt
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, pressed)


def interrupted(settings=PLAIN, **options):
    with pytest.raises(KeyboardInterrupt, match=r"`\.result` of this exception") as caught:
        fitted(settings, **options)
    assert isinstance(caught.value, Interrupted)
    return caught.value.result


def loss(result):
    return Reference(fitted(NEAREST).graph, [[NEW]]).loss(result.graph, result.plan)


def origins(result):
    return {n: t.origin.split()[0] for n, t in result.plan.tensors.items() if t.role == "weight" and t.quantized}


def test_layers_that_were_rounded_stay_so_and_the_others_take_their_nearest_codes(monkeypatch, tmp_path):
    whole, plain = fitted(), fitted(NEAREST)
    ctrl_c(monkeypatch, sequential_reconstruction.SequentialReconstruction, "fit", after=3)
    half = interrupted()
    fits = ("stem.weight", "body.weight", "depth.weight")
    assert origins(half) == {n: "gptq" if n in fits else o for n, o in origins(plain).items()}
    assert loss(whole) < loss(half) < loss(plain)
    assert torch.equal(half.graph.weights["head.weight"], plain.graph.weights["head.weight"])
    assert "warning: interrupted: 'head' and what follows it take their nearest codes" in half.plan.rewrites
    half.save(tmp_path / "half")
    assert origins(chipfit.load(tmp_path / "half")) == origins(half)
    with torch.no_grad():
        assert torch.isfinite(moved(half.model, "cpu")(NEW)).all()


@pytest.mark.parametrize(
    "owner, name, settings, named",
    [
        (method, "compare_plans", Settings(rounding="gptq"), "rounding"),  # what no guard has seen is not taken
        (bias, "quantized_linear", Settings(correct_bias=True, reconstruct="layer"), "bias, reconstruct"),
    ],
)
def test_a_step_that_is_nothing_by_half_is_left_out_with_those_behind_it(monkeypatch, owner, name, settings, named):
    plain = fitted(NEAREST)
    ctrl_c(monkeypatch, owner, name)
    result = interrupted(settings)
    assert result.plan.rewrites[-1].endswith(f"interrupted: not done: {named}")
    assert loss(result) == loss(plain)


def test_units_that_were_learned_stay_so(monkeypatch):
    settings = Settings(rounding="off", reconstruct="layer", reconstruct_steps=30, rounding_guard=False)
    plain = fitted(NEAREST)
    ctrl_c(monkeypatch, BlockReconstruction, "learn", after=2)
    result = interrupted(settings)
    weights = result.graph.weights
    learned = {n for n in origins(plain) if not torch.equal(weights[n], plain.graph.weights[n])}
    assert "warning: interrupted: 'depth' and what follows it keep their codes" in result.plan.rewrites
    assert learned and learned <= {"stem.weight", "body.weight"}
    assert all(result.plan.tensors[n].origin.endswith("codes learned by layer") for n in learned)
    assert loss(result) < loss(plain)


def test_a_search_that_has_not_ended_leaves_the_widths_and_says_that_no_limit_is_kept(monkeypatch):
    ctrl_c(monkeypatch, choose, "losses")
    result = interrupted(limits=chipfit.Limits(bops="30%"), training="lsq")
    assert {t.grid.bits for t in result.plan.tensors.values() if t.role == "weight" and t.quantized} == {4}
    note = "warning: interrupted: the widths were not searched to the end, and no limit is kept"
    assert result.plan.rewrites[-1] == note
    assert "chosen" not in result.plan.provenance and result.training is not None


def test_ctrl_c_before_anything_is_decided_is_no_more_than_that(monkeypatch):
    ctrl_c(monkeypatch, chipfit.adaptation, "collect")
    with pytest.raises(KeyboardInterrupt) as caught:
        fitted()
    assert not isinstance(caught.value, Interrupted)
