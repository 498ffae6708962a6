"""The state of an installation: versions, extras, the processor, and which runtimes can prove files here."""

import platform
import re
import sys
from importlib import metadata

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from typing_extensions import TypedDict

import chipfit
from chipfit.registry import entries

#: libraries whose versions decide results
LIBRARIES = ("torch", "numpy", "onnx", "onnx-ir", "onnxruntime", "keras", "tensorflow-cpu", "ai-edge-litert")


class RuntimeState(TypedDict):
    """A runtime, and what it can prove on this machine."""

    name: str
    suffix: str
    installed: bool
    install: str  #: command that installs it; "" where it is
    proves: list[str]  #: built-in platforms whose files it is known to compute integer by integer


class Diagnosis(TypedDict):
    """The state of an installation."""

    python: str
    system: str
    processor: str
    int8: str  #: instructions for products of 8-bit integers
    versions: dict[str, str]  #: library -> version; "" where it is not installed
    extras: dict[str, list[str]]  #: extra -> its libraries that are missing
    runtimes: list[RuntimeState]


def diagnose() -> Diagnosis:
    """Return the state of this installation."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _cpuinfo().get("model name") or platform.processor() or platform.machine(),
        "int8": _int8(),
        "versions": {"chipfit": chipfit.__version__, **{name: _version(name) for name in LIBRARIES}},
        "extras": _extras(),
        "runtimes": _runtimes(),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _extras() -> dict[str, list[str]]:
    """Return the extras of the installed package with the requirements that are missing."""
    try:
        known = metadata.metadata("chipfit").get_all("Provides-Extra") or []
        needs = metadata.requires("chipfit") or []
    except metadata.PackageNotFoundError:  # run from a folder, not installed
        return {}
    out: dict[str, list[str]] = {name: [] for name in known if name != "dev"}
    for need in needs:
        library, extra = re.match(r"[\w.-]+", need), re.search(r"extra == ['\"]([\w-]+)['\"]", need)
        if library and extra and extra[1] in out and not _version(library[0]):
            out[extra[1]].append(library[0])
    return out


def _runtimes() -> list[RuntimeState]:
    from chipfit.platform.load import load, names
    from chipfit.runtimes import installed

    platforms = {name: load(name).runtimes for name in names()}
    out: list[RuntimeState] = []
    for name, e in sorted(entries("runtime").items()):
        here = installed(e)
        proves = [p for p, runtimes in platforms.items() if name in runtimes]
        out.append(
            {
                "name": name,
                "suffix": e.declares.suffix,
                "installed": here,
                "install": "" if here else f"pip install 'chipfit[{e.declares.extra}]'",
                "proves": proves,
            }
        )
    return out


def _cpuinfo() -> dict[str, str]:
    """Return the first processor of /proc/cpuinfo; empty on other systems."""
    if sys.platform != "linux":
        return {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = file.read().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}


def _int8() -> str:
    """Return the processor's instructions for sums of 8-bit products, which decide whether such sums saturate."""
    known = _cpuinfo()
    flags = set((known.get("flags") or known.get("Features") or "").split())
    for flag, text in (
        ("avx512_vnni", "AVX-512 VNNI: sums are exact"),
        ("avx_vnni", "AVX VNNI: sums are exact"),
        ("asimddp", "dot products of ARM: sums are exact"),
        ("avx2", "AVX2 without VNNI: ONNX Runtime adds products in pairs that saturate; chipfit's files avoid it"),
    ):
        if flag in flags:
            return text
    return "not known on this system"


def table(found: Diagnosis) -> Group:
    """Return a diagnosis as tables for the terminal."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    shown = {"python": found["python"], "system": found["system"], "processor": found["processor"]}
    for name, fact in {**shown, "8-bit products": found["int8"]}.items():
        facts.add_row(name, escape(fact))
    facts.add_row("libraries", ", ".join(f"{k} {v}" if v else f"{k} (absent)" for k, v in found["versions"].items()))
    extras = Table("extra", "state", show_edge=False, box=None, header_style="bold")
    for name, missing in found["extras"].items():
        extras.add_row(name, f"lacks {', '.join(missing)}: pip install 'chipfit\\[{name}]'" if missing else "installed")
    runtimes = Table("runtime", "file", "state", "proves", show_edge=False, box=None, header_style="bold")
    for r in found["runtimes"]:
        runtimes.add_row(r["name"], r["suffix"], escape(r["install"]) or "installed", ", ".join(r["proves"]) or "-")
    return Group(facts, "", extras, "", runtimes)
