"""The page in a real browser: it opens, draws, answers the mouse and the keyboard, and keeps to itself."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
import torch
from studies import TARGETS, grid, grid_run, run_directory
from torch import nn

import espalier
from espalier.report import write

pytest.importorskip("axe_playwright_python")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine: .ci/run installs it")
NAME = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A grid of 27 runs, three of a method with a bad name, and three run directories with theta, of two targets."""
    root = tmp_path_factory.mktemp("study")
    grid(root)
    for target in TARGETS:
        described = {"method": NAME, "variant": NAME, "seed": 0, "target": target}
        path = grid_run(root, "search", target, 0, run=described)
        path.rename(path.with_name(f"{NAME.replace('/', '_')}-{target}.json"))
    for seed in range(3):
        target = 0.5 if seed == 2 else 0.25
        run_directory(root / "cnn" / f"run-{seed:03d}", seed=seed, target=target, error=0.05 + 0.01 * seed)
    write(root, figures=False)
    return (root / "report.html").as_uri()


class Opened:
    """A page, and what is to be held against it: complaints in its console, dialogs, requests to anywhere."""

    def __init__(self, browser, address, width=1280, height=900, **options):
        self.context = browser.new_context(viewport={"width": width, "height": height}, **options)
        self.address, self.complaints, self.requests = address, [], []
        page = self.page = self.context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: self.complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(address)

    def check(self):
        assert self.complaints == []
        assert self.address in self.requests
        assert [u for u in self.requests if u != self.address and not u.startswith(("data:", "blob:"))] == []


@pytest.fixture(scope="module")
def desktop(browser, address):
    """One page for all tests that leave it as it was: to read it takes a second."""
    opened = Opened(browser, address)
    draw_all(opened.page)
    yield opened
    opened.context.close()


@pytest.fixture
def page(desktop):
    desktop.page.evaluate("scrollTo(0, 0)")
    yield desktop.page
    desktop.check()


@pytest.fixture
def opened(browser, address):
    """Opens a page of one's own."""
    pages = []

    def open_page(**options):
        pages.append(Opened(browser, address, **options))
        return pages[-1].page

    yield open_page
    for one in pages:
        one.context.close()
        one.check()


def draw_all(page):
    for chart in page.locator(".plot").all():
        chart.scroll_into_view_if_needed()
        expect(chart).to_have_attribute("data-drawn", "yes")


def column(page, name):
    headings = page.locator("#runs-table thead th").all_text_contents()
    at = [heading.strip() for heading in headings].index(name) + 1
    return page.locator(f"#runs-table tbody tr:not([hidden]) > :nth-child({at})").all_text_contents()


def test_every_chart_is_drawn(page):
    sizes = page.eval_on_selector_all(
        ".plot",
        "boxes => boxes.map(box => [box.id, box.querySelector('.drawing').getBoundingClientRect().width, "
        "['line', 'band', 'bar', 'heat'].map(kind => box.querySelectorAll(`.trace.${kind}`).length)])",
    )
    drawn = {name: tuple(kinds) for name, width, kinds in sizes if width > 500}
    assert drawn == {  # lines, bands, bars, heat maps
        "s1-trade-off": (3, 0, 0, 0), "s1-learning": (2, 1, 0, 0), "s1-theta": (0, 0, 0, 1), "s1-kept": (0, 0, 2, 0),
        "s0-trade-off": (8, 0, 0, 0), "s0-learning": (3, 3, 0, 0), "s0-kept": (0, 0, 3, 0),  # the grid
    }  # fmt: skip
    pictures = page.locator(".pictures svg")
    assert pictures.count() == 2 + 3
    assert pictures.first.bounding_box()["height"] > 50
    assert "layer 1 keeps 2 of 4" in pictures.last.get_attribute("aria-label")


def test_charts_are_described_in_words(page):
    for chart in page.locator(".plot").all():
        words = page.locator(f"#{chart.get_attribute('aria-describedby')}").text_content()
        assert len(words) > 40
    expect(page.locator("#s0-trade-off-words")).to_contain_text("6.00% at 10.0% of the weights")


def test_hover_tells_the_facts_of_a_run(page):
    page.locator("#s1-trade-off").scroll_into_view_if_needed()
    dot = page.locator("#s1-trade-off .trace").first.locator(".point").first.bounding_box()
    page.mouse.move(dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2)
    label = page.locator("#s1-trade-off .hover")
    expect(label).to_contain_text("cnn/run-000")
    expect(label).to_contain_text("MACs kept: 24.0%")
    expect(label).to_contain_text("gates kept: 2/4, 1/2")
    page.mouse.move(5, 5)
    expect(label).to_have_count(0)


