"""What a platform says is done, or it is named as not done: on the terminal, in the check and in the report."""

from __future__ import annotations

import io

import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import chipfit
from chipfit.cli.app import app
from chipfit.platform.load import load
from chipfit.platform.modelled import not_modelled, whole_arithmetic
from chipfit.platform.schema import Platform
from chipfit.report.html import page
from chipfit.report.terminal import show


def said(**more):
    """What is not modelled of a platform with one format a8."""
    return not_modelled(Platform.model_validate({"name": "npu", "formats": {"a8": {"bits": 8}}, **more}))


def test_a_platform_without_such_words_names_none():
    assert said() == ()
    assert not_modelled(load("tflite_int16x8")) == ()


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
    assert [len(not_modelled(p)) for p in platforms.values()] == [1, 0]
    assert [whole_arithmetic(p) for p in platforms.values()] == [False, True]


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
