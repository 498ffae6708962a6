"""Range rules and grids against worked numbers; (n) is the number of the assertion in the list that users of
MCT know. Results of a search are compared by the error that they achieve: never worse than the value given."""

from __future__ import annotations

import itertools

import pytest
import torch

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.histogram import Histogram, without_outliers
from chipfit.quantizers.grids import Grid, dequantize, fake_quantize, quantize
from chipfit.ranges import choose
from chipfit.ranges.qparams import from_min_max
from chipfit.registry import lookup, registered

Z = torch.tensor(0)


def signed(bits, pot=False):
    return Grid(bits=bits, qmin=-(1 << bits - 1), qmax=(1 << bits - 1) - 1, pot=pot)


def unsigned(bits, pot=False):
    return Grid(bits=bits, qmin=0, qmax=(1 << bits) - 1, pot=pot)


def affine(bits):
    return Grid(bits=bits, qmin=0, qmax=(1 << bits) - 1, zero="any")


def threshold(q, grid):
    """Half range of a symmetric grid: scale times 2^(bits - 1), or 2^bits without sign."""
    return float(q.scale.max()) * (-grid.qmin if grid.signed else grid.qmax + 1)


def error(x, q, grid, p=2, axis=None):
    return float((x - fake_quantize(x, q.scale, q.zero_point, grid, axis)).abs().pow(p).mean())


def at(x, t, grid, p=2):
    """Error of a symmetric grid with threshold t."""
    s = torch.tensor(t / (-grid.qmin if grid.signed else grid.qmax + 1), dtype=torch.float32)
    return float((x - fake_quantize(x, s, Z, grid)).abs().pow(p).mean())


# ---------------------------------------------------------------- grids


def test_26_signed_codes_round_halves_to_even():
    x = torch.tensor([-3, -1.26, -0.5, -0.1, 0.124, 0.125, 0.126, 0.375, 0.625, 0.9, 2])
    want = [-1, -1, -0.5, 0, 0, 0, 0.25, 0.5, 0.5, 0.75, 0.75]
    assert fake_quantize(x, torch.tensor(0.25), Z, signed(3)).tolist() == want


def test_27_unsigned_codes_clip_negatives_to_zero():
    x = torch.tensor([0.125, 0.625, 0.9, 2, -1])
    assert fake_quantize(x, torch.tensor(0.125), Z, unsigned(3)).tolist() == [0.125, 0.625, 0.875, 0.875, 0]


def test_28_weights_take_at_most_as_many_values_as_there_are_codes():
    x = torch.randn(50, 4) * 4
    y = fake_quantize(x, torch.tensor(1.0), Z, signed(3))
    assert torch.equal(y, x.round().clamp(-4, 3)) and len(y.unique()) <= 8
    t = torch.tensor([3.0, 6.0, 2.0])
    w = torch.randn(2, 2, 2, 3) * 5
    y = fake_quantize(w, t / 2, torch.zeros(3), signed(2), axis=3)
    assert torch.equal(y, (w / (t / 2)).round().clamp(-2, 1) * (t / 2))


def test_29_an_affine_grid_has_the_step_of_its_range():
    assert float(from_min_max(-10.0, 4.0, affine(3)).scale) == 2.0
    assert float(from_min_max(-10.0, 5.0, affine(2)).scale) == 5.0
    q = from_min_max(torch.tensor([-10.0, -3, -8, 0]), torch.tensor([4.0, 4, 20, 7]), affine(3))
    assert q.scale.tolist() == pytest.approx([2, 1, 4, 1])


@pytest.mark.parametrize(
    ("low", "high", "bits"),
    [(-1, 1, 2), (-1, 2, 3), (0.5, 2, 3), (-2, -0.5, 3), (-0.1, 1, 4), (-1.3, 2.6, 8), (3, 10, 2)],
)
def test_30_zero_lies_on_every_affine_grid_and_the_range_is_covered_within_half_a_step(low, high, bits):
    grid = affine(bits)
    q = from_min_max(float(low), float(high), grid)
    assert float(fake_quantize(torch.tensor(0.0), q.scale, q.zero_point, grid)) == 0.0
    lo, hi = q.bounds(grid)
    half = float(q.scale) / 2 + 1e-6
    assert lo <= min(low, 0) + half and hi >= max(high, 0) - half


# ---------------------------------------------------------------- thresholds


