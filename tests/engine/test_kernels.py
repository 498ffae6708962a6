"""Every canonical operator runs, on the attributes that the table of operators gives it."""

from __future__ import annotations

import inspect
from pkgutil import resolve_name

import pytest
import torch

from chipfit.engine.kernels import _TORCH, KERNELS
from chipfit.graph.ops import OPS

PLAIN = {word.partition("=")[0] for words in _TORCH["plain"].values() for word in words.split()}
RENAMED = _TORCH["renamed"]


def parameters(function) -> set[str]:
    """Names that a function of Python or torch takes."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # torch's own are known by their schemas
        return {
            a.name for s in torch._C._jit_get_schemas_for_operator(f"aten::{function.__name__}") for a in s.arguments
        }


def test_every_operator_has_a_kernel_and_every_kernel_an_operator():
    assert set(KERNELS) == set(OPS)


def test_an_operator_is_registered_once():
    assert not PLAIN & set(RENAMED)


@pytest.mark.parametrize("op", sorted(RENAMED))
def test_a_renamed_attribute_is_the_operators_and_a_parameter_of_torch(op):
    function, names = RENAMED[op]
    ours, theirs = zip(*(name.split("=") for name in names.split()), strict=True)
    assert sorted(ours) == sorted(OPS[op].attrs)
    assert set(theirs) <= parameters(resolve_name(function))


@pytest.mark.parametrize("op", sorted(PLAIN))
def test_torch_takes_the_attributes_of_a_plain_operator_under_their_own_names(op):
    assert set(OPS[op].attrs) <= parameters(KERNELS[op])


@pytest.mark.parametrize("op", sorted(set(OPS) - PLAIN - set(RENAMED)))
def test_a_kernel_takes_the_attributes_of_its_operator_and_no_others(op):
    keywords = [p for p in inspect.signature(KERNELS[op]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert sorted(p.name for p in keywords if p.default is p.empty) == sorted(OPS[op].attrs)
