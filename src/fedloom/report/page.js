// Draws described runs: once in a report, again and again in the live page. Every text of a run goes into the page by
// textContent, or through `plain` where Plotly would read markup.
"use strict";
(() => {

const start = JSON.parse(document.getElementById("start").textContent);
const drawn = document.getElementById("drawn");
const AXES = { works: "works", round: "rounds", uplink_bytes: "uplink", seconds: "seconds" };
const NOT_FINITE = "nan";  // measured, but no number; null is a round without a measurement
const MOST_LINES = 12;  // more tensors than that are a heat map

const state = {
  runs: new Map(), order: new Map(), letters: new Map(), labels: start.labels, unreadable: [],
  x: "works", further: null, hidden: new Set(), search: "", setting: null, chose: false,
  off: { data: new Set(), method: new Set(), seed: new Set(), run: new Set() }, printing: false,
};

// --- small tools ---------------------------------------------------------------------------------------------------

function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value; else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const isNumber = value => typeof value === "number";
const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;
const sum = values => values.reduce((total, value) => total + value, 0);
const unique = values => [...new Set(values)];
const short = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;
const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const tone = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const narrow = () => window.innerWidth < 600;

/** A method's text that may go on in the next line after a sign of it, not in the middle of a word. */
function breakable(text) {
  return text.split(/(?<=[+,(])/).flatMap(piece => [piece, el("wbr")]);
}

function deviation(values) {
  if (values.length < 2) return 0;
  const centre = mean(values);
  return Math.sqrt(sum(values.map(value => (value - centre) ** 2)) / (values.length - 1));
}

function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000) return unit === "B" ? `${count.toFixed(0)} B` : `${count.toFixed(1)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// --- runs, and which of them are shown -----------------------------------------------------------------------------

const seriesKey = run => JSON.stringify([run.group, run.method]);

function keep(run) {
  state.runs.set(run.id, run);
  // Colours and letters stay with what they were first given to, whatever a reader hides.
  if (!state.order.has(seriesKey(run))) state.order.set(seriesKey(run), state.order.size);
  if (!state.letters.has(run.group)) {
    const next = state.letters.size;
    state.letters.set(run.group, next < 26 ? String.fromCharCode(65 + next) : String(next + 1));
  }
}

function applyTail(part, tail) {
  const follow = Object.values(tail.columns).reduce((longest, values) => Math.max(longest, values.length), 0);
  for (const name of unique([...Object.keys(part), ...Object.keys(tail.columns)])) {
    const before = (part[name] ?? []).slice(0, tail.keep);
    while (before.length < tail.keep) before.push(null);
    part[name] = before.concat(tail.columns[name] ?? new Array(follow).fill(null));
  }
}

function shownRuns() {
  const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
  return [...state.runs.values()].filter(run => {
    const text = `${run.method} seed-${run.seed} ${run.setting} ${run.id}`.toLowerCase();
    return (state.setting === null || run.group === state.setting) && words.every(word => text.includes(word))
      && !state.off.data.has(run.data) && !state.off.method.has(run.method)
      && !state.off.seed.has(String(run.seed)) && !state.off.run.has(run.id);
  });
}

/** Colours first, then dashes: so many lines can be told apart. */
function look(place) {
  const palette = start.palette[isDark() ? "dark" : "light"];
  const dash = start.dashes[Math.floor(place / palette.length) % start.dashes.length];
  return { colour: palette[place % palette.length], dash };
}

/** One entry per method and setting: what is averaged over seeds. */
function seriesOf(runs) {
  const found = new Map();
  for (const run of runs) {
    if (!found.has(seriesKey(run))) found.set(seriesKey(run), []);
    found.get(seriesKey(run)).push(run);
  }
  const several = unique(runs.map(run => run.group)).length > 1;
  return [...found].map(([key, members]) => ({
    key, runs: members, ...look(state.order.get(key)),
    label: members[0].method + (several ? ` [${state.letters.get(members[0].group)}]` : ""),
  })).sort((a, b) => state.order.get(a.key) - state.order.get(b.key));
}

const visible = series => series.filter(one => !state.hidden.has(one.key));

// --- what curves.py computes for the figures, here for the runs that are chosen -----------------------------------

function axisValue(table, x, row) {
  const names = x === "traffic" ? ["uplink_bytes", "downlink_bytes"] : [x];
  return sum(names.map(name => table[name]?.[row]).filter(isNumber));
}

/** Mean and deviation at each round that all runs have which came so far; one value that is not finite makes a gap. */
function overSeeds(runs, key, x, part = "rounds", scale = 1) {
  const tables = runs.map(run => run.parts[part]).filter(table => key in table);
  const rows = tables.map(table => new Map(table.round.map((at, i) => [at, i])));
  const end = table => table.round[table.round.length - 1];
  const longest = tables.reduce((best, table) => best && end(best) >= end(table) ? best : table, null);
  const curve = { x: [], mean: [], deviation: [] };
  for (const at of longest?.round ?? []) {
    const far = tables.map((_, k) => k).filter(k => end(tables[k]) >= at);
    if (!far.every(k => rows[k].has(at))) continue;
    const values = far.map(k => tables[k][key][rows[k].get(at)]);
    if (values.includes(null)) continue;
    const known = values.every(isNumber);
    curve.x.push(mean(far.map(k => axisValue(tables[k], x, rows[k].get(at)))));
    curve.mean.push(known ? scale * mean(values) : null);
    curve.deviation.push(known ? scale * deviation(values) : 0);
  }
  return curve;
}

function last(run, key) {
  const told = (run.parts.rounds[key] ?? []).filter(value => value !== null);
  return told.length ? told[told.length - 1] : null;
}

function pairs(runs, first, second) {
  return runs.flatMap(run => {
    const a = run.parts.rounds[first] ?? [], b = run.parts.rounds[second] ?? [];
    return a.map((value, i) => [value, b[i]]).filter(([u, v]) => isNumber(u) && isNumber(v));
  });
}

function correlation(points) {
  const a = points.map(p => p[0]), b = points.map(p => p[1]);
  if (points.length < 2 || Math.min(...a) === Math.max(...a) || Math.min(...b) === Math.max(...b)) return NaN;
  const u = mean(a), v = mean(b);
  const square = (values, centre) => sum(values.map(value => (value - centre) ** 2));
  return sum(points.map(p => (p[0] - u) * (p[1] - v))) / Math.sqrt(square(a, u) * square(b, v));
}

const clientScores = run => run.parts.scores.scores?.at(-1) ?? [];
const allScores = runs => runs.flatMap(clientScores).filter(isNumber).sort((a, b) => a - b);

function gains(runs, baseline) {
  const before = new Map(baseline.map(run => [run.seed, clientScores(run)]));
  const found = runs.flatMap(run => {
    const scores = clientScores(run), other = before.get(run.seed) ?? [];
    if (scores.length !== other.length) return [];
    return scores.map((score, k) => [score, other[k]]).filter(([a, b]) => isNumber(a) && isNumber(b)).map(([a, b]) => a - b);
  });
  return found.sort((a, b) => b - a);
}

/** A sorted curve over the share of clients, at no more than some hundred places. */
function quantiles(values) {
  const step = Math.max(1, Math.ceil(values.length / 200));
  const chosen = values.map((_, i) => i).filter(i => i % step === 0 || i === values.length - 1);
  return { x: chosen.map(i => 100 * (i + 0.5) / values.length), y: chosen.map(i => values[i]) };
}

// --- plots ---------------------------------------------------------------------------------------------------------

function plot(div, traces, layout = {}) {
  const ink = tone("--ink"), line = tone("--line");
  const axis = (own = {}) => ({
    gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ...own,
    title: { text: own.title ?? "", standoff: 8 },
  });
  const dressed = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true, showlegend: false,
    font: { color: ink, size: narrow() ? 11 : 12, family: "system-ui, sans-serif" },
    margin: { l: 28, r: 14, t: 8, b: 40 }, hovermode: narrow() ? "closest" : "x unified",
    dragmode: narrow() ? false : "zoom",  // on a phone a finger on the figure scrolls the page
    hoverlabel: { bgcolor: tone("--paper"), bordercolor: line, font: { color: ink, size: 11 }, namelength: -1 },
    ...layout, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
  };
  if (state.printing) Object.assign(dressed, { width: Math.min(div.clientWidth, 640), autosize: false });
  Plotly.react(div, traces, dressed, { displayModeBar: false, responsive: true });
}

const xAxis = x => {
  const size = { title: x === "traffic" ? "uplink + downlink" : AXES[x], tickformat: "~s", ticksuffix: "B" };
  return x === "traffic" || x === "uplink_bytes" ? size : { title: AXES[x] ?? x };
};

/** Bands of one standard deviation, one polygon for each stretch without a gap. */
function bands(curve, one) {
  if (!curve.deviation.some(value => value > 0)) return [];
  const stretches = [[]];
  curve.mean.forEach((value, i) => value === null ? stretches.push([]) : stretches.at(-1).push(i));
  return stretches.filter(stretch => stretch.length > 1).map(stretch => {
    const back = [...stretch].reverse();
    return {
      x: [...stretch, ...back].map(i => curve.x[i]), mode: "lines", fill: "toself", line: { width: 0 },
      y: [...stretch.map(i => curve.mean[i] + curve.deviation[i]), ...back.map(i => curve.mean[i] - curve.deviation[i])],
      fillcolor: `${one.colour}26`, hoverinfo: "skip", showlegend: false,
    };
  });
}

function curveTraces(series, key, x, part, scale) {
  const curves = visible(series).map(one => [one, overSeeds(one.runs, key, x, part, scale)]);
  const lines = curves.filter(([, curve]) => curve.x.length).map(([one, curve]) => ({
    x: curve.x, y: curve.mean, customdata: curve.deviation, name: plain(short(one.label, narrow() ? 30 : 48)),
    mode: curve.x.length === 1 ? "markers" : "lines", connectgaps: false,
    line: { color: one.colour, dash: one.dash, width: 2 }, marker: { color: one.colour },
    hovertemplate: one.runs.length > 1 ? "%{y:.4g} ± %{customdata:.2g}" : "%{y:.4g}",
  }));
  return [...curves.flatMap(([one, curve]) => bands(curve, one)), ...lines];  // lines above all bands
}

function swatch(one) {
  const dashes = { dash: "6 3", dot: "2 2", dashdot: "6 2 2 2" };
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  made.setAttribute("viewBox", "0 0 22 8");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const looks = { x1: 0, y1: 4, x2: 22, y2: 4, stroke: one.colour, "stroke-width": 3, "stroke-dasharray": dashes[one.dash] };
  for (const [name, value] of Object.entries(looks)) if (value !== undefined) line.setAttribute(name, value);
  made.append(line);
  return made;
}

/** Methods as buttons that hide and show; longer than any legend that a plot could hold. */
function legend(element, series, note = () => "") {
  element.replaceChildren(...series.map(one => {
    const button = el("button", { type: "button", title: one.label }, swatch(one), el("span", {}, ...breakable(one.label + note(one))));
    button.setAttribute("aria-pressed", String(!state.hidden.has(one.key)));
    button.onclick = () => {
      if (!state.hidden.delete(one.key)) state.hidden.add(one.key);
      redraw();
    };
    return button;
  }));
}

// --- sections ------------------------------------------------------------------------------------------------------

const sections = [];

/** `has` says whether there is anything to show; `draw` fills the section for these runs. */
function section(id, title, has, build) {
  const element = el("section", { id, hidden: true }, el("h2", {}, title));
  const draw = build(element);
  drawn.append(element);
  sections.push({ element, has, draw, dirty: false });
}

function figure(element, title = "", height = "") {
  const caption = el("figcaption", {}, title), div = el("div", { className: `plot ${height}` });
  const made = el("figure", {}, caption, div);
  element.append(made);
  return { made, caption, div };
}

/** A list whose options change only if they differ, so that an open one does not close while runs train. */
function choice(name, onchange) {
  const select = el("select", { ariaLabel: name });
  select.onchange = () => onchange(select.value);
  const fill = (options, value) => {
    const wanted = JSON.stringify(options);
    if (select.dataset.options !== wanted) {
      select.replaceChildren(...options.map(([key, text]) => el("option", { value: key, title: text }, short(text, 90))));
      select.dataset.options = wanted;
    }
    select.value = value;
  };
  return { select, fill, label: el("label", { className: "choice" }, el("span", {}, name), select) };
}

/** A list of runs that have a part, beside what is drawn of the chosen one. */
function runChoice(part, redrawOne) {
  let chosen = null;
  const list = choice("run", value => { chosen = value; redrawOne(); });
  const current = runs => {
    const having = runs.filter(run => run.parts[part].round?.length);
    if (!having.some(run => run.id === chosen)) chosen = having[0]?.id;
    list.fill(having.map(run => [run.id, `${run.method}, seed ${run.seed}`]), chosen);
    return state.runs.get(chosen);
  };
  return { label: list.label, current };
}

const hasKey = (runs, key, part = "rounds") => runs.some(run => run.parts[part][key]?.some(isNumber));

function summarySection() {
  section("summary", "Result", runs => (start.live || start.summary) && runs.length > 0, element => {
    const table = el("table");
    element.append(el("div", { className: "wide" }, table));
    return (runs, series) => {
      const head = ["method", "score, last", "seeds", "round", "works", "uplink", "state"];
      const body = series.map(one => {
        const row = el("tr", {}, ...summaryCells(one).map((cell, i) => el("td", {}, ...(i ? [cell] : breakable(cell)))));
        row.firstChild.prepend(swatch(one));
        return row;
      });
      table.replaceChildren(el("thead", {}, el("tr", {}, ...head.map(h => el("th", {}, h)))), el("tbody", {}, ...body));
    };
  });
}

function average(one, key) {
  const values = one.runs.map(run => last(run, key)).filter(isNumber);
  return values.length ? mean(values) : null;
}

function summaryCells(one) {
  const finals = one.runs.map(run => last(run, `test_${run.metric}`)).filter(value => value !== null);
  const known = finals.length > 0 && finals.every(isNumber);
  const spread = finals.length > 1 ? ` ± ${(100 * deviation(finals)).toFixed(2)}` : "";
  const score = known ? `${(100 * mean(finals)).toFixed(2)}${spread} %` : finals.length ? "diverged" : "–";
  const works = average(one, "works"), uplink = average(one, "uplink_bytes");
  const rounds = unique(one.runs.map(run => run.count));
  const training = one.runs.filter(run => !run.finished).length;
  const seeds = unique(one.runs.map(run => run.seed)).length;
  return [
    one.label, score, one.runs.length > seeds ? `${one.runs.length} runs of ${seeds}` : String(seeds),
    rounds.length > 1 ? `${Math.min(...rounds)}–${Math.max(...rounds)}` : String(rounds[0]),
    works === null ? "–" : works.toFixed(0), uplink === null ? "–" : bytes(uplink),
    training ? `${training} not finished` : "finished",
  ];
}

function curvesSection() {
  section("curves", "Curves", runs => runs.some(run => run.parts.rounds.round?.length), element => {
    const axis = choice("against", value => { state.x = value; redraw(); });
    axis.fill(Object.entries(AXES), state.x);
    const names = el("div", { className: "legend" }), grid = el("div", { className: "grid" }), note = el("p", { className: "note" });
    element.append(el("div", { className: "controls screen" }, axis.label), names, grid, note);
    const main = new Map();
    const further = furtherFigure(grid);
    return (runs, series) => {
      legend(names, series);
      const scores = unique(runs.map(run => `test_${run.metric}`));
      const wanted = [...scores.map(key => [key, 100]), ["test_loss", 1], ["train_loss", 1]];
      for (const [key] of wanted) if (!main.has(key)) main.set(key, figure(grid));
      grid.append(further.made);  // last, whatever came
      for (const [key, one] of main) {
        const scale = wanted.find(([name]) => name === key)?.[1];
        one.made.hidden = !scale || !hasKey(runs, key);
        if (one.made.hidden) continue;
        one.caption.textContent = key.replace("test_", "Test ").replace("train_", "Training ") + (scale === 100 ? ", %" : "");
        plot(one.div, curveTraces(series, key, state.x, "rounds", scale), { xaxis: xAxis(state.x) });
      }
      further.draw(runs, series, new Set(wanted.map(([key]) => key)));
      const seeds = series.some(one => one.runs.length > 1) ? "Lines: mean over seeds; bands: one standard deviation. " : "";
      const thin = runs.some(run => run.thinned) ? "Long runs are thinned to about 600 points; metrics.jsonl holds every round." : "";
      note.textContent = seeds + thin;
    };
  });
}

function furtherFigure(grid) {
  const { made, caption, div } = figure(grid);
  const list = choice("metric", value => { state.further = value; redraw(); });
  caption.append(list.label);
  const favourites = ["gsi.model", "similarity.cosine", "aggregate_norm", "theta_norm"];
  const draw = (runs, series, others) => {
    const keys = part => unique(runs.flatMap(run => Object.keys(run.parts[part])))
      .filter(key => key !== "round" && !others.has(key) && hasKey(runs, key, part));
    const between = keys("between").filter(key => key.startsWith("between_"));
    const all = [...keys("rounds").map(key => [`rounds|${key}`, key]), ...between.map(key => [`between|${key}`, key])];
    made.hidden = !all.length;
    if (!all.length) return;
    if (!all.some(([value]) => value === state.further)) {
      const named = favourites.map(key => all.find(option => option[1] === key)).find(Boolean);
      state.further = (named ?? all.find(([, key]) => !(key in AXES)) ?? all[0])[0];
    }
    list.fill(all, state.further);
    const [part, key] = state.further.split("|");
    plot(div, curveTraces(series, key, state.x, part, 1), { xaxis: xAxis(state.x) });
  };
  return { made, draw };
}

function tensorsSection() {
  section("tensors", "Agreement by parameter group", runs => runs.some(run => run.parts.tensors.round?.length), element => {
    let wanted = null, latest = [];
    const again = () => show(latest);
    const which = runChoice("tensors", again), what = choice("value", value => { wanted = value; again(); });
    element.append(el("div", { className: "controls screen" }, which.label, what.label));
    const names = el("div", { className: "legend still" });
    element.append(names);
    const { caption, div } = figure(element, "", "tall"), note = el("p", { className: "note" });
    element.append(note);
    const show = runs => {
      latest = runs;
      const run = which.current(runs), part = run.parts.tensors;
      const keys = Object.keys(part).filter(key => key !== "round" && key !== "model");
      if (!keys.includes(wanted)) wanted = keys[0];
      what.fill(keys.map(key => [key, key]), wanted);
      caption.textContent = `${wanted}, ${run.method}, seed ${run.seed}`;
      drawTensors(run, wanted, div, names);
      note.textContent = wanted === "fedglad.scale" && run.gamma !== null
        ? `Dashed: FedGLAD's bounds 1 ± ${run.gamma} t, t = round − 1.`
        : "1: the clients agree; larger: they pull apart.";
    };
    return show;
  });
}

