// The consumer warpgroups of attention_hopper.cu: each processes 64 rows of all units of its block.
#pragma once

#include "attention/attention_hopper_block.cuh"
#include "eight_bit.cuh"

namespace attention {

template <class S>
using Sums = float[S::HEAD_DIM / 2];  // [HEAD_DIM / 8][2 rows][2 columns]

template <class S>
struct State {
    Sums<S> sums;
    float max[2];    // running maximum of the scores, in units of log 2
    float total[2];  // running sum of the weights, this lane's columns only
};

template <class S>
using Scores = float[S::KEYS / 2];  // [KEYS / 8][2 rows][2 columns]

template <class S>
using Weights = unsigned[S::KEYS / 4];  // pairs of columns, as left operands of wgmma

template <class S>
using Queries = unsigned[S::HEAD_DIM / 4];  // pairs of columns, as left operands of wgmma

// Loads this warp's 16 rows, at shared address `rows`, into registers.
template <class S>
__device__ __forceinline__ void load_queries(Queries<S>& queries, unsigned rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < S::HEAD_DIM / 16; ++step) {
        unsigned fragment[4];
        ptx::load_matrices(fragment, rows + S::place(lane % 16, step * 2 + lane / 16));
#pragma unroll
        for (int i = 0; i < 4; ++i) queries[step * 4 + i] = fragment[i];
    }
}

// Starts scores = queries @ keys^T.
template <class S>
__device__ __forceinline__ void start_scores(Scores<S>& scores, const Queries<S>& queries,
                                             unsigned keys) {
#pragma unroll
    for (int step = 0; step < S::HEAD_DIM / 16; ++step)
        hopper::wgmma<typename S::Element, true>(
            scores, queries + 4 * step,
            hopper::smem_descriptor<S::EIGHT_ROWS_BYTES>(keys, step / 4 * S::PIECE_BYTES + step % 4 * 32),
            step > 0);
    hopper::wgmma_commit();
}

// Starts sums += weights @ values.
template <class S>
__device__ __forceinline__ void start_sums(State<S>& state, const Weights<S>& weights,
                                           unsigned values) {
#pragma unroll
    for (int step = 0; step < S::KEYS / 16; ++step)
        hopper::wgmma<typename S::Element, false>(
            state.sums, weights + 4 * step,
            hopper::smem_descriptor<S::EIGHT_ROWS_BYTES>(values, step * 2 * S::EIGHT_ROWS_BYTES), true);
    hopper::wgmma_commit();
}

// Mask bounds of a thread's two rows. Rows that do not exist are treated like the last valid one.
struct Rows {
    int last[2];     // last key that each attends to
    int lowest;      // last key that all rows of the warpgroup attend to, ignoring the window
    int window_end;  // last key that the window masks for one of them

    template <typename T>
    __device__ __forceinline__ void find(const Arguments<T>& args, const Unit& unit,
                                         int first_row) {
        const int history = unit.item.kv_len - unit.item.query_len;
        const int highest_row = unit.num_rows - 1;
        const int unit_row = unit.item.first_row;
        const auto last_of = [&](int row) {
            return history + args.token_of(unit_row + min(row, highest_row));
        };
        const int own_row = first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        last[0] = last_of(own_row);
        last[1] = last_of(own_row + 8);
        lowest = last_of(first_row);
        window_end = last_of(first_row + 63) - args.window;
    }
};

// Scores of keys after a row's last one, or of those BEFORE its window, become -inf.
template <class S, bool BEFORE>
__device__ __forceinline__ void mask_scores(Scores<S>& scores, const int (&last)[2],
                                            int first_key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int border = last[half] - first_key - threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < S::KEYS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (BEFORE ? n * 8 + e <= border : n * 8 + e > border)
                    scores[n * 4 + half * 2 + e] = -CUDART_INF_F;
    }
}

