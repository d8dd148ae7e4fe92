"""The attention's bench: what it hands to other libraries, on a CPU with stand-ins for them; and its help."""

import sys
from types import SimpleNamespace

import pytest
import torch

from bench import attn, run
from reference.cases import relative_error
from reference.cases.sparse_attn import topk_indices


def one_list_attention(q, keys, lists, scale, sink):
    """q [S, N, D], keys [rows, D], lists [S, k], -1 for none: out, and the log-sum-exp of the keys alone."""
    seen = (lists >= 0)[:, None]
    gathered = keys[lists.clamp(min=0).long()]
    z = (torch.einsum("snd,skd->snk", q, gathered) * scale).masked_fill(~seen, -torch.inf)
    of_keys = z.logsumexp(-1)
    return torch.einsum("snk,skd->snd", torch.exp(z - torch.logaddexp(of_keys, sink)[..., None]), gathered), of_keys


def problem(S=9):
    """As attn.make, on the CPU and in fp32."""
    normal = torch.Generator().manual_seed(0)
    t = torch.arange(S)[None]
    indices = topk_indices(t, torch.full_like(t, S // 4), 3, 4, normal)
    shapes = ((1, S, 2, attn.D), (1, S, attn.D), (1, S // 4, attn.D), (2,), (1, S, 2, attn.D))
    q, ori_kv, cmp_kv, sinks, dout = (torch.randn(shape, generator=normal) for shape in shapes)
    return attn.Problem("scfa", q, ori_kv, cmp_kv, indices, sinks, dout, 0)


def flash_mla_sparse_fwd(q, keys, lists, scale, d_v, attn_sink):
    assert keys.shape[1] == lists.shape[1] == 1 and lists.dtype == torch.int32 and d_v == q.shape[-1]
    return one_list_attention(q, keys[:, 0], lists[:, 0], scale, attn_sink)


def sparse_attention_backward_wrapper(q, keys, out, dout, lse, sink, lists, softmax_scale):
    leaves = [x.clone().requires_grad_() for x in (q, keys, sink)]
    want, of_keys = one_list_attention(*leaves[:2], lists, softmax_scale, leaves[2])
    torch.testing.assert_close((out, lse), (want.detach(), of_keys.detach()), rtol=1e-4, atol=1e-5)
    return dict(zip(("dq", "dkv", "d_sink"), torch.autograd.grad(want, leaves, dout)))


@pytest.mark.interpret
@pytest.mark.parametrize(("provider", "directions"), [("flashmla", ["forward"]), ("cudnn", ["backward"])])
def test_other_libraries_get_the_same_call(monkeypatch, provider, directions):
    monkeypatch.setattr(attn, "WINDOW", 5)
    monkeypatch.setitem(sys.modules, "flash_mla", SimpleNamespace(flash_mla_sparse_fwd=flash_mla_sparse_fwd))
    backward = SimpleNamespace(sparse_attention_backward_wrapper=sparse_attention_backward_wrapper)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(DSA=backward))
    x = problem()
    own, theirs = dict(attn.launchers(x, "portable")), dict(attn.cases_of(x, provider, 0))
    assert list(theirs) == directions
    for direction, fn in theirs.items():
        got, want = attn.results_of(fn()), attn.results_of(own[direction]())[: None if direction == "backward" else 1]
        assert [g.shape for g in got] == [w.shape for w in want]
        assert all(relative_error(g, w) < 1e-5 for g, w in zip(got, want))
    assert not list(attn.cases_of(SimpleNamespace(mode="swa", q=x.q), provider, 0))


@pytest.mark.parametrize("bench", run.BENCHES)
def test_help_says_what_is_measured(monkeypatch, capsys, bench):
    monkeypatch.setattr("sys.argv", ["run", bench, "--help"])
    with pytest.raises(SystemExit) as stopped:
        run.main()
    shown = capsys.readouterr().out
    assert not stopped.value.code and shown.startswith(f"usage: python -m bench.run {bench} ")
    assert sys.modules[f"bench.{bench}"].__doc__.strip() in shown