def test_33_a_known_range_gives_the_smallest_threshold_that_holds_it():
    s = TensorStats("x", -1.0, 9.0, batches=1)
    rule = lookup("range", "no_clipping")(expand=False)
    from chipfit.ranges import _of_stats

    pot, sym = signed(2, pot=True), signed(2)
    assert threshold(rule(_of_stats(s, None), pot), pot) == 16
    assert threshold(rule(_of_stats(s, None), sym), sym) == pytest.approx(9)
    assert choose(s, affine(2), rule="no_clipping").bounds(affine(2)) == pytest.approx((-10 / 3, 20 / 3), abs=3.4)


@pytest.mark.parametrize(("x", "t"), [(0.3, 0.5), (0.5, 0.5), (0.51, 1), (1, 1), (1.0001, 2), (3, 4)])
def test_34_power_of_two_thresholds_round_up(x, t):
    grid = unsigned(8, pot=True)
    rule = lookup("range", "no_clipping")(expand=False)
    from chipfit.ranges import _of_tensor

    assert threshold(rule(_of_tensor(torch.tensor([0.0, x]), None), grid), grid) == t


@pytest.mark.parametrize(("bits", "t"), [(8, 1.007874), (4, 1.142857), (2, 2.0)])
def test_34_the_maximum_gets_a_code_of_its_own(bits, t):
    assert threshold(
        choose(torch.tensor([-0.5, 1.0]), signed(bits), rule="no_clipping"), signed(bits)
    ) == pytest.approx(t, abs=1e-6)


RAMP = torch.linspace(-1, 1, 101)
SPIKE = torch.cat([torch.linspace(-0.5, 0.5, 200), torch.tensor([3.0])])


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_35_a_ramp(bits):
    assert threshold(choose(RAMP, signed(bits, True), rule="no_clipping"), signed(bits, True)) == 2.0
    given = {8: 1.0211, 4: 1.0725, 2: 1.1017}[bits]
    assert error(RAMP, choose(RAMP, signed(bits)), signed(bits)) <= at(RAMP, given, signed(bits)) * 1.02
    assert error(RAMP, choose(RAMP, signed(bits, True)), signed(bits, True)) <= at(RAMP, 1.0, signed(bits))


@pytest.mark.parametrize(("bits", "pot", "sym"), [(8, 4.0, 3.0203), (4, 2.0, 2.9256), (2, 0.5, 0.724)])
def test_36_one_outlier(bits, pot, sym):
    assert error(SPIKE, choose(SPIKE, signed(bits, True)), signed(bits)) <= at(SPIKE, pot, signed(bits)) * 1.0001
    assert error(SPIKE, choose(SPIKE, signed(bits)), signed(bits)) <= at(SPIKE, sym, signed(bits)) * 1.02
    mae = {8: 4.0, 4: 0.5, 2: 0.5}[bits]
    assert (
        error(SPIKE, choose(SPIKE, signed(bits, True), rule="mae"), signed(bits), 1)
        <= at(SPIKE, mae, signed(bits), 1) * 1.0001
    )
    if bits == 2:
        assert error(SPIKE, choose(SPIKE, signed(2)), signed(2)) <= 0.0443


def test_37_each_channel_gets_its_own_threshold_and_a_dead_one_a_tiny_legal_one():
    x = torch.stack([torch.linspace(-1, 1, 27) * f for f in (0.1, 1, 3, 0)]).view(4, 3, 3, 3)
    q = choose(x, signed(8), rule="no_clipping", axis=0)
    assert (q.scale * 128)[:3].tolist() == pytest.approx([0.100787, 1.007874, 3.023622], abs=1e-6)
    assert 0 < float(q.scale[3]) < 1e-6
    p = choose(x, signed(8, True), rule="no_clipping", axis=0)
    assert (p.scale * 128)[:3].tolist() == [0.125, 2, 4]


def test_38_a_decaying_activation():
    edges = torch.linspace(0, 4, 2049)
    counts = torch.round(1e6 * torch.exp(-torch.arange(2048) / 256))
    x = (edges[1:] + edges[:-1]) / 2
    s = TensorStats("x", 0.0, 4.0, batches=1)
    s.histogram = Histogram(reach=4.0)
    s.histogram.counts.index_add_(0, ((x / 4 + 1) * 1024).long(), counts.double())

    def weighted(t, grid, p):
        e = (x - fake_quantize(x, torch.tensor(t / (grid.qmax + 1)), Z, grid)).abs().double().pow(p)
        return float((e * counts).sum() / counts.sum())

    for bits, pot, mae, sym in ((8, 4.0, 4.0, 3.8975), (4, 4.0, 2.0, 3.0592)):
        g = unsigned(bits)
        for rule, p, given, grid in (
            ("mse", 2, pot, unsigned(bits, True)),
            ("mae", 1, mae, unsigned(bits, True)),
            ("mse", 2, sym, g),
        ):
            q = choose(s, grid, rule=rule)
            assert weighted(float(q.scale) * (1 << bits), g, p) <= weighted(given, g, p) * 1.02
        kl = choose(s, unsigned(bits, True), rule="kl")
        assert float(kl.scale) * (1 << bits) > 0.0039


