"""Devices that users name, and a check of the one that their model lies on."""

import torch

from chipfit.errors import CaptureError, ConfigError
from chipfit.graph.ir import CPU

_WHOLE = "move the whole model to one device that holds it: model.to('cuda:0'), or model.cpu()"
_LOAD = "give it memory and load its weights: model.to_empty(device='cpu'), then model.load_state_dict(...)"


def check_device(model: torch.nn.Module) -> None:
    """Check that a model lies on one device, and that its weights hold numbers.

    Raises:
        CaptureError: It lies on several devices or on "meta".
    """
    lazy = next((name for name, p in model.named_parameters() if torch.nn.parameter.is_lazy(p)), None)
    if lazy is not None:
        hint = "call the model once on a batch, and train it or load its weights"
        raise CaptureError("A layer has not seen its input yet", got=f"'{lazy}' without a shape", hint=hint)
    first = dict[torch.device, str]()
    for name, p in model.named_parameters():
        first.setdefault(p.device, name)
    if meta := next((name for device, name in first.items() if device.type == "meta"), None):
        raise CaptureError("The weights of the model hold no numbers", got=f"'{meta}' on the device 'meta'", hint=_LOAD)
    if len(first) > 1:
        got = ", ".join(f"'{name}' on {device}" for device, name in first.items())
        raise CaptureError("The model lies on several devices", got=got, allowed="one device", hint=_WHOLE)


def device_named(name: str) -> torch.device:
    """Return the device of a name: "cpu", "cuda" (the first one), "cuda:1", or "auto": the accelerator if there is one.

    Raises:
        ConfigError: This machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    here = {"cpu": CPU, **{f"{accelerator}:{k}": torch.device(f"{accelerator}:{k}") for k in range(count)}}
    if name == "auto":
        return list(here.values())[min(count, 1)]
    if (found := here.get(name, here.get(f"{name}:0"))) is None:
        hint = "check the index, the driver, and that this build of PyTorch supports the device; or use auto"
        raise ConfigError(f"There is no device '{name}' here", got=name, allowed=", ".join(here), hint=hint)
    return found
