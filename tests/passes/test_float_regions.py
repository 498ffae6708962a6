"""Kernels that can output integers or floats: the cheapest choice, and what a user chooses instead."""

import itertools
import random
from types import SimpleNamespace

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.calibration.collect import Need, TensorStats
from chipfit.decision import Decision, decide
from chipfit.errors import UnsupportedError
from chipfit.passes import float_regions
from chipfit.platform.load import load
from chipfit.platform.schema import Format, Option
from chipfit.ranges import choose
from tests.build import graph_of, grid, model_of, quantized, randn

NORMS = "start", "first", "second"
DATA = [torch.randn(16, 6, 24, generator=torch.Generator().manual_seed(1))]


def block(norms: bool = True) -> nn.Module:
    """Return attention and an MLP beside skip connections, behind norms that ONNX Runtime computes in float."""

    def forward(m, x):
        x = m.start(x)
        y = m.first(x)
        scores = (m.q(y) @ m.k(y).transpose(1, 2) / 5).softmax(2)
        x = x + m.out(scores @ m.v(y))
        return m.head(x + m.down(F.gelu(m.up(m.second(x)))))

    layers = {name: nn.Linear(24, 24) for name in ("q", "k", "v", "out")}
    layers |= {"up": nn.Linear(24, 48), "down": nn.Linear(48, 24), "head": nn.Linear(24, 5)}
    return model_of(forward, **layers, **{n: nn.LayerNorm(24) if norms else nn.Identity() for n in NORMS})


def build(model, data=DATA, platform="ort_cpu", **options):
    """Return the result of a network that is made with one seed."""
    torch.manual_seed(0)
    return quantized(model(), data, platform, **options)


def runs(result):
    """Layer -> operator, how it runs, whether its result is stored in codes."""
    stored = result.plan.tensors
    nodes = [n for n in result.graph.nodes if n.output in stored]
    return {(n.op, n.layer): (result.plan.nodes[n.name].exec, stored[n.output].quantized) for n in nodes}


GRID = grid(signed=False)


def statistics(x):
    (seen := TensorStats("x")).update(x, Need(histogram=True))
    return seen


@pytest.mark.parametrize("mean", [0.0, 5.0, -80.0])
def test_the_error_of_a_grid_is_relative_to_the_spread_wherever_the_mean_is(mean):
    """Evenly spread over mean +- 1, the bulk of it over mean +- BULK: (s^2 / 12) / ((2 BULK)^2 / 12)."""
    seen = statistics(torch.linspace(mean - 1, mean + 1, 100_001))
    expected = (float(choose(seen, GRID).scale) / (2 * float_regions.BULK)) ** 2
    near = pytest.approx(expected, rel=0.05 if mean else 0.005)  # bins of the histogram are wide beside the spread
    assert float_regions.relative_noise(seen, GRID) == near


@pytest.mark.parametrize("low, signed", [(-0.5, True), (0.0, False), (0.5, False)])
def test_the_grid_has_a_sign_where_the_value_has(low, signed):
    signs = []
    slot = SimpleNamespace(grid=lambda signed: signs.append(signed) or GRID)
    assignment = SimpleNamespace(groups=(), modes={}, tensors={"x": slot, "y": None})
    cut = float_regions.Cut(graph_of("y = Relu(x)"), assignment, {"x": statistics(torch.linspace(low, 2.0, 100))})
    assert cut.noise("x") > 0 and signs == [signed]
    assert cut.noise("y") == cut.noise("z") == 0.0  # without a grid, without statistics


def test_outliers_are_no_signal_and_the_few_of_them_make_the_grid_coarse():
    """0.4 % of the values are 1000 times the rest: the scale is 2000 / 255, the spread that of +-1, 1 / 3."""
    x = torch.linspace(-1, 1, 100_000)
    wild = x.clone()
    wild[::500], wild[1::500] = 1000.0, -1000.0
    noise, of_wild = (float_regions.relative_noise(statistics(v), GRID) for v in (x, wild))
    assert noise == pytest.approx((2 / 255) ** 2 / 12 / (0.99**2 / 3), rel=0.05) and of_wild > 100 * noise


def test_a_transformer_adds_in_float_and_multiplies_in_integers():
    """Between the products of attention, whose operands are integers, nothing is converted: the softmax is in codes."""
    result = build(block)
    found = runs(result)
    assert {run for (op, _), run in found.items() if op in ("MatMul", "Mul", "Softmax")} == {("int", True)}
    first = next(n for n in result.graph.nodes if n.op == "Add")
    assert result.plan.nodes[first.name].exec == "float" and not result.plan.quantized(first.output)
    linear = {layer: how for (op, layer), how in found.items() if op == "Linear"}
    assert all(how == "int" for how, _ in linear.values())
    assert not any(linear[layer][1] for layer in ("out", "up", "down"))  # what follows them is in float


