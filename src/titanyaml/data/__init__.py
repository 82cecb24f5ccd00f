"""Text to batches: sources, the tokenised corpus, packing, the global sample order.

Nothing here but ``loader`` imports torch.
"""

from titanyaml.data.build import build, build_tokenizer, corpus_key, ensure
from titanyaml.data.sources import documents

__all__ = ["build", "build_tokenizer", "corpus_key", "documents", "ensure"]
