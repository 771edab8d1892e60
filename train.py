"""Train a GPT whose context is split over ranks. The techniques are in upipe.py; this is the job.

    python train.py                                   one process: no launcher, no port
    torchrun --nproc-per-node=2 train.py              two CPU cores: `tiny` on Python's own sources
    torchrun --nproc-per-node=4 train.py --cp 2       two sequences at a time, each on two ranks
    torchrun --nproc-per-node=8 train.py --ctx 5m     eight GPUs: llama3-8b on 5 x 2^20 tokens

1. Flags   2. Ranks and groups   3. Stopping together   4. Data   5. Sharding   6. The plan
7. A step   8. Main

Two kinds of parallelism share the ranks. --cp of them (C in upipe.py) split one sequence; world/cp
such groups work on a sequence each. Weights, gradients and optimizer state are sharded over *all*
ranks by FSDP. The loss of a rank is its part of one sum over all labels of a step, so gradients
are added up, never averaged, and no loss is ever multiplied by anything.
"""
import os

# Tensors this long fragment fixed segments. PyTorch reads the variable once, so before its import.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import math
import re
import shlex
import sys
import sysconfig
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard,
    register_fsdp_forward_method)
from tqdm import tqdm

from upipe import GPT, IGNORE, PRESETS, Recipe, stages

SWITCHES = [f.name for f in fields(Recipe) if f.name != "group"]  # each is a flag

# 1. Flags -----------------------------------------------------------------------------------------


class BadInput(Exception):
    """What a user can get wrong: one line on stderr and exit code 2, on any number of ranks."""


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse's own would print its usage on every rank
        raise BadInput(message)


def parse_ctx(text):
    """'8k' -> 8192, '5m' -> 5242880, '4096' -> 4096."""
    match = re.fullmatch(r"([0-9]+)([km]?)", text.lower())
    tokens = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2]] if match else 0
    if tokens < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no length: give tokens as 4096, 128k or 5m")
    return tokens


