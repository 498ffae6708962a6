"""Outputs that join values of different magnitudes: each part keeps its accuracy, or a warning names it."""

import math

import pytest
import torch
from torch import nn

import chipfit
from chipfit.decide.overrides import PARTS_ARE_LOST
from chipfit.errors import UnsupportedError
from tests.build import images, model_of, quantized, sqnr_db

DATA = [images(16, 24, seed=s) for s in range(2)]
HEADS = {"trunk": nn.Conv2d(3, 12, 3, 2), "a": nn.Conv2d(12, 10, 3), "b": nn.Conv2d(12, 5, 3)}


def heads(forward):
    """Return two heads on a trunk; `forward(m, a, b)` makes the output of both."""
    torch.manual_seed(0)
    parts = {k: type(v)(v.in_channels, v.out_channels, v.kernel_size, v.stride) for k, v in HEADS.items()}
    return model_of(lambda m, x: forward(m, m.a(y := m.trunk(x).relu()), m.b(y)), **parts)


def detector():
    """Boxes in pixels and scores, as an exported detector joins them: [N, 15, places]."""
    return heads(lambda m, a, b: torch.cat([(a.sigmoid() * 640).flatten(2), (4 * b).sigmoid().flatten(2)], 1))


def landmarks():
    """Coordinates in pixels beside a confidence for each point, points last: [N, places, 15]."""
    return heads(lambda m, a, b: torch.cat([a * 48 + 96, (4 * b).sigmoid()], 1).permute(0, 2, 3, 1).flatten(1, 2))


def distances_and_angles():
    """Metres and radians of an object, [N, 15]."""
    return heads(lambda m, a, b: torch.cat([40 * a.mean((2, 3)).exp(), 3 * torch.tanh(b.mean((2, 3)))], -1))


def levels_in_one():
    """Two levels of a pyramid, whose boxes and scores are joined before the levels are: [N, 2 places, 7]."""

    def forward(m, a, b):
        first = torch.cat([640 * a[:, :4].sigmoid(), b[:, :3].sigmoid()], 1).flatten(2)
        second = torch.cat([320 * a[:, 4:8].sigmoid(), b[:, 2:].sigmoid()], 1).flatten(2)
        return torch.cat([first, second], 2).transpose(1, 2)

    return heads(forward)


def shares_times(constant):
    """Return a head whose boxes and scores, all between 0 and 1, are joined first, and turned into pixels afterwards.

    Args:
        constant: makes the output of what is joined, [N, 15, places], and of constants for each channel.
    """
    pixels = torch.tensor([640.0] * 10 + [1.0] * 5).reshape(1, 15, 1)

    def forward(m, a, b):
        shares = torch.cat([a.sigmoid().flatten(2), (4 * b).sigmoid().flatten(2)], 1)
        return constant(shares, pixels.to(shares.device))

    return heads(forward)


def multiplied():
    return shares_times(lambda y, pixels: y * pixels)


def multiplied_and_shifted():
    return shares_times(lambda y, pixels: (y * pixels - (pixels - 1) / 2).transpose(1, 2))


def divided():
    return shares_times(lambda y, pixels: y / (1 / pixels))


#: network -> the part of its output that is small beside the rest
NETWORKS = {
    detector: lambda y: y[:, 10:],
    landmarks: lambda y: y[..., 10:],
    distances_and_angles: lambda y: y[:, 10:],
    levels_in_one: lambda y: y[..., 4:],
}
#: the same of networks with constants behind the join
RESCALED = {
    multiplied: lambda y: y[:, 10:],
    multiplied_and_shifted: lambda y: y[..., 10:],
    divided: lambda y: y[:, 10:],
}


def sqnr(want, got):
    """Return signal over noise of a part about its mean [dB]."""
    return 10 * math.log10(float((want - want.mean()).square().sum() / (want - got).square().sum()))


