"""UPipe from scratch: training a language model on millions of tokens, in one readable file.

A transformer's memory grows with its context. Train Llama-3-8B on one sequence of 5M tokens (5 x 2^20) and a single
[S, D] activation in bfloat16 is 40 GiB; a textbook implementation keeps more than thirty of them in each of its 32
blocks. This file removes them, one technique after another, until the step fits on eight 80 GB GPUs. Nothing is
approximated: every recipe gives the gradients of plain attention.

Symbols, used in every shape comment (small letters are one rank's part):
    S  tokens of the whole sequence      C  ranks that share it (context parallel)    s = S/C  tokens of one rank
    D  model width       L  layers       H  query heads     K  key/value heads        G = H/K  d  size of one head
    U  query heads in one stage, counted over all ranks     u = U/C  of one rank      V  vocabulary  F  MLP width
There is no batch dimension: at these lengths the batch is one sequence. Activations are [s, D], heads [S, u, d].

Contents, in the order in which the memory runs out:
    1. Config and recipe      every size and every switch, and what is legal
    2. The transformer        what a nanoGPT reader expects; the list of what autograd keeps
    3. Attention kernels      no S x S matrix: forward and backward meet through the log-sum-exp
    4. Ulysses                an all-to-all swaps "my tokens, all heads" for "all tokens, my heads"
    5. Offload                what must be kept waits in host memory
    6. Checkpointing          keep one tensor per segment of k blocks, compute the rest again
    7. Sequence tiling        whatever works token by token works on a few thousand tokens at a time
    8. UPipe                  walk the heads in stages that reuse the same buffers
    9. The lean block         all of it together, with a backward pass written by hand

Words: a *stage* is heads, a *tile* is tokens, a *segment* is blocks, a *slab* is host memory; *park* and *fetch* move
a tensor to the host and back. A gradient is called d + name (dq, dx), the log-sum-exp lse.

Not here: FSDP (one paragraph in part 2; it is torch's `fully_shard`, applied in train.py), dropout, a key/value cache,
non-causal attention, more than one sequence per call (accumulate gradients, add data-parallel ranks, or pack documents).

Read beside it: DeepSpeed Ulysses, arXiv 2309.14509; Untied Ulysses (UPipe), arXiv 2602.21196; ALST (sequence tiling),
arXiv 2506.13996; FlashAttention-2, arXiv 2307.08691; sublinear memory, arXiv 1604.06174; rematerialisation-aware
checkpointing, arXiv 2310.03294.
"""
import hashlib
import math
import weakref
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, Callable, NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

IGNORE = -100  # the label of a token that is not to be predicted

# 1. Config and recipe -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a Llama- or Qwen3-shaped model, named as in this file, not as in config.json."""
    vocab_size: int
    dim: int                       # D
    n_layers: int                  # L
    n_heads: int                   # H
    n_kv_heads: int                # K, divides H
    head_dim: int                  # d, even; H * d need not equal D
    ffn_dim: int                   # F
    rope_theta: float = 500_000.0
    rope_scaling: Optional[dict] = None  # Llama 3.1's, as in config.json; None = unscaled frequencies
    norm_eps: float = 1e-5
    qk_norm: bool = False          # RMSNorm on every query and key head (Qwen3)
    tie_embeddings: bool = False   # the head is the embedding matrix (Llama-3.2)

    def __post_init__(self):
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs (i, i + d/2)")
        kind = (self.rope_scaling or {}).get("rope_type", "llama3")
        if kind != "llama3":
            raise ValueError(f"rope_scaling type {kind!r} is not supported: use 'llama3' or no rope_scaling")


_LLAMA32 = dict(vocab_size=128256, tie_embeddings=True, rope_scaling=dict(
    rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192))
PRESETS = {
    "tiny": GPTConfig(256, 128, 4, 8, 2, 16, 384, rope_theta=10_000.0),
    "llama3.2-1b": GPTConfig(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, ffn_dim=8192, **_LLAMA32),
    "llama3.2-3b": GPTConfig(dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, head_dim=128, ffn_dim=8192, **_LLAMA32),
    "llama3-8b": GPTConfig(128256, 4096, 32, 32, 8, 128, 14336),
    "llama3-70b": GPTConfig(128256, 8192, 80, 64, 8, 128, 28672),
    "qwen3-32b": GPTConfig(151936, 5120, 64, 64, 8, 128, 25600, rope_theta=1e6, norm_eps=1e-6, qk_norm=True),
}


@dataclass(frozen=True)
class Recipe:
    """Every memory switch. `Recipe()` is the plain transformer with everything off; each switch is one part below."""
    attention: str = "plain"       # "plain" (C = 1), "ulysses" (U = H) or "upipe"
    heads_per_stage: int = 0       # U, over all ranks, for "upipe"; 0 = C, one head per rank: the least memory
    checkpoint: int = 0            # 0 = autograd keeps what it likes; k >= 1 = one tensor per segment of k blocks
    keep_attention: bool = False   # with checkpoint 1: keep attention's output too, and never run it twice
    offload: bool = False          # with checkpoint >= 1: what is kept waits on the host
    stream: bool = False           # with offload: x and dy are read from the host tile by tile in the backward pass
    tile: int = 0                  # tokens per tile in all that works token by token; 0 = the whole shard at once
    kernel: str = "auto"           # attention kernel, a name in KERNELS; "auto" = the best one for the device
    group: Any = None              # ProcessGroup of the C ranks; None = the default one, or one rank without torchrun

    def stage_heads(self, config, C):
        """U, the query heads of one stage over all C ranks."""
        return (self.heads_per_stage or C) if self.attention == "upipe" else config.n_heads

    def check(self, config, C=None):
        """Raise ValueError, naming value, rule and remedy, unless `config` can run this recipe on C ranks.

        Looks at numbers alone: no rank has communicated yet, and all come to the same answer."""
        C = C or group_size(self.group)
        H, K, U = config.n_heads, config.n_kv_heads, self.stage_heads(config, C)

        def need(ok, message):
            if not ok:
                raise ValueError(message)

        need(self.attention in ("plain", "ulysses", "upipe"),
             f"attention={self.attention!r} is unknown: use 'plain', 'ulysses' or 'upipe'")
        need(self.attention != "plain" or C == 1,
             f"attention='plain' runs on one rank, not {C}: use 'ulysses' or 'upipe'")
        need(self.heads_per_stage == 0 or self.attention == "upipe",
             f"heads_per_stage={self.heads_per_stage} needs attention='upipe', not {self.attention!r}")
        need(self.checkpoint >= 0, f"checkpoint={self.checkpoint} must be 0 (off) or the blocks per segment")
        need(self.tile >= 0, f"tile={self.tile} must be 0 (off) or a number of tokens")
        need(not self.keep_attention or self.checkpoint == 1,
             f"keep_attention needs checkpoint=1, not {self.checkpoint}: longer segments run attention again")
        need(not self.offload or self.checkpoint >= 1,
             "offload needs checkpoint >= 1: with 0 autograd keeps the tensors, and there is nothing to park")
        need(not self.stream or self.offload, "stream needs offload: it reads from the host what offload parked there")
        need(self.kernel == "auto" or self.kernel in KERNELS,
             f"kernel={self.kernel!r} is unknown: use 'auto' or one of {', '.join(sorted(KERNELS))}")
        need(H % C == 0, f"{C} ranks cannot share n_heads={H}: the ranks of a group must divide it"
                         f" (legal: {', '.join(map(str, legal_ranks(H, K)))})")
        need(C in legal_ranks(H, K),
             f"{C} ranks and n_kv_heads={K}: one must divide the other (legal: {', '.join(map(str, legal_ranks(H, K)))})")
        legal = legal_stage_heads(H, K, C)
        need(U in legal, f"heads_per_stage={U} is not possible with n_heads={H}, n_kv_heads={K} on {C} ranks:"
                         f" a stage is part of one key/value head's queries, or whole ones"
                         f" (legal: {', '.join(map(str, legal))})")


