"""Composites written out in simpler operators compute the same, in both layouts, and keep their place in the plan."""

from dataclasses import replace

import pytest
import torch

from chipfit.engine.kernels import execute
from chipfit.engine.run import run
from chipfit.engine.shapes import broadcast
from chipfit.graph.check import check
from chipfit.graph.ir import Graph, Node, Value
from chipfit.operators.table import OPS
from chipfit.passes.decompose import RULES, decompose
from chipfit.passes.layout import change_layout
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from tests.build import stored

X, C = (2, 6, 4, 4), 6


def conv(stride, padding, dilation, groups, output_padding):
    """Return the attributes of a transposed convolution."""
    out = {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation)}
    return {**out, "groups": groups, "output_padding": tuple(output_padding)}


def cell(gates):
    return {"w": (gates * 4, 3), "r": (gates * 4, 4), "b": (gates * 4,), "rb": (gates * 4,)}


def attend(causal=False, scale=None, shared=False):
    """Return the attributes of attention."""
    return {"is_causal": causal, "scale": scale, "enable_gqa": shared}


#: operator -> shapes of its data operands, attributes, shapes of its weights by slot
UNEQUAL, FAR = (2, 6, 4, 10), {"eps": 0.3}
NORM = {"w": (C,), "b": (C,)}
MOMENTS = {"mean": (C,), "var": (C,)}
#: operator -> shapes of its data operands (unequal along every axis), attributes, shapes of its weights by slot
CASES: dict[str, list[tuple[list[tuple[int, ...]], dict, dict]]] = {
    "Softplus": [([X], {"beta": 2.0, "threshold": 20.0}, {}), ([UNEQUAL], {"beta": 0.5, "threshold": 0.7}, {})],
    "Curve": [
        ([UNEQUAL], {"steps": '[["Greater", ["0", 0.5], {}], ["Abs", ["0"], {}], ["Where", ["1", "2", 0.25], {}]]'}, {})
    ],
    "Clamp": [([X], {"min": a, "max": b}, {}) for a, b in ((0.0, 0.5), (-0.3, 0.4), (None, 0.2), (-0.1, None))],
    "Neg": [([UNEQUAL], {}, {})],
    "Elu": [([UNEQUAL], {"alpha": 1.9}, {})],
    "Gelu": [([X], {"approximate": "none"}, {}), ([X], {"approximate": "tanh"}, {})],
    "L2Norm": [([X], {"axis": 1, "eps": 1e-12}, {}), ([X], {"axis": -1, "eps": 0.5}, {})],
    "ReduceL2": [([X], {"axes": (1, 3), "keepdims": False}, {}), ([UNEQUAL], {"axes": (-1,), "keepdims": True}, {})],
    "LayerNorm": [
        ([(2, 5, 6)], {"normalized_shape": (6,), **FAR}, {"w": (C,)}),
        ([(2, 5, 6)], {"normalized_shape": (5, 6), "eps": 1e-5}, {}),
        ([(2, 4, 5, 6)], {"normalized_shape": (4, 5, 6), **FAR}, {"w": (4, 5, 6), "b": (4, 5, 6)}),
    ],
    "RMSNorm": [
        ([(2, 5, 6)], {"normalized_shape": (6,), "eps": None}, {"w": (C,)}),
        ([(2, 3, 5, 6)], {"normalized_shape": (5, 6), **FAR}, {"w": (5, 6)}),
    ],
    "GroupNorm": [
        ([UNEQUAL], {"groups": 2, **FAR}, NORM),
        ([(2, 6, 3, 4, 5)], {"groups": 3, **FAR}, NORM),
        ([(2, 6, 5)], {"groups": 1, **FAR}, {"w": (C,)}),
    ],
    "InstanceNorm": [([UNEQUAL], FAR, NORM), ([(2, 6, 5)], FAR, NORM), ([X], {"eps": 1e-5}, {})],
    "BatchNorm": [
        ([UNEQUAL], FAR, {**NORM, **MOMENTS}),
        ([(2, 6, 5)], FAR, {"w": (C,), **MOMENTS}),
        ([(2, 6)], FAR, {"b": (C,), **MOMENTS}),
        ([(2, 6)], FAR, MOMENTS),
    ],
    **{
        f"Adaptive{kind}Pool": [
            ([(2, 6, 5, 8)], {"output_size": (7, 3)}, {}),
            ([(2, 6, 7, 3)], {"output_size": (1, 3)}, {}),
            ([(2, 6, 5)], {"output_size": (4,)}, {}),
            ([(2, 3, 4, 5, 7)], {"output_size": (3, 2, 4)}, {}),
        ]
        for kind in ("Avg", "Max")
    },
    "TransposeConv1D": [([(2, 6, 5)], conv([3], [(1, 2)], [2], 3, [1]), {"w": (6, 2, 4), "b": (6,)})],
    "TransposeConv2D": [
        ([(2, 4, 5, 3)], conv([3, 1], [(1, 2), (0, 1)], [1, 2], 2, [1, 0]), {"w": (4, 3, 4, 2), "b": (6,)}),
        ([(2, 4, 5, 3)], conv([2, 2], [(1, 0)] * 2, [1, 1], 2, [1, 1]), {"w": (4, 3, 3, 3)}),
    ],
    "SDPA": [
        ([(2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)], attend(), {}),
        ([(2, 3, 4, 8)] * 3, attend(causal=True, scale=0.3), {}),
        ([(2, 3, 4, 8)] * 3, attend(), {"mask": (4, 4)}),
        ([(2, 6, 4, 8), *[(2, 2, 5, 8)] * 2], attend(shared=True), {"mask": (1, 5)}),
        ([(2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 6)], attend(causal=True, scale=0.3), {}),
        ([(2, 4, 8), (2, 5, 8), (2, 5, 6)], attend(), {}),
        ([(2, 6, 4, 8), (2, 3, 5, 8), (2, 3, 5, 7)], attend(causal=True, shared=True), {}),
    ],
    "LSTM": [
        ([(2, 5, 3)], {"gates": "ifgo", "reverse": False, "cell_clip": None}, {**cell(4), "h": (2, 4), "c": (2, 4)}),
        ([(2, 5, 3)], {"gates": "iofg", "reverse": True, "cell_clip": 0.3}, {"w": (16, 3), "r": (16, 4)}),
        ([(2, 5, 3)], {"gates": "ifgo", "reverse": True, "cell_clip": None}, {**cell(4), "mask": (2, 5)}),
        ([(2, 3)], {"gates": "ifgo", "reverse": False, "cell_clip": None}, cell(4)),
    ],
    "GRU": [
        ([(2, 5, 3)], {"gates": "rzn", "reverse": False, "reset_after": True}, cell(3)),
        ([(2, 5, 3)], {"gates": "zrn", "reverse": True, "reset_after": False}, cell(3)),
        ([(2, 5, 3)], {"gates": "rzn", "reverse": True, "reset_after": True}, {**cell(3), "lengths": (2,)}),
        ([(2, 1, 3)], {"gates": "zrn", "reverse": False, "reset_after": True}, {"w": (12, 3), "r": (12, 4)}),
        ([(2, 3)], {"gates": "rzn", "reverse": False, "reset_after": False}, {**cell(3), "h": (2, 4)}),
    ],
    "RNN": [
        ([(2, 5, 3)], {"reverse": False, "activation": "tanh"}, cell(1)),
        ([(2, 5, 3)], {"reverse": False, "activation": "tanh"}, {**cell(1), "h": (2, 4), "mask": (2, 5)}),
        ([(2, 5, 3)], {"reverse": True, "activation": "relu"}, {**cell(1), "h": (2, 4)}),
    ],
    "Conv3D": [
        (
            [(2, 4, 3, 4, 5)],
            {"stride": (1, 2, 1), "padding": ((1, 0),) * 3, "dilation": (1, 1, 2), "groups": 2},
            {"w": (6, 2, 2, 3, 2), "b": (6,)},
        )
    ],
    "Resize": [
        ([UNEQUAL], {"mode": "cubic", "size": (9, 5), "scale": None, "align_corners": True}, {}),
        ([X], {"mode": "cubic", "size": None, "scale": (2.0, 1.7), "align_corners": False}, {}),
    ],
    "GridSample": [
        ([UNEQUAL, (2, 4, 3, 2)], {"mode": mode, "padding_mode": outside, "align_corners": corners}, {})
        for mode in ("bilinear", "nearest")
        for outside, corners in (("zeros", False), ("border", True))
    ],
    "Pad": [
        ([UNEQUAL], {"padding": ((0, 0), (0, 0), (1, 2), (0, 1)), "mode": "replicate", "value": 0.0}, {}),
        ([X], {"padding": ((0, 0), (0, 0), (0, 0), (3, 0)), "mode": "replicate", "value": 0.0}, {}),
    ],
    "Roll": [([X], {"shifts": (1, -2), "axes": (2, 3)}, {}), ([UNEQUAL], {"shifts": (3, -7), "axes": (1, 3)}, {})],
    "SpaceToDepth": [([UNEQUAL], {"block": 2}, {}), ([(2, 5, 6, 9)], {"block": 3}, {})],
    "ChannelShuffle": [([UNEQUAL], {"groups": 2}, {}), ([(2, 6, 5)], {"groups": 3}, {})],
    "Stack": [([(2, 3, 4)] * 3, {"axis": 2}, {}), ([(2, 3, 4)] * 3, {"axis": -2}, {})],
    "Unstack": [([(2, 4, 3)], {"axis": -1}, {}), ([(2, 4, 3)], {"axis": 1}, {})],
    "NotEqual": [([X, X], {}, {})],
    **{op: [([X, X], {}, {})] for op in ("FloorDiv", "SquaredDifference")},
    "Tile": [([UNEQUAL], {"repeats": (1, 2, 1, 3)}, {}), ([UNEQUAL], {"repeats": (1, 1, 1, 1)}, {})],
    "Expand": [([(2, 1, 4, 1)], {"shape": (-1, 6, -1, 5)}, {})],
}


