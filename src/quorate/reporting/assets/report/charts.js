"use strict";
// Lines by uPlot, bars by hand. Every chart can be drawn again, for another width or another ground.

const CHARTS = new Set();
const CHART_HEIGHT = 270;

/** A chart is a function that fills its holder; it is called again when the page's looks change. */
function chart(holder, draw) {
  const entry = { holder, draw, width: 0, plot: null };
  entry.again = () => {
    if (entry.plot) entry.plot.destroy();
    holder.replaceChildren();
    entry.width = holder.clientWidth;
    entry.plot = draw(holder) || null;
  };
  CHARTS.add(entry);
  entry.again();
  return entry;
}

function redrawAll(changedWidthOnly) {
  for (const entry of CHARTS) {
    if (!entry.holder.isConnected) CHARTS.delete(entry);
    else if (!changedWidthOnly || Math.abs(entry.holder.clientWidth - entry.width) > 1) entry.again();
  }
}

/**
 * Lines over a common axis. series: [{label, colour, dashed, xs, ys, thin, points}], band: [lower, upper] (of series),
 * marks: [{x, label, colour}].
 */
function lines(holder, { series, band, marks, xLabel, yLabel, xText, yText, xStep, logY, fromZero, yRange, legend }) {
  const tables = series.map((one) => [one.xs, one.ys]);
  const data = tables.length ? uPlot.join(tables) : [[]];
  const ink = themed("quiet"), grid = themed("grid");
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui" };
  const shown = (text) => (plot, values) => values.map((value) => (value === null ? "" : text(value)));
  const options = {
    width: Math.max(220, holder.clientWidth),
    height: CHART_HEIGHT,
    scales: { x: { time: false }, y: { distr: logY ? 3 : 1 } },
    axes: [
      { ...axis, label: xLabel, labelFont: "12px system-ui", labelSize: 18, size: 36, values: shown(xText || number), ...(xStep ? { incrs: xStep } : {}) },
      { ...axis, label: yLabel, labelFont: "12px system-ui", labelSize: 18, size: 62,
        values: logY ? (plot, values) => values.map((value) => (value !== null && Math.abs(Math.log10(value) % 1) < 1e-9 ? (yText || number)(value) : "")) : shown(yText || number) },
    ],
    cursor: { drag: { x: true, y: false }, points: { size: 6 } },
    legend: { show: legend !== false, live: true },
    series: [
      { label: "at", value: (plot, value) => (value === null ? NOTHING : (xText || number)(value)) },
      ...series.map((one) => ({
        label: one.label,
        stroke: seen(one.colour),
        width: one.thin ? 1 : 2,
        dash: one.dashed ? [7, 4] : undefined,
        spanGaps: true,
        points: { show: one.points === undefined ? one.xs.length <= 40 : one.points, size: 5 },
        value: (plot, value) => (value === null ? NOTHING : (yText || number)(value)),
      })),
    ],
    hooks: { draw: marks && marks.length ? [(plot) => drawMarks(plot, marks)] : [] },
  };
  if (fromZero && !logY) options.scales.y.range = (plot, least, most) => [0, (most || 1) * 1.05];
  if (yRange) options.scales.y.range = () => yRange;
  if (band) options.bands = [{ series: [band[1] + 1, band[0] + 1], fill: seen(series[band[0]].colour) + "30" }];
  const plot = new uPlot(options, data, holder);
  plot.over.title = "drag to zoom, double-click for everything";
  return plot;
}

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const ratio = window.devicePixelRatio || 1;
  ctx.save();
  ctx.font = 12 * ratio + "px system-ui";
  marks.forEach((mark, index) => {
    const x = plot.valToPos(mark.x, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.strokeStyle = ctx.fillStyle = seen(mark.colour);
    ctx.lineWidth = 1.5 * ratio;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const right = x > bbox.left + bbox.width / 2;
    ctx.textAlign = right ? "right" : "left";
    ctx.fillText(mark.label, x + (right ? -6 : 6) * ratio, bbox.top + bbox.height - (8 + 15 * index) * ratio);
  });
  ctx.restore();
}

/** Grouped bars. groups: labels under the axis; series: [{label, colour, values, texts}] with one value a group. */
function bars(holder, { groups, series, xLabel, valueText }) {
  const width = Math.max(220, holder.clientWidth), height = 230, left = 52, bottom = 40, top = 10;
  const most = Math.max(1e-12, ...series.flatMap((one) => one.values));
  const inner = width - left - 8, tall = height - bottom - top;
  const svg = make("svg", { class: "bars", viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const tick of [0, 0.5, 1]) {
    const y = top + tall * (1 - tick);
    svg.append(make("line", { x1: left, x2: width - 8, y1: y, y2: y }));
    svg.append(make("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, valueText(most * tick)));
  }
  const step = inner / groups.length, bar = Math.max(1, Math.min(46, (step * 0.82) / series.length));
  const every = Math.ceil((groups.length * (12 + 7 * Math.max(...groups.map((group) => group.length)))) / inner);
  groups.forEach((group, index) => {
    const middle = left + step * (index + 0.5);
    series.forEach((one, place) => {
      const value = one.values[index] || 0, tallness = (tall * value) / most;
      const x = middle + bar * (place - series.length / 2);
      const title = make("title", {}, `${one.label}: ${one.texts ? one.texts[index] : valueText(value)}`);
      svg.append(make("rect", { x, y: top + tall - tallness, width: Math.max(0.8, bar - 1), height: tallness, fill: seen(one.colour) }, title));
    });
    if (index % every === 0) svg.append(make("text", { x: middle, y: height - bottom + 15, "text-anchor": "middle" }, group));
  });
  svg.append(make("text", { x: left + inner / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
  holder.append(svg);
}

/** Shades from dark to bright, told apart in grey too, for an ordered family of lines. */
function shade(place, count) {
  const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [230, 190, 40]];
  const at = (count <= 1 ? 0.4 : place / (count - 1)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at)), part = at - low;
  const mixed = stops[low].map((value, index) => Math.round(value + (stops[low + 1][index] - value) * part));
  if (low === 0 && onDark()) mixed.forEach((value, index) => { mixed[index] = Math.min(255, value + 70); });
  return "#" + mixed.map((value) => value.toString(16).padStart(2, "0")).join("");
}
