"""Train a GPT whose context is split over ranks. The techniques are in upipe.py; this is the job.

    python train.py                                   one process: no launcher, no port
    torchrun --nproc-per-node=2 train.py              two CPU cores: `tiny` on Python's own sources
    torchrun --nproc-per-node=4 train.py --cp 2       two sequences at a time, each on two ranks
    torchrun --nproc-per-node=8 train.py --ctx 5m     eight GPUs: llama3-8b on 5 x 2^20 tokens

1. Flags   2. Ranks and groups   3. Stopping together   4. Data   5. Sharding   6. The plan
7. A step   8. The dry run   9. The road   10. Weights in and out   11. Checkpoints   12. Text
13. Looking inside   14. Main

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
import gc
import hashlib
import itertools
import json
import math
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard,
    register_fsdp_forward_method)
from torch.distributed.tensor import DTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import upipe
from upipe import BadInput, GPT, GPTConfig, IGNORE, PRESETS, Recipe, stages

SWITCHES = [f.name for f in fields(Recipe) if f.name != "group"]  # each is a flag
NO_ID = -1  # no token

# 1. Flags -----------------------------------------------------------------------------------------


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
    add("--checkpoint", type=number(int, 0), help="blocks per segment; 0 = off (default: 1, or 4 "
        "where the host has no room for more)")
    add("--keep-attention", action=switch, help="run it once only (default: with --checkpoint 1)")
    add("--offload", action=switch, help="checkpoints wait in host memory (default: on GPUs)")
    add("--stream", action=switch, help="and come back tile by tile (default: from 1m tokens on)")
    add("--offload-params", action=switch, default=False,
        help="weights, gradients and AdamW's moments live in host memory")
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
    # what goes in and what comes out
    add("--init", metavar="DIR", help="start from a Llama 3.x or Qwen3 folder of Hugging Face")
    add("--export", metavar="DIR", help="write such a folder at the end")
    add("--save", metavar="DIR", help="folder for checkpoints, the same one for all ranks")
    add("--save-every", type=number(int, 0), default=100,
        help="steps (default: 100); 0: at the end, and on SIGTERM or SIGUSR1")
    add("--keep", type=number(int, 1), default=2, help="checkpoints that stay (default: 2)")
    add("--resume", action="store_true",
        help="go on from the newest in --save, with the flags of that run unless given anew")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json (default: the one in --init)")
    add("--docs", type=number(int, 0), nargs="?", const=NO_ID, metavar="ID",
        help="attention stays in a document: a file, or what follows a token ID")
    add("--task", choices=("text", "recall"), default="text",
        help="recall: keys and values at the start, asked for at the end")
    add("--sample", type=number(int, 0), default=0, help="tokens to write in the end")
    add("--prompt", default="\n", help="what they continue")
    add("--log", "--log-file", metavar="FILE", help="one JSON object per step (some versions of "
        "torchrun take --log for their own: the longer name helps)")
    add("--loss-by-position", metavar="FILE", help="picture, .png or .svg, of the final model")
    add("--profile", metavar="DIR", help="traces of one step")
    # instead of a run
    add("--dry-run", action="store_true", help="tell memory and time of a step, without doing it")
    add("--world", type=number(int, 1), help="ranks to simulate (default: 8)")
    add("--gpus-per-node", type=number(int, 1), help="ranks that share a host (default: 8)")
    add("--gpu-mem", type=number(float, 0, above=True), help="GiB of a GPU (default: 80)")
    add("--host-mem", type=number(float, 0, above=True), help="GiB of a node (default: 2000)")
    add("--full", action="store_true", help="simulate every layer, instead of extending two models")
    add("--max-ctx", action="store_true", help="with --dry-run: the longest context that fits")
    add("--one-rank-of", type=number(int, 1), help="measure one rank of so many, on one device")
    add("--road", action="store_true", help="one row per technique, simulated or measured here")
    add("--json", help="with --road, --one-rank-of: write the figures to this file")
    add("--plot", help="with --road: draw them, to this .png or .svg")
    add("--force", action=switch, default=False, help="run what looks too slow or too large")
    args = parser.parse_args(argv)
    saved = find_checkpoint(args) if args.resume else None
    if saved:
        cp = saved["flags"]["cp"] if launched()[1] == saved["world"] else None
        parser.set_defaults(**{**saved["flags"], "cp": cp})
        args = parser.parse_args(argv)
    elif args.init and (args.model or args.layers):
        raise BadInput("--init says what the model is: leave --model and --layers out")
    args.saved = saved

    cuda = args.device == "cuda" or args.device is None and (
        args.dry_run or torch.cuda.is_available())
    tiny = not args.init and (args.model or ("llama3-8b" if cuda else "tiny")) == "tiny"

    def default(name, value):
        if getattr(args, name) is None:
            setattr(args, name, value)
    default("device", "cuda" if cuda else "cpu")
    default("dtype", "bfloat16" if cuda else "float32")
    default("model", args.init or ("tiny" if tiny else "llama3-8b"))
    default("ctx", 512 if tiny else 128 * 1024)
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
    world, cuda = args.one_rank_of or world, args.device == "cuda"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    elif local_world > 1:  # threads of several ranks on one core slow all of them down
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
    timeout = timedelta(seconds=min(args.timeout, 1e8))
    alone = dict(store=dist.HashStore(), rank=0, world_size=1) if world == 1 else {}
    if args.one_rank_of:
        pretend(world)
        return meet(args, world, device)
    # With --offload-params gradients are on the CPU, and so is the sum that makes their norm.
    both = cuda and args.offload_params
    backend = "cpu:gloo,cuda:nccl" if both else "nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=timeout,
                            device_id=device if cuda and not both else None, **alone)
    job = meet(args, world, device)
    job.group.set_timeout(timeout)  # a new group does not inherit it
    return job


def pretend(world):
    """Be rank 0 of `world` ranks of which the others are not there: collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())


