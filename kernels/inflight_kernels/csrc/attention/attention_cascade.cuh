// Attention over prefixes that sequences share: the pieces of a block, and the merging of their
// sums with those of each sequence's own keys. Prefixes and pieces are defined in
// attention_prefixes.cuh.
#pragma once

#include "attention/attention_prefixes.cuh"
#include "attention/attention_tile.cuh"
#include "attention/attention_units.cuh"
#include "common.cuh"

namespace attention {

// Tile shape of the pieces, in a block of the kernel for shape S: each of four warps has 16 rows.
template <class S, int STAGES>
using PieceShape = Shape<typename S::Element, S::HEAD_DIM, PREFIX_ROWS / 16, 1, 1, PREFIX_KEYS,
                         STAGES, typename S::Cached>;

// Merges the partial sums of `count` adjacent members of a prefix unit, those that are `wanted`,
// and writes their rows. `thread` is one of THREADS.
//
//   place       of the first one among all members
//   head        KV head
//   first_row   of the first one's sums of the first piece
//   pieces      of the unit
//   ROWS        whose sums are loaded together, as the L2 latency dominates here
template <int HEAD_DIM, int THREADS, int ROWS, typename T, class Wanted>
__device__ __forceinline__ void merge_members(const Arguments<T>& args, const PrefixMemory& memory,
                                              int place, int count, int head, int first_row,
                                              int pieces, int thread, const Wanted& wanted) {
    constexpr int QUARTERS = HEAD_DIM / 4;
    constexpr int PARTS = 4;  // of a row that are loaded together
    const int end = count * args.group * QUARTERS;
#pragma unroll 1
    for (int base = thread; base < end; base += ROWS * THREADS) {
        Merged merged[ROWS];
        int rows[ROWS], members[ROWS];
        bool exists[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int index = base + r * THREADS;
            rows[r] = index / QUARTERS;
            members[r] = args.token_of(rows[r]);
            exists[r] = index < end && wanted(members[r]);
        }
        const auto query_head = [&](int r) {
            return head * args.group + rows[r] - members[r] * args.group;
        };
        const auto column_of = [&](int r) { return (base + r * THREADS) % QUARTERS * 4; };
#pragma unroll 1
        for (int first = 0; first <= pieces; first += PARTS) {
            float2 states[ROWS][PARTS];
            float4 parts[ROWS][PARTS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int i = 0; i < PARTS; ++i) {
                    const int k = first + i;
                    // After the pieces, the own keys.
                    const long long row = k < pieces ? first_row + k * PREFIX_ROWS + rows[r]
                                                     : memory.own_row +
                                                           (place + members[r]) * args.num_heads +
                                                           query_head(r);
                    const bool is_there = exists[r] && k <= pieces;
                    states[r][i] = ptx::load_if(is_there, memory.states + row, -CUDART_INF_F);
                    parts[r][i] =
                        ptx::load_if(is_there, reinterpret_cast<const float4*>(
                                                   memory.sums + row * HEAD_DIM + column_of(r)));
                }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                float largest = merged[r].max;
#pragma unroll
                for (int i = 0; i < PARTS; ++i) largest = fmaxf(largest, states[r][i].x);
                merged[r].raise(largest);
#pragma unroll
                for (int i = 0; i < PARTS; ++i) merged[r].add(states[r][i], parts[r][i]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (!exists[r]) continue;
            const long long token = load_l2(memory.tokens + place + members[r]);
            T* const out = args.out + (token * args.num_heads + query_head(r)) * HEAD_DIM;
            write_columns(args, out + column_of(r), query_head(r), merged[r]);
        }
    }
}

// The member that a unit of a single token belongs to, if any.
template <class S>
__device__ __forceinline__ Member member_of(const PrefixMemory& memory, const Unit& unit,
                                            const Share& share) {
    if (share.prefix_pieces == 0) return {};
    return load_l2(memory.members + unit.item.sequence);
}

// Counts the own keys of a member and KV head as computed; whether its pieces already were. The own
// sums of the caller, and of its warp or block before a barrier, are then visible to others.
__device__ __forceinline__ bool arrive_last(const PrefixMemory& memory, const Member& member,
                                            int head, int num_kv_heads) {
    int* const arrived = memory.arrived + member.place * num_kv_heads + head;
    const bool is_last = ptx::count_arrival(arrived) == member.pieces;
    if (is_last) *arrived = 0;  // for the next launch with this plan
    return is_last;
}

// Merges the sums of a member and KV head, and writes its rows. `thread` is one of THREADS.
template <int HEAD_DIM, int THREADS, int ROWS, typename T>
__device__ __forceinline__ void merge_member(const Arguments<T>& args, const PrefixMemory& memory,
                                             const Member& member, int head, int thread) {
    const int first_row = (member.first_piece + head * member.pieces) * PREFIX_ROWS + member.row;
    merge_members<HEAD_DIM, THREADS, ROWS>(args, memory, member.place, 1, head, first_row,
                                           member.pieces, thread, [](int) { return true; });
}

// Loads this warp's two rows per lane of a prefix unit; zeros for rows that do not exist.
template <class S>
__device__ __forceinline__ void load_member_queries(HeadRow<S> (&rows)[2],
                                                    const Arguments<typename S::Element>& args,
                                                    const int* tokens, int num_rows, int head,
                                                    int warp) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = warp * S::WARP_ROWS + half * 8 + threadIdx.x % 32 / 4;
        if (row >= num_rows) {
            rows[half].clear();
            continue;
        }
        const int member = args.token_of(row);
        const long long token = load_l2(tokens + member);
        rows[half].load(args.q + token * args.q_stride +
                        (head * args.group + row - member * args.group) * S::HEAD_DIM);
    }
}

