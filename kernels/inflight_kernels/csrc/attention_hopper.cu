// Causal attention of chunks with many rows over a paged KV cache, on Hopper's own tensor cores.
//
// A block has three groups of four warps (FlashAttention-3, arXiv:2407.08608). Two multiply: each
// has 64 of a unit's 128 rows, and while one turns scores into weights, the other one's products
// run. They go through the tiles of keys from the last to the first, and on into the next unit
// without a pause. The third group feeds them: two warps find the units and copy their queries, two
// have the copy engine fetch keys and values, block by block, into rings. attention_plan.cu says
// who works on what, and attention_units.cuh what units and shares are.

#include "attention_hopper.cuh"
#include "attention_units.cuh"
#include "common.cuh"

namespace attention {

template <typename Element_, int HEAD_DIM_>
struct HopperShape {
    using Element = Element_;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int HEADS = 1;  // KV heads of a unit
    static constexpr int ROWS = 128;
    static constexpr int KEYS = 128;
    static constexpr int UNITS = 4;         // that the block knows
    static constexpr int QUERY_STAGES = 2;  // units whose queries are in shared memory
    static constexpr int KEY_STAGES = 3;    // tiles
    static constexpr int VALUE_STAGES = 2;
    static constexpr int GROUPS = 2;  // that multiply, 64 rows each
    static constexpr int GROUP_ROWS = ROWS / GROUPS;
    static constexpr int THREADS = 128 * (GROUPS + 1);

    static constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes, in a row
    // Tiles lie in pieces of 8 rows x 64 columns, the 64s of the same rows next to each other: so
    // the copy engine writes a block of the cache at once.
    static constexpr int PIECE_BYTES = 1024;
    static constexpr int EIGHT_ROWS_BYTES = HEAD_DIM * 16;
    static constexpr int ROW_BYTES = HEAD_DIM * 2;
    static constexpr int TILE_BYTES = KEYS * ROW_BYTES;
    static constexpr int SHARED_BYTES =
        (QUERY_STAGES + KEY_STAGES + VALUE_STAGES) * TILE_BYTES + 1024;  // to align

    static_assert(ROWS == KEYS, "queries lie like a tile of keys");
    static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "of which there are instructions here");

    static __device__ __forceinline__ int kv_head(const Unit& unit) { return unit.head; }

    // Where a chunk of a tile is.
    static __device__ __forceinline__ int place(int row, int chunk) {
        return row / 8 * EIGHT_ROWS_BYTES + chunk / 8 * PIECE_BYTES +
               hopper::swizzle(row % 8, chunk % 8);
    }
};

// Of the threads that feed and of those that multiply: together no more than at the start.
constexpr int FEEDER_REGISTERS = 40;
constexpr int MULTIPLIER_REGISTERS = 232;
constexpr int QUERY_THREADS = 64;

template <class S>
struct Shared {
    unsigned char* queries;  // [QUERY_STAGES], a tile each
    unsigned char* keys;     // [KEY_STAGES]
    unsigned char* values;   // [VALUE_STAGES]
    Unit* units;             // [UNITS]
    int* totals;             // [UNITS] tiles of the step
    bool* is_last;
    // Of barriers, by unit or stage: `free` for the feeders, the others for those who read.
    unsigned unit_known, unit_free, queries_here, queries_free;
    unsigned keys_here, keys_free, values_here, values_free;
};

// Tells the compiler that a value is the same for the whole warp, so that what depends on it can be
// computed once.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(FULL_WARP, value, 0); }

// A place in a ring of SIZE, and how often, even or odd, it came round.
template <int SIZE>
struct Cursor {
    int index = 0;
    unsigned parity = 0;

    __device__ __forceinline__ unsigned of(unsigned barriers) const { return barriers + 8 * index; }
    __device__ __forceinline__ void advance() {
        if (++index == SIZE) {
            index = 0;
            parity ^= 1;
        }
    }
};

// ---------------------------------------------------------------- feeding

