"use strict";
// HTML elements and number formats. Text from a trace is only assigned to textContent, so it cannot become markup.

/** An element: make("td", {class: "text"}, "words", otherElement). */
function make(tag, attributes, ...inside) {
  const svg = ["svg", "rect", "line", "text", "g", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") Object.assign(element.style, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const one of inside.flat()) if (one !== null && one !== undefined) element.append(one);
  return element;
}

/** A command to type; lines break between its words where possible. */
function command(text) {
  return make("code", { class: "command" }, text.split(" ").flatMap((word) => [make("span", {}, word), " "]).slice(0, -1));
}

const NOTHING = "–";

/** Three significant digits, with thousands separators. */
function number(value) {
  if (value === null || value === undefined) return NOTHING;
  const size = Math.abs(value);
  if (size >= 999.5) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 1e-4) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

function whole(value) {
  return value === null || value === undefined ? NOTHING : Math.round(value).toLocaleString("en");
}

/** A measure or a loss: four digits. */
function measure(value) {
  return value === null || value === undefined ? NOTHING : String(Number(value.toPrecision(4)));
}

function seconds(value) {
  if (value === null || value === undefined) return NOTHING;
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
  if (value === null || value === undefined) return NOTHING;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return number(value) + " " + units[unit];
}

function share(value) {
  if (value === null || value === undefined) return NOTHING;
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

function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
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
