// Causal attention over a paged KV cache: decode rows, chunks of prompts and any mix of them.
//
// attention_units.cuh says what units, items and shares are.
//
// `plan` lays items end to end and cuts them into shares; `attend` works a share off. A unit cut by
// the end of a share leaves partial sums, and the last of its blocks to arrive merges them
// (FlashAttention, arXiv:2205.14135; splitting keys, Flash-Decoding; even shares, Stream-K,
// arXiv:2301.03598). The plan lives in device memory and the grid is fixed, so a CUDA graph replays
// with other lengths.

#include "attention_ptx.cuh"
#include "attention_units.cuh"
#include "common.cuh"

namespace attention {

// How a block of threads is laid over a unit.
//   WARPS_M x WARPS_N warps; each has FRAGMENTS * 16 rows and KEYS / WARPS_N of the keys.
//   STAGES tiles of keys and values are in shared memory.
template <typename Element_, int HEAD_DIM_, int WARPS_M_, int WARPS_N_, int FRAGMENTS_, int KEYS_,
          int STAGES_>
struct Shape {
    using Element = Element_;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int WARPS_M = WARPS_M_;
    static constexpr int WARPS_N = WARPS_N_;
    static constexpr int FRAGMENTS = FRAGMENTS_;
    static constexpr int KEYS = KEYS_;
    static constexpr int STAGES = STAGES_;

    static constexpr int WARPS = WARPS_M * WARPS_N;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int WARP_ROWS = 16 * FRAGMENTS;
    static constexpr int ROWS = WARPS_M * WARP_ROWS;
    static constexpr int WARP_KEYS = KEYS / WARPS_N;  // a warp multiplies
    static constexpr int COPY_KEYS = KEYS / WARPS;    // a warp copies
    // With one row of warps these are the same keys: no warp ever waits for another one's copies.
    static constexpr bool PRIVATE = WARPS_M == 1;
    // 16 consecutive keys are always in one block of the cache.
    static constexpr int PAGE_KEYS = COPY_KEYS < 16 ? COPY_KEYS : 16;
    static constexpr int PAGES = COPY_KEYS / PAGE_KEYS;
    // Queries stay in registers where they fit.
    static constexpr bool QUERIES_IN_REGISTERS = FRAGMENTS == 1 && HEAD_DIM <= 128;

    static constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes, in a row
    // 8 elements of padding put the 8 rows of an ldmatrix into different banks, for each HEAD_DIM.
    static constexpr int PITCH = HEAD_DIM + 8;
    static constexpr int TILE = KEYS * PITCH;
    static constexpr int FLOAT_PITCH = HEAD_DIM + 8;

    static constexpr int QUERY_BYTES = ROWS * PITCH * 2;
    static constexpr int TILE_BYTES = STAGES * 2 * TILE * 2;
    static constexpr int STATE_BYTES = WARPS_N * ROWS * 8;
    static constexpr int SHARED_BYTES = QUERY_BYTES + TILE_BYTES + STATE_BYTES;

