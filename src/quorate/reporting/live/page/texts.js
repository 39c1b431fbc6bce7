// Formats of numbers and times. Unlike in the report they keep trailing zeros, so that changing numbers keep their width.
"use strict";

const texts = {
  three(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 999.5) return Math.round(value).toLocaleString("en");
    return size < 1e-3 ? value.toExponential(2) : value.toPrecision(3);
  },

  number(value) {
    return value == null ? NOTHING : texts.three(value);
  },

  seconds(value) {
    if (value == null) return NOTHING;
    if (value < 1e-6) return "0\u00a0s";
    if (value < 1e-3) return `${texts.three(value * 1e6)}\u00a0µs`;
    return value < 0.9995 ? `${texts.three(value * 1e3)}\u00a0ms` : `${texts.three(value)}\u00a0s`;
  },

  // For an axis: without trailing zeros.
  tick(value) {
    return Number(value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 9 });
  },

  tickSeconds(value) {
    if (Math.abs(value) >= 1 || value === 0) return `${texts.tick(value)}\u00a0s`;
    return Math.abs(value) < 1e-3 ? `${texts.tick(value * 1e6)}\u00a0µs` : `${texts.tick(value * 1e3)}\u00a0ms`;
  },

  clock(value) {
    const whole = Math.round(value);
    const [hours, minutes, seconds] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    const two = (part) => String(part).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(seconds)}` : `${minutes}:${two(seconds)}`;
  },

  percent(value, digits = 1) {
    return value == null ? NOTHING : `${(100 * value).toFixed(digits)}\u00a0%`;
  },

  bytes(value) {
    const [size, unit] = scaledBytes(value);
    return `${unit === "B" ? size : texts.three(size)}\u00a0${unit}`;
  },
};
