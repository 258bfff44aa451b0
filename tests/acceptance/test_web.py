"""``celery -A shop redlock web`` as a process, on nodes in every state, in a real browser."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import pytest
import redis
from selenium.webdriver.common.keys import Keys

from celery_redlock import RedlockTask, current_lock
from celery_redlock.lock.rules import Rules
from celery_redlock.observers import tally
from celery_redlock.ops.web.reader import Reader
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import node_statuses
from celery_redlock.reading.search import SHOWN, Search
from support.browser import browser, find_chromium
from support.events import body, read
from support.machine import found
from support.stage import stage
from support.stored import clients_of
from support.waiting import eventually
from support.worker import SUPPORT, CeleryProcess

TOKEN = "correct horse battery"
#: Longer than any test takes, so that what is planted stays.
MAX_TTL = 900.0
RULES = Rules(node_timeout=1.0)
TTL = 120.0


def declare(app):
    if "STAGE" in os.environ:  # in a worker
        # With each event: else what is counted waits for one that comes seconds later, if any does.
        tally.EVERY = 0.0

    # That lease is to be lost, and its holder to learn it at the next renewal, in ten seconds at
    # most; not before a slow browser has released it, though one of three nodes stalls.
    @app.task(
        base=RedlockTask, shared=False, name="orders.lose", lock_key="bill:{invoice}", lock_ttl=30.0
    )
    def lose(invoice, seconds):
        return bill.run(invoice, seconds)

    @app.task(base=RedlockTask, shared=False, name="orders.bill", lock_key="bill:{invoice}")
    def bill(invoice, seconds):
        events = Path(os.environ["EVENTS"])
        ends, gate = time.monotonic() + seconds, events.with_name(f"{invoice}.open")
        with body(events, f"bill:{invoice}"):
            while time.monotonic() < ends and not gate.exists():
                current_lock().ensure_held()
                time.sleep(0.02)
        return invoice


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("web")
    rules = {"redlock_ttl": TTL, "redlock_max_ttl": MAX_TTL, "redlock_node_timeout": 1.0}
    with stage(__file__, folder, **rules) as it:
        it.nodes[4].kill()
        it.nodes[3].restart()
        with it.held("find out"):  # that a node has lost its memory
            eventually(lambda: states(it)[3] == "quarantined", "quarantine")
        with redis.Redis.from_url(it.nodes[0].url) as client:
            client.set("redlock:lock:old-import", "somebody, by hand")
        it.worker(pool="threads", concurrency=8)
        it.task("orders.bill").delay("done", 0.2).get(timeout=100)
        yield it


def states(it):
    rules = plugin_for(it.app).settings.rules
    return [node.state for node in node_statuses(it.conf["redlock_nodes"], rules)]


@contextlib.contextmanager
def web(it, *options, **env):
    environment = {"STAGE": json.dumps([__file__, it.conf]), **env}
    command = ["redlock", "web", "--port", "0", *options]
    with CeleryProcess("support.stage", command, ready="Serving on", env=environment) as process:
        (address,) = re.findall(r"Serving on (\S+)", process.log())
        yield process, address


@pytest.fixture(scope="module")
def page(shop):
    with web(shop, REDLOCK_WEB_TOKEN=TOKEN) as (_, address):
        yield address


@pytest.fixture(scope="module")
def chromium():
    return found(find_chromium)


@pytest.fixture(scope="module")
def shared_window(chromium):
    """The browser of the module; take `window`."""
    with browser(chromium) as it:
        yield it


@pytest.fixture
def window(shared_window):
    """A browser that must not have had anything to complain about when the test is over."""
    shared_window.open("about:blank")
    shared_window.complaints()
    shared_window.resize(1440, 900)
    yield shared_window
    assert shared_window.complaints() == []


@contextlib.contextmanager
def billed(shop, invoice, task="orders.bill"):
    result = shop.task(task).delay(invoice, 280.0)
    shop.started(f"bill:{invoice}")
    try:
        yield result
    finally:
        shop.events.with_name(f"{invoice}.open").touch()
        result.get(timeout=100, propagate=False)


def error_in(shop, invoice):
    return next(
        (end.get("error") for end in read(shop.events, "end") if end["name"] == f"bill:{invoice}"),
        None,
    )


def skip_one(shop, invoice):
    result = shop.task("orders.bill").delay(invoice, 0.0)
    result.get(timeout=100)
    return result.id


def has(window, selector, *texts):
    eventually(
        lambda: all(text in window.text(selector) for text in texts),
        f"{texts} in {selector}",
        timeout=100,
        every=0.1,
    )


def has_not(window, selector, *texts):
    eventually(
        lambda: (text := window.text(selector)) and not any(it in text for it in texts),
        f"{selector} without {texts}",
        timeout=100,
        every=0.1,
    )


def get(address, **headers):
    asked = urllib.request.Request(
        address, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    try:
        with urllib.request.urlopen(asked, timeout=100) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


# -- what is there -------------------------------------------------------------------------


def test_everything_planted_is_shown(shop, page, window):
    with billed(shop, "planted and released"):  # which has a hold time, whatever ran before
        pass
    with billed(shop, "planted") as holder:
        skipped = skip_one(shop, "planted")
        window.open(page)
        has(
            window,
            "[data-part=verdict]",
            "Quorum: yes, without a node to spare. 3 of 5",
            "never expires",
        )

        def has_states():
            nodes = window.text("[data-part=nodes]")
            lines = nodes.splitlines()
            states = [line for line in lines if line in ("up", "quarantined", "down")]
            is_right = states == ["up", "up", "up", "quarantined", "down"]
            return is_right and "refused" in nodes.lower()

        eventually(has_states, "nodes in each state", timeout=100, every=0.1)
        has(window, "[data-part=locks]", "bill:planted", "orders.bill", holder.id, " of 5")
        has(window, "[data-part=locks]", socket.gethostname(), str(shop.workers[0].pid))
        first = "[data-part=locks] tbody tr"
        has(window, first, "leaked")
        eventually(lambda: window.text(first).startswith("old-import"), "what leaked, on top")
        has(window, "[data-part=happened]", "skipped", skipped, f"[{holder.id}]")
        has(window, "[data-part=tasks]", "orders.bill", "on average")
        window.click("[data-part=tasks] a[href*='orders.bill']")
        has(window, "h1", "Task orders.bill")
        has(window, "[data-part=refused]", "skipped", holder.id, "bill:planted")
        has(window, "[data-part=charts]", "How long it held its locks")
        eventually(lambda: window.is_shown("[data-part=charts] svg .bar"), "a bar")
        has(window, "[data-part=locks]", holder.id)
        window.click("[data-part=locks] a[href*='/lock']")
        has(window, "[data-part=verdict]", "This lock is held.", "Another call now", "on_conflict")
        has(window, "[data-part=nodes]", "up", "down", "quarantined")
        has(window, "[data-part=happened]", skipped)
        has(window, "#live", "live")


def test_a_new_lock_comes_and_goes_by_itself(shop, page, window):
    """Without a reload: what the page's script remembers stays."""
    window.open(page)
    window.run("window.here = 1; document.getElementById('locks-legend').open = true")
    with shop.held("comes and goes"):
        has(window, "[data-part=locks]", "comes and goes")
    has_not(window, "[data-part=locks]", "comes and goes")
    assert window.run("return window.here") == 1
    assert window.run("return document.getElementById('locks-legend').open")


