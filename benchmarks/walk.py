"""Walk where a newcomer walks: from the wheel, by the tutorials alone, to a verified file of an own network.

python benchmarks/walk.py [--doors pytorch keras] [--networks squeeze]

The wheel is built and installed into a new virtual environment for each tutorial, with the extras that its page names.
Then the page's blocks run from top to bottom, verbatim but for the network and the shape of its data: own networks
(in `own_networks/`) take the place of the page's. A walk fails if a block fails, if an integer of an
exported file differs from the simulation, or if it takes more than five minutes from `pip install` on: of the clock,
or of the processor where these are fewer, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 300.0  #: seconds from `pip install` to the last block
_BLOCK = re.compile(r"^```(\w+)[ ]*(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VERDICT = re.compile(r"([\d,]+) of ([\d,]+) integers differ")


@dataclass(frozen=True)
class Network:
    """A network of `networks.py`, and where it differs from those of the pages."""

    name: str  #: the class in `networks.py`
    keras: str  #: the function in `keras_networks.py`
    shape: tuple[int, ...]  #: of one sample, channels first
    layer: str  #: a layer, for the commands that name one


NETWORKS = {
    "squeeze": Network("Squeeze", "squeeze", (1, 28, 28), "stem.0"),
    "sensor": Network("Sensor", "sensor", (6, 128), "layers.0"),
    "branches": Network("Branches", "branches", (3, 40, 24), "wide"),
}


@dataclass(frozen=True)
class Door:
    """A tutorial, and what on it is the page's own network."""

    shape: tuple[int, ...]  #: of a sample on the page
    names: tuple[str, ...]  #: what the page's code calls its network and the parts of it
    own: str  #: the code that takes their place; {net} is a `Network`
    layer: str = ""  #: a layer that commands of the page name


BUILD = """from networks import {net.name}
def build():
    torch.manual_seed(0)
    return {net.name}().eval()
"""
DOORS = {
    "pytorch": Door((3, 32, 32), ("Net",), "from networks import {net.name} as Net"),
    "keras": Door((32, 32, 3), ("model",), "from keras_networks import {net.keras}\nmodel = {net.keras}()"),
    "onnx": Door((3, 16, 16), ("layers", "net"), "from networks import {net.name}\nnet = {net.name}().eval()"),
    "command-line": Door((3, 16, 16), ("build",), BUILD, layer="0"),
}


def page(door: str) -> list[tuple[str, str, str]]:
    """Return (language, rest of the fence, text) of each block of a tutorial."""
    return [m.groups() for m in _BLOCK.finditer((ROOT / f"docs/tutorials/{door}.md").read_text(encoding="utf-8"))]


def extras(door: str) -> str:
    """Return the extras that a tutorial installs, as in `onnx,litert`."""
    (named,) = {m for _, _, text in page(door) for m in re.findall(r'pip install "chipfit\[(.*)\]"', text)}
    return named


def own_blocks(door: str, net: Network) -> list[tuple[str, str, str]]:
    """Return the blocks of a tutorial with a network of one's own in place of the page's."""
    at = DOORS[door]
    shape = net.shape if at.shape[-1] != 3 else (*net.shape[1:], net.shape[0])
    changes = {", ".join(map(str, at.shape)): ", ".join(map(str, shape))}
    changes |= {old.replace(" ", ""): new.replace(" ", "") for old, new in changes.items()}
    found, replaced = [], 0
    for language, rest, text in page(door):
        if language == "python":
            text, count = _with_own(text, at.names, at.own.format(net=net))
            replaced += count
        for old, new in changes.items():
            text = text.replace(old, new)
        if at.layer and language == "console":
            text = re.sub(rf"(?<= ){at.layer}(?= |$)", net.layer, text, flags=re.MULTILINE)
        found.append((language, rest, text))
    if not replaced:
        raise ValueError(f"No block of '{door}' defines {at.names}.")
    return found


def _with_own(code: str, names: tuple[str, ...], own: str) -> tuple[str, int]:
    """Put code in the place of the statements that bind these names; return it with their number."""
    lines, replaced = code.splitlines(), 0
    for statement in reversed(ast.parse(code).body):
        targets = [t.id for t in getattr(statement, "targets", []) if isinstance(t, ast.Name)]
        if {getattr(statement, "name", None), *targets} & set(names):
            last = statement.end_lineno or statement.lineno
            lines[statement.lineno - 1 : last] = [own] if not replaced else []
            replaced += 1
    return "\n".join(lines) + "\n", replaced


