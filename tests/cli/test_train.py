"""`chipfit train`: labelled data or a loop of the user's, from a saved result or a model, to one unit."""

import re

import numpy as np
import pytest
import torch

import chipfit
from chipfit.errors import ChipfitError
from tests.build import command

MINE = "tests.cli.mine"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("train")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(96, 3, 8, 8)).astype("float32"), rng.integers(0, 3, 96)
    x[np.arange(96), y] += 1.0  # what there is to learn
    np.savez(path / "d.npz", x=x, y=y)
    np.savez(path / "bare.npz", x=x)
    np.savez(path / "wrong.npz", x=x, y=y + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        done = command("quantize", f"{MINE}:net", "--data", "d.npz", "--out", "saved", "--no-verify")
        assert done.exit_code == 0, done.output
    return path


@pytest.fixture(autouse=True)
def _there(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_labels_in_an_archive_are_enough_to_train(folder):
    done = command("train", "saved", "--data", "d.npz", "--epochs", "3", "--rate", "0.02", "--out", "trained")
    assert done.exit_code == 0, done.output
    assert {p.name for p in (folder / "trained").iterdir()} == set("model.onnx plan report.html manifest.json".split())
    assert "epoch 3 of 3: loss" in done.output and "0 of" in done.output
    before, after = (float(done.output.split(word)[0].split()[-1].strip("%")) for word in (" before", " after"))
    assert after > before + 10
    old, new = chipfit.load(folder / "saved/plan"), chipfit.load(folder / "trained/plan")
    assert not torch.equal(old.graph.weights["3.weight"], new.graph.weights["3.weight"])
    assert new.plan.tensors["3.weight"].origin.endswith("trained")


def test_a_model_is_quantized_first_and_a_loop_of_the_user_trains_it(folder):
    args = "--data", "d.npz", "--method", "ste", "--loop", f"{MINE}:loop", "--platform", "ort_cpu", "--bits", "3=8"
    done = command("train", f"{MINE}:net", *args, "--out", "looped")
    assert done.exit_code == 0, done.output
    assert chipfit.load(folder / "looped/plan").verify([torch.randn(4, 3, 8, 8)]).exact


ALGORITHM = """\
from dataclasses import dataclass
from chipfit.quantizers.algorithms.lsq import LSQ
from chipfit.registry import register
from tests.mct.trainable.quantizers_of_a_user import OurActivations

@register("training", "half")
@dataclass(frozen=True)
class Half(LSQ):
    share: float = 0.5

    def init(self, stored, x):
        return {"scale": stored.scale * self.share}

class Other(LSQ): ...
"""


@pytest.mark.usefixtures("drop_ins")
def test_an_algorithm_of_ones_own_trains_by_the_place_of_its_class(folder):
    (folder / "mine.py").write_text(ALGORITHM)
    for method, share in (("mine:Half", 0.5), ("mine:Half(share=0.25)", 0.25)):
        done = command("train", "saved", "--data", "d.npz", "--method", method, "--rate", "1e-9", "--out", "halved")
        assert done.exit_code == 0, done.output
        old, new = (chipfit.load(folder / f"{d}/plan").plan["3.weight"].scale for d in ("saved", "halved"))
        torch.testing.assert_close(new, share * old)
    wrong = {
        "mine:Half(shard=1)": "share",
        "mine:Other": "not registered|training algorithm",
        "mine:OurActivations": "none of OurActivations quantizes",
        "mine:register": "must be a name or",
    }
    for method, says in wrong.items():
        done = command("train", "saved", "--data", "d.npz", "--method", method, "--out", "refused")
        assert isinstance(done.exception, ChipfitError), done.exception
        assert re.search(says, str(done.exception)), done.exception


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("saved --data d.npz --method lsk", "'lsq'"),
        ("saved --data d.npz --method lsq(scaling=True)", "use_grad_scaling"),
        ("saved --data bare.npz", "Training requires labels"),
        ("saved --data wrong.npz", "must be classes of the model"),
        ("saved --data d.npz --rate -1", "Learning rate"),
        ("saved --data d.npz --rate 1e30", "step"),
        ("saved --data d.npz --rate 1e300", "below 1e38"),
        ("saved --data d.npz --platform ort_cpu", "--platform does not apply"),
        ("saved --data d.npz --format pdf", "pdf"),
        ("saved --data d.npz --loop MOD:broken_loop", "fails"),
        ("saved --data d.npz --loop MOD:number", "fails"),
        ("saved --data d.npz --loop MOD:missing", "cannot be imported"),
        ("MOD:Two --data d.npz", "must be a classifier"),
        ("saved --data d.npz --out .", "is not the output of"),
        ("nowhere --data d.npz", "Model must be a file or module:factory"),
    ],
)
def test_what_cannot_be_trained_is_refused(args, says, folder):
    args = ["--out", "refused", *args.replace("MOD", MINE).split()]  # the last --out counts
    done = command("train", *args)
    assert isinstance(done.exception, ChipfitError) and says in str(done.exception), done.exception
    assert not (folder / "refused").exists()
