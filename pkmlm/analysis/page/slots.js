"use strict";
// The map of a memory's slots, and what single slots hold.

const HOW =
  "Click a slot, or move with the arrow keys (shift: ten) and press Enter; + and - zoom, 0 shows all, the wheel zooms " +
  "once the map is chosen, dragging moves. ";
const SIDES = {
  hash: "Rows: tables; columns: buckets.",
  "product-key": "Rows: sub-key of the first half; columns: of the second.",
};

function grid(facts) {
  const rows = facts.tables ? facts.tables.length : Math.sqrt(facts.slots);
  return { rows, columns: facts.slots / rows };
}

function slotName(facts, shape, slot) {
  const row = Math.floor(slot / shape.columns), column = slot % shape.columns;
  if (facts.tables) return `${row + 1}:${column}`;
  return facts.kind === "product-key" ? `${row}:${column}` : String(slot);
}

// The slot of a name, or of a number; null: there is none.
function slotNumber(facts, shape, name) {
  const named = name.trim().match(/^(\d+)(?::(\d+))?$/);
  if (!named) return null;
  const first = Number(named[1]);
  if (named[2] === undefined) return first < facts.slots ? first : null;
  const row = first - (facts.tables ? 1 : 0), column = Number(named[2]);
  const there = row >= 0 && row < shape.rows && column < shape.columns;
  return there ? row * shape.columns + column : null;
}

function words(list) {
  const parts = list.flatMap(([text, logit]) => [
    make("bdi", {}, `"${text}"`),
    ` ${logit > 0 ? "+" : ""}${logit}   `,
  ]);
  return make("span", { class: "words" }, ...parts);
}

function slotCard({ facts, data, counts, codes, first, shape }, slot) {
  const mass = codes[slot] ? Math.exp(data.mass.low + (codes[slot] - 1) * data.mass.step) : 0;
  const known = data.slots[slot];
  const reads = { "data-reads": String(counts[slot]), "data-slot": String(slot) };
  const heads = known ? known.heads.map(([h, n]) => `head ${h}: ${share(n / known.reads)}`).join(", ") : "";
  const parts = [
    make("h3", { tabindex: "-1" }, `Slot ${slotName(facts, shape, slot)}`),
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
    const rows = known.contexts.map(([weight, , , before, read, after]) => [
      weight.toFixed(3),
      token(before, make("mark", {}, read), after),
    ]);
    parts.push(table("Read most at the marked token", ["Weight", "Context"], rows));
  } else if (counts[slot]) {
    parts.push(note("Contexts are kept for the slots with most mass only."));
  }
  return parts;
}

function mapPanel(column, colours) {
  const { facts, data, codes, shape } = column;
  const card = make("div", { class: "card", "aria-live": "polite" }, note("No slot chosen."));
  const name = (slot) => slotName(facts, shape, slot);
  const choose = (slot) => card.replaceChildren(...slotCard(column, slot));
  const map = slotMap({ ...shape, codes, colours, dark: data.mass.dark, choose, name });
  const go = (slot) => {
    map.go(slot);
    choose(slot);
  };
  const scale = make("div", { class: "scale" });
  scale.style.background = `linear-gradient(to right, ${colours.filter((_, i) => i % 15 === 0).join(", ")})`;
  const ends = [make("span", {}, "little mass (grey: never read)"), make("span", {}, "much")];
  return panel(
    "map",
    facts.kind === "product-key" ? "Product keys in use" : "Slots in use",
    slotForm(column, map, go),
    note(HOW + (SIDES[facts.kind] || "")),
    map.canvas,
    scale,
    make("div", { class: "ends" }, ...ends),
    card,
    mostMass(column, go),
  );
}

function slotForm({ facts, shape }, map, go) {
  const field = make("input", { size: "9", "aria-label": "Slot", placeholder: slotName(facts, shape, 0) });
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
    const slot = slotNumber(facts, shape, field.value);
    if (slot !== null) go(slot);
  });
  return form;
}

function mostMass({ facts, data, codes, shape }, go) {
  const { patterned, slots, shuffled } = data.patterns; // of the slots that are listed
  const best = Object.keys(data.slots).map(Number).sort((a, b) => codes[b] - codes[a]);
  const rows = best.slice(0, slots).map((slot) => {
    const known = data.slots[slot];
    return [
      button(slotName(facts, shape, slot), () => go(slot)),
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
