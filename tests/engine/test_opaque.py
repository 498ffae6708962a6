"""Operators without canonical name: found by name, from a list."""

import math
import operator

import pytest
import torch

from chipfit.engine.opaque import OPERATORS, fill, repeatable, resolve_target, target_name, torch_operator
from chipfit.engine.types import constant_of
from chipfit.errors import GraphError, UnknownNameError
from chipfit.graph.ir import Ref
from tests.processes import LEAN, python


@pytest.mark.parametrize("target", [torch.ops.aten.topk.default, operator.getitem, math.ceil, torch.sym_max])
def test_a_name_stands_for_its_target(target):
    assert resolve_target(target_name(target)) is target


UNLISTED = """
    aten.no_such os.system torch.load builtins.eval c10.anything operator.call operator.attrgetter math.__name__
    aten.from_file.default aten.relu_.default other.sym_max sym_max torch.sym_max.default torch.relu
"""


@pytest.mark.parametrize("name", [*UNLISTED.split(), ""])
def test_what_is_not_listed_is_refused(name):
    with pytest.raises(GraphError, match="is not an operator that a graph can hold"):
        resolve_target(name)


@pytest.mark.parametrize("name", ["nothing:{}", "os:system", "..:x", ":"])
def test_a_framework_that_is_not_there_is_refused(name):
    with pytest.raises(UnknownNameError, match="There is no framework named"):
        resolve_target(name)


def test_a_frameworks_operator_is_found_where_nothing_has_imported_the_framework():
    pytest.importorskip("keras")
    code = """
import sys, torch
from chipfit.engine.opaque import resolve_target
assert "keras" not in sys.modules
layer = '{"module": "keras.layers", "class_name": "ReLU", "config": {}, "registered_name": null}'
print(resolve_target("keras:" + layer)([], [torch.tensor([-1.0, 2.0])], {}).tolist())
"""
    done = python(LEAN + code, KERAS_BACKEND="torch")
    assert done.stdout.strip() == "[0.0, 2.0]", done.stderr


def sym_max(a, b):
    """A function that only has the name of a listed one."""
    return a


@pytest.mark.parametrize("f", [print, torch.load, torch.ops.aten.from_file.default, sym_max])
def test_a_callable_that_is_not_listed_has_no_name(f):
    with pytest.raises(GraphError, match="is not an operator that a graph can hold.*Allowed: what chipfit/"):
        target_name(f)


def test_every_listed_operator_exists_and_only_computes():
    """None has a text argument but a few whose text chooses a way to compute; none returns without a result."""
    words = {"rounding_mode", "padding_mode", "approximate", "norm", "ord", "mode", "driver", "reduce", "equation"}
    words |= {"pad_mode", "interpolation", "indexing", "UPLO", "side", "padding", "unit", "p", "padding_side"}
    for namespace, name in ((ns, name) for ns in ("aten", "prims") for name in OPERATORS[ns]):
        packet = getattr(getattr(torch.ops, namespace), name)
        found = [f for o in packet.overloads() if (f := torch_operator(f"{namespace}.{name}.{o}")) is not None]
        found = [f for f in found if "Tensor" in str(f._schema)]  # some add numbers, or texts
        found = [f for f in found if "name" not in f._schema.overload_name.lower()]  # names of dimensions
        texts = {a.name for f in found for a in f._schema.arguments if "str" in str(a.type)}
        assert found and texts <= words, (name, texts)
        assert all(f._schema.returns and not f._schema.is_mutable for f in found), name


@pytest.mark.parametrize("name", ["cuda:1", "mps", "xpu:0", "hpu", "npu:3", "mtia", "xla:0", "privateuseone"])
def test_an_accelerator_in_a_file_is_the_cpu(name):
    assert constant_of(f"device:{name}") == torch.device("cpu")


@pytest.mark.parametrize("text", ["layer:cpu", "device:disk", "device:cuda:x", "device:", "cpu", "device:cpu:0:1"])
def test_only_devices_and_numeric_types_are_constants(text):
    assert constant_of("device:cpu") == torch.device("cpu") and constant_of("device:meta") == torch.device("meta")
    with pytest.raises(GraphError, match="is not a constant that a graph can hold"):
        constant_of(text)


@pytest.mark.parametrize(
    "name, in_place, found",
    [
        ("aten.relu", False, torch.ops.aten.relu.default),
        ("aten.relu.default", False, torch.ops.aten.relu.default),
        ("aten.add.Tensor", False, torch.ops.aten.add.Tensor),
        ("aten.relu_.default", True, torch.ops.aten.relu_.default),
        ("aten.relu_", True, torch.ops.aten.relu_.default),
        ("aten.relu.default", True, torch.ops.aten.relu.default),
        ("aten.relu_.default", False, None),
        ("aten.relu.nothing", False, None),
        ("aten.add.out", False, None),  # writes to what it is given
        ("aten.set_.source_Tensor", True, None),  # no listed operator with another end
        ("aten.from_file.default", True, None),
        ("aten.no_such_.default", True, None),
        ("nothing.relu.default", False, None),
    ],
)
def test_a_form_that_writes_to_its_operand_is_found_where_that_is_asked_for(name, in_place, found):
    assert torch_operator(name, in_place=in_place) is found


def test_calls_that_draw_numbers_or_belong_to_a_framework_are_not_repeatable():
    assert all(map(repeatable, ["aten.relu.default", "operator.add", "torch.sym_max"]))
    assert not any(map(repeatable, ["aten.rand.default", "aten.bernoulli.default", "keras:{}"]))


INDEX = [[0, -1, None], "...", 2, None, [Ref(0), None, 2]]
ITSELF = [{}, {"torch": "float16", "more": 1}, {"index": [1], "more": 2}, {"a": {}}, 7, "torch", None]


@pytest.mark.parametrize(
    "template, filled",
    [
        ({"a": [Ref(1), 2], "b": {"torch": "float16"}}, {"a": ["y", 2], "b": torch.float16}),
        ({"c": {"torch": "device:cpu"}}, {"c": torch.device("cpu")}),
        ([{"index": INDEX}], [(slice(0, -1, None), ..., 2, None, slice("x", None, 2))]),  # data, and an index again
        ((1, (Ref(0), [Ref(1)])), [1, ["x", ["y"]]]),  # sequences become lists
        *((t, t) for t in ITSELF),
    ],
)
def test_a_template_is_filled_with_inputs_types_devices_and_indices_at_any_depth(template, filled):
    assert fill(template, ["x", "y"]) == filled
