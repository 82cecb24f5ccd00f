"""A tokenizer.json, read by the ``tokenizers`` library."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from titanyaml.errors import DataError

# Tried in this order where no file beside tokenizer.json says which token ends a document.
_COMMON_EOS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
_COMMON_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]")


class HfTokenizer:
    """Wraps ``tokenizers.Tokenizer``, with the file's padding, truncation and special tokens switched off.

    Args:
        path: a tokenizer.json or its folder.
        eos_token: the token that ends a document; None: as tokenizer_config.json or special_tokens_map.json say, else
            the first of the common names that the vocabulary has.
    """

    def __init__(self, path: Path, *, eos_token: str | None = None) -> None:
        from tokenizers import Tokenizer as RawTokenizer

        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = path.read_bytes()
        except OSError as error:
            hint = "a tokenizer.json or its folder"
            raise DataError(f"cannot read {path}: {error.strerror}", key="tokenizer.path", hint=hint) from error
        try:
            self._tokenizer = RawTokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path} is not a tokenizer.json: {error}", key="tokenizer.path") from error
        # published files often have both set, which would cut documents or fill them up
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # "<|endoftext|>" spelled out in a document is text, not the end of it
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        # ids may have gaps, so the count of tokens is no bound on them
        self.vocab_size = max(vocabulary.values()) + 1
        eos_token = eos_token or _declared(path.parent, "eos_token") or _first(_COMMON_EOS, vocabulary)
        if eos_token not in vocabulary:
            problem = f"has no token {eos_token!r}" if eos_token else "does not say which token ends a document"
            hint = "tokenizer.eos_token=<one of its tokens>"
            raise DataError(f"{path} {problem}", key="tokenizer.eos_token", hint=hint)
        bos_token = _declared(path.parent, "bos_token") or _first(_COMMON_BOS, vocabulary)
        self.eos_id = vocabulary[eos_token]
        self.bos_id = None if bos_token is None else vocabulary.get(bos_token)
        # the id of the separator is part of every corpus, and not always decided by the file
        self.fingerprint = hashlib.sha256(content + f"\0{self.eos_id}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # the fast call leaves out offsets, which nothing here reads
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _declared(folder: Path, name: str) -> str | None:
    """A special token as the files that Hugging Face writes beside tokenizer.json name it."""
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        if not file.is_file():
            continue
        try:
            token = json.loads(file.read_text(encoding="utf-8")).get(name)
        except (ValueError, AttributeError) as error:
            raise DataError(f"{file} is not a JSON object: {error}", key="tokenizer.path") from error
        token = token.get("content") if isinstance(token, dict) else token  # a plain string, or an AddedToken
        if token:
            return str(token)
    return None


def _first(names: tuple[str, ...], vocabulary: dict[str, int]) -> str | None:
    return next((name for name in names if name in vocabulary), None)