def number(kind, low, above=False):
    """An argparse type: a finite int or float of at least `low`, or above it."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < low or (above and value == low):
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"{text!r} must be {what} {'above' if above else 'of at least'} {low}")
        return value
    return parse


def parse_args(argv=None):
    """The flags; defaults that depend on model, device or another flag are filled in at the end."""
    parser = Parser(prog="train.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    # what to train
    add("--model", choices=PRESETS, help="default: tiny on a CPU, llama3-8b on GPUs")
    add("--layers", type=number(int, 1), help="number of blocks, for trials (default: all)")
    add("--ctx", type=parse_ctx, help="tokens per sequence (default: 512 for tiny, else 128k)")
    add("--data", help="text file or folder, read as bytes; .bin (uint16, or uint32 where the "
        "vocabulary needs it); .npy (default: sources of Python's standard library)")
    # how a sequence is split and what memory holds: the fields of upipe.Recipe
    add("--cp", type=number(int, 1), help="ranks that share one sequence (default: all)")
    add("--attention", choices=("plain", "ulysses", "upipe"), default="upipe")
    add("--heads-per-stage", type=number(int, 0), default=0, help="over all ranks; 0 = fewest")
    add("--checkpoint", type=number(int, 0), default=1, help="blocks per segment; 0 = off")
    add("--keep-attention", action=switch, help="run it once only (default: with --checkpoint 1)")
    add("--offload", action=switch, help="checkpoints wait in host memory (default: on GPUs)")
    add("--stream", action=switch, help="and come back tile by tile (default: with --offload)")
    add("--tile", type=number(int, 0), help="tokens; 0 = off (default: CPU 128, GPU 4096)")
    add("--kernel", default="auto", help="attention kernel (default: the best one here)")
    # optimizer
    add("--steps", type=number(int, 0), help="default: 600 for tiny, else 100")
    add("--lr", type=number(float, 0), help="peak rate (default: 2e-3 for tiny, else 3e-4)")
    add("--warmup", type=number(int, 0), help="steps (default: a twentieth of --steps)")
    add("--min-lr", type=number(float, 0), help="end of the cosine (default: a tenth of --lr)")
    add("--weight-decay", type=number(float, 0), default=0.1, help="of matrices (default: 0.1)")
    add("--grad-clip", type=number(float, 0), default=1.0, help="global norm; 0 = off (default: 1)")
    add("--grad-accum", type=number(int, 1), default=1, help="sequences per step and group")
    add("--seed", type=number(int, 0), default=0, help="of weights and data order (default: 0)")
    # the run
    add("--eval-every", type=number(int, 0), help="steps; 0: at the end (default: 200, large: 0)")
    add("--eval-windows", type=number(int, 1), help="sequences (default: 32k tokens' worth)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="default: bfloat16 on GPUs")
    add("--timeout", type=number(float, 0, above=True), default=1800,
        help="seconds to wait for another rank before giving up (default: 1800)")
    add("--force", action=switch, default=False, help="run what looks too slow or too large")
    args = parser.parse_args(argv)

    cuda = torch.cuda.is_available() if args.device is None else args.device == "cuda"
    tiny = (args.model or ("llama3-8b" if cuda else "tiny")) == "tiny"

    def default(name, value):
        if getattr(args, name) is None:
            setattr(args, name, value)
    default("device", "cuda" if cuda else "cpu")
    default("dtype", "bfloat16" if cuda else "float32")
    default("model", "tiny" if tiny else "llama3-8b")
    default("ctx", 512 if tiny else 128 * 1024)
    default("keep_attention", args.checkpoint == 1)
    default("offload", cuda and args.checkpoint >= 1)
    default("stream", args.offload)
    default("tile", 4096 if cuda else 128)
    default("steps", 600 if tiny else 100)
    default("lr", 2e-3 if tiny else 3e-4)
    default("warmup", args.steps // 20)
    default("min_lr", args.lr / 10)
    default("eval_every", 200 if tiny else 0)
    default("eval_windows", max(1, 2**15 // args.ctx))
    return args


# 2. Ranks and groups ------------------------------------------------------------------------------


@dataclass
class Job:
    """Where this process stands. One mesh [dp, cp] gives the groups; FSDP shards over all ranks."""
    rank: int
    world: int
    device: torch.device
    dp: int                   # groups, each on its own sequence
    dp_rank: int
    cp: int                   # ranks that share a sequence
    cp_rank: int
    group: dist.ProcessGroup  # those ranks
    everyone: DeviceMesh

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)


def launched():
    """(rank, world, rank on this machine, ranks on this machine) as torchrun says, or alone."""
    names = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
    return tuple(int(os.environ.get(name, default)) for name, default in names.items())


def join(args):
    """Meet the other ranks. What can be refused without them has been refused before."""
    rank, world, local_rank, local_world = launched()
    cuda = args.device == "cuda"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    elif local_world > 1:  # threads of several ranks on one core slow all of them down
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
    timeout = timedelta(seconds=min(args.timeout, 1e8))
    alone = dict(store=dist.HashStore(), rank=0, world_size=1) if world == 1 else {}
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout,
                            device_id=device if cuda else None, **alone)
    mesh = init_device_mesh(device.type, (world // args.cp, args.cp), mesh_dim_names=("dp", "cp"))
    for group in mesh.get_all_groups():
        group.set_timeout(timeout)  # a new group does not inherit it
    dp_rank, cp_rank = mesh.get_coordinate()
    return Job(rank, world, device, world // args.cp, dp_rank, args.cp, cp_rank,
               mesh["cp"].get_group(), init_device_mesh(device.type, (world,)))


# 3. Stopping together -----------------------------------------------------------------------------
# A rank that stops alone leaves the others in a collective until the time-out. So what one rank
# alone can see (its file, its tokens, its loss) travels with a sum that is needed anyway, of label
# counts or of losses. All ranks stop at the same place, with the words of the first that had cause.


def agree(job, fault, value=0.0):
    """The sum of `value` over all ranks; if any has a fault (a text), BadInput on every rank."""
    total = torch.tensor([fault is not None, value], dtype=torch.float64, device=job.device)
    dist.all_reduce(total)
    faults, value = total.tolist()
    if faults:
        texts = [None] * job.world
        dist.all_gather_object(texts, fault)
        raise BadInput(next(text for text in texts if text is not None))
    return value


def together(job, work):
    """Run work() -> (result, number) on every rank: this rank's result, and the sum of numbers."""
    result, number, fault = None, 0, None
    try:
        result, number = work()
    except BadInput as error:
        fault = str(error)
    return result, agree(job, fault, number)


