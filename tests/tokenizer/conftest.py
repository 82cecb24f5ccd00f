"""Text that breaks tokenizers, and a small vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from titanyaml import tokenizer as tokenizers
from titanyaml.config import schema
from titanyaml.tokenizer import Tokenizer

WEIRD = (
    "",
    " ",
    "\tif x:\n\t\treturn  1\n",
    "    four spaces\n        eight   and   more   \n",
    "  leading and trailing  ",
    "line\r\nline\rline\n\n\n",
    "nul \0 and \x00\x01\x1b[0m",
    "\ufeffbom \u00a0 no-break \u2028 separator \u3000",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 flag \U0001f1e9\U0001f1ea",
    "\u00e9 and e\u0301, \ufb01 ligature, \u00bd, \u6f22\u5b57",
    "\u2581 the space mark \u2581\u2581 of sentencepiece\u2581",
    "<s></s><unk><0x41><|endoftext|>",
)


def small_corpus() -> Iterator[str]:
    """About 20 kB that look like code."""
    for number in range(120):
        yield f"def f_{number}(self, value):\n    if value > {number}:\n        return value\n\n\treturn None\r\n"


def build(spec: schema.TokenizerConfig, **options: Any) -> Tokenizer:
    """``titanyaml.tokenizer.build`` with a key for the corpus."""
    return tokenizers.build(spec, **({"corpus_key": lambda: "corpus"} | options))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A sentencepiece vocabulary of 400 trained on ``small_corpus``."""
    spec = schema.TokenizerConfig(kind="sentencepiece", vocab_size=400)
    return build(spec, corpus=small_corpus, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def no_corpus() -> Callable[[], Iterator[str]]:
    """A corpus that must not be read."""

    def corpus() -> Iterator[str]:
        raise AssertionError("the corpus was read")

    return corpus


@pytest.fixture
def hf_file(tmp_path: Path) -> Path:
    """A byte-level BPE tokenizer.json with truncation and padding set, as published files often have."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers, trainers

    raw = Raw(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(small_corpus(), trainer)
    raw.enable_truncation(max_length=4)
    raw.enable_padding(length=16)
    raw.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"
