"""The table of mutants: known bugs, put in on purpose, each of which its case must detect."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer.adapters as adapters
import jaxformer.attention as attention
import jaxformer.blocks as blocks
import jaxformer.builders as builders
import jaxformer.convolutions as convolutions
import jaxformer.disentangled as disentangled
import jaxformer.dual_encoder as dual_encoder
import jaxformer.encoder_decoder as encoder_decoder
import jaxformer.encoder_decoder_classifier as encoder_decoder_classifier
import jaxformer.experts as experts
import jaxformer.feed_forward as feed_forward
import jaxformer.heads as heads
import jaxformer.latent_attention as latent_attention
import jaxformer.layers as layers
import jaxformer.losses as losses
import jaxformer.norms as norms
import jaxformer.patches as patches
import jaxformer.pooling as pooling
import jaxformer.positions as positions
import jaxformer.speech_classifier as speech_classifier
import jaxformer.speech_transformer as speech_transformer
import jaxformer.transformer_classifier as transformer_classifier
import jaxformer.transformer_lm as transformer_lm
import jaxformer.vision_transformer as vision_transformer

Patch = pytest.MonkeyPatch


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug, and the case that must detect it.

    Attributes:
        name: what is wrong.
        case: the case.
        mutate: makes it wrong on the JAX side.
        proof: which proof of the case must fail.
    """

    name: str
    case: str
    mutate: Callable[[Patch], None]
    proof: str = "float64"


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Returns a mutation that replaces an attribute by ``make(original)``."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def setting(cls: type, name: str, value: Any) -> Callable[[Patch], None]:
    """Returns a mutation that changes a setting of every new object of a class."""

    def make(original: Any) -> Any:
        def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            setattr(self, name, value(self) if callable(value) else value)

        return constructor

    return replace(cls, "__init__", make)


def swapped_pair(original: Any) -> Any:
    """Rotates by the opposite angle."""
    return lambda *args: (original(*args)[0], -original(*args)[1])


def narrow_layer_norm(self: Any, x: Any) -> Any:
    """A LayerNorm computed in the dtype of its input."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    scale, bias = (p[...].reshape(1, 1, -1) for p in (self.scale, self.bias))
    return centred * jax.lax.rsqrt(variance + self.eps) * scale + bias


def fast_variance(self: Any, x: Any) -> Any:
    """A LayerNorm whose variance is E[x²] - E[x]², with one degree of freedom less."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True, ddof=1)
    scale, bias = (p[...].reshape(1, 1, -1) for p in (self.scale, self.bias))
    return (x - mean) * jax.lax.rsqrt(variance + self.eps) * scale + bias


def channels_last(self: Any, images: Any) -> Any:
    """Patches whose numbers are in the order row, column, channel."""
    parts = images[:, :, :9, :20].reshape(3, 2, 3, 3, 4, 5).transpose(0, 2, 4, 3, 5, 1)
    return self.proj(parts.reshape(3, 12, -1))


def softmax_first(self: Any, x: Any) -> Any:
    """A softmax over all experts, of which some are chosen then, for one over the chosen alone."""
    probabilities = jax.nn.softmax(self.proj(x), axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, self.experts_per_token)
    return experts.Routing(chosen, weights, probabilities)


def best_of_groups(self: Any, scores: Any) -> Any:
    """Groups of experts chosen by their largest score, and not by the sum of two."""
    by_group = scores.reshape(scores.shape[0], self.groups, -1)
    _, groups = jax.lax.top_k(jnp.max(by_group, axis=-1), self.groups_per_token)
    is_chosen = jnp.any(groups[:, :, None] == jnp.arange(self.groups)[None, None, :], axis=1)
    return jnp.where(is_chosen[:, :, None], by_group, -jnp.inf).reshape(scores.shape)


def post_norm_formula(self: Any, x: Any, branches: Any) -> Any:
    """Post-norm where pre-norm belongs."""
    for norm, branch, drop in branches:
        x = norm(x + drop(branch(x)))
    return x


