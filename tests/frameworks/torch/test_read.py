"""Readers of PyTorch that are more than a row: attributes, calls that become several nodes, open sizes."""

import math

import pytest
import torch
import torch.nn.functional as F

from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture, export
from chipfit.frameworks.torch.read import READERS, enter_cell
from chipfit.frameworks.torch.translate import translate
from chipfit.graph.ir import OPAQUE
from tests.build import model_of


@pytest.mark.parametrize("ends", [(0, 62), (0, 70), (3, 99), (0, 100), (65, 66), (-40, -30), (-1, None)])
def test_a_slice_of_a_long_axis_ends_where_it_says(ends):
    nodes(lambda x: x[:, slice(*ends)] * 2, torch.arange(200.0).view(2, 100))


@pytest.mark.parametrize("ends, ops", [((-2, None), ["Max"]), ((None, 3), ["Min"]), ((-2, 3), ["Max", "Min"])])
def test_a_clip_of_integers_is_one_operator_an_end(ends, ops):
    assert [n.op for n in nodes(lambda x: x.clamp(*ends), torch.arange(-6, 6).view(2, 6))] == ops


def test_a_softmax_computes_in_the_type_that_it_names():
    nodes(lambda x: (x * 10).int().softmax(-1, dtype=torch.float32), torch.rand(2, 3, 4))
    nodes(lambda x: x.log_softmax(1, dtype=torch.float64), torch.rand(2, 3, 4))


@pytest.mark.parametrize(
    "equation, ops",
    [("bhqd,bhkd->bhqk", ["Transpose", "MatMul"]), ("bqhd,bkhd->bhqk", ["Transpose", "Transpose", "MatMul"])],
)
def test_an_einsum_that_is_one_product_is_read_as_one(equation, ops):
    found = nodes(lambda x: torch.einsum(equation, x, x + 1), torch.randn(2, 4, 6, 6))
    assert [n.op for n in found if n.op != "Add"] == ops


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.einsum("...ab,...ac->...bc", x, x + 1),
        lambda x: torch.einsum("bhij,hg->bgij", x, torch.ones(4, 3)),
        lambda x: torch.einsum("bhij,bhij,bhij->bh", x, x, x),
        lambda x: torch.quantile(x, torch.tensor([0.2, 0.7]), dim=1),
    ],
)
def test_what_has_no_decomposition_of_ours_gets_that_of_pytorch_in_exported_programs_too(f):
    model, x = model_of(lambda m, x: f(x)), torch.randn(2, 4, 6, 6)
    for graph in (capture(model, (x,), {}), translate(export(model, (x,), {}), model, ((x,), {}), f(x))):
        (got,) = run(graph, [x]).values()
        torch.testing.assert_close(got, f(x))
        assert all(n.op != OPAQUE for n in graph)


def test_cat_leaves_out_the_empty_vectors_with_which_caches_begin():
    empty = torch.tensor([])
    assert [n.op for n in nodes(lambda x: torch.cat([empty, x], -2), POINTS) if n.op != "Identity"] == []
    (found,) = nodes(lambda x: torch.cat([x, empty, x + 0], -1), POINTS)[-1:]
    assert found.op == "Concat" and len(found.inputs) == 2


# ---------------------------------------------------------------- attributes, where results could not tell


def nodes(f, *xs, **how):
    """The nodes of a function, which computes what PyTorch does."""

    graph = capture(model_of(lambda m, *xs: f(*xs)), xs, {}, **how)
    (got,) = run(graph, list(xs)).values()
    torch.testing.assert_close(got, f(*xs))
    return graph.nodes


def attrs(f, op, *xs, **how):
    (found,) = (n.attrs for n in nodes(f, *xs, **how) if n.op == op)
    return found


