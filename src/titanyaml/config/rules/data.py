"""Rules on text and its tokenizer, and on optional packages."""

from importlib.util import find_spec
from typing import Any

from titanyaml.config.rules.hints import with_resets
from titanyaml.config.rules.view import RuleTable, problem
from titanyaml.errors import Problem

rule = RuleTable()

#: Ids of tokenizer=bytes: 256 bytes, begin and end.
BYTE_VOCABULARY = 258
#: The least that sentencepiece can train: 256 bytes, 3 special tokens and one character of the corpus.
_SMALLEST_VOCABULARY = 260

#: Optional packages, looked up without importing them: (key, value that needs it, package, what to type instead).
PACKAGES = (
    ("tracker.kind", "aim", "aim", "tracker=none"),
    ("data.kind", "hf", "datasets", "data=stdlib"),
    ("tokenizer.kind", "sentencepiece", "sentencepiece", "tokenizer=bytes"),
    ("tokenizer.kind", "hf", "tokenizers", "tokenizer=bytes"),
)


@rule("tokenizer", "model.vocab_size")
def tokenizer_fits_vocab_size(c: Any) -> Problem | None:
    kind, rows = c.tokenizer.kind, c.model.vocab_size
    size = BYTE_VOCABULARY if kind == "bytes" else c.tokenizer.vocab_size
    if kind == "hf" or size is None or size <= rows:  # the size of a file is compared when it is read
        return None
    can_shrink = kind == "sentencepiece" and rows >= _SMALLEST_VOCABULARY
    fixes = (f"model.vocab_size={size}", f"tokenizer.vocab_size={rows}" if can_shrink else "")
    return problem(
        "model.vocab_size", f"is {rows}, fewer than the {size} ids of tokenizer={kind}", f">= {size}", *fixes
    )


@rule("tokenizer")
def trained_tokenizer_needs_vocab_size(c: Any) -> Problem | None:
    if c.tokenizer.kind != "sentencepiece" or c.tokenizer.path is not None:
        return None
    size = c.tokenizer.vocab_size
    if size is not None and size >= _SMALLEST_VOCABULARY:
        return None
    contents = "256 bytes, 3 special tokens and the corpus's characters"
    message = f"is {'null' if size is None else size}: a vocabulary that is trained holds {contents}"
    fixes = ("tokenizer.vocab_size=4096", "tokenizer.path=<file.model>")
    return problem("tokenizer.vocab_size", message, f">= {_SMALLEST_VOCABULARY}", *fixes)


@rule("tokenizer")
def hf_tokenizer_needs_a_file(c: Any) -> Problem | None:
    if c.tokenizer.kind != "hf" or c.tokenizer.path is not None:
        return None
    fixes = ("tokenizer.path=<tokenizer.json>", "tokenizer=bytes")
    return problem("tokenizer.path", "is null: tokenizer=hf reads a file", "path of a tokenizer.json", *fixes)


def _use_stdlib(c: Any) -> str:
    return with_resets(c, "data=stdlib", kind="stdlib")


@rule("data")
def files_data_needs_paths(c: Any) -> Problem | None:
    if c.data.kind != "files" or c.data.paths:
        return None
    fixes = ("'data.paths=[corpus/*.jsonl]'", _use_stdlib(c))
    return problem("data.paths", "is empty: data=files reads files", "files, folders or globs", *fixes)


@rule("data")
def hf_data_needs_a_name(c: Any) -> Problem | None:
    if c.data.kind != "hf" or c.data.dataset is not None:
        return None
    fixes = ("data.dataset=<name>", _use_stdlib(c))
    return problem("data.dataset", "is null: data=hf reads a dataset", "a name on the hub, or a folder", *fixes)


@rule("data.streaming", "data.shuffle")
def streaming_excludes_shuffle(c: Any) -> Problem | None:
    if c.data.kind != "hf" or not (c.data.streaming and c.data.shuffle):
        return None
    message = "is true, but a stream is read in its own order (data.streaming=true)"
    fixes = ("data.shuffle=false", "data.streaming=false")
    return problem("data.shuffle", message, "false with data.streaming=true", *fixes)


def _add_package_rule(key: str, value: str, package: str, instead: str) -> None:
    section, name = key.split(".")

    def check(c: Any) -> Problem | None:
        if getattr(getattr(c, section), name) != value or find_spec(package) is not None:
            return None
        message = f"is {value}, which needs the package {package!r}; it is not installed"
        alternative = with_resets(c, instead, **{name: instead.partition("=")[2]})
        return problem(key, message, "", f"pip install {package}", alternative)

    check.__name__ = f"{package}_is_installed"
    rule(key)(check)


for _row in PACKAGES:
    _add_package_rule(*_row)
