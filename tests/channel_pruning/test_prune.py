"""Structured pruning: networks shrink, keep their limits, and compute what the whole network computes without those
channels."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit import Limits
from chipfit.channel_pruning.budget import budgets_of, counts_of
from chipfit.channel_pruning.channels import channels_of
from chipfit.errors import ConfigError, PruningError, UnknownNameError
from chipfit.frameworks.torch.capture import capture
from tests import zoo
from tests.build import images, model_of, randn, sequential

LIKE_MCT = {"largest_value": True, "sole_readers": True}


def conv(i: int, o: int, kernel: int = 3, **options) -> nn.Conv2d:
    return nn.Conv2d(i, o, kernel, padding=kernel // 2, **options)


def norm(channels: int) -> nn.BatchNorm2d:
    """Return a batch norm with statistics of its own."""
    made = nn.BatchNorm2d(channels)
    made.running_mean.copy_(randn(channels, seed=3) / 4)
    made.running_var.copy_(randn(channels, seed=4).abs() + 0.5)
    with torch.no_grad():
        made.weight.copy_(randn(channels, seed=5).abs() + 0.2)
        made.bias.copy_(randn(channels, seed=6) / 3)
    return made


def chain() -> nn.Sequential:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4))
    return sequential(conv(3, 8), norm(8), nn.ReLU(), conv(8, 12), norm(12), nn.ReLU(), *head)


def residual() -> nn.Module:
    def forward(m, x):
        x = m.stem(x)
        x = F.relu(x + m.b(F.relu(m.a(x))))
        return m.fc(F.relu(m.down(x) + m.d(F.relu(m.c(x)))).mean((2, 3)))

    parts = {"a": conv(8, 10), "b": conv(10, 8), "c": conv(8, 12, stride=2), "d": conv(12, 16), "fc": nn.Linear(16, 4)}
    return model_of(forward, stem=conv(3, 8), down=conv(8, 16, 1, stride=2), **parts)


def joined() -> nn.Module:
    def forward(m, x):
        x = torch.cat([F.relu(m.a(x)), F.max_pool2d(m.b(x), 3, 1, 1), x], 1)
        first, second = m.c(x).split([5, 7], 1)
        return m.fc(torch.cat([second, first[:, 1:4]], 1).flatten(1))

    return model_of(forward, a=conv(3, 8), b=conv(3, 6), c=conv(17, 12), fc=nn.Linear(10 * 64, 4))


def grouped() -> nn.Module:
    layers = [conv(3, 12), nn.PReLU(12), conv(12, 8, groups=4), norm(8), nn.ReLU()]
    return sequential(*layers, conv(8, 6, 1), nn.ReLU6(), nn.Flatten(), nn.Linear(6 * 64, 4))


def normed() -> nn.Module:
    """Return a network with norms over channels, whose statistics change with those that go."""

    def forward(m, x):
        x = m.group(m.a(x)).flatten(2).transpose(1, 2)
        y = m.down(F.gelu(m.up(m.layer(x))))
        return m.fc((x + y).mean(1))

    parts = {"group": nn.GroupNorm(2, 8), "layer": nn.LayerNorm(8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
    return model_of(forward, a=conv(3, 8), fc=nn.Linear(8, 4), **parts)


def depthwise() -> nn.Module:
    layers = [conv(3, 10), norm(10), nn.Hardswish(), conv(10, 20, groups=10), norm(20), nn.ReLU6()]
    return sequential(*layers, conv(20, 7, 1), nn.Flatten(), nn.Linear(7 * 64, 4))


def shuffled() -> nn.Module:
    def forward(m, x):
        x = m.a(x)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return m.fc(F.pixel_shuffle(m.b(x), 2).mean((2, 3)))

    return model_of(forward, a=conv(3, 12), b=conv(12, 24, groups=2), fc=nn.Linear(6, 4))


def transposed() -> nn.Module:
    up = nn.ConvTranspose2d(8, 6, 2, stride=2)
    wide = nn.ConvTranspose2d(6, 6, 3, padding=1, groups=6)
    head = [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(80, 3)]
    return sequential(conv(3, 8), nn.ReLU(), up, nn.ReLU(), wide, conv(6, 5, 1), *head)


NETWORKS = [chain, residual, joined, grouped, normed, depthwise, shuffled, transposed]


def of_zoo(name: str) -> Callable[[], nn.Module]:
    """Return a function that makes a network of images that other tests share."""

    def made() -> nn.Module:
        return zoo.make(name)[0].eval()

    made.__name__ = name
    return made


NETWORKS += [of_zoo(name) for name in ("fire", "squeeze_excite", "unet_bilinear", "unet_transposed", "split")]


def prune(model: nn.Module, batches: object, **options) -> chipfit.Pruned:
    return chipfit.prune(model, batches, progress=False, **options)


def data(count: int = 24) -> list[torch.Tensor]:
    return list(images(count).split(8))


@pytest.mark.parametrize("network", NETWORKS, ids=lambda f: f.__name__)
def test_a_network_shrinks_to_its_limit(network):
    model = network()
    pruned = prune(model, data(), limits=Limits(bops="60%"))
    assert pruned.products[1] <= 0.6 * pruned.products[0]
    out = pruned.model(images())
    assert out.shape == model(images()).shape and bool(out.isfinite().all())
    assert {n for n, _ in pruned.model.named_parameters()} == {n for n, _ in model.named_parameters()}
    before = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in pruned.model.parameters()) < 0.9 * before


def kept_columns(whole: nn.Module, small: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return which columns of a layer's weight are left, found by their numbers."""
    before, after = (m.weight.detach() for m in (whole, small))
    if isinstance(whole, nn.ConvTranspose2d):
        before, after = before.transpose(0, 1), after.transpose(0, 1)
    before = before[rows]
    equal = [(before[:, [j]] == after).view(*after.shape[:2], -1) for j in range(before.shape[1])]
    return torch.stack([e.all(2).all(0).any() for e in equal])


