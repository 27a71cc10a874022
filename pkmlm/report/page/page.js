"use strict";
// Text from models and corpora goes into the page as text nodes only.
const show = (id) => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const count = (x) => (x === null || x === undefined ? "-" : x.toLocaleString("en"));
const share = (x) => (x === null || x === undefined ? "-" : (100 * x).toPrecision(3) + " %");
const fixed = (digits) => (x) => (x === null || x === undefined ? "-" : x.toFixed(digits));

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function numbers({ planes, data }, Kind) {
  const bytes = await unpack(data);
  const length = bytes.length / planes, result = new Kind(length);
  for (let plane = planes - 1; plane >= 0; plane--)
    for (let i = 0; i < length; i++) result[i] = result[i] * 256 + bytes[plane * length + i];
  return result;
}

// Rows of [value, how it is shown]: the exact value stands in data-value.
function table(caption, headings, rows, attributes = {}) {
  const body = rows.map((cells) => make("tr", {}, ...cells.map((cell, i) => {
    const [value, shown] = Array.isArray(cell) ? cell : [cell, null];
    const numeric = shown !== null;
    const exact = numeric && value !== null && value !== undefined ? { "data-value": String(value) } : {};
    const text = numeric ? shown(value) : value;
    return i === 0 ? make("th", { scope: "row" }, text) : make("td", { class: numeric ? "number" : "", ...exact }, text);
  })));
  const head = make("tr", {}, ...headings.map((h, i) => make("th", { scope: "col", class: i && rows.length &&
    Array.isArray(rows[0][i]) ? "number" : "" }, h)));
  return make("table", attributes, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...body));
}

function panel(id, title, ...children) {
  return make("section", { class: "panel", "data-panel": id, "aria-label": title }, make("h3", {}, title), ...children);
}

const behind = (caption, headings, rows) =>
  make("details", {}, make("summary", {}, "As a table"), make("div", { class: "scroll" }, table(caption, headings, rows)));

// A line chart. lines: [{label, values, colour, dash, points, bars}] over x; options: log, xLabel, yLabel.
function chart(label, x, lines, options = {}) {
  const box = make("div", { class: "chart", role: "img", "aria-label": label });
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => () => style.getPropertyValue(`--${name}`).trim(); // asked whenever the chart is drawn
  const axis = (text) => ({ label: text, stroke: colour("text"), grid: { stroke: colour("line"), width: 1 },
    ticks: { stroke: colour("line") }, labelSize: 20, size: 58 });
  const scale = (log) => (log ? { distr: 3, log: 10 } : {});
  const series = lines.map((line) => ({ label: line.label, stroke: colour(line.colour), width: 2, dash: line.dash,
    spanGaps: true, fill: line.bars ? colour(line.colour) : undefined, points: { show: Boolean(line.points), size: 6 },
    paths: line.bars ? uPlot.paths.bars({ size: [0.7, 60] }) : undefined }));
  const y = { ...scale(options.log), ...(options.zero ? { range: (u, low, high) => [0, high > 0 ? high * 1.05 : 1] } : {}) };
  const powers = (u, at) => at.map((v) => (v === null ? "" : v < 0.01 ? v.toExponential(0) : count(v)));
  const shown = (u, i) => `var(--${lines[i - 1].colour})`;
  const markers = { stroke: shown, fill: (u, i) => (lines[i - 1].bars ? shown(u, i) : "transparent") };
  const settings = { width: 560, height: 260, legend: { markers }, series: [{ label: options.xLabel }, ...series],
    scales: { x: { time: false, ...scale(options.log), ...(options.pad ? { range: (u, l, h) => [l - 0.7, h + 0.7] } : {}) }, y },
    axes: [{ ...axis(options.xLabel), size: 46, ...(options.ticks ? { splits: () => x, values: (u, at) => at.map(options.ticks) } : {}) },
      { ...axis(options.yLabel), ...(options.log ? { values: powers } : {}) }] };
  const drawn = new uPlot(settings, [x, ...lines.map((line) => line.values)], box);
  box.draw = () => drawn.redraw(false);
  requestAnimationFrame(() => box.clientWidth && drawn.setSize({ width: Math.min(720, box.clientWidth), height: 260 }));
  return box;
}

const NAMES = { mass: "mass", count: "count", uniform: "random" };

