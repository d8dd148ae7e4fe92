"""mhc_ops: what wrong arguments are told, and the modules."""

import copy

import pytest
import torch

import mhc_ops
from mhc_ops import HyperConnection, HyperHead, hc_head, hc_post, hc_post_pre, hc_pre
from reference.cases.mhc import OPS, MhcShape, make_inputs

SHAPE = MhcShape(2, 3, 4, 10)  # M = 24, N*D = 40
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# op, what replaces its arguments (a function of the good value, or a value), error, message
ERRORS = [
    ("hc_gates", {"mixes": lambda t: t.tolist()}, TypeError, "mixes must be a torch.Tensor, got list"),
    ("hc_gates", {"mixes": lambda t: t.bfloat16()}, TypeError, "mixes has dtype bfloat16, wanted float32, float64"),
    ("hc_gates", {"mixes": lambda t: t[..., :-1]}, ValueError, r"mixes has shape \[2, 3, 23\], wanted \[..., 24\] for hc_mult = 4"),
    ("hc_gates", {"hc_mult": 3}, ValueError, r"mixes has shape \[2, 3, 24\], wanted \[..., 15\] for hc_mult = 3"),
    ("hc_gates", {"hc_mult": 9}, ValueError, "hc_mult has N = 9 streams, wanted 2 to 8"),
    ("hc_gates", {"hc_mult": 1}, ValueError, "hc_mult has N = 1 streams, wanted 2 to 8"),
    ("hc_gates", {"hc_mult": 4.0}, TypeError, "hc_mult must be an int, got float"),
    ("hc_gates", {"scale": lambda t: t[0]}, ValueError, r"scale has shape \[\], wanted \[3\]"),
    ("hc_gates", {"scale": lambda t: t.double()}, TypeError, "scale has dtype float64, wanted float32"),
    ("hc_gates", {"base": lambda t: t[:-1]}, ValueError, r"base has shape \[23\], wanted \[24\]"),
    ("hc_gates", {"base": lambda t: t.to("meta")}, ValueError, "base is on meta but mixes is on cpu"),
    ("hc_gates", {"hc_eps": -1e-6}, ValueError, "hc_eps must be at least 0, got -1e-06"),
    ("hc_gates", {"hc_eps": float("nan")}, ValueError, "hc_eps must be finite, got nan"),
    ("hc_gates", {"base": lambda t: t.to_sparse()}, TypeError, "base must be a strided tensor, got layout sparse_coo"),
    ("sinkhorn", {"eps": -1e-6}, ValueError, "eps must be at least 0, got -1e-06"),
    ("sinkhorn", {"eps": float("inf")}, ValueError, "eps must be finite, got inf"),
    ("sinkhorn", {"eps": None}, TypeError, "eps must be a number, got NoneType"),
    ("hc_gates", {"hc_eps": "1e-6"}, TypeError, "hc_eps must be a number, got str"),
    ("hc_gates", {"hc_eps": 10**400}, ValueError, "hc_eps must be finite, got an int of 1329 bits"),
    ("hc_head", {"norm_eps": -(10**5000)}, ValueError, "norm_eps must be finite, got an int of 16610 bits"),
    ("sinkhorn", {"eps": 10**400}, ValueError, "eps must be finite, got an int of 1329 bits"),
    ("sinkhorn", {"iters": 2**63}, ValueError, "iters must be at most 9223372036854775807, got an int of 64 bits"),
    ("hc_post_pre", {"hc_eps": 10**400}, ValueError, "hc_eps must be finite, got an int of 1329 bits"),
    ("hc_pre", {"norm_eps": 2**1024}, ValueError, "norm_eps must be finite, got an int of 1025 bits"),
    ("hc_project", {"x": lambda t: t.int()}, TypeError, "x has dtype int32, wanted bfloat16, float16, float32, float64"),
    ("hc_project", {"x": lambda t: t[0, 0, 0]}, ValueError, r"x has shape \[10\], wanted \[..., N, D\]"),
    ("hc_project", {"x": lambda t: t[..., :0]}, ValueError, r"x has shape \[2, 3, 4, 0\], wanted \[..., N, D\] with D at least 1"),
    ("hc_project", {"x": lambda t: t[..., :1, :]}, ValueError, "x has N = 1 streams, wanted 2 to 8"),
    ("hc_project", {"x": lambda t: t.repeat(1, 1, 3, 1)}, ValueError, "x has N = 12 streams, wanted 2 to 8"),
    ("hc_project", {"fn": lambda t: t.bfloat16()}, TypeError, "fn has dtype bfloat16, wanted float32"),
    ("hc_project", {"fn": lambda t: t[:, :-1]}, ValueError, r"fn has shape \[24, 39\], wanted \[K, 40\]"),
    ("hc_project", {"fn": lambda t: t[:5]}, ValueError, r"fn has 5 rows, wanted 24 \(a site\) or 4 \(the head\) for N = 4"),
    ("hc_project", {"norm_eps": None}, TypeError, "norm_eps must be a number, got NoneType"),
    ("pre_bmm", {"pre": lambda t: t.bfloat16()}, TypeError, "pre has dtype bfloat16, wanted float32"),
    ("pre_bmm", {"pre": lambda t: t[..., :3]}, ValueError, r"pre has shape \[2, 3, 3\], wanted \[2, 3, 4\]"),
    ("pre_bmm", {"pre": lambda t: t[0]}, ValueError, r"pre has shape \[3, 4\], wanted \[2, 3, 4\]"),
    ("pre_bmm", {"x": lambda t: t.double()}, TypeError, "pre has dtype float32, wanted float64"),
    ("post_bmm", {"post": lambda t: t.half()}, TypeError, "post has dtype float16, wanted float32"),
    ("post_bmm", {"post": lambda t: t[..., :1]}, ValueError, "post has N = 1 streams, wanted 2 to 8"),
    ("post_bmm", {"f": lambda t: t[:, :2]}, ValueError, r"post has shape \[2, 3, 4\], wanted \[2, 2, N\]"),
    ("post_bmm", {"f": lambda t: t[..., :0]}, ValueError, r"f has shape \[2, 3, 0\], wanted \[..., D\] with D at least 1"),
    ("res_bmm", {"comb": lambda t: t.bfloat16()}, TypeError, "comb has dtype bfloat16, wanted float32"),
    ("res_bmm", {"comb": lambda t: t[..., :3]}, ValueError, r"comb has shape \[2, 3, 4, 3\], wanted \[2, 3, 4, 4\]"),
    ("res_bmm", {"comb": lambda t: t.flatten(-2)}, ValueError, r"comb has shape \[2, 3, 16\], wanted \[2, 3, 4, 4\]"),
    ("hc_pre", {"fn": lambda t: t[:4]}, ValueError, r"fn has shape \[4, 40\], wanted \[24, 40\]"),
    ("hc_pre", {"scale": lambda t: t[:1]}, ValueError, r"scale has shape \[1\], wanted \[3\]"),
    ("hc_pre", {"base": lambda t: t[None]}, ValueError, r"base has shape \[1, 24\], wanted \[24\]"),
    ("hc_pre", {"pre_mix": torch.ones(2, 3, 5)}, ValueError, r"pre_mix has shape \[2, 3, 5\], wanted \[2, 3, 4\]"),
    ("hc_pre", {"pre_mix": torch.ones(2, 3, 4, dtype=BF16)}, TypeError, "pre_mix has dtype bfloat16, wanted float32"),
    ("hc_pre", {"pre_mix": torch.ones(2, 3, 4, device="meta")}, ValueError, "pre_mix is on meta but x is on cpu"),
    ("hc_pre", {"pre_mix": 0.5}, TypeError, "pre_mix must be a torch.Tensor, got float"),
    ("hc_pre", {"return_pre": 1}, TypeError, "return_pre must be True, False or None, got int"),
    ("hc_pre", {"x": lambda t: t.double()}, TypeError, "fn has dtype float32, wanted float64"),
    ("hc_post", {"f": lambda t: t.float()}, TypeError, "f has dtype float32 but x has bfloat16; they must be equal"),
    ("hc_post", {"f": lambda t: t[..., :-1]}, ValueError, r"f has shape \[2, 3, 9\], wanted \[2, 3, 10\]"),
    ("hc_post", {"f": lambda t: t.to("meta")}, ValueError, "f is on meta but x is on cpu"),
    ("hc_post", {"post": lambda t: t.bfloat16()}, TypeError, "post has dtype bfloat16, wanted float32"),
    ("hc_post", {"comb": lambda t: t.bfloat16()}, TypeError, "comb has dtype bfloat16, wanted float32"),
    ("hc_post", {"comb": lambda t: t[:, :2]}, ValueError, r"comb has shape \[2, 2, 4, 4\], wanted \[2, 3, 4, 4\]"),
    ("hc_post_pre", {"f": lambda t: t.half()}, TypeError, "f has dtype float16 but x has bfloat16"),
    ("hc_post_pre", {"scale": lambda t: t[0]}, ValueError, r"scale has shape \[\], wanted \[3\]"),
    ("hc_post_pre", {"pre_mix": torch.ones(3, 4)}, ValueError, r"pre_mix has shape \[3, 4\], wanted \[2, 3, 4\]"),
    ("hc_head", {"fn": lambda t: t[:3]}, ValueError, r"fn has shape \[3, 40\], wanted \[4, 40\]"),
    ("hc_head", {"scale": lambda t: t[0]}, ValueError, r"scale has shape \[\], wanted \[1\]"),
    ("hc_head", {"base": lambda t: t.bfloat16()}, TypeError, "base has dtype bfloat16, wanted float32"),
    ("hc_head", {"norm_eps": -1.0}, ValueError, "norm_eps must be at least 0, got -1.0"),
    ("hc_expand", {"h": lambda t: t.long()}, TypeError, "h has dtype int64, wanted bfloat16"),
    ("hc_expand", {"h": torch.tensor(1.0)}, ValueError, r"h has shape \[\], wanted \[..., D\]"),
    ("hc_expand", {"hc_mult": 9}, ValueError, "hc_mult has N = 9 streams, wanted 2 to 8"),
    ("hc_expand", {"hc_mult": True}, TypeError, "hc_mult must be an int, got bool"),
]
for op in ("hc_gates", "hc_pre", "hc_post_pre"):
    ERRORS += [
        (op, {"iters": 0}, ValueError, "iters must be at least 1, got 0"),
        (op, {"iters": 20.0}, TypeError, "iters must be an int, got float"),
        (op, {"convention": "V4"}, ValueError, "convention must be one of 'v4', 'paper', got 'V4'"),
    ]
