"""``Model``: a module with its tokenizer, which writes text and is saved in any format."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxformer.api.text_model import Ids, TextModel
from jaxformer.char_data import CharTokenizer, Unknown
from jaxformer.data.tokenizers import HuggingFaceTokenizer
from jaxformer.dual_encoder import DualEncoder
from jaxformer.errors import UsageError
from jaxformer.inspection.attention_maps import AttentionMaps, Head, Kind, attention
from jaxformer.inspection.expert_load import experts
from jaxformer.inspection.inspected_model import InspectedModel
from jaxformer.inspection.narrowing_cost import NarrowingCost, narrowing_cost
from jaxformer.narrow_linear import is_narrow, narrow_weights
from jaxformer.parameters import get_parameters, merge, split
from jaxformer.porting.api import as_settings
from jaxformer.porting.arguments import check_options, check_text, read_names, read_path
from jaxformer.porting.checkpoint import Checkpoint, open_checkpoint
from jaxformer.porting.formats.raw_checkpoints import RawCheckpoint
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.port import plan_port, write_port
from jaxformer.porting.source_checks import check_patterns
from jaxformer.porting.targets import choose_target
from jaxformer.transformer_lm import TransformerLM
from jaxformer.vision_transformer import VisionTransformer

# The options of ``load``.
LOADING = [name for name in inspect.signature(open_checkpoint).parameters if name != "path"]


class Model(TextModel):
    """A model with its tokenizer: it writes text, is inspected, and is saved in any format.

    Args:
        module: the NNX module; it may be trained further, and is saved as it then is.
        tokenizer: makes ids of text and text of ids. Without one the model reads and writes ids.

    Attributes:
        module: as given.

    Raises:
        UsageError: the module is none of the whole models, or the tokenizer none of jaxformer's.
    """

    def for_writing(self, dtype: str) -> "Model":
        """Returns the same model with its weights stored narrower, which is read, not trained.

        It writes with every method of this class, is a ``draft``, and takes less memory once this
        model is dropped. See ``jaxformer.narrow_weights`` for what is narrow and what is not, and
        ``narrowing_cost`` for what it costs.

        Args:
            dtype: ``bfloat16`` or ``int8``.

        Raises:
            ValueError: the dtype is another, or a weight is not finite.
        """
        narrow = Model(narrow_weights(self.module, dtype), self._tokenizer)
        narrow._source, narrow._origin = self._source, self._origin
        return narrow

    def narrowing_cost(
        self, dtype: str, text: str | Ids, *, tokens: int = 100, unknown: Unknown = "error"
    ) -> NarrowingCost:
        """Returns how ``for_writing(dtype)`` differs from this model on a text; ``print`` it.

        Args:
            dtype: ``bfloat16`` or ``int8``.
            text: a text, or its ids (T,); the longer, the more it says.
            tokens: how many tokens both write greedily after the text's beginning.
            unknown: see ``stream``.

        Raises:
            UsageError: this is no language model that writes, or the text has fewer than two
                tokens or an id outside the vocabulary.
            TextError: the text has a character that the tokenizer does not know.
            ValueError: see ``for_writing``.
        """
        module = self._writer()
        ids = self._encode(text, unknown)[1] if isinstance(text, str) else np.asarray(text)
        return narrowing_cost(module, narrow_weights(module, dtype), ids, num_tokens=tokens)

    def attention(
        self,
        text: str | None = None,
        *,
        target: str | None = None,
        kind: Kind | None = None,
        layer: int | None = None,
        head: Head = "mean",
        unknown: Unknown = "error",
    ) -> AttentionMaps:
        """Returns who attends to whom in a text; a notebook shows it as a picture.

        Args:
            text: what the model reads; None lets a language model write one.
            target: of an encoder and decoder, what it has written; None lets it write.
            kind: which attention of an encoder and decoder: ``encoder``, ``decoder`` or, as by
                default, ``cross``: that of the target to the source.
            layer: which, from 0; None gives every layer.
            head: which, from 0; their mean; or ``all``.
            unknown: what to do with characters that the model does not know.

        Raises:
            UsageError: there is no such layer or head, the text is too long or has an id outside
                the vocabulary, or the model has no tokenizer.
            TextError: the text has a character that the tokenizer does not know.
        """
        if isinstance(self.module, VisionTransformer | DualEncoder):
            raise UsageError(
                f"this {type(self.module).__name__} reads images: call the module that sees them "
                "with return_weights=True"
            )
        self._check_reads_tokens()
        check_text("text", text)
        check_text("target", target)
        return AttentionMaps(
            attention(
                self._inspected(), text=text, target=target, kind=kind, layer=layer, head=head,
                unknown=unknown,
            )
        )  # fmt: skip

    def expert_load(self, text: str | None = None, *, unknown: Unknown = "error") -> dict[str, Any]:
        """Returns which experts compute a text: the numbers of ``jaxformer inspect experts``.

        Args:
            text: what the model reads; None lets it write one.
            unknown: what to do with characters that the model does not know.

        Returns:
            ``layers`` (L), those with experts; ``load`` (L, E), the share of tokens that each
            expert computes; ``probability`` (L, E), its mean probability; ``choices`` and
            ``weights`` (L, T, C) of each token; ``balance`` (L), C where all experts are used
            alike; ``text`` and its ``tokens`` (T).

        Raises:
            UsageError: the model has no experts or no tokenizer, or the text is too long or has an
                id outside the vocabulary.
            TextError: the text has a character that the tokenizer does not know.
        """
        if not isinstance(self.module, TransformerLM):
            raise UsageError(
                f"experts are inspected in language models: this is {type(self.module).__name__}"
            )
        check_text("text", text)
        return experts(self._inspected(), text=text, unknown=unknown)

    def _inspected(self) -> InspectedModel:
        targets = ([], None) if self._source is None else self._source.target_ids()
        # A copy that shares the arrays: the module itself may be in training mode.
        module = merge(*split(self.module))
        module.eval()
        return InspectedModel(module, self.tokenizer, targets, tuple(self._last_ids()))

    def save(
        self,
        path: str | Path,
        format: Literal["torch", "jax", "hf", "peft"] | None = None,
        *,
        dialect: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Writes the model, reads it back and compares, as ``jaxformer port`` does.

        Args:
            path: ``NAME.safetensors``, ``NAME.pt``, or a folder. A certificate of every array is
                written into the folder, or beside the file.
            format: a PyTorch file, a run's folder, a Hugging Face folder, or PEFT's folder, which
                has the adapters alone; default by the name. All but PEFT's, and files with
                jaxformer's or torch_ref's names, have the adapters in their weights.
            dialect: whose names the arrays get; default those that they came with, else
                torch_ref's.
            dtype: what the weights are rounded to; default their own.
            overwrite: replace what an earlier ``save`` has written.

        Returns:
            The path.

        Raises:
            UsageError: there is no such format, something is there already, no dialect can hold the
                model, or it is one of ``for_writing``.
            ResourceError: the disk is full or may not be written to.
        """
        path = read_path("path", path)
        if is_narrow(self.module):
            raise UsageError("narrow weights are for writing text: save the model that had its own")
        target = choose_target(path, format, overwrite=overwrite, dialect=dialect, dtype=dtype)
        port = plan_port(self._checkpoint(path), target)
        write_port(port, source="a model in memory", command=f"{self!r}.save({str(path)!r})")
        return path

    def _checkpoint(self, path: Path) -> Checkpoint:
        """Returns the module, as it is now, in the form in which ports read a checkpoint."""
        source = self._source
        tokenizer, vocabulary, file = self._tokenizer, None, None
        companions: Mapping[str, Path] = {}
        record: dict[str, Any] = {"dialect": "jaxformer", "config": self.config.settings()}
        if source is not None:
            companions, vocabulary = source.files_beside(), source.vocabulary
            file = source.tokenizer_file
            record |= {"origin": dict(self._origin), "token_ids": source.token_ids}
            if source.base is not None:
                record["init_from"] = source.base
        if isinstance(tokenizer, CharTokenizer):
            vocabulary = "".join(tokenizer.vocabulary)
        elif isinstance(tokenizer, HuggingFaceTokenizer):
            file = tokenizer.path
        tensors = {
            name: StoredTensor.of(np.asarray(array))
            for name, array in get_parameters(self.module).items()
        }
        raw = RawCheckpoint("run", (), tensors, record, tuple(companions.values()))
        return Checkpoint(
            path, raw, "jaxformer", self.config, vocabulary, file, record.get("token_ids", {})
        )


