from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from fnmatch import fnmatchcase
from html.parser import HTMLParser
from types import SimpleNamespace

import click
import pytest
from itsdangerous import TimestampSigner
from redis.exceptions import RedisError
from werkzeug.exceptions import TooManyRequests

from celery_redlock import ConfigurationError
from celery_redlock.lock.records import shorten
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.web import command, reader
from celery_redlock.ops.web.app import make_app
from celery_redlock.ops.web.asked import Asked
from celery_redlock.ops.web.chart import hold_chart, time_chart
from celery_redlock.ops.web.format import moment, short, text, visible
from celery_redlock.ops.web.guard import (
    ADDRESSES,
    FREE,
    LONGEST,
    POLICY,
    Attempts,
    Door,
    configured_token,
)
from celery_redlock.ops.web.reader import Cached, Page
from celery_redlock.ops.web.releasing import LIFETIME
from celery_redlock.ops.web.views import BLOCKERS, ENTRIES
from celery_redlock.ops.why import explained
from celery_redlock.reading import all_locks
from celery_redlock.reading import search as searching
from celery_redlock.reading.holds import HOLD_BOUNDS, Holds
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.reading.one_lock import OneLock
from celery_redlock.reading.places import Places
from celery_redlock.reading.quorum import Quorum
from celery_redlock.reading.search import Found, Search, find_locks
from celery_redlock.reading.stored import (
    LockView,
    ReservationView,
    StoredLock,
    StoredReservation,
)
from celery_redlock.reading.tally import CAUSES, TaskTally
from celery_redlock.reading.tally_reader import Tallies
from celery_redlock.reading.waiters import RecordedWaiter, Waiter
from celery_redlock.settings import Settings

NODES = [f"redis://lock-{i}:6379/0" for i in range(1, 6)]
SETTINGS = Settings.from_conf({"redlock_nodes": NODES})
LABELS = [f"lock-{i}:6379/0" for i in range(1, 6)]
TOKEN = "correct horse battery"
SEEN = "0123abcd"
HOLDER = ("task", "task_id", "execution", "host", "pid", "since", "renewals", "margin")
PAGES = ("/", "/task?name=orders.bill", "/lock?name=orders.bill:7", "/report")
VOID = {"br", "hr", "img", "input", "link", "meta"}


def view(name="orders.bill:7", *, token=SEEN, ttl=12.0, votes=5, **holder):
    told = {
        "task": "orders.bill",
        "task_id": "id-7",
        "host": "worker-1",
        "pid": 4711,
        "since": time.time() - 5,
        **holder,
    }
    return LockView(name, {**told, "token": token}, ttl, LABELS[:votes], fence=42, waiting=3)


def skipped(**more):
    record = {
        "id": "1",
        "event": "TaskSkipped",
        "at": time.time() - 60,
        "host": "worker-2",
        "pid": 4712,
        "name": "orders.bill:7",
        "task": "orders.bill",
        "task_id": "id-8",
        "cause": "conflict",
        "holder": {"task": "orders.bill", "task_id": "id-7", "host": "worker-1", "pid": 4711},
    }
    return {**record, **more}


def tally(times=None, **more):
    """Return what a task did in a day: its locks were held ``times={class: how often}``."""
    counts = [(times or {}).get(place, 0) for place in range(len(HOLD_BOUNDS) + 1)]
    holds = Holds(tuple(counts), total=3.0, longest=2.0, ttl=30.0)
    known = {"ran": sum(counts), "first": time.time() - 7200, "last": time.time() - 60}
    return TaskTally(**{**known, "holds": holds, **more})


class Stand:  # as of celery_redlock.ops.web.reader.Reader
    def __init__(self):
        self.statuses = [NodeStatus(label, "up", "9.1.2", 86400.0) for label in LABELS]
        self.views = [view()]
        self.waiters = []
        self.places = 1
        self.happened = [skipped()]
        self.tasks = {"orders.bill": tally({10: 4, 13: 1})}
        self.app = None
        self.age = 0.1
        self.silent = []
        self.answers = dict.fromkeys(LABELS, "released")
        self.released = []
        self.reserved = []

    def page(self, search):
        found = replace(find_locks(self.views, search, lambda: 0.0), silent=self.silent)
        tallies = Tallies(self.tasks)
        return Page(self.statuses, found, self.happened, tallies, self.age, self.reserved)

    def tallies(self):
        return Tallies(self.tasks, self.silent), self.age

    def explain(self, name, search):
        value = b"0123abcd" + b"e" * 32 + b'{"task": "orders.bill", "task_id": "id-7", "host": "w"}'
        is_held = name in [it.name for it in self.views]
        told = StoredLock(value, 12.0, 42) if is_held else StoredLock()
        told = told._replace(waiters=self.waiters, recorded=len(self.waiters))
        stored = {label: told for label in LABELS if label not in self.silent}
        places = Places(
            [OneLock(name, self.statuses, stored, number) for number in range(self.places)]
        )
        return explained(None, places, filter(search.has_record, self.happened)), self.age

    def lock(self, name):
        views = [it for it in self.views if it.name == name]
        return SimpleNamespace(
            views=views,
            reservations=self.reserved,
            silent=self.silent,
            is_known=len(self.silent) <= len(LABELS) // 2,
        )

    def release(self, name, seen):
        self.released.append((name, seen))
        if "released" in self.answers.values():
            self.views = [it for it in self.views if it.name != name]
        return self.answers


