"""Every script in examples/ runs, and does what it says."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import chipfit

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_small_resnet_keeps_its_accuracy_in_8_bits_and_is_exact(tmp_path):
    found = script("quantize_resnet").main(tmp_path)
    assert found["float"] > 0.9
    assert found["8 bit"] >= found["float"] - 0.01
    assert found["exact"]
    assert (tmp_path / "digits.onnx").is_file()


def test_a_keras_network_keeps_its_accuracy_is_exact_and_learns_2_bits(tmp_path):
    found = script("quantize_keras").main(tmp_path)
    assert found["float"] > 0.9 and found["8 bit"] >= found["float"] - 0.01 and found["exact"]
    assert found["2 bit weights"] > found["2 bits, nearest codes"] + 0.1
    assert found["2 bits, those trained"] > found["2 bits, nearest codes"] + 0.1
    assert (tmp_path / "digits.keras").is_file() and (tmp_path / "digits.onnx").is_file()


def test_the_chip_of_the_example_refuses_stride_3_and_says_so():
    plan = script("custom_platform").main().plan
    refused = [n for n in plan.nodes.values() if n.op == "Conv2D" and n.exec == "float"]
    assert len(refused) == 1
    assert "stride at most 2" in refused[0].why


def test_the_example_chip_is_the_one_that_the_docs_write():
    shown = re.search(
        r'```yaml title="tiny_npu.yaml"\n(.*?)```', (ROOT / "docs/platforms-howto.md").read_text(), re.DOTALL
    )[1]
    assert (ROOT / "examples/tiny_npu.yaml").read_text().endswith(shown)


def test_an_edited_plan_runs_with_the_edit():
    made, edited = script("plan_editing").main()
    assert edited > made


def test_the_chip_models_say_what_the_built_in_chip_says(monkeypatch):
    """Formats, sets, rules and fusions of the two files are those of the data that `get_model` reads."""
    pytest.importorskip("keras")
    monkeypatch.syspath_prepend(str(ROOT / "examples/hardware_models"))
    plain = script("hardware_models/default_hwm").get_default_hardware_model()
    known = chipfit.get_model("keras", "default")
    named = {o.name for o in plain.operator_set if o.members == (o,)}
    assert named == {o.name for o in known.tp_model.operator_set if o.members == (o,)}
    attached = script("hardware_models/keras_default").get_keras_hardware_model()
    assert said(attached) == said(known)
    mine, theirs = attached.to_platform(), known.to_platform()
    for part in ("formats", "ops", "fuse", "place", "unlisted", "metadata"):
        assert getattr(mine, part) == getattr(theirs, part), part


def said(chip):
    """The layers of every operator set, as data, in any order."""
    sets = chip.to_platform().sets
    return {name: {m.model_dump_json() for m in members} for name, members in sets.items()}


def test_the_chip_models_quantize_a_model(monkeypatch):
    keras = pytest.importorskip("keras")
    monkeypatch.syspath_prepend(str(ROOT / "examples/hardware_models"))
    chip = script("hardware_models/keras_default").get_keras_hardware_model()
    x = keras.Input((8, 8, 3))
    y = keras.layers.Dense(2, name="dense")(keras.layers.Flatten()(keras.layers.Conv2D(4, 3, activation="relu")(x)))
    data = [np.random.default_rng(0).standard_normal((4, 8, 8, 3)).astype("float32")]
    result = chipfit.quantize(keras.Model(x, y), data, chip, progress=False)
    assert result.plan["dense/kernel"].grid.bits == 8
    assert result.edit({"dense": {"bits": 4}}).plan["dense/kernel"].grid.bits == 4
    assert len(result.plan.groups) == 1


@pytest.mark.filterwarnings("ignore")  # of the trainers themselves
@pytest.mark.parametrize(("example", "package"), [("lightning", "lightning"), ("transformers", "accelerate")])
def test_a_trainer_of_others_trains_what_the_device_computes(example, package, tmp_path):
    pytest.importorskip(package, reason=f"{package} is not installed")
    main = script(f"train_with_{example}").main
    found = main() if example == "lightning" else main(tmp_path)
    assert found["last"] < 0.8 * found["first"] and found["exact"]
