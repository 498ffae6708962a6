"""Every registered training algorithm, in the same terms: values, gradients, and what is left when training ends."""

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch

from chipfit.errors import ConfigError
from chipfit.quantizers.algorithm import Algorithm, algorithm_text, with_levels
from chipfit.quantizers.algorithms.apot import APoT, APoTRescaled, magnitudes
from chipfit.quantizers.algorithms.dorefa import DoReFa, DoReFaRescaled
from chipfit.quantizers.algorithms.dsq import DSQ
from chipfit.quantizers.algorithms.lsq import LSQ
from chipfit.quantizers.algorithms.lsq_plus import LSQPlus
from chipfit.quantizers.algorithms.lut import LUT
from chipfit.quantizers.algorithms.n2uq import N2UQ
from chipfit.quantizers.algorithms.nnie_log import NNIE
from chipfit.quantizers.algorithms.pact import PACT
from chipfit.quantizers.algorithms.qil import QIL, QILRescaled
from chipfit.quantizers.algorithms.ste import STE
from chipfit.quantizers.algorithms.tqt import TQT
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import TorchOps, fake_quantize
from chipfit.quantizers.stored import Stored
from chipfit.quantizers.tables import log_table
from chipfit.registry import create, registered
from tests.build import stored as stored_as

INT4 = Grid(bits=4, qmin=-8, qmax=7)
UINT4 = Grid(bits=4, qmin=0, qmax=15)
AFFINE = Grid(bits=4, qmin=0, qmax=15, zero="any")
POT = Grid(bits=4, qmin=-8, qmax=7, pot=True)
TABLE = Grid(bits=3, qmin=-128, qmax=127, kind="lut", entries=8, table=(-8.0, -4.0, -1.0, 0.0, 1.0, 2.0, 5.0, 9.0))
LOG = Grid(bits=8, qmin=-1, qmax=1, kind="log", table=log_table(2 ** (1 / 16), 8))
GRIDS = {"int4": INT4, "uint4": UINT4, "affine": AFFINE, "pot": POT, "lut": TABLE, "log": LOG}
INTEGERS = ("int4", "uint4", "affine", "pot")
ROLES = ("weight", "activation")
#: forms of papers that transform weights, or round their scale to a power of two
OTHERS = ("dorefa", "dorefa_rescaled", "qil", "apot", "tqt")
#: forms that differ from the default
OPTIONS = {
    "qil": ["qil(use_grad_scaling=False)"],
    "lsq": ["lsq(from_mean=True)", "lsq(clip_first=False)"],
    "lsq_plus": ["lsq_plus(from_spread=True)"],
    "dsq": ["dsq(alpha=0.2)", "dsq(learn_range=False)"],
    "tqt": ["tqt(pot=False)"],
    "pact": ["pact(alpha=1.5)"],
    "lut": ["lut(learn_levels=False)"],
}
FORMS = [form for name in registered("training") for form in (name, *OPTIONS.get(name, ()))]
X = torch.tensor([-1.0, -0.3, 0.0, 0.2, 0.9, 2.0])


def stored(grid: Grid, scale=0.25, zero=0, axis=None) -> Stored:
    return stored_as(scale, zero, on=grid, axis=axis)


def tensor(name: str, role: str, channels: bool) -> tuple[Stored, torch.Tensor]:
    """How a tensor [4, 3, 10] is stored on one of the grids, and the tensor."""
    scale = [0.25, 0.5, 0.125] if channels else 0.25
    grid = replace(GRIDS[name], per="channel" if channels else "tensor")
    at = stored(grid, scale, 5 if name == "affine" else 0, 1 if channels else None)
    x = torch.randn(4, 3, 10, generator=torch.Generator().manual_seed(3))
    return at, x.abs() if role == "activation" and name == "uint4" else x


def ready(algorithm, at: Stored, x: torch.Tensor | None, dim: int, dtype=torch.float32):
    """The algorithm's form for a weight x, or an activation (None), and what it is given, broadcast over `dim` axes."""
    algorithm = algorithm.for_tensor(at, "activation" if x is None else "weight", ())
    shape = [-1 if d == at.axis else 1 for d in range(dim)]
    trains = algorithm.init(at, x)
    given = {**algorithm.constants(at, x), **trains}
    laid = {k: v.view(shape) if v.dim() and k not in algorithm.vectors else v for k, v in given.items()}
    p = {k: v.detach().clone().to(dtype) for k, v in laid.items()}
    return algorithm, {k: v.requires_grad_() if k in trains else v for k, v in p.items()}, algorithm.grid(at.grid)


