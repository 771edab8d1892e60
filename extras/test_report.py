"""The report on a device: its parts run, are legal and fit."""
import json
import subprocess

import train
from extras import memory, report
from test_upipe import pretend_cuda


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
