"""A model that is watched gives the program that `torch.export` finds; what watching does not tell is left to that."""

import copy
import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from chipfit.engine.run import run
from chipfit.errors import CaptureError
from chipfit.frameworks.torch.capture import capture, export
from chipfit.frameworks.torch.program import Unrecordable
from chipfit.frameworks.torch.record import record, recorded_result
from chipfit.frameworks.torch.translate import translate
from chipfit.graph.ir import OPAQUE, Graph
from tests.build import model_of
from tests.processes import python
from tests.zoo import make


class Function(nn.Module):
    """A function of one batch, beside a layer and a buffer."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function
        self.dense = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4, 4))
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.loose = torch.ones(4)

    def forward(self, input):
        return self.function(self, input)


def contents(graph: Graph) -> list[object]:
    """Return what a graph holds, without the numbers."""
    nodes = [tuple(getattr(n, f) for f in n.__dataclass_fields__) for n in graph.nodes]
    weights = [(name, w.shape, w.dtype) for name, w in graph.weights.items()]
    spec = [graph.inputs, graph.outputs, graph.in_spec, graph.out_spec, sorted(graph.trainable), graph.notes]
    return [*nodes, *graph.values.items(), *weights, *spec]


def watched(model: nn.Module, batch: torch.Tensor) -> Graph:
    program, out = record(copy.deepcopy(model), (batch,), {})
    return translate(program, model, ((batch,), {}), out)


def exported(model: nn.Module, batch: torch.Tensor) -> Graph:
    return translate(export(copy.deepcopy(model), (batch,), {}), model, ((batch,), {}), model(batch))


def check_any_batch(graph: Graph, model: nn.Module) -> None:
    for count in (1, 2, 7):
        more = torch.randn(count, 4)
        assert torch.equal(run(graph, [more])[graph.outputs[0]], model(more))


NETWORKS = (
    "residual residual_prelu inverted_residual_hardswish squeeze_excite unet_bilinear split attention_fused "
    "attention_manual shapes conv1d padding_modes pixel_shuffle_norms grouped_strided"
).split()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_that_is_watched_has_the_graph_that_torch_export_gives(name):
    model, batch = make(name)
    assert contents(watched(model, batch)) == contents(exported(model, batch))


@functools.lru_cache
def rows_of(shape):
    return shape[0] * shape[1] // 2, 2


def by_cache(m: Function, x: torch.Tensor) -> torch.Tensor:
    """Reshape as einops does: with a cache by sizes, which symbols have no place in."""
    try:
        rows = rows_of(tuple(x.shape))
    except TypeError:
        rows = rows_of.__wrapped__(tuple(x.shape))
    return x.view(rows).tanh()


NUMBERS, PARAMETER = np.arange(4, dtype=np.float32), nn.Parameter(torch.ones(4))
SAME = {
    "the batch in a view": lambda m, x: x.view(x.shape[0], 2, -1).flatten(1),
    "a multiple of the batch in a view": lambda m, x: x.view(2 * x.shape[0], -1).sum(-1),
    "the batch and more in a view": lambda m, x: F.pad(x, (0, 0, 1, 0)).view(x.size(0) + 1, 2, 2).tanh(),
    "a broadcast over the batch": lambda m, x: x.unsqueeze(1).expand(x.shape[0], 3, 4) * m.table[:3],
    "what dropout makes, and what it reads": lambda m, x: x.tanh() + F.dropout(x.tanh(), 0.5, m.training),
    "a second name of the same tensor": lambda m, x: x.contiguous().to(torch.float32) + x,
    "an activation in place": lambda m, x: F.relu(m.dense(x), inplace=True).add_(1),
    "an assertion about a shape": lambda m, x: torch._assert(x.dim() == 2, "rows") or x + 1,
    "rows by number": lambda m, x: x * m.table[:, torch.arange(3)].sum(1),
    "dropout in place of a view": lambda m, x: F.dropout(x.tanh().flatten(1), 0.5, m.training, inplace=True) * 2,
    "parts": lambda m, x: torch.cat(torch.split(x, [1, 3], 1)[::-1], 1) + torch.stack(x.unbind(1), 1),
    "a maximum with its place": lambda m, x: x.max(1, keepdim=True)[0] - x,
    "several results": lambda m, x: {"a": m.dense(x), "b": [x, None, 3, m.table]},
    "a weight as a constant": lambda m, x: (x @ m.table.T).softmax(-1),
    "a tensor that is made": lambda m, x: x + torch.arange(4) / 4,
    "a loop over a fixed axis": lambda m, x: sum(x[..., k] * k for k in range(x.shape[1])),
    "a region without gradients": lambda m, x: torch.no_grad()(m.dense)(x),
    "a part of a multiple of the batch": lambda m, x: x.view(2 * x.shape[0], 2).view(2 * x.shape[0] // 2, -1).tanh(),
    "sizes in a cache": by_cache,
    "sizes of axes by keyword": lambda m, x: x + 1 if x.size(dim=0) > 0 and x.size(dim=1) == 4 else x,
    "a rest that every batch leaves": lambda m, x: x + 1 if 2 * x.shape[0] % 2 == 0 else x,
    "what is known of the batch": lambda m, x: x + 1 if x.shape == x.tanh().shape else x,
    "what is left out of an export": lambda m, x: x + 1 if torch.compiler.is_exporting() or x.sum() > 0 else x,
    "an entry that is written": lambda m, x: x.tanh().index_fill_(1, torch.tensor([0]), 0.0),
    "attributes and numbers": lambda m, x: x * m.loose - torch.tensor([1.0, 2, 3, 4]) + torch.from_numpy(NUMBERS),
    "a parameter of no module": lambda m, x: x * PARAMETER,
    "a choice by a fixed axis": lambda m, x: m.dense(x) if x.shape[-1] > 3 and x.is_floating_point() else x,
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_watched_is_what_torch_export_finds(name):
    model, batch = Function(SAME[name]).eval(), torch.randn(2, 4)
    assert contents(watched(model, batch)) == contents(exported(model, batch))


def caught(m: Function, x: torch.Tensor) -> torch.Tensor:
    try:
        return x * (x.shape[0] // 4)
    except Exception:
        return x


def replaced(m: Function, x: torch.Tensor) -> torch.Tensor:
    m.loose = m.loose * 0.5
    return x * m.loose


#: `torch.export` slices the batch from its begin to its end there, which counts in the names of other slices
WHOLE = {
    "an axis behind the batch": lambda m, x: x[:, None, :] * m.table[None, :3] + x[:, None, None, 1],
    "columns": lambda m, x: x[:, 1:] + x[:][:, :3] + x[..., :-1],
    "the whole batch in an index": lambda m, x: x[:, 1],
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_batch_in_an_index_is_no_call(name):
    model, batch = Function(WHOLE[name]).eval(), torch.randn(2, 4)
    graph, other = watched(model, batch), exported(model, batch)
    said, want = ([(n.op, n.attrs, g.shape(n.output)) for n in g] for g in (graph, other))
    assert said == want
    check_any_batch(graph, model)


@pytest.mark.parametrize("function", [lambda m, x: x[:1] + x, lambda m, x: x[1:, None].sum() + x, lambda m, x: x[:-1]])
def test_a_part_of_the_batch_in_an_index_leaves_it_open(function):
    model, batch = Function(function).eval(), torch.randn(2, 4)
    check_any_batch(watched(model, batch), model)


PAIRS = {
    "split": lambda y, n: torch.split(y, n, 0),
    "chunk": lambda y, n: torch.chunk(y, 2, 0),
    "slices": lambda y, n: (y[:n], y[n:]),
    "slices with both ends": lambda y, n: (y[0:n], y[n : 2 * n]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_images_of_one_backbone_are_told_apart(name):
    """As siamese networks do: both batches in one call, and each one's features afterwards."""

    def forward(m, x):
        first, second = PAIRS[name](m.dense(torch.cat([x, x * 2], 0)).tanh(), x.shape[0])
        return first - second * 3

    model = Function(forward).eval()
    graph = watched(model, torch.randn(2, 4))
    assert {"Reshape", "Select"} <= {n.op for n in graph} and all(n.op != OPAQUE for n in graph)
    check_any_batch(graph, model)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.cat([x, x])[1 : x.shape[0]],
        lambda m, x: x[: x.shape[0] - 1],
        lambda m, x: torch.cat(torch.split(torch.cat([x] * 6), [2 * x.shape[0], x.shape[0], 3 * x.shape[0]])[::-1]),
    ],
)
def test_other_parts_of_several_batches_stay_whole_operators(function):
    model = Function(function).eval()
    graph = watched(model, torch.randn(3, 4))
    assert OPAQUE in {n.op for n in graph}
    check_any_batch(graph, model)


