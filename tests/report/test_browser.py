"""The page, in a real browser."""

from dataclasses import replace

import pytest
from report.browser import BROWSER, View, started
from report.test_collect import RECIPE

from slimtensors.archive.summary import TensorSummary
from slimtensors.report import Histogram, Link, Report, TensorReport, Variant, write_page

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="there is no browser: apt-get install chromium"
)

HOSTILE = [
    "</script><script>window.hacked = 1</script>.weight",
    "<img src=x onerror='window.hacked = 1'>",
    "__proto__.constructor",
    "${window.hacked = 1}\u2028`'\"<!--",
]


def tensor(name, *, stored=1000, error=None, codec="huffman", shape=(64, 32)):
    plan = {"codec": {"name": "bitmask"}, "then": {"values": {"codec": {"name": "huffman"}}}}
    shown = Histogram(-1.0, 1.0, (1, 4, 9, 4, 1))
    parts = {"mask": stored // 2, "values.chunks": stored // 8}
    parts["values.data"] = stored - sum(parts.values())
    info = TensorSummary(name, "bfloat16", shape, codec, 4096, stored, "x", "", error, parts, 7.5)
    return TensorReport(info, plan, error is None, 0.5, shown, shown if error else None)


def many(count):
    per_layer = (
        "attn.q.weight",
        "attn.k.weight",
        "mlp.up.weight",
        "mlp.down.weight",
        "norm.weight",
    )
    names = [f"model.layers.{i // 5}.{per_layer[i % 5]}" for i in range(count)]
    codecs = ("huffman", "bitmask(values=huffman)")
    made = [tensor(n, stored=500 + i, codec=codecs[i % 2]) for i, n in enumerate(names)]
    return Report("many", "2026-01-01T00:00:00+00:00", "1", [Variant("many", made)])


def several():
    def variant(name, stored, error, perplexity):
        made = [tensor(f"layers.{i}.weight", stored=stored, error=error) for i in range(4)]
        return Variant(name, made, f"About {name}.", error or 0.0, {"perplexity": perplexity})

    variants = [
        variant("dense", 4096, None, 4.0),
        variant("lossless", 3000, None, 4.0),
        variant("int4", 1000, 0.06, 4.4),
    ]
    links = [
        Link("step-1", 1, None, "exact", 900, 1000, "", {"loss": 2.0}),
        Link("step-2", 2, "step-1", "exact", 300, 1000, "", {"loss": 1.0}),
    ]
    return replace(many(0), title="several", variants=variants, checkpoints=links)


@pytest.fixture(scope="module")
def browser():
    with started() as browser:
        yield browser


@pytest.fixture
def view(browser, tmp_path):
    views = []

    def open_page(report, **options):
        write_page(report, tmp_path / "page.html")
        views.append(View(browser, tmp_path / "page.html", **options))
        return views[-1]

    yield open_page
    for one in views:
        one.check()
        one.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("count", [3, 3000])
def test_a_page_shows_itself_without_a_complaint(view, count, width, scheme):
    seen = view(many(count), width=width, scheme=scheme)
    sizes = seen.all(".sizes span")
    assert sizes[0] == {3: "12.3 kB", 3000: "12.3 MB"}[count]
    assert len(seen.all(".tile")) > 2
    assert min(count, 15) <= len(seen.all("#tensors tbody tr.pick")) < 80
    wide = seen.page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, "nothing sticks out of the window"


def test_light_and_dark_are_not_the_same(view):
    paper = "getComputedStyle(document.body).backgroundColor"
    colours = {
        scheme: view(many(3), scheme=scheme).page.evaluate(paper) for scheme in ("light", "dark")
    }
    assert colours["light"] != colours["dark"]


def test_names_never_become_markup(view):
    names = [tensor(name) for name in HOSTILE]
    seen = view(replace(many(0), title=HOSTILE[0], variants=[Variant(HOSTILE[1], names)]))
    assert seen.page.evaluate("window.hacked") is None
    assert seen.page.locator("#tensors img, h1 script").count() == 0
    shown = seen.page.locator("#tensors td.name").all_text_contents()
    assert sorted(shown) == sorted(HOSTILE)
    seen.page.locator("#tensors tr.pick").first.click()
    assert seen.page.locator("#detail-name").text_content() in HOSTILE
    assert HOSTILE[0] in seen.page.title()


def test_columns_sort_both_ways(view):
    seen = view(many(3000))

    def column():
        return [row.split("\t")[5] for row in seen.all("#tensors tbody tr.pick")[:3]]

    assert column() == ["3.5 kB"] * 3
    button = seen.page.get_by_role("button", name="stored")
    button.click()
    assert column() == ["500 B", "501 B", "502 B"]
    assert seen.page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    seen.page.get_by_role("button", name="tensor", exact=True).click()
    first = seen.page.locator("#tensors td.name").first.text_content()
    assert first == "model.layers.0.attn.k.weight"
    assert seen.page.locator("th[aria-sort]").inner_text().startswith("tensor")


def test_search_and_codec_narrow_the_table(view):
    seen = view(many(3000))
    seen.page.get_by_role("searchbox").fill("layers.7. ATTN")
    assert seen.all("output") == ["2 tensors, 1.1 kB"]
    assert len(seen.all("#tensors tr.pick")) == 2
    seen.page.get_by_label("Codec").select_option("bitmask")
    assert seen.all("output") == ["1 tensor, 535 B"]
    seen.page.get_by_role("searchbox").fill("nothing like that")
    assert seen.all("#tensors tr.pick") == []


def test_scrolling_reaches_the_last_row(view):
    seen = view(many(3000))
    seen.page.evaluate("document.querySelector('.long').scrollTop = 1e9")
    last = seen.page.locator('#tensors tr[aria-rowindex="3001"]')
    last.wait_for()
    assert "500 B" in last.inner_text()


def test_a_click_shows_the_plan_and_the_parts(view):
    seen = view(several())
    seen.page.locator("#tensors tr.pick").first.click()
    rows = seen.all("#detail .plan code")
    assert rows == ["bitmask", "mask", "values → huffman", "chunks", "data"]
    assert seen.all("#detail .plan .size")[0].startswith("3.0 kB")
    assert seen.page.locator("#detail svg").count() == 1
    assert len(seen.all("#detail tbody tr")) == 3, "one row per variant"
    seen.page.get_by_role("button", name="Close").click()
    assert not seen.page.locator("#detail").is_visible()


def test_the_keyboard_is_enough(view):
    seen = view(many(3000))
    seen.page.get_by_role("searchbox").focus()
    seen.press("ArrowDown")
    assert seen.focused("getAttribute('aria-rowindex')") == "2"
    seen.press("ArrowDown", "ArrowDown", "ArrowUp", "Enter")
    assert seen.page.locator("#detail").is_visible()
    seen.press("Escape")
    assert not seen.page.locator("#detail").is_visible()
    assert seen.focused("getAttribute('aria-rowindex')") == "3"
    seen.press("End")
    assert seen.focused("getAttribute('aria-rowindex')") == "3001"
    seen.press("PageUp", "Home")
    assert seen.focused("getAttribute('aria-rowindex')") == "2"


def test_variants_are_chosen_by_row_point_and_list(view):
    seen = view(several())
    assert "lossless" in seen.all("h1")[0]
    assert seen.page.locator("#variants .point").count() == 3
    seen.page.locator("#variants tbody tr").nth(2).focus()
    seen.press("Enter")
    assert seen.all(".sizes .after") == ["4.0 kB"]
    assert "6.00 %" in seen.all(".figures dd")
    assert seen.focused("tagName") == "TR"
    seen.page.locator("#variants .point").first.focus()
    seen.press(" ")
    assert "dense" in seen.all("h1")[0]
    seen.page.get_by_label("Variant", exact=True).select_option("int4")
    assert "int4" in seen.all("h1")[0]
    assert seen.page.locator("#spread svg").count() == 3


def test_modules_open_and_close(view):
    seen = view(many(500))
    before = len(seen.all(".tile"))
    layer = seen.page.locator(".tile").filter(has_text="7").first
    layer.click()
    inside = seen.all(".trail > *")
    assert len(inside) == 2
    assert len(seen.all(".tile")) < before
    seen.press("Escape")
    assert len(seen.all(".trail > *")) == 1
    seen.page.get_by_role("button", name="after").click()
    assert seen.page.get_by_role("button", name="after").get_attribute("aria-pressed") == "true"


def test_layers_show_what_was_asked_for(view):
    seen = view(several())
    seen.page.get_by_label("Variant", exact=True).select_option("int4")
    cells = seen.page.locator("#layers tbody td")
    assert cells.all_inner_texts() == ["50"] * 4
    seen.page.get_by_role("button", name="error", exact=True).first.click()
    assert cells.all_inner_texts() == ["6.0"] * 4
    cells.first.click()
    assert seen.page.locator("#detail-name").inner_text() == "layers.0.weight"


def test_a_chain_of_checkpoints_is_shown_by_step(view):
    seen = view(several())
    assert seen.page.locator("#checkpoints .bar.full").count() == 1
    assert seen.page.locator("#checkpoints .bar.delta").count() == 1
    assert seen.page.locator("#checkpoints .arc").count() == 1
    assert "2 checkpoints in 1.2 kB instead of 2.0 kB" in seen.all("#checkpoints .head p")[0]
    rows = seen.page.locator("#checkpoints tbody tr").all_inner_texts()
    assert rows[1].split("\t")[:4] == ["step-2", "2", "delta", "step-1"]


def test_a_recipe_is_shown_layer_by_layer(view):
    recipe = {**RECIPE, "notes": [HOSTILE[1]]}
    recipe["stages"] = [{"name": "tune", "steps": 1200, "seconds": 9.0, "loss": 1.25}]
    seen = view(replace(many(0), variants=[], recipe=recipe), width=390)
    assert seen.all("#recipe .figures dd")[:2] == ["5.000 → 5.500", "0.01000"]
    stages, changes = seen.page.locator("#recipe tbody").all_inner_texts()
    assert stages.split("\t") == ["tune", "1,200", "1.2500", "9.0 s"]
    assert changes.split("\t")[:5] == ["up", "GPTQ", "gptq", "1.00 %", "2.00 %"]
    assert changes.split("\t")[5:] == ["0.99000", "50.0 %", "4.25", "500 ms"]
    assert seen.all("#recipe .notes li") == [HOSTILE[1], "GPTQ: saw few tokens"]
    assert seen.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    broken = {
        **recipe,
        "sparsity": None,
        "quality": {"cosine": None, "kl": None, "perplexity": None},
    }
    assert view(replace(many(3), recipe=broken)).all("#recipe .figures dd")[0] == "\u2013"
