"""The page as a browser runs it: it lives, says nothing wrong, and everybody can use it."""

import time

import msgspec
import pytest

from atoll.node.daemon.web.page_data import SampleText
from atoll.protocols.local.privacy_now import PrivacyNow
from tests.node.daemon.web.fed_node import PEER_ROW
from tests.page.chromium import DESK, PHONE

pytestmark = [pytest.mark.xdist_group("chromium"), pytest.mark.asyncio(loop_scope="module")]
"""One browser at a time."""

UPDATE_MAX_S = 1.0
EVIL = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
OTHER = "12D3KooWLateLateLateLateLateLateLateLateLateLateLate"


async def test_it_lives_and_says_nothing_wrong(node, url, tab):
    async with tab(url) as page:
        await page.says("#title", "…sCdFk6TW otter · run tiny")
        await page.says("#runText", "round 7 of 54")
        await page.until("document.querySelectorAll('canvas').length === 3")  # no validation yet
        assert "nothing yet" in await page.text("#valid")
        node.row(7, final=False)
        node.rows[-1].val_bpb = 3.25
        node.now = msgspec.structs.replace(node.now, round=8, activity="training", step=3)
        await page.says("#runText", "round 8 of 54")
        await page.says("#stepText", "step 3 of 8")
        await page.until("document.querySelectorAll('canvas').length === 4")
        node.lines.append(msgspec.structs.replace(node.lines[0], level="warning", message="the disk is slow"))
        await page.says("#lines .warning", "the disk is slow")
        await page.says("#events .warning", "2027-01-15 08:00:00 trouble error=…:4710 is taken")
        node.events.append(msgspec.structs.replace(node.events[0], event="joined", text="count=1"))
        await page.says("#events", "joined count=1")
        assert await page.page.locator("#events li").count() == 2
        assert "192.0.2" not in await page.text("body")
        assert page.complaints == []


async def test_a_change_is_on_the_page_within_a_second(node, url, tab):
    async with tab(url) as page:
        took_s = []
        for step in range(1, 9):
            began = time.monotonic()
            node.now = msgspec.structs.replace(node.now, activity="training", step=step)
            await page.says("#stepText", f"step {step} of 8")
            took_s.append(time.monotonic() - began)
        assert min(took_s) <= UPDATE_MAX_S, took_s  # the machine may be busy; tests/page/test_bars.py has the most
        assert page.complaints == []


async def test_alarms_have_colours_and_words(node, url, tab):
    async with tab(url) as page:
        await page.until("document.body.dataset.level === 'good'")
        node.now = msgspec.structs.replace(node.now, members=1, peers=0)
        await page.says("#alarms .warn", "alone: no other member")
        node.now = msgspec.structs.replace(node.now, trouble="the disk is full: free some")
        await page.says("#alarms .bad", "trouble: the disk is full")
        await page.until("document.body.dataset.level === 'bad' && document.title.startsWith('!')")
        colors = await page.page.evaluate(
            "[...document.querySelectorAll('#alarms li')].map(item => getComputedStyle(item).color)"
        )
        assert len(set(colors)) == 2
        node.now = msgspec.structs.replace(node.now, members=3, trouble="")
        await page.until("document.querySelectorAll('#alarms li').length === 0")


async def test_text_of_peers_is_text(node, url, tab):
    """The name, the reason and the log could hold what a peer wrote."""
    node.now = msgspec.structs.replace(
        node.now, name=EVIL, reason=EVIL, trouble=EVIL, val_by=OTHER, names={OTHER: EVIL}
    )
    node.known = [
        msgspec.structs.replace(PEER_ROW, activity=EVIL, peer=EVIL),
        msgspec.structs.replace(PEER_ROW, peer=OTHER, name=EVIL),
    ]
    node.lines = [msgspec.structs.replace(node.lines[0], message=EVIL, level=EVIL, logger=EVIL)]
    node.events = [msgspec.structs.replace(node.events[0], event=EVIL, text=EVIL)]
    async with tab(url) as page:
        await page.says("#title", EVIL)
        await page.says("#events", f"{EVIL} {EVIL}")
        await page.says("#lines", EVIL)
        await page.says("#peers", EVIL)
        await page.says("#peers", f"…{OTHER[-8:]} {EVIL}")  # never without the tail of its PeerID
        await page.says("#facts", f" by …{OTHER[-8:]} {EVIL}")
        assert await page.page.locator("img").count() == 0
        assert await page.page.title() != "owned"
        assert page.complaints == []


async def test_a_sample_text_is_text_and_says_by_which_round(node, url, tab):
    node.text = SampleText(round=5, unix_s=1.8e9, text=f"{EVIL}\n{'x' * 400}", why="the node is paused")
    async with tab(url, size=PHONE) as page:
        await page.says("#sample", EVIL)
        assert await page.text("#sampleNote") == "by final round 5, 2027-01-15 08:00:00 UTC"
        assert await page.text("#sampleWhy") == "none that is newer: the node is paused"
        assert await page.page.locator("img").count() == 0
        assert await page.page.title() != "owned"
        wide = await page.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, "a long word is broken"
        node.text = SampleText(why="they are off: set sample_every_s in config.toml")
        await page.says("#sampleWhy", "none: they are off")
        assert await page.text("#sample") == ""
        assert page.complaints == []


