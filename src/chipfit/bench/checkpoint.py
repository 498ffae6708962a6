"""Checkpoints of training: tensors as safetensors with JSON metadata, without pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from chipfit.errors import ConfigError, short_message
from chipfit.files import write_atomically

_RANDOM = "random"
_TENSOR = "@"  #: the only key of a JSON object that stands for a tensor; its value is the tensor's name


def write(path: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
    """Write everything that the next step depends on, atomically.

    Args:
        modules: name -> module.
        facts: JSON data.

    Raises:
        ExportError: the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}

    def store_tensor(x: Tensor) -> dict[str, str]:
        name = str(len(tensors))
        tensors[name] = x.detach().cpu().contiguous().clone()
        return {_TENSOR: name}

    states = {name: dict(m.state_dict()) for name, m in modules.items()}
    rest = {
        "told": facts,
        "states": states,
        "optimizer": optimizer.state_dict()["state"],
        _RANDOM: torch.get_rng_state(),
    }
    text = json.dumps(rest, default=store_tensor)
    write_atomically(path, save(tensors, {"chipfit": text}))


def read(path: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore modules, optimizer and random numbers; return the facts that `write` stored.

    Raises:
        ConfigError: the file is damaged, or belongs to another experiment.
    """
    try:
        with safe_open(path, "pt") as file:

            def load_tensor(x: dict[str, Any]) -> Any:
                return file.get_tensor(x[_TENSOR]) if x.keys() == {_TENSOR} else x

            known = json.loads(file.metadata()["chipfit"], object_hook=load_tensor)
        for name, module in modules.items():
            module.load_state_dict(known["states"][name])
        state = {int(k): v for k, v in known["optimizer"].items()}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        torch.set_rng_state(known[_RANDOM])
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as e:
        hint = "remove it to start the experiment anew"
        raise ConfigError(f"The checkpoint cannot be read: {short_message(e)}", where=str(path), hint=hint) from e
    facts: dict[str, Any] = known["told"]
    return facts