@pytest.fixture(autouse=True)
def _time_of_day_stands_still(monkeypatch):
    """Pages tell ages."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)


@pytest.fixture
def stand():
    return Stand()


@pytest.fixture
def client(stand, caplog):
    """Return a browser at a page: ``client(token=..., host=...)``; what it does is logged."""
    caplog.set_level(logging.INFO, "celery_redlock")

    def client(token=TOKEN, host="127.0.0.1", names=()):
        attempts = Attempts(lambda: 1000.0)  # a slow machine would wait out what slows guesses
        app = make_app("shop", SETTINGS, stand, Door(host, names, token, attempts))
        return app.test_client()  # which calls us localhost

    return client


def form_in(answer):
    page = answer.text
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page))


def confirm(browser, name="orders.bill:7", seen=SEEN):
    answer = browser.get("/release", query_string={"name": name, "seen": seen})
    assert answer.status_code == 200
    return form_in(answer)


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


# -- every response ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/", 200),
        ("/task?name=orders.bill", 200),
        ("/task", 200),
        ("/lock?name=orders.bill:7", 200),
        ("/lock", 200),
        ("/static/page.css", 200),
        ("/static/live.js", 200),
        ("/static/icon.svg", 200),
        ("/static/../app.py", 404),
        ("/release?name=orders.bill:7&seen=0123abcd", 200),
        ("/release", 400),
        ("/nowhere", 404),
    ],
)
def test_every_response_has_the_headers(client, path, code):
    with client().get(path) as answer:
        assert answer.status_code == code
        assert_headers(answer)


def assert_headers(answer):
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "same-origin"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "unsafe" not in POLICY


def test_errors_of_ours_have_the_headers_and_tell_nothing(client, stand, caplog):
    stand.page = lambda search: 1 / 0
    browser = client()
    browser.application.config["PROPAGATE_EXCEPTIONS"] = False
    answer = browser.get("/")
    assert answer.status_code == 500
    assert_headers(answer)
    assert "ZeroDivisionError" not in answer.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("method", ["put", "delete", "post", "options"])
def test_other_methods_do_nothing(client, stand, method):
    answer = client().open("/", method=method.upper())
    assert answer.status_code in {200, 405}
    assert (answer.status_code == 200) == (method == "options")
    assert {it.strip() for it in answer.headers["Allow"].split(",")} == {"GET", "HEAD", "OPTIONS"}
    assert_headers(answer)
    assert stand.released == []


def test_nothing_in_a_page_is_inline(client):
    """Neither scripts nor styles nor handlers: the policy would refuse them."""
    browser = client()
    for path in (*PAGES, "/?q=orders", "/release?name=orders.bill:7&seen=0123abcd", "/nowhere"):
        tags = Tags(browser.get(path).text).tags
        assert "style" not in {tag for tag, _ in tags}
        for tag, attributes in tags:
            assert not any(name == "style" or name.startswith("on") for name in attributes), tag
            assert "title" not in attributes, "a meaning that fingers and keyboards do not find"
            assert tag != "script" or attributes["src"].startswith("/static/")


# -- who may ask ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "names", "asked", "admitted"),
    [
        ("127.0.0.1", (), "127.0.0.1:8737", True),
        ("127.0.0.1", (), "localhost:9000", True),
        ("127.0.0.1", (), "LOCALHOST.", True),
        ("127.0.0.1", (), "[::1]:8737", True),
        ("127.0.0.1", (), "evil.example", False),
        ("127.0.0.1", (), "127.0.0.1.evil.example", False),
        ("127.0.0.1", (), "localhost.evil.example:8737", False),
        ("127.0.0.1", (), "10.0.0.5:8737", False),
        ("127.0.0.1", (), "", False),
        ("127.0.0.1", (), "a b", False),
        ("127.0.0.1", (), "user@127.0.0.1", False),
        ("127.0.0.1", ("Locks.example.com",), "locks.example.com", True),
        ("127.0.0.1", ("locks.example.com:8443",), "locks.example.com", True),
        ("127.0.0.1", ("locks.example.com",), "other.example.com", False),
        ("::1", ("fd00::6",), "[fd00::6]:8737", True),
        ("10.0.0.5", (), "10.0.0.5:8737", True),
        ("10.0.0.5", (), "10.0.0.6:8737", False),
        ("0.0.0.0", (), "10.0.0.6:8737", True),
        ("::", (), "[fd00::6]:8737", True),
        ("0.0.0.0", (), "evil.example", False),
    ],
)
def test_a_foreign_name_is_refused(host, names, asked, admitted):
    """A name of others that points at us (DNS rebinding) gets nothing."""
    assert Door(host, names, TOKEN).admits(asked) == admitted


def test_a_foreign_name_gets_no_page(client):
    browser = client()
    for path in (*PAGES, "/static/page.css", "/release"):
        answer = browser.get(path, headers={"Host": "evil.example"})
        assert answer.status_code == 421
        assert "--allow-host" in answer.text
        assert "orders" not in answer.text
        assert_headers(answer)


def basic(password, user="anybody"):
    told = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {told}"}


def test_beyond_loopback_reading_needs_the_token(client):
    browser = client(host="0.0.0.0")
    for path in (*PAGES, "/static/page.css", "/release?name=x", "/nowhere"):
        for headers in ({}, basic("wrong"), {"Authorization": "Bearer x"}, {"Authorization": "x"}):
            answer = browser.get(path, headers=headers, environ_base={"REMOTE_ADDR": path})
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"].startswith("Basic ")
            assert "orders" not in answer.text
            assert_headers(answer)
    assert browser.get("/", headers=basic(TOKEN)).status_code == 200


def test_on_loopback_reading_is_free(client):
    assert client().get("/").status_code == 200
    assert client(token=None).get("/").status_code == 200


BACKGROUND = {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "empty"}
LINK = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
FRAME = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}


@pytest.mark.parametrize(
    ("path", "site", "how", "code"),
    [
        ("/?q=zz", "cross-site", BACKGROUND, 403),
        ("/?q=zz", "same-site", BACKGROUND, 403),
        ("/?q=zz", "same-origin", BACKGROUND, 200),
        ("/?q=zz", "none", LINK, 200),
        ("/task?name=zz", "cross-site", BACKGROUND, 403),
        ("/task?name=zz", "cross-site", LINK, 200),
        ("/lock?name=zz", "cross-site", BACKGROUND, 403),
        ("/?q=zz", "cross-site", FRAME, 403),
        ("/?q=zz", "cross-site", {}, 403),
        ("/?q=zz", "cross-site", LINK, 200),
        ("/?q=zz", "same-site", LINK, 200),
        ("/?q=zz", "same-origin", LINK, 200),
        ("/static/page.css", "cross-site", BACKGROUND, 403),
    ],
)
def test_another_site_cannot_make_the_nodes_work(client, stand, path, site, how, code):
    """It may link to the page; whatever it asks for in the background is not even read."""
    asked, page, explain = [], stand.page, stand.explain
    stand.page = lambda search: asked.append(search.words) or page(search)
    stand.explain = lambda name, search: asked.append(name) or explain(name, search)
    with client().get(path, headers={"Sec-Fetch-Site": site, **how}) as answer:
        assert answer.status_code == code
        assert_headers(answer)
    assert asked == (["zz"] if code == 200 else [])


def test_a_name_of_another_machine_needs_the_token(client):
    """A proxy before loopback lets others in, under whatever name they call us."""
    browser = client(names=("localhost", "locks.example.com"))
    for host in ("locks.example.com", "127.0.0.1:8737"):
        assert browser.get("/", headers={"Host": host}).status_code == 401
        assert browser.get("/", headers={"Host": host, **basic(TOKEN)}).status_code == 200
    assert client(names=("localhost", "::1")).get("/").status_code == 200


def test_wrong_passwords_slow_down(client, caplog):
    browser = client(host="0.0.0.0")
    for _ in range(FREE):
        assert browser.get("/", headers=basic("wrong")).status_code == 401
    slowed = browser.get("/", headers=basic("wrong"))
    assert slowed.status_code == 429
    assert int(slowed.headers["Retry-After"]) >= 1
    other = browser.get("/", headers=basic("wrong"), environ_base={"REMOTE_ADDR": "10.0.0.9"})
    assert other.status_code == 401
    assert browser.get("/", headers=basic(TOKEN)).status_code == 200
    assert browser.get("/", headers=basic("wrong")).status_code == 429
    assert caplog.text.count("Refused to show the page to 127.0.0.1: wrong token") == FREE


def test_guessing_gets_slower_and_the_wait_is_bounded():
    now = [1000.0]
    attempts = Attempts(lambda: now[0])
    waits = []
    for _ in range(12):
        while wait := wait_after_wrong(attempts, "10.0.0.1"):
            waits.append(wait)
            now[0] += wait
    assert waits == sorted(waits)
    assert waits[0] == 1.0
    assert waits[-1] == LONGEST
    assert attempts.is_right("10.0.0.1", TOKEN, TOKEN)
    assert wait_after_wrong(attempts, "10.0.0.1") == LONGEST


def wait_after_wrong(attempts, address):
    """Send a wrong token; return for how long its sender has to wait [s], 0 if it was compared."""
    try:
        assert not attempts.is_right(address, "wrong", TOKEN)
    except TooManyRequests as error:
        return error.retry_after
    return 0


def test_guesses_at_once_count_as_many():
    """Threads do not get more free tries than one."""
    attempts = Attempts(lambda: 1000.0)
    with ThreadPoolExecutor(16) as threads:
        waits = list(threads.map(lambda _: wait_after_wrong(attempts, "h"), range(200)))
    assert waits.count(0) == FREE


def test_addresses_remembered_are_bounded_and_hosts_of_ipv6_are_one():
    """Nobody fills our memory, and a host with many addresses is one guesser."""
    attempts = Attempts(lambda: 1000.0)
    for i in range(ADDRESSES + 50):
        wait_after_wrong(attempts, f"10.0.{i // 250}.{i % 250}")
    assert len(attempts._wrong) == ADDRESSES
    waits = [wait_after_wrong(attempts, f"2001:db8::{i:x}") for i in range(FREE + 1)]
    assert waits[:-1] == [0] * FREE
    assert waits[-1] > 0


# -- the token -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "environment", "token"),
    [
        (None, {}, None),
        (None, {"REDLOCK_WEB_TOKEN": ""}, None),
        ("s" * 16, {}, "s" * 16),
        (None, {"REDLOCK_WEB_TOKEN": "e" * 16}, "e" * 16),
        ("s" * 16, {"REDLOCK_WEB_TOKEN": "e" * 16}, "e" * 16),
    ],
)
def test_the_environment_wins_over_the_setting(setting, environment, token):
    """So the token can be changed without the app's configuration."""
    settings = Settings.from_conf({"redlock_nodes": NODES, "redlock_web_token": setting})
    assert configured_token(settings, environment) == token


