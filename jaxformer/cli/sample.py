"""``jaxformer sample``: text from a trained model."""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxformer.checks import check_integers
from jaxformer.errors import TextError, UsageError

# Below this, float32 has no room for a logit over the temperature, nor for a share of all tokens.
SMALLEST = 1e-6

if TYPE_CHECKING:
    import numpy as np


def check(options: Any) -> None:
    """Checks the ranges of the command's settings, before JAX is imported.

    Raises:
        ValueError: one of them is out of its range; the message names it.
    """
    if not (math.isfinite(options.temperature) and options.temperature > 0):
        raise ValueError(f"--temperature must be positive and finite: got {options.temperature}")
    if options.temperature < SMALLEST:
        raise ValueError(
            f"--temperature must be at least {SMALLEST}: got {options.temperature}; the most "
            "probable token is what --greedy takes"
        )
    check_integers(options, "tokens", "samples", "top_k")
    for name in ("tokens", "samples", "top_k"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1: got {value}")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ValueError(f"--top-p must be in (0, 1]: got {options.top_p}")
    if options.top_p is not None and options.top_p < SMALLEST:
        raise ValueError(f"--top-p must be at least {SMALLEST}: got {options.top_p}")
    if not 0 <= options.seed <= 2**63 - options.samples:
        raise ValueError(
            f"--seed must be in [0, 2^63), with one more for each sample: got {options.seed}"
        )
    if options.step is not None and options.best:
        raise ValueError("--step and --best exclude each other")
    if options.prompt and options.prompt_ids:
        raise ValueError("--prompt and --prompt-ids exclude each other")
    parse_ids(options.prompt_ids)


def parse_ids(text: str) -> list[int]:
    """The ids of ``--prompt-ids 1,2,3``.

    Raises:
        ValueError: it is none.
    """
    try:
        ids = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"--prompt-ids must be numbers with commas between: got {text}") from None
    if any(not 0 <= i < 2**31 for i in ids):
        raise ValueError(f"--prompt-ids must be in [0, 2^31): got {text}")
    return ids


def sample(
    model: Any,
    tokenizer: Any,
    *,
    prompt: str,
    prompt_ids: Sequence[int],
    first_ids: Sequence[int],
    last_ids: Sequence[int],
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    greedy: bool,
    samples: int,
    unknown: Any,
) -> None:
    """Writes texts to standard output as they are made, each begun by the prompt.

    How fast they were is said on standard error at the end.

    Args:
        model: gives the ``TransformerLM``; called once the prompt stands.
        tokenizer: makes ids of text and text of ids; None writes ids.
        prompt: what a text begins with; where it is empty, ``first_ids``, or else a new line, that
            are not shown.
        prompt_ids: the ids of the prompt, instead of it.
        first_ids: what stands before every text.
        last_ids: after any of these a text is at its end.
        tokens: how many to write after the prompt.
        temperature: see ``logits.filter_logits``.
        top_k: see ``logits.filter_logits``.
        top_p: see ``logits.filter_logits``.
        seed: text n is drawn from seed + n.
        greedy: take the most probable token.
        samples: how many texts.
        unknown: see ``CharTokenizer.encode``.

    Raises:
        TextError: the prompt holds a character or an id that the model does not know.
        UsageError: the model cannot write, or there is neither a tokenizer nor a prompt of ids.
    """
    ids, shown = _prompt(tokenizer, prompt, prompt_ids, first_ids, unknown)

    import jax

    from jaxformer.generation import stream

    speed = _Speed()

    built = model()
    known = built.config.vocab_size
    if wrong := [int(i) for i in ids if not 0 <= i < known]:
        raise TextError(f"id {wrong[0]} of the prompt is outside the model's {known} tokens")
    if not built.config.causal or built.config.head == "none":
        raise UsageError("only a causal model with a head writes text, and this is none")
    for n in range(samples):
        if samples > 1:
            _write(("\n\n" if n else "") + f"--- {n + 1} of {samples} ---\n")
        _write(shown)
        chunks = stream(
            built,
            ids[None],
            tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            greedy=greedy,
            key=jax.random.key(seed + n),
            stop_tokens=[i for i in last_ids if 0 <= i < known],
        )
        for text in _texts(tokenizer, ids, speed.watch(chunks), last_ids):
            _write(text)
    _write("\n")
    sys.stderr.write(f"{speed}\n")


