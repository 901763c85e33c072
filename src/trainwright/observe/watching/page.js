"use strict";
// Everything from runs is set as text, never as HTML.
const token = new URLSearchParams(location.search).get("token");
const at = id => document.getElementById(id);
const address = (path, asked = {}) => {
  const query = new URLSearchParams({ token });
  for (const [key, value] of Object.entries(asked)) for (const each of [value].flat()) query.append(key, each);
  return `${path}?${query}`;
};
const ask = async (path, asked, method = "GET", body = null) => {
  const answer = await fetch(address(path, asked), { method, body });
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error);
  return value;
};
const element = (tag, text = "", properties = {}) => Object.assign(document.createElement(tag), { textContent: text }, properties);
const short = value => value == null ? "" : Number(value).toLocaleString("en", { maximumSignificantDigits: 4 });
// A column: its title, and what a row is sorted by.
const COLUMNS = new Map([["tick", ["", () => null]], ...Object.entries({
  name: "Run", status: "Status", step: "Step", best: "Best loss", speed: "Tokens/s", goodput: "Goodput", changed: "Last event",
  task: "Task", model: "Model" }).map(([key, title]) => [key, [title, row => row[key]]]),
  ["tags", ["Tags", row => row.tags.join(", ") || null]]]);
const FIRST = ["loss", "validation/loss"], LAST = ["learning_rate", "grad_norm", "tokens_per_second", "step_time", "memory_bytes"];
const COLORS = ["#1f77d0", "#d9541e", "#2a9d50", "#9457c9", "#c4426f", "#8a7a12", "#1595a3", "#7a6a5a"];
const DASHES = [["solid", ""], ["dashed", "7 3"], ["dotted", "2 3"]];  // for the ninth run and the following ones
const NEWEST = 4;  // runs whose curves are shown at first
const GIB = 2 ** 30;
const rows = new Map(), selected = new Set(), received = new Map();  // by id; ids; curves by id with what they are of
const stopping = new Set();  // ids of runs that were asked to stop and still train
let columns = COLUMNS;  // and one for each key in which the recipes of the ticked runs differ
let order = "changed", descending = true, opened = null, drawn = "", asking = false, chosen = false, edited = false;
let pointer = null;  // what is pointed at: the place on the horizontal axis of a group of charts
let machine = [];  // the curves of what the ranks of the opened run do
const pointed = new Map();  // by chart what shows the values there

// Show an element for each item. Those of before stay, so that what is open or focused, and a click, outlast updates.
function keep(place, items, key, make, fill = () => {}) {
  const had = new Map([...place.children].map(child => [child.dataset.key, child])), focused = document.activeElement;
  const wanted = new Map(items.map(item => {
    const found = had.get(key(item)) ?? make(item);
    found.dataset.key = key(item);
    fill(found, item);
    return [found.dataset.key, found];
  }));
  for (const child of [...place.children]) if (wanted.get(child.dataset.key) !== child) child.remove();
  [...wanted.values()].forEach((each, i) => { if (place.children[i] !== each) place.insertBefore(each, place.children[i] ?? null); });
  if (focused !== document.activeElement && place.contains(focused)) focused.focus({ preventScroll: true });
}

const moment = seconds => new Date(1000 * seconds).toLocaleString("sv");  // 2026-01-31 23:59:59

function shown(row, key) {
  if (key === "step") return row.step == null ? "" : row.steps ? `${row.step}/${row.steps}` : `${row.step}`;
  if (key === "goodput") return row.goodput == null ? "" : `${Math.round(100 * row.goodput)}%`;
  if (key === "changed") return row.changed == null ? "" : moment(row.changed);
  if (key === "note") return [row.read < 1 ? `reading, ${Math.floor(100 * row.read)}%` : "", row.note].filter(Boolean).join("; ");
  const value = columns.get(key)[1](row);
  return typeof value === "number" && COLUMNS.has(key) ? short(value) : value ?? "";
}

// Values of recipes are texts, which may be numbers.
const sortable = value => typeof value === "string" && value.trim() && isFinite(value) ? Number(value) : value;

