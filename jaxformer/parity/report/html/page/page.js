const report = JSON.parse(document.getElementById("report").textContent);
const nodes = report.nodes;
const SYMBOLS = { exact: "=", rounding: "≈", amplified: "▲", bug: "✗" };
const STAGES = {
  output: ["output", "each node’s output, run on the reference’s inputs"],
  whole: ["in the whole model", "each node’s output in the whole model, with the errors of earlier nodes in it"],
  gradients: ["gradients", "the worst of each node’s gradients"],
  parameters: ["parameters", "the worst of each node’s own parameters"],
};
// The order of a difference's numbers, as page_data.py packs them.
const [ERROR, ALLOWED, EXCESS, CANDIDATE, REFERENCE, ULPS] = [0, 1, 2, 3, 4, 5];
const state = { node: -1, stage: "output" };
const find = (selector) => document.querySelector(selector);
const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// An output in the whole model also holds the errors of earlier nodes: no node is judged by it.
const isJudged = (stage) => stage !== "whole";
const isBug = (difference) => !(Number(difference[EXCESS]) <= 1);
const worstOf = (differences) =>
  Object.values(differences).reduce((a, b) => (a && !(Number(b[EXCESS]) > Number(a[EXCESS])) ? a : b), null);
const differenceAt = (node, stage) =>
  stage === "gradients" || stage === "parameters" ? worstOf(node[stage]) : node[stage];
const place = (node) => node.path || "the whole model";

// ---- Plots ----------------------------------------------------------------------------------

// The spans of the outermost modules, marked along the plot.
function bands() {
  const found = [];
  nodes.forEach((node, i) => {
    if (node.depth === 1) found.push({ from: i, to: i, name: node.path, short: (node.path.match(/\d+$/) ?? [""])[0] });
    else if (node.depth > 1 && found.length) found[found.length - 1].to = i;
  });
  return found;
}

function drawErrors() {
  const differences = nodes.map((node) => differenceAt(node, state.stage));
  const column = (which) => differences.map((d) => (d ? d[which] : null));
  const judged = isJudged(state.stage);
  const kind = (i) => {
    const verdict = nodes[i].verdict;
    if (!judged) return verdict;
    return isBug(differences[i]) ? "bug" : verdict === "bug" ? "rounding" : verdict;
  };
  find("#overview").classList.toggle("measured", column(CANDIDATE).some((v) => v !== null));
  find("#overview").classList.toggle("judged", judged);
  chart(find("#errors"), {
    count: nodes.length, log: true, height: innerWidth < 620 ? 220 : 260, cursor: state.node, bands: bands(),
    label: `${STAGES[state.stage][1]}; left and right arrow choose a node`,
    series: [
      { values: column(REFERENCE), line: "reference thin", mark: () => "reference" },
      { values: column(CANDIDATE), line: "candidate thin", mark: () => "candidate" },
      { values: judged ? column(ALLOWED) : [], line: "allowed" },
      { values: column(ERROR), mark: kind },
    ],
    pick: (index) => select(index), hover: readout,
  });
  readout(state.node);
}

function readout(index) {
  const node = nodes[index], difference = node && differenceAt(node, state.stage);
  const text = !node ? "" : difference
    ? `: ${scientific(difference[ERROR])}` + (isJudged(state.stage) ? `, allowed ${scientific(difference[ALLOWED])}` : "") +
      (difference[CANDIDATE] === null ? "" : `; in ${report.dtype} candidate ${scientific(difference[CANDIDATE])}, reference ${scientific(difference[REFERENCE])}`)
    : ": not measured";
  find("#readout").replaceChildren(...(node ? [make("b", {}, place(node)), text] : []));
}

function drawStages() {
  const present = Object.keys(STAGES).filter((stage) => nodes.some((node) => differenceAt(node, stage)));
  find(".stages").replaceChildren(...present.map((stage) => make("button", {
    type: "button", title: STAGES[stage][1], "aria-pressed": String(stage === state.stage),
    onclick: () => { state.stage = stage; drawStages(); drawErrors(); find(".stages [aria-pressed=true]").focus(); },
  }, STAGES[stage][0])));
}

