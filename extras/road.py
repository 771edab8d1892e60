"""Measured and drawn: the road from plain to UPipe, one rank of many, traces, loss by position."""
import gc
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from tqdm import tqdm

import upipe
from extras import GIB, draw, write_json
from extras.kernels import synchronize
from extras.memory import Report, metered_step, plan_memory, prepare, report_of, verdict
from extras.plan import backward_passes, forward_flops, peak_flops
from upipe import IGNORE

ROAD = (("plain", dict(attention="plain", cp=1, fsdp=False)),
        ("+ FSDP", dict(fsdp=True)),
        ("+ Ulysses", dict(attention="ulysses", cp=None)),
        ("+ checkpointing", dict(checkpoint=1)),
        ("+ offload", dict(offload=True)),
        ("+ tiling", dict(tile=None, stream=None)),
        ("+ UPipe", dict(attention="upipe", heads_per_stage=None)),
        ("+ keep_attention", dict(keep_attention=True)))


def road(settings, job=None):
    """--road: rows of (name, Report, fits, tokens/s), simulated on settings.world ranks or, with
    `job`, measured."""
    rows = []
    for name, here, whole in rows_of_road(settings):
        if job:
            row = here.meet(job.device, whole)
            seen, times = measure(here, row)
            rows.append((name, seen, True, seen and row.dp * here.ctx / times["seconds"]))
        else:
            report = plan_memory(replace(here, world=1) if whole else here, here.full)
            rows.append((name, report, verdict(here, report)[0] <= 1, None))
    return rows


