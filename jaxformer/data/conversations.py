"""Records of prompts and answers as turns of text, of which a model learns the answers alone."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxformer.data.chat import ChatTemplate

ANSWERING = "assistant"


class Turn(NamedTuple):
    """A part of a conversation.

    Attributes:
        text: of it.
        counts: whether it is an answer, whose tokens are targets.
    """

    text: str
    counts: bool


def is_conversation(record: Any) -> bool:
    """Returns whether a record has a prompt and its answer, or messages."""
    return isinstance(record, dict) and (
        "messages" in record or {"prompt", "answer"} <= set(record)
    )


def read_turns(record: Any, template: ChatTemplate | None) -> list[Turn]:
    """Returns the turns of a record, the last of which is an answer.

    Args:
        record: with ``prompt`` and ``answer``, or with ``messages``.
        template: writes messages.

    Raises:
        ValueError: it has no answer, or not the texts that it should have.
        TextError: the template rejects the messages.
    """
    if not is_conversation(record):
        raise ValueError("has neither a prompt and an answer nor messages, as the first record has")
    if "messages" in record:
        return _chat_turns(_check_messages(record["messages"]), template)
    prompt, answer = record["prompt"], record["answer"]
    if not isinstance(prompt, str) or not isinstance(answer, str) or not answer:
        raise ValueError("has no texts in 'prompt' and 'answer', or an empty answer")
    return [Turn(prompt, False), Turn(answer, True)]


def _check_messages(messages: Any) -> Sequence[Mapping[str, str]]:
    if not isinstance(messages, list):
        raise ValueError("has no list in 'messages'")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError("has a message without the texts 'role' and 'content'")
    if not any(message["role"] == ANSWERING for message in messages):
        raise ValueError(f"has no message of the role {ANSWERING!r}")
    return messages


def _chat_turns(messages: Sequence[Mapping[str, str]], template: ChatTemplate | None) -> list[Turn]:
    """The turns of messages, where an answer is what the template marks as generated.

    If it marks nothing, an answer is what it adds to the prompt before it. What follows the last
    answer is left out, as nothing of it is a target.
    """
    if template is None:
        raise ValueError(
            "has messages, and there is no chat template to write them: name the folder of a "
            "tokenizer that has one with --tokenizer"
        )
    turns = [Turn(text, counts) for text, counts in template.mark_answers(messages)]
    if turns:
        return turns
    done = ""
    for place, message in enumerate(messages):
        if message["role"] != ANSWERING:
            continue
        prompt = template.render(messages[:place])
        whole = template.render(messages[: place + 1], asks=False)
        if not (prompt.startswith(done) and whole.startswith(prompt)):
            raise ValueError(
                "has answers that the chat template does not write where it asks for them: give "
                "prompts and answers"
            )
        turns += [Turn(prompt[len(done) :], False), Turn(whole[len(prompt) :], True)]
        done = whole
    return turns
