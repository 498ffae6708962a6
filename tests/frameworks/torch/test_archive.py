"""A program that torch.export.save wrote is read as data: nothing that it names is called."""

import json
import pickle
import zipfile

import pytest
import torch
from torch import nn

from chipfit.errors import CaptureError, OutOfBoundsError
from chipfit.frameworks.torch.archive import load as load_program
from chipfit.frameworks.torch.capture import capture
from tests.build import Trap, rezipped


class Branches(nn.Module):
    """A program with shared weights, a buffer, a constant, a write in place, several outputs and a symbol."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)
        self.b.weight = self.a.weight
        self.register_buffer("k", torch.arange(4.0))
        self.c = torch.tensor([1.0, 2.0])

    def forward(self, x, scale=None, *, more):
        y = self.features(x).mean((2, 3)) * self.k
        z = y.view(-1, 4).clone()
        z.add_(more)
        with torch.no_grad():
            first, second = torch.chunk(z, 2, 1)
        top = torch.topk(z, 2, 1)
        return {"y": self.a(y) + self.c, "z": [self.b(z), (first, second), top[0]], "n": torch.zeros(x.shape[0])}


CALL = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),), {"more": torch.ones(2, 4)}


@pytest.fixture
def program(tmp_path):
    model = Branches().eval()
    exported = torch.export.export(
        model, *CALL, dynamic_shapes={"x": {0: torch.export.Dim.AUTO}, "more": {0: torch.export.Dim.AUTO}}
    )
    torch.export.save(exported, tmp_path / "model.pt2")
    return model, tmp_path / "model.pt2"


def edited(path, name, change):
    """Change a JSON file of the archive in place by `change`."""

    def edit(inside):
        data = json.loads(inside[f"model/{name}"])
        change(data)
        return {**inside, f"model/{name}": json.dumps(data).encode()}

    return rezipped(path, edit)


def test_a_program_that_torch_saved_computes_what_the_model_does(program):
    model, path = program
    loaded, (x,) = load_program(path), (torch.randn(5, 3, 8, 8),)
    want, got = model(x, more=torch.ones(5, 4)), loaded(x, more=torch.ones(5, 4))
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(want)
    leaves = torch.utils._pytree.tree_leaves
    assert all(torch.equal(g, w) for g, w in zip(leaves(got), leaves(want), strict=True))
    assert loaded.a.weight is loaded.b.weight
    assert set(dict(loaded.named_parameters())) == set(dict(model.named_parameters()))


def test_a_program_is_read_as_torch_reads_it(program):
    want = capture(torch.export.load(program[1]).module(check_guards=False), *CALL)
    got = capture(load_program(program[1]), *CALL)
    told = [(n.op, n.outputs, n.layer, n.attrs) for n in want.nodes]
    assert [(n.op, n.outputs, n.layer, n.attrs) for n in got.nodes] == told
    lines = [(g.source, w.source) for g, w in zip(got, want, strict=True)]
    assert all(g == w for g, w in lines if not w.startswith("<eval"))  # torch's reader loses what no_grad wraps
    assert (got.in_spec, got.out_spec, list(got.weights)) == (want.in_spec, want.out_spec, list(want.weights))


def test_sample_inputs_are_never_opened(program, trap):
    _, path = program
    samples = {"model/data/sample_inputs/model.pt": pickle.dumps(Trap())}
    load_program(rezipped(path, lambda inside: {**inside, **samples}))
    assert not trap.exists()
    pickle.loads(samples["model/data/sample_inputs/model.pt"])  # what opening them would have done
    assert trap.exists()


@pytest.mark.parametrize("kind", ["weights", "constants"])
def test_pickled_weights_and_constants_are_refused(program, trap, kind):
    _, path = program
    config = f"model/data/{kind}/model_{kind}_config.json"

    def pickled(inside):
        table = json.loads(inside[config])
        entry = next(iter(table["config"].values()))
        entry["use_pickle"] = True
        return {
            **inside,
            config: json.dumps(table).encode(),
            f"model/data/{kind}/{entry['path_name']}": pickle.dumps(Trap()),
        }

    with pytest.raises(CaptureError, match="is pickled, and a pickle is code"):
        load_program(rezipped(path, pickled))
    legacy = {f"model/data/{kind}/model.pt": pickle.dumps(Trap())}
    with pytest.raises(CaptureError, match="is pickled, and a pickle is code"):
        load_program(rezipped(path, lambda inside: {**inside, **legacy}))
    assert not trap.exists()


@pytest.mark.parametrize(
    "name", ["custom_obj_0", "opaque_obj_0", "../../weight_0", "weight_0/../weight_0", "/etc/passwd"]
)
def test_constants_are_raw_tensors_beside_the_program(program, name):
    config = "data/constants/model_constants_config.json"
    path = edited(program[1], config, lambda d: d["config"]["c"].update(path_name=name))
    with pytest.raises(CaptureError, match="is pickled"):
        load_program(path)


def node(data, op="topk"):
    return next(n for n in data["graph_module"]["graph"]["nodes"] if op in n["target"])


CHANGES = {
    "a function of torch": lambda d: node(d).update(target="torch.load"),
    "a function of the system": lambda d: node(d).update(target="os.system"),
    "a function of this file": lambda d: node(d).update(target="trap.touch"),
    "a file of the disk": lambda d: node(d).update(target="torch.ops.aten.from_file.default"),
    "a foreign operator": lambda d: node(d).update(target="torch.ops.trap.touch.default"),
    "an attribute": lambda d: node(d).update(target="torch.ops.aten.topk.__class__"),
    "a control flow": lambda d: node(d).update(target="torch.ops.higher_order.cond"),
    "a value that nobody made": lambda d: node(d)["inputs"][0].update(arg={"as_tensor": {"name": "nobody"}}),
    "an object": lambda d: node(d)["inputs"][0].update(arg={"as_custom_obj": {"name": "x", "class_fqn": "trap.Thing"}}),
    "another generation": lambda d: d["schema_version"].update(major=7),
    "a name that is no name": lambda d: d["graph_module"]["module_call_graph"][0]["signature"].update(
        forward_arg_names=["x); __import__('trap'", "s"]
    ),
    "no graph": lambda d: d.pop("graph_module"),
    "a weight that is not there": lambda d: d["graph_module"]["signature"]["input_specs"][0]["parameter"].update(
        parameter_name="__class__.__init__"
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_program_calls_only_what_is_listed(program, trap, change):
    with pytest.raises(CaptureError):
        capture(load_program(edited(program[1], "models/model.json", change)), *CALL)
    assert not trap.exists()


MALFORMED = {
    "nodes that are a number": (lambda d: d["graph_module"]["graph"].update(nodes=3), "'nodes' must be a list"),
    "an operator without name": (lambda d: node(d).update(target=None), "'target' must be text"),
    "a type in a list": (lambda d: node(d)["inputs"][0].update(arg={"as_scalar_type": [7]}), "_type' must be"),
    "a number in words": (lambda d: node(d)["inputs"][0].update(arg={"as_float": "much"}), "'as_float' must be"),
    "a shape below zero": (lambda d: shapes(d)["x"]["sizes"][1].update(as_int=-3), "'as_int' must be .* at least 0"),
    "a signature of text": (lambda d: call(d).update(signature="x"), "'signature' must be a table"),
    "no signature": (lambda d: call(d).update(signature=None), "not a program that torch.export.save wrote"),
    "names of arguments as numbers": (
        lambda d: call(d)["signature"].update(forward_arg_names=[1]),
        "names.0' must be text",
    ),
    "arguments that are one": (lambda d: call(d)["signature"].update(in_spec=LEAF), "not a program that torch.export"),
}
LEAF = json.dumps([1, {"type": None, "context": None, "children_spec": []}])


def shapes(d):
    return d["graph_module"]["graph"]["tensor_values"]


def call(d):
    return d["graph_module"]["module_call_graph"][0]


@pytest.mark.parametrize("change, words", MALFORMED.values(), ids=MALFORMED)
def test_a_program_whose_tables_are_others_is_refused(program, change, words):
    with pytest.raises(CaptureError, match=words):
        load_program(edited(program[1], "models/model.json", change))


class Masked(nn.Module):
    """Infinities among the arguments of calls, which a file holds as texts."""

    def forward(self, x):
        return torch.softmax(x.masked_fill(x > 0, float("-inf")).clamp(max=float("inf")), 1)


def test_infinities_in_a_program_are_numbers(tmp_path):
    x = torch.tensor([[1.0, -1.0, -2.0]])
    torch.export.save(torch.export.export(Masked().eval(), (x,)), tmp_path / "masked.pt2")
    assert torch.equal(load_program(tmp_path / "masked.pt2")(x), Masked()(x))


def test_symbols_and_origins_of_a_program_are_texts(program, trap):
    evil = "__import__('trap')"

    def change(data):
        graph = data["graph_module"]["graph"]
        for values in (graph["sym_int_values"], graph["tensor_values"]):
            text = json.dumps(values).replace("Symbol(", f"{evil} or Symbol(")
            values.update(json.loads(text))
        data["guards_code"] = [evil]
        data["range_constraints"] = {evil: {"min_val": 0, "max_val": None}}
        node(data)["metadata"] = {
            "nn_module_stack": f"a,{evil},trap.Thing",
            "torch_fn": f"{evil};{evil}",
            "custom": evil,
        }

    capture(load_program(edited(program[1], "models/model.json", change)), *CALL)
    assert not trap.exists()


def test_a_program_of_an_older_torch_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as z:
        z.writestr("serialized_exported_program.json", "{}")
        z.writestr("serialized_state_dict.pt", pickle.dumps(Trap()))
    with pytest.raises(CaptureError, match="not an archive with one program"):
        load_program(tmp_path / "old.pt2")


class Sums(nn.Module):
    """A program whose calls become others below."""

    def forward(self, x):
        y = torch.as_strided(x, [2], [1])
        y.add_(1)
        return x + 0


def reads(path, target, *arguments):
    """Write a program whose first call is another one."""
    torch.export.save(torch.export.export(Sums().eval(), (torch.zeros(1, 4),)), path)

    def change(data):
        first = node(data, "as_strided")
        first["target"] = target
        first["inputs"][1:] = [{"name": "", "arg": a, "kind": 1} for a in arguments]

    return load_program(edited(path, "models/model.json", change))


ATEN = "torch.ops.aten"
ELSEWHERE = {
    "20,000 numbers from a tensor of four": (f"{ATEN}._reshape_alias.default", {"as_ints": [20000]}, {"as_ints": [1]}),
    "numbers far behind it": (f"{ATEN}.as_strided.default", {"as_ints": [2]}, {"as_ints": [1 << 40]}),
    "a type that does not exist": (f"{ATEN}.view.dtype", {"as_int": 4242}),
    "more numbers than memory has": (f"{ATEN}.new_empty.default", {"as_ints": [1 << 20, 1 << 20]}),
}


@pytest.mark.parametrize("call", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_program_reaches_its_own_tensors_alone(tmp_path, call):
    program = reads(tmp_path / "model.pt2", *call)
    with pytest.raises(OutOfBoundsError, match="would leave its own tensors"):
        program(torch.zeros(1, 4))
    with pytest.raises(CaptureError, match="would leave its own tensors"):
        capture(program, (torch.zeros(1, 4),))


@pytest.mark.parametrize("name", ["segment_reduce", "ctc_loss", "_thnn_fused_lstm_cell", "linalg_eigvals", "_stack"])
def test_operators_that_do_not_check_their_operands_are_not_listed(tmp_path, name):
    with pytest.raises(CaptureError, match=f"'aten.{name}.default' is not an operator that a graph can hold"):
        reads(tmp_path / "model.pt2", f"{ATEN}.{name}.default", {"as_ints": [1]}, {"as_ints": [1]})


def test_a_program_that_writes_leaves_its_caller_alone(tmp_path):
    """The input is a row of a larger tensor; the program adds 1 to the first two numbers of its own copy."""
    data = torch.zeros(3, 4)
    program = reads(tmp_path / "model.pt2", f"{ATEN}.as_strided.default", {"as_ints": [2]}, {"as_ints": [1]})
    assert program(data[1:2]).tolist() == [[1, 1, 0, 0]] and not data.any()
    with pytest.raises(OutOfBoundsError, match="would leave its own tensors"):
        reads(tmp_path / "model.pt2", f"{ATEN}.as_strided.default", {"as_ints": [5]}, {"as_ints": [1]})(data[1:2])


def test_a_declared_size_beyond_all_bounds_is_refused(program):
    def change(data):
        shape = next(iter(data["graph_module"]["graph"]["tensor_values"].values()))
        shape["sizes"] = [{"as_int": 1 << 20}, {"as_int": 1 << 20}]

    with pytest.raises(CaptureError, match="The size of '.*' is beyond all bounds"):
        load_program(edited(program[1], "models/model.json", change))


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # of torch.export
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_program_with_a_recurrent_layer_of_a_fixed_batch_is_captured(tmp_path, kind):
    """Its states have the batch of the example; other batches do not fit them, and are not tried twice."""
    torch.manual_seed(0)
    model, x = kind(4, 5, num_layers=2, bidirectional=True, batch_first=True).eval(), torch.randn(2, 3, 4)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    program = load_program(tmp_path / "model.pt2")
    assert torch.equal(program(x)[0], model(x)[0])
    with pytest.raises(OutOfBoundsError, match="would leave its own tensors"):
        program(torch.randn(4, 3, 4))
    assert capture(program, (x,)).nodes