def rows_of_road(settings):
    """(name, its Settings, whether each rank has the whole model) for each row."""
    own = {**vars(settings.recipe), "cp": settings.cp // settings.ring}
    state = dict(heads_per_stage=0, checkpoint=0, keep_attention=False, offload=False, stream=False,
                 tile=0, ring=1)
    ring = ("+ ring", dict(ring=settings.ring, cp=settings.cp))  # on so many times as many ranks
    for name, changes in (*ROAD, ring) if settings.ring > 1 else ROAD:
        state.update({key: own[key] if value is None else value for key, value in changes.items()})
        yield name, settings.at(**{key: state[key] for key in state if key != "fsdp"}), (
            not state["fsdp"])


def measure(settings, job):
    """A step for real: (Report, times); (None, None) if the GPU is too small for it.

    On a CPU the peak is the meter's, on CUDA the allocator's. times: the stopwatch's and, on CUDA,
    "reserved_bytes", what the allocator held for that peak."""
    cuda = job.device.type == "cuda"
    # One step to warm up, one that counts. A long one warms up with its attention inside documents:
    # all that is slow in a first step is in it, but not the minutes.
    short = torch.arange(0, settings.ctx, 2**14) if settings.ctx >= 2**19 else None
    gc.collect()  # FSDP's models have cycles: the last row's
    try:
        model, optimizer, step = prepare(settings, job)
        for docs in (short, None):
            model.zero_grad()
            synchronize(job.device)
            dist.barrier()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            with stopwatch(job.device) as times:
                step(docs)
                synchronize(job.device)
                dist.barrier()
        if cuda:
            times["reserved_bytes"] = torch.cuda.max_memory_reserved()
            peak = torch.cuda.max_memory_allocated()
            return Report(peak, model.store.slab_bytes, "measured", {}, []), times
        del model, optimizer, step
        return report_of(metered_step(settings, job)), times
    except torch.OutOfMemoryError:
        synchronize(job.device)  # a copy may be under way to memory that is free by now
        return None, None


@contextmanager
def stopwatch(device):
    """Yields a dict that in the end has the "seconds" that it took, and those that the device spent
    in attention and waiting for copies."""
    times, attention, waiting, begin = {}, [], [], time.perf_counter()
    with (timed(upipe, "flash_forward", attention, device),
          timed(upipe, "flash_backward", attention, device),
          timed(upipe, "arrived", waiting, device),
          timed(upipe.HostStore, "wait_for_copies", waiting, device)):
        yield times
        times["seconds"] = time.perf_counter() - begin
    for name, spans in ("attention_seconds", attention), ("waiting_seconds", waiting):
        times[name] = sum(a.elapsed_time(b) / 1000 if device.type == "cuda" else b - a
                          for a, b in spans)


def timed(owner, name, spans, device):
    """Let each call of owner.name add its (begin, end) to spans."""
    function = getattr(owner, name)

    def mark():
        if device.type != "cuda":
            return time.perf_counter()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def timing(*args, **kwargs):
        begin = mark()
        out = function(*args, **kwargs)
        spans.append((begin, mark()))
        return out
    return patch.object(owner, name, timing)


def travel(rows, settings):
    """Show the road: as a table, and as --json and --plot say."""
    first = next((speed for *_, speed in rows if speed), None)
    print(f"{'':18}{'GiB a GPU':>12}{'GiB of host':>13}    {'speed' if first else 'fits'}")
    for name, report, fits, speed in rows:
        if report is None:
            print(f"{name:18}{'out of memory':>25}")
            continue
        last = f"{speed / first:.2f} x" if first else "yes" if fits else "no"
        print(f"{name:18}{report.device / GIB:12,.3f}{report.host / GIB:13,.3f}    {last}")
    write_json(settings.json, [dict(name=name, fits=fits, tokens_per_second=speed,
                                    **(vars(report) if report else {}))
                               for name, report, fits, speed in rows])
    if settings.plot:
        draw.plot_road(settings.plot, rows, settings)


# One rank of many: on a single GPU, all that one rank of a larger job does. The other ranks are not
# there (the "fake" process group again), but everything else is: shapes, kernels, copies, memory.


def stand_in():
    """Let collectives bring this rank's own data, as if all ranks had the same: finite numbers, at
    the cost of a copy. FSDP calls them by other names from PyTorch 2.13 on."""
    def send(output, input, **_):  # as much as there is room for, as often as there is room for it
        own = input.reshape(-1)[:output.numel()]
        output.view(-1, len(own)).copy_(own.expand(output.numel() // len(own), -1))

    def gather(output_tensor, input_tensor, **_):
        send(output_tensor, input_tensor)
    ours = dict(all_gather_into_tensor=gather, all_gather_single=gather, all_to_all_single=send,
                reduce_scatter_tensor=send, reduce_scatter_single=send)
    return patch.multiple(dist, **{name: ours[name] for name in ours if hasattr(dist, name)})


def one_rank(settings, job):
    """--one-rank-of: one step of rank 0, measured, beside what the dry run says of it."""
    job.say(f"notice    this is rank 0 of {job.world}, alone: where others would send data it "
            "takes its own, so the loss means nothing")
    with stand_in():
        seen, times = measure(settings, job)
    if seen is None:
        raise torch.OutOfMemoryError
    dist.destroy_process_group()
    plan = plan_memory(settings)
    attention, rest = (flops / job.cp for flops in forward_flops(settings))
    seconds, inside = times["seconds"], times["attention_seconds"]
    card, peak = peak_flops(job.device, settings.dtype)
    rate = 3 * (attention + rest) / seconds
    inner = attention * (1 + backward_passes(settings)[0]) / inside
    mfu, speed = rate / peak if peak else None, settings.ctx / seconds
    held = f", {times['reserved_bytes'] / GIB:.3f} reserved" if "reserved_bytes" in times else ""
    print(f"measured  {seconds:.2f} s a step, {speed:,.0f} tokens/s"
          + (f", MFU {mfu:.1%} of {card}" if peak else "") +
          f"\nattention {inside:.2f} s of it, {tqdm.format_sizeof(inner)}FLOP/s; waiting for "
          f"copies {times['waiting_seconds']:.2f} s\n"
          f"memory    {seen.device / GIB:.3f} GiB measured, {plan.device / GIB:.3f} simulated "
          f"({seen.device / plan.device - 1:+.1%}){held}\n"
          f"host      {seen.host / GIB:.3f} GiB measured, {plan.host / GIB:.3f} simulated")
    write_json(settings.json, dict(
        times, tokens_per_second=speed, device_bytes=seen.device, host_bytes=seen.host,
        simulated_device_bytes=plan.device, simulated_host_bytes=plan.host, mfu=mfu,
        kernel=settings.recipe.kernel, flops_per_second=rate, attention_flops_per_second=inner))


@contextmanager
def profiled(job, folder):
    """Traces of what happens inside: DIR/rank0.json.gz and, on CUDA, DIR/rank0.pickle."""
    Path(folder).mkdir(parents=True, exist_ok=True)  # other machines may have a folder of their own
    cuda = job.device.type == "cuda"
    if cuda:
        torch.cuda.memory._record_memory_history(stacks="python")
    with torch.profiler.profile() as trace:
        yield
    trace.export_chrome_trace(f"{folder}/rank{job.rank}.json.gz")
    if cuda:
        torch.cuda.memory._dump_snapshot(f"{folder}/rank{job.rank}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
    job.say(f"profile   {folder}/rank*.json.gz: open one in https://ui.perfetto.dev")


@torch.no_grad()
def show_by_position(job, model, batch, settings, buckets=64):
    """--loss-by-position: the mean loss in equal parts of the context, over this rank's windows
    `batch` and those of all others, as a picture and a line -> (ends, losses)."""
    ctx, path = settings.ctx, settings.loss_by_position
    sums = torch.zeros(2, buckets, dtype=torch.float64, device=job.device)
    for inputs, labels, *docs in batch:
        inputs, labels = inputs.to(job.device), labels.to(job.device)
        losses = model.token_losses(inputs, labels, settings.recipe, *docs).double()
        at = job.places(ctx).to(job.device)
        bucket = (at * buckets // ctx).clamp(max=buckets - 1)
        sums[0].index_add_(0, bucket, losses)
        sums[1].index_add_(0, bucket, (labels != IGNORE).double())
    dist.all_reduce(sums)
    ends, losses = [ctx * (i + 1) / buckets for i in range(buckets)], (sums[0] / sums[1]).tolist()
    title = f"{settings.model} on {settings.data or 'the Python standard library'}"
    job.on_rank_0(lambda: draw.plot_by_position(path, ends, losses, title))
    job.say(f"position  {path}: loss {losses[0]:.3f} up to token {ends[0]:,.0f}, {losses[-1]:.3f} "
            f"after {ends[-2]:,.0f}")
    return ends, losses
