"use strict";
// Charts of lines and bars.

const CHART = { width: 560, height: 260 };
const DASHED = [8, 5];

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
  paths: line.bars ? uPlot.paths.bars({ size: [0.7, 60] }) : undefined,
});

// Numbers beside a logarithmic axis.
const powers = (u, at) => at.map((v) => (v === null ? "" : v < 0.01 ? v.toExponential(0) : count(v)));

// Of the bars at x those whose ticks have room below them, at 8 pixels a character.
function labelled(x, ticks, width) {
  const longest = Math.max(...x.map((at) => ticks(at).length));
  const each = Math.ceil((8 * (longest + 1) * x.length) / width);
  return x.filter((_, i) => i % each === 0);
}

// lines: [{label, values, colour, dash, points, bars}] over x. options: xLabel, yLabel; log: both axes are logarithmic;
// zero: y begins at 0; ticks(x): what stands below each bar.
function chart(label, x, lines, options) {
  const box = make("div", { class: "chart", role: "img", "aria-label": label });
  const { xLabel, yLabel, log, zero, ticks } = options;
  const scale = log ? { distr: 3, log: 10 } : {};
  const below = ticks && { splits: (u) => labelled(x, ticks, u.width - 80), values: (u, at) => at.map(ticks) };
  const shown = (u, i) => `var(--${lines[i - 1].colour})`;
  const settings = {
    ...CHART,
    legend: { markers: { stroke: shown, fill: (u, i) => (lines[i - 1].bars ? shown(u, i) : "transparent") } },
    series: [{ label: xLabel }, ...lines.map(series)],
    scales: {
      x: { time: false, ...scale, ...(ticks && { range: (u, low, high) => [low - 0.7, high + 0.7] }) },
      y: { ...scale, ...(zero && { range: (u, low, high) => [0, high > 0 ? high * 1.05 : 1] }) },
    },
    axes: [
      axis(xLabel, { size: 46, ...below }),
      axis(yLabel, { size: 58, ...(log && { values: powers }) }),
    ],
  };
  const drawn = new uPlot(settings, [x, ...lines.map((line) => line.values)], box);
  box.draw = () => drawn.redraw(false);
  requestAnimationFrame(() => {
    if (box.clientWidth) drawn.setSize({ width: Math.min(720, box.clientWidth), height: CHART.height });
  });
  return box;
}
