"""How many programs share the keys of a row: a fixed function of the call and the card.

With few queries, as in decoding, there are few programs, and most of a card would wait while each
of them walks all keys. The same call on the same kind of card always has the same parts, and so
the same bits.
"""

from __future__ import annotations

from functools import cache

import torch

#: Calls of more queries are left whole: their programs have more to compute than to read.
MOST_QUERIES = 16
#: What `combine_parts_kernel` adds up at once.
MOST_PARTS = 64
#: Fewer keys than these in a part, or bytes of them, do not pay for starting a program.
LEAST_KEYS = 128
LEAST_BYTES = 64 * 1024
#: Below so many bytes of keys in all, the second launch takes longer than is won.
SPLIT_BYTES = 256 * 1024
#: So many programs keep a multiprocessor busy; more of them would have to wait.
PROGRAMS_EACH = 2
#: Multiprocessors of an H200, for devices that do not tell, as in Triton's interpreter.
USUAL_MULTIPROCESSORS = 132


def number_of_parts(*, programs: int, keys: int, key_bytes: int, multiprocessors: int) -> int:
    """Parts of the keys of each row, 1 where nothing is won by sharing them out.

    Args:
        programs: of the call, if each walks all keys.
        keys: of a row.
        key_bytes: that a program reads for one key: its rows of k, v and factors.
        multiprocessors: of the card.
    """
    size = keys * key_bytes
    if size < SPLIT_BYTES:
        return 1
    free = PROGRAMS_EACH * multiprocessors // programs
    return max(1, min(free, keys // LEAST_KEYS, size // LEAST_BYTES, MOST_PARTS))


@cache
def multiprocessors_of(device: torch.device) -> int:
    """Multiprocessors of a device, or `USUAL_MULTIPROCESSORS`."""
    if device.type != "cuda":
        return USUAL_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
