"""Operators that a file names stay inside of their own tensors, or refuse the call."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from chipfit.engine.opaque import listed, resolve_target
from chipfit.engine.operand_checks import checked
from chipfit.errors import OutOfBoundsError
from tests.build import model_of

X, IMAGE, IDS = torch.arange(12.0).reshape(3, 4), torch.randn(2, 3, 4), torch.tensor([0, 2, 1, 1])
THREE, TWO = torch.ones(3), torch.ones(2)
STATS = [THREE, torch.zeros(3), torch.zeros(3), THREE]
LSTM = [torch.randn(20, 4), torch.randn(20, 5), torch.randn(20), torch.randn(20)]
STATE = [torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)]
WRAPPING = torch.tensor([1 << 62, 1 << 62, 1 << 62, (1 << 62) + 5])
LEAST = torch.tensor([5, -(1 << 63)])
PART = torch.arange(100.0).reshape(10, 10)[:, :2]

#: operator -> arguments that torch accepts and that stay inside
FINE = {
    "aten.as_strided.default": (X, [2, 2], [4, 1], 1),
    "aten._native_batch_norm_legit_no_training.default": (IMAGE, *STATS, 0.1, 1e-5),
    "aten.native_batch_norm.default": (IMAGE, *STATS, False, 0.1, 1e-5),
    "aten._fft_r2c.default": (X, [1], 0, True),
    "aten._fft_c2r.default": (torch.complex(X, X), [1], 2, 6),
    "aten._weight_norm_interface.default": (X, torch.ones(3, 1), 0),
    "aten.lstm.input": (IMAGE, STATE, LSTM, True, 1, 0.0, False, False, True),
    "aten._embedding_bag.default": (X, IDS, torch.tensor([0, 2])),
    "aten.view.dtype": (X, torch.int32),
    "aten.upsample_bicubic2d.default": (X[None, None], [5, 6], False, 1.7, 1.5),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (IMAGE[None], IMAGE[None], IMAGE[None]),
    "aten.grid_sampler_2d.default": (X[None, None], torch.zeros(1, 2, 2, 2), 1, 2, True),
    "aten.zeros.default": ([2, 3],),
    "aten.tril_indices.default": (3, 3),  # whose type is int64 if none is given, an integer in its schema
    "aten.chunk.default": (X, 2),
    "aten.convolution.default": (IMAGE, IMAGE, None, [1], [3], [1], False, [0], 1),
    "aten.native_group_norm.default": (IMAGE, None, None, 2, 3, 4, 3, 1e-5),
    "aten.repeat_interleave.self_Tensor": (X, torch.tensor([0, 2, 1]), 0),
    "aten.div.Tensor": (LEAST, torch.tensor([3, -2])),
}


@pytest.mark.parametrize("name, args", FINE.items(), ids=FINE)
def test_a_checked_operator_computes_what_torch_does(name, args):
    op = listed(name)
    assert checked(op) is not op
    got, want = (torch.utils._pytree.tree_leaves(f(*args)) for f in (checked(op), op))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


#: operator, arguments that torch itself does not refuse, and the reason
OUTSIDE = [
    ("aten.as_strided.default", (X, [20000], [1]), "sizes"),
    ("aten.as_strided.default", (X, [2], [1 << 40]), "sizes"),
    ("aten._reshape_alias.default", (X, [13], [1]), "sizes"),
    ("aten.as_strided.default", (X[1:], [12], [1], 0), "sizes"),  # the row before
    ("aten.as_strided.default", (PART, [20], [1]), "sizes"),  # what stands between the columns
    (
        "aten._native_batch_norm_legit_no_training.default",
        (IMAGE, *STATS[:3], TWO, 0.1, 1e-5),
        "running_var has the sh",
    ),
    ("aten.native_batch_norm.default", (IMAGE, TWO, *STATS[1:], False, 0.1, 1e-5), "weight has the shape"),
    ("aten.native_batch_norm.default", (IMAGE, *STATS[:2], None, None, False, 0.1, 1e-5), "no running mean"),
    ("aten._fft_r2c.default", (X, [5], 0, True), "dim is"),
    ("aten._fft_r2c.default", (X, [1, 1], 0, True), "dim is"),
    ("aten._fft_c2r.default", (torch.complex(X, X), [1], 2, 100), "last_dim_size is 100"),
    ("aten._weight_norm_interface.default", (X, torch.ones(1, 1), 0), "g has the shape"),
    ("aten.lstm.input", (IMAGE, STATE, [torch.randn(0, 4), *LSTM[1:]], True, 1, 0.0, False, False, True), "do not fit"),
    ("aten.lstm.input", (IMAGE, STATE, LSTM[:2], True, 1, 0.0, False, False, True), "do not fit"),
    ("aten._embedding_bag.default", (X, IDS, torch.tensor([0, -2])), "offsets do not rise"),
    ("aten._embedding_bag.default", (X, IDS, torch.tensor([0, 9])), "offsets do not rise"),
    ("aten.embedding_bag.default", (X, IDS, torch.zeros(0, dtype=torch.long)), "offsets do not rise"),
    ("aten._embedding_bag.default", (X, IDS, torch.tensor([0]), False, 2, False, None, True), "in 1 offsets"),
    ("aten._embedding_bag.default", (X, IDS, torch.zeros(3, dtype=torch.bool)), "offsets torch.bool"),
    ("aten._scaled_dot_product_flash_attention_for_cpu.default", (torch.zeros(1, 2, 0, 4),) * 3, "have the shapes"),
    # sums and products that are small again in 64 bits
    ("aten.repeat_interleave.self_Tensor", (X, WRAPPING, 1), "repeats add up to 1.84e.19"),
    ("aten.repeat_interleave.Tensor", (WRAPPING,), "repeats add up to 1.84e.19"),
    ("aten.native_group_norm.default", (X, None, None, 4, (1 << 62) + 3, 1, 1, 1e-5), "N, C and HxW are"),
    ("aten.reshape.default", (X, [(1 << 62) + 3, 4]), "shape is"),
    # quotients that are beyond the greatest integer, on which x86 processors end the process
    ("aten.div.Tensor_mode", (LEAST, -torch.ones(2, dtype=torch.long)), "divided by -1"),
    ("aten.divide.Scalar_mode", (torch.tensor([-(1 << 31)]).int(), -1), "divided by -1"),
    ("prims.div.default", (LEAST, -torch.ones(2, dtype=torch.long)), "divided by -1"),
    ("aten.upsample_bicubic2d.default", (X[None, None], [6, 6], False, 1e-30, 2.0), "a scale is 1e-30"),
    ("aten.grid_sampler_2d.default", (X[None, None], torch.zeros(1, 2, 2, 2), 7, 0, True), r"are \(7, 0\)"),
    ("aten.binary_cross_entropy.default", (X[0, 0], X[:0]), "have the shapes"),
    ("aten.tensor_split.sections", (X, 1 << 31), "sections is"),
    ("aten.chunk.default", (X, 1 << 31), "chunks is"),
    ("aten.col2im.default", (torch.ones(1, 8, 4), [3, 3], [2, 2], [1, 1], [1 << 40, 0], [1, 1]), "padding is"),
    ("aten.view.dtype", (X, 9999), "dtype is 9999"),
    ("aten.to.prim_dtype", (X, 9999, False, False), "dtype is 9999"),
    ("aten.zeros.default", ([1 << 20, 1 << 20],), "size is"),
    ("aten.new_empty_strided.default", (X, [2], [1], 77), "dtype is 77"),
]


@pytest.mark.parametrize("name, args, why", OUTSIDE)
def test_a_call_that_would_leave_its_tensors_is_refused(name, args, why):
    mode = {"rounding_mode": "trunc"} if name.endswith("_mode") else {}
    with pytest.raises(OutOfBoundsError, match=f"would leave its own tensors: .*{why}"):
        resolve_target(name)(*args, **mode)


@pytest.mark.parametrize(
    "name, args", [("empty.memory_format", ([4],)), ("empty_like.default", (X,)), ("new_empty.default", (X, [5]))]
)
def test_new_tensors_hold_nothing_of_the_past(name, args):
    torch.full((4,), 7.25)  # and free it
    assert not resolve_target(f"aten.{name}")(*args).any()


@pytest.mark.parametrize(
    "name, args",
    [
        ("pow", (9, 1 << 40)),
        ("lshift", (1, 1 << 40)),
        ("mul", ("a", 1 << 40)),
        ("mul", ([0], 9)),
        ("mul", (1 << 40,) * 2),
    ],
)
def test_sizes_that_a_file_computes_are_integers_of_64_bits(name, args):
    with pytest.raises(OutOfBoundsError, match=f"'operator.{name}' computes sizes"):
        resolve_target(f"operator.{name}")(*args)
    assert resolve_target("operator.pow")(3, 4) == 81 and resolve_target("operator.add")(X, 1).equal(X + 1)


def test_checked_operators_can_be_traced():
    strided, empty = resolve_target("aten.as_strided.default"), resolve_target("aten.empty_like")
    views = model_of(lambda m, x: strided(x, [2, 2], [2, 1]) + empty(x[0, 0]))
    traced = torch.export.export(views, (X,)).module()
    assert torch.equal(traced(X), torch.tensor([[0.0, 1], [2, 3]]))


@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("cc"), reason="the guard is compiled")
def test_the_probe_notices_reads_outside_and_old_memory_and_finds_none_where_calls_are_checked(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root)
    from benchmarks.fuzz.memory import probe, written_calls

    calls = written_calls()
    calls["unchecked:aten._reshape_alias.default"] = calls["aten._reshape_alias.default"]
    calls["unchecked:aten.empty_like.default"] = [([calls["prims.device_put.default"][0][0][0]], {})]
    unsafe = [n for n in calls if n.startswith("unchecked:")]
    fine = [f"aten.{n}" for n in ("_reshape_alias.default", "lstm.input", "_embedding_bag.default", "view.dtype")]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'src'}")
    found = {(name, what) for name, what, count, _ in probe([*unsafe, *fine], calls, 0, 12) if what != "valid" or count}
    assert {n for n, what in found if what != "valid"} == set(unsafe)
    assert {(unsafe[0], "died"), (unsafe[1], "reads foreign memory")} <= found
    assert {(n, "valid") for n in fine} <= found
