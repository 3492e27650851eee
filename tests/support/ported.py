"""Tiny checkpoints in the forms in which people have them, and the ``port`` command run on them."""

import contextlib
import io
import json
import pickle
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from jaxformer.cli.main import main

VOCABULARY = "\n abcdefghi"
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 31, "n_embd": 24,
    "n_head": 4, "n_layer": 2, "n_positions": 19, "n_inner": 35, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "tie_word_embeddings": True, "bos_token_id": 30, "eos_token_id": 30,
}  # fmt: skip
SHARD = 3


def gpt2_state(dtype=torch.float32, seed=0):
    """The arrays of the GPT-2 that ``CONFIG`` describes, as transformers names them."""
    generator = torch.Generator().manual_seed(seed)
    d, f = CONFIG["n_embd"], CONFIG["n_inner"]
    shapes = {"wte.weight": (CONFIG["vocab_size"], d), "wpe.weight": (CONFIG["n_positions"], d)}
    for n in range(CONFIG["n_layer"]):
        for name, shape in {
            "ln_1.weight": (d,), "ln_1.bias": (d,), "attn.c_attn.weight": (d, 3 * d),
            "attn.c_attn.bias": (3 * d,), "attn.c_proj.weight": (d, d), "attn.c_proj.bias": (d,),
            "ln_2.weight": (d,), "ln_2.bias": (d,), "mlp.c_fc.weight": (d, f),
            "mlp.c_fc.bias": (f,), "mlp.c_proj.weight": (f, d), "mlp.c_proj.bias": (d,),
        }.items():  # fmt: skip
            shapes[f"h.{n}.{name}"] = shape
    shapes |= {"ln_f.weight": (d,), "ln_f.bias": (d,)}
    return {
        f"transformer.{name}": (torch.randn(shape, generator=generator) * 0.3).to(dtype)
        for name, shape in shapes.items()
    }


def hugging_face(folder, state, form="safetensors", config=CONFIG):
    """Writes a Hugging Face folder: one file or several, of either kind."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    suffix = "safetensors" if form.startswith("safetensors") else "bin"
    stem = "model" if suffix == "safetensors" else "pytorch_model"

    def save(tensors, name):
        if suffix == "safetensors":
            save_file(tensors, folder / name, {"format": "pt"})
        else:
            torch.save(tensors, folder / name)

    if not form.endswith("sharded"):
        save(state, f"{stem}.{suffix}")
        return folder
    names = list(state)
    parts = [names[i::SHARD] for i in range(SHARD)]
    files = [f"{stem}-{i + 1:05}-of-{SHARD:05}.{suffix}" for i in range(SHARD)]
    for part, file in zip(parts, files, strict=True):
        save({name: state[name] for name in part}, file)
    weight_map = {name: file for part, file in zip(parts, files, strict=True) for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


def nanogpt(folder, *, bias=False, steps=3, compiled=True):
    """Writes what nanoGPT's train.py writes: ckpt.pt, and the meta.pkl of its characters."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    d, layers, vocab, context = 24, 2, len(VOCABULARY), 16
    shapes = {"wte.weight": (vocab, d), "wpe.weight": (context, d)}
    for n in range(layers):
        for name, shape in {
            "ln_1": (d,), "attn.c_attn": (3 * d, d), "attn.c_proj": (d, d), "ln_2": (d,),
            "mlp.c_fc": (4 * d, d), "mlp.c_proj": (d, 4 * d),
        }.items():  # fmt: skip
            shapes[f"h.{n}.{name}.weight"] = shape
            if bias:
                shapes[f"h.{n}.{name}.bias"] = shape[:1]
    shapes["ln_f.weight"] = (d,)
    if bias:
        shapes["ln_f.bias"] = (d,)
    parameters = {
        f"transformer.{name}": torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.3)
        for name, shape in shapes.items()
    }
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    for _ in range(steps):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    state = {name: parameter.detach() for name, parameter in parameters.items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    prefix = "_orig_mod." if compiled else ""
    arguments = {
        "n_layer": layers, "n_head": 4, "n_embd": d, "block_size": context, "bias": bias,
        "vocab_size": vocab, "dropout": 0.0,
    }  # fmt: skip
    torch.save(
        {
            "model": {prefix + name: tensor for name, tensor in state.items()},
            "optimizer": optimizer.state_dict(),
            "model_args": arguments,
            "iter_num": steps,
            "best_val_loss": torch.tensor(1.5),
            "config": {"dataset": "letters", "batch_size": 4, "learning_rate": 1e-3},
        },
        folder / "ckpt.pt",
    )
    table = dict(enumerate(VOCABULARY))
    meta = {"vocab_size": vocab, "itos": table, "stoi": {c: i for i, c in table.items()}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder / "ckpt.pt"


def port(*arguments):
    """Runs ``jaxformer port``, which must succeed, and returns what it says."""
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
        code = main(["port", *map(str, arguments)])
    assert code == 0, shown.getvalue()
    return shown.getvalue()


def run_rejected(*arguments):
    """Runs a command that must be rejected, and returns its exit code and its one line."""
    shown, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(out):
        code = main([str(argument) for argument in arguments])
    lines = shown.getvalue().splitlines()
    assert out.getvalue() == ""
    assert len(lines) == 1, shown.getvalue()
    assert lines[0].startswith("jaxformer: ")
    return code, lines[0]


def same(path, state):
    """Asserts that a safetensors file holds these tensors, bit-exact, and no others."""
    found = load_file(Path(path) / "model.safetensors" if Path(path).is_dir() else path)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bits(found[name]) == bits(tensor), name


def bits(tensor):
    return (
        tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.item()
    )


def numbers(path):
    """The arrays of a safetensors file as float64."""
    found = load_file(path)
    return {name: np.asarray(t.to(torch.float64)) for name, t in found.items()}
