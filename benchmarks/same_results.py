"""Compare two states of this repository: run a corpus of cases with each, and list what differs.

    python benchmarks/same_results.py --against main             # this working tree against a revision
    python benchmarks/same_results.py --against old_record       # or against an earlier record
    python benchmarks/same_results.py record OUT --tree TREE     # record the chipfit in TREE/src
    python benchmarks/same_results.py compare OLD NEW            # compare two records

The corpus is this file's (with the networks of this tree's tests) for both trees, and uses public names only. It
compares numbers and texts: the saved plan, graph, weights and report of each result; the contents of exported files,
not their bytes; the results of the simulation and of `verify`; the output of the command line; and the type and message
of every error. With `--reload OLD`, which `--against` implies, the new tree also loads the results that the old tree
saved.

A case is recorded once for each state of tree and corpus; a second run does the missing ones. Both records must be made
on one machine, since runtimes compute differently on other processors. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import fnmatch
import gc
import hashlib
import importlib
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[1]

#: intended renames: a pattern in the old keys and texts -> the new text
RENAMED: dict[str, str] = {}

#: other intended differences: a pattern of whole keys -> reason
EXPECTED: dict[str, str] = {}

#: entries of saved files that hold versions, hashes, times or paths
LEFT_OUT = {
    "chipfit",
    "torch",
    "graph_sha256",
    "data_sha256",
    "platform_sha256",
    "timings",
    "file",
    "producer_version",
}

# ------------------------------------------------------------------------------------------------------ what was seen


class Facts:
    """The recorded facts of one case: texts by key, and counts of what they stand for."""

    def __init__(self, case: str, root: Path, work: Path) -> None:
        self.case, self.root, self.work = case, root, work
        self.said: dict[str, str] = {}
        self.counts = {"tensors": 0, "integers": 0, "refusals": 0}

    def say(self, key: str, text: Any) -> None:
        """Keep a text; a repeated key gets a number."""
        key, k = normal(key, self.work), 2
        while key in self.said:
            key, k = f"{key.partition(' #')[0]} #{k}", k + 1
        self.said[key] = normal(text if isinstance(text, str) else json.dumps(text), self.work)

    def table(self, key: str, data: Any) -> None:
        """Keep nested JSON data, one text for each leaf; lists of plain values are one leaf."""
        if isinstance(data, Mapping):
            for k, v in data.items():
                if k not in LEFT_OUT:
                    self.table(f"{key}.{k}", v)
            if not data:
                self.say(key, "{}")
        elif isinstance(data, (list, tuple)) and any(isinstance(v, (Mapping, list, tuple)) for v in data):
            for k, v in enumerate(data):
                self.table(f"{key}[{k}]", v)
        else:
            self.say(key, data)

    def array(self, key: str, a: Any) -> None:
        """Keep an array: every number of a small one, a digest of a large one."""
        a = np.asarray(a)
        self.counts["integers"] += a.size if a.dtype.kind in "iu" else 0
        self.say(key, array_text(a))

    def attempt(self, key: str, step: Callable[[], Any]) -> Any:
        """Return the result of `step`, or keep its error and return None."""
        try:
            return step()
        except (Exception, SystemExit) as e:
            self.counts["refusals"] += 1
            self.say(f"{key} refused", f"{type(e).__name__}: {e}")
            return None


def array_text(a: np.ndarray) -> str:
    """Return type, shape and content of an array as text.

    >>> array_text(np.float32([0.5, 1]))
    'float32[2] 0.5 1.0'
    """
    head = f"{a.dtype}{list(a.shape)} "
    if a.dtype.kind not in "biuf":  # numbers that numpy has no type for: as their bytes
        a = np.frombuffer(np.ascontiguousarray(a).tobytes(), np.uint8)
    if a.size <= 16:
        return head + " ".join(repr(v) for v in a.reshape(-1).tolist())
    digest = hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()[:20]
    return f"{head}{a.min().item()!r}..{a.max().item()!r} sha256 {digest}"


def normal(text: str, work: Path) -> str:
    """Return a text without what differs between runs: folders, line numbers, addresses, and facts about bytes."""
    if "/" in text or ".py" in text or "0x" in text:
        import chipfit

        for folder, name in ((work, "WORK"), (Path(chipfit.__file__).parents[1], "SRC"), (ROOT, "REPO")):
            text = text.replace(str(folder), f"<{name}>")
        text = re.sub(r"<SRC>/[\w/.-]+\.py:\d+", "<SRC>/...py:N", text)
        text = re.sub(r"\b(\w+\.py):\d+", r"\1:N", text)
        text = re.sub(r"0x[0-9a-f]{6,}", "0xN", text)
    if "sha256" in text or "(char " in text:  # sizes of files, whose bytes are not compared
        text = re.sub(r"\b[0-9a-f]{64}\b", "SHA", re.sub(r"\b\d+ bytes|'bytes': \d+", "N bytes", text))
        text = re.sub(r"line \d+ column \d+ \(char \d+\)", "(char N)", text)
    return text


# ------------------------------------------------------------------------------------------------------- saved results


def unmarked(x: Any) -> Any:
    """Return JSON of a saved result without its marks for tuples and for numbers that JSON cannot express."""
    if isinstance(x, Mapping) and len(x) == 1 and next(iter(x)) in ("$tuple", "$float", "$ref"):
        return unmarked(next(iter(x.values())))
    if isinstance(x, Mapping):
        return {k: unmarked(v) for k, v in x.items()}
    return [unmarked(v) for v in x] if isinstance(x, list) else x


def see_saved(facts: Facts, folder: Path, tag: str = "") -> None:
    """Record the directory of a saved result; only this function knows its layout."""
    from safetensors.torch import load_file

    plan, graph = (unmarked(json.loads((folder / f"{name}.json").read_text())) for name in ("plan", "graph"))
    numbers, weights = (load_file(folder / f"{name}.safetensors") for name in ("plan", "weights"))

    for name, t in plan["tensors"].items():
        facts.counts["tensors"] += 1
        facts.table(f"{tag}plan/tensor {name}", t)
    for name, a in sorted(numbers.items()):
        facts.array(f"{tag}plan/{name}", a.numpy())
    for name, n in plan["nodes"].items():
        facts.table(f"{tag}plan/node {name}", n)
    for key in ("tensors", "nodes"):
        facts.say(f"{tag}plan/order of {key}", list(plan[key]))
    for key in ("platform", "groups", "float_edges", "ties", "rewrites", "provenance"):
        facts.table(f"{tag}plan/{key}", plan[key])

    for name, v in graph["values"].items():
        facts.table(f"{tag}graph/value {name}", v)
    for n in graph["nodes"]:
        facts.table(f"{tag}graph/node {n['name']}", n)
    facts.say(f"{tag}graph/order of nodes", [n["name"] for n in graph["nodes"]])
    for key in sorted(set(graph) - {"schema", "values", "nodes"}):
        facts.table(f"{tag}graph/{key}", graph[key])
    for name, w in sorted(weights.items()):
        facts.array(f"{tag}weights/{name}", w.detach().contiguous().reshape(-1).numpy())

    platform = json.loads((folder / "platform.json").read_text())
    facts.say(f"{tag}platform", json.dumps({k: v for k, v in platform.items() if k not in LEFT_OUT}, sort_keys=True))
    if (folder / "report.json").is_file():
        facts.table(f"{tag}report", json.loads((folder / "report.json").read_text()))


# ------------------------------------------------------------------------------------------------------ exported files


def see_file(facts: Facts, path: Path, tag: str = "") -> None:
    """Record the contents of a deployed file."""
    key = f"{tag}file{path.suffix}"
    if path.suffix == ".json":
        facts.table(key, json.loads(path.read_text()))
    elif path.suffix == ".onnx":
        see_onnx(facts, key, path)
    else:
        see_tflite(facts, key, path)


def see_onnx(facts: Facts, key: str, path: Path) -> None:
    import onnx

    model = onnx.load(path)
    facts.say(f"{key}/header", [model.ir_version, model.producer_name, model.domain, model.doc_string])
    facts.say(f"{key}/opsets", [f"{o.domain}:{o.version}" for o in model.opset_import])
    for p in model.metadata_props:
        facts.table(f"{key}/metadata {p.key}", json.loads(p.value) if p.value.startswith("{") else p.value)
    see_onnx_graph(facts, key, model.graph)
    for f in model.functions:
        see_onnx_nodes(facts, f"{key}/function {f.domain}:{f.name}", f.node)


def see_onnx_graph(facts: Facts, key: str, graph: Any) -> None:
    for kind in ("input", "output", "value_info"):
        for v in getattr(graph, kind):
            t = v.type.tensor_type
            dims = [d.dim_param or d.dim_value for d in t.shape.dim]
            facts.say(f"{key}/{kind} {v.name}", [t.elem_type, t.HasField("shape"), dims])
    facts.say(f"{key}/order of ends", [[v.name for v in ends] for ends in (graph.input, graph.output)])
    for t in graph.initializer:
        facts.counts["tensors"] += 1
        see_onnx_tensor(facts, f"{key}/initialiser {t.name}", t)
    see_onnx_nodes(facts, key, graph.node)


def see_onnx_nodes(facts: Facts, key: str, nodes: Iterable[Any]) -> None:
    from onnx import GraphProto, TensorProto, helper

    for k, n in enumerate(nodes):
        at = f"{key}/node {k}"
        facts.say(at, [n.domain, n.op_type, n.name, list(n.input), list(n.output)])
        for a in sorted(n.attribute, key=lambda a: a.name):
            value = helper.get_attribute_value(a)
            if isinstance(value, TensorProto):
                see_onnx_tensor(facts, f"{at}.{a.name}", value)
            elif isinstance(value, GraphProto):
                see_onnx_graph(facts, f"{at}.{a.name}", value)
            else:
                facts.say(f"{at}.{a.name}", repr(value))


def see_onnx_tensor(facts: Facts, key: str, t: Any) -> None:
    from onnx import TensorProto, numpy_helper

    a = numpy_helper.to_array(t)
    facts.array(key, a.astype(np.int32) if a.dtype.kind not in "biuf" and "int" in str(a.dtype) else a)
    facts.say(f"{key} type", TensorProto.DataType.Name(t.data_type))


def see_tflite(facts: Facts, key: str, path: Path) -> None:
    from ai_edge_litert import schema_py_generated as schema

    def word(kind: Any, value: int) -> str:
        return next((k for k, v in vars(kind).items() if v == value), str(value))

    def text(name: Any) -> str:
        return name.decode() if isinstance(name, bytes) else str(name)

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0))
    description = re.sub(r"\b\d[\w.]*", "N", text(model.description))
    facts.say(f"{key}/header", [model.version, description, len(model.subgraphs)])
    codes = [
        f"{word(schema.BuiltinOperator, max(c.builtinCode, c.deprecatedBuiltinCode))} {c.customCode} v{c.version}"
        for c in model.operatorCodes
    ]
    for m in model.metadata or ():
        content = bytes(model.buffers[m.buffer].data)
        parsed = json.loads(content) if content.startswith(b"{") else content.decode(errors="replace")
        facts.table(f"{key}/metadata {text(m.name)}", parsed)
    for d in model.signatureDefs or ():
        for kind, ends in (("inputs", d.inputs), ("outputs", d.outputs)):
            facts.say(f"{key}/signature {text(d.signatureKey)} {kind}", [[text(e.name), e.tensorIndex] for e in ends])
    numpy_types = {"INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FLOAT32": np.float32}
    for s, sub in enumerate(model.subgraphs):
        names = [text(t.name) for t in sub.tensors]

        def named(indices: Any, names: list[str] = names) -> list[str | None]:
            return [names[i] if i >= 0 else None for i in indices] if indices is not None else []

        facts.say(f"{key}/{s}/ends", [named(sub.inputs), named(sub.outputs)])
        facts.say(f"{key}/{s}/order of tensors", names)
        for t, name in zip(sub.tensors, names, strict=True):
            facts.counts["tensors"] += 1
            at, kind, q = f"{key}/{s}/tensor {name}", word(schema.TensorType, t.type), t.quantization
            shapes = [None if v is None else [int(i) for i in v] for v in (t.shape, t.shapeSignature)]
            facts.say(at, [kind, *shapes, bool(t.isVariable)])
            if q is not None and q.scale is not None:
                facts.array(f"{at} scale", np.asarray(q.scale, np.float32))
                facts.array(f"{at} zero point", np.asarray(q.zeroPoint, np.int64))
                facts.say(f"{at} axis", q.quantizedDimension)
            data = model.buffers[t.buffer].data
            if data is not None and len(data):
                facts.array(f"{at} content", np.frombuffer(bytes(data), numpy_types.get(kind, np.uint8)))
        for k, o in enumerate(sub.operators):
            at = f"{key}/{s}/operator {k}"
            facts.say(at, [codes[o.opcodeIndex], named(o.inputs), named(o.outputs)])
            if o.builtinOptions is not None:
                options = {k: np.asarray(v).tolist() for k, v in sorted(vars(o.builtinOptions).items())}
                facts.say(f"{at} options", [type(o.builtinOptions).__name__, {k: str(v) for k, v in options.items()}])
            if o.customOptions is not None and len(o.customOptions):
                facts.array(f"{at} custom options", np.frombuffer(bytes(o.customOptions), np.uint8))


# -------------------------------------------------------------------------------------------------------------- models


def flat(x: Any) -> Iterator[Any]:
    """Yield the arrays of a batch or of a model's result, in order."""
    if isinstance(x, Mapping):
        for k in x:
            yield from flat(x[k])
    elif isinstance(x, (list, tuple)):
        for v in x:
            yield from flat(v)
    elif dataclasses.is_dataclass(x):
        for f in dataclasses.fields(x):
            yield from flat(getattr(x, f.name))
    else:
        yield x


