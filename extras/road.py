"""Measured and drawn: the road from plain to UPipe, one rank of many, traces, loss by position."""
import gc
import json
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import upipe
from extras import GIB
from extras.kernels import synchronize
from extras.memory import (
    BETWEEN_STEPS, KINDS, Report, metered_step, plan_memory, report_of, usable, verdict)
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
            fits, _ = verdict(here, report)
            rows.append((name, report, fits, None))
    return rows


def rows_of_road(settings):
    """(name, its Settings, whether each rank has the whole model) for each row."""
    own = {**vars(settings.recipe), "cp": settings.cp}
    state = dict(heads_per_stage=0, checkpoint=0, keep_attention=False, offload=False, stream=False,
                 tile=0)
    for name, changes in ROAD:
        state.update({key: own[key] if value is None else value for key, value in changes.items()})
        yield name, settings.at(**{key: state[key] for key in state if key != "fsdp"}), (
            not state["fsdp"])


def measure(settings, job):
    """A step for real: (Report, times); (None, None) if the GPU is too small for it.

    On a CPU the peak is the meter's, on CUDA the allocator's. times: "seconds" of the step, those
    in each of PARTS and, on CUDA, "reserved_bytes", what the allocator held for that peak."""
    device, ctx = job.device, settings.ctx
    cuda = device.type == "cuda"
    # One step to warm up, one that counts. A long one warms up with its attention inside documents:
    # all that is slow in a first step is in it, but not the minutes.
    short = torch.arange(0, ctx, 2**14) if ctx >= 2**19 else None
    gc.collect()  # FSDP's models have cycles: the last row's
    try:
        model, optimizer = settings.assemble(job)
        recipe = replace(settings.recipe, group=job.group)
        tokens = torch.randint(settings.config.vocab_size, (-(-ctx // job.cp),), device=device)
        for docs in (short, None):
            model.zero_grad()
            synchronize(device)
            dist.barrier()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            with stopwatch(device) as times:
                begin = time.perf_counter()
                model(tokens, tokens, recipe, ctx, docs).backward()
                synchronize(device)
                dist.barrier()
                times["seconds"] = time.perf_counter() - begin
        if cuda:
            times["reserved_bytes"] = torch.cuda.max_memory_reserved()
            peak = torch.cuda.max_memory_allocated()
            return Report(peak, model.store.slab_bytes, "measured", {}, []), times
        del model, optimizer
        return report_of(metered_step(settings, job)), times
    except torch.OutOfMemoryError:
        synchronize(device)  # a copy may be under way to memory that is free by now
        return None, None


PARTS = {"attention_seconds": ((upipe, "flash_forward"), (upipe, "flash_backward")),
         "waiting_seconds": ((upipe, "arrived"), (upipe.HostStore, "wait_for_copies"))}


@contextmanager
def stopwatch(device):
    """Yields a dict that in the end has the seconds that the device spent in each of PARTS."""
    def now():
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(function, spans):
        def timing(*args, **kwargs):
            begin = now()
            out = function(*args, **kwargs)
            spans.append((begin, now()))
            return out
        return timing
    silent = [(owner, name, getattr(owner, name)) for places in PARTS.values()
              for owner, name in places]
    times, spans = {}, {part: [] for part in PARTS}
    for part, places in PARTS.items():
        for owner, name in places:
            setattr(owner, name, timed(getattr(owner, name), spans[part]))
    try:
        yield times
    finally:
        for place in silent:
            setattr(*place)
    for part in PARTS:
        times[part] = sum(a.elapsed_time(b) / 1000 if device.type == "cuda" else b - a
                          for a, b in spans[part])


def travel(rows, settings):
    """Show the road: as a table, and as --json and --plot say."""
    print(f"{'':18}{'GiB a GPU':>12}{'GiB of host':>13}    ", end="")
    first = next((speed for *_, speed in rows if speed), None)
    print("speed" if first else "fits")
    for name, report, fits, speed in rows:
        if report is None:
            print(f"{name:18}{'out of memory':>25}")
            continue
        last = f"{speed / first:.2f} x" if first else "yes" if fits else "no"
        print(f"{name:18}{report.device / GIB:12,.3f}{report.host / GIB:13,.3f}    {last}")
    if settings.json:
        Path(settings.json).write_text(json.dumps([dict(
            name=name, fits=fits, tokens_per_second=speed, **(vars(report) if report else {}))
            for name, report, fits, speed in rows], indent=1))
    if settings.plot:
        plot_road(settings.plot, rows, settings)


def plot_road(path, rows, settings):
    """Bars of the road with the card's capacity, and the memory of the last row over one step."""
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot
    names, reports, fit = zip(*((name, report, fits) for name, report, fits, _ in rows if report))
    last = reports[-1]
    on_host = {"parked", *(BETWEEN_STEPS if settings.offload_params else ())}
    history = [{kind: size / GIB for kind, size in kinds.items() if kind not in on_host}
               for _, kinds in last.timeline]  # a measured peak on CUDA has none
    pyplot.rc("font", size=13)
    figure, axes = pyplot.subplots(1, 2 if history else 1, figsize=(17, 6.5), squeeze=False,
                                   layout="constrained")
    left, most = axes[0, 0], usable(settings) / GIB
    sizes = [report.device / GIB for report in reports]
    bars = left.barh(names, sizes, log=True, color=[
        "tab:green" if fits else "tab:orange" if size <= most else "tab:red"
        for size, fits in zip(sizes, fit)])
    left.barh(names[:1], 0, color="tab:orange", label="too much for the host or a kernel call")
    left.axvline(most, color="black", linestyle="--", label=f"{most:.0f} GiB usable on a card")
    digits = [3 if size < 1 else 1 if size < 100 else 0 for size in sizes]
    labels = [f"{size:,.{n}f}" for size, n in zip(sizes, digits)]
    for text in left.bar_label(bars, labels, padding=5):
        text.set_backgroundcolor("white")  # it may lie on the line
    left.set(xlabel="GiB per GPU at the peak", xlim=(min(sizes) / 8, max(sizes) * 10),
             title=f"{settings.model}, {settings.length} tokens, {settings.world} ranks")
    left.invert_yaxis()
    left.legend(loc="upper center", bbox_to_anchor=(0.45, -0.1), ncols=2, frameon=False)
    if history:
        plot_step(axes[0, 1], history, pyplot.get_cmap("tab20").colors)
        few = " of a model of fewer layers" if settings.dry_run and not settings.full else ""
        axes[0, 1].set_title(f"{names[-1]}, over one step{few}")
    figure.savefig(path, dpi=100)


def plot_step(axes, history, colors):
    """Memory over a step, stacked: below what stays between steps, above it the rest by size.

    In a long one, most blocks are like their neighbours: of their passes, white gaps are left."""
    head = next(i for i, kinds in enumerate(history) if kinds.get("logits tile"))
    if len(history) > 300:
        gap = [{}] * 4
        history = history[:50] + gap + history[head - 30:head + 70] + gap + history[-80:]
        head = 84
    most = {kind: max(kinds.get(kind, 0) for kinds in history) for kind in set().union(*history)}
    order = sorted(most, key=lambda kind: (kind not in BETWEEN_STEPS, -most[kind]))
    layers = {kind: [kinds.get(kind, 0) for kinds in history] for kind in order[:13]}
    layers["other"] = [sum(kinds.get(kind, 0) for kind in order[13:]) for kinds in history]
    named = dict.fromkeys((*BETWEEN_STEPS, *KINDS.values(), *sorted(most)))  # a kind, a color
    palette = dict(zip(named, (*colors[:14:2], *colors[16::2], *colors[1:14:2], *colors[17::2])))
    axes.stackplot(range(len(history)), layers.values(), labels=layers, step="post",
                   colors=[palette.get(kind, "lightgray") for kind in layers])
    axes.axvline(head, color="black", linewidth=1)
    axes.set(ylabel="GiB per GPU", xlim=(0, len(history) - 1),
             xticks=[head / 2, (head + len(history)) / 2],
             xticklabels=["forward", "loss and backward"])
    axes.tick_params(axis="x", length=0)
    axes.legend(*(x[::-1] for x in axes.get_legend_handles_labels()), loc="center left",
                bbox_to_anchor=(1, 0.5), frameon=False)


# One rank of many: on a single GPU, all that one rank of a larger job does. The other ranks are not
# there (the "fake" process group again), but everything else is: shapes, kernels, copies, memory.


@contextmanager
def stand_in():
    """Let collectives bring this rank's own data, as if all ranks had the same: finite numbers, at
    the cost of a copy. FSDP calls them by other names from PyTorch 2.13 on."""
    def gather(output_tensor, input_tensor, **_):
        whole = output_tensor.view(-1, input_tensor.numel())
        whole.copy_(input_tensor.reshape(1, -1).expand(len(whole), -1))

    def reduce_scatter(output, input, **_):
        output.copy_(input.view(-1)[:output.numel()].view_as(output))

    def exchange(output, input, **_):
        output.copy_(input)
    ours = dict(all_gather_into_tensor=gather, all_gather_single=gather,
                reduce_scatter_tensor=reduce_scatter, reduce_scatter_single=reduce_scatter,
                all_to_all_single=exchange)
    theirs = {name: getattr(dist, name) for name in ours if hasattr(dist, name)}
    try:
        for name in theirs:
            setattr(dist, name, ours[name])
        yield
    finally:
        for name, collective in theirs.items():
            setattr(dist, name, collective)


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
    held = f", {times['reserved_bytes'] / GIB:.3f} reserved" if "reserved_bytes" in times else ""
    print(f"measured  {seconds:.2f} s a step, {settings.ctx / seconds:,.0f} tokens/s"
          + (f", MFU {rate / peak:.1%} of {card}" if peak else "") +
          f"\nattention {inside:.2f} s of it, {tqdm.format_sizeof(inner)}FLOP/s; waiting for "
          f"copies {times['waiting_seconds']:.2f} s\n"
          f"memory    {seen.device / GIB:.3f} GiB measured, {plan.device / GIB:.3f} simulated "
          f"({seen.device / plan.device - 1:+.1%}){held}\n"
          f"host      {seen.host / GIB:.3f} GiB measured, {plan.host / GIB:.3f} simulated")
    if settings.json:
        Path(settings.json).write_text(json.dumps(dict(
            times, tokens_per_second=settings.ctx / seconds, device_bytes=seen.device,
            simulated_device_bytes=plan.device, host_bytes=seen.host,
            kernel=settings.recipe.kernel, simulated_host_bytes=plan.host,
            mfu=rate / peak if peak else None, flops_per_second=rate,
            attention_flops_per_second=inner)))


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
def loss_by_position(job, model, batch, settings, buckets=64):
    """Mean loss in equal parts of the context, over this rank's windows `batch` and those of all
    others -> (ends, losses)."""
    ctx = settings.ctx
    sums = torch.zeros(2, buckets, dtype=torch.float64, device=job.device)
    for inputs, labels, *docs in batch:
        inputs, labels = inputs.to(job.device), labels.to(job.device)
        losses = model.token_losses(inputs, labels, settings.recipe, *docs).double()
        at = torch.arange(len(inputs), device=job.device) + job.cp_rank * len(inputs)
        bucket = (at * buckets // ctx).clamp(max=buckets - 1)
        sums[0].index_add_(0, bucket, losses)
        sums[1].index_add_(0, bucket, (labels != IGNORE).double())
    dist.all_reduce(sums)
    return [ctx * (i + 1) / buckets for i in range(buckets)], (sums[0] / sums[1]).tolist()


def show_by_position(job, model, batch, settings):
    """--loss-by-position: draw it, and say it in a line."""
    ends, losses = loss_by_position(job, model, batch, settings)
    title = f"{settings.model} on {settings.data or 'the Python standard library'}"
    path = settings.loss_by_position
    job.on_rank_0(lambda: plot_by_position(path, ends, losses, title))
    job.say(f"position  {path}: loss {losses[0]:.3f} up to token {ends[0]:,.0f}, {losses[-1]:.3f} "
            f"after {ends[-2]:,.0f}")


def plot_by_position(path, ends, losses, title):
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(ends, losses, drawstyle="steps-pre")
    axes.set(xlabel="position in the context", ylabel="nats per token", title=title)
    figure.savefig(path, dpi=120)
