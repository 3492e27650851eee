"""Pairs of models that compute the same, to be compared and mutated."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from flax import nnx

import torch_ref.transformer_lm
from jaxformer.parity.comparison.modules import compare_with
from jaxformer.parity.comparison.reference_run import ReferenceRun
from jaxformer.parity.report.report import Report
from parity_tests.families import charlm, encdec, minimal, prepost, unified
from torch_ref.config import TransformerLMConfig

# B, T, S, D, N, K, F, V, L: equal for all models, so that compiled functions are shared.
B, T, S, D, N, K, F, V, L = 2, 11, 13, 24, 4, 2, 40, 37, 2
HUGGING_FACE = {
    "vocab_size": V, "hidden_size": D, "num_attention_heads": N, "num_hidden_layers": L,
    "intermediate_size": F, "max_position_embeddings": 32, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "attn_implementation": "eager", "use_cache": False,
}  # fmt: skip


def ids(seed: int = 0, length: int = T) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, V, (B, length))


def hidden(seed: int = 0, length: int = T) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((B, length, D)).astype(np.float32)


def causal(length: int = T) -> np.ndarray:
    return np.tril(np.ones((length, length), bool))


def padded(length: int = S) -> np.ndarray:
    """Returns a padding mask (B, 1, 1, S) of rows of different lengths."""
    lengths = np.array([length, length - 4])
    return (np.arange(length) < lengths[:, None])[:, None, None, :]


@dataclasses.dataclass(frozen=True)
class Mutated:
    """A bug that was injected into a model.

    Attributes:
        where: the modules that have it, as reports name them; "" is the whole model.
        stage: parameters, forward or backward.
        what: a description.
        remark: what the remarks of the report must contain.
    """

    where: frozenset[str]
    stage: str
    what: str
    remark: str = ""


@dataclasses.dataclass
class Subject:
    """A pair of models that compute the same.

    Attributes:
        name: of the family and its variant.
        torch_module: the PyTorch module.
        inputs: of the reference.
        jax_inputs: of the candidate.
        dialect: of the reference; None finds it by the class.
        inside: names of candidate modules that the reference has no module for: their work is code
            of the module around them.
        fused: whether one reference module computes queries, keys and values.
        masked: whether every self-attention gets a mask.
        has_rotary_module: whether a reference module makes the rotary tables.
        call: how to call the reference, where not with its inputs.
    """

    name: str
    torch_module: Any
    inputs: Sequence[Any]
    jax_inputs: Sequence[Any]
    dialect: str | None = None
    inside: tuple[str, ...] = ()
    fused: bool = False
    masked: bool = True
    has_rotary_module: bool = False
    call: Any = None

    def name_in_report(self, path: str, stage: str = "parameters") -> str:
        """Returns the name of a module, or of the one around it that does its work, in a report."""
        while stage != "parameters" and path.rpartition(".")[2] in self.inside:
            path = path.rpartition(".")[0]
        owner, _, last = path.rpartition(".")
        if self.fused and last in ("q_proj", "k_proj", "v_proj"):
            return " + ".join(f"{owner}.{name}" for name in ("q_proj", "k_proj", "v_proj"))
        return path

    def mutated(self, path: str, stage: str, what: str) -> Mutated:
        where = frozenset({self.name_in_report(path, stage)})
        return Mutated(where, stage, f"{what} at {path or 'the model'}")

    @functools.cached_property
    def reference(self) -> ReferenceRun:
        return ReferenceRun(self.torch_module, self.inputs, dialect=self.dialect, call=self.call)

    @functools.cached_property
    def candidate(self) -> Any:
        return self.reference.port()

    def compare(self, candidate: Any, **more: Any) -> Any:
        return compare_with(self.reference, candidate, self.jax_inputs, dtype="float64", **more)

    def fresh(self) -> Any:
        """Returns a copy of the candidate to mutate."""
        return nnx.clone(self.candidate)


def randomize(module: Any, std: float = 0.3, seed: int = 1) -> Any:
    """Moves every parameter away from its initial value, those of norms too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            moved = torch.randn(parameter.shape, generator=generator) * std
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + moved if is_norm else moved)
    return module.eval()


