"""Prompts made of segments: sampled replies as their own ids, everything else through the model's chat template.

In: messages, and the ids of prompts and replies so far. Out: prompt ids. A reply is never turned into text and back:
the next prompt begins with exactly the ids that were served and sampled. Knows no engine, session or environment.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from claw_train.errors import ConfigError
from claw_train.models.tokenizer import Tokenizer

_REPLY = "\x02reply\x03"
"""Stands for a reply whose ids are spliced in; control characters, so that no template trims it."""
_MARK = "\x02control{}\x03"
_MARK_PATTERN = re.compile("(\x02control[0-9]+\x03)")
"""Stands for the text of a control token inside a message, which must not become that token."""


class Renderer:
    """Renders prompts for one model. Implements `protocols.Renderer`.

    Args:
        folder: holds the tokenizer and the chat template, or is a `Tokenizer`.
        thinking: given to the template as `enable_thinking`; None leaves the template's own default.

    Raises:
        ConfigError: the template rewrites earlier messages when later ones come, so no prompt can continue another.
        ModelError: tokenizer or template missing or unreadable.

    Example: after `p = start([hi])` and a sampled reply `r`, `extend(p, r, [more])` begins with `p + r`.
    """

    def __init__(self, folder: str | Path | Tokenizer, *, thinking: bool | None = None) -> None:
        self.tokenizer = folder if isinstance(folder, Tokenizer) else Tokenizer(folder)
        self._settings: dict[str, object] = {} if thinking is None else {"enable_thinking": thinking}
        self.end_of_turn = self._check_template()
        """Id that the template puts after a reply."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply of this model, the end of a turn among them."""
        return tuple(sorted({*self.tokenizer.stop_token_ids, self.end_of_turn}))

    def start(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Ids [P] of a conversation's first prompt, generation prompt included.

        Raises:
            ModelError: the template refused the messages.
        """
        return self._encode(*self._render(messages))

    def extend(
        self, prompt_ids: Sequence[int], reply_ids: Sequence[int], messages: Sequence[Mapping[str, str]]
    ) -> tuple[int, ...]:
        """Ids of the next prompt: `prompt_ids + reply_ids` unchanged, then what follows the reply.

        A reply that was cut before its end-of-turn id gets that id; it was not sampled and is part of the prompt.

        Args:
            prompt_ids: [P] as served.
            reply_ids: [T] as sampled.
            messages: those that came after the reply; at least one.

        Raises:
            ModelError: the template refused the messages.
        """
        if not messages:
            raise ValueError("extend needs the message that follows the reply")
        tail = self._tail(messages)
        assert tail[0] == self.end_of_turn
        ended = bool(reply_ids) and reply_ids[-1] == self.end_of_turn
        return (*prompt_ids, *reply_ids, *(tail[1:] if ended else tail))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out."""
        return self.tokenizer.decode(ids)

    def _tail(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Ids from the end of a reply to the head of the next one."""
        text, marks = self._render([_message("user", "."), _message("assistant", _REPLY), *messages])
        return self._encode(text[text.index(_REPLY) + len(_REPLY) :], marks)

    def _render(self, messages: Sequence[Mapping[str, str]], *, head: bool = True) -> tuple[str, Mapping[str, str]]:
        """The conversation as text, and what the marks in it stand for."""
        marks: dict[str, str] = {}
        rows: list[dict[str, object]] = []
        for message in messages:
            content = message["content"]
            for text in self.tokenizer.special_tokens:
                if text in content:
                    mark = _MARK.format(len(marks))
                    marks[mark] = text
                    content = content.replace(text, mark)
            rows.append({**message, "content": content})
        return self.tokenizer.render(rows, add_generation_prompt=head, settings=self._settings), marks

    def _encode(self, text: str, marks: Mapping[str, str]) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in _MARK_PATTERN.split(text):
            if piece in marks:
                ids += self.tokenizer.encode(marks[piece])
            elif piece:
                ids += self.tokenizer.encode(piece, control=True)
        return tuple(ids)

    def _check_template(self) -> int:
        """Makes sure that what follows a reply depends on nothing before it; returns the end-of-turn id."""
        reply, more = _message("assistant", _REPLY), _message("user", "n")
        tails: set[str] = set()
        for opening in ([_message("user", "a")], [_message("system", "s"), _message("user", "b c")]):
            before, _ = self._render(opening, head=False)
            once, _ = self._render([*opening, reply, more], head=False)
            headed, _ = self._render([*opening, reply, more])
            longer, _ = self._render([*opening, reply, more, _message("assistant", "r"), more])
            tail = once.partition(_REPLY)[2]
            if (
                once.count(_REPLY) != 1
                or not once.startswith(before)
                or not headed.startswith(once)
                or not longer.partition(_REPLY)[2].startswith(tail)
            ):
                raise self._refusal("rewrites earlier messages when later ones come")
            tails.add(tail)
        first = self.tokenizer.encode(tails.pop(), control=True)[:1]
        if tails or not first or first[0] not in self.tokenizer.special_tokens.values():
            raise self._refusal("does not end a reply with a control token of its own")
        return first[0]

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"the chat template of {self.tokenizer.folder} {why}: use a model with a ChatML template")


def _message(role: str, content: str) -> Mapping[str, str]:
    return {"role": role, "content": content}