def test_a_short_token_is_refused_and_not_repeated():
    with pytest.raises(ConfigurationError, match="at least 16") as refused:
        configured_token(SETTINGS, {"REDLOCK_WEB_TOKEN": "tooshort"})
    assert "tooshort" not in str(refused.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "locks.example.com", ""])
def test_beyond_loopback_it_does_not_start_without_a_token(host):
    with pytest.raises(ConfigurationError, match="REDLOCK_WEB_TOKEN"):
        command.door_for(SETTINGS, host, ())
    with_token = Settings.from_conf({"redlock_nodes": NODES, "redlock_web_token": "s" * 16})
    assert not command.door_for(with_token, host, ()).is_private
    assert command.door_for(SETTINGS, "127.0.0.1", ()).is_private


def test_with_a_name_of_another_machine_it_does_not_start_without_a_token():
    with pytest.raises(ConfigurationError, match=r"--allow-host locks\.example\.com .*_TOKEN"):
        command.door_for(SETTINGS, "127.0.0.1", ("localhost", "locks.example.com"))
    assert command.door_for(SETTINGS, "127.0.0.1", ("localhost",)).is_private


@pytest.mark.parametrize("missing", ["flask", "waitress"])
def test_without_the_extra_the_fix_is_named(monkeypatch, missing):
    there = command.importlib.util.find_spec
    fake = SimpleNamespace(find_spec=lambda name: None if name == missing else there(name))
    monkeypatch.setattr(command, "importlib", SimpleNamespace(util=fake))
    with pytest.raises(click.ClickException, match=re.escape("pip install 'celery-redlock[web]'")):
        command.check_extra()


# -- releasing -----------------------------------------------------------------------------


def test_a_release_names_the_holder_first(client):
    page = client().get("/release?name=orders.bill:7&seen=0123abcd").text
    for told in ("orders.bill:7", "id-7", "worker-1", "4711", "5 of 5 nodes", SEEN, "LockLost"):
        assert told in page
    assert '<input id="token" name="token" type="password" autocomplete="off" required' in page


def test_a_release_with_the_token_is_done(client, stand, caplog):
    browser = client()
    stand.answers = {**stand.answers, LABELS[4]: "Connection refused"}
    answer = browser.post("/release", data={**confirm(browser), "token": TOKEN})
    assert answer.status_code == 200
    assert stand.released == [("orders.bill:7", SEEN)]
    page = answer.text
    assert "Released on 4 of 5 nodes" in page
    assert all(label in page for label in LABELS)
    assert "not asked: Connection refused" in page
    assert "Release of lock 'orders.bill:7' for 127.0.0.1" in caplog.text
    assert TOKEN not in caplog.text + page


def test_a_release_that_too_few_nodes_answered_says_so(client, stand):
    """The holder may then keep the lock; not if the others answer that they have none of it."""
    stand.answers = {**dict.fromkeys(LABELS, "timed out"), LABELS[0]: "released"}
    browser = client()
    page = browser.post("/release", data={**confirm(browser), "token": TOKEN})
    assert "too few answered" in page.text
    stand.views = [view(votes=1)]
    stand.answers = {**dict.fromkeys(LABELS, "free"), LABELS[0]: "released"}
    page = browser.post("/release", data={**confirm(browser), "token": TOKEN})
    assert "Released on 1 of 5 nodes.</strong>" in page.text


def test_a_lock_of_another_is_left_alone(client, stand):
    browser = client()
    form = confirm(browser)
    stand.views = [view(token="ffff0000", task_id="id-9", host="worker-9")]
    stand.answers = dict.fromkeys(LABELS, "held by another")
    answer = browser.post("/release", data={**form, "token": TOKEN})
    page = answer.text
    assert answer.status_code == 409
    assert "Nothing was released" in page
    assert "id-9" in page
    assert "worker-9" in page
    assert stand.released == [("orders.bill:7", SEEN)]


def test_too_few_answers_never_tell_that_nobody_holds_it(client, stand):
    browser = client()
    form = confirm(browser)
    stand.views, stand.silent = [], LABELS[2:]
    page = browser.get("/release?name=orders.bill:7&seen=0123abcd").text
    assert "nobody" not in page
    assert "any more" not in page
    assert "Cannot tell whether" in page
    assert all(label in page for label in LABELS[2:])
    stand.answers = {**dict.fromkeys(LABELS, "free"), **dict.fromkeys(LABELS[2:], "timed out")}
    answer = browser.post("/release", data={**form, "token": TOKEN})
    page = answer.text
    assert answer.status_code == 503
    assert "nobody holds the lock any more" not in page
    assert "banner good" not in page
    assert "it is not known who holds the lock" in page


def test_a_majority_of_answers_tells_that_nobody_holds_it(client, stand):
    browser = client()
    form = confirm(browser)
    stand.views, stand.silent = [], LABELS[3:]
    page = browser.get("/release?name=orders.bill:7&seen=0123abcd").text
    assert "nobody holds it" in page
    assert all(label in page for label in LABELS[3:])
    stand.answers = {**dict.fromkeys(LABELS, "free"), **dict.fromkeys(LABELS[3:], "timed out")}
    answer = browser.post("/release", data={**form, "token": TOKEN})
    assert answer.status_code == 200
    assert "nobody holds the lock any more" in answer.text


def test_who_has_gone_cannot_be_released(client, stand):
    stand.views = [view(token="ffff0000", task_id="id-9")]
    answer = client().get("/release?name=orders.bill:7&seen=0123abcd")
    page = answer.text
    assert "does not have the lock any more" in page
    assert "id-9" in page
    assert "seal" not in form_in(answer)


def test_what_others_wrote_cannot_be_released(client, stand):
    """A key that somebody set by hand has no token to tell it by; the page says what to do."""
    stand.views = [LockView("by-hand", {}, None, LABELS[:1], is_foreign=True)]
    browser = client()
    answer = browser.get("/release?name=by-hand&seen=")
    assert "redlock:lock:by-hand" in answer.text
    assert "seal" not in form_in(answer)
    assert "By hand…" in browser.get("/").text


def test_a_name_that_is_no_text_leads_nowhere(client, stand):
    """Asked for by what is left of its name, it would be free."""
    stand.views = [LockView("stra\ufffde", {}, None, LABELS[:1], is_foreign=True)]
    page = client().get("/").text
    assert "stra\ufffde" in page
    assert "By hand: its name is not UTF-8." in page
    assert 'href="/lock?name=stra' not in page
    assert 'href="/release' not in page


def test_without_a_token_there_is_nothing_to_release_with(client, stand, caplog):
    browser = client(token=None)
    assert "Release…" not in browser.get("/").text
    for answer in (browser.get("/release?name=x"), browser.post("/release", data={"name": "x"})):
        assert answer.status_code == 403
        assert "redlock_web_token" in answer.text
    assert "Refused to release lock 'x'" in caplog.text
    assert stand.released == []


@pytest.mark.parametrize("wrong", ["", "wrong", TOKEN[:-1], TOKEN + " ", TOKEN.upper(), "\udc80"])
def test_a_wrong_token_releases_nothing(client, stand, caplog, wrong):
    browser = client()
    answer = browser.post(
        "/release", data={**confirm(browser), "token": wrong.encode(errors="replace")}
    )
    assert answer.status_code == 403
    assert "That was not the token" in answer.text
    assert "seal" in form_in(answer)
    assert stand.released == []
    assert "wrong token" in caplog.text
    assert not wrong or f" {wrong}" not in caplog.text.replace("wrong token", "")


