"""A `.pte` file in parts: its program, the graphs of its XNNPACK delegates, and named data; read and written.

Layout: a flatbuffer with a header behind its first 8 bytes, then segments. A delegate's data are a header, a
flatbuffer and constants. Sources: executorch, schema/program.fbs, exir/_serialize/_program.py (the extended header) and
backends/xnnpack/serialization/{schema.fbs,xnnpack_graph_serialize.py}.
"""

import json
import re
import struct
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from chipfit.errors import RuntimeUnavailable

PROGRAM = "exir/_serialize/program.fbs", "Program"
GRAPH = f"backends/{'XNNPACK'.lower()}/serialization/schema.fbs", "XNNGraph"
Schema = tuple[str, str]  #: path of a schema in the package, and its root
KEY = "chipfit"  #: of chipfit's notes among named data
_ALIGNMENT = 128  #: of segments [bytes]


@cache
def classes(path: str) -> ModuleType:
    """Return the classes of a schema of the executorch package, which its own compiler writes."""
    found = find_spec("executorch")
    package = Path(next(iter(found.submodule_search_locations or ()))) if found else Path()
    made = ModuleType(Path(path).stem)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        compiler = package / "data" / "bin" / "flatc"
        how = ("--python", "--gen-object-api", "--gen-onefile", "-o", folder)  # "." would write /__init__.py
        subprocess.run([str(compiler), *how, str(package / path)], check=True, capture_output=True)
        (source,) = Path(folder).glob("*_generated.py")
        text = source.read_text(encoding="utf-8")
        exec(compile(text, str(source), "exec"), vars(made))
    defined = {name.lower(): f for name, f in vars(made).items()}
    for name in {*re.findall(r"\w+Creator", text)}:  # the compiler defines some in another spelling than it calls
        setattr(made, name, defined[name.lower()])
    return made


def decode(schema: Schema, content: bytes) -> Any:
    """Return a flatbuffer as an object.

    Raises:
        RuntimeUnavailable: it is malformed.
    """
    made, root = classes(schema[0]), schema[1]
    try:
        return getattr(made, f"{root}T").InitFromPackedBuf(content, 0)
    except (struct.error, TypeError, IndexError, ValueError) as e:
        raise RuntimeUnavailable("A part of the file is malformed") from e


def encode(table: Any, identifier: bytes) -> bytes:
    """Return an object as a flatbuffer."""
    import flatbuffers

    builder = flatbuffers.Builder(1024)
    builder.Finish(table.Pack(builder), file_identifier=identifier)
    return bytes(builder.Output())


class Container:
    """A parsed file.

    Raises:
        RuntimeUnavailable: the bytes are no `.pte` file.
    """

    def __init__(self, content: bytes) -> None:
        if content[4:6] != b"ET" or content[8:12] != b"eh00":
            raise RuntimeUnavailable("The file is no ExecuTorch program with segments", got=repr(content[4:12]))
        size, base = struct.unpack("<QQ", content[16:32])
        self.program = decode(PROGRAM, content[:size])
        self.segments = [content[base + s.offset : base + s.offset + s.size] for s in self.program.segments or ()]
        self.plan = next(p for p in self.program.executionPlan if p.name == b"forward")
        called = [i.instrArgs for chain in self.plan.chains for i in chain.instructions or ()]
        #: calls of delegates, and of kernels, in order
        self.calls = [i for i in called if hasattr(i, "delegateIndex")]
        self.kernels = [self.plan.operators[i.opIndex] for i in called if hasattr(i, "opIndex")]

    def notes(self) -> dict[str, Any]:
        """Return chipfit's notes, see `chipfit.export.pte.notes`; {} for the file of another tool.

        Raises:
            RuntimeUnavailable: they are malformed.
        """
        try:
            return dict(json.loads(self.named(KEY) or b"{}"))
        except ValueError as e:
            raise malformed("they are no JSON") from e

    def named(self, key: str) -> bytes | None:
        """Return named data; None if there are none of this name."""
        found = (d for d in self.program.namedData or () if d.key.decode() == key)
        return next((self.segments[d.segmentIndex] for d in found), None)

    def constant(self, value: int) -> bytes:
        """Return the bytes of a constant of the program, and all behind them."""
        held = self.program.constantSegment
        return self.segments[held.segmentIndex][held.offsets[self.plan.values[value].val.dataBufferIdx] :]

    def delegate(self, call: int) -> Any:
        """Return the delegate of a call."""
        return self.plan.delegates[self.calls[call].delegateIndex]

    def _data(self, call: int) -> bytes:
        where, place = self.delegate(call).processed, classes(PROGRAM[0]).DataLocation
        if where.location == place.SEGMENT:
            return self.segments[where.index]
        return bytes(self.program.backendDelegateData[where.index].data)

    def graph(self, call: int) -> Any:
        """Return the graph of an XNNPACK delegate."""
        return graph_of(self._data(call))

    def set_graph(self, call: int, graph: Any) -> None:
        """Replace the graph of an XNNPACK delegate."""
        data = self._data(call)
        start, _, constants, count = struct.unpack("<IIIQ", data[10:30])
        part, tail = encode(graph, b"XN00"), data[constants : constants + count]
        padded = part + b"\0" * (-len(part) % 16)
        header = data[:10] + struct.pack("<IIIQ", start, len(part), start + len(padded), len(tail))
        self.segments.append(header + data[30:start] + padded + tail)
        place = classes(PROGRAM[0])
        where = place.BackendDelegateDataReferenceT()
        where.location, where.index = place.DataLocation.SEGMENT, len(self.segments) - 1
        self.delegate(call).processed = where

    def to_bytes(self) -> bytes:
        """Return the file."""
        tail, places = b"", []
        for s in self.segments:
            tail += b"\0" * (-len(tail) % _ALIGNMENT)
            place = classes(PROGRAM[0]).DataSegmentT()
            place.offset, place.size = len(tail), len(s)
            places.append(place)
            tail += s
        self.program.segments = places
        part = encode(self.program, b"ET12")
        size = len(part) + 32
        base = size + -size % _ALIGNMENT
        root = int.from_bytes(part[:4], "little") + 32
        header = root.to_bytes(4, "little") + part[4:8] + b"eh00" + struct.pack("<IQQQ", 32, size, base, len(tail))
        return header + part[8:] + b"\0" * (base - size) + tail


def graph_of(data: bytes) -> Any:
    """Return the graph in the data of an XNNPACK delegate."""
    start, size = struct.unpack("<II", data[10:18])
    return decode(GRAPH, data[start : start + size])


def tensor_of(value: Any) -> Any:
    """Return the tensor of a value of a delegate's graph."""
    union = value.xvalueUnion
    return getattr(union, "tensorValue", union)


def kind_of(node: Any) -> str:
    """Return the kind of a node of a delegate's graph, such as XNNConv2d."""
    kinds = vars(classes(GRAPH[0]).XNodeUnion)
    return next(name for name, number in kinds.items() if number == node.xnodeUnionType)


def malformed(why: str) -> RuntimeUnavailable:
    """Return the error for notes that do not fit the file."""
    return RuntimeUnavailable(f"The chipfit notes in the file do not fit it: {why}", hint="export it again")
