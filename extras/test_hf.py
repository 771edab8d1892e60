"""Weights come in and go out as transformers has them."""
import json
import os
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train
from extras.hf import find_weights, make_config, published_name, read_config
from test_upipe import assert_grads, gradients, main
from upipe import IGNORE, PRESETS

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
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


def published(name, path, **how):
    """A random model as transformers makes it; the folder that it writes."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    kind, more = PUBLISHED[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(**PUBLISHED_SIZES, **more)
    model = getattr(transformers, kind + "ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # its own are so small that attention is flat
            parameter.mul_(5) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path, **how)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "llama"
    published("llama", path)
    return path


def config_of(path):
    return json.loads((path / "config.json").read_text())


def write(path, **config):
    """Other words in the folder's config.json; `...` takes one out."""
    c = {key: value for key, value in (config_of(path) | config).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(c))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weights_give_what_transformers_gives_and_go_back_as_they_came(name, tmp_path):
    """Logits and gradients, from one file or several, float32 on both sides. Exported by two ranks,
    they are the same bits, though no dimension divides by the ranks; the stop tokens, the
    positions, the tokenizer and the chat template are those of the source."""
    path, out = tmp_path / "in", tmp_path / "out"
    theirs = published(name, path, **(dict(max_shard_size="20KB") if "tied" in name else {}))
    write(path, eos_token_id=[5, 7], bos_token_id=3, max_position_embeddings=512)
    kept = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja", "vocab.json",
            "tokenizer.model", "additional_chat_templates/tools.jinja")
    for file in kept:
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).write_text("{}")
    tokens = torch.tensor(np.random.default_rng(1).integers(97, size=600))
    np.save(tmp_path / "ids.npy", tokens)
    said = main(2, "--init", path, "--data", tmp_path / "ids.npy", "--ctx", 64, "--steps", 0,
                "--export", out, "--heads-per-stage", 4)
    assert "export" in said, said
    import transformers
    back = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = tokens[:50]
    expected = theirs(tokens[None]).logits[0]
    assert torch.equal(back.eval()(tokens[None]).logits[0], expected)
    assert config_of(out) == config_of(path) and all((out / file).exists() for file in kept)
    assert not (out / "sharded").exists()
    torch.nn.functional.cross_entropy(expected[:-1], tokens[1:]).backward()
    settings = train.make_settings(["--init", str(path), "--ctx", "64", "--tokenizer", "bytes"])
    job = train.join(settings)
    model, optimizer = train.build(settings, job)
    train.load_state(job, settings, model, optimizer, 0)
    logits = model.logits(tokens, settings.recipe).detach()
    model(tokens, torch.cat((tokens[1:], torch.tensor([IGNORE]))), settings.recipe).backward()
    grads = {published_name(n): grad for n, grad in gradients(model).items()}
    dist.destroy_process_group()
    assert expected.std() > 0.5 and (logits - expected).abs().max() < 1e-4
    assert_grads(grads, {n: p.grad for n, p in theirs.named_parameters()}, 1e-4)


def test_an_export_changes_in_the_config_what_the_run_changed(llama):
    """The type, the rotary base, and positions, but only upwards."""
    for ctx, positions in ((64, 256), (1024, 1024)):
        settings = train.make_settings(
            ["--init", str(llama), "--ctx", str(ctx), "--dtype", "bfloat16", "--rope-theta", "7"])
        expected = config_of(llama)
        expected["rope_parameters"]["rope_theta"] = 7.0
        assert make_config(settings) == expected | dict(dtype="bfloat16",
                                                        max_position_embeddings=positions)


def test_a_model_of_our_own_is_exported_with_a_config_of_our_own(tmp_path):
    """It names no stop token: transformers would take 2 for one where the file is silent."""
    transformers = pytest.importorskip("transformers")
    assert "export" in main(1, "--steps", 0, "--ctx", 64, "--export", tmp_path / "out",
                            "--eval-windows", 1)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id) == (None, None)
    assert config.max_position_embeddings == 64 and str(config.dtype) == "torch.float32"
    assert read_config(tmp_path / "out") == PRESETS["tiny"]


RELEASED = dict(  # as they were published, but for keys that say nothing
    attention_bias=False, attention_dropout=0.0, bos_token_id=128000, eos_token_id=[128001, 128009],
    hidden_act="silu", initializer_range=0.02, torch_dtype="bfloat16", use_cache=True)
RELEASES = {
    "llama3.2-1b": RELEASED | dict(
        architectures=["LlamaForCausalLM"], model_type="llama", mlp_bias=False, pretraining_tp=1,
        hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_hidden_layers=16,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-05,
        rope_theta=500000.0, tie_word_embeddings=True, vocab_size=128256, rope_scaling=dict(
            factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, rope_type="llama3",
            original_max_position_embeddings=8192)),
    "qwen3-32b": RELEASED | dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=128, hidden_size=5120,
        intermediate_size=25600, max_position_embeddings=40960, max_window_layers=64,
        num_attention_heads=64, num_hidden_layers=64, num_key_value_heads=8, rms_norm_eps=1e-06,
        rope_scaling=None, rope_theta=1000000, sliding_window=None, use_sliding_window=False,
        tie_word_embeddings=False, vocab_size=151936),
}


@pytest.mark.parametrize("name", RELEASES)
def test_released_configs_are_the_models_that_go_by_their_names(name, tmp_path):
    """In the words of transformers 4 and in those of 5."""
    (tmp_path / "config.json").write_text(json.dumps(RELEASES[name]))
    assert read_config(tmp_path) == PRESETS[name]
    scaling = RELEASES[name]["rope_scaling"] or dict(rope_type="default")
    write(tmp_path, rope_theta=..., rope_scaling=...,
          rope_parameters=scaling | dict(rope_theta=RELEASES[name]["rope_theta"]))
    assert read_config(tmp_path) == PRESETS[name]


