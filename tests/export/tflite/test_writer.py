"""The file as a whole: what it refuses and in which words, what it says of itself, what runs in integers."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from torch import nn

import chipfit
from chipfit.errors import ExportError, UnsupportedError
from chipfit.export.tflite.builder import code_type
from chipfit.export.tflite.file import INT4, TYPES
from chipfit.export.tflite.ops import OPERATORS, REFUSED
from chipfit.export.tflite.writer import concrete_sizes, content, export_tflite
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.ir import Graph, Node, Value
from chipfit.operators.table import OPS
from chipfit.passes.decompose import RULES
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.registry import lookup
from chipfit.runtimes.litert import LiteRt
from tests.build import model_of, plan_of, platform_of, quantized, randn, sequential, stored
from tests.export.operators import alone
from tests.export.test_io_spec import Table
from tests.zoo import make

FLOAT, INT8 = TYPES["float32"], TYPES["int8"]
CONV = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}


def network(*nodes: Node, weights=None, outputs=None, **more) -> Graph:
    """Values by name, with their shapes and perhaps a dtype; what no node makes goes in, the last result comes out."""
    framework = more.pop("framework", "torch")
    values = {n: Value(n, *(v if isinstance(v[0], tuple) else (v,))) for n, v in more.items()}
    made = {o for n in nodes for o in n.outputs}
    inputs = [v for v in values if v not in made]
    return Graph(
        [*nodes], inputs, outputs or [nodes[-1].output], values, weights or {}, framework=framework,
        data_format="channels_last" if framework == "keras" else "channels_first",
    )  # fmt: skip


def node(op: str, reads: str, gives: str, **attrs: Any) -> Node:
    return Node(f"n_{gives[0]}", op, tuple(reads), tuple(gives), attrs)


def read(raw: bytes) -> Any:
    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(raw, 0))


def tensors(raw: bytes) -> dict[str, Any]:
    return {t.name.decode(): t for t in read(raw).subgraphs[0].tensors}


def operators(raw: bytes) -> list[str]:
    model, names = read(raw), {v: k for k, v in vars(schema.BuiltinOperator).items()}
    return [names[model.operatorCodes[o.opcodeIndex].builtinCode] for o in model.subgraphs[0].operators]


def entry(raw: bytes, name: str) -> bytes:
    model = read(raw)
    (found,) = (m for m in model.metadata if m.name == name.encode())
    return bytes(model.buffers[found.buffer].data)


def computed(raw: bytes, *inputs: np.ndarray) -> np.ndarray:
    """What LiteRT's reference kernels make of a file of one output."""
    interpreter = Interpreter(model_content=raw, experimental_op_resolver_type=OpResolverType.BUILTIN_REF)
    for d, x in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.resize_tensor_input(d["index"], x.shape)
    interpreter.allocate_tensors()
    for d, x in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(d["index"], x)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def tensor(name: str, scale=0.5, zero=0, role="activation", **grid: Any) -> TensorPlan:
    return TensorPlan(name=name, role=role, stored=stored(scale, zero, **grid))


RELU = network(node("Relu", "x", "y"), x=(None, 4), y=(None, 4))

# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("shape", [(None, None), (None, 3, None), (2, None, 4)])
def test_sizes_beside_the_batch_are_known(shape):
    graph = network(node("Relu", "x", "y"), x=shape, y=shape)
    with pytest.raises(UnsupportedError, match="Only the batch size can be open") as e:
        content(graph, None)
    assert f"'x' {list(shape)}" in str(e.value) and "pad, cut or resize" in str(e.value)


