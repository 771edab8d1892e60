"""Train a GPT whose context is split over ranks. The techniques are in upipe.py; this is the job.

    python train.py                                   one process: no launcher, no port
    torchrun --nproc-per-node=2 train.py              two CPU cores: `tiny` on Python's own sources
    torchrun --nproc-per-node=4 train.py --cp 2       two sequences at a time, each on two ranks
    torchrun --nproc-per-node=8 train.py --ctx 5m     eight GPUs: llama3-8b on 5 x 2^20 tokens

1. Flags   2. Settings   3. Ranks and groups   4. Data   5. Sharding   6. A step
7. Checkpoints   8. The loop   9. Main

Two kinds of parallelism share the ranks. --cp of them (C in upipe.py) split one sequence; world/cp
such groups work on a sequence each. Weights, gradients and optimizer state are sharded over *all*
ranks by FSDP. The loss of a rank is its part of one sum over all labels of a step, so gradients
are added up, never averaged, and no loss is ever multiplied by anything.

What is not the job itself is in extras/, and is imported by the flag that asks for it: the dry run,
weights of Hugging Face, tokenizers, pictures.
"""
import os

# Tensors this long fragment fixed segments. PyTorch reads the variable once, so before its import.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
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
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard,
    register_fsdp_forward_method)
from tqdm import tqdm

import upipe
from upipe import BadInput, GPT, GPTConfig, IGNORE, PRESETS, Recipe, stages

GIB = 2**30
NO_ID = -1  # no token

# 1. Flags -----------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse's own would print its usage on every rank
        raise BadInput(message)


def length(text):
    """'8k' -> 8192, '5m' -> 5242880, '4096' -> 4096."""
    match = re.fullmatch(r"([0-9]+)([km]?)", text.lower())
    tokens = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2]] if match else 0
    if tokens < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no length: give tokens as 4096, 128k or 5m")
    return tokens


def write_length(tokens):
    """5242880 -> '5m'."""
    units = ((2**20, "m"), (2**10, "k"), (1, ""))
    return next(f"{tokens // unit}{name}" for unit, name in units if tokens % unit == 0)


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