def test_the_index_decides_which_tensors_are_read(tmp_path):
    """Not others of the same name, in a file that it lists or in one that it does not, which may
    be damaged; nor are rotary tables. What is left out is told."""
    published("llama", tmp_path, max_shard_size="20KB")  # skips without safetensors
    from safetensors.torch import load_file, save_file
    listed = json.loads((tmp_path / INDEX).read_text())
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    stale = load_file(first)
    save_file(stale, tmp_path / FILE)
    (tmp_path / "zz.safetensors").write_text("")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    save_file(load_file(second) | stale | table, second)
    listed["weight_map"] |= dict.fromkeys(table, second.name)
    (tmp_path / INDEX).write_text(json.dumps(listed))
    files, notices = find_weights(tmp_path, read_config(tmp_path))
    assert {name: file.name for name, file in files.items()} | dict.fromkeys(
        table, second.name) == listed["weight_map"]
    assert [notice.split(" is not")[0].split("/")[-1] for notice in notices] == [
        "rotary_emb.inv_freq", FILE, "zz.safetensors"]


def holds(text, file=FILE):
    return lambda path: (path / file).write_text(text)


def rope(**more):
    return dict(rope_parameters={**SCALING, "rope_theta": 500.0, **more})


NOT_COMPUTED = (
    "attention_bias mlp_bias attention_dropout hidden_act use_sliding_window sliding_window "
    "is_causal per_layer_config partial_rotary_factor quantization_config auto_map logits_scaling "
    "use_qk_norm").split()  # the last two: of relatives
MISFITS = [  # what is wrong with a folder: words for config.json, or a function; what is said
    *(({key: 0.5}, f"{key}=0.5") for key in NOT_COMPUTED),
    (dict(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel", "LlamaForCausalLM"),
    (dict(architectures=...), "LlamaForCausalLM"), (dict(model_type="mistral"), "mistral"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    (rope(partial_rotary_factor=0.5), "partial_rotary_factor"), (rope(rope_type="yarn"), "yarn"),
    (dict(rope_parameters=dict(full_attention=SCALING)), "full_attention"),  # others elsewhere
    (rope(rope_theta="500"), "rope_theta", "'500'"), (dict(rope_scaling=[8.0]), "rope_scaling"),
    *((rope(**{key: None}), key, "missing")
      for key in ("rope_theta", *SCALING) if key != "rope_type"),
    (rope(low_freq_factor=4.0), "low_freq_factor"),
    (dict(intermediate_size=...), "intermediate_size", "missing"),
    (dict(vocab_size="300"), "vocab_size='300'"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps=nan"),
    (dict(max_position_embeddings="8k"), "max_position_embeddings='8k'"),
    (dict(tie_word_embeddings="no"), "tie_word_embeddings='no'"),
    (lambda path: (path / "config.json").unlink(), "config.json"),
    (holds("[]", "config.json"), "config.json", "list"), (holds("{", "config.json"), "config.json"),
    (dict(intermediate_size=60), "model.layers.0.mlp.down_proj.weight", "[48, 56]", "[48, 60]"),
    (dict(num_hidden_layers=3), "layers.2.input_layernorm.weight", "missing"),
    (dict(num_hidden_layers=1), "layers.1.input_layernorm.weight", "no place"),
    (dict(architectures=["Qwen3ForCausalLM"]), "model.layers.0.self_attn.k_norm.weight"),
    (lambda path: (path / FILE).rename(path / "a.bin"), FILE, INDEX),
    (holds(""), FILE), (holds("version https://git-lfs.github.com/spec/v1"), FILE, "LFS"),
    (lambda path: os.truncate(path / FILE, 5000), FILE),
    (holds('{"weight_map": {"a": "b.safetensors"}}', INDEX), "b.safetensors"),
    (holds("{}", INDEX), "weight_map")]


@pytest.mark.parametrize("change, said", [(change, said) for change, *said in MISFITS])
def test_a_folder_that_does_not_fit_is_refused_by_name(change, said, llama, tmp_path):
    """In one line, before the ranks meet."""
    path = shutil.copytree(llama, tmp_path / "llama")
    change(path) if callable(change) else write(path, **change)
    with pytest.raises(train.BadInput) as refusal:
        train.refuse_early(train.make_settings(["--init", str(path), "--tokenizer", "bytes"]))
    assert all(word in str(refusal.value) for word in said), refusal.value
    assert "\n" not in str(refusal.value)


def test_released_weights_are_not_trained_on_bytes_unless_asked_to(llama, tmp_path):
    """Token ids need no tokenizer."""
    text, ids = tmp_path / "text.txt", tmp_path / "ids.npy"
    text.write_text("text")
    np.save(ids, np.arange(600) % 97)
    refused = pytest.raises(train.BadInput, match="--tokenizer|its tokenizer 256")
    for flags, expected in (
            ("", refused), (f"--data {text}", refused), (f"--data {ids} --sample 1", refused),
            (f"--data {ids}", nullcontext()), ("--tokenizer bytes", nullcontext())):
        with expected:
            train.refuse_early(train.make_settings(f"--init {llama} {flags}".split()))


def test_a_context_beyond_the_trained_positions_is_noticed_and_rope_theta_answers(llama, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(6000) % 97)
    flags = ["--init", llama, "--data", tmp_path / "ids.npy", "--steps", 0, "--ctx"]
    assert "beyond the 256 positions" in main(1, *flags, 300)
    assert "notice" not in main(1, *flags, 256) + main(1, *flags, 300, "--rope-theta", 5e5)
    settings = train.make_settings([*map(str, flags), "300", "--rope-theta", "5e5"])
    assert settings.config.rope_theta == 5e5
