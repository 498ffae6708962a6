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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
import safetensors
import torch
from safetensors.torch import load_file, save_file

from chipfit._version import __version__
from chipfit.errors import PlanError
from chipfit.files import read_json, read_text
from chipfit.graph.ir import Graph
from chipfit.plan.graph_text import graph_from_plain, graph_to_plain
from chipfit.plan.plain import SCHEMA, check_schema
from chipfit.plan.record import Plan
from chipfit.plan.text import plan_from_json, plan_to_json
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
    plan = plan_from_json(read_text(root / "plan.json", PlanError), numbers)
    graph = graph_from_plain(_json(root / "graph.json"), _tensors(root / "weights.safetensors"))
    strangers = sorted(set(plan.tensors) - set(graph.values) - set(graph.weights)) + sorted(
        set(plan.nodes) - {n.name for n in graph.nodes}
    )
    if strangers:
        message = "The plan speaks of tensors or nodes that the graph does not have"
        raise PlanError(message, where=str(root), got=", ".join(strangers[:8]))
    platform = _platform(root / "platform.json")
    report = _json(root / "report.json") if "report.json" in manifest["files"] else None
    return Saved(graph, plan, platform, report)


# ---------------------------------------------------------------------------------------------------------- writing


def _write(root: Path, graph: Graph, plan: Plan, platform: Platform, report: Mapping[str, Any] | None) -> None:
    numbers: dict[str, torch.Tensor] = {}
    texts = {"plan.json": plan_to_json(plan, numbers)}
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in numbers.items()}, root / "plan.safetensors")
    described, weights = graph_to_plain(graph)
    save_file(weights, root / "weights.safetensors")
    texts["graph.json"] = json.dumps(described, allow_nan=False)
    target: dict[str, Any] = {"platform": platform.model_dump(mode="json", by_alias=True)}
    target |= {"arch_selected": platform.arch_selected, "file": platform.file}
    texts["platform.json"] = json.dumps(target, indent=1)
    if report is not None:
        texts["report.json"] = json.dumps(report, indent=1)
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
    for path in root.glob("*.safetensors"):  # the library lets only the owner read them
        shutil.copymode(root / "graph.json", path)
    files = {p.name: {"sha256": _sha256(p), "bytes": p.stat().st_size} for p in sorted(root.iterdir())}
    manifest = {"schema": SCHEMA, "chipfit": __version__, "torch": torch.__version__, "files": files}
    (root / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- reading


def _check_files(root: Path, files: Any) -> None:
    if not isinstance(files, dict) or not set(_FILES) <= set(files) <= {*_FILES, "report.json"}:
        raise PlanError(
            "The manifest does not list the files of a saved result",
            where=str(root / "manifest.json"),
            allowed=", ".join(_FILES),
        )
    for name, expected in files.items():
        path = root / name
        if not path.is_file():
            raise PlanError(f"The saved result is incomplete: '{name}' is missing", where=str(root))
        size = path.stat().st_size
        if not isinstance(expected, dict) or size != expected.get("bytes"):
            message = f"'{name}' is truncated or was changed after it was saved"
            raise PlanError(message, where=str(path), got=f"{size} bytes", allowed=f"{expected}")
        if _sha256(path) != expected.get("sha256"):
            hint = "to edit a plan, load it, change it in Python, and save it again"
            message = f"'{name}' was changed after it was saved: its SHA-256 is not the manifest's"
            raise PlanError(message, where=str(path), hint=hint)


def _platform(path: Path) -> Platform:
    described = _json(path)
    try:
        fields = described["platform"]
        if "runtimes" not in fields and fields["name"] in names():  # saved before platforms named them
            now = load_platform(fields["name"])
            fields |= {"runtimes": now.runtimes, "encodings": now.encodings}
        selected = {k: described[k] for k in ("arch_selected", "file")}
        return Platform.model_validate(fields).model_copy(update=selected)
    except (KeyError, TypeError, pydantic.ValidationError) as e:
        raise PlanError("The saved platform is malformed", where=str(path), got=str(e)) from e


def _json(path: Path) -> Any:
    return read_json(path, PlanError)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, safetensors.SafetensorError) as e:
        raise PlanError(f"'{path.name}' cannot be read", where=str(path), got=f"{type(e).__name__}: {e}") from e
    return tensors


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