function table() {
  keep(at("head"), [...columns], ([key]) => key, ([key, [title]]) => {
    const head = element("th", "", { className: COLUMNS.has(key) ? key : "key", scope: "col" });
    if (key === "tick") return Object.assign(head, { ariaLabel: "Curves" });
    head.append(element("button", title.replaceAll(".", ".\u200b"), { type: "button", onclick: () => {
      const first = [...rows.values()].map(row => sortable(columns.get(key)[1](row))).find(value => value != null);
      [order, descending] = [key, order === key ? !descending : typeof first === "number"];
      table();
    } }));
    return head;
  });
  const text = at("filter").value.toLowerCase(), status = at("status").value;
  const kept = [...rows.values()].filter(row => (!status || row.status === status)
    && [row.name, row.task, row.model, ...row.tags].join(" ").toLowerCase().includes(text));
  const by = columns.get(order)?.[1] ?? (() => null);
  kept.sort((a, b) => {
    const [x, y] = [sortable(by(a)), sortable(by(b))];
    if (x == null || y == null) return (x == null) - (y == null);
    const sign = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return descending ? -sign : sign;
  });
  keep(at("runs"), kept, row => row.id, () => element("tr"), (line, row) =>
    keep(line, [...columns], ([key]) => key, ([key, [title]]) => cell(row, key, title), (found, [key]) => fill(found, row, key)));
  for (const head of at("head").children) if (head.dataset.key !== "tick")
    head.ariaSort = head.dataset.key === order ? descending ? "descending" : "ascending" : "none";
  at("state").textContent = `${kept.length} of ${rows.size} runs`;
}

function cell(row, key, title) {
  const found = element("td", "", { className: COLUMNS.has(key) ? key : "key" });
  if (key === "tick") found.append(element("input", "", { type: "checkbox", ariaLabel: `Show the curves of ${row.name}`,
    onchange: event => choose(row.id, event.target.checked) }));
  else if (key === "name") found.append(element("i"),
    element("a", row.name, { dir: "auto", href: `#run=${encodeURIComponent(row.id)}` }), element("div", "", { className: "note" }));
  else found.dataset.title = title;
  return found;
}

function fill(found, row, key) {
  if (key === "tick") { found.firstChild.checked = selected.has(row.id); return; }
  const place = key === "name" ? found.querySelector(".note") : found, text = shown(row, key === "name" ? "note" : key);
  if (place.textContent !== text) place.textContent = text;
  if (key === "name") { mark(found.firstChild, row.id); found.title = row.remark; }
  else found.title = text;  // the cell may cut it
  if (key === "status") found.className = `status ${row.status}`;
}

// A line is of a run, by its id, or of a rank, by its number.
const number = line => typeof line === "number" ? line : rows.get(line).number;
const color = line => COLORS[number(line) % COLORS.length];
const dash = line => DASHES[Math.floor(number(line) / COLORS.length) % DASHES.length];

function mark(place, id) {
  place.className = "mark";
  place.style.borderTop = `3px ${dash(id)[0]} ${color(id)}`;
  return place;
}

function choose(id, wanted) {
  chosen = true;
  if (wanted) selected.add(id); else selected.delete(id);
  refresh();
}

// The newest runs are ticked until a person ticks one.
function chooseNewest() {
  if (chosen) return;
  selected.clear();
  for (const row of [...rows.values()].sort((a, b) => b.number - a.number).slice(0, NEWEST)) selected.add(row.id);
}

const showing = () => (opened == null ? [...selected] : [opened]).filter(id => rows.has(id));

async function refresh() {
  const names = showing(), axis = at("axis").value;
  const versions = new Map(names.map(id => [id, `${axis} ${rows.get(id).version}`]));
  const state = JSON.stringify([...versions, opened, at("smoothing").value, at("log").checked, at("metric").value]);
  if (state === drawn || asking) return;
  asking = true;
  try {
    const old = names.filter(id => received.get(id)?.version !== versions.get(id));
    const found = old.length ? await ask("curves", { run: old, axis, points: 300 }) : {};
    for (const id of old) received.set(id, { version: versions.get(id), curves: new Map(Object.entries(found[id])) });
    if (opened == null) await compare(names);
    drawn = state;
    draw(names.filter(id => rows.has(id)));
  } catch (error) { drawn = ""; }  // a run that is gone; the table says so
  asking = false;
  if (drawn) refresh();  // something may have been chosen meanwhile
}

async function compare(names) {
  const found = names.length > 1 ? await ask("differences", { run: names }) : {};
  const all = [...COLUMNS], after = all.findIndex(([key]) => key === "best") + 1;
  all.splice(after, 0, ...Object.entries(found).map(([key, values]) =>
    [`recipe ${key}`, [key, row => values[names.indexOf(row.id)]]]));
  columns = new Map(all);
  table();
}

