"""Rewrites of a graph that was read from ONNX: layers that exporters write in several nodes become one again."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from chipfit.graph.edit import drop_dead, new_name, replace_node
from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import OPS
from chipfit.passes.attention import attention


def tidy(graph: Graph, outputs: Sequence[str]) -> tuple[Graph, list[str]]:
    """Return the graph with whole layers, and its outputs."""
    graph.outputs = [*outputs]
    layers = _Layers(graph)
    norms = layers.norms, layers.shifted_norms, layers.group_norms
    wholes = layers.guards, layers.lists, layers.gates, layers.gelus, *norms, layers.biases, layers.flattened
    for find in (*wholes, layers.swaps, layers.lines):
        for old, whole in find():
            layers.replace(old, whole)
        layers.apply()
    drop_dead(graph)
    graph = attention(graph, _is_exported_attention).graph
    _default_scales(graph)
    _separate_vectors(graph)
    return graph, graph.outputs


def _is_exported_attention(graph: Graph, node: Node) -> bool:
    """Check whether scores are products of q and k that are each scaled by the root of one factor.

    So exporters write PyTorch's operator; other attention keeps its parts, as it does from PyTorch.
    """
    if len(node.inputs) > 1:  # of the operator that has been made
        return True
    made = graph.producers()
    n = made.get(node.data)
    while n is not None and n.op in ("Add", "Where"):
        n = next((made[i] for i in n.inputs if i in made and made[i].op in ("MatMul", "Add", "Where")), None)
    if n is None or n.op != "MatMul":
        return False
    factors = [made.get(i or "") for i in n.inputs]
    scales = {f.inputs[1]: graph.weights.get(f.inputs[1] or "") for f in factors if f is not None and f.op == "Mul"}
    pair = {float(s) for s in scales.values() if s is not None and s.numel() == 1}
    found = len(pair) == 1 and all(f is not None and f.op == "Mul" for f in factors)
    graph.trainable -= {*scales} if found else set()
    return found


def _default_scales(graph: Graph) -> None:
    """Leave out the scale of attention where it is the operator's own."""
    for n in graph.nodes:
        if n.op == "SDPA" and n.attrs["scale"] is not None:
            width = graph.shape(n.data)[-1]
            if width and math.isclose(n.attrs["scale"], width**-0.5, rel_tol=1e-6):
                replace_node(graph, n, n.with_(attrs={**n.attrs, "scale": None}))


def _separate_vectors(graph: Graph) -> None:
    """Give layers with other weights or operators a vector of their own: exporters store equal biases once."""
    names: dict[tuple[str, object], str] = {}
    first: set[str] = set()
    for n in list(graph.nodes):
        inputs = list(n.inputs)
        for k, i in enumerate(n.inputs):
            if k and i in graph.weights and graph.weights[i].dim() == 1 and graph.weights[i].is_floating_point():
                key = (i, (n.op, k, n.inputs[1] if n.inputs[1] != i else ""))
                if key not in names:
                    names[key] = new_name(graph, i) if i in first else i
                    graph.weights[names[key]] = graph.weights[i]
                    graph.trainable |= {names[key]} if i in graph.trainable else set()
                first.add(i)
                inputs[k] = names[key]
        if inputs != list(n.inputs):
            replace_node(graph, n, n.with_(inputs=tuple(inputs)))


