// DOM elements and number formats. Strings are inserted as text nodes, so names cannot become markup.

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const $ = (id) => document.getElementById(id);

function bytes(size) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 1000) return `${unit === "B" ? size : size.toFixed(1)} ${unit}`;
    size /= 1000;
  }
  return `${size.toFixed(1)} TB`;
}

const ratio = (before, after) => (after ? `${(before / after).toFixed(2)}×` : "–");

const bits = (stored, items) => (items ? (8 * stored) / items : 0);

const percent = (x) => (x === 0 ? "0 %" : x < 0.0001 ? "< 0.01 %" : `${(100 * x).toFixed(x < 0.1 ? 2 : 1)} %`);

const seconds = (x) => (x < 1 ? `${(1000 * x).toFixed(0)} ms` : `${x.toFixed(1)} s`);

const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

const compact = (x) => {
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e5 || size < 1e-3 ? x.toExponential(1) : String(Number(x.toPrecision(3)));
};

function errorText(isExact, error) {
  if (isExact) return "exact";
  return error === null ? "unknown" : percent(error);
}

const codecName = (tensor) => tensor.codec.split("(")[0];

const untied = (variant) => variant.tensors.filter((tensor) => tensor.codec !== "tied");

// A codec has the same colour in all variants.
const hues = new Map();

function hue(name) {
  if (!hues.has(name)) hues.set(name, `var(--c${name === "plain" ? 7 : hues.size % 7})`);
  return hues.get(name);
}

function buttonGroup(label, options, chosen, pick) {
  const group = h("div", { class: "choice", role: "group", "aria-label": label });
  for (const option of options) {
    const button = h("button", { type: "button", "aria-pressed": String(option === chosen) }, option);
    button.addEventListener("click", () => {
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
      pick(option);
    });
    group.append(button);
  }
  return group;
}

function section(id, title, about, ...content) {
  const element = $(id);
  element.hidden = false;
  const head = h("div", { class: "head" }, h("h2", { id: `${id}-title` }, title), h("p", {}, about));
  element.setAttribute("aria-labelledby", `${id}-title`);
  element.replaceChildren(head, ...content.filter(Boolean));
  return head;
}
