"""Kernels are right, or refused."""
import pytest
import torch

import upipe
from extras import installed
from extras.kernels import PACKAGES, kernel_errors
from test_upipe import BF16, F32, cuda, main


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
        for form in ("causal", "documents"):
            errors = kernel_errors(name, u, n, d, dtype, torch.device("cuda"), form, S)
            assert all(error <= tolerance for error in errors.values()), (S, form, errors)
