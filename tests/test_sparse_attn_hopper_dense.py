"""The dense backward for sm_90: its launcher around stand-ins of the two kernels, the sums of the runs' halos, which calls it takes."""

from dataclasses import replace

import pytest
import torch

from reference.cases.sparse_attn import AttentionCase, attention_inputs
from tests.test_sparse_attn_hopper import BF16, FP16, Launched, arguments, check, expected, make, run

RING = 144


def run_bounds(one, length, runs):
    """First and end of the queries of a run: whole units of 16, one more in each of the first runs."""
    units, part, batch = -(-length // 16), one % runs, one // runs
    begins = [x * (units // runs) + min(x, units % runs) for x in (part, part + 1)]
    return tuple(batch * length + min(16 * x, length) for x in begins)


@pytest.mark.parametrize(("runs", "S", "window", "entries"), [(3, 40, 128, 0), (2, 70, 9, 3), (1, 20, 30, 5)])
def test_totals(kernel_device, runs, S, window, entries, monkeypatch):
    """Every key that two runs see or more gets its sums in the order of the runs, every other one its own; entries get those of the runs that have
    them; what no run wrote is NaN. Shares of the sinks in two steps."""
    from sparse_attn.shared_kv.hopper import dense_totals
    from sparse_attn.shared_kv.places import places_of
    from tests.op_checks import poison_empty

    poison_empty(monkeypatch)
    D, N, batches, stride = 128, 3, 2, 8
    q, ori = torch.zeros(batches, S, 1, D, device=kernel_device), torch.zeros(batches, S + 5, D, device=kernel_device)
    table = places_of(q, ori, None, None, None, None, None, 3, 0, window).tolist()
    generator = torch.Generator().manual_seed(0)
    every = runs * batches
    halo, part = torch.full((every, RING, D), torch.nan), torch.full((every, stride, D), torch.nan)
    sums = torch.randn((batches * (S + 5), D), generator=generator)
    want, want_entries = sums.clone(), torch.zeros(batches, max(1, entries), D)
    bounds = torch.zeros((every, 4), dtype=torch.int32)
    for one in range(every):
        first, end = run_bounds(one, S, runs)
        has = max(1, entries - one % runs)  # the first runs of a batch see more of them here than the last
        if first < end:
            bounds[one] = torch.tensor([table[first][0], table[first - 1][1] if one else 0, has, -1])
            for key in range(table[first][0], table[first - 1][1] if one else 0):
                halo[one, key % RING] = torch.randn(D, generator=generator)
                want[key] += halo[one, key % RING]
            part[one, :has] = torch.randn((has, D), generator=generator)
            want_entries[one // runs, :has] += part[one, :has] if entries else 0
    rows = 70
    lse, delta, sinks = (torch.randn(shape, generator=generator) for shape in ((rows, N), (rows, N), (N,)))
    sinks[1] = torch.inf
    dori, dcmp = (torch.full(shape, torch.nan, dtype=FP16) for shape in (sums.shape, (batches * entries, D)))
    share, dsinks = torch.full((2, N), torch.nan), torch.full((N,), torch.nan)
    on_device = [x.to(kernel_device) for x in (sums, halo, bounds, dori, part, dcmp if entries else dori, sinks, lse, delta, share)]
    spec = dense_totals.dense_totals_spec(FP16, N, D, stride if entries else 0)
    grid = 2 + -(-sums.shape[0] // spec.consts["BM"]) + batches * entries * (D // spec.consts["BD"])
    spec.launch((grid,), *on_device, sums.shape[0], every, max(1, entries), runs, rows, 2)
    dsinks = dsinks.to(kernel_device)
    dense_totals.sink_total_spec(N).launch((1,), on_device[-1], dsinks, 2)
    assert on_device[3].cpu().equal(want.to(FP16))
    if entries:
        torch.testing.assert_close(on_device[5].cpu().view(batches, entries, D).float(), want_entries, rtol=1e-3, atol=1e-3)
    wanted = -(torch.exp(sinks - lse) * delta).sum(0)
    wanted[1] = 0
    torch.testing.assert_close(dsinks.cpu(), wanted)


class ProbsInTorch:
    """Stands in for the kernel of P, dZ and dq."""

    def __init__(self, dtype, N, D, entries):
        self.entries = entries

    def launch(self, grid, q, ori_kv, cmp_kv, dout, lse, places, dq, p, dz, pe, dze, delta, rows, zero, scale):
        N, D = q.shape[-2:]
        p, dz = (x[: rows * N * RING].view(rows, N, RING) for x in (p, dz))
        pe, dze = (x[: rows * N * self.entries].view(rows, N, self.entries) for x in (pe, dze))
        for x in (p, dz, pe, dze):
            x.zero_()
        for row in range(rows):
            begin, end, first, last = places[row].tolist()
            keys = ori_kv.view(-1, D)[begin:end].float()
            if self.entries:
                keys = torch.cat([keys, cmp_kv.view(-1, D)[first:last].float()])
            weight = torch.exp(q[row].float() @ keys.T * scale - lse[row, :, None])
            dp = dout[row].float() @ keys.T
            delta[row] = (weight * dp).sum(1)
            ds = weight * (dp - delta[row, :, None]) * scale
            dq[row] = (ds @ keys).to(dq.dtype)
            slots = torch.arange(begin, end) % RING
            for x, entry, values in ((p, pe, weight), (dz, dze, ds)):
                x[row][:, slots] = values[:, : end - begin].to(x.dtype)
                if self.entries:
                    assert last - first <= self.entries
                    entry[row][:, : last - first] = values[:, end - begin :].to(x.dtype)


class KeysInTorch:
    """Stands in for the kernel of the keys' gradients: a run's keys that queries before it have seen go to its halo, the others to dori."""

    def __init__(self, dtype, N, D, entries, stride):
        self.entries, self.stride = entries, stride

    def launch(self, grid, q, dout, p, dz, pe, dze, places, dori, halo, part, bounds, length, runs, before, zero):
        rows, N, D = q.shape
        p, dz = (x[: rows * N * RING].view(rows * N, RING).float() for x in (p, dz))
        pe, dze = (x[: rows * N * self.entries].view(rows * N, self.entries).float() for x in (pe, dze))
        x, y = q.view(-1, D).float(), dout.reshape(-1, D).float()
        above = torch.as_strided(places, (rows + before, 4), (4, 1), places.storage_offset() - 4 * before).tolist()
        assert grid[0] == rows // length * runs * (D // 128)
        for one in range(rows // length * runs):
            first, end = run_bounds(one, length, runs)
            assert first < end
            of_run = slice(first * N, end * N)
            seen = above[first + before - 1][1] if first + before else 0
            bounds[one, :3] = torch.tensor([above[first + before][0], seen, self.entries])
            for key in range(above[first + before][0], above[end + before - 1][1]):
                seeing = [r for r in range(first, end) if above[r + before][0] <= key < above[r + before][1]]
                if not seeing:
                    continue
                at = slice(seeing[0] * N, (seeing[-1] + 1) * N)
                total = dz[at, key % RING] @ x[at] + p[at, key % RING] @ y[at]
                if key < seen:
                    halo[one, key % RING] = total
                else:
                    assert dori[key].isnan().all() or not dori[key].any()  # written by no other run
                    dori[key] = total
            if self.entries:
                part.view(-1, self.stride, D)[one, : self.entries] = dze[of_run].T @ x[of_run] + pe[of_run].T @ y[of_run]


@pytest.mark.interpret
@pytest.mark.parametrize(("chunk", "cores"), [(16, 6), (None, 132), (None, 2)])
@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("swa", {}), ("swa", {"S2": 60, "q_offset": -9, "window": 128}), ("cfa", {}), ("cfa", {"q_offset": 40, "S2": 60, "sinks": "none"}),
        ("swa", {"docs_q": (7, 0, 20, 1, 9), "docs_ori": (7, 3, 31, 0, 30)}), ("swa", {"S": 0}), ("cfa", {"B": 0}), ("swa", {"S2": 0, "q_offset": 3}),
        ("scfa", {"K": 0}), ("cfa", {"S": 40, "cmp_ratio": 1}), ("cfa", {"S": 90, "cmp_ratio": 1}),
        ("cfa", {"S": 50, "S2": 100, "q_offset": (60, -1), "cmp_ratio": 1}), ("cfa", {"B": 1, "S": 20, "S2": 100, "cmp_ratio": 1}),
    ],
    ids=[
        "swa", "swa offset", "cfa", "cfa offset", "swa pack", "no queries", "no batch", "no keys", "no slots", "64 entries", "128 entries",
        "128 entries, offsets", "the last of 128 entries",
    ],
)  # fmt: skip
def test_launcher(mode, more, chunk, cores, monkeypatch):
    """Runs, pieces of 16 queries, halos of both, entries of every batch, dtypes."""
    from sparse_attn.shared_kv.hopper import bwd, dense_bwd
    from tests.op_checks import poison_empty

    one = replace(AttentionCase("launcher", mode, N=2, D=256, B=2, S=37, cmp_ratio=3, window=20), **more)
    inputs = attention_inputs(one, dtype=FP16)
    dout = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(1)).to(FP16)
    want = expected(inputs, dout, mode)
    for name in ("dense_pdz_spec", "streamed_pdz_spec"):
        monkeypatch.setattr(dense_bwd, name, ProbsInTorch)
    monkeypatch.setattr(dense_bwd, "dense_dkv_spec", KeysInTorch)
    monkeypatch.setattr(dense_bwd, "programs", lambda tasks, _: min(tasks, cores))
    if chunk is not None:
        monkeypatch.setattr(dense_bwd, "CHUNK_BYTES", chunk * 4 * one.N * (RING + (32 if mode == "cfa" else 0)))
    poison_empty(monkeypatch)
    tensors, options = arguments(inputs, one)
    grads = bwd.attention_bwd(dout, *tensors, want["out"].to(FP16), want["lse"].float(), *options, False)
    got = {name: x for name, x in zip(("dq", "dori", "dcmp", "dsinks"), grads) if x.numel()}
    check(got, {name: want[name] for name in got}, FP16)
    assert set(got) == {name for name, x in want.items() if x.numel() and name.startswith("d")}
    assert all(x.dtype == FP16 for x in grads[:3]) and [x.shape for x in grads[:2]] == [inputs[name].shape for name in ("q", "ori_kv")]


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("mode", "window", "ratio", "K", "packed", "D", "kernel"),
    [
        ("swa", 128, 0, 0, False, 256, "dense"),
        ("swa", 128, 0, 0, True, 256, "dense"),
        ("swa", 128, 0, 0, False, 128, "general 0"),
        ("swa", 129, 0, 0, False, 256, "general 0"),
        ("swa", None, 0, 0, False, 256, "general 0"),
        ("cfa", 5, 2, 0, False, 256, "dense"),
        ("cfa", 5, 1, 0, False, 256, "general 1"),  # more than 128 entries
        ("cfa", 5, 2, 0, True, 256, "general 1"),
        ("scfa", 5, 3, 4, False, 256, "general 2"),
        ("scfa", 5, 3, 0, False, 256, "dense"),  # no list names an entry
    ],
)
def test_which_backward_runs(mode, window, ratio, K, packed, D, kernel, monkeypatch):
    """The pair of dense kernels where every query's ranges are short, the general one elsewhere. Neither runs here."""
    from sparse_attn.shared_kv.hopper import bwd

    def dense(*_):
        raise Launched("dense")

    def general(dtype, N, D, compressed, partial):
        raise Launched(f"general {compressed}")

    monkeypatch.setattr(bwd, "dense_attention_bwd", dense)
    monkeypatch.setattr(bwd, "backward_spec", general)
    rows = {"docs_q": (30, 35)} if packed else {"B": 1, "S": 129}
    one = AttentionCase("which", mode, N=2, D=D, K=K, cmp_ratio=max(ratio, 1), window=window, **rows)
    inputs = attention_inputs(one, dtype=FP16)
    tensors, options = arguments(inputs, one)
    out, lse = torch.zeros_like(inputs["q"]), torch.zeros(inputs["q"].shape[:-1])
    for deterministic in (False, True):
        with pytest.raises(Launched, match=f"^{kernel}$"):
            bwd.attention_bwd(out, *tensors, out, lse, *options, deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 127, 128])
def test_edges_of_windows(window, monkeypatch):
    """Blocks hold 16 keys; runs are of one unit and of several, the last of part of one."""
    from tests.op_checks import poison_empty

    for S in (7, 301, 3001):
        one = AttentionCase("edges", "swa", N=20, D=512, B=1, S=S, window=window)
        inputs, dout = make(one, BF16)
        want = expected(inputs, dout, "swa")
        poison_empty(monkeypatch)
        # one key alone has a weight of 1 and dZ of 0 where there is no sink: dq is the rounding of what cancels
        check(run(inputs, one, dout, False), want, BF16, factor=2.0 if window < 15 else 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("entries", [32, 33, 63, 64, 65, 127, 128])
def test_edges_of_entries(entries, monkeypatch):
    """As many as a form of the kernels has room for, one less, one more; steps of queries between which the number changes."""
    from tests.op_checks import poison_empty

    one = AttentionCase("edges", "cfa", N=64, D=512, B=1, S=11 * entries + 3, cmp_ratio=11, window=128)
    inputs, dout = make(one, BF16)
    want = expected(inputs, dout, "cfa")
    poison_empty(monkeypatch)
    got, again = run(inputs, one, dout, False), run(inputs, one, dout, True)
    check(got, want, BF16)
    assert all(x.equal(again[name]) for name, x in got.items())


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "ratio"), [("swa", 0), ("cfa", 10), ("cfa", 3)])
def test_pieces(mode, ratio, monkeypatch):
    """Queries done in pieces of 96, their keys added up across them: the same as at once but for the order of the sums, and bit-equal."""
    from sparse_attn.shared_kv.hopper import dense_bwd

    one = AttentionCase("pieces", mode, N=64, D=512, B=2, S=301, cmp_ratio=max(1, ratio), window=128)
    inputs, dout = make(one, BF16)
    want = expected(inputs, dout, mode)
    monkeypatch.setattr(dense_bwd, "CHUNK_BYTES", 96 * 4 * one.N * (RING + (32 if mode == "cfa" else 0)))
    got, again = run(inputs, one, dout, False), run(inputs, one, dout, True)
    check(got, want, BF16)
    assert all(x.equal(again[name]) for name, x in got.items())
