"""Networks and images on which the formulas of rounding and search have no answer get a finite, usable one."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.rounding.compare import Reference
from chipfit.search.losses import losses
from tests.build import NEAREST, model_of, quantized, randn

FOUR = {"*": {"bits": 4, "activation_bits": 8}}
IMAGES = randn(64, 3, 6, 6, seed=1)
BLACK = torch.cat([torch.zeros(2, 3, 6, 6), IMAGES])


def net(times=1, outputs=4, root=False):
    """A convolution, another that may be called several times, and a linear layer."""
    torch.manual_seed(0)

    def forward(m, x):
        x = m.a(x)
        x = x / (torch.sqrt((x * x).sum(1, keepdim=True)) + 0.1) if root else torch.relu(x)
        for _ in range(times):
            x = torch.relu(m.b(x))
        return 4 * m.c(x.mean((2, 3)))

    layers = {"a": nn.Conv2d(3, 6, 3), "b": nn.Conv2d(6, 6, 3, padding=1), "c": nn.Linear(6, outputs)}
    return model_of(forward, **layers)


def fitted(model, images, **options):
    return quantized(model, images, "mqbench_academic", **{"overrides": FOUR, **options})


def changed(name, change, **how):
    """Return the network with a tensor changed in place."""
    model = net(**how)
    with torch.no_grad():
        change(model.get_parameter(name))
    return model


CASES = {
    "dead inputs": (changed("a.bias", lambda b: b[:3].sub_(100)), IMAGES),  # three channels are never above 0
    "constant outputs": (changed("b.weight", torch.Tensor.zero_), IMAGES),
    "one image, again and again": (net(), IMAGES[:1].expand(64, 3, 6, 6)),
    "images of one number": (net(), torch.full((64, 3, 6, 6), 0.5)),
    "a layer called three times": (net(3), IMAGES),
    "one output": (net(outputs=1), IMAGES[:1]),
    "a root of 0": (changed("a.bias", torch.Tensor.zero_, root=True), BLACK),
}


@pytest.mark.parametrize("model, images", CASES.values(), ids=CASES)
def test_rounding_and_search_end_with_finite_numbers_and_lose_no_more_than_nearest_codes(model, images):
    plain, best = (fitted(model, images, settings=s) for s in (NEAREST, chipfit.BEST))
    reference = Reference(plain.graph, [[images]])
    assert all(bool(w.isfinite().all()) for w in best.graph.weights.values() if w.is_floating_point())
    assert reference.loss(best.graph, best.plan) <= 1.1 * reference.loss(plain.graph, plain.plan) + 1e-9
    mixed = fitted(model, images, overrides={"*": {"activation_bits": 8}}, limits=chipfit.Limits(weights="50%"))
    bits = {n: t.grid.bits for n, t in mixed.plan.tensors.items() if t.role == "weight" and t.quantized}
    sizes = {n: mixed.graph.weights[n].numel() for n in bits}
    assert sum(sizes[n] * b / 8 for n, b in bits.items()) <= 0.5 * sum(sizes.values())


def test_slopes_without_end_hide_no_loss():
    """Channels are divided by their norm, a root of squares: of a black image 0, where the gradient is no number."""
    model = changed("a.bias", torch.Tensor.zero_, root=True)
    result = fitted(model, BLACK, settings=NEAREST)
    stored = [n for n, t in result.plan.tensors.items() if t.quantized and t.role != "bias"]
    found = losses(result.decision, result.plan, [[BLACK]], dict.fromkeys(stored, (2, 4, 8)))
    for name, row in found.items():
        assert row[2] > row[4] > row[8] > 0, name
