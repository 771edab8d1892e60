"""UPipe from scratch: training a language model on millions of tokens, in one readable file.

A transformer's memory grows with its context. Give Llama-3-8B one sequence of 5M tokens (5 x 2^20)
and a single [S, D] activation in bfloat16 is 40 GiB; a textbook implementation keeps 26.5 of them
in each of its 32 blocks. This file removes them, one technique after another, until the step fits
on eight 80 GB GPUs. Nothing is approximated: every recipe gives plain attention's gradients.

Symbols, used in every shape comment (small letters are one rank's part):
    S  tokens in the whole sequence   C  ranks that share it        s = S/C  tokens on one rank
    D  model width   L  layers        H, K  query, key/value heads  G = H/K  d  size of one head
    U  query heads in one stage, over all ranks: u = U/P a rank     V  vocabulary  F  MLP width
    P  ranks that exchange heads, P = C until part 11               t  tokens in one tile
    n  kv heads that a stage reads
There is no batch dimension: at these lengths the batch is one sequence. Activations are [s, D],
heads [S, u, d]. `p` is the Pass: all that a block knows beside x and weights. `group` is the torch
ProcessGroup of the C ranks.

Contents, in the order in which the memory runs out:
    1. Config and recipe     every size and every switch
    2. The transformer       what a nanoGPT reader expects; the list of what autograd keeps
    3. Attention kernels     no S x S matrix: forward and backward meet through the log-sum-exp
    4. Ulysses               an all-to-all: "my tokens, all heads" <-> "all tokens, my heads"
    5. Offload               what must be kept waits in host memory
    6. Checkpointing         keep one tensor per segment of k blocks, compute the rest again
    7. Sequence tiling       what works token by token works on a few thousand tokens at a time
    8. UPipe                 walk the heads in stages that reuse the same buffers
    9. The lean block        all of it together, with a backward pass written by hand
   10. What is legal         which ranks, heads and switches go together
   11. A ring outside        more ranks than heads: keys and values travel

Words: a *stage* is heads, a *tile* is tokens, a *segment* is blocks, a *slab* is host memory;
*park* and *fetch* move a tensor to the host and back. A gradient is d + name (dq); lse is the
log-sum-exp of the scores. Not here: FSDP (it is torch's `fully_shard`, applied in train.py),
dropout, a key/value cache, attention that is not causal, more than one sequence per call.
"""
import math
import mmap
import weakref
from bisect import bisect
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import profiler
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, distribute_tensor

IGNORE = -100  # the label of a token that is not to be predicted

# 1. Config and recipe -----------------------------------------------------------------------------


class BadInput(ValueError):
    """What a user can get wrong. Its one line names the value, the rule and the remedy."""


def refuse(when, message):
    if when:
        raise BadInput(message)


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a Llama- or Qwen3-shaped model. Raises BadInput for sizes that fit no model."""
    vocab_size: int                # V
    dim: int                       # D
    n_layers: int                  # L
    n_heads: int                   # H
    n_kv_heads: int                # K, divides H
    head_dim: int                  # d, even; H * d need not equal D
    ffn_dim: int                   # F
    rope_theta: float = 500_000.0
    rope_scaling: Optional[dict] = None  # Llama 3.1's, as in config.json; None = unscaled
    norm_eps: float = 1e-5
    qk_norm: bool = False          # RMSNorm on every query and key head (Qwen3)
    tie_embeddings: bool = False   # the head is the embedding matrix (Llama 3.2)

    def __post_init__(self):
        refuse(self.n_heads % self.n_kv_heads,
               f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}")
        refuse(self.head_dim % 2,
               f"head_dim={self.head_dim} must be even: rotary positions turn pairs")
        kind = (self.rope_scaling or {}).get("rope_type", "llama3")
        refuse(kind != "llama3",
               f"rope_scaling of type {kind!r} is not supported: only 'llama3' is")


_LLAMA3_SCALING = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                       original_max_position_embeddings=8192)
PRESETS = {  # V, D, L, H, K, d, F
    "tiny": GPTConfig(256, 96, 2, 4, 2, 24, 384, rope_theta=10_000.0),
    "llama3.2-1b": GPTConfig(128256, 2048, 16, 32, 8, 64, 8192, tie_embeddings=True,
                             rope_scaling=_LLAMA3_SCALING),
    "llama3.2-3b": GPTConfig(128256, 3072, 28, 24, 8, 128, 8192, tie_embeddings=True,
                             rope_scaling=_LLAMA3_SCALING),
    "llama3-8b": GPTConfig(128256, 4096, 32, 32, 8, 128, 14336),
    "llama3-70b": GPTConfig(128256, 8192, 80, 64, 8, 128, 28672),
    "qwen3-32b": GPTConfig(151936, 5120, 64, 64, 8, 128, 25600, rope_theta=1e6, norm_eps=1e-6,
                           qk_norm=True),
}


@dataclass(frozen=True)
class Recipe:
    """Every memory switch. `Recipe()` is the textbook; each switch is a part below.

    checkpoint = 0 is plain or Ulysses attention by autograd (parts 2 to 4). All other switches need
    checkpoint >= 1, whose blocks run the code of parts 5 to 9. Part 10 says what is legal."""
    attention: str = "plain"      # "plain" (C = 1), "ulysses" (U = H) or "upipe"
    heads_per_stage: int = 0      # U over all ranks, for upipe; 0 = P, the least memory
    checkpoint: int = 0           # 0 = autograd keeps what it likes; k = one tensor per k blocks
    keep_attention: bool = False  # with checkpoint 1: attention's output, too; it runs only once
    offload: bool = False         # what is kept waits on the host
    stream: bool = False          # with offload: backward reads x and dy from there, tile by tile
    tile: int = 0                 # tokens per tile in all that works token by token; 0 = no tiles
    kernel: str = "auto"          # a name in KERNELS; "auto" = by device and dtype
    ring: int = 1                 # R: of C = R P ranks, P exchange heads, R pass k and v round
    group: Any = None             # ProcessGroup of the C ranks; None = the default one, or one rank
    subgroups: Any = None         # with a ring: this rank's ProcessGroups of P and of R ranks

    def stage_heads(self, config, P):
        """U, the query heads of one stage over all P ranks that exchange heads."""
        return (self.heads_per_stage or P) if self.attention == "upipe" else config.n_heads


def group_size(group):
    """C, the ranks of a group; 1 where no process group was ever initialised."""
    return dist.get_world_size(group) if group is not None or dist.is_initialized() else 1


def shard(tokens, labels, group=None, ring=1):
    """This rank's part of one sequence: tokens, labels [S] int64 -> [s], the same s everywhere.

    labels[i] is what position i must predict. The shift by one is done on the whole sequence,
    before this split: inside a shard, the first token of the next one would be lost. The end is
    padded with ignored labels; attention is causal, so no real token ever sees the padding."""
    C = group_size(group)
    rank, s = dist.get_rank(group) if C > 1 else 0, tokens_on_rank(len(tokens), C, ring)
    pad, places = (0, s * C - len(tokens)), token_places(s, C, ring, rank).to(tokens.device)
    return F.pad(tokens, pad)[places], F.pad(labels, pad, value=IGNORE)[places]


def span(name):
    """A named range in a profiler's trace; costs nothing while no profiler runs."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


# 2. The transformer -------------------------------------------------------------------------------
#
# Norm, attention, norm, MLP. Modules own the parameters, under Hugging Face's names; the arithmetic
# is in functions of (activations, weights), because parts 7 to 9 call them tile by tile and stage
# by stage. What autograd keeps of one block for the backward pass, in units of s x D elements
# (llama3-8b: H d = D, K d = D/4, F = 3.5 D):
#     norm: input, input normalised, output 3 | q and k, rotated, and v 1.5 | attention's output 1
#     second norm, the same 3 | MLP: gate, up, silu(gate), their product 14                -> 22.5
# In bfloat16 it is 26.5: a norm computes in float32, and keeps two of its three as that. (On CUDA a
# norm keeps one less. A test counts: test_autograd_keeps_what_part_2_lists.)
#
# At 5M tokens s x D is 40 GiB on one rank: 26.5 x 40 GiB x 32 blocks = 33 TiB. Parts 3 to 9 keep
# one or two of the 26.5. The recipe decides in Block.forward and GPT._run which code a block runs:
#     checkpoint 0                     textbook()               forward, backward by autograd
#     checkpoint 1, keep_attention     LeanBlock                keeps x, attention's output, lse
#     checkpoint k (1, too) without    Segment of k blocks      keeps x of the first; its backward
#                                                               pass runs LeanBlocks
#     checkpoint >= 1, no gradients    lean_forward             keeps nothing
#
# FSDP is torch's `fully_shard`, in train.py: of weights, gradients and moments (120 GiB in float32)
# each of N ranks keeps 1/N, and a block's weights are gathered just before they are used. The model
# keeps one rule for it: a weight is read only inside the forward of the FSDP unit that it is in.


