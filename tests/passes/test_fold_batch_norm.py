"""Folding of batch norms: numbers worked on paper, and PyTorch's own layers in float64."""

import zlib

import pytest
import torch
from torch import nn

from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.folds import checksum
from chipfit.graph.ir import Node, Value
from chipfit.passes.fold_batch_norm import fold_batch_norm
from tests.build import graph_of, model_of, set_layer


def folded(model, x):
    graph, notes = fold_batch_norm(capture(model.eval(), (x,)))
    return graph, notes


def test_the_equation_on_paper():
    """k = gamma / sqrt(var + eps) = 3 / 0.5, -0.5 / 2; W' = k W; b' = (b - mean) k + beta. Jacob 2018, eq. 14."""
    conv, bn = set_layer(nn.Conv2d(1, 2, 1), [2.0, 4.0], [1.0, -1.0]), nn.BatchNorm2d(2, eps=0.05)
    set_layer(bn, [3.0, -0.5], [0.5, 2.0])
    bn.running_mean, bn.running_var = torch.tensor([4.0, 3.0]), torch.tensor([0.2, 3.95])
    graph, notes = folded(nn.Sequential(conv, bn), torch.randn(2, 1, 3, 3))
    assert graph.weights["0.weight"].flatten().tolist() == pytest.approx([12.0, -1.0], rel=1e-6)
    assert graph.weights["0.bias"].tolist() == pytest.approx([(1 - 4) * 6 + 0.5, (-1 - 3) * -0.25 + 2], rel=1e-6)
    assert [n.op for n in graph.nodes] == ["Conv2D"] and notes == ["folded batch norm '1' into '0'"]


def test_identities_before_a_batch_norm_are_left_out():
    class Copied(nn.Module):
        def forward(self, x):
            return x.clone().clone()

    net, x = nn.Sequential(nn.Conv2d(2, 3, 1), Copied(), nn.BatchNorm2d(3)).eval(), torch.randn(2, 2, 3, 3)
    graph, _ = folded(net, x)
    assert [n.op for n in graph.nodes] == ["Conv2D"]
    torch.testing.assert_close(*run(graph, [x]).values(), net(x))


#: as many channels in as out, so that a wrong axis keeps the shape
SQUARE = {
    "conv1d": (nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), (2, 4, 7)),
    "conv2d": (nn.Conv2d(4, 4, 4), nn.BatchNorm2d(4), (2, 4, 7, 6)),
    "conv3d": (nn.Conv3d(4, 4, 2), nn.BatchNorm3d(4), (2, 4, 4, 5, 3)),
    "grouped": (nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), (2, 4, 7, 6)),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8), (2, 4, 7, 6)),
    "transposed": (nn.ConvTranspose2d(4, 4, 3, 2), nn.BatchNorm2d(4), (2, 4, 5, 4)),
    "transposed, grouped": (nn.ConvTranspose2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), (2, 4, 5, 4)),
    "transposed, 1 axis": (nn.ConvTranspose1d(4, 4, 2, bias=False), nn.BatchNorm1d(4), (2, 4, 5)),
    "linear": (nn.Linear(4, 4), nn.BatchNorm1d(4), (5, 4)),
}


@pytest.mark.parametrize("name", SQUARE)
def test_the_channel_axis_is_that_of_the_outputs(name):
    linear, bn, shape = SQUARE[name]
    nn.init.uniform_(bn.running_mean, -1, 1)
    nn.init.uniform_(bn.running_var, 0.01, 3)
    nn.init.uniform_(bn.weight, -2, 2)
    nn.init.uniform_(bn.bias, -1, 1)
    bn.eps = 0.1
    net, x = nn.Sequential(linear, bn).eval(), torch.randn(shape)
    graph, _ = folded(net, x)
    assert "BatchNorm" not in {n.op for n in graph.nodes}
    (got,) = run(graph, [x]).values()
    want = net.double()(x.double())
    net.float()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def two(same, eps=1e-5):
    """Return one convolution that is applied twice, each time with a batch norm behind."""
    a, b = nn.BatchNorm2d(2), nn.BatchNorm2d(2, eps=eps)
    b = a if same else b
    b.load_state_dict(a.state_dict())
    return model_of(lambda m, x: m.a(m.conv(x)) + m.b(m.conv(x + 1)), conv=nn.Conv2d(2, 2, 1), a=a, b=b)


