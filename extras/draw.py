"""Two pictures of the lesson, drawn from the code itself: python -m extras.draw

docs/stages.png: who holds which heads of which tokens, by upipe.stages. docs/block.png: what lives
while one block runs forward and backward, by the dry run's meter."""
import sys
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import upipe
from extras import GIB, memory

RED, INK = "#D55E00", dict(ha="center", va="center")
TOKENS = "#8CCBF2", "#F7C65B"  # of rank 0, of rank 1; all colours as Okabe and Ito advise
LAYERS = {  # of docs/block.png, from below: name, colour, kinds of the meter
    "x": ("#56B4E9", "x"), "o": ("#E69F00", "attention output"),
    "y": ("#A6D8F7", "residual stream"), "dh": ("#37B88F", "residual gradient"),
    "dk, dv": ("#F0E442", "dk and dv"),
    "stage buffers": ("#CC79A7", "stage buffers", "kernel outputs", "kernel workspace"),
    "a tile": ("#888888", "activations", "weight gradients", "gradients in autograd")}
PHASES = {  # by the function of upipe.py that begins it: title, where it is drawn
    "attention_forward": ("attention", 0, 3), "add_attention": ("MLP", 3, 4.3),
    "backward": ("(a) MLP", 4.6, 6.6), "attention_backward": ("(b) attention", 6.6, 12),
    "project_backward": ("(c) q, k, v", 12, 14)}
KERNEL = 20  # how much wider than another event one in the attention kernel is drawn: it is slow


def save(figure, path):
    figure.savefig(path, dpi=100)
    from PIL import Image  # matplotlib needs it, too
    Image.open(path).quantize(128).save(path, optimize=True)


def canvas(height):
    """(figure, axes): 1200 pixels wide, with letters that can be read on a phone."""
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot
    pyplot.rc("font", size=21)
    return pyplot.subplots(figsize=(12, height), layout="constrained")


