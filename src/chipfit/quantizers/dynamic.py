"""Dynamic quantization: ranges are found at run time, of a tensor, of samples, pixels or rows, or of blocks of rows."""

from typing import Any, Literal

from chipfit.quantizers.ops import ste

#: what shares a range
Per = Literal["tensor", "sample", "pixel", "row", "block"]

#: quantized values, scale and zero point, all float32; scale and zero point broadcast against the values
Codes = tuple[Any, Any, Any]


def dynamic_codes(ops: Any, x: Any, *, qmin: int, qmax: int, affine: bool, per: Per, block: int) -> Codes:
    """Quantize x as a dynamic kernel does.

    Affine, for a range widened to contain 0: s = (max - min) / (qmax - qmin), z = clip(round(qmin - min / s)), q =
    clip(round(x / s) + z), halves to even. Symmetric: s = max |x| / qmax, q = round(x * (qmax / max |x|)). s = 1 if all
    values are 0.

    Args:
        ops: see `quantizers.ops`.
        x: floats [N, *dims, K], float32.
        qmin, qmax: lowest and highest quantized value.
        affine: with a zero point; otherwise it is 0.
        per: what shares a range: the tensor, each of N samples, the channels (axis 1) of each pixel, each row of K
            elements, or each block of a row.
        block: elements of a block; the last one of a row may have fewer.

    Source: ONNX DynamicQuantizeLinear-11; ONNX Runtime, MatMulNBits with accuracy_level 4.
    >>> import torch
    >>> how = {"qmin": 0, "qmax": 255, "affine": True, "per": "tensor", "block": 1}
    >>> q, s, z = dynamic_codes(torch, torch.tensor([[-1.0, 0.0, 4.1]]), **how)
    >>> q.tolist(), round(float(s), 3), float(z)
    ([[0.0, 50.0, 255.0]], 0.02, 50.0)
    """
    parts, count = x, x.shape[-1]
    if per == "block":
        block = min(block, count)
        missing = x[..., : -count % block]
        whole = ops.concatenate([x, ops.zeros_like(missing)], axis=-1) if -count % block else x
        parts = ops.reshape(whole, (-1, whole.shape[-1] // block, block))
    axes = axes_of(per, len(x.shape))
    low, high = ops.amin(parts, axis=axes, keepdims=True), ops.amax(parts, axis=axes, keepdims=True)
    zeros = ops.zeros_like(high)
    if affine:
        low, high = ops.minimum(low, zeros), ops.maximum(high, zeros)
        s = (high - low) / (zeros + (qmax - qmin))  # two tensors: torch divides a number by a tensor in two roundings
        s = ops.where(s > 0, s, zeros + 1)
        z = ops.clip(ops.round(qmin - low / s), qmin, qmax)
        q = ops.clip(ops.round(parts / s) + z, qmin, qmax)
    else:
        top = ops.maximum(high, -low)
        top = ops.where(top > 0, top, zeros + qmax)
        s, z = top / (zeros + qmax), zeros
        q = ops.clip(ops.round(parts * ((zeros + qmax) / top)), qmin, qmax)
    if parts is not x:
        shape = (-1, *whole.shape[1:])
        q, s, z = (ops.reshape(p + ops.zeros_like(parts), shape)[..., :count] for p in (q, s, z))
    return q, s, z


def axes_of(per: Per, rank: int) -> tuple[int, ...]:
    """Return the axes of a tensor along which a range is shared; of blocks, the one after the split."""
    whole = tuple(range(rank))
    return {"tensor": whole, "sample": whole[1:], "pixel": (1,)}.get(per, (-1,))


def dynamic_quantize(ops: Any, x: Any, **how: Any) -> Any:
    """Return x after dynamic quantization and dequantization, with the gradient of the identity."""
    q, s, z = dynamic_codes(ops, ops.stop_gradient(x), **how)
    return ste(ops, x, (q - z) * s)
