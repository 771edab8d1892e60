"""Measured, drawn and reported."""
import gzip
import json
import subprocess

import numpy as np
import pytest

import train
from extras import draw, memory, report, road
from test_upipe import execute, main, pretend_cuda, program, records, short, watched


def test_one_rank_of_many_needs_what_the_dry_run_says(tmp_path):
    """Measured alone, one rank of 4 (more than there are kv heads) holds what is simulated."""
    seen = tmp_path / "one.json"
    execute(*program(["--one-rank-of", "4", "--ctx", "2k", "--layers", "2", "--checkpoint", "2",
                      "--offload", "--json", seen]))
    figures = json.loads(seen.read_text())
    assert figures["device_bytes"] == pytest.approx(figures["simulated_device_bytes"], rel=0.02)
    assert figures["host_bytes"] == figures["simulated_host_bytes"]


@pytest.mark.parametrize("name", ["stages", "block"])
def test_pictures_come_from_the_code_and_stay_small(name, tmp_path):
    """The lesson's are drawn again, each of at most 150 kB."""
    pytest.importorskip("matplotlib")
    getattr(draw, f"draw_{name}")(tmp_path / "p.png")
    assert 5_000 < (tmp_path / "p.png").stat().st_size <= 150_000


def test_a_trace_names_what_happens_and_a_picture_shows_the_position(texts, tmp_path):
    pytest.importorskip("matplotlib")
    out = main(2, *short(texts), "--steps", 3, "--profile", tmp_path / "trace",
               "--loss-by-position", tmp_path / "p.png", "--sample", 4, "--prompt", "ab")
    assert "position" in out and (tmp_path / "p.png").stat().st_size > 1000
    for rank in range(2):
        trace = json.loads(gzip.open(tmp_path / "trace" / f"rank{rank}.json.gz").read())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"block 0", "block 1", "stage", "all-to-all", "tile"} <= names


def test_the_mean_loss_by_position_is_the_validation_loss(texts, tmp_path):
    pytest.importorskip("matplotlib")
    log, seen = tmp_path / "log", []
    with watched(road, "show_by_position", lambda found, *_: seen.extend(found)):
        main(1, *short(texts), "--steps", 0, "--loss-by-position", tmp_path / "p.png", "--log", log)
    ends, means = seen
    loss = records(log, "validation_loss")[0]["validation_loss"]
    assert np.mean(means) == pytest.approx(loss, rel=1e-5) and ends == [*range(1, 65)]


def test_every_part_of_the_device_report_runs_small(tmp_path, monkeypatch, capsys):
    """What a GPU will be asked is tried here: parts, rows, promises and files."""
    few = [part for part in report.report_parts(long=False) if part[0] == "kernels"
           or part[0].startswith(("1k, u = 1", "1k, attention twice"))]
    monkeypatch.setattr(report, "report_parts", lambda long: few)
    report.device_report(tmp_path / "report")
    results = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert len(results) == 3 and all(result["status"] == "done" for result in results.values())
    text = (tmp_path / "report.md").read_text()
    for promise in ("attention twice / kept", "kernel alone: ", "peaks: 0.000"):
        assert promise in text
    assert "right, forward and backward" in capsys.readouterr().out
    monkeypatch.setattr(subprocess, "run", None)  # a second report finds all of it done
    report.device_report(tmp_path / "report")
    assert (tmp_path / "report.md").read_text() == text


def test_the_parts_for_a_gpu_are_legal_and_fit_it(monkeypatch):
    """Flags, kernel indices and, by the dry run, memory: none is refused on a card of 80 GB."""
    with monkeypatch.context() as patch:
        pretend_cuda(patch, (9, 0))
        patch.setattr(report, "GPU", True)
        patch.setattr(report, "HEAD_SIZES", (64, 128))
        jobs = []
        for name, command, _ in report.report_parts(long=True):
            if command[0] == "train.py":
                flags = ["torch" if word.startswith("BEST") else word for word in command[1:]]
                jobs.append((name, train.make_settings([*flags, "--host-mem", "64"])))
    assert len(jobs) == 13
    for name, settings in jobs:
        if settings.ctx >= 2**20:
            share, text = memory.verdict(settings, memory.plan_memory(settings))
            assert share <= 1, f"{name}: {text}"
