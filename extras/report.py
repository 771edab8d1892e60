"""python test_upipe.py --benchmark: memory, traffic and speed, the numbers of the README.
python test_upipe.py --device-report OUT [--long]: all that is to be known of a GPU.
python test_upipe.py --kernels: the part of it that looks at kernels.

main(argv, tests): `tests` is the module test_upipe, whose ranks, cases and counts are used here."""
import functools
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from extras import GIB, read_json, write_json
from extras.kernels import PACKAGES, kernel_error, kernel_seconds
from upipe import GPT, PRESETS, Recipe

HERE = Path(__file__).parent.parent
GPU, F32, BF16 = torch.cuda.is_available(), torch.float32, torch.bfloat16
LONG = 16 * 1024
TINY = replace(PRESETS["tiny"], n_layers=2)
LEAN = Recipe("upipe", checkpoint=1, keep_attention=True, tile=256)
RECIPES = {"lean": LEAN, "attention twice": replace(LEAN, keep_attention=False),
           "U = H": replace(LEAN, attention="ulysses"), "autograd Ulysses": Recipe("ulysses"),
           "ring": replace(LEAN, heads_per_stage=2, ring=2)}
cached_model = functools.cache(GPT)


def rank_seconds(case, step):
    model = cached_model(case.config)
    model.zero_grad()
    dist.barrier()
    begin = time.perf_counter()
    step(model, case)
    dist.barrier()
    return time.perf_counter() - begin


def benchmark(tests, repeats=5):
    """Two counts, three ratios of times. The recipes take turns, so that a machine that is slow for
    a while is slow for all of them; a ratio is the median over the turns."""
    H, K, D, d = TINY.n_heads, TINY.n_kv_heads, TINY.dim, TINY.head_dim
    print(f"tiny with {TINY.n_layers} layers, {LONG} tokens, 2 CPU ranks of one thread, float32")
    peaks = tests.elements_per_token(replace(TINY, n_layers=3),
                                     replace(LEAN, offload=True, tile=64))
    sent = tests.RANKS[2](tests.rank_traffic, tests.Case(2, TINY, LEAN, 512))[0]
    print(f"peak of a block, elements per token   forward {peaks[0]:.0f}, at most "
          f"{3 * D + 8 * 2 * d}; backward {peaks[1]:.0f}, at most "
          f"{3.5 * D + 2 * K * d + 12 * 2 * d:.0f}\n"
          f"all-to-all, elements per token        forward {sent[0]:.0f} of {2 * (H + K) * d}; "
          f"backward {sent[1]:.0f} of {4 * (H + K) * d}")
    turns = [[max(tests.RANKS[2](rank_seconds, tests.Case(2, TINY, recipe, LONG), tests.step,
                                 limit=600)) for recipe in RECIPES.values()]
             for _ in range(repeats + 1)]
    seconds = dict(zip(RECIPES, np.array(turns[1:]).T))  # the first turn warms up
    for what, slow, least in (("keep_attention / attention twice", "attention twice", 1.2),
                              ("UPipe, U = C / Ulysses, U = H", "U = H", 0.95),
                              ("lean UPipe / autograd Ulysses", "autograd Ulysses", 0.85),
                              ("P = 2 / a ring of 2, both U = 2", "ring", 0.91)):
        ratio = np.median(seconds[slow] / seconds["lean"])
        print(f"{what:37} {ratio:.2f} x the speed, at least {least}")
    print("seconds per step: " + ", ".join(f"{name} {np.median(turns):.1f}"
                                           for name, turns in seconds.items()))
    tests.RANKS[2].stop()


# All that is to be known of a GPU, in one command and under 8 minutes. Each part is a process with
# a time limit of its own; its result is printed and written as soon as it is there. Those that the
# promises need come first. For those that the 8 minutes have no room for, run it again: what is
# done in OUT.json is not done twice. --long adds a part, and any time it takes.
# On a machine without a GPU the same parts run at small sizes, to show that they work.