#: a constant in front of `openvino_cpu`'s product has one grid for all parts, which a warning names
SMALL = NETWORKS | RESCALED
CASES = [(f, p) for f in SMALL for p in ("ort_cpu", "tflite_int8", "vitis_dpu", "qnn_htp")]
CASES += [(f, "openvino_cpu") for f in NETWORKS]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("network, platform", CASES, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_a_part_of_an_output_keeps_its_accuracy_beside_larger_ones(network, platform):
    model, small, x = network(), SMALL[network], images(16, 24, seed=9)
    result = quantized(model, DATA, platform)
    with torch.no_grad():
        assert sqnr(small(model(x)), small(result.model(x))) > 24
    assert not any(note.startswith("warning") for note in result.plan.rewrites)


@pytest.mark.parametrize("platform, library", [("ort_cpu", "onnxruntime"), ("tflite_int8", "ai_edge_litert")])
def test_a_file_that_joins_in_float_is_exact(platform, library):
    pytest.importorskip(library)
    result = quantized(detector(), DATA, platform)
    (join,) = (n for n in result.plan.nodes.values() if n.op == "Concat")
    assert (join.exec, join.why) == ("float", PARTS_ARE_LOST)
    assert any("'sigmoid_1' would keep" in note for note in result.plan.rewrites)
    assert result.verify([images(16, 24, seed=9)]).exact


@pytest.mark.parametrize("platform, library", [("ort_cpu", "onnxruntime"), ("tflite_int8", "ai_edge_litert")])
@pytest.mark.parametrize("network", [multiplied, multiplied_and_shifted])
def test_a_file_that_applies_constants_to_parts_in_float_is_exact(network, platform, library):
    pytest.importorskip(library)
    result = quantized(network(), DATA, platform)
    by_op = {n.op: n for n in result.plan.nodes.values()}
    assert (by_op["Mul"].exec, by_op["Mul"].why) == ("float", PARTS_ARE_LOST)
    assert result.verify([images(16, 24, seed=9)]).exact


@pytest.mark.parametrize("platform, library", [("ort_cpu", "onnxruntime"), ("tflite_int8", "ai_edge_litert")])
def test_a_detector_of_keras_keeps_its_scores(platform, library):
    keras, _ = pytest.importorskip("keras"), pytest.importorskip(library)
    keras.utils.set_random_seed(0)
    image = keras.Input((24, 24, 3))
    trunk = keras.layers.Conv2D(12, 3, 2, activation="relu")(image)
    boxes = keras.layers.Rescaling(640.0)(keras.layers.Conv2D(4, 3, activation="sigmoid")(trunk))
    scores = keras.layers.Conv2D(3, 3, activation="sigmoid", kernel_initializer="he_normal")(trunk)
    rows = [keras.layers.Reshape((-1, n))(y) for n, y in ((4, boxes), (3, scores))]
    model, data = keras.Model(image, keras.layers.Concatenate()(rows)), [x.permute(0, 2, 3, 1).numpy() for x in DATA]
    result = quantized(model, data, platform)
    unseen = images(16, 24, seed=9).permute(0, 2, 3, 1).numpy()
    want, got = (torch.as_tensor(keras.ops.convert_to_numpy(m(unseen))) for m in (model, result.model))
    assert sqnr(want[..., 4:], got[..., 4:]) > 24 and sqnr(want[..., :4], got[..., :4]) > 24
    assert result.verify([unseen]).exact


def test_parts_of_one_magnitude_are_joined_in_integers():
    model = heads(lambda m, a, b: torch.cat([a, b], 1).flatten(1))
    for platform in ("ort_cpu", "tflite_int8"):
        result = quantized(model, DATA, platform)
        assert result.plan.nodes["cat"].exec != "float" and not any(
            "'cat' is computed in float" in n for n in result.plan.rewrites
        )


@pytest.mark.parametrize("settings", [{}, {"results": "codes"}])
@pytest.mark.parametrize("platform", ["ethos_u", "imx500", "ort_cpu", "tflite_int8"])
def test_a_warning_names_the_part_that_is_lost_where_outputs_are_integers(platform, settings):
    result = quantized(detector(), DATA, platform, settings=chipfit.Settings(**settings))
    found = [note for note in result.plan.rewrites if note.startswith("warning: 'sigmoid_1' keeps ")]
    in_integers = bool(settings) or platform in ("ethos_u", "imx500")
    assert len(found) == in_integers
    if found:  # levels of a grid of 8 bits, whose range is 640 times that of the part
        kept, before = (float(w) for w in found[0].removeprefix("warning: 'sigmoid_1' keeps ").split()[:3:2])
        assert before == 256 and kept < 1
        assert result.report.warnings


@pytest.mark.parametrize("platform", ["ethos_u", "imx500"])
def test_a_warning_names_the_part_that_a_constant_makes_small_beside_others(platform):
    """Scores between 0 and 1 on a grid of 8 bits for pixels up to 640."""
    result = quantized(multiplied(), DATA, platform)
    (found,) = (note for note in result.plan.rewrites if note.startswith("warning: 'sigmoid_1' keeps "))
    assert float(found.split()[3]) < 1 and "on the grid of 'mul" in found


def test_a_constant_that_brings_parts_to_one_magnitude_keeps_the_result_in_integers():
    """Pixels and scores are joined in float, and divided by 640 and 1 afterwards: [0, 1] in all channels."""
    pixels = torch.tensor([640.0] * 10 + [1.0] * 5).reshape(1, 15, 1)
    joined = lambda a, b: torch.cat([(a.sigmoid() * 640).flatten(2), (4 * b).sigmoid().flatten(2)], 1)
    result = quantized(heads(lambda m, a, b: joined(a, b) / pixels.to(a.device)), DATA, "ort_cpu")
    assert not any("'div' is computed in float" in n for n in result.plan.rewrites)


def test_a_file_with_an_output_in_integers_is_refused_with_what_brings_it_back(tmp_path):
    with pytest.raises(UnsupportedError, match="a part of it is lost, with Settings\\(results='codes'\\)"):
        quantized(detector(), DATA, "tflite_int8").export(tmp_path / "m.tflite", io="int8")
    in_codes = quantized(detector(), DATA, "tflite_int8", settings=chipfit.Settings(results="codes"))
    assert in_codes.export(tmp_path / "m.tflite", io="int8").is_file()


def test_a_report_measures_each_part_of_an_output():
    """Boxes alone have over 30 dB, and scores, of which two values are left, less than 10."""
    pytest.importorskip("onnxruntime")
    result = quantized(detector(), DATA, "ort_cpu", settings=chipfit.Settings(results="codes"))
    result.verify([images(16, 24, seed=9)])
    (row,) = (r for r in result.report.layers if r.op == "Concat")
    assert row.sqnr_db is not None and row.sqnr_db < 10
    assert any("overrides={'cat': 'float'} lifts the outputs" in line for line in result.report.tried)


def test_the_user_may_keep_the_output_in_integers():
    result = quantized(detector(), DATA, "tflite_int8", overrides={"cat": {"rule": "no_clipping"}})
    assert result.plan.quantized("cat") and any("warning: 'sigmoid_1'" in note for note in result.plan.rewrites)


# ---------------------------------------------------------------- inside a network


def skip(share):
    """Return a network whose skip connection is 1 / 1000 of what it is joined with, and a `share` of the result."""
    torch.manual_seed(0)
    join = nn.Conv2d(16, 6, 1)
    with torch.no_grad():
        join.weight[:, 8:] *= 1000 * share
        join.bias.zero_()
    layers = {"down": nn.Conv2d(3, 8, 3, padding=1), "side": nn.Conv2d(3, 8, 1), "join": join}
    return model_of(lambda m, x: m.join(torch.cat([100 * m.down(x).relu(), 0.1 * m.side(x)], 1)), **layers)


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])
@pytest.mark.parametrize("share, warned", [(1.0, True), (0.001, False)])
def test_a_skip_connection_that_vanishes_is_reported_if_the_outputs_depend_on_it(platform, share, warned):
    result = quantized(skip(share), DATA, platform)
    found = [note for note in result.plan.rewrites if note.startswith("warning: 'mul_1' keeps ")]
    assert len(found) == warned


