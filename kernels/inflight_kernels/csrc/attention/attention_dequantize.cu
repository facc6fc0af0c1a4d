// Prompts' keys and values of 8 bits -> bfloat16, for attention_hopper.cu, whose operands in shared
// memory are what TMA copies. A key is converted once, where converting tiles would convert it again
// for each 128 rows of a query.
//
// attention_plan.cu lists the blocks to fill.

#include <cuda_bf16.h>

#include "attention/attention_units.cuh"
#include "common.cuh"
#include "kv_quantization.cuh"

namespace attention {

// Of a step in a block of threads: in one block of the cache, as those are multiples of it.
constexpr int KEYS_AT_ONCE = 16;
constexpr int PARTS = DEQUANTIZED_BLOCK / KEYS_AT_ONCE;

// Eight bytes, scaled.
template <typename Byte>
__device__ __forceinline__ uint4 dequantize(uint2 raw, float scale) {
    const unsigned bytes[2] = {raw.x, raw.y};
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        unsigned even, odd;
        Byte::decode(bytes[i], even, odd);
        const float2 a = __bfloat1622float2(as_pair(even)), b = __bfloat1622float2(as_pair(odd));
        words[2 * i] = as_word(__floats2bfloat162_rn(a.x * scale, b.x * scale));
        words[2 * i + 1] = as_word(__floats2bfloat162_rn(a.y * scale, b.y * scale));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace attention

// Fills the first *num_sources blocks of `keys` and `values` [.., DEQUANTIZED_BLOCK, G, D]. Rows past
// the sequence stay as they are.
//
//   k_cache, v_cache   of bytes with scales at the end of each block (kv_quantization.cuh), blocks
//                      block_stride bytes apart
//   block_tables [n, table_stride], seq_lens [n]   of the step
//
// Grid: (any number, PARTS, keys and values).
template <typename Byte, int HEAD_DIM>
__global__ void __launch_bounds__(256)
    dequantize_prompts(const unsigned char* k_cache, const unsigned char* v_cache,
                       __nv_bfloat16* keys, __nv_bfloat16* values, const int* block_tables,
                       const int* seq_lens, long long block_stride, int table_stride,
                       int block_shift, int num_kv_heads, const attention::Source* sources,
                       const int* num_sources) {
    using namespace attention;
    constexpr int CHUNKS = HEAD_DIM / 8;
    pdl_wait();
    pdl_launch_dependents();
    const unsigned char* const cache = blockIdx.z == 0 ? k_cache : v_cache;
    __nv_bfloat16* const target = blockIdx.z == 0 ? keys : values;
    const int row_values = num_kv_heads * HEAD_DIM;
    const int block_size = 1 << block_shift;
    const int count = load_l2(num_sources);
    for (int k = blockIdx.x; k < count; k += gridDim.x) {
        const Source source = sources[k];
        const int first = source.first_key + blockIdx.y * KEYS_AT_ONCE;
        const int num_keys = min(seq_lens[source.sequence] - first, KEYS_AT_ONCE);
        if (num_keys <= 0) continue;
        const long long table = static_cast<long long>(source.sequence) * table_stride;
        const int offset = first & (block_size - 1);
        const unsigned char* const block =
            cache + block_tables[table + (first >> block_shift)] * block_stride;
        const uint2* const from = reinterpret_cast<const uint2*>(block + offset * row_values);
        const __half* const scales =
            reinterpret_cast<const __half*>(
                block + scales_offset(block_size, num_kv_heads, HEAD_DIM)) +
            offset;
        const long long place =
            static_cast<long long>(k * DEQUANTIZED_BLOCK + blockIdx.y * KEYS_AT_ONCE) * row_values;
        uint4* const to = reinterpret_cast<uint4*>(target + place);
#pragma unroll 4
        for (int i = threadIdx.x; i < num_keys * num_kv_heads * CHUNKS; i += 256) {
            const int row = i / CHUNKS;
            const int key = row / num_kv_heads, head = row - key * num_kv_heads;
            to[i] = dequantize<Byte>(from[i], __half2float(scales[head * block_size + key]));
        }
    }
}
