"""Text through a tokenizer, and text that a model writes."""
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import train
from extras import text
from extras.hf import make_config
from test_upipe import ALL, main, short

tokenizers = pytest.importorskip("tokenizers")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # a space, as SentencePiece writes it
pre, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
KINDS = {  # the pre-tokenizers that models have
    "gpt2": pre.ByteLevel(add_prefix_space=False),
    "gpt2 with a space": pre.ByteLevel(add_prefix_space=True),
    "llama3": pre.Sequence([pre.Split(tokenizers.Regex(LLAMA3), "isolated"),
                            pre.ByteLevel(add_prefix_space=False, use_regex=False)]),
    "first": pre.Metaspace(prepend_scheme="first", split=False),
    "always": pre.Metaspace(prepend_scheme="always", split=False),
    "llama2": None}  # it has a normalizer
WORDS = "the fox's tail, 12345 dogs; f(x) = {a.b: [1, 2]} été 日本"


def make_tokenizer(path, kind, template="<s> $A"):
    """A small tokenizer.json of a kind that models have."""
    marks, special = kind in ("first", "always", "llama2"), ["<unk>", "<s>", "</s>"]
    model = dict(byte_fallback=True, unk_token="<unk>") if marks else {}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    inner.pre_tokenizer = pre.Metaspace() if marks else pre.ByteLevel(add_prefix_space=False)
    inner.train_from_iterator([f"{WORDS} quick brown lazy"] * 40, tokenizers.trainers.BpeTrainer(
        vocab_size=700, show_progress=False,
        initial_alphabet=[] if marks else pre.ByteLevel.alphabet(),
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)] * marks))
    inner.pre_tokenizer, inner.decoder = KINDS[kind], decoders.ByteLevel()
    if marks:
        inner.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    if kind == "llama2":
        normalizers = tokenizers.normalizers
        inner.normalizer = normalizers.Sequence([normalizers.Prepend(MARK),
                                                 normalizers.Replace(" ", MARK)])
    if template:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    inner.enable_truncation(9)
    spec = json.loads(inner.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]
    path.write_text(json.dumps(spec))
    return text.Tokenizer(path)


