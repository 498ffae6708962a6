"""The generated pages: what platforms and operators support, JSON Schemas of platforms and experiments, algorithms.

python docs/generate.py [DOCS_DIR]
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import chipfit.export.onnx.writer  # noqa: F401 -- registers writers
from chipfit.bench.config import Config
from chipfit.cli.documents import schema
from chipfit.export.onnx.ops import WRITERS as ONNX
from chipfit.export.tflite.ops import OPERATORS as TFLITE
from chipfit.operators.table import OPS
from chipfit.passes.decompose import RULES
from chipfit.platform.load import load, names
from chipfit.platform.schema import Platform
from chipfit.platform.support import kernels_of, simulates_arithmetic
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.tables import log_table
from chipfit.registry import lookup, registered

sys.path.insert(0, str(Path(__file__).parent))
from drawings import beside_tools, few_bits, forms, time
from prose import wrapped


def support_table() -> str:
    """Markdown: one row per built-in platform."""
    lines = [
        "# Built-in platforms",
        "",
        "Generated from the platform files by `make docs`. V, D, I count the rules that are verified in source, "
        "documented, inferred. Simulated: whole where all that the file says of arithmetic is, so that exactness is"
        " claimed; in part where `chipfit platforms show` names what is not modelled; - where no integers are.",
        "",
        "| platform | device | first choice of weighted operators | rules V/D/I | fusions | arithmetic | simulated"
        " | deploys as |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names():
        p = load(name)
        first = next((str(u) for o in p.ops for u in o.use if u.w), "-")
        counts = "/".join(str(sum(o.confidence == c for o in p.ops)) for c in "VDI")
        math = p.math.requant.get("form", "-") if p.math.requant else "-"
        how = "whole" if simulates_arithmetic(p) else "in part" if kernels_of(p) else "-"
        deploys = p.deploy[0] if p.deploy else "-"
        cells = (f"`{name}`", p.title, first, counts, str(len(p.fuse)), str(math), how, deploys)
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def operator_table() -> str:
    """Markdown: one row per canonical operator, with its form in each file format and its integer kernels."""
    kernels = {"ONNX Runtime": lookup("kernels", "onnxruntime"), "LiteRT": lookup("kernels", "litert_xnnpack")}
    lines = [
        "# Operators",
        "",
        "Generated from the table of operators by `make docs`. `?` marks an optional operand, `*` any number of them. A"
        " file holds an operator by the named one of its own, by several or by one that attributes decide on (yes), in"
        " parts (as simpler operators), or not at all (no). Integer kernels are those whose integers chipfit simulates;"
        " other operators run in float, or move quantized values.",
        "",
        "| operator | operands | attributes | ONNX | TensorFlow Lite | integer kernels |",
        "|---|---|---|---|---|---|",
    ]
    for op, row in sorted(OPS.items()):
        tflite = TFLITE.get(op)
        parts = "in parts" if op in RULES else "no"
        onnx = getattr(ONNX[op], "name", "yes") if op in ONNX else parts
        lite = tflite.kind or "yes" if tflite else parts
        exact = [name for name, p in kernels.items() if op in p.kernels or op in p.pass_through]
        shown = ", ".join(exact) or ("moves values" if row.moves else "-")
        lines.append(f"| `{op}` | {' '.join(row.slots)} | {' '.join(row.attrs)} | {onnx} | {lite} | {shown} |")
    return "\n".join(lines) + "\n"


def json_schema() -> str:
    """The JSON Schema that editors use to complete and check platform files."""
    schema = Platform.model_json_schema(by_alias=True)
    schema["description"] = schema["description"].partition("\n\n")[0]  # without the example
    for hidden in ("arch_selected", "file"):
        schema["properties"].pop(hidden, None)
    schema["title"] = "chipfit platform, schema version 0"
    return json.dumps(schema, indent=1) + "\n"


def experiment_schema() -> str:
    """The JSON Schema that editors use to complete and check experiments.

    A file may say a part of each table, and leave the rest to the one that it extends.
    """
    schema = Config.model_json_schema()
    needs = schema.pop("required")
    schema["properties"].pop("unified")  # is found, not said
    schema["properties"]["extends"] = {"type": "string", "description": "path of the file under this one"}
    for table in schema["$defs"].values():
        table.pop("required", None)
    return json.dumps({**schema, "anyOf": [{"required": ["extends"]}, {"required": needs}]}, indent=1) + "\n"


def documents_schema() -> str:
    """The JSON Schema of what commands print with --json."""
    return json.dumps(schema(), indent=1) + "\n"


#: heading -> public names of `chipfit`, in the order in which a reader meets them
API = {
    "Quantize": ("quantize", "Settings", "Limits", "load_model", "capture", "generated", "Generation"),
    "Results": ("Result", "load", "Report", "Plan", "Verification", "verify_file", "compare", "Comparison"),
    "Before quantization": ("lint", "Lint", "prune", "Pruned"),
    "Networks of one step": ("streaming", "Streaming", "drift", "Drift"),
    "Platforms": ("load_platform", "Platform"),
    "Errors": ("errors",),
}


def api() -> str:
    """Markdown: the public names of `chipfit`, which the site fills from their docstrings."""
    import chipfit

    lines = [
        "# Python",
        "",
        "`import chipfit` offers these names. The names of MCT are described in [Coming from MCT](from-mct.md),"
        " those of MQBench in [Coming from MQBench](from-mqbench.md).",
    ]
    for heading, public in API.items():
        lines += ["", f"## {heading}"]
        for name in public:
            path = "chipfit.errors" if name == "errors" else f"{getattr(chipfit, name).__module__}.{name}"
            lines += ["", f"::: {path}", "    options:", "      heading_level: 3"]
    return "\n".join(lines) + "\n"


#: of four bits but the last
_GRIDS = {
    "symmetric": Grid(bits=4, qmin=-8, qmax=7),
    "affine": Grid(bits=4, qmin=0, qmax=15, zero="any"),
    "look-up table": Grid(bits=4, qmin=-128, qmax=127, kind="lut", entries=16, table=tuple(map(float, range(-8, 8)))),
    "logarithmic": Grid(bits=8, qmin=-1, qmax=1, kind="log", table=log_table(2 ** (1 / 16), 8)),
}


def algorithm_table() -> str:
    """Markdown: one row per training algorithm."""
    lines = [
        "# Training algorithms",
        "",
        "Generated from `quantizers/algorithms/` by `make docs`; each file holds the formula with an example worked by"
        " hand. The names are what `training=` takes, options stand behind them in parentheses:"
        ' `training="lsq(use_grad_scaling=False)"`. The columns weights and activations name the grids that an'
        " algorithm trains; in parentheses where the outcome is for study only, because the codes of such a format"
        " cannot hold it, or no chip rounds so: `Result.trained()` then refuses, and says why. Your own algorithm is"
        " one file: [how](extending.md#a-training-algorithm).",
        "",
        "| name | algorithm | source | weights | activations | options |",
        "|---|---|---|---|---|---|",
    ]
    for name, make in registered("training").items():
        text, algorithm = inspect.getdoc(make) or "", make()
        title, _, rest = text.partition(" Source: ")
        source = " ".join(rest.partition("\n\n")[0].split()).removesuffix(".")
        if "\n" in title:  # the source stands behind an example
            title = title.partition("\n")[0]
        options = ", ".join(f"`{f.name}={f.default}`" for f in fields(make) if f.name != "activations")
        cells = (f"`{name}`", title.rstrip("."), source, *(_trained(algorithm, r) for r in ("weight", "activation")))
        lines.append("| " + " | ".join(c or "-" for c in (*cells, options)) + " |")
    return "\n".join(lines) + "\n"


def _trained(algorithm: Any, role: str) -> str:
    """The grids that it trains for a role; those that it cannot be deployed on in parentheses."""
    found = []
    for word, grid in _GRIDS.items():
        if not algorithm.refuses(grid, role):
            held = grid.table is not None or algorithm.grid(grid).table is None
            found.append(word if held and role not in algorithm.undeployable else f"({word})")
    return ", ".join(found)


RESULTS = Path(__file__).parents[1] / "benchmarks" / "zoo" / "results.json"
_RUNTIMES = {"ort_cpu": "ONNX Runtime", "tflite_int8": "LiteRT"}


def zoo() -> str:
    """Markdown: how far each architecture of `benchmarks/zoo` came, and what its integers were."""
    found = json.loads(RESULTS.read_text())
    count, libraries = len(found), Counter(r["source"] for r in found.values())
    lines = [
        "# Architectures that were tried",
        "",
        "Generated by `make docs` from `benchmarks/zoo/results.json`, which `make zoo` writes. Weights are random, and"
        " inputs and configurations small: the table shows which operators are supported, not how accurate they are."
        " Each network is quantized with the defaults on two batches, exported, run, and compared on a third one with"
        " the simulation, tensor by tensor. Integers: the share of multiply-accumulates in integers. Differing:"
        " integers that are not the simulated ones, given the device's own operands; first those behind integers"
        " alone, then those behind operators that the runtime computes in float, which are named below. Seconds: both"
        " runtimes, one thread.",
        "",
        f"{count} architectures: " + ", ".join(f"{n} of {library}" for library, n in libraries.most_common()) + ".",
        "",
        "| | quantized | exported and run | integers compared | differing | not written with operators of our own |",
        "|---|---|---|---|---|---|",
    ]
    for platform, runtime in _RUNTIMES.items():
        rows = [r[platform] for r in found.values()]
        stages = [sum(r["stage"] in past for r in rows) for past in (("quantized", "exported", "run"), ("run",))]
        integers, differing, outside = (sum(r.get(k, 0) for r in rows) for k in ("integers", "differing", "outside"))
        shares = (f"{n} ({100 * n / max(1, count):.1f} %)" for n in stages)
        opaque = sum(bool(r.get("opaque")) for r in rows)
        differs = f"{outside} / {differing - outside}"
        lines.append(f"| {runtime}, `{platform}` | {' | '.join(shares)} | {integers:,} | {differs} | {opaque} |")
    lines += ["", "| architecture | library | ONNX Runtime: integers | differing | LiteRT: integers | differing | s |"]
    lines.append("|---" * 7 + "|")
    for name, r in found.items():
        cells = [c for platform in _RUNTIMES for c in _zoo_cells(r[platform])]
        lines.append("| " + " | ".join([name, r["source"], *cells, f"{r['seconds']:.0f}"]) + " |")
    floats = Counter(op for r in found.values() for p in _RUNTIMES for op in {*r[p].get("float_ops", ())})
    lines += ["", "## Refused", ""]
    for name, r in found.items():
        lines += [
            f"- {name}, {_RUNTIMES[p]}: {r[p]['error']}: {_first(r[p]['why'])}" for p in _RUNTIMES if r[p]["error"]
        ]
    lines += [
        "",
        "## Computed in float",
        "",
        "Operators that a runtime computes in float in front of quantized tensors, with the number",
    ]
    lines[-1] += " of files: " + ", ".join(f"{op} {n}" for op, n in sorted(floats.items())) + "."
    return "\n".join(lines) + "\n"


def _zoo_cells(r: dict[str, Any]) -> tuple[str, str]:
    """Of one file: the share of integers, and how many differ."""
    if r["stage"] != "run":
        return ("-" if "share" not in r else f"{100 * r['share']:.0f} %"), "refused"
    departs = f", {len(r['departures'])} departures" if r["departures"] else ""
    return f"{100 * r['share']:.0f} %", f"{r['outside']} / {r['differing'] - r['outside']}{departs}"


def _first(why: str) -> str:
    """What was refused, without what to try."""
    return why.partition(" Try: ")[0].replace("|", "\\|")


BESIDE = Path(__file__).parents[1] / "benchmarks" / "converters" / "results.json"


def converters() -> str:
    """Markdown: small networks beside ONNX Runtime's and TensorFlow's own tools, with every loss named."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.converters.limits import DECIBELS, LIMITS, gain, misses, summary

    found = json.loads(BESIDE.read_text())
    lines = [
        "# Beside the runtimes' own tools",
        "",
        "Generated by `make docs` from `benchmarks/converters/results.json`, which"
        " `python benchmarks/beside_converters.py` writes. PyTorch networks (`torch/`) are compared with ONNX"
        " Runtime's static quantization, Keras networks (`keras/`) with TensorFlow's converter, on the same calibration"
        " data and with chipfit's default settings. Each file runs in a plain session on other data. dB:"
        " signal-to-noise ratio of the worst output. Float: operators that compute in float. Time: processor time of"
        f" one call on one thread. Limits: {DECIBELS} dB less, {LIMITS['size']} times the size,"
        f" {LIMITS['time']} times the time, no float operator where the tool has none.",
        "",
        summary(found) + ".",
        "",
        "| network | dB | tool | gain | float | tool | bytes | tool | us | tool | outside a limit |",
        "|---" * 11 + "|",
    ]
    for name, r in found.items():
        pairs = [[_cell(r[who], key) for who in ("chipfit", "tool")] for key in ("decibels", "floats", "size", "time")]
        both = not any("error" in f for f in r.values())
        pairs[0].append(f"{gain(r):+.1f}" if both else "-")
        cells = [name, *(c for pair in pairs for c in pair), ", ".join(misses(r))]
        lines.append("| " + " | ".join(cells) + " |")
    refused = [f"- {name}, {who}: {f['error']}" for name, r in found.items() for who, f in r.items() if "error" in f]
    return "\n".join([*lines, "", "## Refused", "", *(r.replace("|", "\\|") for r in refused)]) + "\n"


