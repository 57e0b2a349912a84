// A figure over the steps: a line for each run, with what surrounds it, and marks of what happened.
const allSteps = data.steps.flat();
const range = allSteps.length ? [allSteps.reduce((a, b) => Math.min(a, b)), allSteps.reduce((a, b) => Math.max(a, b))] : [0, 1];
if (range[0] === range[1]) range[1] += 1;

function drawChart(figure) {
  const number = figure.dataset.chart;
  const chart = data.charts[number];
  const host = figure.querySelector(".plot");
  const steps = [...new Set(chart.series.flatMap((one) => data.steps[one.steps]))].sort((a, b) => a - b);
  let view = null;
  const redraw = () => { view = curve(host, chart); };
  const words = (at) => wordsAt(chart, steps[at]);
  redraw();
  slider(host, {
    count: steps.length,
    label: `${chart.name} by step`,
    describedby: `told-${number}`,
    words,
    show: (at) => { view.point(steps[at]); return words(at); },
    hide: () => view.point(null),
    nearest: (left) => nearest(steps, view.step(left)),
  });
  onWidth(host, redraw);
  figure.querySelector("details.table").addEventListener("toggle", (event) => {
    const rows = figure.querySelector(".rows");
    if (event.target.open && !rows.firstChild) rows.append(tableOf(chart, steps));
  });
}

