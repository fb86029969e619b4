"""Stands in for a pool of processes: calls run here, so that tests can look into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class FakePool:
    """One of `multiprocessing.get_context("spawn").Pool`, and that context.

    Attributes:
        jobs: arguments of all calls.
    """

    def __init__(self) -> None:
        self.jobs: list[Any] = []

    def get_context(self, _: str) -> FakePool:
        return self

    def Pool(self, _: int) -> FakePool:
        return self

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, call: Callable[..., Any], jobs: Iterable[Any], chunksize: int = 1) -> list[Any]:
        return self.starmap(call, [(job,) for job in jobs])

    def starmap(
        self, call: Callable[..., Any], jobs: Iterable[Any], chunksize: int = 1
    ) -> list[Any]:
        jobs = list(jobs)
        self.jobs += jobs
        return [call(*job) for job in jobs]