def test_a_cell_reads_no_call_with_an_argument_that_it_does_not_name(monkeypatch):
    monkeypatch.setitem(READERS, "round", None)  # put back afterwards
    enter_cell("Round", "round")
    x = torch.randn(2, 5)
    assert [n.op for n in nodes(torch.round, x)] == ["Round"]
    assert [n.op for n in nodes(lambda x: x.round(decimals=1), x)] == [OPAQUE]


def test_heads_that_share_keys_get_copies_of_them():
    q, k = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4)
    found = nodes(lambda q, k: F.scaled_dot_product_attention(q, k, k + 1, enable_gqa=True), q, k)
    assert [n.op for n in found] == ["Add", *["Unsqueeze", "Expand", "Reshape"] * 2, "SDPA"]
    copies = [{"axes": (2,)}, {"shape": (-1, -1, 2, -1, -1)}, {"shape": (-1, 6, 7, 4)}]
    assert all(want.items() <= n.attrs.items() for n, want in zip(found[1:-1], copies * 2, strict=True))
    assert found[-1].attrs == {"is_causal": False, "scale": None, "enable_gqa": False}
    alone = nodes(lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True), q, k.repeat(1, 2, 1, 1))
    assert [n.op for n in alone] == ["SDPA"]


LONGER = [((torch.randn(2, 7),), {})]  # than an example of [2, 5]


@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_places_of_an_open_axis_are_counted_from_zero_by_ones(kind):
    found = nodes(lambda x: x + torch.arange(x.shape[1], dtype=kind), torch.randn(2, 5), others=LONGER)
    assert {"Size", "CumSum"} <= {n.op for n in found} and OPAQUE not in {n.op for n in found}
    assert [n.attrs["dtype"] for n in found if n.op == "Cast"] == ["float32"]  # counted as the model counts them


@pytest.mark.parametrize(
    "places",
    [lambda n: torch.arange(1, n + 1), lambda n: torch.arange(0, 2 * n, 2), lambda n: torch.arange(1, n + 1, 1)],
)
def test_other_numbers_along_an_open_axis_are_not_taken_for_places(places):
    (example,) = xs = [torch.randn(2, 5)]
    graph = capture(model_of(lambda m, x: x + places(x.shape[1])), xs, {}, LONGER)
    assert OPAQUE in {n.op for n in graph.nodes} and "CumSum" not in {n.op for n in graph.nodes}
    for x in (example, torch.randn(3, 9)):
        assert torch.equal(*run(graph, [x]).values(), x + places(x.shape[1]))


def test_places_of_an_axis_that_is_known_are_left_to_pytorch():
    assert OPAQUE in {n.op for n in nodes(lambda x: x + torch.arange(5), torch.randn(2, 5))}


