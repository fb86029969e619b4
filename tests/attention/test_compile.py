"""torch.compile, torch.export and autocast see the operator without graph breaks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import LowRank, RelativeTable
from flashbias_convert.attention import PreparedBias, backends, flashbias_attention
from flashbias_convert.attention.flags import CAUSAL, COSINE, DETERMINISTIC
from flashbias_convert.attention.packing import pack

from .cases import Inputs
from .conftest import INTERPRETED


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def dynamo_backend(device: torch.device) -> str:
    """The full compiler on a card; on the CPU what needs no C++ compiler."""
    return "inductor" if device.type == "cuda" else "aot_eager"


@pytest.mark.parametrize("prepared", [False, True])
def test_full_graph(prepared: bool, backend: str, device: torch.device) -> None:
    if INTERPRETED:
        pytest.skip("compiled graphs do not run in Triton's interpreter")
    x = Inputs(device, n=20)
    bias = x.bias(x.low_rank(), x.table(), x.regions())
    given = PreparedBias(bias) if prepared else bias

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flashbias_attention(q, k, v, given, cosine=True, scale=5.0, backend=backend)
        return out.transpose(1, 2).flatten(2)

    expected = call(x.q, x.k, x.v)
    compiled = torch.compile(call, fullgraph=True, backend=dynamo_backend(device))
    assert torch.allclose(compiled(x.q, x.k, x.v), expected, atol=1e-5)


def test_lengths_that_change_compile_a_few_times(backend: str, device: torch.device) -> None:
    if INTERPRETED:
        pytest.skip("compiled graphs do not run in Triton's interpreter")
    compilations = 0

    def count(graph: torch.fx.GraphModule, inputs: list) -> object:
        nonlocal compilations
        compilations += 1
        return graph.forward

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashbias_attention(q, k, v, causal=True, backend=backend)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=count)
    for n in (49, 64, 100, 144, 197):
        x = Inputs(device, n=n, d=32)
        assert torch.allclose(compiled(x.q, x.k, x.v), call(x.q, x.k, x.v), atol=1e-5)
    assert compilations <= 3


def test_export(backend: str, device: torch.device) -> None:
    if INTERPRETED:
        pytest.skip("exported graphs do not run in Triton's interpreter")
    x = Inputs(device, n=20)
    bias = x.bias(x.low_rank())

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flashbias_attention(q, k, v, bias, backend=backend)

    program = torch.export.export(Attention(), (x.q, x.k, x.v))
    expected = flashbias_attention(x.q, x.k, x.v, bias, backend=backend)
    assert torch.allclose(program.module()(x.q, x.k, x.v), expected, atol=1e-5)


@pytest.mark.parametrize("contiguous", [True, False])
def test_registration(contiguous: bool, kernel: str, device: torch.device) -> None:
    """Schema, fake output (shape and strides) and dispatch agree with the real operator."""
    from flashbias_convert.attention.registration import attention_op

    x = Inputs(device, n=20, heads=3)
    q, k, v = (x.q, x.k, x.v)
    if not contiguous:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    packed = pack(x.bias(x.low_rank(), x.table()), half=False)
    numbers = (0.25, None, None, 0, None, 0)
    arguments = (q, k, v, packed.tensors, packed.spec, *numbers)
    torch.library.opcheck(attention_op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_registration_with_gradients(kernel: str, device: torch.device) -> None:
    """Both operators of training: schema, fake outputs, and gradients through the dispatcher."""
    from flashbias_convert.attention.autograd import attention_training_op
    from flashbias_convert.attention.training_packing import TOPS, pack_for_training

    x = Inputs(device, batch=(1,), n=9, kv_heads=1)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x.q, x.k, x.v))
    bias = x.bias(x.low_rank(2), x.table(5))
    packed = pack_for_training(bias, half=False)
    (group,) = packed.groups
    tensors = [
        t.requires_grad_() if t.is_floating_point() and name not in TOPS else t
        for name, t in zip(group.tensors, packed.tensors, strict=True)
    ]
    head_scale = torch.ones(2, device=device, requires_grad=True)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    flags = CAUSAL | COSINE | DETERMINISTIC
    numbers = (1.0, head_scale, None, 0, None, flags)
    arguments = (*leaves, tensors, packed.spec, *numbers)
    torch.library.opcheck(attention_training_op, arguments, test_utils=TRAINING_CHECKS)


#: Without those that compile for shapes that change: they run the interpreter a dozen times.
TRAINING_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor",
                   "test_aot_dispatch_static")  # fmt: skip


def test_training_is_traced_whole(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Forward and backward are one graph each, packing and its gradients included. No card."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    from flashbias_convert.attention import autograd, backends

    called: dict[str, list[str]] = {}

    def note(name: str, graph: torch.fx.GraphModule) -> object:
        found = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        called[name] = [each for each in found if each.startswith("flashbias_convert.")]
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=lambda graph, _: note("forward", graph),
        bw_compiler=lambda graph, _: note("backward", graph),
    )

    def gradients(saved: object, dout: torch.Tensor, wanted: list[bool]) -> object:
        assert wanted[:4] == [True, False, False, False]
        found = {"q": torch.full_like(saved.q, 2.0)}  # type: ignore[attr-defined]
        terms = zip(saved.bias_tensors, wanted[4:], strict=True)  # type: ignore[attr-defined]
        return found, [torch.full_like(t, 3.0) if w else None for t, w in terms]

    monkeypatch.setattr(backends, "_device_problem", lambda device: None)
    monkeypatch.setattr(autograd, "launch", lambda spec, tensors, **_: tensors["o"].fill_(7))
    monkeypatch.setattr(autograd, "attention_gradients", gradients)
    x = Inputs(device, n=20)
    phi_q, phi_k, table = (t.requires_grad_() for t in (*x.normal(2, 2, 20, 3), x.normal(2, 9)))
    u, v = x.integers(5, 20), x.integers(5, 20)

    def call(q: torch.Tensor, k: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        terms = (LowRank(phi_q=2 * phi_q, phi_k=phi_k), RelativeTable(table=table, u=u, v=v))
        return flashbias_attention(q, k, values, x.bias(*terms), causal=True, backend="triton")

    q = x.q.requires_grad_()
    out = torch.compile(call, fullgraph=True, backend=compiler)(q, x.k, x.v)
    assert (out == 7).all()
    out.sum().backward()
    assert called == {
        "forward": ["flashbias_convert.attention_training.default"],
        "backward": ["flashbias_convert.attention_backward.default"],
    }
    assert all((t.grad == value).all() for t, value in ((q, 2), (phi_q, 6), (phi_k, 3), (table, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Inputs keep their dtype and the backend its own precision, whatever autocast is set to."""
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter takes bf16 for raw bits")
    x = Inputs(device, dtype, n=20)
    x.q *= 5
    bias = x.bias(x.low_rank(), x.table())
    expected = flashbias_attention(x.q, x.k, x.v, bias, backend=backend)
    with torch.autocast(device.type, torch.bfloat16):
        out = flashbias_attention(x.q, x.k, x.v, bias, backend=backend)
    assert out.dtype == dtype
    assert torch.equal(out, expected)


