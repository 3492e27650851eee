"""Opens a checkpoint of any format: its dialect, what it holds, and how it becomes a model."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer.char_data import CharTokenizer
from jaxformer.checkpoints import CheckpointFolder
from jaxformer.data.tokenizers import HuggingFaceTokenizer
from jaxformer.errors import CheckpointError, Setting, TextError, UnsafeFileError, UsageError
from jaxformer.porting.dialects import check_class, choose_dialect, find_dialect
from jaxformer.porting.dialects.common.known_settings import kept_settings
from jaxformer.porting.dialects.multimodal import text_part
from jaxformer.porting.formats.raw_checkpoints import (
    TEXTS,
    Moments,
    RawCheckpoint,
    known_token_ids,
    read_config,
    read_meta,
    read_raw_checkpoint,
    with_optimizer,
)
from jaxformer.porting.formats.trainer_folders import OptimizerFile
from jaxformer.porting.mapping.abstract_modules import as_config
from jaxformer.porting.mapping.optimizer_state import (
    OptimizerState,
    UnknownStepsError,
    read_optimizer,
)
from jaxformer.porting.mapping.plans import Plan, plan_class_export, plan_import
from jaxformer.porting.mapping.run_optimizers import settings_of_run
from jaxformer.porting.mapping.wrapped_names import unwrap
from jaxformer.porting.parameter_order import parameter_order
from jaxformer.porting.peft import (
    Adapter,
    adapter_order,
    add_adapter,
    holds_adapter,
    merge_plan,
    read_adapter,
)

Tokenizer = CharTokenizer | HuggingFaceTokenizer


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint; its arrays are read when they are needed.

    Attributes:
        path: the file or folder.
        raw: what it holds, as it is stored.
        dialect: whose names its arrays have, if that is known; otherwise it is detected.
        config: settings of the source (a mapping), a config of jaxformer, or None.
        vocabulary: the characters in the order of their ids, if they are known.
        tokenizer_file: a ``tokenizer.json``, if there is one.
        token_ids: ``bos_token_id``, ``eos_token_id``, ``pad_token_id``, if they are known;
            those of texts in a model of two halves begin with ``text_config.``.
        ignore: patterns of names to leave out.
        force: whether the dialect may contradict the config.
        adapter: of PEFT, which goes with this model.
    """

    path: Path
    raw: RawCheckpoint
    dialect: str | None
    config: Any
    vocabulary: str | None
    tokenizer_file: Path | None
    token_ids: dict[str, Any]
    ignore: tuple[str, ...] = ()
    force: bool = False
    adapter: Adapter | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that are read, the weights first."""
        return self.raw.files if self.adapter is None else (*self.raw.files, *self.adapter.files)

    @property
    def base(self) -> str | None:
        """The model that adapters here are of, as far as it is known."""
        if self.adapter is not None:
            named: str | None = self.adapter.settings.get("base_model_name_or_path")
            return named
        start = self.raw.record.get("init_from")
        return start if isinstance(start, str) else None

    def plan(self, ignore: Sequence[str] = ()) -> Plan:
        """Returns the plan by which it becomes an NNX module.

        Args:
            ignore: patterns of more names to leave out.

        Raises:
            UsageError: its dialect is unknown or contradicts its config, or its settings are
                unsupported.
            CheckpointError: arrays are missing, unexpected, misshapen or wrong; all are listed.
        """
        ignore = (*self.ignore, *ignore)
        tensors, config = text_part(unwrap(self.raw.tensors), self.config, ignore)
        found = choose_dialect(tensors, self.dialect, config=config, force=self.force)
        if not (ignore or self.force):
            check_class(found, tensors, config)
        named = [found.equivalents.get(kind, kind) for kind in self._kinds(config)]
        kinds = [kind for kind in named if found.for_class([kind])]
        plan = plan_import(tensors, found, kinds=kinds, config=config, ignore=ignore)
        return plan if self.adapter is None else add_adapter(plan, self.adapter)

    def _kinds(self, config: Any) -> list[str]:
        """Returns the names of the class that the checkpoint gives."""
        named = [self.raw.record.get("class")]
        if isinstance(config, Mapping) and isinstance(config.get("architectures"), list):
            named += config["architectures"]
        return [kind for kind in named if isinstance(kind, str)]

    def optimizer_state(self, plan: Plan) -> OptimizerState | None:
        """Returns the optimizer's state by the paths of the parameters, or None without one.

        Args:
            plan: what ``plan`` returned.

        Raises:
            UsageError: it is the state of an optimizer that jaxformer has not.
            CheckpointError: it does not fit the model.
        """
        optimizer = self.raw.optimizer
        if isinstance(optimizer, Moments):
            step = optimizer.manifest["step"]
            kind, settings, following = settings_of_run(optimizer.manifest)
            return OptimizerState(optimizer.moments, step, settings, kind, following)
        if optimizer is None:
            return None
        steps = self.raw.record.get("step")
        if isinstance(optimizer, OptimizerFile):
            steps = optimizer.steps()
            optimizer = self._read_optimizer_file(optimizer)
        own, order = self._as_class(plan)
        try:
            return read_optimizer(optimizer, own, order=order, steps=steps)
        except UnknownStepsError as error:
            raise CheckpointError(
                f"{error}, and neither does the file: save the number under step beside the "
                "weights, or take the weights alone"
            ) from None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the optimizer's state is not as PyTorch has it ({error}): leave it out with ",
                Setting("weights_only"),
            ) from error

    def origin_of(self, plan: Plan) -> Mapping[str, Any]:
        """Returns the dialect and class that the arrays came from, and their order there.

        Runs and files remember where they were ported from, or fine-tuned from; also the settings
        of a config.json that go by no other name here, and those of a Trainer's folder.

        Args:
            plan: what ``plan`` returned.
        """
        dialect = plan.origin.dialect.name
        if dialect == "jaxformer":
            return dict(self.raw.record.get("origin") or {})
        origin = {
            "dialect": dialect,
            "class": plan.origin.kind,
            "order": list(self.known_order(plan)),
            "settings": self.recorded_settings(dialect) | kept_settings(plan.origin.config),
        }
        file = self.raw.optimizer
        trainer = file.settings() if isinstance(file, OptimizerFile) else {}
        return origin | ({"trainer": trainer} if trainer else {})

    def recorded_settings(self, dialect: str) -> dict[str, Any]:
        """Returns what it remembers of the config.json that it had as a model of a dialect."""
        origin = self.raw.record.get("origin") or {}
        kept = origin.get("settings") if origin.get("dialect") == dialect else None
        return dict(kept) if isinstance(kept, Mapping) else {}

    def known_order(self, plan: Plan) -> tuple[str, ...]:
        """Returns the names of its arrays in the order of its modules; none if files sort them.

        Args:
            plan: what ``plan`` returned.
        """
        # Those of the library, and the indices of shards, are sorted by name.
        is_sorted = any(file.suffix == ".safetensors" for file in self.raw.files)
        is_sorted = is_sorted or self.raw.files[0].suffix == ".json"
        return () if is_sorted else plan.order

    def _read_optimizer_file(self, file: OptimizerFile) -> dict[str, Any]:
        try:
            return file.read()
        except CheckpointError as error:
            parts = (*error.args, ", or leave it out with ", Setting("weights_only"))
            raise CheckpointError(*parts) from error

    def _as_class(self, plan: Plan) -> tuple[Plan, Sequence[str]]:
        """Returns a plan with the names of the source's class, and these in its modules' order.

        Files of safetensors sort their names, and may hold other arrays than the class.
        """
        known = self.known_order(plan)
        if known and self.adapter is None:
            return plan, known
        whole = plan if self.adapter is None else merge_plan(plan)
        own = plan_class_export(whole.module, whole.tensors, plan.origin)
        order = parameter_order(own, (), self.raw.record.get("origin") or {})
        if self.adapter is not None:
            return plan, adapter_order(plan, order or [])
        mapping = own.module_mapping
        return dataclasses.replace(plan, links=own.links, module_mapping=mapping), order or []

    def files_beside(self) -> dict[str, Path]:
        """Returns the files that travel with the weights, by the names that copies get."""
        files = {path.name: path for path in self.raw.companions}
        if self.tokenizer_file is not None:
            # One that was given by hand may have any name.
            files["tokenizer.json"] = self.tokenizer_file
        return files

    def tokenizer(self, vocab_size: int) -> Tokenizer | None:
        """Returns the tokenizer, or None if it is unknown.

        Args:
            vocab_size: of the model.

        Raises:
            TextError: it has more characters than the model.
            UsageError: it needs a package that is not installed.
        """
        if self.vocabulary is not None:
            known = CharTokenizer(self.vocabulary)
            if known.vocabulary_size() > vocab_size:
                raise TextError(
                    f"the vocabulary has {known.vocabulary_size()} characters and the model "
                    f"{vocab_size}: give the right one with ",
                    Setting("meta"),
                )
            return known
        return None if self.tokenizer_file is None else HuggingFaceTokenizer(self.tokenizer_file)

    def first_ids(self) -> list[int]:
        """Returns the id with which a text begins if there is no prompt; no id if it is unknown.

        GPT-2 and others begin and end texts with the same token.
        """
        ids = _ids(self.token_ids.get("bos_token_id")) or _ids(self.token_ids.get("eos_token_id"))
        return ids[:1]

    def last_ids(self) -> list[int]:
        """Returns the ids that end a text, those of generation_config.json too.

        Raises:
            CheckpointError: generation_config.json is no JSON object.
        """
        sources = (self.token_ids, self._generation_config())
        found = (settings.get("eos_token_id") for settings in sources)
        return list(dict.fromkeys(i for ids in found for i in _ids(ids)))

    def target_ids(self) -> tuple[list[int], int | None]:
        """Returns the ids that targets begin with, and the one that the last token always is.

        They begin with ``decoder_start_token_id`` and, where there is one, ``forced_bos_token_id``;
        ``forced_eos_token_id`` is last where a target is as long as it may be. What
        generation_config.json says comes before config.json.

        Raises:
            CheckpointError: generation_config.json is no JSON object.
        """
        sources = (self._generation_config(), self.token_ids)

        def first(name: str) -> list[int]:
            return next((ids for s in sources if (ids := _ids(s.get(name))[:1])), [])

        last = first("forced_eos_token_id")
        begin = [*first("decoder_start_token_id"), *first("forced_bos_token_id")]
        return begin, last[0] if last else None

    def _generation_config(self) -> Mapping[str, Any]:
        file = self.files_beside().get("generation_config.json")
        return {} if file is None else read_config(file)


def open_checkpoint(
    path: str | Path,
    *,
    dialect: str | None = None,
    config: Any = None,
    meta: str | Path | None = None,
    step: int | None = None,
    best: bool = False,
    ignore: Sequence[str] = (),
    force: bool = False,
    base: str | Path | None = None,
) -> Checkpoint:
    """Opens a checkpoint of any format; its arrays are read later.

    Args:
        path: a ``.safetensors`` or ``.pt`` file, the index of several, a Hugging Face folder, a
            run's folder, whose arrays are all read and verified now, or PEFT's folder of adapters.
        dialect: whose names its arrays have; by default it is detected.
        config: a JSON file, or settings as in ``from_torch``; they take precedence over those in
            the checkpoint.
        meta: nanoGPT's ``meta.pkl`` or a ``tokenizer.json``; it takes precedence over the one that
            lies beside the checkpoint.
        step: which step of a run's folder; default the newest that verifies.
        best: the step with the lowest validation loss.
        ignore: patterns of names to leave out; also names of settings that are known to be without
            effect.
        force: whether to take the dialect even where the config has another ``model_type``.
        base: the model that adapters are of; default the folder that they name.

    Raises:
        CheckpointError: it is missing, damaged, or no checkpoint.
        UnsafeFileError: opening it could do harm.
        UsageError: the dialect is unknown, or a step was given and the format has no steps.
        ResourceError: it cannot be read.
    """
    if dialect is not None:
        find_dialect(dialect)
    path = Path(path)
    if holds_adapter(path):
        adapter = read_adapter(path)
        model = open_checkpoint(
            adapter.base if base is None else base, dialect=dialect, config=config, meta=meta,
            step=step, best=best, ignore=ignore, force=force,
        )  # fmt: skip
        # The optimizer is that of the adapters, beside them.
        raw = dataclasses.replace(model.raw, optimizer=None, unread_optimizer="")
        return dataclasses.replace(model, adapter=adapter, raw=with_optimizer(raw, path))
    if base is not None:
        raise UsageError(
            Setting("base"), f" goes with PEFT's folder of adapters, and {path} is none"
        )
    raw = read_raw_checkpoint(path, step, best=best)
    record = raw.record
    if isinstance(config, str | Path):
        config = read_config(Path(config))
    config = record.get("config") if config is None else config
    if isinstance(config, Mapping):
        config = as_config(config)
    files = [c for c in raw.companions if c.name == "tokenizer.json"]
    vocabulary = record.get("vocabulary")
    if meta is None and raw.kind == "torch" and (path.parent / "meta.pkl").is_file():
        meta = path.parent / "meta.pkl" if vocabulary is None else None
    if meta is not None and _is_json(Path(meta)):
        vocabulary, files = None, [Path(meta)]
    elif meta is not None:
        vocabulary = read_meta(Path(meta))
    return Checkpoint(
        path,
        raw,
        dialect or record.get("dialect"),
        config,
        vocabulary or None,
        files[0] if files else None,
        _token_ids(record, config),
        tuple(ignore),
        force,
    )


def stored_end_of_text(folder: Path) -> int | None:
    """Returns the id that ends a text by the settings of the model in a folder; reads no arrays.

    The folder is a run's or one of Hugging Face; the result is None if nothing there says it.
    """
    checkpoints = CheckpointFolder(folder / "checkpoints")
    with contextlib.suppress(CheckpointError, UnsafeFileError):
        steps = checkpoints.steps()
        settings = checkpoints.manifest(steps[-1]) if steps else read_config(folder / "config.json")
        ids = _token_ids(settings, settings)
        ends = _ids(ids.get("eos_token_id")) or _ids(ids.get(f"{TEXTS}.eos_token_id"))
        return ends[0] if ends else None
    return None


def _token_ids(record: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Returns the ids of special tokens, of which those of the settings in use go first."""
    sources = (record.get("config"), record.get("token_ids"), config)
    found = [known_token_ids(source) for source in sources if isinstance(source, Mapping)]
    return {name: ids for each in found for name, ids in each.items()}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool)]


def _is_json(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip()[:1] == b"{"
    except OSError:
        # The reader of a meta.pkl then reports the error.
        return False