// Online softmax: scores become weights relative to the running maximum; earlier sums are to be
// multiplied by `rescale`.
template <class S>
__device__ __forceinline__ void softmax_step(State<S>& state, Scores<S>& scores, float scale,
                                             float (&rescale)[2]) {
    float largest[2] = {scores[0], scores[2]};
#pragma unroll
    for (int i = 0; i < S::KEYS / 2; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores[i]);
    float origin[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float before = state.max[half];
        const float now = fmaxf(before, max_of_quad(largest[half]) * scale);
        // For a row without keys so far, -inf - -inf would be NaN.
        origin[half] = now == -CUDART_INF_F ? 0.0f : now;
        rescale[half] = ptx::exp2(before - origin[half]);
        state.max[half] = now;
    }
    float total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < S::KEYS / 2; ++i) {
        const int half = i / 2 % 2;
        scores[i] = ptx::exp2(fmaf(scores[i], scale, -origin[half]));
        total[half] += scores[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
        state.total[half] = fmaf(state.total[half], rescale[half], total[half]);
}

template <class S>
__device__ __forceinline__ void pack_weights(Weights<S>& weights, const Scores<S>& scores) {
#pragma unroll
    for (int i = 0; i < S::KEYS / 4; ++i)
        weights[i] = ptx::pack<typename S::Element>(scores[2 * i], scores[2 * i + 1]);
}

// Where the rows of whole units go. Those of others go to `out` in any case.
struct InOut {};

// In e4m3, each with a coarse scale of its own (eight_bit.cuh).
struct CoarseRows {
    unsigned char* values;  // [T, H, D]
    unsigned char* codes;   // [T, H], of the scales
};

// What the sums of a row of a whole unit are multiplied by; 0 for a row without keys. `total` is
// this lane's.
template <class S>
__device__ __forceinline__ float inverse_total(const Arguments<typename S::Element>& args,
                                               const Unit& unit, int row, float max, float total) {
    const int head = query_of<S>(args, unit, row).head;
    const float sum = sum_of_quad(total) + sink_weight(args, head, max);
    return sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f;
}

// Writes this warp's rows of a whole unit, staged in the shared memory of its queries. `first_row`
// is the first of the 16 in the unit.
template <class S>
__device__ __forceinline__ void write_rows(const Arguments<typename S::Element>& args,
                                           const Unit& unit, const Sums<S>& sums,
                                           const float (&maxima)[2], const float (&totals)[2],
                                           unsigned char* staged, int first_row, const InOut&) {
    using T = typename S::Element;
    const int lane = threadIdx.x % 32;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
        inverse[half] = inverse_total<S>(args, unit, first_row + half * 8 + lane / 4, maxima[half],
                                         totals[half]);
    const unsigned target = ptx::shared_address(staged);
#pragma unroll
    for (int n = 0; n < S::CHUNKS; n += 2) {
        const auto pair = [&](int i) {
            const float factor = inverse[i / 2 % 2];
            return ptx::pack<T>(sums[n * 4 + i] * factor, sums[n * 4 + i + 1] * factor);
        };
        ptx::store_matrices(target + S::place(lane % 16, n + lane / 16), pair(0), pair(2), pair(4),
                            pair(6));
    }
    __syncwarp();
    constexpr int ROWS_AT_ONCE = 32 / S::CHUNKS;
    const int chunk = lane % S::CHUNKS;
    const int num_rows = unit.num_rows - first_row;
    const int packed_row = unit.item.first_row + first_row;
    T* const out = args.out +
                   static_cast<long long>(unit.item.query_start) * args.num_heads * S::HEAD_DIM +
                   unit.head * args.group * S::HEAD_DIM + chunk * 8;
#pragma unroll
    for (int i = 0; i < 16; i += ROWS_AT_ONCE) {
        const int row = i + lane / S::CHUNKS;
        const int token = args.token_of(packed_row + row);
        const int head = packed_row + row - token * args.group;
        const uint4 raw = *reinterpret_cast<const uint4*>(staged + S::place(row, chunk));
        if (row < num_rows)
            store_vector(
                out + (static_cast<long long>(token) * args.num_heads + head) * S::HEAD_DIM, raw);
    }
}

// The same in e4m3.
template <class S>
__device__ __forceinline__ void write_rows(const Arguments<typename S::Element>& args,
                                           const Unit& unit, const Sums<S>& sums,
                                           const float (&maxima)[2], const float (&totals)[2],
                                           unsigned char* staged, int first_row,
                                           const CoarseRows& rows) {
    const int lane = threadIdx.x % 32;
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + half * 8 + lane / 4;
        const float inverse = inverse_total<S>(args, unit, row, maxima[half], totals[half]);
        unsigned largest = 0;  // of what a quad has of a row
#pragma unroll
        for (int i = half * 2; i < S::HEAD_DIM / 2; i += 4)
            largest = max(largest, max(magnitude(sums[i]), magnitude(sums[i + 1])));
        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
        const unsigned code = coarse_code(magnitude(__uint_as_float(largest) * inverse));
        factor[half] = inverse * inverse_coarse_scale(code);
        if (lane % 4 == 0 && row < unit.num_rows) {
            const Query query = query_of<S>(args, unit, row);
            const long long token = unit.item.query_start + query.token;
            rows.codes[token * args.num_heads + query.head] = code;
        }
    }
    // Of 16 columns a lane has two of the first eight and two of the others, which are adjacent in
    // a word, and are brought in order when they are read.
    constexpr int VECTORS = S::HEAD_DIM / 16;
    const unsigned target = ptx::shared_address(staged);
#pragma unroll
    for (int vector = 0; vector < VECTORS; vector += 2) {
        const auto word = [&](int i) {
            const float by = factor[i / 2 % 2];
            const float scaled[4] = {sums[i] * by, sums[i + 1] * by, sums[i + 4] * by,
                                     sums[i + 5] * by};
            return Fp8::encode(scaled);
        };
        const int i = vector * 8;
        ptx::store_matrices(target + S::place(lane % 16, vector + lane / 16), word(i), word(i + 2),
                            word(i + 8), word(i + 10));
    }
    __syncwarp();
    constexpr int ROWS_AT_ONCE = 32 / VECTORS;
    const int vector = lane % VECTORS;
#pragma unroll
    for (int i = 0; i < 16; i += ROWS_AT_ONCE) {
        const int row = i + lane / VECTORS;
        const uint4 raw = *reinterpret_cast<const uint4*>(staged + S::place(row, vector));
        if (first_row + row >= unit.num_rows) continue;
        const Query query = query_of<S>(args, unit, first_row + row);
        const long long place = out_row<S>(args, unit, query) - args.out + vector * 16;
        *reinterpret_cast<uint4*>(rows.values + place) =
            make_uint4(__byte_perm(raw.x, raw.y, 0x5410), __byte_perm(raw.z, raw.w, 0x5410),
                       __byte_perm(raw.x, raw.y, 0x7632), __byte_perm(raw.z, raw.w, 0x7632));
    }
}

