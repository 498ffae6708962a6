"""Tables of values for grids whose codes are indices: fitted look-up tables, logarithmic codes, narrow floats.

A table lists the value of each code in units of the scale, ascending. Floats are rounded to the nearest entry, on a
logarithmic grid to the nearest logarithm.
"""

import functools

import torch
from torch import Tensor

#: narrow floating-point types: name -> (exponent bits, mantissa bits, largest finite value)
FLOATS = {
    "e4m3": (4, 3, 448.0),
    "e5m2": (5, 2, 57344.0),
    "e2m1": (2, 1, 6.0),
    "e3m2": (3, 2, 28.0),
    "e2m3": (2, 3, 7.5),
}
#: most distinct values that the fit of a look-up table distinguishes; nearby ones are counted together
_DISTINCT = 1024


@functools.cache
def float_table(name: str) -> tuple[float, ...]:
    """Return all finite values of a narrow float, ascending.

    Source: OCP 8-bit Floating Point Specification 1.0, table 1 (e4m3, e5m2); OCP Microscaling Formats 1.0, section 5.3.

    >>> float_table("e2m1")
    (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    """
    exponent, mantissa, largest = FLOATS[name]
    bias, steps = (1 << exponent - 1) - 1, 1 << mantissa
    values = {m / steps * 2.0 ** (1 - bias) for m in range(steps)}
    values |= {(1 + m / steps) * 2.0 ** (e - bias) for e in range(1, 1 << exponent) for m in range(steps)}
    positive = sorted(v for v in values if 0 < v <= largest)
    return (*(-v for v in reversed(positive)), 0.0, *positive)


@functools.cache
def log_table(base: float, bits: int) -> tuple[float, ...]:
    """Return +-base^-k for k = 0 ... 2^(bits-1) - 1, and 0, ascending: the scale is the largest magnitude.

    >>> log_table(2.0, 3)
    (-1.0, -0.5, -0.25, -0.125, 0.0, 0.125, 0.25, 0.5, 1.0)
    """
    magnitudes = [base**-k for k in range((1 << bits - 1) - 1, -1, -1)]
    return (*(-v for v in reversed(magnitudes)), 0.0, *magnitudes)


def constant(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Return numbers, [N], with the dtype and on the device of `like`; each such tensor is made once and kept."""
    if type(like) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():  # a symbol must not be kept
        return torch.tensor(values, dtype=like.dtype, device=like.device)
    return _constant(values, like.dtype, like.device)


@functools.lru_cache(maxsize=256)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # usable by autograd, even if first needed in inference
        return torch.tensor(values, dtype=dtype, device=device)


@functools.cache
def boundaries(table: tuple[float, ...], logarithmic: bool) -> tuple[float, ...]:
    """Return the boundaries between entries; a value on a boundary takes the lower entry."""
    t = torch.tensor(table, dtype=torch.float64)
    low, high = t[:-1], t[1:]
    if not logarithmic:
        return tuple(((low + high) / 2).tolist())
    beside_zero = (low + high) / 2  # 0 has no logarithm
    between = torch.sign(low) * torch.sqrt((low * high).abs())
    return tuple(torch.where((low == 0) | (high == 0), beside_zero, between).tolist())


def fit(values: torch.Tensor, weights: torch.Tensor | None, entries: int, low: int, high: int) -> tuple[float, ...]:
    """Return the look-up table with the least squared error: integers between `low` and `high`, including 0.

    Args:
        values: [N], in units of the scale.
        weights: count of each value, [N]; None: 1.
        entries: size of the table, >= 2.

    One-dimensional k-means, solved exactly by dynamic programming, hence deterministic. The entry nearest to zero
    becomes zero. Source: Wang and Song 2011, Ckmeans.1d.dp, The R Journal 3(2), eq. 2.
    """
    x = values.detach().double().reshape(-1).clamp(low, high)
    w = torch.ones_like(x) if weights is None else weights.double().reshape(-1)
    width = max(1.0, (high - low) / (_DISTINCT - 1))
    keys, where = torch.unique(torch.round(x / width), return_inverse=True)
    mass = torch.zeros(len(keys), dtype=torch.float64).index_add_(0, where, w)
    total, keep = torch.zeros_like(mass).index_add_(0, where, w * x), mass > 0
    mass, centre = mass[keep], total[keep] / mass[keep]
    means = centre if len(centre) <= entries else k_means(centre, mass, entries)
    rounded = torch.unique(torch.round(means).clamp(low, high))
    if not bool((rounded == 0).any()):
        if len(rounded) < entries:
            rounded = torch.cat([rounded, rounded.new_zeros(1)])
        else:
            rounded[rounded.abs().argmin()] = 0.0
    return tuple(torch.unique(rounded).tolist())


def k_means(x: torch.Tensor, w: torch.Tensor, k: int) -> torch.Tensor:
    """Return the means of the best k groups of ascending points x [n] with masses w; n > k."""
    n = len(x)
    zero = torch.zeros(1, dtype=torch.float64)
    m0, m1, m2 = (torch.cat([zero, (w * x**p).cumsum(0)]) for p in (0, 1, 2))
    a, b = torch.arange(n + 1).unsqueeze(1), torch.arange(n + 1)[None]
    count, total = m0[b] - m0[a], m1[b] - m1[a]
    # cost of one group a..b-1
    cost = torch.where(b > a, m2[b] - m2[a] - total.square() / count.clamp_min(1e-300), torch.inf)
    best = cost[0].clone()
    cuts = []
    for _ in range(k - 1):
        best, cut = (best.unsqueeze(1) + cost).min(0)
        cuts.append(cut)
    ends, end = [n], n
    for cut in reversed(cuts):
        end = int(cut[end])
        ends.append(end)
    edges = torch.tensor([0, *reversed(ends)])
    return (m1[edges[1:]] - m1[edges[:-1]]) / (m0[edges[1:]] - m0[edges[:-1]])