def test_wrong_tokens_slow_down_releasing(client, stand):
    browser = client()
    form = confirm(browser)
    for _ in range(FREE):
        assert browser.post("/release", data={**form, "token": "wrong"}).status_code == 403
    answer = browser.post("/release", data={**form, "token": "wrong"})
    assert answer.status_code == 429
    assert stand.released == []
    assert browser.post("/release", data={**form, "token": TOKEN}).status_code == 200
    assert stand.released == [("orders.bill:7", SEEN)]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:9999"},
        {"Origin": "http://[bad"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"},
    ],
)
def test_another_site_cannot_send_the_form(client, stand, headers, caplog):
    browser = client()
    form = {**confirm(browser), "token": TOKEN}
    answer = browser.post("/release", data=form, headers=headers)
    assert answer.status_code == 403
    assert stand.released == []
    assert "another site" in caplog.text


def test_our_own_page_can_send_the_form(client, stand):
    """With what a browser adds to it, also behind a proxy that speaks TLS."""
    for origin in ("http://localhost", "https://localhost"):
        stand.views = [view()]
        browser = client()
        headers = {"Origin": origin, "Sec-Fetch-Site": "same-origin"}
        form = {**confirm(browser), "token": TOKEN}
        assert browser.post("/release", data=form, headers=headers).status_code == 200


def test_a_form_is_good_for_one_browser_and_one_holder(client, stand, caplog):
    browser, other = client(), client()
    form = {**confirm(browser), "token": TOKEN}
    strangers = other.application.test_client()
    changes = [{"name": "orders.bill:8"}, {"seen": "ffff0000"}, {"seal": ""}, {"seal": "1.x"}]
    changes.append({"seal": form["seal"].replace(form["seal"][-4:], "0000")})
    answers = [browser.post("/release", data={**form, **change}) for change in changes]
    answers += [strangers.post("/release", data=form)]
    confirm(other)
    answers += [other.post("/release", data=form)]
    assert [answer.status_code for answer in answers] == [403] * 7
    assert all("begin again" in answer.text for answer in answers)
    assert stand.released == []
    assert caplog.text.count("form void") == 7


def test_the_cookie_is_out_of_reach(client):
    answer = client().get("/release?name=orders.bill:7&seen=0123abcd")
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith("redlock-web=")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Path=/release" in cookie


def test_a_form_gets_old(client, stand, monkeypatch):
    browser, now = client(), [1_000_000]
    monkeypatch.setattr(TimestampSigner, "get_timestamp", lambda _: now[0])
    form = {**confirm(browser), "token": TOKEN}
    for passed in (LIFETIME + 1, -1):
        now[0] = 1_000_000 + passed
        assert browser.post("/release", data=form).status_code == 403
    now[0] = 1_000_000 + LIFETIME
    restarted = client()
    restarted._cookies = browser._cookies
    assert restarted.post("/release", data=form).status_code == 403
    assert stand.released == []
    assert browser.post("/release", data=form).status_code == 200


def test_a_token_never_goes_into_an_address(client, stand):
    browser = client()
    answer = browser.post(f"/release?token={TOKEN}", data=confirm(browser))
    assert answer.status_code == 403
    assert stand.released == []


def test_a_form_that_is_too_long_is_refused(client, stand):
    answer = client().post("/release", data={"name": "x" * 100_000})
    assert answer.status_code == 413
    assert_headers(answer)


# -- what is shown -------------------------------------------------------------------------


def test_the_page_shows_all_there_is(client, stand):
    stand.statuses[3] = NodeStatus(LABELS[3], "quarantined", "9.1.2", 10.0, 31.5)
    stand.statuses[4] = NodeStatus(LABELS[4], "down", problem="Connection refused")
    stand.views = [view(renewals=6, margin=19.25), view("old", ttl=None, votes=1, task=None)]
    page = client().get("/").text
    text = " ".join(" ".join(Tags(page).texts).split())
    for told in (
        "Quorum: yes, without a node to spare. 3 of 5 nodes can vote, 3 are needed.",
        "quarantined", "32 s", "down", "Connection refused", "9.1.2", "1 d 0 h",
        "orders.bill:7", "id-7", "worker-1", "4711", "5 of 5", "12 s", "renewed 6 times",
        "leaked", "never expires", "1 of 5", "no majority",
        "skipped", "id-8", "is held by task orders.bill [ id-7 ]",
        "5 times, 600 ms on average", "does not answer",
    ):  # fmt: skip
        assert told in text, told


@pytest.mark.parametrize(
    ("state", "quarantine", "left"), [("unmarked", 0.0, "64 s"), ("quarantined", 41.3, "41 s")]
)
def test_without_a_quorum_the_page_says_so(client, stand, state, quarantine, left):
    stand.statuses = [NodeStatus(label, state, "9.1.2", 9.0, quarantine) for label in LABELS]
    page = client().get("/").text
    (told,) = re.findall(r"Quorum: NO\..*", page)
    assert "redlock bootstrap" in told
    assert left in told


def test_without_a_quorum_nobody_is_never_said(client, stand):
    stand.views, stand.happened, stand.silent = [], [], LABELS[2:]
    browser = client()
    for path, told in (("/", "whether any lock is held"), ("/?q=x", "whether such a lock is held")):
        page = browser.get(path).text
        assert f"Cannot tell {told}" in page
        assert "Nobody holds" not in page
        assert "No live lock" not in page
        assert "no live lock" not in page
        assert re.search(rf'No answer from\s+<bdi class="code">{LABELS[2]}', page)
    stand.silent = LABELS[3:]
    page = browser.get("/").text
    assert "Nobody holds a lock." in page
    assert "No answer from" in page


def test_an_open_burst_is_shown_and_cannot_be_ended(client, stand):
    newest = {"token": b"9" * 32, "info": {"task_id": "newest"}, "left": 7.0, "merged": 0}
    for is_burst in (True, False):
        one = StoredReservation(is_running=False, is_burst=is_burst, **newest)
        stand.reserved = [ReservationView("index:7", one, LABELS)]
        page = client().get("/").text
        assert ("the newest call of a burst" in page) is is_burst
        assert ("seen=99999999" in page) is not is_burst
        assert ("debounced" in seen_in(client().get("/?q=index:7"))) is is_burst
    stored = StoredLock(burst=replace(one, is_burst=True))
    places = Places([OneLock("index:7", stand.statuses, dict.fromkeys(LABELS, stored))])
    stand.explain = lambda name, search: (explained(None, places, iter(())), 0.0)
    page = seen_in(client().get("/lock?name=index:7"))
    assert re.search(r"Debounced: .*newest.*, is the newest call of a burst", page), page


def test_too_few_answers_never_tell_that_no_name_is_reserved(client, stand):
    browser = client()
    assert "No name is reserved at publish without a lock." in seen_in(browser.get("/"))
    stand.silent = LABELS[2:]
    assert "Cannot tell whether any name is reserved" in seen_in(browser.get("/"))
    stand.page = lambda search: Page(stand.statuses, None, None, None, 0.0)
    page = seen_in(browser.get("/"))
    assert "Not known yet." in page
    assert "name is reserved" not in page


