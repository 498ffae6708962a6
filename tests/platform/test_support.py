"""Every setting of a platform is implemented or listed as unsupported: on the terminal, in the check, in the report."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from chipfit.platform.load import load, names
from chipfit.platform.save import to_yaml
from chipfit.platform.schema import OpRule
from chipfit.platform.support import features_with_other_results, kernels_of, simulates_arithmetic, unsupported_features
from chipfit.report.html import page
from chipfit.report.terminal import render
from chipfit.simulate.integer import simulate
from tests.build import command, platform_file, platform_of, quantized


def test_each_unsupported_setting_is_listed_with_its_value_and_what_happens_instead():
    assert unsupported_features(platform_of()) == unsupported_features(load("tflite_int16x8")) == ()
    assert unsupported_features(platform_of(math={"act_table": {"kind": "pwl", "segments": 16}})) == (
        "math.act_table pwl: activations are computed in float32, then rounded",
    )


def test_a_stage_of_accumulation_counts_on_the_revisions_that_have_it():
    math = {"kernels": "onnxruntime", "acc": [{"bits": 16, "terms": 2, "sat": True, "when": {"arch": "<B"}}]}
    formats = {"u8": {"bits": 8, "signed": False}, "w8": {"bits": 8}}
    op = {"match": ["Linear"], "use": [{"in": "u8", "w": "w8", "out": "u8"}]}
    npu = platform_of(op, arch=["A", "B"], formats=formats, math=math)
    platforms = [npu.model_copy(update={"arch_selected": arch}) for arch in "AB"]
    assert [len(unsupported_features(p)) for p in platforms] == [1, 0]
    assert [simulates_arithmetic(p) for p in platforms] == [False, True]


def test_reports_and_commands_list_unsupported_settings(tmp_path):
    linear = {"match": ["Linear"], "use": [{"in": "a8", "w": "a8", "out": "a8"}]}
    chip = platform_of(linear, math={"act_table": {"kind": "pwl"}})
    (words,) = unsupported_features(chip)
    file = platform_file(tmp_path, to_yaml(chip))
    report = quantized(nn.Linear(3, 2), torch.randn(4, 3), file).report
    assert report.not_modelled == (words,)
    assert words in page(report)
    for shows in ("show", "check"):
        assert words.partition(":")[0] in command("platforms", shows, str(file)).output
    shown = Console(record=True, file=io.StringIO(), width=120)
    shown.print(render(report))
    assert words in shown.export_text()


def test_a_chip_that_truncates_is_simulated_truncating():
    """By hand: the sum times the multiplier in float32, its fraction cut off, the zero point added."""
    torch.manual_seed(0)
    x, chip = torch.randn(64, 4), load("tinyengine")
    chip = chip.model_copy(update={"ops": (OpRule.model_validate(LINEAR), *chip.ops)})
    result = quantized(nn.Linear(4, 2), x, chip)
    plan, graph = result.plan, result.graph
    [data], [out], node = graph.inputs, graph.outputs, graph.nodes[0]
    w, b = (plan[name].quantize(graph.weights[name]).long() for name in (node.weight, node.bias))
    acc = (plan[data].quantize(x).long() - plan[data].zero_point) @ w.T + b
    reals = acc.float() * (plan[data].scale * plan[node.weight].scale / plan[out].scale)
    zero = int(plan[out].zero_point)
    want = (reals.to(torch.int32) + zero).clamp(-128, 127).long()
    assert torch.equal(simulate(graph, plan, [x], chip)[out].long(), want)
    even = (torch.round(reals) + zero).clamp(-128, 127).long()
    assert not torch.equal(even, want)  # rounding to even differs on these data


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
    chips = ("tflite_int8", "edgetpu")
    promised = {name: quantized(nn.Linear(4, 2), x, name).verify([x], runtime="litert").promised for name in chips}
    assert promised == {"tflite_int8": True, "edgetpu": False}


def test_options_that_are_never_chosen_are_listed_with_the_platform_and_not_with_results():
    chip = load("tflm_cmsis_nn")
    assert any(words.endswith("the gate stays closed") for words in unsupported_features(chip))
    assert features_with_other_results(chip) == ()
