// The chart of a metric over the steps: a line and a band for each run, and marks of events.

function drawChart(figure) {
  const number = figure.dataset.chart;
  const chart = data.charts[number];
  const host = figure.querySelector(".plot");
  const steps = [...new Set(chart.series.flatMap((series) => data.steps[series.steps]))].sort((a, b) => a - b);
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
  const { svg, width, y } = frame(host, chart.axis);
  const x = scale(data.axis, MARGIN.left, width - MARGIN.right);
  for (const [step, label] of data.axis.ticks) svg.append(stepLabel(x(step), label));
  const runs = new Set(chart.series.map((series) => series.run));
  const taken = new Map();
  for (const mark of data.marks) if (runs.has(mark.run)) svg.append(markAt(mark, x, taken));
  for (const series of chart.series) svg.append(...lineOf(series, chart.dots, x, y));
  const cursor = svgElement("g", {});
  svg.append(cursor);
  host.replaceChildren(svg);
  return {
    step: (left) => data.axis.low + ((left - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (data.axis.high - data.axis.low),
    point: (step) => cursor.replaceChildren(...(step === null ? [] : pointed(chart, step, x, y))),
  };
}

function lineOf(series, dots, x, y) {
  const steps = data.steps[series.steps];
  const made = [];
  if (series.low && !dots) made.push(...areas(series, steps, x, y));
  let path = "";
  let isOpen = false;
  series.values.forEach((value, at) => {
    if (value === null) { isOpen = false; return; }
    path += `${isOpen ? "L" : "M"}${x(steps[at])} ${y(value)}`;
    isOpen = true;
  });
  made.push(svgElement("path", { class: `line r${series.run}${steps.length > 200 ? " dense" : ""}`, d: path }));
  if (dots && series.low) {
    series.values.forEach((value, at) => {
      if (value === null || series.low[at] === null) return;
      const [left, low, high] = [x(steps[at]), y(series.low[at]), y(series.high[at])];
      made.push(svgElement("path", { class: `error r${series.run}`, d: `M${left} ${low}V${high}M${left - 3} ${low}h6M${left - 3} ${high}h6` }));
    });
  }
  if (dots || steps.length < 15) made.push(...points(series, steps, x, y, 3));
  return made;
}

function points(series, steps, x, y, radius) {
  return series.values.map((value, at) => value === null ? null : svgElement("circle", { class: `dot f${series.run}`, cx: x(steps[at]), cy: y(value), r: radius })).filter(Boolean);
}

// Return the areas between two edges: several if an edge is missing at some steps.
function areas(series, steps, x, y) {
  const pieces = [[]];
  steps.forEach((step, at) => {
    if (series.low[at] === null || series.high[at] === null) pieces.push([]);
    else pieces[pieces.length - 1].push(at);
  });
  return pieces.filter((piece) => piece.length > 1).map((piece) => {
    const above = piece.map((at) => `${x(steps[at])} ${y(series.high[at])}`);
    const below = [...piece].reverse().map((at) => `${x(steps[at])} ${y(series.low[at])}`);
    return svgElement("path", { class: `area f${series.run}${data.runs.length > 2 ? " faint" : ""}`, d: `M${[...above, ...below].join("L")}Z` });
  });
}

// Draw marks at the same step next to each other. Marks of the same kind and run are drawn once.
function markAt(mark, x, taken) {
  const at = x(Math.min(Math.max(mark.at, data.axis.low), data.axis.high));
  const present = taken.get(at) || [];
  const key = `${mark.kind} ${mark.run}`;
  if (present.includes(key)) return "";
  taken.set(at, [...present, key]);
  const title = svgElement("title", {}, several ? `${data.runs[mark.run]}: ${mark.text}` : mark.text);
  const glyph = svgElement("use", { href: `#mark-${mark.kind}`, class: several ? `mark-glyph g${mark.run}` : "mark-glyph", transform: `translate(${at + present.length * (mark.at > (data.axis.low + data.axis.high) / 2 ? -12 : 12)} 6) scale(.75)` });
  return svgElement("g", {}, title, svgElement("line", { class: "mark", x1: at, x2: at, y1: MARGIN.top - 2, y2: HEIGHT - MARGIN.bottom }), glyph);
}

function pointed(chart, step, x, y) {
  const dots = chart.series.flatMap((series) => {
    const steps = data.steps[series.steps];
    const at = placeOf(steps, step);
    return at < 0 || series.values[at] === null ? [] : [svgElement("circle", { class: `dot f${series.run}`, cx: x(steps[at]), cy: y(series.values[at]), r: 4 })];
  });
  return [svgElement("line", { class: "cursor", x1: x(step), x2: x(step), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }), ...dots];
}

function wordsAt(chart, step) {
  const parts = chart.series.flatMap((series) => {
    const steps = data.steps[series.steps];
    const at = placeOf(steps, step);
    if (at < 0) return [];
    const where = steps[at] === step ? "" : ` at step ${steps[at]}`;
    const around = series.low && series.low[at] !== null ? ` (${formatted(series.low[at])} to ${formatted(series.high[at])})` : "";
    return [`${several ? data.runs[series.run] + " " : ""}${formatted(series.values[at])}${around}${where}`];
  });
  const runs = new Set(chart.series.map((series) => series.run));
  const events = data.marks.filter((mark) => runs.has(mark.run) && Math.abs(mark.at - step) <= 0.5).map((mark) => (several ? `${data.runs[mark.run]}: ${mark.text}` : mark.text));
  return [`step ${step}: ${parts.join("; ")}`, ...events].join("; ");
}

// Return the index of a run's point at a step, or of the nearest point; -1 before its first and after its last point.
function placeOf(steps, step) {
  return step < steps[0] || step > steps[steps.length - 1] ? -1 : nearest(steps, step);
}

function nearest(steps, wanted) {
  return steps.reduce((best, step, at) => Math.abs(step - wanted) < Math.abs(steps[best] - wanted) ? at : best, 0);
}

function tableOf(chart, steps) {
  const heads = chart.series.map((series) => element("th", { scope: "col" }, several ? data.runs[series.run] : "value"));
  const edges = (series, at) => series.low && series.low[at] !== null ? ` (${formatted(series.low[at])} to ${formatted(series.high[at])})` : "";
  const rows = steps.map((step) => element("tr", {}, element("th", { scope: "row" }, String(step)), ...chart.series.map((series) => {
    const at = data.steps[series.steps].indexOf(step);
    return element("td", {}, at < 0 ? "" : formatted(series.values[at]) + edges(series, at));
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
