"""The table of trained networks, `networks.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_TABLE = yaml.safe_load((Path(__file__).parent / "networks.yaml").read_text())


@dataclass(frozen=True, slots=True)
class Entry:
    """A trained network: where its file is, its inputs and its metric."""

    file: str  #: SOURCE:PATH, or the function of `modules.py` that makes a PyTorch module
    task: str
    inputs: dict[str, Any]  #: {function of `inputs.py`: its arguments}
    metric: dict[str, Any] = field(default_factory=dict)  #: {function of `metrics.py`: its arguments}
    needs: tuple[str, ...] = ()  #: further sources
    options: tuple[str, ...] = ()  #: of `chipfit quantize`
    shipped: str = ""  #: SOURCE:PATH of an integer file by the network's authors
    samples: tuple[int, int] = (32, 16)  #: numbers of samples for calibration and for measurement
    platforms: tuple[str, ...] = tuple(_TABLE["platforms"])

    @property
    def source(self) -> str:
        return self.file.partition(":")[0] if ":" in self.file else self.needs[0]


#: name -> {"pip": requirement} or {"github": OWNER/NAME}, with "licence"
SOURCES: dict[str, dict[str, str]] = _TABLE["sources"]
PLATFORMS: dict[str, str] = _TABLE["platforms"]  #: platform -> suffix of its file
ENTRIES = {
    name: Entry(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
    for name, row in _TABLE["networks"].items()
}
