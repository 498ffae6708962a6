"""Every function-preserving rewrite, on random networks: the float outputs do not change."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from chipfit.calibration.collect import Need, collect
from chipfit.decide.assignment import assign
from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.check import check
from chipfit.passes.centre import centre, with_means
from chipfit.passes.collapse_linear import collapse_linear
from chipfit.passes.collapse_residual import collapse_residual
from chipfit.passes.duplicate_shared_biases import duplicate_shared_biases
from chipfit.passes.equalize import equalize
from chipfit.passes.equalize_groups import equalize_groups, with_channels
from chipfit.passes.fold_batch_norm import fold_batch_norm
from chipfit.passes.fuse import fuse
from chipfit.passes.relu_bound import relu_bound
from chipfit.passes.shift_negative import fuse_shifts, shift_negative
from chipfit.passes.softmax_shift import softmax_shift
from chipfit.platform.load import load
from chipfit.platform.match import fusions

ACTS = F.relu6, partial(F.hardtanh, min_val=-0.5, max_val=3.0), F.silu, F.gelu, F.hardswish
ACTS += partial(F.leaky_relu, negative_slope=0.02), F.relu, F.elu, F.mish


#: kind -> its layer for channels in and out and a drawn number
LAYERS = {
    "conv": lambda c, o, a: nn.Conv2d(c, o, 3, 1 + a % 2, a % 3, bias=a % 4 > 0, groups=2 if a % 5 == 0 else 1),
    "point": lambda c, o, a: nn.Conv2d(c, o, 1, bias=a % 4 > 0, padding=int(a % 7 == 0)),
    "depthwise": lambda c, o, a: nn.Conv2d(c, o, 3, padding=1, groups=c),
    "transposed": lambda c, o, a: nn.ConvTranspose2d(c, o, 2, 1, groups=2 if a % 2 else 1),
    "residual": lambda c, o, a: nn.Conv2d(
        c, o, 3, padding=1 + a % 2, dilation=1 + a % 2, groups=(1, 2, c)[a % 3], bias=a % 4 > 0
    ),
    "constant": lambda c, o, a: nn.ParameterList([torch.randn((1, c, 1, 1) if a % 2 else (1, 1, 1, 1))]),
}


class Drawn(nn.Module):
    """Linear operators of every kind, activations, what may stand between them, and places where rewrites must stop."""

    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        self.steps, self.layers, c = steps, nn.ModuleList(), 4
        for kind, a in steps:
            o = (4, 6, 8)[a % 3] if kind in ("conv", "point", "transposed") else c
            self.layers.append(LAYERS[kind](c, o, a) if kind in LAYERS else nn.Identity())
            c = o
        self.hidden, self.head = nn.Linear(c, 5), nn.Linear(5, 3)

    def forward(self, x):
        for (kind, a), layer in zip(self.steps, self.layers):
            if kind in ("conv", "point", "depthwise", "transposed"):
                x = layer(F.pad(x, (2, 2, 2, 2)) if x.shape[-1] < 4 else x)
            elif kind == "residual":
                x = layer(x) + x
            elif kind == "constant":
                x = x + layer[0] if a % 3 else x - layer[0]
            elif kind == "act":
                x = ACTS[a % len(ACTS)](x)
            elif kind == "pad":
                x = F.pad(x, (1, 0, 0, 1), mode="replicate") if a % 2 else F.pad(x, (1, 0, 0, 1), value=0.5 * (a % 3))
            elif kind == "pool" and x.shape[-1] > 3:
                pool = F.max_pool2d if a % 3 else partial(F.avg_pool2d, count_include_pad=a % 5 == 0)
                x = pool(x, 2, padding=a % 2)
            elif kind == "up" and x.shape[-1] < 8:
                x = F.interpolate(x, scale_factor=2, mode=("nearest", "bilinear")[a % 2])
            elif kind == "branch":
                x = torch.cat([x, x], 1)[:, : x.shape[1]] * 1.1
        return self.head(self.hidden(x.mean((2, 3)))).softmax(-1)


KINDS = "conv point depthwise transposed residual constant act act act pad pool up branch".split()
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 59)), min_size=1, max_size=7)


def _calibrated(rewrite, collects=lambda graph, needs: needs):
    """A rewrite that needs formats and statistics, on a platform whose activation scales are powers of two."""

    def on(graph, batches):
        platform = load("imx500")
        assignment = assign(graph, platform, fuse(graph, fusions(platform))[0])
        needs = collects(graph, {s: Need() for s in assignment.tensors if s not in graph.weights})
        stats = collect(graph, [[x] for x in batches], tensors=needs)
        new, _stats, notes = rewrite(graph, assignment, stats)
        assign(new, platform, fuse_shifts(new, fuse(new, fusions(platform))[0]))
        return new, notes

    return on


REWRITES = {
    "collapse_linear": lambda g, x: collapse_linear(g),
    "collapse_residual": lambda g, x: collapse_residual(g),
    "relu_bound": lambda g, x: relu_bound(g),
    "equalize": lambda g, x: equalize(g),
    "shift_negative": _calibrated(shift_negative),
    "shift_negative_always": _calibrated(lambda *a: shift_negative(*a, ratio=1e9)),
    "softmax_shift": _calibrated(softmax_shift),
    "centre": _calibrated(centre, with_means),
    "equalize_groups": _calibrated(equalize_groups, with_channels),
}


def check_all(steps: list[tuple[str, int]], seed: int) -> None:
    torch.manual_seed(seed)
    x, _ = batches = torch.randn(3, 4, 9, 9) * 3, torch.randn(2, 4, 9, 9)
    graph = capture(Drawn(steps).eval(), (x,), {})
    graph = duplicate_shared_biases(fold_batch_norm(graph)[0])[0]
    before = {k: v.clone() for k, v in graph.weights.items()}
    for name, rewrite in REWRITES.items():
        new, notes = rewrite(graph, batches)
        check(new, blame=name)
        for other in batches:
            (want,), (got,) = run(graph, [other]).values(), run(new, [other]).values()
            torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6, msg=lambda m, n=name, s=notes: f"{n}: {m} {s}")
        same = all(torch.equal(graph.weights[k], v) for k, v in before.items())
        assert same, f"{name} changed the graph that it was given"
        for k, v in run(new, [x], keep=set(new.values) - set(new.inputs)).items():
            assert tuple(new.values[k].shape)[1:] == v.shape[1:], f"{name}: '{k}' has another shape than the graph says"


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, seed=st.integers(0, 99))
def test_no_rewrite_changes_a_float_output(steps, seed):
    check_all(steps, seed)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, seed=st.integers(0, 9999))
def test_no_rewrite_changes_a_float_output_of_many_networks(steps, seed):
    check_all(steps, seed)
