"""What the sites of a model see of real inputs, as samples to fit factor networks to."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..decompose.neural_samples import Sample
from ..errors import FlashBiasError
from ..inputs import Batch, running
from ..inspection import leave_no_trace
from ..recipe import Observed

#: Rows of q, k and v that are kept of a call whose bias serves many (triangle attention).
KEPT_ROWS = 4


class ObservationError(FlashBiasError):
    """A recipe could not tell what a call says of its bias; says why."""


@dataclass
class Collected:
    """Samples of one site, each with the input that it came from.

    Attributes:
        most: how many are kept; a seeded, uniform choice of all that come.
        attention: whether to keep q, k and v, too.
        seen: how many came.
        samples: those that are kept.
        origins: for each, the batch and the entry of it.
    """

    most: int
    attention: bool
    seen: int = 0
    samples: list[Sample] = field(default_factory=list)
    origins: list[tuple[int, int]] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, sample: Sample, origin: tuple[int, int]) -> None:
        """Keep a sample, or leave it to chance which one goes."""
        self.seen += 1
        if len(self.samples) < self.most:
            self.samples.append(sample)
            self.origins.append(origin)
            return
        at = self._random.randrange(self.seen)
        if at < self.most:
            self.samples[at], self.origins[at] = sample, origin

    @property
    def longest(self) -> int:
        """Most tokens of a sample; padding does not count."""
        return max((tokens_of(sample) for sample in self.samples), default=0)

    def split(self, start: int = 1) -> tuple[list[Sample], list[Sample], bool]:
        """Samples to train on, samples that judge, and whether no input is on both sides.

        One input in eight judges, the last ones of those that have so many tokens as networks will
        serve, if there are any; a single one has to do both.

        Args:
            start: tokens from which on networks serve.
        """
        pairs = list(zip(self.samples, self.origins, strict=True))
        served = {origin for sample, origin in pairs if tokens_of(sample) >= start}
        inputs = sorted(served or set(self.origins))
        if len(inputs) < 2:
            judges = [sample for sample, origin in pairs if origin in set(inputs)]
            return self.samples, judges, False
        judging = set(inputs[-max(1, len(inputs) // 8) :])
        train = [sample for sample, origin in pairs if origin not in judging]
        return train, [sample for sample, origin in pairs if origin in judging], True


def tokens_of(sample: Sample) -> int:
    """Queries that count."""
    return sample.bias.shape[-2]


def collect(
    model: nn.Module,
    module: nn.Module,
    observe: Callable[..., Observed],
    batches: Sequence[Batch],
    *,
    most: int,
    attention: bool,
) -> Collected:
    """Run a model and keep what one of its modules sees.

    Args:
        model: not patched, in evaluation mode.
        module: one of its modules; every call of it counts.
        observe: of the module's recipe.
        batches: calls of the model.
        most: how many samples to keep.
        attention: keep q, k and v, too.

    Raises:
        ObservationError: the recipe does not know what to make of a call.
        UsageError: the model does not run with these inputs.
    """
    found = Collected(most, attention)
    number = 0

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            for entry, sample in _samples(observe(module, *args, **kwargs), attention):
                found.add(sample, (number, entry))
        except Exception as error:  # the recipe's, not that of the model or of its inputs
            raise ObservationError(f"what it sees cannot be told: {error}") from error

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with leave_no_trace(model):
            for at, batch in enumerate(batches):
                number = at
                with running(model):
                    model(*batch.args, **batch.kwargs)
    finally:
        handle.remove()
    return found


def _samples(seen: Observed, attention: bool) -> Iterator[tuple[int, Sample]]:
    """One sample per entry of the bias's batch, with its place in the outermost dimension."""
    lead = seen.bias.shape[:-3]
    for place in itertools.product(*map(range, lead)):
        keys = None if seen.key_mask is None else _at(seen.key_mask, place, 1)
        x_q, x_k, bias = _at(seen.x_q, place, 2), _at(seen.x_k, place, 2), seen.bias[place]
        same = x_q.shape[-2] == x_k.shape[-2]
        counting = None if keys is None or bool(keys.all()) else keys.nonzero()[:, 0]
        queries = counting if same else None
        sample = Sample(
            _only(x_q, -2, queries),
            _only(x_k, -2, counting),
            _only(_only(bias, -2, queries), -1, counting),
            scale=seen.scale,
            **(_attention(seen, place, queries, counting) if attention else {}),
        )
        if sample.bias.shape[-1] > 1:  # a token alone has nothing to attend to
            yield place[0] if place else 0, _own(sample)


def _own(sample: Sample) -> Sample:
    """A copy in fp32: models change in place what they pass on."""
    tensors = {
        k: t.detach().float().clone()
        for k, t in vars(sample).items()
        if k != "scale" and t is not None
    }
    return Sample(**tensors, scale=sample.scale)


def _attention(
    seen: Observed, place: tuple[int, ...], queries: Tensor | None, keys: Tensor | None
) -> dict[str, Tensor]:
    """Rows of q, k and v that go with one entry of the bias."""
    if seen.q is None or seen.k is None or seen.v is None:
        return {}
    wanted = {"q": (seen.q, queries), "k": (seen.k, keys), "v": (seen.v, keys)}
    found = {}
    for name, (tensor, tokens) in wanted.items():
        rows = tensor
        for dim, (at, size) in enumerate(zip(place, seen.bias.shape[:-3], strict=True)):
            if tensor.shape[dim] == size:
                rows = rows.narrow(dim, at, 1)
        rows = rows.reshape(-1, *rows.shape[-3:])
        step = max(1, math.ceil(len(rows) / KEPT_ROWS))
        found[name] = _only(rows[::step], -2, tokens)
    return found


def _at(tensor: Tensor, place: tuple[int, ...], own: int) -> Tensor:
    """One entry of the batch of a tensor with `own` dimensions of its own; it may broadcast."""
    lead = tensor.shape[:-own]
    if len(lead) != len(place):
        raise ValueError(f"expected {len(place)} batch dimensions, got {tuple(tensor.shape)}")
    return tensor[tuple(0 if size == 1 else at for at, size in zip(place, lead, strict=True))]


def _only(tensor: Tensor, dim: int, tokens: Tensor | None) -> Tensor:
    return tensor if tokens is None else tensor.index_select(dim, tokens)


def cropped(samples: Sequence[Sample], tokens: int) -> Callable[[torch.Generator], Sample]:
    """A function that draws a sample, and of a long one `tokens` of its tokens."""

    def draw(generator: torch.Generator) -> Sample:
        def random_tokens(count: int) -> Tensor | None:
            if count <= tokens:
                return None
            chosen = torch.randperm(count, generator=generator, device=generator.device)[:tokens]
            return chosen

        at = int(torch.randint(len(samples), (), generator=generator, device=generator.device))
        sample = samples[at]
        n, m = sample.bias.shape[-2:]
        keys = random_tokens(m)
        queries = keys if n == m else random_tokens(n)
        return Sample(
            _only(sample.x_q, -2, queries),
            _only(sample.x_k, -2, keys),
            _only(_only(sample.bias, -2, queries), -1, keys),
            None if sample.q is None else _only(sample.q, -2, queries),
            None if sample.k is None else _only(sample.k, -2, keys),
            None if sample.v is None else _only(sample.v, -2, keys),
            sample.scale,
        )

    return draw