@pytest.mark.parametrize(
    "grid, why",
    [
        ({"signed": False}, "the file holds signed integers only"),
        ({"kind": "log", "table": (-1.0, 0.0, 1.0)}, "its results are integers, not codes of a table"),
        ({"per": "row"}, "the file has no scales per row"),
    ],
)
def test_what_the_file_cannot_store_is_named_with_its_format(grid, why):
    plan = Plan(tensors={"x": tensor("x", **grid), "y": TensorPlan(name="y", role="activation")})
    with pytest.raises(UnsupportedError) as e:
        content(RELU, plan)
    assert f"Got: tensor 'x' (a8): {why}." in str(e.value)
    content(RELU, Plan(tensors={"x": tensor("x"), "w": tensor("w", per="channel")}))


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_weights_with_zero_points_are_refused_because_integer_kernels_ignore_or_refuse_them(per, tmp_path):
    weights = {"bits": 8, "zero": "any", "per": per, **({"axis": "out"} if per == "channel" else {})}
    formats = {"a": {"bits": 8, "zero": "any"}, "w": weights, "b": {"bits": 32}}
    use = [{"in": "a", "w": "w", "b": "b", "out": "a"}]
    chip = platform_of({"match": ["Conv2D"], "use": use}, formats=formats, unlisted="float", place={"at": "both"})
    net = sequential(nn.Conv2d(3, 4, 1))
    net[0].weight.data.abs_()
    result = quantized(net, randn(2, 3, 4, 4), chip)
    with pytest.raises(UnsupportedError, match=r"tensor '0\.weight' \(w\): integer kernels take weights whose zero"):
        result.export(tmp_path / "m.tflite")


def test_reasons_are_told_once_each_for_all_that_they_concern():
    plan = Plan(tensors={n: tensor(n, signed=n not in "ab", per="row" if n == "c" else "tensor") for n in "abcd"})
    with pytest.raises(UnsupportedError) as e:
        content(RELU, plan)
    told = (
        "tensor 'a' (a8), tensor 'b' (a8): the file holds signed integers only; tensor 'c' (a8): the file has no scales"
    )
    assert told in str(e.value) and str(e.value).rstrip(".").endswith("quantize for a platform such as tflite_int8")


def test_a_plan_for_another_file_format_is_refused_in_a_few_lines():
    plan = Plan(tensors={f"t{k}": tensor(f"t{k}", signed=False) for k in range(40)}, platform="ort_cpu")
    with pytest.raises(UnsupportedError) as e:
        content(RELU, plan)
    assert "tensor 't5' (a8) and 34 more: the file holds" in str(e.value)
    assert str(e.value).endswith("Try: quantize for a platform such as tflite_int8.")


@pytest.mark.parametrize("platform", ["tflite_int8", "ethos_u", "xnnpack"])
def test_a_refusal_does_not_recommend_the_platform_in_use_or_one_of_its_kind(platform):
    plan = Plan(tensors={"x": tensor("x", signed=False)}, platform=platform)
    with pytest.raises(UnsupportedError, match="cannot hold all of this model") as e:
        content(RELU, plan)
    assert "quantize for a platform" not in str(e.value)


def test_a_value_of_a_type_that_the_file_has_not_is_named():
    graph = network(node("Relu", "x", "y"), x=((None, 4), "bfloat16"), y=((None, 4), "bfloat16"))
    with pytest.raises(UnsupportedError, match=r"value 'x', value 'y': the file has no type bfloat16"):
        content(graph, None)


def test_a_model_that_takes_no_such_batch_says_so():
    graph = network(node("Reshape", "x", "y", shape=(2, 6)), x=(None, 4), y=(2, 6))
    assert tensors(content(graph, None, batch=3))["y"].shape.tolist() == [2, 6]
    with pytest.raises(ExportError, match="does not run on a batch of 2: .*choose another `batch`"):
        content(graph, None, batch=2)


# ---------------------------------------------------------------- the batch


def transposed() -> Graph:
    made = node("TransposeConv2D", ["x", "w", None], "y", **{**CONV, "stride": (2, 2), "output_padding": (0, 0)})
    return network(made, x=(None, 3, 2, 2), y=(None, 4, 4, 4), weights={"w": torch.ones(3, 4, 2, 2)})


