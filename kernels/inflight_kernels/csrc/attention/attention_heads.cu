// Attention for many sequences with one or two tokens each: one warp per KV head.
//
// Like attention.cu, but a unit is HEADS adjacent KV heads and each warp processes one of them: it
// copies, multiplies and accumulates without waiting for other warps, and with so many sequences
// there is work for all. The product is transposed: keys are the 16 rows of the mma, and the few
// queries its 8 columns, which takes half of the time and half of the registers.
//
// Fragments: a lane has the scores of keys lane / 4 and lane / 4 + 8 for rows 2 * (lane % 4) and
// the next one, and of the sums the columns lane / 4 and lane / 4 + 8 of each 16, for the same
// rows.

#include "attention/attention_cascade.cuh"
#include "attention/attention_work.cuh"

namespace attention {

// Tile shape of a block of threads.
//   STAGES tiles of each warp are in shared memory.
//   Cached is the type of the cache: Element, or a byte of kv_quantization.cuh.
template <typename Element_, int HEAD_DIM_, int HEADS_, int STAGES_, typename Cached_ = Element_>
struct HeadsShape {
    using Element = Element_;
    using Cached = Cached_;
    static constexpr bool QUANTIZED = !SAME<Cached, Element>;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int HEADS = HEADS_;  // KV heads per unit, and warps
    static constexpr int BLOCKS = 8 / HEADS;  // per multiprocessor
    static constexpr int STAGES = STAGES_;

    static constexpr int THREADS = 32 * HEADS;
    static constexpr int ROWS = 8;  // per KV head
    static constexpr int KEYS = 16;
    static constexpr int COPY_KEYS = KEYS;
    static constexpr bool CROSSES_UNITS = true;
    static constexpr int PIECE_STAGES = 3;  // of pieces of prefixes, in the memory of its own tiles

    static constexpr int CHUNKS = HEAD_DIM / 8;
    static constexpr int PITCH = HEAD_DIM + 8;
    // Of keys, or of values, of one head.
    static constexpr int TILE = QUANTIZED ? byte_tile_elements(KEYS, HEAD_DIM) : KEYS * PITCH;

    using Operand = typename OperandOf<Element, QUANTIZED>::type;  // of mma

    __device__ __forceinline__ static int first_key() { return 0; }
    __device__ __forceinline__ static int kv_head(const Unit& unit) {
        return unit.head * HEADS + threadIdx.x / 32;
    }
};

// A warp's state of its unit, two rows per lane.
template <class S>
struct HeadState {
    float sums[S::HEAD_DIM / 16][4];
    float max[2];    // running maximum of the scores, in units of log 2
    float total[2];  // running sum of the weights, this lane's keys only

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            max[r] = -CUDART_INF_F;
            total[r] = 0.0f;
        }
#pragma unroll
        for (int column = 0; column < S::HEAD_DIM / 16; ++column)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[column][e] = 0.0f;
    }
};

__device__ __forceinline__ float max_over_keys(float x) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
        x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance));
    return x;
}

__device__ __forceinline__ float sum_over_keys(float x) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
        x += __shfl_xor_sync(FULL_WARP, x, distance);
    return x;
}

// Loads row lane / 4 of a unit's queries; zero if it does not exist.
template <class S>
__device__ __forceinline__ void load_row(HeadRow<S>& row,
                                         const Arguments<typename S::Element>& args,
                                         const Unit& unit) {
    const int index = threadIdx.x % 32 / 4;
    if (index < unit.num_rows)
        row.load(query_row<S>(args, unit, index));
    else
        row.clear();
}

