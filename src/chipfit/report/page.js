"use strict";
const $ = id => document.getElementById(id), NS = "http://www.w3.org/2000/svg";
const { kernels, inputs, tensors, curve, readers } = JSON.parse($("data").textContent), tip = $("tip"), root = document.documentElement;
const html = (tag, props, ...kids) => { const e = Object.assign(document.createElement(tag), props); e.append(...kids); return e };
const svg = (tag, attrs, ...kids) => { const e = document.createElementNS(NS, tag); for (const k in attrs) e.setAttribute(k, attrs[k]); e.append(...kids); return e };
const num = x => x === null ? "" : x !== 0 && (Math.abs(x) >= 1e4 || Math.abs(x) < 1e-3) ? x.toExponential(2) : String(+x.toPrecision(4));

/* one tooltip for pointer and keyboard; screen readers get the same text as a label */
function explain(e, text) {
  const at = (x, y) => {
    tip.textContent = text; tip.style.opacity = 1;
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (y + 14 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 14) + "px";
  };
  const off = () => tip.style.opacity = 0;
  e.setAttribute("aria-label", text);
  e.addEventListener("pointermove", p => at(p.clientX, p.clientY));
  e.addEventListener("focus", () => { const b = e.getBoundingClientRect(); at(b.left + b.width / 2, b.top) });
  e.addEventListener("pointerleave", off); e.addEventListener("blur", off);
}
addEventListener("keydown", e => { if (e.key === "Escape") tip.style.opacity = 0 });
$("theme").onclick = () => root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";

/* a kernel's row of the table */
function mark(i) { document.querySelectorAll("tr.mark").forEach(t => t.classList.remove("mark")); const t = $("k" + i); t.hidden = false; t.classList.add("mark"); t.scrollIntoView({ block: "center" }) }

/* the network: select a kernel, see its facts and neighbours, change the size */
const net = $("net"), canvas = $("canvas");
if (net) {
  const [wide, tall] = net.getAttribute("viewBox").split(" ").slice(2).map(Number), at = id => id[0] === "i" ? inputs[id.slice(1)] : kernels[id.slice(1)];
  const write = r => [["operators", r.ops], ["runs in", r.exec], ["why", r.why], ["format", r.format], ["scale", r.scale === null ? "" : num(r.scale)], ["range", r.clip[0] === null ? "" : `${num(r.clip[0])} .. ${num(r.clip[1])}`],
    ["noise of results", r.sqnr === null ? "" : `${r.sqnr.toFixed(1)} dB`], ["noise of weights", r.wsqnr === null ? "" : `${r.wsqnr.toFixed(1)} dB`], ["integers differing", r.differing === null ? "" : String(r.differing)], ["clipped", r.clipped ? `${(100 * r.clipped).toPrecision(2)} %` : ""]];
  const links = (title, ids) => ids.length ? [html("p", { className: "soft", textContent: title }), ...ids.map(id => html("button", { type: "button", textContent: at(id).name, onclick: () => select(id, true) }))] : [];
  let lines = [...net.querySelectorAll("path")], zoom = 1;
  function select(id, look) {
    net.querySelectorAll(".sel").forEach(g => g.classList.remove("sel"));
    const g = $(id), r = at(id), list = html("dl");
    g.classList.add("sel");
    if (look) { const a = g.getBoundingClientRect(), b = canvas.getBoundingClientRect(); canvas.scrollBy(a.left - b.left - (b.width - a.width) / 2, a.top - b.top - (b.height - a.height) / 2) }
    lines.forEach(p => p.classList.toggle("on", p.dataset.from === id || p.dataset.to === id));
    for (const [what, x] of write(r)) if (x) list.append(html("dt", { textContent: what }), html("dd", { textContent: x }));
    const row = id[0] === "g" ? [html("button", { type: "button", textContent: "row in the table", onclick: () => mark(id.slice(1)) })] : [];
    const reads = lines.filter(p => p.dataset.to === id).map(p => p.dataset.from);
    const readBy = id[0] === "g" ? readers[id.slice(1)].map(n => "g" + n) : lines.filter(p => p.dataset.from === id).map(p => p.dataset.to);
    $("facts").replaceChildren(html("h3", { textContent: r.name }), list, ...row, ...links("reads", reads), ...links("is read by", readBy));
  }
  net.querySelectorAll("g").forEach(g => {
    const r = at(g.id), db = r[canvas.dataset.colour];
    g.setAttribute("aria-label", `${r.name}, ${r.ops}, ${r.exec}, ${r.format}` + (db === null ? "" : `, ${db.toFixed(1)} dB`));
    g.onclick = () => select(g.id); g.onkeydown = e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); select(g.id) } };
  });
  const scale = z => { zoom = Math.max(.15, Math.min(3, z)); net.setAttribute("width", wide * zoom); net.setAttribute("height", tall * zoom) };
  const fit = () => scale(Math.max(.3, Math.min(1, (canvas.clientWidth - 22) / wide)));
  const centre = () => { const a = net.querySelector("g").getBoundingClientRect(), b = canvas.getBoundingClientRect(); canvas.scrollLeft += a.left + a.width / 2 - b.left - b.width / 2 };
  $("fit").onclick = () => { fit(); centre() }; $("larger").onclick = () => scale(zoom * 1.3); $("smaller").onclick = () => scale(zoom / 1.3);
  const colours = document.querySelectorAll("button[data-colour]");
  colours.forEach(b => b.onclick = () => { canvas.dataset.colour = b.dataset.colour; colours.forEach(o => o.setAttribute("aria-pressed", o === b)) });
  fit(); centre();
}