def meet(args, world, device):
    """The groups of a job whose processes have met."""
    mesh = init_device_mesh(device.type, (world // args.cp, args.cp), mesh_dim_names=("dp", "cp"))
    dp_rank, cp_rank = mesh.get_coordinate()
    return Job(dist.get_rank(), world, device, world // args.cp, dp_rank, args.cp, cp_rank,
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


def open_data(data, vocab, ctx, tokenizer=None):
    """(train, valid): of every ten files the tenth is held out; of fewer, a tenth of each."""
    try:
        paths = find_files(data)
        if tokenizer and not any(path.suffix in (".bin", ".npy") for path in paths):
            parts = tokenize(paths, tokenizer)
        else:
            parts = [open_file(path, vocab) for path in paths]
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


def find_documents(tokens, start, ctx, separator):
    """Where documents start in the window at `start`: [0, ...], the same on every rank.

    They start with a file, and after each token `separator` (to find those, a rank reads all of the
    window)."""
    stop = min(start + ctx, len(tokens) - 1)
    found = {begin - start for begin in tokens.begins if start < begin < stop}
    if separator != NO_ID and start < stop:
        found.update((np.flatnonzero(tokens.read(start, stop - 1) == separator) + 1).tolist())
    return torch.tensor(sorted({0} | found))


def read_documents(tokens, start, ctx, cp, cp_rank, separator):
    """read_slice and find_documents. No document has to guess how the next one begins."""
    inputs, labels = read_slice(tokens, start, ctx, cp, cp_rank)
    docs = find_documents(tokens, start, ctx, separator)
    last = docs[1:] - 1 - cp_rank * len(labels)
    labels[last[(last >= 0) & (last < len(labels))]] = IGNORE
    return inputs, labels, docs


class Recall:
    """A row of windows, made on demand, each like a form: pairs of a key and one of its 16 values,
    a long stretch of noise, and at the end each key once more, whose value is to be said. With two
    ranks and more, pairs and questions are on different ranks: only attention gets there."""
    KEYS, VALUES = 12, 16  # tokens: the keys, the values of each key, and noise up to 255
    CHANCE = math.log(VALUES)

    def __init__(self, seed, ctx, windows):
        self.seed, self.ctx, self.windows = seed, ctx, windows
        self.pairs = min(self.KEYS, ctx // 8)

    def __len__(self):
        return self.windows * self.ctx + 1

    def slice(self, start, cp, cp_rank):
        """As read_slice. Any rank makes any part of any window, without the rest of it."""
        rng, n = np.random.default_rng([self.seed, start]), self.pairs
        keys = rng.permutation(self.KEYS)[:n]
        values = self.KEYS + self.VALUES * keys + rng.integers(self.VALUES, size=n)
        pairs = np.stack((keys, values), axis=1)
        asked = rng.permutation(pairs)
        s, noise = -(-self.ctx // cp), self.KEYS * (1 + self.VALUES)
        at = np.arange(s) + cp_rank * s
        inputs = noise + ((at + start) * 2654435761 >> 16) % (256 - noise)
        labels = np.full(s, IGNORE)
        for begin, what in ((0, pairs), (self.ctx - 2 * n, asked)):
            here = (at >= begin) & (at < begin + 2 * n)
            inputs[here] = what.ravel()[at[here] - begin]
        question = (at >= self.ctx - 2 * n) & (at < self.ctx) & ((self.ctx - at) % 2 == 0)
        question &= start < len(self) - 1  # beyond the last window nothing is asked
        labels[question] = asked[(at[question] - self.ctx) // 2, 1]
        return torch.from_numpy(inputs), torch.from_numpy(labels)


def load(job, tokens, starts, ctx, docs=None):
    """This rank's slices of windows, and the number of labels in all windows of all ranks."""
    def read(start):
        if isinstance(tokens, Recall):
            return tokens.slice(start, job.cp, job.cp_rank)
        if docs is None:
            return read_slice(tokens, start, ctx, job.cp, job.cp_rank)
        return read_documents(tokens, start, ctx, job.cp, job.cp_rank, docs)

    def work():
        batch = [read(start) for start in starts]
        return batch, sum(int((labels != IGNORE).sum()) for _, labels, *_ in batch)
    return together(job, work)


@lru_cache(maxsize=2)
def epoch_starts(length, ctx, seed, epoch):
    """Where an epoch's windows start: without overlap, in random order, aligned anew each time."""
    rng, n = np.random.default_rng([seed, epoch]), (length - 1) // ctx
    return rng.integers(length - n * ctx) + ctx * rng.permutation(n)


def train_starts(job, tokens, ctx, seed, step, grad_accum, ahead=0):
    """A step's windows for this rank's group: the groups take turns along the epochs' windows.

    ahead: by how many windows a run is ahead of that, since it once took more of them a step."""
    n = (len(tokens) - 1) // ctx
    turns = [ahead + (step * grad_accum + micro) * job.dp + job.dp_rank
             for micro in range(grad_accum)]
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
    offload = CPUOffloadPolicy(mesh.device_type == "cuda") if offload_params else OffloadPolicy()
    heads = [] if model.config.tie_embeddings else [model.lm_head]
    for unit in [*model.layers, model.embed_tokens, *heads, model]:
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
        unit.set_gradient_divide_factor(1.0)  # FSDP would average; our loss is a sum over ranks
        unit.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
    register_fsdp_forward_method(model, "logits")
    register_fsdp_forward_method(model, "token_losses")
    return model


def make_moments(model, optimizer):
    """A step with gradients 0, so that AdamW's moments exist."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()


def build(config, args, job):
    """The sharded model and its optimizer. No rank ever holds it whole: meta first, then shards."""
    dtype = getattr(torch, args.dtype)
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    with torch.device("meta"):
        model = GPT(config)
    torch.set_default_dtype(torch.float32)
    shard_model(model, job.everyone, dtype, args.offload_params)
    model.to_empty(device="cpu" if args.offload_params else job.device)
    model.init_weights(args.seed)
    gains = [p for p in model.parameters() if p.ndim < 2]  # of norms; decay would pull them to 0
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=args.weight_decay),
                                   dict(params=gains, weight_decay=0.0)],
                                  lr=args.lr, betas=(0.9, 0.95), fused=True)
    return model, optimizer


# Which attention kernel is fastest depends on the card, the head size and what is installed, and a
# wrong one trains on in silence. So candidates are tried on a small input, against the formula.

PACKAGES = {"fa4": "flash_attn.cute", "fa3": "flash_attn_interface", "flash-attn": "flash_attn"}


def kernel_error(name, u, n, d, dtype, device, S=200):
    """Why kernel `name` cannot be used for stages of u query and n kv heads, or None."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(S, heads, d, generator=draw).to(device, dtype)
                   for heads in (u, n, n, u))
    try:
        o, lse = upipe.flash_forward(q, k, v, name)
        grads = upipe.flash_backward(do, q, k, v, o, lse, name)
    except Exception as error:  # whatever a kernel throws at what it cannot do
        return str(error).split("\n")[0]
    inputs = [x.double().cpu().requires_grad_() for x in (q, k, v)]
    q, k, v = inputs[0], *(x.repeat_interleave(u // n, dim=1) for x in inputs[1:])
    scores = torch.einsum("ihd,jhd->hij", q, k) / d**0.5
    scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
    right = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
    rights = right, *torch.autograd.grad(right, inputs, do.double().cpu())
    # Rounding of inputs and outputs, and of products within the kernel: bfloat16's in bfloat16, and
    # on tensor cores float32's in three of 11 bits.
    limit = (64 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps
    for what, x, y in zip(("output", "dq", "dk", "dv"), (o, *grads), rights):
        error = ((x.double().cpu() - y).norm() / y.norm()).item()
        if not error <= limit:
            return f"its {what} is wrong by {error:.1e}, allowed is {limit:.1e}"


def choose_kernel(config, args, job, recipe):
    """The kernel to use: --kernel, or of those that are installed and right, the fastest here.

    Rank 0 decides. Raises BadInput if the kernel asked for cannot be used."""
    auto = recipe.kernel == "auto"
    # cuDNN prepares itself for each length anew, and there is one that it does not take: 1.
    own = ["torch"] if args.sample or args.docs is not None else ["cudnn", "torch"]
    names = [recipe.kernel] if not auto else ["cpu"] if job.device.type == "cpu" else (
        [name for name, package in PACKAGES.items() if installed(package)] + own
        if args.dtype == "bfloat16" else ["efficient"])
    queries, kvs = upipe.stages(config.n_heads, config.n_kv_heads, job.cp,
                                recipe.stage_heads(config, job.cp))[0][::-1]
    sizes = queries[0].stop, kvs.stop, config.head_dim, getattr(torch, args.dtype), job.device
    fault, best = None, [None]
    if job.rank == 0:
        errors = {name: kernel_error(name, *sizes) for name in names}
        for name, error in errors.items():
            if error and auto and name in PACKAGES:
                job.say(f"notice    kernel {name} is not used: {error}")
        right = [name for name in names if errors[name] is None]
        best = [min(right, key=lambda name: kernel_seconds(name, *sizes)) if len(right) > 1
                else right[0] if right else None]
        fault = None if right else f"kernel {names[-1]} cannot be used here: {errors[names[-1]]}"
    agree(job, fault)
    dist.broadcast_object_list(best, src=0)
    return best[0]


def installed(package):
    try:
        return find_spec(package) is not None
    except ImportError:  # find_spec("a.b") imports a
        return False


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


def step_flops(config, ctx, recipe):
    """FLOPs of one sequence's forward and backward pass, recomputation included."""
    return sum(flops * (1 + n) for flops, n in zip(forward_flops(config, ctx),
                                                   backward_passes(recipe)))


def count_parameters(config):
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


def write_ctx(ctx):
    units = ((2**20, "m"), (2**10, "k"), (1, ""))
    return next(f"{ctx // unit}{name}" for unit, name in units if ctx % unit == 0)


def brief(n, units=((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))):
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
            f"kernel {recipe.kernel}, tile {recipe.tile or 'off'}, "
            f"checkpoint {recipe.checkpoint}{', '.join(['', *on])}\n"
            f"work      {sequences} x {args.ctx:,} tokens, {brief(attention + rest)} FLOPs: "
            f"{brief(attention)} in attention, {brief(rest)} in the rest (recomputation apart)")
    gpus = torch.cuda.device_count() if job.device.type == "cuda" else 1
    if gpus > job.world == 1:
        job.say(f"notice    one process uses one of the {gpus} GPUs of this machine; all of them:  "
                f"torchrun --nproc-per-node={gpus} {shlex.join(sys.argv)}")


def too_slow(config, args, recipe):
    """Why this should not start on a CPU, or None. Times a matrix product for 0.1 s."""
    a, runs, begin = torch.randn(1024, 1024), 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < 0.1:
        a @ a
        runs += 1
    rate = args.world * runs * 2 * 1024**3 / spent

    def seconds(ctx):
        sequences = args.grad_accum * args.world // args.cp
        return sequences * step_flops(config, ctx, recipe) / rate
    here, ctx = seconds(args.ctx), 2 ** (args.ctx.bit_length() - 1)
    if here > 10:
        print(f"notice    on this CPU ({brief(rate)} FLOP/s) a step takes {duration(here)} or "
              f"more, {args.steps} steps {duration(args.steps * here)}", flush=True)
    if here <= 600:
        return None
    while seconds(ctx) > 10 and ctx > 256:
        ctx //= 2
    hope = f"--ctx {write_ctx(ctx)} ({duration(seconds(ctx))} a step)"
    return (f"a step at --ctx {write_ctx(args.ctx)} takes {duration(here)} or more on this CPU: "
            f"run {hope if seconds(ctx) <= 10 else '--model tiny'}, take GPUs or --force")


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
    """One optimizer step over `batch`, this rank's (tokens, labels[, docs]) -> (loss, norm).

    total: the labels of all micro-batches on all ranks. If a loss or the norm is not finite, every
    rank raises BadInput, weights and optimizer untouched."""
    optimizer.zero_grad()
    loss = torch.zeros((), dtype=torch.float64, device=job.device)
    for tokens, labels, *docs in batch:
        share = model(tokens.to(job.device), labels.to(job.device), recipe, total, *docs)
        share.backward()
        loss += share.detach()
    loss = loss.item()
    fault = f"step {step}: the loss of rank {job.rank} is {loss}, nothing was updated"
    loss = agree(job, None if math.isfinite(loss) else fault, loss)
    # The norm is taken over the shards of all ranks: one number, so one decision, on every rank.
    parameters = [p for p in model.parameters() if p.grad is not None]  # the others are frozen
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor()
    if not norm.isfinite():
        raise BadInput(f"step {step}: the gradient norm is {norm.item()}, nothing was updated")
    if grad_clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    optimizer.step()
    return loss, norm.item()


@torch.no_grad()
def evaluate(job, model, tokens, starts, ctx, recipe, docs=None):
    """Mean loss over the windows at `starts`, by the same call as in training.

    The groups share the windows; one that has fewer than the others joins in with an empty one,
    past the data's end, because all ranks must make the same calls."""
    starts = starts + [len(tokens)] * (-len(starts) % job.dp)
    batch, total = load(job, tokens, starts[job.dp_rank::job.dp], ctx, docs)
    return agree(job, None, sum(
        model(inputs.to(job.device), labels.to(job.device), recipe, total, *docs).item()
        for inputs, labels, *docs in batch))


# 8. The dry run -----------------------------------------------------------------------------------
# The same model, recipe, sharding, optimizer and step, with tensors that have shapes but no memory
# (FakeTensorMode) and ranks that are not there (the "fake" process group). A meter sees every
# tensor come and go. There is no second model of the memory: change upipe.py, and the numbers
# change.

GIB = 2**30
RESERVED = 3 * GIB  # of a card: CUDA's context, NCCL's buffers, what fragmentation wastes
UTILISATION = 0.5   # of the peak FLOP/s, for the estimated time
BETWEEN_STEPS = ("parameters", "gradients", "optimizer")  # kinds that stay from step to step

# What a tensor is, by the innermost of these functions of upipe.py that was at work.
KINDS = dict(
    take="stage buffers", attention_forward="attention output", attention_backward="dk and dv",
    lean_forward="residual stream", fetch="residual stream", backward="residual gradient",
    own="residual gradient", rotary="rotary tables", token_losses="logits tile",
    logits="logits tile", __init__="weight gradients", done="weight gradients",
    flash_forward="kernel outputs", flash_backward="kernel outputs", slab="parked",
    **dict.fromkeys(("rows", "load", "collect", "do_parts", "heads", "mlp", "tile_grads", "add",
                     "project_backward", "ulysses_attention", "forward"), "activations"))


class Meter(TorchDispatchMode):
    """Bytes of live storages by kind, and what was there at the peak of each part of a step.

    Slabs of the model's HostStore are host bytes and, with offload_params, so is what FSDP and
    AdamW hold between steps; all else is on the device. It works on real tensors as on fake
    ones."""

    def __init__(self, model, offload_params=False):
        super().__init__()
        self.model, self.offload_params = model, offload_params
        self.live = {}                 # storage -> (bytes, kind)
        self.kinds = defaultdict(int)  # kind -> bytes
        self.peaks = {}                # part of the step -> (device bytes, kinds, where exactly)
        self.timeline = []             # (device bytes, kinds), from time to time
        self.host, self.part, self.last = 0, "forward", len(model.layers) - 1

    def __enter__(self):
        self.resize = torch.UntypedStorage.resize_

        def resize_(storage, size):  # how FSDP and upipe free memory that is still referred to
            self.resize(storage, size)
            self.see(storage)
            return storage
        torch.UntypedStorage.resize_ = resize_
        self.silent, self.model.progress = self.model.progress, self.progress
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_, self.model.progress = self.resize, self.silent
        return super().__exit__(*error)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its local tensors will come by
        out = op(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.see(x.untyped_storage(), x.dim())
        return out

    def see(self, storage, dims=1):
        old, kind = self.live.get(storage._cdata, (0, None))
        if kind is None:
            kind = kind_of(sys._getframe(2), dims)
            weakref.finalize(storage, self.gone, storage._cdata)
        self.live[storage._cdata] = storage.nbytes(), kind
        self.kinds[kind] += storage.nbytes() - old
        if storage.nbytes() > old:
            self.note()

    def gone(self, key):
        size, kind = self.live.pop(key)
        self.kinds[kind] -= size

    def name(self, tensors, kind):
        """Say what tensors are that existed before the meter, or that FSDP made."""
        for x in tensors:
            storage = (x.to_local() if isinstance(x, DTensor) else x).untyped_storage()
            self.see(storage)
            size, old = self.live[storage._cdata]
            self.live[storage._cdata] = size, kind
            self.kinds[old] -= size
            self.kinds[kind] += size

    def progress(self, layer, way):
        """The model's hook: which part of the step comes next."""
        if way == "backward":
            self.name((p.grad for p in self.model.parameters() if p.grad is not None), "gradients")
            self.part = {0: "the end", 1: "the first block"}.get(layer, "a block in between")
        elif way == "forward" and layer == self.last:
            self.part = "head and last block"
        self.silent(layer, way)

    def device_bytes(self):
        on_host = sum(self.kinds[kind] for kind in BETWEEN_STEPS) if self.offload_params else 0
        return sum(self.kinds.values()) - self.model.store.slab_bytes - on_host

    def note(self):
        now = self.device_bytes()
        self.host = max(self.host, self.model.store.slab_bytes)
        if now > self.peaks.get(self.part, (0,))[0]:
            self.peaks[self.part] = now, dict(self.kinds), place(sys._getframe(3))
        if not self.timeline or abs(now - self.timeline[-1][0]) > now / 50:
            self.timeline.append((now, dict(self.kinds)))


def kind_of(frame, dims):
    while frame:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path == upipe.__file__ or name == "workspace":
            if name == "land":  # x or attention's output, on their way back
                return "attention output" if dims == 3 else "residual stream"
            if name in KINDS or name == "workspace":
                return KINDS.get(name, "kernel workspace")
        elif "/fsdp/" in path:
            return "gradient reduction" if "reduce" in name else "gathered weights"
        elif "/optim/" in path:
            return "optimizer"
        frame = frame.f_back
    return "gradients in autograd"


def place(frame):
    """Where in upipe.py a frame is, for people: block, direction, stage, function."""
    names, block, stage = [], None, None
    while frame:
        if frame.f_code.co_filename == upipe.__file__:
            names.append(frame.f_code.co_name)
            local = frame.f_locals
            if "mine" in local and "kv" in local:
                stage = f"stage of query heads {local['mine'].start} to {local['mine'].stop - 1}"
            index = getattr(local.get("ctx", local.get("self")), "index", None)
            block = block or (None if index is None else f"block {index}")
            if isinstance(local, dict):  # before Python 3.13 a copy that the frame keeps: tensors
                local.clear()            # would outlive their last use in it, and be counted
        frame = frame.f_back
    way = "backward" if "backward" in names else "forward"
    return ", ".join(x for x in (block, way, stage, *names[:1]) if x) if names else "in autograd"


def simulated_kernel():
    """FlashAttention-2 on CUDA, as far as memory goes: its outputs and its workspace."""
    def forward(q, k, v, edges):
        return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

    def backward(do, q, k, v, o, lse, edges):
        def workspace():
            size = upipe.KERNELS["torch"].workspace(*q.shape[:2], *k.shape[1:])
            return q.new_empty(size, dtype=torch.uint8)
        held = workspace()
        grads = [torch.empty_like(x) for x in (q, k, v)]
        del held
        return grads
    return upipe.Kernel(forward, backward, limit=float("inf"))


@contextmanager
def abridged():
    """Let upipe walk two tiles of each row of tiles, two stages of each load of keys and values,
    and two loads: the others take the place of the second and leave nothing behind."""
    spans, schedule = upipe.tile_spans, upipe.schedule
    upipe.tile_spans = lambda n, tile: spans(n, tile)[:2]
    upipe.schedule = lambda p: [(kv, queries[:2]) for kv, queries in schedule(p)[:2]]
    try:
        yield
    finally:
        upipe.tile_spans, upipe.schedule = spans, schedule


def prepare(job, config, args):
    """Model, optimizer and tokens as in the middle of a run: AdamW's moments exist."""
    model, optimizer = build(config, args, job)
    make_moments(model, optimizer)
    s = -(-args.ctx // job.cp)
    return model, optimizer, torch.randint(config.vocab_size, (s,), device=job.device)


def metered_step(job, config, args, recipe):
    """Watch one step of a new model -> Meter. On fake tensors or real ones, it is the same.

    The update itself is left out: fused AdamW works in place, in memory that is there by then."""
    model, optimizer, tokens = prepare(job, config, args)
    with Meter(model, args.offload_params) as meter:
        meter.name(model.parameters(), "parameters")
        moments = [x for state in optimizer.state.values() for x in state.values()]
        meter.name((x for x in moments if torch.is_tensor(x)), "optimizer")
        meter.timeline.clear()
        for _ in range(min(2, args.grad_accum)):
            model(tokens, tokens, recipe, total=args.ctx).backward()
    return meter


def simulate(config, args, recipe, world, kernel="simulated", pages=abridged):
    """metered_step of rank 0 of `world`, without memory and without the other ranks."""
    pretend(world)
    upipe.KERNELS["simulated"] = (  # without its limit: the verdict names it
        simulated_kernel() if kernel == "simulated"
        else upipe.KERNELS[kernel]._replace(limit=math.inf))
    try:
        job = meet(args, world, torch.device("cpu"))
        recipe = replace(recipe, group=job.group, kernel="simulated")
        with pages(), FakeTensorMode(allow_non_fake_inputs=True):
            return metered_step(job, config, args, recipe)
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
    part, (device, kinds, where) = max(meter.peaks.items(), key=lambda peak: peak[1][0])
    return Report(device, meter.host, f"{part}: {where}", kinds, meter.timeline)


def plan_memory(config, args, recipe, world, full=False):
    """The Report of one rank of `world`.

    Every block costs the same, so two short models tell what all L layers need: one of a segment
    and the remainder, one of a segment more. Each part of the step is extended on its own, since
    the part that peaks at L need not be the one that peaks in a short model."""
    L, k = config.n_layers, max(1, recipe.checkpoint)
    few = L % k + k + (k if L % k + k == 1 else 0)
    kernel = "cpu" if args.device == "cpu" else "simulated"
    run = lambda n: simulate(replace(config, n_layers=n), args, recipe, world, kernel)
    if full or L <= few + k:
        a = b = run(L)
        times = 0
    else:
        a, b = run(few), run(few + k)
        times = (L - few) // k

    def extend(x, y):
        return x + times * (y - x)
    # A block in between is as far from the first as in the longer of the two models.
    first, between = "the first block", "a block in between"
    if between in b.peaks and times:
        (size, kinds, _), (x, xs, _), (y, ys, _) = b.peaks[between], a.peaks[first], b.peaks[first]
        kinds = {kind: kinds[kind] - ys.get(kind, 0) + xs.get(kind, 0) for kind in kinds}
        a.peaks[between] = size - y + x, kinds, ""
    peaks = {part: extend(a.peaks[part][0], b.peaks[part][0]) for part in b.peaks}
    part = max(peaks, key=peaks.get)
    (_, first, _), (_, second, where) = a.peaks[part], b.peaks[part]
    kinds = {kind: extend(first.get(kind, 0), second.get(kind, 0)) for kind in first | second}
    kinds.pop("parked", None)
    device, host = peaks[part], extend(a.host, b.host)
    if args.offload_params:  # FSDP brings one unit's part at a time, and takes its gradients back
        host += sum(kinds.pop(kind, 0) for kind in BETWEEN_STEPS)
        ends = config.vocab_size * config.dim
        blocks = count_parameters(config) - ends * (1 if config.tie_embeddings else 2)
        unit = 4 * max(ends, blocks // L) // world
        kinds["weights in transit"] = 2 * unit
        device += 2 * unit
    return Report(device, host, f"{part}: {where}", kinds, b.timeline)


def shares(config, args, report):
    """What a job takes of the card, of the host and of a kernel's indices; up to 1 fits."""
    u = recipe_of(args).stage_heads(config, args.cp) // args.cp
    call = -(-args.ctx // args.cp) * args.cp * u * config.head_dim  # elements of q: S u d
    return (report.device / (args.gpu_mem * GIB - RESERVED),
            report.host * min(args.world, args.gpus_per_node) / (args.host_mem * GIB),
            call / (2**31 - 1))


def verdict(config, args, report):
    """(fits, text): the report against the card, the host and what a kernel can index."""
    ranks, parts = min(args.world, args.gpus_per_node), shares(config, args, report)
    name = "GPU   " if args.device == "cuda" else "memory"
    texts = (f"{name}    {gib(report.device)} GiB at the peak, "
             f"{gib(args.gpu_mem * GIB - RESERVED)} usable of {args.gpu_mem:.0f}",
             f"host      {gib(report.host)} GiB a rank, {gib(report.host * ranks)} a node of "
             f"{ranks}, of {args.host_mem:,.0f}",
             f"kernel    {parts[2]:.2f} x 2^31 elements in a call, and its indices end at 1")
    return max(parts) <= 1, "\n".join(
        text + (": fits" if part <= 1 else ": does not fit") for text, part in zip(texts, parts))


def too_large(config, args, recipe):
    """Why this job cannot fit, and what would, or None: the dry run, before every run.

    A job that is small beyond doubt is spared the seconds: one that would need less than a quarter
    of the memory if every block kept a hundred tensors [s, D] in float32 and nothing were
    sharded."""
    s, states = -(-args.ctx // args.cp), 16 * count_parameters(config)
    most = 4 * s * (100 * config.n_layers * config.dim + 10 * config.vocab_size) + states
    if most < args.gpu_mem * GIB / 4:
        return None
    fits, text = verdict(config, args, plan_memory(config, args, recipe, args.world))
    if fits:
        return None
    problem = re.sub(r" +", " ", next(line for line in text.split("\n") if "not fit" in line))
    longest, _ = longest_context(config, args)
    hope = f"--ctx {write_ctx(longest.ctx)} would" if longest else "more ranks or --layers 1 may"
    return (f"{args.model} at --ctx {write_ctx(args.ctx)}: {problem}; {hope}; --dry-run says where "
            "it goes, --force tries all the same")


def gib(size):
    return f"{size / GIB:,.1f}"


def longest_context(config, args):
    """The longest context that fits, to 64k: (args for it, Report); (None, None) if not even 64k.

    What of the recipe was not asked for is fitted to each length. Memory grows almost linearly, so
    a line through two simulations tells where to look next. It ends with one that fits and, 64k
    longer, one that does not."""
    unit, seen = 64 * 1024, {}

    def needs(n):  # shares for n units
        if n not in seen:
            here = copy_of(args, ctx=n * unit, **args.asked)
            fit_recipe(config, here)
            seen[n] = here, plan_memory(config, here, recipe_of(here), args.world)
        return shares(config, *seen[n])
    low, high, points = 0, math.inf, (16, 32)  # low fits, high does not
    while high - low > 1:
        for n in points:
            low, high = (max(low, n), high) if max(needs(n)) <= 1 else (low, min(high, n))
        a, b = sorted(sorted(seen, key=lambda n: abs(n - (low or high)))[:2])
        edges = [a + (1 - x) * (b - a) / (y - x) for x, y in zip(needs(a), needs(b)) if y > x]
        points = [int(min(max(min(edges), low + 1), high - 1, 4 * low + 1))]
    return seen.get(low, (None, None))


def dry_run(config, args, recipe):
    """--dry-run: print where the memory goes, and whether it fits."""
    if args.road:
        return travel(road(config, args), args)
    if args.max_ctx:
        args, report = longest_context(config, args)
        if report is None:
            raise BadInput("--max-ctx: not even --ctx 64k fits: more ranks, or --offload-params")
        recipe = recipe_of(args)
        print(f"longest   {args.ctx:,} tokens (--ctx {write_ctx(args.ctx)}) fit, 64k more do not")
    else:
        report = plan_memory(config, args, recipe, args.world, args.full)
    print("recipe    " + ", ".join(f"{name} {getattr(recipe, name)}" for name in SWITCHES))
    print(verdict(config, args, report)[1])
    print(f"peak      {report.where}")
    for kind, size in sorted(report.kinds.items(), key=lambda item: -item[1]):
        if size > report.device / 1000:
            print(f"          {size / GIB:8.2f} GiB  {kind}")
    flops = step_flops(config, args.ctx, recipe) * args.grad_accum / args.cp
    print(f"time      {duration(flops / (UTILISATION * 989e12))} a step, if each rank computes its "
          f"{brief(flops)} FLOPs (recomputation included) at {UTILISATION:.0%} of an H100's 989 "
          "TFLOP/s")


# 9. The road -------------------------------------------------------------------------------------
# One row for each technique, in the order in which the memory runs out; each adds to the one above.

ROAD = (("plain", dict(attention="plain", cp=1, fsdp=False)),
        ("+ FSDP", dict(fsdp=True)),
        ("+ Ulysses", dict(attention="ulysses", cp=None)),
        ("+ checkpointing", dict(checkpoint=1)),
        ("+ offload", dict(offload=True)),
        ("+ tiling", dict(tile=None, stream=None)),
        ("+ UPipe", dict(attention="upipe", heads_per_stage=None)),
        ("+ keep_attention", dict(keep_attention=True)))


def road(config, args, job=None):
    """--road: rows of (name, Report, fits, tokens/s), simulated on --world ranks or measured."""
    own, rows = vars(args), []
    state = dict(heads_per_stage=0, checkpoint=0, keep_attention=False, offload=False, stream=False,
                 tile=0)
    for name, changes in ROAD:
        state.update({key: own[key] if value is None else value for key, value in changes.items()})
        here = copy_of(args, **state)
        recipe = recipe_of(here)
        if job:
            row = meet(here, job.world, job.device)
            if not here.fsdp:  # everyone has the whole model: FSDP over a group of one
                row.everyone = init_device_mesh(job.device.type, (job.world, 1),
                                                mesh_dim_names=("all", "one"))["one"]
            seen, times = measure(config, here, replace(recipe, group=row.group), row)
            rows.append((name, seen, True, seen and row.dp * here.ctx / times["seconds"]))
        else:
            world = args.world if here.fsdp else 1
            report = plan_memory(config, here, recipe, world, args.full)
            fits, _ = verdict(config, here, report)
            rows.append((name, report, fits, None))
    return rows


def measure(config, args, recipe, job):
    """A step for real: (Report, times); (None, None) if the GPU is too small for it.

    On a CPU the peak is the meter's, on CUDA the allocator's. times: "seconds" of the step, those
    in each of PARTS and, on CUDA, "reserved_bytes", what the allocator held for that peak."""
    cuda = job.device.type == "cuda"
    # One step to warm up, one that counts. A long one warms up with its attention inside documents:
    # all that is slow in a first step is in it, but not the minutes.
    short = torch.arange(0, args.ctx, 2**14) if args.ctx >= 2**19 else None
    gc.collect()  # FSDP's models have cycles: the last row's
    try:
        model, _, tokens = prepare(job, config, args)
        for docs in (short, None):
            model.zero_grad()
            synchronize(job.device)
            dist.barrier()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            with stopwatch(job.device) as times:
                begin = time.perf_counter()
                model(tokens, tokens, recipe, args.ctx, docs).backward()
                synchronize(job.device)
                dist.barrier()
                times["seconds"] = time.perf_counter() - begin
        if cuda:
            times["reserved_bytes"] = torch.cuda.max_memory_reserved()
            peak = torch.cuda.max_memory_allocated()
            return Report(peak, model.store.slab_bytes, "measured", {}, []), times
        del model
        return report_of(metered_step(job, config, args, recipe)), times
    except torch.OutOfMemoryError:
        synchronize(job.device)  # a copy may be under way to memory that is free by now
        return None, None


PARTS = {"attention_seconds": ((upipe, "flash_forward"), (upipe, "flash_backward")),
         "waiting_seconds": ((upipe, "arrived"), (upipe.HostStore, "settle"))}


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


def travel(rows, args):
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
    if args.json:
        Path(args.json).write_text(json.dumps([dict(
            name=name, fits=fits, tokens_per_second=speed, **(vars(report) if report else {}))
            for name, report, fits, speed in rows], indent=1))
    if args.plot:
        plot_road(args.plot, rows, args)


def plot_road(path, rows, args):
    """Bars of the road with the card's capacity, and the memory of the last row over one step."""
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot
    names, reports, fit = zip(*((name, report, fits) for name, report, fits, _ in rows if report))
    last = reports[-1]
    on_host = {"parked", *(BETWEEN_STEPS if args.offload_params else ())}
    history = [{kind: size / GIB for kind, size in kinds.items() if kind not in on_host}
               for _, kinds in last.timeline]  # a measured peak on CUDA has none
    pyplot.rc("font", size=13)
    figure, axes = pyplot.subplots(1, 2 if history else 1, figsize=(17, 6.5), squeeze=False,
                                   layout="constrained")
    left, usable = axes[0, 0], args.gpu_mem - RESERVED / GIB
    sizes = [report.device / GIB for report in reports]
    bars = left.barh(names, sizes, log=True, color=[
        "tab:green" if fits else "tab:orange" if size <= usable else "tab:red"
        for size, fits in zip(sizes, fit)])
    left.barh(names[:1], 0, color="tab:orange", label="too much for the host or a kernel call")
    left.axvline(usable, color="black", linestyle="--", label=f"{usable:.0f} GiB usable on a card")
    digits = [3 if size < 1 else 1 if size < 100 else 0 for size in sizes]
    labels = [f"{size:,.{n}f}" for size, n in zip(sizes, digits)]
    for text in left.bar_label(bars, labels, padding=5):
        text.set_backgroundcolor("white")  # it may lie on the line
    left.set(xlabel="GiB per GPU at the peak", xlim=(min(sizes) / 8, max(sizes) * 10),
             title=f"{args.model}, {write_ctx(args.ctx)} tokens, {args.world} ranks")
    left.invert_yaxis()
    left.legend(loc="upper center", bbox_to_anchor=(0.45, -0.1), ncols=2, frameon=False)
    if history:
        plot_step(axes[0, 1], history, pyplot.get_cmap("tab20").colors)
        few = " of a model of fewer layers" if args.dry_run and not args.full else ""
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


def stand_in():
    """Let collectives bring this rank's own data, as if all ranks had the same: finite numbers, at
    the cost of a copy."""
    def all_gather_into_tensor(output_tensor, input_tensor, **_):
        whole = output_tensor.view(-1, input_tensor.numel())
        whole.copy_(input_tensor.reshape(1, -1).expand(len(whole), -1))

    def reduce_scatter_tensor(output, input, **_):
        output.copy_(input.view(-1)[:output.numel()].view_as(output))

    def all_to_all_single(output, input, **_):
        output.copy_(input)
    for collective in (all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single):
        setattr(dist, collective.__name__, collective)


def one_rank(config, args, recipe, job):
    """--one-rank-of: one step of rank 0, measured, beside what the dry run says of it."""
    job.say(f"notice    this is rank 0 of {job.world}, alone: where others would send data it "
            "takes its own, so the loss means nothing")
    stand_in()
    seen, times = measure(config, args, recipe, job)
    if seen is None:
        raise torch.OutOfMemoryError
    dist.destroy_process_group()
    plan = plan_memory(config, args, recipe, job.world)
    attention, rest = (flops / job.cp for flops in forward_flops(config, args.ctx))
    seconds, inside = times["seconds"], times["attention_seconds"]
    card, peak = peak_flops(job, args)
    rate = 3 * (attention + rest) / seconds
    inner = attention * (1 + backward_passes(recipe)[0]) / inside
    held = f", {times['reserved_bytes'] / GIB:.3f} reserved" if "reserved_bytes" in times else ""
    print(f"measured  {seconds:.2f} s a step, {args.ctx / seconds:,.0f} tokens/s"
          + (f", MFU {rate / peak:.1%} of {card}" if peak else "") +
          f"\nattention {inside:.2f} s of it, {brief(inner)}FLOP/s; waiting for copies "
          f"{times['waiting_seconds']:.2f} s\n"
          f"memory    {seen.device / GIB:.3f} GiB measured, {plan.device / GIB:.3f} simulated "
          f"({seen.device / plan.device - 1:+.1%}){held}\n"
          f"host      {seen.host / GIB:.3f} GiB measured, {plan.host / GIB:.3f} simulated")
    if args.json:
        Path(args.json).write_text(json.dumps(dict(
            times, tokens_per_second=args.ctx / seconds, device_bytes=seen.device,
            simulated_device_bytes=plan.device, host_bytes=seen.host, kernel=recipe.kernel,
            simulated_host_bytes=plan.host, mfu=rate / peak if peak else None,
            flops_per_second=rate, attention_flops_per_second=inner)))


def peak_flops(job, args):
    """(name of the card, its dense bfloat16 FLOP/s), or (name, None) where that is not known."""
    if job.device.type != "cuda":
        return "this CPU", None
    card = torch.cuda.get_device_name(job.device)
    known = (f for name, f in PEAK_FLOPS.items() if name in card and args.dtype == "bfloat16")
    return card, next(known, None)


# 10. Weights in and out ---------------------------------------------------------------------------
# Hugging Face's folders: config.json, and safetensors under the names that upipe.GPT has, with
# "model." before most. torch's distributed checkpoint reads and writes them by shard: no rank ever
# holds a whole model, and the files are cut as those who published them liked.

QK_NORM = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # the architectures of upipe.GPT
PLAIN = dict(hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False,
             partial_rotary_factor=1.0)  # what config.json may only say in this way


def need(package, flag):
    if not installed(package):
        raise BadInput(f"{flag} needs {package}: pip install {package}")


def read_config(folder):
    """config.json -> GPTConfig. BadInput, by name, for what upipe.GPT is not."""
    path = Path(folder) / "config.json"
    try:
        c = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"--init {folder}: {error}")
    name = (c.get("architectures") or [c.get("model_type")])[0]
    if name not in QK_NORM:
        raise BadInput(f"{path}: architecture {name} is not supported: only {', '.join(QK_NORM)}")
    for key, value in PLAIN.items():
        if c.get(key) not in (None, value):
            raise BadInput(f"{path}: {key}={c[key]!r} is not supported: only {value!r}")
    # transformers 5 has all of it in rope_parameters, earlier ones in two places
    rope = c.get("rope_parameters") or {**(c.get("rope_scaling") or {}),
                                        "rope_theta": c.get("rope_theta", 10_000.0)}
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    theta = rope.pop("rope_theta")
    try:
        return GPTConfig(
            c["vocab_size"], c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"],
            c.get("num_key_value_heads") or c["num_attention_heads"],
            c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
            c["intermediate_size"], theta, None if rope["rope_type"] == "default" else rope,
            c["rms_norm_eps"], QK_NORM[name], c.get("tie_word_embeddings", False))
    except KeyError as error:
        raise BadInput(f"{path}: {error} is missing")
    except ValueError as error:
        raise BadInput(f"{path}: {error}")


def write_config(path, config, ctx, dtype):
    c = config
    name = next(name for name, qk_norm in QK_NORM.items() if qk_norm == c.qk_norm)
    path.write_text(json.dumps(dict(
        architectures=[name], model_type=name.removesuffix("ForCausalLM").lower(),
        vocab_size=c.vocab_size, hidden_size=c.dim, num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim,
        intermediate_size=c.ffn_dim, rope_theta=c.rope_theta, rope_scaling=c.rope_scaling,
        rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tie_embeddings,
        max_position_embeddings=ctx, torch_dtype=dtype, **PLAIN), indent=2))


def published_name(name):
    return name if name.startswith("lm_head.") else f"model.{name}"


def load_weights(job, config, model, folder):
    """Fill the shards of `model` from the safetensors of `folder`; BadInput if they do not fit."""
    import torch.distributed.checkpoint as dcp
    from safetensors import SafetensorError
    ours = {published_name(name): p.detach() for name, p in model.named_parameters()}

    def work():
        try:
            found = dcp.HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
        except (OSError, SafetensorError) as error:
            raise BadInput(f"--init {folder}: {error}")
        if config.tie_embeddings:
            found.pop("lm_head.weight", None)  # some folders have a second copy
        for name in sorted(ours.keys() | found.keys()):
            if name not in found:
                raise BadInput(f"--init {folder}: tensor {name} is missing")
            if name not in ours:
                raise BadInput(f"--init {folder}: tensor {name} has no place in this model")
            if found[name].size != ours[name].shape:
                raise BadInput(f"--init {folder}: tensor {name} is {list(found[name].size)}, and "
                               f"config.json says {list(ours[name].shape)}")
        return None, 0
    together(job, work)
    dcp.load(ours, storage_reader=dcp.HuggingFaceStorageReader(folder))


def export(job, config, model, args):
    """Write the model to --export, in --dtype, as transformers wants it: files of up to 4 GiB."""
    import torch.distributed.checkpoint as dcp
    folder, dtype = Path(args.export), getattr(torch, args.dtype)
    part = folder.with_name(f".{folder.name}")
    tensors = {published_name(name): p.detach().to(dtype) for name, p in model.named_parameters()}
    sizes = np.cumsum([x.numel() * x.element_size() for x in tensors.values()])
    files = dict(zip(tensors, (1 + sizes // 2**32).tolist()))
    on_rank_0(job, lambda: sweep(part))
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(
        part, fqn_to_index_mapping=files, save_distributed=True, enable_consolidation=True,
        thread_count_consolidation=8))

    def finish():
        sweep(part / "sharded")
        write_config(part / "config.json", config, args.ctx, args.dtype)
        for path in Path(args.init).glob("*token*.json") if args.init else ():
            shutil.copy(path, part)
        part.rename(folder)
    on_rank_0(job, finish)
    job.say(f"export    {folder}")


# 11. Checkpoints ----------------------------------------------------------------------------------
# A checkpoint is a folder step-00000100 in --save: run.json, and the tensors by torch's distributed
# checkpoint. Each rank writes its own shards, and any number of ranks reads them. It is written
# under a name with a dot and renamed when all of it is there, so a crash at any time leaves whole
# checkpoints, and rubbish with a dot that the next one sweeps away.
#
# All there is to know: weights, AdamW's moments, the step, and how many windows were drawn, since
# part 4 computes which comes next. No random number is drawn on the way; the generator is saved for
# those who add a dropout.

# Flags that a resumed run takes from run.json: those that none may change, and those that one may.
FIXED = ("model", "layers", "init", "ctx", "seed", "task", "docs")
REMEMBERED = (*FIXED, *SWITCHES, "data", "tokenizer", "steps", "lr", "warmup", "min_lr",
              "weight_decay", "grad_clip", "grad_accum", "eval_every", "eval_windows", "dtype",
              "cp")


@dataclass
class Run:
    step: int = 0   # steps that are done
    drawn: int = 0  # windows that all groups together have been trained on


def on_rank_0(job, work):
    """Let rank 0 do it, and all wait until it is done."""
    if job.rank == 0:
        work()
    dist.barrier()


def sweep(folder):
    shutil.rmtree(folder, ignore_errors=True)


def checkpoints(folder):
    """The whole ones, oldest first."""
    return sorted(Path(folder).glob("step-*"))


def find_checkpoint(args):
    """What the newest checkpoint in --save has in run.json, and its path; None if there is none."""
    if not args.save:
        raise BadInput("--resume needs --save, the folder with the checkpoints")
    found = checkpoints(args.save)
    if not found:
        return None
    try:
        return {**json.loads((found[-1] / "run.json").read_text()), "path": found[-1]}
    except (OSError, ValueError) as error:
        raise BadInput(f"--resume: {error}")


def state_of(model, optimizer):
    """Every tensor that a step changes, by name; by the same on any number of ranks."""
    state = {"rng": torch.get_rng_state()}
    for name, p in model.named_parameters():
        state[f"model.{name}"] = p.detach()
        state.update({f"adamw.{name}.{key}": x for key, x in optimizer.state[p].items()})
    return state


def save(job, args, config, model, optimizer, run, tokens):
    """Write a checkpoint, and remove all but the last --keep."""
    import torch.distributed.checkpoint as dcp
    folder, name = Path(args.save), f"step-{run.step:08d}"
    flags = {name: getattr(args, name) for name in REMEMBERED}
    facts = dict(step=run.step, drawn=run.drawn, tokens=tokens, world=job.world,
                 config=asdict(config), flags=flags)

    def begin():
        for rubbish in folder.glob(".step-*"):
            sweep(rubbish)
        part.mkdir(parents=True)
        (part / "run.json").write_text(json.dumps(facts, indent=1))

    def finish():
        part.rename(folder / name)
        for old in checkpoints(folder)[:-args.keep]:
            sweep(old.rename(folder / f".{old.name}"))
    part = folder / f".{name}"
    on_rank_0(job, begin)
    dcp.save(state_of(model, optimizer), checkpoint_id=part)
    on_rank_0(job, finish)
    job.say(f"saved     {folder / name}")


def make_folders(job, args):
    """Make what --save and the others name: what cannot be written shows now, not in a week."""
    fault, files = None, [Path(x) for x in (args.log, args.loss_by_position) if x]
    folders = [Path(x) for x in (args.save, args.profile) if x] + [path.parent for path in files]
    if args.export:
        folders.append(Path(args.export).parent)
    for folder in folders if job.rank == 0 else ():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fault = str(error)
        if not os.access(folder, os.W_OK):
            fault = fault or f"cannot write to {folder}"
    agree(job, fault)
    unseen = [folder for folder in folders[:1] if args.save and not folder.is_dir()]
    agree(job, f"--save {args.save}: rank {job.rank} does not see this folder of rank 0: it must "
          "be on a disk that all machines share" if unseen else None)


def begin(job, args, config, model, optimizer, tokens):
    """The Run to go on with: from a checkpoint, from published weights, or from the start."""
    import torch.distributed.checkpoint as dcp
    saved = args.saved
    step = agree(job, None, saved["step"] if saved else 0)
    if step != job.world * (saved["step"] if saved else 0):
        raise BadInput(f"--save {args.save}: the ranks see different checkpoints there: it must be "
                       "one folder for all")
    if not saved:
        if args.resume:
            job.say(f"resume    no checkpoint in {args.save} yet: from the start")
        if args.init:
            load_weights(job, config, model, args.init)
        return Run()
    if saved["tokens"] != tokens:
        raise BadInput(f"--data has {tokens} tokens to train on, the run in {args.save} has "
                       f"{saved['tokens']}: its windows would be others")
    make_moments(model, optimizer)  # there must be some to load into
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=saved["path"])
    torch.set_rng_state(state["rng"])
    job.say(f"resume    {saved['path']}, written by {saved['world']} ranks")
    return Run(saved["step"], saved["drawn"])


class Stop:
    """SIGTERM or SIGUSR1: stop after this step. The second one stops at once.

    Python runs a handler between two of its own instructions, and in the middle of a step there
    may be none for minutes. But the signal's number goes into a pipe at once: a thread waits."""

    def __init__(self):
        self.asked = False
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self.watch, args=(read,), daemon=True).start()

    def watch(self, pipe):
        while number := os.read(pipe, 1)[0]:
            if number == signal.SIGINT:
                continue  # Ctrl-C is Python's own
            if self.asked:
                os._exit(128 + number)
            self.asked = True

    def agreed(self, job):
        """Whether any rank was asked to."""
        return agree(job, None, self.asked) > 0


# 12. Text -----------------------------------------------------------------------------------------
# Without a tokenizer a text is its bytes, and nothing has to be prepared. With one, its tokens are
# written to a cache once; from then on they are mapped like any other token file.


class Bytes:
    """The tokenizer that needs no file."""
    size, begin = 256, []

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Tokenizer:
    """A tokenizer.json."""

    def __init__(self, path):
        need("tokenizers", f"tokenizer {path}")
        from tokenizers import Tokenizer as Inner
        try:
            self.inner, self.file = Inner.from_file(str(path)), Path(path).read_bytes()
        except Exception as error:  # whatever the library raises: it is the file that is wrong
            raise BadInput(f"--tokenizer {path}: {error}")
        self.size = self.inner.get_vocab_size()
        self.begin = self.inner.encode("").ids  # of a document: <|begin_of_text|>, or nothing

    def encode(self, text):
        return self.begin + self.inner.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts):
        """Many texts, on all cores."""
        return [x.ids for x in self.inner.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids):
        return self.inner.decode(ids, skip_special_tokens=False)


def find_tokenizer(args):
    beside = Path(args.init or "") / "tokenizer.json"
    if args.tokenizer or args.init and beside.exists():
        return Tokenizer(args.tokenizer or beside)
    return Bytes()


def pieces(path):
    """A text in pieces of about a megabyte that end with a line."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        while piece := file.read(2**20):
            yield piece + file.readline()


def tokenize(paths, tokenizer, show=False):
    """The cached token ids of text files, one array per file; writes them if they are not there."""
    digest = hashlib.sha256(tokenizer.file)
    for path in paths:
        digest.update(f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "upipe"
    cache, ends = home / digest.hexdigest()[:32], home / f"{digest.hexdigest()[:32]}.json"
    dtype = np.dtype("<u2" if tokenizer.size <= 2**16 else "<u4")
    if not ends.exists():
        write_cache(paths, tokenizer, cache, dtype, show)
    ids, ends = np.memmap(cache.with_suffix(".bin"), dtype, "r"), json.loads(ends.read_text())
    return [ids[a:b] for a, b in zip([0] + ends, ends)]


def write_cache(paths, tokenizer, cache, dtype, show):
    """cache.bin, all ids, and then cache.json, where each file's ids end."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    part, ends, count = cache.with_suffix(f".{os.getpid()}"), [], 0
    todo = ((i, piece) for i, path in enumerate(paths) for piece in pieces(path))
    size = sum(path.stat().st_size for path in paths)
    with open(part, "wb") as file, tqdm(total=size, unit="B", unit_scale=True, desc="tokenize",
                                        disable=not show) as bar:
        while batch := list(itertools.islice(todo, 64)):
            for (i, text), ids in zip(batch, tokenizer.encode_all([text for _, text in batch])):
                ids = (tokenizer.begin if i >= len(ends) else []) + ids
                ends += [count] * (i + 1 - len(ends))
                file.write(np.array(ids, dtype).tobytes())
                count = ends[-1] = ends[-1] + len(ids)
                bar.update(len(text.encode()))
    part.rename(cache.with_suffix(".bin"))
    part.write_text(json.dumps(ends))
    part.rename(cache.with_suffix(".json"))


@torch.no_grad()
def sample(job, model, recipe, tokenizer, args):
    """--prompt and --sample tokens more, drawn at temperature 0.8.

    Each token is a whole forward pass over all before it (up to ctx), split over the ranks like any
    other: there is no cache. The rank with the last position draws, for everyone."""
    ids, generator = tokenizer.encode(args.prompt) or [0], torch.Generator().manual_seed(args.seed)
    for _ in range(args.sample):
        window = torch.tensor(ids[-args.ctx:])
        s, last = -(-len(window) // job.cp), len(window) - 1
        here = torch.zeros(s * job.cp, dtype=torch.int64)
        here[:len(window)] = window
        here = here[job.cp_rank * s:][:s].to(job.device)
        at = model.logits(here, recipe)[last % s]  # [V]: the right row on one rank of each group
        chances = (at.float().cpu() / 0.8).softmax(-1)
        token = torch.multinomial(chances, 1, generator=generator).to(job.device)
        dist.broadcast(token, src=last // s)  # group 0 is ranks 0 to cp - 1
        ids.append(token.item())
    return tokenizer.decode(ids)


# 13. Looking inside -------------------------------------------------------------------------------


class Log:
    """--log: one JSON object per line, by rank 0. A resumed run writes on where it left off."""

    def __init__(self, job, path, step):
        self.path = path if job.rank == 0 else None
        if self.path:
            old = Path(path).read_text().splitlines() if step and Path(path).exists() else []
            kept = [line for line in old if json.loads(line)["step"] <= step]
            Path(path).write_text("".join(f"{line}\n" for line in kept))

    def __call__(self, **record):
        if self.path:
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")


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
def loss_by_position(job, model, data, ctx, recipe, docs, buckets=64):
    """Mean loss in equal parts of the context, over the validation windows -> (ends, losses)."""
    starts = data.held_out + [len(data.valid)] * (-len(data.held_out) % job.dp)
    batch, _ = load(job, data.valid, starts[job.dp_rank::job.dp], ctx, docs)
    sums = torch.zeros(2, buckets, dtype=torch.float64, device=job.device)
    for inputs, labels, *docs in batch:
        inputs, labels = inputs.to(job.device), labels.to(job.device)
        losses = model.token_losses(inputs, labels, recipe, *docs).double()
        at = torch.arange(len(inputs), device=job.device) + job.cp_rank * len(inputs)
        bucket = (at * buckets // ctx).clamp(max=buckets - 1)
        sums[0].index_add_(0, bucket, losses)
        sums[1].index_add_(0, bucket, (labels != IGNORE).double())
    dist.all_reduce(sums)
    return [ctx * (i + 1) / buckets for i in range(buckets)], (sums[0] / sums[1]).tolist()


def plot_by_position(path, ends, losses, title):
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(ends, losses, drawstyle="steps-pre")
    axes.set(xlabel="position in the context", ylabel="nats per token", title=title)
    figure.savefig(path, dpi=120)


# 14. Main -----------------------------------------------------------------------------------------


def recipe_of(args):
    return Recipe(**{name: getattr(args, name) for name in SWITCHES})


def copy_of(args, **changes):
    return argparse.Namespace(**{**vars(args), **changes})


def fit_machine(args):
    """The memory of this machine, or of the one that --dry-run is to think of."""
    cuda, here = args.device == "cuda", 8 if args.dry_run else launched()[3]
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    card = ram / here + RESERVED / GIB  # of a CPU, a rank has its part
    if args.dry_run and cuda:
        ram, card = 2000, 80
    elif cuda:
        rank, _, local_rank, _ = launched()
        card = torch.cuda.get_device_properties(local_rank).total_memory / GIB
        if args.dtype == "bfloat16" and torch.cuda.get_device_capability(local_rank) < (8, 0):
            args.dtype = "float32"
            if rank == 0:
                print("notice    this GPU does not compute in bfloat16: float32 instead")
    args.gpu_mem, args.host_mem = args.gpu_mem or card, args.host_mem or ram
    args.gpus_per_node = args.gpus_per_node or here


def fit_recipe(config, args):
    """What of the recipe was not asked for, as it suits this machine and --ctx."""
    cuda = args.device == "cuda"
    if args.checkpoint is None:  # keeping x and attention's output of every block is the fastest
        width = config.n_layers * (config.dim + config.n_heads * config.head_dim)
        ranks = min(args.world, args.gpus_per_node)
        kept = width * getattr(torch, args.dtype).itemsize * args.ctx / args.cp * ranks
        room = not cuda or args.keep_attention or kept < 0.9 * args.host_mem * GIB
        args.checkpoint = 1 if room else 4
    for name, value in (("keep_attention", args.checkpoint == 1),
                        ("offload", cuda and args.checkpoint >= 1)):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.stream is None:  # below, a stage of attention is too short to hide the reading
        args.stream = args.offload and args.ctx >= 2**20


def choose_model(args, tokenizer):
    """The GPTConfig that flags, --init or a checkpoint ask for."""
    if args.saved:
        flags, where = args.saved["flags"], args.saved["path"]
        for name in FIXED:
            if getattr(args, name) != flags[name]:
                raise BadInput(f"--{name} was {flags[name]} in {where}, and a run keeps it: to "
                               "start another one from its weights, --export them and --init")
        return GPTConfig(**args.saved["config"])
    if args.init:
        config = read_config(args.init)
    else:
        config = PRESETS[args.model]
        config = replace(config, n_layers=args.layers or config.n_layers)
        if args.model == "tiny":
            config = replace(config, vocab_size=tokenizer.size)
    if tokenizer.size > config.vocab_size and (args.sample or type(tokenizer) is not Bytes):
        raise BadInput(f"{args.model} has {config.vocab_size} tokens, its tokenizer "
                       f"{tokenizer.size}")
    return config


def refuse_early(args, config):
    """What can be known to go wrong in the end, before anything begins."""
    if args.save and not args.resume and checkpoints(args.save):
        raise BadInput(f"--save {args.save} has checkpoints already: --resume, or another folder")
    if args.export and Path(args.export).exists():
        raise BadInput(f"--export {args.export} exists already")
    if args.export or args.init:
        need("safetensors", "--export" if args.export else "--init")
    if args.loss_by_position:
        need("matplotlib", "--loss-by-position")
    if args.plot:
        need("matplotlib", "--plot")
    if args.task == "recall" and (config.vocab_size < 256 or args.ctx < 8 or args.docs is not None):
        raise BadInput("--task recall needs a vocabulary of 256, a --ctx of 8, and no --docs")


def settle(args):
    """Model, recipe and tokenizer, or BadInput: flags, files and machine, but no other rank."""
    _, world, _, local_world = launched()
    world = args.world = (args.world or 8) if args.dry_run else args.one_rank_of or world
    args.cp = args.cp or world
    if world % args.cp:
        legal = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise BadInput(f"--cp {args.cp} does not divide the {world} ranks of this job: use {legal}")
    if not args.dry_run and args.device == "cuda" and local_world > torch.cuda.device_count():
        raise BadInput(f"--device cuda: {local_world} ranks on this machine, and PyTorch finds "
                       f"{torch.cuda.device_count()} GPUs: start one per GPU, or say --device cpu")
    tokenizer = find_tokenizer(args)
    config = choose_model(args, tokenizer)
    fit_machine(args)
    args.asked = {name: getattr(args, name) for name in
                  ("checkpoint", "keep_attention", "offload", "stream")}
    fit_recipe(config, args)
    recipe = recipe_of(args)
    recipe.check(config, args.cp)
    return config, recipe, tokenizer


@dataclass
class Data:
    train: Tokens  # or Recall
    valid: Tokens
    held_out: list  # where the windows start that evaluation sees
    compare: str    # what a simple method reaches on them, for people


def gather(job, args, config, tokenizer):
    """The Data that --task, --data and the tokenizer say."""
    if args.task == "recall":
        train = Recall(args.seed, args.ctx, 2**20)
        valid = Recall(args.seed + 2**32, args.ctx, args.eval_windows)
        job.say(f"data      {train.pairs} keys and values at the start of each window, asked for "
                "at its end")
        return Data(train, valid, eval_starts(valid, args.ctx, args.eval_windows),
                    f" (chance: {Recall.CHANCE:.3f})")
    encoded = None if isinstance(tokenizer, Bytes) else tokenizer

    def work():
        train, valid = open_data(args.data, config.vocab_size, args.ctx, encoded)
        return (train, valid), len(train)
    if encoded:  # one rank of each machine writes the cache
        first = launched()[2] == 0
        together(job, lambda: work() if first else (None, 0))
    (train, valid), total = together(job, work)
    same = total == len(train) * job.world
    agree(job, None if same else f"--data: rank {job.rank} has {len(train)} tokens, others do not")
    held_out = eval_starts(valid, args.ctx, args.eval_windows)
    job.say(f"data      {args.data or 'the Python standard library'}: {len(train):,} tokens, and "
            f"{len(valid):,} to validate: {len(held_out)} windows")
    compare = ""
    if job.rank == 0 and config.vocab_size >= 256 and train.parts[0].dtype == np.uint8:
        compare = f" (bigrams: {bigram_loss(train, valid, held_out, args.ctx):.3f})"
    return Data(train, valid, held_out, compare)


def fit(job, args, config, recipe, model, optimizer, data, run):
    """Train from run.step to --steps -> whether it came so far: a signal ends it after any step."""
    tokens = args.grad_accum * job.dp * args.ctx
    flops = 3 * sum(forward_flops(config, args.ctx)) * args.grad_accum * job.dp
    _, peak = peak_flops(job, args)
    blocks = config.n_layers * args.grad_accum * (1 + backward_passes(recipe)[0])
    ahead = run.drawn - run.step * args.grad_accum * job.dp
    log, stop = Log(job, args.log, run.step), Stop() if args.save else None
    began, first = time.perf_counter(), run.step
    for step in range(first, max(first, args.steps) + 1):
        if step >= args.steps or args.eval_every and step % args.eval_every == 0:
            rounds = -(-len(data.held_out) // job.dp)
            with progress_bar(job, model, "evaluation", config.n_layers * rounds):
                valid = evaluate(job, model, data.valid, data.held_out, args.ctx, recipe, args.docs)
            job.say(f"step {step:5d} | validation loss {valid:.4f} nats per token{data.compare}")
            log(step=step, validation_loss=valid)
        if step >= args.steps:
            break
        begin = time.perf_counter()
        lr = learning_rate(args, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        starts = train_starts(job, data.train, args.ctx, args.seed, step, args.grad_accum, ahead)
        batch, total = load(job, data.train, starts, args.ctx, args.docs)
        inside = args.profile and step == min(first + 1, args.steps - 1)  # the first is not typical
        with (profiled(job, args.profile) if inside else nullcontext(),
              progress_bar(job, model, f"step {step + 1}", blocks)):
            loss, norm = train_step(job, model, optimizer, batch, total, recipe,
                                    args.grad_clip, step + 1)
        seconds = time.perf_counter() - begin
        line = (f"step {step + 1:5d} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.3f} | "
                f"{tokens / seconds:,.0f} tokens/s | {seconds:.2f} s")
        record = dict(step=step + 1, loss=loss, lr=lr, norm=norm, seconds=seconds,
                      tokens_per_second=tokens / seconds, drawn=run.drawn + len(starts) * job.dp)
        if job.device.type == "cuda":
            line += f" | MFU {flops / seconds / job.world / peak:.1%}" if peak else ""
            record["peak_bytes"] = torch.cuda.max_memory_allocated()
            line += f" | peak {record['peak_bytes'] / 2**30:.1f} GiB"
            torch.cuda.reset_peak_memory_stats()
        job.say(line)
        log(**record)
        run.step, run.drawn = step + 1, record["drawn"]
        stopping = stop is not None and stop.agreed(job)
        due = args.save_every and run.step % args.save_every == 0
        if args.save and (stopping or due or run.step == args.steps):
            save(job, args, config, model, optimizer, run, len(data.train))
        if stopping:
            job.say(f"stopped   after step {run.step}: --save {args.save} --resume goes on")
            return False
    steps = run.step - first
    job.say(f"done      {steps} steps, {brief(steps * tokens)} tokens in "
            f"{duration(time.perf_counter() - began)}, validation loss {valid:.4f}{data.compare}")
    return True


def finish(job, args, config, recipe, model, data, tokenizer):
    """What a trained model is good for."""
    if args.export:
        export(job, config, model, args)
    if args.loss_by_position:
        ends, losses = loss_by_position(job, model, data, args.ctx, recipe, args.docs)
        title = f"{args.model} on {args.data or 'the Python standard library'}"
        on_rank_0(job, lambda: plot_by_position(args.loss_by_position, ends, losses, title))
        job.say(f"position  {args.loss_by_position}: loss {losses[0]:.3f} up to token "
                f"{ends[0]:,.0f}, {losses[-1]:.3f} after {ends[-2]:,.0f}")
    if args.sample:
        job.say(sample(job, model, recipe, tokenizer, args))


def main(argv=None):
    args = parse_args(argv)
    config, recipe, tokenizer = settle(args)
    refuse_early(args, config)
    if args.dry_run:
        return dry_run(config, args, recipe)
    fault = None  # rank 0 decides for all: ranks that measure for themselves might disagree
    if launched()[0] == 0 and not (args.force or args.road):
        fault = args.device == "cpu" and too_slow(config, args, recipe) or None
        fault = fault or too_large(config, args, recipe)
    job = join(args)
    recipe = replace(recipe, group=job.group)
    recipe = replace(recipe, kernel=choose_kernel(config, args, job, recipe))
    print_plan(config, args, job, recipe)
    agree(job, fault)
    if args.one_rank_of:
        return one_rank(config, args, recipe, job)
    if args.road:
        rows = road(config, args, job)
        return travel(rows, args) if job.rank == 0 else None

    make_folders(job, args)
    data = gather(job, args, config, tokenizer)
    model, optimizer = build(config, args, job)
    run = begin(job, args, config, model, optimizer, len(data.train))
    if fit(job, args, config, recipe, model, optimizer, data, run):
        finish(job, args, config, recipe, model, data, tokenizer)
    dist.destroy_process_group()


def out_of_memory(argv=None):
    """The line for a GPU that is full: the recipe, and the next switch to turn."""
    args = parse_args(argv)
    settle(args)
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