    static_assert(HEAD_DIM % 32 == 0, "copies and fragments take 32 columns at a time");
    static_assert(WARP_KEYS % 16 == 0, "a fragment of probabilities has 16 keys");
    static_assert(PAGE_KEYS * CHUNKS % 32 == 0, "each lane copies the same number of chunks");
    // The sums of all warps go where the tiles were.
    static_assert(WARPS_N * ROWS * FLOAT_PITCH * 4 <= TILE_BYTES, "no room for the sums");
};

// ---------------------------------------------------------------- loading

// Copies the unit's queries; rows past the chunk become zero.
template <class S>
__device__ __forceinline__ void load_queries(typename S::Element* shared,
                                             const Arguments<typename S::Element>& args,
                                             const Unit& unit) {
    const unsigned base = ptx::shared_address(shared);
#pragma unroll
    for (int index = threadIdx.x; index < S::ROWS * S::CHUNKS; index += S::THREADS) {
        const int row = index / S::CHUNKS;
        const int chunk = index % S::CHUNKS;
        const bool valid = row < unit.num_rows;
        const int packed = valid ? unit.item.first_row + row : unit.item.first_row;
        const int token = packed / args.group;
        const int head = unit.head * args.group + packed - token * args.group;
        const typename S::Element* source = args.q +
                                            (unit.item.query_start + token) * args.q_stride +
                                            head * S::HEAD_DIM + chunk * 8;
        ptx::copy_async(base + (row * S::PITCH + chunk * 8) * 2, source, valid);
    }
}

// The cache blocks of the keys that this warp copies of a tile.
template <class S>
struct Pages {
    int block[S::PAGES];
};

template <class S>
__device__ __forceinline__ Pages<S> find_pages(const int* table, int block_shift, int kv_len,
                                               int tile) {
    const int warp = threadIdx.x / 32;
    Pages<S> pages;
#pragma unroll
    for (int i = 0; i < S::PAGES; ++i) {
        const int key = tile * S::KEYS + warp * S::COPY_KEYS + i * S::PAGE_KEYS;
        // The table ends with the sequence.
        pages.block[i] = key < kv_len ? __ldg(table + (key >> block_shift)) : 0;
    }
    return pages;
}

// Copies this warp's part of a tile of keys and values. What lies past the sequence becomes zero:
// its weight is 0, but the cache may hold NaN there.
template <class S>
__device__ __forceinline__ void load_tile(typename S::Element* keys, typename S::Element* values,
                                          const Arguments<typename S::Element>& args,
                                          const Unit& unit, int tile, const Pages<S>& pages) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row_stride = args.num_kv_heads * S::HEAD_DIM;
    const int offset_mask = (1 << args.block_shift) - 1;
    const unsigned key_base = ptx::shared_address(keys);
    const unsigned value_base = ptx::shared_address(values);
#pragma unroll
    for (int page = 0; page < S::PAGES; ++page) {
        const int first_row = warp * S::COPY_KEYS + page * S::PAGE_KEYS;
        const int first_key = tile * S::KEYS + first_row;
        const long long origin = pages.block[page] * args.block_stride +
                                 (first_key & offset_mask) * row_stride + unit.head * S::HEAD_DIM;
#pragma unroll
        for (int i = 0; i < S::PAGE_KEYS * S::CHUNKS / 32; ++i) {
            const int index = i * 32 + lane;
            const int row = index / S::CHUNKS;
            const int chunk = index % S::CHUNKS;
            const bool valid = first_key + row < unit.item.kv_len;
            const long long source = origin + row * row_stride + chunk * 8;
            const int target = ((first_row + row) * S::PITCH + chunk * 8) * 2;
            ptx::copy_async(key_base + target, args.k_cache + source, valid);
            ptx::copy_async(value_base + target, args.v_cache + source, valid);
        }
    }
}

// Fragment `step` (16 columns) of this warp's queries; `rows` is the first of 16.
template <class S>
__device__ __forceinline__ void load_query_fragment(unsigned (&fragment)[4],
                                                    const typename S::Element* queries, int rows,
                                                    int step) {
    const int lane = threadIdx.x % 32;
    const int row = rows + lane % 16;
    const int column = step * 16 + lane / 16 * 8;
    ptx::load_matrices(fragment, ptx::shared_address(queries + row * S::PITCH + column));
}

// ---------------------------------------------------------------- arithmetic

template <class S>
struct State {
    float sums[S::FRAGMENTS][S::HEAD_DIM / 8][4];
    float max[S::FRAGMENTS][2];    // of the scores so far, in units of log 2
    float total[S::FRAGMENTS][2];  // of the weights so far, this lane's columns only
};

template <class S>
using Scores = float[S::FRAGMENTS][S::WARP_KEYS / 8][4];

template <class S>
using QueryFragments = unsigned[S::QUERIES_IN_REGISTERS ? S::HEAD_DIM / 16 : 1][S::FRAGMENTS][4];

