// Causal attention over a paged KV cache: decodes, prefill chunks and any mix of them.
//
// Units, items and shares are defined in attention_units.cuh; `plan` of attention_plan.cu creates
// them, `attend` processes a share per block. For a unit split across shares, each block writes
// partial sums, and the last one to arrive merges them (split-KV, Flash-Decoding). The plan is in
// device memory and the grid is fixed, so a CUDA graph can be replayed with other lengths.
//
// A small step is bound by latencies, so as many as possible are overlapped with the preceding
// kernel: `history_ready` means that only q and the keys and values of this step's own tokens may
// not be written yet, and everything else is read before that kernel has ended. `rope_attend` reads
// the qkv projection directly, for one token per chunk, and saves the kernel in between.

#include "attention/attention_cascade.cuh"
#include "attention/attention_source.cuh"
#include "attention/attention_tile.cuh"
#include "attention/attention_work.cuh"

namespace attention {

// Stores four columns of the sums over a member's own keys.
template <class S>
__device__ __forceinline__ void leave_own(const Arguments<typename S::Element>& args,
                                          const PrefixMemory& memory, const Member& member,
                                          int kv_head, int row, int column, const Merged& merged) {
    const long long place =
        memory.own_row + member.place * args.num_heads + kv_head * args.group + row;
    *reinterpret_cast<float4*>(memory.sums + place * S::HEAD_DIM + column) = merged.sums;
    if (column == 0) memory.states[place] = make_float2(merged.max, merged.total);
}

// For a block that stored these sums: merges them with those of the pieces if all are there.
template <class S>
__device__ __forceinline__ void merge_if_last(const Arguments<typename S::Element>& args,
                                              const PrefixMemory& memory, const Member& member,
                                              const Unit& unit) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) is_last = arrive_last(memory, member, unit.head, args.num_kv_heads);
    __syncthreads();
    if (is_last)
        merge_member<S::HEAD_DIM, S::THREADS, 1>(args, memory, member, unit.head, threadIdx.x);
}

