"""Data sets without a download: handwritten digits and procedural images."""

import torch

from chipfit.bench.config import Data
from chipfit.bench.data import Sets, Tensors
from chipfit.bench.data.procedural import CLASSES, images
from chipfit.errors import DataError, import_optional
from chipfit.registry import register


@register("data", "procedural")
def procedural(config: Data) -> Sets:
    """Return images of 32 x 32 pixels of 20 classes, 2,000 in each half unless configured."""
    train, test = (split.images or 2000 for split in (config.train, config.test))
    return Sets(Tensors(*images(train, 1000)), Tensors(*images(test, 1)), CLASSES)


@register("data", "digits")
def digits(config: Data) -> Sets:
    """Return scikit-learn's 1,797 gray digits as [N, 3, 8, 8] in 0..1, 10 classes; every fourth is a test image."""
    x, y = import_optional("sklearn.datasets", "This data set", DataError, "scikit-learn").load_digits(return_X_y=True)
    pixels = torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8).repeat(1, 3, 1, 1)
    classes = torch.tensor(y)
    held = torch.arange(len(classes)) % 4 == 3
    halves = (~held, config.train), (held, config.test)
    train, test = (Tensors(pixels[k][: split.images], classes[k][: split.images]) for k, split in halves)
    return Sets(train, test, 10)
