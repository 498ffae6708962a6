"""Results of small networks equal their records, so that every change of a result is seen and intended.

Other tests prove that the results are right: against runtimes, frameworks and arithmetic on paper. These records only
show that something changed. If that was intended, `make snapshots` writes them again, and the difference belongs in the
commit. `python -m tests.snapshots.test_snapshots CASE` writes out the data behind the digests of a case, to compare two
versions.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

import chipfit
from chipfit.errors import ChipfitError
from chipfit.frameworks import capture
from chipfit.graph.ir import Graph
from chipfit.registry import registered
from chipfit.result import Result
from chipfit.settings import Settings
from tests.snapshots.networks import NETWORKS, made
from tests.snapshots.record import differences, record

RECORDS = Path(__file__).parent / "records"

#: platforms of many kinds -> suffix of the files that are written for them
PLATFORMS = {
    "ort_cpu": ".onnx",  # asymmetric, weights per channel, sums requantized by floats
    "tflite_int8": ".tflite",  # fixed and tied scales, sums requantized by integers
    "xnnpack": ".tflite",  # other kernels, bounds on scales
    "tflite_int16x8": ".tflite",  # 16-bit values, tables
    "vitis_dpu": ".json",  # powers of two, 8-bit biases, bounds on products of scales
    "imx500": ".onnx",  # powers of two, signs by the data, weights with a choice of widths
    "coreml": ".onnx",  # weights only
    "nnie": ".json",  # logarithmic grid, where values are read
    "ncnn": ".json",  # narrow grids where values are read, halves away from zero
    "tensorrt": ".json",  # quantized where values are read, soft ties
    "esp_dl": ".onnx",  # powers of two, one scale per weight, tables; refuses what it does not list
    "mqbench_academic": ".json",  # 4 bits, first and last layer 8
    "openvino_cpu": ".onnx",  # small accumulators, operators that pass grids on
    "tvm_qnn": ".json",  # affine weights per channel
    "qnnpack": ".onnx",  # affine weights, one scale per tensor
    "k210": ".json",  # unsigned weights around 128, activations as line segments
}


#: what a walk over the weights finds by linear algebra is not the same on every processor; and what is tried depends on
#: small differences of a loss
NEAREST = {"rounding": "off", "repairs": "off"}


@dataclass(frozen=True)
class Case:
    """A network on a platform, with options other than the defaults."""

    network: str
    platform: str = "ort_cpu"
    label: str = ""  #: of the options
    options: dict[str, Any] = field(default_factory=dict)
    then: Callable[[Result], Result] = lambda result: result

    @property
    def name(self) -> str:
        return " ".join(x for x in (self.network, self.platform, self.label) if x)

    @property
    def exact(self) -> bool:
        """The floats are equal on every processor except for the last bit."""
        return NETWORKS[self.network].exact and not self.label

    def result(self) -> Result:
        network, model = NETWORKS[self.network], made(self.network)
        torch.manual_seed(0)
        # a network is captured once for all cases: it takes longer than everything else
        with mock.patch("chipfit.reading.capture", return_value=captured(self.network).copy()):
            options = {"overrides": network.overrides, **self.options}
            options["settings"] = Settings(**NEAREST, **options.get("settings", Settings()).to_record())
            example = network.data(0)
            result = chipfit.quantize(
                model, network.batches(), self.platform, example=example, progress=False, **options
            )
        return self.then(result)

    def taken(self, spelled: bool = False) -> dict[str, Any]:
        """Return the record, or the error that the case ends in."""
        try:
            result = self.result()
        except ChipfitError as e:
            return {"refused": type(e).__name__}
        network = NETWORKS[self.network]
        return record(result, [network.unseen()], network.suffix or PLATFORMS.get(self.platform, ".onnx"), spelled)


@cache
def captured(name: str) -> Graph:
    return capture(made(name), (NETWORKS[name].data(0),))


# ---------------------------------------------------------------- cases


def trained(result: Result, algorithm: Any, steps: int = 1) -> Result:
    """Return the result after steps of gradient descent towards zeros."""
    result = result.trains(algorithm)
    model = result.model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(NETWORKS["chain"].data(0)).square().mean().backward()
        optimizer.step()
    return result.trained()


def _cases() -> list[Case]:
    plain = [Case(n, p) for n, network in NETWORKS.items() for p in network.only or PLATFORMS]
    sets = Settings
    steps = {
        ("residual", "ort_cpu"): [
            sets(correct_bias=True),
            sets(correct_activation_bias=0.0),
            sets(correct_second_moment=True),
        ],
        ("residual", "imx500"): [sets(correct_bias=True), sets(equalize=True), sets(correct_activation_bias=0.1)],
        ("mobile", "imx500"): [sets(shift_negative=1.0), sets(relu_bound=True)],
        ("gates", "mqbench_academic"): [sets(shift_negative=2.0), sets(correct_bias=True)],
        ("mobile", "qnnpack"): [sets(equalize=True), sets(correct_bias=True, equalize=True)],
        ("branches", "tvm_qnn"): [sets(concat_ranges=True)],
        ("rows", "ort_cpu"): [
            sets(collapse_linear=True),
            sets(collapse_residual=True),
            sets(relu_bound=True),
            sets(equalize=True),
        ],
        ("rows", "imx500"): [sets(softmax_shift=True), sets(shift_negative=1.0), sets(relu_bound=True)],
        ("attention", "imx500"): [sets(softmax_shift=True)],
    }
    settled = [Case(n, p, repr(s), {"settings": s}) for (n, p), given in steps.items() for s in given]
    rules = [*_own("range"), "lp(p=3)", "percentile(share=0.9)"]
    ranged = [Case("chain", p, r, {"rule": r, "weight_rule": r}) for r in rules for p in ("ort_cpu", "vitis_dpu")]
    ranged += [Case("chain", p, "kl of channels", {"weight_rule": "kl"}) for p in ("imx500", "tvm_qnn", "nnie")]
    ranged += [Case("gates", p, "z 2", {"z_threshold": 2.0}) for p in ("ort_cpu", "imx500")]
    chosen: dict[str, list[dict[Any, Any]]] = {
        "ort_cpu": [
            {"one": {"range": (-4.0, 2.0)}, "four": "float", "*": {"rule": "no_clipping"}},
            {"head": {"weight_rule": "mae"}, "*": {"weight_method": "symmetric"}},
            {"*": {"per": "tensor", "z_threshold": 1.5}},
            {"*": {"method": "symmetric"}},
            {"head": {"activation_bits": "float"}, "two": {"bits": "float"}},
        ],
        "imx500": [
            {"*": {"bits": 4}, "two": {"bits": 2}},
            {"*": {"weight_method": "power_of_two"}, "two": {"signed": True}},
        ],
        "mqbench_academic": [{"*": {"bits": 3, "activation_bits": 5}}, {"three": {"bits": 1}, "four": {"bits": 16}}],
        "coreml": [{"*": {"bits": 4}}, {"*": {"bits": 6}}],
        "qnn_htp": [{"*": {"activation_bits": 16}}, {"*": {"bits": 4}}],
        "litert_ai_edge": [{"*": {"bits": 4}}, {}],
        "tensorrt": [{"two": "float"}, {"three": "float", "four": "float"}],
        "openvino_cpu": [{"*": {"activation_bits": 16}}],
    }
    by_hand = [Case("chain", p, str(o), {"overrides": o}) for p, given in chosen.items() for o in given]
    by_hand += [Case("residual", "esp_dl", "16 bits", {"overrides": {"*": {"bits": 16, "activation_bits": 16}}})]
    edits = [Case("chain", p, "edited", then=_edited) for p in ("ort_cpu", "vitis_dpu", "tensorrt")]
    four = {"overrides": {"*": {"bits": 4}}}
    lessons: dict[str, list[Any]] = {
        "mqbench_academic": [
            *("ste", "lsq", "lsq_plus", "tqt", "dsq", "dorefa"),
            *({"activations": "pact"}, {"weights": "qil"}, {"weights": "n2uq"}),
        ],
        "tflite_int8": ["ste", "lsq", "tqt"],
        "vitis_dpu": ["tqt"],
        "xnnpack": ["lsq"],
        "nnie": ["nnie_log"],
        "coreml": [{"weights": "lut"}, {"weights": "apot"}],
    }
    taught = [
        Case("chain", p, f"taught {a}", four if p == "coreml" else {}, partial(trained, algorithm=a))
        for p, given in lessons.items()
        for a in given
    ]
    return [*plain, *settled, *ranged, *by_hand, *edits, *taught]


def _own(kind: str) -> list[str]:
    """Return the registered names of chipfit, without those of other tests."""
    return [name for name, thing in registered(kind).items() if thing.__module__.startswith("chipfit.")]


def _edited(result: Result) -> Result:
    return result.edit({"two": "float", "head": {"range": (-2.0, 2.0)}})


CASES = {c.name: c for c in _cases()}

# ---------------------------------------------------------------- tests


@cache
def kept(network: str) -> dict[str, Any]:
    """Return the records of a network by name of the case."""
    file = RECORDS / f"{network}.yaml"
    return yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if file.exists() else {}


def check(case: Case, found: dict[str, Any]) -> None:
    """Fail unless the record is kept and equal."""
    known = kept(case.network)
    assert case.name in known, f"there is no record of {case.name}: `make snapshots` writes it"
    changed = differences(known[case.name], found, case.exact)
    assert not changed, "another result: " + "\n".join(changed)


@pytest.mark.parametrize("name", CASES)
def test_what_is_decided_and_written_is_what_it_was(name):
    check(CASES[name], CASES[name].taken())


def test_no_record_is_without_its_case():
    kept_names = {name for network in NETWORKS for name in kept(network)}
    assert kept_names == set(CASES)
    assert {f.stem for f in RECORDS.glob("*.yaml") if not f.stem.startswith("keras_")} == set(NETWORKS)


def test_a_case_without_a_record_fails():
    with pytest.raises(AssertionError, match="there is no record of shared nowhere: `make snapshots` writes it"):
        check(Case("shared", "nowhere"), {})


@pytest.mark.parametrize("key", kept("shared").get("shared ort_cpu", ()))
def test_a_record_that_says_something_else_fails(key):
    """Change the first number of each line."""
    case = CASES["shared ort_cpu"]
    found = dict(kept("shared")[case.name])
    check(case, found)
    found[key] = _altered(found[key])
    with pytest.raises(AssertionError, match=f"another result: {key}: "):
        check(case, found)


def _altered(value: Any) -> Any:
    if isinstance(value, list):
        return [_altered(value[0]), *value[1:]]
    if isinstance(value, float):
        return value * (1 + 1e-4)
    return value + 1 if isinstance(value, int) else re.sub(r"\d+", lambda m: str(int(m[0]) + 1), value, count=1)


@pytest.mark.parametrize(
    "key, before, after, exact, rough",
    [
        ("nodes", "2 Relu #0a1b", "2 Relu #0a1c", False, False),
        ("zero_points", [0, -128], [0, -127], False, False),
        ("scales", [-5.0], [-5.00004], True, True),
        ("scales", [-5.0], [-5.00008], False, True),
        ("scales", [-5.0], [-5.001], False, False),
        ("scales", [-5.0, -17.0], [-5.0, -17.001], False, True),
        ("scales", [-5.0, -17.0], [-5.0, -17.01], False, False),
        ("integers", ["10: 5 5 5"], ["10: 6 6 6"], False, True),
        ("integers", ["10: 5 5 5"], ["10: 7 7 7"], False, False),
        ("integers", ["10: 5 5 5"], ["11: 5 5 5"], False, False),
        ("integers", "not simulated", ["10: 5 5 5"], False, False),
        ("model", ["[3, 4]: -0.5 1.0"], ["[3, 4]: -0.501 1.0"], True, True),
        ("model", ["[3, 4]: -0.5 1.0"], ["[3, 4]: -0.51 1.0"], False, False),
        ("model", ["[3, 4]: -0.5 1.0"], ["[4, 3]: -0.5 1.0"], False, False),
    ],
)
def test_only_floats_have_room(key, before, after, exact, rough):
    """Quantized values may differ as well if floats lie half way between two of them on one processor only."""
    assert not differences({key: before}, {key: before}, True)
    assert (not differences({key: before}, {key: after}, True)) is exact
    assert (not differences({key: before}, {key: after}, False)) is rough
    assert differences({key: before}, {}, False) and differences({}, {key: after}, False)


@pytest.mark.parametrize("name", ["residual tflite_int8", "attention ort_cpu", "branches vitis_dpu", "chain nnie"])
def test_a_result_that_was_saved_and_loaded_is_the_same(name, tmp_path):
    result = CASES[name].result()
    result.save(tmp_path / "saved")
    x, suffix = [NETWORKS[CASES[name].network].unseen()], PLATFORMS[CASES[name].platform]
    assert differences(record(result, x, suffix), record(chipfit.load(tmp_path / "saved"), x, suffix), True) == []


# ---------------------------------------------------------------- writing them


def write(cases: Mapping[str, Case]) -> None:
    """Write the records of these cases."""
    RECORDS.mkdir(exist_ok=True)
    for network in dict.fromkeys(c.network for c in cases.values()):
        found = {name: case.taken() for name, case in cases.items() if case.network == network}
        text = yaml.safe_dump(found, sort_keys=False, width=118, default_flow_style=None)
        (RECORDS / f"{network}.yaml").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(CASES[" ".join(sys.argv[1:])].taken(spelled=True), indent=1))
    else:
        write(CASES)