def test_arrows_go_from_mark_to_mark(page):
    page.locator("#s0-kept").focus()
    label = page.locator("#s0-kept .hover")
    for key, words in (("ArrowRight", "layer 1 · conv1"), ("ArrowRight", "layer 2 · conv2"), ("ArrowLeft", "layer 1")):
        page.keyboard.press(key)
        expect(label).to_contain_text(words)
    expect(label).to_contain_text("target 10%")
    expect(label).to_contain_text("5 of 16 kept")
    page.keyboard.press("Escape")
    expect(label).to_have_count(0)


def test_the_axis_is_chosen_by_keyboard_and_by_mouse(page):
    title = page.locator("#s0-trade-off .xtitle")
    expect(title).to_have_text("weights kept")
    page.locator("form[data-for=s0-trade-off] input").first.focus()
    page.keyboard.press("ArrowRight")
    expect(title).to_have_text("MACs kept")
    page.locator("form[data-for=s0-trade-off] label", has_text="Units").click()
    expect(title).to_have_text("units kept")
    page.locator("form[data-for=s0-learning] select").nth(1).select_option("training loss")
    expect(page.locator("#s0-learning .ytitle")).to_have_text("training loss")
    page.locator("form[data-for=s0-learning] select").nth(1).focus()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#s0-learning .ytitle")).to_have_text("error, if cut now · test set")
    page.locator("form[data-for=s0-trade-off] label", has_text="Weights").click()
    expect(title).to_have_text("weights kept")


def test_small_networks_can_be_set_apart(page):
    """By a logarithmic axis of sizes: 10%, 25% and 50% stand about equally far from each other."""
    marks = page.locator("#s0-trade-off .trace").nth(1).locator(".point")

    def steps():
        at = [mark.bounding_box()["x"] for mark in marks.all()]
        return (at[1] - at[0]) / (at[2] - at[1])

    assert steps() == pytest.approx(0.15 / 0.25, rel=0.02)
    page.locator("form[data-for=s0-trade-off] .log").press("Space")
    expect(page.locator("#s0-trade-off .xtick", has_text="20%")).to_be_visible()
    assert steps() == pytest.approx(math.log(2.5) / math.log(2), rel=0.02)
    page.locator("form[data-for=s0-trade-off] .log").press("Space")
    assert steps() == pytest.approx(0.15 / 0.25, rel=0.02)


def test_a_series_can_be_switched_off_by_keyboard(page):
    box = page.get_by_label("uniform, from scratch").first
    box.focus()
    page.keyboard.press("Space")
    expect(page.locator("#s0-trade-off .trace")).to_have_count(6)
    expect(box).to_be_focused()
    page.keyboard.press("Space")
    expect(page.locator("#s0-trade-off .trace")).to_have_count(8)


def test_runs_are_sorted_by_mouse_and_keyboard(page):
    heading = page.locator("#runs-table th", has_text="error")
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    errors = [float(text.rstrip("%")) for text in column(page, "error")]
    assert len(errors) == 33
    assert errors == sorted(errors)
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert [float(text.rstrip("%")) for text in column(page, "error")] == sorted(errors, reverse=True)
    page.locator("#runs-table th button", has_text="setting").press("Space")
    assert heading.get_attribute("aria-sort") == "none"
    assert [float(text.split()[1].rstrip("%")) for text in column(page, "setting")] == sorted(
        [10.0] * 10 + [25.0] * 12 + [50.0] * 11
    )


def test_runs_are_filtered(page):
    count = page.locator("#count")
    expect(count).to_have_text("33 runs")
    page.locator("#find").press_sequentially("target 25% SEED_2")
    expect(count).to_have_text("3 of 33 runs")
    assert column(page, "seed") == ["2", "2", "2"]
    page.locator("#find").fill("")
    page.locator("#method").select_option("uniform, from scratch")
    expect(count).to_have_text("9 of 33 runs")
    assert set(column(page, "method")) == {"uniform, from scratch"}
    page.locator("#find").fill("nothing is called so")
    expect(count).to_have_text("0 of 33 runs")
    page.locator("#find").fill("")
    page.locator("#method").select_option(NAME)
    assert column(page, "method") == [NAME] * 3  # shown as text; had it run, a dialog would have told
    page.locator("#method").select_option("")
    expect(count).to_have_text("33 runs")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_system_and_its_toggle(opened, scheme):
    page = opened(color_scheme=scheme)
    page.locator("#s0-trade-off").scroll_into_view_if_needed()
    expect(page.locator("#s0-trade-off .xtitle")).to_be_visible()
    other = {"light": "dark", "dark": "light"}[scheme]

    def paper():
        red = int(page.evaluate("getComputedStyle(document.body).backgroundColor").split("(")[1].split(",")[0])
        return "light" if red > 128 else "dark"

    def ink():
        return page.evaluate("getComputedStyle(document.querySelector('#s0-trade-off .xtitle')).fill")

    before = ink()
    assert paper() == scheme
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    assert paper() == other
    assert page.locator("#theme").get_attribute("aria-pressed") == str(other == "dark").lower()
    expect(page.locator("#s0-trade-off")).to_be_attached()
    assert ink() != before
    for _ in range(20):  # remembered; a busy browser may load the page anew before it has stored what the old one said
        page.reload()
        if paper() == other:
            break
        page.wait_for_timeout(100)
    assert paper() == other
    page.locator("#theme").click()
    assert paper() == scheme


