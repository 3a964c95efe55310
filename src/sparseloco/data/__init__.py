"""Text in, windows of tokens out: corpus, tokenizer, cache, and a sampler whose every position is computable.

Knows nothing of models, replicas or transports.
"""

from sparseloco.data.cache import default_cache_dir, open_entry, prepare, read_manifest
from sparseloco.data.corpus import Corpus, load_corpus, split_documents
from sparseloco.data.describe import describe_dataset
from sparseloco.data.documents import Document
from sparseloco.data.load import find_dataset, open_dataset, vocabulary_size
from sparseloco.data.mixture import MixedSampler, TrainSampler, train_sampler
from sparseloco.data.sampler import Sampler, evaluation_batches, permute
from sparseloco.data.tokenizer import GivenTokenizer, open_tokenizer
from sparseloco.data.tokens import (
    END_TOKEN,
    END_TOKEN_ID,
    SPLITS,
    Dataset,
    Progress,
    SourceTokens,
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
    "GivenTokenizer",
    "MixedSampler",
    "Progress",
    "Sampler",
    "SourceTokens",
    "TokenSplit",
    "TrainSampler",
    "check_vocabulary",
    "check_windows",
    "default_cache_dir",
    "describe_dataset",
    "evaluation_batches",
    "find_dataset",
    "load_corpus",
    "open_dataset",
    "open_entry",
    "open_tokenizer",
    "permute",
    "prepare",
    "read_manifest",
    "split_documents",
    "train_sampler",
    "vocabulary_size",
]
