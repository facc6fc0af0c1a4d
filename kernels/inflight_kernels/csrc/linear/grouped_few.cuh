// Shared by the kernels that stream a weight in records once, for few tokens: x in shared memory,
// and products of records with it.
#pragma once

#include "linear/grouped_planes.cuh"

namespace grouped {

constexpr int HALF_WARP = 16;

constexpr int FEW_TOKENS = 8;  // columns of a product

// Adds the products of a record of each of TILES tiles to sums of 16 rows by FEW_TOKENS, in
// fragments. x: address of this lane's row of ldmatrix.
template <class R, int TILES>
__device__ __forceinline__ void multiply_values(const Loaded<R, false> (&loaded)[TILES],
                                                const Table& table, unsigned x,
                                                float (&sums)[TILES][4]) {
    Codes<R> codes[TILES][COLUMNS / (2 * STEP)];
    typename Loaded<R, false>::Scales scales[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        split<R>(loaded[t].codes, codes[t]);
        scales[t] = loaded[t].scales();
    }
    Scales of_group[TILES];
#pragma unroll
    for (int i = 0; i < COLUMNS / (2 * STEP); i++) {
        unsigned b[4];
        ptx::load_matrices(b, x + i * 64);
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const int step = 2 * i + s;
                if (step * STEP % R::GROUP == 0) of_group[t] = scales[t].of(step);
                unsigned a[4];
                operand<R>(codes[t][i], s, of_group[t], table, a);
                ptx::mma<__nv_bfloat16>(sums[t], a, b[2 * s], b[2 * s + 1]);
            }
    }
}

// Columns of x in shared memory, `phase` of them at a time: in bfloat16, or in planes with what
// their groups are multiplied with. A row, or one of its planes, has 16 bytes more than its
// columns: rows begin in different banks.
template <class R, bool PLANES>
struct SharedX {
    static constexpr int COLUMN_BYTES = PLANES ? 1 : 2;
    static constexpr int TOKENS = PLANES ? PLANE_TOKENS : FEW_TOKENS;

    float* factors;
    float* sums;
    unsigned char* memory;
    int pitch;

    __device__ __forceinline__ SharedX(unsigned char* at, int phase)
        : factors(reinterpret_cast<float*>(at)),
          sums(factors + (PLANES ? phase / PLANE_COLUMNS * FEW_TOKENS : 0)),
          memory(reinterpret_cast<unsigned char*>(sums +
                                                  (PLANES ? phase / R::GROUP * FEW_TOKENS : 0))),
          pitch(COLUMN_BYTES * phase + 16) {}

    // From a column of x on, in a column of a product.
    __device__ __forceinline__ PlanesOfX planes(int column, int token) const {
        return {factors + column / PLANE_COLUMNS * FEW_TOKENS + token,
                sums + column / R::GROUP * FEW_TOKENS + token};
    }

    // Of a row of x, with both planes.
    __device__ __forceinline__ int row_bytes() const { return (PLANES ? 2 : 1) * pitch; }

    // Address of this lane's row of ldmatrix, at a record's columns. Of tokens that there are not,
    // sums of the last one are computed, and not stored.
    __device__ __forceinline__ unsigned row(int m, int record) const {
        const int lane = threadIdx.x % 32, token = min(lane % TOKENS, m - 1);
        return ptx::shared_address(memory) +
               (PLANES ? 2 * token + lane % 8 / PLANE_TOKENS : token) * pitch + lane / 8 * 16 +
               record * (COLUMN_BYTES * COLUMNS);
    }

    // Adds the products of records with x, at this lane's row; `record` is that of their columns.
    template <int TILES>
    __device__ __forceinline__ void multiply(const Loaded<R, PLANES> (&loaded)[TILES],
                                             const Table& table, unsigned row, int record,
                                             float (&sums)[TILES][4]) const {
        if constexpr (PLANES)
            multiply_planes<R, TILES>(loaded, row, planes(record * COLUMNS, 0), sums);
        else
            multiply_values<R, TILES>(loaded, table, row, sums);
    }

    // Begins to load columns `begin` to `end` of x [m, k], m <= TOKENS, whose rows are `stride`
    // values apart. Called by all threads of a block, which `finish` before they read them.
    template <int THREADS>
    __device__ __forceinline__ void load(const __nv_bfloat16* x, int stride, int m, int k,
                                         int begin, int end) const {
        constexpr int WARPS = THREADS / 32;
        static_assert(WARPS >= TOKENS, "each row has one at least");
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        // Each row has the same power of two of warps: loads of one after the other take as long as
        // the product.
        const int bits = 32 - __clz(m - 1), warps = WARPS >> bits;
        const int row = (warp << bits) / WARPS, own = warp & (warps - 1);
        const __nv_bfloat16* const from = x + static_cast<long long>(row) * stride + begin;
        if constexpr (PLANES) {
            const int count = (end - begin + PLANE_COLUMNS - 1) / PLANE_COLUMNS;
            const int half = lane / HALF_WARP;
            for (int i = 2 * own; row < m && i < count; i += 2 * warps) {
                // Half of a warp may have nothing left, and does the same as the other half.
                const int plane = i + half < count ? i + half : i;
                const int place = plane * PLANE_COLUMNS + lane % HALF_WARP * LANE_COLUMNS;
                float values[LANE_COLUMNS];
#pragma unroll
                for (int part = 0; part < 2; part++)
                    unpack<__nv_bfloat16>(begin + place + 8 * part < k
                                              ? load_vector(from + place + 8 * part)
                                              : make_uint4(0, 0, 0, 0),
                                          *reinterpret_cast<float(*)[8]>(values + 8 * part));
                convert<R>(values, memory + 2 * row * pitch + place, pitch,
                           planes(plane * PLANE_COLUMNS, row));
            }
        } else {
            const unsigned to = ptx::shared_address(memory) + row * pitch;
            for (int i = own * 32 + lane; row < m && i < (end - begin) / 8; i += 32 * warps) {
                const int column = 8 * i;
                ptx::copy_async(to + 2 * column, from + min(column, k - 8 - begin),
                                begin + column < k);
            }
        }
    }

    __device__ __forceinline__ static void finish() {
        if constexpr (!PLANES) {
            ptx::commit_copies();
            ptx::wait_copies<0>();
        }
        __syncthreads();
    }
};

// What follows the product: + bias; if gated, silu(gate) * up; + residual. Both may be null.
struct Epilogue {
    const __nv_bfloat16* bias;
    const __nv_bfloat16* residual;
    void* out;
    int width;  // of out
    bool gated, wide;

    // What is added to the sums of an output, or to the output. Its load takes as long as all that
    // follows a product.
    struct Added {
        float bias[2];  // of gate and of up, if gated
        float residual;
    };

    __device__ __forceinline__ Added added(int row, int column) const {
        Added found = {};
        if (bias) {
            found.bias[0] = static_cast<float>(bias[column]);
            if (gated) found.bias[1] = static_cast<float>(bias[column + width]);
        }
        if (residual)
            found.residual =
                static_cast<float>(residual[static_cast<long long>(row) * width + column]);
        return found;
    }

    // sum_of(i): of the weight's row of this column of out, then of that of up.
    template <class SumOf>
    __device__ __forceinline__ void store(int row, int column, const Added& added,
                                          const SumOf& sum_of) const {
        float value = sum_of(0) + added.bias[0];
        if (gated) value = value / (1.0f + __expf(-value)) * (sum_of(1) + added.bias[1]);
        store_sum(out, static_cast<long long>(row) * width + column, value + added.residual, wide);
    }
};

}  // namespace grouped