ERRORS += [
    (op, {"impl": "fast"}, ValueError, "impl must be one of 'auto', 'triton', 'eager', got 'fast'") for op in OPS if op != "hc_expand"
]


@pytest.mark.parametrize("op, wrong, error, message", ERRORS)
def test_errors(op, wrong, error, message):
    inputs = make_inputs(op, SHAPE)
    for name, value in wrong.items():
        inputs[name] = value(inputs[name]) if callable(value) else value
    with pytest.raises(error, match=f"{op}: {message}"):
        getattr(mhc_ops, op)(**inputs)


@pytest.mark.parametrize("op", [op for op in OPS if op != "hc_expand"])
def test_an_explicit_kernel_never_falls_back(op):
    inputs = make_inputs(op, SHAPE, dtype=FP64)
    with pytest.raises(ValueError, match=f"{op}: impl='triton' cannot run here: kernels take bf16, fp16 and fp32"):
        getattr(mhc_ops, op)(**inputs, impl="triton")


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
def test_streams_keep_their_dtype_and_coefficients_are_wide(dtype):
    wide = FP64 if dtype == FP64 else FP32
    streams, y, post, comb, pre = hc_post_pre(**make_inputs("hc_post_pre", SHAPE, dtype=dtype, with_pre_mix=True))
    assert streams.dtype == y.dtype == dtype
    assert post.dtype == comb.dtype == pre.dtype == wide


