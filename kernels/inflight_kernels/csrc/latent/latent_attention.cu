// Causal attention over a paged cache of latents (MLA, arXiv:2405.04434) in absorbed form: decodes,
// prefill chunks and any mix of them. All heads of a token share one key, and the first part of the
// key is its value.
//
// Units, items and shares are defined in attention_units.cuh; `plan` of attention_plan.cu creates
// them, `attend_latents` processes a share per block. For a unit split across shares, each block
// writes partial sums, and all of them merge a part each; or the two blocks of a cluster exchange
// halves of theirs (latent_merge.cuh).
#include "latent/latent_merge.cuh"
#include "latent/latent_tile.cuh"

// Attention of the chunks selected by `plan`, with the same unit_rows = ROWS, unit_keys = KEYS,
// group = num_heads, num_kv_heads = 1, no window, and number of shares = blocks, all of which fit
// on the device at once.
//
//   q [T, H, KEY_DIM], tokens q_stride elements apart; out [T, H, HEAD_DIM]
//   cache [num_blocks, block_size, KEY_DIM], blocks block_stride elements apart
//   block_tables [n, table_stride]
//   arrivals [4 * gridDim.x], from `plan`
//   slots 2 * gridDim.x * ROWS * (HEAD_DIM + 2) floats of scratch
//   history_ready   everything except q, and the keys of the tokens in q, was written before the
//                   preceding kernel was launched
template <class S>
__device__ __forceinline__ void attend_share(
    const typename S::Element* q, const typename S::Element* cache, typename S::Element* out,
    const int* block_tables, long long q_stride, long long block_stride, int table_stride,
    int block_shift, int num_heads, float scale, const attention::Item* items,
    const attention::Share* shares, int* arrivals, float* slots, bool history_ready) {
    using namespace attention;
    using T = typename S::Element;
    constexpr int NO_WINDOW = 1 << 30;
    const Arguments<T> args(q, cache, cache, out, block_tables, q_stride, block_stride,
                            table_stride, block_shift, num_heads, 1, scale, 0.0f, NO_WINDOW,
                            nullptr);
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const LatentMemory<S> memory(shared_memory);
    const Slots<S> own_slots(slots);

    if constexpr (S::PAIRED) cluster_arrive();
    if (!history_ready) pdl_wait();
    const Share share = load_l2(shares + blockIdx.x);
    if (share.begin == share.end) {
        leave(share);
        if constexpr (S::PAIRED) cluster_wait();
        return;
    }
    WorkIterator<S> work;
    work.begin(args, items, share);
    TileProducer<S, false, CopyLatents<S>> producer;
    producer.begin(args, work);

    // For the first unit, history_ready data is read before the preceding kernels have ended: all
    // keys except those of this step's tokens. Otherwise its queries are requested before any key.
    const int ready = history_ready ? work.unit.item.kv_len - work.unit.item.query_len : 0;
    const int begun = history_ready ? min(producer.end - producer.tile, S::STAGES - 1) : 0;
#pragma unroll 1
    for (int i = 0; i < begun; ++i)
        producer.load(memory.tiles, args, i, producer.tile + i, 0, ready);
    pdl_wait();
    pdl_launch_dependents();
    QueryVectors<S> vectors;
    if constexpr (S::QUERIES_IN_REGISTERS) {
        vectors.load(args, work.unit);
    } else {
        copy_latent_queries<S>(memory.queries, args, work.unit);
        ptx::commit_copies();
    }
    LatentRows<S> rows;
#pragma unroll 1
    for (int i = 0; i < S::STAGES - 1; ++i) {
        if (producer.has_more()) {
            producer.load(memory.tiles, args, i, producer.tile, i < begun ? ready : 0, ALL_KEYS);
            producer.next(args);
        }
        ptx::commit_copies();
        if (S::QUERIES_IN_REGISTERS && i == min(1, S::STAGES - 2)) {
            // By way of a tile that is not copied yet, as all blocks may read the same queries.
            T* const staged = memory.tiles + (S::STAGES - 1) * S::TILE;
            vectors.store(staged);
            __syncthreads();
            take_latent_rows<S>(rows, staged);
        }
    }

    LatentSums<S> sums;
    LatentState state;
    int stage = 0;       // of the current tile
    int num_splits = 0;  // units that other blocks process too
    bool is_first = true;
    while (true) {
        const Unit unit = work.unit;
        const int lowest =
            unit.item.kv_len - unit.item.query_len + args.token_of(unit.item.first_row);
        state.clear();
#pragma unroll
        for (int f = 0; f < S::ROWS / 16; ++f)
#pragma unroll
            for (int n = 0; n < S::COLUMNS / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[f][n][e] = 0.0f;
        // Queries of later units are copied after their first tiles.
        if (!S::QUERIES_IN_REGISTERS && !is_first) ptx::wait_copies<0>();
        is_first = false;
#pragma unroll 1
        for (int tile = unit.from; tile < unit.to; ++tile) {
            ptx::wait_copies<S::STAGES - 2>();
            // The tile is visible to all warps, and the one to be overwritten has been read.
            __syncthreads();
            if (producer.has_more()) {
                producer.load(memory.tiles, args, stage == 0 ? S::STAGES - 1 : stage - 1,
                              producer.tile, 0, ALL_KEYS);
                producer.next(args);
            }
            ptx::commit_copies();
            const T* const keys = memory.tiles + stage * S::TILE;
            stage = stage + 1 == S::STAGES ? 0 : stage + 1;
            multiply_keys<S>(memory, rows, keys);
            __syncthreads();
            const int first_key = tile * S::KEYS;
            weigh_keys<S>(memory, state, args, unit, first_key, first_key + S::KEYS - 1 > lowest);
            __syncthreads();
            add_values<S>(sums, memory, keys);
        }
        if constexpr (S::PAIRED) {
            if (is_pair(share)) {
                merge_pair<S>(args, unit, sums, state, memory, share.piece);
                return;
            }
        }
        const bool is_over = work.left == 0;
        if (!is_over) {
            work.next(args);
            // They arrive while the sums are written.
            if constexpr (S::QUERIES_IN_REGISTERS) {
                load_latent_rows<S>(rows, args, work.unit);
            } else {
                copy_latent_queries<S>(memory.queries, args, work.unit);
                ptx::commit_copies();
            }
        }
        leave_sums<S>(args, unit, sums, state, memory, own_slots);
        if (!unit.whole()) {
            __syncthreads();
            if (threadIdx.x == 0) arrive(memory.splits[num_splits], unit, share, arrivals);
            ++num_splits;
        }
        if (is_over) break;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < num_splits; ++i)
        merge_split<S>(args, memory.splits[i], share, own_slots, arrivals, memory);
    if constexpr (S::PAIRED) cluster_wait();
}

template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attend_latents(const typename S::Element* q, const typename S::Element* cache,
                   typename S::Element* out, const int* block_tables, long long q_stride,
                   long long block_stride, int table_stride, int block_shift, int num_heads,
                   float scale, const attention::Item* items, const attention::Share* shares,
                   int* arrivals, float* slots, bool history_ready) {
    attend_share<S>(q, cache, out, block_tables, q_stride, block_stride, table_stride, block_shift,
                    num_heads, scale, items, shares, arrivals, slots, history_ready);
}

// The same with S::PAIRED, in clusters of two blocks: sm_90 and later.
template <class S>
__global__ void CLUSTERS_OF_TWO __launch_bounds__(S::THREADS, 1)
    attend_latents_in_pairs(const typename S::Element* q, const typename S::Element* cache,
                            typename S::Element* out, const int* block_tables, long long q_stride,
                            long long block_stride, int table_stride, int block_shift,
                            int num_heads, float scale, const attention::Item* items,
                            const attention::Share* shares, int* arrivals, float* slots,
                            bool history_ready) {
#if __CUDA_ARCH__ >= 900
    attend_share<S>(q, cache, out, block_tables, q_stride, block_stride, table_stride, block_shift,
                    num_heads, scale, items, shares, arrivals, slots, history_ready);
#else
    __trap();
#endif
}
