"use strict";
const $ = id => document.getElementById(id), root = document.documentElement, lines = [...$("pairs").tBodies[0].rows];
$("theme").onclick = () => root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
function show() {
  const want = $("filter").value.toLowerCase(), only = $("different").getAttribute("aria-pressed") === "true";
  lines.forEach(l => l.hidden = (only && l.dataset.alike === "1") || !l.textContent.toLowerCase().includes(want));
  $("count").textContent = `${lines.filter(l => !l.hidden).length} of ${lines.length}`;
}
$("filter").oninput = show;
$("different").onclick = () => { $("different").setAttribute("aria-pressed", $("different").getAttribute("aria-pressed") !== "true"); show() };
show();
root.dataset.ready = lines.length;
