"""What a step needs, without doing it: --dry-run, --max-ctx, and the check before each run.

The same model, recipe, sharding, optimizer and step, with tensors that have shapes but no memory
(FakeTensorMode) and ranks that are not there (the "fake" process group). A meter sees every tensor
come and go. There is no second model of the memory: change upipe.py, and the numbers change."""
import math
import re
import sys
import time
import timeit
import traceback
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, Work
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import upipe
from extras import GIB, write_json
from extras.plan import parameters, step_flops

RESERVED = 3 * GIB  # of a card: CUDA's context, NCCL's buffers, what fragmentation wastes
HOST_SHARE = 0.95   # of a host: the rest is for the system, for Python and for the page cache
UTILISATION = 0.5   # of the peak FLOP/s, for the estimated time
BETWEEN_STEPS = ("parameters", "gradients", "optimizer")  # kinds that stay from step to step

# What a tensor is, by the innermost of these functions of upipe.py that was at work. A test fails
# when a step makes a tensor of unknown kind.
KINDS = dict(
    stage_buffer="stage buffers", attention_forward="attention output",
    attention_backward="dk and dv",
    lean_forward="residual stream", fetch="residual stream", backward="residual gradient",
    rotary="rotary tables", token_losses="logits tile",
    logits="logits tile", zero_sums="weight gradients", rounded="weight gradients",
    flash_forward="kernel outputs", flash_backward="kernel outputs", slab="parked",
    ring_forward="sums over the ring", ring_backward="sums over the ring",
    **dict.fromkeys(("rows", "load", "collect", "output_gradient", "heads", "add_rest",
                     "rest_backward", "tile_backward", "project_backward",
                     "ulysses_attention", "forward", "rms_norm"), "activations"))