@pytest.mark.parametrize("mixed", ["q", "k", "v"])
def test_autocast_casts_what_differs(mixed: str, device: torch.device) -> None:
    """As torch's attention does; without it different dtypes are an error."""
    x = Inputs(device, torch.float32, n=20)
    own = {name: getattr(x, name) for name in "qkv"}
    short = {name: t.bfloat16() for name, t in own.items()}
    given = {**short, mixed: own[mixed]}
    with torch.autocast(device.type, torch.bfloat16):
        out = flashbias_attention(**given, backend="sdpa")
        assert torch.equal(out, flashbias_attention(**short, backend="sdpa"))
    assert out.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="share dtype"):
        flashbias_attention(**given, backend="sdpa")


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("prepared", [False, True])
def test_autocast_changes_nothing_where_entries_start_elsewhere(
    prepared: bool, target: torch.dtype, backend: str, device: torch.device
) -> None:
    """Factors in fp16 and positions by batch entry, which are packed in the call."""
    x = Inputs(device, torch.float16, n=3, m=20)
    bias = x.bias(x.low_rank(), x.low_rank(2), x.alibi())
    given = PreparedBias(bias) if prepared else bias
    options = {"backend": backend, "causal": True, "query_start": torch.tensor([4, 17])}
    expected = flashbias_attention(x.q, x.k, x.v, bias, **options)
    with torch.autocast(device.type, target):
        out = flashbias_attention(x.q, x.k, x.v, given, **options)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("prepared", [False, True])
def test_the_kernel_call_is_traced_whole(
    prepared: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Everything around the kernel, packing included, is one graph. Needs no card."""
    from flashbias_convert.attention import backends, registration

    monkeypatch.setattr(backends, "_device_problem", lambda device: None)
    monkeypatch.setattr(registration, "launch", lambda spec, tensors, **_: tensors["o"].fill_(7))
    x = Inputs(device, n=20)
    bias = x.bias(x.low_rank(ranks=(2, 5)), x.table(), x.regions())
    given = PreparedBias(bias) if prepared else bias

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashbias_attention(q, k, v, given, causal=True, backend="triton")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert (compiled(x.q, x.k, x.v) == 7).all()


def test_the_automatic_choice_is_traced_whole(device: torch.device) -> None:
    if INTERPRETED:
        pytest.skip("compiled graphs do not run in Triton's interpreter")
    x = Inputs(device, n=20)
    bias = PreparedBias(x.bias(x.low_rank()))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashbias_attention(q, k, v, bias)

    compiled = torch.compile(call, fullgraph=True, backend=dynamo_backend(device))
    assert torch.allclose(compiled(x.q, x.k, x.v), call(x.q, x.k, x.v), atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_that_falls_back_says_so(dynamic: bool) -> None:
    x = Inputs(torch.device("cpu"), n=20)
    two = x.bias(x.table(), x.table())

    def attend(q: Tensor) -> Tensor:
        return flashbias_attention(q, x.k, x.v, two)

    expected = flashbias_attention(x.q, x.k, x.v, two, backend="eager")
    backends._warn.cache_clear()
    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=dynamic)
    with pytest.warns(backends.BackendFallbackWarning, match="falls back to torch's attention"):
        out = compiled(x.q)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
