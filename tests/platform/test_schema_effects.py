"""Every setting of the schema has an effect: platforms that differ in it alone give different plans, integers or files.

The walk goes through the schema itself: a new field, a new value of a field or a new key of a table fails until it is
in one of the tables below.
"""

import copy
import functools
import json
import tempfile
import typing
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import yaml
from pydantic import BaseModel
from torch import nn
from typing_extensions import is_typeddict

from chipfit.errors import ChipfitError
from chipfit.frameworks import capture
from chipfit.graph.ir import Graph
from chipfit.plan.json_codec import plan_to_json
from chipfit.platform import schema
from chipfit.platform.filters import AttributeFilter, Member
from chipfit.platform.load import load
from chipfit.platform.support import unsupported_features
from chipfit.simulate.integer import simulate
from chipfit.verify import default_runtime
from tests.build import model_of, platform_of, quantized

# ---------------------------------------------------------------- what exists: the schema, walked


def walked() -> set[str]:
    """Every field as "Format.bits", every word among its values as "Format.kind=log"."""
    out: set[str] = set()
    todo: list[Any] = [schema.Platform, Member, AttributeFilter]
    seen: set[Any] = set()
    while todo:
        record = todo.pop()
        if record in seen:
            continue
        seen.add(record)
        typed_dict = is_typeddict(record)
        fields = {} if typed_dict else {k: f for k, f in record.model_fields.items() if not f.exclude}
        types = typing.get_type_hints(record) if typed_dict else {f.alias or k: f.annotation for k, f in fields.items()}
        for key, annotation in types.items():
            word = f"{record.__name__}.{key}"
            out.add(word)
            for part in _parts(annotation):
                if isinstance(part, type) and (is_typeddict(part) or issubclass(part, BaseModel)):
                    todo.append(part)
                elif typing.get_origin(part) is Literal:
                    out |= {f"{word}={v}" for v in typing.get_args(part)}
    return out


def _parts(annotation: Any) -> list[Any]:
    """The annotation and everything inside it."""
    inside = () if typing.get_origin(annotation) is Literal else typing.get_args(annotation)
    return [annotation, *(p for a in inside for p in _parts(a))]


# ---------------------------------------------------------------- what each does

#: fields that say where facts come from, for people
FOR_PEOPLE = {
    "Platform.title", "Platform.sources", "Platform.gaps", "OpRule.src", "OpRule.conf", "OpRule.note", "Rule.note",
    "Fuse.note", "Fuse.src", "Fuse.conf", "Placement.note", "Math.note", "Platform.name", "Platform.schema",
    "OpRule.conf=V", "OpRule.conf=D", "OpRule.conf=I", "Fuse.conf=V", "Fuse.conf=D", "Fuse.conf=I",
}  # fmt: skip


#: a chip for the network below
BASE = Path(__file__).with_name("schema_effects.yaml").read_text()


def chip(change: Any = None) -> schema.Platform:
    """The chip, changed: by a table merged into it, or by a function."""
    data = yaml.safe_load(BASE)
    if callable(change):
        change(data)
    for top, value in (change or {}).items() if not callable(change) else ():
        data[top] = {**data[top], **value} if isinstance(value, dict) and isinstance(data.get(top), dict) else value
    data["fuse"] = [{"src": ["M"], "conf": "V", **f} for f in data["fuse"]]
    return load(platform_of(*data.pop("ops"), **data))


def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(m.a(x))
    z = m.b(y)
    y = torch.cat([y + z, y, z], 1)
    read_by_a_float_operator = torch.erf(x).mean((1, 2, 3)).unsqueeze(1)
    y = nn.functional.max_pool2d(y, 2).flatten(1)[:, :64]
    return torch.sigmoid(m.c(y)) + read_by_a_float_operator


def network() -> nn.Module:
    """A network whose weights, like the data, are multiples of half a step of POT's scales: many of them are ties."""
    torch.manual_seed(0)
    net = model_of(forward, a=nn.Conv2d(2, 4, 3), b=nn.Conv2d(4, 4, 1, groups=2), c=nn.Linear(64, 3))
    for p in net.parameters():
        p.data = (p.data * 1024).round() / 1024
    return net


