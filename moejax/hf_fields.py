"""Reading of a config.json that forgets nothing: a key that is neither read nor known to have no bearing on the forward pass is
refused by name, because a switch that is skipped gives fluent nonsense."""
from __future__ import annotations

import logging
from typing import Any

from moejax.config import require_int

log = logging.getLogger(__name__)

# Bookkeeping, training and generation settings: none changes what the forward pass computes.
HARMLESS = {
    "_name_or_path", "architectures", "attention_dropout", "dtype", "torch_dtype", "initializer_range",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "transformers_version", "use_cache", "model_type",
    "pretraining_tp", "return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores",
    "torchscript", "use_bfloat16", "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type",
    "tokenizer_class", "prefix", "task_specific_params", "finetuning_task", "do_sample", "temperature", "top_k", "top_p",
    "typical_p", "num_beams", "num_beam_groups", "num_return_sequences", "diversity_penalty", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "early_stopping", "max_length",
    "min_length", "max_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "exponential_decay_length_penalty", "remove_invalid_values", "sep_token_id", "decoder_start_token_id", "pruned_heads",
    "tf_legacy_loss", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "_experts_implementation", "experts_implementation",
}
# Keys that other architectures read; fine as long as they say "off".
OFF_ONLY = {
    "quantization_config", "attention_bias", "mlp_bias", "qkv_bias", "clip_qkv", "use_sliding_window", "sliding_window",
    "layer_types", "add_cross_attention", "is_decoder", "is_encoder_decoder", "cross_attention_hidden_size",
    "tie_encoder_decoder", "rope_scaling", "per_layer_config", "auto_map",
}
_REQUIRED = object()


class Fields:
    """The keys of a config.json; remembers which were read."""

    def __init__(self, data: dict[str, Any]):
        self.data = data
        self.read: set[str] = set()

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:
        """Value of the one setting that goes by any of `names`; absent and null give `default`, or an error without one."""
        self.read.update(names)
        found = {name: self.data[name] for name in names if self.data.get(name) is not None}
        if not found:
            if default is _REQUIRED:
                raise ValueError(f"config.json: {names[0]} is missing")
            return default
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            raise ValueError(f"config.json: {found} disagree")
        return values[0]

    def int(self, *names: str, default: Any = _REQUIRED, least: int = 1) -> int:
        value = self.get(*names, default=default)
        require_int(f"config.json: {names[0]}", value, least)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default=None)
        if value is None:
            log.info("config.json has no %s: using the default of %s, %s", name, self.data["model_type"], default)
            return default
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {name}={value!r}: must be true or false")
        return value

    def finish(self) -> None:
        """Raises ValueError naming every key that nothing has read."""
        unread = set(self.data) - self.read - HARMLESS
        on = sorted(name for name in unread if name not in OFF_ONLY or self.data[name] not in (None, False))
        if on:
            raise ValueError(f"config.json: model_type {self.data['model_type']} does not support "
                             + ", ".join(f"{name}={self.data[name]!r}" for name in on))