function drawTensors(run, key, div, names) {
  const part = run.parts.tensors, lists = part[key];
  const width = Math.max(...lists.map(values => values?.length ?? 0));
  const named = i => run.names.length === width ? run.names[i] : `tensor ${i}`;
  const value = (i, row) => isNumber(lists[row]?.[i]) ? lists[row][i] : null;
  const tensors = Array.from({ length: width }, (_, i) => i), rows = part.round.map((_, row) => row);
  if (width > MOST_LINES) {
    names.replaceChildren();
    const heat = { type: "heatmap", x: part.round, y: tensors.map(i => plain(short(named(i), 34))), colorscale: "Viridis",
      z: tensors.map(i => rows.map(row => value(i, row))), colorbar: { thickness: 12, outlinewidth: 0 } };
    plot(div, [heat], { xaxis: { title: "round" }, yaxis: { autorange: "reversed", tickfont: { size: 9 } }, hovermode: "closest" });
    return;
  }
  const looks = tensors.map(look);
  names.replaceChildren(...tensors.map(i => el("span", {}, swatch(looks[i]), el("span", {}, named(i)))));
  const traces = tensors.map(i => ({
    x: part.round, y: rows.map(row => value(i, row)), name: plain(short(named(i), 34)), mode: "lines",
    line: { color: looks[i].colour, dash: looks[i].dash, width: 1.8 }, hovertemplate: "%{y:.4g}",
  }));
  if (key === "gsi.tensor" && part.model) {
    const grey = { colour: tone("--soft"), dash: "solid" };
    names.append(el("span", {}, swatch(grey), el("span", {}, "whole model")));
    traces.unshift({ x: part.round, y: part.model.map(v => isNumber(v) ? v : null), name: "whole model", mode: "lines",
      line: { color: grey.colour, width: 3.5 }, opacity: 0.6, hovertemplate: "%{y:.4g}" });
  }
  if (key === "fedglad.scale" && run.gamma !== null) {
    for (const sign of [-1, 1]) {
      traces.push({ x: part.round, y: part.round.map(at => 1 + sign * run.gamma * (at - 1)), mode: "lines",
        line: { color: tone("--soft"), dash: "dash", width: 1 }, hoverinfo: "skip" });
    }
  }
  plot(div, traces, { xaxis: { title: "round" } });
}

