"""The canonical operators: one table with every fact about each of them, and what others call it.

A row stands in one of the YAML files beside this module. Its first fields are those of `OpDef`, where `takes` lists the
slots, and `facts` names facts that are true, or families of facts (`vocabulary.yaml`). Each further field is a cell of
a column: what a framework, the engine or a file format has for the operator.

    infix        the operator of Python in formulas, by its class in `ast`   `operators/formulas.py`
    torch        the ATen operators that become it                  `frameworks/torch/read.py`
    keras        the Keras layers and operations that become it     `frameworks/keras/read.py`
    kernel       the function of torch that computes it             `engine/kernels.py`
    lowering     the function of keras.ops, and the Keras layer     `frameworks/keras/lowerings.py`
    onnx         its operator in ONNX                               `export/onnx/ops.py`, `frameworks/onnx/read.py`
    tflite       its operator in TensorFlow Lite                    `export/tflite/ops.py`
    decompose    the rule that replaces it by simpler operators     `passes/decompose.py`
    onnxruntime  the integer kernel of ONNX Runtime                 `simulate/onnxruntime.py`
    qnn          the largest difference of QNN's kernel             `runtimes/qnn.py`
    litert       the integer kernels of LiteRT, by family           `simulate/litert.py`
    tflm         the kernel of TensorFlow Lite Micro where it differs from LiteRT's reference   `simulate/tflm.py`
    layers       names of layers that chips' descriptions may use   `mct/target_platform/layers.py`

A cell is a name, if operands and attributes are those of the row; a mapping with the keyword arguments of the function
that reads the column; or a list of those. `refused: why` in a cell says why the operator has no form there. Words of
attributes are "ours=theirs:conversion", see `attribute_words`. Where a cell names a function of the module that reads
the column, a row that is added in Python may hold the function itself. A module reads its column when it is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

from chipfit.errors import ConfigError
from chipfit.files import package_data

F = TypeVar("F", bound=Callable[..., Any])


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
    homogeneous: bool = False  #: f(k x) = k f(x) for k > 0, of one data input
    shifts: bool = False  #: f(x + c) = f(x) + c, of one data input; for Pad, if the value that it adds grows by c too
    #: least and greatest result of an operator that only clips: numbers or names of attributes, None for no bound
    clips: tuple[float | str | None, ...] = ()
    #: fact -> alternative values of attributes; the fact is false where none of the alternatives is met. A number also
    #: stands for a tuple of only that number
    holds_if: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    by_channel: bool = False  #: each channel of its result depends on that channel of its inputs only
    condition: bool = False  #: its result is true or false
    identity: bool = False  #: its result is its operand, once training is over
    sums: bool = False  #: its results are sums or means of numbers of its input
    softmax: bool = False  #: its results are shares of exponentials along an axis: very negative numbers have none
    #: "vectors" if it normalises each vector by its own statistics, then scales its channels; "channels" if its scale
    #: and shift are those of the channels on axis 1
    norm: str = ""
    gate: str = ""  #: operator f if it is x f(x)
    extreme: bool = False  #: it finds the greatest or least number along axes, or its index: others have no influence
    selects: bool = False  #: its results are a selection in an order of its own, which float and quantized do not share
    recurrent: bool = False  #: a layer with states, over all steps of a sequence or one step
    pole: bool = False  #: its result is infinite where its last operand is 0
    root: bool = False  #: its slope is infinite where its operand is 0, and its result is not
    exponent: bool = False  #: its last operand is an exponent
    bounded: tuple[float, ...] = ()  #: bounds of its results where they are known and it does not only clip
    negative_tail: bool = False  #: a non-linearity that is bounded or flat on its negative side
    #: operators of which it is a special case, nearest first; a platform may list one of them instead
    case_of: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()  #: groups of operators that contain it, which platform files name as "@group"
    #: operator that a user may take instead if a chip lacks this one -> how to write it; some need training
    stand_ins: Mapping[str, str] = field(default_factory=dict)

    def slot(self, index: int) -> str:
        """Return the name of the input at `index`, without marks; those of "ins*" are "in0", "in1", ..."""
        name = self.slots[min(index, len(self.slots) - 1)].rstrip("?*")
        return f"in{index}" if name == "ins" else name

    def index(self, name: str) -> int | None:
        """Return the position of the slot `name`; None if the operator has none of that name."""
        return next((k for k, s in enumerate(self.slots) if s.rstrip("?*") == name), None)

    @property
    def steep(self) -> bool:
        """True if its slope is infinite where its last operand is 0."""
        return self.pole or self.root

    @property
    def weighted(self) -> bool:
        """True if the operator may have weights of its own."""
        return any(s.startswith("w") for s in self.slots)


#: facts about an operator without a row: none, and its result may share memory with any input
UNKNOWN = OpDef(slots=("ins*",), view=True)


def facts_of(op: str, attrs: Mapping[str, Any]) -> OpDef:
    """Return the row of an operator with the facts that hold for these attributes; `UNKNOWN` if it has no row."""
    row = OPS.get(op, UNKNOWN)
    if not row.holds_if:
        return row
    untrue: dict[str, Any] = {
        fact: False
        for fact, alternatives in row.holds_if.items()
        if not any(all(_equals(attrs.get(name), v) for name, v in wanted.items()) for wanted in alternatives)
    }
    return replace(row, **untrue) if untrue else row


def _equals(value: Any, wanted: Any) -> bool:
    """Return whether a value, or each element of a tuple, equals the wanted one."""
    return all(_equals(v, wanted) for v in value) if isinstance(value, tuple) else bool(value == wanted)


_COLUMNS = "infix torch keras kernel lowering onnx tflite decompose onnxruntime qnn litert tflm layers".split()
_FILES = "products recurrent activations norms arithmetic windows reductions moves".split()
_VOCABULARY = package_data("chipfit.operators", "vocabulary.yaml")
#: column -> operator -> what stands in that column of its row
CELLS: dict[str, dict[str, Any]] = {column: {} for column in _COLUMNS}
_readers: dict[str, list[Callable[..., None]]] = {}  #: column -> the functions that read its cells
_filled: dict[str, list[dict[Any, Any]]] = {}  #: column -> the tables that these functions fill

OPS: dict[str, OpDef] = {}
#: attribute -> the kind of its values, see `vocabulary.yaml`
ATTRIBUTES: dict[str, str] = {name: kind for kind, names in _VOCABULARY["attributes"].items() for name in names.split()}
#: names that platform files use for the same operator: the platform's word -> (operator, attributes that it must have)
ALIASES: dict[str, tuple[str, dict[str, float | str]]] = {
    word: (row["of"], row.get("where", {})) for word, row in _VOCABULARY["aliases"].items()
}
#: operators that platform files may name beyond the canonical ones
FOREIGN = frozenset(_VOCABULARY["foreign"].split())
#: operators of frameworks that choose the size of their result by data
SIZED_BY_DATA = frozenset(_VOCABULARY["sized_by_data"].split())
#: operators of frameworks that choose the size of their result by data if an operand is a mask
SIZED_BY_MASK = frozenset(_VOCABULARY["sized_by_mask"].split())
#: "@group" of platform files -> its operators
GROUPS: dict[str, frozenset[str]] = {f"@{name}": frozenset(ops.split()) for name, ops in _VOCABULARY["groups"].items()}


def add_operators(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Add rows to the table: names of operators, with spaces between, -> the fields of their row.

    Columns that are in use already get their cells at once. Rows that are refused leave nothing behind.

    Raises:
        ConfigError: an operator has this name, a row has an unknown field, or a cell does not fit its column.
    """
    before = [(table, dict(table)) for table in filled_tables()]
    try:
        for names, row in rows.items():
            for op in names.split():
                _add_operator(op, row)
    except Exception:
        for table, old in before:
            table.clear()
            table.update(old)
        raise