def legal_ranks(H, K):
    """The group sizes C that can share H query and K key/value heads: C divides H, and C | K or K | C."""
    return [C for C in range(1, H + 1) if H % C == 0 and (K % C == 0 or C % K == 0)]


def legal_stage_heads(H, K, C):
    """The legal U. Of its H/C query heads, G' = min(G, H/C) read one kv head of a rank's max(1, K/C); a stage takes u
    of them: u divides G', or u = n G' where n divides max(1, K/C)."""
    group, kv = min(H // K, H // C), max(1, K // C)
    return [u * C for u in range(1, H // C + 1) if group % u == 0 or (u % group == 0 and kv % (u // group) == 0)]


def group_size(group):
    """C, the ranks of a group; 1 where no process group was ever initialised."""
    return dist.get_world_size(group) if group is not None or dist.is_initialized() else 1


def shard(tokens, labels, group=None):
    """This rank's slice of one sequence: tokens, labels [S] int64 -> [s], [s], with s = ceil(S / C) on every rank.

    labels[i] is what position i must predict. The shift by one is done on the whole sequence, before this split:
    inside a shard, the first token of the next one would be lost. The end is padded with ignored labels; attention
    is causal, so that no real token sees the padding."""
    C = group_size(group)
    rank = dist.get_rank(group) if C > 1 else 0
    s = -(-len(tokens) // C)
    pad = (0, s * C - len(tokens))
    mine = slice(rank * s, (rank + 1) * s)
    return F.pad(tokens, pad)[mine], F.pad(labels, pad, value=IGNORE)[mine]


# 2. The transformer ---------------------------------------------------------------------------------------------------
#
# Norm, attention, norm, MLP, on one rank. Modules own the parameters under Hugging Face's names; the arithmetic is in
# functions of (activations, weights), because parts 7 to 9 call the same functions tile by tile and stage by stage.
# Here is what autograd keeps of one block for the backward pass, in units of s x D (llama3-8b: H d = D, K d = D/4,
# F = 3.5 D):
#     norm: input and output 2 | q, k, v and their unrotated forms 2 x 1.5 | attention's output 1 | h 1, normed 1
#     MLP: gate, up, silu(gate), their product 4 x 3.5   -> about 22, and a few more while they are being made.
# At 5M tokens s x D is 40 GiB on one rank: 22 x 40 GiB x 32 blocks = 27 TiB. Parts 3 to 9 bring that down to about 1.
#
# FSDP comes first on the road: 8 billion parameters, their gradients and AdamW's two moments in float32 are 120 GiB
# and nothing of a sequence is yet computed. `fully_shard` (train.py) leaves a rank 1/N of each, and gathers a block's
# weights just before they are used. The model below knows nothing of it. It only keeps to one rule: a weight is read
# inside the forward of the module that owns it.


def rms_norm(x, weight, eps):  # [..., D], [D] -> [..., D]; computed in at least float32, rounded once
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps).to(x.dtype)


def rotary(config, positions, dtype=torch.float32):
    """Rotary positions: cos and sin of position x frequency for `positions` [s]; returns [s, 2, d/2].

    In float64 throughout and only then rounded to `dtype`: at position 5M a float32 product is off by up to 0.3 rad.
    Computed for every pass, never stored in a buffer that could be lost when a model is built on the meta device.
    Source: RoFormer, arXiv 2104.09864, section 3.4; the scaling is Llama 3.1's (arXiv 2407.21783)."""
    d = config.head_dim
    frequency = config.rope_theta ** -(torch.arange(0, d, 2, dtype=torch.float64, device=positions.device) / d)
    if scaling := config.rope_scaling:
        # Slow dimensions (few turns in the original context) are slowed by `factor`, fast ones are left alone, and
        # those between are blended.
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


class Weights(NamedTuple):
    """One block's weights, [out, in], as plain tensors."""
    norm1: torch.Tensor             # [D]
    wq: torch.Tensor                # [H*d, D]
    wk: torch.Tensor                # [K*d, D]
    wv: torch.Tensor                # [K*d, D]
    q_norm: Optional[torch.Tensor]  # [d], or None without qk_norm
    k_norm: Optional[torch.Tensor]
    wo: torch.Tensor                # [D, H*d]
    norm2: torch.Tensor             # [D]
    gate: torch.Tensor              # [F, D]
    up: torch.Tensor                # [F, D]
    down: torch.Tensor              # [D, F]


def heads(x, rope, norm1, w, head_norm, config):
    """Project to heads: x [t, D], w [n*d, D] -> [t, n, d]; rotated if `rope` is given, normed per head by `head_norm`."""
    y = F.linear(rms_norm(x, norm1, config.norm_eps), w).unflatten(-1, (-1, config.head_dim))
    if head_norm is not None:
        y = rms_norm(y, head_norm, config.norm_eps)
    return y if rope is None else rotate(y, rope)


def mlp(h, _, norm2, gate, up, down, config):
    """h + SwiGLU(norm(h)), [t, D] -> [t, D] (arXiv 2002.05202)."""
    n = rms_norm(h, norm2, config.norm_eps)
    return h + F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down)


def logits(x, _, norm, head, config):  # [t, D] -> [t, V], in at least float32: the softmax is next
    y = F.linear(rms_norm(x, norm, config.norm_eps), head)
    return y.to(torch.promote_types(y.dtype, torch.float32))


def token_losses(x, labels, norm, head, config):  # [t, D], [t] -> [t]; 0 where the label is ignored
    return F.cross_entropy(logits(x, None, norm, head, config), labels, ignore_index=IGNORE, reduction="none")


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.q_proj = nn.Linear(c.dim, c.n_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.dim, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim) if c.qk_norm else None
        self.k_norm = nn.RMSNorm(c.head_dim) if c.qk_norm else None


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.up_proj = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.down_proj = nn.Linear(c.ffn_dim, c.dim, bias=False)


class Block(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.index = index
        self.input_layernorm = nn.RMSNorm(c.dim)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.dim)
        self.mlp = MLP(c)

    def weights(self):
        a, m = self.self_attn, self.mlp
        q_norm, k_norm = (a.q_norm.weight, a.k_norm.weight) if a.q_norm is not None else (None, None)
        return Weights(self.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, q_norm, k_norm,
                       a.o_proj.weight, self.post_attention_layernorm.weight,
                       m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight)

    def forward(self, x, p):  # [s, D] -> [s, D]
        w = self.weights()
        with record_function(f"block {self.index}"):
            if p.recipe.checkpoint:
                y = LeanBlock.apply(x, p, self.index, *w) if torch.is_grad_enabled() else lean_forward(x, p, w)[0]
            else:
                attend = UPipeAttention.apply if p.recipe.attention == "upipe" else ulysses_attention
                h = x + F.linear(attend(x, p, *w[:6]), w.wo)
                y = tiled(mlp, p, h, None, *w[-4:])
        p.progress(self.index, "forward")
        return y


class Table(nn.Module):
    """A [V, D] matrix. Both ends of the model use one, tied models the same one twice."""

    def __init__(self, V, D):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(V, D))

    def forward(self, x, head=None):
        """x [s] int64: look its rows up -> [s, D]. With `head`: call head(x, weight), here, where FSDP has the weight."""
        return F.embedding(x, self.weight) if head is None else head(x, self.weight)


@dataclass
class Pass:
    """One forward pass and the backward pass that follows: all that a block must know beside x and its weights."""
    config: GPTConfig
    recipe: Recipe
    C: int                      # ranks in the group
    s: int                      # tokens of this rank; S = C s
    rope: torch.Tensor          # [s, 2, d/2]
    docs: Optional["Documents"]
    buffers: "StageBuffers"
    store: "HostStore"
    progress: Callable          # called as progress(layer index, "forward", "again" or "backward")
    last: Callable = lambda: None  # weak reference to what was kept last: the next to be fetched (part 6)

    @property
    def tile(self):
        return self.recipe.tile or self.s


class GPT(nn.Module):
    """A Llama/Qwen3-shaped causal language model. `seed` fixes the initial weights; on the meta device there are none
    to set, and init_weights(seed) does it after `to_empty`."""

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        self.embed_tokens = Table(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim)
        if not config.tie_embeddings:
            self.lm_head = Table(config.vocab_size, config.dim)
        self.stage_buffers = StageBuffers()
        self.store = HostStore()
        self.progress = lambda layer, direction: None
        if not self.embed_tokens.weight.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed=0):
        """Normal(0, 0.02), norms 1; what a block adds to the residual stream is scaled down by sqrt(2 L) (GPT-2).

        A parameter depends on (seed, its name) alone, whatever the number of ranks: each rank draws the whole of it and
        keeps its shard (one matrix at a time)."""
        for name, p in self.named_parameters():
            if p.dim() == 1:
                p.fill_(1)
                continue
            std = 0.02 / math.sqrt(2 * self.config.n_layers) if "o_proj" in name or "down_proj" in name else 0.02
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator(p.device).manual_seed(int.from_bytes(digest[:7], "big"))
            whole = torch.empty(p.shape, device=p.device, dtype=p.dtype).normal_(0, std, generator=generator)
            if hasattr(p, "device_mesh"):  # a DTensor, if FSDP came first: cut the shard out, send nothing
                whole = dist.tensor.distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
            p.copy_(whole)

    def forward(self, tokens, labels, recipe, total=None, docs=None):
        """This rank's share of the loss (a scalar): the sum of its token losses over `total`.

        tokens, labels: int64 [s], this rank's slice (see `shard`); label -100 is ignored. total: by default the number
        of labels that count in the whole sequence; added over the ranks of the group, the shares are then the mean.
        docs: int64, where each document starts in the whole sequence, the same on every rank; None = one document.
        Raises ValueError for a recipe the model cannot run, before any communication."""
        if tokens.shape != labels.shape:
            raise ValueError(f"tokens {tuple(tokens.shape)} and labels {tuple(labels.shape)} must have the same length")
        p = self._start(tokens, recipe, docs)
        if total is None:
            total = (labels != IGNORE).sum()
            if p.C > 1:
                dist.all_reduce(total, group=recipe.group)
            total = total.clamp(min=1)  # no label anywhere: loss 0, gradients 0
        # The logits of a tile take V numbers per token where the MLP takes F: make that tile as much shorter.
        tile = min(p.tile, max(1, p.tile * self.config.ffn_dim // self.config.vocab_size))
        head = lambda x, weight: tiled(token_losses, p, x, labels, self.norm.weight, weight, tile=tile)
        return self._head(self._trunk(tokens, p), head).sum() / total

    def logits(self, tokens, recipe, docs=None):
        """[s, V] in at least float32, from tokens [s]. With FSDP: register_fsdp_forward_method(model, "logits")."""
        p = self._start(tokens, recipe, docs)
        head = lambda x, weight: tiled(logits, p, x, None, self.norm.weight, weight)
        return self._head(self._trunk(tokens, p), head)

    def _head(self, x, head):
        return (self.embed_tokens if self.config.tie_embeddings else self.lm_head)(x, head)

    def _trunk(self, tokens, p):  # [s] -> [s, D]
        x = self.embed_tokens(tokens)
        k = 0 if p.recipe.keep_attention or not torch.is_grad_enabled() else p.recipe.checkpoint
        for i in range(0, len(self.layers), k or 1):
            x = Segment.apply(x, p, self.layers[i:i + k]) if k else self.layers[i](x, p)
        return x

    def _start(self, tokens, recipe, docs):
        if tokens.dim() != 1 or len(tokens) == 0:
            raise ValueError(f"tokens must be one sequence [s] of at least one token, not {tuple(tokens.shape)}")
        C, s = group_size(recipe.group), len(tokens)
        recipe.check(self.config, C)
        positions = torch.arange(s, device=tokens.device) + s * (dist.get_rank(recipe.group) if C > 1 else 0)
        if docs is not None:
            docs = Documents(docs, C * s)
            positions = docs.restart(positions)
        rope = rotary(self.config, positions, torch.promote_types(self.norm.weight.dtype, torch.float32))
        return Pass(self.config, recipe, C, s, rope, docs, self.stage_buffers, self.store, self.progress)


# 3. Attention kernels -------------------------------------------------------------------------------------------------
#
# Scores of one head at S = 5M are S x S: 50 TiB in bfloat16. A flash kernel never stores them. Forward, it walks the keys
# in small blocks with a running softmax and returns, beside the output, one number per query: the log-sum-exp of its
# scores, lse. That number is all the backward pass needs, because a probability is then p = exp(score - lse), computed
# again block by block:
#     dv = p^T do      dp = do v^T      ds = p (dp - rowsum(do o))      dq = ds k      dk = ds^T q
# (FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.) The kernels are not ours to write. What is ours is to hand
# them what they can take: contiguous tensors, since a strided do has given wrong gradients in silence, and fewer than
# 2^31 elements, since some of their offsets are 32 bits wide (flash-attention issues 767, 1841, 2611).


class Kernel(NamedTuple):
    """An attention kernel as a pair. All tensors contiguous: q, o [S, u, d], k, v [S, n, d], n divides u, lse [u, S].

    edges is None, or documents [0, ..., S] as an int32 tensor: the form in which kernels take several sequences."""
    forward: Callable   # (q, k, v, edges) -> o, lse
    backward: Callable  # (do, q, k, v, o, lse, edges) -> dq, dk, dv
    workspace: Callable = lambda S, u, n, d: 0  # bytes that its backward allocates beside its outputs


class Documents:
    """Several documents in one sequence: `starts` (int64, ascending, the first is 0) in a sequence of S tokens."""

    def __init__(self, starts, S):
        self.starts = torch.as_tensor(starts, dtype=torch.int64)
        if len(self.starts) == 0 or self.starts[0] != 0 or (self.starts.diff() <= 0).any() or self.starts[-1] >= S:
            raise ValueError(f"docs={self.starts.tolist()[:8]} must be the starts of the documents:"
                             f" ascending from 0, each below the sequence length {S}")
        self.edges = F.pad(self.starts, (0, 1), value=S).to(torch.int32)

    def restart(self, positions):  # position in the sequence -> position in its document
        starts = self.starts.to(positions.device)
        return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


def by_document(kernel):
    """Teach a kernel that knows one sequence to work through documents, one after the other."""
    def forward(q, k, v, edges):
        if edges is None:
            return kernel.forward(q, k, v, None)
        parts = [kernel.forward(q[a:b], k[a:b], v[a:b], None) for a, b in spans(edges)]
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)

    def backward(do, q, k, v, o, lse, edges):
        if edges is None:
            return kernel.backward(do, q, k, v, o, lse, None)
        parts = [kernel.backward(do[a:b], q[a:b], k[a:b], v[a:b], o[a:b], lse[:, a:b], None) for a, b in spans(edges)]
        return tuple(torch.cat(grads) for grads in zip(*parts))

    return kernel._replace(forward=forward, backward=backward)


def spans(edges):
    edges = edges.tolist()
    return zip(edges, edges[1:])


def _batched(x, n):  # [S, u, d] -> [n, u/n, S, d], a view: aten's layout, with the kv heads as the batch
    return x.unflatten(1, (n, -1)).permute(1, 2, 0, 3)


def _packed(x):  # and back; contiguous at no cost when n = 1, as in UPipe with small stages
    return x.permute(2, 0, 1, 3).flatten(1, 2).contiguous()


def _aten_pair(forward, backward):
    """A kernel from aten's [batch, heads, S, d] form, where every query head wants a kv head of its own: a view that
    repeats it, and a sum over the repetitions of its gradient."""
    def fwd(q, k, v, edges):
        n = k.shape[1]
        q, k, v = (_batched(x, n) for x in (q, k, v))
        o, lse = forward(q, k.expand_as(q), v.expand_as(q))[:2]
        return _packed(o), lse.flatten(0, 1)

    def bwd(do, q, k, v, o, lse, edges):
        n = k.shape[1]
        do, q, k, v, o = (_batched(x, n) for x in (do, q, k, v, o))
        dq, dk, dv = backward(do, q, k.expand_as(q), v.expand_as(q), o, lse.unflatten(0, (n, -1)))[:3]
        if q.shape[1] > 1:
            dk, dv = dk.sum(1, keepdim=True), dv.sum(1, keepdim=True)
        return _packed(dq), _packed(dk), _packed(dv)

    return by_document(Kernel(fwd, bwd))


aten = torch.ops.aten
_cpu = _aten_pair(lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True),
                  lambda *args: aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, 0.0, True))


