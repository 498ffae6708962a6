"""The Platform record: what a chip can do, as validated, frozen data. Schema version 0.

Keys that a file leaves out have the defaults given here. Unknown keys are refused.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PrivateAttr,
    field_validator,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

from chipfit.platform.filters import Member, has_nan
from chipfit.quantizers.grids import SCALES, Grid, all_codes
from chipfit.quantizers.tables import FLOATS, float_table, log_table
from chipfit.registry import is_number
from chipfit.screen import Summary, SummaryRepr

#: slot of an option, or place -> words that may stand there instead of a format name
WORDS = {slot: {"float", "none"} for slot in ("w", "b", "inner", "io_in", "io_out")}
WORDS["state"] = set()
WORDS |= {"in": {"float", "none", "any"}, "out": {"float", "none", "same"}}
Rounding = Literal["half_even", "half_away", "half_up", "floor", "trunc"]
#: how an operator runs: in integers, in floats, by a look-up table, or moving values without arithmetic
Exec = Literal["int", "float", "table", "follow"]
Slot = Literal["in0", "in1", "in2", "ins", "w", "b", "out", "outs"]
Confidence = Literal["V", "D", "I"]  #: verified in source, documented, inferred
#: heads of rules -> the numbers that may stand beside each
HEADS: dict[str, tuple[str, ...]] = {
    "tie": (),
    "dtype": (),
    "fix": ("scale", "zp"),
    "mono": ("eq", "min", "max", "lt", "times"),
    "zero": ("eq",),
    "wsum_max": (),
}
_NUMBERS = tuple(dict.fromkeys(n for numbers in HEADS.values() for n in numbers))
Positive = Annotated[int, Field(gt=0)]
#: bits of one number
Width = Annotated[int, Field(ge=1, le=128)]
_STRICT = ConfigDict(extra="forbid")
_INPUTS = "format of the data inputs, or one per slot; any: whatever the producer writes"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _moderate(cls, given: Any) -> Any:
        for key, value in given.items() if isinstance(given, dict) else ():
            if isinstance(value, int) and value.bit_length() > 63:
                raise ValueError(f"{key} must fit 64 bits, and is an integer of {value.bit_length()} bits")
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        faults = list(self._faults())
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def _faults(self) -> Iterator[str]:
        """Yield the problems of values that are valid one by one."""
        yield from ()


@with_config(_STRICT)
class Table(TypedDict, total=False):
    """The values of a look-up table."""

    value_bits: Annotated[int, Field(ge=1, le=32)]
    entries: Positive
    per: Literal["tensor", "channel"]
    group: Positive
    dim: Positive


@with_config(_STRICT)
class Branches(TypedDict):
    """Operators of a fusion that do not form a chain."""

    nodes: dict[str, str | list[str]]  #: name -> operator, or alternatives
    edges: list[list[str]]  #: pairs of names, the second perhaps with a slot: ["c", "a.in0"]
    free_input: NotRequired[str]


@with_config(_STRICT)
class FirstLast(TypedDict):
    """Bits of the first and the last layer with weights."""

    bits: Width
    slots: NotRequired[list[Slot]]


@with_config(_STRICT)
class Gate(TypedDict, total=False):
    """The conditions under which a part of a file holds."""

    arch: str  #: a revision T, or >=T, or <T
    bits: Positive  #: width of the activations; of rules and choices
    runtime: str  #: of rules and choices
    phase: Literal["ptq", "qat"]  #: of fusions: before or while weights are trained
    single_use: Literal[True]  #: of fusions: no value between the operators has another reader; always so


@with_config(_STRICT)
class Requant(TypedDict, total=False):
    """The requantization of accumulators."""

    form: Literal["float", "q31", "q15", "shift", "fixed", "none"]
    round: Rounding
    passes: Literal[1, 2]


@with_config(_STRICT)
class Accumulator(TypedDict):
    """A register that sums products."""

    bits: Width
    terms: NotRequired[Positive]  #: products that are summed at this width; all when left out
    sat: NotRequired[bool]  #: sums saturate; else they wrap around
    when: NotRequired[Gate]  #: revisions that have this stage


#: fields that a grid has from its format
_GRID_FIELDS = ("bits", "per", "kind", "scale_min", "scale_max", "pair_limit")


class Format(_Record):
    """A number format of stored tensors."""

    bits: int = Field(ge=1, le=64, strict=True, description="width of one value [bit]")
    free: bool = Field(False, description="bits is the default; any width from 1 to 16 may be chosen")
    kind: Literal["int", "lut", "log", "float", "bfp"] = "int"
    signed: bool | Literal["auto"] = Field(True, description="auto: decided per tensor from its data")
    range: Literal["full", "narrow"] | tuple[int, int] = Field("full", description="narrow drops the lowest value")
    scale: Literal["any", "pot", "bf16", "s16"] = Field(
        "any", description="pot: powers of two only; bf16: of blocks; s16: 16 significant bits"
    )
    scale_min: float | None = Field(None, ge=SCALES[0], le=SCALES[1], description="least scale of the hardware")
    scale_max: float | None = Field(None, ge=SCALES[0], le=SCALES[1], description="greatest scale of the hardware")
    pair_limit: Positive | None = Field(None, description="greatest |sum| of two neighbours, of weights of one sign")
    zero: int | Literal["any"] | tuple[int, ...] = Field(0, description="zero point: fixed, any, or one of a set")
    grid_offset: float = Field(0, alias="grid", description="offset of quantized values before scaling")
    per: Literal["tensor", "channel", "gate", "block", "row"] = Field(
        "tensor", description="what shares one scale; gate: the rows of one gate of a recurrent layer"
    )
    axis: Literal["out", "in", "last"] | int = Field("out", description="role of the channel axis")
    block: int | tuple[int, ...] | None = None
    scale_bits: int | None = Field(None, description="width of an integer second-level scale")
    dynamic: bool = Field(False, description="range computed at run time")
    lut: Table | None = None
    base: float | None = Field(None, description="base of a logarithmic grid")
    float_: str | None = Field(None, alias="float", description="fp32, fp16, bf16, e4m3, e5m2, e2m1 ...")

    def _faults(self) -> Iterator[str]:
        low, high = all_codes(self.bits, self.signed is not False)[0], all_codes(self.bits, self.signed is True)[1]
        if self.bits == 1:  # binary: -1 and +1
            low, high = -1, 1
        if self.kind in ("log", "lut") and self.bits > 16:
            yield f"a table for {self.bits}-bit codes has 2^{self.bits} entries: at most 16 bits are supported"
        if self.zero == ():
            yield "zero is an empty set: name at least one code"
        if self.range == "narrow" and self.signed is False:
            yield "range narrow drops the lowest negative value; unsigned formats have none: use full or [low, high]"
        if isinstance(self.range, tuple):
            if not low <= self.range[0] < self.range[1] <= high:
                yield f"range {list(self.range)} must be ascending and within {low}..{high} of {self.bits} bits"
            low, high = self.range
        of_kinds = {"lut": "kind lut", "base": "kind log", "float_": "kind float", "block": "per block"}
        for field, where in of_kinds.items():
            if getattr(self, field) is not None and where not in (f"kind {self.kind}", f"per {self.per}"):
                yield f"'{field.rstrip('_')}' has a meaning only in a format of {where}"
        if self.scale == "bf16" and self.per != "block":
            yield "scales in bf16 are of blocks: use per block, or scale any"
        if self.free and (self.kind != "int" or self.bits > WIDEST or isinstance(self.range, tuple)):
            yield f"a free width needs kind int, at most {WIDEST} bits, and range full or narrow"
        if self.grid_offset and (self.kind != "int" or self.zero != 0 or self.signed is not True):
            yield "'grid' needs a signed integer format whose zero point is 0"
        if self.pair_limit is not None and (self.kind != "int" or self.zero != 0 or self.per == "block"):
            yield "pair_limit needs kind int, zero 0, and no blocks"
        for z in () if self.zero == "any" else self.zero if isinstance(self.zero, tuple) else (self.zero,):
            if not low <= z <= high:
                yield f"zero point {z} is outside the range {low}..{high}"

    @property
    def is_float(self) -> bool:
        """True for a floating-point format of 16 or 32 bits, stored as it is computed."""
        return self.kind == "float" and self.bits >= 16

    @property
    def gap(self) -> str:
        """The part of this format that chipfit does not support, "" if it supports all of it."""
        if self.kind == "bfp" or (self.per == "row" and not self.dynamic):
            return f"scales per {self.per}"
        if self.per == "block" and (self.kind != "int" or self.block is None or self.free):
            return "scales per block of other numbers than integers, or of no known size"
        if self.per == "block" and self.axis != ("last" if self.dynamic else "in"):
            return f"blocks along the axis {self.axis}"
        if self.kind == "lut" and self.lut and ({"group", "dim"} & set(self.lut) or self.lut.get("per") == "channel"):
            return "look-up tables per channel or group of channels, or of vectors"
        if self.per == "channel" and self.axis != "out":
            return f"scales along the axis {self.axis}"
        if self.scale_bits is not None:
            return "scales of two levels"
        if self.dynamic and (self.kind != "int" or self.signed == "auto" or self.zero not in (0, "any")):
            return "ranges computed at run time of such a format"
        if self.kind == "float" and not self.is_float and self.float_ not in FLOATS:
            return f"the float type {self.float_}"
        return ""

    def grid(self, signed: bool | None = None, rounding: str | None = None) -> Grid:
        """Return the quantization grid.

        Args:
            signed: the sign, if the format derives it from the data.
            rounding: of float values to quantized ones; half to even unless given.

        Raises:
            ValueError: the sign is needed and not given.
        """
        s = self.signed if self.signed != "auto" else signed
        if s is None:
            raise ValueError("the format's signedness is decided per tensor: pass signed=")
        common: dict[str, Any] = {k: getattr(self, k) for k in _GRID_FIELDS}
        common |= {"per": "channel"} if self.per == "gate" else {}
        common |= {"pot": self.scale == "pot", "bf16": self.scale == "bf16", "rounding": rounding or "half_even"}
        common["short_scale"] = self.scale == "s16"
        if self.kind == "float":
            table = float_table(self.float_ or "")
            return Grid(qmin=int(table[0]), qmax=int(table[-1]), table=table, **common)
        if self.kind == "log":
            return Grid(qmin=-1, qmax=1, table=log_table(self.base or 2.0, self.bits), **common)
        if self.kind == "lut":
            lut = self.lut or {}
            low, high = all_codes(lut.get("value_bits", 8), s)
            return Grid(qmin=low, qmax=high, entries=lut.get("entries", 1 << self.bits), **common)
        low, high = self.range if isinstance(self.range, tuple) else all_codes(self.bits, s)
        binary = self.bits == 1 and s and self.zero == 0
        if binary or self.grid_offset:
            table = (-1.0, 1.0) if binary else tuple(q + self.grid_offset for q in range(low, high + 1))
            return Grid(qmin=low, qmax=high, **{**common, "kind": "offset", "table": table})
        return Grid(qmin=low + (self.range == "narrow" and s), qmax=high, zero=self.zero, **common)

    def __str__(self) -> str:
        if self.kind == "float":
            return self.float_ or f"float{self.bits}"
        sign = {True: "s", False: "u", "auto": "s|u"}[self.signed]
        words = [f"{sign if self.kind == 'int' else self.kind}{self.bits}"]
        if self.range == "narrow":
            words[0] += "n"
        elif isinstance(self.range, tuple):
            words[0] += f"[{self.range[0]},{self.range[1]}]"
        words.append("affine" if self.zero == "any" else "sym" if self.zero == 0 else f"zp{self.zero}")
        words += [f"pairs<={self.pair_limit}"] if self.pair_limit is not None else []
        words += {"pot": ["PoT"], "bf16": ["bf16"]}.get(self.scale, []) + [f"/{self.per}"] * (self.per != "tensor")
        return " ".join(words + ["dynamic"] * self.dynamic)


#: most bits of a format whose width is free
WIDEST = 16


class Option(_Record):
    """A joint choice of formats that a kernel supports."""

    in_: str | tuple[str, ...] | None = Field(None, alias="in", description=_INPUTS)
    in_bits: tuple[int, ...] | None = Field(None, description="with in any: widths that the kernel reads")
    w: str | None = Field(None, description="format of the weights; with in any, also of constant data inputs")
    b: str | None = None
    out: str | None = None
    state: str | None = Field(None, description="format of the last result: the state of a layer that keeps its own")
    simd: Positive | None = Field(None, description="SIMD width [output channels], a cost hint")
    when: Gate = Gate()
    #: the format to which the kernel quantizes its data at run time; `in_` is float then
    _dynamic: str | None = PrivateAttr(None)

    @property
    def dynamic(self) -> str | None:
        return self._dynamic

    def with_dynamic(self, name: str) -> Self:
        """Return the option with data that the kernel quantizes to a format at run time."""
        out = self.model_copy(update={"in_": "float"})
        out._dynamic = name
        return out

    @property
    def ins(self) -> tuple[str, ...]:
        """The formats of the data inputs: one for all, one per slot, or none."""
        return self.in_ if isinstance(self.in_, tuple) else (self.in_,) if self.in_ is not None else ()

    @property
    def input_mode(self) -> str:
        """The way it reads its data: "codes", "dynamic" (quantized at run time) or "float"; "" without data."""
        if self.dynamic is not None or self.in_ is None:
            return "dynamic" if self.dynamic else ""
        return "float" if all(name in ("float", "none") for name in self.ins) else "codes"

    def __str__(self) -> str:
        """Return the option in a line: "u8 x w8 + b32 -> u8"."""
        gate = f"  (where {', '.join(f'{k} {v}' for k, v in self.when.items())})" if self.when else ""
        parts = ((" x ", self.w), (" + ", self.b), (" -> ", self.out))
        return (" , ".join(self.ins) or "-") + "".join(f"{sign}{name}" for sign, name in parts if name) + gate


def _is_zero_point(x: Any) -> bool:
    """Return whether a value is an integer of 32 bits, which hold the zero points of all formats."""
    return isinstance(x, int) and -(1 << 31) <= x < 1 << 31


class Rule(_Record):
    """A constraint across the tensors of an operator; exactly one of the heads is given."""

    tie: tuple[Slot, ...] | None = Field(None, description="slots with equal scale and zero point")
    dtype: tuple[Slot, ...] | None = Field(None, description="slots with equal storage type")
    fix: Slot | None = Field(None, description="slot with the given scale and zp")
    scale_product: dict[Slot, Annotated[int, Field(ge=-8, le=8)]] | None = Field(
        None, alias="mono", description="product of scale^exponent with eq, min, max or lt"
    )
    zero: Slot | None = Field(None, description="slot whose zero point is eq, or one of a list")
    wsum_max: float | None = Field(None, gt=0, description="bound on sum |w_q| per output channel")
    scale: float | None = None
    zp: int | None = None
    eq: Any = None
    min: float | None = None
    max: float | None = None
    lt: float | None = None
    times: str | None = Field(None, description="attribute that multiplies the product")
    hard: bool = Field(True, description="false: preferred by the tool, not required by the kernel")
    note: str = ""

    def _faults(self) -> Iterator[str]:
        heads = self._heads
        if len(heads) != 1:
            yield f"a rule has exactly one of {', '.join(HEADS)}; this one has {', '.join(heads) or 'none'}"
            return
        allowed = HEADS[heads[0]]
        for key in _NUMBERS:
            if getattr(self, key) is not None and key not in allowed:
                takes = ", ".join(allowed) or "none"
                yield f"'{key}' has no meaning in a {heads[0]} rule; its numbers are {takes}"
        if self.tie is not None and len(self.tie) == 1 and self.tie[0] not in ("ins", "outs"):
            yield f"a tie needs two slots, or ins or outs; this one has {self.tie[0]} alone"
        if self.fix and (self.scale is None or self.scale <= 0 or not _is_zero_point(self.zp)):
            yield f"fix needs a scale above 0 and zp of 32 bits; this one has scale {self.scale}, zp {self.zp}"
        zeros = self.eq if isinstance(self.eq, (list, tuple)) else [self.eq]
        if self.zero is not None and not (zeros and all(map(_is_zero_point, zeros))):
            yield f"zero needs eq, an integer of 32 bits or a list of them; this one has {self.eq!r}"
        if self.scale_product is not None:
            tops = [b for b in (self.eq, self.max, self.lt) if b is not None]
            if not tops and self.min is None:
                yield "mono needs one of eq, min, max, lt"
            if self.eq is not None and (self.min, self.max, self.lt) != (None, None, None):
                yield "mono has eq and a bound: the bound is redundant or contradicts eq"
            if any(not isinstance(t, (int, float)) or not 0 < t <= 2.0**1000 for t in tops):
                yield f"mono can never hold: products of scales are finite and positive, and this is to be {tops}"
            elif self.min is not None and tops and self.min > min(tops):
                yield f"mono can never hold: min {self.min} is above its upper bound {min(tops)}"

    @property
    def _heads(self) -> list[str]:
        """The heads that are given; exactly one in a valid rule."""
        return [h for h in HEADS if getattr(self, "scale_product" if h == "mono" else h) is not None]

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest product of a `mono` rule."""
        if self.eq is not None:
            return float(self.eq), float(self.eq)
        tops = [b for b in (self.max, self.lt) if b is not None]
        return self.min if self.min is not None else -math.inf, min(tops, default=math.inf)

    @property
    def head(self) -> str:
        return self._heads[0]

    def __str__(self) -> str:
        """Return the constraint in a line: "b = in0 * w"."""
        soft = "" if self.hard else "  (preferred)"
        if self.tie:
            return f"{', '.join(self.tie)} share scale and zero point{soft}"
        if self.dtype:
            return f"{', '.join(self.dtype)} share the storage type{soft}"
        if self.fix:
            return f"{self.fix}: scale {self.scale:g}, zero point {self.zp}{soft}"
        if self.scale_product:
            product = " * ".join(s if e == 1 else f"{s}^{e}" for s, e in self.scale_product.items())
            limits = (("=", self.eq), (">=", self.min), ("<=", self.max), ("<", self.lt))
            bounds = " and ".join(f"{word} {v:g}" for word, v in limits if v is not None)
            return f"{product}{f' * {self.times}' if self.times else ''} {bounds} (scales){soft}"
        if self.zero:
            return f"zero point of {self.zero} is {self.eq}{soft}"
        return f"sum |w| <= {self.wsum_max:g} in quantized values per output channel{soft}"


