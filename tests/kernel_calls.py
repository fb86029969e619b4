"""The kernels' side of the operator without a card: graphs are traced, launches are noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert.attention import backends, group_calls, registration


class Launches:
    """Takes the place of the kernel: writes zeros, and keeps copies of the tensors it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[dict[str, Tensor]] = []
        monkeypatch.setattr(backends, "_device_problem", lambda device: None)
        monkeypatch.setattr(registration, "launch", self._launch)
        monkeypatch.setattr(group_calls, "normalize_rows", _normalize)

    def _launch(self, spec: object, tensors: Mapping[str, Tensor], **_: Any) -> None:
        self.seen.append({k: t.clone() for k, t in tensors.items()})
        tensors["o"].zero_()

    def of(self, call: Callable[[], Any]) -> list[dict[str, Tensor]]:
        """The tensors of all launches of a call."""
        self.seen = []
        call()
        found, self.seen = self.seen, []
        return found


def _normalize(k: Tensor) -> Tensor:
    return torch.nn.functional.normalize(k, dim=-1).to(torch.float16).contiguous()


class Graphs:
    """A backend for torch.compile that runs what was traced, and keeps it."""

    def __init__(self) -> None:
        self.all: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        self.all.append(graph)
        return graph.forward

    @property
    def count(self) -> int:
        """Compilations."""
        return len(self.all)

    def operations(self, index: int = -1) -> Counter[str]:
        """How often each operation is in a graph."""
        return operations(self.all[index])


def operations(graph: torch.fx.GraphModule) -> Counter[str]:
    """How often each operation is in a graph, by its name."""
    calls = (node for node in graph.graph.nodes if node.op.startswith("call"))
    return Counter(str(getattr(n.target, "__name__", n.target)) for n in calls)
