// The browser of samples: select a set, a kind, then a sample of the list; its details are shown next to the list.
function drawBrowser(host) {
  const state = { set: 0, kind: "all", at: 0, column: "advantage" };
  const list = element("ul", { class: "list", role: "listbox", "aria-label": "Samples", tabindex: "0" });
  const detail = element("article", { class: "sample", "aria-live": "off", "aria-label": "Selected sample" });
  const counted = element("p", { class: "says" });
  const kinds = element("select", { id: "kind" });
  const sets = element("select", { id: "set" }, ...data.sets.map((set, at) => element("option", { value: at }, nameOf(set))));
  const colours = element("fieldset", {}, element("legend", {}, "Colour by"), ...COLOURS.map(([key, name]) => element("label", {},
    element("input", { type: "radio", name: "column", value: key, checked: key === state.column }), ` ${name}`)));

  const shown = () => data.sets[state.set].items.filter((item) => state.kind === "all" || item.kinds.includes(state.kind));
  const choose = (at) => {
    state.at = at;
    [...list.children].forEach((option, number) => option.setAttribute("aria-selected", String(number === at)));
    const option = list.children[at];
    if (option) {
      list.setAttribute("aria-activedescendant", option.id);
      if (option.offsetTop < list.scrollTop) list.scrollTop = option.offsetTop;
      const below = option.offsetTop + option.offsetHeight - list.clientHeight;
      if (below > list.scrollTop) list.scrollTop = below;
    }
    detail.replaceChildren(...(option ? detailOf(shown()[at], state.column) : []));
  };
  const fill = () => {
    const items = shown();
    list.replaceChildren(...items.map((item, at) => element("li", { role: "option", id: `sample-${at}` }, item.title,
      element("small", {}, `${scoreOf(item)}; ${item.kinds.join(", ")}`))));
    const set = data.sets[state.set];
    counted.textContent = `${items.length} shown of ${set.total} in ${nameOf(set)}.`;
    colours.hidden = !set.items.some((item) => item.tokens);
    choose(0);
  };
  const enterSet = () => {
    const found = [...new Set(data.sets[state.set].items.flatMap((item) => item.kinds))];
    kinds.replaceChildren(...["all", ...found].map((kind) => element("option", { value: kind }, kind)));
    state.kind = "all";
    fill();
  };
  sets.addEventListener("change", () => { state.set = Number(sets.value); enterSet(); });
  kinds.addEventListener("change", () => { state.kind = kinds.value; fill(); });
  colours.addEventListener("change", (event) => { state.column = event.target.value; choose(state.at); });
  list.addEventListener("keydown", (event) => {
    const to = moved(event, state.at, list.children.length, false);
    if (to === null || to < 0) return;
    event.preventDefault();
    choose(to);
  });
  list.addEventListener("click", (event) => {
    const option = event.target.closest("[role=option]");
    if (option) choose([...list.children].indexOf(option));
  });
  host.append(
    element("div", { class: "controls" }, element("label", {}, "Source", sets), element("label", {}, "Kind", kinds), colours),
    element("div", { class: "browse" }, element("div", {}, list, counted), detail));
  enterSet();
}

function nameOf(set) {
  return several ? `${data.runs[set.run]}: ${set.title}` : set.title;
}

function scoreOf(item) {
  return item.score === null ? `no score (${item.outcome})` : `score ${formatted(item.score)}`;
}

function detailOf(item, column) {
  const parts = [element("h3", {}, item.title), element("p", { class: "says" }, `${scoreOf(item)}; ${item.ended}; ${item.kinds.join(", ")}`)];
  parts.push(...textOf("Prompt", item.prompt));
  if (item.tokens) {
    parts.push(element("h4", {}, item.parts ? "Conversation" : "Response"), ...tokensOf(item, item[column] ? column : COLOURS.map(([key]) => key).find((key) => item[key])));
    if (item.cut) parts.push(element("p", { class: "note" }, `${item.cut} more tokens are not in this file.`));
  } else if (!item.parts) parts.push(...textOf("Response", item.response));
  for (const part of item.parts || []) if (part.text !== null) parts.push(...textOf(part.title, part.text, part.turn ? "" : "observation"));
  if (item.answer) parts.push(...textOf("Expected", item.answer));
  if (item.earlier) parts.push(...textOf(`Earlier response, ${item.earlier.title}`, item.earlier.response));
  return parts;
}

function textOf(title, text, kind = "") {
  return [element("h4", {}, title), element("p", { class: `text token-text ${kind}`, tabindex: "0", role: "region", "aria-label": title }, ...visible(text))];
}