def _torch_forward(q, k, v, edges):
    one = (lambda x: x[None]) if edges is None else (lambda x: x)  # several documents come packed, without a batch
    S = len(q)
    o, lse = aten._flash_attention_forward(one(q), one(k), one(v), edges, edges, S, S, 0.0, True, False)[:2]
    return o.view_as(q), lse.view(q.shape[1], S)


def _torch_backward(do, q, k, v, o, lse, edges):
    one = (lambda x: x[None]) if edges is None else (lambda x: x)
    S, seed = len(q), torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout is off: the seed is never read
    lse = one(lse) if edges is None else lse
    grads = aten._flash_attention_backward(one(do), one(q), one(k), one(v), one(o), lse, edges, edges, S, S, 0.0, True,
                                           seed, seed)
    return tuple(g.view_as(x) for g, x in zip(grads, (q, k, v)))


def _flash_attn_forward(q, k, v, edges):
    from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_forward
    tail = dict(dropout_p=0.0, softmax_scale=q.shape[-1] ** -0.5, causal=True)
    if edges is None:
        o, lse = _flash_attn_forward(q[None], k[None], v[None], window_size_left=-1, window_size_right=-1, softcap=0.0,
                                     alibi_slopes=None, return_softmax=False, **tail)[:2]
    else:
        o, lse = _flash_attn_varlen_forward(q, k, v, edges, edges, len(q), len(q), **tail)[:2]
    return o.view_as(q), lse.view(q.shape[1], len(q))


