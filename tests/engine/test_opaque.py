"""Operators without canonical name: found by name, from a list."""

from __future__ import annotations

import math
import operator
import os
import subprocess
import sys

import pytest
import torch

from chipfit.engine.opaque import _LISTED, fill, resolve_target, target_name, torch_operator
from chipfit.engine.types import constant_of
from chipfit.errors import GraphError, UnknownNameError
from chipfit.graph.ir import Ref


@pytest.mark.parametrize("target", [torch.ops.aten.topk.default, operator.getitem, math.ceil, torch.sym_max])
def test_a_name_stands_for_its_target(target):
    assert resolve_target(target_name(target)) is target


UNLISTED = (
    "aten.no_such os.system torch.load builtins.eval c10.anything operator.call operator.attrgetter math.__name__"
)


@pytest.mark.parametrize("name", [*UNLISTED.split(), "aten.from_file.default", "aten.relu_.default", ""])
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
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[0.0, 2.0]", done.stderr


@pytest.mark.parametrize("f", [print, torch.load, torch.ops.aten.from_file.default])
def test_a_callable_that_is_not_listed_has_no_name(f):
    with pytest.raises(GraphError, match="is not an operator that a graph can hold"):
        target_name(f)


def listed():
    return [(ns, name) for ns, names in _LISTED.items() if ns in ("aten", "prims") for name in names]


def test_every_listed_operator_exists_and_only_computes():
    """None has a text argument but a few whose text chooses a way to compute; none returns without a result."""
    words = {"rounding_mode", "padding_mode", "approximate", "norm", "ord", "mode", "driver", "reduce", "equation"}
    words |= {"pad_mode", "interpolation", "indexing", "UPLO", "side", "padding", "unit", "p", "padding_side"}
    for namespace, name in listed():
        packet = getattr(getattr(torch.ops, namespace), name)
        found = [f for o in packet.overloads() if (f := torch_operator(f"{namespace}.{name}.{o}")) is not None]
        found = [f for f in found if "Tensor" in str(f._schema)]  # some add numbers, or texts
        texts = {a.name for f in found for a in f._schema.arguments if "str" in str(a.type)}
        assert found and texts <= words, (name, texts)
        assert all(f._schema.returns and not f._schema.is_mutable for f in found), name


def test_a_template_is_filled_with_inputs_types_and_devices():
    template = {"a": [Ref(1), 2], "b": {"torch": "float16"}, "c": {"torch": "device:cpu"}}
    assert fill(template, ["x", "y"]) == {"a": ["y", 2], "b": torch.float16, "c": torch.device("cpu")}


@pytest.mark.parametrize("text", ["layer:cpu", "device:disk", "device:cuda:x", "device:", "cpu", "device:cpu:0:1"])
def test_only_devices_and_numeric_types_are_constants(text):
    with pytest.raises(GraphError, match="is no constant that a graph can hold"):
        constant_of(text)


def test_a_device_may_have_a_number():
    assert constant_of("device:cpu") == torch.device("cpu")
    assert constant_of("device:cuda:1") == torch.device("cuda", 1)


def test_an_index_is_data_and_comes_back_as_an_index():
    template = {"index": [[0, -1, None], "...", 2, None, [Ref(0), None, 2]]}
    assert fill([template], [5]) == [(slice(0, -1, None), ..., 2, None, slice(5, None, 2))]
