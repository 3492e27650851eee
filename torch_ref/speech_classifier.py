"""An encoder of sound that gives scores to labels: Whisper's encoder with a head."""

import torch
from torch import nn

from torch_ref.blocks import Block, run_blocks
from torch_ref.builders import make_block, make_classifier_head, make_model_norm
from torch_ref.config_speech import SpeechClassifierConfig
from torch_ref.convolutions import SpeechStem
from torch_ref.heads import LayerSum, classified
from torch_ref.initializers import initialize
from torch_ref.layers import Dropout
from torch_ref.position_builders import make_position_embedding


class SpeechClassifier(nn.Module):
    """Computes scores of labels from frames of features (Whisper, arXiv 2212.04356).

    Two convolutions, ``stem``, make T / 2 positions of the T frames of a mel spectrogram; then
    follow sinusoids, blocks, final norm and classifier.

    Args:
        config: the settings.
        generator: where the initial weights come from; default torch's global one.
    """

    def __init__(self, config: SpeechClassifierConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        self.stem = SpeechStem(config.features.num_features, config.d_model)
        self.position_embedding = make_position_embedding(config)
        self.embedding_dropout = Dropout(config.embedding.embedding_dropout)
        self.blocks = nn.ModuleList(
            make_block(config, layer, causal=False) for layer in range(config.num_layers)
        )
        self.final_norm = make_model_norm(config) if config.norm.final_norm else None
        self.layer_sum = LayerSum(config.num_layers + 1) if config.layer_sum else None
        self.classifier = make_classifier_head(config)
        initialize(self, config.initialization, config.num_layers, generator)

    @property
    def layers(self) -> list[Block]:
        """The block of every layer, in turn."""
        return list(self.blocks)  # type: ignore[arg-type]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the scores of labels, of a sound (B, labels) or of each position (B, S, labels).

        Args:
            features: T frames of C numbers (B, C, T), as many as the config says.

        Raises:
            ValueError: features have another shape.
        """
        part = self.config.classifier
        scores: torch.Tensor = self.classifier(
            classified(self.hidden(features), None, part.classified)
        )
        return scores

    def hidden(self, features: torch.Tensor) -> torch.Tensor:
        """Returns what is classified: the last residual stream, normalised, or a mean of all.

        The mean is of what enters the first block and of what leaves each; of these the last is
        normalised. Arguments as in ``forward``.
        """
        x = self.embed(features)
        streams = [x]
        if self.layer_sum is None:
            x, _, _ = run_blocks(self.layers, x)
        else:
            for block in self.layers:
                x, _, _ = run_blocks([block], x)
                streams.append(x)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.layer_sum is None:
            return x
        summed: torch.Tensor = self.layer_sum(torch.stack((*streams[:-1], x)))
        return summed

    def embed(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the input (B, S, D) of the first block. Arguments as in ``forward``."""
        self.config.features.check_shape(tuple(features.shape))
        x = self.stem(features)
        if self.position_embedding is not None:
            x = x + self.position_embedding(x.shape[1]).to(x.dtype)
        dropped: torch.Tensor = self.embedding_dropout(x)
        return dropped
