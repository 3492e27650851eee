"""Hugging Face's ``bert`` and its kin: BERT (arXiv 1810.04805), its encoder and masked-LM head.

With ``is_decoder`` they are causal and write text: ``BertLMHeadModel``, ``RobertaForCausalLM`` ...

- ``roberta``, ``xlm-roberta`` and ``camembert`` (arXiv 1907.11692, 1911.02116, 1911.03894) count
  positions from the row after that of the padding token. transformers gives padding, by its id,
  no position: pass ``positions`` that count real tokens where a text has some.
- ``electra`` (arXiv 2003.10555): embeddings may be narrower. Its generator is ported, and of the
  discriminator the body.
- ``megatron-bert`` (arXiv 1909.08053) normalises what enters a branch.
- ``distilbert`` (arXiv 1910.01108) has neither types nor a pooler.
- ``ernie`` (arXiv 1904.09223), later ones with an embedding of tasks.

``BertForMaskedLM`` has no pooler. The files of the first BERTs hold more than it has, a pooler and
a next-sentence head, which are left out; for the encoder with its pooler, give ``ignore=["cls.*"]``
and the class ``BertModel``.
"""

import numpy as np

from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ATTENTION_DROPOUT,
    FEED_FORWARD_WIDTH,
    SIZES,
    even_head_width,
    narrow_embedding,
)
from jaxformer.porting.dialects.common.stacks import stack_rules
from jaxformer.porting.dialects.common.transformers_types import TRANSFORMERS_TYPES
from jaxformer.porting.mapping.adapter import Buffer, StateDictAdapter
from jaxformer.porting.mapping.packings import Shape
from jaxformer.porting.mapping.rules import Rules, names, under
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Conversion,
    Fixed,
    Mapped,
    Required,
    Row,
    Values,
    fixed,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM


def body(attention_norm: str, feed_forward_norm: str, **more: str) -> Rules:
    """Returns the rules of the encoder, whose blocks have these norms.

    Args:
        attention_norm: the name of a block's first norm.
        feed_forward_norm: that of its second.
        more: other modules that are only renamed: target = source.
    """
    projections = names(
        q_proj="self.query", k_proj="self.key", v_proj="self.value", o_proj="output.dense"
    )
    return stack_rules(
        "encoder.layer.*",
        ("attention", projections),
        ("", names(up_proj="intermediate.dense", down_proj="output.dense")),
        {"attention_norm": attention_norm, "feed_forward_norm": feed_forward_norm},
        token_embedding="embeddings.word_embeddings",
        position_embedding="embeddings.position_embeddings",
        token_type_embedding="embeddings.token_type_embeddings",
        task_type_embedding="embeddings.task_type_embeddings",
        embedding_norm="embeddings.LayerNorm",
        pooler="pooler.dense",
        **more,
    )


def masked_lm_head(proj: str, norm: str, decoder: str) -> Rules:
    """Returns the rules of a masked-LM head: of its matrix, its norm and what makes logits."""
    return (*under("head_transform", "", names(proj=proj, norm=norm)), *names(lm_head=decoder))


BODY = body("attention.output.LayerNorm", "output.LayerNorm")
MEGATRON_BODY = body("attention.ln", "ln", final_norm="encoder.ln")
ELECTRA_BODY = body(
    "attention.output.LayerNorm", "output.LayerNorm", embedding_projection="embeddings_project"
)
DISTILBERT_BODY = stack_rules(
    "transformer.layer.*",
    ("attention", names(q_proj="q_lin", k_proj="k_lin", v_proj="v_lin", o_proj="out_lin")),
    ("ffn", names(up_proj="lin1", down_proj="lin2")),
    {"attention_norm": "sa_layer_norm", "feed_forward_norm": "output_layer_norm"},
    token_embedding="embeddings.word_embeddings",
    position_embedding="embeddings.position_embeddings",
    embedding_norm="embeddings.LayerNorm",
)
BERT_HEAD = masked_lm_head(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
)
ROBERTA_HEAD = masked_lm_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")
ELECTRA_HEAD = masked_lm_head(
    "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"
)


def has_pooler(source_model: SourceModel, values: Values) -> bool:
    """Whether the body has a pooler, by its arrays."""
    return source_model.kind.endswith("Model") and source_model.has("pooler")


