"""Draws docs/images/verify.png and docs/images/attention.png: what commands show of a real model.

    uv run --group test python docs/draw_pages.py FOLDER

Trains a small Llama on tiny-shakespeare, makes the wrong port of docs/tutorials/verify.md, compares
the two, and takes a picture of the page. FOLDER keeps all that is made; a second call begins where
the first has ended. Needs Chromium, and takes some minutes on two cores.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs/images"
TEXT = "KING RICHARD III:\nNow is the winter of our discontent"
TRAIN = (
    "train --preset llama-style --num-kv-heads 4 --tie-embeddings --data tiny-shakespeare "
    "--steps 600 --sample-tokens 0 --eval-tokens 20000 --out runs/verse"
)
# Few colours are enough, and make a small file.
COLOURS = 96


def main() -> int:
    """Makes what is missing in the folder, and the pictures."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "runs/verse/report.html").exists():
        jaxformer(folder, *TRAIN.split())
    if not (folder / "verse").exists():
        jaxformer(folder, *["port", "runs/verse", "verse", "--to", "hf", "--as", "llama"])
    page = (ROOT / "docs/tutorials/verify.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(# convert\.py.*?)```", page, re.DOTALL)
    assert found is not None
    (folder / "convert.py").write_text(found[1], encoding="utf-8")
    subprocess.run([sys.executable, "convert.py"], cwd=folder, check=True)
    jaxformer(folder, *["verify", "verse", "ported.pt", "--html", "page.html"], code=1)
    attention = ["--text", TEXT, "--layer", "2", "--head", "all", "--out", "attention.png"]
    jaxformer(folder, "inspect", "attention", "runs/verse", *attention)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("docs/draw_pages.py needs Chromium", file=sys.stderr)
        return 1
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,760",
         "--virtual-time-budget=5000", f"--screenshot={folder / 'page.png'}",
         (folder / "page.html").as_uri()],
        check=True, capture_output=True,
    )  # fmt: skip
    save(folder / "page.png", IMAGES / "verify.png", 1100)
    save(folder / "attention.png", IMAGES / "attention.png", 900)
    return 0


def jaxformer(folder: Path, *arguments: str, code: int = 0) -> None:
    """Runs a command in the folder, which must end with this exit code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jaxformer", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, check=False)
    if done.returncode != code:
        raise SystemExit(f"{arguments[0]} ended with {done.returncode}")


def save(source: Path, target: Path, width: int) -> None:
    """Saves a picture with few colours, and no wider than this."""
    picture = Image.open(source).convert("RGB")
    if picture.width > width:
        height = round(picture.height * width / picture.width)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    picture.quantize(COLOURS).save(target, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
