"""The backward for sm_90: edges of its tiles and parts, the same bits on every run, the order of its sums."""

import pytest
import torch

from reference.cases.sparse_attn import AttentionCase, attention_inputs
from tests.test_sparse_attn_hopper import BF16, FP16, Launched, arguments, check, expected, make, run


def test_sums_in_the_order_of_the_lanes(kernel_device, monkeypatch):
    """Rows of both tensors from one buffer, every channel at its place, for the two orders that there are."""
    from sparse_attn.shared_kv.hopper.bwd_cast import cast_sums
    from tests.op_checks import poison_empty

    poison_empty(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    for D, group in ((512, 4), (256, 8), (128, 8)):
        want = torch.randn((19, D), generator=generator)
        sums = torch.empty_like(want)
        for channel in range(D):
            block, rest = divmod(channel, 4 * group)
            eighth, lane, e = rest // 8, rest % 8 // 2, rest % 2
            sums[:, 4 * group * block + group * lane + 2 * eighth + e] = want[:, channel]
        dori, dcmp = torch.empty((1, 14, D), dtype=FP16, device=kernel_device), torch.empty((1, 5, D), dtype=FP16, device=kernel_device)
        cast_sums(sums.flatten().to(kernel_device), dori, dcmp, group)
        assert dori[0].cpu().equal(want[:14].to(FP16)) and dcmp[0].cpu().equal(want[14:].to(FP16))
        none = torch.empty(0, dtype=FP16, device=kernel_device)
        whole = torch.empty((1, 19, D), dtype=FP16, device=kernel_device)
        cast_sums(sums.flatten().to(kernel_device), whole, none, group)
        assert whole[0].cpu().equal(want.to(FP16))


# Tiles hold 64 keys, of the window and of entries apart: one less, just as many, one more; more tasks than multiprocessors where S > 132
EDGES = (
    (9, 1, 64, 512, BF16), (63, 64, 64, 512, BF16), (64, 65, 65, 512, FP16), (65, 128, 3, 512, BF16), (128, 63, 64, 256, FP16),
    (129, 129, 33, 128, BF16),
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "slots", "N", "D", "dtype"), EDGES)
def test_edges_of_tiles(window, slots, N, D, dtype, monkeypatch):
    from tests.op_checks import poison_empty

    one = AttentionCase("edges", "scfa", N=N, D=D, B=1, S=301, K=slots, cmp_ratio=2, window=window)
    inputs, dout = make(one, dtype)
    want = expected(inputs, dout, "scfa")
    poison_empty(monkeypatch)
    for deterministic in (False, True):
        # with few keys a query delta of the rounded out weighs more
        check(run(inputs, one, dout, deterministic), want, dtype, factor=2.0 if window < 16 else 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["swa", "cfa", "scfa"])
def test_the_same_bits_ten_times(mode):
    """Far more tasks than multiprocessors, so that every barrier goes round many times."""
    one = AttentionCase("again", mode, N=64, D=512, B=1, S=1500, K=192, cmp_ratio=4, window=128)
    inputs, dout = make(one, BF16)
    first = run(inputs, one, dout, True)
    for _ in range(9):
        again = run(inputs, one, dout, True)
        assert all(x.equal(again[name]) for name, x in first.items())


@pytest.mark.gpu
def test_a_thousand_launches_end():
    """Short tasks of one or two tiles, back to back: a barrier whose phase is lost would not let the last one end."""
    one = AttentionCase("many", "swa", N=64, D=512, B=1, S=500, window=70)
    inputs, dout = make(one, BF16)
    for deterministic in (False, True):
        first = run(inputs, one, dout, deterministic)
        for _ in range(500):
            last = run(inputs, one, dout, deterministic)
        assert first["dq"].equal(last["dq"])


# the dense kernels without and with entries, the general ones with lists and without
VIEWS = [("swa", {"window": 20}), ("cfa", {"window": 20, "cmp_ratio": 7}), ("scfa", {"K": 20, "window": 20}), ("swa", {"window": None})]


def at_odd_offset(x):
    """The same numbers, two bytes behind the begin of an allocation."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


def moved(inputs):
    return {name: at_odd_offset(x) if name in ("q", "ori_kv", "cmp_kv") else x for name, x in inputs.items()}


@pytest.mark.interpret
@pytest.mark.parametrize(("mode", "more"), VIEWS)
def test_what_is_copied_by_16_bytes_lies_at_their_multiples(mode, more, monkeypatch):
    """No kernel for sm_90 gets a view that its copies could not take. None runs here."""
    from sparse_attn.shared_kv.hopper.bwd import attention_bwd
    from sparse_attn.shared_kv.hopper.fwd import attention_fwd

    def observed(spec, args):
        if spec.name.startswith("hopper"):
            raise Launched([name for name, x in zip(spec.types, args) if isinstance(x, torch.Tensor) and x.data_ptr() % 16])

    monkeypatch.setattr("kernel_runtime.launch.LAUNCH_OBSERVERS", [observed])
    one = AttentionCase("views", mode, N=2, D=256, B=1, S=33, **more)
    inputs = moved(attention_inputs(one, dtype=FP16))
    tensors, options = arguments(inputs, one)
    out, lse = torch.zeros_like(inputs["q"]), torch.zeros(inputs["q"].shape[:-1])
    assert inputs["q"].data_ptr() % 16
    with pytest.raises(Launched, match=r"^\[\]$"):
        attention_fwd(*tensors, *options, False)
    for deterministic in (False, True):
        with pytest.raises(Launched, match=r"^\[\]$"):
            attention_bwd(at_odd_offset(out), *tensors, at_odd_offset(out), lse, *options, deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "more"), VIEWS)
def test_views_at_odd_offsets(mode, more):
    one = AttentionCase("views", mode, N=20, D=512, B=1, S=77, **more)
    inputs, dout = make(one, BF16)
    for deterministic in (False, True):
        check(run(moved(inputs), one, at_odd_offset(dout), deterministic), expected(inputs, dout, mode), BF16)