DATA = (torch.randn(8, 2, 10, 10, generator=torch.Generator().manual_seed(1)) * 64).round() / 32
NET = network()


@functools.cache
def captured() -> Graph:
    return capture(NET, (DATA,), {})


@functools.cache
def outcome(key: str) -> dict[str, str]:
    """Everything that a platform leads to: plan, simulated floats and integers, encodings; or the refusal."""
    platform, out = PLATFORMS[key], dict[str, str]()
    try:
        with mock.patch("chipfit.reading.capture", return_value=captured().copy()):  # takes most of the time
            result = quantized(NET, DATA, platform, rule="no_clipping")
    except ChipfitError as e:
        return {"refused": str(e)}
    plan, numbers = plan_to_json(result.plan)
    plan.pop("provenance", None)
    out["plan"] = json.dumps(plan, sort_keys=True) + repr(sorted((k, v.tolist()) for k, v in numbers.items()))
    carried = default_runtime(platform), result.plan.provenance.get("platform")
    with tempfile.TemporaryDirectory() as folder:
        out["file"] = repr(carried) + result.export(Path(folder) / "x.json").read_text()
    out["report"] = str((result.report.padded_bytes, result.report.deploy))
    with torch.no_grad():
        out["floats"] = repr(result.model(DATA).tolist())
    try:
        integers = simulate(result.graph, result.plan, [DATA], platform)
        out["integers"] = repr({k: v.tolist() for k, v in integers.items()})
    except ChipfitError as e:
        out["integers"] = str(e)
    return out


#: by hash
PLATFORMS: dict[str, schema.Platform] = {}


def ops(index: int, **changes: Any) -> Any:
    """The chip with one operator rule changed."""
    return lambda d: d["ops"][index].update(changes)


def use(index: int = 0, **changes: Any) -> Any:
    return lambda d: d["ops"][index]["use"][0].update(changes)


def fmt(name: str, **changes: Any) -> Any:
    return lambda d: d["formats"].update({name: {**d["formats"].get(name, {"bits": 8}), **changes}})


def lut(**table: Any) -> Any:
    return fmt("w8", kind="lut", range="full", lut=table or None)


def fuse(**changes: Any) -> Any:
    return lambda d: d["fuse"][0].update(changes)


def chain(*edges: list[str], **more: Any) -> Any:
    """A fusion by edges between nodes of the operators that name them."""
    nodes = {n: n for e in edges for n in (e[0], e[1].partition(".")[0])}
    return {"fuse": [{"graph": {"nodes": nodes, "edges": [*edges], **more}}]}


def math(**keys: Any) -> Any:
    return {"math": keys}


def requant(form: str = "q31", **keys: Any) -> Any:
    return math(requant={"form": form, **keys})


def place(**keys: Any) -> Any:
    return {"place": keys}


def both(*changes: Any) -> Any:
    def apply(d: dict[str, Any]) -> None:
        for c in changes:
            c(d) if callable(c) else d.update(copy.deepcopy(c))

    return apply


def before(**rule: Any) -> Any:
    return lambda d: d["ops"].insert(0, rule)


def blocks(size: int, **more: Any) -> Any:
    """The linear layer's weights with a scale for each block of so many numbers."""
    linear = before(match=["Linear"], use=[{"in": "a8", "w": "wb", "out": "a8"}])
    return both(fmt("wb", per="block", axis="in", block=size, **more), linear)


def dynamic(**changes: Any) -> Any:
    """A linear layer whose kernel quantizes its input at run time."""
    linear = before(match=["Linear"], use=[{"in": "d8", "w": "w8", "b": "float", "out": "float"}])
    return both(fmt("d8", **{"dynamic": True, "zero": "any", **changes}), linear)


def rules(index: int, *given: dict[str, Any]) -> Any:
    return ops(index, rules=list(given))


