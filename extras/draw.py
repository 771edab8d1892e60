"""Pictures. Two of the lesson are drawn from the code itself: python -m extras.draw

docs/stages.png: who holds which heads of which tokens, by upipe.stages. docs/block.png: what lives
while one block runs forward and backward, by the dry run's meter."""
import math
from dataclasses import replace
from itertools import accumulate
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import upipe
from extras import GIB, memory

RED, INK = "#D55E00", dict(ha="center", va="center")
TOKENS = "#8CCBF2", "#F7C65B"  # of rank 0, of rank 1; all colours as Okabe and Ito advise
LAYERS = {  # of docs/block.png, from below: colour -> kinds of the meter
    "#56B4E9": ["x"], "#E69F00": ["attention output"], "#A6D8F7": ["residual stream"],
    "#37B88F": ["residual gradient"], "#F0E442": ["dk and dv"],
    "#CC79A7": ["stage buffers", "kernel outputs", "kernel workspace"],
    "#888888": ["activations", "weight gradients", "gradients in autograd"]}
PHASES = {  # by the function of upipe.py that begins it: title, where it is drawn, what is where
    "attention_forward": ("attention", 0, 3, {"x": 0.5, "o": 1.5, "stage buffers": 2.16}),
    "add_rest": ("MLP", 3, 4.3, {"y": 2.5}),
    "backward": ("(a) MLP", 4.6, 6.6, {"o": 1.5, "dy to dh": 2.5}),
    "attention_backward": ("(b) attention", 6.6, 12, {
        "x": 0.5, "dq writes over o": 1.5, "dh": 2.5, "dk, dv": 3.26, "stage buffers": 5.2}),
    "project_backward": ("(c) q, k, v", 12, 14, {"dq": 1.5, "dh to dx": 2.5, "tiles": 5.45})}


