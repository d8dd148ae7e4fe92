"""A small kernel of the kind that the library's kernels for sm_90 are: tiles stream through shared memory into products. For the tests of the
emulator, which put one mistake at a time into it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

STAGES = gl.constexpr(2)


@gluon.jit
def tile_pointers(x, tile, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    return x + row[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def producer(x, w, ring, matrix, full, empty, tiles, MISTAKE: gl.constexpr):
    if MISTAKE != "shared memory not written":
        async_copy.async_copy_global_to_shared(matrix, tile_pointers(w, 0, 2))
    for t in range(tiles):
        stage = t % STAGES
        if MISTAKE != "no wait for a free slot":
            mbarrier.wait(empty.index(stage), (t // STAGES & 1) ^ 1)
        source = t
        if MISTAKE == "read past the end":
            source = t + 1
        async_copy.async_copy_global_to_shared(ring.index(stage), tile_pointers(x, source, 2))
        if MISTAKE != "copies unheard of":
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def consumer(out, ring, matrix, full, empty, tiles, MISTAKE: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    for t in range(tiles):
        stage = t % STAGES
        if MISTAKE == "wrong parity":
            mbarrier.wait(full.index(stage), (t // STAGES & 1) ^ 1)
        elif MISTAKE != "no wait for the copies":
            mbarrier.wait(full.index(stage), t // STAGES & 1)
        if MISTAKE != "no fence":
            fence_async_shared()
        acc = gl.zeros([64, 64], gl.float32, layout=layout)
        acc = warpgroup_mma(ring.index(stage), matrix, acc, is_async=True)
        if MISTAKE == "freed before the product is done":
            mbarrier.arrive(empty.index(stage), count=1)
        if MISTAKE == "used before the wait":
            acc = acc + 1.0
        acc = warpgroup_mma_wait(0, deps=[acc])
        if MISTAKE == "too many arrivals":
            mbarrier.arrive(empty.index(stage), count=2)
        elif MISTAKE != "never freed" and MISTAKE != "freed before the product is done":
            mbarrier.arrive(empty.index(stage), count=1)
        if MISTAKE == "freed twice":
            mbarrier.arrive(empty.index(stage), count=1)
        target = t
        if MISTAKE == "written past the end":
            target = t + 1
        row = target * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        gl.store(out + row[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :], acc)


@gluon.jit(do_not_specialize=["tiles"])
def stream_kernel(x, w, out, tiles, MISTAKE: gl.constexpr):
    """out [64 tiles, 64] = x @ w, bf16 in and fp32 out; a warpgroup multiplies, two warps copy."""
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], shared)
    matrix = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=64)
        mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [(consumer, (out, ring, matrix, full, empty, tiles, MISTAKE)), (producer, (x, w, ring, matrix, full, empty, tiles, MISTAKE))], [2], [40]
    )
