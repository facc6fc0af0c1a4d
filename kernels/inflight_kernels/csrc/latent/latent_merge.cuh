// Merging of units of latent attention that several blocks process. Units, shares and slots are
// defined in attention_units.cuh.
//
// Partial sums are as large as the keys of a tile, and one sequence may be split over all
// multiprocessors: the last block to arrive would take longer to merge them than all blocks take
// for their tiles. So each block merges a part of the unit, after its whole share.
//
// To do so it waits for the others, but not for ever: they may not be running yet if something else
// has taken multiprocessors. Then it leaves its part to the last block to arrive, which never
// waits.
#pragma once

#include "cluster.cuh"
#include "latent/latent_results.cuh"

namespace attention {

// Clock cycles after which a block leaves its part to the last one: 0.2 ms or so, by far more than
// blocks that started together differ in the time for equal shares.
constexpr int PATIENCE = 400000;

// Records that this block has left its sums of a split unit; all its threads have written theirs
// before a barrier.
__device__ __forceinline__ void arrive(Split& split, const Unit& unit, const Share& share,
                                       int* arrivals) {
    const Blocks blocks(unit, share);
    const int count = blocks.last - blocks.first + 1;
    const int before = ptx::count_arrival(arrivals + blocks.first);
    // Never reset, as other layers have the same plan and all their blocks arrive.
    split.unit = unit;
    split.launch = before / count;
    split.is_last = before % count == count - 1;
}

// Adds up pieces of a unit, at POSITIONS places `step` apart (see `slot_place`).
// `group` of `groups` has every so many pieces, AT_ONCE of which are loaded together, as the L2
// latency dominates.
template <class S, int POSITIONS, int AT_ONCE>
__device__ __forceinline__ void merge_pieces(Merged (&merged)[POSITIONS], const Slots<S>& slots,
                                             const Blocks& blocks, int num_rows, int first,
                                             int step, int end, int group, int groups) {
#pragma unroll 1
    for (int b = blocks.first + group; b <= blocks.last; b += AT_ONCE * groups) {
        float2 states[POSITIONS][AT_ONCE];
        float4 parts[POSITIONS][AT_ONCE];
#pragma unroll
        for (int p = 0; p < POSITIONS; ++p)
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int place = first + p * step, piece = b + i * groups;
                const int row = slot_place<S>(place).row;
                const int slot = 2 * piece + (piece == blocks.first ? 1 : 0);
                const bool exists = piece <= blocks.last && place < end && row < num_rows;
                states[p][i] = ptx::load_if(exists, slots.state(slot, row), -CUDART_INF_F);
                parts[p][i] = ptx::load_if(
                    exists, reinterpret_cast<const float4*>(slots.row(slot, 0)) + place);
            }
#pragma unroll
        for (int p = 0; p < POSITIONS; ++p) {
            float largest = merged[p].max;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) largest = fmaxf(largest, states[p][i].x);
            merged[p].raise(largest);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) merged[p].add(states[p][i], parts[p][i]);
        }
    }
}

// Merges and writes the part of a unit that belongs to the block of a rank, with all threads.
template <class S>
__device__ __forceinline__ void merge_part(const Arguments<typename S::Element>& args,
                                           const Unit& unit, const Slots<S>& slots,
                                           const Blocks& blocks, int rank,
                                           const LatentMemory<S>& memory) {
    constexpr int QUARTERS = S::HEAD_DIM / 4, MANY = 4;
    const int count = blocks.last - blocks.first + 1;
    const int size = (S::ROWS * QUARTERS + count - 1) / count;
    const int begin = rank * size, end = min(begin + size, S::ROWS * QUARTERS);
    const auto write = [&](int index, const Merged& merged) {
        const SlotPlace place = slot_place<S>(index);
        if (place.row >= unit.num_rows) return;
        using T = typename S::Element;
        const float inverse = merged.total > 0.0f ? 1.0f / merged.total : 0.0f;
        const float4& sums = merged.sums;
        T* const to = out_row<S>(args, unit, query_of<S>(args, unit, place.row)) + place.column;
        *reinterpret_cast<unsigned*>(to) = ptx::pack<T>(sums.x * inverse, sums.y * inverse);
        *reinterpret_cast<unsigned*>(to + 8) = ptx::pack<T>(sums.z * inverse, sums.w * inverse);
    };
    if (size > S::THREADS / 2) {
#pragma unroll 1
        for (int first = begin + threadIdx.x; first < end; first += MANY * S::THREADS) {
            Merged merged[MANY];
            merge_pieces<S, MANY, 2>(merged, slots, blocks, unit.num_rows, first, S::THREADS, end,
                                     0, 1);
#pragma unroll
            for (int p = 0; p < MANY; ++p)
                if (first + p * S::THREADS < end) write(first + p * S::THREADS, merged[p]);
        }
        return;
    }
    // Threads share the pieces of a place.
    float4* const sums = reinterpret_cast<float4*>(memory.scores);
    float2* const states = reinterpret_cast<float2*>(sums + S::THREADS);
    const int width = 1 << (32 - __clz(size - 1));  // a power of two from `size`
    const int groups = S::THREADS / width;
    const int place = begin + threadIdx.x % width;
    Merged merged[1];
    merge_pieces<S, 1, 8>(merged, slots, blocks, unit.num_rows, place, 0, end, threadIdx.x / width,
                          groups);
    __syncthreads();  // nothing else uses this memory any more
    sums[threadIdx.x] = merged[0].sums;
    states[threadIdx.x] = make_float2(merged[0].max, merged[0].total);
    __syncthreads();
    if (threadIdx.x < width && place < end) {
        float largest = merged[0].max;
#pragma unroll 1
        for (int at = threadIdx.x + width; at < S::THREADS; at += width)
            largest = fmaxf(largest, states[at].x);
        merged[0].raise(largest);
#pragma unroll 1
        for (int at = threadIdx.x + width; at < S::THREADS; at += width)
            merged[0].add(states[at], sums[at]);
        write(place, merged[0]);
    }
}

