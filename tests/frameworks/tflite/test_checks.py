"""Files that would end LiteRT's process or fill all memory are refused by typed errors before LiteRT runs them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("ai_edge_litert")
from ai_edge_litert import schema_py_generated as schema
from flatbuffers import flexbuffers

from chipfit.errors import CaptureError
from chipfit.frameworks.tflite import custom_options
from chipfit.frameworks.tflite.adapter import Tflite
from chipfit.frameworks.tflite.capture import capture
from chipfit.frameworks.tflite.model import TfliteModel
from chipfit.frameworks.tflite.variables import packed

HUGE = 1 << 30
#: type of NumPy -> type in a file
KINDS = {"f4": schema.TensorType.FLOAT32, "i4": schema.TensorType.INT32, "b1": schema.TensorType.BOOL}


def tensor(name, kind, shape, buffer=0):
    t = schema.TensorT()
    t.name, t.shape, t.type, t.buffer = name, np.array(shape, np.int32), KINDS[kind], buffer
    return t


def buffer(data=None):
    b = schema.BufferT()
    b.data = data
    return b


def file_of(kind, inputs, x=(1, 4), integers=False, **options):
    """Return a file of one operator from "x" to "y".

    Args:
        inputs: "x", numbers of a constant, or None for an absent operand.
        integers: "x" and "y" are of 32 bits.
        options: of the operator: {"Reducer": {"keepDims": True}}.
    """
    model, graph, op, code = schema.ModelT(), schema.SubGraphT(), schema.OperatorT(), schema.OperatorCodeT()
    model.version, model.buffers, model.subgraphs, model.operatorCodes = 3, [buffer()], [graph], [code]
    number = "i4" if integers else "f4"
    graph.tensors, graph.operators = [tensor("x", number, x), tensor("y", number, x)], [op]
    for given in inputs:
        if isinstance(given, np.ndarray):
            model.buffers.append(buffer(np.frombuffer(given.tobytes(), np.uint8)))
            graph.tensors.append(tensor("c", given.dtype.str[1:], given.shape, len(model.buffers) - 1))
    rest = iter(range(2, len(graph.tensors)))
    op.inputs = np.array([-1 if i is None else 0 if isinstance(i, str) else next(rest) for i in inputs], np.int32)
    op.outputs, graph.inputs, graph.outputs = (np.array([k], np.int32) for k in (1, 0, 1))
    code.builtinCode = getattr(schema.BuiltinOperator, kind)
    code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), 1 + (kind == "BROADCAST_TO")
    for name, values in options.items():
        op.builtinOptions = getattr(schema, f"{name}OptionsT")()
        op.builtinOptionsType = getattr(schema.BuiltinOptions, f"{name}Options")
        for key, value in values.items():
            setattr(op.builtinOptions, key, value)
    return packed(model)


def refused(content, message):
    with pytest.raises(CaptureError, match=message):
        TfliteModel(content)


def ints(*numbers):
    return np.array(numbers, np.int32)


@pytest.mark.parametrize(
    "kind, inputs, x, options",
    [
        ("FILL", [ints(1, HUGE), np.array(1, np.float32)], (1, 4), {"Fill": {}}),
        ("TILE", ["x", ints(1, HUGE)], (1, 4), {"Tile": {}}),
        ("BROADCAST_TO", ["x", ints(1, HUGE)], (1, 1), {"BroadcastTo": {}}),
        ("PAD", ["x", ints(0, 0, 0, HUGE).reshape(2, 2)], (1, 4), {"Pad": {}}),
        ("RESIZE_NEAREST_NEIGHBOR", ["x", ints(1, HUGE)], (1, 2, 2, 1), {"ResizeNearestNeighbor": {}}),
        ("RESIZE_BILINEAR", ["x", ints(1 << 14, 1 << 14)], (1, 2, 2, 3), {"ResizeBilinear": {}}),
        ("SCATTER_ND", [ints(0).reshape(1, 1), "x", ints(HUGE, 4)], (1, 4), {"ScatterNd": {}}),
        ("RANGE", [np.array(v, np.float32) for v in (0, HUGE, 1)], (1, 4), {"Range": {}}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_results_that_memory_does_not_hold_are_refused(kind, inputs, x, options):
    refused(file_of(kind, inputs, x, **options), f"makes too large a tensor.*{kind}")


def test_results_of_ordinary_sizes_are_read():
    cases = ("TILE", ints(1, 3), {"Tile": {}}, 12), ("PAD", ints(0, 0, 1, 2).reshape(2, 2), {"Pad": {}}, 7)
    for kind, sizes, options, width in cases:
        (y,) = TfliteModel(file_of(kind, ["x", sizes], **options)).run([np.ones((1, 4), np.float32)])
        assert y.shape == (1, width)


def test_remainders_by_minus_one_are_refused_and_others_are_computed():
    refused(file_of("FLOOR_MOD", ["x", ints(-1)], integers=True, FloorMod={}), "divided by -1")
    (y,) = TfliteModel(file_of("FLOOR_MOD", ["x", ints(3)], integers=True, FloorMod={})).run([ints(-1, 0, 4, 5)[None]])
    assert y.tolist() == [[2, 0, 1, 2]]


def test_an_input_that_is_listed_twice_is_refused():
    table = schema.ModelT.InitFromPackedBuf(file_of("NEG", ["x"]), 0)
    table.subgraphs[0].inputs = np.array([0, 0], np.int32)
    refused(packed(table), "'x' is an input of the network several times")


@pytest.mark.parametrize("k", [0, 1])
def test_text_beside_operators_of_numbers_is_refused(k):
    table = schema.ModelT.InitFromPackedBuf(file_of("NEG", ["x"]), 0)
    table.subgraphs[0].tensors[k].type = schema.TensorType.STRING
    refused(packed(table), f"Tensor '{'xy'[k]}' holds text")


def test_a_custom_operator_without_a_kernel_is_named():
    for name in (b"FlexMatrixInverse", b"ethos-u"):
        table = schema.ModelT.InitFromPackedBuf(file_of("CUSTOM", ["x"]), 0)
        table.operatorCodes[0].customCode = name
        refused(packed(table), f"no kernel for the custom operator {name.decode()}.*Try: convert the model without it")


def test_scales_of_blocks_are_refused():
    table = schema.ModelT.InitFromPackedBuf(file_of("ADD", ["x", np.ones(4, "f4")]), 0)
    q = table.subgraphs[0].tensors[2].quantization = schema.QuantizationParametersT()
    q.detailsType, q.details = schema.QuantizationDetails.BlockwiseQuantization, schema.BlockwiseQuantizationT()
    q.details.blockSize = 32
    refused(packed(table), "Tensor 'c' has a scale for each block of its numbers.*Got: 32")


def test_a_negative_radius_is_refused():
    name, options = "LOCAL_RESPONSE_NORMALIZATION", {"LocalResponseNormalization": {"radius": -1}}
    refused(file_of(name, ["x"], (1, 2, 2, 1), **options), "radius of a normalization is negative.*Got: -1")


@pytest.mark.parametrize(
    "kind, inputs, options",
    [
        ("IF", [np.array(True), "x"], {"If": {"thenSubgraphIndex": 0, "elseSubgraphIndex": 0}}),
        ("WHILE", ["x"], {"While": {"condSubgraphIndex": 0, "bodySubgraphIndex": 0}}),
    ],
)
def test_a_subgraph_that_calls_itself_is_refused(kind, inputs, options):
    refused(file_of(kind, inputs, **options), "subgraph of the file calls itself")


@pytest.mark.parametrize("kind, inputs", [("RESHAPE", ["x", None]), ("ADD", ["x", None]), ("TRANSPOSE", ["x", None])])
def test_an_operator_without_an_operand_that_it_needs_is_refused(kind, inputs):
    """LiteRT reads the absent shape of a RESHAPE, and the process ends."""
    refused(file_of(kind, inputs), "lacks an operand")


def test_a_file_that_computes_a_scalar_is_read():
    graph = capture(TfliteModel(file_of("RELU", ["x"], x=())), (torch.tensor(2.0),))
    assert [n.op for n in graph.nodes] == ["Relu"] and any("computes 1 samples together" in n for n in graph.notes)


def test_an_example_of_indices_is_not_negative():
    x = Tflite().example(SimpleNamespace(inputs=[SimpleNamespace(signature=[1, 99], dtype="int32")]))
    assert x.shape == (1, 99) and x.dtype == torch.int32 and x.min() >= 0


def detections(options):
    """Return a file of TFLite_Detection_PostProcess with options: their bytes, or some by name beside common ones."""
    counts = {"max_detections": 3, "max_classes_per_detection": 1, "num_classes": 4, "use_regular_nms": True}
    rest = {"nms_score_threshold": 0.1, "nms_iou_threshold": 0.5} | {f"{axis}_scale": 1.0 for axis in "yxhw"}
    model = schema.ModelT.InitFromPackedBuf(
        file_of("CUSTOM", ["x", np.ones((1, 9, 4), "f4"), np.ones((9, 4), "f4")]), 0
    )
    model.operatorCodes[0].customCode = b"TFLite_Detection_PostProcess"
    graph, given = (
        model.subgraphs[0],
        options if isinstance(options, bytes) else flexbuffers.Dumps(counts | rest | options),
    )
    graph.tensors[0].shape = np.array((1, 9, 4), np.int32)
    graph.tensors += [tensor(f"y{k}", "f4", ()) for k in range(3)]
    graph.operators[0].outputs = graph.outputs = np.array((1, 4, 5, 6), np.int32)
    graph.operators[0].customOptions = np.frombuffer(bytes(given), np.uint8)
    return packed(model)


COMMON = bytes(flexbuffers.Dumps({"max_detections": 3, "num_classes": 4}))


@pytest.mark.parametrize(
    "options, message",
    [
        (b"", "not a map"),
        (COMMON[:-1] + b"\xff", "a number of 255 bytes"),
        (COMMON[:-3] + b"\xff" + COMMON[-2:], "a number of 1 bytes at byte -"),
        (COMMON.replace(b"num_classes", b"aum_classes"), "names that are not in order"),
        (bytes(flexbuffers.Dumps({"max_detections": "3"})), "'max_detections' is not a number"),
        ({"max_classes_per_detection": 0}, "'max_classes_per_detection' is 0, not a count"),
        ({"max_detections": 1 << 30}, "not a count from 1 to 1,048,576"),
        ({"num_classes": -(1 << 31)}, "'num_classes' is -2147483648"),
        ({"detections_per_class": 0.5}, "'detections_per_class' is 0.5"),
    ],
)
def test_options_of_detections_that_end_the_process_are_refused_before_it_reads_them(options, message):
    refused(detections(options), f"options of TFLite_Detection_PostProcess are malformed.*Got: .*{message}")


def test_options_of_detections_are_those_that_flexbuffers_holds():
    options = {"max_detections": 300, "num_classes": 4, "max_classes_per_detection": 1, "wide": 1 << 40, "real": -0.1}
    assert custom_options.detections(bytes(flexbuffers.Dumps(options))) == {
        **options,
        "detections_per_class": 100,
        "use_regular_nms": False,
    }
    assert len(TfliteModel(detections({})).run([np.ones((1, 9, 4), np.float32)])) == 4


def test_spectrograms_that_a_file_computes_are_refused_before_their_options_are_read():
    table = schema.ModelT.InitFromPackedBuf(file_of("CUSTOM", ["x"]), 0)
    table.operatorCodes[0].customCode = b"AudioSpectrogram"
    refused(packed(table), "The operator AudioSpectrogram has no reader.*behind its features")
