"""The explorer in a real JupyterLab and browser: drawn, quick, and silent on the network."""

import statistics

import pytest
from e2e_lab import opened, shot

pytestmark = pytest.mark.slow
SLIDER_MS = 250  # generous: the machine may be busy; quiet, it takes a quarter of this
HANDLE = ".perfmodel-explorer .widget-hslider:has(label:text-is('Context tokens')) .noUi-handle"


@pytest.fixture(scope="module")
def page(root, tmp_path_factory):
    with opened(root, tmp_path_factory.mktemp("lab"), "notebooks/explorer.ipynb") as page:
        page.wait_for_selector(".perfmodel-chart svg", timeout=60_000)
        page.wait_for_selector(".perfmodel-breakdown svg", timeout=60_000)
        page.wait_for_timeout(1500)
        yield page


def curves(page):
    return page.eval_on_selector_all(
        ".perfmodel-chart svg [aria-roledescription='line mark']",
        "marks => marks.map(m => m.getAttribute('d'))",
    )


def axis_colour(page):
    """Return red, green and blue of the words at the axes, as drawn."""
    fill = page.eval_on_selector(
        ".perfmodel-chart svg .role-axis-title text", "t => getComputedStyle(t).fill"
    )
    assert fill.startswith("rgb"), fill
    return [float(x) for x in fill[fill.index("(") + 1 : -1].split(",")[:3]]


def test_curves_breakdown_and_memory_are_drawn(page, root):
    drawn = curves(page)
    assert len(drawn) == page.locator(".perfmodel-explorer input:checked").count()
    assert all(d and "NaN" not in d for d in drawn)
    assert page.locator(".perfmodel-breakdown [aria-roledescription='bar']").count() > 5
    assert page.locator(".perfmodel-memory [aria-roledescription='bar']").count() > 1
    assert (
        page.locator(".perfmodel-chart svg[aria-label*='chart']").count()
        or page.locator(".perfmodel-chart [aria-label*='chart']").count()
    )
    shot(page, root, "explorer_light")
    assert max(axis_colour(page)) < 110


def test_a_key_press_on_the_slider_moves_the_curve_soon(page):
    page.evaluate(
        """() => { const el = document.querySelector('.perfmodel-chart');
        const target = el.matches('[data-frame]') ? el : el.querySelector('[data-frame]') || el;
        window.__times = []; window.__start = 0;
        document.addEventListener('keydown', () => { window.__start = performance.now(); }, true);
        new MutationObserver(() => { if (window.__start) {
            window.__times.push(performance.now() - window.__start); window.__start = 0; } })
          .observe(target, {attributes: true, attributeFilter: ['data-frame'], subtree: true}); }"""
    )
    page.locator(HANDLE).focus()
    before = curves(page)
    for n in range(1, 15):
        page.keyboard.press("ArrowLeft" if n <= 10 else "ArrowRight")
        page.wait_for_function(f"window.__times.length >= {n}", timeout=10_000)
        page.wait_for_timeout(250)
    times = page.evaluate("window.__times")[2:]
    median = statistics.median(times)
    print(f"slider to curve: median {median:.0f} ms, longest {max(times):.0f} ms")
    assert curves(page) != before
    assert median < SLIDER_MS


def test_a_bad_plan_is_explained_in_place(page, root):
    plan = page.get_by_label("Plan", exact=True)
    plan.fill("tp=7")
    plan.press("Enter")
    page.wait_for_selector(".perfmodel-message [role=alert]", timeout=10_000)
    assert "tp" in page.inner_text(".perfmodel-message")
    assert page.locator(".jp-OutputArea-output[data-mime-type*='error']").count() == 0
    shot(page, root, "explorer_bad_plan")
    plan.fill("best")
    plan.press("Enter")
    page.wait_for_selector(".perfmodel-message [role=alert]", state="detached", timeout=10_000)
    page.wait_for_selector(".perfmodel-chart svg", timeout=10_000)


def test_a_click_picks_the_point_it_is_near(page):
    before = page.locator(".perfmodel-explorer").inner_text()
    box = page.locator(".perfmodel-chart svg").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.7)
    page.wait_for_timeout(1000)
    assert page.locator(".perfmodel-explorer").inner_text() != before


def test_logarithmic_axes_and_speed_of_light_redraw(page, root):
    page.get_by_label("Logarithmic axes").check()
    page.get_by_label("Mode", exact=True).select_option("Speed of light")
    page.wait_for_selector("text=upper bound, not a prediction", timeout=10_000)
    page.wait_for_timeout(1500)
    drawn = curves(page)
    shot(page, root, "explorer_log")
    assert drawn and all(d and "NaN" not in d for d in drawn)
    assert "speed of light" in page.locator(".perfmodel-chart svg").inner_html()
    assert page.locator(".perfmodel-chart svg").bounding_box()["height"] < 600


def test_it_fits_a_13_inch_screen(page, root):
    page.set_viewport_size({"width": 1280, "height": 800})
    page.wait_for_timeout(1000)
    page.locator(HANDLE).scroll_into_view_if_needed()
    shot(page, root, "explorer_13_inch")
    chart = page.locator(".perfmodel-chart svg").bounding_box()
    inputs = page.locator(HANDLE).bounding_box()
    notebook = page.locator(".jp-Notebook").first.bounding_box()
    assert chart["x"] > inputs["x"]  # beside the inputs, so that both are seen at once
    assert chart["x"] + chart["width"] <= notebook["x"] + notebook["width"]
    page.set_viewport_size({"width": 1440, "height": 1500})


def test_dark_theme(page, root):
    page.evaluate(
        """window.jupyterapp.commands.execute('apputils:change-theme',
        {theme: 'JupyterLab Dark'}).then(() => 1)"""
    )
    page.wait_for_function("document.body.dataset.jpThemeLight === 'false'", timeout=15_000)
    page.wait_for_timeout(2500)
    shot(page, root, "explorer_dark")
    assert min(axis_colour(page)) > 150


def test_nothing_failed_and_nothing_left_the_machine(page):
    assert page.problems == []