class OpRule(_Record):
    """A rule of the chip for some operators; the first rule that matches an operator governs it."""

    match: tuple[str, ...] = Field(min_length=1, description="canonical operators, @groups, @sets of this file, or *")
    where: dict[str, Any] = Field({}, description="predicates on attributes: eq, in, min, max, multiple")
    when: Gate = Field(Gate(), description="architecture or bits gate")
    use: tuple[Option, ...] = Field((), description="joint choices, the first is the base one")
    rules: tuple[Rule, ...] = ()
    exec: Exec | None = None
    cpu: bool = Field(False, description="the processor beside the accelerator computes it, in these formats")
    src: tuple[str, ...] = Field(min_length=1, description="source ids")
    confidence: Confidence = Field(alias="conf", description="V verified in source, D documented, I inferred")
    note: str = ""

    def _faults(self) -> Iterator[str]:
        fixed: dict[str, tuple[float | None, int | None]] = {}
        span: dict[tuple[Any, ...], tuple[float, float]] = {}
        for r in self.rules:
            if r.fix and r.hard and fixed.setdefault(r.fix, (r.scale, r.zp)) != (r.scale, r.zp):
                yield f"slot '{r.fix}' is fixed to two different scales"
        for r in self.rules:
            if r.scale_product is not None and r.hard:
                key = (*sorted(r.scale_product.items()), r.times)
                low, high = span.get(key, (-math.inf, math.inf))
                span[key] = low, high = max(low, r.bounds[0]), min(high, r.bounds[1])
                if low > high:
                    product = f"the product {r.scale_product}"
                    yield f"two rules for {product} can never hold together: at least {low:g} and at most {high:g}"
        for a, want in self.where.items():
            tests = want if isinstance(want, dict) else {}
            numbers = {t: tests[t] for t in ("min", "max", "multiple") if t in tests}
            if has_nan(want):
                yield f"where.{a} is nan, which is equal to nothing"
            if not isinstance(tests.get("in", ()), (list, tuple)):
                yield f"where.{a}: 'in' needs a list"
            yield from (f"where.{a}: '{t}' needs a number (got {n!r})" for t, n in numbers.items() if not is_number(n))
            if all(map(is_number, numbers.values())):
                if numbers.get("multiple", 1) <= 0:
                    yield f"where.{a}: 'multiple' needs a number above 0"
                if numbers.get("min", -math.inf) > numbers.get("max", math.inf):
                    yield f"where.{a} can never hold: at least {numbers['min']:g} and at most {numbers['max']:g}"
        if self.exec in ("int", "table") and not self.use:
            yield f"exec {self.exec} needs use: the formats that the kernel supports"

    @property
    def how(self) -> Exec:
        return self.exec or "int"


