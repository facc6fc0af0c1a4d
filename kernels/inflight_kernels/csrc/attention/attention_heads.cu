// Attention for many sequences with one or two tokens each: one warp per KV head.
//
// Like attention.cu, but a unit is HEADS adjacent KV heads and each warp processes one of them: it
// copies, multiplies and accumulates without waiting for other warps, and with so many sequences
// there is work for all. The product is transposed: keys are the 16 rows of the mma, and the few
// queries its 8 columns, which takes half of the time and half of the registers.

#include "attention/attention_cascade.cuh"
#include "attention/attention_heads_merge.cuh"
#include "attention/attention_heads_tile.cuh"
#include "attention/attention_work.cuh"

namespace attention {

// Processes a share. If it CASCADES, its sequences may have prefixes.
template <class S, bool CASCADES>
__device__ __forceinline__ void process_share(const Arguments<typename S::Element>& args,
                                              const Item* items, const Share& share, int* arrivals,
                                              float* slots, bool history_ready,
                                              const PrefixMemory& prefixes) {
    using T = typename S::Element;
    const int warp = threadIdx.x / 32;
    extern __shared__ __align__(16) unsigned char memory[];
    T* const tiles = reinterpret_cast<T*>(memory) + warp * S::STAGES * 2 * S::TILE;
    const Slots<S> own_slots(slots, warp * S::ROWS);

    if (share.begin == share.end) {
        leave(share);
        return;
    }
    WorkIterator<S> work;
    work.begin(args, items, share);
    TileProducer<S, false> producer;
    producer.begin(args, work);

    // For the first unit, history_ready data is read before the preceding kernels have ended: all
    // keys except those of this step's tokens.
    const int ready = history_ready ? work.unit.item.kv_len - work.unit.item.query_len : ALL_KEYS;
    const int begun = min(producer.end - producer.tile, S::STAGES - 1);
#pragma unroll 1
    for (int i = 0; i < begun; ++i) producer.load(tiles, args, i, producer.tile + i, 0, ready);
    pdl_wait();
    pdl_launch_dependents();
#pragma unroll 1
    for (int i = 0; i < S::STAGES - 1; ++i) {
        const int from = i < begun ? ready : 0;
        if (producer.has_more()) {
            if (from < ALL_KEYS) producer.load(tiles, args, i, producer.tile, from, ALL_KEYS);
            producer.next(args);
        }
        ptx::commit_copies();
    }

    HeadRow<S> row;
    HeadState<S> state;
    load_row(row, args, work.unit);
    int stage = 0;  // of the current tile
    while (true) {
        const Unit unit = work.unit;
        const int history = unit.item.kv_len - unit.item.query_len;
        const int lowest = history + args.token_of(unit.item.first_row);
        const int highest = history + args.token_of(unit.item.first_row + unit.num_rows - 1);
        state.clear();
        row.become_operands();
#pragma unroll 1
        for (int tile = unit.item.kv_begin + unit.from; tile < unit.item.kv_begin + unit.to;
             ++tile) {
            __syncwarp();  // all lanes have read the previous tile, which is overwritten now
            if (producer.has_more()) {
                producer.load(tiles, args, stage == 0 ? S::STAGES - 1 : stage - 1, producer.tile, 0,
                          ALL_KEYS);
                producer.next(args);
            }
            ptx::commit_copies();
            ptx::wait_copies<S::STAGES - 1>();
            __syncwarp();  // the tile is visible to all lanes

            const T* const keys = tiles + 2 * stage * S::TILE;
            stage = stage + 1 == S::STAGES ? 0 : stage + 1;
            float scores[4];
            mma_kq(scores, row, keys);
            TileScales<S>(keys).apply(scores);
            float factor = args.scale;
            if (args.soft_cap > 0.0f) {
                const SoftCap cap(factor, args.soft_cap);
#pragma unroll
                for (int e = 0; e < 4; ++e) scores[e] = cap(scores[e]);
                factor = 1.0f;
            }
            const int first_key = tile * S::KEYS;
            if (first_key + S::KEYS - 1 > lowest || first_key <= highest - args.window)
                mask_scores<S>(scores, args, unit, first_key);
            const TileScales<S> of_values(keys + S::TILE);
            softmax_step(state, scores, factor, of_values);
            of_values.apply(scores);
            mma_vp(state, scores, keys + S::TILE);
        }
        const bool is_over = work.left == 0;
        if (!is_over) {
            work.next(args);
            load_row(row, args, work.unit);  // arrives while the sums are written
        }
        Member member = {};
        if constexpr (CASCADES) member = member_of<S>(prefixes, unit, share);
        if (CASCADES && member.pieces > 0)
            finish_own_rows(args, unit, share, state, own_slots, arrivals, prefixes, member);
        else
            finish_rows(args, unit, share, state, own_slots, arrivals, tiles);
        if (is_over) return;
    }
}

// Processes a block's share and its pieces, if there are any. Half of the blocks begin with the
// share. Two blocks or more are on a multiprocessor: while one multiplies the queries of a prefix,
// which is bound by arithmetic, another one reads own keys, which is bound by the memory.
template <class Own, class Pieces>
__device__ __forceinline__ void process_both(const Share& share, const Own& own,
                                             const Pieces& pieces) {
    const bool cascades = share.prefix_pieces > 0;
    const int turns = cascades ? 2 : 1;
    const int of_pieces = cascades && blockIdx.x < gridDim.x / 2 ? 0 : 1;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        if (turn > 0) __syncthreads();  // all tiles are read, by all warps
        if (turn == of_pieces)
            pieces();
        else
            own();
    }
}

}  // namespace attention

