"""Compares generation with caches: the first token at which the logits diverge."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decoding import make_cache
from jaxformer.errors import UsageError
from jaxformer.parity.comparison.language_models import (
    check_models,
    check_prompt,
    check_suitable,
    check_vocabulary,
)
from jaxformer.parity.findings import Step
from jaxformer.parity.matching.positions import match_alibi_slopes, share_tables_of_length
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.recording.torch_values import (
    everything_in_float64,
    experts_one_by_one,
    first_float,
    in_float64,
    require_torch,
)
from jaxformer.parity.recording.whole_models import call_module, gives_last_logits
from jaxformer.parity.report.report import Report
from jaxformer.parity.tolerance import judge
from jaxformer.porting.api import build, import_plan


def compare_generation(
    torch_module: Any,
    jax_module: Any = None,
    prompt: Any = None,
    *,
    tokens: int = 20,
    dialect: str | None = None,
    force: bool = False,
    torch_call: Callable[[Any, Any], Any] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Report:
    """Continues a prompt greedily, in float64, and compares the logits of every token.

    The candidate reads the prompt once and then one token at a time with its cache. The reference
    does the same if it is a transformers model, and otherwise reads all tokens again. Both continue
    with the reference's token, so that one difference is not counted again at every later token.

    Args:
        torch_module: the reference: token ids (B, T) to logits (B, T, V); it is not changed.
        jax_module: the candidate; default: what ``from_torch`` makes of the reference.
        prompt: token ids (1, T); default 0, 1, …, at most eight.
        tokens: how many to generate, at least 1, as far as the context allows.
        dialect: the name of the reference's dialect; default found by its class.
        force: whether the dialect may contradict the reference's config.
        torch_call: how to call the reference without a cache, given it and a tensor of ids.
        about: notes for the report.

    Returns:
        A report with a step for each token. If both sides choose different tokens although their
        logits are equal up to rounding, the step is a tie.

    Raises:
        UsageError: torch is missing, the models are no language models, the prompt is not one text
            of their tokens, or there is no token to generate.
    """
    torch = require_torch()
    check_models(torch_module, jax_module, "prompt")
    if tokens < 1:
        raise UsageError(f"tokens must be at least 1: got {tokens}")
    with (
        jax.enable_x64(True),
        match_alibi_slopes(torch_module),
        experts_one_by_one(torch_module),
    ):
        plan = import_plan(torch_module, dialect, force=force)
        candidate = build(plan) if jax_module is None else jax_module
        config: Any = getattr(candidate, "config", None)
        check_suitable("generate", config)
        check_vocabulary(plan.module.config, config)
        if prompt is None:
            prompt = np.arange(min(8, config.context_length - 1))[None] % config.vocab_size
        prompt = check_prompt(prompt, config)
        tokens = min(tokens, config.context_length - prompt.shape[1])
        if tokens < 1:
            raise UsageError(
                f"a prompt of {prompt.shape[1]} tokens leaves none to generate: the context has "
                f"{config.context_length}"
            )
        length = prompt.shape[1] + tokens
        module = in_float64(torch_module)
        call = torch_call or call_module
        with everything_in_float64(), torch.no_grad():
            exact = jax_modules.in_dtype(candidate, "float64")
            share_tables_of_length(exact, module, call, length)
            low = jax_modules.in_dtype(exact, "float32")
            reference_generator = ReferenceGenerator(module, call)
            candidate_generator = CandidateGenerator(exact, length)
            steps = []
            ids = fresh = prompt
            for number in range(tokens):
                reference_logits = reference_generator.next_logits(ids, fresh)
                candidate_logits = candidate_generator.next_logits(fresh)

                def in_float32(ids: Any = ids) -> np.ndarray:
                    # Always padded to one length, so that it is compiled once; the model is causal,
                    # so padding at the end changes nothing.
                    seen = ids.shape[1]
                    padded = np.pad(ids, ((0, 0), (0, length - seen)))
                    return np.asarray(low(jnp.asarray(padded))[0, seen - 1])

                difference = judge(candidate_logits, reference_logits, in_float32)
                reference_token = int(np.argmax(reference_logits))
                candidate_token = int(np.argmax(candidate_logits))
                # The two best logits are then closer than twice the error, which is rounding.
                is_tie = candidate_token != reference_token and not difference.is_bug
                note = "tie" if is_tie else ""
                steps.append(Step(number, candidate_token, reference_token, difference, note))
                fresh = np.array([[reference_token]])
                ids = np.concatenate((ids, fresh), axis=1)
    return Report("generate", "float64", (), (), tuple(steps), dict(about or {}))


class CandidateGenerator:
    """Generates with the candidate and its cache.

    Args:
        model: the candidate.
        length: the capacity of the cache, in tokens.
    """

    def __init__(self, model: Any, length: int):
        self.model = model
        self.cache = make_cache(model.config, 1, length, jnp.dtype("float64"))

    def next_logits(self, fresh: np.ndarray) -> np.ndarray:
        """Returns the logits (V,) of the token after ``fresh`` (1, T), the tokens not yet read."""
        return np.asarray(self.model(jnp.asarray(fresh), cache=self.cache)[0, -1])


class ReferenceGenerator:
    """Generates with the reference, with a cache if it is a transformers model.

    Args:
        module: the reference.
        call: how to call it without a cache.
    """

    def __init__(self, module: Any, call: Callable[[Any, Any], Any]):
        self.module, self.call = module, call
        self.has_cache = (
            hasattr(module, "generate")
            and hasattr(module, "config")
            and not gives_last_logits(module)
        )
        self.cache: Any = None

    def next_logits(self, ids: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        """Returns the logits (V,) of the token after ``ids`` (1, T).

        Args:
            ids: all tokens.
            fresh: those of them that were not yet read.
        """
        torch = require_torch()
        if not self.has_cache:
            output = self.call(self.module, torch.as_tensor(ids))
            return np.asarray(first_float(output)[0, -1])
        # transformers 5.24 has given the cache another name.
        takes = inspect.signature(self.module.forward).parameters
        name = "cache" if "cache" in takes else "past_key_values"
        output = self.module(torch.as_tensor(fresh), **{name: self.cache}, use_cache=True)
        self.cache = output["cache" if "cache" in output else "past_key_values"]
        return np.asarray(output.logits[0, -1])
