"""The two small networks of every accuracy figure: a residual and a depthwise one, trained on procedural images."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmarks.models import BasicBlock, InvertedResidual, conv_bn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from chipfit.bench.data.procedural import images


class ResNet20(nn.Module):
    """A ResNet-20 of images [N, 3, 32, 32].  arXiv:1512.03385, section 4.2; 0.27 M parameters, 41 M multiplications."""

    def __init__(self, classes: int = 20) -> None:
        super().__init__()
        self.stem = conv_bn(3, 16, 3)
        widths = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        self.stages = nn.Sequential(
            *(nn.Sequential(BasicBlock(i, o, s), BasicBlock(o, o, 1), BasicBlock(o, o, 1)) for i, o, s in widths)
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


class SmallMobileNetV2(nn.Module):
    """A MobileNetV2 of images [N, 3, 32, 32]: ten inverted residuals, 0.16 M parameters, 13 M multiplications."""

    def __init__(self, classes: int = 20) -> None:
        super().__init__()
        rows = [
            (1, 16, 1, 1),
            (4, 24, 2, 2),
            (4, 32, 3, 2),
            (4, 48, 2, 1),
            (4, 64, 2, 2),
        ]  # widen, width, blocks, stride
        blocks, width = [], 16
        for widen, out, count, stride in rows:
            for k in range(count):
                blocks.append(InvertedResidual(width, out, stride if k == 0 else 1, widen))
                width = out
        self.stem, self.blocks, self.last = conv_bn(3, 16, 3, act=nn.ReLU6), nn.Sequential(*blocks), conv_bn(64, 192, 1)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.blocks(self.stem(x))))


#: network -> training cycles of 8 epochs each (depthwise networks learn slowly)
CYCLES = {"resnet20": 1, "mobilenetv2": 2}
#: networks of every accuracy figure
SMALL: dict[str, type[nn.Module]] = {"resnet20": ResNet20, "mobilenetv2": SmallMobileNetV2}
#: folder of trained weights
KEPT = Path(__file__).parents[1] / ".bench"


def trained(name: str, seed: int = 0, epochs: int = 8) -> nn.Module:
    """Return one of `SMALL`, trained in float on 16,000 procedural images (minutes), or read from `.bench`."""
    torch.manual_seed(seed)
    model = SMALL[name]()
    file = kept(f"{name}-{seed}", Path(__file__), Path(__file__).parent / "models.py")
    if file.exists():
        model.load_state_dict(load_file(file))
        return model.eval()
    x, y = images(16000, 1000 + seed)
    model.train().to(memory_format=torch.channels_last)
    for cycle in range(CYCLES[name]):
        _cycle(model, x, y, epochs)
        torch.manual_seed(seed + cycle + 1)  # the next seed draws the same whether or not weights were saved
        print(f"{name} seed {seed}: cycle {cycle + 1} of {CYCLES[name]}", flush=True)
    keep(model, file)
    return model.to(memory_format=torch.contiguous_format).eval()


def _cycle(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """Train for one cycle of the learning rate, up and down again."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=epochs * (len(x) // 64))
    for _ in range(epochs):
        for k in torch.randperm(len(x))[: len(x) // 64 * 64].split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[k].contiguous(memory_format=torch.channels_last)), y[k]).backward()
            optimizer.step()
            schedule.step()


@torch.inference_mode()
def logits(model: nn.Module, x: Tensor, batch: int = 50) -> Tensor:
    """Return the logits of many images [N, 3, 32, 32], computed in batches."""
    return torch.cat([model(part) for part in x.split(batch)])


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return top-1 in percent."""
    return 100 * float((logits(model, x).argmax(1) == y).float().mean())


def kept(name: str, *sources: Path) -> Path:
    """Return the file of trained weights; its name has a hash of the files that define network, training and images."""
    content = b"".join(f.read_bytes() for f in (*sources, Path(inspect.getfile(images))))
    return KEPT / f"{name}-{hashlib.sha256(content).hexdigest()[:8]}.safetensors"


def keep(model: nn.Module, file: Path) -> None:
    """Write trained weights atomically."""
    KEPT.mkdir(exist_ok=True)
    scratch = file.with_suffix(".part")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, scratch)
    scratch.replace(file)
