"""Values of images on their way: which are kept in codes, in half precision, or as they are."""

from __future__ import annotations

import pytest
import torch

from chipfit.calibration.batch_cache import MemoryLimit
from chipfit.graph.ir import Graph, Value
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.rounding import streams
from chipfit.rounding.streams import Stream, chunks, is_elementwise


def graph(*shapes):
    values = {f"i{k}": Value(f"i{k}", shape, "float32") for k, shape in enumerate(shapes)}
    return Graph([], list(values), [], values, {})


OPEN, FIXED = (None, 3), (70, 3)


@pytest.mark.parametrize(
    ("sizes", "shapes", "parts"),
    [
        ([31], [OPEN], [31]),
        ([32], [OPEN], [32]),
        ([70], [OPEN], [32, 32, 6]),
        ([70, 70], [OPEN, OPEN], [32, 32, 6]),
        ([70], [FIXED], [70]),
        ([70, 70], [OPEN, FIXED], [70]),
        ([70, 1], [OPEN, OPEN], [70]),
    ],
)
def test_a_batch_goes_in_parts_where_all_inputs_agree_on_its_size(sizes, shapes, parts):
    batch = [torch.randn(n, 3) for n in sizes]
    found = chunks(graph(*shapes), batch)
    assert [len(part[0]) for part in found] == parts and all(len(part) == len(sizes) for part in found)
    assert all(torch.equal(torch.cat([part[k] for part in found]), x) for k, x in enumerate(batch))


def test_single_numbers_and_empty_batches_stay_whole():
    for batch in ([torch.tensor(1.0)], [torch.zeros(0, 3)], [torch.randn(70, 3), torch.tensor(1.0)]):
        found = chunks(graph(*[OPEN] * len(batch)), batch)
        assert len(found) == 1 and all(a is b for a, b in zip(found[0], batch, strict=True))


def stored(scale=0.5, zero=3, **grid):
    g = Grid(**{"bits": 8, "qmin": 0, "qmax": 255, "zero": "any", **grid})
    s = torch.tensor(scale)
    return Stored(format="a8", grid=g, scale=s, zero_point=torch.full_like(s, zero, dtype=torch.int32), axis=1)


def test_codes_are_alike_everywhere_where_one_scale_and_zero_serve_all():
    assert is_elementwise(stored()) and not is_elementwise(stored([0.5, 0.5]))
    table = Grid(bits=1, qmin=0, qmax=1, kind="lut", table=(-1.0, 1.0))  # without zero
    assert not is_elementwise(Stored(format="t", grid=table, scale=torch.tensor(1.0), zero_point=torch.tensor(0).int()))


@pytest.mark.parametrize(
    ("x", "half"),
    [
        (torch.full((4, 5), 29999.5), True),
        (torch.full((4, 5), 3e4), False),
        (torch.full((4, 5), -29999.5), True),
        (torch.full((4, 5), -3e4), False),
        (torch.full((4, 5), 1.0, dtype=torch.float64), False),
        (torch.zeros(0, 5), False),
    ],
)
def test_moderate_numbers_are_kept_in_half_precision(x, half):
    stream = Stream(MemoryLimit())
    stream.append(x)
    assert (stream.chunks[0].dtype is torch.float16) is half
    assert stream[0].dtype is (torch.float32 if half else x.dtype) and torch.allclose(stream[0], x, rtol=1e-3)


@pytest.mark.parametrize("expected, numbers, half", [(2, 10, False), (2, 11, True), (None, 1, True), (1, 20, False)])
def test_few_numbers_of_all_images_are_kept_as_they_are(expected, numbers, half, monkeypatch):
    assert streams.SMALL == 1 << 24
    monkeypatch.setattr(streams, "SMALL", 20)
    stream = Stream(MemoryLimit(), expected=expected)
    stream.append(torch.ones(numbers))
    assert (stream.chunks[0].dtype is torch.float16) is half


def test_what_is_no_float_tensor_is_kept_as_it_is():
    stream, x = Stream(MemoryLimit(), stored()), torch.arange(3)
    for item in (x, 7, (1, 2)):
        stream.append(item)
    assert stream.chunks[0] is x and list(Stream(MemoryLimit(), chunks=[x, 7, (1, 2)])) == [x, 7, (1, 2)]


def test_images_stay_in_channels_last_and_others_become_contiguous():
    stream = Stream(MemoryLimit(), stored())
    last = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for x in (last, torch.randn(2, 3, 4, 5), torch.randn(4, 3, 2).transpose(0, 2)):
        stream.append(x)
    assert stream.chunks[0].is_contiguous(memory_format=torch.channels_last) and not stream.chunks[0].is_contiguous()
    assert stream.chunks[1].is_contiguous() and stream.chunks[2].is_contiguous()


def test_a_part_is_picked_of_codes_with_the_code_of_zero_around():
    def pick(x, zero):
        return torch.cat([x[:, :1], x.new_full((len(x), 1), zero)], 1)

    x = torch.tensor([[1.0, 9.0], [2.5, 9.0]])
    for s in (stored(), stored([0.5, 0.25]), None):
        stream = Stream(MemoryLimit(), s)
        stream.append(x)
        assert stream.part(0, pick).tolist() == [[1, 0], [2.5, 0]] and stream.part(0, pick).dtype is torch.float32
    stream = Stream(MemoryLimit(), stored())
    stream.append(x)
    seen = []
    stream.part(0, lambda x, zero: seen.append((x.dtype, zero)) or x)
    assert seen == [(torch.uint8, 3.0)]


def test_what_is_freed_is_no_longer_counted():
    budget, kept = MemoryLimit(), torch.arange(8)
    for s in (None, stored()):
        stream = Stream(budget, s)
        stream.append(torch.ones(10, dtype=torch.float64 if s is None else torch.float32))
        if s is None:
            stream.append(kept)  # integers were never counted
        assert budget.used == (80 if s is None else 10)
        stream.free()
        assert budget.used == 0 and stream.chunks == []
