"""Findings about tasks and their options. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from celery_redlock.lock.lease import quorum
from celery_redlock.ops.doctor import ERROR, NOTE, WARNING, Finding
from celery_redlock.ops.doctor.facts import Facts, TaskFacts
from celery_redlock.ops.text import one_line
from celery_redlock.task.options import LockOptions
from celery_redlock.task.policies import Queue, Reschedule, Retry, RunUnlocked
from celery_redlock.task.unlocked import of_libraries
from celery_redlock.task.worker.waiting_room import UNCOUNTED
from celery_redlock.words import counted, duration, is_forgotten, moment, number, redlock_command

__all__ = ["check_tasks"]

#: Pools in which a body that blocks hears of a lost lock only when its call returns.
LATE_POOLS = ("threads", "gevent", "eventlet")
#: How old a lost lease may be to be of interest [s].
LATELY = 24 * 3600.0
#: How many tasks a finding about several of them names.
NAMED = 5


def check_tasks(facts: Facts) -> Iterator[Finding]:
    for task in facts.tasks:
        if task.options is None:
            yield Finding(ERROR, "task-options", task.name, task.problem, "As it says.")
            continue
        yield from retry_without_retries(task, task.options)
        yield from wait_over_time_limit(task, task.options)
        yield from dedup_too_short(facts, task, task.options)
        yield from runs_unlocked(task, task.options)
    yield from option_without_lock(facts)
    yield from holds_outlast_ttl(facts)
    yield from leases_lost(facts)
    yield from always_eager(facts)
    yield from queue_not_woken(facts)
    yield from queue_fills_worker(facts)
    yield from late_interrupt(facts)


def option_without_lock(facts: Facts) -> Iterator[Finding]:
    """Yield that options of ours are set on tasks that take no lock."""
    for task in facts.unlocked:
        if not task.library:
            fix = f"{task.fix[0].upper()}{task.fix[1:]}."
            yield Finding(ERROR, "option-without-lock", task.task, f"{task.what}.", fix)
    for library, (options, tasks) in of_libraries(facts.unlocked).items():
        what = (
            f"It has {' and '.join(options)} of its own: its tasks take no lock ({names(tasks)})."
        )
        fix = "If they are to take one: base=RedlockTask, too, or name them in redlock_protect."
        yield Finding(NOTE, "option-without-lock", library, what, fix)


def retry_without_retries(task: TaskFacts, options: LockOptions) -> Iterator[Finding]:
    """Yield that a policy retries a task which must not be retried."""
    for option in ("on_conflict", "on_unavailable"):
        if isinstance(getattr(options, option), Retry) and task.max_retries == 0:
            what = f"{option} is 'retry', but max_retries is 0: the task fails at once."
            fix = f"Raise max_retries, or set {option}='reschedule', which costs no retries."
            yield Finding(WARNING, "retry-without-retries", task.name, what, fix)


def wait_over_time_limit(task: TaskFacts, options: LockOptions) -> Iterator[Finding]:
    """Yield that a task may be killed while it waits for its lock."""
    if task.time_limit is not None and options.wait >= task.time_limit:
        what = (
            f"It may wait for its lock for {options.wait:g} s (lock_wait), but is ended after "
            f"{task.time_limit:g} s (time limit)."
        )
        fix = "Make lock_wait shorter, or let on_conflict='reschedule' bring the task back later."
        yield Finding(WARNING, "wait-over-time-limit", task.name, what, fix)


def dedup_too_short(facts: Facts, task: TaskFacts, options: LockOptions) -> Iterator[Finding]:
    """Yield that a late copy of a message would run again."""
    timeout = facts.visibility_timeout
    if timeout is not None and task.acks_late and options.dedup_ttl < timeout:
        what = (
            f"dedup_ttl ({options.dedup_ttl:g} s) is shorter than the broker's visibility timeout "
            f"({timeout:g} s): a message that is delivered again after that runs again."
        )
        fix = "Raise dedup_ttl (redlock_dedup_ttl) to more than the visibility timeout."
        yield Finding(WARNING, "dedup-too-short", task.name, what, fix)


def runs_unlocked(task: TaskFacts, options: LockOptions) -> Iterator[Finding]:
    """Yield that a task chose to run without a lock."""
    if isinstance(options.on_unavailable, RunUnlocked):
        what = "on_unavailable is 'run_unlocked': without a quorum, two may run at once."
        fix = "Keep it only if running twice is better than running later."
        yield Finding(NOTE, "runs-unlocked", task.name, what, fix)


def holds_outlast_ttl(facts: Facts) -> Iterator[Finding]:
    """
    Yield that locks are held for longer than their TTL, as the tally says.

    The watchdog renews them, so that is as it should be. With ``on_lock_lost="warn"`` a body
    goes on when that fails, beside whoever has the lock next.
    """
    options = {task.name: task.options for task in facts.tasks}
    for name, tally in sorted(facts.tally.items()):
        known, held = options.get(name), tally.holds
        if known is None or not 0 < held.ttl < held.longest:
            continue
        is_risky = not known.aborts_on_loss
        what = (
            f"Its lock was held for {duration(held.longest)}, longer than its TTL of "
            f"{held.ttl:g} s; of {held.count} holds in a day, 99 % took up to "
            f"{duration(held.quantile(0.99))}. "
        )
        what += (
            "Should renewing fail, the body goes on all the same (on_lock_lost='warn'), and "
            "another one may run beside it."
            if is_risky
            else "The watchdog renews it; should that fail, LockLost is raised in the body."
        )
        fix = "Hand self.lock.fence to the store, call ensure_held() before each step, or "
        fix += "set on_lock_lost='abort'." if is_risky else "raise lock_ttl: fewer renewals."
        level = WARNING if is_risky else NOTE
        yield Finding(level, "holds-outlast-ttl", name, what, fix)


def leases_lost(facts: Facts) -> Iterator[Finding]:
    """Yield that locks were lost lately, as the journal says."""
    lost: dict[str, list[float]] = {}
    forgotten: Counter[str] = Counter()
    for record in facts.records:
        at = number(record.get("at"))
        is_lost = record.get("event") == "LeaseLost" and not record.get("report")
        if is_lost and facts.now - at < LATELY:
            name = one_line(record.get("task") or "(no task)")
            lost.setdefault(name, []).append(at)
            if is_forgotten(record.get("votes")):
                forgotten[name] += 1
    for name, times in sorted(lost.items()):
        what = (
            f"{counted(len(times), 'lock')} lost within a day while a body ran, the last at "
            f"{moment(max(times))}."
        )
        fix = f"See '{redlock_command('tail --event LeaseLost')}', and the worker's log around it."
        if forgotten[name] < len(times):
            fix += " Nodes were away, or a process did not get to run: a larger lock_ttl helps."
        if forgotten[name]:
            fix += (
                f" Of {forgotten[name]} the nodes had forgotten the lock, as they were restarted "
                "or flushed, or evicted keys. Let them keep their data (appendonly yes, "
                "maxmemory-policy noeviction), and flush no server that holds locks, as "
                "cache.clear() does; a larger lock_ttl is no help there."
            )
        yield Finding(WARNING, "leases-lost", name, what, fix)


def always_eager(facts: Facts) -> Iterator[Finding]:
    """Yield that nothing can come later."""
    later = [task.name for task in facts.tasks if comes_later(task)]
    if facts.is_eager and later:
        what = (
            "task_always_eager is on: nothing can come later there, so the policies 'retry', "
            f"'reschedule' and 'queue' fail the task ({names(later)})."
        )
        fix = "Use it in tests alone; there, celery_redlock.testing switches locks off."
        yield Finding(WARNING, "always-eager", "task_always_eager", what, fix)


def queue_not_woken(facts: Facts) -> Iterator[Finding]:
    """Yield that nothing wakes tasks that wait for their locks."""
    waiting = tasks_that_queue(facts)
    if not waiting:
        return
    why, where, fix = "", "", ""
    deaf = [node.node for node in facts.nodes if node.denied_to_wake]
    if facts.delays_in_broker:
        where = "broker_url"
        why = "the broker holds back delayed messages itself (RabbitMQ's quorum queues)"
        fix = "Use classic queues for these tasks, or lock_wait, which is woken with any broker."
    elif facts.nodes and len(facts.nodes) - len(deaf) < quorum(len(facts.nodes)):
        why = f"lock nodes may not tell workers anything ({', '.join(deaf)})"
        fix = "Give their user the rights that the finding no-permission-to-wake names."
    if why:
        what = (
            f"on_conflict is 'queue', but nothing wakes a task that waits: {why}. It is delivered "
            f"again and again until its lock is free ({names(waiting)})."
        )
        yield Finding(WARNING, "queue-not-woken", where, what, fix)


def queue_fills_worker(facts: Facts) -> Iterator[Finding]:
    """Yield that tasks that wait for their locks may keep a worker from all others."""
    limit, waiting = facts.eta_task_limit, tasks_that_queue(facts, UNCOUNTED)
    if limit is None or not waiting or facts.delays_in_broker:
        return
    what = (
        f"worker_eta_task_limit is {limit}, and tasks that wait for their locks are messages that "
        f"are to come later. The first {UNCOUNTED} in a worker are not counted; with {limit} more "
        f"it takes no messages at all, of no task, until some have run ({names(waiting)})."
    )
    fix = (
        f"Set Queue(max_waiting=...) below {UNCOUNTED}, give these tasks workers of their own, or "
        "leave worker_eta_task_limit out."
    )
    yield Finding(WARNING, "queue-fills-worker", "worker_eta_task_limit", what, fix)


def tasks_that_queue(facts: Facts, many: int = 0) -> list[str]:
    """Return the tasks with the policy "queue" of which so *many* may wait for one lock."""
    policies = [(it.name, it.options.on_conflict) for it in facts.tasks if it.options is not None]
    return [
        name
        for name, policy in policies
        if isinstance(policy, Queue) and (policy.max_waiting is None or policy.max_waiting >= many)
    ]


def names(tasks: Sequence[str]) -> str:
    return f"{', '.join(tasks[:NAMED])}{', ...' if len(tasks) > NAMED else ''}"


def comes_later(task: TaskFacts) -> bool:
    options = task.options
    policies = (options.on_conflict, options.on_unavailable) if options else ()
    return any(isinstance(policy, (Retry, Reschedule, Queue)) for policy in policies)


def late_interrupt(facts: Facts) -> Iterator[Finding]:
    """Yield that a body may hear late of a lost lock."""
    aborting = [t.name for t in facts.tasks if t.options is not None and t.options.aborts_on_loss]
    if facts.pool in LATE_POOLS and aborting:
        what = (
            f"worker_pool is {facts.pool!r}: when a lock is lost, a body there is interrupted when "
            "a blocking call returns, or when it gives way."
        )
        fix = "Give blocking calls a timeout below lock_ttl, or use prefork; docs/lost-leases.md."
        yield Finding(NOTE, "late-interrupt", "worker_pool", what, fix)