def load(path: str | Path, **options: Any) -> Model:
    """Loads a model from a checkpoint of any format.

    Weights in float64 are rounded to float32 unless JAX is set to hold float64.

    Args:
        path: a run's folder, a ``.safetensors`` or ``.pt`` file, a Hugging Face folder, or PEFT's
            folder of adapters.
        options: ``dialect``, ``config``, ``meta``, ``step``, ``best``, ``ignore``, ``force`` and
            ``base`` of ``jaxformer.porting.open_checkpoint``.

    Returns:
        The model, in evaluation mode.

    Warns:
        UserWarning: damaged steps of a run were skipped.

    Raises:
        CheckpointError: it is missing, damaged, or its arrays do not fit; all problems are listed.
        UnsafeFileError: opening it could do harm.
        UsageError: its dialect or an option is unknown, an argument is of another kind, or it
            holds a part of a model alone.
        ResourceError: it cannot be read.
    """
    check_options("load", options, LOADING)
    path = read_path("path", path)
    readers: dict[str, Callable[[Any], Any]] = {
        "config": lambda config: config if isinstance(config, str | Path) else as_settings(config),
        "ignore": functools.partial(read_names, "ignore"),
        "meta": functools.partial(read_path, "meta"),
        "base": functools.partial(read_path, "base"),
    }
    for name, read in readers.items():
        if options.get(name) is not None:
            options[name] = read(options[name])
    checkpoint = open_checkpoint(path, **options)
    check_patterns(checkpoint)
    for warning in checkpoint.raw.warnings:
        warnings.warn(warning, stacklevel=2)
    return Model.of_checkpoint(checkpoint)