class Fuse(_Record):
    """Operators that run as one kernel."""

    chain: tuple[tuple[str, ...], ...] | None = Field(None, description="alternatives per position")
    graph: Branches | None = None
    inner: str = Field("none", description="format between the parts")
    when: Gate = Gate()
    note: str = ""
    src: tuple[str, ...] = Field(min_length=1)
    confidence: Confidence = Field(alias="conf")

    def _faults(self) -> Iterator[str]:
        if (self.chain is None) == (self.graph is None):
            yield "a fusion has exactly one of chain, graph"
        if self.chain is not None and len(self.chain) < 2:
            yield "a fusion needs at least two operators"
        if self.graph is not None:
            nodes, edges = self.graph["nodes"], self.graph["edges"]
            if any(len(e) != 2 or {n.partition(".")[0] for n in e} - set(nodes) for e in edges):
                yield f"every edge is a pair of the nodes {', '.join(nodes)}"
            if not set(nodes) - {b.partition(".")[0] for _, b in edges}:
                yield "the edges form a cycle: one node must be the first"

    @property
    def steps(self) -> tuple[tuple[str, ...], ...]:
        """The alternatives per position; a graph becomes the chain along its edges, with a free input from anywhere."""
        if self.graph is None:
            return self.chain or ()
        nodes = {k: (v,) if isinstance(v, str) else tuple(v) for k, v in self.graph["nodes"].items()}
        follows = {a: b.partition(".")[0] for a, b in self.graph["edges"]}
        at = next(n for n in nodes if n not in follows.values())
        steps = [nodes[at]]
        while at in follows:
            at = follows.pop(at)
            steps.append(nodes[at])
        return tuple(steps)