@pytest.mark.parametrize("network", [f for f in NETWORKS if f is not normed], ids=lambda f: f.__name__)
def test_without_repair_the_network_computes_what_the_whole_one_does_without_these_channels(network):
    """Removed channels are cut where they are read: in the whole network, these columns of weights become 0."""
    model = network()
    pruned = prune(model, data(), limits=Limits(weights="60%"), repair=False)
    cut = 0
    for name, layer in model.named_modules():
        reads = isinstance(layer, (nn.Conv2d, nn.Linear, nn.ConvTranspose2d))
        if not reads or getattr(layer, "groups", 1) == getattr(layer, "in_channels", 0):
            continue  # a depthwise convolution loses its own channels
        rows = pruned.masks.get(name, slice(None))
        kept = kept_columns(layer, pruned.model.get_submodule(name), rows)
        w = layer.weight.detach()
        (w.transpose(0, 1) if isinstance(layer, nn.ConvTranspose2d) else w)[:, ~kept] = 0
        cut += int((~kept).sum())
    x = images(4, seed=9)
    assert cut > 0
    torch.testing.assert_close(pruned.model(x), model(x), rtol=1e-4, atol=1e-5)


def test_layers_of_a_sum_lose_the_same_channels():
    pruned = prune(residual(), data(), limits=Limits(bops="20%"))
    masks = pruned.masks
    assert torch.equal(masks["stem"], masks["b"]) and torch.equal(masks["down"], masks["d"])
    assert pruned.model.stem.out_channels == pruned.model.b.out_channels == int(masks["stem"].sum()) < 8


def test_repair_brings_the_outputs_closer():
    torch.manual_seed(1)
    model, x = chain(), images(64, seed=5)
    want = model(x).detach()
    errors = []
    for repair in (False, True):
        pruned = prune(model, data(128), limits=Limits(bops="60%"), repair=repair, importance="magnitude")
        errors.append(float((pruned.model(x).detach() - want).square().mean()))
    assert errors[1] < 0.3 * errors[0]


def test_dead_channels_are_removed_first_and_cost_nothing():
    model = chain()
    with torch.no_grad():
        model[3].weight[:, [1, 4, 6]] = 0  # nothing reads three of the eight
        model[0].weight[[1, 4, 6]] = 0
    limit = Limits(bops=64 * (64 * 3 * 9 * 5 + 64 * 5 * 9 * 12 + 48))  # 64 places; 5 channels, then 12
    for metric in ("fisher", "lfh"):
        pruned = prune(model, data(), limits=limit, importance=metric, repair=False)
        assert (~pruned.masks["0"]).nonzero()[:, 0].tolist() == [1, 4, 6]
        torch.testing.assert_close(pruned.model(images()), model(images()), rtol=1e-4, atol=1e-5)


def test_limits_count_the_largest_value_and_sole_readers_if_they_say_so():
    channels = channels_of(capture(residual(), (images(2),)))
    sole = 64 * (64 * (3 * 8 + 10 * 8) * 9 + 16 * 12 * 16 * 9 + 16 * 4)  # stem, b, d and fc
    both = 64 * (64 * 8 * 10 * 9 + 16 * 8 * (12 * 9 + 16))  # a, c and down, whose inputs others read, too
    for options, most in (({}, [64 * (8 + 10 + 10), sole + both]), (LIKE_MCT, [64 * 10, sole])):
        budgets = budgets_of(channels, Limits(activations=1e9, bops=1e9, **options))
        assert [b.used(counts_of(channels)) for b in budgets] == most


