"""The `renderers` package as the one that says what follows a recorded turn (extra `toprope[renderers]`).

It has renderers written by hand for model families (qwen3, llama-3 and others), which extend sampled ids and never
render them again. The tokeniser is read from the model's own `tokenizer.json`; nothing is fetched. A request's settings
of the template go to the renderer where its family has them (`enable_thinking`); any other is refused, not left out. An
effort is no setting of a template's: where the family has nothing that is made of it, it shapes nothing.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toprope.dialects.chat_history import messages_from_items
from toprope.dialects.chat_parts import tools_to_chat
from toprope.errors.tree import ConfigError
from toprope.servers.model.engines.base import CannotContinue, NextTurn
from toprope.servers.model.engines.prompt_settings import (
    NOT_CARRIED,
    STEERING,
    UNREAD,
    check_carried,
    sent_settings,
    template_kwargs,
)
from toprope.tokens.items import value_mark

_CARRIED = ("chat_template_kwargs", "reasoning_effort", *STEERING, *UNREAD)  # none of the families writes the last
_ANY_FAMILY = ("auto", "default")
"""Names that stand for no family: what such a renderer's template reads is not known here."""
_REMEMBERED = 16
_INSTALL = "install it with: pip install 'toprope[renderers]'"


class LibraryRenderer:
    """The renderer `name` of the package, with the tokeniser of the model directory `tokenizer`.

    `options` are the renderer's own (`enable_thinking`); what a request sets itself goes before them. Thoughts of
    earlier turns stay, whatever the model's template does: they were sampled. Raises `ConfigError` for a name, an
    option or a directory that is none.
    """

    def __init__(self, name: str, *, tokenizer: str | Path, options: Mapping[str, Any] | None = None) -> None:
        try:
            from pydantic import TypeAdapter, ValidationError
            from renderers import RendererConfig, create_renderer
        except ImportError as error:
            raise ConfigError(f"token_in_renderer needs the package renderers ({error}); {_INSTALL}") from error
        words = self._words = _Words(Path(tokenizer))
        given = {"thinking_retention": "all", **(options or {}), "name": name}
        try:
            config = self._config = TypeAdapter(RendererConfig).validate_python(given)
        except ValidationError as error:
            raise ConfigError(f"token_in_renderer {name!r}: {error}") from error
        try:
            self._renderer = create_renderer(words, config)
        except Exception as error:  # whatever a renderer misses in a tokeniser that is not its model's
            raise ConfigError(
                f"token_in_renderer {name!r} does not fit the tokeniser of {tokenizer}: {error!r}; it must be that of "
                "the served model"
            ) from error
        self.name = name
        self._others: OrderedDict[str, Any] = OrderedDict()

    async def next_turn(self, turn: NextTurn) -> list[int]:
        """As `ContinuesTurns.next_turn`."""
        messages, lost = messages_from_items(turn.items[turn.tail :])
        if lost:
            raise CannotContinue("items_not_written", f"Chat cannot carry {', '.join(lost)}")
        tools, _ = tools_to_chat(turn.request.tools)
        renderer = self._set_to(sent_settings(turn))
        prompt, sampled = turn.prompt_token_ids.tolist(), turn.generation_token_ids.tolist()
        try:
            made = renderer.bridge_to_next_turn(prompt, sampled, messages, tools=tools or None)
        except Exception as error:  # the package's own faults cost an exact prefix, never a call
            raise CannotContinue("renderer_failed", f"the renderer {self.name} failed: {error!r}") from error
        before = [*prompt, *sampled]
        if made is None or list(made.token_ids[: len(before)]) != before:
            raise CannotContinue("renderer_refused", f"the renderer {self.name} cannot extend this turn")
        return list(made.token_ids[len(before) :])

    def _set_to(self, settings: Mapping[str, Any]) -> Any:
        """The renderer with what a request sets of its template. Raises `CannotContinue` for what it has not."""
        from renderers import create_renderer, merge_chat_template_kwargs, template_field_names

        check_carried(settings, _CARRIED, f"the renderer {self.name}")
        named, made = template_kwargs(settings)
        has = template_field_names(self._config)
        known = {key: value for key, value in made.items() if key in has}
        if made and not known and self._config.name in _ANY_FAMILY:
            raise CannotContinue(NOT_CARRIED, f"the renderer {self.name} has no setting for {', '.join(sorted(made))}")
        wanted = {key: value for key, value in {**named, **known}.items() if value is not None}
        if not wanted:
            return self._renderer
        key = value_mark(wanted)
        if key in self._others:
            self._others.move_to_end(key)
            return self._others[key]
        try:
            config = merge_chat_template_kwargs(self._config, wanted)
            other = create_renderer(self._words, config)
        except Exception as error:  # a setting or a value that the family has not
            raise CannotContinue(NOT_CARRIED, f"the renderer {self.name} cannot be set so: {error}") from error
        read = {name: getattr(config, name) for name in wanted}
        if value_mark(read) != value_mark(wanted):  # "false" is no false to a template
            raise CannotContinue(NOT_CARRIED, f"the renderer {self.name} reads {wanted} as {read}")
        self._others[key] = other
        if len(self._others) > _REMEMBERED:
            self._others.popitem(last=False)
        return other


class _Words:
    """A tokeniser as the package wants it, over the `tokenizers` package."""

    unk_token_id: int | None = None

    def __init__(self, directory: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(f"token_in_renderer needs the package tokenizers ({error}); {_INSTALL}") from error
        path = directory / "tokenizer.json" if directory.is_dir() else directory
        if not path.is_file():
            raise ConfigError(f"token_in_renderer: there is no tokenizer.json at {directory}; name the model directory")
        self._tokenizer = Tokenizer.from_file(str(path))
        self.name_or_path = str(directory)
        self.eos_token_id = self._end_of(path.with_name("tokenizer_config.json"))

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """The ids of a text; nothing is added to it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """The text of ids, special tokens spelled out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or those of several; None for one that is not in the vocabulary."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def _end_of(self, path: Path) -> int | None:
        try:
            told = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError):
            return None
        text = told.get("content") if isinstance(told, dict) else told
        return self._tokenizer.token_to_id(text) if isinstance(text, str) else None