def _flash_attn_backward(do, q, k, v, o, lse, edges):
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_varlen_backward
    grads = [torch.empty_like(x) for x in (q, k, v)]
    tail = dict(dropout_p=0.0, softmax_scale=q.shape[-1] ** -0.5, causal=True, window_size_left=-1, window_size_right=-1,
                softcap=0.0, alibi_slopes=None, deterministic=False)
    if edges is None:
        _flash_attn_backward(*(x[None] for x in (do, q, k, v, o, lse, *grads)), **tail)
    else:
        _flash_attn_varlen_backward(do, q, k, v, o, lse, *grads, edges, edges, len(q), len(q), **tail)
    return tuple(grads)


# FlashAttention-2's backward: dq adds up in float32, one more float32 per query for rowsum(do o), and with grouped
# heads dk and dv of every query head before they are summed (bfloat16).
_fa2_workspace = lambda S, u, n, d: 4 * S * u * (d + 1) + (2 * 2 * S * u * d if n < u else 0)
KERNELS = {
    "cpu": _cpu,
    "torch": Kernel(_torch_forward, _torch_backward, _fa2_workspace),
    "flash-attn": Kernel(_flash_attn_forward, _flash_attn_backward, _fa2_workspace),
    # For float32 on CUDA (cards without bfloat16): no flash kernel takes it.
    "efficient": _aten_pair(
        lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True),
        lambda do, q, k, v, o, lse: aten._scaled_dot_product_efficient_attention_backward(
            do, q, k, v, None, o, lse, *torch.zeros(2, dtype=torch.int64, device=q.device), 0.0, [True] * 3 + [False],
            True)),
}


def pick_kernel(name, device, dtype):
    """The Kernel called `name`; "auto" takes the CPU's on a CPU, on CUDA flash-attn where it is installed."""
    if name == "auto":
        if device.type == "cpu":
            name = "cpu"
        elif dtype not in (torch.bfloat16, torch.float16):
            name = "efficient"
        else:
            try:
                import flash_attn  # noqa: F401
                name = "flash-attn"
            except ImportError:
                name = "torch"
    if device.type == "cpu" and name in ("torch", "flash-attn", "efficient"):
        raise ValueError(f"kernel={name!r} needs a CUDA device: use kernel='auto' or 'cpu' on a CPU")
    return KERNELS[name]


def flash_forward(q, k, v, kernel="auto", docs=None):
    """Causal attention, q [S, u, d], k, v [S, n, d] -> o [S, u, d], lse [u, S] (float32; float64 for float64).

    Query head i reads kv head i // (u/n). Raises ValueError for 2^31 elements or more."""
    _fits(q)
    edges = None if docs is None else docs.edges.to(q.device)
    return pick_kernel(kernel, q.device, q.dtype).forward(q.contiguous(), k.contiguous(), v.contiguous(), edges)


def flash_backward(do, q, k, v, o, lse, kernel="auto", docs=None):
    """The gradients dq [S, u, d], dk, dv [S, n, d] of flash_forward, from do, its inputs and its outputs."""
    _fits(q)
    edges = None if docs is None else docs.edges.to(q.device)
    do, q, k, v, o = (x.contiguous() for x in (do, q, k, v, o))
    return pick_kernel(kernel, q.device, q.dtype).backward(do, q, k, v, o, lse, edges)


def _fits(q):
    if q.numel() >= 2**31:
        raise ValueError(f"attention over {q.shape[0]} tokens x {q.shape[1]} heads x {q.shape[2]} = {q.numel()} elements"
                         f" in one call: kernels index with 32 bits, below 2^31: use attention='upipe' with fewer heads"
                         f" per stage")


class FlashAttention(torch.autograd.Function):
    """The kernel pair as autograd knows it: keeps q, k, v, o and lse."""

    @staticmethod
    def forward(ctx, q, k, v, p):
        o, lse = flash_forward(q, k, v, p.recipe.kernel, p.docs)
        ctx.p = p
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        return *flash_backward(do, q, k, v, o, lse, ctx.p.recipe.kernel, ctx.p.docs), None


# 4. Ulysses -----------------------------------------------------------------------------------------------------------
#
# Split the sequence: rank r owns tokens r*s .. (r+1)*s - 1. Norms, projections and the MLP never look at a neighbour;
# attention does. Ulysses gives each rank *all* tokens of H/C heads for the time of the attention, by one all-to-all:
#
#               heads 0-3   heads 4-7                        heads 0-3 | heads 4-7
#     tokens 0  ---- rank 0 ----            all-to-all        rank 0   |  rank 1     tokens 0
#     tokens 1  ---- rank 1 ----             <------>         rank 0   |  rank 1     tokens 1
#
# No transposing copy on arrival: the send buffer is laid out [C, s, u, d], destination first. Rank r's part of it
# lands on rank r as [C, s, u, d], source first; and because sources own consecutive tokens, that *is* [S, u, d]. The
# way back is the same call, so each direction is the other's gradient.
#
# With grouped queries there are only K kv heads. If K >= C each rank gets K/C of them. If K < C, C/K ranks share a
# head: each gets a replica, and the replicas' gradients are summed on the way home.
#
# Activations fall by C: 27 TiB to 3.4 TiB a rank at C = 8. What does not fit: everything, still. On to part 5.


