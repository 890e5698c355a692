"""The page in a browser: plots, controls, layout, accessibility, and no script except its own.

Screenshots are written to the folder of ``BILEVEL_SCREENSHOTS``, or to ``results/screenshots``.
"""

import json

import pytest

from bilevel.bench.page import write_report
from tests.bench import fake_store
from tests.browser import HAS_AXE, NEEDS, VIEWS, find_serious, load, open_browser, shoot

pytestmark = NEEDS
QUADRATIC = "#section-2"


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(tmp_path_factory, downloads):
    with open_browser(tmp_path_factory.mktemp("profile"), downloads) as driver:
        yield driver


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return write_report(fake_store.store(), tmp_path_factory.mktemp("page")).as_uri()


@pytest.fixture
def page(browser, address):
    """The page, loaded again at 1280 pixels; a test that leaves an error in the console fails."""
    load(browser, address, 1280)
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def lines(page, section=QUADRATIC):
    """Return the visible curves of a section as Plotly drew them: those with a stroke, unlike bands."""
    return page.execute_script(
        "return [...document.querySelectorAll(arguments[0] + ' .scatterlayer .trace path.js-line')]"
        ".filter(path => parseFloat(path.style.strokeWidth) > 0).map(path => path.getAttribute('d'))",
        section,
    )


def traces(page, section=QUADRATIC):
    return page.execute_script(
        "return document.querySelector(arguments[0] + ' .plot').data.filter(t => t.hoverinfo === 'text')"
        ".map(t => ({name: t.name, x: t.x, y: t.y, text: t.text, dash: t.line.dash, color: t.line.color}))",
        section,
    )


def titles(page):
    script = (
        "return [...document.querySelectorAll(arguments[0] + ' .plot .g-xtitle, ' + arguments[0] + ' .plot .g-ytitle')]"
    )
    return page.execute_script(script + ".map(title => title.textContent)", QUADRATIC)


def choose(page, name, label):
    found = page.find_element("css selector", f"{QUADRATIC} select[name={name}]")
    found.find_element("xpath", f"./option[.='{label}']").click()


def click(page, selector):
    page.find_element("css selector", f"{QUADRATIC} {selector}").click()


def axis_types(page):
    return page.execute_script(
        "const l = document.querySelector(arguments[0] + ' .plot')._fullLayout; return [l.xaxis.type, l.yaxis.type]",
        QUADRATIC,
    )


def test_every_curve_is_drawn_in_a_look_of_its_own(page):
    assert len(lines(page)) == len(lines(page, "#section-1")) == 3
    drawn = traces(page)
    assert [trace["name"] for trace in drawn] == ["SRBA", "SABA", "SOBA"]
    assert len({trace["color"] for trace in drawn}) == len({trace["dash"] for trace in drawn}) == 3
    for here, there in zip(drawn, traces(page, "#section-1"), strict=True):
        assert (here["color"], here["dash"]) == (there["color"], there["dash"])


def test_the_axis_can_be_switched(page):
    assert titles(page) == ["seconds", "h(x) − min h"]
    seconds, paths = traces(page)[0]["x"], lines(page)
    choose(page, "axis", "oracle calls")
    assert titles(page)[0] == "oracle calls"
    assert traces(page)[0]["x"][-1] == 20_000 != seconds[-1]
    assert lines(page) != paths and len(lines(page)) == 3
    choose(page, "axis", "epochs")
    assert titles(page)[0] == "epochs" and traces(page)[0]["x"][-1] == 20


def test_the_metric_can_be_switched_and_brings_its_scale(page):
    before = lines(page)
    assert axis_types(page) == ["log", "log"]
    choose(page, "metric", "F(z, x)")
    assert titles(page)[1] == "F(z, x)" and lines(page) != before
    assert traces(page)[0]["y"][-1] == pytest.approx(0.1, rel=1e-3)
    assert axis_types(page) == ["log", "log"], "it falls by a factor of 15"


def test_both_axes_can_be_made_logarithmic_and_linear(page):
    click(page, "input[name=logx]")
    click(page, "input[name=logy]")
    assert axis_types(page) == ["linear", "linear"]
    assert len(lines(page)) == 3


