"""What is measured of the block: every part in every way, in inference, training and diffusion."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pairformer_block import (
    PARTS,
    SITES,
    AttentionPairBias,
    Pairformer,
    Ways,
    features,
    protein,
)
from pairformer_boltz import BoltzBlock, diffusion_step, importable
from pairformer_table import STEPS, Table, Trial, break_even, pays_from
from pairformer_ways import (
    HIDDEN,
    Way,
    exact_ways,
    factors,
    fitted,
    has_kernels,
    kept,
    library,
    networks,
    of_terms,
    without_bias,
)
from torch import Tensor, nn

from flashbias_convert import Dense, ScoreBias
from flashbias_convert.attention.training_costs import card_class
from flashbias_convert.decompose import Decomposition
from flashbias_convert.decompose.factor_networks import FactorNetworks
from flashbias_convert.decompose.neural_samples import Sample
from flashbias_convert.decompose.randomised import decompose_quickly
from flashbias_convert.decompose.serving import Serving, Site

#: as the table calls the parts
NAMES = {
    "starting": "triangle attention, starting", "ending": "triangle attention, ending",
    "attention": "attention with pair bias", "outgoing": "triangle multiplication, outgoing",
    "incoming": "triangle multiplication, incoming", "pair_transition": "pair transition",
    "single_transition": "single transition", "block": "block",
}  # fmt: skip
SAMPLES, CHECKED_ROWS = 5, 8
DENSE_KEPT, CHOSEN = "ours, dense, bias kept", f"ours, chosen for {STEPS} steps"
#: as `factors_once` keeps a bias: rows of keys next to each other, as no projection leaves them
LAID_OUT = "ours, dense, bias kept and laid out"
#: structures that factor networks are fitted to; one more judges, and none of them is measured
STRUCTURES = 4
Outputs = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Runner:
    """A way to compute a part.

    Attributes:
        call: (s, z) -> what the part gives.
        module: holds its weights.
        biases: the projections of pairs to biases, where gradients reach them.
    """

    call: Callable[[Tensor, Tensor], Outputs]
    module: nn.Module
    biases: tuple[nn.Parameter, ...] = ()


def tensors(outputs: Outputs) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def away(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest relative error, Frobenius."""
    pairs = zip(found, truth, strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def some_rows(outputs: Outputs) -> list[Tensor]:
    """Some rows of what is (N, N, C), and all of what is (samples, N, C), float64."""
    found = []
    for x in tensors(outputs):
        if x.shape[0] == x.shape[1]:
            rows = torch.linspace(0, len(x) - 1, min(len(x), CHECKED_ROWS), device=x.device)
            x = x[rows.long()]
        found.append(x.detach().double())
    return found


def made_once(way: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What is made, and the milliseconds that it takes to make it, the second time."""
    spent = 0.0
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        made = way()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent = 1e3 * (time.perf_counter() - start)
    return made, spent


class Block:
    """The block at one length, and all that is made once for many rows.

    Args:
        n: tokens.
        sizes: of the block.
        compiles: whether FlexAttention is compiled.
        hidden: width of the hidden layers of factor networks.
    """

    def __init__(
        self, n: int, sizes: tuple[int, int, int, int], device: str, dtype: torch.dtype,
        compiles: bool, hidden: int = HIDDEN,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.module = Pairformer(*sizes).to(device, dtype)
        self.n, self.sizes, self.device, self.dtype = n, sizes, torch.device(device), dtype
        self.exact, self.hidden = exact_ways(compiles), hidden
        self._networks: dict[tuple[str, int], FactorNetworks] = {}

    def structure(self, seed: int) -> tuple[Tensor, Tensor]:
        pair, _, single, _ = self.sizes
        return protein(self.n, pair, single, str(self.device), self.dtype, seed)

    @functools.cached_property
    @torch.no_grad()
    def inputs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(s, z) of each part of the structure that is measured."""
        return self._seen(0)

    def _seen(self, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
        s, z = self.structure(seed)
        found: dict[str, tuple[Tensor, Tensor]] = {"block": (s, z)}
        self.module(s, z, self.exact["SDPA"], found)
        return found

    @torch.no_grad()
    def bias(self, site: str, z: Tensor) -> Tensor:
        return self.module.get_submodule(site).bias(z)

    def kept(self, site: str, rank: int) -> Way:
        """Factors of the bias of the structure that is measured."""
        return kept(self.bias(site, self.inputs[site][1]), rank)

    @functools.cached_property
    def _samples(self) -> dict[str, list[Sample]]:
        """Of other structures, by site."""
        found: dict[str, list[Sample]] = {site: [] for site in SITES}
        for seed in range(1, STRUCTURES + 2):
            with torch.no_grad():
                seen = self._seen(seed)
                for site in SITES:
                    z = seen[site][1]
                    x = features(z)
                    found[site].append(Sample(x, x, self.bias(site, z).float()))
        return found

    def networks(self, site: str, rank: int) -> FactorNetworks:
        """Networks fitted to other structures; see `pairformer_ways.fitted`."""
        if (site, rank) not in self._networks:
            *samples, judge = self._samples[site]
            self._networks[site, rank] = fitted(samples, judge, rank, self.hidden)
        return self._networks[site, rank]

    # -- runners ---------------------------------------------------------------------------

    def ours(self, name: str, ways: Ways, module: Pairformer | None = None) -> Runner:
        """A part, or the whole block, in some ways."""
        own = module or self.module
        sites = SITES if name == "block" else (name,) if name in SITES else ()
        biases = tuple(own.get_submodule(site).pair_bias.weight for site in sites)
        if name == "block":
            return Runner(lambda s, z: own(s, z, ways), own, biases)
        return Runner(lambda s, z: own.part(name, s, z, ways), own.get_submodule(name), biases)

    def boltz(self, name: str, kernels: bool) -> Runner:
        """The same of Boltz's layer; `kernels`: it calls cuEquivariance."""
        whole = self._boltz
        layer = whole.layer
        found = {
            "starting": layer.tri_att_start.linear, "ending": layer.tri_att_end.linear,
            "attention": layer.attention.proj_z[1],
        }  # fmt: skip
        sites = SITES if name == "block" else (name,) if name in SITES else ()
        biases = tuple(found[site].weight for site in sites)
        if name == "block":
            return Runner(lambda s, z: whole(s, z, kernels), whole, biases)
        return Runner(lambda s, z: whole.part(name, s, z, kernels), whole, biases)

    @functools.cached_property
    def _boltz(self) -> BoltzBlock:
        return BoltzBlock(self.module, self.dtype)

    def runners(self, name: str) -> dict[str, Callable[[], Runner]]:
        """Exact ways to compute a part, by name."""
        found: dict[str, Callable[[], Runner]] = {}
        if name in SITES or name == "block":
            for way_name, way in self.exact.items():
                if name == "attention" and way_name == "cuEquivariance":
                    continue  # it attends in triangles
                ways: Ways = way
                if name == "block" and way_name == "cuEquivariance":
                    ways = {site: way for site in SITES} | {"attention": self.exact["SDPA"]}
                found[way_name] = functools.partial(self.ours, name, ways)
        else:
            found["library"] = functools.partial(self.ours, name, library)
        if importable():
            found["boltz"] = functools.partial(self.boltz, name, False)
            if name not in ("attention", "pair_transition", "single_transition") and has_kernels():
                found["boltz, its kernels"] = functools.partial(self.boltz, name, True)
        last = [n for n in found if "cuEq" in n or "kernels" in n]  # they may break the context
        return {n: found[n] for n in (*(n for n in found if n not in last), *last)}

    # -- errors ----------------------------------------------------------------------------

    @functools.cached_property
    def _wide(self) -> Pairformer:
        return copy.deepcopy(self.module).double()

    @functools.cache  # noqa: B019 - it lives as long as the process
    def truth(self, name: str) -> list[Tensor]:
        """What a part gives in float64."""
        with torch.no_grad():
            s, z = (x.double() for x in self.inputs[name])
            return some_rows(self.ours(name, library, self._wide).call(s, z))

    @functools.cache  # noqa: B019
    def library_error(self, name: str) -> float:
        """What the plain formula loses in the dtype of the run."""
        with torch.no_grad():
            runner = self.ours(name, library)
            return away(some_rows(runner.call(*self.inputs[name])), self.truth(name))

    @torch.no_grad()
    def errors(self, name: str, runner: Runner) -> dict[str, float]:
        found = away(some_rows(runner.call(*self.inputs[name])), self.truth(name))
        return {"error": found, "library_error": self.library_error(name)}

    # -- gradients -------------------------------------------------------------------------

    def leaves(self, name: str, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        s, z = (x.to(dtype or x.dtype, copy=True) for x in self.inputs[name])
        return s.requires_grad_(), z.requires_grad_()

    def step(self, runner: Runner, leaves: tuple[Tensor, Tensor]) -> None:
        """Forward and backward; the same gradient of the outputs in every way."""
        runner.module.zero_grad(set_to_none=True)
        for leaf in leaves:
            leaf.grad = None
        outputs = tensors(runner.call(*leaves))
        torch.autograd.backward(outputs, [self.cotangent(x) for x in outputs])

    def cotangent(self, x: Tensor) -> Tensor:
        return self._cotangent(x.shape).to(x.dtype)

    @functools.cache  # noqa: B019
    def _cotangent(self, shape: torch.Size) -> Tensor:
        draw = torch.Generator(self.device).manual_seed(7)
        return torch.randn(shape, generator=draw, device=self.device)

    def gradients(
        self, name: str, runner: Runner, dtype: torch.dtype | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Of the inputs, where there are any, and of the projections of the bias; float64."""
        leaves = self.leaves(name, dtype)
        self.step(runner, leaves)
        inputs = [x.grad.double() for x in leaves if x.grad is not None]
        biases = [x.grad.double() for x in runner.biases if x.grad is not None]
        runner.module.zero_grad(set_to_none=True)
        return inputs, biases

    @functools.cache  # noqa: B019
    def true_gradients(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        return self.gradients(name, self.ours(name, library, self._wide), torch.float64)

    @functools.cache  # noqa: B019
    def library_gradient_error(self, name: str) -> float:
        found, _ = self.gradients(name, self.ours(name, library))
        return away(found, self.true_gradients(name)[0])

    def gradient_errors(self, name: str, runner: Runner) -> dict[str, float]:
        truth, true_biases = self.true_gradients(name)
        inputs, biases = self.gradients(name, runner)
        found = {"gradient_error": away(inputs, truth),
                 "library_gradient_error": self.library_gradient_error(name)}  # fmt: skip
        if biases and len(biases) == len(true_biases):
            found["bias_gradient_error"] = away(biases, true_biases)
        return found


# -- rows ----------------------------------------------------------------------------------


def inference(
    table: Table, block: Block, ranks: Sequence[int], network_ranks: Sequence[int]
) -> None:
    """Every part, the attentions and the block in all ways.

    Attention without its bias is the floor of the times, and says what a bias is worth.
    """
    for name in (*SITES, "block", *(p for p in PARTS if p not in SITES)):
        facts = {"n": block.n, "mode": "inference", "component": NAMES[name]}

        def trial(
            make: Callable[[], Runner], once: float | None = None, exact: bool = True,
            name: str = name, replays: bool = True,
        ) -> Trial:  # fmt: skip
            runner = make()

            def call() -> Any:
                with torch.no_grad():
                    return runner.call(*block.inputs[name])

            return Trial(
                call, lambda: block.errors(name, runner), once, exact=exact, replays=replays
            )

        exact = block.runners(name)
        fragile = [n for n in exact if "cuEq" in n or "kernels" in n]
        for way, make in exact.items():
            if way not in fragile:
                table.time(functools.partial(trial, make), way=way, **facts)
        if name in SITES or name == "block":
            none = functools.partial(block.ours, name, dict.fromkeys(SITES, without_bias))
            table.time(functools.partial(trial, none, exact=False), way="ours, no bias", **facts)
            _approximate(table, block, name, trial, ranks, network_ranks, facts)
        for way in fragile:
            table.time(functools.partial(trial, exact[way]), way=way, **facts)


def _approximate(
    table: Table,
    block: Block,
    name: str,
    trial: Callable[..., Trial],
    ranks: Sequence[int],
    network_ranks: Sequence[int],
    facts: dict[str, Any],
) -> None:
    """Factors once per structure, networks, and, for one triangle, an SVD in each call."""
    sites = SITES if name == "block" else (name,)

    def of_factors(rank: int) -> Trial:
        ways, spent = made_once(lambda: {s: block.kept(s, rank) for s in sites}, block.device)
        return trial(lambda: block.ours(name, ways), spent, exact=False)

    def of_networks(rank: int) -> Trial:
        ways = {site: networks(block.networks(site, rank)) for site in sites}
        return trial(lambda: block.ours(name, ways), exact=False)

    for rank in (r for r in ranks if r <= block.n):
        table.time(functools.partial(of_factors, rank), way="ours, factors kept", rank=rank,
                   **facts)  # fmt: skip
    for rank in (r for r in network_ranks if r <= block.n):
        table.time(functools.partial(of_networks, rank), way="ours, networks", rank=rank,
                   **facts)  # fmt: skip
    for rank in (r for r in ranks if r <= block.n and name == "starting"):
        make = functools.partial(block.ours, name, {name: factors(rank)})
        # an SVD cannot be recorded, and to try it breaks the card's context
        table.time(functools.partial(trial, make, exact=False, replays=False),
                   way="ours, SVD in each call", rank=rank, **facts)  # fmt: skip


def training(table: Table, block: Block, network_ranks: Sequence[int]) -> None:
    """Forward and backward of every part; form (b) has no gradient, and is not there."""
    for name in ("starting", "block", "ending", "attention", *PARTS):
        facts = {"n": block.n, "mode": "training", "component": NAMES[name]}

        def trial(make: Callable[[], Runner], exact: bool = True, name: str = name) -> Trial:
            runner, leaves = make(), block.leaves(name)

            def errors() -> dict[str, float]:
                return block.errors(name, runner) | block.gradient_errors(name, runner)

            return Trial(lambda: block.step(runner, leaves), errors, exact=exact)

        def of_networks(rank: int, trial: Callable[..., Trial] = trial, name: str = name) -> Trial:
            sites = SITES if name == "block" else (name,)
            made = {site: block.networks(site, rank) for site in sites}
            ways: Ways = {site: networks(found) for site, found in made.items()}
            runner = block.ours(name, ways)
            module = nn.ModuleList([runner.module, *made.values()])
            return trial(lambda: Runner(runner.call, module), exact=False)

        exact = block.runners(name)
        fragile = [n for n in exact if "cuEq" in n or "kernels" in n]
        for way in (n for n in exact if n not in fragile):
            table.time(functools.partial(trial, exact[way]), way=way, **facts)
        if name in SITES or name == "block":
            for rank in (r for r in network_ranks if r <= block.n):
                table.time(functools.partial(of_networks, rank), way="ours, networks", rank=rank,
                           **facts)  # fmt: skip
        for way in fragile:
            table.time(functools.partial(trial, exact[way]), way=way, **facts)


def in_words(made: Decomposition) -> str:
    """How many heads have which terms, and why the first of each has them."""
    kinds: dict[str, list[str]] = {}
    for decision in made.decisions:
        kinds.setdefault(decision.term, []).append(decision.reason)
    return "; ".join(f"{len(why)} heads {kind}: {why[0]}" for kind, why in kinds.items())


def verdict(site: Site, rank: int) -> str:
    """Whether factors of a rank pay by the tables of `factors_once`, in numbers."""
    if not site.paying_rank(rank):
        return f"no: {site.reason_against(rank)}"
    return site.balance("yes: they", site.gain_ms(rank), site.spent_ms(rank))


@torch.no_grad()
def diffusion(table: Table, block: Block, ranks: Sequence[int]) -> None:
    """One denoising step's attention with pair bias; only what changes from step to step."""
    pair, _, single, heads = block.sizes
    width, z = 2 * single, block.structure(0)[1]
    torch.manual_seed(1)
    module = AttentionPairBias(width, pair, heads).to(z.device, z.dtype)
    s = torch.randn(SAMPLES, len(z), width, device=z.device, dtype=z.dtype)
    bias, once = made_once(lambda: module.bias(z), table.device)
    facts: dict[str, Any] = {"n": len(z), "mode": "inference", "component": "diffusion step"}

    @functools.cache
    def truth() -> list[Tensor]:
        wide = copy.deepcopy(module).double()
        return [wide(s.double(), z.double(), library)]

    @functools.cache
    def plain() -> float:
        return away([module(s, z, library, bias)], truth())

    def trial(step: Callable[[Tensor, Tensor], Tensor], spent: float, chosen: str = "") -> Trial:
        def call() -> Tensor:
            with torch.no_grad():
                return step(s, z)

        def errors() -> dict[str, float]:
            return {"error": away([call()], truth()), "library_error": plain()}

        return Trial(call, errors, spent, steps=True, replays=True, chosen=chosen)

    def ours(way: Way, own: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda s, z: module(s, z, way, own)

    for name, way in block.exact.items():
        if name == "cuEquivariance":
            continue
        each, keeping = ours(way, None), ours(way, bias)
        table.time(lambda x=each: trial(x, 0.0), way=f"{name}, bias in each step", **facts)
        table.time(lambda x=keeping: trial(x, once), way=f"{name}, bias kept", **facts)

    def laid_out() -> Trial:
        own, spent = made_once(lambda: bias.contiguous(), table.device)
        return trial(ours(of_terms(ScoreBias((Dense(bias=own),), heads)), bias), once + spent)

    table.time(laid_out, way=LAID_OUT, **facts)
    if importable():
        for keeps, name in ((False, "boltz, bias in each step"), (True, "boltz, bias kept")):
            table.time(lambda k=keeps: trial(diffusion_step(module, block.dtype, k),
                                             once if k else 0.0), way=name, **facts)  # fmt: skip
    head_dim, serving = width // heads, Serving(STEPS - 1, SAMPLES, card_class(z.device))
    site = Site(1, heads, len(z), len(z), head_dim, serving)
    for rank in (r for r in ranks if r <= len(z)):

        def of_rank(rank: int = rank) -> Trial:
            way, spent = made_once(lambda: kept(bias, rank), table.device)
            return trial(ours(way, bias), once + spent, verdict(site, rank))

        table.time(of_rank, way="ours, factors kept", rank=rank, **facts)

    def of_choice() -> Trial:
        made, spent = made_once(
            lambda: decompose_quickly(bias, head_dim=head_dim, serving=serving), table.device
        )
        return trial(ours(of_terms(made.bias), bias), once + spent, in_words(made))

    table.time(of_choice, way=CHOSEN, **facts)
    rows = table.good(**facts)
    for row in rows:
        if row["way"] == CHOSEN:
            print(f"diffusion at N = {len(z)}, chosen for {STEPS} steps: {row['chosen']}")
    ways = {row["way"] for row in rows}
    dense = LAID_OUT if LAID_OUT in ways else DENSE_KEPT
    if ways >= {dense, "ours, factors kept"}:
        both = (rows, dense, "ours, factors kept")
        for sentence in (*break_even(*both), *pays_from(*both)):
            print(f"diffusion at N = {len(z)}, {sentence}", flush=True)
