"use strict";
// Charts of lines and bars.

const HEIGHT = 260;
const DASHED = [8, 5];

// The least and the largest of some values; of none, a range that holds nothing, which changes no extent that it is in.
const extent = (values) =>
  values.reduce(
    ([low, high], v) => (Number.isFinite(v) ? [Math.min(low, v), Math.max(high, v)] : [low, high]),
    [Infinity, -Infinity],
  );

// Of a figure's extents, {name: [low, high]}, one that holds those of all figures of its kind (data-scale), so that runs
// side by side can be compared by eye.
function shared(node, name) {
  const alike = [...document.querySelectorAll("[data-scale]")].filter((other) => other.dataset.scale === node.dataset.scale);
  return extent([node, ...alike].flatMap((other) => other.extents[name]));
}

// To be called when figures have come or gone.
function rescale() {
  for (const node of document.querySelectorAll("[data-scale]")) node.rescale();
}

// A colour of the style sheet, asked for whenever a chart is drawn.
function ink(name) {
  const style = getComputedStyle(document.documentElement);
  return () => style.getPropertyValue(`--${name}`).trim();
}

const axis = (label, rest) => ({
  label,
  stroke: ink("text"),
  grid: { stroke: ink("line"), width: 1 },
  ticks: { stroke: ink("line") },
  labelSize: 20,
  ...rest,
});

const series = (line) => ({
  label: line.label,
  stroke: ink(line.colour),
  width: 2,
  dash: line.dash,
  spanGaps: true,
  fill: line.bars ? ink(line.colour) : undefined,
  points: { show: Boolean(line.points), size: 6 },
  value: (u, v) => short(v),
  paths: line.bars ? uPlot.paths.bars({ size: [0.7, 60] }) : undefined,
});

// A number in a legend; nothing where the pointer is at none.
const short = (v) => (v === null || v === undefined ? "" : Number(v.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }));

// Numbers beside a logarithmic axis.
const powers = (u, at) => at.map((v) => (v === null ? "" : v < 0.01 ? v.toExponential(0) : count(v)));

// Of the bars at x those whose ticks have room below them, at 8 pixels a character.
function labelled(x, ticks, width) {
  const longest = Math.max(...x.map((at) => ticks(at).length));
  const each = Math.ceil((8 * (longest + 1) * x.length) / width);
  return x.filter((_, i) => i % each === 0);
}

// lines: [{label, values, colour, dash, points, bars}] over x. options: xLabel, yLabel; log: both axes are logarithmic, else
// y begins at 0; ticks(x): what stands below each bar; scale: what charts that share their scales are called (the label).
function chart(label, x, lines, options) {
  const { xLabel, yLabel, log, ticks, scale = label } = options;
  const box = make("div", { class: "chart", role: "img", "aria-label": label, "data-scale": scale });
  const values = lines.flatMap((line) => line.values).filter((v) => !log || v > 0);
  box.extents = { x: extent(x), y: extent(values) };
  const range = {
    x: () => {
      const [low, high] = lines[0].bars ? box.extents.x : shared(box, "x"); // parts are another model's
      if (log) return uPlot.rangeLog(low, high, 10, false);
      if (lines[0].bars) return [low - 0.7, high + 0.7];
      return low < high ? [low, high] : uPlot.rangeNum(low, high, 0.1, true);
    },
    y: () => {
      const [low, high] = shared(box, "y");
      return log ? uPlot.rangeLog(low, high, 10, false) : [0, high > 0 ? high * 1.05 : 1];
    },
  };
  const kind = log ? { distr: 3, log: 10 } : {};
  const below = ticks && { splits: (u) => labelled(x, ticks, u.width - 80), values: (u, at) => at.map(ticks) };
  const shown = (u, i) => `var(--${lines[i - 1].colour})`;
  const settings = {
    width: 320,
    height: HEIGHT,
    legend: { markers: { stroke: shown, fill: (u, i) => (lines[i - 1].bars ? shown(u, i) : "transparent") } },
    series: [{ label: xLabel, value: (u, v) => short(v) }, ...lines.map(series)],
    scales: { x: { time: false, ...kind, range: range.x }, y: { ...kind, range: range.y } },
    axes: [
      axis(xLabel, { size: 46, ...below }),
      axis(yLabel, { size: 58, ...(log && { values: powers }) }),
    ],
  };
  const plot = new uPlot(settings, [x, ...lines.map((line) => line.values)], box);
  box.plot = plot;
  box.draw = () => plot.redraw(false);
  box.rescale = () => plot.setData(plot.data);
  new ResizeObserver(() => {
    const width = Math.min(720, box.clientWidth);
    if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
  }).observe(box);
  return box;
}
