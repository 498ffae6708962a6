"""Measure the accuracy that image transformers lose in 8 bits with default settings, evaluated on ONNX Runtime.

    python benchmarks/image_transformers.py [--networks vit deit swin] [--epochs 30] [--test 4000]

ViT, DeiT (with a token for distillation) and Swin (with shifted windows) at small sizes, from `transformers`, trained
on procedural images of 20 classes: an epoch is 8,000 images of 32x32, about a minute of processor time. They learn
slowly: after four epochs ViT reaches 14 %, and an untrained network has no accuracy to lose. Trained weights are kept
below `.bench`. Each is quantized with default settings on 512 images, exported, and run by ONNX Runtime on images that
neither training nor calibration has seen. The limit is 0.3 points below the float network.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if os.environ.get("OMP_NUM_THREADS") != "1":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import onnxruntime
import torch
import torch.nn.functional as F
import transformers
from benchmarks.small import keep, kept
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor, nn

import chipfit
from chipfit.bench.data.procedural import CLASSES, SIDE, images

LIMIT = 0.3  #: points below float


class Logits(nn.Module):
    """A classifier of `transformers` that returns the tensor of its logits, [N, 20]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.network(pixel_values=pixel_values).logits


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**_PLAIN))


def deit() -> nn.Module:
    return transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**_PLAIN))


def swin() -> nn.Module:
    """Return a Swin whose initial weights suit 48 channels: with the library's deviation of 0.02 it never learns."""
    sizes: dict[str, Any] = {"embed_dim": 48, "depths": [2, 4], "num_heads": [3, 6], "window_size": 4}
    shape: dict[str, Any] = {"image_size": SIDE, "patch_size": 4, "num_labels": CLASSES, **sizes}
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(drop_path_rate=0.0, initializer_range=0.15, **shape)
    )


_PLAIN: dict[str, Any] = {
    "image_size": SIDE,
    "patch_size": 4,
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "num_labels": CLASSES,
}
#: network -> class and peak learning rate (DeiT learns nothing at ViT's)
NETWORKS = {"vit": (vit, 2e-3), "deit": (deit, 7e-4), "swin": (swin, 2e-3)}


def trained(name: str, epochs: int, size: int) -> nn.Module:
    """Return one of `NETWORKS`, trained in float or, from the second call on, read from `.bench`."""
    torch.manual_seed(0)
    make, rate = NETWORKS[name]
    model = Logits(make()).train()
    file = kept(f"{name}-{epochs}-{size}", Path(__file__))
    if file.exists():
        model.load_state_dict(load_file(file))
        return model.eval()
    steps = epochs * size // 64
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.15)
    step = 0
    for epoch in range(epochs):
        x, y = images(size, 1000 + epoch)
        for part, label in zip(x.split(64), y.split(64), strict=True):
            if step == steps:
                break
            optimizer.zero_grad()
            loss = F.cross_entropy(model(part), label)
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
        print(f"{name}: epoch {epoch + 1} of {epochs}, loss {loss.item():.2f}", flush=True)
    keep(model, file)
    return model.eval()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--size", type=int, default=8000, help="images of an epoch")
    parser.add_argument("--test", type=int, default=4000, help="images")
    a = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("network", "float", "below float", "limit", "other labels", "integers", "s")
    x, y = images(a.test, 1)
    over = 0
    for name in a.networks:
        begun = time.process_time()
        model = trained(name, a.epochs, a.size)
        with torch.inference_mode():
            want = torch.cat([model(part) for part in x.split(250)])
        real = 100 * float((want.argmax(1) == y).float().mean())
        print(f"{name}: float {real:.2f} %, trained in {time.process_time() - begun:.0f} s", flush=True)
        begun = time.process_time()
        result = chipfit.quantize(model, list(images(512, 7)[0].split(64)), "ort_cpu", progress=False)
        with tempfile.TemporaryDirectory() as folder:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = 1, 3
            session = onnxruntime.InferenceSession(str(result.export(Path(folder) / "m.onnx")), options)
        seconds = time.process_time() - begun
        got = torch.cat([torch.from_numpy(session.run(None, {"pixel_values": p.numpy()})[0]) for p in x.split(250)])
        below = real - 100 * float((got.argmax(1) == y).float().mean())
        other = 100 * float((got.argmax(1) != want.argmax(1)).float().mean())
        nodes = result.plan.nodes.values()
        integers = f"{sum(n.exec != 'float' for n in nodes)} of {len(nodes)}"
        table.add_row(name, f"{real:.2f} %", f"{below:.2f}", str(LIMIT), f"{other:.2f} %", integers, f"{seconds:.1f}")
        over += below > LIMIT
    Console(width=100).print(table)
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
