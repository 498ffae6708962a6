"""Measure time and memory of reading `.onnx` and `.tflite` files, beside the libraries that only load them.

python benchmarks/read_files.py [--sizes 100 400] [--kinds convolutions products]

Reading is `chipfit.load_model(file)` and the capture of its network with one batch: the part of `chipfit.quantize`
before any rewrite, with the comparison of the graph with the runtime's own floats. Each row is a new process that has
read a small file before. Memory is the peak of the resident size above that before reading, in sizes of the file.
The command fails above 1.3 times the file (plus 32 MiB for activations and Python), or above 2 s for 100 MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MOST, SLACK, SECONDS_OF_100_MB = 1.3, 32 << 20, 2.0
READERS = ("chipfit", "onnx.load", "onnxruntime", "litert")
KINDS = ("convolutions", "products", "external", "tflite")


def write(kind: str, path: Path, size: int) -> Path:
    """Write a network of about `size` bytes: convolutions or products of matrices, perhaps with external data."""
    if kind == "tflite":
        return _tflite(path.with_suffix(".tflite"), size)
    import onnx
    from onnx import helper, numpy_helper

    draw, names = np.random.default_rng(0), ["x"]
    shape = (512, 512, 3, 3) if kind != "products" else (1536, 1536)
    layers = max(1, round(size / (4 * np.prod(shape))))
    nodes, weights = [], []
    for k in range(layers):
        w = draw.standard_normal(shape, dtype=np.float32) * np.float32((2 / np.prod(shape[1:])) ** 0.5)
        weights.append(numpy_helper.from_array(w, f"l{k}.weight"))
        more = {"pads": [1, 1, 1, 1]} if len(shape) == 4 else {}
        op = "Conv" if len(shape) == 4 else "MatMul"
        nodes.append(helper.make_node(op, [names[-1], f"l{k}.weight"], [f"a{k}"], **more))
        nodes.append(helper.make_node("Relu", [f"a{k}"], [f"r{k}"]))
        names.append(f"r{k}")
    dims = ["n", 512, 4, 4] if len(shape) == 4 else ["n", 1536]
    graph = helper.make_graph(
        nodes,
        "large",
        [helper.make_tensor_value_info("x", 1, dims)],
        [helper.make_tensor_value_info(names[-1], 1, None)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    external = {"save_as_external_data": True, "location": "weights.bin"} if kind == "external" else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, **external)
    return path


def _tflite(path: Path, size: int) -> Path:
    import torch
    from torch import nn

    from chipfit.export.tflite.writer import export_tflite
    from chipfit.frameworks import capture

    layers = max(1, round(size / (4 * 512 * 512 * 9)))
    net = nn.Sequential(*(m for _ in range(layers) for m in (nn.Conv2d(512, 512, 3, padding=1), nn.ReLU())))
    path.parent.mkdir(parents=True, exist_ok=True)
    return export_tflite(capture(net.eval(), (torch.randn(2, 512, 4, 4),)), None, path)


def read(reader: str, file: str) -> Any:
    """Read a file, and return what keeps its content."""
    if reader == "onnx.load":
        import onnx

        return onnx.load(file)
    if reader == "onnxruntime":
        import onnxruntime

        return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    if reader == "litert":
        from ai_edge_litert.interpreter import Interpreter

        made = Interpreter(file)
        made.allocate_tensors()
        return made
    import chipfit
    from chipfit.frameworks import adapter_of, capture, framework_of

    model = chipfit.load_model(file)
    example = adapter_of(framework_of(model)).example(model)
    return model, capture(model, (example,))


def child(reader: str, file: str, small: str) -> None:
    """Print seconds and bytes of reading a file in this process."""
    from benchmarks.measure import grown_mib

    read(reader, small)
    seconds = [0.0]

    def work() -> None:
        start = time.perf_counter()
        kept.append(read(reader, file))
        seconds[0] = time.perf_counter() - start

    kept: list[Any] = []
    mib = grown_mib(work)
    print(json.dumps([seconds[0], mib * (1 << 20)]))


def rows(sizes: list[int], kinds: list[str]) -> list[tuple[str, str, int, float, float]]:
    """Return kind, reader, bytes of the file, seconds, and memory in sizes of the file, of every measurement."""
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            small = write(kind, Path(folder, kind, "small", "net.onnx"), 0)
            for size in sizes:
                file = write(kind, Path(folder, kind, str(size), "net.onnx"), size * 10**6)
                content = sum(f.stat().st_size for f in file.parent.iterdir())
                for reader in READERS:
                    if (reader == "litert") != (kind == "tflite") and reader != "chipfit":
                        continue
                    command = [sys.executable, "-m", "benchmarks.read_files", "--child", reader, str(file), str(small)]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    seconds, memory = json.loads(done.stdout.splitlines()[-1])
                    out.append((kind, reader, content, seconds, memory / content))
                    print(f"{kind:14}{reader:14}{content / 1e6:8.0f} MB{seconds:8.2f} s{memory / content:8.2f}x")
                for f in file.parent.iterdir():
                    f.unlink()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 400], help="of the files [MB]")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*given.child)
        return 0
    within: Callable[..., bool] = lambda size, s, m: (  # noqa: E731
        m * size <= MOST * size + SLACK and s <= SECONDS_OF_100_MB * max(1, size / 1e8)
    )
    return int(not all(within(*r[2:]) for r in rows(given.sizes, given.kinds) if r[1] == "chipfit"))


if __name__ == "__main__":
    sys.exit(main())
