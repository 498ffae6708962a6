"""The engine of integers itself: what is kept, moved, forced, accumulated, and which operators have integer kernels."""

from dataclasses import replace

import pytest
import torch

from chipfit.graph.ir import DYNAMIC, Graph
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.platform.load import load
from chipfit.registry import lookup
from chipfit.simulate.integer import (
    KernelCall,
    Simulation,
    accumulate,
    float_kernel,
    float_results,
    profile_for,
    simulate,
)
from tests.build import graph_of, node, plan_of, stored
from tests.simulate.one_operator import Codes, drawn, one

ORT, TFLITE = load("ort_cpu"), load("tflite_int8")


def tensor(name: str, role: str = "activation", **more) -> TensorPlan:
    return TensorPlan(name=name, role=role, stored=stored(**more))


def chain(*ops: str, attrs=None, exec="int", floats=(), **plan):
    """x -> ops -> v1, v2, ..., all stored in halves but for `floats`."""
    names = ["x", *(f"v{k}" for k in range(1, len(ops) + 1))]
    nodes = [
        node(f"{names[k + 1]} = {op}({names[k]})", (attrs or {}).get(op), name=f"n{k}") for k, op in enumerate(ops)
    ]
    plans = {n.name: NodePlan(name=n.name, op=n.op, exec=exec) for n in nodes}
    stored_ = plan_of(**{n: stored() for n in names if n not in floats})
    return graph_of(*nodes), replace(stored_, nodes=plans, **plan)


X = torch.tensor([[-2.0, -0.6, 0.7, 100.0]])


def test_all_values_are_returned_unless_some_are_named_and_outputs_always():
    graph, plan = chain("Relu", "Relu6", "Relu")
    assert list(simulate(graph, plan, [X], TFLITE)) == ["x", "v1", "v2", "v3"]
    assert list(simulate(graph, plan, [X], TFLITE, keep=["v1"])) == ["v1", "v3"]
    assert list(simulate(graph, plan, [X], TFLITE, keep=())) == ["v3"]
    found = simulate(graph, plan, [X], TFLITE)
    assert found["x"].tolist() == [[-4, -1, 1, 127]] and found["v1"].tolist() == [[0, 0, 1, 127]]
    assert found["v2"].tolist() == [[0, 0, 1, 12]] and found["v2"].dtype == torch.int8


def test_operators_read_the_devices_codes_where_these_are_given_but_their_own_are_returned():
    graph, plan = chain("Relu", "Relu")
    forced = torch.tensor([[5, -5, 3, 2]], dtype=torch.int8)
    found = simulate(graph, plan, [X], TFLITE, force={"v1": forced})
    assert found["v1"].tolist() == [[0, 0, 1, 127]] and found["v2"].tolist() == [[5, 0, 3, 2]]


def test_every_value_is_handed_over_as_it_is_computed():
    graph, plan = chain("Erf", "Relu", floats=("v2",))
    seen: dict = {}
    forced = torch.tensor([[5, -5, 3, 2]], dtype=torch.int8)
    simulate(graph, plan, [X], TFLITE, keep=(), force={"v1": forced}, each=lambda v, x, r: seen.update({v: (x, r)}))
    assert list(seen) == ["x", "v1", "v2"] and seen["v1"][0].tolist() == [[-2, -1, 1, 2]]  # its own, not the device's
    assert torch.equal(seen["v1"][1], torch.erf(torch.tensor([[-2.0, -0.5, 0.5, 63.5]])))
    assert seen["v2"][0].tolist() == [[2.5, 0.0, 1.5, 1.0]] and seen["v2"][1] is None


def test_codes_of_another_shape_are_not_read_and_floats_are_in_the_shape_that_was_computed():
    graph, plan = chain("Relu", "Relu")
    found = simulate(graph, plan, [X], TFLITE, force={"v1": torch.tensor([5, -5, 3, 2], dtype=torch.int8)})
    assert found["v2"].tolist() == [[0, 0, 1, 127]]
    floats, mixed = chain("Relu", "Relu", floats=("v1", "v2"), exec="float")
    for given, want in (([1.5, -1.0, 0.0, 0.0], [[1.5, 0.0, 0.0, 0.0]]), ([1.5, 2.0], [[0.0, 0.0, 0.5, 63.5]])):
        assert simulate(floats, mixed, [X], TFLITE, force={"v1": torch.tensor(given)})["v2"].tolist() == want