def test_the_legend_hides_and_shows_a_solver_whatever_is_switched(page):
    click(page, ".legend button:nth-child(2)")
    assert [trace["name"] for trace in traces(page)] == ["SRBA", "SOBA"] and len(lines(page)) == 2
    choose(page, "metric", "‖∇h(x)‖²")
    assert [trace["name"] for trace in traces(page)] == ["SRBA", "SOBA"]
    assert len(lines(page, "#section-1")) == 3
    click(page, ".legend button:nth-child(2)")
    assert len(lines(page)) == 3


def test_a_solver_without_a_curve_is_named(page):
    missing = page.find_element("css selector", f"{QUADRATIC} .missing").text
    assert missing == "No finite curve of h(x) − min h against seconds: StocBiO."


def test_pointing_at_a_curve_shows_the_setting(page):
    from selenium.webdriver import ActionChains

    plot = page.find_element("css selector", f"{QUADRATIC} .plot")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    spot = page.execute_script(
        "const g = arguments[0], l = g._fullLayout, t = g.data.find(t => t.name === 'SABA'), i = 30;"
        "return [l.xaxis._offset + l.xaxis.d2p(t.x[i]) - g.clientWidth / 2,"
        " l.yaxis._offset + l.yaxis.d2p(t.y[i]) - g.clientHeight / 2]",
        plot,
    )
    ActionChains(page).move_to_element_with_offset(plot, *(round(place) for place in spot)).perform()
    label = wait_for(page, f"{QUADRATIC} .hoverlayer .hovertext")
    assert "SABA" in label and "step_size 0.1" in label and "20–80 %" in label


def wait_for(page, selector):
    from selenium.webdriver.support.ui import WebDriverWait

    found = WebDriverWait(page, 10).until(lambda driver: driver.find_elements("css selector", selector))
    return found[0].get_attribute("textContent")


def test_the_address_holds_the_view(page):
    choose(page, "axis", "epochs")
    click(page, ".legend button:nth-child(2)")
    click(page, "input[name=logy]")
    click(page, "[data-table=finals] thead th:nth-child(2) button")
    address = page.current_url
    load(page, address, 1280)
    assert titles(page)[0] == "epochs" and axis_types(page) == ["log", "linear"]
    assert [trace["name"] for trace in traces(page)] == ["SRBA", "SOBA"]
    assert (
        page.find_element("css selector", f"{QUADRATIC} .legend button:nth-child(2)").get_attribute("aria-pressed")
        == "false"
    )
    head = page.find_element("css selector", f"{QUADRATIC} [data-table=finals] thead th:nth-child(2)")
    assert head.get_attribute("aria-sort") == "ascending"


def column(page, name, number):
    rows = f"{QUADRATIC} [data-table={name}] tbody tr > :nth-child({number})"
    return [cell.text for cell in page.find_elements("css selector", rows)]


def test_tables_sort_by_a_column_with_missing_numbers_last(page):
    assert column(page, "finals", 1) == ["SRBA", "SABA", "SOBA", "StocBiO"]
    button = "[data-table=finals] thead th:nth-child(2) button"
    click(page, button)
    assert column(page, "finals", 1) == ["SRBA", "SABA", "SOBA", "StocBiO"]
    click(page, button)
    assert column(page, "finals", 1) == ["SOBA", "SABA", "SRBA", "StocBiO"]


def test_every_control_can_be_reached_and_used_by_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    button = page.find_element("css selector", f"{QUADRATIC} [data-table=finals] thead th:first-child button")
    button.send_keys(Keys.ENTER)
    assert column(page, "finals", 1) == ["SABA", "SOBA", "SRBA", "StocBiO"]
    outline = page.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.find_element("css selector", f"{QUADRATIC} .legend button").send_keys(Keys.SPACE)
    assert [trace["name"] for trace in traces(page)] == ["SABA", "SOBA"]


def test_a_narrow_page_has_a_hint_about_hidden_columns(page, address):
    load(page, address, 390)
    hint = page.find_element("css selector", f"{QUADRATIC} [data-table=finals] .hint")
    assert hint.is_displayed() and "scroll sideways" in hint.text
    load(page, address, 1400)
    assert not page.find_element("css selector", f"{QUADRATIC} [data-table=settings] .hint").is_displayed()