def as_numpy(x: Any) -> np.ndarray:
    import torch

    if isinstance(x, torch.Tensor):
        return x.detach().cpu().numpy()
    return np.asarray(x)


def call(model: Any, batch: Any) -> Any:
    """Call the model with a batch that has the structure of the data for `quantize`."""
    of_keras = any(c.__module__.partition(".")[0] == "keras" for c in type(model).__mro__)
    return model(*batch) if isinstance(batch, tuple) and not of_keras else model(batch)


def see_output(facts: Facts, model: Any, batch: Any, tag: str = "") -> None:
    """Record the outputs of the simulation, bit for bit."""
    import torch

    with torch.no_grad():
        for k, y in enumerate(flat(call(model, batch))):
            facts.array(f"{tag}output/{k}", as_numpy(y))


def see(
    facts: Facts, result: Any, batch: Any = None, tag: str = "", files: Iterable[str] = (), runtimes: Iterable[str] = ()
) -> Any:
    """Record everything about one result: saved, exported to `files`, simulated, and verified on `runtimes`."""
    import torch

    stem = slug(tag) or "result"
    keep = facts.root / "saved" / slug(facts.case) / stem
    tag = f"{tag}: " if tag else ""
    if facts.attempt(f"{tag}save", lambda: result.save(keep / "saved")):
        see_saved(facts, keep / "saved", tag)
        torch.save({"tag": tag, "batch": batch}, keep / "batch.pt")
    if batch is not None:
        facts.attempt(f"{tag}output", lambda: see_output(facts, result.model, batch, tag))
    for suffix in files:
        path = facts.work / f"{stem}{suffix}"
        if facts.attempt(f"{tag}file{suffix}", partial(result.export, path)):
            see_file(facts, path, tag)
            if suffix == ".json":
                see_file(facts, path.with_suffix(".onnx"), f"{tag}beside ")
    for runtime in runtimes:
        found = facts.attempt(f"{tag}verify {runtime}", lambda r=runtime: result.verify([batch], runtime=r))
        if found is not None:
            facts.table(f"{tag}verify {runtime}", found.to_dict())
            facts.counts["integers"] += found.integers
    return result


# --------------------------------------------------------------------------------------------------------------- cases


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of the corpus; its backend is Keras's, of which a process has one."""

    name: str
    run: Callable[[Facts], Any]
    backend: str = "torch"


def slug(name: str) -> str:
    """Return a case's name as a file name."""
    return re.sub(r"[^\w@.=-]+", "__", name)


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PLATFORMS = words(
    "ascend axis_artpec9 coreml edgetpu esp_dl et_vulkan ethos_u graphcore_fp8 hailo hexagon_nn imx500 inc_tensorflow "
    "k210 litert_ai_edge mediatek metax mnn mqbench_academic mqbench_stpu ncnn nnie nxp_neutron openvino_cpu "
    "openvino_gpu openvino_npu ort_cpu ort_qnn_ep ort_tensorrt_ep ppl_cuda ppl_dsp qnn_htp qnnpack qualcomm_aic100 "
    "rknn ryzen_ai_xdna samsung_enn snpe st_edge_ai st_neural_art stm32mp2_npu tengine tensorrt tflite_int16x8 "
    "tflite_int8 tflm_cmsis_nn tinyengine tvm_qnn vitis_dpu x86_fbgemm x86_onednn xnnpack"
)

#: platforms for every third network of PyTorch and every second one of Keras: power-of-two scales, ties, fixed
#: scales, weights per tensor, tables, bounded requantization, logarithmic and floating-point codes
SPREAD = words(
    "tflite_int16x8 tensorrt imx500 qnnpack vitis_dpu openvino_cpu ncnn snpe esp_dl k210 nnie graphcore_fp8 ethos_u "
    "x86_onednn tflm_cmsis_nn mqbench_academic rknn xnnpack tengine litert_ai_edge"
)

#: networks that torch's own exporter writes in part, which takes seconds
SLOW_TO_EXPORT = {"gru", "lstm", "in_place_index"}

OF_TFLITE = {"tflite_int8", "tflite_int16x8", "litert_ai_edge", "xnnpack"}


def cases() -> list[Case]:
    """Return the whole corpus."""
    import torch

    torch.manual_seed(0)  # some networks of the zoo get their weights when it is imported
    os.environ.setdefault("KERAS_BACKEND", "torch")
    from tests import zoo  # isort: skip
    from tests import keras_zoo

    out = [Case("public names", public_names)]
    for k, name in enumerate(zoo.ZOO):
        quick = name not in SLOW_TO_EXPORT
        written = (".onnx",) if quick or name == "gru" else ()
        on_ort = zoo_case("ort_cpu", name, written, ("onnxruntime",) if quick else ())
        on_litert = zoo_case("tflite_int8", name, (".tflite",), ("litert",) if quick else ())
        out += [Case(f"zoo/ort_cpu/{name}", on_ort), Case(f"zoo/tflite_int8/{name}", on_litert)]
        for j, platform in enumerate(SPREAD):
            if (k + j) % 3 == 0:
                files = () if not quick else (".tflite",) if platform in OF_TFLITE else (".onnx", ".json")
                out.append(Case(f"zoo/{platform}/{name}", zoo_case(platform, name, files)))
    for name in ("residual", "inverted_residual_hardswish"):
        for platform in sorted(set(PLATFORMS) - {c.name.split("/")[1] for c in out if c.name.endswith(f"/{name}")}):
            files = (".onnx", ".json", ".tflite")
            out.append(Case(f"zoo/{platform}/{name}", zoo_case(platform, name, files)))
    for name, platform, runtime in (
        ("residual", "tflite_int8", "litert_reference"),
        ("squeeze_excite", "tflite_int8", "litert_optimized"),
        ("unet_transposed", "tflite_int16x8", "litert_reference"),
        ("residual_leaky", "ort_cpu", "openvino"),
        ("residual_sigmoid", "qnnpack", "onnxruntime"),
        ("fire", "xnnpack", "litert"),
    ):
        out.append(Case(f"runtime/{runtime}/{platform}/{name}", zoo_case(platform, name, (), (runtime,))))
    for revision in ("ort_cpu@AVX2", "ort_cpu@VNNI"):
        for name in ("residual", "grouped_strided"):
            out.append(Case(f"zoo/{revision}/{name}", zoo_case(revision, name, (".onnx",))))
    for name, platform in (("mobilenetv2", "ort_cpu"), ("mobilenetv2", "tflite_int8"), ("resnet18", "ort_cpu")):
        out.append(Case(f"benchmark/{platform}/{name}", partial(benchmark_case, platform=platform, name=name)))
    for k, name in enumerate(keras_zoo.ZOO):
        on_ort = keras_case("ort_cpu", name, (".onnx",), ("onnxruntime",) if k % 3 == 0 else ())
        on_litert = keras_case("tflite_int8", name, (".tflite",), ("litert",) if k % 2 else ())
        out += [Case(f"keras/ort_cpu/{name}", on_ort), Case(f"keras/tflite_int8/{name}", on_litert)]
        for j, platform in enumerate(SPREAD):
            if (k + j) % 2:
                files = (".tflite",) if platform in OF_TFLITE else (".json",)
                out.append(Case(f"keras/{platform}/{name}", keras_case(platform, name, files)))
    for platform in sorted(set(PLATFORMS) - {c.name.split("/")[1] for c in out if c.name.endswith("/mobilenet")}):
        out.append(Case(f"keras/{platform}/mobilenet", keras_case(platform, "mobilenet", (".onnx",))))
    for backend, names in (
        ("tensorflow", tuple(keras_zoo.ZOO)[:12]),
        ("jax", ("shared", "named_inputs", "sequential")),
    ):
        for name in names:
            run = keras_case("tflite_int8", name, (".tflite", ".onnx"), simulated=backend != "jax")
            out.append(Case(f"keras-{backend}/tflite_int8/{name}", run, backend))
    for make in (
        settings_cases,
        override_cases,
        rule_cases,
        edit_cases,
        data_cases,
        training_cases,
        facade_cases,
        editor_cases,
        info_cases,
        modelled_cases,
        lint_cases,
        command_line_cases,
        refusal_cases,
    ):
        out += [Case(name, run) for name, run in make()]
    assert len({slug(c.name) for c in out}) == len(out), "two cases have one name"
    return out


Cases = Iterator[tuple[str, Callable[[Facts], Any]]]


def fit(model: Any, data: Any, platform: Any = "ort_cpu", **options: Any) -> Any:
    import chipfit

    return chipfit.quantize(model, data, platform, progress=False, **options)


def zoo_case(platform: str, name: str, files: Iterable[str], runtimes: Iterable[str] = ()) -> Callable[[Facts], Any]:
    def run(facts: Facts) -> None:
        from tests.zoo import make

        model, batch = make(name)
        see(facts, fit(model, [batch], platform), batch, files=files, runtimes=runtimes)

    return run


def keras_net(name: str) -> tuple[Any, Any]:
    from tests.keras_zoo import make

    restart_keras()
    return make(name)


def restart_keras() -> None:
    """Let Keras name its layers from the start again."""
    import keras

    with mock.patch.object(gc, "collect"):  # takes seconds when graphs of torch.export exist
        keras.backend.clear_session()