function scatterSection() {
  const has = runs => runs.some(run => pairs([run], "labels.similarity", "gsi.model").length > 1);
  section("scatter", "Gradient agreement against label similarity", has, element => {
    const names = el("div", { className: "legend" });
    element.append(names);
    const { div } = figure(element, "GSI of the model, a point a round", "tall");
    element.append(el("p", { className: "note" }, "r: Pearson's correlation over the points shown, all seeds together."));
    return (runs, series) => {
      const points = new Map(series.map(one => [one.key, pairs(one.runs, "labels.similarity", "gsi.model")]));
      const having = series.filter(one => points.get(one.key).length > 1);
      legend(names, having, one => {
        const r = correlation(points.get(one.key));
        return Number.isNaN(r) ? "" : ` (r = ${r.toFixed(2)})`;
      });
      const symbols = ["circle", "square", "diamond", "cross"];
      plot(div, visible(having).map(one => ({
        x: points.get(one.key).map(p => p[0]), y: points.get(one.key).map(p => p[1]), mode: "markers", name: plain(short(one.label, 40)),
        marker: { color: one.colour, size: 6, opacity: 0.65, symbol: symbols[start.dashes.indexOf(one.dash)] },
        hovertemplate: "similarity %{x:.3f}, GSI %{y:.3f}",
      })), { xaxis: { title: "label similarity of the cohort" }, yaxis: { title: "GSI" }, hovermode: "closest" });
    };
  });
}