BUDGET = 8 * 60  # seconds for all parts, the opt-in one aside
HEAD_SIZES = (64, 128) if GPU else (16,)
LENGTHS = (2**16, 2**18, 2**20) if GPU else (128, 512, 1024)
RANK_OF_8 = "one rank of 8, 8B"
ROWS = [("128k", 2, "u = 1"), ("128k", 2, "U = 32"), ("128k", 2, "no offload"),
        ("128k", 2, "attention twice"), ("1m", 1, RANK_OF_8), ("512k", 2, "u = 1"),
        ("512k", 2, "U = 32"), ("512k", 2, "no offload"), ("1m", 1, "u = 1"),
        ("1m", 1, "attention twice"), ("1m", 1, "U = 16"), ("512k", 2, "attention twice")]


def report_parts(long):
    """[(name, command after `python`, seconds at most), ...]. BEST and a head size stand for the
    kernel that the first part found the fastest: all rows use the same one."""
    parts = [("kernels", ["test_upipe.py", "--kernels"], 90)]
    if GPU:
        tests = ["-m", "pytest", "-q", "test_upipe.py", "extras/test_kernels.py", "-k"]
        parts.append(("cuda tests", [*tests, "cuda or gpu or copies_on_a_stream"], 120))
    small, wide, ranks, U = ("llama3.2-1b", "llama3-8b", 8, 32) if GPU else ("tiny", "tiny", 4, 4)
    one = f"--one-rank-of 1 --model {small} --kernel BEST{HEAD_SIZES[0]}"
    flags = {"u = 1": one, "U = 32": f"{one} --heads-per-stage {U}",
             "U = 16": f"{one} --heads-per-stage {min(U, 16)}",  # at 1m, 32 are 2^31 elements
             "no offload": f"{one} --no-offload", "attention twice": f"{one} --no-keep-attention",
             RANK_OF_8: f"--one-rank-of {ranks} --model {wide} --kernel BEST{HEAD_SIZES[-1]}"}
    for size, layers, what in ROWS + [("5m", 1, RANK_OF_8)] * long:
        limit = 600 if size == "5m" else 150
        if not GPU:  # a thousandth of everything
            size = size.replace("k", "").replace("m", "k")
        command = f"train.py --layers {layers} --ctx {size} --force --offload --checkpoint 1"
        parts.append((f"{size}, {what}, L = {layers}", f"{command} {flags[what]}".split(), limit))
    return parts


def report_kernels(path=None):
    """Every kernel here against the formula in float64, and its speed on one head."""
    device, dtype = (torch.device("cuda"), BF16) if GPU else (torch.device("cpu"), F32)
    names = ["torch", "cudnn", *PACKAGES] if GPU else ["cpu"]
    rates = {d: {} for d in HEAD_SIZES}  # FLOP/s by head size and kernel, of the longest length
    for d, name in product(HEAD_SIZES, names):
        error = kernel_error(name, 4, 1, d, dtype, device)
        print(f"{name:10} head size {d}: {error or 'right, forward and backward'}", flush=True)
        for S in () if error else LENGTHS:
            rates[d][name] = 0
            try:
                seconds = kernel_seconds(name, 1, 1, d, dtype, device, S)
                rates[d][name] = 3.5 * 2 * S**2 * d / seconds
                result = f"{tqdm.format_sizeof(rates[d][name])}FLOP/s"
            except Exception as error:  # whatever a kernel throws at a length it cannot do
                result = str(error).split("\n")[0]
            print(f"{name:10} head size {d}, {S:,} tokens: {result}", flush=True)
    best = {d: max(found, key=found.get) for d, found in rates.items() if found}
    write_json(path, dict(rates=rates, best=best))


def off(result):
    """How far a measured peak is from the dry run's."""
    return result["device_bytes"] / result["simulated_device_bytes"] - 1


def report_row(name, result):
    """A row of the markdown table."""
    if "seconds" not in result:
        return f"| {name} | {result['status']} | | | | |"
    mfu = f"{result['mfu']:.1%}" if result.get("mfu") else ""
    return (f"| {name} | {result['seconds']:.2f} | {result['tokens_per_second']:,.0f} | {mfu} | "
            f"{result['device_bytes'] / GIB:.2f} ({off(result):+.1%}) | "
            f"{result['host_bytes'] / GIB:.2f} |")


