"""The page in a browser: it draws, it switches, it fits, and it runs nothing but its own script."""

import shutil

import pytest

from bilevel.bench.report import write_report
from tests.bench import tables

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium or chromedriver is not installed"),
]
ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
QUADRATIC = "#section-2"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return write_report(tables.store(), tmp_path_factory.mktemp("page"), title=tables.HOSTILE).as_uri()


@pytest.fixture
def page(browser, address):
    """The page, loaded anew at 1280 pixels; a test that leaves an error in the console fails."""
    load(browser, address, 1280)
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def load(browser, address, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(address)


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
    script = "return [...document.querySelectorAll(arguments[0] + ' .g-xtitle, ' + arguments[0] + ' .g-ytitle')]"
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
    assert [trace["name"] for trace in drawn] == ["SABA", "SOBA", "SRBA"]
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
    assert axis_types(page) == ["linear", "log"]
    choose(page, "metric", "F(z, x)")
    assert titles(page)[1] == "F(z, x)" and lines(page) != before
    assert axis_types(page) == ["linear", "linear"]
    assert traces(page)[0]["y"][-1] == pytest.approx(0.1, rel=1e-3)


def test_both_axes_can_be_made_logarithmic_and_linear(page):
    click(page, "input[name=logx]")
    click(page, "input[name=logy]")
    assert axis_types(page) == ["log", "linear"]
    assert len(lines(page)) == 3


def test_the_legend_hides_and_shows_a_solver_whatever_is_switched(page):
    click(page, ".legend button:nth-child(2)")
    assert [trace["name"] for trace in traces(page)] == ["SABA", "SRBA"] and len(lines(page)) == 2
    choose(page, "metric", "‖∇h(x)‖²")
    assert [trace["name"] for trace in traces(page)] == ["SABA", "SRBA"]
    assert len(lines(page, "#section-1")) == 3
    click(page, ".legend button:nth-child(2)")
    assert len(lines(page)) == 3


def test_a_solver_without_a_curve_is_named(page):
    missing = page.find_element("css selector", f"{QUADRATIC} .missing").text
    assert missing == "No finite curve of h(x) − min h against seconds: StocBiO."


def test_pointing_at_a_curve_shows_the_setting(page):
    plot = page.find_element("css selector", f"{QUADRATIC} .plot")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    spot = page.execute_script(
        "const g = arguments[0], l = g._fullLayout, t = g.data.find(t => t.name === 'SABA'), i = 30;"
        "return [l.xaxis._offset + l.xaxis.d2p(t.x[i]) - g.clientWidth / 2,"
        " l.yaxis._offset + l.yaxis.d2p(t.y[i]) - g.clientHeight / 2]",
        plot,
    )
    webdriver.ActionChains(page).move_to_element_with_offset(plot, *(round(place) for place in spot)).perform()
    label = wait_for(page, f"{QUADRATIC} .hoverlayer .hovertext")
    assert "SABA" in label and "step_size 0.1" in label and "20–80 %" in label


def wait_for(page, selector):
    from selenium.webdriver.support.ui import WebDriverWait

    found = WebDriverWait(page, 10).until(lambda driver: driver.find_elements("css selector", selector))
    return found[0].get_attribute("textContent")


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
    assert tables.HOSTILE in text and "onerror=" in text
    assert page.title == tables.HOSTILE
    assert page.execute_script("return window.hacked === undefined && !document.querySelector('main img')")


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
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    load(page, address, 1280)
    script = (
        "return [getComputedStyle(document.body).backgroundColor, document.querySelector('.plot').layout.font.color]"
    )
    assert page.execute_script(script) == ["rgb(20, 23, 26)", "#e6e9ec"]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