// Merges this block's part of a split unit once all blocks have arrived, and as the last one also
// the parts that others have left to it.
//
//   arrivals   [gridDim.x] counters of units, then [2 * gridDim.x] marks, one for each slot: the
//              number of the launch, from 1 on, in which its block has left its part
template <class S>
__device__ __forceinline__ void merge_split(const Arguments<typename S::Element>& args,
                                            const Split& split, const Share& share,
                                            const Slots<S>& slots, int* arrivals,
                                            const LatentMemory<S>& memory) {
    const Unit unit = split.unit;
    const Blocks blocks(unit, share);
    const int count = blocks.last - blocks.first + 1;
    const int own = blockIdx.x - blocks.first;
    int* const marks = arrivals + gridDim.x;
    const auto mark_of = [&](int rank) {
        return marks + 2 * (blocks.first + rank) + (rank == 0 ? 1 : 0);
    };
    bool complete = split.is_last, left = false;
    if (split.is_last) {
#pragma unroll 1
        for (int rank = threadIdx.x; rank < count; rank += S::THREADS)
            left |= load_l2(mark_of(rank)) == split.launch + 1;
    } else if (threadIdx.x == 0) {
        const auto all_arrived = [&] {
            return ptx::load_acquired(arrivals + blocks.first) >= (split.launch + 1) * count;
        };
        const long long started = clock64();
        while (!(complete = all_arrived()) && clock64() - started < PATIENCE) __nanosleep(20);
        if (!complete) {
            *mark_of(own) = split.launch + 1;
            // Either this block sees that the last one has arrived, or that one sees the mark.
            __threadfence();
            complete = all_arrived();
        }
    }
    if (!__syncthreads_or(complete)) return;
    // The own part, and all that were left. Their blocks may have merged them all the same, with
    // the same results.
    const int parts = __syncthreads_or(left) ? count : 1;
#pragma unroll 1
    for (int i = 0; i < parts; ++i) {
        const int rank = own + i < count ? own + i : own + i - count;
        if (i == 0 || __syncthreads_or(load_l2(mark_of(rank)) == split.launch + 1))
            merge_part<S>(args, unit, slots, blocks, rank, memory);
    }
}

// Merges the two pieces of a unit: of each fragment, the first half of the columns in the block
// with the first piece, the second half in the other one. The cluster has arrived at a barrier once
// before.
template <class S>
__device__ __forceinline__ void merge_pair(const Arguments<typename S::Element>& args,
                                           const Unit& unit, const LatentSums<S>& sums,
                                           const LatentState& state, const LatentMemory<S>& memory,
                                           int rank) {
    using T = typename S::Element;
    constexpr int ROW_HALVES = S::ROWS / 8, COUNT = S::COLUMNS / 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float total = warp_sum<S::LANES>(state.total);
    cluster_wait();  // the other block is running
    if (threadIdx.x % S::LANES == 0) {
        const int row = threadIdx.x / S::LANES;
        memory.states[row] = make_float2(state.max, total);
        send(memory.states + S::ROWS + row, rank ^ 1, make_float2(state.max, total));
    }
    // `n` counts the fragments of 8 columns in a half.
    const auto sum_of = [&](int half, int row, int n, int e) {
        const float first = sums[row / 2][n][row % 2 * 2 + e];
        const float second = sums[row / 2][n + COUNT][row % 2 * 2 + e];
        return half == 0 ? first : second;
    };
#pragma unroll
    for (int row = 0; row < ROW_HALVES; ++row)
#pragma unroll
        for (int n = 0; n < COUNT; n += 2)
            send(memory.others + (row * COUNT + n) / 2 * S::THREADS + threadIdx.x, rank ^ 1,
                 make_float4(sum_of(rank ^ 1, row, n, 0), sum_of(rank ^ 1, row, n, 1),
                             sum_of(rank ^ 1, row, n + 1, 0), sum_of(rank ^ 1, row, n + 1, 1)));
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int i = 0; i < ROW_HALVES; ++i) {
        const int row = i * 8 + lane / 4;
        if (row >= unit.num_rows) continue;
        const float2 own = memory.states[row], other = memory.states[S::ROWS + row];
        // The same in both blocks.
        const float largest = fmaxf(own.x, other.x);
        const float origin = largest == -CUDART_INF_F ? 0.0f : largest;
        const float weight = ptx::exp2(own.x - origin), their_weight = ptx::exp2(other.x - origin);
        const float all = fmaf(own.y, weight, other.y * their_weight);
        const float inverse = all > 0.0f ? 1.0f / all : 0.0f;
        T* const out = out_row<S>(args, unit, query_of<S>(args, unit, row)) + warp * S::COLUMNS +
                       rank * (S::COLUMNS / 2) + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < COUNT; n += 2) {
            const float4 theirs = memory.others[(i * COUNT + n) / 2 * S::THREADS + threadIdx.x];
            const auto merged = [&](int which, int e, float their) {
                return fmaf(sum_of(rank, i, which, e), weight, their * their_weight) * inverse;
            };
            *reinterpret_cast<unsigned*>(out + n * 8) =
                ptx::pack<T>(merged(n, 0, theirs.x), merged(n, 1, theirs.y));
            *reinterpret_cast<unsigned*>(out + n * 8 + 8) =
                ptx::pack<T>(merged(n + 1, 0, theirs.z), merged(n + 1, 1, theirs.w));
        }
    }
}

}  // namespace attention
