// A model that was fitted to a budget: its loss, the curve of loss against size, and bits by module.

function drawFit(fit) {
  if (!fit) return;
  const { measured } = fit;
  const figures = [
    ["budget", budgetText(fit.budget)],
    ["weight files", bytes(fit.weight_bytes)],
    ["bits per parameter", fit.bits_per_parameter.toFixed(2)],
    ["predicted KL", small(fit.predicted_kl)],
  ];
  if (measured) {
    if (measured.kl !== null) figures.push(["measured KL", small(measured.kl)]);
    if (measured.perplexity !== null) figures.push(["perplexity", `${number(measured.perplexity_before, 2)} → ${number(measured.perplexity, 2)}`]);
    if (measured.top1_agreement !== null) figures.push(["top-1 agreement", share(measured.top1_agreement)]);
    if (measured.acceptance_rate !== null) figures.push(["acceptance rate", share(measured.acceptance_rate)]);
  }
  const about = measured
    ? `Measured on ${count(measured.predictions, "held-out prediction")}. KL is in nats per prediction.`
    : "The loss was not measured. KL is in nats per prediction.";
  const table = moduleTable(fit.tensors);
  const plot = drawCurve(fit);
  section(
    "fit",
    "Fit to size",
    about,
    h("dl", { class: "figures" }, figures.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    plot ? h("div", { class: "pair" }, table, plot) : table,
    fit.notes.length ? h("ul", { class: "notes" }, fit.notes.map((note) => h("li", {}, note))) : null,
  );
}

const small = (x) => (typeof x === "number" ? compact(x) : "–");

function budgetText(budget) {
  if (budget.size !== undefined) return typeof budget.size === "number" ? bytes(budget.size) : budget.size;
  return budget.bits !== undefined ? `${budget.bits} bits` : `KL ≤ ${budget.kl}`;
}

// Bits and predicted loss, with the layers of a stack together.
function moduleTable(tensors) {
  const groups = new Map();
  for (const tensor of tensors) {
    const at = layerPosition(tensor.name);
    const key = at ? `${at.stack}.*.${at.suffix}` : tensor.name;
    const group = groups.get(key) ?? { name: key, tensors: 0, weights: 0, bits: 0, loss: 0, least: Infinity, most: 0 };
    group.tensors += 1;
    group.weights += tensor.weights;
    group.bits += tensor.weights * tensor.bits;
    group.loss += tensor.predicted_kl ?? 0;
    group.least = Math.min(group.least, tensor.bits);
    group.most = Math.max(group.most, tensor.bits);
    groups.set(key, group);
  }
  const all = [...groups.values()];
  const total = (key) => all.reduce((sum, group) => sum + group[key], 0);
  const [loss, most] = [total("loss") || 1, Math.max(...all.map((group) => group.most), 1)];
  const bar = (x, name) => h("i", { class: `bar ${name}`, vars: { width: `${(100 * x).toFixed(1)}%` } });
  const rows = [...all].sort((a, b) => b.bits - a.bits).map((group) => {
    const mean = group.bits / (group.weights || 1);
    const range = group.tensors > 1 ? `${group.least.toFixed(2)} to ${group.most.toFixed(2)} bits in ${group.tensors} tensors` : "";
    return h(
      "tr",
      {},
      h("td", { class: "text name", title: group.name }, h("bdi", {}, group.name)),
      h("td", { class: "wide" }, bytes(Math.round(group.bits / 8))),
      h("td", { class: "barred", title: range }, mean.toFixed(2), bar(mean / most, "")),
      h("td", { class: "barred" }, share(group.loss / loss), bar(group.loss / loss, "error")),
    );
  });
  const head = [["module", "", "text"], ["stored", "", "wide"], ["bits", "Mean bits per weight", ""], ["loss", "Share of the predicted KL divergence", ""]];
  const titles = head.map(([name, title, style]) => h("th", { scope: "col", class: style, title: title || false }, name));
  return h("div", { class: "card scroll tall fitted", tabindex: "0" }, h("table", {}, h("thead", {}, h("tr", {}, titles)), h("tbody", {}, rows)));
}

// Plots predicted KL against bytes, with the chosen size and what was measured there.
function drawCurve(fit) {
  const curve = fit.curve.filter((point) => point.predicted_kl > 0).sort((a, b) => a.bytes - b.bytes);
  if (curve.length < 2 || !(fit.predicted_kl > 0)) return null;
  const [width, height, left, bottom] = [400, 300, 48, 34];
  const measured = fit.measured?.kl > 0 ? fit.measured.kl : null;
  const losses = [...curve.map((point) => point.predicted_kl), fit.predicted_kl, ...(measured ? [measured] : [])];
  const sizes = [...curve.map((point) => point.bytes), fit.weight_bytes];
  const [least, most] = [Math.min(...sizes), Math.max(...sizes)];
  const pad = (most - least) * 0.06 || 1;
  const [low, high] = [Math.log(Math.min(...losses)) - 0.2, Math.log(Math.max(...losses)) + 0.2];
  const px = (x) => left + ((width - left) * (x - least + pad)) / (most - least + 2 * pad);
  const py = (y) => height - bottom - ((height - bottom) * (Math.log(y) - low)) / (high - low);

  const ticks = [];
  for (const x of roundValues(least, most)) {
    ticks.push(svg("line", { class: "axis", x1: px(x), x2: px(x), y1: 0, y2: height - bottom }));
    ticks.push(svg("text", { x: px(x), y: height - bottom + 15, "text-anchor": "middle" }, bytes(x)));
  }
  for (const y of decades(Math.exp(low), Math.exp(high))) {
    ticks.push(svg("line", { class: "axis", x1: left, x2: width, y1: py(y), y2: py(y) }));
    ticks.push(svg("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, compact(y)));
  }
  const line = curve.map((point, i) => `${i ? "L" : "M"}${px(point.bytes)} ${py(point.predicted_kl)}`).join("");
  const x = px(fit.weight_bytes);
  const isRight = x > width - 110;
  // Labels of points that are close to each other move apart.
  const gap = measured ? py(fit.predicted_kl) - py(measured) : Infinity;
  const shift = Math.abs(gap) < 14 ? ((gap < 0 ? -1 : 1) * (14 - Math.abs(gap))) / 2 : 0;
  const mark = (y, name, style, offset) => svg(
    "g",
    { class: "mark" },
    svg("circle", { class: `dot ${style}`, cx: x, cy: py(y), r: 5 }),
    svg("text", { x: isRight ? x - 9 : x + 9, y: py(y) + 4 + offset, "text-anchor": isRight ? "end" : "start" }, name),
  );
  const label = `${bytes(fit.weight_bytes)}: predicted KL ${small(fit.predicted_kl)}, measured KL ${small(measured)}`;
  return chartCard(
    "KL against size",
    svg("svg", { viewBox: `0 -6 ${width} ${height + 6}`, role: "img", "aria-label": label },
      ticks, svg("path", { class: "curve", d: line }), mark(fit.predicted_kl, "predicted", "", shift), measured ? mark(measured, "measured", "measured", -shift) : null),
    "The line is predicted for other budgets; the points are this model.",
  );
}

// Up to five round numbers between two sizes.
function roundValues(least, most) {
  const span = most - least || 1;
  const unit = 10 ** Math.floor(Math.log10(span / 5));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((size) => span / size <= 5);
  const values = [];
  for (let x = Math.ceil(least / step) * step; x <= most; x += step) values.push(x);
  return values;
}

// Powers of ten between two numbers; also their double and fivefold if there are few.
function decades(least, most) {
  const factors = Math.log10(most / least) > 2 ? [1] : [1, 2, 5];
  const values = [];
  for (let i = Math.floor(Math.log10(least)); i <= Math.log10(most); i += 1) {
    for (const factor of factors) {
      const y = factor * 10 ** i;
      if (y >= least && y <= most) values.push(y);
    }
  }
  return values;
}
