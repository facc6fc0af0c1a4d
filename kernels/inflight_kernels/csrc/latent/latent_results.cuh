// What a block of latent attention leaves of a unit: results, or sums of a piece in a slot.
#pragma once

#include "latent/latent_tile.cuh"

namespace attention {

// Calls write(row, column, sums of two columns) for each row of a unit.
template <class S, class Write>
__device__ __forceinline__ void for_sums(const LatentSums<S>& sums, int num_rows,
                                         const Write& write) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int f = 0; f < S::ROWS / 16; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = f * 16 + half * 8 + lane / 4;
            if (row >= num_rows) continue;
#pragma unroll
            for (int n = 0; n < S::COLUMNS / 8; ++n)
                write(row, warp * S::COLUMNS + n * 8 + lane % 4 * 2,
                      make_float2(sums[f][n][2 * half], sums[f][n][2 * half + 1]));
        }
}

// A slot has the sums in the order of threads' fragments, so that each warp writes and reads
// adjacent vectors: of a row, two columns and those 8 further. Where place `index` of QUARTERS for
// each row is in the unit.
struct SlotPlace {
    int row, column;
};

template <class S>
__device__ __forceinline__ SlotPlace slot_place(int index) {
    constexpr int PAIRS = S::COLUMNS / 16;
    const int thread = index % S::THREADS, fragment = index / S::THREADS;
    const int lane = thread % 32, warp = thread / 32;
    const int eight_rows = fragment / PAIRS, pair = fragment % PAIRS;
    return {eight_rows * 8 + lane / 4, warp * S::COLUMNS + pair * 16 + lane % 4 * 2};
}

// Writes the rows of a unit, to `out` or, if the unit is split, to a slot.
template <class S>
__device__ __forceinline__ void leave_sums(const Arguments<typename S::Element>& args,
                                           const Unit& unit, const LatentSums<S>& sums,
                                           const LatentState& state, const LatentMemory<S>& memory,
                                           const Slots<S>& slots) {
    using T = typename S::Element;
    const int row = threadIdx.x / S::LANES;
    const float total = warp_sum<S::LANES>(state.total);
    if (unit.whole()) {
        // Zero for a row without keys.
        if (threadIdx.x % S::LANES == 0) memory.inverses[row] = total > 0.0f ? 1.0f / total : 0.0f;
        __syncthreads();
        for_sums<S>(sums, unit.num_rows, [&](int row, int column, float2 pair) {
            const float inverse = memory.inverses[row];
            *reinterpret_cast<unsigned*>(out_row<S>(args, unit, query_of<S>(args, unit, row)) +
                                         column) = ptx::pack<T>(pair.x * inverse, pair.y * inverse);
        });
        return;
    }
    const int slot = Slots<S>::own(unit);
    if (threadIdx.x % S::LANES == 0 && row < unit.num_rows)
        *slots.state(slot, row) = make_float2(state.max, total);
    // Step by step, as addresses that are all computed before take registers from the loop.
    float* place = slots.row(slot, 0) + 4 * threadIdx.x;
#pragma unroll
    for (int f = 0; f < S::ROWS / 16; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < S::COLUMNS / 8; n += 2) {
                *reinterpret_cast<float4*>(place) =
                    make_float4(sums[f][n][2 * half], sums[f][n][2 * half + 1],
                                sums[f][n + 1][2 * half], sums[f][n + 1][2 * half + 1]);
                place += 4 * S::THREADS;
            }
}

}  // namespace attention
