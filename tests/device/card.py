"""A device of its own, "card", that computes on the CPU: for machines that have no other.

A tensor on it behaves as one on a GPU does where it matters here: an operation on tensors of two
devices fails, unless the other tensor is a single number, or indices. So does a generator of
another device. Operations and their results are those of the CPU.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "card"
aten = torch.ops.aten
#: what moves values between devices
_MOVES = {"aten::_to_copy", "aten::copy_", "aten::copy", "aten::set_", "aten::_copy_from"}
#: may index with tensors of the CPU, as on a GPU
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
#: their usual way is to resize an empty tensor, which one that holds another cannot follow
_RESIZING = (
    *("arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m"),
    *("tril_indices", "triu_indices", "randperm", "randperm.generator"),
)
_LIBRARY: list[Library] = []


class CardTensor(Tensor):
    """A tensor on the card; its values are in a tensor on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> CardTensor:
        made: CardTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=f"{NAME}:0",
            requires_grad=held.requires_grad,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _from_file, (self.held.detach(), self.requires_grad)

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    @property  # type: ignore[override]
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: CardTensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert card:0 tensor to numpy")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            made = CardTensor(self.held.detach().clone()).requires_grad_(self.requires_grad)
            made.__dict__.update({k: v for k, v in vars(self).items() if k != "held"})
            memo[id(self)] = made
        found: Tensor = memo[id(self)]
        return found

    def __repr__(self, **_: Any) -> str:
        return f"CardTensor({self.held!r})"


def _from_file(held: Tensor, requires_grad: bool) -> CardTensor:
    return CardTensor(held).requires_grad_(requires_grad)


_Generator, _numbers = torch.Generator, torch.tensor
#: addresses of the generators of the card: torch hands others around than it was given
_GENERATORS: set[int] = set()


class CardGenerator(_Generator):
    """A generator of the card."""

    def __init__(self) -> None:
        _GENERATORS.add(self._cdata)  # type: ignore[attr-defined]

    def __del__(self) -> None:
        _GENERATORS.discard(self._cdata)  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)


class _Known(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Generator)


class AnyGenerator(metaclass=_Known):
    """Takes the place of ``torch.Generator``, which knows no devices made in Python."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return CardGenerator() if torch.device(device).type == NAME else _Generator(device)


def _indices(index: Any) -> Any:
    """Lists as tensors of the CPU: torch would make tensors of the device of them."""
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return _numbers(index) if isinstance(index, list) else index


class _Backend:
    """What torch asks the module of a device, ``torch.card``; its random state is the CPU's."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat, spec = pytree.tree_flatten((args, kwargs))
    name = func._schema.name
    tensors = [x for x in flat if isinstance(x, Tensor)]
    on_card = [x for x in tensors if isinstance(x, CardTensor)]
    wanted = kwargs.get("device")
    here = bool(on_card) if wanted is None else torch.device(wanted).type == NAME
    others = [x for x in tensors if not isinstance(x, CardTensor) and x.dim()]
    may_mix = name in _MOVES or (name in _INDEXING and isinstance(args[0], CardTensor))
    if on_card and others and not may_mix:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} found card:0 and cpu"
        )
    for x in flat:
        if isinstance(x, _Generator) and (x._cdata in _GENERATORS) != here:  # type: ignore[attr-defined]
            raise RuntimeError(f"{name}: the generator belongs to another device")
    known = {id(x.held): x for x in on_card}
    plain = [_plain(x) for x in flat]
    own_args, own_kwargs = pytree.tree_unflatten(plain, spec)
    if not here and not tensors and wanted is None:
        raise RuntimeError(f"{name} came to the card with nothing on it")
    out = func(*own_args, **own_kwargs)
    if name == "aten::copy_" and not isinstance(args[0], CardTensor):
        return args[0]
    if not here:
        return out
    wrap = functools.partial(_on_card, known)
    return pytree.tree_map_only(Tensor, wrap, out)


def _called(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _compute(func, args, kwargs)


def _plain(x: Any) -> Any:
    if isinstance(x, CardTensor):
        return x.held
    if isinstance(x, torch.device) and x.type == NAME:
        return torch.device("cpu")
    return x


def _on_card(known: dict[int, CardTensor], x: Tensor) -> Tensor:
    return known[id(x)] if id(x) in known else CardTensor(x)


def _made_from_numbers(make: Any) -> Any:
    """``torch.tensor`` and its like, which cannot make tensors on devices made in Python."""

    @functools.wraps(make)
    def made(*args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME:
            given = {} if device is None else {"device": device}
            return make(*args, **given, **kwargs).requires_grad_(requires_grad)
        out: Tensor = make(*args, **kwargs).to(device)
        return out.requires_grad_(requires_grad)

    return made


def _no_gradients(mode: bool = True) -> Any:
    """Takes the place of ``torch.inference_mode``: views of wrapped tensors fail in there."""
    return torch.no_grad() if mode else contextlib.nullcontext()


@functools.cache
def install() -> None:
    """Make the device known to torch, for the rest of the process."""
    torch.serialization.add_safe_globals([_from_file])
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    torch.inference_mode = _no_gradients  # type: ignore[assignment,misc]
    torch.tensor = _made_from_numbers(_numbers)
    torch.as_tensor = _made_from_numbers(torch.as_tensor)
    torch.Generator = AnyGenerator  # type: ignore[assignment,misc]
    _LIBRARY.append(Library("_", "IMPL"))
    _LIBRARY[-1].fallback(_called, "PrivateUse1")
    _LIBRARY.append(Library("aten", "IMPL"))
    for name in _RESIZING:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        _LIBRARY[-1].impl(name, functools.partial(_called, op), "PrivateUse1")