def keras_case(
    platform: str, name: str, files: Iterable[str], runtimes: Iterable[str] = (), simulated: bool = True
) -> Callable[[Facts], Any]:
    def run(facts: Facts) -> None:
        model, batch = keras_net(name)
        result = fit(model, [batch], platform)
        see(facts, result, batch if simulated else None, files=files, runtimes=runtimes)

    return run


def benchmark_case(facts: Facts, platform: str, name: str) -> None:
    import torch
    from benchmarks.models import build

    model, batch = build(name), torch.randn(2, 3, 32, 32)
    see(facts, fit(model, [batch], platform), batch, files=(".tflite",) if platform in OF_TFLITE else (".onnx",))


# ------------------------------------------------------------------------------------------------------- public names

MODULES = (
    "chipfit",
    "chipfit.target_platform",
    "chipfit.hardware_representation",
    "chipfit.framework_info",
    "chipfit.core",
    "chipfit.ptq",
    "chipfit.network_editor",
    "chipfit.errors",
)


def public_names(facts: Facts) -> None:
    """Record every public name and its parameters."""
    import chipfit

    for module in MODULES:
        own = chipfit.network_editor if module == "chipfit.network_editor" else importlib.import_module(module)
        for name in sorted(getattr(own, "__all__", [n for n, v in vars(own).items() if made_here(n, v)])):
            thing = getattr(own, name)
            facts.say(f"{module}.{name}", f"{type(thing).__name__} {parameters(thing)}")
            for part in sorted(dir(thing)) if isinstance(thing, type) else ():
                if not part.startswith("_") and part not in ("with_traceback", "add_note"):
                    facts.say(f"{module}.{name}.{part}", parameters(getattr(thing, part)))


def made_here(name: str, thing: Any) -> bool:
    return not name.startswith("_") and isinstance(thing, type) and thing.__module__.startswith("chipfit")


def parameters(thing: Any) -> str:
    """Return names and defaults of a callable's parameters, without annotations."""
    if not callable(thing):
        return ""
    try:
        found = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return "?"
    plain = [p.replace(annotation=p.empty) for p in found]
    return ", ".join(re.sub(r"<(\w+).*>", r"<\1>", str(p)) for p in plain)


# --------------------------------------------------------------------------------------- settings, overrides, rules


