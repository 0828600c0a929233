"""The Qwen3.5 text model, dense and mixture of experts, on the kernels it is given."""

from qwen35.model.batch import Batch
from qwen35.model.config import TextConfig, read_config
from qwen35.model.generate import GenerateOptions, Generation, generate
from qwen35.model.loader import load_model
from qwen35.model.model import Model
from qwen35.model.parallel import TensorParallel
from qwen35.model.pools import Pools
from qwen35.model.sampling import Sampling
from qwen35.model.session import Session
from qwen35.model.tokenizer import Tokenizer
from qwen35.model.weights import WeightSpec, weight_table

__all__ = [
    "Batch", "GenerateOptions", "Generation", "Model", "Pools", "Sampling", "Session", "TensorParallel", "TextConfig",
    "Tokenizer", "WeightSpec", "generate", "load_model", "read_config", "weight_table",
]  # fmt: skip
