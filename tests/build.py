"""Builders that tests share: networks, data, graphs, grids, platforms and results, one line each.

result = quantized(small_cnn(), images())                      # chipfit.quantize, quietly
model = model_of(lambda m, x: m.fc(x).relu(), fc=nn.Linear(4, 3))
graph = graph_of("a = Linear(x, w)", "y = Add(a, x)", weights={"w": torch.eye(4)})
plan = plan_of(x=stored(0.5, zero=3), w=stored([0.1, 0.2], axis=0), y=None)
chip = platform_of({"match": ["Add"], "use": [{"in": "a8", "out": "a8"}]})
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chipfit
from chipfit.graph.ir import Graph, Node, Value
from chipfit.plan.record import Plan, TensorPlan
from chipfit.platform.schema import Platform
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.runtimes.onnxruntime import saturates
from tests import accelerators

#: weights are rounded to the nearest quantized value, and biases stay
NEAREST = chipfit.Settings(rounding="off", repairs="off")

# ------------------------------------------------------------------------------------------------------ networks, data


def model_of(forward: Callable[..., Any], **parts: nn.Module | Tensor) -> nn.Module:
    """Return a network in eval mode whose forward pass is `forward(model, *inputs)`.

    Args:
        parts: layers, and tensors that become parameters, by attribute name.
    """
    net = type("Net", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(net, name, nn.Parameter(part) if isinstance(part, Tensor) else part)
    return net.eval()


def sequential(*layers: nn.Module) -> nn.Sequential:
    """Return a chain of layers in eval mode."""
    return nn.Sequential(*layers).eval()


def set_layer(layer: nn.Module, weight: Any, bias: Any = 0.0) -> nn.Module:
    """Give a layer these numbers, in the order of its weight's memory, and return it."""
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(weight).view_as(layer.weight))
        if getattr(layer, "bias", None) is not None:
            layer.bias.copy_(torch.as_tensor(bias).expand_as(layer.bias))
    return layer


def small_cnn(channels: int = 8, classes: int = 4, *, size: int = 8, norm: bool = False, seed: int = 0) -> nn.Module:
    """Return a classifier of images [N, 3, size, size]: two 3 x 3 convolutions, perhaps batch norms, a linear layer."""
    torch.manual_seed(seed)
    norms = [[nn.BatchNorm2d(channels)] if norm else [] for _ in range(2)]
    first, second = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
    head = nn.Linear(channels * size * size, classes)
    return sequential(first, *norms[0], nn.ReLU(), second, *norms[1], nn.ReLU(), nn.Flatten(), head)


def halves() -> nn.Module:
    """Return a network [N, 3] -> [N, 2] that splits a linear output in two, and adds `erf` of one half to the other."""

    def forward(m: Any, x: Tensor) -> Tensor:
        one, two = m.a(x).chunk(2, -1)
        return torch.erf(one) + two

    return model_of(forward, a=nn.Linear(3, 4))


def mlp(*widths: int, seed: int = 0) -> nn.Module:
    """Return linear layers with ReLUs between them: `mlp(6, 8, 3)` maps [N, 6] to [N, 3]."""
    torch.manual_seed(seed)
    layers = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.ReLU())]
    return sequential(*layers[:-1])


def keras_sequential(shape: Sequence[int | None], *layers: Any, seed: int = 0) -> Any:
    """Return a functional Keras model: these layers in a chain behind an input [N, *shape]."""
    import keras  # noqa: TID251 -- tests of Keras alone call this

    keras.utils.set_random_seed(seed)
    x = inputs = keras.Input(tuple(shape))
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, x)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers that depend on `seed` alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(count: int = 8, size: int = 8, channels: int = 3, seed: int = 1) -> Tensor:
    """Return normal "images" [count, channels, size, size]."""
    return randn(count, channels, size, size, seed=seed)


# -------------------------------------------------------------------------------------------------------------- graphs


def node(text: str, attrs: Mapping[str, Any] | None = None, **fields: Any) -> Node:
    """Return a node written as an assignment: `node("a, b = Split(x)", {"axis": 1}, layer="gate")`.

    A node has the name of its first output; `-` stands for an absent operand.
    """
    outputs, call = text.split(" = ")
    op, operands = call.rstrip(")").split("(")
    outs = tuple(outputs.split(", "))
    ins = tuple(None if i == "-" else i for i in operands.split(", ")) if operands else ()
    return Node(**{"name": outs[0], "op": op, "inputs": ins, "outputs": outs, "attrs": dict(attrs or {}), **fields})


def graph_of(
    *nodes: str | Node,
    weights: Mapping[str, Tensor] | Iterable[str] = (),
    outputs: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    shape: Sequence[int | None] = (None, 4),
    shapes: Mapping[str, Sequence[int | None]] | None = None,
    dtypes: Mapping[str, str] | None = None,
    **fields: Any,
) -> Graph:
    """Return a graph of nodes in order of execution.

    Args:
        nodes: Nodes, or texts for `node`.
        weights: by name; where only names are given, 4 x 4 ones.
        outputs: the last node's unless given.
        inputs: unless given, every operand that is no weight and that no node computes, in order of use.
        shape: of every value that `shapes` does not name.
        dtypes: of values that are not float32.
        fields: others of `Graph`.
    """
    made = [node(n) if isinstance(n, str) else n for n in nodes]
    known = dict(weights) if isinstance(weights, Mapping) else {w: torch.ones(4, 4) for w in weights}
    computed = [o for n in made for o in n.outputs]
    if inputs is None:
        read = [i for n in made for i in n.inputs if i is not None]
        inputs = list(dict.fromkeys(i for i in read if i not in known and i not in computed))
    if outputs is None:
        outputs = made[-1].outputs
    values = {
        name: Value(name, tuple((shapes or {}).get(name, shape)), (dtypes or {}).get(name, "float32"))
        for name in (*inputs, *computed)
    }
    return Graph(made, list(inputs), list(outputs), values, known, **fields)


