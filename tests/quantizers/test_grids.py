"""Rounding to a grid: numbers that anyone can check."""

import numpy as np
import pytest
import torch

from chipfit.quantizers.grids import Grid, all_codes, dequantize, fake_quantize, in_blocks, quantize, shape_for
from chipfit.quantizers.rounding import round_by_rule
from tests.build import randn

U4 = Grid(bits=4, qmin=0, qmax=15, zero="any")
X = torch.tensor([-9.0, -1.5, -0.75, -0.25, 0.0, 0.25, 0.75, 1.25, 3.0, 99.0])


def test_codes_count_from_the_zero_point_and_stop_at_the_ends():
    """x / 0.5 = -18, -3, -1.5, -0.5, 0, 0.5, 1.5, 2.5, 6, 198; halves to even; plus 5; within 0..15."""
    q = quantize(X, torch.tensor(0.5), torch.tensor(5), U4)
    assert q.tolist() == [0, 2, 3, 5, 5, 5, 7, 7, 11, 15] and q.dtype == torch.int8


@pytest.mark.parametrize("rounding", ["half_even", "floor"])
def test_large_tensors_are_rounded_part_by_part_wherever_their_numbers_lie(rounding, monkeypatch):
    """Twenty-four numbers, five at a time; with gaps and repetitions in memory, all at once."""
    x, s, z = torch.linspace(-40, 80, 48).reshape(2, 4, 6), torch.tensor([0.7]), torch.tensor([5])
    grid = Grid(bits=8, qmin=0, qmax=100, zero="any", rounding=rounding)
    monkeypatch.setattr("chipfit.quantizers.grids.AT_ONCE", 5)
    parted: list = []
    monkeypatch.setattr(
        "chipfit.quantizers.grids.round_by_rule", lambda v, rule: parted.append(v.numel()) or round_by_rule(v, rule)
    )
    lie = [x[0].t(), x[1:], x.permute(2, 0, 1), x[:, 0].t(), x[..., ::2], x[:1, :1].expand(3, 2, 6)]
    for given in lie:
        steps = (np.rint if rounding == "half_even" else np.floor)((given / s).numpy())
        want = np.clip(steps + 5, 0, 100).flatten().tolist()
        codes = quantize(given, s, z, grid)
        assert codes.dtype == torch.int8 and codes.shape == given.shape and codes.flatten().tolist() == want
    assert parted == 2 * ([5] * 4 + [4]) + [5] * 9 + [3] + [12] + [24] + [36]


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_scales_run_along_the_axis_that_is_named(axis):
    """Against numpy, on a cube, where a wrong axis fits as well."""
    x = torch.randn(3, 3, 3) * 8
    s, z = torch.tensor([0.25, 1.0, 2.0]), torch.tensor([3, 8, 12], dtype=torch.int32)
    shape = [-1 if k == axis % 3 else 1 for k in range(3)]
    sn, zn = s.numpy().reshape(shape), z.numpy().reshape(shape)
    want = np.clip(np.rint(x.numpy() / sn) + zn, 0, 15)
    q = quantize(x, s, z, U4, axis)
    np.testing.assert_array_equal(q.numpy(), want)
    np.testing.assert_array_equal(dequantize(q, s, z, axis).numpy(), ((want - zn) * sn).astype("float32"))
    np.testing.assert_array_equal(fake_quantize(x, s, z, U4, axis).numpy(), ((want - zn) * sn).astype("float32"))


@pytest.mark.parametrize(
    "ends, kind",
    [
        ((-128, 127), torch.int8),
        ((0, 255), torch.uint8),
        ((-127, 127), torch.int8),
        ((0, 127), torch.int8),
        ((-32768, 32767), torch.int16),
        ((0, 65535), torch.int32),
        ((-(2**31), 2**31 - 1), torch.int32),
        ((-(2**39), 2**39 - 1), torch.int64),
    ],
)
def test_codes_are_kept_in_the_smallest_type_that_holds_them(ends, kind):
    assert Grid(bits=8, qmin=ends[0], qmax=ends[1]).dtype is kind


def test_what_a_grid_says_of_itself():
    assert U4.levels == 16 and not U4.signed and not U4.symmetric and U4.nearest
    narrow = Grid(bits=8, qmin=-127, qmax=127, rounding="trunc")
    assert narrow.levels == 255 and narrow.signed and narrow.symmetric and not narrow.nearest
    table = Grid(bits=4, qmin=0, qmax=2, kind="lut", table=(-1.0, 0.0, 4.0))
    assert table.levels == 3 and table.dtype is torch.uint8 and not table.nearest


