"""What is looked for in compiled programs is found there."""
from tests.aot_step import kernels_in, large_floats

PROGRAM = """
  %paged_attention.20 = bf16[16,4,8,128]{3,2,1,0:T(8,128)(2,1)S(1)} custom-call(%a, %b), custom_call_target="tpu_custom_call", x={}
  %fused_router = (s32[16,8]{1,0}, f32[16,128]{1,0}) custom-call(%c), custom_call_target="tpu_custom_call"
  %close_page.2 = u32[8,22,128]{2,1,0} custom-call(%d), custom_call_target="AllocateBuffer"
  %mpmd_map.4 = u32[8]{0} custom-call(%d), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/grouped_matmul/mpmd_map"}
  %copy.1 = bf16[128,2048,768]{2,1,0} copy(%e)
  %iota = s32[128,2048,768]{2,1,0} iota()
  ROOT %fusion = f32[] fusion(%f)
"""


def test_kernels_are_custom_calls_of_their_name():
    assert kernels_in(PROGRAM) == {"paged_attention", "fused_router", "grouped_matmul"}


def test_arrays_of_floats_are_found_by_size():
    assert large_floats(PROGRAM, 128 * 2048 * 768) == {(128, 2048, 768)}
    assert large_floats(PROGRAM, 128 * 2048 * 768 + 1) == set()
    assert (16, 128) in large_floats(PROGRAM, 2048)