SWITCH = argparse.BooleanOptionalAction
FLAGS = {  # group: {flag: what argparse takes}; None, where no default stands, is decided in part 2
    "what to train": {
        "--model": dict(choices=PRESETS, help="default: tiny on a CPU, llama3-8b on GPUs"),
        "--layers": dict(type=number(int, 1), help="number of blocks, for trials (default: all)"),
        "--ctx": dict(type=length, help="tokens per sequence (default: 512 for tiny, else 128k)"),
        "--data": dict(help="text file or folder, read as bytes; .bin (uint16, or uint32 where the "
                       "vocabulary needs it); .npy (default: sources of Python's library)"),
        "--task": dict(choices=("text", "recall"), default="text",
                       help="recall: keys and values at the start, asked for at the end"),
        "--tokenizer": dict(metavar="FILE", help="a tokenizer.json (default: the one in --init)"),
        "--docs": dict(type=number(int, 0), nargs="?", const=NO_ID, metavar="ID", help="attention "
                       "stays in a document: a file, or what follows a token ID")},
    "how memory is held": {  # the fields of upipe.Recipe, and how many ranks share a sequence
        "--cp": dict(type=number(int, 1), help="ranks that share one sequence (default: all)"),
        "--attention": dict(choices=("plain", "ulysses", "upipe"), default="upipe"),
        "--heads-per-stage": dict(type=number(int, 0), default=0,
                                  help="over all ranks; 0 = fewest"),
        "--checkpoint": dict(type=number(int, 0), help="blocks per segment; 0 = off (default: 1, "
                             "or 4 where the host has no room for more)"),
        "--keep-attention": dict(action=SWITCH,
                                 help="run it once only (default: with --checkpoint 1)"),
        "--offload": dict(action=SWITCH,
                          help="checkpoints wait in host memory (default: on GPUs)"),
        "--stream": dict(action=SWITCH,
                         help="and come back tile by tile (default: from 1m tokens on)"),
        "--offload-params": dict(action=SWITCH, default=False, help="weights, gradients and "
                                 "AdamW's moments live in host memory"),
        "--tile": dict(type=number(int, 0), help="tokens; 0 = off (default: CPU 128, GPU 4096)"),
        "--kernel": dict(default="auto", help="attention kernel (default: the best one here)")},
    "optimizer": {
        "--steps": dict(type=number(int, 0), help="default: 600 for tiny, else 100"),
        "--lr": dict(type=number(float, 0), help="peak rate (default: 2e-3 for tiny, else 3e-4)"),
        "--warmup": dict(type=number(int, 0), help="steps (default: a twentieth of --steps)"),
        "--min-lr": dict(type=number(float, 0),
                         help="end of the cosine (default: a tenth of --lr)"),
        "--weight-decay": dict(type=number(float, 0), default=0.1,
                               help="of matrices (default: 0.1)"),
        "--grad-clip": dict(type=number(float, 0), default=1.0,
                            help="global norm; 0 = off (default: 1)"),
        "--grad-accum": dict(type=number(int, 1), default=1, help="sequences per step and group"),
        "--seed": dict(type=number(int, 0), default=0,
                       help="of weights and data order (default: 0)")},
    "the run": {
        "--eval-every": dict(type=number(int, 0),
                             help="steps; 0: at the end (default: 200, large: 0)"),
        "--eval-windows": dict(type=number(int, 1),
                               help="sequences (default: 32k tokens' worth)"),
        "--device": dict(choices=("cpu", "cuda"), help="default: cuda where there is one"),
        "--dtype": dict(choices=("float32", "bfloat16", "float64"),
                        help="default: bfloat16 on GPUs"),
        "--timeout": dict(type=number(float, 0, above=True), default=1800,
                          help="seconds to wait for another rank before giving up (default: 1800)"),
        "--force": dict(action=SWITCH, default=False, help="run what looks too slow or too large")},
    "in and out": {
        "--init": dict(metavar="DIR", help="start from a Llama 3.x or Qwen3 folder"),
        "--export": dict(metavar="DIR", help="write such a folder at the end"),
        "--save": dict(metavar="DIR", help="folder for checkpoints, the same one for all ranks"),
        "--save-every": dict(type=number(int, 0), default=100, help="steps (default: 100); 0: at "
                             "the end, and on SIGTERM or SIGUSR1"),
        "--keep": dict(type=number(int, 1), default=2, help="checkpoints that stay (default: 2)"),
        "--resume": dict(action="store_true", default=False, help="go on from the newest in "
                         "--save, with the flags of that run unless given anew"),
        "--sample": dict(type=number(int, 0), default=0, help="tokens to write in the end"),
        "--prompt": dict(default="\n", help="what they continue"),
        "--log --log-file": dict(metavar="FILE", help="one JSON object per step (some versions of "
                                 "torchrun take --log for their own: the longer name helps)"),
        "--loss-by-position": dict(metavar="FILE", help="picture of the final model, .png or .svg"),
        "--profile": dict(metavar="DIR", help="traces of one step")},
    "instead of a run": {
        "--dry-run": dict(action="store_true", default=False,
                          help="tell memory and time of a step, without doing it"),
        "--world": dict(type=number(int, 1), help="ranks to simulate (default: 8)"),
        "--gpus-per-node": dict(type=number(int, 1), help="ranks that share a host (default: 8)"),
        "--gpu-mem": dict(type=number(float, 0, above=True), help="GiB of a GPU (default: 80)"),
        "--host-mem": dict(type=number(float, 0, above=True), help="GiB of a node (default: 2000)"),
        "--full": dict(action="store_true", default=False,
                       help="simulate every layer, instead of extending two models"),
        "--max-ctx": dict(action="store_true", default=False,
                          help="with --dry-run: the longest context that fits"),
        "--one-rank-of": dict(type=number(int, 1),
                              help="measure one rank of so many, on one device"),
        "--road": dict(action="store_true", default=False,
                       help="one row per technique, simulated or measured here"),
        "--json": dict(metavar="FILE", help="with --road, --one-rank-of: write the figures"),
        "--plot": dict(metavar="FILE", help="with --road: draw them, to this .png or .svg")},
}
DEFAULTS = {flag.split()[0][2:].replace("-", "_"): how.get("default")
            for flags in FLAGS.values() for flag, how in flags.items()}


def read_flags(argv=None):
    """What is said on the command line, and nothing else: {name: value}."""
    parser = Parser(prog="train.py", description=__doc__.split("\n")[0], allow_abbrev=False,
                    argument_default=argparse.SUPPRESS)
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, how in flags.items():
            group.add_argument(*flag.split(),
                               **{key: value for key, value in how.items() if key != "default"})
    return vars(parser.parse_args(argv))


def extra(name, flag=None):
    """The module extras.`name`, which `flag` needs. Without a flag: None if the folder is gone."""
    try:
        return import_module(f"extras.{name}")
    except ModuleNotFoundError as error:
        if not error.name.startswith("extras"):
            raise
    if flag:
        raise BadInput(f"{flag} needs the folder extras, which is not here")


# 2. Settings --------------------------------------------------------------------------------------
# Everything that flags, files and this machine decide is decided once, before any other rank is
# asked, and never changed. `at` makes other settings, for instance of another length.

SWITCHES = [field.name for field in fields(Recipe) if field.name != "group"]  # each is a flag


@dataclass(frozen=True)
class Machine:
    cuda: bool
    card: float  # bytes of a GPU; on a CPU, of a rank's part of the memory
    host: float  # bytes of a host
    ranks: int   # of this job that share a host