def everything() -> tuple[Any, Any]:
    """Return a network with something for every optional step, and data for it."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Everything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.point = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 1, bias=False)
            self.skip, self.bounded, self.after = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 6, 3)
            self.a, self.b, self.head = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1), nn.Linear(8, 5)

        def forward(self, x: Any) -> Any:
            x = self.point(self.wide(x))
            x = F.silu(self.skip(x) + x)
            x = F.relu(self.after(F.relu6(self.bounded(x))))
            return self.head(torch.cat([self.a(x), self.b(x) * 3], 1).mean((2, 3))).softmax(-1)

    torch.manual_seed(0)
    return Everything().eval(), 3 * torch.randn(8, 3, 10, 10)


def keras_everything() -> tuple[Any, Any]:
    """Return a Keras network with something for every optional step, and data for it."""
    import keras
    from keras import layers

    restart_keras()
    keras.utils.set_random_seed(0)
    given = keras.Input((10, 10, 3))
    x = layers.Conv2D(8, 1, use_bias=False)(layers.Conv2D(8, 3, padding="same", use_bias=False)(given))
    x = layers.Activation("swish")(layers.Add()([layers.Conv2D(8, 3, padding="same")(x), x]))
    x = layers.ReLU(6.0)(layers.Conv2D(6, 1)(x))
    x = layers.ReLU()(layers.Conv2D(6, 3, padding="same", name="wide")(x))
    x = layers.Concatenate()([layers.Conv2D(4, 1)(x), layers.Conv2D(4, 1)(x)])
    x = layers.Softmax()(layers.Dense(5, name="head")(layers.GlobalAveragePooling2D()(x)))
    return keras.Model(given, x), 3 * np.random.default_rng(0).standard_normal((8, 10, 10, 3)).astype(np.float32)


STEPS: dict[str, Any] = {
    "collapse_linear": True,
    "collapse_residual": True,
    "relu_bound": True,
    "equalize": True,
    "shift_negative": 0.5,
    "softmax_shift": True,
    "concat_ranges": True,
    "correct_second_moment": True,
    "correct_bias": True,
    "correct_activation_bias": 0.0,
}


def settings_cases() -> Cases:
    def run(facts: Facts, platform: str, steps: Mapping[str, Any], net: Callable[[], Any], files: Any) -> None:
        import chipfit

        model, x = net()
        settings = chipfit.Settings(**steps)
        facts.say("settings", repr(settings))
        runtimes = ("onnxruntime",) if platform == "ort_cpu" else ()
        see(facts, fit(model, [x[:4], x[4:]], platform, settings=settings), x, files=files, runtimes=runtimes)

    said = {name: {name: value} for name, value in STEPS.items()}
    said |= {
        "all": STEPS,
        "none": {},
        "short tails": {"shift_negative": 0.001},
        "much": {"correct_activation_bias": 9.0},
    }
    for name, steps in said.items():
        for platform in ("ort_cpu", "imx500", "tflite_int8"):
            files = (".tflite",) if platform == "tflite_int8" else (".onnx",)
            yield (
                f"settings/{platform}/{name}",
                partial(run, platform=platform, steps=steps, net=everything, files=files),
            )
        yield f"settings/keras/{name}", partial(run, platform="imx500", steps=steps, net=keras_everything, files=())


def override_cases() -> Cases:
    import torch

    import chipfit
    from chipfit.core.network_editor import NodeNameFilter, NodeNameScopeFilter, NodeTypeFilter

    conv, add = NodeTypeFilter(torch.nn.Conv2d), NodeTypeFilter(torch.add)
    said: dict[str, tuple[str, Any]] = {
        "layer in float": ("ort_cpu", {"head": "float"}),
        "operator in float": ("ort_cpu", {"Add": "float"}),
        "type in float": ("tflite_int8", {"Conv2d": "float"}),
        "glob in float": ("tensorrt", {"*.0": "float"}),
        "path in float": ("vitis_dpu", {"a": "float", "b": "float"}),
        "bits of weights": ("imx500", {"a.0": {"bits": 4}, "b.0": {"bits": 2}}),
        "4 bits on tflite": ("tflite_int8", {"Conv2D": {"bits": 4}}),
        "weights in float": ("imx500", {"head": {"bits": "float"}}),
        "results in float": ("imx500", {"a.2": {"activation_bits": "float"}}),
        "16 bits": ("ethos_u", {"Add": {"activation_bits": 16}}),
        "16 bits in qnn": ("qnn_htp", {"*": {"activation_bits": 16}}),
        "the chip's own choice": ("imx500", [("*", {"bits": 4}), ("head", {"bits": None})]),
        "symmetric results": ("ort_cpu", {"Linear": {"method": "symmetric"}}),
        "powers of two": ("ort_cpu", {"*": {"method": "power_of_two"}}),
        "powers of two for weights": ("ort_cpu", {"Conv2D": {"weight_method": "power_of_two"}}),
        "powers of two on tflite": ("tflite_int8", {"Relu": {"method": "power_of_two"}}),
        "one scale": ("ort_cpu", {"b.0": {"per": "tensor"}}),
        "sign": ("imx500", {"a.2": {"signed": True}}),
        "rules": ("ort_cpu", {"a.0": {"weight_rule": "no_clipping"}, "Add": {"rule": "percentile(share=0.9)"}}),
        "known range": ("ort_cpu", {"head": {"range": (-4.0, 3)}}),
        "known range on tflite": ("tflite_int8", {"stem": {"range": (0, 6)}}),
        "outliers": ("ort_cpu", {"stem.2": {"z_threshold": 2.0}}),
        "later wins": ("imx500", [("Conv2D", {"bits": 4}), ("stem", {"bits": 8}), ("a.0", {"bits": 2})]),
        "filter by type": ("imx500", [(conv, {"bits": 4})]),
        "filter joined": ("imx500", [(conv & ~NodeNameFilter("a.0"), {"bits": 2}), (add | conv, {"rule": "mae"})]),
        "filter by scope": ("ort_cpu", [(NodeNameScopeFilter("stem"), "float")]),
    }

    def run(facts: Facts, platform: str, overrides: Any) -> None:
        from tests.zoo import make

        model, batch = make("residual")
        runtimes = ("onnxruntime",) if platform == "ort_cpu" else ()
        files = (".tflite",) if platform == "tflite_int8" else (".onnx",)
        see(facts, fit(model, [batch], platform, overrides=overrides), batch, files=files, runtimes=runtimes)
        rows = chipfit.lint(model, batch, platform, overrides).rows
        facts.table("lint", [dataclasses.asdict(r) for r in rows])

    for name, (platform, overrides) in said.items():
        yield f"overrides/{name}", partial(run, platform=platform, overrides=overrides)

    def on_keras(facts: Facts) -> None:
        model, batch = keras_net("mobilenet")
        overrides = {"Conv2D": {"bits": 4}, "DepthwiseConv2D": "float", "Add": {"rule": "no_clipping"}}
        see(facts, fit(model, [batch], "tflite_int8", overrides=overrides), batch, files=(".tflite",))

    yield "overrides/keras", on_keras


RULES = (
    "mse",
    "mae",
    "no_clipping",
    "kl",
    "kl(steps=11)",
    "lp",
    "lp(p=3)",
    "percentile",
    "percentile(share=0.95)",
    "std",
    "std(k=1.5)",
    "smooth_min_max",
    "NOCLIPPING",
    "KLDObserver",
    "quantile",
)


def rule_cases() -> Cases:
    import torch

    def twice(sample: Any, grid: Any) -> dict[str, Any]:
        return {"threshold": 2 * sample.high}

    def run(facts: Facts, platform: str, name: str, **options: Any) -> None:
        from tests.zoo import make

        model, batch = make(name)
        see(facts, fit(model, [batch, 2 * batch, batch**3], platform, **options), batch)

    for rule in RULES:
        for platform in ("ort_cpu", "imx500", "qnnpack", "nnie", "tflite_int16x8"):
            options = {"platform": platform, "name": "residual_silu", "rule": rule}
            yield f"rules/{platform}/{rule}", partial(run, **options)
            yield (
                f"rules of weights/{platform}/{rule}",
                partial(run, **(options | {"rule": "mse", "weight_rule": rule})),
            )
    for z in (1.0, 3.0, 12.0):
        yield f"rules/outliers beyond {z}", partial(run, platform="ort_cpu", name="residual", z_threshold=z)
    yield "rules/another seed", partial(run, platform="ort_cpu", name="residual", seed=7)
    heavy = torch.randn(400, 4, generator=torch.Generator().manual_seed(0)).pow(3)

    def tails(facts: Facts, rule: str) -> None:
        torch.manual_seed(0)
        see(facts, fit(torch.nn.Linear(4, 3), heavy, "qnnpack", rule=rule), heavy[:16])

    for rule in RULES:
        yield f"rules/heavy tails/{rule}", partial(tails, rule=rule)

    def own(facts: Facts) -> None:
        from chipfit.core.network_editor import ChangeQuantizationParamFunction, EditRule, NodeNameFilter, to_overrides
        from tests.zoo import make

        model, batch = make("residual")
        action = ChangeQuantizationParamFunction(weights_quantization_params_fn=twice)
        overrides = to_overrides([EditRule(NodeNameFilter("a.0"), action)])
        see(facts, fit(model, [batch], overrides=overrides), batch)

    yield "rules/a function of one's own", own


def edit_cases() -> Cases:
    said: dict[str, tuple[str, Any]] = {
        "layer": ("ort_cpu", {"head": "float"}),
        "operator": ("tflite_int8", {"Add": "float"}),
        "bits": ("imx500", {"a.0": {"bits": 4}, "head": {"bits": 2}}),
        "method": ("ort_cpu", {"Linear": {"method": "power_of_two"}}),
        "rule": ("vitis_dpu", {"a.0": {"weight_rule": "no_clipping"}}),
    }

    def run(facts: Facts, platform: str, overrides: Any) -> None:
        import chipfit
        from tests.zoo import make

        model, batch = make("residual")
        result = fit(model, [batch], platform, overrides={"b.0": {"rule": "no_clipping"}})
        see(facts, result, batch, "before")
        see(facts, result.edit(overrides), batch, "edited", (".onnx",))
        loaded = chipfit.load(result.save(facts.work / "again"))
        see(facts, loaded.edit(overrides), batch, "loaded and edited")
        facts.attempt("a mistake", lambda: result.edit({"haed": "float"}))

    for name, (platform, overrides) in said.items():
        yield f"edit/{name}", partial(run, platform=platform, overrides=overrides)

    def corrected(facts: Facts, second: bool) -> None:
        import chipfit

        model, x = everything()
        settings = chipfit.Settings(correct_bias=True, correct_second_moment=second)
        result = fit(model, [x], settings=settings)
        edited = facts.attempt("edit", lambda: result.edit({"skip": "float"}))
        if edited is not None:
            see(facts, edited, x, "edited")
        saved = chipfit.load(result.save(facts.work / "again"))
        facts.attempt("edit of what was saved", lambda: saved.edit({"skip": "float"}))

    yield "edit/corrected", partial(corrected, second=False)
    yield "edit/corrected second moment", partial(corrected, second=True)


def data_cases() -> Cases:
    import torch

    x = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labelled = torch.utils.data.TensorDataset(x, torch.arange(20) % 4)
    outlier, dead = x.clone(), x.clone()
    outlier[0, 0, 0, 0], dead[:, 1] = 1e8, 0.0
    said: dict[str, Any] = {
        "tensor": x,
        "array": x.numpy(),
        "double array": [x.double().numpy()],
        "generator": lambda: (x for _ in range(2)),
        "iterator": lambda: iter([x]),
        "labels": lambda: torch.utils.data.DataLoader(labelled, batch_size=8),
        "smaller last batch": [x[:16], x[16:]],
        "one sample": [x[:1]],
        "outlier": [outlier],
        "dead channel": [dead],
        "zeros": [0 * x],
        "constant": [0 * x + 3],
        "tiny": [1e-30 * x],
        "huge": [1e6 * x],
    }

    def run(facts: Facts, data: Any) -> None:
        see(facts, fit(small_net(), data), x[:4], files=(".onnx",), runtimes=("onnxruntime",))

    for name, data in said.items():
        yield f"data/{name}", partial(run, data=data)


def small_net() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()


def training_cases() -> Cases:
    def on_torch(facts: Facts, platform: str, name: str) -> None:
        import torch

        from tests.zoo import make

        model, batch = make(name)
        result = fit(model, [batch], platform)
        net = result.model
        for key, v in net.state_dict().items():
            facts.array(f"state {key}", as_numpy(v))
        facts.say("trainable", [n for n, p in net.named_parameters() if p.requires_grad])
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
        net.train()
        sum(y.square().mean() for y in flat(call(net, batch))).backward()
        optimizer.step()
        net.eval()
        files = (".tflite",) if platform in OF_TFLITE else (".onnx",)
        runtimes = {"ort_cpu": ("onnxruntime",), "tflite_int8": ("litert",)}.get(platform, ())
        see(facts, result.trained(), batch, "trained", files, runtimes)

    for platform in ("ort_cpu", "tflite_int8", "imx500", "vitis_dpu", "qnnpack", "ncnn"):
        for name in ("residual", "inverted_residual", "attention_fused", "unet_transposed"):
            yield f"training/{platform}/{name}", partial(on_torch, platform=platform, name=name)

    def on_keras(facts: Facts, platform: str, name: str) -> None:
        import keras

        model, batch = keras_net(name)
        result = fit(model, [batch], platform)
        net = result.model
        facts.say("variables", [[v.path, list(v.shape), bool(v.trainable)] for v in net.variables])
        net.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
        net.train_on_batch(batch, np.zeros_like(as_numpy(net(batch).detach())))
        see(facts, result.trained(), batch, "trained", (".tflite",) if platform in OF_TFLITE else (".onnx",))

    for platform in ("ort_cpu", "tflite_int8", "qnnpack"):
        for name in ("residual", "mobilenet", "shared"):
            yield f"training/keras/{platform}/{name}", partial(on_keras, platform=platform, name=name)


# ----------------------------------------------------------------------------------- MCT's names


def through_facade(facts: Facts, framework: str, model: Any, x: Any, tag: str = "", **options: Any) -> None:
    """Quantize through a facade and record everything that it returns."""
    import chipfit

    prefix = f"{tag}: " if tag else ""

    def data() -> Iterator[list[Any]]:
        yield [x[: len(x) // 2]]
        yield [x[len(x) // 2 :]]

    facade = getattr(chipfit, f"{framework}_post_training_quantization")
    got = facts.attempt(f"{prefix}facade", lambda: facade(model, data, **options))
    if got is None:
        return
    information = got[1]
    facts.say(f"{prefix}information", repr([information.final_resource_utilization, information.fusions]))
    facts.say(
        f"{prefix}rest", repr([information.input_scale, information.gptq_info_dict, information.mixed_precision_cfg])
    )
    if information.result is not None:
        see(facts, information.result, x, tag)
        see_output(facts, got[0], x, f"{prefix}module ")


def worded(options: Mapping[str, Any]) -> str:
    """Return options as the name of a case."""
    words = {k: f"({worded(v)})" if isinstance(v, Mapping) else getattr(v, "name", v) for k, v in options.items()}
    return ", ".join(f"{k}={v}" for k, v in words.items()) or "defaults"


def facade_cases() -> Cases:
    from chipfit.core import (
        BitWidthConfig,
        CoreConfig,
        DebugConfig,
        MixedPrecisionQuantizationConfig,
        QuantizationConfig,
        QuantizationErrorMethod,
        ResourceUtilization,
    )
    from chipfit.core.network_editor import NodeTypeFilter

    options: list[dict[str, Any]] = [{}, {"weights_bias_correction": False}]
    options += [{"activation_error_method": m, "l_p_value": 3.0} for m in QuantizationErrorMethod]
    options += [{"weights_error_method": m, "l_p_value": 3.0} for m in QuantizationErrorMethod]
    switches = words(
        "relu_bound_to_power_of_2 weights_second_moment_correction input_scaling softmax_shift linear_collapsing "
        "residual_collapsing shift_negative_activation_correction activation_channel_equalization "
        "concat_threshold_update shift_negative_threshold_recalculation shift_negative_params_search "
        "activation_bias_correction"
    )
    options += [{name: not getattr(QuantizationConfig(), name)} for name in switches]
    options += [{"z_threshold": 4.0}, {"shift_negative_ratio": 0.5}]
    options += [{"activation_bias_correction": True, "activation_bias_correction_threshold": 50.0}]

    def run(facts: Facts, framework: str, said: Mapping[str, Any], **more: Any) -> None:
        model, x = everything() if framework == "pytorch" else keras_everything()
        through_facade(facts, framework, model, x, core_config=CoreConfig(QuantizationConfig(**said)), **more)

    for said in options:
        name = worded(said)
        yield f"facade/pytorch/{name}", partial(run, framework="pytorch", said=said)
        if len(said) < 2:
            yield f"facade/keras/{name}", partial(run, framework="keras", said=said)
    for platform in ("ort_cpu", "tflite_int8", "qnnpack", "vitis_dpu"):
        yield f"facade/on {platform}", partial(run, framework="pytorch", said={}, target_platform_capabilities=platform)

    def widths(facts: Facts) -> None:
        import torch

        config = CoreConfig(bit_width_config=BitWidthConfig())
        config.bit_width_config.set_manual_weights_bit_width(NodeTypeFilter(torch.nn.Conv2d), 4)
        config.bit_width_config.set_manual_weights_bit_width([NodeTypeFilter(torch.nn.Linear)], [2], "kernel")
        facts.say("choices", repr(config.bit_width_config))
        through_facade(facts, "pytorch", *everything(), core_config=config)
        config.bit_width_config.set_manual_activation_bit_width(NodeTypeFilter(torch.nn.Linear), 16)
        through_facade(facts, "pytorch", *everything(), "too wide", core_config=config)

    yield "facade/bit widths", widths
    others = {
        "bypass": {"core_config": CoreConfig(debug_config=DebugConfig(bypass=True))},
        "no limits": {"target_resource_utilization": ResourceUtilization()},
        "mixed precision": {"core_config": CoreConfig(mixed_precision_config=MixedPrecisionQuantizationConfig())},
    }
    for name, more in others.items():
        yield f"facade/{name}", lambda facts, more=more: through_facade(facts, "pytorch", *everything(), **more)

    def several(facts: Facts) -> None:
        import chipfit

        model, batch = keras_net("many_in_and_out")
        quantized, information = chipfit.keras_post_training_quantization(model, lambda: iter([batch]))
        see(facts, information.result, batch)
        see_output(facts, quantized, batch, "module ")

    yield "facade/keras/several inputs", several


def editor_cases() -> Cases:
    import torch
    from torch import nn

    from chipfit.core import BitWidthConfig, CoreConfig, DebugConfig, QuantizationConfig, QuantizationErrorMethod
    from chipfit.core import network_editor as editor
    from chipfit.target_platform import LayerFilterParams, QuantizationMethod, Signedness

    weights, results = editor.ChangeCandidatesWeightsQuantConfigAttr, editor.ChangeCandidatesActivationQuantConfigAttr
    none, power = QuantizationErrorMethod.NOCLIPPING, QuantizationMethod.POWER_OF_TWO
    named, typed = editor.NodeNameFilter, editor.NodeTypeFilter
    every, head, dense = typed(nn.Conv2d) | typed(nn.Linear), named("head"), typed(nn.Linear)
    uniform, symmetric = QuantizationMethod.UNIFORM, QuantizationMethod.SYMMETRIC
    in_float = editor.ChangeFinalActivationQuantConfigAttr(enable_activation_quantization=False)

    def halved(stored: Mapping[str, Any], **attributes: Any) -> tuple[Any, Any]:
        return {k: v.numpy() / 2 for k, v in stored.items()}, attributes

    def by_hand(sample: Any, grid: Any) -> dict[str, Any]:
        return {"range_min": -1.0, "range_max": 3.0}

    rules: dict[str, tuple[Any, ...]] = {
        "bits": ((named("a.0"), weights(weights_n_bits=4)),),
        "weights in float": ((named("a_0"), weights(enable_weights_quantization=False)),),
        "results in float": ((dense, in_float),),
        "method of weights": ((named("head"), editor.ChangeCandidatesWeightsQuantizationMethod(power)),),
        "final method of weights": ((named("head"), editor.ChangeFinalWeightsQuantizationMethod(power)),),
        "method of results": ((typed(nn.Linear), editor.ChangeCandidatesActivationQuantizationMethod(power)),),
        "final method": ((dense, editor.ChangeFinalActivationQuantizationMethod(symmetric)),),
        "uniform weights": ((head, editor.ChangeCandidatesWeightsQuantizationMethod(uniform)),),
        "one threshold": ((named("b.0"), weights(weights_per_channel_threshold=False)),),
        "error methods": (
            (named("a.0"), weights(weights_error_method=none)),
            (named("head"), weights(weights_error_method=QuantizationErrorMethod.LP, l_p_value=3)),
            (typed(torch.add), results(activation_error_method=none)),
        ),
        "sign": ((named("a.2"), editor.ChangeFinalActivationQuantConfigAttr(signedness=Signedness.SIGNED)),),
        "outliers": ((named("stem.2"), results(z_threshold=2.0)),),
        "function": ((typed(nn.Linear), editor.ChangeQuantizationParamFunction(by_hand)),),
        "rule by name": ((typed(nn.Linear), editor.ChangeQuantizationParamFunction("percentile")),),
        "no range": ((named("head"), editor.ChangeQuantizationParamFunction(None, lambda s, g: None)),),
        "final wins": (
            (named("a.0"), editor.ChangeFinalWeightsQuantConfigAttr(weights_n_bits=2)),
            (every, weights(weights_n_bits=8)),
            (typed(LayerFilterParams(nn.Conv2d, in_channels=3)), weights(weights_n_bits=4)),
        ),
        "replaced": ((typed(nn.Linear), editor.ReplaceLayer(nn.Linear, halved)),),
        "removed": ((editor.NodeNameScopeFilter("a."), editor.ReplaceLayer(nn.Identity, lambda w, **a: ({}, {}))),),
        "cannot be replaced": ((named("head"), editor.ReplaceLayer(nn.Conv2d, lambda w, **a: (w, a))),),
        "means nothing": ((named("haed"), weights(weights_n_bits=4)),),
        "no weights": ((typed(nn.ReLU), weights(weights_n_bits=4)),),
        "too many bits": ((named("head"), weights(weights_n_bits=9)),),
    }

    def run(facts: Facts, platform: str | None, said: Any) -> None:
        from tests.zoo import make

        written = [editor.EditRule(f, a) for f, a in said]
        facts.say("rules", re.sub(r" at 0x\w+", "", repr(written)))
        config = CoreConfig(
            QuantizationConfig(weights_bias_correction=False), debug_config=DebugConfig(network_editor=written)
        )
        config.bit_width_config = BitWidthConfig()
        through_facade(facts, "pytorch", *make("residual"), core_config=config, target_platform_capabilities=platform)

    for name, said in rules.items():
        for platform in (None, "ort_cpu"):
            yield f"editor/{platform or 'default'}/{name}", partial(run, platform=platform, said=said)

    def on_keras(facts: Facts) -> None:
        from keras import layers

        net = keras_everything()
        said = [(typed(layers.Conv2D), weights(weights_n_bits=4)), (named("wide"), weights(weights_n_bits=2))]
        config = CoreConfig(debug_config=DebugConfig(network_editor=[editor.EditRule(f, a) for f, a in said]))
        through_facade(facts, "keras", *net, core_config=config)

    yield "editor/keras", on_keras


def info_cases() -> Cases:
    from torch import nn

    from chipfit import DefaultDict, FrameworkInfo
    from chipfit.target_platform import LayerFilterParams, QuantizationMethod

    def halves(w: Any, bits: int, signed: bool, parameters: Any, per_channel: bool, axis: int | None) -> Any:
        return (w * 2).round() / 2

    made: dict[str, Callable[[], Any]] = {
        "kernels": lambda: FrameworkInfo([nn.Conv2d], [], []),
        "results": lambda: FrameworkInfo([], [nn.ReLU], []),
        "both": lambda: FrameworkInfo([nn.Conv2d, nn.Linear], [nn.Conv2d, nn.Linear, nn.ReLU], []),
        "none of some": lambda: FrameworkInfo(
            [nn.Conv2d, nn.Linear], [nn.ReLU], [LayerFilterParams(nn.Conv2d, in_channels=3)]
        ),
        "known by layer": lambda: FrameworkInfo(
            [], [nn.ReLU, nn.Softmax], [], layer_min_max_mapping={nn.Softmax: (0, 1)}
        ),
        "known by name": lambda: FrameworkInfo(
            [], [nn.ReLU, nn.Softmax], [], activation_min_max_mapping={"softmax": (0, 1)}
        ),
        "half known": lambda: FrameworkInfo([], [nn.ReLU], [], layer_min_max_mapping={nn.ReLU: (0, None)}),
        "axes": lambda: FrameworkInfo([nn.Conv2d], [], [], kernel_channels_mapping=DefaultDict({nn.Conv2d: (0, 1)})),
        "own weights": lambda: FrameworkInfo([nn.Conv2d], [], [], {}, {QuantizationMethod.SYMMETRIC: halves}),
        "own results": lambda: FrameworkInfo(
            [], [nn.Softmax], [], {QuantizationMethod.POWER_OF_TWO: lambda bits, p: lambda x: x.ceil()}
        ),
    }

    def run(facts: Facts, make: Callable[[], Any], chip: str) -> None:
        from tests.zoo import make as network

        model, batch = network("mlp" if chip == "imx500" else "residual")
        info = make()
        result = info.apply(fit(model, [batch], chip, overrides=info.overrides()))
        see(facts, result, batch, files=(".onnx",))
        through_facade(facts, "pytorch", model, batch, "facade", fw_info=make(), target_platform_capabilities=chip)

    for name, make in made.items():
        for chip in ("imx500", "tflite_int8"):
            yield f"framework info/{chip}/{name}", partial(run, make=make, chip=chip)


def modelled_cases() -> Cases:
    """Yield cases of chips described in Python."""
    from chipfit.target_platform import QuantizationMethod

    versions = {
        "imx500": "v1 v1_pot v1_lut v2 v2_lut v3 v3_lut v4 file",
        "tflite": "v1",
        "qnnpack": "v1 file",
        "ort_cpu": "AVX2 file",
    }

    def built_in(facts: Facts, framework: str, name: str, version: str) -> None:
        import chipfit
        from chipfit.target_platform import export_target_platform_capabilities, get_target_platform_capabilities
        from tests.zoo import make

        chip = get_target_platform_capabilities(framework, name, version)
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            chip.show()
        facts.say("show", shown.getvalue())
        path = facts.work / "chip.json"
        if facts.attempt("export", lambda: export_target_platform_capabilities(chip, path)):
            facts.table("exported", json.loads(path.read_text()))
            facts.say("loaded", str(chipfit.load_platform(path).name))
        if framework == "pytorch":
            for net in ("functional", "squeeze_excite"):
                model, batch = make(net)
                see(facts, fit(model, [batch], chip), batch, net, (".onnx",))
        else:
            model, batch = keras_net("mobilenet")
            see(facts, fit(model, [batch], chip), batch)

    for name, said in versions.items():
        for version in said.split():
            yield (
                f"modelled/pytorch/{name} {version}",
                partial(built_in, framework="pytorch", name=name, version=version),
            )
    for name in ("imx500", "tflite", "qnnpack"):
        yield f"modelled/keras/{name}", partial(built_in, framework="keras", name=name, version="v1")

    def field(facts: Facts, **changes: Any) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        chip = modelled_chip(changes)
        net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 5))
        x = torch.randn(8, 3, 8, 8)
        see(facts, fit(net.eval(), [x], chip), x, files=(".onnx", ".json"))

    fields: list[dict[str, Any]] = [{"activation_n_bits": b} for b in (2, 4, 16)]
    fields += [{"activation_quantization_method": m} for m in QuantizationMethod]
    fields += [
        {"enable_activation_quantization": False},
        {"quantization_preserving": True},
        {"fixed_scale": 0.125, "fixed_zero_point": 0},
        {"simd_size": 16},
        {"kernel": {"weights_n_bits": 4}},
        {"kernel": {"weights_per_channel_threshold": False}},
    ]
    fields += [{"kernel": {"weights_quantization_method": m, "weights_n_bits": 4}} for m in QuantizationMethod]
    for changes in fields:
        yield f"modelled/field/{worded(changes)}", partial(field, **changes)

    def first_generation(facts: Facts) -> None:
        import torch
        from torch import nn

        from chipfit.hardware_representation import (
            Fusing,
            HardwareModel,
            OperatorSetConcat,
            OperatorsSet,
            OpQuantizationConfig,
            QuantizationConfigOptions,
        )

        power = QuantizationMethod.POWER_OF_TWO
        eight = OpQuantizationConfig(power, power, 8, 8, True, True, True)
        widths = QuantizationConfigOptions([eight, eight.clone_and_edit(weights_n_bits=4)], base_config=eight)
        with HardwareModel(QuantizationConfigOptions([eight]), name="mine") as chip:
            dense, relu, add = OperatorsSet("FullyConnected", widths), OperatorsSet("Relu"), OperatorsSet("Add")
            Fusing([dense, relu, add])
            Fusing([dense, OperatorSetConcat(relu, add)])
        facts.say("chip", repr(chip))
        torch.manual_seed(0)
        x = torch.randn(8, 6)
        net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2), nn.Tanh()).eval()
        see(facts, fit(net, [x], chip), x)
        see(facts, fit(net, [x], chip, overrides={"0": {"bits": 4}}), x, "4 bits")

    yield "modelled/first generation", first_generation


def modelled_chip(changes: Mapping[str, Any]) -> Any:
    """Return a chip described in Python: 8-bit convolutions, dense layers, defaults elsewhere, tanh with `changes`."""
    from chipfit.target_platform import (
        BIAS_ATTR,
        KERNEL_ATTR,
        AttributeQuantizationConfig,
        Fusing,
        OperatorsSet,
        OpQuantizationConfig,
        QuantizationConfigOptions,
        QuantizationMethod,
        TargetPlatformModel,
    )

    changes = dict(changes)
    plain = AttributeQuantizationConfig()
    kernel = AttributeQuantizationConfig(QuantizationMethod.SYMMETRIC, 8, True, True)
    kernel = kernel.clone_and_edit(**changes.pop("kernel", {}))
    base = OpQuantizationConfig(
        plain, {KERNEL_ATTR: plain, BIAS_ATTR: plain}, QuantizationMethod.POWER_OF_TWO, 8, (2, 4, 8, 16), True
    )
    with_kernel = base.clone_and_edit(
        attr_to_edit=None, attr_weights_configs_mapping={KERNEL_ATTR: kernel, BIAS_ATTR: plain}
    )
    options = lambda c: QuantizationConfigOptions([c])  # noqa: E731
    conv, dense = OperatorsSet("Conv", options(with_kernel)), OperatorsSet("FullyConnected", options(with_kernel))
    tanh = OperatorsSet("Tanh", options(base.clone_and_edit(**changes)))
    return TargetPlatformModel(
        options(base),
        name="mine",
        operator_set=[conv, dense, tanh, OperatorsSet("MaxPool")],
        fusing_patterns=[Fusing([conv, tanh])],
    )


# ---------------------------------------------------------------------------------------------- what is said in words


def lint_cases() -> Cases:
    import chipfit

    def run(facts: Facts, platform: str) -> None:
        from tests.zoo import make

        for name in ("residual_hardswish", "split", "attention_fused"):
            model, batch = make(name)
            found = facts.attempt(name, lambda m=model, b=batch: chipfit.lint(m, b, platform))
            if found is not None:
                facts.table(f"{name} rows", [dataclasses.asdict(r) for r in found.rows])
                facts.say(f"{name} notes", list(found.notes))
        model, batch = keras_net("concat_pools")
        facts.table("keras rows", [dataclasses.asdict(r) for r in chipfit.lint(model, batch, platform).rows])

    for platform in PLATFORMS[::2]:
        yield f"lint/{platform}", partial(run, platform=platform)


#: a module of models and data for the command line
NETS = """\
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(*layers)

