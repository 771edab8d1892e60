"""Measured and drawn."""
import gzip
import io
import json
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch.distributed as dist

import train
from extras.road import loss_by_position
from test_upipe import execute, main, program, short


def test_one_rank_of_many_needs_what_the_dry_run_says(tmp_path):
    """Measured alone, one rank of 4 (more than there are kv heads) holds what is simulated."""
    seen = tmp_path / "one.json"
    execute(*program(["--one-rank-of", "4", "--ctx", "2k", "--layers", "2", "--checkpoint", "2",
                      "--offload", "--json", seen]))
    figures = json.loads(seen.read_text())
    assert figures["device_bytes"] == pytest.approx(figures["simulated_device_bytes"], rel=0.02)
    assert figures["host_bytes"] == figures["simulated_host_bytes"]


def test_a_trace_names_what_happens_and_a_picture_shows_the_position(texts, tmp_path):
    pytest.importorskip("matplotlib")
    out = main(2, *short(texts), "--steps", 3, "--profile", tmp_path / "trace",
               "--loss-by-position", tmp_path / "p.png", "--sample", 4, "--prompt", "ab")
    assert "position" in out and (tmp_path / "p.png").stat().st_size > 1000
    for rank in range(2):
        trace = json.loads(gzip.open(tmp_path / "trace" / f"rank{rank}.json.gz").read())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"block 0", "block 1", "stage", "all-to-all", "tile"} <= names


def test_the_mean_loss_by_position_is_the_validation_loss(texts):
    settings = train.make_settings(list(map(str, short(texts, "--ctx", 64))))
    job = train.join(settings)
    try:
        with redirect_stdout(io.StringIO()):
            data = train.find_data(job, settings)
        model, _ = train.build(settings, job)
        batch, _ = train.read_windows(job, data.valid, data.held_out, settings)
        ends, means = loss_by_position(job, model, batch, settings, buckets=8)
        loss = train.evaluate(job, model, data, settings)
        assert np.mean(means) == pytest.approx(loss, rel=1e-5)
        assert ends == [8 * i for i in range(1, 9)]
    finally:
        dist.destroy_process_group()
