"""The page as its users meet it: in a browser without a screen, with a server of a tiny model."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from draftwood.llm import LLM
from draftwood.serve.scheduler import Scheduler
from tests.serving import Running, serving, tiny_llm

sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
Browser, Page, expect = sync_api.Browser, sync_api.Page, sync_api.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (apt install chromium)")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE_MS = 300_000  # machines are busy
HELLO = "hello, who are you?"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(["ngram", "recycling"])


@pytest.fixture(scope="module")
def running(llm: LLM) -> Iterator[Running]:
    with serving(llm) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator:
    """Opens a page in a profile of its own; its scripts must not fail, and it must ask nobody but the server."""
    problems: list[str] = []
    with ExitStack() as stack:

        def open_(url: str, ready: bool = True, **settings: object) -> Page:
            context = browser.new_context(**settings)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("request", lambda asked: asked.url.startswith(url) or problems.append(asked.url))
            page.goto(url)
            if ready:
                expect(page.get_by_role("status")).to_have_text("Ready")
            return page

        yield open_
    assert not problems


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that leave time to do something meanwhile."""
    turn = Scheduler._turn

    def slowly(self: Scheduler) -> None:
        turn(self)
        time.sleep(0.03)

    monkeypatch.setattr(Scheduler, "_turn", slowly)


def say(page: Page, text: str = HELLO, tokens: int = 60) -> None:
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("button", name="Send").click()


def done(page: Page) -> None:
    expect(page.get_by_role("status")).to_have_text("Done")


def written(page: Page, turn: int = -1) -> str:
    return page.locator(".turn").nth(turn).locator(".tokens").first.evaluate("place => place.textContent")


# --- an answer ------------------------------------------------------------------------------------------------


def test_an_answer_is_what_the_model_writes_alone(open_page, running: Running, llm: LLM) -> None:
    page = open_page(running.url)
    say(page)
    done(page)
    assert written(page) == llm.generate([{"role": "user", "content": HELLO}], max_new_tokens=60).text
    say(page, "and then?", tokens=5)
    done(page)
    messages = [
        {"role": "user", "content": HELLO},
        {"role": "assistant", "content": written(page, 0)},
        {"role": "user", "content": "and then?"},
    ]
    assert written(page) == llm.generate(messages, max_new_tokens=5).text


def test_tokens_say_where_they_are_from_in_words(open_page, running: Running) -> None:
    page = open_page(running.url)
    page.get_by_label("Policy").fill("ddtree:12")  # bastion may have found out that drafting does not pay here
    say(page, "ab ab ab ab ab ab ab", tokens=120)
    done(page)
    drafted, own = page.locator(".tokens .draft"), page.locator(".tokens .bonus")
    assert drafted.count() and own.count()
    for title in drafted.evaluate_all("tokens => tokens.map(token => token.title)"):
        assert re.fullmatch(r"drafted by (ngram|recycling), depth \d+", title)
    assert set(own.evaluate_all("tokens => tokens.map(token => token.title)")) == {"the model's own"}
    names = {t.split(",")[0] for t in drafted.evaluate_all("tokens => tokens.map(token => token.title)")}
    legend = page.get_by_role("list", name="Colours of tokens").inner_text()
    assert all(name.removeprefix("drafted by ") in legend for name in names) and "the model's own" in legend


