"""What the tests of the KL loss's kernels share: forms of the call, inputs, and the comparison with fp64."""

import torch

from indexer import indexer_kl_loss
from kernel_runtime import interpreting
from reference.cases import indexer as cases
from reference.cases import relative_error

# form of the call / target
FORMS = ("given/joint", "given/marginal", *(f"{form}/{target}" for form in ("sparse", "dense") for target in ("joint", "compressed", "marginal")))
BSND = cases.IndexerCase("BSND", batch=2, seq=7, q_offset=13, topk=6, heads=3)
TND = cases.IndexerCase("TND", documents=(6, 0, 5), padding=2, q_offset=9, topk=5, attn_heads=2, attn_dim=48)
# 16 bit: dS' and the results are rounded; the interpreter truncates bf16 stores, which doubles their error
LIMIT = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2 if interpreting() else 6e-3}


def make(case, form, dtype=torch.float32, device="cpu", ties=True):
    """(leaves, keyword arguments): indices with holes, repeats, indices out of range or not yet visible, rows without any."""
    kind, target = form.split("/")
    leaves = list(cases.make_indexer(case, dtype, device=device, ties=ties).values())
    options = dict(target=target, **cases.layout(case, device))
    options["indices"] = None if kind == "dense" else cases.make_indices(case, device=device)
    if kind == "given":
        options["teacher"] = cases.make_teacher(case, device=device)
    else:
        options |= cases.make_attention(case, dtype, device=device)
        options["lse"][..., 3::4, 1:] = -torch.inf  # heads that saw nothing
    return leaves, options


def evaluate(leaves, options, impl, **more):
    """Loss and the gradients of q, k, weights."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    loss = indexer_kl_loss(*leaves, **options, impl=impl, **more)
    return loss.detach(), torch.autograd.grad(loss, leaves)


def exact(leaves, options, **more):
    """The same in fp64, by the reference under autograd."""
    wide = {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in options.items()}
    return evaluate([x.double() for x in leaves], wide, "eager", **more)


def compare(leaves, options, want=None, loss_limit=2e-6, **more):
    want = exact(leaves, options, **{n: x for n, x in more.items() if n != "deterministic"}) if want is None else want
    loss, grads = evaluate(leaves, options, "triton", **more)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert abs(loss.item() - want[0].item()) <= loss_limit * max(1.0, abs(want[0].item())), f"{loss.item()} against {want[0].item()}"
    for name, x, got, wanted in zip(("dq", "dk", "dw"), leaves, grads, want[1]):
        assert got.dtype == x.dtype and got.shape == x.shape
        scale = wanted.double().norm().item()
        limit = LIMIT[leaves[0].dtype]
        assert (relative_error(got, wanted) <= limit) if scale > 1e-12 else (got.double().norm().item() < 1e-6), (
            f"{name}: {relative_error(got, wanted):.1e} allowed {limit:.0e}"
        )
    return loss, grads