class Meter(TorchDispatchMode):
    """Bytes of live storages by kind, and what was there at the peak of each part of a step.

    Slabs of the model's HostStore are host bytes and, with offload_params, so is what FSDP and
    AdamW hold between steps; all else is on the device. It works on real tensors as on fake
    ones."""

    def __init__(self, model, offload_params=False):
        super().__init__()
        self.model, model.progress = model, self.progress
        self.on_host = {"parked", *(BETWEEN_STEPS if offload_params else ())}
        self.live = {}                 # storage -> (bytes, kind)
        self.kinds = Counter()         # kind -> bytes
        self.peaks = {}                # part of the step -> (device bytes, kinds, where exactly)
        self.timeline = []             # (device bytes, kinds), from time to time
        self.host, self.part, self.last = 0, "forward", len(model.layers) - 1

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def resize_(storage, size):  # how FSDP frees memory that is still referred to
            resize(storage, size)
            self.count(storage)
            return storage
        self.resizing = patch.object(torch.UntypedStorage, "resize_", resize_)
        self.resizing.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.resizing.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its local tensors will come by
        together = op.namespace == "c10d" and "send" not in op.name() and "recv" not in op.name()
        run = partial(waited, op) if together else op
        out = run(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.count(x.untyped_storage(), dims=x.dim())
        return out

    def count(self, storage, kind=None, dims=1):
        """Count a storage as large as it is by now, and as of another kind if one is given."""
        if storage._cdata not in self.live:
            weakref.finalize(storage, self.gone, storage._cdata)
            self.live[storage._cdata] = 0, kind or kind_of(dims)
        old, was = self.live[storage._cdata]
        size, kind = storage.nbytes(), kind or was
        self.live[storage._cdata] = size, kind
        self.kinds[was] -= old
        self.kinds[kind] += size
        if size > old:
            self.note()

    def gone(self, key):
        size, kind = self.live.pop(key)
        self.kinds[kind] -= size

    def name(self, tensors, kind):
        """Say what tensors are that existed before the meter, or that FSDP made."""
        for x in tensors:
            self.count((x.to_local() if isinstance(x, DTensor) else x).untyped_storage(), kind)

    def progress(self, layer, way):  # the model's hook
        if way == "backward":
            self.name((p.grad for p in self.model.parameters() if p.grad is not None), "gradients")
            self.part = {0: "the end", 1: "the first block"}.get(layer, "a block in between")
        elif way == "forward" and layer == self.last:
            self.part = "head and last block"

    def device_bytes(self, kinds):
        return sum(size for kind, size in kinds.items() if kind not in self.on_host)

    def note(self):
        """Keep what there is now, if it is a peak or differs from what was kept last."""
        now = self.device_bytes(self.kinds)
        self.host = max(self.host, self.kinds["parked"])
        if now > self.peaks.get(self.part, (0,))[0]:
            where = f"{self.part}: {', '.join(at_work()) or 'in autograd'}"
            self.peaks[self.part] = now, self.kinds.copy(), where
        if not self.timeline or abs(now - self.timeline[-1][0]) > now / 50:
            self.timeline.append((now, self.kinds.copy()))


def waited(collective, *args):
    """Run a collective until nobody but the caller holds its tensors. Gloo's thread lets go after
    it has said that it is done: on a busy machine, they would count beside what comes next."""
    def holders():
        return [(x._use_count(), torch._C._storage_Use_Count(x.untyped_storage()._cdata))
                for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    before, out = holders(), collective(*args)
    *tensors, work = out if isinstance(out, (tuple, list)) else [out]
    Work.unbox(work).wait()
    del out, work  # it holds them, too: the caller gets another one, that is done
    while holders() != before:
        time.sleep(1e-5)
    return (*tensors, FakeWork().boxed()) if tensors else FakeWork().boxed()


def kind_of(dims):
    """The kind of a new tensor of so many dimensions: by the innermost function that tells it."""
    innermost = None
    for frame, _ in traceback.walk_stack(sys._getframe()):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path == upipe.__file__ or name == "workspace":
            if name == "whole_and_rows":  # x or attention's output, on their way back
                return "attention output" if dims == 3 else "residual stream"
            if name in KINDS or name == "workspace":
                return KINDS.get(name, "kernel workspace")
            innermost = innermost or name
        elif "/fsdp/" in path:
            caller = frame.f_back.f_code.co_name if name == "allocate" else name
            return "gradient reduction" if "reduce" in caller else "gathered weights"
        elif "/optim/" in path:
            return "optimizer"
    return f"unknown: {innermost}" if innermost else "gradients in autograd"


def at_work():
    """Names of the functions of upipe.py that are at work, outermost first."""
    codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())]
    names = [getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
             for code in reversed(codes) if code.co_filename == upipe.__file__]
    return [name for name in names if "<" not in name]


def simulated_kernel():
    """FlashAttention-2 on CUDA, as far as memory goes: its outputs and its workspace."""
    def forward(q, k, v, mask):
        return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

    def workspace(q, k):
        """dq adds up in float32; rowsum(do o) is a float32 for each query; with grouped heads, dk
        and dv of every query head (bfloat16) before they are summed."""
        S, u, d = q.shape
        size = 4 * S * u * (d + 1) + (2 * 2 * len(k) * u * d if k.shape[1] < u else 0)
        return q.new_empty(size, dtype=torch.uint8)

    def backward(do, q, k, v, o, lse, mask):
        held = workspace(q, k)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        del held
        return grads
    return upipe.Kernel(forward, backward, limit=math.inf)


def abridged():
    """Let upipe walk two tiles of each row of tiles, two stages of each load of keys and values,
    and two loads: the others take the place of the second and leave nothing behind."""
    spans, schedule = upipe.tile_spans, upipe.schedule
    return patch.multiple(
        upipe, tile_spans=lambda n, tile: spans(n, tile)[:2],
        schedule=lambda p: [(kv, queries[:2]) for kv, queries in schedule(p)[:2]])


