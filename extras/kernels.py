"""More attention kernels, and the choice between all of them.

On import they join upipe.KERNELS: the packages flash-attn and FlashAttention 3 and 4, cuDNN's, and
"efficient", which takes float32 on CUDA. Which kernel is fastest depends on the card, the head size
and what is installed, and a wrong one trains on in silence. So candidates are tried on a small
input, against the formula in float64."""
import math
import time
from functools import partial

import torch
import torch.nn.attention as attention
import torch.nn.functional as F

import upipe
from extras import installed
from upipe import Kernel, aten, aten_kernel, refuse

PACKAGES = {"fa4": "flash_attn.cute", "fa3": "flash_attn_interface", "flash-attn": "flash_attn"}


def selected(impl, function, *args):
    """torch's own flash kernel (None), or FlashAttention 3 or 4 ("FA3", "FA4"), which torch lets
    take its place behind the same two operators."""
    active = attention.current_flash_attention_impl()
    if impl and active != impl:
        attention.activate_flash_attention_impl(impl)
    elif active and not impl:
        attention.restore_flash_attention_impl()
    return function(*args)


def torch_kernel(impl):
    return Kernel(partial(selected, impl, upipe.torch_forward),
                  partial(selected, impl, upipe.torch_backward))


def flash_attn(way, q, k, mask, *tensors, **more):
    """A pass of the package flash-attn, for which even one document has edges."""
    import flash_attn.flash_attn_interface as fa
    one = torch.tensor([[0, len(q)], [0, len(k)]], dtype=torch.int32, device=q.device)
    edges = one if mask.edges is None else (mask.edges, mask.edges)
    return getattr(fa, f"_flash_attn_varlen_{way}")(
        *tensors, *edges, len(q), len(k), dropout_p=0.0, softmax_scale=q.shape[-1] ** -0.5,
        causal=mask.causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
        alibi_slopes=None, **more)


def flash_attn_forward(q, k, v, mask):
    return flash_attn("forward", q, k, mask, q, k, v, return_softmax=False)[:2]


def flash_attn_backward(do, q, k, v, o, lse, mask):
    grads = [torch.empty_like(x) for x in (q, k, v)]
    flash_attn("backward", q, k, mask, do, q, k, v, o, lse, *grads, deterministic=False)
    return grads


def no_seed(q):  # of dropout, and its offset
    return torch.zeros(2, dtype=torch.int64, device=q.device).unbind()


def cudnn_forward(q, k, v, causal):
    """cuDNN takes grouped heads as they are: one of the u/n repetitions that aten_kernel makes. Its
    lse is [n, u/n, S] or, in some versions, [n, u/n, S, 1]."""
    o, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k[:, :1], v[:, :1], None, True, 0.0, causal)
    return o, lse.view(q.shape[:3])


def cudnn_backward(do, q, k, v, o, lse, causal):
    return aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k[:, :1], v[:, :1], o, lse[..., None].contiguous(), *no_seed(q), None, None, None,
        q.shape[2], k.shape[2], 0.0, causal)


def efficient_forward(q, k, v, causal):
    o, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return o, lse[..., :q.shape[2]]  # its end is padded


def efficient_backward(do, q, k, v, o, lse, causal):
    padded = F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
    return aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, None, o, padded, *no_seed(q), 0.0, [True, True, True, False], causal)[:3]


upipe.KERNELS.update({"torch": torch_kernel(None),  # it puts itself back in place, too
                      "flash-attn": Kernel(flash_attn_forward, flash_attn_backward),
                      "fa3": torch_kernel("FA3"), "fa4": torch_kernel("FA4"),
                      "cudnn": aten_kernel(cudnn_forward, cudnn_backward),
                      "efficient": aten_kernel(efficient_forward, efficient_backward)})