// The units of a block, one after the other: off the queue, or of its share.
template <class S>
struct UnitSource {
    const Item* items;
    Queue* queue;
    Share share;
    int num_units;  // in the queue
    int heads_at_once;
    int num_kv_heads;
    int group;
    int upcoming;  // unit off the queue; asked for early, since the answer takes long

    // A unit without rows ends the work.
    __device__ __forceinline__ void next(Unit& unit) {
        unit.num_rows = 0;
        if (num_units > 0) {
            const int taken = upcoming;
            if (taken >= num_units) return;
            upcoming = atomicAdd(&queue->next, 1);
            const int num_items = num_units / num_kv_heads;
            const int first_head = taken / (num_items * heads_at_once) * heads_at_once;
            const int heads = min(heads_at_once, num_kv_heads - first_head);
            const int inside = taken - first_head * num_items;
            unit.item = items[inside / heads];
            unit.head = first_head + inside % heads;
            unit.from = 0;
            unit.to = unit.item.kv_tiles;
        } else {
            if (share.begin >= share.end) return;
            unit.item = items[share.item];
            const int inside = share.begin - unit.item.first_tile;
            unit.head = inside / unit.item.kv_tiles;
            unit.from = inside - unit.head * unit.item.kv_tiles;
            unit.to = min(unit.item.kv_tiles, unit.from + share.end - share.begin);
            share.begin += unit.to - unit.from;
            if (unit.to == unit.item.kv_tiles && unit.head == num_kv_heads - 1) ++share.item;
        }
        unit.num_rows = min(S::ROWS, unit.item.query_len * group - unit.item.first_row);
    }

    // Before the first unit.
    __device__ __forceinline__ void open() {
        if (num_units > 0) upcoming = atomicAdd(&queue->next, 1);
    }

    // After the last one. The last block to come here leaves the queue ready for the next launch
    // with this plan.
    __device__ __forceinline__ void close() {
        if (num_units > 0 && atomicAdd(&queue->finished, 1) == gridDim.x - 1) {
            queue->next = 0;
            queue->finished = 0;
        }
    }
};

// Two warps: the second one hands the units out, one more than queries are copied of; both copy
// queries. Rows past the chunk become zero.
template <class S>
__device__ __forceinline__ void feed_units(const Arguments<typename S::Element>& args,
                                           const Shared<S>& shared, UnitSource<S> source,
                                           int thread) {
    constexpr int ROWS_AT_ONCE = QUERY_THREADS / S::CHUNKS;
    const int chunk = thread % S::CHUNKS;
    Cursor<S::UNITS> at, upcoming;
    const auto publish = [&] {
        if (thread < 32) return;
        hopper::wait(upcoming.of(shared.unit_free), upcoming.parity ^ 1);
        if (thread == 32) {
            source.next(shared.units[upcoming.index]);
            shared.totals[upcoming.index] = source.share.total;
            hopper::arrive(upcoming.of(shared.unit_known));
        }
        upcoming.advance();
    };
    if (thread == 32) source.open();
    publish();
    for (Cursor<S::QUERY_STAGES> stage;; stage.advance(), at.advance()) {
        hopper::wait(at.of(shared.unit_known), at.parity);
        const Unit& unit = shared.units[at.index];
        const int num_rows = unit.num_rows;
        if (num_rows == 0) break;
        publish();
        const unsigned target = ptx::shared_address(shared.queries + stage.index * S::TILE_BYTES);
        const typename S::Element* const first =
            args.q + unit.item.query_start * args.q_stride +
            (unit.head * args.group * S::HEAD_DIM + chunk * 8);
        const int first_row = unit.item.first_row;
        hopper::wait(stage.of(shared.queries_free), stage.parity ^ 1);
#pragma unroll 2
        for (int row = thread / S::CHUNKS; row < S::ROWS; row += ROWS_AT_ONCE) {
            const bool valid = row < num_rows;
            const int packed = first_row + (valid ? row : 0);
            const int token = args.token_of(packed);
            const int head = packed - token * args.group;
            ptx::copy_async(target + S::place(row, chunk),
                            first + token * args.q_stride + head * S::HEAD_DIM, valid);
        }
        ptx::commit_copies();
        ptx::wait_copies<0>();
        hopper::meet<QUERY_THREADS>(1 + S::GROUPS);
        if (thread == 0) hopper::arrive(stage.of(shared.queries_here));
    }
    if (thread >= 32) launch_next();
    if (thread == 32) source.close();
}