// Stores the partial sums of this warp's rows; `first_row` is that of the piece in the memory.
template <class S>
__device__ __forceinline__ void store_piece(const PrefixMemory& memory, const State<S>& state,
                                            int num_rows, int first_row, int warp) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = warp * S::WARP_ROWS + half * 8 + lane / 4;
        const float total = sum_of_quad(state.total[0][half]);
        if (row >= num_rows) continue;
        const long long place = first_row + row;
        if (lane % 4 == 0) memory.states[place] = make_float2(state.max[0][half], total);
        float* const sums = memory.sums + place * S::HEAD_DIM;
        if constexpr (S::QUANTIZED) {
            // Even columns of each 16 are in one fragment, odd ones in the next.
#pragma unroll
            for (int n = 0; n < S::HEAD_DIM / 8; n += 2) {
                const float* const even = state.sums[0][n] + 2 * half;
                const float* const odd = state.sums[0][n + 1] + 2 * half;
                *reinterpret_cast<float4*>(sums + n * 8 + lane % 4 * 4) =
                    make_float4(even[0], odd[0], even[1], odd[1]);
            }
            continue;
        }
#pragma unroll
        for (int n = 0; n < S::HEAD_DIM / 8; ++n)
            *reinterpret_cast<float2*>(sums + n * 8 + lane % 4 * 2) =
                make_float2(state.sums[0][n][2 * half], state.sums[0][n][2 * half + 1]);
    }
}

