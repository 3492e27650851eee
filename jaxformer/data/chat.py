"""Chat templates: a conversation as the text that a model was trained to continue."""

import datetime
import importlib.util
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer.errors import TextError, UsageError
from jaxformer.hardware.invocation import install
from jaxformer.storage.local_files import LocalFile
from jaxformer.storage.strict_json import parse_json

MAX_BYTES = 16 << 20
# Where a template stands, the first that is there counts.
FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
# What a template writes before and after what it marks as generated: nothing unless it is asked to.
MARKS = ("begin_of_answer", "end_of_answer")


def find_template(files: Mapping[str, Path]) -> str | None:
    """Returns the chat template among the files beside a model's weights, or None without one.

    Args:
        files: by name.

    Raises:
        CheckpointError: one of them is damaged.
    """
    for name in FILES:
        if name not in files:
            continue
        if name.endswith(".jinja"):
            return _read(files[name]).decode("utf-8", "replace")
        found = parse_json(_read(files[name]), str(files[name])).get("chat_template")
        if isinstance(found, list):
            # Several by name: the one for conversations is called default.
            named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return None


def render_chat(messages: Sequence[Mapping[str, str]], files: Mapping[str, Path]) -> str:
    """Returns a conversation as text, with the start of the model's answer at its end.

    Args:
        messages: each with a ``role`` and a ``content``.
        files: those beside the model's weights, by name.

    Raises:
        UsageError, TextError, CheckpointError: as for ``ChatTemplate``.
    """
    return ChatTemplate(files).render(messages)


class ChatTemplate:
    """Writes conversations as text, by the template beside a model's weights.

    A template is a program that comes with the model; it is run in the sandbox of jinja2, as
    transformers does.

    Args:
        files: those beside the weights, by name.

    Raises:
        UsageError: there is no template, or jinja2 is not installed.
        CheckpointError: one of the files is damaged.
    """

    def __init__(self, files: Mapping[str, Path]):
        template = find_template(files)
        if template is None:
            raise UsageError(
                f"the model has no chat template: none of {', '.join(FILES)} beside it has one"
            )
        if importlib.util.find_spec("jinja2") is None:
            raise UsageError(f"a chat template needs the package jinja2: {install('hf')}")
        self._source = template
        self._special_tokens = _special_tokens(files)
        self._compiled: Any = None

    def render(self, messages: Sequence[Mapping[str, str]], *, asks: bool = True) -> str:
        """Returns a conversation as text.

        Args:
            messages: each with a ``role`` and a ``content``.
            asks: whether the start of the model's answer follows.

        Raises:
            TextError: the template rejects the conversation, or is none.
        """
        return self._render(messages, add_generation_prompt=asks)

    def mark_answers(self, messages: Sequence[Mapping[str, str]]) -> list[tuple[str, bool]]:
        """Returns a conversation in parts, each with whether the template marks it as an answer.

        What stands after the last answer is left out.

        Args:
            messages: each with a ``role`` and a ``content``.

        Returns:
            The parts; none if the template has no ``{% generation %}``.

        Raises:
            TextError: the template rejects the conversation, or changes what it has marked.
        """
        # No text has these, and no filter of case changes them.
        marks = {name: f"<{secrets.randbits(128)}>" for name in MARKS}
        first, last = marks.values()
        before, *others = self._render(messages, add_generation_prompt=False, **marks).split(first)
        parts = []
        for other in others:
            answer, _, after = other.partition(last)
            parts += [(before, False), (answer, True)]
            before = after
        whole = "".join(text for text, _ in parts) + before
        if parts and whole != self.render(messages, asks=False):
            raise TextError("has a chat template that changes what it marks as generated")
        return parts

    def _render(self, messages: Sequence[Mapping[str, str]], **values: Any) -> str:
        import jinja2

        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._source)
            return str(
                self._compiled.render(messages=list(messages), **values, **self._special_tokens)
            )
        except jinja2.TemplateError as error:
            reason = str(error).splitlines() or [type(error).__name__]
            raise TextError(f"the chat template rejects the prompt: {reason[0]}") from error
        # A template may do with its values whatever raises an error in Python.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise TextError(f"the chat template fails: {error}") from error


def _environment() -> Any:
    """The sandbox of jinja2, with what templates use."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}``, with which transformers marks what an assistant has written."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 reads it so)

        def parse(self, parser: Any) -> Any:
            nodes = jinja2.nodes
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            first, last = (nodes.Output([nodes.Name(name, "load")]) for name in MARKS)
            return nodes.Scope([first, *body, last]).set_lineno(line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )

    def reject(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = reject
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    return environment


def _special_tokens(files: Mapping[str, Path]) -> dict[str, str]:
    """Returns the special tokens as texts, which templates write: ``bos_token`` and others."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if name not in files:
            continue
        for key, value in parse_json(_read(files[name]), str(files[name])).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _read(path: Path) -> bytes:
    file = LocalFile(path)
    if file.size > MAX_BYTES:
        raise TextError(f"{path} has {file.size} bytes, where settings have at most 16 MiB")
    return file.bytes(0, file.size)
