"""The catalogue in a real JupyterLab and browser: drawn, with sources, silent on the network."""

import pytest
from e2e_lab import opened, shot

pytestmark = pytest.mark.slow
CHARTS = ".perfmodel-catalogue-chart"


@pytest.fixture(scope="module")
def page(root, tmp_path_factory):
    with opened(root, tmp_path_factory.mktemp("lab"), "notebooks/catalogue.ipynb") as page:
        page.wait_for_function(
            f"document.querySelectorAll('{CHARTS} svg').length === 2", timeout=60_000
        )
        page.wait_for_timeout(1500)
        yield page


def part(page, n):
    """The catalogue of machines (0) or models (1)."""
    return page.locator(".perfmodel-catalogue").nth(n)


def choose(page, n, view):
    part(page, n).get_by_role("button", name=view, exact=True).click()
    page.wait_for_timeout(1200)


def texts_that_overlap(page, n):
    """Pairs of a chart's texts whose boxes cover each other."""
    boxes = page.locator(CHARTS).nth(n).locator("svg text").evaluate_all(
        "all => all.map(t => { const b = t.getBoundingClientRect();"
        " return [t.textContent, b.left, b.top, b.right, b.bottom]; }).filter(b => b[0])"
    )  # fmt: skip
    return [
        (a[0], b[0])
        for i, a in enumerate(boxes)
        for b in boxes[:i]
        if min(a[3], b[3]) - max(a[1], b[1]) > 1 and min(a[4], b[4]) - max(a[2], b[2]) > 3
    ]


MACHINE_VIEWS = ["Ridge points", "Bytes per FLOP", "Memory", "Power", "Price"]
MODEL_VIEWS = ["Parameters", "Weights", "Weights (GB)", "KV per token", "Cache moved", "FLOPs"]


@pytest.mark.parametrize(
    ("n", "view"), [(0, v) for v in MACHINE_VIEWS] + [(1, v) for v in MODEL_VIEWS]
)
def test_every_view_is_drawn_and_its_labels_are_apart(page, root, n, view):
    choose(page, n, view)
    part(page, n).scroll_into_view_if_needed()
    shot(page, root, f"catalogue_{n}_{view.lower().replace(' ', '_')}")
    svg = page.locator(CHARTS).nth(n).locator("svg")
    assert "NaN" not in svg.inner_html()
    assert svg.locator("[role=graphics-symbol]").count() > 10
    assert texts_that_overlap(page, n) == []


def test_a_mark_and_a_number_say_their_source(page, root):
    choose(page, 0, "Ridge points")
    mark = page.locator(CHARTS).first.locator("[aria-roledescription='point']").first
    mark.scroll_into_view_if_needed()
    mark.hover()
    page.wait_for_selector("#vg-tooltip-element.visible", timeout=5000)
    page.wait_for_timeout(300)
    shot(page, root, "catalogue_tooltip")
    tip = page.inner_text("#vg-tooltip-element")
    assert "Source" in tip and "memory.bandwidth" in tip and "[vendor]" in tip
    # the whole source is there to be read, none of it cut off
    assert page.evaluate(
        "[...document.querySelectorAll('#vg-tooltip-element td.value')]"
        ".every(td => td.scrollHeight <= td.clientHeight + 1)"
    )
    cells = part(page, 0).locator("table td")
    assert cells.count() > 100
    titles = cells.evaluate_all("all => all.map(x => x.title)")
    assert all(titles)


def test_inputs_change_chart_and_table(page):
    before = page.locator(CHARTS).first.locator("svg").inner_html()
    part(page, 0).get_by_label("Machines", exact=True).select_option(["h200-nvl8", "gb300-nvl72"])
    page.wait_for_timeout(1200)
    svg = page.locator(CHARTS).first.locator("svg")
    assert svg.inner_html() != before
    assert part(page, 0).locator("table tbody tr").count() == 2


def test_dark_theme(page, root):
    page.evaluate(
        """window.jupyterapp.commands.execute('apputils:change-theme',
        {theme: 'JupyterLab Dark'}).then(() => 1)"""
    )
    page.wait_for_function("document.body.dataset.jpThemeLight === 'false'", timeout=15_000)
    choose(page, 1, "FLOPs")
    page.wait_for_timeout(1500)
    part(page, 1).scroll_into_view_if_needed()
    shot(page, root, "catalogue_dark")
    for text in ("axis-label", "text"):  # names of the cards, and the numbers beside the bars
        fill = page.locator(CHARTS).nth(1).locator(f"svg .role-{text} text, svg .mark-{text} text")
        colour = fill.last.evaluate("t => getComputedStyle(t).fill")
        assert min(float(x) for x in colour[4:-1].split(",")[:3]) > 150, (text, colour)


def test_nothing_failed_and_nothing_left_the_machine(page):
    assert page.problems == []
