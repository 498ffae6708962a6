"""The operators of a file that Arm's compiler Vela places on an Ethos-U NPU, with its estimates of memory and time.

Source: Arm, Ethos-U Vela Compiler: PERFORMANCE.md (estimates) and SUPPORTED_OPS.md (constraints).
"""

import csv
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chipfit.errors import RuntimeUnavailable, UnsupportedError, check_known
from chipfit.export import export
from chipfit.files import path_of, wrap_read_errors
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.platform.schema import Platform
from chipfit.registry import require_modules
from chipfit.runtimes.tflm import operator_names
from chipfit.screen import Summary, SummaryRepr

#: configurations of the NPU that Vela knows: its kind, and multiplications in a cycle
ACCELERATORS = tuple(
    f"ethos-{kind}-{macs}"
    for kind, sizes in (("u55", (32, 64, 128, 256)), ("u65", (256, 512)), ("u85", (128, 256, 512, 1024, 2048)))
    for macs in sizes
)
TIMEOUT = 600  #: of the compiler [s]
_REFUSED = re.compile(r"Warning \([\w ]+\) operator: (\w+), ofm: '(.*)'\nReason: (.*(?:\n(?!\n|Warning|Network).+)*)")
_ON_CPU = re.compile(r"^\s+CPU: \S+ = (.*) \(outputs", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class CpuOperator:
    """An operator that stays on the processor."""

    tensor: str  #: its result in the file
    layer: str  #: the user's layer; "" for what the file adds
    op: str  #: its name in the file; "" where Vela does not say
    why: str  #: Vela's reason


@dataclass(frozen=True, kw_only=True, repr=False)
class NpuReport(SummaryRepr):
    """A network on an NPU, by its compiler's own estimate."""

    accelerator: str
    operators: int  #: of the file
    on_cpu: tuple[CpuOperator, ...]
    sram: int  #: memory on the chip that tensors take [byte]
    dram: int  #: memory beside the chip, where the NPU's memory mode has it [byte]
    flash: int  #: weights, and what the NPU executes [byte]
    macs: int  #: multiplications
    cycles: int  #: of one inference; those on the processor do not count
    inferences_per_second: float

    @property
    def on_npu(self) -> int:
        """The number of operators on the NPU."""
        return self.operators - len(self.on_cpu)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        return {**asdict(self), "on_npu": self.on_npu}

    def _summary(self) -> Summary:
        sizes = {"SRAM": self.sram, "DRAM": self.dram, "flash": self.flash}
        facts = {
            "memory": ", ".join(f"{n / 1024:.1f} KiB of {kind}" for kind, n in sizes.items() if n),
            "speed": f"{self.cycles:,} cycles, {self.inferences_per_second:.1f} inferences a second (estimated)",
            "work": f"{self.macs:,} multiplications",
        }
        rows = [(c.layer or c.tensor, c.op, c.why) for c in self.on_cpu]
        title = f"{self.on_npu} of {self.operators} operators on {self.accelerator}"
        return Summary(title, facts, ("on the processor", "operator", "why"), rows, ".on_cpu")


def compile_result(graph: Graph, plan: Plan, platform: Platform, accelerator: str) -> NpuReport:
    """Write a result's `.tflite` file with integer inputs and outputs, where they can be integers, and compile it.

    Raises:
        UnsupportedError: The network does not fit a `.tflite` file.
        UnknownNameError, RuntimeUnavailable: See `compile_file`.
    """
    _check(accelerator)
    makers = {o: n.display_name for n in graph.nodes for o in n.outputs}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "model.tflite"
        try:
            export(graph, plan, path, platform, batch=1, io="int8")
        except UnsupportedError:  # an end of the network stays in float
            export(graph, plan, path, platform, batch=1)
        return compile_file(path, accelerator, makers)


def compile_file(path: str | Path, accelerator: str, layers: dict[str, str] | None = None) -> NpuReport:
    """Compile a quantized `.tflite` file, in a process of its own.

    Args:
        accelerator: one of `ACCELERATORS`.
        layers: tensor -> the user's layer that makes it.

    Raises:
        UnknownNameError: There is no such accelerator.
        RuntimeUnavailable: Vela is not installed, refuses the file, or does not end in time.
    """
    _check(accelerator)
    file = path_of(path, RuntimeUnavailable).absolute()
    with wrap_read_errors(file, RuntimeUnavailable):
        content = file.read_bytes()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shown = _run(file, accelerator, folder)
        found = next(Path(folder).glob("out/*summary*.csv"), None)
        if found is None:
            raise RuntimeUnavailable("Vela wrote no summary", where=str(path), got=shown.strip().splitlines()[-1:])
        with open(found, encoding="utf-8") as lines:
            row = next(csv.DictReader(lines))
    reasons = {tensor: (op, " ".join(why.split())) for op, tensor, why in _REFUSED.findall(shown)}
    layers = layers or {}
    on_cpu = [  # a part of a tensor, as "block/softmax/part_1", has the layer of the tensor
        CpuOperator(tensor=t, layer=layers.get(t, layers.get(t.rpartition("/")[0], "")), op=op, why=why)
        for t in dict.fromkeys((*_ON_CPU.findall(shown), *reasons))
        for op, why in (reasons.get(t, ("", "")),)
    ]
    kib = {k: float(row[f"{k}_memory_used"]) for k in ("sram", "dram", "on_chip_flash", "off_chip_flash")}
    return NpuReport(
        accelerator=accelerator,
        operators=len(operator_names(content)),
        on_cpu=tuple(on_cpu),
        sram=round(1024 * kib["sram"]),
        dram=round(1024 * kib["dram"]),
        flash=round(1024 * (kib["on_chip_flash"] + kib["off_chip_flash"])),
        macs=int(float(row["nn_macs"])),
        cycles=int(float(row["cycles_total"])),
        inferences_per_second=float(row["inferences_per_second"]),
    )


def _check(accelerator: str) -> None:
    check_known("accelerator", accelerator, ACCELERATORS)
    require_modules({"Result.npu": [("ethosu", "vela")]})


def _run(file: Path, accelerator: str, folder: str) -> str:
    """Run the compiler in a folder; return what it prints."""
    words = ["--accelerator-config", accelerator, "--output-dir", "out", "--show-cpu-operations"]
    command = [sys.executable, "-m", "ethosu.vela", str(file), *words]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
    except subprocess.TimeoutExpired as e:
        raise RuntimeUnavailable(f"Vela did not end within {TIMEOUT} s", where=str(file)) from e
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        reason = next((line for line in lines if "rror" in line), lines[-1] if lines else f"status {done.returncode}")
        raise RuntimeUnavailable(f"Vela refuses the file: {reason.strip()}", where=str(file))
    return done.stdout
