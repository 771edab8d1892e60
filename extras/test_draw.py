"""The pictures of the lesson can be drawn again."""
import pytest

from extras import draw


def test_pictures_come_from_the_code_and_stay_small(tmp_path):
    """Both are drawn, each of at most 150 kB; a rank attends with each of its heads just once."""
    pytest.importorskip("matplotlib")
    for U in 2, 4, 8:
        seen = [head for ranks in draw.held(8, 2, 2, U) for _, heads in ranks for head in heads]
        assert sorted(seen) == list(range(8))
    for name in "stages", "block":
        path = tmp_path / f"{name}.png"
        getattr(draw, f"draw_{name}")(path)
        assert 5_000 < path.stat().st_size <= 150_000
