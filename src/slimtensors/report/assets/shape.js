// The module tree of a model, derived from tensor names, and the layout of the treemap.

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
  return mergeSingleChildren(root);
}

// Merges modules that have a single child with that child.
function mergeSingleChildren(node) {
  let end = node;
  while (end.children.size === 1 && !end.tensor) end = end.children.values().next().value;
  const start = node.path.length - node.name.length;
  return { ...end, name: end.path.slice(start), children: [...end.children.values()].map(mergeSingleChildren) };
}

// Splits `model.layers.3.mlp.weight` into the stack `model.layers`, layer 3 and suffix `mlp.weight`.
function layerPosition(name) {
  const parts = name.split(".");
  const at = parts.findIndex((part) => /^\d+$/.test(part));
  if (at < 0) return null;
  const before = parts.slice(0, at).join(".");
  const after = parts.slice(at + 1).join(".");
  return { layer: Number(parts[at]), suffix: after || before, stack: before };
}

// Divides a rectangle into one per item, with areas by weight and aspect ratios near 1.
function squarify(items, x, y, width, height, weight) {
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
      const thickness = next / side;
      const ratio = Math.max(areas[start].area / thickness ** 2, thickness ** 2 / areas[end].area);
      if (ratio > worst) break;
      worst = ratio;
      sum = next;
      end += 1;
    }
    const thickness = sum / side;
    let offset = 0;
    for (const { item, area } of areas.slice(start, end)) {
      const length = area / thickness;
      result.push(
        width >= height
          ? { item, x, y: y + offset, width: thickness, height: length }
          : { item, x: x + offset, y, width: length, height: thickness },
      );
      offset += length;
    }
    if (width >= height) [x, width] = [x + thickness, width - thickness];
    else [y, height] = [y + thickness, height - thickness];
    start = end;
  }
  return result;
}