// Copies the rows of a block of the cache that are in the sequence, and makes the others zero:
// their weights are 0, but the cache may hold NaN there. `target` is where the block begins in the
// tile.
template <class S>
__device__ __forceinline__ void copy_partial(unsigned char* target,
                                             const typename S::Element* source, int row_stride,
                                             int num_rows, int block_size) {
#pragma unroll 2
    for (int index = threadIdx.x % 32; index < block_size * S::CHUNKS; index += 32) {
        const int row = index / S::CHUNKS;
        const int chunk = index % S::CHUNKS;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (row < num_rows) raw = load_vector(source + row * row_stride + chunk * 8);
        *reinterpret_cast<uint4*>(target + S::place(row, chunk)) = raw;
    }
}

// One warp: has the tiles of keys, or of VALUES, copied.
template <class S, bool VALUES>
__device__ __forceinline__ void feed_tiles(const Arguments<typename S::Element>& args,
                                           const Shared<S>& shared, const hopper::TensorMap& map) {
    const int page = threadIdx.x % 32;  // of a tile; this lane's
    const int block_size = 1 << args.block_shift;
    const int block_bytes = S::ROW_BYTES << args.block_shift;
    const int pages = S::KEYS >> args.block_shift;
    constexpr int STAGES = VALUES ? S::VALUE_STAGES : S::KEY_STAGES;
    unsigned char* const tiles = VALUES ? shared.values : shared.keys;
    const unsigned here = VALUES ? shared.values_here : shared.keys_here;
    const unsigned free = VALUES ? shared.values_free : shared.keys_free;

    Cursor<STAGES> stage;
    for (Cursor<S::UNITS> at;; at.advance()) {
        hopper::wait(at.of(shared.unit_known), at.parity);
        const Unit& unit = shared.units[at.index];
        if (unit.num_rows == 0) break;
        const int begin = unit.item.kv_begin + unit.from;
        const int last = unit.item.kv_begin + unit.to - 1;
        const int kv_len = unit.item.kv_len;
        const int head = unit.head;
        const int* const table =
            args.block_tables + static_cast<long long>(unit.item.sequence) * args.table_stride;
        // Past the sequence, where the table ends, one that does not exist: its rows become zero.
        const auto block_of = [&](int tile) {
            const int index = tile * pages + page;
            const bool valid = page < pages && tile >= begin && index << args.block_shift < kv_len;
            return valid ? __ldg(table + index) : -1;
        };
        int next = block_of(last);
        for (int tile = last; tile >= begin; --tile) {
            const int block = next;
            next = block_of(tile - 1);
            const unsigned barrier = stage.of(here);
            unsigned char* const target = tiles + stage.index * S::TILE_BYTES;
            // Of the block that the sequence ends in.
            const int rows = kv_len - ((tile * pages + page) << args.block_shift);
            const bool partial = VALUES && page < pages && 0 < rows && rows < block_size;
            const unsigned partials = VALUES ? __ballot_sync(FULL_WARP, partial) : 0;
            hopper::wait(stage.of(free), stage.parity ^ 1);
            if (page == 0)
                hopper::expect_bytes(barrier, S::TILE_BYTES - (partials != 0 ? block_bytes : 0));
            __syncwarp();
            if (page < pages && !partial)
                hopper::copy_box(ptx::shared_address(target) + page * block_bytes, map,
                                 head * (S::HEAD_DIM / 64), block, barrier);
            if (partials != 0) {
                const int lane = __ffs(partials) - 1;
                copy_partial<S>(target + lane * block_bytes,
                                args.v_cache +
                                    __shfl_sync(FULL_WARP, block, lane) * args.block_stride +
                                    head * S::HEAD_DIM,
                                args.num_kv_heads * S::HEAD_DIM,
                                __shfl_sync(FULL_WARP, rows, lane), block_size);
                hopper::fence_shared_writes();
            }
            __syncwarp();
            if (page == 0) hopper::arrive(barrier);
            stage.advance();
        }
    }
}

