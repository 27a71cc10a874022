"use strict";
// One function a panel, but for the map of slots; null where there is nothing to show.

const NAMES = { mass: "mass", uniform_mass: "random", count: "count", uniform: "random" };
const MEASURES = [
  ["usage", "Slots used", share],
  ["kl", "KL (nats)", fixed(4)],
  ["gini", "Gini", fixed(3)],
  ["top50", "Hold 50 %", count],
  ["top90", "Hold 90 %", count],
  ["top99", "Hold 99 %", count],
];

function summary(entry, facts) {
  // Every read may weigh the same, as those of n-gram tables do.
  const alike = MEASURES.every(([key]) => facts.mass[key] === facts.count[key]);
  const shown = Object.keys(NAMES).filter((by) => !(alike && by.includes("mass")));
  const rows = MEASURES.map(([key, name, format]) => [name, ...shown.map((by) => [facts[by][key], format])]);
  const text =
    `${entry.run} at step ${count(entry.step)}, ${entry.split}: ${count(facts.tokens)} tokens, ` +
    `${count(facts.reads)} reads of ${count(facts.slots)} slots (${facts.kind}).` +
    (facts.effective == null
      ? ""
      : ` A head's weights are worth ${fixed(1)(facts.effective)} reads of equal weight; the largest has ` +
        `${share(facts.top_weight)}.`) +
    (facts.layers && facts.layer_overlap != null
      ? ` Two of its layers give ${share(facts.layer_overlap)} of their mass to the same slots.`
      : "");
  const by = alike ? "By count" : "By mass and by count, each";
  const caption = `${by} with what the same reads give at random slots`;
  const headings = ["By", ...shown.map((by) => NAMES[by])];
  return panel("summary", "Summary", make("p", {}, text), table(caption, headings, rows));
}

function sortedMass(data) {
  const title = "Sorted slot mass";
  if (!data.sorted) return panel("sorted", title, make("p", {}, "Nothing was read."));
  const [ranks, shares] = data.sorted;
  const [floorX, floorY] = data.uniform || [[], []];
  const x = [...new Set([...ranks, ...floorX])].sort((a, b) => a - b);
  const along = (xs, ys) => {
    const at = new Map(xs.map((v, i) => [v, ys[i]]));
    return x.map((v) => at.get(v) ?? null);
  };
  const lines = [
    { label: "measured", values: along(ranks, shares), colour: "blue" },
    { label: "random", values: along(floorX, floorY), colour: "red", dash: DASHED },
  ];
  const options = { log: true, xLabel: "slots, most used first", yLabel: "share of the mass" };
  const drawn = chart("Share of the mass of each slot by rank, both logarithmic", x, lines, options);
  const few = ranks
    .map((rank, i) => [count(rank), [shares[i], share]])
    .filter((_, i) => i < 20 || i % Math.ceil(ranks.length / 60) === 0);
  return panel("sorted", title, drawn, behind("Share by rank", ["Rank", "Share"], few));
}

// One bar for each of some parts (scale: heads and tables alike); of numbers that may be null.
function bars(label, scale, name, colour, values, xLabel, ticks) {
  const line = { label: name, values, colour, bars: true };
  const options = { xLabel, yLabel: name, ticks, scale };
  return chart(label, values.map((_, i) => i + 1), [line], options);
}

function heads(facts) {
  const unit = facts.heads ? "head" : "table";
  const parts = facts[unit + "s"], floor = facts.uniform_head;
  const row = (name, part) => [name, [part.usage, share], [part.kl, fixed(4)]];
  const rows = [...parts.map((part) => row(`${unit} ${part[unit]}`, part)), row("random", floor)];
  const percent = parts.map((part) => 100 * part.usage), kl = parts.map((part) => part.kl);
  const ticks = (at) => (parts[at - 1] ? String(parts[at - 1][unit]) : "");
  return panel(
    "heads",
    `Each ${unit} by itself`,
    bars(`slots used (%) of each ${unit}`, "usage of parts", "slots used (%)", "blue", percent, unit, ticks),
    bars(`KL (nats) of each ${unit}`, "KL of parts", "KL (nats)", "green", kl, unit, ticks),
    behind(`By mass, each ${unit}`, [unit, "Slots used", "KL (nats)"], rows),
  );
}

function layers({ entry, memories }) {
  const names = memories.map((memory) => memory.label.replace(/^layer /, ""));
  const ticks = (at) => names[at - 1] || "";
  const percent = entry.memories.map((m) => 100 * m.mass.usage);
  const rows = entry.memories.map((m, i) => [
    names[i],
    [m.mass.usage, share],
    [m.uniform_mass.usage, share],
    [m.mass.kl, fixed(4)],
    [m.uniform_mass.kl, fixed(4)],
    [m.mass.gini, fixed(3)],
  ]);
  return panel(
    "layers",
    "Each layer",
    bars("Share of slots used in each memory", "usage of memories", "slots used (%)", "blue", percent, "memory", ticks),
    behind("By mass", ["Layer", "Slots used", "random", "KL (nats)", "random", "Gini"], rows),
  );
}

