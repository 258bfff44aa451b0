"""Release of a lock, or of a reservation, whose token an operator has seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from celery_redlock.lock.nodes.address import addresses_of
from celery_redlock.lock.nodes.guard import Greeting, exchange, read_as
from celery_redlock.lock.records import PUBLIC_TOKEN_LENGTH, TOKEN_LENGTH, is_ours
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Request, release_request
from celery_redlock.reading.nodes import ask_all, ask_fit
from celery_redlock.reading.read_script import read_commands, read_replies
from celery_redlock.unique.requests import end_request

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["release_seen"]


def release_seen(
    nodes: Sequence[Any], rules: Rules, name: str, token: str, place: int = 0
) -> dict[str, str]:
    """
    Release the lock *name* of the holder that an operator has seen, and of no other.

    Its watchdog notices at the next renewal, and the task gets `LockLost`. A reservation of the
    name ends likewise, by its token: the next publish is no duplicate any more.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.
        name: Lock name.
        token: Beginning of the holder's or reservation's token [>= 8 characters].
        place: Which place of a lock with several *name* is. Without it, whoever waits for any place
            finds out within a second.

    Returns:
        Node label -> ``"released"``, ``"free"`` (nobody holds it there), ``"held by another"``,
        ``"not written by us"`` (a value that is no token), or why it could not be asked.
    """
    begin = token.encode()

    def is_seen(token: bytes) -> bool:
        return len(begin) >= PUBLIC_TOKEN_LENGTH and token[:TOKEN_LENGTH].startswith(begin)

    def ask(connection: AbstractConnection, _: Greeting) -> str:
        (stored,) = read_replies(exchange(connection, *read_commands(rules, [name])), 1)
        reserved = next((it.token for it in stored.reservations if is_seen(it.token)), None)
        if reserved is not None:
            return asked(connection, end_request(rules, name, reserved.decode("latin-1")))
        if stored.value is None:
            return "free"
        if not is_ours(stored.value):
            return "not written by us"
        if not is_seen(stored.value):
            return "held by another"
        owner = stored.value[:TOKEN_LENGTH].decode("latin-1")
        return asked(connection, release_request(rules, name, owner, place=place))

    def asked(connection: AbstractConnection, request: Request) -> str:
        keys = request.keys
        command = (b"EVAL", request.script.source, b"%d" % len(keys), *keys, *request.arguments)
        (reply,) = exchange(connection, command)
        released = read_as("a release", lambda it: int(it[0]), reply)
        return "released" if released else "held by another"

    addresses = addresses_of(nodes, rules.prefix)
    answers = ask_all(addresses, lambda address: ask_fit(address, len(addresses), ask))
    return {address.label: answer for address, answer in zip(addresses, answers, strict=True)}
