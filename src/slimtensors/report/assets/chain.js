// The checkpoints of a run by step: which stand alone, and which need another.

function drawChain(links) {
  if (!links.length) return;
  const [gap, height, top] = [4, 130, 46];
  const wide = Math.max(10, Math.min(54, 900 / links.length - gap));
  const width = links.length * (wide + gap);
  const most = Math.max(...links.map((link) => link.bytes), 1);
  const at = new Map(links.map((link, i) => [link.name, i]));
  const middle = (i) => i * (wide + gap) + wide / 2;
  const shapes = links.flatMap((link, i) => {
    const tall = Math.max(1, (height * link.bytes) / most);
    const bar = svg(
      "rect",
      { class: `bar ${link.base ? "delta" : "full"}`, x: i * (wide + gap), y: top + height - tall, width: wide, height: tall, rx: 1.5 },
      svg("title", {}, `${link.name}: ${bytes(link.bytes)}${link.base ? `, from ${link.base}` : ""}`),
    );
    const every = Math.ceil(44 / (wide + gap));
    const label = i % every === 0 ? svg("text", { x: middle(i), y: top + height + 15, "text-anchor": "middle" }, String(link.step ?? i)) : null;
    const base = at.get(link.base);
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
  const stored = links.reduce((sum, link) => sum + link.bytes, 0);
  const dense = links.reduce((sum, link) => sum + link.dense_bytes, 0);
  const metrics = [...new Set(links.flatMap((link) => Object.keys(link.metrics)))].slice(0, 4);
  const head = ["checkpoint", "step", "kind", "from", "stored", "of whole", ...metrics];
  const kinds = ["text", "", "text", "text wide"];
  const rows = links.map((link) => {
    const cells = [
      link.name, link.step ?? "–", link.base ? "delta" : "full", link.base ?? "–", bytes(link.bytes),
      percent(link.dense_bytes ? link.bytes / link.dense_bytes : 0),
      ...metrics.map((name) => (typeof link.metrics[name] === "number" ? short(link.metrics[name]) : "–")),
    ];
    return h("tr", {}, cells.map((cell, i) => h("td", { class: kinds[i] ?? "" }, String(cell))));
  });
  const table = h("table", {}, h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { scope: "col", class: kinds[i] ?? "" }, name)))), h("tbody", {}, rows));
  const about = `${counted(links.length, "checkpoint")} in ${bytes(stored)} instead of ${bytes(dense)}: ${times(dense, stored)} smaller. Blue stands alone, green is a difference.`;
  section("checkpoints", "Checkpoints", about, h("figure", { class: "card scroll" }, drawing), h("div", { class: "card scroll tall", vars: { "margin-top": "12px" } }, table));
}
