"""Ranges from the elements that calibration counts, beside ranges from all elements: signal-to-noise on other data.

`python -m benchmarks.counted_elements` prints, for 8-bit activations of several distributions, how much is lost.
"""

from __future__ import annotations

import math

import torch

from chipfit.calibration.collect import Need, TensorStats
from chipfit.quantizers.grids import Grid, fake_quantize
from chipfit.ranges import choose
from chipfit.ranges.qparams import QParams

A8 = Grid(bits=8, qmin=0, qmax=255, zero="any")
BATCHES, SEEDS = 4, 8
DISTRIBUTIONS = {
    "normal": torch.distributions.Normal(0.0, 1.0),
    "Laplace": torch.distributions.Laplace(0.0, 1.0),
    "Student's t, 4 degrees": torch.distributions.StudentT(4.0),
}


def sqnr(x: torch.Tensor, q: QParams) -> float:
    """Return the signal-to-noise ratio of x on the grid [dB]."""
    noise = (fake_quantize(x, q.scale, q.zero_point, A8) - x).double().square().sum()
    return 10 * math.log10(float(x.double().square().sum() / noise))


def lost(values: torch.distributions.Distribution, relu: bool, size: int, seed: int) -> float:
    """Return what ranges of counted elements lose to ranges of all elements, on held-out data [dB]."""
    torch.manual_seed(seed)
    drawn = values.sample((2, BATCHES, size))
    calibration, others = drawn.relu() if relu else drawn
    stats = TensorStats("x")
    for batch in calibration:
        stats.update(batch, Need())
    counted, whole = choose(stats, A8, rule="mse"), choose(calibration.reshape(1, -1), A8, rule="mse")
    return sqnr(others, whole) - sqnr(others, counted)


def main() -> None:
    print(f"{'values':36s}{'elements a batch':>18s}{'dB below a search over all':>28s}")
    for name, values in DISTRIBUTIONS.items():
        for relu in (False, True):
            for size in (10_000, 30_000, 400_000):
                mean = sum(lost(values, relu, size, seed) for seed in range(SEEDS)) / SEEDS
                print(f"{name + (', ReLU' if relu else ''):36s}{size:18,d}{mean:28.2f}")


if __name__ == "__main__":
    main()
