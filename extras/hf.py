"""--init and --export: weights in the form of Hugging Face.

A folder has config.json, and safetensors under the names that upipe.GPT has, with "model." before
most. A rank reads the rows that are its own, and torch's distributed checkpoint writes by shard:
no rank ever holds a whole model."""
import math
import re
import shutil
from pathlib import Path

import numpy as np
import torch

from extras import read_json, write_json
from extras.text import Bytes, Tokenizer
from upipe import GPT, BadInput, GPTConfig, refuse

QK_NORM = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # the architectures of upipe.GPT
SIZES = dict(vocab_size="vocab_size", dim="hidden_size", n_layers="num_hidden_layers",
             n_heads="num_attention_heads", n_kv_heads="num_key_value_heads", head_dim="head_dim",
             ffn_dim="intermediate_size")  # fields of GPTConfig, and their names in config.json
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
PLAIN = dict(hidden_act="silu", attention_bias=False, mlp_bias=False, attention_dropout=0,
             use_sliding_window=False, sliding_window=None, is_causal=True, partial_rotary_factor=1,
             original_max_position_embeddings=None, auto_map=None, compression_config=None,
             per_layer_config=None)  # what config.json may only say in this way
# The class in transformers ignores keys that it lacks. But relatives compute with some of them
# (granite: logits_scaling), and a folder that has one was made for such a relative.
FOREIGN = re.compile("logit|scale|mult|cap|clip|drop|qk|expert|quant|alibi|no_rope|parallel")
COPIED = ("generation_config.json", "*token*.json", "tokenizer.model", "*.tiktoken", "vocab.*",
          "merges.txt", "chat_template*", "additional_chat_templates/*.jinja")


def number(path, c, key, default=None, kinds=(int,)):
    value = default if c.get(key) is None else c[key]
    refuse(value is None, f"{path}: {key} is missing")
    refuse(type(value) not in kinds or not 0 < value < math.inf,
           f"{path}: {key}={value!r} must be a {'' if float in kinds else 'whole '}number above 0")
    return value


def read_rope(path, c):
    """(theta, scaling) as GPTConfig has them. Before transformers 5 they stood in two places."""
    new, old = c.get("rope_parameters", {}), c.get("rope_scaling", {})
    refuse(not isinstance(new, dict) or not isinstance(old, dict),
           f"{path}: rope_parameters and rope_scaling must be JSON objects")
    rope = {"rope_theta": c.get("rope_theta", None if new else 10_000.0), **new, **old}
    kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", kind)
    known = ("rope_theta", *(LLAMA3 if kind == "llama3" else ()))
    odd = {key: value for key, value in rope.items() if key not in known and value is not None
           and (key, value) != ("partial_rotary_factor", 1)}
    refuse(kind not in ("default", "llama3") or odd,
           f"{path}: a rotary embedding of type {kind!r} with {odd} is not supported: only one for "
           "all layers, of type 'default' or 'llama3'")
    theta, *four = [number(path, rope, key, kinds=(int, float)) for key in known]
    refuse(four and four[1] >= four[2], f"{path}: low_freq_factor must be below high_freq_factor")
    return theta, dict(zip(LLAMA3, four), rope_type=kind) if four else None


