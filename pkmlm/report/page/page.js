"use strict";
// What is shown, and in which colours.

async function prepared(run, index) {
  const facts = run.entry.memories[index], data = run.memories[index];
  return {
    facts,
    data,
    shape: grid(facts),
    counts: await numbers(data.counts, Float64Array),
    codes: await numbers(data.mass.codes, Uint16Array),
    first: data.first && (await numbers(data.first, Uint32Array)),
  };
}

function panels(run, column, colours) {
  const { facts, data, counts } = column, { valid, drift } = run.training;
  return [
    summary(run.entry, facts),
    mapPanel(column, colours),
    sortedMass(data),
    heads(facts),
    layers(run),
    overlap(facts, colours),
    rowReads(facts, data.unit, counts),
    training(valid[data.label], drift[data.label], facts.slots),
  ].filter(Boolean);
}

async function columnOf(run, colours, place) {
  const entry = run.entry;
  const options = run.memories.map((memory) => make("option", {}, memory.label));
  const choice = make("select", {}, ...options);
  const body = make("div", { class: "panels" });
  const draw = async () => {
    if (!entry.memories.length) return body.replaceChildren(make("p", {}, "This model has no memory."));
    const chosen = choice.selectedIndex, column = await prepared(run, chosen);
    if (choice.selectedIndex !== chosen) return; // another one was chosen meanwhile
    body.replaceChildren(...panels(run, column, colours));
    rescale();
  };
  choice.addEventListener("change", draw);
  place.append(
    make("h2", {}, make("bdi", {}, `${entry.run}, step ${count(entry.step)}`)),
    make("label", {}, "Memory ", choice),
    body,
  );
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
  const named = () =>
    page.runs.map((run, i) => make("option", { value: i }, `${run.entry.run}, step ${run.entry.step}`));
  show("left").append(...named());
  show("right").append(make("option", { value: -1 }, "nothing"), ...named());
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

start().catch((error) => {
  const main = show("main");
  main.textContent = `This page cannot be shown: ${error.message}`;
  main.setAttribute("aria-busy", "false");
  throw error;
});
