"""Keyword spotters with a GRU and an LSTM, trained on tones and quantized for a microcontroller.

Each word is two tones, one after the other, in noise. Features are 30 frames of 16 log energies, as a microcontroller
computes them. Each network is quantized over whole sequences, and as a network of one step that keeps its state.

Printed are the accuracy of the float and of the quantized network on data that neither training nor calibration has
seen, operators in float, whether the interpreter of TensorFlow Lite Micro computes the same integers, whether the C
file, compiled with gcc, holds the bytes of the `.tflite` file, and its size. The command fails if accuracy drops by
more than half a point, an operator stays in float, an integer differs or a byte does.

    python -m benchmarks.recurrent
"""

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import chipfit

FRAMES, BANDS, RATE = 30, 16, 8000
PITCHES = (300.0, 600.0, 1200.0, 2400.0)
WORDS = tuple(itertools.permutations(range(len(PITCHES)), 2))
LOSS = 0.005  #: of accuracy, at most


def tones(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features [count, frames, bands] and words [count]."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.rand(*size, generator=random)  # noqa: E731
    words = torch.randint(len(WORDS), (count,), generator=random)
    pitch = torch.tensor(PITCHES)[torch.tensor(WORDS)[words]] * (0.85 + 0.3 * draw(count, 2))  # [count, 2]
    t = torch.arange(FRAMES * 160) / RATE
    change = 0.2 + 0.2 * draw(count, 1)
    heard = torch.where(t < change, pitch[:, :1], pitch[:, 1:]) / RATE
    sound = torch.sin(2 * torch.pi * heard.cumsum(1)) * (0.05 + draw(count, 1))
    start, end = 0.05 + 0.1 * draw(count, 1), 0.45 + 0.1 * draw(count, 1)
    sound = sound * ((t > start) & (t < end)) + 0.3 * torch.randn(sound.shape, generator=random)
    power = torch.fft.rfft(sound.view(count, FRAMES, 160) * torch.hann_window(160)).abs().square()[..., 1:81]
    return (power.view(count, FRAMES, BANDS, 5).mean(-1) + 1e-3).log(), words


class Spotter(nn.Module):
    """A recurrent layer over the frames, and a classifier of its last state."""

    def __init__(self, kind: type[nn.Module], hidden: int = 32) -> None:
        super().__init__()
        self.inside, self.layer = nn.Linear(BANDS, hidden), kind(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, len(WORDS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(torch.relu(self.inside(x)))[0][:, -1])


def trained(kind: type[nn.Module], epochs: int = 25) -> nn.Module:
    """Return a trained spotter."""
    torch.manual_seed(0)
    model, (x, y) = Spotter(kind), tones(6000, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
    return model.eval()


def accuracy(outputs: torch.Tensor, words: torch.Tensor) -> float:
    return float((outputs.argmax(1) == words).float().mean())


def walked(model: nn.Module, states: int, sequences: torch.Tensor, hidden: int = 32) -> torch.Tensor:
    """Return the outputs of a network of one step after the last step."""
    memory = [torch.zeros(len(sequences), hidden)] * states
    with torch.no_grad():
        for step in sequences.unbind(1):
            outputs, *memory = model(step, *memory)
    return outputs


def host_build(header: Path) -> bytes:
    """Compile a C file with gcc, and return the bytes of its array."""
    found = re.search(r"(\w+)\[\] = ", header.read_text())
    assert found is not None
    code = f'#include <stdio.h>\n#include "{header.name}"\n'
    code += f"int main(void) {{ return fwrite({found[1]}, 1, {found[1]}_len, stdout) != sizeof {found[1]}; }}\n"
    (header.parent / "main.c").write_text(code)
    program = header.parent / "main"
    subprocess.run(["gcc", "-std=c11", "-Wall", "-Werror", "-o", program, header.parent / "main.c"], check=True)
    return subprocess.run([program], capture_output=True, check=True).stdout


def row(name: str, result: chipfit.Result, calls: list[Any], points: tuple[float, float]) -> bool:
    """Print one row; return whether the network keeps its promises."""
    with tempfile.TemporaryDirectory() as folder:
        file, header = (result.export(Path(folder) / f"network{s}", batch=1, io="int8") for s in (".tflite", ".h"))
        bytes_, size = host_build(header) == file.read_bytes(), file.stat().st_size
    check = result.verify(calls)
    floats = sum(planned.exec == "float" for planned in result.plan.nodes.values())
    good = check.exact and bytes_ and not floats and points[1] >= points[0] - LOSS
    figures = f"{100 * points[0]:7.2f} {100 * points[1]:9.2f} {floats:7} {check.exact!s:>6} {bytes_!s:>6} {size:8}"
    print(f"{name:<16} {figures}  {'' if good else 'FAILED'}", flush=True)
    return good


def main() -> int:
    """Train, quantize and print; return 1 if a network loses more than half a point, has floats or is not exact."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    calibration, (test, words), good = tones(256, 3)[0], tones(2000, 2), True
    print(f"{'network':<16} {'float':>7} {'quantized':>9} {'floats':>7} {'exact':>6} {'C file':>6} {'bytes':>8}")
    for kind in (nn.GRU, nn.LSTM):
        model = trained(kind)
        with torch.no_grad():
            before = accuracy(model(test), words)
        batches = list(calibration.split(32))
        whole = chipfit.quantize(model, batches, platform="tflm_cmsis_nn", progress=False)
        with torch.no_grad():
            after = accuracy(whole.model(test), words)
        good &= row(kind.__name__, whole, [test[:32]], (before, after))
        step = chipfit.streaming(model, calibration[:2])
        calls = step.calls([calibration[:64]])
        one = chipfit.quantize(step.model, calls, platform="tflm_cmsis_nn", states=step.states, progress=False)
        after = accuracy(walked(one.model, len(step.states), test), words)
        good &= row(f"{kind.__name__}, one step", one, calls[::5], (before, after))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
