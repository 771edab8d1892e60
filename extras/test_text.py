"""Text through a tokenizer, and text that a model writes."""
import pytest

from extras import text
from test_upipe import (
    ALL, hide_the_gpu, main, short, stop_ranks, texts, whole)  # noqa: F401


def a_tokenizer(folder, texts):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<bos>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train([str(path) for path in sorted(texts.iterdir())], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer, folder / "tokenizer.json"


def test_text_becomes_tokens_once_and_every_file_is_a_document(texts, tmp_path, monkeypatch):
    inner, path = a_tokenizer(tmp_path, texts)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ours, files = text.Tokenizer(path), sorted(texts.iterdir())
    monkeypatch.setattr(text, "pieces", lambda path: iter(path.read_text().splitlines(True)))
    parts = text.tokenize(files, ours)
    for file, part in zip(files, parts, strict=True):
        ids = [inner.encode(line, add_special_tokens=False).ids
               for line in file.read_text().splitlines(True)]
        assert part.tolist() == sum(ids, ours.begin)
        assert ours.decode(part[1:].tolist()) == file.read_text()
    monkeypatch.setattr(text, "write_cache", None)  # it is there: nothing is written again
    again = text.tokenize(files, ours)
    assert [part.tolist() for part in again] == [part.tolist() for part in parts]
    out = main(1, *short(texts, "--ctx", 32), "--tokenizer", path, "--docs", "--steps", 1,
               "--sample", 3)
    assert "done" in out, out


def test_pieces_of_a_text_are_the_text(tmp_path):
    whole = "".join(f"line {i}\r\n" for i in range(200_000)) + "é the end"
    (tmp_path / "a.txt").write_bytes(whole.encode())
    parts = list(text.pieces(tmp_path / "a.txt"))
    assert len(parts) > 1 and "".join(parts) == whole
    assert all(part.endswith("\n") for part in parts[:-1])


def test_a_prompt_that_is_no_text_is_refused_before_the_first_step():
    assert main(1, "--sample", 1, "--prompt", "\udcff").startswith("train.py: --prompt")


def test_a_sample_does_not_depend_on_the_ranks(texts, whole):
    """The prompt grows past the context; the model is one that has learned a little."""
    folder = whole(2, *ALL)
    flags = ["--save", folder / "all", "--resume", "--sample", 70, "--prompt", "abc d"]
    one, two = (main(world, *flags).split("(bigrams", 2)[-1] for world in (1, 2))
    assert one == two and "abc d" in one and len(one.encode()) > 50
