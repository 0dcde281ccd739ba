// All CPU ops for one instruction set: define SPECDEC_AVX512, SPECDEC_AVX2 or neither, and SPECDEC_TABLE, then include.
#include "vec.h"
#include "linear.h"
#include "attention.h"
#include "elementwise.h"
#include "noise.h"
#include "mass_cut.h"
#include "stack.h"
#include "candidates.h"

static const CpuKernels table = {SPECDEC_TABLE, linear, embedding, attention, rope_write_kv, rms_norm, silu_mul, gumbel_argmax, noise,
                                 mass_cut, stack_bytes, decoder_stack, candidates};
