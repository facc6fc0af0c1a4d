// Linear layers whose weight has 8 bits a value, and a scale for each row, while x has 16.
//
// For few tokens a kernel streams the weight once. Each warp of a block has columns of its own, and
// a ring of stages in shared memory that it fills with cp.async: no barrier until the warps add up
// their sums. Bytes become 16-bit values in registers, exactly, as the left operand of
// mma.m16n8k16, whose 16 rows are rows of the weight; the 8 columns are tokens, of which few are
// padding then.
//
// Of each 64 columns a lane has 16 consecutive ones, of the weight and of x: a product does not
// depend on the order of columns, as long as both operands have the same.
//
// For more tokens another kernel widens the weight for a product of 16-bit values.
#include "attention/attention_ptx.cuh"
#include "common.cuh"
#include "kv_quantization.cuh"

constexpr int DEPTH = 64;  // columns of a stage

// Bytes as pairs of T: bytes 0 and 2 of a word, and bytes 1 and 3.
template <typename Byte, typename T>
__device__ __forceinline__ void decode(unsigned word, unsigned& even, unsigned& odd) {
    if constexpr (SAME<T, __half>)
        Byte::template decode_halves<true>(word, even, odd);
    else
        Byte::decode(word, even, odd);
}

__device__ __forceinline__ uint4 load_shared(unsigned address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

// Layout of shared memory: for each warp STAGES stages, each of ROWS * DEPTH bytes of the weight
// and TOKENS * DEPTH values of x. Afterwards, sums of each warp [TOKENS, PITCH].
template <typename Byte, typename T, int ROWS, int TOKENS>
struct Stage {
    static constexpr int WEIGHT_BYTES = ROWS * DEPTH;
    static constexpr int BYTES = WEIGHT_BYTES + TOKENS * DEPTH * 2;
    // Four more than a tile: the lanes of a warp then write to different banks.
    static constexpr int PITCH = ROWS + 4;

    // Adds the products of a stage to sums [rows, tokens], in fragments of 16 x 8.
    static __device__ __forceinline__ void multiply(unsigned stage,
                                                    float (&sums)[ROWS / 16][TOKENS / 8][4]) {
        const int lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
        uint4 raw[ROWS / 8];  // 16 bytes of the rows group, group + 8 and so on
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) raw[i] = load_shared(stage + i * 512 + lane * 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {  // 8 of this lane's columns each
            unsigned a[2][ROWS / 16][4];
#pragma unroll
            for (int i = 0; i < ROWS / 8; i++) {
                const int tile = i / 2, row = i % 2;
                const unsigned first = half ? raw[i].z : raw[i].x;
                const unsigned second = half ? raw[i].w : raw[i].y;
                decode<Byte, T>(first, a[0][tile][row], a[0][tile][row + 2]);
                decode<Byte, T>(second, a[1][tile][row], a[1][tile][row + 2]);
            }
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++) {
                const int chunk = (2 * place + half) ^ (group & 1);
                const uint4 x =
                    load_shared(stage + WEIGHT_BYTES + (8 * j + group) * 128 + chunk * 16);
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    // In the order of decoded bytes.
                    const unsigned low = step ? x.z : x.x, high = step ? x.w : x.y;
                    const unsigned even = __byte_perm(low, high, 0x5410);
                    const unsigned odd = __byte_perm(low, high, 0x7632);
#pragma unroll
                    for (int tile = 0; tile < ROWS / 16; tile++)
                        ptx::mma<T>(sums[tile][j], a[step][tile], even, odd);
                }
            }
        }
    }

    // Writes a warp's sums to its place in shared memory.
    static __device__ __forceinline__ void store(float* to,
                                                 const float (&sums)[ROWS / 16][TOKENS / 8][4]) {
        const int lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
#pragma unroll
        for (int tile = 0; tile < ROWS / 16; tile++)
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    to[(8 * j + 2 * place + i % 2) * PITCH + 16 * tile + group + i / 2 * 8] =
                        sums[tile][j][i];
    }
};