def test_a_value_that_is_read_before_its_quantizer_is_so():
    graph, plan = chain("Erf", "Sin", floats=("v2",), float_edges=frozenset({("v1", "n1")}))
    found = simulate(graph, plan, [X], ORT)
    codes = torch.erf(torch.tensor([[-2.0, -0.5, 0.5, 63.5]]))
    assert torch.equal(found["v2"], torch.sin(codes))
    graph, plan = chain("Erf", "Sin", floats=("v2",))
    assert torch.equal(simulate(graph, plan, [X], ORT)["v2"], torch.sin(torch.round(codes * 2) / 2))


@pytest.mark.parametrize(
    "bits, sat, least, most", [(8, True, -128, 127), (8, False, 127, -128), (None, False, -129, 128)]
)
def test_the_last_accumulator_wraps_around_or_saturates(bits, sat, least, most):
    stages = [{"bits": 4}, {"bits": bits, "sat": sat}] if bits else []
    math = ORT.math.model_copy(update={"acc": tuple(stages)})
    run = Simulation(Graph([], [], [], {}, {}), Plan(), profile_for(ORT), math)
    for value, found in ((-129.0, least), (128.0, most), (-128.0, -128), (127.0, 127)):
        assert run.summed(torch.tensor([value, 0.0])).tolist() == [found, 0]
    assert run.summed(torch.zeros(0)).numel() == 0
    blocks = ORT.math.model_copy(update={"acc": ({"bits": 8, "terms": 2},)})
    assert Simulation(run.graph, Plan(), run.profile, blocks).summed(torch.tensor([999.0])).tolist() == [999]


def results(graph, plan, name="onnxruntime"):
    return float_results(graph, plan, lookup("kernels", name))


def test_an_operator_runs_in_float_where_its_kernel_cannot_have_it():
    graph, plan = chain("Sigmoid", "Softmax")
    assert results(graph, plan) == set() and results(*chain("Erf")) == {"v1"}
    in_float = replace(plan, nodes={k: replace(n, exec="float") for k, n in plan.nodes.items()})
    assert results(graph, in_float) == {"v2"}  # a sigmoid between integers runs in its integer kernel all the same
    assert results(graph, replace(in_float, float_edges=frozenset({("x", "n0")}))) == {"v1", "v2"}
    assert results(graph, in_float, "litert_reference") == {"v1", "v2"}
    assert results(graph, replace(plan, nodes={"n0": plan.nodes["n0"]})) == {"v2"}
    for name, found in (("x", {"v1"}), ("v1", {"v1", "v2"}), ("v2", {"v2"})):
        wide = {**plan.tensors, name: tensor(name, bits=16)}
        assert results(graph, replace(plan, tensors=wide)) == found
        table = stored(low=0, high=3, bits=2, kind="lut", table=(-1.0, 0.0, 0.5, 1.0))
        other = {**plan.tensors, name: TensorPlan(name=name, role="activation", stored=table)}
        assert results(graph, replace(plan, tensors=other)) == found
    bare = {k: t for k, t in plan.tensors.items() if k != "x"}
    assert results(graph, replace(plan, tensors=bare)) == {"v1"}
    assert results(graph, replace(plan, float_edges=frozenset({("v1", "n1")}))) == {"v1"}


def test_a_fused_activation_must_be_one_that_the_kernel_clips():
    for act, found in (("Relu", set()), ("Tanh", {"v2"})):
        graph, plan = chain("Mul", act, groups=(("n0", "n1"),))
        graph.nodes[0] = graph.nodes[0].with_(inputs=("x", "x"))
        assert results(graph, plan, "litert_reference") == found


