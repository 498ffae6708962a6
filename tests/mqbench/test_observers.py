"""Observers of MQBench: worked numbers, errors, and equal numbers on several ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from chipfit.errors import ConfigError, DataError, UnknownNameError
from chipfit.mqbench.observers import LSQ, MSE, ObserverBase, observer_of, to_pot
from chipfit.quantizers.grids import fake_quantize
from chipfit.registry import register, registered

S4 = {"quant_min": -8, "quant_max": 7}
A4 = {"quant_min": 0, "quant_max": 15, "qscheme": torch.per_tensor_affine}
A8 = {"quant_min": 0, "quant_max": 255, "qscheme": torch.per_tensor_affine}
S8 = {"quant_min": -128, "quant_max": 127}
C4 = S4 | {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}
C8 = C4 | S8
NORMAL = torch.randn(4096, generator=torch.Generator().manual_seed(0))


def observed(name, *batches, **options) -> ObserverBase:
    observer = observer_of(name)(**options)
    for b in batches:
        b = torch.as_tensor(b)
        assert observer(b) is b
    return observer


def scale(name, *batches, **options) -> float:
    return float(observed(name, *batches, **options).calculate_qparams()[0])


def ends(observer) -> list[float]:
    return observer.statistics[:2, 0].tolist()


def test_a_symmetric_scale_maps_the_greatest_magnitude_to_half_the_range():
    """3 / 7.5, where the core's own rule says 3 / 8; -127..127: 3 / 127."""
    assert scale("MinMax", [-3.0, 1.5], **S4) == pytest.approx(0.4)
    assert scale("MinMax", [-3.0, 1.5], quant_min=-127, quant_max=127) == pytest.approx(3 / 127)


@pytest.mark.parametrize("low, high, step, zero", [(-1.0, 3.0, 4 / 255, 64), (1.0, 3.0, 3 / 255, 0)])
def test_an_affine_range_is_extended_to_zero(low, high, step, zero):
    s, z = observed("MinMax", [low, high], **A8).calculate_qparams()
    assert float(s) == pytest.approx(step) and int(z) == zero


@pytest.mark.parametrize("name", registered("observer"))
@pytest.mark.parametrize("options", [S4, A4, S4 | {"pot_scale": True}, A4 | {"pot_scale": True}])
def test_zero_is_exact_and_rounding_is_idempotent_and_monotonic(name, options):
    if name in ("MinMaxFloor", "PoTMode") and options["quant_min"] == 0:
        with pytest.raises(ConfigError, match="one symmetric scale"):
            observer_of(name)(**options)
        return
    observer = observed(name, NORMAL.view(8, -1) + 0.3, **options)
    s, z = observer.calculate_qparams()
    assert s.dtype == torch.float32 and z.dtype == torch.int32 and s.dim() == z.dim() == 0
    y = fake_quantize(NORMAL.sort().values, s, z, observer.grid)
    assert torch.equal(fake_quantize(y, s, z, observer.grid), y)
    assert bool((y.diff() >= 0).all()) and len(y.unique()) <= 16
    assert float(fake_quantize(torch.tensor(0.0), s, z, observer.grid)) == 0
    if observer.pot_scale or name in ("MinMaxFloor", "PoTMode"):
        assert float(s.log2()) % 1 == 0


@pytest.mark.parametrize("name", sorted(set(registered("observer")) - {"MinMaxFloor", "PoTMode", "BatchMeanMax"}))
def test_channels_are_independent(name):
    w = torch.randn(6, 4, 10, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 7).view(-1, 1, 1)
    observer = observed(name, w, **C4)
    s, z = observer.calculate_qparams()
    assert s.shape == z.shape == (6,)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.allclose(observed(name, w[order], **C4).calculate_qparams()[0], s[order])
    assert torch.allclose(observed(name, w.transpose(0, 1), **C4 | {"ch_axis": 1}).calculate_qparams()[0], s)
    same = observed(name, w[:1].expand(3, -1, -1), **C4).calculate_qparams()[0]
    assert same.unique().numel() == 1
    if name not in ("MSE", "EMAMSE", "KL", "KLD"):  # which count a tensor's values in bins, and a channel's one by one
        assert float(same[0]) == pytest.approx(scale(name, w[0], **S4))


