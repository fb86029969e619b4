"""The last layers of factor networks in closed form.

For given hidden layers h_q and h_k, what the networks make is ``h_q A h_k^T`` with A of rank R, and
finding A is a linear regression, after which an SVD reduces the rank. For biases
of a few features, random hidden layers are often good enough, and nothing needs to be trained.

Training alone is slow where it matters: a direction of the bias grows at a speed that is
proportional to its singular value, so the small ones come late or never.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .factor_networks import FactorNetworks, TokenNetwork
from .loss import row_center
from .neural_samples import Sample

#: Penalties on the weights, relative to the mean square of the hidden units.
RIDGES = (1e-3, 1e-5, 1e-7)
#: Factors on the weights of random hidden layers: larger ones bend more.
SCALES = (1.0, 4.0)
#: Steps of conjugate gradients, where there are several samples.
ITERATIONS = 16


@dataclass(frozen=True, eq=False)
class _Moments:
    """Hidden units with each other, sample by sample, and with the bias; float64."""

    queries: Tensor  # (S, K, K)
    keys: Tensor  # (S, K, K)
    mixed: Tensor  # (H, K, K), mean over samples


@torch.no_grad()
def solved(
    networks: FactorNetworks, samples: Sequence[Sample], *, centred: bool
) -> Iterator[dict[str, Tensor]]:
    """Weights of the last layers, once for each of `RIDGES`.

    Args:
        networks: their hidden layers stay as they are.
        samples: what to fit.
        centred: rows of the bias are centred, since constants along them do not matter.

    Returns:
        State dicts that hold the last layers alone.
    """
    moments = _moments(networks, samples, centred)
    for ridge in RIDGES:
        try:
            yield _solve(networks, moments, ridge)
        except torch.linalg.LinAlgError:  # no penalty is small enough to matter, and none needed
            continue


@torch.no_grad()
def solved_at_scales(
    networks: FactorNetworks, samples: Sequence[Sample], *, centred: bool
) -> Iterator[dict[str, Tensor]]:
    """Like `solved`, with the weights of the hidden layers times each of `SCALES`.

    The networks are changed in the meantime.

    Returns:
        Whole state dicts.
    """
    first = {name: t.clone() for name, t in networks.state_dict().items()}
    for scale in SCALES:
        networks.load_state_dict(first)
        for network in (networks.phi_q, networks.phi_k):
            for tensor in (network.first.weight, network.first.bias, network.second.weight):
                tensor.mul_(scale)
        hidden = {name: t.clone() for name, t in networks.state_dict().items()}
        for last in solved(networks, samples, centred=centred):
            yield {**hidden, **last}


def _moments(networks: FactorNetworks, samples: Iterable[Sample], centred: bool) -> _Moments:
    size = networks.hidden + 1
    mixed = torch.zeros(
        networks.heads, size, size, dtype=torch.float64, device=networks.gain.device
    )
    queries, keys = [], []
    for sample in samples:
        bias = sample.bias.reshape(-1, *sample.bias.shape[-3:])
        h_q, h_k = (
            _hidden(network, x)
            for network, x in ((networks.phi_q, sample.x_q), (networks.phi_k, sample.x_k))
        )
        for at in range(len(bias)):
            right = h_k[at] - h_k[at].mean(0) if centred else h_k[at]
            queries.append(h_q[at].mT @ h_q[at])
            keys.append(right.mT @ right)
            for head in range(networks.heads):
                target = bias[at, head].double()
                target = row_center(target) if centred else target
                mixed[head] += h_q[at].mT @ target @ right
    return _Moments(torch.stack(queries), torch.stack(keys), mixed / len(queries))


def _hidden(network: TokenNetwork, x: Tensor) -> Tensor:
    """Hidden units and a constant, float64: (*batch, N, C) -> (B, N, K)."""
    units = network.hidden_units(x.reshape(-1, *x.shape[-2:]).float())
    return torch.cat([units, torch.ones_like(units[..., :1])], -1).double()


def _solve(networks: FactorNetworks, moments: _Moments, ridge: float) -> dict[str, Tensor]:
    left, right = _root(moments.queries, ridge), _root(moments.keys, ridge)
    target = _between(left, right, moments.mixed) / networks.gain.double()[:, None, None]
    whitened = _regression(
        _between(left, left, moments.queries), _between(right, right, moments.keys), target
    )
    u, values, vh = torch.linalg.svd(whitened)
    rank = min(networks.rank, values.shape[-1])
    root = values[:, None, :rank].sqrt()
    found = {}
    for name, triangle, vectors in (("phi_q", left, u), ("phi_k", right, vh.mT)):
        columns = vectors[..., :rank] * root  # (H, K, rank)
        weights = torch.linalg.solve_triangular(triangle.mT, columns, upper=True).mT
        weights = torch.nn.functional.pad(weights, (0, 0, 0, networks.rank - rank))
        weights = weights.flatten(0, 1).float()  # (H * R, K)
        found[f"{name}.third.weight"] = weights[:, :-1].contiguous()
        found[f"{name}.third.bias"] = weights[:, -1].contiguous()
    return found


def _root(grams: Tensor, ridge: float) -> Tensor:
    """The Cholesky factor of the mean of Gram matrices, with a penalty."""
    gram = grams.mean(0)
    penalty = ridge * gram.diagonal().mean() * torch.ones_like(gram.diagonal())
    return torch.linalg.cholesky(gram + penalty.diag())


def _between(left: Tensor, right: Tensor, x: Tensor) -> Tensor:
    """left^-1 x right^-T for lower triangles."""
    x = torch.linalg.solve_triangular(left, x, upper=False)
    return torch.linalg.solve_triangular(right, x.mT, upper=False).mT


def _regression(queries: Tensor, keys: Tensor, target: Tensor) -> Tensor:
    """A with mean over s of queries[s] A keys[s] = target, (H, K, K); conjugate gradients.

    Gram matrices are whitened by their means, so that one sample has nothing left to solve.
    """
    if len(queries) == 1:
        return target
    found = torch.zeros_like(target)
    rest, direction = target, target
    size = rest.square().sum((-2, -1), keepdim=True)
    for _ in range(ITERATIONS):
        applied = torch.zeros_like(target)
        for left, right in zip(queries, keys, strict=True):
            applied = applied + left @ direction @ right
        applied = applied / len(queries)
        along = (direction * applied).sum((-2, -1), keepdim=True)
        step = torch.where(along > 0, size / along, torch.zeros_like(size))
        found, rest = found + step * direction, rest - step * applied
        left_over = rest.square().sum((-2, -1), keepdim=True)
        ratio = torch.where(size > 0, left_over / size, torch.zeros_like(size))
        direction, size = rest + ratio * direction, left_over
    return found
