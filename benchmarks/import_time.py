"""Measure how long `import chipfit` takes, and check that it loads neither torch nor another framework.

python benchmarks/import_time.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

#: packages that the import must not load: each takes seconds, and `chipfit --help` needs none
HEAVY = ("torch", "keras", "tensorflow", "onnx", "onnxruntime", "openvino", "scipy")
CHILD = f"""
import sys, time
start = time.perf_counter()
import chipfit
print(time.perf_counter() - start, *[m for m in {HEAVY!r} if m in sys.modules])
"""


def measure() -> tuple[float, list[str]]:
    """Return the seconds of `import chipfit` in a new process, and the packages of HEAVY that it loaded."""
    seconds, *loaded = subprocess.run(
        [sys.executable, "-c", CHILD], check=True, capture_output=True, text=True
    ).stdout.split()
    return float(seconds), loaded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    runs = [measure() for _ in range(parser.parse_args().repeats)]
    loaded = runs[0][1]
    print(
        f"import chipfit: {1000 * min(s for s, _ in runs):.0f} ms; heavy packages loaded: {', '.join(loaded) or 'none'}"
    )
    return 1 if loaded else 0


if __name__ == "__main__":
    sys.exit(main())