def _cell(figures: dict[str, Any], key: str) -> str:
    """Return a figure as text, "refused" where there is no file."""
    return f"{figures[key]:.1f}" if key == "decibels" and key in figures else str(figures.get(key, "refused"))


GALLERY = Path(__file__).parents[1] / "benchmarks" / "gallery" / "results.json"


def gallery() -> str:
    """Markdown: trained networks of package indexes and repositories, beside the usual tools."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.gallery.page import page

    return page(json.loads(GALLERY.read_text()))


#: generated file below docs/ -> its text
PAGES: dict[str, Callable[[], str]] = {
    "platforms/support.md": support_table,
    "schema/platform.schema.json": json_schema,
    "schema/experiment.schema.json": experiment_schema,
    "schema/command-line.schema.json": documents_schema,
    "operators.md": operator_table,
    "api.md": api,
    "forms.svg": forms,
    "plots/few-bits.svg": few_bits,
    "plots/time.svg": time,
    "plots/beside-tools.svg": beside_tools,
    "algorithms.md": algorithm_table,
    "zoo.md": zoo,
    "converters.md": converters,
    "gallery.md": gallery,
}


def page(name: str) -> str:
    """Return a generated page, with its prose in at most 120 columns."""
    text = PAGES[name]()
    return wrapped(text) if name.endswith(".md") else text


def write(docs: Path) -> None:
    """Write every generated page."""
    for name in PAGES:
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(page(name))


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
