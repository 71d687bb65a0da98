"""The page in a real Chromium without a window, and everything that it complains about."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.waiting import HANGS_S, eventually

NAMES = ("chromium", "chromium-browser", "google-chrome")
SHOTS = Path(__file__).resolve().parents[2] / ".page-shots"
"""Screenshots of the newest run of `make page-test`; ignored by git."""
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}


def missing() -> str:
    """Why the page cannot be opened here; empty if it can."""
    if not any(map(shutil.which, NAMES)):
        return "no Chromium (Debian: apt-get install chromium)"
    try:
        import axe_playwright_python  # noqa: F401
        import playwright  # noqa: F401
    except ImportError as error:
        return f"no {error.name} (pip install -e '.[dev]')"
    return ""


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    """A Chromium of its own, with a new profile."""
    from playwright.async_api import async_playwright

    path = next(filter(None, map(shutil.which, NAMES)))
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to have one as root
    async with async_playwright() as driver:
        args = [*sandbox, "--disable-dev-shm-usage"]
        found = await driver.chromium.launch(executable_path=path, args=args, timeout=HANGS_S * 1000)
        try:
            yield found
        finally:
            await found.close()


TAB_STOPS = 40
"""Most elements of the page that take the focus before the one that a test looks for."""


class Tab:
    """One tab that shows the page. `complaints`: errors and warnings of the console, exceptions, refused loads."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda said: self._note(said.type, said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("requestfailed", lambda request: self.complaints.append(f"{request.url} {request.failure}"))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning", "assert"):
            self.complaints.append(f"{kind}: {text}")

    async def stops(self, until: str) -> AsyncIterator[str]:
        """Press Tab until the element with the id `until` has the focus; each id that has it on the way."""
        for _ in range(TAB_STOPS):
            await self.page.keyboard.press("Tab")
            focused: str = await self.page.evaluate("document.activeElement.id")
            yield focused
            if focused == until:
                return
        raise AssertionError(f"{until} has no focus after {TAB_STOPS} stops")

    async def text(self, selector: str) -> str:
        found: str = await self.page.inner_text(selector)
        return found

    async def until(self, condition: str, limit_s: float = HANGS_S) -> None:
        """Wait until a JavaScript expression is true."""
        # Not the driver's own wait: it would evaluate a text in the page, which the page's policy forbids.
        await eventually(lambda: self.page.evaluate(condition), limit_s)

    async def says(self, selector: str, text: str, limit_s: float = HANGS_S) -> None:
        """Wait until an element has this text in it."""
        script = "([where, text]) => Boolean(document.querySelector(where)?.textContent.includes(text))"
        await eventually(lambda: self.page.evaluate(script, [selector, text]), limit_s)

    async def shot(self, name: str) -> Path:
        """Keep a screenshot of the whole page."""
        SHOTS.mkdir(exist_ok=True)
        path = SHOTS / f"{name}.png"
        await self.page.screenshot(path=path, full_page=True)
        return path

    async def axe(self) -> list[str]:
        """What axe-core finds serious or critical, a line for each."""
        from axe_playwright_python.async_playwright import Axe

        found = await Axe().run(self.page)
        return [
            f"{issue['id']}: {issue['help']}: {[node['html'][:120] for node in issue['nodes'][:3]]}"
            for issue in found.response["violations"]
            if issue["impact"] in ("serious", "critical")
        ]


@asynccontextmanager
async def tab(url: str, *, size: dict[str, int] = DESK, colors: str = "light") -> AsyncIterator[Tab]:
    """The page at `url`, drawn once from data, in a browser of its own."""
    async with browser() as chromium, tab_in(chromium, url, size=size, colors=colors) as opened:
        yield opened


@asynccontextmanager
async def tab_in(
    chromium: Any, url: str, *, size: dict[str, int] = DESK, colors: str = "light"
) -> AsyncIterator[Tab]:
    """The page at `url`, drawn once from data, with a new profile of this browser."""
    context = await chromium.new_context(viewport=size, color_scheme=colors, device_scale_factor=1)
    try:
        context.set_default_timeout(HANGS_S * 1000)
        opened = Tab(await context.new_page())
        await opened.page.goto(url)
        await opened.until("document.querySelector('#facts').children.length > 0")
        yield opened
    finally:
        await context.close()
