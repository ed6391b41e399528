"""Tables of keys by their meaning: keys of API requests, and keys of records of such requests.

If a key changes a prompt, a length, a number of requests or a time, `request_log.py` either reads
the key or refuses the record with a message that names the key. A test compares the tables with
SGLang's request classes.
"""

from __future__ import annotations

import re
from functools import lru_cache


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# --- a request ---

# Keys that may hold a prompt. The first key that holds one counts. The last three occur in data
# sets.
PROMPTS = _words(
    "messages input_ids prompt_token_ids prompt input text conversations conversation instruction"
)
LIMITS = _words(
    "max_completion_tokens max_output_tokens max_tokens max_new_tokens num_predict max_gen_toks"
)
COPIES = _words("n best_of")
# Objects that may have the keys above, too.
NESTED = _words("sampling_params options extra_body generation_config inference_config")
MEDIA = _words("images image_data video_data audio_data")
APART = _words("lora_path lora_id cache_salt extra_key")  # if one differs, two requests share no KV
_PROMPT_PARTS = _words(
    "system instructions suffix tools functions tool_choice echo documents chat_template_kwargs "
    "model"
)
# Keys that, if set, make a record impossible to replay -> why.
REFUSED = {
    "input_embeds": "the prompt is not text but embeddings",
    "prompt_embeds": "the prompt is not text but embeddings",
    "positional_embed_overrides": "the prompt is not text but embeddings",
    "session_params": "the prompt continues a session of the server",
    "previous_response_id": "the prompt continues an answer that the server keeps",
    "conversation": "the prompt continues a conversation that the server keeps",
    "context": "the prompt continues a conversation that the server keeps",
    "beam_width": "beam search is not simulated",
    "use_beam_search": "beam search is not simulated",
    "multi_item_delimiter_indices": "it scores and generates nothing",
    "token_indices_to_pool": "it scores and generates nothing",
}
# Keys that decide which tokens are generated, where an answer ends, or how it is returned, routed
# or labelled. They are not read, because the log has the resulting lengths. Some of them change how
# many tokens media have, which `usage` counts. Without `usage`, a note says that this number is a
# guess.
NO_EFFECT = _words(
    """
    temperature top_p top_k min_p typical_p frequency_penalty presence_penalty repetition_penalty
    logit_bias seed sampling_seed custom_params custom_logit_processor watermark
    min_tokens min_new_tokens stop stop_sequences stop_token_ids stop_regex ignore_eos no_stop_trim
    skip_special_tokens spaces_between_special_tokens stream_interval response_format json_schema
    regex ebnf ebnf_full_assistant structural_tag format output_config parallel_tool_calls
    max_tool_calls disable_parallel_tool_use truncation continue_final_message
    add_generation_prompt prefix
    reasoning reasoning_effort thinking think task require_reasoning max_thinking_tokens
    separate_reasoning stream_reasoning verbosity raw template
    stream stream_options logprobs top_logprobs prompt_logprobs return_logprob logprob_start_len
    top_logprobs_num token_ids_logprob return_text_in_logprobs return_flat_raw_top_logprobs
    return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 return_sampling_mask
    sampling_logprobs_mode return_hidden_states return_routed_experts routed_experts_start_len
    return_indexer_topk return_cached_tokens_details return_spec_tokens_details return_token_ids
    return_prompt_token_ids return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext
    return_bytes return_entropy include background store service_tier
    user metadata rid id request_id session_id user_id priority routing_key conversation_id
    custom_labels no_logs log_metrics keep_alive betas safety_identifier prompt_cache_key
    prompt_cache_retention prediction
    bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank
    data_parallel_rank disagg_prefill_dp_rank http_worker_ipc external_trace_header kv_hints
    encoder_urls mm_data_mooncake num_items_assigned need_wait_for_mm_inputs received_time
    modalities mm_hashes mm_content_hashes use_audio_in_video video_config images_config
    mm_processor_kwargs max_dynamic_patch min_dynamic_patch image_max_dynamic_patch
    video_max_dynamic_patch
    stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized
    is_single batch_size parallel_sample_num
    """
)
KNOWN = frozenset(
    (*PROMPTS, *LIMITS, *COPIES, *NESTED, *MEDIA, *APART, *_PROMPT_PARTS, *REFUSED, *NO_EFFECT)
)

# --- a record. Its keys are compared as `plain` writes them. ---


@lru_cache(maxsize=4096)
def plain(key: str) -> str:
    """Return a key's letters and digits in lower case, so `startTime` equals `start_time`.

    The prefix of OpenTelemetry's keys (`gen_ai.usage.input_tokens`) is left out.
    """
    return re.sub(r"[^0-9a-z]", "", str(key).lower().removeprefix("gen_ai.usage."))