def in_set(**member: Any) -> Any:
    """The chip that computes the members of a set in float."""
    return both(before(match=["@s"], exec="float"), lambda d: d.update(sets={"s": [member]}))


def beside(**member: Any) -> Any:
    """As `in_set`, where another set holds the convolutions too, and computes them in integers."""

    def apply(d: dict[str, Any]) -> None:
        in_set(**member)(d)
        d["sets"]["t"] = [{"op": ["Conv2D"]}]
        d["ops"].insert(1, {"match": ["@t"], "use": d["ops"][1]["use"]})

    return apply


def where(**condition: Any) -> Any:
    return in_set(op=["Conv2D"], where=condition)


#: test of a filter on the attributes of Conv2d(groups=1) and Conv2d(groups=2) -> of one chip, of another
FILTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eq": ({"attr": "groups", "value": 3}, {"attr": "groups", "value": 2, "test": "eq"}),
    "ne": ({"attr": "groups", "value": 2}, {"attr": "groups", "value": 2, "test": "ne"}),
    "gt": ({"attr": "groups", "value": 1, "test": "ge"}, {"attr": "groups", "value": 1, "test": "gt"}),
    "ge": ({"attr": "groups", "value": 2, "test": "gt"}, {"attr": "groups", "value": 2, "test": "ge"}),
    "lt": ({"attr": "groups", "value": 2, "test": "le"}, {"attr": "groups", "value": 2, "test": "lt"}),
    "le": ({"attr": "groups", "value": 1, "test": "lt"}, {"attr": "groups", "value": 1, "test": "le"}),
    "contains": ({"attr": "kernel_size", "value": [1, 1]}, {"attr": "kernel_size", "value": 3, "test": "contains"}),
    "is": ({"attr": "nowhere", "value": None}, {"attr": "nowhere", "value": None, "test": "is"}),
}
HALVES = [{"attr": "groups", "value": 2}, {"attr": "kernel_size", "value": 3}]

CODES = {"kind": "float", "float": "e4m3"}
FULL = fmt("w8", range="full")
FIX = {"fix": "out", "scale": 0.25, "zp": 3}
TIE = {"tie": ["ins", "out"]}
U8 = both(fmt("u8", signed=False, zero="any"), use(1, out="u8"))
FEW = both(fmt("w6", bits=6, per="channel"), fmt("w4", per="channel"))
STRICT = {"mono": {"in0": 1, "w": 1, "out": -1}, "max": 1e-4}
PRODUCT = {"in0": 1, "w": 1, "out": -1}

