"""Arguments of the fused kernels, beside those of `params`.

Each begins with the addresses that differ from call to call, in the order in which launch code
gives them.
"""

from __future__ import annotations

from .params import _F32 as F32
from .params import _I32 as I32
from .params import _I64 as I64
from .params import _PTR as PTR
from .params import DIVISOR, LAYER_ENTRY, SLOT_ARRAY, SLOT_LIST_LAYERS, Struct
from .params import _packed as packed

_ROPE_TABLE = packed(
    ("stride", I64),
    ("rows", I64),
    ("type", I32),
    ("half", I32),
    ("step", I32),
    ("partner", I32),
)
_KEY_NORM = packed(
    ("weight_stride", I64),
    ("weight_type", I32),
    ("lora_rank", I32),
    ("eps", F32),
    ("staged", I32),
    ("rope", _ROPE_TABLE),
)
_CONTEXT_PARAMS = packed(
    ("kv", PTR),
    ("positions", PTR),
    ("slots", PTR),
    ("weight", PTR),
    ("table", PTR),
    ("kv_layer_stride", I64),
    ("kv_token_stride", I64),
    ("slot_layer_stride", I64),
    ("slot_token_stride", I64),
    ("layers", PTR),
    ("counters", PTR),
    ("errors", PTR),
    ("norm", _KEY_NORM),
    ("tokens", I32),
    ("slot_bytes", I32),
    ("position_bytes", I32),
    ("first_layer", I32),
    ("layers_are_mapped", I32),
    ("blocks_per_layer", DIVISOR.dtype),
    ("block_tokens", I32),
    ("use_slot_list", I32),
    ("collect_stats", I32),
    ("stream_stores", I32),
    ("slot_list", SLOT_ARRAY.dtype, (SLOT_LIST_LAYERS,)),
)
_INDEX_CACHE = packed(("codes", LAYER_ENTRY.dtype), ("scales", LAYER_ENTRY.dtype))
#: What a thread block of norm_rope does; the values of ``NormRopePart``.
QUERY_PART, KEY_PART, INDEX_PART, TOPK_PART = range(4)
_NORM_ROPE_PARAMS = packed(
    ("positions", PTR),
    ("q_c", PTR),
    ("kv_c", PTR),
    ("k_pe", PTR),
    ("index_k", PTR),
    ("topk", PTR),
    ("slots", PTR),
    ("index_slots", PTR),
    ("q_c_out", PTR),
    ("kv_c_out", PTR),
    ("k_pe_out", PTR),
    ("q_weight", PTR),
    ("kv_weight", PTR),
    ("k_table", PTR),
    ("index_weight", PTR),
    ("index_bias", PTR),
    ("index_table", PTR),
    ("mla_cache", PTR),
    ("mla_scale", PTR),
    ("index_codes", PTR),
    ("index_scales", PTR),
    ("counters", PTR),
    ("errors", PTR),
    ("tokens", I32),
    ("position_bytes", I32),
    ("parts", DIVISOR.dtype),
    ("stream_stores", I32),
    ("part_kinds", I64),
    ("q_width", I32),
    ("q_weight_type", I32),
    ("q_eps", F32),
    ("topk_bytes", I32),
    ("slot_bytes", I32),
    ("index_slot_bytes", I32),
    ("q_c_stride", I64),
    ("q_c_out_stride", I64),
    ("topk_stride", I64),
    ("kv_c_stride", I64),
    ("k_pe_stride", I64),
    ("kv_c_out_stride", I64),
    ("k_pe_out_stride", I64),
    ("key", _KEY_NORM),
    ("mla", LAYER_ENTRY.dtype),
    ("index_k_stride", I64),
    ("index_weight_type", I32),
    ("index_bias_type", I32),
    ("index_eps", F32),
    ("reserved", I32, (3,)),
    ("index_rope", _ROPE_TABLE),
    ("index", _INDEX_CACHE),
)
_INDEXER_PARAMS = packed(
    ("k", PTR),
    ("slots", PTR),
    ("codes", PTR),
    ("scales", PTR),
    ("k_stride", I64),
    ("reserved", I64, (3,)),
    ("cache", _INDEX_CACHE),
    ("tokens", I32),
    ("slot_bytes", I32),
    ("block_tokens", I32),
    ("ue8m0", I32),
)
_HEAD_STRIDES = packed(("token", I64), ("head", I64))
_QUERY_PARAMS = packed(
    ("positions", PTR),
    ("q_pe", PTR),
    ("q_table", PTR),
    ("ql_nope", PTR),
    ("q_scale", PTR),
    ("index_q", PTR),
    ("index_table", PTR),
    ("index_weights", PTR),
    ("mqa_out", PTR),
    ("index_out", PTR),
    ("weights_out", PTR),
    ("q_pe_strides", _HEAD_STRIDES),
    ("ql_nope_strides", _HEAD_STRIDES),
    ("index_q_strides", _HEAD_STRIDES),
    ("mqa_strides", _HEAD_STRIDES),
    ("index_strides", _HEAD_STRIDES),
    ("weights_stride", I64),
    ("weights_out_stride", I64),
    ("rope", _ROPE_TABLE),
    ("index_rope", _ROPE_TABLE),
    ("position_bytes", I32),
    ("heads", I32),
    ("lora_rank", I32),
    ("index_heads", I32),
    ("index_width", I32),
    ("weights_type", I32),
    ("scale_value", F32),
    ("softmax_scale", F32),
    ("head_scale", F32),
    ("token_blocks", DIVISOR.dtype),
    ("mqa_blocks", I32),
    ("mqa_block_heads", I32),
    ("index_block_heads", I32),
    ("stream_stores", I32),
)

ROPE_TABLE = Struct("RopeTable", _ROPE_TABLE)
KEY_NORM = Struct("KeyNorm", _KEY_NORM)
CONTEXT_PARAMS = Struct("ContextParams", _CONTEXT_PARAMS)
INDEX_CACHE = Struct("IndexCache", _INDEX_CACHE)
NORM_ROPE_PARAMS = Struct("NormRopeParams", _NORM_ROPE_PARAMS)
INDEXER_PARAMS = Struct("IndexerParams", _INDEXER_PARAMS)
HEAD_STRIDES = Struct("HeadStrides", _HEAD_STRIDES)
QUERY_PARAMS = Struct("QueryParams", _QUERY_PARAMS)
