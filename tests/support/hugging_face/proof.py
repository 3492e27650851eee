"""The proof of one case: both sides, built once, and what is measured of them.

Every measure is a difference relative to the largest entry of what transformers computes. What is
measured is saved for docs/reference/models.md where the environment names a folder for it.
"""

import functools
import json
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.generation import generate
from jaxformer.parameters import merge, split
from jaxformer.porting.api import export_plan, from_torch
from jaxformer.porting.dialects.multimodal import MULTIMODAL, text_part
from jaxformer.porting.formats.arrays import to_stored_tensors
from jaxformer.porting.mapping.transfer import import_tensors
from jaxformer.sequence_generation import generate_target
from jaxformer.speech_classifier import SpeechClassifier
from jaxformer.vision_transformer import VisionTransformer
from tests.support.hugging_face.building import build_case, build_exact, ported_buffers, randomize
from tests.support.hugging_face.case import BATCH, LENGTH, VOCAB
from tests.support.hugging_face.cases import ALL_CASES
from tests.support.hugging_face.precision import in_float32, in_float64
from tests.support.hugging_face.running import (
    difference,
    read_by,
    run_source,
    run_target,
    source_states,
    stacks_of,
    target_part,
    target_states,
    tokens,
)

GENERATED = 41
# The environment's name of the folder in which measures are saved.
FIGURES = "JAXFORMER_FIGURES"


