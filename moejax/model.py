"""The one Transformer: `ModelConfig` in, logits out.

    model = Transformer(config, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)                      # graphdef is static, params a pytree
    out = jax.jit(lambda p, tokens: nnx.merge(graphdef, p)(tokens))(params, tokens)
"""
from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax import rope, weight_rules
from moejax.attention import Attend, Attention, Heads, LayerAttend, causal_attention
from moejax.config import ModelConfig, MoE
from moejax.experts import Experts
from moejax.layers import MLP, RMSNorm, normal_param
from moejax.packed import PackedEmbedding, PackedMatrices
from moejax.weight_rules import Formats
from pallas_kernels.fused_router import Routing
from pallas_kernels.packed_weights import BLOCK


class ModelOutput(NamedTuple):
    """What a forward pass gives.

    Attributes:
      logits: float32 [B, T, V]; [B, 1, V] when `logit_positions` was given.
      router: one entry a layer: its `Routing` over the B*T tokens, or None for a dense layer.
    """

    logits: jax.Array
    router: tuple[Routing | None, ...]


class Block(nnx.Module):
    """Norm, attention, norm, MLP or experts; both added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, param_dtype):
        mlp = config.layers[layer].mlp
        self.is_moe = isinstance(mlp, MoE)
        self.attention_norm = RMSNorm((config.hidden_size,), config.rms_norm_eps, param_dtype)
        self.attention = Attention(config, rngs=rngs, param_dtype=param_dtype)
        self.mlp_norm = RMSNorm((config.hidden_size,), config.rms_norm_eps, param_dtype)
        self.mlp: Experts | MLP
        if isinstance(mlp, MoE):
            self.mlp = Experts(config, mlp, rngs=rngs, param_dtype=param_dtype)
        else:
            self.mlp = MLP(config, mlp, rngs=rngs, param_dtype=param_dtype)

    def pack(self, formats: Formats) -> None:
        """Keeps matrices packed from now on: the formats of a layer (`weight_rules.of_layer`)."""
        modules: dict[str, Attention | Experts | MLP] = {"attention": self.attention}
        if isinstance(self.mlp, Experts):
            modules["experts"] = self.mlp
            if self.mlp.has_shared:
                modules["shared"] = self.mlp.shared
        else:
            modules["mlp"] = self.mlp
        for name, module in modules.items():
            if of_module := weight_rules.of_module(formats, name):
                module.pack(of_module)

    @property
    def is_packed(self) -> bool:
        shared = isinstance(self.mlp, Experts) and self.mlp.has_shared and self.mlp.shared.packed
        return self.attention.packed or self.mlp.packed or shared

    def __call__(self, x_BTD, cos, sin, attend: LayerAttend, valid) -> tuple[jax.Array, Routing | None]:
        """x [B, T, D] -> ([B, T, D], routing or None)."""
        return self.feed_forward(x_BTD + self.attention(self.attention_norm(x_BTD), cos, sin, attend), valid)

    def feed_forward(self, x_BTD: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, Routing | None]:
        """The second half of the block."""
        h_BTD = self.mlp_norm(x_BTD)
        if isinstance(self.mlp, Experts):
            out, routing = self.mlp(h_BTD, valid)
            return x_BTD + out, routing
        return x_BTD + self.mlp(h_BTD), None


class Transformer(nnx.Module):
    """A decoder-only Transformer with dense or mixture-of-experts blocks.

    Args:
      config: what it is made of.
      rngs: source of the initial parameters; see `abstract` for a model without any.
      param_dtype: dtype that parameters are kept in. Router weights are float32 in any case.
      dtype: dtype of the computation, `param_dtype` by default.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32, dtype=None):
        self.config = config
        self.dtype = jnp.dtype(param_dtype if dtype is None else dtype)
        self.embedding_VD = normal_param(rngs, (config.vocab_size, config.hidden_size), param_dtype)
        self.blocks = nnx.List(
            [Block(config, i, rngs=rngs, param_dtype=param_dtype) for i in range(config.num_layers)])
        self.final_norm = RMSNorm((config.hidden_size,), config.rms_norm_eps, param_dtype)
        if not config.tie_word_embeddings:
            self.lm_head_VD = normal_param(rngs, (config.vocab_size, config.hidden_size), param_dtype)
        self.head_packed = self.embedding_packed = False  # see `pack`

    def pack(self, formats: Formats) -> None:
        """Keeps matrices packed from now on, in the formats that `weight_rules.resolve` gave for its config. Nothing is trained or
        saved after it. Of tied embeddings the output projection is a packed copy."""
        for layer, block in enumerate(self.blocks):
            block.pack(weight_rules.of_layer(formats, layer))
        self.pack_ends(formats)

    def pack_ends(self, formats: Formats) -> None:
        """`pack` of the output projection and the embedding alone."""
        if "lm_head" in formats:
            columns = jnp.pad(self.head().T, [(0, 0), (0, -self.config.vocab_size % BLOCK)])
            self.packed_head = PackedMatrices(formats["lm_head"], columns[None])
            self.head_packed = True
            if not self.config.tie_word_embeddings:
                del self.lm_head_VD
        if "embedding" in formats:
            self.packed_embedding = PackedEmbedding(formats["embedding"], self.embedding_VD[...])
            self.embedding_packed = True
            del self.embedding_VD

    @property
    def is_packed(self) -> bool:
        """Is anything packed?"""
        return self.head_packed or self.embedding_packed or any(block.is_packed for block in self.blocks)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        attend: Attend | None = None,
        valid: jax.Array | None = None,
        logit_positions: jax.Array | None = None,
    ) -> ModelOutput:
        """Logits of every next token.

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T], positions in the sequence; 0 … T-1 by default.
          attend: attention with a cache, see `moejax.attention`. None: causal attention among the T tokens (with each layer's
            sliding window). "dynamic" RoPE then follows the length of the longest sequence; with an `attend` it has the
            frequencies of max_position_embeddings, because cached keys cannot be turned again.
          valid: bool [B, T]; False marks padding, which must come after the real tokens of its row and wakes no expert.
          logit_positions: int32 [B], one index into T a row: logits for that token only.

        Returns:
          ModelOutput.
        """
        B, T = tokens.shape
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
        length: jax.Array | int = 0
        if attend is None:
            attend = self._attend_all
            length = T if valid is None else jnp.max(jnp.sum(valid, axis=1, dtype=jnp.int32))
        cos, sin = rope.cos_sin(self.config, positions, length)
        x_BTD = self.embed(tokens)
        router = []
        for layer, block in enumerate(self.blocks):
            x_BTD, routing = block(x_BTD, cos, sin, functools.partial(attend, layer), valid)
            router.append(routing)
        if logit_positions is not None:
            x_BTD = jnp.take_along_axis(x_BTD, logit_positions[:, None, None], axis=1)
        x_BTD = self.final_norm(x_BTD)
        return ModelOutput(self.logits(x_BTD), tuple(router))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [...] to [..., D]."""
        if self.embedding_packed:
            return self.packed_embedding(tokens, self.dtype)
        return self.embedding_VD[...][tokens].astype(self.dtype)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Final hidden states [B, T, D] to float32 [B, T, V]."""
        if self.head_packed:
            rows = self.packed_head(x_BTD.reshape(-1, x_BTD.shape[-1]), preferred_element_type=jnp.float32)
            return rows.reshape(*x_BTD.shape[:2], -1)[:, :, :self.config.vocab_size]
        return jnp.einsum("btd,vd->btv", x_BTD, self.head().astype(x_BTD.dtype), preferred_element_type=jnp.float32)

    def head(self) -> jax.Array:
        """The output projection [V, D]; the embedding when they are tied, dequantised when it is packed."""
        if self.head_packed:
            return self.packed_head.weights().dequantize(self.dtype)[0].T[:self.config.vocab_size]
        return (self.embedding_VD if self.config.tie_word_embeddings else self.lm_head_VD)[...]

    def _attend_all(self, layer: int, heads: Heads) -> jax.Array:
        return causal_attention(*heads.qkv(), self.config.layers[layer].sliding_window)


def abstract(config: ModelConfig, *, param_dtype=jnp.float32, dtype=None) -> tuple[nnx.GraphDef, nnx.State]:
    """(graphdef, params) of a model whose parameters are `jax.ShapeDtypeStruct`s: shapes and names without any memory."""
    return nnx.split(nnx.eval_shape(
        lambda: Transformer(config, rngs=nnx.Rngs(0), param_dtype=param_dtype, dtype=dtype)))


def packed_shapes(config: ModelConfig, formats: Formats, *, param_dtype=jnp.float32, dtype=None) -> Transformer:
    """A packed model whose parameters are `jax.ShapeDtypeStruct`s: what it will hold, without any memory."""
    def build() -> Transformer:
        model = Transformer(config, rngs=nnx.Rngs(0), param_dtype=param_dtype, dtype=dtype)
        model.pack(formats)
        return model

    return nnx.eval_shape(build)


def num_params(params: nnx.State) -> int:
    """Number of parameters (elements) of a model's state."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
