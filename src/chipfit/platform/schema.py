"""The Platform record: what a chip can do, as validated, frozen data. Schema version 0.

Everything that is left out of a file takes the default given here. Unknown keys are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from chipfit.platform.filters import Member
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.tables import FLOATS, float_table, log_table

#: words that stand where a format name may stand
NOT_A_FORMAT = frozenset({"float", "same", "none", "any"})
_ROUNDINGS = ("half_even", "half_away", "half_up", "floor", "trunc")
#: how accumulators become codes
REQUANT: dict[str, tuple[Any, ...]] = {
    "form": ("float", "q31", "q15", "shift", "fixed", "none"),
    "round": _ROUNDINGS,
    "passes": (1, 2),
}
RULE_HEADS = ("tie", "dtype", "fix", "mono", "zero", "wsum_max")
#: what may stand beside each head
_KEYS_OF: dict[str, tuple[str, ...]] = {
    "tie": (),
    "dtype": (),
    "wsum_max": (),
    "fix": ("scale", "zp"),
    "zero": ("eq",),
    "mono": ("eq", "min", "max", "lt", "times"),
}
SLOTS = frozenset({"in0", "in1", "in2", "ins", "w", "b", "out", "outs"})


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Format(_Record):
    """What one stored tensor may look like."""

    bits: int = Field(ge=1, le=64, strict=True, description="width of one code [bit]")
    kind: Literal["int", "lut", "log", "float", "bfp"] = "int"
    signed: bool | Literal["auto"] = Field(True, description="auto: decided per tensor from its data")
    range: Literal["full", "narrow"] | tuple[int, int] = Field(
        "full", description="codes in use; narrow drops the lowest"
    )
    scale: Literal["any", "pot"] = Field("any", description="pot: powers of two only")
    scale_min: float | None = Field(None, gt=0, description="least scale that the hardware represents")
    zero: int | Literal["any"] | tuple[int, ...] = Field(0, description="zero point: fixed, any, or one of a set")
    grid_offset: float = Field(0, alias="grid", description="code offset before scaling")
    per: Literal["tensor", "channel", "block", "row"] = Field("tensor", description="what shares one scale")
    axis: Literal["out", "in", "last"] | int = Field("out", description="role of the channel axis")
    block: int | tuple[int, ...] | None = None
    scale_bits: int | None = Field(None, description="width of an integer second-level scale")
    dynamic: bool = Field(False, description="range computed at run time")
    lut: dict[str, Any] | None = Field(None, description="value_bits, entries, per, group, dim")
    base: float | None = Field(None, description="base of a logarithmic grid")
    float_: str | None = Field(None, alias="float", description="fp32, fp16, bf16, e4m3, e5m2, e2m1 ...")

    @model_validator(mode="after")
    def _codes_exist(self) -> Format:
        low, high = -(1 << self.bits - 1) if self.signed else 0, (1 << self.bits - (self.signed is True)) - 1
        if self.bits == 1:  # binary: the codes stand for -1 and +1
            low, high = -1, 1
        if self.range == "narrow" and self.signed is False:
            raise ValueError(
                "range narrow drops the lowest negative code, and unsigned codes have none: use full or [low, high]"
            )
        if isinstance(self.range, tuple):
            if not low <= self.range[0] < self.range[1] <= high:
                raise ValueError(
                    f"range {list(self.range)} must be ascending and inside the {self.bits}-bit codes {low}..{high}"
                )
            low, high = self.range
        for z in (self.zero,) if isinstance(self.zero, int) else self.zero if isinstance(self.zero, tuple) else ():
            if not low <= z <= high:
                raise ValueError(f"zero point {z} is outside the codes {low}..{high}")
        return self

    @property
    def is_float(self) -> bool:
        """Stored as it is computed: 16 or 32 bits of floating point."""
        return self.kind == "float" and self.bits >= 16

    @property
    def gap(self) -> str:
        """What of this format chipfit cannot decide yet; "" when it can."""
        if self.kind == "bfp" or self.per in ("block", "row"):
            return f"scales per {self.per}"
        if self.kind == "lut" and self.lut and ("group" in self.lut or "dim" in self.lut):
            return "look-up tables per group of channels, or of vectors"
        if self.kind == "float" and not self.is_float and self.float_ not in FLOATS:
            return f"the float type {self.float_}"
        return ""

    def grid(self, signed: bool | None = None) -> Grid:
        """The grid of codes once signedness is known.

        Raises:
            ValueError: `signed` is "auto" in the file and not given here.
        """
        s = self.signed if self.signed != "auto" else signed
        if s is None:
            raise ValueError("the format's signedness is decided per tensor: pass signed=")
        common: dict[str, Any] = {
            "bits": self.bits,
            "per": self.per,
            "kind": self.kind,
            "pot": self.scale == "pot",
            "scale_min": self.scale_min,
        }
        if self.kind == "float":
            table = float_table(self.float_ or "")
            return Grid(qmin=int(table[0]), qmax=int(table[-1]), table=table, **common)
        if self.kind == "log":
            return Grid(qmin=-1, qmax=1, table=log_table(self.base or 2.0, self.bits), **common)
        if self.kind == "lut":
            width = int((self.lut or {}).get("value_bits", 8))
            lo, hi = (-(1 << width - 1), (1 << width - 1) - 1) if s else (0, (1 << width) - 1)
            return Grid(qmin=lo, qmax=hi, entries=int((self.lut or {}).get("entries", 1 << self.bits)), **common)
        if isinstance(self.range, tuple):
            lo, hi = self.range
        elif s:
            lo, hi = -(1 << self.bits - 1) + (self.range == "narrow"), (1 << self.bits - 1) - 1
        else:
            lo, hi = 0, (1 << self.bits) - 1
        return Grid(qmin=lo, qmax=hi, zero=self.zero, **common)

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
        words += (
            ["PoT"] * (self.scale == "pot") + [f"/{self.per}"] * (self.per != "tensor") + ["dynamic"] * self.dynamic
        )
        return " ".join(words)


class Option(_Record):
    """One joint combination of formats that a kernel accepts."""

    in_: str | tuple[str, ...] | None = Field(
        None, alias="in", description="format of the data inputs, or one per slot; any: whatever the producer writes"
    )
    in_bits: tuple[int, ...] | None = Field(None, description="with in any: widths that the kernel reads")
    w: str | None = Field(
        None, description="format of the weights; with in any, also of constants among the data inputs"
    )
    b: str | None = None
    out: str | None = None
    simd: int | None = Field(None, description="SIMD width, a cost hint")
    when: dict[str, Any] = Field(default_factory=dict)


class Rule(_Record):
    """One constraint across the tensors of an operator; exactly one of the heads is given."""

    tie: tuple[str, ...] | None = Field(None, description="slots with equal scale and zero point")
    dtype: tuple[str, ...] | None = Field(None, description="slots with equal storage type")
    fix: str | None = Field(None, description="slot with the given scale and zp")
    mono: dict[str, int] | None = Field(None, description="product of scale^exponent with eq, min, max or lt")
    zero: str | None = Field(None, description="slot whose zero point is eq, or one of a list")
    wsum_max: float | None = Field(None, description="bound on sum |w_q| per output channel")
    scale: float | None = None
    zp: int | None = None
    eq: Any = None
    min: float | None = None
    max: float | None = None
    lt: float | None = None
    times: str | None = Field(None, description="attribute that multiplies the product")
    hard: bool = Field(True, description="false: preferred by the tool, not required by the kernel")
    note: str = ""

    @model_validator(mode="after")
    def _one_head(self) -> Rule:
        heads = [h for h in RULE_HEADS if getattr(self, h) is not None]
        if len(heads) != 1:
            raise ValueError(
                f"a rule has exactly one of {', '.join(RULE_HEADS)}; this one has {', '.join(heads) or 'none'}"
            )
        named = [*(self.tie or ()), *(self.dtype or ()), *(self.mono or ()), *filter(None, (self.fix, self.zero))]
        for s in named:
            if s not in SLOTS:
                raise ValueError(f"slot '{s}' is unknown; slots are {', '.join(sorted(SLOTS))}")
        for key in ("scale", "zp", "eq", "min", "max", "lt", "times"):
            if getattr(self, key) is not None and key not in _KEYS_OF[heads[0]]:
                own = ", ".join(_KEYS_OF[heads[0]]) or "no other number"
                raise ValueError(f"'{key}' has no meaning in a {heads[0]} rule, which takes {own}")
        if self.tie is not None and len(self.tie) == 1 and self.tie[0] not in ("ins", "outs"):
            raise ValueError(f"a tie needs two slots, or ins or outs; this one has {self.tie[0]} alone")
        if self.fix and (self.scale is None or self.scale <= 0 or self.zp is None):
            raise ValueError(f"fix needs a scale above 0 and zp; this one has scale {self.scale}, zp {self.zp}")
        if self.zero is not None and not (isinstance(self.eq, int) or (isinstance(self.eq, list) and self.eq)):
            raise ValueError(f"zero needs eq, an integer or a list of integers; this one has {self.eq!r}")
        if self.mono is not None:
            bounds = [k for k in ("eq", "min", "max", "lt") if getattr(self, k) is not None]
            if not bounds:
                raise ValueError("mono needs one of eq, min, max, lt")
            if "eq" in bounds and len(bounds) > 1:
                raise ValueError("mono has eq and a bound: the bound is redundant or contradicts eq")
            tops = [getattr(self, k) for k in ("eq", "max", "lt") if k in bounds]
            if any(not isinstance(t, (int, float)) or t <= 0 for t in tops):
                raise ValueError(
                    f"mono can never hold: scales are positive, and their product is to be {tops[0]!r} or less"
                )
            if self.min is not None and tops and self.min > min(tops):
                raise ValueError(f"mono can never hold: min {self.min} is above its upper bound {min(tops)}")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and greatest product of a mono rule."""
        if self.eq is not None:
            return float(self.eq), float(self.eq)
        return self.min if self.min is not None else -math.inf, min(
            [b for b in (self.max, self.lt) if b is not None], default=math.inf
        )

    @property
    def head(self) -> str:
        return next(h for h in RULE_HEADS if getattr(self, h) is not None)


