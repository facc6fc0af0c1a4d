// Some tokens of a step as chunks of one token each, for attention of these alone.
#include "common.cuh"

// Block i finds the keys of token tokens[i] of a step: their number, and the block table of its
// chunk. A token that does not exist has no keys.
//
//   positions [num_tokens], query_start [num_chunks + 1], block_tables [num_chunks, table_stride]
//   seq_lens [gridDim.x], tables [gridDim.x, own_stride]
__global__ void __launch_bounds__(256)
    find_chunks(const long long* tokens, const long long* positions, const int* query_start,
                const int* block_tables, int* seq_lens, int* tables, int num_tokens, int num_chunks,
                int table_stride, int own_stride) {
    pdl_wait();
    pdl_launch_dependents();
    const long long token = tokens[blockIdx.x];
    const bool exists = 0 <= token && token < num_tokens;
    int chunk = 0;  // the last one that begins with the token or before it
    for (int from = 1; from < num_chunks; from += blockDim.x) {
        const int index = from + static_cast<int>(threadIdx.x);
        chunk += __syncthreads_count(index < num_chunks && query_start[index] <= token);
    }
    if (threadIdx.x == 0)
        seq_lens[blockIdx.x] = exists ? static_cast<int>(positions[token]) + 1 : 0;
    const int* const table = block_tables + static_cast<long long>(chunk) * table_stride;
    int* const own = tables + static_cast<long long>(blockIdx.x) * own_stride;
    for (int i = threadIdx.x; exists && i < min(table_stride, own_stride); i += blockDim.x)
        own[i] = table[i];
}