def test_unsigned_values_halve_the_scale():
    observer = observed("MinMax", [0.0, 3.0], **S4)
    assert float(observer.calculate_qparams()[0]) == pytest.approx(3 / 7.5)
    observer.quant_min, observer.quant_max, observer.adjust_sign = 0, 15, True
    assert float(observer.calculate_qparams()[0]) == pytest.approx(3 / 15)
    assert float(observed("LSQ", [1.0, -1.0], **S4).calculate_qparams()[0]) == pytest.approx(2 / 7**0.5)


def test_powers_of_two_are_nearest_on_a_logarithmic_scale():
    scales = torch.tensor([0.3, 1.4142, 1.4143, 0.7])
    assert to_pot(scales).tolist() == [0.25, 1, 2, 0.5] == to_pot(to_pot(scales)).tolist()
    assert scale("MinMax", [0.3 * 7.5], pot_scale=True, **S4) == 0.25


def test_moving_and_plain_averages():
    """0.9 (-1, 1) + 0.1 (-2, 3) = (-1.1, 1.2)."""
    batches = [-1.0, 1.0], [-2.0, 3.0]
    assert ends(observed("EMAMinMax", *batches)) == pytest.approx([-1.1, 1.2])
    assert ends(observed("AverageMinMax", *batches)) == [-1.5, 2]
    assert ends(observed("MinMax", *batches, [0.0])) == [-2, 3]
    assert ends(observed("MinMax", *batches, [0.0], over="latest")) == [0, 0]
    assert ends(observed("EMAMinMax", *batches, ema_ratio=0.5)) == [-1.5, 2]
    assert ends(observed("BatchMeanMax", torch.tensor([[-1.0, 1.0], [-2.0, 3.0]]))) == [-1.5, 2]


def test_a_quantile_clips_an_outlier():
    x = torch.cat([torch.linspace(0, 1, 99), torch.tensor([10.0])])
    assert ends(observed("Quantile", x, threshold=0.9, bins=100)) == pytest.approx([0, 0.95])
    assert ends(observed("EMAQuantile", x, x / 2, threshold=0.9, bins=100)) == pytest.approx([0, 0.95 * 0.95])
    assert ends(observed("QuantileMovingAverage", x, x / 2, threshold=0.9, bins=100)) == pytest.approx([0, 0.95])
    halved = observed("QuantileMovingAverage", x, x / 2, threshold=0.9, bins=100, over="moving")
    assert ends(halved) == pytest.approx([0, 0.95 * 0.95])


def test_clip_std_is_limited_to_the_extremes():
    """[0, 0, 0, 10]: 2.5 +- 2.6 * 5 reaches past both extremes; of 100 values the one at 10 is cut."""
    wide = observed("ClipStd", torch.tensor([0.0, 0.0, 0.0, 10.0]), widens=True)  # [-10.5, 15.5], as MQBench computes
    assert wide.calculate_qparams()[0].item() == pytest.approx(15.5 / 127.5)
    assert ends(observed("ClipStd", [0.0, 0.0, 0.0, 10.0])) == [0, 10]
    many = torch.zeros(100)
    many[0] = 10.0
    assert ends(observed("ClipStd", many)) == pytest.approx([0, 0.1 + 2.6 * float(many.std())])


@pytest.mark.parametrize("name", ["MinMax", "EMAMinMax", "Quantile", "MSE", "KL"])
@pytest.mark.parametrize("options", [S8, A8, C8], ids=["symmetric", "affine", "per channel"])
def test_the_least_scale_rounds_values_of_a_smaller_range(name, options):
    """A range of 6e-6 has 8-bit steps of 5e-8; the least scale, 2^-24 = 6e-8, is at most half a step of itself away."""
    x = torch.linspace(-6e-6, 6e-6, 400).reshape(4, 100)
    observer = observed(name, x, **options)
    s, z = observer.calculate_qparams()
    assert s.reshape(-1).tolist() == [2.0**-24] * s.numel()
    rounded = fake_quantize(x, s, z, observer.grid, None if observer.ch_axis < 0 else 0)
    assert float((rounded - x).abs().max()) <= 2.0**-25 * 1.001 and not observer.vanishing


