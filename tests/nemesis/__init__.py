"""
Locks on real servers that are killed, paused, cut off and lied to, and a checker that knows none.

``python -m nemesis --help`` with ``tests`` on the path. A run is one fault: five servers of its
own, client processes that take locks and write down what they believe (`nemesis.client`), a
nemesis that strikes at random moments (`nemesis.faults`), and a checker that reads nothing but
the logs (`nemesis.checker`). Beside the library as it is, contenders with a known weakness take
locks on the same servers (`nemesis.contenders`): a run in which they do not break shows nothing,
and says so.
"""
