// A heat map with one column per layer and one row per tensor of a layer.

const METRICS = {
  sparsity: { value: (t) => t.sparsity, format: (x) => (100 * x).toFixed(0), about: "Zeros in per cent." },
  "bits per weight": {
    value: (t) => bits(t.stored_bytes, t.shape.reduce((a, b) => a * b, 1)),
    format: (x) => x.toFixed(1),
    about: "Stored bits per weight.",
  },
  error: { value: (t) => t.error ?? 0, format: (x) => (100 * x).toFixed(1), about: "Relative RMS error in per cent." },
};

// The share of each tensor in the predicted loss of a fitted model.
function lossMetric(fit) {
  const losses = new Map(fit.tensors.map((tensor) => [tensor.name, tensor.predicted_kl ?? 0]));
  const total = [...losses.values()].reduce((a, b) => a + b, 0) || 1;
  return {
    value: (t) => (losses.get(t.name) ?? 0) / total,
    format: (x) => (100 * x).toFixed(2),
    about: "Share of the predicted KL divergence in per cent.",
  };
}

const MAX_ROWS = 100;

function drawLayers(variant, openTensor, fit) {
  const known = fit ? { ...METRICS, "predicted loss": lossMetric(fit) } : METRICS;
  const rows = new Map();
  const columns = new Set();
  const matrices = untied(variant).filter((tensor) => tensor.shape.length > 1);
  for (const tensor of matrices) {
    const at = layerPosition(tensor.name);
    if (!at) continue;
    const key = `${at.stack}\n${at.suffix}`;
    if (!rows.has(key)) rows.set(key, { ...at, cells: new Map() });
    rows.get(key).cells.set(at.layer, tensor);
    columns.add(at.layer);
  }
  const element = $("layers");
  const layers = [...columns].sort((a, b) => a - b);
  if (layers.length < 2) {
    element.hidden = true;
    return;
  }
  const stacks = new Set([...rows.values()].map((row) => row.stack));
  const found = [...rows.values()].filter((row) => row.cells.size > 1 || layers.length < 4);
  const shown = found.slice(0, MAX_ROWS);
  const metrics = Object.keys(known).filter((m) => m !== "error" || matrices.some((t) => t.error));
  const isSparse = matrices.some((tensor) => tensor.sparsity > 0.05);
  const first = isSparse && !fit ? "sparsity" : "bits per weight";
  const box = h("div", { class: "card scroll" });

  function draw(name) {
    const { value, format, about } = known[name];
    const values = shown.flatMap((row) => [...row.cells.values()].map(value));
    const most = Math.max(...values, 1e-9);
    const withText = layers.length <= 24;
    const head = h("tr", {}, h("th", { scope: "col" }), layers.map((layer) => h("th", { scope: "col" }, withText || layer % 8 === 0 ? String(layer) : "")));
    const body = shown.map((row) => {
      const label = stacks.size > 1 && row.suffix !== row.stack ? `${row.stack}.*.${row.suffix}` : row.suffix;
      const cells = layers.map((layer) => {
        const tensor = row.cells.get(layer);
        if (!tensor) return h("td", { class: "empty" });
        const share = value(tensor) / most;
        return h(
          "td",
          {
            class: share > 0.55 ? "strong" : "",
            title: `${tensor.name}: ${format(value(tensor))}`,
            onclick: () => openTensor(tensor),
            vars: { "--heat": `${(8 + 82 * share).toFixed(0)}%` },
          },
          withText ? format(value(tensor)) : "",
        );
      });
      return h("tr", {}, h("th", { scope: "row" }, label), cells);
    });
    box.replaceChildren(h("table", { class: "grid" }, h("caption", { class: "skip" }, about), h("thead", {}, head), h("tbody", {}, body)));
    const truncated = found.length > shown.length ? ` First ${shown.length} of ${found.length} rows.` : "";
    text.textContent = `${about} Matrices only, one column per layer.${truncated}`;
  }

  const head = section("layers", "Layer by layer", "", box);
  const text = head.querySelector("p");
  head.append(buttonGroup("Shown", metrics, first, draw));
  draw(first);
}
