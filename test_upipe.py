"""The laws of upipe.py and train.py, one sentence each.

    python -m pytest -q                     everything, extras too, a few minutes on two cores
    python test_upipe.py --benchmark        memory, traffic and speed: the numbers of the README

    claim                                                   proved by test_...
    every recipe is plain attention, in loss and gradients  every_recipe_gives, low_precision,
                                                            weight_gradients, what_is_frozen
    what is illegal is refused by name, and costs nothing   legal_sizes, recipes_that_contradict
    weights, positions, kernels                             presets, initial_values, rotary_tables,
                                                            the_kernel_pair
    buffers stay, the host store returns what it was given  stage_buffers, the_host_store, pinned
    copies may be late                                      copies_may_be_as_late, a_forgotten_wait
    memory and traffic are what the lecture says            a_block_holds, traffic, autograd_keeps,
                                                            no_tensor_of_a_step
    a gradient that somebody holds is never altered         a_fork_of_the_model, a_middle_layer
    sharded weights train as one process does               sharded_steps, bfloat16
    a loss that is not finite spoils nothing                a_loss_that_is_not_finite
    data: each token once, documents apart                  parts_of, windows_depend, data_of_many
    bad input is one line, before the first step            bad_input, a_process_with, a_flag
    one process, torchrun and any rank's failure            one_process, a_rank_that_fails
    five steps and five more are ten, on any ranks          five_steps, windows_depend
    what is damaged, full, locked or foreign is named       a_damaged, a_full_disk, a_folder, a_log
    signals and kill -9 cost no saved step                  kill_9, a_signal, a_second_signal
    on a GPU too                                            copies_on_a_stream, peak_on_a_gpu
Tools come first: 1 the reference, 2 ranks, 3 meters, 4 cases. The laws follow, in parts 5 to 18.

A letter and a number in a docstring (B1, K3) name a kind of bug that other projects have reported
in public: A loss and scaling, B shapes, C precision, D memory, E offload, F sharding, H launching,
I data, J stability, K process groups.
"""
import ctypes
import doctest
import functools
import io
import json
import math
import mmap
import multiprocessing as mp
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, example, given, settings, strategies as st
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
import upipe
from upipe import GPT, GPTConfig, IGNORE, PRESETS, Recipe

torch.set_num_threads(1)  # a thread per rank: here and in the worker processes below
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # for the processes of all other tests


# 1. The reference ---------------------------------------------------------------------------------
#
# Naive on purpose: S x S scores, an explicit mask, autograd. w is a dict of tensors under the names
# of GPT, which are Hugging Face's.


def random_weights(cfg, seed, dtype=F64):
    """Norms around 1, the rest scaled so that nothing saturates or vanishes."""
    rng, values = np.random.default_rng(seed), {}
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GPT(cfg).named_parameters()}
    for name, shape in shapes.items():
        values[name] = (rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else
                        rng.normal(0, shape[1] ** -0.5, shape))
    return {name: torch.tensor(value, dtype=dtype) for name, value in values.items()}