function svg(tag, attributes, text) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text != null) found.textContent = text;
  return found;
}

function draw(names) {
  keep(at("legend"), opened == null ? names : [], id => id, id => {
    const entry = element("li");
    entry.append(mark(element("i"), id), element("bdi", rows.get(id).name));
    return entry;
  });
  const all = [...new Set(names.flatMap(id => [...received.get(id).curves.keys()]))];
  const rank = name => FIRST.includes(name) ? FIRST.indexOf(name) : LAST.includes(name) ? 1000 + LAST.indexOf(name)
    : name.startsWith("validation/") ? 100 : 200;
  const text = at("metric").value.toLowerCase();
  const wanted = all.filter(name => title(name).toLowerCase().includes(text)).sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  at("empty").textContent = wanted.length ? "" : all.length ? "No chart has this name." : names.length ? "No values yet."
    : "Tick runs in the table to draw their curves over each other.";
  keep(at("charts"), wanted, name => name, name => figure(title(name)));
  for (const chart of at("charts").children) {
    // Only what varies from step to step is smoothed.
    const isSmooth = chart.dataset.key === "learning_rate" || chart.dataset.key.startsWith("validation/");
    const weight = isSmooth ? 0 : Number(at("smoothing").value), axis = at("axis").selectedOptions[0].textContent;
    const curves = new Map(names.filter(id => received.get(id).curves.has(chart.dataset.key))
      .map(id => [id, scaled(received.get(id).curves.get(chart.dataset.key), chart.dataset.key)]));
    picture(chart, curves, { axis, weight, log: at("log").checked });
  }
  point();
}

function figure(caption) {
  const chart = element("figure");
  chart.append(element("figcaption", caption), element("p", "", { className: "values" }), element("div"));
  return chart;
}

const title = name => name === "memory_bytes" ? "memory (GiB)" : name.replace("/", " ").replaceAll("_", " ");

const scaled = ([places, ...values], name) =>
  [places, ...(name === "memory_bytes" ? values.map(column => column.map(y => y == null ? y : y / GIB)) : values)];

// Exponential moving average without a bias towards its beginning; gaps stay.
function smooth(values, weight) {
  let mean = 0, whole = 0;
  return values.map(y => {
    if (y == null || !weight) return y;
    mean = weight * mean + (1 - weight) * y;
    whole = weight * whole + 1 - weight;
    return mean / whole;
  });
}

