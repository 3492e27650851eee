"""What a run trains on, by the name in its settings: a text, or a folder of tokens."""

from pathlib import Path

from jaxformer.data.corpora import Corpus, load_corpus
from jaxformer.data.token_folders import TokenCorpus, TokenMixture, mix_tokens, open_tokens
from jaxformer.porting.formats.raw_checkpoints import read_meta
from jaxformer.training.config import TrainConfig


def load_data(
    config: TrainConfig, *, download: bool = False
) -> Corpus | TokenCorpus | TokenMixture:
    """Returns the text, the folder of tokens, or the mixture of folders that the settings name.

    Args:
        config: of the run.
        download: see ``load_corpus``.

    Raises:
        JaxformerError: there is none, or it is damaged; see ``load_corpus`` and ``open_tokens``.
    """
    if config.mixture:
        return mix_tokens([(_open(Path(name)), share) for name, share in config.mixture])
    if not config.data_is_tokens:
        return load_corpus(config.data, encoding=config.encoding, download=download)
    return _open(Path(config.data))


def _open(path: Path) -> TokenCorpus:
    # nanoGPT's pickle is read by the code that reads checkpoints, which runs nothing of it.
    meta = path / "meta.pkl"
    return open_tokens(path, read_meta(meta) if meta.is_file() else None)
