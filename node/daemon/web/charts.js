"use strict";
const TALL = 208;
const shade = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function niceTicks(low, high) {
  if (!(high > low)) return [low];
  const raw = (high - low) / 6, scale = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(part => part * scale).find(part => part >= raw);
  const found = [];
  for (let number = Math.ceil(low / step); number * step <= high * (1 + 1e-9); number++) found.push(number * step);
  return found;
}

function logTicks(low, high) {
  if (high < 20 * low) return niceTicks(low, high);
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const part of [1, 2, 5]) if (part * 10 ** power >= low && part * 10 ** power <= high) found.push(part * 10 ** power);
  }
  return found;
}

class Chart {
  // lines: [{name, color}], color a variable of the style. digits: decimals of a value, or null for 1.2 M.
  constructor(id, label, lines, digits) {
    this.host = document.getElementById(id);
    this.read = document.getElementById(id + "Read");
    this.label = label;
    this.lines = lines;
    this.digits = digits;
    this.plot = null;
    this.data = [[]];
    this.mode = "";
    this.range = null;
    this.host.tabIndex = 0;
    this.host.setAttribute("role", "group");
    this.read.setAttribute("aria-live", "polite");
    this.host.addEventListener("keydown", event => this.onKey(event));
    new ResizeObserver(() => this.fit()).observe(this.host);
  }

  text(value) {
    if (value === null || value === undefined) return "–";
    return this.digits === null ? short(value) : value.toFixed(this.digits);
  }

  // columns: one array of values for each line, as long as xs. isLog: the value axis is logarithmic.
  draw(xs, columns, xName, isLog) {
    const seen = columns.some(column => column.some(value => value !== null));
    this.data = [xs, ...(isLog ? columns.map(column => column.map(value => value > 0 ? value : null)) : columns)];
    const mode = [xName, isLog, shade("--ink"), seen].join();
    if (!seen) {
      this.clear();
      this.host.textContent = "nothing yet";
    } else if (!this.plot || mode !== this.mode) {
      if (xName !== this.xName) this.range = null;
      this.build(xName, isLog);
    } else if (this.range) {
      this.plot.setData(this.data, false);
      this.plot.setScale("x", this.range);
    } else {
      this.plot.setData(this.data);
    }
    this.mode = mode;
    this.xName = xName;
    this.host.setAttribute("aria-label", `${this.label} by ${xName}: ${this.newest()}`);
    if (!this.isPointed()) this.say(seen ? `newest: ${this.newest()}` : "");
  }

  newest() {
    const shown = this.lines.map((line, place) => {
      const value = this.data[place + 1] && this.data[place + 1].findLast(value => value !== null);
      return value === undefined ? "" : `${line.name} ${this.text(value)}`;
    });
    return shown.filter(Boolean).join(", ") || "nothing yet";
  }

  clear() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.host.replaceChildren();
  }

  build(xName, isLog) {
    this.clear();
    const range = this.range, axis = {stroke: shade("--faint"), font: "11px system-ui", grid: {stroke: shade("--line"), width: 1}, ticks: {stroke: shade("--line"), width: 1, size: 4}};
    const log = {splits: (plot, place, low, high) => logTicks(low, high), filter: (plot, splits) => splits};
    this.plot = new uPlot({
      width: this.host.clientWidth || 300,
      height: TALL,
      legend: {show: false},
      scales: {
        x: {time: false, range: (plot, low, high) => low === high ? [low - 1, high + 1] : [low, high]},
        y: isLog ? {distr: 3, range: (plot, low, high) => low === null ? [1, 10] : [low * 0.97, high * 1.03]} : {},
      },
      cursor: {drag: {x: true, y: false}, points: {size: 7}},
      axes: [
        {...axis, size: 30, values: (plot, splits) => splits.map(value => Number.isInteger(value) ? short(value) : "")},
        {...axis, size: 48, values: (plot, splits) => splits.map(value => short(value)), ...(isLog ? log : {})},
      ],
      series: [{}, ...this.lines.map(line => ({stroke: shade(line.color), width: 1.6, spanGaps: true}))],
      hooks: {
        setCursor: [() => this.onCursor()],
        setScale: [(plot, key) => { if (key === "x" && this.plot) this.onRange(plot.scales.x); }],
      },
    }, this.data, this.host);
    this.xName = xName;
    if (range) this.plot.setScale("x", range);
  }

  onRange(scale) {
    const xs = this.data[0];
    const whole = scale.min <= xs[0] && scale.max >= xs[xs.length - 1];
    this.range = whole ? null : {min: scale.min, max: scale.max};
    this.host.dataset.zoomed = String(!whole);
  }

  isPointed() {
    return Boolean(this.plot) && this.plot.cursor.idx !== null && this.plot.cursor.idx !== undefined && this.plot.cursor.left >= 0;
  }

  onCursor() {
    if (!this.plot) return;
    const place = this.plot.cursor.idx;
    if (!this.isPointed()) { this.say(`newest: ${this.newest()}`); return; }
    const values = this.lines.map((line, row) => `${line.name} ${this.text(this.data[row + 1][place])}`);
    this.say(`${this.xName} ${short(this.data[0][place])}: ${values.join(", ")}`);
  }

  say(text) {
    if (this.read.textContent !== text) this.read.textContent = text;
  }

  fit() {
    const wide = this.host.clientWidth;
    if (this.plot && wide && wide !== this.plot.width) this.plot.setSize({width: wide, height: TALL});
  }

  point(place) {
    const xs = this.data[0], at = Math.max(0, Math.min(xs.length - 1, place));
    this.plot.setCursor({left: this.plot.valToPos(xs[at], "x"), top: TALL / 2});
  }

  zoom(factor) {
    const {min, max} = this.plot.scales.x, xs = this.data[0];
    const middle = this.isPointed() ? xs[this.plot.cursor.idx] : (min + max) / 2, half = (max - min) / 2 * factor;
    const low = Math.max(xs[0], middle - half), high = Math.min(xs[xs.length - 1], middle + half);
    if (high > low) this.plot.setScale("x", {min: low, max: high});
  }

  whole() {
    this.range = null;
    this.host.dataset.zoomed = "false";
    if (this.plot) this.plot.setData(this.data);
  }

  onKey(event) {
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const here = this.isPointed() ? this.plot.cursor.idx : this.data[0].length;
    const does = {
      ArrowLeft: () => this.point(here - 1), ArrowRight: () => this.point(here + 1),
      Home: () => this.point(0), End: () => this.point(this.data[0].length - 1),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "0": () => this.whole(),
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }
}