#: what is given the size itself; `torch.export` names it after every one that it read
SIZES = {
    "the batch in a product": lambda m, x: x / x.shape[0],
    "the batch as the end of a count": lambda m, x: x + torch.arange(x.shape[0])[:, None],
    "the batch as a number of copies": lambda m, x: (
        x * m.table[:2, :2].repeat(x.shape[0], 2).view(x.shape[0], 2, -1)[:, 1]
    ),
    "the batch in a mask": lambda m, x: x * (torch.arange(x.shape[0]).view(-1, 1) > -1),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_is_computed_with_is_read_from_the_input(name):
    model, batch = Function(SIZES[name]).eval(), torch.randn(4, 4)
    graph = watched(model, batch)
    assert [n.inputs for n in graph if n.op == "Size"] == [("input",)]
    check_any_batch(graph, model)


UNRECORDABLE = {
    "a branch on a value": lambda m, x: x if x.sum() > 0 else -x,
    "a value as a number": lambda m, x: x * float(x.max()),
    "a value as a bound of Python": lambda m, x: x * max(x.max().item(), 0.5),
    "a value that depends on the batch": lambda m, x: x if (torch.arange(x.shape[0]) > 9).any() else -x,
    "values in numpy": lambda m, x: x * float(x.numpy().max()),
    "values in a list": lambda m, x: x * x.tolist()[0][0],
    "rows that values choose": lambda m, x: x[x[:, 0] > 0],
    "columns that values choose": lambda m, x: x[:, m.table[0] > 0],
    "an assertion about values": lambda m, x: torch._assert((x > 0).all(), "positive") or x,
    "a part of the batch": lambda m, x: x * (x.shape[0] // 4),
    "a limit on the batch": lambda m, x: x if x.shape[0] < 8 else -x,
    "a part of the batch and more": lambda m, x: F.pad(x, (0, 0, 2, 0)).view((2 * x.shape[0] + 4) // 2, 4)[:, 0],
    "another part of the batch": lambda m, x: x.view(2 * x.shape[0] // 3 or 1, -1),
    "a batch that happens to be another size": lambda m, x: x if x.shape[0] == x.view(-1).shape[0] - 6 else -x,
    "the batch as a bound": lambda m, x: x + torch.arange(len(x))[:, None],
    "a loop over the batch": lambda m, x: torch.stack([m.dense(r) for r in x]),
    "one batch only": lambda m, x: x.view(2, 4) + m.table[:2],
    "a batch that is returned": lambda m, x: (x, x.shape[0]),
    "a number of elements that is looked at": lambda m, x: x if x.numel() == 8 else -x,
    "an exception that is caught": caught,
    "state that is written": lambda m, x: x + m.seen.add_(1),
    "a view that is written": lambda m, x: F.relu(x.tanh()[:, :2], inplace=True),
    "an attribute that is replaced": replaced,
    "numbers for each row": lambda m, x: x + torch.tensor([[float(k)] for k in range(len(x))]),
    "numbers that NumPy draws": lambda m, x: x * torch.from_numpy(np.random.rand(4)).float(),
    "what is drawn": lambda m, x: x + torch.rand_like(x),
}


@pytest.mark.parametrize("name", UNRECORDABLE)
def test_what_a_run_hides_cannot_be_recorded(name):
    model = Function(UNRECORDABLE[name]).eval()
    state, weight = torch.get_rng_state(), model.dense.weight.clone()
    with pytest.raises(Unrecordable):
        watched(model, torch.ones(2, 4))
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(weight, model.dense.weight)


def test_values_that_do_not_depend_on_the_input_may_be_read():
    """As `nn.Transformer` finds out whether a mask is causal, and as buffers tell whether a layer is ready."""
    net = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True)
    mask = net.generate_square_subsequent_mask
    model = model_of(lambda m, x: m.net(x, x, tgt_mask=mask(3)) * (1 if m.ready else 2) * int(m.count), net=net)
    model.register_buffer("ready", torch.tensor(True))
    model.register_buffer("count", torch.tensor(3))
    graph, x = watched(model, torch.randn(2, 3, 4)), torch.randn(5, 3, 4)
    torch.testing.assert_close(run(graph, [x])[graph.outputs[0]], model(x))


READ = {
    "a maximum": lambda m, x: m.dense(x) / x.abs().max().item(),
    "bounds": lambda m, x: m.dense(x).clamp(-x[:1, :1].item(), 2 * x.max().item() + 1),
    "a condition": lambda m, x: x.masked_fill(x > x.mean().item(), x.min().item()),
    "a parameter": lambda m, x: m.dense(x).clamp(-m.table[0, 1].item(), m.dense.weight.abs().max().item()),
}


@pytest.mark.parametrize("name", READ)
def test_a_number_of_a_tensor_follows_the_input(name):
    model = Function(READ[name]).eval()
    graph, x = watched(model, torch.rand(2, 4)), 3 * torch.rand(2, 4)
    assert all(n.op != OPAQUE for n in graph)
    torch.testing.assert_close(run(graph, [x])[graph.outputs[0]], model(x))


def test_an_attribute_that_is_replaced_is_no_constant_where_one_run_is_watched():
    with pytest.raises(Unrecordable):
        record(Function(replaced).eval(), (torch.ones(2, 4),), {}, sizes=())


def test_an_attribute_that_is_written_in_place_is_refused():
    with pytest.raises(CaptureError, match="Constant loose is mutated"):
        capture(Function(lambda m, x: x * m.loose.add_(1)).eval(), (torch.ones(2, 4),))


def test_constants_of_a_recorded_model_can_be_trained_with():
    graph = watched(Function(SAME["attributes and numbers"]).eval(), torch.ones(2, 4))
    assert {"loose", "lifted_tensor_0", "lifted_tensor_1"} <= graph.weights.keys()
    assert not any(w.is_inference() for w in graph.weights.values())


def test_what_cannot_be_recorded_is_exported():
    part = capture(Function(UNRECORDABLE["a part of the batch"]).eval(), (torch.randn(2, 4),))
    x = torch.randn(9, 4)
    assert torch.equal(run(part, [x])[part.outputs[0]], x * 2)


def test_parts_that_are_named_for_a_profiler_are_read():
    def forward(m, x):
        with torch.profiler.record_function("block"):
            return m.dense(x).relu()

    graph = watched(Function(forward).eval(), torch.randn(2, 4))
    assert [n.op for n in graph.nodes] == ["Linear", "Relu"]


def test_the_length_of_a_batch_leaves_it_open():
    graph = capture(Function(lambda m, x: x.view(len(x), 2, 2)).eval(), (torch.randn(2, 4),))
    assert graph.values[graph.outputs[0]].shape == (None, 2, 2)


@pytest.mark.parametrize("given", [(), (torch.ones(2, 4), torch.ones(2, 4))])
def test_other_arguments_than_the_model_takes_are_refused_as_the_model_refuses_them(given):
    with pytest.raises(CaptureError, match=r"The model fails on the example input: TypeError"):
        capture(Function(lambda m, x: m.dense(x)), given)


ACT, DENSE, BLOCK = nn.ReLU(), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
SHARED = {
    "an activation": nn.Sequential(nn.Linear(4, 4), ACT, nn.Linear(4, 4), ACT),
    "layers of several blocks": nn.Sequential(nn.Sequential(DENSE, ACT), nn.Sequential(DENSE, nn.Tanh()), ACT),
    "a block": nn.Sequential(BLOCK, BLOCK, ACT, nn.Sequential(ACT, BLOCK)),
}


@pytest.mark.parametrize("name", SHARED)
def test_layers_with_several_paths_have_those_of_torch_export(name):
    model, batch = SHARED[name].eval(), torch.randn(2, 4)
    assert contents(watched(model, batch)) == contents(exported(model, batch))


CONVOLUTIONS = {
    "by default": lambda x: F.conv2d(x, torch.ones(6, 4, 3, 3)),
    "with everything": lambda x: F.conv2d(x, torch.ones(6, 2, 3, 2), torch.ones(6), (2, 1), (1, 0), (1, 2), 2),
    "padded by name": lambda x: F.conv2d(x, torch.ones(6, 4, 3, 5), None, 1, "same"),
    "depthwise": lambda x: F.conv2d(x, torch.ones(4, 1, 3, 3), groups=4),
    "of a sample": lambda x: F.conv2d(x[0], torch.ones(6, 4, 3, 3)),
    "1d": lambda x: F.conv1d(x.flatten(2), torch.ones(6, 4, 3), torch.ones(6), 2, 1),
    "3d": lambda x: F.conv3d(x[:, :, None], torch.ones(6, 4, 1, 3, 3), None, 1, (0, 1, 1)),
    "channels last": lambda x: F.conv2d(x.contiguous(memory_format=torch.channels_last), torch.ones(6, 4, 3, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_watched_convolution_has_the_shape_and_layout_of_the_real_one(name):
    x, calls = torch.randn(2, 4, 9, 7), list[tuple]()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "conv" in func.__name__:
                calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(), Calls():
        want = CONVOLUTIONS[name](x)
    ((func, args, kwargs),) = calls
    got = recorded_result(func, args, kwargs)
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    assert bool(got.any()) == (name == "channels last")  # whose layout only the real one tells


@pytest.mark.parametrize(
    "wrong", [nn.Conv2d(6, 2, 3), nn.Conv2d(4, 2, 12), nn.Conv2d(4, 2, 3, dilation=9), nn.Conv1d(4, 2, 3)]
)
def test_a_convolution_that_does_not_fit_is_refused_as_the_model_refuses_it(wrong):
    with pytest.raises(CaptureError, match="The model fails on the example input: RuntimeError"):
        capture(nn.Sequential(wrong), (torch.randn(2, 4, 9, 7),))


def test_a_plain_network_is_quantized_without_loading_the_compiler():
    probe = (
        "import sys, torch, chipfit\n"
        "net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).eval()\n"
        "chipfit.quantize(net, [torch.randn(2, 3, 8, 8)], progress=False)\n"
        "print('LOADED', sorted({'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules)))"
    )
    assert python(probe).stdout == "LOADED []\n"
