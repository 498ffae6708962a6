"""Tables of a `.pt2` file, as types: the keys that are read of schema 8 of torch/_export/serde/schema.py."""

from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter
from typing_extensions import TypedDict

_make: Any = TypedDict
_list: Any = list
_dict: Any = dict


def _table(*, total: bool = True, **wanted: Any) -> Any:
    """Return the type of a table with these keys (all, if `total`); other keys may stand beside them."""
    kind = _make("Table", wanted, total=total)
    kind.__pydantic_config__ = ConfigDict(strict=True, extra="allow")
    return kind


_number = Annotated[float, Field(strict=False)]  # infinities and NaN are texts in the file
_symbol = _table(total=False, name=str, as_name=str, as_int=int, as_bool=bool, as_float=_number)
_size = _table(total=False, as_int=NonNegativeInt, as_expr=_table(hint=_symbol))
_meta = _table(
    dtype=int, sizes=_list[_size], strides=_list[_size], storage_offset=_size, layout=int, requires_grad=bool
)
#: one entry: the kind of the argument -> its value
_argument = _table(
    total=False,
    **dict.fromkeys(("as_tensor", "as_sym_int", "as_sym_bool", "as_sym_float"), _symbol),
    **dict.fromkeys(("as_tensors", "as_sym_ints", "as_sym_bools", "as_sym_floats"), _list[_symbol]),
    **dict.fromkeys(("as_scalar_type", "as_memory_format", "as_layout"), int),
    as_optional_tensor=_table(total=False, as_tensor=_symbol),
    as_optional_tensors=_list[_table(total=False, as_tensor=_symbol)],
    as_float=_number,
    as_floats=_list[_number],
    as_graph=_table(graph=dict),
)
_arguments = _list[_argument]
_node = _table(target=str, inputs=_list[_table(name=str, arg=_argument)], outputs=_arguments, metadata=dict[str, str])
_graph = _table(inputs=_arguments, outputs=_arguments, nodes=_list[_node], tensor_values=_dict[str, _meta])
_input = _table(total=False, name=str, arg=_argument, parameter_name=str, buffer_name=str, tensor_constant_name=str)
_output = _table(total=False, user_output=_table(arg=_argument))
_call = _table(in_spec=str, out_spec=str, forward_arg_names=NotRequired[list[str] | None])
_module = _table(
    graph=_graph,
    signature=_table(input_specs=_list[_dict[str, _input]], output_specs=_list[_output]),
    module_call_graph=_list[_table(fqn=str, signature=_call | None)],
)
_entry = _table(path_name=str, use_pickle=bool, is_param=bool, tensor_meta=_meta)

GRAPH: TypeAdapter[Any] = TypeAdapter(_graph)
GENERATION: TypeAdapter[Any] = TypeAdapter(_table(schema_version=_table(major=int)))
PROGRAM: TypeAdapter[Any] = TypeAdapter(_table(graph_module=_module))
WEIGHTS: TypeAdapter[Any] = TypeAdapter(_table(config=_dict[str, _entry]))
