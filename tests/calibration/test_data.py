"""Calibration data in every usual form, and what is left of labels."""

import itertools
from collections import UserDict, namedtuple
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from chipfit.calibration.data import (
    SizeMismatch,
    as_call,
    as_tensors,
    batches,
    call_without_label,
    first_batch,
    first_rows,
    iterate,
    split_label,
)
from chipfit.calibration.source import CalibrationData
from chipfit.errors import DataError
from chipfit.frameworks.torch.capture import capture
from tests.build import model_of

X = torch.arange(24.0).view(4, 6)
ONE = SimpleNamespace(forward=lambda x: x)
TWO = SimpleNamespace(forward=lambda x, y: x)
ANY = SimpleNamespace(forward=lambda *xs: xs)
NUMBERED = SimpleNamespace(forward=lambda x, timestep=None: x)
LOSS = SimpleNamespace(forward=lambda x, targets=None: x)
Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize("rows, sizes", [(15, [15]), (16, [16]), (17, [16, 1]), (33, [16, 16, 1])])
def test_one_big_array_is_cut_into_batches_of_sixteen(rows, sizes):
    for array in (torch.zeros(rows, 2), np.zeros((rows, 2), np.float32), lambda: torch.zeros(rows, 2)):
        assert [len(b) for b in iterate(array)] == sizes


@pytest.mark.parametrize("fixed, sizes", [(0, [16, 4]), (8, [8, 8]), (32, [20])])
def test_a_dict_of_arrays_is_cut_like_one_array(fixed, sizes):
    arrays = UserDict(ids=np.arange(20), image=torch.arange(40.0).reshape(20, 2))  # tokenizers return such a class
    batches = list(iterate(arrays, fixed))
    assert [{k: len(x) for k, x in b.items()} for b in batches] == [{"ids": n, "image": n} for n in sizes]
    assert all(torch.equal(b["ids"] * 2.0, b["image"][:, 0]) for b in batches)
    assert CalibrationData(arrays).count == 2


def test_iterables_are_walked_and_what_has_items_and_a_length_is_read_in_order():
    assert list(iterate([1, 2])) == list(iterate(lambda: iter([1, 2]))) == [1, 2]
    dataset = type("PyDataset", (), {"__len__": lambda s: 3, "__getitem__": lambda s, k: 10 * k})  # as Keras has it
    assert list(iterate(dataset())) == [0, 10, 20]


@pytest.mark.parametrize(
    "data, words",
    [
        (torch.tensor(1.0), "a single number"),
        ("text", "not batches of inputs. Got: str"),
        (b"text", "not batches of inputs. Got: bytes"),
        ({}, "not batches of inputs. Got: dict"),
        ({"x": X, "n": 3}, "not batches of inputs. Got: dict"),
        ({"x": torch.zeros(3, 2), "y": torch.zeros(4)}, "different numbers of samples. Got: 'x' 3, 'y' 4"),
        (nn.ReLU(), "not batches of inputs. Got: ReLU"),
        (nn.Sequential(nn.ReLU()), "not batches of inputs. Got: Sequential"),
        (7, "not batches of inputs. Got: int"),
        (lambda x: x, "needs arguments"),
    ],
)
def test_what_is_no_data_is_refused_by_its_type(data, words):
    with pytest.raises(DataError, match=words):
        iterate(data)


def test_the_first_batch_is_an_example_and_comes_again():
    (args, kwargs), rest = first_batch(iter([X, X + 1]), ONE)
    assert torch.equal(args[0], X) and kwargs == {} and [float(b[0, 0]) for b in rest] == [0, 1]
    with pytest.raises(DataError, match="empty"):
        first_batch([], ONE)


LABEL = torch.tensor([3, 1, 2, 0])


@pytest.mark.parametrize(
    "batch, model, inputs",
    [
        ((X, LABEL), ONE, 1),
        ((X, X), ONE, 1),  # one more than it takes is the label, whatever it is
        ((X, X, X), ONE, 3),
        ((X, X), TWO, 2),
        ((X, LABEL), TWO, 2),  # the model needs both, whatever they look like
        ((X, LABEL), NUMBERED, 2),
        ((X, LABEL), LOSS, 1),
        ((X, X[:, 0]), LOSS, 1),
        ((X, LABEL), ANY, 2),  # it may take both: the capture tries the call
        ((X, 5), ANY, 1),
        ((X, [1, 2]), ANY, 1),
        ((X, 5), TWO, 2),
        ((X, torch.tensor(3)), ANY, 2),
        ((X, X, LABEL), TWO, 2),
        ((X, X, X, LABEL), TWO, 4),  # more than can be explained
        (X, ONE, 1),
        (({"a": X}, LABEL), ONE, 1),
    ],
)
def test_what_the_model_takes_decides_what_is_a_label(batch, model, inputs):
    args, kwargs = call_without_label(batch, model)
    given = batch if isinstance(batch, tuple) else (batch,)
    assert len(args) == inputs and not kwargs and all(got is x for got, x in zip(args, given) if x is not given[0])