// Stores the partial sums of a split unit, and merges those of its blocks if this is the last one
// to arrive with these rows.
template <class S>
__device__ __forceinline__ void leave_rows(const Arguments<typename S::Element>& args,
                                           const Unit& unit, const Sums<S>& sums,
                                           const float (&maxima)[2], const float (&totals)[2],
                                           const Slots<S>& slots, int total, int* arrivals,
                                           bool* is_last, int group) {
    const int lane = threadIdx.x % 32;
    const int thread = threadIdx.x % 128;
    const int begin = group * S::GROUP_ROWS;
    const int slot = Slots<S>::own(unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = begin + thread / 32 * 16 + half * 8 + lane / 4;
        const float row_total = sum_of_quad(totals[half]);
        if (lane % 4 == 0) *slots.state(slot, row) = make_float2(maxima[half], row_total);
        float* const place = slots.row(slot, row) + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < S::CHUNKS; ++n)
            *reinterpret_cast<float2*>(place + n * 8) =
                make_float2(sums[n * 4 + half * 2], sums[n * 4 + half * 2 + 1]);
    }
    const Blocks blocks(unit, total);
    int* const arrived = arrivals + group * gridDim.x + blocks.first;
    __threadfence();
    hopper::named_barrier_sync<128>(1 + group);
    if (thread == 0) {
        is_last[group] = atomicAdd(arrived, 1) == blocks.last - blocks.first;
        if (is_last[group]) *arrived = 0;  // for the next launch with this plan
    }
    hopper::named_barrier_sync<128>(1 + group);
    if (!is_last[group]) return;
    __threadfence();
    merge_slots<S, 128>(slots, blocks, begin, min(begin + S::GROUP_ROWS, unit.num_rows), thread,
                        [&](int row, int column, const Merged& merged) {
                            write_out<S>(args, unit, row, column, merged);
                        });
}