def test_a_shared_weight_is_folded_once_and_only_for_one_batch_norm():
    x = torch.randn(2, 2, 3, 3)
    graph, notes = folded(two(same=True), x)
    assert notes == ["folded batch norm 'a' into 'conv'"] and "BatchNorm" not in {n.op for n in graph.nodes}
    for eps in (1e-5, 0.5):  # equal numbers in other tensors, and another epsilon
        graph, notes = folded(two(same=False, eps=eps), x)
        assert sum(n.op == "BatchNorm" for n in graph.nodes) == 2
        assert all("is also read elsewhere, folding would change that reader" in n for n in notes)


def test_the_same_statistics_with_another_epsilon_are_another_batch_norm():
    def forward(m, x):
        a, b, bn = m.conv(x), m.conv(x + 1), m.bn
        given = bn.running_mean, bn.running_var, bn.weight, bn.bias
        return nn.functional.batch_norm(a, *given, eps=1e-5) + nn.functional.batch_norm(b, *given, eps=0.5)

    graph, _ = folded(model_of(forward, conv=nn.Conv2d(2, 2, 1), bn=nn.BatchNorm2d(2)), torch.randn(2, 2, 3, 3))
    assert sum(n.op == "BatchNorm" for n in graph.nodes) == 2


RETURNED = model_of(lambda m, x: (y := m.conv(x), m.bn(y)), conv=nn.Conv2d(2, 2, 1), bn=nn.BatchNorm2d(2))
#: a batch norm over axis 1 of [N, 3, 3]; the linear layer's outputs lie along axis 2
SEQUENCES = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    "model, shape, why",
    [
        (RETURNED, (2, 2, 3, 3), "does not fold backwards: the output of 'conv' is also read elsewhere"),
        (SEQUENCES, (2, 3, 3), "its channel axis is not the axis of the linear layer's outputs"),
        (nn.Sequential(nn.ReLU(), nn.BatchNorm2d(2)), (2, 2, 3, 3), "it follows Relu, which has no weights"),
        (nn.Sequential(nn.BatchNorm2d(2)), (2, 2, 3, 3), "it follows the input, which has no weights"),
    ],
)
def test_what_would_change_the_network_stays_and_says_why(model, shape, why):
    x = torch.randn(shape)
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(m.running_mean, -1, 1)
            nn.init.uniform_(m.running_var, 0.1, 3)
    graph, (note,) = folded(model, x)
    assert why in note
    want = model(x)
    got = list(run(graph, [x]).values())
    for a, b in zip(want if isinstance(want, tuple) else (want,), got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- a few nodes, with statistics that are left out


def normed(op="Conv2D", ins=("x", "a.weight"), norm=("g", "s", "m", "v"), *, shape=(None, 2, 4, 5)):
    """x -> linear operator y -> batch norm z, of two channels; None in `norm` where the operand is absent."""
    conv = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    names = iter("gsmv")
    weights = {n: torch.tensor(v) for n, v in zip(names, ([3.0, -0.5], [0.5, 2.0], [4.0, 3.0], [0.2, 3.95]))}
    weights |= {"a.weight": torch.randn(2, 2, 1, 1) if op != "Linear" else torch.randn(2, 2), "b": torch.randn(2)}
    layer = Node("a", op, tuple(ins), ("y",), {} if op == "Linear" else conv)
    bn = Node("n", "BatchNorm", ("y", *norm), ("z",), {"eps": 0.05})
    return graph_of(layer, bn, shape=shape, weights=weights, trainable={"a.weight"}, inputs=["x"])


@pytest.mark.parametrize("norm", ["gsmv", "--mv", "g-mv", "-smv"])
@pytest.mark.parametrize("bias", [False, True])
def test_what_a_batch_norm_leaves_out_counts_as_one_or_nothing(norm, bias):
    norm = tuple(None if n == "-" else n for n in norm)
    graph = normed(ins=("x", "a.weight", "b") if bias else ("x", "a.weight"), norm=norm)
    x = torch.randn(3, 2, 4, 5)
    new, notes = fold_batch_norm(graph)
    assert [n.op for n in new.nodes] == ["Conv2D"] and len(notes) == 1 and "y" not in new.values
    torch.testing.assert_close(run(new, [x])["z"], run(graph, [x])["z"])
    fold, name = new.folds["a.weight"], "b" if bias else "a.bias"
    assert (fold.bias, fold.gamma, fold.beta, fold.mean, fold.var) == (name, *norm)
    assert (fold.eps, fold.biased) == (0.05, bias) and name in new.trainable


@pytest.mark.parametrize(
    "norm, k, shift",
    [((None, None, "m", None), [1.05**-0.5] * 2, [-4.0, -3.0]), (("g", None, None, "v"), [6.0, -0.25], [0.0, 0.0])],
)
def test_statistics_that_are_left_out_are_mean_0_and_variance_1(norm, k, shift):
    graph = normed(norm=norm)
    new, _ = fold_batch_norm(graph)
    k, shift = torch.tensor(k), torch.tensor(shift)
    torch.testing.assert_close(new.weights["a.weight"], graph.weights["a.weight"] * k.view(2, 1, 1, 1))
    torch.testing.assert_close(new.weights["a.bias"], shift * k)
    assert new.folds == {}  # nothing to unfold it with


def test_a_saved_checksum_is_of_64_numbers_of_each_row_and_of_the_bias():
    """Plans on disk have it: another sample would refuse them."""
    weight, bias = torch.arange(2 * 200.0).reshape(2, 50, 2, 2), torch.tensor([1.0, 2.0])
    sample = weight.reshape(2, 200)[:, ::3].contiguous()
    assert checksum(weight, bias) == zlib.crc32(sample.numpy().tobytes() + bias.numpy().tobytes())


@pytest.mark.parametrize("computed", ["a.weight", "g", "v"])
def test_what_is_computed_is_not_folded(computed):
    graph = normed()
    graph.values[computed] = Value(computed, tuple(graph.weights.pop(computed).shape))
    new, notes = fold_batch_norm(graph)
    assert new.nodes == graph.nodes
    assert notes == ["batch norm 'n' does not fold backwards: a weight or statistic is computed at run time"]


def test_a_bias_that_another_operator_reads_stays():
    graph = normed(ins=("x", "a.weight", "b"))
    graph.nodes.append(Node("o", "Add", ("x", "b"), ("o",)))
    graph.values["o"] = Value("o", (None, 2, 4, 5))
    assert "is also read elsewhere, folding would change that reader" in fold_batch_norm(graph)[1][0]


@pytest.mark.parametrize("shape, folds", [((None, 2), True), ((None, 2, 2), False), ((2,), False)])
def test_linear_layers_fold_where_their_outputs_are_the_channels(shape, folds):
    new, _ = fold_batch_norm(normed("Linear", shape=shape))
    assert len(new.nodes) == (1 if folds else 2)


@pytest.mark.parametrize(
    "weight, bias", [("conv.weight", "conv.bias"), ("conv/kernel", "conv/bias"), ("table", "table_bias")]
)
def test_a_bias_is_called_as_its_weight_is(weight, bias):
    graph = normed(ins=("x", weight))
    graph.weights[weight] = graph.weights.pop("a.weight")
    assert fold_batch_norm(graph)[0].nodes[0].inputs == ("x", weight, bias)
    graph.weights[bias] = torch.zeros(1)  # a name that is taken
    assert fold_batch_norm(graph)[0].nodes[0].inputs[2] not in (bias, weight)


def test_what_stays_keeps_no_other_from_folding():
    """A batch norm of the input, one behind a weight that is read elsewhere, and one that folds."""

    def forward(m, x):
        x = m.second(m.tied(m.first(x)))
        return m.third(m.last(m.tied(x).relu()))

    norms = {k: nn.BatchNorm2d(2) for k in ("first", "second", "third")}
    net = model_of(forward, tied=nn.Conv2d(2, 2, 1), last=nn.Conv2d(2, 2, 1), **norms)
    x = torch.randn(2, 2, 3, 3)
    graph, notes = folded(net, x)
    assert notes[0] == "folded batch norm 'third' into 'last'" and len(notes) == 3
    assert any("it follows the input, which has no weights" in n for n in notes[1:])
    assert any("weight 'tied.weight' is also read elsewhere, folding would change that reader" in n for n in notes[1:])
    assert sum(n.op == "BatchNorm" for n in graph.nodes) == 2