def test_two_samples_of_a_batch_are_enough_where_all_inputs_have_as_many():
    (x, n, s), kwargs = first_rows(((X, LABEL, torch.tensor(2.0)), {"y": X.T[:4]}))
    assert [len(x), len(n), s.dim(), len(kwargs["y"])] == [2, 2, 0, 2]
    for whole in ((X, X[:3]), (X[:1],), (X, torch.zeros(0, 4)), ((X, (X[:, :2], X.T)),)):
        assert first_rows((whole, {})) == (whole, {})


def test_names_are_those_of_the_models_arguments():
    named, anything = SimpleNamespace(forward=lambda x, y=1: x), SimpleNamespace(forward=lambda **kw: kw)
    assert as_call({"x": 1, "labels": 2}, named) == ((), {"x": 1})
    assert as_call({"x": 1, "labels": 2}, anything) == ((), {"x": 1, "labels": 2})
    assert as_call({"image": 1}, named) == (({"image": 1},), {})
    assert as_call({"image": 1}, object()) == ((), {"image": 1})
    assert as_call((1, 2), named) == as_call([1, 2], named) == ((1, 2), {})
    assert as_call(7, named) == ((7,), {})
    with pytest.raises(DataError, match="not input names"):
        as_call({"x": 1, 2: 3}, named)


def test_arrays_become_tensors_wherever_they_are():
    a = np.arange(6.0).reshape(2, 3)
    got = as_tensors({"x": a, "y": (a, [a, 1]), "z": Pair(a, 2), "numbers": [1, 2.5], "none": [], "t": X})
    x = got["x"]
    assert x.dtype is torch.float32 and x.tolist() == a.tolist()
    assert type(got["y"]) is tuple and type(got["y"][1]) is list and got["y"][1][0].tolist() == a.tolist()
    assert type(got["z"]) is tuple and got["z"][1] == 2
    assert got["numbers"] == [1, 2.5] and got["none"] == [] and got["t"] is X
    assert as_tensors([1, a])[1] is a  # a list that begins with a number is one of labels
    assert isinstance(as_tensors(np.float32(3)), np.float32)  # a number
    own = a.astype(np.float32)
    assert as_tensors(own).data_ptr() == own.ctypes.data  # no copy
    turned = as_tensors(a.astype(">f4").T[::-1])
    assert turned.tolist() == a.T[::-1].tolist() and turned.is_contiguous()
    assert as_tensors(a.astype(np.float16)).dtype is torch.float16

    jax = type("Jax", (), {"__array__": lambda s, dtype=None, copy=None: a})()
    assert as_tensors(jax).tolist() == a.tolist()
    for bad in (np.array(["text"]), np.array([object()])):
        with pytest.raises(DataError, match="an array that is not numeric"):
            as_tensors(bad)
    loop = []
    loop.append(loop)
    with pytest.raises(DataError, match="contains itself"):
        as_tensors(loop)


