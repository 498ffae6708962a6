"""A sentence encoder for ONNX Runtime: quality, size and time beside float and ONNX Runtime's own dynamic quantization.

    python benchmarks/encoder.py [FILE [--data DATA.npz]] [--ways auto dynamic "4 bits"] [--sentences 512] [--steps 200]

Without FILE it builds and trains an encoder of six blocks (masked attention and MLP, layer norms in front, mean
pooling over the words) to classify 64 topics, in about two minutes of processor time. One word in 64 is a separator
whose embedding is 100 times the rest in one channel, as in residual streams of large models. FILE is any
encoder: a `.pt2` program, or `module:factory`; `--data` are its inputs by name, sentences first (`input_ids`,
`attention_mask` ...); without it token ids are drawn.

Quality: the mean cosine between a sentence's vector (the mean over its words where there are several) and the float
network's, and the share of sentences whose nearest neighbour among the others is the same. Half of the sentences
calibrate, the other half is measured. Time: of `--batch` sentences through ONNX Runtime on one thread, the median over
the runs of all files, interleaved.

It also prints the cost of chipfit itself: the time to write the file, the time to verify it (its limit is a multiple of
the time of ONNX Runtime over the same sentences), and the memory of `quantize` and `export` in a process of its own
with all libraries loaded (its limit is a multiple of the float weights and the results of all operators for one batch).
The exit status counts figures over their limit. Times are processor seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

if os.environ.get("OMP_NUM_THREADS") != "1":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from benchmarks.measure import both_clocks, grown_mib
from benchmarks.models import AttentionBlock
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import chipfit
from chipfit.cli.inputs import load_model
from chipfit.engine.run import run
from chipfit.graph.ir import Graph

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS, TOPICS = 6000, 32, 192, 6, 6, 64
PADDING, SEPARATOR = 0, 1
#: label -> platform and options of `chipfit.quantize`
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("ort_cpu", {}),
    "hmse": ("ort_cpu", {"rule": "hmse"}),
    "codes": ("ort_cpu", {"settings": chipfit.Settings(results="codes")}),
    "float": ("ort_cpu", {"settings": chipfit.Settings(results="float")}),
    "dynamic": ("ort_dynamic", {}),
    "4 bits": ("ort_dynamic", {"overrides": {"Linear": {"bits": 4}, "Embedding": {"bits": 4}}}),
    "4 bits, float": (
        "ort_dynamic",
        {"overrides": {"Linear": {"bits": 4, "inputs": "float"}, "Embedding": {"bits": 4}}},
    ),
}
#: limits for a real encoder: cosine, neighbours, size and time relative to float
LIMITS = {"cosine": 0.993, "neighbours": 0.91, "size": 0.27, "time": 0.35}
#: limits: seconds to write the file of six blocks; to verify, as a multiple of the runtime and in seconds; memory
EXPORT, VERIFY, MEMORY = 1.0, (3.0, 2.0), 1.5
BATCH = 32  #: sentences in a batch of calibration and of verification


class Encoder(nn.Module):
    """An encoder of words int64 [N, T] with a mask [N, T] (1 for words, 0 for padding) to vectors [N, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        nn.init.normal_(self.words.weight, std=1.0)
        nn.init.normal_(self.places.weight, std=0.2)
        with torch.no_grad():
            self.words.weight[SEPARATOR, 7] = 100.0
        self.blocks, self.norm = (
            nn.ModuleList(AttentionBlock(WIDTH, HEADS, 4) for _ in range(BLOCKS)),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(LENGTH))
        mask = (1.0 - attention_mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        for block in self.blocks:
            x = block(x, mask)
        kept = attention_mask[:, :, None].float()
        return (self.norm(x) * kept).sum(1) / kept.sum(1)


def sentences(count: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Draw sentences of different lengths about 64 topics, each of which prefers 100 words, among common words."""
    g = torch.Generator().manual_seed(seed)
    topic = torch.randint(TOPICS, (count,), generator=g)
    own = 100 * topic[:, None] % (VOCABULARY - 102) + 2 + (100 * torch.rand(count, LENGTH, generator=g) ** 2).long()
    any_ = 2 + ((VOCABULARY - 2) * torch.rand(count, LENGTH, generator=g) ** 2).long()
    ids = torch.where(torch.rand(count, LENGTH, generator=g) < 0.3, own, any_)
    ids[torch.rand(count, LENGTH, generator=g) < 1 / 64] = SEPARATOR
    mask = (torch.arange(LENGTH) < torch.randint(LENGTH // 3, LENGTH + 1, (count, 1), generator=g)).long()
    return {"input_ids": torch.where(mask > 0, ids, PADDING), "attention_mask": mask}, topic


def trained(steps: int) -> nn.Module:
    """Return the encoder, trained below a linear layer that classifies topics."""
    torch.manual_seed(0)
    model, head = Encoder(), nn.Linear(WIDTH, TOPICS)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, 1e-3)
    for step in range(steps):
        inputs, topic = sentences(64, 10_000 + step)
        optimizer.zero_grad()
        F.cross_entropy(head(model(**inputs)), topic).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    inputs, topic = sentences(500, 3)
    with torch.inference_mode():
        right = (head(model.eval()(**inputs)).argmax(1) == topic).float().mean()
    print(f"trained: {100 * float(right):.1f} % of the topics of new sentences", flush=True)
    return model


def vectors(run: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return one vector of unit length for each sentence."""
    y, mask = torch.as_tensor(run(inputs)), inputs.get("attention_mask")
    if y.dim() == 3:
        kept = torch.ones(y.shape[:2]) if mask is None else mask.float()
        y = (y * kept[:, :, None]).sum(1) / kept.sum(1, keepdim=True)
    return F.normalize(y.flatten(1), dim=1)


class File:
    """An ONNX file on one thread."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.names = [i.name for i in self.session.get_inputs()]
        self.size = path.stat().st_size
        self.seconds: list[float] = []

    def __call__(self, inputs: dict[str, Tensor]) -> np.ndarray:
        values = dict(zip(self.names, (x.numpy() for x in inputs.values()), strict=True))
        begun = time.process_time()
        out = self.session.run(None, values)[0]
        self.seconds.append(time.process_time() - begun)
        return out


def exported(model: nn.Module, inputs: dict[str, Tensor], folder: Path) -> dict[str, Path]:
    """Return the float file that torch's exporter writes, and ONNX Runtime's dynamic quantization of it."""
    from onnxruntime.quantization import quantize_dynamic

    files = {"float": folder / "float.onnx", "ORT dynamic": folder / "dynamic.onnx"}
    few, free = {name: x[:2] for name, x in inputs.items()}, {name: {0: torch.export.Dim.DYNAMIC} for name in inputs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (), files["float"], kwargs=few, dynamic_shapes=free, dynamo=True, external_data=False)
        quantize_dynamic(files["float"], files["ORT dynamic"])
    return files


def parts(inputs: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    count = len(next(iter(inputs.values())))
    return [{name: x[k : k + size] for name, x in inputs.items()} for k in range(0, count, size)]


def quantized(model: nn.Module, inputs: dict[str, Tensor], way: str) -> chipfit.Result:
    platform, options = WAYS[way]
    return chipfit.quantize(model, parts(inputs, BATCH), platform, **options, progress=False)


def reference_mib(graph: Graph, batch: dict[str, Tensor]) -> float:
    """Return the size of the float weights and of the results of all operators for one batch, views excluded [MiB]."""
    with torch.inference_mode():
        kept = run(graph, list(batch.values()), keep=[o for n in graph.nodes for o in n.outputs])
    tensors = [*(w for w in graph.weights.values() if w.is_floating_point()), *kept.values()]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return sum(sizes.values()) / 2**20


def measure_memory(model: nn.Module, inputs: dict[str, Tensor], way: str, folder: Path, file: str | None) -> float:
    """Return the memory of `quantize` and `export`, measured in a process of its own [MiB]."""
    torch.save((None if file else model.state_dict(), inputs), folder / "child.pt")
    command = [sys.executable, __file__, *([file] if file else []), "--ways", way, "--child", str(folder)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def child(way: str, folder: Path, file: str | None) -> None:
    """Print how much one call of `quantize` and `export` grows the process [MiB]."""
    small = chipfit.quantize(nn.Sequential(nn.Linear(4, 4)), [torch.randn(2, 4)], WAYS[way][0], progress=False)
    small.export(folder / "small.onnx")  # loads the libraries
    state, inputs = torch.load(folder / "child.pt")
    model = load_model(file) if file else Encoder().eval()
    if state:
        model.load_state_dict(state)
    print(grown_mib(lambda: quantized(model, inputs, way).export(folder / "child.onnx")))


class Bounds:
    """The costs of chipfit beside their limits."""

    def __init__(self) -> None:
        self.table = Table("", "", "takes", "limit", "by the clock", title="costs of chipfit, in processor time")
        self.over = 0

    def add(self, label: str, what: str, takes: float, limit: float, unit: str, clock: float | None = None) -> None:
        self.over += takes > limit
        cells = (f"{v:.2f} {unit}" for v in (takes, limit))
        shown = "" if clock is None else f"{clock:.2f} {unit}"
        self.table.add_row(label, what, *cells, shown, style="red" if takes > limit else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", metavar="FILE")
    parser.add_argument("--data", metavar="DATA.npz")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["auto", "codes", "dynamic", "4 bits"])
    parser.add_argument("--sentences", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="sentences that run together")
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.child:
        child(a.ways[0], a.child, a.file)
        return 0
    model = load_model(a.file) if a.file else trained(a.steps)
    if a.data:
        with np.load(a.data) as data:
            inputs = {name: torch.as_tensor(data[name]) for name in data.files}
    else:
        inputs = sentences(a.sentences, 1)[0]
    half = len(next(iter(inputs.values()))) // 2
    calibration = {name: x[:half] for name, x in inputs.items()}
    test = {name: x[half:] for name, x in inputs.items()}
    bounds = Bounds()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = exported(model, inputs, folder)
        for way in a.ways:
            begun, label, path = time.perf_counter(), f"chipfit {way}", folder / f"chipfit_{len(files)}.onnx"
            made = quantized(model, calibration, way)
            print(f"{label}: quantized in {time.perf_counter() - begun:.1f} s", flush=True)
            clock, processor = both_clocks(lambda made=made, path=path: made.export(path))
            bounds.add(label, "export", processor, EXPORT, "s", clock)
            batches, files[label] = parts(test, BATCH), path
            clock, processor = both_clocks(lambda made=made, batches=batches: made.verify(batches))
            print(f"   {made.verification.summary().splitlines()[0]}", flush=True)
            device = File(path)
            for batch in batches:
                device(batch)
            bounds.add(label, "verify", processor, VERIFY[0] * sum(device.seconds) + VERIFY[1], "s", clock)
            grown = measure_memory(model, calibration, way, folder, a.file)
            bounds.add(label, "memory", grown, MEMORY * reference_mib(made.graph, parts(calibration, BATCH)[0]), "MiB")
        loaded = {label: File(path) for label, path in files.items()}
        found: dict[str, list[Tensor]] = {label: [] for label in loaded}
        for k in range(0, half, a.batch):  # interleaved, so that all meet the same noise
            for label, file in loaded.items():
                found[label].append(vectors(file, {n: x[k : k + a.batch] for n, x in test.items()}))
    table = Table(
        "", "cosine", "neighbours", "size", "time", "ms", title="beside float; limits of a real encoder below"
    )
    want = torch.cat(found["float"])
    nearest = (want @ want.T).fill_diagonal_(-2).argmax(1)
    medians = {label: float(np.median(f.seconds[2:])) for label, f in loaded.items()}
    for label, rows in found.items():
        got = torch.cat(rows)
        same = (got @ got.T).fill_diagonal_(-2).argmax(1) == nearest
        ratios = loaded[label].size / loaded["float"].size, medians[label] / medians["float"]
        cells = float((want * got).sum(1).mean()), float(same.float().mean()), *ratios
        table.add_row(label, f"{cells[0]:.4f}", *(f"{v:.3f}" for v in cells[1:]), f"{1000 * medians[label]:.2f}")
    table.add_row("limit", *(str(v) for v in LIMITS.values()), "")
    Console(width=100).print(table, bounds.table)
    return bounds.over


if __name__ == "__main__":
    sys.exit(main())
