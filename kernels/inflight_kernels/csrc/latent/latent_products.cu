// Products of latent attention (MLA, arXiv:2405.04434) that have a matrix for each head: queries
// before attention are multiplied by the up-projection of keys, and sums of latents after it by
// that of values, so that attention itself never expands the cache.
//
// A block has a slab of a head's matrix, which it reads once, before the preceding kernel has
// ended, and keeps in registers for all tokens. x goes from memory to registers in vectors of 16
// bytes: of each 32 columns a lane has 8 consecutive ones, and so has it of the matrix. A product
// does not depend on the order of columns, as long as both operands have the same.
//
// The order of sums is fixed: a token's result does not depend on the others.
#include "attention/attention_ptx.cuh"
#include "common.cuh"
#include "latent/latent_row.cuh"

namespace latent {

constexpr int WARPS = 8;

// Of x: 16 tokens and 32 columns, for two steps of mma.m16n8k16.
struct Columns {
    uint4 rows[2];  // of the tokens lane / 4 and lane / 4 + 8: columns 8 * (lane % 4) and following

    template <typename T>
    __device__ __forceinline__ void load(const T* x, long long stride, int num_tokens) {
        const int token = threadIdx.x % 32 / 4;
        x += token * stride + threadIdx.x % 4 * 8;
#pragma unroll
        for (int half = 0; half < 2; half++)
            rows[half] = token + half * 8 < num_tokens ? load_vector(x + half * 8 * stride)
                                                       : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void fragment(unsigned (&a)[4], int step) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            a[half] = step ? rows[half].z : rows[half].x;
            a[2 + half] = step ? rows[half].w : rows[half].y;
        }
    }
};

// The column of 32 that is the k-th one of a step of mma, as Columns has them.
__device__ __forceinline__ int column_of(int step, int k) {
    return k % 8 / 2 * 8 + step * 4 + k / 8 * 2 + k % 2;
}

}  // namespace latent

// queries[:, :, :RANK] = q[:, :, :NOPE] @ k_up, and what latent::write_row does, in one launch: the
// last num_rows blocks, one for each token, or none. Of the others, block b has head b / SLABS %
// num_heads and SLAB columns of its matrix; all blocks with the same ones share the tokens.
//
//   k_up [H, NOPE, RANK], which no kernel writes
//   other arguments as in latent::Rows
template <typename T, int NOPE>
__global__ void __launch_bounds__(32 * latent::WARPS)
    absorb(const T* q, long long q_stride, const T* kv_a, long long kv_a_stride, T* queries,
           int num_heads, T* cache, long long block_stride, int block_size, const long long* slots,
           const long long* positions, const float* cos, const float* sin, const float* weight,
           float eps, bool history_ready, const T* k_up, int num_tokens, int num_rows) {
    using namespace latent;
    constexpr int SLAB = 8 * WARPS, SLABS = RANK / SLAB, PITCH = SLAB + 8;
    constexpr int GROUPS = NOPE / 32;                      // of columns of x
    constexpr int FRAGMENTS = 2, TOKENS = 16 * FRAGMENTS;  // that a block multiplies at a time
    static_assert(GROUPS * 32 == NOPE, "vectors cover 32 columns");
    __shared__ __align__(16) T matrix[NOPE * PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int product_blocks = gridDim.x - num_rows;

    if (blockIdx.x >= product_blocks) {
        if (!history_ready) pdl_wait();
        pdl_launch_dependents();
        const Rows<T> rows = {q,         kv_a,  q_stride,     kv_a_stride, NOPE,  queries,
                              num_heads, cache, block_stride, block_size,  slots, positions,
                              cos,       sin,   weight,       eps};
        write_row(rows, blockIdx.x - product_blocks, history_ready);
        return;
    }
    if (history_ready) pdl_launch_dependents();
    const int slab = blockIdx.x % SLABS;
    const int head = blockIdx.x / SLABS % num_heads;
    const int first_tile = blockIdx.x / (SLABS * num_heads);
    const int tile_step = product_blocks / (SLABS * num_heads);

    const T* const from = k_up + static_cast<long long>(head) * NOPE * RANK + slab * SLAB;
#pragma unroll
    for (int i = 0; i < NOPE * SLAB / 8 / (32 * WARPS); i++) {
        const int index = i * 32 * WARPS + threadIdx.x;
        const int row = index / (SLAB / 8), chunk = index % (SLAB / 8);
        ptx::copy_async(ptx::shared_address(matrix + row * PITCH + chunk * 8),
                        from + row * RANK + chunk * 8, true);
    }
    ptx::commit_copies();
    ptx::wait_copies<0>();
    __syncthreads();
    // Right operands of this warp's 8 columns, of two steps at a time: k 0-7 and 8-15 of each.
    unsigned b[GROUPS][4];
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int row = group * 32 + column_of(lane / 16, lane % 16);
        ptx::load_matrices_transposed(b[group],
                                      ptx::shared_address(matrix + row * PITCH + warp * 8));
    }
    pdl_wait();
    if (!history_ready) pdl_launch_dependents();

    const int head_size = NOPE + ROTATED;
#pragma unroll 1
    for (int token = first_tile * TOKENS; token < num_tokens; token += tile_step * TOKENS) {
        Columns x[FRAGMENTS][GROUPS];
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
                x[f][group].load(q + (token + f * 16) * q_stride + head * head_size + group * 32,
                                 q_stride, num_tokens - token - f * 16);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
            float sums[4] = {};
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    unsigned a[4];
                    x[f][group].fragment(a, step);
                    ptx::mma<T>(sums, a, b[group][2 * step], b[group][2 * step + 1]);
                }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = token + f * 16 + half * 8 + lane / 4;
                if (row >= num_tokens) continue;
                const int column = slab * SLAB + warp * 8 + lane % 4 * 2;
                *reinterpret_cast<unsigned*>(
                    queries + (static_cast<long long>(row) * num_heads + head) * KEY + column) =
                    ptx::pack<T>(sums[2 * half], sums[2 * half + 1]);
            }
        }
    }
}

