"""Rules on text and its tokenizer, and on packages that a choice needs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from titanyaml.config.rules.hints import switch
from titanyaml.config.rules.view import Rule, into
from titanyaml.errors import Problem

SMALLEST_VOCABULARY = 260  # 256 bytes, 3 special tokens, and at least one character of the corpus

RULES: list[Rule] = []
rule = into(RULES)


BYTE_VOCABULARY = 258  # 256 bytes, begin, end


@rule("tokenizer", "model.vocab_size")
def vocabulary_fits_model(c: Any) -> Problem | None:
    """A file's own size is compared when it is read."""
    kind, rows = c.tokenizer.kind, c.model.vocab_size
    size = BYTE_VOCABULARY if kind == "bytes" else c.tokenizer.vocab_size
    if kind == "hf" or size is None or size <= rows:
        return None
    hints = [f"model.vocab_size={size}"]
    if kind == "sentencepiece" and rows >= SMALLEST_VOCABULARY:
        hints.append(f"tokenizer.vocab_size={rows}")
    return Problem(
        "model.vocab_size",
        f"is {rows}, fewer than the {size} ids of tokenizer={kind}",
        allowed=f">= {size}",
        hint=" or ".join(hints),
    )


@rule("tokenizer")
def trained_vocabulary_has_a_size(c: Any) -> Problem | None:
    if c.tokenizer.kind != "sentencepiece" or c.tokenizer.path is not None:
        return None
    size = c.tokenizer.vocab_size
    if size is not None and size >= SMALLEST_VOCABULARY:
        return None
    return Problem(
        "tokenizer.vocab_size",
        f"is {'null' if size is None else size}: a vocabulary that is trained holds "
        "256 bytes, 3 special tokens and the corpus's characters",
        allowed=f">= {SMALLEST_VOCABULARY}",
        hint="tokenizer.vocab_size=4096 or tokenizer.path=<file.model>",
    )


@rule("tokenizer")
def hf_tokenizer_has_a_file(c: Any) -> Problem | None:
    if c.tokenizer.kind != "hf" or c.tokenizer.path is not None:
        return None
    return Problem(
        "tokenizer.path",
        "is null: tokenizer=hf reads a file",
        allowed="path of a tokenizer.json",
        hint="tokenizer.path=<tokenizer.json> or tokenizer=bytes",
    )


@rule("data")
def files_have_paths(c: Any) -> Problem | None:
    if c.data.kind != "files" or c.data.paths:
        return None
    return Problem(
        "data.paths",
        "is empty: data=files reads files",
        allowed="files, folders or globs",
        hint="'data.paths=[corpus/*.jsonl]' or " + switch(c, "data=stdlib", kind="stdlib"),
    )


@rule("data")
def dataset_has_a_name(c: Any) -> Problem | None:
    if c.data.kind != "hf" or c.data.dataset is not None:
        return None
    return Problem(
        "data.dataset",
        "is null: data=hf reads a dataset",
        allowed="a name on the hub, or a folder",
        hint="data.dataset=<name> or " + switch(c, "data=stdlib", kind="stdlib"),
    )


@rule("data.streaming", "data.shuffle")
def stream_keeps_its_order(c: Any) -> Problem | None:
    if c.data.kind != "hf" or not (c.data.streaming and c.data.shuffle):
        return None
    return Problem(
        "data.shuffle",
        "is true, but a stream is read in its own order (data.streaming=true)",
        allowed="false with data.streaming=true",
        hint="data.shuffle=false or data.streaming=false",
    )


#: (key, value that needs the package, package, what to type instead).
PACKAGES = (
    ("tracker.kind", "aim", "aim", "tracker=none"),
    ("data.kind", "hf", "datasets", "data=stdlib"),
    ("tokenizer.kind", "sentencepiece", "sentencepiece", "tokenizer=bytes"),
    ("tokenizer.kind", "hf", "tokenizers", "tokenizer=bytes"),
)


def _package_rule(key: str, value: str, package: str, instead: str) -> None:
    section, name = key.split(".")

    def check(c: Any) -> Problem | None:
        if getattr(getattr(c, section), name) != value or find_spec(package) is not None:
            return None
        way = switch(c, instead, **{name: instead.partition("=")[2]})
        return Problem(
            key,
            f"is {value}, which needs the package {package!r}; it is not installed",
            hint=f"pip install {package} or {way}",
        )

    check.__name__ = f"{package}_is_installed"
    rule(key)(check)


for _row in PACKAGES:
    _package_rule(*_row)
