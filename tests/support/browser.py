"""Debian's Chromium, or another one that is installed, driven by Playwright; tests skip where either is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from tests.support.commands import wait_for

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
Scheme = Literal["dark", "light"]
_SLOW_MS = 60_000  # machines under load
_SERIOUS = ("serious", "critical")


@dataclass
class Opened:
    """A page with what it has written to the console, failed with and asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def go(self, address: str) -> None:
        """Open an address and wait until it is loaded."""
        self.page.goto(address, wait_until="load")

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true; the page's own policy may forbid Playwright's way of waiting."""
        wait_for(lambda: self.page.evaluate(expression))

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))

    def barriers(self) -> list[str]:
        """What axe finds that is serious or critical for people with disabilities (https://github.com/dequelabs/axe-core)."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is missing")
        found = axe.Axe().run(self.page).response["violations"]
        return [
            f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}"
            for each in found
            if each["impact"] in _SERIOUS
        ]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium; close it with everything that it has open. Skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; on Debian: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is missing: pip install playwright")
    with playwright.sync_playwright() as driver:
        # Root, as in containers, has no sandbox.
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield Browser(started)
        finally:
            started.close()


class Browser:
    """A started Chromium."""

    def __init__(self, started: Any) -> None:
        self._started = started

    def open(self, address: str = "", width: int = 1280, height: int = 900, scheme: Scheme = "light") -> Opened:
        """Open a page that shares nothing with the others."""
        context = self._started.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=False
        )
        page = context.new_page()
        page.set_default_timeout(_SLOW_MS)
        opened = Opened(page)
        page.on("console", lambda said: opened.complaints.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: opened.complaints.append(f"error: {error}"))
        page.on("request", lambda request: opened.requests.append(request.url))
        if address:
            opened.go(address)
        return opened
