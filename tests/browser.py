"""A browser for the tests of pages: start, loading of pages, and accessibility checks.

Screenshots are written to the folder of ``BILEVEL_SCREENSHOTS``, or to ``results/screenshots``.
"""

import base64
import importlib.util
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SELENIUM, AXE = map(importlib.util.find_spec, ("selenium", "axe_core_python"))
NEEDS = [
    pytest.mark.slow,
    pytest.mark.skipif(SELENIUM is None, reason="selenium is not installed"),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium or chromedriver is not installed"),
]
HAS_AXE = pytest.mark.skipif(AXE is None, reason="axe-core-python is not installed")
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
SCREENSHOTS = Path(os.environ.get("BILEVEL_SCREENSHOTS", "results/screenshots"))
VIEWS = [(width, scheme) for width in (1400, 390) for scheme in ("light", "dark")]


@contextmanager
def open_browser(profile, downloads):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.binary_location = CHROMIUM
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(120)
    try:
        yield driver
    finally:
        driver.quit()


def load(browser, address, width, scheme="light"):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.get("about:blank")  # otherwise a change of the fragment would not reload the page
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(address)


def shoot(page, name):
    taken = page.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"})
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    (SCREENSHOTS / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


def find_serious(page):
    """Return the serious and critical findings of axe-core with their elements."""
    page.execute_script(Path(AXE.origin).with_name("axe.min.js").read_text())
    only = "{resultTypes: ['violations']}"  # checks that pass are not listed by element
    found = page.execute_async_script(f"axe.run(document, {only}).then(arguments[arguments.length - 1])")["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in serious]