/* the noise of every kernel */
const show = { measure: document.querySelector("[data-measure]")?.dataset.measure, order: "" };
function chart() {
  let list = kernels.map((k, i) => ({ ...k, i, db: k[show.measure] })).filter(k => k.db !== null);
  if (show.order) list.sort((a, b) => a.db - b.db);
  const labels = list.length <= 48, left = labels ? Math.max(34, 104 - 540 / list.length) : 34, // room for the first label, which leans to the left
     foot = labels ? 96 : 12, tall = 210, wide = Math.max(1120, left + list.length * 3.5);
  const top = Math.max(50, Math.ceil(Math.max(...list.map(k => k.db)) / 10) * 10), low = Math.min(0, ...list.map(k => k.db));
  const y = db => 8 + (top - db) / (top - low) * tall, w = (wide - left) / list.length, bar = Math.max(1, Math.min(w - 2, w * .8));
  const s = svg("svg", { viewBox: `0 0 ${wide} ${tall + foot + 8}`, width: wide > 1120 ? wide : "100%", role: "group", "aria-label": "Signal over noise of each kernel [dB]" });
  for (let db = Math.ceil(low / 10) * 10; db <= top; db += 10) {
    s.append(svg("line", { x1: left, x2: wide, y1: y(db), y2: y(db), stroke: "var(--line)", "stroke-width": db ? 1 : 1.5 }));
    if (db % 20 === 0) s.append(svg("text", { x: left - 8, y: y(db) + 4, "text-anchor": "end" }, String(db)));
  }
  list.forEach((k, j) => {
    const x = left + j * w + (w - bar) / 2, fill = k.db < 15 ? "var(--bad)" : k.db < 25 ? "var(--warn)" : "var(--c1)";
    const r = svg("rect", { x, y: Math.min(y(k.db), y(0)), width: bar, height: Math.max(1, Math.abs(y(k.db) - y(0))), rx: Math.min(3, bar / 3), fill, tabindex: 0, role: "button" });
    explain(r, `${k.name}\n${k.ops}, ${k.format}\n${k.db.toFixed(1)} dB`);
    const find = () => mark(k.i);
    r.addEventListener("click", find); r.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); find() } });
    s.append(r);
    if (labels) {
      const cx = x + bar / 2 + 4, cy = tall + 20, name = k.name.length > 18 ? "…" + k.name.slice(-17) : k.name;
      s.append(svg("text", { x: cx, y: cy, "text-anchor": "end", transform: `rotate(-42 ${cx} ${cy})`, "aria-hidden": true }, name));
    }
  });
  $("sqnr").replaceChildren(s);
}
for (const key of ["measure", "order"]) {
  const group = document.querySelectorAll(`[data-${key}]`);
  group.forEach(b => b.onclick = () => { show[key] = b.dataset[key]; group.forEach(o => o.setAttribute("aria-pressed", o === b)); chart() });
}
if ($("sqnr")) chart();

/* what the best widths lose for each budget */
if (curve.length) {
  const W = 1120, H = 260, left = 60, foot = 26, log = v => Math.log10(Math.max(v, 1e-12)), all = curve.flatMap(p => [log(p.measured), log(p.predicted)]);
  const low = Math.floor(Math.min(...all)), high = Math.max(low + 1, Math.ceil(Math.max(...all))), most = Math.max(...curve.map(p => p.share));
  const x = p => left + p.share / most * (W - left - 20), y = v => 10 + (high - log(v)) / (high - low) * (H - foot - 20);
  const s = svg("svg", { viewBox: `0 0 ${W} ${H}`, width: "100%", role: "group", "aria-label": "Loss against size" });
  for (let e = low; e <= high; e++) s.append(svg("line", { x1: left, x2: W, y1: y(10 ** e), y2: y(10 ** e), stroke: "var(--line)" }), svg("text", { x: left - 8, y: y(10 ** e) + 4, "text-anchor": "end" }, `1e${e}`));
  for (const [key, color] of [["predicted", "var(--c4)"], ["measured", "var(--c1)"]]) {
    s.append(svg("polyline", { points: curve.map(p => `${x(p).toFixed(1)},${y(p[key]).toFixed(1)}`).join(" "), fill: "none", stroke: color, "stroke-width": 1.6 }));
    for (const p of curve) {
      const dot = svg("circle", { cx: x(p), cy: y(p[key]), r: 4.5, fill: color, tabindex: 0, role: "img" });
      explain(dot, `${(100 * p.share).toFixed(0)} % of 8 bits (${Math.round(p.size).toLocaleString("en")})\n${key} loss ${num(p[key])}`);
      s.append(dot);
    }
  }
  for (const p of curve) s.append(svg("text", { x: x(p), y: H - 6, "text-anchor": "middle" }, `${(100 * p.share).toFixed(0)} %`));
  $("curve").replaceChildren(s);
}

