"""Files of a few bytes that would end the process, hang it or take all memory are refused by typed errors."""

import time

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from chipfit.engine.parts import part_labels
from chipfit.errors import CaptureError
from chipfit.frameworks import capture, load_model
from chipfit.graph.joins import Joins
from chipfit.pipeline import quantize
from chipfit.rounding.compare import Reference
from tests.onnx_models import onnx_of

INT32, INT64 = np.iinfo(np.int32), np.iinfo(np.int64)
IMAGE = torch.ones(2, 1, 2, 2)


def node(kind, inputs, output="y", **attributes):
    return helper.make_node(kind, inputs, [output], **attributes)


def model(nodes, constants=None, shape=("n", 4), opset=20):
    """Return a network from `x` to `y`."""
    return onnx_of(*nodes, inputs={"x": shape}, constants=constants, opset=opset)


def refused(proto, message, x=None):
    with pytest.raises(CaptureError, match=message):
        capture(load_model(proto), (torch.ones(2, 4) if x is None else x,))


@pytest.mark.parametrize("kind", ["Div", "Mod"])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_a_division_of_the_least_integer_by_minus_one_is_refused_in_constants(kind, dtype):
    numbers = {"a": np.full(4, np.iinfo(dtype).min, dtype), "b": np.array([-1], dtype)}
    added = [node(kind, ["a", "b"], "c"), node("Cast", ["c"], "f", to=1), node("Add", ["x", "f"])]
    refused(model(added, numbers), f"{kind}' divides the least integer by -1")


@pytest.mark.parametrize("kind", ["Div", "Mod"])
def test_a_division_of_the_least_integer_by_minus_one_is_refused_in_data(kind):
    """A float below the range of integers becomes the least one."""
    whole = [node("Cast", ["x"], "i", to=TensorProto.INT32), node(kind, ["i", "b"], "c"), node("Cast", ["c"], to=1)]
    refused(model(whole, {"b": np.array([-1], np.int32)}), "least integer by -1", torch.full((2, 4), -1e20))
    graph = capture(load_model(model(whole, {"b": np.array([-1], np.int32)})), (torch.full((2, 4), 5.0),))
    assert graph.outputs


HUGE = np.array([1, 1 << 30])
SUM = node("ReduceSum", ["c"], "s", keepdims=0), node("Add", ["x", "s"])


@pytest.mark.parametrize(
    "nodes, constants",
    [
        ([node("Range", ["a", "b", "d"], "r"), node("Cast", ["r"], "c", to=1), *SUM], {"a": 0, "b": 1 << 30, "d": 1}),
        ([node("Tile", ["x", "n"], "c"), *SUM], {"n": HUGE}),
        ([node("Expand", ["x", "n"], "c"), *SUM], {"n": np.array([1 << 30, 1, 1])}),
        ([node("ConstantOfShape", ["n"], "c"), *SUM], {"n": np.array([1 << 30])}),
        ([node("Pad", ["x", "n"], "c"), *SUM], {"n": np.array([0, 0, 0, 1 << 30])}),
        ([node("HannWindow", ["n"], "c"), *SUM], {"n": 1 << 30}),
        ([node("CenterCropPad", ["x", "n"], "c"), *SUM], {"n": np.array([2, 1 << 30])}),
        ([node("Concat", [f"d{k}"] * 2, f"d{k + 1}", axis=0) for k in range(60)] + [node("Add", ["x", "d60"])],
         {"d0": np.ones(1, np.float32)}),
        ([node("Concat", ["x", "x"], "d0", axis=1)]
         + [node("Concat", [f"d{k}"] * 2, f"d{k + 1}", axis=1) for k in range(60)]
         + [node("Relu", ["d60"])], {}),
    ],
    ids="range tile expand constant pad window crop constants doubled".split(),
)  # fmt: skip
def test_results_that_memory_does_not_hold_are_refused_before_they_are_computed(nodes, constants):
    refused(model(nodes, constants), "makes too large a tensor")


@pytest.mark.parametrize("by", [{"s": "sizes"}, {"f": "scales"}], ids=["sizes", "scales"])
def test_an_image_that_memory_does_not_hold_is_not_resized(by):
    numbers = {"s": np.array([2, 1, 2, 1 << 30]), "f": np.array([1, 1, 1, 1 << 29], np.float32)}
    (name,) = by
    inputs = ["x", "", "", "s"] if name == "s" else ["x", "", "f"]
    whole = [node("Resize", inputs, "c"), node("ReduceSum", ["c"])]
    refused(model(whole, {name: numbers[name]}, ("n", 1, 2, 2)), "makes too large a tensor", IMAGE)


def test_an_image_smaller_than_a_window_is_refused_for_that():
    layer = model([node("Conv", ["x", "w"])], {"w": np.ones((1, 1, 4, 4), np.float32)}, ("n", 1, "h", "w"))
    refused(layer, r"'Conv' makes a negative size.*-1.*smaller than a window", IMAGE)


