"""Images on disk: one folder per class as in ImageNet, and CIFAR in its binary format."""

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chipfit.bench.config import Data, Split
from chipfit.bench.data import Sets, Tensors
from chipfit.errors import DataError, import_optional
from chipfit.files import existing_file, list_folder
from chipfit.registry import register

#: mean and standard deviation of ImageNet's colours in 0..1
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SUFFIXES = {".jpeg", ".jpg", ".png", ".bmp", ".webp"}
#: greatest change of brightness, contrast and saturation (factor 1 +- JITTER), and of hue (share of the circle)
JITTER, HUE = 0.2, 0.1


@dataclass
class Folder:
    """Images with one folder per class, sorted by name."""

    files: list[tuple[Path, int]]
    transforms: str
    size: int  #: side length of the network's input [pixels]
    resize: int  #: short side before the center crop [pixels]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, generator: torch.Generator) -> tuple[Tensor, int] | None:
        from PIL import Image

        path, label = self.files[index]
        try:
            with Image.open(path) as image:
                pixels = self._transformed(image.convert("RGB"), generator)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None
        x = torch.from_numpy(np.array(pixels, dtype=np.float32) / 255)
        return ((x - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1), label

    def _transformed(self, image: Any, generator: torch.Generator) -> Any:
        if self.transforms == "PLAIN":
            return image.resize((self.size, self.size))
        if self.transforms == "ONECROP":
            short = self.resize / min(image.size)
            image = image.resize([max(round(side * short), self.size) for side in image.size])
            left, top = ((side - self.size) // 2 for side in image.size)
            return image.crop((left, top, left + self.size, top + self.size))
        return _color_jitter(_random_crop(image, self.size, generator), generator)

    def digest(self) -> str:
        """Return a hash of names and sizes; hashing all of ImageNet would take longer than an experiment."""
        listing = "\n".join(f"{p.parent.name}/{p.name} {p.stat().st_size}" for p, _ in self.files)
        return hashlib.sha256(listing.encode()).hexdigest()[:16]


def _uniform(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def _random_crop(image: Any, size: int, generator: torch.Generator) -> Any:
    """Return a random crop (8 to 100 % of the area, aspect ratio 3:4 to 4:3) at `size`, perhaps mirrored.

    Source: Szegedy et al. 2015, arXiv:1409.4842, section 6.
    """
    from PIL import ImageOps

    width, height = image.size
    for _ in range(10):
        area = width * height * _uniform(generator, 0.08, 1.0)
        ratio = math.exp(_uniform(generator, math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            break
    else:
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = round(_uniform(generator, 0, width - w)), round(_uniform(generator, 0, height - h))
    image = image.resize((size, size), box=(left, top, left + w, top + h))
    return ImageOps.mirror(image) if _uniform(generator, 0, 1) < 0.5 else image


def _color_jitter(image: Any, generator: torch.Generator) -> Any:
    """Return an image with random changes of brightness, contrast, saturation and hue."""
    from PIL import Image, ImageEnhance

    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = change(image).enhance(_uniform(generator, 1 - JITTER, 1 + JITTER))
    turned = np.array(image.convert("HSV"))
    turned[..., 0] += np.uint8(round(_uniform(generator, -HUE, HUE) * 256) % 256)  # the circle has 256 parts
    return Image.fromarray(turned, "HSV").convert("RGB")


def _half(config: Data, split: Split, names: tuple[str, ...]) -> tuple[Folder, list[str]]:
    root = Path(split.root or config.root or os.environ.get("CHIPFIT_DATA", ""))
    root = next((root / n for n in names if not split.root and (root / n).is_dir()), root)
    classes = [p.name for p in list_folder(root, DataError, "The folder of images") if p.is_dir()]
    inside = ((f, k) for k, name in enumerate(classes) for f in sorted((root / name).iterdir()))
    files = [(f, k) for f, k in inside if f.suffix.lower() in SUFFIXES]
    if not files:
        hint = "one folder for each class, with images in it: train/n01440764/a.JPEG"
        raise DataError("Folder holds no classes of images", where=str(root), hint=hint)
    return Folder(files[: split.images], split.transforms.type, config.input_size, config.test_resize), classes


@register("data", "imagenet")
def imagenet(config: Data) -> Sets:
    """Return images of `root`/train/CLASS/ and `root`/val/CLASS/, in the format of ImageNet.

    Raises:
        DataError: Pillow, a folder or images are missing, or the halves have different classes.
    """
    import_optional("PIL", "A folder of images", DataError, extra="images")
    if config.root is None and "CHIPFIT_DATA" not in os.environ and not (config.train.root and config.test.root):
        hint = "CHIPFIT_DATA=FOLDER with train/ and val/ in it, or data.root"
        raise DataError("The folder of images is not configured", hint=hint)
    train, classes = _half(config, config.train, ("train",))
    test, others = _half(config, config.test, ("val", "test"))
    if classes != others:
        odd = sorted(set(classes) ^ set(others))[:4]
        raise DataError("Training and test images have different classes", got=", ".join(odd))
    return Sets(train, test, len(classes))


def _cifar(config: Data, files: tuple[tuple[str, ...], str], labels: int, classes: int) -> Sets:
    """Return images from rows of label bytes (the last is used) and 3 x 32 x 32 colours."""
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)))
    halves = []
    for names, split in ((files[0], config.train), ((files[1],), config.test)):
        root = Path(split.root or config.root or os.environ.get("CHIPFIT_DATA", ""))
        paths = [existing_file(root / n, DataError, "CIFAR's binary file") for n in names]
        raw = np.concatenate([np.fromfile(p, np.uint8) for p in paths])
        if raw.size == 0 or raw.size % (labels + 3072):
            got = f"{raw.size} bytes"
            allowed = f"rows of {labels + 3072} bytes"
            raise DataError("File is not in CIFAR's binary format", where=str(root), got=got, allowed=allowed)
        rows = raw.reshape(-1, labels + 3072)[: split.images]
        x = (torch.from_numpy(rows[:, labels:].copy()).view(-1, 3, 32, 32) / 255 - mean) / std
        halves.append(Tensors(x, torch.from_numpy(rows[:, labels - 1].astype(np.int64)), split.transforms.type))
    return Sets(halves[0], halves[1], classes)


@register("data", "cifar10")
def cifar10(config: Data) -> Sets:
    """Return CIFAR-10 from `root`/data_batch_1.bin ... and test_batch.bin, its binary version."""
    return _cifar(config, (tuple(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"), 1, 10)


@register("data", "cifar100")
def cifar100(config: Data) -> Sets:
    """Return CIFAR-100 from `root`/train.bin and test.bin, its binary version."""
    return _cifar(config, (("train.bin",), "test.bin"), 2, 100)
