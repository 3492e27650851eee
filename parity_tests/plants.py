"""Bugs to plant into models for the parity debugger, and the models to plant them into.

A plant changes one module of one side and says which modules must be named for it. Nothing here
asks the debugger what it thinks.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

import torch_ref.transformer_lm
from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block, ParallelBlock, PostNormBlock, PreNormBlock
from jaxformer.feed_forward import FeedForward, GatedFeedForward
from jaxformer.layers import Embedding, Linear
from jaxformer.norms import LayerNorm, RMSNorm
from jaxformer.parity.compare import Theirs
from jaxformer.positions import LearnedPositions, Rotary
from jaxformer.transformer_lm import TransformerLM
from parity_tests.families import charlm, encdec, minimal, prepost, unified
from torch_ref.config import TransformerLMConfig

# B, T, S, D, N, K, F, V, L: the same for all, so that compiled functions are shared.
B, T, S, D, N, K, F, V, L = 2, 11, 13, 24, 4, 2, 40, 37, 3
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
    """A padding mask (B, 1, 1, S) of rows of different lengths."""
    lengths = np.array([length, length - 4])
    return (np.arange(length) < lengths[:, None])[:, None, None, :]


@dataclasses.dataclass
class Subject:
    """A pair of models that compute the same.

    Attributes:
        name: of the family and its variant.
        theirs: the PyTorch module.
        inputs: of theirs.
        jax_inputs: of ours.
        dialect: whose it is; None tells by the class.
        inside: modules of ours that are no modules of theirs, but code of the one around them.
        fused: whether queries, keys and values come out of one module of theirs.
        masked: whether every self-attention gets a mask.
        has_rotary_module: whether a module of theirs makes the rotary tables.
        call: how theirs is called, where not with its inputs.
    """

    name: str
    theirs: Any
    inputs: Sequence[Any]
    jax_inputs: Sequence[Any]
    dialect: str | None = None
    inside: tuple[str, ...] = ()
    fused: bool = False
    masked: bool = True
    has_rotary_module: bool = False
    call: Any = None

    def called(self, path: str, stage: str = "parameters") -> str:
        """How a report names the module at a path, or the one that it is code of."""
        while stage != "parameters" and path.rpartition(".")[2] in self.inside:
            path = path.rpartition(".")[0]
        owner, _, last = path.rpartition(".")
        if self.fused and last in ("q_proj", "k_proj", "v_proj"):
            return " + ".join(f"{owner}.{name}" for name in ("q_proj", "k_proj", "v_proj"))
        return path

    def at(self, path: str, stage: str, what: str) -> "Planted":
        where = frozenset({self.called(path, stage)})
        return Planted(where, stage, f"{what} at {path or 'the model'}")

    @functools.cached_property
    def reference(self) -> Theirs:
        return Theirs(self.theirs, self.inputs, dialect=self.dialect, call=self.call)

    @functools.cached_property
    def ours(self) -> Any:
        return self.reference.ported()

    def compare(self, ours: Any, **more: Any) -> Any:
        return self.reference.compare(ours, self.jax_inputs, dtype="float64", **more)

    def fresh(self) -> Any:
        """A copy of ours to plant into."""
        return nnx.clone(self.ours)


def randomize(module: Any, std: float = 0.3, seed: int = 1) -> Any:
    """Every parameter away from where it began, those of norms too."""
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
    """A single block; charlm's is always causal."""
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


@dataclasses.dataclass(frozen=True)
class Planted:
    """A bug that has been planted.

    Attributes:
        where: the modules that have it, as reports name them; the model itself is "".
        stage: parameters, forward or backward.
        what: in words.
        remark: what the report must say beside the nodes.
    """

    where: frozenset[str]
    stage: str
    what: str
    remark: str = ""


Random = np.random.Generator
# Plants the bug into ours, or says with None that the model has no place for it.
Plant = Callable[[Subject, Any, Random], Planted | None]


def nodes(module: Any, *kinds: type) -> dict[str, Any]:
    """Modules of these classes by path."""
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_modules(module)
        if isinstance(node, kinds)
    }


