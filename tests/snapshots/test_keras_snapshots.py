"""Results of small Keras networks equal their records: graph, decisions, simulation and files."""

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

keras = pytest.importorskip("keras")

import chipfit  # noqa: E402 -- after the import that may skip
from chipfit.calibration.data import as_call  # noqa: E402
from chipfit.errors import ChipfitError  # noqa: E402
from chipfit.frameworks import capture  # noqa: E402
from chipfit.graph.ir import Graph  # noqa: E402
from chipfit.result import Result  # noqa: E402
from chipfit.settings import Settings  # noqa: E402
from tests.keras_zoo import batch_for, make  # noqa: E402
from tests.snapshots.record import record  # noqa: E402
from tests.snapshots.test_snapshots import NEAREST, PLATFORMS, RECORDS, Case, check, kept, write  # noqa: E402

pytestmark = pytest.mark.skipif(keras.config.backend() != "torch", reason="the records are of Keras on torch")

NETWORKS = (
    "mobilenet squeeze_excite concat_pools heads unet transposed separable shared nested many_in_and_out arithmetic "
    "attention embedding norms"
).split()


class KerasCase(Case):
    """A network of the Keras zoo, whose weights are drawn by numpy."""

    exact = False

    def result(self) -> Result:
        model, batch = made(self.zoo)
        with mock.patch("chipfit.reading.capture", return_value=captured(self.zoo).copy()):
            return chipfit.quantize(model, [batch], self.platform, settings=Settings(**NEAREST), progress=False)

    @property
    def zoo(self) -> str:
        return self.network.removeprefix("keras_")

    def taken(self, spelled: bool = False) -> dict[str, Any]:
        unseen = [torch.from_numpy(x) for x in keras.tree.flatten(batch_for(made(self.zoo)[0], seed=5))]
        try:
            return record(self.result(), unseen, PLATFORMS[self.platform], spelled)
        except ChipfitError as e:
            return {"refused": type(e).__name__}


@cache
def made(name: str) -> tuple[Any, Any]:
    return make(name)


@cache
def captured(name: str) -> Graph:
    model, batch = made(name)
    return capture(model, *as_call(batch, model))


CASES = {c.name: c for c in (KerasCase(f"keras_{n}", p) for n in NETWORKS for p in ("ort_cpu", "tflite_int8"))}


@pytest.mark.parametrize("name", CASES)
def test_what_is_decided_and_written_is_what_it_was(name):
    check(CASES[name], CASES[name].taken())


def test_no_record_is_without_its_case():
    assert {name for c in CASES.values() for name in kept(c.network)} == set(CASES)
    assert {f.stem for f in RECORDS.glob("keras_*.yaml")} == {f"keras_{n}" for n in NETWORKS}


if __name__ == "__main__":
    write(CASES)
