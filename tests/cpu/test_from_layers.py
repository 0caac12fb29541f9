"""GroupedCacheWriter.from_layers: attributes, what is copied, what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cupy_mla import GroupedCacheWriter, get_layout
from tests import helpers, oracle
from tests.context_helpers import Step
from tests.fused_helpers import weights
from tests.helpers import (
    rejected,
)

F32 = np.float32


def bf16(*shape):
    return np.zeros(shape, oracle.BFLOAT16)


def make_model_layers(step, *, eps=1e-5, neox=True, nested=True):
    """Make layers as engines have them, over the caches of a step."""
    array = step.backend.array
    layers = []
    for number, cache in enumerate(step.caches):
        scale = 1.0 if step.scales is None else step.scales[number]
        attention = SimpleNamespace(
            kv_cache=cache.array,
            kv_cache_dtype=step.formats[number],
            _k_scale=array(np.array(scale, F32)),
            kv_lora_rank=step.rank,
            qk_rope_head_dim=step.rope,
            kv_a_layernorm=SimpleNamespace(
                weight=array(step.weight[number].copy()), variance_epsilon=eps
            ),
            rotary_emb=SimpleNamespace(cos_sin_cache=array(step.table), is_neox_style=neox),
        )
        layers.append(SimpleNamespace(self_attn=attention) if nested else attention)
    return layers


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
def test_a_writer_of_layers_knows_their_norms_and_table(backend, rng, fmt, nested):
    step = Step(backend, rng, fmt)
    step.scales = [F32(0.37)] * 3 if step.scales else None
    want = step.expected(eps=0.5, neox=True)
    layers = make_model_layers(step, eps=0.5, nested=nested)
    writer = GroupedCacheWriter.from_layers(layers)
    assert [layout.name for layout in writer.layouts] == step.formats
    # Weights were copied: the model may go.
    for layer in layers:
        (layer.self_attn if nested else layer).kv_a_layernorm.weight[...] = 0
    given = step.arguments(norm_weight=None, cos_sin_cache=None)
    writer.insert_context(**given)
    step.check(want)


def test_weights_and_table_of_the_caller_come_first(backend, rng):
    step = Step(backend, rng)
    layers = make_model_layers(step, eps=0.5, neox=True)
    step.weight = weights(rng, (3, 512))
    step.table = np.ascontiguousarray(step.table[::-1])
    want = step.expected(eps=1e-6, neox=False)
    GroupedCacheWriter.from_layers(layers).insert_context(**step.arguments())
    step.check(want)


def test_scales_of_layers_are_live_where_the_caches_are(backend, rng):
    step = Step(backend, rng, "fp8_e4m3")
    layers = make_model_layers(step)
    writer = GroupedCacheWriter.from_layers(layers)
    step.scales = [0.5, 2.0, 0.125]
    for layer, scale in zip(layers, step.scales, strict=True):
        layer.self_attn._k_scale[...] = scale
    want = step.expected()
    writer.insert_context(**step.arguments())
    step.check(want)


def test_numbers_as_scales_are_copied(backend, rng):
    step = Step(backend, rng, "fp8_e4m3")
    layers = make_model_layers(step, nested=False)
    for number, layer in enumerate(layers):
        layer.k_scale = step.scales[number]  # comes before _k_scale
        layer._k_scale[...] = 77
    want = step.expected()
    writer = GroupedCacheWriter.from_layers(layers)
    for layer in layers:
        layer.k_scale = 5.0
    writer.insert_context(**step.arguments())
    step.check(want)


def test_other_names_of_attributes(backend, rng):
    step = Step(backend, rng, layers=1)
    layers = [
        SimpleNamespace(
            mla=SimpleNamespace(cache=[step.caches[0].array]),
            rank=512,
            rope_dim=64,
            norm=SimpleNamespace(weight=backend.array(step.weight[0]), eps=1e-5),
        )
    ]
    names = {
        "kv_cache": "mla.cache",
        "kv_lora_rank": "rank",
        "norm_weight": "norm.weight",
        "norm_eps": "norm.eps",
    }
    want = step.expected(eps=1e-5)
    writer = GroupedCacheWriter.from_layers(layers, attributes=names, collect_stats=True)
    writer.insert_context(**step.arguments(norm_weight=None))
    step.check(want)
    assert writer.stats()["rows_written"].tolist() == [4]


def test_layers_without_norms_make_a_plain_writer(backend, rng):
    step = Step(backend, rng)
    layers = make_model_layers(step)
    for layer in layers:
        del layer.self_attn.kv_a_layernorm, layer.self_attn.rotary_emb
    writer = GroupedCacheWriter.from_layers(layers)
    with rejected(TypeError, "insert_context", "norm_weight", "NoneType"):
        writer.insert_context(**step.arguments(norm_weight=None))
    with rejected(ValueError, "insert_context", "cos_sin_cache", "rope_dim is 64"):
        writer.insert_context(**step.arguments(cos_sin_cache=None))
    want = step.expected()
    writer.insert_context(**step.arguments())
    step.check(want)


def test_the_scale_format_is_handed_on(backend, rng):
    step = Step(backend, rng, "fp8_ds_mla")
    writer = GroupedCacheWriter.from_layers(make_model_layers(step), scale_format="ue8m0")
    assert writer.layouts[0] == get_layout("fp8_ds_mla", scale_format="ue8m0")


def change(layer, path, value):
    *parents, name = path.split(".")
    for parent in parents:
        layer = getattr(layer, parent)
    if value is None:
        delattr(layer, name)
    else:
        setattr(layer, name, value)


@pytest.mark.parametrize(
    ("path", "value", "exception", "fragments"),
    [
        ("kv_lora_rank", 256, ValueError, ["kv_lora_rank of layer 0 (512)", "got 256"]),
        ("kv_lora_rank", None, TypeError, ["attribute kv_lora_rank"]),
        ("qk_rope_head_dim", 32, ValueError, ["rope_dim of layer 0 (64)", "got 32"]),
        ("qk_rope_head_dim", None, TypeError, ["rope_dim or qk_rope_head_dim"]),
        ("kv_a_layernorm.variance_epsilon", 1e-6, ValueError, ["eps of layer 0"]),
        ("kv_a_layernorm.variance_epsilon", None, TypeError, ["variance_epsilon"]),
        ("kv_a_layernorm", None, TypeError, ["kv_a_layernorm.weight"]),
        ("kv_a_layernorm.weight", bf16(256), ValueError, ["[512]", "[256]"]),
        ("kv_a_layernorm.weight", np.zeros(512, F32), TypeError, ["bfloat16", "float32"]),
        ("kv_a_layernorm.weight", np.zeros(512, int), TypeError, ["int64"]),
        ("kv_cache", None, TypeError, ["attribute kv_cache"]),
        ("_k_scale", None, TypeError, ["k_scale or _k_scale"]),
        ("rotary_emb", None, ValueError, ["cos_sin_cache of layer 0 (a table)", "got none"]),
        ("rotary_emb.is_neox_style", None, ValueError, ["is_neox of layer 0 (True)", "got none"]),
    ],
)
def test_a_layer_that_does_not_go_with_the_first_one_is_named(
    rng, path, value, exception, fragments
):
    step = Step(helpers.Backend(), rng, "fp8_e4m3")
    layers = make_model_layers(step)
    change(layers[2].self_attn, path, value)
    with rejected(exception, "from_layers", "layers", *fragments, layer=2):
        GroupedCacheWriter.from_layers(layers)


@pytest.mark.parametrize(
    ("path", "value", "exception"),
    [
        ("kv_cache_dtype", "fp7", ValueError),
        ("kv_lora_rank", "512", TypeError),
        ("kv_cache", np.zeros((4, 4, 575), np.uint8), ValueError),
        ("_k_scale", np.zeros(2, F32), ValueError),
    ],
)
def test_other_faults_name_the_layer_too(rng, path, value, exception):
    step = Step(helpers.Backend(), rng, "fp8_e4m3")
    layers = make_model_layers(step)
    change(layers[2].self_attn, path, value)
    with pytest.raises(exception, match=r"layer 2|\[2\]"):
        GroupedCacheWriter.from_layers(layers)


def test_no_layer_and_unknown_attributes(rng):
    with rejected(ValueError, "from_layers", "layers", "at least one"):
        GroupedCacheWriter.from_layers([])
    layers = make_model_layers(Step(helpers.Backend(), rng))
    with rejected(ValueError, "from_layers", "attributes", "kv_cache_dtype", "'cache'"):
        GroupedCacheWriter.from_layers(layers, attributes={"cache": "x"})


def test_layers_of_torch(rng):
    torch = pytest.importorskip("torch")
    step = Step(helpers.Backend(), rng, "fp8_e4m3", layers=2)
    layers = []
    for number, cache in enumerate(step.caches):
        layer = torch.nn.Module()
        layer.kv_cache = torch.from_numpy(cache.array)
        layer.kv_cache_dtype = "fp8"
        layer.register_buffer("_k_scale", torch.tensor(step.scales[number]))
        layer.kv_lora_rank, layer.qk_rope_head_dim = 512, 64
        layer.kv_a_layernorm = torch.nn.Module()
        weight = torch.from_numpy(step.weight[number].view(np.int16)).view(torch.bfloat16)
        layer.kv_a_layernorm.weight = torch.nn.Parameter(weight.clone())
        layer.kv_a_layernorm.variance_epsilon = 1e-6
        layers.append(layer)
    want = step.expected()
    writer = GroupedCacheWriter.from_layers(torch.nn.ModuleList(layers))
    kv = torch.from_numpy(step.kv.view(np.int16)).view(torch.bfloat16)
    writer.insert_context(
        kv,
        torch.from_numpy(step.positions),
        torch.from_numpy(step.slots),
        None,
        torch.from_numpy(step.table),
    )
    step.check(want)


def test_norms_on_a_device_that_the_caches_are_not_on():
    """Their addresses mean nothing in host memory, and are not read."""
    layers = [
        SimpleNamespace(
            kv_cache=np.zeros((2, 4, 6), np.float32),
            kv_lora_rank=4,
            qk_rope_head_dim=2,
            kv_a_layernorm=SimpleNamespace(
                weight=helpers.FakeDevice((4,), "<f4"), variance_epsilon=1e-6
            ),
            rotary_emb=SimpleNamespace(
                cos_sin_cache=np.ones((8, 2), np.float32), is_neox_style=True
            ),
        )
    ]
    with helpers.rejected(
        ValueError, "from_layers", "kv_a_layernorm.weight", "same CUDA device", layer=0
    ):
        GroupedCacheWriter.from_layers(layers)
