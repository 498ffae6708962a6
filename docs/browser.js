/* What is wrong on an open page: what is cut off, pale, missing or without a name; and how much was looked at. */
async (width, scheme) => {
  const found = [];
  const counts = {texts: 0, images: 0, controls: 0, "texts left out (hidden)": 0, "texts left out (on a picture)": 0};
  await document.fonts.ready;
  await Promise.all([...document.images].map((i) => { i.loading = "eager"; return i.decode().catch(() => {}); }));
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));

  const named = (e) => {
    const own = e.id ? `#${e.id}` : "", kind = typeof e.className === "string" ? e.className.trim() : "";
    return `${e.tagName.toLowerCase()}${own}${kind ? "." + kind.replace(/\s+/g, ".") : ""}`;
  };
  const parents = (e) => { const all = []; for (; e; e = e.parentElement) all.push(e); return all; };

  /* Colours: [red, green, blue, alpha], each 0..1. */
  const colour = (text) => {
    const n = text.match(/[\d.]+(e-\d+)?/g)?.map(Number);
    if (/^rgba?\(/.test(text)) return [n[0] / 255, n[1] / 255, n[2] / 255, n[3] ?? 1];
    if (/^color\(srgb /.test(text)) return [n[0], n[1], n[2], n[3] ?? 1];
    throw new Error(`a colour that is not read: ${text}`);
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((x, k) => x * a + under[k] * (1 - a));
  const light = (c) => {
    const [r, g, b] = c.map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  /* The colour at an element, outermost ancestor first; groups with an opacity are mixed as a whole. */
  const painted = (chain, ink, under) => {
    if (!chain.length) return ink ? over(ink, under) : under;
    const style = getComputedStyle(chain[0]), o = Number(style.opacity);
    const own = painted(chain.slice(1), ink, over(colour(style.backgroundColor), under));
    return own.map((x, k) => x * o + under[k] * (1 - o));
  };
  /* What lies below a text of a drawing: the first opaque shape at its middle, which must be on the screen to be found. */
  const below = (text) => {
    text.scrollIntoView({block: "center", inline: "center", behavior: "instant"});
    const box = text.getBoundingClientRect();
    const at = document.elementsFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
    return at.find((e) => e instanceof SVGGeometryElement && colour(fill(e))[3] === 1);
  };
  const fill = (e) => { const f = getComputedStyle(e).fill; return f === "none" ? "rgba(0, 0, 0, 0)" : f; };

  const canvas = document.documentElement;
  const blank = getComputedStyle(canvas).colorScheme.includes("dark") ? [0.07, 0.07, 0.07] : [1, 1, 1];

  /* Whether a box is cut by an ancestor that neither scrolls nor shows what overflows, or by the screen. */
  const cut = (box, element) => {
    for (const e of parents(element)) {
      const style = getComputedStyle(e), frame = e.getBoundingClientRect();
      if (e === document.body || e === canvas) break;
      if (/auto|scroll/.test(style.overflowX)) return "";
      if (/hidden|clip/.test(style.overflowX) && (box.left < frame.left - 1 || box.right > frame.right + 1))
        return named(e);
      if (/hidden|clip/.test(style.overflowY) && (box.top < frame.top - 1 || box.bottom > frame.bottom + 1))
        return named(e);
      if (style.position === "fixed") break;
    }
    return box.left < -1 || box.right > width + 1 ? "the screen" : "";
  };
  const offScreen = (box) => box.right <= 0 || box.left >= width || box.width <= 1 || box.height <= 1;

  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode()); ) {
    const element = node.parentElement, text = node.data.trim();
    if (!text || /^(script|style|noscript|template|title|desc)$/i.test(element.tagName)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter((b) => b.width && b.height);
    const seen = element.checkVisibility({opacityProperty: true, visibilityProperty: true});
    if (!seen || !boxes.length || boxes.every(offScreen)) { counts["texts left out (hidden)"]++; continue; }
    const shown = `'${text.slice(0, 40)}' in ${named(element)}`;
    const by = boxes.map((b) => cut(b, element)).find(Boolean);
    if (by) found.push(`${shown} is cut off by ${by}`);
    const chain = parents(element).reverse(), style = getComputedStyle(element);
    const drawing = element instanceof SVGElement;
    if (chain.some((e) => getComputedStyle(e).backgroundImage !== "none")) {
      counts["texts left out (on a picture)"]++;
      continue;
    }
    counts.texts++;
    const ink = colour(drawing ? fill(element) : style.color);
    let ground = painted(chain, null, blank), letters = painted(chain, ink, blank);
    const shape = drawing && below(element);
    if (shape) { ground = colour(fill(shape)).slice(0, 3); letters = over(ink, ground); }
    const size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const least = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5, ratio = contrast(letters, ground);
    if (ratio < least) found.push(`${shown} has a contrast of ${ratio.toFixed(2)}, below ${least}`);
  }

  for (const image of document.images) {
    if (!image.checkVisibility()) continue;
    counts.images++;
    const file = image.getAttribute("src").slice(0, 60);
    if (!image.complete || !image.naturalWidth) found.push(`image ${file} is not loaded`);
    if (!image.alt.trim()) found.push(`image ${file} has no alternative text`);
    const by = cut(image.getBoundingClientRect(), image);
    if (by) found.push(`image ${file} is cut off by ${by}`);
  }
  for (const e of document.querySelectorAll("a[href], button, input:not([type=hidden]), select, summary")) {
    if (!e.checkVisibility()) continue;
    counts.controls++;
    const label = e.labels?.length ? e.labels[0].innerText : "";
    const name = [e.innerText, e.ariaLabel, e.title, e.placeholder, e.querySelector("img")?.alt, label].some((x) => x?.trim());
    if (!name) found.push(`${named(e)} has no name`);
  }
  const ground = light(painted([canvas, document.body], null, blank));
  if ((scheme === "dark") !== ground < 0.2) found.push(`the page is not ${scheme}`);
  const wide = document.scrollingElement.scrollWidth;
  if (wide > width) found.push(`the page is ${wide} pixels wide`);
  if (!document.title.trim()) found.push("the page has no title");
  if (!canvas.lang) found.push("the page names no language");
  if (!document.querySelector("meta[name=viewport]")) found.push("the page has no viewport for phones");
  if (document.querySelectorAll("h1").length !== 1) found.push(`${document.querySelectorAll("h1").length} first headings`);
  return {counts, found};
}
