"""Architectures without a family, by Hugging Face's `model_type`, and the reason for each."""

KIMI_DELTA = "most of its layers are Kimi delta attention, which is not built here"
BLOCKS = "an indexer chooses blocks of keys for its grouped queries, which is not built here"
CHUNKS = "some of its layers have no positions or see a chunk, and its gates multiply the experts' inputs"
NO_NAMES = "the names of the parts around its text model are not written yet, as they are for Qwen3-VL and others"
LATE_NORMS = "it norms what a layer's parts return, Megatron's layers only what these are given"
SOFTMAX_BIAS = "its router adds a bias to softmax scores, which Megatron has for sigmoid scores only"
TURNED_FIRST = "it norms queries and keys after they are turned, Megatron before"
MULTIPLIERS = "it multiplies embeddings, scores, residuals and logits by factors of its own"
WINDOWS = "some of its layers see a window and the others all positions, in another order than every second one"
BY_POSITION = "it scales queries by their position (llama_4_scaling_beta), which is not built here"
NO_ORACLE = "transformers has no class of it that its logits could be compared with"
STEP = "some of its layers see a window and have other numbers of heads"
MAMBA = "most of its layers are Mamba-2, which is not built here"
NOT_WRITTEN = "no file of rules is written for it yet"

REFUSED: dict[str, str] = {
    "afmoe": LATE_NORMS,
    "apertus": "its MLP has no gate (xIELU)",
    "axk1": LATE_NORMS,
    "bailing_hybrid": KIMI_DELTA,
    "bailing_moe": NO_ORACLE,
    "bailing_moe_v2": NO_ORACLE,
    "cohere2_moe": "its attention and its experts work side by side on one norm's output",
    "deepseek_v4": "it has compressed attention, hyper-connections and routing by hash, none of which is built here",
    "deepseek_v41": "it has compressed attention, hyper-connections and tables of n-grams, none of which is built here",
    "ernie4_5": "it turns neighbouring numbers of a head as pairs, for which no rules are written",
    "ernie4_5_moe": SOFTMAX_BIAS,
    "ernie4_5_vl_moe": SOFTMAX_BIAS,
    "exaone4": LATE_NORMS,
    "exaone_moe": WINDOWS,
    "flex_olmo": LATE_NORMS,
    "gemma3": LATE_NORMS,
    "gemma3_text": LATE_NORMS,
    "gemma4": LATE_NORMS,
    "gemma4_text": LATE_NORMS,
    "glm4": LATE_NORMS,
    "glm5_next": "it has Kimi delta attention in most layers, and hyper-connections, neither of which is built here",
    "granite": MULTIPLIERS,
    "granitemoe": MULTIPLIERS,
    "granitemoehybrid": MAMBA,
    "granitemoeshared": MULTIPLIERS,
    "hunyuan_v1_dense": TURNED_FIRST,
    "hunyuan_v1_moe": TURNED_FIRST,
    "hy_v3": NOT_WRITTEN,
    "hy_v4": "it has hyper-connections, and sinks and gates in latent attention, none of which is built here",
    "kimi_k3": KIMI_DELTA,
    "kimi_linear": KIMI_DELTA,
    "laguna": STEP,
    "lfm2_moe": "most of its layers are short convolutions, which are not built here",
    "llama4": CHUNKS,
    "llama4_text": CHUNKS,
    "longcat_flash": "a layer has two attentions, and some of its experts return their input",
    "mellum": WINDOWS,
    "mimo_v2_flash": WINDOWS,
    "minimax": "most of its layers are lightning attention, which is not built here",
    "minimax_m1": "most of its layers are lightning attention, which is not built here",
    "minimax_m3": BLOCKS,
    "minimax_m3_vl": BLOCKS,
    "ministral": WINDOWS,
    "ministral3": BY_POSITION,
    "mistral3": NO_NAMES,
    "mistral4": BY_POSITION,
    "mistral_large4": "some of its layers have no positions, and some share keys and values, which is not built here",
    "nemotron_h": MAMBA,
    "olmo2": LATE_NORMS,
    "olmo3": LATE_NORMS,
    "phi3": NOT_WRITTEN,
    "phimoe": "it has LayerNorms with biases and a router of its own (sparsemixer)",
    "qwen2_5_vl": NO_NAMES,
    "qwen3_omni_moe": "its text model is in a thinker beside a talker, whose names are not written yet",
    "qwen4_exp": "it has hyper-connections and embeddings of n-grams, neither of which is built here",
    "smollm3": "some of its layers have no positions",
    "step3p5": STEP,
    "step3p7": STEP,
}
"""Reason why a config.json with this `model_type` is refused: a clause at the end of the error message."""
