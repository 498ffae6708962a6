"""Operators without a canonical name, translated by PyTorch's own exporter: what it is given, and what comes back."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from chipfit.engine.examples import example_inputs
from chipfit.errors import UnsupportedError
from chipfit.export.onnx import opaque
from chipfit.export.onnx.builder import OnnxBuilder
from chipfit.export.onnx.writer import export_onnx
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.ir import OPAQUE, Graph, Value
from chipfit.plan.record import Plan
from tests.build import model_of, quantized
from tests.onnx_models import onnx_node, onnx_of
from tests.zoo import make


def graph_of(f, *xs):
    return capture(model_of(f, w=torch.tensor([1.0, 2.0, 4.0])), xs)


X = torch.linspace(0.5, 2, 6).reshape(2, 3)


@pytest.fixture(scope="module")
def graph():
    """A logarithm of the gamma function between two operators that a graph knows."""
    return graph_of(lambda m, x: torch.lgamma(torch.relu(x) + m.w) * 2, X)


def opaque_node(graph):
    return next(n for n in graph.nodes if n.op == OPAQUE)


def ready(graph, opset=18):
    builder = OnnxBuilder(graph, Plan(), opset)
    builder.after_quantizer |= {v: f"{v}_r" for v in graph.values}
    return builder


def region(graph):
    """A small model as the exporter makes it: with names of its own, one of them left out."""
    nodes = [onnx_node("b = Mul(a, k)", name="mul"), "c = Clip(b, -, k)", onnx_node("d = Neg(c)", name="neg")]
    return onnx_of(*nodes, inputs={"a": [2, 3]}, outputs={"d": [2, 3]}, constants={"k": np.float32(3)})


def test_a_translated_operator_is_spliced_in_under_names_of_its_own(graph, monkeypatch):
    asked = []

    def translated(given, example, shapes, opset):
        asked.append((given.inputs, [tuple(e.shape) for e in example], shapes, opset))
        return region(graph)

    monkeypatch.setattr(opaque, "translate", translated)
    builder, node = ready(graph), opaque_node(graph)
    builder.begin(node)
    (out,) = opaque.splice(builder, node)
    ((inputs, example, shapes, opset),) = asked
    assert inputs == [node.inputs[0]] and example == [(2, 3)] and shapes == [(None, 3)] and opset == 18
    mul, clip, neg = builder.nodes
    (constant,) = (i for i in builder.initialisers if builder.initialisers[i].name == i and i.endswith("/k"))
    assert list(mul.input) == [f"{node.inputs[0]}_r", constant]
    assert list(clip.input) == [mul.output[0], "", constant] and neg.input[0] == clip.output[0]
    assert neg.output[0] == out and all(n.name.startswith(f"{node.name}/opaque_") for n in builder.nodes)
    assert len({n.name for n in builder.nodes}) == 3 and mul.name.endswith("/mul") and clip.name == clip.output[0]
    assert numpy_helper.to_array(builder.initialisers[constant]) == 3
    (again,) = opaque.splice(builder, node)
    assert again != out and not {o for n in builder.nodes[:3] for o in n.output} & set(builder.nodes[3].output)


@pytest.mark.parametrize("error", [RuntimeError, opaque.torch.onnx.OnnxExporterError])
@pytest.mark.parametrize(
    "target, who, way",
    [
        ("aten.lgamma.default", "aten.lgamma.default", "or export without it"),
        ("keras:{}", "Special", "or set KERAS_BACKEND=torch, on which many layers have one"),
    ],
)
def test_an_operator_that_cannot_be_translated_is_refused_with_the_exporters_words(
    graph, monkeypatch, error, target, who, way
):
    def fails(*args):
        raise error("This is step 2/3 of the export") from ValueError("no decomposition\nand a long story")

    monkeypatch.setattr(opaque, "translate", fails)
    node = opaque_node(graph).with_(layer="head", layer_type="Special", source="net.py:7")
    node = node.with_(attrs={**node.attrs, "target": target})
    monkeypatch.setattr(opaque, "example_values", lambda *args: [])
    with pytest.raises(UnsupportedError) as refused:
        opaque.splice(ready(graph), node)
    assert refused.value.what == f"Operator '{who}' of 'head' has no ONNX form"
    assert refused.value.got == "no decomposition" and refused.value.where == "net.py:7"
    assert refused.value.hint == f"replace it by standard operators, {way}"


def test_an_operator_that_holds_for_one_batch_only_is_refused(tmp_path):
    """As PyTorch's form of an LSTM with a projection does."""
    graph = capture(nn.LSTM(3, 4, proj_size=2).eval(), (torch.randn(5, 2, 3),))
    with pytest.raises(UnsupportedError, match=r"'aten.lstm.input' of 'lstm' has no ONNX form"):
        export_onnx(graph, None, tmp_path / "lstm.onnx")


def test_an_exporter_that_returns_nothing_has_failed(graph, monkeypatch):
    monkeypatch.setattr("torch.onnx.export", lambda *args, **how: None)
    monkeypatch.setattr(torch.export, "export", lambda *args, **how: None)
    with pytest.raises(UnsupportedError, match="Got: torch.onnx.export returned nothing"):
        opaque.splice(ready(graph), opaque_node(graph))