class OpRule(_Record):
    """What the chip says about some operators. The first rule that matches an operator wins."""

    match: tuple[str, ...] = Field(min_length=1, description="canonical operators, @groups, @sets of this file, or *")
    where: dict[str, Any] = Field(
        default_factory=dict, description="predicates on attributes: eq, in, min, max, multiple"
    )
    when: dict[str, Any] = Field(default_factory=dict, description="architecture or bits gate")
    use: tuple[Option, ...] = Field((), description="joint choices, the first is the base one")
    rules: tuple[Rule, ...] = ()
    exec: Literal["int", "float", "table", "follow"] | None = None
    src: tuple[str, ...] = Field(min_length=1, description="source ids")
    conf: Literal["V", "D", "I"] = Field(description="V verified in source, D documented, I inferred")
    note: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> OpRule:
        fixed: dict[str, tuple[float | None, int | None]] = {}
        for r in self.rules:
            if r.fix and r.hard and fixed.setdefault(r.fix, (r.scale, r.zp)) != (r.scale, r.zp):
                raise ValueError(f"slot '{r.fix}' is fixed to two different scales")
        span: dict[tuple[Any, ...], tuple[float, float]] = {}
        for r in self.rules:
            if r.mono is not None and r.hard:
                key = (*sorted(r.mono.items()), r.times)
                low, high = span.get(key, (-math.inf, math.inf))
                span[key] = low, high = max(low, r.bounds[0]), min(high, r.bounds[1])
                if low > high:
                    raise ValueError(
                        f"two rules for the product {r.mono} can never hold together: at least {low:g} and at most {high:g}"
                    )
        if self.exec in ("int", "table") and not self.use:
            raise ValueError(f"exec {self.exec} needs use: the formats that the kernel takes")
        return self

    @property
    def how(self) -> str:
        return self.exec or "int"