// ---------------------------------------------------------------- multiplying

template <class S>
using Sums = float[S::HEAD_DIM / 2];  // [HEAD_DIM / 8][2 rows][2 columns]

template <class S>
struct State {
    Sums<S> sums;
    float max[2];    // of the scores so far, in units of log 2
    float total[2];  // of the weights so far, this lane's columns only
};

template <class S>
using Scores = float[S::KEYS / 2];  // [KEYS / 8][2 rows][2 columns]

template <class S>
using Weights = unsigned[S::KEYS / 4];  // pairs of columns, as left operands of products

template <class S>
using Queries = unsigned[S::HEAD_DIM / 4];  // pairs of columns, as left operands of products

// This warp's 16 rows, of which `rows` is the shared address, into registers.
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
        hopper::multiply<typename S::Element, true>(
            scores, queries + 4 * step,
            hopper::matrix<S::EIGHT_ROWS_BYTES>(keys, step / 4 * S::PIECE_BYTES + step % 4 * 32),
            step > 0);
    hopper::commit_products();
}

// Starts sums += weights @ values.
template <class S>
__device__ __forceinline__ void start_sums(State<S>& state, const Weights<S>& weights,
                                           unsigned values) {
#pragma unroll
    for (int step = 0; step < S::KEYS / 16; ++step)
        hopper::multiply<typename S::Element, false>(
            state.sums, weights + 4 * step,
            hopper::matrix<S::EIGHT_ROWS_BYTES>(values, step * 2 * S::EIGHT_ROWS_BYTES), true);
    hopper::commit_products();
}