class Proof:
    """A case on both sides, with random weights everywhere.

    Attributes:
        name: of the case.
        case: see ``Case``.
    """

    def __init__(self, name: str):
        self.name = name
        self.case = ALL_CASES[name]

    @functools.cached_property
    def source(self) -> Any:
        """The model of transformers in float64, its tables in float32."""
        return randomize(build_case(self.case), copies=self.case.copies)

    @functools.cached_property
    def exact_source(self) -> Any:
        """The same, its tables in float64; run it within ``in_float64``."""
        return build_exact(self.case, self.source.state_dict())

    @functools.cached_property
    def target(self) -> Any:
        """The model of jaxformer."""
        return self._port(self.source)

    def _port(self, source: Any) -> Any:
        is_whole = self.case.dialect not in MULTIMODAL
        return from_torch(source, self.case.dialect if is_whole else None, ignore=self.case.ignore)

    def outputs_and_gradients(self) -> dict[str, float]:
        """Differences of the outputs, of the hidden states, and of each parameter's gradient.

        One row is whole, one padded to its left (to its right where the case says so), one to its
        right; padded places count nowhere.
        """
        real = np.ones((3, LENGTH), bool)
        real[1, slice(57) if self.case.left_padding else slice(-57, None)] = False
        real[2, -71:] = False
        ids = np.where(real, tokens(3, real.shape), self.case.pad_token)
        written, counted = ids, real
        if isinstance(self.target, EncoderDecoder):
            written, counted = target_part(ids), target_part(real)
        # Neither an image nor a sound has padding.
        has_no_text = isinstance(self.target, VisionTransformer | SpeechClassifier)
        if has_no_text:
            written = counted = real = np.ones((3, self.target.config.context_length), bool)
        labels = np.roll(written, -1, axis=1)
        stacks = stacks_of(self.target)
        positions = np.maximum(np.cumsum(real, 1) - 1, 0) if self.case.counts_tokens else None
        definition, parameters = split(self.target)

        def loss(parameters: Any, mask: Any) -> Any:
            with target_states() as states:
                given = {} if mask is None else {"mask": mask, "positions": positions}
                outputs = run_target(merge(definition, parameters), ids, **given)
            return _target_loss(outputs, labels, counted), (outputs, states)

        source = self.exact_source
        source.zero_grad()
        for bias in ported_buffers(source).values():
            bias.requires_grad_()
        with in_float64():
            with source_states(source, stacks) as expected_states:
                expected = run_source(source, ids, attention_mask=real.astype(int))
            _source_loss(expected, labels, counted).backward()
            step = jax.jit(jax.value_and_grad(loss, has_aux=True))
            mask = None if has_no_text else jnp.asarray(real)[:, None, None, :]
            (_, (found, states)), gradients = step(parameters, mask)
        assert len(states) == sum(stacks) + len(stacks)
        return self.save(
            {
                "outputs": _worst(found, expected, real),
                "states": _worst(states, expected_states, real),
                "gradients": self._gradients(gradients),
            }
        )

    def without_mask(self) -> dict[str, float]:
        """The difference of the outputs where no mask is given.

        Once more with the tables of both sides in float32, as users have them.
        """
        exact, found = self._outputs_with_tables
        return self.save(
            {
                "outputs": _worst(exact[0], exact[1]),
                "as_it_is": _worst(found[0], found[1]),
            }
        )

    def rounding_of_tables(self) -> tuple[float, float]:
        """The root mean square error that float32 tables make, of jaxformer and of transformers."""
        (_, exact), (candidate, reference) = self._outputs_with_tables
        scale = max(float(np.abs(e.numpy()).max()) for e in exact)

        def error(outputs: list[Any]) -> float:
            pairs = zip(outputs, exact, strict=True)
            squares = [np.square(np.asarray(o) - e.numpy()).mean() for o, e in pairs]
            return float(np.sqrt(max(squares))) / scale

        return error(candidate), error(reference)

    @functools.cached_property
    def _outputs_with_tables(self) -> list[tuple[list[Any], list[torch.Tensor]]]:
        """What both sides compute with their tables in float64, and in float32."""
        ids = tokens(5)
        # Built first, so that its tables are float32.
        source = self.source
        outputs = []
        for context, model in ((in_float64, self.exact_source), (in_float32, source)):
            with context():
                expected = [array.detach() for array in run_source(model, ids)]
                outputs.append((_run_compiled(self.target, ids), expected))
        return outputs

    def _gradients(self, found: dict[str, Any]) -> float:
        """The largest difference of any parameter's gradient."""
        source = self.exact_source
        ported = {
            name: parameter
            for name, parameter in (*source.named_parameters(), *ported_buffers(source).items())
            if parameter.requires_grad
            and not any(fnmatchcase(name, pattern) for pattern in self.case.ignore)
        }
        named, _ = text_part(ported, source.config.to_dict())
        for name, buffer in ported_buffers(source).items():
            if name.endswith("e_score_correction_bias"):
                assert buffer.grad is None
                named[name].grad = torch.zeros_like(buffer)
        reference = {k: p.grad for k, p in named.items() if p.grad is not None}
        unused = named.keys() - reference.keys()
        never = {name for name in unused if name.startswith(self.case.unused)}
        unused -= never
        assert unused <= self.case.copies.keys(), unused
        reference |= {name: reference[self.case.copies[name]] for name in unused}
        reference |= {name: torch.zeros_like(named[name]) for name in never}
        plan = export_plan(self.target)
        for alias, name in plan.module_mapping.aliases.items():
            reference.setdefault(name, reference.get(alias))
        expected = import_tensors(plan.links, to_stored_tensors(reference))
        assert found.keys() == expected.keys()
        worst = 0.0
        for name, gradient in found.items():
            reference_gradient = expected[name].read()
            if self.case.unused and not reference_gradient.any():
                assert not gradient.any(), name
                continue
            if name.endswith("choice_bias"):
                assert not gradient.any(), name
                continue
            if name.endswith("k_proj.bias"):
                # Without positions in between it adds the same to all scores of a query, which the
                # softmax does not see.
                noise = 1e-12 * np.abs(found[name.replace("k_proj", "q_proj")]).max()
                if np.abs(reference_gradient).max() <= noise:
                    assert np.abs(gradient).max() <= noise, name
                    continue
            worst = max(worst, difference(gradient, reference_gradient, name))
        return worst

    def texts(self) -> tuple[np.ndarray, np.ndarray]:
        """The greedy continuations of jaxformer and of transformers, with caches."""
        case = self.case
        source = build_case(case)
        # Such that a text does not repeat its last token.
        randomize(source, std=case.std, embeddings=case.embeddings, copies=case.copies)
        source = build_exact(case, source.state_dict())
        prompt = tokens(4, (BATCH, 11))
        if source.config.is_encoder_decoder:
            return self._targets(source, prompt)
        more = {}
        if case.positions_are_rows:
            # Those of its forward pass: ``generate`` of transformers 5 begins with row 0.
            rows = torch.arange(prompt.shape[1]) + source.config.pad_token_id + 1
            more["position_ids"] = rows.expand(prompt.shape)
        with in_float64():
            expected = source.generate(
                torch.as_tensor(prompt),
                attention_mask=torch.ones(prompt.shape, dtype=torch.long),
                do_sample=False,
                max_new_tokens=GENERATED,
                pad_token_id=0,
                **more,
            )
            found = generate(self._port(source), prompt, GENERATED, greedy=True)
        self.save({"tokens": GENERATED})
        return found, expected[:, prompt.shape[1] :].numpy()

    def _targets(self, source: Any, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same of an encoder and decoder: its targets of a source, part of it padding."""
        real = np.ones(prompt.shape, bool)
        real[1, -3:] = False
        ids = np.where(real, prompt, self.case.pad_token)
        start = source.config.decoder_start_token_id
        given, mask, more = ids, real, {"attention_mask": torch.as_tensor(real.astype(int))}
        if self.case.hears:
            given, mask, more = read_by(source, ids), None, {}
        with in_float64():
            # Not Whisper's own, which cuts sound into pieces and texts at times.
            expected = transformers.GenerationMixin.generate(
                source,
                torch.as_tensor(given),
                **more,
                do_sample=False,
                num_beams=1,
                max_new_tokens=GENERATED,
                pad_token_id=0,
                decoder_start_token_id=start,
            )
            found = generate_target(
                self._port(source),
                given,
                GENERATED,
                start_BT=np.full((BATCH, 1), start),
                greedy=True,
                mask=mask,
            )
        self.save({"tokens": GENERATED})
        return found, expected[:, 1:].numpy()

    def save(self, figures: dict[str, float]) -> dict[str, float]:
        """Saves what was measured, if the environment names a folder for it, and returns it."""
        if folder := os.environ.get(FIGURES):
            with Path(folder, f"models.{os.getpid()}").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": self.name, **figures}) + "\n")
        return figures


def _run_compiled(target: Any, ids: np.ndarray) -> list[Any]:
    """What ``run_target`` returns, as one program: odd shapes would compile every operation."""
    definition, parameters = split(target)
    return jax.jit(lambda parameters: run_target(merge(definition, parameters), ids))(parameters)


def _worst(found: list[Any], expected: list[torch.Tensor], real: np.ndarray | None = None) -> float:
    """The largest difference at the real tokens, of several outputs."""
    pairs = [(np.asarray(f), e.detach().numpy()) for f, e in zip(found, expected, strict=True)]
    if real is not None:
        pairs = [(f[_counts(f, real)], e[_counts(e, real)]) for f, e in pairs]
    return max(difference(f, e) for f, e in pairs)


def _counts(output: Any, real: np.ndarray) -> np.ndarray:
    """Which entries count: the real tokens, and of what is pooled the rows that begin with one."""
    if output.ndim == 3 and output.shape[1] != real.shape[1]:
        part = target_part(real)
        if len(output) != len(real) or output.shape[1] != part.shape[1]:
            # Of images every patch.
            return np.ones(output.shape[:2], bool)
        real = part
    if len(output) != len(real):
        # Of every image.
        return np.ones(len(output), bool)
    return real if output.ndim == 3 else real[:, 0]


def _source_loss(outputs: list[torch.Tensor], labels: np.ndarray, real: np.ndarray) -> torch.Tensor:
    if outputs[0].shape[-1] == VOCAB:
        return torch.nn.functional.cross_entropy(outputs[0][real], torch.as_tensor(labels)[real])
    return sum((o[_counts(o, real)].sin() * (1 + n)).sum() for n, o in enumerate(outputs))


def _target_loss(outputs: list[Any], labels: np.ndarray, real: np.ndarray) -> Any:
    if outputs[0].shape[-1] == VOCAB:
        log_probs = jax.nn.log_softmax(outputs[0][real])
        return -jnp.take_along_axis(log_probs, jnp.asarray(labels[real])[:, None], -1).mean()
    return sum((jnp.sin(o[_counts(o, real)]) * (1 + n)).sum() for n, o in enumerate(outputs))
