"""A network and a configuration that train in a second."""

from typing import Any

from torch import nn


def net() -> nn.Module:
    """Return a classifier of images [N, 3, 8, 8] with 10 classes."""
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(body, nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def plain() -> nn.Module:
    """Return a network without batch norm, whose statistics would depend on the number of processes."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def config(**over: Any) -> dict[str, Any]:
    """Return a configuration: digits, 8 bits, 12 steps."""
    return {
        "model": {"type": "tests.bench.tiny:net"},
        "data": {
            "type": "digits",
            "batch_size": 50,
            "calibration": 100,
            "train": {"images": 400},
            "test": {"images": 100},
        },
        "qparams": {"w_method": "lsq", "a_method": "lsq", "bit": 8},
        "backend": "tensorrt",
        "bnfold": 4,
        "lr_scheduler": {"kwargs": {"base_lr": 0.01, "warmup_steps": 2, "max_iter": 12}},
        "saver": {"print_freq": 1, "val_freq": 4, "pretrain": {"epochs": 2, "lr": 0.1}},
        **over,
    }