def test_the_batch_stays_open_unless_given_or_an_operator_fixes_it_at_one():
    def batch(graph, **how):
        t = tensors(content(graph, None, **how))["x"]
        return t.shape[0], None if t.shapeSignature is None else t.shapeSignature[0]

    assert batch(RELU) == (1, -1) and batch(RELU, batch=5) == (5, None)
    assert batch(transposed()) == (1, None) and batch(transposed(), batch=2) == (2, None)
    assert operators(content(transposed(), None)) == ["TRANSPOSE_CONV"]
    expanded = network(
        node("Size", "x", "n", axis=0), Node("n_v", "Expand", ("t", "n"), ("v",), {"shape": (None, 4)}),
        node("Add", "xv", "y"), x=(None, 4), t=(1, 4), n=((), "int"), v=(None, 4), y=(None, 4),
    )  # fmt: skip
    assert batch(expanded) == (1, None) and batch(expanded, batch=2) == (2, None)
    got = computed(content(expanded, None, batch=2), np.ones((2, 4), np.float32), X)
    assert got.tolist() == (np.ones((2, 4)) + X).tolist()


def test_samples_are_compared_only_where_their_number_is_given():
    graph = transposed()
    graph.values["z"] = Value("z", (None, None))
    with pytest.raises(UnsupportedError, match=r"compares samples with each other.*Got: z\. Try: pass `batch`"):
        content(graph, None)
    graph.values.update({f"z{k}": Value(f"z{k}", (None, None)) for k in range(9)})
    with pytest.raises(UnsupportedError, match=r"Got: z, z0, z1, z2, z3, z4, z5, z6\. "):
        content(graph, None)


# ---------------------------------------------------------------- what the file says of itself


@pytest.mark.parametrize(
    "framework, shape, kind, color",
    [
        ("torch", (None, 3, 8, 9), 2, 1),
        ("torch", (None, 1, 3, 3), 2, 2),
        ("torch", (3, 5, 1, 3), 1, None),
        ("torch", (None, 3, 8), 1, None),
        ("torch", (None, 5), 1, None),
        ("torch", (None, 3, 4, 4, 4), 1, None),
        ("keras", (None, 8, 9, 3), 2, 1),
        ("keras", (None, 3, 1, 5), 1, None),
    ],
)
def test_an_image_is_described_by_its_channels(framework, shape, kind, color):
    graph = network(node("Relu", "x", "y"), x=shape, y=shape, framework=framework)
    raw = entry(content(graph, None, mean=0.5, std=2.0), "TFLITE_METADATA")
    (unit,) = Table(raw).tables(3)
    (x,), (y,) = unit.tables(2), unit.tables(3)
    assert x.text(0) == "x" and x.table(3).byte(0) == kind and y.table(3).byte(0) == 1
    assert color is None or x.table(3).table(1).byte(0) == color


def test_the_file_says_how_values_lie_and_where_their_batch_is():
    conv = Node("n_v", "Conv2D", ("x", "w", None), ("v",), CONV)
    weights = {"w": torch.ones(4, 3, 1, 1)}
    graph = network(
        conv, node("Mean", "v", "m", axes=(2, 3), keepdims=False), node("Transpose", "m", "t", perm=(1, 0)),
        node("Sum", "m", "s", axes=(0,), keepdims=False),
        x=(None, 3, 5, 6), v=(None, 4, 5, 6), m=(None, 4), t=(4, None), s=(4,), weights=weights, outputs=[*"vmts"],
    )  # fmt: skip
    plan = Plan(platform="chip", provenance={"seed": 7})
    said = json.loads(entry(content(graph, plan), "chipfit"))
    assert said["platform"] == "chip" and said["provenance"] == {"seed": 7}
    assert said["inputs"] == [[0, 2, 3, 1]] and said["forms"]["x"] == said["forms"]["v"] == [0, 2, 3, 1]
    assert said["outputs"] == [[[0, 2, 3, 1], 0], [None, 0], [None, 1], [None, 0]]
    assert said["batch_axis"] == {"t": 1}  # 0 where it is not named
    whole = content(graph, plan, keep_layout=True)
    said = json.loads(entry(whole, "chipfit"))
    assert "inputs" not in said and said["outputs"][0] == [None, 0]  # what lies as in the model is left out
    assert tensors(whole)["x"].shape.tolist() == [1, 3, 5, 6] and operators(whole)[0] == "TRANSPOSE"


