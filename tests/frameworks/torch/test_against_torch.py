"""The reader against PyTorch itself: each operator that is read, with each argument, as eager PyTorch computes it.

`cases.yaml` has calls for each row of the reader, calls that must stay opaque, and calls that are decomposed. The last
part of this file shows that no row, no attribute and no argument is missing from them.
"""

import warnings
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

from chipfit.engine.run import run
from chipfit.frameworks.torch.call import NEUTRAL_ARGUMENTS
from chipfit.frameworks.torch.capture import capture
from chipfit.frameworks.torch.decompositions import DECOMPOSED
from chipfit.frameworks.torch.read import READERS
from chipfit.graph.ir import OPAQUE
from chipfit.operators.table import OPS
from tests.build import model_of
from tests.zoo import ZOO, make

aten = torch.ops.aten

_g = torch.Generator().manual_seed(7)


def _rand(*shape):
    return torch.rand(*shape, generator=_g) - 0.4


w1, w2, w3 = (_rand(4, 4, *[2] * n) for n in (1, 2, 3))
v1, v2, v3 = (_rand(6, 2, *[3] * n) for n in (1, 2, 3))
two1, two2, two3 = (_rand(4, 3, *[2] * n) for n in (1, 2, 3))
norm, shift, mean, var = _rand(4) + 0.9, _rand(4), _rand(4), _rand(4) + 0.9
rows, table = _rand(5, 6), _rand(7, 3)
odd6 = _rand(6)
some = torch.tensor([True, False, True, True])
triangle = torch.ones(6, 6, dtype=torch.bool).tril()
few, index, more = torch.tensor([2, 0]), torch.tensor([3, 0, -1]), torch.tensor([[1, 0], [2, 2]])


def zeros(x):
    """A state [1, B, 5] of zeros, which is computed."""
    return x[None, :, 0, 0, :5] * 0


def state(x, layers):
    """A state [layers, B, 5]."""
    return torch.stack([x[:, 0, k, :5] for k in range(layers)])


@cache
def cells(gates, layers=1, ways=1, biased=True):
    """Weights of recurrent layers over 6 features with 5 states, in the order of PyTorch."""
    made = []
    for layer in range(layers):
        for _ in range(ways):
            made += [_rand(gates * 5, 5 * ways if layer else 6), _rand(gates * 5, 5)]
            made += [_rand(gates * 5), _rand(gates * 5)] if biased else []
    return made


for _form in ((4,), (4, 2, 2, False), (3,), (3, 1, 2), (3, 1, 1, False), (1,), (1, 1, 2)):
    cells(*_form)  # before a program is recorded, in which they would be random numbers


def signed(x):
    return x * 4 - 2


def ints(x):
    return (x * 10 - 4).long()


def flat(x):
    """[B, 4, 6]"""
    return x[..., 0]


def cube(x):
    """[B, 4, 3, 6, 6]"""
    return torch.stack([x, 1 - x, x * x], 2)


def flags(x):
    return x > 0.5


def unary(f):
    return (lambda x: f(signed(x)), lambda x: f(flat(x)))


def unary_positive(f):
    return (lambda x: f(x + 0.1), lambda x: f(flat(x) + 1))


def binary(f):
    """Two tensors, broadcast ones, and numbers on either side that the operator may take."""
    return (lambda x: f(signed(x), x), lambda x: f(signed(x), x[:, :1]), lambda x: f(x, norm[:, None, None]))


def comparison(f):
    return (
        *binary(f),
        lambda x: f(torch.floor(x * 4), torch.floor(x[:, :1] * 4)),
        lambda x: f(ints(x), 2),
        lambda x: f(ints(x), 1.5),
        lambda x: f(ints(x), torch.floor(x * 3)),
        lambda x: f(torch.floor(x * 4), 2),
    )


def logical(f):
    return (lambda x: f(flags(x), x < 0.7), lambda x: f(ints(x), x), lambda x: f(torch.floor(x * 2), flags(x)))