def test_a_lock_that_quarantined_nodes_have_is_unclear(client, stand):
    """They vote for nobody, and it may be held all the same; the pages say where it is."""
    stand.views = [replace(view(votes=0), quarantined=LABELS[:3])]
    page = seen_in(client().get("/?q=orders"))
    assert "on at least 3 of 5 nodes" in page
    assert "too few may vote to say whether it is held" in page
    stand.views = [LockView("by-hand", {}, None, is_foreign=True, quarantined=LABELS[:1])]
    page = seen_in(client().get("/release?name=by-hand"))
    assert re.search(rf"by hand, on\s+{LABELS[0]}", page), page
    stored = {LABELS[0]: StoredLock(b"by hand", 12.0, is_quarantined=True)}
    places = Places([OneLock("by-hand", stand.statuses, stored)])
    stand.explain = lambda name, search: (explained(None, places, iter(())), 0.0)
    page = seen_in(client().get("/lock?name=by-hand"))
    assert re.search(rf"has written its key, on\s+{LABELS[0]}", page), page


def test_a_lock_that_silent_nodes_may_have_is_unclear(client, stand):
    """Two votes are no majority, nor an attempt, while three nodes do not answer."""
    stand.views, stand.silent = [view(votes=2)], LABELS[2:]
    page = client().get("/?q=orders").text
    assert ">unclear</span>" in page
    assert ">no majority</span>" not in page
    assert "too few answered to say whether it is held" in page
    assert "There may be other locks" in page
    stand.silent = []
    assert ">no majority</span>" in client().get("/").text


def test_what_could_not_be_read_is_said(client, stand):
    stand.page = lambda search: Page(None, None, None, None, 0.0)
    page = client().get("/?q=x").text
    assert "have not answered yet" in page
    assert page.count("Not read yet") == 4
    stand.explain = lambda name, search: (None, 0.0)
    page = client().get("/lock?name=x").text
    assert "have not answered yet" in page
    assert page.count("Not read yet") == 4
    stand.page = lambda search: Page(stand.statuses, Found([]), [], Tallies(), 30.0)
    assert "The nodes are slow" in client().get("/").text


@pytest.mark.parametrize("is_read", list(itertools.product((True, False), repeat=4)))
def test_each_part_may_be_missing(client, stand, is_read):
    page = stand.page(Search())
    parts = zip((page.nodes, page.found, page.records, page.tallies), is_read, strict=True)
    some = Page(*(part if there else None for part, there in parts), 0.0)
    stand.page = lambda search: some
    browser = client()
    for path in ("/", "/?q=x", "/?before=1", "/task?name=orders.bill", "/task?name=x&event=nodes"):
        assert browser.get(path).status_code == 200


NASTY = (
    "<script>alert('1')</script>\"'><img src=x onerror=alert(1)>{{ 7*7 }}&lt;\x00\x1b[31m\u202e\n"
)


def test_whatever_others_wrote_is_harmless(client, stand):
    fields = dict.fromkeys(HOLDER, NASTY)
    stand.views = [view(NASTY, token=NASTY[:8], **fields), view("x", token=NASTY[:8], ttl=None)]
    stand.happened = [
        {**dict.fromkeys(skipped(), NASTY), "at": time.time()}
        | {"event": kind, "holder": fields, "reason": NASTY, "node": NASTY, "entry": NASTY}
        | {"holder_id": NASTY, "countdown": NASTY, "times": NASTY, "cause": "conflict"}
        for kind in (
            "TaskSkipped", "TaskRefused", "TaskRetried", "TaskRescheduled", "DuplicatePublished",
            "LeaseLost", "SlotSkipped", "LeaderElected", "LeaderDeposed", "NodeDown", "NodeUp",
            "NodeQuarantined", "NodeClockJump", NASTY,
        )
    ]  # fmt: skip
    stand.tasks = {NASTY: tally({8: 1}, refused={"conflict": 1}, examples={"conflict": fields})}
    stand.statuses = [NodeStatus(NASTY, NASTY, NASTY, 1.0, 1.0, NASTY)] * 5
    stand.answers = {NASTY: NASTY}
    browser = client()
    answers = [
        browser.get("/"),
        browser.get("/", query_string={"q": NASTY}),
        browser.get("/report"),
        browser.get("/release", query_string={"name": NASTY, "seen": NASTY[:8]}),
        browser.get("/release", query_string={"name": NASTY, "seen": "other"}),
    ]
    for answer in answers:
        assert answer.status_code == 200
        assert_harmless(answer.text)
    assert "alert" in answers[0].text


def assert_harmless(page):
    tags = Tags(page).tags
    assert all(
        attributes.get("src", "").startswith("/static/")
        for tag, attributes in tags
        if tag == "script"
    )
    assert "img" not in {tag for tag, _ in tags}
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    assert "{{ 7*7 }}" in page or "{{" not in page
    told = re.sub(r'(value|href)="[^"]*"', "", page)  # where the name must be exact
    for char in "\x00\x1b\u202e":
        assert char not in told


def test_the_result_of_a_release_is_harmless(client, stand):
    """Names of nodes and what they answered are not ours, either."""
    stand.answers = {NASTY: NASTY}
    browser = client()
    answer = browser.post("/release", data={**confirm(browser), "token": TOKEN})
    assert_harmless(answer.text)


def test_log_lines_cannot_be_forged(client, stand, caplog):
    name = "a\nERROR forged\x1b[31m"
    stand.views = [view(name)]
    browser = client()
    answer = browser.get("/release", query_string={"name": name, "seen": SEEN})
    field = re.search(r'name="name" value="([^"]*)"', answer.text)
    assert field is not None
    browser.post("/release", data={**form_in(answer), "name": name, "token": "wrong"})
    browser.post("/release", data={**form_in(answer), "name": name, "token": TOKEN})
    messages = [it.getMessage() for it in caplog.records if "forged" in it.getMessage()]
    assert len(messages) == 2
    assert all(message.isprintable() for message in messages)
    assert stand.released == [(name, SEEN)]


@pytest.mark.parametrize("name", ["a\nb", "a\rb\r\n", " a\x00 ", "50%25", "ü/é?x=1&y#z", "\u2028"])
def test_a_name_of_any_characters_can_be_released(client, stand, name):
    """Browsers send line breaks in their own way, and no field with a null as it was."""
    stand.views = [view(name)]
    browser = client()
    sent = {
        key: re.sub(r"\r\n|\r|\n", "\r\n", value.replace("\0", "\ufffd"))
        for key, value in confirm(browser, name).items()
    }
    assert browser.post("/release", data={**sent, "token": TOKEN}).status_code == 200
    assert stand.released == [(name, SEEN)]


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("plain name-7", "plain name-7"),
        ("tür 錠 مفتاح", "tür 錠 مفتاح"),
        ("a\u202eb", r"a\u202eb"),
        ("a\x1b[0m\r\nb", r"a\u001b[0m\u000d\u000ab"),
        ("a\u200bb\u2028\ufeff", r"a\u200bb\u2028\ufeff"),
        ("\U000e0041", r"\U000e0041"),
        ("\udc80", r"\udc80"),
    ],
)
def test_what_cannot_be_seen_is_written_out(given, seen):
    """Names of any script stay; controls and turns of direction do not act."""
    assert visible(given) == seen


@pytest.mark.parametrize(
    ("name", "shown"), [(" ", r"\u0020"), ("  a b ", r"\u0020\u0020a b\u0020"), ("", "")]
)
def test_blanks_at_the_ends_of_a_name_are_seen(name, shown):
    """Two names that look alike are not; and a link needs something to be clicked."""
    assert text(name) == shown


def test_long_names_are_shortened_in_the_middle():
    """Begin and end are told, as names of one task differ at the end."""
    told = text("orders.bill:" + "x" * 5000 + "-7")
    assert len(told) == 80
    assert told.startswith("orders.bill:")
    assert told.endswith("-7")


@pytest.mark.parametrize("odd", [None, True, [], {}, "x", -1, float("inf"), float("nan"), 10**400])
def test_what_is_no_time_is_none(odd):
    assert moment(odd) is None