def rms_norm(x, weight, eps):  # [..., D], [D] -> [..., D]; in at least float32, rounded once
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps).to(x.dtype)


def rotary(config, positions, dtype=torch.float32):
    """Rotary tables for `positions` [s]: cos and sin of position x frequency, [s, 2, d/2]. In
    float64 and only then rounded to `dtype`: at position 5M, the product in float32 is off by up to
    0.3 rad. Sources: RoFormer, arXiv 2104.09864, section 3.4; arXiv 2407.21783."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=positions.device)
    frequency = config.rope_theta ** -(exponents / config.head_dim)
    if scaling := config.rope_scaling:
        # Llama 3.1: pairs that turn rarely within the original context are slowed down by `factor`,
        # fast ones are left alone, and those between are blended.
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = blend * frequency + (1 - blend) * frequency / scaling["factor"]
    angle = positions.double()[:, None] * frequency  # [s, d/2]
    return torch.stack((angle.cos().to(dtype), angle.sin().to(dtype)), dim=1)


def rotate(x, rope):
    """Turn each pair (i, i + d/2) of every head: x [t, h, d], rope [t, 2, d/2] -> [t, h, d]."""
    cos, sin = rope[:, None].unbind(2)  # [t, 1, d/2]
    a, b = x.to(rope.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class QKV(NamedTuple):
    """The weights before attention: of queries, keys and values. Matrices are [out, in]."""
    norm: torch.Tensor              # [D]
    wq: torch.Tensor                # [H*d, D]
    wk: torch.Tensor                # [K*d, D]
    wv: torch.Tensor                # [K*d, D]
    q_norm: Optional[torch.Tensor]  # [d], or None
    k_norm: Optional[torch.Tensor]


class Rest(NamedTuple):
    """The weights after attention: of the output projection and the MLP."""
    wo: torch.Tensor                # [D, H*d]
    norm: torch.Tensor              # [D]
    gate: torch.Tensor              # [F, D]
    up: torch.Tensor                # [F, D]
    down: torch.Tensor              # [D, F]


# Functions of one token each; t tokens at a time, where t may be all s or a tile of them (part 7).


def heads(normed, w, head_norm, rope, config):
    """[t, D], w [h*d, D] -> [t, h, d]; head_norm and rope may be None."""
    y = F.linear(normed, w).unflatten(-1, (-1, config.head_dim))
    if head_norm is not None:
        y = rms_norm(y, head_norm, config.norm_eps)
    return y if rope is None else rotate(y, rope)


def qkv_heads(x, w, rope, config):  # [t, D] -> q [t, H, d], k and v [t, K, d]
    normed = rms_norm(x, w.norm, config.norm_eps)
    return (heads(normed, w.wq, w.q_norm, rope, config),
            heads(normed, w.wk, w.k_norm, rope, config), heads(normed, w.wv, None, None, config))


def add_rest(x, o, w, config):  # x [t, D], attention's output o [t, H, d] -> the block's y [t, D]
    h = x + F.linear(o.flatten(1), w.wo)
    normed = rms_norm(h, w.norm, config.norm_eps)
    return h + F.linear(F.silu(F.linear(normed, w.gate)) * F.linear(normed, w.up), w.down)


def logits(x, norm, head, config):  # [t, D] -> [t, V]; in at least float32: softmax is next
    y = F.linear(rms_norm(x, norm, config.norm_eps), head)
    return y.to(torch.promote_types(y.dtype, torch.float32))


def token_losses(x, labels, norm, head, config):  # [t, D], [t] -> [t]; 0 for an ignored label
    return F.cross_entropy(logits(x, norm, head, config), labels, ignore_index=IGNORE,
                           reduction="none")


def textbook(x, qkv, rest, p):
    """A block, x [s, D] -> [s, D], of which autograd keeps what it likes."""
    q, k, v = qkv_heads(x, qkv, p.rope, p.config)
    return add_rest(x, ulysses_attention(q, k, v, p), rest, p.config)


class Block(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.index = index
        linear = lambda inner, outer: nn.Linear(inner, outer, bias=False)
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        head_norms = ("q_norm", "k_norm") if c.qk_norm else ()
        self.input_layernorm = nn.RMSNorm(c.dim)
        self.self_attn = nn.ModuleDict(dict(
            q_proj=linear(c.dim, q), k_proj=linear(c.dim, kv), v_proj=linear(c.dim, kv),
            o_proj=linear(q, c.dim), **{name: nn.RMSNorm(c.head_dim) for name in head_norms}))
        self.post_attention_layernorm = nn.RMSNorm(c.dim)
        self.mlp = nn.ModuleDict(dict(
            gate_proj=linear(c.dim, c.ffn_dim), up_proj=linear(c.dim, c.ffn_dim),
            down_proj=linear(c.ffn_dim, c.dim)))

    def weights(self):
        a, m = self.self_attn, self.mlp
        q_norm, k_norm = (a.q_norm.weight, a.k_norm.weight) if "q_norm" in a else (None, None)
        qkv = QKV(self.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight,
                  q_norm, k_norm)
        rest = Rest(a.o_proj.weight, self.post_attention_layernorm.weight, m.gate_proj.weight,
                    m.up_proj.weight, m.down_proj.weight)
        return qkv, rest

    def forward(self, x, p):  # [s, D] -> [s, D]
        qkv, rest = self.weights()
        with span(f"block {self.index}"):
            if p.recipe.checkpoint == 0:
                y = textbook(x, qkv, rest, p)
            elif learns(x, [self]):
                y = apply_boxed(LeanBlock, x, p, self.index, *qkv, *rest)
            else:
                y = lean_forward(x, qkv, rest, p)
        p.progress(self.index, "forward")
        return y


def learns(x, blocks):
    """Whether a backward pass will come through these blocks, for x or for a weight of theirs."""
    wanted = x.requires_grad or any(w.requires_grad for b in blocks for w in b.parameters())
    return wanted and torch.is_grad_enabled()


class Table(nn.Module):
    """A [V, D] matrix. Both ends of the model use one; tied models use the same one twice."""

    def __init__(self, V, D):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(V, D))

    def forward(self, fn, x):
        """fn(x, weight). In here, since FSDP has gathered the weight only while forward runs."""
        return fn(x, self.weight)


@dataclass
class Pass:
    """One forward pass and its backward pass."""
    config: GPTConfig
    recipe: Recipe
    P: int                         # ranks that exchange heads
    heads: Any                     # their ProcessGroup
    ring: Optional["Ring"]         # part 11
    s: int                         # tokens on this rank
    tile: int                      # tokens in a tile, s without tiles
    rope: torch.Tensor             # [s, 2, d/2]
    mask: "Mask"                   # which keys a query sees
    buffers: dict                  # part 8
    store: "HostStore"
    progress: Callable             # progress(layer, "forward" | "again" | "backward")


class GPT(nn.Module):
    """A Llama/Qwen3-shaped causal language model with weights drawn from `seed`.

    On the meta device there is nothing to draw; call init_weights(seed) after `to_empty`."""

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        self.embed_tokens = Table(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim)
        if not config.tie_embeddings:
            self.lm_head = Table(config.vocab_size, config.dim)
        self.stage_buffers, self.store = {}, HostStore()
        self.progress = lambda layer, way: None
        if not self.norm.weight.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed=0):
        """Normal(0, 1/sqrt(D)), what a block adds to the residual stream 1/sqrt(2L) of that; norms
        are 1, and so is the embedding's scale, unless it is the head too: a smaller one drowns in
        what blocks add. The same on any number of ranks: each one draws all, one matrix after
        another, and keeps its shards."""
        generator = torch.Generator(self.norm.weight.device).manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1)
                continue
            added = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = (self.config.dim * (2 * self.config.n_layers if added else 1)) ** -0.5
            if name == "embed_tokens.weight" and not self.config.tie_embeddings:
                std = 1
            whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            whole.normal_(0, std, generator=generator)
            if isinstance(weight, DTensor):  # cut out this rank's shard; None: nothing is sent
                whole = distribute_tensor(whole, weight.device_mesh, weight.placements,
                                          src_data_rank=None)
            weight.copy_(whole)

    def forward(self, tokens, labels, recipe, total=None, docs=None):
        """This rank's share of the loss, a scalar: the sum of its token losses over `total`.

        tokens, labels: int64 [s], this rank's slice (see `shard`); label -100 is ignored.
        total: by default, the labels that count in the whole sequence. Added up over the group, the
        shares are then the mean, and so are the gradients: nothing else is ever divided.
        docs: int64, where each document starts in the whole sequence (the same on every rank);
        attention and positions stay inside a document. None: the sequence is one.
        Raises BadInput for what the model cannot run, before anything is sent."""
        refuse(tokens.shape != labels.shape,
               f"tokens {tuple(tokens.shape)} and labels {tuple(labels.shape)} differ in shape:"
               " there is one label for each token")
        p = self._start(tokens, recipe, docs)
        if total is None:
            total = (labels != IGNORE).sum()
            if group_size(recipe.group) > 1:
                dist.all_reduce(total, group=recipe.group)
        total = torch.as_tensor(total).clamp(min=1)  # no label anywhere: loss 0, gradients 0
        return self._losses(tokens, labels, p).sum() / total

    def token_losses(self, tokens, labels, recipe, docs=None):
        """The loss of each token of this rank's slice, [s]; 0 for an ignored label."""
        return self._losses(tokens, labels, self._start(tokens, recipe, docs))

    def logits(self, tokens, recipe, docs=None):
        """[s] -> [s, V] in at least float32. (FSDP: register_fsdp_forward_method.)"""
        p = self._start(tokens, recipe, docs)
        return self._run(tokens, p, lambda x, head: logits(
            x, self.norm.weight, head, self.config))

    def _start(self, tokens, recipe, docs):
        C, s, R = group_size(recipe.group), tokens.numel(), recipe.ring
        check_recipe(recipe, self.config, C)
        refuse(tokens.dim() != 1 or s == 0 or R > 1 and s % 2,
               f"tokens {tuple(tokens.shape)} must be [s], one sequence, not empty, and with a ring"
               " s must be even: see shard()")
        device, rank = tokens.device, dist.get_rank(recipe.group) if C > 1 else 0
        positions = token_places(s, C, R, rank).to(device)
        edges, ring, heads = None, None, recipe.group
        if docs is not None:
            edges = document_edges(docs, C * s).to(device)
            positions -= edges[torch.searchsorted(edges, positions, right=True) - 1]
        mask = Mask(edges)
        if R > 1:
            heads, group = recipe.subgroups
            r = dist.get_rank(group)
            ring = Ring(group, r, R, ring_steps(r, R, s * C // (2 * R), mask))
        dtype = torch.promote_types(self.norm.weight.dtype, torch.float32)
        rope = rotary(self.config, positions, dtype)
        return Pass(self.config, recipe, C // R, heads, ring, s, recipe.tile or s, rope, mask,
                    self.stage_buffers, self.store, self.progress)

    def _losses(self, tokens, labels, p):  # [s], [s] -> [s]
        # Logits are V/F times as wide as the MLP: their tiles are that much shorter.
        tile = min(p.tile, max(1, p.tile * self.config.ffn_dim // self.config.vocab_size))

        def losses(x, head):
            inputs = x, labels, self.norm.weight, head, self.config
            return TiledLosses.apply(*inputs, tile) if p.recipe.tile else token_losses(*inputs)
        return self._run(tokens, p, losses)

    def _run(self, tokens, p, head):  # [s] -> what head(x, weight) makes of [s, D]
        x = self.embed_tokens(F.embedding, tokens)
        segments = p.recipe.checkpoint and not p.recipe.keep_attention
        k = p.recipe.checkpoint if segments else 1
        for i in range(0, len(self.layers), k):
            x = (run_segment if segments else run_blocks)(x, p, self.layers[i:i + k])
        return (self.embed_tokens if self.config.tie_embeddings else self.lm_head)(head, x)


def run_blocks(x, p, blocks):
    for block in blocks:
        x = block(x, p)
    return x


def document_edges(starts, S):
    """Starts of documents in a sequence of S tokens -> int32 [0, ..., S]. Raises BadInput."""
    starts = torch.as_tensor(starts, dtype=torch.int64)
    edges = F.pad(starts, (0, 1), value=S)
    refuse(starts.dim() != 1 or len(starts) == 0 or starts[0] != 0 or (edges.diff() <= 0).any(),
           f"docs={starts.tolist()} must be where the documents start: 0 first, then ascending,"
           f" all below the sequence's length {S}")
    return edges.to(torch.int32)


# 3. Attention kernels -----------------------------------------------------------------------------
#
# At S = 5M the scores of one head are S x S: 50 TiB in bfloat16. A flash kernel never has them in
# memory. Forward, it walks the keys in small blocks with a running softmax and returns, beside the
# output, one number for each query: the log-sum-exp of its scores. With q, k, v and o this is all
# that the backward pass needs, for a probability is A = exp(score - lse), computed again block by
# block. With Z for the scores q k^T / sqrt(d):
#     dv = A^T do     dA = do v^T     dZ = A (dA - rowsum(do o))
#     dq = dZ k / sqrt(d)             dk = dZ^T q / sqrt(d)
# (FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.) The kernels are not ours to write. Ours
# is to hand them what they can take: contiguous tensors, since a strided do has given wrong
# gradients in silence, and fewer than 2^31 elements, since they index with 32 bits in places
# (flash-attention issues 767, 1841, 2611).


class Mask(NamedTuple):
    """Which keys a query sees: those of its own document, up to its own place; or all."""
    edges: Optional[torch.Tensor] = None  # int32 [documents + 1], from 0 to S; None: one document
    causal: bool = True                   # False: every query sees every key (edges: None)

    def documents(self):
        """Each document's tokens, as slices."""
        edges = [None, None] if self.edges is None else self.edges.tolist()
        return [slice(a, b) for a, b in zip(edges, edges[1:])]


class Kernel(NamedTuple):
    """A pair. q, o [S, u, d] and k, v [S, n, d] are contiguous, n divides u, lse is [u, S]."""
    forward: Callable      # (q, k, v, mask) -> o, lse
    backward: Callable     # (do, q, k, v, o, lse, mask) -> dq, dk, dv
    limit: float = 2**31   # elements of q that it can index


def aten_kernel(forward, backward):
    """A Kernel from aten's form, [batch, heads, S, d], which knows no documents: they are worked
    through one by one. The n kv heads become the batch, and each is repeated, by a view, for its
    u/n query heads; the gradients of the repetitions are summed."""
    batched = lambda x, n: x.unflatten(1, (n, -1)).permute(1, 2, 0, 3)  # [n, u/n, S, d]
    packed = lambda x: x.permute(2, 0, 1, 3).flatten(1, 2).contiguous()  # and back; n = 1: no copy
    joined = lambda parts, dim=0: parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    repeated = lambda x, q: x.expand(-1, q.shape[1], -1, -1)

    def one_forward(q, k, v, causal):
        q, k, v = (batched(x, k.shape[1]) for x in (q, k, v))
        o, lse = forward(q, repeated(k, q), repeated(v, q), causal)[:2]
        return packed(o), lse.flatten(0, 1)

    def one_backward(do, q, k, v, o, lse, causal):
        lse = lse.unflatten(0, (k.shape[1], -1))
        do, q, k, v, o = (batched(x, k.shape[1]) for x in (do, q, k, v, o))
        dq, dk, dv = backward(do, q, repeated(k, q), repeated(v, q), o, lse, causal)
        if dk.shape[1] > 1:
            dk, dv = dk.sum(1, keepdim=True), dv.sum(1, keepdim=True)
        return packed(dq), packed(dk), packed(dv)

    def all_forward(q, k, v, mask):
        o, lse = zip(*(one_forward(q[i], k[i], v[i], mask.causal) for i in mask.documents()))
        return joined(o), joined(lse, dim=1)

    def all_backward(do, q, k, v, o, lse, mask):
        grads = (one_backward(*(x[i] for x in (do, q, k, v, o)), lse[:, i], mask.causal)
                 for i in mask.documents())
        return [joined(parts) for parts in zip(*grads)]

    return Kernel(all_forward, all_backward)


def torch_forward(q, k, v, mask):
    edges = mask.edges
    one = (lambda x: x[None]) if edges is None else (lambda x: x)  # documents have no batch
    o, lse, *_ = aten._flash_attention_forward(one(q), one(k), one(v), edges, edges, len(q),
                                               len(k), 0.0, mask.causal, False)
    return o.view_as(q), lse.view(q.shape[1], len(q))


def torch_backward(do, q, k, v, o, lse, mask):
    edges = mask.edges
    one = (lambda x: x[None]) if edges is None else (lambda x: x)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout: it is never read
    grads = aten._flash_attention_backward(*map(one, (do, q, k, v, o, lse)), edges, edges,
                                           len(q), len(k), 0.0, mask.causal, seed, seed)
    return [grad.view_as(x) for grad, x in zip(grads, (q, k, v))]


aten = torch.ops.aten
KERNELS = {  # extras/kernels.py adds others
    "cpu": aten_kernel(
        lambda *x: aten._scaled_dot_product_flash_attention_for_cpu(*x[:3], 0.0, x[3]),
        lambda *x: aten._scaled_dot_product_flash_attention_for_cpu_backward(*x[:6], 0.0, x[6])),
    "torch": Kernel(torch_forward, torch_backward),
}


def pick_kernel(name, q):
    """The Kernel called `name`; "auto": torch's own for the device of q."""
    if name == "auto":
        name = "cpu" if q.device.type == "cpu" else "torch"
    return KERNELS[name]


def flash_forward(q, k, v, kernel="auto", mask=Mask()):
    """Attention: q [S, u, d], k, v [S, n, d] -> o [S, u, d], lse [u, S] (float32 at least).

    Query head i reads kv head i // (u/n). Raises BadInput for 2^31 elements and more."""
    kernel = pick_kernel(kernel, q)
    refuse(q.numel() >= kernel.limit,
           f"attention over {q.shape[0]} tokens x {q.shape[1]} heads x {q.shape[2]} is {q.numel()}"
           " elements in one call, and kernels index below 2^31: use attention='upipe' with fewer"
           " heads_per_stage")
    return kernel.forward(*(x.contiguous() for x in (q, k, v)), mask)


def flash_backward(do, q, k, v, o, lse, kernel="auto", mask=Mask()):
    """dq [S, u, d], dk, dv [S, n, d] of flash_forward, from do, its inputs and its outputs."""
    tensors = (x.contiguous() for x in (do, q, k, v, o, lse))
    return pick_kernel(kernel, q).backward(*tensors, mask)


def attend(q, k, v, p):
    """What a stage asks of its kernel; with a ring, of the kernels of the ring (part 11)."""
    return ring_forward(q, k, v, p) if p.ring else flash_forward(q, k, v, p.recipe.kernel, p.mask)


def attend_backward(do, q, k, v, o, lse, p):
    if p.ring:
        return ring_backward(do, q, k, v, o, lse, p)
    return flash_backward(do, q, k, v, o, lse, p.recipe.kernel, p.mask)


# 4. Ulysses ---------------------------------------------------------------------------------------
#
# Split the sequence: rank r owns tokens r*s .. (r+1)*s - 1. Norms, projections and the MLP never
# look at a neighbour; attention does. For the time of the attention, Ulysses gives each rank *all*
# tokens of H/P heads, by one all-to-all:
#
#                  my tokens, all heads                          all tokens, my heads
#     tokens 0   | rank 0: heads 0  1  2  3 |   all-to-all   | rank 0: 0 1 | rank 1: 2 3 |  tokens 0
#     tokens 1   | rank 1: heads 0  1  2  3 |    <------>    | rank 0: 0 1 | rank 1: 2 3 |  tokens 1
#
# Nothing is transposed on arrival: the send buffer is [P, s, u, d], destination first. It arrives
# as [P, s, u, d], source first; and since sources own consecutive tokens, that *is* [S, u, d]. The
# way back is the same call, so each direction is the other's gradient.
#
# There are only K kv heads. If K >= P, each rank gets K/P of them. If K < P, P/K ranks share one:
# each gets a replica, and the replicas' gradients are summed on the way home.
#
# Activations fall by C: from 33 TiB to 4.1 TiB a rank at C = 8. It still does not nearly fit.


def all_to_all(x, group=None, out=None):
    """x [P, s, u, d], destination rank first -> the same shape, source rank first. Both contiguous:
    gloo writes into a strided output without a complaint. Of x, 1/P stays on this rank."""
    if len(x) == 1:
        return x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    assert x.is_contiguous() and out.is_contiguous(), (x.stride(), out.stride())
    with span("all-to-all"):
        dist.all_to_all_single(out, x, group=group)
    return out


def seq_to_heads(x, group=None, out=None):
    """From "my tokens, all heads" to "all tokens, my heads": [P, s, u, d], destination rank first
    -> [S, u, d] in order. Source: DeepSpeed Ulysses, arXiv 2309.14509, section 3."""
    return all_to_all(x, group, out).flatten(0, 1)


def heads_to_seq(x, group=None, out=None):
    """The way back: [S, u, d] -> [P, s, u, d], at index r my tokens of rank r's heads."""
    return all_to_all(x.unflatten(0, (group_size(group), -1)), group, out)


def by_rank(x, P):
    """Heads by the rank that works on them: [t, n, d] -> [t, P, n/P, d]; if there are fewer than
    ranks, each rank's replica: [t, P, 1, d]."""
    ranks = min(P, x.shape[1])
    return x.unflatten(1, (ranks, -1)).repeat_interleave(P // ranks, dim=1)


class UlyssesAttention(torch.autograd.Function):
    """q, k, v [P, s, n, d], destination rank first -> o, likewise. Keeps what attention's backward
    pass needs. The gradient of each all-to-all is the other one."""

    @staticmethod
    def forward(ctx, q, k, v, p):
        ctx.p = p
        q, k, v = (seq_to_heads(x.contiguous(), p.heads) for x in (q, k, v))
        o, lse = attend(q, k, v, p)  # [S, H/P, d], and k, v [S, max(1, K/P), d]
        ctx.save_for_backward(q, k, v, o, lse)
        return heads_to_seq(o, p.heads)

    @staticmethod
    def backward(ctx, do):
        do = seq_to_heads(do.contiguous(), ctx.p.heads)
        grads = attend_backward(do, *ctx.saved_tensors, ctx.p)
        return *(heads_to_seq(x, ctx.p.heads) for x in grads), None


def ulysses_attention(q, k, v, p):
    """Attention over all heads at once, by autograd: q [s, H, d], k and v [s, K, d] -> [s, H, d].
    With P = 1 nothing is sent, and it is the textbook's."""
    q, k, v = (by_rank(x, p.P).transpose(0, 1) for x in (q, k, v))
    o = UlyssesAttention.apply(q, k, v, p)  # [P, s, H/P, d]
    return o.transpose(0, 1).flatten(1, 2)  # -> [s, H, d]


# 5. Offload ---------------------------------------------------------------------------------------
#
# The backward pass needs tensors of the forward pass that nobody needs in between, and a host has 2
# TB: *park* them there and *fetch* them just in time. A copy hides behind computation only if the
# host memory is pinned and the copy is on a stream of its own. Two traps:
#   - torch's allocator of pinned memory rounds up to a power of two: 5 GiB pin 8. Slabs here are
#     plain pages, as many as it takes, registered with CUDA.
#   - when a tensor dies, the next one on the stream that computes gets its memory, while a copy may
#     still be reading it. Tensor.record_stream frees it only when the GPU is past the copy; but the
#     CPU is hundreds of tiles ahead, so the memory of all of them would be held at once. Instead,
#     the stream that computes waits: before a parked tensor dies (wait_for_copies), and before a
#     fetched one is read (arrived). By then the copy has usually finished: the wait is free.
# Slabs need no such care: all copies, to and fro, queue on one stream.


class HostStore:
    """Slabs of host memory for parked tensors. A slab goes back to the free list when its tensor
    dies: fetched, or its graph dropped, or an exception. Nothing has to be called between steps."""

    def __init__(self):
        self.free = defaultdict(list)  # bytes -> slabs of that size that nobody uses
        self.bytes = 0                 # parked now
        self.slab_bytes = 0            # all slabs, free ones too: what the host really holds
        self.stream = None             # of the copies, on CUDA

    def wait_for_copies(self):
        """Let computation wait for the copies: parked tensors may then die or be written over."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    @contextmanager
    def copying(self, name):
        """Copies in here start after all work queued so far, and run beside later work."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), span(name):
            yield

    def slab(self, size):
        """A slab of exactly `size` bytes."""
        if not self.free[size] and self.bytes == 0:
            # A new size in a new step: nobody will ask for the old ones any more.
            if self.stream is not None:  # copies may still be under way
                self.stream.synchronize()
            self.free.clear()
            self.slab_bytes = 0
        if not self.free[size]:
            self.slab_bytes += size
            make = pinned if self.stream else partial(torch.empty, dtype=torch.uint8, device="cpu")
            self.free[size].append(make(size))
        self.bytes += size
        return self.free[size].pop()

    def give_back(self, slab):
        self.bytes -= len(slab)
        self.free[len(slab)].append(slab)


def pinned(size):
    """`size` bytes, uint8, on pages that nobody shares, registered with CUDA."""
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    slab = torch.frombuffer(pages, dtype=torch.uint8)
    cuda, address = torch.cuda.cudart(), slab.data_ptr()
    status = int(cuda.cudaHostRegister(address, size, 0))
    if status != 0:
        raise RuntimeError(f"cannot pin {size / 2**30:.1f} GiB of host memory (CUDA error {status})"
                           ": raise `ulimit -l` or park less (checkpoint k > 1)")
    weakref.finalize(slab.untyped_storage(), cuda.cudaHostUnregister, address)
    return slab


class Parked:
    """A contiguous tensor x on its way to the host: leave x as it is until wait_for_copies().
    fetch() brings it back whole, rows(parked, tile) tile by tile."""

    def __init__(self, store, x):
        assert x.is_contiguous(), (x.shape, x.stride())
        if x.is_cuda and store.stream is None:
            store.stream = torch.cuda.Stream(x.device)
        self.store, self.device = store, x.device
        slab = store.slab(x.nbytes)
        weakref.finalize(self, store.give_back, slab)
        self.host = slab.view(x.dtype).view(x.shape)
        with store.copying("park"):
            self.host.copy_(x, non_blocking=True)

    def __len__(self):
        return len(self.host)

    def copy(self, a, b, out=None):
        """Start to bring rows a to b -> (device tensor, event that says when they are there)."""
        out = torch.empty_like(self.host[a:b], device=self.device) if out is None else out[a:b]
        with self.store.copying("fetch"):
            out.copy_(self.host[a:b], non_blocking=True)
        return out, self.store.stream and self.store.stream.record_event()

    def fetch(self):
        """The whole tensor, on its device."""
        return arrived(*self.copy(0, len(self)))


def arrived(x, event):
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
    return x


def tile_spans(length, tile):  # [(0, tile), (tile, 2 * tile), ...]; the last may be shorter
    return [(a, min(a + tile, length)) for a in range(0, length, tile)]


def rows(x, tile, whole=None):
    """Walk x, a tensor or Parked, in tiles: yields (a, b, x[a:b]). From the host, the next tile is
    on its way while the caller works on this one; it lands in `whole`, if given."""
    spans = tile_spans(len(x), tile)
    fetch = partial(x.copy, out=whole) if isinstance(x, Parked) else lambda a, b: (x[a:b], None)
    ahead = fetch(*spans[0])
    for (a, b), after in zip(spans, spans[1:] + [None]):
        here, ahead = ahead, after and fetch(*after)
        with span("tile"):
            yield a, b, arrived(*here)


def whole_and_rows(x, tile):
    """(whole, walk): x on its device, and a walk like rows() that fills it on the way from the
    host. Read only rows that the walk has passed."""
    if not isinstance(x, Parked):
        return x, rows(x, tile)
    whole = torch.empty_like(x.host, device=x.device)
    return whole, rows(x, tile, whole)


def keep(p, *tensors):
    """What the backward pass will need: parked with `offload`, else as it is."""
    return [Parked(p.store, x) if p.recipe.offload else x for x in tensors]


def take_kept(ctx):
    """All that was kept, once. Raises RuntimeError the second time."""
    if not ctx.kept:
        raise RuntimeError("a second backward pass over the same step: the first has used up"
                           " what was kept. Run forward again (retain_graph is no help)")
    kept, ctx.kept = ctx.kept, []
    return kept


# 6. Checkpointing ---------------------------------------------------------------------------------
#
# Of a block's 26.5 s D one must be kept: its input. The rest can be computed again in the backward
# pass, at the price of one more forward pass (arXiv 1604.06174). Segment's docstring has the
# simplest form. Segment itself is that for k blocks in a row. While they run again, each keeps its
# input and its attention output (part 9), so that nothing runs a third time. Two levels: the inputs
# of the other L/k - 1 segments wait, with 2k tensors for the blocks of the one at work and dy. With
# L = 32 and k = 4 that is 16 tensors, not 32.
#
# A gradient [s, D] is 5 GiB, and a block has no room for two of them: it turns dy into dx in place.
# But autograd holds the dy that it hands to a backward pass until that pass ends, and others may
# hold it too (x + block(x) gives the same dy to both sides). So a pass gets dy in a *box*, a list:
# IntoBox, behind it, copies dy into the box and hands on a zero, expanded to dy's shape without
# memory. The copy costs milliseconds where a block takes minutes.


class IntoBox(torch.autograd.Function):
    """y -> y. Its backward pass leaves a copy of dy in `box`, for the Function that made y. An
    anchor that requires a gradient makes y require one, too."""

    @staticmethod
    def forward(ctx, y, box, anchor=None):
        ctx.box = box
        return y.detach()

    @staticmethod
    def backward(ctx, dy):
        ctx.box.append(dy.clone(memory_format=torch.contiguous_format))
        return dy.new_zeros(()).expand_as(dy) if ctx.needs_input_grad[0] else None, None, None


def apply_boxed(function, x, *args):
    """function.apply(x, box, *args), whose backward pass finds dy in the box."""
    box = []
    return IntoBox.apply(function.apply(x, box, *args), box)


class Segment(torch.autograd.Function):
    """k blocks of which the input alone is kept: x [s, D] -> [s, D]. In its simplest form:

    >>> class Checkpoint(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x, block):
    ...         ctx.x, ctx.block = x, block
    ...         return block(x)  # autograd is off in here: nothing is kept
    ...     @staticmethod
    ...     def backward(ctx, dy):
    ...         x = ctx.x.detach().requires_grad_()
    ...         with torch.enable_grad():
    ...             y = ctx.block(x)
    ...         torch.autograd.backward(y, dy)  # the weights' gradients go to their .grad
    ...         return x.grad, None
    >>> x, block = torch.ones(2, 4, requires_grad=True), nn.Linear(4, 4)
    >>> Checkpoint.apply(x, block).sum().backward()
    >>> torch.equal(x.grad, block.weight.sum(0).expand(2, 4)), block.weight.grad.shape
    (True, torch.Size([4, 4]))

    anchor: an empty tensor. Autograd calls backward only if an input requires a gradient, and the
    blocks' weights are no inputs: the anchor stands for them."""

    @staticmethod
    def forward(ctx, x, box, anchor, p, blocks):
        ctx.box, ctx.p, ctx.blocks = box, p, blocks
        ctx.kept = keep(p, x)  # lean_forward ends with wait_for_copies
        return run_blocks(x, p, blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        p, box, (x_needed, _, weights_needed, *_) = ctx.p, ctx.box, ctx.needs_input_grad
        if weights_needed:  # not if torch.autograd.grad asks for others: then it leaves .grad alone
            weights_needed = torch._C._will_engine_execute_node(ctx.next_functions[1][0])
        y, = take_kept(ctx)  # the input; then what each block makes of it, so that none lives on
        y = y.fetch() if p.recipe.offload else y.detach()
        if p.recipe.stream:  # dy waits on the host while the blocks run again
            dy = box.pop()
            box.append(Parked(p.store, dy))
            p.store.wait_for_copies()
            del dy
        again = replace(p, recipe=replace(p.recipe, checkpoint=1, keep_attention=True),
                        progress=lambda i, way: p.progress(i, way.replace("forward", "again")))
        dx, anchor = [], y.new_empty(0).requires_grad_(x_needed)
        with torch.enable_grad():
            y = IntoBox.apply(y, dx, anchor)
            for block in ctx.blocks:
                y = block(y, again)
            y.register_hook(lambda _: box.pop().fetch() if p.recipe.stream else box.pop())
            end = y.sum()  # its gradient, 1, becomes dy in that hook
            del y  # only the graph behind it is wanted
        torch.autograd.backward(end, inputs=None if weights_needed else [anchor])
        return dx.pop() if x_needed else None, None, None, None, None


def run_segment(x, p, blocks):
    """The blocks as a Segment, if a backward pass will come through."""
    if not learns(x, blocks):
        return run_blocks(x, p, blocks)
    trained = any(w.requires_grad for block in blocks for w in block.parameters())
    return apply_boxed(Segment, x, x.new_empty(0).requires_grad_(trained), p, blocks)


# 7. Sequence tiling -------------------------------------------------------------------------------
#
# The head is the smallest complete example: at 5M on 8 ranks, [s, V] logits in float32 are 313 GiB.
# But a token's loss needs only that token's logits. So take a tile of tokens, compute logits and
# losses and drop the logits; in the backward pass do it again, and get the tile's gradients by
# ordinary autograd. All that works token by token can be done so: norms, projections, MLP (ALST,
# arXiv 2506.13996, section 3).
#
# One care: a weight's gradient is the sum over all tiles. Rounded to bfloat16 after each tile, it
# would lose digits with every one. So it adds up in float32. Autograd gets it once, since FSDP
# expects one gradient per weight and pass.


class TiledLosses(torch.autograd.Function):
    """token_losses, tile by tile. Keeps x and labels, never the logits."""

    @staticmethod
    def forward(ctx, x, labels, norm, head, config, tile):
        ctx.config, ctx.tile = config, tile
        ctx.save_for_backward(x, labels, norm, head)
        return torch.cat([token_losses(x_t, labels[a:b], norm, head, config)
                          for a, b, x_t in rows(x, tile)])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, labels, *weights = ctx.saved_tensors
        x_needed, _, *needed, _, _ = ctx.needs_input_grad
        dx, dw = torch.empty_like(x) if x_needed else None, zero_sums(weights, needed)
        for a, b, x_t in rows(x, ctx.tile):
            losses = lambda x_t, *w: token_losses(x_t, labels[a:b], *w, ctx.config)
            dx_t = tile_backward(losses, x_t, weights, dy[a:b], x_needed, dw)
            if x_needed:
                dx[a:b] = dx_t
        return dx, None, *rounded(dw, weights), None, None


def zero_sums(weights, needed):
    """For the gradients of the weights to add up in, in at least float32; None where not needed."""
    return [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) if need else None
            for w, need in zip(weights, needed)]


def rounded(sums, weights):
    """The sums in the dtype of their weights."""
    return [total if total is None else total.to(w.dtype) for total, w in zip(sums, weights)]


def tile_backward(fn, x, weights, dy, x_needed, sums):
    """Back through y = fn(x, *weights): returns dx, or None, and adds to the weights' sums."""
    inputs, needed = (x, *weights), (x_needed, *(total is not None for total in sums))
    with torch.enable_grad():
        leaves = [y if y is None else y.detach().requires_grad_(need)
                  for y, need in zip(inputs, needed)]
        wanted = [y for y, need in zip(leaves, needed) if need]
        grads = iter(torch.autograd.grad(fn(*leaves), wanted, dy))
    dx = next(grads) if x_needed else None
    for total in sums:
        if total is not None:
            total += next(grads)
    return dx


# 8. UPipe -----------------------------------------------------------------------------------------
#
# What is left is attention. Ulysses holds q, k, v, o and their gradients for its H/P heads at once.
# At 5M, llama3-8b on 8 ranks, q, o, do and dq are 5 GiB each, k, v, dk and dv 1.25 each, and
# buffers to send and the kernel's workspace come on top: 50 GiB at the backward kernel. But heads
# know nothing of each other. UPipe ("Untied Ulysses", arXiv 2602.21196) takes U of them at a time,
# a *stage*: project, all-to-all, attend, all-to-all; and the next stage writes over the same
# buffers. With U = P a rank works on one head: 1.25 GiB where it was 5, and no stage buffer grows
# with H any more. On one rank, where nothing is sent, it is this:
#
#     def upipe(normed, wq, wk, wv, o):         # normed [S, D] -> fills o [S, H, d]
#         for kv, queries in stages(H, K, P=1, U=u):
#             k = heads(normed, wk[kv])         # [S, n, d]; the weights as [heads, d, D]
#             v = heads(normed, wv[kv])
#             for stage in queries:             # q, out: the next stage writes over both
#                 q = heads(normed, wq[stage])  # [S, u, d]
#                 out = attention(q, k, v)
#                 o[:, stage] = out
#
# Grouped queries fix the order. Rank r owns query heads r*H/P .. and the kv heads they read. It
# loads kv heads once, walks the query heads that read them, adds up dk and dv on the way and sends
# them home once. So a stage takes the next heads of every rank, and these are no neighbours in wq:
# for P = 2, H = 8 and U = 2, heads 0 and 4, then 1 and 5. Query head i always reads kv head i // G.
# (The paper's code pairs them by their place in the stage: harmless from a random start, silently
# wrong for released weights.)
#
# With ranks, one block's attention for P = 2, H = 8, K = 2, U = 4, as rank 0 sees it (u = 2, and
# rank 0 works on query heads 0 to 3, which read kv head 0):
#
#     x [s, D]    k: project heads 0 | 1: [s, 2, 1, d] -> all-to-all -> [S, 1, d]; v likewise
#     stage 0     q: project heads 0 1 | 4 5: [s, 2, 2, d] -> all-to-all -> [S, 2, d]
#                 attention -> out [S, 2, d], lse [2, S]
#                 out -> all-to-all -> [s, 2, 2, d], which are o's heads 0 1 | 4 5
#     stage 1     the same for heads 2 3 | 6 7, in the same buffers        -> o [s, 8, d] is full


def stages(H, K, P, U):
    """One rank's schedule: [(kv heads to load, [query heads of a stage, ...]), ...], slices of the
    rank's own heads. On rank r, query head i is head r*H/P + i of the model; kv head j is r*K/P +
    j, or with K < P, where it is a replica, r*K//P.

    >>> stages(H=8, K=2, P=2, U=4)  # a rank has one kv head, four query heads, takes two at a time
    [(slice(0, 1, None), [slice(0, 2, None), slice(2, 4, None)])]
    """
    u, kv = U // P, max(1, K // P)  # query heads of a stage, kv heads of a rank
    readers = H // P // kv          # query heads of this rank that read one kv head
    n = max(1, u // readers)        # kv heads of one load
    return [(slice(j, j + n),
             [slice(i, i + u) for i in range(j * readers, (j + n) * readers, u)])
            for j in range(0, kv, n)]


def stage_buffer(role, shape, like, p):
    """A contiguous tensor, not cleared, in the memory of `role`: "send", or for what arrives "q",
    "k", "v", "o", "do". Every stage of every layer gets the same: copy what you want to keep, since
    the next one writes over it."""
    size, flat = math.prod(shape), p.buffers.pop(role, like[:0])
    if len(flat) < size or (flat.dtype, flat.device) != (like.dtype, like.device):
        flat = None  # the old memory goes first: never both
        flat = like.new_empty(size)
    p.buffers[role] = flat
    return flat[:size].view(shape)


def exchange(role, parts, p):
    """All-to-all of parts, which yields (a, b, [t, P, n, d]) -> [S, n, d] in the buffer of `role`.
    The one copy is here, where rows are sorted by destination; on arrival there is none."""
    send = None
    for a, b, part in parts:
        if send is None:  # alone, a rank needs no second buffer to send to itself
            shape = (p.P, p.s, *part.shape[2:])
            send = stage_buffer("send" if p.P > 1 else role, shape, part, p)
        send[:, a:b] = part.transpose(0, 1)
    out = stage_buffer(role, shape, send, p) if p.P > 1 else None
    return seq_to_heads(send, p.heads, out)


def send_home(x, p):
    """The reverse: what a kernel made, [S, n, d] -> [s, P, n, d], my tokens by the rank that worked
    on them. In the send buffer, which is free by now."""
    out = stage_buffer("send", (p.P, p.s, *x.shape[1:]), x, p) if p.P > 1 else None
    return heads_to_seq(x, p.heads, out).transpose(0, 1)


def load(role, own_heads, x, w, p):
    """Project heads `own_heads` of every rank and exchange them: x [s, D] -> [S, n, d]. role: q, k
    or v."""
    weight, head_norm, rope = dict(q=(w.wq, w.q_norm, p.rope), k=(w.wk, w.k_norm, p.rope),
                                   v=(w.wv, None, None))[role]
    d = p.config.head_dim
    ranks = min(p.P, len(weight) // d)  # with fewer kv heads than ranks, only so many differ
    weight = weight.view(ranks, -1, d, weight.shape[1])[:, own_heads].flatten(0, 2)

    def parts():
        for a, b, x_t in rows(x, p.tile):
            normed = rms_norm(x_t, w.norm, p.config.norm_eps)
            turn = None if rope is None else rope[a:b]
            y = heads(normed, weight, head_norm, turn, p.config)  # [t, D] -> [t, ranks*n, d]
            yield a, b, by_rank(y, p.P)

    return exchange(role, parts(), p)


def schedule(p):
    c = p.config
    return stages(c.n_heads, c.n_kv_heads, p.P, p.recipe.stage_heads(c, p.P))


def attention_forward(x, w, p):
    """Attention in stages: x [s, D], w QKV -> o [s, H, d], lse [H/P, S] of this rank's heads.

    At its peak there are o and 7 stage buffers: send, q, k, v, the kernel's output, and o and do if
    there was a backward pass before. Sends (2H + 2 max(K, P)) s d elements, for any U (1/P of them
    to itself)."""
    H, d = p.config.n_heads, p.config.head_dim
    o = x.new_empty(p.s, p.P, H // p.P, d)
    lse = x.new_empty(H // p.P, p.P * p.s, dtype=p.rope.dtype)
    if p.P > 1:  # queries are the most that is sent: made for them, the buffer is never made again
        stage_buffer("send", (p.s, p.recipe.stage_heads(p.config, p.P), d), x, p)
    for kv, queries in schedule(p):
        k, v = load("k", kv, x, w, p), load("v", kv, x, w, p)
        for stage in queries:
            with span("stage"):
                q = load("q", stage, x, w, p)
                out, lse[stage] = attend(q, k, v, p)
                o[:, :, stage] = send_home(out, p)  # [S, u, d] -> [s, P, u, d]
                del out  # or it would be there beside the next stage's
    return o.flatten(1, 2), lse


def attention_backward(x, o, lse, dh, wo, w, p):
    """Back through attention, stage by stage: writes dq over o [s, H, d] and returns dk, dv [s, K,
    d]. A stage reads its heads of o before it writes them; no other stage touches them.

    q, k and v are projected again, and do is made of dh [s, D] as a stage needs it. At its peak
    there are dq, dk, dv and 11 stage buffers: send, q, k, v, o, do, the kernel's dq, dk, dv, the
    sums of dk and dv. Sends (4H + 4 max(K, P)) s d elements. (The sums are in the kernel's dtype:
    of 8 and 16 stages in bfloat16, dk and dv are off by 0.6% and 0.7%; float32 sums leave 0.5%.)"""
    K, d = p.config.n_kv_heads, p.config.head_dim
    o = o.unflatten(1, (p.P, -1))  # [s, P, H/P, d]
    dk, dv = (o.new_empty(p.s, K, d) for _ in range(2))
    for kv, queries in schedule(p):
        k, v = load("k", kv, x, w, p), load("v", kv, x, w, p)
        sums = None
        for stage in queries:
            with span("stage"):
                q = load("q", stage, x, w, p)
                out = exchange("o", ((a, b, o_t[:, :, stage]) for a, b, o_t in rows(o, p.tile)), p)
                do = exchange("do", output_gradient(dh, wo, stage, p), p)
                dq_stage, *dkv = attend_backward(do, q, k, v, out, lse[stage], p)
                sums = [a.add_(b) for a, b in zip(sums, dkv)] if sums else dkv
                o[:, :, stage] = send_home(dq_stage, p)
                del dq_stage, dkv
        collect(dk, kv, send_home(sums[0], p), p)
        collect(dv, kv, send_home(sums[1], p), p)
    return dk, dv


def output_gradient(dh, wo, stage, p):
    """Tiles of do = dh @ wo for the heads of one stage; the whole of do need never exist."""
    wo = wo.unflatten(1, (p.P, -1, p.config.head_dim))[:, :, stage]  # [D, P, u, d]
    columns = wo.flatten(1)
    for a, b, dh_t in rows(dh, p.tile):
        yield a, b, (dh_t @ columns).unflatten(1, wo.shape[1:])  # [t, D] -> [t, P, u, d]


def collect(home, kv, parts, p):
    """Put kv heads `kv` of every rank, parts [s, P, n, d], into home [s, K, d]; add up replicas."""
    ranks = min(p.P, home.shape[1])
    home = home.unflatten(1, (ranks, -1))  # [s, ranks, K/ranks, d]
    for a, b, part in rows(parts, p.tile):
        if ranks < p.P:  # in float32, rounded once
            part = part.unflatten(1, (ranks, -1)).sum(2, dtype=p.rope.dtype)
        home[a:b, :, kv] = part


# 9. The lean block --------------------------------------------------------------------------------
#
# Everything together. One Function is the whole block, since only the owner of all tensors knows
# when each of them can be freed. Forward: attention in stages, then output projection, residual and
# MLP in one walk over the tiles. It keeps x, attention's output o and lse, on the host with
# `offload`. Backward:
#     (a) tile by tile: h again and back through the MLP: dy becomes dh, in place
#     (b) stage by stage: q, k, v again and back through attention: dq takes the place of o
#     (c) tile by tile: dq, dk, dv become dx, in place of dh
# Of size s x D three are alive: x, dh (was dy, will be dx) and o (will be dq); and beside them dk,
# dv (2 s K d) and the stage buffers. With `stream`, x and dh wait on the host during (b), which
# reads their tiles from there, once for each of its H/U stages: one is left then. At a million
# tokens and more this costs nothing: a stage of attention takes longer than such a walk. (Keeping
# o beside x: arXiv 2310.03294.)


def lean_forward(x, qkv, rest, p, see=lambda *tensors: None):
    """A block forward, x [s, D] -> [s, D]. Calls see(x) and see(o, lse), o [s, H, d], lse [H/P, S],
    as soon as these are there: copies hide behind the attention and behind the MLP."""
    see(x)
    o, lse = attention_forward(x, qkv, p)
    see(o, lse)
    y = torch.empty_like(x)
    for a, b, x_t in rows(x, p.tile):
        y[a:b] = add_rest(x_t, o[a:b], rest, p.config)
    p.store.wait_for_copies()
    return y


class LeanBlock(torch.autograd.Function):
    """One block, x [s, D] -> [s, D], that keeps x, o and lse. RuntimeError on a second backward.

    The weights are saved as they are. Under FSDP their memory is freed after the forward pass; in
    the backward pass FSDP gathers the block again, into the same tensors, before it calls this."""

    @staticmethod
    def forward(ctx, x, box, p, index, *weights):
        ctx.box, ctx.p, ctx.index, ctx.kept = box, p, index, []
        ctx.save_for_backward(*weights)
        return lean_forward(x, *grouped(weights), p,
                            lambda *tensors: ctx.kept.extend(keep(p, *tensors)))

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        p, (qkv, rest) = ctx.p, grouped(ctx.saved_tensors)
        x_needed, (qkv_needed, rest_needed) = ctx.needs_input_grad[0], grouped(
            ctx.needs_input_grad[4:])
        attention_needed = x_needed or any(qkv_needed)
        x, o, lse = take_kept(ctx)
        x, x_rows = (x, rows(x, p.tile)) if p.recipe.stream else whole_and_rows(x, p.tile)
        o, o_rows = whole_and_rows(o, p.tile)
        lse = lse.fetch() if p.recipe.offload else lse
        dh, dx, d_qkv = ctx.box.pop(), None, [None] * len(qkv)

        d_rest = rest_backward(x_rows, o_rows, dh, rest, attention_needed, rest_needed, p)  # (a)
        if attention_needed:
            if p.recipe.stream:
                parked = Parked(p.store, dh)
                p.store.wait_for_copies()
                dh = parked
            dk, dv = attention_backward(x, o, lse, dh, rest.wo, qkv, p)  # (b)
            dx, d_qkv = project_backward(x, o, dk, dv, dh, qkv, x_needed, qkv_needed, p)  # (c)
        p.progress(ctx.index, "backward")
        return dx, None, None, None, *d_qkv, *d_rest


def grouped(flat):
    """Autograd's Functions take a block's weights one by one."""
    n = len(QKV._fields)
    return QKV(*flat[:n]), Rest(*flat[n:])


def rest_backward(x_rows, o_rows, dh, w, dh_needed, needed, p):
    """(a) h = x + o wo^T, y = h + mlp(norm(h)): dy becomes dh in place, [s, D]. Returns the
    gradients of w, the Rest. With o held fixed, the gradient of x is dh."""
    dw = zero_sums(w, needed)
    # strict: both walks end, and with them the last use of what was parked.
    for (a, b, x_t), (_, _, o_t) in zip(x_rows, o_rows, strict=True):
        rest = lambda x, *w: add_rest(x, o_t, Rest(*w), p.config)
        dh_t = tile_backward(rest, x_t, w, dh[a:b], dh_needed, dw)
        if dh_needed:
            dh[a:b] = dh_t
    return rounded(dw, w)


def project_backward(x, dq, dk, dv, dh, w, x_needed, needed, p):
    """(c) Back through norm and projections: dx = dh + their part, in dh's memory if it is on the
    device. Returns dx or None, and the gradients of w, the QKV."""
    dw = zero_sums(w, needed)
    dx, dh_rows = whole_and_rows(dh, p.tile) if x_needed else (None, rows(dh, p.tile))
    for (a, b, x_t), (_, _, dh_t) in zip(rows(x, p.tile), dh_rows):
        project = lambda x, *w: torch.cat(qkv_heads(x, QKV(*w), p.rope[a:b], p.config), dim=1)
        dqkv = torch.cat((dq[a:b], dk[a:b], dv[a:b]), dim=1)  # [t, H + 2K, d]
        dx_t = tile_backward(project, x_t, w, dqkv, x_needed, dw)
        if x_needed:
            dx[a:b] = dh_t + dx_t
    return dx, rounded(dw, w)


# 10. What is legal --------------------------------------------------------------------------------


def check_recipe(recipe, config, C):
    """Raise BadInput unless `config` can run `recipe` on C ranks. It looks at numbers alone:
    nothing is sent, all ranks come to the same answer."""
    r, H, K, R = recipe, config.n_heads, config.n_kv_heads, recipe.ring
    refuse(R < 1 or C % R, f"ring={R} does not divide the {C} ranks that share a sequence: use"
           f" {[n for n in range(1, C + 1) if C % n == 0]}")
    refuse(r.attention not in ("plain", "ulysses", "upipe"),
           f"attention={r.attention!r} is unknown: use 'plain', 'ulysses' or 'upipe'")
    refuse(r.attention == "plain" and C > 1,
           f"attention='plain' runs on one rank, not {C}: use 'ulysses' or 'upipe'")
    refuse(r.heads_per_stage and r.attention != "upipe",
           f"heads_per_stage={r.heads_per_stage} needs attention='upipe'")
    refuse(r.checkpoint < 0,
           f"checkpoint={r.checkpoint} must be 0 (off) or the number of blocks in a segment")
    refuse(r.tile < 0, f"tile={r.tile} must be 0 (off) or a number of tokens")
    for on, name in ((r.attention == "upipe", "attention='upipe'"), (r.tile, f"tile={r.tile}"),
                     (r.offload, "offload")):
        refuse(on and not r.checkpoint,
               f"{name} needs checkpoint >= 1, not 0, the textbook's block")
    refuse(r.keep_attention and r.checkpoint != 1, "keep_attention needs checkpoint=1, not"
           f" {r.checkpoint}: longer segments run attention again")
    refuse(r.stream and not r.offload, "stream needs offload: it reads what offload has parked")
    refuse(r.kernel not in ("auto", *KERNELS),
           f"kernel={r.kernel!r} is unknown: use 'auto', {', '.join(sorted(KERNELS))}")
    P, U = C // R, r.stage_heads(config, C // R)
    ranks, stage_heads = legal_ranks(H, K), legal_stage_heads(H, K, P)
    rings = [f"ring={C // n} x {n} ranks" for n in ranks if C % n == 0]
    refuse(P not in ranks, f"{P} ranks cannot share n_heads={H}, n_kv_heads={K}: their number must"
           f" divide H, and divide K or be a multiple of it (legal: {ranks}; {C} ranks can be"
           f" {', '.join(rings)})")
    refuse(U not in stage_heads, f"heads_per_stage={U} is not possible with n_heads={H},"
           f" n_kv_heads={K} on {P} ranks: a stage takes part of the queries of one kv head per"
           f" rank, or all of several (legal: {stage_heads})")


def legal_ranks(H, K):
    """The numbers P that can share H query and K kv heads: P | H, and P | K or K | P."""
    return [P for P in range(1, H + 1) if H % P == 0 and (K % P == 0 or P % K == 0)]


def legal_stage_heads(H, K, P):
    """The legal U. A rank has H/P query heads and max(1, K/P) kv heads, each with so many readers.
    A stage's u heads are a part of one kv head's readers, or all readers of several kv heads."""
    readers, kv = min(H // K, H // P), max(1, K // P)
    whole = lambda u: u % readers == 0 and kv % (u // readers) == 0
    return [u * P for u in range(1, H // P + 1) if readers % u == 0 or whole(u)]


# 11. A ring outside -------------------------------------------------------------------------------
#
# Ulysses and UPipe end where the heads end: Llama-3-8B has 32, so no more than 32 ranks can share a
# sequence, and one head of more than 16.7M tokens is past a kernel's 2^31 indices. A ring goes on
# from there (arXiv 2310.01889; around Ulysses: arXiv 2411.01783 and 2405.07719): C = R P ranks are
# R members of P ranks. The P ranks of a member exchange heads as before: with a ring, read S/R for
# S in parts 3 to 9. The ring stands in for the kernel (attend): k and v of a stage travel from
# member to member, and each member's queries meet all of them.
#
# Balance: a causal query sees only what is before it, so members with late tokens would have most
# of the work. Cut the sequence into 2R chunks; member r takes chunk r, from the front, and chunk
# 2R - 1 - r, from the back. With c = S/2R tokens in a chunk, its work (queries x keys) is then
#     with its own k and v      one causal call: chunk r is before chunk 2R - 1 - r    2c x 2c / 2
#     with an earlier member's  all queries see that member's first chunk, none the second  2c x c
#     with a later member's     queries of the second chunk see both, of the first none     c x 2c
# which is the same on every rank in every step: 2 c^2. For R = 2:
#     member 0 has chunks 0, 3    step 0: queries 0, 3 on keys 0, 3    step 1: 3 on 1, 2
#     member 1 has chunks 1, 2            queries 1, 2 on keys 1, 2            1, 2 on 0
#
# Partial outputs merge by their log-sum-exp. Going back, with the merged lse and o each step gives
# its part of dq, dk, dv: dq adds up here, dk and dv travel with their k and v until they are home.
#
# The price: k and v make R - 1 hops for *each query stage*, so a block sends, beside the all-to-all
#     forward   2 (R - 1) P n d s           of k, v            for each of its H/U stages
#     backward  2 (R - 1) P n d s  of k, v, and 2 R P n d s of dk, dv in float32, for each stage
# Larger stages make fewer hops: heads_per_stage trades memory for traffic here.


class Ring(NamedTuple):
    """This rank's member of the ring. steps[j] = (queries, keys, Mask): which of its queries see
    which keys of member (rank - j) % size, slices of the members' tokens. steps[0] are its own
    keys, causal; from then on each of these queries sees each of these keys."""
    group: Any
    rank: int
    size: int
    steps: list


def tokens_on_rank(S, C, R=1):
    """s: the tokens of each of C ranks, S tokens and their padding; even with a ring."""
    return -(-S // C) if R == 1 else 2 * -(-S // (2 * C))


def token_spans(s, C, R, rank):
    """Where the s tokens of a rank lie in the sequence: [(start, stop), ...]. With a ring, rank
    r P + p has the p-th part of the chunks r and 2R - 1 - r, one behind the other."""
    if R == 1:
        return [(rank * s, (rank + 1) * s)]
    (r, i), c = divmod(rank, C // R), s * (C // R) // 2
    cuts = [min(max(at, 0), c) for at in (i * s, (i + 1) * s, i * s - c, (i + 1) * s - c)]
    first, last = r * c, (2 * R - 1 - r) * c
    spans = [(first + cuts[0], first + cuts[1]), (last + cuts[2], last + cuts[3])]
    return [(start, stop) for start, stop in spans if start < stop]


def token_places(s, C, R, rank):
    """The same as one position for each token, [s]."""
    return torch.cat([torch.arange(*span) for span in token_spans(s, C, R, rank)])


def ring_steps(r, R, c, mask):
    """The steps of member r, for chunks of c tokens and the Mask of the whole sequence.

    Only one document can reach from another member's keys to these queries: that of the last key.
    Queries after its end and keys before its start are cut off."""
    def before(place, member):  # how many of a member's tokens are before this place
        return sum(min(max(place - chunk * c, 0), c) for chunk in (member, 2 * R - 1 - member))

    edges, own = [0, 2 * R * c], mask
    if mask.edges is not None:
        edges = mask.edges.tolist()
        own = Mask(mask.edges.new_tensor(sorted({before(edge, r) for edge in edges})))
    steps = [(slice(0, 2 * c), slice(0, 2 * c), own)]
    for member in ((r - j) % R for j in range(1, R)):
        first, stop, last = (0, c, member) if member < r else (c, 2 * c, 2 * R - 1 - member)
        i = bisect(edges, last * c + c - 1)  # the document of the last key is edges[i - 1:i + 1]
        steps.append((slice(first, max(first, before(edges[i], r))),
                      slice(min(stop, before(edges[i - 1], member)), stop), Mask(causal=False)))
    return steps


def pass_on(tensors, received, ring):
    """Start to send tensors to the next member and receive the last one's -> what to wait for."""
    ways = ((dist.isend, tensors, 1), (dist.irecv, received, -1))
    return dist.batch_isend_irecv([
        dist.P2POp(way, x, group=ring.group, group_peer=(ring.rank + step) % ring.size)
        for way, part, step in ways for x in part])


def visitors(k, v, p):
    """Each member's k and v in the order of Ring.steps. The next are on their way, into one of two
    pairs of buffers, while the caller works on these."""
    here = k, v
    for j in range(1, p.ring.size):
        after = [stage_buffer(f"ring {name}{j % 2}", k.shape, k, p) for name in "kv"]
        works = pass_on(here, after, p.ring)
        yield here
        for work in works:
            work.wait()
        here = after
    yield here


def ring_forward(q, k, v, p):
    """flash_forward over the ring: q [S/R, u, d], k, v [S/R, n, d] -> o [S/R, u, d], lse [u, S/R].
    exp(lse) is the sum of a query's exponentials: partial outputs average with it as weight."""
    o = torch.zeros_like(q, dtype=p.rope.dtype)  # at least float32
    lse = o.new_full((q.shape[1], len(q)), -math.inf)
    for (queries, keys, mask), (k_m, v_m) in zip(p.ring.steps, visitors(k, v, p)):
        if queries.start < queries.stop and keys.start < keys.stop:
            o_m, lse_m = flash_forward(q[queries], k_m[keys], v_m[keys], p.recipe.kernel, mask)
            merged = torch.logaddexp(lse[:, queries], lse_m)
            o[queries] *= (lse[:, queries] - merged).exp().T[..., None]  # [u, t] -> [t, u, 1]
            o[queries] += o_m * (lse_m - merged).exp().T[..., None]
            lse[:, queries] = merged
    return o.to(q.dtype), lse


def ring_backward(do, q, k, v, o, lse, p):
    """dq [S/R, u, d], dk, dv [S/R, n, d] of ring_forward, rounded once."""
    dq, *dkv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    works = []
    for (queries, keys, mask), (k_m, v_m) in zip(p.ring.steps, visitors(k, v, p)):
        grads = None
        if queries.start < queries.stop and keys.start < keys.stop:
            grads = flash_backward(do[queries], q[queries], k_m[keys], v_m[keys], o[queries],
                                   lse[:, queries], p.recipe.kernel, mask)
            dq[queries] += grads[0]
        for work in works:  # what the members behind have added for this k and v is here by now
            work.wait()
        for total, grad in zip(dkv, grads[1:] if grads else ()):
            total[keys] += grad
        sent, dkv = dkv, [torch.empty_like(x) for x in dkv]
        works = pass_on(sent, dkv, p.ring)
    for work in works:
        work.wait()
    return dq.to(q.dtype), *(x.to(k.dtype) for x in dkv)
