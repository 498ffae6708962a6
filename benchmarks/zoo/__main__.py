"""The command line of the zoo; see the package."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import onnxruntime  # noqa: F401 -- load what every architecture needs before processes are forked
import torch
import transformers  # noqa: F401
from ai_edge_litert import interpreter  # noqa: F401
from benchmarks.zoo.networks import ENTRIES
from benchmarks.zoo.one import PLATFORMS, tried

RESULTS = Path(__file__).parent / "results.json"


def _say(name: str, end: Connection) -> None:
    end.send(tried(name))


def one(name: str, limit: float) -> dict[str, Any]:
    """Return the result of one architecture, computed in a process of its own within `limit` seconds."""
    mine, its = multiprocessing.Pipe(duplex=False)
    worker = multiprocessing.get_context("fork").Process(target=_say, args=(name, its))
    start = time.perf_counter()
    worker.start()
    its.close()
    try:
        found = mine.recv() if mine.poll(limit) else None
        why = "" if found else f"no answer in {limit:g} s"
    except EOFError:
        worker.join()
        found, why = None, f"its process ended with {worker.exitcode}"
    worker.kill()
    worker.join()
    found = found or {p: {"stage": "", "error": "died", "why": why} for p in PLATFORMS}
    return {"source": ENTRIES[name].source, "seconds": round(time.perf_counter() - start, 1), **found}


def main() -> int:
    """Run the architectures and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these architectures again")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    parser.add_argument("--limit", type=float, default=300, help="of one architecture [s]")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where they are kept")
    a = parser.parse_args()
    torch.set_num_threads(1)
    known = {} if a.again or not a.results.exists() else json.loads(a.results.read_text())
    for name in a.only or [n for n in ENTRIES if n not in known]:
        known[name] = one(name, a.limit)
        lines = ",\n".join(f" {json.dumps(n)}: {json.dumps(known[n])}" for n in ENTRIES if n in known)
        a.results.write_text(f"{{\n{lines}\n}}\n")
        for platform in PLATFORMS:
            r = known[name][platform]
            share = f"{100 * r['share']:.0f} %" if "share" in r else ""
            words = f"{r.get('outside', '')} {' '.join(r.get('departures', []))} [{' '.join(r.get('opaque', []))}]"
            print(f"{name:30} {platform:11} {r['stage']:9} {share:6} {words} {r['error']} {r['why']}"[:700], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