def sequential_formula(self: Any, x: Any, branches: Any) -> Any:
    """Branch after branch where they belong side by side."""
    for norm, branch, drop in branches:
        x = x + drop(branch(norm(x)))
    return x


def no_residual(self: Any, x: Any, branches: Any) -> Any:
    """The first branch replaces the residual stream."""
    (norm, branch, drop), *rest = branches
    x = drop(branch(norm(x)))
    return sequential_formula(self, x, rest)


def dropout_before_activation(self: Any, x: Any) -> Any:
    """The hidden dropout in front of the activation."""
    hidden = feed_forward.ACTIVATIONS[self.activation](self.hidden_dropout(self.up_proj(x)))
    return self.output_dropout(self.down_proj(hidden))


def unscaled_dropout(self: Any, x: Any) -> Any:
    """Dropout that does not make up for what it drops."""
    keep = self.keep(x.shape)
    return x if keep is None else jnp.where(keep, x, 0)


def shifted_targets(original: Any) -> Any:
    """Compares each logit with the target after its own."""
    return lambda logits, targets: original(logits, jnp.roll(targets, -1, axis=1))


def swapped_attributes(cls: type, one: str, other: str) -> Callable[[Patch], None]:
    """Exchanges two sub-modules while a module is called."""

    def make(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            first, second = getattr(self, one), getattr(self, other)
            setattr(self, one, second)
            setattr(self, other, first)
            result = original(self, *args, **kwargs)
            setattr(self, one, first)
            setattr(self, other, second)
            return result

        return call

    return replace(cls, "__call__", make)


def core(**changes: Any) -> Callable[[Patch], None]:
    """The attention core called with changed arguments."""

    def make(original: Any) -> Any:
        def call(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
            for name, change in changes.items():
                kwargs[name] = change(kwargs.get(name))
            return original(q, k, v, **kwargs)

        return call

    return replace(attention, "scaled_dot_product_attention", make)


def without(cls: type, name: str, method: str = "__call__") -> Callable[[Patch], None]:
    """Takes away a part while a method runs."""

    def make(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            part = getattr(self, name)
            setattr(self, name, None)
            result = original(self, *args, **kwargs)
            setattr(self, name, part)
            return result

        return call

    return replace(cls, method, make)


def output_norm_first(self: Any, x: Any, branches: Any) -> Any:
    """The output norms beside the input norms, in front of the branches."""
    norms, calls, drops = zip(*branches, strict=True)
    output_norms = [
        self.attention_output_norm, self.cross_attention_output_norm, self.feed_forward_output_norm
    ]  # fmt: skip
    self.attention_output_norm = self.cross_attention_output_norm = None
    self.feed_forward_output_norm = None
    for norm, output_norm, branch, drop in zip(norms, output_norms, calls, drops, strict=True):
        x = x + drop(branch(output_norm(norm(x))))
    return x


def second_branch_bare(self: Any, x: Any, branches: Any) -> Any:
    """Side by side, but the second branch without its norm."""
    (norm, attend, drop), (_, feed, drop_feed) = branches
    return x + drop(attend(norm(x))) + drop_feed(feed(x))


def run_with_masks(change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Gives the blocks of a model other masks of its own."""
    return replace(
        transformer_lm,
        "run_blocks",
        lambda original: lambda b, x, masks, **k: original(b, x, change(masks), **k),
    )


def interleaved_heads(original: Any) -> Any:
    """Query head n with key/value head n mod K."""

    def call(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        groups = q.shape[2] // k.shape[2]
        k, v = (jnp.tile(x, (1, 1, groups, 1)) for x in (k, v))
        return original(q, k, v, **kwargs)

    return call


MUTANTS = [
    Mutant("a linear layer forgets its bias", "layers/linear",
          without(layers.Linear, "bias")),
    Mutant("an embedding is off by one row", "layers/embedding", replace(
        layers.Embedding, "__call__", lambda original: lambda self, i: original(self, i - 1))),
    Mutant("dropout does not rescale", "layers/dropout",
          replace(layers.Dropout, "__call__", lambda _: unscaled_dropout), "dropout"),
    Mutant("LayerNorm with Flax's eps", "norms/layer-norm", setting(norms.LayerNorm, "eps", 1e-6)),
    Mutant("LayerNorm with the unbiased variance", "norms/layer-norm",
          replace(norms.LayerNorm, "__call__", lambda _: fast_variance)),
    Mutant("LayerNorm computed in bfloat16", "norms/layer-norm",
          replace(norms.LayerNorm, "__call__", lambda _: narrow_layer_norm), "bfloat16"),
    Mutant("RMSNorm without eps", "norms/rms-norm", setting(norms.RMSNorm, "eps", 0.0)),
    Mutant("the scale's offset of one is ignored", "norms/rms-norm-unit-offset",
          setting(norms.RMSNorm, "unit_offset", False)),
    Mutant("LayerNorm's offset of one is ignored", "norms/layer-norm-unit-offset",
          setting(norms.LayerNorm, "unit_offset", False)),
    Mutant("a norm per head is over all heads", "norms/layer-norm-per-head", replace(
        norms, "_mean", lambda _: lambda x: jnp.mean(x, axis=(-2, -1), keepdims=True))),
    Mutant("learned positions start one row late", "positions/learned-offset",
          setting(positions.LearnedPositions, "offset", 1)),
    Mutant("sinusoids with sin and cos swapped", "positions/sinusoidal", replace(
        positions, "sinusoidal_table", lambda original: lambda *a: np.roll(original(*a), 1, 1))),
    Mutant("rotary pairs laid out the other way", "positions/rotary-half",
          setting(positions.Rotary, "interleaved", True)),
    Mutant("rotary turns the wrong way", "positions/rotary-interleaved",
          replace(positions, "rotary_tables", swapped_pair)),
    Mutant("rotary positions start at one", "positions/rotary-half", replace(
        positions.Rotary, "rotate", lambda original: lambda self, x, positions:
        original(self, x, positions + 1))),
    Mutant("rotary forgets its scaling", "positions/rotary-llama3",
          setting(positions.Rotary, "scaling", None)),
    Mutant("YaRN forgets its attention factor", "positions/rotary-yarn", replace(
        positions, "rotary_tables",
        lambda original: lambda *a: [table / a[3].table_factor for table in original(*a)])),
    Mutant("a long text has the short factors", "positions/rotary-longrope-long", replace(
        positions, "length_frequencies", lambda original: lambda *a: original(*a)[:1])),
    Mutant("dynamic scaling is off by one token", "positions/rotary-dynamic-beyond", replace(
        positions, "length_frequencies", lambda original: lambda *a: original(*a)[1:])),
    Mutant("the other pairs turn too", "positions/rotary-proportional", replace(
        positions, "rotary_tables",
        lambda original: lambda m, w, b, s, n: original(m, w, b, None, n))),
    Mutant("sinusoids start one row early", "positions/sinusoidal-halves",
          setting(positions.SinusoidalPositions, "offset", 1)),
    Mutant("ALiBi ignores its largest bias", "positions/alibi-mpt",
          setting(positions.ALiBi, "max_bias", 8.0)),
    Mutant("ALiBi is not rounded as Falcon rounds it", "positions/alibi-falcon",
          setting(positions.ALiBi, "in_bfloat16", False)),
    Mutant("rotary keys are not turned", "attention/rotary-at", replace(
        positions.Rotary, "rotate",
        lambda original: lambda self, x, p: x if x.shape[2] == 2 else original(self, x, p))),
    Mutant("ALiBi slopes for the next head count", "positions/alibi", replace(
        positions, "alibi_slopes", lambda original: lambda n, b: original(2 * n, b)[:n])),
    Mutant("ALiBi in the wrong direction", "attention/alibi", replace(
        positions.ALiBi, "bias", lambda original: lambda self, q, d: -original(self, q, d))),
    Mutant("relative distances mirrored", "positions/relative", replace(
        positions.RelativePositions, "bias", lambda original: lambda self, q, distance_TS:
        original(self, q, -distance_TS))),
    Mutant("buckets of distances mirrored", "positions/relative-buckets", replace(
        positions.RelativeBuckets, "bias", lambda original: lambda self, q, distance_TS:
        original(self, q, -distance_TS))),
    Mutant("buckets as if later keys were never seen", "encoder_decoder/model-t5", replace(
        positions, "distance_buckets", lambda original: lambda n, d, causal: original(n, d, True))),
    Mutant("buckets grow to another distance", "positions/relative-buckets-causal", replace(
        positions, "distance_buckets", lambda original: lambda n, d, causal:
        original(n, d + 3, causal)[3:-3])),
    Mutant("relative scores are not scaled", "attention/relative", replace(
        positions.RelativePositions, "bias",
        lambda original: lambda self, q, d: original(self, q, d) * math.sqrt(6))),
    Mutant("scores are not scaled", "attention/multi-head", core(scale=lambda _: 1.0)),
    Mutant("scores are scaled by the model's width", "attention/multi-head",
          core(scale=lambda _: 1 / math.sqrt(20))),
    Mutant("the mask is ignored", "attention/masked", core(mask=lambda _: None)),
    Mutant("the mask is inverted", "attention/masked", core(mask=lambda mask: ~mask)),
    Mutant("the soft cap is forgotten", "attention/soft-cap", core(soft_cap=lambda _: None)),
    Mutant("queries and keys swapped", "attention/multi-head",
          swapped_attributes(attention.MultiHeadAttention, "q_proj", "k_proj")),
    Mutant("values and output swapped", "attention/cross",
          swapped_attributes(attention.MultiHeadAttention, "k_proj", "v_proj")),
    Mutant("query heads share the wrong key heads", "attention/grouped-query",
          replace(attention, "scaled_dot_product_attention", interleaved_heads)),
    Mutant("a norm of all heads is one of each", "attention/query-key-norm-all-heads", replace(
        norms, "_mean", lambda _: lambda x: jnp.repeat(
            jnp.mean(x.reshape(*x.shape[:-1], -1, 6), -1), 6, axis=-1))),
    Mutant("queries are normalised before the rotation",
          "attention/query-key-norm-after-rotation",
          setting(attention.MultiHeadAttention, "norm_after_rotation", False)),
    Mutant("projections are not clipped", "attention/clipped",
          setting(attention.MultiHeadAttention, "qkv_clip", None)),
    Mutant("attention dropout left out", "attention/dropout",
          core(dropout=lambda _: None), "dropout"),
    Mutant("tanh GELU for the exact one", "feed_forward/gelu", lambda patch: patch.setitem(
        feed_forward.ACTIVATIONS, "gelu", feed_forward.gelu_tanh)),
    Mutant("sqrt(2/pi) is not cut as BLOOM cuts it", "feed_forward/gelu_bloom",
          lambda patch: patch.setitem(
              feed_forward.ACTIVATIONS, "gelu_bloom", feed_forward.gelu_tanh)),
    Mutant("ReLU is not squared", "feed_forward/relu_squared", lambda patch: patch.setitem(
        feed_forward.ACTIVATIONS, "relu_squared", feed_forward.relu)),
    Mutant("quick GELU is SiLU", "feed_forward/quick_gelu", lambda patch: patch.setitem(
        feed_forward.ACTIVATIONS, "quick_gelu", feed_forward.silu)),
    Mutant("xIELU's curvatures swapped", "feed_forward/xielu",
          swapped_attributes(feed_forward.XIELU, "alpha_p", "alpha_n")),
    Mutant("gate and up swapped", "feed_forward/gated-silu",
          swapped_attributes(feed_forward.GatedFeedForward, "gate_proj", "up_proj")),
    Mutant("gate and up swapped in experts", "experts/mixture-of-one",
          swapped_attributes(experts.MixtureOfExperts, "gate_proj", "up_proj")),
    Mutant("the weights of experts not normalised", "experts/mixture-shared-gate",
          setting(experts.Router, "normalize_weights", False)),
    Mutant("one expert fewer", "experts/mixture-of-all",
          setting(experts.Router, "experts_per_token", lambda self: self.experts_per_token - 1)),
    Mutant("a softmax over all experts for one over the chosen", "experts/mixture-biases",
          replace(experts.Router, "__call__", lambda _: softmax_first)),
    Mutant("a softmax for a sigmoid", "experts/mixture-sigmoid-groups",
          setting(experts.Router, "kind", "softmax")),
    Mutant("the weights of experts are not scaled", "experts/mixture-sigmoid-groups",
          setting(experts.Router, "weight_scale", 1.0)),
    Mutant("groups of experts are not chosen first", "experts/mixture-sigmoid-groups",
          setting(experts.Router, "groups_per_token", lambda self: self.groups)),
    Mutant("a group is as good as its best expert", "experts/mixture-sigmoid-groups", replace(
        experts.Router, "_within_groups", lambda _: best_of_groups)),
    Mutant("what counts for the choice alone is left out", "experts/mixture-sigmoid-groups",
          replace(experts.Router, "_for_choice", lambda _: lambda self, scores: scores)),
    Mutant("a shared expert without its gate", "experts/mixture-shared-gate",
          without(experts.MixtureOfExperts, "shared_expert_gate")),
    Mutant("a shared expert left out", "experts/mixture-shared",
          without(experts.MixtureOfExperts, "shared_expert")),
    Mutant("a gate is not clamped", "feed_forward/clamped",
          setting(feed_forward.GatedFeedForward, "clamp", (1.5, 1e6))),
    Mutant("attention sinks left out", "attention/sinks",
          without(attention.MultiHeadAttention, "sinks")),
    Mutant("dropout before the activation", "feed_forward/gelu",
          replace(feed_forward.FeedForward, "__call__", lambda _: dropout_before_activation),
          "dropout"),
    Mutant("post-norm for pre-norm", "blocks/PreNormBlock",
          replace(blocks.PreNormBlock, "combine", lambda _: post_norm_formula)),
    Mutant("a parallel block in sequence", "blocks/ParallelBlock",
          replace(blocks.ParallelBlock, "combine", lambda _: sequential_formula)),
    Mutant("an output norm in front of its branch", "blocks/OutputNormBlock",
          replace(blocks.OutputNormBlock, "combine", lambda _: sequential_formula)),
    Mutant("post-norm for output norm", "blocks/OutputNormBlock",
          replace(blocks.OutputNormBlock, "combine", lambda _: post_norm_formula)),
    Mutant("branches are not scaled", "blocks/PreNormBlock-scaled",
          setting(blocks.Block, "residual_scale", 1.0)),
    Mutant("a residual sum is missing", "blocks/PreNormBlock",
          replace(blocks.PreNormBlock, "combine", lambda _: no_residual)),
    Mutant("norms of the branches swapped", "blocks/PostNormBlock",
          swapped_attributes(blocks.Block, "attention_norm", "feed_forward_norm")),
    Mutant("residual dropouts swapped", "blocks/PreNormBlock", swapped_attributes(
        blocks.Block, "attention_residual_dropout", "feed_forward_residual_dropout"), "dropout"),
    Mutant("an output norm is missing", "blocks/PreNormBlock-sandwich",
          without(blocks.Block, "attention_output_norm")),
    Mutant("the cross-attention's output norm is missing", "blocks/PreNormBlock-sandwich",
          without(blocks.Block, "cross_attention_output_norm")),
    Mutant("an output norm in front of its branch", "blocks/PreNormBlock-sandwich", replace(
        blocks.PreNormBlock, "combine", lambda _: output_norm_first)),
    Mutant("the feed-forward goes without the shared norm", "blocks/ParallelBlock-shared", replace(
        blocks.ParallelBlock, "combine", lambda _: second_branch_bare)),
    Mutant("the head's norm and activation swapped", "heads/transform", replace(
        heads.HeadTransform, "__call__", lambda _: lambda self, x:
        feed_forward.ACTIVATIONS[self.activation](self.norm(self.proj(x))))),
    Mutant("latent attention is scaled by the width of a value", "latent_attention/queries",
          setting(latent_attention.LatentAttention, "scale", 0.7)),
    Mutant("a classifier's activation is missing", "heads/classifier-transform",
          setting(heads.ClassifierHead, "activation", "relu")),
    Mutant("a classifier's dropouts swapped", "heads/classifier-transform", swapped_attributes(
        heads.ClassifierHead, "input_dropout", "dropout"), "dropout"),
    Mutant("a layer without an activation gets one", "heads/classifier-narrow",
          setting(heads.ClassifierHead, "activation", "tanh")),
    Mutant("padding is left out of the mean of places", "transformer_classifier/mean_of_places",
          replace(transformer_classifier, "classified", lambda original: lambda hidden, mask, what:
                  original(hidden, mask, "mean"))),
    Mutant("the last place is that of a token", "transformer_classifier/last_place", replace(
        transformer_classifier, "classified", lambda original: lambda hidden, mask, what:
        original(hidden, mask, "last"))),
    Mutant("the last place is classified, padding or not", "transformer_classifier/last", replace(
        transformer_classifier, "classified", lambda original: lambda hidden, mask, what:
        original(hidden, None, what))),
    Mutant("padding has its share of the mean", "transformer_classifier/mean", replace(
        transformer_classifier, "classified", lambda original: lambda hidden, mask, what:
        original(hidden, None, what))),
    Mutant("the head's bias is forgotten", "heads/bias", replace(
        heads.OutputBias, "__call__", lambda _: lambda self, x: x)),
    Mutant("the causal mask is off by one", "transformer_lm/gpt2", replace(
        blocks, "causal_mask", lambda original: lambda q, k: original(q + 1, k))),
    Mutant("the causal mask is missing", "transformer_lm/llama",
          replace(blocks, "causal_mask", lambda original: lambda q, k: original(q + 99, k))),
    Mutant("the window is one too wide", "transformer_lm/mistral", replace(
        blocks, "window_mask", lambda original: lambda q, k, w: original(q, k, w + 1))),
    Mutant("the full layers are windowed too", "transformer_lm/gemma2", run_with_masks(
        lambda masks: [masks[0]] * len(masks))),
    Mutant("the wrong layers are windowed", "transformer_lm/gemma2", run_with_masks(
        lambda masks: masks[::-1])),
    Mutant("an adapter is not scaled", "adapters/lora-linear",
          setting(adapters.LoRALinear, "alpha", lambda self: self.rank)),
    Mutant("an adapter has no dropout", "adapters/lora-linear-no-bias",
          setting(adapters.LoRALinear, "lora_dropout", lambda self: layers.Dropout(0.0)),
          "dropout"),
    Mutant("adapters are left out", "transformer_lm/lora",
          setting(adapters.LoRALinear, "alpha", 0.0)),
    Mutant("token types are ignored", "transformer_lm/bert", replace(
        transformer_lm.TransformerLM, "embed", lambda original:
        lambda self, tokens, positions=None, token_types=None, task_types=None:
        original(self, tokens, positions, None, task_types))),
    Mutant("task types are ignored", "transformer_lm/bert-encoder", replace(
        transformer_lm.TransformerLM, "embed", lambda original:
        lambda self, tokens, positions=None, token_types=None, task_types=None:
        original(self, tokens, positions, token_types))),
    Mutant("the head's transform is left out", "transformer_lm/bert",
          without(transformer_lm.TransformerLM, "head_transform", "logits")),
    Mutant("the tied head's bias is left out", "transformer_lm/bert",
          without(transformer_lm.TransformerLM, "lm_head", "logits")),
    Mutant("the last token is pooled", "transformer_lm/bert-pooled", replace(
        transformer_lm.TransformerLM, "pooled",
        lambda original: lambda self, hidden: original(self, hidden[:, ::-1]))),
    Mutant("the embedding scale is forgotten", "transformer_lm/gemma2", replace(
        positions, "in_float32", lambda original: lambda f, x: x if x.shape[-1] == 20
        else original(f, x))),
    Mutant("the final norm is left out", "transformer_lm/gpt2",
          without(transformer_lm.TransformerLM, "final_norm", "hidden")),
    Mutant("the layers of a group go before those of the other in turn", "transformer_lm/albert",
          replace(transformer_lm, "block_of",
                  lambda _: lambda config, layer: layer % config.num_blocks)),
    Mutant("learned rows are left out", "transformer_lm/mpnet",
          without(transformer_lm.TransformerLM, "position_embedding", "embed")),
    Mutant("the buckets of distances are turned round", "transformer_lm/mpnet", replace(
        positions.RelativeBuckets, "bias",
        lambda original: lambda self, q, distance: original(self, q, -distance))),
    Mutant("the first norm is there", "transformer_lm/modernbert", replace(
        norms.NoNorm, "__call__", lambda _: lambda self, x: norms.LayerNorm(20)(x))),
    Mutant("patches go column by column", "patches/patch-embedding", replace(
        patches.PatchEmbedding, "__call__", lambda original: lambda self, images:
        original(self, images).reshape(3, 3, 4, -1).swapaxes(1, 2).reshape(3, 12, -1))),
    Mutant("a patch's channels come last", "patches/patch-embedding", replace(
        patches.PatchEmbedding, "__call__", lambda _: channels_last)),
    Mutant("the class token is forgotten", "vision_transformer/vit", replace(
        vision_transformer.VisionTransformer, "_row",
        lambda original: staticmethod(lambda token, x: 0 * original(token, x)))),
    Mutant("the distillation token stands before the class token", "vision_transformer/deit",
          swapped_attributes(vision_transformer.VisionTransformer, "class_token",
                             "distillation_token")),
    Mutant("both classifiers read the class token", "vision_transformer/deit-two-heads", replace(
        vision_transformer.VisionTransformer, "logits", lambda _: lambda self, hidden:
        (self.classifier(hidden[:, 0]) + self.distillation_classifier(hidden[:, 0])) / 2)),
    Mutant("the mean counts the class token", "vision_transformer/dinov2-classes", replace(
        vision_transformer.VisionTransformer, "pooled", lambda _: lambda self, hidden:
        jnp.concatenate((hidden[:, 0], hidden.mean(1)), axis=-1))),
    Mutant("the class token counts among the patches", "vision_transformer/classes-of-patches",
          replace(vision_transformer.VisionTransformer, "_mean_of_patches",
                  lambda _: lambda self, hidden: hidden.mean(1))),
    Mutant("patches that are not masked get the mask token", "vision_transformer/dinov2", replace(
        vision_transformer.VisionTransformer, "embed",
        lambda original: lambda self, images, masked: original(self, images, ~masked))),
    Mutant("the last token is taken for the image", "vision_transformer/vit-pooled", replace(
        vision_transformer.VisionTransformer, "pooled",
        lambda original: lambda self, hidden: original(self, hidden[:, ::-1]))),
    Mutant("the gathered vector is not added to its feed-forward", "pooling/attention", replace(
        pooling.AttentionPooling, "__call__", lambda _: lambda self, x: self.feed_forward(self.norm(
            self.attention(self.query(jnp.zeros((len(x), 1), int)), x)))[:, 0])),
    Mutant("the vector of an image is not normalised", "vision_transformer/clip",
          without(vision_transformer.VisionTransformer, "pooled_norm", "pooled")),
    Mutant("the first token of a pair is classified", "encoder_decoder_classifier/bart", replace(
        encoder_decoder_classifier, "classified", lambda _: lambda hidden, mask, what:
        hidden[:, 0])),
    Mutant("a window begins with its own frame", "convolutions/frames", replace(
        convolutions.jnp, "pad", lambda original: lambda x, pads: original(
            x, [(0, sum(pad)) for pad in pads]))),
    Mutant("a window's features come last", "convolutions/frames", replace(
        convolutions.jnp, "stack", lambda original: lambda frames, axis: original(
            frames, axis=2))),
    Mutant("the second convolution has no activation", "convolutions/speech", replace(
        convolutions.SpeechStem, "__call__", lambda _: lambda self, features: self.conv2(
            convolutions.gelu(self.conv1(features.swapaxes(1, 2)))))),
    Mutant("residual streams are not weighted", "speech_classifier/layer-sum", replace(
        heads.LayerSum, "__call__", lambda _: lambda self, streams: streams.mean(0))),
    Mutant("the last stream is not normalised", "speech_classifier/layer-sum",
          without(speech_classifier.SpeechClassifier, "final_norm", "hidden")),
    Mutant("the first stream is left out", "speech_classifier/layer-sum", replace(
        heads.LayerSum, "__call__", lambda original: lambda self, streams:
        original(self, streams.at[0].set(streams[1])))),
    Mutant("sound that is classified has no positions", "speech_classifier/whisper", replace(
        speech_classifier.SpeechClassifier, "embed", lambda _: lambda self, features:
        self.embedding_dropout(self.stem(features)))),
    Mutant("sound has no positions", "speech_transformer/whisper", replace(
        speech_transformer.SpeechTransformer, "embed_source", lambda _: lambda self, source, p:
        self.stem(source))),
    Mutant("vectors keep their lengths", "heads/similarity", replace(
        heads, "_unit", lambda _: lambda vectors: vectors)),
    Mutant("similarities are multiplied by the scale's logarithm", "heads/similarity", replace(
        heads.jnp, "exp", lambda _: lambda x: x)),
    Mutant("similarities have no bias", "heads/similarity-bias",
          without(heads.Similarity, "bias")),
    Mutant("the last end token is taken for the text", "dual_encoder/clip", replace(
        dual_encoder.jnp, "argmax", lambda original: lambda ends, axis:
        ends.shape[1] - 1 - original(ends[:, ::-1], axis=axis))),
    Mutant("the end token is not looked for", "dual_encoder/highest-token", replace(
        dual_encoder.jnp, "argmax", lambda original: lambda ends, axis:
        original(ends == 5, axis=axis))),
    Mutant("similarities are those of other texts", "dual_encoder/siglip", replace(
        heads.Similarity, "__call__",
        lambda original: lambda self, x, y: original(self, x, y[::-1]))),
    Mutant("the trained factors of branches are left out", "vision_transformer/dinov2",
          without(blocks.Block, "feed_forward_output_norm")),
    Mutant("distances are those of the key to the query", "disentangled/attention", replace(
        disentangled.DisentangledPositions, "_buckets",
        lambda original: lambda self, distance: original(self, -distance))),
    Mutant("a bucket of distances is off by one", "disentangled/logarithmic", replace(
        disentangled, "log_buckets", lambda original: lambda span, far: original(span, far) + 1)),
    Mutant("scores of contents are not divided by all kinds", "transformer_lm/deberta", replace(
        builders, "_score_scale", lambda original: lambda config: None)),
    Mutant("rows of distances are not normalised", "transformer_lm/deberta",
          without(disentangled.DistanceRows, "norm")),
    Mutant("two layers swapped", "transformer_lm/gpt2", replace(
        transformer_lm, "run_blocks",
        lambda original: lambda b, *a, **k: original(list(b)[::-1], *a, **k))),
    Mutant("positions start at one", "transformer_lm/positions", replace(
        positions.LearnedPositions, "__call__",
        lambda original: lambda self, length, p=None: original(self, length, p + 1))),
    Mutant("cross-attention sees the source's mask transposed away", "encoder_decoder/model-masked",
          replace(encoder_decoder, "run_blocks", lambda original:
                  lambda b, x, m=None, mem=None, mm=None, **k: original(b, x, m, mem, None, **k))),
    Mutant("targets are not shifted alike", "losses/each-token",
          replace(losses, "token_losses", shifted_targets)),
    Mutant("the loss counts what its mask leaves out", "losses/cross-entropy-masked", replace(
        losses, "cross_entropy", lambda original: lambda logits, targets, mask=None:
        original(logits, targets))),
]  # fmt: skip