@pytest.mark.parametrize(
    "kind, attributes, opset, message",
    [
        ("DepthToSpace", {"blocksize": 1 << 40}, 20, "blocksize of operator 'DepthToSpace'.*Got: 1099511627776"),
        ("DepthToSpace", {"blocksize": 0}, 20, "blocksize of operator 'DepthToSpace'.*Got: 0"),
        ("AveragePool", {"kernel_shape": [1, 1 << 30], "pads": [0, 1 << 29] * 2}, 20, "kernel_shape.*Got: 1073741824"),
        ("RandomNormalLike", {"dtype": 1 << 40}, 20, "dtype of operator"),
    ],
)
def test_attributes_beyond_all_bounds_are_refused(kind, attributes, opset, message):
    refused(model([node(kind, ["x"], **attributes)], shape=("n", 1, 2, 2), opset=opset), message, IMAGE)


def test_an_error_tells_where_in_the_reader_it_arose_and_holds_no_weights():
    with pytest.raises(CaptureError, match="'Softmax' is malformed") as refused:
        quantize(model([node("Softmax", ["x"], axis=1.5)]), [torch.ones(2, 4)], progress=False)
    assert refused.traceback[-1].path.name == "translate.py"
    inner = [entry.frame.f_locals for entry in refused.traceback if entry.path.parent.name == "onnx"]
    assert inner and not any(f for f in inner[-3:])


def test_attention_without_heads_is_refused():
    whole = model([node("Attention", ["x"] * 3, q_num_heads=0, kv_num_heads=1)], shape=("n", 3, 4), opset=23)
    refused(whole, "q_num_heads.*Got: 0", torch.ones(2, 3, 4))


def looped(inner, state, result):
    """Return a loop of "m" steps whose state runs through a node from "v" to "w"."""
    values = [helper.make_tensor_value_info("k", 7, []), helper.make_tensor_value_info("go", 9, [])]
    outs = [onnx.ValueInfoProto(name=n) for n in ("on", "w")]
    nodes = [node("Identity", ["go"], "on"), inner]
    body = helper.make_graph(nodes, "body", [*values, onnx.ValueInfoProto(name="v")], outs)
    return node("Loop", ["m", "", state], result, body=body)


@pytest.mark.parametrize("state", ["x", "c"], ids=["data", "constant"])
def test_a_loop_of_2_to_the_60_steps_is_refused_before_it_runs(state):
    begun = time.process_time()
    loop = looped(node("Identity", ["v"], "w"), state, "l")
    constants = {"m": 1 << 60, "c": np.ones(1, np.float32)}
    refused(model([loop, node("Add", ["x", "l"])], constants), "Loop' depends on data")
    assert time.process_time() - begun < 60


def test_loops_in_loops_are_refused_after_ten_thousand_nodes():
    inner = looped(node("Neg", ["v"], "w"), "v", "w")
    refused(model([looped(inner, "x", "y")], {"m": 1000}), r"too many nodes.*at most 10,000")


def test_a_constant_without_numbers_is_refused():
    proto = model([node("Add", ["x", "w"])])
    proto.graph.initializer.append(onnx.TensorProto(name="w", data_type=1, dims=[1 << 30]))
    refused(proto, r"Tensor 'w' does not fit its shape. Got: 0 numbers")


def test_more_axes_than_a_tensor_has_are_refused():
    refused(model([node("Unsqueeze", ["x", "a"])], {"a": np.arange(100_000)}), "Unsqueeze' cannot be computed")


def spoiled(change):
    proto = model([node("Add", ["x", "w"])], {"w": np.ones(4, np.float32)})
    change(proto.graph)
    return proto.SerializeToString()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda g: setattr(g.initializer[0], "data_type", 0), "'w' holds no numbers.*Got: undefined"),
        (
            lambda g: g.initializer[0].CopyFrom(TensorProto(name="w", dims=[1], data_type=8, string_data=[b"\0"])),
            "string",
        ),
        (lambda g: setattr(g.input[0].type.tensor_type, "elem_type", 0), "Input 'x' takes no numbers"),
        (lambda g: setattr(g.input[0].type.tensor_type, "elem_type", TensorProto.STRING), "Input 'x' takes no numbers"),
        (lambda g: g.input.append(g.input[0]), "several inputs with the name 'x'"),
        (lambda g: setattr(g.input[0].type.tensor_type.shape.dim[1], "dim_value", 1 << 40), "Input 'x' is too large"),
    ],
)
def test_inputs_and_weights_that_are_no_numbers_or_too_many_are_refused(change, message):
    with pytest.raises(CaptureError, match=message):
        load_model(spoiled(change))