def _prompt(
    tokenizer: Any, prompt: str, prompt_ids: Sequence[int], first_ids: Sequence[int], unknown: Any
) -> tuple["np.ndarray", str]:
    """The ids that a text begins with, and what is shown of them."""
    import numpy as np

    if prompt_ids:
        ids = np.array(prompt_ids, np.int64)
        known = tokenizer is not None and ids.max() < tokenizer.vocabulary_size()
        return ids, tokenizer.decode(ids) if known else " ".join(map(str, prompt_ids))
    if tokenizer is None:
        raise UsageError(
            "there is no tokenizer: give --meta FILE (nanoGPT's meta.pkl or a tokenizer.json), or "
            "ids instead of text with --prompt-ids 1,2,3"
        )
    if prompt:
        ids = tokenizer.encode(prompt, unknown=unknown)
        if len(ids):
            return ids, prompt
    if first_ids:
        return np.array(first_ids, np.int64), ""
    return tokenizer.encode("\n", unknown="replace"), ""


def _texts(
    tokenizer: Any, ids: "np.ndarray", chunks: Iterable["np.ndarray"], last_ids: Sequence[int]
) -> Iterator[str]:
    """What each chunk adds to the text, until the text is at its end."""
    made: list[int] = []
    # A token may be half a character, and what it is can depend on the one before: the text is
    # decoded from its start, and a character that is not whole yet waits for the next chunk.
    written = "" if tokenizer is None else tokenizer.decode(ids)
    for chunk in chunks:
        new = [int(i) for i in chunk[0]]
        end = next((place for place, i in enumerate(new) if i in last_ids), len(new))
        if tokenizer is None:
            yield "".join(f" {i}" for i in new[:end])
        else:
            made += [i for i in new[:end] if i < tokenizer.vocabulary_size()]
            text = tokenizer.decode([*ids, *made])
            whole = text.rstrip("\N{REPLACEMENT CHARACTER}") if end == len(new) else text
            yield whole[len(written) :]
            written = whole if len(whole) > len(written) else written
        if end < len(new):
            return


class _Speed:
    """How fast tokens come, apart from what is compiled meanwhile.

    Attributes:
        first_tokens: seconds from each text's start to its first token, and whether a program was
            compiled in them.
        tokens: how many came after a first one while nothing was compiled.
        seconds: that they took.
    """

    def __init__(self) -> None:
        self.first_tokens: list[tuple[float, bool]] = []
        self.tokens = 0
        self.seconds = 0.0
        self._compiled = False

    def watch(self, chunks: Iterable["np.ndarray"]) -> Iterator["np.ndarray"]:
        """The chunks of one text; only the time until each comes is counted."""
        import jax

        jax.monitoring.register_event_duration_secs_listener(self._notice)
        try:
            begin = time.perf_counter()
            for number, chunk in enumerate(chunks):
                seconds = time.perf_counter() - begin
                if number == 0:
                    self.first_tokens.append((seconds, self._compiled))
                elif not self._compiled:
                    self.tokens += chunk.shape[1]
                    self.seconds += seconds
                self._compiled = False
                yield chunk
                begin = time.perf_counter()
        finally:
            jax.monitoring.unregister_event_duration_listener(self._notice)

    def __str__(self) -> str:
        parts = []
        for was_compiled, words in ((True, ", compilation included"), (False, "")):
            found = [seconds for seconds, compiled in self.first_tokens if compiled == was_compiled]
            if found:
                parts.append(f"first token after {sum(found) / len(found):.3g} s{words}")
        if self.seconds:
            parts.append(f"{self.tokens / self.seconds:,.0f} tokens/s after it")
        return "; ".join(parts)

    def _notice(self, event: str, duration_secs: float, **_: Any) -> None:
        self._compiled |= event == "/jax/core/compile/backend_compile_duration"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
