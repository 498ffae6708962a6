"""Prove networks for microcontrollers on TensorFlow Lite Micro, and compare the arena that is predicted with its own.

    python benchmarks/microcontrollers.py [--only NAME ...]

44 networks of PyTorch, Keras and ONNX with random weights and plausible statistics of batch norms, none of which a test
uses: image classifiers, keyword spotters, person detectors, autoencoders, one-dimensional convolutions, a small
transformer. Each is quantized for `tflm_cmsis_nn`, exported and run on data that are new to calibration. Every integer
of every tensor must equal the interpreter's. Networks that end in a typed error are counted as left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
os.environ.setdefault("KERAS_BACKEND", "torch")

import itertools

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import chipfit
from chipfit.errors import ChipfitError
from chipfit.export.tflite.arena import arena
from chipfit.runtimes.tflm import Tflm

PLATFORM, SAMPLES = "tflm_cmsis_nn", 16
NEAR = 0.05  #: of the interpreter's arena


class Block(nn.Module):
    """Layers by name, and a function of them and of the inputs."""

    def __init__(self, f: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.f = f
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *xs: Tensor) -> Any:
        return self.f(self, *xs)


def conv(i: int, o: int, k: int = 3, s: int = 1, act: nn.Module | None = None, **options: Any) -> nn.Sequential:
    """Return a convolution with batch norm and activation."""
    padding = options.pop("padding") if "padding" in options else k // 2
    body = nn.Conv2d(i, o, k, s, padding, bias=False, **options)
    return nn.Sequential(body, nn.BatchNorm2d(o), act or nn.ReLU())


def separable(i: int, o: int, s: int = 1, act: Callable[[], nn.Module] = nn.ReLU, k: int = 3) -> nn.Sequential:
    """Return a depthwise convolution and a pointwise one."""
    return nn.Sequential(conv(i, i, k, s, act(), groups=i), conv(i, o, 1, act=act()))


def conv1(i: int, o: int, k: int = 3, s: int = 1, **options: Any) -> nn.Sequential:
    """Return a one-dimensional convolution with batch norm and activation."""
    return nn.Sequential(nn.Conv1d(i, o, k, s, options.pop("padding", k // 2), **options), nn.BatchNorm1d(o), nn.ReLU())


def head(i: int, o: int, *more: nn.Module) -> nn.Sequential:
    """Return a mean over the image and a classifier."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, o), *more)