def prepare(settings, job):
    """(model, optimizer, step): step(docs) is a forward and backward pass over random tokens."""
    model, optimizer = settings.assemble(job)
    recipe = replace(settings.recipe, **job.groups)
    tokens = torch.randint(settings.config.vocab_size, (len(job.places(settings.ctx)),),
                           device=job.device)
    return model, optimizer, lambda docs=None: model(
        tokens, tokens, recipe, settings.ctx, docs).backward()


def metered_step(settings, job):
    """Watch one step of a new model -> Meter. On fake tensors or real ones, it is the same.

    The update itself is left out: fused AdamW works in place, in memory that is there by then."""
    model, optimizer, step = prepare(settings, job)
    with Meter(model, settings.offload_params) as meter:
        meter.name(model.parameters(), "parameters")
        moments = [x for state in optimizer.state.values() for x in state.values()]
        meter.name((x for x in moments if torch.is_tensor(x)), "optimizer")
        meter.timeline.clear()
        for _ in range(min(2, settings.grad_accum)):
            step()
    return meter


def pretend(world, cp=1, ring=1):
    """Act as rank 0 of `world`: collectives do nothing. Of a ring, as the first rank of the last
    member, whose kernels are given the most queries."""
    dist.init_process_group("fake", rank=cp - cp // ring, world_size=world, store=FakeStore())


def simulate(settings, pages=abridged):
    """metered_step of one rank of settings.world, without memory and without the others."""
    kernel = upipe.KERNELS["cpu"] if settings.device == "cpu" else simulated_kernel()
    kernel = kernel._replace(limit=math.inf)  # the verdict names it
    ring = 1 if settings.one_rank_of else settings.ring  # --one-rank-of measures rank 0
    pretend(settings.world, settings.cp, ring)
    try:
        job = settings.meet(torch.device("cpu"))
        settings = replace(settings, recipe=replace(settings.recipe, kernel="simulated"))
        with (patch.dict(upipe.KERNELS, simulated=kernel), pages(),
              FakeTensorMode(allow_non_fake_inputs=True)):
            return metered_step(settings, job)
    finally:
        dist.destroy_process_group()


@dataclass
class Report:
    """What a step needs on one rank, in bytes."""
    device: int     # at the peak
    host: int       # parked, and with --offload-params weights, gradients and AdamW's moments
    where: str      # the peak: part of the step, and place in upipe.py
    kinds: dict     # what there was then: kind -> bytes
    timeline: list  # [(bytes, kinds), ...] over the step


def report_of(meter):
    """The Report of one metered step, as it is."""
    device, kinds, where = max(meter.peaks.values(), key=lambda peak: peak[0])
    return Report(device, meter.host, where, kinds, meter.timeline)


def plan_memory(settings, full=False):
    """The Report of one rank of settings.world.

    Every block costs the same, so two short models tell what all L layers need: one of a segment
    and the remainder, one of a segment more. Each part of the step is extended on its own, since
    the part that peaks at L need not be the one that peaks in a short model."""
    config = settings.config
    L, k = config.n_layers, max(1, settings.recipe.checkpoint)
    few = max(2, L % k + k)
    more = 0 if full else max(0, (L - few) // k - 1)  # segments that the longer model lacks

    def of_layers(n):
        return simulate(replace(settings, config=replace(config, n_layers=n)))
    longer = of_layers(L - more * k)
    short = of_layers(few) if more else longer

    def extend(part):
        """Bytes by kind of all L layers. In the shorter model, no block may be in between; one
        grows as the first does."""
        grows = "the first block" if part == "a block in between" else part
        kinds, a, b = longer.peaks[part][1], short.peaks[grows][1], longer.peaks[grows][1]
        return {kind: kinds[kind] + more * (b[kind] - a[kind]) for kind in {**kinds, **a, **b}}
    plans = {part: extend(part) for part in longer.peaks}
    part = max(plans, key=lambda part: longer.device_bytes(plans[part]))
    kinds = plans[part]
    device, host = longer.device_bytes(kinds), longer.host + more * (longer.host - short.host)
    kinds.pop("parked", None)
    if settings.offload_params:  # FSDP brings a unit's part at a time, and takes its gradients back
        host += sum(kinds.pop(kind, 0) for kind in BETWEEN_STEPS)
        ends = config.vocab_size * config.dim
        blocks = parameters(settings) - ends * (1 if config.tie_embeddings else 2)
        kinds["weights in transit"] = 2 * (4 * max(ends, blocks // L) // settings.world)
        device += kinds["weights in transit"]
    return Report(device, host, longer.peaks[part][2], kinds, longer.timeline)


def usable(settings):
    """Bytes of a card, or on a CPU of a rank's part of the host, that a step may fill."""
    card = settings.machine.card
    return max(0, card - RESERVED) if settings.device == "cuda" else card * HOST_SHARE


def verdict(settings, report):
    """(share, text): the largest share that a job takes of the card, of the host or of what a
    kernel can index; up to 1 fits."""
    machine, most = settings.machine, usable(settings)
    name = "GPU   " if settings.device == "cuda" else "memory"
    P = settings.cp // settings.ring
    u = settings.recipe.stage_heads(settings.config, P) // P
    tokens = upipe.tokens_on_rank(settings.ctx, settings.cp, settings.ring) * P
    call = tokens * u * settings.config.head_dim / (2**31 - 1)  # q is [S/R, u, d]
    node, room = report.host * machine.ranks, HOST_SHARE * machine.host
    card, host = (f"{size / GIB:,.2f}".rstrip("0").rstrip(".")  # 80, 3.5
                  for size in (machine.card, machine.host))
    lines = ((report.device / max(most, 1),
              f"{name}    {gib(report.device)} GiB at the peak, {gib(most)} usable of {card}"),
             (node / room, f"host      {gib(report.host)} GiB a rank, {gib(node)} a node of "
                           f"{machine.ranks}, {gib(room)} usable of {host}"),
             (call, f"kernel    {call:.2f} x 2^31 elements in a call, at most 1"))
    return max(lines)[0], "\n".join(
        text + (": fits" if share <= 1 else ": does not fit") for share, text in lines)


def gib(size):
    return f"{size / GIB:,.1f}"


def too_much(settings):
    """Why this job should not start, or None: it is too slow for a CPU or too large."""
    if settings.force or settings.road:
        return None
    return settings.device == "cpu" and too_slow(settings) or too_large(settings)


def too_slow(settings):
    """Why this should not start on a CPU, or None, by the time of a matrix product."""
    a, said = torch.randn(1024, 1024), tqdm.format_interval
    rate = settings.world * 2 * 1024**3 / min(timeit.repeat(lambda: a @ a, number=1, repeat=5))

    def seconds(here):
        return here.grad_accum * here.world // here.cp * step_flops(here) / rate
    now = seconds(settings)
    if now > 10:
        print(f"notice    on this CPU ({tqdm.format_sizeof(rate)}FLOP/s) a step takes {said(now)} "
              f"or more, {settings.steps} steps {said(settings.steps * now)}", flush=True)
    if now <= 600:
        return None
    shorter = (settings.at(ctx=2**n) for n in range(settings.ctx.bit_length() - 1, 7, -1))
    hope = next((f"--ctx {here.length} ({said(seconds(here))} a step)" for here in shorter
                 if seconds(here) <= 10), "--model tiny")
    return (f"a step at --ctx {settings.length} takes {said(now)} or more on this CPU: run {hope}, "
            "take GPUs or --force")


def too_large(settings):
    """Why this job cannot fit, and what would, or None: the dry run, before every run.

    A job that is small beyond doubt is spared the seconds: one that would need less than a quarter
    of the memory if every block kept a hundred tensors [s, D] in float32 and nothing were
    sharded."""
    config = settings.config
    s, states = settings.ctx / settings.cp, 16 * parameters(settings)
    most = 4 * s * (100 * config.n_layers * config.dim + 10 * config.vocab_size) + states
    if most < settings.machine.card / 4:
        return None
    share, text = verdict(settings, plan_memory(settings))
    if share <= 1:
        return None
    problem = re.sub(r" +", " ", next(line for line in text.split("\n") if "not fit" in line))
    longest, _ = longest_context(settings)
    hope = f"--ctx {longest.length} would" if longest else "more ranks or --layers 1 may"
    return (f"{settings.model} at --ctx {settings.length}: {problem}; {hope}; --dry-run says where "
            "it goes, --force tries all the same")


def switches(settings):
    return {name: value for name, value in vars(settings.recipe).items()
            if "group" not in name and (name != "ring" or value > 1)}


def out_of_memory(settings):
    """The line for a GPU that is full: the recipe, and the next switch to turn."""
    recipe = settings.recipe
    turns = (("--checkpoint 1", not recipe.checkpoint), ("--offload", not recipe.offload),
             ("--attention upipe", recipe.attention != "upipe"), ("--stream", not recipe.stream),
             ("--heads-per-stage 0", recipe.heads_per_stage),
             ("--tile 2048", not recipe.tile or recipe.tile > 2048))
    turn = next((flag for flag, helps in turns if helps), "more GPUs, or a shorter --ctx")
    on = ", ".join(f"{name} {value}" for name, value in switches(settings).items())
    return f"out of GPU memory at --ctx {settings.length} with {on}: try {turn}"


def longest_context(settings):
    """The longest context that fits, to 64k: (Settings, Report); (None, None) if not even 64k.

    What of the recipe was not asked for is fitted to each length. Memory grows almost linearly, so
    a line through the last two simulations tells where to look next. It ends with one that fits
    and, 64k longer, one that does not."""
    unit, best, before, less = 64 * 1024, (None, None), 0, 0
    low, high, n = 0, math.inf, 16  # low fits, high does not
    while high - low > 1:
        here = settings.at(ctx=n * unit)
        report = plan_memory(here)
        share, _ = verdict(here, report)
        if share <= 1:
            low, best = n, (here, report)
        else:
            high = n
        slope = max((share - less) / (n - before), 1e-9)
        before, less = n, share
        n = int(max(low + 1, min(n + (1 - share) / slope, high - 1, 8 * n)))
    return best


def dry_run(settings):
    """--dry-run: print where the memory goes and whether it fits -> the exit code."""
    if settings.max_ctx:
        settings, report = longest_context(settings)
        if report is None:
            print("longest   not even --ctx 64k fits: larger cards, more ranks or --offload-params")
            return 1
        print(f"longest   {settings.ctx:,} tokens (--ctx {settings.length}) fit, 64k more do not")
    else:
        report = plan_memory(settings, settings.full)
    (share, text), recipe = verdict(settings, report), switches(settings)
    print("recipe    " + ", ".join(f"{name} {value}" for name, value in recipe.items())
          + f"\n{text}\npeak      {report.where}")
    for kind, size in sorted(report.kinds.items(), key=lambda item: -item[1]):
        if size > report.device / 1000:
            print(f"          {size / GIB:8.2f} GiB  {kind}")
    flops = step_flops(settings) * settings.grad_accum / settings.cp
    print(f"time      {tqdm.format_interval(flops / (UTILISATION * 989e12))} a step, if each rank "
          f"computes its {tqdm.format_sizeof(flops)} FLOPs (recomputation included) at "
          f"{UTILISATION:.0%} of an H100's 989 TFLOP/s")
    write_json(settings.json, dict(
        ctx=settings.ctx, world=settings.world, recipe=recipe, fits=share <= 1, verdict=text,
        device_bytes=report.device, host_bytes=report.host, where=report.where,
        bytes_by_kind=report.kinds))
    return int(share > 1)