function drawSteps() {
  if (!report.steps.length) return;
  const diverges = (step) => isBug(step.difference) && step.note !== "tie";
  const firstDivergence = report.steps.findIndex(diverges);
  const column = (name) => report.steps.map((step) => step[name]);
  const common = { count: report.steps.length, firstDivergence, height: 170, numbers: column("number") };
  if (report.mode !== "generate") {
    chart(find("#step-losses"), { ...common, label: "losses of candidate and reference", series: [
      { values: column("reference"), line: "reference" }, { values: column("candidate"), line: "candidate" }] });
    find("#step-losses").append(make("p", { class: "note" }, "loss in nats per token: ",
      make("span", { class: "candidate-text" }, "candidate"), ", ", make("span", { class: "reference-text" }, "reference")));
  }
  chart(find("#step-errors"), { ...common, log: true, label: "difference at each step, and what is allowed", series: [
    { values: column("difference").map((d) => d[ALLOWED]), line: "allowed" },
    { values: column("difference").map((d) => d[ERROR]), mark: (i) => (diverges(report.steps[i]) ? "bug" : "rounding") }] });
  find("#step-errors").append(make("p", { class: "note" }, `${report.mode === "generate" ? "logits" : "loss"}: difference relative to scale, by ${report.mode === "generate" ? "token" : "step"}; dashed: allowed`));
}

// ---- One node -----------------------------------------------------------------------------

function figures(node) {
  const heads = ["", "difference", "allowed", "× allowed", "candidate off by", "reference off by", "ulp"];
  // Without a judgement the allowed error says nothing.
  const whole = node.whole && node.whole.map((value, i) => (i === ALLOWED || i === EXCESS ? null : value));
  const lines = [["output", node.output], ["output in the whole model", whole],
    ...Object.entries(node.gradients).map(([name, d]) => [`gradient of ${name}`, d]),
    ...Object.entries(node.parameters).map(([name, d]) => [`parameter ${name}`, d])].filter(([, d]) => d);
  if (!lines.length) return make("p", { class: "note" }, "Nothing was measured here.");
  return make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...lines.map(([name, d]) => {
      const cells = [scientific(d[ERROR]), scientific(d[ALLOWED]), short(d[EXCESS]), scientific(d[CANDIDATE]), scientific(d[REFERENCE]), short(d[ULPS])];
      return make("tr", { class: d[EXCESS] !== null && isBug(d) ? "bug" : "" }, make("td", {}, name),
        ...cells.map((cell, i) => make("td", { class: "figures", "data-head": heads[i + 1] }, cell)));
    })));
}

function histogram({ edges, candidate, reference }) {
  const box = make("div", { class: "chart histogram" });
  const [width, height, base] = [Math.min(find("#node").clientWidth - 26, 560), 130, 112];
  const [low, high] = [Number(edges[0]), Number(edges[edges.length - 1])];
  const most = Math.max(...candidate, ...reference, 1);
  const x = (edge) => 4 + ((Number(edge) - low) / (high - low || 1)) * (width - 8);
  const outline = (counts) => counts.reduce((path, count, i) => {
    const at = (base - (count / most) * (base - 6)).toFixed(1);
    return `${path}L${x(edges[i]).toFixed(1)} ${at}L${x(edges[i + 1]).toFixed(1)} ${at}`;
  }, `M${x(low)} ${base}`) + `L${x(high)} ${base}`;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "histograms of both outputs" },
    make("path", { class: "area reference", d: `${outline(reference)}Z` }), make("path", { class: "line reference", d: outline(reference) }),
    make("path", { class: "line candidate", d: outline(candidate) }),
    make("line", { class: "grid", x1: 4, x2: width - 4, y1: base, y2: base }),
    make("text", { x: 4, y: height - 3 }, low.toPrecision(3)),
    make("text", { x: width - 4, y: height - 3, "text-anchor": "end" }, high.toPrecision(3)));
  box.append(svg);
  return box;
}

// The colour map viridis, at five points.
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

function picture(head, cells, colour, label) {
  const canvas = make("canvas", { width: head.columns, height: head.rows, role: "img", "aria-label": label });
  const context = canvas.getContext("2d"), image = context.createImageData(head.columns, head.rows);
  cells.forEach((cell, i) => image.data.set(colour(cell), 4 * i));
  context.putImageData(image, 0, 0);
  return canvas;
}

function weightColour(cell) {
  if (!cell) return [0, 0, 0, 0];
  const at = (cell / 255) ** 0.5 * 4, from = Math.min(Math.floor(at), 3);
  return [...VIRIDIS[from].map((v, i) => v + (VIRIDIS[from + 1][i] - v) * (at - from)), 255];
}

