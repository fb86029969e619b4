"""Looking into what the assembler has made of a kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_LINE = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P[T\d]+\s+)?([\w.]+)\s*(.*?)\s*;")
#: a number of 64 bits is in two of them, as what describes memory is
_REGISTER = re.compile(r"(?<![A-Z\w])(desc\[)?UR(\d+)(\.64)?")
#: instructions that write a uniform register, beside those that begin with a U
_TO_UNIFORM = {"R2UR", "S2UR", "REDUX", "VOTEU", "ELECT"}


def unwritten_registers(listing: Iterable[str]) -> list[str]:
    """Instructions that read a uniform register which no instruction before them writes.

    Uniform registers are never written in parts, and ones that a loop carries are written before
    it, so that the order of the text is enough.

    Args:
        listing: lines of nvdisasm.
    """
    written: set[int] = set()
    found = []
    for line in listing:
        if not (match := _LINE.search(line)):
            continue
        name, operands = match[1], _operands(match[2])
        targets, sources = _split(name, operands)
        read = {register for operand in sources for register in _read(operand, operands)}
        if not read <= written:
            found.append(line.strip())
        written |= read.union(targets)
    return found


def _operands(text: str) -> list[str]:
    return [each.strip() for each in re.split(r",(?![^\[]*\])", text)]


def _split(name: str, operands: list[str]) -> tuple[list[int], list[str]]:
    """Uniform registers that an instruction writes, and the operands that it reads."""
    if not (name.startswith("U") or name.split(".")[0] in _TO_UNIFORM):
        return [], operands
    at = next((i for i, o in enumerate(operands) if not re.fullmatch(r"U?P(T|\d+)", o)), None)
    if at is None or not (target := re.fullmatch(r"UR(\d+)", operands[at])):
        return [], operands
    wide = ".64" in name or ".WIDE" in name
    count = 4 if ".128" in name else 2 if wide else 1
    return [int(target[1]) + i for i in range(count)], operands[:at] + operands[at + 1 :]


def _read(operand: str, operands: list[str]) -> Iterator[int]:
    if match := re.search(r"gdesc\[UR(\d+)\]", operand):
        # where both tiles of a product lie, or, behind a gap, the second one if the first is not
        # in memory
        yield from (int(match[1]) + 2, int(match[1]) + 3)
        if not re.match(r"R\d", operands[1]):
            yield from (int(match[1]), int(match[1]) + 1)
        return
    for describes, number, wide in _REGISTER.findall(operand):
        yield int(number)
        if describes or wide:
            yield int(number) + 1
