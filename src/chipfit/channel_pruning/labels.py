"""Sets of channels that can only be removed together, as a forest of labels."""

from collections.abc import Iterable

import torch
from torch import Tensor

#: label of what must stay
FIXED = 0


class Labels:
    """Labels of channels; labels that are tied stand for one unit, which stays or is removed as a whole."""

    def __init__(self) -> None:
        self._parent = [FIXED]
        self._fixed = {FIXED: ""}  #: root -> why its channels must stay
        self._table: Tensor | None = None  #: root of each label, until something changes

    def new(self, count: int) -> Tensor:
        """Return new labels, [count] int64."""
        first, self._table = len(self._parent), None
        self._parent += range(first, first + count)
        return torch.arange(first, first + count)

    def root(self, label: int) -> int:
        """Return the label that stands for all that are tied to this one; `FIXED` if one of them must stay."""
        root = self._root(label)
        return FIXED if root in self._fixed else root

    def _root(self, label: int) -> int:
        root = label
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[label] != root:
            self._parent[label], label = root, self._parent[label]
        return root

    def roots(self, labels: Tensor) -> Tensor:
        """Return the root of each label, in the shape of `labels`."""
        if self._table is None:
            self._table = torch.tensor([self.root(k) for k in range(len(self._parent))], dtype=torch.int64)
        return self._table[labels]

    def tie(self, first: Iterable[int], second: Iterable[int], why: str = "") -> None:
        """Tie labels pairwise; `why` is the reason for those that are tied to `FIXED`."""
        for a, b in zip(first, second, strict=True):
            if FIXED in (a, b):
                self._fix(max(a, b), why)
                continue
            low, high = sorted((self._root(a), self._root(b)))
            if low == high:
                continue
            self._parent[high], self._table = low, None
            if high in self._fixed:
                self._fixed.setdefault(low, self._fixed.pop(high))

    def fix(self, labels: Tensor, why: str) -> None:
        """Let the channels of these labels stay."""
        for label in labels.unique().tolist():
            self._fix(label, why)

    def _fix(self, label: int, why: str) -> None:
        self._fixed.setdefault(self._root(label), why)
        self._table = None

    def why_fixed(self, labels: Tensor) -> str:
        """Return why some of these channels must stay; "" if none must."""
        roots = {self._root(k) for k in labels.unique().tolist()}
        return next((why for root, why in self._fixed.items() if root in roots and why), "")