def hugging_face(kind: str, dialect: str, **settings: Any) -> Subject:
    cls = getattr(transformers, kind)
    names = {"gpt2": {"n_embd": D, "n_head": N, "n_layer": L, "n_inner": F, "n_positions": 32}}
    sizes = {**HUGGING_FACE, **names.get(dialect, {}), **settings}
    module = cls(cls.config_class(**sizes))
    inside = {"bert": ("attention", "feed_forward", "lm_head"), "gemma2": ("token_embedding",)}
    return Subject(
        dialect, randomize(module.float()), [ids()], [ids()], dialect,
        inside=inside.get(dialect, ()),
        fused=dialect in ("gpt2", "gpt_neox"),
        masked=dialect != "bert",
        has_rotary_module=dialect not in ("gpt2", "bert"),
    )  # fmt: skip


def torch_twin(**settings: Any) -> Subject:
    config = TransformerLMConfig(
        d_model=D, num_heads=N, d_ff=F, num_layers=L, vocab_size=V, context_length=32, **settings
    )
    module = torch_ref.transformer_lm.TransformerLM(config)
    return Subject("torch_ref", randomize(module), [ids()], [ids()])


def unified_model(**settings: Any) -> Subject:
    module = unified.Transformer(V, D, N, L, F, 0.1, 32, **settings)
    mask = np.where(causal(), 0.0, -np.inf).astype(np.float32)
    return Subject("unified", randomize(module), [ids(), mask], [ids(), causal()], "unified")


def encoder_decoder() -> Subject:
    module = encdec.Transformer(V, V, D, N, 2, 2, F, 32)
    source, target = ids(2, S), ids(3)
    arguments = [source, target, padded(), causal()[None, None]]
    return Subject("encdec", randomize(module), arguments, arguments, "encdec")


def stack(family: Any, name: str, cls: str) -> Subject:
    """Returns a single block; charlm's is always causal."""
    if family is charlm:
        config = {
            "context_size": 32, "embedding_dim": D, "heads_num": N, "head_size": D // N,
            "dropout_rate": 0.1, "use_bias": True,
        }  # fmt: skip
        return Subject(name, randomize(charlm.Block(config)), [hidden()], [hidden()], name)
    mask = np.broadcast_to(causal(), (B, 1, T, T))
    module = getattr(family, cls)(D, N, F)
    return Subject(name, randomize(module), [hidden(), mask], [hidden(), mask], name)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "unified learned": lambda: unified_model(pos_enc_cls=unified.LearnedPE),
    "unified rotary gated": lambda: unified_model(
        pos_enc_cls=unified.RoPE, ffn_cls=unified.SwiGLUFFN, attn_cls=unified.GroupedQueryAttention,
        attn_kw={"n_kv_heads": K},
    ),
    "unified alibi post-norm": lambda: unified_model(pos_enc_cls=unified.ALiBi, pre_norm=False),
    "gpt2": lambda: hugging_face("GPT2LMHeadModel", "gpt2"),
    "llama": lambda: hugging_face("LlamaForCausalLM", "llama", num_key_value_heads=K),
    "mistral": lambda: hugging_face(
        "MistralForCausalLM", "mistral", num_key_value_heads=K, sliding_window=5
    ),
    "gemma2": lambda: hugging_face(
        "Gemma2ForCausalLM", "gemma2", num_key_value_heads=K, head_dim=6, sliding_window=5,
        query_pre_attn_scalar=7, attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    ),
    "bert": lambda: hugging_face("BertForMaskedLM", "bert"),
    "gpt_neox": lambda: hugging_face("GPTNeoXForCausalLM", "gpt_neox", rotary_pct=0.67),
    "torch_ref": lambda: torch_twin(positions="rotary", norm="rms_norm", activation="swiglu"),
    "torch_ref post-norm": lambda: torch_twin(positions="learned", block="post_norm"),
    "encdec": encoder_decoder,
    "encdec gpt": lambda: Subject(
        "encdec gpt", randomize(encdec.GPT(V, D, N, L, F, 32)), [ids()], [ids()], "encdec"
    ),
    "prepost": lambda: stack(prepost, "prepost", "PreNormTransformerBlock"),
    "minimal": lambda: stack(minimal, "minimal", "TransformerBlock"),
    "charlm": lambda: stack(charlm, "charlm", "Block"),
}  # fmt: skip


@functools.cache
def subject(name: str) -> Subject:
    torch.manual_seed(0)
    return SUBJECTS[name]()


def root_causes(report: Report) -> list[tuple[str, str]]:
    """Returns where each root cause is: its path and its stage."""
    return [(cause.path, cause.stage) for cause in report.root_causes]