// scores = queries @ keys^T.
template <class S>
__device__ __forceinline__ void mma_qk(Scores<S>& scores, QueryFragments<S>& fragments,
                                       const typename S::Element* queries,
                                       const typename S::Element* keys, int warp_m, int warp_n) {
    const int lane = threadIdx.x % 32;
    // Matrices in the order keys 0-7 | columns 0-7, 0-7 | 8-15, 8-15 | 0-7, 8-15 | 8-15.
    const int key = warp_n * S::WARP_KEYS + lane / 16 * 8 + lane % 8;
    const unsigned base = ptx::shared_address(keys + key * S::PITCH + lane / 8 % 2 * 8);
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int n = 0; n < S::WARP_KEYS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[f][n][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < S::HEAD_DIM / 16; ++step) {
        auto& a = fragments[S::QUERIES_IN_REGISTERS ? step : 0];
        if (!S::QUERIES_IN_REGISTERS) {
#pragma unroll
            for (int f = 0; f < S::FRAGMENTS; ++f)
                load_query_fragment<S>(a[f], queries, warp_m * S::WARP_ROWS + f * 16, step);
        }
#pragma unroll
        for (int n = 0; n < S::WARP_KEYS / 16; ++n) {
            unsigned b[4];
            ptx::load_matrices(b, base + (n * 16 * S::PITCH + step * 16) * 2);
#pragma unroll
            for (int f = 0; f < S::FRAGMENTS; ++f) {
                ptx::mma<typename S::Element>(scores[f][2 * n], a[f], b[0], b[1]);
                ptx::mma<typename S::Element>(scores[f][2 * n + 1], a[f], b[2], b[3]);
            }
        }
    }
}

template <class S>
__device__ __forceinline__ void cap_scores(Scores<S>& scores, float scale, float soft_cap) {
    const SoftCap cap(scale, soft_cap);
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int n = 0; n < S::WARP_KEYS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[f][n][e] = cap(scores[f][n][e]);
}

// Scores that a row does not see become -inf. A row sees the keys up to its own position; rows that
// do not exist follow the last one that does. Few tiles need this, so no register is kept for it.
template <class S>
__device__ __forceinline__ void mask_scores(Scores<S>& scores,
                                            const Arguments<typename S::Element>& args,
                                            const Unit& unit, int warp_m, int first_key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_m * S::WARP_ROWS + f * 16 + half * 8 + lane / 4;
            const int packed = unit.item.first_row + min(row, unit.num_rows - 1);
            const int last = unit.item.kv_len - unit.item.query_len + packed / args.group;
#pragma unroll
            for (int n = 0; n < S::WARP_KEYS / 8; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    const int key = first_key + n * 8 + lane % 4 * 2 + e % 2;
                    if (key > last || key <= last - args.window) scores[f][n][e] = -CUDART_INF_F;
                }
        }
}

// Scores become weights relative to the largest score so far; what was summed before is rescaled.
template <class S>
__device__ __forceinline__ void softmax_step(State<S>& state, Scores<S>& scores, float scale) {
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = scores[f][0][2 * half];
#pragma unroll
            for (int n = 0; n < S::WARP_KEYS / 8; ++n)
                largest = fmaxf(largest, fmaxf(scores[f][n][2 * half], scores[f][n][2 * half + 1]));
            const float before = state.max[f][half];
            const float now = fmaxf(before, max_of_quad(largest) * scale);
            // A row that has seen no key yet: -inf - -inf would be NaN.
            const float origin = now == -CUDART_INF_F ? 0.0f : now;
            const float rescale = ptx::exp2(before - origin);
            state.max[f][half] = now;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < S::WARP_KEYS / 8; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    scores[f][n][e] = ptx::exp2(fmaf(scores[f][n][e], scale, -origin));
                    total += scores[f][n][e];
                }
            state.total[f][half] = fmaf(state.total[f][half], rescale, total);
#pragma unroll
            for (int n = 0; n < S::HEAD_DIM / 8; ++n) {
                state.sums[f][n][2 * half] *= rescale;
                state.sums[f][n][2 * half + 1] *= rescale;
            }
        }
}

