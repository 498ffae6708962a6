"""The command line of the fuzzer; see the package."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KERAS_BACKEND", "torch")

import argparse
import shutil
import sys
import time
from collections import Counter

from benchmarks.fuzz.arguments import data, facade
from benchmarks.fuzz.files import kept, model_files, models, operators, platforms, saved, saved_results
from benchmarks.fuzz.lines import command_line
from benchmarks.fuzz.networks import networks, sources
from benchmarks.fuzz.run import Kind, Outcome, all_of, one

#: kind -> its function, and its share of the cases
KINDS: dict[str, tuple[Kind, float]] = {
    "saved": (saved, 0.15),
    "operators": (operators, 0.1),
    "platforms": (platforms, 0.15),
    "facade": (facade, 0.15),
    "data": (data, 0.15),
    "models": (models, 0.1),
    "networks": (networks, 0.1),
    "command_line": (command_line, 0.1),
}


def plan(cases: int, only: str = "") -> list[tuple[str, int]]:
    """List the cases: each kind has its share, and kinds take turns, so that a short run has all of them."""
    if ":" in only:
        kind, _, index = only.partition(":")
        return [(kind, int(index))]
    kinds = {only: 1.0} if only else {k: share for k, (_, share) in KINDS.items()}
    out = [(k, (n + 0.5) / round(cases * share), n) for k, share in kinds.items() for n in range(round(cases * share))]
    return [(k, n) for k, _, n in sorted(out, key=lambda x: x[1])]


def prepare(kinds: set[str]) -> None:
    """Make what cases share before the first of them, so that it does not count as their time."""
    saved_results()
    if kinds & {"models", "command_line"}:
        model_files()
    if "networks" in kinds:
        sources()


def share(todo: list[tuple[str, int]], part: str, first: int) -> list[tuple[str, int]]:
    """Return the cases of one of several processes ("2/3": the second of three), from its case `first` on."""
    k, _, n = part.partition("/")
    return todo[int(k) - 1 :: int(n)][first:]


def run(
    seed: int, cases: int, minutes: float, limit: float, only: str = "", part: str = "1/1", first: int = 0
) -> list[Outcome]:
    """Run cases, print failures as they come, and return the outcomes."""
    end = time.monotonic() + 60 * minutes
    kinds = {k: f for k, (f, _) in KINDS.items()}
    todo = share(plan(cases, only), part, first)
    prepare({k for k, _ in todo})
    out = []
    for outcome in all_of(kinds, todo, seed, limit):
        out.append(outcome)
        if outcome.failed:
            print(f"{outcome.what}: {outcome.detail}\n    {'; '.join(outcome.notes)}")
            print(f"    python -m benchmarks.fuzz --seed {seed} --only {outcome.kind}:{outcome.index}", flush=True)
        if time.monotonic() > end:
            print(f"time is up after {len(out)} of {len(todo)} cases; --first {first + len(out)} goes on")
            break
    return out


def table(outcomes: list[Outcome]) -> str:
    """Return a table of cases by kind and outcome."""
    heads = ("accepted", "refused", "untyped", "hang", "died", "nonsense")
    count = Counter((o.kind, o.what) for o in outcomes)
    lines = ["".join([f"{'kind':14}", *(f"{h:>10}" for h in heads)])]
    for kind in KINDS:
        if any(k == kind for k, _ in count):
            lines.append("".join([f"{kind:14}", *(f"{count[kind, h]:10}" for h in heads)]))
    refused = Counter(o.detail for o in outcomes if o.what == "refused")
    lines.append("refused by type: " + ", ".join(f"{k} {n}" for k, n in refused.most_common()))
    return "\n".join(lines)


def main() -> int:
    """Run the cases and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--limit", type=float, default=20, help="of one case [s]")
    parser.add_argument("--only", default="", help="KIND, or KIND:INDEX to see one case")
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N processes that share the cases")
    parser.add_argument("--first", type=int, default=0, help="skip this many cases of the part")
    given = parser.parse_args()
    try:
        if ":" in given.only:
            kind, index = plan(0, given.only)[0]
            prepare({kind})
            outcome = one(kind, KINDS[kind][0], index, given.seed, given.limit, loud=True)
            print(outcome.what, outcome.detail, *outcome.notes, sep="\n    ")
            return int(outcome.failed)
        start = time.monotonic()
        outcomes = run(given.seed, given.cases, given.minutes, given.limit, given.only, given.part, given.first)
        print(f"seed {given.seed}, {len(outcomes)} cases in {time.monotonic() - start:.0f} s\n{table(outcomes)}")
        return int(any(o.failed for o in outcomes))
    finally:
        shutil.rmtree(kept(), ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
