"""Rules for the layers of a `config.json`, by the name of SGLang's model class.

A model's class, not the keys of its configuration, decides whether SGLang applies a window, a chunk
or a sparse backend: `MistralForCausalLM` ignores the `sliding_window` that `GptOssForCausalLM`
applies. A nightly test builds the classes and compares them with these rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Classes whose layers all attend to all tokens, even if the configuration has a window.
PLAIN = _names(
    """
    ApertusForCausalLM ArceeForCausalLM BaichuanForCausalLM BailingMoEForCausalLM
    BailingMoeForCausalLM BailingMoeV2ForCausalLM ChatGLMModel CohereForCausalLM DbrxForCausalLM
    DeciLMForCausalLM DeepseekForCausalLM DeepseekOCRForCausalLM DeepseekV2ForCausalLM
    DeepseekV3ForCausalLM DeepseekVL2ForCausalLM Dots1ForCausalLM DotsOCRForCausalLM
    DotsVLMForCausalLM Ernie4_5_ForCausalLM Ernie4_5_MoeForCausalLM
    Ernie4_5_VLMoeForConditionalGeneration Ernie4_5ForCausalLM ExaoneForCausalLM GemmaForCausalLM
    GigaChat35ForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM
    Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration GlmAsrForConditionalGeneration
    GlmOcrForConditionalGeneration GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM
    GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM HunYuanDenseV1ForCausalLM
    HunYuanMoEV1ForCausalLM HYV3ForCausalLM InternLM2ForCausalLM InternLM3ForCausalLM
    InternS1ForConditionalGeneration InternVLChatModel IQuestCoderForCausalLM
    KimiK25ForConditionalGeneration KimiVLForConditionalGeneration
    LightOnOCRForConditionalGeneration LlamaForCausalLM LlavaForConditionalGeneration
    LlavaLlamaForCausalLM LlavaMistralForCausalLM LlavaNextForConditionalGeneration
    LlavaOnevisionForConditionalGeneration LlavaQwenForCausalLM LlavaVidForCausalLM
    LongcatFlashForCausalLM MiDashengLMModel MiMoForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM
    MiniCPMO MiniCPMV MiniMaxM2ForCausalLM Ministral3ForCausalLM Mistral3ForConditionalGeneration
    MistralForCausalLM MistralLarge3ForCausalLM MixtralForCausalLM MultiModalityCausalLM
    NVILAForConditionalGeneration NVILALiteForConditionalGeneration Olmo2ForCausalLM
    OlmoeForCausalLM OlmoForCausalLM OPTForCausalLM OrionForCausalLM
    PaddleOCRVLForConditionalGeneration PersimmonForCausalLM Phi3ForCausalLM Phi3SmallForCausalLM
    Phi4MMForCausalLM PhiForCausalLM PhiMoEForCausalLM PixtralForConditionalGeneration
    POINTSV15ChatModel QuantMixtralForCausalLM Qwen2_5_VLForConditionalGeneration
    Qwen2AudioForConditionalGeneration Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen2VLForConditionalGeneration Qwen3ASRForConditionalGeneration Qwen3ForCausalLM
    Qwen3MoeForCausalLM Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration QWenLMHeadModel Sarashina2VisionForCausalLM
    SarvamMLAForCausalLM SarvamMoEForCausalLM SolarForCausalLM StableLmForCausalLM
    Starcoder2ForCausalLM Step3VLForConditionalGeneration StepVLForConditionalGeneration
    TeleFLMForCausalLM VoxtralForConditionalGeneration XllmForCausalLM XverseForCausalLM
    XverseMoeForCausalLM YiVLForCausalLM
    """
)
# Classes in which `layer_types` says which layers have a window, or a state instead of KV.
BY_LAYER_TYPES = _names(
    """
    AfmoeForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration
    ExaoneMoeForCausalLM ExaoneMoEForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration
    Gemma3nForCausalLM Gemma3nForConditionalGeneration Gemma4ForCausalLM
    Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration GptOssForCausalLM
    GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM GraniteSWAForCausalLM LagunaForCausalLM
    Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration MellumForCausalLM
    MinistralForCausalLM Olmo3ForCausalLM Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration
    Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration Qwen3NextForCausalLM SeedOssForCausalLM
    SmolLM3ForCausalLM Spark2_5ForCausalLM Step3p5ForCausalLM Step3p7ForConditionalGeneration
    """
)
# The `sliding_window` of these classes does not count the new token, so their layers read one token
# more. SGLang runs the last three with the model classes of transformers.
NEW_TOKEN_IS_EXTRA = _names(
    """
    Cohere2ForCausalLM Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration
    ExaoneMoeForCausalLM ExaoneMoEForCausalLM Gemma3nForCausalLM Gemma3nForConditionalGeneration
    MiMoV2FlashForCausalLM MiMoV2ForCausalLM NemotronHForCausalLM Step3p5ForCausalLM
    Step3p7ForConditionalGeneration MinistralForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
    """
)
# Classes with their own entry in `_RULES` of `model_layers.py`.
OTHER_RULES = _names(
    """
    BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM Exaone4ForCausalLM FalconH1ForCausalLM
    Gemma2ForCausalLM Glm5NextForConditionalGeneration JetNemotronForCausalLM
    KimiK3ForConditionalGeneration KimiK3LinearForCausalLM KimiLinearForCausalLM Llama4ForCausalLM
    Llama4ForConditionalGeneration MiMoV2FlashForCausalLM MiMoV2ForCausalLM
    NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3
    NemotronHForCausalLM
    """
)
# Classes with sparse attention, for which SGLang has a backend that reads selected tokens.
SPARSE = _names(
    """
    DeepseekV4ForCausalLM Dots3NoteForCausalLM HYV4ForCausalLM MiniMaxM3SparseForCausalLM
    MiniMaxM3SparseForConditionalGeneration Qwen4ExpForConditionalGeneration
    """
)
# Classes with sparse attention only if the configuration has `index_topk`.
SPARSE_WITH_INDEX = _names(
    """
    DeepseekV32ForCausalLM DeepseekV3ForCausalLM Dots3NoteForCausalLM
    Glm5NextForConditionalGeneration GlmMoeDsaForCausalLM HYV4ForCausalLM LongcatFlashForCausalLM
    MistralLarge3ForCausalLM PixtralForConditionalGeneration
    """
)
# Classes of SPARSE_WITH_INDEX that have `index_topk` by default.
_INDEX_BY_DEFAULT = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
# Classes that add a bias to each score. The bias depends on the query and on the key's distance.
WITH_BIAS = frozenset({"InklingForConditionalGeneration"})
ENCODER_DECODER = _names(
    """
    MllamaForConditionalGeneration MossVLForConditionalGeneration WhisperForConditionalGeneration
    """
)
# Classes of embedding, reward and encoder models, which generate no tokens.
WITHOUT_TOKENS = _names(
    """
    BertForSequenceClassification BertModel CLIPModel CLIPVisionModelWithProjection Contriever
    EmbeddingGemma2Model EmbeddingGemmaModel Gemma2ForSequenceClassification InternLM2ForRewardModel
    Lfm2BidirectionalModel LlamaEmbeddingModel LlamaForClassification LlamaForSequenceClassification
    LlamaForSequenceClassificationWithNormal_Weights MistralModel NanbeigeForSequenceClassification
    PixtralVisionModel Qwen2ForRewardModel Qwen2ForSequenceClassification Qwen3ForRewardModel
    Qwen3ForSequenceClassification Qwen3Model XLMRobertaForSequenceClassification XLMRobertaModel
    """
)
# Classes whose layers all have states instead of KV.
WITHOUT_ATTENTION = frozenset({"FalconMambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM"})

KNOWN = (
    PLAIN
    | BY_LAYER_TYPES
    | OTHER_RULES
    | SPARSE
    | SPARSE_WITH_INDEX
    | WITH_BIAS
    | ENCODER_DECODER
    | WITHOUT_TOKENS
    | WITHOUT_ATTENTION
)
_OF_DRAFTS = ("NextN", "MTP", "Eagle", "Eagle3", "DSpark", "DraftModel", "AssistantModel")


# model_type -> class, for configurations that need not name a class.
_BY_TYPE = {
    "deepseek_vl_v2": "DeepseekVL2ForCausalLM",
    "dots_vlm": "DotsVLMForCausalLM",
    "longcat_flash": "LongcatFlashForCausalLM",
    "multi_modality": "MultiModalityCausalLM",
}
# A class -> another class, which has the same rules.
_ALIASES = {
    "DeepseekV41ForCausalLM": "DeepseekV4ForCausalLM",
    "DeepseekVLV2ForCausalLM": "DeepseekVL2ForCausalLM",
    "LongcatCausalLM": "LongcatFlashForCausalLM",
    "LongcatFlashNgramForCausalLM": "LongcatFlashForCausalLM",
}


def class_name(config: Mapping[str, Any]) -> str:
    """Return the class that SGLang builds, by `architectures` or `model_type`; "" if unknown."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return _BY_TYPE.get(str(config.get("model_type")), "")
    return _ALIASES.get(str(names[0]), str(names[0]))


def is_draft_model(name: str) -> bool:
    """True for a class that only drafts tokens for another model."""
    return name.endswith(_OF_DRAFTS)


def generates_tokens(config: Mapping[str, Any]) -> bool:
    """Return False if SGLang by default runs the model as an embedding, reward or encoder model."""
    is_embedding_gemma = (
        config.get("model_type") == "gemma3_text"
        and config.get("use_bidirectional_attention") is True
    )
    return class_name(config) not in WITHOUT_TOKENS and not is_embedding_gemma


def sparse_name(config: Mapping[str, Any]) -> str:
    """Return the model's class if SGLang runs it on a backend for sparse attention, else ""."""
    name = class_name(config)
    index = config.get("index_topk", 2048 if name in _INDEX_BY_DEFAULT else None)
    with_index = name in SPARSE_WITH_INDEX and index is not None
    return name if with_index or name in SPARSE else ""
