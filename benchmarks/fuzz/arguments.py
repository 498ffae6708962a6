"""Kinds of input that are calls: chips described in Python, calibration data, options."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from benchmarks.fuzz.files import IMAGES, ROWS, SUM_INPUT, Sum, convolutions, rows, use
from benchmarks.fuzz.mutate import short, strange
from benchmarks.fuzz.run import Case
from benchmarks.fuzz.sense import check_platform, check_result
from torch import nn

import chipfit
import chipfit.target_platform as tp
from chipfit.platform.load import load as load_platform


class UsersError(RuntimeError):
    """An exception of the user's own code, which must be passed on unchanged."""


def odd(rng: Random) -> Any:
    """Draw an argument that somebody might give: values, containers, classes, arrays, functions."""
    if rng.random() < 0.5:
        return strange(rng)
    loop: list[Any] = []
    loop.append(loop)
    things: tuple[Any, ...] = (
        np.float32(2),
        np.int64(4),
        np.array([1, 2]),
        np.array(3),
        torch.tensor(2.0),
        torch.ones(2),
        int,
        float,
        list,
        nn.Linear,
        nn.Linear(2, 2),
        torch.relu,
        len,
        lambda: None,
        lambda *a, **k: 1,
        object(),
        SimpleNamespace(bits=8),
        {1, 2},
        frozenset(),
        range(3),
        b"bytes",
        bytearray(2),
        1j,
        loop,
        iter([1]),
        (x for x in ()),
        Path("x"),
        ...,
        type,
        Exception("x"),
        tp.QuantizationMethod.SYMMETRIC,
        tp.QuantizationMethod,
        tp.Signedness.AUTO,
        tp.Eq("x", 1),
        tp.DefaultDict({}, 1),
        (1,),
        ((),),
        collections.OrderedDict(a=1),
        "POWER_OF_TWO",
        print,
    )
    return rng.choice(things)


def maybe(rng: Random, case: Case, share: float, name: str, sound: Any) -> Any:
    """Return the valid value or, now and then, an odd one."""
    if rng.random() >= share:
        return sound
    other = odd(rng)
    case.note(f"{name} = {short(other)}")
    return other


# ---------------------------------------------------------------------------------------------------------- facade


def facade(case: Case) -> None:
    """Build a chip with `chipfit.target_platform` from partly odd arguments, convert it and use it."""
    rng = case.random
    share = rng.choice((0, 0.005, 0.01, 0.02))

    def m(name: str, sound: Any) -> Any:
        return maybe(rng, case, share, name, sound)

    def drawn(kind: Any) -> Any:
        return rng.choice(list(kind))

    def weights() -> Any:
        return tp.AttributeQuantizationConfig(
            weights_quantization_method=m("weights_quantization_method", drawn(tp.QuantizationMethod)),
            weights_n_bits=m("weights_n_bits", rng.choice((2, 4, 8, 16))),
            weights_per_channel_threshold=m("per_channel", rng.random() < 0.5),
            enable_weights_quantization=m("enable_weights", rng.random() < 0.8),
            lut_values_bitwidth=m("lut_values_bitwidth", rng.choice((None, 8, 4))),
        )

    def config() -> Any:
        return tp.OpQuantizationConfig(
            default_weight_attr_config=m("default_weight_attr_config", weights()),
            attr_weights_configs_mapping=m("attr_weights", {tp.KERNEL_ATTR: weights(), tp.BIAS_ATTR: weights()}),
            activation_quantization_method=m("activation_method", drawn(tp.QuantizationMethod)),
            activation_n_bits=m("activation_n_bits", rng.choice((4, 8, 16))),
            supported_input_activation_n_bits=m("supported_input", rng.choice((8, [8, 16], (4, 8)))),
            enable_activation_quantization=m("enable_activation", rng.random() < 0.9),
            quantization_preserving=m("preserving", rng.random() < 0.1),
            fixed_scale=m("fixed_scale", rng.choice((None, None, None, 1 / 256))),
            fixed_zero_point=m("fixed_zero_point", None),
            simd_size=m("simd_size", rng.choice((None, 32))),
            signedness=m("signedness", drawn(tp.Signedness)),
        )

    def options() -> Any:
        n = rng.choice((1, 1, 2))
        configs = [config() for _ in range(n)]
        return tp.QuantizationConfigOptions(m("configs", configs), m("base_config", configs[0] if n > 1 else None))

    how = rng.random()
    if how < 0.15:
        c = config()
        fields = ("activation_n_bits", "fixed_scale", "nonsense", "signedness", "attr_weights_configs_mapping")
        c.clone_and_edit(
            m("attr_to_edit", {tp.KERNEL_ATTR: {"weights_n_bits": odd(rng)}}), **{rng.choice(fields): odd(rng)}
        )
        return
    single = tp.QuantizationConfigOptions([config()])
    model = tp.TargetPlatformModel(
        m("default_qco", single),
        m("add_metadata", False),
        m("name", "chip"),
        **(
            {"math": m("math", {"requant": {"form": "float", "round": "half_even"}, "acc": [{"bits": 32}]})}
            if rng.random() < 0.3
            else {}
        ),
    )
    with model:
        sets = [
            tp.OperatorsSet(m("set", n), m("qc_options", options() if rng.random() < 0.7 else None))
            for n in ("Conv", "FC", "Act")
        ]
        if rng.random() < 0.5:
            group = tp.OperatorSetConcat(m("member", sets[0]), sets[1], name=m("group", "weighted"))
            tp.Fusing(m("groups", [group, sets[2]]), m("fusing", None))
    tpc = tp.TargetPlatformCapabilities(m("tp_model", model), m("tpc_name", "tpc"), m("version", "v1"))
    layers = {
        "Conv": [
            nn.Conv2d,
            tp.LayerFilterParams(
                m("layer", nn.Conv2d), m("condition", tp.Greater("out_channels", 3)), stride=m("stride", 1)
            ),
        ],
        "FC": [nn.Linear],
        "Act": [nn.ReLU, torch.relu, "Sigmoid"],
    }
    with tpc:
        for name in layers:
            mapping = {tp.KERNEL_ATTR: tp.DefaultDict(m("known", {nn.Conv2d: "weight"}), "weight")}
            tp.OperationsSetToLayers(
                m("op_set_name", name),
                m("layers", rng.sample(layers[name], 1)),
                m("mapping", mapping if rng.random() < 0.3 else None),
            )
    tpc.get_info()
    tpc.get_fusing_patterns()
    platform = load_platform(tpc)
    check_platform(platform)
    if rng.random() < 0.3:
        file = case.folder / "chip.json"
        tp.export_target_platform_capabilities(tpc, file)
        load_platform(file)
    make, x = rng.choice(((convolutions, IMAGES), (rows, ROWS)))
    result = chipfit.quantize(make(), [x], rng.choice((tpc, platform)), progress=False)
    use(result, x, rng, case.folder)