// sums += weights @ values. Two 8-column fragments of scores, side by side, are just the fragment
// of a 16-column left operand.
template <class S>
__device__ __forceinline__ void mma_pv(State<S>& state, const Scores<S>& weights,
                                       const typename S::Element* values, int warp_n) {
    using T = typename S::Element;
    const int lane = threadIdx.x % 32;
    // Matrices in the order keys 0-7 | columns 0-7, 8-15 | 0-7, 0-7 | 8-15, 8-15 | 8-15.
    const int key = warp_n * S::WARP_KEYS + lane % 16;
    const unsigned base = ptx::shared_address(values + key * S::PITCH + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < S::WARP_KEYS / 16; ++n) {
        unsigned a[S::FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < S::FRAGMENTS; ++f) {
            a[f][0] = ptx::pack<T>(weights[f][2 * n][0], weights[f][2 * n][1]);
            a[f][1] = ptx::pack<T>(weights[f][2 * n][2], weights[f][2 * n][3]);
            a[f][2] = ptx::pack<T>(weights[f][2 * n + 1][0], weights[f][2 * n + 1][1]);
            a[f][3] = ptx::pack<T>(weights[f][2 * n + 1][2], weights[f][2 * n + 1][3]);
        }
#pragma unroll
        for (int column = 0; column < S::HEAD_DIM / 16; ++column) {
            unsigned b[4];
            ptx::load_matrices_transposed(b, base + (n * 16 * S::PITCH + column * 16) * 2);
#pragma unroll
            for (int f = 0; f < S::FRAGMENTS; ++f) {
                ptx::mma<T>(state.sums[f][2 * column], a[f], b[0], b[1]);
                ptx::mma<T>(state.sums[f][2 * column + 1], a[f], b[2], b[3]);
            }
        }
    }
}

// ---------------------------------------------------------------- results

// Each warp's sums, and the maximum and total of each row, to shared memory.
template <class S>
__device__ __forceinline__ void store_state(float* sums, float2* states, const State<S>& state,
                                            int warp_m, int warp_n) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int f = 0; f < S::FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_n * S::ROWS + warp_m * S::WARP_ROWS + f * 16 + half * 8 + lane / 4;
            const float total = sum_of_quad(state.total[f][half]);
            if (lane % 4 == 0) states[row] = make_float2(state.max[f][half], total);
#pragma unroll
            for (int n = 0; n < S::HEAD_DIM / 8; ++n)
                *reinterpret_cast<float2*>(sums + row * S::FLOAT_PITCH + n * 8 + lane % 4 * 2) =
                    make_float2(state.sums[f][n][2 * half], state.sums[f][n][2 * half + 1]);
        }
}

// Adds up the warps' sums and writes the rows, to `out` or, if the unit is cut, to a slot; merges
// the slots if this is the last block of the unit to come here.
template <class S>
__device__ __forceinline__ void finish_unit(const Arguments<typename S::Element>& args,
                                            const Unit& unit, const Share& share, const float* sums,
                                            const float2* states, const Slots<S>& slots,
                                            int* arrivals) {
    constexpr int QUARTERS = S::HEAD_DIM / 4;
    const bool whole = unit.whole();
    const int own_slot = Slots<S>::own(unit);
    for (int index = threadIdx.x; index < unit.num_rows * QUARTERS; index += S::THREADS) {
        const int row = index / QUARTERS;
        const int column = index % QUARTERS * 4;
        float largest = -CUDART_INF_F;
#pragma unroll
        for (int n = 0; n < S::WARPS_N; ++n) largest = fmaxf(largest, states[n * S::ROWS + row].x);
        Merged merged(largest);
#pragma unroll
        for (int n = 0; n < S::WARPS_N; ++n) {
            const int place = n * S::ROWS + row;
            merged.add(states[place],
                       *reinterpret_cast<const float4*>(sums + place * S::FLOAT_PITCH + column));
        }
        if (whole) {
            write_out<S>(args, unit, row, column, merged);
        } else {
            *reinterpret_cast<float4*>(slots.row(own_slot, row) + column) = merged.sums;
            if (column == 0) *slots.state(own_slot, row) = make_float2(merged.max, merged.total);
        }
    }
    if (whole) return;

    const Blocks blocks(unit, share.total);
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(arrivals + blocks.first, 1) == blocks.last - blocks.first;
        if (is_last) arrivals[blocks.first] = 0;  // for the next launch with this plan
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    merge_slots<S, S::THREADS>(args, unit, slots, blocks, 0, unit.num_rows, threadIdx.x);
}

