"""Registers that are read and were never written are found, in what nvdisasm prints."""

from __future__ import annotations

import pytest

from .sass import unwritten_registers


def listing(*instructions: str) -> list[str]:
    return [f"        /*{16 * i:04x}*/   {text} ;" for i, text in enumerate(instructions)]


@pytest.mark.parametrize(
    ("before", "reads"),
    [
        # where a tile lies, in two registers, with a step added to what nothing has written
        (["UIADD3 UR4, URZ, 0x1, URZ"], "UIADD3 UR54, UP1, UR54, 0x20, URZ"),
        (
            ["UMOV UR8, URZ", "UMOV UR9, 0x1"],
            "HGMMA.64x16x16.F32.BF16 R8, R4, gdesc[UR8].tnspB, R8",
        ),
        (["UMOV UR10, URZ", "UMOV UR11, URZ"], "HGMMA.64x64x16.F32 R8, gdesc[UR8], R8"),
        (["ULDC UR4, c[0x0][0x208]"], "LDG.E R2, desc[UR4][R2.64]"),
        (["UISETP.GE.AND UP0, UPT, URZ, 0x1, UPT"], "@UP0 UIADD3 UR5, UR5, 0x1, URZ"),
        (["S2R R0, SR_TID.X"], "IMAD.U32 R3, RZ, RZ, UR5"),
    ],
)
def test_what_is_never_written(before: list[str], reads: str) -> None:
    (found,) = unwritten_registers(listing(*before, reads))
    assert reads in found


def test_what_is_written() -> None:
    text = listing(
        "ULDC.64 UR4, c[0x0][0x208]",
        "S2UR UR6, SR_CTAID.X",
        "R2UR UR8, R0",
        "UIMAD.WIDE.U32 UR10, UR6, UR8, URZ",
        "ULEA UR12, UP0, UR10, UR4, 0x2",
        "ULEA.HI.X.SX32 UR13, UR11, UR5, 0x2, UP0",
        "@!UP0 UIADD3 UR14, -UR13, URZ, URZ",
        "UMOV UR15, 0xc0000010",
        "HGMMA.64x16x16.F32.BF16 R152, R24, gdesc[UR12].tnspB, R152",
        "LDGSTS.E.BYPASS.128 [R43+0x6000], desc[UR4][R60.64], P5",
        "HGMMA.64x64x16.F32 R56, gdesc[UR12], RZ, !UPT",
    )
    assert unwritten_registers([".L_x_0:", *text, "        NOP ;"]) == []
