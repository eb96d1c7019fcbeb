"""Tiny models of every architecture that transformers can build from a default config."""

import copy
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MAX_PARAMETERS = 28_000_000
"""Of one model, and of all configs of a type that can be built but do not run."""

KINDS = {
    "vision-language": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "ctc": "MODEL_FOR_CTC_MAPPING",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING",
    "segmentation": "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING",
    "depth": "MODEL_FOR_DEPTH_ESTIMATION_MAPPING",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "base": "MODEL_MAPPING",
}
"""Kind of model -> auto mapping; the first one that has a model type decides."""

_NAMES = {
    512: "encoder_hash_byte_group_vocab",
    128: """
        intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner dim_feedforward
        ffn_hidden_size d_inner mamba_intermediate_size moe_intermediate_size
        shared_expert_intermediate_size decoder_intermediate_size expert_ffn_hidden_size
        shared_intermediate_size intermediate_size_mlp encoder_intermediate_size
        dense_intermediate_size feed_forward_dim expert_intermediate_size
        moe_shared_expert_intermediate_size mlp_dim encoder_feedforward_dim
        decoder_feedforward_dim vocab_size n_token decoder_vocab_size src_vocab_size
        tgt_vocab_size codebook_size text_vocab_size entity_vocab_size
        vocab_size_per_layer_input
    """,
    64: """
        hidden_size d_model n_embd dim embed_dim decoder_hidden_size mm_hidden_size emb_dim
        encoder_hidden_size projection_dim hidden_dim out_hidden_size text_embed_dim encoder_dim
        decoder_dim fpn_hidden_size mask_feature_size feature_size vision_output_dim output_dim
        proj_dim attention_hidden_size lru_width embedding_size qformer_hidden_size conv_dim
        expert_dim bottleneck_size hidden_channels window_hidden_size model_dim d_embed
        max_embed_dim width lm_dim max_position_embeddings n_positions max_source_positions
        n_ctx max_target_positions max_sequence_length seq_length upsample_groups
    """,
    32: """
        q_lora_rank image_size hidden_size_per_layer_input sliding_window base_channels
        context_size
    """,
    16: """
        head_dim d_kv attention_head_dim v_head_dim kv_channels d_head attention_head_size
        kv_lora_rank qk_head_dim num_mel_bins
    """,
    8: "qk_rope_head_dim qk_nope_head_dim patch_size num_queries num_latents",
    4: """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads num_attention_heads_per_layer mamba_n_heads
        decoder_num_attention_heads encoder_num_attention_heads attention_heads num_query_heads
        attention_num_heads num_local_experts num_experts n_routed_experts moe_num_experts
        num_routed_experts
    """,
    2: """
        num_key_value_heads num_kv_heads n_kv_heads num_hidden_layers n_layer n_layers
        num_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers
        decoder_num_hidden_layers depth encoder_num_hidden_layers num_blocks num_block_layers
        num_transformer_layers decoder_num_layers encoder_num_layers text_encoder_layers
        num_experts_per_tok moe_top_k moe_topk top_k_experts
    """,
    1: "n_group topk_group num_expert_groups",
    0: "pad_token_id num_kv_shared_layers",
}
"""Small number -> entries of configs that get it, unless they are smaller already."""

_NUMBERS = {name: number for number, names in _NAMES.items() for name in names.split()}

_FACTORS = {"width_coefficient": 0.25, "depth_coefficient": 0.2}

_TOKENS = re.compile(r"(bos|eos|pad|sep|cls|mask|decoder_start|unk)_token_id|.*_token_(id|index)")