def filled_tables() -> list[dict[Any, Any]]:
    """Return all tables that rows fill, among them those of columns that are in use already."""
    return [OPS, GROUPS, *CELLS.values(), *(table for filled in _filled.values() for table in filled)]  # type: ignore[list-item]


def _add_operator(op: str, row: Mapping[str, Any]) -> None:
    """Add the row of one operator; the caller removes what was entered if an error follows."""
    if op in OPS:
        raise ConfigError(f"An operator named '{op}' exists already", hint="give the new operator another name")
    OPS[op] = _definition(op, **{k: v for k, v in row.items() if k not in _COLUMNS})
    GROUPS.update({f"@{g}": GROUPS.get(f"@{g}", frozenset()) | {op} for g in OPS[op].groups})
    for column in row.keys() & _readers.keys():
        for enter in _readers[column]:
            _enter_cell(enter, column, op, row[column])
    for column in row.keys() & CELLS.keys():
        CELLS[column][op] = row[column]


def _definition(op: str, takes: str = "in0", facts: str = "", **more: Any) -> OpDef:
    """Return the facts of a row.

    Args:
        takes: the slots of its operands.
        facts: families of facts, and fields that are true.
        more: other fields of `OpDef`.
    """
    for word in facts.split():
        more = {**_VOCABULARY["families"].get(word, {word: True}), **more}
    known = {f.name for f in fields(OpDef)}
    if unknown := more.keys() - known:
        allowed = ", ".join(sorted({"takes", "facts", *known - {"slots"}, *_COLUMNS}))
        raise ConfigError(f"Row of operator '{op}' has unknown fields", got=", ".join(sorted(unknown)), allowed=allowed)
    more |= {name: tuple(more[name].split()) for name in ("attrs", "case_of", "groups") if name in more}
    more |= {name: tuple(more[name]) for name in ("clips", "bounded") if name in more}
    return OpDef(slots=tuple(takes.split()), **more)