function matricesSection() {
  section("similarity", "Similarity between clients", runs => runs.some(run => run.parts.matrices.round?.length), element => {
    let latest = [];
    const slider = el("input", { type: "range", min: 0, value: 0, ariaLabel: "round" }), at = el("output");
    const which = runChoice("matrices", () => show(latest));
    slider.oninput = () => show(latest);
    const rounds = el("label", { className: "choice" }, el("span", {}, "round"), slider, at);
    element.append(el("div", { className: "controls" }, which.label, rounds));
    const { div } = figure(element, "Cosine between the updates of two clients", "square");
    const show = runs => {
      latest = runs;
      const run = which.current(runs), part = run.parts.matrices;
      slider.max = part.round.length - 1;
      const row = Math.min(Number(slider.value), part.round.length - 1);
      at.textContent = ` ${part.round[row]}`;
      const named = part.clients?.[row] ?? part.matrix[row].map((_, k) => k);
      const ticks = named.map((client, k) => plain(part.clients?.[row] ? client : `#${k}`));
      const places = ticks.map((_, k) => k), few = places.filter(k => k % Math.ceil(places.length / 15) === 0);
      const marks = { tickmode: "array", tickvals: few, ticktext: few.map(k => ticks[k]), showgrid: false, zeroline: false };
      const heat = {
        type: "heatmap", x: places, y: places, zmin: -1, zmax: 1, colorscale: "RdBu", reversescale: false,
        z: part.matrix[row].map(line => line.map(value => isNumber(value) ? value : null)),
        text: places.map(i => places.map(j => `client ${ticks[i]}, client ${ticks[j]}`)),
        hovertemplate: "%{text}: %{z:.3f}<extra></extra>", colorbar: { thickness: 12, outlinewidth: 0 },
      };
      const client = { ...marks, title: "client" };
      plot(div, [heat], { hovermode: "closest", xaxis: client, yaxis: { ...client, autorange: "reversed" } });
    };
    return show;
  });
}

