"""Arguments of the fused kernels, beside those of `params`.

Each begins with the addresses that differ from call to call, in the order in which launch code
gives them.
"""

from __future__ import annotations

from .params import _F32 as F32
from .params import _I32 as I32
from .params import _I64 as I64
from .params import _PTR as PTR
from .params import DIVISOR, SLOT_ARRAY, SLOT_LIST_LAYERS, Struct
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

ROPE_TABLE = Struct("RopeTable", _ROPE_TABLE)
KEY_NORM = Struct("KeyNorm", _KEY_NORM)
CONTEXT_PARAMS = Struct("ContextParams", _CONTEXT_PARAMS)