def read_column(column: str, enter: Callable[..., None], *filled: dict[Any, Any]) -> None:
    """Call `enter(op, **fields)` for every cell of a column, and for those of operators that are added later.

    A cell that is not a mapping becomes the field `name`.

    Args:
        filled: the tables that `enter` fills, so that a refused row can be removed from them.

    Raises:
        ConfigError: a cell has fields that `enter` does not take.
    """
    _readers.setdefault(column, []).append(enter)
    _filled.setdefault(column, []).extend(filled)
    for op, cell in CELLS[column].items():
        _enter_cell(enter, column, op, cell)


def _enter_cell(enter: Callable[..., None], column: str, op: str, cell: Any) -> None:
    """Enter each form that a cell lists, except reasons why there is none."""
    for form in cell if isinstance(cell, list) else [cell]:
        given = form if isinstance(form, Mapping) else {"name": form}
        if "refused" in given:
            continue
        try:
            enter(op, **given)
        except TypeError as e:
            raise ConfigError(f"Row of operator '{op}' does not fit column '{column}': {e}", got=repr(form)) from e


def refused(column: str) -> dict[str, str]:
    """Return the operators that cannot have a form in a column, with the reason."""
    return {op: c["refused"] for op, c in CELLS[column].items() if isinstance(c, Mapping) and "refused" in c}


def dictated_outputs(cell: Mapping[str, Any]) -> dict[int, tuple[float, int]]:
    """Return bits -> the scale and zero point that a file format dictates for the result of an operator."""
    given: Mapping[Any, Any] = cell.get("output") or {}
    return {int(bits): (float(scale), int(zero)) for bits, (scale, zero) in given.items()}


def enters(table: dict[str, F]) -> Callable[[str], Callable[[F], F]]:
    """Return a decorator that enters a function into a table under names with spaces between.

    Raises:
        ConfigError: the table has a function of one of these names.

    >>> signs = {}
    >>> enters(signs)("Neg Abs")(len) is signs["Abs"]
    True
    """

    def decorator(names: str) -> Callable[[F], F]:
        def enter(f: F) -> F:
            if taken := table.keys() & names.split():
                raise ConfigError(f"Two functions are entered under one name: '{min(taken)}'")
            table.update(dict.fromkeys(names.split(), f))
            return f

        return enter

    return decorator


def by_name(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return functions under the names that cells have for them, without leading underscores."""
    return {f.__name__.lstrip("_"): f for f in functions}


def resolve(function: str | Callable[..., Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the function that a cell names, "name" or "name option=word ..."; a function is returned as it is.

    Raises:
        TypeError: no function has this name.
    """
    if not isinstance(function, str):
        return function
    name, *options = function.split()
    if name not in functions:
        raise TypeError(f"'{name}' is not a function of this column; it has {', '.join(sorted(functions))}")
    return partial(functions[name], **dict(o.split("=") for o in options)) if options else functions[name]


def reader_of(op: str, read: str | F, functions: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the function that a cell names, with the operator as its argument `op`; a function as it is.

    Raises:
        TypeError: no function has this name.
    """
    return partial(resolve(read, functions), op=op) if isinstance(read, str) else read


def renamed(function: Callable[..., Any], names: Mapping[str, str]) -> Callable[..., Any]:
    """Return a function under our names of its keyword arguments: ours -> theirs, and others as they are."""
    return lambda *operands, **attrs: function(*operands, **{names.get(k, k): v for k, v in attrs.items()})


def attribute_words(text: str) -> list[tuple[str, str, str]]:
    """Split words "attribute=theirs:conversion" into (attribute, theirs, conversion).

    Where `theirs` is left out, it is called like the attribute; where the conversion is left out, it is "".

    >>> attribute_words("eps=epsilon:float axis")
    [('eps', 'epsilon', 'float'), ('axis', 'axis', '')]
    """
    words = []
    for word in text.split():
        name, _, conversion = word.partition(":")
        attribute, _, theirs = name.partition("=")
        words.append((attribute, theirs or attribute, conversion))
    return words


def words_of(op: str, attrs: Mapping[str, Any]) -> set[str]:
    """Return every name that a platform file may use for an operator: its canonical name and matching aliases."""
    named = ((word, needed) for word, (canonical, needed) in ALIASES.items() if canonical == op)
    return {op, *(word for word, needed in named if all(attrs.get(k) == v for k, v in needed.items()))}


for _file in _FILES:
    add_operators(package_data("chipfit.operators", f"{_file}.yaml"))