# ------------------------------------------------------------------------------------------------- grids, scales, plans


def grid(bits: int = 8, *, signed: bool = True, low: int | None = None, high: int | None = None, **fields: Any) -> Grid:
    """Return an integer grid, of all integers of `bits` bits unless `low` or `high` leave some out.

    Its zero point is free unless `zero` says otherwise; `fields` are others of `Grid`.
    """
    least, greatest = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    ends = {"qmin": least if low is None else low, "qmax": greatest if high is None else high}
    return Grid(**{"bits": bits, **ends, "zero": "any", **fields})


def stored(
    scale: Any = 0.5,
    zero: Any = 0,
    bits: int = 8,
    *,
    axis: int | None = None,
    format: str = "a8",
    on: Grid | None = None,
    **fields: Any,
) -> Stored:
    """Return how a tensor is stored: `stored([0.5, 0.25], axis=0)` has a scale for each channel.

    Args:
        zero: the zero point, or one for each scale.
        on: the grid; unless given, the one that `grid(bits, **fields)` makes.
    """
    scales = torch.as_tensor(scale, dtype=torch.float32)
    zeros = torch.as_tensor(zero, dtype=torch.int32).expand_as(scales).clone()
    per = ("tensor", "channel")[scales.dim()] if scales.dim() < 2 else "block"
    return Stored(
        format=format, grid=on or grid(bits, **{"per": per, **fields}), scale=scales, zero_point=zeros, axis=axis
    )


def plan_of(roles: Mapping[str, str] | None = None, /, *, float_edges: Any = (), **tensors: Stored | None) -> Plan:
    """Return a plan of tensors by name; None leaves one in float.

    Args:
        roles: by name. Unless given, names that begin with "w" are weights, with "b" biases, all others activations.
    """
    guess = {"w": "weight", "b": "bias"}
    rows = {
        name: TensorPlan(name=name, role=(roles or {}).get(name) or guess.get(name[0], "activation"), stored=s)
        for name, s in tensors.items()
    }
    return Plan(tensors=rows, float_edges=frozenset(float_edges))


# --------------------------------------------------------------------------------------------------- platforms, results


def platform_of(*ops: Mapping[str, Any], formats: Mapping[str, Any] | None = None, **more: Any) -> Platform:
    """Return a platform of rules as a platform file has them; each gets a source.

    Args:
        formats: by name; one of 8 bits, "a8", unless given.
        more: other keys of a platform file.
    """
    rules = [{"src": ["M"], "conf": "V", **op} for op in ops]
    data = {"name": "npu", "formats": formats or {"a8": {"bits": 8}}, "sources": {"M": "paper"}, "ops": rules, **more}
    return Platform.model_validate(data)


def platform_file(folder: Path, text: str, name: str = "chip.yaml") -> Path:
    """Write a platform file and return its path."""
    (folder / name).write_text(text)
    return folder / name


def sqnr_db(want: Tensor, got: Tensor) -> float:
    """Return the power of numbers over that of their error [dB]."""
    return float(10 * torch.log10(want.double().square().sum() / (want - got).double().square().sum()))


def quantized(model: Any, data: Any, platform: Any = "ort_cpu", **options: Any) -> chipfit.Result:
    """Return `chipfit.quantize` of a model (torch's are put in eval mode), without a progress bar.

    With `--device`, a copy of the model is quantized there, and the simulation comes back to the CPU.

    Args:
        data: calibration batches, or a tensor, which is one batch.
    """
    batches, options = [data] if isinstance(data, Tensor) else data, {"progress": False, **options}
    if not isinstance(model, nn.Module):
        return chipfit.quantize(model, batches, platform, **options)
    if accelerators.chosen.device == accelerators.CPU:
        return chipfit.quantize(model.eval(), batches, platform, **options)
    result = chipfit.quantize(accelerators.moved(model.eval()), batches, platform, **options)
    result.model.to("cpu")
    return result


# --------------------------------------------------------------------------------------------------------- bad files


#: for tests of files for processors with VNNI, whose integers others do not compute
needs_vnni = pytest.mark.skipif(
    saturates(), reason="without VNNI, this CPU adds products of 8 bits in pairs that saturate"
)


def precise_session(file: str | Path) -> Any:
    """Open an ONNX file so that its products are added exactly on every processor, whatever its weights."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def command(*words: str, columns: int | None = 200) -> Any:
    """Return what `chipfit` with these words ends with: `exit_code`, `output` and `exception`."""
    from typer.testing import CliRunner

    from chipfit.cli.app import app

    return CliRunner().invoke(app, list(words), env={"COLUMNS": columns and str(columns)})


def accept(folder: Path, name: str) -> None:
    """Make the manifest of a saved result agree with a file that was changed."""
    manifest, content = json.loads((folder / "manifest.json").read_text()), (folder / name).read_bytes()
    manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def tampered(folder: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """Change a JSON file of a saved result in place, make the manifest agree, and return the folder."""
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))
    accept(folder, name)
    return folder


def rezipped(path: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> Path:
    """Write an archive anew with the contents that `change` makes of {name: bytes}, and return its path."""
    with zipfile.ZipFile(path) as z:
        inside = {n: z.read(n) for n in z.namelist()}
    with zipfile.ZipFile(path, "w") as z:
        for name, content in change(inside).items():
            z.writestr(name, content)
    return path


class Trap:
    """Pickles as a call that imports the module of the fixture `trap`."""

    def __reduce__(self) -> Any:
        return __import__, ("trap",)
