"""What a platform says is done, or it is named as not done: on the terminal, in the check and in the report."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import chipfit
from chipfit.cli.app import app
from chipfit.platform.load import load, names
from chipfit.platform.schema import OpRule, Platform
from chipfit.platform.support import kernels_of, simulates_arithmetic, unsupported_features
from chipfit.report.html import page
from chipfit.report.terminal import show
from chipfit.simulate.integer import simulate
from tests.build import platform_of


def said(**more):
    """What is not modelled of a platform with one format a8."""
    return unsupported_features(platform_of(**more))


def test_a_platform_without_such_words_names_none():
    assert said() == ()
    assert unsupported_features(load("tflite_int16x8")) == ()


def test_each_word_names_the_field_the_value_and_what_happens_instead():
    assert said(math={"act_table": {"kind": "pwl", "segments": 16}}) == (
        "math.act_table pwl: activations are computed in float32, then rounded",
    )


def test_a_stage_of_accumulation_counts_on_the_revisions_that_have_it():
    math = {"kernels": "onnxruntime", "acc": [{"bits": 16, "terms": 2, "sat": True, "when": {"arch": "<B"}}]}
    formats = {"u8": {"bits": 8, "signed": False}, "w8": {"bits": 8}}
    op = {"match": ["Linear"], "use": [{"in": "u8", "w": "w8", "out": "u8"}], "src": ["M"], "conf": "V"}
    npu = {"name": "npu", "arch": ["A", "B"], "formats": formats, "ops": [op], "math": math}
    platforms = {arch: Platform.model_validate(npu).model_copy(update={"arch_selected": arch}) for arch in "AB"}
    assert [len(unsupported_features(p)) for p in platforms.values()] == [1, 0]
    assert [simulates_arithmetic(p) for p in platforms.values()] == [False, True]


def test_everybody_who_reads_about_a_platform_reads_them(tmp_path):
    (words,) = said(math={"act_table": {"kind": "pwl"}})
    text = """\
name: npu
formats: {a8: {bits: 8, zero: any}, w8: {bits: 8}}
ops: [{match: [Linear], use: [{in: a8, w: w8, out: a8}], src: [M], conf: V}]
math: {act_table: {kind: pwl}}
sources: {M: paper}
"""
    file = tmp_path / "npu.yaml"
    file.write_text(text)
    report = chipfit.quantize(nn.Linear(3, 2), [torch.randn(4, 3)], platform=file, progress=False).report
    assert report.not_modelled == (words,)
    assert words in page(report)
    for command in (["platforms", "show", str(file)], ["platforms", "check", str(file)]):
        assert words.partition(":")[0] in CliRunner().invoke(app, command).output
    shown = Console(record=True, file=io.StringIO(), width=120)
    show(report, shown)
    assert words in shown.export_text()


class Sum(nn.Module):
    """One product sum whose float result lies between two integers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x)


def integers(result, x, platform):
    return simulate(result.graph, result.plan, [x], platform)["linear"].long()


def test_a_chip_that_truncates_is_simulated_truncating():
    """By hand: the sum times the multiplier in float32, its fraction cut off, the zero point added."""
    torch.manual_seed(0)
    x, chip = torch.randn(64, 4), load("tinyengine")
    chip = chip.model_copy(update={"ops": (OpRule.model_validate(LINEAR), *chip.ops)})
    result = chipfit.quantize(Sum().eval(), [x], platform=chip, progress=False)
    plan, w = result.plan, result.graph.weights
    codes = plan["x"].quantize(x).long() - plan["x"].zero_point
    acc = codes @ plan["fc.weight"].quantize(w["fc.weight"]).long().T + plan["fc.bias"].quantize(w["fc.bias"]).long()
    reals = acc.float() * (plan["x"].scale * plan["fc.weight"].scale / plan["linear"].scale)
    zero = int(plan["linear"].zero_point)
    want = (reals.to(torch.int32) + zero).clamp(-128, 127)
    assert torch.equal(integers(result, x, chip), want.long())
    even = (torch.round(reals) + zero).clamp(-128, 127).long()
    assert not torch.equal(even, want.long())  # the old rule is another one on these data


LINEAR = {"match": ["Linear"], "use": [{"in": "a8", "w": "w8", "b": "b32", "out": "a8"}], "src": ["T1"], "conf": "V"}


@pytest.mark.parametrize("name", names())
def test_exactness_is_claimed_only_where_all_arithmetic_is_simulated(name):
    """What is named under math is what keeps the claim away, and a claim names the kernels that it rests on."""
    platform = load(name)
    gaps = [line for line in unsupported_features(platform) if line.startswith("math.")]
    assert simulates_arithmetic(platform) == (not gaps and kernels_of(platform) is not None)
    if simulates_arithmetic(platform):
        assert platform.math.kernels and platform.runtimes


def test_a_runtime_proves_no_chip_whose_arithmetic_is_unknown():
    pytest.importorskip("ai_edge_litert")
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    promised = {
        name: chipfit.quantize(Sum().eval(), [x], platform=name, progress=False).verify([x], runtime="litert").promised
        for name in ("tflite_int8", "edgetpu")
    }
    assert promised == {"tflite_int8": True, "edgetpu": False}
