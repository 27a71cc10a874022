"use strict";
// The map of a memory's slots, and what single slots hold.

const HOW =
  "Click a slot, or move with the arrow keys (shift: ten) and press Enter; + and - zoom, 0 shows all, the wheel zooms " +
  "once the map is chosen, dragging moves. ";

// What the rows and columns of the map are, where they mean anything.
function sides({ columns, tables }, unit) {
  if (columns === null) return "";
  return tables ? `Rows: tables; columns: their ${unit}s.` : "Rows: sub-key of the first half; columns: of the second.";
}

function grid({ slots, addresses }) {
  const columns = addresses.columns || Math.ceil(Math.sqrt(slots));
  return { rows: Math.ceil(slots / columns), columns };
}

function slotName({ addresses: { columns, tables } }, slot) {
  if (columns === null) return String(slot);
  return `${Math.floor(slot / columns) + (tables ? 1 : 0)}:${slot % columns}`;
}

// The slot of a name, or of a number; null: there is none.
function slotNumber({ slots, addresses: { columns, tables } }, name) {
  const named = name.trim().match(/^(\d+)(?::(\d+))?$/);
  if (!named) return null;
  let slot = Number(named[1]);
  if (named[2] !== undefined) {
    if (columns === null || Number(named[2]) >= columns) return null;
    slot = (slot - (tables ? 1 : 0)) * columns + Number(named[2]);
  }
  return slot >= 0 && slot < slots ? slot : null;
}

function words(list) {
  const parts = list.map(([text, logit]) =>
    make("span", {}, make("bdi", {}, `"${text}"`), ` ${logit > 0 ? "+" : ""}${logit}`));
  return make("span", { class: "words" }, ...parts);
}

function slotCard({ facts, data, counts, codes, first }, slot) {
  const mass = codes[slot] ? Math.exp(data.mass.low + (codes[slot] - 1) * data.mass.step) : 0;
  const known = data.slots[slot];
  const reads = { "data-reads": String(counts[slot]), "data-slot": String(slot) };
  const heads = known ? known.heads.map(([h, n]) => `head ${h}: ${share(n / known.reads)}`).join(", ") : "";
  const parts = [
    make("h3", {}, `Slot ${slotName(facts, slot)}`),
    make(
      "p",
      {},
      make("span", reads, `${count(counts[slot])} reads`),
      `, ${share(mass / (data.mass.total || 1))} of the mass`,
      heads && `; ${heads}`,
    ),
  ];
  if (known?.raises) {
    parts.push(make("p", {}, "Its value raises ", words(known.raises)));
    parts.push(make("p", {}, "and lowers ", words(known.lowers)));
  } else if (first?.[slot]) {
    parts.push(make("p", {}, "Its value raises most ", token(`"${data.tokens[first[slot] - 1]}"`)));
  }
  if (known?.pattern) parts.push(make("p", {}, "Its contexts share: ", token(known.pattern)));
  if (known?.contexts.length) {
    const rows = known.contexts.map(([weight, before, read, after]) => [
      weight.toFixed(3),
      token(before, make("mark", {}, read), after),
    ]);
    parts.push(table("Read most at the marked token", ["Weight", "Context"], rows));
  } else if (counts[slot]) {
    parts.push(note("Contexts are kept for the slots with most mass only."));
  }
  return parts;
}

// The colours of a map with their numbers: the mass of a slot, where uniform reading gives 1.
function colourBar(colours) {
  const ticks = make("div", { class: "ticks" }), bar = make("div", { class: "bar" });
  bar.style.background = `linear-gradient(to right, ${colours.filter((_, i) => i % 15 === 0).join(", ")})`;
  const node = make(
    "div",
    { class: "scale" },
    make("p", {}, "Mass of a slot (1: as in uniform reading)"),
    bar,
    ticks,
    make("p", {}, make("span", { class: "unread" }), "never read"),
  );
  const draw = (low, high) => {
    const steps = high - low > Math.log(200) ? [1] : [1, 2, 5], at = [];
    for (let power = Math.floor(low / Math.LN10); power <= high / Math.LN10; power++)
      for (const step of steps) if (Math.log(step) + power * Math.LN10 >= low) at.push(step * 10 ** power);
    const inside = at.filter((v) => Math.log(v) <= high);
    const few = inside.filter((_, i) => i % Math.ceil(inside.length / 6) === 0);
    const marks = (few.length ? few : [Math.exp(high)]).map((v) => {
      const mark = make("span", {}, short(v));
      mark.style.left = `${high > low ? (100 * (Math.log(v) - low)) / (high - low) : 0}%`;
      return mark;
    });
    ticks.replaceChildren(...marks);
  };
  return { node, draw };
}