def composite(op: str, shapes, attrs, weights) -> Graph:
    """A graph of that one operator, between two others; its batch is open."""
    torch.manual_seed(0)
    names = [f"x{k}" for k in range(len(shapes))]
    table = {slot: torch.rand(shape) + 0.5 for slot, shape in weights.items()}
    if "mask" in table:
        table["mask"] = table["mask"] > 1.0
    if "lengths" in table:
        table["lengths"] = torch.tensor([3, 5])
    data = iter(names)
    slots = [s.rstrip("?*") for s in OPS[op].slots]
    slots = [f"in{k}" for k in range(len(names))] if slots == ["ins"] else slots
    inputs = tuple(s if s in table else next(data, None) if s.startswith("in") else None for s in slots)
    example = tuple(torch.randn(s) for s in shapes)
    known = {**table, **dict(zip(names, example))}
    found = execute(Node("it", op, inputs, ("y0",), attrs), [known.get(i or "") for i in inputs])
    outputs = tuple(f"y{k}" for k in range(len(found)))
    values = {n: Value(n, (None, *x.shape[1:])) for n, x in zip(names, example)}
    for name, y in zip(outputs, found):
        values[name] = Value(name, (None, *y.shape[1:]), str(y.dtype).removeprefix("torch."))
    values["z"] = replace(values["y0"], name="z")
    nodes = [Node("it", op, inputs, outputs, attrs, layer="block"), Node("after", "Identity", ("y0",), ("z",))]
    graph = Graph(nodes, names, ["z", *outputs], values, table, example=example)
    check(graph)
    return graph


