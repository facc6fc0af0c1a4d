// Results of attention_heads.cu: the rows of a unit, or of the pieces that several blocks have, are
// merged and written.
#pragma once

#include "attention/attention_cascade.cuh"
#include "attention/attention_heads_tile.cuh"
#include "cluster.cuh"

namespace attention {

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

// Merges the two pieces of a unit, which the blocks of this cluster have, and writes its rows: each
// warp of the block with the first piece reads what the same warp of the other one leaves in the
// memory of its tiles, all of which are read.
template <class S>
__device__ __forceinline__ void merge_pair(const Arguments<typename S::Element>& args,
                                           const Unit& unit, HeadState<S>& state, int piece,
                                           typename S::Element* tiles) {
    constexpr int COLUMNS = S::HEAD_DIM / 16;
    static_assert((COLUMNS * 32 + 4) * 16 <= S::STAGES * 2 * S::TILE * 2, "no room for the sums");
    const int lane = threadIdx.x % 32;
    float4* const parts = reinterpret_cast<float4*>(tiles);
    float totals[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) totals[r] = sum_over_keys(state.total[r]);
    if (piece == 1) {
        __syncwarp();
        if (lane < 4)
            parts[COLUMNS * 32 + lane] =
                make_float4(state.max[0], totals[0], state.max[1], totals[1]);
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
            parts[column * 32 + lane] = make_float4(state.sums[column][0], state.sums[column][1],
                                                    state.sums[column][2], state.sums[column][3]);
    }
    cluster_sync_release();
    if (piece == 0) {
        const float4 other = load_from(parts + COLUMNS * 32 + lane % 4, 1);
        const float maxima[] = {other.x, other.z}, their_totals[] = {other.y, other.w};
        float weight[2], their_weight[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float largest = fmaxf(state.max[r], maxima[r]);
            const float origin = largest == -CUDART_INF_F ? 0.0f : largest;
            weight[r] = ptx::exp2(state.max[r] - origin);
            their_weight[r] = ptx::exp2(maxima[r] - origin);
            state.max[r] = largest;
            // Once for all lanes with this row.
            const float total = fmaf(totals[r], weight[r], their_totals[r] * their_weight[r]);
            state.total[r] = lane < 4 ? total : 0.0f;
        }
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            const float4 theirs = load_from(parts + column * 32 + lane, 1);
            float(&sums)[4] = state.sums[column];
            sums[0] = fmaf(sums[0], weight[0], theirs.x * their_weight[0]);
            sums[1] = fmaf(sums[1], weight[1], theirs.y * their_weight[1]);
            sums[2] = fmaf(sums[2], weight[0], theirs.z * their_weight[0]);
            sums[3] = fmaf(sums[3], weight[1], theirs.w * their_weight[1]);
        }
    }
    cluster_arrive();  // all is read
    if (piece == 0) write_rows(args, unit, state);
    cluster_wait();
}

// Ends a unit, whose rows are written, or left for the merge.
template <class S>
__device__ __forceinline__ void finish_rows(const Arguments<typename S::Element>& args,
                                            const Unit& unit, const Share& share,
                                            HeadState<S>& state, const Slots<S>& slots,
                                            int* arrivals, typename S::Element* tiles) {
    if (unit.whole()) {
        write_rows(args, unit, state);
        return;
    }
    if constexpr (S::PAIRED) {
        if (is_pair(share)) {
            merge_pair(args, unit, state, share.piece, tiles);
            return;
        }
    }
    leave_rows(unit, share, state, slots, arrivals, [&](int row, int column, const Merged& merged) {
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

}  // namespace attention