def all_to_all(x, group=None, out=None):
    """x [C, s, u, d] contiguous, destination rank first -> the same shape, source rank first. Sends (C-1)/C of it."""
    if group_size(group) == 1:
        return x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    assert x.is_contiguous() and out.is_contiguous(), "gloo writes into a strided output without a complaint"
    dist.all_to_all_single(out, x, group=group)
    return out


class AllToAll(torch.autograd.Function):
    """Its own gradient: what was sent from r to q comes back from q to r."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_to_all(x.contiguous(), group)

    @staticmethod
    def backward(ctx, dy):
        return all_to_all(dy.contiguous(), ctx.group), None


def seq_to_heads(x, group=None):
    """From "my tokens, all heads" to "all tokens, my heads": [C, s, u, d] (destination first) -> [S, u, d] in order.

    Differentiable; the gradient is heads_to_seq. Raises ValueError unless x.shape[0] is the group's size.
    Source: DeepSpeed Ulysses, arXiv 2309.14509, section 3."""
    if x.shape[0] != group_size(group):
        raise ValueError(f"seq_to_heads: x.shape[0]={x.shape[0]} must be the group's size, {group_size(group)}")
    return AllToAll.apply(x, group).flatten(0, 1)


def heads_to_seq(x, group=None):
    """The way back: [S, u, d] -> [C, s, u, d], rank r's heads of my tokens at index r. Raises ValueError if C does not
    divide S."""
    if x.shape[0] % group_size(group):
        raise ValueError(f"heads_to_seq: {x.shape[0]} tokens do not divide among {group_size(group)} ranks: pad them")
    return AllToAll.apply(x.unflatten(0, (group_size(group), -1)), group)


def by_rank(x, C):
    """Sort heads by the rank that works on them: [t, H, d] -> [t, C, H/C, d], and kv heads, if fewer than the ranks,
    with a replica for each: [t, K, d] -> [t, C, max(1, K/C), d]. Views, but for the replicas."""
    n = x.shape[1]
    return x.unflatten(1, (C, -1)) if n >= C else x[:, :, None].repeat_interleave(C // n, dim=1)


def ulysses_attention(x, p, norm1, wq, wk, wv, q_norm, k_norm):
    """Attention by autograd: x [s, D] -> [s, H*d]. All heads at once; with C = 1 it is the textbook's."""
    q = tiled(heads, p, x, p.rope, norm1, wq, q_norm)  # [s, D] -> [s, H, d]
    k = tiled(heads, p, x, p.rope, norm1, wk, k_norm)  # [s, D] -> [s, K, d]
    v = tiled(heads, p, x, None, norm1, wv, None)
    q, k, v = (seq_to_heads(by_rank(y, p.C).transpose(0, 1), p.recipe.group) for y in (q, k, v))  # -> [S, H/C, d]
    o = FlashAttention.apply(q, k, v, p)
    return heads_to_seq(o, p.recipe.group).transpose(0, 1).flatten(1)  # [S, H/C, d] -> [C, s, H/C, d] -> [s, H*d]


# 5. Offload -----------------------------------------------------------------------------------------------------------
#
# Whatever must be kept from the forward to the backward pass is not needed in between, and a host has 2 TB. So it is
# *parked* in host memory and *fetched* just in time. A transfer hides behind computation only from pinned memory and on
# a stream of its own. Two traps:
#   - torch's pinned allocator rounds up to a power of two: 5 GiB pin 8. Slabs here are plain memory of the exact size,
#     registered with CUDA.
#   - a tensor that is still being copied must not be freed, nor a slab be filled again while it is being read. The first
#     is what record_stream says; the second cannot happen as all copies queue on one stream.


class HostStore:
    """Host memory for parked tensors. Slabs go back to a free list when their tensor dies, whether it was fetched, its
    graph was dropped without a backward pass, or an exception took it: nothing has to be called between steps."""

    def __init__(self):
        self.free = defaultdict(list)  # bytes -> slabs of that size that nobody uses
        self.bytes = 0                 # parked now
        self.slab_bytes = 0            # parked and free slabs together: what the host really holds
        self.stream = None             # the copy stream, on CUDA

    def park(self, x):
        """Copy x (any shape, contiguous) to the host; the Parked that comes back brings it home again."""
        return Parked(self, x)

    def take(self, size):
        """A slab of exactly `size` bytes."""
        if not self.free[size]:
            self.free.clear()  # a new size is a new shape of work: slabs that wait for the old one would be leaked
            self.slab_bytes += size
            slab = torch.empty(size, dtype=torch.uint8, device="cpu")
            weakref.finalize(slab.untyped_storage(), self._forget, size)
            if self.stream is not None:
                _register(slab)
            return slab
        return self.free[size].pop()

    def _forget(self, size):
        self.slab_bytes -= size


def _register(slab):
    """Pin a slab, at its exact size."""
    runtime, address = torch.cuda.cudart(), slab.data_ptr()
    status = runtime.cudaHostRegister(address, slab.numel(), 0)
    if int(status) != 0:
        raise RuntimeError(f"cannot pin {slab.numel() / 2**30:.1f} GiB of host memory (cudaHostRegister: {status}): raise"
                           f" `ulimit -l`, or keep less (checkpoint k > 1 instead of keep_attention)")
    weakref.finalize(slab.untyped_storage(), runtime.cudaHostUnregister, address)


class Parked:
    """One tensor on the host. len() and shape are the tensor's; fetch() brings all of it, rows(a, b) a part."""

    def __init__(self, store, x):
        assert x.is_contiguous(), f"parking a strided tensor: {tuple(x.shape)}, strides {x.stride()}"
        if x.is_cuda and store.stream is None:
            store.stream = torch.cuda.Stream(x.device)
        self.store, self.device, self.shape = store, x.device, x.shape
        self.slab = store.take(x.nbytes)
        store.bytes += x.nbytes
        self.host = self.slab.view(x.dtype).view(x.shape)
        self.ahead = None  # (first rows on the device, event) of a prefetch that is under way
        if x.is_cuda:
            store.stream.wait_stream(torch.cuda.current_stream())  # x must be computed before it is copied
            with torch.cuda.stream(store.stream):
                self.host.copy_(x, non_blocking=True)
            x.record_stream(store.stream)                          # and must not be freed before it is copied
        else:
            self.host.copy_(x)

    def __len__(self):
        return len(self.host)

    def _copy(self, a, b):
        """Start to bring rows a to b -> (device tensor, event that says when it is there)."""
        if a == 0 and self.ahead and len(self.ahead[0]) == b:
            ahead, self.ahead = self.ahead, None
            return ahead
        if self.device.type != "cuda":
            return self.host[a:b].clone(), None
        stream = self.store.stream
        out = torch.empty(self.host[a:b].shape, dtype=self.host.dtype, device=self.device)
        stream.wait_stream(torch.cuda.current_stream())  # earlier work may still be reading what this memory held
        with torch.cuda.stream(stream):
            out.copy_(self.host[a:b], non_blocking=True)
        out.record_stream(stream)
        return out, stream.record_event()

    def prefetch(self, tile):
        """Start to bring the first tile, so that whoever walks or fetches x next finds it there."""
        self.ahead = self.ahead or self._copy(0, min(tile, len(self)))

    def fetch(self):
        """The whole tensor, on its device."""
        return _arrived(*self._copy(0, len(self)))

    def __del__(self):
        slab = self.__dict__.get("slab")
        if slab is not None:
            self.store.bytes -= slab.numel()
            self.store.free[slab.numel()].append(slab)


