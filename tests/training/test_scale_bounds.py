"""A platform's rules hold in every step of training, by construction: nothing is repaired when it ends."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import PlanError, TrainingError
from chipfit.frameworks import lower
from chipfit.frameworks.torch.lower import stepper
from chipfit.plan.diff import diff
from chipfit.plan.json_codec import plan_from_json, plan_to_json
from chipfit.plan.training import Training
from chipfit.quantizers.algorithm import Algorithm
from chipfit.quantizers.scale_bounds import ScaleBound, code_sums
from tests.build import images, model_of, quantized

DATA = [images(8, 6, 4, seed=0)] * 2


def bounded(platform):
    """A sum whose operands may differ by a bounded ratio only, and a softmax whose scale the platforms dictate."""
    torch.manual_seed(0)

    def forward(m, x):
        x = m.a(x)
        return m.head(torch.relu(m.b(x) + x).mean((2, 3))).softmax(-1)

    net = model_of(forward, a=nn.Conv2d(4, 4, 3, padding=1), b=nn.Conv2d(4, 4, 1), head=nn.Linear(4, 3))
    return quantized(net, DATA, platform, training="lsq(use_grad_scaling=False)")


@pytest.fixture(scope="module")
def tflite():
    return bounded("tflite_int8")


def broken(plan, scales=None) -> list[str]:
    """The limits that a plan's scales do not satisfy."""
    scales = scales or (lambda t: plan[t].scale)
    totals = [(x, sum(e * scales(t).detach().double().log2() for t, e in x.terms)) for x in plan.limits]
    return [str(x) for x, v in totals if bool((v < x.low - 1e-6).any() or (v > x.high + 1e-6).any())]


@pytest.mark.parametrize("platform", ["tflite_int8", "qnnpack", "vitis_dpu"])
def test_training_that_pushes_against_a_bound_stays_inside(platform):
    result = bounded(platform)
    plan, model = result.plan, result.model.train()
    assert plan.limits and not broken(plan)
    quantizers = {
        q.tensor: q for q in model.modules() if hasattr(q, "trainable_parameters") and q.trainable_parameters()
    }
    start, met = {k: v.clone() for k, v in model.state_dict().items()}, 0
    for pushed in dict.fromkeys(t for x in plan.limits for t, _ in x.terms if t in quantizers):
        for direction in (-9.0, 9.0):
            model.load_state_dict(start)
            for _ in range(2):  # what an optimizer does that wants the scale far away
                with torch.no_grad():
                    quantizers[pushed].scale.mul_(2.0**direction)
                met += bool(broken(plan, model.scale))
                model(DATA[0])
                assert broken(plan, model.scale) == []
                for q in quantizers.values():
                    assert not q.grid.pot or torch.equal(q.numbers()[0].log2(), q.numbers()[0].log2().round())
    assert met  # some bound was in the way
    trained = result.trained()
    model.eval()
    assert torch.equal(trained.model(DATA[1]), model(DATA[1]))
    assert broken(trained.plan) == []


def test_the_last_step_is_inside_too(tflite):
    """No forward pass follows it: what is read back is what the next one would have computed."""
    result = tflite.as_calibrated().trains("lsq")
    limit = next(x for x in result.plan.limits if x.op == "Add" and x.high == pytest.approx(6, abs=1e-3))  # ratio < 64
    owner = result.model.quantizer_of(next(t for t, e in limit.terms if e < 0))
    with torch.no_grad():
        owner.scale.mul_(2.0**-4), owner.least.mul_(2.0**-9), owner.scale.mul_(2.0**-5)
    assert broken(result.plan, result.model.scale)
    after = result.trained()
    assert broken(after.plan) == []
    assert torch.equal(after.model(DATA[1]), result.model(DATA[1]))


def test_what_the_platform_dictates_does_not_train(tflite):
    softmax = tflite.plan.fixed[0]
    assert float(tflite.plan[softmax].scale) == 1 / 256
    result = tflite.as_calibrated().trains({"activations": "lsq", "weights": "lsq", "only": {softmax: "lsq"}})
    assert not result.model.quantizer_of(softmax).trainable_parameters()
    assert result.model.quantizer_of("head.weight").trainable_parameters()


@dataclass(frozen=True)
class Free(Algorithm):
    """Scale and zero point train, and nothing keeps the scale above 0."""

    def init(self, stored, x):
        zero = {"zero_point": stored.zero_point.float()} if stored.grid.zero == "any" else {}
        return {"scale": stored.scale, **zero}

    def numbers(self, ops, p, grid):
        return p["scale"], ops.round(p["zero_point"])


