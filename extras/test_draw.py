"""The pictures of the lesson can be drawn again."""
import pytest

from extras import draw


def test_pictures_come_from_the_code_and_stay_small(tmp_path):
    """Both are drawn, each of at most 150 kB."""
    pytest.importorskip("matplotlib")
    for name in "stages", "block":
        path = tmp_path / f"{name}.png"
        getattr(draw, f"draw_{name}")(path)
        assert 5_000 < path.stat().st_size <= 150_000