// Process a share. Each iteration starts the copy of a tile and multiplies the tile whose copy was
// started STAGES - 1 iterations before; if nothing is in flight yet, iterations before the first
// tile only copy.
//
// For the first unit, history_ready data is read before the preceding kernels have ended: all keys
// except those of this step's tokens.
//
// A source that REHEARSES has its last tile processed once before the preceding kernels have ended,
// with whatever is in place of the queries, and without writing anything: the instructions are then
// in the caches of the multiprocessor. One request waits longer for them than for its keys. Only
// units that are not cut are rehearsed: of many blocks, some start when those kernels have ended.
//
// If it CASCADES, sequences may have prefixes.
template <class S, bool CASCADES, class Source>
__device__ __forceinline__ void mainloop(const Arguments<typename S::Element>& args, Source source,
                                         const Item* items, const Share& share, int* arrivals,
                                         float* slots, bool history_ready,
                                         const PrefixMemory& prefixes) {
    using T = typename S::Element;
    constexpr bool CROSSES_UNITS = TileProducer<S, Source::ROTATES>::CROSSES_UNITS;
    extern __shared__ __align__(16) unsigned char memory[];
    T* queries = reinterpret_cast<T*>(memory);
    T* tiles = reinterpret_cast<T*>(memory + S::QUERY_BYTES);
    float2* states = reinterpret_cast<float2*>(memory + S::QUERY_BYTES + S::TILE_BYTES);
    const int warp = threadIdx.x / 32;
    const int warp_m = warp % S::WARPS_M;
    const int warp_n = warp / S::WARPS_M;

    if (share.begin == share.end) {
        leave(share);
        return;
    }
    // Needed when all else has been computed.
    if (args.sinks != nullptr && threadIdx.x * 32 < args.num_heads)
        prefetch_l2(args.sinks + threadIdx.x * 32);
    WorkIterator<S> work;
    work.begin(args, items, share);
    TileProducer<S, Source::ROTATES> producer;
    HeadRow<S> rows[2];
    State<S> state;
    Unit done;           // the previous unit, whose sums are in `state`
    int stage = 0;       // of the current tile
    int ready = 0;       // keys below it have been copied for the next `num_begun` tiles
    int num_begun = 0;
    bool is_first = true, is_over = false;
    bool rehearses = Source::REHEARSES && HAS_PDL && history_ready && share.pieces == 1;
    bool is_rehearsal = false, waits = true;  // `done` was one; for the preceding kernels

    // Reduces the sums of the warps in the stage of the last tile: in other stages, tiles of the
    // next unit may be arriving.
    const auto finish = [&] {
        const int last = stage == 0 ? S::STAGES - 1 : stage - 1;
        float* const sums = reinterpret_cast<float*>(
            tiles + (S::SUMS_APART ? 2 * S::STAGES * S::TILE
                                   : (CROSSES_UNITS ? 2 * last * S::TILE : 0)));
        __syncthreads();  // all warps are done with the tile
        store_state<S>(sums, states, state, done.num_rows, warp_m, warp_n);
        __syncthreads();
        Member member = {};
        if constexpr (CASCADES) member = member_of<S>(prefixes, done, share);
        const bool emitted = finish_unit<S>(done, share, sums, states, Slots<S>(slots), arrivals,
                                            [&](int row, int column, const Merged& merged) {
                                                if (CASCADES && member.pieces > 0)
                                                    leave_own<S>(args, prefixes, member, done.head,
                                                                 row, column, merged);
                                                else if (!is_rehearsal)
                                                    write_out<S>(args, done, row, column, merged);
                                            });
        if (CASCADES && member.pieces > 0 && emitted)
            merge_if_last<S>(args, prefixes, member, done);
        __syncthreads();  // all sums are read
    };

    while (true) {
        if (!CROSSES_UNITS && !is_first) finish();
        if (Source::REHEARSES && rehearses) work.unit.from = work.unit.to - 1;
        const Unit& unit = work.unit;
        const int history = unit.item.kv_len - unit.item.query_len;
        const bool begins = is_first || !CROSSES_UNITS;
        if (!is_over) {
            if (begins) {
                producer.begin(args, work);
                const int begin = producer.tile, end = producer.end;
                // Ahead of the copies in the memory pipeline.
                source.prepare(args, unit, begin, end);
                if constexpr (Source::REHEARSES) source.rehearses(rehearses);
                // The key that `Source` rotates is not read from the cache.
                ready = Source::ROTATES || !history_ready || !is_first ? ALL_KEYS : history;
                num_begun = min(end - begin, S::STAGES);
                // Not unrolled: with few sequences, instruction fetches are noticeable.
#pragma unroll 1
                for (int i = 0; i < S::STAGES; ++i) {
                    if (i < num_begun) producer.load(tiles, args, i, begin + i, 0, ready);
                    // The last one is awaited together with the first iteration's copy.
                    if (i < S::STAGES - 1) ptx::commit_copies();
                }
            }
            if (Source::REHEARSES ? waits && !rehearses : is_first) {
                pdl_wait();
                pdl_launch_dependents();
                waits = false;
            }
            if (S::QUERIES_IN_REGISTERS)
                load_queries<S>(rows, args, unit, source.key_row(args, unit), warp_m);
            else
                copy_queries<S>(queries, args, unit);
            if (!S::QUERIES_IN_REGISTERS) ptx::commit_copies();
            source.load(args, unit);
        }
        if (CROSSES_UNITS && !is_first) finish();
        if (is_over) return;

        const int lowest = history + args.token_of(unit.item.first_row);
        const int highest = history + args.token_of(unit.item.first_row + unit.num_rows - 1);
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; ++f) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                state.max[f][half] = -CUDART_INF_F;
                state.total[f][half] = 0.0f;
            }
#pragma unroll
            for (int n = 0; n < S::HEAD_DIM / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) state.sums[f][n][e] = 0.0f;
        }
        const int end = unit.item.kv_begin + unit.to;
        int tile = unit.item.kv_begin + unit.from;
        int turn = 0;
        if (begins) {
            turn = 1 - S::STAGES;
            stage = 1 % S::STAGES;
        }
