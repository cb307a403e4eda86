"""A few calls of the Hopper attention kernel for a profiler: ncu … python tests/bench/attention_profile.py k_bits v_bits batch kv_len"""
import sys

import jax

from pallas_kernels import KVFormat
from pallas_kernels.paged_attention import mosaic_gpu
from tests.bench.attention_gpu import NONE, inputs

k_bits, v_bits, batch, kv_len = map(int, sys.argv[1:5])
fmt = KVFormat(k_bits=k_bits, v_bits=v_bits, layout="mma_sm90")
args = inputs(fmt, batch, kv_len)
step = jax.jit(lambda *a: mosaic_gpu.paged_attention(*a, **NONE, kv_format=fmt, sm_scale=128**-0.5))
for _ in range(3):
    jax.block_until_ready(step(*args))