def test_all_tensors_of_a_value_are_noted():
    moved, relu = node("Transpose", "x", "t", perm=(1, 0)), node("Relu", "t", "y")
    graph = network(moved, relu, x=(None, 4), t=(4, None), y=(4, None))
    plan = Plan(tensors={"t": tensor("t")}, nodes={n.name: NodePlan(name=n.name, op=n.op) for n in (moved, relu)})
    said = json.loads(entry(content(graph, plan), "chipfit"))
    assert said["batch_axis"] == dict.fromkeys(["t", "t/float", "t/dequantized", "y"], 1)


@pytest.mark.parametrize("numbers", [[[1.5, -2.0, 0.25]], 1.5])
def test_a_constant_that_comes_out_is_a_copy(numbers):
    held = {"w": torch.tensor(numbers)}
    raw = content(network(node("Relu", "x", "y"), x=(None, 4), y=(None, 4), weights=held, outputs=["w"]), None)
    assert operators(raw)[-1] == "RESHAPE" and tensors(raw)["w/output"].shape.tolist() == [*np.shape(numbers)]
    assert json.loads(entry(raw, "chipfit"))["in_front"]["w/output"] == 0
    got = computed(raw, np.zeros((1, 4), np.float32))
    assert got.tolist() == numbers


@pytest.mark.parametrize("perm, turned, front", [((1, 0), (3, None), 3), ((0, 1), (None, 3), None)])
def test_the_notes_say_what_lies_in_front_of_the_samples_in_one_axis(perm, turned, front):
    """[N, 3] is turned to [3, N], or stays, and becomes one axis."""
    nodes = node("Transpose", "x", "y", perm=perm), node("Reshape", "y", "z", shape=(-1,))
    said = json.loads(entry(content(network(*nodes, x=(None, 3), y=turned, z=(None,)), None), "chipfit"))
    assert said.get("in_front") == ({"z": front} if front else None)


# ---------------------------------------------------------------- integers or floats


def grouped(*acts: Node, exec="int", **more) -> tuple[Graph, Plan]:
    """x * x, and what is fused behind it; x and the result in halves."""
    last = acts[-1].output if acts else "v"
    graph = network(node("Mul", "xx", "v"), *acts, **dict.fromkeys(["x", "v", *(a.output for a in acts)], (None, 4)))
    nodes = {n.name: NodePlan(name=n.name, op=n.op, exec=exec) for n in graph.nodes}
    groups = (tuple(nodes),) if len(nodes) > 1 else ()
    return graph, replace(plan_of(**{"x": stored(), last: stored()}), nodes=nodes, groups=groups, **more)


X = np.array([[-2.0, 1.0, 3.0, 0.0]], np.float32)
SIX, FOUR = node("Relu6", "v", "y"), node("Clamp", "y", "z", min=None, max=4.0)


@pytest.mark.parametrize("exec", ["int", "float"])
@pytest.mark.parametrize(
    "acts, written, want",
    [
        ((), ["MUL"], [4, 1, 9, 0]),
        ((SIX,), ["MUL"], [4, 1, 6, 0]),
        ((SIX, node("Relu", "y", "z")), ["MUL", "RELU6", "RELU"], [4, 1, 6, 0]),
        ((node("Clamp", "v", "y", min=-1.0, max=1.0),), ["MUL"], [1, 1, 1, 0]),
        ((node("Relu", "v", "y"), node("Relu6", "y", "z")), ["MUL", "RELU", "RELU6"], [4, 1, 6, 0]),
    ],
)
def test_an_activation_is_the_kernels_own_where_it_is_the_only_one(exec, acts, written, want):
    raw = content(*grouped(*acts, exec=exec))
    assert [op for op in operators(raw) if "QUANTIZE" not in op] == written and computed(raw, X).tolist() == [want]
    (g,) = read(raw).subgraphs
    product = next(o for o in g.operators if o.builtinOptionsType == schema.BuiltinOptions.MulOptions)
    kinds = {g.tensors[k].type for k in (*product.inputs, *product.outputs)}
    assert kinds == ({INT8} if exec == "int" else {FLOAT}) and ("v/inner" in tensors(raw)) is (len(acts) > 1)