class CannotBuildError(Exception):
    """A model type for which no tiny model was found."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model, not yet built."""

    model_type: str
    kind: str
    model_class: type[PreTrainedModel]
    config: PretrainedConfig

    def build(self, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> PreTrainedModel:
        """Return the model with random weights, in evaluation mode."""
        torch.manual_seed(seed)
        model = self.model_class(copy.deepcopy(self.config))
        _fill_empty(model)
        return model.to(dtype).eval()


def list_model_types() -> list[str]:
    """Return every model type of transformers."""
    return list(CONFIG_MAPPING.keys())


def find(model_type: str, kind: str | None = None) -> Tiny:
    """Return a tiny model of a type, of the given kind or the first one it has.

    The first config with which the model runs is taken; if there is none, the smallest model.
    """
    errors: list[str] = []
    built: list[tuple[int, Tiny]] = []
    for config in _candidates(model_type, errors):
        if sum(size for size, _ in built) > MAX_PARAMETERS:
            break
        models = list(_list_models(model_type, config, kind))
        if not models:
            raise CannotBuildError(f"{model_type}: no model class")
        for tiny in models:
            try:
                with torch.device("meta"):
                    model = tiny.model_class(copy.deepcopy(config))
                size = sum(p.numel() for p in model.parameters())
                if size > MAX_PARAMETERS:
                    errors.append(f"{tiny.model_class.__name__}: {size} parameters")
                    continue
                type(config).from_dict(copy.deepcopy(config).to_dict())  # as from_pretrained does
                built.append((size, tiny))
                make_inputs(tiny.build())
            except Exception as error:
                errors.append(f"{tiny.model_class.__name__}: {type(error).__name__}: {error}")
            else:
                return tiny
    if not built:
        raise CannotBuildError(f"{model_type}: {errors[0]}")
    return min(built, key=lambda pair: pair[0])[1]


def _list_models(model_type: str, config: PretrainedConfig, kind: str | None) -> Iterator[Tiny]:
    for name, mapping in KINDS.items():
        known = getattr(modeling_auto, mapping)
        if kind not in (None, name) or type(config) not in known:
            continue
        try:
            found = known[type(config)]
        except ValueError:  # the mapping names a class that transformers does not have
            continue
        classes = found if isinstance(found, list | tuple) else [found]
        yield from (Tiny(model_type, name, model_class, config) for model_class in classes)
        if any(isinstance(config, model_class.config_class) for model_class in classes):
            return  # else a class that needs the config of a part, such as that of the decoder
    if kind is None:
        for model_class in _find_classes(type(config)):
            yield Tiny(model_type, "part", model_class, config)


def _find_classes(config_class: type[PretrainedConfig]) -> list[type[PreTrainedModel]]:
    """Return the models of a config that no auto class builds, such as the towers of a model."""
    module = config_class.__module__.replace(".configuration_", ".modeling_")
    if importlib.util.find_spec(module) is None:
        return []
    found = vars(importlib.import_module(module)).values()
    return [
        x
        for x in found
        if isinstance(x, type)
        and issubclass(x, PreTrainedModel)
        and x.config_class is config_class
        and not x.__name__.endswith("PreTrainedModel")
        and hasattr(transformers, x.__name__)
    ]


def make_inputs(model: PreTrainedModel, *, rows: int = 2, seed: int = 0) -> dict[str, Any]:
    """Return arguments with which the model runs; raise CannotBuildError if none are found."""
    error: Exception | None = None
    for guess in _guess_inputs(model, rows, seed):
        try:
            with torch.no_grad():
                model(**guess)
        except Exception as failure:
            error = error or failure
        else:
            return guess
    raise CannotBuildError(f"{type(model).__name__}: {type(error).__name__}: {error}")


_MAMBA = {
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_headdim": 16,
    "n_mamba_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
}
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    dict.fromkeys(("image_size", "patch_size", "window_size")),
    dict.fromkeys(
        ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "qk_head_dim")
    ),
    {"head_dim": 8},
    {"head_dim": 16, "num_key_value_heads": 2, "layer_types": ["full_attention"] * 2},
    {"mlp_layer_types": ["dense", "sparse"], "layer_types": ["conv", "full_attention"]},
    _MAMBA,
    {"num_hidden_layers": 4, "mrope_section": [1, 1, 2], "prediction_length": 8},
    {"num_key_value_heads": 4, "hidden_size_per_layer_input": 0},
    {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "vocab_size": 128,
        "vocabulary_map": {"<image>": 5, "<boi>": 6, "<eoi>": 7},
    },
    {"layer_types": ["sliding_attention", "full_attention"]},
    _MAMBA
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attn_layer_indices": [1],
        "layer_types": ["linear_attention", "full_attention"],
        "layers_block_type": ["linear_attention", "full_attention"],
        "rotary_dim": 8,
        "moe_k": 2,
    },
    {"num_hidden_layers": 4, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
    {
        "backbone_config": {
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 32, 32],
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
            "out_features": ["stage2", "stage3", "stage4"],
        },
        "use_timm_backbone": False,
        "num_feature_levels": 3,
    },
    dict.fromkeys((*_NUMBERS, "hidden_sizes"), None) | {"num_hidden_layers": 2, "vocab_size": 128},
    {"rope_parameters.+mrope_section": [2, 3, 3]},
)
"""Values that some models need: a number or list, or None to keep that of the default config."""

