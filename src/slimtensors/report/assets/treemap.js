// A treemap of modules: area is dense size, the filled part is stored size.

const MAX_TILES = 400;
const MIN_SIDE = 4;
const MAX_DEPTH = 3;

function drawBytes(variant, openTensor) {
  const tree = moduleTree(untied(variant));
  const box = h("div", { class: "map", role: "group", "aria-label": "Modules by size" });
  const trail = h("nav", { class: "trail", "aria-label": "Module" });
  let view = "before";
  let path = [tree];

  const weight = (node) => (view === "before" ? node.dense : node.stored);

  function openPath(next) {
    path = next;
    draw();
    box.querySelector("button")?.focus({ preventScroll: true });
  }

  function choose(node) {
    if (node.children.length) openPath([...path, node]);
    else openTensor(node.tensor);
  }

  function tile(node, at, isGroup) {
    const codec = node.tensor ? codecName(node.tensor) : mainCodec(node);
    const share = node.dense ? node.stored / node.dense : 1;
    const sizes = `${bytes(node.dense)} → ${bytes(node.stored)}`;
    const button = h(
      "button",
      {
        type: "button",
        class: isGroup ? "tile group" : "tile",
        "aria-label": `${node.path || "all"}: ${sizes}, ${codec}`,
        title: `${node.path}\n${sizes}\n${codec}`,
        onclick: () => choose(node),
        vars: { ...cssBox(at), "--hue": hue(codec) },
      },
    );
    if (!isGroup) button.append(h("i", { vars: { height: view === "before" ? `${Math.min(100, 100 * share)}%` : "100%" } }));
    if (at.width > 34 && at.height > 15) button.append(h("b", {}, node.name));
    if (!isGroup && at.width > 60 && at.height > 32) {
      button.append(h("span", {}, view === "before" ? sizes : bytes(node.stored)));
    }
    return button;
  }

  // Large modules also show their children.
  function addTiles(node, at, depth, tiles) {
    const isLarge = at.width > 80 && at.height > 54 && depth < MAX_DEPTH && tiles.length < MAX_TILES;
    if (!node.children.length || !isLarge) {
      tiles.push(tile(node, at, false));
      return;
    }
    tiles.push(tile(node, at, true));
    for (const inner of squarify(node.children, at.x + 2, at.y + 19, at.width - 4, at.height - 21, weight)) {
      if (Math.min(inner.width, inner.height) >= MIN_SIDE) addTiles(inner.item, inner, depth + 1, tiles);
    }
  }

  function draw() {
    const node = path[path.length - 1];
    const tiles = [];
    const nodes = node.children.length ? node.children : [node];
    for (const at of squarify(nodes, 0, 0, box.clientWidth || 900, box.clientHeight || 420, weight)) {
      if (Math.min(at.width, at.height) >= 1) addTiles(at.item, at, 0, tiles);
    }
    box.replaceChildren(...tiles);
    trail.replaceChildren(...path.map((step, i) => crumb(step, i)));
  }

  function crumb(step, i) {
    const name = i === 0 ? step.path || "all" : step.name;
    if (i === path.length - 1) return h("span", { "aria-current": "true" }, name);
    return h("button", { type: "button", onclick: () => openPath(path.slice(0, i + 1)) }, `${name} ›`);
  }

  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && path.length > 1) openPath(path.slice(0, -1));
  });

  const head = section(
    "bytes",
    "Size by module",
    "Areas are dense sizes; the filled part is the stored size. Choose a module to open it; Escape goes back.",
    trail,
    box,
    legend(variant),
  );
  head.append(
    buttonGroup("Sizes", ["before", "after"], view, (picked) => {
      view = picked;
      draw();
    }),
  );
  draw();
  return draw;
}

function cssBox(at) {
  return { left: `${at.x}px`, top: `${at.y}px`, width: `${at.width}px`, height: `${at.height}px` };
}

function mainCodec(node) {
  const sizes = new Map();
  const pending = [node];
  while (pending.length) {
    const next = pending.pop();
    pending.push(...next.children);
    if (next.tensor) sizes.set(codecName(next.tensor), (sizes.get(codecName(next.tensor)) ?? 0) + next.stored);
  }
  return [...sizes].sort((a, b) => b[1] - a[1])[0]?.[0] ?? "plain";
}

function legend(variant) {
  const sizes = new Map();
  for (const tensor of untied(variant)) {
    const sum = sizes.get(codecName(tensor)) ?? { stored: 0, count: 0 };
    sizes.set(codecName(tensor), { stored: sum.stored + tensor.stored_bytes, count: sum.count + 1 });
  }
  const rows = [...sizes].sort((a, b) => b[1].stored - a[1].stored);
  return h(
    "div",
    { class: "legend" },
    rows.map(([name, sum]) =>
      h("span", { vars: { "--hue": hue(name) } }, h("i"), `${name} · ${bytes(sum.stored)} in ${count(sum.count, "tensor")}`),
    ),
  );
}
