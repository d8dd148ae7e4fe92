"""dispatch_experts against a dense loop over experts: one process and two gloo processes, forward and all gradients."""

import pytest
import torch
import torch.distributed as dist

from tests.dist_util import run_distributed
from train_example import dispatch
from train_example.dispatch import dispatch_experts

D, E, K = 6, 4, 2


def expert_weights(dtype=torch.float64):
    g = torch.Generator().manual_seed(7)
    return torch.randn(E, D, D, generator=g, dtype=torch.float64).to(dtype)


def inputs(tokens: int, seed: int, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, D, generator=g, dtype=torch.float64).to(dtype)
    ids = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(tokens)]) if tokens else torch.zeros(0, K, dtype=torch.int64)
    weights = torch.rand(tokens, K, generator=g, dtype=torch.float64).to(torch.float32 if dtype != torch.float64 else dtype)
    cotangent = torch.randn(tokens, D, generator=g, dtype=torch.float64).to(dtype)
    return x.requires_grad_(), ids, weights.requires_grad_(), cotangent


def loop_experts(w):
    """Applies w[e] to its rows, and uses every expert's weights even where it has no rows."""

    def run(rows, counts, sizes):
        assert counts.tolist() == sizes()
        parts = rows.split(sizes())
        return torch.cat([torch.tanh(part @ w[e]) for e, part in enumerate(parts)])

    return run


def dense(x, ids, weights, w):
    everything = torch.tanh(torch.einsum("td,edf->tef", x, w))
    picked = everything.gather(1, ids.unsqueeze(-1).expand(-1, -1, D))
    return (picked * weights.unsqueeze(-1)).sum(1)


def test_one_process_equals_dense_loop():
    x, ids, weights, cotangent = inputs(9, seed=1)
    w = expert_weights().requires_grad_()
    y, counts = dispatch_experts(x, ids, weights, loop_experts(w), E, None)
    want = dense(x, ids, weights, w)
    torch.testing.assert_close(y, want)
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=E))
    got_grads = torch.autograd.grad(y, (x, weights, w), cotangent, retain_graph=True)
    want_grads = torch.autograd.grad(want, (x, weights, w), cotangent)
    for got, expected in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_combine_sums_in_float32():
    """bf16 rows 256 and 1 with weight 1: a bf16 running sum would lose the 1s, the float32 sum keeps them (256 + 1 + 1 = 258)."""
    x = torch.tensor([[1.0] * D], dtype=torch.bfloat16)
    scale = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)
    y, _ = dispatch_experts(x, torch.tensor([[0, 1, 2]]), torch.ones(1, 3), lambda rows, counts, sizes: rows * scale[:, None], 3, None)
    assert y.dtype == torch.bfloat16
    assert y[0, 0].item() == 258.0


def _two_process_worker(rank, world, tokens_by_rank, forced_ids):
    group = dist.new_group(list(range(world)))
    local = E // world
    x, ids, weights, cotangent = inputs(tokens_by_rank[rank], seed=10 + rank)
    if forced_ids is not None:
        ids = torch.tensor(forced_ids).expand(tokens_by_rank[rank], K).contiguous()
    w = expert_weights()[rank * local : (rank + 1) * local].clone().requires_grad_()
    y, counts = dispatch_experts(x, ids, weights, loop_experts(w), E, group)
    y.backward(cotangent)
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=E)), "counts are those of this rank's own tokens"
    # dense reference of this rank's tokens, with every expert here; expert gradients are summed over the ranks
    x2, w2, weights2 = x.detach().requires_grad_(), expert_weights().requires_grad_(), weights.detach().requires_grad_()
    want = dense(x2, ids, weights2, w2)
    want.backward(cotangent)
    dist.all_reduce(w2.grad)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(weights.grad, weights2.grad)
    assert w.grad is not None, "an expert without tokens must still get a gradient (zeros), or FSDP's reduce-scatter waits for it"
    torch.testing.assert_close(w.grad, w2.grad[rank * local : (rank + 1) * local])