_COMPASS_ROPE = {
    kind: {"rope_type": "default", "rope_theta": 10000.0}
    for kind in ("full_attention", "sliding_attention")
}
_DOTS_TOWERS = {
    "adapter_in_dim": 64,
    "adapter_input_size": 64,
    "adapter_out_dim": 64,
    "conv_output_size": 128,
    "downsample_hidden_size": 8,
    "num_key_value_heads": 4,
    "per_layer_config": {},
}
_ERNIE_EXPERTS = {"moe_intermediate_size": [64, 32], "moe_k": 2}
_FLORENCE_STAGES = {"embed_dim": [32, 32, 64, 64], "num_heads": [2] * 4, "num_groups": [2] * 4}
_LARGE4_LAYERS = {
    "kv_source_layers": [0, 0],
    "indexer_types": ["full", "full"],
    "no_rope_layers": [1, 1],
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_CODEC = {"quantization_dim": 64, "encoder_hidden_size": 4, "output_hidden_size": 64}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 16,
    "ngram_vocab_size_base": 128,
    "split_ngram_parts": 4,
}
_VIBEVOICE = {"num_filters": 2, "depths": [1] * 7}
_OWN: dict[str, dict[str, Any]] = {
    "blip-2": {"image_token_index": 5},
    "cohere2_vision": {"alignment_intermediate_size": 128},
    "cohere_compass": {
        "text_config.rope_parameters": _COMPASS_ROPE,
        "deepstack_visual_indexes": [0, 1],
    },
    "cohere_compass_text": {"rope_parameters": _COMPASS_ROPE},
    "cosmos3_edge": {"projector_hidden_size": 64},
    "cpmant": {"dim_ff": 128},
    "csm": {"num_filters": 4, "num_codebooks": 4, "num_quantizers": 4},
    "dbrx": {"attn_config.+rope_theta": 10000.0, "attn_config.+clip_qkv": 8.0, "moe_top_k": 2},
    "depth_anything": {},  # with the backbone of the default config
    "depth_pro": {
        "fusion_hidden_size": 32,
        "intermediate_feature_dims": [32, 32],
        "intermediate_hook_ids": [1, 0],
        "scaled_images_feature_dims": [32, 32, 32],
    },
    "dots3_note": _DOTS_TOWERS,
    "dots3_note_audio_encoder": _DOTS_TOWERS,
    "dots3_note_text": _DOTS_TOWERS,
    "dots3_note_vision_encoder": _DOTS_TOWERS,
    "efficientnet": {"hidden_dim": 320},
    "ernie4_5_vl_moe": _ERNIE_EXPERTS | {"text_config.rope_parameters.+mrope_section": [2, 2, 4]},
    "ernie4_5_vl_moe_text": _ERNIE_EXPERTS | {"rope_parameters.+mrope_section": [2, 2, 4]},
    "esm": {"pad_token_id": 1, "mask_token_id": 4, "vocab_size": 33},
    "esmfold2": {
        "pair_transition_intermediate_size": 64,
        "pairwise_hidden_size": 64,
        "folding_trunk_num_hidden_layers": 2,
        "pair_intermediate_size": 64,
        "num_key_value_heads": 4,
        "head_dim": None,
        "hidden_size": None,
        "output_dim": None,
        "esmc_config.hidden_size": 64,
        "esmc_config.head_dim": 16,
        "num_attention_heads": None,
        "esmc_config.num_attention_heads": 4,
    },
    "florence2": _FLORENCE_STAGES,
    "florence_vision": _FLORENCE_STAGES,
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.95, 0.0],
        "intermediate_size": [128, 128],
        "laurel_rank": 16,
    },
    "glm5_next": {"projection_intermediate_size": 128, "num_key_value_heads": 4},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "2/4",
    },
    "hgnet_v2": {"hidden_sizes": None},
    "inkling2": {"text_hidden_size": 64},
    "lightglue": {"descriptor_dim": 64, "hidden_size": 64, "descriptor_decoder_dim": 64},
    "longcat_flash": {"head_dim": 8},
    "mistral_large4": _LARGE4_LAYERS,
    "mistral_large4_text": _LARGE4_LAYERS,
    "molmo2": {"vision_feature_layer": [1, 0], "text_hidden_size": 64, "rope_scaling_layers": [0]},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": {"+num_key_value_heads": 4, "sliding_windows": [[16, 4], [16, 0]]},
    "muse_spark": {
        "projector_hidden_size": 64,
        "moe_hidden_size": 64,
        "audio_config.num_hidden_layers": 4,
        "layer_rope_theta": [500000.0, 0],
    },
    "nemo_speechlm": {
        "audio_hidden_size": 64,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "full_attention"],
        "text_config.head_dim": 16,
        "mamba_head_dim": 16,
        "mamba_num_heads": 8,
        "n_groups": 1,
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "nemotron_h_omni": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "patch_size": None,
    },
    "nemotron3_5_transcribe_audio": {"audio_hidden_size": 64},
    "neucodec": _CODEC,
    "perceiver": {"d_latents": 64, "num_self_attends_per_block": 2},
    "phi4_multimodal": {"nemo_conv_channels": 64},
    "prompt_depth_anything": {},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "step3p5_vision": {"mlp_ratio": 2.0},
    "step3p7": {"mlp_ratio": 2.0, "text_config.+sliding_window": 16},
    "t5gemma2_encoder": {"text_config.+dropout_rate": 0.0},
    "vibevoice": _VIBEVOICE,
    "vibevoice_acoustic_tokenizer": _VIBEVOICE,
    "vibevoice_acoustic_tokenizer_decoder": _VIBEVOICE,
    "vibevoice_acoustic_tokenizer_encoder": _VIBEVOICE,
    "vibevoice_asr": _VIBEVOICE,
    "xcodec2": _CODEC,
    "xlstm": {"embedding_dim": 64},
    "xmod": {"default_language": "en_XX"},
}
"""Values that one type needs, in place of the variants.

`part.name` is an entry of a part of the config; one that the config lacks begins with a `+`.
"""


