"""Steps: a pass of any stage, registered outside the package, takes effect when asked for; all steps have an order."""

import pytest
import torch

from chipfit import Settings
from chipfit.calibration.collect import Need
from chipfit.decide.constraints import Constraint
from chipfit.errors import RegistrationError
from chipfit.passes.rewriting import Adapted, Rewritten
from chipfit.platform.schema import Rule
from chipfit.registry import STAGES, Setting, entries, ordered, origin_of, register
from tests.build import model_of, quantized, randn

DATA = randn(16, 3, 6, 6)


def with_pass(stage, **declaration):
    """Register the decorated function as the pass "mine" of a stage, with a setting of that name."""
    return register("pass", "mine", stage=stage, setting=Setting("mine", False, "doc"), **declaration)


@pytest.fixture
def result(drop_ins):
    """Return a function that quantizes conv -> relu -> add -> linear, with the pass "mine" or without it."""
    parts = {"conv": torch.nn.Conv2d(3, 3, 3, padding=1), "last": torch.nn.Linear(108, 4)}
    net = model_of(lambda m, x: m.last((torch.relu(m.conv(x)) + x).flatten(1)), **parts)
    torch.nn.init.constant_(net.conv.bias, 20.0)

    def run(mine):
        found = quantized(net, DATA, settings=Settings(rounding="off", mine=mine))
        assert found.verify([DATA]).sound and ("mine took effect" in found.plan.rewrites) is mine
        return found

    return run


def test_a_rewrite_pass_changes_the_graph(result):
    @with_pass("rewrite", after=("fold_constants",))
    def mine(graph):
        graph = graph.copy()
        graph.nodes = [n.with_(op="Identity") if n.op == "Relu" else n for n in graph.nodes]
        return Rewritten(graph, ["mine took effect"])

    ops = [[n.op for n in result(on).graph.nodes] for on in (False, True)]
    assert ops == [["Conv2D", act, "Add", "Reshape", "Linear"] for act in ("Relu", "Identity")]


def test_a_formats_pass_ties_scales(result):
    @with_pass("formats")
    def mine(graph, assignment):
        add = graph.node("add")
        tie = Constraint(op="Add", rules=(Rule(tie=("ins", "out")),), slots={"ins": add.inputs, "out": add.outputs})
        return assignment.with_constraints([tie]), ["mine took effect"]

    scales = [{float(result(on).plan[t].scale) for t in ("x", "relu", "add")} for on in (False, True)]
    assert list(map(len, scales)) == [3, 1]


@pytest.mark.parametrize("stage", ["rewrite", "formats", "adapt", "results"])
def test_a_pass_of_any_stage_is_given_the_platform_that_it_needs(result, stage):
    names = []

    @with_pass(stage, needs=("platform",))
    def mine(graph, *given, platform):
        names.append(platform.name)
        unchanged = {"rewrite": (graph,), "formats": given, "adapt": (graph, *given[1:]), "results": ({},)}
        return *unchanged[stage], ["mine took effect"]

    if stage == "results":  # its notes are kept only with a choice
        quantized(torch.nn.Sequential(torch.nn.Linear(6, 4)), randn(8, 6), settings=Settings(mine=True))
    else:
        result(True)
    assert set(names) == {"ort_cpu"}


@pytest.mark.parametrize(
    ("stage", "needs", "allowed"),
    [("adapt", ("batches",), "platform"), ("correct", ("platform",), "stats, batches"), ("later", (), "rewrite, form")],
)
def test_a_stage_or_a_need_that_does_not_exist_is_refused_at_registration(drop_ins, stage, needs, allowed):
    with pytest.raises(RegistrationError, match=f"of a step is invalid.*Allowed: {allowed}"):
        with_pass(stage, needs=needs)(print)


def test_an_adapt_pass_rewrites_by_statistics_that_it_collects(result):
    @with_pass("adapt", collects=lambda graph, needs: {"conv2d": Need(histogram=False), **needs})
    def mine(graph, assignment, stats):
        relu, graph = graph.node("relu"), graph.copy()
        if stats[relu.data].low > 0:  # which no fused kernel stores, and calibration collects for this pass
            graph.nodes[1] = relu.with_(op="Identity")
        return Adapted(graph, dict(stats), ["mine took effect"])

    assert [result(on).graph.node("relu").op for on in (False, True)] == ["Relu", "Identity"]


def test_a_results_pass_chooses_what_a_kernel_outputs_by_statistics_that_it_collects(result):
    @with_pass(
        "results", after=("float_regions",), collects=lambda graph, needs: {"conv2d": Need(histogram=False), **needs}
    )
    def mine(graph, assignment, stats):
        last = graph.producers()[graph.outputs[0]].name
        assert stats["conv2d"].low > 0 and "float" in assignment.modes[last]
        return {last: "codes"}, ["mine took effect"]

    plans = [(found := result(on)).plan.quantized(found.graph.outputs[0]) for on in (False, True)]
    assert plans == [False, True]  # sums that a model returns are in float else


# ---------------------------------------------------------------- the order of all steps

STEPS = {s.name: (stage, s.declares) for stage in STAGES for s in ordered(stage)}
PASSES = {name: declares for name, (stage, declares) in STEPS.items() if stage != "correct"}


@pytest.mark.parametrize("name", [n for n, declares in PASSES.items() if declares.setting])
def test_a_rewrite_with_a_setting_of_its_name_is_off_unless_it_is_requested(name):
    setting = PASSES[name].setting
    assert setting.name == name and not setting.default


def test_a_pass_has_the_name_of_its_file_and_of_its_function():
    found = {name: origin_of(e.thing) for name, e in entries("pass").items()}
    assert found == {name: f"chipfit.passes.{name}.{name}" for name in found}


def test_rewrites_run_one_behind_the_other():
    """A network is folded, then merged, then scaled; biases are given last."""
    order = "fold_constants fold_batch_norm fold_affine duplicate_shared_biases collapse_linear collapse_residual "
    order += "relu_bound equalize add_missing_bias channels_last shift_negative softmax_shift centre equalize_groups"
    names = list(STEPS)
    assert sorted(order.split(), key=names.index) == order.split()
    assert names.index("fold_constants") < names.index("attention")