def tokens_of(paths, tokenizer):
    """tokenize()'s ids, one list per text."""
    cache, dtype, ends = text.tokenize(paths, tokenizer)
    return [np.fromfile(cache, dtype)[a:b].tolist() for a, b in zip([0, *ends], ends)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "upipe"


AWKWARD = {  # name: text
    "no newline": f"{WORDS} " * 20, "lines": f"{WORDS}\n" * 20, "CRLF": f"{WORDS}\r\n\r\n" * 20,
    "many spaces": "x        y .        z         " * 9, "tabs": "é1\tß\t\tx\n\n\n" * 30,
    "indented": "if x:\n        y()\n\n" * 30, "space first": f" {WORDS}" * 20,
    "code": "f(x).the=lazy;g[1,23]" * 20, "no cut": "brownlazy" * 60, "wide": "日本été" * 60,
    "only spaces": " " * 300}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_pieces_has_the_tokens_of_the_whole(kind, tmp_path, monkeypatch):
    """N12: bounded pieces; equal tokens where a cut is possible; the text itself always."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json", kind)
    monkeypatch.setattr(text, "PIECE", 50)
    for name, written in AWKWARD.items():
        exact = name not in ("code", "no cut", "wide", "only spaces")
        path = tmp_path / f"{name}.txt"
        path.write_bytes(written.encode())
        parts = [part for part, _, _ in text.pieces(path)]
        assert "".join(parts) == written and max(map(len, parts)) <= 100 and len(parts) > 3, name
        (ids,) = tokens_of([path], tokenizer)
        expected = tokenizer.encode(written)
        assert ids[0] == 1 and (ids == expected or not exact), (name, kind)
        assert tokenizer.decode(ids[1:]) == tokenizer.decode(expected[1:]), (name, kind)
        assert kind.startswith("gpt2 ") or tokenizer.decode(ids[1:]).strip() == written.strip()


@pytest.mark.parametrize("template, file, said, before, after", [
    ("<s> $A", "tokenizer_config", {"eos_token": "</s>"}, [1], []),
    ("<s> $A </s>", "config", {}, [1], [2]), ("$A </s>", "config", {}, [], [2]),
    (None, "tokenizer_config", {"eos_token": {"content": "</s>"}}, [], [2]),
    (None, "generation_config", {"eos_token_id": [2, 1]}, [], [2]),
    (None, "config", {"eos_token_id": 2}, [], [2]),
    (None, "config", {"eos_token_id": 99999}, [], [])])
def test_documents_stand_between_the_tokens_of_the_template(
        template, file, said, before, after, tmp_path, monkeypatch, texts):
    """Or, where nothing comes first, before the model's end of a text; a prompt has no end. An
    exported model names both."""
    (tmp_path / f"{file}.json").write_text(json.dumps(said))
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json", "gpt2", template)
    config = make_config(train.make_settings(["--tokenizer", str(tmp_path / "tokenizer.json")]))
    assert [config["bos_token_id"]] == (before or [None])
    assert [config["eos_token_id"]] == (after or [None])
    monkeypatch.setattr(text, "PIECE", 50)
    found = tokens_of(sorted(texts.iterdir()), tokenizer)
    for path, ids in zip(sorted(texts.iterdir()), found, strict=True):
        assert ids == before + tokenizer.inner.encode(
            path.read_text(), add_special_tokens=False).ids + after
    assert tokenizer.encode("abc")[:len(before) + 1] == before + tokenizer.encode("a")[-1:]
    if after and "eos_token_id" not in said:
        return  # the two others go through the whole program
    out = main(1, *short(texts, "--ctx", 32), "--tokenizer", tmp_path / "tokenizer.json",
               "--docs", "--steps", 1, "--sample", 3)
    assert "done" in out and (out.count("which token ends a text") == (not before + after)), out


def test_a_cache_is_written_once_and_by_nobody_in_part(texts, tmp_path, cache, monkeypatch):
    """11: two writers at once; one that fails; a cache that was cut off, or is of other files."""
    tokenizer, paths = make_tokenizer(tmp_path / "tokenizer.json", "gpt2"), sorted(texts.iterdir())
    encode, both = text.Tokenizer.encode_all, threading.Barrier(2)

    def slow(self, batch):
        both.wait(10)
        return encode(self, batch)
    monkeypatch.setattr(text.Tokenizer, "encode_all", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(tokens_of, [paths] * 2, [tokenizer] * 2)
    assert first == second and len(first) == 12
    (file,) = cache.iterdir()
    monkeypatch.setattr(text.Tokenizer, "encode_all", None)  # it is there: nothing is written again
    assert tokens_of(paths, tokenizer) == first
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(TypeError):
        tokens_of(paths, tokenizer)
    assert list(cache.iterdir()) == [file]
    monkeypatch.setattr(text.Tokenizer, "encode_all", encode)
    assert tokens_of(paths, tokenizer) == first


def test_a_prompt_that_is_no_text_is_refused_before_the_first_step():
    assert "train.py: --prompt" in main(1, "--sample", 1, "--prompt", "\udcff")


def test_a_sample_does_not_depend_on_the_ranks(texts, tmp_path):
    """The prompt grows past the context; the model is one that has learned a little."""
    saved = ["--save", tmp_path / "run"]
    main(2, *short(texts, *ALL, "--ctx", 32), "--steps", 5, *saved)
    flags = [*saved, "--resume", "--sample", 40, "--prompt", "abc d"]
    one, two = (main(world, *flags).split("(bigrams", 2)[-1] for world in (1, 2))
    assert one == two and "abc d" in one and len(one.encode()) > 40
