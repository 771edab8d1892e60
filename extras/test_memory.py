"""The dry run tells what a real step holds."""
import json
import math
import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import train
import upipe
from extras import GIB, machine, memory
from extras.road import ROAD, rows_of_road
from test_upipe import RANKS
from upipe import GPTConfig

WATCHED = {2: GPTConfig(vocab_size=128, dim=64, n_layers=3, n_heads=8, n_kv_heads=2, head_dim=8,
                        ffn_dim=160)}
WATCHED[1] = replace(WATCHED[2], n_layers=2, qk_norm=True)
WATCHED[4] = replace(WATCHED[2], n_kv_heads=8, head_dim=16, tie_embeddings=True)


def dry(flags):
    """Settings as train.py makes them of its flags."""
    return train.make_settings(["--dry-run", *flags.split()])


def rank_watched_step(settings, whole):
    job = settings.meet(torch.device("cpu"), whole)
    report = memory.report_of(memory.metered_step(settings, job))
    return report.device, report.host, set(report.kinds)


@pytest.mark.parametrize("world, cp, row", [
    *((C, C, name) for C in (2, 4) for name in (*dict(ROAD), "+ ring")),
    (2, 1, "+ tiling"), (2, 1, "+ keep_attention")])
def test_the_dry_run_tells_what_a_real_step_holds(world, cp, row):
    """Simulated and measured peak agree within 2 %, host bytes to the byte, on every row; and no
    tensor's kind is unknown. Of a ring, it is the member with the highest peak."""
    flags = "--device cpu --model tiny --ctx 600 --tile 64 --dtype float32 --stream --offload "
    flags += f"--world {world} --cp {cp} --ring {2 if row == '+ ring' else 1}"
    rows = rows_of_road(replace(dry(flags), config=WATCHED[cp]))
    settings, whole = next((here, whole) for name, here, whole in rows if name == row)
    simulated = memory.report_of(memory.simulate(
        replace(settings, world=1) if whole else settings))
    ranks = RANKS[world](rank_watched_step, settings, whole)
    assert max(device for device, *_ in ranks) == pytest.approx(simulated.device, rel=0.02)
    for device, host, kinds in ranks:
        assert device == pytest.approx(simulated.device, rel=0.1 if row == "+ ring" else 0.02)
        assert host == simulated.host
        assert not [kind for kind in kinds if kind.startswith("unknown")]
    assert simulated.host > 0 or not settings.recipe.offload


def rank_late_holders():
    """How often an all-to-all's tensors were counted after their caller had let go of them."""
    late = 0
    with memory.Meter(upipe.GPT(WATCHED[2])) as meter:
        for _ in range(300):
            x = torch.ones(2**14)
            dist.all_to_all_single(torch.empty_like(x), x)
            del x
            late += meter.device_bytes(meter.kinds) > 0
    return late


def test_gloo_holds_no_tensor_that_its_caller_has_let_go():
    """Else the figures would depend on how busy the machine is."""
    assert RANKS[2](rank_late_holders) == [0, 0]


@pytest.mark.parametrize("flags", ["--checkpoint 1", "--checkpoint 2 --cp 2",
                                   "--checkpoint 0 --attention ulysses --tile 0"])
def test_two_short_models_tell_what_six_layers_need(flags):
    """The extension to all layers agrees with a simulation of them all within 1 %, part by part."""
    settings = dry(f"--model llama3.2-1b --layers 6 --ctx 16k --world 4 {flags}")
    short, full = (memory.plan_memory(settings, full) for full in (False, True))
    assert short.device == pytest.approx(full.device, rel=0.01)
    assert short.host == pytest.approx(full.host, rel=0.01)
    assert sum(short.kinds.values()) == pytest.approx(short.device, rel=0.01)


def test_skipping_the_tiles_between_changes_no_figure():
    """A simulation of three tiles of each walk peaks where one of all tiles does."""
    settings = dry("--model llama3.2-1b --layers 2 --ctx 24k --world 2 --heads-per-stage 8")
    few, all_of_them = (memory.report_of(memory.simulate(settings, pages=pages))
                        for pages in (memory.abridged, nullcontext))
    assert (few.device, few.host) == (all_of_them.device, all_of_them.host)


@pytest.mark.parametrize("flags, device, host", [  # GiB at most
    ("--ctx 5m --keep-attention", 44, 323), ("--ctx 5m --checkpoint 4", 44, 84),
    ("--ctx 8m --checkpoint 1", 60, math.inf),
    ("--ctx 12m --checkpoint 4 --offload-params", 77, 2000 / 8),
    ("--ctx 2m --checkpoint 4 --offload-params --world 1 --heads-per-stage 4", 77, 1000),
    ("--ctx 6m --model qwen3-32b --world 16 --checkpoint 1 --no-keep-attention", 77, 2000 / 8)])
def test_memory_at_millions_of_tokens_stays_within_its_bounds(flags, device, host):
    """What the README promises of eight and sixteen 80 GB GPUs, and of one."""
    report = memory.plan_memory(dry(flags))
    assert report.device <= device * GIB and report.host <= host * GIB


def test_the_dry_run_sees_one_tensor_too_many(monkeypatch):
    """If a block's backward pass held one more [s, D], the plan would grow by just that."""
    settings = dry("--ctx 5m --checkpoint 1")
    before = memory.plan_memory(settings).device
    lean = upipe.attention_backward

    def wasteful(x, o, *rest):
        held = torch.empty_like(o)
        return lean(x, o, *rest), held
    monkeypatch.setattr(upipe, "attention_backward", lambda *args: wasteful(*args)[0])
    after = memory.plan_memory(settings).device
    assert after - before == settings.ctx // 8 * settings.config.dim * 2


