"""Networks and images on which the formulas of rounding and search have no answer get a finite, usable one."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import DataError
from chipfit.rounding.compare import Reference
from chipfit.search.losses import losses

FOUR = {"*": {"bits": 4, "activation_bits": 8}}
OFF, LIMITS = chipfit.Settings(rounding="off"), chipfit.Limits(weights="50%")
IMAGES = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(1))
BLACK = torch.cat([torch.zeros(2, 3, 6, 6), IMAGES])


class Net(nn.Module):
    """A convolution, another that may be called several times, and a linear layer."""

    def __init__(self, times: int = 1, outputs: int = 4, root: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, outputs)
        self.times, self.root = times, root

    def forward(self, x):
        x = self.a(x)
        x = x / (torch.sqrt((x * x).sum(1, keepdim=True)) + 0.1) if self.root else torch.relu(x)
        for _ in range(self.times):
            x = torch.relu(self.b(x))
        return 4 * self.c(x.mean((2, 3)))


def dead_inputs(net):
    with torch.no_grad():
        net.a.bias[:3] -= 100  # three channels that are never above 0


def no_bias(net):
    with torch.no_grad():
        net.a.bias.zero_()


def zero_weights(net):
    with torch.no_grad():
        net.b.weight.zero_()  # what comes out is the bias, whatever goes in


def tied(net):
    net.b = nn.Sequential(net.b, nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1))
    net.b[2].weight = net.b[0].weight


CASES = {
    "dead inputs": (Net(), dead_inputs, IMAGES),
    "constant outputs": (Net(), zero_weights, IMAGES),
    "one image, again and again": (Net(), None, IMAGES[:1].expand(64, 3, 6, 6)),
    "images of one number": (Net(), None, torch.full((64, 3, 6, 6), 0.5)),
    "a layer called three times": (Net(3), None, IMAGES),
    "tied weights": (Net(), tied, IMAGES),
    "one output": (Net(outputs=1), None, IMAGES[:1]),
    "a root of 0": (Net(root=True), no_bias, BLACK),
}


@pytest.mark.parametrize("net, change, images", CASES.values(), ids=CASES)
def test_rounding_and_search_end_with_finite_numbers_and_lose_no_more_than_nearest_codes(net, change, images):
    if change is not None:
        change(net)
    given = {"platform": "mqbench_academic", "progress": False}
    plain, best = (
        chipfit.quantize(net.eval(), [images], overrides=FOUR, settings=s, **given) for s in (OFF, chipfit.BEST)
    )
    reference = Reference(plain.graph, [[images]])
    assert all(bool(w.isfinite().all()) for w in best.graph.weights.values() if w.is_floating_point())
    assert reference.loss(best.graph, best.plan) <= 1.1 * reference.loss(plain.graph, plain.plan) + 1e-9
    mixed = chipfit.quantize(net, [images], overrides={"*": {"activation_bits": 8}}, limits=LIMITS, **given)
    weights = [n for n, t in mixed.plan.tensors.items() if t.role == "weight" and t.quantized]
    taken = sum(mixed.graph.weights[n].numel() * mixed.plan[n].grid.bits / 8 for n in weights)
    assert taken <= 0.5 * sum(mixed.graph.weights[n].numel() for n in weights)


def test_slopes_without_end_hide_no_loss():
    """Channels are divided by their norm, a root of squares: of a black image 0, where the gradient is no number."""
    net = Net(root=True)
    no_bias(net)
    result = chipfit.quantize(net.eval(), [BLACK], "mqbench_academic", overrides=FOUR, progress=False, settings=OFF)
    stored = [n for n, t in result.plan.tensors.items() if t.quantized and t.role != "bias"]
    widths = dict.fromkeys(stored, (2, 4, 8))
    found = losses(result.graph, result.plan, [[BLACK]], widths, result.stats)
    for name, row in found.items():
        assert row[2] > row[4] > row[8] > 0, name


def test_images_that_are_no_numbers_are_refused_with_the_batch_before_anything_is_rounded():
    bad = IMAGES.clone()
    bad[3, 0, 0, 0] = float("nan")
    with pytest.raises(DataError, match="Batch 1 makes NaN or infinite values in input"):
        chipfit.quantize(Net().eval(), [IMAGES, bad], "mqbench_academic", overrides=FOUR, progress=False)
