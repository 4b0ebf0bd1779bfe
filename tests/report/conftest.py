"""A browser for the report's page, shared by the tests of a file, and a page of synthetic records."""

import pytest
from browser_cases import CHROMIUM, NAMES
from report_cases import make_results, page_of


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("jinja2")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the path")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def address(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    (folder / "page.html").write_text(page_of(make_results(folder / "results")), encoding="utf-8")
    return (folder / "page.html").as_uri()


@pytest.fixture
def visit(browser):
    """Open pages, each watched: an error, a message on the console or a request beyond the page fails the test."""
    contexts, troubles = [], []

    def open_page(uri, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(str(error)))

        def answer(route):
            if route.request.url == uri:
                return route.continue_()
            troubles.append(f"asked for {route.request.url}")
            return route.abort()

        page.route(lambda url: not url.startswith("data:"), answer)
        page.goto(uri)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []
