"""Kernels are right, or refused."""
import pytest
import torch

import upipe
from extras import installed
from extras.kernels import PACKAGES
from test_upipe import BF16, F32, assert_close, cuda, main, ref_attention


@pytest.mark.parametrize("what", ["output", "dq", "dk", "dv"])
def test_a_kernel_that_is_wrong_by_a_thousandth_is_refused_by_name(what, monkeypatch):
    """Whatever part of its results it is; before anything is trained."""
    cpu, spoilt = upipe.KERNELS["cpu"], lambda name, x: x * 1.001 if name == what else x

    def forward(*args):
        o, lse = cpu.forward(*args)
        return spoilt("output", o), lse

    def backward(*args):
        return [spoilt(name, x) for name, x in zip(("dq", "dk", "dv"), cpu.backward(*args))]
    monkeypatch.setitem(upipe.KERNELS, "wrong", upipe.Kernel(forward, backward))
    said = main(1, "--kernel", "wrong")
    assert f"kernel wrong cannot be used here: its {what} is wrong by 1.0e-03" in said


@cuda
@pytest.mark.parametrize("name", ["torch", "cudnn", "efficient", *PACKAGES])
def test_cuda_kernels_are_naive_attention_and_its_gradient(name):
    """bfloat16 against float64, to 2%: probabilities, their gradients and the results are rounded,
    5 u = 1% in a row, and a sum of S of them may cancel to a half. One document and two."""
    if name in PACKAGES and not installed(PACKAGES[name]):
        pytest.skip(f"{name} is not installed")
    dtype, tolerance = (F32, 1e-3) if name == "efficient" else (BF16, 0.02)
    for S, u, n, d in ((300, 4, 2, 64), (1000, 1, 1, 128), (257, 6, 1, 128)):
        for ends in ([0, S], [0, S // 3, S]):
            edges = None if len(ends) == 2 else torch.tensor(ends, dtype=torch.int32, device="cuda")
            q, k, v, do = (torch.randn(S, h, d, device="cuda", dtype=dtype) for h in (u, n, n, u))
            o, lse = upipe.flash_forward(q, k, v, name, upipe.Mask(edges))
            grads = upipe.flash_backward(do, q, k, v, o, lse, name, upipe.Mask(edges))
            q, k, v = (x.cpu().double().requires_grad_() for x in (q, k, v))
            expected = torch.cat([ref_attention(q[a:b], k[a:b], v[a:b])[0]
                                  for a, b in zip(ends, ends[1:])])
            expected.backward(do.cpu().double())
            expected = expected.detach(), q.grad, k.grad, v.grad
            for what, ours, ref in zip(("o", "dq", "dk", "dv"), (o, *grads), expected):
                assert_close(what, ours.cpu(), ref, tolerance)
