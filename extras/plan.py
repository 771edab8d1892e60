"""What a step costs, by arithmetic: the plan that a run prints, its progress, its MFU."""
import shlex
import sys
from contextlib import contextmanager
from unittest.mock import patch

import torch
from tqdm import tqdm

from extras import GIB
from extras.hf import trained_positions
from upipe import GPT, stages

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16


def parameters(settings):
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(settings.config).parameters())


def host_has_room(settings):
    """Whether x and attention's output of every block can wait on the host, beside what
    --offload-params puts there: weights, gradients and moments."""
    s, c = settings, settings.config
    width = c.n_layers * (c.dim + c.n_heads * c.head_dim)
    kept = width * getattr(torch, s.dtype).itemsize * s.ctx / s.cp
    held = 16 * parameters(s) / s.world if s.offload_params else 0
    return (kept + held) * s.machine.ranks < 0.9 * s.machine.host


def forward_flops(settings):
    """(attention, rest) of one sequence's forward pass; 2 FLOPs per multiply-add."""
    c, d, ctx = settings.config, settings.config.head_dim, settings.ctx
    attention = c.n_layers * 2 * ctx**2 * c.n_heads * d  # Q K^T and P V, S x S, half masked
    block = 2 * c.dim * (c.n_heads + c.n_kv_heads) * d + 3 * c.dim * c.ffn_dim
    return attention, 2 * ctx * (c.n_layers * block + c.vocab_size * c.dim)


def backward_passes(settings):
    """(attention, rest): the backward pass in units of forward passes, recomputation
    included."""
    again = settings.recipe.checkpoint > 0
    attention = 2.5 + (again and not settings.recipe.keep_attention)  # flash: 5 products, not 2
    return attention, 2 + again


def step_flops(settings):
    """FLOPs of one sequence's forward and backward pass, recomputation included."""
    both = zip(forward_flops(settings), backward_passes(settings))
    return sum(flops * (1 + n) for flops, n in both)


def peak_flops(device, dtype):
    """(name of the card, its dense bfloat16 FLOP/s), or (name, None) where that is unknown."""
    if device.type != "cuda":
        return "this CPU", None
    card = torch.cuda.get_device_name(device)
    known = (f for name, f in PEAK_FLOPS.items() if name in card and dtype == "bfloat16")
    return card, next(known, None)


def use_of_gpu(job, settings, record):
    """For the line of a training step: MFU, which is what it needs without recomputation against
    the card's peak, and the peak of memory, which goes into its record too."""
    flops = 3 * sum(forward_flops(settings)) * settings.grad_accum * job.dp / job.world
    _, peak = peak_flops(job.device, settings.dtype)
    mfu = f" | MFU {flops / record['seconds'] / peak:.1%}" if peak else ""
    record["peak_bytes"] = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return f"{mfu} | peak {record['peak_bytes'] / GIB:.1f} GiB"


def step_passes(settings):
    """A training step in forward passes, where attention is the most of it."""
    return settings.grad_accum * (1 + backward_passes(settings)[0])


def print_plan(settings, job):
    c, recipe, sequences = settings.config, settings.recipe, settings.grad_accum * job.dp
    attention, rest = (3 * sequences * flops for flops in forward_flops(settings))
    P = job.cp // job.ring
    U = recipe.stage_heads(c, P)
    n = sum(len(queries) for _, queries in stages(c.n_heads, c.n_kv_heads, P, U))
    ring = f", a ring of {job.ring} x {P}" if job.ring > 1 else ""
    on = [name for name in ("keep_attention", "offload", "stream") if getattr(recipe, name)]
    size = tqdm.format_sizeof
    job.say(f"model     {settings.model}: {size(parameters(settings))} parameters, {c.n_layers} "
            f"layers of width {c.dim}, {c.n_heads} heads and {c.n_kv_heads} kv heads of "
            f"{c.head_dim}, {settings.dtype}\n"
            f"context   {settings.ctx:,} tokens over {job.cp} of {job.world} {job.device.type} "
            f"ranks{ring}\n"
            f"recipe    {recipe.attention}, stages per layer: {n}, heads per stage: {U}, "
            f"kernel {recipe.kernel}, tile {recipe.tile or 'off'}, "
            f"checkpoint {recipe.checkpoint}{', '.join(['', *on])}\n"
            f"work      {sequences} x {settings.ctx:,} tokens, {size(attention + rest)} FLOPs: "
            f"{size(attention)} in attention, {size(rest)} in the rest (recomputation apart)")
    positions = trained_positions(settings)
    if positions and settings.ctx > positions and not settings.rope_theta:
        job.say(f"notice    --ctx {settings.length} is beyond the {positions:,} positions of "
                f"{settings.model} as published: --rope-theta {c.rope_theta:,.0f} was made for "
                "those, a longer context wants a larger one")
    gpus = torch.cuda.device_count() if job.device.type == "cuda" else 1
    if gpus > job.world == 1:
        job.say(f"notice    one process uses one of the {gpus} GPUs of this machine; all of them:  "
                f"torchrun --nproc-per-node={gpus} {shlex.join(sys.argv)}")


@contextmanager
def progress_bar(job, model, title, passes, settings):
    """Progress within `passes` forward passes, by block, shown from 10 s on."""
    events, look = [], "{desc} {percentage:3.0f}% |{bar}| {elapsed} < {remaining}{postfix}"
    with tqdm(total=passes * settings.config.n_layers, desc=title, delay=10, leave=False,
              miniters=1, disable=job.rank != 0, bar_format=look) as bar:
        def tick(layer, way):
            if job.device.type == "cuda":  # the CPU runs ahead: let the GPU finish the block before
                events.append(torch.cuda.current_stream().record_event())
                if len(events) > 1:
                    events.pop(0).synchronize()
            bar.set_postfix_str(f"{way}, block {layer}", refresh=False)
            bar.update(2.5 if way == "backward" else 1)
        with patch.object(model, "progress", model.progress if job.rank else tick):
            yield
