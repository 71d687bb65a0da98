"""Orders from the page in a real browser: with a token, without one, and from a page of a stranger."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.page.chromium import DESK, PHONE

pytestmark = [pytest.mark.xdist_group("chromium"), pytest.mark.asyncio(loop_scope="module")]

EVIL = "<script>document.title='owned'</script>"


async def test_an_address_with_a_token_pauses_resumes_and_limits(steered, url, tab):
    async with tab(f"{url}#token={steered.access.issue()}") as page:
        await page.until("!document.querySelector('#control').hidden")
        assert await page.page.evaluate("location.href") == url, "the token is in no history"
        assert await page.page.evaluate("document.cookie + localStorage.length + sessionStorage.length") == "00"
        await page.page.fill("#pauseWhy", EVIL)
        await page.page.click("#pause")
        await page.says("#ordered", f"done: pause {EVIL} 7200.0")
        await page.says("#reason", EVIL)
        await page.page.click("#resume")
        await page.says("#activity", "training")
        await page.page.select_option("#pauseFor", "")
        await page.page.fill("#pauseWhy", "")
        await page.page.click("#pause")
        await page.says("#ordered", "done: pause by the operator None")
        await page.page.fill("#upMost", "20mbit")
        await page.page.fill("#downMost", "none")
        await page.page.click("#limit")
        await page.says("#ordered", "done: limit 20mbit ")
        await page.says("#limitsNow", "2.5 MB/s sent, no limit received")
        await page.page.fill("#upMost", "fast")
        await page.page.click("#limit")
        await page.says("#ordered", "limits: 'fast' cannot be read: write it like 20mbit")
        assert await page.page.title() != "owned"
        assert page.complaints == []
    assert len(steered.orders) == 4


async def test_without_a_token_the_page_only_shows(steered, url, tab):
    async with tab(url) as page:
        assert not await page.page.is_visible("#control")
        token = steered.access.issue()
        await page.page.evaluate(f"location.hash = 'token={token}'")  # an address pasted into the open page
        await page.until("!document.querySelector('#control').hidden")
        await page.page.reload()
        await page.says("#title", "run tiny")
        assert not await page.page.is_visible("#control"), "the session was in that page alone"
        assert page.complaints == []


async def test_a_used_token_says_where_another_comes_from(steered, url, tab):
    token = steered.access.issue()
    first = steered.access.begin(token)
    async with tab(f"{url}#token={token}") as page:
        await page.says("#steering", "atoll web")
        assert not await page.page.is_visible("#control")
    assert not steered.access.is_session(first)


async def test_a_session_that_ended_takes_the_buttons_away(steered, url, tab):
    async with tab(f"{url}#token={steered.access.issue()}") as page:
        await page.until("!document.querySelector('#control').hidden")
        steered.access._sessions.clear()
        await page.page.click("#pause")
        await page.says("#steering", "may not steer the node: use `atoll web`")
        assert not await page.page.is_visible("#control")
    assert steered.orders == []


@asynccontextmanager
async def stranger() -> AsyncIterator[str]:
    """A page of somebody else, from another port of this machine: another origin."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


async def test_a_page_of_a_stranger_orders_nothing_even_with_a_session(steered, url, chromium):
    """It sends what a browser lets it send: a request with the secret, one without its answer, and a form."""
    session = steered.access.begin(steered.access.issue())
    ask, secret = '{"v":1,"ask":{"type":"resume"}}', f"Authorization: 'Bearer {session}'"
    tries = (
        f"fetch('{url}v1/order', {{method: 'POST', headers: {{{secret}}}, body: '{ask}'}})",
        f"fetch('{url}v1/order', {{method: 'POST', mode: 'no-cors', body: '{ask}'}})",
        f"navigator.sendBeacon('{url}v1/order', '{ask}')",
    )
    async with stranger() as other, await chromium.new_context() as profile:
        page = await profile.new_page()
        await page.goto(other)
        for one in tries:
            await page.evaluate(f"() => Promise.resolve({one}).then(() => 'sent', () => 'refused')")
        async with page.expect_navigation():
            await page.evaluate(
                f"""() => {{ const form = document.createElement('form'); form.method = 'POST';
                form.action = '{url}v1/order'; document.body.append(form); form.submit(); }}"""
            )
        assert "only the node's own page" in await page.inner_text("body")
    assert steered.orders == []


async def test_control_by_keyboard_alone(steered, url, tab):
    async with tab(f"{url}#token={steered.access.issue()}") as page:
        await page.until("!document.querySelector('#control').hidden")
        keys, seen = page.page.keyboard, []
        async for focused in page.stops("limit"):
            seen.append(focused)
            if focused == "pauseWhy":
                await keys.type("games")
            if focused == "pause":
                await keys.press("Enter")
                await page.says("#ordered", "done: pause games 7200.0")
        assert [name for name in seen if name] == [
            "pauseFor",
            "pauseWhy",
            "pause",
            "resume",
            "upMost",
            "downMost",
            "limit",
        ]
        assert page.complaints == []


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("colors", ["light", "dark"])
async def test_axe_finds_nothing_serious_in_the_control(steered, url, tab, size, colors):
    async with tab(f"{url}#token={steered.access.issue()}", size=size, colors=colors) as page:
        await page.until("!document.querySelector('#control').hidden")
        await page.page.click("#pause")
        await page.says("#ordered", "done: pause")
        assert await page.axe() == []
        wide = await page.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= size["width"], "the page scrolls sideways"
        await page.shot(f"control-{colors}-{size['width']}")
        assert page.complaints == []
