// Histograms, and what size costs in quality.

function bars(histogram, label, shade = "") {
  const [width, height] = [340, 110];
  const most = Math.max(...histogram.counts, 1);
  const step = width / histogram.counts.length;
  const shapes = histogram.counts.map((count, i) => {
    const tall = (height * count) / most;
    return svg("rect", { class: `bar ${shade}`, x: i * step + 0.5, y: height - tall, width: Math.max(step - 1, 1), height: tall });
  });
  const zero = (-histogram.low / (histogram.high - histogram.low)) * width;
  const ticks = [
    svg("text", { x: 0, y: height + 15 }, short(histogram.low)),
    svg("text", { x: width, y: height + 15, "text-anchor": "end" }, short(histogram.high)),
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

function chart(title, drawing, about) {
  return h("figure", { class: "card" }, h("h3", {}, title), drawing, h("figcaption", {}, about));
}

// Adds up the histograms of many tensors on one axis, each bin spread over those it overlaps.
function merged(tensors, which) {
  const found = tensors.filter((tensor) => tensor[which]);
  if (!found.length) return null;
  const end = commonReach(found, which);
  const counts = new Array(80).fill(0);
  const wide = (2 * end) / counts.length;
  for (const tensor of found) {
    const { low, high, counts: given } = tensor[which];
    const each = (items(tensor) * (1 - tensor.sparsity)) / Math.max(given.reduce((a, b) => a + b, 0), 1);
    const step = (high - low) / given.length;
    given.forEach((count, i) => {
      const [from, to] = [(low + i * step + end) / wide, (low + (i + 1) * step + end) / wide];
      for (let bin = Math.max(0, Math.floor(from)); bin < Math.min(counts.length, to); bin += 1) {
        counts[bin] += (count * each * Math.max(0, Math.min(bin + 1, to) - Math.max(bin, from))) / (to - from);
      }
    });
  }
  return { low: -end, high: end, counts };
}

// How far from zero the axis goes so that it is wide enough for nearly all items.
function commonReach(tensors, which) {
  const reaches = tensors
    .map((t) => ({ reach: Math.max(Math.abs(t[which].low), Math.abs(t[which].high)), items: items(t) }))
    .sort((a, b) => a.reach - b.reach);
  let left = 0.97 * reaches.reduce((sum, one) => sum + one.items, 0);
  return reaches.find((one) => (left -= one.items) <= 0)?.reach ?? reaches[reaches.length - 1].reach;
}

function counting(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const counts = new Array(40).fill(0);
  const step = (high - low) / counts.length || 1;
  for (const value of values) counts[Math.min(counts.length - 1, Math.floor((value - low) / step))] += 1;
  return { low, high: low + step * counts.length, counts };
}

function drawSpread(variant) {
  const tensors = own(variant);
  const figures = [];
  const weights = merged(tensors, "weights");
  if (weights) figures.push(chart("Weights", bars(weights, "Histogram of all weights"), "All tensors together, without zeros."));
  const errors = merged(tensors, "errors");
  if (errors) {
    figures.push(chart("Errors", bars(errors, "Histogram of all errors", "error"), "What is stored, less the original, where they differ."));
  }
  const relative = tensors.map((tensor) => tensor.error).filter((error) => error !== null);
  if (relative.length > 2) {
    const shown = counting(relative.map((error) => 100 * error));
    const about = "Per cent, RMS relative to the tensor: how many tensors have how much.";
    figures.push(chart("Error per tensor", bars(shown, "Histogram of relative errors", "error"), about));
  }
  if (!figures.length) {
    $("spread").hidden = true;
    return;
  }
  const exact = variant.is_exact ? "Nothing was lost: there are no errors to show." : "";
  section("spread", "Weights and errors", exact, h("div", { class: "half" }, figures));
}

// Bits per weight against quality; the line joins what nothing else beats in both.
function ratePlot(report, chosen, pick) {
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
  const bend = isLog ? Math.log : (y) => y;
  const pad = (bend(worst) - bend(least)) * 0.08 || 1;
  const [floor, ceiling] = [bend(least) - pad, bend(worst) + pad];
  const px = (x) => left + ((width - left) * x) / most;
  const py = (y) => height - bottom - ((height - bottom) * (bend(y) - floor)) / (ceiling - floor);

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
  for (const y of spaced(least, worst, isLog)) {
    ticks.push(svg("line", { class: "axis", x1: left, x2: width, y1: py(y), y2: py(y) }));
    ticks.push(svg("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, y.toFixed(digits)));
  }
  const taken = points.map((p) => ({ x: px(p.x) - 6, y: py(p.y) - 6, width: 12, height: 12 }));
  const marks = points.map((p) => mark(p, px(p.x), py(p.y), taken, width, p.i === chosen, pick));
  return chart(
    quality === "perplexity" ? "Perplexity against bits per weight" : "Error (%) against bits per weight",
    svg("svg", { viewBox: `0 -6 ${width} ${height + 6}`, role: "group", "aria-label": "Rate and distortion" },
      ticks, svg("path", { class: "front", d: line }), marks),
    "Lower left is better; nothing beats what the line joins.",
  );
}

function spaced(least, worst, isLog) {
  if (least === worst) return [least];
  return [0, 1, 2, 3].map((i) => (isLog ? least * (worst / least) ** (i / 3) : least + ((worst - least) * i) / 3));
}

function mark(point, x, y, taken, width, isChosen, pick) {
  const long = point.name.length * 7.4;
  const share = { start: 0, middle: 0.5, end: 1 };
  const spots = [
    ["start", x + 8, y + 4], ["end", x - 8, y + 4], ["middle", x, y - 10], ["middle", x, y + 18],
    ["start", x + 6, y - 9], ["end", x - 6, y - 9], ["start", x + 6, y + 16], ["end", x - 6, y + 16],
    ["start", x + 8, y + 28], ["end", x - 8, y + 28], ["start", x + 8, y - 22], ["end", x - 8, y - 22],
  ].map(([anchor, tx, ly]) => ({ anchor, tx, lx: tx - long * share[anchor], ly }));
  const free = ({ lx, ly }) =>
    lx > 2 && lx + long < width + 4 && ly > 4 &&
    !taken.some((o) => lx < o.x + o.width && o.x < lx + long && ly - 10 < o.y + o.height && o.y < ly + 2);
  const { anchor, tx, lx, ly } = spots.find(free) ?? spots[0];
  taken.push({ x: lx, y: ly - 10, width: long, height: 12 });
  const act = () => pick(point.i);
  return svg(
    "g",
    {
      class: "point", role: "button", tabindex: "0", "aria-pressed": String(isChosen),
      "aria-label": `${point.name}: ${point.x.toFixed(2)} bits per weight, ${short(point.y)}`,
      onclick: act,
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } },
    },
    svg("circle", { class: "dot", cx: x, cy: y, r: 5 }),
    svg("text", { x: tx, y: ly, "text-anchor": anchor }, point.name),
  );
}
