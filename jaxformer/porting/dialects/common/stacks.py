"""The rules of stacks of blocks, as the families of Hugging Face name them."""

from collections.abc import Mapping

from jaxformer.porting.mapping.packings import FusedByHead, RotaryPermutation
from jaxformer.porting.mapping.rules import Rule, Rules, names, under
from jaxformer.positions import Rotary
from jaxformer.transformer_lm import TransformerLM


def rotated(module: TransformerLM, pairs: Mapping[str, str], *, neighbours: bool = False) -> Rules:
    """Returns rules for what a rotary embedding rotates, queries and keys: target = source.

    Most families rotate the two halves of a head. Where the target rotates neighbours, or the
    source alone does, the same model has the outputs of every head in another order.

    Args:
        module: the target.
        pairs: modules, target = source.
        neighbours: whether the source rotates neighbours.
    """
    positions = [block.attention.position for block in module.blocks]
    # A layer without rotary positions is the same model in any order that its q and k share.
    rotary = next((each for each in positions if isinstance(each, Rotary)), None)
    if rotary is None or rotary.interleaved == neighbours:
        return names(pairs)
    head_dim, width = module.config.head_width, rotary.width
    own_norms = module.config.attention.query_key.query_key_norm_over == "own_head"

    def rule(target: str, source: str) -> Rule:
        by_row = own_norms and target in ("q_norm", "k_norm")
        packing = RotaryPermutation(head_dim, width, neighbours, by_row)
        return Rule((target,), (source,), packing)

    return tuple(rule(*pair) for pair in pairs.items())


def stack_rules(
    layers: str,
    attention: tuple[str, Rules],
    feed_forward: tuple[str, Rules],
    norms: Mapping[str, str],
    **around: str,
) -> Rules:
    """Returns the rules of a stack of blocks, and of what is around it.

    Args:
        layers: what the source calls a block, with ``*`` for its index.
        attention: what it calls a block's attention, and the rules of that.
        feed_forward: the same of the feed-forward.
        norms: of a block: target = source.
        around: embeddings, final norm and the like: target = source.
    """
    block = (
        *under("attention", *attention),
        *under("feed_forward", *feed_forward),
        *names(norms),
    )
    return (*names(around), *under("blocks.*", layers, block))


def fused_stack(
    module: TransformerLM,
    layers: str,
    attention: str,
    norms: Mapping[str, str] | None = None,
    **around: str,
) -> Rules:
    """Returns the rules of BLOOM's stack or its kin's, with q, k and v in one array by head.

    Args:
        module: the target.
        layers: see ``stack_rules``.
        attention: what the source calls its attention.
        norms: of a block, where they are not called as in these.
        around: see ``stack_rules``.
    """
    usual = {
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
    }
    heads = FusedByHead(module.config.key_value_heads)
    qkv = Rule(("q_proj", "k_proj", "v_proj"), ("query_key_value",), heads)
    return stack_rules(
        layers,
        (attention, (qkv, *names(o_proj="dense", q_norm="q_layernorm", k_norm="k_layernorm"))),
        ("mlp", names(up_proj="dense_h_to_4h", down_proj="dense_4h_to_h")),
        norms or usual,
        **around,
    )
