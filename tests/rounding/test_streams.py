"""Values of images on their way: which are kept in codes, in half precision, or as they are."""

import pytest
import torch

from chipfit.calibration.source import MemoryLimit
from chipfit.graph.ir import Graph, Value
from chipfit.plan.record import Plan
from chipfit.rounding import streams
from chipfit.rounding.streams import SampleStreams, Stream
from tests.build import grid, stored


def graph(*shapes):
    values = {f"i{k}": Value(f"i{k}", shape) for k, shape in enumerate(shapes)}
    return Graph([], list(values), [], values, {})


def chunks(graph, batch):
    return list(SampleStreams(Plan()).read_inputs(graph, [batch]))


def stream_of(s, *values):
    stream = Stream(MemoryLimit(), s)
    for x in values:
        stream.append(x)
    return stream


ONE = stored(0.5, 3, signed=False)
EACH = stored([0.5, 0.25], 3, signed=False, axis=1)
#: a table without 0
TABLE = stored(1.0, on=grid(1, kind="lut", table=(-1.0, 1.0)))
OPEN, FIXED = (None, 3), (70, 3)


@pytest.mark.parametrize(
    ("sizes", "shapes", "parts"),
    [([70], [OPEN], [32, 32, 6]), ([70, 70], [OPEN, OPEN], [32, 32, 6]), ([70, 70], [OPEN, FIXED], [70])],
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


@pytest.mark.parametrize(
    ("x", "half"),
    [
        (torch.full((4, 5), 29999.5), True),
        (torch.full((4, 5), 3e4), False),
        (torch.full((4, 5), -3e4), False),
        (torch.full((4, 5), 1.0, dtype=torch.float64), False),
        (torch.zeros(0, 5), False),
    ],
)
def test_moderate_numbers_are_kept_in_half_precision(x, half):
    stream = stream_of(None, x)
    assert (stream.chunks[0].dtype is torch.float16) is half
    assert stream[0].dtype is (torch.float32 if half else x.dtype) and torch.allclose(stream[0], x, rtol=1e-3)


@pytest.mark.parametrize("expected, numbers, half", [(2, 10, False), (2, 11, True), (None, 1, True), (1, 20, False)])
def test_few_numbers_of_all_images_are_kept_as_they_are(expected, numbers, half, monkeypatch):
    monkeypatch.setattr(streams, "SMALL", 20)
    stream = Stream(MemoryLimit(), expected=expected)
    stream.append(torch.ones(numbers))
    assert (stream.chunks[0].dtype is torch.float16) is half


def test_values_that_are_no_float_tensors_are_kept_as_they_are():
    items = [torch.arange(3), 7, (1, 2)]
    stream = stream_of(ONE, *items)
    assert stream.chunks[0] is items[0] and list(stream_of(None, *items)) == items


def test_images_stay_in_channels_last_and_others_become_contiguous():
    last = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    a, b, c = stream_of(ONE, last, torch.randn(2, 3, 4, 5), torch.randn(4, 3, 2).transpose(0, 2)).chunks
    assert a.is_contiguous(memory_format=torch.channels_last) and not a.is_contiguous()
    assert b.is_contiguous() and c.is_contiguous()


@pytest.mark.parametrize("s", [ONE, EACH, TABLE, None])
def test_a_part_is_picked_before_it_is_decoded_with_the_code_of_zero_around(s):
    def pick(x, zero):
        seen.append((x.dtype, zero))
        return torch.cat([x[:, :1], x.new_full((len(x), 1), zero)], 1)

    seen, stream = [], stream_of(s, torch.tensor([[1.0, 9.0], [2.5, 9.0]]))
    part = stream.part(0, pick)
    assert torch.equal(part, pick(stream[0], 0.0)) and part[:, 1].tolist() == [0, 0] and part.dtype is torch.float32
    assert s is not ONE or (seen[0] == (torch.uint8, 3.0) and part.tolist() == [[1, 0], [2.5, 0]])


@pytest.mark.parametrize(
    "s, values, used",
    [(None, [torch.ones(10).double(), torch.arange(8)], 80), (ONE, [torch.ones(10)], 10)],  # integers never count
)
def test_freed_values_are_no_longer_counted(s, values, used):
    stream = stream_of(s, *values)
    assert stream.memory.used == used
    stream.free()
    assert stream.memory.used == 0 and stream.chunks == []


def test_values_beyond_the_limit_lie_on_disk():
    memory = MemoryLimit(16)  # in half precision, four numbers take 8 bytes
    stream = Stream(memory)
    for _ in range(3):
        stream.append(torch.arange(4.0))
    assert memory.used == 16 and memory.spilled == 8 and torch.equal(stream[2], torch.arange(4.0))
