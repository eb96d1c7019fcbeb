// The report of a recipe: quality of the model, training stages, and changes by layer.

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
    stages.length ? stageTable(stages) : null,
    steps.some((step) => step.layers.length) ? changesTable(recipe) : null,
    notes.length ? h("ul", { class: "notes" }, notes.map((note) => h("li", {}, note))) : null,
  );
}

function stageTable(stages) {
  const rows = stages.map((stage) => [stage.name, stage.steps.toLocaleString("en"), number(stage.loss, 4), seconds(stage.seconds)]);
  return recipeTable([["stage"], ["steps"], ["loss", "Mean of all steps"], ["time"]], rows, 1);
}

function changesTable(recipe) {
  const states = new Map(recipe.layers.map((layer) => [layer.name, layer]));
  const head = [
    ["layer"],
    ["modifier"],
    ["method", "Method used, which may be a fallback"],
    ["error", "Relative squared error of the outputs on the calibration data"],
    ["plain error", "The same error with rounding to nearest or magnitude pruning"],
    ["cosine", "Cosine similarity of the outputs before and after"],
    ["zeros", "Zeros in the result"],
    ["bits", "Bits per weight in the result; ~ is an estimate"],
    ["group", "Weights that share a scale"],
    ["time"],
  ];
  const rows = recipe.steps.flatMap((step) => step.layers.map((layer) => {
    const state = states.get(layer.name);
    return [
      layer.name, step.modifier, layer.method,
      share(layer.error), share(layer.nearest_error), number(layer.cosine, 5),
      state ? percent(state.sparsity) : "–", state ? (state.is_stored === false ? "~" : "") + state.bits.toFixed(2) : "–",
      state?.group_size ?? "–", seconds(layer.seconds),
    ];
  }));
  return recipeTable(head, rows, 3);
}

function recipeTable(head, rows, textColumns) {
  const cellClass = (i) => (i < textColumns ? "text" : "");
  const titles = head.map(([name, about], i) => h("th", { scope: "col", class: cellClass(i), title: about }, name));
  const lines = rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: cellClass(i) }, cell))));
  return h("div", { class: "card scroll tall", tabindex: "0" }, h("table", {}, h("thead", {}, h("tr", {}, titles)), h("tbody", {}, lines)));
}

const number = (x, digits) => (typeof x === "number" ? x.toFixed(digits) : "–");

const share = (x) => (typeof x === "number" ? percent(x) : "–");
