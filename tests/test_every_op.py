"""What holds for every public op in the same way: second derivatives, torch.func, meta tensors."""

import pytest
import torch

import indexer
import mhc_ops
import sparse_attn
from tests.op_checks import FakesAgree

B, S, N, D = 1, 8, 2, 16
M = N * N + 2 * N
STREAMS, SITE, GATES = [(B, S, N, D)], [(M, N * D), (3,), (M,)], [(B, S, N), (B, S, N, N)]
INDICES = torch.zeros(B, S, 2, dtype=torch.int32)
# public function -> shapes of its differentiable tensors, call with (tensors, indices, impl)
OPS = {
    "sinkhorn": ([(B, S, N, N)], lambda t, i, impl: mhc_ops.sinkhorn(*t, impl=impl)),
    "hc_gates": ([(B, S, M), (3,), (M,)], lambda t, i, impl: mhc_ops.hc_gates(*t, hc_mult=N, impl=impl)),
    "hc_project": (STREAMS + SITE[:1], lambda t, i, impl: mhc_ops.hc_project(*t, impl=impl)),
    "pre_bmm": (GATES[:1] + STREAMS, lambda t, i, impl: mhc_ops.pre_bmm(*t, impl=impl)),
    "post_bmm": ([GATES[0], (B, S, D)], lambda t, i, impl: mhc_ops.post_bmm(*t, impl=impl)),
    "res_bmm": (GATES[1:] + STREAMS, lambda t, i, impl: mhc_ops.res_bmm(*t, impl=impl)),
    "hc_pre": (STREAMS + SITE, lambda t, i, impl: mhc_ops.hc_pre(*t, impl=impl)),
    "hc_post": ([(B, S, D), *STREAMS, *GATES], lambda t, i, impl: mhc_ops.hc_post(*t, impl=impl)),
    "hc_post_pre": ([(B, S, D), *STREAMS, *GATES, *SITE], lambda t, i, impl: mhc_ops.hc_post_pre(*t, impl=impl)),
    "hc_head": ([*STREAMS, (N, N * D), (1,), (N,)], lambda t, i, impl: mhc_ops.hc_head(*t, impl=impl)),
    "hc_expand": ([(B, S, D)], lambda t, i, impl: mhc_ops.hc_expand(*t, N)),
    "sparse_attn_shared_kv": (
        [(B, S, N, D), (B, S, D), (B, S // 4, D), (N,)],
        lambda t, i, impl: sparse_attn.sparse_attn_shared_kv(*t[:3], i, t[3], cmp_ratio=4, window=3, impl=impl),
    ),
    "compress_kv": ([(B, S, D), (B, S, D), (4, D)], lambda t, i, impl: sparse_attn.compress_kv(*t, 4, impl=impl)),
    "lightning_indexer": ([(B, S, N, D), (B, S // 4, D), (B, S, N)], lambda t, i, impl: indexer.lightning_indexer(*t, 2, impl=impl)),
    "indexer_kl_loss": (
        [(B, S, N, D), (B, S // 4, D), (B, S, N)],
        lambda t, i, impl: indexer.indexer_kl_loss(*t, i, teacher=torch.ones(i.shape, device=i.device), impl=impl),
    ),
}


def leaves(name: str, device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(device).requires_grad_() for shape in OPS[name][0]]


def outputs(name: str, tensors: list[torch.Tensor], impl: str) -> tuple[torch.Tensor, ...]:
    out = OPS[name][1](tensors, INDICES.to(tensors[0].device), impl)
    return out if isinstance(out, tuple) else (out,)


def finite_sum(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return sum(t.where(t.isfinite(), 0).sum() for t in tensors if t.requires_grad)


def test_the_table_has_every_function():
    plain = {"compressed_cu_seqlens", "hc_block_recompute", "hc_recompute", "lse_with_sink", "lse_without_sink", "plan", "save_kl_policy"}
    public = {name for package in (mhc_ops, sparse_attn, indexer) for name in package.__all__ if name[0].islower()}
    assert public - plain == set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_second_derivative_is_refused_for_a_constant_cotangent_too(name):
    """A penalty on the gradient of a plain sum: PyTorch's own once_differentiable would drop it from the loss without a word."""
    tensors = leaves(name)
    loss = finite_sum(outputs(name, tensors, "auto"))
    grads = torch.autograd.grad(loss, tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (loss + sum(g.square().sum() for g in grads)).backward()


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", OPS)
def test_torch_func_is_refused_by_name(name, compiled):
    """In compiled code too: torch.compile would take such a gradient to be zero."""
    gradient = torch.func.grad(lambda *t: sum(o.sum() for o in outputs(name, t, "auto") if o.is_floating_point()))
    if compiled:
        torch._dynamo.reset()
        gradient = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"torch\.func .* cannot transform a registered op"):
        gradient(*(t.detach() for t in leaves(name)))


@pytest.mark.parametrize("impl", ["eager", "auto"])
@pytest.mark.parametrize("name", OPS)
def test_meta_tensors_give_shapes(name, impl):
    tensors = leaves(name, "meta")
    got, want = outputs(name, tensors, impl), outputs(name, leaves(name), impl)
    assert [(t.shape, t.dtype, t.device.type) for t in got] == [(t.shape, t.dtype, "meta") for t in want]
    grads = torch.autograd.grad([t for t in got if t.requires_grad], tensors, [torch.empty_like(t) for t in got if t.requires_grad])
    assert [g.shape for g in grads] == [t.shape for t in tensors]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPS)
def test_the_specification_compiles_as_one_graph(name, device):
    """The baseline of every bench: what it calls has to be known to the oldest torch that is supported, too."""
    torch._dynamo.reset()
    graph = torch.compile(lambda *tensors: outputs(name, tensors, "eager"), fullgraph=True, backend="aot_eager")
    for got, want in zip(graph(*leaves(name, device)), outputs(name, leaves(name, device), "eager"), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", OPS)
def test_kernels_give_what_their_fakes_say(kernel_device, name):
    """torch.compile plans by the fakes: of results, and of gradients, those that do not exist among them. bf16 where there is a choice."""
    tensors = [t.detach().to(torch.bfloat16 if t.shape[-1] == D else t.dtype).requires_grad_() for t in leaves(name, kernel_device)]
    with FakesAgree("mhc_ops", "sparse_attn", "indexer") as ops:
        results = [t for t in outputs(name, tensors, "auto") if t.requires_grad]
        torch.autograd.grad(results, tensors, [torch.ones_like(t) for t in results])
    assert [impl for _, impl in ops.seen] == ["eager" if name == "hc_expand" else "triton"] * 2
