"use strict";
// Formats of numbers, and colours of runs.

/** Three significant digits, with thousands separators. */
function number(value) {
  if (value == null) return NOTHING;
  const size = Math.abs(value);
  if (size >= 999.5) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 1e-4) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/** A measure or a loss: four digits. */
function measure(value) {
  return value == null ? NOTHING : String(Number(value.toPrecision(4)));
}

function seconds(value) {
  if (value == null) return NOTHING;
  const size = Math.abs(value);
  if (size < 5e-7) return "0 s";
  if (size < 1e-3) return number(value * 1e6) + " µs";
  if (size < 1) return number(value * 1e3) + " ms";
  if (size < 600) return number(value) + " s";
  if (size < 7200) return number(value / 60) + " min";
  return number(value / 3600) + " h";
}

/** A time in the run, with as many digits as the visible span needs. */
function moment(value, span) {
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(Math.max(span, 1e-9))) + 2));
  return value.toFixed(digits) + " s";
}

function bytes(value) {
  if (value == null) return NOTHING;
  const [size, unit] = scaledBytes(value);
  return `${number(size)} ${unit}`;
}

function share(value) {
  if (value == null) return NOTHING;
  return (100 * value).toFixed(value !== 0 && Math.abs(value) < 0.1 ? 1 : 0) + " %";
}

/** A name from a trace as words: test_loss becomes test loss. */
function spoken(name) {
  return String(name).replaceAll("_", " ");
}

/** Colours are those of Okabe and Ito, except black, which is invisible on a dark background. */
function seen(colour) {
  return onDark() && colour.toLowerCase() === "#000000" ? "#e6e9ed" : colour;
}

function onDark() {
  return matchMedia("(prefers-color-scheme: dark)").matches && !matchMedia("print").matches;
}

function swatch(run) {
  return make("span", { class: run.dashed ? "swatch dashed" : "swatch", style: { borderTopColor: seen(run.colour) } });
}

function decoded(text, Kind) {
  const raw = atob(text);
  const data = new Uint8Array(raw.length);
  for (let index = 0; index < raw.length; index += 1) data[index] = raw.charCodeAt(index);
  return new Kind(data.buffer);
}
