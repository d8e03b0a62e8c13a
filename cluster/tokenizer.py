"""Text to token ids and back: the one file that knows transformers and tokenizers.

1. Model preparation writes a directory with `tokenizer.json`, `tokenizer_config.json` (and perhaps
   `chat_template.jinja`) and `generation_config.json`; from a GGUF file through `export_gguf_tokenizer`.
2. The router loads it with `Tokenizer.load`: `tokenizers` alone, a fraction of a second, no torch.
3. `warm_up` imports transformers' sandboxed template renderer and compiles the chat template, before the
   server calls itself ready. A template that does not compile ends the start with a `ModelError`.
4. A request is rendered and tokenized once (`render_chat`, `encode`); workers only ever see ids.
5. Ids come back as text through `cluster.detokenizer`, of which `decode` is the one-shot form.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend

from cluster.chat_messages import continue_last, flatten_messages
from cluster.detokenizer import Detokenizer
from cluster.errors import InvalidRequest, ModelError
from cluster.token_bytes import PieceDecoder, piece_decoder
from cluster.tokenizer_config import (
    add_configured_tokens,
    default_template,
    read_json,
    special_tokens_of,
)

# What a request may pass to the chat template beside the messages (`chat_template_kwargs`).
TEMPLATE_KWARGS = frozenset(
    {"enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "date_string"}
)

# What running a template can raise when it and the messages do not fit.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

_LONG_TEXT = 2**10  # characters; a shorter text is encoded in less than half a millisecond

# llama.cpp's names of byte-level pre-tokenizers that isolate every digit before GPT-2's split.
# transformers' GGUF conversion does not know them and would leave GPT-2's split alone.
_SINGLE_DIGIT_PRE_TOKENIZERS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


class Tokenizer:
    """A model's tokenizer. Immutable after loading, safe to use from several threads."""

    def __init__(
        self,
        backend: Backend,
        decoder: PieceDecoder,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        generation_eos_ids: Sequence[int],
        source: Path,
    ) -> None:
        """Use `Tokenizer.load`. `special_tokens`: bos_token, eos_token, ... |-> text, where defined."""
        self._backend = backend
        self._decoder = decoder
        self._special_tokens = dict(special_tokens)
        self._chat_template = chat_template
        self._source = source
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}  # token_bytes, remembered
        self._texts: dict[int, str | None] = {}  # plain_text, remembered

        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id: int | None = self._named_id("bos_token")
        eos_token_id = self._named_id("eos_token")
        own_eos = () if eos_token_id is None else (eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(sorted({*generation_eos_ids, *own_eos}))

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json; only
        the first is required.

        Special tokens are those of both files, the way transformers joins them.

        Raises:
            ModelError: a file is missing, not JSON, or describes a tokenizer that is not supported.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"no tokenizer in {model_dir}: tokenizer.json is missing")
        config = read_json(model_dir / "tokenizer_config.json")
        generation = read_json(model_dir / "generation_config.json")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # `tokenizers` raises bare Exception for every fault of a file
            raise ModelError(f"cannot read the tokenizer {path}: {error}") from error
        try:
            decoder = piece_decoder(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
        except ValueError as error:
            raise ModelError(f"cannot use the tokenizer {path}: {error}") from error
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # work stays on the caller's thread
        backend.no_truncation()
        backend.no_padding()
        special_tokens = special_tokens_of(config)
        add_configured_tokens(backend, config, special_tokens)
        eos = generation.get("eos_token_id")
        return cls(
            backend,
            decoder,
            special_tokens=special_tokens,
            chat_template=default_template(model_dir, config),
            generation_eos_ids=[eos] if isinstance(eos, int) else list(eos or ()),
            source=model_dir,
        )

    # ---- text to ids -----------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True, *, param: str | None = None) -> list[int]:
        """Ids of `text`; an empty text gives [] (or just BOS, where the tokenizer adds it).

        Special tokens spelled in the text become their ids. A text that already begins with BOS does not get
        a second one.

        Raises:
            InvalidRequest: the text is not valid Unicode (a lone surrogate); `param` is the field it names.
        """
        try:
            ids: list[int] = self._encoding(text, add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(
                "the text is not valid Unicode: it has a lone surrogate", param=param
            ) from error
        if add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        """`encode` holds the interpreter's lock throughout: a long text would stop every other thread."""
        if len(text) < _LONG_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The id sequences that spell each word, at the start of a text and after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = tuple(self.encode(word.lstrip(" "), add_special_tokens=False))
            spaced = tuple(self.encode(" " + word.lstrip(" "), add_special_tokens=False))
            if bare:
                sequences[bare] = None
            # The spaced form counts where the space is part of the first token, not a token of its own.
            if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
                sequences[spaced] = None
        return tuple(sequences)

    # ---- chat ------------------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        """The model's own; None if it has none."""
        return self._chat_template

    def warm_up(self) -> None:
        """Import the renderer and compile the chat template (about a second, once).

        Raises:
            ModelError: the template has a syntax error.
        """
        if self._chat_template is None:
            return
        try:
            self._render(self._chat_template, [], add_generation_prompt=False, kwargs={})
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template of {self._source} does not compile: {error}") from error
        except _TEMPLATE_ERRORS:
            return  # it compiled; wanting at least one message is its right

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of the rendered conversation, tokenized once. The template writes all special tokens itself,
        so none is added.

        Message contents given as lists of text parts are joined (`cluster.chat_messages`). With
        `continue_final_message` the ids end exactly with the text of the last message, which must be the
        assistant's: no end-of-turn, no new header.

        Raises:
            InvalidRequest: the messages, flags or `template_kwargs` do not fit the template.
        """
        return self.encode(
            self.render_chat_text(messages, add_generation_prompt, continue_final_message, **template_kwargs),
            add_special_tokens=False,
            param="messages",
        )

    def render_chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> str:
        """As `render_chat`, before tokenization. `chat_template` takes the place of the model's own."""
        template = chat_template or self._chat_template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions with a plain prompt", param="messages"
            )
        if unknown := sorted(set(template_kwargs) - TEMPLATE_KWARGS):
            raise InvalidRequest(
                f"not a template option: `{unknown[0]}`; allowed: {', '.join(sorted(TEMPLATE_KWARGS))}",
                param="chat_template_kwargs",
            )
        conversation = flatten_messages(messages)
        marker = None
        if continue_final_message:
            conversation, marker = continue_last(conversation, add_generation_prompt)
        kwargs = {"tools": tools, "documents": documents, **template_kwargs}
        try:
            text = self._render(template, conversation, add_generation_prompt, kwargs)
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        if marker is None:
            return text
        head, found, _ = text.rpartition(marker)
        if not found:
            raise InvalidRequest(
                "the chat template does not show the last message, so it cannot be continued",
                param="continue_final_message",
            )
        return head

    def _render(
        self,
        template: str,
        conversation: list[dict[str, Any]],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            conversations=[conversation],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **kwargs},
        )
        text: str = rendered[0]
        return text

    # ---- ids to text -----------------------------------------------------------------------------

    @property
    def num_leading_spaces(self) -> int:
        """Spaces dropped at the start of a text; see `cluster.detokenizer`."""
        return self._decoder.num_leading_spaces

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = True, at_start: bool = True
    ) -> str:
        """The text of these ids: exactly what a `Detokenizer` would have streamed."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens, at_start=at_start)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token, not necessarily whole characters; b"" for an id without a token
        (models pad their vocabulary)."""
        data = self._bytes.get(token_id)
        if data is None:
            piece = self._backend.id_to_token(token_id)
            data = b"" if piece is None else self._decoder.piece_bytes(piece)
            self._bytes[token_id] = data
        return data

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def plain_text(self, token_id: int) -> str | None:
        """Of an ordinary token made of whole characters; None for every other."""
        try:
            return self._texts[token_id]
        except KeyError:
            pass
        text: str | None = None
        if not self.is_special(token_id):
            with contextlib.suppress(UnicodeDecodeError):
                text = self.token_bytes(token_id).decode()
        self._texts[token_id] = text
        return text

    def _named_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        if text is None:
            return None
        token_id: int | None = self._backend.token_to_id(text)
        return token_id


