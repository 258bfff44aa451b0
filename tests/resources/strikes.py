"""
An exception at any moment: of a time limit, of Ctrl-C, of a lost lock.

A call is run again and again, and each time struck one moment later, until it ends unharmed.
A moment is the beginning of a line, or a bytecode, of this library.

Python looks for what is to be raised from outside at the entry of a function, at a jump
backwards, and when a call returns; never between ``with`` and its body, nor on the way out of
it, nor at a line that is nothing but a word, unless a function of ours that we call begins with
it. What is struck there tells nothing, so these lines are passed over. All others are struck,
also the many at which Python never looks.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import linecache
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import celery_redlock

__all__ = ["UNHARMED", "Place", "Strikes", "Struck"]

OURS = str(Path(celery_redlock.__file__).parent)
#: Who calls our code in a ``with``.
CALLERS = str(Path(__file__).with_name("calls.py"))
#: How often a call has to end unharmed: another run may take another way.
UNHARMED = 3
#: Lines that are a word, and none of them a call.
WORDS = ("try:", "else:", "finally:", "while True:", "pass", "return", "raise", "continue", "break")
#: What may stand before the first bytecode that does something.
IDLE = ("NOP", "RESUME", "POP_BLOCK", "CACHE")
#: The first bytecodes of the way out of a ``with``.
WAY_OUT = ("PUSH_EXC_INFO", "WITH_EXCEPT_START")


@dataclass(frozen=True)
class Place:
    """Where it struck: a line of a function, and the bytecode that was next."""

    module: str
    function: str
    text: str
    line: int
    bytecode: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function}:{self.line}: {self.text}"

    @classmethod
    def of(cls, frame: FrameType) -> Place:
        code = frame.f_code
        name = str(frame.f_globals["__name__"])
        text = text_of(frame)
        next_one = bytecodes(code).get(frame.f_lasti)
        bytecode = "" if next_one is None else next_one.opname
        return cls(name, code.co_name, text, frame.f_lineno or 0, bytecode)


@dataclass(frozen=True)
class Struck:
    place: Place
    error: BaseException | None


class Strikes:
    """
    Strikes a call again and again, at another moment each time.

    A moment is a visit of a line, or of a bytecode: the third one, say. Counting all lines from
    the beginning would not do, as no two runs meet the same replies in the same order.

    Args:
        act: Called at the moment; raises, or has something raise.
        by: ``"line"`` or ``"opcode"``.
        visits: How many visits of one and the same line are struck.
        at: Whether a place is struck at all.
    """

    def __init__(
        self,
        act: Callable[[], object],
        *,
        by: str = "line",
        visits: int = 2,
        at: Callable[[Place], bool] = lambda _: True,
    ) -> None:
        self._act = act
        self._by = by
        self._visits = visits
        self._at = at
        self._struck: set[tuple[CodeType, int, int]] = set()

    def once(self, call: Callable[[], object]) -> Struck | None:
        """Run *call*, struck at a new moment; None if there was none, and it ended unharmed."""
        place: Place | None = None
        visited: Counter[tuple[CodeType, int]] = Counter()

        def trace(frame: FrameType, event: str, _arg: Any) -> Any:
            nonlocal place
            if event == "call":
                if not is_ours(frame):
                    return None
                frame.f_trace_opcodes = self._by == "opcode"
            elif event == self._by and place is None and MOMENTS[event](frame):
                where = (frame.f_code, frame.f_lasti)
                visited[where] += 1
                moment = (*where, visited[where])
                if visited[where] <= self._visits and moment not in self._struck:
                    self._struck.add(moment)
                    here = Place.of(frame)
                    if self._at(here):
                        place = here
                        self._act()
            return trace

        error: BaseException | None = None
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            call()
        except BaseException as raised:  # noqa: BLE001  whatever it is, it is told
            error = raised.with_traceback(None)  # or its frames would live on with it
        finally:
            sys.settrace(before)
        if place is None and error is not None:
            raise error
        return None if place is None else Struck(place, error)


def is_ours(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    caller = frame.f_back
    if name != contextlib.__file__ or caller is None:
        return name.startswith(OURS)
    return caller.f_code.co_filename.startswith((OURS, CALLERS))


def is_start(frame: FrameType) -> bool:
    code, offset = frame.f_code, frame.f_lasti
    if _is_start(code, offset, frame.f_lineno):
        return True
    return frame.f_back is not None and is_ours(frame.f_back) and is_entry(code, offset)


@functools.cache
def _is_start(code: CodeType, offset: int, line: int) -> bool:
    text = linecache.getline(code.co_filename, line).strip()
    if text.partition("  #")[0].strip() in WORDS:
        return False
    return not (text.startswith("with ") and is_way_out(code, offset))


@functools.cache
def is_entry(code: CodeType, offset: int) -> bool:
    """Return whether a function begins at *offset*: a ``try`` there does not protect it."""
    every = bytecodes(code)
    before = [every[at] for at in sorted(every) if at < offset]
    return not before or (before[-1].opname == "RESUME" and before[-1].arg == 0)


def is_look(frame: FrameType) -> bool:
    return _is_look(frame.f_code, frame.f_lasti)


@functools.cache
def _is_look(code: CodeType, offset: int) -> bool:
    every = bytecodes(code)
    before = [every[at].opname for at in sorted(every) if at < offset]
    return (
        not before
        or every[offset].opname == "RESUME"
        or "BACKWARD" in every[offset].opname
        or before[-1].startswith("CALL")
    )


MOMENTS: dict[str, Callable[[FrameType], bool]] = {"line": is_start, "opcode": is_look}


def is_way_out(code: CodeType, offset: int) -> bool:
    """Return whether a ``with`` ends at *offset*: None is made ready for its ``__exit__``."""
    following = [it for at, it in sorted(bytecodes(code).items()) if at >= offset]
    first, *_ = [it for it in following if it.opname not in IDLE]
    return first.opname in WAY_OUT or (first.opname == "LOAD_CONST" and first.argval is None)


@functools.cache
def bytecodes(code: CodeType) -> dict[int, dis.Instruction]:
    return {instruction.offset: instruction for instruction in dis.get_instructions(code)}


def text_of(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).strip()