class _Noted(torch.autograd.Function):
    """x, and a note in `log` when the forward and when the backward pass come by."""

    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        log.append(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(ctx.name + "'")
        return grad, None, None


def _order_of_events(rank, world):
    """What lies between the start and the end of an exchange, in the forward and in the backward pass."""
    group, log = dist.new_group(list(range(world))), []

    class Exchange(dispatch._Exchange):
        def start(self, *args):
            log.append("start")
            return super().start(*args)

        def end(self):
            log.append("end")
            super().end()

    dispatch._Exchange, kept = Exchange, dispatch._Exchange
    try:
        x, ids, weights, cotangent = inputs(5, seed=rank)
        w = expert_weights()[rank * 2 : rank * 2 + 2].clone().requires_grad_()
        experts, shared = loop_experts(w), []

        def noted(rows, counts, sizes):
            return _Noted.apply(experts(rows, counts, sizes), log, "experts")

        halves = [lambda: shared.append(_Noted.apply(x * 2, log, "up")), lambda: shared.append(_Noted.apply(shared[0] * 3, log, "down"))]
        y, _ = dispatch_experts(x, ids, weights, noted, E, group, meanwhile=halves)
        (y + shared[1]).backward(cotangent)
    finally:
        dispatch._Exchange = kept
    forward, backward = log[:7], log[7:]
    grad, x.grad = x.grad, None
    later, _ = dispatch_experts(x, ids, weights, experts, E, group)
    (later + x * 6).backward(cotangent)
    return forward, backward, torch.allclose(x.grad, grad) and torch.allclose(later, y)


def _all_two_process_cases(rank, world):
    cases = [((5, 8), None), ((4, 0), None), ((3, 6), [0, 1]), ((3, 6), [1, 3]), ((0, 0), None), ((1, 1), [2, 3])]
    for tokens, forced in cases:
        try:
            _two_process_worker(rank, world, tokens, forced)
        except AssertionError as error:
            raise AssertionError(f"tokens a rank {tokens}, forced expert ids {forced}: {error}") from error
    # experts that drop the edge to their input when they have no rows must not keep this rank out of the backward exchange
    group = dist.new_group(list(range(world)))
    x = torch.ones(2, D, requires_grad=True)

    def experts(rows, counts, sizes):
        return rows * 3 if len(rows) else torch.zeros(0, D)

    y, _ = dispatch_experts(x, torch.tensor([[0, 1], [1, 0]]), torch.ones(2, K), experts, E, group)  # all of it on rank 0
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0 * K))
    # bf16 rows over gloo, against the same call in one process
    xb = torch.randn(4, D, generator=torch.Generator().manual_seed(rank)).bfloat16()
    ids = torch.tensor([[0, 3], [2, 1], [3, 2], [1, 0]])
    wb = expert_weights(torch.bfloat16)
    got, _ = dispatch_experts(xb, ids, torch.full((4, K), 0.5), loop_experts(wb[rank * 2 : rank * 2 + 2]), E, group)
    want, _ = dispatch_experts(xb, ids, torch.full((4, K), 0.5), loop_experts(wb), E, None)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    return True


def _both(rank, world):
    return _all_two_process_cases(rank, world), _order_of_events(rank, world)


@pytest.fixture(scope="module")
def two():
    return run_distributed(_both, 2)


def test_two_processes_equal_dense_loop(two):
    assert [equal for equal, _ in two] == [True, True]


def test_the_shared_expert_runs_while_rows_travel(two):
    way = ["start", "up", "end", "experts", "start", "down", "end"]
    for _, (forward, backward, same) in two:
        assert forward == way
        assert backward == ["start", "down'", "end", "experts'", "start", "up'", "end"]
        assert same


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda a: a.update(ids=a["ids"].int()), TypeError, "expert_ids must be int64"),
        (lambda a: a.update(weights=a["weights"].bfloat16()), TypeError, "weights must be float32"),
        (lambda a: a.update(weights=a["weights"][:, :1]), ValueError, "weights must have the shape of expert_ids"),
        (lambda a: a.update(x=a["x"][:2]), ValueError, r"expert_ids must be \[T, k\] with T = 2"),
        (lambda a: a.update(x=a["x"][None]), ValueError, r"x must be \[T, D\]"),
        (lambda a: a.update(ids=a["ids"] + 1), ValueError, r"expert_ids must lie in \[0, 4\)"),
        (lambda a: a.update(ids=a["ids"] - 1), ValueError, r"expert_ids must lie in \[0, 4\)"),
        (lambda a: a.update(experts=lambda rows, counts, sizes: rows[:1]), ValueError, "experts returned shape"),
    ],
)
def test_bad_arguments_are_named(change, error, match):
    ids = torch.tensor([[0, 1], [2, 3], [3, 0]])
    args = {"x": torch.ones(3, D), "ids": ids, "weights": torch.ones(3, K), "experts": lambda rows, counts, sizes: rows}
    change(args)
    with pytest.raises(error, match=match):
        dispatch_experts(args["x"], args["ids"], args["weights"], args["experts"], E, None)
