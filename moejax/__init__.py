"""moejax: decode Mixture-of-Experts language models with a paged 2-4 bit KV cache."""
