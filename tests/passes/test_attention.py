"""Attention that is written out becomes one operator that computes the same, and what only looks like it does not."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.check import check
from chipfit.graph.ir import Node, Value
from chipfit.passes.attention import attention
from chipfit.passes.decompose import decompose
from chipfit.passes.fold_constants import fold_constants
from chipfit.plan.record import Plan
from chipfit.platform.load import load
from tests.build import graph_of, model_of, node, quantized
from tests.steps import assert_same

H, T, D = 3, 5, 4
LEAST = torch.finfo(torch.float32).min
FUTURE = torch.ones(T, T, dtype=torch.bool).triu(1)
NO_SCORES = "its scores are not a product, scaled and masked, that the softmax alone reads"


def spelled(function) -> nn.Module:
    """Return a function of a model, q, k, v and a mask as a model with dropout, and numbers that it may learn."""
    return model_of(function, dropout=nn.Dropout(0.1), number=torch.tensor(0.7), keys=torch.randn(D, T))


def operands(batch: int = 2, heads: int = H) -> tuple[torch.Tensor, ...]:
    """q, k, v [N, H, T, D] and a mask [N, 1, T, T] of which every row keeps something."""
    torch.manual_seed(batch)
    mask = torch.rand(batch, 1, T, T) > 0.4
    mask[..., 0] = True
    return (*(torch.randn(batch, heads, T, D) for _ in range(3)), mask)


def captured(function, example=None):
    graph = capture(spelled(function), example or operands(), {})
    return fold_constants(graph)[0]


def recognised(graph, listed=lambda graph, node: True):
    new, notes = attention(graph, listed)
    check(new)
    return new, notes


def added(mask):
    return torch.where(mask, 0.0, LEAST)


def filled(q, k, where, number):
    return (q @ k.mT / 2).masked_fill(where, number).softmax(-1)


def merged(x):
    return x.reshape(-1, *x.shape[2:])


def through_bmm(m, q, k, v, mask):
    scores = torch.bmm(merged(q) * 0.5, merged(k).transpose(1, 2)).view(-1, H, T, T) + added(mask)
    weights = m.dropout(scores.view(-1, T, T).softmax(-1))
    return torch.bmm(weights, merged(v)).view(-1, H, T, D)


def by_letters_with_heads_behind(m, q, k, v, mask):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2 + added(mask)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).transpose(1, 2)


def masked_again_above_the_product(m, q, k, v, mask):
    bias = added(mask).expand(-1, H, -1, -1).reshape(-1, T, T)
    scores = torch.baddbmm(bias, merged(q), merged(k).transpose(1, 2), beta=1.0, alpha=0.5)
    weights = scores.view(-1, H, T, T).masked_fill(FUTURE, LEAST).softmax(-1)
    return torch.bmm(weights.view(-1, T, T), merged(v)).view(-1, H, T, D)


def masked_by_rows_above(m, q, k, v, mask):
    scores = torch.baddbmm(added(mask)[:1, 0], merged(q), merged(k).transpose(1, 2), beta=1.0, alpha=0.5)
    weights = (scores.view(-1, H, T, T) + added(mask)).softmax(-1)
    return torch.bmm(weights.view(-1, T, T), merged(v)).view(-1, H, T, D)


LETTERS = "bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd"
#: spelling -> its function, and arguments of F.scaled_dot_product_attention for it
SPELLINGS = {
    "no scale": (lambda m, q, k, v, _: (q @ k.mT).softmax(-1) @ v, {"scale": 1.0}),
    "times": (lambda m, q, k, v, _: (q @ k.mT * 0.3).softmax(-1) @ v, {"scale": 0.3}),
    "divided": (lambda m, q, k, v, _: (q @ k.mT / math.sqrt(D)).softmax(3) @ v, {}),
    "scaled columns": (lambda m, q, k, v, _: (q @ (0.25 * k.mT)).softmax(-1) @ v, {"scale": 0.25}),
    "all three": (lambda m, q, k, v, _: ((q * 0.6) @ (k.mT * 0.5) * 2).softmax(-1) @ v, {"scale": 0.6}),
    "a float mask": (lambda m, q, k, v, mask: (q @ k.mT / 2 + added(mask)).softmax(-1) @ v, {"attn_mask": 0}),
    "filled": (lambda m, q, k, v, mask: filled(q, k, ~mask, -1e9) @ v, {"attn_mask": 0}),
    "filled with the least": (
        lambda m, q, k, v, mask: torch.where(mask, q @ k.mT / 2, LEAST).softmax(-1) @ v,
        {"attn_mask": 0},
    ),
    "filled with -inf": (lambda m, q, k, v, mask: filled(q, k, ~mask, -math.inf) @ v, {"attn_mask": 0}),
    "masked keys": (lambda m, q, k, v, mask: (q @ k.mT / 2 + added(mask[:, :, :1])).softmax(-1) @ v, {"attn_mask": 1}),
    "causal, added": (
        lambda m, q, k, v, _: (q @ k.mT / 2 + torch.full((T, T), -math.inf).triu(1)).softmax(-1) @ v,
        {"is_causal": True},
    ),
    "causal, filled": (lambda m, q, k, v, _: filled(q, k, FUTURE[None, None], LEAST) @ v, {"is_causal": True}),
    "letters": (
        lambda m, q, k, v, _: torch.einsum(LETTERS[1], (torch.einsum(LETTERS[0], q, k) / 2).softmax(-1), v),
        {},
    ),
    "letters, heads behind": (by_letters_with_heads_behind, {"attn_mask": 0}),
    "products of three axes": (through_bmm, {"attn_mask": 0}),
    "two masks of different ranks": (masked_again_above_the_product, {"attn_mask": 2}),
}
MASKS = (lambda mask: mask, lambda mask: mask[:, :, :1], lambda mask: mask & ~FUTURE)


def assert_attends(graph, q, k, v, mask, **how):
    """Check a graph against torch's own attention."""
    how = {**how, "attn_mask": MASKS[how["attn_mask"]](mask)} if "attn_mask" in how else how
    (got,) = run(graph, [q, k, v, mask]).values()
    want = F.scaled_dot_product_attention(q, k, v, **how)
    torch.testing.assert_close(got.view(want.shape), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_becomes_the_operator_that_torch_has_for_it(name):
    function, how = SPELLINGS[name]
    graph = captured(function)
    new, notes = recognised(graph)
    (made,) = [n for n in new.nodes if n.op == "SDPA"]
    assert len(notes) == 1 and notes[0].endswith("became one SDPA")
    assert not {n.op for n in new.nodes} & {"MatMul", "Softmax", "Mul", "Div", "Dropout"}
    assert made.attrs["is_causal"] == how.get("is_causal", False)
    assert made.attrs["scale"] == pytest.approx(how.get("scale", D**-0.5))
    assert ("attn_mask" in how) == (made.operand("mask") is not None)
    other = operands(batch=4)
    assert_attends(new, *other, **how)
    parts = decompose(new, Plan(), ())[0]  # and back
    check(parts)
    assert "SDPA" not in {n.op for n in parts.nodes}
    assert_same(graph, parts, *other, atol=2e-6)


@pytest.mark.parametrize("name", ["times", "a float mask", "causal, filled", "letters"])
def test_heads_may_be_open_as_the_batch_is(name):
    function, how = SPELLINGS[name]
    graph = captured(function)
    graph.values = {k: replace(v, shape=tuple(None if d == H else d for d in v.shape)) for k, v in graph.values.items()}
    assert_attends(recognised(graph)[0], *operands(batch=1, heads=7), **how)


def test_operands_of_three_axes_get_those_of_the_mask():
    def function(m, q, k, v, mask):
        scores = torch.bmm(-merged(q), (-merged(k)).transpose(1, 2)).view(-1, H, T, T) + added(mask)
        return torch.bmm(scores.view(-1, T, T).softmax(-1), -merged(v))

    graph = captured(function)
    new, _ = recognised(graph)
    assert_same(graph, new, *operands(batch=4), atol=2e-6)
    assert [n.op for n in new.nodes][-5:] == ["Reshape", "Reshape", "Reshape", "SDPA", "Reshape"]
    assert [new.shape(n.output)[1:] for n in new.nodes][-5:] == [(H, T, D)] * 4 + [(T, D)]


@pytest.mark.parametrize("size, why", [(H, NO_SCORES), (D, "several sizes of its operands are only known at run time")])
def test_axes_that_are_split_into_several_open_ones_are_not_guessed(size, why):
    graph = captured(through_bmm)
    opened = {k: tuple(None if d == size else d for d in v.shape) for k, v in graph.values.items()}
    graph.values = {k: replace(v, shape=opened[k]) for k, v in graph.values.items()}
    new, notes = recognised(graph)
    assert new.nodes == graph.nodes
    assert [n.partition(" stays in its parts: ")[2] for n in notes] == [why]


def test_a_row_of_which_nothing_is_kept_is_the_mean_as_before():
    *qkv, mask = operands()
    mask[0, 0, 2] = False
    for name in ("filled", "filled with the least", "a float mask"):
        graph = captured(SPELLINGS[name][0])
        new = recognised(graph)[0]
        assert_same(graph, new, *qkv, mask, atol=2e-6)
        (got,) = run(new, [*qkv, mask]).values()
        torch.testing.assert_close(got[0, :, 2], qkv[2][0].mean(1), atol=2e-6, rtol=1e-5)


# ---------------------------------------------------------------- near misses


def also(read):
    """Attention whose scores or weights are read once more."""
    return lambda m, q, k, v, _: read(s := q @ k.mT / 2, w := s.softmax(-1), w @ v)


NOT_ALONE = "its weights are not read by one product alone"
#: why a graph that resembles attention is not -> its function
NEAR = [
    ("its softmax is over another axis", lambda m, q, k, v, _: (q @ k.mT).softmax(-2) @ v),
    (NO_SCORES, lambda m, q, k, v, _: (q @ k.mT * torch.rand(H, 1, 1)).softmax(-1) @ v),  # a scale for each head
    (NO_SCORES, lambda m, q, k, v, _: (q @ k.mT * m.number).softmax(-1) @ v),  # a learned scale
    (NO_SCORES, lambda m, q, k, v, mask: filled(q, k, ~mask, -1e4) @ v),  # which scores may reach
    (NO_SCORES, lambda m, q, k, v, mask: torch.where(mask, q @ k.mT, 1e9).softmax(-1) @ v),
    (NO_SCORES, also(lambda s, w, y: y + s.sum(-1, keepdim=True))),
    (NOT_ALONE, lambda m, q, k, v, mask: ((q @ k.mT).softmax(-1) + added(mask)) @ v),
    (NOT_ALONE, lambda m, q, k, v, _: v.mT @ (q @ k.mT).softmax(-1)),
    (NOT_ALONE, also(lambda s, w, y: y + w.amax(-1, keepdim=True))),
    ("its masks are of different ranks", masked_by_rows_above),
    ("an operand is a constant", lambda m, q, k, v, _: (q @ m.keys).softmax(-1) @ v),
    ("the axes in front of its operands differ", lambda m, q, k, v, _: (q @ k[:, :1].mT).softmax(-1) @ v),
]


@pytest.mark.parametrize("why, function", NEAR)
def test_what_only_resembles_attention_stays_and_the_note_gives_the_reason(why, function):
    graph = captured(function)
    new, notes = recognised(graph)
    assert new.nodes == graph.nodes
    assert [n.partition(" stays in its parts: ")[2] for n in notes] == [why]


def test_nothing_is_said_of_a_softmax_without_products():
    assert recognised(captured(lambda m, q, k, v, _: (q + k).softmax(-1) * v))[1] == []


def test_a_scale_for_each_head_of_the_queries_stays_outside():
    factors = torch.rand(H, 1, 1) + 0.5
    graph = captured(lambda m, q, k, v, _: ((q * factors * 0.3) @ k.mT).softmax(-1) @ v)
    new, _ = recognised(graph)
    assert [n.op for n in new.nodes] == ["Mul", "SDPA"] and new.nodes[1].attrs["scale"] == pytest.approx(0.3)
    assert_same(graph, new, *operands(batch=4), atol=2e-6)


def test_a_factor_of_queries_that_are_read_elsewhere_stays_outside():
    new, _ = recognised(captured(lambda m, q, k, v, _: ((q := q * 0.3) @ k.mT).softmax(-1) @ v + q))
    assert [n.op for n in new.nodes] == ["Mul", "SDPA", "Add"]
    assert new.nodes[1].attrs["scale"] == 1.0


# ---------------------------------------------------------------- platforms


def block(attend) -> nn.Module:
    """Return attention of one head between linear layers."""
    torch.manual_seed(0)
    layers = {"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)}
    return model_of(lambda m, x: m.out(attend(x, *m.qkv(x).chunk(3, -1))), **layers)


def in_parts(x, q, k, v):
    return (q @ k.mT / math.sqrt(8)).softmax(-1) @ v


@pytest.mark.parametrize("platform", ["ncnn", "openvino_cpu"])
def test_a_chip_with_attention_gets_one_operator_from_either_spelling(platform):
    data = [torch.randn(4, 6, 8) for _ in range(2)]
    functions = (lambda x, *qkv: F.scaled_dot_product_attention(*qkv)), in_parts
    one, other = (quantized(block(attend), data, platform) for attend in functions)
    assert [n.op for n in one.graph.nodes] == [n.op for n in other.graph.nodes]
    runs = [[(n.op, n.exec) for n in r.plan.nodes.values()] for r in (one, other)]
    assert ("SDPA", "int") in runs[0] and runs[0] == runs[1]
    scales = [[t.scale.tolist() for t in r.plan.tensors.values() if t.quantized] for r in (one, other)]
    assert scales[0] == scales[1]
    assert "the products and the softmax of 'matmul_1' became one SDPA" in other.plan.rewrites
    torch.testing.assert_close(other.model(data[0]), one.model(data[0]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8", "imx500", "snpe"])
def test_a_chip_that_does_not_name_attention_gets_the_parts(platform):
    rows = chipfit.lint(block(in_parts), torch.randn(4, 6, 8), platform).rows
    assert [n.op for n in rows if n.op in ("MatMul", "Softmax", "SDPA")] == ["MatMul", "Softmax", "MatMul"]


def test_attention_that_a_rule_excludes_gets_the_parts_and_what_fuses_with_attention_fuses():
    def causal(x, q, k, v):
        later = torch.ones(6, 6, dtype=torch.bool).triu(1)
        return (q @ k.mT).masked_fill(later, -math.inf).softmax(-1) @ v + x

    ncnn = load("ncnn")
    rule = ncnn.ops[-1].model_copy(update={"match": ("Attention",), "where": {"is_causal": True}})
    chain = ncnn.fuse[0].model_copy(update={"chain": (("Attention",), ("Add",))})
    chip = ncnn.model_copy(update={"ops": (*ncnn.ops[:-1], rule), "fuse": (chain,)})
    x = torch.randn(4, 6, 8)
    lint = chipfit.lint(block(causal), x, chip)
    assert [g.split("_")[0] for group in lint.assignment.groups for g in group] == ["matmul", "add"]
    assert "Softmax" in {n.op for n in chipfit.lint(block(in_parts), x, chip).rows}


# ---------------------------------------------------------------- graphs of a few nodes, of unequal lengths

#: what q [N, 3, 5, 4] keeps of keys [N, 3, 6, 4], and the same of as many keys as queries
LATER = torch.full((5, 5), -1e9).triu(1)


def written(*between, weights=None, keys=6, last=-1, behind=()):
    """softmax(.. q k^T ..) v; `between` are nodes (operator, inputs, attributes), "_" being what comes before."""
    shapes = {"q": (None, 3, 5, 4), "k": (None, 3, keys, 4), "v": (None, 3, keys, 7), "m": (None, 1, 5, keys)}
    shapes |= {"k^T": (None, 3, 4, keys), "s": (None, 3, 5, keys), "c": (None, 1, 5, keys)}
    nodes = [node("k^T = Transpose(k)", {"perm": (0, 1, 3, 2)}), node("s = MatMul(q, k^T)")]
    for k, (op, inputs, attrs) in enumerate([*between, ("Softmax", ["_"], {"axis": last}), *behind]):
        value, before = f"t{k}", nodes[-1].output
        nodes.append(Node(value, op, tuple(before if i == "_" else i for i in inputs), (value,), attrs))
        shapes[value] = shapes["s"]
    product, shapes["y"] = f"y = MatMul({nodes[-1].output}, v)", (None, 3, 5, 7)
    return graph_of(*nodes, product, inputs=[*"qkvmc"], shapes=shapes, dtypes={"c": "bool"}, weights=weights or {})


def inputs_of(graph):
    drawn = {n: torch.randn(2, *graph.shape(n)[1:]) for n in graph.inputs}
    return [x > 0 if n == "c" else x for n, x in drawn.items()]


def number(x, shape=()):
    return {"n": torch.full(shape, x)}


SPELLED = [
    ([("Div", "_n", {})], number(4.0, (1,)), 0.25, 3),
    ([("Mul", "_n", {}), ("Div", "_d", {})], {**number(0.5), "d": torch.tensor(4.0)}, 0.125, 3),
    ([("Identity", "_", {}), ("Mul", "_n", {}), ("Add", "m_", {})], number(0.5), 0.5, 4),
    ([("Add", "_m", {}), ("Add", "_n", {})], {"n": torch.randn(5, 6)}, 1.0, 4),
    ([("Where", "c_n", {})], number(-1e9), 1.0, 4),
    ([("Where", "cn_", {})], number(-1e10), 1.0, 4),
    ([("Where", "n_d", {})], {"n": torch.eye(5, 6) > 0, "d": torch.tensor(-1e30)}, 1.0, 4),
    ([("Where", "nd_", {})], {"n": torch.eye(5, 6) > 0, "d": torch.tensor(-1e30)}, 1.0, 4),
    ([("Where", "c_n", {}), ("Add", "_m", {})], number(-1e9), 1.0, 4),
]


@pytest.mark.parametrize("between, weights, scale, operands", SPELLED)
def test_every_spelling_of_a_scale_and_of_masks(between, weights, scale, operands):
    graph = written(*between, weights=weights, behind=[("Dropout", ["_"], {"p": 0.5}), ("Identity", ["_"], {})])
    new, notes = recognised(graph)
    sdpa = new.nodes[-1]
    assert (sdpa.op, sdpa.output, notes) == ("SDPA", "y", ["the products and the softmax of 'y' became one SDPA"])
    assert sdpa.attrs == {"is_causal": False, "scale": pytest.approx(scale), "enable_gqa": False}
    assert sdpa.inputs[:3] == ("q", "k", "v") and len(sdpa.inputs) == operands
    assert_same(graph, new, *inputs_of(graph), atol=2e-6)


@pytest.mark.parametrize(
    "mask, causal",
    [
        (LATER, True),
        (LATER.view(1, 1, 5, 5), True),
        (LATER / 2, False),  # scores are not lost in it
        (LATER + torch.eye(5), False),
        (LATER + torch.ones(5, 5).tril(-1), False),
        (LATER.T, False),
        (LATER.expand(3, 5, 5).clone(), False),  # for each head
        (LATER[:1], False),
        (LATER[:, :1], False),
        (torch.full((5, 6), -1e9).triu(1), False),  # of more queries than keys
    ],
)
def test_a_mask_is_causal_where_it_hides_what_comes_later_and_nothing_else(mask, causal):
    graph = written(("Add", "_n", {}), weights={"n": mask}, keys=max(5, mask.shape[-1]))
    for learned in (False, True):
        graph.trainable = {"n"} if learned else set()
        (sdpa,) = (n for n in recognised(graph)[0].nodes if n.op == "SDPA")
        assert sdpa.attrs["is_causal"] is (causal and not learned)
        assert sdpa.inputs[3:] == (() if causal and not learned else ("n",))


@pytest.mark.parametrize(
    "between, weights, more",
    [
        ([("Mul", "_n", {})], number(0.0), {}),
        ([("Mul", "_n", {})], {"n": torch.tensor(2)}, {}),
        ([("Mul", "_n", {})], {"n": torch.ones(6)}, {}),
        ([("Div", "n_", {})], number(0.5), {}),
        ([("Sub", "_n", {})], number(0.5), {}),
        ([("Add", "_m", {}), ("Mul", "_n", {})], number(0.5), {}),
        ([("Where", "c_n", {})], number(-0.9e9), {}),
        ([("Where", "c_n", {})], {"n": torch.full((6,), -1e9)}, {}),
        ([("Mul", "__", {})], None, {}),
        ([], None, {"last": -2}),
        ([], None, {"behind": [("Relu", ["_"], {})]}),
    ],
)
def test_what_is_no_scale_and_no_mask_is_left(between, weights, more):
    graph = written(*between, weights=weights, **more)
    assert recognised(graph)[0].nodes == graph.nodes


def test_a_factor_of_the_keys_is_found_through_what_moves_them():
    """k / 4, transposed and multiplied by 2: half of the scores, and the keys as they come in."""
    graph = written(weights={"n": torch.tensor(4.0), "d": torch.tensor(2.0)})
    first, product, *rest = graph.nodes
    quarter, double = node("f = Div(k, n)"), node("g = Mul(d, k^T)")
    graph.values |= {"f": Value("f", graph.shape("k")), "g": Value("g", graph.shape("k^T"))}
    graph.nodes = [quarter, first.with_(inputs=("f",)), double, product.with_(inputs=("q", "g")), *rest]
    new, _ = recognised(graph)
    assert [n.op for n in new.nodes] == ["SDPA"]
    assert new.nodes[0].attrs["scale"] == 0.5 and new.nodes[0].inputs == ("q", "k", "v")
    assert_same(graph, new, *inputs_of(graph), atol=2e-6)


def test_operators_that_change_numbers_hide_the_factors_in_front_of_them():
    graph = written(weights={"n": torch.tensor(4.0)})
    relu, quarter = node("r = Relu(f)"), node("f = Div(q, n)")
    graph.values |= {v: Value(v, graph.shape("q")) for v in "fr"}
    graph.nodes = [quarter, relu, graph.nodes[0], graph.nodes[1].with_(inputs=("r", "k^T")), *graph.nodes[2:]]
    new, _ = recognised(graph)
    assert [n.op for n in new.nodes] == ["Div", "Relu", "SDPA"] and new.nodes[-1].attrs["scale"] == 1.0


def test_a_platform_that_does_not_name_what_is_made_keeps_the_parts():
    graph = written(("Mul", "_n", {}), weights=number(0.5))
    new, notes = recognised(graph, lambda g, n: "scale" not in n.attrs)
    assert new.nodes == graph.nodes and notes == []
