"""Decomposition of GridSample: pixels around each place, gathered and weighed.

Source: Jaderberg et al. 2015, Spatial Transformer Networks (arXiv 1506.02025), equation 5, with the borders of
PyTorch's `grid_sample`.
"""

from typing import NamedTuple

from chipfit.graph.ir import Node
from chipfit.passes.new_nodes import NewNodes
from chipfit.passes.rounded import ROUNDINGS


class _Pixel(NamedTuple):
    """The nearest pixels of all places along one axis, and their shares of the result; None for whole ones."""

    at: str
    share: str | None


def grid_sample(new: NewNodes, n: Node) -> str:
    """Return the sum of the four pixels around each place by their distance, or the nearest one."""
    x, grid = n.inputs[0] or "", n.inputs[1] or ""
    new.require(len(new.shape(x)) == 4, "it samples volumes")
    simple = n.attrs["mode"] != "bicubic" and n.attrs["padding_mode"] != "reflection"
    new.require(simple, "its pixels are weighed by cubic curves, or reflected at the border")
    (channels, height, width), (rows, columns, _) = new.sizes(x), new.sizes(grid)
    samples, places = new.shape(x)[0], rows * columns
    across, down = (_pixels(new, n, grid, k, size, places) for k, size in enumerate((width, height)))
    pixels = new.reshape(x, (samples, channels, height * width))
    found = list[str]()
    for v in down:
        for h in across:
            index = new("Add", new("Mul", v.at, float(width)), h.at)
            index = new("Cast", index, gives=new.shape(index), dtype="int32")
            wide = (samples, channels, places)
            index = new("Expand", index, gives=wide, shape=(-1, channels, places))
            pixel = new("GatherElements", pixels, index, gives=wide, axis=2)
            for share in (v.share, h.share):
                pixel = pixel if share is None else new("Mul", pixel, share)
            found.append(pixel)
    y = found[0]
    for pixel in found[1:]:
        y = new("Add", y, pixel)
    return new.reshape(y, (samples, channels, rows, columns))


def _pixels(new: NewNodes, n: Node, grid: str, axis: int, size: int, places: int) -> list[_Pixel]:
    """Return the pixels along one axis that each place of the grid, from -1 to 1, lies between."""
    last, column = size - 1.0, (new.shape(grid)[0], 1, places)
    place = new("Slice", grid, gives=(*new.shape(grid)[:3], 1), axis=3, start=axis, end=axis + 1, step=1)
    place = new.reshape(place, column)
    by = last / 2 if n.attrs["align_corners"] else size / 2
    place = new("Add", new("Mul", place, by), last / 2)
    if n.attrs["padding_mode"] == "border":
        place = new("Clamp", place, min=0.0, max=last)
    if n.attrs["mode"] == "nearest":
        return [_inside(new, n, new.formula(ROUNDINGS["half_even"], x=place), None, last)]
    low = new.formula(ROUNDINGS["floor"], x=place)
    share = new("Sub", place, low)
    return [_inside(new, n, low, new("Sub", 1.0, share), last), _inside(new, n, new("Add", low, 1.0), share, last)]


def _inside(new: NewNodes, n: Node, index: str, share: str | None, last: float) -> _Pixel:
    """Return a pixel of the image; one outside of it has no share where zeros surround the image."""
    inside = new("Clamp", index, min=0.0, max=last)
    if n.attrs["padding_mode"] == "zeros":
        share = new("Where", new("Equal", inside, index), 1.0 if share is None else share, 0.0, gives=new.shape(index))
    return _Pixel(inside, share)