def _candidates(model_type: str, errors: list[str]) -> Iterator[PretrainedConfig]:
    """Yield shrunk configs: as attributes of the default one, or as arguments of a new one."""
    config_class = CONFIG_MAPPING[model_type]
    for variant in (_OWN[model_type],) if model_type in _OWN else _VARIANTS:
        for make in (_shrink_attributes, _shrink_arguments):
            try:
                yield make(config_class(), variant)
            except Exception as error:
                errors.append(f"{config_class.__name__}: {type(error).__name__}: {error}")


def _shrink_attributes(config: PretrainedConfig, variant: dict[str, Any]) -> PretrainedConfig:
    """Return the config with small numbers, set one by one as far as it accepts them."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _shrink_attributes(value, _select_part(variant, name))
        elif isinstance(value, dict):
            setattr(config, name, _shrink_tree(value, _select_part(variant, name)))
        elif (small := _shrink_value(name, value, variant)) is not value:
            try:
                setattr(config, name, small)
            except Exception:  # a validator that wants the original value
                setattr(config, name, value)
    for name in (name for name in variant if name.startswith("+")):
        setattr(config, name[1:], variant[name])
    return config


def _shrink_arguments(config: PretrainedConfig, variant: dict[str, Any]) -> PretrainedConfig:
    """Return a new config of the class, made from small numbers, so that others follow."""
    values = _shrink_tree(config.to_dict(), variant)
    accepted = inspect.signature(type(config).__init__).parameters
    arguments = {k: v for k, v in values.items() if k in accepted or "kwargs" in accepted}
    arguments.pop("model_type", None)
    return type(config)(**arguments)


def _shrink_tree(values: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name in ("out_features", "out_indices", "stage_names") and name not in variant:
            continue  # follows from the number of layers
        if name == "per_layer_config" and value:
            layers = range(_NUMBERS["num_hidden_layers"])
            small[name] = {layer: x for layer, x in value.items() if int(layer) in layers}
        elif isinstance(value, dict) and name not in variant:
            small[name] = _shrink_tree(value, _select_part(variant, name))
        else:
            small[name] = _shrink_value(name, value, variant)
    return small | {name[1:]: x for name, x in variant.items() if name.startswith("+")}


def _select_part(variant: dict[str, Any], name: Any) -> dict[str, Any]:
    """Return the values for a part of a config."""
    own = {k.partition(".")[2]: v for k, v in variant.items() if k.startswith(f"{name}.")}
    return {k: v for k, v in variant.items() if not k.startswith("+")} | own


def _shrink_value(name: Any, value: Any, variant: dict[str, Any]) -> Any:
    """Return a small value for an entry of a config, or the value itself."""
    if name in variant:
        return value if variant[name] is None else variant[name]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if _TOKENS.fullmatch(str(name)) and value >= 100:
            return 3 + value % 90
        return min(value, _NUMBERS[name]) if name in _NUMBERS else value
    if isinstance(value, float):
        return _FACTORS.get(name, value)
    if isinstance(value, list | tuple) and value:
        kept = _shrink_list(name, list(value))
        return type(value)(kept) if isinstance(value, tuple) else kept
    return value


def _shrink_list(name: str, value: list[Any]) -> list[Any]:
    if name in (
        "layer_types",
        "layers_block_type",
        "mlp_layer_types",
        "block_types",
        "attention_layers",
    ):
        return _vary(value)
    if name == "attention_types":  # kinds of attention, and how often they are repeated
        return [[value[0][0], 1]]
    if name in _NUMBERS and len(value) > 8:  # one for each layer
        return [min(x, _NUMBERS[name]) for x in value[: _NUMBERS["num_hidden_layers"]]]
    if name == "mrope_section":  # sums to half of a head
        return [2, 3, 3]
    if all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        if name in (
            "depths",
            "num_layers",
            "layers",
            "encoder_layers",
            "num_blocks",
            "layer_depths",
        ):
            return [1] * len(value)
        if name in ("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "neck_hidden_sizes"):
            return [min(x, 32 * 2 ** min(i, 1)) for i, x in enumerate(value)]
        if name in ("num_attention_heads", "num_heads"):
            return [min(x, 2) for x in value]
        if name in ("image_size", "patch_size"):
            return [min(x, _NUMBERS[name]) for x in value]
    return value


def _vary(layer_types: list[Any]) -> list[Any]:
    """Return two entries, different ones if there are any."""
    second = next((x for x in layer_types if x != layer_types[0]), layer_types[0])
    return [layer_types[0], second]


def _fill_empty(model: PreTrainedModel) -> None:
    """Give random values to parameters that the constructor leaves uninitialized or constant."""
    for parameter in model.parameters():
        data = parameter.data
        if (
            data.numel()
            and data.is_floating_point()
            and (not data.isfinite().all() or data.abs().max() > 1e3)
        ):
            torch.nn.init.normal_(data, std=0.02)


def _guess_inputs(model: PreTrainedModel, rows: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield arguments that the model may accept, the likeliest first."""
    generator = torch.Generator().manual_seed(seed)
    accepted = inspect.signature(model.forward).parameters
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    vocabulary = _find_number(model.config, "vocab_size") or 64

    def tokens(length: int = 16) -> Tensor:
        low = min(10, vocabulary // 4)
        return torch.randint(low, vocabulary - 8 if vocabulary > 32 else vocabulary,
                             (rows, length), generator=generator)  # fmt: skip

    def values(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator).to(dtype)

    channels = _find_number(model.config, "num_channels") or 3
    image = _find_size(model.config) or (32, 32)
    mel = (
        _find_number(model.config, "num_mel_bins")
        or _find_number(model.config, "input_dim")
        or _find_number(model.config, "input_feat_per_channel")
        or 16
    )
    text = {"input_ids": tokens(), "attention_mask": torch.ones(rows, 16, dtype=torch.long)}
    picture = values(channels, *image)
    guesses: list[dict[str, Any]] = []
    if "decoder_input_ids" in accepted:
        guesses.append({**text, "decoder_input_ids": tokens(8)})
    if "input_ids" in accepted:
        guesses += [text, {"input_ids": text["input_ids"]}]
    if "pixel_values" in accepted:
        guesses += [{"pixel_values": picture}, {**text, "pixel_values": picture}]
        guesses.append(
            {"pixel_values": picture, "input_ids": tokens(), "decoder_input_ids": tokens(8)}
        )
        guesses.append({"pixel_values": picture, "decoder_input_ids": tokens(8)})
    if "pixel_values_videos" in accepted:
        guesses.append({"pixel_values_videos": values(4, channels, *image)})
    if "input_features" in accepted:
        for shape in ((mel, 64), (64, mel), (mel, 128)):
            guesses.append({"input_features": values(*shape)})
            guesses.append({"input_features": values(*shape), "decoder_input_ids": tokens(8)})
    if "input_values" in accepted:
        for shape in ((4000,), (1, 4000), (64, mel), (1024, 128)):
            guesses.append({"input_values": values(*shape)})
            guesses.append({"input_values": values(*shape), "decoder_input_ids": tokens(8)})
    if "bbox" in accepted:
        guesses.append({**text, "bbox": torch.zeros(rows, 16, 4, dtype=torch.long)})
        boxes = torch.rand(rows, 16, 4, generator=generator).sort().values
        guesses.append({**text, "bbox": boxes, "decoder_input_ids": tokens(8)})
    if "flattened_patches" in accepted:
        width = next(m.in_features for n, m in model.named_modules() if "patch_projection" in n)
        patches = torch.cat([torch.ones(rows, 16, 2, dtype=dtype), values(16, width)], 2)
        guesses.append({"flattened_patches": patches, "decoder_input_ids": tokens(8)})
    if "spatial_shapes" in accepted:
        size = _find_number(model.config, "patch_size") or 8
        guesses.append(
            {
                "pixel_values": values(16, channels * size**2),
                "pixel_attention_mask": torch.ones(rows, 16, dtype=torch.long),
                "spatial_shapes": torch.full((rows, 2), 4),
            }
        )
    if queries := _find_number(model.config, "num_query_tokens"):
        token = getattr(model.config, "image_token_index", None) or 5
        ids = torch.cat([torch.full((rows, queries), token), tokens()], 1)
        mixed = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": picture}
        guesses.append(mixed)
    if "image_attention_mask" in accepted:
        seen = torch.ones(rows, 16, 1, dtype=torch.long)
        guesses.append({**text, "pixel_values": picture[:, None], "image_attention_mask": seen})
    if "inputs" in accepted:
        guesses += [{"inputs": tokens()}, {"inputs": values(16, 64)}]
    for names in (("past_values",), ("pixel_values", "input_ids")):
        if all(name in accepted for name in names) and names == ("past_values",):
            length = _find_number(model.config, "context_length") or 32
            width = _find_number(model.config, "num_input_channels") or 1
            guesses.append({"past_values": values(length, width)})
    guesses.append({name: x for name, x in model.dummy_inputs.items() if name in accepted})
    guesses.append({**text, "use_cache": False})
    for guess in guesses:
        yield {name: x for name, x in guess.items() if name in accepted}


def _find_number(config: PretrainedConfig, name: str) -> int | None:
    """Return a number of a config or of one of its parts; the text part first."""
    found = getattr(config, name, None)
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    parts = [x for x in vars(config).values() if isinstance(x, PretrainedConfig)]
    numbers = [n for part in parts if (n := _find_number(part, name)) is not None]
    return min(numbers, default=None)


def _find_size(config: PretrainedConfig) -> tuple[int, int] | None:
    for part in (config, *(x for x in vars(config).values() if isinstance(x, PretrainedConfig))):
        size = getattr(part, "image_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, list | tuple) and len(size) == 2:
            return tuple(size)
    return None