def _arrived(x, event):
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
    return x


def rows(x, tile):
    """Walk x, a tensor or a Parked, in tiles: yields (a, b, x[a:b]). From the host, the next tile is on its way already."""
    ahead = None
    for a in range(0, len(x), tile):
        b = min(a + tile, len(x))
        if not isinstance(x, Parked):
            yield a, b, x[a:b]
            continue
        here = ahead or x._copy(a, b)
        ahead = x._copy(b, min(b + tile, len(x))) if b < len(x) else None
        yield a, b, _arrived(*here)


def land(x, tile):
    """The device tensor that x becomes, and a walk like rows() that fills it as the tiles arrive (or just walks it)."""
    if not isinstance(x, Parked):
        return x, rows(x, tile)
    whole = torch.empty(x.shape, dtype=x.host.dtype, device=x.device)

    def walk():
        for a, b, x_t in rows(x, tile):
            whole[a:b] = x_t
            yield a, b, x_t

    return whole, walk()


class Kept(list):
    """What one block or segment keeps for its backward pass: tensors, or Parked ones with `offload`.

    `before` is what was kept just before it, hence what the backward pass wants next. (A list, since that can be weakly
    referenced: a chain of strong references would keep dropped graphs alive.)"""

    def __init__(self, p, *tensors):
        super().__init__(p.store.park(x) if p.recipe.offload else x for x in tensors)
        self.before, p.last = p.last, weakref.ref(self)

    def take(self):
        """Hand the tensors over, once."""
        if not self:
            raise RuntimeError("this step's backward pass has run already, and what it needed is gone: run the forward"
                               " pass again (retain_graph=True does not help)")
        kept = list(self)
        self.clear()
        return kept

    def prefetch_before(self, tile):
        for x in self.before() or ():
            if isinstance(x, Parked):
                x.prefetch(tile)


def fetch(x):
    return x.fetch() if isinstance(x, Parked) else x


def release(x):
    """Give x's memory back while x itself lives on; `restore` gets (other) memory for it again."""
    x.untyped_storage().resize_(0)


def restore(x):
    x.untyped_storage().resize_(x.numel() * x.element_size())


# 6. Checkpointing -----------------------------------------------------------------------------------------------------
#
# Of 22 s D per block one must be kept: the block's input. The rest is computed again in the backward pass, for one more
# forward pass of arithmetic (arXiv 1604.06174, where the optimum is O(sqrt(L))). In its simplest form:
#
#     def forward(ctx, x, block):                 def backward(ctx, dy):
#         ctx.x, ctx.block = x, block                 x = ctx.x.detach().requires_grad_()
#         return block(x)                             torch.autograd.backward(ctx.block(x), dy)   # weights' .grad, too
#                                                     return x.grad, None
#
# `Segment` is that for k blocks in a row, with the details that make it lean. Inside a segment, while it is run again, the
# blocks keep their input and attention output (part 9), so nothing is computed a third time. That is two levels: L/k
# inputs wait for their segment, and 2k tensors for the blocks of the one at work. L = 32, k = 4: 16 tensors, not 32.


class Segment(torch.autograd.Function):
    """k blocks of which one tensor, the input, is kept. x [s, D] -> [s, D]."""

    @staticmethod
    def forward(ctx, x, p, blocks):
        ctx.p, ctx.blocks = p, blocks
        ctx.kept = Kept(p, x)
        for block in blocks:  # autograd is off in here: the blocks keep nothing
            x = block(x, p)
        return x

    @staticmethod
    def backward(ctx, dy):
        p, offload = ctx.p, ctx.p.recipe.offload
        (kept,) = ctx.kept.take()
        x = fetch(kept).detach().requires_grad_()
        del kept
        # From here the blocks' own backward pass may write into dy, and with `stream` dy waits on the host meanwhile.
        dy = dy if is_ours(dy) else ours(dy.clone(memory_format=torch.contiguous_format))
        aside = p.store.park(dy) if p.recipe.stream else None
        if aside is not None:
            release(dy)
        again = replace(p, recipe=replace(p.recipe, checkpoint=1, keep_attention=True), last=lambda: None,
                        progress=lambda i, way: p.progress(i, "again" if way == "forward" else way))
        with torch.enable_grad():
            y = x
            for block in ctx.blocks:
                y = block(y, again)
        # The graph is all that is wanted of y and x: their values are kept by the blocks or needed no more.
        edge = get_gradient_edge(y)
        del y
        if offload:
            release(x)
        if aside is not None:
            restore(dy)
            dy.copy_(aside.fetch())
            del aside
        torch.autograd.backward((edge,), (dy,))
        ctx.kept.prefetch_before(p.s)
        return ours(x.grad), None, None


def ours(dx):
    """Mark a gradient that a Function of this file made and handed to autograd, which drops it when it was used: the
    block before may write into it. (If you catch one in a hook, copy it to keep it.)"""
    dx.made_by_upipe = True
    return dx


def is_ours(dy):
    return getattr(dy, "made_by_upipe", False)


# 7. Sequence tiling ---------------------------------------------------------------------------------------------------
#
# The head is the smallest complete example: [s, V] float32 logits at 5M on 8 ranks would be 313 GiB. But a token's loss
# needs that token's logits only. So take a tile of tokens, compute logits and losses, drop the logits; in the backward
# pass compute them again, tile by tile, and get the gradients of the tile by ordinary autograd. The same holds for
# every function of one token: norms, projections, MLP (ALST, arXiv 2506.13996, section 3).
#
# One care: a weight's gradient is the sum over all tiles. Rounding that sum to bfloat16 after each tile costs digits with
# every one, so it adds up in float32, and goes to autograd once: FSDP counts on one gradient per backward pass.


class Tiled(torch.autograd.Function):
    """fn(x_tile, extra_tile, *weights, config) over tiles; keeps x, not what fn computes on its way."""

    @staticmethod
    def forward(ctx, fn, config, tile, x, extra, *weights):
        ctx.fn, ctx.config, ctx.tile = fn, config, tile
        ctx.save_for_backward(x, extra, *weights)
        y = None
        for a, b, x_t in rows(x, tile):
            y_t = fn(x_t, cut(extra, a, b), *weights, config)
            y = y_t.new_empty(len(x), *y_t.shape[1:]) if y is None else y
            y[a:b] = y_t
        return y

    @staticmethod
    def backward(ctx, dy):
        x, extra, *weights = ctx.saved_tensors
        dx, dw = torch.empty_like(x), WeightGrads(weights)
        for a, b, x_t in rows(x, ctx.tile):
            fn = lambda x_t, *w: ctx.fn(x_t, cut(extra, a, b), *w, ctx.config)
            dx[a:b], *grads = tile_grads(fn, (x_t, *weights), dy[a:b])
            dw.add(grads)
        return None, None, None, ours(dx), None, *dw.done()


def tiled(fn, p, x, extra, *weights, tile=None):
    """fn(x, extra, *weights, config), tile by tile if the recipe says so. x, extra: [s, ...]; extra may be None."""
    if p.recipe.tile == 0:
        return fn(x, extra, *weights, p.config)
    return Tiled.apply(fn, p.config, tile or p.tile, x, extra, *weights)


def cut(x, a, b):
    return None if x is None else x[a:b]


def tile_grads(fn, inputs, dy):
    """The gradients of fn(*inputs) for every input (None for None), by autograd on one tile."""
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        grads = iter(torch.autograd.grad(fn(*leaves), [x for x in leaves if x is not None], dy))
    return [None if x is None else next(grads) for x in leaves]


