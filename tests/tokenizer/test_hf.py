"""tokenizer.json files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tokenizer.conftest import WEIRD
from titanyaml.errors import DataError
from titanyaml.tokenizer.hf import HfTokenizer


@pytest.mark.parametrize("text", WEIRD)
def test_round_trip(hf_file: Path, text: str) -> None:
    tokenizer = HfTokenizer(hf_file)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text]) == [tokenizer.encode(text)]


def test_the_files_truncation_and_padding_are_off(hf_file: Path) -> None:
    tokenizer = HfTokenizer(hf_file)
    assert len(tokenizer.encode("qzx" * 20)) > 16
    assert len(tokenizer.encode("q")) == 1


def test_a_special_token_spelled_out_is_text(hf_file: Path) -> None:
    tokenizer = HfTokenizer(hf_file)
    assert tokenizer.eos_id not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode([tokenizer.eos_id]) == ""


def test_the_end_token_comes_from_the_key_then_the_file_then_the_common_names(hf_file: Path) -> None:
    assert HfTokenizer(hf_file).eos_id == 1
    assert HfTokenizer(hf_file.parent, eos_token="a").eos_id != 1
    (hf_file.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<pad>"}}))
    declared = HfTokenizer(hf_file.parent)
    assert declared.eos_id == 0
    assert declared.fingerprint != HfTokenizer(hf_file.parent, eos_token="<|endoftext|>").fingerprint


def test_ids_with_gaps_count_up_to_the_largest(hf_file: Path) -> None:
    content = json.loads(hf_file.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 5000, "content": "<far>"})
    content["model"]["vocab"]["<far>"] = 5000
    hf_file.write_text(json.dumps(content))
    assert HfTokenizer(hf_file).vocab_size == 5001


def test_errors(hf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        HfTokenizer(tmp_path / "missing.json")
    with pytest.raises(DataError, match="no token '<nothing>'"):
        HfTokenizer(hf_file, eos_token="<nothing>")
    hf_file.write_text(hf_file.read_text().replace("<|endoftext|>", "<|unheard|>"))
    with pytest.raises(DataError, match="does not say which token ends") as caught:
        HfTokenizer(hf_file)
    assert caught.value.key == "tokenizer.eos_token"
    hf_file.write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer.json"):
        HfTokenizer(hf_file)
