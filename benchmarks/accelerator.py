"""Quantize and train on the CPU and on the accelerator at hand; print times, memory, and how far the plans differ.

python benchmarks/accelerator.py            all figures
python benchmarks/accelerator.py --name     the accelerator's name, as `--device` of the tests has it
"""

import argparse
import copy
import time
from functools import partial

import torch
from torch import nn

import chipfit

SETTINGS = {"8 bits": {}, "4 bits": {"overrides": {"Conv2D": {"bits": 4}, "Linear": {"bits": 4}}}}


def network(channels: int = 64) -> nn.Module:
    """Return a residual-free classifier of images [N, 3, 64, 64] with six convolutions."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, o, stride in ((3, 1, 2), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1)):
        inputs = 3 if i == 3 else i * channels
        layers += [nn.Conv2d(inputs, o * channels, 3, stride, 1), nn.BatchNorm2d(o * channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * channels, 100)).eval()


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


def difference(a: chipfit.Result, b: chipfit.Result) -> float:
    """Return the largest relative difference of scales."""
    pairs = [(t.stored, b.plan.tensors[name].stored) for name, t in a.plan.tensors.items()]
    return max(float((s.scale / o.scale - 1).abs().max()) for s, o in pairs if s is not None and o is not None)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--name", action="store_true", help="print the accelerator's name and stop")
    options = parser.parse_args()
    there = accelerator()
    if options.name:
        print(there.type)
        return
    data = [torch.randn(32, 3, 64, 64, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    print(f"torch {torch.__version__}, {there}, 8 batches of 32 images of 64 x 64; seconds, and MiB of the device")
    for name, settings in SETTINGS.items():
        results = []
        for device in (torch.device("cpu"), there):
            model = copy.deepcopy(network()).to(device)
            chipfit.quantize(model, data[:1], "tflite_int8", progress=False, **settings)  # loads kernels
            work = partial(chipfit.quantize, model, data, "tflite_int8", progress=False, **settings)
            result, seconds, memory = measured(device, work)
            results.append(result)
            print(f"{name:8} quantize  {device.type:6} {seconds:8.2f} s {memory:8.0f} MiB")
        print(f"{name:8} largest relative difference of scales: {difference(*results):.1e}")
        for device, result in zip((torch.device("cpu"), there), results, strict=True):
            trained = result.trains("lsq")
            train(trained, data[:1], device)
            _, seconds, memory = measured(device, partial(train, trained, data, device))
            print(f"{name:8} train lsq {device.type:6} {seconds:8.2f} s {memory:8.0f} MiB")


if __name__ == "__main__":
    main()