class Settings(make_dataclass("Flags", [*DEFAULTS, "config", "recipe", "machine", "codec",
                                        "saved"], frozen=True)):
    """All flags, and what follows from them.

    config, recipe: GPTConfig and Recipe. The flags of a recipe stay as they were given, None where
    it is left to the machine. The recipe's group comes when the ranks have met
    cp, world: ranks that share a sequence, and all ranks; machine: a Machine
    codec: Bytes, or a Tokenizer of extras/text.py
    saved: run.json of the checkpoint to go on from, or None"""

    def at(self, **changes):
        """Settings with other flags, the recipe fitted to them anew."""
        new = replace(self, **changes)
        wanted = {name: getattr(new, name) for name in SWITCHES}
        share = new.machine.ranks / new.world  # of weights, gradients and moments: 16 bytes
        held = 16 * new.parameters() * share if new.offload_params else 0
        return replace(new, recipe=fit_recipe(wanted, new.config, new.machine, new.ctx, new.cp,
                                              new.dtype, held))

    @property
    def length(self):
        return write_length(self.ctx)

    def meet(self, device, whole=False):
        return meet(self.cp, device, whole)

    def assemble(self, job):
        """(model, optimizer) as in the middle of a run: AdamW's moments exist."""
        model, optimizer = build(self, job)
        make_moments(model, optimizer)
        return model, optimizer

    def switches(self):
        return ", ".join(f"{name} {getattr(self.recipe, name)}" for name in SWITCHES)

    def parameters(self):
        with torch.device("meta"):
            return sum(p.numel() for p in GPT(self.config).parameters())

    def forward_flops(self):
        """(attention, rest) of one sequence's forward pass; 2 FLOPs per multiply-add."""
        c, d, ctx = self.config, self.config.head_dim, self.ctx
        attention = c.n_layers * 2 * ctx**2 * c.n_heads * d  # Q K^T and P V, S x S, half masked
        block = 2 * c.dim * (c.n_heads + c.n_kv_heads) * d + 3 * c.dim * c.ffn_dim
        return attention, 2 * ctx * (c.n_layers * block + c.vocab_size * c.dim)

    def backward_passes(self):
        """(attention, rest): the backward pass in units of forward passes, recomputation
        included."""
        again = self.recipe.checkpoint > 0
        attention = 2.5 + (again and not self.recipe.keep_attention)  # flash: 5 products, not 2
        return attention, 2 + again

    def step_flops(self):
        """FLOPs of one sequence's forward and backward pass, recomputation included."""
        return sum(flops * (1 + n) for flops, n in zip(self.forward_flops(),
                                                       self.backward_passes()))


def fit_recipe(wanted, config, machine, ctx, cp, dtype, held=0):
    """The Recipe of the switches that are wanted; a None among them as it suits this machine, of
    whose host memory `held` bytes are taken."""
    switches = dict(wanted)

    def default(name, value):
        if switches[name] is None:
            switches[name] = value
    # Keeping x and attention's output of every block is the fastest, where the host has room.
    width = config.n_layers * (config.dim + config.n_heads * config.head_dim)
    kept = width * getattr(torch, dtype).itemsize * ctx / cp * machine.ranks
    room = not machine.cuda or switches["keep_attention"] or kept + held < 0.9 * machine.host
    default("checkpoint", 1 if room else 4)
    default("keep_attention", switches["checkpoint"] == 1)
    default("offload", machine.cuda and switches["checkpoint"] >= 1)
    # Below a million tokens a stage of attention is too short to hide the reading.
    default("stream", switches["offload"] and ctx >= 2**20)
    default("tile", 4096 if machine.cuda else 128)
    return Recipe(**switches)


def launched():
    """(rank, world, rank on this machine, ranks on this machine) as torchrun says, or alone."""
    names = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
    return tuple(int(os.environ.get(name, default)) for name, default in names.items())