class Placement(_Record):
    """The places of quantizers."""

    at: Literal["inputs", "outputs", "both"] = "outputs"
    io_in: tuple[str, ...] = ()
    io_out: tuple[str, ...] = ()
    first_last: FirstLast | None = Field(None, description="bits (and slots) of the first and last weighted layer")
    note: str = ""


class Math(_Record):
    """The arithmetic of the chip; without it exactness is not claimed."""

    q_round: Rounding | None = Field(None, description="of float values to quantized ones; half_even unless given")
    w_round: Rounding | None = Field(None, description="of weights and biases; q_round unless given")
    kernels: str | None = Field(None, description="kernels that the simulator mirrors, by name in chipfit.simulate")
    requant: Requant | None = None
    acc: tuple[Accumulator, ...] = Field((), description="accumulators, innermost first")
    act_table: dict[str, str | int | FiniteFloat] | None = None
    note: str = ""


class Platform(SummaryRepr, _Record):
    """A chip, or a runtime on a chip.

    Examples:
        >>> import chipfit
        >>> chipfit.load_platform("tflite_int8").formats["a8"].bits
        8
    """

    name: str
    schema_: int = Field(0, alias="schema")
    title: str = ""
    extends: str | None = None
    arch: tuple[str, ...] = Field((), description="revision tags, oldest first")
    arch_default: str | None = Field(None, description="revision where none is named; the last one unless given")
    formats: dict[str, Format] = {}
    sets: dict[str, tuple[Member, ...]] = Field({}, description="operators that rules and fusions name as @set")
    ops: tuple[OpRule, ...] = ()
    unlisted: Literal["float", "follow", "reject", "cpu"] = "float"
    float_unit: bool = Field(True, description="false: no operator may be left in float")
    fuse: tuple[Fuse, ...] = ()
    place: Placement = Placement()
    math: Math = Math()
    wider: str = Field("", description="platform of the same runtime whose activations have more bits")
    deploy: tuple[str, ...] = Field((), description="artefacts, most native first")
    runtimes: tuple[str, ...] = Field((), description="runtimes verified to compute its integers, its own first")
    encodings: str = Field("generic", description="dialect of the JSON encodings that its tools read")
    metadata: bool = Field(False, description="exported files name the platform and chipfit's version")
    simd_padding: bool = Field(True, description="weights take the room of whole instructions (`simd`) in memory")
    sources: dict[str, str] = Field({}, description="id -> where the facts come from")
    gaps: tuple[str, ...] = Field((), description="what is not known")
    arch_selected: str | None = Field(None, exclude=True)
    file: str = Field("", exclude=True)

    @field_validator("schema_")
    @classmethod
    def _known_schema(cls, v: int) -> int:
        if v != 0:
            raise ValueError(f"schema version {v} is not known; this chipfit reads version 0")
        return v

    def _summary(self) -> Summary:
        requant = self.math.requant or {"not known": "exactness is not claimed"}
        revision = f"@{self.arch_selected}" if self.arch_selected else ""
        first = [next((u for u in o.use if u.w), next(iter(o.use), None)) for o in self.ops]
        rows = [(", ".join(o.match), o.how, str(u or "")) for o, u in zip(self.ops, first, strict=True)]
        return Summary(
            f"Platform {self.name}{revision}: {self.title}",
            {
                "formats": ", ".join(f"{k} ({f})" for k, f in self.formats.items()),
                "fusions": str(len(self.fuse) or ""),
                "other operators": self.unlisted,
                "arithmetic": ", ".join(f"{k}: {v}" for k, v in requant.items()),
                "deploys as": ", ".join(self.deploy),
                "runtimes": ", ".join(self.runtimes),
            },
            ("operators", "runs in", "formats, the best"),
            rows,
            "chipfit platforms show",
        )

    def with_widths(self, widths: Iterable[int]) -> Self:
        """Return the platform with every format of free width at these widths too, up to WIDEST."""
        free = {k: f for k, f in self.formats.items() if f.free}
        more = {f"{k}_{n}bit": f.model_copy(update={"bits": n}) for k, f in free.items() for n in widths if n <= WIDEST}
        return self.model_copy(update={"formats": {**self.formats, **more}})

    @property
    def hash(self) -> str:
        """The SHA-256 of all that the platform file contains, and of the selected revision."""
        text = json.dumps([self.model_dump(mode="json", by_alias=True), self.arch_selected], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def allows(self, when: Gate, *, bits: int = 8, runtime: str | None = None) -> bool:
        """Return whether a gate is open for the selected revision ("T", ">=T" or "<T") and these activation bits."""
        arch = when.get("arch")
        if arch is not None and self.arch_selected is not None:
            have, need = self.arch.index(self.arch_selected), self.arch.index(arch.lstrip(">=<"))
            if not (have >= need if arch.startswith(">=") else have < need if arch.startswith("<") else have == need):
                return False
        if "bits" in when and when["bits"] != bits:
            return False
        return not ("runtime" in when and when["runtime"] != runtime)
