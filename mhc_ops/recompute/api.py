"""The public functions: a region whose mHC tensors are replayed in the backward pass, and the replay of a block by itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kernel_runtime import check_int, select_impl
from mhc_ops.library import check_coefficient, check_expansion, check_stream_tensor
from mhc_ops.recompute.active import recording, set_recording
from mhc_ops.recompute.record import Recorder, replay_collapse, replay_streams


@contextmanager
def hc_recompute() -> Iterator[None]:
    """A region of the forward pass that keeps no streams and no y of its own: the backward pass makes them again, bit for bit.

        with hc_recompute():                                          # in-layer: a region a layer
            streams, y, post, comb = hc_1(streams)
            f = attention(norm(y))
            streams, y, post, comb = hc_2(streams, (f, post, comb))
            streams = hc_post(mlp(norm(y)), streams, post, comb)

    Kept are the streams that enter the region, the outputs f of its sublayers, the coefficients (2N + N*N values of pre, post and comb, and
    the mixes, fp32 a token and site), and whatever the sublayers save themselves. Everything that hc_pre, hc_post and hc_post_pre made in
    the region is replayed, whoever saves it (a norm that saves y, too). A region around several layers keeps the streams once for all of
    them; `plan` says how many layers pay. Gradients are bit-equal to those without a region.

    Also a decorator: `@hc_recompute()` on a forward. Works inside and around torch.utils.checkpoint, under FSDP2 and with sublayers that are
    compiled. A region of one thread; of nested regions the innermost counts. Without grad mode it does nothing.
    Warns (RuntimeWarning) if no mHC op was seen although grad mode is on: impl="eager" bypasses the ops, and inside torch.compile the
    region is not seen. RuntimeError in the backward pass if a tensor that was kept has been written in place.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("hc_recompute: a region cannot be compiled, its hooks do not see inside a graph; compile the sublayers in it instead")
    outer, recorder = recording(), Recorder()
    set_recording(recorder)
    try:
        with torch.autograd.graph.saved_tensors_hooks(*recorder.hooks):
            yield
    finally:
        set_recording(outer)
        recorder.close()
        if outer is not None:
            outer.seen |= recorder.seen
    if not recorder.seen and torch.is_grad_enabled():
        warnings.warn(
            "hc_recompute: no hc_pre, hc_post or hc_post_pre ran in this region (compiled, or impl='eager'?): nothing is recomputed",
            RuntimeWarning,
            stacklevel=3,
        )


def hc_block_recompute(
    x: Tensor, f: Sequence[Tensor], post: Sequence[Tensor], comb: Sequence[Tensor], pre: Sequence[Tensor], *, impl: str = "auto"
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The inputs of all K sublayers of a block of layers again, from the streams that enter it: what hc_recompute does, by hand.

    x           [..., N, D] streams that enter the block, N in 2..8, bf16, fp16 or fp32.
    f           K - 1 outputs [..., D] of the sublayers, the last one's is not needed, in the dtype of x.
    post, comb  K - 1 coefficients each, [..., N] and [..., N, N] fp32, of the same sublayers.
    pre         K coefficients [..., N] fp32: what collapsed the streams of each sublayer (its pre_mix where it had one).
    impl        "auto", "triton" or "eager", see kernel_runtime.impl; the one of the first pass, or the bits may differ.

    Returns the streams that each sublayer read, K of [..., N, D], the first being x, and their collapsed inputs y, K of [..., D]; bit-equal
    to those of the first pass. No gradient flows: this is for a backward pass. Two launches a sublayer.
        streams[0] = x;  streams[k + 1] = hc_post(f[k], streams[k], post[k], comb[k]);  y[k] = pre_bmm(pre[k], streams[k])
    ValueError for sequences of wrong length; else the errors of hc_post and pre_bmm.
    """
    op = "hc_block_recompute"
    for name, sequence in (("pre", pre), ("f", f), ("post", post), ("comb", comb)):
        if not isinstance(sequence, Sequence):
            raise TypeError(f"{op}: {name} must be a sequence of tensors, got {type(sequence).__name__}")
    check_int(op, "len(pre)", len(pre), minimum=1)
    for name, sequence in (("f", f), ("post", post), ("comb", comb)):
        if len(sequence) != len(pre) - 1:
            raise ValueError(f"{op}: {name} has {len(sequence)} tensors, wanted {len(pre) - 1}, one less than the {len(pre)} of pre")
    check_stream_tensor(op, "x", x)
    for one_f, one_post, one_comb in zip(f, post, comb):
        check_expansion(op, one_f, x, one_post, one_comb)
    for one_pre in pre:
        check_coefficient(op, "pre", one_pre, list(x.shape[:-1]), "x", x)
    how = select_impl(op, impl, x)
    with torch.no_grad():
        streams = [x.detach()]
        for one_f, one_post, one_comb in zip(f, post, comb):
            streams.append(replay_streams(one_f, streams[-1], one_post, one_comb, how))
        y = [replay_collapse(one_pre, one, how) for one_pre, one in zip(pre, streams)]
    return tuple(streams), tuple(y)
