// Histograms, and the plot of quality against size.

function drawHistogram(histogram, label, shade = "") {
  const [width, height] = [340, 110];
  const most = Math.max(...histogram.counts, 1);
  const step = width / histogram.counts.length;
  const shapes = histogram.counts.map((count, i) => {
    const tall = (height * count) / most;
    return svg("rect", { class: `bar ${shade}`, x: i * step + 0.5, y: height - tall, width: Math.max(step - 1, 1), height: tall });
  });
  const zero = (-histogram.low / (histogram.high - histogram.low)) * width;
  const ticks = [
    svg("text", { x: 0, y: height + 15 }, compact(histogram.low)),
    svg("text", { x: width, y: height + 15, "text-anchor": "end" }, compact(histogram.high)),
  ];
  if (zero > 40 && zero < width - 40) ticks.push(svg("text", { x: zero, y: height + 15, "text-anchor": "middle" }, "0"));
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height + 20}`, role: "img", "aria-label": label },
    shapes,
    svg("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }),
    ticks,
  );
}

function chartCard(title, drawing, about) {
  return h("figure", { class: "card" }, h("h3", {}, title), drawing, h("figcaption", {}, about));
}

// Adds up the histograms of all tensors on one axis; a bin is distributed over the bins it overlaps.
function mergeHistograms(tensors, key) {
  const found = tensors.filter((tensor) => tensor[key]);
  if (!found.length) return null;
  const end = commonRange(found, key);
  const counts = new Array(80).fill(0);
  const wide = (2 * end) / counts.length;
  for (const tensor of found) {
    const { low, high, counts: binCounts } = tensor[key];
    const each = (items(tensor) * (1 - tensor.sparsity)) / Math.max(binCounts.reduce((a, b) => a + b, 0), 1);
    const step = (high - low) / binCounts.length;
    binCounts.forEach((count, i) => {
      const [from, to] = [(low + i * step + end) / wide, (low + (i + 1) * step + end) / wide];
      for (let bin = Math.max(0, Math.floor(from)); bin < Math.min(counts.length, to); bin += 1) {
        counts[bin] += (count * each * Math.max(0, Math.min(bin + 1, to) - Math.max(bin, from))) / (to - from);
      }
    });
  }
  return { low: -end, high: end, counts };
}

// Returns the symmetric axis range that covers 97 % of the items.
function commonRange(tensors, key) {
  const reaches = tensors
    .map((t) => ({ reach: Math.max(Math.abs(t[key].low), Math.abs(t[key].high)), items: items(t) }))
    .sort((a, b) => a.reach - b.reach);
  let left = 0.97 * reaches.reduce((sum, one) => sum + one.items, 0);
  return reaches.find((one) => (left -= one.items) <= 0)?.reach ?? reaches[reaches.length - 1].reach;
}

function countValues(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const counts = new Array(40).fill(0);
  const step = (high - low) / counts.length || 1;
  for (const value of values) counts[Math.min(counts.length - 1, Math.floor((value - low) / step))] += 1;
  return { low, high: low + step * counts.length, counts };
}

function drawHistograms(variant) {
  const tensors = untied(variant);
  const figures = [];
  const weights = mergeHistograms(tensors, "weights");
  if (weights) figures.push(chartCard("Weights", drawHistogram(weights, "Histogram of all weights"), "All tensors, without zeros."));
  const errors = mergeHistograms(tensors, "errors");
  if (errors) {
    figures.push(chartCard("Errors", drawHistogram(errors, "Histogram of all errors", "error"), "Stored minus original, where they differ."));
  }
  const relative = tensors.map((tensor) => tensor.error).filter((error) => error !== null);
  if (relative.length > 2) {
    const shown = countValues(relative.map((error) => 100 * error));
    const about = "Number of tensors by relative RMS error in per cent.";
    figures.push(chartCard("Error per tensor", drawHistogram(shown, "Histogram of relative errors", "error"), about));
  }
  if (!figures.length) {
    $("spread").hidden = true;
    return;
  }
  const exact = variant.is_exact ? "Lossless: no errors to show." : "";
  section("spread", "Weights and errors", exact, h("div", { class: "half" }, figures));
}

// Plots quality against bits per weight; the line is the Pareto front.
function drawRatePlot(report, chosen, pick) {
  const quality = report.variants.filter((v) => "perplexity" in v.measured).length > 1 ? "perplexity" : "error";
  const value = (v) => (quality === "perplexity" ? v.measured.perplexity : 100 * (v.is_exact ? 0 : v.error));
  const points = report.variants
    .map((v, i) => ({ i, name: v.name, x: bits(v.stored_bytes, v.items), y: value(v) }))
    .filter((point) => Number.isFinite(point.y) && point.x > 0);
  if (points.length < 2) return null;
  const [width, height, left, bottom] = [400, 300, 42, 34];
  const most = Math.max(...points.map((p) => p.x)) * 1.08;
  const [least, worst] = [Math.min(...points.map((p) => p.y)), Math.max(...points.map((p) => p.y))];
  const isLog = quality === "perplexity" && worst / least > 3;
  const scaleY = isLog ? Math.log : (y) => y;
  const pad = (scaleY(worst) - scaleY(least)) * 0.08 || 1;
  const [floor, ceiling] = [scaleY(least) - pad, scaleY(worst) + pad];
  const px = (x) => left + ((width - left) * x) / most;
  const py = (y) => height - bottom - ((height - bottom) * (scaleY(y) - floor)) / (ceiling - floor);

  const front = points
    .filter((p) => !points.some((q) => q !== p && q.x <= p.x && q.y <= p.y && (q.x < p.x || q.y < p.y)))
    .sort((a, b) => a.x - b.x);
  const line = front.map((p, i) => `${i ? "L" : "M"}${px(p.x)} ${py(p.y)}`).join("");
  const ticks = [];
  const step = most > 20 ? 8 : most > 8 ? 4 : 2;
  for (let x = 0; x <= most; x += step) {
    ticks.push(svg("line", { class: "axis", x1: px(x), x2: px(x), y1: 0, y2: height - bottom }));
    ticks.push(svg("text", { x: px(x), y: height - bottom + 15, "text-anchor": "middle" }, String(x)));
  }
  const digits = Math.max(0, Math.ceil(-Math.log10((worst - least) / 3 || 1)));
  for (const y of tickValues(least, worst, isLog)) {
    ticks.push(svg("line", { class: "axis", x1: left, x2: width, y1: py(y), y2: py(y) }));
    ticks.push(svg("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, y.toFixed(digits)));
  }
  const occupied = points.map((p) => ({ x: px(p.x) - 6, y: py(p.y) - 6, width: 12, height: 12 }));
  const marks = points.map((p) => drawPoint(p, px(p.x), py(p.y), occupied, width, p.i === chosen, pick));
  return chartCard(
    quality === "perplexity" ? "Perplexity against bits per weight" : "Error (%) against bits per weight",
    svg("svg", { viewBox: `0 -6 ${width} ${height + 6}`, role: "group", "aria-label": "Rate and distortion" },
      ticks, svg("path", { class: "front", d: line }), marks),
    "Lower left is better. The line is the Pareto front.",
  );
}

function tickValues(least, worst, isLog) {
  if (least === worst) return [least];
  return [0, 1, 2, 3].map((i) => (isLog ? least * (worst / least) ** (i / 3) : least + ((worst - least) * i) / 3));
}

function drawPoint(point, x, y, occupied, width, isChosen, pick) {
  const labelWidth = point.name.length * 7.4;
  const offset = { start: 0, middle: 0.5, end: 1 };
  const positions = [
    ["start", x + 8, y + 4], ["end", x - 8, y + 4], ["middle", x, y - 10], ["middle", x, y + 18],
    ["start", x + 6, y - 9], ["end", x - 6, y - 9], ["start", x + 6, y + 16], ["end", x - 6, y + 16],
    ["start", x + 8, y + 28], ["end", x - 8, y + 28], ["start", x + 8, y - 22], ["end", x - 8, y - 22],
  ].map(([anchor, tx, ly]) => ({ anchor, tx, lx: tx - labelWidth * offset[anchor], ly }));
  const free = ({ lx, ly }) =>
    lx > 2 && lx + labelWidth < width + 4 && ly > 4 &&
    !occupied.some((o) => lx < o.x + o.width && o.x < lx + labelWidth && ly - 10 < o.y + o.height && o.y < ly + 2);
  const { anchor, tx, lx, ly } = positions.find(free) ?? positions[0];
  occupied.push({ x: lx, y: ly - 10, width: labelWidth, height: 12 });
  const select = () => pick(point.i);
  return svg(
    "g",
    {
      class: "point", role: "button", tabindex: "0", "aria-pressed": String(isChosen),
      "aria-label": `${point.name}: ${point.x.toFixed(2)} bits per weight, ${compact(point.y)}`,
      onclick: select,
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); select(); } },
    },
    svg("circle", { class: "dot", cx: x, cy: y, r: 5 }),
    svg("text", { x: tx, y: ly, "text-anchor": anchor }, point.name),
  );
}