#: word -> two chips (None: the base one) that lead to different outcomes, and in what
EFFECTS: dict[str, tuple[Any, Any, str]] = {
    # formats
    "Format.bits": (None, fmt("w8", bits=6), "plan"),
    "Format.kind=int": (lut(), FULL, "plan"),
    "Format.kind=lut": (FULL, lut(), "plan"),
    "Format.kind=log": (FULL, fmt("w8", kind="log", range="full"), "plan"),
    "Format.kind=float": (FULL, fmt("w8", range="full", **CODES), "plan"),
    "Format.float": (fmt("w8", range="full", **CODES), fmt("w8", range="full", kind="float", float="e5m2"), "plan"),
    "Format.signed=auto": (fmt("a8", signed=False), fmt("a8", signed="auto"), "plan"),
    "Format.range=full": (None, FULL, "plan"),
    "Format.range=narrow": (FULL, None, "plan"),
    "Format.scale=any": (fmt("w8", scale="pot"), None, "plan"),
    "Format.scale=pot": (None, fmt("w8", scale="pot"), "plan"),
    "Format.scale=s16": (None, fmt("a8", scale="s16"), "plan"),
    "Format.scale=bf16": (blocks(16), blocks(16, scale="bf16"), "plan"),
    "Format.scale_min": (None, fmt("a8", scale_min=0.5), "plan"),
    "Format.scale_max": (None, fmt("a8", scale_max=0.001), "plan"),
    "Format.pair_limit": (None, fmt("w8", pair_limit=100), "plan"),
    "Format.zero=any": (fmt("a8", zero=0), None, "plan"),
    "Format.grid": (None, fmt("w8", grid=0.5), "plan"),
    "Format.per=tensor": (None, fmt("w8", per="tensor"), "plan"),
    "Format.per=channel": (fmt("w8", per="tensor"), None, "plan"),
    "Format.axis=out": (fmt("w8", axis="in"), None, "plan"),
    "Format.axis=in": (fmt("w8", per="block", block=16), blocks(16), "plan"),
    "Format.axis=last": (dynamic(per="block", block=16), dynamic(per="block", block=16, axis="last"), "plan"),
    "Format.per=block": (None, blocks(16), "plan"),
    "Format.block": (blocks(16), blocks(32), "plan"),
    "Format.dynamic": (dynamic(dynamic=False), dynamic(), "plan"),
    "Format.per=row": (dynamic(), dynamic(per="row"), "floats integers"),
    "Format.lut": (lut(), lut(entries=4), "plan"),
    "Format.base": (fmt("w8", kind="log", range="full"), fmt("w8", kind="log", range="full", base=1.5), "plan"),
    "Table.entries": (lut(entries=8), lut(entries=4), "plan"),
    "Table.value_bits": (lut(entries=8), lut(entries=8, value_bits=4), "plan"),
    "Table.per=tensor": (lut(per="channel"), lut(per="tensor"), "plan"),
    # choices
    "Option.in": (None, use(1, **{"in": "a4"}), "plan"),
    "Option.in_bits": (use(1, **{"in": "any"}), both(use(1, **{"in": "any", "in_bits": [4]})), "refused"),
    "Option.w": (None, use(w="w4"), "plan"),
    "Option.b": (None, use(b="float"), "plan"),
    "Option.out": (None, use(1, out="a4"), "plan"),
    "Option.simd": (None, use(simd=64), "report"),
    "Option.when": (None, use(when={"arch": "A"}), "plan"),
    "Gate.arch": (use(when={"arch": "B"}), use(when={"arch": "<B"}), "plan"),
    "Gate.bits": (None, ops(1, when={"bits": 16}), "plan"),
    "Gate.phase=qat": (None, fuse(when={"phase": "qat"}), "plan"),
    "Gate.phase=ptq": (fuse(when={"phase": "qat"}), fuse(when={"phase": "ptq"}), "plan"),
    # rules
    "OpRule.match": (None, ops(1, match=["Sub"]), "plan"),
    "OpRule.where": (None, ops(0, where={"kernel": {"max": 2}}), "plan"),
    "OpRule.when": (None, ops(1, when={"arch": "A"}), "plan"),
    "OpRule.use": (None, ops(1, use=[{"in": "a4", "out": "a4"}]), "plan"),
    "OpRule.rules": (None, rules(1, TIE), "plan"),
    "OpRule.cpu": (None, ops(1, cpu=True), "plan"),
    "OpRule.exec=int": (ops(1, exec="float"), ops(1, exec="int"), "plan"),
    "OpRule.exec=float": (None, ops(1, exec="float"), "plan"),
    "OpRule.exec=table": (None, ops(1, exec="table"), "plan"),
    "OpRule.exec=follow": (None, ops(1, exec="follow"), "plan"),
    "Rule.tie": (None, rules(1, TIE), "plan"),
    "Rule.dtype": (U8, both(U8, rules(1, {"dtype": ["in0", "out"]})), "refused"),
    "Rule.fix": (None, rules(1, FIX), "plan"),
    "Rule.scale": (rules(1, FIX), rules(1, {**FIX, "scale": 0.5}), "plan"),
    "Rule.zp": (rules(1, FIX), rules(1, {**FIX, "zp": 4}), "plan"),
    "Rule.mono": (None, rules(0, STRICT), "plan"),
    "Rule.max": (rules(0, STRICT), rules(0, {**STRICT, "max": 1e-3}), "plan"),
    "Rule.min": (None, rules(0, {"mono": PRODUCT, "min": 0.5}), "plan"),
    "Rule.lt": (None, rules(0, {"mono": PRODUCT, "lt": 1e-4}), "plan"),
    "Rule.times": (rules(0, STRICT), rules(0, {**STRICT, "times": "groups"}), "plan"),
    "Rule.zero": (None, rules(1, {"zero": "out", "eq": 7}), "plan"),
    "Rule.eq": (rules(1, {"zero": "out", "eq": 8}), rules(1, {"zero": "out", "eq": 7}), "plan"),
    "Rule.wsum_max": (None, rules(0, {"wsum_max": 100}), "plan"),
    "Rule.hard": (rules(1, TIE), rules(1, {**TIE, "hard": False}), "plan"),
    # fusions
    "Fuse.chain": (None, fuse(chain=[["Conv2D"], ["Add"]]), "plan"),
    "Fuse.graph": ({"fuse": []}, chain(["Conv2D", "Relu"]), "plan"),
    "Fuse.when": (None, fuse(when={"arch": "A"}), "plan"),
    "Branches.nodes": (chain(["Conv2D", "Relu"]), chain(["Conv2D", "Add"]), "plan"),
    "Branches.edges": (chain(["Conv2D", "Relu"]), chain(["Relu", "Conv2D"]), "plan"),
    "Platform.float_unit": (ops(1, exec="float"), both(ops(1, exec="float"), {"float_unit": False}), "refused"),
    # placement
    "Placement.at=inputs": (None, place(at="inputs"), "plan"),
    "Placement.at=outputs": (place(at="inputs"), None, "plan"),
    "Placement.at=both": (place(at="inputs"), place(at="both"), "plan"),
    "Placement.io_in": (both(use(**{"in": "any"})), both(use(**{"in": "any"}), place(io_in=["a4"])), "plan"),
    "Placement.io_out": (ops(1, match=["Sub"]), both(ops(1, match=["Sub"]), place(io_out=["a4"])), "floats"),
    "Placement.first_last": (None, place(first_last={"bits": 4}), "plan"),
    "FirstLast.bits": (both(FEW, place(first_last={"bits": 4})), both(FEW, place(first_last={"bits": 6})), "plan"),
    # arithmetic
    "Math.kernels": (None, math(kernels="litert_reference"), "integers"),
    "Math.requant": (None, requant("float", round="trunc"), "integers"),
    "Requant.form=float": (requant("none"), None, "integers"),
    "Requant.form=q31": (requant("none"), requant("q31"), "integers"),
    "Requant.form=none": (None, requant("none"), "integers"),
    "Requant.passes=2": (requant("q31", round="floor", passes=1), requant("q31", round="floor", passes=2), "integers"),
    "Requant.passes=1": (requant("q31", round="floor", passes=2), requant("q31", round="floor", passes=1), "integers"),
    "Accumulator.bits": (math(acc=[{"bits": 32}]), math(acc=[{"bits": 12}]), "integers"),
    "Accumulator.sat": (math(acc=[{"bits": 12}]), math(acc=[{"bits": 12, "sat": True}]), "integers"),
    "Math.acc": (None, math(acc=[{"bits": 12}]), "integers"),
    # the chip
    "Platform.formats": (None, fmt("w8", bits=6), "plan"),
    "Platform.ops": (None, lambda d: d["ops"].pop(1), "plan"),
    "Platform.fuse": (None, {"fuse": []}, "plan"),
    "Platform.math": (None, math(q_round="floor"), "floats"),
    "Platform.place": (None, place(first_last={"bits": 4}), "plan"),
    "Platform.arch_default": (use(when={"arch": "B"}), both(use(when={"arch": "B"}), {"arch_default": "A"}), "plan"),
    "Platform.arch": (use(when={"arch": "B"}), both(use(when={"arch": "B"}), {"arch": ["B", "A"]}), "plan"),
    "Platform.deploy": (None, {"deploy": ["a file"]}, "report"),
    "Platform.metadata": (None, {"metadata": True}, "file"),
    "Platform.simd_padding": (use(simd=64), both(use(simd=64), {"simd_padding": False}), "report"),
    "Platform.encodings": (None, {"encodings": "ncnn"}, "file"),
    "Platform.runtimes": (None, {"runtimes": ["litert"]}, "file"),
    "Platform.sets": (in_set(op=["Add"]), in_set(op=["Sigmoid"]), "plan"),
    "Member.op": (in_set(op=["Add"]), in_set(op=["Sigmoid"]), "plan"),
    "Member.name": (beside(op=["Conv2D"]), beside(op=["Conv2D"], name="Other"), "plan"),
    "Member.type": (in_set(type="Conv2d"), in_set(type="Linear"), "plan"),
    "Member.where": (in_set(op=["Conv2D"]), in_set(op=["Conv2D"], where={"attr": "groups", "value": 2}), "plan"),
    "AttributeFilter.attr": (where(attr="groups", value=2), where(attr="out_channels", value=2), "plan"),
    "AttributeFilter.value": (where(attr="groups", value=2), where(attr="groups", value=3), "plan"),
    "AttributeFilter.any": (where(all=HALVES), where(any=HALVES), "plan"),
    "AttributeFilter.all": (where(any=HALVES), where(all=HALVES), "plan"),
    **{f"AttributeFilter.test={test}": (where(**no), where(**yes), "plan") for test, (no, yes) in FILTERS.items()},
    "Platform.unlisted=float": ({"unlisted": "follow"}, None, "plan"),
    "Platform.unlisted=follow": (None, {"unlisted": "follow"}, "plan"),
    "Platform.unlisted=reject": (None, {"unlisted": "reject"}, "refused"),
    "Platform.unlisted=cpu": (None, {"unlisted": "cpu"}, "plan"),
}
POT = both(fmt("a8", zero=0, scale="pot"), fmt("w8", scale="pot"))
ROUNDINGS = typing.get_args(schema.Rounding)
for field, what in (("Math.q_round", "floats"), ("Math.w_round", "floats"), ("Requant.round", "integers")):
    for one, other in zip(ROUNDINGS, (*ROUNDINGS[1:], ROUNDINGS[0]), strict=True):

        def rounds(rule: str, key: str = field.partition(".")[2]) -> Any:
            changes = {"requant": {"form": "float", "round": rule}} if key == "round" else {key: rule}
            return both(POT, lambda d: d["math"].update(changes))

        EFFECTS[f"{field}={one}"] = rounds(other), rounds(one), what
