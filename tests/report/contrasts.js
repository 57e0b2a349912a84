// What of the page's texts has too little contrast with what lies below it.
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (text) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3]));
  const ground = (node) => {
    const own = parse(getComputedStyle(node).backgroundColor);
    if (own[3] === 1) return own.slice(0, 3);
    return over(own, node.parentElement ? ground(node.parentElement) : [255, 255, 255]);
  };
  const light = (colour) => colour.map((part) => part / 255).map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const poor = [];
  let read = 0;
  for (const node of document.querySelectorAll("body *")) {
    if (!node.checkVisibility() || ![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) continue;
    const style = getComputedStyle(node);
    const below = ground(node);
    const front = over(parse(node.namespaceURI.endsWith("svg") ? style.fill : style.color), below);
    const [low, high] = [light(front), light(below)].sort((a, b) => a - b);
    read += 1;
    if ((high + 0.05) / (low + 0.05) < 4.5) poor.push(`${node.tagName}.${node.className.baseVal ?? node.className}: ${node.textContent.slice(0, 30)}`);
  }
  return { read, poor };
})()
