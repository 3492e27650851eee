"""What a training run takes from a checkpoint of any format, to start from."""

from pathlib import Path
from typing import Any

from jaxformer.errors import UsageError
from jaxformer.porting.checkpoint import language_model, open_checkpoint


def read_start(path: Path, *, fresh: bool) -> dict[str, Any]:
    """The language model of a checkpoint, as the arguments of ``training.experiment.WarmStart``.

    Args:
        path: the checkpoint.
        fresh: whether to leave its optimizer's state.

    Raises:
        UsageError: it is no language model, or nothing says what its tokens are.
        CheckpointError: it is missing, damaged or incomplete.
    """
    checkpoint = open_checkpoint(path)
    plan = language_model(checkpoint)
    model = plan.module.config
    if not model.causal or model.head != "linear":
        raise UsageError(f"{path} holds a model that does not predict the next token")
    tokenizer = checkpoint.tokenizer(model.vocab_size)
    if tokenizer is None:
        raise UsageError(
            f"{path} does not say what its tokens are: put its meta.pkl or tokenizer.json beside it"
        )
    arrays: dict[str, Any] = {"parameters": {n: t.read() for n, t in plan.tensors.items()}}
    optimizer = None if fresh else checkpoint.optimizer_state(plan)
    if optimizer is not None:
        arrays["mu"] = {name: tensor.read() for name, tensor in optimizer.mu.items()}
        arrays["nu"] = {name: tensor.read() for name, tensor in optimizer.nu.items()}
        arrays["step"] = optimizer.count
    # A vocabulary of characters is written with every checkpoint of the run.
    file = checkpoint.tokenizer_file if checkpoint.vocabulary is None else None
    return {
        "source": str(path),
        "model": model,
        "arrays": arrays,
        "tokenizer": tokenizer,
        "files": [] if file is None else [file],
    }
