"""Platform x Graph -> slots: which format every tensor takes, what is tied, and what stays float and why.

No number is decided here: ranges come later, from data. A *unit* is a fused group or a lone node, one kernel on
the chip; only the tensors between units are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chipfit.decide.legality import Binding
from chipfit.decide.narrow import narrow
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph, Node
from chipfit.graph.ops import OPS
from chipfit.plan.record import NodePlan
from chipfit.platform.match import Resolved, resolve
from chipfit.platform.schema import Format, Option, Platform
from chipfit.ranges import Rule

#: out-channel axis of a weight by operator; everything else that has a weight keeps it on axis 0
OUT_AXIS = {"TransposeConv1D": 1, "TransposeConv2D": 1, "TransposeConv3D": 1, "MatMul": -1}
_NO_FORMAT = ("float", "none", "any", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One tensor that will be quantized, and in which format."""

    name: str
    role: str  #: "activation", "weight" or "bias"
    format_name: str
    format: Format
    axis: int | None  #: channel axis when the format is per channel
    node: str  #: node that makes (activation) or reads (weight, bias) it
    rule: Rule | None = None  #: range rule that the user wants for it
    z_threshold: float | None = None
    range: tuple[float, float] | None = None  #: known beforehand


@dataclass(slots=True)
class Assignment:
    """Every decision that needs no data."""

    slots: dict[str, Slot] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)  #: float tensors that were candidates -> reason
    nodes: dict[str, NodePlan] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    float_edges: set[tuple[str, str]] = field(default_factory=set)
    groups: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class _Unit:
    """A fused group or a lone node."""

    nodes: tuple[Node, ...]
    resolved: Resolved
    said: Mapping[str, Any]  #: what the user, or the platform about its first and last layer, decided

    @property
    def forced(self) -> str:
        """Why the user wants it in float."""
        return self.said.get("float", "")

    @property
    def who(self) -> str:
        return self.head.layer or self.head.name

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def tail(self) -> Node:
        return self.nodes[-1]


def facts(graph: Graph, node: Node) -> dict[str, Any]:
    """Everything that a platform's `where` may ask about a node: its attributes and what shapes imply."""
    out = {**node.attrs, "config": node.config, "layer_type": node.layer_type}
    data = node.inputs[0] if node.inputs else None
    if data is not None and data in graph.values:
        shape = graph.values[data].shape
        out["rank"] = len(shape)
        out["in_shape"] = shape
        out["static_shape"] = None not in shape[1:]
        if len(shape) > 1 and shape[1] is not None:
            out["channels"] = out["in_channels"] = shape[1]
    if node.outputs and node.output in graph.values:
        out["out_shape"] = graph.values[node.output].shape
    slots = OPS[node.op].slots if node.op in OPS else ()
    if "w" in slots and len(node.inputs) > slots.index("w"):
        w = node.inputs[slots.index("w")]
        out["const_weights"] = graph.is_weight(w)
        out["weights"] = "constant" if graph.is_weight(w) else "computed"
        if w is not None and "stride" in node.attrs:
            out["kernel"] = tuple(graph.shape(w)[2:])
            if len(out["kernel"]) > 1:
                out["filter_width"] = out["kernel"][-1]
    return out