function summary(entry, facts) {
  const measures = [["usage", "Slots used", share], ["kl", "KL (nats)", fixed(4)], ["gini", "Gini", fixed(3)],
    ["top50", "hold 50 %", count], ["top90", "90 %", count], ["top99", "99 %", count], ["effective", "Effective", fixed(0)]];
  const rows = Object.keys(NAMES).map((by) => [NAMES[by], ...measures.map(([key, , shown]) => [facts[by][key], shown])]);
  return panel("summary", "Summary",
    make("p", {}, `${entry.run} at step ${count(entry.step)}, ${entry.split}: ${count(facts.tokens)} tokens, ` +
      `${count(facts.reads)} reads of ${count(facts.slots)} slots (${facts.kind}).`),
    table("By mass, by count, and what as many random reads give", ["By", ...measures.map(([, name]) => name)], rows));
}

function sortedMass(data) {
  if (!data.sorted) return panel("sorted", "Sorted slot mass", make("p", {}, "Nothing was read."));
  const [floorX, floorY] = data.uniform || [[], []];
  const x = [...new Set([...data.sorted[0], ...floorX])].sort((a, b) => a - b);
  const along = (xs, ys) => { const at = new Map(xs.map((v, i) => [v, ys[i]])); return x.map((v) => at.get(v) ?? null); };
  const lines = [{ label: "measured", values: along(...data.sorted), colour: "blue" },
    { label: "random", values: along(floorX, floorY), colour: "red", dash: [8, 5] }];
  const few = data.sorted[0].map((rank, i) => [count(rank), [data.sorted[1][i], share]]).filter((_, i, all) =>
    i < 20 || i % Math.ceil(all.length / 60) === 0);
  return panel("sorted", "Sorted slot mass", chart("Share of the mass of each slot by rank, both logarithmic", x, lines,
    { log: true, xLabel: "slots, most used first", yLabel: "share of the mass" }), behind("Share by rank", ["Rank", "Share"], few));
}

function heads(facts) {
  const unit = facts.heads ? "head" : "table";
  const parts = facts[unit + "s"], floor = facts.uniform_head;
  const x = parts.map((part) => part[unit]);
  const rows = parts.map((part) => [`${unit} ${part[unit]}`, [part.usage, share], [part.kl, fixed(4)]]);
  rows.push(["random", [floor.usage, share], [floor.kl, fixed(4)]]);
  const bars = (key, name, colour, scale) => chart(`${name} of each ${unit}`, x,
    [{ label: name, values: parts.map((part) => part[key] === null ? null : part[key] * scale), colour, bars: true }],
    { xLabel: unit, yLabel: name, zero: true, pad: true, ticks: (at) => Number.isInteger(at) ? String(at) : "" });
  return panel("heads", `Each ${unit} by itself`, bars("usage", "slots used (%)", "blue", 100),
    bars("kl", "KL (nats)", "green", 1), behind(`By mass, each ${unit}`, [unit, "Slots used", "KL (nats)"], rows));
}

function layers(entry) {
  const rows = entry.memories.map((m) => [`${m.layer} ${m.name}`, [m.mass.usage, share], [m.uniform.usage, share],
    [m.mass.kl, fixed(4)], [m.uniform.kl, fixed(4)], [m.mass.gini, fixed(3)]]);
  const x = entry.memories.map((_, i) => i + 1);
  return panel("layers", "Each layer", chart("Share of slots used in each memory", x,
    [{ label: "slots used (%)", values: entry.memories.map((m) => 100 * m.mass.usage), colour: "blue", bars: true }],
    { xLabel: "memory", yLabel: "slots used (%)", zero: true, pad: true,
      ticks: (at) => entry.memories[at - 1] ? `${entry.memories[at - 1].layer} ${entry.memories[at - 1].name}` : "" }),
    behind("By mass", ["Layer", "Slots used", "random", "KL (nats)", "random", "Gini"], rows));
}