async def test_who_contributed_who_was_late_and_who_is_missing(node, url, tab):
    node.known = [msgspec.structs.replace(PEER_ROW, peer=OTHER)]
    node.late = {5: (OTHER,), 6: (OTHER,)}
    async with tab(url) as page:
        await page.says("#peers", f"…{OTHER[-8:]}")
        row = page.page.locator("#peers tr", has_text=OTHER[-8:])
        label = await row.locator("svg").get_attribute("aria-label")
        assert label == "0 of 7 rounds, 1 late, 5 missing"
        assert await row.locator("rect.open").count() == 1, "round 6 is not final yet"
        assert await page.page.locator("#peers tr").first.locator("rect.in").count() == 7


async def test_zoom_values_and_log_axis_by_keyboard_alone(node, url, tab):
    for number in range(7, 60):
        node.row(number)
        node.rows[-1].train_loss = 10.0 / number
    async with tab(url) as page:
        keys, seen = page.page.keyboard, []
        async for focused in page.stops("lines"):
            seen.append(focused)
            if focused == "log":
                await keys.press("Space")
                assert await page.page.get_attribute("#log", "aria-pressed") == "true"
            if focused == "tokens":
                await keys.press("Space")  # now by rounds
            if focused == "loss":
                await keys.press("Home")
                await page.says("#lossRead", "round 0: this node 2.500")
                await keys.press("ArrowRight")
                await page.says("#lossRead", "round 1: this node 2.500")
                await keys.press("+")
                assert await page.page.get_attribute("#loss", "data-zoomed") == "true"
                await keys.press("0")
                assert await page.page.get_attribute("#loss", "data-zoomed") == "false"
        assert {
            "log",
            "tokens",
            "whole",
            "loss",
            "valid",
            "bytes",
            "speed",
            "showInvite",
            "events",
            "warnings",
            "lines",
        } <= set(seen)
        assert page.complaints == []


async def test_the_curve_is_of_the_whole_run(node, url, tab):
    node.rows = []
    for number in range(900):
        node.row(number)
        node.rows[-1].train_loss = 5.0 - number / 300
    async with tab(url) as page:
        await page.until("ours.loss.data[0].length === 500")
        for _ in range(20):  # some more rounds, which move the window
            node.row(len(node.rows))
        node.now = msgspec.structs.replace(node.now, round=9)
        await page.says("#runText", "round 9 of 54")
        await page.until("ours.loss.data[0].length === 520")
        xs = await page.page.evaluate("ours.loss.data[0]")
        assert xs == sorted(xs)
        assert xs[-1] == 920 * 8192
        assert page.complaints == []


async def test_zoom_by_mouse_stays_while_data_comes(node, url, tab):
    for number in range(7, 60):
        node.row(number)
    async with tab(url) as page:
        over = page.page.locator("#loss .u-over")
        await over.scroll_into_view_if_needed()
        box = await over.bounding_box()
        middle = box["y"] + box["height"] / 2
        await page.page.mouse.move(box["x"] + box["width"] * 0.2, middle)
        await page.says("#lossRead", "this node 2.500")
        await page.page.mouse.down()
        await page.page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=5)
        await page.page.mouse.up()
        assert await page.page.get_attribute("#loss", "data-zoomed") == "true"
        before = await page.page.evaluate("JSON.stringify(ours.loss.range)")
        node.now = msgspec.structs.replace(node.now, round=9)
        await page.says("#runText", "round 9 of 54")
        assert await page.page.evaluate("JSON.stringify(ours.loss.range)") == before
        await page.page.click("#whole")
        assert await page.page.get_attribute("#loss", "data-zoomed") == "false"


async def test_what_is_spent_of_privacy(node, url, tab):
    spent = PrivacyNow(epsilon=4.3771, delta=1e-5, uses=1, most=8.0)
    async with tab(url) as page:
        await page.says("#facts", "up for")
        assert "ε" not in await page.text("#facts")
        node.now = msgspec.structs.replace(node.now, privacy=spent)
        await page.says("#facts", "ε 4.38 of 8")
        assert "trains no more" not in await page.text("#facts")
        node.now = msgspec.structs.replace(node.now, privacy=msgspec.structs.replace(spent, spent=True))
        await page.says("#facts", "ε 4.38 of 8, trains no more")
        assert page.complaints == []


async def test_the_invite_and_its_code(node, url, tab):
    async with tab(url) as page:
        await page.page.click("#showInvite")
        await page.says("#link", node.link)
        assert await page.page.locator("#qr svg path").count() == 1
        node.link = ""
        await page.page.click("#showInvite")
        await page.page.click("#showInvite")
        await page.says("#inviteWhy", "is a secret")
        assert await page.page.locator("#qr svg").count() == 0


async def test_a_node_that_ended_is_said_to_be_silent(node, url, tab, monkeypatch):
    async with tab(url) as page:
        monkeypatch.setattr(node, "status", lambda: 1 / 0)  # the connection ends without an answer
        await page.says("#silent", "no answer from the node")
        monkeypatch.undo()
        await page.until("document.querySelector('#silent').textContent === ''")


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("colors", ["light", "dark"])
async def test_axe_finds_nothing_serious_and_nothing_is_cut_off(node, url, tab, size, colors):
    node.now = msgspec.structs.replace(node.now, trouble="the disk is full: free some", members=1)
    async with tab(url, size=size, colors=colors) as page:
        await page.page.click("#showInvite")
        await page.says("#link", node.link)
        await page.says("#alarms .warn", "alone")
        assert await page.axe() == []
        wide = await page.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= size["width"], "the page scrolls sideways"
        ink = await page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ink == "rgb(17, 22, 27)") is (colors == "dark")
        assert page.complaints == []
