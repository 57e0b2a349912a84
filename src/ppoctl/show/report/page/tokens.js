// The tokens of a response, coloured by one of their metrics. The focused token is read out with its values.
const COLUMNS = [["advantage", "advantage"], ["value", "value"], ["kl", "KL"], ["logprob", "log-prob"]];
const COLOURS = COLUMNS.slice(0, 3);

function tokensOf(item, column) {
  const bounds = boundsOf(column, item[column] || []);
  const readout = element("p", { class: "readout", role: "status" });
  const spans = item.tokens.map((piece, at) => element("span", {
    class: `token ${isObserved(item, at) ? "observed" : shade((item[column] || [])[at], bounds)}`, tabindex: at ? "-1" : "0", title: tokenWords(item, at), role: "option",
    "aria-label": tokenWords(item, at),
  }, ...visible(piece)));
  const box = element("div", { class: "tokens token-text", role: "listbox", "aria-orientation": "horizontal", "aria-label": "Tokens of the response" }, ...groupsOf(item, spans));
  const enter = (at) => {
    spans.forEach((span, number) => {
      span.setAttribute("tabindex", number === at ? "0" : "-1");
      span.setAttribute("aria-selected", String(number === at));
    });
    readout.textContent = tokenWords(item, at);
  };
  box.addEventListener("keydown", (event) => {
    const at = spans.indexOf(document.activeElement);
    const to = at < 0 ? null : moved(event, at, spans.length, true);
    if (to === null) return;
    event.preventDefault();
    spans[to].focus();
  });
  box.addEventListener("focusin", (event) => { const at = spans.indexOf(event.target); if (at >= 0) enter(at); });
  box.addEventListener("pointerover", (event) => {
    const at = spans.indexOf(event.target.closest(".token"));
    if (at >= 0) readout.textContent = tokenWords(item, at);
  });
  return [scaleOf(item, column, bounds), box, readout];
}

// Return the tokens of each turn and observation of an episode in a group with its title; otherwise the tokens alone.
function groupsOf(item, spans) {
  if (!item.parts) return spans;
  return item.parts.filter((part) => part.text === null).map((part) => element("div", { role: "group", "aria-label": part.title, class: part.turn ? "turn" : "observation" },
    element("p", { class: "says", role: "presentation" }, part.title), ...spans.slice(part.from, part.to),
    ...part.calls.map((call) => element("p", { class: "says", role: "presentation" }, "call: ", ...visible(call)))));
}

function isObserved(item, at) {
  return Boolean(item.mask) && !item.mask[at];
}

// Return the sizes between which a column is shaded. They start at 0, except for the values of a critic that all have
// one sign, which differ by little.
function boundsOf(column, values) {
  const known = values.filter((value) => value !== null);
  const sizes = known.map((value) => Math.abs(value || 0));
  const isOneSided = known.every((value) => value > 0) || known.every((value) => value < 0);
  const largest = Math.max(0, ...sizes);
  return [column === "value" && isOneSided ? Math.min(largest, ...sizes) : 0, largest];
}

// Return a class for the size and the sign of a value; none for a value close to 0. The sign is also shown as a line.
function shade(value, [smallest, largest]) {
  const size = Math.abs(value || 0);
  if (size === 0 || size < 0.02 * largest) return "";
  return (value > 0 ? "u" : "d") + Math.max(1, Math.ceil(((size - smallest) / (largest - smallest || 1)) * 4));
}

function scaleOf(item, column, bounds) {
  const name = COLUMNS.find(([key]) => key === column);
  if (!item[column]) return element("p", { class: "says" }, "No advantages, values or KL were recorded for this sample.");
  const [smallest, largest] = bounds;
  if (!largest) return element("p", { class: "says" }, `${name[1]} of each token: all are 0.`);
  const parts = [];
  const ends = smallest ? `from ${formatted(smallest)} to ${formatted(largest)}` : `up to ${formatted(largest)}`;
  if (item[column].some((value) => value > 0)) parts.push(element("span", { class: "u4" }, `solid: ${ends}`));
  if (item[column].some((value) => value < 0)) parts.push(" ", element("span", { class: "d4" }, `dotted: below 0, ${ends}`));
  return element("p", { class: "says scale" }, `${name[1]} of each token; `, ...parts);
}

function tokenWords(item, at) {
  const values = isObserved(item, at) ? ["not in the loss"] : COLUMNS.filter(([key]) => item[key]).map(([key, name]) => `${name} ${key === "advantage" ? signed(item[key][at]) : formatted(item[key][at])}`);
  return [`token ${at + 1} of ${item.tokens.length}: ${JSON.stringify(item.tokens[at])}`, ...values].join(", ");
}

// Show invisible characters: line breaks and tabs as symbols, control characters as their codes.
function visible(piece) {
  const parts = [];
  for (const part of piece.split(/([\u0000-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069])/)) {
    if (part === "\n") parts.push(element("span", { class: "space" }, "\u21b5"), "\n");
    else if (part === "\t") parts.push(element("span", { class: "space" }, "\u21e5"), "\t");
    else if (part.length === 1 && /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/.test(part)) {
      parts.push(element("span", { class: "space" }, "\\u" + part.charCodeAt(0).toString(16).padStart(4, "0")));
    } else if (part) parts.push(part);
  }
  return parts;
}
