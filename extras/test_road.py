"""Measured and drawn."""
import gzip
import json

import numpy as np
import pytest

from extras import draw, road
from test_upipe import execute, main, program, records, short, watched


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
    with watched(road, "loss_by_position", lambda found, *_: seen.extend(found)):
        main(1, *short(texts), "--steps", 0, "--loss-by-position", tmp_path / "p.png", "--log", log)
    ends, means = seen
    loss = records(log, "validation_loss")[0]["validation_loss"]
    assert np.mean(means) == pytest.approx(loss, rel=1e-5) and ends == [*range(1, 65)]
