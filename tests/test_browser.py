"""The page of a plan, opened and clicked through in a browser."""

from __future__ import annotations

import shutil

import pytest
import torch
import torchvision

import fxprune

from .test_html import EVIL, planned

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-background-networking"]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is on this machine: none of {', '.join(BROWSERS)}")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The pages of three models."""
    folder = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    resnet = torchvision.models.resnet18().eval()
    plans = {
        "resnet": fxprune.plan(resnet, torch.randn(1, 3, 64, 64)),
        "evil": planned("evil"),
        "half": planned("residual", ignore="first"),
    }
    for name, plan in plans.items():
        plan.to_html(folder / f"{name}.html")
    return {name: (folder / f"{name}.html", plan) for name, plan in plans.items()}


@pytest.fixture
def show(browser, files):
    """Open a page; afterwards nothing may have gone wrong in it, and nothing been fetched."""
    contexts, wrong = [], []

    def show(name, *, width=1200, scheme="light"):
        path, _ = files[name]
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda r: r.url.startswith(("file:", "data:")) or wrong.append(r.url))
        page.goto(path.as_uri())
        return page

    yield show
    for context in contexts:
        context.close()
    assert not wrong


def row(page, path):
    return page.locator(".row").filter(has=page.get_by_text(path, exact=True))


def lit(page):
    return set(page.locator(".row.member .name").all_inner_texts())


def test_layers_show_their_widths_before_and_after(show, files):
    page = show("resnet")
    assert page.locator(".row").count() == 41
    assert row(page, "layer3.0.conv1").locator(".width").inner_text() == "256 → 128"
    assert row(page, "fc").locator(".width").inner_text() == "1000"
    before = row(page, "layer3.0.conv1").locator(".before").bounding_box()["width"]
    after = row(page, "layer3.0.conv1").locator(".before i").bounding_box()["width"]
    assert after == pytest.approx(before / 2, abs=1)
    assert "11.7 M → 3.06 M" in page.locator("#totals").inner_text()


def test_a_click_lights_the_group_and_another_one_clears(show, files):
    page, plan = show("resnet"), files["resnet"][1]
    group = next(g for g in plan.groups if g.name == "layer2.0.conv2")
    assert not lit(page)
    row(page, "layer2.0.bn2").click()
    assert lit(page) == {name.rpartition(".")[0] for name, _ in group.members}
    panel = page.locator("#panel").inner_text()
    assert "add (resnet.py:" in panel and "128 units, 64 stay" in panel
    assert row(page, "layer2.0.bn2").get_attribute("aria-pressed") == "true"
    row(page, "layer2.0.bn2").click()
    assert not lit(page) and "No layer is chosen" in page.locator("#panel").inner_text()


def test_the_panel_goes_over_to_the_group_that_a_layer_reads(show):
    page = show("resnet")
    row(page, "layer2.0.conv2").click()
    page.locator("#panel button.plain", has_text="layer2.0.conv1").click()
    assert lit(page) == {"layer2.0.conv1", "layer2.0.bn1", "layer2.0.conv2"}
    page.get_by_role("button", name="Clear").click()
    assert not lit(page)


def test_the_keyboard_is_enough(show):
    page = show("resnet")
    page.keyboard.press("Tab")  # the settings
    for _ in range(3):  # the filter, the box, the first layer
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.innerText").startswith("layer1.0.conv1")
    page.keyboard.press("Enter")
    assert lit(page) == {"layer1.0.conv1", "layer1.0.bn1", "layer1.0.conv2"}
    page.keyboard.press("Enter")
    assert not lit(page)
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    assert not lit(page)
    assert page.evaluate("document.activeElement.innerText").startswith("layer1.0.conv1")


def test_layers_are_filtered(show):
    page = show("resnet")
    page.get_by_label("Filter layers").fill("layer1.")
    assert page.locator(".row:visible").count() == 8
    page.get_by_label("only those that make channels").check()
    assert page.locator(".row:visible .kind").all_inner_texts() == ["Conv2d"] * 4


def test_reasons_are_filtered(show, files):
    page, plan = show("half"), files["half"][1]
    rows = page.locator("#reasons tr:visible")
    assert rows.count() == len(plan.skipped) + len(plan.notes) == 4
    page.get_by_label("Filter by name or reason").fill("not called")
    assert rows.all_inner_texts() == ["never\tit is not called on the example input"]
    assert page.locator("#reason-count").inner_text() == "1 of 4"
    page.get_by_label("Filter by name or reason").fill("")
    page.get_by_label("One reason only").select_option("it is an output of the model")
    assert rows.count() == 1 and rows.inner_text().startswith("late")


def test_every_pruned_group_has_its_bars(show, files):
    page, plan = show("resnet"), files["resnet"][1]
    cards = page.locator(".score")
    assert cards.count() == sum(len(g.removed) > 0 for g in plan.groups) == 12
    assert cards.nth(0).locator("svg").get_attribute("aria-label") == "32 removed, 32 kept"
    cards.nth(1).click()
    assert lit(page) == {"layer1.0.conv1", "layer1.0.bn1", "layer1.0.conv2"}


def test_names_are_shown_as_they_are(show):
    page = show("evil")
    assert page.locator(".row .name").first.inner_text() == EVIL
    assert page.locator("h1").inner_text().startswith("Evil<script>")
    row(page, EVIL).click()
    assert EVIL in page.locator("#panel").inner_text()
    page.locator("#code summary").click()
    assert "view" in page.locator("#code pre").inner_text()


@pytest.mark.parametrize("width", [320, 390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen(show, width, scheme):
    page = show("resnet", width=width, scheme=scheme)
    row(page, "layer4.1.conv2").click()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert row(page, "layer4.1.conv2").is_visible()
    seen = page.locator("#panel").bounding_box()
    assert seen["x"] >= 0 and seen["x"] + seen["width"] <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
    assert dark == (scheme == "dark")