// ---------------------------------------------------------------- a unit

template <class S>
__device__ __forceinline__ void attend_unit(const Arguments<typename S::Element>& args,
                                            const Unit& unit, State<S>& state,
                                            typename S::Element* queries,
                                            typename S::Element* tiles) {
    using T = typename S::Element;
    const int warp = threadIdx.x / 32;
    const int warp_m = warp % S::WARPS_M;
    const int warp_n = warp / S::WARPS_M;
    const int begin = unit.item.kv_begin + unit.from;
    const int end = unit.item.kv_begin + unit.to;
    const int* table =
        args.block_tables + static_cast<long long>(unit.item.sequence) * args.table_stride;
    const auto pages_of = [&](int tile) {
        return find_pages<S>(table, args.block_shift, unit.item.kv_len, tile);
    };

    load_queries<S>(queries, args, unit);
    ptx::commit_copies();
    // Block numbers are read one tile ahead of the copies that need them.
    Pages<S> pages[S::STAGES];
#pragma unroll
    for (int i = 0; i < S::STAGES; ++i) pages[i] = pages_of(begin + i);
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; ++i) {
        if (begin + i < end)
            load_tile<S>(tiles + 2 * i * S::TILE, tiles + (2 * i + 1) * S::TILE, args, unit,
                         begin + i, pages[i]);
        ptx::commit_copies();
    }
    Pages<S> next_pages = pages[S::STAGES - 1];

    const int history = unit.item.kv_len - unit.item.query_len;
    const int lowest = history + unit.item.first_row / args.group;
    const int highest = history + (unit.item.first_row + unit.num_rows - 1) / args.group;

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

    ptx::wait_copies<S::STAGES - 1>();
    __syncthreads();
    QueryFragments<S> fragments;
    if (S::QUERIES_IN_REGISTERS) {
#pragma unroll
        for (int step = 0; step < S::HEAD_DIM / 16; ++step)
#pragma unroll
            for (int f = 0; f < S::FRAGMENTS; ++f)
                load_query_fragment<S>(
                    fragments[step % (sizeof(fragments) / sizeof(fragments[0]))][f], queries,
                    warp_m * S::WARP_ROWS + f * 16, step);
    }

    int stage = 0;
    for (int tile = begin; tile < end; ++tile) {
        ptx::wait_copies<S::STAGES - 2>();
        // The tile is there for all who read it, and all have read the one overwritten next.
        if (S::PRIVATE)
            __syncwarp();
        else
            __syncthreads();
        const int ahead = tile + S::STAGES - 1;
        if (ahead < end) {
            const int free = stage == 0 ? S::STAGES - 1 : stage - 1;
            load_tile<S>(tiles + 2 * free * S::TILE, tiles + (2 * free + 1) * S::TILE, args, unit,
                         ahead, next_pages);
            next_pages = pages_of(ahead + 1);
        }
        ptx::commit_copies();

        const T* keys = tiles + 2 * stage * S::TILE;
        const T* values = keys + S::TILE;
        Scores<S> scores;
        mma_qk<S>(scores, fragments, queries, keys, warp_m, warp_n);
        float scale = args.scale;
        if (args.soft_cap > 0.0f) {
            cap_scores<S>(scores, scale, args.soft_cap);
            scale = 1.0f;
        }
        const int first_key = tile * S::KEYS;
        if (first_key + S::KEYS - 1 > lowest || first_key <= highest - args.window)
            mask_scores<S>(scores, args, unit, warp_m, first_key + warp_n * S::WARP_KEYS);
        softmax_step<S>(state, scores, scale);
        mma_pv<S>(state, scores, values, warp_n);
        stage = stage + 1 == S::STAGES ? 0 : stage + 1;
    }
    ptx::wait_copies<0>();
}