def test_channels_go_in_groups_of_simd_width():
    pruned = prune(chain(), data(), limits=Limits(bops="60%"), simd=4)
    assert {int(m.sum()) % 4 for m in pruned.masks.values()} == {0}
    assert pruned.products[1] <= 0.6 * pruned.products[0]


def test_the_platforms_simd_width_is_used():
    wide = sequential(conv(3, 96), nn.ReLU(), conv(96, 64), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 4))
    pruned = prune(wide, data(8), platform="imx500", limits=Limits(bops="70%"), repair=False)
    assert {int(m.sum()) % 32 for m in pruned.masks.values()} == {0}


def test_memory_limits_hold():
    model = residual()
    before = prune(model, data(), limits=Limits(weights="100%"))
    assert (
        before.parameters[0]
        == before.parameters[1]
        == sum(m.weight.numel() for m in model.modules() if hasattr(m, "weight"))
    )
    assert prune(model, data(), limits=Limits(weights=1500)).parameters[1] <= 1500
    peak = prune(model, data(), limits=Limits(activations="60%"))
    alive = 2 * 8 * 8  # of the stem's output [C, 8, 8] and what is computed from it
    assert int(peak.masks["stem"].sum()) * alive <= 0.6 * (8 + 10) * 64 + 64 * 8


def test_a_limit_that_would_remove_a_layer_is_refused_by_name():
    with pytest.raises(PruningError, match=r"limit on bops cannot be kept without removing whole .*at least.*'8' \("):
        prune(chain(), data(), limits=Limits(bops="1%"))
    with pytest.raises(PruningError, match="'0' \\(8 channels in groups of 32\\)"):
        prune(chain(), data(), limits=Limits(bops="50%"), simd=32)


def test_a_network_of_which_nothing_can_go_is_refused_with_the_reason():
    one = sequential(nn.Flatten(), nn.Linear(192, 4))
    with pytest.raises(PruningError, match="'1' \\(it is an output of the model\\)"):
        prune(one, data(), limits=Limits(bops="50%"))


def test_named_layers_keep_their_channels():
    pruned = prune(chain(), data(), limits=Limits(bops="70%"), keep=["3"])
    assert bool(pruned.masks["3"].all()) and not bool(pruned.masks["0"].all())
    with pytest.raises(UnknownNameError, match="layer with channels named 'convolution'"):
        prune(chain(), data(), limits=Limits(bops="70%"), keep=["convolution"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limits": Limits(loss=0.1)}, "'limits' is not allowed"),
        ({"limits": "70%"}, "'limits' is not allowed"),
        ({"limits": Limits(bops="70%"), "simd": 0}, "'simd' is not allowed"),
        ({"limits": Limits(bops="70%"), "importance": "taylor"}, "importance metric named 'taylor'"),
    ],
)
def test_wrong_options_are_refused_by_name(options, words):
    with pytest.raises((ConfigError, UnknownNameError), match=words):
        prune(chain(), data(), **options)


def test_the_smaller_network_trains_and_is_quantized_as_usual():
    pruned = prune(chain(), data(), limits=Limits(bops="60%"))
    net = pruned.model.train()
    mean = net[1].running_mean.clone()
    F.cross_entropy(net(images()), torch.zeros(8, dtype=torch.long)).backward()
    assert not torch.equal(net[1].running_mean, mean) and net[0].weight.grad is not None
    result = chipfit.quantize(net.eval(), data(), progress=False)
    assert result.verify(images()).exact


def test_code_that_fixes_sizes_gets_a_module_of_the_graph():
    def forward(m, x):
        return m.b(m.n(m.a(x)).relu().view(-1, 8 * 64))

    model = model_of(forward, a=conv(3, 8), n=norm(8), b=nn.Linear(512, 4))
    pruned = prune(model, data(), limits=Limits(bops="60%"))
    assert pruned.model(images()).shape == (8, 4) and type(pruned.model) is not type(model)
    assert {n for n, _ in pruned.model.named_parameters()} == {n for n, _ in model.named_parameters()}
    small, kept = pruned.model, pruned.masks["a"]
    assert small.a.weight.shape[0] == int(kept.sum()) < 8
    before = small.n.running_mean.clone()
    batch = F.conv2d(images(), small.a.weight, small.a.bias, padding=1).mean((0, 2, 3)).detach()
    small.train()(images())  # its batch norm follows the batch, as PyTorch's own does
    torch.testing.assert_close(small.n.running_mean, 0.9 * before + 0.1 * batch)


def test_what_was_removed_is_shown():
    text = str(prune(chain(), data(), limits=Limits(bops="60%")))
    assert "2 of 3 layers have fewer channels" in text and "it is an output of the model" in text
