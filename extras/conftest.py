"""Fixtures of test_upipe.py that the tests of this folder use too."""
from test_upipe import data, hide_the_gpu, texts, whole  # noqa: F401
