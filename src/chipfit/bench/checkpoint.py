"""Where training goes on after an interruption: numbers as safetensors, the rest as JSON beside them, no pickle."""

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
_TENSOR = "@"  #: the only key of what stands in JSON for a tensor, with its name


def write(path: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
    """Write everything that the next step depends on, in one rename.

    Args:
        modules: by a name, with their state dicts.
        facts: JSON-able.

    Raises:
        ExportError: the disk refuses.
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
    """Bring modules, optimizer and random numbers to where `write` was called; return the facts that it stored.

    Raises:
        ConfigError: the file is damaged, or of another experiment.
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
        hint = "remove it, and the experiment starts again"
        raise ConfigError(f"The checkpoint cannot be read: {short_message(e)}", where=str(path), hint=hint) from e
    facts: dict[str, Any] = known["told"]
    return facts