@pytest.mark.parametrize(
    ("f", "op", "want"),
    [
        (
            lambda x: F.conv2d(x, torch.ones(4, 2, 3, 2), padding="same", groups=2),
            "Conv2D",
            {"padding": ((1, 1), (0, 1)), "groups": 2},
        ),
        (
            lambda x: F.conv2d(x, torch.ones(4, 1, 3, 2), groups=4),
            "DepthwiseConv2D",
            {"padding": ((0, 0), (0, 0)), "groups": 4},
        ),
        (lambda x: F.conv2d(x, torch.ones(8, 1, 3, 2), padding="valid", groups=4), "DepthwiseConv2D", {"groups": 4}),
        (lambda x: F.conv2d(x[:, :1], torch.ones(3, 1, 2, 2)), "Conv2D", {"groups": 1, "stride": (1, 1)}),
        (
            lambda x: F.conv2d(x, torch.ones(4, 4, 2, 2), padding="same", dilation=(3, 2)),
            "Conv2D",
            {"padding": ((1, 2), (1, 1))},
        ),
        (lambda x: F.conv1d(x[..., 0], torch.ones(4, 1, 3), groups=4), "Conv1D", {"groups": 4}),
        (lambda x: F.hardtanh(x, 0.0, 5.0), "Clamp", {"min": 0.0, "max": 5.0}),
        (lambda x: F.hardtanh(x, -1.0, 6.0), "Clamp", {"min": -1.0, "max": 6.0}),
        (lambda x: x.clamp(min=0.5), "Clamp", {"min": 0.5, "max": None}),
        (lambda x: x.clamp(-math.inf, 0.5), "Clamp", {"min": None, "max": 0.5}),
        (lambda x: x.clamp(0.5, math.inf).clamp(-math.inf, math.inf), "Clamp", {"min": 0.5, "max": None}),
        (lambda x: x.clamp(max=0.0), "Clamp", {"min": None, "max": 0.0}),
        (lambda x: x.clamp(max=6.0), "Clamp", {"min": None, "max": 6.0}),
        (lambda x: x.squeeze(), "Squeeze", {"axes": ()}),
        (lambda x: x[:, :, :1].squeeze((1, 2)), "Squeeze", {"axes": (2,)}),
        (lambda x: x.mean((1, 2)), "Mean", {"axes": (1, 2), "keepdims": False}),
        (lambda x: x.mean(), "Mean", {"axes": (0, 1, 2, 3)}),
        (lambda x: x[0].mean((1, 2)), "Mean", {"axes": (1, 2)}),
        (lambda x: x.amax(-2), "ReduceMax", {"axes": (2,)}),
        (lambda x: x.max(-1).values, "ReduceMax", {"axes": (3,), "keepdims": False}),
        (lambda x: x.min(), "ReduceMin", {"axes": (0, 1, 2, 3)}),
        (lambda x: torch.linalg.vector_norm(x, dim=-1), "ReduceL2", {"axes": (3,)}),
        (lambda x: torch.linalg.vector_norm(x), "ReduceL2", {"axes": (0, 1, 2, 3)}),
        (lambda x: x.transpose(-1, 1), "Transpose", {"perm": (0, 3, 2, 1)}),
        (lambda x: x[0, 0].t(), "Transpose", {"perm": (1, 0)}),
        (
            lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
            "AvgPool",
            {"kernel": (3, 2), "stride": (3, 2), "ceil_mode": False},
        ),
        (lambda x: F.adaptive_max_pool2d(x, (3, 1)), "MaxPool", {"kernel": (2, 6), "dilation": (1, 1)}),
        (lambda x: F.pad(x, (1, 2)), "Pad", {"padding": ((0, 0), (0, 0), (0, 0), (1, 2)), "value": 0.0}),
        (
            lambda x: F.pad(x, (1, 2, 3, 4), value=0.5),
            "Pad",
            {"padding": ((0, 0), (0, 0), (3, 4), (1, 2)), "value": 0.5},
        ),
        (lambda x: x.unfold(2, 3, 2), "Transpose", {"perm": (0, 1, 2, 4, 3)}),
        (lambda x: x.roll(2, -1), "Roll", {"shifts": (2,), "axes": (-1,)}),
        (lambda x: x[:, 1:3], "Slice", {"axis": 1, "start": 1, "end": 3, "step": 1}),
        (lambda x: x[..., ::2], "Slice", {"axis": 3, "start": 0, "end": None, "step": 2}),
        (lambda x: x[:, -2:], "Slice", {"axis": 1, "start": -2, "end": None}),
        (lambda x: x.split(3, -1)[1], "Split", {"axis": 3, "sizes": (3, 3)}),
        (lambda x: x.unbind(-2)[0], "Unstack", {"axis": 2}),
        (lambda x: torch.stack([x, x], -1), "Stack", {"axis": 4}),
        (lambda x: torch.cat([x, x], -1), "Concat", {"axis": 3}),
        (lambda x: x.unsqueeze(-1), "Unsqueeze", {"axes": (4,)}),
        (lambda x: x.unsqueeze(-5), "Unsqueeze", {"axes": (0,)}),
    ],
)
def test_settings_become_attributes(f, op, want):
    found = attrs(f, op, torch.randn(2, 4, 6, 6))
    assert {k: found[k] for k in want} == want