def test_a_phone_never_scrolls_sideways(opened):
    page = opened(width=390, height=844, is_mobile=True, has_touch=True)
    draw_all(page)
    page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    wide = page.eval_on_selector_all(
        "main *", "all => all.filter(one => !one.closest('.pictures, svg, caption') && "
        "one.getBoundingClientRect().right > 391).map(one => one.outerHTML.slice(0, 80))",
    )  # fmt: skip
    assert wide == []


def test_a_command_is_copied_or_selected(page):
    button = page.locator(".copy").first
    button.click()
    expect(button).to_have_text(re.compile("Copied|Selected"))
    if button.text_content() == "Selected":
        assert page.evaluate("getSelection().toString()") == "espalier study --methods search"


def test_everything_can_be_reached_by_keyboard(opened):
    page = opened()
    page.locator("body").press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    order = []
    for _ in range(150):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if order[-1] == "A" and page.evaluate("document.activeElement.closest('.files') !== null"):
            break
    assert {"theme", "find", "method", "SELECT", "SUMMARY", "BUTTON"} <= set(order)
    unnamed = page.eval_on_selector_all(
        "button, input, select", "all => all.filter(one => !one.hidden && !one.closest('[hidden]') && "
        "!(one.labels && one.labels.length) && !one.textContent.trim() && !one.ariaLabel).length",
    )  # fmt: skip
    assert unnamed == 0


def test_without_scripts_the_numbers_are_there(opened):
    page = opened(java_script_enabled=False)
    assert page.locator("#runs-table tbody tr").count() == 33
    expect(page.get_by_text("The charts need JavaScript")).to_be_visible()
    page.locator("summary", has_text="The same in numbers").first.click()
    expect(page.locator("#s0-trade-off-numbers")).to_be_visible()


def test_the_page_is_small_and_nothing_moves_while_it_is_read(opened, address):
    assert len(Path(url2pathname(urlsplit(address).path)).read_bytes()) < 300_000
    page = opened()
    draw_all(page)
    page.mouse.wheel(0, 100_000)
    shifts = page.evaluate(
        "() => new Promise(done => { const moved = []; "
        "new PerformanceObserver(list => moved.push(...list.getEntries().map(one => one.value)))"
        ".observe({type: 'layout-shift', buffered: true}); setTimeout(() => done(moved), 200); })"
    )
    assert sum(shifts) < 1e-3  # while a long page arrives, a line may move by a hair


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark", "width": 390, "is_mobile": True}])
def test_axe_finds_nothing(opened, options):
    page = opened(**options)
    page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
    violations = Axe().run(page).response["violations"]
    assert [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in violations] == []


def test_every_column_is_on_a_phone_and_on_paper(opened):
    """On a phone a row is a card, on A4 the cells wrap: no cell ends outside of the sheet, and none is cut inside."""
    page = opened(width=390, height=844, is_mobile=True, has_touch=True)
    page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
    cut = (
        "all => all.filter(one => one.textContent.trim() && one.offsetParent && "
        "(one.getBoundingClientRect().right > innerWidth + 1 || one.scrollWidth > one.clientWidth + 1))"
        ".map(one => one.textContent)"
    )
    assert page.eval_on_selector_all("td, tbody th", cut) == []
    names = page.eval_on_selector_all("#runs-table tbody tr:first-child td", "all => all.map(one => one.dataset.name)")
    assert {"method", "setting", "seed", "error", "loss", "weights kept", "gates kept", "section"} <= set(names)
    page = opened(width=688, height=1000)  # A4 less its margins, in CSS pixels
    page.emulate_media(media="print")
    assert page.eval_on_selector_all("#runs-table td, #runs-table th", cut) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 688


