// The page: a table of sites, and the details of the one that was chosen, drawn when it is.

const data = JSON.parse(document.getElementById("overview").textContent);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const most = (values) => (values.length ? largest(values) : null);
const COLUMNS = [
  ["site", (site) => site.name],
  ["N", (site) => (site.n === site.m ? site.n || "" : `${site.n}x${site.m}`)],
  ["H", (site) => site.heads || ""],
  ["terms", (site) => site.terms.replaceAll("+", " + ")],
  ["rank", (site) => (site.ranks.length ? mean(site.ranks) : null)],
  ["energy", (site) => site.energy],
  ["logit max", (site) => site.logit_max],
  ["attention error", (site) => most(site.attention)],
  ["gain", (site) => site.gain],
  ["status", (site) => site.status],
];
// what a column means that its title does not say
const MEANINGS = {
  energy: "of the lowest head",
  gain: "expected of the attention on a Hopper card, over a dense bias in torch's SDPA",
};
const view = { sort: null, down: false, filter: "", chosen: null };

function cellText(title, value) {
  if (value === null || value === undefined) return "";
  if (title === "energy") return `${(100 * value).toFixed(2)} %`;
  if (title === "gain") return `${value.toFixed(1)}x`;
  return typeof value === "number" ? short(value) : value;
}

function visible() {
  const wanted = view.filter.toLowerCase();
  const kept = data.sites.map((site, index) => index).filter((index) => {
    const site = data.sites[index];
    return `${site.name} ${site.status} ${site.terms}`.toLowerCase().includes(wanted);
  });
  if (view.sort === null) return kept;
  const value = (index) => COLUMNS[view.sort][1](data.sites[index]);
  kept.sort((a, b) => {
    const [left, right] = [value(a), value(b)];
    if (left === right) return a - b;
    if (left === null || left === "") return 1; // what has no number comes last
    if (right === null || right === "") return -1;
    return (left < right ? -1 : 1) * (view.down ? -1 : 1);
  });
  return kept;
}

function drawRows() {
  const body = document.querySelector("#sites tbody");
  body.replaceChildren(...visible().map((index) => {
    const site = data.sites[index];
    const cells = COLUMNS.map(([title, of]) => node("td", {}, cellText(title, of(site))));
    const row = node("tr", { "data-index": index, onclick: () => choose(index) }, ...cells);
    if (index === view.chosen) row.className = "chosen";
    return row;
  }));
}

function drawList() {
  const input = node("input", { type: "search", placeholder: "filter by name, term or status",
    "aria-label": "filter" });
  input.addEventListener("input", () => { view.filter = input.value; drawRows(); });
  const heads = COLUMNS.map(([title], at) => node("th", { title: MEANINGS[title] || "", onclick: () => {
    view.down = view.sort === at ? !view.down : at > 3;
    view.sort = at;
    drawRows();
  } }, title));
  const attention = data.sites.flatMap((site) => site.attention);
  const logits = data.sites.flatMap((site) => site.logit_rms);
  document.getElementById("list").append(
    rankBars(data.sites, choose),
    node("div", { class: "charts" },
      histogram("attention error", attention, data.options.max_attention_error),
      histogram("rms logit error", logits, null)),
    input,
    node("table", { id: "sites" }, node("thead", {}, node("tr", {}, ...heads)),
      node("tbody", {})),
  );
  drawRows();
}

function drawHeader() {
  const counts = Object.entries(data.counts).map(([status, count]) => `${count} ${status}`);
  const options = Object.entries(data.options)
    .filter(([name, value]) => name !== "version" && value !== null)
    .map(([name, value]) => `${name} ${value}`);
  const versions = Object.entries(data.versions).map(([name, value]) => `${name} ${value}`);
  document.getElementById("header").append(
    node("h1", {}, data.title),
    node("p", {}, `${data.sites.length} sites: ${counts.join(", ")}`),
    node("p", { class: "soft" }, `${options.join(", ")}; made by ${versions.join(", ")}`),
    ...data.notes.map((note) => node("p", { class: "soft" }, note)),
  );
}

