"""Formats with tables go the whole way: look-up weights, logarithmic codes, 8-bit floats."""

import itertools
import json

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import UnsupportedError
from chipfit.quantizers.grids import Grid, fake_quantize
from chipfit.quantizers.tables import boundaries, fit, float_table, k_means, log_table
from tests.build import quantized, randn, sequential


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    head = nn.Flatten(), nn.Linear(128, 5)
    return sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), *head)


X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("platform, kind, noise", [("nnie", "log", 0.05), ("graphcore_fp8", "float", 0.1)])
def test_the_simulation_rounds_to_the_table_and_stays_near_the_float_network(network, platform, kind, noise):
    result = quantized(network, X, platform)
    weights = [t for t in result.plan.tensors.values() if t.role == "weight" and t.quantized]
    assert len(weights) == 3 and {t.grid.kind for t in weights} == {kind}
    with torch.no_grad():
        want, got = network(X), result.model(X)
    assert 0 < float((want - got).norm() / want.norm()) < noise


def test_look_up_weights_take_as_many_values_as_the_index_has(network, tmp_path):
    result = quantized(network, X, "coreml@iOS16", overrides={"Conv2D": {"bits": 4}})
    t = result.plan.tensors["0.weight"]
    assert t.grid.kind == "lut" and len(t.grid.table) <= 16 and 0.0 in t.grid.table
    assert len(fake_quantize(result.graph.weights["0.weight"], t.scale, t.zero_point, t.grid).unique()) <= 16
    assert chipfit.load(result.save(tmp_path / "plan")).plan.tensors["0.weight"].grid == t.grid
    result.model.train()
    result.model(X).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for n, p in result.model.named_parameters() if n == "0.weight")


def test_onnx_refuses_tables_and_the_encodings_hold_them(network, tmp_path):
    result = quantized(network, X, "graphcore_fp8")
    with pytest.raises(UnsupportedError, match="integer grids only"):
        result.export(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
    written = json.loads(result.export(tmp_path / "m.json").read_text())["tensors"]["0.weight"]
    assert written["kind"] == "float" and max(written["table"]) == 448


# ---------------------------------------------------------------- tables on paper


@pytest.mark.parametrize(
    "name, upper",
    [
        ("e2m1", [0.5, 1, 1.5, 2, 3, 4, 6]),
        ("e2m3", [k / 8 for k in range(1, 16)] + [2 + k / 4 for k in range(8)] + [4 + k / 2 for k in range(8)]),
        ("e3m2", [k / 16 for k in range(1, 8)] + [2.0**e * (1 + m / 4) for e in range(-1, 5) for m in range(4)]),
    ],
)
def test_small_narrow_floats_value_by_value(name, upper):
    assert float_table(name)[len(upper) + 1 :] == pytest.approx(upper)


def test_wide_narrow_floats_are_those_of_torch():
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        assert list(float_table(name)) == values[values.isfinite()].unique().tolist()


@pytest.mark.parametrize("base, bits", [(2.0, 4), (2 ** (1 / 16), 8), (3.0, 2)])
def test_logarithmic_codes_are_powers_down_from_the_scale(base, bits):
    half = 1 << bits - 1
    up = [base**-k for k in range(half)][::-1]
    assert log_table(base, bits) == pytest.approx((*(-v for v in reversed(up)), 0.0, *up))


def test_entries_give_way_half_way_on_the_line_or_on_the_logarithm():
    table = (-4.0, -1.0, 0.0, 0.25, 4.0)
    assert boundaries(table, False) == (-2.5, -0.5, 0.125, 2.125)
    assert boundaries(table, True) == (-2, -0.5, 0.125, 1)  # beside zero half way


@pytest.mark.parametrize(
    ("values", "weights", "entries", "ends", "table"),
    [
        ([-8.0, -7.0, 0.0, 7.0, 8.0], None, 3, (-8, 8), (-8, 0, 8)),  # means of 7.5, halves to even
        ([-8.0, -6.0, 0.0, 6.0, 8.0], None, 3, (-8, 8), (-7, 0, 7)),
        ([-8.0, -6.0, 0.0, 6.0, 8.0], [3.0, 1.0, 1.0, 1.0, 1.0], 3, (-8, 8), (-8, 0, 7)),  # -7.5
        ([-8.0, -6.0, 0.0, 6.0, 8.0], None, 5, (-8, 8), (-8, -6, 0, 6, 8)),
        ([1.0, 1.0, 5.0], None, 4, (0, 9), (0, 1, 5)),  # zero takes a free entry
        ([1.0, 2.0, 5.0], None, 3, (0, 9), (0, 2, 5)),  # or that of the nearest
        ([-2.0, 3.0, 5.0], None, 3, (-9, 9), (0, 3, 5)),
        ([2.0, 30.0], None, 3, (-8, 7), (0, 2, 7)),  # inside the ends
        ([-30.0, 2.0], None, 3, (-8, 7), (-8, 0, 2)),
        ([2.0, 6.0, 7.0], [1.0, 0.0, 1.0], 3, (-8, 7), (0, 2, 7)),  # what does not count leaves its entry free
        ([0.2, 0.4, 4.0], None, 2, (-8, 7), (0, 4)),
        ([2.0, 6.0], [0.5, 0.25], 3, (-8, 7), (0, 2, 6)),  # what counts little counts
    ],
)
def test_a_table_is_fitted_by_the_least_squares_by_hand(values, weights, entries, ends, table):
    w = None if weights is None else torch.tensor(weights)
    assert fit(torch.tensor(values), w, entries, *ends) == table


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_a_fit_are_the_best_of_all(seed):
    """Against every way to cut ten numbers into four groups."""
    rng = torch.Generator().manual_seed(seed)
    x = (torch.rand(10, generator=rng).double() * 80 - 40).sort().values
    w = torch.randint(1, 9, (10,), generator=rng).double()
    best = None
    for cuts in itertools.combinations(range(1, 10), 3):
        parts = list(zip(x.tensor_split(cuts), w.tensor_split(cuts), strict=True))
        loss = sum(float((q * (p - (p * q).sum() / q.sum()).square()).sum()) for p, q in parts)
        if best is None or loss < best[0]:
            best = loss, [(p * q).sum() / q.sum() for p, q in parts]
    means = torch.stack(best[1])
    torch.testing.assert_close(k_means(x, w, 4), means)
    torch.testing.assert_close(k_means(x, w / 1e6, 4), means)  # only what they are to each other counts


def test_nearby_values_of_wide_tables_are_counted_together():
    """Of 0 .. 65535 in 1,024 steps; two entries: the mean of either half, of which the lower becomes 0."""
    x = torch.arange(65536.0)
    low, high = fit(x, None, 2, 0, 65535)
    assert low == 0 and high == pytest.approx(49152, abs=64)


@pytest.mark.parametrize("name, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_floats_are_rounded_as_torch_rounds_them_but_for_ties(name, dtype):
    table = float_table(name)
    x = torch.cat([randn(4000), randn(4000, seed=1) * 60, randn(2000, seed=2) * 1e-3])
    x = x[~torch.isin(x, torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(table)]))]
    grid = Grid(bits=8, qmin=int(table[0]), qmax=int(table[-1]), kind="float", table=table)
    assert torch.equal(fake_quantize(x, torch.tensor(1.0), torch.tensor(0), grid), x.to(dtype).float())