// What a thread knows of its two rows. Rows that do not exist follow the last one that does.
struct Rows {
    int last[2];     // key that each sees
    int lowest;      // key that all rows of the four warps see, if not for a window
    int window_end;  // the last key that one of them does not see for the window

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

// Scores of keys after the last one that a row sees, or of those BEFORE its window, become -inf.
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

// Scores become weights relative to the largest score so far; what was summed before is to be
// multiplied with `rescale`.
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
        // A row that has seen no key yet: -inf - -inf would be NaN.
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

// Writes this warp's rows of a whole unit, by way of the shared memory that its queries were in.
// `first_row` is the first of the 16 in the unit.
template <class S>
__device__ __forceinline__ void write_rows(const Arguments<typename S::Element>& args,
                                           const Unit& unit, const Sums<S>& sums,
                                           const float (&totals)[2], unsigned char* staged,
                                           int first_row) {
    using T = typename S::Element;
    const int lane = threadIdx.x % 32;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float total = sum_of_quad(totals[half]);
        inverse[half] = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
    }
    const unsigned target = ptx::shared_address(staged);
#pragma unroll
    for (int n = 0; n < S::CHUNKS; n += 2) {
        const auto pair = [&](int i) {
            const float factor = inverse[i / 2 % 2];
            return ptx::pack<T>(sums[n * 4 + i] * factor, sums[n * 4 + i + 1] * factor);
        };
        hopper::store_matrices(target + S::place(lane % 16, n + lane / 16), pair(0), pair(2),
                               pair(4), pair(6));
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

// Leaves the partial sums of a unit that is cut, and merges those of its blocks if this is the last
// one to come here with these rows.
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
    hopper::meet<128>(1 + group);
    if (thread == 0) {
        is_last[group] = atomicAdd(arrived, 1) == blocks.last - blocks.first;
        if (is_last[group]) *arrived = 0;  // for the next launch with this plan
    }
    hopper::meet<128>(1 + group);
    if (!is_last[group]) return;
    __threadfence();
    merge_slots<S, 128>(args, unit, slots, blocks, begin,
                        min(begin + S::GROUP_ROWS, unit.num_rows), thread);
}

// Four warps: all units of the block, their rows [64 * group, 64 * group + 64).
template <class S>
__device__ __forceinline__ void multiply_units(const Arguments<typename S::Element>& args,
                                               const Shared<S>& shared, const Slots<S>& slots,
                                               int* arrivals, int group) {
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp, once the warp's products are done
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
    int begin = 0, tile = 0;  // of the unit that `at` names; tile is the one in `weights`
    bool is_first = true;
    const int warp_row = group * S::GROUP_ROWS + threadIdx.x / 32 % 4 * 16;

    Cursor<S::KEY_STAGES> key;
    Cursor<S::VALUE_STAGES> value;
    Cursor<S::UNITS> at, upcoming;
    Cursor<S::QUERY_STAGES> used, loaded;  // by the unit `at`, and by the one upcoming

    // Each round starts the scores of the next tile and the sums of this one, also where the next
    // tile is another unit's. There is no tile before the first and none after the last: what is
    // multiplied in their place is not used.
    for (;;) {
        const bool ends = is_first || tile == begin;  // the unit
        bool is_last = false;
        if (ends) {
            hopper::wait(upcoming.of(shared.unit_known), upcoming.parity);
            is_last = uniform(shared.units[upcoming.index].num_rows) == 0;
            if (!is_last) {
                hopper::wait(loaded.of(shared.queries_here), loaded.parity);
                load_queries<S>(queries, ptx::shared_address(shared.queries) +
                                             loaded.index * S::TILE_BYTES +
                                             warp_row * S::ROW_BYTES);
                loaded.advance();
            }
        }
        if (!is_last) hopper::wait(key.of(shared.keys_here), key.parity);
        hopper::pin(scores);
        hopper::pin(weights);
        hopper::pin(queries);
        hopper::pin(state.sums);
        hopper::begin_products();
        start_scores<S>(scores, queries, keys + key.index * S::TILE_BYTES);
        if (!is_first) hopper::wait(value.of(shared.values_here), value.parity);
        start_sums<S>(state, weights, values + value.index * S::TILE_BYTES);
        hopper::wait_products<1>();
        hopper::pin(scores);
        if (speaks && !is_last) hopper::arrive(key.of(shared.keys_free));
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

        hopper::wait_products<0>();
        hopper::pin(state.sums);
        hopper::pin(weights);
        if (ends) {
            if (!is_first) {
                if (speaks) hopper::arrive(value.of(shared.values_free));
                value.advance();
                const Unit& unit = shared.units[at.index];
                if (unit.whole())
                    write_rows<S>(
                        args, unit, state.sums, before_total,
                        shared.queries + used.index * S::TILE_BYTES + warp_row * S::ROW_BYTES,
                        warp_row);
                else
                    leave_rows<S>(args, unit, state.sums, before_max, before_total, slots,
                                  shared.totals[at.index], arrivals, shared.is_last, group);
                // Every thread for itself, as racecheck does not know that a warp's barrier orders
                // what the others read from the staged rows.
                hopper::arrive(used.of(shared.queries_free));
                __syncwarp();
                if (speaks) hopper::arrive(at.of(shared.unit_free));
                at.advance();
                used.advance();
            }
            if (is_last) break;
            upcoming.advance();
            is_first = false;
#pragma unroll
            for (int i = 0; i < S::HEAD_DIM / 2; ++i) state.sums[i] = 0.0f;
        } else {
            if (speaks) hopper::arrive(value.of(shared.values_free));
            value.advance();
            // Most tiles have no larger score than those before.
            if (__any_sync(FULL_WARP, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < S::HEAD_DIM / 2; ++i) state.sums[i] *= rescale[i / 2 % 2];
            }
        }
        pack_weights<S>(weights, scores);
    }
}

}  // namespace attention