// Attention of a prefix unit's rows over the tiles [from, to): all keys are seen by all rows. The
// first tiles may be read before the preceding kernels have ended, the queries may not.
template <class S>
__device__ __forceinline__ void attend_piece(const Arguments<typename S::Element>& args,
                                             const Prefix& prefix, const int* tokens, int num_rows,
                                             int head, int from, int to, State<S>& state) {
    using T = typename S::Element;
    extern __shared__ __align__(16) unsigned char memory[];
    T* const tiles = reinterpret_cast<T*>(memory);
    const int warp = threadIdx.x / 32;
    const int* const table =
        args.block_tables + static_cast<long long>(prefix.sequence) * args.table_stride;
    const int kv_end = prefix.tiles * S::KEYS;
    Pages<S> pages;
    pages.find(table, args.block_shift, kv_end, from);
    int stage = 0;  // to copy into
    int next = from;
    const auto copy = [&] {
        if (next < to) {
            if (!pages.knows(next)) pages.find(table, args.block_shift, kv_end, next);
            load_tile<S>(tiles + 2 * stage * S::TILE, args, head, kv_end, next, pages.of(next), 0,
                         kv_end);
            ++next;
            stage = stage + 1 == S::STAGES ? 0 : stage + 1;
        }
        ptx::commit_copies();
    };
#pragma unroll 1
    for (int i = 0; i < S::STAGES - 1; ++i) copy();
    pdl_wait();
    HeadRow<S> rows[2];
    load_member_queries<S>(rows, args, tokens, num_rows, head, warp);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rows[half].become_operands();
        state.max[0][half] = -CUDART_INF_F;
        state.total[0][half] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < S::HEAD_DIM / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) state.sums[0][n][e] = 0.0f;

    int now = 0;
#pragma unroll 1
    for (int tile = from; tile < to; ++tile) {
        ptx::wait_copies<S::STAGES - 2>();
        __syncthreads();  // the tile is visible, and the one to be overwritten has been read
        copy();
        const T* const keys = tiles + 2 * now * S::TILE;
        const T* const values = keys + S::TILE;
        now = now + 1 == S::STAGES ? 0 : now + 1;
        Scores<S> scores;
        mma_qk<S>(scores, rows, nullptr, keys, warp, 0);
        if constexpr (S::QUANTIZED) apply_scales<S>(scores, keys, 0);
        float scale = args.scale;
        if (args.soft_cap > 0.0f) {
            cap_scores<S>(scores, scale, args.soft_cap);
            scale = 1.0f;
        }
        softmax_step<S>(state, scores, scale, ValueLogs<S>(values, 0));
        if constexpr (S::QUANTIZED) apply_scales<S>(scores, values, 0);
        mma_pv<S>(state, scores, values, 0);
    }
}

// Processes the pieces of this block, one after the other.
template <class S>
__device__ __forceinline__ void attend_pieces(const Arguments<typename S::Element>& args,
                                              const PrefixMemory& memory, int num_pieces) {
    __shared__ bool ends[S::ROWS];  // members whose last block this is
    const int per_unit = S::ROWS / args.group;
#pragma unroll 1
    for (int piece = blockIdx.x; piece < num_pieces; piece += gridDim.x) {
        const Prefix* which = memory.prefixes;
        while (piece >= load_l2(&which->end_piece)) ++which;
        const Prefix prefix = load_l2(which);
        const int unit = (piece - prefix.first_piece) / prefix.pieces;
        const int part = piece - prefix.first_piece - unit * prefix.pieces;
        const int head = unit % args.num_kv_heads;
        const int skipped = unit / args.num_kv_heads * per_unit;  // members of earlier units
        const int first_member = prefix.first_member + skipped;
        const int num_members = min(per_unit, prefix.num_members - skipped);
        const int num_rows = num_members * args.group;
        const int* const tokens = memory.tokens + first_member;
        const int from = part * prefix.piece_tiles;
        const int to = min(prefix.tiles, from + prefix.piece_tiles);
        State<S> state;
        attend_piece<S>(args, prefix, tokens, num_rows, head, from, to, state);
        store_piece<S>(memory, state, num_rows, piece * PREFIX_ROWS, threadIdx.x / 32);

        __syncthreads();  // all sums are stored, and all tiles read
        bool ends_one = false;
        const int own = threadIdx.x;
        if (own < num_members) {
            const Member member = {first_member + own, 0, 0, prefix.pieces};
            ends_one = arrive_last(memory, member, head, args.num_kv_heads);
            ends[own] = ends_one;
        }
        if (__syncthreads_or(ends_one))
            merge_members<S::HEAD_DIM, S::THREADS, 4>(
                args, memory, first_member, num_members, head, (piece - part) * PREFIX_ROWS,
                prefix.pieces, threadIdx.x, [&](int member) { return ends[member]; });
    }
}

}  // namespace attention