def test_the_tree_of_any_round_can_be_seen(open_page, running: Running) -> None:
    page = open_page(running.url)
    page.get_by_label("Policy").fill("ddtree:12")
    say(page, "ab ab ab ab ab ab ab", tokens=80)
    done(page)
    page.locator(".tokens .draft").last.click()
    tree = page.locator("#tree svg")
    expect(page.locator(".tokens .looked").first).to_be_visible()  # the round is drawn in the page's next frame
    drafted, accepted = map(int, re.findall(r"\d+", page.locator("#tree-note").inner_text()))
    assert 0 < accepted <= drafted <= 12
    expect(tree).to_have_attribute("aria-label", re.compile(rf"^{drafted} drafted tokens, {accepted} accepted: "))
    assert tree.locator("g.accepted").count() == tree.locator("path.accepted").count() == accepted
    assert tree.locator("g.rejected").count() == drafted - accepted and tree.locator("g.root").count() == 1
    places = tree.locator("circle").evaluate_all("all => all.map(c => [c.cx.baseVal.value, c.cy.baseVal.value])")
    assert len(set(map(tuple, places))) == len(places), "no node hides another"
    page.get_by_text("This tree as a table").click()
    rows = page.get_by_role("table").locator("tbody tr")
    expect(rows).to_have_count(drafted + tree.locator("g.bonus").count())
    masses = [float(mass) for mass in rows.locator("td:nth-child(4)").all_inner_texts() if mass]
    assert masses == sorted(masses, reverse=True) and all(0 <= mass <= 1 for mass in masses)
    fates = rows.locator("td:last-child").all_inner_texts()
    assert fates.count("accepted") == accepted and fates.count("rejected") == drafted - accepted
    marked = page.locator(".looked").evaluate_all("tokens => tokens.map(token => token.dataset.round)")
    assert marked and len(set(marked)) == 1, "the tokens of that round"


def test_gauges_tell_what_was_measured(open_page, running: Running) -> None:
    page = open_page(running.url)
    say(page)
    done(page)
    pace, plain = (float(page.locator(gauge).inner_text()) for gauge in ("#speed", "#plain"))
    ratio = float(page.locator("#ratio").inner_text().split()[0])
    assert ratio == pytest.approx(pace / plain, rel=0.05) and "estimated" in page.locator("#speeds").inner_text()
    tau = float(page.locator("#tau").inner_text())
    assert f"τ {tau:.2f}" in page.locator(".turn .note").inner_text()
    rounds = int(page.locator("#round").get_attribute("max"))
    tokens = page.locator(".tokens span").count()
    assert (tokens - 1) / rounds == pytest.approx(tau, abs=0.02 + 1 / rounds), "the first token is the prompt's"
    assert page.locator("#tau-chart rect").count() == page.locator("#width-chart rect").count() == min(rounds, 60)


def test_texts_are_texts(open_page, running: Running) -> None:
    page = open_page(running.url)
    say(page, "<img src=x onerror=alert(1)>", tokens=3)
    done(page)
    assert "<img src=x" in page.locator(".asked").inner_text() and page.locator(".asked img").count() == 0


# --- stop, settings, mistakes ---------------------------------------------------------------------------------


def test_stop_keeps_what_was_written(open_page, running: Running, slow: None) -> None:
    page = open_page(running.url)
    page.get_by_label("Policy").fill("autoregressive")
    say(page, tokens=800)
    expect(page.get_by_role("status")).to_have_text("Writing")
    expect(page.locator(".tokens span").nth(4)).to_be_attached()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status")).to_have_text("Stopped")
    running.wait_until_idle()
    assert 5 <= page.locator(".tokens span").count() < 800
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()


def test_policy_and_temperature_are_switched_between_answers(open_page, running: Running) -> None:
    page = open_page(running.url)
    names = page.locator("#policies option").evaluate_all("all => all.map(option => option.value)")
    assert {"autoregressive", "bastion", "ddtree"} <= set(names)
    for policy, told in (("ddtree:4", "ddtree:4"), ("autoregressive", "autoregressive"), ("", "bastion")):
        page.get_by_label("Policy").fill(policy)
        say(page, tokens=12)
        done(page)
        assert page.locator(".turn").last.locator(".note").inner_text().endswith(f"{told} · cut at max tokens")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_label("Temperature").fill("0.7")
        say(page, tokens=3)
    assert asked.value.post_data_json["temperature"] == 0.7
    done(page)


def test_mistakes_are_told_and_cost_nothing(open_page, running: Running) -> None:
    page = open_page(running.url)
    page.get_by_label("Policy").fill("bastoin")
    say(page)
    expect(page.locator(".turn").get_by_role("alert")).to_contain_text("bastion")
    expect(page.get_by_role("textbox", name="Message")).to_have_value(HELLO)
    page.get_by_label("Policy").fill("")
    page.get_by_label("Temperature").fill("9")
    page.get_by_role("button", name="Send").click()
    assert page.locator(".turn").count() == 1, "the browser says what is wrong with the number"
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Send").click()
    done(page)


