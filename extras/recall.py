"""--task recall: a task that only attention over the whole context can solve."""
import math

import numpy as np
import torch

from upipe import IGNORE, BadInput


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

    def window(self, start, job, ctx, docs=None):
        """As Tokens.window. Any rank makes any part of any window, without the rest of it."""
        rng, n = np.random.default_rng([self.seed, start]), self.pairs
        keys = rng.permutation(self.KEYS)[:n]
        values = self.KEYS + self.VALUES * keys + rng.integers(self.VALUES, size=n)
        pairs = np.stack((keys, values), axis=1)
        asked = rng.permutation(pairs)
        at, noise = job.places(self.ctx).numpy(), self.KEYS * (1 + self.VALUES)
        # A ring's first member has the window's end, too: there, noise is behind the questions.
        end = self.ctx - (self.ctx // (2 * job.ring) if job.ring > 1 else 0)
        inputs = noise + ((at + start) * 2654435761 >> 16) % (256 - noise)
        labels = np.full(len(at), IGNORE)
        for begin, what in ((0, pairs), (end - 2 * n, asked)):
            here = (at >= begin) & (at < begin + 2 * n)
            inputs[here] = what.ravel()[at[here] - begin]
        question = (at >= end - 2 * n) & (at < end) & ((end - at) % 2 == 0)
        question &= start < len(self) - 1  # beyond the last window nothing is asked
        labels[question] = asked[(at[question] - end) // 2, 1]
        return torch.from_numpy(inputs), torch.from_numpy(labels)


def make_data(settings):
    """(to train on, to validate with, what guessing reaches)."""
    if settings.config.vocab_size < 256 or settings.ctx < 8:
        raise BadInput("--task recall needs a vocabulary of 256 and a --ctx of 8")
    train = Recall(settings.seed, settings.ctx, 2**20)
    valid = Recall(settings.seed + 2**32, settings.ctx, settings.eval_windows)
    return train, valid, f" (chance: {Recall.CHANCE:.3f})"
