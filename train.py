"""Train a GPT whose context is split over ranks. The techniques are in upipe.py; this is the job.

    python train.py                                   one process: no launcher, no port
    torchrun --nproc-per-node=2 train.py              two CPU cores: `tiny` on Python's own sources
    torchrun --nproc-per-node=4 train.py --cp 2       two sequences at a time, each on two ranks
    torchrun --nproc-per-node=8 train.py --ctx 5m     eight GPUs: llama3-8b on 5 x 2^20 tokens

1. Flags   2. Settings   3. Ranks and groups   4. Data   5. Sharding   6. A step
7. Checkpoints   8. The loop   9. Main

--cp ranks (C in upipe.py) split one sequence; world/cp such groups work on a sequence each. FSDP
shards weights, gradients and optimizer state over *all* ranks. The loss of a rank is its part of
one sum over all labels of a step, so gradients are added up, never averaged.

What is not the job itself is in extras/, and is imported by the flag that asks for it.
"""
import os

# Tensors this long fragment fixed segments. PyTorch reads the variable once, so before its import.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import json
import math
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from bisect import bisect, bisect_left
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import fsdp

from upipe import (BadInput, GPT, GPTConfig, IGNORE, KERNELS, PRESETS, Recipe, check_recipe, refuse,
                   token_places, token_spans, tokens_on_rank)

NO_ID = -1  # no token

# 1. Flags -----------------------------------------------------------------------------------------


def tokens_of(text):
    """'8k' -> 8192, '5m' -> 5242880, '4096' -> 4096."""
    match = re.fullmatch(r"([1-9][0-9]*)([km]?)", text.lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no length: give tokens as 4096, 128k or 5m")
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2]]


def number(kind, least):
    """An argparse type: a finite int or float of at least so much."""
    def parse(text):
        with suppress(ValueError):
            if least <= kind(text) < math.inf:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r} is no {kind.__name__} of at least {least}")
    return parse


def picture(text):
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    return text


class Flag(NamedTuple):
    """A row of the table below."""
    kind: Any           # a type, a tuple of choices, "store_true", or switch: also as --no-...
    default: Any        # None where the model, the machine or another flag decides: part 2
    help: str
    needs: tuple = ()   # flags of which one must be there, or this one has no effect
    extra: str = ""     # the module of extras that it needs, and a package
    more: dict = {}     # for argparse


whole, count = number(int, 0), number(int, 1)
real, positive = number(float, 0), number(float, 1e-3)
switch, true = argparse.BooleanOptionalAction, "store_true"
TEXT, STEPS, SAVE, DRY = ("--task text",), ("--steps",), ("--save",), ("--dry-run",)
INSTEAD = ("--dry-run", "--road", "--one-rank-of")
METHODS, DTYPES = ("plain", "ulysses", "upipe"), ("float32", "bfloat16", "float64")
FLAGS = {
    "model and context": {
        "--model": Flag(tuple(PRESETS), None, "default: tiny on a CPU, llama3-8b on GPUs"),
        "--init": Flag(str, None, "folder of a Llama 3.x or Qwen3", (), "hf safetensors"),
        "--layers": Flag(count, None, "number of blocks, for trials (default: all)"),
        "--ctx": Flag(tokens_of, None, "tokens per sequence (default: 256 for tiny, else 128k)"),
        "--rope-theta": Flag(positive, None, "base of the positions (default: the model's)")},
    "how memory is held": {  # the fields of upipe.Recipe, and more
        "--cp": Flag(count, None, "ranks that share one sequence (default: all)"),
        "--ring": Flag(count, 1, "of so many members, for more ranks than heads (default: 1)"),
        "--attention": Flag(METHODS, None, "default: upipe; --checkpoint 0: the textbook's"),
        "--heads-per-stage": Flag(whole, 0, "over all ranks; 0 = fewest"),
        "--checkpoint": Flag(whole, None, "blocks per segment; 0 = off (default: 1; full host: 4)"),
        "--keep-attention": Flag(switch, None, "run it once (default: with --checkpoint 1)"),
        "--offload": Flag(switch, None, "checkpoints wait on the host (default: on GPUs)"),
        "--stream": Flag(switch, None, "and come back by tiles (default: from 1m tokens on)"),
        "--offload-params": Flag(switch, False, "so do weights, gradients and AdamW's moments"),
        "--tile": Flag(whole, None, "tokens; 0 = off (default: CPU 64, GPU 4096)"),
        "--kernel": Flag(str, "auto", "of attention (default: the fastest here that is right)"),
        "--device": Flag(("cpu", "cuda"), None, "default: cuda where there is one"),
        "--dtype": Flag(DTYPES, None, "default: bfloat16 on GPUs"),
        "--timeout": Flag(positive, 1800, "seconds to wait for another rank (default: 1800)"),
        "--force": Flag(switch, False, "run what looks too slow or too large")},
    "data": {
        "--data": Flag(str, None, "bytes of a file or folder, .bin (uint16, or uint32 for a large "
                       "vocabulary) or .npy (default: Python's standard library)", TEXT),
        "--tokenizer": Flag(str, None, "file, bytes (default: --init's)", TEXT, "text tokenizers"),
        "--docs": Flag(whole, None, "attention stays in a document: a file, or what follows a "
                       "token ID", TEXT, more=dict(nargs="?", const=NO_ID, metavar="ID")),
        "--task": Flag(("text", "recall"), "text", "recall: of what stood at the start"),
        "--eval-every": Flag(whole, None, "steps; 0: at the end (default: 360 for tiny, else 0)"),
        "--eval-windows": Flag(count, None, "sequences (default: 16k tokens' worth)")},
    "optimizer": {
        "--steps": Flag(whole, None, "default: 360 for tiny, else 100"),
        "--lr": Flag(real, None, "peak rate (default: 4e-3 for tiny, else 3e-4)", STEPS),
        "--warmup": Flag(whole, None, "steps (default: a twentieth of --steps)", STEPS),
        "--min-lr": Flag(real, None, "end of the cosine (default: a tenth of --lr)", STEPS),
        "--weight-decay": Flag(real, 0.1, "of matrices (default: 0.1)", STEPS),
        "--grad-clip": Flag(real, 1.0, "global norm; 0 = off (default: 1)", STEPS),
        "--grad-accum": Flag(count, 1, "sequences per step and group (default: 1)"),
        "--seed": Flag(whole, 0, "of weights and data order (default: 0)")},
    "what stays": {
        "--save": Flag(str, None, "folder for checkpoints, the same one for all ranks"),
        "--save-every": Flag(whole, 100, "steps (default: 100); 0: at the end, on a signal", SAVE),
        "--keep": Flag(count, 2, "checkpoints that stay (default: 2)", SAVE),
        "--resume": Flag(count, None, "go on from the newest, or of a STEP, with its flags unless "
                         "given anew", SAVE, more=dict(nargs="?", const=NO_ID, metavar="STEP")),
        "--verify": Flag(switch, None, "compare checksums (default: yes)", ("--resume",), "guard"),
        "--export": Flag(str, None, "write a folder for --init at the end", (), "hf safetensors"),
        "--sample": Flag(whole, 0, "tokens to write in the end", (), "text"),
        "--prompt": Flag(str, "\n", "what they continue", ("--sample",)),
        "--log --log-file": Flag(str, None, "JSON of each step (torchrun may take --log)"),
        "--loss-by-position": Flag(picture, None, "of the final model", (), "road matplotlib"),
        "--profile": Flag(str, None, "folder for traces of one step", STEPS, "road")},
    "instead of a run": {
        "--dry-run": Flag(true, False, "tell a step's memory and time, without it", (), "memory"),
        "--world": Flag(count, None, "ranks to simulate (default: 8)", DRY),
        "--gpus-per-node": Flag(count, None, "ranks that share a host (default: 8)"),
        "--gpu-mem": Flag(positive, None, "GiB of a GPU (default: 80)"),
        "--host-mem": Flag(positive, None, "GiB of a node (default: 2000)"),
        "--full": Flag(true, False, "simulate every layer, instead of extending two models", DRY),
        "--max-ctx": Flag(true, False, "the longest context that fits", DRY),
        "--one-rank-of": Flag(count, None, "measure one rank of so many, alone", (), "road"),
        "--road": Flag(true, False, "one row per technique, simulated or measured", (), "road"),
        "--json": Flag(str, None, "file for the figures", INSTEAD),
        "--plot": Flag(picture, None, "of the road", ("--road",), "road matplotlib")},
}
TRAINING = (*FLAGS["data"], *FLAGS["optimizer"], *FLAGS["what stays"])  # only a run uses these
APART = ("--one-rank-of --dry-run", "--one-rank-of --road", "--max-ctx --road", "--max-ctx --full",
         "--init --model", "--init --layers")