// out [T, H, width] = attended [T, H, RANK] @ v_up^T. A block has SLAB rows of a head's matrix; all
// blocks with the same ones share the tokens. Its warps share the columns, and their sums are added
// in order.
//
//   v_up [H, width, RANK], which no kernel writes
template <typename T, int SLAB>
__global__ void __launch_bounds__(32 * latent::WARPS)
    project_values(const T* attended, const T* v_up, T* out, int num_heads, int width,
                   int num_tokens) {
    using namespace latent;
    constexpr int COLUMNS = RANK / WARPS, GROUPS = COLUMNS / 32;  // of a warp
    constexpr int PITCH = SLAB + 8;
    __shared__ float partial[WARPS * 16 * PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int slabs = width / SLAB;
    const int first_row = blockIdx.x % slabs * SLAB;
    const int head = blockIdx.x / slabs % num_heads;
    const int first_tile = blockIdx.x / (slabs * num_heads);
    const int tile_step = gridDim.x / (slabs * num_heads);

    pdl_launch_dependents();
    // Right operands, two steps in each vector.
    uint4 b[GROUPS][SLAB / 8];
    const T* const from = v_up +
                          (static_cast<long long>(head) * width + first_row + lane / 4) * RANK +
                          warp * COLUMNS + lane % 4 * 8;
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int n = 0; n < SLAB / 8; n++)
            b[group][n] = load_vector(from + n * 8 * RANK + group * 32);
    pdl_wait();

    const long long stride = static_cast<long long>(num_heads) * RANK;
#pragma unroll 1
    for (int token = first_tile * 16; token < num_tokens; token += tile_step * 16) {
        Columns x[GROUPS];
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            x[group].load(attended + token * stride + head * RANK + warp * COLUMNS + group * 32,
                          stride, num_tokens - token);
        float sums[SLAB / 8][4] = {};
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int step = 0; step < 2; step++) {
                unsigned a[4];
                x[group].fragment(a, step);
#pragma unroll
                for (int n = 0; n < SLAB / 8; n++) {
                    const uint4& words = b[group][n];
                    ptx::mma<T>(sums[n], a, step ? words.z : words.x, step ? words.w : words.y);
                }
            }
        __syncthreads();  // the sums of the tokens before are read
#pragma unroll
        for (int n = 0; n < SLAB / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *reinterpret_cast<float2*>(partial + (warp * 16 + half * 8 + lane / 4) * PITCH +
                                           n * 8 + lane % 4 * 2) =
                    make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < 16 * SLAB / 2; i += 32 * WARPS) {
            const int row = i / (SLAB / 2), column = i % (SLAB / 2) * 2;
            if (token + row >= num_tokens) continue;
            float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float2 part =
                    *reinterpret_cast<const float2*>(partial + (w * 16 + row) * PITCH + column);
                sum.x += part.x;
                sum.y += part.y;
            }
            *reinterpret_cast<unsigned*>(
                out + (static_cast<long long>(token + row) * num_heads + head) * width + first_row +
                column) = ptx::pack<T>(sum.x, sum.y);
        }
    }
}