class _Layers:
    """The layers of a graph that stand in several nodes: each method yields (last node, the node in its place)."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.users, self.made = graph.users(), graph.producers()
        self.now: dict[str, Node | None] = {}  #: nodes that are replaced, or that nothing reads any more

    def replace(self, old: Node, whole: Node) -> None:
        """Put a node in place of another one, and remove what nothing reads then."""
        for i in whole.inputs:
            self.users.setdefault(i or "", []).append(whole)
        self.now[old.name] = whole
        self.made.update(dict.fromkeys(whole.outputs, whole))
        gone, kept = [old], {*self.graph.outputs}
        while gone:
            n = gone.pop()
            for i in {*filter(None, n.inputs)}:
                self.users[i] = [u for u in self.users[i] if u is not n]
                maker = self.made.get(i)
                if maker is not None and not any(self.users.get(o) or o in kept for o in maker.outputs):
                    self.now[maker.name] = None
                    gone.append(maker)

    def apply(self) -> None:
        """Change the nodes of the graph."""
        before = {o for n in self.graph.nodes for o in n.outputs} if self.now else set()
        found = (self.now.get(n.name, n) for n in self.graph.nodes)
        self.graph.nodes[:] = [n for n in found if n is not None]
        for value in before.difference(*(n.outputs for n in self.graph.nodes)):
            del self.graph.values[value]
        self.now.clear()

    def alone(self, value: str) -> bool:
        return len(self.users.get(value, ())) == 1 and value not in self.graph.outputs

    def maker(self, value: str | None, *ops: str) -> Node | None:
        """Return the node that makes a value, if it is one of these operators and has no other reader."""
        n = self.made.get(value or "")
        return n if n is not None and n.op in ops and self.alone(n.output) else None

    def reader(self, node: Node, op: str) -> tuple[Node, str] | None:
        """Return the only reader of a node's result, of this operator with two operands, and its other operand."""
        n = self.users[node.output][0] if self.alone(node.output) else None
        if n is None or n.op != op or len(n.inputs) != 2:
            return None
        a, b = n.inputs
        return n, (b if a == node.output else a) or ""

    def number(self, name: str) -> float:
        """Return the number of a constant of one element, of float32 by its shortest decimal; else NaN."""
        w = self.graph.weights.get(name)
        return float(str(w.numpy().reshape(())[()])) if w is not None and w.numel() == 1 else math.nan

    def named(self, *ops: str) -> Iterator[Node]:
        """Yield the nodes of some operators that are still there."""
        return (n for n in list(self.graph.nodes) if n.op in ops and self.now.get(n.name, n) is n)

    def guards(self) -> Iterator[tuple[Node, Node]]:
        """Find zeros in place of NaN among the weights of PyTorch's attention, whose operator has them, too."""
        for n in self.named("Where"):
            test, softmax = (self.made.get(n.inputs[k] or "") for k in (0, 2))
            odd = test is not None and test.layer_type == "IsNaN" and test.data == n.inputs[2]
            zeros = odd and self.number(n.inputs[1] or "") == 0
            if (
                zeros
                and softmax is not None
                and softmax.op == "Softmax"
                and _is_exported_attention(self.graph, softmax)
            ):
                yield n, softmax.with_(name=n.name, outputs=n.outputs)

    def lists(self) -> Iterator[tuple[Node, Node]]:
        """Find parts of one place each whose readers all leave out that axis: the axis taken apart."""
        for n in self.named("Split"):
            axes = (n.attrs["axis"] % len(self.graph.shape(n.data)),)
            parts = [self.users[o][0] for o in n.outputs if self.alone(o)]
            if len(parts) == len(n.outputs) and all(p.op == "Squeeze" and p.attrs["axes"] == axes for p in parts):
                outputs = tuple(p.output for p in parts)
                for p in parts:
                    self.now[p.name] = None
                yield n, n.with_(op="Unstack", outputs=outputs, attrs={"axis": axes[0]}, layer_type="Unstack")

    def gates(self) -> Iterator[tuple[Node, Node]]:
        """Find x f(x) of the gated operators."""
        gated = {row.gate: op for op, row in OPS.items() if row.gate}
        for n in self.named("Mul"):
            for x, gate in (n.inputs, n.inputs[::-1]):
                s = self.maker(gate, *gated)
                if s is not None and s.data == x:
                    yield n, n.with_(op=gated[s.op], inputs=(x,), layer_type=gated[s.op])
                    break

    def gelus(self) -> Iterator[tuple[Node, Node]]:
        """Find x / 2 (1 + erf(x / sqrt(2))), the factors in any order."""
        for erf in self.named("Erf"):
            scaled = self.maker(erf.data, "Div", "Mul")
            one = self.reader(erf, "Add")
            if scaled is None or one is None or self.number(one[1]) != 1:
                continue
            x, factor = scaled.inputs if scaled.inputs[1] in self.graph.weights else scaled.inputs[::-1]
            by = self.number(factor or "")
            last, factors = one[0], list[str]()
            while len(factors) < 3 and (found := self.reader(last, "Mul")) is not None:
                last, other = found
                half = self.maker(other, "Mul") if other != x else None
                factors += [other] if half is None else [i or "" for i in half.inputs]
                if x in factors and any(self.number(f) == 0.5 for f in factors):
                    break
            numbers = [self.number(f) for f in factors if f != x]
            if (
                len(factors) == 2
                and numbers == [0.5]
                and math.isclose(by if scaled.op == "Mul" else 1 / by, 0.5**0.5, rel_tol=1e-5)
            ):
                yield last, last.with_(op="Gelu", inputs=(x,), attrs={"approximate": "none"}, layer_type="Gelu")

    def norms(self) -> Iterator[tuple[Node, Node]]:
        """Find (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) over the last axes, perhaps times w, plus b."""
        for n in self.named("Div"):
            centred, root = self.made.get(n.inputs[0] or ""), self.maker(n.inputs[1], "Sqrt")
            found = self._variance(root)
            if found is not None and centred is not None and centred.op == "Sub" and centred.data == found[0]:
                x, mean, shape, eps = found
                if centred.inputs[1] == mean:
                    yield self._scaled_norm(n, x, shape, eps)

    def shifted_norms(self) -> Iterator[tuple[Node, Node]]:
        """Find x k + (b - mean(x) k) with k = w / sqrt(mean((x - mean(x))^2) + eps), as TensorFlow has layer norms."""
        for n in self.named("Reciprocal", "Rsqrt"):
            found = self._variance(self.maker(n.data, "Sqrt") if n.op == "Reciprocal" else n)
            scaled = self.reader(n, "Mul")
            if found is None:
                continue
            (x, mean, shape, eps), k = found, n
            vectors: list[str | None] = [None, None]
            if scaled is not None and scaled[1] in self.graph.weights:
                k, vectors[0] = scaled
            products = [u for u in self.users[k.output] if u.op == "Mul" and len(u.inputs) == 2]
            of_x = [u for u in products if {*u.inputs} == {x, k.output}]
            moved = [u for u in products if u not in of_x]
            if len(products) != len(self.users[k.output]) or len(of_x) != 1 or len(moved) != 1:
                continue
            last, vectors[1] = self._shifted(of_x[0], moved[0], mean, k.output)
            if last is not None and all(v is None or self._is_row(v, shape[-1]) for v in vectors):
                scales = [None if v is None else self.flat(v) for v in vectors]
                attrs = {"normalized_shape": (shape[-1],), "eps": eps}
                inputs = (x, *scales) if any(scales) else (x,)
                if len(shape) == 1:
                    yield last, last.with_(op="LayerNorm", inputs=inputs, attrs=attrs, layer_type="LayerNorm")

    def _is_row(self, weight: str, size: int | None) -> bool:
        """Return whether a weight has one element for each place along the last axis."""
        w = self.graph.weights[weight]
        return w.dim() > 0 and w.numel() == w.shape[-1] == size

    def _shifted(self, of_x: Node, moved: Node, mean: str, k: str) -> tuple[Node | None, str | None]:
        """Return the node of x k + (b - mean k), and b; no node for anything else."""
        (other,) = [i for i in moved.inputs if i != k] or [""]
        negative = self.made.get(other or "")
        minus = negative is not None and negative.op == "Neg" and negative.data == mean
        if (not minus and other != mean) or not self.alone(of_x.output) or not self.alone(moved.output):
            return None, None
        last, bias = self.users[moved.output][0], None
        if of_x.output not in last.inputs:
            (bias,) = [i for i in last.inputs if i != moved.output] or [None]
            fits = last.op == ("Add" if minus else "Sub") and bias in self.graph.weights and self.alone(last.output)
            if not fits or (not minus and last.data != bias):
                return None, None
            last, minus, moved = self.users[last.output][0], True, last
        if {*last.inputs} != {of_x.output, moved.output} or last.op != ("Add" if minus else "Sub"):
            return None, None
        return (last, bias) if minus or last.data == of_x.output else (None, None)

    def _variance(self, root: Node | None) -> tuple[str, str, list[int | None], float] | None:
        """Return x, its mean, the sizes of its last axes and eps of the root of mean((x - mean(x))^2) + eps."""
        shifted = self.maker(root.data, "Add") if root is not None else None
        if shifted is None:
            return None
        variance, eps = (shifted.inputs if shifted.inputs[1] in self.graph.weights else shifted.inputs[::-1])[:2]
        over, square = self._mean_of(self.made.get(variance or ""))
        if square is None:
            return None
        centred = self.made.get(square.data)
        squared = (square.op == "Mul" and {*square.inputs} == {square.data}) or (
            square.op == "Pow" and self.number(square.inputs[1] or "") == 2
        )
        if not squared or centred is None or centred.op != "Sub":
            return None
        x, mean = centred.data, centred.inputs[1] or ""
        axes, source = self._mean_of(self.made.get(mean), kept=False)
        shape = list(self.graph.shape(x)[axes[0] :]) if axes else []
        takes = source is self.made.get(x) and mean in self.made and self.made[mean].data == x
        fits = takes and bool(axes) and axes == over and len(axes) == len(shape) and None not in shape
        return (x, mean, shape, self.number(eps or "")) if fits else None

    def _mean_of(self, mean: Node | None, *, kept: bool = True) -> tuple[list[int], Node | None]:
        """Return the axes of a mean, and the node whose result it is taken of."""
        if mean is None or mean.op not in ("Mean", "GlobalAvgPool"):
            return [], None
        rank = len(self.graph.shape(mean.data))
        axes = sorted(a % rank for a in mean.attrs["axes"]) if mean.op == "Mean" else [*range(2, rank)]
        keeps = mean.op != "Mean" or mean.attrs["keepdims"] or not kept
        return axes, self.made.get(mean.data) if keeps else None

    def _scaled_norm(self, last: Node, x: str, shape: Sequence[int | None], eps: float) -> tuple[Node, Node]:
        """Return the last node of a layer norm, with its weight and bias if they follow, and the norm."""
        last, scales = self._scales(last, [s or 0 for s in shape])
        attrs = {"normalized_shape": tuple(shape), "eps": eps}
        return last, last.with_(op="LayerNorm", inputs=(x, *scales), attrs=attrs, layer_type="LayerNorm")

    def group_norms(self) -> Iterator[tuple[Node, Node]]:
        """Find a norm of [N, groups, rest] without weights between two Reshapes, perhaps times w, plus b."""
        for n in self.named("LayerNorm", "InstanceNorm"):
            before, last = self.maker(n.data, "Reshape"), self.users[n.output][0] if self.alone(n.output) else None
            if before is None or last is None or last.op != "Reshape" or not self._is_plain(n):
                continue
            shape, rows = self.graph.shape(before.data), self.graph.shape(n.data)
            whole = n.op == "InstanceNorm" or len(n.attrs["normalized_shape"]) == len(rows) - 2
            groups, channels = rows[1], shape[1] if len(shape) > 1 else None
            if not whole or not groups or not channels or channels % groups or self.graph.shape(last.output) != shape:
                continue
            last, scales = self._scales(last, (1, channels, *[1] * (len(shape) - 2)))
            attrs = {"groups": groups} if groups < channels or n.op == "InstanceNorm" else {}
            op = "GroupNorm" if attrs else "InstanceNorm"
            inputs = (before.data, *(self.flat(w) for w in scales))
            yield last, last.with_(op=op, inputs=inputs, attrs={**attrs, "eps": n.attrs["eps"]}, layer_type=op)

    def _is_plain(self, norm: Node) -> bool:
        """Check that a norm has no weights but ones, and no biases but zeros."""
        pairs = zip(norm.inputs[1:], (1, 0), strict=False)
        return all(
            w is None or (w in self.graph.weights and bool((self.graph.weights[w] == v).all())) for w, v in pairs
        )

    def _scales(self, last: Node, shape: Sequence[int]) -> tuple[Node, list[str]]:
        """Follow products and sums with constants of this shape; return the last node, and the constants."""
        found = list[str]()
        allowed = [tuple(shape), tuple(shape[1:])] if shape[0] == 1 else [tuple(shape)]
        for op in ("Mul", "Add"):
            reader = self.reader(last, op)
            sizes = None if reader is None else self.graph.shape(reader[1])
            if reader is None or reader[1] not in self.graph.weights or sizes not in allowed:
                break
            last, found = reader[0], [*found, reader[1]]
        return last, found

    def biases(self) -> Iterator[tuple[Node, Node]]:
        """Find a Linear or convolution without bias, and the sum with a constant of its channels."""
        for n in self.named("Add"):
            data = [i for i in n.inputs if i not in self.graph.weights]
            layer = self.made.get(data[0] or "") if len(data) == 1 and self.alone(data[0] or "") else None
            kind = layer.facts.kind if layer is not None else ""
            if layer is None or kind not in ("linear", "conv") or len(layer.inputs) > 2:
                continue
            bias = next(i for i in n.inputs if i is not None and i in self.graph.weights)
            channels, *behind = self.graph.shape(layer.weight)
            shape = (channels,) if kind == "linear" else (1, channels, *(1 for _ in behind[1:]))
            given, rank = self.graph.shape(bias), len(self.graph.shape(layer.output))
            rows = kind == "linear" and given == (*(1 for _ in given[1:]), channels)
            if (rows and len(given) <= rank) or given == shape or (kind == "conv" and given == shape[1:]):
                if len(given) > 1:
                    bias = self.flat(bias)
                yield n, layer.with_(name=n.name, inputs=(*layer.inputs, bias), outputs=n.outputs)

    def flat(self, weight: str) -> str:
        """Return the name of a weight with one axis."""
        if len(self.users[weight]) == 1:
            self.graph.weights[weight] = self.graph.weights[weight].flatten()
            return weight
        name = new_name(self.graph, weight)
        self.graph.weights[name] = self.graph.weights[weight].flatten()
        self.graph.trainable |= {name} if weight in self.graph.trainable else set()
        return name

    def flattened(self) -> Iterator[tuple[Node, Node]]:
        """Find a Linear between a Reshape to rows and another one, which may be merged with their neighbours.

        So exporters write a Linear of more than two axes; a merged Reshape splits or joins features too.
        """
        for n in self.named("Linear"):
            before = self.made.get(n.data)
            back = self.users[n.output][0] if self.alone(n.output) else None
            if before is None or back is None or before.op != "Reshape" or back.op != "Reshape":
                continue
            shape, width, end = self.graph.shape(before.data), self.graph.shape(n.weight), self.graph.shape(back.output)
            if shape[-1:] == width[1:] and end == (*shape[:-1], width[0]):
                yield back, n.with_(name=back.name, inputs=(before.data, *n.inputs[1:]), outputs=back.outputs)
            elif shape[-1:] == width[1:] and len(shape) > 2:
                self._reshape(n.output, (*shape[:-1], width[0]))
                yield n, n.with_(inputs=(before.data, *n.inputs[1:]))
            elif end[-1:] == width[:1] and len(end) > 2 and self.alone(before.output):
                self._reshape(before.output, (*end[:-1], width[1]))
                target = (*back.attrs["shape"][:-1], width[1])
                yield before, (joined := before.with_(attrs={**before.attrs, "shape": target}))
                yield back, n.with_(name=back.name, inputs=(joined.output, *n.inputs[1:]), outputs=back.outputs)

    def _reshape(self, value: str, shape: Sequence[int | None]) -> None:
        self.graph.values[value] = replace(self.graph.values[value], shape=tuple(shape))

    def swaps(self) -> Iterator[tuple[Node, Node]]:
        """Find a Transpose of the last two axes between Reshapes that merge and split the axes in front of them."""
        for n in self.named("Transpose"):
            before, back = self.maker(n.data, "Reshape"), self.users[n.output][0] if self.alone(n.output) else None
            if before is None or back is None or back.op != "Reshape" or n.attrs["perm"] != (0, 2, 1):
                continue
            shape = self.graph.shape(before.data)
            *lead, a, b = shape
            if len(lead) > 1 and self.graph.shape(back.output) == (*lead, b, a) and lead.count(None) < 2 and a and b:
                perm = (*range(len(lead)), len(lead) + 1, len(lead))
                yield back, back.with_(op="Transpose", inputs=(before.data,), attrs={"perm": perm})

    def lines(self) -> Iterator[tuple[Node, Node]]:
        """Find the mean of images of one row that were lines of pixels and become lines again."""
        for n in self.named("GlobalAvgPool"):
            image, back = self.maker(n.data, "Unsqueeze"), self.users[n.output][0] if self.alone(n.output) else None
            if image is None or back is None or back.op != "Squeeze" or len(self.graph.shape(n.data)) != 4:
                continue
            axes = [tuple(a % 4 for a in m.attrs["axes"]) for m in (image, back)]
            if axes[0] == axes[1] and axes[0] in ((2,), (3,)):
                yield back, n.with_(name=back.name, inputs=(image.data,), outputs=back.outputs)
