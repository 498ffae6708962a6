"""What the model takes decides what is an input and which axis is the batch; sizes are open where data vary them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import chipfit
from chipfit.engine.trees import batch_axes
from chipfit.errors import DataError
from tests.build import model_of, quantized


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and bool((got - want).abs().mean() < 0.03 * want.abs().max())


class Timestep(nn.Module):
    """A denoiser: an image and the number of its step, which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.step, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Embedding(100, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x, timestep=None):
        h = self.image(x)
        h = h if timestep is None else h + self.step(timestep)[:, :, None, None]
        return self.out(F.relu(h))


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, ids, lengths):
        inside = (torch.arange(ids.shape[1]) < lengths[:, None]).float()[..., None]
        return self.out((self.words(ids) * inside).sum(1) / lengths[:, None].float())


class Loss(nn.Module):
    """A classifier that computes its loss if it is called with labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x, targets=None):
        y = self.net(x)
        return y if targets is None else F.cross_entropy(y, targets)


class NamedLoss(Loss):
    """Its labels are given by name alone."""

    def forward(self, x, *, targets=None):
        return super().forward(x, targets)


class Wrapper(Loss):
    def forward(self, *inputs):
        return self.net(*inputs)


class Careless(Loss):
    def forward(self, x, *others):
        return self.net(x)


class Shifted(nn.Module):
    """A decoder that reads its labels, one place later, if it is given nothing else to read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, ids, read=None, labels=None):
        read = F.pad(labels[:, :-1], (1, 0), value=2) if read is None else read
        return self.out(self.words(ids).mean(1, keepdim=True) + self.words(read))


def images():
    return torch.randn(4, 3, 8, 8), torch.randint(0, 100, (4,))


def sentences():
    return torch.randint(0, 50, (4, 12)), torch.randint(3, 12, (4,))


def labelled():
    return torch.randn(64, 8), torch.randint(0, 4, (64,))


@pytest.mark.parametrize(
    ("model", "make", "inputs"),
    [
        (Timestep, images, ["x", "timestep"]),
        (Lengths, sentences, ["ids", "lengths"]),
        (Loss, labelled, ["x"]),
        (Wrapper, labelled, ["inputs_0"]),
        (Careless, labelled, ["x"]),
    ],
)
def test_the_signature_and_the_call_decide_what_is_a_label(model, make, inputs):
    torch.manual_seed(0)
    network, data = model().eval(), [make() for _ in range(3)]
    result = quantized(network, data)
    assert result.graph.inputs == inputs and batch_axes(result.graph) == dict.fromkeys(inputs, 0)
    new = [x[:3] for x in make()[: len(inputs)]]
    with torch.no_grad():
        assert near(result.model(*new), network(*new))
    assert result.verify([make()]).sound


@pytest.mark.parametrize(("model", "inputs"), [(Loss, ["x"]), (NamedLoss, ["x"]), (Shifted, ["ids", "labels"])])
@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])
def test_named_labels_are_left_out_where_the_model_runs_without_them(model, inputs, platform):
    (x, y), ids = labelled(), torch.randint(0, 50, (16, 6))
    data = [{"x": x, "targets": y} if issubclass(model, Loss) else {"ids": ids, "labels": ids}] * 2
    result = quantized(model().eval(), data, platform)
    given = [data, [x]] if issubclass(model, Loss) else [data]  # one input needs no name
    assert result.graph.inputs == inputs and all(result.verify(d).exact for d in given)