class WeightGrads:
    """Sums of weight gradients over tiles, in float32 (float64 for float64 weights)."""

    def __init__(self, weights):
        self.weights = weights
        self.sums = [w if w is None else torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
                     for w in weights]

    def add(self, grads):
        for total, grad in zip(self.sums, grads):
            if total is not None:
                total += grad

    def done(self):
        return [w if w is None else total.to(w.dtype) for w, total in zip(self.weights, self.sums)]


# 8. UPipe -------------------------------------------------------------------------------------------------------------
#
# What is left is attention. Ulysses holds q, k, v, the output and all their gradients for its H/C heads at once: at 5M,
# llama3-8b on 8 ranks, each is 5 GiB, and inside the backward kernel there are about ten. But heads know nothing of each
# other. UPipe ("Untied Ulysses", arXiv 2602.21196) takes U of them at a time, a *stage*: project, all-to-all, attend,
# all-to-all, and the next stage writes over the same buffers. With U = C a rank works on one head: 1.25 GiB where it
# was 5, and no term of the working set grows with H. The arithmetic and the traffic are those of Ulysses, which is U = H
# in this code.
#
# Grouped queries fix the order. Rank r owns query heads r*H/C .. and their kv heads. It loads kv heads once, walks the
# query heads that read them, adds up dk and dv on the way, and sends them home once. The heads of one stage are therefore
# not neighbours in wq: each rank contributes its own next one. Query head i reads kv head i // G, always. (The paper's
# code pairs query and kv heads by their place in the stage, which trains from scratch but not from released weights.)