def sheet(width, height, columns=1, size=21):
    """(figure, its axes side by side). 12 wide and of this size, letters can be read on a phone."""
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rc("font", size=size)
    figure = Figure((width, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def save(figure, path):
    figure.savefig(path)
    from PIL import Image  # matplotlib needs it, too
    Image.open(path).quantize(128).save(path, optimize=True)


# docs/stages.png


def cells(axes, x, y, width, labels, *colors):
    """Draw a column of cells from y upwards. Each is of all colors, side by side; one of them may
    be a list, with a color for each cell. Returns the y of its end."""
    bottoms, part = [y + i for i in range(len(labels))], width / len(colors)
    for i, color in enumerate(colors):
        axes.bar(x + part * i, 1, part, bottoms, align="edge", color=color)
    edges = axes.bar(x, 1, width, bottoms, align="edge", color="none", edgecolor="black")
    axes.bar_label(edges, labels, label_type="center", size=18)
    return y + len(labels)


def draw_stages(path, H=8, K=2, C=2):
    """Ulysses (U = H) and UPipe (U = C). Area is memory; the buffer to send is left out. Above o
    [s, H, d] of a rank's own tokens are k, v, q and the kernel's output, each [S, n, d]."""
    figure, (axes,) = sheet(12, 13)
    rows, height = H // C, 1.9 * H  # of one rank
    for U, name, left in (H, "Ulysses", 0), (C, "UPipe: head by head", 1.4):
        axes.text(left, C * height + 1, name, size=28, weight="bold")
        stages = [(kv, stage) for kv, queries in upipe.stages(H, K, C, U) for stage in queries]
        for i, (kv, queries) in enumerate(stages):
            x = left + 1.16 * i
            axes.text(x + 0.5, C * height, f"stage {i}" if U < H else "one stage", **INK)
            for r in range(C):
                y = (C - 1 - r) * height
                for c in range(C):  # own tokens, heads of rank c: filled up to this stage's last
                    heads = range((c + 1) * rows - 1, c * rows - 1, -1)
                    colors = [TOKENS[r] if h % rows < queries.stop else "white" for h in heads]
                    cells(axes, x + c / C, y, 1 / C, heads, colors)
                labels = [f"{role} {r * n // C + head}" for role, n, part in (
                    ("k", K, kv), ("v", K, kv), ("q", H, queries), ("out", H, queries))
                    for head in range(part.start, part.stop)]
                top = cells(axes, x, y + rows + 0.3, 1, labels, *TOKENS)
                if i:
                    axes.annotate("", (x + 0.4, top), (x - 0.56, top), arrowprops=dict(
                        arrowstyle="-|>", connectionstyle="arc3,rad=-0.5", linewidth=3, color=RED,
                        mutation_scale=25))
    for r, note in enumerate(("The next stage writes over\nthe same q and out.",
                              "k and v stay while they are\nread. o fills up.")):
        y = (C - 1 - r) * height + rows
        axes.text(-0.2, y + 5.3, f"rank {r}", rotation=90, size=26, weight="bold", **INK,
                  bbox=dict(facecolor=TOKENS[r], edgecolor="none"))
        axes.text(-0.2, y - rows / 2, "o: own\ntokens", rotation=90, size=19, **INK)
        axes.text(1.5, y + 7.5, note, color=RED, va="center", linespacing=1.3)
    axes.set(xlim=(-0.4, 5.95), ylim=(-0.3, C * height + 1.8))
    axes.axis("off")
    figure.suptitle("Attention needs all tokens, but not all heads at once", size=31)
    axes.legend([axes.bar(0, 0, color=color) for color in TOKENS], [
        f"tokens of rank {r}" for r in range(C)], ncols=C, frameon=False, loc="upper center",
        title="k 0: head 0 of keys. Area is memory.", bbox_to_anchor=(0.5, 0.01))
    save(figure, path)


# docs/block.png


class Watch(memory.Meter):
    """A meter that notes every change in a block: (index of the phase, width, bytes by kind). An
    event in the attention kernel is drawn 20 times as wide as another: it is slow."""
    phase = 0

    def note(self):
        names = {name.rpartition(".")[2] for name in memory.at_work()}
        if names & {"lean_forward", "backward"}:
            self.phase = max(self.phase, *(i * (name in names) for i, name in enumerate(PHASES)))
            width = 20 if names & {"flash_forward", "flash_backward"} else 1
            self.timeline.append((self.phase, width, self.kinds.copy()))

    def gone(self, key):
        super().gone(key)
        self.note()


def watch_block(config, ctx, C, **switches):
    """The timeline of one lean block of `config` on one of C ranks, in bfloat16, simulated: all its
    stages, two tiles of each walk."""
    recipe = upipe.Recipe("upipe", checkpoint=1, keep_attention=True, tile=4096, kernel="simulated",
                          **switches)
    spans = upipe.tile_spans
    memory.pretend(C)
    with (patch.dict(upipe.KERNELS, simulated=memory.simulated_kernel()),
          patch.object(upipe, "tile_spans", lambda n, tile: spans(n, tile)[:2]),
          FakeTensorMode(allow_non_fake_inputs=True)):
        torch.set_default_dtype(torch.bfloat16)
        model = upipe.GPT(replace(config, n_layers=1, vocab_size=1))
        torch.set_default_dtype(torch.float32)
        tokens = torch.zeros(ctx // C, dtype=torch.int64)
        with Watch(model) as meter:
            x = model.embed_tokens(F.embedding, tokens)
            meter.name([x], "x")
            x = model.layers[0](x, model._start(tokens, recipe, None)).sum()  # x itself may go
            x.backward()
    dist.destroy_process_group()
    return meter.timeline


def curves(timeline, unit):
    """(times, for each of LAYERS its heights in units): time runs evenly through a phase."""
    times = []
    for i, (_, begin, end, _) in enumerate(PHASES.values()):
        widths = [0, *(width for phase, width, _ in timeline if phase == i)]
        times += [begin + (end - begin) * at / sum(widths) for at in accumulate(widths[:-1])]
    return times, [[sum(kinds[kind] for kind in of) / unit for *_, kinds in timeline]
                   for of in LAYERS.values()]


def draw_block(path, config=upipe.PRESETS["llama3-8b"], ctx=5 * 2**20, C=8):
    """Memory of one block forward and backward, in units of s x D. Weights are left out."""
    unit = ctx // C * config.dim * 2
    figure, (axes,) = sheet(12, 10.5)
    times, heights = curves(watch_block(config, ctx, C), unit)
    axes.stackplot(times, heights, step="post", colors=LAYERS)
    times, heights = curves(watch_block(config, ctx, C, offload=True, stream=True), unit)
    axes.plot(times, [sum(column) for column in zip(*heights)], "k--", drawstyle="steps-post",
              linewidth=2, label="with offload and stream:\nx, dh wait on the host")
    for title, begin, end, labels in PHASES.values():
        axes.axvline(end, color="white", linewidth=3)
        for text, y in {title: 7.3, **labels}.items():
            axes.text((begin + end) / 2, y, text, **INK)
    axes.axvspan(4.3, 4.75, color="white", zorder=3)  # other blocks run, and the gradient dy comes
    axes.set(xlim=(0, 14), ylim=(0, 7.6), xticks=[2.15, 9.3], xticklabels=["forward", "backward"],
             ylabel=f"memory, in s D ({unit / GIB:.0f} GiB)")
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.93), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Three s D tensors; the stages share the rest", size=31)
    save(figure, path)


# What a run draws


def plot_road(path, rows, settings):
    """Bars of the road with the card's capacity, and the memory of the last row over one step."""
    names, reports, fit, _ = zip(*(row for row in rows if row[1]))
    on_host = {"parked", *(memory.BETWEEN_STEPS if settings.offload_params else ())}
    history = [{kind: size / GIB for kind, size in kinds.items() if kind not in on_host}
               for _, kinds in reports[-1].timeline]  # a measured peak on CUDA has none
    figure, (left, *right) = sheet(17, 6.5, 2 if history else 1, size=13)
    sizes, most = [report.device / GIB for report in reports], memory.usable(settings) / GIB
    colors = {True: "tab:green", False: "tab:red"}
    bars = left.barh(names, sizes, log=True, color=[
        "tab:orange" if size <= most and not fits else colors[fits]
        for size, fits in zip(sizes, fit)])
    left.barh(names[:1], 0, color="tab:orange", label="too much for the host or a kernel call")
    left.axvline(most, color="black", linestyle="--", label=f"{most:.0f} GiB usable on a card")
    labels = [f"{size:,.{max(0, 2 - math.floor(math.log10(size)))}f}" for size in sizes]
    left.bar_label(bars, labels, padding=5, backgroundcolor="white")  # one may lie on the line
    left.set(xlabel="GiB per GPU at the peak", xlim=(min(sizes) / 8, max(sizes) * 10),
             title=f"{settings.model}, {settings.length} tokens, {settings.world} ranks")
    left.invert_yaxis()
    left.legend(loc="upper center", bbox_to_anchor=(0.45, -0.1), ncols=2, frameon=False)
    for axes in right:
        plot_step(axes, history)
        few = " of a model of fewer layers" if settings.dry_run and not settings.full else ""
        axes.set_title(f"{names[-1]}, over one step{few}")
    figure.savefig(path)


def plot_step(axes, history):
    """Memory over a step, stacked: below what stays between steps, above it the rest by size.

    In a long one, most blocks are like their neighbours: of their passes, white gaps are left."""
    from matplotlib import colormaps
    head = next(i for i, kinds in enumerate(history) if kinds.get("logits tile"))
    if len(history) > 300:
        gap = [{}] * 4
        history = history[:50] + gap + history[head - 30:head + 70] + gap + history[-80:]
        head = 84
    most = {kind: max(kinds.get(kind, 0) for kinds in history) for kind in set().union(*history)}
    order = sorted(most, key=lambda kind: (kind not in memory.BETWEEN_STEPS, -most[kind], kind))
    layers = {kind: [kinds.get(kind, 0) for kinds in history] for kind in order[:13]}
    layers["other"] = [sum(kinds.get(kind, 0) for kind in order[13:]) for kinds in history]
    named = dict.fromkeys((*memory.BETWEEN_STEPS, *memory.KINDS.values(), *sorted(most)))
    colors = [*colormaps["tab20"].colors]  # dark and light by turns
    del colors[14:16]                      # gray is for the others
    palette = dict(zip(named, colors[::2] + colors[1::2]))  # the same for a kind in all pictures
    axes.stackplot(range(len(history)), layers.values(), labels=layers, step="post",
                   colors=[palette.get(kind, "lightgray") for kind in layers])
    axes.axvline(head, color="black", linewidth=1)
    axes.set(ylabel="GiB per GPU", xlim=(0, len(history) - 1),
             xticks=[head / 2, (head + len(history)) / 2],
             xticklabels=["forward", "loss and backward"])
    axes.tick_params(axis="x", length=0)
    axes.legend(reverse=True, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def plot_by_position(path, ends, losses, title):
    figure, (axes,) = sheet(7, 4, size=10)
    axes.plot(ends, losses, drawstyle="steps-pre")
    axes.set(xlabel="position in the context", ylabel="nats per token", title=title)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw_stages("docs/stages.png")
    draw_block("docs/block.png")
