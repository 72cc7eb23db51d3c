"""Tokenizer and chat template of a Hugging Face directory, through transformers, with llama.Model's methods.

What the two read of the same model is the same: an added token that is special prints nothing, and the BOS stands in
front of a rendered conversation once, where the tokenizer adds one or the template writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..convert.json_files import read_json
from ..errors import FileError
from ..templates import render

SPACE = "\u2581"  # SentencePiece's stand-in
PROBE = "quokka"
_GIVE_GGUF = "Convert the model to GGUF, and give that as --target."


class HfTokenizer:
    """A `ChatVocabulary` of a directory.  Only its own files are read, and no code in it is run.

    control   ids of tokens that print nothing
    ends      ids that end an answer: the tokenizer's EOS and those of config.json and generation_config.json
    bos       id of the begin-of-text token, -1 if there is none
    """

    def __init__(self, path: Path) -> None:
        """FileError without a chat template, without a fast tokenizer, and for one that cannot be used as the model's
        GGUF is: its tokens' bytes are unknown, or it puts more than a BOS around a text."""
        self.path = path
        self._tokenizer = _load(path)
        self._check_template()
        added = self._tokenizer.added_tokens_decoder
        self._added = {int(token): str(entry.content) for token, entry in added.items()}
        self.control = {int(token) for token, entry in added.items() if entry.special}
        self._byte_level = self._is_byte_level()
        self._pieces: dict[int, bytes] = {}
        bos = self._tokenizer.bos_token_id
        self.bos = -1 if bos is None else int(bos)
        self.adds_bos = self._find_bos()
        self.ends = self._find_ends()

    @property
    def unskippable(self) -> list[int]:
        """Control tokens and end tokens."""
        return sorted(self.control | self.ends)

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        ids = self._encode(text, False)
        return [self.bos, *ids] if add_special and self.adds_bos else ids

    def piece(self, token: int) -> bytes:
        if token not in self._pieces:
            self._pieces[token] = b"" if token in self.control else self._bytes(token)
        return self._pieces[token]

    def is_end(self, token: int) -> bool:
        return token in self.ends

    def chat_text(self, messages: Sequence[dict[str, str]]) -> str:
        tokenizer = self._tokenizer
        variables = {
            **tokenizer.special_tokens_map,
            **dict.fromkeys(("tools", "documents")),  # transformers: there are none
            "messages": list(messages),
            "add_generation_prompt": True,
        }
        return render(self.path.name, tokenizer.get_chat_template(), variables)

    def rendered_ids(self, text: str) -> list[int]:
        bos = self._tokenizer.bos_token if self.adds_bos else None
        return self.tokenize(text, add_special=not (bos and text.startswith(bos)))

    # ---- what the files say ----

    def _encode(self, text: str, special: bool) -> list[int]:
        made = self._tokenizer(text, add_special_tokens=special, return_attention_mask=False, verbose=False)
        return [int(token) for token in made["input_ids"]]

    def _check_template(self) -> None:
        template = self._tokenizer.chat_template
        if not template or (isinstance(template, dict) and not template.get("default")):
            raise FileError(
                f"{self.path}: expected a chat template (chat_template.jinja, or in tokenizer_config.json), got none.",
                "A drafter is trained on chats as the template renders them: take the instruction-tuned model.",
            )

    def _is_byte_level(self) -> bool:
        """How tokens are spelt: GPT-2's letters for bytes, or else SentencePiece's."""
        decoder = self._tokenizer.backend_tokenizer.decoder
        parts = list(_parts(json.loads(decoder.__getstate__()))) if decoder else []
        kinds = {part["type"] for part in parts}
        if "ByteLevel" in kinds:
            return True
        if "Metaspace" in kinds or any((part.get("pattern") or {}).get("String") == SPACE for part in parts):
            return False
        found = ", ".join(sorted(kinds)) or "none"
        raise FileError(
            f"{self.path}: expected a tokenizer of bytes or of SentencePiece's pieces, got the decoder {found}.",
            _GIVE_GGUF,
        )

    def _bytes(self, token: int) -> bytes:
        text = self._added.get(token) or self._tokenizer.backend_tokenizer.id_to_token(token) or ""
        if self._byte_level:
            return text.encode() if token in self._added else bytes(_BYTES[letter] for letter in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace(SPACE, " ").encode()

    def _find_bos(self) -> bool:
        """Whether a text gets a BOS in front."""
        plain, whole = self._encode(PROBE, False), self._encode(PROBE, True)
        if whole == plain:
            return False
        if self.bos >= 0 and whole == [self.bos, *plain]:
            return True
        raise FileError(
            f"{self.path}: expected a tokenizer that puts at most a BOS in front of a text, got the tokens {whole}"
            f" instead of {plain}.",
            _GIVE_GGUF,
        )

    def _find_ends(self) -> set[int]:
        ends = set() if self._tokenizer.eos_token_id is None else {int(self._tokenizer.eos_token_id)}
        for name in ("config.json", "generation_config.json"):
            if (self.path / name).is_file():
                ends |= self._stated_ends(name)
        if not ends:
            raise FileError(
                f"{self.path}: expected an end token (eos_token_id), got none.", "Add it to generation_config.json."
            )
        return ends

    def _stated_ends(self, name: str) -> set[int]:
        """What a file says of eos_token_id: a token, or a list."""
        stated = _merged(read_json(self.path / name)).get("eos_token_id")
        ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
        for token in ids:
            if type(token) is not int or not 0 <= token < len(self._tokenizer):
                most = len(self._tokenizer) - 1
                raise FileError(f"{self.path / name}: expected eos_token_id from 0 to {most}, got {token!r}.")
        return set(ids)


def _load(path: Path) -> Any:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer makes transformers raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise FileError(f"{path}: transformers cannot load its tokenizer: {reason}.", _GIVE_GGUF) from error
    if not tokenizer.is_fast:
        raise FileError(
            f"{path}: expected a fast tokenizer (tokenizer.json), got {type(tokenizer).__name__}.", _GIVE_GGUF
        )
    return tokenizer


def _parts(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The decoders that a decoder consists of."""
    if decoder["type"] != "Sequence":
        yield decoder
    for part in decoder.get("decoders", ()):
        yield from _parts(part)


def _merged(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the keys of its text_config on top."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _byte_letters() -> dict[str, int]:
    """GPT-2's printable letter for each byte -> the byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()
