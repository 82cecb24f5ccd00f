"""Documents in files (plain text, JSON lines, Parquet, the Python standard library), and fingerprints of the files."""

import glob
import gzip
import hashlib
import io
import json
import logging
import os
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from titanyaml.errors import DataError
from titanyaml.rundir import atomic_write

log = logging.getLogger("titanyaml.data")

# other files of a folder are seldom meant: pictures, licences, lock files
FOLDER_SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz", ".parquet")
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
# smaller files are read and hashed at every start; the hash of a larger one is remembered
_REMEMBER_BYTES = 1 << 20


class Document(NamedTuple):
    """A text, and its name in errors (file, file:line, or file row N)."""

    name: str
    text: str


def find(patterns: Sequence[str]) -> list[Path]:
    """Files behind files, folders and globs: sorted within a pattern, patterns in the order given, none twice.

    A folder gives its .txt, .md, .jsonl, .jsonl.gz and .parquet files at any depth. A glob or a file is taken as named:
    an unknown suffix is text. DataError: no pattern, or a pattern that matches no file.
    """
    if not patterns:
        raise DataError("no files are given", key="data.paths", hint="data.paths=[corpus.txt,more/,'logs/*.jsonl']")
    found_files: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            files = _folder_files(path)
        else:
            files = [path] if path.is_file() else [Path(p) for p in glob.glob(str(path), recursive=True)]
        # globs and folders list files in the order of the file system, which differs between machines
        files = sorted(file for file in files if file.is_file())
        if not files:
            raise DataError(f"{pattern} matches no file (in {Path.cwd()})", key="data.paths", hint="an existing path")
        found_files.update(dict.fromkeys(files))
    return list(found_files)


def _folder_files(path: Path) -> list[Path]:
    files = [file for file in path.rglob("*") if file.is_file()]
    documents = [file for file in files if file.name.endswith(FOLDER_SUFFIXES)]
    ignored = Counter(file.suffix or "no suffix" for file in files if not file.name.endswith(FOLDER_SUFFIXES))
    if ignored:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(ignored.items()))
        log.info("%s: %d other files are not read (%s); a glob would name them", path, ignored.total(), kinds)
    return documents


def read(path: Path, *, text_field: str) -> Iterator[Document]:
    """Documents of one file: each JSON line, each Parquet row, else the whole file; DataError if it cannot be read."""
    try:
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _json_lines(path, text_field)
        elif path.suffix == ".parquet":
            yield from _parquet(path, text_field)
        else:
            # bytes, decoded here: reading as text would turn \r\n into \n
            yield Document(str(path), _decode(path.read_bytes(), str(path)))
    except (OSError, EOFError) as error:  # EOFError: a gzip file that ends early
        raise DataError(f"cannot read {path}: {error}", key="data.paths") from error


def text_of(record: Any, field: str, name: str) -> str:
    """The text of a record. DataError: no such field, or it holds something that is not Unicode text."""
    if not isinstance(record, dict) or field not in record:
        fields, content = [], f"a {type(record).__name__}, no record"
        if isinstance(record, dict):
            fields, content = list(record), ", ".join(map(repr, record)) or "none"
        hint = f"data.text_field={fields[0]}" if fields else ""
        raise DataError(f"{name}: no field {field!r}; there is: {content}", key="data.text_field", hint=hint)
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{name}: field {field!r} is {type(text).__name__}, not text", key="data.text_field")
    try:
        text.encode("utf-8")  # JSON may spell half of a surrogate pair, on which tokenizers fail later
    except UnicodeEncodeError as error:
        raise DataError(f"{name}: a lone surrogate is not text ({error})", key="data") from error
    return text


def _json_lines(path: Path, field: str) -> Iterator[Document]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        for number, line in enumerate(file, 1):
            name = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(_decode(line, name))
            except ValueError as error:
                raise DataError(f"{name}: not JSON: {error}", key="data.paths") from error
            yield Document(name, text_of(record, field, name))


def _parquet(path: Path, field: str) -> Iterator[Document]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                text_of(dict.fromkeys(names), field, str(path))  # raises, with the fields that there are
            row = 0
            # small batches: a row group of long documents may not fit in memory as Python objects
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for text in batch.column(0).to_pylist():
                    name = f"{path} row {row}"
                    yield Document(name, text_of({field: text}, field, name))
                    row += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}", key="data.paths") from error


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text: {error}", key="data.paths") from error


def stdlib_files() -> list[Path]:
    """The .py files of the running Python's standard library with its tests, without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_STDLIB]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"no .py files below {root}", key="data.kind", hint="data=files data.paths=[...]")
    # ordered by a hash of the path: the first files are then like all others, so that a vocabulary trained on them
    # fits, and data.max_files takes a fair sample
    return sorted(files, key=lambda file: hashlib.sha256(file.relative_to(root).as_posix().encode()).digest())


def read_stdlib(files: Sequence[Path]) -> Iterator[Document]:
    """The sources, each in the encoding that it declares (PEP 263), line ends kept."""
    broken = []
    for file in files:
        try:
            content = file.read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
        except OSError as error:
            raise DataError(f"cannot read {file}: {error}", key="data.kind") from error
        except (SyntaxError, UnicodeDecodeError, LookupError):  # the test-suite has files that are broken on purpose
            broken.append(file.name)
            continue
        yield Document(str(file), text)
    if broken:
        log.info("skipped %d files that do not decode: %s", len(broken), ", ".join(broken[:8]))


def content_hashes(files: Sequence[Path], *, cache_dir: Path) -> dict[str, str]:
    """``{name: "size sha256"}`` of each file; the name is its path below the folder that holds them all."""
    # names below the common folder: the same files elsewhere have the same fingerprint
    root = Path(os.path.commonpath([file.absolute().parent for file in files]))
    memo_file = cache_dir / "file_hashes.json"
    try:
        memo: dict[str, str] = json.loads(memo_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        memo = {}  # without it the files are read again
    num_remembered = len(memo)
    hashes = {}
    for file in files:
        path = file.absolute()
        try:
            stat = path.stat()
            # mtime can be set back by a user after an edit, ctime cannot
            stamp = f"{path} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
            digest = memo.get(stamp)
            if digest is None:
                with path.open("rb") as opened:
                    digest = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"cannot read {file}: {error}", key="data.paths") from error
        if stat.st_size >= _REMEMBER_BYTES:
            memo[stamp] = digest
        hashes[path.relative_to(root).as_posix()] = f"{stat.st_size} {digest}"
    if len(memo) > num_remembered:
        _save(memo_file, memo)
    return hashes


def _save(path: Path, memo: dict[str, str]) -> None:
    try:
        # by rename, since several starts may share the cache: a lost update costs time, a torn file would too
        atomic_write(path, json.dumps(memo))
    except OSError as error:
        hint = "data.cache_dir=/a/writable/folder"
        raise DataError(f"cannot write {path}: {error}", key="data.cache_dir", hint=hint) from error