def run(algorithm, x, at: Stored, activation=False):
    """x and the parameters, with the gradients of the sum of y, and what x becomes."""
    algorithm, p, grid = ready(algorithm, at, None if activation else x, x.dim())
    x = x.clone().requires_grad_()
    y = algorithm.call(TorchOps, x, p, grid)
    y.sum().backward()
    return x, y.detach(), p


def cases(*grids: str):
    return [(form, grid, role, c) for form in FORMS for grid in grids for role in ROLES for c in (False, True)]


def skip_refused(form, at, role):
    if create("training", form).refuses(at.grid, role):
        pytest.skip("refused by name")


def kept(algorithm, at, x, role):
    """Raise unless the plan, afterwards, rounds as the algorithm does."""
    with torch.no_grad():
        algorithm, p, own = ready(algorithm, at, x if role == "weight" else None, x.dim())
        s, z = algorithm.numbers(TorchOps, p, own)
        s, z = (n.expand_as(p["scale"]).flatten() if at.axis is not None else n for n in (s, z))
        after = Stored(format="", grid=own, scale=s, zero_point=z.round().to(torch.int32), axis=at.axis)
        assert torch.equal(after.round(algorithm.reals(TorchOps, x, p, own)), algorithm.call(TorchOps, x, p, own))
        assert not own.pot or torch.equal(s.log2(), s.log2().round())


@pytest.mark.parametrize(("form", "grid", "role", "channels"), cases(*GRIDS))
def test_what_the_plan_rounds_afterwards_is_what_training_rounded(form, grid, role, channels):
    at, x = tensor(grid, role, channels)
    skip_refused(form, at, role)
    kept(create("training", form), at, 1.5 * x, role)


@dataclass(frozen=True)
class Wrong(LSQ):
    def reals(self, ops, x, p, grid):
        return 1.01 * x

    def call(self, ops, x, p, grid):
        return ops.fake_quantize(x, *self.numbers(ops, p, grid), grid)


def test_a_formula_that_leaves_something_else_is_noticed():
    with pytest.raises(AssertionError):
        kept(Wrong(), *tensor("int4", "weight", False), "weight")


