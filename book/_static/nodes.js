// Elements of a page and of a drawing, for the scripts that draw figures in it.
const Nodes = {
  element(name, attributes = {}, text = "") {
    return Nodes.filled(document.createElement(name), attributes, text);
  },

  svg(name, attributes = {}, text = "") {
    return Nodes.filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, text);
  },

  filled(node, attributes, text) {
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    return node;
  },

  // A node in one colour on white and another on black.
  shaded(node, [light, dark]) {
    node.style.setProperty("--light", light);
    node.style.setProperty("--dark", dark);
    node.classList.add("nqf-shade");
    return node;
  },

  superscript(k) {
    return String(k).replace(/./g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
  },
};
