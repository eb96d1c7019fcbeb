// The dialog of one tensor: sizes, plan and parts, histograms, and the same tensor in other variants.

function openDetail(report, variant, tensor) {
  const dialog = $("detail");
  const close = h("button", { type: "button", class: "close", onclick: () => dialog.close() }, "Close");
  const facts = [
    ["stored", bytes(tensor.stored_bytes)],
    ["dense", bytes(tensor.dense_bytes)],
    ["smaller", ratio(tensor.dense_bytes, tensor.stored_bytes)],
    ["bits per weight", perItem(tensor).toFixed(3)],
    ["order-0 entropy", tensor.bound === null ? "–" : tensor.bound.toFixed(3)],
    ["error", errorText(tensor.is_exact, tensor.error)],
    ["zeros", percent(tensor.sparsity)],
    ["dtype", tensor.dtype],
    ["shape", tensor.shape.join(" × ") || "scalar"],
    ["file", tensor.file || "–"],
  ];
  if (tensor.note) facts.push(["note", tensor.note]);
  const blocks = [
    h("div", { class: "top" }, h("h2", { id: "detail-name" }, tensor.name), close),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("h3", {}, "Plan and parts"),
    planTree(tensor),
  ];
  const drawings = [];
  if (tensor.weights) drawings.push(chartCard("Weights, without zeros", drawHistogram(tensor.weights, "Histogram of weights"), ""));
  if (tensor.errors) drawings.push(chartCard("Errors", drawHistogram(tensor.errors, "Histogram of errors", "error"), ""));
  if (drawings.length) blocks.push(h("h3", {}, "Values"), h("div", { class: "half" }, drawings));
  const variants = variantTable(report, variant, tensor);
  if (variants) blocks.push(h("h3", {}, "In all variants"), variants);
  dialog.replaceChildren(h("div", {}, blocks));
  dialog.onclick = (event) => {
    if (event.target === dialog) dialog.close();
  };
  dialog.showModal();
  dialog.scrollTop = 0;
}

// Draws the tree of codecs; sizes belong to its leaves.
function planTree(tensor) {
  const sizes = Object.entries(tensor.parts);
  const list = h("ul", { class: "plan" });
  if (!tensor.plan) {
    list.append(h("li", {}, planRow(tensor.codec, "", tensor.stored_bytes, tensor)));
    for (const [name, size] of sizes.length > 1 ? sizes : []) list.append(planLeaf(name, size, tensor));
    return list;
  }
  list.append(planBranch("", tensor.plan, "", sizes, tensor));
  return list;
}

function planBranch(part, plan, prefix, sizes, tensor) {
  const inner = h("ul");
  const then = plan.then ?? {};
  const done = new Set();
  for (const [path, size] of sizes) {
    const [name, ...rest] = path.slice(prefix.length).split(".");
    if (!path.startsWith(prefix) || done.has(name)) continue;
    if (rest.length && then[name]) {
      done.add(name);
      inner.append(planBranch(name, then[name], `${prefix}${name}.`, sizes, tensor));
    } else {
      inner.append(planLeaf(path.slice(prefix.length), size, tensor));
    }
  }
  const { name, ...options } = plan.codec;
  const total = sizes.filter(([path]) => path.startsWith(prefix)).reduce((sum, [, size]) => sum + size, 0);
  const described = Object.entries(options).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
  return h("li", {}, planRow(part ? `${part} → ${name}` : name, described, total, tensor), inner);
}

function planLeaf(name, size, tensor) {
  const share = tensor.stored_bytes ? size / tensor.stored_bytes : 0;
  return h("li", {}, planRow(name, "", size, tensor), h("div", { class: "share" }, h("i", { vars: { width: `${100 * share}%` } })));
}

function planRow(name, options, size, tensor) {
  const cost = `${bytes(size)} · ${bits(size, items(tensor)).toFixed(2)} bits`;
  return h("div", { class: "row" }, h("code", {}, name), options ? h("span", { class: "options" }, options) : null, h("span", { class: "size" }, cost));
}

function variantTable(report, variant, tensor) {
  if (report.variants.length < 2) return null;
  const rows = [];
  for (const other of report.variants) {
    const same = other.tensors.find((one) => one.name === tensor.name);
    if (!same) continue;
    rows.push(h(
      "tr",
      { "aria-selected": other === variant ? "true" : false },
      h("td", { class: "text" }, other.name),
      h("td", {}, bytes(same.stored_bytes)),
      h("td", {}, perItem(same).toFixed(2)),
      h("td", { class: same.is_exact ? "" : "loss" }, errorText(same.is_exact, same.error)),
      h("td", {}, percent(same.sparsity)),
    ));
  }
  const head = ["variant", "stored", "bits", "error", "zeros"].map((name, i) => h("th", { scope: "col", class: i ? "" : "text" }, name));
  return h("div", { class: "card scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
}