def test_a_chain_of_any_length_is_followed_from_the_output_on():
    steps = [node("Add", ["x" if k == 0 else f"y{k}", "w"], f"y{k + 1}") for k in range(1200)]
    graph = capture(
        load_model(model([*steps, node("Mul", ["y1200", "w"])], {"w": np.ones(4, np.float32)})), (torch.ones(2, 4),)
    )
    assert part_labels(Joins(graph), graph.outputs[0]) is None


def test_parts_of_all_values_of_a_long_chain_are_found_in_linear_time():
    steps = [node("Mul", ["x" if k == 0 else f"y{k}", "w"], f"y{k + 1}") for k in range(4000)]
    constants = {"w": np.ones(4, np.float32)}
    graph = capture(load_model(model([*steps, node("Relu", ["y4000"])], constants)), (torch.ones(2, 4),))
    begun, joins = time.process_time(), Joins(graph)
    assert not any(map(joins.makes_parts, graph.nodes))
    assert time.process_time() - begun < 5


def test_tied_tensors_that_do_no_harm_are_rounded_together(monkeypatch):
    """A sum ties its operands; one run of the network for each of them would take time that grows with the square."""
    count, runs, loss = 200, [], Reference.loss
    monkeypatch.setattr(Reference, "loss", lambda *a, **k: runs.append(a) or loss(*a, **k))
    weights = {f"w{k}": np.full(4, 1.0 if k else 300.0, np.float32) for k in range(count)}
    nodes = [node("Mul", ["x", f"w{k}"], f"m{k}") for k in range(count)]
    sums = [node("Concat", [f"m{k}" for k in range(count)], "y", axis=1)]
    result = quantize(
        load_model(model(nodes + sums, weights)), [torch.rand(8, 4) for _ in range(2)], "tflite_int8", progress=False
    )
    assert len(result.plan.ties[0]) > count and len(runs) < count / 2
    assert all(len(t.origin) < 300 for t in result.plan.tensors.values())


def test_what_no_output_needs_refuses_no_file():
    """Labels of classes, and branches of other domains or on sequences, whose results nothing reads."""
    branch = [
        helper.make_node("ZipMap", ["x"], ["map"], domain="ai.onnx.ml", classlabels_int64s=[0, 1]),
        node("SequenceConstruct", ["x", "x"], "pair"),
        node("Constant", [], "text", value_strings=["cat", "dog"]),
        node("Frobnicate", ["x"], "z"),
    ]
    proto = model([*branch, node("Relu", ["x"])])
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    proto.graph.initializer.append(helper.make_tensor("labels", TensorProto.STRING, [2], [b"cat", b"dog"]))
    proto.graph.initializer.append(helper.make_tensor("batches_tracked", TensorProto.INT64, [], [7]))
    proto.graph.input.append(helper.make_tensor_value_info("batches_tracked", TensorProto.INT64, []))  # as in version 3
    before = proto.SerializeToString()
    graph = capture(load_model(proto), (torch.ones(2, 4),))
    assert [n.op for n in graph.nodes] == ["Relu"] and graph.inputs == ["x"]
    assert proto.SerializeToString() == before
    read = model([node("Relu", ["x"]), node("Identity", ["labels"], "l")])
    read.graph.initializer.append(proto.graph.initializer[0])
    read.graph.output.append(helper.make_tensor_value_info("l", TensorProto.STRING, [2]))
    refused(read, "'labels' holds no numbers.*Got: string")


def calling(count, functions, opset=20):
    """Return a chain of calls of the last function, `F0(a) = -relu(a)`, `F1(a) = F0(a)`, ..."""
    ways = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    bodies = [[node("Relu", ["a"], "t"), node("Neg", ["t"], "b")]]
    bodies += [[node(f"F{k}", ["a"], "b", domain="own")] for k in range(functions - 1)]
    last = f"F{functions - 1}"
    proto = model([node(last, [f"v{k}" if k else "x"], f"v{k + 1}", domain="own") for k in range(count)])
    proto.graph.output[0].name = f"v{count}"
    proto.opset_import.append(ways[1])
    for k, body in enumerate(bodies):
        proto.functions.append(helper.make_function("own", f"F{k}", ["a"], ["b"], body, ways))
    return proto


def test_many_calls_of_a_function_take_linear_time_and_their_nodes_have_names_of_their_own():
    begun = time.process_time()
    proto = calling(4000, 1)
    proto.functions[0].node[0].name = "first"
    names = [n.name for n in load_model(proto).graph if n.op_type == "Relu"]
    assert len({*names}) == 4000
    assert time.process_time() - begun < 10


def test_functions_that_call_one_another_too_deep_or_have_another_opset_are_refused():
    assert len(load_model(calling(2, 60)).graph) == 4
    refused(calling(1, 2000), "call one another too deep")
    recursive = calling(1, 2)
    recursive.functions[0].node[0].op_type, recursive.functions[0].node[0].domain = "F1", "own"
    refused(recursive, "call one another too deep.*none of itself")
    refused(calling(1, 1, opset=13), "'own.F0' has other versions.*Got: 13.*Allowed: 20")