// ---------------------------------------------------------------- planning

// Inclusive sum over the block's threads; every thread gets the sum of all in `total`.
template <int THREADS>
__device__ __forceinline__ int scan(int value, int& total) {
    __shared__ int warp_totals[THREADS / 32];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, value, distance);
        if (lane >= distance) value += other;
    }
    if (lane == 31) warp_totals[warp] = value;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int w = 0; w < THREADS / 32; ++w) {
        if (w < warp) before += warp_totals[w];
        total += warp_totals[w];
    }
    __syncthreads();
    return before + value;
}

// The last of `count` ascending numbers start(0) = 0, start(1), ... that is at most `wanted`.
template <class Start>
__device__ __forceinline__ int last_at_most(int wanted, int count, const Start& start) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (start(middle) <= wanted)
            low = middle;
        else
            high = middle;
    }
    return low;
}

constexpr int PLAN_THREADS = 1024;

// Puts item_at(0), ..., item_at(count - 1) from long to short, those of one length in their order:
// a counting sort by tiles. Where the longest has more tiles than there are threads, lengths that
// are nearly the same count as one.
template <class ItemAt>
__device__ __forceinline__ void sort_items(Item* items, int count, const ItemAt& item_at) {
    __shared__ int longest, places[PLAN_THREADS];
    const int thread = threadIdx.x;
    places[thread] = 0;
    if (thread == 0) longest = 0;
    __syncthreads();
    for (int k = thread; k < count; k += PLAN_THREADS) atomicMax(&longest, item_at(k).kv_tiles);
    __syncthreads();
    const int step = longest / PLAN_THREADS + 1;
    const auto rank = [&](const Item& item) { return (longest - item.kv_tiles) / step; };
    for (int k = thread; k < count; k += PLAN_THREADS) atomicAdd(places + rank(item_at(k)), 1);
    __syncthreads();
    const int number = places[thread];
    int total;
    places[thread] = scan<PLAN_THREADS>(number, total) - number;
    for (int base = 0; base < count; base += PLAN_THREADS) {
        const int k = base + thread;
        Item item;
        if (k < count) item = item_at(k);
        // One warp after the other, so that the order is always the same.
        for (int warp = 0; warp < min(PLAN_THREADS, count - base); warp += 32) {
            __syncthreads();
            if (thread / 32 * 32 != warp) continue;
            const int own = k < count ? rank(item) : -1;
            const unsigned same = __match_any_sync(0xffffffffu, own);
            const int before = __popc(same & ((1u << thread % 32) - 1));
            if (k < count) items[places[own] + before] = item;
            __syncwarp();
            if (k < count && before == 0) places[own] += __popc(same);
        }
        __syncthreads();
    }
}

// What a cut costs a block, in tiles: sums that go through memory.
constexpr int CUT_TILES = 6;

// As few as give each block twice the tiles of the longest unit: so that the queue, which starts
// again with a long one for the last heads, ends with short ones for all blocks.
__device__ __forceinline__ int heads_at_once(int longest, int num_tiles, int num_kv_heads,
                                             int num_blocks) {
    const int turns = min(max(num_tiles / (2 * longest * num_blocks), 1), num_kv_heads);
    return (num_kv_heads + turns - 1) / turns;
}

