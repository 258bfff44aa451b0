"""
Every code block of the README and of docs/ is run, or something else holds it.

What a page does not say in a comment of its own (`support.pages`) is said here: which commands
are not run and why, and what holds a block that cannot be run at all.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from celery_redlock import events
from celery_redlock.lock import watchdog
from celery_redlock.observers.records import record_of
from celery_redlock.ops.cli.why import show_waiters
from celery_redlock.ops.listing import STATES
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.reading.sentences import sentence
from celery_redlock.reading.waiters import Waiter
from celery_redlock.task.worker.node_watch import no_lock
from support import report_page
from support.page_names import names_for
from support.page_run import PageRun, run_page
from support.pages import LANGUAGES, blocks_of, commands_of, outcome_of
from support.process import is_gone
from support.shown_errors import SHOWN
from support.tls import tls_binary
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]


def named(page):
    return str(page.relative_to(ROOT))


# -- what pages leave to this file ----------------------------------------------------------


@dataclass(frozen=True)
class NotRun:
    """It cannot be run here, or not in the time of a test; *why* says what holds it instead."""

    why: str


@dataclass(frozen=True)
class Until:
    """It does not end by itself: started, waited for until *ready*, ended with the page."""

    ready: str


@dataclass(frozen=True)
class Ends:
    """It ends with one of these exit codes."""

    codes: tuple[int, ...]


INSTALL = NotRun("installs; tests/package does so with the built package")
FIVE_MINUTES = NotRun("tests/acceptance/test_five_minutes.py runs it, on ports of its own")
DEMO = NotRun("tests/acceptance/test_demo.py runs it")
PUBLISHED = NotRun("needs the published package")
COMPOSE = NotRun("needs Docker; tests/unit/test_compose.py reads docker-compose.yml")
LONG = NotRun("takes minutes; a short one is a test of its own")
CONTROL = NotRun("tests/acceptance/test_inspect.py asks workers")
TAIL, WEB = Until(""), Until(r"Serving on http")
#: Nothing is held.
OPERATOR = {
    "celery -A shop redlock why shop.bill '[42]'": Ends((0,)),
    "celery -A shop redlock status": Ends((0,)),
    "celery -A shop redlock ls": Ends((0,)),
    "celery -A shop redlock doctor": Ends((0,)),
    "celery -A shop redlock tail": TAIL,
    "celery -A shop redlock web": WEB,
}
#: Page -> command, without a comment behind it -> what becomes of it.
COMMANDS = {
    "README.md": {'pip install celery-redlock "celery[redis]"': PUBLISHED},
    "docs/example.md": {
        "make demo": DEMO,
        "make check": NotRun("a part of `make test`"),
        "make test": NotRun("this is a part of it"),
        "python3 -m venv .venv": INSTALL,
        ". .venv/bin/activate": INSTALL,
        'pip install -c constraints.txt ".[example]"': INSTALL,
        "celery-redlock servers": FIVE_MINUTES,
        "celery -A example_worker.app redlock bootstrap --yes": FIVE_MINUTES,
        "celery -A example_worker.app redlock ls": FIVE_MINUTES,
        "docker compose up --build --detach": COMPOSE,
        "docker compose exec beat python -m example_worker.publish": COMPOSE,
        "docker compose exec beat celery -A example_worker.app redlock status": COMPOSE,
        "celery -A example_worker.app worker --concurrency 8 --loglevel INFO": FIVE_MINUTES,
        "python -m example_worker.publish": FIVE_MINUTES,
    },
    "docs/how-to/install.md": {'pip install celery-redlock "celery[redis]"': PUBLISHED},
    "docs/how-to/lock-on-your-database.md": {
        "pip install 'celery-redlock[postgresql]'": PUBLISHED,
    },
    "docs/how-to/try-on-production.md": {
        "celery -A shop redlock report": Ends((0,)),
        "celery -A shop redlock report --since 7d --task 'shop.*'": Ends((0,)),
        "celery -A shop redlock report --json": Ends((0,)),
    },
    "docs/how-to/why-did-my-task-not-run.md": OPERATOR,
    "docs/how-to/queue-behind-a-holder.md": {
        "celery -A shop redlock why shop.move_stock '[\"tea\", 3]'": Ends((0,)),
        "celery -A shop redlock ls": Ends((0,)),
        "celery -A shop redlock tail --event TaskQueued --event LockAcquired --no-follow": Ends(
            (0,)
        ),
    },
    "docs/reference/beat.md": {
        "celery -A shop beat -S redlock": Until(r"leads -> one of all called .shop."),
    },
    "docs/operating.md": {
        **{command: it for command, it in OPERATOR.items() if it is not WEB},
        "celery -A shop redlock ls --watch": NotRun("tests/acceptance/test_cli_watch.py runs it"),
        "celery -A shop inspect redlock_locks": CONTROL,
        "celery -A shop inspect redlock_nodes": CONTROL,
    },
    "docs/guarantees.md": {'make nemesis ARGS="-- all --minutes 1 --logs build/nemesis"': LONG},
}


def is_table_of_status(text):
    head, *rows = text.split("\n\n")[0].splitlines()
    assert head.split() == ["NODE", "STATE", "LATENCY", "VERSION", "UPTIME", "QUARANTINE"]
    assert rows
    assert all(row.split()[1] in STATES for row in rows)


def is_list_of_waiters(text):
    waiters = [
        Waiter("shop.move_stock", task_id, "web-3", 4711, time.time() - ago)
        for task_id, ago in (("9f2c", 42), ("41d0", 4))
    ]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        show_waiters(SimpleNamespace(waiters=waiters))
    assert text.strip() == said.getvalue().strip()


def is_line_of_a_skip(text):
    holder = {"task_id": "41d0", "pid": 17, "host": "worker-1", "since": 1.0}
    holder["task"] = "shop.bill"
    event = events.TaskSkipped("invoice:7", "shop.bill", "9f2c", "conflict", holder)
    assert text.strip() == sentence({**record_of(event), "at": 13.0})


def is_summary_of_new_nodes(text):
    nodes = [NodeStatus(label, "quarantined", quarantine=61.0) for label in "abc"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["celery", "-A", "shop", "worker"])
        assert text.strip() == no_lock(nodes)


def names_files_that_exist(text):
    for name in re.findall(r"\b(?:lock|task|beat)/\w+\.py", text):
        assert (ROOT / "celery_redlock" / name).exists(), name


def is_a_drawing(text):
    assert "--" in text or "[" in text


def is_warning_of_the_watchdog(text):
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog.logger, "warning", lambda words, *more: told.append(words % more))
        watchdog.warn_of_starvation([(5.0, 30.0)] * 3)
    assert text.strip() == f"WARNING {told[0]}"


def is_message_of_an_error(text):
    assert text.strip() in {"\n".join(map(str, raised)) for raised in SHOWN.values()}


def is_report(text):
    assert text.strip() == report_page.shown().strip()


#: Page -> first word or words of a block that is not run -> what holds it.
HELD = {
    "docs/how-to/try-on-production.md": {"Watched for": is_report},
    "docs/architecture.md": {"": names_files_that_exist},
    "docs/guarantees.md": {
        "        node A": is_a_drawing,
        "holder   asks": is_a_drawing,
    },
    "docs/how-to/queue-behind-a-holder.md": {"Waiting:": is_list_of_waiters},
    "docs/how-to/why-did-my-task-not-run.md": {"NODE": is_table_of_status},
    "docs/lost-leases.md": {"WARNING The watchdog": is_warning_of_the_watchdog},
    "docs/reference/errors.md": {"": is_message_of_an_error},
    "docs/operating.md": {
        "Skipped task": is_line_of_a_skip,
        "No lock can": is_summary_of_new_nodes,
    },
}

#: Page -> reasons of its comments ``not run``; a page may have no other.
NOT_RUN = {
    "docs/how-to/fastapi.md": ["needs uvicorn, and a port"],
    "docs/tutorial.md": ["needs the published package"],
}


def command_of(text):
    """Return a command as `COMMANDS` has it: without the comment behind it."""
    return re.sub(r"\s+# .*", "", text)


def said_of(block):
    """Return what this file says of each command of *block*, None where it says nothing."""
    ours = COMMANDS.get(named(block.page), {})
    is_ours = block.language == "console" and not block.notes
    return [ours.get(command_of(c.text)) for c in commands_of(block)] if is_ours else []


def holder_of(block):
    held = HELD.get(named(block.page), {})
    for begin, holds in held.items():
        if block.text.startswith(begin):
            return holds
    raise KeyError(f"{block} is neither run nor held by anything:\n{block.text}")


# -- the pages ------------------------------------------------------------------------------


def take(run, block):
    if outcome_of(block) is None:
        holder_of(block)(block.text)
    elif not any(said_of(block)):
        run.take(block)
    else:
        for command, said in zip(run.commands(block), said_of(block), strict=True):
            take_command(run, replace(command, text=command_of(command.text)), said)


def take_command(run, command, said):
    if isinstance(said, Until):
        run.console.background(command, said.ready)
    elif isinstance(said, Ends) and len(said.codes) > 1:
        alternatives = " || ".join(f"[ $? = {code} ]" for code in said.codes)
        run.console.run(replace(command, text=f"{command.text}; {alternatives}"))
    elif not isinstance(said, NotRun):
        run.console.run(command, expect=said.codes[0] if said else 0)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_of_a_page_does_what_it_says(page, tmp_path, request):
    if named(page) == "docs/how-to/sentinel-tls-acl.md":
        tls_binary()  # skips at home where there is none
    if named(page) == "docs/how-to/lock-on-your-database.md":
        request.getfixturevalue("postgres_server")  # likewise
    text = page.read_text()
    if re.search(r"-A shop\b", text) and "<!-- file: shop.py -->" not in text:
        shop = next(block for block in blocks_of(README) if block.language == "python")
        text, given = text + shop.text, shop
    else:
        given = None
    with names_for(text) as names:
        if given is not None:  # the shop of pages that have none of their own
            (tmp_path / "shop.py").write_text(names.replaced(given.text))
        with run_page(page, tmp_path, names, take):
            pass


def test_every_block_has_an_outcome():
    """None is in a language that nobody knows, none is left to itself."""
    outcomes = Counter()
    for page in PAGES:
        for block in blocks_of(page):
            outcome = outcome_of(block)
            if outcome is None:
                outcome = holder_of(block).__name__
            elif outcome == "run" and "not run" not in block.notes:
                for said in said_of(block):
                    outcomes[type(said).__name__ if said else "command"] += 1
            outcomes[outcome] += 1
            if block.language == "python":  # also those that are not run
                compile(block.text, str(block), "exec")
    for outcome, least in (("executed", 20), ("file", 10), ("command", 20), ("background", 3)):
        assert outcomes[outcome] >= least, outcomes
    assert outcomes["NotRun"] <= 36
    assert outcomes["not run"] <= 10


def test_what_is_not_run_is_known():
    found = {}
    for page in PAGES:
        reasons = [b.notes["not run"] for b in blocks_of(page) if "not run" in b.notes]
        if reasons:
            found[named(page)] = reasons
    assert found == NOT_RUN


def test_nothing_is_said_of_what_is_not_there():
    for page, said in COMMANDS.items():
        blocks = [b for b in blocks_of(ROOT / page) if b.language == "console"]
        there = {command_of(c.text) for block in blocks for c in commands_of(block)}
        assert set(said) <= there, page
    for page, held in HELD.items():
        texts = [b.text for b in blocks_of(ROOT / page) if outcome_of(b) is None]
        for begin in held:
            assert any(text.startswith(begin) for text in texts), (page, begin)


# -- the runner itself ----------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    def run_text(text):
        page = tmp_path / "page.md"
        page.write_text(text)
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        with names_for("") as names, run_page(page, folder, names) as it:
            return it

    return run_text


def console(*lines, note=""):
    return "\n".join([*([f"<!-- {note} -->"] if note else []), "```console", *lines, "```", ""])


def test_what_a_page_writes_can_be_imported_and_run(run):
    page = """
