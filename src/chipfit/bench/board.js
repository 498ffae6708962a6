"use strict";
const { columns, runs } = JSON.parse(document.getElementById("data").textContent);
const FILTERS = ["study", "model", "method", "bit", "setting", "unified", "status"];
const MOST = 300; // rows and points that are drawn
const chosen = {};
let by = "below", up = true, search = "";
const $ = id => document.getElementById(id), root = document.documentElement;
$("theme").onclick = () => root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
const make = (tag, text, set = {}) => Object.assign(document.createElement(tag), { textContent: text ?? "" }, set);
const text = v => v === null || v === undefined ? "" : typeof v === "number" && !Number.isInteger(v) ? v.toFixed(2) : String(v);

for (const key of FILTERS) {
  const values = [...new Set(runs.map(r => r[key]).filter(v => v !== null && v !== ""))].sort((a, b) => a > b ? 1 : -1);
  if (values.length < 2 && key !== "unified") continue;
  const select = make("select", "", { id: `filter-${key}`, ariaLabel: columns[key] });
  select.append(make("option", `${columns[key]}: all`, { value: "" }), ...values.map(v => make("option", text(v), { value: v })));
  select.onchange = () => { chosen[key] = select.value; draw(); };
  $("filters").append(select);
}
const find = make("input", "", { type: "search", placeholder: "name", id: "search" });
find.oninput = () => { search = find.value; draw(); };
$("filters").append(find);

const head = make("tr");
for (const [key, title] of Object.entries(columns)) {
  const button = make("button", title);
  button.onclick = () => { up = by === key ? !up : true; by = key; draw(); };
  const th = make("th"); th.dataset.key = key; th.append(button); head.append(th);
}
$("runs").tHead.append(head);

function visible() {
  const kept = runs.filter(r => r.name.includes(search) && FILTERS.every(k => !chosen[k] || String(r[k]) === chosen[k]));
  const last = v => v === null || v === undefined;
  return kept.sort((a, b) => last(a[by]) - last(b[by]) || (a[by] > b[by] ? 1 : a[by] < b[by] ? -1 : 0) * (up ? 1 : -1));
}

function draw() {
  const rows = visible();
  for (const th of head.children) th.ariaSort = th.dataset.key === by ? (up ? "ascending" : "descending") : "none";
  $("shown").textContent = rows.length > MOST ? `the first ${MOST} of ${rows.length}` : `${rows.length} of ${runs.length}`;
  $("runs").tBodies[0].replaceChildren(...rows.slice(0, MOST).map(r => {
    const tr = make("tr");
    for (const key of Object.keys(columns)) {
      const td = make("td", key === "name" ? "" : text(r[key]));
      if (key === "name") td.append(make("a", r.name, { href: `#${r.key}` }));
      tr.append(td);
    }
    return tr;
  }));
  pareto(rows.filter(r => r.size && r.top1 !== null));
}

function pareto(rows) {
  const W = 1100, H = 320, x = rows.map(r => Math.log(r.size)), y = rows.map(r => r.top1);
  const scale = (v, low, high, from, to) => high > low ? from + (v - low) / (high - low) * (to - from) : (from + to) / 2;
  const ends = v => v.reduce(([a, b], c) => [Math.min(a, c), Math.max(b, c)], [Infinity, -Infinity]);
  const [x0, x1] = ends(x), [y0, y1] = ends(y), front = new Set();
  let best = -Infinity;
  for (const r of [...rows].sort((a, b) => a.size - b.size || b.top1 - a.top1)) if (r.top1 > best) { best = r.top1; front.add(r); }
  const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  const add = (tag, set, label) => {
    const e = document.createElementNS(ns, tag);
    for (const [k, v] of Object.entries(set)) e.setAttribute(k, v);
    if (label !== undefined) e.textContent = label;
    svg.append(e);
    return e;
  };
  if (!rows.length) { $("pareto").replaceChildren(make("p", "no run has both")); return; }
  add("text", { x: 0, y: 14 }, `${y1.toFixed(1)} %`); add("text", { x: 0, y: H - 24 }, `${y0.toFixed(1)} %`);
  add("text", { x: 60, y: H - 4 }, `${(Math.exp(x0) / 1e3).toFixed(1)} kB`);
  add("text", { x: W, y: H - 4, "text-anchor": "end" }, `${(Math.exp(x1) / 1e3).toFixed(1)} kB`);
  const drawn = rows.length > MOST ? rows.filter((r, k) => front.has(r) || k % Math.ceil(rows.length / MOST) === 0) : rows;
  for (const r of drawn) {
    const on = front.has(r);
    const dot = add("circle", {
      cx: scale(Math.log(r.size), x0, x1, 70, W - 10), cy: scale(r.top1, y0, y1, H - 30, 10), r: on ? 5 : 4,
      fill: on ? "var(--c1)" : "none", stroke: "var(--c1)", class: on ? "front" : "behind",
    });
    const title = document.createElementNS(ns, "title");
    title.textContent = `${r.name}: ${r.top1.toFixed(2)} %`;
    dot.append(title);
    dot.onclick = () => { location.hash = r.key; };
  }
  $("pareto").replaceChildren(svg);
}

function one() {
  const r = runs.find(q => `#${q.key}` === location.hash);
  $("one").hidden = !r;
  $("one-title").textContent = r ? r.name : "";
  if (!r) return;
  const told = r.outcome ?? { error: r.error };
  const table = make("table");
  for (const [key, value] of Object.entries(told)) {
    const tr = make("tr"), cell = make("td");
    cell.append(typeof value === "object" ? make("pre", JSON.stringify(value, null, 1)) : make("span", text(value)));
    tr.append(make("th", key), cell);
    table.append(tr);
  }
  $("one").replaceChildren(table);
  $("one-title").scrollIntoView();
}
window.onhashchange = one;
draw();
one();
document.body.dataset.ready = String(runs.length);
