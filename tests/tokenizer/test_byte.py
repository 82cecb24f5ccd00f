"""One token a byte."""

from __future__ import annotations

import pytest

from tests.tokenizer.conftest import WEIRD
from titanyaml.tokenizer import ByteTokenizer


@pytest.mark.parametrize("text", WEIRD)
def test_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, "a"]) == [tokenizer.encode(text), [97]]


def test_special_tokens_have_no_text_and_lie_above_the_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (258, 256, 257)
    assert tokenizer.decode([256, 104, 105, 257]) == "hi"


def test_bytes_that_are_no_utf8_still_decode() -> None:
    assert ByteTokenizer().decode([104, 255]) == "h\ufffd"
