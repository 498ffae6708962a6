"""A result on disk: a directory of JSON and safetensors, without pickle and without the user's model class.

manifest.json        schema number, versions, and the SHA-256 of every other file
plan.json            every decision; its scales and zero points are in plan.safetensors
graph.json           the network's structure; its weights are in weights.safetensors
platform.json        the platform as it was
report.json          only where a report was given
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
import safetensors
import torch
from safetensors.torch import load_file, save_file

from chipfit._version import __version__
from chipfit.errors import GraphError, PlanError
from chipfit.graph.check import check
from chipfit.graph.ir import Graph, Node, Value
from chipfit.plan.record import Plan
from chipfit.plan.text import SCHEMA, check_schema, from_plain, plan_from_json, plan_to_json, record_to_plain
from chipfit.platform.load import load as load_platform
from chipfit.platform.load import names
from chipfit.platform.schema import Platform

_FILES = ("plan.json", "plan.safetensors", "graph.json", "weights.safetensors", "platform.json")


class Saved(NamedTuple):
    """What a directory holds."""

    graph: Graph
    plan: Plan
    platform: Platform
    report: dict[str, Any] | None = None


def save(
    directory: str | Path, graph: Graph, plan: Plan, platform: Platform, report: Mapping[str, Any] | None = None
) -> Path:
    """Write a result.

    Everything is written to a temporary directory beside `directory`, which then takes its name, so that no
    half-written result is ever found there. An earlier saved result of that name is replaced.

    Args:
        report: JSON-able table to keep with it.

    Raises:
        PlanError: `directory` holds something else than a saved result, or an attribute has no JSON form.
    """
    target = Path(directory).absolute()
    if target.exists() and not (target / "manifest.json").is_file() and (not target.is_dir() or any(target.iterdir())):
        raise PlanError(f"'{directory}' exists and is not a saved result", hint="choose a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    unique = f".{target.name}.{secrets.token_hex(8)}"
    staging, old = target.with_name(f"{unique}.new"), target.with_name(f"{unique}.old")
    staging.mkdir()
    try:
        _write(staging, graph, plan, platform, report)
        if target.exists():  # a full directory cannot be replaced in one step
            os.replace(target, old)
        os.replace(staging, target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Path(directory)


def load(directory: str | Path) -> Saved:
    """Read what `save` wrote.

    Raises:
        PlanError: a file is missing, truncated, or not the one that was saved; the schema version is another; or
            plan, graph and weights do not fit together.
    """
    root = Path(directory)
    if not (root / "manifest.json").is_file():
        raise PlanError(
            f"'{directory}' is not a saved result: it has no manifest.json",
            hint="pass the directory that Result.save wrote",
        )
    manifest = _json(root / "manifest.json")
    check_schema(manifest, f"'{root / 'manifest.json'}'")
    _check_files(root, manifest.get("files"))

    numbers = _tensors(root / "plan.safetensors")
    plan = plan_from_json((root / "plan.json").read_text(encoding="utf-8"), numbers)
    graph = _graph_from_plain(_json(root / "graph.json"), _tensors(root / "weights.safetensors"))
    strangers = sorted(set(plan.tensors) - set(graph.values) - set(graph.weights)) + sorted(
        set(plan.nodes) - {n.name for n in graph.nodes}
    )
    if strangers:
        raise PlanError(
            "The plan speaks of tensors or nodes that the graph does not have",
            where=str(root),
            got=", ".join(strangers[:8]),
        )
    said = _json(root / "platform.json")
    try:
        if "runtimes" not in said["platform"] and said["platform"]["name"] in names():  # saved before files named them
            now = load_platform(said["platform"]["name"])
            said["platform"] |= {"runtimes": now.runtimes, "encodings": now.encodings}
        platform = Platform.model_validate(said["platform"]).model_copy(
            update={k: said[k] for k in ("arch_selected", "file")}
        )
    except (KeyError, TypeError, pydantic.ValidationError) as e:
        raise PlanError("The saved platform is malformed", where=str(root / "platform.json"), got=str(e)) from e
    report = _json(root / "report.json") if "report.json" in manifest["files"] else None
    return Saved(graph, plan, platform, report)


# ---------------------------------------------------------------------------------------------------------- writing


def _write(root: Path, graph: Graph, plan: Plan, platform: Platform, report: Mapping[str, Any] | None) -> None:
    numbers: dict[str, torch.Tensor] = {}
    texts = {"plan.json": plan_to_json(plan, numbers)}
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in numbers.items()}, root / "plan.safetensors")
    described, weights = _graph_to_plain(graph)
    save_file(weights, root / "weights.safetensors")
    texts["graph.json"] = json.dumps(described, allow_nan=False)
    said = {
        "platform": platform.model_dump(mode="json", by_alias=True),
        "arch_selected": platform.arch_selected,
        "file": platform.file,
    }
    texts["platform.json"] = json.dumps(said, indent=1)
    if report is not None:
        texts["report.json"] = json.dumps(report, indent=1)
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
    for path in root.glob("*.safetensors"):  # the library lets only the owner read them
        shutil.copymode(root / "graph.json", path)
    files = {p.name: {"sha256": _sha256(p), "bytes": p.stat().st_size} for p in sorted(root.iterdir())}
    manifest = {"schema": SCHEMA, "chipfit": __version__, "torch": torch.__version__, "files": files}
    (root / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _graph_to_plain(graph: Graph) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The structure as JSON, and each weight once: tied ones are listed as aliases of the first."""
    weights: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    stored: set[int] = set()
    for name, w in graph.weights.items():
        original = first.setdefault(id(w), name)
        if original != name:
            aliases[name] = original
        else:
            own = w.detach().cpu().contiguous()
            whole = own.untyped_storage().nbytes() == own.nbytes and own.data_ptr() not in stored
            weights[name] = own if whole else own.clone()  # safetensors takes no two tensors that share memory
            stored.add(own.data_ptr())
    return {
        "schema": SCHEMA,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "values": {v.name: record_to_plain(v, leave_out=("name",)) for v in graph.values.values()},
        "nodes": [record_to_plain(n) for n in graph.nodes],
        "weights": list(graph.weights),
        "aliases": aliases,
        "trainable": sorted(graph.trainable),
        "in_spec": graph.in_spec,
        "out_spec": graph.out_spec,
        "data_format": graph.data_format,
        "framework": graph.framework,
    }, weights