UNSIGNED = both(fmt("u8", signed=False, zero="any"), use(0, out="u8"), use(1, out="u8"), use(2, **{"in": "u8"}))
for slot in typing.get_args(schema.Slot):
    index, about = (0, "in0") if slot in ("w", "b") else (2, "out") if slot == "in2" else (1, "out")
    about = "in0" if slot.startswith("out") else about
    of_type = "out" if slot == "w" else about
    computes = ops(2, match=["Concat"], exec="int")
    zero = 0 if slot == "w" else 7
    given = {
        "tie": {"tie": [slot, about]},
        "dtype": {"dtype": [slot, of_type]},
        "fix": {"fix": slot, "scale": 0.25, "zp": zero},
        "mono": {"mono": {slot: 1}, "max": 1e-4},
        "zero": {"zero": slot, "eq": zero or 1},
    }
    for head, rule in given.items() if slot != "b" else [("dtype", given["dtype"])]:
        chip_of = functools.partial(both, computes, *([UNSIGNED] if head == "dtype" else []))
        chips = chip_of(rules(index)), chip_of(rules(index, rule))
        EFFECTS[f"Rule.{head}={slot}"] = *chips, "refused" if head == "dtype" else ""
    slots = [slot], ["w" if slot.startswith("out") else "out"]
    here, elsewhere = (both(FEW, place(first_last={"bits": 4, "slots": s})) for s in slots)
    EFFECTS[f"FirstLast.slots={slot}"] = elsewhere, here, "plan"

