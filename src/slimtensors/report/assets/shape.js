// The shape of a model, told by the names of its tensors.

function moduleTree(tensors) {
  const root = { name: "", path: "", dense: 0, stored: 0, children: new Map(), tensor: null };
  for (const tensor of tensors) {
    let node = root;
    const steps = [root];
    for (const part of tensor.name.split(".")) {
      if (!node.children.has(part)) {
        const path = node.path === "" ? part : `${node.path}.${part}`;
        node.children.set(part, { name: part, path, dense: 0, stored: 0, children: new Map(), tensor: null });
      }
      node = node.children.get(part);
      steps.push(node);
    }
    node.tensor = tensor;
    for (const step of steps) {
      step.dense += tensor.dense_bytes;
      step.stored += tensor.stored_bytes;
    }
  }
  return joined(root);
}

// A module with a single child is not worth a level of its own.
function joined(node) {
  let end = node;
  while (end.children.size === 1 && !end.tensor) end = end.children.values().next().value;
  const start = node.path.length - node.name.length;
  return { ...end, name: end.path.slice(start), children: [...end.children.values()].map(joined) };
}

// Which stack of layers a tensor is in, at which place, and what it is there.
function placed(name) {
  const parts = name.split(".");
  const at = parts.findIndex((part) => /^\d+$/.test(part));
  if (at < 0) return null;
  const before = parts.slice(0, at).join(".");
  const after = parts.slice(at + 1).join(".");
  return { layer: Number(parts[at]), what: after || before, stack: before };
}

function squarified(items, x, y, width, height, weight) {
  const total = items.reduce((sum, item) => sum + weight(item), 0);
  const result = [];
  if (!total || width <= 0 || height <= 0) return result;
  const scale = (width * height) / total;
  const areas = items.map((item) => ({ item, area: weight(item) * scale })).filter((one) => one.area > 0);
  areas.sort((a, b) => b.area - a.area);
  let start = 0;
  while (start < areas.length) {
    const side = Math.min(width, height);
    let end = start;
    let sum = 0;
    let worst = Infinity;
    while (end < areas.length) {
      const next = sum + areas[end].area;
      const thick = next / side;
      const ratio = Math.max(areas[start].area / thick ** 2, thick ** 2 / areas[end].area);
      if (ratio > worst) break;
      worst = ratio;
      sum = next;
      end += 1;
    }
    const thick = sum / side;
    let along = 0;
    for (const { item, area } of areas.slice(start, end)) {
      const length = area / thick;
      result.push(
        width >= height
          ? { item, x, y: y + along, width: thick, height: length }
          : { item, x: x + along, y, width: length, height: thick },
      );
      along += length;
    }
    if (width >= height) [x, width] = [x + thick, width - thick];
    else [y, height] = [y + thick, height - thick];
    start = end;
  }
  return result;
}
