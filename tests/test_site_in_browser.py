"""The site built by `make docs` in a browser: it is accessible in light and dark mode, and search finds pages."""

import functools
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser import HAS_AXE, NEEDS, VIEWS, find_serious, load, open_browser, shoot

SITE = Path(__file__).parents[1] / "site"
pytestmark = [*NEEDS, pytest.mark.skipif(not SITE.exists(), reason="there is no site; `make docs` builds it")]
PAGES = ["", "gallery/", "tutorials/comparing/", "reference/"]  # each kind of page
SCHEMES = {"light": "default", "dark": "slate"}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        return None


@pytest.fixture(scope="module")
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile"), tmp_path_factory.mktemp("downloads")) as driver:
        yield driver


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "out of patience"
        time.sleep(0.05)


def open_page(browser, address, page, width, scheme):
    load(browser, address + page, width, scheme)

    def has_scheme():
        if browser.execute_script("return document.body.getAttribute('data-md-color-scheme')") == SCHEMES[scheme]:
            return True
        # The theme stores the color scheme of the first visit.
        browser.execute_script("localStorage.clear()")
        browser.refresh()
        return False

    wait_for(has_scheme)


@HAS_AXE
@pytest.mark.parametrize("page", PAGES)
def test_an_accessibility_check_finds_nothing_serious(browser, address, page):
    for width, scheme in VIEWS:
        open_page(browser, address, page, width, scheme)
        shoot(browser, f"site-{page.strip('/').replace('/', '-') or 'home'}-{width}-{scheme}")
        assert find_serious(browser) == []


def test_no_page_is_wider_than_a_phone(browser, address):
    for page in PAGES:
        open_page(browser, address, page, 390, "light")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, page


def test_search_finds_a_page(browser, address):
    open_page(browser, address, "", 1400, "light")
    browser.execute_script("document.querySelector('#__search').click()")
    field = browser.find_element("css selector", "input.md-search__input")
    wait_for(field.is_displayed)
    field.send_keys("hypergradient")
    links = ".md-search-result__link"
    wait_for(lambda: browser.find_elements("css selector", links))
    assert any("networks" in one.get_attribute("href") for one in browser.find_elements("css selector", links))