def choose(found: Any, random: Random) -> Any:
    """One of a list, or one item of a dict."""
    found = sorted(found.items()) if isinstance(found, dict) else list(found)
    return found[random.integers(len(found))]


def replaced(node: Any, **methods: Callable[..., Any]) -> None:
    """Makes the module one of a subclass whose methods take the original first."""
    cls = type(node)

    def bind(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(cls, name)

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(functools.partial(original, self), self, *args, **kwargs)

        return call

    planted = {name: bind(name, method) for name, method in methods.items()}
    node.__class__ = type(f"Planted{cls.__name__}", (cls,), planted)


def eps(subject: Subject, ours: Any, random: Random) -> Planted:
    path, norm = choose(nodes(ours, LayerNorm, RMSNorm), random)
    norm.eps = choose([e for e in (1e-3, 1e-4, 1e-6, 1e-8) if e != norm.eps], random)
    return subject.at(path, "forward", f"eps {norm.eps}")


def activation(subject: Subject, ours: Any, random: Random) -> Planted:
    path, node = choose(nodes(ours, FeedForward, GatedFeedForward), random)
    twin = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}.get(node.activation)
    others = [twin] * 3 if twin else []
    others += [a for a in ("relu", "gelu", "gelu_tanh", "silu") if a != node.activation]
    node.activation = choose(others, random)
    return subject.at(path, "forward", f"activation {node.activation}")


def transposed(subject: Subject, ours: Any, random: Random) -> Planted:
    linears = nodes(ours, Linear)
    square = {p: m for p, m in linears.items() if len(set(m.kernel.shape)) == 1}
    path, node = choose(square, random)
    node.kernel.set_value(node.kernel[...].T)
    return subject.at(path, "parameters", "transposed")


def permuted(subject: Subject, ours: Any, random: Random) -> Planted:
    path, node = choose(nodes(ours, Linear, Embedding), random)
    weight = node.kernel if isinstance(node, Linear) else node.embedding
    axis = int(random.integers(2))
    order = random.permutation(weight.shape[axis])
    weight.set_value(jnp.take(weight[...], order, axis=axis))
    return subject.at(path, "parameters", f"permuted along axis {axis}")


def head_order(subject: Subject, ours: Any, random: Random) -> Planted:
    path, node = choose(nodes(ours, MultiHeadAttention), random)
    name = choose(["q_proj", "o_proj"], random)
    kernel = getattr(node, name).kernel
    heads = kernel[...].T if name == "q_proj" else kernel[...]
    heads = jnp.roll(heads.reshape(node.num_heads, -1, heads.shape[-1]), 1, axis=0)
    heads = heads.reshape(-1, heads.shape[-1])
    kernel.set_value(heads.T if name == "q_proj" else heads)
    return subject.at(f"{path}.{name}".lstrip("."), "parameters", "heads in another order")


def zeroed_bias(subject: Subject, ours: Any, random: Random) -> Planted | None:
    found = {p: m for p, m in nodes(ours, Linear, LayerNorm).items() if m.bias is not None}
    if not found:
        return None
    path, node = choose(found, random)
    node.bias.set_value(jnp.zeros_like(node.bias[...]))
    return subject.at(path, "parameters", "bias is zero")


def one_element(subject: Subject, ours: Any, random: Random) -> Planted:
    found = nodes(ours, Linear, Embedding, LayerNorm, RMSNorm, LearnedPositions)
    path, node = choose(found, random)
    leaves = [getattr(node, name, None) for name in ("kernel", "bias", "scale", "embedding")]
    variable = [leaf for leaf in leaves if leaf is not None][
        random.integers(sum(x is not None for x in leaves))
    ]
    place = tuple(int(random.integers(size)) for size in variable.shape)
    variable.set_value(variable[...].at[place].add(1e-3))
    return subject.at(path, "parameters", f"element {place}")


def swapped(subject: Subject, ours: Any, random: Random) -> Planted | None:
    stacks = {p: m for p, m in nodes(ours, nnx.List).items() if p.endswith("blocks")}
    if not stacks:
        return None
    path, blocks = choose(stacks, random)
    one, other = sorted(random.choice(len(blocks), 2, replace=False).tolist())
    blocks[one], blocks[other] = blocks[other], blocks[one]
    where = {
        subject.called(f"{path}.{n}.{inner}")
        for n in (one, other)
        for inner, node in nodes(blocks[n], Linear, LayerNorm, RMSNorm).items()
    }
    remark = f"layers {one} and {other} of {path} look swapped"
    return Planted(frozenset(where), "parameters", remark, remark)