# ---- modules -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_module_parameters(n):
    m = n * n + 2 * n
    site, head = HyperConnection(10, n), HyperHead(10, n)
    shapes = [{name: tuple(p.shape) for name, p in module.named_parameters()} for module in (site, head)]
    assert shapes == [{"fn": (m, 10 * n), "base": (m,), "scale": (3,)}, {"fn": (n, 10 * n), "base": (n,), "scale": (1,)}]
    for module in (site, head):
        assert all(p.dtype == FP32 and p.dim() > 0 for p in module.parameters())
        assert 0.015 < module.fn.std() < 0.025 and not module.base.any() and (module.scale == 0.01).all()
        module.reset_parameters(std=0.5, scale=1.0)
        assert 0.3 < module.fn.std() < 0.7 and (module.scale == 1.0).all()
        twin = copy.deepcopy(module)
        twin.load_state_dict(module.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), module.parameters()))


def test_modules_are_fp32_whatever_the_default_dtype_and_can_be_made_on_meta():
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        assert HyperConnection(10).fn.dtype == FP32
    finally:
        torch.set_default_dtype(before)
    module = HyperHead(10, device="meta").to_empty(device="cpu")
    module.reset_parameters()
    assert module.fn.isfinite().all()


@pytest.mark.parametrize("impl", ["auto", "eager"])
def test_modules_are_the_functions(impl):
    """A layer of two sublayers and the head, by modules and by functions: the same values and parameter gradients."""
    options = {"iters": 5, "hc_eps": 1e-3, "norm_eps": 0.1, "convention": "paper", "impl": impl}
    first, second = (HyperConnection(SHAPE.D, **options) for _ in range(2))
    head = HyperHead(SHAPE.D, hc_eps=1e-3, norm_eps=0.1, impl=impl)
    for module in (first, second, head):
        module.reset_parameters(std=0.3, scale=1.0)
    x = make_inputs("hc_pre", SHAPE)["x"]

    def by_modules():
        streams, y, post, comb, pre = first(x, return_pre=True)
        assert streams is x
        streams, y, post, comb, _ = second(streams, (torch.tanh(y), post, comb), pre_mix=pre)
        return head(hc_post(torch.tanh(y), streams, post, comb, impl=impl))

    def by_functions():
        a, b = ((m.fn, m.scale, m.base) for m in (first, second))
        y, post, comb, pre = hc_pre(x, *a, return_pre=True, **options)
        streams, y, post, comb, _ = hc_post_pre(torch.tanh(y), x, post, comb, *b, pre_mix=pre, **options)
        streams = hc_post(torch.tanh(y), streams, post, comb, impl=impl)
        return hc_head(streams, head.fn, head.scale, head.base, hc_eps=1e-3, norm_eps=0.1, impl=impl)

    parameters = [p for module in (first, second, head) for p in module.parameters()]
    results = []
    for run in (by_modules, by_functions):
        out = run()
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)
        results.append((out, *torch.autograd.grad(out, parameters, cotangent)))
    for got, want in zip(*results):
        assert torch.equal(got, want) and want.abs().max() > 0


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: HyperConnection(10, 1), ValueError, "HyperConnection: hc_mult has N = 1 streams, wanted 2 to 8"),
        (lambda: HyperHead(10, 9), ValueError, "HyperHead: hc_mult has N = 9 streams"),
        (lambda: HyperConnection(10, 4.0), TypeError, "HyperConnection: hc_mult must be an int, got float"),
        (lambda: HyperHead(10, None), TypeError, "HyperHead: hc_mult must be an int, got NoneType"),
        (lambda: HyperHead(10, True), TypeError, "HyperHead: hc_mult must be an int, got bool"),
        (lambda: HyperConnection(0), ValueError, "HyperConnection: hidden_size must be at least 1, got 0"),
        (lambda: HyperConnection(10, iters=0), ValueError, "HyperConnection: iters must be at least 1, got 0"),
        (lambda: HyperConnection(10, convention="x"), ValueError, "HyperConnection: convention must be one of 'v4', 'paper', got 'x'"),
        (lambda: HyperConnection(10, impl="x"), ValueError, "HyperConnection: impl must be one of 'auto', 'triton', 'eager', got 'x'"),
        (lambda: HyperConnection(10)(torch.ones(1, 4, 10), (1, 2)), TypeError, r"HyperConnection: before must be \(f, post, comb\) .* got 2 values"),
        (lambda: HyperConnection(10)(torch.ones(1, 4, 10), torch.ones(3)), TypeError, "HyperConnection: before must be .* got Tensor"),
        (lambda: HyperHead(10, hc_eps=10**400), ValueError, "HyperHead: hc_eps must be finite, got an int of 1329 bits"),
        (lambda: HyperHead(10, norm_eps=-1.0), ValueError, "HyperHead: norm_eps must be at least 0, got -1.0"),
    ],
)
def test_module_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", ["res_bmm", "post_bmm", "pre_mix"])
def test_one_tensor_in_two_places(name, compiled):
    """The gradient of a tensor given twice is the sum of both; torch.compile refuses an autograd.Function with a repeated input."""
    args = make_inputs("hc_post_pre", MhcShape(2, 3, 4, 4), dtype=FP32)
    comb, post = args["comb"], args["post"]
    fn, start = {
        "res_bmm": (mhc_ops.res_bmm, comb),
        "post_bmm": (mhc_ops.post_bmm, post),
        "pre_mix": (lambda a, b: hc_post_pre(**(args | {"post": a}), pre_mix=b)[1], post),
    }[name]
    run = torch.compile(fn, fullgraph=True, backend="aot_eager") if compiled else fn
    one, a, b = (start.detach().clone().requires_grad_() for _ in range(3))
    got, want = run(one, one), fn(a, b)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    cotangent = torch.randn(got.shape, generator=torch.Generator().manual_seed(5))
    got.backward(cotangent)
    want.backward(cotangent)
    torch.testing.assert_close(one.grad, a.grad + b.grad)