<!-- file: shop/prices.py -->
```python
BREAD = 3
```

Then

```python
from shop.prices import BREAD
twice = 2 * BREAD
```

```console
$ python -c 'from shop import prices; print("bread", prices.BREAD)'
bread 3
$ ls shop
...
prices.py
```

```python
assert twice == 6
```
"""
    assert run(page).left["twice"] == 6


def test_a_wrong_output_fails(run):
    run(console("$ printf 'a   b\\n\\nc\\n'", "a b", "c"))
    run(console("$ seq 1 9", "1", "...", "8", "9"))
    run(console("$ echo took 3.2 s", "took ... s"))
    for shown in (["a"], ["a", "b", "c"], ["a", "c"], ["a b"]):
        with pytest.raises(AssertionError, match="but the page"):
            run(console("$ printf 'a\\nb\\n'", *shown))


def test_a_failing_command_fails(run):
    with pytest.raises(AssertionError, match=r"ended with 3, not 0:\nbye"):
        run(console("$ echo bye; exit 3"))
    run(console("$ exit 3", note="expect: 3"))
    with pytest.raises(AssertionError, match="ended with 0, not 3"):
        run(console("$ true", note="expect: 3"))


def test_a_failing_python_block_fails(run):
    with pytest.raises(AssertionError) as failure:
        run("text\n\n```python\n\nassert 1 == 2\n```\n")
    assert failure.traceback[-1].lineno + 1 == 5


def test_a_command_in_the_background_is_waited_for_and_ended(run, tmp_path):
    wait = "$ (sleep 600 & echo $! > child; echo ready; wait) & wait"
    it = run(console(wait, "ready", note="background: ^ready$"))
    child = int((it.folder / "child").read_text())
    eventually(lambda: is_gone(child), "end of the child")  # killed is not yet gone


def test_a_command_in_the_background_that_never_gets_ready_fails(run, monkeypatch):
    with pytest.raises(AssertionError, match="it has ended:\ncannot"):
        run(console("$ echo cannot", note="background: ready"))
    monkeypatch.setattr("support.console.PATIENCE", 5.0)  # in which bash starts
    with pytest.raises(AssertionError, match="not yet"):
        run(console("$ echo not yet; sleep 60", note="background: ready"))
    with pytest.raises(AssertionError, match=r"has not ended within 5 s:\nhalf"):
        run(console("$ echo half; sleep 60"))


def test_what_is_not_run_is_left_alone(run):
    run(console("$ exit 1", note="not run: it would fail") + "\n" + console("$ true"))
    with pytest.raises(AssertionError, match="ended with 1"):
        run(console("$ true", note="not run: no") + "\n" + console("$ exit 1"))
    with pytest.raises(AssertionError, match="ended with 1"):
        run("<!-- not run: of a paragraph -->\ntext\n\n" + console("$ exit 1"))


def test_a_block_that_nobody_understands_fails(run):
    assert "cobol" not in LANGUAGES
    for page in ("```cobol\nx\n```\n", "```\nx\n```\n", "    indented code\n"):
        with pytest.raises(ValueError, match="a language that nobody knows"):
            run(page)
    with pytest.raises(ValueError, match="before the first command"):
        run(console("output"))
    with pytest.raises(ValueError, match="one command alone"):
        run(console("$ true", "$ true", note="background: x"))


def test_a_name_that_stands_for_no_server_fails(run):
    """Rather than being looked up in the network."""
    with pytest.raises(AssertionError, match="stands for no server"):
        run("```python\nurl = 'redis://lock-9/0'\n```\n")


def test_names_are_put_back_into_what_is_shown(tmp_path):
    with names_for("redis://lock-1/0 redis://broker/1") as names:
        run = PageRun(tmp_path, names)
        url = names.replaced("redis://lock-1/0")
        assert url.startswith("redis://127.0.0.1:")
        label = url.removeprefix("redis://")
        told = names.put_back(f"{url} {label} {label.removesuffix('/0')}")
        assert told == "redis://lock-1/0 lock-1:6379/0 lock-1:6379"
        run.close()