def test_the_ends_of_a_grid_are_codes_unless_its_levels_are_offsets():
    """A table of codes, as of look-up weights, keeps the ends of its codes; one of offsets ends where its levels do."""
    lut = Grid(bits=4, qmin=-128, qmax=127, kind="lut", table=(-100.0, 0.0, 50.0))
    offset = Grid(bits=2, qmin=0, qmax=3, kind="offset", table=(-1.5, -0.5, 0.5, 1.5))
    assert lut.ends == (-128, 127) and offset.ends == (-1.5, 1.5) and U4.ends == (0, 15)


@pytest.mark.parametrize("bits, signed, ends", [(8, True, (-128, 127)), (4, False, (0, 15)), (1, True, (-1, 0))])
def test_codes_of_so_many_bits(bits, signed, ends):
    assert all_codes(bits, signed) == ends


@pytest.mark.parametrize("bits, width", [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32)])
def test_files_hold_codes_in_the_next_integer_type(bits, width):
    grid = Grid(bits=bits, qmin=0, qmax=1)
    assert grid.file_bits == width and grid.file_ends == (0, 2**width - 1)
    assert Grid(bits=bits, qmin=-1, qmax=1).file_ends == (-(2 ** (width - 1)), 2 ** (width - 1) - 1)


@pytest.mark.parametrize(
    "entries, bits, kind",
    [(256, 8, torch.uint8), (257, 8, torch.int32), (None, 8, torch.uint8), (None, 9, torch.int32)],
)
def test_indices_into_tables_are_bytes_where_they_can_be(entries, bits, kind):
    table = None if entries is None else tuple(float(k) for k in range(entries))
    assert Grid(bits=bits, qmin=0, qmax=1, kind="lut", table=table).dtype is kind


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_blocks_lie_along_any_axis(axis):
    x = torch.arange(4 * 6 * 8).view(4, 6, 8)
    found = in_blocks(x, axis, 2)
    moved = np.moveaxis(x.numpy(), axis, -1)
    np.testing.assert_array_equal(found, moved.reshape(*moved.shape[:2], -1, 2))


def test_scales_of_blocks_stand_for_as_many_numbers_as_a_block_has():
    x = torch.zeros(2, 6, 4)
    p = torch.arange(16.0).view(2, 2, 4)
    np.testing.assert_array_equal(shape_for(p, x, 1), np.repeat(p.numpy(), 3, 1))
    assert shape_for(torch.ones(4), x, -1).shape == (1, 1, 4) and shape_for(torch.ones(2), x, 0).shape == (2, 1, 1)
    single, each = torch.tensor(1.0), torch.ones(3)
    assert shape_for(single, x, 0) is single and shape_for(each, x, None) is each


def test_values_on_a_border_take_the_lower_entry_and_logarithms_have_their_own_borders():
    table = (-4.0, -1.0, 0.0, 1.0, 4.0)
    line, log = (Grid(bits=3, qmin=0, qmax=4, kind=kind, table=table) for kind in ("float", "log"))
    x = torch.tensor([-2.5, -2.2, 0.5, 2.0, 2.2, 2.5])
    assert quantize(x, torch.tensor(1.0), torch.tensor(0), line).tolist() == [0, 1, 2, 3, 3, 3]
    assert quantize(x, torch.tensor(1.0), torch.tensor(0), log).tolist() == [0, 0, 2, 3, 4, 4]
    assert fake_quantize(2 * x, torch.tensor(2.0), torch.tensor(0), log).tolist() == [-8, -8, 0, 2, 8, 8]


def test_codes_and_floats_are_those_of_onnx_runtime():
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    x = torch.cat([randn(5000) * 3, torch.arange(-300, 300) * 0.05])
    s, z, grid = torch.tensor(0.05), torch.tensor(117), Grid(bits=8, qmin=0, qmax=255, zero="any")
    h, array = onnx.helper, onnx.numpy_helper.from_array
    nodes = [h.make_node("QuantizeLinear", [*"xsz"], ["q"]), h.make_node("DequantizeLinear", [*"qsz"], ["y"])]
    outputs = [h.make_tensor_value_info(name, kind, ["n"]) for name, kind in (("q", 2), ("y", 1))]
    numbers = [array(s.numpy(), "s"), array(z.numpy().astype("uint8"), "z")]
    graph = h.make_graph(nodes, "g", [h.make_tensor_value_info("x", 1, ["n"])], outputs, numbers)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 13)], ir_version=8)
    q, y = map(torch.from_numpy, ort.InferenceSession(model.SerializeToString()).run(None, {"x": x.numpy()}))
    assert torch.equal(quantize(x, s, z, grid), q)
    assert torch.equal(dequantize(q, s, z), y) and torch.equal(fake_quantize(x, s, z, grid), y)