def test_inputs_of_a_loaded_graph_are_random_numbers_and_ones():
    shapes = {"x": Value("x", (None, 3)), "i": Value("i", (None, None), "int64"), "h": Value("h", (1,), "float16")}
    x, i, h = example_inputs(Graph([], list(shapes), [], shapes, {}))
    assert x.shape == (2, 3) and x.dtype == torch.float32 and not torch.equal(x, torch.ones(2, 3))
    assert torch.equal(i, torch.ones(2, 32, dtype=torch.int64)) and h.dtype == torch.float16 and h.shape == (1,)


@pytest.fixture(scope="module")
def sized():
    """Half of the samples, whose number Python computes, and a constant that an operator makes."""
    return graph_of(lambda m, x: torch.atan2(torch.lgamma(x)[: x.shape[0] // 2], torch.arange(3.0)), X)


def test_integers_are_computed_again_inside_of_each_reader(sized):
    """Half of [2, 3] is the first row: of `lgamma`, and of the input, whose size is read again."""
    builder = ready(sized)
    half = next(n for n in sized.nodes if n.op == OPAQUE and sized.values[n.output].dtype == "int")
    assert opaque.splice(builder, half) == [""] and not builder.nodes and not builder.initialisers
    part = next(n for n in sized.nodes if half.output in n.inputs)
    inside = opaque.Region(sized, part)
    assert inside.inputs == [part.inputs[0], *sized.inputs] and inside.outputs == part.outputs
    assert [n.name for n in inside.nodes][-2:] == [half.name, part.name] and len(inside.nodes) == 3
    (got,) = inside(X, X)
    assert torch.equal(got, X[:1])


def test_a_constant_that_an_operator_makes_is_stored_and_lies_inside_of_its_readers(sized):
    builder, made = ready(sized), next(n for n in sized.nodes if n.op == OPAQUE and not n.inputs)
    (name,) = opaque.splice(builder, made)
    assert numpy_helper.to_array(builder.initialisers[name]).tolist() == [0, 1, 2] and not builder.nodes
    reader = next(n for n in sized.nodes if made.output in n.inputs)
    inside = opaque.Region(sized, reader)
    assert inside.inputs == [i for i in reader.inputs if i != made.output] and made in inside.nodes
    (got,) = inside(X)
    torch.testing.assert_close(got, torch.atan2(X, torch.arange(3.0)))


def test_weights_of_such_an_operator_are_inside():
    graph = graph_of(lambda m, x: torch.atan2(x, m.w), X)
    inside = opaque.Region(graph, opaque_node(graph))
    assert inside.inputs == graph.inputs and list(inside.weights) == ["w"]
    (got,) = inside(X)
    torch.testing.assert_close(got, torch.atan2(X, torch.tensor([1.0, 2.0, 4.0])))


def test_the_body_of_a_loop_reads_the_names_of_the_file_that_it_is_spliced_into(tmp_path):
    """PyTorch's exporter writes the mean of embeddings but those of one word as a loop with a body."""
    torch.manual_seed(0)
    table = nn.EmbeddingBag(20, 8, mode="mean", padding_idx=3)
    model = model_of(lambda m, ids: torch.relu(m.table(ids)), table=table)
    ids = torch.randint(0, 20, (2, 5))
    path = export_onnx(capture(model, (ids,)), None, tmp_path / "bags.onnx")
    assert "Loop" in {n.op_type for n in onnx.load(path).graph.node}
    more = torch.randint(0, 20, (7, 5))
    session = onnxruntime.InferenceSession(path)
    (got,) = session.run(None, {session.get_inputs()[0].name: more.numpy()})
    np.testing.assert_allclose(got, model(more).detach().numpy(), atol=1e-6)


def test_weights_of_opaque_operators_are_rounded_as_the_simulation_rounds_them(tmp_path):
    model, batch = make("gru")
    result = quantized(model, batch, "imx500")  # which stores them in 8 bits
    path = result.export(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(path))
    got = session.run(None, {session.get_inputs()[0].name: batch.numpy()})[0]
    np.testing.assert_allclose(got, result.model(batch).detach().numpy(), atol=1e-5)


def test_an_operand_may_be_a_view_of_another_size(tmp_path):
    """The zeros are expanded from a single one; the batch of the file stays open."""

    def greatest(m, x):
        values, at = torch.topk(m.f(x), 2, dim=-1)
        return torch.zeros(1).expand(x.size(0), 5).scatter_reduce(1, at, values, reduce="amax")

    result = quantized(model_of(greatest, f=nn.Linear(5, 5)), [torch.rand(4, 5) + k / 4 for k in range(3)], "ort_cpu")
    x = torch.rand(7, 5)
    path = result.export(tmp_path / "m.onnx")
    (got,) = onnxruntime.InferenceSession(path).run(None, {result.graph.inputs[0]: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), result.model(x))
