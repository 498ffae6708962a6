"""Compare chipfit's simulation with what boards printed: keyword spotting of MLPerf Tiny, 1,000 samples, 12 codes each.

    python benchmarks/silicon.py [--folder .bench/silicon] [--mirrors DIR]

The repositories hold the logs of submissions (mlcommons/tiny_results_v1.1, v1.2, v1.3), the samples
(eembc/energyrunner) and the quantized file (mlcommons/tiny). They are cloned into --folder, which git ignores, with the
needed files only. With --mirrors, git directories DIR/OWNER+NAME/repo are read instead, and nothing is downloaded. A
cell counts the samples of which all 12 codes are those of the board.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from chipfit.simulate.integer import simulate
from chipfit.verify.file import read_quantized

SAMPLES, FILE, CLASSES = "eembc/energyrunner", "mlcommons/tiny", 12
#: repository -> patterns of the files that are read
REPOSITORIES = {
    SAMPLES: ["/datasets/kws01/*"],
    FILE: ["/benchmark/training/keyword_spotting/trained_models/kws_ref_model.tflite"],
    **{f"mlcommons/tiny_results_v1.{v}": ["kws/accuracy/log.txt", "kws/accuracy/results.json"] for v in (1, 2, 3)},
}
#: column of the table -> kernels of the simulation
KERNELS = {
    "TFLM": "tflm",
    "XNNPACK": "litert_xnnpack",
    "LiteRT optimized": "litert_optimized",
    "LiteRT reference": "litert_reference",
}


@dataclass(frozen=True)
class Repository:
    """A git repository on this machine."""

    folder: Path

    def paths(self, pattern: str) -> list[str]:
        """Return paths of files that match a regular expression."""
        listed = self._git("ls-tree", "-r", "--name-only", "HEAD").decode().splitlines()
        return [p for p in listed if re.search(pattern, p)]

    def read(self, paths: list[str]) -> list[bytes]:
        """Return the contents of files."""
        asked = "".join(f"HEAD:{p}\n" for p in paths).encode()
        got, found = self._git("cat-file", "--batch", stdin=asked), []
        for path in paths:
            head, _, got = got.partition(b"\n")
            if b" blob " not in head:
                raise SystemExit(f"{self.folder} lacks {path}: {head.decode(errors='replace')}")
            size = int(head.split()[-1])
            found.append(got[:size])
            got = got[size + 1 :]
        return found

    def _git(self, *args: str, stdin: bytes | None = None) -> bytes:
        return subprocess.run(["git", "-C", self.folder, *args], input=stdin, capture_output=True, check=True).stdout


def repository(name: str, folder: Path, mirrors: Path | None) -> Repository:
    """Return a repository, cloned if it is not here yet."""
    key = name.replace("/", "+")
    if mirrors is not None:
        return Repository(mirrors / key / "repo")
    here = folder / key
    if not (here / ".complete").exists():
        print(f"cloning {name} into {here}", file=sys.stderr)
        how = ["--depth", "1", "--filter=blob:none", "--no-checkout", "--quiet"]
        subprocess.run(["git", "clone", *how, f"https://github.com/{name}", here], check=True)
        subprocess.run(["git", "-C", here, "sparse-checkout", "set", "--no-cone", *REPOSITORIES[name]], check=True)
        subprocess.run(["git", "-C", here, "checkout", "--quiet"], check=True)
        (here / ".complete").touch()
    return Repository(here)


def samples_of(repo: Repository) -> np.ndarray:
    """Return the codes of all samples, int8 [1000, 49, 10, 1], in the order of the logs."""
    folder = "datasets/kws01/"
    (labels,) = repo.read([f"{folder}y_labels.csv"])
    names = [row[0] for row in csv.reader(labels.decode().splitlines())]
    return np.stack([np.frombuffer(b, np.int8) for b in repo.read([folder + n for n in names])]).reshape(-1, 49, 10, 1)


def printed(path: str, content: bytes) -> np.ndarray | None:
    """Return the codes that a board printed, [samples, 12]; None for a log of another kind."""
    text = content.decode(errors="replace")
    if path.endswith(".json"):
        found = [entry["infer"]["results"] for entry in json.loads(text) if "results" in entry.get("infer", {})]
    else:
        found = [[float(v) for v in m.split(",") if v] for m in re.findall(r"m-results-\[([-0-9.,eE+]+)\]", text)]
    rows = [row for row in found if len(row) == CLASSES]
    return np.rint(256 * np.array(rows)).astype(int) if rows else None


def simulated(content: bytes, codes: np.ndarray, folder: Path) -> dict[str, np.ndarray]:
    """Return the output codes plus 128 of each family of kernels, [samples, 12]."""
    path = folder / "kws_ref_model.tflite"
    path.write_bytes(content)
    read, platform = read_quantized(path)
    stored = read.plan.stored(read.graph.inputs[0])
    x = stored.dequantize(torch.from_numpy(codes.copy()))
    out = read.graph.outputs[0]
    runs = {name: simulate(read.graph, read.plan, [x], platform, kernels=k, keep=()) for name, k in KERNELS.items()}
    return {name: run[out].reshape(-1, CLASSES).int().numpy() + 128 for name, run in runs.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".bench/silicon"))
    parser.add_argument("--mirrors", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    repos = {name: repository(name, args.folder, args.mirrors) for name in REPOSITORIES}
    (content,) = repos[FILE].read(repos[FILE].paths(r"trained_models/kws_ref_model\.tflite$"))
    own = simulated(content, samples_of(repos[SAMPLES]), args.folder)
    rows: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, repo in repos.items():
        paths = [p for p in repo.paths(r"/kws/accuracy/(log\.txt|results\.json)$") if "/._" not in p]
        logs = {p.split("/kws/")[0]: (p, c) for p, c in zip(paths, repo.read(paths))} if "results" in name else {}
        for board, (path, log) in logs.items():
            codes = printed(path, log)
            version, label = name.rpartition("_")[2], board.replace("closed/", "").replace("/results/", " ")
            if codes is None or len(codes) != len(own["TFLM"]):
                print(f"{version} {label}: no {len(own['TFLM'])} results of {CLASSES} classes", file=sys.stderr)
                continue
            rows[tuple(int((codes == y).all(1).sum()) for y in own.values())].append(f"{version} {label}")
    table = Table("boards, with their runtime", *own, show_lines=True)
    for counts, boards in sorted(rows.items(), key=lambda r: (-max(r[0]), r[0])):
        table.add_row("\n".join(boards), *map(str, counts))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