def mask_shift(subject: Subject, ours: Any, random: Random) -> Planted | None:
    if not subject.masked:
        return None
    path, node = choose(
        {p: m for p, m in nodes(ours, MultiHeadAttention).items() if "cross" not in p}, random
    )

    def call(original: Any, self: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
        args, mask = (args[:-1], args[-1]) if mask is None else (args, mask)
        return original(*args, mask=jnp.roll(mask, 1, axis=-1), **kwargs)

    replaced(node, __call__=call)
    return subject.at(path, "forward", "mask shifted by one")


def model_mask(subject: Subject, ours: Any, random: Random) -> Planted | None:
    """What the model itself does with masks: no causal mask, a window off by one."""
    if not isinstance(ours, TransformerLM) or not ours.config.causal:
        return None
    window = ours.config.sliding_window
    change = {"causal": False}
    if window is not None:
        change = choose([change, *[{"sliding_window": window + n} for n in (-1, 1)] * 2], random)
    ours.config = dataclasses.replace(ours.config, **change)
    return subject.at("", "forward", f"config {change}")


def rotary_layout(subject: Subject, ours: Any, random: Random) -> Planted | None:
    found = nodes(ours, Rotary)
    if not found:
        return None
    path, node = choose(found, random)
    node.interleaved = not node.interleaved
    return subject.at(path.rpartition(".")[0], "forward", "rotary layout")


def rotary_base(subject: Subject, ours: Any, random: Random) -> Planted | None:
    found = nodes(ours, Rotary)
    if not found:
        return None
    path, node = choose(found, random)
    node.base *= choose([1.01, 50.0], random)
    # Tables that came with the checkpoint would be taken instead.
    node.cos = node.sin = None
    where = path if subject.has_rotary_module else path.rpartition(".")[0]
    return subject.at(where, "forward", "rotary base")


def attention_scale(subject: Subject, ours: Any, random: Random) -> Planted:
    path, node = choose(nodes(ours, MultiHeadAttention), random)
    node.scale *= choose([0.99, 0.5, float(np.sqrt(node.head_dim))], random)
    return subject.at(path, "forward", "attention scale")


def soft_cap(subject: Subject, ours: Any, random: Random) -> Planted | None:
    found = {p: m for p, m in nodes(ours, MultiHeadAttention).items() if m.score_soft_cap}
    if not found:
        return None
    if random.integers(2):
        ours.config = dataclasses.replace(ours.config, logit_soft_cap=None)
        return subject.at("", "forward", "no cap of logits")
    path, node = choose(found, random)
    node.score_soft_cap = None
    return subject.at(path, "forward", "no cap of scores")


def embedding_scale(subject: Subject, ours: Any, random: Random) -> Planted | None:
    if getattr(getattr(ours, "config", None), "embedding_scale", None) is None:
        return None
    ours.config = dataclasses.replace(ours.config, embedding_scale=None)
    return subject.at("", "forward", "no embedding scale")


def positions_shift(subject: Subject, ours: Any, random: Random) -> Planted | None:
    found = nodes(ours, LearnedPositions)
    if not found:
        return None
    path, node = choose(found, random)

    def call(original: Any, self: Any, length: int, positions: Any = None) -> Any:
        return original(length, jnp.arange(1, length + 1)[None])

    replaced(node, __call__=call)
    return subject.at(path, "forward", "positions start at one")


def no_residual(subject: Subject, ours: Any, random: Random) -> Planted:
    path, node = choose(nodes(ours, Block), random)
    which = int(random.integers(2))

    def combine(original: Any, self: Any, x: Any, branches: Any) -> Any:
        norm, branch = branches[which]
        wrong = (norm, lambda h: branch(h) - x)
        return original(x, [*branches[:which], wrong, *branches[which + 1 :]])

    replaced(node, combine=combine)
    return subject.at(path, "forward", "a residual sum is off")


def norm_order(subject: Subject, ours: Any, random: Random) -> Planted:
    path, node = choose(nodes(ours, Block), random)
    kind = PostNormBlock if isinstance(node, PreNormBlock | ParallelBlock) else PreNormBlock
    replaced(node, combine=lambda original, self, x, branches: kind.combine(self, x, branches))
    return subject.at(path, "forward", f"the order of a {kind.__name__}")


def no_norm(subject: Subject, ours: Any, random: Random) -> Planted:
    path, node = choose(nodes(ours, Block), random)

    def combine(original: Any, self: Any, x: Any, branches: Any) -> Any:
        return original(x, [(lambda h: h, branches[0][1]), *branches[1:]])

    replaced(node, combine=combine)
    return subject.at(path, "forward", "a norm is not called")


def computing(ours: Any) -> dict[str, Any]:
    kinds = (Linear, LayerNorm, RMSNorm, FeedForward, GatedFeedForward, MultiHeadAttention, Block)
    return nodes(ours, *kinds)


def stopped_gradient(subject: Subject, ours: Any, random: Random) -> Planted:
    path, node = choose(computing(ours), random)

    def stopped(original: Any, self: Any, *a: Any, **k: Any) -> Any:
        return jax.lax.stop_gradient(original(*a, **k))

    replaced(node, __call__=stopped)
    return subject.at(path, "backward", "gradient stopped")


def scaled_gradient(subject: Subject, ours: Any, random: Random) -> Planted:
    path, node = choose(computing(ours), random)
    factor = 1 + choose([1e-1, -1e-3, 1e-6], random)

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (g * factor,))
    replaced(node, __call__=lambda original, self, *a, **k: jax.tree.map(same, original(*a, **k)))
    return subject.at(path, "backward", f"gradient times {factor}")


