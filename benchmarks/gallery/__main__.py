"""The command line of the gallery; see the package."""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
os.environ.update(TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gallery.entries import ENTRIES
from benchmarks.gallery.limits import line, summary

RESULTS = Path(__file__).parent / "results.json"


def _one(name: str, platform: str, limit: float) -> dict[str, Any]:
    """Return the result of one network on one platform, found in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gallery", "--one", name, platform]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        lines = [text for text in done.stdout.splitlines() if text.startswith("{")]
        found = json.loads(lines[-1]) if lines else {"stage": "", "error": "died", "why": done.stderr[-600:]}
    except subprocess.TimeoutExpired:
        found = {"stage": "", "error": "died", "why": f"no answer in {limit:g} s"}
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def main() -> int:
    """Run networks that have no result yet, or those named, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gallery")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these networks again")
    parser.add_argument("--platform", nargs="+", default=[], metavar="NAME", help="on these platforms only")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    parser.add_argument("--repositories", metavar="FOLDER", help="git directories OWNER+NAME/repo, read before cloning")
    parser.add_argument("--limit", type=float, default=600, help="of one network on one platform [s]")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where they are kept")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.one:
        from benchmarks.gallery.one import tried

        print(json.dumps(tried(*a.one)))
        return 0
    if a.repositories:
        os.environ["GALLERY_REPOSITORIES"] = a.repositories
    known = {} if a.again or not a.results.exists() else json.loads(a.results.read_text())
    for name in a.only or ENTRIES:
        for platform in ENTRIES[name].platforms:
            done = known.get(name, {}).get(platform)
            if (a.platform and platform not in a.platform) or (done and not a.only):
                continue
            known.setdefault(name, {})[platform] = found = _one(name, platform, a.limit)
            print(line(name, platform, found), flush=True)
            rows = [f" {json.dumps(n)}: {json.dumps(known[n])}" for n in ENTRIES if n in known]
            a.results.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(summary(known))
    return 0


if __name__ == "__main__":
    sys.exit(main())
