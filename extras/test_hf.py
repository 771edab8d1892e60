"""Weights come in and go out as transformers has them."""
import functools
import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train
from extras.hf import published_name
from test_upipe import hide_the_gpu, main, stop_ranks  # noqa: F401
from upipe import IGNORE

SCALING = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=16)
PUBLISHED_SIZES = dict(vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=8,
                       num_key_value_heads=2, intermediate_size=56, head_dim=6,
                       max_position_embeddings=256, rms_norm_eps=1e-5)
PUBLISHED = {
    "llama": ("Llama", dict(rope_theta=500.0, rope_scaling=SCALING)),
    "llama, tied": ("Llama", dict(rope_scaling=SCALING, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(rope_theta=1000.0)),
    "qwen3, tied": ("Qwen3", dict(tie_word_embeddings=True)),
}


@functools.cache
def published(name, folder, shards=False):
    """A random model as transformers makes it, and the folder it writes."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    kind, more = PUBLISHED[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(**PUBLISHED_SIZES, **more)
    model = getattr(transformers, kind + "ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # its own are so small that attention is flat
            parameter.mul_(5) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    path = Path(folder) / name.replace(", ", "-")
    model.save_pretrained(path, **(dict(max_shard_size="20KB") if shards else {}))
    return model, path


@contextmanager
def loaded(path, *flags):
    """train.py's own way to a model: (model, recipe)."""
    settings = train.make_settings(["--init", str(path), "--ctx", "64", *flags])
    job = train.join(settings)
    try:
        model, optimizer = train.build(settings, job)
        train.load_state(job, settings, model, optimizer, 0)
        yield model, settings.recipe
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weights_give_the_logits_and_gradients_that_transformers_gives(name, tmp_path):
    """One file or several; float32 on both sides."""
    theirs, path = published(name, tmp_path, shards=True)
    tokens = torch.tensor(np.random.default_rng(1).integers(97, size=50))
    labels = torch.cat((tokens[1:], torch.tensor([IGNORE])))
    expected = theirs(tokens[None]).logits[0]
    torch.nn.functional.cross_entropy(expected[:-1], tokens[1:]).backward()
    with loaded(path) as (model, recipe):
        logits = model.logits(tokens, recipe).detach()
        model(tokens, labels, recipe).backward()
        grads = {published_name(n): p.grad.full_tensor() for n, p in model.named_parameters()}
    assert expected.std() > 0.5
    assert (logits - expected).abs().max() < 1e-4
    named = {n: p.grad for n, p in theirs.named_parameters()}
    assert grads.keys() == named.keys()
    for n, grad in named.items():
        assert grad.norm() > 1e-4 and (grads[n] - grad).norm() < 1e-4 * grad.norm(), n


@pytest.mark.parametrize("name", ["llama, tied", "qwen3"])
def test_an_exported_model_is_in_transformers_what_was_loaded_on_two_ranks(name, tmp_path):
    """Bit for bit, tied or not, though no dimension divides by the ranks; tokenizer and all."""
    theirs, path = published(name, tmp_path)
    (path / "tokenizer_config.json").write_text("{}")
    np.save(tmp_path / "ids.npy", np.arange(600) % 97)
    out = main(2, "--init", path, "--data", tmp_path / "ids.npy", "--ctx", 64, "--steps", 0,
               "--export", tmp_path / "out", "--heads-per-stage", 4)
    assert "export" in out, out
    import transformers
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(60)[None]
    assert torch.equal(back.eval()(tokens).logits, theirs(tokens).logits)
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    assert not (tmp_path / "out" / "sharded").exists()
    with loaded(tmp_path / "out") as (model, recipe):
        assert (model.logits(tokens[0], recipe) - theirs(tokens).logits[0]).abs().max() < 1e-4


def spoilt(path, **config):
    """The folder, with other words in config.json; `...` takes one out."""
    c = json.loads((path / "config.json").read_text()) | config
    c = {key: value for key, value in c.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(c))


MISFITS = {
    "architecture": (dict(architectures=["GPT2LMHeadModel"]),
                     "GPT2LMHeadModel", "LlamaForCausalLM"),
    "bias": (dict(attention_bias=True), "attention_bias"),
    "rotary scaling": (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0)),
                       "yarn"),
    "missing number": (dict(intermediate_size=...), "intermediate_size"),
    "wrong shape": (dict(intermediate_size=60),
                    "model.layers.0.mlp.down_proj.weight", "[48, 56]", "[48, 60]"),
    "missing tensor": (dict(num_hidden_layers=3),
                       "model.layers.2.input_layernorm.weight", "missing"),
    "extra tensor": (dict(num_hidden_layers=1),
                     "model.layers.1.input_layernorm.weight", "no place"),
    "heads of another model": (dict(architectures=["Qwen3ForCausalLM"]),
                               "model.layers.0.self_attn.k_norm.weight"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_folder_that_does_not_fit_is_refused_by_name(name, tmp_path):
    """Before anything is trained."""
    change, *said = MISFITS[name]
    _, path = published("llama", tmp_path)
    spoilt(path, **change)
    with pytest.raises(train.BadInput) as refusal, loaded(path):
        pass
    assert all(word in str(refusal.value) for word in said), refusal.value
    assert "\n" not in str(refusal.value)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    pytest.importorskip("safetensors")
    assert "config.json" in main(1, "--init", tmp_path)
    assert "--model" in main(1, "--init", tmp_path, "--model", "tiny")


def test_a_context_beyond_the_trained_positions_is_noticed_and_rope_theta_answers(tmp_path):
    _, path = published("llama", tmp_path)
    np.save(tmp_path / "ids.npy", np.arange(6000) % 97)
    flags = ["--init", path, "--data", tmp_path / "ids.npy", "--steps", 0, "--ctx"]
    assert "beyond the 256 positions" in main(1, *flags, 300)
    assert "notice" not in main(1, *flags, 256) + main(1, *flags, 300, "--rope-theta", 5e5)
    settings = train.make_settings([*map(str, flags), "300", "--rope-theta", "5e5"])
    assert settings.config.rope_theta == 5e5
