"""The tokenised corpus on disk: one file of ids that every rank maps, made once."""

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanyaml.data.files import Document
from titanyaml.data.packing import check_ids
from titanyaml.data.sources import Source
from titanyaml.errors import DataError
from titanyaml.tokenizer import Tokenizer
from titanyaml.tokenizer.cache import build_once

log = logging.getLogger("titanyaml.data")

_VERSION = 1  # part of the cache key: to be raised with every change of the files' format or content
# one call of the tokenizer: enough text for all cores, little enough memory
_BATCH_CHARACTERS = 4_000_000
_BATCH_DOCUMENTS = 4096
_PROGRESS_S = 10.0


@dataclass(frozen=True)
class Corpus:
    """All documents of a source as ids, each followed by the end-of-document id.

    Args:
        key: name of its folder; depends on the documents and the tokenizer only.
        tokens: memory map, uint16 or uint32 [num_tokens].
        bounds: int64 [num_documents + 1]; document i is ``tokens[bounds[i]:bounds[i+1]]``.
        max_id, max_id_document: the largest id and the first document that has it.
    """

    key: str
    tokens: np.ndarray
    bounds: np.ndarray
    max_id: int
    max_id_document: str


def open_corpus(source: Source, tokenizer: Tokenizer, cache_dir: Path) -> Corpus:
    """The tokenised source, made now if the cache does not have it; safe for any number of processes at once."""
    # neither split nor sequence length: both are cut from one file, so a change of them tokenises nothing
    key = json.dumps([_VERSION, source.fingerprint, tokenizer.fingerprint])
    key = hashlib.sha256(key.encode()).hexdigest()[:32]
    folder = cache_dir / "corpora" / key
    build_once(folder, lambda new: _tokenise(source, tokenizer, new), what="the tokenised corpus")
    return _load(folder, key)


def manifest(cache_dir: Path, key: str) -> dict[str, str] | None:
    """The files that a corpus was made of (name to "size sha256"); None where the cache has no such corpus."""
    try:
        return dict(json.loads((cache_dir / "corpora" / key / "manifest.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _load(folder: Path, key: str) -> Corpus:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        dtype = np.dtype(meta["dtype"])
        size = (folder / "tokens.bin").stat().st_size
        if size != meta["num_tokens"] * dtype.itemsize:
            raise ValueError(f"tokens.bin has {size} bytes, not {meta['num_tokens'] * dtype.itemsize}")
        # mapped, so that all ranks of a host share one copy in the page cache
        tokens = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r")
        bounds = np.load(folder / "bounds.npy", mmap_mode="r")
        if len(bounds) != meta["num_documents"] + 1 or bounds[-1] != len(tokens):
            raise ValueError("bounds.npy does not fit tokens.bin")
        return Corpus(key, tokens, bounds, meta["max_id"], meta["max_id_document"])
    except (OSError, ValueError, KeyError) as error:
        message = f"the tokenised corpus in {folder} is damaged: {error}"
        raise DataError(message, key="data.cache_dir", hint=f"remove {folder}") from error


def _tokenise(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    # two bytes where they are enough: half the disk, and half the page cache
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size < 65536 else np.uint32)
    bounds, max_id, max_id_document = [0], -1, ""
    start = time.monotonic()
    with (folder / "tokens.bin").open("wb") as file:
        for batch in _log_progress(source, _batches(source.documents()), bounds):
            encoded = tokenizer.encode_batch([document.text for document in batch])
            for document, document_ids in zip(batch, encoded, strict=True):
                ids = np.array([*document_ids, tokenizer.eos_id], dtype=np.int64)
                # a tokenizer that breaks its own bound would wrap around in the cast below
                check_ids(ids, tokenizer.vocab_size, f"{document.name} (tokenizer's own size)")
                if ids.max() > max_id:
                    max_id, max_id_document = int(ids.max()), document.name
                file.write(ids.astype(dtype).tobytes())
                bounds.append(bounds[-1] + len(ids))
    if len(bounds) == 1:
        raise DataError(f"{source.title}: no document has any text", key="data")
    np.save(folder / "bounds.npy", np.array(bounds, dtype=np.int64))
    meta = {"dtype": dtype.name, "num_tokens": bounds[-1], "num_documents": len(bounds) - 1}
    meta |= {"max_id": max_id, "max_id_document": max_id_document}
    meta |= {"source": source.identity, "tokenizer": tokenizer.fingerprint}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps(source.manifest, indent=2), encoding="utf-8")
    result = (source.title, time.monotonic() - start, len(bounds) - 1, bounds[-1])
    log.info("tokenised %s in %.1f s: %d documents, %d tokens", *result)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    for first in documents:
        batch, size = [first], len(first.text)
        for document in itertools.islice(documents, _BATCH_DOCUMENTS - 1):
            batch.append(document)
            size += len(document.text)
            if size >= _BATCH_CHARACTERS:
                break
        yield batch


def _log_progress(source: Source, batches: Iterator[list[Document]], bounds: list[int]) -> Iterator[list[Document]]:
    """The batches, with a log line every ten seconds; ``bounds`` grows as their documents are tokenised."""
    start = logged_at = time.monotonic()
    megabytes = 0.0
    total = f" of about {source.total_bytes / 1e6:.0f}" if source.total_bytes else ""
    for batch in batches:
        yield batch
        megabytes += sum(len(document.text) for document in batch) / 1e6
        seconds = time.monotonic()
        if seconds - logged_at >= _PROGRESS_S:
            logged_at = seconds
            progress = (source.title, megabytes, total, bounds[-1] / 1e6, megabytes / (seconds - start))
            log.info("tokenising %s: %.0f%s MB, %.1f M tokens, %.1f MB/s", *progress)
