"""Proof of a quantized file that another tool has written."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chipfit.calibration.data import add_states, as_tensors, fixed_batch_of, iterate, split_label
from chipfit.errors import CaptureError, RuntimeUnavailable, UnsupportedError, first_line
from chipfit.files import package_data, path_of
from chipfit.frameworks import framework_of, load, part
from chipfit.frameworks.quantized import QuantizedFile
from chipfit.graph.ir import CPU, Graph
from chipfit.graph.placement import inputs_on
from chipfit.platform.load import load_platform
from chipfit.platform.schema import Platform
from chipfit.registry import entry
from chipfit.verify.run import verify
from chipfit.verify.verification import Verification


def is_file(path: Path) -> bool:
    """Return whether a path has the suffix of files that `read_quantized` reads."""
    return path.suffix in package_data("chipfit.verify", "file.yaml")


def read_quantized(
    path: Any, platform: str | Path | Platform = "", example: Any = None
) -> tuple[QuantizedFile, Platform]:
    """Read a quantized `.tflite` or `.onnx` file of any tool; return it and the platform that it is for.

    Args:
        platform: whose arithmetic the file is for; by default that of LiteRT for the bits of its activations, or of
            ONNX Runtime.
        example: a batch of data, for networks that take inputs of a few sizes only.

    Raises:
        CaptureError: The file cannot be read, is not quantized, or has an operator without a reader.
    """
    file, known = path_of(path, CaptureError), package_data("chipfit.verify", "file.yaml")
    if file.suffix not in known:
        allowed = ", ".join(known)
        raise CaptureError("Quantized files of other tools are read by their suffix", got=str(path), allowed=allowed)
    model = load(str(file))
    reader = part(framework_of(model), "quantized")
    kinds, usual = reader.activation_types(model), known[file.suffix]
    name = next((name for kind, name in usual.items() if kind in kinds), next(iter(usual.values())))
    chosen = load_platform(platform or name)
    return reader.read_quantized(model, chosen.name, example), chosen


def verify_file(
    path: Any,
    data: Any,
    *,
    platform: str | Path | Platform = "",
    runtime: str | None = None,
    batches: int | None = None,
) -> Verification:
    """Simulate the integers of a quantized `.tflite` or `.onnx` file of any tool, and compare them with the runtime's.

    A `.tflite` file runs as it is, but for the names of its tensors. An `.onnx` file runs as ONNX Runtime has optimised
    it, with names of tensors too; the outputs of the file itself, in a plain session, are compared with those.

    Args:
        data: batches as the file takes them; floats for an input of integers are quantized as it says, and integers of
            its type are taken as they are.
        platform: whose arithmetic is simulated; by default LiteRT's for the bits of the file's activations, or ONNX
            Runtime's.
        runtime: a registered runtime for such files; by default the platform's own, or the only one that can run it.
        batches: stop after this many.

    Raises:
        CaptureError: The file cannot be read, is not quantized, or has an operator without a reader.
        RuntimeUnavailable: The runtime is not installed, or refuses the file.
        UnsupportedError: Its kernels quantize at run time in a way that has no simulation.
        DataError: There are no data.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> data = [torch.rand(8, 3, 16, 16) for _ in range(4)]
        >>> result = chipfit.quantize(net, data, "tflite_int8", progress=False)
        >>> import tempfile
        >>> file = tempfile.mkdtemp() + "/net.tflite"  # or that of another tool
        >>> _ = result.export(file, keep_layout=True)
        >>> chipfit.verify_file(file, data).exact
        True
    """
    example = as_tensors(data[0]) if isinstance(data, (list, tuple)) and data else None
    found, chosen = read_quantized(path, platform, example)
    if found.not_simulated:
        hint = "`chipfit explain` shows its formats; quantize it again (--requantize) for integers throughout"
        raise UnsupportedError(found.not_simulated, where=str(path), hint=hint)
    fixed = fixed_batch_of(found.graph)
    example = None if example is None else _in_numbers(next(iterate([example], fixed)), found)
    numbers = (_in_numbers(x, found) for x in iterate(add_states(data, found.steps), fixed))
    suffix = path_of(path, CaptureError).suffix
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        named = path_of(Path(folder) / f"model{suffix}", RuntimeUnavailable)
        named.write_bytes(found.content)
        try:
            runtime = runtime or found.runtime
            out = verify(found.graph, found.plan, chosen, numbers, runtime=runtime, path=named, batches=batches)
        except (RuntimeError, IndexError) as e:  # of torch, where a size was taken for a constant
            what = f"The network that was read does not take these data: {first_line(e)}"
            raise CaptureError(what, where=str(path), hint="give a list of batches of one size") from e
        out.warnings += [n.removeprefix("warning: ") for n in found.graph.notes if n.startswith("warning: ")]
        if found.given and example is not None:
            itself = named.with_stem("given")
            itself.write_bytes(found.given)
            _compare_outputs(out, [named, itself], found.graph, example)
    return out


def _in_numbers(batch: Any, found: QuantizedFile) -> Any:
    """Return a batch in the numbers that the integers of an input's type stand for."""

    def of(name: str, x: Any) -> Any:
        stored = found.plan.stored(name)
        if stored is None or not isinstance(x, (np.ndarray, torch.Tensor)):
            return x
        kind = f"{'int' if stored.grid.signed else 'uint'}{stored.grid.file_bits}"
        return stored.dequantize(torch.as_tensor(x)) if str(x.dtype).removeprefix("torch.") == kind else x

    if isinstance(batch, Mapping):
        return {name: of(name, x) for name, x in batch.items()}
    names = found.graph.inputs
    if isinstance(batch, (list, tuple)):  # labels may follow
        return (*map(of, names, batch), *batch[len(names) :])
    return of(names[0], batch)


def _compare_outputs(out: Verification, files: list[Path], graph: Graph, batch: Any) -> None:
    """Compare the outputs of a file with those of its optimised form, which was compared with the simulation.

    Where something runs in float, the last bit may be another one in each; that is said, and no fault.
    """
    inputs = [x.numpy() for x in inputs_on(CPU, split_label(batch, graph)[0])]
    found = [list(entry("runtime", out.runtime).thing(f, ()).run(inputs).values()) for f in files]
    gaps = []
    for a, b in zip(*found, strict=True):
        size = max(float(np.abs(b.astype(np.float64)).max(initial=0)), 1e-30)
        gaps.append(float(np.abs(a.astype(np.float64) - b).max(initial=0)) / size)
    if not any(gaps):
        return
    words = f"in a plain session the file's outputs differ by {max(gaps):.2g} of their largest number"
    if out.float_ops:
        out.warnings.append(f"{words}, because operators in float end in other bits there")
    else:
        out.outputs[gaps.index(max(gaps))].wrong = words
