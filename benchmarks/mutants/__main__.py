"""Apply small defects to the source, one at a time, and count how many the tests notice.

    python -m benchmarks.mutants --seed 1 --count 300 --workers 2

This process loads PyTorch, Keras and the runtimes once; each defect is tried in a fork of it, by the tests that execute
the changed part of the source: those of its room first, then others, until one fails. Defects that no test noticed are
printed as diffs: a person judges whether a test is missing or the change is none. Two controls: every test that noticed
a defect passes without it, and a change of nothing is not noticed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KERAS_BACKEND", "torch")

from benchmarks.mutants import coverage
from benchmarks.mutants.coverage import Table
from benchmarks.mutants.draw import ROOT, SOURCE, Mutant, draw
from benchmarks.mutants.processes import Answer, Pool, attempt, preload

TARGET = 0.93  #: share of the drawn defects that tests must notice; some of the others change no result


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__.partition("\n")[0])
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--count", type=int, default=300, help="number of defects")
    p.add_argument("--minutes", type=float, default=60, help="stop after this time; a second call goes on")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seconds", type=float, default=60, help="limit of a defect's tests in its room, and elsewhere")
    p.add_argument("--only", default="", help="try the defects whose file contains this")
    p.add_argument("--again", action="store_true", help="forget what an earlier call of this seed found")
    p.add_argument("--list", action="store_true", help="show the defects and end")
    a = p.parse_args()
    begun = time.monotonic()
    until = begun + 60 * a.minutes

    drawn = draw(a.seed, a.count)
    mutants = [m for m in drawn.mutants if a.only in m.file]
    print(f"{len(mutants)} defects, seed {a.seed}, of {drawn.sites:,} sites")
    print("left out:", "; ".join(f"{c:,} {why}" for why, c in drawn.excluded.most_common()))
    if a.list:
        print("\n\n".join(f"{m.operator}\n{m.diff}" for m in mutants))
        return 0

    preload()
    pool = Pool(a.workers)
    table = traced(pool, until)
    if table is None:
        print("Out of time: run it again")
        return 3
    store = coverage.KEPT / f"seed-{a.seed}.jsonl"
    if a.again:
        store.unlink(missing_ok=True)
    answers = try_all(pool, table, mutants, store, until, a.seconds)
    tried = [(m, answers[key(m)]) for m in mutants if key(m) in answers]
    sound = controls(pool, table, tried)
    pool.close()
    report(tried, time.monotonic() - begun)
    if len(tried) < len(mutants):
        print(f"\n{len(mutants) - len(tried)} defects are still to be tried: run it again")
        return 3
    return int(not sound or sum(r["noticed"] for _, r in tried) < TARGET * len(tried))


def key(m: Mutant) -> str:
    """Return the name of a defect in the file of answers."""
    return hashlib.sha256(m.diff.encode()).hexdigest()[:16]


def traced(pool: Pool, until: float) -> Table | None:
    """Return the table of what tests execute, traced where it is missing; None where time runs out."""
    names = coverage.test_files()
    missing = [n for n in names if not coverage.kept(n).exists()]

    def done(name: str, answer: Answer) -> None:
        if not coverage.kept(name).exists():
            raise SystemExit(f"{name} cannot be traced: {answer}")
        if answer["status"]:
            print(f"  {name}: some of its tests fail, and are left out")

    for k, name in enumerate(missing, 1):
        if time.monotonic() > until:
            pool.close()
            return None
        print(f"tracing {k} of {len(missing)}: {name}", flush=True)
        pool.start(lambda name=name: {"status": coverage.trace(name)}, 600, functools.partial(done, name))  # type: ignore[misc]
    pool.wait()
    return Table.load(names)


def try_all(
    pool: Pool, table: Table, mutants: list[Mutant], store: Path, until: float, most: float
) -> dict[str, Answer]:
    """Try the defects that `store` has no answer for, and return all answers."""
    answers: dict[str, Answer] = {}
    if store.exists():
        answers = {r["key"]: r for r in map(json.loads, store.read_text().splitlines())}

    def done(m: Mutant, tests: int, answer: Answer) -> None:
        if "error" in answer:
            raise SystemExit(f"{m.file}:{m.line}: the tests could not be run: {answer['error']}")
        answers[key(m)] = {**answer, "key": key(m), "tests": tests}
        with store.open("a") as f:
            f.write(json.dumps(answers[key(m)]) + "\n")
        how = "hang" if "hang" in answer else f"noticed by {answer['by']}" if answer["noticed"] else "NOT NOTICED"
        print(f"{len(answers):4d}  {m.file}:{m.line}  {how}", flush=True)

    for m in mutants:
        if key(m) in answers:
            continue
        if time.monotonic() > until:
            break
        groups = table.choose(m, most)
        limit = 60 + 6 * sum(table.seconds[t] for tests in groups for t in tests)
        finish = functools.partial(done, m, sum(map(len, groups)))
        pool.start(functools.partial(attempt, m, groups), limit, finish)
    pool.wait()
    return answers


def controls(pool: Pool, table: Table, tried: list[tuple[Mutant, Answer]]) -> bool:
    """Check that tests that noticed a defect pass without it, and that a change of nothing is not noticed."""
    noticing = sorted({r["by"] for _, r in tried if r.get("by") in table.seconds})
    failed = pool.run(lambda: attempt(None, [noticing]), 900).get("by") if noticing else None
    print(f"\ncontrol: {len(noticing)} tests that noticed something, without a defect: {failed or 'pass'}")
    sound = failed is None
    files = sorted({m.file for m, _ in tried})
    for file in files[:: max(len(files) // 3, 1)]:
        text = (SOURCE / file).read_text()
        same = Mutant(file, text + "\n# nothing\n", text.count("\n"), "nothing", "")
        by = pool.run(functools.partial(attempt, same, table.choose(same, 5)), 900).get("by")
        print(f"control: a change of nothing in {file}: {f'NOTICED by {by}' if by else 'not noticed'}")
        sound &= by is None
    return sound


def report(tried: list[tuple[Mutant, Answer]], seconds: float) -> None:
    """Print the share noticed by room, and the defects that no test noticed."""
    rooms: dict[str, list[Answer]] = defaultdict(list)
    for m, answer in tried:
        rooms[m.file.split("/")[1]].append(answer)
        rooms["~all"].append(answer)
    print(f"\n{'':24}{'noticed':>9}{'hang':>6}{'not':>6}{'share':>8}")
    for room, answers in sorted(rooms.items()):
        noticed, hang = sum(r["noticed"] for r in answers), sum("hang" in r for r in answers)
        share = 100 * noticed / len(answers)
        print(f"{room.strip('~'):24}{noticed:9}{hang:6}{len(answers) - noticed:6}{share:7.1f}%")
    print(f"\n{seconds:.0f} s")
    for m, answer in tried:
        if not answer["noticed"]:
            print(f"\nnot noticed by {answer['tests']} tests: {m.operator}\n{m.diff}")


if __name__ == "__main__":
    os.chdir(ROOT)
    raise SystemExit(main())
