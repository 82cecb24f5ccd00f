"""Cross-entropy over a large vocabulary, computed in chunks of tokens so that the logits never exist as a whole."""

from titanyaml.loss.cross_entropy import IGNORE_INDEX as IGNORE_INDEX
from titanyaml.loss.cross_entropy import CrossEntropy as CrossEntropy
from titanyaml.loss.cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from titanyaml.loss.torch_chunks import chunk_loss as chunk_loss
