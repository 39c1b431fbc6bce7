"use strict";
// Shared by the report and the live page: HTML elements and the simplest formats.
// Text from a trace is only assigned to textContent, so it cannot become markup.

const NOTHING = "–";

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

/** The words of a command to type; lines break between them where possible. */
function commandWords(text) {
  return text.split(" ").flatMap((word) => [make("span", {}, word), " "]).slice(0, -1);
}

/** A whole number with thousands separators. */
function whole(value) {
  return value == null ? NOTHING : Math.round(value).toLocaleString("en");
}

/** The number and the unit of a size in bytes. */
function scaledBytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return [value, units[unit]];
}

/** A colour of the style sheet. */
function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}
