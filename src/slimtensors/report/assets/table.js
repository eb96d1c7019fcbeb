// The table of all tensors. Only visible rows are in the DOM, so thousands of tensors stay fast.

const ROW = 32;
const COLUMNS = [
  { title: "tensor", value: (t) => t.name, show: (t) => t.name, isText: true, isName: true, width: "auto" },
  { title: "dtype", value: (t) => t.dtype, show: (t) => t.dtype, isText: true, isExtra: true, width: "84px" },
  { title: "shape", value: items, show: (t) => t.shape.join("×") || "scalar", isWide: true, width: "108px" },
  { title: "codec", value: (t) => t.codec, show: (t) => (t.codec === "tied" ? t.note : t.codec), isText: true, isWide: true, width: "14%" },
  { title: "dense", value: (t) => t.dense_bytes, show: (t) => bytes(t.dense_bytes), isExtra: true, width: "82px" },
  { title: "stored", value: (t) => t.stored_bytes, show: (t) => bytes(t.stored_bytes), width: "82px" },
  { title: "bits", value: perItem, show: (t) => perItem(t).toFixed(2), width: "64px", about: "Bits per weight" },
  {
    title: "bound", value: (t) => t.bound ?? -1, show: (t) => (t.bound === null ? "" : t.bound.toFixed(2)),
    isExtra: true, width: "70px", about: "Order-0 entropy, bits per weight",
  },
  { title: "error", value: (t) => t.error ?? 0, show: (t) => (t.codec === "tied" ? "" : errorText(t.is_exact, t.error)), width: "92px", about: "Relative RMS error" },
  { title: "zeros", value: (t) => t.sparsity, show: (t) => percent(t.sparsity), isWide: true, width: "74px", about: "Zeros" },
];

// Some columns are hidden on small screens.
const columnClass = (column) => (column.isWide ? "wide" : column.isExtra ? "wide extra" : "");

function items(tensor) {
  return tensor.shape.reduce((a, b) => a * b, 1);
}

function perItem(tensor) {
  return bits(tensor.stored_bytes, items(tensor));
}

function drawTensors(variant, openTensor) {
  let sorted = { column: COLUMNS[5], sign: -1 };
  let shown = [];
  let active = 0;

  const search = h("input", { type: "search", placeholder: "Search names and codecs", "aria-label": "Search tensors" });
  const codecs = [...new Set(variant.tensors.map(codecName))].sort();
  const codecSelect = h("select", { "aria-label": "Codec" }, h("option", { value: "" }, "all codecs"), codecs.map((name) => h("option", { value: name }, name)));
  const found = h("output", { "aria-live": "polite" });
  const heads = COLUMNS.map((column) => h(
    "th",
    { scope: "col", class: [column.isText ? "text" : "", columnClass(column)].join(" ") },
    h("button", { type: "button", title: column.about ?? false, onclick: () => sortBy(column) }, column.title),
  ));
  const body = h("tbody");
  const columns = COLUMNS.map((column) => h("col", { class: columnClass(column) || (column.isText ? "" : "number"), vars: { "--width": column.width } }));
  const table = h("table", { "aria-label": "Tensors" }, h("colgroup", {}, columns), h("thead", {}, h("tr", {}, heads)), body);
  const box = h("div", { class: "card long", tabindex: "-1" }, table);

  function sortBy(column) {
    sorted = { column, sign: sorted.column === column ? -sorted.sign : column.isText ? 1 : -1 };
    update();
  }

  function update() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (t) => words.every((word) => `${t.name} ${t.codec} ${t.dtype}`.toLowerCase().includes(word));
    shown = variant.tensors.filter((t) => (!codecSelect.value || codecName(t) === codecSelect.value) && matches(t));
    const { column, sign } = sorted;
    const keyed = shown.map((tensor) => ({ tensor, key: column.value(tensor) }));
    keyed.sort((a, b) => sign * (column.isText ? collator.compare(a.key, b.key) : a.key - b.key));
    shown = keyed.map((one) => one.tensor);
    heads.forEach((head, i) => {
      if (COLUMNS[i] === column) head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    const sum = shown.reduce((total, tensor) => total + tensor.stored_bytes, 0);
    found.textContent = `${count(shown.length, "tensor")}, ${bytes(sum)}`;
    table.setAttribute("aria-rowcount", String(shown.length + 1));
    active = 0;
    box.scrollTop = 0;
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 10);
    const last = Math.min(shown.length, first + Math.ceil((box.clientHeight || 600) / ROW) + 20);
    const hadFocus = body.contains(document.activeElement);
    const rows = shown.slice(first, last).map((tensor, i) => row(tensor, first + i));
    body.replaceChildren(spacer(first), ...rows, spacer(shown.length - last));
    const focusable = body.querySelector(`[aria-rowindex="${active + 2}"]`) ?? rows[0];
    focusable?.setAttribute("tabindex", "0");
    if (hadFocus) (focusable ?? box).focus({ preventScroll: true });
  }

  function row(tensor, i) {
    const cells = COLUMNS.map((column) => h(
      "td",
      {
        class: [column.isText && "text", column.isName && "name", columnClass(column), column.title === "error" && tensor.is_exact === false && "loss"].filter(Boolean).join(" "),
        title: column.isText ? column.show(tensor) : false,
      },
      column.isName ? h("bdi", {}, column.show(tensor)) : column.show(tensor),
    ));
    return h("tr", { class: "pick", tabindex: "-1", "aria-rowindex": String(i + 2), onclick: () => choose(i) }, cells);
  }

  function choose(i) {
    active = i;
    openTensor(shown[i]);
  }

  function moveTo(i) {
    active = Math.max(0, Math.min(shown.length - 1, i));
    const top = active * ROW;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + 2 * ROW > box.scrollTop + box.clientHeight) box.scrollTop = top + 2.2 * ROW - box.clientHeight;
    draw();
    body.querySelector(`[aria-rowindex="${active + 2}"]`)?.focus({ preventScroll: true });
  }

  body.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(box.clientHeight / ROW) - 2);
    const moves = { ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + page, PageUp: active - page, Home: 0, End: shown.length - 1 };
    if (event.key === "Enter" || event.key === " ") choose(active);
    else if (event.key in moves) moveTo(moves[event.key]);
    else return;
    event.preventDefault();
  });
  body.addEventListener("focusin", (event) => {
    const i = Number(event.target.closest("tr")?.getAttribute("aria-rowindex")) - 2;
    if (i >= 0) active = i;
  });
  search.addEventListener("input", update);
  search.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && shown.length) {
      event.preventDefault();
      moveTo(0);
    }
  });
  codecSelect.addEventListener("change", update);
  let isScheduled = false;
  box.addEventListener("scroll", () => {
    if (isScheduled) return;
    isScheduled = true;
    requestAnimationFrame(() => {
      isScheduled = false;
      draw();
    });
  });

  section(
    "tensors",
    "Tensors",
    "Choose one to see its plan and parts; arrow keys move, Enter opens, Escape closes.",
    h("div", { class: "tools" }, search, codecSelect, found),
    box,
  );
  update();
}

const collator = new Intl.Collator("en", { numeric: true });

function spacer(count) {
  return h("tr", { class: "spacer", "aria-hidden": "true" }, h("td", { vars: { height: `${Math.max(0, count) * ROW}px` } }));
}
