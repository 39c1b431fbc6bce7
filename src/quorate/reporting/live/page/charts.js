// One small chart per quantity. A chart is created once and then only gets new data.
"use strict";

const CHART_HEIGHT = 190;
const WHOLE = [1, 2, 5].flatMap((digit) => [0, 1, 2, 3, 4, 5, 6].map((power) => digit * 10 ** power)).sort((a, b) => a - b);

class Chart {
  constructor(parent, { id, title, yText, xText, xLabel, kind, colour, whole = false }) {
    this.options = { yText, xText, xLabel, kind, colour, whole };
    this.place = make("div", { class: "plot" });
    parent.append(make("div", { class: "chart", id }, make("h2", {}, title), this.place));
    this.data = null;
    this.plot = null;
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  show(data) {
    this.data = data;
    if (this.plot === null) this.draw();
    else this.plot.setData(data);
  }

  // Room for the first and the last bar.
  around() {
    const places = this.data[0];
    const room = 0.6 * (places.length > 1 ? places[1] - places[0] : 1);
    return [places[0] - room, places[places.length - 1] + room];
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.plot !== null && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: CHART_HEIGHT });
  }

  // Redrawn when the colour scheme changes, since a canvas does not follow the style sheet.
  draw() {
    if (this.plot !== null) this.plot.destroy();
    this.plot = null;
    if (this.data === null || this.place.clientWidth === 0) return;
    const { yText, xText, xLabel, kind, colour, whole } = this.options;
    const font = "11px system-ui, sans-serif";
    const axis = (values, extra) => ({
      stroke: themed("soft"), font, labelFont: font, grid: { stroke: themed("line"), width: 1 }, ticks: { show: false },
      values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : values(tick))), ...extra,
    });
    const line = { stroke: themed(colour), width: 1.75, points: { show: this.data[0].length < 3 } };
    const series = [{}, { ...line }];
    const bands = [];
    if (kind === "band") {
      series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
      bands.push({ series: [3, 2], fill: `${themed(colour)}33` });
    } else if (kind === "steps") {
      series[1] = { ...line, paths: uPlot.paths.stepped({ align: 1 }) };
    } else if (kind === "bars") {
      series[1] = { ...line, width: 0, fill: themed(colour), points: { show: false }, paths: uPlot.paths.bars({ size: [0.7, 40] }) };
    }
    this.plot = new uPlot(
      {
        width: this.place.clientWidth,
        height: CHART_HEIGHT,
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false } },
        scales: {
          x: { time: false, range: kind === "bars" ? () => this.around() : undefined },
          y: { range: kind === "bars" ? (_, low, high) => [0, high || 1] : () => spread(this.data) },
        },
        axes: [axis(xText, { label: xLabel, labelSize: 16, size: 26, ...(whole ? { incrs: WHOLE } : {}) }), axis(yText, { size: 58 })],
        series,
        bands,
      },
      this.data,
      this.place,
    );
  }
}

// The range of the values without a few outliers, which would flatten the rest.
function spread([, mean, low = mean, high = mean]) {
  const nearly = (values, share) => [...values].sort((a, b) => a - b)[Math.floor(share * (values.length - 1))];
  const bottom = Math.min(nearly(low, 0.05), nearly(mean, 0));
  const top = Math.max(nearly(high, 0.95), nearly(mean, 1));
  return widened(bottom, top);
}

function widened(low, high) {
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}
