"""Text through a tokenizer.json, and text that a model writes.

Tokens are written to a cache once. From then on they are read like any other token file."""
import hashlib
import itertools
import json
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from extras import need, read_json
from upipe import BadInput, refuse, shard

PIECE = 2**16  # characters: a tokenizer takes 40 to 100 bytes of memory for each
# No token goes on here. Byte-level tokenizers give a space to the word that follows it, and some
# give a newline to the punctuation in front of it.
CUT = re.compile(r"(?<=\S)(?= )|(?<=[^\W_])(?=\s)|(?<=\S\n)(?=\S)")


class Bytes:
    """The tokenizer that needs no file: a text is its bytes."""
    before, after = (), ()

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Tokenizer:
    """A tokenizer.json. `before` and `after` are the ids around a document: those of the file's
    template; where it puts none in front, the model's end of a text has to keep documents apart."""

    def __init__(self, path):
        need("tokenizers", f"tokenizer {path}")
        try:
            self.file = Path(path).read_bytes()
            self.inner = load(json.loads(self.file))
            # Many put a space in front of each text: not so behind a cut.
            self.middle = load(json.loads(self.file, object_hook=without_prefix))
        except Exception as error:  # whatever the library raises: it is the file that is wrong
            raise BadInput(f"--tokenizer {path}: {error}")
        self.size = 1 + max(self.inner.get_vocab().values())
        around = self.inner.encode("a")
        text = [i for i, special in enumerate(around.special_tokens_mask) if not special] or [0]
        self.before, self.after = around.ids[:text[0]], around.ids[text[-1] + 1:]
        if not self.before and not self.after:
            self.after = self.find_end(Path(path).parent)

    def find_end(self, folder):
        """[id] of the model's end of a text, as the files beside the tokenizer say, or []."""
        for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
            found = read_json(folder / name)
            end = found.get("eos_token") or found.get("eos_token_id")
            end = end["content"] if isinstance(end, dict) else end
            ends = end if isinstance(end, list) else [end]  # of several the first
            ids = [self.inner.token_to_id(x) if isinstance(x, str) else x for x in ends[:1]]
            if ids and ids[0] in range(self.size):
                return ids
        return []

    def encode(self, text):
        return self.before + self.inner.encode(text, add_special_tokens=False).ids

    def encode_all(self, batch):
        """The ids of pieces (text, first, last) of documents, on all cores."""
        encoded = {}
        for inner, begins in ((self.inner, True), (self.middle, False)):
            texts = [text for text, first, _ in batch if first == begins]
            encoded[begins] = iter(inner.encode_batch_fast(texts, add_special_tokens=False))
        return [self.before * first + next(encoded[first]).ids + self.after * last
                for _, first, last in batch]

    def decode(self, ids):
        return self.inner.decode(ids, skip_special_tokens=False)


def compare(job, settings, train, valid, starts):
    """What counting pairs of bytes reaches on the windows at `starts`: a text on rank 0, or ""."""
    codec = settings.codec
    if codec and not codec.before and not codec.after:
        job.say("notice    no file says which token ends a text: texts follow without one between")
    if job.rank or settings.config.vocab_size < 256 or train.parts[0].dtype != np.uint8:
        return ""
    ids = train.read(0, min(len(train), 2**26))
    pairs = np.bincount(ids[:-1] * 256 + ids[1:], minlength=2**16).reshape(256, 256)
    nats = -np.log((pairs + 1) / (pairs + 1).sum(1, keepdims=True))  # + 1: no pair is impossible
    windows = [valid.read(start, min(start + settings.ctx + 1, len(valid))) for start in starts]
    loss = np.concatenate([nats[ids[:-1], ids[1:]] for ids in windows]).mean()
    return f" (bigrams: {loss:.3f})"


def load(spec):
    from tokenizers import Tokenizer as Inner
    return Inner.from_str(json.dumps({**spec, "truncation": None, "padding": None}))