def test_operators_that_follow_move_codes_of_one_set_of_numbers_and_others_requantize():
    graph, plan = chain("MaxPool", exec="follow")
    assert results(graph, plan) == set()
    other = {**plan.tensors, "v1": tensor("v1", scale=0.25)}
    assert results(graph, replace(plan, tensors=other)) == set()  # the move itself requantizes
    graph, plan = chain("Erf", exec="follow")
    assert results(graph, plan) == {"v1"}


def unit(found, platform="tflite_int8", kernels=None) -> KernelCall:
    run = Simulation(found.graph, found.plan, profile_for(load(platform), kernels), load(platform).math)
    for name, x in zip(found.graph.inputs, found.inputs, strict=True):
        run.publish(name, x)
    return KernelCall(run, found.graph.nodes)


def dynamic(per="row", bits=8, act=None):
    """x -> quantized dynamically -> linear -> an activation, beside data that are quantized in another way."""
    other = node(f"o = {DYNAMIC}(x)", {"per": "tensor" if per == "row" else "row"}, name="o")
    nodes = [other, node(f"m = {DYNAMIC}(x)", {"per": per}, name="d"), node("v = Linear(m, w, -)", name="l")]
    graph = graph_of(*nodes, *([f"y = {act}(v)"] if act else []), weights=["w"])
    plan = replace(plan_of(w=stored(bits=bits)), nodes={"l": NodePlan(name="l", op="Linear", exec="int")})
    return graph, plan, graph.nodes[2:]


@pytest.mark.parametrize(
    "kernels, per, bits, act, found",
    [("litert_reference", "row", 8, None, True), ("litert_reference", "row", 4, None, True),
     ("litert_optimized", "row", 4, None, False), ("litert_optimized", "row", 8, None, True),
     ("litert_reference", "tensor", 8, None, False),
     ("onnxruntime", "tensor", 8, None, True), ("onnxruntime", "row", 8, None, False),
     ("litert_reference", "row", 8, "Relu", True), ("litert_reference", "row", 8, "Erf", False)],
)  # fmt: skip
def test_a_product_of_dynamic_data_is_exact_where_its_kernel_is_known(kernels, per, bits, act, found):
    graph, plan, nodes = dynamic(per, bits, act)
    exact = (plan, replace(plan, tensors={}), replace(plan, nodes={}))
    got = [float_kernel(graph, p, nodes, lookup("kernels", kernels)) is not None for p in exact]
    assert got == [found, False, False]


def test_a_fused_group_leaves_the_codes_of_its_last_member_alone():
    """x * x in steps of a half, clipped at zero: what lies between the two is no tensor."""
    graph, plan = chain("Mul", "Relu", groups=(("n0", "n1"),), floats=("v1",))
    graph.nodes[0] = graph.nodes[0].with_(inputs=("x", "x"))
    assert results(graph, plan, "litert_reference") == set()
    assert results(graph, plan) == {"v2"}  # zero is not the lowest code, at which ONNX Runtime would clip
    found = simulate(graph, plan, [X], TFLITE)
    assert list(found) == ["x", "v2"] and found["v2"].tolist() == [[8, 1, 1, 127]]
    forced = simulate(graph, plan, [X], TFLITE, force={"v2": torch.zeros(1, 4, dtype=torch.int8)})
    assert torch.equal(forced["v2"], found["v2"])
    in_float = replace(plan, nodes={**plan.nodes, "n0": NodePlan(name="n0", op="Mul")})
    found = simulate(graph, in_float, [X], ORT)
    assert list(found) == ["x", "v2"] and found["v2"].tolist() == [[8, 0, 0, 127]]  # 0.25 is half way: to even


def product(act: str | None = None, **weight):
    """x @ w -> an activation, of which only the operands are stored."""
    nodes = [node("v = Linear(x, w, -)", name="l")] + ([node(f"y = {act}(v)", name="a")] if act else [])
    plan = plan_of(x=stored(), w=stored(**weight))
    return graph_of(*nodes, weights=["w"]), replace(plan, nodes={"l": NodePlan(name="l", op="Linear", exec="int")})


