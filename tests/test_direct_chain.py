"""The host side of a boundary in both directions, over shapes that come again: every direct launch is the one that Triton would make, and
every replay launches what the launcher does."""

import threading

import pytest
import torch

from kernel_runtime import interpreting, replay
from reference.cases.mhc import OPS
from tests.direct_tools import Calls, D, N, boundary, boundary_arguments

pytestmark = pytest.mark.skipif(interpreting(), reason="under TRITON_INTERPRET=1 kernels are Python functions; nothing is launched")


def test_a_chain_launches_what_triton_would(driver, monkeypatch):
    from kernel_runtime.launch import Spec

    launch, seen, kernels = Spec.launch, [], []

    def both(self, grid, *args):
        run, through = self.kernel.run, []
        self.kernel.run = lambda *a, **k: (through.append(1), run(*a, **k))[1]
        try:
            launch(self, grid, *args)
        finally:
            del self.kernel.run
        self.kernel[tuple(grid)](*args, **self.keywords)
        ours, tritons = driver.launches
        driver.launches.clear()
        count = len(args)  # what follows are constants, which the launcher does not look at
        assert ours[:3] == tritons[:3] and ours[3][:count] == tritons[3][:count] and len(ours[3]) == len(tritons[3]), self.name
        seen.append(not through)
        kernels.append(self.identity)

    monkeypatch.setattr(Spec, "launch", both)
    for tokens, pre_mix in ((1, False), (5, True), (33, False), (1, True), (16, False), (5, True)):
        boundary(tokens, pre_mix)
    for kernel in set(kernels):
        first = kernels.index(kernel)
        assert not seen[first] and all(s for s, k in zip(seen[first + 1 :], kernels[first + 1 :], strict=True) if k == kernel)
    assert len(set(kernels)) == 9 and len(kernels) == 36


def test_replays_launch_what_the_launchers_do(driver, monkeypatch):
    from mhc_ops.boundary.bwd import post_pre_bwd
    from mhc_ops.boundary.fwd import post_pre_fwd

    calls, first = Calls(driver, monkeypatch), {}
    for pre_mix in (False, True):
        boundary(5, pre_mix)  # by Triton's path, which passes constants too
    for case in ((5, False), (33, True), (5, False), (1, False), (33, True), (5, False), (1, False), (33, True), (1, False), (5, False)):
        forward, backward = boundary_arguments(*case)
        for replays, launcher, arguments in ((calls.forward, post_pre_fwd, forward), (calls.backward, post_pre_bwd, backward)):
            *found, replayed = calls(replays, launcher, arguments)
            times, want = first.setdefault((case, launcher), [0, found])
            assert len(found[0]) == 3 and found == want
            assert replayed == (times >= 2)
            first[case, launcher][0] += 1
    assert calls.forward.count == calls.backward.count == 3


@pytest.mark.parametrize("op", [op for op in OPS if op != "hc_expand"])
def test_replays_are_differentiable(replayed, op):
    """Of every public function, in both directions, from the third call on; no kernel runs, so shapes and None are what there is to see."""
    import mhc_ops
    from reference.cases.mhc import MhcShape, make_inputs

    inputs = [t.requires_grad_() for t in make_inputs(op, MhcShape(1, 3, 4, D), dtype=torch.float32).values()]
    found = []
    for _ in range(4):
        out = getattr(mhc_ops, op)(*inputs)
        outputs = [o for o in ((out,) if isinstance(out, torch.Tensor) else out) if o.requires_grad]
        grads = torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs])
        found.append([(type(out), len(outputs)), *((t.shape, t.dtype, t.stride()) for t in (*outputs, *grads))])
    assert len(outputs) and found[1:] == found[:1] * 3
    assert len(replayed) == 4


@pytest.mark.parametrize("op", ["hc_pre", "hc_post", "hc_post_pre"])
def test_what_is_no_plain_tensor_is_named_after_replays_too(replayed, op):
    import mhc_ops
    from reference.cases.mhc import MhcShape, make_inputs

    inputs = list(make_inputs(op, MhcShape(1, 3, 4, D), dtype=torch.float32).values())
    for _ in range(3):
        getattr(mhc_ops, op)(*inputs)
    assert replayed
    nested = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(1, 3)])
    for wrong in ([nested, *inputs[1:]], [*inputs[:-1], nested], [None] * len(inputs), [inputs[0].numpy(), *inputs[1:]]):
        with pytest.raises((TypeError, ValueError), match=f"^{op}: "):
            getattr(mhc_ops, op)(*wrong)


def test_threads_that_record_at_once(driver, monkeypatch):
    """Each sees its own launches and allocations alone."""
    from mhc_ops.boundary.bwd import post_pre_bwd

    calls = Calls(driver, monkeypatch)
    for pre_mix in (False, True):
        boundary(5, pre_mix)
    cases = {tokens: boundary_arguments(tokens, tokens % 2 == 0)[1] for tokens in range(3, 9)}
    errors = []

    def work(tokens):
        try:
            for _ in range(6):
                found = calls.backward.find(cases[tokens][:16], cases[tokens][16:])
                out = calls.backward.call(post_pre_bwd, cases[tokens]) if found is None else found[0](found[1])
                assert out[1].shape == (tokens, N, D)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(tokens,)) for tokens in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for arguments in cases.values():
        one, _ = calls.backward.find(arguments[:16], arguments[16:])
        other = replay.record(post_pre_bwd, arguments[:-1])[1]
        assert len(one.starts) == 3 and one.made == other.made and one.offsets == other.offsets and one.results == other.results
        assert [(s.grid, s.tail, s.pick(range(99))) for s in one.starts] == [(s.grid, s.tail, s.pick(range(99))) for s in other.starts]
