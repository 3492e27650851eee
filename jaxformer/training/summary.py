"""What a run says of itself at its start."""

from pathlib import Path

import jax

from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.data.corpora import Corpus
from jaxformer.distributed import processes
from jaxformer.hardware.matrix_products import named_library
from jaxformer.hardware.units import format_count
from jaxformer.packing import PackedRows
from jaxformer.sampling import MixedRows
from jaxformer.training.experiment import Experiment
from jaxformer.training.parallel import Strategy


def describe_run(experiment: Experiment, strategy: Strategy, folder: Path) -> dict[str, str]:
    """Returns what is about to run, by name: model, data, steps, devices and folder."""
    config, model = experiment.config, experiment.config.model
    size = format_count(sum(p.size for p in strategy.spec.shapes.values()))
    devices = strategy.devices
    hosts = "" if processes.count() == 1 else f" in {processes.count()} processes"
    library = named_library(config.products)
    products = "" if library is None else f", {library}'s products"
    return {
        "model": f"{_layers(model)} layers, {model.attention.num_heads} heads, "
        f"{model.d_model} wide, context {model.context_length}, {size} parameters",
        "data": f"{experiment.corpus.name}, {_describe_data(experiment)}",
        "steps": f"{config.steps} of {config.batch_size} {_rows(experiment)}, {config.dtype}",
        "devices": f"{len(devices)} × {devices[0].device_kind}{hosts}, jax {jax.__version__}"
        + products,
        "folder": str(folder),
    }


def _layers(model: TransformerLMConfig | EncoderDecoderConfig) -> str:
    if isinstance(model, EncoderDecoderConfig):
        return f"{model.num_encoder_layers} + {model.num_decoder_layers}"
    return str(model.num_layers)


def _rows(experiment: Experiment) -> str:
    if experiment.row != "pairs":
        return "windows"
    target, source = experiment.config.row_lengths
    return f"pairs, sources of at most {source} tokens and targets of {target}"


def _describe_data(experiment: Experiment) -> str:
    known = experiment.tokenizer.vocabulary_size()
    if not isinstance(experiment.corpus, Corpus):
        where = ", read from the disk as they are needed" if experiment.is_streamed else ""
        rows = experiment.train_rows
        for part in rows.parts if isinstance(rows, MixedRows) else [rows]:
            if isinstance(part, PackedRows):
                where += (
                    f"; {part.documents:,} documents packed into {len(part):,} windows, which are "
                    f"{100 * part.fill:.1f} % full"
                )
        folders = [folder for folder, _ in experiment.corpus.parts]
        if experiment.row != "ids" and any(folder.train.has_answers for folder in folders):
            where += "; the tokens of answers alone count"
        train = sum(len(folder.train) for folder in folders)
        validation = sum(len(folder.validation) for folder in folders)
        return f"{train:,} + {validation:,} tokens of {known:,}{where}"
    characters = len(experiment.corpus.text)
    if experiment.vocabulary is not None:
        return f"{characters:,} characters, {known} different"
    assert experiment.train_ids is not None
    tokens = len(experiment.train_ids) + len(experiment.validation_ids)
    return f"{characters:,} characters as {tokens:,} tokens of {known:,}"
