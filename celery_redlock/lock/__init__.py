"""
The quorum lock over independent Redis or Valkey nodes.

Knows Redis, and nothing of Celery. From the bottom up: `clock`, `lease`
and `votes` are pure arithmetic; `records` and `scripting` are what all records
on the nodes have in common; `scripts` is what runs inside a node; `rounds` is
the algorithm as state machines fed with votes and clock readings; `node` is
one connection; `guard` what is checked before it may vote; `fanout` asks all
nodes at once; `redlock`, `held` and `watchdog` are what a caller holds in hand.
"""