def export_gguf_tokenizer(gguf_path: Path, out_dir: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` (chat template inside) and `generation_config.json`
    for the tokenizer a GGUF file describes.

    Runs once, at model preparation; transformers' conversion imports torch.

    Raises:
        ModelError: the file is not GGUF or describes a tokenizer that cannot be converted.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.reader import read_gguf_metadata

    try:
        metadata, _ = read_gguf_metadata(str(gguf_path), ("tokenizer.ggml.tokens",))
        converted = PreTrainedTokenizerFast.from_pretrained(
            str(gguf_path.parent), gguf_file=gguf_path.name, local_files_only=True
        )
    except (OSError, ValueError, LookupError, struct.error) as error:
        raise ModelError(f"no usable tokenizer in {gguf_path}: {error}") from error

    backend = converted.backend_tokenizer
    pieces = metadata["tokenizer.ggml.tokens"]
    for piece, kind in zip(pieces, metadata.get("tokenizer.ggml.token_type", ()), strict=False):
        if kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED) and backend.token_to_id(piece) is not None:
            backend.add_tokens([AddedToken(piece, normalized=False, special=kind == _GGUF_CONTROL)])
    if backend.get_vocab_size(with_added_tokens=True) > len(pieces):
        raise ModelError(
            f"no usable tokenizer in {gguf_path}: it converts to more tokens than the file lists"
        )
    if metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGIT_PRE_TOKENIZERS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )

    named = {
        name: token_id
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (token_id := getattr(converted, f"{name}_id")) is not None
    }
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: getattr(converted, name) for name in named},
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    generation = {f"{name}_id": token_id for name, token_id in named.items() if name != "unk_token"}

    out_dir.mkdir(parents=True, exist_ok=True)
    backend.save(str(out_dir / "tokenizer.json"), pretty=False)
    for file_name, value in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
        (out_dir / file_name).write_text(text, encoding="utf-8")