def pools(f, *views):
    """The arguments that both poolings have, in each rank."""
    return tuple(
        lambda x, view=view, kw=kw: f(view(x), **kw)
        for view in views
        for kw in (
            {"kernel_size": 2},
            {"kernel_size": 3, "stride": 1},
            {"kernel_size": 3, "stride": 2, "padding": 1},
            {"kernel_size": 3, "stride": 2, "ceil_mode": True},
            {"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True},
        )
    )


def resized(mode, view, n, *more):
    """The ways to give a size to F.interpolate, which make torch sample at different places."""
    given = (
        {"size": (5, 9, 4)[:n]},
        {"size": (12, 12, 6)[:n]},
        {"scale_factor": 2.0},
        {"scale_factor": 1.7},
        {"scale_factor": 0.5},
        {"scale_factor": (1.5, 2.0, 1.0)[:n]},
        {"scale_factor": 1.7, "recompute_scale_factor": True},
    )
    corners = ({},) if mode.startswith("nearest") else ({"align_corners": True}, {"align_corners": False})
    every = (*({**g, **c} for g in given for c in corners), *more)
    return tuple(lambda x, kw=kw: F.interpolate(view(x), mode=mode, **kw) for kw in every)


def same(f):
    return (lambda x: f(x) + 1, lambda x: f(x.transpose(1, 2)) * 2)


def dropped(f):
    return (lambda x: f(x, 0.3, False), lambda x: f(x, 0.0, False), lambda x: f(x, 0.5, False))


def expressions(kind):
    """Return operator -> functions of x, from the expressions of `cases.yaml`."""
    table = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text())[kind]
    lists = {name: [v] if isinstance(v, str) else v for name, v in table.items()}
    return {name: tuple(eval(f"lambda x: {e}", globals()) for e in given) for name, given in lists.items()}


SIGNED = "relu relu6 sigmoid tanh hardswish hardsigmoid silu mish selu exp abs neg sin cos erf floor ceil sign"
SIGNED += " atan sinh cosh asinh"
SAME = "clone contiguous alias detach lift_fresh_copy resolve_conj resolve_neg"
#: operator of PyTorch -> calls that become it, made of the functions above
FAMILIES = {
    **{name: unary(getattr(aten, name)) for name in SIGNED.split()},
    **{name: unary_positive(getattr(aten, name)) for name in ("log", "sqrt", "rsqrt", "reciprocal")},
    **{name: binary(getattr(torch, name)) for name in ("mul", "div", "add", "sub")},
    **{
        name: (*binary(f), lambda x, f=f: f(ints(x), x))
        for name, f in (("maximum", torch.maximum), ("minimum", torch.minimum))
    },
    **{name: comparison(getattr(torch, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: logical(getattr(torch, name)) for name in ("logical_and", "logical_or")},
    **{
        f"{kind}_pool{n}d": pools(getattr(F, f"{kind}_pool{n}d"), view)
        for kind in ("max", "avg")
        for n, view in enumerate((flat, signed, cube), 1)
    },
    **{f"upsample_nearest{n}d": resized("nearest", view, n) for n, view in enumerate((flat, signed, cube), 1)},
    **{
        f"_upsample_nearest_exact{n}d": resized("nearest-exact", view, n)
        for n, view in enumerate((flat, signed, cube), 1)
    },
    **{
        name: ((lambda x, f=f: f(x * 0.9)),)
        for name, f in (("asin", aten.asin), ("acos", aten.acos), ("atanh", aten.atanh))
    },
    "acosh": unary_positive(lambda x: aten.acosh(x + 1)),
    "upsample_linear1d": resized("linear", flat, 1),
    "upsample_bilinear2d": resized("bilinear", signed, 2),
    "upsample_bicubic2d": resized("bicubic", signed, 2),
    **{name: same(getattr(aten, name)) for name in SAME.split()},
    **{name: dropped(getattr(torch, name)) for name in ("dropout", "feature_dropout", "alpha_dropout")},
}
READ, REFUSED = expressions("read"), expressions("refused")
CASES = {name: (*FAMILIES.get(name, ()), *READ.get(name, ())) for name in {**FAMILIES, **READ}}


# ---------------------------------------------------------------- one capture of all of them


def one(f):
    return model_of(lambda m, x: f(x))


class Every(nn.Module):
    """Every call of a table as a layer of its own: "add 3" is the fourth one of "add"."""

    def __init__(self, calls):
        super().__init__()
        for name, fs in calls.items():
            for k, f in enumerate(fs):
                self.add_module(f"{name} {k}", one(f))

    def forward(self, x):
        return {name: m(x) for name, m in self.named_children()}


class Watched(dict):
    """Arguments that remember which of them were asked for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = set()

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


def flat_leaves(y):
    return [t for v in y for t in flat_leaves(v)] if isinstance(y, (tuple, list)) else [y]


class Reading:
    """Nodes that readers made of every call of a table, and the results of eager PyTorch and of the Graph."""

    def __init__(self, calls):
        self.tried = set()  #: overloads that came to a reader
        self.readings = []  #: of what it read: (ATen operator, reader, arguments that it asked for, nodes that it made)
        originals = dict(READERS)
        model = Every(calls).eval()
        READERS.update({name: self._watched(name, f) for name, f in originals.items()})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells of slow forms once in a process
            try:
                self.graph = capture(model, (torch.rand(5, 4, 6, 6),))
            finally:
                READERS.update(originals)
            x = torch.rand(3, 4, 6, 6)
            produced = [o for n in self.graph.nodes for o in n.outputs]
            self.values = run(self.graph, (x,), keep=produced)
            want = model(x)
        names = [(name, k) for name in want for k in range(len(flat_leaves(want[name])))]
        got = [torch.as_tensor(self.values[o]) for o in self.graph.outputs]
        expected = [torch.as_tensor(t) for y in want.values() for t in flat_leaves(y)]
        self.pairs = defaultdict(list)
        for (name, _), a, b in zip(names, expected, got, strict=True):
            self.pairs[name].append((a, b))

    def _watched(self, name, f):
        def read(c):
            c.args, first = Watched(c.args), len(c.builder.graph.nodes)
            self.tried.add(f"{name}.{c.node.target._overloadname}")
            out = f(c)
            function = getattr(f, "func", f)  # of a cell: the function that it names
            self.readings.append((name, function, c.node.target._schema, c.args.asked, c.builder.graph.nodes[first:]))
            return out

        return read


@pytest.fixture(scope="module")
def read():
    torch.manual_seed(3)
    return Reading(CASES)


@pytest.fixture(scope="module")
def refused():
    torch.manual_seed(4)
    return Reading(REFUSED)


def difference(a, b):
    """None where both are the same, bit for bit, and without a number at the same places."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{b.dtype} {tuple(b.shape)} instead of {a.dtype} {tuple(a.shape)}"
    if torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)):
        return None
    d = (a.double() - b.double()).abs().max().item()
    return f"off by {d}"


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
#: torch raises to a number by other functions than to a tensor, and has one kernel for means of parts of any size;
#: the kernels of layers compute cells
_LAST_BIT = ("pow", "celu", "adaptive_avg_pool2d", "adaptive_avg_pool3d", *(f"{k}_cell" for k in _RECURRENT))
#: read as several operators
_LAST_BIT += (
    "avg_pool2d",
    "avg_pool3d",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "logsumexp",
    "lerp",
    "log1p",
    "expm1",
    "log_sigmoid",
)
_LAST_BIT += (
    "hypot",
    "embedding_bag",
    "logaddexp",
    "cosine_similarity",
    "linalg_vector_norm",
    "pairwise_distance",
    "cdist",
)