// scores = keys @ queries^T, in two accumulators to shorten the dependency chain.
template <class S>
__device__ __forceinline__ void mma_kq(float (&scores)[4], const HeadRow<S>& row,
                                       const typename S::Element* keys) {
    const int lane = threadIdx.x % 32;
    float parts[2][4] = {};
    if constexpr (S::QUANTIZED) {
        const unsigned base =
            ptx::shared_address(keys) + lane % 16 * byte_pitch(S::HEAD_DIM) + lane / 16 * 16;
#pragma unroll
        for (int step = 0; step < S::HEAD_DIM / 16; step += 2) {
            unsigned bytes[4];
            ptx::load_matrices(bytes, base + step * 16);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned a[4];
                S::Cached::template decode_halves<false>(bytes[2 * i], a[0], a[2]);
                S::Cached::template decode_halves<false>(bytes[2 * i + 1], a[1], a[3]);
                const unsigned(&words)[2] = row.words[step + i];
                ptx::mma<typename S::Operand>(parts[i], a, words[0], words[1]);
            }
        }
    } else {
        const unsigned base = ptx::shared_address(keys + lane % 16 * S::PITCH + lane / 16 * 8);
#pragma unroll
        for (int step = 0; step < S::HEAD_DIM / 16; ++step) {
            unsigned a[4];
            ptx::load_matrices(a, base + step * 32);
            ptx::mma<typename S::Element>(parts[step % 2], a, row.words[step][0],
                                          row.words[step][1]);
        }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[e] = parts[0][e] + parts[1][e];
}

// sums += values^T @ weights^T.
template <class S>
__device__ __forceinline__ void mma_vp(HeadState<S>& state, const float (&weights)[4],
                                       const typename S::Element* values) {
    using T = typename S::Operand;
    const int lane = threadIdx.x % 32;
    const unsigned b0 = ptx::transposed(ptx::pack<T>(weights[0], weights[1]));
    const unsigned b1 = ptx::transposed(ptx::pack<T>(weights[2], weights[3]));
    if constexpr (S::QUANTIZED) {
        const unsigned bytes_base =
            ptx::shared_address(values) + lane % 16 * byte_pitch(S::HEAD_DIM) + lane / 16 * 16;
#pragma unroll
        for (int column = 0; column < S::HEAD_DIM / 16; column += 2) {
            unsigned bytes[4];
            ptx::load_matrices_transposed(bytes, bytes_base + column * 16);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned a[4];
                S::Cached::template decode_halves<true>(bytes[2 * i], a[0], a[1]);
                S::Cached::template decode_halves<true>(bytes[2 * i + 1], a[2], a[3]);
                ptx::mma<T>(state.sums[column + i], a, b0, b1);
            }
        }
        return;
    }
    const int key = lane / 16 * 8 + lane % 8;
    const unsigned base = ptx::shared_address(values + key * S::PITCH + lane / 8 % 2 * 8);
#pragma unroll
    for (int column = 0; column < S::HEAD_DIM / 16; ++column) {
        unsigned a[4];
        ptx::load_matrices_transposed(a, base + column * 32);
        ptx::mma<T>(state.sums[column], a, b0, b1);
    }
}

// The scales of a lane's keys, or values, of a tile; 1 if the cache has none.
template <class S>
struct TileScales {
    float of[2];

    __device__ __forceinline__ explicit TileScales(const typename S::Element* tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            of[half] = 1.0f;
            if constexpr (S::QUANTIZED)
                of[half] = __half2float(scales_of<S>(tile)[threadIdx.x % 32 / 4 + half * 8]);
        }
    }
    // Multiplies scores by the scales of their keys, or weights by those of their values.
    __device__ __forceinline__ void apply(float (&scores)[4]) const {
        if (!S::QUANTIZED) return;
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[e] *= of[e / 2];
    }
};

// Masked scores become -inf.
template <class S>
__device__ __forceinline__ void mask_scores(float (&scores)[4],
                                            const Arguments<typename S::Element>& args,
                                            const Unit& unit, int first_key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const int row = min(lane % 4 * 2 + e % 2, unit.num_rows - 1);
        const int last = unit.item.kv_len - unit.item.query_len +
                         args.token_of(unit.item.first_row + row);
        const int key = first_key + lane / 4 + e / 2 * 8;
        if (key > last || key <= last - args.window) scores[e] = -CUDART_INF_F;
    }
}