def test_a_kernel_without_activations_of_its_own_is_followed_by_them():
    graph = network(node("LeakyRelu", "x", "v", negative_slope=0.5), SIX, x=(None, 4), v=(None, 4), y=(None, 4))
    nodes = {n.name: NodePlan(name=n.name, op=n.op) for n in graph.nodes}
    plan = Plan(tensors={n: tensor(n) for n in ("x", "y")}, nodes=nodes, groups=(tuple(nodes),))
    assert [op for op in operators(content(graph, plan)) if "QUANTIZE" not in op] == ["LEAKY_RELU", "RELU6"]
    assert computed(content(graph, plan), 4 * X).tolist() == [[0, 4, 6, 0]]


def test_a_bound_that_no_kernel_applies_is_written_in_floats_with_the_kernel():
    graph, plan = grouped(node("Clamp", "v", "y", min=None, max=4.0), exec="float")
    raw = content(graph, plan)
    assert [op for op in operators(raw) if "QUANTIZE" not in op] == ["MUL", "MINIMUM"]
    assert computed(raw, X).tolist() == [[4, 1, 4, 0]]


def in_codes(graph: Graph, plan: Plan) -> bool:
    """Return whether the first operator that is no quantizer reads integers."""
    raw = content(graph, plan)
    (g,) = read(raw).subgraphs
    first = next(o for o, name in zip(g.operators, operators(raw)) if "QUANT" not in name)
    return g.tensors[first.inputs[0]].type == INT8


def test_an_operator_is_written_in_integers_where_everything_that_it_takes_and_makes_is_codes():
    graph, plan = grouped()
    assert in_codes(graph, plan)
    assert not in_codes(graph, replace(plan, nodes={}))
    assert not in_codes(graph, replace(plan, nodes={"n_v": NodePlan(name="n_v", op="Mul", exec="float")}))
    for name in "xv":
        assert not in_codes(graph, replace(plan, tensors={n: t for n, t in plan.tensors.items() if n != name}))
    tanh = node("Tanh", "v", "y")
    assert not in_codes(*grouped(tanh)) and in_codes(*grouped(SIX))
    sine = network(node("Sin", "x", "v"), x=(None, 4), v=(None, 4))
    assert not in_codes(sine, Plan(tensors=plan.tensors, nodes={"n_v": NodePlan(name="n_v", op="Sin", exec="int")}))


def test_what_another_operator_reads_in_float_is_made_in_float():
    graph, plan = grouped()
    graph.nodes.append(node("Sin", "v", "s"))
    graph.values["s"], graph.outputs = Value("s", (None, 4)), ["s"]
    assert in_codes(graph, plan)
    early = replace(plan, float_edges=frozenset({("v", "n_s")}))
    assert not in_codes(graph, early)
    got = computed(content(graph, replace(early, tensors={n: tensor(n, 3.0) for n in "xv"})), X)
    np.testing.assert_allclose(got, np.sin(np.float32([[9.0, 0.0, 9.0, 0.0]])), atol=1e-6)  # -2 and 3 are steps of 3


@pytest.mark.parametrize("scale, codes", [(0.5, True), (0.25, False)])
def test_codes_are_moved_where_both_ends_have_one_set_of_numbers(scale, codes):
    graph = network(node("Transpose", "x", "v", perm=(1, 0)), x=(2, 4), v=(4, 2))
    plan = Plan(
        tensors={"x": tensor("x"), "v": tensor("v", scale)},
        nodes={"n_v": NodePlan(name="n_v", op="Transpose", exec="follow")},
    )
    assert in_codes(graph, plan) is codes
    assert computed(content(graph, plan), np.repeat(X, 2, 0)).tolist() == [[v, v] for v in X[0]]


def test_parts_are_moved_as_codes_where_all_have_the_numbers_of_the_whole():
    split = Node("n_v", "Split", ("x",), ("v", "u"), {"axis": 1, "sizes": (2, 2)})
    graph = network(split, x=(None, 4), v=(None, 2), u=(None, 2), outputs=["v", "u"])
    nodes = {"n_v": NodePlan(name="n_v", op="Split", exec="follow")}
    for scale, codes in ((0.5, True), (0.25, False)):
        plan = Plan(tensors={"x": tensor("x"), "v": tensor("v"), "u": tensor("u", scale)}, nodes=nodes)
        model = read(content(graph, plan))
        kinds = {t.name: t.type for t in model.subgraphs[0].tensors}
        assert kinds[b"u"] == INT8 and (b"u/float" in kinds) is not codes and (b"v/float" in kinds) is not codes


