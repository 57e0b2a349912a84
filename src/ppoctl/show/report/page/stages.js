// Seconds of each stage over the steps, stacked in the order in which the stages run.
function drawStages(figure) {
  const found = data.stages[figure.dataset.stages];
  const host = figure.querySelector(".plot");
  for (const row of figure.querySelectorAll("tr[data-stage]")) {
    const at = found.stages.indexOf(row.dataset.stage);
    if (at >= 0) for (const shape of row.querySelectorAll("rect")) shape.setAttribute("fill", `url(#fill-${at % 16})`);
  }
  if (!found.bars.length) return;
  const totals = found.bars.map((_, bar) => found.seconds.reduce((sum, stage) => sum + (stage[bar] || 0), 0));
  let view = null;
  const redraw = () => { view = bars(host, found, totals); };
  const words = (at) => stagesAt(found, totals, at);
  redraw();
  slider(host, {
    count: found.bars.length,
    label: `Seconds of each stage by step, ${data.runs[found.run]}`,
    words,
    show: (at) => { view.point(at); return words(at); },
    hide: () => view.point(null),
    nearest: (left) => view.bar(left),
  });
  onWidth(host, redraw);
}

function bars(host, found, totals) {
  const { svg, width, y } = frame(host, found.axis);
  const each = (width - MARGIN.left - MARGIN.right) / found.bars.length;
  const gap = Math.min(each * 0.25, 6);
  const left = (bar) => MARGIN.left + bar * each + gap / 2;
  found.bars.forEach((bar, at) => {
    let below = 0;
    found.seconds.forEach((stage, number) => {
      const seconds = stage[at] || 0;
      const top = y(below + seconds);
      svg.append(svgElement("rect", { x: left(at), width: each - gap, y: top, height: Math.max(y(below) - top, 0), fill: `url(#fill-${number % 16})` }));
      below += seconds;
    });
  });
  for (const [step, label] of found.ticks) {
    const at = found.bars.findIndex(([first, last]) => first <= step && step <= last);
    if (at >= 0) svg.append(stepLabel(left(at) + (each - gap) / 2, label));
  }
  const cursor = svgElement("g", {});
  svg.append(cursor);
  host.replaceChildren(svg);
  return {
    bar: (at) => Math.min(Math.max(Math.floor((at - MARGIN.left) / each), 0), found.bars.length - 1),
    point: (bar) => cursor.replaceChildren(...(bar === null ? [] : [svgElement("rect", {
      class: "cursor", fill: "none", x: left(bar) - 1, width: each - gap + 2, y: y(totals[bar]) - 2, height: HEIGHT - MARGIN.bottom - y(totals[bar]) + 3,
    })])),
  };
}

function stagesAt(found, totals, at) {
  const [first, last] = found.bars[at];
  const name = first === last ? `step ${first}` : `steps ${first} to ${last}, mean`;
  const parts = found.stages.map((stage, number) => [stage, found.seconds[number][at] || 0]).filter((part) => part[1] > 0);
  return `${name}: ${formatted(totals[at])} s; ` + parts.map(([stage, seconds]) => `${stage} ${formatted(seconds)}`).join(", ");
}
