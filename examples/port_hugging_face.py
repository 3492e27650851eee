"""Brings a model of Hugging Face to JAX, proves that it computes the same, and gives it back.

    uv run --extra torch --extra hf --with transformers python examples/port_hugging_face.py FOLDER

FOLDER is what ``save_pretrained`` writes. Without an argument the script makes a small GPT-2 with
random weights, so it runs offline.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import jaxformer as jf


def make_folder(folder: Path) -> Path:
    """Returns a folder with a GPT-2 whose weights are random."""
    config = transformers.GPT2Config(
        vocab_size=97,
        n_positions=32,
        n_embd=24,
        n_layer=2,
        n_head=3,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def main() -> None:
    """Ports, compares, generates and ports back."""
    parser = argparse.ArgumentParser(description="Bring a model of Hugging Face to JAX and back.")
    parser.add_argument("folder", type=Path, nargs="?", help="a Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("runs/hugging_face"))
    options = parser.parse_args()
    folder = options.folder or make_folder(options.out / "model")

    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    reference.config.use_cache = False
    model = jf.load(folder)
    print(model)

    ids = np.arange(1, 13)[None]
    # Every module by itself, forward and backward, in float64; raises where one has a bug.
    report = jf.assert_parity(reference, model.module, [torch.from_numpy(ids)])
    print("compared with transformers:", report.verdict)

    written = model.generate(ids, 8, greedy=True)
    prompt = torch.from_numpy(ids)
    expected = reference.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=True)
    print("the same greedy text:", written.tolist() == expected[:, ids.shape[1] :].tolist())

    back = model.save(options.out / "back", format="hf", overwrite=True)
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(back)
    equal = all(torch.equal(a, again.state_dict()[n]) for n, a in reference.state_dict().items())
    print("the same bits back:", equal)


if __name__ == "__main__":
    main()
