"""Our own names and layout: what a run's folder holds, for models that one config describes."""

import dataclasses
from typing import Any

from flax import nnx

from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig, from_dict
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.porting.mapping.dialect import Counterpart, Dialect
from jaxformer.porting.mapping.rules import Rule, Rules
from jaxformer.porting.mapping.skeletons import shapes_of
from jaxformer.porting.mapping.source_model import Foreign
from jaxformer.transformer_lm import TransformerLM


def _rules(module: Any) -> Rules:
    """Every array is called what it is called, and lies as it lies."""
    return tuple(Rule((name,), (name,), transpose=False) for name in shapes_of(module))


def _counterpart(model: Any, config: type) -> Counterpart:
    known = [field.name for field in dataclasses.fields(config)]

    def build(foreign: Foreign, rngs: nnx.Rngs) -> Any:
        values = {name: foreign.config[name] for name in known if name in foreign.config}
        return model(from_dict(config, values), rngs=rngs)

    return Counterpart(
        (model.__name__,),
        model,
        build,
        _rules,
        settings=lambda module: dataclasses.asdict(module.config),
    )


DIALECTS = (
    Dialect(
        "jaxformer",
        (
            _counterpart(TransformerLM, TransformerLMConfig),
            _counterpart(EncoderDecoder, EncoderDecoderConfig),
        ),
    ),
)
