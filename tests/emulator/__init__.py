"""Kernels in Gluon and Triton on the CPU, as logical tensors: for tests of the kernels for sm_90 where there is no such device.

Triton's own interpreter knows neither Gluon nor bf16 arithmetic. Here a kernel's Python source runs on torch tensors (`values`), program after
program. The warpgroups of a program are threads, of which one runs at a time; a seed decides which, so that another seed is another order. What
holds between them is checked rather than timed (`machine`, `memory`):

    barriers      a wait that never ends is an error which says who waits for what, as is an arrival too many
    async copies  land any time between their start and the completion of the barrier that hears of them
    wgmma         an accumulator in flight may be touched by the next product and by the wait alone; operands in shared memory belong to it until
                  it has been waited for
    shared memory every read and write of an element must be ordered after the last conflicting one by barriers and waits, whatever the order was
                  in this run; what wgmma reads also needs a fence between the proxies on the way (vector clocks). Fresh memory holds NaN.
                  Where a kernel reads on purpose what is being written (`unordered`), such a read gives numbers at random instead.
    global memory an address outside of a tensor's storage is an error; masked lanes that have no `other` hold NaN or a number nobody expects

Layouts are not looked at: they do not change what a kernel computes, and compiling ahead of time checks them (test_compile_ahead.py). Within a
warpgroup no order is checked: the compiler puts barriers there. Programs do not run side by side. Time means nothing.
`python -m tests.random_attention` runs random cases.
"""

from tests.emulator.launch import emulated
from tests.emulator.machine import EmulationError

__all__ = ["EmulationError", "emulated"]