def test_a_search_narrows_as_one_types(shop, page, window):
    with billed(shop, "searched") as holder, shop.held("another"):
        skipped = skip_one(shop, "searched")
        window.open(page)
        has(window, "[data-part=locks]", "another")
        window.find("#q").send_keys(holder.id.upper())
        has(window, "[data-part=answer]", "Lock bill:searched is held by task orders.bill", skipped)
        has_not(window, "[data-part=locks]", "another", "old-import")
        has(window, "[data-part=happened]", skipped)
        asked = f"?q={holder.id.upper()}"
        eventually(lambda: window.driver.current_url.endswith(asked), "the search in the address")
        window.open(window.driver.current_url)
        has(window, "[data-part=answer]", "Lock bill:searched is held by")
        window.find("#q").clear()
        window.find("#q").send_keys("nobody-has-this", Keys.ENTER)
        has(window, "[data-part=answer]", "Nothing matches")


def test_a_search_stays_with_its_lock(page, window):
    """Whatever its name has at its ends, or has that cannot be seen."""
    name = " \r\nodd\t "
    window.open(f"{page}lock?{urlencode({'name': name})}&before=x")
    window.find("#q").send_keys("nothing ")
    eventually(lambda: "q=nothing" in window.driver.current_url, "the search")
    asked = parse_qs(urlsplit(window.driver.current_url).query)
    assert asked == {"name": [name], "q": ["nothing"]}