// Attention of the chunks that `plan` took, with the same unit_rows = ROWS, unit_keys = KEYS,
// window and number of shares = blocks, and a queue.
//
//   q [T, H, D], rows q_stride elements apart; out [T, H, D]
//   key_map, value_map   of the caches as [num_blocks, block_size / 8, G * D / 64, 8, 64], boxes of
//                        a KV head's rows of a block
//   v_cache [num_blocks, block_size, G, D], blocks block_stride elements apart
//   block_tables [n, table_stride]
//   slots 2 * gridDim.x * ROWS * (D + 2) floats of scratch
template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    attend(const typename S::Element* q, const __grid_constant__ hopper::TensorMap key_map,
           const __grid_constant__ hopper::TensorMap value_map,
           const typename S::Element* v_cache, typename S::Element* out, const int* block_tables,
           long long q_stride, long long block_stride, int table_stride, int block_shift,
           int num_heads, int num_kv_heads, float scale, float soft_cap, int window,
           const attention::Item* items, const attention::Share* shares, int* arrivals,
           float* slots, attention::Queue* queue) {
    using namespace attention;
    extern __shared__ unsigned char memory[];
    __shared__ Unit units[S::UNITS];
    __shared__ int totals[S::UNITS];
    __shared__ bool is_last[S::GROUPS];
    __shared__ __align__(8) unsigned long long
        barriers[2 * (S::UNITS + S::QUERY_STAGES + S::KEY_STAGES + S::VALUE_STAGES)];

    Shared<S> shared;
    const unsigned misaligned = ptx::shared_address(memory) % 1024;
    shared.queries = memory + (misaligned == 0 ? 0 : 1024 - misaligned);
    shared.keys = shared.queries + S::QUERY_STAGES * S::TILE_BYTES;
    shared.values = shared.keys + S::KEY_STAGES * S::TILE_BYTES;
    shared.units = units;
    shared.totals = totals;
    shared.is_last = is_last;
    shared.unit_known = ptx::shared_address(barriers);
    shared.unit_free = shared.unit_known + 8 * S::UNITS;
    shared.queries_here = shared.unit_free + 8 * S::UNITS;
    shared.queries_free = shared.queries_here + 8 * S::QUERY_STAGES;
    shared.keys_here = shared.queries_free + 8 * S::QUERY_STAGES;
    shared.keys_free = shared.keys_here + 8 * S::KEY_STAGES;
    shared.values_here = shared.keys_free + 8 * S::KEY_STAGES;
    shared.values_free = shared.values_here + 8 * S::VALUE_STAGES;

    const Arguments<typename S::Element> args(q, nullptr, v_cache, out, block_tables, q_stride,
                                              block_stride, table_stride, block_shift, num_heads,
                                              num_kv_heads, scale, soft_cap, window);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        constexpr int READERS = 4 * S::GROUPS;
        const auto init = [](unsigned barriers, int count, int arrivals) {
            for (int i = 0; i < count; ++i) hopper::init_barrier(barriers + 8 * i, arrivals);
        };
        init(shared.unit_known, S::UNITS, 1);
        init(shared.unit_free, S::UNITS, READERS);
        init(shared.queries_here, S::QUERY_STAGES, 1);
        init(shared.queries_free, S::QUERY_STAGES, 32 * READERS);
        init(shared.keys_here, S::KEY_STAGES, 1);
        init(shared.keys_free, S::KEY_STAGES, READERS);
        init(shared.values_here, S::VALUE_STAGES, 1);
        init(shared.values_free, S::VALUE_STAGES, READERS);
        hopper::fence_shared_writes();
        hopper::prefetch_map(key_map);
        hopper::prefetch_map(value_map);
    }
    __syncthreads();
    wait_for_previous();

    if (warp >= 4) {
        hopper::take_registers<MULTIPLIER_REGISTERS>();
        multiply_units<S>(args, shared, Slots<S>(slots), arrivals, uniform(warp / 4 - 1));
    } else {
        hopper::give_registers<FEEDER_REGISTERS>();
        if (warp == 0)
            feed_tiles<S, false>(args, shared, key_map);
        else if (warp == 1)
            feed_tiles<S, true>(args, shared, value_map);
        else
            feed_units<S>(args, shared,
                          {items, queue, shares[blockIdx.x], queue->units, queue->heads_at_once,
                           num_kv_heads, args.group, 0},
                          threadIdx.x - 64);
    }
}