#pragma unroll 1
        for (; tile < end; ++turn) {
            if (turn >= 0) {
                ptx::wait_copies<S::STAGES - 2>();
                // The tile is visible to all readers, and the one to be overwritten has been read.
                if (S::PRIVATE)
                    __syncwarp();
                else
                    __syncthreads();
            }
            if (turn == 0 && !S::QUERIES_IN_REGISTERS) {
                ptx::wait_copies<0>();
                __syncthreads();
                if constexpr (S::QUANTIZED) {
                    convert_queries<S>(queries);
                    __syncthreads();
                }
            }
            int from = 0;
            if (producer.has_more()) {
                if (num_begun-- > 0) from = ready;
                if (from < ALL_KEYS)
                    producer.load(tiles, args, stage == 0 ? S::STAGES - 1 : stage - 1, producer.tile, from,
                              ALL_KEYS);
                producer.next(args);
            }
            if (turn >= 0 || from < ALL_KEYS) ptx::commit_copies();
            const int now = stage;
            stage = stage + 1 == S::STAGES ? 0 : stage + 1;
            if (turn < 0) continue;
            if (turn == 0) {
                source.rotate(unit, rows);
                rows[0].become_operands();
                rows[1].become_operands();
            }

            T* const keys = tiles + 2 * now * S::TILE;
            T* const values = keys + S::TILE;
            if (source.is_new(unit, tile)) source.place(args, unit, rows, keys, values);
            Scores<S> scores;
            mma_qk<S>(scores, rows, queries, keys, warp_m, warp_n);
            if constexpr (S::QUANTIZED) apply_scales<S>(scores, keys, warp_n);
            float scale = args.scale;
            if (args.soft_cap > 0.0f) {
                cap_scores<S>(scores, scale, args.soft_cap);
                scale = 1.0f;
            }
            const int first_key = tile * S::KEYS;
            if (first_key + S::KEYS - 1 > lowest || first_key <= highest - args.window)
                mask_scores<S>(scores, args, unit, warp_m, first_key + warp_n * S::WARP_KEYS);
            softmax_step<S>(state, scores, scale, ValueLogs<S>(values, warp_n));
            if constexpr (S::QUANTIZED) apply_scales<S>(scores, values, warp_n);
            mma_pv<S>(state, scores, values, warp_n);
            ++tile;
        }
        done = unit;
        is_first = false;
        is_rehearsal = rehearses;
        if (Source::REHEARSES && rehearses) {
            work.unit.from = done.from = 0;  // the unit is whole
            rehearses = false;
            continue;
        }
        is_over = work.left == 0;
        if (!is_over) work.next(args);
    }
}

}  // namespace attention

// Attention of the chunks selected by `plan`, with the same unit_rows = ROWS, unit_keys = KEYS,
// window and number of shares = blocks.
//
//   q [T, H, D], rows q_stride elements apart; out [T, H, D]
//   k_cache, v_cache [num_blocks, block_size, G, D], blocks block_stride elements apart; of bytes,
//                    with scales at the end of each block, if S::QUANTIZED
//   block_tables [n, table_stride]
//   sinks [H], of each head the score of a further key whose value is 0; null for none
//   slots 2 * gridDim.x * ROWS * (D + 2) floats of scratch
//   history_ready   everything except q, and the keys and values of the tokens in q, was written
//                   before the preceding kernel was launched
template <class S>
__global__ void __launch_bounds__(S::THREADS, 2)
    attend(const typename S::Element* q, const typename S::Element* k_cache,
           const typename S::Element* v_cache, typename S::Element* out, const int* block_tables,
           long long q_stride, long long block_stride, int table_stride, int block_shift,
           int num_heads, int num_kv_heads, float scale, float soft_cap, int window,
           const float* sinks, const attention::Item* items, const attention::Share* shares,
           int* arrivals, float* slots, bool history_ready) {
    using namespace attention;
    const Arguments<typename S::Element> args(q, k_cache, v_cache, out, block_tables, q_stride,
                                              block_stride, table_stride, block_shift, num_heads,
                                              num_kv_heads, scale, soft_cap, window, sinks);
    if (!history_ready) pdl_wait();
    mainloop<S, false>(args, InPlace<S>(), items, load_l2(shares + blockIdx.x), arrivals, slots,
                       history_ready, {});
}

