// Who worked and who waited in the newest steps: a row for each party, with the steps one after another.
const ROW = { left: 70, height: 20, gap: 10 };

function drawWaits(figure) {
  const number = Number(figure.dataset.waits);
  const found = data.waits[number];
  const host = figure.querySelector(".plot");
  let view = null;
  const redraw = () => { view = parties(host, found); };
  const words = (at) => found.steps[at].says;
  redraw();
  slider(host, {
    count: found.steps.length,
    label: `Who worked and who waited by step, ${data.runs[number]}`,
    words,
    show: (at) => { view.point(at); return words(at); },
    hide: () => view.point(null),
    nearest: (left) => view.step(left),
  });
  onWidth(host, redraw);
}

function parties(host, found) {
  const width = Math.max(host.clientWidth, 200);
  const bottom = found.parties.length * (ROW.height + ROW.gap);
  const labels = bottom + (found.steps.some((step) => step.resumed.length) ? 26 : 15);
  const svg = svgElement("svg", { width, height: labels + 5, viewBox: `0 0 ${width} ${labels + 5}`, "aria-hidden": "true" });
  const total = found.steps.reduce((sum, step) => sum + step.seconds, 0);
  const x = scale({ low: 0, high: total }, ROW.left, width - MARGIN.right);
  const y = (row) => row * (ROW.height + ROW.gap) + ROW.gap / 2;
  found.parties.forEach((party, row) => svg.append(svgElement("text", { class: "axis", x: ROW.left - 8, y: y(row) + ROW.height / 2 + 4, "text-anchor": "end" }, party)));
  const isWide = found.steps.every((step) => x(step.seconds) - x(0) > 90);
  const starts = [];
  let start = 0;
  for (const step of found.steps) {
    starts.push(start);
    step.spans.forEach((spans, row) => svg.append(...spans.map((span) => spanOf(span, start, x, y(row)))));
    svg.append(...step.resumed.map((at) => svgElement("use", { href: "#mark-resume", class: "mark-glyph", transform: `translate(${x(start + at)} ${bottom + 8}) scale(.75)` })));
    const space = x(start + step.seconds) - x(start);
    const label = isWide ? `step ${step.step}: ${formatted(Number(step.seconds.toPrecision(3)))} s` : String(step.step);
    if (space > 24) svg.append(svgElement("text", { class: "axis", x: x(start + step.seconds / 2), y: labels, "text-anchor": "middle" }, label));
    start += step.seconds;
    if (starts.length < found.steps.length) svg.append(svgElement("line", { class: "boundary", x1: x(start), x2: x(start), y1: 0, y2: bottom + 4 }));
  }
  const cursor = svgElement("g", {});
  svg.append(cursor);
  host.replaceChildren(svg);
  return {
    step: (left) => starts.reduce((best, from, at) => x(from) <= left ? at : best, 0),
    point: (at) => cursor.replaceChildren(...(at === null ? [] : [svgElement("rect", {
      class: "cursor", fill: "none", x: x(starts[at]), width: x(starts[at] + found.steps[at].seconds) - x(starts[at]), y: 1, height: bottom + 2,
    })])),
  };
}

// Return the shape of a span: a block of work or of a transfer, or a dotted line while the party waits.
function spanOf([from, to, state], start, x, top) {
  const [left, right] = [x(start + from), x(start + to)];
  const block = { x: left, width: Math.max(right - left, 1), y: top, height: ROW.height };
  if (state === "works") return svgElement("rect", { class: "f0", ...block });
  if (state === "transfer") return svgElement("rect", { fill: "url(#fill-1)", ...block });
  return svgElement("line", { class: "mark", x1: left, x2: right, y1: top + ROW.height / 2, y2: top + ROW.height / 2 });
}
