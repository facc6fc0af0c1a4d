// Causal attention of chunks with many rows over a paged KV cache, with Hopper's wgmma and TMA.
//
// A block has three warpgroups (FlashAttention-3, arXiv:2407.08608). Two are consumers: each has 64
// of a unit's 128 rows, and the softmax of one overlaps with the products of the other. They
// iterate over the tiles of keys from the last to the first, and continue with the next unit
// without a bubble. The third is the producer: two of its warps take units and copy their queries,
// two issue TMA copies of keys and values, block by block, into ring buffers. attention_plan.cu
// assigns the work; units and shares are defined in attention_units.cuh.

#include "attention/attention_hopper_producer.cuh"
#include "attention/attention_hopper_consumer.cuh"

namespace attention {

// Of the two kernels below; `whole_rows` is where the rows of whole units go.
template <class S, class WholeRows>
__device__ __forceinline__ void attend_units(const Arguments<typename S::Element>& args,
                                             const hopper::TensorMap& key_map,
                                             const hopper::TensorMap& value_map, const Item* items,
                                             const Share* shares, int* arrivals, float* slots,
                                             Queue* queue, const WholeRows& whole_rows) {
    extern __shared__ unsigned char memory[];
    __shared__ Unit units[S::UNITS];
    __shared__ int totals[S::UNITS];
    __shared__ bool is_last[S::GROUPS];
    __shared__ __align__(8) unsigned long long
        barriers[2 * (S::UNITS + S::QUERY_STAGES + S::KEY_STAGES + S::VALUE_STAGES)];

    SharedStorage<S> shared;
    const unsigned misaligned = ptx::shared_address(memory) % 1024;
    shared.queries = memory + (misaligned == 0 ? 0 : 1024 - misaligned);
    shared.keys = shared.queries + S::QUERY_STAGES * S::TILE_BYTES;
    shared.values = shared.keys + S::KEY_STAGES * S::TILE_BYTES;
    shared.units = units;
    shared.totals = totals;
    shared.is_last = is_last;
    shared.unit_full = ptx::shared_address(barriers);
    shared.unit_empty = shared.unit_full + 8 * S::UNITS;
    shared.q_full = shared.unit_empty + 8 * S::UNITS;
    shared.q_empty = shared.q_full + 8 * S::QUERY_STAGES;
    shared.k_full = shared.q_empty + 8 * S::QUERY_STAGES;
    shared.k_empty = shared.k_full + 8 * S::KEY_STAGES;
    shared.v_full = shared.k_empty + 8 * S::KEY_STAGES;
    shared.v_empty = shared.v_full + 8 * S::VALUE_STAGES;

    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        constexpr int READERS = 4 * S::GROUPS;
        const auto init = [](unsigned barriers, int count, int arrivals) {
            for (int i = 0; i < count; ++i) hopper::init_barrier(barriers + 8 * i, arrivals);
        };
        init(shared.unit_full, S::UNITS, 1);
        init(shared.unit_empty, S::UNITS, READERS);
        init(shared.q_full, S::QUERY_STAGES, 1);
        init(shared.q_empty, S::QUERY_STAGES, 32 * READERS);
        init(shared.k_full, S::KEY_STAGES, 1);
        init(shared.k_empty, S::KEY_STAGES, READERS);
        init(shared.v_full, S::VALUE_STAGES, 1);
        init(shared.v_empty, S::VALUE_STAGES, READERS);
        hopper::fence_async_proxy();
        hopper::prefetch_tensor_map(key_map);
        hopper::prefetch_tensor_map(value_map);
    }
    __syncthreads();
    pdl_wait();

    if (warp >= 4) {
        hopper::warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume_units<S>(args, shared, Slots<S>(slots), arrivals, uniform(warp / 4 - 1),
                         whole_rows);
    } else {
        hopper::warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (warp == 0)
            produce_tiles<S, false>(args, shared, key_map);
        else if (warp == 1)
            produce_tiles<S, true>(args, shared, value_map);
        else
            produce_units<S>(args, shared,
                             {items, queue, shares[blockIdx.x], queue->units, queue->heads_at_once,
                              args.num_kv_heads, args.group, 0},
                             threadIdx.x - 64);
    }
}

}  // namespace attention

// Attention of the chunks selected by `plan`, with the same unit_rows = ROWS, unit_keys = KEYS,
// window and number of shares = blocks, and a queue.
//
//   q [T, H, D], rows q_stride elements apart; out [T, H, D]
//   key_map, value_map   of the caches as [num_blocks, block_size / 8, G * D / 64, 8, 64], boxes of
//                        a KV head's rows of a block
//   v_cache [num_blocks, block_size, G, D], blocks block_stride elements apart
//   block_tables [n, table_stride]
//   sinks [H], of each head the score of a further key whose value is 0; null for none
//   slots 2 * gridDim.x * ROWS * (D + 2) floats of scratch
template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attend(const typename S::Element* q, const __grid_constant__ hopper::TensorMap key_map,
           const __grid_constant__ hopper::TensorMap value_map, const typename S::Element* v_cache,
           typename S::Element* out, const int* block_tables, long long q_stride,
           long long block_stride, int table_stride, int block_shift, int num_heads,
           int num_kv_heads, float scale, float soft_cap, int window, const float* sinks,
           const attention::Item* items, const attention::Share* shares, int* arrivals,
           float* slots, attention::Queue* queue) {
    using namespace attention;
    const Arguments<typename S::Element> args(q, nullptr, v_cache, out, block_tables, q_stride,
                                              block_stride, table_stride, block_shift, num_heads,
                                              num_kv_heads, scale, soft_cap, window, sinks);
    attend_units<S>(args, key_map, value_map, items, shares, arrivals, slots, queue, InOut());
}

// The same, but rows of units that one block has whole are written in e4m3: to values [T, H, D],
// with coarse scales (eight_bit.cuh), whose codes go to codes [T, H]. Of all others, these stay as
// they are.
template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attend_quantizing(const typename S::Element* q,
                      const __grid_constant__ hopper::TensorMap key_map,
                      const __grid_constant__ hopper::TensorMap value_map,
                      const typename S::Element* v_cache, typename S::Element* out,
                      const int* block_tables, long long q_stride, long long block_stride,
                      int table_stride, int block_shift, int num_heads, int num_kv_heads,
                      float scale, float soft_cap, int window, const float* sinks,
                      const attention::Item* items, const attention::Share* shares, int* arrivals,
                      float* slots, attention::Queue* queue, unsigned char* values,
                      unsigned char* codes) {
    using namespace attention;
    const Arguments<typename S::Element> args(q, nullptr, v_cache, out, block_tables, q_stride,
                                              block_stride, table_stride, block_shift, num_heads,
                                              num_kv_heads, scale, soft_cap, window, sinks);
    attend_units<S>(args, key_map, value_map, items, shares, arrivals, slots, queue,
                    CoarseRows{values, codes});
}