@pytest.mark.parametrize("rule", ["mse", "mae", "lp", "kl", "no_clipping"])
def test_39_symmetric_thresholds_are_not_powers_of_two(rule):
    w = torch.rand(3, 200, generator=torch.Generator().manual_seed(1)) * 2 - 1
    t = choose(w, signed(8), rule=rule, axis=0).scale * 128
    assert not torch.equal(torch.log2(t), torch.log2(t).round())


def test_40_outliers_are_dropped_by_their_z_score():
    centers = (torch.tensor([-10.0, 0, 1, 2]) + torch.tensor([0.0, 1, 2, 30])) / 2
    assert without_outliers(centers, torch.tensor([1.0, 50, 50, 1]), 1.0).tolist() == [0, 50, 50, 0]


def test_40_a_histogram_that_grows_keeps_every_count():
    h = Histogram()
    for k in (1.0, 7.0, 0.2, 300.0):
        h.add(torch.linspace(-k, k, 1000), k)
    assert float(h.counts.sum()) == 4000 and h.reach >= 300


# ---------------------------------------------------------------- every rule


@pytest.mark.parametrize("rule", registered("range"))
@pytest.mark.parametrize(
    "grid", [signed(8), signed(2), unsigned(4), affine(8), signed(8, True)], ids=lambda g: f"{g.bits}{g.zero}{g.pot}"
)
@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(8),
        torch.full((8,), 3.0),
        torch.full((8,), -2.0),
        torch.tensor([1e-38, 0]),
        torch.tensor([1.0]),
        torch.tensor([1e30, 1.0, -1.0]),
    ],
    ids=["zero", "constant", "negative", "subnormal", "single", "outlier"],
)
def test_every_rule_gives_a_legal_grid_for_every_tensor(rule, grid, x):
    q = choose(x, grid, rule=rule)
    assert torch.isfinite(q.scale) and float(q.scale) > 0
    assert grid.qmin <= int(q.zero_point) <= grid.qmax
    if grid.pot:
        assert float(torch.log2(q.scale)) == round(float(torch.log2(q.scale)))
    assert torch.isfinite(fake_quantize(x, q.scale, q.zero_point, grid)).all()


@pytest.mark.parametrize("rule", ["mse", "mae", "lp"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_an_error_search_is_never_worse_than_no_clipping_by_its_own_measure(rule, bits):
    x = torch.randn(4000).pow(3)
    p = {"mse": 2, "mae": 1, "lp": 2.4}[rule]
    for grid in (signed(bits), affine(bits), signed(bits, True)):
        full = error(x, choose(x, grid, rule="no_clipping"), grid, p)
        assert error(x, choose(x, grid, rule=rule), grid, p) <= full * 1.0001


def test_codes_are_those_of_onnx_runtime():
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    x = torch.cat([torch.randn(5000) * 3, torch.arange(-300, 300) * 0.05])
    s, z = torch.tensor(0.05), torch.tensor(117)
    h = onnx.helper
    graph = h.make_graph(
        [
            h.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            h.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        ],
        "g",
        [h.make_tensor_value_info("x", 1, ["n"])],
        [h.make_tensor_value_info("q", 2, ["n"]), h.make_tensor_value_info("y", 1, ["n"])],
        [onnx.numpy_helper.from_array(s.numpy(), "s"), onnx.numpy_helper.from_array(z.numpy().astype("uint8"), "z")],
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 13)], ir_version=8)
    q, y = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x.numpy()})
    mine = quantize(x, s, z, affine(8))
    assert torch.equal(mine, torch.from_numpy(q))
    assert torch.equal(dequantize(mine, s, z), torch.from_numpy(y))
    assert torch.equal(fake_quantize(x, s, z, affine(8)), torch.from_numpy(y))


# ---------------------------------------------------------------- tables