def test_a_race_is_run_one_after_the_other(open_page, running: Running) -> None:
    page = open_page(running.url)
    asked = []
    page.on("request", lambda r: r.url.endswith("completions") and asked.append(r.post_data_json))
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Max tokens").fill("50")
    page.get_by_role("textbox", name="Message").fill(HELLO)
    page.get_by_role("button", name="Race").click()
    done(page)
    assert [body.pop("policy") for body in asked] == ["bastion", "autoregressive"], "plain decoding teaches nobody"
    assert asked[0] == asked[1], "the same prompt, seed and settings"
    plain, drafts = page.get_by_role("region", name="plain decoding"), page.get_by_role("region", name="bastion")
    texts = [lane.locator(".tokens").evaluate("place => place.textContent") for lane in (plain, drafts)]
    assert texts[0] == texts[1] and plain.locator(".draft").count() == 0
    verdict = page.locator(".verdict")
    expect(verdict).to_contain_text("one after the other")
    expect(verdict).to_contain_text("Both texts are the same")
    rates = [float(lane.locator(".speed").inner_text().split()[0]) for lane in (plain, drafts)]
    told = float(verdict.locator("b").inner_text().split()[0])
    assert told == pytest.approx(rates[1] / rates[0], rel=0.05)
    expect(page.locator("#plain-name")).to_have_text("plain, last race")
    assert float(page.locator("#plain").inner_text()) == rates[0]
    replay = page.get_by_role("button", name="Replay side by side")
    replay.click()
    expect(replay).to_be_enabled()
    assert plain.locator(".tokens span[hidden]").count() == 0
    say(page, "and then?", tokens=3)
    done(page)
    assert asked[2]["messages"][1]["content"] == texts[0], "a race is a turn of the conversation"


# --- the server goes and comes --------------------------------------------------------------------------------


def test_a_server_that_dies_is_missed_and_found_again(open_page, llm: LLM, slow: None) -> None:
    with ExitStack() as first:
        running = first.enter_context(serving(llm))
        page = open_page(running.url)
        page.get_by_label("Policy").fill("autoregressive")
        say(page, tokens=900)
        expect(page.locator(".tokens")).to_have_text(re.compile("."))
        running.server.force_exit = True
    expect(page.locator("#alert")).to_contain_text("Trying again every second")
    expect(page.get_by_role("status")).to_have_text("No connection")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    kept = written(page)
    assert page.locator(".turn .error").count() == 1 and kept
    port = int(running.url.rpartition(":")[2])
    with serving(llm, port=port):
        expect(page.get_by_role("status")).to_have_text("The server is back")
        expect(page.locator("#alert")).to_be_hidden()
        assert written(page) == kept
        say(page, tokens=4)
        done(page)


def test_a_server_that_dies_while_nobody_asks_is_missed_too(open_page, llm: LLM) -> None:
    with serving(llm) as running:
        page = open_page(running.url)
    expect(page.get_by_role("alert")).to_contain_text("does not answer")


def test_a_key_is_asked_for(open_page, llm: LLM) -> None:
    with serving(llm, api_key="sésame") as running:
        page = open_page(running.url, ready=False)
        door = page.get_by_role("dialog", name="This server needs a key")
        page.get_by_label("API key").fill("sesame")
        page.keyboard.press("Enter")
        expect(door).to_contain_text("not the right one")
        page.get_by_label("API key").fill("sésame")
        door.get_by_role("button", name="Continue").click()
        expect(page.get_by_role("status")).to_have_text("Ready")
        page.reload()
        expect(page.get_by_role("status")).to_have_text("Ready")
        say(page, tokens=4)
        done(page)


def test_the_enter_that_ends_a_composition_sends_nothing(open_page, running: Running) -> None:
    """Safari reports it when the composition is over, with a code of its own."""
    page = open_page(running.url)
    box = page.get_by_role("textbox", name="Message")
    box.fill("ni hao")
    for how in ({"isComposing": True}, {"keyCode": 229}):
        box.dispatch_event("keydown", {"key": "Enter", **how})
    assert box.input_value() == "ni hao"
    expect(page.get_by_role("status")).to_have_text("Ready")


# --- for everybody --------------------------------------------------------------------------------------------


