"""Layout changes move activations only, and only where they must."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit.calibration.data import first_batch
from chipfit.engine.kernels import KERNELS, execute
from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.check import check
from chipfit.graph.ir import Graph, Node, Value
from chipfit.passes.layout import apply_layout, change_layout, same_numbers
from chipfit.plan.record import NodePlan, Plan
from tests.build import graph_of, model_of, node, plan_of, stored
from tests.zoo import ZOO, make


def captured(model: nn.Module, x: torch.Tensor) -> Graph:
    return capture(model.eval(), (x,), {})


def kinds(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


@pytest.mark.parametrize("name", sorted(ZOO))
def test_there_and_back_a_network_computes_the_same_numbers(name):
    model, batch = make(name)
    (args, kwargs), _ = first_batch([batch], model)
    graph = capture(model, args, kwargs)
    there = change_layout(graph, "channels_last").graph
    check(there)
    back = change_layout(there, "channels_first").graph
    check(back)
    before, after = run(graph, graph.example), run(back, graph.example)
    for a, b in zip(graph.outputs, back.outputs, strict=True):
        assert torch.equal(before[a], after[b])


@pytest.mark.parametrize(
    "layers, ops",
    [
        ([nn.BatchNorm2d(4), nn.Softmax(1), nn.Conv2d(4, 2, 1)], "BatchNorm Softmax Conv2D Transpose"),
        ([nn.Flatten(), nn.Linear(4 * 36, 2)], "Transpose Reshape Linear"),  # read in the model's own order
        ([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)], "GlobalAvgPool Reshape Linear"),
    ],
)
def test_transpositions_stand_at_the_borders_only(layers, ops):
    new = change_layout(captured(nn.Sequential(nn.Conv2d(3, 4, 3), *layers), torch.randn(2, 3, 8, 8)), "channels_last")
    assert kinds(new.graph) == ["Transpose", "Conv2D", *ops.split()]
    assert set(new.layouts.values()) == {(0, 2, 3, 1)}
    assert all(n.attrs["axis"] == 3 for n in new.graph.nodes if n.op == "Softmax")


def test_weights_stay_as_they_are():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.ConvTranspose2d(4, 2, 2))
    graph = captured(net, torch.randn(2, 3, 8, 8))
    there = change_layout(graph, "channels_last").graph
    assert all(there.weights[k] is w for k, w in graph.weights.items())


def test_the_models_own_transpositions_cancel():
    def forward(m, x):
        return x + m.linear(m.norm(m.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)

    layers = {"conv": nn.Conv2d(4, 4, 3, padding=1), "norm": nn.LayerNorm(4), "linear": nn.Linear(4, 4)}
    block = model_of(forward, **layers)
    there = change_layout(captured(nn.Sequential(block, block), torch.randn(2, 4, 5, 5)), "channels_last")
    assert kinds(there.graph).count("Transpose") == 2  # the model's input and output


# ---------------------------------------------------------------- one operator behind a convolution

CONV = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
#: the convolution's result h, [2, 3, 4, 5], and a weight for each channel
WEIGHTS = {"w": torch.randn(3, 3, 1, 1), "c": torch.randn(3, 1, 1), "map": torch.randn(4, 5), "one": torch.tensor(2.0)}
BEHIND = [
    ("Softmax", "h", {"axis": 1}),
    ("Softmax", "h", {"axis": -1}),
    ("Concat", "hh", {"axis": 1}),
    ("Concat", "hx", {"axis": 2}),
    ("Split", "h", {"axis": -1, "sizes": (2, 3)}),
    ("Slice", "h", {"axis": 1, "start": 1, "end": None, "step": 1}),
    ("Select", "h", {"axis": -2, "index": 3}),
    ("Mean", "h", {"axes": (2, 3), "keepdims": True}),
    ("Mean", "h", {"axes": (1,), "keepdims": False}),
    ("Sum", "h", {"axes": (-3, 3), "keepdims": False}),
    ("ArgMax", "h", {"axis": 1, "keepdims": False}),
    ("ArgMax", "h", {"axis": None, "keepdims": False}),
    ("TopK", "h", {"k": 2, "axis": 1, "largest": True}),
    ("Pad", "h", {"padding": ((0, 0), (1, 2), (3, 0), (0, 4)), "mode": "constant", "value": 1.5}),
    ("Roll", "h", {"shifts": (1, 2), "axes": (1, -1)}),
    ("Tile", "h", {"repeats": (2, 1, 1, 1, 1)}),
    ("Transpose", "h", {"perm": (0, 2, 3, 1)}),
    ("Transpose", "h", {"perm": (3, 1, 0, 2)}),
    ("Reshape", "h", {"shape": (-1, 60)}),
    ("Reshape", "h", {"shape": (2, 3, 20)}),
    ("Unsqueeze", "h", {"axes": (1,)}),
    ("Squeeze", "h", {"axes": (1, 2)}),
    ("Add", ["h", "c"], {}),
    ("Mul", ["map", "h"], {}),
    ("Mul", ["h", "one"], {}),
    ("Add", "hx", {}),
    ("Size", "h", {"axis": 1}),
    ("CumSum", "h", {"axis": 1}),
]
BEHIND = [(op, ins, attrs) for op, ins, attrs in BEHIND if op in KERNELS]


def behind(op, inputs, attrs, first=(2, 3, 4, 5), open_axes=(0,)):
    """x -> convolution h -> the operator -> its results, each of which is returned."""
    x = torch.randn(first)
    nodes = [Node("h", "Conv2D", ("x", "w"), ("h",), CONV)]
    known = {"x": x, **WEIGHTS}
    known["h"] = execute(nodes[0], [x, WEIGHTS["w"]])[0]
    probe = Node("it", op, tuple(inputs), ("y0",), attrs)
    results = execute(probe, [known[i] for i in inputs])
    outputs = tuple(f"y{k}" for k in range(len(results)))
    nodes.append(probe.with_(outputs=outputs))
    values = {}
    for name, v in [("x", x), ("h", known["h"]), *zip(outputs, results, strict=True)]:
        if isinstance(v, int):
            values[name] = Value(name, (), "int")
        else:
            opened = open_axes if name in "xh" else (0,) if op != "Transpose" else ()
            shape = tuple(None if k in opened else s for k, s in enumerate(v.shape))
            values[name] = Value(name, shape, str(v.dtype).removeprefix("torch."))
    return Graph(nodes, ["x"], list(outputs), values, dict(WEIGHTS)), x


def same_values(new, graph, x):
    """The convolution aside, which finds its channels elsewhere, each node makes of what it reads now what it made."""
    known = run(graph, [x], keep=list(graph.values))

    def value(name):
        if name in new.graph.weights:
            return new.graph.weights[name]
        source, layout = new.copies.get(name, (name, new.layouts.get(name)))
        return known[source] if layout is None or isinstance(known[source], int) else known[source].permute(layout)

    for n in new.graph.nodes:
        if n.op == "Conv2D":
            assert new.copies.get(n.data, (n.data, new.layouts.get(n.data)))[1] == new.layouts[n.output] == (0, 2, 3, 1)
            continue
        for got, name in zip(execute(n, [value(i) for i in n.inputs]), n.outputs, strict=True):
            want = value(name)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
            if not isinstance(want, int):
                shape = new.graph.values[name].shape
                assert all(s in (None, d) for s, d in zip(shape, want.shape, strict=True))
    return value, known


@pytest.mark.parametrize("axes, shape", [((0, 1, 2, 3), ()), ((0, 1, 2), (5,)), ((0, 1), (4, 5)), ((0,), (3, 4, 5))])
def test_an_operand_of_fewer_axes_meets_the_last_ones_of_the_model(axes, shape):
    graph, x = behind("Mean", "h", {"axes": axes, "keepdims": False})
    graph.nodes.append(Node("sum", "Add", ("h", "y0"), ("z",)))
    graph.outputs.append("z")
    graph.values["z"] = graph.values["h"]
    assert run(graph, [x])["y0"].shape == shape
    new = change_layout(graph, "channels_last")
    same_values(new, graph, x)
    assert (new.graph.outputs[-1] != "z") is (shape == ())  # a single number meets any layout


@pytest.mark.parametrize("change_io", [False, True])
@pytest.mark.parametrize("op, inputs, attrs", BEHIND)
def test_every_value_is_what_it_was_in_the_layout_that_is_returned(op, inputs, attrs, change_io):
    graph, x = behind(op, inputs, attrs)
    new = change_layout(graph, "channels_last", change_io=change_io)
    value, known = same_values(new, graph, x)
    for o, p in zip(graph.outputs, new.graph.outputs, strict=True):
        if not change_io:  # otherwise a result may keep the layout in which it is computed
            torch.testing.assert_close(value(p), known[o], rtol=0, atol=0)


@pytest.mark.parametrize(
    "open_axes, channels, ops",
    [((0,), 3, ["Transpose"]), ((0,), 1, ["Reshape"]), ((0, 2), 1, ["Transpose"]), ((), 1, ["Reshape"])],
)
def test_memory_that_stays_as_it_is_is_read_under_another_shape_where_one_size_at_most_is_open(
    open_axes, channels, ops
):
    shape = tuple(None if k in open_axes else s for k, s in enumerate((2, channels, 4, 5)))
    shapes, weights = {"x": shape, "y": (*shape[:1], 3, *shape[2:])}, {"w": torch.randn(3, 1, 1, 1)}
    graph = graph_of(node("y = Conv2D(x, w)", CONV), shapes=shapes, weights=weights)
    assert kinds(change_layout(graph, "channels_last").graph) == [*ops, "Conv2D", "Transpose"]


def test_values_of_two_axes_have_one_layout():
    norm, weights = node("y = BatchNorm(x, -, -, m, v)", {"eps": 0.1}), {"m": torch.zeros(3), "v": torch.ones(3)}
    new = change_layout(graph_of(norm, shape=(None, 3), weights=weights), "channels_last")
    assert new.graph.nodes == [norm] and new.layouts == {} and new.graph.data_format == "channels_last"


def test_padding_that_reflects_is_of_the_axes_as_a_spatial_operator_has_them():
    padding = ((0, 0), (0, 0), (1, 2), (3, 0))
    graph, _ = behind("Pad", "h", {"padding": padding, "mode": "reflect", "value": 0.0})
    new = change_layout(graph, "channels_last").graph
    assert new.node("it").attrs["padding"] == ((0, 0), (1, 2), (3, 0), (0, 0))
    assert kinds(new) == ["Transpose", "Conv2D", "Pad", "Transpose"]


# ---------------------------------------------------------------- graphs with a plan

KERNEL = {"w": torch.ones(3, 3, 1, 1)}


def plan(float_edges: tuple[tuple[str, str], ...] = (), **scales: float | None) -> Plan:
    nodes = {n: NodePlan(name=n, op="Conv2D", exec="int") for n in ("c", "t")}
    tensors = {n: None if s is None else stored(s) for n, s in scales.items()}
    return replace(plan_of(**tensors, float_edges=float_edges), nodes=nodes)


def one_convolution() -> Graph:
    return graph_of(node("y = Conv2D(x, w)", CONV, name="c", layer="net.conv"), weights=KERNEL, shape=(None, 3, 4, 4))


@pytest.mark.parametrize("scale", [0.5, None])
def test_an_inserted_value_has_the_numbers_of_what_it_rearranges(scale):
    before = plan(x=scale, y=0.25)
    new, after = apply_layout(one_convolution(), before, "channels_last")
    entry, conv, leave = new.graph.nodes
    assert [n.op for n in new.graph.nodes] == ["Transpose", "Conv2D", "Transpose"]
    assert (entry.attrs["perm"], leave.attrs["perm"]) == ((0, 2, 3, 1), (0, 3, 1, 2))
    copy = next(i for i, (source, _) in new.copies.items() if source == "x")
    assert conv.data == copy == entry.output
    if scale is None:
        assert copy not in after.tensors
    else:
        assert after.tensors[copy].name == copy and same_numbers(after, copy, "x")
    rearranged = NodePlan(name=copy, op="Transpose", layer=copy, exec="follow" if scale else "float")
    assert after.nodes[copy] == rearranged  # printed by its own name, as it has no layer
    left = next(i for i, (source, _) in new.copies.items() if source == "y")
    assert after.tensors[left].scale == 0.25 and after.nodes[left].exec == "follow"
    assert after.nodes["c"] == before.nodes["c"] and after.tensors["x"] == before.tensors["x"]
    assert len(after.nodes) == 4 and set(before.tensors) == {"x", "y"} and set(before.nodes) == {"c", "t"}
    assert after.float_edges == frozenset()


def test_what_a_reader_takes_before_it_is_rounded_is_rearranged_in_float():
    new, after = apply_layout(one_convolution(), plan((("x", "c"),), x=0.5, y=0.25), "channels_last")
    entry = new.graph.nodes[0]
    assert entry.output not in after.tensors and after.nodes[entry.name].exec == "float"
    assert after.float_edges == {("x", "c"), ("x", entry.name), (entry.output, "c")}


@pytest.mark.parametrize("scale", [0.5, None])
def test_a_rearranged_constant_has_the_numbers_of_the_one_that_the_user_knows(scale):
    conv, weights = node("y = Conv2D(x, w)", CONV, name="c"), {**KERNEL, "shift": torch.ones(3, 1, 1)}
    graph = graph_of(conv, node("z = Add(y, shift)", name="t"), weights=weights, shape=(None, 3, 4, 4))
    new, after = apply_layout(graph, plan(x=0.5, y=0.5, shift=scale), "channels_last")
    copy = next(i for i, (source, _) in new.copies.items() if source == "shift")
    assert new.graph.weights[copy].shape[-1] == 3 and copy not in after.nodes
    assert (copy in after.tensors) is (scale is not None) and same_numbers(after, copy, "shift")


@pytest.mark.parametrize("shape", [(3, 1, 1), (1, 3, 1, 1)])
def test_a_rearranged_constant_has_its_scales_along_the_axis_that_moved(shape):
    conv, weights = node("y = Conv2D(x, w)", CONV, name="c"), {**KERNEL, "shift": torch.ones(shape)}
    graph = graph_of(conv, node("z = Add(y, shift)", name="t"), weights=weights, shape=(None, 3, 4, 4))
    scales = stored([0.5, 0.25, 0.125], axis=shape.index(3))
    new, after = apply_layout(graph, plan_of(x=stored(), y=stored(), shift=scales), "channels_last")
    copy = next(i for i, (source, _) in new.copies.items() if source == "shift")
    assert new.graph.weights[copy].shape == (1, 1, 1, 3) and after.tensors[copy].axis == 3


def test_inputs_are_held_rearranged_only_if_inputs_and_outputs_may_change():
    def ops(**how: bool) -> list[str]:
        return kinds(apply_layout(one_convolution(), plan(x=0.5, y=0.5), "channels_last", **how)[0].graph)

    assert ops() == ops(change_io=False) == ["Transpose", "Conv2D", "Transpose"]
    assert ops(change_io=True) == ["Conv2D"]


@pytest.mark.parametrize(
    "scales, edges, stays",
    [
        ({"y": 0.5, "z": 0.5}, (), False),
        ({"y": 0.5, "z": 0.25}, (), True),  # the transposition rounds again
        ({"y": 0.5, "z": None}, (), True),
        ({"y": None, "z": 0.5}, (), True),
        ({"y": None, "z": None}, (), False),
        ({}, (), False),  # neither has a plan: float
        ({"y": 0.5, "z": 0.5}, (("z", "r"),), True),  # z has a side that is not rounded
    ],
)
def test_a_transposition_of_the_models_own_stays_where_it_stores_other_numbers(scales, edges, stays):
    """conv, then (0, 2, 3, 1), then ReLU: channels last, the transposition has nothing to do."""
    conv, moved = node("y = Conv2D(x, w)", CONV, name="c"), node("z = Transpose(y)", {"perm": (0, 2, 3, 1)}, name="t")
    shapes = dict.fromkeys("xy", (None, 3, 4, 5)) | dict.fromkeys("zo", (None, 4, 5, 3))
    graph = graph_of(conv, moved, node("o = Relu(z)", name="r"), weights=KERNEL, shapes=shapes)
    planned = plan(edges, x=0.5, **scales)
    for groups, kept in (((), stays), ((("c", "t"),), True)):  # a kernel that transposes stores what it outputs
        new, _ = apply_layout(graph, replace(planned, groups=groups), "channels_last")
        assert ("t" in [n.name for n in new.graph.nodes]) is kept
        assert [n.op for n in new.graph.nodes if n.name in "cr"] == ["Conv2D", "Relu"]


def image_of_one_channel():
    """As read from a file for channels last: the image becomes [N, 1, H, W] by a Reshape."""
    shapes = {"x": (None, 4, 5, 1), "a": (None, 1, 4, 5), "y": (None, 3, 4, 5)}
    nodes = node("a = Reshape(x)", {"shape": (-1, 1, 4, 5)}), node("y = Conv2D(a, w)", CONV)
    return graph_of(*nodes, shapes=shapes, weights={"w": torch.randn(3, 1, 1, 1)})


def test_a_reshape_that_only_moves_axes_of_size_1_is_undone_like_a_transposition():
    graph = image_of_one_channel()
    new = change_layout(graph, "channels_last").graph
    assert kinds(new) == ["Conv2D", "Transpose"] and new.nodes[0].data == "x"
    x = (torch.randn(2, 4, 5, 1),)
    back = change_layout(new, "channels_first").graph
    assert torch.equal(run(back, x)[back.outputs[0]], run(graph, x)["y"])


@pytest.mark.parametrize("scale, ops", [(0.5, ["Conv2D"]), (0.25, ["Reshape", "Reshape", "Conv2D"])])
def test_a_reshape_stays_where_it_stores_other_numbers(scale, ops):
    plan = plan_of(x=stored(0.5), a=stored(scale), y=stored(0.5))
    new, _ = apply_layout(image_of_one_channel(), plan, "channels_last")
    assert kinds(new.graph) == [*ops, "Transpose"]