def test_an_integer_product_hands_over_exact_reals_where_all_its_operands_are_codes():
    def exact(graph, plan, kernels="onnxruntime"):
        return float_kernel(graph, plan, graph.nodes, lookup("kernels", kernels)) is not None

    graph, plan = product()
    assert exact(graph, plan) and exact(*product("Relu")) and not exact(*product("Erf"))
    assert not exact(graph, plan, "litert_reference")  # its product hands over codes
    assert exact(*product(bits=4)) and not exact(*product(bits=9))
    table = {"kind": "lut", "table": (-1.0, 0.0, 0.5, 1.0), "bits": 2, "low": 0, "high": 3}
    assert not exact(*product(**table))
    for changed in (
        {"tensors": {"w": plan.tensors["w"]}},
        {"tensors": {"x": plan.tensors["x"]}},
        {"tensors": {**plan.tensors, "v": tensor("v")}},
        {"tensors": {**plan.tensors, "x": tensor("x", bits=16)}},
        {"float_edges": frozenset({("x", "l")})},
        {"nodes": {"l": NodePlan(name="l", op="Linear")}},
        {"nodes": {}},
    ):
        assert not exact(graph, replace(plan, **changed))
    x = torch.tensor([[1.0, -0.5, 2.0, 0.0]])
    assert simulate(graph, plan, [x], ORT)["v"].tolist() == [[2.5] * 4]


def summing(op: str, x, w, bias=None, bits: int = 20, **attrs) -> list[int]:
    """Sums of an operator in an accumulator of so many bits, which wraps around."""
    b = None if bias is None else Codes(torch.tensor(bias), 0.25, 0, 32)
    u = unit(one(op, [Codes(x, 0.5), Codes(w, 0.5), b], Codes(x), attrs))
    u.run.math = u.run.math.model_copy(update={"acc": ({"bits": bits},)})
    return accumulate(u.run, u.node).long().reshape(-1).tolist()


def test_a_sum_that_its_accumulator_may_not_hold_wraps_around():
    """40 products of -128 and -128 are 655360; 20 bits end at 524287, so 2^20 less is left."""
    low, conv = torch.full((1, 40), -128), {"stride": (1, 1), "dilation": (1, 1), "groups": 1}
    flat = {**conv, "padding": ((0, 0), (0, 0))}
    assert summing("Linear", low, low) == [655360 - (1 << 20)]
    assert summing("Linear", low[:, :31], low[:, :31]) == [31 << 14]
    assert summing("Linear", low[:, :32], low[:, :32]) == [-(1 << 19)]
    image = low.reshape(1, 40, 1, 1)
    assert summing("Conv2D", image, image, **flat) == [655360 - (1 << 20)]
    attrs = {**flat, "output_padding": (0, 0)}
    assert summing("TransposeConv2D", image, low.reshape(40, 1, 1, 1), **attrs) == [655360 - (1 << 20)]


@pytest.mark.parametrize("bias, total", [(524286, 524287), (524287, -524288), (-524289, -524288), (-524290, 524287)])
def test_a_bias_counts_towards_what_an_accumulator_holds(bias, total):
    one_ = torch.ones(1, 1, dtype=torch.long)
    assert summing("Linear", one_, one_, [bias]) == [total]
    image = one_.reshape(1, 1, 1, 1)
    how = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    assert summing("Conv2D", image, image, [bias], **how) == [total]


def branches() -> tuple[Graph, Plan]:
    """x -> Relu -> a, x -> Abs -> b, a -> Relu6 -> c: two branches, in halves."""
    graph = graph_of("a = Relu(x)", "b = Abs(x)", "c = Relu6(a)", outputs=["b", "c"])
    plans = {n.name: NodePlan(name=n.name, op=n.op, exec="int") for n in graph.nodes}
    return graph, replace(plan_of(x=stored(), a=stored(), b=stored(), c=stored()), nodes=plans)