# ---------------------------------------------------------------- composites


def test_sizes_nobody_knows_are_those_of_an_example_or_one():
    graph = network(node("Relu", "x", "y"), x=(None, 4), y=(None, 4))
    graph.values["x"] = Value("x", (None, None))
    assert concrete_sizes(graph, 3) == {"x": (3, 1), "y": (3, 1)}
    graph.example = (torch.zeros(9, 5),)
    assert concrete_sizes(graph, 3) == {"x": (3, 5), "y": (3, 5)}


# ---------------------------------------------------------------- whole networks


def test_the_signature_has_the_models_names(tmp_path):
    model, batch = make("dict_out")
    file = export_tflite(capture(model, (batch,)), None, tmp_path / "m.tflite")
    signature = Interpreter(model_path=str(file)).get_signature_list()["serving_default"]
    assert sorted(signature["inputs"]) == ["batch_x", "batch_y_z"]


def test_transposed_convolutions_fix_the_batch_and_the_runtime_cuts_batches_up(tmp_path):
    model, x = nn.ConvTranspose2d(3, 4, 2, 2), torch.randn(5, 3, 6, 6)
    file = export_tflite(capture(model, (x,)), None, tmp_path / "m.tflite", batch=1)
    assert Interpreter(model_path=str(file)).get_input_details()[0]["shape_signature"].tolist() == [1, 6, 6, 3]
    np.testing.assert_allclose(next(iter(LiteRt(file).run([x.numpy()]).values())), model(x).detach().numpy(), atol=1e-5)


def test_executed_tells_xnnpacks_operators_from_litert_s_own(tmp_path):
    result = quantized(sequential(nn.Conv2d(3, 4, 1), nn.GELU()), torch.randn(2, 3, 4, 4), "tflite_int8")
    file, kinds = result.export(tmp_path / "m.tflite"), ("CONV_2D", "DEQUANTIZE", "QUANTIZE")
    assert LiteRt(file).executed() == {"GELU": 1} | {f"XNNPACK {kind}": 1 for kind in kinds}
    assert lookup("runtime", "litert_optimized")(file).executed() == dict.fromkeys(("GELU", *kinds), 1)


def test_everything_that_the_file_cannot_hold_is_named_in_one_error_and_no_file_is_left(tmp_path):
    upside = nn.ConvTranspose2d(4, 4, 3, 2, dilation=2)
    model = sequential(upside, nn.MaxPool2d(2, dilation=2), nn.Conv2d(4, 2, 1), nn.MaxPool2d(2, dilation=2))
    with pytest.raises(UnsupportedError) as e:
        quantized(model, torch.randn(2, 4, 9, 9), "tflite_int8").export(tmp_path / "m.tflite")
    reasons = "TransposeConv2D '0': it has dilation", "MaxPool '1', MaxPool '3': its window is dilated"
    assert all(part in str(e.value) for part in (*reasons, "Try: replace these layers"))
    assert not list(tmp_path.iterdir())


#: operators with integer kernels that files of others have; ours are written step by step
READ_ONLY = {"LSTM", "SVDF"}


def test_what_is_written_in_integers_is_simulated_in_integers():
    integer = {op for op, row in OPERATORS.items() if row.integer}
    moving = {op for op in integer if OPERATORS[op].moves}
    for kernels in ("litert_reference", "litert_optimized", "litert_xnnpack"):
        profile = lookup("kernels", kernels)
        assert {*profile.kernels, *profile.float_outputs} >= integer - moving
        assert set(profile.kernels) <= integer | READ_ONLY
        assert set(profile.pass_through) <= moving


def test_every_canonical_operator_has_a_row_or_a_rule_or_a_reason_why_the_file_cannot_hold_it():
    assert set(OPERATORS) | set(RULES) | set(REFUSED) == set(OPS)
    assert not set(REFUSED) & (set(OPERATORS) | set(RULES))


def apart(x):
    """How far each sample is from each other one, [N, N, 4]."""
    return x[:, None] - x[None]


