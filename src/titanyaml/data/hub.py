"""Hugging Face datasets, by name or from a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanyaml.config import schema
from titanyaml.data.files import Document, text_of
from titanyaml.errors import DataError, TitanError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_BATCH_ROWS = 256


def local_folder(dataset: str) -> Path | None:
    """The folder that ``data.dataset`` names; None where it is a name on the hub."""
    path = Path(dataset).expanduser()
    return path if path.is_dir() else None


def folder_files(folder: Path) -> list[Path]:
    """All files below the folder that are not hidden, sorted; DataError if there are none."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    if not files:
        raise DataError(f"{folder} holds no files", key="data.dataset")
    return files


def rows(spec: schema.Data, split: str, *, skip: int = 0) -> Iterator[Document]:
    """Documents of a split from row ``skip`` on, in the dataset's own order; DataError if it cannot be read."""
    name = f"{spec.dataset}[{split}]"
    dataset = _load(spec, split)
    row = skip
    try:
        # one column: others may be images, which would be decoded
        if spec.text_field in (dataset.column_names or ()):
            dataset = dataset.select_columns([spec.text_field])
        for batch in (dataset.skip(skip) if skip else dataset).iter(batch_size=_BATCH_ROWS):
            if spec.text_field not in batch:
                text_of(batch, spec.text_field, name)  # raises, with the fields that there are
            for text in batch[spec.text_field]:
                document = f"{name} row {row}"
                yield Document(document, text_of({spec.text_field: text}, spec.text_field, document))
                row += 1
    except TitanError:
        raise
    except Exception as error:  # whatever the library's readers, decoders and HTTP client raise
        raise DataError(f"{name}: reading failed at row {row}: {_words(error)}", key="data.dataset") from error


def _load(spec: schema.Data, split: str) -> Dataset | IterableDataset:
    import datasets

    assert spec.dataset is not None  # open_source refuses a missing name
    folder = local_folder(spec.dataset)
    try:
        # what save_to_disk wrote; load_dataset would read its Arrow files without their splits
        if folder and ((folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()):
            return _saved_split(datasets.load_from_disk(str(folder)), spec, split)
        options: dict[str, Any] = {"split": split, "revision": spec.revision, "streaming": spec.streaming}
        return datasets.load_dataset(str(folder or spec.dataset), spec.subset, **options)
    except TitanError:
        raise
    except Exception as error:  # dozens of kinds, from a missing split to a failed download
        message = f"cannot load {spec.dataset}[{split}]: {_words(error)}"
        hint = "one start with network, or data.dataset=/local/folder"
        raise DataError(message, key="data.dataset", hint=hint) from error


def _saved_split(saved: Any, spec: schema.Data, split: str) -> Dataset | IterableDataset:
    """A split of what save_to_disk wrote: one split, or a dictionary of them."""
    if isinstance(saved, dict):
        if split not in saved:
            message = f"{spec.dataset} has no split {split!r}; it has: {', '.join(saved)}"
            raise DataError(message, key="data.split", hint="one of these")
        saved = saved[split]
    elif split != (only := str(saved.split or "train")):
        raise DataError(f"{spec.dataset} holds only the split {only!r}, not {split!r}", key="data.split")
    return saved.to_iterable_dataset() if spec.streaming else saved


def _words(error: BaseException) -> str:
    """The error and its causes: the outermost often says no more than that something failed."""
    words = f"{type(error).__name__}: {error}"
    return f"{words} ({_words(error.__cause__)})" if error.__cause__ else words
