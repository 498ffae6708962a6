"""Every training algorithm from a plan to a plan: the loss falls, and the outcome is exact on the device or refused."""

from functools import cache

import pytest
import torch

from chipfit.errors import UnsupportedError
from chipfit.registry import registered
from tests.build import platform_of, quantized
from tests.training.small import DATA, Net, train

#: roles that a network on integers trains with an algorithm; LSQ trains the other
INTEGERS = {
    **dict.fromkeys(("ste", "lsq", "lsq_plus", "tqt", "dsq", "dorefa", "dorefa_rescaled"), ("weights", "activations")),
    "pact": ("activations",),
    "qil": ("weights",),
    "qil_rescaled": ("weights",),
    "n2uq": ("weights",),
}
#: levels of their own -> the platform that has them
LEVELS = {"apot": "tables", "apot_rescaled": "tables", "lut": "tables", "nnie_log": "nnie"}
#: weights are entries of a table of eight-bit numbers
TABLES = platform_of(
    {"match": ["@conv", "Linear"], "use": [{"in": "a8", "w": "w4", "b": "b32", "out": "a8"}]},
    formats={
        "a8": {"bits": 8, "zero": "any"},
        "w4": {"kind": "lut", "bits": 4, "lut": {"value_bits": 8, "entries": 16, "per": "tensor"}},
        "b32": {"bits": 32},
    },
)


@pytest.fixture(scope="module")
def plain():
    return cache(lambda platform: quantized(Net(), DATA, TABLES if platform == "tables" else platform))


def test_every_algorithm_is_tried():
    assert {*INTEGERS, *LEVELS} == {n for n, a in registered("training").items() if "chipfit.quant" in a.__module__}


@pytest.mark.parametrize("name", INTEGERS)
def test_what_was_trained_is_exact_on_the_device(name, plain):
    result = plain("ort_cpu").trains({"method": "lsq", **dict.fromkeys(INTEGERS[name], name)})
    found = train(result.model, 6, 0.02)
    assert found[-1] < found[0]
    after = result.trained()
    assert torch.equal(after.model(DATA[1]), result.model(DATA[1]))
    assert any(not torch.equal(w, plain("ort_cpu").graph.weights[n]) for n, w in after.graph.weights.items())
    moved = [n for n, t in after.plan.tensors.items() if t.quantized and t.role != "bias" and "trained" in t.origin]
    assert bool(moved) == (name not in ("ste", "dorefa_rescaled"))  # whose scales are the plan's
    assert after.verify([2 * DATA[2]]).exact


@pytest.mark.parametrize("name", LEVELS)
def test_levels_of_their_own_end_in_the_plan(name, plain):
    before = plain(LEVELS[name])
    result = before.trains({"weights": name, "activations": "lsq" if LEVELS[name] == "tables" else name})
    steps = {"lut": (15, 0.05), "apot": (15, 0.01)}.get(name, (6, 0.02))  # entries are integers, and move late
    found = train(result.model, *steps)
    assert found[-1] < found[0]
    after, changed = result.trained(), []
    assert torch.equal(after.model(DATA[1]), result.model(DATA[1]))
    for n, t in after.plan.tensors.items():
        if t.role == "weight" and t.quantized:
            codes = t.stored.round(after.graph.weights[n]) / t.scale
            assert all(min(abs(v - e) for e in t.stored.grid.table) < 1e-4 for v in codes.unique().tolist())
            changed.append(t.stored.grid.table != before.plan[n].grid.table)
            assert len(t.stored.grid.table) <= (t.stored.grid.entries or 256) and 0.0 in t.stored.grid.table
    assert any(changed) if name == "lut" else all(changed)


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"activations": "qil"}, "equal steps from 0"),
        ({"weights": "apot"}, "levels of a table"),
        ({"weights": "nnie_log"}, "levels of a table"),
    ],
)
def test_what_no_chip_rounds_is_refused_when_training_ends(training, says, plain):
    result = plain("ort_cpu").trains(training)
    found = train(result.model, 6, 0.02)
    assert found[-1] < found[0]
    with pytest.raises(UnsupportedError, match=says):
        result.trained()


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ("pact", '"activations": "pact"'),
        ({"weights": "lut"}, "look-up table"),
        ({"activations": "n2uq"}, "6 bits"),
        ({"activations": "apot"}, "zero point"),
    ],
)
def test_a_grid_that_it_cannot_hold_is_refused_before(training, says, plain):
    with pytest.raises(UnsupportedError, match=says):
        plain("ort_cpu").trains(training)


@pytest.mark.parametrize("name", ["tqt", "lsq(from_mean=True)", "lsq_plus(from_spread=True)", "qil", "ste"])
def test_a_channel_of_zeros_can_train(name):
    """Calibration stores it with the least scale, which no gradient would leave, and in which 0.25 is clipped to 0."""
    net = Net()
    with torch.no_grad():
        net.head.weight[1] = 0.0
    before = quantized(net, DATA, "ort_cpu")
    result = before.trains({"weights": name})
    assert before.plan["head.weight"].scale.min() < 1e-6
    assert torch.allclose(result.model(DATA[0])[:, 1], net(DATA[0])[:, 1], atol=0.02)
    weight = dict(result.model.named_parameters())["head.weight"]
    with torch.no_grad():
        weight[1] = 0.25
    y = result.model.quantizer_of("head.weight")(weight)
    y[1].sum().backward()
    assert float(y.detach()[1].min()) > 0.1 and float(weight.grad[1].abs().sum()) > 0
    assert result.trained().verify([2 * DATA[2]]).exact
