// Products with the records of grouped.cuh by Hopper's wgmma: the weight is the left operand, in
// registers, where its codes become bfloat16 while the tensor cores multiply those of the columns
// before. sm_90a only.
#pragma once

#include "linear/grouped.cuh"
#include "linear/hopper_linear.cuh"

namespace grouped {

// Tiles of 16 rows whose records of the same columns are copied at once, one behind the other: those
// of a warpgroup. With a copy for each record, products waited for the thread that starts copies.
constexpr int BOX_TILES = 4;

// Copies the records of BOX_TILES tiles from `row_tile` on, which are used once; zeros past the
// last one. See record_map of runtime/tensor_map.py.
__device__ inline void copy_records(void* shared, const TensorMap* map, int row_tile, int chunk,
                                    Barrier* barrier) {
    tma_load_3d_evict_first(shared, map, row_tile, 2 * chunk, barrier);
}

// acc[64 x N] = a[64 x 16] @ b[N x 16]^T, or += if `add`; as `wgmma` of hopper_linear.cuh, with a
// in registers: warp w of the warpgroup has rows 16w to 16w + 15, as `operand` returns them.
template <int N>
__device__ void wgmma_from_registers(float (&acc)[N / 2], const unsigned (&a)[4],
                                     unsigned long long b, bool add);

// HALF = N / 2; A0 to A3, B and ADD are the operands behind them.
#define GROUPED_MULTIPLY(N, HALF, A0, A1, A2, A3, B, ADD)                                         \
    template <>                                                                                   \
    __device__ inline void wgmma_from_registers<N>(float(&acc)[HALF], const unsigned(&a)[4],      \
                                                   unsigned long long b, bool add) {              \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {"                 \
                     PRODUCT_TO_##HALF "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B        \
                     ", add, 1, 1, 0;\n}"                                                         \
                     : PRODUCT_ACC_TO_##HALF("+f")                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                        \
                       "r"(static_cast<int>(add)));                                               \
    }
GROUPED_MULTIPLY(8, 4, 4, 5, 6, 7, 8, 9)
GROUPED_MULTIPLY(16, 8, 8, 9, 10, 11, 12, 13)
GROUPED_MULTIPLY(32, 16, 16, 17, 18, 19, 20, 21)
GROUPED_MULTIPLY(64, 32, 32, 33, 34, 35, 36, 37)
GROUPED_MULTIPLY(128, 64, 64, 65, 66, 67, 68, 69)
GROUPED_MULTIPLY(192, 96, 96, 97, 98, 99, 100, 101)
GROUPED_MULTIPLY(256, 128, 128, 129, 130, 131, 132, 133)
#undef GROUPED_MULTIPLY

// Products of `count` stages of a ring, as they are filled, every EVERYth of them from `slot` on ->
// the first N / 2 of the sums, which are overwritten if `is_first`. A stage has records, of which
// `record` is the address of this warp's in the first stage, and COLUMNS columns of x: two boxes of
// BOX rows of 128 bytes each, of which `tokens` is the descriptor. STAGE: bytes, a multiple of 1024.
// A stage is released when no product reads it any more.
template <class R, int N, int BOX, int STAGE, int STAGES, int EVERY, int SUMS, class Release>
__device__ __forceinline__ void multiply_records(float (&acc)[SUMS], unsigned record,
                                                 unsigned long long tokens, const Table& table,
                                                 Barrier* full, int& slot, int& parity, int count,
                                                 bool is_first, const Release& release) {
    static_assert(STAGE % 1024 == 0 && BOX % 8 == 0, "atoms of the swizzle");
    static_assert(EVERY <= STAGES, "the parity changes at most once from one stage to the next");
    constexpr int STEPS = COLUMNS / STEP, HALF = STEPS / 2;
    float(&own)[N / 2] = *reinterpret_cast<float(*)[N / 2]>(&acc);
    const auto release_by_warp = [&](int slot) {
        __syncwarp();  // all lanes have read their codes
        release(slot);
    };
    int before = -1;
    for (int i = 0; i < count; i++) {
        barrier_wait(full + slot, parity);
        const Reader<R> reader = {record + slot * STAGE, static_cast<int>(threadIdx.x) % 32};
        const unsigned long long x = tokens + slot * (STAGE / 16);
        Codes<R> codes[STEPS / 2];
        reader.read(codes);
        const auto scales = reader.scales();
        Scales of_group;
        unsigned a[2][HALF][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int s = 0; s < HALF; s++) {
                const int step = half * HALF + s;
                if (step * STEP % R::GROUP == 0) of_group = scales.of(step);
                operand<R>(codes[step / 2], step % 2, of_group, table, a[half][s]);
            }
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < HALF; s++)
                wgmma_from_registers<N>(own, a[half][s], x + half * (BOX * 128 / 16) + 2 * s,
                                        !is_first || i != 0 || half != 0 || s != 0);
            wgmma_commit();
            if (half == 0) {
                wgmma_wait<1>();  // of the stage before
                if (before >= 0) release_by_warp(before);
            }
        }
        before = slot;
        slot += EVERY;
        if (slot >= STAGES) {
            slot -= STAGES;
            parity ^= 1;
        }
        wgmma_wait<1>();  // a's registers of the first half are free
    }
    wgmma_wait<0>();
    fence_operand(own);
    if (before >= 0) release_by_warp(before);
}

}  // namespace grouped