MASKED_LM = fixed(head="masked_lm", head_bias=True)
POST_NORM = fixed(block="post_norm", embedding_norm=True, final_norm=False)
# transformers' gelu, whatever the activation of the blocks is.
GELU_HEAD = Fixed("head_activation", "gelu")
KIN = (
    # BertModel always has at least one type.
    Mapped(
        "type_vocab_size",
        "num_token_types",
        2,
        Conversion(lambda number, values: number, lambda number, config: max(number, 1)),
    ),
    FEED_FORWARD_WIDTH,
    Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    Mapped("layer_norm_eps", "norm_eps", 1e-12),
    Required("position_embedding_type", "absolute", is_written=True),
    # transformers masks what is to come by this alone, whatever the class is.
    Mapped("is_decoder", "causal", False, BOOLEAN),
    Required("add_cross_attention", False),
    Mapped("attention_probs_dropout_prob", "attention_dropout", 0.0),
    Mapped("hidden_dropout_prob", ("residual_dropout", "embedding_dropout"), 0.0),
    *MASKED_LM,
    Fixed("pooler", has_pooler),
)
BERT = (
    *SIZES,
    *KIN,
    *POST_NORM,
    # In which language it was trained, and a pooler of Google's own code.
    Inert(
        (
            "directionality", "pooler_fc_size", "pooler_num_attention_heads",
            "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
        )
    ),
)  # fmt: skip
ROBERTA = (
    # Before the sizes, whose last it changes: the table has the rows of all ids up to this one too.
    Mapped(
        "pad_token_id",
        "position_offset",
        translation=Conversion(lambda pad, values: pad + 1, lambda first, config: first - 1),
    ),
    *SIZES[:-1],
    Mapped(
        "max_position_embeddings",
        "context_length",
        translation=Conversion(
            lambda rows, values: rows - values["position_offset"],
            lambda length, config: length + config.position.position_offset,
        ),
    ),
    *KIN,
    *POST_NORM,
    GELU_HEAD,
)
ELECTRA = (
    *SIZES,
    *KIN,
    *POST_NORM,
    GELU_HEAD,
    narrow_embedding("embedding_size"),
    Inert(
        (
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
            "summary_last_dropout",
        )
    ),
)
MEGATRON = (*SIZES, *KIN, Fixed("embedding_norm", False))
IS_USED = Conversion(lambda is_used, values: int(bool(is_used)), lambda number, config: number > 0)
IF_USED = Conversion(
    lambda number, values: number if values["num_task_types"] else 0,
    lambda number, config: number or 3,
)
ERNIE = (
    *SIZES,
    *KIN,
    *POST_NORM,
    Mapped("use_task_id", "num_task_types", False, IS_USED),
    Mapped("task_type_vocab_size", "num_task_types", 3, IF_USED),
)
DISTILBERT = (
    Mapped(("dim", "hidden_size"), "d_model"),
    Mapped(("n_heads", "num_attention_heads"), "num_heads"),
    Required("head_dim", even_head_width),
    Mapped(("n_layers", "num_hidden_layers"), "num_layers"),
    Mapped("max_position_embeddings", "context_length"),
    Mapped("hidden_dim", "d_ff", written_from="feed_forward_width"),
    Mapped("activation", "activation", translation=ACTIVATIONS),
    ATTENTION_DROPOUT,
    Mapped("dropout", ("feed_forward_dropout", "embedding_dropout"), 0.0),
    Fixed("norm_eps", 1e-12),
    Fixed("causal", False),
    *MASKED_LM,
    *POST_NORM,
    # What the table of positions starts with; two rates of heads for other tasks.
    Inert(("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")),
)


def _position_ids(module: TransformerLM, shape: Shape | None) -> np.ndarray:
    config = module.config
    return np.arange(config.context_length + config.position.position_offset)[None]


def _token_type_ids(module: TransformerLM, shape: Shape | None) -> np.ndarray:
    return np.zeros_like(_position_ids(module, shape))


POSITION_IDS = Buffer("embeddings.position_ids", _position_ids, written=False)


def _adapter(
    name: str,
    settings: tuple[Row, ...],
    *,
    rules: Rules = BODY,
    head: Rules = BERT_HEAD,
    outside: str = "cls.",
    bias: str | None = "cls.predictions.bias",
) -> StateDictAdapter:
    """Returns the adapter of one of the kin.

    Args:
        name: the dialect's.
        settings: its rows.
        rules: of the body.
        head: rules of the head.
        outside: how the head's names begin.
        bias: a second name of the decoder's bias.
    """
    known = TRANSFORMERS_TYPES[name]
    whole = known.classes[0]
    # One array by two names, even where the matrix is not tied: transformers then adds the
    # decoder's and leaves the other unused.
    copies = {bias: f"{head[-1].source[0]}.bias"} if bias else {}
    pretraining = {whole.replace("MaskedLM", "PreTraining"): whole}
    return language_model(
        name,
        settings,
        rules,
        head=head,
        outside=(outside,),
        copies=copies,
        # Published files are of BertForPreTraining, though they name the other class.
        superfluous=(f"{known.prefix}pooler.*", "cls.seq_relationship.*"),
        equivalents=pretraining if head is BERT_HEAD else {},
        untied_names=frozenset(copies),
        buffers=(POSITION_IDS, Buffer("embeddings.token_type_ids", _token_type_ids, written=False)),
        old_names={
            r"\.LayerNorm\.gamma$": ".LayerNorm.weight",
            r"\.LayerNorm\.beta$": ".LayerNorm.bias",
        },
    )


def _roberta(name: str) -> StateDictAdapter:
    return _adapter(name, ROBERTA, head=ROBERTA_HEAD, outside="lm_head.", bias="lm_head.bias")


DIALECTS = (
    _adapter("bert", BERT),
    _roberta("roberta"),
    _roberta("xlm-roberta"),
    _roberta("camembert"),
    _adapter(
        "electra", ELECTRA, rules=ELECTRA_BODY, head=ELECTRA_HEAD, outside="generator_", bias=None
    ),
    _adapter("megatron-bert", MEGATRON, rules=MEGATRON_BODY),
    _adapter("ernie", ERNIE),
    language_model(
        "distilbert",
        DISTILBERT,
        DISTILBERT_BODY,
        head=masked_lm_head("vocab_transform", "vocab_layer_norm", "vocab_projector"),
        outside=("vocab_",),
        buffers=(POSITION_IDS,),
    ),
)