function labelsSection() {
  const of = runs => state.labels.filter(one => runs.some(run => run.group === one.group));
  section("labels", "Labels of the clients", runs => of(runs).length > 0, element => {
    let chosen = null, latest = [];
    const list = choice("setting", value => { chosen = value; show(latest); });
    const controls = el("div", { className: "controls screen" }, list.label), note = el("p", { className: "note" });
    element.append(controls);
    const { made, caption, div } = figure(element, "", "tall");
    element.append(note);
    const show = runs => {
      latest = runs;
      const tables = of(runs);
      if (!tables.some(one => one.group === chosen)) chosen = tables[0].group;
      controls.hidden = tables.length < 2;
      list.fill(tables.map(one => [one.group, `${state.letters.get(one.group)}: ${one.partition ?? "not here"}`]), chosen);
      const table = tables.find(one => one.group === chosen);
      made.hidden = Boolean(table.missing);
      note.textContent = table.missing ?? [
        `C-score ${table.c_score} (0: all clients are alike), ${table.per_client} classes a client on average.`,
        ...table.notes.map(text => `${text[0].toUpperCase()}${text.slice(1)}.`)].join(" ");
      if (table.missing) return;
      caption.textContent = `Share of each class, ${table.partition}, seed ${table.seed}`;
      const classes = table.classes.map(name => plain(short(name, 24)));
      const heat = {
        type: "heatmap", z: table.shares, y: classes.map((_, k) => k), zmin: 0, zmax: 1, colorscale: "Viridis",
        text: table.shares.map((line, c) => line.map((_, k) => `client ${k} (${table.sizes[k]} samples), class ${classes[c]}`)),
        hovertemplate: "%{text}: %{z:.0%}<extra></extra>", colorbar: { thickness: 12, outlinewidth: 0, tickformat: ".0%" },
      };
      const few = classes.map((_, k) => k).filter(k => k % Math.ceil(classes.length / 30) === 0);
      plot(div, [heat], { hovermode: "closest", xaxis: { title: "client", showgrid: false, zeroline: false },
        yaxis: { tickmode: "array", tickvals: few, ticktext: few.map(k => classes[k]), showgrid: false, zeroline: false } });
    };
    return show;
  });
}

