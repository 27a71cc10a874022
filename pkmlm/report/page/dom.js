"use strict";
// Elements of the page. Text from models and corpora goes into it as text nodes only.
const show = (id) => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const format = (shown) => (x) => (x === null || x === undefined ? "-" : shown(x));
const count = format((x) => x.toLocaleString("en"));
const share = format((x) => (100 * x).toPrecision(3) + " %");
const fixed = (digits) => format((x) => x.toFixed(digits));

const note = (text) => make("p", { class: "note" }, text);
const token = (...children) => make("bdi", { class: "token" }, ...children);

function button(text, act) {
  const node = make("button", { type: "button" }, text);
  node.addEventListener("click", act);
  return node;
}

// A cell of a table: text or a node, or [value, how it is shown], of which the exact value stands in data-value.
function cellOf(cell, first) {
  if (first) return make("th", { scope: "row" }, cell);
  if (!Array.isArray(cell)) return make("td", {}, cell);
  const [value, shown] = cell;
  const exact = value === null || value === undefined ? {} : { "data-value": String(value) };
  return make("td", { class: "number", ...exact }, shown(value));
}

function table(caption, headings, rows) {
  const numeric = (i) => i > 0 && rows.length > 0 && Array.isArray(rows[0][i]);
  const head = headings.map((text, i) => make("th", { scope: "col", class: numeric(i) ? "number" : "" }, text));
  const body = rows.map((cells) => make("tr", {}, ...cells.map((cell, i) => cellOf(cell, i === 0))));
  return make(
    "table",
    {},
    make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {}, ...body),
  );
}

function panel(id, title, ...children) {
  const attributes = { class: "panel", "data-panel": id, "aria-label": title };
  return make("section", attributes, make("h3", {}, title), ...children);
}

const scrolled = (node) => make("div", { class: "scroll" }, node);
const folded = (title, ...children) => make("details", {}, make("summary", {}, title), ...children);
const behind = (...given) => folded("As a table", scrolled(table(...given)));