OPEN, SAMPLES = "more than one axis .* run time, unless `batch` is given", "compares samples with each other.*Try: pass"


@pytest.mark.parametrize(
    "f, words",
    [
        (lambda x: apart(x).unsqueeze(-1), f"Unsqueeze '.*': {OPEN}"),
        (lambda x: apart(x)[..., :1].squeeze(-1), f"Squeeze '.*': {OPEN}"),
        (lambda x: apart(x).unflatten(2, (2, 2)), f"Reshape '.*': {OPEN}"),
        (lambda x: apart(x).flatten().view(x.shape[0], -1), SAMPLES),
        (lambda x: x @ torch.cat([torch.ones(1, 4).expand(x.shape[0], -1), x]).T, SAMPLES),
    ],
    ids=["unsqueeze", "squeeze", "reshape", "flatten", "product"],
)
def test_two_axes_that_follow_the_batch_are_written_for_a_batch_that_is_given(f, words, tmp_path):
    x, net = torch.randn(3, 4), model_of(lambda m, x: f(x) * 2)
    graph = capture(net, (x,))
    with pytest.raises(UnsupportedError, match=words):
        export_tflite(graph, None, tmp_path / "m.tflite")
    (got,) = LiteRt(export_tflite(graph, None, tmp_path / "m.tflite", batch=3)).run([x.numpy()]).values()
    np.testing.assert_allclose(got, net(x).numpy(), rtol=1e-5, atol=1e-5)


def test_a_transposed_convolution_that_same_places_is_one_operator(tmp_path):
    """Kernel 4, stride 2, padding 1 of 6 rows: 12 rows; SAME cuts (12/2 - 1) 2 + 4 - 12 = 2, one before, one behind."""
    for padding, more in ((1, []), (2, ["SLICE"]), (0, [])):
        graph = capture(nn.ConvTranspose2d(3, 4, 4, 2, padding), (torch.randn(2, 3, 6, 6),))
        assert operators(content(graph, None)) == ["TRANSPOSE_CONV", *more]


def test_layers_with_one_spatial_axis_hand_images_of_height_1_to_each_other(tmp_path):
    layers = [
        nn.Conv1d(4, 8, 5),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(8, 8, 3, groups=8),
        nn.Flatten(),
        nn.Linear(64, 3),
    ]
    x = torch.randn(8, 4, 24)
    result = quantized(sequential(*layers), x, "tflite_int8")
    file = result.export(tmp_path / "m.tflite", io="int8")
    one = ["RESHAPE", "CONV_2D", "MAX_POOL_2D", "DEPTHWISE_CONV_2D", "RESHAPE", "FULLY_CONNECTED"]
    assert operators(file.read_bytes()) == one
    for runtime in ("litert", "litert_optimized", "litert_reference"):
        check = result.verify([torch.randn(8, 4, 24)], runtime=runtime)
        assert check.exact and not check.not_compared and "compared 6 of 6 tensors" in check.summary()


NARROWEST = [("weight", 4, None), *(("weight", b, "int8") for b in (5, 8))]
NARROWEST += [("activation", b, "int16" if b < 17 else "int32") for b in (9, 16, 17)]


@pytest.mark.parametrize("role, bits, kind", [("bias", 32, "int32"), ("bias", 33, "int64"), *NARROWEST])
def test_codes_take_the_narrowest_type_that_holds_them(role, bits, kind):
    t = TensorPlan(name="t", role=role, stored=stored(1.0, bits=bits))
    assert code_type(t) == (TYPES[kind] if kind else INT4)


ROWS = torch.tensor([3, 0, 2]).reshape(-1, 1, 1, 1)
#: name -> function of an image and of others, and these; zeros unless given
PICKED = {
    "constant indices, some from the end": (lambda x, i: x[:, [0, -1, 1]],),
    "the row that each sample names": (lambda x, i: x.gather(1, i.expand(-1, -1, 6, 6)), ROWS),
    "the row at the end of each sample": (lambda x, i: x.gather(1, (i - 1).expand(-1, -1, 6, 6)), ROWS + 1),
    "the row of the largest index": (lambda x, i: x[torch.arange(x.shape[0]), i.flatten(1).argmax(1)], ROWS),
    "a row of each of a number of samples": (lambda x, i: x[torch.arange(len(x)), i.flatten()] + 1, ROWS),
    "a token before the others": (lambda x, i: torch.cat([i.expand(x.shape[0], -1, -1), x[:, 0]], 1), randn(1, 1, 6)),
}