def batch(*shape):
    return torch.linspace(-1, 2, 2 * int(torch.tensor(shape).prod())).reshape(2, *shape)


picked, other_rows = torch.tensor([2, 0, -1]), torch.tensor([[1], [-2]])

#: calls that are read as several operators
STEPS = {
    "a mean of images": lambda x: x.mean((2, 3)),
    "a mean of images, kept": lambda x: x.mean((-1, 2), keepdim=True),
    "windows": lambda x: x.unfold(2, 3, 2),
    "windows of the last axis": lambda x: x.unfold(-1, 2, 1),
    "patches": lambda x: F.unfold(x, (3, 2), stride=(3, 2)),
    "patches put together": lambda x: F.fold(F.unfold(x, (3, 2), stride=(3, 2)), (6, 6), (3, 2), stride=(3, 2)),
    "patches that overlap": lambda x: F.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1)),
    "the middle": lambda x: x.median(-1).values + x.median(2, keepdim=True).values.squeeze(2),
    "the third smallest": lambda x: x.kthvalue(3, 1, keepdim=True).values,
    "places of two axes": lambda x: x[:, picked, other_rows],
    "places of the last two axes": lambda x: x[:, :, picked, picked + 1],
    "places of one axis": lambda x: x[:, :, picked],
    "places of each sample": lambda x: x[torch.arange(x.shape[0]), x[:, 0, 0, 0].long().clamp(0, 3)],
    "places of each sample from the end": lambda x: x[torch.arange(x.shape[0]), x[:, 0, 0, 0].long().clamp(-1, 3)],
    "rows of each sample": lambda x: x[:, :, 0, 0][torch.arange(x.shape[0]), x[:, 0, 0, 0].long().clamp(0, 3)],
    "a part in the place of another": lambda x: torch.slice_scatter(x, x[:, 1:3] * 2, 1, 1, 3),
    "a part at the start": lambda x: torch.slice_scatter(x, x[:, :2] * 2, 1, 0, 2),
    "a part at the end": lambda x: torch.slice_scatter(x, x[..., 3:] * 2, -1, 3, 99),
    "a part of nothing": lambda x: torch.slice_scatter(x, x[:, 3:3], 1, 3, 3),
    "a part of nothing, at the start": lambda x: torch.slice_scatter(x, x[:, :0], 1, 0, 0),
    "all of it": lambda x: torch.slice_scatter(x, x * 2, 1),
    "the one place of an axis": lambda x: torch.select_scatter(x[:, 1:2], x[:, 0] * 2, 1, 0) + x,
    "one place of an axis": lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, -1),
    "the first place of an axis": lambda x: torch.select_scatter(x, x[..., 1] * 2, 3, 0),
    "celu": lambda x: F.celu(x, 0.5),
    "a multiple added": lambda x: torch.add(x, x[:, :1], alpha=3),
    "a multiple taken away": lambda x: torch.sub(x, 2, alpha=0.5),
    "a clip of integers": lambda x: (x * 9).int().clamp(-3, 4),
    "a product of integers": lambda x: (x * 9).int().prod(1),
    "turned around": lambda x: x.flip((1, -1)),
    "repeated samples": lambda x: x[:, :1].repeat(1, 3, 1, 1),
    "filled": lambda x: x + torch.full_like(x, 2.5) + torch.ones_like(x[:, :1]) + x.new_zeros(4, 6, 6),
    "the largest of an axis": lambda x: x.max(-2, keepdim=True).values + x.min(1, keepdim=True).values,
    "a length": lambda x: torch.linalg.vector_norm(x, dim=(1, -1), keepdim=True),
    "an adaptive pool": lambda x: F.adaptive_max_pool2d(x, (2, 3)) + F.adaptive_avg_pool2d(x, (2, 3)),
    "an uneven adaptive pool": lambda x: F.adaptive_avg_pool2d(x, (4, 3)),
    "another type": lambda x: x.double() + (x > 0) + x.long(),
    "numbers of another": lambda x: x.clone().copy_(x[:, :1]),
    "a smaller image": lambda x: F.interpolate(x, (3, 9)) + F.interpolate(x, scale_factor=(0.5, 1.5)),
    "split unevenly": lambda x: torch.cat([*reversed(x.split([1, 3], -3))], 1),
    "unequal padding": lambda x: F.conv2d(x, torch.ones(4, 4, 2, 4), padding="same", dilation=(1, 2)),
    "heads that share keys": lambda x: F.scaled_dot_product_attention(x, x[:, :2], x[:, 2:], enable_gqa=True),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_value_has_the_shape_and_type_that_it_has_when_the_graph_runs(name):
    x = batch(4, 6, 6)
    graph = capture(model_of(lambda m, x: STEPS[name](x)), (x,))
    assert OPAQUE not in {n.op for n in graph.nodes}
    x = torch.cat([x, x.flip(1)[:1]])  # another number of samples
    found = run(graph, [x], keep=list(graph.values))
    torch.testing.assert_close(found[graph.outputs[0]], STEPS[name](x))
    for value, said in graph.values.items():
        if value in found and isinstance(found[value], torch.Tensor):
            shape = tuple(3 if s is None else s for s in said.shape)
            assert (tuple(found[value].shape), str(found[value].dtype)) == (shape, f"torch.{said.dtype}"), value


