"use strict";
// The slots of a memory as a grid that can be zoomed and walked with the keyboard.
//
// options: rows, columns: of the grid; codes: Uint16Array, 0 for no mass, one a slot; level(code): the logarithm of the mass
// that is shown as a colour; dark: the code that the colours begin at; colours: from low to high; bar: the `colourBar`;
// name(slot): what a slot is called; choose(slot): called on a click or Enter.
function slotMap(options) {
  const { rows, columns, codes, level, dark, colours } = options;
  const canvas = document.createElement("canvas");
  canvas.className = "map";
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application"); // worked with keys, which screen readers keep from an image
  canvas.width = 640;
  canvas.height = rows === columns ? 640 : Math.max(120, Math.min(640, rows * 12));
  const context = canvas.getContext("2d");
  const packed = (c) => new Uint32Array(new Uint8Array([1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)).concat(255)).buffer)[0];
  const palette = colours.map(packed);
  let top = 1;
  for (const code of codes) if (code > top) top = code;
  canvas.dataset.scale = "map";
  canvas.extents = { level: [level(dark), level(Math.max(top, dark))] };
  let view = { x: 0, y: 0, w: columns, h: rows };
  let cursor = { x: 0, y: 0 };
  let shownCursor = false;

  // The largest mass under a pixel: a lone slot stays visible however far the map is zoomed out.
  function codeAt(x0, x1, y0, y1) {
    let best = 0;
    for (let y = y0; y < y1; y++)
      for (let x = x0; x < x1; x++) {
        const code = codes[y * columns + x];
        if (code > best) best = code;
      }
    return best;
  }

  function draw() {
    const { width, height } = canvas;
    const image = context.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    const style = getComputedStyle(document.documentElement);
    const [low, high] = shared(canvas, "level"), span = high - low || 1;
    const inks = new Uint32Array(top + 1); // by code
    inks[0] = packed(style.getPropertyValue("--unread").trim());
    for (let code = 1; code <= top; code++)
      inks[code] = palette[Math.max(0, Math.min(255, Math.round((255 * (level(code) - low)) / span)))];
    options.bar.draw(low, high);
    // The first cell of each pixel, and of the one after the last.
    const edges = (start, size, length, most) =>
      Int32Array.from({ length: length + 1 }, (_, at) => Math.min(most, Math.floor(start + (at * size) / length)));
    const xs = edges(view.x, view.w, width, columns), ys = edges(view.y, view.h, height, rows);
    for (let py = 0; py < height; py++) {
      if (py > 0 && ys[py] === ys[py - 1] && ys[py + 1] <= ys[py] + 1) {
        pixels.copyWithin(py * width, (py - 1) * width, py * width); // the same row of slots
        continue;
      }
      for (let px = 0; px < width; px++) {
        const code = codeAt(xs[px], Math.max(xs[px] + 1, xs[px + 1]), ys[py], Math.max(ys[py] + 1, ys[py + 1]));
        pixels[py * width + px] = inks[code];
      }
    }
    context.putImageData(image, 0, 0);
    if (shownCursor) {
      const w = Math.max(6, width / view.w), h = Math.max(6, height / view.h);
      context.strokeStyle = style.getPropertyValue("--cursor").trim();
      context.lineWidth = 3;
      const x = ((cursor.x + 0.5 - view.x) * width) / view.w, y = ((cursor.y + 0.5 - view.y) * height) / view.h;
      context.strokeRect(x - w / 2 - 1, y - h / 2 - 1, w + 2, h + 2);
    }
    canvas.setAttribute("aria-label",
      `Map of ${rows} by ${columns} slots; shown: rows ${Math.floor(view.y)} to ${Math.ceil(view.y + view.h) - 1}, ` +
      `columns ${Math.floor(view.x)} to ${Math.ceil(view.x + view.w) - 1}; cursor at ` +
      options.name(cursor.y * columns + cursor.x));
  }

  function zoom(factor, x, y) {
    const w = Math.min(columns, Math.max(Math.min(4, columns), view.w * factor));
    const h = Math.min(rows, Math.max(Math.min(4, rows), view.h * factor));
    move(x - ((x - view.x) * w) / view.w, y - ((y - view.y) * h) / view.h, w, h);
  }

  function move(x, y, w = view.w, h = view.h) {
    view = { x: Math.max(0, Math.min(columns - w, x)), y: Math.max(0, Math.min(rows - h, y)), w, h };
    draw();
  }

  function cellOf(event) {
    const box = canvas.getBoundingClientRect();
    const x = view.x + ((event.clientX - box.left) / box.width) * view.w;
    const y = view.y + ((event.clientY - box.top) / box.height) * view.h;
    return { x: Math.max(0, Math.min(columns - 1, x)), y: Math.max(0, Math.min(rows - 1, y)) };
  }

  function go(slot) {
    cursor = { x: slot % columns, y: Math.floor(slot / columns) };
    shownCursor = true;
    if (inView()) draw();
    else move(cursor.x - view.w / 2, cursor.y - view.h / 2);
  }
  function inView() {
    const inside = (at, start, size) => at >= start && at < start + size;
    return inside(cursor.x, view.x, view.w) && inside(cursor.y, view.y, view.h);
  }
  function zoomHere(factor) { // about the cursor, or the middle of what is shown
    if (shownCursor && inView()) zoom(factor, cursor.x + 0.5, cursor.y + 0.5);
    else zoom(factor, view.x + view.w / 2, view.y + view.h / 2);
  }

  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && document.activeElement !== canvas) return; // the page scrolls
    event.preventDefault();
    const at = cellOf(event);
    zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, at.x, at.y); // with shift, some browsers turn the wheel
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held = { x: event.clientX, y: event.clientY, view: { ...view }, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!event.buttons) held = null; // released where the page was not told of it
    if (!held) return;
    const dx = event.clientX - held.x, dy = event.clientY - held.y;
    if (Math.abs(dx) + Math.abs(dy) < 5 && !held.moved) return;
    held.moved = true;
    const box = canvas.getBoundingClientRect();
    move(held.view.x - (dx / box.width) * view.w, held.view.y - (dy / box.height) * view.h);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held && !held.moved) {
      const at = cellOf(event);
      const slot = Math.floor(at.y) * columns + Math.floor(at.x);
      go(slot);
      options.choose(slot);
    }
    held = null;
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return; // the browser's own
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in steps) {
      const [dx, dy] = steps[event.key].map((d) => d * (event.shiftKey ? 10 : 1));
      const x = Math.max(0, Math.min(columns - 1, cursor.x + dx)), y = Math.max(0, Math.min(rows - 1, cursor.y + dy));
      go(y * columns + x);
    } else if (event.key === "Enter" || event.key === " ") options.choose(cursor.y * columns + cursor.x);
    else if (event.key === "+" || event.key === "=") zoomHere(0.7);
    else if (event.key === "-") zoomHere(1.4);
    else if (event.key === "0" || event.key === "Home") move(0, 0, columns, rows);
    else return;
    event.preventDefault();
  });
  function leave() {
    shownCursor = false;
    draw();
  }

  draw();
  canvas.draw = canvas.rescale = draw;
  return { canvas, go, leave, whole: () => move(0, 0, columns, rows), zoom: zoomHere };
}