// out[m, n'] = epilogue(x[m, k] @ (weight[n, k] * scales[n])^T), m <= TOKENS, k a multiple of 16;
// rows of x are `stride` values apart.
// Epilogue: + bias; if gated, with a weight of gate | up: silu(gate) * up, n' = n / 2; + residual
// (bias and residual may be null; out may alias the residual). Block b computes ROWS rows of the
// weight from b * ROWS on, or half as many of gate and of up. WARPS warps share the columns; their
// sums are added in order.
// Dynamic shared memory: WARPS * STAGES * Stage::BYTES. With 8 warps that is little enough for
// three blocks on a multiprocessor of Hopper, and so should registers be.
template <typename Byte, typename T, int ROWS, int TOKENS, int WARPS, int STAGES>
__global__ void __launch_bounds__(WARPS * 32, WARPS == 8 ? 3 : 1)
    weight_only_gemm(const T* x, int stride, const Byte* weight, const float* scales, const T* bias,
                     const T* residual, T* out, int m, int n, int k, bool gated) {
#if __CUDA_ARCH__ >= 800
    using S = Stage<Byte, T, ROWS, TOKENS>;
    static_assert(TOKENS * S::PITCH * 4 <= STAGES * S::BYTES, "sums fit where the stages were");
    constexpr int HALF = ROWS / 2;
    extern __shared__ __align__(128) unsigned char memory[];

    // Blocks of the next kernel start when all of this one have: it reads its weights meanwhile.
    pdl_launch_dependents();
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    const int width = gated ? n / 2 : n, columns = gated ? HALF : ROWS;  // of out, in a tile
    // The rows of a tile: HALF from `first` on, and HALF from `second` on, which may be up.
    const int first = blockIdx.x * columns, second = first + (gated ? width : HALF);
    const int first_rows = width - first, second_rows = gated ? first_rows : first_rows - HALF;
    const int steps = (k + DEPTH - 1) / DEPTH;
    const int count = (steps - warp + WARPS - 1) / WARPS;  // of this warp: warp, warp + WARPS ...
    const unsigned ring = ptx::shared_address(memory) + warp * STAGES * S::BYTES;

    // A lane copies what it multiplies: 16 bytes of every eighth row.
    const int row = lane / 4, byte = lane % 4 * 16;
    const Byte* const first_weight = weight + static_cast<long long>(first + row) * k + byte;
    const Byte* const second_weight = weight + static_cast<long long>(second + row) * k + byte;
    const auto copy_weight = [&](int index) {
        const int column = (warp + index * WARPS) * DEPTH;
        const unsigned to = ring + index % STAGES * S::BYTES + lane * 16;
        const bool inside = index < count && column + byte < k;
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) {
            const int at = i % (ROWS / 16) * 8;  // in its half
            const bool is_second = i >= ROWS / 16;
            const bool valid = inside && at + row < (is_second ? second_rows : first_rows);
            ptx::copy_async_if(index < count, to + i * 512,
                               (is_second ? second_weight : first_weight) + at * k + column, valid);
        }
    };
    // Tokens are copied as they lie, 8 lanes for 64 columns of each.
    const int token = lane / 8, chunk = lane % 8;
    const T* const first_x = x + token * stride + chunk * 8;
    const unsigned x_place = S::WEIGHT_BYTES + token * 128 + (chunk ^ (token & 1)) * 16;
    const auto copy_x = [&](int index) {
        const int column = (warp + index * WARPS) * DEPTH;
        const unsigned to = ring + index % STAGES * S::BYTES + x_place;
        const bool inside = column + chunk * 8 < k;
#pragma unroll
        for (int i = 0; i < TOKENS / 4; i++)
            ptx::copy_async_if(index < count, to + i * 512, first_x + i * 4 * stride + column,
                               inside && token + 4 * i < m);
    };

    // No kernel writes weights: they may be fetched before the preceding kernel has ended.
    for (int s = 0; s < STAGES - 1; s++) copy_weight(s);
    pdl_wait();
    for (int s = 0; s < STAGES - 1; s++) {
        copy_x(s);
        ptx::commit_copies();
    }
    float sums[ROWS / 16][TOKENS / 8][4] = {};
    for (int i = 0; i < count; i++) {
        ptx::wait_copies<STAGES - 2>();
        // Copies of all lanes have arrived, and the stage before is no longer read.
        __syncwarp();
        copy_weight(i + STAGES - 1);
        copy_x(i + STAGES - 1);
        ptx::commit_copies();
        S::multiply(ring + i % STAGES * S::BYTES, sums);
    }

    __syncthreads();
    float* const partial = reinterpret_cast<float*>(memory);
    S::store(partial + warp * TOKENS * S::PITCH, sums);
    __syncthreads();
    for (int i = threadIdx.x; i < m * columns; i += WARPS * 32) {
        const int t = gated ? i / HALF : i / ROWS, column = gated ? i % HALF : i % ROWS;
        if (column >= first_rows) continue;
        const auto sum_of = [&](int tile_row, int weight_row) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                sum += partial[(w * TOKENS + t) * S::PITCH + tile_row];
            sum *= scales[weight_row];
            return bias ? sum + static_cast<float>(bias[weight_row]) : sum;
        };
        float value = sum_of(column, first + column);
        if (gated)
            value = value / (1.0f + __expf(-value)) * sum_of(HALF + column, second + column);
        const long long place = static_cast<long long>(t) * width + first + column;
        if (residual) value += static_cast<float>(residual[place]);
        out[place] = narrow<T>(value);
    }
#endif
}

// out[n, k] = values * scales[n] in float, rounded to T; k is a multiple of 16. A thread has
// PER_THREAD vectors of 16 bytes, a block consecutive ones.
template <typename Byte, typename T, int PER_THREAD>
__global__ void weight_only_dequantize(const Byte* values, const float* scales, T* out,
                                       int num_vectors, int vectors_per_row) {
#if __CUDA_ARCH__ >= 800
    const int first = blockIdx.x * blockDim.x * PER_THREAD + threadIdx.x;
    uint4 raw[PER_THREAD];
    float factor[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int vector = first + i * static_cast<int>(blockDim.x);
        if (vector >= num_vectors) continue;
        raw[i] = load_vector(values + 16ll * vector);
        factor[i] = scales[vector / vectors_per_row];
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const int vector = first + i * static_cast<int>(blockDim.x);
        if (vector >= num_vectors) continue;
        const unsigned words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
        float wide_values[16];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            unsigned even, odd;
            Byte::decode(words[j], even, odd);
            const float2 evens = ptx::unpack<__nv_bfloat16>(even);
            const float2 odds = ptx::unpack<__nv_bfloat16>(odd);
            wide_values[4 * j] = evens.x * factor[i];
            wide_values[4 * j + 1] = odds.x * factor[i];
            wide_values[4 * j + 2] = evens.y * factor[i];
            wide_values[4 * j + 3] = odds.y * factor[i];
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
            store_vector(out + 16ll * vector + 8 * j,
                         pack<T>(*reinterpret_cast<const float(*)[8]>(wide_values + 8 * j)));
    }
#endif
}