def field(flag):
    """The name of a flag among the settings."""
    return flag.split()[0][2:].replace("-", "_")


ROWS = {flag: row for rows in FLAGS.values() for flag, row in rows.items()}
DEFAULTS = {field(flag): row.default for flag, row in ROWS.items()}


def read_flags(argv=None):
    """What is said on the command line, and nothing else: {name: value}."""
    parser = argparse.ArgumentParser("train.py", description=__doc__.split("\n")[0],
                                     allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.error = lambda message: refuse(True, message)  # its own prints the usage on every rank
    for title, rows in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, row in rows.items():
            what = "choices" if isinstance(row.kind, tuple) else "type"
            what = "action" if row.kind in (switch, true) else what
            group.add_argument(*flag.split(), help=row.help, **{what: row.kind}, **row.more)
    return vars(parser.parse_args(argv))


def refuse_idle(given, flags):
    """Refuse, by name, what was said and would have no effect. A dry run stands for a job: it takes
    all that the job would, and does not ask what that needs."""
    said, dry = [flag for flag in ROWS if field(flag) in given], flags["dry_run"]
    active = {f"--task {flags['task']}", *(flag for flag in ROWS if flags[field(flag)])}
    instead = next((flag for flag in INSTEAD if flag in active), None)
    for one, other in map(str.split, APART):
        refuse({one, other} <= set(said), f"{one} and {other} do not go together: leave one out")
    for flag in said:
        needs, job = ROWS[flag].needs, flag in TRAINING
        if job and dry:
            continue
        lack = "with --steps 0" if needs == STEPS else f"without {' or '.join(needs)}"
        refuse(needs and not active & set(needs), f"{flag} has no effect {lack}")
        refuse(job and instead, f"{flag} has no effect with {instead}: nothing is trained")
    refuse(flags["min_lr"] > flags["lr"],
           f"--min-lr {flags['min_lr']} is above --lr {flags['lr']}: give a lower one")
    refuse(flags["warmup"] > flags["steps"] > 0 and not dry,
           f"--warmup {flags['warmup']} is longer than --steps {flags['steps']}")


def extra(name, flag=None):
    """The module extras.`name`, which `flag` needs. Without a flag: None if the folder is gone."""
    name, *packages = name.split()
    here = Path(__file__).with_name("extras").is_dir()
    refuse(flag and not here, f"{flag} needs the folder extras, which is not here")
    for package in packages:
        import_module("extras").need(package, flag)
    return import_module(f"extras.{name}") if here else None


# 2. Settings --------------------------------------------------------------------------------------
# Everything that flags, files and this machine decide is decided once, before any other rank is
# asked, and never changed. `at` makes other settings, for instance of another length.

SWITCHES = [switch.name for switch in fields(Recipe) if "group" not in switch.name]  # each a flag


class Settings(make_dataclass("Flags", [*DEFAULTS, "config", "recipe", "machine", "codec",
                                        "saved", "given"], frozen=True)):
    """All flags, and what follows from them.

    recipe: a Recipe; its group comes when the ranks have met. Its flags stay as given
    machine: a Machine of extras/machine.py
    codec: a Tokenizer of extras/text.py; None where a text is its bytes
    saved: run.json of the checkpoint to go on from, or None
    given: the flags that were given, to this run or to those that it goes on from"""

    def at(self, **changes):
        """Settings with other flags, the recipe fitted to them anew."""
        new = replace(self, **changes)
        return replace(new, recipe=fit_recipe(new))

    @property
    def length(self):
        """--ctx as one writes it: 5242880 -> '5m'."""
        units = ((2**20, "m"), (2**10, "k"), (1, ""))
        return next(f"{self.ctx // unit}{name}" for unit, name in units if self.ctx % unit == 0)

    def meet(self, device, whole=False):
        """The Job of a process whose ranks have met. whole: FSDP's groups are of one rank."""
        world, cp = dist.get_world_size(), self.cp
        mesh = dist.init_device_mesh(device.type, (world // cp, cp), mesh_dim_names=("dp", "cp"))
        everyone = dist.init_device_mesh(device.type, (world, 1), mesh_dim_names=("all", "one"))
        dp_rank, cp_rank = mesh.get_coordinate()
        groups = dict(group=mesh["cp"].get_group())
        if self.ring > 1:
            rings = dist.init_device_mesh(device.type, (world // cp, self.ring, cp // self.ring),
                                          mesh_dim_names=("dp", "ring", "heads"))
            groups["subgroups"] = rings["heads"].get_group(), rings["ring"].get_group()
        return Job(dist.get_rank(), world, device, world // cp, dp_rank, cp, cp_rank, self.ring,
                   groups, everyone["one" if whole else "all"])

    def assemble(self, job):
        """(model, optimizer) as in the middle of a run: AdamW's moments exist."""
        model, optimizer = build(self, job)
        make_moments(model, optimizer)
        return model, optimizer


def fill(values, **defaults):
    """Give values to those that are None."""
    values.update({name: new for name, new in defaults.items() if values[name] is None})


def fit_recipe(settings):
    """The Recipe of the switches among the flags; one that is None as it suits the machine."""
    s, cuda, plan = settings, settings.device == "cuda", extra("plan")
    switches = {name: getattr(s, name) for name in SWITCHES}
    # Keeping x and attention's output of every block is the fastest, where the host has room.
    room = s.keep_attention or not (cuda and plan) or plan.host_has_room(s)
    fill(switches, checkpoint=1 if room else 4)
    lean, textbook = switches["checkpoint"] > 0, "plain" if s.cp == 1 else "ulysses"
    fill(switches, attention="upipe" if lean else textbook, offload=cuda and lean,
         keep_attention=switches["checkpoint"] == 1)
    tile = 4096 if cuda else 64
    # Below a million tokens a stage of attention is too short to hide the reading.
    fill(switches, stream=switches["offload"] and s.ctx >= 2**20, tile=tile if lean else 0)
    return Recipe(**switches)


def launched():
    """(rank, world, rank on this machine, ranks on this machine) as torchrun says, or alone."""
    names = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
    return tuple(int(os.environ.get(name, alone)) for name, alone in names.items())


def with_defaults(flags):
    """The flags, with values for those that depend on model, device or another flag."""
    flags, dry, (rank, world, local_rank, ranks_here) = dict(flags), flags["dry_run"], launched()
    fill(flags, device="cuda" if dry or torch.cuda.is_available() else "cpu")
    cuda = flags["device"] == "cuda"
    fill(flags, model=flags["init"] or ("llama3-8b" if cuda else "tiny"),
         dtype="bfloat16" if cuda else "float32", gpus_per_node=8 if dry else ranks_here,
         world=flags["one_rank_of"] or (8 if dry else world))
    if flags["init"] and Path(flags["init"], "tokenizer.json").exists():
        fill(flags, tokenizer=f"{flags['init']}/tokenizer.json")
    if flags["model"] == "tiny":
        fill(flags, ctx=256, steps=360, lr=4e-3, eval_every=360)
    fill(flags, ctx=128 * 1024, steps=100, lr=3e-4, eval_every=0, cp=flags["world"])
    fill(flags, warmup=flags["steps"] // 20, min_lr=flags["lr"] / 10,
         eval_windows=max(1, 2**14 // flags["ctx"]))
    if cuda and not dry:
        refuse(ranks_here > torch.cuda.device_count(), "--device cuda: fewer GPUs here than the "
               f"{ranks_here} ranks: start one per GPU, or say --device cpu")
        if flags["dtype"] == "bfloat16" and torch.cuda.get_device_capability(local_rank) < (8, 0):
            flags["dtype"] = "float32"
            if rank == 0:
                print("notice    this GPU does not compute in bfloat16: float32 instead")
    return flags


def choose_model(flags, saved, codec):
    """The GPTConfig that flags, --init or a checkpoint ask for."""
    if saved:
        for name in FIXED:
            old, flag = saved["flags"][name], name.replace("_", "-")
            refuse(flags[name] != old, f"--{flag} was {old} in {saved['path']}, and a run keeps "
                   "it: --export its weights and --init another one")
        return GPTConfig(**saved["config"])
    name, size = flags["model"], codec.size if codec else 256
    if flags["init"]:
        config = extra("hf", "--init").read_config(flags["init"])
    else:
        config = replace(PRESETS[name], n_layers=flags["layers"] or PRESETS[name].n_layers)
        if name == "tiny":
            config = replace(config, vocab_size=size)
    config = replace(config, rope_theta=flags["rope_theta"] or config.rope_theta)
    refuse(size > config.vocab_size and (flags["sample"] or codec),
           f"{name} has {config.vocab_size} tokens, its tokenizer {size}")
    return config


def make_settings(argv=None):
    """Settings, or BadInput: from flags, files and this machine, but no other rank."""
    given = read_flags(argv)
    step = given.get("resume")
    saved = find_checkpoint(given["save"], step) if step and "save" in given else None
    known = {**(saved["flags"] if saved else {}), **given}
    flags = with_defaults({**DEFAULTS, **known})
    refuse_idle(given, flags)
    world, cp = flags["world"], flags["cp"]
    refuse(world % cp, f"--cp {cp} does not divide the {world} ranks of this job: use a divisor")
    codec = None
    if flags["tokenizer"] not in (None, "bytes"):
        codec = extra("text tokenizers", "--tokenizer").Tokenizer(flags["tokenizer"])
    config = choose_model(flags, saved, codec)
    usual = flags["device"] == "cpu" or flags["dry_run"] or flags["dtype"] == "bfloat16"
    if not usual or flags["kernel"] not in ("auto", *KERNELS):
        extra("kernels", f"--kernel {flags['kernel']} with --dtype {flags['dtype']}")
    machine = extra("machine") and extra("machine").find_machine(flags, launched()[2])
    settings = Settings(**flags, config=config, recipe=None, machine=machine, codec=codec,
                        saved=saved, given=known).at()  # fits the recipe
    try:
        check_recipe(settings.recipe, config, settings.cp)
    except BadInput as error:
        job = "--dry-run of " if settings.dry_run else ""
        raise BadInput(f"{job}--model {settings.model}: {error}")
    refuse(settings.ring > 1 and settings.ctx < 2 * settings.cp,
           f"--ctx {settings.ctx} with --ring {settings.ring}: give at least two tokens for each "
           f"of {settings.cp} ranks")
    return settings


def refuse_early(settings):
    """What can be known to go wrong in the end, before anything begins."""
    s, dry = settings, settings.dry_run
    for flag, row in ROWS.items():
        if row.extra and getattr(s, field(flag)) and not (dry and flag in TRAINING):
            extra(row.extra, flag)
    if dry:
        return
    refuse(s.save and not s.resume and checkpoints(s.save),
           f"--save {s.save} has checkpoints already: --resume, or another folder")
    refuse(s.export and Path(s.export).exists(), f"--export {s.export} exists already")
    if s.sample:
        extra("text", "--sample").refuse_early(s)
    if s.init and not (s.road or s.one_rank_of):
        paths = find_files(s.data) if s.task == "text" else ()
        extra("hf", "--init").refuse_early(s, paths)


def make_folders(settings):
    """Make what the flags name. BadInput if one cannot be written: now, not in a week."""
    s = settings
    files, folders = [s.json, s.plot], []
    if not s.dry_run:
        files += [s.log, s.loss_by_position, s.export]
        folders += [s.save, s.profile]
    for path in map(Path, filter(None, files)):
        refuse(path.is_dir(), f"{path} is a folder: give a file")
        folders.append(path if path.exists() else path.parent)
    for path in map(Path, filter(None, folders)):
        if not path.exists():
            path.mkdir(parents=True)
        refuse(not os.access(path, os.W_OK), f"cannot write to {path}")


# 3. Ranks and groups ------------------------------------------------------------------------------
# A rank that stops alone leaves the others in a collective until the time-out. So what one rank
# alone can see (its file, its tokens, its loss) travels with a sum that is needed anyway. All ranks
# stop together and report the lowest failing rank's message.


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
    ring: int                 # members of a ring that they are
    groups: dict              # these ranks, as Recipe wants them
    everyone: dist.DeviceMesh

    def spans(self, length):
        """Where this rank's tokens lie in a sequence: [(start, stop), ...], as upipe.shard() cuts
        it."""
        s = tokens_on_rank(length, self.cp, self.ring)
        return token_spans(s, self.cp, self.ring, self.cp_rank)

    def places(self, length):
        """The same as one position for each token, [s]."""
        s = tokens_on_rank(length, self.cp, self.ring)
        return token_places(s, self.cp, self.ring, self.cp_rank)

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def agree(self, fault, value=0.0):
        """The sum of `value` over all ranks; if any has a fault (a text), BadInput on every one."""
        total = torch.tensor([fault is not None, value], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        faults, value = total.tolist()
        if faults:
            raise BadInput(next(text for text in self.gather(fault) if text is not None))
        return value

    def counted(self, work, what=""):
        """work() -> (result, number) on every rank: this rank's result, the sum of the numbers.
        What it raises on one, it raises on all."""
        result, number, fault = None, 0, None
        try:
            result, number = work()
        except (BadInput, OSError) as error:
            fault = f"{what}{error}"
        return result, self.agree(fault, number)

    def together(self, work, what=""):
        """work() on every rank -> this rank's result. What it raises on one, it raises on all."""
        return self.counted(lambda: (work(), 0), what)[0]

    def on_rank_0(self, work, what=""):
        """Let rank 0 do it, and all wait until it is done -> rank 0: its result."""
        return self.together(lambda: work() if self.rank == 0 else None, what)

    def gather(self, value):
        """The values of all ranks, on every rank."""
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values


def join(settings):
    """Meet the other ranks -> Job. What can be refused without them has been refused before."""
    _, world, local_rank, ranks_here = launched()
    cuda = settings.device == "cuda"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    elif machine := extra("machine"):
        torch.set_num_threads(machine.threads_here(ranks_here))
    if settings.one_rank_of:
        extra("memory", "--one-rank-of").pretend(settings.world)
        return settings.meet(device)
    timeout = timedelta(seconds=min(settings.timeout, 1e8))
    alone = dict(store=dist.HashStore(), rank=0, world_size=1) if world == 1 else {}
    backend, first = ("nccl", device) if cuda else ("gloo", None)
    if cuda and settings.offload_params:  # weights and gradients are DTensors on the CPU
        backend, first = "cpu:gloo,cuda:nccl", None
    dist.init_process_group(backend, timeout=timeout, device_id=first, **alone)
    job = settings.meet(device)
    for group in (job.groups["group"], *job.groups.get("subgroups", ())):
        group.set_timeout(timeout)  # a new group does not inherit it
    return job


# 4. Data ------------------------------------------------------------------------------------------
# A data set is a list of files, seen as one row of token ids. A rank reads only what its own slice
# of a window needs. Which window comes when is computed from the step: no loader has a state.


class Part(NamedTuple):
    """Ids [begin, end) of a file. None stays open: a system allows a process few."""
    path: Path
    dtype: np.dtype
    header: int  # bytes before the file's first id
    begin: int
    end: int


class Tokens:
    """Parts of files, one behind the other, as one row of token ids."""

    def __init__(self, parts, vocab):
        self.parts, self.vocab = [part for part in parts if part.begin < part.end], vocab
        self.begins = np.cumsum([0] + [part.end - part.begin for part in self.parts]).tolist()

    def __len__(self):
        return self.begins[-1]

    def read(self, start, stop):
        """ids [start, stop) as int64. Reads nothing else from the disk."""
        ids = np.empty(stop - start, np.int64)
        for i in range(bisect(self.begins, start) - 1, bisect_left(self.begins, stop)):
            part, a, b = self.parts[i], max(start, self.begins[i]), min(stop, self.begins[i + 1])
            offset = part.header + (part.begin + a - self.begins[i]) * part.dtype.itemsize
            found = np.fromfile(part.path, part.dtype, b - a, offset=offset)
            refuse(len(found) < b - a, f"--data {part.path} has become shorter in this run")
            wrong = found[(found < 0) | (found >= self.vocab)]
            refuse(len(wrong), f"{part.path}: token id {wrong[:1]} is not in the vocabulary of "
                   f"{self.vocab} (another integer width?)")
            ids[a - start:b - start] = found
        return ids

    def window(self, start, job, ctx, docs=None):
        """A rank's part of the window at `start`: inputs and labels, int64 [s], and, with docs,
        where documents start in the whole window.

        The part is that of upipe.shard(), without reading the rest. Labels are ignored beyond the
        window (cp may not divide ctx), beyond the data, and of a document's last token."""
        at, done = job.places(ctx), 0          # in the window; how many have been read
        end = min(start + ctx, len(self) - 1)  # the token there is a label only
        inputs, labels = torch.zeros_like(at), torch.full_like(at, IGNORE)
        for first, stop in job.spans(ctx):
            a, b = min(start + first, end), min(start + stop, end)
            if a < b:
                ids = torch.from_numpy(self.read(a, b + 1))
                inputs[done:done + b - a], labels[done:done + b - a] = ids[:-1], ids[1:]
            done += stop - first
        if docs is None:
            return inputs, labels
        # Documents start with a file, and after each token `docs`: for those, read it all.
        starts = {0, *(begin - start for begin in self.begins if start < begin < end)}
        if docs != NO_ID and start < end:
            starts.update((np.flatnonzero(self.read(start, end - 1) == docs) + 1).tolist())
        starts = torch.tensor(sorted(starts))
        labels[torch.isin(at, starts[1:] - 1)] = IGNORE
        return inputs, labels, starts


def open_file(path, vocab):
    """One file of token ids as a Part: what can be wrong with its form shows now."""
    wide = "<u2" if vocab <= 2**16 else "<u4"
    dtype = np.dtype(wide if path.suffix == ".bin" else np.uint8)
    try:
        ids = (np.lib.format.open_memmap(path, mode="r") if path.suffix == ".npy" else
               np.memmap(path, dtype, "r"))
    except ValueError as error:  # not .npy, not a whole number of ids
        raise BadInput(f"{path}: {error}")
    refuse(ids.ndim != 1 or ids.dtype.kind not in "iu",
           f"{path}: {ids.dtype} of shape {ids.shape} is not one row of integers")
    head = ids[:4096]
    refuse(dtype.itemsize == 2 and len(head) > 1 and head.any() and not head[1::2].any(),
           f"{path}: every second id is 0, as in uint32 read as uint16: save uint16 or .npy")
    return Part(path, ids.dtype, ids.offset, 0, len(ids))


def find_files(data):
    """The files that --data names, in an order that depends on their names alone."""
    root, found, skip = Path(data or ""), [], set()
    if data is None:
        root = Path(os.__file__).parent
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    if root.is_file():
        return [root]
    refuse(data == "" or not root.is_dir(), f"--data {data!r} is no file or folder")
    for folder, folders, names in os.walk(root, onerror=lambda error: refuse(True, error)):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip]
        found += [Path(folder, name) for name in names if name[0] != "."]
    return sorted(path for path in found if (data or path.suffix == ".py")
                  and path.is_file() and path.stat().st_size)


def open_data(data, vocab, tokenizer=None):
    """(train, valid): of every ten files the tenth is held out; of fewer, a tenth of each."""
    paths = find_files(data)
    if tokenizer and not any(path.suffix in (".bin", ".npy") for path in paths):
        cache, dtype, ends = extra("text", "--tokenizer").tokenize(paths, tokenizer)
        parts = [Part(cache, dtype, 0, *ids) for ids in zip([0, *ends], ends)]
    else:
        parts = [open_file(path, vocab) for path in paths]
    refuse(len({part.dtype for part in parts}) > 1,
           f"--data {data}: text and tokens, or several integer types, in one folder")
    train, valid = [part for i, part in enumerate(parts) if i % 10 != 9], parts[9::10]
    if not valid:
        cuts = [part.begin + (part.end - part.begin) * 9 // 10 for part in parts]
        train = [part._replace(end=cut) for part, cut in zip(parts, cuts)]
        valid = [part._replace(begin=cut) for part, cut in zip(parts, cuts)]
    return Tokens(train, vocab), Tokens(valid, vocab)


def read_windows(job, tokens, starts, settings):
    """This rank's slices of windows, and the number of labels in all windows of all ranks."""
    def work():
        batch = [tokens.window(start, job, settings.ctx, settings.docs) for start in starts]
        return batch, sum(int((labels != IGNORE).sum()) for _, labels, *_ in batch)
    return job.counted(work)  # one sum for both: this is done in every step


@lru_cache(maxsize=2)
def epoch_starts(length, ctx, seed, epoch):
    """Where an epoch's windows start: without overlap, in random order, aligned anew each time."""
    rng, n = np.random.default_rng([seed, epoch]), (length - 1) // ctx
    return rng.integers(length - n * ctx) + ctx * rng.permutation(n)


def train_starts(job, tokens, ctx, seed, step, grad_accum, ahead=0):
    """A step's windows for this rank's group: the groups take turns along the epochs' windows.
    ahead: by how many of them a run is ahead of its steps, since it once took more a step."""
    n, first = (len(tokens) - 1) // ctx, ahead + step * grad_accum * job.dp + job.dp_rank
    turns = range(first, first + grad_accum * job.dp, job.dp)
    return [int(epoch_starts(len(tokens), ctx, seed, i // n)[i % n]) for i in turns]


class Data(NamedTuple):
    train: Tokens  # or Recall of extras/recall.py
    valid: Tokens
    held_out: list  # where the windows start that this rank's group evaluates
    compare: str    # what a simple method reaches on them, for people
    mark: str       # a fingerprint of `train`


def find_tokens(job, settings):
    """(train, valid, a fingerprint of train): Tokens, the same on every rank."""
    s, guard = settings, extra("guard")

    def work():
        train, valid = open_data(s.data, s.config.vocab_size, s.codec)
        refuse(len(train) <= s.ctx or len(valid) < 2, f"--ctx {s.length} needs {s.ctx + 1} tokens, "
               f"and 2 to validate with: of --data {s.data} are {len(train)} and {len(valid)}")
        return train, valid, guard.fingerprint(train) if guard else f"{len(train)} tokens"
    if s.codec:  # one rank of each machine writes the cache
        job.together(lambda: work() if launched()[2] == 0 else None)
    train, valid, mark = job.together(work)
    refuse(len(set(job.gather(mark))) > 1, f"--data {s.data}: the ranks see different files")
    return train, valid, mark


def find_data(job, settings):
    """The Data that --task, --data and the tokenizer say."""
    s, text = settings, extra("text")
    if s.task == "recall":
        train, valid, compare = extra("recall", "--task recall").make_data(s)
        mark, said = "", "keys and values at the start of each window, asked for at its end"
    else:
        train, valid, mark = find_tokens(job, s)
        said = (f"{s.data or 'the Python standard library'}: {len(train):,} tokens, and "
                f"{len(valid):,} to validate")
    last = len(valid) - 1
    n = max(1, min(s.eval_windows, last // s.ctx))  # one, padded, where the data is shorter
    starts = [i * (last // n) for i in range(n)]
    job.say(f"data      {said}: {n} windows")
    if s.task == "text":
        compare = text.compare(job, s, train, valid, starts) if text else ""
    # Each group gets as many, perhaps an empty one past the end, so that all make the same calls.
    starts += [len(valid)] * (-n % job.dp)
    return Data(train, valid, starts[job.dp_rank::job.dp], compare, mark)


# 5. Sharding --------------------------------------------------------------------------------------

def shard_model(model, mesh, dtype, offload_params=False):
    """FSDP: a rank keeps 1/world of each weight, its gradient and its optimizer state, in float32.

    A unit is gathered, in `dtype`, when its forward or backward pass needs it, and freed after: a
    block, the embedding, the head (if it is not the embedding's own matrix), and the root."""
    low = dtype not in (torch.float32, torch.float64)
    precision = fsdp.MixedPrecisionPolicy(
        param_dtype=dtype if low else None, reduce_dtype=torch.float32 if low else None,
        cast_forward_inputs=False)  # a block takes more than tensors, and tokens are no floats
    offload = (fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload_params else
               fsdp.OffloadPolicy())
    heads = [] if model.config.tie_embeddings else [model.lm_head]
    for unit in [*model.layers, model.embed_tokens, *heads, model]:
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
        unit.set_gradient_divide_factor(1.0)  # FSDP would average; our loss is a sum over ranks
        unit.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
    fsdp.register_fsdp_forward_method(model, "logits")
    fsdp.register_fsdp_forward_method(model, "token_losses")
    return model


def make_moments(model, optimizer):
    """A step with gradients 0, so that AdamW's moments exist."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
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
    # The norm is that of the shards of all ranks: one number, so one decision, on every rank.
    shards = [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # else frozen
    norm = torch.nn.utils.get_total_norm(shards).item()
    norm = math.sqrt(job.agree(None, norm**2))
    refuse(not math.isfinite(norm), f"step {step}: gradient norm {norm}, nothing was updated")
    if grad_clip and norm > grad_clip:
        torch._foreach_mul_(shards, grad_clip / (norm + 1e-6))  # as torch's clip_grad_norm_
    optimizer.step()
    return loss, norm


@torch.no_grad()
def evaluate(job, model, data, settings):
    """Mean loss over the windows that are held out, by the same call as in training."""
    batch, total = read_windows(job, data.valid, data.held_out, settings)
    return job.agree(None, sum(
        model(inputs.to(job.device), labels.to(job.device), settings.recipe, total, *docs).item()
        for inputs, labels, *docs in batch))


# 7. Checkpoints -----------------------------------------------------------------------------------
# A checkpoint is a folder step-00000100 in --save: the tensors by torch's distributed checkpoint,
# and run.json. Each rank writes its own shards, and any number of ranks reads them. A folder's name
# has a dot until all of it is there, so a crash at any time leaves whole checkpoints, and rubbish
# that the next start sweeps away. run.json has size and checksum of each file: what does not fit
# is not read, not counted and not deleted.

# Flags that a resumed run takes from run.json: those that none may change, and those that one may.
# Of the latter only what was given is saved: a --min-lr that followed from --lr then follows the
# next --lr.
FIXED = ("model", "layers", "rope_theta", "init", "ctx", "seed", "task", "docs")
REMEMBERED = (*FIXED, *SWITCHES, "cp", "dtype", "data", "tokenizer", "steps", "lr", "warmup",
              "min_lr", "weight_decay", "grad_clip", "grad_accum", "eval_every", "eval_windows")
FACTS = {"step", "drawn", "data", "world", "config", "flags", "files"}  # what run.json says


def checkpoints(folder, dot=""):
    """The folders with the name of a checkpoint, oldest first; with a dot, of an unfinished one."""
    return sorted(Path(folder).glob(f"{dot}step-{'[0-9]' * 8}"))


def read_checkpoint(path):
    """run.json, and the path. BadInput if it does not fit its folder, or its files do not fit."""
    try:
        saved = json.loads((path / "run.json").read_text())
        same = set(saved) == FACTS and set(FIXED) <= set(saved["flags"]) <= set(REMEMBERED)
        same = same and set(saved["config"]) == {field.name for field in fields(GPTConfig)}
        refuse(not same, "another version of train.py wrote it")
        refuse(path.name != f"step-{saved['step']:08d}", f"it is of step {saved['step']}")
        for name, (size, _) in saved["files"].items():
            refuse((path / name).stat().st_size != size, f"{name} had {size} bytes when written")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"run.json: {error}")
    if saved["world"] != launched()[1]:
        saved["flags"].pop("cp", None)  # made for so many ranks
    return {**saved, "path": path}


def whole_checkpoints(folder):
    """The checkpoints that can be read, oldest first."""
    found = []
    for path in checkpoints(folder):
        with suppress(BadInput):
            found.append(read_checkpoint(path)["path"])
    return found


def damaged(path, error):
    """The BadInput for a checkpoint that cannot be read: it tells what to resume from."""
    name = max((old.name for old in whole_checkpoints(path.parent) if old < path), default="none")
    return BadInput(f"--resume: {path} is damaged: {error}; --resume STEP takes an older one: the "
                    f"newest whole one before it is {name}")


def find_checkpoint(folder, step):
    """read_checkpoint of the newest in --save, or of that of `step`; None if there is none."""
    found = [path for path in checkpoints(folder) if step in (NO_ID, int(path.name[5:]))]
    refuse(not found and step != NO_ID, f"--resume {step}: {folder} has no step-{step:08d}")
    try:
        return read_checkpoint(found[-1]) if found else None
    except BadInput as error:
        raise damaged(found[-1], error)


def sweep(folder):
    """Delete a checkpoint, and nothing else that somebody may have put there."""
    for pattern in ("run.json", ".metadata*", "__*.distcp"):
        for file in folder.glob(pattern):
            file.unlink()
    with suppress(OSError):  # not empty
        folder.rmdir()


def claim(settings):
    """Rank 0 makes --save this job's own -> the lock, to be held."""
    folder, guard = Path(settings.save), extra("guard")
    lock = guard.lock(folder) if guard else nullcontext()
    for path in set(folder.glob("step-*")) - set(checkpoints(folder)):
        print(f"notice    {path} has not the name of a checkpoint: it is left alone")
    for path in checkpoints(folder, "."):
        sweep(path)
    if guard and not (settings.saved and settings.saved["step"] >= settings.steps):
        new = max(1, settings.keep + 1 - len(whole_checkpoints(folder)))
        guard.need_space(settings, folder, new)
    return lock


def state_of(model, optimizer):
    """Every tensor that a step changes, by name; by the same on any number of ranks."""
    state = {"rng": torch.get_rng_state()}
    for name, p in model.named_parameters():
        state[f"model.{name}"] = p.detach()
        state.update({f"adamw.{name}.{key}": x for key, x in optimizer.state[p].items()})
    return state


def save_state(job, settings, model, optimizer, step, drawn, data):
    """Write a checkpoint, and remove all but the last --keep. BadInput if the disk is full."""
    folder, name, guard = Path(settings.save), f"step-{step:08d}", extra("guard")
    part = folder / f".{name}"
    flags = {name: getattr(settings, name) for name in REMEMBERED
             if name in FIXED or name in settings.given}
    facts = dict(step=step, drawn=drawn, data=data, world=job.world,
                 config=asdict(settings.config), flags=flags, files={})

    def write():
        distributed("save", state_of(model, optimizer), part)
        mine = [*part.glob(f"__{job.rank}_*"), *(part.glob(".metadata") if job.rank == 0 else ())]
        return {file.name: (file.stat().st_size, guard and guard.checksum(file)) for file in mine}

    def publish():
        (part / "run.json").write_text(json.dumps(facts, indent=1))
        part.rename(folder / name)
        for old in whole_checkpoints(folder)[:-settings.keep]:
            sweep(old.rename(folder / f".{old.name}"))
    try:
        for files in job.gather(job.together(write)):
            facts["files"].update(files)
        job.on_rank_0(publish)
    except BadInput as error:
        free = shutil.disk_usage(folder).free  # torch does not say that a disk is full
        job.on_rank_0(lambda: sweep(part))
        raise BadInput(f"--save: {folder / name} cannot be written, {free:,} bytes free: {error}; "
                       "those before it are whole")
    job.say(f"saved     {folder / name}")


def distributed(work, state, path):
    """torch's save or load: what fails on one rank is a BadInput on all."""
    import torch.distributed.checkpoint as dcp  # half a second
    try:
        getattr(dcp, work)(state, checkpoint_id=path)
    except dcp.api.CheckpointException as failure:
        error = failure.failures[min(failure.failures)][0]
        raise BadInput(str(error).partition("\n")[0] or type(error).__name__)


def load_state(job, settings, model, optimizer, data):
    """Set model and optimizer as a checkpoint or published weights have them -> steps done, windows
    drawn by all groups together. data: the fingerprint of what they are drawn from."""
    saved, guard = settings.saved, extra("guard")
    seen = saved and saved["step"], settings.save and Path(settings.save).is_dir()
    refuse(len(set(job.gather(seen))) > 1, f"--save {settings.save}: the ranks see different "
           "checkpoints or folders there: it must be on a disk that all machines share")
    if not saved:
        if settings.resume:
            job.say(f"resume    no checkpoint in {settings.save} yet: from the start")
        if settings.init:
            extra("hf", "--init").load_weights(job, settings.config, model, settings.init)
        return 0, 0
    path, was = saved["path"], saved["data"]
    refuse(was != data, f"--data is of {data}, and was of {was}: its windows would be others")
    make_moments(model, optimizer)  # there must be some to load into
    state = state_of(model, optimizer)
    try:
        if guard and settings.verify is not False:
            job.together(lambda: guard.verify(job, saved))
        elif not guard:
            job.say("notice    without the folder extras no checksum is compared")
        distributed("load", state, path)
    except BadInput as error:
        raise damaged(path, error)
    torch.set_rng_state(state["rng"])
    job.say(f"resume    {path}, written by {saved['world']} ranks")
    job.on_rank_0(lambda: put_aside(path))
    return saved["step"], saved["drawn"]


def put_aside(path):
    """Rename the checkpoints after the one that a run goes on from: the new ones replace them."""
    for newer in checkpoints(path.parent):
        if newer > path:
            print(f"notice    {newer} is {newer.rename(f'{newer}.old')} now")


# 8. The loop --------------------------------------------------------------------------------------

def watch_signals():
    """An Event, set by SIGTERM or SIGUSR1: stop after this step. The second one stops at once.

    Python runs a handler between two of its own instructions: in a step there may be none for
    minutes. But the signal's number goes into a pipe at once, where a thread waits."""
    asked, (pipe, write) = threading.Event(), os.pipe()

    def watch():
        for number in iter(lambda: os.read(pipe, 1)[0], signal.SIGINT):  # that is Python's own
            if asked.is_set():
                os._exit(128 + number)
            asked.set()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in {signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)}:  # Windows
        signal.signal(number, lambda number, frame: None)
    threading.Thread(target=watch, daemon=True).start()
    return asked


def rewind_log(path, step):
    """Drop what will be done anew, and a last line that a crash has cut off."""
    if not path.is_file():  # /dev/stdout is none
        return
    old, kept = path.read_bytes().splitlines(), []
    for i, line in enumerate(old, 1):
        record = re.fullmatch(rb'{"step": (\d+), ("validation_loss")?.*}', line)
        torn = i == len(old) and b'{"step": '.startswith(line.strip(b"\0")[:9])
        refuse(not (record or torn), f"--log {path}, line {i}, is no step: give another file")
        if record and int(record[1]) + bool(record[2]) <= step:
            kept.append(line)
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(b"".join(line + b"\n" for line in kept))
    os.replace(new, path)


def report(job, path, line, record):
    """Print a line, and append a record to --log."""
    def append():
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
    job.say(line)
    if path:
        job.on_rank_0(append, f"--log {path}: ")


def report_step(job, settings, record):
    """report() of a step, with its speed and memory."""
    seconds, tokens = record["seconds"], settings.grad_accum * job.dp * settings.ctx
    record["tokens_per_second"] = tokens / seconds
    line = (f"step {record['step']:5d} | loss {record['loss']:.4f} | lr {record['lr']:.2e} | "
            f"norm {record['norm']:.3f} | {tokens / seconds:,.0f} tokens/s | {seconds:.2f} s")
    if job.device.type == "cuda" and extra("plan"):
        line += extra("plan").use_of_gpu(job, settings, record)
    report(job, settings.log, line, record)


def run_steps(job, settings, model, optimizer, data, first, drawn):
    """Train from step `first` to --steps -> whether it came so far: a signal ends it after any
    step. drawn: the windows that were trained on before."""
    s, plan, began = settings, extra("plan"), time.perf_counter()
    windows = s.grad_accum * job.dp  # a step's
    watch = plan.progress_bar if plan else lambda *_: nullcontext()
    ahead, asked = drawn - first * windows, watch_signals() if s.save else None
    if s.log:
        job.on_rank_0(lambda: rewind_log(Path(s.log).resolve(), first))
    for step in range(first, max(first, s.steps) + 1):
        if step >= s.steps or s.eval_every and step % s.eval_every == 0:
            with watch(job, model, "evaluation", len(data.held_out), s):
                valid = evaluate(job, model, data, s)
            report(job, s.log, f"step {step:5d} | validation loss {valid:.4f} nats per token"
                   f"{data.compare}", dict(step=step, validation_loss=valid))
        if step >= s.steps:
            break
        begin, lr = time.perf_counter(), learning_rate(s, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        starts = train_starts(job, data.train, s.ctx, s.seed, step, s.grad_accum, ahead)
        batch, total = read_windows(job, data.train, starts, s)
        inside = s.profile and step == min(first + 1, s.steps - 1)  # the first is not typical
        with (extra("road", "--profile").profiled(job, s.profile) if inside else nullcontext(),
              watch(job, model, f"step {step + 1}", plan and plan.step_passes(s), s)):
            loss, norm = train_step(job, model, optimizer, batch, total, s.recipe, s.grad_clip,
                                    step + 1)
        done, drawn = step + 1, ahead + (step + 1) * windows
        report_step(job, s, dict(step=done, loss=loss, lr=lr, norm=norm,
                                 seconds=time.perf_counter() - begin, drawn=drawn))
        stopping = asked and job.agree(None, asked.is_set()) > 0  # any rank was
        due = s.save_every and done % s.save_every == 0
        if s.save and (stopping or due or done == s.steps):
            save_state(job, s, model, optimizer, done, drawn, data.mark)
        if stopping:
            job.say(f"stopped   after step {done}: --save {s.save} --resume goes on")
            return False
    job.say(f"done      {step - first} steps, {(step - first) * windows * s.ctx:,} tokens in "
            f"{timedelta(seconds=round(time.perf_counter() - began))}, validation loss "
            f"{valid:.4f}{data.compare}")
    return True


def use_model(job, settings, model, data):
    """What a trained model is good for."""
    if settings.export:
        extra("hf", "--export").export(job, settings, model)
    if settings.loss_by_position:
        batch, _ = read_windows(job, data.valid, data.held_out, settings)
        extra("road", "--loss-by-position").show_by_position(job, model, batch, settings)
    if settings.sample:
        job.say(extra("text", "--sample").sample(job, model, settings))


# 9. Main ------------------------------------------------------------------------------------------

def main(settings):
    """Do what the settings say -> the exit code."""
    refuse_early(settings)
    plan, road, memory, kernels = map(extra, ("plan", "road", "memory", "kernels"))
    if settings.dry_run:
        make_folders(settings)
        if settings.road:
            return road.travel(road.road(settings), settings)
        return memory.dry_run(settings)
    # Rank 0 decides for all: ranks that measure for themselves might disagree.
    fault = memory.too_much(settings) if memory and launched()[0] == 0 else None
    job = join(settings)
    if plan:
        settings = settings.at(kernel=kernels.choose_kernel(settings, job))
        plan.print_plan(settings, job)
    job.agree(fault)
    job.on_rank_0(lambda: make_folders(settings))
    if settings.one_rank_of:
        return road.one_rank(settings, job)
    if settings.road:
        rows = road.road(settings, job)
        return road.travel(rows, settings) if job.rank == 0 else 0

    settings = replace(settings, recipe=replace(settings.recipe, **job.groups))
    lock = job.on_rank_0(lambda: claim(settings)) if settings.save else None
    with lock or nullcontext():  # rank 0 holds it until the job or its process ends
        data = find_data(job, settings)
        model, optimizer = build(settings, job)
        first, drawn = load_state(job, settings, model, optimizer, data.mark)
        if run_steps(job, settings, model, optimizer, data, first, drawn):
            use_model(job, settings, model, data)
    dist.destroy_process_group()
    return 0


def run(argv=None):
    """main(), and then os._exit: a tidy end would wait for ranks that wait for this one. torchrun
    ends all ranks when it sees one go, so the rank that has something to say goes first."""
    rank, _, local_rank, _ = launched()
    code = 1
    sys.stdout.reconfigure(errors="backslashreplace")  # what a sample or a path cannot show
    try:
        settings = make_settings(argv)
        code = main(settings) or 0
    except (BadInput, OSError) as error:
        # Once the ranks have met, all know it, and rank 0 says it. Before, each one may be alone:
        # every rank speaks, those of one machine after their first.
        met = dist.is_initialized() and isinstance(error, BadInput)
        first = rank == 0 if met else local_rank == 0
        if not first:
            time.sleep(10 if met else 1)
        if rank == 0 or not met:
            print(f"train.py: {error}", file=sys.stderr)
        code = 2
    except torch.OutOfMemoryError:  # known to this rank; often all ranks meet it together
        time.sleep(2 * (rank > 0))
        hint = extra("memory").out_of_memory(settings) if extra("memory") else "out of GPU memory"
        print(f"train.py: rank {rank}: {hint}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