@pytest.mark.parametrize(
    "make, kind",
    [
        (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(nested|quantized) tensor")
def test_tensors_without_plain_numbers_are_refused(make, kind):
    x = make()
    with pytest.raises(DataError, match=f"without plain numbers. Got: {kind}"):
        as_tensors((X, x))


# ---------------------------------------------------------------- of a captured network


SUM = model_of(lambda m, a, b: a + b.sum(1, keepdim=True))


@pytest.fixture(scope="module")
def two():
    return capture(SUM, (torch.ones(2, 3), torch.ones(2, 5)))


@pytest.fixture(scope="module")
def one():
    return capture(nn.Linear(6, 2).eval(), (X[:2],))


def test_labels_are_what_stands_behind_the_inputs_or_is_called_so(two, one):
    a, b = torch.randn(4, 3), torch.randn(4, 5)
    flat, label = split_label((a, b), two)
    assert [len(x[0]) for x in flat] == [3, 5] and label is None
    assert split_label((a, b, LABEL), two)[1].tolist() == LABEL.tolist()
    assert split_label((X, [1, 2]), one)[1].tolist() == [1, 2]
    for batch in ((X, LABEL, LABEL), (a, b, LABEL, LABEL)):
        with pytest.raises(DataError, match=f"holds {len(batch)} items, and the model takes {len(batch) - 2}"):
            split_label(batch, one if len(batch) == 3 else two)
    with pytest.raises(DataError, match="must be numbers"):
        split_label((X, ["cat"]), one)


@pytest.mark.parametrize(
    "given, want",
    [
        (torch.eye(4)[[2, 0, 3]], [2, 0, 3]),
        (torch.eye(4)[[2, 0, 3]].long(), torch.eye(4)[[2, 0, 3]].long().tolist()),
        (torch.tensor([[1.0], [0.0]]), [[1.0], [0.0]]),
        (torch.tensor([[0.2, 0.8]]), [1]),
        (torch.tensor([0.5, 2.0]), [0.5, 2.0]),
        (torch.ones(2, 2, 2), [[[1, 1], [1, 1]]] * 2),
    ],
)
def test_one_hot_labels_become_numbers_of_classes(given, want, one):
    assert split_label((X, given), one)[1].tolist() == want


def test_named_inputs_need_no_order_and_a_label_has_its_usual_names():
    graph = capture(SUM, (), {"b": torch.ones(2, 5), "a": torch.ones(2, 3)})
    a, b = torch.randn(4, 3), torch.randn(4, 5)
    want = [x.tolist() for x in split_label({"a": a, "b": b}, graph)[0]]
    for name in ("labels", "label", "target", "y"):
        flat, label = split_label({name: LABEL, "b": b, "a": a}, graph)
        assert [x.tolist() for x in flat] == want and label.tolist() == LABEL.tolist()
    flat, label = split_label({"id": LABEL, "b": b, "a": a}, graph)
    assert [x.tolist() for x in flat] == want and label is None


@pytest.mark.parametrize("first, second, fits", [(4, 4, True), (4, 3, False), (1, 2, False)])
def test_all_inputs_of_a_batch_have_as_many_samples(two, first, second, fits):
    batch = torch.randn(first, 3), torch.randn(second, 5)
    if fits:
        assert len(split_label(batch, two)[0]) == 2
        return
    with pytest.raises(DataError, match=rf"different numbers of samples.*'a' {first}, 'b' {second}"):
        split_label(batch, two)


def test_the_kind_of_numbers_is_that_of_the_capture(one):
    embedding = capture(nn.Embedding(10, 2).eval(), (torch.tensor([[1, 2]]),))
    ints = torch.tensor([[3, 4]])
    assert split_label((X.double(),), one)[0][0].dtype is torch.float32
    assert split_label((ints.to(torch.uint8),), embedding)[0][0].dtype is torch.int64
    cases = [
        (X.long(), one, "holds integers, the model was captured with floats"),
        (X.to(torch.complex64), one, "holds complex numbers, the model was captured with floats"),
        (ints.float(), embedding, "holds floats, the model was captured with integers"),
        (ints.to(torch.complex64), embedding, "holds complex numbers, the model was captured with integers"),
        (7, one, "is not a tensor. Got: int"),
    ]
    for x, graph, words in cases:
        with pytest.raises(DataError, match=words):
            split_label((x,), graph)


def test_numbers_that_the_type_of_the_capture_does_not_hold_are_refused():
    small = capture(nn.Embedding(10, 2).eval(), (torch.tensor([[1, 2]], dtype=torch.int32),))
    for good in (torch.tensor([[2**31 - 1, -(2**31)]]), torch.tensor([[5, 255]], dtype=torch.uint8)):
        assert split_label((good,), small)[0][0].tolist() == good.tolist()
    wide = capture(nn.Embedding(10, 2).eval(), (torch.tensor([[1, 2]]),))
    bad = [
        (torch.tensor([[7, 2**31]]), small, str(2**31)),
        (torch.tensor([[-(2**31) - 1, 7]]), small, str(-(2**31) - 1)),
        (torch.tensor([[7, 2**63]], dtype=torch.uint64), wide, str(2**63)),
    ]
    for x, graph, words in bad:
        with pytest.raises(DataError, match=rf"holds numbers outside the range of .*{words}"):
            split_label((x,), graph)
    floats = capture(nn.Linear(2, 2).eval(), (torch.ones(2, 2),))
    assert split_label((torch.tensor([[1.0, float("inf")]], dtype=torch.float64),), floats)[0][0][0, 1] == float("inf")
    with pytest.raises(DataError, match="1e"):
        split_label((torch.tensor([[1.0, 1e300]], dtype=torch.float64),), floats)


def test_a_size_that_does_not_fit_tells_which_are_open(one):
    with pytest.raises(SizeMismatch, match=r"Got: \[4, 5\]. Allowed: \['batch', 6\]") as e:
        split_label((X[:, :5],), one)
    assert torch.equal(e.value.batch[0], X[:, :5])  # it may be read again with that size open
    with pytest.raises(SizeMismatch, match="an axis of size 0 holds nothing"):
        split_label((X[:, :0],), one)
    with pytest.raises(SizeMismatch, match="this is one sample") as e:
        split_label((X[0],), one)
    assert e.value.batch is None
    with pytest.raises(SizeMismatch, match=r"Got: \[2, 4, 6\]") as e:
        split_label((X.expand(2, 4, 6),), one)
    assert e.value.batch is None


def test_batches_without_samples_are_skipped_and_the_others_noted(one):
    noted = []
    data = [X, X[:0], (X[:1], LABEL[:1])]
    read = batches(data, one, lambda flat: noted.append(len(flat[0])))
    assert len(read) == 3 and [len(b[0]) for b in read] == noted == [4, 1]
    assert [len(b[0]) for b in batches(data, one)] == [4, 1]


def test_a_model_that_takes_one_dict_is_given_all_of_it():
    model = model_of(lambda m, batch: batch["a"] + batch["b"].sum(1, keepdim=True))
    graph = capture(model, ({"a": torch.ones(2, 3), "b": torch.ones(2, 5)},))
    a, b = torch.randn(4, 3), torch.randn(4, 5)
    flat, label = split_label({"a": a, "b": b}, graph)
    assert torch.equal(flat[0], a) and torch.equal(flat[1], b) and label is None
    assert split_label(({"a": a, "b": b}, LABEL), graph)[1].tolist() == LABEL.tolist()


def test_names_for_a_model_without_any_are_refused_with_what_to_write(two, one):
    with pytest.raises(DataError, match="captured with other inputs.*Try: yield tensors or tuples in the order") as e:
        split_label({"image": X, "other": X}, two)
    assert "Allowed: 2 positional and [] keyword arguments" in str(e.value)
    assert "['image', 'other'] keyword" in str(e.value)
    with pytest.raises(DataError, match="captured with other inputs") as e:
        split_label((X,), two)
    assert "yield tensors" not in str(e.value)


@pytest.mark.parametrize("call", [((X,),), ((), {"input": X})], ids=["by position", "by name"])
def test_a_model_of_one_input_takes_tensors_and_dicts_however_it_was_captured(call):
    graph = capture(torch.nn.ReLU(), *call)
    for batch in ((X, LABEL), {"input": X, "label": LABEL, "sample_rate": 16000}):
        (flat,), label = split_label(batch, graph)
        assert torch.equal(flat, X) and label.tolist() == LABEL.tolist()


@pytest.mark.parametrize("first", [True, False])
def test_a_number_beside_the_samples_says_nothing_of_how_many_there_are(first):
    def ordered(x):
        return (torch.tensor(2.0), x) if first else (x, torch.tensor(2.0))

    graph = capture(model_of(lambda m, a, b: a * b), ordered(torch.ones(2, 3)))
    assert [len(b[first]) for b in batches([ordered(X[:, :3]), ordered(X[:1, :3])], graph)] == [4, 1]
    if not first:
        assert len(list(batches([ordered(X[:0, :3]), ordered(X[:, :3])], graph))) == 1


def test_inputs_without_a_batch_axis_need_no_number_of_samples_in_common(two):
    graph = two.copy()
    graph.values = {**graph.values, "a": replace(graph.values["a"], shape=(4, 3))}
    graph.values["b"] = replace(graph.values["b"], shape=(2, 5))
    flat, _ = split_label((torch.ones(4, 3), torch.ones(2, 5)), graph)
    assert [len(x) for x in flat] == [4, 2]
    with pytest.raises(SizeMismatch, match=r"Input 'b' has the wrong shape. Got: \[3, 5\]. Allowed: \[2, 5\]"):
        split_label((torch.ones(4, 3), torch.ones(3, 5)), graph)


def test_a_dataset_that_says_that_it_never_ends_is_refused():
    class Repeated:  # a tf.data.Dataset after `repeat()`
        def cardinality(self):
            return torch.tensor(-1)

        def __iter__(self):
            yield from iter(lambda: torch.zeros(2, 4), None)

    with pytest.raises(DataError, match=r"never end.*Repeated.*take"):
        iterate(Repeated())


def test_a_dataset_of_keras_without_an_end_is_refused():
    class Endless:  # a keras.utils.PyDataset
        num_batches = None

        def __getitem__(self, k):
            return torch.zeros(2, 4)

        def __iter__(self):
            yield from map(self.__getitem__, itertools.count())

    class Unnumbered(Endless):
        @property
        def num_batches(self):
            raise NotImplementedError

    for data in (Endless(), Unnumbered()):
        with pytest.raises(DataError, match=r"never end.*dataset\[k\] for k in range"):
            iterate(data)