class Residual(nn.Module):
    """Its modules are held in another order than they run in."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 10)
        self.inner = nn.Conv2d(6, 5, 3, padding=1)
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.outer = nn.Conv2d(5, 6, 3, padding=1)

    def forward(self, x):
        x = self.stem(x).relu()
        return self.head((x + self.outer(self.inner(x).relu())).mean((2, 3)))


@pytest.fixture(scope="module")
def mixed_page(tmp_path_factory, browser):
    """Run files judged on a test set, a run of `espalier train` on the same data, and one of a residual network."""
    root = tmp_path_factory.mktemp("mixed")
    for target in TARGETS:
        grid_run(root, "search", target, 0)
    trained = run_directory(root / "trained", settle_at=15)
    result = json.loads((trained / "result.json").read_text())
    (trained / "result.json").write_text(json.dumps(result | {"judged_on": "the test part, 450 examples"}))
    inputs = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = (inputs, torch.arange(32) % 10)
    about = {"epochs": 2, "batch_size": 16, "target": 0.5, "checkpoint": root / "residual", "quiet": True}
    espalier.fit(Residual(), data, loss=nn.functional.cross_entropy, **about)
    write(root, figures=False)
    opened = Opened(browser, (root / "report.html").as_uri())
    yield opened.page
    opened.check()
    opened.context.close()


def test_layers_of_a_residual_network_stand_as_data_flow(mixed_page):
    """The stem runs first, whatever module holds which tensor; in bars, in theta and in the picture alike."""
    ran = []
    model = Residual()
    for name, module in model.named_children():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    model(torch.randn(1, 1, 8, 8))
    layers = [f"{i} · {name}" for i, name in enumerate((name for name in ran if name in ("stem", "inner")), 1)]
    assert layers == ["1 · stem", "2 · inner"]
    part = mixed_page.locator("section.part", has=mixed_page.locator("h2", has_text="Residual"))
    assert part.locator(".plot.kept .xtick").all_text_contents() == layers
    assert part.locator(".plot.theta .ytick").all_text_contents() == ["layer 1 · stem (6)", "layer 2 · inner (5)"]
    assert re.findall(r"layer \d · \w+", part.locator(".layers").get_attribute("aria-label")) == [
        "layer 1 · stem",
        "layer 2 · inner",
    ]


def test_layers_are_called_in_one_way(mixed_page):
    """By their place from the input, and by the module's name where it has one: in every section."""
    ticks = mixed_page.locator(".plot.kept .xtick").all_text_contents()
    assert sorted(set(ticks)) == ["1", "1 · conv1", "1 · stem", "2", "2 · conv2", "2 · inner"]
    said = mixed_page.eval_on_selector_all(".layers title", "all => all.map(one => one.textContent)")
    assert said
    assert [text for text in said if not re.match(r"layer \d+( · \w+)?: ", text)] == []


def test_the_same_data_have_one_name(mixed_page):
    for name in ("digits", "Sequential"):
        part = mixed_page.locator("section.part", has=mixed_page.locator("h2", has_text=name))
        expect(part.locator(".plot.learning .ytitle")).to_have_text("error, if cut now · test set")
    alone = mixed_page.locator("section.part", has=mixed_page.locator("h2", has_text="Residual"))
    assert "validation" not in alone.text_content()


def test_a_curve_says_what_it_is_of_and_where_the_structure_settled(mixed_page):
    part = mixed_page.locator("section.part", has=mixed_page.locator("h2", has_text="Sequential"))
    expect(part.locator("text.moment")).to_have_text("structure settled")
    expect(part.get_by_text("if it were cut now")).to_be_visible()
    expect(part.locator(".learning + ul + figcaption")).to_contain_text("settled after 15 updates")
    moment = part.locator("path.moment").bounding_box()["x"]
    before, after = (part.locator(f".plot.learning path.{kind}") for kind in ("before", "after"))
    assert before.bounding_box()["x"] + before.bounding_box()["width"] == pytest.approx(moment, abs=2)
    assert after.bounding_box()["x"] == pytest.approx(moment, abs=2)
    assert before.get_attribute("stroke-dasharray")
    assert after.get_attribute("stroke-dasharray") is None


def test_one_size_is_a_sentence_and_no_chart(mixed_page):
    part = mixed_page.locator("section.part", has=mixed_page.locator("h2", has_text="Sequential"))
    assert part.locator(".trade-off").count() == 0
    expect(part.locator(".finding")).to_have_text("The error is 5.00% (test set), at 30.0% of the weights.")
    assert mixed_page.locator(".plot.trade-off").count() == 1  # of the grid
