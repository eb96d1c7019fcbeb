// Where the bytes are: rectangles as large as modules were, filled as far as they still are.

const MOST_TILES = 400;
const SMALLEST = 4;
const DEEPEST = 3;

function drawBytes(variant, openTensor) {
  const tree = moduleTree(own(variant));
  const box = h("div", { class: "map", role: "group", "aria-label": "Modules by size" });
  const trail = h("nav", { class: "trail", "aria-label": "Module" });
  let view = "before";
  let path = [tree];

  const weight = (node) => (view === "before" ? node.dense : node.stored);

  function go(next) {
    path = next;
    draw();
    box.querySelector("button")?.focus({ preventScroll: true });
  }

  function choose(node) {
    if (node.children.length) go([...path, node]);
    else openTensor(node.tensor);
  }

  function tile(node, at, isGroup) {
    const codec = node.tensor ? kind(node.tensor) : mainCodec(node);
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
        vars: { ...place(at), "--hue": hue(codec) },
      },
    );
    if (!isGroup) button.append(h("i", { vars: { height: view === "before" ? `${Math.min(100, 100 * share)}%` : "100%" } }));
    if (at.width > 34 && at.height > 15) button.append(h("b", {}, node.name));
    if (!isGroup && at.width > 60 && at.height > 32) {
      button.append(h("span", {}, view === "before" ? sizes : bytes(node.stored)));
    }
    return button;
  }

  // Modules with room for it show what is in them.
  function put(node, at, depth, tiles) {
    const isRoomy = at.width > 80 && at.height > 54 && depth < DEEPEST && tiles.length < MOST_TILES;
    if (!node.children.length || !isRoomy) {
      tiles.push(tile(node, at, false));
      return;
    }
    tiles.push(tile(node, at, true));
    for (const inner of squarified(node.children, at.x + 2, at.y + 19, at.width - 4, at.height - 21, weight)) {
      if (Math.min(inner.width, inner.height) >= SMALLEST) put(inner.item, inner, depth + 1, tiles);
    }
  }

  function draw() {
    const node = path[path.length - 1];
    const tiles = [];
    const nodes = node.children.length ? node.children : [node];
    for (const at of squarified(nodes, 0, 0, box.clientWidth || 900, box.clientHeight || 420, weight)) {
      if (Math.min(at.width, at.height) >= 1) put(at.item, at, 0, tiles);
    }
    box.replaceChildren(...tiles);
    trail.replaceChildren(...path.map((step, i) => crumb(step, i)));
  }

  function crumb(step, i) {
    const name = i === 0 ? step.path || "all" : step.name;
    if (i === path.length - 1) return h("span", { "aria-current": "true" }, name);
    return h("button", { type: "button", onclick: () => go(path.slice(0, i + 1)) }, `${name} ›`);
  }

  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && path.length > 1) go(path.slice(0, -1));
  });

  const head = section(
    "bytes",
    "Where the bytes are",
    "An area is a module before; its filled part is what is left. Choose one to go into it; Escape leads back.",
    trail,
    box,
    legend(variant),
  );
  head.append(
    choice("Sizes", ["before", "after"], view, (picked) => {
      view = picked;
      draw();
    }),
  );
  draw();
  return draw;
}

function place(at) {
  return { left: `${at.x}px`, top: `${at.y}px`, width: `${at.width}px`, height: `${at.height}px` };
}

function mainCodec(node) {
  const sizes = new Map();
  const pending = [node];
  while (pending.length) {
    const next = pending.pop();
    pending.push(...next.children);
    if (next.tensor) sizes.set(kind(next.tensor), (sizes.get(kind(next.tensor)) ?? 0) + next.stored);
  }
  return [...sizes].sort((a, b) => b[1] - a[1])[0]?.[0] ?? "plain";
}

function legend(variant) {
  const sizes = new Map();
  for (const tensor of own(variant)) {
    const sum = sizes.get(kind(tensor)) ?? { stored: 0, count: 0 };
    sizes.set(kind(tensor), { stored: sum.stored + tensor.stored_bytes, count: sum.count + 1 });
  }
  const rows = [...sizes].sort((a, b) => b[1].stored - a[1].stored);
  return h(
    "div",
    { class: "legend" },
    rows.map(([name, sum]) =>
      h("span", { vars: { "--hue": hue(name) } }, h("i"), `${name} · ${bytes(sum.stored)} in ${counted(sum.count, "tensor")}`),
    ),
  );
}
