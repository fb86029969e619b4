"""What compute-sanitizer's racecheck has said, and which of its hazards are of no concern.

The kernel for Hopper hands work to specialised warps. Triton does that with a byte of state and
captured values in shared memory, between named barriers of all warps, which racecheck does not
follow: it calls each such pair of accesses a hazard. They are known by their lines. Triton gives
them those of the kernel's definition and of the statement that holds `gl.warp_specialize`. Whatever
writes the kernel's own tiles is at lines of what it calls, in other files, and so is one end at
least of a race about them; the assembler puts a few products, which only read, at the definition.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from flashbias_convert.attention.hopper import rules

#: the file and the function that hand work over, and what does so there
SOURCE, KERNEL = Path(rules.__file__).parent / "kernel.py", "attention_kernel"
HANDS_OVER = "warp_specialize"
#: of a log's lines that are the tool's
MARK = "========="
_ACCESS = r"(?:Read|Write) access at (?P<kernel>.+)\+0x[0-9a-f]+ in (?P<file>\S+):(?P<line>\d+)"
_FIRST = re.compile(rf"{MARK} \w+: Race reported between {_ACCESS}")
_NEXT = re.compile(rf"{MARK}     and {_ACCESS} \[\d+ hazards?\]")
_SUMMARY = re.compile(rf"{MARK} RACECHECK SUMMARY: (\d+) hazards? displayed \(.*\)")


@cache
def hand_over() -> frozenset[int]:
    """Lines of `SOURCE` that Triton attributes the handing over of work to.

    Returns:
        The first lines of the kernel and of its decorators, of calls that hand work over, and of
        statements of the kernel's body that hold them: Triton 3.6 gives the end to these.

    Raises:
        ValueError: the kernel, or a call in it, is not there.
    """
    for node in ast.parse(SOURCE.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == KERNEL:
            holding = {statement.lineno: _calls(statement) for statement in node.body}
            own = {first for first, calls in holding.items() if calls}.union(*holding.values())
            if own:
                return frozenset({node.lineno, *(x.lineno for x in node.decorator_list), *own})
    raise ValueError(f"{KERNEL} of {SOURCE} hands nothing over")


def _calls(statement: ast.stmt) -> set[int]:
    return {
        node.lineno
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == HANDS_OVER
    }


@dataclass
class Hazard:
    """One access and those that race with it.

    Attributes:
        call: the operator's call that had begun, as it was printed.
        lines: of the log, one for each access.
    """

    call: str
    lines: list[str]

    def is_handed_over(self) -> bool:
        """Whether all accesses, two at least, are at the lines where work is handed over."""
        first, *others = self.lines
        found = [_FIRST.fullmatch(first), *map(_NEXT.fullmatch, others)]
        return len(found) > 1 and all(
            end is not None
            and (end["kernel"], end["file"]) == (KERNEL, SOURCE.name)
            and int(end["line"]) in hand_over()
            for end in found
        )


@dataclass
class RaceLog:
    """A log of racecheck.

    Attributes:
        hazards: all of them, in order.
        summaries: numbers of hazards that the tool has counted.
        unknown: other lines of the tool, each after the call that had begun.
        said: lines of what ran under it, but for calls.
        last: the last call that had begun.
    """

    hazards: list[Hazard] = field(default_factory=list)
    summaries: list[int] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    last: str = "before any call"

    @property
    def handed_over(self) -> int:
        """How many hazards are the handing over of work."""
        return sum(hazard.is_handed_over() for hazard in self.hazards)

    def problems(self) -> list[str]:
        """Everything else, in whole."""
        own = [hazard for hazard in self.hazards if not hazard.is_handed_over()]
        found = ["\n".join([hazard.call, *hazard.lines]) for hazard in own] + self.unknown
        if self.summaries and self.summaries != [len(self.hazards)]:
            counted = " and ".join(map(str, self.summaries))
            found.append(f"{counted} hazards in the summary, {len(self.hazards)} in the log")
        return found


def read(text: str) -> RaceLog:
    """Take a log apart; what is in no known form is a problem."""
    log, is_open = RaceLog(), False
    for line in map(str.rstrip, text.splitlines()):
        if line.startswith(f"{MARK}    ") and is_open:
            log.hazards[-1].lines.append(line)
            continue
        is_open = re.match(rf"{MARK} \w+: Race reported", line) is not None
        if is_open:
            log.hazards.append(Hazard(log.last, [line]))
        elif line in (MARK, f"{MARK} COMPUTE-SANITIZER"):
            pass
        elif summary := _SUMMARY.fullmatch(line):
            log.summaries.append(int(summary[1]))
        elif MARK in line:
            log.unknown.append(f"{log.last}\n{line}")
        elif line.startswith("Call("):
            log.last = line
        elif line:
            log.said.append(line)
    return log
