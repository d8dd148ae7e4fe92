"""Random calls of the attention's kernels for sm_90, emulated on the CPU, against fp64: `python -m tests.random_attention FIRST COUNT` runs the
cases of COUNT seeds and prints one line each; the exit status is 1 if any was wrong. Most take one to ten seconds. Where a
gradient is a difference of almost equal terms (one entry that fills all slots) rounding alone exceeds the limit: look before mending.
"""

import random
import sys
import time
import traceback

import torch

from reference.cases.sparse_attn import AttentionCase
from sparse_attn.shared_kv.hopper import bwd, dense_bwd
from tests.emulator import emulated
from tests.test_gluon_emulated import UNORDERED
from tests.test_sparse_attn_hopper import error, expected, limits_of, make, run


def random_case(r):
    mode, D = r.choice(["swa", "cfa", "cfa", "scfa"]), r.choice([128, 256, 256, 512])
    more = {"window": r.choice([None, 1, 5, 20, 33, 64, 127, 128, 129]), "sinks": r.choice(["finite", "none", "extreme"])}
    if r.random() < 0.4:
        lengths = [r.choice([0, 1, 2, r.randint(1, 30)]) for _ in range(r.randint(1, 5))]
        more["docs_q"] = tuple(lengths) if sum(lengths) else (3,)
        if r.random() < 0.5:
            more["docs_ori"] = tuple(r.choice([d, d + r.randint(0, 60), r.randint(0, 40)]) for d in more["docs_q"])
        if r.random() < 0.2:
            more["q_offset"] = tuple(r.randint(-5, 40) for _ in more["docs_q"])
    else:
        more["S"], more["B"] = r.choice([1, 2, 7, 8, 9, 17, r.randint(1, 40)]), r.choice([1, 1, 2, 3])
        if r.random() < 0.6:
            more["S2"] = r.choice([more["S"], r.randint(0, 200), r.randint(1, 300)])
        if r.random() < 0.5:
            more["q_offset"] = r.choice([r.randint(-10, 10), r.randint(0, 200)])
    if mode != "swa":
        more["cmp_ratio"] = r.choice([1, 1, 2, 3, 4, 5, 8, 10])
    if mode == "scfa":
        more["K"], more["indices"] = r.choice([0, 1, 5, 20, 64, 65, 70, 130]), r.choice(["mixed", "topk"])
    if r.random() < 0.2:
        more["softmax_scale"] = r.choice([-0.05, 0.0, 0.3])
    return AttentionCase("random", mode, N=r.choice([1, 2, 3, 5, 16, 20, 33, 64, 65, 128]), D=D, **more)


def small_chunks(r, case):
    """Queries a few at a time, as long sequences are done, in both backward passes."""
    queries = r.choice([3, 8, 24])
    bwd.chunk_of, bwd.LIST_SLOTS = lambda *_: queries, 2 * queries * max(1, case.K)
    dense_bwd.CHUNK_BYTES = r.choice([1, 16, 24]) * 4 * case.N * 176


def wrong(seed, r, case, dtype):
    """What differs from fp64 by more than twice what the tests allow. A gradient that is zero but for rounding is not looked at, nor is that of a
    single sink, one sum of terms that cancel."""
    inputs, dout = make(case, dtype, seed, device="cpu")
    want = expected(inputs, dout, case.mode)
    limits, found = limits_of(want, dtype, 2.0), {}
    if case.N == 1:
        want.pop("dsinks", None)
    for deterministic in (False, True):
        with emulated(seed + deterministic, cores=r.choice([1, 2, 3, 7]), order=r.choice(["forward", "backward"]), unordered=UNORDERED):
            got = run(inputs, case, dout, deterministic)
        for name, x in want.items():
            if x.numel() and float(x.norm().nan_to_num(1.0)) > 1e-6 and not (e := error(got[name], x)) <= limits[name]:
                found[name, deterministic] = e
    return found


def main(first, count):
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN
    usual = bwd.chunk_of, bwd.LIST_SLOTS, dense_bwd.CHUNK_BYTES
    failed = 0
    for seed in range(first, first + count):
        r, start = random.Random(seed), time.perf_counter()
        case, dtype = random_case(r), r.choice([torch.bfloat16, torch.float16])
        bwd.chunk_of, bwd.LIST_SLOTS, dense_bwd.CHUNK_BYTES = usual
        if r.random() < 0.4:
            small_chunks(r, case)
        try:
            found = wrong(seed, r, case, dtype)
        except Exception:
            found = traceback.format_exc(limit=-3)
        failed += bool(found)
        print(f"{seed}: {'WRONG' if found else 'right'}, {time.perf_counter() - start:.0f} s", *((found, case, dtype) if found else ()), flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