class Fuse(_Record):
    """Operators that run as one kernel."""

    chain: tuple[tuple[str, ...], ...] | None = Field(None, description="alternatives per position")
    graph: dict[str, Any] | None = Field(None, description="branched pattern: nodes, edges, free_input")
    inner: str = Field("none", description="format between the parts")
    when: dict[str, Any] = Field(default_factory=dict)
    note: str = ""
    src: tuple[str, ...] = Field(min_length=1)
    conf: Literal["V", "D", "I"]

    @model_validator(mode="after")
    def _one_pattern(self) -> Fuse:
        if (self.chain is None) == (self.graph is None):
            raise ValueError("a fusion has exactly one of chain, graph")
        if self.chain is not None and len(self.chain) < 2:
            raise ValueError("a fusion needs at least two operators")
        if self.graph is not None:
            nodes, edges = self.graph.get("nodes"), self.graph.get("edges")
            if (
                not isinstance(nodes, dict)
                or not isinstance(edges, list)
                or set(self.graph) - {"nodes", "edges", "free_input"}
            ):
                raise ValueError(
                    "graph has nodes, a table name: operator, edges, a list of [from, to], and perhaps free_input"
                )
            if any(
                not isinstance(e, list) or len(e) != 2 or {str(n).partition(".")[0] for n in e} - set(nodes)
                for e in edges
            ):
                raise ValueError(f"every edge is a pair of the nodes {', '.join(nodes)}")
            if not set(nodes) - {str(b).partition(".")[0] for _, b in edges}:
                raise ValueError("the edges form a cycle: one node must be the first")
        return self

    @property
    def steps(self) -> tuple[tuple[str, ...], ...]:
        """Alternatives per position; a graph becomes the chain along its edges, its free input may come from anywhere."""
        if self.chain is not None:
            return self.chain
        assert self.graph is not None  # the validator demands one of the two
        nodes = {k: (v,) if isinstance(v, str) else tuple(v) for k, v in self.graph["nodes"].items()}
        follows = {a: b.partition(".")[0] for a, b in self.graph["edges"]}
        at = next(n for n in nodes if n not in follows.values())
        steps = [nodes[at]]
        while at in follows:
            at = follows.pop(at)
            steps.append(nodes[at])
        return tuple(steps)


