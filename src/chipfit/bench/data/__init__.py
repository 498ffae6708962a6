"""Data sets of experiments: folders of images, or images that need no download.

@register("data", "mine")
def mine(config: chipfit.bench.config.Data) -> Sets: ...

A data set outside the package is "module:mine".

The random transforms of an image depend on the experiment's seed, the epoch and the image's index only, so that they
are independent of the number of processes and of interruptions.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from chipfit.bench.config import Data
from chipfit.bench.data.procedural import CLASSES
from chipfit.bench.data.procedural import images as drawn_images
from chipfit.errors import DataError, import_optional
from chipfit.import_by_name import call_factory, import_by_name
from chipfit.registry import lookup, register


class Images(Protocol):
    """One half of a data set."""

    def __len__(self) -> int: ...

    def read(self, index: int, generator: torch.Generator) -> tuple[Tensor, int] | None:
        """Return an image float32 [C, H, W] and its class; None if it cannot be read."""

    def digest(self) -> str:
        """Return a hash of the content."""


@dataclass
class Sets:
    """Both halves of a data set."""

    train: Images
    test: Images
    classes: int


@dataclass
class Tensors:
    """Images in memory: x [N, C, H, W], y [N].

    With the transforms "STANDARD" they are shifted by up to 4 pixels and randomly mirrored (He et al. 2016, section
    4.2).
    """

    x: Tensor
    y: Tensor
    transforms: str = "PLAIN"

    def __len__(self) -> int:
        return len(self.y)

    def read(self, index: int, generator: torch.Generator) -> tuple[Tensor, int]:
        x, (height, width) = self.x[index], self.x.shape[2:]
        if self.transforms == "STANDARD":
            top, left = torch.randint(9, (2,), generator=generator).tolist()
            x = torch.nn.functional.pad(x, (4, 4, 4, 4))[:, top : top + height, left : left + width]
            x = x.flip(2) if float(torch.rand((), generator=generator)) < 0.5 else x
        return x, int(self.y[index])

    def digest(self) -> str:
        return hashlib.sha256(self.x.numpy().tobytes() + self.y.numpy().tobytes()).hexdigest()[:16]


@dataclass
class _SeededImages(Dataset[Any]):
    """Images by (epoch, index), with a random generator for each."""

    images: Images
    seed: int

    def __getitem__(self, at: tuple[int, int]) -> Any:
        digest = hashlib.sha256(f"{self.seed}:{at[0]}:{at[1]}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return at[1], self.images.read(at[1], generator)


def _collate(read: list[tuple[int, tuple[Tensor, int] | None]]) -> tuple[Tensor, Tensor, list[int]]:
    """Return a batch of the readable images, and the indices of the others."""
    good, lost = [r for _, r in read if r is not None], [k for k, r in read if r is None]
    if not good:
        return torch.empty(0), torch.empty(0, dtype=torch.long), lost
    return torch.stack([x for x, _ in good]), torch.tensor([y for _, y in good]), lost


@dataclass
class Reader:
    """Batches of one half of a data set.

    Args:
        rank, world: index of this process and number of processes, which share every batch.
    """

    images: Images
    config: Data
    seed: int
    rank: int = 0
    world: int = 1
    unreadable: set[int] = field(default_factory=set, init=False)  #: indices of images, over all epochs

    def batches(self, epoch: int, *, shuffled: bool, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch from batch `first`: images [N, C, H, W], classes [N].

        A shuffled epoch omits the last incomplete batch.

        Raises:
            DataError: too many images cannot be read, or no image of a shuffled batch.
        """
        n, size = len(self.images), self.config.batch_size
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(n, generator=generator) if shuffled else torch.arange(n)
        parts = [p[self.rank :: self.world] for p in order.split(size * self.world)]
        parts = [p for p in parts[first:] if len(p) == size or not shuffled]
        keys = [[(epoch, int(i)) for i in part] for part in parts]
        loader = DataLoader(
            _SeededImages(self.images, self.seed),
            batch_sampler=keys,
            num_workers=self.config.num_workers,
            collate_fn=_collate,
            generator=torch.Generator(),
        )
        for x, y, lost in loader:
            self.unreadable.update(lost)
            if len(self.unreadable) > self.config.corrupted * n:
                allowed = f"{self.config.corrupted:.1%} of {n} (data.corrupted)"
                raise DataError("Too many images cannot be read", got=len(self.unreadable), allowed=allowed)
            if shuffled and not len(y):
                hint = "remove them, or use a larger data.batch_size"
                raise DataError("No image of a batch can be read", got=f"images {lost[:4]}", hint=hint)
            if len(y):
                yield x, y

    def lost(self) -> set[int]:
        """Return the indices of unreadable images of all processes; a collective call."""
        if self.world > 1:
            gathered: list[Any] = [None] * self.world
            dist.all_gather_object(gathered, self.unreadable)
            self.unreadable.update(*gathered)
        return self.unreadable

    def steps(self) -> int:
        """Return the number of batches of a shuffled epoch."""
        return len(self.images) // (self.config.batch_size * self.world)


def load(config: Data) -> Sets:
    """Load the data set that a configuration names.

    Raises:
        UnknownNameError: there is no data set of that name.
        DataError: a folder is missing, or has another content.
    """
    own = ":" in config.type
    make = partial(import_by_name(config.type, "data set", DataError) if own else lookup("data", config.type), config)
    sets: Sets = call_factory(make, config.type, "data set", DataError) if own else make()
    for half, images in (("train", sets.train), ("test", sets.test)):
        if not len(images):
            raise DataError(f"The {half} half of '{config.type}' has no images", where=str(config.root or ""))
    return sets


@register("data", "procedural")
def procedural(config: Data) -> Sets:
    """Return images of 32 x 32 pixels of 20 classes, 2,000 in each half unless configured."""
    train, test = (split.images or 2000 for split in (config.train, config.test))
    return Sets(Tensors(*drawn_images(train, 1000)), Tensors(*drawn_images(test, 1)), CLASSES)


@register("data", "digits")
def digits(config: Data) -> Sets:
    """Return scikit-learn's 1,797 gray digits as [N, 3, 8, 8] in 0..1, 10 classes; every fourth is a test image."""
    x, y = import_optional("sklearn.datasets", "This data set", DataError, extra="demo").load_digits(return_X_y=True)
    pixels = torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8).repeat(1, 3, 1, 1)
    classes = torch.tensor(y)
    held = torch.arange(len(classes)) % 4 == 3
    halves = (~held, config.train), (held, config.test)
    train, test = (Tensors(pixels[k][: split.images], classes[k][: split.images]) for k, split in halves)
    return Sets(train, test, 10)
