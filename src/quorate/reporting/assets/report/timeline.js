"use strict";
// Timeline of what each worker did. Zoomed out it is an outline (shares of time), zoomed in every ticket is a box.

const KIND_WORDS = {
  used: "computed, used", dropped: "computed, dropped", cancelled: "cancelled before it was done", lost: "lost with its worker",
  gone: "no worker", open: "computed", waiting: "waiting",
};
const AXIS = 24, LEAST_SPAN = 1e-6;

class WorkerTimeline {
  /** `limit`: end of the time axis, which is the end of this run or of a longer run beside it. */
  constructor(holder, says, data, limit) {
    this.holder = holder;
    this.says = says;
    this.data = data;
    this.shares = decoded(data.outline.shares, Uint8Array);
    this.stretches = data.stretches.map((one) => ({
      from: one.from, to: one.to, rows: decoded(one.rows, Uint8Array), kinds: decoded(one.kinds, Uint8Array),
      starts: decoded(one.starts, Float32Array), lengths: decoded(one.lengths, Float32Array),
    }));
    this.rowHeight = data.rows <= 16 ? 18 : data.rows <= 48 ? 11 : data.rows <= 128 ? 6 : 4;
    this.seconds = limit || data.seconds || 1;
    this.canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": "timeline of workers; plus and minus zoom, arrows move" });
    this.selection = make("div", { class: "selection", hidden: true });
    holder.append(this.canvas, this.selection);
    this.from = 0;
    this.to = this.seconds;
    this.listen();
    const entry = { holder, width: 0, again: () => { entry.width = holder.clientWidth; this.draw(); } };
    CHARTS.add(entry);
  }

  show(from, to) {
    const span = Math.min(this.seconds, Math.max(LEAST_SPAN, to - from));
    this.from = Math.max(0, Math.min(from, this.seconds - span));
    this.to = this.from + span;
    this.draw();
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  move(part) {
    const by = part * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  // ------------------------------------------------------------ drawing

  draw() {
    const [context, width] = fitted(this.canvas, this.holder, this.data.rows * this.rowHeight + AXIS);
    this.plotWidth = width - GUTTER - 6;
    this.colours = Object.fromEntries(Object.keys(KIND_WORDS).map((kind) => [kind, themed(kind)]));
    this.detail = this.showsTickets();
    this.drawOutline(context, window.devicePixelRatio || 1);
    if (this.detail) this.drawTickets(context);
    this.drawAxes(context, width);
    this.canvas.dataset.from = this.from;
    this.canvas.dataset.to = this.to;
    this.canvas.dataset.detail = this.detail ? "tickets" : "outline";
  }

  x(time) {
    return GUTTER + ((time - this.from) / (this.to - this.from)) * this.plotWidth;
  }

  time(x) {
    return this.from + ((x - GUTTER) / this.plotWidth) * (this.to - this.from);
  }

  inView() {
    return this.stretches.filter((one) => one.to > this.from && one.from < this.to);
  }

  /** Boxes are drawn if they are wide enough to be seen on average. */
  showsTickets() {
    let boxes = 0, covered = 0;
    for (const one of this.inView()) {
      const part = Math.min(one.to, this.to) - Math.max(one.from, this.from);
      boxes += (one.rows.length * part) / Math.max(one.to - one.from, 1e-12);
      covered += part;
    }
    const plotted = (covered / (this.to - this.from)) * this.plotWidth * this.data.rows;
    return boxes > 0 && plotted / boxes > 2.2;
  }

  drawOutline(context, ratio) {
    const { width_s: width, bins, kinds } = this.data.outline, rows = this.data.rows;
    const columns = Math.max(1, Math.round(this.plotWidth * ratio)), tall = Math.max(1, Math.round(this.rowHeight * ratio));
    const gap = this.rowHeight >= 6 ? Math.max(1, Math.round(ratio)) : 0;
    const image = context.createImageData(columns, rows * tall);
    const pixels = new Uint32Array(image.data.buffer);
    const colours = kinds.map((kind) => packed(this.colours[kind]));
    const waiting = packed(this.colours.waiting), heights = new Float64Array(kinds.length);
    for (let row = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        const at = this.from + ((column + 0.5) / columns) * (this.to - this.from);
        if (at > this.data.seconds) break; // the run is over
        const bin = Math.min(bins - 1, Math.floor(at / width));
        // The shares of a bin are stacked; the rest of the row is waiting.
        const level = tall - gap;
        let sum = 0;
        for (let kind = 0; kind < kinds.length; kind += 1) {
          sum += this.shares[(kind * rows + row) * bins + bin];
          heights[kind] = Math.round((level * Math.min(255, sum)) / 255);
        }
        let kind = 0;
        for (let y = 0; y < level; y += 1) {
          while (kind < kinds.length && y >= heights[kind]) kind += 1;
          pixels[(row * tall + level - 1 - y) * columns + column] = kind < kinds.length ? colours[kind] : waiting;
        }
      }
    }
    context.putImageData(image, Math.round(GUTTER * ratio), 0);
  }

  drawTickets(context) {
    const gap = this.rowHeight >= 6 ? 1 : 0, tall = this.rowHeight - gap;
    for (const one of this.inView()) {
      const left = Math.max(GUTTER, this.x(one.from)), right = Math.min(GUTTER + this.plotWidth, this.x(one.to));
      context.fillStyle = this.colours.waiting;
      for (let row = 0; row < this.data.rows; row += 1) context.fillRect(left, row * this.rowHeight, right - left, tall);
    }
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, this.plotWidth, this.data.rows * this.rowHeight);
    context.clip();
    const open = this.data.kinds.indexOf("open");
    for (const first of [true, false]) { // open tickets first: a later stretch paints over them
      for (const one of this.inView()) {
        for (let index = 0; index < one.rows.length; index += 1) {
          if ((one.kinds[index] === open) !== first) continue;
          const start = one.from + one.starts[index], end = start + one.lengths[index];
          if (end < this.from || start > this.to) continue;
          const left = this.x(start), wide = this.x(end) - left;
          context.fillStyle = this.colours[this.data.kinds[one.kinds[index]]];
          context.fillRect(left, one.rows[index] * this.rowHeight, Math.max(0.5, wide > 3 ? wide - 0.7 : wide), tall);
        }
      }
    }
    context.restore();
  }

