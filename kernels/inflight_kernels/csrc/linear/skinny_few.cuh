// The epilogue for very few tokens, of skinny_gemm.cu and few_gemm.cu. sm_90a only.
#pragma once

#include "linear/skinny_gemm.cuh"

// Tokens of one atom: all of them are in the first warp, in the even pairs of its sums.
constexpr int FEW = ATOM;

// The epilogue for up to FEW tokens: a loop over the outputs, whose sums pass through shared
// memory, so that all consumers take part. Unrolled over a thread's sums in registers, it takes
// longer: a launch fetches its instructions anew, and with few tokens that is most of the time
// after the last weights have arrived. In a pair, each block has half of the tile's columns. An
// output is the sum of PARTIAL ones, and called by as many THREADS.
template <typename T, typename Out, int ROWS, bool GATED, bool PAIR, bool SCALED,
          int PARTIAL = PAIR ? 2 : 1, int THREADS = WARPS * 32>
struct FewTokens {
    static constexpr int COLUMNS = GATED ? ROWS / 2 : ROWS;
    static constexpr int OWN = PAIR ? COLUMNS / 2 : COLUMNS;  // columns of this block
    static constexpr int PARTS = GATED ? 2 : 1;

    const float* row_scales;
    const T* bias;
    const T* residual;
    Out* out;
    int m, width;
    float* sums;  // [PARTIAL][FEW][ROWS] in shared memory; in a pair, behind its own the other's

    // Of this thread's first output, loaded while the product is computed.
    float scales[PARTS], biases[PARTS], added;

    __device__ static int column_of(int tile, int rank, int i) {
        return tile * COLUMNS + rank * OWN + i % OWN;
    }

    __device__ float scale_of(int column, int part) const {
        return SCALED ? __ldg(row_scales + min(column, width - 1) + part * width) : 1.0f;
    }

    __device__ float bias_of(int column, int part) const {
        return bias && column < width ? static_cast<float>(bias[column + part * width]) : 0.0f;
    }

    __device__ float residual_of(int token, int column) const {
        if (!residual || token >= m || column >= width) return 0.0f;
        return static_cast<float>(residual[static_cast<long long>(token) * width + column]);
    }

    __device__ void begin(int tile, int rank) {
        const int column = column_of(tile, rank, threadIdx.x);
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            scales[part] = scale_of(column, part);
            biases[part] = bias_of(column, part);
        }
        added = residual_of(threadIdx.x / OWN, column);
    }

    // Writes the sums to shared memory, in a pair to that of the block that has their columns.
    __device__ void put(const float (&acc)[ROWS / 2], int rank) {
        if (threadIdx.x >= 32) return;
        const int lane = threadIdx.x, token = lane / 4;
        if (token >= m) return;
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) {
            const int row = 8 * j + lane % 4 * 2;
            const float2 both = make_float2(acc[4 * j], acc[4 * j + 1]);
            float* const to = sums + token * ROWS + row;
            if constexpr (PAIR) {
                if (row % COLUMNS / OWN != rank) {
                    send(reinterpret_cast<float2*>(to + FEW * ROWS), 1 - rank, both);
                    continue;
                }
            }
            *reinterpret_cast<float2*>(to) = both;
        }
    }

    __device__ void finish(int tile, int rank) {
#pragma unroll 1
        for (int i = threadIdx.x; i < m * OWN; i += THREADS) {
            const int token = i / OWN, column = column_of(tile, rank, i);
            if (column >= width) continue;
            const bool is_first = i == threadIdx.x;
            float value[PARTS];
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const float* const sum =
                    sums + token * ROWS + part * COLUMNS + rank * OWN + i % OWN;
                value[part] = sum[0];
#pragma unroll
                for (int other = 1; other < PARTIAL; other++)
                    value[part] += sum[other * FEW * ROWS];
                if (SCALED) value[part] *= is_first ? scales[part] : scale_of(column, part);
                if (bias) value[part] += is_first ? biases[part] : bias_of(column, part);
            }
            float result = GATED ? silu_mul(value[0], value[PARTS - 1]) : value[0];
            if (residual) result += is_first ? added : residual_of(token, column);
            out[static_cast<long long>(token) * width + column] = narrow<Out>(result);
        }
    }
};
