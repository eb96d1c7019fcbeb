// One column per layer, one row per kind of tensor: what differs from layer to layer.

const METRICS = {
  sparsity: { of: (t) => t.sparsity, write: (x) => (100 * x).toFixed(0), about: "Share of zeros, in per cent." },
  "bits per weight": {
    of: (t) => bits(t.stored_bytes, t.shape.reduce((a, b) => a * b, 1)),
    write: (x) => x.toFixed(1),
    about: "What a weight costs in the file.",
  },
  error: { of: (t) => t.error ?? 0, write: (x) => (100 * x).toFixed(1), about: "RMS error relative to the tensor, in per cent." },
};

const MOST_KINDS = 100;

function drawLayers(variant, openTensor) {
  const rows = new Map();
  const columns = new Set();
  const matrices = own(variant).filter((tensor) => tensor.shape.length > 1);
  for (const tensor of matrices) {
    const at = placed(tensor.name);
    if (!at) continue;
    const key = `${at.stack}\n${at.what}`;
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
  const shown = found.slice(0, MOST_KINDS);
  const metrics = Object.keys(METRICS).filter((m) => m !== "error" || matrices.some((t) => t.error));
  const isSparse = matrices.some((tensor) => tensor.sparsity > 0.05);
  const first = isSparse ? "sparsity" : "bits per weight";
  const box = h("div", { class: "card scroll" });

  function draw(name) {
    const { of, write, about } = METRICS[name];
    const values = shown.flatMap((row) => [...row.cells.values()].map(of));
    const most = Math.max(...values, 1e-9);
    const withText = layers.length <= 24;
    const head = h("tr", {}, h("th", { scope: "col" }), layers.map((layer) => h("th", { scope: "col" }, withText || layer % 8 === 0 ? String(layer) : "")));
    const body = shown.map((row) => {
      const what = stacks.size > 1 && row.what !== row.stack ? `${row.stack}.*.${row.what}` : row.what;
      const cells = layers.map((layer) => {
        const tensor = row.cells.get(layer);
        if (!tensor) return h("td", { class: "empty" });
        const share = of(tensor) / most;
        return h(
          "td",
          {
            class: share > 0.55 ? "strong" : "",
            title: `${tensor.name}: ${write(of(tensor))}`,
            onclick: () => openTensor(tensor),
            vars: { "--heat": `${(8 + 82 * share).toFixed(0)}%` },
          },
          withText ? write(of(tensor)) : "",
        );
      });
      return h("tr", {}, h("th", { scope: "row" }, what), cells);
    });
    box.replaceChildren(h("table", { class: "grid" }, h("caption", { class: "skip" }, about), h("thead", {}, head), h("tbody", {}, body)));
    const left = found.length > shown.length ? ` The first ${shown.length} of ${found.length} kinds.` : "";
    text.textContent = `${about} Matrices only, one column per layer.${left}`;
  }

  const head = section("layers", "Layer by layer", "", box);
  const text = head.querySelector("p");
  head.append(choice("Shown", metrics, first, draw));
  draw(first);
}
