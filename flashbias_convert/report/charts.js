"use strict";
// Drawings: heat maps on a canvas, curves and bars as SVG. Text is only ever set as text.

const COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#ff9da7",
  "#76b7b2", "#edc948", "#7f7f7f"];

function node(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "onclick") made.addEventListener("click", value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function vector(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function largest(values) { // of any number of them: Math.max(...values) has a limit
  return values.reduce((most, value) => Math.max(most, value), 0);
}

function short(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size === 0) return "0";
  return size >= 1000 || size < 0.001 ? value.toExponential(1) : String(+value.toPrecision(3));
}

function diverging(step) { // -127 ... 127 -> blue, white, red
  const share = Math.abs(step) / 127;
  const [r, g, b] = step < 0 ? [20, 80, 150] : [165, 20, 40];
  return [r, g, b].map((c) => Math.round(247 + (c - 247) * Math.pow(share, 0.8)));
}

function heatMap(map, title, size) {
  const raw = atob(map.data);
  const steps = Int8Array.from(raw, (character) => character.charCodeAt(0));
  const canvas = node("canvas", { width: map.cols, height: map.rows, role: "img",
    "aria-label": title });
  const context = canvas.getContext("2d");
  const image = context.createImageData(map.cols, map.rows);
  steps.forEach((step, at) => image.data.set([...diverging(step), 255], 4 * at));
  context.putImageData(image, 0, 0);
  const caption = node("figcaption", {}, `${title}, up to ${short(map.scale)}`);
  const usual = caption.textContent;
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / box.width * map.cols);
    const row = Math.floor((event.clientY - box.top) / box.height * map.rows);
    const step = steps[row * map.cols + column];
    if (step === undefined) return;
    const query = Math.floor(row * size.n / map.rows);
    const key = Math.floor(column * size.m / map.cols);
    caption.textContent = `query ${query}, key ${key}: ${short(step / 127 * map.scale)}`;
  });
  canvas.addEventListener("mouseleave", () => { caption.textContent = usual; });
  return node("figure", {}, canvas, caption);
}

function frame(title, width, height) {
  const svg = vector("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.append(vector("title", {}, title), vector("text", { x: 0, y: 11 }, title));
  return svg;
}

// Share of the energy that is lost, logarithmic and upside down, against rank.
function energyCurves(energy, decisions, asked) {
  const [width, height, left, top, bottom] = [520, 260, 48, 22, 30];
  const svg = frame("share of the row-centred energy by rank (dashed: asked for, dot: chosen)",
    width, height);
  const last = Math.max(2, energy.ranks[energy.ranks.length - 1]);
  const x = (rank) => left + (rank - 1) / (last - 1) * (width - left - 10);
  const y = (lost) => top + (height - top - bottom)
    * (1 + Math.log10(Math.min(1, Math.max(1e-4, lost))) / 4);
  for (const lost of [1, 0.1, 0.01, 0.001, 0.0001]) {
    const label = `${+(100 * (1 - lost)).toPrecision(6)} %`;
    svg.append(vector("line", { x1: left, x2: width - 10, y1: y(lost), y2: y(lost), class: "axis" }),
      vector("text", { x: left - 6, y: y(lost) + 4, "text-anchor": "end" }, label));
  }
  for (let part = 0; part <= 4; part += 1) {
    const rank = Math.round(1 + part / 4 * (last - 1));
    svg.append(vector("text", { x: x(rank), y: height - 10, "text-anchor": "middle" }, rank));
  }
  if (asked < 1) {
    const at = y(1 - asked);
    svg.append(vector("line", { x1: left, x2: width - 10, y1: at, y2: at, class: "limit" }));
  }
  energy.lost.forEach((values, head) => {
    const colour = COLOURS[head % COLOURS.length];
    const points = values.map((lost, at) => `${x(energy.ranks[at])},${y(lost)}`).join(" ");
    const line = vector("polyline", { points, fill: "none", stroke: colour, "stroke-width": 1.5 });
    line.append(vector("title", {}, `head ${head}`));
    svg.append(line);
    const decision = decisions.find((one) => one.head === head);
    if (!decision || decision.rank === null || decision.rank > last) return;
    const dot = vector("circle", { cx: x(decision.rank), cy: y(1 - decision.energy), r: 4,
      fill: colour });
    dot.append(vector("title", {}, `head ${head}: rank ${decision.rank}`));
    svg.append(dot);
  });
  return svg;
}

// One bar per group of sites: the mean rank, and a dot for the largest.
function rankBars(sites, choose) {
  const [width, height, left, bottom] = [520, 150, 30, 8];
  const svg = frame("rank by site (bar: mean, dot: largest)", width, height);
  const ranked = sites.map((site, index) => ({ site, index })).filter((e) => e.site.ranks.length);
  const top = Math.max(1, largest(ranked.map((e) => largest(e.site.ranks))));
  const step = (width - left) / Math.max(1, ranked.length);
  const y = (rank) => height - bottom - rank / top * (height - bottom - 24);
  for (const rank of [0, top]) {
    svg.append(vector("text", { x: left - 5, y: y(rank) + 4, "text-anchor": "end" }, rank));
  }
  ranked.forEach(({ site, index }, at) => {
    const mean = site.ranks.reduce((sum, rank) => sum + rank, 0) / site.ranks.length;
    const x = left + at * step;
    const bar = vector("rect", { x, y: y(mean), width: Math.max(0.3, step * 0.8),
      height: height - bottom - y(mean), class: "bar" });
    bar.append(vector("title", {}, `${site.name}: mean ${short(mean)}`));
    bar.addEventListener("click", () => choose(index));
    svg.append(bar, vector("circle", { cx: x + step * 0.4, cy: y(largest(site.ranks)),
      r: Math.min(2.5, Math.max(0.7, step / 4)), class: "dot" }));
  });
  return svg;
}

function histogram(title, values, limit) {
  const [width, height, bottom, count] = [250, 130, 18, 24];
  const svg = frame(`${title} (${values.length} heads)`, width, height);
  const most = largest(values);
  const shown = limit !== null && limit <= 4 * most ? limit : null;
  const right = 1.02 * Math.max(most, shown || 0) || 1;
  const bins = new Array(count).fill(0);
  for (const value of values) bins[Math.min(count - 1, Math.floor(value / right * count))] += 1;
  const top = Math.max(1, ...bins);
  bins.forEach((number, at) => {
    const tall = number / top * (height - bottom - 22);
    const bar = vector("rect", { x: at * width / count, y: height - bottom - tall,
      width: width / count - 1, height: tall, class: "bar" });
    bar.append(vector("title", {}, `${number} heads near ${short((at + 0.5) / count * right)}`));
    svg.append(bar);
  });
  svg.append(vector("line", { x1: 0, x2: width, y1: height - bottom, y2: height - bottom,
    class: "axis" }), vector("text", { x: 0, y: height - 4 }, "0"),
  vector("text", { x: width, y: height - 4, "text-anchor": "end" }, short(right)));
  if (shown !== null) {
    const at = shown / right * width;
    svg.append(vector("line", { x1: at, x2: at, y1: 20, y2: height - bottom, class: "limit" }));
  }
  return svg;
}
