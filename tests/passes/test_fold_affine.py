"""Factors and addends of channels, folded into the linear operator behind them."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.engine.run import run
from tests.build import model_of, quantized, randn

X, ROWS = randn(4, 3, 8, 8), randn(16, 6)


def norm(channels: int, kind: type = nn.BatchNorm2d, mean: float = 0.2) -> nn.Module:
    layer = kind(channels)
    layer.running_mean.fill_(mean)
    layer.running_var.copy_(torch.linspace(0.3, 2.0, channels))
    return layer.eval()


def ops_and_error(model: nn.Module, x: torch.Tensor, platform: str) -> tuple[list[str], float]:
    """Return the operators behind all rewrites, and how far their results are from the model's."""
    graph = chipfit.lint(model, x, platform).graph
    with torch.no_grad():
        return [n.op for n in graph.nodes], float((run(graph, [x])[graph.outputs[0]] - model(x)).abs().max())


SLOPES, STEEPER = (torch.tensor([0.5, -2.0, last]).view(3, 1, 1) for last in (4.0, 4.05))  # eightfold, and more
FOLDED = {
    "pixels by 255": (lambda m, x: m.f(x / 255.0), nn.Conv2d(3, 4, 3, padding=1), X),
    "a factor of each channel": (lambda m, x: m.f(x * SLOPES - 3.0), nn.Conv2d(3, 4, 3), X),
    "less a mean, by a deviation": (lambda m, x: m.f((x - 0.3) / 0.7), nn.Conv2d(3, 4, 3, bias=False), X),
    "from a constant": (lambda m, x: m.f(1.0 - x), nn.Conv2d(3, 6, 3, groups=3), X),
    "rows": (lambda m, x: m.f(x * 0.25 + 0.5), nn.Linear(6, 5), ROWS),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDED)
def test_constants_in_front_of_a_linear_operator_cost_no_operator(name):
    f, layer, x = FOLDED[name]
    ops, error = ops_and_error(model_of(f, f=layer), x, "tflite_int8")
    assert len(ops) == 1 and error < 1e-5


@pytest.mark.parametrize(
    "layers, x",
    [((norm(3), nn.Conv2d(3, 4, 3)), X), ((norm(6, nn.BatchNorm1d), nn.Linear(6, 5)), ROWS)],
    ids=["conv", "linear"],
)
def test_a_batch_norm_of_the_input_folds_into_the_layer_behind_it(layers, x):
    ops, error = ops_and_error(nn.Sequential(*layers).eval(), x, "tflite_int8")
    assert ops in (["Conv2D"], ["Linear"]) and error < 1e-5