# 4. Data ------------------------------------------------------------------------------------------
# A data set is a list of files, seen as one row of token ids. A rank maps only the pages that its
# own slice of a window needs. There is no loader with a state: which window comes when is computed
# from the step, so that a run that was cut in two draws the windows of one that was not.


class Tokens:
    """Memory-mapped files, one behind the other, as one row of token ids."""

    def __init__(self, parts, vocab):
        self.parts, self.vocab = [part for part in parts if len(part)], vocab
        self.begins = np.cumsum([0] + [len(part) for part in self.parts]).tolist()

    def __len__(self):
        return self.begins[-1]

    def read(self, start, stop):
        """ids [start, stop) as int64. Reads nothing else from the disk."""
        ids = np.empty(stop - start, np.int64)
        for part, begin in zip(self.parts, self.begins):
            a, b = max(start - begin, 0), min(stop - begin, len(part))
            if a < b:
                found = part[a:b]
                legal = (found >= 0) & (found < self.vocab)
                if not legal.all():
                    raise BadInput(f"{part.filename}: token id {found[legal.argmin()]} is not in "
                                   f"the vocabulary of {self.vocab} (another integer width?)")
                ids[begin + a - start:begin + b - start] = found
        return ids


def open_file(path, vocab):
    """One file as an array of token ids, mapped, not read."""
    dtype = np.dtype(np.uint8)
    if path.suffix == ".bin":
        dtype = np.dtype("<u2" if vocab <= 2**16 else "<u4")
    try:
        if path.suffix == ".npy":
            ids = np.load(path, mmap_mode="r")
        else:
            ids = np.memmap(path, dtype, "r")
    except (OSError, ValueError) as error:  # not readable, not .npy, not a whole number of ids
        raise BadInput(f"{path}, as {dtype if path.suffix != '.npy' else 'numpy file'}: {error}")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BadInput(f"{path}: {ids.dtype} of shape {ids.shape} is not one row of integers")
    head = ids[:4096] if path.suffix == ".bin" else ()
    if dtype.itemsize == 2 and len(head) > 1 and head.any() and not head[1::2].any():
        raise BadInput(f"{path}: every second id is 0, as if uint32 were read as uint16: save "
                       f"uint16 for a vocabulary of {vocab}, or a .npy file")
    return ids


def find_files(data):
    """The files that --data names, in an order that depends on their names alone."""
    root, pattern, skip = Path(data or ""), "*", ()
    if data is None:
        root, pattern = Path(sysconfig.get_path("stdlib")), "*.py"
        skip = ("site-packages", "dist-packages", "test", "tests", "idle_test")
    if root.is_file():
        return [root]
    if data == "" or not root.is_dir():
        raise BadInput(f"--data {data!r} is no file or folder")
    return sorted(
        path for path in root.rglob(pattern)
        if path.is_file() and path.stat().st_size
        and not any(p in skip or p[0] == "." for p in path.relative_to(root).parts))


