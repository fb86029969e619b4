"""What is yes or no in a call, as one number: each argument of an operator takes time."""

from __future__ import annotations

CAUSAL = 1  #: a query sees no later keys
COSINE = 2  #: rows of q and k have length one
BOUNDED = 4  #: scores are known to be small, see `launch`
DETERMINISTIC = 8  #: the backward pass gives the same bits every time


def flags_of(
    *, causal: bool, cosine: bool, bounded: bool = False, deterministic: bool = False
) -> int:
    """The sum of those that hold."""
    return (
        (CAUSAL if causal else 0)
        | (COSINE if cosine else 0)
        | (BOUNDED if bounded else 0)
        | (DETERMINISTIC if deterministic else 0)
    )