// A consumer warpgroup: rows [64 * group, 64 * group + 64) of all units of the block. Those of
// whole units go to `whole_rows`.
template <class S, class WholeRows>
__device__ __forceinline__ void consume_units(const Arguments<typename S::Element>& args,
                                              const SharedStorage<S>& shared, const Slots<S>& slots,
                                              int* arrivals, int group,
                                              const WholeRows& whole_rows) {
    const bool is_elected = threadIdx.x % 32 == 0;  // signals for its warp after its products
    const unsigned keys = ptx::shared_address(shared.keys);
    const unsigned values = ptx::shared_address(shared.values);
    const bool capped = args.soft_cap > 0.0f;
    const float scale = capped ? 1.0f : args.scale;
    const SoftCap cap(args.scale, capped ? args.soft_cap : 1.0f);

    State<S> state;
    Scores<S> scores;
    Weights<S> weights;
#pragma unroll
    for (int i = 0; i < S::HEAD_DIM / 2; ++i) state.sums[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < S::KEYS / 4; ++i) weights[i] = 0;
    Rows rows = {};
    Queries<S> queries;
#pragma unroll
    for (int i = 0; i < S::HEAD_DIM / 4; ++i) queries[i] = 0;
    int begin = 0, tile = 0;  // of the unit of `at`; tile is the one in `weights`
    bool is_first = true;
    const int warp_row = group * S::GROUP_ROWS + threadIdx.x / 32 % 4 * 16;

    PipelineState<S::KEY_STAGES> key;
    PipelineState<S::VALUE_STAGES> value;
    PipelineState<S::UNITS> at, upcoming;
    PipelineState<S::QUERY_STAGES> used, loaded;  // by the unit of `at`, and by the next one

    // Each iteration starts the scores of the next tile and the sums of this one, even if the next
    // tile is another unit's. There is no tile before the first and none after the last: the
    // products computed in their place are not used.
    for (;;) {
        const bool ends = is_first || tile == begin;  // the unit
        bool is_last = false;
        if (ends) {
            hopper::barrier_wait(upcoming.of(shared.unit_full), upcoming.parity);
            is_last = uniform(shared.units[upcoming.index].num_rows) == 0;
            if (!is_last) {
                hopper::barrier_wait(loaded.of(shared.q_full), loaded.parity);
                load_queries<S>(queries, ptx::shared_address(shared.queries) +
                                             loaded.index * S::TILE_BYTES +
                                             warp_row * S::ROW_BYTES);
                loaded.advance();
            }
        }
        if (!is_last) hopper::barrier_wait(key.of(shared.k_full), key.parity);
        hopper::fence_operand(scores);
        hopper::fence_operand(weights);
        hopper::fence_operand(queries);
        hopper::fence_operand(state.sums);
        hopper::wgmma_fence();
        start_scores<S>(scores, queries, keys + key.index * S::TILE_BYTES);
        if (!is_first) hopper::barrier_wait(value.of(shared.v_full), value.parity);
        start_sums<S>(state, weights, values + value.index * S::TILE_BYTES);
        hopper::wgmma_wait<1>();
        hopper::fence_operand(scores);
        if (is_elected && !is_last) hopper::arrive(key.of(shared.k_empty));
        key.advance();

        const float before_max[2] = {state.max[0], state.max[1]};
        const float before_total[2] = {state.total[0], state.total[1]};
        --tile;
        if (ends && !is_last) {
            const Unit& unit = shared.units[upcoming.index];
            begin = uniform(unit.item.kv_begin + unit.from);
            tile = uniform(unit.item.kv_begin + unit.to - 1);
            rows.find(args, unit, group * S::GROUP_ROWS);
            state.max[0] = state.max[1] = -CUDART_INF_F;
            state.total[0] = state.total[1] = 0.0f;
        }
        if (capped) {
#pragma unroll
            for (int i = 0; i < S::KEYS / 2; ++i) scores[i] = cap(scores[i]);
        }
        const int first_key = tile * S::KEYS;
        if (first_key + S::KEYS - 1 > rows.lowest)
            mask_scores<S, false>(scores, rows.last, first_key);
        if (first_key <= rows.window_end)
            mask_scores<S, true>(scores, rows.last, first_key + args.window);
        float rescale[2];
        softmax_step<S>(state, scores, scale, rescale);

        hopper::wgmma_wait<0>();
        hopper::fence_operand(state.sums);
        hopper::fence_operand(weights);
        if (ends) {
            if (!is_first) {
                if (is_elected) hopper::arrive(value.of(shared.v_empty));
                value.advance();
                const Unit& unit = shared.units[at.index];
                if (unit.whole())
                    write_rows<S>(
                        args, unit, state.sums, before_max, before_total,
                        shared.queries + used.index * S::TILE_BYTES + warp_row * S::ROW_BYTES,
                        warp_row, whole_rows);
                else
                    leave_rows<S>(args, unit, state.sums, before_max, before_total, slots,
                                  shared.totals[at.index], arrivals, shared.is_last, group);
                // By every thread, as racecheck does not know that a warp's barrier orders the
                // other lanes' reads of the staged rows.
                hopper::arrive(used.of(shared.q_empty));
                __syncwarp();
                if (is_elected) hopper::arrive(at.of(shared.unit_empty));
                at.advance();
                used.advance();
            }
            if (is_last) break;
            upcoming.advance();
            is_first = false;
#pragma unroll
            for (int i = 0; i < S::HEAD_DIM / 2; ++i) state.sums[i] = 0.0f;
        } else {
            if (is_elected) hopper::arrive(value.of(shared.v_empty));
            value.advance();
            // Most tiles do not raise the maximum.
            if (__any_sync(FULL_WARP, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < S::HEAD_DIM / 2; ++i) state.sums[i] *= rescale[i / 2 % 2];
            }
        }
        pack_weights<S>(weights, scores);
    }
}

}  // namespace attention
