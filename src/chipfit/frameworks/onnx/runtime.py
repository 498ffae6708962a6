"""Run ONNX models and single ONNX operators in float: by ONNX Runtime, else by ONNX's reference evaluator."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator

from chipfit.errors import CaptureError, DataError, GraphError, first_line, raise_bug
from chipfit.files import parse_json
from chipfit.frameworks.onnx.limits import traps
from chipfit.frameworks.onnx.model import OnnxModel, domain_of

#: version of the file format that every ONNX Runtime reads; opsets count by themselves
_IR_VERSION = 10


def session_of(model: OnnxModel) -> Any:
    """Return the session of a model, which it keeps; raises as `session`."""
    if model.session is None:
        model.session = _session_of(model)
    return model.session


@contextmanager
def only_here(model: OnnxModel) -> Iterator[None]:
    """Run a model with the memory of its weights and activations alone, and give it back after the block."""
    before = model.session
    try:
        if before is None:
            model.session = _session_of(model, lean=True)
        yield
    finally:
        model.session = before


def _session_of(model: OnnxModel, *, lean: bool = False) -> Any:
    try:
        proto = ir.to_proto(model)
    except ir.serde.SerdeError as e:
        raise CaptureError(f"The ONNX model is malformed: {first_line(e.__cause__ or e)}") from e
    proto.ir_version = min(proto.ir_version, _IR_VERSION)
    return session(proto, model.folder, lean=lean)


def session(proto: onnx.ModelProto, folder: str = "", *, lean: bool = False) -> Any:
    """Return an object whose `run(None, feeds)` computes a model.

    Args:
        folder: of external data.
        lean: leave weights where they are, for one run: no copies of them in another order or folded.

    Raises:
        CaptureError: ONNX Runtime refuses the model.
    """
    try:
        import onnxruntime
    except ImportError:
        return _reference(proto)
    levels = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = levels.ORT_DISABLE_ALL if lean else levels.ORT_ENABLE_BASIC
    if lean:
        options.enable_cpu_mem_arena = False
        options.add_session_config_entry("session.disable_prepacking", "1")
    if folder:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    try:
        return onnxruntime.InferenceSession(_bytes_of(proto), options, providers=["CPUExecutionProvider"])
    except Exception as e:  # its exceptions derive from nothing else
        # newer than this ONNX Runtime, or an operand that it knows as a constant only
        if any(word in str(e) for word in ("NOT_IMPLEMENTED", "opset", "ShapeInference", "Unrecognized attribute")):
            return _reference(proto)
        hint = "onnx.checker.check_model(model, full_check=True) names the fault"
        raise CaptureError(f"ONNX Runtime refuses the model: {first_line(e)}", hint=hint) from e


def _reference(proto: onnx.ModelProto) -> ReferenceEvaluator:
    try:
        return ReferenceEvaluator(proto)
    except Exception as e:  # of many types
        raise_bug(e)
        raise CaptureError(f"No runtime can run the model: {first_line(e)}") from e


def _bytes_of(proto: onnx.ModelProto) -> bytes:
    if proto.ByteSize() >= 1 << 31:
        hint = "onnx.save(model, path, save_as_external_data=True), and give the path"
        raise CaptureError("A model in memory is larger than 2 GB", got=f"{proto.ByteSize():,} bytes", hint=hint)
    return proto.SerializeToString()


def run(model: OnnxModel, inputs: Any) -> Any:
    """Return what a model computes: one tensor, or a list of them."""
    names = model.names()
    if isinstance(inputs, Mapping):
        given = [inputs[n] for n in names]
    else:
        given = list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]
    out = run_flat(model, given)
    return out[0] if len(out) == 1 else out


def run_flat(model: OnnxModel, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of a model for inputs in order, in the types that the model declares.

    Raises:
        CaptureError: The model fails.
    """
    feeds = {
        v.name: x.numpy().astype(v.dtype.numpy() if v.dtype is not None else x.numpy().dtype)
        for v, x in zip(model.inputs, inputs, strict=True)
    }
    running = session_of(model)
    try:
        return [as_tensor(np.asarray(y)) for y in running.run(None, feeds)]
    except Exception as e:  # its exceptions derive from nothing else
        got = ", ".join(f"{k} {v.dtype}{list(v.shape)}" for k, v in feeds.items())
        raise CaptureError(f"The model fails on the example input: {first_line(e)}", got=got) from e


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor, floats as float32."""
    kind = array.dtype.kind
    if kind not in "biuf":  # bfloat16 and other types that NumPy does not know
        array = array.astype(np.float32)
    array = array.astype(np.float32) if array.dtype.kind == "f" and array.dtype != np.float32 else array
    return torch.from_numpy(np.array(array, order="C"))


class OnnxFunction:
    """One ONNX operator as a function of tensors, which runs in float.

    Args:
        node: the operator, whose inputs are called "i0", "i1", ... and whose outputs "o0", "o1", ...
        opset: version of its domain.
    """

    def __init__(self, node: onnx.NodeProto, opset: int) -> None:
        self.node, self.opset = node, opset
        self.__name__ = self.__qualname__ = node.op_type
        self._sessions: dict[tuple[str, ...], Any] = {}

    @staticmethod
    def target(node: ir.Node, opset: int, count: int) -> str:
        """Return the target of an opaque node: the operator as JSON.

        Raises:
            CaptureError: It has attributes that are graphs, such as a loop.
        """
        proto = onnx.NodeProto()
        proto.CopyFrom(ir.serde.serialize_node(node))
        if any(a.HasField("g") or a.graphs for a in proto.attribute):
            hint = "make its condition or number of steps a constant of the model"
            raise CaptureError(f"Control flow '{node.op_type}' depends on data", where=node.name or "", hint=hint)
        proto.input[:] = [f"i{k}" if n else "" for k, n in enumerate(proto.input)]
        proto.output[:] = [f"o{k}" for k in range(count)]
        attributes = sorted(a.SerializeToString().hex() for a in proto.attribute)
        kind = [domain_of(node), node.op_type, opset, [bool(i) for i in proto.input], count, attributes]
        return f"onnx:{json.dumps(kind, separators=(',', ':'))}"

    @staticmethod
    def of_target(target: str) -> "OnnxFunction":
        """Return the function of a target.

        Raises:
            GraphError: The target is malformed.
        """
        return _of_target(target)

    def __call__(self, *inputs: Any) -> Any:
        tensors = [torch.as_tensor(x).detach().cpu() for x in inputs]
        feeds = {i: x.numpy() for i, x in zip([i for i in self.node.input if i], tensors, strict=True)}
        if traps(self.node.op_type, *feeds.values()):
            raise DataError(f"Operator '{self.node.op_type}' of ONNX divides the least integer by -1")
        types = tuple(f"{x.dtype}{x.ndim}" for x in feeds.values())
        if types not in self._sessions:
            self._sessions[types] = session(self._model(feeds))
        try:
            out = [as_tensor(np.asarray(y)) for y in self._sessions[types].run(None, feeds)]
        except Exception as e:  # its exceptions derive from nothing else
            got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in feeds.values())
            raise DataError(f"Operator '{self.node.op_type}' of ONNX fails: {first_line(e)}", got=got) from e
        return out[0] if len(out) == 1 else tuple(out)

    def _model(self, feeds: Mapping[str, np.ndarray]) -> onnx.ModelProto:
        kinds = {k: helper.np_dtype_to_tensor_dtype(x.dtype) for k, x in feeds.items()}
        ins = [helper.make_tensor_value_info(k, t, [None] * feeds[k].ndim) for k, t in kinds.items()]
        outs = [onnx.ValueInfoProto(name=o) for o in self.node.output]
        opsets = (
            [helper.make_opsetid("", self.opset)]
            if not self.node.domain
            else [helper.make_opsetid("", 17), helper.make_opsetid(self.node.domain, self.opset)]
        )
        graph = helper.make_graph([self.node], self.node.op_type, ins, outs)
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)


@cache
def _of_target(target: str) -> OnnxFunction:
    match parse_json(target.removeprefix("onnx:"), GraphError, where="an operator of ONNX"):
        case [str(domain), str(kind), int(opset), list(inputs), int(count), list(attributes)]:
            node = onnx.NodeProto(domain=domain, op_type=kind)
            node.input[:] = [f"i{k}" if given else "" for k, given in enumerate(inputs)]
            node.output[:] = [f"o{k}" for k in range(count)]
            try:
                node.attribute.extend(onnx.AttributeProto.FromString(bytes.fromhex(a)) for a in attributes)
            except Exception as e:  # of protobuf, or not hexadecimal
                raise GraphError("The attributes of an ONNX operator are malformed", got=first_line(e)) from e
            if domain not in ("", "com.microsoft"):
                raise GraphError("An ONNX operator has an unknown domain", got=domain[:80])
            return OnnxFunction(node, opset)
    raise GraphError("Operator is unknown to ONNX", got=target[:120])
