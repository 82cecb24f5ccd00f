"""From the configuration to documents: what they are, their fingerprint, and which are held out."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanyaml.config import schema
from titanyaml.data import files, hub
from titanyaml.data.files import Document, content_hashes
from titanyaml.data.order import empty_split, holdout_hash, holdout_limit
from titanyaml.errors import ConfigError

log = logging.getLogger("titanyaml.data")


@dataclass(frozen=True)
class Source:
    """All documents of a corpus, before anything is held out.

    Args:
        title: its name in messages. identity: JSON-able; equal identities mean equal documents in equal order.
        read: gives the documents from the start.
        manifest: file name to "size sha256", for the difference between two corpora.
        fraction: share of documents held out for validation; None: the source is one split by itself.
    """

    title: str
    identity: dict[str, Any]
    read: Callable[[], Iterator[Document]]
    manifest: dict[str, str] = field(default_factory=dict)
    fraction: float | None = None

    @property
    def fingerprint(self) -> str:
        content = json.dumps([self.identity, self.manifest], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    @property
    def total_bytes(self) -> int:
        """Size of the files (0: unknown)."""
        return sum(int(entry.split()[0]) for entry in self.manifest.values())

    def documents(self) -> Iterator[Document]:
        num_empty = 0
        for document in self.read():
            if document.text:
                yield document
            else:
                num_empty += 1
        if num_empty:
            log.info("%s: %d empty documents left out", self.title, num_empty)


def open_source(spec: schema.Data, split: str) -> Source:
    """The source that a split is read from; ConfigError if a key is missing, DataError if files are."""
    assert split in ("train", "validation")
    if spec.kind == "stdlib":
        paths = files.stdlib_files()[: spec.max_files]
        return _file_source("the standard library", spec, paths, {"kind": "stdlib"}, lambda: files.read_stdlib(paths))
    if spec.kind == "files":
        paths = files.find(spec.paths)[: spec.max_files]
        identity = {"kind": "files", "text_field": spec.text_field}

        def read_files() -> Iterator[Document]:
            return (document for path in paths for document in files.read(path, text_field=spec.text_field))

        return _file_source(f"{len(paths)} file(s)", spec, paths, identity, read_files)
    if spec.kind == "hf":
        return _hub_source(spec, split)
    hint = "data=stdlib, or tokenizer=bytes which needs none"
    raise ConfigError(f"data.kind={spec.kind} holds no text", key="data.kind", hint=hint)


def _file_source(
    title: str, spec: schema.Data, paths: list[Path], identity: dict[str, Any], read: Callable[[], Iterator[Document]]
) -> Source:
    manifest = content_hashes(paths, cache_dir=Path(spec.cache_dir))
    # the fingerprint sorts the manifest, but documents in another order are another corpus
    order = hashlib.sha256("\0".join(manifest).encode()).hexdigest()[:16]
    return Source(title, identity | {"order": order}, read, manifest, spec.validation_fraction)


def _hub_source(spec: schema.Data, split: str) -> Source:
    if not spec.dataset:
        raise ConfigError("no dataset is named", key="data.dataset", hint="data.dataset=allenai/c4 or a local folder")
    hub_split = spec.validation_split if spec.validation_split is not None and split == "validation" else spec.split
    folder = hub.local_folder(spec.dataset)
    identity = {"kind": "hf", "dataset": "" if folder else spec.dataset, "subset": spec.subset, "split": hub_split}
    identity |= {"revision": spec.revision, "text_field": spec.text_field}
    manifest: dict[str, str] = {}
    if folder and not spec.streaming:
        # known by content, so that the folder may move; a stream is never read whole and goes by its path
        manifest = content_hashes(hub.folder_files(folder), cache_dir=Path(spec.cache_dir))
    elif folder:
        identity["dataset"] = str(folder)
    elif spec.revision is None:
        log.info("data.revision is null: a change of %s on the hub will not be noticed", spec.dataset)
    fraction = spec.validation_fraction if spec.validation_split is None else None  # that split is held out already
    return Source(f"{spec.dataset}[{hub_split}]", identity, lambda: hub.rows(spec, hub_split), manifest, fraction)


def documents(spec: schema.Data, split: str) -> Iterator[str]:
    """Texts of one split ("train" or "validation"), for training a vocabulary. No document is in both.

    They come in the source's order, except for candidates that were kept back. DataError: the split is empty.
    """
    source = open_source(spec, split)
    if source.fraction is None:
        yield from (document.text for document in source.documents())
        return
    texts = _split_texts(source, source.fraction, split)
    if (first := next(texts, None)) is None:
        raise empty_split(source.title, source.fraction, split)
    yield first
    yield from texts


def _split_texts(source: Source, fraction: float, split: str) -> Iterator[str]:
    """The same choice as ``order.split_documents``, in one pass and without knowing how many documents come."""
    limit = holdout_limit(fraction)
    smallest, kept_back = 1 << 64, ""
    for index, document in enumerate(source.documents()):
        value, text = holdout_hash(index), document.text
        if value < limit:
            if split == "validation":
                yield text
            elif smallest >= limit and kept_back:
                yield kept_back
            smallest = 0  # one is held out: from here on no candidate is needed
        elif value < smallest and limit > 0:
            # as long as none is held out, the document with the smallest hash may turn out to be: it is kept back
            if kept_back and split == "train":
                yield kept_back
            smallest, kept_back = value, text
        elif split == "train":
            yield text
    if split == "validation" and smallest >= limit and kept_back:
        yield kept_back


def difference(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """What changed between two manifests, a line per file."""
    lines = [f"removed {name}" for name in old if name not in new]
    lines += [f"added {name}" for name in new if name not in old]
    lines += [f"changed {name}" for name in new if name in old and old[name] != new[name]]
    return lines