def test_all_of_it_works_from_the_keyboard(open_page, running: Running, slow: None) -> None:
    page = open_page(running.url)
    box = page.get_by_role("textbox", name="Message")
    expect(box).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(box).to_have_value("one\ntwo")
    page.keyboard.press("Enter")
    expect(page.locator(".tokens span").nth(3)).to_be_attached()
    page.keyboard.press("Escape")
    expect(page.get_by_role("status")).to_have_text(re.compile("Stopped|Done"))
    expect(box).to_be_focused()
    for stop in ("policy", "temperature", "length", "new", "race", "send", "tree", "round", "SUMMARY"):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id || document.activeElement.tagName") == stop
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "it can be seen"
    page.locator("#round").focus()
    page.keyboard.press("Home")
    expect(page.locator("#round-name")).to_have_text(re.compile("^Round 1 of "))
    page.keyboard.press("End")
    page.get_by_text("This tree as a table").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("table")).to_be_visible()


def test_who_is_elsewhere_when_an_answer_ends_stays_there(open_page, running: Running, slow: None) -> None:
    page = open_page(running.url)
    say(page, tokens=30)
    done(page)
    say(page, tokens=60)
    expect(page.get_by_role("status")).to_have_text("Writing")
    slider = page.locator("#round")
    page.get_by_label("Policy").focus()
    page.keyboard.type("ddtree:4")
    done(page)
    expect(page.get_by_label("Policy")).to_be_focused()
    expect(page.get_by_label("Policy")).to_have_value("ddtree:4")
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator("#round-name")).to_have_text(re.compile("^Round 1 of "))
    earlier = page.locator(".turn .tokens").first
    earlier.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#round-name")).not_to_have_text(re.compile("^Round 1 of "))


def test_everything_has_a_name(open_page, running: Running) -> None:
    page = open_page(running.url)
    told = page.locator("body").aria_snapshot()
    for line in (
        '- heading "draftwood" [level=1]', "- status: Ready", '- button "Dark"', '- region "Conversation"',
        '- log "Messages"', '- textbox "Message"', '- combobox "Policy"', '- spinbutton "Temperature"',
        '- spinbutton "Max tokens"', '- button "Race"', '- button "Send"', '- complementary "What the rounds do"',
        '- region "Speed"', '- slider "Round"',
    ):  # fmt: skip
        assert line in told, f"{line} is not in\n{told}"
    assert not re.search(r"- (button|textbox|combobox|spinbutton|slider|img|region|log|dialog)(:| \[|$)", told, re.M)
    say(page, tokens=20)
    expect(page.get_by_role("log")).to_have_attribute("aria-busy", "false")
    done(page)
    assert 'img "' in page.locator("#charts").aria_snapshot() and 'img "' in page.locator("#tree").aria_snapshot()


def darkness(page: Page) -> bool:
    """Whether text is lighter than what it stands on."""
    ink, paper = (
        page.evaluate(
            "name => { const c = new OffscreenCanvas(1, 1).getContext('2d');"
            "c.fillStyle = getComputedStyle(document.body)[name]; c.fillRect(0, 0, 1, 1);"
            "return c.getImageData(0, 0, 1, 1).data[1]; }",
            name,
        )
        for name in ("color", "backgroundColor")
    )
    assert abs(ink - paper) > 150, "and it can be read"
    return bool(ink > paper)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_and_light(open_page, running: Running, scheme: str) -> None:
    page = open_page(running.url, color_scheme=scheme)
    button = page.get_by_role("button", name="Dark")
    assert darkness(page) == (scheme == "dark")
    expect(button).to_have_attribute("aria-pressed", str(scheme == "dark").lower())
    button.click()
    assert darkness(page) == (scheme != "dark")
    page.reload()
    assert darkness(page) == (scheme != "dark"), "the choice is kept"


@pytest.mark.parametrize("width", [320, 390, 768, 1440])
def test_it_fits_every_screen(open_page, running: Running, width: int) -> None:
    page = open_page(running.url, viewport={"width": width, "height": 800}, reduced_motion="reduce")
    say(page, "x" * 300, tokens=40)
    done(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("Send", "Race", "New chat", "Dark"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= width
    assert page.locator("#speed-bar").evaluate("bar => getComputedStyle(bar).transitionDuration") == "0s"
