"""Keys of the text and how it becomes ids. Import them from ``titanyaml.config.schema``."""

from __future__ import annotations

from dataclasses import dataclass

from titanyaml.config.keys import MISSING, key

_SOURCE = "stdlib: the Python standard library's sources; files; hf: a Hugging Face dataset; synthetic: random tokens"
_TEXT = ("kind", ["stdlib", "files", "hf"])
_TRAINED, _FILE = ("kind", ["sentencepiece"]), ("kind", ["sentencepiece", "hf"])


@dataclass
class Data:
    """Where text comes from."""

    kind: str = key(MISSING, _SOURCE, choices=["stdlib", "files", "hf", "synthetic"])
    paths: list[str] = key([], "text, .jsonl or .parquet files, folders or globs", when=("kind", ["files"]))
    max_files: int | None = key(None, "use only the first files; null: all", low=1, when=("kind", ["stdlib", "files"]))
    dataset: str | None = key(None, "dataset name on the hub, or a local folder of it", when=("kind", ["hf"]))
    subset: str | None = key(None, "configuration name of the dataset", when=("kind", ["hf"]))
    split: str = key("train", "split that is trained on", when=("kind", ["hf"]))
    validation_split: str | None = key(None, "split for validation; null: held out of split", when=("kind", ["hf"]))
    streaming: bool = key(False, "read the dataset as a stream, in its own order", when=("kind", ["hf"]))
    revision: str | None = key(None, "git revision of the dataset", when=("kind", ["hf"]))
    text_field: str = key("text", "field that holds the text", when=("kind", ["files", "hf"]))
    validation_fraction: float = key(
        0.02, "share of documents held out for validation, by a hash of their index", low=0, below=1, when=_TEXT
    )
    shuffle: bool = key(True, "permute the samples anew in every epoch; a stream has its own order and needs false")
    # free: how far the loader reads ahead is not part of its position
    prefetch: int = key(2, "batches prepared ahead by the loader's thread; 0: none", low=0, resume="free")
    cache_dir: str = key(
        "${oc.env:TITANYAML_CACHE,.cache/titanyaml}", "folder of tokenised corpora and tokenizers", resume="free"
    )


@dataclass
class TokenizerConfig:
    """How text becomes token ids."""

    kind: str = key(MISSING, "bytes, sentencepiece, or hf (a tokenizer.json)", choices=["bytes", "sentencepiece", "hf"])
    path: str | None = key(
        None, "a .model or tokenizer.json; null (sentencepiece only): trained on the corpus, then cached", when=_FILE
    )
    vocab_size: int | None = key(None, "trained vocabulary (ids); null: as the file says", low=8, when=_TRAINED)
    model_type: str = key("bpe", "sentencepiece algorithm", choices=["bpe", "unigram"], when=_TRAINED)
    train_bytes: int = key(8_000_000, "text read to train the vocabulary (bytes)", low=1000, when=_TRAINED)
    eos_token: str | None = key(None, "token that ends a document; null: as the file says", when=_FILE)