def test_a_holder_of_any_shape_is_shown(client, stand):
    odd = [None, True, [], {}, [1], {"a": 1}, -1, 1e308, float("nan"), 10**400, ""]
    stand.views = [view(f"n{i}", **dict.fromkeys(HOLDER, it)) for i, it in enumerate(odd)]
    keys = (*skipped(), "countdown", "left", "jump", "reason", "led")
    kinds = ("TaskSkipped", "TaskRetried", "NodeClockJump", "NodeQuarantined", "LeaderDeposed")
    stand.happened = [
        *({**dict.fromkeys(keys, it), "event": kind} for it in odd for kind in kinds),
        *({"event": it} for it in odd),
        {},
    ]
    keys = ("at", "host", "pid", "name", "task_id", "holder", "holder_id", "reason")
    stand.tasks = {
        f"task {number}": tally(refused={cause: 1}, examples={cause: dict.fromkeys(keys, it)})
        for number, (cause, it) in enumerate(itertools.product(CAUSES, odd))
    }
    browser = client()
    assert browser.get("/").status_code == 200
    assert browser.get("/report").status_code == 200
    assert browser.get("/?q=a").status_code == 200


# -- search and bounds ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("", True),
        ("ORDERS.bill", True),
        ("id-7", True),
        ("bill worker-1", True),
        ("4711", True),
        ("bill worker-9", False),
        ("leaked", False),
        ("nightly", False),
    ],
)
def test_a_search_finds_by_every_field(client, search, found):
    page = client().get("/", query_string={"q": search}).text
    assert ('href="/release?name=orders.bill:7' in page) == found


def test_a_search_shows_lock_holder_and_refusals_together(client):
    """Why did my task not run? Asked by its id, by its name and by the lock."""
    browser = client()
    for search in ("id-7", "orders.bill", "orders.bill:7"):
        page = browser.get("/", query_string={"q": search}).text
        text = " ".join("".join(Tags(page).texts).split())
        assert "Lock orders.bill:7 is held by task orders.bill[id-7]" in text
        assert "1 min 0 s ago: Skipped task orders.bill[id-8]" in text
    nothing = browser.get("/?q=nightly").text
    assert "Nothing matches: no live lock" in nothing


@pytest.mark.parametrize("leaked", [7, 1777])
def test_of_many_locks_a_part_is_shown(leaked):
    views = (view(f"n{i}", ttl=None if i == leaked else 5.0) for i in range(2000))
    found = find_locks(views, Search(), lambda: 0.0)
    assert (len(found.locks), found.more, found.complete) == (
        searching.SHOWN,
        2000 - searching.SHOWN,
        True,
    )
    assert found.locks[0].name == f"n{leaked}"


def test_of_many_locks_those_are_shown_that_need_somebody():
    """The one that somebody waits for and the one that has been held for longest, wherever."""
    views = [replace(view(f"n{i}"), waiting=0) for i in range(502)]
    views[333] = replace(views[333], waiting=1)
    views[444] = replace(views[444], holder={**views[444].holder, "since": time.time() - 86400})
    found = find_locks(views, Search(), lambda: 0.0)
    assert {"n333", "n444"} < {it.name for it in found.locks}
    assert len(found.locks) + found.more == 502


def test_a_search_ends_in_time():
    clock = itertools.count(step=0.001)
    views = (view(f"n{i}") for i in itertools.count())
    found = find_locks(views, Search("n9"), lambda: next(clock))
    assert not found.complete
    assert found.looked < 1100
    assert found.locks


def test_nodes_that_hang_are_waited_for_at_once(monkeypatch):
    together = threading.Barrier(len(NODES))

    @contextlib.contextmanager
    def connected(address):
        together.wait(60)
        raise RedisError
        yield

    monkeypatch.setattr(all_locks, "connected", connected)
    locks = all_locks.AllLocks(NODES, SETTINGS.rules)
    assert list(locks) == []
    assert locks.silent == LABELS


def test_waiting_for_the_first_lock_is_no_search():
    """Nodes that hang are waited for before it; the others are searched all the same."""
    now = [0.0]

    def views():
        now[0] += 3 * searching.LONGEST
        yield from (view(f"n{i}") for i in range(9))

    assert find_locks(views(), Search(), lambda: now[0]).complete


@pytest.mark.parametrize(
    ("found", "more", "path", "told"),
    [
        ([], 0, "/?q=x", "No lock has such a name."),
        ([], 0, "/?q=x", "those of 9,000 locks only"),
        ([view()], 0, "/?q=x", "look at 9,000 locks only"),
        ([view()], 8000, "/", "At least 8,000 more"),
    ],
    ids=["no name", "nothing else", "some", "very many"],
)
def test_a_search_that_ended_early_says_so(client, stand, found, more, path, told):
    part = Found(found, more, 9000, complete=False)
    stand.page = lambda _: Page(stand.statuses, part, [], Tallies(), 0.0)
    assert told in client().get(path).text


@pytest.mark.parametrize(
    ("search", "pattern"),
    [
        ("bill", b"*[bB][iI][lL][lL]*"),
        ("a orders:7", b"*[oO][rR][dD][eE][rR][sS]:7*"),
        ("a*?[]^", b"*[aA]\\*\\?\\[\\]\\^*"),
        ("\u00fcb", b"**[bB]*"),
        ("", b"**"),
    ],
)
def test_nodes_are_asked_for_names_with_a_word(search, pattern):
    """The longest one, in either case; what means something to SCAN is taken by itself."""
    assert searching.name_pattern(search) == pattern


def test_what_is_found_twice_is_shown_once():
    """By its name, and by going through all; other holders of one name are others."""
    by_name = Found([view("b"), view("b", token="ffff0000")], looked=2, silent=["x"])
    by_all = Found([view("b"), view("a")], 3, 900, complete=False, silent=["x", "y"])
    found = searching.together(by_name, by_all)
    assert found.silent == ["x", "y"]
    assert [it.name for it in found.locks] == ["a", "b", "b"]
    assert (found.more, found.looked, found.complete, found.names_complete) == (3, 900, False, True)


def test_a_long_search_is_cut(client, stand):
    asked = []
    page = stand.page
    stand.page = lambda search: asked.append(search.words) or page(search)
    client().get("/", query_string={"q": "x" * 5000})
    assert asked == ["x" * 200]


def test_what_happened_is_turned_over_page_by_page(client, stand):
    stand.happened = [skipped(id=f"r{i}", task_id=f"old-{i}-") for i in range(3 * ENTRIES)]
    browser, seen, path = client(), [], "/?q=orders"
    while path:
        page = browser.get(path).text
        section = page[page.index('<table class="cards entries') :]
        seen += dict.fromkeys(re.findall(r"old-(\d+)-", section))
        older = re.search(r'href="([^"]*before=[^"]*)#happened">Older', page)
        path = older[1].replace("&amp;", "&") if older else ""
        assert not path or "q=orders" in path
    assert list(map(int, seen)) == list(range(3 * ENTRIES - 1, -1, -1))
    forgotten = browser.get("/?before=gone").text
    assert "the journal has forgotten it" in forgotten
    assert "Newest" in forgotten


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("", "skipped lost down"),
        ("event=TaskSkipped", "skipped"),
        ("event=refused", "skipped lost"),
        ("event=nodes", "down"),
        ("event=nonsense", "skipped lost down"),
        ("since=15m", "skipped"),
        ("since=1h", "skipped lost"),
        ("since=nonsense", "skipped lost down"),
        ("since=1h&event=LeaseLost", "lost"),
        ("q=orders&event=NodeDown", ""),
    ],
)
def test_what_happened_is_filtered_by_event_and_time(client, stand, asked, expected):
    now = time.time()
    stand.happened = [
        {"id": "3", "event": "NodeDown", "at": now - 9000, "node": "down-node", "reason": "x"},
        skipped(id="2", event="LeaseLost", at=now - 2000, task_id="lost-id", reason="deadline"),
        skipped(id="1", task_id="skipped-id"),
    ]
    page = client().get(f"/?{asked}").text
    section = page[page.index('id="happened"') : page.index('id="locks"')]
    marks = {"skipped-id": "skipped", "lost-id": "lost", "down-node": "down"}
    assert [word for mark, word in marks.items() if mark in section] == expected.split()


