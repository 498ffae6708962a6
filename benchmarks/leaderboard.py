"""Measure how long it takes to show a store of 10,000 runs: table, filters, page (wall-clock, best of three).

    python benchmarks/leaderboard.py --runs 10000 --points 40

The runs repeat those of the small study, with random accuracies and curves of `--points` points.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from chipfit.bench.matrix import configs
from chipfit.bench.store import RUNS, Store

ZOO = Path(__file__).parents[1] / "qbench_zoo/matrix.yaml"
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom".split()
#: script for the loaded page: choose a model, then sort
ASKS = """<script>
const s = document.getElementById("filter-model"), begun = performance.now();
s.value = "resnet20"; s.onchange();
document.querySelector("th[data-key=top1] button").click();
document.body.dataset.asked = String(performance.now() - begun);
document.body.dataset.opened = String(begun);
</script></body>"""


def filled(home: Path, count: int, points: int) -> None:
    """Return a store of `count` runs with the fields of real ones."""
    draw, kinds = random.Random(0), list(configs(ZOO, "small").values())
    store = Store(home / "runs.sqlite")
    rows = []
    for k in range(count):
        c = kinds[k % len(kinds)]
        top1 = draw.uniform(40, 85)
        curves = {"loss": [[s, draw.random()] for s in range(points)], "top1": [[s, draw.random()] for s in range(9)]}
        ran = [
            {
                "platform": p,
                "top1": top1 - 0.1,
                "runtime": p,
                "integers": 10**6,
                "differing": 0,
                "exact": True,
                "why": "",
            }
            for p in ("ort_cpu", "tensorrt")
        ]
        told: dict[str, Any] = {"key": f"{k:016x}", "name": c.name, "config": {**c.resolved, "seed": k}}
        told |= {"setting": c.setting_name, "float_top1": 86.0, "top1": top1, "size": draw.randrange(10**4, 10**6)}
        told |= {
            "tested": 2000,
            "deployed": ran,
            "curves": curves,
            "notes": c.notes,
            "data": "0" * 33,
            "code": "0" * 16,
        }
        told |= {"versions": dict.fromkeys(("python", "chipfit", "torch", "numpy", "onnxruntime", "keras"), "1.2.3")}
        told |= {"hardware": "1 x x86_64", "seconds": 30.0, "cpu_seconds": 30.0, "memory": 10**9}
        row = {"key": told["key"], "name": c.name, "study": c.study, "status": "done", "ended": 0.0, "tries": 1}
        rows.append({**row, "outcome": told, "error": None})
    with store.engine.begin() as db:
        db.execute(insert(RUNS), rows)


def best(act: Callable[[], Any], times: int = 3) -> float:
    """Return the seconds of the fastest of three runs."""
    return min(timeit.repeat(act, number=1, repeat=times))


def command(*words: str) -> Callable[[], Any]:
    """Run `chipfit bench` as a process of its own."""
    whole = [sys.executable, "-m", "chipfit", "bench", *words]
    return lambda: subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Print the durations."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=10_000)
    options.add_argument("--points", type=int, default=40)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        home, board = Path(name), Path(name, "board.html")
        filled(home, asked.runs, asked.points)
        kept = ("--home", str(home))
        print(f"{asked.runs} runs, store {(home / 'runs.sqlite').stat().st_size / 1e6:.0f} MB")
        print(f"chipfit bench, to compare      {best(command('--help')):.2f} s")
        print(f"chipfit bench table            {best(command('table', *kept)):.2f} s")
        print(f"chipfit bench table --study    {best(command('table', '--study', 'small', *kept)):.2f} s")
        print(f"chipfit bench board            {best(command('board', str(board), *kept)):.2f} s")
        browser = shutil.which("chromium")
        if browser is None:
            print("chromium not found: the page is not opened")
            return
        page = board.read_text()
        print(f"page {len(page) / 1e6:.0f} MB")

        def shown(text: str) -> str:
            board.write_text(text)
            opened = [browser, *FLAGS, f"--user-data-dir={home / 'profile'}", board.as_uri()]
            return subprocess.run(opened, check=True, capture_output=True, text=True).stdout

        told = shown(page.replace("</body>", ASKS))
        opened, filtered = (float(re.search(f'data-{what}="([0-9.]+)"', told)[1]) for what in ("opened", "asked"))
        print(f"page, until it can be used     {opened / 1000:.2f} s")
        print(f"a filter and a sort            {filtered / 1000:.2f} s")


if __name__ == "__main__":
    main()
