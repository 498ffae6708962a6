"""Where a plan came from: versions, hashes, settings; enough to replay it and to notice when something differs."""

import hashlib
from typing import Any

import torch

from chipfit._version import __version__
from chipfit.graph.ir import Graph
from chipfit.platform.schema import Platform


def hash_graph(graph: Graph) -> str:
    """SHA-256 over structure and weights; equal for equal networks on any machine."""
    h = hashlib.sha256()
    for n in graph.nodes:
        h.update(repr((n.name, n.op, n.inputs, n.outputs, sorted(n.attrs.items(), key=lambda kv: kv[0]))).encode())
    for name in sorted(graph.weights):
        w = graph.weights[name].detach().contiguous().cpu()
        h.update(f"{name}{tuple(w.shape)}{w.dtype}".encode())
        h.update(w.reshape(-1).view(torch.uint8).numpy().data if w.numel() else b"")
    return h.hexdigest()


def record(graph: Graph, platform: Platform, data: str, **settings: Any) -> dict[str, Any]:
    """The provenance entry of a Plan, JSON-able; with the whole platform where exported files are to carry it.

    Args:
        data: hash of what calibration saw.
    """
    described = platform.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {
        **({"platform": described} if platform.metadata else {}),
        "chipfit": __version__,
        "torch": torch.__version__,
        "graph_sha256": hash_graph(graph),
        "data_sha256": data,
        "platform_sha256": platform.hash,
        "settings": {k: v for k, v in settings.items() if v is not None},
    }
