"""Text through a tokenizer.json, and text that a model writes.

Tokens are written to a cache once. From then on they are mapped like any other token file."""
import hashlib
import itertools
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from extras import need
from upipe import BadInput


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


def bigram_loss(train, valid, starts, ctx):
    """What counting pairs of bytes reaches on the windows the model is evaluated on, in nats."""
    ids = train.read(0, min(len(train), 2**26))
    pairs = np.bincount(ids[:-1] * 256 + ids[1:], minlength=2**16).reshape(256, 256)
    nats = -np.log((pairs + 1) / (pairs + 1).sum(1, keepdims=True))  # + 1: no pair is impossible
    windows = [valid.read(start, min(start + ctx + 1, len(valid))) for start in starts]
    return float(np.concatenate([nats[ids[:-1], ids[1:]] for ids in windows]).mean())


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
def sample(job, model, settings):
    """--prompt and --sample tokens more, drawn at temperature 0.8.

    Each token is a whole forward pass over all before it (up to ctx), split over the ranks like any
    other: there is no cache. The rank with the last position draws, for everyone."""
    generator = torch.Generator().manual_seed(settings.seed)
    ids = settings.codec.encode(settings.prompt) or [0]
    for _ in range(settings.sample):
        window = torch.tensor(ids[-settings.ctx:])
        s, last = -(-len(window) // job.cp), len(window) - 1
        here = torch.zeros(s * job.cp, dtype=torch.int64)
        here[:len(window)] = window
        here = here[job.cp_rank * s:][:s].to(job.device)
        at = model.logits(here, settings.recipe)[last % s]  # [V]: right on one rank of a group
        chances = (at.float().cpu() / 0.8).softmax(-1)
        token = torch.multinomial(chances, 1, generator=generator).to(job.device)
        dist.broadcast(token, src=last // s)  # group 0 is ranks 0 to cp - 1
        ids.append(token.item())
    return settings.codec.decode(ids)