def steps(blocks: list[tuple[str, str, str]]) -> tuple[dict[str, str], list[str]]:
    """Return the files of a page by name, and its commands; Python up to the next console is one program."""
    files: dict[str, str] = {}
    commands: list[str] = []
    for k, (language, rest, text) in enumerate(blocks):
        if title := re.search(r'title="([^"]+)"', rest):
            files[title[1]] = text
        elif language == "python" and commands[-1:] == [f"python {next(reversed(files), None)}"]:
            files[next(reversed(files))] += text
        elif language == "python":
            files[f"block_{k}.py"] = text
            commands.append(f"python block_{k}.py")
        elif language == "console":
            commands += [line[2:] for line in text.splitlines() if re.match(r"\$ (?!pip install)", line)]
    return files, commands


def integers(printed: str) -> tuple[int, int]:
    """Return (differing, compared) integers, added up over what a walk has printed."""
    found = [tuple(int(x.replace(",", "")) for x in m) for m in _VERDICT.findall(printed)]
    if not found:
        raise ValueError("No integers were compared.")
    return sum(d for d, _ in found), sum(n for _, n in found)


def build_wheel(folder: Path) -> Path:
    """Build the wheel in a folder, without a network; files of the build stay outside the repository."""
    (folder / "setup.cfg").write_text(f"[build]\nbuild_base={folder / 'build'}\n[egg_info]\negg_base={folder}\n")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    env = {**os.environ, "DIST_EXTRA_CONFIG": str(folder / "setup.cfg")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    (file,) = folder.glob("*.whl")
    return file


class Stopwatch:
    """Seconds of the clock, and of the processor in processes that have ended, since it was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def _now(self) -> tuple[float, float]:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.monotonic(), used.ru_utime + used.ru_stime

    def read(self) -> tuple[float, float]:
        """Return (seconds of the clock, seconds of the processor)."""
        clock, processor = self._now()
        return clock - self._start[0], processor - self._start[1]


def installed(door: str, wheel: Path, folder: Path) -> tuple[Path, tuple[float, float]]:
    """Install the wheel into a new environment; return the folder of its programs and the seconds of `pip install`."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    watch = Stopwatch()
    command = [folder / "bin/pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    done = subprocess.run([*command, f"{wheel}[{extras(door)}]"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`pip install` ended with {done.returncode}:\n{done.stderr}")
    return folder / "bin", watch.read()


def walk(door: str, net: Network, programs: Path, folder: Path) -> tuple[tuple[float, float], str]:
    """Run the blocks of a tutorial in a new folder; return the seconds and what was printed."""
    files, commands = steps(own_blocks(door, net))
    for own in ("networks.py", "keras_networks.py"):
        shutil.copy(ROOT / "benchmarks/own_networks" / own, folder)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KERAS_BACKEND")}
    env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
    printed, watch = "", Stopwatch()
    for line in commands:
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            env[name] = value
            continue
        done = subprocess.run(shlex.split(line), cwd=folder, env=env, capture_output=True, text=True)
        printed += done.stdout
        if done.returncode:
            raise RuntimeError(f"`{line}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return watch.read(), printed


def main() -> int:
    """Print one row for each walk; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=list(DOORS))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    asked, failed = parser.parse_args(), 0
    print("| tutorial | network | `pip install` [s] | blocks [s] | of the processor [s] | files | integers | differ |")
    print("|---" * 8 + "|")
    with tempfile.TemporaryDirectory() as name:
        (dist := Path(name, "dist")).mkdir()
        wheel = build_wheel(dist)
        for door in asked.doors:
            programs, install = installed(door, wheel, Path(name, f"env_{door}"))
            for key in asked.networks:
                (folder := Path(name, f"{door}_{key}")).mkdir()
                try:
                    seconds, printed = walk(door, NETWORKS[key], programs, folder)
                    differing, compared = integers(printed)
                except (RuntimeError, ValueError) as e:
                    print(f"| {door} | {key} | failed: {e}", flush=True)
                    failed += 1
                    continue
                suffixes = (".tflite", ".onnx")
                files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix in suffixes)
                clock, processor = (sum(pair) for pair in zip(install, seconds))
                row = f"{install[0]:.0f} | {seconds[0]:.0f} | {processor:.0f} | {', '.join(files)}"
                print(f"| {door} | {key} | {row} | {compared:,} | {differing} |", flush=True)
                failed += differing > 0 or min(clock, processor) > LIMIT
            shutil.rmtree(programs.parent)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