# ---------------------------------------------------------------------------------------------------------- data


def _array(rng: Random, good: torch.Tensor, case: Case) -> Any:
    """Return a batch with another type, shape or content."""
    x = good.clone()
    how = rng.randrange(16)
    case.note(f"array, change {how}")
    if how == 0:
        x = x.to(
            rng.choice(
                (
                    torch.float16,
                    torch.bfloat16,
                    torch.float64,
                    torch.int64,
                    torch.uint8,
                    torch.bool,
                    torch.complex64,
                    torch.int8,
                )
            )
        )
    elif how == 1 and x.is_floating_point():
        x.reshape(-1)[rng.randrange(x.numel())] = rng.choice((math.nan, math.inf, -math.inf, 1e38, 3e38, 1e-45))
    elif how == 2:
        x = x[0]
    elif how == 3:
        x = x.unsqueeze(rng.choice((0, -1)))
    elif how == 4:
        x = x.movedim(1, -1) if x.dim() > 1 else x
    elif how == 5:
        x = x[:0]
    elif how == 6:
        x = x[:1]
    elif how == 7:
        x = x * rng.choice((0.0, 1e-30, 1e30, 1e38, -1.0))
    elif how == 8:
        return x.numpy().astype(
            rng.choice(("float64", "float16", "int32", "object", "U5", "complex128", "uint8", ">f4", "M8[s]")),
            casting="unsafe",
        )
    elif how == 9:
        return x.tolist()
    elif how == 10:
        return x.requires_grad_() * 2 if x.is_floating_point() else x
    elif how == 11:
        return x.to_sparse() if rng.random() < 0.5 else x.to("meta")
    elif how == 12:
        return x.numpy()[::-1]
    elif how == 13:
        x = torch.cat([x, x], -1)
    elif how == 14:
        return torch.nested.nested_tensor(list(x)) if x.is_floating_point() else x
    return x


def _batch(rng: Random, good: Any, case: Case) -> Any:
    if isinstance(good, tuple):
        parts = [_array(rng, g, case) if rng.random() < 0.5 else g for g in good]
        return rng.choice(
            (
                tuple(parts),
                parts,
                {"x": parts[0], "i": parts[1]},
                {"x": parts[0]},
                parts[0],
                (*parts, torch.tensor([0, 1])),
            )
        )
    x = _array(rng, good, case) if rng.random() < 0.7 else good
    return rng.choice(
        (
            x,
            x,
            x,
            (x,),
            [x],
            {"input": x},
            (x, torch.tensor([0, 1])),
            (x, 3),
            (x, "label"),
            (x, None),
            (x, x),
            ((x,), {}),
            [x, [0, 1]],
            {"x": x, "labels": 1},
            SimpleNamespace(x=x),
            None,
            {"x": {"y": x}},
            collections.UserDict(input=x),
        )
    )


def _container(rng: Random, batches: list[Any], case: Case) -> Any:
    how = rng.randrange(16)
    case.note(f"container {how}")

    def broken() -> Any:
        yield from batches[:1]
        raise UsersError("disk unplugged")

    class Sequence:
        def __len__(self) -> int:
            return len(batches)

        def __getitem__(self, k: int) -> Any:
            return batches[k]

    class Wrong(Sequence):
        def __len__(self) -> int:
            return len(batches) + 5

    if how == 0:
        return iter(batches)
    if how == 1:
        return lambda: iter(batches)
    if how == 2:
        return broken()
    if how == 3:
        return broken
    if how == 4:
        return Sequence()
    if how == 5:
        return Wrong()
    if how == 6:
        return tuple(batches)
    if how == 7:
        return lambda extra: iter(batches)
    if how == 8:
        return dict(enumerate(batches))
    if how == 9:
        return odd(rng)
    if how == 10:
        return batches[0]
    if how == 11:
        return lambda: None
    return batches


def data(case: Case) -> None:
    """Quantize one of three models with calibration data of any form."""
    rng = case.random
    make, good = rng.choice(((convolutions, IMAGES), (rows, ROWS), (Sum, SUM_INPUT)))
    case.note(make.__name__)
    batches = [_batch(rng, good, case) if rng.random() < 0.5 else good for _ in range(rng.choice((1, 2, 3)))]
    given = _container(rng, batches, case)
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options = _options(rng, case)
    try:
        result = chipfit.quantize(
            make(), given, rng.choice(("ort_cpu", "tflite_int8", "imx500")), progress=False, **options
        )
        check_result(result)
        if rng.random() < 0.3:
            again = _container(rng, [_batch(rng, good, case)], case)
            result.verify(again)
    except UsersError:
        case.note("the user's own error came out")


def _options(rng: Random, case: Case) -> dict[str, Any]:
    """Return options of `quantize`, one or two of them odd."""
    sound: dict[str, tuple[Callable[[], Any], ...]] = {
        "rule": (
            lambda: rng.choice(
                (
                    "mse",
                    "kl",
                    "lp(p=3)",
                    "lp(p=nan)",
                    "lp(p='x')",
                    "lp(p=-1)",
                    "mse(steps=0)",
                    "percentile(share=2)",
                    "(",
                    "lp(p=1e400)",
                )
            ),
            lambda: odd(rng),
        ),
        "weight_rule": (lambda: rng.choice(("mse", "no_clipping", "mae(steps=-1)", "lp(p=0)")), lambda: odd(rng)),
        "overrides": (
            lambda: {
                rng.choice(("0", "Conv2D", "*", "Linear", "0.x", "l", "e")): rng.choice(
                    (
                        "float",
                        {"bits": odd(rng)},
                        {"activation_bits": 8},
                        {"range": (odd(rng), 1.0)},
                        {"z_threshold": odd(rng)},
                        {"rule": odd(rng)},
                        {"per": odd(rng)},
                        {"range": (-1e308, 1e308)},
                        {"signed": odd(rng)},
                        odd(rng),
                    )
                )
            },
            lambda: {odd_key(rng): "float"},
            lambda: [(rng.choice(("0", "l")), odd(rng))],
            lambda: [odd(rng)],
            lambda: odd(rng),
        ),
        "example": (lambda: odd(rng),),
        "z_threshold": (lambda: odd(rng), lambda: 3.0),
        "seed": (lambda: odd(rng),),
        "settings": (
            lambda: odd(rng),
            lambda: chipfit.Settings(
                **{rng.choice(("shift_negative", "equalize", "correct_bias", "relu_bound", "softmax_shift")): odd(rng)}
            ),
        ),
    }
    chosen = rng.sample(sorted(sound), rng.choice((1, 1, 2)))
    out = {k: rng.choice(sound[k])() for k in chosen}
    case.note(", ".join(f"{k}={short(v)}" for k, v in out.items()))
    return out


def odd_key(rng: Random) -> Any:
    """Draw an odd argument that can be a key."""
    thing = odd(rng)
    try:
        hash(thing)
    except TypeError:
        return str(type(thing))
    return thing
