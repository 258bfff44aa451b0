"""
The web page, asked anything by anybody: an answer in words, nothing reflected, nothing released.

What others wrote on the nodes is covered by the tests of the page itself, field by field; here it
comes as bytes, the way it is read, and together with what a browser or an attacker may send.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_redlock.lock.records import object_in
from celery_redlock.ops.web.app import make_app
from celery_redlock.ops.web.guard import Door
from celery_redlock.ops.web.reader import Page
from celery_redlock.ops.why import explained
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.reading.one_lock import OneLock
from celery_redlock.reading.places import Places
from celery_redlock.reading.read_script import stored
from celery_redlock.reading.search import find_locks
from celery_redlock.reading.stored import burst_views, reservation_views, views_of
from celery_redlock.reading.tally_reader import Tallies
from celery_redlock.settings import Settings
from fuzz.hostile import ACTING, JSON, TEXTS, in_json

NODES = [f"redis://lock-{i}:6379/0" for i in range(1, 4)]
LABELS = [f"lock-{i}:6379/0" for i in range(1, 4)]
OPERATORS = "correct horse battery"
TOKEN = b"0123abcd" + b"e" * 32
QUEUED = [b"t", b"{}", b"1000", b"", b"", b""]
FIELDS = ("task", "task_id", "execution", "host", "pid", "since", "renewals", "margin", "entry")
RECORD = (*FIELDS, "event", "at", "name", "holder", "cause", "reason", "node", "counts", "jump")
EVENTS = ("TaskSkipped", "TaskRetried", "DuplicatePublished", "LeaseLost", "NodeDown")
#: What may not be told from what the page itself has: a tag, an attribute, a control character.
MARK = "<b onclick=x>'\"\x1b\u202e"
BURST = [b"id", MARK.encode(), b"1000"]


class Stand:  # as of celery_redlock.ops.web.reader.Reader
    def __init__(self, locks=(), lines=()):
        self.stored = {
            name: {LABELS[0]: stored(0, (value, ttl, fence, QUEUED, None, 0, [], BURST))}
            for name, value, ttl, fence in locks
        }
        self.views = [view for name, on in self.stored.items() for view in views_of(name, on)]
        self.reserved = [
            view for name, on in self.stored.items() for view in reservation_views(name, on)
        ]
        self.bursts = [view for name, on in self.stored.items() for view in burst_views(name, on)]
        self.nodes = [NodeStatus(label, "up", "9", 1.0) for label in LABELS]
        self.happened = list(map(object_in, lines))
        self.released = []

    def page(self, search):
        found = replace(find_locks(self.views, search), silent=[])
        return Page(self.nodes, found, self.happened, Tallies(), 0.1, self.reserved + self.bursts)

    def explain(self, name, search):
        lock = OneLock(name, self.nodes, self.stored.get(name, {}))
        return explained(None, Places([lock]), filter(search.has_record, self.happened)), 0.1

    def lock(self, name):
        views, reserved = (
            [it for it in all_ if it.name == name] for all_ in (self.views, self.reserved)
        )
        return SimpleNamespace(views=views, reservations=reserved, silent=[], is_known=True)

    def release(self, name, seen):
        self.released.append((name, seen))
        return dict.fromkeys(LABELS, "released")


def sendable(text):
    return text.encode("utf-8", "replace").decode()


class Now:
    """What a site has for its reader: the one of this example."""

    stand = Stand()

    def page(self, search):
        return self.stand.page(search)

    def explain(self, name, search):
        return self.stand.explain(name, search)

    def lock(self, name):
        return self.stand.lock(name)

    def release(self, name, seen):
        return self.stand.release(name, seen)


@functools.cache
def made(host):
    """Return a site and its reader; templates take long to compile."""
    reader = Now()
    settings = Settings.from_conf({"redlock_nodes": NODES})
    return make_app("shop", settings, reader, Door(host, (), OPERATORS)), reader


def site(stand, host="127.0.0.1"):
    app, reader = made(host)
    reader.stand = stand
    return app


class Seen(HTMLParser):
    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def assert_answers(answer):
    assert answer.status_code < 500, answer.get_data(as_text=True)
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    if not answer.content_type.startswith("text/html"):
        return
    page = answer.get_data(as_text=True)
    for tag, attributes in Seen(page).tags:
        assert tag not in ("img", "b", "iframe", "object")
        assert not any(name.startswith("on") for name in attributes)
        if tag == "script":
            assert attributes["src"].startswith("/static/")


VALUES = st.builds(
    lambda token, info: token + in_json(info),
    st.sampled_from([TOKEN, b"", b"\xff" * 40, b"<script>" * 5]),
    st.dictionaries(st.sampled_from(FIELDS), JSON | st.just(MARK)),
)
NAMES = TEXTS.map(lambda text: sendable(text) or "n") | st.just(MARK)
STORED = st.lists(
    st.tuples(NAMES, VALUES, st.sampled_from([-1, 0, 5000, 2**62]), st.binary(max_size=4)),
    max_size=3,
)
LINES = st.lists(
    st.dictionaries(
        st.sampled_from(RECORD), JSON | st.sampled_from([*EVENTS, "conflict", MARK])
    ).map(in_json),
    max_size=3,
)


@settings(max_examples=40)
@given(stored=STORED, lines=LINES, search=TEXTS)
@example(stored=[(MARK, TOKEN + in_json({"task": MARK}), -1, b"x")], lines=[], search=MARK)
@example(stored=[], lines=[in_json({"event": MARK, "name": MARK, "at": 1e9})], search="")
def test_whatever_is_stored_makes_a_page(stored, lines, search):
    stand = Stand(stored, lines)
    browser = site(stand).test_client()
    names = [
        search,
        *(lock[0] for lock in stored),
        *map(told_task, (*stand.views, *stand.happened)),
    ]
    for path, query in [("/", {"q": search})] + [
        (path, {"name": name}) for path in ("/task", "/lock") for name in names
    ]:
        asked = {key: sendable(value) for key, value in query.items()}
        answer = browser.get(path, query_string=asked)
        assert answer.status_code == 200
        assert_answers(answer)
    for view in stand.views:
        told = {"name": view.name, "seen": view.holder.get("token", "")}
        assert_answers(browser.get("/release", query_string=told))
    assert stand.released == []


def told_task(it):
    return str((it if isinstance(it, dict) else it.holder).get("task"))


def test_a_page_that_escapes_nothing_is_seen():
    """The twin: the same templates, without escaping."""
    stand = Stand([(MARK, TOKEN + in_json({"task": MARK}), -1, b"x")])
    app = make_app("shop", Settings.from_conf({"redlock_nodes": NODES}), stand, Door())
    app.jinja_env.autoescape = False
    with pytest.raises(AssertionError):
        assert_answers(app.test_client().get("/"))


PATHS = st.sampled_from(
    ["/", "/task", "/lock", "/release", "/static/page.css", "/static/../app.py"]
) | (st.text(max_size=20).map(lambda text: f"/{quote(text)}"))
METHODS = st.sampled_from(
    ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "X"]
)
#: What can stand in a header at all: a server refuses line breaks before we see them.
WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"))
HEADERS = st.dictionaries(
    st.sampled_from(
        ["Host", "Origin", "Referer", "Sec-Fetch-Site", "Sec-Fetch-Mode", "Sec-Fetch-Dest"]
    )
    | st.sampled_from(
        ["Authorization", "Cookie", "Content-Type", "Accept", "X-Forwarded-For", "Range"]
    ),
    WORDS
    | st.sampled_from(
        ["localhost", "localhost:8737", "evil.example", "127.0.0.1:x", "[::1]:80", "[", "a@b"]
    )
    | st.sampled_from(
        ["http://localhost", "http://[", "null", "same-origin", "cross-site", "none", "navigate"]
    )
    | st.sampled_from(
        ["Basic", "Basic !!!", "Basic Og==", "Basic /////w==", "Bearer x", "Digest username=x"]
    )
    | st.sampled_from(
        ["redlock-web=" + "A" * 43, "redlock-web=\xff", "multipart/form-data", "text/plain"]
    )
    | st.sampled_from(
        ["multipart/form-data; boundary=", "application/x-www-form-urlencoded; charset=x"]
    ),
    max_size=4,
)
FORMS = st.dictionaries(
    st.sampled_from(["name", "seen", "seal", "token", "q", "event", "since", "before", MARK]),
    TEXTS.filter(lambda text: text.isprintable() or text in "\0\r\n")
    | st.sampled_from(["n", "0123abcd", OPERATORS, "1.0", "9" * 12 + "." + "0" * 64, MARK]),
)


@settings(max_examples=80)
@given(
    path=PATHS,
    method=METHODS,
    headers=HEADERS,
    form=FORMS,
    query=FORMS,
    host=st.sampled_from(["127.0.0.1", "0.0.0.0"]),
)
@example(
    "/release", "POST", {}, {"name": "n", "seen": "0123abcd", "token": OPERATORS}, {}, "0.0.0.0"
)
@example("/", "GET", {"Authorization": "Basic /////w=="}, {}, {}, "0.0.0.0")
@example("/release", "GET", {}, {}, {"name": MARK, "seen": MARK}, "127.0.0.1")
def test_whatever_is_asked_is_answered_and_releases_nothing(
    path, method, headers, form, query, host
):
    """Without a form of ours in hand, be it with the operator's own token."""
    stand = Stand([("n", TOKEN + b"{}", 5000, b"1")])
    browser = site(stand, host=host).test_client()
    answer = browser.open(
        path,
        method=method,
        headers=list(headers.items()),
        data={key: sendable(value) for key, value in form.items()},
        query_string={key: sendable(value) for key, value in query.items()},
    )
    assert_answers(answer)
    answer.close()  # the file of a stylesheet
    assert stand.released == []


