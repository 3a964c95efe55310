"""Text in, windows of tokens out: corpus, tokenizer, cache, and a sampler whose every position is computable.

Knows nothing of models, replicas or transports.
"""

from sparseloco.data.cache import default_cache_dir, prepare
from sparseloco.data.corpus import Corpus, Document, load_corpus, split_documents
from sparseloco.data.sampler import Sampler, evaluation_batches, permute
from sparseloco.data.tokens import (
    END_TOKEN,
    END_TOKEN_ID,
    SPLITS,
    Dataset,
    Progress,
    TokenSplit,
    check_vocabulary,
    check_windows,
)

__all__ = [
    "END_TOKEN",
    "END_TOKEN_ID",
    "SPLITS",
    "Corpus",
    "Dataset",
    "Document",
    "Progress",
    "Sampler",
    "TokenSplit",
    "check_vocabulary",
    "check_windows",
    "default_cache_dir",
    "evaluation_batches",
    "load_corpus",
    "permute",
    "prepare",
    "split_documents",
]