def test_one_cause_is_one_row(client, stand):
    """However many processes have reported it; what happens again is another one."""
    now = time.time()
    stand.happened = [
        {"id": f"{again}{pid}", "event": "NodeDown", "node": "n", "pid": pid, "host": "h"}
        | {"at": now - 500 + 200 * again + pid, "reason": "Connection refused"}
        for again in (0, 1)
        for pid in range(5)
    ]
    page = client().get("/").text
    assert page.count("5 processes") == 2
    assert page.count("Lock node n is down") == 2


# -- the page of a task, and of a lock -------------------------------------------------------


def seen_in(answer):
    return " ".join(" ".join(Tags(answer.text).texts).split())


def test_the_page_of_a_task_says_why_it_did_not_run(client, stand):
    stand.views = [view(), view("other:1", task="other.task", task_id="id-1")]
    stand.happened = [
        skipped(id="a", at=time.time() - 600),
        skipped(id="b", cause="unavailable", holder={}),
        skipped(id="c", event="TaskRescheduled", countdown=8.0, times=2),
        skipped(id="d", task="other.task", task_id="id-other"),
    ]
    stand.tasks["other.task"] = tally({8: 7})
    answer = client().get("/task?name=orders.bill")
    page = seen_in(answer)
    for told in (
        "3 attempts: 2 skipped, 1 rescheduled", "nobody that is known: no quorum of nodes",
        "2 times", "5 holds, 600 ms on average", "(attempt 2)", "Its live locks 1",
    ):  # fmt: skip
        assert told in page, told
    assert "id-other" not in page
    assert "other:1" not in page
    labels = [it.get("aria-label", "") for tag, it in Tags(answer.text).tags if tag == "svg"]
    assert any(label.startswith("Refusals over time: ") for label in labels)
    assert "Hold times: 32 ms to 100 ms: 4; 100 ms to 320 ms: 1" in labels


def test_the_page_of_the_report_says_what_was_refused(client, stand):
    holder = {"task": "orders.bill", "task_id": "id-7", "host": "worker-1", "pid": 4711}
    example = {"at": time.time() - 60, "task_id": "id-8", "host": "worker-2", "pid": 5}
    example |= {"name": "orders.bill:7", "holder": holder}
    stand.tasks = {
        "orders.bill": tally(
            {10: 4, 13: 1}, ran_reported=5, reported={"conflict": 3}, examples={"conflict": example}
        ),
        "other.task": tally({8: 7}),
    }
    stand.silent = LABELS[4:]
    page = seen_in(client().get("/report"))
    for told in (
        "3 x lock was held", "ran in report mode: nothing was refused", "task id id-8",
        "process 5 on worker-2", "held by task orders.bill[id-7], process 4711 on worker-1",
        "too short to advise", "No answer from lock-5", "never", "Watched for 1 h 59 min",
    ):  # fmt: skip
        assert told in page, told
    stand.tasks = {}
    assert "Nothing was counted" in seen_in(client().get("/report"))
    stand.silent = LABELS[2:]
    page = seen_in(client().get("/report"))
    assert "No answer from lock-3" in page
    assert "Nothing was counted" not in page
    stand.tallies = lambda: (None, 0.0)
    assert "not answered yet" in seen_in(client().get("/report"))


def test_the_page_of_a_task_that_nobody_knows_is_no_error(client):
    """Its name may be wrong, or it was never refused."""
    page = seen_in(client().get("/task?name=nobody"))
    assert "The journal knows of no refusal of this task" in page
    assert "No live lock matches" in page


def test_many_blockers_are_counted(client, stand):
    stand.happened = [
        skipped(id=f"r{i}", holder={"task_id": f"by-{i}-", "host": "h"}) for i in range(50)
    ]
    page = client().get("/task?name=orders.bill").text
    table = page[page.index("What was in its way") : page.index('id="charts"')]
    assert "by-49-" in table
    assert "by-1-" not in table
    assert f"{50 - BLOCKERS} more" in table


def test_the_page_of_a_lock_says_who_holds_it(client, stand):
    stand.silent = LABELS[4:]
    answer = client().get("/lock?name=orders.bill:7")
    page = seen_in(answer)
    for told in ("This lock is held.", "id-7", "4 of 5", "token 0123abcd", "no answer", "id-8"):
        assert told in page, told
    assert 'href="/release?name=orders.bill:7&amp;seen=0123abcd"' in answer.text
    free = client(token=None).get("/lock?name=nightly").text
    assert "This lock is free." in free
    assert "/release" not in free


def waits(letter, since):
    waiter = Waiter("orders.bill", f"id-{letter}", "web-3", 7, since)
    return RecordedWaiter(letter.encode() * 32, time.time(), waiter)


def test_the_page_of_a_lock_says_who_waits_for_it(client, stand):
    assert "Nobody." in seen_in(client().get("/lock?name=orders.bill:7"))
    stand.waiters = [waits("a", time.time() - 5), waits("b", time.time() - 3725)]
    page = seen_in(client().get("/lock?name=orders.bill:7"))
    assert page.index("id-b") < page.index("id-a")
    assert "web-3" in page
    assert "2, the first since 1 h 2 min ago" in page
    assert "b" * 8 not in page


def test_a_long_line_is_cut_and_counted(client, stand):
    stand.waiters = [waits(f"{i:04x}", time.time() - i) for i in range(60)]
    page = seen_in(client().get("/lock?name=orders.bill:7"))
    assert "10 more wait" in page


def test_the_page_of_a_lock_shows_all_its_places(client, stand):
    stand.places = 3
    page = seen_in(client().get("/lock?name=orders.bill:7"))
    for told in ("Of this lock, 3 of 3 places are held.", "place 0", "place 1", "place 2"):
        assert told in page, told


def test_a_list_of_locks_says_since_when_the_oldest_waits(client, stand):
    assert "the first since" not in seen_in(client().get("/"))
    stand.views = [replace(view(), waiting_since=time.time() - 3725)]
    assert "3, the first since 1 h 2 min ago" in seen_in(client().get("/"))


def test_a_filter_of_a_lock_goes_through_all_that_was_refused_for_it(monkeypatch):
    """Not through the newest of it alone."""
    lost = skipped(id="lost", event="LeaseLost", at=time.time() - 900)
    records = [lost, *(skipped(id=f"r{i}") for i in range(50))]
    lock = OneLock("orders.bill:7", [], {})
    monkeypatch.setattr(reader, "read_places", lambda *_: Places([lock]))
    monkeypatch.setattr(reader.JournalTail, "read", lambda _: records)
    it = reader.Reader(NODES, SETTINGS.rules)
    try:
        found, _ = it.explain("orders.bill:7", Search(events=("LeaseLost",)))
        assert found.recent == [lost]
    finally:
        it.close()


def test_a_long_name_is_no_other(client, stand):
    """It is not cut on its way, and the journal, which knows all of it, is asked for all of it."""
    name = f"orders.bill:{'x' * 5000}-7"
    stand.views, stand.happened = [view(name)], [skipped(name=name)]
    browser = client()
    assert "This lock is held." in browser.get("/lock", query_string={"name": name}).text
    page = browser.get("/lock", query_string={"name": shorten(name)}).text
    assert f'href="/?q={name}"' in page


def test_a_name_that_is_shortened_in_its_key_is_found():
    """By all of it, as somebody has it from a log."""
    name = f"orders.bill:{'x' * 150}-7"
    search, key = Search(name), shorten(name)
    assert search.has_lock(view(key))
    assert not search.has_lock(view("orders.bill:7"))
    for pattern in (searching.name_pattern(name), searching.scan_pattern(name)):
        assert fnmatchcase(key, pattern.decode())
    assert searching.scan_pattern("\udcff") == b"*\xff*"