def kernel_errors(name, u, n, d, dtype, device, form="causal", S=200):
    """Relative errors of what kernel `name` makes of u query and n kv heads, by name.

    form: "causal"; "documents", of which there are two; "ring": every query sees half of the keys.
    """
    draw = torch.Generator().manual_seed(0)
    keys = S // 2 if form == "ring" else S
    q, k, v, do = (torch.randn(length, heads, d, generator=draw).to(device, dtype)
                   for length, heads in ((S, u), (keys, n), (keys, n), (S, u)))
    edges = torch.tensor([0, S // 3, S], dtype=torch.int32, device=device)
    mask = upipe.Mask(edges if form == "documents" else None, form != "ring")
    o, lse = upipe.flash_forward(q, k, v, name, mask)
    grads = upipe.flash_backward(do, q, k, v, o, lse, name, mask)
    seen = torch.ones(S, keys, dtype=torch.bool).tril(0 if mask.causal else S)
    if form == "documents":
        seen[S // 3:, :S // 3] = False
    inputs = [x.double().cpu().requires_grad_() for x in (q, k, v)]
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        right = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in inputs),
                                               attn_mask=seen, enable_gqa=True).transpose(0, 1)
    rights = right, *torch.autograd.grad(right, inputs, do.double().cpu())
    return {what: ((x.double().cpu() - y).norm() / y.norm()).item()
            for what, x, y in zip(("output", "dq", "dk", "dv"), (o, *grads), rights)}


def kernel_error(name, u, n, d, dtype, *where):
    """Why a kernel cannot be used, or None; of the same arguments."""
    try:
        errors = kernel_errors(name, u, n, d, dtype, *where)
    except Exception as error:  # whatever a kernel throws at what it cannot do
        return str(error).split("\n")[0]
    # Rounding of inputs and outputs, and of products within the kernel: bfloat16's in bfloat16, and
    # on tensor cores float32's in three of 11 bits.
    limit = (64 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps
    for what, error in errors.items():
        if not error <= limit:
            return f"its {what} is wrong by {error:.1e}, allowed is {limit:.1e}"


def choose_kernel(settings, job):
    """The kernel to use: --kernel, or of those that are installed and right, the fastest here.

    Rank 0 decides. Raises BadInput if the kernel asked for cannot be used."""
    config, recipe = settings.config, settings.recipe
    # cuDNN prepares itself for each length anew, and there is one that it does not take: 1.
    own = ["torch"] if settings.sample or settings.docs is not None else ["cudnn", "torch"]
    names = [recipe.kernel]
    if recipe.kernel == "auto":
        here = [name for name, package in PACKAGES.items() if installed(package)] + own
        on_gpu = here if settings.dtype == "bfloat16" else ["efficient"]
        names = ["cpu"] if job.device.type == "cpu" else on_gpu
    P = job.cp // job.ring
    queries, kvs = upipe.stages(config.n_heads, config.n_kv_heads, P,
                                recipe.stage_heads(config, P))[0][::-1]
    sizes = (queries[0].stop, kvs.stop, config.head_dim, getattr(torch, settings.dtype),
             job.device)
    forms = ["causal"] + ["documents"] * (settings.docs is not None) + ["ring"] * (job.ring > 1)

    def choose():
        right = []
        for name in names:
            error = next(filter(None, (kernel_error(name, *sizes, form) for form in forms)), None)
            if not error:
                right.append(name)
            elif name in PACKAGES and len(names) > 1:
                job.say(f"notice    kernel {name} is not used: {error}")
        refuse(not right, f"kernel {names[-1]} cannot be used here: {error}")
        return min(right, key=lambda name: kernel_seconds(name, *sizes)) if right[1:] else right[0]
    return job.gather(job.on_rank_0(choose))[0]


def kernel_seconds(name, u, n, d, dtype, device, S=8192):
    """Seconds that kernel `name` takes forward and backward over S tokens."""
    q, k, v = (torch.randn(S, heads, d, device=device, dtype=dtype) for heads in (u, n, n))
    for _ in range(2 if S > 2**17 else 4):  # the last one counts
        synchronize(device)
        begin = time.perf_counter()
        o, lse = upipe.flash_forward(q, k, v, name)
        upipe.flash_backward(o, q, k, v, o, lse, name)
        synchronize(device)
        seconds = time.perf_counter() - begin
    return seconds


def synchronize(device):
    """Wait for all that the device was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()