def test_heat_maps_show_each_setting_and_diverged_seeds(page):
    notes = page.execute_script(
        "return document.querySelector(arguments[0] + ' .heat').layout.annotations.map(note => note.text)", QUADRATIC
    )
    assert sum(note == "✕" for note in notes) == 3 + 3, "StocBiO everywhere, the others at step 1"
    assert sum("<b>" in note for note in notes) == len(fake_store.RATES)


def wait_for_file(page, folder, name):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(page, 20).until(lambda _: (folder / name).exists() and (folder / name).stat().st_size)
    return (folder / name).read_bytes()


def test_data_and_figures_can_be_downloaded(page, downloads):
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
    for what in ("curves", "heat"):
        for kind, begin in (("svg", b"<svg"), ("png", b"\x89PNG"), ("csv", b"solver,")):
            click(page, f"[data-save={what}][data-kind={kind}]")
            assert wait_for_file(page, downloads, f"section-2-{what}.{kind}").startswith(begin)
    click(page, "[data-table=finals] [data-save=table]")
    rows = wait_for_file(page, downloads, "section-2-finals.csv").decode().splitlines()
    assert rows[0].startswith("Solver,") and rows[1].startswith("SRBA,") and len(rows) == 5
    page.find_element("css selector", "[data-save=all]").click()
    assert json.loads(wait_for_file(page, downloads, "report.json"))["solvers"][0]["name"] == "SRBA"


@HAS_AXE
@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_an_accessibility_check_finds_nothing_serious(page, address, width, scheme):
    load(page, address, width, scheme)
    shoot(page, f"report-{width}-{scheme}")
    assert find_serious(page) == []


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_never_scrolls_sideways(page, address, width):
    load(page, address, width)
    scroll, visible = page.execute_script(
        "const root = document.documentElement; return [root.scrollWidth, root.clientWidth]"
    )
    assert scroll <= visible <= width
    wider = page.execute_script(
        "return [...document.querySelectorAll('.plot .main-svg, .scroll, .controls, .legend')]"
        ".filter(box => box.getBoundingClientRect().right > document.documentElement.clientWidth).length"
    )
    assert wider == 0
    assert len(lines(page)) == 3


def test_hostile_strings_are_shown_and_run_nothing(page):
    text = page.find_element("tag name", "body").text
    assert fake_store.HOSTILE in text and "onerror=" in text
    assert page.title == f"Benchmark: {fake_store.HOSTILE}"
    assert page.execute_script("return window.hacked === undefined && !document.querySelector('main img')")


def test_markup_in_every_name_of_a_store_is_text(browser, tmp_path):
    table = fake_store.hostile(fake_store.store())
    load(browser, write_report(table, tmp_path, budgets=fake_store.TAG).as_uri(), 1280)
    for option in browser.find_elements("css selector", f"{QUADRATIC} select[name=metric] option"):
        option.click()  # the metric's own name becomes the title of an axis
        assert browser.execute_script(
            "return window.hacked === undefined && !document.querySelector('body img, body a:not([href^=\"#\"])')"
        )
    assert fake_store.TAG in browser.find_element("tag name", "body").text
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_an_injected_script_would_be_refused(browser, address):
    load(browser, address, 1280)
    browser.execute_script(
        "const script = document.createElement('script'); script.textContent = 'window.hacked = 1';"
        "document.body.append(script)"
    )
    assert browser.execute_script("return window.hacked === undefined")
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))


def test_nothing_is_loaded_from_elsewhere(page):
    names = page.execute_script("return performance.getEntries().map(entry => [entry.entryType, entry.name])")
    loaded = [name for kind, name in names if kind in ("navigation", "resource")]
    assert loaded and all(name.startswith(("file:", "data:", "blob:")) for name in loaded)


def test_a_dark_scheme_is_followed(page, address):
    load(page, address, 1280, "dark")
    script = (
        "return [getComputedStyle(document.body).backgroundColor, document.querySelector('.plot').layout.font.color]"
    )
    assert page.execute_script(script) == ["rgb(20, 23, 26)", "#e6e9ec"]
