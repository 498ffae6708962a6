"""A network and a configuration that train in a second."""

from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn

DIGITS = {"train": {"images": 400}, "test": {"images": 100}}


def net() -> nn.Module:
    """Return a classifier of images [N, 3, 8, 8] with 10 classes."""
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(body, nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def plain() -> nn.Module:
    """Return a network without batch norm, whose statistics would depend on the number of processes."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def without_training(**over: Any) -> dict[str, Any]:
    """Return the configuration without what concerns training alone."""
    return {k: v for k, v in config(**over).items() if k not in ("qparams", "backend", "bnfold", "lr_scheduler")}


def image_folder(folder: Path, *unreadable: str) -> dict[str, Any]:
    """Write two classes of 20 training and 10 test images, some of them unreadable; return their configuration."""
    for half, count in (("train", 20), ("val", 10)):
        for k, name in enumerate("ab"):
            (folder / half / name).mkdir(parents=True)
            for j in range(count):
                Image.new("RGB", (9, 9), (250 * k, j, 9)).save(folder / half / name / f"{j:02}.png")
    for name in unreadable:
        (folder / name).write_bytes(b"no image")
    return {"type": "imagenet", "root": str(folder), "calibration": 10, "input_size": 8, "test_resize": 8}


def quiet(text: str) -> None:
    """Discard a message."""


def config(**over: Any) -> dict[str, Any]:
    """Return a configuration: digits, 8 bits, 12 steps."""
    return {
        "model": {"type": "tests.bench.tiny:net"},
        "data": {"type": "digits", "batch_size": 50, "calibration": 100, **DIGITS},
        "qparams": {"w_method": "lsq", "a_method": "lsq", "bit": 8},
        "backend": "tensorrt",
        "bnfold": 4,
        "lr_scheduler": {"kwargs": {"base_lr": 0.01, "warmup_steps": 2, "max_iter": 12}},
        "saver": {"print_freq": 1, "val_freq": 4, "pretrain": {"epochs": 2, "lr": 0.1}},
        **over,
    }