// Online softmax: scores become weights relative to the running maximum; earlier sums are rescaled.
template <class S>
__device__ __forceinline__ void softmax_step(HeadState<S>& state, float (&scores)[4], float scale,
                                             const TileScales<S>& of_values) {
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float before = state.max[r];
        float largest;
        if constexpr (S::QUANTIZED)
            largest = max_over_keys(fmaxf(fmaf(scores[r], scale, value_log(of_values.of[0])),
                                          fmaf(scores[2 + r], scale, value_log(of_values.of[1]))));
        else
            largest = max_over_keys(fmaxf(scores[r], scores[2 + r])) * scale;
        const float now = fmaxf(before, largest);
        // For a row without keys so far, -inf - -inf would be NaN.
        const float origin = now == -CUDART_INF_F ? 0.0f : now;
        rescale[r] = ptx::exp2(before - origin);
        state.max[r] = now;
#pragma unroll
        for (int e = r; e < 4; e += 2) scores[e] = ptx::exp2(fmaf(scores[e], scale, -origin));
        state.total[r] = fmaf(state.total[r], rescale[r], scores[r] + scores[2 + r]);
    }
    // Most tiles do not raise the maximum.
    if (!__any_sync(FULL_WARP, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int column = 0; column < S::HEAD_DIM / 16; ++column)
#pragma unroll
        for (int e = 0; e < 4; ++e) state.sums[column][e] *= rescale[e % 2];
}

// Writes the rows of a unit that was not split.
template <class S>
__device__ __forceinline__ void write_rows(const Arguments<typename S::Element>& args,
                                           const Unit& unit, const HeadState<S>& state) {
    using T = typename S::Element;
    const int lane = threadIdx.x % 32;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int head = query_of<S>(args, unit, lane % 4 * 2 + r).head;
        const float total = sum_over_keys(state.total[r]) + sink_weight(args, head, state.max[r]);
        inverse[r] = total > 0.0f ? 1.0f / total : 0.0f;  // zero for a row without keys
    }
    const bool exists = lane / 4 < unit.num_rows;
    T* const row = out_row<S>(args, unit, query_of<S>(args, unit, exists ? lane / 4 : 0));
    if constexpr (S::QUANTIZED) {
        // Of each 16 columns, the first half of the registers has the even ones.
        uint2* const pairs = reinterpret_cast<uint2*>(row) + lane % 4;
#pragma unroll
        for (int column = 0; column < S::HEAD_DIM / 16; ++column) {
            const float* const sums = state.sums[column];
            const unsigned even =
                ptx::transposed(ptx::pack<T>(sums[0] * inverse[0], sums[1] * inverse[1]));
            const unsigned odd =
                ptx::transposed(ptx::pack<T>(sums[2] * inverse[0], sums[3] * inverse[1]));
            if (exists)
                pairs[column * 4] = make_uint2(__byte_perm(even, odd, 0x5410),
                                               __byte_perm(even, odd, 0x7632));
        }
        return;
    }
    unsigned* const out = reinterpret_cast<unsigned*>(row) + lane % 4;
#pragma unroll
    for (int column = 0; column < S::HEAD_DIM / 16; ++column)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* const sums = state.sums[column] + 2 * half;
            const unsigned word =
                ptx::transposed(ptx::pack<T>(sums[0] * inverse[0], sums[1] * inverse[1]));
            if (exists) out[column * 8 + half * 4] = word;
        }
}

