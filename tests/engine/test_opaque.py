"""Operators without canonical name: found by name, from a list."""

from __future__ import annotations

import math
import operator
import os
import subprocess
import sys

import pytest
import torch

from chipfit.engine.opaque import fill, resolve_target, target_name
from chipfit.errors import GraphError, UnknownNameError
from chipfit.graph.ir import Ref


@pytest.mark.parametrize("target", [torch.ops.aten.topk.default, operator.getitem, math.ceil, torch.sym_max])
def test_a_name_stands_for_its_target(target):
    assert resolve_target(target_name(target)) is target


@pytest.mark.parametrize("name", ["aten.no_such", "os.system", "torch.load", "builtins.eval", "c10.anything", ""])
def test_what_is_not_listed_is_refused(name):
    with pytest.raises(GraphError, match="is not known to this version of torch"):
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


def test_a_callable_that_is_not_listed_has_no_name():
    with pytest.raises(GraphError, match="is not an operator that a graph can hold"):
        target_name(print)


def test_a_template_is_filled_with_inputs_types_and_devices():
    template = {"a": [Ref(1), 2], "b": {"torch": "float16"}, "c": {"torch": "device:cpu"}}
    assert fill(template, ["x", "y"]) == {"a": ["y", 2], "b": torch.float16, "c": torch.device("cpu")}