def test_a_dry_run_touches_no_network_and_no_device(monkeypatch):
    """It opens no socket, asks for no real backend and no GPU, and leaves no process group."""
    def refuse(*_, **__):
        raise AssertionError("a dry run reached out")
    monkeypatch.setattr(dist, "TCPStore", refuse)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    monkeypatch.setattr(dist, "ProcessGroupGloo", refuse)
    memory.plan_memory(dry("--model llama3.2-1b --ctx 16k --world 4"))
    assert not dist.is_initialized()


@pytest.mark.parametrize("flags, fits, said", [
    ("--gpu-mem 2", False, "0.0 usable of 2: does not fit"),
    ("--gpu-mem 3", False, "0.0 usable of 3: does not fit"),
    ("--gpu-mem 3 --max-ctx", False, "not even --ctx 64k fits"),
    ("--gpu-mem 6.5", True, "3.5 usable of 6.5: fits"),
    ("--gpus-per-node 3 --host-mem 0.3", True, "0.2 a node of 3, 0.3 usable of 0.3: fits"),
    ("--gpus-per-node 4 --host-mem 0.25", False, "0.2 usable of 0.25: does not fit"),
    ("--device cpu --world 2 --host-mem 10", False, "4.8 usable of 5: does not fit"),
    # keep_attention would fit, were it not for the weights
    ("--layers 16 --ctx 1408k --offload-params --host-mem 200", True, "usable of 200: fits")])
def test_a_card_below_its_reserve_and_a_full_host_fit_nothing(flags, fits, said, capsys, tmp_path):
    """N1: and the program says so with its exit status, and in --json with the bytes by kind."""
    settings = dry(f"--model llama3.2-1b --layers 2 --ctx 32k --json {tmp_path / 'f'} {flags}")
    assert train.main(settings) == int(not fits)
    assert said in capsys.readouterr().out
    if said != "not even --ctx 64k fits":
        figures = json.loads((tmp_path / "f").read_text())
        assert figures["fits"] == fits and said[:-4] in figures["verdict"] and figures["where"]
        assert figures["recipe"]["checkpoint"] == settings.recipe.checkpoint
        assert (figures["host_bytes"] > 0) == settings.recipe.offload
        device = sum(figures["bytes_by_kind"].values())
        assert device == pytest.approx(figures["device_bytes"], rel=0.01)


CGROUPS = {  # files under /: bytes and, of 64, cores that they allow
    "version 2": ({"proc/self/cgroup": "0::/job/a\n", "sys/fs/cgroup/job/memory.max": "4096\n",
                   "sys/fs/cgroup/job/a/memory.max": "max\n",
                   "sys/fs/cgroup/job/a/cpu.max": "150000 100000\n"}, 4096, 1),
    "version 1": ({"proc/self/cgroup": "4:memory:/out/side\n1:cpu,cpuacct:/x\n",
                   "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192\n",
                   "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000\n",
                   "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, 8192, 1),
    "no limit": ({"proc/self/cgroup": "4:memory:/\n1:cpu:/\n0::/\n",
                  "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n",
                  "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                  "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                  "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 2**63 - 4096, 64),
    "no cgroup": ({}, math.inf, 64)}


@pytest.mark.parametrize("case", CGROUPS)
def test_memory_and_cores_are_those_of_the_container(case, tmp_path, monkeypatch):
    """N9: the smaller of the machine's and the job's; without any, and without sched_getaffinity
    and sysconf, as on other systems, what there is. OMP_NUM_THREADS above 1 stays: torchrun itself
    says 1."""
    files, memory_limit, cores = CGROUPS[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    none = tmp_path / "none"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert machine.memory_here(tmp_path) == min(memory_limit, machine.memory_here(none))
    assert machine.cores_here(tmp_path) == cores
    for asked, threads in (("1", max(1, cores // 2)), ("3", 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        monkeypatch.setattr(torch, "get_num_threads", lambda: int(asked))
        assert machine.threads_here(2, tmp_path) == threads
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "sysconf", raising=False)
    assert machine.memory_here(tmp_path) == memory_limit
    assert machine.cores_here(none) == os.cpu_count()


def test_the_longest_context_is_the_last_that_fits():
    """--max-ctx ends between a context that fits and one, 64k longer, that does not."""
    settings = dry("--model llama3.2-1b --layers 2 --world 2 --gpu-mem 24 --max-ctx --checkpoint 1 "
                   "--heads-per-stage 32")
    longest, report = memory.longest_context(settings)
    assert report.device <= 21 * GIB and longest.ctx % 65536 == 0
    more = memory.plan_memory(longest.at(ctx=longest.ctx + 65536))
    assert more.device > 21 * GIB


@pytest.mark.parametrize("flags, word", [
    ("--ctx 5M --model tiny", "on this CPU"),
    ("--ctx 4 --model llama3-70b --attention ulysses", "GiB")])
def test_what_cannot_fit_or_end_is_refused_with_what_would(flags, word):
    """Before the run, by the dry run and by the clock; --force runs it all the same."""
    settings = train.make_settings(flags.split())
    said = memory.too_much(settings)
    assert word in said and "--ctx" in said and "--force" in said
    assert memory.too_much(replace(settings, force=True)) is None


@pytest.mark.parametrize("flags, hint", [
    ("", "try --offload"), ("--offload", "try --stream"),
    ("--offload --stream", "try more GPUs, or a shorter --ctx")])
def test_a_full_gpu_is_told_a_switch_that_is_still_off(flags, hint):
    """The hint knows the recipe that ran: its defaults too, which depend on the machine."""
    assert memory.out_of_memory(train.make_settings(flags.split())).endswith(hint)