class Recurrent(nn.Module):
    """One step of a stream: the state is [layers, batch, hidden], alone or as a pair."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.out = kind(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x, state):
        y, state = self.cell(x, state)
        return self.out(y), state


def step(kind, batch):
    h, c = torch.randn(2, batch, 16) / 3, torch.randn(2, batch, 16) / 3
    return torch.randn(batch, 2, 8), h if kind is nn.GRU else (h, c)


@pytest.mark.parametrize(("kind", "batch"), [(nn.GRU, 1), (nn.GRU, 2), (nn.LSTM, 1)])
def test_a_state_whose_batch_never_varies_keeps_it(kind, batch):
    torch.manual_seed(0)
    model = Recurrent(kind).eval()
    result = quantized(model, [step(kind, batch) for _ in range(3)])
    shapes = [result.graph.shape(i) for i in result.graph.inputs]
    assert shapes[:2] == [(batch, 2, 8), (2, batch, 16)] and batch_axes(result.graph) == {}
    assert result.verify([step(kind, batch)]).sound
    with pytest.raises(
        DataError, match="the batch size is fixed.* on axis 0 of|the batch size is fixed.*The model fails"
    ):
        result.verify([step(kind, batch + 1)])


@pytest.mark.parametrize(("kind", "by_example"), [(nn.GRU, False), (nn.LSTM, True)])
def test_a_state_follows_the_batch_where_data_vary_it(kind, by_example, tmp_path):
    torch.manual_seed(0)
    model, data = Recurrent(kind).eval(), [step(kind, 3), step(kind, 3)]
    result = quantized(model, data, example=step(kind, 2)) if by_example else quantized(model, [*data, step(kind, 2)])
    result.save(tmp_path / "saved")
    for r in (result, chipfit.load(tmp_path / "saved")):
        assert {r.graph.shape(i) for i in r.graph.inputs} == {(None, 2, 8), (2, None, 16)}
        assert set(batch_axes(r.graph).values()) == {0, 1}
        for batch in (1, 5):
            new = step(kind, batch)
            assert r.verify([new]).sound and r.verification.samples == batch
            with torch.no_grad():
                got, want = (tree_leaves(m(*new)) for m in (r.model, model))
            assert all(map(near, got, want))
    x, _ = step(kind, 4)
    with pytest.raises(DataError, match=r"different numbers of samples.*'x' 4.*axis 1 of 'state"):
        result.verify([(x, step(kind, 2)[1])])


class Messages(nn.Module):
    """A graph network: features of nodes [nodes, f], and edges [2, edges] or [edges, 2]."""

    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self.axis, self.first, self.second = axis, nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, edges):
        h, (start, end) = F.relu(self.first(x)), (edges.select(self.axis, k) for k in (0, 1))
        return self.second(torch.zeros_like(h).index_add_(0, end, h[start]))


def network(nodes, edges, axis=0):
    return torch.randn(nodes, 8), torch.randint(0, nodes, (2, edges) if axis == 0 else (edges, 2))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "sizes", [[(20, 60), (20, 60)], [(20, 20), (20, 20)], [(20, 60), (20, 50)], [(20, 60), (25, 50)]]
)
def test_numbers_of_nodes_and_edges_are_open_where_they_vary(axis, sizes):
    torch.manual_seed(0)
    model = Messages(axis).eval()
    result = quantized(model, [network(n, e, axis) for n, e in sizes])
    nodes, edges = (k if k == other else None for k, other in zip(*sizes, strict=True))
    assert [result.graph.shape(i) for i in result.graph.inputs] == [
        (nodes, 8), (2, edges) if axis == 0 else (edges, 2)
    ]  # fmt: skip
    new = [network(n, e, axis) for n, e in [sizes[0], (nodes or 12, edges or 33), (nodes or 30, edges or 80)]]
    assert result.verify(new).sound
    with torch.no_grad():
        assert all(near(result.model(*x), model(*x)) for x in new)


class Dense(Messages):
    def forward(self, x, adjacency):
        return self.second(adjacency @ F.relu(self.first(adjacency @ x)))


def dense(nodes):
    links = torch.rand(nodes, nodes)
    return torch.randn(nodes, 8), links / links.sum(1, keepdim=True)


def test_both_axes_of_an_adjacency_matrix_are_one_size():
    torch.manual_seed(0)
    # which holds out samples, where a batch can be cut into some
    model = quantized(Dense(), [dense(40)], settings=chipfit.Settings(rounding="gptq"))
    assert model.graph.shape("adjacency") == (40, 40) and model.verify([dense(40)]).sound
    assert quantized(Dense(), [dense(10), dense(10)]).graph.shape("adjacency") == (10, 10)
    result = quantized(Dense(), [dense(10), dense(14)])
    assert [result.graph.shape(i) for i in result.graph.inputs] == [(None, 8), (None, None)]
    assert result.verify([dense(8), dense(20)]).sound


def word(batch, before):
    return torch.randn(batch, 1, 16), ((torch.randn(batch, before, 16), torch.randn(batch, before, 16)),)


def test_a_cache_of_nested_tuples_has_an_open_length():
    """A decoder's step: keys and values of the words before, as ((key, value),)."""

    def forward(m, x, past):
        k, v = (torch.cat([old, layer(x)], 1) for old, layer in zip(past[0], (m.k, m.v), strict=True))
        return m.out((m.q(x) @ k.mT / 4).softmax(-1) @ v), ((k, v),)

    torch.manual_seed(0)
    model = model_of(forward, **{name: nn.Linear(16, 16) for name in ("q", "k", "v", "out")})
    result = quantized(model, [word(2, 5), word(2, 7), word(2, 3)])
    assert [result.graph.shape(i) for i in result.graph.inputs] == [(None, 1, 16), *[(None, None, 16)] * 2]
    new = word(1, 9)
    assert result.verify([new]).sound
    with torch.no_grad():
        got, want = (tree_leaves(m(*new)) for m in (result.model, model))
    assert all(map(near, got, want))