#: word -> a chip that says it, and the field under which it is named as not modelled
NOT_MODELLED: dict[str, tuple[Any, str]] = {
    "Format.kind=bfp": (fmt("w8", kind="bfp", range="full"), "formats.w8"),
    "Format.scale_bits": (fmt("w8", scale_bits=4), "formats.w8"),
    "Table.per=channel": (lut(per="channel"), "formats.w8"),
    "Table.group": (lut(group=4), "formats.w8"),
    "Table.dim": (lut(dim=2), "formats.w8"),
    "Gate.runtime": (use(when={"runtime": "theirs"}), "ops.0.use.0.when.runtime"),
    "Fuse.inner": (fuse(inner="a8"), "fuse.0.inner"),
    "Branches.free_input": (chain(["Conv2D", "Add"], free_input="Add.in1"), "fuse.0.graph"),
    "Math.act_table": ({"math": {"act_table": {"kind": "pwl"}}}, "math.act_table"),
    "Accumulator.terms": (math(acc=[{"bits": 15, "terms": 2}]), "math.acc.0"),
    "Accumulator.when": (math(acc=[{"bits": 15, "terms": 2, "when": {"arch": "B"}}]), "math.acc.0"),
    **{f"Requant.form={form}": (requant(form), "math.requant.form") for form in ("q15", "shift", "fixed")},
    "Rule.tie=b": (rules(0, {"tie": ["b", "w"]}), "ops.0.rules.0.tie"),
    "Rule.fix=b": (rules(0, {"fix": "b", "scale": 1, "zp": 0}), "ops.0.rules.0.fix"),
    "Rule.mono=b": (rules(0, {"mono": {"b": 1}, "max": 1}), "ops.0.rules.0.mono"),
    "Rule.zero=b": (rules(0, {"zero": "b", "eq": 0}), "ops.0.rules.0.zero"),
}
#: word that is so on every chip -> a chip that says otherwise, which is refused
ALWAYS: dict[str, Any] = {
    word: fuse(when={"single_use": False}) for word in ("Gate.single_use", "Gate.single_use=True")
}
#: word -> the test elsewhere that shows what it does
ELSEWHERE = {"Platform.extends": "test_load.py: a child overrides its parent", "Format.free": "decide/test_options.py"}
ELSEWHERE["Platform.wider"] = "search/test_repairs.py"
ELSEWHERE |= dict.fromkeys(("Option.state", "Format.per=gate"), "exactness/test_native_lstm.py")