def test_without_scripts_the_page_works(shop, page, window):
    """It is complete, can be searched, and does not take itself away from who reads it."""
    window.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        with shop.held("unscripted"):
            window.open(page)

            def shows():  # it was read a moment before
                if "unscripted" in window.find("main").text:
                    return True
                window.find("#refresh").click()
                return False

            eventually(shows, "the lock on the page", every=0.5)
            assert "http-equiv" not in window.driver.page_source
            assert "not live" in window.find("#live").text
            window.find("#q").send_keys("unscripted", Keys.ENTER)
            eventually(lambda: "?q=unscripted" in window.driver.current_url, "the search")
            assert "unscripted" in window.find("[data-part=locks]").text
            assert "old-import" not in window.find("[data-part=locks]").text
            assert window.find("#refresh").is_displayed()
    finally:
        window.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_hidden_page_rests(shop, page, window):
    hide = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
    tell = "document.dispatchEvent(new Event('visibilitychange'))"
    window.open(page)
    window.run(hide + tell, True)
    has(window, "#live", "paused")
    with shop.held("meanwhile"):
        window.run(hide + tell, False)
        has(window, "[data-part=locks]", "meanwhile")
        has(window, "#live", "live")


def test_a_name_that_would_be_a_script_is_a_name(shop, page, window):
    name = "</bdi><script>document.title='taken'</script><img src=x onerror=document.title='taken'>"
    window.open(page)
    with shop.held(name):
        has(window, "[data-part=locks]", "<script>document.title=")
        window.click("a.release[href*=script]")
        has(window, ".name", name)
    assert "taken" not in window.driver.title


def test_the_policy_refuses_scripts_of_others(page, chromium):
    """What the other tests rely on: a script that got into the page would not run, and be told."""
    with browser(chromium) as it:
        it.open(page)
        script = "const it = document.createElement('script'); it.text = 'window.taken = 1';"
        it.run(f"{script} document.body.append(it)")
        assert it.run("return window.taken") is None
        assert any("Content Security Policy" in said for said in it.complaints())


WIDTHS = (390, 768, 1280)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_the_screen(shop, page, window, width):
    backgrounds = set()
    with shop.held("wide " + "w" * 90):
        for scheme in ("light", "dark"):
            for path in PAGES:
                window.resize(width, 800)
                window.prefer(scheme)
                window.open(page + path)
                assert window.run(OFF_SCREEN, width) == []
                backgrounds.add(
                    window.run("return getComputedStyle(document.body).backgroundColor")
                )
    window.prefer("")
    assert len(backgrounds) == 2
    assert all("404" in said for said in window.complaints())


#: The texts of what reaches beyond the screen, but for what is there for screen readers alone.
OFF_SCREEN = """
return [...document.querySelectorAll("main *, header *")]
  .filter((it) => !it.closest(".unseen, thead, svg"))
  .filter((it) => it.getBoundingClientRect().right > arguments[0] + 0.5)
  .map((it) => it.outerHTML.slice(0, 200))
"""
PAGES = (
    "",
    "?q=orders.bill&event=refused",
    "task?name=orders.bill",
    "lock?name=old-import",
    "report",
    "release?name=old-import&seen=",
    "nowhere",
)


