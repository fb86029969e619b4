"""The module that holds a site's terms as buffers and computes attention with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .attention import PreparedBias, flashbias_attention
from .terms import ScoreBias, Term


class TermTensors(nn.Module):
    """The tensors of one term, as buffers named like its fields."""

    def __init__(self, term: Term) -> None:
        super().__init__()
        self._pinned = frozenset(k for k, pinned in term.tensor_fields().items() if pinned)
        for name, tensor in term.tensors().items():
            self.register_buffer(name, tensor.detach())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TermTensors:
        # a cast must not round integers or factors: keep the device move, undo the dtype change
        for name, old in self._buffers.items():
            if old is None:
                continue
            moved = fn(old)
            pinned = name in self._pinned or not old.is_floating_point()
            if pinned and moved.dtype != old.dtype:
                moved = old.to(moved.device)
            self._buffers[name] = moved
        return self


class ScoreBiasModule(nn.Module):
    """Holds a site's terms as buffers and computes attention with them.

    It is the submodule `score_bias` of a patched attention module; its state-dict keys are
    ``<site>.score_bias.<term>.<tensor>``.

    Args:
        bias: the terms.
        backend: "auto", "triton", "sdpa" or "eager", see `flashbias_attention`.
    """

    def __init__(self, bias: ScoreBias, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend
        self._spec = bias.spec()
        self._prepared: PreparedBias | None = None
        #: whether the terms came with the last state dict; set by loading, cleared by the owner
        self.just_loaded = False
        for name, term in zip(bias.term_names(), bias.terms, strict=True):
            self.add_module(name, TermTensors(term))

    def spec(self) -> dict[str, Any]:
        """See `ScoreBias.spec`; dtypes are those of now."""
        return self.bias.spec()

    @property
    def bias(self) -> ScoreBias:
        """The terms as they are now."""
        return self.prepared.bias

    @property
    def prepared(self) -> PreparedBias:
        """The terms with their kernel-ready forms, made once per move, cast or load."""
        if self._prepared is None:
            self._prepared = PreparedBias(
                ScoreBias.from_state(self._spec, dict(self.named_buffers()))
            )
        return self._prepared

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, extra: Sequence[Term] = (), **kwargs: Any
    ) -> Tensor:
        """`flashbias_attention` of q, k and v with this site's terms plus `extra` ones.

        Args:
            q, k, v: shapes (*batch, H, N, D), (*batch, H, M, D), (*batch, H, M, Dv).
            extra: terms of this call only, such as a mask that depends on the input.
            **kwargs: keyword arguments of `flashbias_attention`.

        Returns:
            Tensor of shape (*batch, H, N, Dv).
        """
        bias: ScoreBias | PreparedBias = self.prepared
        if extra:
            own = self.bias
            bias = ScoreBias(own.terms + tuple(extra), own.num_heads)
        return flashbias_attention(q, k, v, bias, backend=self.backend, **kwargs)

    # -- staying in step with the buffers --------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ScoreBiasModule:
        super()._apply(fn, recurse)
        self._prepared = None
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[no-untyped-call]
        self._prepared = None
        if any(key.startswith(prefix) for key in state_dict):
            self.just_loaded = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}

    def extra_repr(self) -> str:
        return f"num_heads={self._spec['num_heads']}, backend={self.backend!r}"
