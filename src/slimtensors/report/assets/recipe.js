// What a recipe did: to the model as a whole, by training, and layer by layer.

function drawRecipe(recipe) {
  if (!recipe) return;
  const { steps, quality, stages = [] } = recipe;
  const figures = [];
  if (quality?.perplexity) figures.push(["perplexity", quality.perplexity.map((x) => number(x, 3)).join(" → ")]);
  if (typeof quality?.kl === "number") figures.push(["KL divergence", quality.kl.toFixed(5)]);
  if (quality) figures.push(["cosine of outputs", number(quality.cosine, 5)]);
  figures.push(["zeros", share(recipe.sparsity)]);
  if (recipe.stored_bytes !== null) figures.push([`stored as ${recipe.format}`, bytes(recipe.stored_bytes)]);

  const about = steps.map((step) => `${step.modifier} in ${seconds(step.seconds)}`).join(", then ");
  const notes = [
    ...recipe.notes,
    ...steps.flatMap((step) => [
      ...step.notes.map((note) => `${step.modifier}: ${note}`),
      ...step.layers.flatMap((layer) => layer.notes.map((note) => `${layer.name}: ${note}`)),
    ]),
  ];
  section(
    "recipe",
    "Recipe",
    about ? `${about}.` : "",
    h("dl", { class: "figures" }, figures.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    stages.length ? trainedTable(stages) : null,
    steps.some((step) => step.layers.length) ? changesTable(recipe) : null,
    notes.length ? h("ul", { class: "notes" }, notes.map((note) => h("li", {}, note))) : null,
  );
}

function trainedTable(stages) {
  const rows = stages.map((stage) => [stage.name, stage.steps.toLocaleString("en"), number(stage.loss, 4), seconds(stage.seconds)]);
  return recipeTable([["stage"], ["steps"], ["loss", "The mean of all steps"], ["time"]], rows, 1);
}

function changesTable(recipe) {
  const became = new Map(recipe.layers.map((layer) => [layer.name, layer]));
  const head = [
    ["layer"],
    ["modifier"],
    ["method", "What did it, perhaps after falling back"],
    ["error", "Square error of outputs, relative, on what was seen"],
    ["plain error", "The same by rounding to nearest, or pruning by magnitude"],
    ["cosine", "Of outputs before and after"],
    ["zeros", "Share of zeros in the end"],
    ["bits", "Per weight, in the end"],
    ["time"],
  ];
  const rows = recipe.steps.flatMap((step) => step.layers.map((layer) => {
    const state = became.get(layer.name);
    return [
      layer.name, step.modifier, layer.method,
      share(layer.error), share(layer.nearest_error), number(layer.cosine, 5),
      state ? percent(state.sparsity) : "–", state ? (state.is_stored === false ? "~" : "") + state.bits.toFixed(2) : "–", seconds(layer.seconds),
    ];
  }));
  return recipeTable(head, rows, 3);
}

function recipeTable(head, rows, texts) {
  const place = (i) => (i < texts ? "text" : "");
  const titles = head.map(([name, about], i) => h("th", { scope: "col", class: place(i), title: about }, name));
  const lines = rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: place(i) }, cell))));
  return h("div", { class: "card scroll tall", tabindex: "0" }, h("table", {}, h("thead", {}, h("tr", {}, titles)), h("tbody", {}, lines)));
}

const number = (x, digits) => (typeof x === "number" ? x.toFixed(digits) : "–");

const share = (x) => (typeof x === "number" ? percent(x) : "–");