def read_config(folder):
    """config.json -> GPTConfig. BadInput, by name, for what upipe.GPT does not compute."""
    path = Path(folder) / "config.json"
    refuse(not path.exists(), f"{path} is missing")
    c = {key: value for key, value in read_json(path).items() if value is not None}
    names, kind = c.get("architectures"), c.get("model_type")
    name = next((name for name in QK_NORM if names == [name]), None)
    refuse(not name or kind not in (None, "llama", "qwen3"),  # tensors tell which of the two
           f"{path}: architectures={names} of model_type {kind} is not supported: one of "
           f"{', '.join(QK_NORM)} is")
    if c.get("use_sliding_window") is False:
        c.pop("sliding_window", None)  # what it would be
    for key, value in PLAIN.items():
        refuse(c.get(key, value) != value,
               f"{path}: {key}={c.get(key)!r:.80} is not supported: only {value!r}")
    for key in sorted(c.keys() - PLAIN.keys()):
        refuse(FOREIGN.search(key) and str(c[key]) not in ("False", "0", "0.0", "1", "1.0"),
               f"{path}: {key}={c[key]!r:.80} is not supported: if it changes nothing, take it out")
    heads, width = (number(path, c, key) for key in ("num_attention_heads", "hidden_size"))
    absent = dict(num_key_value_heads=heads, head_dim=128 if QK_NORM[name] else width // heads)
    sizes = {field: number(path, c, key, absent.get(key)) for field, key in SIZES.items()}
    number(path, c, "max_position_embeddings", 1)  # --export compares it
    refuse(c.get("layer_types") not in (None, ["full_attention"] * sizes["n_layers"]),
           f"{path}: layer_types must be full_attention in all layers")
    tied = c.get("tie_word_embeddings", False)
    refuse(not isinstance(tied, bool),
           f"{path}: tie_word_embeddings={tied!r} must be true or false")
    (theta, scaling), eps = read_rope(path, c), number(path, c, "rms_norm_eps", kinds=(int, float))
    try:
        return GPTConfig(**sizes, rope_theta=theta, rope_scaling=scaling, norm_eps=eps,
                         qk_norm=QK_NORM[name], tie_embeddings=tied)
    except ValueError as error:
        raise BadInput(f"{path}: {error}")


# max_position_embeddings in the config.json of the presets, as published
POSITIONS = {"llama3.2-1b": 131072, "llama3.2-3b": 131072, "llama3-8b": 8192, "llama3-70b": 8192,
             "qwen3-32b": 40960}


def trained_positions(settings):
    """How far the weights have seen, or None where nobody says."""
    if not settings.init:
        return POSITIONS.get(settings.model)
    return read_json(Path(settings.init) / "config.json").get("max_position_embeddings")


def read_header(path):
    """{tensor: (file, shape, dtype)} of a safetensors file."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, "pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}
            return {name: (path, x.get_shape(), x.get_dtype()) for name, x in found.items()}
    except (OSError, SafetensorError) as error:
        small = path.is_file() and path.stat().st_size < 1024
        refuse(small and b"git-lfs" in path.read_bytes(),
               f"{path} is a Git LFS pointer: `git lfs pull` brings the file itself")
        raise BadInput(f"{path} is no whole safetensors file: {error}")


def find_tensors(folder):
    """{tensor: (file, shape, dtype)}, where the index says it is, or of model.safetensors. Other
    files may lie there, of an older or another model."""
    index, alone = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        refuse(not alone.exists(), f"--init {folder} has no {alone.name} and no {index.name}: no "
               "other form is read; save_pretrained of transformers writes this one")
        return read_header(alone)
    listed = read_json(index).get("weight_map")
    refuse(not isinstance(listed, dict) or not all(isinstance(x, str) for x in listed.values()),
           f"{index}: weight_map must name the file of each tensor")
    headers = {file: read_header(folder / file) for file in sorted({*listed.values()})}
    return {name: headers[file][name] for name, file in listed.items() if name in headers[file]}


def published_name(name):
    return name if name.startswith("lm_head.") else f"model.{name}"


def find_weights(folder, config):
    """({tensor: file}, notices) for all parameters. BadInput, by name, where they do not fit."""
    folder = Path(folder)
    found, rotary = find_tensors(folder), "rotary_emb.inv_freq"
    with torch.device("meta"):
        ours = {published_name(n): list(p.shape) for n, p in GPT(config).named_parameters()}
    needless = {name for name in found if name.endswith(rotary)}
    notices = [f"{rotary} is not read: config.json says it all"] if needless else []
    unread = sorted(set(folder.glob("*.safetensors")) - {file for file, *_ in found.values()})
    notices += [f"{file} is not read: no index names it" for file in unread]
    needless |= {"lm_head.weight"} if config.tie_embeddings else set()  # some have a second copy
    for name in sorted(ours.keys() | found.keys() - needless):
        refuse(name not in found, f"--init {folder}: tensor {name} is missing")
        refuse(name not in ours, f"--init {folder}: tensor {name} has no place in this model")
        file, shape, dtype = found[name]
        refuse(shape != ours[name],
               f"{file}: tensor {name} is {shape}, and config.json says {ours[name]}")
        refuse(dtype not in ("BF16", "F16", "F32", "F64"),
               f"{file}: tensor {name} is {dtype}, no float")
    return {name: found[name][0] for name in ours}, notices


def refuse_early(settings, paths):
    """BadInput for what a run could not do with --init; paths: the files of --data."""
    if settings.export:
        read_config(settings.init)
    if not settings.saved:
        find_weights(settings.init, settings.config)
    text = settings.sample or any(path.suffix not in (".bin", ".npy") for path in paths)
    refuse(text and not settings.tokenizer,  # that of --init, if it has one
           f"--init {settings.init} has no tokenizer.json: say --tokenizer FILE (or bytes, if it "
           "was trained on those), or give --data as token ids (.bin, .npy)")


def load_weights(job, config, model, folder):
    """Fill this rank's rows of `model` from the safetensors of `folder`. Nothing is sent."""
    from safetensors import safe_open
    files, notices = find_weights(folder, config)
    for notice in notices:
        job.say(f"notice    {notice}")
    for name, p in model.named_parameters():
        rows = p.detach().to_local()
        begin = -(-len(p) // p.device_mesh.size()) * p.device_mesh.get_local_rank()  # as FSDP cuts
        if len(rows):
            with safe_open(files[published_name(name)], "pt") as file:
                rows.copy_(file.get_slice(published_name(name))[begin:begin + len(rows)])


def make_config(settings):
    """config.json: that of --init, but for what a run changes; without one, our own."""
    c, name = settings.config, list(QK_NORM)[settings.config.qk_norm]
    codec = settings.codec or Bytes()
    said = read_json(Path(settings.init) / "config.json") if settings.init else dict(
        architectures=[name], model_type=name.removesuffix("ForCausalLM").lower(),
        **{key: getattr(c, field) for field, key in SIZES.items()}, rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tie_embeddings, rope_scaling=c.rope_scaling, hidden_act="silu",
        attention_bias=False, bos_token_id=next(iter(codec.before), None),
        eos_token_id=next(iter(codec.after), None))
    places = [said, said.get("rope_parameters") or {}, said.get("rope_scaling") or {}]
    for place in [place for place in places if "rope_theta" in place] or [said]:
        place["rope_theta"] = c.rope_theta
    for key in {"dtype", "torch_dtype"} & said.keys() or ("torch_dtype",):
        said[key] = settings.dtype
    said["max_position_embeddings"] = max(settings.ctx, said.get("max_position_embeddings") or 1)
    return said


def export(job, settings, model):
    """Write the model to --export, in --dtype, with what transformers and servers look for."""
    import torch.distributed.checkpoint as dcp
    folder, dtype = Path(settings.export), getattr(torch, settings.dtype)
    part = folder.with_name(f".{folder.name}.unfinished")
    tensors = {published_name(name): p.detach().to(dtype) for name, p in model.named_parameters()}
    sizes = np.cumsum([x.numel() * x.element_size() for x in tensors.values()])
    files = dict(zip(tensors, (1 + sizes // 2**32).tolist()))  # of up to 4 GiB
    job.on_rank_0(lambda: shutil.rmtree(part, ignore_errors=True))
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(
        part, fqn_to_index_mapping=files, save_distributed=True, enable_consolidation=True,
        thread_count_consolidation=8))

    def publish():
        shutil.rmtree(part / "sharded", ignore_errors=True)
        write_json(part / "config.json", make_config(settings))
        for pattern in COPIED if settings.init else ():
            for path in Path(settings.init).glob(pattern):
                copy = part / path.relative_to(settings.init)
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(path, copy)
        if isinstance(settings.codec, Tokenizer):  # --tokenizer may be another than the folder's
            (part / "tokenizer.json").write_bytes(settings.codec.file)
        part.rename(folder)
    job.on_rank_0(publish)
    job.say(f"export    {folder}")