def report_promises(results):
    """What the table is for: each promise of the project, what it came to, whether it holds."""
    runs = {name: result for name, result in results.items() if "seconds" in result}
    sizes = ("128k", "512k", "1m") if GPU else ("128", "512", "1k")
    end = sizes[-1]

    def find(size, what, figure="seconds"):
        found = (run[figure] for name, run in runs.items() if name.startswith(f"{size}, {what}"))
        return next(found, None)
    rates = results.get("kernels", {}).get("rates", {}).get(str(HEAD_SIZES[0]), {})
    alone = rates.get(find(end, "u = 1", "kernel"), 0)
    errors = [abs(off(run)) for run in runs.values()]
    promises = [  # what, a, b, rule, bound: about a / b
        *((f"{size}, time with offload / without", find(size, "u = 1"), find(size, "no offload"),
           "most", 1.02) for size in sizes),
        *((f"{size}, time of one head a stage / of many", find(size, "u = 1"), find(size, "U = "),
           "most", 1.03) for size in sizes[1:]),
        (f"{end}, time of attention twice / kept", find(end, "attention twice"),
         find(end, "u = 1"), "least", 1.22),
        (f"{end}, FLOP/s of attention / of its kernel alone",
         find(end, "u = 1", "attention_flops_per_second"), alone, "least", 0.9),
        # A utilisation counts 3 forward passes, where flash attention works for 3.5.
        (f"{end}, utilisation of the step / of its kernel alone",
         find(end, "u = 1", "flops_per_second"), alone * 3 / 3.5, "least", 0.85),
        ("largest error of the dry run's peaks", max(errors, default=None), 1, "most", 0.05)]
    for what, a, b, rule, bound in promises:
        if a is not None and b:
            holds = a / b <= bound if rule == "most" else a / b >= bound
            yield f"{what}: {a / b:.3f}, must be at {rule} {bound}{'' if holds else ': MISSED'}"


def device_report(out, long=False):
    """Run the parts, print each result, and write OUT.json and OUT.md."""
    card = torch.cuda.get_device_name() if GPU else "a CPU, small sizes: no figure means anything"
    title = f"Measured on {card}, torch {torch.__version__}. Llama 3.2 1B, but for 8B."
    head = [title, "", "| part | seconds a step | tokens/s | MFU | GiB at the peak (against the dry"
            " run) | GiB on the host |", "|---|---|---|---|---|---|"]
    figures, table, began = Path(f"{out}.json"), Path(f"{out}.md"), time.monotonic()
    old = read_json(figures)
    results = {part: result for part, result in old.get("parts", {}).items()
               if result["status"] == "done" and old["title"] == title}
    for part, command, limit in report_parts(long):
        left = math.inf if long else BUDGET - (time.monotonic() - began)
        if part not in results:
            results[part] = dict(status="not run: the time was up")
            if left > 20:
                best = results.get("kernels", {}).get("best", {})
                results[part] = report_part(command, min(limit, left), best)
            print(report_row(part, results[part]), flush=True)
            if "seconds" not in results[part]:
                print(results[part].get("output", "")[-1500:], flush=True)
        rows = [report_row(*item) for item in results.items()]
        promises = [f"- {line}" for line in report_promises(results)]
        write_json(figures, dict(title=title, parts=results))
        table.write_text("\n".join([*head, *rows, "", *promises]) + "\n")
    print("\n".join(promises))


def report_part(command, limit, best):
    """Run one part for at most `limit` seconds -> its status, output and figures."""
    command = [best.get(word[4:], "auto") if word.startswith("BEST") else word for word in command]
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder, "figures.json")
        command += ["--json", str(seen)] if command[0] != "-m" else []
        try:
            done = subprocess.run([sys.executable, *command], cwd=HERE, capture_output=True,
                                  text=True, timeout=limit)
            text = (done.stdout + done.stderr).strip()
            status = "done" if done.returncode == 0 else f"exit {done.returncode}"
        except subprocess.TimeoutExpired as late:
            text, status = (late.stdout or b"").decode(), f"stopped after {limit:.0f} s"
        return dict(status=status, output=text[-4000:]) | read_json(seen)


def main(argv, tests):
    if argv == ["--benchmark"]:
        benchmark(tests)
    elif argv[:1] == ["--kernels"]:
        report_kernels(*argv[2:3])  # after --json
    elif argv[:1] == ["--device-report"] and len(argv) > 1:
        device_report(argv[1], long="--long" in argv[2:])
    else:
        sys.exit("usage: pytest test_upipe.py, or python test_upipe.py --benchmark, "
                 "or python test_upipe.py --device-report OUT [--long]")