@pytest.mark.parametrize("by", [1, -1])
def test_only_what_reads_other_codes_than_before_runs_again(by):
    graph, plan = branches()
    first = simulate(graph, plan, [X], TFLITE)
    assert [first[n].tolist() for n in "bc"] == [[[4, 1, 1, 127]], [[0, 0, 1, 12]]]
    same = {v: q.clone() for v, q in first.items()}
    again = simulate(graph, plan, [X], TFLITE, force=same, like=first)
    assert all(again[v] is first[v] for v in "abc")
    other = {**same, "a": torch.tensor([[5, 0, 1, 127 if by > 0 else 126]], dtype=torch.int8)}
    some = simulate(graph, plan, [X], TFLITE, force=other, like=first)
    assert some["a"] is first["a"] and some["b"] is first["b"] and some["c"].tolist() == [[5, 0, 1, 12]]
    lower = {**same, "a": first["a"] - 1}
    assert simulate(graph, plan, [X], TFLITE, force=lower, like=first)["c"].tolist() == [[0, 0, 0, 12]]
    assert all(torch.equal(v, simulate(graph, plan, [X], TFLITE)[k]) for k, v in first.items())


def test_what_did_not_run_again_keeps_its_reals():
    graph, plan = chain("Erf", "Sin", "Cos")
    plan = replace(plan, float_edges=frozenset({("v2", "n2")}))
    reals: dict = {}
    first = simulate(graph, plan, [X], ORT, floats=reals)
    before = dict(reals)
    again = simulate(graph, plan, [X], ORT, force=dict(first), like=first, floats=reals)
    assert all(again[v] is first[v] and reals[v] is before[v] for v in ("v1", "v2", "v3"))
    assert torch.equal(before["v3"], torch.cos(before["v2"])) and torch.equal(first["v3"], again["v3"])


def test_what_runs_again_reads_what_did_not_before_its_codes():
    """x -> Erf -> v, x -> Abs -> a, v before its rounding times a -> y; a device differs in a."""
    graph = graph_of("v = Erf(x)", "a = Abs(x)", "y = Mul(v, a)")
    plan = plan_of(x=stored(), v=stored(), a=stored(), float_edges={("v", "y")})
    reals: dict = {}
    first = simulate(graph, plan, [X], ORT, floats=reals)
    device = {**first, "a": torch.tensor([[4, 2, 6, 0]], dtype=torch.int8)}
    found = simulate(graph, plan, [X], ORT, force=device, like=first, floats=reals)["y"]
    want = torch.erf(torch.tensor([[-2.0, -0.5, 0.5, 63.5]])) * torch.tensor([[2.0, 1.0, 3.0, 0.0]])
    assert torch.equal(found, want) and not torch.equal(found, first["y"])


def test_what_is_fused_behind_exact_reals_runs_on_these():
    graph, plan = product("Relu")
    fused = replace(plan, groups=(("l", "a"),))
    x = torch.tensor([[1.0, -0.5, 2.0, 0.0], [-1.0, -0.5, -2.0, 0.0]])
    assert simulate(graph, fused, [x], ORT)["y"].tolist() == [[2.5] * 4, [0.0] * 4]
    clip = graph.nodes[1].with_(op="Clamp", attrs={"min": -3.0, "max": 2.0})
    graph.nodes = [graph.nodes[0], clip]
    assert simulate(graph, fused, [x], ORT)["y"].tolist() == [[2.0] * 4, [-3.0] * 4]
    assert list(simulate(graph, fused, [x], ORT)) == ["x", "y"]


def moved(op: str, inputs: dict, attrs: dict, scale: float, **grids):
    """A pass-through operator on operands in halves, and its result in steps of `scale`."""
    shapes = {n: tuple(x.shape) for n, x in inputs.items()}
    types = {n: str(x.dtype).removeprefix("torch.") for n, x in inputs.items()}
    graph = graph_of(node(f"y = {op}({', '.join(inputs)})", attrs, name="n"), shapes=shapes, dtypes=types)
    stored_ = {n: stored() for n, x in inputs.items() if x.is_floating_point()} | grids
    plan = plan_of(**stored_, y=stored(scale))
    plan = replace(plan, nodes={"n": NodePlan(name="n", op=op, exec="follow")})
    assert float_results(graph, plan, profile_for(TFLITE)) == set()
    return simulate(graph, plan, [*inputs.values()], TFLITE)["y"].tolist()


