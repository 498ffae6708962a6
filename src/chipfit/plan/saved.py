"""Saved results: a directory of JSON and safetensors, without pickle and without the user's model class.

manifest.json        schema number, versions, and the SHA-256 of every other file
plan.json            every decision; its scales and zero points are in plan.safetensors
graph.json           the network's structure; its weights are in weights.safetensors
platform.json        the platform at that time
report.json          only if a report was given
"""

import contextlib
import difflib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from pydantic import ConfigDict, TypeAdapter, with_config
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from typing_extensions import TypedDict

from chipfit._version import __version__
from chipfit.engine.check_runs import check_runs
from chipfit.errors import ExportError, PlanError
from chipfit.files import MANIFEST, check_not_sparse, current_folder, parse_json, path_of, read_json, replace_folder
from chipfit.graph.extremes import is_finite
from chipfit.graph.ir import Graph
from chipfit.plan import json_codec as codec
from chipfit.plan.record import Plan, TensorPlan
from chipfit.platform.load import check_consistent, load_platform, names
from chipfit.platform.schema import Platform
from chipfit.validation import check_value

_FILES = ("plan.json", "plan.safetensors", "graph.json", "weights.safetensors", "platform.json")


@with_config(ConfigDict(strict=True, extra="forbid"))
class _PlatformFile(TypedDict):
    platform: Platform
    arch_selected: str | None
    file: str


_PLATFORM = TypeAdapter(_PlatformFile)
#: attempts to read a directory that writers keep replacing
_ATTEMPTS = 100


class Saved(NamedTuple):
    """The content of a saved result."""

    graph: Graph
    plan: Plan
    platform: Platform
    report: dict[str, Any] | None = None


def save(
    directory: str | Path, graph: Graph, plan: Plan, platform: Platform, report: Mapping[str, Any] | None = None
) -> Path:
    """Write a result.

    A reader finds the earlier result or this one at every instant, and several writers may save to one directory.
    An earlier saved result of that name is replaced.

    Args:
        report: JSON-able table to keep with it.

    Raises:
        PlanError: `directory` holds something other than a saved result, a number of the plan is invalid, or an
            attribute has no JSON representation.
        ExportError: writing fails.
    """
    root = path_of(directory, ExportError)
    with replace_folder(root, "a saved result", PlanError) as new:
        _write(new, graph, plan, platform, report)
    return root


def load(directory: str | Path) -> Saved:
    """Read what `save` wrote.

    Raises:
        PlanError: a file is missing, truncated, or not the one that was saved; the schema version is another; or
            plan, graph and weights do not fit together.
    """
    root = path_of(directory, PlanError)
    for attempt in range(_ATTEMPTS):
        before = _identity(root)
        try:
            files = _files(current_folder(root), root)
            break
        except PlanError:
            if _identity(root) == before or attempt == _ATTEMPTS - 1:  # otherwise a writer replaced it meanwhile
                raise
        time.sleep(0.001 * attempt)
    plan = codec.plan_from_json(_json(files, "plan.json", root), _tensors(files, "plan.safetensors", root))
    graph = codec.graph_from_json(_json(files, "graph.json", root), _tensors(files, "weights.safetensors", root))
    tensors, nodes = set(plan.tensors).union(*plan.ties), set(plan.nodes).union(*plan.groups)
    tensors |= {t for limit in plan.limits for t, _ in limit.terms}.union(plan.fixed, plan.zeros, dict(plan.sums))
    tensors, nodes = tensors | {v for v, _ in plan.float_edges}, nodes | {n for _, n in plan.float_edges}
    known = {n.name for n in graph.nodes}
    strangers = sorted((tensors - {*graph.values, *graph.weights}) | (nodes - known) | (known - set(plan.nodes)))
    if strangers:
        message = "The plan names tensors or nodes that the graph does not have, or leaves nodes out"
        raise PlanError(message, where=str(root), got=", ".join(strangers[:8]))
    for t in plan.tensors.values():
        check_stored(t, graph)
    if graph.in_spec:  # a graph without it was not captured
        check_runs(graph)
    platform = _platform(_json(files, "platform.json", root), root / "platform.json")
    report = _json(files, "report.json", root) if "report.json" in files else None
    return Saved(graph, plan, platform, report)


# ---------------------------------------------------------------------------------------------------------- writing


def _write(root: Path, graph: Graph, plan: Plan, platform: Platform, report: Mapping[str, Any] | None) -> None:
    (decided, numbers), (described, weights) = codec.plan_to_json(plan), codec.graph_to_json(graph)
    target: dict[str, Any] = {"platform": platform.model_dump(mode="json", by_alias=True)}
    target |= {"arch_selected": platform.arch_selected, "file": platform.file}
    files = {
        "plan.json": json.dumps(decided, indent=1, allow_nan=False).encode(),
        "graph.json": json.dumps(described, allow_nan=False).encode(),
        "platform.json": json.dumps(target, indent=1).encode(),
        "plan.safetensors": to_bytes({k: v.detach().contiguous().clone() for k, v in numbers.items()}),
        "weights.safetensors": to_bytes(weights),
    }
    if report is not None:
        files["report.json"] = json.dumps(report, indent=1).encode()
    for name, content in files.items():
        (root / name).write_bytes(content)
    (root / MANIFEST).write_text(manifest(files), encoding="utf-8")


def manifest(contents: Mapping[str, bytes | None]) -> str:
    """Return the manifest of a folder written by chipfit as JSON text; with hashes of the contents that are given."""
    listed: dict[str, Any] = {}
    for name, c in sorted(contents.items()):
        listed[name] = {} if c is None else {"sha256": hashlib.sha256(c).hexdigest(), "bytes": len(c)}
    versions = {"schema": codec.SCHEMA, "chipfit": __version__, "torch": torch.__version__}
    return json.dumps({**versions, "files": listed}, indent=1)