class Placement(_Record):
    """Where quantizers stand."""

    at: Literal["inputs", "outputs", "both"] = "outputs"
    io_in: tuple[str, ...] = ()
    io_out: tuple[str, ...] = ()
    first_last: dict[str, Any] | None = Field(None, description="bits (and slots) of the first and last weighted layer")
    note: str = ""

    @field_validator("first_last")
    @classmethod
    def _first_last_is_known(cls, v: dict[str, Any] | None) -> dict[str, Any] | None:
        if v is not None and ("bits" not in v or set(v) - {"bits", "slots"}):
            raise ValueError(f"first_last has bits, and perhaps slots; this one has {', '.join(v) or 'nothing'}")
        return v


class Math(_Record):
    """The chip's arithmetic. Without it exactness is not claimed."""

    q_round: Literal["half_even", "half_away", "half_up", "floor", "trunc"] | None = None
    w_round: str | None = None
    kernels: str | None = Field(
        None, description="family of kernels that the simulator mirrors, by its name in chipfit.simulate"
    )
    requant: dict[str, Any] | None = Field(
        None, description="form: float, q31, q15, shift, fixed or none; round; passes"
    )
    acc: tuple[dict[str, Any], ...] = Field((), description="accumulators, innermost first: bits, terms, sat")
    act_table: dict[str, Any] | None = None
    note: str = ""

    @field_validator("requant")
    @classmethod
    def _requant_is_known(cls, v: dict[str, Any] | None) -> dict[str, Any] | None:
        for key, got in (v or {}).items():
            if key not in REQUANT:
                raise ValueError(f"'{key}' is unknown; requant takes {', '.join(REQUANT)}")
            if got not in REQUANT[key]:
                raise ValueError(f"{key} '{got}' is unknown; it is one of {', '.join(map(str, REQUANT[key]))}")
        return v

    @field_validator("acc")
    @classmethod
    def _accumulators_are_known(cls, v: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for a in v:
            if "bits" not in a or set(a) - {"bits", "terms", "sat"}:
                raise ValueError(f"an accumulator has bits, and perhaps terms and sat; this one has {', '.join(a)}")
        return v


class Platform(_Record):
    """One chip, or one runtime on a chip."""

    name: str
    schema_: int = Field(0, alias="schema")
    title: str = ""
    extends: str | None = None
    arch: tuple[str, ...] = Field((), description="revision tags, oldest first")
    formats: dict[str, Format] = Field(default_factory=dict)
    sets: dict[str, tuple[Member, ...]] = Field(
        default_factory=dict, description="operator sets that rules and fusions name as @set"
    )
    ops: tuple[OpRule, ...] = ()
    unlisted: Literal["float", "follow", "reject", "cpu"] = "float"
    fuse: tuple[Fuse, ...] = ()
    place: Placement = Field(default_factory=Placement)
    math: Math = Field(default_factory=Math)
    deploy: tuple[str, ...] = Field((), description="artefacts, most native first")
    runtimes: tuple[str, ...] = Field(
        (), description="runtimes that are verified to compute this platform's integers, its own first"
    )
    encodings: str = Field("generic", description="dialect of the JSON encodings that its tools read")
    metadata: bool = Field(False, description="exported files name the platform and chipfit's version")
    sources: dict[str, str] = Field(default_factory=dict, description="id -> where the facts come from")
    gaps: tuple[str, ...] = Field((), description="what is not known")
    arch_selected: str | None = Field(None, exclude=True)
    file: str = Field("", exclude=True)

    @field_validator("schema_")
    @classmethod
    def _known_schema(cls, v: int) -> int:
        if v != 0:
            raise ValueError(f"schema version {v} is not known; this chipfit reads version 0")
        return v

    @property
    def hash(self) -> str:
        """SHA-256 of everything that the platform says, the selected revision included."""
        text = json.dumps([self.model_dump(mode="json", by_alias=True), self.arch_selected], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def allows(self, when: dict[str, Any], *, bits: int = 8, runtime: str | None = None) -> bool:
        """Whether a gate `when` is open for the selected revision and activation bits. arch: "T", ">=T" or "<T"."""
        arch = when.get("arch")
        if arch is not None and self.arch_selected is not None:
            have, need = self.arch.index(self.arch_selected), self.arch.index(arch.lstrip(">=<"))
            if not (have >= need if arch.startswith(">=") else have < need if arch.startswith("<") else have == need):
                return False
        if "bits" in when and when["bits"] != bits:
            return False
        return not ("runtime" in when and when["runtime"] != runtime)