  drawAxes(context, width) {
    const bottom = this.data.rows * this.rowHeight;
    context.font = "11px system-ui";
    context.fillStyle = themed("quiet");
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(12 / this.rowHeight));
    const step = every === 1 ? 1 : every <= 2 ? 5 : 10;
    for (let row = 0; row < this.data.rows; row += step) {
      context.fillText(String(row * this.data.workers_per_row), GUTTER - 6, Math.max(5, row * this.rowHeight + this.rowHeight / 2));
    }
    context.textBaseline = "alphabetic";
    const span = this.to - this.from, rough = span / Math.max(3, Math.floor(this.plotWidth / 100));
    const power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) || power * 10;
    context.textAlign = "center";
    for (let at = Math.ceil(this.from / tick) * tick; at <= this.to; at += tick) {
      const x = this.x(at);
      context.fillRect(x, bottom, 1, 4);
      if (x > GUTTER + 12 && x < width - 18) context.fillText(moment(at, tick * 10), x, bottom + 17);
    }
  }

  // ------------------------------------------------------------ mouse and keyboard

  listen() {
    let pressed = null;
    const inside = (event) => Math.max(GUTTER, Math.min(GUTTER + this.plotWidth, event.offsetX));
    this.canvas.addEventListener("pointerdown", (event) => {
      pressed = { x: inside(event), from: this.from, to: this.to, pans: event.shiftKey || event.pointerType === "touch" };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!pressed) { this.tell(event.offsetX, event.offsetY); return; }
      const x = inside(event);
      if (pressed.pans) {
        const by = ((pressed.x - x) / this.plotWidth) * (pressed.to - pressed.from);
        this.show(pressed.from + by, pressed.to + by);
        return;
      }
      this.selection.hidden = false;
      Object.assign(this.selection.style, {
        left: Math.min(x, pressed.x) + "px", width: Math.abs(x - pressed.x) + "px", height: this.data.rows * this.rowHeight + "px",
      });
    });
    const release = (event) => {
      if (pressed && !pressed.pans && Math.abs(inside(event) - pressed.x) > 4) {
        const ends = [this.time(pressed.x), this.time(inside(event))].sort((one, other) => one - other);
        this.show(...ends);
      }
      pressed = null;
      this.selection.hidden = true;
    };
    this.canvas.addEventListener("pointerup", release);
    this.canvas.addEventListener("pointercancel", () => { pressed = null; this.selection.hidden = true; });
    this.canvas.addEventListener("dblclick", () => this.show(0, this.seconds));
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // a plain wheel scrolls the page
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event.offsetX));
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => {
      const does = {
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.show(0, this.seconds),
        ArrowLeft: () => this.move(-0.25), ArrowRight: () => this.move(0.25),
      }[event.key];
      if (does) { event.preventDefault(); does(); }
    });
  }

  tell(x, y) {
    const row = Math.floor(y / this.rowHeight), time = this.time(x);
    if (row < 0 || row >= this.data.rows || x < GUTTER || time > Math.min(this.to, this.data.seconds)) { this.says.textContent = ""; return; }
    const span = this.to - this.from, stretch = this.inView().find((one) => one.from <= time && time <= one.to);
    this.says.textContent = `${rowName(this.data, row)}, ${moment(time, span)}: ` + (this.detail && stretch ? this.ticketAt(row, time, span) : this.sharesAt(row, time));
  }

  ticketAt(row, time, span) {
    let found = "waiting";
    for (const one of this.inView()) {
      for (let index = 0; index < one.rows.length; index += 1) {
        if (one.rows[index] !== row) continue;
        const start = one.from + one.starts[index];
        if (start > time || start + one.lengths[index] < time) continue;
        const kind = this.data.kinds[one.kinds[index]];
        if (kind === "open" && found !== "waiting") continue;
        found = `${KIND_WORDS[kind]}, ${seconds(one.lengths[index])} from ${moment(start, span)}`;
      }
    }
    return found;
  }

  sharesAt(row, time) {
    const { width_s: width, bins, kinds } = this.data.outline;
    const bin = Math.min(bins - 1, Math.floor(time / width));
    const parts = kinds.map((kind, index) => this.shares[(index * this.data.rows + row) * bins + bin] / 255);
    const names = kinds.map((kind) => (kind === "gone" ? "without a worker" : kind));
    const waits = Math.max(0, 1 - parts.reduce((sum, one) => sum + one, 0));
    return [...parts.map((part, index) => [part, names[index]]), [waits, "waiting"]]
      .filter(([part]) => part > 0.005).map(([part, name]) => `${share(part)} ${name}`).join(", ");
  }
}

/** A colour of the style sheet as a pixel. */
function packed(colour) {
  const value = parseInt(colour.slice(1), 16);
  return (0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}