def test_a_zero_point_that_a_rule_says_stays(tflite):
    name = next(t.name for t in tflite.plan.tensors.values() if t.role == "activation" and t.stored.grid.zero == "any")
    plan = replace(tflite.plan, zeros=(name,))
    free, held = (lower(tflite.graph, p, Training(Free())).quantizer_of(name) for p in (tflite.plan, plan))
    assert set(free.trainable_parameters()) == {"scale", "zero_point"} and set(held.trainable_parameters()) == {"scale"}


@pytest.mark.parametrize(("value", "says"), [(float("nan"), "nan"), (0.0, "0"), (float("inf"), "inf")])
def test_a_scale_that_is_no_number_ends_training_and_is_named(value, says, tflite):
    model = tflite.as_calibrated().trains(Free()).model.train()
    model(DATA[0])
    with torch.no_grad():
        model.quantizer_of("b.weight").scale[1] = value
    with pytest.raises(TrainingError, match=rf"step 2 of training, the scale of 'b.weight' is {says}.*Where: b"):
        model(DATA[0])


def test_a_weight_that_is_no_number_ends_training_and_is_named(tflite):
    model = tflite.as_calibrated().trains("ste").model.train()
    with torch.no_grad():
        model.weight("b.weight")[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"step 1 of training, 'b.weight' holds NaN.*Where: b"):
        model(DATA[0])


def test_steps_of_the_command_line_are_counted(tflite):
    model = tflite.as_calibrated().trains("ste").model
    step = stepper(model, 0.01, 3, True)
    step([DATA[0]], torch.arange(8) % 3)
    with torch.no_grad():
        model.weight("a.weight")[0, 0] = float("inf")
    with pytest.raises(TrainingError, match=r"step 2 of training, 'a.weight' holds NaN.*Where: a"):
        step([DATA[0]], torch.arange(8) % 3)


def test_rules_that_nothing_may_move_for_are_an_error(tflite):
    limit = ScaleBound(op="Add", terms=((tflite.plan.fixed[0], 1),), low=-3.0)
    with pytest.raises(TrainingError, match=r"softmax >= 0.125 \(scales\)"):
        lower(tflite.graph, replace(tflite.plan, limits=(limit,)), Training("lsq"))


def test_sums_of_codes_stay_below_their_bound(tflite):
    most = 1.02 * float(code_sums(tflite.plan["a.weight"], tflite.graph.weights["a.weight"], 0).max())
    plan = replace(tflite.plan, sums=(("a.weight", most),))
    model = lower(tflite.graph, plan, Training("lsq")).train()
    with torch.no_grad():
        model.quantizer_of("a.weight").scale.mul_(0.7)
    model(DATA[0])
    stored = plan["a.weight"].with_(scale=model.scale("a.weight").detach())
    assert float(code_sums(stored, model.weight("a.weight"), 0).max()) <= most


def test_a_compiled_step_is_inside_too(tflite):
    torch._dynamo.reset()
    result = tflite.as_calibrated().trains("lsq")
    model = result.model.train()
    run = torch.compile(model, backend="eager")
    run(DATA[0]).sum().backward()
    name = next(t for x in result.plan.limits if x.op == "Add" for t, e in x.terms if e < 0)
    quantizer = model.quantizer_of(name)
    with torch.no_grad():
        quantizer.least.mul_(2.0**-9), quantizer.scale.mul_(2.0**-9)
    assert broken(result.plan, model.scale)
    run(DATA[0])
    assert broken(result.plan, model.scale) == []


# ---------------------------------------------------------------- as data


def test_what_holds_in_training_is_part_of_the_plan(tflite, tmp_path):
    plan = replace(tflite.plan, zeros=("relu",), sums=(("a.weight", 500.0),))
    again = plan_from_json(*plan_to_json(plan))
    assert all(getattr(again, n) == getattr(plan, n) for n in ("limits", "fixed", "zeros", "sums"))
    assert any("(scales)" in str(x) for x in plan.limits) and "bounds on scales" in str(plan)
    fewer = replace(plan, limits=plan.limits[1:], fixed=())
    assert {d.field for d in diff(plan, fewer)} == {"limits", "fixed"}
    tflite.save(tmp_path / "saved")
    assert chipfit.load(tmp_path / "saved").plan.limits == tflite.plan.limits


def test_an_older_plan_has_no_limits(tflite):
    data, numbers = plan_to_json(tflite.plan)
    for name in ("limits", "fixed", "zeros", "sums"):
        del data[name]
    assert plan_from_json(data, numbers).limits == ()
    data["limits"] = [{"op": "Add", "terms": "x"}]
    with pytest.raises(PlanError, match="'terms' must be a list"):
        plan_from_json(data, numbers)
