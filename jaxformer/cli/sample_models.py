"""The models of ``jaxformer sample``: their weights as the options say, and the draft."""

import sys
from typing import TYPE_CHECKING, Any

from jaxformer.cli.sample_options import SampleOptions
from jaxformer.errors import TextError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from jaxformer.porting.checkpoint import Checkpoint, Tokenizer
    from jaxformer.porting.mapping.plans import Plan
    from jaxformer.transformer_lm import TransformerLM


def read_check(options: SampleOptions, tokenizer: "Tokenizer | None") -> "np.ndarray | None":
    """Returns the ids of the text of ``--weights-check``; None without it.

    Raises:
        UsageError: it cannot be read, has fewer than two tokens, or there is no tokenizer.
        TextError: it is not UTF-8, or has a character that the model does not know.
    """
    path = options.weights_check
    if path is None:
        return None
    if tokenizer is None:
        raise UsageError("--weights-check needs a tokenizer: give --meta FILE")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"--weights-check {path} cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        raise TextError(f"--weights-check {path} is not UTF-8: {error}") from None
    ids = tokenizer.encode(text, unknown=options.unknown)
    if len(ids) < 2:
        raise UsageError(f"--weights-check {path} needs two tokens: it has {len(ids)}")
    return ids


def build_model(plan: "Plan", options: SampleOptions, check_T: "np.ndarray | None" = None) -> Any:
    """Returns the module, with its weights stored as ``--weights-dtype`` says.

    Args:
        plan: of the module.
        options: of the command.
        check_T: ids of a text; what narrow weights cost on it is written to standard error.

    Raises:
        UsageError: a weight is not finite.
    """
    from jaxformer.narrow_linear import narrow_weights
    from jaxformer.porting.api import build
    from jaxformer.porting.text_models import in_float32

    module = build(in_float32(plan))
    if options.weights_dtype is None:
        return module
    try:
        narrow = narrow_weights(module, options.weights_dtype)
    except ValueError as error:
        raise UsageError(f"--weights-dtype {options.weights_dtype}: {error}") from None
    if check_T is not None:
        from jaxformer.inspection.narrowing_cost import narrowing_cost

        cost = narrowing_cost(module, narrow, check_T, num_tokens=min(options.tokens, 100))
        sys.stderr.write(f"{options.weights_dtype} weights: {cost}\n")
    return narrow


def load_draft(
    model: "TransformerLM", checkpoint: "Checkpoint", options: SampleOptions
) -> "TransformerLM":
    """Returns the model that ``--draft`` names.

    Raises:
        UsageError: it cannot write for the model.
    """
    from jaxformer.porting.checkpoint import open_checkpoint
    from jaxformer.porting.text_models import plan_language_model
    from jaxformer.speculative_generation import check_draft

    assert options.draft is not None
    opened = open_checkpoint(options.draft)
    draft: TransformerLM = build_model(plan_language_model(opened), options)
    known = checkpoint.vocabulary, opened.vocabulary
    if None not in known and known[0] != known[1]:
        raise UsageError(f"--draft {options.draft} has other characters than the model")
    try:
        check_draft(model, draft, options.draft_tokens)
    except ValueError as error:
        raise UsageError(f"--draft {options.draft}: {error}") from None
    return draft