function mapPanel(column, colours) {
  const { facts, data, codes, shape } = column;
  let most = 0;
  for (let slot = 0; slot < facts.slots; slot++) if (codes[slot] > codes[most]) most = slot;
  const first = codes[most] ? [note("The slot with most mass:"), ...slotCard(column, most)] : [note("No slot was read.")];
  const card = make("div", { class: "card", "aria-live": "polite" }, ...first);
  const name = (slot) => slotName(facts, slot);
  const show = (...parts) => {
    card.replaceChildren(...parts);
    map.canvas.scrollIntoView({ block: "nearest" });
    card.scrollIntoView({ block: "nearest" });
  };
  const choose = (slot) => slot < facts.slots && show(...slotCard(column, slot));
  const uniform = Math.log((data.mass.total || 1) / facts.slots), bar = colourBar(colours);
  const level = (code) => data.mass.low + (code - 1) * data.mass.step - uniform;
  const map = slotMap({ ...shape, codes, colours, level, dark: data.mass.dark, bar, choose, name });
  if (codes[most]) map.go(most);
  const go = (slot) => {
    map.go(slot);
    choose(slot);
  };
  const missing = (text) => {
    map.leave();
    const last = facts.slots - 1, names = name(last) === String(last) ? "" : ` or ${name(0)} to ${name(last)}`;
    show(note(`There is no slot ${text} (expected 0 to ${last}${names}).`));
  };
  const where = make(
    "div",
    {},
    slotForm(column, map, go, missing),
    note(HOW + sides(facts.addresses, data.unit)),
    map.canvas,
    bar.node,
    mostMass(column, go),
  );
  return panel("map", `${data.title} in use`, make("div", { class: "slots" }, where, make("div", {}, card)));
}

function slotForm({ facts }, map, go, missing) {
  const field = make("input", { size: "9", "aria-label": "Slot", placeholder: slotName(facts, 0) });
  const form = make(
    "form",
    {},
    make("label", {}, "Slot ", field),
    make("button", {}, "Show"),
    button("Zoom in", () => map.zoom(0.6)),
    button("Zoom out", () => map.zoom(1.6)),
    button("Whole", map.whole),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const slot = slotNumber(facts, field.value);
    if (slot === null) missing(field.value);
    else go(slot);
  });
  return form;
}

function mostMass({ facts, data, codes }, go) {
  const { patterned, slots, shuffled } = data.patterns; // of the slots that are listed
  if (!slots) return note(facts.layers ? "The slots of a pool are described with its layers." : "No slot was read.");
  const best = Object.keys(data.slots).map(Number).sort((a, b) => codes[b] - codes[a]);
  const rows = best.slice(0, slots).map((slot) => {
    const known = data.slots[slot];
    return [
      button(slotName(facts, slot), () => go(slot)),
      [known.reads, count],
      token(known.raises ? `"${known.raises[0][0]}"` : "-"),
      token(known.pattern || "-"),
    ];
  });
  const text =
    `Of the ${count(slots)} slots with most mass, ${count(patterned)} have contexts that share a pattern; with ` +
    `contexts shuffled among them, ${shuffled.toFixed(1)}.`;
  const listed = table("Most mass first", ["Slot", "Reads", "Raises", "Pattern"], rows);
  return folded("The slots with most mass", note(text), scrolled(listed));
}