@settings(max_examples=60)
@given(body=st.binary(max_size=80) | st.just(b"x=" * 20_000), kind=HEADERS)
def test_a_body_of_any_bytes_is_answered(body, kind):
    stand = Stand([("n", TOKEN + b"{}", 5000, b"1")])
    content_type = kind.get("Content-Type", "application/x-www-form-urlencoded")
    answer = site(stand).test_client().post("/release", data=body, content_type=content_type)
    assert_answers(answer)
    assert stand.released == []


@settings(max_examples=60)
@given(change=st.sampled_from(["name", "seen", "seal", "token", "cookie"]), value=TEXTS)
@example(change="token", value="")
@example(change="seal", value="")
@example(change="name", value="m")
@example(change="cookie", value="A" * 43)
def test_a_form_that_was_tampered_with_releases_nothing(change, value):
    stand = Stand([("n", TOKEN + b"{}", 5000, b"1"), ("m", TOKEN + b"{}", 5000, b"1")])
    browser = site(stand).test_client()
    page = browser.get("/release", query_string={"name": "n", "seen": "0123abcd"})
    fields = {
        attributes["name"]: attributes.get("value", "")
        for tag, attributes in Seen(page.get_data(as_text=True)).tags
        if tag == "input"
    }
    form = {**fields, "token": OPERATORS}
    sent = sendable(value)
    if change == "cookie":
        browser.delete_cookie("redlock-web", path="/release")
        if sent.isascii() and sent.isalnum() and len(sent) < 100:
            browser.set_cookie("redlock-web", sent, path="/release")
    elif form[change] == sent:
        return
    else:
        form[change] = sent
    assert_answers(browser.post("/release", data=form))
    assert stand.released == []


def test_a_form_as_it_was_releases():
    """The twin of the above: the very same way, with nothing changed."""
    stand = Stand([("n", TOKEN + b"{}", 5000, b"1")])
    browser = site(stand).test_client()
    page = browser.get("/release", query_string={"name": "n", "seen": "0123abcd"})
    fields = {
        attributes["name"]: attributes.get("value", "")
        for tag, attributes in Seen(page.get_data(as_text=True)).tags
        if tag == "input"
    }
    assert_answers(browser.post("/release", data={**fields, "token": OPERATORS}))
    assert stand.released == [("n", "0123abcd")]


@pytest.mark.parametrize("text", ACTING, ids=range(len(ACTING)))
def test_a_search_is_repeated_harmlessly(text):
    """It stands in the page, and in the address of its next one; soon, or the test would end."""
    told = sendable(text)
    assert_answers(site(Stand()).test_client().get("/", query_string={"q": told}))
