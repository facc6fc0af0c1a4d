// A token's row of the projections before latent attention (MLA, arXiv:2405.04434): its key for the
// cache, and the rotated part of its queries.
#pragma once

#include "common.cuh"

namespace latent {

constexpr int RANK = 512;    // of the latent part of a key
constexpr int ROTATED = 64;  // columns of a key, and of each head of q, with positions
constexpr int KEY = RANK + ROTATED;

// Operands of a step; strides in elements, from token to token.
template <typename T>
struct Rows {
    const T* q;     // [T, H, nope + ROTATED]
    const T* kv_a;  // [T, KEY]: a latent, then what is rotated
    long long q_stride, kv_a_stride;
    int nope;    // columns of a head of q without positions
    T* queries;  // [T, H, KEY]; only the last ROTATED columns of a head are written here
    int num_heads;
    T* cache;  // [num_blocks, block_size, KEY]
    long long block_stride;
    int block_size;
    const long long* slots;  // [T]; negative ones are not written
    const long long* positions;
    const float* cos;  // [positions, ROTATED]; the second half of `sin` has the positive sign
    const float* sin;
    const float* weight;  // [RANK], of the norm of latents
    float eps;
};

// Processes a token with all threads of a block, at least 64. The first warp norms the latent; in
// the others, four lanes rotate a head of q, or the key, and each has a vector of the first half
// and the corresponding one of the second. `history_ready`: slots and positions are (common.cuh);
// otherwise the caller has waited for the preceding kernel.
template <typename T>
__device__ __forceinline__ void write_row(const Rows<T>& rows, int token, bool history_ready) {
    constexpr int N = VECTOR<T>, HALF = ROTATED / 2, LANES = HALF / N;
    constexpr int VECTORS = RANK / (32 * N);  // of a lane
    static_assert(VECTORS * 32 * N == RANK, "a warp has a latent in whole vectors");

    const int lane = threadIdx.x % 32;
    const bool norms = threadIdx.x < 32;
    float w[VECTORS][N];
    if (norms) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) load_floats(rows.weight + (i * 32 + lane) * N, w[i]);
    }
    const long long slot = load_l2(rows.slots + token);
    T* const key = slot < 0
                       ? nullptr
                       : rows.cache + static_cast<int>(slot) / rows.block_size * rows.block_stride +
                             static_cast<int>(slot) % rows.block_size * KEY;
    const T* const kv_a = rows.kv_a + token * rows.kv_a_stride;
    if (norms) {
        if (history_ready) pdl_wait();
        float x[VECTORS][N];
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) unpack<T>(load_vector(kv_a + (i * 32 + lane) * N), x[i]);
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
#pragma unroll
            for (int j = 0; j < N; j++) squares += x[i][j] * x[i][j];
        const float scale = rsqrtf(warp_sum(squares) / RANK + rows.eps);
        if (key == nullptr) return;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
#pragma unroll
            for (int j = 0; j < N; j++) x[i][j] *= scale * w[i][j];
            store_vector(key + (i * 32 + lane) * N, pack<T>(x[i]));
        }
        return;
    }

    const int column = lane % LANES * N;
    const long long angles = load_l2(rows.positions + token) * ROTATED + column;
    float c[N], s[N];
    load_floats(rows.cos + angles, c);
    load_floats(rows.sin + angles + HALF, s);
    if (history_ready) pdl_wait();
    const int heads_at_once = (blockDim.x - 32) / LANES;
    // The key follows the heads of q.
    for (int head = (threadIdx.x - 32) / LANES; head <= rows.num_heads; head += heads_at_once) {
        const bool is_key = head == rows.num_heads;
        if (is_key && key == nullptr) continue;
        const T* const from =
            is_key ? kv_a + RANK
                   : rows.q + token * rows.q_stride + head * (rows.nope + ROTATED) + rows.nope;
        T* const to = is_key ? key + RANK
                             : rows.queries +
                                   (static_cast<long long>(token) * rows.num_heads + head) * KEY +
                                   RANK;
        float a[N], b[N];
        unpack<T>(load_vector(from + column), a);
        unpack<T>(load_vector(from + column + HALF), b);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float turned = a[j] * c[j] - b[j] * s[j];
            b[j] = b[j] * c[j] + a[j] * s[j];
            a[j] = turned;
        }
        store_vector(to + column, pack<T>(a));
        store_vector(to + column + HALF, pack<T>(b));
    }
}

}  // namespace latent
