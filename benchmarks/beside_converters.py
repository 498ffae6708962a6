"""Sixty small networks quantized by chipfit and by the runtime's own tool, on the same data.

    python benchmarks/beside_converters.py [--only NAME ...] [--show]

PyTorch networks become ONNX files, beside ONNX Runtime's static quantization; Keras networks become `.tflite` files,
beside TensorFlow's converter. Each file runs in a plain session of its runtime, with one thread, on samples that
calibration has not seen. Printed for both: signal over noise of the worst output [dB], operators that compute in float,
size, and processor time. A line that misses a limit says so. Results are kept in `benchmarks/converters/results.json`.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
os.environ.update(TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="1")

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tools below stand beside this file
RESULTS = Path(__file__).parent / "converters" / "results.json"
CALIBRATION, BATCH, HELD_OUT = 64, 16, 256


def compared(name: str) -> dict[str, Any]:
    """Return the figures of one network, "torch/NAME" or "keras/NAME": {"chipfit": figures, "tool": figures}."""
    framework, _, name = name.partition("/")
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # tools leave files where they run
        if framework == "torch":
            from benchmarks.converters.onnxruntime_tool import files_of
        else:
            from benchmarks.converters.tensorflow_tool import files_of
        return files_of(name, Path(folder))


def main() -> int:
    """Compare networks, each in a process of its own; return 1 if one is outside a limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of names")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--show", action="store_true", help="print stored results")
    a = parser.parse_args()
    if a.one:
        print(json.dumps(compared(a.one)))
        return 0
    from benchmarks.converters import names
    from benchmarks.converters.limits import line, misses, summary

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names():
        if a.show or (a.only and not any(part in name for part in a.only)):
            continue
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=900)
        if done.returncode:
            print(done.stderr[-3000:])
            return 2
        results[name] = json.loads(done.stdout.splitlines()[-1])
        kept = ",\n".join(f" {json.dumps(n)}: {json.dumps(results[n])}" for n in names() if n in results)
        RESULTS.write_text(f"{{\n{kept}\n}}\n")
        print(line(name, results[name]), flush=True)
    if a.show:
        print("\n".join(line(n, results[n]) for n in names() if n in results))
    print(summary(results))
    return int(any(misses(r) for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
