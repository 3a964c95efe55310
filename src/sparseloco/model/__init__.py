"""Language models: a Llama from its numbers, or any causal language model that ``transformers`` knows.

``transformers`` is imported only when a model is built or read. Knows nothing of replicas or transports.
"""

from sparseloco.model.causal import causal_model, causal_specs
from sparseloco.model.folder import MODEL_FOLDER, export_model, find_model, load_model, load_tokenizer, save_model
from sparseloco.model.generate import Generated, generate
from sparseloco.model.llama import build_model, parameter_specs
from sparseloco.model.parts import next_token_loss, vocabulary_of
from sparseloco.model.run import build_run_model, check_tokens, known_by_content, located, tensor_table

__all__ = [
    "MODEL_FOLDER",
    "Generated",
    "build_model",
    "build_run_model",
    "causal_model",
    "causal_specs",
    "check_tokens",
    "export_model",
    "find_model",
    "generate",
    "known_by_content",
    "load_model",
    "load_tokenizer",
    "located",
    "next_token_loss",
    "parameter_specs",
    "save_model",
    "tensor_table",
    "vocabulary_of",
]
