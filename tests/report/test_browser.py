"""The report page in a real browser."""

from dataclasses import replace

import pytest
from report.browser import BROWSER, View, start_browser
from report.test_collect import RECIPE

from slimtensors.archive.summary import DenseLayer, QuantizationSummary, TensorSummary
from slimtensors.report import (
    CheckpointReport,
    Histogram,
    Report,
    TensorReport,
    Variant,
    write_page,
)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no browser found: apt-get install chromium"
)

HOSTILE = [
    "</script><script>window.hacked = 1</script>.weight",
    "<img src=x onerror='window.hacked = 1'>",
    "__proto__.constructor",
    "${window.hacked = 1}\u2028`'\"<!--",
]


def tensor_report(name, *, stored=1000, error=None, codec="huffman", shape=(64, 32)):
    plan = {"codec": {"name": "bitmask"}, "then": {"values": {"codec": {"name": "huffman"}}}}
    histogram = Histogram(-1.0, 1.0, (1, 4, 9, 4, 1))
    parts = {"mask": stored // 2, "values.chunks": stored // 8}
    parts["values.data"] = stored - sum(parts.values())
    info = TensorSummary(name, "bfloat16", shape, codec, 4096, stored, "x", "", error, parts, 7.5)
    return TensorReport(info, plan, error is None, 0.5, histogram, histogram if error else None)


def report_with_tensors(count):
    per_layer = (
        "attn.q.weight",
        "attn.k.weight",
        "mlp.up.weight",
        "mlp.down.weight",
        "norm.weight",
    )
    names = [f"model.layers.{i // 5}.{per_layer[i % 5]}" for i in range(count)]
    codecs = ("huffman", "bitmask(values=huffman)")
    tensors = [tensor_report(n, stored=500 + i, codec=codecs[i % 2]) for i, n in enumerate(names)]
    return Report("many", "2026-01-01T00:00:00+00:00", "1", [Variant("many", tensors)])


def report_with_variants():
    def variant(name, stored, error, perplexity):
        tensors = [
            tensor_report(f"layers.{i}.weight", stored=stored, error=error) for i in range(4)
        ]
        return Variant(name, tensors, f"About {name}.", error or 0.0, {"perplexity": perplexity})

    variants = [
        variant("dense", 4096, None, 4.0),
        variant("lossless", 3000, None, 4.0),
        variant("int4", 1000, 0.06, 4.4),
    ]
    checkpoints = [
        CheckpointReport("step-1", 1, None, "exact", 900, 1000, "", {"loss": 2.0}),
        CheckpointReport("step-2", 2, "step-1", "exact", 300, 1000, "", {"loss": 1.0}),
    ]
    return replace(
        report_with_tensors(0), title="several", variants=variants, checkpoints=checkpoints
    )


@pytest.fixture(scope="module")
def browser():
    with start_browser() as browser:
        yield browser


@pytest.fixture
def view(browser, tmp_path):
    views = []

    def open_page(report, **options):
        write_page(report, tmp_path / "page.html")
        views.append(View(browser, tmp_path / "page.html", **options))
        return views[-1]

    yield open_page
    for opened in views:
        opened.check()
        opened.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("count", [3, 3000])
def test_a_page_opens_without_console_messages(view, count, width, scheme):
    opened = view(report_with_tensors(count), width=width, scheme=scheme)
    sizes = opened.texts(".sizes span")
    assert sizes[0] == {3: "12.3 kB", 3000: "12.3 MB"}[count]
    assert len(opened.texts(".tile")) > 2
    assert min(count, 15) <= len(opened.texts("#tensors tbody tr.pick")) < 80
    wide = opened.page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, "no horizontal scrolling"


def test_light_and_dark_schemes_differ(view):
    background = "getComputedStyle(document.body).backgroundColor"
    colours = {
        scheme: view(report_with_tensors(3), scheme=scheme).page.evaluate(background)
        for scheme in ("light", "dark")
    }
    assert colours["light"] != colours["dark"]


def test_names_never_become_markup(view):
    names = [tensor_report(name) for name in HOSTILE]
    opened = view(
        replace(report_with_tensors(0), title=HOSTILE[0], variants=[Variant(HOSTILE[1], names)])
    )
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.locator("#tensors img, h1 script").count() == 0
    shown = opened.page.locator("#tensors td.name").all_text_contents()
    # Line separators are shown as escapes.
    assert sorted(shown) == sorted(name.replace("\u2028", r"\u2028") for name in HOSTILE)
    opened.page.locator("#tensors tr.pick").first.click()
    assert opened.page.locator("#detail-name").text_content() in HOSTILE
    assert HOSTILE[0] in opened.page.title()


def test_columns_sort_both_ways(view):
    opened = view(report_with_tensors(3000))

    def column():
        return [row.split("\t")[5] for row in opened.texts("#tensors tbody tr.pick")[:3]]

    assert column() == ["3.5 kB"] * 3
    button = opened.page.get_by_role("button", name="stored")
    button.click()
    assert column() == ["500 B", "501 B", "502 B"]
    assert opened.page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    opened.page.get_by_role("button", name="tensor", exact=True).click()
    first = opened.page.locator("#tensors td.name").first.text_content()
    assert first == "model.layers.0.attn.k.weight"
    assert opened.page.locator("th[aria-sort]").inner_text().startswith("tensor")


def test_search_and_codec_narrow_the_table(view):
    opened = view(report_with_tensors(3000))
    opened.page.get_by_role("searchbox").fill("layers.7. ATTN")
    assert opened.texts("output") == ["2 tensors, 1.1 kB"]
    assert len(opened.texts("#tensors tr.pick")) == 2
    opened.page.get_by_label("Codec").select_option("bitmask")
    assert opened.texts("output") == ["1 tensor, 535 B"]
    opened.page.get_by_role("searchbox").fill("no such tensor")
    assert opened.texts("#tensors tr.pick") == []


def test_scrolling_reaches_the_last_row(view):
    opened = view(report_with_tensors(3000))
    opened.page.evaluate("document.querySelector('.long').scrollTop = 1e9")
    last = opened.page.locator('#tensors tr[aria-rowindex="3001"]')
    last.wait_for()
    assert "500 B" in last.inner_text()


def test_a_click_shows_the_plan_and_the_parts(view):
    opened = view(report_with_variants())
    opened.page.locator("#tensors tr.pick").first.click()
    rows = opened.texts("#detail .plan code")
    assert rows == ["bitmask", "mask", "values → huffman", "chunks", "data"]
    assert opened.texts("#detail .plan .size")[0].startswith("3.0 kB")
    assert opened.page.locator("#detail svg").count() == 1
    assert len(opened.texts("#detail tbody tr")) == 3, "one row per variant"
    opened.page.get_by_role("button", name="Close").click()
    assert not opened.page.locator("#detail").is_visible()


def test_the_table_works_by_keyboard(view):
    opened = view(report_with_tensors(3000))
    opened.page.get_by_role("searchbox").focus()
    opened.press("ArrowDown")
    assert opened.eval_focused("getAttribute('aria-rowindex')") == "2"
    opened.press("ArrowDown", "ArrowDown", "ArrowUp", "Enter")
    assert opened.page.locator("#detail").is_visible()
    opened.press("Escape")
    assert not opened.page.locator("#detail").is_visible()
    assert opened.eval_focused("getAttribute('aria-rowindex')") == "3"
    opened.press("End")
    assert opened.eval_focused("getAttribute('aria-rowindex')") == "3001"
    opened.press("PageUp", "Home")
    assert opened.eval_focused("getAttribute('aria-rowindex')") == "2"


def test_variants_are_chosen_by_row_point_and_list(view):
    opened = view(report_with_variants())
    assert "lossless" in opened.texts("h1")[0]
    assert opened.page.locator("#variants .point").count() == 3
    opened.page.locator("#variants tbody tr").nth(2).focus()
    opened.press("Enter")
    assert opened.texts(".sizes .after") == ["4.0 kB"]
    assert "6.00 %" in opened.texts(".figures dd")
    assert opened.eval_focused("tagName") == "TR"
    opened.page.locator("#variants .point").first.focus()
    opened.press(" ")
    assert "dense" in opened.texts("h1")[0]
    opened.page.get_by_label("Variant", exact=True).select_option("int4")
    assert "int4" in opened.texts("h1")[0]
    assert opened.page.locator("#spread svg").count() == 3


def test_modules_open_and_close(view):
    opened = view(report_with_tensors(500))
    before = len(opened.texts(".tile"))
    layer = opened.page.locator(".tile").filter(has_text="7").first
    layer.click()
    inside = opened.texts(".trail > *")
    assert len(inside) == 2
    assert len(opened.texts(".tile")) < before
    opened.press("Escape")
    assert len(opened.texts(".trail > *")) == 1
    opened.page.get_by_role("button", name="after").click()
    assert opened.page.get_by_role("button", name="after").get_attribute("aria-pressed") == "true"


def test_layers_show_the_chosen_metric(view):
    opened = view(report_with_variants())
    opened.page.get_by_label("Variant", exact=True).select_option("int4")
    cells = opened.page.locator("#layers tbody td")
    assert cells.all_inner_texts() == ["50"] * 4
    opened.page.get_by_role("button", name="error", exact=True).first.click()
    assert cells.all_inner_texts() == ["6.0"] * 4
    cells.first.click()
    assert opened.page.locator("#detail-name").inner_text() == "layers.0.weight"


def test_checkpoints_are_shown_by_step(view):
    opened = view(report_with_variants())
    assert opened.page.locator("#checkpoints .bar.full").count() == 1
    assert opened.page.locator("#checkpoints .bar.delta").count() == 1
    assert opened.page.locator("#checkpoints .arc").count() == 1
    assert "2 checkpoints in 1.2 kB instead of 2.0 kB" in opened.texts("#checkpoints .head p")[0]
    rows = opened.page.locator("#checkpoints tbody tr").all_inner_texts()
    assert rows[1].split("\t")[:4] == ["step-2", "2", "delta", "step-1"]


def test_layers_that_stay_dense_are_listed_with_their_reasons(view):
    layers = [DenseLayer(HOSTILE[1], "router", 20), DenseLayer("lm_head", "in ignore", 250)]
    quantization = QuantizationSummary(1002, 1000, 700, layers)
    opened = view(replace(report_with_tensors(3), quantization=quantization))
    about = "2 of 1,002 linear layers stay dense. 70.0 % of all parameters are quantized."
    assert opened.texts("#dense p") == [about]
    rows = [row.split("\t") for row in opened.texts("#dense tbody tr")]
    assert rows == [
        ["lm_head", "in ignore", "250", "25.0 %"],
        [HOSTILE[1], "router", "20", "2.00 %"],
    ]
    assert opened.page.locator("#dense").is_visible()
    assert "Dense layers" in opened.texts(".jump a")


FIT = {
    "budget": {"size": "60MB"},
    "parameters": 1000,
    "source_bytes": 2000,
    "weight_bytes": 59_900_000,
    "bits_per_parameter": 3.5123,
    "predicted_kl": 0.02,
    "measured": {
        "predictions": 2048,
        "kl": 0.0301,
        "top1_agreement": 0.9,
        "acceptance_rate": 0.95,
        "cosine": 0.99,
        "perplexity_before": 10.0,
        "perplexity": 10.5,
    },
    "curve": [
        {"bytes": size, "predicted_kl": loss}
        for size, loss in ((40_000_000, 0.2), (59_900_000, 0.02), (80_000_000, 0.002))
    ],
    "tensors": [
        {"name": HOSTILE[1], "weights": 100, "bits": 6.0, "predicted_kl": 0.005, "note": ""},
        {"name": "model.layers.0.attn.q.weight", "weights": 100, "bits": 2.0}
        | {"predicted_kl": 0.01, "note": ""},
        {"name": "model.layers.1.attn.q.weight", "weights": 300, "bits": 4.0}
        | {"predicted_kl": 0.005, "note": ""},
    ],
    "notes": [HOSTILE[0]],
}


@pytest.mark.parametrize("width", [1280, 390])
def test_a_fitted_model_is_shown_with_its_curve(view, width):
    opened = view(replace(report_with_tensors(20), fit=FIT), width=width)
    figures = opened.texts("#fit .figures dd")
    assert figures[:5] == ["60MB", "59.9 MB", "3.51", "0.02", "0.0301"]
    assert figures[5:] == ["10.00 → 10.50", "90.0 %", "95.0 %"]
    rows = [row.replace("\n", "").split("\t") for row in opened.texts("#fit tbody tr")]
    assert [row[0] for row in rows] == ["model.layers.*.attn.q.weight", HOSTILE[1]]
    assert [row[-2:] for row in rows] == [["3.50", "75.0 %"], ["6.00", "25.0 %"]]
    assert opened.page.locator("#fit .curve").count() == 1
    predicted, measured = (box.bounding_box() for box in opened.page.locator("#fit .dot").all())
    assert predicted["x"] == measured["x"]
    assert predicted["y"] > measured["y"], "the measured loss is larger"
    assert opened.texts("#fit .notes li") == [HOSTILE[0]]
    assert opened.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    opened.page.get_by_role("button", name="predicted loss", exact=True).click()
    assert opened.texts("#layers tbody tr:first-child td")[:2] == ["50.00", "25.00"]


def test_a_fitted_model_without_measurements_is_shown(view):
    fit = {**FIT, "measured": None, "predicted_kl": None, "budget": {"bits": 3}, "curve": []}
    opened = view(replace(report_with_tensors(3), fit=fit))
    assert opened.texts("#fit .figures dd") == ["3 bits", "59.9 MB", "3.51", "\u2013"]
    assert opened.page.locator("#fit .curve").count() == 0


def test_a_recipe_is_shown_layer_by_layer(view):
    recipe = {**RECIPE, "notes": [HOSTILE[1]]}
    recipe["stages"] = [{"name": "tune", "steps": 1200, "seconds": 9.0, "loss": 1.25}]
    opened = view(replace(report_with_tensors(0), variants=[], recipe=recipe), width=390)
    assert opened.texts("#recipe .figures dd")[:2] == ["5.000 → 5.500", "0.01000"]
    stages, changes = opened.page.locator("#recipe tbody").all_inner_texts()
    assert stages.split("\t") == ["tune", "1,200", "1.2500", "9.0 s"]
    assert changes.split("\t")[:5] == ["up", "GPTQ", "gptq", "1.00 %", "2.00 %"]
    assert changes.split("\t")[5:] == ["0.99000", "50.0 %", "4.25", "\u2013", "500 ms"]
    assert opened.texts("#recipe .notes li") == [HOSTILE[1], "GPTQ: few tokens"]
    assert opened.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    broken = {
        **recipe,
        "sparsity": None,
        "quality": {"cosine": None, "kl": None, "perplexity": None},
    }
    assert (
        view(replace(report_with_tensors(3), recipe=broken)).texts("#recipe .figures dd")[0]
        == "\u2013"
    )