BEHIND = {
    "a dropout": ((nn.ReLU(), norm(4), nn.Dropout(0.5), nn.Conv2d(4, 2, 3)), "Conv2D Relu Dropout Conv2D"),
    "a maximum": ((nn.ReLU(), norm(4), nn.MaxPool2d(2, 1, 1), nn.Conv2d(4, 2, 3)), "Conv2D Relu MaxPool Conv2D"),
    "a mean": ((nn.ReLU(), norm(4), nn.AvgPool2d(2), nn.Conv2d(4, 2, 2)), "Conv2D Relu AvgPool Conv2D"),
    "groups": ((nn.ReLU(), norm(4), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2, groups=2)), "Conv2D Relu MaxPool Conv2D"),
    "a flattening": (
        (nn.ReLU(), norm(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)), "Conv2D Relu MaxPool Reshape Linear",
    ),
    "a mean of all": (
        (nn.ReLU(), norm(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
        "Conv2D Relu GlobalAvgPool Reshape Linear",
    ),
    "two of them": (
        (nn.ReLU(), norm(4), nn.MaxPool2d(2), norm(4), nn.Flatten(), nn.Linear(36, 3)),
        "Conv2D Relu MaxPool Reshape Linear",
    ),
}  # fmt: skip


@pytest.mark.parametrize("platform", ["tflite_int8", "ort_cpu"])
@pytest.mark.parametrize("name", BEHIND)
def test_a_batch_norm_folds_through_what_pools_or_moves_its_channels(name, platform):
    layers, left = BEHIND[name]
    ops, error = ops_and_error(nn.Sequential(nn.Conv2d(3, 4, 3), *layers).eval(), X, platform)
    assert ops == left.split() and error < 1e-5


def test_a_difference_from_an_image_folds_through_a_flattening():
    mean = randn(3, 8, 8, seed=2) / 8
    ops, error = ops_and_error(model_of(lambda m, x: m.f((x - mean).flatten(1)), f=nn.Linear(192, 5)), X, "tflite_int8")
    assert ops == ["Reshape", "Linear"] and error < 1e-5


def negative(layer: nn.Module) -> nn.Module:
    layer.weight.data[1] = -1.0
    return layer


KEPT_BEHIND = {
    "a negative factor turns a maximum round": (nn.ReLU(), negative(norm(4)), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3)),
    "a mean counts padding": (nn.ReLU(), norm(4), nn.AvgPool2d(2, padding=1), nn.Conv2d(4, 2, 3)),
    "padding is added": (nn.ReLU(), norm(4), nn.ZeroPad2d(1), nn.Conv2d(4, 2, 3)),
    "channels are mixed": (nn.ReLU(), norm(4), nn.PixelShuffle(2), nn.Conv2d(1, 2, 3)),
    "it is not linear": (nn.ReLU(), norm(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
}


@pytest.mark.parametrize("name", KEPT_BEHIND)
def test_a_batch_norm_stays_before_what_it_cannot_cross(name):
    ops, error = ops_and_error(nn.Sequential(nn.Conv2d(3, 4, 3), *KEPT_BEHIND[name]).eval(), X, "tflite_int8")
    assert len(ops) > 4 and error < 1e-5


KEPT = {
    "padding lies behind an addend": (lambda m, x: m.f(x + 0.3), nn.Conv2d(3, 4, 3, padding=1), "tflite_int8"),
    "channels lie far apart": (lambda m, x: m.f(x * STEEPER), nn.Conv2d(3, 4, 3), "tflite_int8"),
    "the data lie to one side": (lambda m, x: m.f(x - 3.1), nn.Conv2d(3, 4, 3), "tflite_int8"),
    "it is read elsewhere": (lambda m, x: m.f(x * 0.5) + (x * 0.5).sum(), nn.Conv2d(3, 4, 3), "tflite_int8"),
    "the platform subtracts in float": (lambda m, x: m.f(x - 0.3), nn.Conv2d(3, 4, 3), "ort_cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_constant_stays_where_folding_would_change_or_harm_the_network(name):
    f, layer, platform = KEPT[name]
    ops, error = ops_and_error(model_of(f, f=layer), X, platform)
    assert len(ops) > 1 and error < 1e-5


def test_a_normalised_input_is_an_integer_input_and_loses_one_rounding_less():
    """int8 at both ends; the file's results are those of a network that reads the same integers in float."""
    torch.manual_seed(0)
    net = nn.Sequential(norm(3), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    result = quantized(net, [randn(16, 3, 8, 8, seed=1)], "tflite_int8")
    assert not [n for n in result.plan.nodes.values() if n.exec == "float"]
    assert result.verify([X]).exact


def test_a_quotient_by_a_constant_is_a_product_where_the_platform_multiplies_integers():
    net = model_of(lambda m, x: (m.a(x) + m.b(x)) / 2.0, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(3, 4, 3))
    result = quantized(net, [X], "tflite_int8")
    assert "Mul" in {n.op for n in result.graph.nodes} and "Div" not in {n.op for n in result.graph.nodes}
    assert not [n for n in result.plan.nodes.values() if n.exec == "float"] and result.verify([X]).exact
    by_zero = model_of(lambda m, x: m.a(x) / torch.tensor([1.0, 0.0, 2.0, 4.0]).view(4, 1, 1), a=nn.Conv2d(3, 4, 3))
    assert "Div" in {n.op for n in chipfit.lint(by_zero, X, "tflite_int8").graph.nodes}
