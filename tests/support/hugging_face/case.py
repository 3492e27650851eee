"""What is said of one configuration of a model type, and the sizes that most of them share.

Small models compile longer than they run. The sizes below are shared on purpose: what one case
has compiled serves the others. A case changes those that it is about.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# B, T and V; T is beyond the sliding windows and where a wrong position shows.
BATCH, LENGTH, VOCAB = 2, 303, 37
SIZES = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 44,
    "max_position_embeddings": 320,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
# Widths of heads of which a part can be turned.
PARTIAL = {**SIZES, "hidden_size": 32}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# The shapes of rotary settings before transformers 5.
OLD_LINEAR = {"type": "linear", "factor": 3.0}


@dataclass(frozen=True)
class Case:
    """A model: its dialect, its class in transformers, and the settings that are not defaults.

    Attributes:
        dialect: its name, which is the ``model_type``.
        kind: the class.
        settings: what its config.json says; ``vocab_size`` and no special tokens are added.
        arguments: of the class.
        attention: the path of transformers that is the reference: ``sdpa`` where ``eager`` rounds.
        counts_tokens: whether positions count from a row's first real token, and not from its
            first place.
        positions_are_rows: whether ``position_ids`` are rows of the table, the first behind the
            padding token's.
        left_padding: whether texts that are padded to their left are compared too; not where
            transformers counts rounded positions from a row's first real token, see ``notes``.
        pad_token: what stands in the padded places.
        copies: parameters that transformers has twice and uses once: the one that is not used, by
            name, and the one that is.
        without_effect: settings that need not come back, because in this model nothing reads them;
            those of a part by its name too: ``vision_config.projection_dim``.
        std: how far the weights of the model that writes are moved; larger ones make a text that
            does not repeat its last token.
        embeddings: a factor on its embeddings, see ``randomize``; small ones help a pre-norm model.
        notes: where transformers rounds, for the table of docs/reference/models.md.
        ignore: patterns of arrays that are not ported.
        unused: the starts of names of parameters that the class keeps and never uses: their
            gradients are 0.
    """

    dialect: str
    kind: str
    settings: Mapping[str, Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "eager"
    counts_tokens: bool = False
    positions_are_rows: bool = False
    left_padding: bool = True
    pad_token: int = 0
    copies: Mapping[str, str] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    std: float = 0.5
    embeddings: float = 0.2
    notes: str = ""
    ignore: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def makes_text(self) -> bool:
        """Whether the class has a head that writes token by token."""
        return self.kind.endswith(
            ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel")
        )

    @property
    def sees(self) -> bool:
        """Whether the class reads images alone."""
        return "image_size" in self.settings or self.kind.endswith("ForImageClassification")

    @property
    def hears(self) -> bool:
        """Whether the class reads features of sound, and texts."""
        return self.kind in ("WhisperForConditionalGeneration", "WhisperModel")

    @property
    def is_pair(self) -> bool:
        """Whether the class reads texts and images, as two models side by side."""
        return self.kind in ("CLIPModel", "SiglipModel")

    @property
    def usual(self) -> dict[str, Any]:
        """Settings that all cases of texts have: of their vocabulary."""
        ids = {"bos_token_id": None, "eos_token_id": None}
        return {} if self.sees or self.is_pair else {"vocab_size": VOCAB, **ids}