@pytest.mark.parametrize("name", CASES)
def test_the_graph_computes_what_pytorch_does(read, name):
    for k in range(len(CASES[name])):
        for a, b in read.pairs[f"{name} {k}"]:
            if name in _LAST_BIT and a.dtype == b.dtype == torch.float32:
                torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)
            else:
                assert difference(a, b) is None, (k, difference(a, b))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("sym_size",)])
def test_the_call_is_read_by_its_name_and_nothing_of_it_is_opaque(read, name):
    layers = {f"{name} {k}" for k in range(len(CASES[name]))}
    assert [(n.layer, n.attrs["target"]) for n in read.graph.nodes if n.layer in layers and n.op == OPAQUE] == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_without_canonical_operator_stays_pytorchs_own_by_name(refused, name):
    for k in range(len(REFUSED[name])):
        targets = {n.attrs["target"] for n in refused.graph.nodes if n.layer == f"{name} {k}" and n.op == OPAQUE}
        assert any(t.split(".")[1] == name for t in targets), (k, targets)
        for a, b in refused.pairs[f"{name} {k}"]:
            assert difference(a, b) is None, k


def test_the_graph_says_the_type_and_shape_of_each_value(read):
    wrong = []
    for n in read.graph.nodes:
        for o in n.outputs:
            said, is_ = read.graph.values[o], read.values[o]
            if isinstance(is_, torch.Tensor) and (
                said.dtype != str(is_.dtype).removeprefix("torch.")
                or len(said.shape) != is_.dim()
                or any(s is not None and s != d for s, d in zip(said.shape, is_.shape))
            ):
                wrong.append((n.layer, n.op, said, is_.dtype, tuple(is_.shape)))
    assert wrong == []