# ---------------------------------------------------------------------------------------------------------- reading


def _identity(root: Path) -> tuple[int, ...] | None:
    """Return an identity of the folder, which changes when it is replaced."""
    try:
        s = root.stat()
    except (OSError, ValueError):
        return None
    return s.st_dev, s.st_ino, s.st_ctime_ns


def _files(home: Path, root: Path) -> dict[str, bytes]:
    """Return the files of a saved result, checked against its manifest.

    Args:
        home: the folder to read.
        root: the name of that folder in messages.
    """
    if not _guarded(root / MANIFEST, (home / MANIFEST).is_file):
        lack = "it does not exist"
        if home.exists():
            lack = f"it has no {MANIFEST}" if home.is_dir() else "it is a file"
        folder = root.parent
        others = [p.parent.name for p in folder.glob(f"*/{MANIFEST}")] if folder.is_dir() else []
        near = difflib.get_close_matches(root.name, others, n=1)
        hint = f"'{folder / near[0]}'" if near else "pass the folder that `chipfit quantize` or Result.save wrote"
        raise PlanError(f"'{root}' is not a saved result: {lack}", hint=hint)
    listing = read_json(home / MANIFEST, PlanError)
    codec.check_schema(listing, f"'{root / MANIFEST}'")
    listed = listing.get("files")
    if not isinstance(listed, dict) or not set(_FILES) <= set(listed) <= {*_FILES, "report.json"}:
        what = "The manifest does not list the files of a saved result"
        raise PlanError(what, where=str(root / MANIFEST), allowed=", ".join(_FILES))
    missing = next((name for name in listed if not os.path.isfile(home / name)), None)
    if missing is not None:
        raise PlanError(f"The saved result is incomplete: '{missing}' is missing", where=str(root))
    files = {}
    with contextlib.ExitStack() as opened:  # open all first: they stay readable when the folder is replaced
        paths = {name: home / name for name in listed}
        handles = _guarded(root, lambda: {name: opened.enter_context(p.open("rb")) for name, p in paths.items()})
        for name, expected in listed.items():
            size = os.fstat(handles[name].fileno()).st_size
            if not isinstance(expected, dict) or size != expected.get("bytes"):
                message = f"'{name}' is truncated or was changed after it was saved"
                raise PlanError(message, where=str(root / name), got=f"{size} bytes", allowed=f"{expected}")
            check_not_sparse(root / name, os.fstat(handles[name].fileno()), PlanError)
            files[name] = content = _guarded(root / name, handles[name].read)
            if hashlib.sha256(content).hexdigest() != expected.get("sha256"):
                hint = "to edit a plan, load it, change it in Python, and save it again"
                message = f"'{name}' was changed after it was saved: its SHA-256 is not the manifest's"
                raise PlanError(message, where=str(root / name), hint=hint)
    return files


def _platform(described: Any, path: Path) -> Platform:
    fields = described.get("platform") if isinstance(described, dict) else None
    if isinstance(fields, dict) and "runtimes" not in fields and fields.get("name") in names():
        now = load_platform(fields["name"])  # saved before platforms named them
        fields |= {"runtimes": now.runtimes, "encodings": now.encodings}
    parts = check_value(_PLATFORM, described, PlanError, str(path), json=True)
    platform: Platform = parts.pop("platform").model_copy(update=parts)
    check_consistent(platform, str(path))
    return platform


def _json(files: Mapping[str, bytes], name: str, root: Path) -> Any:
    return parse_json(_guarded(root / name, lambda: files[name].decode()), PlanError, where=str(root / name))


def _tensors(files: Mapping[str, bytes], name: str, root: Path) -> dict[str, torch.Tensor]:
    return _guarded(root / name, lambda: from_bytes(files[name]))


def _guarded(path: Path, read: Callable[[], codec.T]) -> codec.T:
    try:
        return read()
    except (ValueError, OSError, RecursionError, safetensors.SafetensorError) as e:
        raise PlanError(f"'{path.name}' cannot be read", where=str(path), got=f"{type(e).__name__}: {e}") from e


# ---------------------------------------------------------------------------------------------------------- scales


def scales_fit(sizes: list[int], shape: Sequence[int | None], axis: int) -> bool:
    """Check whether scales of these sizes fit a shape: one scale per index of an axis, or per block along it."""
    if len(sizes) == 1:
        return shape[axis] in (None, *sizes)
    pairs = zip(sizes, shape, strict=False)
    blocks = all(s == b or (k == axis and b and s is not None and s % b == 0) for k, (b, s) in enumerate(pairs))
    return len(sizes) == len(shape) and blocks


def check_stored(t: TensorPlan, graph: Graph) -> None:
    """Check that the scales of a tensor fit its shape, and that a quantized weight is finite."""
    if t.stored is None:
        return
    shape, sizes, axis = graph.shape(t.name), list(t.stored.scale.shape), t.stored.axis
    if sizes:
        axis = 0 if axis is None and len(shape) == 1 else axis
        if axis is None or not -len(shape) <= axis < len(shape) or not scales_fit(sizes, shape, axis % len(shape)):
            got = f"scales {sizes} along axis {axis} of {list(shape)}"
            raise PlanError(f"The scales of '{t.name}' do not fit its shape", got=got)
    w = graph.weights.get(t.name)
    if w is not None and not (w.is_floating_point() and is_finite(w)):
        raise PlanError(f"The quantized weight '{t.name}' must hold finite floats", got=str(w.dtype))