// Tiles that the busiest block has, about, when blocks take whole units, long ones first: what the
// first would get if they took turns, less half of what taking turns is worse by.
__device__ __forceinline__ int queue_time(const Item* items, int units, int num_kv_heads,
                                          int num_blocks) {
    int turns = 0;
    for (int base = 0; base < units; base += num_blocks * PLAN_THREADS) {
        const int unit = base + num_blocks * threadIdx.x;
        int total;
        scan<PLAN_THREADS>(unit < units ? items[unit / num_kv_heads].kv_tiles : 0, total);
        turns += total;
    }
    const int longest = units > 0 ? items[0].kv_tiles : 0;
    return max(longest, turns - longest / 2);
}

}  // namespace attention

// ================================================================ kernels

using attention::PLAN_THREADS;

// Cuts the step's chunks into items and shares. Takes only the chunks that have more than min_rows
// and at most max_rows rows, so that small and large ones can have kernels of their own.
// One block of PLAN_THREADS threads.
//
//   query_start [n + 1], seq_lens [n]   as of `attend`; n chunks
//   first_item [n + 1]                  scratch
//   items [capacity]                    at least n + rows / unit_rows
//   shares [num_shares], arrivals [2 * num_shares]   arrivals become 0
//   queue   for a kernel that can work off whole units; then items go from long to short. May be
//           null.
//   whole   shares end where units do, so that no sum depends on what else is in the step
extern "C" __global__ void __launch_bounds__(PLAN_THREADS)
    plan(const int* query_start, const int* seq_lens, int n, int group, int num_kv_heads,
         int unit_rows, int unit_keys, int window, int min_rows, int max_rows, int num_shares,
         int* first_item, attention::Item* items, attention::Share* shares, int* arrivals,
         attention::Queue* queue, bool whole) {
    using namespace attention;
    wait_for_previous();
    const int thread = threadIdx.x;
    int num_items = 0;
    for (int base = 0; base < n; base += PLAN_THREADS) {
        const int i = base + thread;
        const int rows = i < n ? (query_start[i + 1] - query_start[i]) * group : 0;
        const int count =
            rows > min_rows && rows <= max_rows ? (rows + unit_rows - 1) / unit_rows : 0;
        int total;
        const int upto = num_items + scan<PLAN_THREADS>(count, total);
        if (i < n) first_item[i] = upto - count;
        num_items += total;
    }
    if (thread == 0) first_item[n] = num_items;
    __syncthreads();

    const auto item_at = [&](int k) {
        Item item;
        item.first_tile = 0;
        // Chunks without items share their place with the next one: the last of them has items.
        item.sequence = last_at_most(k, n, [&](int i) { return first_item[i]; });
        item.query_start = query_start[item.sequence];
        item.query_len = query_start[item.sequence + 1] - item.query_start;
        item.kv_len = seq_lens[item.sequence];
        item.first_row = (k - first_item[item.sequence]) * unit_rows;
        const int last_row = min(item.first_row + unit_rows, item.query_len * group) - 1;
        const int history = item.kv_len - item.query_len;
        const int lowest = history + item.first_row / group;
        const int highest = history + last_row / group;
        item.kv_begin = max(0, lowest - window + 1) / unit_keys;
        // A row that sees nothing has a tile all the same, for it must be written.
        item.kv_tiles = max(1, highest / unit_keys + 1 - item.kv_begin);
        return item;
    };
    if (queue == nullptr) {
        for (int k = thread; k < num_items; k += PLAN_THREADS) items[k] = item_at(k);
    } else {
        sort_items(items, num_items, item_at);
    }
    __syncthreads();

    int num_tiles = 0;
    for (int base = 0; base < num_items; base += PLAN_THREADS) {
        const int k = base + thread;
        const int count = k < num_items ? items[k].kv_tiles * num_kv_heads : 0;
        int total;
        const int upto = num_tiles + scan<PLAN_THREADS>(count, total);
        if (k < num_items) items[k].first_tile = upto - count;
        num_tiles += total;
    }
    __syncthreads();

    if (queue != nullptr) {
        const int units = num_items * num_kv_heads;
        const int time = queue_time(items, units, num_kv_heads, num_shares);
        const bool uncut = time <= num_tiles / num_shares + CUT_TILES;
        if (thread == 0 && units > 0)
            *queue = {uncut ? units : 0, 0, 0,
                      heads_at_once(items[0].kv_tiles, num_tiles, num_kv_heads, num_shares)};
        else if (thread == 0)
            *queue = {};
    }
    const auto item_of = [&](int tile) {
        return last_at_most(tile, num_items, [&](int k) { return items[k].first_tile; });
    };
    const auto border = [&](int share) {
        const int tile = share_begin(share, num_tiles, num_shares);
        if (!whole || tile >= num_tiles) return tile;
        const Item& item = items[item_of(tile)];
        const int inside = tile - item.first_tile + item.kv_tiles - 1;
        return item.first_tile + inside - inside % item.kv_tiles;
    };
    for (int share = thread; share < num_shares; share += PLAN_THREADS) {
        const int begin = border(share);
        const int end = border(share + 1);
        const int item = begin < end ? item_of(begin) : 0;
        shares[share] = {begin, end, item, num_tiles};
        arrivals[share] = 0;
        arrivals[num_shares + share] = 0;
    }
}