def test_a_sentence_goes_on_behind_a_moment(shop, page, window):
    """The exact time has a line of its own in a table only, not in the middle of a sentence."""

    def displays(path, selector):
        window.open(page + path)
        return set(window.run(DISPLAYS, selector))

    def has_example():
        skip_one(shop, "sentence")  # what was counted before goes along with it
        return displays("report", "li .exact")

    with billed(shop, "sentence"):
        eventually(has_example, "an example in the report", timeout=100, every=0.5)
    assert displays("report", "p .exact, li .exact") == {"inline"}
    assert displays("", "td .exact") == {"block"}


DISPLAYS = """
return [...document.querySelectorAll(arguments[0])].map((it) => getComputedStyle(it).display)
"""


@pytest.fixture(scope="module")
def axe():
    """The source of axe-core, which looks for what keeps people out."""
    return importlib.resources.files("axe_core_python").joinpath("axe.min.js").read_text()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_kept_out(shop, page, window, axe, width, scheme):
    """Axe finds no breach of WCAG 2.1 at level AA, nor of its own good practice, on any page."""
    window.resize(width, 800)
    window.prefer(scheme)
    with billed(shop, f"axe-{width}-{scheme}"):
        skip_one(shop, f"axe-{width}-{scheme}")
        for path in PAGES:
            window.open(page + path)
            assert breaches(window, axe) == [], path
    window.prefer("")
    assert all("404" in said for said in window.complaints())


def test_a_page_that_keeps_people_out_is_seen(page, window, axe):
    """The twin: grey on white, a field without a label."""
    window.open(page)
    window.run(
        "const p = document.createElement('p'); p.textContent = 'grey'; p.className = 'x';"
        "document.querySelector('main').append(p, document.createElement('input'));"
        "p.style.color = '#bbb'"
    )
    assert {"color-contrast", "label"} <= set(breaches(window, axe))


def breaches(window, axe):
    window.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": axe})
    return window.driver.execute_async_script(
        "axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})"
        ".then((found) => arguments[0](found.violations.map((it) => it.id)))"
    )


def test_the_keyboard_is_enough(page, window):
    window.resize(390, 700)
    window.open(page)
    body = window.find("body")
    body.send_keys(Keys.TAB)
    assert window.run("return document.activeElement.className") == "skip"
    assert window.run("return document.activeElement.getBoundingClientRect().left >= 0")
    window.run("document.activeElement.click()")
    assert window.run("return document.activeElement.id") == "main"
    body.send_keys("/")
    assert window.run("return document.activeElement.id") == "q"
    window.find("#q").send_keys("a/b")
    assert window.run("return document.activeElement.value") == "a/b"
    for part in ("tasks", "happened", "locks", "nodes"):
        window.run("document.querySelector(`.jump a[href='#${arguments[0]}']`).click()", part)
        top = "const it = document.getElementById(arguments[0]).getBoundingClientRect(); return"
        assert window.run(f"{top} it.top >= 0 && it.bottom <= innerHeight", part), part


def test_what_is_read_by_keyboard_stays_in_focus(page, window):
    """When the page renews its parts; the heading does not scroll away."""
    window.open(page)
    selector = "[data-part=locks] a[href*='old-import']"
    window.run("document.querySelector(arguments[0]).focus(); window.seen = scrollY", selector)
    window.run("window.old = document.activeElement")
    eventually(lambda: not window.run("return document.contains(window.old)"), "renewal")
    assert window.run("return document.activeElement.matches(arguments[0])", selector)
    # A browser may lay the page out once more first.
    eventually(lambda: window.run("return scrollY === window.seen"), "the page where it was")


# -- releasing -----------------------------------------------------------------------------