def ref_norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def ref_frequencies(cfg):
    """Radians per token of the d/2 pairs. Llama 3 slows the long waves by `factor`."""
    f = cfg.rope_theta ** -(torch.arange(0, cfg.head_dim, 2, dtype=F64) / cfg.head_dim)
    if cfg.rope_scaling:
        r = cfg.rope_scaling
        turns = r["original_max_position_embeddings"] * f / (2 * math.pi)
        low, high = r["low_freq_factor"], r["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        f = keep * f + (1 - keep) * f / r["factor"]
    return f


def ref_rotate(x, cfg):
    """x [S, heads, d]: pairs (i, i + d/2) as complex numbers, turned by position * frequency."""
    a, b = x.chunk(2, dim=-1)
    angle = torch.outer(torch.arange(len(x), dtype=F64), ref_frequencies(cfg))
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([z.real, z.imag], dim=-1)


def ref_attention(q, k, v):
    """q [S, H, d], k, v [S, K, d] -> o [S, H, d], lse [H, S]; head i reads kv head i // (H / K)."""
    (S, H, d), K = q.shape, k.shape[1]
    k, v = (x.repeat_interleave(H // K, dim=1) for x in (k, v))
    scores = torch.einsum("ihd, jhd -> hij", q, k) / d ** 0.5
    scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("hij, jhd -> ihd", scores.softmax(-1), v), scores.logsumexp(-1)


def ref_block(w, cfg, x, i):
    def linear(name, x):
        return x @ w[f"layers.{i}.{name}.weight"].T

    def norm(name, x):
        return ref_norm(x, w[f"layers.{i}.{name}.weight"], cfg.norm_eps)

    n = norm("input_layernorm", x)
    q, k, v = (linear(f"self_attn.{p}_proj", n).view(len(x), -1, cfg.head_dim) for p in "qkv")
    if cfg.qk_norm:
        q, k = norm("self_attn.q_norm", q), norm("self_attn.k_norm", k)
    o, _ = ref_attention(ref_rotate(q, cfg), ref_rotate(k, cfg), v)
    h = x + linear("self_attn.o_proj", o.flatten(1))
    n = norm("post_attention_layernorm", h)
    gate = linear("mlp.gate_proj", n)
    return h + linear("mlp.down_proj", gate * gate.sigmoid() * linear("mlp.up_proj", n))


def ref_logits(w, cfg, tokens):
    x = w["embed_tokens.weight"][tokens]
    for i in range(cfg.n_layers):
        x = ref_block(w, cfg, x, i)
    head = w["embed_tokens.weight" if cfg.tie_embeddings else "lm_head.weight"]
    return ref_norm(x, w["norm.weight"], cfg.norm_eps) @ head.T


def ref_loss(logits, labels, total):
    losses = [logits[i].logsumexp(-1) - logits[i, t] for i, t in enumerate(labels) if t != -100]
    return sum(losses, 0 * logits.sum()) / total


def count_labels(sequences):
    return sum(int((labels != -100).sum()) for _, labels in sequences)


def reference(cfg, seed, sequences, dtype=F64, frozen=()):
    """[(tokens, labels), ...] -> loss (the mean over all labels), all logits, gradients, of what is
    not frozen.

    dtype: that of the model under test. Weights are rounded to it; all arithmetic is float64."""
    w = {name: p.to(F64).requires_grad_() for name, p in random_weights(cfg, seed, dtype).items()}
    logits, total = [ref_logits(w, cfg, tokens) for tokens, _ in sequences], count_labels(sequences)
    loss = sum(ref_loss(x, labels, total) for x, (_, labels) in zip(logits, sequences))
    loss.backward()
    return SimpleNamespace(loss=loss.item(), logits=torch.cat(logits).detach(),
                           grads={name: w[name].grad for name in trained(cfg, frozen)})


# 2. Ranks -----------------------------------------------------------------------------------------
#
# RANKS[C](function, *args) runs function(*args) on C ranks and returns the list of their results.
# To start processes takes seconds, to call them milliseconds: they start at the first call, as
# forks of one process that has imported this file, and serve the whole session. What a rank raises
# is the test's failure; ranks that hang are killed.

forks = mp.get_context("forkserver")
forks.set_forkserver_preload([__name__, "torch._dynamo", "torch.distributed.checkpoint"])


class Ranks:
    def __init__(self, C):
        self.C, self.workers = C, {}  # process id: executor

    def start(self):
        store = tempfile.mktemp(prefix="ranks-")
        workers = [ProcessPoolExecutor(1, forks, meet, (rank, self.C, store))
                   for rank in range(self.C)]
        with mock.patch.dict(os.environ, NO_GPU):
            met = [worker.submit(os.getpid) for worker in workers]
            self.workers = {pid.result(): worker for pid, worker in zip(met, workers)}

    def stop(self):
        for pid in self.workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.workers = {}

    def __call__(self, function, *args, limit=60):
        if self.C == 1:  # needs no process group: the function runs here
            return [function(*args)]
        if not self.workers:
            self.start()
        work = pickle.dumps((function, args))
        calls = [worker.submit(call, work) for worker in self.workers.values()]
        wait(calls, limit, FIRST_EXCEPTION)
        done, late = wait(calls, 3)  # the others may wait for one that failed for ever
        failed = [one for one in calls if one in done and one.exception()]
        if failed or late:
            self.stop()
        if failed:
            raise failed[0].exception()
        assert not late, f"{len(late)} ranks did not come back from {function.__name__}"
        return [pickle.loads(one.result()) for one in calls]


def meet(rank, C, store):
    """Begins a worker's life, which ends with that of the process that started it."""
    threading.Thread(target=lambda: (mp.parent_process().join(), os._exit(1)), daemon=True).start()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=C,
                            timeout=timedelta(minutes=5))


def call(work):
    """Plain pickles, for torch would put each tensor into shared memory."""
    function, args = pickle.loads(work)
    return pickle.dumps(function(*args))


RANKS = {C: Ranks(C) for C in (1, 2, 4, 8)}


@pytest.fixture(autouse=True)
def hide_the_gpu(request, monkeypatch):
    if cuda.mark not in request.node.iter_markers():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# 3. Meters ----------------------------------------------------------------------------------------


class Meter(TorchDispatchMode):
    """Sees every operation: knows the storages alive after it (views share one), counts the calls.

    FSDP and `stream` shrink storages to nothing and grow them again, so all sizes are asked for at
    each new one. A step's only uint8 tensors are HostStore's slabs: host memory, not counted."""

    def __init__(self):
        super().__init__()
        self.storages = weakref.WeakValueDictionary()
        self.slabs = weakref.WeakValueDictionary()
        self.calls, self.peak, self.largest, self.summed = Counter(), 0, 0, 0

    def bytes(self):
        return sum(storage.nbytes() for storage in self.storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor comes back with its local tensor
        out = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket._qualified_op_name] += 1
        if "reduce_scatter" in func.name():
            self.summed += args[1].numel()
        new = False
        for t in (t for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            storage = t.untyped_storage()
            if t.dtype == torch.uint8:
                self.slabs[storage._cdata] = storage
            if storage._cdata not in self.slabs:
                new |= storage._cdata not in self.storages
                self.storages[storage._cdata] = storage
                self.largest = max(self.largest, t.numel())
        if new:
            self.peak = max(self.peak, self.bytes())
        return out


@contextmanager
def watched(owner, name, see):
    """Calls see(result, *args) after each call of owner.name."""
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
        result = original(*args, **kwargs)
        see(result, *args)
        return result

    with mock.patch.object(owner, name, wrapper):
        yield


# 4. Cases -----------------------------------------------------------------------------------------


def legal(H, K, C):
    """Every legal U, without the formulas: rank 0's query heads, cut in order into stages of u.

    The readers of a kv head must be on one rank or else fill whole ranks; and a stage must read one
    kv head only, or hold all readers (on this rank) of those it reads."""
    if H % C:
        return []
    reads = [[i * K // H for i in range(r * H // C, (r + 1) * H // C)] for r in range(C)]
    for kv in range(K):
        readers = [r for r in range(C) if kv in reads[r]]
        if len(readers) > 1 and any(set(reads[r]) != {kv} for r in readers):
            return []

    def fits(u):
        cuts = [reads[0][i:i + u] for i in range(0, H // C, u)]
        inside = all(len(set(cut)) == 1 for cut in cuts)
        whole = all(reads[0].count(kv) == cut.count(kv) for cut in cuts for kv in cut)
        return len(cuts[-1]) == u and (inside or whole)

    return [u * C for u in range(1, H // C + 1) if fits(u)]


SIZES = [(R, P, H, K) for R in (1, 2, 4) for P in (1, 2, 4) for K in (1, 2, 3, 4, 6, 8)
         for H in range(K, 13, K) if R * P <= 4 and legal(H, K, P)]
SMALL = GPTConfig(vocab_size=97, dim=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8,
                  ffn_dim=40, rope_theta=1e4)
THREE, FOUR = replace(SMALL, n_layers=3), replace(SMALL, n_layers=4)
SLOWED = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
ALL_ON = Recipe("upipe", checkpoint=1, keep_attention=True, offload=True, stream=True, tile=7)
TWO_LEVELS = replace(ALL_ON, checkpoint=2, keep_attention=False)


@dataclass(frozen=True)
class Case:
    """C ranks, a model, a recipe, n tokens, which of their labels count, where documents start."""
    C: int
    config: GPTConfig
    recipe: Recipe
    n: int
    mask: str = "every label"
    seed: int = 0
    frozen: tuple = ()  # beginnings of names of weights
    docs: tuple = (0,)

    def data(self):
        """The whole sequence: tokens [n], labels [n]."""
        rng, n, s = np.random.default_rng(self.seed), self.n, -(-self.n // self.C)
        tokens, labels = torch.tensor(rng.integers(self.config.vocab_size, size=(2, n)))
        tokens[:2] = torch.arange(n)[:2]  # among equal tokens q and k have nothing to learn
        i = torch.arange(n)
        counts = {"every label": i >= 0, "no label": i < 0,
                  "one label": i == 1 + self.seed % max(1, n - 1),
                  "none on one rank": i // s != self.seed % self.C,
                  "last of each shard": (i % s == s - 1) & (i < n - 1)}[self.mask]
        return tokens, torch.where(counts, labels, -100)

    def documents(self):
        """The same as one (tokens, labels) for each document."""
        tokens, labels = self.data()
        ends = (*self.docs[1:], self.n)
        return [(tokens[a:b], labels[a:b]) for a, b in zip(self.docs, ends)]

    def shard(self):
        """This rank's part, and where documents start."""
        docs = torch.tensor(self.docs) if len(self.docs) > 1 else None
        return *upipe.shard(*self.data(), ring=self.recipe.ring), docs


@functools.cache
def met(world, cp, ring):
    return train.Settings.meet(SimpleNamespace(cp=cp, ring=ring), torch.device("cpu"))


def job_of(cp, ring=1):
    """What train.py's join() makes of this process: once, for groups are few."""
    return met(dist.group.WORLD, cp, ring)


def here(recipe):
    """The recipe with the groups of this process."""
    if recipe.ring == 1:
        return recipe
    return replace(recipe, **job_of(dist.get_world_size(), recipe.ring).groups)


def trained(config, frozen):
    """The names of the weights that do not begin with one of these."""
    return [name for name in random_weights(config, 0) if not name.startswith(tuple(frozen))]


@st.composite
def cases(draw):
    R, P, H, K = draw(st.sampled_from(SIZES))
    config = GPTConfig(vocab_size=draw(st.integers(5, 40)), dim=draw(st.integers(6, 24)),
                       n_layers=draw(st.integers(2, 4)), n_heads=H, n_kv_heads=K, rope_theta=1e4,
                       head_dim=2 * draw(st.integers(1, 5)), ffn_dim=draw(st.integers(3, 30)),
                       qk_norm=draw(st.booleans()), tie_embeddings=draw(st.booleans()),
                       rope_scaling=draw(st.sampled_from([None, SLOWED])))
    parts = [*random_weights(config, 0), "layers.0.", "layers.1.", "layers.1.self_attn"]
    parts = draw(st.just(set()) | st.sets(st.sampled_from(parts), max_size=4))
    frozen = draw(st.sampled_from([sorted(parts), trained(config, parts)])) if parts else ()
    attention = draw(st.sampled_from(["upipe", "ulysses"] + ["plain"] * (R * P == 1)))
    U = draw(st.sampled_from([0] + legal(H, K, P))) if attention == "upipe" else 0
    k = draw(st.integers(attention == "upipe", config.n_layers + 1))
    offload = k > 0 and draw(st.booleans())
    recipe = Recipe(attention, U, checkpoint=k, keep_attention=k == 1 and draw(st.booleans()),
                    offload=offload, stream=offload and draw(st.booleans()),
                    tile=k and draw(st.integers(0, 12)), ring=R)
    mask = draw(st.sampled_from(["every label", "none on one rank", "one label",
                                 "last of each shard"]))
    n = draw(st.integers(2, 41))
    docs = draw(st.just(set()) | st.sets(st.integers(1, n - 1), max_size=4))
    case = Case(R * P, config, recipe, n, mask, draw(st.integers(0, 99)), frozen,
                (0, *sorted(docs)))
    assume(trained(config, frozen))
    # From a document's first token alone, or from equal ones, q and k learn nothing.
    assume(any((labels[1:] != -100).any() and (tokens[:2] != tokens[0]).any()
               for tokens, labels in case.documents()))
    return case


def laws(examples):
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None,
                    suppress_health_check=list(HealthCheck))


# 5. One function ----------------------------------------------------------------------------------


def build(cfg, seed, dtype=F64, frozen=()):
    model = GPT(cfg).to(dtype)
    model.load_state_dict(random_weights(cfg, seed, dtype))
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith(tuple(frozen)))
    return model


def step(model, case):
    """Forward and backward on this rank -> its share of the loss."""
    tokens, labels, docs = case.shard()
    loss = model(tokens, labels, here(case.recipe), docs=docs)
    loss.backward()
    return loss.item()


def gradients(model):
    """{name: gradient} of those weights that are trained, or have one all the same."""
    found = {name: p.grad for name, p in model.named_parameters()
             if p.requires_grad or p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad
            for name, grad in found.items()}


def rank_result(case, dtype):
    """A9: evaluation on the way, the loss of training, leaves gradients alone and parks nothing."""
    model = build(case.config, case.seed, dtype, case.frozen)
    loss, (tokens, labels, docs), recipe = step(model, case), case.shard(), here(case.recipe)
    with torch.no_grad():
        again = model(tokens, labels, recipe, docs=docs).item()
        assert again == pytest.approx(loss, rel=rounding(dtype))
        logits = model.logits(tokens, recipe, docs)
    assert model.store.bytes == 0
    return SimpleNamespace(loss=loss, logits=logits, grads=gradients(model))


def run(case, dtype=F64):
    """The whole result: losses and gradients add up over the ranks, logits go to their places."""
    parts, R = RANKS[case.C](rank_result, case, dtype), case.recipe.ring
    s = len(parts[0].logits)
    places = [upipe.token_places(s, case.C, R, rank) for rank in range(case.C)]
    logits = torch.cat([part.logits for part in parts])[torch.cat(places).argsort()]
    return SimpleNamespace(loss=sum(part.loss for part in parts), logits=logits[:case.n],
                           grads=added([part.grads for part in parts]))


def added(parts):
    return {name: sum(grads[name].double() for grads in parts) for name in parts[0]}


def expected(case, dtype=F64):
    return reference(case.config, case.seed, case.documents(), dtype, case.frozen)


def assert_close(what, ours, ref, tolerance):
    """Relative to the size of the reference, which must have one."""
    assert ref.norm() > 1e-6, f"{what}: the reference is all but zero, this would compare nothing"
    error = (ours.double() - ref).norm() / ref.norm()
    assert error <= tolerance, f"{what}: relative error {error:.1e} > {tolerance:.1e}"


def assert_grads(ours, ref, tolerance=1e-9):
    assert ours.keys() == ref.keys()
    for name in ref:
        assert_close(name, ours[name], ref[name], tolerance)


def assert_same(ours, ref, tolerance=1e-9):
    assert ours.loss == pytest.approx(ref.loss, rel=tolerance, abs=0)
    assert_close("logits", ours.logits, ref.logits, tolerance)
    assert_grads(ours.grads, ref.grads, tolerance)


@laws(100)
@given(cases())
@example(Case(8, replace(SMALL, n_heads=8), replace(ALL_ON, ring=4), 41, docs=(0, 5, 30)))
def test_every_recipe_gives_the_loss_logits_and_gradients_of_plain_attention(case):
    """To 1e-9, in every parameter that is trained, be it one matrix; a frozen one has no gradient.
    A1, A5, A7 labels that are masked or padding; B1, I3 lengths that the ranks do not divide, or
    fewer tokens than ranks; B2 heads that they do not; B5 sizes that could be confused; I5
    attention is causal and crosses the ranks, and stays within documents. Rings of 2 and 4."""
    assert_same(run(case), expected(case))


@pytest.mark.parametrize("recipe", [ALL_ON, TWO_LEVELS])
@pytest.mark.parametrize("parts, invert, blocks, weights", [
    ([], False, [3, 2, 1, 0], 4 * 9 + 2), (["layers.2.mlp.down_proj"], True, [3, 2], 1),
    (["embed_tokens", "layers.0.", "layers.1.", "layers.2."], False, [3], 9 + 2)])
def test_what_is_frozen_costs_nothing(recipe, parts, invert, blocks, weights):
    """No gradient is added up for it, and no backward pass goes below the lowest trained weight."""
    model = build(FOUR, 0, F64, trained(FOUR, parts) if invert else parts)
    passes, sums = dict(forward=[], again=[], backward=[]), Counter()
    model.progress = lambda layer, way: passes[way].append(layer)

    def see(totals, weights, _):
        sums.update(w for w, total in zip(weights, totals) if total is not None)

    with watched(upipe, "zero_sums", see):
        step(model, Case(1, FOUR, recipe, 21))
    assert passes["backward"] == blocks and len(sums) == weights
    assert all(w.requires_grad for w in sums)
    assert min(passes["again"], default=2) >= blocks[-1] // 2 * 2  # a segment is two blocks


def rounding(dtype):
    """The relative error that rounding to dtype leaves in a two-block model's gradients.

    From a weight through the loss to a gradient, a number is rounded about N = 50 times (some 12
    operations per block and direction), each time by at most u = eps / 2, at random: sqrt(N) u."""
    return 50 ** 0.5 * torch.finfo(dtype).eps / 2


@laws(20)
@given(cases(), st.sampled_from([F32, BF16]))
def test_low_precision_is_off_by_its_rounding_alone(case, dtype):
    """float32 and bfloat16 against float64 on the same, rounded, weights.

    Sizes are kept from ill-conditioned ones (one label, heads of two, an MLP of three). Softmax and
    norms cancel digits: the error of all gradients, as one vector, is below 5 times rounding(), and
    that of one parameter below 16 times: 7% and 22% in bfloat16. The median is 1.5 times."""
    config = replace(case.config, dim=case.config.dim + 8, n_layers=2,
                     head_dim=case.config.head_dim + 6, ffn_dim=case.config.ffn_dim + 8)
    case = replace(case, config=config, n=case.n + 16, mask="every label", frozen=())
    ours, ref = run(case, dtype), expected(case, dtype)
    assert_same(ours, ref, 16 * rounding(dtype))
    both = (torch.cat([r.grads[name].flatten() for name in ref.grads]) for r in (ours, ref))
    assert_close("all gradients", *both, 5 * rounding(dtype))


def test_weight_gradients_do_not_lose_digits_with_more_tiles():
    """C2: bfloat16's error in each matrix of MLP and head is flat from 1 to 256 tiles (summed in
    bfloat16 it would grow tenfold)."""
    case, errors = Case(1, SMALL, ALL_ON, 256), {}
    ref = expected(case, BF16).grads
    for tile in (0, 16, 1):
        ours = run(replace(case, recipe=replace(ALL_ON, tile=tile)), BF16).grads
        errors[tile] = np.array([(ours[name] - ref[name]).norm() / ref[name].norm()
                                 for name in ref if "mlp" in name or "lm_head" in name])
    assert (errors[16] < 1.2 * errors[0]).all() and (errors[1] < 1.2 * errors[0]).all(), errors


def test_without_any_label_loss_and_gradients_are_zero():
    """A5: nothing to predict is not 0/0."""
    ours = run(Case(2, SMALL, ALL_ON, 22, "no label"))
    assert ours.loss == 0
    assert all((grad == 0).all() for grad in ours.grads.values())


# 6. What is legal ---------------------------------------------------------------------------------


def test_legal_sizes_pass_and_all_others_are_refused_with_the_legal_ones():
    """B2: check() agrees with legal(), told by hand, up to H = 16; a refusal names the choice."""
    verdicts = Counter()
    for H, C in ((H, C) for H in range(1, 17) for C in range(1, 13)):
        for K, U in ((K, U) for K in range(1, H + 1) if H % K == 0 for U in range(1, H + 2)):
            config = replace(SMALL, n_heads=H, n_kv_heads=K)
            recipe = Recipe("upipe", heads_per_stage=U, checkpoint=1)
            choice, verdict = legal(H, K, C), U in legal(H, K, C)
            verdicts[verdict] += 1
            if verdict:
                upipe.check_recipe(recipe, config, C)
                continue
            with pytest.raises(ValueError) as refusal:
                upipe.check_recipe(recipe, config, C)
            assert (f"heads_per_stage={U}" if choice else f"{C} ranks") in str(refusal.value)
            choice = choice or [c for c in range(1, H + 1) if legal(H, K, c)]
            assert f"(legal: {choice}" in str(refusal.value)
    assert min(verdicts.values()) > 300


@pytest.mark.parametrize("word, C, recipe", [
    ("plain", 2, Recipe()),
    ("'flash'", 1, Recipe("flash")),
    ("heads_per_stage", 1, Recipe(heads_per_stage=4)),
    ("heads_per_stage=3", 4, Recipe("upipe", heads_per_stage=3, checkpoint=1)),
    ("checkpoint", 1, Recipe(checkpoint=-1)),
    ("tile", 1, Recipe(tile=-5)),
    ("kernel", 1, Recipe(kernel="fast")),
    ("'upipe' needs checkpoint", 2, Recipe("upipe")),
    ("tile=8 needs checkpoint", 2, Recipe("ulysses", tile=8)),
    ("keep_attention", 2, Recipe("upipe", checkpoint=2, keep_attention=True)),
    ("offload", 2, Recipe("ulysses", offload=True)),
    ("stream", 2, Recipe("upipe", checkpoint=1, stream=True)),
    ("ring=3 does not divide", 4, Recipe("ulysses", ring=3)),
    ("ring=2 x 4 ranks", 8, Recipe("ulysses")), ("even", 2, Recipe("ulysses", ring=2))])
def test_recipes_that_contradict_themselves_are_refused_by_name(word, C, recipe):
    """No switch is silently ignored; and nothing is sent before, so that no rank waits."""
    tokens = torch.zeros(3, dtype=torch.int64)
    with simulated_ranks(C), Meter() as meter, pytest.raises(ValueError, match=word):
        GPT(SMALL)(tokens, tokens, recipe)
    assert not [name for name in meter.calls if name.startswith("c10d")]


def test_models_that_cannot_be_are_refused_by_name():
    """K must divide H, heads are even, a rotary scaling is one that is implemented."""
    for wrong in (dict(n_kv_heads=3), dict(head_dim=7), dict(rope_scaling=dict(rope_type="yarn"))):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(SMALL, **wrong)


# 7. Weights and positions -------------------------------------------------------------------------


@pytest.mark.parametrize("name, published", [
    ("tiny", 3.261e5), ("llama3.2-1b", 1.236e9), ("llama3.2-3b", 3.213e9), ("llama3-8b", 8.030e9),
    ("llama3-70b", 70.55e9), ("qwen3-32b", 32.76e9)])
def test_presets_have_the_published_number_of_parameters(name, published):
    """To all published digits; tiny, the default on a CPU, is what its name says."""
    with torch.device("meta"):
        count = sum(p.numel() for p in GPT(PRESETS[name]).parameters())
    assert float(f"{count:.3e}") == float(f"{published:.3e}")


def rank_sharded_weights(seed):
    with torch.device("meta"):
        model = GPT(SMALL)
    train.shard_model(model, job_of(1).everyone, F32).to_empty(device="cpu")
    model.init_weights(seed)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def test_initial_values_depend_on_the_seed_alone():
    """F4: the same bits in one process and on shards that were filled on each rank of any world;
    another seed or matrix is another value."""
    expected, other = GPT(SMALL, seed=3).state_dict(), GPT(SMALL, seed=4).state_dict()
    for weights in RANKS[2](rank_sharded_weights, 3) + RANKS[4](rank_sharded_weights, 3):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    matrices = [name for name, p in expected.items() if p.dim() > 1]
    assert not any(torch.equal(expected[name], other[name]) for name in matrices)
    assert len({expected[name][0, 0].item() for name in matrices}) == len(matrices)
    tied = GPT(replace(SMALL, tie_embeddings=True), seed=3).state_dict()
    assert all(torch.equal(tied[name], expected[name]) for name in tied if "embed" not in name)
    scale = expected["embed_tokens.weight"] / tied["embed_tokens.weight"]
    assert (scale - SMALL.dim ** 0.5).abs().max() < 1e-3  # 1 instead of 1/sqrt(D)


@pytest.mark.parametrize("name", ["tiny", "llama3-8b", "llama3.2-1b"])
def test_rotary_tables_are_exact_at_any_position(name):
    """C1: float32 tables within 1e-6 of float64, up to 5M and in a shard that ends there."""
    config, end = PRESETS[name], 5 * 2 ** 20
    positions = torch.tensor([0, 1, 65_535, 2 ** 20, 5_000_000, *range(end - 99, end)])
    angle = positions.numpy()[:, None] * ref_frequencies(config).numpy()
    tables, exact = upipe.rotary(config, positions), np.stack((np.cos(angle), np.sin(angle)), 1)
    assert tables.dtype == F32
    np.testing.assert_allclose(tables.double(), exact, atol=1e-6, rtol=0)


# 8. Kernels, stages, buffers, host store ----------------------------------------------------------


def laid_out(x, layout):
    """The same values, laid out in memory as others make them."""
    if layout == "split":  # part of a wider projection
        return torch.cat([x, x + 1], dim=-1)[..., :x.shape[-1]]
    return x.transpose(0, -1).contiguous().transpose(0, -1) if layout == "transposed" else x


@laws(60)
@given(S=st.integers(1, 40), n=st.integers(1, 3), G=st.integers(1, 3), half=st.integers(1, 8),
       layout=st.sampled_from(["contiguous", "split", "transposed"]))
def test_the_kernel_pair_is_naive_attention_and_its_gradient(S, n, G, half, layout):
    """K3: o, the log-sum-exp, dq, dk, dv, whatever the strides of what goes in."""
    rng, d = torch.manual_seed(S), 2 * half
    q, k, v, do = (torch.randn(S, h, d, dtype=F64, generator=rng) for h in (n * G, n, n, n * G))
    inputs = [laid_out(x, layout) for x in (q, k, v)]
    o, lse = upipe.flash_forward(*inputs)
    grads = upipe.flash_backward(laid_out(do, layout), *inputs, o, lse)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    expected = ref_attention(q, k, v)
    expected[0].backward(do)
    for ours, ref in zip((o, lse, *grads), (*expected, q.grad, k.grad, v.grad)):
        torch.testing.assert_close(ours, ref, rtol=1e-10, atol=1e-12)
    assert all(x.is_contiguous() for x in (o, *grads))


def test_a_kernel_call_beyond_32_bits_is_refused_before_launch():
    """C4: four heads at 5M tokens do not fit one call, and the numbers are named; a stage does."""
    S, H, d = 5 * 2 ** 20, 4, 128
    q = torch.empty(S, H, d, device="meta", dtype=BF16)
    with pytest.raises(ValueError, match=f"{S} tokens x {H} heads x {d} .* {S * H * d} "):
        upipe.flash_forward(q, q, q)
    assert all(S * config.head_dim < 2 ** 31 for config in PRESETS.values())


@pytest.mark.parametrize("K, U", [(1, 2), (2, 2), (2, 4), (2, 8), (8, 8)])
def test_stage_buffers_never_move(K, U):
    """They are allocated once and serve every stage, layer and step."""
    config, seen = replace(SMALL, n_heads=8, n_kv_heads=K, n_layers=3), {}
    model, case = GPT(config), Case(2, config, replace(ALL_ON, heads_per_stage=U), 40)

    def see(out, role, *_):
        seen.setdefault(role, []).append(out.data_ptr())

    with simulated_ranks(2), watched(upipe, "stage_buffer", see):
        step(model, case)
        step(model, case)
    assert set(seen) == {"send", "q", "k", "v", "o", "do"}
    assert all(len(found) > len(set(found)) == 1 for found in seen.values()), seen


@laws(40)
@given(st.lists(st.tuples(st.sampled_from(["park", "drop", "fetch", "rows"]), st.integers(0, 9)),
                max_size=40))
def test_the_host_store_returns_what_was_parked_and_reuses_its_slabs(orders):
    """D1: in any order of parking, fetching, dropping: right values, slabs no larger than what they
    hold, none leaked; and none of a size that is gone stays."""
    store, parked, most, size = upipe.HostStore(), [], 0, 7 * 3 * 4
    for n, (order, i) in enumerate(orders):
        if order == "park":
            x = torch.full((7, 3), float(n))
            parked.append((upipe.Parked(store, x), x.clone()))
            x.zero_()  # copied: nobody looks at x any more
        elif parked and order == "drop":
            del parked[i % len(parked)]
        elif parked:
            i %= len(parked)
            got = parked[i][0].fetch() if order == "fetch" else torch.cat([
                part for _, _, part in upipe.rows(parked[i][0], 2)])
            assert torch.equal(got, parked[i][1])
            got.zero_()  # ours: the slab must not notice
        most = max(most, len(parked))
        assert store.bytes == len(parked) * size
        assert store.slab_bytes == most * size  # a free slab is used before a new one is made
    assert all(torch.equal(entry.fetch(), x) for entry, x in parked)
    parked.clear()
    parked.append(upipe.Parked(store, torch.zeros(33)))
    assert store.bytes == store.slab_bytes == 33 * 4


def test_pinned_pages_are_whole_and_released_before_they_go(monkeypatch):
    """D1: from the start of a page, exactly as long as asked; CUDA lets go while they are still
    there, as a read shows; and a limit of the system is told in one line."""
    seen = {}
    cuda = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: seen.update(start=address, size=size) or 0,
        cudaHostUnregister=lambda address: seen.update(last=ctypes.string_at(address, 1)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    part = upipe.pinned(10_001).fill_(7)[:5]
    assert seen == dict(start=part.data_ptr(), size=10_001) and seen["start"] % mmap.PAGESIZE == 0
    del part
    assert seen["last"] == b"\x07"
    cuda.cudaHostRegister = lambda *_: 2
    with pytest.raises(RuntimeError, match="cannot pin .* error 2.: raise `ulimit -l`"):
        upipe.pinned(100)


class LateStream(TorchDispatchMode):
    """Stands in for the CUDA stream of the copies, at its slowest: a copy is done when somebody has
    to wait for it, no sooner. Memory that was given away by then is an error, and what is fetched
    is NaN until it arrives. As `with torch.cuda.stream(...)` it takes the copies down."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.copies, self.done, self.follows, self.slabs = [], 0, False, set()
        computing = SimpleNamespace(wait_event=self.do, wait_stream=lambda _: self.synchronize())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: computing)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        monkeypatch.setattr(upipe, "pinned", self.pinned)

    def pinned(self, size):
        slab = torch.empty(size, dtype=torch.uint8)
        self.slabs.add(slab.data_ptr())
        return slab

    def wait_stream(self, computing):
        self.follows = True

    def __enter__(self):
        assert self.follows, "a copy that does not wait for what was computed before it"
        self.follows = False
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op != torch.ops.aten.copy_.default:
            return op(*args, **(kwargs or {}))
        to, source = args[:2]
        if not to.is_meta and not source.is_meta:  # else there is nothing to copy
            if source.untyped_storage().data_ptr() in self.slabs:
                to.fill_(math.nan)
            self.copies.append([(weakref.ref(x.untyped_storage()), x.dtype, x.storage_offset(),
                                 x.shape) for x in (to, source)])
        return to

    def record_event(self):
        return len(self.copies)

    def synchronize(self):
        self.do(len(self.copies))

    def do(self, event):
        """Do the copies up to this event."""
        for copy in self.copies[self.done:event]:
            assert all(x() and x().nbytes() for x, *_ in copy), "memory given away before its copy"
            to, source = (torch.empty(0, dtype=dtype).set_(storage(), *where)
                          for storage, dtype, *where in copy)
            to.copy_(source)
        self.done = max(self.done, event)


def late_steps(monkeypatch, recipe, *before):
    """A step on one rank whose copies are late, after others, which end where `before` says."""
    case = Case(1, THREE, recipe, 40)
    model, slabs = build(case.config, case.seed), set()
    model.store.stream = LateStream(monkeypatch)
    for stop in (*before, None):
        model.zero_grad()
        model.progress = lambda layer, way: 1 / ((layer, way) != stop)
        with pytest.raises(ZeroDivisionError) if stop else nullcontext():
            for _ in range(9):
                model(*case.data(), recipe)  # and no backward pass
            step(model, case)
        assert model.store.bytes == 0, stop
        slabs.add(model.store.slab_bytes)
    assert_grads(gradients(model), expected(case).grads)
    return slabs


@pytest.mark.parametrize("recipe", [ALL_ON, replace(ALL_ON, stream=False), TWO_LEVELS,
                                    replace(TWO_LEVELS, stream=False)])
def test_copies_may_be_as_late_as_they_are_waited_for(recipe, monkeypatch):
    """E1: no memory is given away, written over or read while a copy may be at it. E3: forwards
    without backward and steps that fail leave nothing behind, and the next one is right."""
    slabs = late_steps(monkeypatch, recipe, None, (1, "forward"), (0, "backward"))
    assert len(slabs) == 1


@pytest.mark.parametrize("recipe, docs", [
    (Recipe(), [0, 9, 30]), (replace(ALL_ON, tile=20), [0, 9, 30]),
    (replace(TWO_LEVELS, tile=20), None)])
def test_a_step_makes_no_tensor_on_another_device(recipe, docs, monkeypatch):
    """On the meta device, whose tensors mix with the CPU's no more than CUDA's do."""
    monkeypatch.setitem(upipe.KERNELS, "shapes", upipe.Kernel(
        lambda q, k, v, edges: (torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])),
        lambda do, q, k, v, o, lse, edges: [torch.empty_like(x) for x in (q, k, v)]))
    with torch.device("meta"):
        model, tokens = GPT(THREE), torch.zeros(40, dtype=torch.int64)
    model.store.stream = LateStream(monkeypatch)
    model(tokens, tokens, replace(recipe, kernel="shapes"), docs=docs).backward()
    assert all(p.grad.is_meta for p in model.parameters())


@pytest.mark.parametrize("owner, name", [(upipe.HostStore, "wait_for_copies"), (upipe, "arrived")])
def test_a_forgotten_wait_is_seen(owner, name, monkeypatch):
    """The stand-in is a judge: without either of the two waits, the step above fails."""
    monkeypatch.setattr(owner, name, lambda first, *_: first)
    with pytest.raises(AssertionError, match="given away"):
        late_steps(monkeypatch, ALL_ON)


# 9. Counts of memory and traffic ------------------------------------------------------------------


@contextmanager
def simulated_ranks(C):
    """Makes this process rank 0 of C whose others are not there: collectives return at once, with
    garbage. For counts only, and exact: gloo's threads let go of a tensor when they please."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=C)
    try:
        yield
    finally:
        dist.destroy_process_group()


def block_peaks(case):
    """Peaks of live device elements in the middle one of three blocks, forward and backward."""
    model, meter, peaks = GPT(case.config), Meter(), {}

    def progress(layer, way):  # when a block is done
        peaks[layer, way] = meter.peak / 4  # float32
        meter.peak = meter.bytes()
    model.progress = progress
    with simulated_ranks(case.C), meter:
        step(model, case)
    return np.array([peaks[1, "forward"], peaks[1, "backward"]])


def elements_per_token(config, recipe, C=2):
    """[forward, backward] peaks of a block per token of a rank: the slope between two lengths, so
    that parameters, their gradients and one tile's temporaries, which do not grow, drop out."""
    short, long = (block_peaks(Case(C, config, recipe, C * s)) for s in (256, 512))
    return (long - short) / 256


@pytest.mark.parametrize("C, H, K, stream", [
    (2, 8, 2, True), (2, 8, 2, False), (2, 8, 8, False), (2, 8, 1, False), (2, 16, 2, False),
    (4, 8, 2, True), (4, 8, 8, True)])
def test_a_block_holds_what_is_promised_and_less_in_smaller_stages_and_rings(C, H, K, stream):
    """At most 3 sD + 8 sUd forward and 3.5 sD + 2 sKd + 12 sUd backward. A ring adds 4 sUd of
    visitors, and backward as much of their gradients, but its least U is C / R."""
    D, d, before = 128, 128 // H, math.inf
    config = replace(SMALL, dim=D, n_layers=3, n_heads=H, n_kv_heads=K, head_dim=d)
    rings = [(R, C // R) for R in (2, 4) if R <= C]
    for R, U in [(1, U) for U in reversed(legal(H, K, C))] + rings:
        recipe = replace(ALL_ON, stream=stream, tile=64, heads_per_stage=U, ring=R)
        peaks = elements_per_token(config, recipe, C)
        assert peaks[0] <= 3 * D + (12 if R > 1 else 8) * U * d
        assert peaks[1] <= 3.5 * D + 2 * K * d + (20 if R > 1 else 12) * U * d
        assert (peaks <= before).all() and (R == 1 or (peaks < before).all()), (R, U)
        before = peaks


def rank_traffic(case):
    """[forward, backward] of: elements in all-to-alls per block and token of a rank; the same sent
    round the ring; and each call of a kernel as (queries x keys, heads, causal)."""
    model, (tokens, labels, _) = build(case.config, case.seed), case.shard()
    sent, ring, calls = [0], [0], [[]]

    def see_sent(_, out, x):
        sent[-1] += x.numel()

    def see_ring(_, ops):
        ring[-1] += sum(op.tensor.numel() for op in ops if op.op is dist.isend)

    def see_call(_, *args):
        q, k = args[len(args) == 8:][:2]  # the backward pass has do before them
        calls[-1].append((len(q) * len(k), q.shape[1], args[-1].causal))

    with watched(dist, "all_to_all_single", see_sent), \
            watched(dist, "batch_isend_irecv", see_ring), \
            watched(upipe, "flash_forward", see_call), watched(upipe, "flash_backward", see_call):
        loss = model(tokens, labels, here(case.recipe))
        for seen, zero in ((sent, 0), (ring, 0), (calls, [])):
            seen.append(zero)
        loss.backward()
    sent, ring = np.array([sent, ring]) / case.config.n_layers / len(tokens)
    return [*sent, [*ring], calls]


@pytest.mark.parametrize("R, P, H, K", [
    (1, 2, 8, 4), (1, 2, 8, 1), (1, 4, 8, 8), (1, 4, 8, 2), (1, 4, 4, 4), (2, 1, 4, 2),
    (4, 1, 4, 4), (2, 2, 8, 2)])
def test_traffic_does_not_depend_on_the_stages(R, P, H, K):
    """All-to-all: (2H + 2 max(K, P)) s d forward, (4H + 4 max(K, P)) s d backward, for any
    stages. For each stage, round the ring: 2 (R - 1) P n d forward, as much and 2 R P n d backward.
    To run attention again is one more forward. Kernels, on all ranks alike: one causal call, R - 1
    of half of q times k."""
    config = replace(SMALL, n_heads=H, n_kv_heads=K)
    one = 2 * (H + max(K, P)) * config.head_dim * (P > 1)  # a replicated kv head: once per rank
    for U in legal(H, K, P):
        n = max(1, U // P // (H // P // max(1, K // P)))  # kv heads of a stage
        turn, T = 2 * H // U * P * n * config.head_dim, 16 * P
        stage = [(T * T, U // P, True)] + [(T * T // 2, U // P, False)] * (R - 1)
        keep = replace(ALL_ON, heads_per_stage=U, ring=R)
        again = replace(keep, keep_attention=False)
        for recipe, more in ((keep, 0), (again, 1), (replace(again, checkpoint=2), 1)):
            assert RANKS[R * P](rank_traffic, Case(R * P, config, recipe, 16 * R * P)) == R * P * [[
                one, (2 + more) * one,
                [(R - 1) * turn, (R - 1) * (1 + more) * turn + (R > 1) * R * turn],
                [stage * (2 * H // U), stage * (2 * H // U) * (1 + more)]]]


def test_members_of_a_ring_have_a_chunk_from_the_front_and_one_from_the_back():
    """By hand: 24 tokens, 2 members of 3 ranks, chunks of 6. Padded where 2 C does not divide."""
    assert [upipe.token_spans(4, 6, 2, rank) for rank in range(6)] == [
        [(0, 4)], [(4, 6), (18, 20)], [(20, 24)], [(6, 10)], [(10, 12), (12, 14)], [(14, 18)]]
    assert [upipe.tokens_on_rank(S, 6, 2) for S in (12, 13, 24, 25)] == [2, 4, 4, 6]


@pytest.mark.parametrize("dtype, most", [(F32, 22.5), (BF16, 26.5)])
def test_autograd_keeps_what_part_2_lists(dtype, most):
    """The sum in the comment, in s x D elements; lse and a number per token and norm are more."""
    config = replace(PRESETS["llama3-8b"], vocab_size=9, dim=256, n_layers=1, head_dim=8,
                     ffn_dim=896)
    model, seen = GPT(config).to(dtype), {}
    p = model._start(torch.zeros(128, dtype=torch.int64), Recipe(), None)
    x = torch.randn(128, 256, dtype=dtype, requires_grad=True)

    def pack(t):
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.layers[0](x, p)
    for known in [*model.parameters(), p.rope]:
        seen.pop(known.untyped_storage().data_ptr(), None)
    kept = sum(seen.values()) / x.nbytes
    print(f"{dtype}: a block keeps {kept:.2f} s x D")
    assert most < kept < most + 0.4


def test_examples_in_docstrings_run():
    """The schedule by hand, and checkpointing in its simplest form."""
    assert doctest.testmod(upipe) == (0, 5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("recipe", [replace(ALL_ON, tile=256), Recipe("ulysses"),
                                    Recipe("ulysses", checkpoint=2)])
def test_no_tensor_of_a_step_grows_with_the_square_of_the_length(recipe, dtype):
    """D2: at S = 2048 none has S * S / 4 elements, scores, masks and position grids included."""
    with simulated_ranks(2), Meter() as meter:
        step(GPT(SMALL).to(dtype), Case(2, SMALL, recipe, 2048))
    assert 1024 * SMALL.dim <= meter.largest < 2048 * 2048 / 4


# 10. Who may hold a gradient, who may change it ---------------------------------------------------

SWITCHES = {"plain": Recipe(), "ulysses": Recipe("ulysses", checkpoint=1, tile=4),
            "checkpoint": Recipe("upipe", checkpoint=1),
            "segments": replace(TWO_LEVELS, checkpoint=1),
            "kept": replace(ALL_ON, stream=False), "all on": ALL_ON}
every_switch = pytest.mark.parametrize("recipe", SWITCHES.values(), ids=SWITCHES)


# A fork puts three blocks together in its own way: fork(x, units, held) -> y. `held` gets
# (a gradient that somebody still holds, a copy of it).


def residual_skip_and_embedding(x, units, held):
    """An outer residual, a skip over two blocks, the embedding mixed into each."""
    first, middle = x, x + units[0](x)
    return units[2](units[1](middle + first / 2) + first / 2) + middle


def hooked_and_retained(x, units, held):
    """As others lay gradients out: in the first all elements are the same one, as of y.sum()."""
    layouts = (lambda dx: dx.new_ones(1, 1).expand(dx.shape),
               lambda dx: laid_out(dx, "transposed"), lambda dx: dx)
    for unit, layout in zip(units, layouts):
        x = unit(x)
        if x.requires_grad:
            x.retain_grad()
            x.register_hook(layout)
            x.register_hook(lambda dx, x=x: held.extend((part, part.clone())
                                                        for part in (dx, dx[1:])))
    return x


def forked(model, fork, held):
    """The model, with its loop over blocks or segments replaced by `fork`."""
    def run_forked(tokens, p, head):
        r, x = p.recipe, model.embed_tokens(F.embedding, tokens)
        run = upipe.run_segment if r.checkpoint and not r.keep_attention else upipe.run_blocks
        x = fork(x, [lambda x, i=i: run(x, p, model.layers[i:i + 1]) for i in range(3)], held)
        return model.lm_head(head, x)
    model._run = run_forked
    return model


@functools.cache
def forked_reference(fork):
    """Gradients of the forked model, by the reference's blocks."""
    w = {name: p.requires_grad_() for name, p in random_weights(THREE, 0).items()}
    tokens, labels = data = Case(1, THREE, Recipe(), 20).data()
    blocks = [lambda x, i=i: ref_block(w, THREE, x, i) for i in range(3)]
    x = fork(w["embed_tokens.weight"][tokens], blocks, [])
    y = ref_norm(x, w["norm.weight"], THREE.norm_eps) @ w["lm_head.weight"].T
    ref_loss(y, labels, count_labels([data])).backward()
    return {name: p.grad for name, p in w.items()}


def rank_forked(fork, recipe, sharded):
    """Gradients on all ranks as FSDP shards them, or on one without it."""
    model, held = build(THREE, 0), []
    if sharded:
        train.shard_model(model, job_of(2).everyone, F64)
    data = upipe.shard(*Case(1, THREE, Recipe(), 20).data())
    forked(model, fork, held)(*data, recipe).backward()
    assert all(torch.equal(gradient, copy) for gradient, copy in held)
    return gradients(model)


@every_switch
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fork", [residual_skip_and_embedding, hooked_and_retained])
def test_a_fork_of_the_model_gets_its_own_exact_gradients(fork, ranks, recipe):
    """K3: a gradient that another edge of the graph, a hook or retain_grad holds is taken as it is,
    in any layout, and never written to."""
    if ranks == 2 and recipe.attention == "plain":
        recipe = replace(recipe, attention="ulysses")
    for grads in RANKS[ranks](rank_forked, fork, recipe, ranks == 2):
        assert_grads(grads, forked_reference(fork))


@every_switch
def test_gradients_of_a_middle_layer_alone_leave_the_weights_alone(recipe):
    """torch.autograd.grad(loss, middle): right, and nobody's .grad is touched."""
    model, found = build(THREE, 0), []

    def fork(x, units, middle):
        middle.append(units[0](x))
        return units[2](units[1](middle[0]))
    for way in (recipe, Recipe()):
        middle = []
        loss = forked(model, fork, middle)(*Case(1, THREE, way, 21).data(), way)
        found += torch.autograd.grad(loss, middle)
    assert all(p.grad is None for p in model.parameters())
    assert_close("middle", *found, 1e-9)


@pytest.mark.parametrize("recipe", list(SWITCHES.values())[1:])
def test_a_second_backward_is_refused(recipe):
    """What it would need is gone: RuntimeError, not garbage; the next step is none the worse."""
    case, model = Case(1, SMALL, recipe, 21), build(SMALL, 0)
    loss = model(*case.data(), recipe)
    loss.backward(retain_graph=recipe.checkpoint > 0)
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()
    model.zero_grad()
    step(model, case)
    assert_grads(gradients(model), expected(case).grads)


# 11. Sharded weights: FSDP, accumulation, data parallel -------------------------------------------


def as_rank(rank, cp, ring=1):
    """A Job for what is asked of one rank without the others."""
    return train.Job(rank, cp, None, 1, 0, cp, rank, ring, {}, None)


def rank_sharded_step(config, recipe, windows, cp, clip, dtype, frozen):
    """A step of SGD with learning rate 1, which hides no scale. windows[g]: group g's sequences.

    What a rank sees of it: loss, norm, all gradients and weights, how many elements of weights it
    has, its all-gathers and reduce-scatters, and how many elements of gradients were added up."""
    job = job_of(cp, recipe.ring)
    model = build(config, 0, F64 if dtype == F64 else F32, frozen)
    train.shard_model(model, job.everyone, dtype)
    batch = [upipe.shard(*window, job.groups["group"], job.ring)
             for window in windows[job.dp_rank]]
    with Meter() as meter:
        loss, norm = train.train_step(
            job, model, torch.optim.SGD(model.parameters(), lr=1.0), batch,
            sum(map(count_labels, windows)), replace(recipe, **job.groups), clip, 1)
    return SimpleNamespace(
        loss=loss, norm=norm, grads=gradients(model), summed=meter.summed,
        weights={name: p.full_tensor().detach() for name, p in model.named_parameters()},
        elements=sum(p.to_local().numel() for p in model.parameters()),
        collectives=tuple(sum(n for name, n in meter.calls.items() if kind in name)
                          for kind in ("allgather", "reduce_scatter")))


def windows_of(counts, n=40):
    """Sequences of n tokens, of which so many labels count, the last ones."""
    for seed, count in enumerate(counts):
        tokens, labels = Case(1, SMALL, Recipe(), n, seed=seed).data()
        yield tokens, torch.where(torch.arange(n) >= n - count, labels, -100)


def sharded_steps(config, recipe, windows, world, cp, clip=0.0, dtype=F64, frozen=()):
    """Every rank's view of the step, and it equals the reference's, clipped to `clip` times its
    norm. No rank holds more than its share; what is frozen is not summed, not sent, not moved. F1,
    F3: each unit is gathered and summed as often for any tile."""
    tolerance = 1e-9 if dtype == F64 else 16 * rounding(dtype)
    sequences = [window for group in zip(*windows) for window in group]
    ref = reference(config, 0, sequences, dtype, frozen)
    norm = math.sqrt(sum(grad.pow(2).sum().item() for grad in ref.grads.values()))
    most, before = clip * norm, random_weights(config, 0, dtype)
    scale = most / (norm + 1e-6) if clip else 1.0  # as torch.nn.utils.clip_grad_norm_ does
    steps = RANKS[world](rank_sharded_step, config, recipe, windows, cp, most, dtype, frozen)
    shares = {name: -(-len(p) // world) * p[0].numel() for name, p in before.items()}
    uses = config.n_layers + 3  # embedding, head, root; of a tied matrix twice
    units = uses - config.tie_embeddings
    for seen in steps:
        gathers, sums = np.array(seen.collectives) / len(windows[0])
        assert units <= gathers <= 2 * uses and (sums == units or sums < units and frozen)
        assert seen.elements <= sum(shares.values())
        assert seen.summed == len(windows[0]) * world * sum(shares[name] for name in ref.grads)
        assert seen.loss == pytest.approx(ref.loss, rel=tolerance)
        assert seen.norm == pytest.approx(norm, rel=tolerance)
        assert_grads(seen.grads, {name: scale * ref.grads[name] for name in ref.grads}, tolerance)
        for name, weight in seen.weights.items():
            assert torch.equal(weight, steps[0].weights[name])
            if name in ref.grads:
                assert_close(name, before[name] - weight, scale * ref.grads[name], tolerance)
            else:
                assert torch.equal(weight, before[name])
    return steps


@pytest.mark.parametrize("recipe, tied, world, cp, clip, only", [
    (ALL_ON, False, 4, 2, 0.1, ""), (ALL_ON, True, 4, 2, 0, ""), (TWO_LEVELS, True, 4, 2, 0.1, ""),
    (Recipe("ulysses"), False, 4, 2, 0.1, ""), (ALL_ON, False, 4, 4, 0, ""),
    (Recipe("ulysses", checkpoint=1, tile=5), True, 4, 2, 0.1, ""), (ALL_ON, True, 2, 1, 0.1, ""),
    (replace(TWO_LEVELS, ring=2), False, 4, 2, 0.1, ""),
    (replace(TWO_LEVELS, ring=2), False, 4, 4, 0, ""),
    (ALL_ON, False, 2, 2, 0.1, "layers. norm lm_head"), (TWO_LEVELS, False, 2, 2, 0, "layers.1."),
    (TWO_LEVELS, False, 2, 2, 0.1, "embed_tokens layers.0.self_attn layers.1. layers.2."),
    (Recipe("ulysses"), False, 2, 2, 0.1, "layers.1."),
    (ALL_ON, False, 2, 2, 0, "layers.1.self_attn.q_proj")])
def test_sharded_steps_equal_one_process(recipe, tied, world, cp, clip, only):
    """A1, A3, F2: loss, norm, gradients and weights, with accumulation over unequal label counts,
    on one group or two. A10: clipped to a tenth of the norm of the whole gradient, the step is a
    tenth of it. Where some weights alone are trained, nothing is summed or sent for the others."""
    config, groups = replace(THREE, tie_embeddings=tied), world // cp
    windows = list(windows_of([38, 3, 17, 40][:2 * groups]))
    frozen = trained(config, only.split()) if only else ()
    sharded_steps(config, recipe, [windows[g::groups] for g in range(groups)], world, cp, clip,
                  frozen=frozen)


def test_bfloat16_compute_on_float32_shards_is_off_by_its_rounding_alone():
    """Mixed precision under FSDP: the tolerance of bfloat16 without it."""
    for seen in sharded_steps(SMALL, ALL_ON, [list(windows_of([38, 3]))], 2, 2, dtype=BF16):
        assert all(grad.dtype == F32 for grad in seen.grads.values())


def rank_poisoned_step():
    """Two good steps, then one that meets inf on rank 1 -> its message; all is as before it."""
    job = job_of(2)
    model = train.shard_model(build(SMALL, 0), job.everyone, F64)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = [upipe.shard(*next(windows_of([38])), job.groups["group"])]
    recipe = replace(ALL_ON, **job.groups)

    def state():
        found = tree_leaves((model.state_dict(), optimizer.state_dict()["state"]))
        return [(t.to_local() if isinstance(t, DTensor) else t).clone() for t in found]

    for number in (1, 2):
        train.train_step(job, model, optimizer, batch, 38, recipe, 1.0, number)
    before = state()
    if job.rank == 1:
        model.layers[-1].register_forward_hook(lambda module, args, y: y * math.inf)
    with pytest.raises(upipe.BadInput) as stop:
        train.train_step(job, model, optimizer, batch, 38, recipe, 1.0, 3)
    assert all(map(torch.equal, state(), before)) and len(before) > 20
    return str(stop.value)


def test_a_loss_that_is_not_finite_stops_all_ranks_and_spoils_nothing():
    """J1: inf meets one rank, all stop at that step, weights and optimizer as they were."""
    message, other = RANKS[2](rank_poisoned_step)
    assert message == other and all(word in message for word in ("step 3", "rank 1", "nan"))


# 12. Data -----------------------------------------------------------------------------------------


def test_data_of_many_files_needs_few_descriptors_and_names_a_file_that_changed(tmp_path):
    """N2: 1,100 files where a process may open 30 more; the order is that of their names."""
    for i in reversed(range(1100)):
        path = tmp_path / f"{i:04d}"[:2] / f"{i:04d}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"%04d" % i)
    (tmp_path / ".hidden").write_text("no data")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free
    resource.setrlimit(resource.RLIMIT_NOFILE, (low + 30, hard))
    try:
        data, held_out = train.open_data(str(tmp_path), 256)
        ids = data.read(0, len(data))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(low)
    assert bytes(ids.tolist()) == b"".join(b"%04d" % i for i in range(1100) if i % 10 != 9)
    assert all(bytes(data.read(a, b).tolist()) == bytes(ids[a:b].tolist())
               for a in range(9) for b in range(a, 14))
    (tmp_path / "03" / "0300.txt").write_bytes(b"0")
    (tmp_path / "04" / "0400.txt").unlink()
    for name in ("0300", "0400"):
        with pytest.raises((train.BadInput, OSError), match=f"{name}.txt"):
            data.read(4 * int(name) * 9 // 10, 4 * int(name) * 9 // 10 + 4)


def window_starts(steps, n, dp=2, accum=2, seed=0, ahead=0):
    """Where the windows of 64 tokens start that dp groups train on, in the order of the epochs."""
    groups = [SimpleNamespace(dp=dp, dp_rank=rank) for rank in range(dp)]
    drawn = [[train.train_starts(job, range(n), 64, seed, step, accum, ahead) for job in groups]
             for step in steps]
    return [start for step in drawn for turn in zip(*step) for start in turn]


def test_windows_depend_on_seed_step_and_group_alone():
    """I3: no two groups or steps of an epoch share a token; another seed, another order. K1: when
    the data ends they go round, and each lies within it. Other groups, of other sizes, go on where
    those before them have left the data."""
    epoch = window_starts(range(3), 1000)
    assert all(b - a >= 64 for a, b in zip(sorted(epoch), sorted(epoch)[1:]))
    assert epoch == window_starts(range(3), 1000)
    assert epoch != window_starts(range(3), 1000, seed=1)
    starts = window_starts(range(50), 321)  # 2.5 windows for each group
    assert len(starts) == 200 and all(0 <= start <= 321 - 65 for start in starts)
    ahead = 5 - 5 * 2 * 2  # as run_steps has it: windows drawn - what so many steps take now
    assert window_starts([5], 2000, ahead=ahead) == window_starts(range(9), 2000, dp=1, accum=1)[5:]


# 13. The program train.py -------------------------------------------------------------------------

HERE = Path(__file__).parent

def program(flags, before="pass"):
    """Arguments of python that run train.py, after a change to it."""
    return ["-c", f"import os, signal, sys, time, train\n{before}\ntrain.run()", *flags]


def place(rank, ranks):
    return dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                LOCAL_WORLD_SIZE=str(ranks))


def execute(*command, limit=120, **env):
    env = os.environ | NO_GPU | dict(OMP_NUM_THREADS="1") | env
    return subprocess.run([sys.executable, *map(str, command)], cwd=HERE, text=True, timeout=limit,
                          capture_output=True, env=env)


def torchrun(flags, before="pass", limit=60):
    """train.py on two ranks, after a change to it."""
    return execute("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
                   "--no-python", "--", sys.executable, *program(flags, before), limit=limit)


def losses(out):
    """The losses of the steps that a run printed."""
    return re.findall(r"^step +\d+ \| loss ([\d.]+)", out, re.MULTILINE)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Files, right and wrong: twelve little documents of unequal length, all of them as tokens
    with 0 between, and tokens that are none."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "texts").mkdir()
    (folder / "empty").mkdir()
    words = [bytes(rng.integers(97, 123, size=n)) for n in rng.integers(2, 9, size=40)]
    parts = [b" ".join(rng.choice(words, size=n)) + b"\n"
             for n in (5, 40, 17, 3, 80, 33, 9, 21, 60, 44, 30, 70)]
    for i, part in enumerate(parts):
        (folder / "texts" / f"{i:02d}.txt").write_bytes(part)
    np.save(folder / "zeros.npy", np.frombuffer(b"\0".join(parts), np.uint8))
    ids = np.arange(1000) % 250
    ids.astype("<u4").tofile(folder / "wide.bin")
    np.save(folder / "floats.npy", ids / 2)
    ids[750] = 256  # in the second half of any window of 800 of the first 900: for rank 1 alone
    np.save(folder / "outside.npy", ids)
    return folder


@pytest.fixture(scope="session")
def texts(data):
    return data / "texts"


def short(texts, *flags):
    data = [] if "recall" in flags else ["--data", texts]
    return [*data, "--ctx", 64, "--layers", 2, "--eval-windows", 3, "--eval-every", 4, *flags]


BAD = [  # (ranks, flags, what the message must say)
    (1, "--model gpt5", "gpt5", "llama3-8b"), (1, "--ctx 5x", "5x", "128k"),
    (1, "--ctx 0", "0", "128k"), (1, "--ctxx 8", "--ctxx"),
    (1, "--heads-per-stage 3", "heads_per_stage=3", "legal: [1, 2, 4]"),
    (2, "--heads-per-stage 3", "heads_per_stage=3", "legal: [2, 4]"),
    (2, "--ring 3", "ring=3", "[1, 2]"), (2, "--ring 2 --ctx 3", "--ctx 3", "two tokens"),
    (2, "--ring 2 --attention plain", "'plain'"),
    (2, "--cp 3", "--cp 3", "2 ranks"), (2, "--data DATA/nowhere", "nowhere"),
    (1, "--data DATA/empty", "empty"), (1, "--ctx 20k --data DATA/zeros.npy", "20k", "20481"),
    (1, "--data DATA/floats.npy", "floats.npy", "float64"),
    (1, "--data DATA/wide.bin", "wide.bin", "uint"),
    (2, "--data DATA/outside.npy --ctx 800", "outside.npy", "256"),
    (1, "--save DATA/wide.bin/run", "wide.bin"), (1, "--log DATA", "is a folder")]
if os.path.exists("/dev/full"):
    BAD += [(2, "--log /dev/full --data DATA/texts", "/dev/full", "space")]


@pytest.mark.parametrize("world, flags, words", [(n, flags, words) for n, flags, *words in BAD])
def test_bad_input_is_one_line_on_every_rank_before_the_first_step(world, flags, words, data):
    """I1 and others: what is wrong and what would be right; nothing hangs."""
    flags = flags.replace("DATA", str(data)).split()
    for out in RANKS[world](rank_main, flags):
        assert "train.py: " in out.splitlines()[-1] and not losses(out), out
        assert all(word in out.splitlines()[-1] for word in words), out


def test_a_process_with_bad_input_says_it_alone_and_exits_with_2():
    """One line on stderr, from rank 1 of a job whose rank 0 never comes."""
    done = execute("train.py", "--ctxx", limit=30, **place(1, 2))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("train.py: ") and "--ctxx" in done.stderr


def refusal(*flags):
    """What make_settings says, or None if it takes them."""
    try:
        train.make_settings([*map(str, flags)])
    except upipe.BadInput as error:
        assert "\n" not in str(error)
        return str(error)


@pytest.mark.parametrize("flags, without", [
    ("--max-ctx", "--dry-run"), ("--world 4", "--dry-run"), ("--full", "--dry-run"),
    ("--json f", "--dry-run or --road or --one-rank-of"), ("--plot p.png --dry-run", "--road"),
    ("--save-every 5", "--save"), ("--keep 3", "--save"), ("--resume", "--save"),
    ("--prompt x", "--sample"), ("--data x --task recall", "--task text"),
    ("--one-rank-of 8 --dry-run", "leave one out"), ("--profile d --steps 0", "--steps 0"),
    ("--warmup 9 --steps 8", "--steps 8"), ("--save d --road", "--road"),
    ("--lr 1 --one-rank-of 8", "--one-rank-of"), ("--max-ctx --road --dry-run", "leave one out"),
    ("--loss-by-position x.foo", "'x.foo'"), ("--plot p.foo --road", "'p.foo'"),
    ("--layers 2 --init d", "leave one out")])
def test_a_flag_without_effect_is_refused_by_name(flags, without):
    """And told what it needs."""
    said = refusal(*flags.split())
    assert said and flags.split()[0] in said and without in said, said


SAID = {str: "x", "store_true": None, train.switch: None, train.tokens_of: "4k",
        train.picture: "p.png"}


@st.composite
def command_lines(draw, rows):
    """Some of the flags, with a value each, but those that read a file."""
    rows = [flag for flag in rows if flag not in ("--init", "--tokenizer", "--resume")]
    words = []
    for flag in draw(st.lists(st.sampled_from(rows), unique=True, max_size=6)):
        kind = train.ROWS[flag].kind
        value = kind[0] if isinstance(kind, tuple) else SAID.get(kind, "1")
        value = "0" if flag == "--min-lr" else value  # at most --lr
        words += [flag.split()[0], value] if value else [flag]
    return words


@laws(100)
@given(st.data())
def test_a_dry_run_takes_the_flags_of_the_job_it_stands_for(data):
    """Whatever they are: and model, recipe and machine are the same without them."""
    base = ["--dry-run", "--ctx", "4k"]
    settings = train.make_settings(base + data.draw(command_lines(train.TRAINING)))
    for name in ("config", "recipe", "machine", "cp", "world"):
        assert getattr(settings, name) == getattr(train.make_settings(base), name)


@laws(200)
@given(st.data())
def test_whatever_is_refused_is_one_of_the_flags_that_were_said(data):
    """One line, and nothing else is ever raised."""
    said = data.draw(command_lines(train.ROWS))
    words = refusal(*said)
    assert words is None or any(flag in words or train.field(flag) in words
                                for flag in said if flag.startswith("--")), words


def test_what_a_system_lacks_is_not_touched_unless_used(monkeypatch):
    """Neither SIGUSR1 nor sysconf, as on Windows: settings and the dry run's are made."""
    pytest.importorskip("extras.machine")
    monkeypatch.delattr(signal, "SIGUSR1")
    monkeypatch.delattr(os, "sysconf")
    assert train.make_settings(["--dry-run"]).machine.host == 2000 * 2**30
    assert train.make_settings(["--device", "cpu"]).machine.host > 0  # a container may tell


def rank_finds(steps):
    """What a rank says that finds a checkpoint of step steps[rank]."""
    found = SimpleNamespace(saved=dict(step=steps[dist.get_rank()]), save="run")
    with pytest.raises(upipe.BadInput) as refused:
        train.load_state(job_of(1), found, None, None, 0)
    return str(refused.value)


def test_ranks_that_see_different_checkpoints_all_stop():
    """Also one that sees the mean of all."""
    assert all("different checkpoints" in said for said in RANKS[4](rank_finds, (4, 6, 5, 5)))


def failing(deed, when="args[-1] == 2", function="train.train_step"):
    """A change to train.py: rank 1 does `deed` before this function; else, `when` a step is 2."""
    return f"""
import torch.distributed.checkpoint
original = {function}
def changed(*args):
    if os.environ["RANK"] == "1" and {when}:
        {deed}
    return original(*args)
{function} = changed
"""


@pytest.fixture(scope="module")
def stopped(texts, tmp_path_factory):
    """A job of two ranks under torchrun: rank 1 gets a signal in step 19 -> flags, folder, run."""
    folder = tmp_path_factory.mktemp("stopped")
    flags = short(texts, "--steps", 20, "--offload", "--stream", "--dtype", "float64", "--device",
                  "cpu")
    deed = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.2)"  # until it has arrived
    signalled = failing(deed, "args[-1] == 19")
    return flags, folder, torchrun([*flags, "--save", folder], signalled, limit=120)


def test_one_process_needs_no_launcher_and_no_port_and_trains_as_torchrun_does(stopped):
    """H1, H2, A9: plain python and torchrun with two ranks print the same losses, which fall, every
    switch on, on a machine that may have no GPU and cannot open a port."""
    flags, _, two = stopped
    no_port = "import torch.distributed; torch.distributed.TCPStore = None"
    one = execute(*program(flags, no_port))
    assert one.returncode == 0, one.stderr
    first, *_, last = map(float, losses(one.stdout))
    assert len(losses(one.stdout)) == 20 and 4 < first < 7 and last < 0.7 * first
    for wanted, n in ((r"step .* \| loss [\d.]+", 19), (r"validation loss [\d.]+", 5)):
        seen = re.findall(wanted, two.stdout)
        assert len(seen) == n and re.findall(wanted, one.stdout)[:n] == seen


def test_a_signal_to_any_rank_ends_the_step_saves_and_exits_0(stopped):
    _, folder, run = stopped
    assert run.returncode == 0, run.stderr
    (saved,) = train.checkpoints(folder)
    assert saved.name == "step-00000019" and "stopped   after step 19" in run.stdout
    assert json.loads((saved / "run.json").read_text())["step"] == 19


def pretend_cuda(monkeypatch, capability):
    """One card of 80 GiB, as far as flags and plans ask."""
    card = SimpleNamespace(total_memory=80 * 2**30)
    for name, value in (("is_available", True), ("device_count", 1),
                        ("get_device_capability", capability), ("get_device_properties", card)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.mark.parametrize("capability, dtype", [((7, 5), "float32"), ((8, 0), "bfloat16")])
def test_a_card_without_bfloat16_computes_in_float32(capability, dtype, monkeypatch, capsys):
    """H1: known before the recipe is fitted and the memory is planned, and said."""
    pytest.importorskip("extras.kernels")
    pretend_cuda(monkeypatch, capability)
    settings = train.make_settings(["--model", "llama3.2-1b"])
    assert settings.device == "cuda" and settings.dtype == dtype
    assert ("float32 instead" in capsys.readouterr().out) == (dtype == "float32")


@pytest.mark.parametrize("deed, timeout, said", [
    ("raise RuntimeError('rank 1 broke')", 60, "RuntimeError: rank 1 broke"),
    ("time.sleep(600)", 5, "imed out")])
def test_a_rank_that_fails_or_stalls_takes_the_job_down(deed, timeout, said, texts):
    """K2: all gone within a minute, exit code not 0, and rank 1's own error comes first. One that
    dies: see kill -9 below."""
    done = torchrun(short(texts, "--timeout", timeout), failing(deed))
    assert done.returncode != 0 and said in done.stderr
    errors = re.findall(r"^\w*Error: .*", done.stderr, re.MULTILINE)
    assert "RuntimeError" not in said or errors[0] == said


# 14. train.py, run by workers that have met already -----------------------------------------------


def rank_main(flags):
    """What main() prints on this rank, and its complaint, as run() would print it.

    --force: a dry run before the start would make a process group of its own."""
    out, met = io.StringIO(), dist.is_initialized()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        if met:
            for name, value in place(dist.get_rank(), dist.get_world_size()).items():
                patch.setenv(name, value)
            patch.setattr(train, "join", lambda settings: settings.meet(torch.device("cpu")))
            patch.setattr(dist, "destroy_process_group", lambda: None)
        try:
            train.main(train.make_settings([*map(str, flags), "--force"]))
        except train.BadInput as error:
            print(f"train.py: {error}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return out.getvalue()


def main(world, *flags):
    """train.py on `world` ranks; one is this process -> what rank 0 prints."""
    return RANKS[world](rank_main, flags)[0]


def records(path, key="loss"):
    """What a run logged: {step: record}."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert len({(r["step"], key in r) for r in lines}) == len(lines), "a step is there twice"
    return {r["step"]: r for r in lines if key in r}


# 15. Checkpoints ----------------------------------------------------------------------------------

ALL = ["--offload", "--stream", "--tile", 24]


@pytest.fixture(scope="module")
def whole(texts, tmp_path_factory):
    """(world, flags) -> folder of ten steps in one go, saved at 5 and at 10."""
    @functools.cache
    def run(world, *flags):
        folder = tmp_path_factory.mktemp("run")
        out = main(world, *short(texts, *flags), "--steps", 10, "--save", folder / "all",
                   "--save-every", 5, "--log", folder / "log")
        assert "done" in out, out
        return folder
    return run


def check_resumed(world, folder, tmp_path, *flags, off=0):
    """Five steps and five more, without a flag given again, are the ten."""
    log = shutil.copy(folder / "log", tmp_path / "log")  # its steps 6 to 10 are to be written anew
    shutil.copytree(folder / "all" / "step-00000005", tmp_path / "half" / "step-00000005")
    main(world, "--save", tmp_path / "half", "--resume", "--log", log, *flags)
    for key, steps in (("loss", range(1, 11)), ("validation_loss", (0, 4, 8, 10))):
        first, second = records(folder / "log", key), records(log, key)
        assert first.keys() == second.keys() == set(steps)
        for step in steps:
            for name in {key, "norm", "lr", "drawn"} & first[step].keys():
                assert second[step][name] == pytest.approx(first[step][name], rel=off, abs=0)
    assert first[10][key] != first[8][key] > 0


PLAIN = ["--attention", "plain", "--checkpoint", 0, "--no-keep-attention", "--no-offload",
         "--no-stream", "--tile", 0]
EXACT = (2, *ALL, "--dtype", "float64", "--ctx", 400, "--docs")


@pytest.mark.parametrize("run, world, flags, off", [
    ((2, *ALL), 2, [], 0), ((4, "--cp", 2, "--grad-accum", 2, "--docs"), 4, [], 0),
    (EXACT, 1, PLAIN, 1e-9), (EXACT, 4, ["--attention", "ulysses"], 1e-9),
    (EXACT, 4, ["--ring", 2], 1e-9)])
def test_five_steps_and_five_more_are_ten_bit_for_bit(run, world, flags, off, whole, tmp_path):
    """G1: losses, norms, rates and windows, with everything on, K1: past the end of the data; no
    flag is given again. G3, I5: any number of ranks goes on with any recipe, but for rounding, and
    in documents, which make a difference."""
    check_resumed(world, whole(*run), tmp_path, *flags, off=off)
    if run == EXACT:
        one, many = (records(whole(*flags) / "log")[10]["loss"] for flags in (EXACT[:-1], EXACT))
        assert many != pytest.approx(one, rel=1e-4)


def test_only_the_last_checkpoints_stay_and_only_our_rubbish_goes(texts, tmp_path):
    """What the program did not write stays, and gets a notice where it could be taken for ours."""
    ours = ["step-00000004", "step-00000005"]
    mine = ["step-final/x", "step-3/x", "step-00000001.bak/x", ".step-old/x", ".step-00000002/x"]
    for name in (*mine, ".step-00000003/__0_0.distcp", ".step-00000002/__1_0.distcp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    out = main(1, *short(texts), "--steps", 5, "--save", tmp_path, "--save-every", 1)
    assert out.count("notice") == 3 and "step-final" in out
    left = [path for path in tmp_path.glob("*/*") if path.parent.name not in ours]
    assert {str(path.relative_to(tmp_path)) for path in left} == {*mine}
    assert [path.name for path in train.checkpoints(tmp_path)] == ours


def damage(path, offset=None, text=b""):
    """Cut a file off and append `text`; with an offset, overwrite what is there."""
    content = path.read_bytes()
    end = offset + len(text) if offset else len(content)
    path.write_bytes(content[:offset or len(content) // 2] + text + content[end:])


def edit(path, **changes):
    facts = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: fact for name, fact in facts.items() if fact is not None}))


DAMAGES = {  # what happens to the newest checkpoint, a folder: what the message names
    "shard cut off": (lambda path: damage(path / "__0_0.distcp"), "__0_0.distcp"),
    "shard missing": (lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp"),
    "bytes flipped": (lambda path: damage(path / "__1_0.distcp", 5000, b"x" * 4096), "__1_0"),
    "metadata cut off": (lambda path: damage(path / ".metadata"), ".metadata"),
    "metadata missing": (lambda path: (path / ".metadata").unlink(), ".metadata"),
    "run.json missing": (lambda path: (path / "run.json").unlink(), "run.json"),
    "run.json empty": (lambda path: (path / "run.json").write_text(""), "run.json"),
    "run.json no object": (lambda path: (path / "run.json").write_text("[1]"), "version"),
    "an older run.json": (lambda path: edit(path / "run.json", files=None), "version"),
    "a newer run.json": (lambda path: edit(path / "run.json", shoes=2), "version"),
    "another model's": (lambda path: edit(path / "run.json", config={"dim": 8}), "version"),
    "a copy of another": (lambda path: edit(path / "run.json", step=5), "of step 5"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_the_way_to_the_one_before(name, whole, tmp_path):
    """N7: one line on every rank, nothing is lost, and the older one is taken by a flag alone."""
    deed, word = DAMAGES[name]
    if name == "bytes flipped":
        pytest.importorskip("extras.guard")  # it compares checksums
    shutil.copytree(whole(2, *ALL) / "all", tmp_path / "run")
    deed(tmp_path / "run" / "step-00000010")
    before = sorted(tmp_path.rglob("*"))
    for line in RANKS[2](rank_main, ["--save", tmp_path / "run", "--resume"]):
        line = line.splitlines()[-1]
        assert "step-00000010 is damaged" in line and word in line
        assert "--resume STEP" in line and "newest whole one before it is step-00000005" in line
    assert sorted(tmp_path.rglob("*")) == before


def test_an_older_checkpoint_is_taken_by_a_flag_and_the_newer_ones_stay(whole, tmp_path):
    """G1 too: the steps after it are the same again, and the folder goes on from the new ones."""
    pytest.importorskip("extras.guard")
    folder = whole(2, *ALL)
    run, log = shutil.copytree(folder / "all", tmp_path / "run"), tmp_path / "log"
    again = ["--save", run, "--log", log, "--keep", 1]
    assert "no step-00000007" in main(2, *again, "--resume", 7)
    assert "step-00000010.old" in main(2, *again, "--resume", 5)
    assert records(log)[10]["loss"] == records(folder / "log")[10]["loss"]
    assert {path.name for path in run.glob("step-*")} == {"step-00000010", "step-00000010.old"}
    damage(run / "step-00000010" / "__1_0.distcp", 5000, b"x")
    assert "whole one before it is none" in main(2, *again, "--resume")
    assert "done" in main(2, *again, "--resume", "--no-verify")


def test_only_flags_that_were_given_are_remembered(texts, tmp_path):
    """N6: the end of the schedule follows a new peak; one that was given must not be above it."""
    out = {}
    for name, end in (("derived", []), ("given", ["--min-lr", 2e-4])):
        again = ["--save", tmp_path / name, "--log", tmp_path / f"{name}.log"]
        main(1, *short(texts), "--steps", 6, "--warmup", 0, *end, *again)
        out[name] = main(1, *again, "--resume", "--steps", 12, "--lr", 1e-4)
    assert "--min-lr 0.0002 is above --lr 0.0001" in out["given"]
    rates = [record["lr"] for step, record in records(tmp_path / "derived.log").items() if step > 6]
    assert len(rates) == 6 and max(rates) <= 1e-4 and 1e-5 <= rates[-1] < 2e-5


def test_a_full_disk_is_foreseen_and_leaves_whole_checkpoints(texts, tmp_path):
    """N8: bytes needed and free before the first step; and if it fills later, no rubbish."""
    pytest.importorskip("extras.guard")
    flags = [*short(texts), "--save", tmp_path, "--save-every", 2, "--steps", 4]
    with mock.patch.object(shutil, "disk_usage", return_value=SimpleNamespace(free=12345)):
        said = main(1, *flags)
    assert re.search(r"[\d,]{9,} bytes are needed .* 12,345 are free", said) and not losses(said)
    assert not train.checkpoints(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(*_):  # after the first checkpoint
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with watched(train, "save_state", fill):
            said = main(1, *flags).splitlines()[-1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said.startswith("train.py: --save") and "step-00000004 cannot be written" in said
    assert [path.name for path in tmp_path.glob("*step-*")] == ["step-00000002"]
    assert "done" in main(1, "--save", tmp_path, "--resume")


def test_a_folder_serves_one_job_at_a_time(texts, tmp_path):
    """The second is refused; a lock without its process is none."""
    flags = [*short(texts), "--save", tmp_path, "--steps", 1]
    pytest.importorskip("extras.guard")
    lock = train.claim(train.make_settings([*map(str, flags)]))
    assert "another job saves there" in main(1, *flags)
    lock.close()
    assert "done" in main(1, *flags)


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "lo', b"\0\0\0\0",
                                  b'{"step": 6, "loss": 2.5}\n'])
def test_a_log_goes_on_after_its_last_whole_line(torn, whole, tmp_path):
    lines = (whole(2, *ALL) / "log").read_bytes().splitlines(keepends=True)
    (tmp_path / "log").write_bytes(b"".join(lines[:9]) + torn)
    train.rewind_log(tmp_path / "log", 4)
    (log,) = tmp_path.iterdir()
    assert log.read_bytes() == b"".join(lines[:5])  # step 4 validates anew, as it did at 0


@pytest.mark.parametrize("poem", ["Roses are red,\nviolets are blue.\n", "An apple a day"])
def test_a_file_that_is_no_log_stays(poem, texts, tmp_path):
    (tmp_path / "poem").write_text(poem)
    assert "poem, line 1, is no step" in main(1, *short(texts), "--log", tmp_path / "poem")
    assert (tmp_path / "poem").read_text() == poem


def test_a_run_is_not_mixed_up_with_another(texts, whole, tmp_path):
    """What a run cannot change is refused by name; so is a folder that another run has used, and
    another text, be it of the same length."""
    pytest.importorskip("extras.guard")  # it takes the fingerprint
    folder = whole(2, *ALL)
    other = shutil.copytree(texts, tmp_path / "other")
    (other / "04.txt").write_bytes((texts / "04.txt").read_bytes()[::-1])
    for flags, said in ((["--resume", "--ctx", 32], "--ctx was 64"),
                        (["--resume", "--seed", 1], "--seed was 0"),
                        (["--resume", "--model", "llama3-8b"], "--model was tiny"),
                        (["--resume", "--rope-theta", 5e5], "--rope-theta was None"),
                        ([], "--resume"),
                        (["--resume", "--data", texts / "04.txt"], "windows would be"),
                        (["--resume", "--data", other], "windows would be")):
        assert said in main(1, "--save", folder / "all", *flags)
    assert "--save" in main(1, "--resume")


# 16. Signals and crashes: these need processes of their own ---------------------------------------

def test_kill_9_while_saving_costs_the_steps_that_were_not_saved(texts, tmp_path):
    """The job ends within its timeout; the last whole checkpoint is taken, and the log goes on."""
    again = ["--save", tmp_path / "run", "--log", tmp_path / "log"]
    flags = [*short(texts), "--steps", 6, "--save-every", 2, "--timeout", 20, *again]
    done = torchrun(flags, failing("os.kill(os.getpid(), 9)", "'00000004' in str(args[0].path)",
                                   "torch.distributed.checkpoint.FileSystemWriter.write_data"))
    assert done.returncode != 0 and "SIGKILL" in done.stderr
    assert [path.name for path in train.checkpoints(tmp_path / "run")] == ["step-00000002"]
    out = main(2, *again, "--resume")
    assert len(losses(out)) == 4 and "step-00000002" in out
    assert records(tmp_path / "log").keys() == set(range(1, 7))


def test_a_second_signal_stops_at_once(texts, tmp_path):
    """Even in the middle of a step that never ends."""
    deed = ("train.watch_signals(); os.kill(os.getpid(), signal.SIGUSR1); time.sleep(0.2); "
            "os.kill(os.getpid(), signal.SIGTERM); train.torch.ones(4000, 4000).matrix_power(999)")
    done = execute(*program([], deed))
    assert done.returncode == 128 + signal.SIGTERM, done.stderr


# 17. Documents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp, ring", [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("separator", [None, train.NO_ID, 0])
def test_parts_of_a_window_are_its_shards_and_know_its_documents(separator, cp, ring, texts, data):
    """A7, I3: shifted before the split, padded, the last tenth held out. Documents are files, or
    what follows an id; the last token of one has nothing to predict."""
    path = data / "zeros.npy"
    tokens, _ = train.open_data(str(texts if separator == train.NO_ID else path), 256)
    assert separator == train.NO_ID or len(tokens) == len(np.load(path)) * 9 // 10
    for start in (0, 7, len(tokens) - 140, len(tokens) - 20):
        jobs = [as_rank(rank, cp, ring) for rank in range(cp)]
        parts = [tokens.window(start, job, 130, separator) for job in jobs]
        order = torch.cat([job.places(130) for job in jobs]).argsort()
        ids, labels = (torch.cat(row)[order] for row in list(zip(*parts))[:2])
        text = tokens.read(start, min(start + 131, len(tokens))).tolist()
        n, begins = len(text) - 1, []
        if separator == train.NO_ID:
            begins = [b - start for b in tokens.begins if start < b < start + n]
        if separator == 0:
            begins = [i + 1 for i, token in enumerate(text[:n - 1]) if token == 0]
        assert separator is None or all(docs.tolist() == [0, *begins] for _, _, docs in parts)
        expected = torch.tensor(text[1:] + [IGNORE] * (len(order) - n))
        expected[[b - 1 for b in begins]] = IGNORE
        assert torch.equal(labels, expected) and ids[:n].tolist() == text[:n]


# 18. On a GPU -------------------------------------------------------------------------------------

LARGER = GPTConfig(vocab_size=1000, dim=512, n_layers=3, n_heads=8, n_kv_heads=2, head_dim=64,
                   ffn_dim=1024)


def cuda_step(model, recipe, n, sync="default"):
    """One step's gradients, and its peak of memory beyond what was there before. sync: what to do
    if the step waits for the GPU."""
    tokens = torch.arange(n, device="cuda") * 7919 % model.config.vocab_size
    labels = tokens.roll(-1)
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode(sync)
    try:
        model(tokens, labels, recipe).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    grads = {name: grad.float() for name, grad in gradients(model).items()}
    return grads, torch.cuda.max_memory_allocated() - before


@cuda
@pytest.mark.parametrize("recipe", [ALL_ON, replace(ALL_ON, stream=False), TWO_LEVELS])
def test_copies_on_a_stream_never_change_a_gradient_and_never_wait(recipe):
    """E1: 20 steps with offload are as far from one without as two without are from each other
    (the kernel's dq adds up in any order); the slabs are pinned. After the first step, which pins
    slabs, all work is queued without one synchronisation with the host."""
    model, recipe = GPT(replace(LARGER, n_layers=8)).to("cuda", BF16), replace(recipe, tile=1024)
    without = replace(recipe, offload=False, stream=False)
    first, again = (cuda_step(model, without, 8192)[0] for _ in range(2))
    for i in range(20):
        grads, _ = cuda_step(model, recipe, 8192, "error" if i else "default")
        for name, grad in first.items():
            spread = (grad - again[name]).norm() + 1e-3 * grad.norm()
            assert (grads[name] - grad).norm() <= 3 * spread, name
    assert model.store.bytes == 0
    assert all(slab.is_pinned() for slabs in model.store.free.values() for slab in slabs)


@cuda
def test_peak_on_a_gpu_grows_with_the_length_and_falls_with_the_stages():
    """D2: twice the tokens take at most 2.2 x the memory, and U = C takes less than U = H."""
    model, peaks = GPT(LARGER).to("cuda", BF16), {}
    for U in (1, 8):
        recipe = replace(ALL_ON, tile=1024, heads_per_stage=U)
        for n in (16384, 16384, 32768):  # the first one warms up: libraries' workspaces
            model.stage_buffers.clear()
            peaks[U, n] = cuda_step(model, recipe, n)[1]
        assert peaks[U, 32768] < 2.2 * peaks[U, 16384]
    assert peaks[1, 32768] < peaks[8, 32768]


if __name__ == "__main__":
    try:
        from extras import report
    except ModuleNotFoundError:
        sys.exit("--benchmark, --kernels and --device-report need the folder extras")
    report.main(sys.argv[1:], sys.modules["__main__"])
