"""
A small shop: invoices with a lock each, reminders, a long import, items up to a limit, a report.

    celery -A example_worker.app worker
    celery -A example_worker.app beat
    python -m example_worker.publish

Every setting comes from the environment, with defaults for servers on this machine.
"""

from __future__ import annotations

import os
import time

from celery import Celery, signals

from celery_redlock import RedlockTask, Reschedule, current_lock
from example_worker import ledger

BROKER_URL = os.environ.get("BROKER_URL", "redis://127.0.0.1:6379/0")
RESULT_URL = os.environ.get("RESULT_URL", "redis://127.0.0.1:6379/1")
#: Separated by commas. Clients must agree on them letter by letter.
REDLOCK_NODES = os.environ.get(
    "REDLOCK_NODES", ",".join(f"redis://127.0.0.1:{port}/0" for port in range(7001, 7006))
)
#: A node that was restarted does not vote for 1.05 times this and a second: 22 s.
REDLOCK_MAX_TTL = float(os.environ.get("REDLOCK_MAX_TTL", "20"))
#: After which a message of a worker that died is delivered again [s].
VISIBILITY_TIMEOUT = int(os.environ.get("VISIBILITY_TIMEOUT", "60"))
REPORT_EVERY = float(os.environ.get("REPORT_EVERY", "30"))
#: How many items a customer may have.
ITEM_LIMIT = 3
#: Where workers and beats serve metrics, "host:port"; empty for nowhere.
PROMETHEUS_LISTEN = os.environ.get("PROMETHEUS_LISTEN", "")

app = Celery("example_worker", broker=BROKER_URL, backend=RESULT_URL)
app.conf.update(
    redlock_nodes=REDLOCK_NODES.split(","),
    redlock_max_ttl=REDLOCK_MAX_TTL,
    redlock_ttl=min(10.0, REDLOCK_MAX_TTL),
    redlock_protect={"example_worker.app.remind": {"unique_on": ["invoice_id"]}},
    broker_transport_options={
        "visibility_timeout": VISIBILITY_TIMEOUT,
        "unacked_restore_interval": max(1, VISIBILITY_TIMEOUT // 12),
        "unacked_restore_throttle": 1,
    },
    worker_prefetch_multiplier=1,
    beat_schedule={
        "report": {
            "task": "example_worker.app.report",
            "schedule": REPORT_EVERY,
            # A report that waited for longer is of no use to anybody.
            "options": {"expires": REPORT_EVERY},
        }
    },
)
if PROMETHEUS_LISTEN:
    app.conf.redlock_observers = ["logging", "journal", "celery", "prometheus"]


@signals.worker_ready.connect
@signals.beat_init.connect
def serve_metrics(**_: object) -> None:
    """Serve what all processes have counted in the directory PROMETHEUS_MULTIPROC_DIR."""
    if PROMETHEUS_LISTEN:
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415  an extra
        from prometheus_client.multiprocess import MultiProcessCollector  # noqa: PLC0415  likewise

        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        host, _, port = PROMETHEUS_LISTEN.rpartition(":")
        start_http_server(int(port), host, registry)


@app.task(base=RedlockTask, bind=True, lock_key="invoice:{invoice_id}", on_conflict="skip")
def bill(self: RedlockTask, invoice_id: int, seconds: float = 2.0) -> str:
    """
    Bill an invoice, once.

    A second copy that comes meanwhile is skipped. One that comes later runs, and looks first:
    the lock is what makes it safe to look and then to act.
    """
    lock, entry = self.lock, f"invoice {invoice_id}"
    ledger.claim(lock.name, lock.fence)
    if ledger.read(entry) is not None:
        return f"{entry} was billed before"
    time.sleep(seconds)  # the card has to be charged somewhere
    lock.ensure_held()
    ledger.write(lock.name, lock.fence, entry, f"billed by {self.request.id}")
    return f"{entry} billed with fence {lock.fence}"


@app.task(
    base=RedlockTask,
    acks_late=True,  # a worker that dies gives it back
    unique_on=("source",),
    lock_ttl=3.0,  # far less than it takes: the watchdog renews the lease every second
    on_conflict=Reschedule(base=2.0, cap=10.0),
)
def load(source: str, rows: int = 20, pace: float = 0.5) -> str:
    """Import *source* row by row; a second import of it has its turn afterwards."""
    lock = current_lock()
    for row in range(rows):
        lock.ensure_held()
        ledger.write(lock.name, lock.fence, f"{source} row {row}", "imported")
        time.sleep(pace)
    return f"{rows} rows of {source} with fence {lock.fence}, {lock.renewals} renewals"


@app.task(base=RedlockTask, unique_on=(), on_conflict="skip")
def report(seconds: float = 1.0) -> str:
    """Count what is in the ledger; one at a time, whoever asks for it."""
    time.sleep(seconds)
    lock = current_lock()
    ledger.write(lock.name, lock.fence, "report", f"{ledger.count()} entries")
    return f"reported with fence {lock.fence}"


@app.task
def remind(invoice_id: int, seconds: float = 1.0) -> str:
    """Send a reminder; a plain task, which `redlock_protect` above protects."""
    time.sleep(seconds)
    lock = current_lock()
    ledger.write(lock.name, lock.fence, f"reminder {invoice_id}", "sent")
    return f"reminder of invoice {invoice_id} sent with fence {lock.fence}"


@app.task(
    base=RedlockTask,
    lock_key="items:{customer}",
    lock_wait=5.0,  # nobody is turned away: each call waits for its turn,
    on_conflict=Reschedule(base=1.0, cap=5.0),  # and if that takes long, is rescheduled
)
def create_item(customer: int, name: str, seconds: float = 0.2) -> str:
    """Create an item, unless the customer has three."""
    lock = current_lock()
    return look_then_create(lock.name, lock.fence, customer, name, seconds)


@app.task
def create_item_unlocked(customer: int, name: str, seconds: float = 0.2) -> str:
    """Do the same without a lock: five at once all see that there is room."""
    return look_then_create("", None, customer, name, seconds)


def look_then_create(lock: str, fence: int | None, customer: int, name: str, seconds: float) -> str:
    """Look, count, then insert: the classic race, as nothing in the database forbids a fourth."""
    ledger.claim(lock, fence)
    if ledger.count_items(customer) >= ITEM_LIMIT:
        return f"{name} refused: customer {customer} has {ITEM_LIMIT} items"
    time.sleep(seconds)  # its picture has to be uploaded somewhere
    ledger.add_item(lock, fence, customer, name)
    return f"{name} created"
