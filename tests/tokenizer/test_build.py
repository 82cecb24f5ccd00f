"""Choosing the tokenizer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tokenizer.conftest import build
from titanyaml.config import schema
from titanyaml.errors import ConfigError


def test_bytes_and_hf(tmp_path: Path, hf_file: Path, no_corpus: Callable) -> None:
    assert build(schema.TokenizerConfig(kind="bytes"), corpus=no_corpus, cache_dir=tmp_path).vocab_size == 258
    spec = schema.TokenizerConfig(kind="hf", path=str(hf_file))
    assert build(spec, corpus=no_corpus, cache_dir=tmp_path).eos_id == 1


def test_hf_needs_a_path(tmp_path: Path, no_corpus: Callable) -> None:
    with pytest.raises(ConfigError, match="tokenizer.path"):
        build(schema.TokenizerConfig(kind="hf"), corpus=no_corpus, cache_dir=tmp_path)


def test_bytes_import_no_tokenizer_library() -> None:
    code = (
        "import sys, titanyaml.data, titanyaml.tokenizer\n"
        "print({'torch', 'sentencepiece', 'tokenizers', 'datasets', 'pyarrow'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