/* one square for each quantized tensor */
for (const t of tensors) {
  const cell = html("span", { className: t.fault ? "off" : t.why ? "none" : t.differing || t.op_differing ? "some" : "", tabIndex: 0, role: "listitem" });
  explain(cell, `${t.layer || t.tensor} (${t.op})\n${t.differing.toLocaleString("en")} of ${t.end_to_end_elements.toLocaleString("en")} integers differ` +
    (t.differing ? `, by at most ${t.largest}` : "") + (t.differing || t.op_differing ? `\ngiven the device's inputs: ${t.op_differing.toLocaleString("en")} of ${t.elements.toLocaleString("en")}` : "") + (t.in_float ? "\ncomputed in float by the runtime" : "") + (t.why ? `\nnot compared: ${t.why}` : "") + (t.fault ? `\n${t.fault}` : ""));
  $("strip").append(cell);
}

/* histograms with the ends of the grid */
const ranged = [...inputs, ...kernels].filter(k => k.bars.length && k.clip[0] !== null);
function histogram(k) {
  const W = 220, H = 76, [a, b] = k.ends, [c, d] = k.clip, lo = Math.min(a, c), hi = Math.max(b, d), X = v => 3 + (v - lo) / (hi - lo || 1) * (W - 6);
  const step = (b - a) / k.bars.length, slack = k.scale / 2, peak = Math.sqrt(Math.max(...k.bars)), paths = ["", ""];
  k.bars.forEach((n, i) => {
    if (!n) return;
    const l = a + i * step, h = Math.max(1, Math.sqrt(n) / peak * (H - 6)), m = l + step / 2;
    paths[+(k.clipped > 0 && (m < c - slack || m > d + slack))] += `M${X(l).toFixed(1)} ${H}v${-h.toFixed(1)}h${Math.max(.8, X(l + step) - X(l) - .4).toFixed(1)}v${h.toFixed(1)}z`;
  });
  const s = svg("svg", { viewBox: `0 0 ${W} ${H + 17}`, role: "img", tabindex: 0 }, svg("path", { d: paths[0], fill: "var(--hist)" }), svg("path", { d: paths[1], fill: "var(--cut)" }), svg("line", { x1: 0, x2: W, y1: H, y2: H, stroke: "var(--line)" }));
  for (const [v, anchor] of [[c, "start"], [d, "end"]]) {
    const x = X(v);
    s.append(svg("line", { x1: x, x2: x, y1: 2, y2: H, stroke: "var(--accent)", "stroke-width": 1.6, "stroke-dasharray": "4 3" }), svg("text", { x: anchor === "end" ? Math.max(x, 60) : Math.min(x, W - 60), y: H + 12, "text-anchor": anchor }, num(v)));
  }
  explain(s, `${k.name}: calibration saw ${num(k.low)} .. ${num(k.high)}\nthe grid holds ${num(c)} .. ${num(d)}` + (k.clipped === null ? "" : `\n${(100 * k.clipped).toPrecision(2)} % of the values are clipped`) + (k.origin ? `\n${k.origin}` : ""));
  const cut = k.clipped > 5e-5 ? ` · clips ${(100 * k.clipped).toPrecision(2)} %` : "";
  return html("figure", { className: "mini" }, html("h3", { textContent: k.name, title: k.name }), html("p", { textContent: `${k.ops.split(" + ").at(-1)} · ${k.format.split(",")[0]}${cut}` }), s);
}
let shown = 0;
function more(count) {
  $("ranges").append(...ranged.slice(shown, shown + count).map(histogram));
  shown = Math.min(ranged.length, shown + count);
  $("more").hidden = shown === ranged.length; $("more").textContent = `show ${ranged.length - shown} more`;
}
more(24); $("more").onclick = () => more(ranged.length); $("noranges").hidden = ranged.length > 0;
addEventListener("beforeprint", () => more(ranged.length));

/* the table: filter and sort */
const body = $("kernels").tBodies[0], lines = [...body.rows], heads = [...$("kernels").tHead.rows[0].cells];
const count = () => $("count").textContent = `${lines.filter(l => !l.hidden).length} of ${lines.length}`;
$("filter").oninput = e => { const want = e.target.value.toLowerCase(); lines.forEach(l => l.hidden = !l.textContent.toLowerCase().includes(want)); count() };
const value = (l, c) => { const t = l.cells[c].dataset.by ?? l.cells[c].textContent.trim(), n = parseFloat(t); return heads[c].className === "n" ? (isNaN(n) ? Infinity : n) : t };
heads.forEach((h, c) => h.firstElementChild.onclick = () => {
  const up = h.getAttribute("aria-sort") !== "ascending";
  heads.forEach(o => o.removeAttribute("aria-sort")); h.setAttribute("aria-sort", up ? "ascending" : "descending");
  const order = (a, b) => { const x = value(a, c), y = value(b, c); return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1) };
  body.append(...[...lines].sort(order));
});
count();
root.dataset.ready = kernels.length;