#: operators whose rule is about some of them only: quotients by constants
IN_PART = {"Div"}
EVERY = [(op, k) for op in sorted(set(RULES) - IN_PART) for k in range(len(CASES.get(op, [()])))]


def case(op: str, k: int) -> Graph:
    return composite(op, *(CASES[op][k] if op in CASES else ([X], {}, {})))


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize("held", [(), ("Rsqrt", "Softplus")], ids=["nothing", "some"])
@pytest.mark.parametrize("op, k", EVERY)
def test_what_a_composite_becomes_computes_the_same(op, k, held, layout):
    graph = case(op, k)
    held = {*held} - {op}
    new, _, reasons = decompose(change_layout(graph, layout).graph, Plan(), held)
    check(new)
    assert {new.node(n).op for n in reasons} <= IN_PART
    assert not {n.op for n in new.nodes} & (set(RULES) - held - IN_PART - {op if "Conv" in op else ""})
    back = change_layout(new, "channels_first").graph
    want, got = run(graph, list(graph.example)), run(back, list(graph.example), keep=list(back.values))
    for o, p in zip(graph.outputs, back.outputs, strict=True):
        torch.testing.assert_close(got[p].float(), want[o].float(), atol=2e-5, rtol=1e-4, equal_nan=True)
    for name in {*new.values} & {*back.values}:  # values between have the shapes that the graph states
        if new.values[name].shape == back.values[name].shape:  # the layout pass did not touch it
            pairs = list(zip(new.values[name].shape, got[name].shape, strict=True))
            assert all(a in (None, b) for a, b in pairs), (name, pairs)