function overlap(facts, colours) {
  const matrix = facts.head_overlap_matrix;
  if (!matrix) return null;
  const most = Math.max(1e-12, ...matrix.flatMap((row, g) => row.filter((_, h) => h !== g)));
  const rows = matrix.map((row, g) => make("tr", {}, make("th", { scope: "row" }, String(g + 1)), ...row.map((value, h) => {
    const cell = make("td", { "data-value": String(value) }, g === h ? "-" : share(value));
    if (g !== h) {
      const tone = Math.round((255 * value) / most);
      cell.style.background = colours[tone];
      cell.style.color = tone > 140 ? "#000" : "#fff";
    }
    return cell;
  })));
  const names = matrix.map((_, h) => make("th", { scope: "col" }, String(h + 1)));
  return panel("overlap", "Slots that two heads have in common", make("table", { class: "overlap" },
    make("caption", {}, `Share of a head's slots, for one token; random: ${share(facts.head_overlap_uniform)}`),
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Head"), ...names)), make("tbody", {}, ...rows)));
}

function buckets(facts, counts) {
  if (facts.kind !== "hash") return null;
  const each = facts.slots / facts.tables.length;
  const choice = make("select", {}, ...facts.tables.map((t) => make("option", {}, String(t.table))));
  const place = make("div");
  const draw = () => {
    const start = each * choice.selectedIndex, own = Array.from(counts.slice(start, start + each));
    const total = own.reduce((a, b) => a + b, 0) || 1;
    const x = own.map((_, i) => i);
    place.replaceChildren(chart("Reads of each bucket", x, [
      { label: "reads (%)", values: own.map((n) => (100 * n) / total), colour: "blue", bars: true },
      { label: "uniform", values: own.map(() => 100 / each), colour: "red", dash: [8, 5] }],
      { xLabel: "bucket", yLabel: "reads (%)", zero: true }),
    behind(`Buckets of table ${choice.value}`, ["Bucket", "Reads"], own.map((n, i) => [String(i), [n, count]])));
  };
  choice.addEventListener("change", draw);
  draw();
  return panel("buckets", "Bucket frequency", make("label", {}, "Table ", choice), place);
}

function training(valid, drift, slots) {
  const parts = [];
  if (valid) {
    const [step, usage, kl, floorUsage, floorKl] = valid;
    const over = (name, yLabel, values, floor) => chart(name, step, [
      { label: "measured", values, colour: "blue", points: true },
      ...(floor ? [{ label: "random", values: floor, colour: "red", dash: [8, 5] }] : [])], { xLabel: "step", yLabel, zero: true });
    const dead = usage.map((u) => Math.round((1 - u) * slots));
    const percent = (values) => values.map((u) => 100 * u);
    parts.push(over("Slots used over training", "slots used (%)", percent(usage), percent(floorUsage)),
      over("KL over training", "KL (nats)", kl, floorKl), over("Dead slots over training", "slots not read", dead),
      behind("On the validation text", ["Step", "Slots used", "KL (nats)", "Dead slots"],
        step.map((s, i) => [count(s), [usage[i], share], [kl[i], fixed(4)], [dead[i], count]])));
  }
  if (drift) {
    const line = (key, colour) => ({ label: key, values: drift.map((d) => d[key]), colour, points: true });
    parts.push(make("h3", {}, "Drift: slots that died, woke, never learnt"),
      chart("Slots that died, woke, and were never read, between records of training", drift.map((d) => d.step),
        [line("died", "red"), line("woke", "green"), line("never", "blue")], { xLabel: "step", yLabel: "slots", zero: true }),
      chart("How far values moved", drift.map((d) => d.step), [{ label: "moved (%)", colour: "pink", points: true,
        values: drift.map((d) => d.moved === null ? null : 100 * d.moved) }], { xLabel: "step", yLabel: "moved (% of size)", zero: true }),
      make("p", { class: "note" }, "In training, between two records: died = read before, not since; woke = not read before, " +
        "read since; never = not read so far, so never learnt; moved = median way of read values, over their size before."),
      behind("Drift", ["Step", "Read", "Died", "Woke", "Never", "Moved"], drift.map((d) => [count(d.step), [d.read, count],
        [d.died, count], [d.woke, count], [d.never, count], [d.moved, share]])));
  }
  return parts.length ? panel("training", "Over training", ...parts) : null;
}

function grid(facts) {
  if (facts.kind === "hash") return { rows: facts.tables.length, columns: facts.slots / facts.tables.length, square: false };
  let columns = Math.ceil(Math.sqrt(facts.slots));
  while (facts.slots % columns) columns++; // of flat keys, any grid will do
  return { rows: facts.slots / columns, columns, square: true };
}

function slotName(facts, shape, slot) {
  const row = Math.floor(slot / shape.columns), column = slot % shape.columns;
  if (facts.kind === "hash") return `${row + 1}:${column}`;
  return facts.kind === "product-key" ? `${row}:${column}` : String(slot);
}

function words(list) {
  return make("span", { class: "words" }, ...(list || []).flatMap(([token, logit]) =>
    [make("bdi", {}, `"${token}"`), ` ${logit > 0 ? "+" : ""}${logit}   `]));
}

function slotCard(column, slot) {
  const { facts, data, counts, codes, first, shape } = column;
  const mass = codes[slot] ? Math.exp(data.mass.low + (codes[slot] - 1) * data.mass.step) : 0;
  const known = data.slots[slot];
  const part = [make("h3", { tabindex: "-1" }, `Slot ${slotName(facts, shape, slot)}`),
    make("p", {}, make("span", { "data-reads": String(counts[slot]), "data-slot": String(slot) },
      `${count(counts[slot])} reads`), `, ${share(mass / (data.mass.total || 1))} of the mass`,
    known && known.heads.length ? `; ${known.heads.map(([h, n]) => `head ${h}: ${share(n / known.reads)}`).join(", ")}` : "")];
  if (known && known.raises) part.push(make("p", {}, "Its value raises ", words(known.raises)),
    make("p", {}, "and lowers ", words(known.lowers)));
  else if (first && first[slot]) part.push(make("p", {}, "Its value raises most ", make("bdi", { class: "token" },
    `"${data.tokens[first[slot] - 1]}"`)));
  if (known && known.pattern) part.push(make("p", {}, "Its contexts share: ", make("bdi", { class: "token" }, known.pattern)));
  if (known && known.contexts.length) part.push(table("Read most at the marked token", ["Weight", "Context"],
    known.contexts.map(([weight, , , before, token, after]) => [weight.toFixed(3),
      make("bdi", { class: "token" }, before, make("mark", {}, token), after)])));
  else if (counts[slot]) part.push(make("p", { class: "note" }, "Contexts are kept for the slots with most mass only."));
  return part;
}

function mapPanel(column, colours) {
  const { facts, data, codes, shape } = column;
  const card = make("div", { class: "card", "aria-live": "polite" }, make("p", { class: "note" }, "No slot chosen."));
  const choose = (slot) => card.replaceChildren(...slotCard(column, slot));
  const map = slotMap({ ...shape, codes, colours, dark: data.mass.dark, choose, name: (slot) => slotName(facts, shape, slot) });
  const field = make("input", { size: "9", "aria-label": "Slot", placeholder: slotName(facts, shape, 0) });
  const form = make("form", {}, make("label", {}, "Slot ", field), make("button", {}, "Show"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const named = field.value.trim().match(/^(\d+)(?::(\d+))?$/);
    if (!named) return;
    const row = Number(named[1]) - (facts.kind === "hash" ? 1 : 0);
    const slot = named[2] === undefined ? Number(named[1]) : row * shape.columns + Number(named[2]);
    if (slot >= 0 && slot < facts.slots) { map.go(slot); choose(slot); }
  });
  for (const [name, act] of [["Zoom in", () => map.zoom(0.6)], ["Zoom out", () => map.zoom(1.6)], ["Whole", map.whole]]) {
    const button = make("button", { type: "button" }, name);
    button.addEventListener("click", act);
    form.append(button);
  }
  const scale = make("div", { class: "scale" });
  scale.style.background = `linear-gradient(to right, ${colours.filter((_, i) => i % 15 === 0).join(", ")})`;
  const best = Object.keys(data.slots).map(Number).sort((a, b) => codes[b] - codes[a]);
  const rows = best.slice(0, 200).map((slot) => {
    const button = make("button", { type: "button" }, slotName(facts, shape, slot));
    button.addEventListener("click", () => { map.go(slot); choose(slot); });
    const known = data.slots[slot];
    return [button, [known.reads, count], make("bdi", { class: "token" }, known.raises ? `"${known.raises[0][0]}"` : "-"),
      make("bdi", { class: "token" }, known.pattern || "-")];
  });
  const { patterned, slots, shuffled } = data.patterns;
  return panel("map", facts.kind === "product-key" ? "Product keys in use" : "Slots in use", form,
    make("p", { class: "note" }, "Click a slot, or move with the arrow keys (shift: ten) and press Enter; + and - zoom, 0 shows " +
      "all, the wheel zooms once the map is chosen, dragging moves. " + (facts.kind === "hash" ? "Rows: tables; columns: buckets."
        : facts.kind === "product-key" ? "Rows: sub-key of the first half; columns: of the second." : "")),
    map.canvas, scale, make("div", { class: "ends" }, make("span", {}, "little mass (grey: never read)"), make("span", {}, "much")),
    card, make("details", {}, make("summary", {}, "The slots with most mass"), make("p", { class: "note" },
      `Of the ${count(slots)} slots with most mass, ${count(patterned)} have contexts that share a pattern; with contexts ` +
      `shuffled among them, ${shuffled.toFixed(1)}.`), make("div", { class: "scroll" },
      table("Most mass first", ["Slot", "Reads", "Raises", "Pattern"], rows))));
}

async function prepared(run, index) {
  const facts = run.entry.memories[index], data = run.memories[index];
  return { facts, data, shape: grid(facts), counts: await numbers(data.counts, Float64Array),
    codes: await numbers(data.mass.codes, Uint16Array), first: data.first && await numbers(data.first, Uint32Array) };
}

async function columnOf(run, colours, place) {
  const entry = run.entry;
  const choice = make("select", {}, ...entry.memories.map((m) => make("option", {}, `layer ${m.layer} ${m.name}`)));
  const body = make("div", { class: "panels" });
  const draw = async () => {
    if (!entry.memories.length) return body.replaceChildren(make("p", {}, "This model has no memory."));
    const column = await prepared(run, choice.selectedIndex), { facts } = column, where = `${facts.layer} ${facts.name}`;
    const parts = [summary(entry, facts), mapPanel(column, colours), sortedMass(column.data), heads(facts), layers(entry),
      overlap(facts, colours), buckets(facts, column.counts),
      training(run.training.valid[where], run.training.drift[where], facts.slots)];
    body.replaceChildren(...parts.filter(Boolean));
  };
  choice.addEventListener("change", draw);
  place.append(make("h2", {}, make("bdi", {}, `${entry.run}, step ${count(entry.step)}`)), make("label", {}, "Memory ", choice), body);
  await draw();
}

async function render(page) {
  const main = show("main"), columns = make("div", { class: "columns" });
  const chosen = [Number(show("left").value), Number(show("right").value)].filter((index) => index >= 0);
  main.setAttribute("aria-busy", "true");
  main.replaceChildren(columns);
  for (const index of chosen) {
    const place = make("article", { class: "column" });
    columns.append(place);
    await columnOf(page.runs[index], page.colours, place);
  }
  main.setAttribute("aria-busy", "false");
}

const SHADES = { "": "as the system", light: "light", dark: "dark" };
const system = matchMedia("(prefers-color-scheme: dark)");

// What is drawn on canvases is drawn again; all else takes its colours from the style sheet.
function shade(name) {
  document.documentElement.dataset.shade = name;
  for (const node of document.querySelectorAll(".chart, .map")) node.draw();
}

function theme(wish) {
  document.documentElement.dataset.wish = wish;
  show("theme").textContent = `Theme: ${SHADES[wish]}`;
  shade(wish || (system.matches ? "dark" : "light"));
}

async function start() {
  const page = JSON.parse(new TextDecoder().decode(await unpack(show("data").textContent)));
  const names = page.runs.map((run) => `${run.entry.run}, step ${run.entry.step}`);
  show("left").append(...names.map((name, i) => make("option", { value: i }, name)));
  show("right").append(make("option", { value: -1 }, "nothing"), ...names.map((name, i) => make("option", { value: i }, name)));
  show("right").value = page.runs.length > 1 ? "1" : "-1";
  for (const id of ["left", "right"]) show(id).addEventListener("change", () => render(page));
  const wished = () => document.documentElement.dataset.wish;
  show("theme").addEventListener("click", () => {
    const wishes = Object.keys(SHADES);
    theme(wishes[(wishes.indexOf(wished()) + 1) % wishes.length]);
  });
  system.addEventListener("change", () => theme(wished()));
  addEventListener("beforeprint", () => shade("light"));
  addEventListener("afterprint", () => theme(wished()));
  theme("");
  await render(page);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start().catch((error) => { show("main").textContent = `This page cannot be shown: ${error.message}`; throw error; });
