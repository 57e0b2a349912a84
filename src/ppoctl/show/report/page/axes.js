// The frame of every chart, and its slider. The ranges and labels of axes are computed by `show/chart/axis.py`.
const HEIGHT = 170;
const MARGIN = { top: 14, right: 14, bottom: 20, left: 54 };

// Return a function from values to pixels: `from` at the low end of the axis, `to` at its high end.
function scale(axis, from, to) {
  return (value) => Number((from + ((value - axis.low) / (axis.high - axis.low)) * (to - from)).toFixed(2));
}

// Return an empty chart of the width of its host, with the labels of its values, and the scale of the values.
function frame(host, axis) {
  const width = Math.max(host.clientWidth, 200);
  const svg = svgElement("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
  const y = scale(axis, HEIGHT - MARGIN.bottom, MARGIN.top);
  for (const [value, label] of axis.ticks) {
    svg.append(svgElement("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }));
    svg.append(svgElement("text", { class: "axis", x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, label));
  }
  return { svg, width, y };
}

function stepLabel(x, label) {
  return svgElement("text", { class: "axis", x, y: HEIGHT - MARGIN.bottom + 15, "text-anchor": "middle" }, label);
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