def stages(H, K, C, U):
    """The schedule of one rank: [(kv heads to load, [query heads of a stage, ...]), ...], as slices of the rank's own
    heads. Rank r's query head i is r*H/C + i in the model; its kv head j is r*K/C + j, or r*K//C if K < C.

    >>> stages(H=8, K=2, C=2, U=4)  # each rank: one kv head, four query heads, two at a time
    [(slice(0, 1), [slice(0, 2), slice(2, 4)])]
    """
    u, kv = U // C, max(1, K // C)             # query heads of a stage, kv heads of a rank
    group = H // C // kv                       # G', query heads of this rank that read one kv head
    n = max(1, u // group)                     # kv heads of a load
    return [(slice(j, j + n), [slice(i, i + u) for i in range(j * group, (j + n) * group, u)])
            for j in range(0, kv, n)]


class StageBuffers:
    """The send and receive buffers of a stage, one flat allocation for each role: "send", and what arrives, "q", "k",
    "v", "o", "do". Every stage of every layer gets the same memory: what you take is written over by the next stage."""

    def __init__(self):
        self.flat = {}

    def take(self, role, shape, like):
        """A contiguous [*shape] view of the role's memory, of the dtype and device of `like`; contents undefined."""
        size, flat = math.prod(shape), self.flat.pop(role, None)
        if flat is None or flat.numel() < size or flat.dtype != like.dtype or flat.device != like.device:
            flat = None  # freed first, so that old and new are never there together
            flat = torch.empty(size, dtype=like.dtype, device=like.device)
        self.flat[role] = flat
        return flat[:size].view(shape)


def exchange(role, heads, parts, p, like):
    """Fill the send buffer and run the all-to-all: parts yields (a, b, [t, C, heads, d]) -> [S, heads, d] in buffer `role`.

    Where rows leave in the order of the destination is where the copy happens; on arrival there is none (part 4)."""
    shape = (p.C, p.s, heads, p.config.head_dim)
    send = p.buffers.take("send" if p.C > 1 else role, shape, like)  # alone, a rank sends to itself: skip the copy
    for a, b, part in parts:
        send[:, a:b] = part.transpose(0, 1)
    out = p.buffers.take(role, shape, like) if p.C > 1 else send
    with record_function("all-to-all"):
        return all_to_all(send, p.recipe.group, out).flatten(0, 1)


def send_home(x, p):
    """[S, heads, d], a kernel's output -> [s, C, heads, d]: my tokens, by the rank that computed them; the reverse of
    exchange. Lives in the send buffer."""
    x = x.unflatten(0, (p.C, p.s))
    with record_function("all-to-all"):
        return all_to_all(x, p.recipe.group, p.buffers.take("send", x.shape, x) if p.C > 1 else None).transpose(0, 1)


def projected(x, w, head_norm, mine, norm1, rope, p):
    """The parts of one projection for exchange: heads `mine` (a slice) of every rank, tile by tile: [t, C, n, d]."""
    d, C = p.config.head_dim, p.C
    n_heads = len(w) // d
    ranks = min(C, n_heads)  # fewer kv heads than ranks: only so many different ones
    w = w.view(ranks, n_heads // ranks, d, -1)[:, mine].flatten(0, 2)  # the stage's rows of w: [ranks * n * d, D]
    for a, b, x_t in rows(x, p.tile):
        y = heads(x_t, cut(rope, a, b), norm1, w, head_norm, p.config)  # [t, D] -> [t, ranks * n, d]
        yield a, b, y.unflatten(1, (ranks, -1)).repeat_interleave(C // ranks, dim=1)


def load_kv(x, kv, w, p):
    """Keys and values of the rank's kv heads `kv`, for all tokens: [s, D] -> 2 x [S, n, d]."""
    n = kv.stop - kv.start
    return (exchange("k", n, projected(x, w.wk, w.k_norm, kv, w.norm1, p.rope, p), p, w.wk),
            exchange("v", n, projected(x, w.wv, None, kv, w.norm1, None, p), p, w.wv))


def plan_stages(p):
    c = p.config
    return stages(c.n_heads, c.n_kv_heads, p.C, p.recipe.stage_heads(c, p.C))


def attention_forward(x, w, p):
    """Causal attention in stages: x [s, D] -> o [s, H, d], lse [H/C, S] (of this rank's heads).

    Lives at its peak: o (s H d) and 7 stage buffers (send, q, k, v, the kernel's output, and o, do of the backward
    pass if there was one). Sends (2H + 2K) s d elements, whatever U is."""
    c, C = p.config, p.C
    o = x.new_empty(p.s, C, c.n_heads // C, c.head_dim)
    lse = x.new_empty(c.n_heads // C, C * p.s, dtype=p.rope.dtype)
    for kv, queries in plan_stages(p):
        k, v = load_kv(x, kv, w, p)
        for mine in queries:
            with record_function("stage"):
                u = mine.stop - mine.start
                q = exchange("q", u, projected(x, w.wq, w.q_norm, mine, w.norm1, p.rope, p), p, w.wq)
                out, lse[mine] = flash_forward(q, k, v, p.recipe.kernel, p.docs)
                o[:, :, mine] = send_home(out, p)  # [S, u, d] -> [s, C, u, d]
                del out  # or it would live on beside the next stage's
    return o.flatten(1, 2), lse


def attention_backward(x, o, lse, do, dq, w, p):
    """The gradients of attention, stage by stage: fills dq [s, H, d], which may be o itself, and returns dk, dv [s, K, d].

    do(mine) yields the parts of do for the heads `mine`, tile by tile: the whole [s, H, d] need never exist.
    q, k, v are projected again. Lives at its peak: dq, dk, dv and 11 stage buffers (send, q, k, v, o, do, the kernel's
    dq, dk, dv, and the sums of dk and dv). Sends (4H + 4K) s d elements."""
    c, C = p.config, p.C
    o, dq = (y.unflatten(1, (C, -1)) for y in (o, dq))  # [s, C, H/C, d]
    dk, dv = (o.new_empty(p.s, c.n_kv_heads, c.head_dim) for _ in "kv")
    for kv, queries in plan_stages(p):
        k, v = load_kv(x, kv, w, p)
        sums = None
        for mine in queries:
            with record_function("stage"):
                u = mine.stop - mine.start
                q = exchange("q", u, projected(x, w.wq, w.q_norm, mine, w.norm1, p.rope, p), p, o)
                out = exchange("o", u, ((a, b, o_t[:, :, mine]) for a, b, o_t in rows(o, p.tile)), p, o)
                dout = exchange("do", u, do(mine), p, o)
                dq_stage, *dkv = flash_backward(dout, q, k, v, out, lse[mine], p.recipe.kernel, p.docs)
                sums = dkv if sums is None else [total.add_(part) for total, part in zip(sums, dkv)]
                dq[:, :, mine] = send_home(dq_stage, p)
                del dq_stage, dkv
        for home, total in zip((dk, dv), sums):
            collect(home, send_home(total, p), kv, p)
        del sums, total
    return dk, dv


def collect(home, parts, kv, p):
    """Put the gradients of kv heads `kv`, parts [s, C, n, d], into home [s, K, d]; replicas of a head are summed."""
    ranks = min(p.C, home.shape[1])
    home = home.unflatten(1, (ranks, -1))  # [s, ranks, K/ranks, d]
    if ranks == p.C:
        home[:, :, kv] = parts
    else:
        for a, b, part in rows(parts, p.tile):  # in float32, then rounded once
            home[a:b, :, kv] = part.unflatten(1, (ranks, -1)).sum(2, dtype=p.rope.dtype)


def project_backward(x, dq, dk, dv, dh, dx, w, p):
    """Back through norm and projections, tile by tile: dx = dh + their share, and the weights' gradients are returned.

    dx may be dh's own memory."""
    dw = WeightGrads(w[:6])
    for (a, b, x_t), (_, _, dh_t) in zip(rows(x, p.tile), rows(dh, p.tile)):
        def project(x_t, norm1, wq, wk, wv, q_norm, k_norm):  # [t, D] -> [t, H, d], 2 x [t, K, d]
            rope = p.rope[a:b]
            return (heads(x_t, rope, norm1, wq, q_norm, p.config), heads(x_t, rope, norm1, wk, k_norm, p.config),
                    heads(x_t, None, norm1, wv, None, p.config))
        dx_t, *grads = tile_grads(project, (x_t, *w[:6]), (dq[a:b], dk[a:b], dv[a:b]))
        dx[a:b] = dh_t + dx_t
        dw.add(grads)
    return dw.done()


class UPipeAttention(torch.autograd.Function):
    """Attention in stages without checkpointing: x [s, D] -> [s, H*d]. Keeps x, its output and lse."""

    @staticmethod
    def forward(ctx, x, p, *weights):
        w = Weights(*weights, None, None, None, None, None)  # what attention does not read
        o, lse = attention_forward(x, w, p)
        o = o.flatten(1)
        ctx.p = p
        ctx.save_for_backward(x, o, lse, *weights)
        return o

    @staticmethod
    def backward(ctx, do):
        p, (x, o, lse, *weights) = ctx.p, ctx.saved_tensors
        w, d = Weights(*weights, None, None, None, None, None), ctx.p.config.head_dim
        do = do.unflatten(1, (p.C, -1, d))  # [s, C, H/C, d]
        parts = lambda mine: ((a, b, do_t[:, :, mine]) for a, b, do_t in rows(do, p.tile))
        dq = torch.empty_like(o).unflatten(1, (-1, d))  # o belongs to autograd: it cannot be written over here
        dk, dv = attention_backward(x, o.unflatten(1, (-1, d)), lse, parts, dq, w, p)
        dx = torch.zeros_like(x)
        return dx, None, *project_backward(x, dq, dk, dv, dx, dx, w, p)


# 9. The lean block ----------------------------------------------------------------------------------------------------
#
# Everything together. One Function is the whole block, because only who owns every tensor of it can say when each is
# dead. Forward: attention in stages, then output projection, residual and MLP in one walk over the tiles. It keeps x, the
# attention output o and lse; on the host, with `offload`. Backward, in this order:
#     (a) tile by tile: h again, back through the MLP; dy becomes dh in place
#     (b) stage by stage: q, k, v again, back through attention; that stage's dq takes the place of its o
#     (c) tile by tile: dq, dk, dv become dx, in place of dh
# In units of s x D at most three are alive: x, dh (dy, dx), o (dq); plus dk, dv (2 s K d) and the stage buffers. With
# `stream`, x and dh wait on the host during (b) and are read from there tile by tile, H/U times: one is left. That pays
# at a million tokens and more, where an attention stage takes longer than reading them.


def lean_forward(x, p, w):  # [s, D] -> [s, D], and what the backward pass wants: o [s, H, d], lse [H/C, S]
    o, lse = attention_forward(x, w, p)
    y = torch.empty_like(x)
    for a, b, x_t in rows(x, p.tile):
        y[a:b] = mlp(x_t + F.linear(o[a:b].flatten(1), w.wo), None, *w[-4:], p.config)
    return y, o, lse


class LeanBlock(torch.autograd.Function):
    """One block, x [s, D] -> [s, D], that keeps x, o and lse. Raises RuntimeError on a second backward pass."""

    @staticmethod
    def forward(ctx, x, p, index, *weights):
        y, o, lse = lean_forward(x, p, Weights(*weights))
        ctx.p, ctx.index, ctx.kept = p, index, Kept(p, x, o, lse)
        ctx.save_for_backward(*weights)
        return y

    @staticmethod
    def backward(ctx, dy):
        p, w = ctx.p, Weights(*ctx.saved_tensors)
        x, o, lse = ctx.kept.take()
        x, x_rows = (x, rows(x, p.tile)) if p.recipe.stream else land(x, p.tile)
        o, o_rows = land(o, p.tile)
        lse = fetch(lse)
        dh = dy if is_ours(dy) else dy.clone(memory_format=torch.contiguous_format)

        # (a) h = x + o wo^T and y = h + mlp(norm(h)): dy -> dh, in place
        dwo, dw_mlp = WeightGrads([w.wo]), WeightGrads(w[-4:])
        for (a, b, x_t), (_, _, o_t) in zip(x_rows, o_rows):
            o_t = o_t.flatten(1)  # [t, H*d]
            h_t = x_t + F.linear(o_t, w.wo)
            dh[a:b], *grads = tile_grads(lambda h, *w: mlp(h, None, *w, p.config), (h_t, *w[-4:]), dh[a:b])
            dw_mlp.add(grads)
            dwo.add([dh[a:b].T @ o_t])  # [D, t] @ [t, H*d]
        dw_mlp, dwo = dw_mlp.done(), dwo.done()
        dh_rows = dh
        if p.recipe.stream:
            dh_rows = p.store.park(dh)
            release(dh)

        # (b) o -> dq, in place, stage by stage; a stage's do = dh wo is made of the columns of wo that its heads own
        def do(mine):
            wo = w.wo.unflatten(1, (p.C, -1, p.config.head_dim))[:, :, mine]  # [D, C, u, d]
            for a, b, dh_t in rows(dh_rows, p.tile):
                yield a, b, (dh_t @ wo.flatten(1)).unflatten(1, wo.shape[1:])  # [t, D] @ [D, C*u*d]
        dk, dv = attention_backward(x, o, lse, do, o, w, p)

        # (c) dq, dk, dv -> dx, in place of dh
        if p.recipe.stream:
            restore(dh)
        ctx.kept.prefetch_before(p.tile)
        dw_qkv = project_backward(x, o, dk, dv, dh_rows, dh, w, p)
        p.progress(ctx.index, "backward")
        return ours(dh), None, None, *dw_qkv, *dwo, *dw_mlp
