"""Scores of the indexer for sm_90 (indexer/hopper) against fp64 and beside the portable kernel, and what its compilation must not lose."""

import re

import pytest
import torch

from indexer import hopper
from kernel_runtime import interpreting

CASES = {  # batch, queries, heads, channels, keys, position of the first query, batch entries and queries of the chunk
    "one tile": (1, 5, 64, 128, 3, 0, (0, 1), (0, 5)),
    "odd sizes": (2, 301, 64, 128, 75, 0, (0, 2), (0, 301)),
    "more tiles than the ring holds": (1, 130, 64, 128, 700, 2600, (0, 1), (0, 130)),
    "chunk": (3, 1215, 64, 128, 301, 5, (1, 2), (3, 1209)),
    "nobody sees a block": (1, 40, 64, 128, 9, -50, (0, 1), (0, 40)),
    "32 heads": (2, 333, 32, 64, 83, 0, (0, 2), (0, 333)),
    "128 heads": (1, 1100, 128, 128, 275, 0, (0, 1), (0, 1100)),
}
PACKED = ([0, 3, 3, 260, 690], [0, 0, 5, 80, 190])  # four documents of 700 queries, one empty, one without keys; the last ten queries are padding


@pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 nothing can be compiled")
@pytest.mark.parametrize("table", [False, True])
def test_consumers_keep_count_of_tiles(table):
    """Which of a task's tiles is a consumer's first depends on the tasks before. Triton's constant propagation has taken that count for 0."""
    from indexer.hopper.scores import hopper_scores_spec
    from kernel_runtime.targets import parse_target

    code = hopper_scores_spec(torch.bfloat16, torch.float32, 64, 128, 4, table).compile(parse_target("sm_90")).asm["ttgir"]
    begins = re.findall(r"scf\.for %t(?:_\d+)? = (%\S+) to", code)
    assert len(begins) == 2 and not any(begin.startswith("%c") for begin in begins), begins


def takes_or_skip(device):
    if not hopper.on_device(torch.device(device)):
        pytest.skip("the device is not of sm_90, or Triton not the one that the kernel was written for")


def check(case, dtype, weights_dtype, packed=None, device="cuda"):
    from indexer.core import visible_table
    from indexer.lightning.fwd import launch_scores

    batch, queries, heads, dim, keys, offset, (b0, batches), (i0, n) = case
    generator = torch.Generator(device).manual_seed(queries)
    q, k, w = (
        torch.randn(*shape, device=device, generator=generator).to(d)
        for shape, d in (((batch, queries, heads, dim), dtype), ((batch, keys, dim), dtype), ((batch, queries, heads), weights_dtype))
    )
    q[0, 1, 0, 0] = float("nan")  # stays with its query
    cu = [None, None] if packed is None else [torch.tensor(x, device=device, dtype=torch.int32) for x in packed]
    span = visible_table(batch, queries, keys, 4, *cu, offset, None, q.device)
    i = torch.arange(queries, device=device)
    start = (i * 0).expand(batch, -1)
    count = torch.div(i + offset + 1, 4, rounding_mode="floor").clamp(0, keys).expand(batch, -1)
    if span is not None:
        start, count = span.view(2, batch, queries).long()
    poison = -12345.0
    found = torch.full((batches, n, keys), poison, device=device)
    assert hopper.takes(q, k, w)
    pointer = torch.zeros(1, dtype=torch.int32, device=device) if span is None else span
    launch_scores(q, k, w, pointer, found, 4, span is not None, batches, b0, i0, n, queries, keys, batch * queries, offset)
    terms = torch.einsum("bshd,bkd->bshk", q[b0 : b0 + batches, i0 : i0 + n].double(), k[b0 : b0 + batches].double()).relu()
    weights = w[b0 : b0 + batches, i0 : i0 + n, :, None].double()
    start, count = (x[b0 : b0 + batches, i0 : i0 + n, None] for x in (start, count))
    column = torch.arange(keys, device=device)
    own = (start + column).clamp(max=keys - 1).expand(batches, n, keys)
    want, size = ((terms * x).sum(2).gather(2, own) for x in (weights, weights.abs()))
    shown = column < count
    assert bool((found[~shown] == poison).all())
    want, size, found = want[shown], size[shown], found[shown].double()
    lost = want.isnan()
    assert torch.equal(found.isnan(), lost) and (b0 or i0 or bool(lost.any()) == bool(count[0, 1] > 0))
    # exact products of bf16, at most log2(Di) + log2(H) additions of a sum, and as many again for what the tensor cores drop
    assert bool(((found - want).abs()[~lost] <= 64 * 2.0**-24 * size[~lost]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_against_fp64(name):
    takes_or_skip("cuda")
    check(CASES[name], torch.bfloat16, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("weights_dtype", [torch.float16, torch.float32])
def test_fp16(weights_dtype):
    takes_or_skip("cuda")
    check(CASES["odd sizes"], torch.float16, weights_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [32, 64, 128])
def test_packed_documents(heads):
    takes_or_skip("cuda")
    check((1, 700, heads, 128, 190, 0, (0, 1), (0, 700)), torch.bfloat16, torch.float32, PACKED)
    check((1, 700, heads, 128, 190, 0, (0, 1), (130, 333)), torch.bfloat16, torch.bfloat16, PACKED)


@pytest.mark.gpu
def test_many_tasks_a_program():
    """Several hundred tiles of keys a program, in tasks of every parity."""
    takes_or_skip("cuda")
    check((1, 6001, 64, 128, 333, 3, (0, 1), (1, 5997)), torch.bfloat16, torch.float32)


@pytest.mark.gpu
def test_what_it_does_not_take_goes_to_the_portable_kernel():
    takes_or_skip("cuda")
    q = torch.zeros(1, 8, 64, 128, dtype=torch.bfloat16, device="cuda")
    odd = torch.zeros(q.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view(q.shape)
    others = (q.cpu(), q.float(), q[..., :96].contiguous(), q[:, :, :48].contiguous(), odd)
    assert hopper.takes(q) and not hopper.takes(q, odd) and not any(hopper.takes(x) for x in others)