# ---------------------------------------------------------------- what PyTorch takes apart

vector = odd6 - 0.1
PARTS = expressions("decomposed")


def test_every_operator_that_is_read_in_parts_has_a_case():
    assert set(PARTS) == DECOMPOSED and not set(PARTS) & set(READERS)


@pytest.mark.parametrize("traced", [False, True], ids=["watched", "traced"])
@pytest.mark.parametrize("name", PARTS)
def test_what_pytorch_takes_apart_is_read_in_parts(name, traced):
    """Watched, or by `torch.export`, which a model calls that asks a tensor for something."""
    (f,) = PARTS[name]
    model = one(lambda x: (f(x), x + torch.arange(x.shape[0])[:, None, None, None]) if traced else f(x)).eval()
    graph = capture(model, (torch.rand(5, 4, 6, 6),))
    left = {n.attrs["target"] for n in graph.nodes if n.op == OPAQUE}
    assert left <= {
        "aten.arange.default",
        "aten.arange.start",
        "aten.linspace.default",
    }  # of constants, which a pass computes
    fresh = torch.rand(3, 4, 6, 6)
    values, want = run(graph, (fresh,)), torch.utils._pytree.tree_leaves(model(fresh))
    for a, o in zip(want, graph.outputs, strict=True):
        torch.testing.assert_close(values[o], a, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- what is written in place


def written(shared):
    """A function that changes in place what `shared` makes of a result, and returns both."""

    def f(x):
        y = x * 2
        z = shared(y)
        z += torch.arange(6.0)
        return y, z

    return f


#: how a tensor is made of another: some share its memory, others copy it
SHARED = {
    "clone": lambda y: y.clone(),
    "contiguous copy": lambda y: y.transpose(1, 2).contiguous(),
    "contiguous alias": lambda y: y.contiguous(),
    "other name of an axis swap": lambda y: y.swapaxes(1, 2),
    "part of a split": lambda y: y.tensor_split(2, 1)[0],
    "view like another": lambda y: y.view_as(y.transpose(1, 2)),
    "matrix transpose": lambda y: y.mT,
    "detached": lambda y: y.detach(),
    "same type": lambda y: y.to(torch.float32),
    "copy of the same type": lambda y: y.to(torch.float32, copy=True),
    "whole slice": lambda y: y[:],
}


def what_was_cloned_is_written(x):
    y = x * 2
    z = y.clone()
    y.mul_(3)
    return y, z


def result_goes_to_a_given_tensor(x):
    y = torch.empty_like(x)
    torch.add(x, 1, out=y)
    return y * 2


def every_operator_in_place(x):
    y = signed(x)
    F.hardtanh_(y, -0.9, 0.9)
    y.clamp_(min=-0.5).sub_(1, alpha=2).div_(3).pow_(2).mul_(x).neg_().abs_().sqrt_().add_(1).log_().exp_()
    y.sigmoid_().tanh_().floor_().add_(x).reciprocal_().rsqrt_()
    z = y - 1
    F.elu_(z, 0.5)
    return F.leaky_relu_(z, 0.2), y


def shapes_in_place(x):
    y = x * 1
    y.transpose_(1, 2).unsqueeze_(1).squeeze_(1)
    return y * 2


def cells_are_written(x):
    y = x * 1
    y[:, 1] = x[:, 0]
    y[..., 2:4] = 7
    y[:, index] *= 2
    y[y > 1] = 0.5
    return y


WRITES = {
    **{name: written(shared) for name, shared in SHARED.items()},
    **{f.__name__: f for f in (what_was_cloned_is_written, result_goes_to_a_given_tensor, every_operator_in_place)},
    **{f.__name__: f for f in (shapes_in_place, cells_are_written)},
}


@pytest.mark.parametrize("f", WRITES.values(), ids=WRITES)
def test_what_is_written_in_place_is_seen_by_whoever_shares_its_memory(f):
    example, fresh = torch.rand(2, 4, 6, 6), torch.rand(3, 4, 6, 6)
    graph = capture(one(f), (example,))
    values = run(graph, (fresh,))
    want = flat_leaves(f(fresh))
    for a, o in zip(want, graph.outputs, strict=True):
        torch.testing.assert_close(values[o], a, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------- whole networks


@pytest.mark.parametrize("name", ZOO)
def test_a_network_computes_what_pytorch_does_on_data_that_the_reader_has_not_seen(name):
    model, batch = make(name)
    batch = batch if isinstance(batch, tuple) else (batch,)
    graph = capture(model, batch)
    fresh = torch.utils._pytree.tree_map(lambda t: torch.randn(3, *t.shape[1:]), batch)
    with torch.no_grad():
        want = torch.utils._pytree.tree_leaves(model(*fresh))
        values = run(graph, torch.utils._pytree.tree_leaves(fresh))
    assert len(want) == len(graph.outputs) > 0
    for a, o in zip(want, graph.outputs, strict=True):
        assert values[o].shape == a.shape
        torch.testing.assert_close(values[o], a, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- nothing is missing


#: what is read of an open size that is no batch, and tried in test_open_sizes.py, and of lengths, in test_packed.py
ELSEWHERE = {"arange", *(f"padded_{k}" for k in _RECURRENT)}


def test_every_row_of_the_reader_has_cases_that_are_read_by_it(read):
    assert {*CASES, *ELSEWHERE} == set(READERS)
    assert {name for name, *_ in read.readings} == set(READERS) - ELSEWHERE


#: canonical operators that no ATen operator becomes
NEVER = {
    "Curve": "made by a pass from several operators",
    "DynamicQuantize": "inserted by `decide`, in front of kernels that quantize their own input",
    "Requantize": "inserted by `decide`, where a tensor changes its grid",
    "L2Norm": "made of its parts by `passes.unit_length`, on chips that have it",
    **dict.fromkeys(("DetectionPostProcess", "SVDF"), "TensorFlow Lite's own; its files are read"),
    "SquaredDifference": "TensorFlow Lite's own; its files are read",
    "Identity": "torch.export leaves no identities; other readers keep them",
}


def test_every_canonical_operator_is_read_or_it_is_said_why_not(read):
    assert {n.op for n in read.graph.nodes} - {OPAQUE} | set(NEVER) == set(OPS)
    assert not {n.op for n in read.graph.nodes} & set(NEVER)


READS_TYPES = ("to", "_to_copy", "type_as")  #: others put a Cast where operands have several types
#: attributes that a reader sets to one value, by reader (its first name), operator and attribute
ONE_VALUE = {
    ("adaptive_max_pool1d", "AvgPool", "ceil_mode"): "windows that cover all",
    ("adaptive_max_pool1d", "AvgPool", "count_include_pad"): "no padding",
    ("adaptive_max_pool1d", "MaxPool", "ceil_mode"): "windows that cover all",
    ("cdist", "ReduceL2", "keepdims"): "PyTorch has no other",
    **{("nan_to_num", "Clamp", k): "the largest float" for k in ("min", "max")},
    ("celu", "Elu", "alpha"): "the other alphas are factors around it",
    ("cosine_similarity", "Clamp", "max"): "lengths have a lower bound only",
    ("cosine_similarity", "ReduceL2", "keepdims"): "operands are divided by it",
    ("cosine_similarity", "Sum", "keepdims"): "PyTorch has no other",
    **{(f, "Softplus", k): "PyTorch has no other" for f in ("log_sigmoid", "logaddexp") for k in ("beta", "threshold")},
    **{("logsumexp", op, "keepdims"): "operands are compared with it" for op in ("ReduceMax", "Sum")},
    **{("embedding_bag", op, "axes"): "a row is a bag" for op in ("Sum", "Mean", "ReduceMax")},
    **{("embedding_bag", op, "keepdims"): "PyTorch has no other" for op in ("Sum", "Mean", "ReduceMax")},
    ("index", "GatherElements", "axis"): "the first axis behind the samples",
    ("scaled_dot_product_attention", "SDPA", "enable_gqa"): "copies are made before it",
    ("scaled_dot_product_attention", "Unsqueeze", "axes"): "heads are the second axis",
    ("scaled_dot_product_attention", "Reshape", "shape"): "as many heads as queries have",
    **{("lstm", op, "gates"): "the order of PyTorch" for op in ("LSTM", "GRU")},
    **{(name, "LSTM", "cell_clip"): "PyTorch has none" for name in ("lstm", "lstm_cell")},
    **{("lstm_cell", op, "gates"): "the order of PyTorch" for op in ("LSTM", "GRU")},
    **{("lstm_cell", op, "reverse"): "one step" for op in ("LSTM", "GRU", "RNN")},
    **{(name, "GRU", "reset_after"): "PyTorch has no other" for name in ("lstm", "lstm_cell")},
    ("lstm", "Transpose", "perm"): "steps and samples change places",
    ("lstm", "Concat", "axis"): "both directions stand side by side",
    **{("lstm", op, "axis"): "layers come first in a state" for op in ("Stack", "Select")},
    ("pad", "Slice", "step"): "what a circle repeats lies together",
    **{(name, "Transpose", "perm"): "rows and columns of patches change places" for name in ("im2col", "col2im")},
    **{("im2col", "Pad", k): "PyTorch has no other" for k in ("mode", "value")},
    ("kthvalue", "Slice", "step"): "one number is kept",
    ("kthvalue", "TopK", "largest"): "runtimes look for the largest",
    ("slice_scatter", "Slice", "step"): "what is kept lies together",
    ("scatter", "Slice", "step"): "one place of each row at a time",
    **{(name, "Size", "axis"): "the first axis alone is open" for name in ("expand", "repeat", "zeros", "copy")},
    ("sym_size", "Size", "axis"): "programs ask the input, whose first axis alone is open",
}


def test_every_attribute_that_a_reader_sets_was_tried_with_two_values(read):
    by_reader, first = defaultdict(set), {}
    for name, f, _, _, nodes in read.readings:
        first.setdefault(f, name)
        for n in nodes:
            for k, v in n.attrs.items() if n.op != "Cast" or name in READS_TYPES else ():
                by_reader[first[f], n.op, k].add(repr(v))
    once = {key for key, values in by_reader.items() if len(values) < 2}
    assert sorted(once - set(ONE_VALUE)) == [] and sorted(set(ONE_VALUE) - once) == []


#: arguments that a reader need not look at, because the result's shape or type tells what they said
TOLD_BY_THE_RESULT = {
    "view": "size shape start_dim end_dim dim sizes other dtype",
    "split": "split_size split_sizes chunks sections indices tensor_indices_or_sections",
    "expand": "implicit size other",
    "softmax": "dtype half_to_float",
    "zeros": "self size dtype layout device pin_memory memory_format",
    "copy": "self non_blocking",
    "col2im": "output_size",
    "lstm": "dropout train",
    "clone": "memory_format",
    "lift_fresh_copy": "memory_format",
    "cumsum": "dtype",
    "mean": "dtype",
    "cdist": "compute_mode",
    "dropout": "train",
    "rrelu": "generator",
    "to": "dtype device layout pin_memory non_blocking copy memory_format other",
}


def test_every_argument_of_every_overload_is_looked_at(read, refused):
    """Or what is left of it shows in the result."""
    asked, arguments = defaultdict(set), defaultdict(set)
    first = {}
    for name, f, *_ in read.readings:
        first.setdefault(f, name)
    for _, f, schema, seen, _ in [*read.readings, *refused.readings]:
        key = first[f], f"{schema.name}.{schema.overload_name}"
        asked[key] |= seen | set(NEUTRAL_ARGUMENTS.split())
        arguments[key] |= {a.name for a in schema.arguments}
    unseen = {
        key: left
        for key, given in arguments.items()
        if (left := given - asked[key] - set(TOLD_BY_THE_RESULT.get(key[0], "").split()))
    }
    assert unseen == {}


#: overloads that `torch.export` never leaves in a program, that a CPU does not have, whose shapes depend on values, or
#: that take packed sequences
NOT_IN_PROGRAMS = """
    to.prim_Device to.prim_dtype to.prim_other index.Tensor_hacked_twin index_put.hacked_twin numpy_T.a
    bmm.dtype mm.dtype copy.Dict_Tensor split.default tensor_split.tensor_indices_or_sections
    arange.start embedding_bag.default scatter.value_reduce lstm.data gru.data rnn_tanh.data rnn_relu.data
"""


def test_every_overload_that_takes_a_tensor_was_tried(read, refused):
    tried = read.tried | refused.tried
    missing = []
    for name in (n for n in READERS if hasattr(aten, n)):
        packet = getattr(aten, name)
        for overload in packet.overloads():
            schema = getattr(packet, overload)._schema
            makes = all("Tensor" in str(v.type) for v in schema.returns) and schema.returns
            plain = not schema.is_mutable and "name" not in overload.lower()  # names of dimensions
            if makes and plain and f"{name}.{overload}" not in tried:
                missing.append(f"{name}.{overload}")
    assert " ".join(sorted(missing)) == " ".join(sorted(NOT_IN_PROGRAMS.split()))