def narrow(subject: Subject, ours: Any, random: Random) -> Planted:
    path, node = choose(nodes(ours, LayerNorm, RMSNorm), random)
    dtype = choose([jnp.float32, jnp.bfloat16], random)

    def call(original: Any, self: Any, x: Any) -> Any:
        return original(x.astype(dtype)).astype(x.dtype)

    replaced(node, __call__=call)
    return subject.at(path, "forward", f"computed in {dtype.__name__}")


PLANTS: list[Plant] = [
    eps, activation, transposed, permuted, head_order, zeroed_bias, one_element, swapped,
    mask_shift, model_mask, rotary_layout, rotary_base, attention_scale, soft_cap, embedding_scale,
    positions_shift, no_residual, norm_order, no_norm, stopped_gradient, scaled_gradient, narrow,
]  # fmt: skip


# Theirs: planted into a copy of the PyTorch module.
def choose_theirs(subject: Subject, random: Random) -> tuple[str, str]:
    """One of ours and the module of theirs that has the same arrays."""
    links = [each for each in subject.reference.plan.links if len(each.theirs) == 1]
    each = choose({e.theirs[0]: e for e in links}, random)[1]
    return each.ours[0].rpartition(".")[0], each.theirs[0].rpartition(".")[0]


def their_element(subject: Subject, theirs: Any, random: Random) -> Planted:
    ours, path = choose_theirs(subject, random)
    with torch.no_grad():
        weight = theirs.get_submodule(path).weight
        weight[tuple(int(random.integers(size)) for size in weight.shape)] += 1e-3
    return subject.at(ours, "parameters", f"an element of their {path}")


def their_output(subject: Subject, theirs: Any, random: Random) -> Planted:
    ours, path = choose_theirs(subject, random)
    theirs.get_submodule(path).register_forward_hook(lambda module, given, out: out * (1 + 1e-6))
    return subject.at(ours, "forward", f"the output of their {path}")


def their_gradient(subject: Subject, theirs: Any, random: Random) -> Planted:
    ours, path = choose_theirs(subject, random)
    theirs.get_submodule(path).register_forward_hook(
        lambda module, given, out: 0.5 * out + (0.5 * out).detach()
    )
    return subject.at(ours, "backward", f"the gradient of their {path}")


THEIR_PLANTS = [their_element, their_output, their_gradient]
