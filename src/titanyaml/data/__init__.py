"""Text to batches: sources, the tokenised corpus, packing, the global sample order.

Nothing here but ``loader`` imports torch.
"""

from titanyaml.data.sources import documents
from titanyaml.data.training_data import build, build_tokenizer

__all__ = ["build", "build_tokenizer", "documents"]