function attention(maps) {
  const rgb = (name) => cssColour(name).match(/\w\w/g).map((pair) => parseInt(pair, 16));
  const [candidateColour, referenceColour] = [rgb("--candidate"), rgb("--reference")];
  const differenceColour = (cell) => [...(cell > 128 ? candidateColour : referenceColour), Math.min(2 * Math.abs(cell - 128), 255)];
  const [rows, columns] = maps.shape;
  const reduced = rows > maps.heads[0].rows || columns > maps.heads[0].columns;
  const some = maps.heads.length < maps.count ? `${maps.heads.length} of ${maps.count} heads, those that differ most. ` : "";
  const note = make("p", { class: "note" }, `${some}${rows} queries by ${columns} keys` +
    (reduced ? ", each cell the largest of its neighbourhood" : "") + ". Difference: ",
    make("span", { class: "candidate-text" }, "the candidate is larger"), ", ", make("span", { class: "reference-text" }, "the reference is larger"),
    "; full colour at the head’s largest, or at 1e-03 of its largest weight where that is more.");
  const heads = maps.heads.map((head) => {
    const [candidate, reference, difference] = [head.candidate, head.reference, head.difference].map(bytes);
    const caption = make("figcaption", {}, make("b", {}, `head ${head.head}`), make("span", {}, `largest difference ${scientific(head.largest)}`));
    const summary = caption.lastChild.textContent;
    const pictures = make("div", { class: "maps" },
      picture(head, candidate, weightColour, `candidate weights, head ${head.head}`), picture(head, reference, weightColour, `reference weights, head ${head.head}`),
      picture(head, difference, differenceColour, `difference, head ${head.head}: largest ${scientific(head.largest)}`),
      make("span", {}, "candidate"), make("span", {}, "reference"), make("span", {}, "difference"));
    pictures.addEventListener("pointermove", (event) => {
      const box = event.target.getBoundingClientRect();
      if (event.target.tagName !== "CANVAS") return;
      const at = [[event.clientY - box.top, box.height, head.rows, rows], [event.clientX - box.left, box.width, head.columns, columns]]
        .map(([offset, size, cells, whole]) => [Math.min(Math.max(Math.floor((offset / size) * cells), 0), cells - 1), cells, whole]);
      const cell = at[0][0] * head.columns + at[1][0];
      const [query, key] = at.map(([index, cells, whole]) => Math.floor((index * whole) / cells));
      caption.lastChild.textContent = `query ${query}, key ${key}: candidate ${((candidate[cell] / 255) * head.high).toFixed(3)}, reference ${((reference[cell] / 255) * head.high).toFixed(3)}`;
    });
    pictures.addEventListener("pointerleave", () => { caption.lastChild.textContent = summary; });
    return make("figure", {}, caption, pictures);
  });
  return [make("h3", {}, "Attention weights"), note, make("div", { class: "heads" }, ...heads)];
}

function remark(node) {
  if (node.isRootCause || node.message) return (node.stage ? `${node.stage}: ` : "") + (node.message || "the bug is in this module itself, and not in one inside it");
  if (node.verdict === "bug") return "The bug is in a module inside this one.";
  return node.verdict === "amplified" ? "No bug: rounding at its input becomes larger at its output, on both sides." : "";
}

function drawNode() {
  const node = nodes[state.node], text = remark(node);
  const go = (by, label, symbol) => make("button", {
    type: "button", "aria-label": label, title: label, disabled: nodes[state.node + by] ? undefined : "",
    onclick: () => { select(state.node + by); find(`#node button[aria-label="${label}"]`).focus({ preventScroll: true }); },
  }, symbol);
  const parts = [
    make("div", { class: "node-head" },
      make("h2", {}, make("span", { class: `symbol ${node.verdict}`, role: "img", "aria-label": node.verdict }, SYMBOLS[node.verdict]), ` ${place(node)}`),
      make("div", { class: "steps-between" }, go(-1, "previous node", "‹"), go(1, "next node", "›"),
        make("button", { type: "button", onclick: () => { const item = itemOf(state.node); item.scrollIntoView({ block: "center" }); item.focus({ preventScroll: true }); } }, "in the tree"))),
    make("p", { class: "pairing" }, `${node.verdict} · ${node.kind} against the reference’s ${node.referenceKind} `, make("code", {}, node.referencePath || "the whole model")),
    text ? make("p", { class: `callout ${node.verdict}` }, text) : null,
    make("h3", {}, "Numbers ", make("span", { class: "hint" }, `difference and allowed: float64, relative to the largest value; off by: ${report.dtype} against float64`)),
    figures(node),
    node.condition === null ? null : make("p", { class: "note" }, `condition ${short(node.condition)}: a small relative error of its input is that many times as large at its output`),
  ];
  if (node.histogram) parts.push(make("h3", {}, "Values of the output ", make("span", { class: "hint" },
    make("span", { class: "candidate-text" }, "candidate"), ", ", make("span", { class: "reference-text" }, "reference"))), histogram(node.histogram));
  if (node.maps) parts.push(...attention(node.maps));
  find("#node").replaceChildren(...parts.filter(Boolean));
}

