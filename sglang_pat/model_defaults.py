"""Defaults of transformers' configuration classes, for keys that a `config.json` lacks.

The defaults are listed by `model_type`. The `config.json` of a multimodal model leaves out values
that equal the defaults of its decoder's class. Other files may lack keys, too.
"""

from __future__ import annotations

from typing import Any

_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "tie_word_embeddings",
)
_TABLE = """
ernie4_5          103424 1024  3072 18 16   2 128 131072    - 1
exaone4           102400 4096 16384 32 32  32   -   2048 4096 0
falcon_h1         128000 4096 14336 32 32   8   -   8192    - 0
gemma             256000 3072 24576 28 16  16 256   8192    - 1
gemma2            256000 2304  9216 26  8   4 256   8192 4096 1
gemma3_text       262208 2304  9216 26  8   4 256 131072 4096 1
gemma3n_text      262400 2048     - 35  8   2 256  32768  512 1
gemma4_text       262144 2304  9216 30  8   4 256 131072  512 1
glm4              151552 4096 13696 40 32   2 128 131072    - 0
glm4_moe          151552 4096 10944 46 96   8   - 131072    - 0
glm4v_moe_text    151424 4096 10944 46 96   8   -  65536    - 0
glm4v_text        151552 4096 13696 40 32   2   -  32768    - 0
gpt_oss           201088 2880  2880 36 64   8  64 131072  128 0
llama              32000 4096 11008 32 32   -   -   2048    - 0
llama4_text       202048 5120  8192 48 40   8 128 131072    - 0
minimax_m2        200064 3072  1536 62 48   8 128 196608    - 0
mistral            32000 4096 14336 32 32   8   - 131072 4096 0
mixtral            32000 4096 14336 32 32   8   - 131072    - 0
mllama_text_model 128256 4096 14336 40 32   8   - 131072    - 0
nemotron_h        131072 4096 21504  4 32   8 128   4096    - 0
olmo3              50304 4096 11008 32 32   -   -   2048 4096 0
phimoe             32064 4096  6400 32 32   8   - 131072    - 0
qwen2             151936 4096 22016 32 32  32   -  32768    - 0
qwen2_5_vl_text   152064 8192 29568 80 64   8   -  32768    - 0
qwen2_vl_text     152064 8192 29568 80 64   8   -  32768    - 0
qwen3             151936 4096 22016 32 32  32 128  32768    - 0
qwen3_5_moe_text  248320 2048     - 40 16   2 256  32768    - 0
qwen3_5_text      248320 4096 12288 32 16   2 256  32768    - 0
qwen3_moe         151936 2048  6144 24 32   4   -  32768    - 0
qwen3_next        151936 2048  5632 48 16   2 256  32768    - 0
qwen3_vl_moe_text 151936 2048  5632 24 16  16   - 128000    - 1
qwen3_vl_text     151936 4096 22016 32 32  32 128 128000    - 0
seed_oss          155136 4096 27648 64 80   8 128 524288    - 0
smollm3           128256 2048 11008 36 16   4   -  32768    - 1
starcoder2         49152 3072 12288 30 24   2   -   4096    - 1
"""


def _row(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {k: int(w) for k, w in zip(_KEYS, words, strict=True) if w != "-"}
    return found | {_KEYS[-1]: bool(found[_KEYS[-1]])}


DEFAULTS = {words[0]: _row(words[1:]) for words in map(str.split, _TABLE.strip().splitlines())}
# Keys of attention. For models that are not multimodal, only the defaults of these keys are used.
ATTENTION = ("num_key_value_heads", "head_dim", "sliding_window")
