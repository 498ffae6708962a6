"""Configurations of trainable quantizers, with MCT's names, order and defaults."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import BeforeValidator, Field

from chipfit.errors import ConfigError
from chipfit.mct.target_platform.configs import Bits, Flag, Method, QuantizationMethod
from chipfit.mct.trainable.constants import LUT_VALUES, MIN_THRESHOLD, RANGE_MAX, RANGE_MIN, SIGNED, THRESHOLD
from chipfit.quantizers.algorithm import MOST_BITS
from chipfit.quantizers.inferable import parameters, symmetric, uniform
from chipfit.quantizers.stored import Stored
from chipfit.validation import Number, check_value, json_default, record

__all__ = ["TrainableQuantizerActivationConfig", "TrainableQuantizerCandidateConfig", "TrainableQuantizerWeightsConfig"]


def _arrays(given: Any, info: Any) -> Any:
    """Return lists from a file as arrays."""
    if info.mode != "json" or not isinstance(given, dict):
        return given
    return {k: np.asarray(v, "float32") if isinstance(v, list) else v for k, v in given.items()}


AtLeast0 = Annotated[Number, Field(ge=0)]
Params = Annotated[Mapping[str, Any], BeforeValidator(_arrays)]


@record(ConfigError)
class TrainableQuantizerCandidateConfig:
    """A candidate bit width of a quantizer, with its parameters."""

    n_bits: Bits
    quantization_params: Params


Candidates = list[TrainableQuantizerCandidateConfig] | None


class _Config:
    """The shared part of both configurations."""

    def __post_init__(self) -> None:
        if self.field_ending("_quantization"):
            for candidate in (None, *(self.field_ending("_candidates") or ())):
                if candidate.quantization_params if candidate else self.field_ending("_params"):
                    stored_of(self, None, candidate)

    def field_ending(self, suffix: str) -> Any:
        """Return the field whose name ends with `suffix`, for example "_method" for "weights_quantization_method"."""
        return next(getattr(self, f.name) for f in fields(self) if f.name.endswith(suffix))  # type: ignore[arg-type]  # a dataclass

    def get_config(self) -> dict[str, Any]:
        """Return the fields as data: enumerations by name, arrays as lists; `from_config` reads them."""
        return json.loads(json.dumps({f.name: getattr(self, f.name) for f in fields(self)}, default=json_default))  # type: ignore[arg-type,no-any-return]  # a dataclass

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return check_value(cls, config, ConfigError, cls.__name__, "", json=True)  # type: ignore[no-any-return]  # as `cls` says


@record(ConfigError)
class TrainableQuantizerWeightsConfig(_Config):
    """The quantization of a weight in training.

    Args:
        weights_quantization_params: initial THRESHOLD, or RANGE_MIN and RANGE_MAX, and LUT_VALUES; numbers, or arrays
            that broadcast against the weight. May be empty for quantizers that choose their own.
        weights_channels_axis: axis of the channels if thresholds are per channel.
        min_threshold: least initial threshold.
    """

    weights_quantization_method: Method
    weights_n_bits: Bits
    weights_quantization_params: Params
    enable_weights_quantization: Flag
    weights_channels_axis: int | None
    weights_per_channel_threshold: Flag
    min_threshold: AtLeast0
    weights_quantization_candidates: Candidates = None


@record(ConfigError)
class TrainableQuantizerActivationConfig(_Config):
    """The quantization of an activation in training.

    Args:
        activation_quantization_params: initial THRESHOLD, or RANGE_MIN and RANGE_MAX, and LUT_VALUES; SIGNED for signed
            values, True when omitted. May be empty for quantizers that choose their own.
        min_threshold: least initial threshold.
    """

    activation_quantization_method: Method
    activation_n_bits: Bits
    activation_quantization_params: Params
    enable_activation_quantization: Flag
    min_threshold: AtLeast0
    activation_quantization_candidates: Candidates = None


def stored_of(config: Any, shape: tuple[int, ...] | None = None, candidate: Any = None) -> Stored:
    """Return the initial grid, scale and zero point that a configuration describes.

    A single threshold applies to every channel. UNIFORM with a threshold t is [-t, t], or [0, t] if unsigned.

    Args:
        shape: shape of the weight.
        candidate: its bits and parameters replace those of the configuration.

    Raises:
        ConfigError: the parameters do not describe a grid.
    """
    method, bits, params = (config.field_ending(f"_{word}") for word in ("method", "bits", "params"))
    if candidate is not None:
        bits, params = candidate.n_bits, candidate.quantization_params
    per_channel = getattr(config, "weights_per_channel_threshold", False)
    axis = config.weights_channels_axis if per_channel else None
    if per_channel and (axis is None or (shape is not None and not -len(shape) <= axis < len(shape))):
        what = "Thresholds per channel require weights_channels_axis, 0 in PyTorch, 3 in Keras"
        raise ConfigError(what, got=f"axis {axis} of shape {shape}")
    signed = isinstance(config, TrainableQuantizerWeightsConfig) or bool(params.get(SIGNED, True))
    least = 2 if signed and not (method.affine or method.lut) else 1  # one signed bit has no value above 0
    if not least <= bits <= MOST_BITS:
        allowed = f"{least} to {MOST_BITS} bits"
        raise ConfigError(f"{method.name} does not train with so many bits", got=f"{bits} bits", allowed=allowed)

    def parameter(key: str) -> torch.Tensor:
        if key not in params:
            raise ConfigError(f"Quantization parameters of {method.name} lack '{key}'", got=", ".join(params))
        try:
            return torch.as_tensor(np.asarray(params[key], "float64")).reshape(-1)
        except (TypeError, ValueError) as e:
            raise ConfigError(f"'{key}' of quantization parameters must be numeric", got=repr(params[key])[:80]) from e

    def per_channel_or_scalar(key: str) -> torch.Tensor:
        given = parameter(key)
        channels = 1 if axis is None else given.numel() if shape is None else shape[axis]
        if given.numel() not in (1, channels):
            got, allowed = f"{given.numel()} values of {key}", f"1 or {channels}"
            raise ConfigError("Quantization parameters do not fit the tensor", got=got, allowed=allowed)
        return given[0] if axis is None else given.expand(channels)

    if method.affine and RANGE_MIN in params:
        return uniform(bits, per_channel_or_scalar(RANGE_MIN), per_channel_or_scalar(RANGE_MAX), axis)
    t = per_channel_or_scalar(THRESHOLD)
    t = torch.where(t > 0, t.clamp_min(float(config.min_threshold)), t)
    if method.affine:
        return uniform(bits, -t if signed else torch.zeros_like(t), t, axis)
    table = parameter(LUT_VALUES).tolist() if method.lut else None
    return symmetric(bits, t, signed, axis, pot=method.pot, table=table)


def config_of(stored: Stored, role: str, rank: int) -> Any:
    """Return the configuration of a stored tensor; parameters per channel broadcast against it."""

    def number(p: Any) -> Any:
        if not isinstance(p, torch.Tensor):
            return np.asarray(p, "float32")
        if role == "activation" or not p.dim():
            return float(p)
        return p.numpy().reshape([-1 if d == (stored.axis or 0) % rank else 1 for d in range(rank)])

    words = {name: number(p) for name, p in parameters(stored).items()}
    method, bits = QuantizationMethod.of_grid(stored.grid), stored.grid.bits
    if role == "activation":
        own = {**words, SIGNED: stored.grid.signed or (not stored.grid.symmetric and words[RANGE_MIN] < 0)}
        return TrainableQuantizerActivationConfig(method, bits, own, True, MIN_THRESHOLD)
    per_channel = stored.axis is not None
    return TrainableQuantizerWeightsConfig(method, bits, words, True, stored.axis, per_channel, MIN_THRESHOLD)