def test_results_stay_stored_and_the_values_between_stay_float():
    graph = case("Mish", 0)
    plan = Plan(
        tensors={v: TensorPlan(name=v, role="activation", stored=stored(0.1)) for v in ("x0", "y0")},
        nodes={"it": NodePlan(name="it", op="Mish", exec="int"), "after": NodePlan(name="after", op="Identity")},
        groups=(("it", "after"),),
        float_edges=frozenset({("x0", "it")}),
    )
    new, after, _ = decompose(graph, plan, {"Softplus"})
    soft, tanh, mul, last = new.nodes
    assert [n.op for n in new.nodes] == ["Softplus", "Tanh", "Mul", "Identity"]
    assert soft.attrs == {"beta": 1.0, "threshold": 20.0}  # as torch's mish has it
    assert (mul.name, mul.output, mul.layer) == ("it", "y0", "block")
    assert after.tensors is plan.tensors
    assert (after.nodes["it"].op, after.nodes["it"].exec) == ("Mul", "float")
    assert after.groups == ((soft.name, tanh.name, "it", last.name),)
    assert after.float_edges == {("x0", soft.name), ("x0", "it")}
    assert graph.nodes[0].op == "Mish"


def test_what_is_held_stays_unless_it_is_named():
    graph = case("Swish", 0)
    assert decompose(graph, Plan(), {"Swish"})[0].nodes == graph.nodes
    assert [n.op for n in decompose(graph, Plan(), {"Swish"}, {"it"})[0].nodes] == ["Sigmoid", "Mul", "Identity"]


def test_heads_that_share_keys_are_written_out_for_any_length():
    graph = composite("SDPA", *CASES["SDPA"][3])
    heads = {"x0": 6, "y0": 6, "z": 6, "x1": 2, "x2": 2}
    graph.values |= {x: Value(x, (None, h, None, 8)) for x, h in heads.items()}
    graph.weights["mask"] = torch.rand(6, 1, 9) > 0.2
    new = decompose(graph, Plan(), ())[0]
    check(new)
    longer = [torch.randn(3, heads[x], size, 8) for x, size in (("x0", 7), ("x1", 9), ("x2", 9))]
    want = torch.nn.functional.scaled_dot_product_attention(*longer, graph.weights["mask"], enable_gqa=True)
    torch.testing.assert_close(run(new, longer)["z"], want, atol=2e-5, rtol=1e-4)


