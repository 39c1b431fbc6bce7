"use strict";
// Charts: lines by uPlot, bars drawn here. All are drawn when the page is laid out, since a holder has no width before,
// and again for another width or colour scheme.

const CHARTS = new Set();
const CHART_HEIGHT = 270;
const GUTTER = 46; // left of the rows of a canvas, for their numbers

/** A chart is a function that fills its holder and returns its uPlot, if it has one. */
function chart(holder, draw) {
  const entry = { holder, draw, width: 0, plot: null };
  entry.again = () => {
    if (entry.plot) entry.plot.destroy();
    holder.replaceChildren();
    entry.width = holder.clientWidth;
    entry.plot = draw(holder) || null;
  };
  CHARTS.add(entry);
  return entry;
}

function redrawAll(changedWidthOnly) {
  for (const entry of CHARTS) {
    if (!changedWidthOnly || Math.abs(entry.holder.clientWidth - entry.width) > 1) entry.again();
  }
}

/**
 * Lines over a common axis. series: [{label, colour, dashed, xs, ys, thin, points}], band: [lower, upper] (of series),
 * marks: [{x, label, colour}], stripe: [low, high] that is shaded across the chart.
 */
function lines(holder, { series, band, marks, stripe, xLabel, xText, yText, logY, fromZero, xRange, yRange }) {
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
      { ...axis, label: xLabel, labelFont: "12px system-ui", labelSize: 18, size: 36, values: shown(xText || number) },
      { ...axis, size: 62,
        values: logY ? (plot, values) => values.map((value) => (value !== null && Math.abs(Math.log10(value) % 1) < 1e-9 ? (yText || number)(value) : "")) : shown(yText || number) },
    ],
    cursor: { drag: { x: true, y: false }, points: { size: 6 } },
    legend: { live: true },
    series: [
      { label: xLabel || "at", value: (plot, value) => (value === null ? NOTHING : (xText || number)(value)) },
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
    hooks: {
      drawAxes: stripe ? [(plot) => drawStripe(plot, stripe)] : [],
      draw: marks && marks.length ? [(plot) => drawMarks(plot, marks)] : [],
      setCursor: [(plot) => plot.root.classList.toggle("idle", !(plot.cursor.left >= 0))], // no values to show
    },
  };
  if (fromZero && !logY) options.scales.y.range = (plot, least, most) => [0, (most || 1) * 1.05];
  if (yRange) options.scales.y.range = () => yRange;
  if (xRange) options.scales.x.range = (plot, least, most) => (least > xRange[0] || most < xRange[1] ? [least, most] : xRange);
  if (band) options.bands = [{ series: [band[1] + 1, band[0] + 1], fill: seen(series[band[0]].colour) + "30" }];
  const plot = new uPlot(options, data, holder);
  plot.root.classList.add("idle");
  if (series.filter((one) => !one.thin).length < 2) plot.root.classList.add("single");
  plot.over.title = "drag to zoom, double-click for everything";
  return plot;
}

function drawStripe(plot, [low, high]) {
  const { ctx, bbox } = plot, top = plot.valToPos(high, "y", true), bottom = plot.valToPos(low, "y", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.fillStyle = themed("stripe");
  ctx.fillRect(bbox.left, top, bbox.width, Math.max(1, bottom - top));
  ctx.restore();
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
    ctx.fillText(mark.label, x + (right ? -6 : 6) * ratio, mark.top ? bbox.top + (12 + 15 * index) * ratio : bbox.top + bbox.height - (8 + 15 * index) * ratio);
  });
  ctx.restore();
}

/** Fit a canvas to the width of its holder; returns its context, in CSS pixels, and that width. */
function fitted(canvas, holder, height) {
  const ratio = window.devicePixelRatio || 1, width = Math.max(200, holder.clientWidth);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return [context, width];
}

/** Grouped bars. groups: labels under the axis; series: [{label, colour, values, texts}] with one value per group. */
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

const HEAT = [[0.5, "heat-quick"], [1, "heat-usual"], [2, "heat-slow"], [8, "heat-worst"]];