# ---------------------------------------------------------------------------------------------------------- reading


def _check_files(root: Path, files: Any) -> None:
    if not isinstance(files, dict) or not set(_FILES) <= set(files) <= {*_FILES, "report.json"}:
        raise PlanError(
            "The manifest does not list the files of a saved result",
            where=str(root / "manifest.json"),
            allowed=", ".join(_FILES),
        )
    for name, said in files.items():
        path = root / name
        if not path.is_file():
            raise PlanError(f"The saved result is incomplete: '{name}' is missing", where=str(root))
        size = path.stat().st_size
        if not isinstance(said, dict) or size != said.get("bytes"):
            raise PlanError(
                f"'{name}' is truncated or was changed after it was saved",
                where=str(path),
                got=f"{size} bytes",
                allowed=f"{said}",
            )
        if _sha256(path) != said.get("sha256"):
            hint = "to edit a plan, load it, change it in Python, and save it again"
            raise PlanError(
                f"'{name}' was changed after it was saved: its SHA-256 is not the manifest's",
                where=str(path),
                hint=hint,
            )


def _graph_from_plain(data: Any, weights: dict[str, torch.Tensor]) -> Graph:
    check_schema(data, "the graph")
    try:
        weights.update({name: weights[original] for name, original in data["aliases"].items()})
        graph = Graph(
            nodes=[Node(**from_plain(n)) for n in data["nodes"]],
            inputs=data["inputs"],
            outputs=data["outputs"],
            values={name: Value(name, **from_plain(v)) for name, v in data["values"].items()},
            weights={name: weights.pop(name) for name in data["weights"]},
            trainable=set(data["trainable"]),
            in_spec=data["in_spec"],
            out_spec=data["out_spec"],
            data_format=data["data_format"],
            framework=data["framework"],
        )
        check(graph, blame="loading")
    except (KeyError, TypeError, ValueError, AttributeError, GraphError) as e:
        raise PlanError("The saved graph is malformed", got=f"{type(e).__name__}: {e}") from e
    if weights:
        raise PlanError("There are weights that the graph does not know", got=", ".join(sorted(weights)[:8]))
    return graph


def _json(path: Path) -> Any:
    return _guarded(path, lambda: json.loads(path.read_text(encoding="utf-8")))


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    return _guarded(path, lambda: load_file(path))


def _guarded(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (ValueError, OSError, safetensors.SafetensorError) as e:
        raise PlanError(f"'{path.name}' cannot be read", where=str(path), got=f"{type(e).__name__}: {e}") from e


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
