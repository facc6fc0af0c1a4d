// The search for prefixes that the sequences of a step share, by `plan_cascade`. Prefixes, members
// and pieces are defined in attention_prefixes.cuh.
#pragma once

#include "attention/attention_plan_block.cuh"
#include "attention/attention_prefixes.cuh"
#include "common.cuh"

namespace attention {

// Searches per step, some of which find nothing.
constexpr int PREFIX_SEARCHES = 8;
// Cost of a piece, in tiles: its queries, and its sums that go through memory.
constexpr int PIECE_COST = 2;

// What a search reads and writes.
struct PrefixSearch {
    const int* block_tables;
    int table_stride;
    int block_shift;
    int min_tiles;   // of a prefix
    int min_saved;   // tiles of a prefix that need not be read, of all members but one; at least 1
    int max_pieces;  // for which there is memory; enough for each unit to be one
    Prefix* prefixes;
    Member* members;
    int* tokens;
    int* arrived;
};

// Pairs of numbers >= 0, in the order of the first, then of the second.
__device__ __forceinline__ unsigned long long pair_of(int first, int second) {
    return static_cast<unsigned long long>(first) << 32 | static_cast<unsigned>(second);
}

// The largest number of all threads.
__device__ __forceinline__ unsigned long long block_largest(unsigned long long number) {
    __shared__ unsigned long long of_warps[32];
    static_assert(PLAN_THREADS == 1024, "a warp reduces the warps");
    const auto reduce = [&] {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            number = max(number, __shfl_xor_sync(FULL_WARP, number, distance));
    };
    reduce();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = number;
    __syncthreads();
    number = of_warps[threadIdx.x % 32];
    reduce();
    __syncthreads();
    return number;
}

// The tiles at the start of two block tables that are the same in both and full, but for one key of
// each sequence at least. All lanes of a warp call it.
__device__ __forceinline__ int common_tiles(const PrefixSearch& search, int one, int other,
                                            int kv_len) {
    constexpr int AT_ONCE = 8;
    const int lane = threadIdx.x % 32;
    const int limit = (kv_len - 1) >> search.block_shift;
    const int* const first =
        search.block_tables + static_cast<long long>(one) * search.table_stride;
    const int* const second =
        search.block_tables + static_cast<long long>(other) * search.table_stride;
    int blocks = limit;
#pragma unroll 1
    for (int base = 0; base < limit; base += 32 * AT_ONCE) {
        bool differ[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int index = base + 32 * i + lane;
            differ[i] = index < limit && first[index] != second[index];
        }
#pragma unroll
        for (int i = AT_ONCE - 1; i >= 0; --i) {
            const unsigned lanes = __ballot_sync(FULL_WARP, differ[i]);
            if (lanes != 0) blocks = base + 32 * i + __ffs(lanes) - 1;
        }
        if (blocks < limit) break;
    }
    return (blocks << search.block_shift) / PREFIX_KEYS;
}

// Cuts the units of the prefixes into pieces that take as many blocks the least time; returns the
// number of pieces.
__device__ __forceinline__ int cut_prefixes(Prefix* prefixes, int num_prefixes, int per_unit,
                                            int num_kv_heads, int max_pieces, int num_blocks) {
    const auto units_of = [&](const Prefix& prefix) {
        return (prefix.num_members + per_unit - 1) / per_unit * num_kv_heads;
    };
    int longest = 0;
    for (int k = 0; k < num_prefixes; ++k) longest = max(longest, prefixes[k].tiles);
    const int step = (longest + PLAN_THREADS - 1) / PLAN_THREADS;
    const int size = min((static_cast<int>(threadIdx.x) + 1) * step, longest);
    int pieces = 0;
    for (int k = 0; k < num_prefixes; ++k)
        pieces += units_of(prefixes[k]) * ((prefixes[k].tiles + size - 1) / size);
    const int time = (pieces + num_blocks - 1) / num_blocks * (size + PIECE_COST);
    // The least time, and of equal ones the largest size.
    const unsigned long long best =
        block_largest(pieces > max_pieces ? 0 : pair_of(0x7fffffff - time, size));
    const int chosen = static_cast<int>(best & 0xffffffffu);
    int begin = 0;
    for (int k = 0; k < num_prefixes; ++k) {
        const Prefix prefix = prefixes[k];
        const int count = (prefix.tiles + chosen - 1) / chosen;
        const int end = begin + units_of(prefix) * count;
        __syncthreads();
        if (threadIdx.x == 0)
            prefixes[k] = {prefix.sequence,
                           prefix.first_member,
                           prefix.num_members,
                           prefix.tiles,
                           count,
                           (prefix.tiles + count - 1) / count,
                           begin,
                           end};
        begin = end;
    }
    __syncthreads();
    return begin;
}

// Finds the prefixes of the first PLAN_THREADS sequences; prefix_tiles [PLAN_THREADS] become those
// that each shares. Returns the number of pieces, 0 if nothing is worth sharing.
__device__ __forceinline__ int find_prefixes(const PrefixSearch& search, const int* query_start,
                                             const int* seq_lens, int n, int group,
                                             int num_kv_heads, int num_blocks, int* prefix_tiles) {
    __shared__ int votes[PLAN_THREADS];   // for an entry of block tables, by its hash
    __shared__ int common[PLAN_THREADS];  // tiles that a sequence has in common with the leader
    __shared__ int leader, leading_block;
    __shared__ Prefix prefixes[MAX_PREFIXES];
    const int thread = threadIdx.x;
    const int count = min(n, PLAN_THREADS);
    const int depth = (search.min_tiles * PREFIX_KEYS) >> search.block_shift;
    // The last one of the shortest prefix; read before it is known whether the sequence has as
    // many.
    int block = -1;
    if (thread < count && depth <= search.table_stride) {
        const int entry =
            search.block_tables[static_cast<long long>(thread) * search.table_stride + depth - 1];
        const bool is_decode = query_start[thread + 1] - query_start[thread] == 1;
        if (is_decode && seq_lens[thread] > search.min_tiles * PREFIX_KEYS) block = entry;
    }
    const unsigned bucket = static_cast<unsigned>(block) * 2654435761u >> 22;
    static_assert(PLAN_THREADS == 1 << 10, "a bucket for each value of a hash");
    bool is_free = block >= 0;
    Member own = {0, 0, -1, 0};  // first_piece: index of its prefix, for now
    int num_prefixes = 0, num_members = 0;
    prefix_tiles[thread] = 0;
    // Of any prefix. Sequences with equal hashes are mostly few, and then not worth a search.
    const int longest = block_max(is_free ? seq_lens[thread] / PREFIX_KEYS : 0);
#pragma unroll 1
    for (int turn = 0; turn < PREFIX_SEARCHES && num_prefixes < MAX_PREFIXES; ++turn) {
        votes[thread] = 0;
        if (thread == 0) leader = PLAN_THREADS;
        __syncthreads();
        if (is_free) atomicAdd(votes + bucket, 1);
        __syncthreads();
        const int own_votes = is_free ? votes[bucket] : 0;
        const int most = block_max(own_votes);
        if (most < 2 || (most - 1) * longest < search.min_saved) break;
        if (own_votes == most) atomicMin(&leader, thread);
        __syncthreads();
        if (thread == leader) leading_block = block;
        __syncthreads();
        const bool follows = is_free && block == leading_block;
        common[thread] = follows ? 0 : -1;
        __syncthreads();
#pragma unroll 1
        for (int i = thread / 32; i < count; i += PLAN_THREADS / 32) {
            if (common[i] < 0) continue;
            const int tiles = common_tiles(search, i, leader, min(seq_lens[i], seq_lens[leader]));
            __syncwarp();
            if (thread % 32 == 0) common[i] = tiles;
        }
        __syncthreads();
        // The prefix of which most need not be read.
        const int tiles = common[thread];
        unsigned long long saved = 0;
        if (tiles >= search.min_tiles) {
            int sharing = 0;
#pragma unroll 8
            for (int i = 0; i < count; ++i) sharing += common[i] >= tiles;
            saved = pair_of((sharing - 1) * tiles, tiles);
        }
        const unsigned long long best = block_largest(saved);
        if (static_cast<int>(best >> 32) < search.min_saved) {
            if (follows) is_free = false;
            continue;
        }
        const int found = static_cast<int>(best & 0xffffffffu);
        const bool joins = tiles >= found;
        int total;
        const int upto = scan<PLAN_THREADS>(joins, total);
        if (joins) {
            own.place = num_members + upto - 1;
            own.first_piece = num_prefixes;
            prefix_tiles[thread] = found;
            is_free = false;
        }
        if (thread == 0) prefixes[num_prefixes] = {leader, num_members, total, found, 0, 0, 0, 0};
        ++num_prefixes;
        num_members += total;
        __syncthreads();
    }
    __syncthreads();
    if (num_prefixes == 0) return 0;

    const int per_unit = PREFIX_ROWS / group;
    const int num_pieces =
        cut_prefixes(prefixes, num_prefixes, per_unit, num_kv_heads, search.max_pieces, num_blocks);
    if (own.first_piece >= 0) {
        const Prefix& prefix = prefixes[own.first_piece];
        const int inside = own.place - prefix.first_member;
        const int unit = inside / per_unit * num_kv_heads;
        own = {own.place, (inside - inside / per_unit * per_unit) * group,
               prefix.first_piece + unit * prefix.pieces, prefix.pieces};
        search.tokens[own.place] = query_start[thread];
    }
    if (thread < count) search.members[thread] = own;
    for (int i = PLAN_THREADS + thread; i < n; i += PLAN_THREADS) search.members[i] = {};
    if (thread < num_prefixes) search.prefixes[thread] = prefixes[thread];
    for (int i = thread; i < num_members * num_kv_heads; i += PLAN_THREADS) search.arrived[i] = 0;
    return num_pieces;
}

}  // namespace attention