def held(H, K, C, U):
    """For each stage, what each rank works on: [(its kv heads, its query heads), ...]."""
    return [[([r * K // C + j for j in range(kv.start, kv.stop)],
              [r * H // C + i for i in range(stage.start, stage.stop)]) for r in range(C)]
            for kv, queries in upipe.stages(H, K, C, U) for stage in queries]


def draw_stages(path, H=8, K=2, C=2):
    """Ulysses (U = H) and UPipe (U = C). Area is memory; the buffer to send is left out."""
    figure, axes = canvas(13)
    height, notes = 1.9 * H, ("The next stage writes over\nthe same q and out.",
                              "k and v stay while they are\nread. o fills up.")
    for U, name, left in (H, "Ulysses", 0), (C, "UPipe: head by head", 1.4):
        axes.text(left, C * height + 1, name, size=28, weight="bold")
        done = set()
        for stage, ranks in enumerate(held(H, K, C, U)):
            x = left + 1.16 * stage
            done.update(head for _, queries in ranks for head in queries)
            for r, (kv, queries) in enumerate(ranks):
                top = draw_rank(axes, x, (C - 1 - r) * height, r, kv, queries, (C, H // C), done)
                if stage:
                    axes.annotate("", (x + 0.4, top), (x - 0.56, top), arrowprops=dict(
                        arrowstyle="-|>", connectionstyle="arc3,rad=-0.5", linewidth=3, color=RED,
                        mutation_scale=25))
            axes.text(x + 0.5, C * height, f"stage {stage}" if U < H else "one stage", **INK)
    for r in range(C):
        y = (C - 1 - r) * height + H / C
        axes.text(-0.2, y + 5.3, f"rank {r}", rotation=90, size=26, weight="bold", **INK,
                  bbox=dict(facecolor=TOKENS[r], edgecolor="none"))
        axes.text(-0.2, y - H / C / 2, "o: own\ntokens", rotation=90, size=19, **INK)
        axes.text(1.5, y + 7.5, notes[r], color=RED, va="center", linespacing=1.3)
    axes.set(xlim=(-0.4, 5.95), ylim=(-0.3, C * height + 1.8))
    axes.axis("off")
    figure.suptitle("Attention needs all tokens, but not all heads at once", size=31)
    axes.legend([axes.bar(0, 0, color=color) for color in TOKENS], [
        f"tokens of rank {r}" for r in range(C)], ncols=C, frameon=False, loc="upper center",
        title="k 0: head 0 of keys. Area is memory.", bbox_to_anchor=(0.5, 0.01))
    save(figure, path)


def draw_rank(axes, x, y, r, kv, queries, shape, done):
    """What rank r holds in a stage: o [s, H, d] of its own tokens, with heads `done` filled in, and
    above it k, v, q and the kernel's output, [S, n, d]. Returns where it ends."""
    def cell(x, y, width, colors, text):
        for i, color in enumerate(colors):
            axes.bar(x + width * i / len(colors), 1, width / len(colors), y, align="edge",
                     color=color)
        axes.bar(x, 1, width, y, align="edge", color="none", edgecolor="black")
        axes.text(x + width / 2, y + 0.46, text, size=18, **INK)
    C, rows = shape
    for head in range(C * rows):
        color = TOKENS[r] if head in done else "white"
        cell(x + head // rows / C, y + rows - 1 - head % rows, 1 / C, [color], head)
    y += rows + 0.3
    for role, heads in ("k", kv), ("v", kv), ("q", queries), ("out", queries):
        for head in heads:
            cell(x, y, 1, TOKENS, f"{role} {head}")
            y += 1
    return y


class Watch(memory.Meter):
    """A meter that notes every change in a block: (index of the phase, width, bytes by kind)."""
    phase = 0

    def note(self):
        names, frame = set(), sys._getframe(1)
        while frame:
            if frame.f_code.co_filename == upipe.__file__:
                names.add(frame.f_code.co_name)
            frame = frame.f_back
        if names & {"lean_forward", "backward"}:
            self.phase = max(self.phase, *(i * (name in names) for i, name in enumerate(PHASES)))
            width = KERNEL if names & {"flash_forward", "flash_backward"} else 1
            self.timeline.append((self.phase, width, dict(self.kinds)))

    def gone(self, key):
        super().gone(key)
        self.note()


def watch_block(config, ctx, C, **switches):
    """The timeline of one lean block of `config` on one of C ranks, in bfloat16, simulated: all its
    stages, two tiles of each walk."""
    recipe = upipe.Recipe("upipe", checkpoint=1, keep_attention=True, tile=4096, kernel="simulated",
                          **switches)
    memory.pretend(C)
    upipe.KERNELS["simulated"] = memory.simulated_kernel()
    schedule = upipe.schedule
    with memory.abridged(), FakeTensorMode(allow_non_fake_inputs=True):
        upipe.schedule = schedule
        torch.set_default_dtype(torch.bfloat16)
        model = upipe.GPT(replace(config, n_layers=1, vocab_size=1))
        torch.set_default_dtype(torch.float32)
        tokens = torch.zeros(ctx // C, dtype=torch.int64)
        with Watch(model) as meter:
            def run():
                x = model.embed_tokens(F.embedding, tokens)
                meter.name([x], "x")
                return model.layers[0](x, model._start(tokens, recipe, None)).sum()
            run().backward()
    del upipe.KERNELS["simulated"]
    dist.destroy_process_group()
    return meter.timeline


def curves(timeline, unit):
    """(times, for each of LAYERS its heights in units): time runs evenly through a phase."""
    times = []
    for i, (_, begin, end) in enumerate(PHASES.values()):
        widths = [0, *(width for phase, width, _ in timeline if phase == i)]
        times += [begin + (end - begin) * at / sum(widths) for at in accumulate(widths[:-1])]
    return times, [[sum(kinds.get(kind, 0) for kind in of) / unit for *_, kinds in timeline]
                   for _, *of in LAYERS.values()]


def draw_block(path, config=upipe.PRESETS["llama3-8b"], ctx=5 * 2**20, C=8):
    """Memory of one block forward and backward, in units of s x D. Weights are left out."""
    unit = ctx // C * config.dim * 2
    figure, axes = canvas(10.5)
    times, heights = curves(watch_block(config, ctx, C), unit)
    axes.stackplot(times, heights, step="post", colors=[color for color, *_ in LAYERS.values()])
    times, heights = curves(watch_block(config, ctx, C, offload=True, stream=True), unit)
    axes.plot(times, [sum(column) for column in zip(*heights)], "k--", drawstyle="steps-post",
              linewidth=2, label="with offload and stream:\nx, dh wait on the host")
    for x, y, text in ((2.1, 0.5, "x"), (2.1, 1.5, "o"), (3.65, 2.5, "y"), (9.3, 0.5, "x"),
                       (5.6, 1.5, "o"), (9.3, 1.5, "dq writes over o"), (13, 1.5, "dq"),
                       (5.6, 2.5, "dy to dh"), (9.3, 2.5, "dh"), (13, 2.5, "dh to dx"),
                       (9.3, 3.26, "dk, dv"), (9.3, 5.24, "stage buffers"),
                       (1.85, 2.4, "stage buffers"), (13, 5.45, "tiles")):
        axes.text(x, y, text, **INK)
    for title, begin, end in PHASES.values():
        axes.text((begin + end) / 2, 7.3, title, **INK)
        axes.axvline(end, color="white", linewidth=3)
    axes.axvspan(4.3, 4.75, color="white", zorder=3)  # other blocks run, and the gradient dy comes
    axes.set(xlim=(0, 14), ylim=(0, 7.6), xticks=[2.15, 9.3], xticklabels=["forward", "backward"],
             ylabel=f"memory, in s D ({unit / GIB:.0f} GiB)")
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.93), frameon=False)
    for side in "top", "right":
        axes.spines[side].set_visible(False)
    figure.suptitle("Three s D tensors; the stages share the rest", size=31)
    save(figure, path)


if __name__ == "__main__":
    draw_stages("docs/stages.png")
    draw_block("docs/block.png")