function fairnessSection() {
  const measured = run => clientScores(run).length > 0 || hasKey([run], "fairness.mean");
  section("fairness", "Fairness between clients", runs => runs.some(measured), element => {
    const names = el("div", { className: "legend" }), table = el("table"), grid = el("div", { className: "grid" });
    element.append(names, el("div", { className: "wide" }, table), grid);
    const scores = figure(grid, "Score of each client, from the worst to the best"), over = figure(grid);
    element.append(el("p", { className: "note" }, "Of the last round in which clients were measured one by one, all seeds together."));
    return (runs, series) => {
      const having = series.filter(one => one.runs.some(measured));
      legend(names, having);
      fairnessTable(table, having);
      const share = { title: "clients, %", range: [0, 100] };
      const line = (one, values) => ({
        ...quantiles(values), mode: "lines", name: plain(short(one.label, 40)), hovertemplate: "%{y:.3f}",
        line: { color: one.colour, dash: one.dash, width: 2 },
      });
      const curves = visible(having).map(one => [one, allScores(one.runs)]).filter(([, values]) => values.length);
      scores.made.hidden = !curves.length;
      if (curves.length) plot(scores.div, curves.map(([one, values]) => line(one, values)), { xaxis: share });
      const first = having[0];
      const gained = visible(having).filter(one => one !== first && one.runs[0].group === first.runs[0].group)
        .map(one => [one, gains(one.runs, first.runs)]).filter(([, values]) => values.length);
      over.made.hidden = !gained.length;
      over.caption.textContent = `Gain of each client over ${short(first.label, 60)}`;
      const zero = { zerolinecolor: tone("--ink") };
      if (gained.length) plot(over.div, gained.map(([one, values]) => line(one, values)), { xaxis: share, yaxis: zero });
    };
  });
}