@pytest.mark.parametrize("what", PICKED)
def test_what_is_picked_and_repeated_is_what_torch_has(what, tmp_path):
    f, *index = PICKED[what]
    inputs = torch.randn(3, 4, 6, 6), *(index or [torch.zeros(2)])
    file = export_tflite(capture(model_of(lambda m, x, i: f(x, i)), inputs), None, tmp_path / "m.tflite")
    (got,) = LiteRt(file).run([x.numpy() for x in inputs]).values()
    np.testing.assert_allclose(got, f(*inputs).numpy(), rtol=1e-6, atol=1e-6)


def test_heads_that_share_keys_are_written_without_copies_of_these():
    written = operators(content(alone("heads that share keys")[0], None))
    assert {"BATCH_MATMUL", "TILE", "BROADCAST_TO"} & set(written) == {"BATCH_MATMUL"}


@pytest.mark.parametrize("platform", ["tflite_int8", "tflite_int16x8"])
def test_linear_layers_read_images_as_they_lie_in_memory(platform, tmp_path):
    """The model flattens channels first, the file channels last: columns of weights change places instead."""

    def forward(m, x):
        y = m.conv(x).relu().flatten(1)
        return m.one(y), m.other(y)

    net = model_of(forward, conv=nn.Conv2d(3, 4, 3), one=nn.Linear(80, 5), other=nn.Linear(80, 2))
    result = quantized(net, randn(6, 3, 6, 7), platform)
    file = result.export(tmp_path / "m.tflite")
    assert [o for o in operators(file.read_bytes()) if "QUANTIZE" not in o] == [
        "CONV_2D",
        "RESHAPE",
        "FULLY_CONNECTED",
        "FULLY_CONNECTED",
    ]
    for runtime in ("litert", "litert_optimized", "litert_reference"):
        check = result.verify([randn(5, 3, 6, 7, seed=4)], runtime=runtime)
        assert check.exact and not check.not_compared and "100.00 % of all integers" in check.summary()


@pytest.mark.parametrize("case", ["returned", "tied", "float", "elsewhere"])
def test_images_turn_before_what_needs_their_channels_first(case, tmp_path):
    def forward(m, x):
        y = m.conv(x).relu()
        flat = y.flatten(1)
        more = {"returned": lambda: flat, "tied": lambda: m.fc.weight * 2.0, "elsewhere": lambda: flat * flat}
        return (m.fc(flat), more[case]()) if case in more else m.fc(flat)

    net, x = model_of(forward, conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(64, 5)), randn(6, 3, 6, 6)
    options = {"overrides": {"fc": "float"}} if case == "float" else {}
    result = quantized(net, x, "tflite_int8", **options)
    assert "TRANSPOSE" in operators(result.export(tmp_path / "m.tflite").read_bytes())
    assert result.verify([x]).exact


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("platform", ["tflite_int8", "tflite_int16x8", "tflm_cmsis_nn"])
def test_a_dropout_costs_no_operator(tmp_path, platform):
    """Each was a RESHAPE, and one behind the flattening kept the transposition in front of it."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(), nn.Conv2d(8, 8, 3), nn.Identity(), nn.Dropout2d()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(), nn.Linear(8 * 36, 5), nn.Dropout(), nn.Softmax(1))
    result = chipfit.quantize(model.eval(), [randn(4, 3, 10, 10)], platform, progress=False)
    path = result.export(tmp_path / "m.tflite")
    computes = [op for op in operators(path.read_bytes()) if op not in ("QUANTIZE", "DEQUANTIZE")]
    assert computes == ["CONV_2D", "CONV_2D", "RESHAPE", "FULLY_CONNECTED", "SOFTMAX"]
    assert result.verify(randn(4, 3, 10, 10, seed=1)).exact
