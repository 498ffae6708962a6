"""Networks of experiments: implementations of papers, networks of installed libraries, or the user's own.

@register("network", "mine")
def mine(classes: int = 1000) -> nn.Module: ...
"""

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from chipfit.bench.config import Model
from chipfit.errors import ConfigError, import_optional, raise_bug, short_message
from chipfit.import_by_name import import_by_name
from chipfit.reading import load_weights
from chipfit.registry import lookup


def model_entry(config: Model | Mapping[str, Any], pretrained: bool = False, path: str | Path | None = None) -> Any:
    """Return the network that a configuration names.

    Args:
        config: `type` and `kwargs`.
        pretrained: load trained weights: those of the library for "timm:", "torchvision:" and "transformers:" names,
            perhaps downloaded; for registered networks those of `path`, or of NAME.safetensors in CHIPFIT_WEIGHTS. A
            factory of the user returns its own.
        path: safetensors file of weights.

    Raises:
        UnknownNameError: there is no such network.
        ConfigError: the library is missing or fails, or weights are missing or do not fit.
    """
    model = config if isinstance(config, Model) else Model(**config)
    library, colon, name = model.type.partition(":")
    if not colon:
        make = lookup("network", model.type)
    elif library in _LIBRARIES:
        make = partial(_LIBRARIES[library], name, pretrained and path is None)
    else:
        make = import_by_name(model.type, "network", ConfigError)
    network = _create(make, model)
    if pretrained and path is None and not colon:
        path = Path(os.environ.get("CHIPFIT_WEIGHTS", ""), f"{model.type}.safetensors")
        if "CHIPFIT_WEIGHTS" not in os.environ or not path.is_file():
            hint = "CHIPFIT_WEIGHTS=FOLDER with MODEL.safetensors, or train it first: saver.pretrain.epochs"
            raise ConfigError("Network has no trained weights", where=model.type, hint=hint)
    if path is not None:
        load_weights(network, Path(path), ConfigError)
    return network


def _create(make: Callable[..., Any], model: Model) -> Any:
    try:
        inspect.signature(make).bind(**model.kwargs)
        return make(**model.kwargs)
    except ConfigError:
        raise
    except Exception as e:  # libraries and the user's code may raise anything
        raise_bug(e)
        what = f"The network cannot be created: {short_message(e)}"
        raise ConfigError(what, where=model.type, got=model.kwargs) from e


def _timm(name: str, pretrained: bool, **kwargs: Any) -> Any:
    return import_optional("timm", "This network", ConfigError).create_model(name, pretrained=pretrained, **kwargs)


def _torchvision(name: str, pretrained: bool, **kwargs: Any) -> Any:
    models = import_optional("torchvision.models", "This network", ConfigError)
    return models.get_model(name, weights="DEFAULT" if pretrained else None, **kwargs)


class _Logits(nn.Module):
    """A classifier of transformers that returns logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(pixel_values=x).logits


def _transformers(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    library = import_optional("transformers", "This network", ConfigError)
    if pretrained:
        return _Logits(library.AutoModelForImageClassification.from_pretrained(name, **kwargs))
    config = library.AutoConfig.for_model(name, **kwargs)
    return _Logits(library.AutoModelForImageClassification.from_config(config))


_LIBRARIES = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}