def data():
    torch.manual_seed(1)
    return [torch.randn(4, 3, 8, 8) for _ in range(2)]
"""


def command(facts: Facts, *args: str) -> None:
    """Run the command line in the case's folder; keep its exit status and what it prints."""
    project = tomllib.loads((tree_of(facts) / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["chipfit"].partition(":")
    main = getattr(importlib.import_module(module), name)
    here, argv, before = Path.cwd(), sys.argv, dict(os.environ)
    status: Any = 0
    out, err = io.StringIO(), io.StringIO()
    try:
        os.chdir(facts.work)
        sys.argv = ["chipfit", *args]
        os.environ["COLUMNS"] = "400"
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as e:
        status = e.code
    finally:
        os.chdir(here)
        sys.argv = argv
        os.environ.clear()
        os.environ.update(before)
        sys.modules.pop("nets", None)
    said = " ".join(args)
    facts.counts["refusals"] += status == 2
    facts.say(f"{said}: status", str(status))
    for stream, text in (("out", out.getvalue()), ("err", err.getvalue())):
        facts.say(f"{said}: {stream}", squeezed(normal(text, facts.work)))


def squeezed(text: str) -> str:
    """Return printed text without what depends on widths and clocks: runs of spaces and of lines, seconds."""
    text = re.sub(r"\b\d+\.\d\d s\b", "N s", text)
    return re.sub(r"[ \t]+\n", "\n", re.sub(r"─{2,}", "─", re.sub(r" {2,}", "  ", text)))


def without_versions(text: str) -> str:
    """Return a report's page without versions, hashes and times."""
    import torch

    import chipfit

    text = re.sub(r"\b[0-9.]+ s\b", "N s", re.sub(r"flex:[0-9.e-]+", "flex:N", text))
    text = re.sub(r"\b[0-9a-f]{8,64}\b", "SHA", text)
    return text.replace(torch.__version__, "N").replace(chipfit.__version__, "N")


def tree_of(facts: Facts) -> Path:
    """Return the root of the tree that chipfit is imported from."""
    import chipfit

    return Path(chipfit.__file__).resolve().parents[2]


def command_line_cases() -> Cases:
    def fill(facts: Facts) -> None:
        rng = np.random.default_rng(0)
        (facts.work / "nets.py").write_text(NETS)
        images = rng.normal(size=(20, 3, 8, 8)).astype("float32")
        np.savez(facts.work / "d.npz", x=images, y=rng.integers(0, 3, 20))

    def platform(facts: Facts, name: str) -> None:
        fill(facts)
        command(facts, "platforms", "show", name)
        for suffix in ("yaml", "json"):
            command(facts, "platforms", "export", name, f"p.{suffix}")
            if (facts.work / f"p.{suffix}").is_file():
                text = (facts.work / f"p.{suffix}").read_text()
                facts.say(f"exported {suffix}", text)
        if (facts.work / "p.yaml").is_file():
            command(facts, "platforms", "check", "p.yaml")
        command(facts, "lint", "nets:net", "--input-shape", "1,3,8,8", "--platform", name)

    for name in PLATFORMS:
        yield f"command line/platforms/{name}", partial(platform, name=name)

    def run(facts: Facts, lines: Iterable[str]) -> None:
        fill(facts)
        for line in lines:
            command(facts, *line.split())
            page = facts.work / "o" / "report.html"
            if page.is_file():
                facts.say(f"{line}: page", without_versions(squeezed(page.read_text())))
                page.unlink()

    helps = ("", "quantize", "verify", "lint", "explain", "platforms", "platforms show", "platforms export", "demo")
    yield "command line/help", partial(run, lines=[f"{h} --help" for h in helps])
    yield "command line/list", partial(run, lines=["platforms", "platforms list"])
    for name, suffix in (("ort_cpu", "onnx"), ("tflite_int8", "tflite"), ("tensorrt", "json"), ("imx500", "onnx")):
        quantize = f"quantize nets:net --data d.npz -p {name} --format {suffix} --out o"
        more = [
            "--float 0",
            "--rule kl --weight-rule no_clipping --seed 3",
            "--no-verify",
            *(["--bits 0=4"] * (name == "imx500")),
        ]
        lines = [quantize, "verify o --data d.npz", "explain o 0", "explain o *", *(f"{quantize} {m}" for m in more)]
        yield f"command line/quantize/{name}", partial(run, lines=lines)
    fitting, data = "quantize nets:net --data d.npz", "--data d.npz"
    wrong = [f"quantize {model} {data}" for model in ("nothing.pt2", "nomodule:net", "what", "nets:data")]
    wrong += [f"quantize nets:net --data {name}" for name in ("missing.npz", "nets:net", "what")]
    wrong += [
        f"{fitting} {more}" for more in ("--platform ort", "--bits 0:4", "--format onx", "--float 9", "--rule msee")
    ]
    wrong += ["lint nets:net --input-shape 1,x", "lint nets:net", f"verify nowhere {data}", "explain nowhere 0"]
    wrong += ["platforms show ort_cpi", "platforms check nowhere.yaml", "platforms export ort_cpu x.txt"]
    for line in wrong:
        yield f"command line/refused/{line}", partial(run, lines=[line])


# ----------------------------------------------------------------------------------------------------------- refusals

#: a correct platform file, and mistakes: a text in it -> its replacement
GOOD = """\
name: tiny_npu
title: TinyNPU rev C
formats:
  a8: {bits: 8, zero: any}
  w8: {bits: 8, range: narrow, per: channel}
  w4: {bits: 4, range: narrow, per: channel}
  b32: {bits: 32, per: channel}
ops:
  - match: [Conv2D]
    where: {stride: {min: 1, max: 3}, kernel: {max: 64}}
    use: [{in: a8, w: w8, b: b32, out: a8}, {in: a8, w: w4, b: b32, out: a8}]
    rules: [{mono: {b: 1, in0: -1, w: -1}, eq: 1}]
    src: [M]
    conf: V
  - {match: [Add], use: [{in: a8, out: a8}], rules: [{tie: [ins, out]}], src: [M], conf: V}
fuse: [{chain: [["@conv"], [Relu, Relu6]], src: [M], conf: V}]
math: {q_round: half_even, requant: {form: float, round: half_even}, acc: [{bits: 32}]}
sources: {M: "TinyNPU programmer's manual rev C, section 4.2"}
"""
MISTAKES = {
    "an unknown key": ("title:", "titel:"),
    "an unknown key of a format": ("bits: 8, zero: any", "bits: 8, zeros: any"),
    "a format without bits": ("a8: {bits: 8, zero: any}", "a8: {zero: any}"),
    "an undefined format": ("{in: a8, out: a8}", "{in: a9, out: a8}"),
    "an unknown operator": ("match: [Add]", "match: [Ad]"),
    "an unknown group": ('"@conv"', '"@convs"'),
    "an unknown source": ("src: [M], conf: V}\nfuse", "src: [X], conf: V}\nfuse"),
    "two mistakes": ("title: TinyNPU rev C\nformats:", "titel: TinyNPU rev C\nformatz:"),
    "a rule without head": ("{tie: [ins, out]}", "{eq: 1}"),
    "a rule with two heads": ("{tie: [ins, out]}", "{tie: [ins, out], zero: out, eq: 0}"),
    "an unknown slot": ("{tie: [ins, out]}", "{tie: [inz, out]}"),
    "a bound that can never hold": ("{tie: [ins, out]}", "{mono: {in0: 1}, min: 4, max: 2}"),
    "a slot fixed twice": ("{tie: [ins, out]}", "{fix: out, scale: 1, zp: 0}, {fix: out, scale: 2, zp: 0}"),
    "a tie of different widths": ("rules: [{mono: {b: 1, in0: -1, w: -1}, eq: 1}]", "rules: [{tie: [in0, b]}]"),
    "a missing parent": ("title:", "extends: nowhere\ntitle:"),
    "itself as parent": ("title:", "extends: tiny_npu\ntitle:"),
    "a fusion of one": ('[["@conv"], [Relu, Relu6]]', '[["@conv"]]'),
    "broken YAML": ("formats:", "formats: ["),
    "a key twice": ("title:", "name:"),
    "a mistyped key": ("q_round:", "q_rund:"),
    "a word for a width": ("bits: 8, zero: any", "bits: eight, zero: any"),
    "a range beyond the width": ("zero: any", "range: [-500, 500]"),
    "narrow unsigned codes": ("zero: any", "signed: false, range: narrow"),
    "one word for a list": ("match: [Add]", "match: Add"),
    "an unknown attribute": ("stride: {min", "strides: {min"),
    "an unknown gate": ("match: [Conv2D]", "match: [Conv2D]\n    when: {arhc: A}"),
    "integers without formats": ("use: [{in: a8, out: a8}]", "exec: int"),
    "an unknown form of requantization": ("form: float", "form: flaot"),
    "fusions in a circle": (
        '{chain: [["@conv"], [Relu, Relu6]]',
        "{graph: {nodes: {c: Conv2D, r: Relu}, edges: [[c, r], [r, c]]}",
    ),
    "another schema version": ("name: tiny_npu", "name: tiny_npu\nschema: 7"),
}


def refusal_cases() -> Cases:
    """Yield cases of wrong inputs, whose errors are compared word by word."""
    import torch
    from torch import nn

    import chipfit
    from chipfit import core, target_platform
    from chipfit.core import CoreConfig, DebugConfig, QuantizationConfig, QuantizationErrorMethod, ResourceUtilization
    from chipfit.core import network_editor as editor

    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    load, chips = chipfit.load_platform, target_platform.get_target_platform_capabilities
    weights, method, info = (
        editor.ChangeCandidatesWeightsQuantConfigAttr,
        QuantizationErrorMethod,
        chipfit.FrameworkInfo,
    )
    named, widths = editor.NodeNameFilter, core.BitWidthConfig

    def small(data: Any = None, **options: Any) -> Any:
        return fit(small_net(), [x] if data is None else data, **options)

    def broken_weights() -> Any:
        model = small_net()
        with torch.no_grad():
            model[2].weight[0, 0] = float("nan")
        return fit(model, [x])

    class Branch(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.relu() if x.sum() > 0 else x

    def facade(*more: Any, data: Any = None, **options: Any) -> Any:
        data = (lambda: iter([[x.numpy()]])) if data is None else data
        return chipfit.pytorch_post_training_quantization(small_net(), data, *more, **options)

    def debugging(**options: Any) -> Any:
        return facade(core_config=CoreConfig(debug_config=DebugConfig(**options)))

    def config(**options: Any) -> Any:
        return facade(core_config=CoreConfig(QuantizationConfig(**options)))

    said: dict[str, Callable[[Path], Any]] = {
        "no data": lambda _: small([]),
        "a used iterator": lambda _: small(iter([])),
        "a text as data": lambda _: small("images"),
        "a table as data": lambda _: small({"x": x}),
        "a number as data": lambda _: small(torch.tensor(1.0)),
        "infinite inputs": lambda _: small([torch.full((2, 3, 8, 8), float("inf"))]),
        "NaN in weights": lambda _: broken_weights(),
        "integer images": lambda _: small([torch.zeros(2, 3, 8, 8, dtype=torch.uint8)]),
        "batches of two shapes": lambda _: small([x, x[:, :, :6, :6]]),
        "batches of two ranks": lambda _: small([x, x[0]]),
        "another number of channels": lambda _: small([torch.zeros(2, 5, 8, 8)]),
        "data read twice": lambda _: small(iter([x]), settings=chipfit.Settings(correct_second_moment=True)),
        "branching on values": lambda _: fit(Branch(), [x]),
        "a class as model": lambda _: fit(nn.Linear, [x]),
        "a number as model": lambda _: fit(3, [x]),
        "nothing to quantize": lambda _: small(overrides={"Conv2D": "float", "Relu": "float"}),
        "an unknown platform": lambda _: small(platform="ort-cpu"),
        "an unknown revision": lambda _: small(platform="ort_cpu@VNN"),
        "a number as platform": lambda _: small(platform=8),
        "a missing platform file": lambda d: small(platform=d / "nowhere.yaml"),
        "an unknown layer": lambda _: small(overrides={"O": "float"}),
        "an unknown rule": lambda _: small(rule="msee"),
        "an unknown rule of weights": lambda _: small(weight_rule="percntile"),
        "an unknown setting of a rule": lambda _: small(rule="lp(q=3)"),
        "half a rule": lambda _: small(rule="lp(p="),
        "an override that is no decision": lambda _: small(overrides={"0": "int8"}),
        "an override that says nothing": lambda _: small(overrides={"0": {}}),
        "an unknown choice": lambda _: small(overrides={"0": {"bit": 4}}),
        "bits in words": lambda _: small(overrides={"0": {"bits": "4"}}),
        "bits that there are not": lambda _: small(overrides={"0": {"bits": 3}}),
        "16 bits that there are not": lambda _: small(overrides={"0": {"activation_bits": 16}}),
        "a wider grid": lambda _: small(platform="imx500", overrides={"0": {"weight_method": "uniform"}}),
        "scales per channel": lambda _: small(platform="qnnpack", overrides={"0": {"per": "channel"}}),
        "weights of an activation": lambda _: small(overrides={"1": {"bits": 4}}),
        "a range upside down": lambda _: small(overrides={"0": {"range": (2, 1)}}),
        "an unknown setting": lambda _: chipfit.Settings(colapse_linear=True),
        "a setting of the wrong kind": lambda _: chipfit.Settings(correct_bias=1),
        "a negative setting": lambda _: chipfit.Settings(shift_negative=-1.0),
        "an unknown file format": lambda d: small().export(d / "m.onx"),
        "an old opset": lambda d: small().export(d / "m.onnx", opset=11),
        "formats of another chip": lambda d: small().export(d / "m.tflite"),
        "an unknown dialect": lambda d: small().export(d / "m.json", dialect="tensort"),
        "a dialect of powers of two": lambda d: small().export(d / "m.json", dialect="vitis"),
        "an unknown runtime": lambda _: small().verify([x], runtime="onnxruntme"),
        "nothing to verify on": lambda _: small().verify([]),
        "a folder that is no result": lambda d: chipfit.load(d),
        "a folder of something else": lambda d: [(d / "thesis.txt").write_text("years"), small().save(d)],
        "an unknown framework": lambda _: chips("theano"),
        "an unknown chip": lambda _: chips("pytorch", "imx50"),
        "an unknown version": lambda _: chips("pytorch", "imx500", "v9"),
        "an empty platform model": lambda _: target_platform.QuantizationConfigOptions([]),
        "an unknown layer of a set": lambda _: target_platform.OperationsSetToLayers("x", [len]),
        "a config of the wrong kind": lambda _: target_platform.AttributeQuantizationConfig(weights_n_bits="8"),
        "an unknown field of a chip": lambda _: modelled_chip({"activation_bits": 8}),
        "an unknown option": lambda _: QuantizationConfig(weight_bias_correction=True),
        "an unknown option of debugging": lambda _: DebugConfig(bypas=True),
        "an option of the wrong kind": lambda _: QuantizationConfig(weights_bias_correction=1),
        "a method in words": lambda _: QuantizationConfig(activation_error_method="MSE"),
        "a negative ratio": lambda _: config(shift_negative_ratio=-0.1),
        "a negative threshold": lambda _: config(z_threshold=-1.0),
        "an exponent below one": lambda _: config(l_p_value=0),
        "an editor in words": lambda _: DebugConfig(network_editor="conv"),
        "no rule in the editor": lambda _: debugging(network_editor=["conv"]),
        "a search of similarity": lambda _: debugging(analyze_similarity=True),
        "a scheduler": lambda _: debugging(simulate_scheduler=True),
        "limits": lambda _: facade(ResourceUtilization(weights_memory=1000)),
        "limits of the wrong kind": lambda _: facade(1000),
        "a config for another": lambda _: facade(core_config=QuantizationConfig()),
        "a generator without data": lambda _: facade(data=lambda: iter([])),
        "a generator of nothing": lambda _: facade(data=lambda: None),
        "a list as generator": lambda _: facade(data=[[x]]),
        "a generator with arguments": lambda _: facade(data=lambda shape: iter([[x]])),
        "operator sets of a file": lambda _: facade(
            core_config=CoreConfig(QuantizationConfig(custom_tpc_opset_to_layer={"A": [nn.SiLU]})),
            target_platform_capabilities="ort_cpu",
        ),
        "an unknown attribute of an action": lambda _: weights(n_bitz=4),
        "an action that changes nothing": lambda _: weights(),
        "bits of an action in words": lambda _: weights(weights_n_bits="4"),
        "a method that there is not": lambda _: weights(weights_error_method="HESSIAN"),
        "an exponent without its method": lambda _: weights(l_p_value=3, weights_error_method=method.MSE),
        "bits of a bias": lambda _: weights("bias", weights_n_bits=4),
        "a filter without a name": lambda _: named(""),
        "a filter of no layer": lambda _: editor.NodeTypeFilter(len),
        "a rule without a filter": lambda _: editor.EditRule("conv", weights(weights_n_bits=4)),
        "a rule without an action": lambda _: editor.EditRule(editor.NodeNameFilter("conv"), "4 bits"),
        "a replacement without a function": lambda _: editor.ReplaceLayer(nn.Identity, None),
        "a width of nothing": lambda _: widths().set_manual_weights_bit_width([], 4),
        "a width of a bias": lambda _: widths().set_manual_weights_bit_width(named("a"), 4, "bias"),
        "a layer in two lists": lambda _: info([nn.Conv2d], [], [nn.Conv2d]),
        "layers that are no list": lambda _: info(nn.Conv2d, [], []),
        "a function as layer": lambda _: info([lambda x: x], [], []),
        "a range of a layer upside down": lambda _: info([], [], [], layer_min_max_mapping={nn.Softmax: (1, 0)}),
        "axes elsewhere": lambda _: info([], [], [], {}, {}, chipfit.DefaultDict({nn.Conv2d: (3, 2)})),
        "an unknown name of the package": lambda _: chipfit.quantise,
    }

    for name, change in (("truncated", lambda b: b[:-7]), ("changed", lambda b: b[:-2] + bytes([b[-2] ^ 1]) + b[-1:])):
        for file in (
            "plan.json",
            "plan.safetensors",
            "graph.json",
            "weights.safetensors",
            "platform.json",
            "manifest.json",
        ):

            def damaged(folder: Path, file: str = file, change: Any = change) -> Any:
                saved = small().save(folder / "saved")
                (saved / file).write_bytes(change((saved / file).read_bytes()))
                return chipfit.load(saved)

            said[f"{file} {name}"] = damaged

    def file_of(text: str) -> Callable[[Path], Any]:
        def read(folder: Path) -> Any:
            (folder / "tiny_npu.yaml").write_text(text)
            return load(folder / "tiny_npu.yaml")

        return read

    for name, (old, new) in MISTAKES.items():
        assert old in GOOD, name
        said[f"platform file with {name}"] = file_of(GOOD.replace(old, new))
    for k, text in enumerate(("", "- a list", "name: x\n\tformats: {}", "3: 4", "a: b\n---\nc: d")):
        said[f"no platform file {k}"] = file_of(text)
    strict = file_of(GOOD.replace("name:", "unlisted: reject\nname:", 1))
    sigmoid = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid()).eval()
    said["an operator that a chip rejects"] = lambda d: fit(sigmoid, [x], strict(d))

    def run(facts: Facts, wrong: Callable[[Path], Any]) -> None:
        if facts.attempt("", lambda: wrong(facts.work)) is not None or not facts.counts["refusals"]:
            facts.say("", "not refused")

    for name, wrong in said.items():
        yield f"refused/{name}", partial(run, wrong=wrong)


# ---------------------------------------------------------------------------------------------------------- recording


def digest(paths: Iterable[Path], root: Path) -> str:
    """Return a hash of names and contents."""
    h = hashlib.sha256()
    for p in sorted(paths):
        h.update(f"{p.relative_to(root)}\0".encode() + hashlib.sha256(p.read_bytes()).digest())
    return h.hexdigest()[:16]


#: parts of this file that do not affect records
OF_COMPARING = {
    "OF_COMPARING",
    "RENAMED",
    "EXPECTED",
    "opened",
    "renamed",
    "differences",
    "shown",
    "compare",
    "records",
    "against",
    "share_of",
    "main",
    "record",
    "work_through",
    "wanted",
    "read",
    "source_of",
    "digest",
}


def source_of(tree: Path) -> str:
    """Return a hash of a tree and of the corpus, which a record is marked with."""
    files = [p for p in (tree / "src" / "chipfit").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    h = hashlib.sha256()
    for path in (Path(__file__), *(ROOT / p for p in ("tests/zoo.py", "tests/keras_zoo.py", "benchmarks/models.py"))):
        for part in ast.parse(path.read_text()).body:  # however it is formatted
            target = getattr(part, "target", None) or next(iter(getattr(part, "targets", ())), None)
            unsaid = isinstance(part, (ast.Expr, ast.Import, ast.ImportFrom))  # docstring and imports
            if not unsaid and getattr(part, "name", getattr(target, "id", "")) not in OF_COMPARING:
                h.update(ast.dump(part).encode())
    return f"{digest(files, tree)} {h.hexdigest()[:16]}"


def record_case(case: Case, out: Path, source: str) -> None:
    """Run one case and write its record."""
    import torch

    with tempfile.TemporaryDirectory(prefix="same_results_") as work:
        facts = Facts(case.name, out, Path(work).resolve())
        shutil.rmtree(out / "saved" / slug(case.name), ignore_errors=True)
        torch.manual_seed(0)
        np.random.seed(0)
        start = time.perf_counter()
        facts.attempt("case", lambda: case.run(facts))
        seconds = time.perf_counter() - start
    write(out / "cases" / f"{slug(case.name)}.json", facts, source, seconds)


def write(path: Path, facts: Facts, source: str, seconds: float) -> None:
    data = {
        "case": facts.case,
        "source": source,
        "seconds": round(seconds, 2),
        "counts": facts.counts,
        "facts": facts.said,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(data, indent=0))
    os.replace(whole, path)


def reload_case(name: str, old: Path, out: Path, source: str) -> None:
    """Load a result that a tree has saved, save it again, and write the record of that."""
    import torch

    import chipfit

    with tempfile.TemporaryDirectory(prefix="same_results_") as work:
        facts = Facts(name, out, Path(work).resolve())
        start = time.perf_counter()
        for kept in sorted((old / "saved" / slug(name)).iterdir()):
            tag, batch = torch.load(kept / "batch.pt", weights_only=False).values()
            result = facts.attempt(f"{tag}load", partial(chipfit.load, kept / "saved"))
            if result is None:
                continue
            if facts.attempt(f"{tag}save", partial(result.save, facts.work / "again")):
                see_saved(facts, facts.work / "again", tag)
            if batch is not None:
                facts.attempt(f"{tag}output", partial(see_output, facts, result.model, batch, tag))
        seconds = time.perf_counter() - start
    write(out / "reloaded" / f"{slug(name)}.json", facts, source, seconds)


def work_through(args: argparse.Namespace) -> None:
    """Work through cases in a process that has the tree's chipfit and one backend of Keras."""
    warnings.simplefilter("ignore")
    import torch

    import chipfit

    torch.set_num_threads(1)
    tree, out = Path(args.tree).resolve(), Path(args.out).resolve()
    if not Path(chipfit.__file__).resolve().is_relative_to(tree):
        raise SystemExit(f"chipfit comes from {chipfit.__file__}, not from {tree}")
    source, (part, parts) = source_of(tree), args.part
    chosen = [c for c in cases() if c.backend == args.backend and wanted(c.name, args.only)][:: args.every]
    for case in chosen[part::parts]:
        if read(out / "cases" / f"{slug(case.name)}.json").get("source") != source:
            record_case(case, out, source)
            print(case.name, flush=True)
    old = Path(args.reload or out).resolve()
    for name in [c.name for c in chosen if (old / "saved" / slug(c.name)).is_dir()][part::parts]:
        saved_by = read(old / "cases" / f"{slug(name)}.json").get("source")
        if read(out / "reloaded" / f"{slug(name)}.json").get("source") != f"{source} of {saved_by}":
            reload_case(name, old, out, f"{source} of {saved_by}")
            print(f"{name}, loaded", flush=True)


def wanted(name: str, only: Iterable[str] | None) -> bool:
    return not only or any(fnmatch.fnmatch(name, glob) for glob in only)


def record(args: argparse.Namespace) -> int:
    """Start workers with the tree's `src` first on the path: one for each backend and share of the cases."""
    tree, out = Path(args.tree).resolve(), Path(args.out).resolve()
    if not (tree / "src" / "chipfit").is_dir():
        raise SystemExit(f"{tree} has no src/chipfit")
    out.mkdir(parents=True, exist_ok=True)
    shard, shards = args.shard or (0, 1)
    torch_parts = [(shard, shards)] if args.shard else [(0, 2), (1, 2)]
    jobs = [("torch", p) for p in torch_parts] + [(b, (shard, shards)) for b in ("tensorflow", "jax")]

    def start(job: tuple[str, tuple[int, int]]) -> int:
        backend, (part, parts) = job
        command = [
            sys.executable,
            __file__,
            "work",
            str(out),
            "--tree",
            str(tree),
            "--part",
            f"{part}/{parts}",
            "--backend",
            backend,
        ]
        command += [f"--only={g}" for g in args.only or ()] + (["--reload", args.reload] if args.reload else [])
        command += ["--every", str(args.every)]
        path = os.pathsep.join([str(tree / "src"), str(ROOT)])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "KERAS_BACKEND": backend,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONHASHSEED": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
        }
        with tempfile.TemporaryDirectory(prefix="same_results_cwd_") as cwd:
            done = subprocess.run(
                command, env=environment, cwd=cwd, stdout=None if args.verbose else subprocess.DEVNULL
            )
        return done.returncode

    begin = time.perf_counter()
    with ThreadPoolExecutor(1 if args.shard else 2) as pool:
        failed = [job for job, status in zip(jobs, pool.map(start, jobs), strict=True) if status]
    print(
        f"recorded {tree} in {out}: {time.perf_counter() - begin:.0f} s" + (f"; failed: {failed}" if failed else ""),
        flush=True,
    )
    return int(bool(failed))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


# ---------------------------------------------------------------------------------------------------------- comparing


def renamed(text: str) -> str:
    for old, new in RENAMED.items():
        text = re.sub(old, new, text)
    return text


def differences(case: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the differences between two records of a case: (case, key, old, new)."""
    old = opened({renamed(k): renamed(v) for k, v in old.items()})
    new = opened(new)
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key, "(absent)"), new.get(key, "(absent)")
        if a != b:
            yield case, key, *shown(a, b)


def opened(facts: Mapping[str, str]) -> dict[str, str]:
    """Return facts in which each platform, one text in the record, is one text for each of its entries."""
    out = Facts("", ROOT, ROOT)
    for key, text in facts.items():
        if key.endswith("platform") and text.startswith("{"):
            out.table(key, json.loads(text))
        else:
            out.said[key] = text
    return out.said


def shown(a: str, b: str) -> tuple[str, str]:
    """Return excerpts of two texts from where they differ."""
    start = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, start - 60) if max(len(a), len(b)) > 200 else 0

    def short(text: str) -> str:
        return ("…" if start else "") + text[start : start + 200] + ("…" if len(text) > start + 200 else "")

    return short(a), short(b)


def stored(facts: Mapping[str, str]) -> Counter[tuple[str, str]]:
    """Count the integer tensors of each file, described by everything except their names."""
    out: Counter[tuple[str, str]] = Counter()
    for key, value in facts.items():
        found = re.match(r"(.*file\.(?:onnx|tflite))/(?:initialiser |\d+/tensor )", key)
        kind = facts.get(f"{key} type", value)
        if found and re.match(r"(\[\")?U?INT(4|8|16|32)\b", kind) and not key.endswith(" type"):
            more = [facts[k] for k in (f"{key} scale", f"{key} zero point", f"{key} axis") if k in facts]
            out[found[1], " ".join([kind, value, *more])] += 1
    return out


def compare(args: argparse.Namespace) -> int:
    """Print the differences between two records; return 1 if there are any."""
    old_root, new_root = Path(args.old), Path(args.new)
    old, new = (records(root, args.only) for root in (old_root, new_root))
    if not old or not new:
        raise SystemExit(f"no cases in {old_root if not old else new_root}")
    if args.every > 1:  # only a sample was recorded
        old, new = ({n: r[n] for n in r if n in old and n in new} for r in (old, new))
    found: list[tuple[str, str, str, str]] = []
    counts = dict.fromkeys(("tensors", "integers", "refusals"), 0)
    for name in dict.fromkeys([*old, *new]):
        if name not in old or name not in new:
            found.append((name, "the case", *("(absent)" if name not in r else "recorded" for r in (old, new))))
            continue
        found += differences(name, old[name]["facts"], new[name]["facts"])
        for key in counts:
            counts[key] += old[name]["counts"][key]
    loaded = 0
    by_old, by_new = (records(root, args.only, "reloaded") for root in (old_root, new_root))
    for name, record in by_new.items():
        if name in by_old and record["source"].endswith(f" of {old.get(name, {}).get('source')}"):
            loaded += 1
            found += differences(f"{name}, saved before", by_old[name]["facts"], record["facts"])

    if args.integers:
        found = [f for f in found if not re.search(r"file\.(onnx|tflite)/", f[1])]
        for name in (n for n in old if n in new):
            a, b = stored(old[name]["facts"]), stored(new[name]["facts"])
            found += [
                (name, key, str(a[key, v]), f"{b[key, v]} of {v[:200]}") for key, v in a if a[key, v] != b[key, v]
            ]

    why = Counter(reason for f in found for p, reason in EXPECTED.items() if re.fullmatch(p, f[1]))
    found = [f for f in found if not any(re.fullmatch(p, f[1]) for p in EXPECTED)]
    seen = [f for k, f in enumerate(found) if k < 4 or found[k - 4][0] != f[0]]  # at most four for each case
    for case, key, a, b in seen[:20]:
        print(f"{case}\n  {key}\n    old  {a}\n    new  {b}")
    if found:
        apart = len({f[0] for f in found})
        print(f"{len(found)} differences in {apart} cases" + (", the first ones above" if len(found) > 20 else ""))
    total = ", ".join(f"{v:,} {k}" for k, v in counts.items())
    print(f"compared {len(old)} cases: {total}")
    print(f"{loaded} of {len(by_old)} cases with saved results were also loaded from the old record")
    print(f"left out: {', '.join(sorted(LEFT_OUT))}; bytes of files; seconds; line numbers")
    for reason, count in why.items():
        print(f"{count} expected: {reason}")
    if RENAMED:
        print(f"renamed on purpose: {RENAMED}")
    return int(bool(found))


def records(root: Path, only: Iterable[str] | None, kind: str = "cases") -> dict[str, dict[str, Any]]:
    """Return the newest record of each case by name, without those of an earlier state of the tree."""
    found = [(p.stat().st_mtime, json.loads(p.read_text())) for p in sorted((root / kind).glob("*.json"))]
    if not found:
        return {}
    newest = max(found, key=lambda f: f[0])[1]["source"].split()[:2]
    return {r["case"]: r for _, r in found if r["source"].split()[:2] == newest and wanted(r["case"], only)}


def against(args: argparse.Namespace) -> int:
    """Compare this working tree with a revision, or with a record of one."""
    with tempfile.TemporaryDirectory(prefix="same_results_") as folder:
        keep = Path(args.keep or folder)
        old, share = Path(args.against), {k: getattr(args, k) for k in ("only", "verbose", "every", "integers")}
        status = 0
        if not (old / "cases").is_dir():
            tree, old = Path(folder) / "tree", keep / "old"
            tree.mkdir()
            archive = subprocess.run(["git", "archive", args.against], cwd=ROOT, check=True, capture_output=True)
            subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
            status |= record(argparse.Namespace(tree=tree, out=old, reload=None, shard=None, **share))
        new = argparse.Namespace(tree=args.tree, out=keep / "new", reload=str(old.resolve()), shard=None, **share)
        status |= record(new)
        return status | compare(argparse.Namespace(old=old, new=keep / "new", **share))


def share_of(text: str) -> tuple[int, int]:
    """ "0/2" as (0, 2)."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError("i/n with i below n, such as 0/2")
    return int(part), int(parts)


def main() -> int:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--only", action="append", metavar="GLOB", help="cases by name, as 'zoo/ort_cpu/*' (repeatable)"
    )
    common.add_argument("--every", type=int, default=1, metavar="N", help="a sample: each Nth case")
    common.add_argument("--verbose", action="store_true", help="name each case when it is done")
    common.add_argument(
        "--integers", action="store_true", help="of files, only the integers that they store, whatever they are called"
    )
    parser = argparse.ArgumentParser(
        description=__doc__, parents=[common], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="REV", help="a revision of this repository, or the folder of a record")
    parser.add_argument("--tree", default=str(ROOT), help="what is compared with it; this working tree when omitted")
    parser.add_argument("--keep", metavar="DIR", help="keep the records here, to do only what is missing the next time")
    commands = parser.add_subparsers(dest="command")
    for name in ("record", "work"):
        one = commands.add_parser(
            name, parents=[common], help="write down what one tree does" if name == "record" else None
        )
        one.add_argument("out")
        one.add_argument("--tree", default=str(ROOT))
        one.add_argument("--reload", metavar="OLD", help="load the results that this record holds, instead of its own")
        if name == "record":
            one.add_argument(
                "--shard", type=share_of, metavar="I/N", help="a share of the cases, in one process after another"
            )
        else:
            one.add_argument("--part", type=share_of, default=(0, 1))
            one.add_argument("--backend", default="torch")
    two = commands.add_parser("compare", parents=[common], help="compare two records")
    two.add_argument("old")
    two.add_argument("new")
    args = parser.parse_args()
    if args.command == "work":
        work_through(args)
        return 0
    if args.command:
        return {"record": record, "compare": compare}[args.command](args)
    if not args.against:
        parser.error("--against REV, or one of: record, compare")
    return against(args)


if __name__ == "__main__":
    raise SystemExit(main())
