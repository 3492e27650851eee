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
