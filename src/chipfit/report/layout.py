"""Places for the boxes of a layered graph drawing, and ways for its lines.

Ranks by the longest path, order within ranks by barycentres, and positions that are nearest to those of the neighbours
in least squares: Sugiyama, Tagawa, Toda 1981, doi:10.1109/TSMC.1981.4308636.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

#: distance between boxes of a rank, between ranks, and between lines that pass a rank
GAP, RISE, LANE = 18.0, 34.0, 12.0
#: passes over all ranks, down and up, that order and then place the boxes
ORDERINGS, PLACINGS = 6, 10


@dataclass
class _Cell:
    """A box, or the place where a line passes a rank."""

    rank: int
    width: float
    before: list[int] = field(default_factory=list)  #: cells of the rank above that it is joined to
    after: list[int] = field(default_factory=list)
    x: float = 0.0  #: centre


@dataclass(frozen=True)
class Layout:
    """A drawing without its text."""

    width: float
    height: float
    boxes: tuple[tuple[float, float], ...]  #: left and top of each box
    lines: Mapping[tuple[int, int], tuple[tuple[float, float], ...]]  #: (source, target) -> points from box to box


def place(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Layout:
    """Return places for boxes, so that lines go down and are short.

    Args:
        sizes: width and height of each box, in an order in which every edge goes forward.
        edges: (source, target), by position; others than forward ones are left out.
    """
    forward = sorted({(a, b) for a, b in edges if a < b})
    ranks = [0] * len(sizes)
    for a, b in sorted(forward, key=lambda e: e[1]):
        ranks[b] = max(ranks[b], ranks[a] + 1)
    cells = [_Cell(rank, width) for rank, (width, _) in zip(ranks, sizes, strict=True)]
    lanes = dict[tuple[int, int], int]()
    ways = {edge: _way(cells, lanes, *edge) for edge in forward}
    rows: list[list[int]] = [[] for _ in range(max(ranks, default=0) + 1)]
    for k, c in enumerate(cells):
        rows[c.rank].append(k)
    _order(cells, rows)
    _spread(cells, rows)
    left = min((c.x - c.width / 2 for c in cells), default=0.0)
    heights = [max((sizes[k][1] for k in row if k < len(sizes)), default=0.0) for row in rows]
    tops = [sum(heights[:r]) + RISE * r for r in range(len(rows))]
    xs = [c.x - left for c in cells]

    def line(way: list[int]) -> tuple[tuple[float, float], ...]:
        inner = [
            (xs[k], y) for k in way[1:-1] for y in (tops[cells[k].rank], tops[cells[k].rank] + heights[cells[k].rank])
        ]
        a, b = way[0], way[-1]
        return (xs[a], tops[ranks[a]] + sizes[a][1]), *inner, (xs[b], tops[ranks[b]])

    boxes = tuple((xs[k] - w / 2, tops[ranks[k]]) for k, (w, _) in enumerate(sizes))
    width = max((x + c.width / 2 for x, c in zip(xs, cells, strict=True)), default=0.0)
    height = tops[-1] + heights[-1]
    return Layout(width, height, boxes, {edge: line(way) for edge, way in ways.items()})


def _way(cells: list[_Cell], lanes: dict[tuple[int, int], int], a: int, b: int) -> list[int]:
    """Return the cells that a line passes, and join them; the lines of one source share their cells."""
    way = [a]
    for rank in range(cells[a].rank + 1, cells[b].rank):
        if (a, rank) not in lanes:
            lanes[a, rank] = len(cells)
            cells.append(_Cell(rank, LANE))
            _join(cells, way[-1], lanes[a, rank])
        way.append(lanes[a, rank])
    _join(cells, way[-1], b)
    return [*way, b]


def _join(cells: list[_Cell], a: int, b: int) -> None:
    cells[a].after.append(b)
    cells[b].before.append(a)


def _order(cells: list[_Cell], rows: list[list[int]]) -> None:
    """Sort each rank by the mean place of its neighbours, down and up, so that few lines cross."""
    for turn in range(ORDERINGS):
        place = {k: i / max(len(row) - 1, 1) for row in rows for i, k in enumerate(row)}
        for row in rows if turn % 2 == 0 else reversed(rows):
            near = {k: (cells[k].before if turn % 2 == 0 else cells[k].after) for k in row}
            mean = {k: sum(place[n] for n in near[k]) / len(near[k]) if near[k] else place[k] for k in row}
            row.sort(key=lambda k: mean[k])
            place |= {k: i / max(len(row) - 1, 1) for i, k in enumerate(row)}


def _spread(cells: list[_Cell], rows: list[list[int]]) -> None:
    """Place each rank as near to its neighbours as widths allow, down and up."""
    for row in rows:
        _settle(cells, row, [0.0] * len(row))
    for turn in range(PLACINGS):
        for row in rows if turn % 2 == 0 else reversed(rows):
            near = [(cells[k].before if turn % 2 == 0 else cells[k].after) or [k] for k in row]
            _settle(cells, row, [sum(cells[n].x for n in around) / len(around) for around in near])


def _settle(cells: list[_Cell], row: list[int], wanted: list[float]) -> None:
    """Place the cells of a rank nearest to the wanted centres, in least squares, without overlap.

    With the least distances taken off, centres must not decrease: isotonic regression, by pooling adjacent violators.
    """
    offsets = [0.0]
    for a, b in pairwise(row):
        offsets.append(offsets[-1] + (cells[a].width + cells[b].width) / 2 + GAP)
    pools: list[list[float]] = []  # sum and count of each
    for want, offset in zip(wanted, offsets, strict=True):
        pools.append([want - offset, 1.0])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] >= pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + count]
    centres = [total / count for total, count in pools for _ in range(int(count))]
    for k, centre, offset in zip(row, centres, offsets, strict=True):
        cells[k].x = centre + offset