def test_a_convolutional_network_stays_in_codes():
    def residual():
        layers = {k: nn.Conv2d(4, 4, 3, padding=1) for k in "abc"}
        return model_of(lambda m, x: m.c(F.relu((y := m.a(x)) + m.b(y))), **layers)

    found = build(residual, [torch.randn(4, 4, 8, 8)])
    assert {n.exec for n in found.plan.nodes.values()} == {"int"}
    assert not any("output floats" in note for note in found.plan.rewrites)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("seed", [None, *range(12)])
def test_no_other_labels_cost_less(norms, seed, monkeypatch):
    """All labels are tried, with the costs added up by themselves: those of the network, and drawn ones."""
    if seed is not None:
        drawn, sizes, draw = {}, {}, random.Random(seed)
        monkeypatch.setattr(float_regions.Cut, "noise", lambda cut, v: drawn.setdefault(v, 10 ** draw.uniform(-5, -1)))
        monkeypatch.setattr(float_regions.Cut, "size", lambda cut, v: sizes.setdefault(v, draw.randint(1, 100)))
    result = build(lambda: block(norms), settings=chipfit.Settings(results="codes"))
    decided = decide(Decision(graph=result.graph, platform=result.platform))
    graph, assignment = decided.graph, decided.assignment
    cut = float_regions.Cut(graph, assignment, result.stats)
    chosen = cut.modes()
    passing = [n.name for n in graph.nodes if assignment.nodes[n.name].exec == "follow"]
    labels = {**assignment.modes, **dict.fromkeys(passing, ("codes", "whole"))}
    made = {o: cut.kernel(n) for n in graph.nodes for o in n.outputs}
    edges = []  # of a value: producer, whether that writes integers, reader, whether that reads them, size, noise
    for n in graph.nodes:
        kernel, reads = cut.kernel(n), assignment.nodes[n.name].exec != "float"
        for v in dict.fromkeys(i for i in n.inputs if i in graph.values and graph.is_float(i)):
            writes = v in (assignment.quantized_outputs if v in made else assignment.tensors)
            ends = made.get(v), writes, kernel, reads
            edges += [(*ends, cut.size(v), 1000 * cut.noise(v))] * (made.get(v) != kernel)
    for v in graph.outputs:  # sums leave their kernel in float at no cost, other outputs are in codes
        codes = assignment.modes.get(made[v]) != ("codes", "float")
        edges.append((made[v], v in assignment.quantized_outputs, None, codes, cut.size(v), 1000 * cut.noise(v)))
    matmuls = [n for n in graph.nodes if n.op == "MatMul" and n.name in labels]
    products = {n.name: float_regions.multiplications(graph, n) / 64 for n in matmuls}

    def cost(of):
        total = sum(products[k] for k in products if of[k] == "whole")
        for maker, writes, kernel, reads, size, noise in edges:
            writes = of[maker] == "codes" if maker in of else writes
            reads = of[kernel] != "whole" if kernel in of else reads
            total += size * (writes != reads) + size * noise * (writes or reads)
        return total

    every = [cost(dict(zip(labels, c, strict=True))) for c in itertools.product(*labels.values())]
    moved = itertools.product(*(labels[k] for k in passing))
    ours = min(cost({**chosen, **dict(zip(passing, c, strict=True))}) for c in moved)
    assert len(every) > 1000 and ours == pytest.approx(min(every), rel=1e-3)


def test_the_user_may_choose_either():
    codes = build(block, settings=chipfit.Settings(results="codes"))
    assert {how for (op, _), (how, _) in runs(codes).items() if op in ("Add", "MatMul", "Softmax")} == {"int"}
    floats = build(block, settings=chipfit.Settings(results="float"))
    assert set(floats.plan.provenance["results"].values()) == {"float", "whole"}
    assert {how for (op, _), (how, _) in runs(floats).items() if op in ("Add", "Softmax")} == {"float"}
    one = build(block, overrides={"up": {"result": "codes"}})
    assert runs(one)["Linear", "up"] == ("int", True)
    assert runs(one.edit({"up": {"result": "float"}}))["Linear", "up"] == ("int", False)


def test_a_choice_that_the_chip_does_not_have_is_refused():
    with pytest.raises(UnsupportedError, match="cannot have a result in float on 'tflite_int8'"):
        build(block, platform="tflite_int8", overrides={"up": {"result": "float"}})


