"""What was found out about a bias."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..terms import ScoreBias
from .report import Kind
from .suggest import Fit


@dataclass(frozen=True, eq=False)
class Finding:
    """A kind of bias, and what was measured.

    Attributes:
        kind, detail, term: see `SiteProbe`.
        bias: (b, H, N, M), or None.
        terms: of a bias that does not depend on the input.
        fit: ranks and errors, where an SVD was made.
        term_bytes: of the terms of one call.
    """

    kind: Kind
    detail: str
    term: str = ""
    bias: Tensor | None = None
    terms: ScoreBias | None = None
    fit: Fit | None = None
    term_bytes: int = 0