def with_defaults(flags):
    """The flags, with values for those that depend on model, device or another flag."""
    flags = dict(flags)

    def default(name, value):
        if flags[name] is None:
            flags[name] = value
    default("device", "cuda" if flags["dry_run"] or torch.cuda.is_available() else "cpu")
    cuda = flags["device"] == "cuda"
    default("model", flags["init"] or ("llama3-8b" if cuda else "tiny"))
    tiny = flags["model"] == "tiny"
    default("dtype", "bfloat16" if cuda else "float32")
    default("ctx", 512 if tiny else 128 * 1024)
    default("steps", 600 if tiny else 100)
    default("lr", 2e-3 if tiny else 3e-4)
    default("warmup", flags["steps"] // 20)
    default("min_lr", flags["lr"] / 10)
    default("eval_every", 200 if tiny else 0)
    default("eval_windows", max(1, 2**15 // flags["ctx"]))
    here = 8 if flags["dry_run"] else launched()[1]
    flags["world"] = flags["one_rank_of"] or flags["world"] or here
    default("cp", flags["world"])
    return flags


def check_machine(flags):
    """Refuse what the ranks or the GPUs of this machine cannot be."""
    world, cp, local_world = flags["world"], flags["cp"], launched()[3]
    if world % cp:
        legal = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise BadInput(f"--cp {cp} does not divide the {world} ranks of this job: use {legal}")
    if flags["dry_run"] or flags["device"] != "cuda":
        return
    if local_world > torch.cuda.device_count():
        raise BadInput(f"--device cuda: {local_world} ranks on this machine, and PyTorch finds "
                       f"{torch.cuda.device_count()} GPUs: start one per GPU, or say --device cpu")
    old = torch.cuda.get_device_capability(launched()[2]) < (8, 0)
    if flags["dtype"] == "bfloat16" and old:
        flags["dtype"] = "float32"
        if launched()[0] == 0:
            print("notice    this GPU does not compute in bfloat16: float32 instead")


def cgroup_files(kind, name, root="/"):
    """The words of each file `name` in the cgroups (v1 and v2, kind "memory" or "cpu") that this
    process is in. Where there are none, as outside of Linux, there are no words."""
    groups, root = Path(root, "proc/self/cgroup"), Path(root, "sys/fs/cgroup")
    files = []
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, kinds, path = line.split(":", 2)
        if not kinds or kind in kinds.split(","):  # v2 has one tree, v1 one for each kind
            here = root / (kind if kinds else "") / path.lstrip("/")
            files += [folder / name for folder in (here, *here.parents)]
    return [file.read_text().split() for file in files if file.exists()]


def memory_here(root="/"):
    """Bytes that this machine has, or fewer, if a container may use fewer; inf if unknown."""
    limits = [math.inf]
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in ("memory.max", "memory.limit_in_bytes"):
        limits += [int(size) for size, in cgroup_files("memory", name, root) if size != "max"]
    return min(limits)


def cores_here(root="/"):
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    limits = [len(affinity(0)) if affinity else os.cpu_count() or 1]
    quotas = cgroup_files("cpu", "cpu.max", root) + [  # v2: quota and period; v1: a file each
        quota + period for quota, period in zip(cgroup_files("cpu", "cpu.cfs_quota_us", root),
                                                cgroup_files("cpu", "cpu.cfs_period_us", root))]
    limits += [int(quota) // int(period) for quota, period in quotas if quota not in ("max", "-1")]
    return max(1, min(limits))


def threads_here(local_world, root="/"):
    """Threads of one of the ranks on this machine: several on one core slow all of them down."""
    threads, cores = torch.get_num_threads(), cores_here(root)
    if "OMP_NUM_THREADS" in os.environ and threads > 1:
        return threads  # asked for: what torchrun itself says is 1
    return max(1, cores // local_world) if local_world > 1 else min(threads, cores)


def find_machine(flags):
    """The memory of this machine, or of the one that --dry-run is to think of."""
    cuda, here = flags["device"] == "cuda", 8 if flags["dry_run"] else launched()[3]
    ranks = min(flags["world"], flags["gpus_per_node"] or here)
    known = cuda and flags["dry_run"]
    host = (flags["host_mem"] or 0) * GIB or (2000 * GIB if known else memory_here())
    card = 80 * GIB if known else host / ranks
    if cuda and not known:
        card = torch.cuda.get_device_properties(launched()[2]).total_memory
    return Machine(cuda, (flags["gpu_mem"] or 0) * GIB or card, host, ranks)


class Bytes:
    """The tokenizer that needs no file: a text is its bytes."""
    size, begin = 256, []

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def find_codec(flags):
    beside = Path(flags["init"] or "") / "tokenizer.json"
    if flags["tokenizer"] or flags["init"] and beside.exists():
        return extra("text", "--tokenizer").Tokenizer(flags["tokenizer"] or beside)
    return Bytes()


def choose_model(flags, saved, codec):
    """The GPTConfig that flags, --init or a checkpoint ask for."""
    if saved:
        for name in FIXED:
            if flags[name] != saved["flags"][name]:
                raise BadInput(f"--{name} was {saved['flags'][name]} in {saved['path']}, and a run "
                               "keeps it: to start another one from its weights, --export them "
                               "and --init")
        return GPTConfig(**saved["config"])
    name = flags["model"]
    if flags["init"]:
        config = extra("hf", "--init").read_config(flags["init"])
    else:
        config = replace(PRESETS[name], n_layers=flags["layers"] or PRESETS[name].n_layers)
        if name == "tiny":
            config = replace(config, vocab_size=codec.size)
    if codec.size > config.vocab_size and (flags["sample"] or type(codec) is not Bytes):
        raise BadInput(f"{name} has {config.vocab_size} tokens, its tokenizer {codec.size}")
    return config


def make_settings(argv=None):
    """Settings, or BadInput: from flags, files and this machine, but no other rank."""
    given = read_flags(argv)
    saved = find_checkpoint(given.get("save")) if given.get("resume") else None
    if not saved and given.get("init") and (given.get("model") or given.get("layers")):
        raise BadInput("--init says what the model is: leave --model and --layers out")
    flags = with_defaults({**DEFAULTS, **remembered(saved), **given})
    check_machine(flags)
    codec = find_codec(flags)
    config = choose_model(flags, saved, codec)
    if flags["kernel"] not in ("auto", *upipe.KERNELS):
        extra("kernels", f"--kernel {flags['kernel']}")
    settings = Settings(**flags, config=config, recipe=None, machine=find_machine(flags),
                        codec=codec, saved=saved).at()  # fits the recipe
    settings.recipe.check(config, settings.cp)
    return settings


def refuse_early(settings):
    """What can be known to go wrong in the end, before anything begins."""
    if settings.save and not settings.resume and checkpoints(settings.save):
        raise BadInput(f"--save {settings.save} has checkpoints already: --resume, or another "
                       "folder")
    if settings.export and Path(settings.export).exists():
        raise BadInput(f"--export {settings.export} exists already")
    if settings.task == "recall":
        extra("recall", "--task recall")
        small = settings.config.vocab_size < 256 or settings.ctx < 8
        if small or settings.docs is not None:
            raise BadInput("--task recall needs a vocabulary of 256, a --ctx of 8, and no --docs")
    for name, module, package in NEEDS:
        if getattr(settings, name):
            flag = "--" + name.replace("_", "-")
            extra(module, flag)
            if package:
                import_module("extras").need(package, flag)


NEEDS = (  # flag, the module of extras that it needs, and a package
    ("dry_run", "memory", None), ("road", "road", None), ("one_rank_of", "road", None),
    ("profile", "road", None), ("sample", "text", None), ("init", "hf", "safetensors"),
    ("export", "hf", "safetensors"), ("loss_by_position", "road", "matplotlib"),
    ("plot", "road", "matplotlib"))


# 3. Ranks and groups ------------------------------------------------------------------------------
# A rank that stops alone leaves the others in a collective until the time-out. So what one rank
# alone can see (its file, its tokens, its loss) travels with a sum that is needed anyway, of label
# counts or of losses. All ranks stop together and report the lowest failing rank's message.


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

    def agree(self, fault, value=0.0):
        """The sum of `value` over all ranks; if any has a fault (a text), BadInput on every one."""
        total = torch.tensor([fault is not None, value], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        faults, value = total.tolist()
        if faults:
            texts = [None] * self.world
            dist.all_gather_object(texts, fault)
            raise BadInput(next(text for text in texts if text is not None))
        return value

    def together(self, work):
        """Run work() -> (result, number) on every rank: this rank's result, the sum of numbers."""
        result, number, fault = None, 0, None
        try:
            result, number = work()
        except BadInput as error:
            fault = str(error)
        return result, self.agree(fault, number)

    def on_rank_0(self, work):
        """Let rank 0 do it, and all wait until it is done."""
        if self.rank == 0:
            work()
        dist.barrier()

    def peak_flops(self, dtype):
        """(name of the card, its dense bfloat16 FLOP/s), or (name, None) where that is unknown."""
        if self.device.type != "cuda":
            return "this CPU", None
        card = torch.cuda.get_device_name(self.device)
        known = (f for name, f in PEAK_FLOPS.items() if name in card and dtype == "bfloat16")
        return card, next(known, None)


PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16


def join(settings):
    """Meet the other ranks -> Job. What can be refused without them has been refused before."""
    rank, world, local_rank, local_world = launched()
    cuda = settings.device == "cuda"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(threads_here(local_world))
    if settings.one_rank_of:
        extra("memory", "--one-rank-of").pretend(settings.world)
        return meet(settings.cp, device)
    timeout = timedelta(seconds=min(settings.timeout, 1e8))
    alone = dict(store=dist.HashStore(), rank=0, world_size=1) if world == 1 else {}
    # With --offload-params gradients are on the CPU, and so is the sum that makes their norm.
    both = cuda and settings.offload_params
    backend = "cpu:gloo,cuda:nccl" if both else "nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=timeout,
                            device_id=device if cuda and not both else None, **alone)
    job = meet(settings.cp, device)
    job.group.set_timeout(timeout)  # a new group does not inherit it
    return job


def meet(cp, device, whole=False):
    """The Job of a process whose ranks have met: cp of them share a sequence.

    whole: every rank has the whole model, by FSDP over groups of one."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world // cp, cp), mesh_dim_names=("dp", "cp"))
    everyone = init_device_mesh(device.type, (world, 1), mesh_dim_names=("all", "one"))
    dp_rank, cp_rank = mesh.get_coordinate()
    return Job(dist.get_rank(), world, device, world // cp, dp_rank, cp, cp_rank,
               mesh["cp"].get_group(), everyone["one" if whole else "all"])


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

    def window(self, start, ctx, cp, cp_rank, docs=None):
        """A rank's slice of the window at `start`: inputs, labels and, with docs, where documents
        start."""
        if docs is None:
            return read_slice(self, start, ctx, cp, cp_rank)
        return read_documents(self, start, ctx, cp, cp_rank, docs)


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
            parts = extra("text", "--tokenizer").tokenize(paths, tokenizer)
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
        raise BadInput(f"--data {name}: --ctx {write_length(ctx)} needs {ctx + 1} tokens to "
                       f"train on and 2 to validate with, here are {len(train)} and {len(valid)}")
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


def read_windows(job, tokens, starts, ctx, docs=None):
    """This rank's slices of windows, and the number of labels in all windows of all ranks."""
    def work():
        batch = [tokens.window(start, ctx, job.cp, job.cp_rank, docs) for start in starts]
        return batch, sum(int((labels != IGNORE).sum()) for _, labels, *_ in batch)
    return job.together(work)


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


@dataclass
class Data:
    train: Tokens  # or Recall of extras/recall.py
    valid: Tokens
    held_out: list  # where the windows start that evaluation sees
    compare: str    # what a simple method reaches on them, for people


def find_data(job, settings):
    """The Data that --task, --data and the tokenizer say."""
    ctx, windows, config = settings.ctx, settings.eval_windows, settings.config
    if settings.task == "recall":
        Recall = extra("recall", "--task recall").Recall
        train = Recall(settings.seed, ctx, 2**20)
        valid = Recall(settings.seed + 2**32, ctx, windows)
        job.say(f"data      {train.pairs} keys and values at the start of each window, asked for "
                "at its end")
        return Data(train, valid, eval_starts(valid, ctx, windows),
                    f" (chance: {Recall.CHANCE:.3f})")
    encoded = None if isinstance(settings.codec, Bytes) else settings.codec

    def work():
        train, valid = open_data(settings.data, config.vocab_size, ctx, encoded)
        return (train, valid), len(train)
    if encoded:  # one rank of each machine writes the cache
        first = launched()[2] == 0
        job.together(lambda: work() if first else (None, 0))
    (train, valid), total = job.together(work)
    same = total == len(train) * job.world
    job.agree(None if same else f"--data: rank {job.rank} has {len(train)} tokens, others do not")
    held_out = eval_starts(valid, ctx, windows)
    job.say(f"data      {settings.data or 'the Python standard library'}: {len(train):,} tokens, "
            f"and {len(valid):,} to validate: {len(held_out)} windows")
    compare = ""
    if job.rank == 0 and config.vocab_size >= 256 and train.parts[0].dtype == np.uint8:
        compare = f" (bigrams: {bigram_loss(train, valid, held_out, ctx):.3f})"
    return Data(train, valid, held_out, compare)


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
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()


def build(settings, job):
    """The sharded model and its optimizer. No rank ever holds it whole: meta first, then shards."""
    dtype = getattr(torch, settings.dtype)
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    with torch.device("meta"):
        model = GPT(settings.config)
    torch.set_default_dtype(torch.float32)
    shard_model(model, job.everyone, dtype, settings.offload_params)
    model.to_empty(device="cpu" if settings.offload_params else job.device)
    model.init_weights(settings.seed)
    gains = [p for p in model.parameters() if p.ndim < 2]  # of norms; decay would pull them to 0
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=settings.weight_decay),
                                   dict(params=gains, weight_decay=0.0)],
                                  lr=settings.lr, betas=(0.9, 0.95), fused=True)
    return model, optimizer


# 6. A step ----------------------------------------------------------------------------------------


def print_plan(settings, job):
    c, recipe, sequences = settings.config, settings.recipe, settings.grad_accum * job.dp
    attention, rest = (3 * sequences * flops for flops in settings.forward_flops())
    U = recipe.stage_heads(c, job.cp)
    n = sum(len(queries) for _, queries in stages(c.n_heads, c.n_kv_heads, job.cp, U))
    on = [name for name in ("keep_attention", "offload", "stream") if getattr(recipe, name)]
    size = tqdm.format_sizeof
    job.say(f"model     {settings.model}: {size(settings.parameters())} parameters, {c.n_layers} "
            f"layers of width {c.dim}, {c.n_heads} heads and {c.n_kv_heads} kv heads of "
            f"{c.head_dim}, {settings.dtype}\n"
            f"context   {settings.ctx:,} tokens over {job.cp} of {job.world} {job.device.type} "
            f"ranks\n"
            f"recipe    {recipe.attention}, stages per layer: {n}, heads per stage: {U}, "
            f"kernel {recipe.kernel}, tile {recipe.tile or 'off'}, "
            f"checkpoint {recipe.checkpoint}{', '.join(['', *on])}\n"
            f"work      {sequences} x {settings.ctx:,} tokens, {size(attention + rest)} FLOPs: "
            f"{size(attention)} in attention, {size(rest)} in the rest (recomputation apart)")
    gpus = torch.cuda.device_count() if job.device.type == "cuda" else 1
    if gpus > job.world == 1:
        job.say(f"notice    one process uses one of the {gpus} GPUs of this machine; all of them:  "
                f"torchrun --nproc-per-node={gpus} {shlex.join(sys.argv)}")


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


def learning_rate(settings, step):
    """Linear warm-up to lr, then half a cosine down to min_lr at the last step."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - 1 - settings.warmup)
    return settings.min_lr + (settings.lr - settings.min_lr) * (1 + math.cos(math.pi * done)) / 2


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
    loss = job.agree(None if math.isfinite(loss) else fault, loss)
    # The norm is taken over the shards of all ranks: one number, so one decision, on every rank.
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor()
    if not norm.isfinite():
        raise BadInput(f"step {step}: the gradient norm is {norm.item()}, nothing was updated")
    if grad_clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    optimizer.step()
    return loss, norm.item()


def read_held_out(job, data, settings):
    """read_windows of all windows that evaluation sees. The groups share them. One that has fewer
    than the others joins in with an empty one, past the data's end: all make the same calls."""
    starts = data.held_out + [len(data.valid)] * (-len(data.held_out) % job.dp)
    return read_windows(job, data.valid, starts[job.dp_rank::job.dp], settings.ctx, settings.docs)


@torch.no_grad()
def evaluate(job, model, data, settings):
    """Mean loss over the windows that are held out, by the same call as in training."""
    batch, total = read_held_out(job, data, settings)
    return job.agree(None, sum(
        model(inputs.to(job.device), labels.to(job.device), settings.recipe, total, *docs).item()
        for inputs, labels, *docs in batch))


# 7. Checkpoints -----------------------------------------------------------------------------------
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


def sweep(folder):
    shutil.rmtree(folder, ignore_errors=True)


def checkpoints(folder):
    """The whole ones, oldest first."""
    return sorted(Path(folder).glob("step-*"))


def find_checkpoint(folder):
    """What the newest checkpoint in --save has in run.json, and its path; None if there is none."""
    if not folder:
        raise BadInput("--resume needs --save, the folder with the checkpoints")
    found = checkpoints(folder)
    if not found:
        return None
    try:
        return {**json.loads((found[-1] / "run.json").read_text()), "path": found[-1]}
    except (OSError, ValueError) as error:
        raise BadInput(f"--resume: {error}")


def remembered(saved):
    """The flags that a run takes from the checkpoint that it goes on from."""
    if not saved:
        return {}
    cp = saved["flags"]["cp"] if launched()[1] == saved["world"] else None
    return {**saved["flags"], "cp": cp}


def state_of(model, optimizer):
    """Every tensor that a step changes, by name; by the same on any number of ranks."""
    state = {"rng": torch.get_rng_state()}
    for name, p in model.named_parameters():
        state[f"model.{name}"] = p.detach()
        state.update({f"adamw.{name}.{key}": x for key, x in optimizer.state[p].items()})
    return state


def save_state(job, settings, model, optimizer, run, tokens):
    """Write a checkpoint, and remove all but the last --keep."""
    import torch.distributed.checkpoint as dcp
    folder, name = Path(settings.save), f"step-{run.step:08d}"
    part = folder / f".{name}"
    flags = {name: getattr(settings, name) for name in REMEMBERED}
    facts = dict(step=run.step, drawn=run.drawn, tokens=tokens, world=job.world,
                 config=asdict(settings.config), flags=flags)

    def make_room():
        for rubbish in folder.glob(".step-*"):
            sweep(rubbish)
        part.mkdir(parents=True)
        (part / "run.json").write_text(json.dumps(facts, indent=1))

    def publish():
        part.rename(folder / name)
        for old in checkpoints(folder)[:-settings.keep]:
            sweep(old.rename(folder / f".{old.name}"))
    job.on_rank_0(make_room)
    dcp.save(state_of(model, optimizer), checkpoint_id=part)
    job.on_rank_0(publish)
    job.say(f"saved     {folder / name}")


def make_folders(job, settings):
    """Make what --save and the others name: what cannot be written shows now, not in a week."""
    fault, files = None, [Path(x) for x in (settings.log, settings.loss_by_position) if x]
    folders = [Path(x) for x in (settings.save, settings.profile) if x]
    folders += [path.parent for path in files]
    if settings.export:
        folders.append(Path(settings.export).parent)
    for folder in folders if job.rank == 0 else ():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fault = str(error)
        if not os.access(folder, os.W_OK):
            fault = fault or f"cannot write to {folder}"
    job.agree(fault)
    unseen = [folder for folder in folders[:1] if settings.save and not folder.is_dir()]
    job.agree(f"--save {settings.save}: rank {job.rank} does not see this folder of rank 0: it "
              "must be on a disk that all machines share" if unseen else None)


def load_state(job, settings, model, optimizer, tokens):
    """The Run to go on with: from a checkpoint, from published weights, or from the start."""
    import torch.distributed.checkpoint as dcp
    saved = settings.saved
    step = job.agree(None, saved["step"] if saved else 0)
    if step != job.world * (saved["step"] if saved else 0):
        raise BadInput(f"--save {settings.save}: the ranks see different checkpoints there: it "
                       "must be one folder for all")
    if not saved:
        if settings.resume:
            job.say(f"resume    no checkpoint in {settings.save} yet: from the start")
        if settings.init:
            extra("hf", "--init").load_weights(job, settings.config, model, settings.init)
        return Run()
    if saved["tokens"] != tokens:
        raise BadInput(f"--data has {tokens} tokens to train on, the run in {settings.save} has "
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
        return job.agree(None, self.asked) > 0


# 8. The loop --------------------------------------------------------------------------------------


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


def run_steps(job, settings, model, optimizer, data, run):
    """Train from run.step to --steps -> whether it came so far: a signal ends it after any step."""
    s, recipe = settings, settings.recipe
    tokens = s.grad_accum * job.dp * s.ctx
    flops = 3 * sum(s.forward_flops()) * s.grad_accum * job.dp
    _, peak = job.peak_flops(s.dtype)
    blocks = s.config.n_layers * s.grad_accum * (1 + s.backward_passes()[0])
    ahead = run.drawn - run.step * s.grad_accum * job.dp
    log, stop = Log(job, s.log, run.step), Stop() if s.save else None
    began, first = time.perf_counter(), run.step
    for step in range(first, max(first, s.steps) + 1):
        if step >= s.steps or s.eval_every and step % s.eval_every == 0:
            rounds = -(-len(data.held_out) // job.dp)
            with progress_bar(job, model, "evaluation", s.config.n_layers * rounds):
                valid = evaluate(job, model, data, s)
            job.say(f"step {step:5d} | validation loss {valid:.4f} nats per token{data.compare}")
            log(step=step, validation_loss=valid)
        if step >= s.steps:
            break
        begin = time.perf_counter()
        lr = learning_rate(s, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        starts = train_starts(job, data.train, s.ctx, s.seed, step, s.grad_accum, ahead)
        batch, total = read_windows(job, data.train, starts, s.ctx, s.docs)
        inside = s.profile and step == min(first + 1, s.steps - 1)  # the first is not typical
        with (extra("road", "--profile").profiled(job, s.profile) if inside else nullcontext(),
              progress_bar(job, model, f"step {step + 1}", blocks)):
            loss, norm = train_step(job, model, optimizer, batch, total, recipe, s.grad_clip,
                                    step + 1)
        seconds = time.perf_counter() - begin
        line = (f"step {step + 1:5d} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.3f} | "
                f"{tokens / seconds:,.0f} tokens/s | {seconds:.2f} s")
        record = dict(step=step + 1, loss=loss, lr=lr, norm=norm, seconds=seconds,
                      tokens_per_second=tokens / seconds, drawn=run.drawn + len(starts) * job.dp)
        if job.device.type == "cuda":
            line += f" | MFU {flops / seconds / job.world / peak:.1%}" if peak else ""
            record["peak_bytes"] = torch.cuda.max_memory_allocated()
            line += f" | peak {record['peak_bytes'] / GIB:.1f} GiB"
            torch.cuda.reset_peak_memory_stats()
        job.say(line)
        log(**record)
        run.step, run.drawn = step + 1, record["drawn"]
        stopping = stop is not None and stop.agreed(job)
        due = s.save_every and run.step % s.save_every == 0
        if s.save and (stopping or due or run.step == s.steps):
            save_state(job, s, model, optimizer, run, len(data.train))
        if stopping:
            job.say(f"stopped   after step {run.step}: --save {s.save} --resume goes on")
            return False
    steps = run.step - first
    job.say(f"done      {steps} steps, {tqdm.format_sizeof(steps * tokens)} tokens in "
            f"{tqdm.format_interval(time.perf_counter() - began)}, validation loss "
            f"{valid:.4f}{data.compare}")
    return True


def use_model(job, settings, model, data):
    """What a trained model is good for."""
    if settings.export:
        extra("hf", "--export").export(job, settings, model)
    if settings.loss_by_position:
        batch, _ = read_held_out(job, data, settings)
        extra("road", "--loss-by-position").show_by_position(job, model, batch, settings)
    if settings.sample:
        job.say(extra("text", "--sample").sample(job, model, settings))


# 9. Main ------------------------------------------------------------------------------------------


def choose_kernel(settings, job):
    """The name of the attention kernel: checked, and of several the fastest, where extras is."""
    kernels = extra("kernels")
    if kernels:
        return kernels.choose_kernel(settings, job)
    if settings.kernel == "auto" and settings.device == "cuda" and settings.dtype != "bfloat16":
        raise BadInput(f"--dtype {settings.dtype} on a GPU needs the folder extras, which is not "
                       "here: use bfloat16")
    return {"cpu": "cpu", "cuda": "torch"}[settings.device] if settings.kernel == "auto" else (
        settings.kernel)


def main(settings):
    """False if a dry run says that it does not fit."""
    refuse_early(settings)
    if settings.dry_run and settings.road:
        road = extra("road", "--road")
        return road.travel(road.road(settings), settings)
    if settings.dry_run:
        return extra("memory", "--dry-run").dry_run(settings)
    # Rank 0 decides for all: ranks that measure for themselves might disagree.
    memory = extra("memory")
    fault = memory.too_much(settings) if memory and launched()[0] == 0 else None
    job = join(settings)
    settings = settings.at(kernel=choose_kernel(settings, job))
    print_plan(settings, job)
    job.agree(fault)
    if settings.one_rank_of:
        return extra("road", "--one-rank-of").one_rank(settings, job)
    if settings.road:
        road = extra("road", "--road")
        rows = road.road(settings, job)
        return road.travel(rows, settings) if job.rank == 0 else None

    settings = replace(settings, recipe=replace(settings.recipe, group=job.group))
    make_folders(job, settings)
    data = find_data(job, settings)
    model, optimizer = build(settings, job)
    run = load_state(job, settings, model, optimizer, len(data.train))
    if run_steps(job, settings, model, optimizer, data, run):
        use_model(job, settings, model, data)
    dist.destroy_process_group()


def out_of_memory(settings):
    """The line for a GPU that is full: the recipe, and the next switch to turn."""
    recipe = settings.recipe
    turns = (("--checkpoint 1", not recipe.checkpoint), ("--offload", not recipe.offload),
             ("--attention upipe", recipe.attention != "upipe"), ("--stream", not recipe.stream),
             ("--heads-per-stage 0", recipe.heads_per_stage),
             ("--tile 2048", not recipe.tile or recipe.tile > 2048))
    turn = next((flag for flag, helps in turns if helps), "more GPUs, or a shorter --ctx")
    return (f"out of GPU memory at --ctx {settings.length} with {settings.switches()}: try "
            f"{turn}")


def run(argv=None):
    """main(), and then a way out that waits for nobody: os._exit, since a tidy end would wait for
    ranks that wait for this one. torchrun ends all ranks when it sees one go, so the rank that has
    something to say goes first."""
    rank, code = launched()[0], 1
    try:
        settings = make_settings(argv)
        code = int(main(settings) is False)
    except BadInput as error:  # known to all ranks, said by rank 0
        time.sleep(10 * (rank > 0))
        if rank == 0:
            print(f"train.py: {error}", file=sys.stderr)
        code = 2
    except torch.OutOfMemoryError:  # known to this rank; often all ranks meet it together
        time.sleep(2 * (rank > 0))
        print(f"train.py: rank {rank}: {out_of_memory(settings)}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
