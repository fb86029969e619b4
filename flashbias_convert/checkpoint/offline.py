"""Building a model never asks the network, whatever a file says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0
_before = False


@contextmanager
def hub_offline() -> Iterator[None]:
    """Keep the Hugging Face hub offline for the length of a ``with`` block.

    The switch is one for the whole process; it goes back when the last block ends.
    """
    global _inside, _before
    from huggingface_hub import constants

    with _lock:
        if not _inside:
            _before = constants.HF_HUB_OFFLINE
            constants.HF_HUB_OFFLINE = True
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                constants.HF_HUB_OFFLINE = _before
