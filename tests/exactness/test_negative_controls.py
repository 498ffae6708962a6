"""The proof can fail: for every runtime, files and runtimes that are not what the plan says are noticed, and said."""

import shutil
import sys

import numpy as np
import pytest
import torch
from torch import nn

from chipfit import registry
from chipfit.errors import VerificationError
from chipfit.registry import entries, entry
from chipfit.simulate.integer import simulate
from tests.build import model_of, quantized
from tests.exactness.tamper import bump, opened

PLATFORMS = {".onnx": "ort_cpu", ".tflite": "tflite_int8", ".pte": "executorch_xnnpack"}
RUNTIMES = tuple(name for name, e in entries("runtime").items() if e.thing.__module__.startswith("chipfit."))


def network() -> nn.Module:
    """Return two convolutions of one shape that can be exchanged; the second reads a channel that is always 0."""
    first, second, third = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    with torch.no_grad():
        for conv in (first, second):
            conv.weight[2], conv.bias[2] = 0, 0

    def forward(m, x):
        return m.head(m.third(m.second(m.first(x).relu()).relu()).relu().mean((2, 3)))

    return model_of(forward, first=first, second=second, third=third, head=nn.Linear(4, 5))


@pytest.fixture(scope="module", params=RUNTIMES)
def proven(request, tmp_path_factory):
    """A folder with a saved result, its file and data that calibration has not seen; the runtime, and the result."""
    found = entry("runtime", request.param)
    if any(registry.importlib.util.find_spec(lib) is None for lib in found.declares.libraries):
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp("proven")
    torch.manual_seed(3)
    x = torch.randn(12, 4, 10, 10)
    result = quantized(network(), x[:8], PLATFORMS[found.declares.suffix])
    result.save(folder / "plan")
    np.savez(folder / "new.npz", x=x[8:].numpy())
    return folder, request.param, result, result.export(folder / f"model{found.declares.suffix}")


@pytest.fixture
def spare(proven, tmp_path):
    """A copy of the file, to be spoilt."""
    return shutil.copy(proven[3], tmp_path / proven[3].name)


@pytest.fixture
def command(proven, monkeypatch, capsys):
    """`chipfit verify` as a person calls it: exit status and all that it printed."""
    from chipfit.cli.app import main

    def run(file, *more):
        folder, runtime, *_ = proven
        data = ["--data", str(folder / "new.npz"), "--runtime", runtime, "--file", str(file), *more]
        monkeypatch.setattr(sys, "argv", ["chipfit", "verify", str(folder / "plan"), *data])
        with pytest.raises(SystemExit) as e:
            main()
        said = capsys.readouterr()
        return e.value.code, " ".join((said.out + said.err).split())

    return run


def values(result):
    """The values behind the convolutions, in order, as the file stores them."""
    return [v for v in result.plan.tensors if result.plan.quantized(v) and v in result.graph.values]


def lying(monkeypatch, runtime, lie):
    """The runtime with `lie(self, inputs, results)` in place of its results."""
    found = entry("runtime", runtime)

    class Liar(found.thing):
        def run(self, inputs):
            return lie(self, inputs, dict(super().run(inputs)))

    monkeypatch.setitem(registry.ENTRIES["runtime"], runtime, found._replace(thing=Liar))


@pytest.mark.thinned(3)
def test_an_honest_file_on_an_honest_runtime_is_said_to_be_so(proven, command):
    _, runtime, result, file = proven
    status, said = command(file)
    promised = runtime in result.platform.runtimes
    assert status in ((0,) if promised else (0, 3)), said
    stored = 6 if file.suffix == ".onnx" else 7  # these return the head's sums in float
    assert "8 of 8 weights and biases read back" in said and f"compared {stored} of {stored} tensors" in said
    assert not promised or ("0 of" in said and "departs" not in said)