// Attention of the chunks selected by `plan`, with the same unit_rows = ROWS, unit_keys = KEYS,
// num_kv_heads = G / HEADS, window and number of shares = blocks. G is a multiple of HEADS.
//
//   arguments as of `attend` in attention.cu, except
//   slots 2 * gridDim.x * HEADS * ROWS * (D + 2) floats of scratch
template <class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    attend_heads(const typename S::Element* q, const typename S::Element* k_cache,
                 const typename S::Element* v_cache, typename S::Element* out,
                 const int* block_tables, long long q_stride, long long block_stride,
                 int table_stride, int block_shift, int num_heads, int num_kv_heads, float scale,
                 float soft_cap, int window, const float* sinks, const attention::Item* items,
                 const attention::Share* shares, int* arrivals, float* slots, bool history_ready) {
    using namespace attention;
    const Arguments<typename S::Element> args(q, k_cache, v_cache, out, block_tables, q_stride,
                                              block_stride, table_stride, block_shift, num_heads,
                                              num_kv_heads, scale, soft_cap, window, sinks);
    if (!history_ready) pdl_wait();
    const Share share = load_l2(shares + blockIdx.x);
    process_share<S, false>(args, items, share, arrivals, slots, history_ready, {});
}

// The same with S::PAIRED, in clusters of two blocks: sm_90 and later.
template <class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) CLUSTERS_OF_TWO
    attend_heads_in_pairs(const typename S::Element* q, const typename S::Element* k_cache,
                          const typename S::Element* v_cache, typename S::Element* out,
                          const int* block_tables, long long q_stride, long long block_stride,
                          int table_stride, int block_shift, int num_heads, int num_kv_heads,
                          float scale, float soft_cap, int window, const float* sinks,
                          const attention::Item* items, const attention::Share* shares,
                          int* arrivals, float* slots, bool history_ready) {
    using namespace attention;
    const Arguments<typename S::Element> args(q, k_cache, v_cache, out, block_tables, q_stride,
                                              block_stride, table_stride, block_shift, num_heads,
                                              num_kv_heads, scale, soft_cap, window, sinks);
    if (!history_ready) pdl_wait();
    const Share share = load_l2(shares + blockIdx.x);
#if __CUDA_ARCH__ >= 900
    process_share<S, false>(args, items, share, arrivals, slots, history_ready, {});
#else
    __trap();
#endif
}

// The same for a plan of `plan_cascade`, with the memory of its prefixes (attention_prefixes.cuh).
template <class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    attend_heads_cascade(const typename S::Element* q, const typename S::Element* k_cache,
                         const typename S::Element* v_cache, typename S::Element* out,
                         const int* block_tables, long long q_stride, long long block_stride,
                         int table_stride, int block_shift, int num_heads, int num_kv_heads,
                         float scale, float soft_cap, int window, const float* sinks,
                         const attention::Item* items, const attention::Share* shares,
                         int* arrivals, float* slots, bool history_ready,
                         const attention::Prefix* prefixes, const attention::Member* members,
                         const int* tokens, int* arrived, float* prefix_sums, float2* prefix_states,
                         int own_row) {
    using namespace attention;
    const Arguments<typename S::Element> args(q, k_cache, v_cache, out, block_tables, q_stride,
                                              block_stride, table_stride, block_shift, num_heads,
                                              num_kv_heads, scale, soft_cap, window, sinks);
    const PrefixMemory memory = {prefixes,    members,       tokens, arrived,
                                 prefix_sums, prefix_states, own_row};
    if (!history_ready) pdl_wait();
    const Share share = load_l2(shares + blockIdx.x);
    process_both(
        share,
        [&] { process_share<S, true>(args, items, share, arrivals, slots, history_ready, memory); },
        [&] { attend_pieces<PieceShape<S, S::PIECE_STAGES>>(args, memory, share.prefix_pieces); });
}
