"""Text to ids and back, and chat templates, without torch.

In: a folder with tokenizer.json and a chat template. Out: ids, text, rendered conversations. Uses the `tokenizers`
package and a sandboxed Jinja environment with the names that published templates rely on. Knows no conversation's
history and no engine.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from claw_train.errors import ModelError, boundary


class Tokenizer:
    """The tokenizer and the chat template of one model.

    Args:
        folder: holds tokenizer.json and, for `render`, chat_template.jinja or tokenizer_config.json.

    Raises:
        ModelError: a file is missing or unreadable.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{self.folder} holds no tokenizer.json")
        with boundary(ModelError, f"reading {file}"):
            self._fast = FastTokenizer.from_file(str(file))
        self._fast.no_padding()
        self._fast.no_truncation()
        self._config = _read_json(self.folder / "tokenizer_config.json")
        self._special = {
            token.content: i for i, token in self._fast.get_added_tokens_decoder().items() if token.special
        }

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Control tokens: text -> id."""
        return self._special

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply: of generation_config.json, and the tokenizer's end token."""
        found = _read_json(self.folder / "generation_config.json").get("eos_token_id")
        listed = cast(Sequence[object], found) if isinstance(found, list) else [found]
        ids = {i for i in listed if isinstance(i, int)}
        end = self._token_text("eos_token")
        if end in self._special:
            ids.add(self._special[end])
        return tuple(sorted(ids))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of tokenizer.json and the chat template; goes into the run's manifest."""
        digest = hashlib.sha256((self.folder / "tokenizer.json").read_bytes())
        digest.update((self._template_text() or "").encode())
        return digest.hexdigest()

    def encode(self, text: str, *, control: bool = False) -> tuple[int, ...]:
        """Ids of `text`, nothing added. Only with `control` do the texts of control tokens become those tokens."""
        if control or not self._special_pattern.search(text):
            return tuple(self._fast.encode(text, add_special_tokens=False).ids)
        # the package's own switch for this (`encode_special_tokens`) is a state of the whole tokenizer
        ids: list[int] = []
        for piece in self._special_pattern.split(text):
            # a control token's text, cut after its first character, is no longer that token
            for part in (piece[:1], piece[1:]) if piece in self._special else (piece,):
                ids += self._fast.encode(part, add_special_tokens=False).ids
        return tuple(ids)

    def decode(self, ids: Sequence[int], *, control: bool = False) -> str:
        """Text of ids; control tokens are left out unless `control`."""
        return self._fast.decode(list(ids), skip_special_tokens=not control)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        settings: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation as the model's chat template writes it.

        Args:
            messages: each with `role` and `content`.
            add_generation_prompt: whether the head of the next reply follows.
            settings: further names the template may use, such as `tools` or `enable_thinking`.

        Raises:
            ModelError: no template, or it refused the messages.
        """
        tokens = {name: self._token_text(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        names = {**{k: v for k, v in tokens.items() if v}, **(settings or {})}
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt, **names
            )
        except TemplateError as error:
            raise ModelError(f"the chat template of {self.folder} refused the messages: {error}") from None

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        texts = sorted(self._special, key=len, reverse=True)
        return re.compile("(" + "|".join(re.escape(t) for t in texts) + ")") if texts else re.compile("(?!)")

    @cached_property
    def _template(self) -> Any:
        text = self._template_text()
        if text is None:
            raise ModelError(f"{self.folder} has no chat template: use an instruct model")
        try:
            return _environment().from_string(text)
        except TemplateError as error:
            raise ModelError(f"the chat template of {self.folder} is unreadable: {error}") from None

    def _template_text(self) -> str | None:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        found = self._config.get("chat_template")
        if isinstance(found, list):
            named = {row["name"]: row["template"] for row in cast(list[dict[str, str]], found)}
            found = named.get("default")
        return found if isinstance(found, str) else None

    def _token_text(self, name: str) -> str | None:
        found = self._config.get(name)
        if isinstance(found, dict):
            found = cast(dict[str, object], found).get("content")
        return found if isinstance(found, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is no JSON: {error}") from None
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


class _GenerationBlocks(Extension):
    """Lets `{% generation %}` blocks, which mark what a model said, pass through."""

    tags = {"generation"}  # noqa: RUF012  the parent declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return cast(list[nodes.Node], parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = _now
    return env


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
