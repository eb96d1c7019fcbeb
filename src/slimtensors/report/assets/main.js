// Draws the page, and redraws it when another variant is chosen.

const report = JSON.parse($("data").textContent);
let chosen = Math.max(0, report.variants.findIndex((variant) => !variant.is_exact || variant.stored_bytes < variant.dense_bytes));
let redraw = null;

function headline(variant) {
  const share = variant.dense_bytes ? Math.min(1, variant.stored_bytes / variant.dense_bytes) : 1;
  const isLoss = !variant.is_exact;
  const figures = [
    ["smaller", ratio(variant.dense_bytes, variant.stored_bytes)],
    ["bits per weight", bits(variant.stored_bytes, variant.items).toFixed(2)],
    [isLoss ? "error, RMS" : "lossless", errorText(variant.is_exact, variant.error), isLoss],
    ["weights", variant.items.toLocaleString("en")],
    ["tensors", variant.tensors.length.toLocaleString("en")],
  ];
  if ("perplexity" in variant.measured) figures.splice(3, 0, ["perplexity", variant.measured.perplexity.toFixed(3)]);
  return [
    h(
      "div",
      { class: "sizes", "aria-label": `${bytes(variant.dense_bytes)} to ${bytes(variant.stored_bytes)}` },
      h("span", { class: "before" }, bytes(variant.dense_bytes)),
      h("span", { class: "arrow" }, "→"),
      h("span", { class: "after" }, bytes(variant.stored_bytes)),
    ),
    h("div", { class: "meter", role: "presentation" }, h("i", { vars: { width: `${100 * share}%` } })),
    h("dl", { class: "figures" }, figures.map(([name, value, lost]) => h("div", {}, h("dt", {}, name), h("dd", { class: lost ? "loss" : "" }, value)))),
  ];
}

function drawTop(variant) {
  const made = new Date(report.created);
  const when = Number.isNaN(made.getTime()) ? report.created : made.toISOString().slice(0, 16).replace("T", " ");
  const links = [["variants", "Variants"], ["recipe", "Recipe"], ["dense", "Dense layers"], ["fit", "Fit to size"], ["bytes", "Bytes"], ["layers", "Layers"], ["spread", "Weights"], ["checkpoints", "Checkpoints"], ["tensors", "Tensors"]]
    .filter(([id]) => !$(id).hidden)
    .map(([id, name]) => h("a", { href: `#${id}` }, name));
  const several = report.variants.length > 1;
  const picker = several
    ? h("label", {}, "variant", h(
      "select",
      { id: "variant", "aria-label": "Variant", onchange: (event) => choose(Number(event.target.value)) },
      report.variants.map((one, i) => h("option", { value: i, selected: i === chosen }, one.name)),
    ))
    : null;
  const name = several && variant ? `${report.title} · ${variant.name}` : report.title;
  $("top").replaceChildren(
    h("div", { class: "title" }, h("h1", {}, name), h("p", {}, variant?.about || "")),
    ...(variant ? headline(variant) : []),
  );
  const bar = h("nav", { class: "jump", "aria-label": "Sections" }, links, picker);
  document.querySelector(".jump")?.remove();
  $("main").prepend(bar);
  $("bottom").textContent = `slimtensors ${report.writer} · ${when} UTC · self-contained page, no network access`;
}

function drawVariants() {
  if (report.variants.length < 2) return;
  const measured = ["perplexity", "save_seconds", "load_seconds"].filter((key) => report.variants.some((v) => key in v.measured));
  const titles = { perplexity: "perplexity", save_seconds: "save", load_seconds: "load" };
  const write = { perplexity: (x) => x.toFixed(3), save_seconds: seconds, load_seconds: seconds };
  const head = ["variant", "size", "smaller", "bits", ...measured.map((key) => titles[key]), "error"];
  const rows = report.variants.map((variant, i) => h(
    "tr",
    { class: "pick", tabindex: "0", "aria-selected": String(i === chosen), onclick: () => choose(i), onkeydown: (event) => { if (event.key === "Enter") choose(i); } },
    h("td", { class: "text" }, variant.name),
    h("td", {}, bytes(variant.stored_bytes)),
    h("td", { class: "wide" }, ratio(variant.dense_bytes, variant.stored_bytes)),
    h("td", { class: "wide" }, bits(variant.stored_bytes, variant.items).toFixed(2)),
    measured.map((key) => h("td", { class: key === "perplexity" ? "" : "wide" }, key in variant.measured ? write[key](variant.measured[key]) : "–")),
    h("td", { class: variant.is_exact ? "" : "loss" }, errorText(variant.is_exact, variant.error)),
  ));
  const wide = (name) => (["smaller", "bits", "save", "load"].includes(name) ? "wide" : "");
  const table = h("table", { id: "variant-table" }, h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { scope: "col", class: i ? wide(name) : "text" }, name)))), h("tbody", {}, rows));
  const plot = drawRatePlot(report, chosen, choose);
  const boxed = h("div", { class: "card scroll" }, table);
  section("variants", "Variants", "The same model in different formats. Choose one to see its details below.", plot ? h("div", { class: "pair" }, boxed, plot) : boxed);
}

function choose(i) {
  chosen = i;
  const focused = document.activeElement?.closest("#variant, #variants tr, #variants .point");
  const place = focused?.matches("tr") ? "#variants tr[aria-selected='true']" : focused?.matches(".point") ? "#variants .point[aria-pressed='true']" : "#variant";
  draw();
  if (focused) document.querySelector(place)?.focus({ preventScroll: true });
}

function draw() {
  const variant = report.variants[chosen];
  drawVariants();
  drawRecipe(report.recipe);
  drawDenseLayers(report.quantization);
  drawFit(report.fit);
  drawCheckpoints(report.checkpoints);
  if (variant) {
    const open = (tensor) => openDetail(report, variant, tensor);
    redraw = drawBytes(variant, open);
    drawLayers(variant, open, report.fit);
    drawHistograms(variant);
    drawTensors(variant, open);
  }
  drawTop(variant);
}

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  redraw?.();
});
draw();
