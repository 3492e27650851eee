"""How formats and sizes are called where people read them."""

FORMATS = {
    "safetensors": "safetensors file",
    "safetensors_index": "safetensors files",
    "torch": "PyTorch file",
    "torch_index": "PyTorch files",
    "huggingface": "Hugging Face folder",
    "run": "run folder",
    "checkpoints": "run folder",
    "checkpoint": "run folder",
}


def bytes_text(count: int) -> str:
    """A number of bytes: 17 B, 1.2 kB, 497.8 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def count_text(count: int) -> str:
    """A number of parameters: 3,512, 0.8 M, 124.4 M."""
    return f"{count / 1e6:.1f} M" if count >= 100_000 else f"{count:,}"