def lut(bits, low=-128, high=127, table=None, pot=False):
    return Grid(bits=bits, qmin=low, qmax=high, kind="lut", entries=1 << bits, table=table, pot=pot)


def test_32_look_up_tables_take_the_nearest_entry_and_the_lower_of_two():
    scale = torch.tensor(4.0 / 128)
    y = fake_quantize(torch.randn(100) * 3, scale, Z, lut(1, table=(-25.0, 25.0)))
    assert set(y.unique().tolist()) == {-25 / 128 * 4, 25 / 128 * 4}
    y = fake_quantize(
        torch.tensor([-3.0, -0.6, 0.0, 0.1, 0.4, 9.0]), torch.tensor(16 / 128), Z, lut(2, table=(-8.0, 0.0, 4.0))
    )
    assert y.tolist() == [-1, -1, 0, 0, 0.5, 0.5]
    y = fake_quantize(
        torch.tensor([0.0, 3.9, 4.0, 4.01, 8.0, 11.0]), torch.tensor(8 / 256), Z, lut(1, 0, 255, (0.0, 256.0))
    )
    assert y.tolist() == [0, 0, 0, 8, 8, 8]


def test_32_the_integer_domain_of_a_table_is_that_of_its_value_bits():
    codes = quantize(torch.tensor([-4.0, -1, 1, 3.99]), torch.tensor(4 / 128), Z, Grid(bits=8, qmin=-128, qmax=127))
    assert codes.tolist() == [-128, -32, 32, 127]


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_fitted_table_errs_no_more_than_k_means_of_scikit_learn(bits, axis):
    cluster = pytest.importorskip("sklearn.cluster")
    w = torch.randn(8, 300, generator=torch.Generator().manual_seed(bits)).pow(3)
    q = choose(w, lut(bits), axis=axis)
    assert 0.0 in q.table and len(q.table) <= 1 << bits and all(v == int(v) and -128 <= v <= 127 for v in q.table)
    y = fake_quantize(w, q.scale, q.zero_point, lut(bits, table=q.table), axis)
    units = (w / (q.scale if axis is None else q.scale[:, None])).reshape(-1, 1).numpy()
    theirs = cluster.KMeans(1 << bits, n_init=3, random_state=0).fit(units).inertia_
    mine = float(((w - y) / (q.scale if axis is None else q.scale[:, None])).square().sum())
    slack = 1.6 if bits == 2 else 1.2  # one entry is forced to zero, all to integers
    assert mine <= theirs * slack
    assert choose(w, lut(bits), axis=axis).table == q.table


def test_narrow_floats_are_those_of_torch():
    from chipfit.quantizers.tables import float_table

    x = torch.cat([torch.randn(4000), torch.randn(4000) * 60, torch.randn(2000) * 1e-3])
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        table = float_table(name)
        grid = Grid(bits=8, qmin=int(table[0]), qmax=int(table[-1]), kind="float", table=table)
        theirs = x.to(dtype).float()
        mine = fake_quantize(x, torch.tensor(1.0), Z, grid)
        ties = torch.isin(x, torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(table)]))
        assert torch.equal(mine[~ties], theirs[~ties])


def test_logarithmic_codes_saturate_and_vanish():
    """Sixteen codes an octave, clip 4: figures of the vendor's arithmetic."""
    from chipfit.quantizers.tables import log_table

    grid = Grid(bits=8, qmin=-1, qmax=1, kind="log", table=log_table(2 ** (1 / 16), 8))
    y = fake_quantize(torch.tensor([4.0, -4.0, 5.0, 0.9, 0.02, 0.001, 0.0]), torch.tensor(4.0), Z, grid)
    assert y.tolist() == pytest.approx([4, -4, 4, 0.917004, 0.020263, 0, 0], abs=1e-6)
    assert min(v for v in grid.table if v > 0) * 4 == pytest.approx(0.0163168, abs=1e-7)
    assert float(choose(torch.tensor([-3.1, 2.0]), grid, rule="no_clipping").scale) == pytest.approx(
        2 ** (27 / 16)
    )  # 3.2207, the next 16th above 3.1


@pytest.mark.parametrize("rule", ["mse", "no_clipping"])
def test_41_signedness_follows_from_the_data_unless_given(rule):
    from chipfit.platform.schema import Format

    auto = Format(bits=8, signed="auto")
    assert auto.grid(signed=True).signed and not auto.grid(signed=False).signed
    assert Format(bits=8, signed=True).grid(signed=False).signed
    assert not Format(bits=8, signed=False).grid(signed=True).signed