function picture(chart, curves, { axis, weight = 0, log = false }) {
  pointed.delete(chart);
  const place = chart.lastChild, width = Math.max(240, place.clientWidth), height = 220;
  const [left, right, top, bottom] = [58, 14, 8, 26];
  const usable = (x, y) => x != null && y != null && (!log || y > 0);
  const level = y => log ? Math.log10(y) : y;
  const xs = [], ys = [];
  for (const [places, means, lows, highs] of curves.values()) places.forEach((x, i) => {
    if (usable(x, means[i])) { xs.push(x); ys.push(...[means[i], lows[i], highs[i]].filter(y => usable(x, y)).map(level)); }
  });
  if (!xs.length) { place.replaceChildren(element("p", "No values above 0.", { className: "soft" })); return; }
  const least = list => list.reduce((a, b) => Math.min(a, b)), most = list => list.reduce((a, b) => Math.max(a, b));
  const [x0, x1] = [least(xs), most(xs)];
  let [y0, y1] = [least(ys), most(ys)];
  if (y0 === y1) { const room = log ? 0.1 : Math.abs(y0) / 10 || 1; [y0, y1] = [y0 - room, y1 + room]; }
  const across = x => left + (x - x0) / (x1 - x0 || 1) * (width - left - right);
  const up = y => height - bottom - (level(y) - y0) / (y1 - y0 || 1) * (height - top - bottom);
  const found = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${chart.firstChild.textContent} by ${axis}` });
  for (const x of ticks(x0, x1, width < 500 ? 4 : 8)) found.append(svg("text", { x: across(x), y: height - 8, "text-anchor": "middle" },
    Intl.NumberFormat("en", { notation: "compact" }).format(x)));
  const levels = log ? between(y0, y1) : ticks(y0, y1, 5), digits = log ? 0 : Math.max(0, -Math.floor(Math.log10(levels[1] - levels[0] || 1) + 1e-9));
  for (const value of levels) {
    const y = up(log ? 10 ** value : value);
    found.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }),
      svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, log ? short(10 ** value) : label(value, digits)));
  }
  for (const [id, [places, means, lows, highs]] of curves) {
    const parts = [[]];  // without the gaps between them
    places.forEach((x, i) => { if (usable(x, means[i])) parts.at(-1).push(i); else if (parts.at(-1).length) parts.push([]); });
    const to = (values, part) => part.filter(i => usable(places[i], values[i])).map(i => `${across(places[i])},${up(values[i])}`);
    const line = values => parts.filter(part => part.length).map(part => `M${to(values, part).join("L")}`).join("");
    const smoothed = smooth(means, weight);
    if (weight) found.append(svg("path", { class: "line raw", stroke: color(id), d: line(means) }));
    else for (const part of parts) if (part.length) found.append(
      svg("polygon", { class: "band", fill: color(id), points: [...to(highs, part), ...to(lows, [...part].reverse())].join(" ") }));
    found.append(svg("path", { class: "line", stroke: color(id), "stroke-dasharray": dash(id)[1], "data-points": parts.flat().length, d: line(smoothed) }));
    for (const part of parts) if (part.length === 1)
      found.append(svg("circle", { cx: across(places[part[0]]), cy: up(smoothed[part[0]]), r: 3, fill: color(id) }));
  }
  place.replaceChildren(found);
  hover(chart, found, curves, { width, height, left, right, top, bottom, x0, x1, across });
}

// A value beside others of an axis, with the digits in which they differ.
function label(value, digits) {
  if (digits > 5 || Math.abs(value) >= 1e7) return value ? value.toExponential(1) : "0";
  return (value + 0).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// Round places between two values, about as many as are wanted.
function ticks(from, to, wanted) {
  const raw = (to - from || Math.abs(to) || 1) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(each => each * power >= raw * 0.999);
  const found = [];
  for (let each = Math.ceil(from / step - 1e-9); each * step <= to + step * 1e-9; each++) found.push(each * step || 0);
  return found.length ? found : [from];
}

// Places of a logarithmic axis, as exponents: 1, 2 and 5 of each power of ten, or those powers alone.
function between(from, to) {
  const all = to - from > 3 ? [1] : [1, 2, 5], found = [];
  for (let power = Math.floor(from); power <= Math.ceil(to); power++)
    for (const each of all) { const y = power + Math.log10(each); if (y >= from && y <= to) found.push(y); }
  return found.length > 1 ? found : ticks(from, to, 4);
}

// Show the values of every chart where one of them is pointed at.
function hover(chart, found, curves, { width, height, left, right, top, bottom, x0, x1, across }) {
  const cursor = svg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  found.append(cursor);
  found.onpointermove = event => {
    const box = found.getBoundingClientRect();
    const x = x0 + ((event.clientX - box.left) * width / box.width - left) / (width - left - right) * (x1 - x0 || 1);
    pointer = { x, group: chart.closest("section") };
    point();
  };
  found.onpointerleave = () => { pointer = null; point(); };
  pointed.set(chart, () => {
    cursor.setAttribute("visibility", "hidden");
    const values = [];
    const x = pointer?.group === chart.closest("section") ? pointer.x : null;
    let nearest = null;
    if (x != null) for (const [id, [places, means]] of curves) {
      let best = -1;
      places.forEach((place, i) => {
        if (place != null && means[i] != null && (best < 0 || Math.abs(place - x) < Math.abs(places[best] - x))) best = i;
      });
      if (best < 0) continue;
      const value = element("span");
      value.append(mark(element("i"), id), short(means[best]));
      values.push(value);
      if (nearest == null || Math.abs(places[best] - x) < Math.abs(nearest - x)) nearest = places[best];
    }
    chart.querySelector(".values").replaceChildren(...values);
    if (nearest == null || nearest < x0 || nearest > x1) return;
    cursor.setAttribute("x1", across(nearest)); cursor.setAttribute("x2", across(nearest));
    cursor.setAttribute("visibility", "visible");
  });
}

function point() {
  for (const [chart, show] of pointed) if (chart.isConnected) show(); else pointed.delete(chart);
}

// Show the page of the run that the address names, or the table.
function route() {
  const found = new URLSearchParams(location.hash.slice(1)).get("run");
  opened = found;
  at("list").hidden = found != null;
  at("run").hidden = at("details").hidden = at("back").hidden = found == null;
  document.title = found == null ? "Runs" : `${rows.get(found)?.name ?? found} - Runs`;
  at("answer").textContent = at("text").textContent = "";
  edited = false;
  scrollTo(0, 0);
  if (found != null) show(found);
  refresh();
}

async function show(id) {
  at("title").textContent = rows.get(id)?.name ?? id;
  let found;
  try { found = await ask("details", { run: id }); } catch (error) {
    if (opened === id) at("facts").textContent = rows.size ? error.message : "";
    return;
  }
  if (opened !== id) return;
  const row = found.row, trains = row?.status === "training";
  if (row != null) facts(row);
  if (!trains) stopping.delete(id);
  at("checkpoint").disabled = !trains;
  at("stop").disabled = !trains || stopping.has(id);
  evaluations(found.evaluations);
  keep(at("samples"), found.samples.slice().reverse(), each => JSON.stringify(each), each => {
    const sample = element("details");
    sample.append(element("summary", `Step ${each.step}: ${each.prompt}`), element("pre", each.text || "(no text)"));
    return sample;
  });
  if (!found.samples.length) at("samples").append(element("p", "None yet.", { className: "soft" }));
  keep(at("events"), found.events, each => JSON.stringify(each), each => {
    const told = [each.event, each.step != null ? `step ${each.step}` : "", each.resumed_from != null ? `from ${each.resumed_from}` : "",
      each.kind, each.rank != null ? `rank ${each.rank}` : "", each.detail, each.action, each.message, each.status];
    const entry = element("li", "", { className: each.event === "fault" ? "failed" : "" });
    if (each.time != null) entry.append(element("time", moment(each.time), { className: "soft" }), " ");
    entry.append(told.filter(Boolean).join(" · "));
    return entry;
  });
  const file = at("file").value;
  keep(at("file"), found.logs, name => name, name => element("option", name));
  const first = found.logs.includes(file) ? file : found.logs.find(name => name.startsWith("rank-"));
  if (first) at("file").value = first;
  await time(trains);
  await log();
}

// A row for each category, a column for each rank: few ranks fit a narrow window, and many scroll.
async function time(trains) {
  const run = opened;
  const { categories, ranks, machine: curves } = await ask("seconds", { run }).catch(() => ({ categories: [], ranks: [], machine: [] }));
  if (run !== opened) return;
  machine = curves;
  machines(ranks, trains);
  at("time").hidden = !ranks.length;
  at("ranks").replaceChildren(element("th", "Seconds"), ...ranks.map(each => element("th", `Rank ${each.rank}`)));
  const whole = ranks.map(each => Object.values(each.seconds).reduce((a, b) => a + b, 0) || 1);
  const most = Math.max(...ranks.map((each, i) => Math.max(...Object.values(each.seconds)) / whole[i]));
  const lines = categories.map(category => {
    const row = element("tr");
    row.append(element("th", category, { scope: "row" }), ...ranks.map((each, i) => {
      const value = each.seconds[category] ?? 0, cell = element("td", value ? short(value) : "", { className: "share" });
      cell.style.setProperty("--share", value / whole[i] / most);
      cell.title = `rank ${each.rank}, ${category}: ${(100 * value / whole[i]).toFixed(1)}%`;
      return cell;
    }));
    return row;
  });
  const last = element("tr");
  last.append(element("th", "in training", { scope: "row" }), ...ranks.map(each => element("td", `${(100 * each.trained).toFixed(1)}%`)));
  at("seconds").replaceChildren(...lines, last);
}

// A row for each rank while the run trains, and charts over its seconds; folded unless something shows in them.
function machines(ranks, trains) {
  at("machine").hidden = !machine.length;
  at("now").hidden = !trains;
  const measures = [["use", "Use"], ["memory", "Memory"], ["power", "Power"], ["temperature", "Temp"]]
    .filter(([name]) => ranks.some(each => name in each.now));
  at("measures").replaceChildren(...[["", "Rank"], ...measures].map(([, title]) => element("th", title, { scope: "col" })));
  at("use").replaceChildren(...ranks.map(({ rank, now }) => {
    const row = element("tr");
    row.append(element("th", `${rank}`, { scope: "row" }), ...measures.map(([name]) => element("td", now[name] ?? "")));
    return row;
  }));
  const lines = [...new Set(machine.flatMap(each => Object.keys(each.ranks).map(Number)))].sort((a, b) => a - b);
  keep(at("colors"), lines.length > 1 ? lines : [], String, rank => {
    const entry = element("li");
    entry.append(mark(element("i"), rank), `rank ${rank}`);
    return entry;
  });
  for (const id of ["notable", "usual"])
    keep(at(id), machine.filter(each => each.notable === (id === "notable")), each => each.title, each => figure(each.title));
  const count = at("usual").children.length;
  at("folded").hidden = !count;
  at("folded").firstChild.textContent = `${count} more chart${count === 1 ? "" : "s"}`;
  drawMachine();
}

function drawMachine() {
  for (const { title, notable, ranks } of machine) {
    if (!notable && !at("folded").open) continue;  // it has no width until it is unfolded
    const chart = [...at(notable ? "notable" : "usual").children].find(each => each.dataset.key === title);
    picture(chart, new Map(Object.entries(ranks).map(([rank, [xs, ys]]) => [Number(rank), [xs, ys, ys, ys]])), { axis: "seconds" });
  }
  point();
}

async function log() {
  const file = at("file").value;
  if (!file) return;
  const text = await ask("log", { run: opened, file }).catch(error => error.message), place = at("text");
  const follows = place.scrollTop + place.clientHeight >= place.scrollHeight - 4;  // unless scrolled up
  if (place.textContent !== text) place.textContent = text;
  if (follows) place.scrollTop = place.scrollHeight;
}

function facts(row) {
  document.title = `${row.name} - Runs`;
  at("title").textContent = row.name;
  at("facts").replaceChildren(...[...COLUMNS].filter(([key]) => !["tick", "name", "tags"].includes(key) && shown(row, key)).map(([key, [title]]) => {
    const fact = element("span", "", { className: key === "status" ? row.status : "" });
    fact.append(element("span", `${title} `, { className: "soft" }), shown(row, key));
    return fact;
  }), element("span", row.note, { className: "note" }));
  if (!edited) { at("tags").value = row.tags.join(", "); at("note").value = row.remark; }
}

// The newest evaluation first, a column for each metric.
function evaluations(found) {
  at("evaluated").hidden = !found.length;
  const names = [...new Set(found.flatMap(each => Object.keys(each.metrics)))];
  at("metrics").replaceChildren(...["Step", ...names.map(name => name.replaceAll("_", " "))].map(name => element("th", name, { scope: "col" })));
  keep(at("evaluations"), found.slice().reverse(), each => JSON.stringify([each, names]), each => {
    const line = element("tr");
    line.append(element("th", `${each.step}`, { scope: "row" }), ...names.map(name => {
      const value = element("td", Object.hasOwn(each.metrics, name) ? short(each.metrics[name]) : "");
      value.dataset.title = name.replaceAll("_", " ");
      return value;
    }));
    return line;
  });
}

at("status").append(...["training", "finished", "stopped", "failed", "ended"].map(name => element("option", name)));
for (const id of ["filter", "status"]) at(id).oninput = table;
for (const id of ["axis", "smoothing", "log", "metric"]) at(id).oninput = refresh;
at("file").onchange = log;
at("tags").oninput = at("note").oninput = () => { edited = true; };
at("remarks").onsubmit = async event => {
  event.preventDefault();
  const run = opened, tags = [...new Set(at("tags").value.split(",").map(tag => tag.trim()).filter(Boolean))];
  try {
    at("answer").textContent = await ask("remarks", { run }, "POST", JSON.stringify({ tags, note: at("note").value }));
    edited = false;
  } catch (error) { at("answer").textContent = error.message; }
};
at("stop").onclick = async () => {
  const run = opened;
  stopping.add(run);
  at("stop").disabled = true;
  at("answer").textContent = await ask("stop", { run }, "POST").catch(error => { stopping.delete(run); return error.message; });
};
at("checkpoint").onclick = async () => {
  at("answer").textContent = await ask("checkpoint", { run: opened }, "POST").catch(error => error.message);
};
at("folded").ontoggle = drawMachine;
addEventListener("resize", () => { drawn = ""; refresh(); drawMachine(); });
addEventListener("hashchange", route);
table();
const stream = new EventSource(address("events"));
let first = true;
stream.onmessage = message => {
  const { rows: changed, gone } = JSON.parse(message.data);
  for (const row of changed) rows.set(row.id, row);
  for (const id of gone) { rows.delete(id); selected.delete(id); received.delete(id); }
  chooseNewest();
  table();
  if (first) route();
  else if (gone.includes(opened)) location.hash = "";
  else if (changed.some(row => row.id === opened)) show(opened);
  first = false;
  refresh();
};
stream.onerror = () => { at("state").textContent = "no connection; is trainwright watch running?"; };
