"""What the tests of ``jaxformer verify`` share: tiny checkpoints, damaged ones, and the command."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import torch

from jaxformer.cli.main import main
from jaxformer.porting.formats.safetensors_files import read_safetensors, write_safetensors
from jaxformer.porting.formats.tensors import StoredTensor
from tests.support.ported import gpt2_state, hugging_face, nanogpt, port

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 31,
    "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 40, "max_position_embeddings": 23, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def llama_state(seed=0):
    """The arrays of the Llama that ``LLAMA`` describes, as transformers names them."""
    generator = torch.Generator().manual_seed(seed)
    d, f, vocab = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, d)}
    for n in range(LLAMA["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (d,), "self_attn.q_proj": (d, d), "self_attn.k_proj": (d // 2, d),
            "self_attn.v_proj": (d // 2, d), "self_attn.o_proj": (d, d),
            "post_attention_layernorm": (d,), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }.items():  # fmt: skip
            shapes[f"model.layers.{n}.{name}.weight"] = shape
    shapes |= {"model.norm.weight": (d,), "lm_head.weight": (vocab, d)}
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }


def llama(folder):
    """Writes a Hugging Face folder of a Llama, and the same model as a jaxformer file beside it."""
    path = hugging_face(folder / "llama", llama_state(), config=LLAMA)
    port(path, folder / "llama.safetensors", "--as", "torch_ref")
    return path


def gpt2_formats(folder):
    """Writes one GPT-2 in every format, and returns their paths."""
    paths = {
        "folder": hugging_face(folder / "hf", gpt2_state()),
        "run": folder / "run",
        "safetensors": folder / "gpt2.safetensors",
        "pt": folder / "gpt2.pt",
    }
    for path in list(paths.values())[1:]:
        port(paths["folder"], path)
    return paths


def nano_run(folder):
    """Writes NanoGPT's checkpoint with its characters, and the run it becomes; returns both."""
    path = nanogpt(folder / "nano")
    port(path, folder / "run")
    return path, folder / "run"


def changed(source, target, *, config=None, arrays=None):
    """Writes a jaxformer safetensors file with other settings or other numbers.

    Args:
        source: the file.
        target: the new one.
        config: settings to change.
        arrays: functions of the arrays to change, by name.
    """
    tensors, metadata = read_safetensors(source)
    record = json.loads(metadata["jaxformer"])
    record["config"].update(config or {})
    for name, change in (arrays or {}).items():
        array = tensors[name].read()
        tensors[name] = StoredTensor.of(np.asarray(change(array), array.dtype))
    write_safetensors(target, tensors, {"jaxformer": json.dumps(record)})
    return target


def nudged(array):
    """The array with one element 1e-3 larger."""
    array = array.copy()
    array.flat[7] += 1e-3
    return array


def verify(*arguments):
    """Runs ``jaxformer verify`` and returns its exit code and the lines of standard output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["verify", "--debug", *map(str, arguments)])
    assert err.getvalue() == "", err.getvalue()
    return code, out.getvalue().splitlines()


def is_installed(name):
    """Whether a package is installed."""
    import importlib.util

    return importlib.util.find_spec(name) is not None


def write_lines(path: Path, text: str) -> Path:
    """Writes a text file."""
    path.write_text(text, encoding="utf-8")
    return path