def residual(i: int, o: int, s: int = 1, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    """Return a residual block."""
    short = conv(i, o, 1, s, nn.Identity()) if i != o or s != 1 else nn.Identity()
    parts = {"a": conv(i, o, 3, s, act()), "b": conv(o, o, act=nn.Identity()), "short": short, "act": act()}
    return Block(lambda m, x: m.act(m.b(m.a(x)) + m.short(x)), **parts)


def inverted(
    i: int, o: int, s: int = 1, wide: int = 3, k: int = 3, act: Callable[[], nn.Module] = nn.ReLU6, gate: bool = False
) -> nn.Module:
    """Return an inverted residual, perhaps with a squeeze-and-excite gate."""
    h = wide * i
    layers: dict[str, nn.Module] = {"expand": conv(i, h, 1, act=act()), "deep": conv(h, h, k, s, act(), groups=h)}
    layers["project"] = conv(h, o, 1, act=nn.Identity())
    if gate:
        squeeze = nn.AdaptiveAvgPool2d(1), nn.Conv2d(h, 4, 1), nn.ReLU(), nn.Conv2d(4, h, 1), nn.Hardsigmoid()
        layers["gate"] = nn.Sequential(*squeeze)

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.deep(m.expand(x))
        y = m.project(y * m.gate(y) if gate else y)
        return x + y if i == o and s == 1 else y

    return Block(forward, **layers)


def bottleneck(i: int, o: int) -> nn.Module:
    """Return two branches that are joined along channels."""
    parts = {"squeeze": conv(i, o // 2, 1), "one": conv(o // 2, o, 1), "three": conv(o // 2, o)}
    return Block(lambda m, x: torch.cat([m.one(y := m.squeeze(x)), m.three(y)], 1), **parts)


def dense(i: int, grow: int, count: int) -> nn.Module:
    """Return layers each of which reads the results of all before it."""
    layers = {f"l{k}": conv(i + k * grow, grow) for k in range(count)}

    def forward(m: Any, x: Tensor) -> Tensor:
        for k in range(count):
            x = torch.cat([x, getattr(m, f"l{k}")(x)], 1)
        return x

    return Block(forward, **layers)


def shuffle(c: int) -> nn.Module:
    """Return half of the channels convolved, and all of them shuffled."""
    half = c // 2

    def forward(m: Any, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        y = torch.cat([a, m.project(m.deep(m.expand(b)))], 1)
        return F.channel_shuffle(y, 2)

    deep = conv(half, half, groups=half, act=nn.Identity())
    return Block(forward, expand=conv(half, half, 1), deep=deep, project=conv(half, half, 1))


def unet() -> nn.Module:
    """Return an encoder and a decoder with a skip."""

    def forward(m: Any, x: Tensor) -> Tensor:
        a = m.down(x)
        b = m.deep(F.max_pool2d(a, 2))
        return m.last(torch.cat([a, F.interpolate(b, scale_factor=2.0, mode="nearest")], 1))

    return Block(forward, down=conv(3, 8), deep=conv(8, 16), last=nn.Conv2d(24, 2, 1))


def attention(d: int = 16, heads: int = 2) -> nn.Module:
    """Return a layer of a transformer with ReLU; its norms are batch norms."""

    def forward(m: Any, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (y.reshape(n, t, heads, d // heads).transpose(1, 2) for y in m.qkv(x).chunk(3, -1))
        y = torch.softmax(q @ k.transpose(-1, -2) * (d // heads) ** -0.5, -1) @ v
        x = x + m.out(y.transpose(1, 2).reshape(n, t, d))
        return x + m.down(torch.relu(m.up(x)))

    layers = {
        "qkv": nn.Linear(d, 3 * d),
        "out": nn.Linear(d, d),
        "up": nn.Linear(d, 2 * d),
        "down": nn.Linear(2 * d, d),
    }
    return Block(forward, **layers)


def mixer(tokens: int, d: int) -> nn.Module:
    """Return a layer of an MLP mixer with ReLU."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x + m.t2(torch.relu(m.t1(x.transpose(1, 2)))).transpose(1, 2)
        return x + m.c2(torch.relu(m.c1(x)))

    layers = {"t1": nn.Linear(tokens, 24), "t2": nn.Linear(24, tokens), "c1": nn.Linear(d, 24), "c2": nn.Linear(24, d)}
    return Block(forward, **layers)


def gated(c: int, dilation: int) -> nn.Module:
    """Return a layer of a WaveNet."""
    parts = {k: nn.Conv1d(c, c, 3, padding=dilation, dilation=dilation) for k in ("filter", "gate")}
    return Block(lambda m, x: x + torch.tanh(m.filter(x)) * torch.sigmoid(m.gate(x)), **parts)


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def tokens(d: int) -> nn.Module:
    """Return the pixels of an image as tokens, [N, H * W, d]."""
    return Block(lambda m, x: m.patch(x).flatten(2).transpose(1, 2), patch=nn.Conv2d(1, d, 4, 4))


def mean_of_tokens(d: int, o: int) -> nn.Module:
    return Block(lambda m, x: m.head(x.mean(1)), head=nn.Linear(d, o))


def detector() -> nn.Module:
    """Return boxes and scores of one scale."""
    layers = {"body": chain(conv(3, 8, s=2), separable(8, 16, 2), separable(16, 24)), "box": nn.Conv2d(24, 8, 1)}
    return Block(lambda m, x: (m.box(y := m.body(x)), torch.sigmoid(m.score(y))), **layers, score=nn.Conv2d(24, 4, 1))


def fusion() -> nn.Module:
    """Return a network of two sensors."""
    layers = {"a": chain(conv1(6, 16, 5, 2), conv1(16, 16)), "b": nn.Linear(10, 16), "head": nn.Linear(32, 4)}
    return Block(lambda m, x, y: m.head(torch.cat([m.a(x).mean(2), torch.relu(m.b(y))], 1)), **layers)


def siamese() -> nn.Module:
    """Return the difference of two images' features."""
    body = chain(conv(1, 8, s=2), conv(8, 16, s=2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Block(lambda m, x, y: m.head(m.body(x) - m.body(y)), body=body, head=nn.Linear(16, 2))


def recurrent(kind: type[nn.Module]) -> nn.Module:
    """Return the last state of a recurrent layer, classified."""
    return Block(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=kind(8, 12, batch_first=True), head=nn.Linear(12, 4))


def gru_cell() -> nn.Module:
    """Return one step of a streaming network, whose state is an input and an output."""
    layers = {"cell": nn.GRUCell(10, 16), "head": nn.Linear(16, 4)}
    return Block(lambda m, x, h: (m.head(new := m.cell(x, h)), new), **layers)


def auto(*sizes: int) -> nn.Module:
    """Return linear layers with batch norms between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]
    return nn.Sequential(*layers[:-2])


GRAY, RGB, MFCC, WAVE = (1, 32, 32), (3, 24, 24), (1, 49, 10), (2, 64)
#: name -> network and the shapes of its inputs
TORCH: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "digits": (lambda: chain(conv(1, 6, 5), nn.MaxPool2d(2), conv(6, 16, 5), head(16, 10, nn.Softmax(1))), (GRAY,)),
    "cnn without norms": (
        lambda: chain(
            nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3, 2), nn.ReLU6(), nn.Flatten(), nn.Linear(1200, 5)
        ),
        (RGB,),
    ),
    "vgg": (lambda: chain(conv(3, 8), conv(8, 8), nn.MaxPool2d(2), conv(8, 16), nn.AvgPool2d(2), head(16, 5)), (RGB,)),
    "resnet": (
        lambda: chain(conv(3, 8), residual(8, 8), residual(8, 16, 2), residual(16, 24, 2), head(24, 10)),
        (RGB,),
    ),
    "resnet leaky": (
        lambda: chain(conv(3, 8), residual(8, 16, 2, lambda: nn.LeakyReLU(0.1)), head(16, 3)),
        (RGB,),
    ),
    "resnet prelu": (
        lambda: chain(conv(3, 8, act=nn.PReLU(8)), residual(8, 8, 1, lambda: nn.PReLU(8)), head(8, 3)),
        (RGB,),
    ),
    "resnet elu": (lambda: chain(conv(3, 8, act=nn.ELU()), residual(8, 12, 2, nn.ELU), head(12, 3)), (RGB,)),
    "person detection": (
        lambda: chain(
            conv(1, 8, s=2), separable(8, 16), separable(16, 32, 2), separable(32, 48, 2), head(48, 2, nn.Softmax(1))
        ),
        ((1, 48, 48),),
    ),
    "keyword spotting": (
        lambda: chain(
            conv(1, 24, (10, 4), 2, padding=(5, 1)), *(separable(24, 24) for _ in range(3)), head(24, 12, nn.Softmax(1))
        ),
        (MFCC,),
    ),
    "keyword spotting, wide": (
        lambda: chain(
            conv(1, 40, (10, 4), (2, 1), padding=(4, 1)), separable(40, 40, 2), separable(40, 40), head(40, 35)
        ),
        (MFCC,),
    ),
    "mobilenet v2": (
        lambda: chain(conv(3, 8, s=2, act=nn.ReLU6()), inverted(8, 8), inverted(8, 12, 2), head(12, 5)),
        (RGB,),
    ),
    "mobilenet v3": (
        lambda: chain(conv(3, 8, s=2, act=nn.Hardswish()), inverted(8, 8, act=nn.Hardswish, gate=True), head(8, 5)),
        (RGB,),
    ),
    "kernels of 5 and 7": (
        lambda: chain(conv(3, 8, 5, 2), inverted(8, 8, k=7, wide=2), inverted(8, 16, 2, k=5), head(16, 5)),
        (RGB,),
    ),
    "squeezenet": (
        lambda: chain(conv(3, 8, s=2), bottleneck(8, 8), nn.MaxPool2d(2), bottleneck(16, 8), head(16, 6)),
        (RGB,),
    ),
    "densenet": (lambda: chain(conv(3, 8, s=2), dense(8, 4, 3), nn.AvgPool2d(2), head(20, 6)), (RGB,)),
    "shufflenet": (lambda: chain(conv(3, 16, s=2), shuffle(16), shuffle(16), head(16, 6)), (RGB,)),
    "segmentation": (unet, ((3, 16, 16),)),
    "detector": (detector, (RGB,)),
    "super resolution": (
        lambda: chain(conv(1, 12), conv(12, 8), nn.Conv2d(8, 4, 3, 1, 1), nn.PixelShuffle(2)),
        ((1, 12, 12),),
    ),
    "bilinear decoder": (
        lambda: chain(
            conv(3, 8, s=2), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), nn.Conv2d(8, 3, 1)
        ),
        ((3, 16, 16),),
    ),
    "autoencoder": (lambda: auto(160, 64, 64, 8, 64, 64, 160), ((160,),)),
    "convolutional autoencoder": (
        lambda: chain(
            conv(1, 8, s=2), conv(8, 4, s=2), nn.ConvTranspose2d(4, 8, 2, 2), nn.ReLU(), nn.ConvTranspose2d(8, 1, 2, 2)
        ),
        ((1, 16, 16),),
    ),
    "perceptron with tanh": (
        lambda: chain(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 16), nn.Sigmoid(), nn.Linear(16, 1)),
        ((12,),),
    ),
    "temporal convolutions": (
        lambda: chain(
            conv1(2, 16), *(conv1(16, 16, 3, 1, padding=d, dilation=d) for d in (1, 2, 4)), nn.Conv1d(16, 3, 1)
        ),
        (WAVE,),
    ),
    "electrocardiogram": (
        lambda: chain(
            conv1(2, 8, 7, 2),
            nn.MaxPool1d(2),
            conv1(8, 16, 5, 2),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(16, 5),
        ),
        (WAVE,),
    ),
    "depthwise in one dimension": (
        lambda: chain(
            conv1(2, 16, 5, 2), conv1(16, 16, 9, groups=16), conv1(16, 8, 1), nn.Flatten(), nn.Linear(256, 4)
        ),
        (WAVE,),
    ),
    "wavenet": (lambda: chain(nn.Conv1d(2, 8, 1), gated(8, 1), gated(8, 2), nn.Conv1d(8, 4, 1)), (WAVE,)),
    "largest over time": (
        lambda: Block(lambda m, x: m.head(m.body(x).amax(2)), body=conv1(2, 16, 5), head=nn.Linear(16, 4)),
        (WAVE,),
    ),
    "transformer": (lambda: chain(tokens(16), attention(), mean_of_tokens(16, 4)), ((1, 16, 16),)),
    "mixer": (lambda: chain(tokens(16), mixer(16, 16), mean_of_tokens(16, 4)), ((1, 16, 16),)),
    "two sensors": (fusion, ((6, 40), (10,))),
    "two images": (siamese, ((1, 16, 16), (1, 16, 16))),
    "step of a GRU": (gru_cell, ((10,), (16,))),
    "GRU": (lambda: recurrent(nn.GRU), ((6, 8),)),
    "LSTM": (lambda: recurrent(nn.LSTM), ((6, 8),)),
}
#: networks that are exported to ONNX first
ONNX = ("resnet", "keyword spotting", "mobilenet v2", "electrocardiogram", "autoencoder")


def keras_networks() -> dict[str, Callable[[], Any]]:
    """Return networks of Keras."""
    import keras
    from keras import layers as L

    def keyword() -> Any:
        x = inputs = keras.Input((49, 10, 1))
        x = L.ReLU()(L.BatchNormalization()(L.Conv2D(24, (10, 4), 2, "same", use_bias=False)(x)))
        for _ in range(2):
            x = L.ReLU()(L.BatchNormalization()(L.DepthwiseConv2D(3, padding="same", use_bias=False)(x)))
            x = L.ReLU()(L.BatchNormalization()(L.Conv2D(24, 1, use_bias=False)(x)))
        x = L.Flatten()(L.AveragePooling2D((25, 5))(L.Dropout(0.2)(x)))
        return keras.Model(inputs, L.Dense(12, "softmax")(x))

    def resnet() -> Any:
        x = inputs = keras.Input((24, 24, 3))
        x = L.Conv2D(8, 3, padding="same", activation="relu")(x)
        y = L.BatchNormalization()(L.Conv2D(8, 3, padding="same", activation="relu")(x))
        x = L.GlobalAveragePooling2D()(L.ReLU()(L.Add()([x, y])))
        return keras.Model(inputs, L.Dense(10)(x))

    def waves() -> Any:
        x = inputs = keras.Input((64, 2))
        x = L.MaxPooling1D(2)(L.Conv1D(16, 5, activation="relu")(L.ZeroPadding1D(2)(x)))
        x = L.GlobalMaxPooling1D()(L.SeparableConv1D(16, 3, activation="relu")(x))
        return keras.Model(inputs, L.Dense(4, "sigmoid")(x))

    def autoencoder() -> Any:
        x = inputs = keras.Input((80,))
        for n in (32, 8, 32):
            x = L.Activation("relu")(L.BatchNormalization()(L.Dense(n)(x)))
        return keras.Model(inputs, L.Dense(80)(x))

    return {"keyword spotting": keyword, "resnet": resnet, "waves": waves, "autoencoder": autoencoder}


def plausible(net: nn.Module) -> nn.Module:
    """Give batch norms statistics as of trained networks."""
    for m in net.modules():
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(m.running_mean, -0.3, 0.3)
            nn.init.uniform_(m.running_var, 0.5, 2.0)
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.uniform_(m.bias, -0.3, 0.3)
    return net.eval()


def drawn(seed: int, *shapes: tuple[int, ...]) -> Any:
    """Return a batch of inputs."""
    draw = torch.Generator().manual_seed(seed)
    batch = tuple(torch.randn((SAMPLES, *shape), generator=draw) for shape in shapes)
    return batch if len(batch) > 1 else batch[0]


def as_onnx(net: nn.Module, batch: Tensor, folder: Path) -> Path:
    """Return a file of the network; its batch size is open."""
    path = folder / "m.onnx"
    torch.onnx.export(
        net, (batch,), str(path), dynamo=False, opset_version=17, dynamic_axes={"x": {0: "n"}}, input_names=["x"]
    )
    return path


@dataclass(frozen=True)
class Outcome:
    """What was found of one network."""

    name: str
    framework: str
    why: str = ""  #: the error that ended it
    integers: int = 0
    differing: int = 0  #: each side on its own results
    exact: bool = False  #: nor does any operator depart, given the interpreter's operands
    needed: int = 0  #: arena of the interpreter [byte]
    predicted: int = 0  #: arena [byte]
    flash: int = 0  #: file [byte]

    @property
    def holds(self) -> bool:
        """True where every integer is the interpreter's, and the arena is near."""
        return self.exact and self.integers > 0 and abs(self.predicted - self.needed) <= NEAR * self.needed


def tried(name: str, framework: str, model: Any, shapes: tuple[tuple[int, ...], ...]) -> Outcome:
    """Quantize, export and verify one network."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            data = drawn(1, *shapes)
            source = as_onnx(model, data, Path(folder)) if framework == "ONNX" else model
            result = chipfit.quantize(source, [data], platform=PLATFORM, progress=False)
            file = result.export(Path(folder) / "m.tflite", batch=1)
            found = result.verify([drawn(2, *shapes)], path=file, runtime="tflm")
            content = file.read_bytes()
            sizes = Tflm.arena(content), arena(content).total, len(content)
        except ChipfitError as e:
            return Outcome(name, framework, f"{type(e).__name__}: {e}")
    return Outcome(name, framework, "", found.integers, found.differing, found.exact, *sizes)


def outcomes(only: list[str]) -> list[Outcome]:
    """Return what was found of all networks, or of those named."""
    console, found = Console(stderr=True), list[Outcome]()
    jobs = [(name, "PyTorch", make, shapes) for name, (make, shapes) in TORCH.items()]
    jobs += [(name, "ONNX", *TORCH[name]) for name in ONNX]
    keras = keras_networks()
    jobs += [(name, "Keras", make, ()) for name, make in keras.items()]
    for name, framework, make, shapes in jobs:
        if only and name not in only:
            continue
        torch.manual_seed(0)
        model = make()
        if framework == "Keras":
            shapes = (tuple(model.input_shape[1:]),)
        else:
            model = plausible(model)
        found.append(tried(name, framework, model, shapes))
        console.print(
            f"{framework} {name}: {found[-1].why or f'{found[-1].differing} of {found[-1].integers:,} differ'}"
        )
    return found


def main() -> int:
    """Print the table, and return 1 where a network departs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these networks")
    found = outcomes(parser.parse_args().only)
    table = Table("network", "framework", "integers", "differ", "arena", "predicted", "error [%]", "file", box=None)
    ran = [o for o in found if not o.why]
    for o in ran:
        error = f"{100 * (o.predicted - o.needed) / o.needed:+.2f}"
        sizes = (f"{n:,}" for n in (o.integers, o.differing, o.needed, o.predicted))
        table.add_row(o.name, o.framework, *sizes, error, f"{o.flash:,}")
    console = Console(width=140)
    console.print(table)
    exact, near = sum(o.exact for o in ran), max((abs(o.predicted / o.needed - 1) for o in ran), default=0.0)
    console.print(f"{exact} of {len(ran)} networks without a differing integer; arena within {100 * near:.2f} %")
    for o in found:
        if o.why:
            console.print(f"left out: {o.framework} {o.name}: {o.why}")
    return int(not all(o.holds for o in ran))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