def test_a_lock_is_released_and_its_holder_learns_it(shop, page, window):
    with billed(shop, "taken", "orders.lose") as holder:
        window.open(f"{page}?q=bill:taken")
        window.find("a.release")  # is waited for
        window.click("a.release")
        where = socket.gethostname()
        has(window, "main", "bill:taken", "orders.lose", holder.id, where, " of 5 nodes")
        window.find("#token").send_keys("not the token", Keys.ENTER)
        has(window, "[role=alert]", "That was not the token")
        # The browser tells of the answer's code, and that is all it has to say.
        assert all("403" in said for said in window.complaints())
        assert error_in(shop, "taken") is None
        window.find("#token").send_keys(TOKEN)
        window.click("button.danger")
        has(window, "main", "Released on ", " of 5 nodes.", "learns of it at its next renewal")
        assert TOKEN not in window.driver.current_url
        told = eventually(lambda: error_in(shop, "taken"), "the loss", timeout=100)
        assert told in {"LockLost", "LockInterrupt"}
        window.click("main a[href='/']")
        has(window, "[data-part=happened]", "lock lost", holder.id)
        has(window, "[data-part=locks]", "old-import")
        has_not(window, "[data-part=locks]", "bill:taken")


def test_a_lock_that_changed_hands_stays(shop, page, window):
    with shop.held("changes hands"):
        window.open(f"{page}?q=changes")
        window.find("a.release")  # is waited for
        window.click("a.release")
    with shop.held("changes hands"):
        window.find("#token").send_keys(TOKEN, Keys.ENTER)
        has(window, "main", "Nothing was released", "Held now by", str(os.getpid()))
        assert all("409" in said for said in window.complaints())
        with redis.Redis.from_url(shop.nodes[0].url) as client:
            assert client.exists("redlock:lock:changes hands")


def test_without_a_token_the_page_only_shows(shop, window):
    with web(shop) as (process, address), shop.held("kept"):
        assert "Read only" in process.log()
        window.open(address)
        has(window, "[data-part=locks]", "kept", "Read only")
        assert not window.run("return document.querySelectorAll('a.release').length")
        window.open(f"{address}release?name=kept&seen=00000000")
        has(window, "main", "redlock_web_token")
        assert all("403" in said for said in window.complaints())
        window.open(address)
        process.terminate()
        has(window, "#live", "no answer for", "this is old")
        eventually(lambda: window.is_shown("#main.stale"), "a page that looks old")
        window.open("about:blank")
        assert all("net::ERR_" in said for said in window.complaints())


def test_behind_the_token_the_page_keeps_itself_current(shop, window):
    with web(shop, "--allow-host", "locks.example.com", REDLOCK_WEB_TOKEN=TOKEN) as (_, address):
        window.open(address.replace("//", f"//anybody:{quote(TOKEN)}@"))
        has(window, "h1", "Why did my task not run?")
        with shop.held("behind the token"):
            has(window, "[data-part=locks]", "behind the token")
        has(window, "#live", "live")
        window.open("about:blank")


# -- the process ---------------------------------------------------------------------------


def test_the_server_says_nothing_of_itself_and_knows_its_names(page):
    status, headers, text = get(page)
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "Server" not in headers
    assert "old-import" in text
    status, headers, text = get(page, Host="evil.example")
    assert status == 421
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "old-import" not in text


def test_a_release_is_logged_without_the_token(shop):
    with web(shop, REDLOCK_WEB_TOKEN=TOKEN) as (process, address):
        data = f"name=x&seen=00000000&token={TOKEN}".encode()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{address}release", data=data, timeout=100)
        with refused.value as answer:
            assert answer.code == 403
        process.wait_for_log("Refused to release lock 'x' for 127.0.0.1: form void")
        assert TOKEN not in process.log()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--host", "0.0.0.0"], "REDLOCK_WEB_TOKEN"),
        (["--allow-host", "locks.example.com"], "REDLOCK_WEB_TOKEN"),
        (["--host", "127.0.0.1", "--port", "70000"], "70000"),
    ],
)
def test_it_does_not_start_where_it_must_not(shop, tmp_path, options, told):
    done = command(shop, tmp_path, *options)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_help_has_examples(shop, tmp_path):
    done = command(shop, tmp_path, "--help")
    assert done.returncode == 0
    assert "celery -A shop redlock web" in done.stdout
    assert "REDLOCK_WEB_TOKEN" in done.stdout