def test_every_word_of_the_schema_is_done_or_named_as_not_done():
    tables = (EFFECTS, NOT_MODELLED, ALWAYS, ELSEWHERE, dict.fromkeys(FOR_PEOPLE))
    listed = [word for table in tables for word in table]
    fields = {word.partition("=")[0] for word in listed if "=" in word}  # covered by their values
    assert walked() == {*listed, *fields} and len(listed) == len(set(listed))


def test_the_walk_finds_a_new_field_and_a_new_value(monkeypatch):
    class More(schema.Platform):
        speed: Literal["slow", "fast"] = "slow"

    monkeypatch.setattr(schema, "Platform", More)
    assert {"More.speed", "More.speed=slow", "More.speed=fast"} <= walked()


@pytest.mark.parametrize("word", EFFECTS)
def test_a_word_changes_what_comes_out(word):
    one, other, where = EFFECTS[word]
    for platform in (chips := [chip(one), chip(other)]):
        PLATFORMS[platform.hash] = platform
    a, b = (outcome(c.hash) for c in chips)
    differing = {k for k in {*a, *b} if a.get(k) != b.get(k)}
    assert differing
    assert set(where.split()) <= differing


@pytest.mark.parametrize("word", NOT_MODELLED)
def test_a_word_that_nothing_does_is_named(word):
    change, field = NOT_MODELLED[word]
    new = set(unsupported_features(chip(change))) - set(unsupported_features(chip()))
    assert [line for line in new if line.startswith(field)]


@pytest.mark.parametrize("word", ALWAYS)
def test_what_holds_on_every_chip_cannot_be_denied(word):
    with pytest.raises(ValueError):
        chip(ALWAYS[word])
