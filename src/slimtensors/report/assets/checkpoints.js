// The checkpoints of a run: a bar chart by step, arcs from deltas to their bases, and a table.

function drawCheckpoints(checkpoints) {
  if (!checkpoints.length) return;
  const [gap, height, top] = [4, 130, 46];
  const wide = Math.max(10, Math.min(54, 900 / checkpoints.length - gap));
  const width = checkpoints.length * (wide + gap);
  const most = Math.max(...checkpoints.map((checkpoint) => checkpoint.bytes), 1);
  const at = new Map(checkpoints.map((checkpoint, i) => [checkpoint.name, i]));
  const middle = (i) => i * (wide + gap) + wide / 2;
  const shapes = checkpoints.flatMap((checkpoint, i) => {
    const tall = Math.max(1, (height * checkpoint.bytes) / most);
    const bar = svg(
      "rect",
      { class: `bar ${checkpoint.base ? "delta" : "full"}`, x: i * (wide + gap), y: top + height - tall, width: wide, height: tall, rx: 1.5 },
      svg("title", {}, `${checkpoint.name}: ${bytes(checkpoint.bytes)}${checkpoint.base ? `, delta from ${checkpoint.base}` : ""}`),
    );
    const every = Math.ceil(44 / (wide + gap));
    const label = i % every === 0 ? svg("text", { x: middle(i), y: top + height + 15, "text-anchor": "middle" }, String(checkpoint.step ?? i)) : null;
    const base = at.get(checkpoint.base);
    if (base === undefined) return [bar, label];
    const rise = Math.max(4, top - 6 - Math.min(38, 9 * (i - base)));
    const path = `M${middle(i)} ${top + height - tall - 2}C${middle(i)} ${rise} ${middle(base)} ${rise} ${middle(base)} ${top - 2}`;
    return [bar, label, svg("path", { class: "arc", d: path })];
  });
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${width} ${top + height + 20}`, role: "img", "aria-label": "Sizes of checkpoints by step", vars: { "min-width": `${Math.min(width, 500)}px`, "max-width": `${width}px` } },
    shapes,
  );
  const stored = checkpoints.reduce((sum, checkpoint) => sum + checkpoint.bytes, 0);
  const dense = checkpoints.reduce((sum, checkpoint) => sum + checkpoint.dense_bytes, 0);
  const metrics = [...new Set(checkpoints.flatMap((checkpoint) => Object.keys(checkpoint.metrics)))].slice(0, 4);
  const head = ["checkpoint", "step", "kind", "base", "stored", "of dense", ...metrics];
  const classes = ["text", "", "text", "text wide"];
  const rows = checkpoints.map((checkpoint) => {
    const cells = [
      checkpoint.name, checkpoint.step ?? "–", checkpoint.base ? "delta" : "full", checkpoint.base ?? "–", bytes(checkpoint.bytes),
      percent(checkpoint.dense_bytes ? checkpoint.bytes / checkpoint.dense_bytes : 0),
      ...metrics.map((name) => (typeof checkpoint.metrics[name] === "number" ? compact(checkpoint.metrics[name]) : "–")),
    ];
    return h("tr", {}, cells.map((cell, i) => h("td", { class: classes[i] ?? "" }, String(cell))));
  });
  const table = h("table", {}, h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { scope: "col", class: classes[i] ?? "" }, name)))), h("tbody", {}, rows));
  const about = `${count(checkpoints.length, "checkpoint")} in ${bytes(stored)} instead of ${bytes(dense)}: ${ratio(dense, stored)} smaller. Blue: full checkpoints; green: deltas.`;
  section("checkpoints", "Checkpoints", about, h("figure", { class: "card scroll" }, drawing), h("div", { class: "card scroll tall", vars: { "margin-top": "12px" } }, table));
}
