"""A saved graph whose attributes, shapes or types do not fit its operators is refused before it runs."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from chipfit.engine.check_runs import attribute_type, check_runs
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph, Value
from chipfit.operators.table import ATTRIBUTES, OPS
from chipfit.plan.saved import check_stored, scales_fit
from tests.build import images, plan_of, quantized, randn, sequential, stored
from tests.export.operators import alone


def of_one(op: str, **changed) -> Graph:
    """Return a graph of one operator with some attributes changed."""
    graph = alone(op)[0]
    graph.nodes = [n.with_(attrs={**n.attrs, **changed}) for n in graph.nodes]
    if op == "Size":
        graph.values["y0"] = Value("y0", (), "int")
    return graph


@pytest.mark.parametrize("op", OPS)
def test_a_graph_of_every_operator_runs(op):
    check_runs(of_one(op))


def test_every_attribute_has_a_kind_and_no_other():
    assert set(ATTRIBUTES) == {a for row in OPS.values() for a in row.attrs}


@pytest.mark.parametrize(
    "op, attribute, bad",
    [
        *(
            ("Conv2D", name, bad)
            for name in ("stride", "dilation")
            for bad in ((0, 1), (1, -1), (1, 2**40), (1,), 1, None)
        ),
        ("Conv2D", "padding", ((-1, -1), (0, 0))),
        ("DepthwiseConv2D", "groups", True),
        ("TransposeConv2D", "output_padding", (0, 1)),
        ("MaxPool", "kernel", (0, 2)),
        ("MaxPool", "ceil_mode", 1),
        ("AdaptiveAvgPool", "output_size", (0, 4)),
        ("LayerNorm", "eps", math.nan),
        ("GroupNorm", "eps", -1e-5),
        ("LeakyRelu", "negative_slope", math.inf),
        ("Clamp", "max", math.nan),
        ("Slice", "step", 0),
        ("Softmax", "axis", 1.0),
        ("Softmax", "extra", 1),
        ("Resize", "size", (9.0, 7.0)),
        ("Tile", "repeats", (1, 2, 1, -1)),
        ("DepthToSpace", "block", 0),
    ],
)
def test_a_value_that_no_kernel_supports_is_refused(op, attribute, bad):
    with pytest.raises(PlanError, match=f"{attribute}|do not fit"):
        check_runs(of_one(op, **{attribute: bad}))


def test_a_kernel_of_one_pixel_shows_no_dilation_in_its_shapes_and_is_refused_all_the_same():
    for dilation in ((1, 1), (0, 0)):
        graph = of_one("Conv2D", padding=((0, 0), (0, 0)), dilation=dilation)
        graph.weights["x1"] = graph.weights["x1"][..., :1, :1]
        if dilation == (1, 1):
            check_runs(graph)
    with pytest.raises(PlanError, match="dilation.*at least 1"):
        check_runs(graph)


def test_an_axis_too_many_is_refused_although_meta_tensors_do_not_show_it():
    three = {"stride": (1,) * 3, "dilation": (1,) * 3, "padding": ((1, 1),) * 3}
    with pytest.raises(PlanError, match="so many spatial axes.*'stride': 3"):
        check_runs(of_one("Conv2D", stride=(1, 1, 1)))
    with pytest.raises(PlanError, match="stride is .*the image has 2 axes.*Conv2D"):
        check_runs(of_one("Conv2D", **three))


@pytest.mark.parametrize("low, high", [(-math.inf, 6.0), (0, math.inf), (None, 3), (-3.4e38, None)])
def test_a_clamp_may_be_open(low, high):
    check_runs(of_one("Clamp", min=low, max=high))


def test_a_saved_bias_of_another_length_and_an_input_of_another_rank_are_refused():
    graph = quantized(sequential(nn.Conv2d(3, 4, 3)), images(2, 6)).graph.copy()
    check_runs(graph)
    short = {name: w[:1] if w.dim() == 1 else w for name, w in graph.weights.items()}
    with pytest.raises(PlanError, match=r"has the shape \[1\], not \[4\]"):
        check_runs(replace(graph, weights=short))
    name = graph.inputs[0]
    graph.values[name] = replace(graph.values[name], shape=(None, 3, 6, 6, None, 3))
    with pytest.raises(PlanError, match="a weight of 4 axes for 6"):
        check_runs(graph)


def test_a_saved_axis_that_no_value_has_is_refused():
    graph = quantized(nn.Softmax(-1), randn(2, 4), "imx500").graph.copy()
    check_runs(graph)
    graph.nodes = [n.with_(attrs={**n.attrs, "axis": 64}) for n in graph.nodes]
    with pytest.raises(PlanError, match="is 64, and it works on 2 axes"):  # torch's kernel without numbers takes it
        check_runs(graph)


@pytest.mark.parametrize(
    "sizes, shape, axis, fits",
    [
        ([3], (4, 3, 2), 1, True),
        ([3], (4, 3, 2), 0, False),
        ([6, 2], (6, 8), 1, True),  # blocks of four
        ([6, 3], (6, 8), 1, False),
        ([6, 2], (6, 9), 1, False),
        ([2, 8], (6, 8), 0, True),
        ([2, 8], (6, 8), 1, False),
        ([6, 8], (6, 8), 1, True),
        ([6, 0], (6, 8), 1, False),
        ([6, 2], (6, None), 1, False),
        ([6, 2], (6, 8, 1), 1, False),
    ],
)
def test_scales_are_one_along_an_axis_or_of_blocks_along_it(sizes, shape, axis, fits):
    assert scales_fit(sizes, shape, axis) is fits


@pytest.mark.parametrize(
    "count, shape, axis, fits",
    [
        (0, (4, 3), None, True),
        (3, (3,), None, True),  # of one axis it need not be said
        (4, (3,), None, False),
        (3, (4, 3), -1, True),
        (4, (4, 3), -3, False),
        (3, (3,), 0, True),
    ],
)
def test_scales_lie_along_an_axis_of_their_tensor(count, shape, axis, fits):
    graph = Graph([], [], [], {}, {"w": torch.ones(shape)})
    t = plan_of(w=stored([1.0] * count if count else 1.0, axis=axis)).tensors["w"]
    if fits:
        check_stored(t, graph)
    else:
        with pytest.raises(PlanError, match="The scales of 'w' do not fit its shape"):
            check_stored(t, graph)
    check_stored(t.with_(stored=None), graph)


@pytest.mark.parametrize(
    "kind, least, most", [("int", 1 - 2**31, 2**31 - 1), ("size", 0, 2**31 - 1), ("count", 1, 2**31 - 1)]
)
def test_integers_among_attributes_end_where_32_bits_do(kind, least, most):
    validate = TypeAdapter(attribute_type(kind)).validate_python
    assert [validate(least), validate(most)] == [least, most]
    for beyond in (least - 1, most + 1):
        with pytest.raises(ValidationError, match="should be"):
            validate(beyond)