def test_too_few_answers_never_tell_that_a_lock_is_free(client, stand):
    stand.silent = LABELS[2:]
    page = seen_in(client().get("/lock?name=nightly"))
    assert "Whether this lock is held, no quorum could say: 2 of 5 nodes vote" in page
    assert "Nobody." not in page
    assert "Not known: too few nodes answered." in page


@pytest.mark.parametrize(("away", "is_said"), [(0, False), (1, False), (2, True), (3, True)])
def test_the_page_of_a_lock_says_that_a_quorum_is_in_danger(client, stand, away, is_said):
    """As the page of all locks does: what it shows may end soon, or cannot be told."""
    stand.statuses = [
        replace(status, state="quarantined", quarantine=9.0) if number < away else status
        for number, status in enumerate(stand.statuses)
    ]
    page = seen_in(client().get("/lock?name=orders.bill:7"))
    whole = seen_in(client().get("/"))
    headline = Quorum(stand.statuses, Rules()).headline
    assert (headline in page) is is_said, page
    assert headline in whole


def test_every_lock_task_and_id_leads_somewhere(client):
    browser = client()
    links = set(re.findall(r'href="([^"#]+)"', browser.get("/").text))
    expected = {"/task?name=orders.bill", "/lock?name=orders.bill:7", "/?q=id-7", "/?q=id-8"}
    assert expected <= links
    for link in links:
        with browser.get(link.replace("&amp;", "&")) as answer:
            assert answer.status_code == 200, link


def test_an_address_is_cut_and_cleaned():
    asked = Asked.of({"q": f"  {'x' * 500}", "event": "x", "since": "9y", "before": "y" * 500})
    assert (len(asked.q), asked.event, asked.since, len(asked.before)) == (198, "", "", 200)


@pytest.mark.parametrize(
    ("up", "total", "mark"),
    [(5, 5, "good"), (4, 5, "good"), (3, 5, "warn"), (2, 5, "bad"), (2, 3, "warn"), (1, 1, "good")],
)
def test_a_quorum_without_a_node_to_spare_is_amber(client, stand, up, total, mark):
    """Three states, not two; one node alone never has any to spare, and that is no news."""
    stand.statuses = [
        NodeStatus(label, "up" if i < up else "down") for i, label in enumerate(LABELS[:total])
    ]
    page = client().get("/").text
    assert f'<p class="banner {mark}"><strong>Quorum:' in page
    assert ("without a node to spare" in page) == (mark == "warn")


# -- charts --------------------------------------------------------------------------------


def drawn(client, chart):
    app = client().application
    with app.app_context():
        macros = app.jinja_env.get_template("macros.html").module
    return Tags(str(macros.figure(chart, "caption", "name"))).tags


@pytest.mark.parametrize(
    "chart",
    [
        hold_chart(tally({place: 10**place for place in range(0, 10, 2)}).holds),
        time_chart([10**i if i % 2 else 0 for i in range(24)], 86400.0),
    ],
)
def test_bars_stay_inside_the_drawing(client, chart):
    tags = drawn(client, chart)
    width, height = map(float, dict(tags)["svg"]["viewbox"].split()[2:])
    bars = [{k: float(v) for k, v in it.items() if k != "class"} for t, it in tags if t == "rect"]
    assert len(bars) == sum(bar.count > 0 for bar in chart.bars)
    for bar in bars:
        assert bar["x"] >= 0
        assert bar["x"] + bar["width"] <= width
        assert bar["y"] >= 0
        assert bar["y"] + bar["height"] <= height
    heights = [bar["height"] for bar in bars]
    assert heights == sorted(heights)
    assert heights[0] > 0
    for tag, it in tags:
        assert tag not in ("line", "text") or 0 <= float(it.get("x", it.get("x1"))) <= width


@pytest.mark.parametrize(
    ("count", "words"),
    [(999, "999"), (9_960, "10k"), (99_700, "99k"), (1_500_000, "1.5M"), (10**12, "1000G")],
)
def test_a_count_over_a_bar_is_short(count, words):
    """There is room for few characters."""
    assert short(count) == words


# -- keeping what was read -----------------------------------------------------------------


def test_searches_never_starve_the_main_page(monkeypatch):
    """However many there are, and however slow: it has a thread of its own."""
    go, begun = threading.Event(), threading.Event()

    def go_through(self, like, search):
        if search.words:
            begun.set()
            go.wait(60)
        return Found([])

    monkeypatch.setattr(reader.Reader, "_go_through", go_through)
    it = reader.Reader(NODES, SETTINGS.rules)
    try:
        for i in range(2 * reader.SEARCHES):
            it._found(Search(f"s{i}")).ask()
        assert begun.wait(60)
        assert read(it._found(Search())) is not None
    finally:
        go.set()
        it.close()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def read(cached, patience=60):
    wait([cached.ask()], patience)
    return cached.value


def test_many_pages_cost_one_reading(threads):
    go, readings = threading.Event(), []

    def count():
        go.wait(60)
        readings.append(1)
        return len(readings)

    it = Cached(count, threads, lambda: 0.0)
    with ThreadPoolExecutor(10) as pages:
        asked = [pages.submit(read, it) for _ in range(10)]
        go.set()
        assert {page.result() for page in asked} == {1}
    assert read(it) == 1


def test_a_slow_node_keeps_no_page_waiting(threads):
    now, go = [0.0], threading.Event()
    values = iter("ab")

    def slow():
        value = next(values)
        if value == "b":
            go.wait(60)
        return value

    it = Cached(slow, threads, lambda: now[0])
    assert read(it) == "a"
    now[0] += reader.FRESH
    assert read(it, 0) == "a"
    go.set()
    assert read(it) == "b"


def test_what_is_known_to_have_changed_is_read_again(monkeypatch):
    """After a release, nobody is shown the lock that is gone, by a reading under way, either."""
    begun, go, values = threading.Event(), threading.Event(), iter([["old"], ["new"]])

    def go_through(self, like, search):
        found = Found(next(values))
        begun.set()
        go.wait(60)
        return found

    monkeypatch.setattr(reader.Reader, "_go_through", go_through)
    monkeypatch.setattr(reader, "release_seen", lambda *_: {})
    it = reader.Reader(NODES, SETTINGS.rules)
    try:
        under_way = it._found(Search()).ask()
        assert begun.wait(60)
        it.release("n", SEEN)
        go.set()
        wait([under_way], 60)
        assert read(it._found(Search())).locks == ["new"]
    finally:
        go.set()
        it.close()


def test_a_slow_reading_rests_as_long_as_it_took(threads):
    """However slow the nodes are, they are asked at most half of the time."""
    now, readings = [0.0], []

    def slow():
        now[0] += 7.0
        readings.append(now[0])

    it = Cached(slow, threads, lambda: now[0])
    read(it)
    now[0] += 6.9
    read(it)
    assert len(readings) == 1
    now[0] += 0.2
    read(it)
    assert len(readings) == 2


def test_a_reading_that_fails_leaves_the_older_one(threads, caplog):
    now, divisors = [0.0], iter([1, 0, 2])
    it = Cached(lambda: 2 / next(divisors), threads, lambda: now[0])
    assert read(it) == 2
    now[0] += 1.0
    assert read(it) == 2
    assert "ZeroDivisionError" in caplog.text
    now[0] += 1.0
    assert read(it) == 1


def test_log_level_of_releases_is_seen_by_default(client, stand, caplog):
    """They are warnings: an operator wants to know who took whose lock."""
    browser = client()
    with caplog.at_level(logging.WARNING):
        browser.post("/release", data={**confirm(browser), "token": TOKEN})
    (record,) = [it for it in caplog.records if it.getMessage().startswith("Release of lock")]
    assert record.levelno == logging.WARNING
