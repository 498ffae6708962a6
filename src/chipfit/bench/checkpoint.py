"""Checkpoints of training: files of torch.save that torch.load reads as numbers and tensors, without running code."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chipfit.errors import ConfigError, short_message
from chipfit.files import write_atomically


def write(path: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
    """Write everything that the next step depends on, atomically.

    Args:
        modules: name -> module.
        facts: numbers, texts, lists and tables.

    Raises:
        ExportError: the file cannot be written.
    """
    states = {name: m.state_dict() for name, m in modules.items()}
    rest = {"optimizer": optimizer.state_dict()["state"], "random": torch.get_rng_state(), "facts": facts}
    content = io.BytesIO()
    torch.save({"modules": states, **rest}, content)
    write_atomically(path, content.getvalue())


def read(path: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore modules, optimizer and random numbers; return the facts that `write` stored.

    Raises:
        ConfigError: the file is damaged, or belongs to another experiment.
    """
    try:
        known = torch.load(path, map_location="cpu", weights_only=True)
        for name, module in modules.items():
            module.load_state_dict(known["modules"][name])
        optimizer.load_state_dict({**optimizer.state_dict(), "state": known["optimizer"]})
        torch.set_rng_state(known["random"])
        facts: dict[str, Any] = known["facts"]
    except (OSError, EOFError, pickle.UnpicklingError, ValueError, TypeError, KeyError, RuntimeError) as e:
        hint = "remove it to start the experiment anew"
        raise ConfigError(f"The checkpoint cannot be read: {short_message(e)}", where=str(path), hint=hint) from e
    return facts