/** The colour of a ratio to the usual time, interpolated between colours of the style sheet. */
function heatColours(count) {
  const stops = HEAT.map(([ratio, name]) => [Math.log2(ratio), themed(name).match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16))]);
  return Array.from({ length: count }, (_, place) => {
    const at = -1 + (4 * place) / (count - 1), next = Math.max(1, stops.findIndex(([stop]) => stop >= at - 1e-9));
    const [[low, from], [high, to]] = [stops[next - 1], stops[next]], part = (at - low) / (high - low);
    return `rgb(${from.map((value, index) => Math.round(value + (to[index] - value) * part)).join(",")})`;
  });
}

/** Heat map of worker × update: each cell is the mean time of its tickets relative to the usual ticket. */
function heatMap(holder, says, heat, what, begin) {
  const cells = decoded(heat.cells, Uint8Array), tall = Math.max(3, Math.min(18, Math.round(260 / heat.rows)));
  const canvas = make("canvas", { role: "img", "aria-label": "heat map of ticket times" });
  holder.append(canvas);
  const [context, width] = fitted(canvas, holder, heat.rows * tall + 34);
  const plotted = width - GUTTER - 6, colours = heatColours(255), wide = plotted / heat.columns;
  for (let row = 0; row < heat.rows; row += 1) {
    for (let column = 0; column < heat.columns; column += 1) {
      const cell = cells[row * heat.columns + column];
      if (!cell) continue;
      context.fillStyle = colours[cell - 1];
      context.fillRect(GUTTER + column * wide, row * tall, Math.ceil(wide * 4) / 4 + 0.25, tall - (tall > 5 ? 1 : 0));
    }
  }
  context.font = "11px system-ui";
  context.fillStyle = themed("quiet");
  context.textAlign = "right";
  const step = tall >= 12 ? 1 : tall >= 6 ? 2 : heat.rows > 120 ? 20 : 10;
  for (let row = 0; row < heat.rows; row += step) context.fillText(String(row * heat.workers_per_row), GUTTER - 6, Math.max(9, row * tall + tall / 2 + 4));
  context.textAlign = "center";
  const marks = Math.max(2, Math.min(10, Math.floor(plotted / 90)));
  for (let mark = 0; mark <= marks; mark += 1) {
    const column = Math.round((mark * (heat.columns - 1)) / marks);
    context.fillText(whole(begin + column * heat.versions), Math.min(GUTTER + (column + 0.5) * wide, width - 14), heat.rows * tall + 14);
  }
  context.fillText(what, GUTTER + plotted / 2, heat.rows * tall + 30);
  canvas.addEventListener("pointermove", (event) => {
    const row = Math.floor(event.offsetY / tall), column = Math.floor((event.offsetX - GUTTER) / wide);
    const cell = row >= 0 && row < heat.rows && column >= 0 && column < heat.columns ? cells[row * heat.columns + column] : 0;
    const times = heat.ratios[0] * (heat.ratios[1] / heat.ratios[0]) ** ((cell - 1) / 254);
    const first = begin + column * heat.versions, last = first + heat.versions - 1;
    says.textContent = !cell ? "" : `${rowName(heat, row)}, ${what} ${whole(first)}${last > first ? "–" + whole(last) : ""}: ${seconds(times * heat.usual_s)}, ×${times.toFixed(2)}`;
  });
}

function rowName(data, row) {
  const each = data.workers_per_row;
  return each === 1 ? `worker ${row}` : `workers ${row * each}–${(row + 1) * each - 1}`;
}

/** Shades from dark to bright for an ordered family of lines; distinguishable in greyscale too. */
function shade(place, count) {
  const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [230, 190, 40]];
  const at = (count <= 1 ? 0.4 : place / (count - 1)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at)), part = at - low;
  const mixed = stops[low].map((value, index) => Math.round(value + (stops[low + 1][index] - value) * part));
  if (low === 0 && onDark()) mixed.forEach((value, index) => { mixed[index] = Math.min(255, value + 70); });
  return "#" + mixed.map((value) => value.toString(16).padStart(2, "0")).join("");
}