def assign(
    graph: Graph,
    platform: Platform,
    groups: tuple[tuple[str, ...], ...] = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Assignment:
    """Choose a format for every tensor.

    Args:
        graph: after folding.
        platform: the target.
        groups: fused groups of node names, from `passes.fuse`.
        overrides: node name -> {"float": reason} or `overrides.CHOICES`.

    Raises:
        UnsupportedError: an operator that the platform rejects outright, or bits that no format offers.
    """
    units = _units(graph, platform, groups, overrides or {})
    _first_last(graph, platform, units)
    _narrow(graph, platform, units)
    result = Assignment(groups=groups)
    kept = {
        o for u in units if u.said.get("activation_bits") == "float" for o in u.tail.outputs
    }  # in float, whoever reads them
    formats = _Formats(kept)  # value -> format name
    wants = {v: f for v, f in _wants(graph, platform, units, kept).items() if v not in kept}

    coded: set[str] = set()  # values that exist on the chip as codes only, because their producer writes codes
    for name in graph.inputs:
        wanted = wants.get(name)
        if wanted == "any":  # readers take what the producer writes, and the model's input has none: the platform says
            wanted = next((f for f in platform.place.io_in if f not in _NO_FORMAT), None)
        if wanted and graph.is_float(name):
            formats[name] = wanted
            if platform.place.at != "inputs":
                coded.add(name)
    chosen: dict[str, Option | None] = {}
    moving: set[str] = set()  # movers that carry codes
    for unit in units:
        tail = unit.tail
        if _moves(unit):
            option, given = None, _carried(graph, unit, formats, coded, wants)
            if given:
                moving.add(tail.name)
                for i in _operands(graph, unit):  # a mover with several inputs needs all of them in codes
                    formats[i] = formats.get(i, given)
            produced = [(given or wants.get(o), o) for o in tail.outputs]
            if given:
                coded.update(tail.outputs)
        else:
            option = _choose(graph, platform, unit, formats, kept)
            if option is not None:
                for value, fmt in _data_formats(graph, unit, option).items():
                    if fmt not in _NO_FORMAT and value not in formats and graph.is_float(value):
                        formats[value] = fmt
            produced = _outputs(graph, unit, option, formats, wants)
            if option is not None and option.out not in _NO_FORMAT:
                coded.update(tail.outputs)
        chosen[tail.name] = option
        for fmt, value in produced:
            if fmt not in _NO_FORMAT and graph.is_float(value):
                formats[value] = fmt
    for unit in units:
        _record(graph, platform, unit, chosen[unit.tail.name], formats, result, moving, coded)
    return result


class _Formats(dict[str, str]):
    """Value -> format name; values that the user keeps in float never enter."""

    def __init__(self, kept: set[str]) -> None:
        super().__init__()
        self.kept = kept

    def __setitem__(self, value: str, name: str) -> None:
        if value not in self.kept:
            super().__setitem__(value, name)


def _carried(graph: Graph, unit: _Unit, formats: _Formats, coded: set[str], wants: Mapping[str, str]) -> str | None:
    """The format in which a mover carries codes; None when it moves floats."""
    data = [i for i in _operands(graph, unit) if graph.is_float(i)]
    if unit.forced or not set(data).isdisjoint(formats.kept):
        return None
    wanted = any(wants.get(o, "any") != "any" for o in unit.tail.outputs)
    given = [formats[i] for i in data if i in formats and (i in coded or wanted)]
    if not given or len(set(given)) > 1 or not graph.is_float(unit.tail.output):
        return None
    return given[0]


# ---------------------------------------------------------------- units and options


def _units(
    graph: Graph, platform: Platform, groups: tuple[tuple[str, ...], ...], overrides: Mapping[str, Mapping[str, Any]]
) -> list[_Unit]:
    grouped = {name: g for g in groups for name in g}
    units = []
    for node in graph.nodes:
        names = grouped.get(node.name, (node.name,))
        if node.name != names[-1]:
            continue  # a unit stands where its last node stands: all its inputs exist by then
        nodes = tuple(graph.node(n) for n in names)
        said = {k: v for n, choices in overrides.items() if n in names for k, v in choices.items()}
        bits = said["activation_bits"] if isinstance(said.get("activation_bits"), int) else 8
        resolved = resolve(platform, nodes[0].op, facts(graph, nodes[0]), bits=bits)
        if len(nodes) > 1 and resolved.options and resolved.options[0].in_ == "any":
            resolved = _with_tail(resolved, resolve(platform, nodes[-1].op, facts(graph, nodes[-1]), bits=bits))
        units.append(_Unit(nodes, resolved, said))
    return units


def _with_tail(head: Resolved, tail: Resolved) -> Resolved:
    """Where quantizers belong to the operators that write, a fused group writes what its last operator writes."""
    about_result = lambda r: r.fix == "out" or r.zero == "out" or "out" in (r.mono or {})  # noqa: E731 -- one line
    options: list[Option] = []
    for o in head.options:
        for out in [t.out for t in tail.options] or ["none"]:
            option = o.model_copy(update={"out": out})
            options += [option] * (option not in options)
    rules = [r for r in head.rules if not about_result(r)] + [r for r in tail.rules if about_result(r)]
    return replace(head, options=tuple(options), rules=tuple(rules))


def _first_last(graph: Graph, platform: Platform, units: list[_Unit]) -> None:
    """First and last weighted units take other bits where the platform says so."""
    rule = platform.place.first_last
    if not rule:
        return
    weighted = [i for i, u in enumerate(units) if u.resolved.options and u.resolved.options[0].w]
    for i in {weighted[0], weighted[-1]} if weighted else ():
        u = units[i]
        slots = [
            s
            for s, choice in (("w", "bits"), ("in_", "activation_bits"), ("out", "activation_bits"))
            if u.said.get(choice) is None
        ]
        options = [
            o.model_copy(update={s: _sibling(platform, getattr(o, s), rule["bits"]) for s in slots})
            for o in u.resolved.options
        ]
        units[i] = replace(u, resolved=replace(u.resolved, options=tuple(options)))


def _moves(unit: _Unit) -> bool:
    """The unit moves codes without arithmetic: it takes the format of what it reads."""
    return unit.resolved.exec == "follow"


def _choose(graph: Graph, platform: Platform, unit: _Unit, formats: Mapping[str, str], kept: set[str]) -> Option | None:
    """The first joint option that fits the formats of the unit's inputs; None when the unit runs in float."""
    if unit.forced or unit.resolved.exec == "float" or not unit.resolved.options or _unfit(graph, platform, unit, kept):
        return None
    options = [
        o
        for o in unit.resolved.options
        if o.in_ not in _NO_FORMAT or o.w not in _NO_FORMAT or (o.in_ == "any" and o.out not in _NO_FORMAT)
    ]
    options = _with_bits(platform, unit, options)
    for option in options:
        ok = True
        for value, fmt in _data_formats(graph, unit, option).items():
            have = formats.get(value)
            if (
                have is not None
                and fmt not in _NO_FORMAT
                and not _same_storage(platform.formats[have], platform.formats[fmt])
            ):
                ok = False
            if (
                have is not None
                and fmt == "any"
                and option.in_bits
                and platform.formats[have].bits > max(option.in_bits)
            ):
                ok = False
        if ok:
            return option
    return None


def _with_bits(platform: Platform, unit: _Unit, options: list[Option]) -> list[Option]:
    """Options with the weight and activation bits that the user asks for."""
    for asked, slots, what in (
        (unit.said.get("bits"), ("w",), "weights"),
        (unit.said.get("activation_bits"), ("in_", "out"), "activations"),
    ):
        if (
            asked == "float"
        ):  # only where quantizers belong to those who write: `_unfit` keeps the unit in float elsewhere
            without = {"w": "float", "b": "float"} if slots == ("w",) else {"out": "float"}
            options = [
                o.model_copy(update={s: f for s, f in without.items() if getattr(o, s) is not None}) for o in options
            ]
            continue
        if asked is None or not any(n not in _NO_FORMAT for o in options for s in slots for n in _tuple(getattr(o, s))):
            continue
        bits_of = lambda o: {  # noqa: E731 -- used at once
            platform.formats[n].bits
            for s in slots  # noqa: B023 -- used at once
            for n in _tuple(getattr(o, s))
            if n not in _NO_FORMAT
        }
        fitting = [o for o in options if bits_of(o) <= {asked}]
        if not fitting:
            have = sorted({b for o in options for b in bits_of(o)})
            raise UnsupportedError(
                f"'{unit.who}' cannot have {asked}-bit {what} on '{platform.name}'",
                got=asked,
                allowed=", ".join(map(str, have)) + " bits",
                hint="choose one of the allowed widths or leave the layer out of `overrides`",
            )
        options = fitting
    return options


def _tuple(name: Any) -> tuple[Any, ...]:
    return name if isinstance(name, tuple) else (name,)


def _narrow(graph: Graph, platform: Platform, units: list[_Unit]) -> None:
    """Drop the options whose result is wider than every reader can take, seen through operators that only move codes.

    Raises:
        UnsupportedError: no option is left.
    """
    limit: dict[str, tuple[int, str]] = {}  # value -> widest codes that its readers take [bit], and who says so
    for k in range(len(units) - 1, -1, -1):
        unit = units[k]
        outs = [limit[o] for o in unit.tail.outputs if o in limit]
        mine = min(outs) if outs else None
        options = unit.resolved.options
        if mine is not None and not _moves(unit):
            kept = tuple(o for o in options if o.out not in platform.formats or platform.formats[o.out].bits <= mine[0])
            if options and not kept:
                raise UnsupportedError(
                    f"'{unit.who}' writes codes that its reader '{mine[1]}' cannot take on '{platform.name}'",
                    got=sorted({platform.formats[o.out].bits for o in options if o.out in platform.formats}),
                    allowed=f"at most {mine[0]} bits",
                    hint="keep one of them in float with overrides",
                )
            units[k] = unit = replace(unit, resolved=replace(unit.resolved, options=kept))
        for i in _operands(graph, unit):
            if _moves(unit) and mine is not None:
                limit[i] = min(limit.get(i, mine), mine)
            elif not _moves(unit) and not unit.forced and any(o.in_bits for o in options):
                widest = max(max(o.in_bits) for o in options if o.in_bits), unit.who
                limit[i] = min(limit.get(i, widest), widest)


def _sibling(platform: Platform, name: Any, bits: int) -> Any:
    """The platform's format that differs from `name` in bits alone; `name` where there is none."""
    if not isinstance(name, str) or name in _NO_FORMAT:
        return name
    mine = platform.formats[name]
    for other_name, other in platform.formats.items():
        if other.bits == bits and (other.kind, other.zero, other.scale, other.per) == (
            mine.kind,
            mine.zero,
            mine.scale,
            mine.per,
        ):
            return other_name
    return name


def _same_storage(a: Format, b: Format) -> bool:
    """Codes of one format can be read as the other."""
    return (a.kind, a.bits, a.signed, a.zero, a.scale, a.per, a.range) == (
        b.kind,
        b.bits,
        b.signed,
        b.zero,
        b.scale,
        b.per,
        b.range,
    )


def _unfit(graph: Graph, platform: Platform, unit: _Unit, kept: set[str]) -> str:
    """Why this unit cannot run in integers although the platform has a rule for its operator."""
    head = unit.head
    if (
        platform.place.at != "outputs"
    ):  # an integer kernel takes and gives codes; elsewhere quantizers belong to those who write
        for choice, what in (("bits", "weights"), ("activation_bits", "result")):
            if unit.said.get(choice) == "float":
                return f"overrides keep its {what} in float"
        floats = [i for i in _operands(graph, unit) if i in kept]
        if floats:
            return f"overrides keep its input '{floats[0]}' in float"
    if head.outputs and not graph.is_float(head.output) and not _moves(unit):
        return "its result is not a float tensor"
    if head.op in OPS and "w" in OPS[head.op].slots:
        w = head.inputs[OPS[head.op].slots.index("w")]
        if not graph.is_weight(w):
            return "its weights are computed at run time"
    data = list(_operands(graph, unit))
    if not any(not graph.is_weight(i) for i in data):
        return "all its inputs are constant"
    if any(not graph.is_float(i) for i in data):
        return "an input is not a float tensor"
    return ""


def _operands(graph: Graph, unit: _Unit) -> list[str]:
    """Data operands of the unit from outside it: activations, and constants that stand in a data slot."""
    made = {o for n in unit.nodes for o in n.outputs}
    out: list[str] = []
    for n in unit.nodes:
        for slot, i in _slots(graph, n):
            if i not in made and slot.startswith("in"):
                out.append(i)
    return out


def _slots(graph: Graph, node: Node) -> list[tuple[str, str]]:
    """(slot, tensor) pairs of a node; "in0", "in1" ... for data, "w", "b" for weights."""
    names = OPS[node.op].slots if node.op in OPS else ()
    out: list[tuple[str, str]] = []
    for k, tensor in enumerate(node.inputs):
        if tensor is None:
            continue
        slot = names[min(k, len(names) - 1)].rstrip("?*") if names else f"in{k}"
        if slot == "ins":
            slot = f"in{k}"
        if node.op == "MatMul" and slot == "in1" and graph.is_weight(tensor):
            slot = "w"
        out.append((slot, tensor))
    return out


def _in_format(option: Option, slot: str) -> Any:
    """The option's format of one data slot; a list names one per slot, its last entry serving the rest."""
    if isinstance(option.in_, (list, tuple)):
        return option.in_[min(int(slot[2:] or 0), len(option.in_) - 1)]
    return option.in_


def _data_formats(graph: Graph, unit: _Unit, option: Option) -> dict[str, Any]:
    """Data operand -> format that the option wants for it."""
    made = {o for n in unit.nodes for o in n.outputs}
    out: dict[str, Any] = {}
    for n in unit.nodes:
        for slot, tensor in _slots(graph, n):
            if slot.startswith("in") and tensor not in made and tensor not in out:
                out[tensor] = _in_format(option, slot)
    return out


# ---------------------------------------------------------------- propagation


def _wants(graph: Graph, platform: Platform, units: list[_Unit], kept: set[str]) -> dict[str, str]:
    """Value -> the format in which its readers want it, seen through operators that only move codes."""
    wants: dict[str, str] = {}
    users = graph.users()
    for unit in reversed(units):
        if _moves(unit):
            if unit.forced:
                continue
            wanted = next((wants[o] for o in unit.tail.outputs if o in wants), None)
            for i in _operands(graph, unit):
                if wanted and (len(users.get(i, ())) == 1 or i in graph.inputs) and wants.get(i, "any") == "any":
                    wants[i] = wanted
            continue
        option = _choose(graph, platform, unit, {}, kept)
        if option is None:
            continue
        for value, fmt in _data_formats(graph, unit, option).items():
            known = wants.get(value, "any")  # a reader that takes anything gives way to one that does not
            if (fmt not in _NO_FORMAT or fmt == "any") and known == "any":
                wants[value] = fmt
    return wants


def _outputs(
    graph: Graph, unit: _Unit, option: Option | None, formats: dict[str, str], wants: Mapping[str, str]
) -> list[tuple[Any, str]]:
    """(format, value) for each value that the unit writes."""
    tail = unit.tail
    if option is None or option.out in _NO_FORMAT:
        return [(wants.get(o), o) for o in tail.outputs]
    if option.out == "same":
        first = next(iter(_data_formats(graph, unit, option)), None)
        return [(formats.get(first or ""), o) for o in tail.outputs]
    return [(option.out, o) for o in tail.outputs]


# ---------------------------------------------------------------- the record


def _record(
    graph: Graph,
    platform: Platform,
    unit: _Unit,
    option: Option | None,
    formats: _Formats,
    out: Assignment,
    moving: set[str],
    coded: set[str],
) -> None:
    head, tail = unit.head, unit.tail
    group = tail.name if len(unit.nodes) > 1 else ""
    why, how = "", unit.resolved.exec
    if _moves(unit):
        if tail.name not in moving:
            how, why = "float", unit.forced or "it moves values that are not quantized"
    elif option is None:
        how = "float"
        why = unit.forced or _unfit(graph, platform, unit, formats.kept) or unit.resolved.why
        if not why:
            listed = unit.resolved.rule is not None
            why = (
                f"no format of '{platform.name}' fits its inputs"
                if listed
                else f"'{platform.name}' lists no rule for {head.op}"
            )
    if how == "float" and platform.unlisted == "reject" and unit.resolved.rule is None and graph.is_float(tail.output):
        raise UnsupportedError(
            f"{head.op} '{head.who}' cannot run on '{platform.name}'",
            where=head.source,
            allowed="the operators that `chipfit platforms show` lists",
            hint="replace the operator, or choose a platform that runs unlisted ones in float",
        )
    for n in unit.nodes:
        out.nodes[n.name] = NodePlan(
            name=n.name,
            op=n.op,
            layer=n.layer,
            exec=how,
            group=group,
            why=why,
            simd=option.simd if option and n is head else None,
        )

    integer = how != "float"
    slots: dict[str, list[str]] = {}
    made = {o for n in unit.nodes for o in n.outputs}
    for n in unit.nodes:
        for slot, tensor in _slots(graph, n):
            if tensor in made:
                continue
            if slot.startswith("in"):
                if graph.is_float(tensor):
                    _data_slot(
                        graph,
                        platform,
                        n,
                        tensor,
                        slot,
                        integer,
                        option,
                        formats,
                        coded,
                        slots,
                        out,
                        inner=n is not head,
                    )
            elif slot in ("w", "b") and n is head:
                _weight_slot(graph, platform, unit, tensor, slot, integer, option, slots, out)
            elif graph.is_weight(tensor):
                out.float_edges.add((tensor, n.name))
    for o in tail.outputs:
        if o in formats:
            if o not in out.slots:
                name = formats[o]
                stored = narrow(
                    platform.formats[name], who=unit.who, method=unit.said.get("method"), signed=unit.said.get("signed")
                )
                out.slots[o] = Slot(
                    name=o,
                    role="activation",
                    format_name=name,
                    format=stored,
                    axis=None,
                    node=tail.name,
                    rule=unit.said.get("rule"),
                    z_threshold=unit.said.get("z_threshold"),
                    range=unit.said.get("range"),
                )
            if integer:
                slots.setdefault("outs", []).append(o)
                slots.setdefault("out", [o])
        elif o in graph.values and graph.is_float(o):
            out.floats[o] = (
                "overrides keep it in float" if o in formats.kept else why or "the platform keeps this result in float"
            )
    for name in graph.inputs:
        if name in formats and name not in out.slots:
            fmt = formats[name]
            out.slots[name] = Slot(
                name=name, role="activation", format_name=fmt, format=platform.formats[fmt], axis=None, node=""
            )
    if integer and slots:
        out.bindings.append(
            Binding(
                op=head.op,
                rules=unit.resolved.rules,
                slots={k: tuple(v) for k, v in slots.items()},
                attrs=dict(head.attrs),
            )
        )


def _data_slot(
    graph: Graph,
    platform: Platform,
    node: Node,
    tensor: str,
    slot: str,
    integer: bool,
    option: Option | None,
    formats: Mapping[str, str],
    coded: set[str],
    slots: dict[str, list[str]],
    out: Assignment,
    *,
    inner: bool,
) -> None:
    if graph.is_weight(tensor):  # a constant in a data slot is stored in the data's format
        if not integer:
            out.float_edges.add((tensor, node.name))
            return
        name = formats.get(tensor) or (_in_format(option, slot) if option else None)
        if name == "any" and option is not None:
            name = option.w
        if name in _NO_FORMAT:
            return
        if tensor not in out.slots:
            fmt = platform.formats[name]
            wide = [k for k, n in enumerate(graph.shape(tensor)) if n != 1]
            axis = wide[0] if fmt.per == "channel" and len(wide) == 1 else None
            out.slots[tensor] = Slot(
                name=tensor, role="weight", format_name=name, format=fmt, axis=axis, node=node.name
            )
    elif tensor not in formats:
        return
    elif not integer:
        if tensor not in coded:
            out.float_edges.add((tensor, node.name))
        return
    if not inner:
        slots.setdefault(slot, []).append(tensor)
    slots.setdefault("ins", []).append(tensor)


def _weight_slot(
    graph: Graph,
    platform: Platform,
    unit: _Unit,
    tensor: str,
    slot: str,
    integer: bool,
    option: Option | None,
    slots: dict[str, list[str]],
    out: Assignment,
) -> None:
    node, said = unit.head, unit.said if slot == "w" else {}
    name = (option.w if slot == "w" else option.b) if option is not None else None
    if not integer or name in _NO_FORMAT or name is None:
        if graph.is_weight(tensor) and graph.is_float(tensor):
            by = "overrides keep it" if said.get("bits") == "float" else "the platform stores it"
            out.floats.setdefault(tensor, f"{by} in float" if integer else "its operator runs in float")
            out.float_edges.add((tensor, node.name))
        return
    fmt = narrow(platform.formats[name], who=unit.who, method=said.get("weight_method"), per=said.get("per"))
    axis = None
    if fmt.per == "channel":
        axis = 0 if slot == "b" else OUT_AXIS.get(node.op, 0)
        axis %= len(graph.shape(tensor))
    if tensor not in out.slots:
        role = "weight" if slot == "w" else "bias"
        rule = said.get("weight_rule")
        out.slots[tensor] = Slot(
            name=tensor, role=role, format_name=name, format=fmt, axis=axis, node=node.name, rule=rule
        )
    slots.setdefault(slot, []).append(tensor)