// ---- The tree -----------------------------------------------------------------------------

const items = [...document.querySelectorAll("[role=treeitem]")];
const itemOf = (index) => document.getElementById(`node-${index}`);
const visible = () => items.filter((item) => item.getClientRects().length);
const expand = (item, open) => { if (item.hasAttribute("aria-expanded")) item.setAttribute("aria-expanded", String(open)); };

function select(index, byUser = true) {
  state.node = index;
  for (const item of items) {
    item.setAttribute("aria-selected", "false");
    item.tabIndex = -1;
  }
  const chosen = itemOf(index);
  chosen.setAttribute("aria-selected", "true");
  chosen.tabIndex = 0;
  for (let around = chosen.parentElement.closest("[role=treeitem]"); around; around = around.parentElement.closest("[role=treeitem]")) expand(around, true);
  const tree = find("#tree"), [box, row] = [tree.getBoundingClientRect(), chosen.firstElementChild.getBoundingClientRect()];
  if (tree.scrollHeight > tree.clientHeight && (row.top < box.top || row.bottom > box.bottom)) tree.scrollTop += row.top - box.top - box.height / 3;
  // The browser would scroll to it while the page is still loading.
  if (byUser) history.replaceState(null, "", `#node-${index}`);
  drawNode();
  drawErrors();
  // On a narrow screen the numbers are below the tree.
  if (byUser && matchMedia("(max-width: 860px)").matches) find("#node").scrollIntoView({ block: "start" });
}

function choose(item) {
  if (item.dataset.node !== undefined) select(Number(item.dataset.node));
  else expand(item, item.getAttribute("aria-expanded") === "false");
}

function focusItem(item) {
  if (!item) return;
  for (const other of items) other.tabIndex = -1;
  item.tabIndex = 0;
  item.focus();
}

find("[role=tree]").addEventListener("click", (event) => {
  const row = event.target.closest(".row"), item = row && row.parentElement;
  if (!item) return;
  if (event.target.closest(".twist") && item.hasAttribute("aria-expanded")) expand(item, item.getAttribute("aria-expanded") === "false");
  else choose(item);
  focusItem(item);
});

find("[role=tree]").addEventListener("keydown", (event) => {
  const item = event.target.closest("[role=treeitem]"), shownItems = visible(), at = shownItems.indexOf(item);
  const open = item.getAttribute("aria-expanded");
  const actions = {
    ArrowDown: () => focusItem(shownItems[at + 1]),
    ArrowUp: () => focusItem(shownItems[at - 1]),
    Home: () => focusItem(shownItems[0]),
    End: () => focusItem(shownItems[shownItems.length - 1]),
    ArrowRight: () => (open === "false" ? expand(item, true) : open === "true" && focusItem(item.querySelector("[role=treeitem]"))),
    ArrowLeft: () => (open === "true" ? expand(item, false) : focusItem(item.parentElement.closest("[role=treeitem]"))),
    Enter: () => { choose(item); item.focus({ preventScroll: true }); },
    " ": () => { choose(item); item.focus({ preventScroll: true }); },
  };
  if (!actions[event.key] || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  actions[event.key]();
});

// ---- Start ----------------------------------------------------------------------------

const fromHash = () => Number((location.hash.match(/^#node-(\d+)$/) ?? [])[1] ?? NaN);

function start() {
  document.documentElement.classList.add("scripted");
  for (const element of document.querySelectorAll(".dtype")) element.textContent = report.dtype;
  drawSteps();
  if (!nodes.length) {
    for (const selector of ["#tree", "#overview", "#node"]) find(selector).hidden = true;
    return;
  }
  const rootCause = nodes.findIndex((node) => node.isRootCause);
  const stage = rootCause >= 0 && nodes[rootCause].stage;
  state.stage = { parameters: "parameters", backward: "gradients" }[stage] ?? (rootCause >= 0 ? ["output", "whole"] : ["whole", "output"]).find((s) => nodes.some((node) => differenceAt(node, s))) ?? "output";
  drawStages();
  select(nodes[fromHash()] ? fromHash() : Math.max(rootCause, 0), false);
  for (const link of document.querySelectorAll("header a[href^='#node-']")) link.addEventListener("click", (event) => {
    event.preventDefault();
    select(Number(link.hash.slice(6)));
    find("#node").scrollIntoView({ block: "nearest" });
    find("#node").focus({ preventScroll: true });
  });
  addEventListener("hashchange", () => { if (nodes[fromHash()]) select(fromHash()); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawErrors(); drawSteps(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawNode);
}

start();