@pytest.mark.parametrize("function", [lambda x: sum([x, x * 2]), lambda x: x + 2 * x - 0, lambda x: 0.0 + x + x * 2])
def test_the_number_zero_is_not_added(function):
    assert [n.op for n in nodes(function, torch.randn(2, 3))] == ["Mul", "Add"]


POINTS = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
MATRIX = torch.tensor([[[0.2, float("nan"), 3.0, -0.4], [float("inf"), 0.5, -float("inf"), 1.0]]])
IN_PARTS = {
    "a lower triangle": (lambda x: x.tril(-1), POINTS),
    "an upper triangle": (lambda x: torch.triu(x, 1), POINTS),
    "numbers in place of others": (lambda x: torch.nan_to_num(x, 0.25), MATRIX),
    "logit": (lambda x: torch.logit(x, 1e-3), POINTS.sigmoid()),
    "logit without a bound": (lambda x: torch.logit(x), POINTS.sigmoid()),
    "remainder": (lambda x: torch.remainder(x, 0.7), POINTS),
    "remainder of a negative number": (lambda x: torch.remainder(x, -1.0), POINTS),
    "an index for each element": (lambda x: torch.take_along_dim(x, x.argsort(-1)[..., :2], -1), POINTS),
    "rows of ones and zeros": (lambda x: F.one_hot(x.argmax(-1), 7), POINTS),
    "distances": (lambda x: torch.cdist(x, 2 * x[:, :3]), POINTS),
    "rounding": (lambda x: torch.round(3 * x), POINTS),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_functions_of_torch_are_read_as_the_operators_that_compute_them(name):
    function, x = IN_PARTS[name]
    assert OPAQUE not in {n.op for n in nodes(function, x)}


def test_as_many_copies_of_rows_as_samples_are_broadcast():
    table = torch.arange(6.0).view(2, 3)
    found = nodes(lambda x: x + table.repeat(x.shape[0], 1)[1::2], torch.zeros(5, 3))
    assert [n.op for n in found if n.op in (OPAQUE, "Expand")] == ["Expand"]


WHOLE = {
    "products along a long axis": (lambda x: torch.cumprod(x, 1), torch.rand(2, 600) + 0.5),
    "extremes of conditions": (lambda x: torch.cummax(x > 0, 1)[0], POINTS),
}


@pytest.mark.parametrize("name", WHOLE)
def test_calls_with_arguments_for_which_there_are_no_parts_stay_whole(name):
    function, x = WHOLE[name]
    assert OPAQUE in {n.op for n in nodes(function, x)}
