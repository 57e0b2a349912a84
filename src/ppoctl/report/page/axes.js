// Scales and ticks, which map numbers to pixels, and the frame of every chart.
const HEIGHT = 170;
const MARGIN = { top: 14, right: 10, bottom: 20, left: 54 };

function nice(low, high, count) {
  const raw = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((found) => found >= raw * 0.999);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) ticks.push(Number((at * step).toPrecision(12)));
  return ticks;
}

function wholeTicks(low, high, count) {
  const step = Math.max(1, Math.ceil((high - low) / Math.max(count, 1)));
  const even = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 2500, 5000, 10000].find((each) => each >= step) || step;
  const ticks = [];
  for (let at = Math.ceil(low / even) * even; at <= high; at += even) ticks.push(at);
  return ticks;
}

// Return the range of an axis: a little wider than the values, also if they are all equal.
function domain(values) {
  const found = values.filter((value) => value !== null && value !== undefined);
  if (!found.length) return [0, 1];
  let low = found[0];
  let high = found[0];
  for (const value of found) { low = Math.min(low, value); high = Math.max(high, value); }
  const margin = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

function scale(from, to) {
  const width = from[1] - from[0] || 1;
  return (value) => Number((to[0] + ((value - from[0]) / width) * (to[1] - to[0])).toFixed(2));
}

function frame(svg, width, x, y, steps, values) {
  const bottom = HEIGHT - MARGIN.bottom;
  for (const value of nice(values[0], values[1], 4)) {
    svg.append(svgElement("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }));
    svg.append(svgElement("text", { class: "axis", x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, formatted(value)));
  }
  for (const step of wholeTicks(steps[0], steps[1], width / 60)) {
    svg.append(svgElement("text", { class: "axis", x: x(step), y: bottom + 15, "text-anchor": "middle" }, String(step)));
  }
}

// Make a chart a slider over its steps, for keys and pointer. `show` marks a step and returns its values as text.
function slider(host, options) {
  let at = options.count - 1;
  const readout = element("p", { class: "readout", "aria-hidden": "true" });
  const go = (to) => {
    at = to;
    const words = options.show(at);
    readout.textContent = words;
    host.setAttribute("aria-valuenow", at + 1);
    host.setAttribute("aria-valuetext", words);
  };
  filled(host, {
    role: "slider", tabindex: "0", "aria-label": options.label, "aria-describedby": options.describedby,
    "aria-valuemin": "1", "aria-valuemax": String(options.count), "aria-orientation": "horizontal",
  }, []);
  host.after(readout);
  host.addEventListener("keydown", (event) => {
    const to = moved(event, at, options.count, true) ?? moved(event, at, options.count, false);
    if (to === null) return;
    event.preventDefault();
    go(to);
  });
  host.addEventListener("pointermove", (event) => go(options.nearest(event.clientX - host.getBoundingClientRect().left)));
  host.addEventListener("focus", () => go(at));
  const rest = () => { options.hide(); readout.textContent = ""; };
  host.addEventListener("pointerleave", () => { if (document.activeElement !== host) rest(); });
  host.addEventListener("blur", rest);
  host.setAttribute("aria-valuenow", at + 1);
  host.setAttribute("aria-valuetext", options.words(at));
}