function fairnessTable(table, series) {
  const keys = ["mean", "std", "min", "p10"], heads = ["method", "mean", "sd", "worst", "10th percentile"];
  const body = series.map(one => el("tr", {}, el("td", {}, ...breakable(one.label)), ...keys.map(key => {
    const values = one.runs.map(run => last(run, `fairness.${key}`)).filter(isNumber);
    return el("td", {}, values.length ? mean(values).toFixed(3) : "–");
  })));
  table.replaceChildren(el("thead", {}, el("tr", {}, ...heads.map(h => el("th", {}, h)))), el("tbody", {}, ...body));
}

function trafficSection() {
  section("traffic", "Communication", runs => hasKey(runs, "uplink_bytes"), element => {
    const names = el("div", { className: "legend" }), grid = el("div", { className: "grid" });
    element.append(names, grid);
    const curve = figure(grid), bars = el("table", { className: "bars" });
    grid.append(el("figure", {}, el("figcaption", {}, "Bytes of a run: ", el("b", { className: "up" }, "■"), " uplink ",
      el("b", { className: "down" }, "■"), " downlink"), bars));
    return (runs, series) => {
      legend(names, series);
      const key = `test_${runs[0].metric}`;
      curve.made.hidden = !hasKey(runs, key);
      curve.caption.textContent = `Test ${runs[0].metric}, %, against all bytes sent`;
      if (hasKey(runs, key)) plot(curve.div, curveTraces(series, key, "traffic", "rounds", 100), { xaxis: xAxis("traffic") });
      trafficBars(bars, visible(series));
    };
  });
}

function trafficBars(table, series) {
  const sizes = series.map(one => [one, average(one, "uplink_bytes") ?? 0, average(one, "downlink_bytes") ?? 0]);
  const most = Math.max(1, ...sizes.map(([, up, down]) => up + down));
  table.replaceChildren(...sizes.map(([one, up, down]) => {
    const bar = (size, name) => el("i", { className: name, style: `width:${(100 * size / most).toFixed(2)}%` });
    return el("tr", {}, el("td", {}, ...breakable(one.label), el("div", { className: "bar" }, bar(up, "up"), bar(down, "down"))),
      el("td", {}, bytes(up + down)));
  }));
}

// --- the panel that chooses runs -----------------------------------------------------------------------------------

function panel() {
  const search = el("input", { type: "search", placeholder: "Search method, data, folder", ariaLabel: "Search runs" });
  search.oninput = () => { state.search = search.value; redraw(); };
  const setting = choice("setting", value => { state.setting = value === "" ? null : value; state.chose = true; redraw(); });
  const facets = Object.fromEntries(["data", "method", "seed"].map(name => [name, el("div", { className: "boxes" })]));
  const list = el("div", { className: "boxes runs" }), count = el("summary", {}, "Runs"), broken = el("ul", { className: "broken" });
  const element = el("details", { id: "runs", className: "screen", open: start.live && !narrow() }, count,
    el("div", { className: "controls" }, search, setting.label),
    ...Object.entries(facets).map(([name, box]) => el("fieldset", {}, el("legend", {}, name), box)),
    el("fieldset", {}, el("legend", {}, "runs"), list), broken);
  drawn.append(element);
  return () => {
    const runs = [...state.runs.values()];
    element.hidden = !start.live && runs.length < 2;
    setting.fill([["", "all settings"], ...settingTexts(runs)], state.setting ?? "");
    setting.label.hidden = state.letters.size < 2;
    const here = runs.filter(run => state.setting === null || run.group === state.setting);
    for (const [name, box] of Object.entries(facets)) {
      const values = unique((name === "data" ? runs : here).map(run => String(run[name])));
      values.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      boxes(box, name, values.map(value => [value, value]));
    }
    boxes(list, "run", here.map(run => [run.id, `${start.live ? run.id : `${run.method}, seed ${run.seed}`} (${howFar(run)})`]));
    const training = runs.filter(run => !run.finished).length;
    count.textContent = `Runs: ${shownRuns().length} of ${runs.length} shown${training ? `, ${training} not finished` : ""}`;
    broken.replaceChildren(...state.unreadable.map(one => el("li", {}, `${one.id} can't be read: ${one.reason}`)));
  };
}

const howFar = run => run.finished ? `${run.count} rounds` : `round ${run.count} of ${run.planned}`;