def test_a_value_that_shares_the_grid_of_a_larger_one_is_reported():
    """On LiteRT a concatenation and its operands share one grid, which another reader of an operand meets too."""
    layers = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(3, 8, 3), "c": nn.Conv2d(8, 4, 1)}
    torch.manual_seed(0)
    model = model_of(lambda m, x: (m.c(y := m.a(x)), torch.cat([y, 500 * m.b(x)], 1).mean((2, 3))), **layers)
    warned = [n for n in quantized(model, DATA, "tflite_int8").plan.rewrites if "levels on the grid" in n]
    assert len(warned) == 1 and warned[0].startswith("warning: 'conv2d' keeps ")
    assert "on the grid that it shares with larger values" in warned[0]
    assert not any("levels on the grid" in n for n in quantized(model, DATA, "ort_cpu").plan.rewrites)  # no tie


# ---------------------------------------------------------------- what weighs outputs


@pytest.mark.parametrize("platform, tensor", [("ort_cpu", "cat"), ("tflite_int8", "flatten_1_for_cat")])
def test_the_tensor_that_loses_a_part_is_the_most_sensitive(platform, tensor):
    result = quantized(detector(), DATA, platform, settings=chipfit.Settings(results="codes"))
    rows = result.sensitivity(DATA).rows()
    assert rows[0]["tensor"] == tensor and rows[1]["share"] < 0.01


@pytest.mark.parametrize(
    "platform, runtime, sharpness, exec_, db",
    [
        ("ort_cpu", "onnxruntime", 1.0, "float", 25),
        ("tflite_int8", "litert", 1.0, "float", 25),
        ("tflite_int8", "litert", 30.0, "int", 15),
    ],
)
def test_a_result_on_a_dictated_scale_is_in_float_where_that_would_lose_it(platform, runtime, sharpness, exec_, db):
    """A softmax over 484 places has a scale of 1/256: enough for one peak, but not for shares of about 0.002."""

    def heatmap(m, x):
        return torch.softmax(sharpness * m.conv(x).flatten(2), -1).reshape(x.shape[0], 2, 22, 22)

    torch.manual_seed(0)
    net = model_of(heatmap, conv=nn.Conv2d(3, 2, 3))
    result = quantized(net, DATA, platform)
    assert next(result.plan.nodes[n.name].exec for n in result.graph.nodes if n.op == "Softmax") == exec_
    x = images(16, 24, seed=7)
    assert sqnr_db(net(x).detach(), result.model(x).detach()) > db
    assert result.verify([x], runtime=runtime).exact
