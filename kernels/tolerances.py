"""How far a backend may be from the reference, per op, and why. Errors are absolute, in units of the reference's largest value."""

from __future__ import annotations

TOLERANCE: dict[str, float] = {
    "rms_norm": 2e-6,  # order of the sum of squares
    "add_rms_norm": 2e-6,
    "silu_mul": 1e-6,  # exp good to 2 ulp
    "rope_write_kv": 3e-7,  # a fused multiply-add in the rotation at most
    "move_kv": 0.0,  # copies
    "tree_attention": 5e-6,  # exp and the order inside a tile
    "prefill_attention": 8e-3,  # bfloat16: the weights of the keys are rounded to it, and the result
    "dense_linear": 5e-6,  # order of the sum over K
    "tiled_linear": 5e-6,  # order of the sum over K, 24-bit fixed-point activations
    "decoder_stack": 1e-4,  # several layers of all of the above; bits equal those of the single ops of the same variant
    "draft_pass": 1e-4,  # as decoder_stack
    "tiled_embedding": 0.0,  # the same two roundings
    "tree_walk": 0.0,  # integers
    "draft_topk": 1e-5,  # order of the sum over H, then exp; ids exactly: inputs avoid such ties
    "tree_layout": 0.0,  # integers
    "pad_batch": 0.0,  # copies
    "compaction_slots": 0.0,  # integers
    "gather_pairs": 0.0,  # copies
    "draft_grow": 0.0,  # the same products, rounded one by one
    "draft_layout": 0.0,  # integers, and copies
    "accepted_pairs": 0.0,  # integers
    "tree_build": 0.0,  # integers, and copies of scores
    "gumbel_noise": 3e-7,  # float64 logs rounded once: at most one float32 ulp apart
    "philox_uniform": 0.0,  # integers, exact scaling, one rounding
    "mass_cut": 0.0,  # sets; integer sums, and inputs whose mass does not come within rounding of p
    "rms_norm_fp8": 0.072,  # a norm one ulp off may round to the next code, of which the last is 32 of 448; see test_fused_fp8.py
    "add_rms_norm_fp8": 0.072,
    "silu_mul_fp8": 0.072,
    "clamped_swiglu": 1e-6,  # exp good to 2 ulp
    "norm_rope_write_kv": 2e-6,  # order of the sum of squares
    "coupled_verify": 2e-6,  # the log-sum-exp: order of the sum; token ids exactly
    "gumbel_argmax": 0.0,  # token ids; inputs avoid ties closer than the noise's last bit
    "fp8_linear": 8e-3,  # one bfloat16 step, where a sum in another order rounds to a neighbour; closer in tests/kernels/test_gemm.py
    "int4_linear": 8e-3,  # as fp8_linear; kernels may round (code - zero) * scale to the dtype of the activations
    "quantize_fp8": 0.0,  # the same divisions and roundings
    "fp8_fp8_linear": 8e-3,  # as fp8_linear
    "moe_route": 1e-6,  # exp, order of the sum; ids exactly
    "moe_experts": 2e-5,  # order of the sums over K, twice in a row
}