function curve(host, chart) {
  const width = Math.max(host.clientWidth, 200);
  const svg = drawn("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
  const values = domain(chart.series.flatMap((one) => [...one.values, ...(one.low || []), ...(one.high || [])]));
  const x = scale(range, [MARGIN.left, width - MARGIN.right - 4]);
  const y = scale(values, [HEIGHT - MARGIN.bottom, MARGIN.top]);
  frame(svg, width, x, y, range, values);
  const runs = new Set(chart.series.map((one) => one.run));
  const taken = new Map();
  for (const mark of data.marks) if (runs.has(mark.run)) svg.append(markAt(mark, x, taken));
  for (const one of chart.series) svg.append(...lineOf(one, chart.dots, x, y));
  const cursor = drawn("g", {});
  svg.append(cursor);
  host.replaceChildren(svg);
  return {
    step: (left) => range[0] + ((left - MARGIN.left) / (width - MARGIN.left - MARGIN.right - 4)) * (range[1] - range[0]),
    point: (step) => cursor.replaceChildren(...(step === null ? [] : pointed(chart, step, x, y))),
  };
}

function lineOf(one, dots, x, y) {
  const steps = data.steps[one.steps];
  const made = [];
  if (one.low && !dots) made.push(...areas(one, steps, x, y));
  let path = "";
  let isOpen = false;
  one.values.forEach((value, at) => {
    if (value === null) { isOpen = false; return; }
    path += `${isOpen ? "L" : "M"}${x(steps[at])} ${y(value)}`;
    isOpen = true;
  });
  made.push(drawn("path", { class: `line r${one.run}${steps.length > 200 ? " dense" : ""}`, d: path }));
  if (dots && one.low) {
    one.values.forEach((value, at) => {
      if (value === null || one.low[at] === null) return;
      const [left, low, high] = [x(steps[at]), y(one.low[at]), y(one.high[at])];
      made.push(drawn("path", { class: `error r${one.run}`, d: `M${left} ${low}V${high}M${left - 3} ${low}h6M${left - 3} ${high}h6` }));
    });
  }
  if (dots || steps.length < 15) made.push(...points(one, steps, x, y, 3));
  return made;
}

function points(one, steps, x, y, radius) {
  return one.values.map((value, at) => value === null ? null : drawn("circle", { class: `dot f${one.run}`, cx: x(steps[at]), cy: y(value), r: radius })).filter(Boolean);
}

// The area between two edges, in pieces where an edge is missing.
function areas(one, steps, x, y) {
  const pieces = [[]];
  steps.forEach((step, at) => {
    if (one.low[at] === null || one.high[at] === null) pieces.push([]);
    else pieces[pieces.length - 1].push(at);
  });
  return pieces.filter((piece) => piece.length > 1).map((piece) => {
    const above = piece.map((at) => `${x(steps[at])} ${y(one.high[at])}`);
    const below = [...piece].reverse().map((at) => `${x(steps[at])} ${y(one.low[at])}`);
    return drawn("path", { class: `area f${one.run}${data.runs.length > 2 ? " faint" : ""}`, d: `M${[...above, ...below].join("L")}Z` });
  });
}

// Marks at one place stand beside each other; equal ones are one.
function markAt(mark, x, taken) {
  const at = x(Math.min(Math.max(mark.at, range[0]), range[1]));
  const here = taken.get(at) || [];
  const key = `${mark.kind} ${mark.run}`;
  if (here.includes(key)) return "";
  taken.set(at, [...here, key]);
  const title = drawn("title", {}, several ? `${data.runs[mark.run]}: ${mark.text}` : mark.text);
  const glyph = drawn("use", { href: `#mark-${mark.kind}`, class: several ? `mark-glyph g${mark.run}` : "mark-glyph", transform: `translate(${at + here.length * (mark.at > (range[0] + range[1]) / 2 ? -12 : 12)} 6) scale(.75)` });
  return drawn("g", {}, title, drawn("line", { class: "mark", x1: at, x2: at, y1: MARGIN.top - 2, y2: HEIGHT - MARGIN.bottom }), glyph);
}

function pointed(chart, step, x, y) {
  const dots = chart.series.flatMap((one) => {
    const steps = data.steps[one.steps];
    const at = placeOf(steps, step);
    return at < 0 || one.values[at] === null ? [] : [drawn("circle", { class: `dot f${one.run}`, cx: x(steps[at]), cy: y(one.values[at]), r: 4 })];
  });
  return [drawn("line", { class: "cursor", x1: x(step), x2: x(step), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }), ...dots];
}

function wordsAt(chart, step) {
  const parts = chart.series.flatMap((one) => {
    const steps = data.steps[one.steps];
    const at = placeOf(steps, step);
    if (at < 0) return [];
    const where = steps[at] === step ? "" : ` at step ${steps[at]}`;
    const around = one.low && one.low[at] !== null ? ` (${told(one.low[at])} to ${told(one.high[at])})` : "";
    return [`${several ? data.runs[one.run] + " " : ""}${told(one.values[at])}${around}${where}`];
  });
  const runs = new Set(chart.series.map((one) => one.run));
  const happened = data.marks.filter((mark) => runs.has(mark.run) && Math.abs(mark.at - step) <= 0.5).map((mark) => (several ? `${data.runs[mark.run]}: ${mark.text}` : mark.text));
  return [`step ${step}: ${parts.join("; ")}`, ...happened].join("; ");
}

// Where a run is read at a step: there or, where it has no point, at its nearest; -1 before its first and after its last.
function placeOf(steps, step) {
  return step < steps[0] || step > steps[steps.length - 1] ? -1 : nearest(steps, step);
}

function nearest(steps, wanted) {
  return steps.reduce((best, step, at) => Math.abs(step - wanted) < Math.abs(steps[best] - wanted) ? at : best, 0);
}

function tableOf(chart, steps) {
  const heads = chart.series.map((one) => element("th", { scope: "col" }, several ? data.runs[one.run] : "value"));
  const edges = (one, at) => one.low && one.low[at] !== null ? ` (${told(one.low[at])} to ${told(one.high[at])})` : "";
  const rows = steps.map((step) => element("tr", {}, element("th", { scope: "row" }, String(step)), ...chart.series.map((one) => {
    const at = data.steps[one.steps].indexOf(step);
    return element("td", {}, at < 0 ? "" : told(one.values[at]) + edges(one, at));
  })));
  const head = element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "step"), ...heads));
  const caption = element("caption", { class: "hidden" }, chart.name);
  const table = element("table", {}, caption, head, element("tbody", {}, ...rows));
  return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": `Numbers of ${chart.name}` }, table);
}

function onWidth(host, redraw) {
  let width = host.clientWidth;
  new ResizeObserver(() => {
    if (host.clientWidth === width || !host.clientWidth) return;
    width = host.clientWidth;
    redraw();
  }).observe(host);
}