def test_a_vector_is_an_input_of_its_own():
    def forward(m, x, state):
        for k in range(len(x)):
            state = torch.tanh(m.first(x[k]) + m.second(state))
        return m.out(state), state

    network = model_of(forward, first=nn.Linear(8, 16), second=nn.Linear(16, 16), out=nn.Linear(16, 4))
    data = [(torch.randn(3, 8), torch.rand(16)) for _ in range(8)]
    result = quantized(network, data)
    assert [result.graph.shape(i) for i in result.graph.inputs] == [(3, 8), (16,)]
    assert result.verify(data).sound


def test_an_input_of_no_rows_before_the_samples_is_kept():
    forward = lambda m, past, x: m.second(F.relu(m.first(torch.cat([past, x]))))
    tracks = model_of(forward, first=nn.Linear(8, 16), second=nn.Linear(16, 4))
    data = [(torch.zeros(0, 8), torch.randn(4, 8)) for _ in range(3)]
    result = quantized(tracks, data)
    assert [result.graph.shape(i) for i in result.graph.inputs] == [(0, 8), (None, 8)]
    assert result.verify(data).sound


def test_a_size_that_the_model_refuses_is_named_with_its_axis():
    blocks = model_of(lambda m, x: m.dense(x).view(len(x), 4, 8, 4).relu(), dense=nn.Linear(4, 4))
    with pytest.raises(DataError, match=r"fails with 16 in place of 32 on axis 1 of float32\[2, 32, 4\]: RuntimeError"):
        quantized(blocks, [torch.randn(2, 32, 4), torch.randn(2, 16, 4)])


def test_a_batch_that_sets_the_groups_of_a_convolution_is_fixed():
    """A tracker correlates each image with a template of its own."""

    def correlated(m, template, x):
        n, c, h, w = template.shape
        y = F.conv2d(m.conv(x).reshape(1, n * c, *x.shape[2:]), template.reshape(n * c, 1, h, w), groups=n * c)
        return y.reshape(n, c, *y.shape[2:])

    tracker = model_of(correlated, conv=nn.Conv2d(3, 3, 1))
    data = [(torch.randn(2, 3, 2, 2), torch.randn(2, 3, 6, 6)) for _ in range(3)]
    result = quantized(tracker, data)
    assert [result.graph.shape(i)[0] for i in result.graph.inputs] == [2, 2]
    assert near(result.model(*data[0]), tracker(*data[0])) and result.verify(data).sound
