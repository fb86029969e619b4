"""One forward pass of a model, and the attention calls in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..errors import UsageError
from ..inputs import Batch
from .calls import AttentionCall, of_fused, of_scores
from .fused import FusedCall, SdpaWatcher
from .module_path import ModulePath, common_module
from .scores import Scores
from .watching import Watcher

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """One forward pass, and the attention calls in it."""

    model: nn.Module
    batch: Batch
    calls: dict[str, AttentionCall] = field(default_factory=dict)
    #: modules with a softmax over something large that was not followed
    lost: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)

    def go(self) -> Run:
        """Run the model."""
        path = ModulePath(self.model)
        self._path, self.starts = path, path.starts
        self._numbers: dict[tuple[str, int], int] = {}
        weights = list(self.model.parameters())
        watcher = Watcher(lambda: path.now, weights, self._on_fused, self._on_softmax)
        try:
            sdpa = SdpaWatcher(watcher.resting, watcher.factor, self._on_fused)
            with path.follow(), sdpa, watcher:
                self.model(*self.batch.args, **self.batch.kwargs)
        except Exception as error:
            raise UsageError(
                f"the model does not run with these inputs: {type(error).__name__}: {error}",
                "pass inputs that it takes: package.module:function, or an .npz of named inputs",
            ) from error
        return self

    def _on_fused(self, call: FusedCall) -> None:
        site = common_module(self._path.now)
        self._keep(site, lambda module: of_fused(call, module, self.batch.size))

    def _on_softmax(self, scores: Scores | None, actual: Tensor, dim: int) -> None:
        large = actual.dim() > 3 or (actual.dim() == 3 and actual.shape[-1] == actual.shape[-2])
        last = dim % actual.dim() >= actual.dim() - 2
        if scores is None or not last:
            if large:
                self.lost[self._path.now[-1]] = f"over {tuple(actual.shape)}"
            return
        site = common_module(scores.source.path, self._path.now)
        samples = self.batch.size
        self._keep(site, lambda module: of_scores(scores, actual, dim, module, samples))

    def _keep(self, site: str, make: Callable[[nn.Module], AttentionCall]) -> None:
        """The calls of the first time that a module runs."""
        starts = self.starts.get(site, 1)
        number = self._numbers[site, starts] = self._numbers.get((site, starts), 0) + 1
        if starts > 1:
            return
        name = site if number == 1 else f"{site}#{number}"
        try:
            self.calls[name] = make(self.model.get_submodule(site)).shortened()
        except Exception as error:  # one site that is not understood must not stop the others
            logger.debug("site %s failed", name, exc_info=True)
            self.failed[name] = f"{type(error).__name__}: {error}"
