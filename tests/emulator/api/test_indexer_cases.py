"""The cases of indexer_k_quant_and_cache, on emulated device arrays."""

from tests.cpu.test_indexer import *  # noqa: F403
