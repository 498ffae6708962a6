"""Quantize and train on the CPU and on the accelerator at hand; print times, memory, and how good the results are.

python benchmarks/accelerator.py            all figures
python benchmarks/accelerator.py --name     the accelerator's name, as `--device` of the tests has it
"""

import argparse
import copy
import math
import time
from functools import partial

import torch
from torch import nn

import chipfit

FOUR = {"Conv2D": {"bits": 4}, "Linear": {"bits": 4}}
SETTINGS = {
    "8 bits": {},
    "4 bits": {"overrides": FOUR},
    "learned": {"overrides": FOUR, "settings": chipfit.Settings(reconstruct="block", reconstruct_steps=200)},
}
#: (channels of the first layer, height and width of images, settings)
NETWORKS = [(64, 64, ["8 bits", "4 bits", "learned"]), (128, 128, ["8 bits", "4 bits"])]


def network(channels: int = 64) -> nn.Module:
    """Return a classifier of images [N, 3, height, width] with six convolutions."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, o, stride in ((3, 1, 2), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1)):
        inputs = 3 if i == 3 else i * channels
        layers += [nn.Conv2d(inputs, o * channels, 3, stride, 1), nn.BatchNorm2d(o * channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * channels, 100)).eval()


def images(size: int, seed: int) -> torch.Tensor:
    """Return random images [32, 3, size, size]."""
    return torch.randn(32, 3, size, size, generator=torch.Generator().manual_seed(seed))


def accelerator() -> torch.device:
    """Return the accelerator at hand.

    Raises:
        SystemExit: there is none.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise SystemExit("This machine has no accelerator that torch can use (CUDA, MPS, XPU): nothing was measured.")
    return found


def measured(device: torch.device, work) -> tuple[object, float, float]:
    """Return the result of `work`, its seconds, and the peak of the device's memory in MiB (nan where uncounted)."""
    counters = torch.get_device_module(device) if device.type != "cpu" else None
    countable = counters is not None and hasattr(counters, "reset_peak_memory_stats")
    if countable:
        counters.reset_peak_memory_stats()
    start = time.perf_counter()
    result = work()
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    seconds = time.perf_counter() - start
    return result, seconds, counters.max_memory_allocated() / 2**20 if countable else float("nan")


def train(result: chipfit.Result, data: list[torch.Tensor], device: torch.device) -> None:
    """Take one step of SGD on each batch."""
    model = result.model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for x in data:
        optimizer.zero_grad()
        model(x.to(device)).square().mean().backward()
        optimizer.step()


@torch.no_grad()
def signal_to_noise(result: chipfit.Result, model: nn.Module, x: torch.Tensor) -> float:
    """Return the signal-to-noise ratio of the outputs for images that calibration has not seen, in dB."""
    want = model.cpu()(x)
    noise = result.model.eval().cpu()(x) - want
    return 10 * math.log10(float(want.square().sum() / noise.square().sum()))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--name", action="store_true", help="print the accelerator's name and stop")
    options = parser.parse_args()
    there = accelerator()
    if options.name:
        print(there.type)
        return
    title = getattr(torch.get_device_module(there), "get_device_name", lambda: there.type)()
    print(f"torch {torch.__version__}, {title}, {torch.get_num_threads()} threads; 8 batches of 32 images")
    print("network    settings  device   quantize    memory   training    memory   unseen images")
    for channels, size, names in NETWORKS:
        data = [images(size, k) for k in range(8)]
        for name in names:
            for device in (torch.device("cpu"), there):
                compare(f"{channels} x {size}", name, device, network(channels), data)


def compare(title: str, name: str, device: torch.device, model: nn.Module, data: list[torch.Tensor]) -> None:
    """Print a line: seconds and MiB of quantizing and of one epoch of training with LSQ, and the quality."""
    there = copy.deepcopy(model).to(device)
    quantize = partial(chipfit.quantize, there, platform="tflite_int8", progress=False, **SETTINGS[name])
    quantize(data[:1])  # loads kernels
    result, seconds, memory = measured(device, partial(quantize, data))
    quality = signal_to_noise(result, copy.deepcopy(model), images(data[0].shape[-1], 99))
    trained = result.trains("lsq")
    train(trained, data[:1], device)
    _, epoch, more = measured(device, partial(train, trained, data, device))
    row = f"{title:10} {name:9} {device.type:6} {seconds:8.2f} s {memory:6.0f} MiB {epoch:8.2f} s {more:6.0f} MiB"
    print(f"{row} {quality:8.1f} dB", flush=True)


if __name__ == "__main__":
    main()