function colourMark(head) { // the colour of its curve
  return `border-left: 5px solid ${COLOURS[head % COLOURS.length]}`;
}

function headTable(decisions) {
  const titles = ["head", "term", "rank", "energy", "logit max", "logit rms", "attention error"];
  const rows = decisions.map((one) => node("tr", { title: one.reason }, ...[
    one.head, one.term, one.rank === null ? "" : one.rank, `${(100 * one.energy).toFixed(3)} %`,
    short(one.logit_error_max), short(one.logit_error_rms), short(one.attention_error),
  ].map((text, at) => node("td", at ? {} : { style: colourMark(one.head) }, String(text)))));
  return node("table", { class: "heads" },
    node("thead", {}, node("tr", {}, ...titles.map((title) => node("th", {}, title)))),
    node("tbody", {}, ...rows));
}

function headMaps(head, maps, decision, site) {
  const why = decision ? node("p", { class: "soft" }, decision.reason) : null;
  const titles = { bias: "bias", terms: "terms", residual: "residual" };
  const drawn = Object.entries(maps).map(([kind, map]) => heatMap(map, titles[kind], site));
  return node("div", { class: "head" },
    node("div", {}, node("b", {}, `head ${head}`), why), ...drawn);
}

function drawDetails(index) {
  const site = data.sites[index];
  const own = JSON.parse(document.getElementById(`site-${index}`).textContent);
  const size = `${site.n} x ${site.m}, ${site.heads} heads` + (own.head_dim ? ` of ${own.head_dim}` : "");
  const parts = [
    node("h2", {}, site.name),
    node("p", {}, `${site.status}: ${own.reason}`),
    node("p", { class: "soft" }, `recipe ${own.recipe}${site.n ? `; ${size}` : ""}`),
    own.note ? node("p", {}, own.note) : null,
    ...own.warnings.map((text) => node("p", { class: "warning" }, text)),
  ];
  if (own.energy !== null) {
    parts.push(energyCurves(own.energy, own.decisions, data.options.energy));
  }
  if (own.decisions.length) parts.push(headTable(own.decisions));
  const shown = Object.entries(own.maps);
  if (shown.length) {
    const cells = own.reduced ? "; a cell is the mean of a block, of a residual its largest entry"
      : "";
    parts.push(node("h3", {}, "Bias, terms and residual by head"),
      node("p", { class: "soft" }, `rows are queries, centred; columns are keys${cells}`));
  }
  for (const [head, maps] of shown) {
    const decision = own.decisions.find((one) => one.head === Number(head));
    parts.push(headMaps(head, maps, decision, site));
  }
  if (own.heads_without_maps) {
    parts.push(node("p", { class: "soft" },
      `${own.heads_without_maps} more heads, which lose less, have no maps here`));
  }
  const details = document.getElementById("details");
  details.replaceChildren(...parts.filter((part) => part !== null));
  details.scrollTop = 0;
}

function choose(index) {
  view.chosen = index;
  for (const row of document.querySelectorAll("#sites tbody tr")) {
    row.className = Number(row.dataset.index) === index ? "chosen" : "";
  }
  drawDetails(index);
  history.replaceState(null, "", `#${encodeURIComponent(data.sites[index].name)}`);
}

// down or up only: on a narrow screen the table is wider than its half, and its names come first
function showChosen() {
  const list = document.querySelector("#sites").closest("section");
  document.querySelector("#sites tr.chosen").scrollIntoView({ block: "nearest" });
  list.scrollLeft = 0;
}

function fromAddress() {
  const name = decodeURIComponent(location.hash.slice(1));
  const found = data.sites.findIndex((site) => site.name === name);
  return found < 0 ? 0 : found;
}

document.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step === undefined || event.target.tagName === "INPUT") return;
  const order = visible();
  const next = order[order.indexOf(view.chosen) + step];
  if (next === undefined) return;
  event.preventDefault();
  choose(next);
  showChosen();
});

drawHeader();
drawList();
if (data.sites.length) {
  choose(fromAddress());
  showChosen();
}
