"""Two reports beside each other: what differs, operator by operator."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chipfit.plan.diff import Differences
from chipfit.report.pairs import ComparisonData, Pair, noise, shown
from chipfit.report.record import LayerRow, ReportData
from chipfit.report.report import write_shown
from chipfit.screen import Summary, SummaryRepr
from chipfit.screen.figures import BLUE, ORANGE, drawn, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Comparison(SummaryRepr, ComparisonData):
    """Two reports beside each other, in the forms in which they are shown.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> data = [torch.rand(8, 3, 16, 16) for _ in range(4)]
        >>> result = chipfit.quantize(net, data, "tflite_int8", progress=False)
        >>> found = chipfit.compare(result, result)
        >>> found.equal, len(found.pairs)
        (True, 2)
    """

    def save(self, path: str | Path) -> Path:
        """Write the comparison: a self-contained page for `.html`, data for `.json`.

        Raises:
            ExportError: the suffix is another, or the file cannot be written; nothing is left behind.
        """
        from chipfit.report.html import comparison_page

        return write_shown(self, path, comparison_page)

    def plot(self, path: str | Path | None = None, count: int = 48) -> "Figure":
        """Return a matplotlib figure of the noise of each operator in both reports.

        Args:
            path: file to write as well, in a format that matplotlib writes.
            count: number of operators; of more, those with the largest change.

        Raises:
            ExportError: matplotlib is not installed, or the file cannot be written.
        """
        both = ((p.layer, *noise(p)) for p in self.pairs)
        known = [(name, x, y) for name, x, y in both if x is not None and y is not None]
        least = sorted((abs(x - y) for _, x, y in known), reverse=True)[: max(count, 1)][-1:]
        rows = [row for row in known if abs(row[1] - row[2]) >= (least or [0.0])[0]]
        figure = new_figure(8, 1.5 + 0.25 * len(rows))
        axes, places = figure.subplots(), range(len(rows))
        axes.hlines(places, [x for _, x, _ in rows], [y for *_, y in rows], color="#868e96", linewidth=1)
        for k, (color, mark) in enumerate(((BLUE, "o"), (ORANGE, "s"))):
            axes.plot([row[1 + k] for row in rows], places, mark, color=color, label=self.names[k], markersize=5)
        axes.set_yticks(places, [name for name, *_ in rows])
        axes.invert_yaxis()
        axes.set_xlabel("signal over quantization noise [dB]")
        axes.grid(axis="x", alpha=0.3)
        axes.legend(loc="best")
        return drawn(figure, path)

    def _summary(self) -> Summary:
        a, b = self.names
        counts = [sum(p.b is None for p in self.pairs), sum(p.a is None for p in self.pairs)]
        other = sum(bool(p.differs) for p in self.pairs)
        title = "equal" if self.equal else f"{other} of {len(self.pairs)} operators differ"
        title += "".join(f", {n} only in the {k}" for n, k in zip(counts, ("first", "second"), strict=True) if n)
        facts = {what: f"{shown(x)} | {shown(y)}" for what, (x, y) in self.facts.items()}
        if self.plans is not None:
            facts["plans"] = (
                f"{len(self.plans)} differences in all tensors, nodes and limits" if self.plans else "equal"
            )
        rows = [
            (p.layer, p.op, "; ".join(_words(p, a, b)), *(noise(p)))
            for p in sorted(self.pairs, key=lambda p: p.alike)
            if not p.alike
        ]
        header = ("layer", "operator", f"{a} | {b}", "dB", "dB")
        return Summary(f"{a} | {b}: {title}", facts, header, rows, "comparison.pairs, comparison.save(path)")


def compare_reports(
    a: ReportData,
    b: ReportData,
    names: tuple[str, str],
    plans: Differences | None = None,
    more: Mapping[str, Any] | None = None,
) -> Comparison:
    """Return two reports beside each other. Operators are matched by their layers, then by their order.

    Args:
        plans: differences of the plans.
        more: further facts: label -> both values.
    """
    found = [facts_of(a), facts_of(b)]
    labels = dict.fromkeys(what for f in found for what, x in f.items() if x is not None)
    facts = {what: (found[0].get(what), found[1].get(what)) for what in labels}
    return Comparison(names, {**facts, **(more or {})}, tuple(_pairs(a.layers, b.layers)), plans)


def _pairs(a: Sequence[LayerRow], b: Sequence[LayerRow]) -> list[Pair]:
    """Return the rows of two reports in pairs.

    What is left when rows of one layer and operator are matched has other names, as in the files of converters: it is
    matched by the order of the operators.
    """
    ours, theirs = dict(_keyed(a)), dict(_keyed(b))
    left, right = ([k for k in one if k not in other] for one, other in ((ours, theirs), (theirs, ours)))
    order = SequenceMatcher(None, [op for _, op, _ in left], [op for _, op, _ in right], autojunk=False)
    other = {left[m.a + k]: right[m.b + k] for m in order.get_matching_blocks() for k in range(m.size)}
    pairs = [Pair(k[0], k[1], row, theirs.get(other.get(k, k))) for k, row in ours.items()]
    taken = {*ours, *other.values()}
    return [*pairs, *(Pair(k[0], k[1], None, row) for k, row in theirs.items() if k not in taken)]


def facts_of(r: ReportData) -> dict[str, Any]:
    """Return facts about a whole model as numbers and short texts, with units in the labels."""
    widths = Counter(row.weight_format for row in r.layers if row.weight_format)
    merit, v, speed = r.merit or {}, r.verification or {}, r.speed or {}
    proof = f"{r.verdict}: {v['differing']} of {v['among']} integers differ from {v['runtime']}" if v else None
    accuracy = v.get("accuracy", {})
    return {
        "platform": r.platform,
        "weights [bytes]": r.quantized_bytes,
        "formats of weights": ", ".join(f"{n} x {name}" for name, n in sorted(widths.items())) or None,
        "operators in integers": f"{r.integers} of {len(r.layers)}",
        "multiplications in integers [%]": round(100 * r.integer_share, 2),
        "outputs [dB]": merit.get("sqnr_db"),
        "device": proof,
        **{f"top-1, {form} [%]": round(100 * x, 2) for form, x in accuracy.items()},
        "time to quantize [s]": round(sum(r.timings.values()), 2) if r.timings else None,
        "time of a call [ms]": speed.get("quantized_ms"),
    }


def _keyed(rows: Sequence[LayerRow]) -> Iterator[tuple[tuple[str, str, int], LayerRow]]:
    """Yield rows with keys: layer, operator, and the number of earlier rows with both."""
    seen: Counter[tuple[str, str]] = Counter()
    for r in rows:
        yield (r.name, r.op, seen[r.name, r.op]), r
        seen[r.name, r.op] += 1


def _words(p: Pair, a: str, b: str) -> list[str]:
    if p.a is None or p.b is None:
        return [f"only in {b if p.a is None else a}"]
    return [f"{what} {shown(x)} | {shown(y)}" for what, (x, y) in p.differs.items()]