def open_data(data, vocab, ctx):
    """(train, valid): of every ten files the tenth is held out; of fewer, a tenth of each."""
    try:
        parts = [open_file(path, vocab) for path in find_files(data)]
    except OSError as error:
        raise BadInput(f"--data {data}: {error}")
    name = data or "Python's standard library"
    if len({part.dtype for part in parts}) > 1:
        raise BadInput(f"--data {name}: text and tokens, or several integer types, in one folder")
    if len(parts) >= 10:
        train, valid = [part for i, part in enumerate(parts) if i % 10 != 9], parts[9::10]
    else:
        train = [part[:len(part) * 9 // 10] for part in parts]
        valid = [part[len(part) * 9 // 10:] for part in parts]
    train, valid = Tokens(train, vocab), Tokens(valid, vocab)
    if len(train) < ctx + 1 or len(valid) < 2:
        raise BadInput(f"--data {name}: --ctx {write_ctx(ctx)} needs {ctx + 1} tokens to train on "
                       f"and 2 to validate with, here are {len(train)} and {len(valid)}")
    return train, valid


def read_slice(tokens, start, ctx, cp, cp_rank):
    """This rank's slice of the window at `start`: inputs and labels, int64 [s], s = ceil(ctx/cp).

    Label i is token i + 1 of the whole row: shifted before the split, a slice's last label is the
    next slice's first input. Beyond the window (a ctx that cp does not divide) and beyond the data
    (a short validation set) labels are ignored; causal attention never looks there. The same as
    upipe.shard() of the whole window, without reading the whole window."""
    s = -(-ctx // cp)
    end = min(start + ctx, len(tokens) - 1)  # the last token can only be a label
    a, b = (min(start + rank * s, end) for rank in (cp_rank, cp_rank + 1))
    inputs, labels = torch.zeros(s, dtype=torch.int64), torch.full((s,), IGNORE)
    if a < b:
        ids = torch.from_numpy(tokens.read(a, b + 1))
        inputs[:b - a], labels[:b - a] = ids[:-1], ids[1:]
    return inputs, labels


def load(job, tokens, starts, ctx):
    """This rank's slices of windows, and the number of labels in all windows of all ranks."""
    def work():
        batch = [read_slice(tokens, start, ctx, job.cp, job.cp_rank) for start in starts]
        return batch, sum(int((labels != IGNORE).sum()) for _, labels in batch)
    return together(job, work)


@lru_cache(maxsize=2)
def epoch_starts(length, ctx, seed, epoch):
    """Where an epoch's windows start: without overlap, in random order, aligned anew each time."""
    rng, n = np.random.default_rng([seed, epoch]), (length - 1) // ctx
    return rng.integers(length - n * ctx) + ctx * rng.permutation(n)


def train_starts(job, tokens, ctx, seed, step, grad_accum):
    """A step's windows for this rank's group: the groups take turns along the epochs' windows."""
    n = (len(tokens) - 1) // ctx
    turns = [(step * grad_accum + micro) * job.dp + job.dp_rank for micro in range(grad_accum)]
    return [int(epoch_starts(len(tokens), ctx, seed, i // n)[i % n]) for i in turns]


def eval_starts(tokens, ctx, windows):
    """Up to `windows` windows, spread evenly; one, padded, where the data is shorter."""
    n = max(1, min(windows, (len(tokens) - 1) // ctx))
    return [i * ((len(tokens) - 1) // n) for i in range(n)]


def bigram_loss(train, valid, starts, ctx):
    """What counting pairs of bytes reaches on the windows the model is evaluated on, in nats."""
    ids = train.read(0, min(len(train), 2**26))
    pairs = np.bincount(ids[:-1] * 256 + ids[1:], minlength=2**16).reshape(256, 256)
    nats = -np.log((pairs + 1) / (pairs + 1).sum(1, keepdims=True))  # + 1: no pair is impossible
    windows = [valid.read(start, min(start + ctx + 1, len(valid))) for start in starts]
    return float(np.concatenate([nats[ids[:-1], ids[1:]] for ids in windows]).mean())


# 5. Sharding --------------------------------------------------------------------------------------


def shard_model(model, mesh, dtype, offload_params=False):
    """FSDP: a rank keeps 1/world of each weight, its gradient and its optimizer state, in float32.

    A unit is gathered, in `dtype`, when its forward or backward pass needs it, and freed after. The
    units: every block, the embedding, the head, and the root, which owns the final norm. A tied
    head is the embedding's own matrix, in one unit."""
    low = dtype not in (torch.float32, torch.float64)
    precision = MixedPrecisionPolicy(
        param_dtype=dtype if low else None, reduce_dtype=torch.float32 if low else None,
        cast_forward_inputs=False)  # a block takes more than tensors, and tokens are no floats
    offload = CPUOffloadPolicy() if offload_params else OffloadPolicy()
    heads = [] if model.config.tie_embeddings else [model.lm_head]
    for unit in [*model.layers, model.embed_tokens, *heads, model]:
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
        unit.set_gradient_divide_factor(1.0)  # FSDP would average; our loss is a sum over ranks
        unit.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
    register_fsdp_forward_method(model, "logits")
    return model


def build(config, args, job):
    """The sharded model and its optimizer. No rank ever holds it whole: meta first, then shards."""
    dtype = getattr(torch, args.dtype)
    with torch.device("meta"):
        model = GPT(config).to(torch.promote_types(dtype, torch.float32))
    shard_model(model, job.everyone, dtype)
    model.to_empty(device=job.device)
    model.init_weights(args.seed)
    gains = [p for p in model.parameters() if p.ndim < 2]  # of norms; decay would pull them to 0
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=args.weight_decay),
                                   dict(params=gains, weight_decay=0.0)],
                                  lr=args.lr, betas=(0.9, 0.95), fused=True)
    return model, optimizer


# 6. The plan --------------------------------------------------------------------------------------
# What a job costs, by arithmetic, before it costs anything.

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16


def forward_flops(config, ctx):
    """(attention, rest) of one sequence's forward pass; 2 FLOPs per multiply-add."""
    c, d = config, config.head_dim
    attention = c.n_layers * 2 * ctx**2 * c.n_heads * d  # Q K^T and P V, each S x S, half masked
    block = 2 * c.dim * (c.n_heads + c.n_kv_heads) * d + 3 * c.dim * c.ffn_dim
    return attention, 2 * ctx * (c.n_layers * block + c.vocab_size * c.dim)


def backward_passes(recipe):
    """(attention, rest): the backward pass in units of forward passes, recomputation included."""
    again = recipe.checkpoint > 0
    return 2.5 + (again and not recipe.keep_attention), 2 + again  # flash: 5 products instead of 2


def count_parameters(config):
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


def write_ctx(ctx):
    units = ((2**20, "m"), (2**10, "k"), (1, ""))
    return next(f"{ctx // unit}{name}" for unit, name in units if ctx % unit == 0)


def brief(n, units=((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))):
    return next((f"{n / unit:.3g}{name}" for unit, name in units if n >= unit), f"{n:.3g}")


def duration(seconds):
    units = ((86400, "days"), (3600, "hours"), (60, "minutes"))
    return next((f"{seconds / unit:,.0f} {name}" for unit, name in units if seconds >= 2 * unit),
                f"{seconds:.1f} seconds")


def print_plan(config, args, job, recipe):
    c, sequences = config, args.grad_accum * job.dp
    attention, rest = (3 * sequences * flops for flops in forward_flops(c, args.ctx))
    U = recipe.stage_heads(c, job.cp)
    n = sum(len(queries) for _, queries in stages(c.n_heads, c.n_kv_heads, job.cp, U))
    on = [name for name in ("keep_attention", "offload", "stream") if getattr(recipe, name)]
    job.say(f"model     {args.model}: {brief(count_parameters(c))} parameters, {c.n_layers} layers "
            f"of width {c.dim}, {c.n_heads} heads and {c.n_kv_heads} kv heads of {c.head_dim}, "
            f"{args.dtype}\n"
            f"context   {args.ctx:,} tokens over {job.cp} of {job.world} {job.device.type} ranks\n"
            f"recipe    {recipe.attention}, stages per layer: {n}, heads per stage: {U}, "
            f"tile {recipe.tile or 'off'}, checkpoint {recipe.checkpoint}{', '.join(['', *on])}\n"
            f"work      {sequences} x {args.ctx:,} tokens, {brief(attention + rest)} FLOPs: "
            f"{brief(attention)} in attention, {brief(rest)} in the rest (recomputation apart)")
    gpus = torch.cuda.device_count() if job.device.type == "cuda" else 1
    if gpus > job.world == 1:
        job.say(f"notice    one process uses one of the {gpus} GPUs of this machine; all of them:  "
                f"torchrun --nproc-per-node={gpus} {shlex.join(sys.argv)}")


def too_large(config, args, job, recipe):
    """Why this cannot fit, or None. Counts what is certain to be there; most runs need more."""
    if job.device.type == "cuda":
        memory, ranks = torch.cuda.get_device_properties(job.device).total_memory, 1
        kept = not recipe.offload
    else:
        if not hasattr(os, "sysconf"):  # Windows
            return None
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        ranks, kept = launched()[3], 1
    width, L = getattr(torch, args.dtype).itemsize, config.n_layers
    x, o = config.dim, config.n_heads * config.head_dim  # one token's input and attention output
    kept *= L * (x + o) if not recipe.checkpoint else L // recipe.checkpoint * x
    weights = 4 * max(4, width) * count_parameters(config) / job.world * ranks
    need = weights + ranks * width * (2 * x + o + kept) * args.ctx / job.cp
    if need <= memory:
        return None
    ctx = int(args.ctx * (memory - weights) / (need - weights)) >> 10
    hope = f"at most --ctx {ctx}k may fit" if ctx > 0 else "more ranks or fewer --layers may fit"
    return (f"{args.model} at --ctx {write_ctx(args.ctx)} needs {need / 2**30:,.0f} GiB or more, "
            f"there are {memory / 2**30:,.0f}: {hope}; --force tries all the same")


def too_slow(config, args, job, recipe):
    """Why this should not start on a CPU, or None. Times a matrix product for 0.1 s."""
    a, runs, begin = torch.randn(1024, 1024), 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < 0.1:
        a @ a
        runs += 1
    rate = job.world * runs * 2 * 1024**3 / spent

    def seconds(ctx):
        passes = zip(forward_flops(config, ctx), backward_passes(recipe))
        return args.grad_accum * job.dp * sum(flops * (1 + n) for flops, n in passes) / rate
    here, ctx = seconds(args.ctx), 2 ** (args.ctx.bit_length() - 1)
    if here > 10:
        job.say(f"notice    on this CPU ({brief(rate)} FLOP/s) a step takes {duration(here)} or "
                f"more, {args.steps} steps {duration(args.steps * here)}")
    if here <= 600:
        return None
    while seconds(ctx) > 10:
        ctx //= 2
    return (f"a step at --ctx {write_ctx(args.ctx)} takes {duration(here)} or more on this CPU: "
            f"run --ctx {write_ctx(ctx)} ({duration(seconds(ctx))} a step), take GPUs or --force")


# 7. A step ----------------------------------------------------------------------------------------


@contextmanager
def progress_bar(job, model, title, total):
    """Progress within a step, shown from 10 s on. Counts in forward passes of one block."""
    events, silent = [], model.progress
    look = "{desc} {percentage:3.0f}% |{bar}| {elapsed} < {remaining}{postfix}"
    with tqdm(total=total, desc=title, delay=10, leave=False, miniters=1, disable=job.rank != 0,
              bar_format=look) as bar:
        def tick(layer, way):
            if job.device.type == "cuda":  # the CPU runs ahead: let the GPU finish the block before
                events.append(torch.cuda.current_stream().record_event())
                if len(events) > 1:
                    events.pop(0).synchronize()
            bar.set_postfix_str(f"{way}, block {layer}", refresh=False)
            bar.update(2.5 if way == "backward" else 1)
        if job.rank == 0:
            model.progress = tick
        try:
            yield
        finally:
            model.progress = silent


def learning_rate(args, step):
    """Linear warm-up to lr, then half a cosine down to min_lr at the last step."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - 1 - args.warmup)
    return args.min_lr + (args.lr - args.min_lr) * (1 + math.cos(math.pi * done)) / 2


def train_step(job, model, optimizer, batch, total, recipe, grad_clip, step):
    """One optimizer step over `batch`, this rank's (tokens, labels) slices -> (loss, norm).

    total: the labels of all micro-batches on all ranks. If a loss or the norm is not finite, every
    rank raises BadInput, weights and optimizer untouched."""
    optimizer.zero_grad()
    loss = torch.zeros((), dtype=torch.float64, device=job.device)
    for tokens, labels in batch:
        share = model(tokens.to(job.device), labels.to(job.device), recipe, total=total)
        share.backward()
        loss += share.detach()
    loss = loss.item()
    fault = f"step {step}: the loss of rank {job.rank} is {loss}, nothing was updated"
    loss = agree(job, None if math.isfinite(loss) else fault, loss)
    # The norm is taken over the shards of all ranks: one number, so one decision, on every rank.
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor()
    if not norm.isfinite():
        raise BadInput(f"step {step}: the gradient norm is {norm.item()}, nothing was updated")
    if grad_clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    optimizer.step()
    return loss, norm.item()


@torch.no_grad()
def evaluate(job, model, tokens, starts, ctx, recipe):
    """Mean loss over the windows at `starts`, by the same call as in training.

    The groups share the windows; one that has fewer than the others joins in with an empty one,
    past the data's end, because all ranks must make the same calls."""
    starts = starts + [len(tokens)] * (-len(starts) % job.dp)
    batch, total = load(job, tokens, starts[job.dp_rank::job.dp], ctx)
    return agree(job, None, sum(
        model(inputs.to(job.device), labels.to(job.device), recipe, total=total).item()
        for inputs, labels in batch))


# 8. Main ------------------------------------------------------------------------------------------


def settle(args):
    """Model and recipe, or BadInput: flags against each other and the machine, no rank asked."""
    _, world, _, local_world = launched()
    args.cp = args.cp or world
    if world % args.cp:
        legal = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise BadInput(f"--cp {args.cp} does not divide the {world} ranks of this job: use {legal}")
    if args.device == "cuda" and local_world > torch.cuda.device_count():
        raise BadInput(f"--device cuda: {local_world} ranks on this machine, and PyTorch finds "
                       f"{torch.cuda.device_count()} GPUs: start one per GPU, or say --device cpu")
    config = PRESETS[args.model]
    config = replace(config, n_layers=args.layers or config.n_layers)
    recipe = Recipe(**{name: getattr(args, name) for name in SWITCHES})
    try:
        recipe.check(config, args.cp)
    except ValueError as error:
        raise BadInput(str(error))
    return config, recipe


def main(argv=None):
    args = parse_args(argv)
    config, recipe = settle(args)
    job = join(args)
    recipe = replace(recipe, group=job.group)
    if args.dtype == "bfloat16" and job.device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            job.say("notice    this GPU does not compute in bfloat16: float32 instead")
            args.dtype = "float32"

    print_plan(config, args, job, recipe)
    if not args.force:  # rank 0 decides: ranks that measure for themselves might disagree
        fault = job.rank == 0 and too_large(config, args, job, recipe)
        if job.rank == 0 and job.device.type == "cpu":
            fault = fault or too_slow(config, args, job, recipe)
        agree(job, fault or None)

    def work():
        train, valid = open_data(args.data, config.vocab_size, args.ctx)
        return (train, valid), len(train)
    (train, valid), total = together(job, work)
    same = total == len(train) * job.world
    agree(job, None if same else f"--data: rank {job.rank} has {len(train)} tokens, others do not")
    held_out = eval_starts(valid, args.ctx, args.eval_windows)
    job.say(f"data      {args.data or 'the Python standard library'}: {len(train):,} tokens, and "
            f"{len(valid):,} to validate: {len(held_out)} windows")
    baseline = ""
    if job.rank == 0 and config.vocab_size >= 256 and train.parts[0].dtype == np.uint8:
        baseline = f" (bigrams: {bigram_loss(train, valid, held_out, args.ctx):.3f})"

    model, optimizer = build(config, args, job)
    tokens = args.grad_accum * job.dp * args.ctx
    flops = 3 * sum(forward_flops(config, args.ctx)) * args.grad_accum * job.dp
    card = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else ""
    peak = next((f for name, f in PEAK_FLOPS.items()
                 if name in card and args.dtype == "bfloat16"), None)
    blocks = config.n_layers * args.grad_accum * (1 + backward_passes(recipe)[0])
    began = time.perf_counter()
    for step in range(args.steps + 1):
        if step == args.steps or args.eval_every and step % args.eval_every == 0:
            rounds = -(-len(held_out) // job.dp)
            with progress_bar(job, model, "evaluation", config.n_layers * rounds):
                loss = evaluate(job, model, valid, held_out, args.ctx, recipe)
            job.say(f"step {step:5d} | validation loss {loss:.4f} nats per token{baseline}")
        if step == args.steps:
            break
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        starts = train_starts(job, train, args.ctx, args.seed, step, args.grad_accum)
        batch, total = load(job, train, starts, args.ctx)
        with progress_bar(job, model, f"step {step + 1}", blocks):
            loss, norm = train_step(job, model, optimizer, batch, total, recipe,
                                    args.grad_clip, step + 1)
        seconds = time.perf_counter() - begin
        line = (f"step {step + 1:5d} | loss {loss:.4f} | lr {group['lr']:.2e} | norm {norm:.3f} | "
                f"{tokens / seconds:,.0f} tokens/s | {seconds:.2f} s")
        if job.device.type == "cuda":
            line += f" | MFU {flops / seconds / job.world / peak:.1%}" if peak else ""
            line += f" | peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
            torch.cuda.reset_peak_memory_stats()
        job.say(line)
    job.say(f"done      {args.steps} steps, {brief(args.steps * tokens)} tokens in "
            f"{duration(time.perf_counter() - began)}, validation loss {loss:.4f}{baseline}")
    dist.destroy_process_group()


def out_of_memory(argv=None):
    """The line for a GPU that is full: the recipe, and the next switch to turn."""
    args = parse_args(argv)
    turns = (("--checkpoint 1", not args.checkpoint), ("--offload", not args.offload),
             ("--attention upipe", args.attention != "upipe"), ("--stream", not args.stream),
             ("--heads-per-stage 0", args.heads_per_stage),
             ("--tile 2048", not args.tile or args.tile > 2048))
    turn = next((flag for flag, helps in turns if helps), "more GPUs, or a shorter --ctx")
    recipe = ", ".join(f"{name} {getattr(args, name)}" for name in SWITCHES)
    return f"out of GPU memory at --ctx {write_ctx(args.ctx)} with {recipe}: try {turn}"


def run(argv=None):
    """main(), and then a way out that waits for nobody: os._exit, since a tidy end would wait for
    ranks that wait for this one. torchrun ends all ranks when it sees one go, so the rank that has
    something to say goes first."""
    rank, code = launched()[0], 1
    try:
        main(argv)
        code = 0
    except BadInput as error:  # known to all ranks, said by rank 0
        time.sleep(10 * (rank > 0))
        if rank == 0:
            print(f"train.py: {error}", file=sys.stderr)
        code = 2
    except torch.OutOfMemoryError:  # known to this rank; often all ranks meet it together
        time.sleep(2 * (rank > 0))
        print(f"train.py: rank {rank}: {out_of_memory(argv)}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