function overlap(facts, colours) {
  const matrix = facts.head_overlap_matrix;
  if (!matrix) return null;
  const cells = [];
  const cell = (value, own) => {
    const node = make("td", { "data-value": String(value) }, own ? "-" : share(value));
    if (!own) cells.push([node, value]);
    return node;
  };
  const name = (h, scope) => make("th", { scope }, String(h + 1));
  const rows = matrix.map((row, g) =>
    make("tr", {}, name(g, "row"), ...row.map((value, h) => cell(value, g === h))));
  const head = make("tr", {}, make("th", { scope: "col" }, "Head"), ...matrix.map((_, h) => name(h, "col")));
  const caption = `Share of a head's slots, for one token; random: ${share(facts.head_overlap_uniform)}`;
  const whole = make(
    "table",
    { class: "overlap", "data-scale": "overlap" },
    make("caption", {}, caption),
    make("thead", {}, head),
    make("tbody", {}, ...rows),
  );
  whole.extents = { share: extent(cells.map(([, value]) => value)) };
  whole.rescale = () => {
    const most = Math.max(1e-12, shared(whole, "share")[1]);
    for (const [node, value] of cells) {
      const tone = Math.round((255 * value) / most);
      node.style.background = colours[tone];
      node.style.color = tone > 110 ? "#000" : "#fff";
    }
  };
  return panel("overlap", "Slots that two heads have in common", scrolled(whole));
}

const MOST_ROWS = 1000; // of the table behind the chart of a table's rows
const MOST_BARS = 500; // of this chart

function rowReads(facts, row, counts) {
  if (!facts.tables) return null;
  const each = facts.slots / facts.tables.length;
  const choice = make("select", {}, ...facts.tables.map((t) => make("option", {}, String(t.table))));
  const place = make("div");
  const draw = () => {
    const start = each * choice.selectedIndex, own = Array.from(counts.slice(start, start + each));
    const total = own.reduce((a, b) => a + b, 0) || 1;
    const wide = Math.ceil(each / MOST_BARS); // rows of a bar
    const bars = Array.from({ length: Math.ceil(each / wide) }, (_, i) => {
      const of = own.slice(i * wide, (i + 1) * wide);
      return of.reduce((a, b) => a + b, 0) / of.length;
    });
    const lines = [
      { label: "reads (%)", values: bars.map((n) => (100 * n) / total), colour: "blue", bars: true },
      { label: "uniform", values: bars.map(() => 100 / each), colour: "red", dash: DASHED },
    ];
    const options = { xLabel: row, yLabel: "reads (%)" };
    let shown = own.map((n, i) => [i, n]), title = `Reads of table ${choice.value}`;
    if (shown.length > MOST_ROWS) {
      shown = shown.sort((a, b) => b[1] - a[1]).slice(0, MOST_ROWS);
      title += `: the ${count(MOST_ROWS)} ${row}s read most`;
    }
    place.replaceChildren(
      chart(`Reads of each ${row}`, bars.map((_, i) => i * wide), lines, options),
      ...(wide > 1 ? [note(`A bar shows the mean of ${wide} ${row}s.`)] : []),
      behind(title, [row, "Reads"], shown.map(([i, n]) => [String(i), [n, count]])),
    );
  };
  choice.addEventListener("change", () => {
    draw();
    rescale();
  });
  draw();
  return panel("rows", `Reads of each ${row}`, make("label", {}, "Table ", choice), place);
}

// On the validation text, at each validation.
function validations([step, usage, kl, floorUsage, floorKl], slots) {
  const dead = usage.map((u) => Math.round((1 - u) * slots));
  const percent = (values) => values.map((u) => 100 * u);
  const over = (name, yLabel, values, floor) => {
    const lines = [{ label: "measured", values, colour: "blue", points: true }];
    if (floor) lines.push({ label: "random", values: floor, colour: "red", dash: DASHED });
    return chart(name, step, lines, { xLabel: "step", yLabel });
  };
  const rows = step.map((s, i) => [count(s), [usage[i], share], [kl[i], fixed(4)], [dead[i], count]]);
  return [
    over("Slots used over training", "slots used (%)", percent(usage), percent(floorUsage)),
    over("KL over training", "KL (nats)", kl, floorKl),
    over("Dead slots over training", "slots not read", dead),
    behind("On the validation text", ["Step", "Slots used", "KL (nats)", "Dead slots"], rows),
  ];
}

// In training, between two records.
function drifts(records) {
  const step = records.map((d) => d.step);
  const line = (key, colour) => ({ label: key, values: records.map((d) => d[key]), colour, points: true });
  const moved = {
    label: "moved (%)",
    values: records.map((d) => (d.moved === null ? null : 100 * d.moved)),
    colour: "pink",
    points: true,
  };
  const rows = records.map((d) => [
    count(d.step),
    [d.read, count],
    [d.died, count],
    [d.woke, count],
    [d.never, count],
    [d.moved, share],
  ]);
  return [
    make("h3", {}, "Drift: slots that died, woke, never learnt"),
    chart(
      "Slots that died, woke, and were never read, between records of training",
      step,
      [line("died", "red"), line("woke", "green"), line("never", "blue")],
      { xLabel: "step", yLabel: "slots" },
    ),
    chart("How far values moved", step, [moved], { xLabel: "step", yLabel: "moved (% of size)" }),
    note(
      "In training, between two records: died = read before, not since; woke = not read before, read since; never = " +
        "not read so far, so never learnt; moved = median way of read values, over their size before.",
    ),
    behind("Drift", ["Step", "Read", "Died", "Woke", "Never", "Moved"], rows),
  ];
}

function training(valid, drift, slots) {
  const parts = [...(valid ? validations(valid, slots) : []), ...(drift ? drifts(drift) : [])];
  return parts.length ? panel("training", "Over training", ...parts) : null;
}
