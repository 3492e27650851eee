// Makes elements, writes numbers as text and draws charts.

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "circle", "text", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

function scientific(value) {
  if (value === null || value === undefined) return "";
  const number = Number(value);
  if (number === 0) return "0";
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "NaN" : "∞";
  return number.toExponential(1).replace(/e([+-])(\d)$/, "e$10$2");
}

function short(value) {
  if (value === null || value === undefined) return "";
  const number = Number(value);
  if (number !== 0 && !(Math.abs(number) >= 0.05 && Math.abs(number) < 9999.5)) return scientific(number);
  return Math.abs(number) >= 99.95 || number === 0 ? number.toFixed(0) : number.toFixed(1);
}

// Draws a chart over the index of nodes or steps. On a logarithmic axis, zero has a line of its own
// at the bottom, and values that are not finite have one at the top.
function chart(box, { count, series, log, bands = [], numbers = [], cursor = -1, firstDivergence = -1, height, label, pick, hover }) {
  const width = Math.max(box.clientWidth, 240);
  const [left, right, top, bottom] = [52, 10, 10, 22];
  const values = series.flatMap((one) => one.values).filter((v) => v !== null && v !== undefined).map(Number);
  const good = values.filter((v) => Number.isFinite(v) && (!log || v > 0)).map((v) => (log ? Math.log10(v) : v));
  let low = Math.min(...good), high = Math.max(...good);
  if (!good.length) [low, high] = log ? [-17, 0] : [0, 1];
  if (log) [low, high] = [Math.floor(low), Math.max(Math.ceil(high), Math.floor(low) + 1)];
  else if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const zero = log && values.some((v) => v === 0), over = log && values.some((v) => !Number.isFinite(v));
  const [floor, ceiling] = [height - bottom - (zero ? 16 : 4), top + (over ? 14 : 0)];
  const x = (index) => left + ((index + 0.5) / count) * (width - left - right);
  const y = (value) => {
    if (!Number.isFinite(value)) return top;
    if (log && value <= 0) return height - bottom - 4;
    return floor - (((log ? Math.log10(value) : value) - low) / (high - low)) * (floor - ceiling);
  };
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, class: pick ? "picks" : "", role: "group", tabindex: pick ? 0 : undefined, "aria-label": label });
  const fits = (text, band) => text.length * 6.7 + 3 <= x(band.to + 0.5) - x(band.from - 0.5);
  const numbered = bands.filter((band) => band.short);
  const full = numbered.every((band) => fits(band.name, band));
  // If the bands are too narrow for their numbers, every n-th band has one.
  const every = Math.ceil(Math.max(1, ...numbered.map((band) => (band.short.length * 6.7 + 6) / (x(band.to + 0.5) - x(band.from - 0.5)))));
  bands.forEach((band, order) => {
    const [from, to] = [x(band.from - 0.5), x(band.to + 0.5)];
    if (order % 2) svg.append(make("rect", { class: "band", x: from, y: top, width: to - from, height: height - top - bottom }));
    const text = !band.short ? band.name : full ? band.name : Number(band.short) % every ? "" : band.short;
    if (text && (fits(text, band) || (band.short && !full))) svg.append(make("text", { x: (from + to) / 2, y: height - 6, "text-anchor": "middle" }, text));
  });
  const tick = (at, text) => svg.append(
    make("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }),
    make("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, text));
  const step = log ? Math.ceil((high - low) / 6) : roundUp((high - low) / 4);
  for (let v = log ? low : Math.ceil(low / step) * step; v <= high + step / 1000; v += step) tick(y(log ? 10 ** v : v), log ? `1e${v}` : String(Number(v.toPrecision(6))));
  const stride = Math.max(1, roundUp((count * 48) / (width - left - right)));
  numbers.forEach((number, i) => {
    if (i % stride === 0) svg.append(make("text", { x: x(i), y: height - 6, "text-anchor": "middle" }, number));
  });
  if (zero) tick(y(0), "0");
  if (over) tick(y(Infinity), "∞");
  if (firstDivergence >= 0) svg.append(make("line", { class: "first-divergence", x1: x(firstDivergence), x2: x(firstDivergence), y1: top, y2: height - bottom }));
  if (cursor >= 0) svg.append(make("line", { class: "cursor", x1: x(cursor), x2: x(cursor), y1: top, y2: height - bottom }));
  for (const one of series) {
    const points = one.values.map((v, i) => (v === null || v === undefined ? null : [x(i), y(Number(v))]));
    if (one.line) {
      let path = "";
      // A logarithmic axis has no zero, so the line is interrupted there.
      const isDrawn = points.map((p, i) => p && !(log && Number(one.values[i]) === 0));
      points.forEach((p, i) => { if (isDrawn[i]) path += `${isDrawn[i - 1] ? "L" : "M"}${p[0].toFixed(1)} ${p[1].toFixed(1)}`; });
      svg.append(make("path", { class: `line ${one.line}`, d: path }));
    }
    points.forEach((p, i) => { if (p && one.mark) svg.append(mark(one.mark(i), p)); });
  }
  if (pick) {
    const nearest = (event) => {
      const at = (event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right);
      return Math.min(Math.max(Math.floor(at * count), 0), count - 1);
    };
    svg.addEventListener("click", (event) => pick(nearest(event)));
    svg.addEventListener("pointermove", (event) => hover(nearest(event)));
    svg.addEventListener("pointerleave", () => hover(cursor));
    svg.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: cursor - 1, ArrowRight: cursor + 1, Home: 0, End: count - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      pick(Math.min(Math.max(to, 0), count - 1));
      box.firstChild.focus();
    });
  }
  box.replaceChildren(svg);
}

// Returns the next larger of 1, 2, 5, 10, 20, …
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value * 0.999);
}

function mark(kind, [x, y]) {
  if (kind === "candidate" || kind === "reference") return make("circle", { class: `dot ${kind}`, cx: x, cy: y, r: kind === "candidate" ? 1.8 : 2.6 });
  const r = kind === "bug" ? 5 : kind === "amplified" ? 4.5 : 3.4;
  const path = {
    bug: `M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}`,
    amplified: `M${x} ${y - r}L${x + r} ${y + r * 0.8}H${x - r}Z`,
  }[kind];
  return make("path", { class: `mark ${kind}`, d: path ?? `M${x} ${y - r}L${x + r} ${y}L${x} ${y + r}L${x - r} ${y}Z` });
}