// Stores the sums of this warp's rows, consecutive from these places on.
template <class S>
__device__ __forceinline__ void store_rows(float* sums, float2* states, const HeadState<S>& state,
                                           int num_rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float total = sum_over_keys(state.total[r]);
        const int row = lane % 4 * 2 + r;
        if (row < num_rows) {
            if (lane < 4) states[row] = make_float2(state.max[r], total);
            // Columns lane / 4 and lane / 4 + 8 of each 16, or 2 * (lane / 4) and the next one.
            constexpr int LANE_STEP = S::QUANTIZED ? 2 : 1, HALF_STEP = S::QUANTIZED ? 1 : 8;
            float* const own = sums + row * S::HEAD_DIM + lane / 4 * LANE_STEP;
#pragma unroll
            for (int column = 0; column < S::HEAD_DIM / 16; ++column)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    own[column * 16 + half * HALF_STEP] = state.sums[column][2 * half + r];
        }
    }
}

// Stores the partial sums of a split unit in a slot; merges the slots, and hands the rows to
// emit(row, column, merged), if this warp is the last one of its head to arrive. Returns whether it
// is.
template <class S, class Emit>
__device__ __forceinline__ bool leave_rows(const Unit& unit, const Share& share,
                                           const HeadState<S>& state, const Slots<S>& slots,
                                           int* arrivals, const Emit& emit) {
    const int lane = threadIdx.x % 32;
    const int slot = Slots<S>::own(unit);
    store_rows(slots.row(slot, 0), slots.state(slot, 0), state, unit.num_rows);
    const Blocks blocks(unit, share);
    bool is_last = false;
    __syncwarp();
    if (lane == 0) {
        int* const arrived = arrivals + threadIdx.x / 32 * gridDim.x + blocks.first;
        is_last = ptx::count_arrival(arrived) == blocks.last - blocks.first;
        if (is_last) *arrived = 0;  // for the next launch with this plan
    }
    is_last = __shfl_sync(FULL_WARP, is_last, 0);
    if (is_last) merge_slots<S, 32>(slots, blocks, 0, unit.num_rows, lane, emit);
    return is_last;
}

// Ends a unit, whose rows are written, or left for the merge.
template <class S>
__device__ __forceinline__ void finish_rows(const Arguments<typename S::Element>& args,
                                            const Unit& unit, const Share& share,
                                            const HeadState<S>& state, const Slots<S>& slots,
                                            int* arrivals) {
    if (unit.whole())
        write_rows(args, unit, state);
    else
        leave_rows(unit, share, state, slots, arrivals,
                   [&](int row, int column, const Merged& merged) {
                       write_out<S>(args, unit, row, column, merged);
                   });
}

// The same for a member of a prefix: its sums are merged with those of the pieces, by this warp if
// all of them are there.
template <class S>
__device__ __forceinline__ void finish_own_rows(const Arguments<typename S::Element>& args,
                                                const Unit& unit, const Share& share,
                                                const HeadState<S>& state, const Slots<S>& slots,
                                                int* arrivals, const PrefixMemory& memory,
                                                const Member& member) {
    const int head = S::kv_head(unit);
    const long long place = memory.own_row + member.place * args.num_heads + head * args.group;
    float* const sums = memory.sums + place * S::HEAD_DIM;
    float2* const states = memory.states + place;
    if (unit.whole()) {
        store_rows(sums, states, state, unit.num_rows);
    } else {
        const bool is_left = leave_rows(
            unit, share, state, slots, arrivals, [&](int row, int column, const Merged& merged) {
                *reinterpret_cast<float4*>(sums + row * S::HEAD_DIM + column) = merged.sums;
                if (column == 0) states[row] = make_float2(merged.max, merged.total);
            });
        if (!is_left) return;
    }
    bool is_last = false;
    __syncwarp();
    if (threadIdx.x % 32 == 0) is_last = arrive_last(memory, member, head, args.num_kv_heads);
    if (__shfl_sync(FULL_WARP, is_last, 0))
        merge_member<S::HEAD_DIM, 32, S::QUANTIZED ? 2 : 4>(args, memory, member, head,
                                                            threadIdx.x % 32);
}

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
        // If no block waited, the next kernel's wait could return before the preceding kernels have
        // ended.
        pdl_wait();
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
            finish_rows(args, unit, share, state, own_slots, arrivals);
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
