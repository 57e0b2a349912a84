// The data of the page, and functions for elements and numbers. Text is set as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const several = data.runs.length > 1;

function element(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svgElement(name, attributes, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === false || value === null || value === undefined) continue;
    made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Return a number with four significant digits, as the commands print it.
function formatted(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function signed(value) {
  return value === null || value === undefined ? "-" : (value > 0 ? "+" : "") + formatted(value);
}

// Return the new position in a list of `count` after a navigation key; null for any other key.
function moved(event, at, count, isRow) {
  const back = isRow ? ["ArrowLeft"] : ["ArrowUp"];
  const on = isRow ? ["ArrowRight"] : ["ArrowDown"];
  if (event.altKey || event.ctrlKey || event.metaKey) return null;
  if (back.includes(event.key)) return Math.max(at - 1, 0);
  if (on.includes(event.key)) return Math.min(at + 1, count - 1);
  if (event.key === "PageUp") return Math.max(at - 10, 0);
  if (event.key === "PageDown") return Math.min(at + 10, count - 1);
  if (event.key === "Home") return 0;
  if (event.key === "End") return count - 1;
  return null;
}
