"""A real browser that looks at pages, and notes what goes wrong."""

import shutil
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def started():
    """Give a browser that runs without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without its sandbox, which does not start for root; it only opens pages of ours.
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class View:
    """One page in a window, with all that it said and asked for."""

    def __init__(self, browser, path, *, width=1280, height=900, scheme="light"):
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.url = path.as_uri()

    def all(self, selector):
        """The texts of all elements that fit."""
        return self.page.locator(selector).all_inner_texts()

    def press(self, *keys):
        """Press keys, wherever the focus is."""
        for key in keys:
            self.page.keyboard.press(key)

    def focused(self, expression):
        """What JavaScript says of the element with the focus."""
        return self.page.evaluate(f"document.activeElement.{expression}")

    def check(self):
        """Nothing was complained about, and nothing but the page was asked for."""
        assert self.said == []
        assert self.asked == [self.url]