def test_a_range_that_the_least_scale_rounds_to_zero_counts_as_zero():
    small = observed("MinMax", [-1e-9, 2e-9], **S8)
    assert float(small.calculate_qparams()[0]) == pytest.approx(1 / 127.5) and small.vanishing == pytest.approx(2e-9)
    channels = observed("MinMax", torch.tensor([[-1e-9, 2e-9], [-1.0, 0.5], [-6e-6, 0.0]]), **C8)
    assert channels.calculate_qparams()[0].tolist() == pytest.approx([1 / 127.5, 1 / 127.5, 2.0**-24])
    assert observed("MinMax", [0.0], **S8).vanishing == channels.vanishing == 0


@pytest.mark.parametrize("options", [S4, A4])
def test_least_squared_error_clips_normal_values(options):
    errors = {}
    for name in ("MinMax", "MSE", "EMAMSE"):
        observer = observed(name, NORMAL, **options)
        s, z = observer.calculate_qparams()
        errors[name] = float((NORMAL - fake_quantize(NORMAL, s, z, observer.grid)).square().mean())
    assert errors["MSE"] == errors["EMAMSE"] < 0.7 * errors["MinMax"]
    assert 2.3 < scale("MSE", NORMAL, **S4) * 7.5 < 2.9
    assert scale("MSE", NORMAL, p=4.0, **S4) > scale("MSE", NORMAL, **S4)  # outliers count more


def test_lsq_and_lsq_plus_against_worked_numbers():
    """2 * 4.4/6 / sqrt(7); mean 0.3, standard deviation 1.042: (0.3 + 3.126) / 16, or over 7."""
    x = torch.tensor([-1.0, -0.3, 0.0, 0.2, 0.9, 2.0])
    assert scale("LSQ", x, **S4) == pytest.approx(0.5543479)
    assert scale("AverageLSQ", x, 3 * x, **S4) == pytest.approx(2 * 0.5543479)
    assert scale("LSQPlus", x, **S4) == pytest.approx((0.3 + 3 * float(x.std())) / 16)
    assert scale("LSQPlus", x, by_half=True, **S4) == pytest.approx((0.3 + 3 * float(x.std())) / 7)
    s, z = observed("LSQ", x, **A4).calculate_qparams()
    assert float(s) == pytest.approx(2 * 4.4 / 6 / 15**0.5) and int(z) == round(1 / float(s))


def test_divergence_clips_the_tail():
    assert 0 < scale("KL", NORMAL**5, **S4) < 0.8 * scale("MinMax", NORMAL**5, **S4)


def test_power_of_two_ranges_by_search_and_by_vote():
    """max 4.1 over 7 codes: 2^0 holds it, and clipping at 3.5 with 2^-1 errs less."""
    assert scale("MinMaxFloor", NORMAL, candidates=1, **S4) == 1
    assert scale("MinMaxFloor", NORMAL, **S4) == 0.5
    assert scale("PoTMode", NORMAL, NORMAL, 8 * NORMAL, **S4) == 0.5
    assert scale("MinMaxFloor", [0.0], **S4) == 1
    assert scale("MinMaxFloor", NORMAL / 2**20, quant_min=-128, quant_max=127) == 1  # below 2^-15


def test_the_suffix_of_a_name_is_optional_and_unknown_names_list_similar_ones():
    assert observer_of("EMAMSEObserver") is observer_of("EMAMSE")
    assert observer_of(partial(MSE, p=2.4))().p == 2.4
    with pytest.raises(UnknownNameError, match="'MinMax'"):
        observer_of("MinMox")
    with pytest.raises(ConfigError, match="derived from ObserverBase"):
        observer_of(torch.nn.Linear)


@pytest.mark.usefixtures("drop_ins")
def test_a_new_observer_is_registered():
    @register("observer", "Mine")
    class Mine(ObserverBase):
        def batch_statistics(self, x):
            return super().batch_statistics(x) / 2

    assert scale("Mine", [-3.0, 3.0], **S4) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "options, says, name",
    [
        ({"ada_sign": True, **A4}, "affine schemes", "MinMax"),
        ({"quant_min": 0, "quant_max": 1 << 17}, "1 to 16", "MinMax"),
        ({"quant_min": 1, "quant_max": 1}, "below quant_max", "MinMax"),
        ({"bitwidth": 3, **S4}, "fit into 3 bits", "MinMax"),
        ({"ch_axis": 0, **S4}, "-1 per tensor", "MinMax"),
        ({"qscheme": torch.per_channel_affine}, "-1 per tensor", "MinMax"),
        ({"over": "all"}, "widest", "MinMax"),
        ({"ada_sign": "yes"}, "True or False", "MinMax"),
        ({"quant_min": -8.5}, "an integer", "MinMax"),
        ({"bitwidth": "4"}, "an integer", "MinMax"),
        ({"qscheme": "per_tensor_symmetric"}, "qscheme", "MinMax"),
        ({"ema_ratio": 1.5}, "at most 1", "MinMax"),
        ({"threshold": 2.0}, "'threshold'", "Quantile"),
        ({"bins": 0}, "'bins'", "EMAQuantile"),
        ({"k": -1.0}, "'k'", "ClipStd"),
        ({"p": 0}, "'p'", "EMAMSE"),
        ({"candidates": 0}, "'candidates'", "PoTMode"),
        ({"by_half": "no"}, "'by_half'", "LSQPlus"),
    ],
)
def test_invalid_and_contradictory_options_are_refused(options, says, name):
    with pytest.raises(ConfigError, match=says):
        observer_of(name)(**options)


@pytest.mark.parametrize("name", registered("observer"))
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinite_values_are_refused(name, value):
    observer = observed(name, NORMAL, **S4)
    before = observer.calculate_qparams()
    with pytest.raises(DataError, match="Batch 2 to observe holds NaN or infinite"):
        observer(torch.tensor([1.0, value]))
    assert observer.calculate_qparams() == before


def test_an_observer_needs_batches_and_its_channel_axis():
    with pytest.raises(DataError, match="has observed no batch"):
        LSQ().calculate_qparams()
    with pytest.raises(DataError):
        observed("MinMax", torch.empty(0)).calculate_qparams()
    with pytest.raises(DataError, match=r"ch_axis=0 of \[\]"):
        observed("MinMax", 3.0, **C4)


def test_statistics_are_saved():
    observer, other = observed("PoTMode", NORMAL, **S4), observer_of("PoTMode")(**S4)
    other.load_state_dict(observer.state_dict())
    assert float(other.calculate_qparams()[0]) == 0.5 and other.votes == observer.votes


RANK_DATA = torch.randn(8, 3, 40, generator=torch.Generator().manual_seed(0)) + 0.5
RANK_DATA[0], RANK_DATA[5] = 3 * RANK_DATA[0], RANK_DATA[5].relu()


def scales_of_all(x):
    return {name: observed(name, x, 2 * x, **S4).calculate_qparams()[0] for name in registered("observer")}


def scales_of_rank(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.save(scales_of_all(RANK_DATA[4 * rank : 4 * rank + 4]), f"{file}.{rank}")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_ranks_on_half_batches_give_the_scales_of_one_on_the_whole(tmp_path):
    mp.start_processes(scales_of_rank, (tmp_path / "meeting",), nprocs=2, start_method="fork")
    whole, half = scales_of_all(RANK_DATA), scales_of_all(RANK_DATA[:4])
    for rank in range(2):
        for name, s in torch.load(tmp_path / f"meeting.{rank}").items():
            torch.testing.assert_close(s, whole[name], rtol=1e-6, atol=0, msg=name)
    assert any(not torch.allclose(half[name], s, rtol=1e-2) for name, s in whole.items())