// The same for a plan of `plan_cascade`, with the memory of its prefixes (attention_prefixes.cuh).
// Rows have group <= ROWS.
template <class S>
__global__ void __launch_bounds__(S::THREADS, S::HEAD_DIM == 64 ? 3 : 2)
    attend_cascade(const typename S::Element* q, const typename S::Element* k_cache,
                   const typename S::Element* v_cache, typename S::Element* out,
                   const int* block_tables, long long q_stride, long long block_stride,
                   int table_stride, int block_shift, int num_heads, int num_kv_heads, float scale,
                   float soft_cap, int window, const float* sinks, const attention::Item* items,
                   const attention::Share* shares, int* arrivals, float* slots, bool history_ready,
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
    if (share.prefix_pieces > 0) {
        attend_pieces<PieceShape<S, S::STAGES>>(args, memory, share.prefix_pieces);
        __syncthreads();  // all tiles are read
    }
    mainloop<S, true>(args, InPlace<S>(), items, share, arrivals, slots, history_ready, memory);
}

// Fused `rope_write_kv` of rope.cu and `attend`, for one chunk of up to MAX_ROPE_TOKENS tokens.
template <class S>
__global__ void __launch_bounds__(S::THREADS, 2)
    rope_attend_chunk(const typename S::Element* qkv, typename S::Element* k_cache,
                      typename S::Element* v_cache, typename S::Element* out,
                      const int* block_tables, long long qkv_stride, long long block_stride,
                      int table_stride, int block_shift, int num_heads, int num_kv_heads,
                      float scale, float soft_cap, int window, const float* sinks,
                      const attention::Item* items, const attention::Share* shares, int* arrivals,
                      float* slots, bool history_ready, const long long* slot_mapping,
                      const long long* positions, const float* cos, const float* sin) {
    using namespace attention;
    const Arguments<typename S::Element> args(qkv, k_cache, v_cache, out, block_tables, qkv_stride,
                                              block_stride, table_stride, block_shift, num_heads,
                                              num_kv_heads, scale, soft_cap, window, sinks);
    const Projection<typename S::Element> projection = {
        k_cache, v_cache, slot_mapping, positions, cos, sin, nullptr, nullptr, 0.0f};
    if (!history_ready) pdl_wait();
    mainloop<S, false>(args, RotatedChunk<S>(projection), items, load_l2(shares + blockIdx.x),
                       arrivals, slots, history_ready, {});
}

// The same for chunks of one token each.
//
//   qkv [T, (H + 2 * G) * D], rows qkv_stride elements apart
//   slots, positions [T]; cos, sin [positions, D]; q_weight, k_weight [D] if NORM
template <class S, bool NORM>
__global__ void __launch_bounds__(S::THREADS, 2)
    rope_attend(const typename S::Element* qkv, typename S::Element* k_cache,
                typename S::Element* v_cache, typename S::Element* out, const int* block_tables,
                long long qkv_stride, long long block_stride, int table_stride, int block_shift,
                int num_heads, int num_kv_heads, float scale, float soft_cap, int window,
                const float* sinks, const attention::Item* items, const attention::Share* shares,
                int* arrivals, float* slots, bool history_ready, const long long* slot_mapping,
                const long long* positions, const float* cos, const float* sin,
                const float* q_weight, const float* k_weight, float eps) {
    using namespace attention;
    const Arguments<typename S::Element> args(qkv, k_cache, v_cache, out, block_tables, qkv_stride,
                                              block_stride, table_stride, block_shift, num_heads,
                                              num_kv_heads, scale, soft_cap, window, sinks);
    const Projection<typename S::Element> projection = {
        k_cache, v_cache, slot_mapping, positions, cos, sin, q_weight, k_weight, eps};
    if (!history_ready) pdl_wait();
    mainloop<S, false>(args, Rotated<S, NORM>(projection), items, load_l2(shares + blockIdx.x),
                       arrivals, slots, history_ready, {});
}