def test_moves_of_several_operands_go_by_floats_where_scales_differ_and_those_by_indices_copy():
    """LiteRT's GATHER looks at no scale."""
    a, b, at = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.5]]), torch.tensor([1, 0, 1])
    for scale, times in ((0.5, 1), (0.25, 2)):
        assert moved("Concat", {"a": a, "b": b}, {"axis": 1}, scale) == [[2 * times, -4 * times, 7 * times]]
        assert moved("Gather", {"a": a, "i": at}, {"axis": 1}, scale) == [[-4, 2, -4]]
    assert moved("Concat", {"a": a, "b": b}, {"axis": 1}, 0.5, b=stored(0.25, 1)) == [[2, -4, 7]]


def test_every_part_of_a_split_is_kept_in_codes_where_it_is_stored():
    x = torch.tensor([[1.0, -2.0, 3.5]])
    graph = graph_of(node("a, b = Split(x)", {"axis": 1, "sizes": (1, 2)}, name="n"))
    plan = plan_of(x=stored(), a=stored(), b=stored())
    follows = replace(plan, nodes={"n": NodePlan(name="n", op="Split", exec="follow")})
    for given in (follows, plan):
        found = simulate(graph, given, [x], TFLITE)
        assert found["a"].tolist() == [[2]] and found["b"].tolist() == [[-4, 7]] and found["b"].dtype == torch.int8
    assert results(graph, plan) == {"a", "b"}
    one_part = replace(follows, tensors={n: t for n, t in plan.tensors.items() if n != "b"})
    assert sorted(simulate(graph, one_part, [x], TFLITE)) == ["a", "x"]


def test_weights_are_rounded_once_and_kept_between_calls():
    graph, plan = product()
    kept: dict = {}
    simulate(graph, plan, [X], ORT, weights=kept)
    assert kept["w"].tolist() == [[2] * 4] * 4
    kept["w"] = kept["w"] * 0 + 1
    assert simulate(graph, plan, [torch.ones(1, 4)], ORT, weights=kept)["v"].tolist() == [[2.0] * 4]


def test_another_family_of_kernels_runs_instead_of_the_platforms_own():
    """A quarter is half a step: ONNX Runtime's rounding takes the even code, the reference kernels' the next one up."""
    assert profile_for(TFLITE, "onnxruntime") is lookup("kernels", "onnxruntime")
    assert profile_for(ORT) is lookup("kernels", "onnxruntime")
    graph, plan = chain("Mul")
    graph.nodes[0] = graph.nodes[0].with_(inputs=("x", "x"))
    x = torch.tensor([[0.5, 1.5, -0.5, 2.5]])  # products of 1, 9, 1 and 25 halves of halves
    found = [simulate(graph, plan, [x], TFLITE, kernels=k)["v1"].tolist() for k in ("onnxruntime", "litert_reference")]
    assert found == [[[0, 4, 0, 12]], [[1, 5, 1, 13]]]


@pytest.mark.parametrize("shape, zero", [((4, 4), 0), ((4, 4), 3), ((2, 4, 4), 0)])
def test_dynamic_products_are_exact_whatever_the_weights(shape, zero):
    """Data that fill the 256 codes of their tensor in steps of 1/16, times multiples of a quarter."""
    x, w = (
        torch.tensor([[-128.0, 127.0, 5.0, -7.0], [127.0, 0.0, -128.0, 33.0]]) / 16,
        Codes(drawn(3, *shape), 0.25, zero),
    )
    how = {"per": "tensor", "affine": True, "block": 1, "qmin": 0, "qmax": 255}
    graph = graph_of(node(f"m = {DYNAMIC}(x)", how), node("y = MatMul(m, w)", name="l"), weights={"w": w.reals()})
    plan = replace(plan_of(w=w.stored()), nodes={"l": NodePlan(name="l", op="MatMul", exec="int")})
    found = simulate(graph, plan, [x], ORT)
    assert torch.equal(found["y"], x @ w.reals()) and torch.equal(found["m"], x)
