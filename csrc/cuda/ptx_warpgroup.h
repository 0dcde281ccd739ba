// Products of a warpgroup, which only sm_90a has: four neighbouring warps, the first of them at a multiple of four, multiply tiles that lie in
// shared memory. tests/kernels/cuda/emulator_warpgroup.h has the same functions in plain C++.
#pragma once

#include "ptx_hopper.h"

namespace specdec {

// A tile of rows of 128 bytes, the 16 byte parts of row r exchanged by r % 8 as copies by a map leave them: eight rows are 1024 bytes.
// `from`: where its first column is, which may be 32, 64 or 96 bytes into the row.
SPECDEC_DEVICE uint64_t tile_of_rows(const void* from) {
  constexpr uint64_t exchanged_in_128 = 1ull << 62, eight_rows = uint64_t(1024 >> 4) << 32;
  return exchanged_in_128 | eight_rows | (shared_address(from) & 0x3ffff) >> 4;
}

// Registers and shared memory as they are now go into the products behind this.
SPECDEC_DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
SPECDEC_DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
SPECDEC_DEVICE void wait_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Sums of products that were waited for. To the compiler they were there before; it must not read them earlier than here.
template <int COUNT>
SPECDEC_DEVICE void use_sums(float (&sums)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

#define SPECDEC_FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SPECDEC_SIXTEEN(i) SPECDEC_FOUR(i), SPECDEC_FOUR(i + 4), SPECDEC_FOUR(i + 8), SPECDEC_FOUR(i + 12)
#define SPECDEC_EIGHT(i) SPECDEC_FOUR(i), SPECDEC_FOUR(i + 4)
#define SPECDEC_NAMES_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define SPECDEC_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define SPECDEC_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define SPECDEC_NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define SPECDEC_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define SPECDEC_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define SPECDEC_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define SPECDEC_NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"

// sums (+)= 64 tokens · WIDTH rows of a weight, 32 columns of e4m3. Thread t of the warpgroup: tokens 16 (t / 32) + t % 32 / 4 and 8 more; of
// each eight rows of the weight 2 (t % 4) and the next; sums[4 j + 2 later token + later row]. `thread` is for the emulator.
#define SPECDEC_PRODUCT(WIDTH, NAMES, TOKENS, WEIGHTS, ADD, ...)                                                                          \
  SPECDEC_DEVICE void multiply_e4m3(float (&sums)[WIDTH / 2], const void* tokens, const void* weights, bool add, int) {                 \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #WIDTH "k32.f32.e4m3.e4m3 {" NAMES "}, " TOKENS ", " WEIGHTS ", add, 1, 1;\n}\n"     \
                 : __VA_ARGS__                                                                                                           \
                 : "l"(tile_of_rows(tokens)), "l"(tile_of_rows(weights)), "r"(int(add)));                                                \
  }

SPECDEC_PRODUCT(32, SPECDEC_NAMES_0 SPECDEC_NAMES_8, "%16", "%17", "%18", SPECDEC_SIXTEEN(0))
SPECDEC_PRODUCT(48, SPECDEC_NAMES_0 SPECDEC_NAMES_8 SPECDEC_NAMES_16, "%24", "%25", "%26", SPECDEC_SIXTEEN(0), SPECDEC_EIGHT(16))
SPECDEC_PRODUCT(64, SPECDEC_NAMES_0 SPECDEC_NAMES_8 SPECDEC_NAMES_16 SPECDEC_NAMES_24, "%32", "%33", "%34", SPECDEC_SIXTEEN(0),
                SPECDEC_SIXTEEN(16))
SPECDEC_PRODUCT(80, SPECDEC_NAMES_0 SPECDEC_NAMES_8 SPECDEC_NAMES_16 SPECDEC_NAMES_24 SPECDEC_NAMES_32, "%40", "%41", "%42",
                SPECDEC_SIXTEEN(0), SPECDEC_SIXTEEN(16), SPECDEC_EIGHT(32))
SPECDEC_PRODUCT(96, SPECDEC_NAMES_0 SPECDEC_NAMES_8 SPECDEC_NAMES_16 SPECDEC_NAMES_24 SPECDEC_NAMES_32 SPECDEC_NAMES_40, "%48", "%49",
                "%50", SPECDEC_SIXTEEN(0), SPECDEC_SIXTEEN(16), SPECDEC_SIXTEEN(32))
SPECDEC_PRODUCT(112, SPECDEC_NAMES_0 SPECDEC_NAMES_8 SPECDEC_NAMES_16 SPECDEC_NAMES_24 SPECDEC_NAMES_32 SPECDEC_NAMES_40 SPECDEC_NAMES_48,
                "%56", "%57", "%58", SPECDEC_SIXTEEN(0), SPECDEC_SIXTEEN(16), SPECDEC_SIXTEEN(32), SPECDEC_EIGHT(48))
SPECDEC_PRODUCT(128,
                SPECDEC_NAMES_0 SPECDEC_NAMES_8 SPECDEC_NAMES_16 SPECDEC_NAMES_24 SPECDEC_NAMES_32 SPECDEC_NAMES_40 SPECDEC_NAMES_48
                    SPECDEC_NAMES_56,
                "%64", "%65", "%66", SPECDEC_SIXTEEN(0), SPECDEC_SIXTEEN(16), SPECDEC_SIXTEEN(32), SPECDEC_SIXTEEN(48))

}  // namespace specdec