/** Each setting with its letter, its text, and whatever else tells it from the others. */
function settingTexts(runs) {
  const first = new Map();
  for (const run of runs) if (!first.has(run.group)) first.set(run.group, run);
  const all = [...first.values()];
  const names = unique(all.flatMap(run => Object.keys(run.settings)));
  const told = new Set(["data", "partition", "clients", "per_round", "model", "lr", "batch_size", "epochs", "steps"]);
  const differ = names.filter(name => !told.has(name) && unique(all.map(run => run.settings[name])).length > 1);
  return all.map(run => [run.group, [`${state.letters.get(run.group)}: ${run.setting}`,
    ...differ.map(name => `${name} ${run.settings[name]}`)].join(", ")]);
}

function boxes(element, facet, values) {
  const known = JSON.stringify(values.map(([value]) => value));
  if (element.dataset.values !== known) {  // else only the texts change, and no box loses its focus
    element.replaceChildren(...values.map(([value]) => {
      const box = el("input", { type: "checkbox", checked: !state.off[facet].has(value) });
      box.onchange = () => { state.off[facet][box.checked ? "delete" : "add"](value); redraw(); };
      return el("label", {}, box, el("span"));
    }));
    element.dataset.values = known;
  }
  values.forEach(([, text], i) => { element.children[i].lastChild.textContent = text; });
}

// --- drawing again -------------------------------------------------------------------------------------------------

let showPanel = () => {};

function redraw() {
  if (!state.chose) state.setting = usualSetting();
  showPanel();
  const runs = shownRuns(), series = seriesOf(runs);
  for (const one of sections) {
    one.element.hidden = !one.has(runs);
    one.dirty = !one.element.hidden;
  }
  for (const key of document.querySelectorAll("i.key")) key.replaceChildren(swatch(look(Number(key.dataset.series))));
  paint(runs, series);
}

/** Other settings would share axes without sharing a question: the one that was touched last comes first. */
function usualSetting() {
  const runs = [...state.runs.values()];
  if (unique(runs.map(run => run.group)).length < 2) return null;
  return runs.reduce((best, run) => (run.changed ?? 0) > (best.changed ?? 0) ? run : best).group;
}

/** Draw what is due; in the live page only what a reader can see soon. */
function paint(runs = shownRuns(), series = seriesOf(runs)) {
  for (const one of sections) {
    const box = one.element.getBoundingClientRect();
    const near = !start.live || state.printing || (box.top < 2 * window.innerHeight && box.bottom > -window.innerHeight);
    if (one.dirty && near) {
      one.dirty = false;
      one.draw(runs, series);
    }
  }
}

let waiting = false;
function soon(action) {
  if (waiting) return;
  waiting = true;
  setTimeout(() => { waiting = false; action(); }, 150);
}

// --- the live page -------------------------------------------------------------------------------------------------

function listen() {
  const status = el("p", { id: "status", className: "setting", role: "status" }, "connecting …");
  drawn.before(status);
  const source = new EventSource("events");
  const say = () => {
    const training = [...state.runs.values()].filter(run => !run.finished).length;
    status.textContent = state.runs.size || state.unreadable.length
      ? `live: ${state.runs.size} runs, ${training} not finished` : "live: no run yet; start one with fedloom run";
  };
  source.addEventListener("snapshot", event => {
    const told = JSON.parse(event.data);
    state.runs.clear();
    told.runs.forEach(keep);
    state.unreadable = told.unreadable;
    state.labels = told.labels;
    say();
    redraw();
  });
  source.addEventListener("change", event => {
    change(JSON.parse(event.data));
    say();
    soon(redraw);
  });
  source.onerror = () => { status.textContent = "the server does not answer; trying again …"; };
  addEventListener("scroll", () => soon(() => paint()), { passive: true });
}

function change(told) {
  told.gone.forEach(id => state.runs.delete(id));
  told.new.forEach(keep);
  for (const one of told.grown) {
    const run = state.runs.get(one.id);
    if (!run) continue;
    const { parts, ...rest } = one;
    Object.assign(run, rest);
    for (const [name, tail] of Object.entries(parts)) applyTail(run.parts[name], tail);
  }
  state.unreadable = told.unreadable ?? state.unreadable;
  state.labels = told.labels ?? state.labels;
}

// --- light, dark and paper -----------------------------------------------------------------------------------------

function themes() {
  const root = document.documentElement;
  document.getElementById("theme").onclick = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    redraw();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let before = "";
  addEventListener("beforeprint", () => {
    before = root.dataset.theme ?? "";
    root.dataset.theme = "light";
    state.printing = true;
    redraw();
  });
  addEventListener("afterprint", () => {
    state.printing = false;
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    redraw();
  });
}

themes();
start.runs.forEach(keep);
showPanel = panel();
[summarySection, curvesSection, tensorsSection, scatterSection, matricesSection, labelsSection, fairnessSection,
  trafficSection].forEach(make => make());
redraw();
if (start.live) listen();

// For whoever wants to look at, or test, what is drawn.
globalThis.fedloom = { state, overSeeds, correlation, pairs, gains, quantiles, allScores, seriesOf, shownRuns };

})();