@pytest.mark.parametrize("name", [*(n for n in registered("training") if n not in OTHERS), "tqt(pot=False)"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("grid", INTEGERS)
@pytest.mark.parametrize("channels", [False, True])
def test_training_starts_from_the_function_of_the_plan(name, role, grid, channels):
    """Levels of their own aside, at most one number in a hundred takes the next code."""
    at, x = tensor(grid, role, channels)
    skip_refused(name, at, role)
    algorithm, p, own = ready(create("training", name), at, x if role == "weight" else None, x.dim())
    with torch.no_grad():
        y, plan = algorithm.call(TorchOps, x, p, own), at.round(x)
        if own.table is not None:
            clipped = x.clamp(at.round(x - 1e9), at.round(x + 1e9))
            assert (y - clipped).square().mean() < 0.03 * x.square().mean()
        else:
            moved = (y - plan).abs() / p["scale"]
            assert moved.max() <= 1.001
            assert (moved > 0.5).float().mean() <= 0.01


@pytest.mark.parametrize("form", FORMS)
def test_only_what_chips_can_round_is_deployed(form):
    """A chip rounds activations itself: where an algorithm does something else before, it says so."""
    at, x = tensor("uint4", "activation", False)
    algorithm, p, own = ready(create("training", form), at, None, x.dim())
    if not algorithm.refuses(at.grid, "activation"):
        p = {k: v.detach() * (1.3 if k.startswith(("center", "width", "interval_2")) else 1) for k, v in p.items()}
        same = torch.equal(algorithm.reals(TorchOps, x, p, own), x)
        assert same == ("activation" not in algorithm.undeployable)


@pytest.mark.parametrize("form", FORMS)
def test_its_name_and_options_are_text(form):
    algorithm = create("training", form)
    assert create("training", algorithm_text(algorithm)) == algorithm
    at = stored(UINT4)
    for role in ROLES:
        of_role = algorithm.for_tensor(at, role, ())
        assert create("training", algorithm_text(of_role)) == of_role


@pytest.mark.parametrize("name", registered("training"))
def test_its_paper_and_options_are_written_down(name):
    algorithm = registered("training")[name]
    assert "Source: " in algorithm.__doc__
    assert not {f.name for f in fields(algorithm)} & set(dir(Algorithm))
    told = "".join(c.__doc__ or "" for c in algorithm.__mro__)
    assert all(f"        {f.name}: " in told for f in fields(algorithm))


# ---------------------------------------------------------------- gradients, against differences


def frozen():
    """The functions where all that has no gradient keeps its first value: what straight-through gradients are of."""
    held, at = [], [0]

    def hold(x):
        if at[0] == len(held):
            held.append(x.detach().clone())
        at[0] += 1
        return held[at[0] - 1]

    class Frozen(TorchOps):
        stop_gradient = staticmethod(hold)

        @staticmethod
        def where(condition, x, y):
            return torch.where(hold(condition), x, y)

        @staticmethod
        def fake_quantize(x, s, z, grid, clip_first=False):
            return fake_quantize(Frozen, x, s, z, grid, clip_first)

    return Frozen, at


def differentiable(algorithm, at, x, role):
    """Raise unless gradients are those of differences, on the fast path too."""
    weight = x.float() if role == "weight" else None
    algorithm, p, own = ready(algorithm, at, weight, x.dim(), torch.float64)
    ops, counter = frozen()
    names = [k for k, v in p.items() if v.requires_grad]

    def f(x, *values):
        counter[0] = 0
        return algorithm.call(ops, x, {**p, **dict(zip(names, values, strict=True))}, own)

    leaves = (x.requires_grad_(), *(p[k] for k in names))
    slow = torch.autograd.grad(f(*leaves).square().sum(), leaves, allow_unused=True)  # holds what has no gradient
    fast = torch.autograd.grad(algorithm.call(TorchOps, x, p, own).square().sum(), leaves, allow_unused=True)
    assert torch.autograd.gradcheck(f, leaves, eps=1e-7, atol=1e-5, rtol=1e-4, fast_mode=True)
    for a, b in zip(fast, slow, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("form", "grid", "role"), [(f, g, r) for f in FORMS for g in GRIDS for r in ROLES])
def test_gradients_are_those_of_differences(form, grid, role):
    at, x = tensor(grid, role, role == "weight")
    skip_refused(form, at, role)
    differentiable(create("training", form), at, x.double()[:2, :, :4] * 1.7, role)


def test_another_gradient_on_the_fast_path_is_noticed():
    @dataclass(frozen=True)
    class Other(LSQ):
        def call(self, ops, x, p, grid):
            y = super().call(ops, x, p, grid)
            return y if ops is TorchOps else y + 0.1 * x

    at, x = tensor("int4", "weight", False)
    with pytest.raises(AssertionError):
        differentiable(Other(), at, x.double(), "weight")


# ---------------------------------------------------------------- LSQ, LSQ+, TQT, worked by hand


def test_lsq_may_start_from_the_mean_magnitude():
    """2 mean|x| / sqrt(7)."""
    assert LSQ(from_mean=True).init(stored(INT4), X)["scale"].item() == pytest.approx(0.5543479, abs=1e-6)
    by_channel = LSQ(from_mean=True).init(stored(INT4, [1.0, 1.0], axis=1), torch.stack([X, 2 * X], 1))["scale"]
    assert by_channel.tolist() == pytest.approx([0.5543479, 1.1086958], abs=1e-6)
    assert LSQ(from_mean=True).init(stored(INT4), None)["scale"] == 0.25


def test_lsq_by_hand():
    """s = 0.2, codes -8 to 7: only 2.0 lies outside; ds = sum of round(x/s) - x/s, and 7, over sqrt(6 * 7)."""
    x, y, p = run(LSQ(), X, stored(INT4, 0.2))
    torch.testing.assert_close(y, torch.tensor([-1.0, -0.4, 0.0, 0.2, 0.8, 1.4]))
    assert x.grad.tolist() == [1, 1, 1, 1, 1, 0]
    assert p["scale"].grad.item() == pytest.approx(0.925820, abs=1e-6)
    _, _, p = run(LSQ(), torch.stack([X, X]), stored(INT4, [0.2, 0.2], axis=0))  # six numbers share each scale
    assert p["scale"].grad.flatten().tolist() == pytest.approx([0.925820] * 2, abs=1e-6)
    _, _, p = run(LSQ(use_grad_scaling=False), X, stored(INT4, 0.2))
    assert p["scale"].grad.item() == pytest.approx(6.0)


def test_lsq_clips_before_it_rounds():
    """Eq. 3: gradients of x where -8 < x / s < 7; ds is round(x / s) - x / s there, else -8 or 7."""
    x, y, p = run(LSQ(use_grad_scaling=False), torch.tensor([6.9, 7.0, 7.4, 7.6, -7.9, -8.0, -8.4]), stored(INT4, 1.0))
    assert y.tolist() == [7, 7, 7, 7, -8, -8, -8]
    assert x.grad.tolist() == [1, 0, 0, 0, 1, 0, 0]
    assert p["scale"].grad.item() == pytest.approx(0.1 + 3 * 7 - 0.1 - 2 * 8)
    x, _, p = run(LSQPlus(use_grad_scaling=False), torch.tensor([-0.4, 15.0, 15.4]), stored(AFFINE, 1.0))
    assert (x.grad.tolist(), p["zero_point"].grad) == ([0, 0, 0], -3)


@pytest.mark.parametrize("algorithm", [LSQ(clip_first=False), TQT(), STE()])
def test_others_clip_after_rounding(algorithm):
    """7.4 s rounds to 7 and passes; 7.5 s rounds to 8, a half to even, and is blocked. So does torch."""
    given = torch.tensor([7.4, 7.5, 7.6, -8.4, -8.6])
    x, _, _ = run(algorithm, given, stored(INT4, 1.0))
    expected = given.clone().requires_grad_()
    torch.fake_quantize_per_tensor_affine(expected, 1.0, 0, -8, 7).sum().backward()
    assert x.grad.tolist() == expected.grad.tolist() == [1, 0, 0, 1, 0]


def test_mqbenchs_lsq_has_the_gradients_of_torchs_learnable_fake_quantizer():
    x = torch.randn(200, generator=torch.Generator().manual_seed(5)) * 2
    ours, _, p = run(LSQ(clip_first=False), x, stored(INT4, 0.3))
    theirs, scale = x.clone().requires_grad_(), torch.tensor([0.3], requires_grad=True)
    g = (200 * 7) ** -0.5
    torch._fake_quantize_learnable_per_tensor_affine(theirs, scale, torch.zeros(1), -8, 7, g).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    torch.testing.assert_close(p["scale"].grad.reshape(1), scale.grad)


def test_a_symmetric_grid_keeps_its_zero_point_and_a_positive_scale():
    for algorithm in (LSQ(), LSQPlus()):
        given, p, grid = ready(algorithm, stored(INT4), X, 1)
        assert set(given.init(stored(INT4), X)) == {"scale"}
        s, z = given.numbers(TorchOps, {**p, "scale": torch.tensor(-0.5)}, grid)
        assert (s, z) == (0.5, 0)
        assert given.numbers(TorchOps, {**p, "scale": torch.tensor(0.0)}, grid)[0] >= torch.finfo(torch.float32).eps


def test_a_power_of_two_scale_passes_its_gradient_on():
    """d 2^round(log2 s) / ds = 2^round(log2 s) / s: 0.25 / 0.3."""
    algorithm, p, _ = ready(LSQ(use_grad_scaling=False), stored(POT, 0.3), X, 1)
    s, _ = algorithm.numbers(TorchOps, p, POT)
    s.backward()
    assert s.item() == 0.25
    assert p["scale"].grad.item() == pytest.approx(0.8333333)


def test_lsq_plus_trains_the_zero_point():
    """16 and 20 lie above 15 codes of 0.5 from a zero point of 3; dz = -s for each, times 1 / sqrt(4 * 15)."""
    x, y, p = run(LSQPlus(), torch.tensor([-3.0, 1.1, 16.0, 20.0]), stored(AFFINE, 0.5, 3))
    assert y.tolist() == [-1.5, 1.0, 6.0, 6.0]
    assert p["zero_point"].grad.item() == pytest.approx(-3 * 0.5 / 60**0.5)
    assert x.grad.tolist() == [0, 1, 0, 0]
    algorithm, p, grid = ready(LSQPlus(), stored(AFFINE, 0.5, 3), None, 1)
    for z, code in ((2.6, 3), (-4.0, 0), (17.0, 15)):
        assert algorithm.numbers(TorchOps, {**p, "zero_point": torch.tensor(z)}, grid)[1] == code


def test_lsq_plus_may_start_from_the_spread():
    """Mean 0.3, standard deviation 0.9695: (0.3 + 2.9086) / 8."""
    s = LSQPlus(from_spread=True).init(stored(INT4), X)["scale"]
    assert s.item() == pytest.approx((0.3 + 3 * X.std(correction=0).item()) / 8)


def test_tqt_rounds_as_the_grid_and_trains_its_scale():
    """s = 0.5. Halves of tensors go up where negative, of parameters to even."""
    x = torch.tensor([-0.75, -0.25, 0.25, 0.75])
    up = Grid(bits=4, qmin=-8, qmax=7, pot=True, rounding="half_even_up")
    assert run(TQT(), x, stored(up, 0.5), True)[1].tolist() == [-0.5, 0, 0, 1]
    assert run(TQT(), x, stored(POT, 0.5))[1].tolist() == [-1, 0, 0, 1]
    _, y, p = run(TQT(use_grad_scaling=False), torch.tensor([0.6, 9.0]), stored(POT, 0.5))
    assert y.tolist() == [0.5, 3.5]
    assert p["log_scale"].grad.item() == pytest.approx((1 - 1.2 + 7) * 0.5 * math.log(2), rel=1e-5)  # 2.357


@pytest.mark.parametrize(("log", "scale"), [(-2.0, 0.25), (-1.9, 0.5), (-1.0, 0.5), (0.001, 2.0)])
def test_tqt_takes_the_next_power_of_two(log, scale):
    algorithm, p, grid = ready(TQT(), stored(POT, 0.5), None, 1)
    assert algorithm.numbers(TorchOps, {**p, "log_scale": torch.tensor(log)}, grid)[0] == scale
    everywhere, p, grid = ready(TQT(), stored(INT4, 0.5), None, 1)
    assert everywhere.numbers(TorchOps, {**p, "log_scale": torch.tensor(log)}, grid)[0] == scale
    free, p, grid = ready(TQT(pot=False), stored(INT4, 0.5), None, 1)
    assert free.numbers(TorchOps, {**p, "log_scale": torch.tensor(log)}, grid)[0].item() == pytest.approx(2**log)


# ---------------------------------------------------------------- PACT, DoReFa, DSQ


def test_pact_by_hand():
    """alpha = 6 on 4 unsigned bits: scale 0.4; two numbers lie above."""
    x, y, p = run(PACT(alpha=6), torch.tensor([0.5, 3.0, 7.0, 9.0]), stored(UINT4, 0.1), True)
    torch.testing.assert_close(y, torch.tensor([0.4, 3.2, 6.0, 6.0]))
    assert p["alpha"].grad == 2
    assert x.grad.tolist() == [1, 1, 0, 0]
    assert PACT(alpha=6).numbers(TorchOps, p, UINT4)[0].item() == pytest.approx(0.4)


def test_pact_counts_at_each_end():
    x = torch.tensor([-9.0, -7.0, -6.5, 1.0, 7.0])
    _, _, p = run(PACT(alpha=6), x, stored(INT4), True)
    assert p["alpha"].grad == 1 - 3
    _, _, p = run(PACT(alpha=6), x, stored(AFFINE, 0.25, 8), True)
    assert (p["alpha"].grad, p["beta"].grad) == (1, 3)


@pytest.mark.parametrize("alpha, beta, ends", [(-3.0, -6.0, (-6, 0)), (6.0, 3.0, (0, 6)), (4.0, -2.0, (-2, 4))])
def test_pact_keeps_zero_inside_its_range(alpha, beta, ends):
    algorithm, p, grid = ready(PACT(), stored(AFFINE, 0.25, 8), None, 1)
    found = algorithm.ends(TorchOps, {**p, "alpha": torch.tensor(alpha), "beta": torch.tensor(beta)}, grid)
    assert tuple(map(float, found)) == ends


def test_dorefa_by_hand():
    """tanh of [-2, 0.1, 1] over that of 2 is [-1, 0.1034, 0.7900]; the scale is 2 / 15, all but the guard."""
    form, w = DoReFa(), torch.tensor([-2.0, 0.1, 1.0])
    _, y, p = run(form, w, stored(INT4))
    assert y.tolist() == pytest.approx([-1.0667, 0.1333, 0.8], abs=1e-4)
    assert form.numbers(TorchOps, p, INT4)[0].item() == pytest.approx(2 / 15, rel=2e-5)
    t = form.reals(TorchOps, w, p, INT4)
    assert t.abs().max() <= 1
    assert torch.equal(form.reals(TorchOps, -w, p, INT4), -t)
    assert form.reals(TorchOps, torch.zeros(3), p, INT4).tolist() == [0, 0, 0]


@pytest.mark.parametrize("scale", [0.01, 0.25, 100.0])
def test_dorefa_passes_the_gradient_of_its_transform(scale):
    """t = tanh(w) / tanh(2) of [2, -0.5, 0.1]: dt/dw = (1 - tanh(w)^2) / tanh(2), and through the maximum. 2 becomes
    1, which 4 bits clip to 14 / 15: as in the paper, which clips nothing, that blocks no gradient."""
    w = torch.tensor([2.0, -0.5, 0.1])
    x, y, _ = run(DoReFa(), w, stored(INT4, scale))
    assert y.tolist() == pytest.approx([14 / 15, -8 / 15, 2 / 15], abs=1e-4)
    slope = [1 - math.tanh(v) ** 2 for v in (2.0, -0.5, 0.1)]
    most = math.tanh(2)
    through_most = -(math.tanh(-0.5) + math.tanh(0.1)) / most**2 * slope[0]
    assert x.grad.tolist() == pytest.approx([through_most, slope[1] / most, slope[2] / most], abs=1e-5)


def test_dorefa_clips_activations_to_one():
    """Fifteenths of [0, 1]; 2 / 15 on signed grids."""
    x, y, _ = run(DoReFa(), torch.tensor([-0.2, 0.52, 1.3]), stored(UINT4, 9.0), True)
    torch.testing.assert_close(y, torch.tensor([0, 8 / 15, 1]))
    assert x.grad.tolist() == [0, 1, 0]
    x, y, _ = run(DoReFa(), torch.tensor([-1.1, -0.5, 0.5]), stored(INT4), True)
    torch.testing.assert_close(y, torch.tensor([-16 / 15, -8 / 15, 8 / 15]))
    assert x.grad.tolist() == [0, 1, 1]


def test_dorefa_may_keep_the_plans_range():
    """8 codes of 0.25: R = 2, and tanh(w) / tanh(2) of [-2, 0.1, 1] is [-1, 0.1034, 0.79]. Activations end at 3.75."""
    form, p, grid = ready(DoReFaRescaled(), stored(INT4), torch.ones(3), 1)
    w = form.reals(TorchOps, torch.tensor([-2.0, 0.1, 1.0]), p, grid)
    assert w.tolist() == pytest.approx([-2, 0.2068, 1.58], abs=1e-4)
    by_channel, p, grid = ready(DoReFaRescaled(), stored(INT4, [0.25, 0.5], axis=0), torch.ones(2, 2), 2)
    w = by_channel.reals(TorchOps, torch.tensor([[-2.0, 1.0], [0.5, 0.0]]), p, grid)
    assert w.flatten().tolist() == pytest.approx([-2, 1.58, 4, 0], abs=1e-4)
    x, y, _ = run(DoReFaRescaled(), torch.tensor([0.5, 3.7, 3.8]), stored(UINT4), True)
    assert (y.tolist(), x.grad.tolist()) == ([0.5, 3.75, 3.75], [1, 1, 0])


def test_dsq_by_hand():
    """alpha = 0.4: k = ln 4, slope 1.155245 in the middle of a cell, 0.739357 at its ends, 0 outside."""
    n = torch.arange(-8.0, 8.0)
    assert torch.allclose(DSQ().soft(TorchOps, n), n, atol=1e-6)
    assert torch.allclose(DSQ().soft(TorchOps, n + 0.5), n + 0.5, atol=1e-6)
    x, _, _ = run(DSQ(), torch.tensor([0.5, 3.0, -2.00001, 7.6, -9.0]), stored(INT4, 1.0), True)
    assert x.grad.tolist() == pytest.approx([1.155245, 0.739357, 0.739357, 0, 0], abs=1e-4)
    x = torch.linspace(-9, 9, 1001)
    assert torch.equal(run(DSQ(), x, stored(INT4, 1.0), True)[1], stored(INT4, 1.0).round(x))


def test_dsq_lies_between_a_staircase_and_straight_through():
    x = torch.tensor([0.1, 0.5, 0.9])
    slopes = {}
    for alpha in (0.001, 0.999):
        leaf, _, _ = run(DSQ(alpha=alpha), x, stored(INT4, 1.0), True)
        slopes[alpha] = leaf.grad.tolist()
    assert slopes[0.999] == pytest.approx([1, 1, 1], abs=1e-2)
    assert slopes[0.001][1] > 3 > 0.05 > slopes[0.001][0]
    for alpha in (0.0, 1.0, -1.0):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            DSQ(alpha=alpha)


# ---------------------------------------------------------------- QIL, APoT, NNIE, N2UQ, LUT


def test_qil_by_hand():
    """C + D becomes 1, C 1/2, C - D and what lies below 0; levels are sevenths."""
    form, p, grid = ready(QIL(), stored(INT4, 9.0), torch.tensor([-1.5]), 1)
    assert (p["center"], p["width"]) == (0.75, 0.75)
    p |= {"center": torch.tensor(0.5), "width": torch.tensor(0.25)}
    p["least"] = torch.tensor(0.01)
    x = torch.tensor([0.2, 0.25, 0.5, 0.75, -0.75, -0.1, 2.0])
    assert form.reals(TorchOps, x, p, grid).tolist() == [0, 0, 0.5, 1, -1, 0, 1]
    y = form.call(TorchOps, torch.linspace(-1.5, 1.5, 301), p, grid) * 7
    assert torch.allclose(y, y.round(), atol=1e-5)
    assert y.abs().max().item() == pytest.approx(7)
    assert form.reals(TorchOps, torch.tensor([0.3]), p, grid) == 1  # C, D at most max|x| / 2
    unsigned, p, grid = ready(QIL(), stored(UINT4), None, 1)
    assert (p["center"], unsigned.numbers(TorchOps, p, grid)[0].item()) == (1.875, pytest.approx(1 / 15))


def test_qil_may_keep_the_plans_range():
    """8 codes of 0.25: [0.2, 0.5, -0.75] becomes [0, 1, -2] with C = 0.5, D = 0.25; at first C = D = 1."""
    form, p, grid = ready(QILRescaled(), stored(INT4), torch.tensor([-1.5]), 1)
    assert (p["center"], p["width"]) == (1, 1)
    p |= {"center": torch.tensor(0.5), "width": torch.tensor(0.25)}
    assert form.reals(TorchOps, torch.tensor([0.2, 0.5, -0.75]), p, grid).tolist() == [0, 1, -2]


def test_apot_levels():
    """Magnitudes of 2, 3 and 4 bits, over the greatest; both signs; a scale that is the tensor's."""
    four = [n / 48 for n in (0, 1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 33, 36, 48)]
    for bits, levels in ((2, [0, 0.25, 0.5, 1]), (3, [0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1]), (4, four)):
        assert [m / magnitudes(bits)[-1] for m in magnitudes(bits)] == pytest.approx(levels)
    assert [len(magnitudes(b)) for b in range(1, 9)] == [2**b for b in range(1, 9)]
    grid = APoT().grid(INT4)
    assert grid.table == tuple(-v for v in reversed(grid.table))
    x = torch.linspace(-4, 4, 41)
    one, many = (run(APoTRescaled(), c * x, stored(INT4, c * 0.25), True)[1] for c in (1, 8))
    assert torch.equal(8 * one, many)
    y = run(APoT(), torch.tensor([5.7, -12.0, 0.5]), stored(INT4), True)[1]
    assert y.tolist() == pytest.approx([6, -6, 0.6])
    algorithm, p, grid = ready(APoT(), stored(INT4), X, 1)
    assert p["scale"].item() == pytest.approx(0.3)
    w = algorithm.reals(TorchOps, X, p, grid)
    assert (w.mean().item(), w.std(correction=0).item()) == (pytest.approx(0, abs=1e-6), pytest.approx(1))


def test_nnie_by_hand():
    """c = 4: magnitudes below half of the least level vanish."""
    x, y, p = run(NNIE(), torch.tensor([4.0, -4.0, 5.0, 0.9, 0.02, 0.001, 0.0083, 0.0080]), stored(LOG, 4.0), True)
    least = 2 ** (-95 / 16)
    assert y.tolist() == pytest.approx([4, -4, 4, 0.917004, 0.020263, 0, least, 0], abs=1e-6)
    assert least == pytest.approx(0.0163168, abs=1e-7)
    assert x.grad.tolist() == [1] * 8
    grid = NNIE().grid(LOG)
    assert grid.levels == 256
    zero = grid.table.index(0.0)
    assert -grid.table[zero - 1] == pytest.approx(2 ** (1 / 16) * grid.table[zero + 1])
    _, p, grid = ready(NNIE(), stored(LOG, 3.9), None, 1)
    assert 16 * math.log2(NNIE().numbers(TorchOps, p, grid)[0]) == pytest.approx(31, abs=1e-4)


def test_n2uq_has_thresholds_in_the_middle_of_its_intervals():
    """From 0 with intervals 1, 3, 1: thresholds 0.5, 2.5, 4.5; slopes are the inverse intervals."""
    grid = Grid(bits=2, qmin=0, qmax=3)
    form, p, own = ready(N2UQ(use_grad_scaling=False), stored(grid, 1.0), None, 1)
    with torch.no_grad():
        p["interval_2"] += 2
    x = torch.tensor([-1.0, 0.4, 0.6, 2.4, 2.6, 4.4, 4.6, 9.0], requires_grad=True)
    y = form.call(TorchOps, x, p, own)
    y.sum().backward()
    assert y.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert x.grad.tolist() == pytest.approx([0, 1, 1, 1 / 3, 1 / 3, 1, 1, 0])
    # of a_2: -(x - 1) / 9 within, -1 / a_3 in the interval behind
    assert p["interval_2"].grad.item() == pytest.approx(-1.4 / 9 - 1.6 / 9 - 2)


def test_n2uq_keeps_the_mean_magnitude_of_weights():
    at = stored(INT4, [0.25, 0.5], axis=0)
    w = torch.stack([X, 3 * X])
    form, p, own = ready(N2UQ(), at, w, 2)
    assert torch.allclose(form.reals(TorchOps, w, p, own), w)
    assert torch.allclose(form.reals(TorchOps, w * torch.tensor([[0.1], [7.0]]), p, own), w)


def test_lut_by_hand():
    """Table -4, 0, 1, 4 in units of 0.5: 0.3 and 1.2 take 1, 9 the end; ds = (1 - 0.6) + (1 - 2.4) + 4."""
    grid = Grid(bits=2, qmin=-8, qmax=7, kind="lut", entries=4, table=(-4.0, 0.0, 1.0, 4.0))
    x, y, p = run(LUT(use_grad_scaling=False), torch.tensor([0.3, 1.2, 9.0]), stored(grid, 0.5))
    assert y.tolist() == [0.5, 0.5, 2.0]
    assert p["scale"].grad.item() == pytest.approx((1 - 0.6) + (1 - 2.4) + 4)
    assert x.grad.tolist() == [1, 1, 0]
    assert p["levels"].tolist() == [-2.0, 0, 0.5, 2.0]  # two take the third, one the last; 0 never trains
    assert p["levels"].grad.tolist() == [0, 0, 2, 1]


def test_levels_stay_whole_numbers_of_the_chips_table_and_zero_stays():
    grid = Grid(bits=2, qmin=-8, qmax=7, kind="lut", entries=4, table=(-4.0, 0.0, 1.0, 4.0))
    algorithm, p, own = ready(LUT(), stored(grid, 0.5), X, 1)
    with torch.no_grad():
        p["levels"].copy_(torch.tensor([1.2, 3.6, 8.0, 1.28]))  # 2.4, fixed, beyond the end, 2.56
    x = torch.linspace(-1, 5, 50)
    y = algorithm.call(TorchOps, x, p, own)
    after = with_levels(own, algorithm.table(TorchOps, p, own).tolist())
    assert after.table == (0, 2, 3, 7)
    assert torch.equal(y, stored(after, 0.5).round(x))
    with torch.no_grad():
        p["levels"].copy_(torch.tensor([1.2, 3.6, 1.2, 1.2]))
    assert with_levels(own, algorithm.table(TorchOps, p, own).tolist()).table == (0, 2)


def test_a_table_that_is_not_free_keeps_its_levels():
    fixed = Grid(bits=2, qmin=-8, qmax=7, kind="lut", table=(-4.0, 0.0, 1.0, 4.0))
    assert set(LUT().init(stored(fixed), X)) == {"scale"}
    assert set(LUT(learn_levels=False).init(stored(replace(fixed, entries=4)), X)) == {"scale"}


@pytest.mark.parametrize(
    ("name", "grid", "role", "says"),
    [
        ("lut", INT4, "weight", "look-up table"),
        ("lut", Grid(bits=9, qmin=-128, qmax=127, kind="lut", entries=512, table=(0.0, 1.0)), "weight", "9 bits"),
        ("apot", Grid(bits=1, qmin=0, qmax=1), "activation", "1 bits"),
        ("apot", Grid(bits=9, qmin=-256, qmax=255), "weight", "9 bits"),
        ("apot", AFFINE, "activation", "around 0, and the format has a zero point"),
        ("apot", LOG, "weight", "another kind, log"),
        ("apot", Grid(bits=4, qmin=-8, qmax=7, kind="lut", entries=16), "weight", "do not fit"),
        ("nnie_log", TABLE, "weight", "another kind, lut"),
        ("nnie_log", Grid(bits=8, qmin=-1, qmax=1, kind="log", table=log_table(2.0, 8)), "weight", "16 codes"),
        ("n2uq", Grid(bits=8, qmin=0, qmax=255), "activation", "6 bits"),
        ("n2uq", Grid(bits=1, qmin=0, qmax=1), "activation", "2 to"),
        ("pact", INT4, "weight", "dorefa"),
        *((name, TABLE, "activation", "table") for name in ("pact", "dorefa", "dsq", "qil")),
    ],
)
def test_it_says_which_grids_it_cannot_hold(name, grid, role, says):
    assert says in create("training", name).refuses(grid, role)


@pytest.mark.parametrize("name", registered("training"))
@pytest.mark.parametrize("grid", ["int4", "affine"])
@pytest.mark.parametrize("role", ["weight", "activation"])
def test_a_bound_of_the_platform_moves_its_scale_by_a_factor_or_not_at_all(name, grid, role):
    algorithm, at = create("training", name), stored(GRIDS[grid], zero=3 if grid == "affine" else 0)
    if algorithm.refuses(at.grid, role) or role in algorithm.undeployable:
        pytest.skip("refused by name")
    algorithm, x = algorithm.for_tensor(at, role, (64,)), torch.randn(64) if role == "weight" else None
    p, own = algorithm.init(at, x), algorithm.grid(at.grid)
    moved = algorithm.rescaled(TorchOps, p, torch.tensor(0.5))
    given = {**algorithm.constants(at, x), "training": False}
    (s, z), (s_moved, z_moved) = (algorithm.numbers(TorchOps, {**given, **p, **q}, own) for q in ({}, moved))
    assert torch.equal(z, z_moved)
    torch.testing.assert_close(s_moved, s * (0.5 if moved else 1))