SPOILT = {
    "a weight's code": (lambda f, v: f.codes("second.weight", bump), "weight 'second.weight' in the file: 1 of its"),
    "a bias's code": (lambda f, v: f.codes("second.bias", bump), "bias 'second.bias' in the file: 1 of its 4"),
    "a weight's scale": (lambda f, v: f.scale("second.weight", 1.01), "weight 'second.weight' in the file: scale"),
    "an activation's scale": (lambda f, v: f.scale(v[2], 2.0), "in the file: scale"),
    "an activation's zero point": (lambda f, v: f.zero(v[0]), "in the file: zero point"),
    "two weights exchanged": (lambda f, v: f.swap("second.weight", "third.weight"), "'second.weight' in the file"),
    "two biases exchanged": (lambda f, v: f.swap("second.bias", "third.bias"), "bias 'second.bias' in the file"),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_file_is_noticed_and_the_first_departure_said(proven, spare, command, what):
    spoil, words = SPOILT[what]
    held = opened(spare)
    spoil(held, values(proven[2]))
    held.save()
    status, said = command(spare)
    refused = status == 2 and "refuses the file" in said  # some runtimes check scales and zero points themselves
    assert refused or (status == 1 and "departs: " in said and words in said), (status, said)


def test_a_weight_is_noticed_whose_effect_is_invisible(proven, spare):
    _, runtime, result, _ = proven
    held = opened(spare)
    weight = result.graph.weights["third.weight"]
    o, i, *kernel = weight.shape

    def change(q):  # in the channel 2 of the input, which is dead
        if held.path.suffix == ".onnx":
            q.reshape(o, i, *kernel)[0, 2, 0, 0] ^= 1
        else:
            q.reshape(o, *kernel, i)[0, 0, 0, 2] ^= 1
        return q

    held.codes("third.weight", change)
    held.save()
    found = result.verify([data(proven)], runtime=runtime, path=spare)
    assert found.verdict == "departs" and not found.sound and not found.exact
    with pytest.raises(VerificationError, match="weight 'third.weight' in the file: 1 of its 144"):
        found.require({"Conv2D"})
    assert found.departures[0] == "weight 'third.weight' in the file: 1 of its 144 quantized values are not the plan's"
    if found.promised:
        assert found.differing == 0  # which is why the file itself is read


def data(proven):
    return torch.from_numpy(np.load(proven[0] / "new.npz")["x"])


def of_codes(change):
    """A lie about the codes of the third value."""

    def lie(result, runtime):
        name = entry("runtime", runtime).declares.codes.format(values(result)[2])
        return lambda self, inputs, got: change(got, name)

    return lie


def previous(result, runtime):
    def lie(self, inputs, got):
        self.first = getattr(self, "first", got)
        return self.first

    return lie


def off_by_one(got, name):
    got[name] = bump(got[name].copy())
    return got


def on_the_output(change):
    return of_codes(lambda got, n: {k: change(v) if i == 0 else v for i, (k, v) in enumerate(got.items())})


LIES = {
    "one code": (of_codes(off_by_one), {1, 3}, "1 of"),
    "results of an earlier batch": (previous, {1, 3}, "integers differ"),
    "a tensor left out": (of_codes(lambda got, n: {k: v for k, v in got.items() if k != n}), {1}, "it is missing"),
    "codes as floats": (of_codes(lambda got, n: {**got, n: got[n].astype(np.float32)}), {1}, "gives float32"),
    "codes of a wider type": (of_codes(lambda got, n: {**got, n: got[n].astype(np.int32)}), {1}, "gives int32"),
    "another shape": (of_codes(lambda got, n: {**got, n: got[n][:, :1]}), {1}, "the device gives"),
    "another output": (on_the_output(lambda v: v + np.float32(1e-3)), {1, 3}, "output 'output'"),
    "an output of another shape": (on_the_output(lambda v: v[:, :2]), {1, 3}, "output 'output'"),
    "nothing that was requested": (of_codes(lambda got, n: dict([next(iter(got.items()))])), {2}, "none of the"),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("what", LIES)
def test_a_runtime_that_lies_is_noticed(proven, command, monkeypatch, what):
    _, runtime, result, file = proven
    lie, statuses, words = LIES[what]
    lying(monkeypatch, runtime, lie(result, runtime))
    folder = proven[0]
    if what.startswith("results of an earlier"):
        x = np.load(folder / "new.npz")["x"]
        np.savez(folder / "two.npz", x=np.concatenate([x] * 4 + [-x] * 4))  # two batches
        status, said = command(file, "--data", str(folder / "two.npz"))
    else:
        status, said = command(file)
    assert status in statuses, (status, said)
    assert words in said or runtime not in result.platform.runtimes, said  # of which tensors differ before the lie


def test_the_tensor_that_was_lied_about_is_the_first_that_departs(proven, monkeypatch):
    _, runtime, result, file = proven
    if runtime not in result.platform.runtimes:
        pytest.skip("nothing is promised of it")
    lying(monkeypatch, runtime, of_codes(off_by_one)(result, runtime))
    found = result.verify([data(proven)], runtime=runtime, path=file)
    row = found.first_difference
    assert (row.tensor, row.differing, row.op_differing) == (values(result)[2], 1, 1)
    assert found.verdict == "departs" and "1 of" in found.departures[0]


def other_net(*shape):
    torch.manual_seed(9)
    return nn.Sequential(nn.Conv2d(shape[1], 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 3)).eval(), torch.randn(*shape)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("shape", [(4, 4, 10, 10), (4, 3, 9, 9)], ids=["of the same inputs", "of other inputs"])
def test_the_file_of_another_model_is_noticed(proven, command, tmp_path, shape):
    _, _, result, file = proven
    model, x = other_net(*shape)
    other = quantized(model, x, result.platform).export(tmp_path / f"m{file.suffix}")
    status, said = command(other)
    hints = ("departs: ", "is this the file", "has fixed sizes")
    assert status in (1, 2) and any(h in said for h in hints), (status, said)


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int16x8"])
def test_a_float_operator_may_be_off_by_one_code_where_a_real_lies_half_way_and_nowhere_else(monkeypatch, platform):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.Conv2d(8, 4, 1)).eval()
    result = quantized(model, torch.randn(8, 3, 12, 12), platform, overrides={"1": "float"})
    name = next(n.output for n in result.graph.nodes if n.op == "HardSwish")
    new = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    wide = platform == "tflite_int16x8"  # where an error of float32 may be more than a code

    def verified(first, last, step):
        """With a simulation that is off by `step` in some codes of that operator, the nearest to half way being 0."""

        def off(*args, each=None, **kwargs):
            def handed(value, q, reals):
                if value == name:
                    place = (reals / result.plan[name].scale).double()
                    chosen = (place - place.floor() - 0.5).abs().flatten().argsort()[first:last]
                    q = q.clone(memory_format=torch.contiguous_format)
                    q.view(-1)[chosen] += torch.where(q.view(-1)[chosen] > 2, -step, step).to(q.dtype)
                each(value, q, reals)

            # what is off already is not taken over
            return simulate(*args, each=each and handed, **{**kwargs, "like": None})

        monkeypatch.setattr("chipfit.verify.run.simulate", off)
        return result.verify([new])

    honest = verified(0, 0, 1)
    row = next(r for r in honest.rows if r.tensor == name)
    assert row.float_ops == ("HardSwish",) and row.elements == 3200 and 32 <= row.allowed < 64 and not row.astray
    assert honest.sound and row.op_differing <= 2 and honest.require({"HardSwish"}) is honest
    assert honest.exact_share == 1 - 3200 / honest.integers
    near, two, many = verified(0, 3, 1), verified(0, 1, 2), verified(0, 80, 1)
    assert near.verdict == "sound", near.summary()
    assert not near.exact and near.require({"HardSwish"})
    assert two.verdict == "departs" and "by up to 2" in two.departures[0]
    assert many.verdict == "departs" and " of 3200" in many.departures[0] and "may differ by 1" in many.departures[0]
    assert verified(3190, 3195, 1).verdict == ("sound" if wide else "departs")
    with pytest.raises(VerificationError, match="HardSwish runs in float"):
        near.require({"Softmax"})
