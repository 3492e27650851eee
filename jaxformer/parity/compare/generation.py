"""Generation side by side, with caches: the first token whose logits part."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.generation import make_cache
from jaxformer.parity.matching.alibi_slopes import match_alibi_slopes
from jaxformer.parity.matching.rotary_tables import share_tables_of_length
from jaxformer.parity.report.model import Report, Step
from jaxformer.parity.tolerance import judge
from jaxformer.parity.trace import jax_trace as jax_trace
from jaxformer.parity.trace import torch_trace as torch_trace
from jaxformer.porting.api import build, import_plan


def compare_generation(
    torch_module: Any,
    jax_module: Any = None,
    prompt: Any = None,
    *,
    tokens: int = 20,
    dialect: str | None = None,
    torch_call: Callable[[Any, Any], Any] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Report:
    """Writes on from a prompt, greedily, in float64, and compares the logits of every token.

    Ours reads the prompt once and then one token at a time from its cache; theirs does the same
    where it returns ``past_key_values``, and otherwise reads everything anew. Both go on with
    *their* token, so that one difference is not counted again and again.

    Args:
        torch_module: theirs: token ids (B, T) to logits (B, T, V); not changed.
        jax_module: ours; default what ``from_torch`` makes of theirs.
        prompt: ids (1, T); default some of the first ones.
        tokens: how many to write, as far as the context goes.
        dialect: whose class theirs is.
        torch_call: how theirs is called without a cache.
        about: what to note in the report.

    Returns:
        A report with a step for each token. Where the logits are equal up to rounding and the
        choice is not the same, it is a tie.
    """
    torch = torch_trace.require_torch()
    with jax.enable_x64(True), match_alibi_slopes(torch_module):
        plan = import_plan(torch_module, dialect)
        candidate = build(plan) if jax_module is None else jax_module
        config = candidate.config
        if prompt is None:
            prompt = np.arange(min(8, config.context_length - 1))[None] % config.vocab_size
        prompt = np.asarray(prompt)
        tokens = min(tokens, config.context_length - prompt.shape[1])
        module = torch_trace.in_float64(torch_module)
        call = torch_call or (lambda module, ids: module(ids))
        with torch_trace.everything_in_float64(), torch.no_grad():
            exact = jax_trace.in_dtype(candidate, "float64")
            exact.eval()
            share_tables_of_length(exact, module, call, prompt.shape[1] + tokens)
            low = jax_trace.in_dtype(exact, "float32")
            low.eval()
            reference = _Reference(module, call)
            mine = _Candidate(exact, prompt.shape[1] + tokens)
            found = []
            ids = prompt
            fresh = prompt
            for number in range(tokens):
                wanted = reference.logits(ids, fresh)
                logits = mine.logits(fresh)

                def in_float32(ids: Any = ids) -> np.ndarray:
                    # Of one length, so that it is compiled once; what follows is not seen.
                    seen = ids.shape[1]
                    padded = np.pad(ids, ((0, 0), (0, prompt.shape[1] + tokens - seen)))
                    return np.asarray(low(jnp.asarray(padded))[0, seen - 1])

                difference = judge(logits, wanted, in_float32)
                choice, own = int(np.argmax(wanted)), int(np.argmax(logits))
                # The two best are then closer than twice the error, which is rounding.
                tie = choice != own and not difference.is_bug
                found.append(Step(number, own, choice, difference, "tie" if tie else ""))
                fresh = np.array([[choice]])
                ids = np.concatenate((ids, fresh), axis=1)
    return Report("generate", "float64", (), (), tuple(found), dict(about or {}))


class _Candidate:
    def __init__(self, model: Any, length: int):
        self.model = model
        self.cache = make_cache(model.config, 1, length, jnp.dtype("float64"))

    def logits(self, fresh: np.ndarray) -> np.ndarray:
        """Of the token after the fresh ones."""
        return np.asarray(self.model(jnp.asarray(fresh), cache=self.cache)[0, -1])


class _Reference:
    def __init__(self, module: Any, call: Callable[[Any, Any], Any]):
        self.module, self.call = module, call
        # A signature that names a cache is transformers'.
        self.caches = hasattr(module, "generate") and hasattr(module, "config")
        self.past: Any = None

    def logits(self, ids: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        """Of the token after all of them."""
        torch = torch_trace.require_torch()
        if not self.caches:
            output = self.call(self.module, torch.as_tensor(ids))
            return np.asarray(torch_trace.first_float(output)[0, -1])
        output = self.module(torch.as_tensor(fresh), past_key_values=self.past, use_cache=True)
        self.past = output.past_key_values
        return np.asarray(output.logits[0, -1])