def test_a_row_that_sees_nothing_gets_numbers():
    graph = composite("SDPA", *CASES["SDPA"][2])
    graph.weights["mask"] = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    got = run(decompose(graph, Plan(), ())[0], list(graph.example))["z"]
    want = run(graph, list(graph.example))["z"]
    assert got.isfinite().all()
    torch.testing.assert_close(got[:, :, 1:], want[:, :, 1:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("op", ["Erf", "Gelu", "Softplus", "Mish", "Elu", "Selu"])
def test_functions_are_right_far_from_zero_too(op):
    graph = composite(op, [(2, 301)], *CASES[op][0][1:] if op in CASES else ({}, {}))
    x = torch.stack([torch.linspace(-30, 30, 301), torch.linspace(-3, 3, 301)])
    want, got = run(graph, [x])["y0"], run(decompose(graph, Plan(), ())[0], [x])["y0"]
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("threshold, compared", [(16.5, True), (17.0, False), (17.5, False)])
def test_where_float32_tells_no_difference_a_threshold_is_left_out(threshold, compared):
    graph = composite("Softplus", [X], {"beta": 1.0, "threshold": threshold}, {})
    assert ("Sign" in [n.op for n in decompose(graph, Plan(), ())[0].nodes]) is compared


@pytest.mark.parametrize("op, k", [("BatchNorm", 0), ("TransposeConv2D", 0)])
@pytest.mark.parametrize("slot", [1, 2])
def test_weights_that_are_computed_are_not_written_out(op, k, slot):
    graph = composite(op, *CASES[op][k])
    name = graph.nodes[0].inputs[slot]
    graph.values[name] = Value(name, tuple(graph.weights.pop(name).shape))
    graph.inputs.append(name)
    new, _, reasons = decompose(graph, Plan(), ())
    assert new.nodes == graph.nodes and "computed at run time" in reasons["it"]


OPEN = "a size of it is only known at run time"


@pytest.mark.parametrize(
    "op, k, x, why",
    [
        ("SpaceToDepth", 0, (None, 6, None, 4), ""),
        ("ChannelShuffle", 0, (None, 6, None, 4), ""),
        ("GroupNorm", 0, (None, 6, 4, None), OPEN),
        ("Roll", 0, (None, 6, None, 4), OPEN),
        ("Roll", 0, (None, None, 4, 4), ""),  # an axis along which nothing moves
        ("ReduceL2", 0, (None, None, None, None), ""),
        ("SDPA", 1, (None, 3, None, 8), "a causal mask needs a fixed sequence length"),
    ],
)
def test_open_sizes_are_refused_where_they_count(op, k, x, why):
    graph = case(op, k)
    graph.values |= {name: Value(name, x) for name in graph.inputs}
    new, _, reasons = decompose(graph, Plan(), ())
    assert reasons == ({"it": why} if why else {}) and (new.nodes == graph.nodes) is bool(why)


@pytest.mark.parametrize("mask", ["condition", "added", "causal"])
def test_masks_are_applied_and_hidden_scores_make_no_denormal_numbers_in_onnx_files(mask):
    shapes, *_ = CASES["SDPA"][0]
    graph = composite("SDPA", shapes, attend(mask == "causal"), {} if mask == "causal" else {"mask": (4, 5)})
    seen = torch.ones(4, 5, dtype=torch.bool).tril()
    if mask != "causal":
        added = torch.randn(4, 5).masked_fill(~seen, torch.finfo(torch.float32).min)
        graph.weights["mask"] = seen if mask == "condition" else added
    least = torch.finfo(torch.float32).tiny
    for holds, denormal in (((), True), (("Softmax",), False)):
        new = decompose(graph, Plan(), holds)[0]
        check(new)
        weights = next(run(new, list(graph.example), keep=[n.output])[n.output] for n in new.nodes if n.op == "Softmax")
        assert bool((weights < least).any()) == denormal
        want = torch.nn.functional.scaled_dot_product_attention(*graph.example, graph.weights.get("mask", seen))
        torch.testing.assert_close(run(new, list(graph.example))["y0"], want, atol=2e-6, rtol=1e-5)


def test_a_known_bias_of_scores_hides_none():
    shapes, attrs, _ = CASES["SDPA"][0]
    graph = composite("SDPA", shapes, attrs, {"mask": (4, 5)})
    for least, ops in ((-79.0, 0), (-81.0, 1)):
        graph.weights["mask"] = torch.linspace(least, 3.0, 20).view(4, 5)
        assert [n.op for n in decompose(graph, Plan(), ("Softmax",))[0].nodes].count("ReduceMax") == ops


def test_composites_share_equal_constants_and_no_names():
    graph = case("Gelu", 0)
    first, last = graph.nodes
    graph.nodes = [first, last.with_(op="Gelu", attrs=first.attrs, layer="other")]
    new = decompose(graph, Plan(), {"Div", "Erf"})[0]
    check(new)
    assert len(new.weights) == 3  # sqrt 2, 1, 1/2
    assert len({n.name for n in new.nodes}) == len(new.nodes) == 10
    assert [n.layer for n in new.nodes] == ["block"] * 5 + ["other"] * 5
    assert [n.name for n in new.nodes][4::5] == ["it", "after"] and graph.weights == {}


@pytest.mark.parametrize(
    "shapes, found",
    [
        ([(3, 1), (1, 4)], (3, 4)),
        ([(4,), (2, 3, 1)], (2, 3, 4)),
        ([(None, 1), (5,)], (None, 5)),
        ([(1,), (None,)], (None,)),
    ],
)
def test_the_shape_of_what_is_broadcast(shapes, found):
    assert broadcast(shapes) == found


def test_edges_of_others_are_kept_and_groups_grow():
    graph = case("Swish", 0)
    other = frozenset({("x0", "after"), ("x9", "it"), ("x0", "gone")})
    plan = Plan(nodes={"it": NodePlan(name="it", op="Swish", exec="int")}, groups=(("after",),), float_edges=other)
    after = decompose(graph, plan, ())[1]
    assert after.groups == (("after",),) and after.float_edges == frozenset()
    plan = replace(plan, float_edges=frozenset({("y0", "after"), ("x0", "it")}))
    sigmoid = "it/sigmoid"
    assert decompose(graph, plan, ())[1].float_edges == {("y0", "after"), ("x0", sigmoid), ("x0", "it")}
