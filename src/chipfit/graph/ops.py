"""The canonical operators: one table with every fact about each of them.

Frameworks' readers translate their operators into these, the engine runs them, and the writers export them. Platform
files use the same names. A new operator is a row of `ops.yaml`, a kernel, and a row in each reader and writer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chipfit.files import package_data


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDef:
    """The facts about one canonical operator, whatever its attributes."""

    #: names of the inputs in order; "?" marks an optional one, "*" one that stands for all that remain. "w" and "b" are
    #: weight and bias, "in0", "in1", ... and "ins" are data
    slots: tuple[str, ...]
    attrs: tuple[str, ...] = ()
    note: str = ""
    #: "conv", "transposed" (convolution) or "linear" for y = W x + b with W and b in slots "w" and "b"; "" for others
    kind: str = ""
    weight_axis: int = 0  #: axis of output channels in the weight
    #: effect of a change between channels first and last (`passes.layout`): "spatial" operators compute in the layout
    #: of the graph, "natural" ones in the model's own order, the others in the layout of their operands
    layout: str = "natural"
    activation: bool = False  #: a kernel may apply it to its own result
    moves: bool = False  #: its result holds numbers of its inputs only (a pass-through operator)
    #: each number of its result is one of its inputs', or one sum, difference, product or quotient of them, correctly
    #: rounded: every machine computes the same float32
    ieee: bool = False
    view: bool = False  #: its result may share memory with an input
    homogeneous: bool = False  #: f(k x) = k f(x) for k > 0, of one data input; of Pad where it pads with 0
    #: f(x + c) = f(x) + c, of one data input; of AvgPool where it counts no padding, of Pad where it pads c
    shifts: bool = False
    by_channel: bool = False  #: each channel of its result depends on that channel of its inputs only
    negative_tail: bool = False  #: a non-linearity that is bounded or flat on its negative side
    #: operators of which it is a special case, nearest first; a platform may list one of them instead
    case_of: tuple[str, ...] = ()

    def slot(self, index: int) -> str:
        """Return the name of the input at `index`, without marks; those of "ins*" are "in0", "in1", ..."""
        name = self.slots[min(index, len(self.slots) - 1)].rstrip("?*")
        return f"in{index}" if name == "ins" else name

    def index(self, name: str) -> int | None:
        """Return the position of the slot `name`; None if the operator has none of that name."""
        return next((k for k, s in enumerate(self.slots) if s.rstrip("?*") == name), None)

    @property
    def weighted(self) -> bool:
        """True if the operator may have weights of its own."""
        return any(s.startswith("w") for s in self.slots)


_DATA = package_data("chipfit.graph", "ops.yaml")


def _row(*, takes: str = "in0", attrs: str = "", case_of: str = "", facts: str = "", **more: Any) -> OpDef:
    """Return a row of `ops.yaml`; `facts` are names of families, or of fields that are true."""
    for word in facts.split():
        more = {**_DATA["families"].get(word, {word: True}), **more}
    return OpDef(slots=tuple(takes.split()), attrs=tuple(attrs.split()), case_of=tuple(case_of.split()), **more)


OPS: dict[str, OpDef] = {op: _row(**row) for ops, row in _DATA["operators"].items() for op in ops.split()}
#: attribute -> the kind of its values, see `ops.yaml`
ATTRIBUTES: dict[str, str] = {name: kind for kind, names in _DATA["attributes"].items() for name in names.split()}
#: names that platform files use for the same operator: the platform's word -> (operator, attributes that it must have)
ALIASES: dict[str, tuple[str, dict[str, float | str]]] = {
    word: (row["of"], row.get("where", {})) for word, row in _DATA["aliases"].items()
}
#: operators that platform files may name beyond the canonical ones
FOREIGN = frozenset(_DATA["foreign"].split())


def words_of(op: str, attrs: Mapping[str, Any]) -> set[str]:
    """Return every name that a platform file may use for an operator: its canonical name and matching aliases."""
    named = ((word, needed) for word, (canonical, needed) in ALIASES.items() if canonical == op)
    return {op, *(word for word, needed in named if all(attrs.get(k) == v for k, v in needed.items()))}