def test_the_chosen_modes_are_kept_by_saved_and_edited_results(tmp_path):
    result = build(block)
    again = chipfit.load(result.save(tmp_path / "saved"))
    assert again.plan.provenance["results"] == result.plan.provenance["results"] != {}
    kept = result.edit({"head": "float"})
    assert {how for (op, _), (how, _) in runs(kept).items() if op == "Add"} == {"float"}


def test_the_file_computes_what_was_promised():
    pytest.importorskip("onnxruntime")
    checked = build(block).verify([torch.randn(16, 6, 24)])
    assert checked.sound, checked.departures


@pytest.mark.parametrize("rows", [(16,), (16, 5)])
@pytest.mark.parametrize("bound", [F.relu, F.relu6, lambda x: x.clamp(max=1.0)])
def test_a_product_that_is_bounded_in_float_is_one_of_integers(bound, rows, tmp_path):
    """A norm behind the layer reads floats, so that the layer outputs its sums in float."""
    model, x = model_of(lambda m, x: m.norm(bound(m.a(x))), a=nn.Linear(6, 24), norm=nn.LayerNorm(24)), randn(*rows, 6)
    result = quantized(model, [x])
    result.export(tmp_path / "m.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), options)
    assert "QGemm" in {n.op_type for n in onnx.load(tmp_path / "optimised.onnx").graph.node}
    assert result.verify([x]).exact


@pytest.mark.parametrize("in_float", [False, True])
def test_an_embedding_is_gathered_in_the_format_of_its_reader(tmp_path, in_float):
    torch.manual_seed(0)
    between = nn.LayerNorm(16) if in_float else nn.Identity()
    net = model_of(lambda m, i: m.a(m.n(m.words(i))), words=nn.Embedding(500, 16), n=between, a=nn.Linear(16, 4))
    ids = [torch.randint(500, (32, 7), generator=torch.Generator().manual_seed(0))]
    result = build(lambda: net.eval(), ids)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    file = result.export(tmp_path / "words.onnx")
    onnxruntime.InferenceSession(str(file), options)
    (table,) = (i for i in onnx.load(str(file)).graph.initializer if i.name == "words.weight_q")
    rows, reader = onnx.load(options.optimized_model_filepath).graph.node[:2]
    assert rows.op_type == "Gather" and reader.input[0] == rows.output[0]
    if in_float:  # one scale for each column, which the rows share
        assert onnx.numpy_helper.to_array(table).dtype == "int8" and reader.op_type == "Cast"
        assert result.plan["words.weight"].scale.shape == (16,)
    else:  # the reader's own integers
        assert onnx.numpy_helper.to_array(table).dtype == "uint8" and reader.op_type not in ("Cast", "DequantizeLinear")
        assert result.plan["words.weight"].scale == result.plan["embedding"].scale
    assert result.verify(ids, path=file).exact


def test_a_requested_mode_is_chosen_where_a_kernel_has_it():
    either = {"a": ("codes", "float"), "b": ("codes", "whole"), "c": ("codes", "float", "whole")}
    found = {a: float_regions.float_regions(None, SimpleNamespace(modes=either), {}, a) for a in ("codes", "float")}
    assert found["codes"] == ({"a": "codes", "b": "codes", "c": "codes"}, [])
    assert found["float"] == ({"a": "float", "b": "whole", "c": "float"}, [])


def with_signed_products():
    """Return ONNX Runtime as if it multiplied signed integers alone, and stored operands and results in one type."""
    p = load("ort_cpu")
    formats = {**p.formats, "s8": Format(bits=8, zero="any")}
    product, linear = {"in": "s8", "out": "s8"}, {"in": "s8", "w": "wp8", "b": "b32", "out": "s8"}

    def changed(rule):
        if rule.match == ("MatMul",):
            return rule.model_copy(update={"use": (Option(**product), Option(**{"in": "float", "out": "float"}))})
        own = (rule.use[1], Option(**linear), *rule.use[2:]) if rule.match == ("Linear",) else rule.use
        return rule.model_copy(update={"use": own})

    return p.model_copy(update={"formats": formats, "ops": tuple(map(changed, p.ops))})


def test_results_stay_quantized_where_floats_would_need_ranges_that_calibration_left_out():
    """Two values of unsigned codes have no product; in float signs are free, and the products run."""

    def forward(m, x):
        y = x.relu() + nn.functional.glu(m.gate(x.relu()))
        return m.head((torch.softmax(y @ m.key(y).transpose(1, 2), -1) @ y).mean(1)).sigmoid()

    def net():
        return model_of(forward, gate=nn.Linear(8, 16), key=nn.Linear(8, 8), head=nn.Linear(8, 4))

    settings = chipfit.Settings(results="float")
    result = build(net, randn(8, 6, 8) * 3, with_signed_products(), settings=settings)
    assert any("float outputs would need statistics of 'linear_1'" in line for line in result.plan.rewrites)


# ---------------------------------------------------------------- on paper, where nothing has noise


class Paper:
    """A graph of rows (node, how it runs, what it reads); a value has the name of its maker, and a size."""

    def __init__(self, *rows, outputs, sizes=(), inputs=("x",), modes=(), floats=(), edges=(), groups=(), dtypes=()):
        nodes = [f"{n} = {'MatMul' if n == 'mm' else 'Add'}({', '.join(i.split())})" for n, _, i in rows]
        known = {"weights": {"w": torch.zeros(100)}, "shapes": dict(sizes), "dtypes": dict(dtypes)}
        self.graph = graph_of(*nodes, inputs=list(inputs), outputs=outputs.split(), shape=(10,), **known)
        stored = {v for v in self.graph.values if v not in floats}  # has a grid that it may be stored on
        self.assignment = SimpleNamespace(
            modes=dict(modes),
            joins={},
            constraints=(),
            nodes={n: SimpleNamespace(exec=how) for n, how, _ in rows},
            tensors=dict.fromkeys(stored),
            quantized_outputs={n for n, how, _ in rows if how == "int"},
            float_edges=set(edges),
            groups=tuple(groups),
        )

    def labels(self) -> dict[str, str]:
        return float_regions.Cut(self.graph, self.assignment, {}).modes()


BOTH, WHOLE, ALL = ("codes", "float"), ("codes", "whole"), ("codes", "float", "whole")


@pytest.mark.parametrize(
    "rows, given, label",
    [
        ([("f", "float", "k")], {"outputs": "f"}, "float"),  # its one reader computes in float
        ([("f", "float", "k"), ("m", "int", "k")], {"outputs": "f m"}, "codes"),  # one conversion in any case
        ([("f", "float", "k"), ("m", "int", "k")], {"outputs": "f m", "edges": [("k", "m")]}, "float"),
        ([("f", "float", "k"), ("m", "int", "k")], {"outputs": "f m", "floats": ["k"]}, "float"),
        ([("f", "float", "k"), ("g", "float", "k"), ("m", "int", "k")], {"outputs": "f g m"}, "codes"),  # for f and g
        (  # s reads floats in any case, so that k is converted once for m and g, or else for f and s
            [("f", "float", "k"), ("s", "float", "k"), ("m", "int", "k"), ("g", "int", "k")],
            {"outputs": "f s m g", "edges": [("k", "m")]},
            "codes",
        ),
        ([("f", "float", "k k")], {"outputs": "f k"}, "float"),  # read twice by one, and returned
        ([("s", "follow", "k"), ("f", "float", "s")], {"outputs": "f"}, "float"),  # which moves numbers only
        ([("s", "follow", "k"), ("m", "int", "s")], {"outputs": "m"}, "codes"),
        ([("s", "follow", "k"), ("f", "float", "s")], {"outputs": "f", "sizes": [("k", (9,)), ("s", (10,))]}, "float"),
        ([], {"outputs": "k"}, "float"),  # sums that a model returns
        ([("s", "follow", "k")], {"outputs": "s"}, "float"),
        ([("m", "int", "k")], {"outputs": "m k"}, "codes"),  # one conversion in any case
        ([("r", "int", "k")], {"outputs": "r", "groups": [("k", "r")]}, "codes"),  # an activation would run in float
    ],
)
def test_a_kernel_outputs_what_takes_the_fewest_conversions(rows, given, label):
    assert Paper(("k", "int", "x"), *rows, modes={"k": BOTH}, **given).labels() == {"k": label}


def test_an_output_of_the_model_is_stored_in_integers_unless_it_is_the_sums_of_a_kernel():
    for modes, label in ((BOTH, "float"), (ALL, "codes")):
        assert Paper(("k", "int", "x"), outputs="k", modes={"k": modes}).labels() == {"k": label}


@pytest.mark.parametrize(
    "reads, given, label",
    [
        ("a b", {}, "whole"),  # two conversions in front of it, or one behind
        ("a x", {}, "codes"),  # one in front of it, or one and one
        ("a b", {"sizes": {"a": (1,), "b": (1,)}.items()}, "codes"),
        ("a b", {"sizes": {"a": (6,), "b": (6,)}.items()}, "whole"),
        ("x w", {}, "codes"),  # a weight is stored as it is read
        ("x n", {"inputs": ("x", "n"), "dtypes": {"n": "int64"}.items(), "sizes": {"n": (99,)}.items()}, "codes"),
        ("x n", {"inputs": ("x", "n"), "floats": ["n"], "sizes": {"n": (99,)}.items()}, "whole"),
    ],
)
def test_an_operator_that_can_run_in_float_does_where_its_operands_cost_more(reads, given, label):
    rows = [("a", "float", "x"), ("b", "float", "x"), ("k", "int", reads)]
    assert Paper(*rows, outputs="k", modes={"k": WHOLE}, **given).labels() == {"k": label}


@pytest.mark.parametrize("outputs, label", [("f", "float"), ("r", "codes")])
def test_values_inside_a_fused_kernel_are_not_converted(outputs, label):
    given = {"modes": {"k": BOTH}, "groups": [("k", "r")], "sizes": {"k": (1000,)}.items()}
    paper = Paper(("k", "int", "x"), ("r", "int", "k"), ("f", "float", "r"), outputs=outputs, **given)
    assert paper.labels() == {"k": label}


@pytest.mark.parametrize(
    "n, reader, label",
    [
        (100, "float", "whole"),  # 100^2 / 64 = 156 for the products in float, 200 conversions for those in codes
        (140, "float", "float"),  # 306, 280
        (100, "int", "codes"),  # no kernel makes codes of floats
    ],
)
def test_products_in_float_cost_a_64th_of_a_conversion_each(n, reader, label):
    sizes = {"a": (n, 1), "b": (1, n), "mm": (n, n), "m": (n, n)}.items()
    rows = ("a", "float", "x"), ("b", "float", "x"), ("mm", "int", "a b"), ("m", reader, "mm")
    assert Paper(*rows, outputs="m", modes={"mm": ALL}, sizes=sizes).labels() == {"mm": label}


def test_two_operators_in_a_row_are_decided_together():
    """In float alone neither gains; both do, for what is between them is read and written in codes else."""
    rows = ("a", "float", "x"), ("k", "int", "a a"), ("j", "int", "k"), ("f", "float", "j")
    assert Paper(*rows, outputs="f", modes={"k": WHOLE, "j": WHOLE}).labels() == {"k": "whole", "j": "whole"}
    rows = ("k", "int", "x"), ("j", "int", "k"), ("f", "float", "j")
    assert Paper(*rows, outputs="f", modes={"k": WHOLE, "j": BOTH}).labels() == {"k": "codes", "j": "float"}


def test_a_network_of_thousands_of_kernels_has_a_cut():
    rows = [(f"k{j}", "int", f"k{j - 1}" if j else "x") for j in range(2000)]
    labels = Paper(*rows, outputs="k1999", modes={f"k{j}": BOTH for j in range(2000)}).labels()
    assert {*labels.values()} == {"codes", "float"} and labels["k1999"] == "float"


def test_the_noise_of_a_stored_value_costs_a_thousand_conversions(monkeypatch):
    """A value of noise n costs 1000 n more for each of its numbers where it is stored in codes."""
    for noise, label in ((0.9e-3, "codes"), (1.1e-3, "whole")):
        monkeypatch.setattr(float_regions.Cut, "noise", lambda cut, v, n=noise: n if v == "k" else 0.0)
        # codes: ten conversions and the noise of what they convert; whole: the operand is converted instead
        rows = ("k", "int", "x"), ("f", "float", "k")
        paper = Paper(*rows, outputs="f", modes={"k": WHOLE}, sizes={"x": (20,), "k": (10,)}.items())
        assert paper.labels() == {"k": label}  # 10 + 10 * 1000 n against 20


def test_only_changes_are_returned_and_float_outputs_are_counted():
    rows = ("k", "int", "x"), ("f", "float", "k"), ("j", "int", "x"), ("i", "float", "x")
    paper = Paper(*rows, outputs="f j i", modes={"k": BOTH, "j": BOTH, "i": WHOLE})
    found, (note,) = float_regions.float_regions(paper.graph, paper.assignment, {}, None)
    assert found == {"k": "float", "j": "float", "i": "codes"}
    assert note.startswith("2 of 3 kernels that can output integers or floats output floats: fewer conversions")
    paper.assignment.quantized_outputs -= {"k"}
    assert float_regions.float_regions(paper.graph, paper.assignment, {}, None)[0] == {"j": "float", "i": "codes"}
