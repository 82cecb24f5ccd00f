"""Text to token ids: bytes, sentencepiece (given or trained on the corpus) and Hugging Face tokenizer.json."""

from titanyaml.tokenizer.factory import build
from titanyaml.tokenizer.protocol import Tokenizer

__all__ = ["Tokenizer", "build"]
