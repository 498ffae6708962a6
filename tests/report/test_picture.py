"""The network as a picture: boxes are kernels, lines are what they read, and nothing overlaps or is cut off."""

import random
import re
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from chipfit.report.html import page
from chipfit.report.layout import place
from chipfit.report.picture import MOST, picture
from tests.build import model_of, quantized, sequential


def drawn(report):
    """Return the boxes of a report's picture by their id, and its lines as (source, target)."""
    root = ElementTree.fromstring(str(picture(report)))
    boxes = {g.get("id"): g for g in root.iter("g")}
    return boxes, {(p.get("data-from"), p.get("data-to")) for p in root.iter("path")}


def test_a_box_is_a_kernel_and_a_line_is_what_it_reads(result):
    boxes, lines = drawn(result.report)
    names = {key: "".join(g.find("text").itertext()) for key, g in boxes.items()}
    assert len(boxes) == len(result.report.kernels) + 1
    edges = {(names[a], names[b]) for a, b in lines}
    assert {("x", "stem.0"), ("stem.0", "a.0"), ("stem.0", "add_"), ("b.0", "add_"), ("a.0", "a.2")} <= edges
    fused = next(g for g in boxes.values() if g.find("text").text == "stem.0")
    assert [t.text for t in fused.iter("text")] == ["stem.0", "Conv2D", "Relu"]


def test_borders_and_colours_are_how_it_runs_and_how_well(result):
    noise = {"a.0": 30.0, "a.2": 14.9, "b.0": 15.0, "head": None}
    layers = tuple(replace(r, sqnr_db=noise.get(r.name, r.sqnr_db)) for r in result.report.layers)
    boxes, _ = drawn(replace(result.report, layers=layers))
    by_name = {g.find("text").text: g for g in boxes.values()}
    quality = {name: by_name[name].get("data-sqnr") for name in noise}
    assert quality == {"a.0": "good", "a.2": "bad", "b.0": "weak", "head": "none"}
    assert by_name["a.2"].get("class") == "k float" and by_name["a.0"].get("class") == "k int"


def network(count, seed):
    """Return sizes of boxes and edges of a random network with long skips."""
    draw = random.Random(seed)
    sizes = [(draw.choice([100.0, 184.0]), draw.choice([30.0, 60.0])) for _ in range(count)]
    edges = [(draw.randrange(max(0, b - 6), b), b) for b in range(1, count)]
    edges += [tuple(sorted(draw.sample(range(count), 2))) for _ in range(count // 5)]
    return sizes, edges


@pytest.mark.parametrize("seed", range(4))
def test_boxes_do_not_overlap_and_lines_go_down(seed):
    sizes, edges = network(60, seed)
    found = place(sizes, edges)
    boxes = [(x, y, x + w, y + h) for (x, y), (w, h) in zip(found.boxes, sizes, strict=True)]
    for a, b in combinations(boxes, 2):
        assert a[2] <= b[0] + 1e-6 or b[2] <= a[0] + 1e-6 or a[3] <= b[1] or b[3] <= a[1]
    assert min(b[0] for b in boxes) >= -1e-6 and max(b[2] for b in boxes) <= found.width + 1e-6
    assert max(b[3] for b in boxes) <= found.height + 1e-6
    assert set(found.lines) == set(edges)
    for (a, b), points in found.lines.items():
        assert points[0][1] == boxes[a][3] and points[-1][1] == boxes[b][1]
        assert [y for _, y in points] == sorted(y for _, y in points)
        inside = [(x, y) for x, y in points[1:-1] for b in boxes if b[0] < x < b[2] and b[1] <= y <= b[3]]
        assert inside == []  # a line passes beside the boxes of the ranks between


def test_a_chain_is_a_straight_line():
    found = place([(100.0, 30.0)] * 5, [(k, k + 1) for k in range(4)])
    assert {x for x, _ in found.boxes} == {0.0} and found.width == 100.0


def test_hundreds_of_kernels_are_drawn_and_thousands_are_not(result):
    r = result.report.layers[0]
    rows = [replace(r, node=f"n{k}", layer=f"n{k}", group="", reads=(f"n{k - 1}",)) for k in range(MOST + 1)]
    boxes, lines = drawn(replace(result.report, layers=tuple(rows[:400])))
    assert len(boxes) == 401 and len(lines) == 399
    assert picture(replace(result.report, layers=tuple(rows))) is None
    text = page(replace(result.report, layers=tuple(rows)))
    assert 'id="net"' not in text and f"more than {MOST} kernels" in text


def test_a_report_of_before_reads_were_known_has_no_picture(result):
    layers = tuple(replace(r, reads=()) for r in result.report.layers)
    assert picture(replace(result.report, layers=layers)) is None


def test_names_are_no_markup(result):
    evil = "</text><script>1</script>&"
    layers = tuple(replace(r, layer=evil, op=evil) for r in result.report.layers)
    boxes, _ = drawn(replace(result.report, layers=layers))
    assert any("script" in "".join(g.itertext()) for g in boxes.values())


PRESS = """
  const box = [...document.querySelectorAll("#net g")].find(g => g.textContent.startsWith("a.2"));
  box.dispatchEvent(new MouseEvent("click"));
  const facts = document.getElementById("facts").textContent;
  const lines = document.querySelectorAll("#net path.on").length;
  [...document.querySelectorAll("#facts button")].find(b => b.textContent === "b.0").click();
  const next = document.querySelector("#facts h3").textContent;
  [...document.querySelectorAll("#facts button")].find(b => b.textContent === "row in the table").click();
  const row = document.querySelector("tr.mark td").textContent;
  document.querySelector("button[data-colour=wsqnr]").click();
  const colour = document.getElementById("canvas").dataset.colour;
  return [facts.includes("lists no rule for Gelu"), lines, next, row, colour].join("|");
"""


def probe(text, script):
    """Return a page that runs a script at its end and keeps the result in an attribute."""
    run = f"<script>document.documentElement.dataset.probe = (() => {{ {script} }})()</script>"
    return text.replace("</body>", f"{run}</body>")


@pytest.mark.chromium
def test_a_press_shows_facts_and_neighbours(result, browse):
    dom, console = browse(probe(page(result.report), PRESS))
    assert console == []
    assert re.search(r'data-probe="([^"]*)"', dom)[1] == "true|2|b.0|b.0|wsqnr"


@pytest.mark.chromium
def test_on_a_phone_nothing_is_wider_than_the_screen(browse):
    torch.manual_seed(0)
    wide = nn.ModuleList(nn.Conv2d(3, 4, 1) for _ in range(12))
    branches = model_of(lambda m, x: torch.cat([branch(x) for branch in m.wide], 1), wide=wide)
    report = quantized(sequential(branches), torch.randn(4, 3, 4, 4)).report
    script = "const wide = [document.documentElement, document.getElementById('canvas')].map(e => e.scrollWidth);"
    script += "return [wide[0] <= innerWidth, wide[1] > innerWidth].join()"
    dom, console = browse(probe(page(report), script), 500)  # the least width of a headless window
    assert console == [] and 'data-probe="true,true"' in dom