def test_a_port_that_is_taken_is_a_clean_error(shop, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = command(shop, tmp_path, "--port", str(port))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr


def command(shop, folder, *options):
    environment = {
        **os.environ,
        "STAGE": json.dumps([__file__, shop.conf]),
        "EVENTS": str(shop.events),
        "PYTHONPATH": str(SUPPORT),
    }
    words = [sys.executable, "-m", "celery", "-A", "support.stage", "redlock", "web", *options]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


# -- what it costs -------------------------------------------------------------------------


@pytest.fixture
def reader(five_nodes, request):
    it = Reader([node.url for node in five_nodes], RULES)
    yield it
    it.close()


def test_many_pages_cost_the_nodes_one_reading(reader, five_nodes, monkeypatch):
    reader.page(Search())
    each = per_reading(reader, five_nodes[0])
    monkeypatch.setattr("celery_redlock.ops.web.reader.FRESH", 600.0)  # a second is soon over
    per_reading(reader, five_nodes[0])
    before = commands(five_nodes[0])
    for _ in range(20):
        reader.page(Search())
    assert commands(five_nodes[0]) - before < 10 * each


def commands(node):
    with redis.Redis.from_url(node.url) as client:
        return client.info("stats")["total_commands_processed"]


def per_reading(reader, node):
    before = commands(node)
    eventually(lambda: reader.page(Search()) and commands(node) > before + 10, "a new reading")
    return commands(node) - before


def test_of_many_locks_some_are_shown_and_a_name_is_found(reader, five_nodes):
    value = b"0123456789abcdef0123456789abcdef01234567" + b'{"task": "t"}'
    for node in five_nodes:
        with redis.Redis.from_url(node.url) as client, client.pipeline() as pipe:
            for i in range(1000):
                pipe.set(f"redlock:lock:many:{i}", value, px=600_000)
            pipe.execute()
    # A machine that is slow may not have read them when the first page has to be there.
    found = eventually(lambda: reader.page(Search()).found, "locks")
    assert len(found.locks) == SHOWN
    assert found.more > 0
    assert found.more == 1000 - SHOWN or not found.complete
    named = eventually(lambda: reader.page(Search("many:777")).found, "the lock")
    assert [view.name for view in named.locks] == ["many:777"]


def test_nodes_that_hang_are_named_with_the_locks(redis_nodes):
    """Three of five are stopped: no page takes their silence for the absence of locks."""
    nodes = redis_nodes(5)
    reader = Reader([node.url for node in nodes], RULES)
    try:
        for node in nodes[:3]:
            node.pause()
        found = eventually(lambda: reader.page(Search()).found, "locks", timeout=100)
        assert len(found.silent) == 3
        assert len(reader.lock("any").silent) == 3
    finally:
        for node in nodes[:3]:
            node.resume()
        reader.close()


def test_nodes_that_hang_do_not_hang_a_page(redis_nodes):
    nodes = redis_nodes(5)
    reader = Reader([node.url for node in nodes], RULES)
    try:
        for node in nodes[:2]:
            node.pause()
        page = eventually(lambda: it if (it := reader.page(Search())).nodes else None, "nodes")
        assert [node.state for node in page.nodes[:2]] == ["down", "down"]
    finally:
        for node in nodes[:2]:
            node.resume()
        reader.close()


def test_a_search_that_finds_nothing_ends_in_time(reader, five_nodes, monkeypatch):
    for client in clients_of(five_nodes):
        client.mset({f"other:{i}": b"" for i in range(20_000)})
    monkeypatch.setattr("celery_redlock.ops.web.reader.LONGEST", 0.0)
    before = commands(five_nodes[0])
    found = reader._find(Search("nothing"))
    assert not found.locks
    assert not found.complete
    assert not found.names_complete
    assert commands(five_nodes[0]) - before < 100
