"""--init and --export: weights in the form of Hugging Face.

A folder has config.json, and safetensors under the names that upipe.GPT has, with "model." before
most. torch's distributed checkpoint reads and writes them by shard: no rank ever holds a whole
model, and the files are cut as those who published them liked."""
import json
import shutil
from pathlib import Path

import numpy as np
import torch

from upipe import BadInput, GPTConfig

QK_NORM = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # the architectures of upipe.GPT
PLAIN = dict(hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False,
             partial_rotary_factor=1.0)  # what config.json may only say in this way


def read_config(folder):
    """config.json -> GPTConfig. BadInput, by name, for what upipe.GPT is not."""
    path = Path(folder) / "config.json"
    try:
        c = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"--init {folder}: {error}")
    name = (c.get("architectures") or [c.get("model_type")])[0]
    if name not in QK_NORM:
        raise BadInput(f"{path}: architecture {name} is not supported: only {', '.join(QK_NORM)}")
    for key, value in PLAIN.items():
        if c.get(key) not in (None, value):
            raise BadInput(f"{path}: {key}={c[key]!r} is not supported: only {value!r}")
    # transformers 5 has all of it in rope_parameters, earlier ones in two places
    rope = c.get("rope_parameters") or {**(c.get("rope_scaling") or {}),
                                        "rope_theta": c.get("rope_theta", 10_000.0)}
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    theta = rope.pop("rope_theta")
    try:
        return GPTConfig(
            c["vocab_size"], c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"],
            c.get("num_key_value_heads") or c["num_attention_heads"],
            c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
            c["intermediate_size"], theta, None if rope["rope_type"] == "default" else rope,
            c["rms_norm_eps"], QK_NORM[name], c.get("tie_word_embeddings", False))
    except KeyError as error:
        raise BadInput(f"{path}: {error} is missing")
    except ValueError as error:
        raise BadInput(f"{path}: {error}")


# max_position_embeddings in the config.json of the presets, as published
POSITIONS = {"llama3.2-1b": 131072, "llama3.2-3b": 131072, "llama3-8b": 8192, "llama3-70b": 8192,
             "qwen3-32b": 40960}


def trained_positions(settings):
    """How far the weights have seen, or None where nobody says."""
    if not settings.init:
        return POSITIONS.get(settings.model)
    config = json.loads((Path(settings.init) / "config.json").read_text())
    return config.get("max_position_embeddings")


def write_config(path, config, ctx, dtype):
    c = config
    name = next(name for name, qk_norm in QK_NORM.items() if qk_norm == c.qk_norm)
    path.write_text(json.dumps(dict(
        architectures=[name], model_type=name.removesuffix("ForCausalLM").lower(),
        vocab_size=c.vocab_size, hidden_size=c.dim, num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim,
        intermediate_size=c.ffn_dim, rope_theta=c.rope_theta, rope_scaling=c.rope_scaling,
        rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tie_embeddings,
        max_position_embeddings=ctx, torch_dtype=dtype, **PLAIN), indent=2))


def published_name(name):
    return name if name.startswith("lm_head.") else f"model.{name}"


def load_weights(job, config, model, folder):
    """Fill the shards of `model` from the safetensors of `folder`; BadInput if they do not fit."""
    import torch.distributed.checkpoint as dcp
    from safetensors import SafetensorError
    ours = {published_name(name): p.detach() for name, p in model.named_parameters()}

    def work():
        try:
            found = dcp.HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
        except (OSError, SafetensorError) as error:
            raise BadInput(f"--init {folder}: {error}")
        if config.tie_embeddings:
            found.pop("lm_head.weight", None)  # some folders have a second copy
        for name in sorted(ours.keys() | found.keys()):
            if name not in found:
                raise BadInput(f"--init {folder}: tensor {name} is missing")
            if name not in ours:
                raise BadInput(f"--init {folder}: tensor {name} has no place in this model")
            if found[name].size != ours[name].shape:
                raise BadInput(f"--init {folder}: tensor {name} is {list(found[name].size)}, and "
                               f"config.json says {list(ours[name].shape)}")
        return None, 0
    job.together(work)
    dcp.load(ours, storage_reader=dcp.HuggingFaceStorageReader(folder))


def export(job, settings, model):
    """Write the model to --export, in --dtype, as transformers wants it: files of up to 4 GiB."""
    import torch.distributed.checkpoint as dcp
    folder, dtype = Path(settings.export), getattr(torch, settings.dtype)
    part = folder.with_name(f".{folder.name}")
    tensors = {published_name(name): p.detach().to(dtype) for name, p in model.named_parameters()}
    sizes = np.cumsum([x.numel() * x.element_size() for x in tensors.values()])
    files = dict(zip(tensors, (1 + sizes // 2**32).tolist()))
    job.on_rank_0(lambda: shutil.rmtree(part, ignore_errors=True))
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(
        part, fqn_to_index_mapping=files, save_distributed=True, enable_consolidation=True,
        thread_count_consolidation=8))

    def publish():
        shutil.rmtree(part / "sharded", ignore_errors=True)
        write_config(part / "config.json", settings.config, settings.ctx, settings.dtype)
        for path in Path(settings.init).glob("*token*.json") if settings.init else ():
            shutil.copy(path, part)
        part.rename(folder)
    job.on_rank_0(publish)
    job.say(f"export    {folder}")