// Attention of the chunks that `plan` took, with the same unit_rows = ROWS, unit_keys = KEYS,
// window and number of shares = blocks.
//
//   q [T, H, D], rows q_stride elements apart; out [T, H, D]
//   k_cache, v_cache [num_blocks, block_size, G, D], blocks block_stride elements apart
//   block_tables [n, table_stride]
//   slots 2 * gridDim.x * ROWS * (D + 2) floats of scratch
template <class S>
__global__ void __launch_bounds__(S::THREADS)
    attend(const typename S::Element* q, const typename S::Element* k_cache,
           const typename S::Element* v_cache, typename S::Element* out, const int* block_tables,
           long long q_stride, long long block_stride, int table_stride, int block_shift,
           int num_heads, int num_kv_heads, float scale, float soft_cap, int window,
           const attention::Item* items, const attention::Share* shares, int* arrivals,
           float* slots) {
    using namespace attention;
    using T = typename S::Element;
    extern __shared__ __align__(16) unsigned char memory[];
    T* queries = reinterpret_cast<T*>(memory);
    T* tiles = reinterpret_cast<T*>(memory + S::QUERY_BYTES);
    float* sums = reinterpret_cast<float*>(tiles);
    float2* states = reinterpret_cast<float2*>(memory + S::QUERY_BYTES + S::TILE_BYTES);

    const Arguments<T> args = {q,
                               k_cache,
                               v_cache,
                               out,
                               block_tables,
                               q_stride,
                               block_stride,
                               table_stride,
                               block_shift,
                               num_heads,
                               num_kv_heads,
                               num_heads / num_kv_heads,
                               soft_cap > 0.0f ? scale : scale * LOG2_E,
                               soft_cap,
                               window};

    wait_for_previous();
    const Share share = shares[blockIdx.x];
    int tile = share.begin;
    int k = share.item;
    while (tile < share.end) {
        Unit unit;
        unit.item = items[k];
        const int inside = tile - unit.item.first_tile;
        unit.head = inside / unit.item.kv_tiles;
        unit.from = inside - unit.head * unit.item.kv_tiles;
        unit.to = min(unit.item.kv_tiles, unit.from + share.end - tile);
        unit.num_rows = min(S::ROWS, unit.item.query_len * args.group - unit.item.first_row);

        State<S> state;
        attend_unit<S>(args, unit, state, queries, tiles);
        tile += unit.to - unit.from;
        if (tile == share.end) launch_next();
        __syncthreads();  // all warps are done with the tiles
        const int warp = threadIdx.x / 32;
        store_state<S>(sums, states, state, warp % S::WARPS_M, warp / S::WARPS_M);
        __syncthreads();
        finish_unit<S>(args, unit, share, sums, states, Slots<S>(slots), arrivals);
        __syncthreads();  // all sums are read
        if (unit.to == unit.item.kv_tiles && unit.head == num_kv_heads - 1) ++k;
    }
}