def without_prefix(part):
    """An object of a tokenizer.json, such that it puts nothing in front of a text."""
    changes = dict(prepend="", prepend_scheme="never", add_prefix_space=False)
    return {key: changes.get(key, value) if isinstance(value, (str, bool)) else value
            for key, value in part.items()}


def pieces(path):
    """(text, first, last) of a text, in pieces of up to 2 * PIECE characters."""
    text, first = "", True
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        while more := file.read(2 * PIECE - len(text)):
            text += more
            if len(text) > PIECE:
                found = CUT.search(text, PIECE)
                at = found.start() if found else PIECE
                yield text[:at], first, False
                text, first = text[at:], False
    yield text, first, True


def tokenize(paths, tokenizer):
    """(cache, dtype, ends): the file with the ids of all texts, and where those of each end."""
    dtype = np.dtype("<u2" if tokenizer.size <= 2**16 else "<u4")
    digest = hashlib.sha256(tokenizer.file + Path(__file__).read_bytes())
    digest.update(repr((tokenizer.before, tokenizer.after)).encode())
    for path in paths:
        digest.update(f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "upipe"
    cache = home / f"{digest.hexdigest()[:32]}.bin"
    ends = read_ends(cache, len(paths), dtype) or write_cache(paths, tokenizer, cache, dtype)
    return cache, dtype, ends


def read_ends(cache, n, dtype):
    """Where the ids of n texts end, as stands behind them; None if the cache is not whole."""
    size = cache.stat().st_size - 8 * n if cache.exists() else -1
    ends = np.fromfile(cache, "<i8", offset=size).tolist() if size >= 0 else []
    return ends if sum(ends[-1:]) * dtype.itemsize == size else None


def write_cache(paths, tokenizer, cache, dtype):
    """Write it under a name of this process's own, since others may write the same -> the ends."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    todo = ((i, piece) for i, path in enumerate(paths) for piece in pieces(path))
    size, counts = sum(path.stat().st_size for path in paths), np.zeros(len(paths), "<i8")
    with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
        with open(Path(folder, "ids"), "wb") as file, tqdm(  # disable=None: only on a terminal
                total=size, unit="B", unit_scale=True, desc="tokenize", disable=None) as bar:
            while batch := list(itertools.islice(todo, 64)):
                found = tokenizer.encode_all([piece for _, piece in batch])
                for (i, piece), ids in zip(batch, found):
                    file.write(np.array(ids, dtype).tobytes())
                    counts[i] += len(ids)
                    bar.update(len(piece[0].encode()))
            file.write(counts.cumsum().tobytes())
        os.replace(file.name, cache)
    return counts.cumsum().tolist()


def refuse_early(settings):
    text = settings.prompt.encode(errors="ignore").decode()
    refuse(text != settings.prompt, f"--prompt {settings.prompt!r} is no text in UTF-8")


@torch.no_grad()
def sample(job, model, settings):
    """--prompt and --sample tokens more, drawn at temperature 0.8.

    Each token is a whole forward pass over all before it (up to ctx), split over the ranks like any
    other: there is no cache. The rank with the last position draws, for everyone."""
    generator = torch.Generator().manual_seed(settings.seed)
    codec = settings.codec or Bytes()
    ids = codec.encode(settings.prompt) or [0]
    for _ in range(settings.sample):
        window = torch.tensor(ids[-settings.ctx:])
        here, _ = shard(window, window, job.groups["group"], job.ring)
        logits = model.logits(here.to(job.device), settings.recipe)  # [s, V]
        last = job.places(len(window)) == len(window) - 1
        chances = (logits[last.nonzero().sum()].float().cpu() / 0.8).softmax(-1)
        token = torch.multinomial(chances, 1, generator=generator).to(job.device)
        token *= bool(last.any()) and job.dp_rank == 0  # right on one rank; 0 on all others
        dist.all_reduce(token)
        ids.append(token.item())
    return codec.decode(ids)
