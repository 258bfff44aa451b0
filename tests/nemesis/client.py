"""
A client process: takes locks, holds them for a while, and writes down what it believes.

    python -m nemesis.client '{"contender": "ours", "client": "ours-1", ...}'

Ends when it is told to (SIGTERM), between two holds.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemesis.contenders import CONTENDERS, MAX_TTL, Contender, Grant, Refused
from nemesis.log import Log, now
from nemesis.registers import Registers

__all__ = ["main"]

SHORTEST_TTL = 0.6
#: How long a lock is waited for [s].
WAIT = 0.6
#: How long a lock is held [s], and how often so: most are short, most of the time is in long ones.
HOLDS = ((0.02, 0.2), (0.3, 2.0), (2.0, 6.0))
WEIGHTS = (7, 2, 1)
#: Of those who are careless: what they do wrong shows in holds that outlast an outage.
LONG_WEIGHTS = (3, 2, 5)
#: Between two looks at the lock [s].
TICK = (0.010, 0.025)
#: How long a change is thought about between the last look at the lock and the write [s].
THOUGHT = 0.02


@dataclass
class Client:
    """
    One client and what it works with.

    Attributes:
        contender: How it takes locks.
        log: What it writes down.
        registers: What it changes under its locks.
        names: The locks it takes, at random.
        weights: How often it holds for how long, see `HOLDS`.
        is_over: Whether it was told to end.
    """

    contender: Contender
    log: Log
    registers: Registers
    names: list[str]
    weights: tuple[int, ...]
    is_over: bool = False

    def run(self) -> None:
        while not self.is_over:
            name, asked = random.choice(self.names), now()
            try:
                grant = self.contender.take(name, random.uniform(SHORTEST_TTL, MAX_TTL), WAIT)
            except Refused as refusal:
                self.log.write("refused", why=str(refusal))
            else:
                self.hold(name, asked, grant)
            time.sleep(random.uniform(0.02, 0.1))

    def hold(self, name: str, asked: float, grant: Grant) -> None:
        at = now()
        until = at + grant.left()
        self.log.write("granted", at, name=name, fence=grant.fence, asked=asked, until=until)
        seconds = random.uniform(*random.choices(HOLDS, self.weights)[0])
        fenced, plain = self.registers.read(name, grant.fence)
        while self.look(grant) and now() < at + seconds and not self.is_over:
            time.sleep(random.uniform(*TICK))
        if self.look(grant):
            time.sleep(THOUGHT)
            self.registers.write_plain(name, plain)
        if fenced is not None and grant.fence is not None:  # whatever became of the lock
            self.registers.write_fenced(name, grant.fence, fenced)
        at = now()
        if grant.left():
            self.log.write("ended", at)
        else:
            self.log.write("lost", at, why=grant.lost)
        grant.release()

    def look(self, grant: Grant) -> bool:
        at = now()  # before it is asked: what can be trusted later could be trusted then
        left = grant.left()
        if left:
            self.log.write("tick", at, until=at + left, renewals=grant.renewals)
        return left > 0.0


def main(config: dict[str, Any]) -> None:
    log = Log(Path(config["log"]))
    name = "ours, async" if config["is_async"] else config["contender"]
    contender = CONTENDERS[name](config["urls"], lambda what: log.write("node", what=what))
    registers = Registers(Path(config["registers"]))
    weights = LONG_WEIGHTS if config["contender"] == "careless" else WEIGHTS
    client = Client(contender, log, registers, config["names"], weights)

    def end(_number: int, _frame: object) -> None:
        client.is_over = True

    signal.signal(signal.SIGTERM, end)
    log.write("born", contender=config["contender"], client=config["client"])
    client.run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
