"""A script for any version of transformers: loads folders strictly, and saves what they compute.

    python load_folder.py FOLDER ...

A folder has ids.npy, where texts and images are read images.npy too, and, in attention.txt, the
path of transformers that is the reference; outputs.npy is written beside them. It imports nothing
of the project.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def run(folder: Path) -> None:
    """Loads a folder with the class that its config.json names, and saves what it computes."""
    # Not by AutoConfig: transformers 4 does not know the model types of SigLIP's halves.
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    cls = getattr(transformers, name)
    attention = (folder / "attention.txt").read_text()
    model, info = cls.from_pretrained(
        folder, output_loading_info=True, attn_implementation=attention
    )
    wrong = {name: sorted(map(str, found)) for name, found in info.items() if found}
    assert not wrong, (folder.name, wrong)
    ids = torch.as_tensor(np.load(folder / "ids.npy"))
    if ids.is_floating_point():
        # Of a model that sees they are images, of one that hears features.
        ids = ids.to(next(model.parameters()).dtype)
    # The rule of ``target_part`` in running.py.
    has_target = model.config.is_encoder_decoder and not name.endswith("ForAudioClassification")
    target = {"decoder_input_ids": ids.flip(1)[:, 7:]} if has_target else {}
    if (folder / "target.npy").exists():
        target = {"decoder_input_ids": torch.as_tensor(np.load(folder / "target.npy"))}
    if (folder / "images.npy").exists():
        pixels = torch.as_tensor(np.load(folder / "images.npy"))
        target = {"pixel_values": pixels.to(next(model.parameters()).dtype)}
    with torch.no_grad():
        result = model.eval()(ids, **target)
    # A loss of experts would come first.
    outputs = result["logits"] if "logits" in result else result[0]
    np.save(folder / "outputs.npy", outputs.double().numpy())


def main() -> None:
    """Runs every folder that is named, and names those that fail."""
    failed = 0
    for folder in sys.argv[1:]:
        try:
            run(Path(folder))
        # transformers raises errors of many kinds.
        except Exception as error:
            failed += 1
            print(f"{folder}: {type(error).__name__}: {error}", file=sys.stderr)
    print(transformers.__version__)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