# Keys of a record's time. The first one that the record has, at any depth, counts.
TIMES = _words(
    """
    requestreceivedts receivedat receivedtime requestreceivedat requestreceived arrivaltime
    arrivedat arrival starttime startedat startts starttimestamp inittimestamp requesttime
    requestedat requesttimestamp requeststarttime requeststart requestcreatedat requestts
    requestdate begintime starteddatetime timestamp time ts datetime eventtime timeiso8601 timelocal
    msec created createdat createdtime date start asctime realtimetimestamp logtime
    """
)
# Keys of TIMES under which some logs have the duration of a request instead.
DURATIONS = _words("requesttime time msec")
# Times of nginx, which logs a request when its answer is complete.
OF_NGINX = _words("timeiso8601 timelocal msec")
_UNITS = {
    "unixnano": "ns", "nanoseconds": "ns", "nanos": "ns", "nano": "ns", "ns": "ns",
    "microseconds": "us", "micros": "us", "micro": "us", "us": "us",
    "milliseconds": "ms", "millis": "ms", "ms": "ms",
    "seconds": "s", "secs": "s", "sec": "s", "s": "s",
}  # fmt: skip


@lru_cache(maxsize=4096)
def time_name(name: str) -> tuple[str, str | None]:
    """Split a plain name into one of `TIMES` and the unit at its end, or return (name, None)."""
    if name not in TIMES:
        for suffix, unit in _UNITS.items():
            bare = name.removesuffix(suffix).removesuffix("epoch").removesuffix("unix")
            if name.endswith(suffix) and bare in TIMES:
                return bare, unit
    return name, None


OF_SPANS = re.compile(r"(?:gen_ai|llm|openinference|input|output)\.")  # other attributes of spans
REQUEST_IDS = _words("requestid xrequestid rid callid litellmcallid id")
USAGES = _words("usage tokenusage usagemetadata usagedetails metainfo")
OUTPUT_TOKENS = frozenset(
    _words(
        "completiontokens outputtokens evalcount outputlength generatedtokens responsetokens "
        "numoutputtokens completiontokencount outputtokencount candidatestokencount outputlen "
        "llmtokencountcompletion tokensout tokenscompletion numberoutputtokens"
    )
)
INPUT_TOKENS = frozenset(
    _words(
        "prompttokens inputtokens promptevalcount inputlength numinputtokens numprompttokens "
        "prompttokencount inputtokencount llmtokencountprompt tokensin tokensprompt "
        "numberinputtokens"
    )
)
# Keys of counts that `inputtokens` does not include.
CACHED_TOKENS = _words("cachereadinputtokens cachecreationinputtokens")
MEDIA_TOKENS = _words("imagetokens audiotokens videotokens")
ANSWER = "response"
ANSWERS = frozenset(
    _words(
        "response responses responsebody responsepayload resp answer output outputs out result "
        "completion reply chunks"
    )
)
# Keys that may hold an answer's text, or a list of the texts of several answers. The first counts.
ANSWER_TEXTS = _words(
    "output response completion outputs responses generated_text output_text generation answer"
)
PATHS = _words("path url uri endpoint route requestpath requesturi requesturl calltype")
GENERATES_NOTHING = re.compile(
    r"embed|rerank|score|loglikelihood|classif|moderation|tokeni[sz]e|transcri|speech|images/|/models\b|health"
    r"|metrics|count_tokens|/encode|batches|/files\b",
    re.IGNORECASE,
)
# Kinds of records that are not calls of a model. Tracers also record the steps around a call, and
# such a record may repeat the prompt of the call. LangSmith has the kind in `run_type` (only "llm"
# is a call), OpenInference and Datadog in `span_kind`, and Langfuse in `type`, in capitals.
STEPS = frozenset(
    _words(
        "span event trace chain agent tool retriever retrieval workflow task evaluator guardrail "
        "prompt parser reranker embedding"
    )
)
STATUSES = _words("statuscode httpstatus responsestatus responsecode status")
# Keys whose values are not searched for a request or an answer: the values are parts of a prompt or
# of an answer's text, or have nothing to do with either.
OPAQUE = frozenset(
    _words(
        "messages tools functions content choices headers requestheaders responseheaders logprobs "
        "samplingparams metadata instructions error"
    )
)
# Gateways and HTTP archives have a body as text, under a path that ends in one of these pairs.
BODIES = {("body", "content"), ("response", "content"), ("content", "text"), ("postdata", "text")}
_OPTIONS = _words("optionalparams inferenceconfig invocationparams modelparameters toolconfig")
OF_RECORDS = OPAQUE | ANSWERS | OUTPUT_TOKENS | INPUT_TOKENS
OF_RECORDS |= {*map(plain, ANSWER_TEXTS), *TIMES, *USAGES, *STATUSES, *PATHS, *_OPTIONS, "message"}
