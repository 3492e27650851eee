"""How many numbers a block computes of one token, and how many of them its backward pass needs."""

import dataclasses

from jaxformer.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class BlockWidths:
    """Elements of the arrays that a block computes of one token, on one device.

    ``hidden`` is the width of the feed-forward, or of all experts of a token together; ``routed``
    the rows that enter experts and leave them.
    """

    model: int
    queries: int
    keys: int
    hidden: int
    gates: int
    heads: int
    routed: int

    @classmethod
    def of(cls, config: TransformerConfig, tensor: int, *, experts: bool) -> "BlockWidths":
        """Returns those of a block of a model.

        Args:
            config: of the model.
            tensor: how many devices share heads and widths.
            experts: whether the block has experts.
        """
        head, kv_heads = config.head_width, config.key_value_heads
        hidden, part = config.feed_forward_width, config.feed_forward.experts
        chosen = part.experts_per_token if experts else 0
        if experts:
            hidden = chosen * config.expert_width + (part.shared_expert_d_ff or 0)
        return cls(
            model=config.d_model,
            queries=config.attention.num_heads * head // tensor,
            keys=kv_heads * head // (tensor if kv_heads % tensor == 0 else 1),
            hidden=hidden // tensor,
            gates=2 if config.feed_forward.is_gated else 1,
            heads=config.attention.num_heads // tensor,
            routed=2 * chosen * config.d_model,
        )

    def kept(self, remat: str) -> int:
        """Returns the elements of a token that a block keeps for its backward pass."""
        if remat == "full":
            return self.model
        projections = self.queries + 2 * self.keys + self.model + self.gates * self.hidden
        if remat == "dots":
            return self.model + projections
        # Also the results of both norms, the attention's output and the activation.
        return 3 * self.model + projections + self.queries + self.hidden + self.routed

    def kept_across(self, remat: str) -> int:
        """Returns the elements of a token that its attention to a source keeps beside those.

        Keys and values are of the source's tokens, and not counted.
        """
        if remat == "full":
            return 0
        # Also the results of the norm and of the attention.
        return (self.queries + self.model) * (1 if remat == "dots" else 2)
