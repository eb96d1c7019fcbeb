"""A headless browser for the tests of the page."""

import shutil
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def start_browser():
    """Yield a headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The sandbox does not start for root; only our own pages are opened.
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class View:
    """One open page, with its console messages and network requests."""

    def __init__(self, browser, path, *, width=1280, height=900, scheme="light"):
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.messages, self.requests = [], []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.url = path.as_uri()

    def texts(self, selector):
        """Return the texts of all matching elements."""
        return self.page.locator(selector).all_inner_texts()

    def press(self, *keys):
        """Press keys, sent to the focused element."""
        for key in keys:
            self.page.keyboard.press(key)

    def eval_focused(self, expression):
        """Evaluate a JavaScript property or method of the focused element."""
        return self.page.evaluate(f"document.activeElement.{expression}")

    def check(self):
        """Assert that there were no console messages, and no request but the page itself."""
        assert self.messages == []
        assert self.requests == [self.url]
