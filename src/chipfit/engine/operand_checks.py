"""Checks of the operands of torch's operators that a file calls, for operators that torch does not check itself.

A wrong operand of these operators would read or write memory outside of the tensors, or take all of it. The fuzzer
(`benchmarks/fuzz/memory.py`) calls every listed operator with wrong operands to find where a check is needed.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from chipfit.errors import OutOfBoundsError
from chipfit.operators.table import enters

#: greatest number of elements of a tensor that a call may create, and greatest integer that Python may compute
MOST_ELEMENTS, LARGEST = 1 << 31, 1 << 62
#: arguments whose integers are sizes of the result, or factors of its sizes
_SIZES = frozenset(
    "size output_size repeats sizes shape dims n m row col steps num_classes window_length output_shape".split()
)
#: arguments that count results or steps -> greatest integer in them
_COUNTS = {"chunks": 1 << 16, "sections": 1 << 16, "r": 64, "padding": 1 << 24, "kernel_size": 1 << 24}
#: type in a schema -> type of the value in Python; torch takes an integer for each of the first three and looks up
#: whatever it stands for
_TYPES: dict[str, Any] = {"ScalarType": torch.dtype, "Layout": torch.layout, "MemoryFormat": torch.memory_format}
#: operators whose results hold what stood in memory before
_UNFILLED = frozenset("empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split())

Arguments = Mapping[str, Any]
#: name of an operator, without "_" at its end -> function that returns what is wrong with the arguments, or ""
CHECKS: dict[str, Callable[[Arguments], str]] = {}
check_of = enters(CHECKS)


@functools.cache
def checked(op: torch._ops.OpOverload, run: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function that calls an operator after a check of its operands; the operator itself if it needs none.

    Args:
        run: is called in its place.

    Raises (the returned function):
        OutOfBoundsError: An operand would read or write outside of the tensors, or a size is beyond all bounds.
    """
    name = op._schema.name.partition("::")[2]
    check, arguments = CHECKS.get(name.removesuffix("_")), op._schema.arguments
    typed = {a.name: _TYPES[kind] for a in arguments if (kind := _plain_type(a)) in _TYPES}
    sizes = [a.name for a in arguments if a.name in {*_SIZES, *_COUNTS} and "nt" in _plain_type(a)]
    if check is None and not typed and not sizes and name not in _UNFILLED:
        return run or op
    order = [a.name for a in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def call(*args: Any, **kwargs: Any) -> Any:
        passed = {**dict(zip(order, args, strict=False)), **kwargs}
        given = {**defaults, **passed}  # types that are defaults are integers in schemas
        wrong = [k for k, kind in typed.items() if not (passed.get(k) is None or isinstance(passed[k], kind))]
        fault = f"{wrong[0]} is {given[wrong[0]]!r:.40}" if wrong else _fault_of_sizes(given, sizes)
        try:
            fault = fault or (check(given) if check is not None else "")
        except (KeyError, IndexError, TypeError, AttributeError) as e:  # an operand is missing or of another type
            fault = f"its operands do not fit: {type(e).__name__}"
        if fault:
            raise OutOfBoundsError(
                f"A call of 'aten.{name}' would leave its own tensors: {fault}", hint="check the file"
            )
        out = (run or op)(*args, **kwargs)
        return out.zero_() if name in _UNFILLED else out

    call.__name__ = call.__qualname__ = op.__name__.replace(".", "_")
    return call


def _plain_type(argument: Any) -> str:
    """Return the type of an argument in a schema, without "Optional"; some schemas declare a dtype as an integer."""
    return (
        "ScalarType"
        if argument.name.endswith("dtype")
        else str(argument.real_type).removeprefix("Optional[").removesuffix("]")
    )


def _fault_of_sizes(given: Arguments, names: list[str]) -> str:
    for k in names:
        v = given.get(k)
        sizes = [abs(s) for s in (v if isinstance(v, (list, tuple)) else [v]) if type(s) is int]
        if max([*sizes, 0]) > _COUNTS[k] if k in _COUNTS else math.prod(max(s, 1) for s in sizes) > MOST_ELEMENTS:
            return f"{k} is {v!r:.80}"
    return ""


# ---------------------------------------------------------------------------------------------------- operators


@check_of("as_strided as_strided_copy as_strided_scatter _reshape_alias")
def _strided(a: Arguments) -> str:
    """Check that the operand has no gaps, and that all elements stand between its first and its last."""
    x, size, stride = a["self"], a["size"], a["stride"]
    start, offset = x.storage_offset(), a.get("storage_offset")
    first = start if offset is None else offset
    if any(s == 0 for s in size):
        return ""
    last = first + sum((n - 1) * s for n, s in zip(size, stride, strict=False))
    end = start + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    legal = len(size) == len(stride) and all(n > 0 for n in size) and all(s >= 0 for s in stride)
    if legal and 0 not in x.shape and end - start < x.numel() and first >= start and last <= end:
        return ""
    return f"sizes {list(size)} with strides {list(stride)} of {list(x.shape)}"


@check_of("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional")
@check_of("_native_batch_norm_legit_no_training")
def _batch_norm(a: Arguments) -> str:
    """Check that every statistic has an entry for each channel, and that inference has statistics."""
    x, parts = a["input"], ("weight", "bias", "running_mean", "running_var")
    channels = x.shape[1]
    given = {k: a[k] for k in parts if a.get(k) is not None}
    wrong = next((k for k, t in given.items() if t.dim() != 1 or t.shape[0] != channels), None)
    if wrong is not None:
        return f"{wrong} has the shape {list(given[wrong].shape)} for {channels} channels"
    stats = len({*parts[2:]} & given.keys())
    if stats == 1 or (stats == 0 and not a.get("training", False)):
        return "it has no running mean and variance"
    types = {t.dtype for t in given.values()}
    return "" if x.is_floating_point() and len(types) < 2 and types <= {x.dtype, torch.float32} else f"types {types}"


@check_of("native_group_norm")
def _group_norm(a: Arguments) -> str:
    """Check the sizes, whose product torch computes in 64 bits."""
    x, sizes = a["input"], [a["N"], a["C"], a["HxW"]]
    return "" if min(sizes) >= 0 and math.prod(sizes) == x.numel() else f"N, C and HxW are {sizes} of {list(x.shape)}"


@check_of("repeat_interleave")
def _repeated(a: Arguments) -> str:
    """Check the number of results, which torch adds up in 64 bits."""
    repeats = a.get("repeats")
    if not isinstance(repeats, torch.Tensor) or repeats.dtype not in (torch.int64, torch.int32):
        return ""  # an integer, or refused by torch
    with _disable_current_modes(), torch.no_grad():
        numbers = _numbers(repeats)
        total = float(numbers.double().sum()) if numbers is not None else 0.0
        return f"repeats add up to {total:.3g}" if total > MOST_ELEMENTS else ""


@check_of("div divide")
def _divided(a: Arguments) -> str:
    """Check integers that are divided with rounding towards zero: processors trap on the least one by -1."""
    operands = [a["self"], a["other"]]
    dtype = torch.result_type(*operands)
    if a.get("rounding_mode", "trunc") != "trunc" or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return ""
    with _disable_current_modes(), torch.no_grad():
        numbers = [_numbers(x) if isinstance(x, torch.Tensor) else torch.tensor(x) for x in operands]
        if any(x is None for x in numbers):
            return ""
        left, right = (torch.as_tensor(x) for x in numbers)
        traps = bool((left == torch.iinfo(dtype).min).any() and (right == -1).any())
        return f"the least integer of {dtype} is divided by -1" if traps else ""


@check_of("_fft_c2c _fft_r2c _fft_c2r")
def _fft(a: Arguments) -> str:
    x, axes = a["self"], list(a["dim"])
    inside = bool(axes) and all(0 <= d < x.dim() for d in axes)
    if not inside or len(set(axes)) < len(axes):
        return f"dim is {axes} of {x.dim()} axes"
    if a.get("normalization") not in (0, 1, 2):
        return f"normalization is {a.get('normalization')}"
    last = a.get("last_dim_size")  # of the result, of which the operand has the lower half
    fits = last is None or (last > 0 and x.shape[axes[-1]] == last // 2 + 1)
    return "" if fits else f"last_dim_size is {last} of {list(x.shape)}"


@check_of("_weight_norm _weight_norm_interface")
def _weight_norm(a: Arguments) -> str:
    v, g, dim = a["v"], a["g"], a["dim"]
    inside = v.dim() > 0 and dim in (0, v.dim() - 1) and v.is_floating_point() and g.dtype == v.dtype
    inside = inside and v.is_contiguous() and g.is_contiguous()
    wanted = [s if k == dim else 1 for k, s in enumerate(v.shape)]
    return "" if inside and list(g.shape) == wanted else f"g has the shape {list(g.shape)} for {list(v.shape)}"


_UPSAMPLING = """
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d
"""


@check_of(_UPSAMPLING)
def _upsampled(a: Arguments) -> str:
    """Check that every scale is that of the sizes, up to one element."""
    scales = [a.get(k) for k in ("scales", "scales_d", "scales_h", "scales_w") if k in a]
    if "scale_factors" in a or not any(scales):  # torch computes the sizes from the factors
        return ""
    sizes = zip(a["self"].shape[2:], a["output_size"], scales, strict=False)
    wrong = [s for old, new, s in sizes if s is not None and not abs(old * s - new) <= 1]
    return f"a scale is {wrong[0]}" if wrong else ""


@check_of("grid_sampler grid_sampler_2d grid_sampler_3d")
def _sampled(a: Arguments) -> str:
    modes = a["interpolation_mode"], a["padding_mode"]
    return "" if all(m in (0, 1, 2) for m in modes) else f"interpolation and padding are {modes}"


@check_of("binary_cross_entropy")
def _entropy(a: Arguments) -> str:
    shapes = [list(t.shape) for t in (a["self"], a["target"])]
    return "" if shapes[0] == shapes[1] else f"input and target have the shapes {shapes}"


@check_of("lstm gru rnn_tanh rnn_relu")
def _recurrent(a: Arguments) -> str:
    """Check the shapes of states and weights, which some of torch's kernels take for granted."""
    if "batch_sizes" in a:
        return "packed sequences are not read"
    x, states, weights = a["input"], a["hx"], a["params"]
    states = list(states) if isinstance(states, (list, tuple)) else [states]
    layers, ways = a["num_layers"], 1 + bool(a["bidirectional"])
    hidden, out = states[-1].shape[2], states[0].shape[2]
    wide = weights[0].shape[0]  # gates times hidden sizes
    wanted: list[tuple[Any, ...]] = []
    for layer in range(min(layers, len(weights)) * ways):
        wanted += [(wide, out * ways if layer >= ways else x.shape[2]), (wide, out)]
        wanted += [(wide,)] * 2 if a["has_biases"] else []
        wanted += [(out, hidden)] if out != hidden else []
    batch = x.shape[0 if a["batch_first"] else 1]
    shapes = [*states, *weights], [(layers * ways, batch, out), (layers * ways, batch, hidden)][-len(states) :]
    same = [tuple(t.shape) for t in shapes[0]] == [*shapes[1], *wanted] and {t.dtype for t in shapes[0]} == {x.dtype}
    fits = (
        layers > 0
        and hidden > 0
        and wide in ((4 * hidden,) if len(states) == 2 else (hidden, 3 * hidden))
        and x.dim() == 3
        and 0 not in x.shape
    )
    return "" if same and fits and x.is_floating_point() else "states and weights do not fit the input"


@check_of("embedding_bag _embedding_bag _embedding_bag_forward_only")
def _bags(a: Arguments) -> str:
    """Check that bags begin at ascending places of the indices."""
    indices, offsets, scales = a["indices"], a["offsets"], a.get("per_sample_weights")
    if indices.dim() != 1 or offsets.dim() != 1 or a.get("mode") not in (0, 1, 2):
        return f"indices have {indices.dim()} axes, offsets {offsets.dim()}, and the mode is {a.get('mode')}"
    if not {indices.dtype, offsets.dtype} <= {torch.int32, torch.int64}:
        return f"indices are {indices.dtype}, and offsets {offsets.dtype}"
    if a.get("include_last_offset") and len(offsets) < 2:
        return f"the end of the last bag is included in {len(offsets)} offsets"
    if scales is not None and (scales.shape != indices.shape or scales.dtype != a["weight"].dtype):
        return "per_sample_weights do not fit the indices"
    with _disable_current_modes(), torch.no_grad():
        starts = _numbers(offsets)
        if starts is None:
            return ""
        ascending = starts.numel() > 0 and starts[0] == 0 and (starts.diff() >= 0).all() and starts[-1] <= len(indices)
        return "" if ascending else "offsets do not rise from 0 to the number of indices"


@check_of("_scaled_dot_product_flash_attention_for_cpu")
def _attention(a: Arguments) -> str:
    q, k, v, mask = a["query"], a["key"], a["value"], a.get("attn_mask")
    shapes = [list(t.shape) for t in (q, k, v)]
    alike = shapes[1] == shapes[2] and q.shape[:2] == k.shape[:2] and q.shape[3:] == k.shape[3:]
    alike = alike and all(t.stride(-1) == 1 for t in (q, k, v))  # the kernel reads rows without steps
    if len(q.shape) != 4 or not alike or any(0 in s for s in shapes) or len({t.dtype for t in (q, k, v)}) > 1:
        return f"query, key and value have the shapes {shapes}"
    full = [*q.shape[:-1], k.shape[-2]]
    sizes = list(mask.shape) if mask is not None else []
    fits = len(sizes) <= len(full) and all(m in (1, n) for m, n in zip(sizes[::-1], full[::-1], strict=False))
    return "" if fits else f"the mask has the shape {sizes} for {full}"


def _numbers(x: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor whose numbers can be read, None while a program is traced."""
    return getattr(x, "constant", None) if hasattr(x, "fake_mode") else x


@check_of("roi_align roi_pool ps_roi_align ps_roi_pool")
def _regions(a: Arguments) -> str:
    x, rois = a["input"], a["rois"]
    if rois.dim() != 2 or rois.shape[1] != 5 or rois.dtype != x.dtype:
        return f"rois has the shape {list(rois.shape)}"
    with _disable_current_modes(), torch.no_grad():
        numbers = _numbers(rois)
        if numbers is None or not numbers.numel():
            return ""
        inside = (numbers[:, 0] >= 0) & (numbers[:, 0] < x.shape[0]) & (numbers.abs() < 1e6).all(1)
        if not bool(inside.all()):
            return f"a region is outside of the {x.shape[0]} images, or has no numbers"
        return _fault_of_samples(a, numbers)


def _fault_of_samples(a: Arguments, rois: torch.Tensor) -> str:
    """Check the number of points that are read of a region, which torchvision computes in 32 bits."""
    bins, scale = (a["pooled_height"], a["pooled_width"]), float(a["spatial_scale"])
    if min(bins) < 1 or not 0 <= scale < 1e6:
        return f"the scale is {scale}, and the bins are {list(bins)}"
    largest = (rois[:, 1:].abs().amax().item() * scale * 2 + 1) if len(rois) else 0.0
    points = [max(a.get("sampling_ratio") or 0, largest / b + 1, 1) * b for b in bins]
    return f"{math.prod(points):.3g} points are read of a region" if math.prod(points) >= MOST_ELEMENTS else ""


@check_of("deform_conv2d")
def _deformed(a: Arguments) -> str:
    groups = [a[k] for k in ("groups", "offset_groups") if k in a]
    if any(g < 1 for g in groups):
        return f"the numbers of groups are {groups}"
    with _disable_current_modes(), torch.no_grad():
        numbers = _numbers(a["offset"])
        far = numbers is not None and numbers.numel() > 0 and not bool((numbers.abs() < 1e6).all())
        return "an offset is not a number, or too large" if far else ""
