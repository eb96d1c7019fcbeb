// Linear layers that a quantized folder stores dense, and why; layers with another group size.

function drawDenseLayers(quantization) {
  if (!quantization) return;
  const { linear_layers: layers, parameters, dense_layers: dense } = quantization;
  const part = (count) => share(count / (parameters || 1));
  const about = `${dense.length} of ${layers.toLocaleString("en")} linear layers stay dense. ${part(quantization.quantized_parameters)} of all parameters are quantized.`;
  const head = [["layer"], ["reason"], ["parameters"], ["share", "Share of all parameters"]];
  const largest = [...dense].sort((a, b) => b.parameters - a.parameters);
  const rows = largest.map((layer) => [layer.name, layer.reason, layer.parameters.toLocaleString("en"), part(layer.parameters)]);
  section("dense", "Dense layers", about, rows.length ? recipeTable(head, rows, 2) : null);
  drawGroupSizes(quantization.group_sizes ?? []);
}

function drawGroupSizes(layers) {
  if (!layers.length) return;
  const about = `The group size of the preset does not fit ${layers.length.toLocaleString("en")} layers, which have another one.`;
  const head = [["layer"], ["columns"], ["group size"], ["preset"]];
  const rows = layers.map((layer) => [layer.name, layer.columns, layer.group_size === -1 ? "channel" : layer.group_size, layer.requested]);
  section("groups", "Group sizes", about, recipeTable(head, rows, 1));
}
