// Shared by the attention kernels: the work that `plan` assigns to blocks, and the merging of units
// that several blocks process.
//
// The query heads of a KV head are packed into rows: row r of a chunk is its token r / group, head
// r % group, so that one read of K and V serves the whole group.
//
//   unit   ROWS consecutive rows of a chunk x one KV head, or HEADS adjacent ones: softmaxes over
//          its tiles of KEYS keys
//   item   the units of the same rows, one per KV head or per HEADS of them
//   share  consecutive tiles of the step that one block processes. Shares have equal numbers of
//          tiles (+-1), or, if that costs little, end where units end; or each unit is split into
//          pieces of equal size, and a share is a piece.
//
// For a unit split across shares, each block writes partial sums, and the last one to arrive merges
// them.
#pragma once

#include <math_constants.h>

#include "attention/attention_ptx.cuh"
#include "common.cuh"

namespace attention {

constexpr float LOG2_E = 1.4426950408889634f;

struct Item {
    int first_tile;  // its index among all tiles of the step
    int sequence;
    int first_row;  // in the chunk
    int query_start;
    int query_len;
    int kv_len;
    int kv_begin;  // first tile of keys that a row attends to
    int kv_tiles;  // of a unit, at least 1
};

struct Share {
    int begin, end;     // tiles
    int item;           // that holds tile `begin`
    int total;          // tiles of the step, also of an empty share
    int piece;          // of its unit, if units are cut into pieces
    int pieces;         // of its unit; 0 if they are not
    int prefix_pieces;  // of the step, for all blocks together; see attention_prefixes.cuh
    int unused;
    Item first;  // a copy of the item, to avoid two dependent reads
};

// For a block whose share is empty, before it returns. If no block waited, the next kernel's wait
// could return before the preceding kernels have ended. If others have shares, these wait, and this
// block makes room: the next kernel starts when all blocks have begun, of which few fit beside a
// preceding kernel's.
__device__ __forceinline__ void leave(const Share& share) {
    if (share.total == 0) pdl_wait();
}

// Whether the blocks of this cluster of two have the two pieces of a unit.
__device__ __forceinline__ bool is_pair(const Share& share) {
    return share.pieces == 2 && (blockIdx.x - share.piece) % 2 == 0;
}

// For kernels that can take whole units from a common queue instead of shares.
struct Queue {
    int units;     // of the step; 0: use the shares
    int next;      // next unit to take; 0 between launches
    int finished;  // blocks that found the queue empty; 0 between launches
    // The queue iterates over the items for so many KV heads, then for the next ones: the fewer at
    // a time, the higher the L2 hit rate of their keys and values.
    int heads_at_once;
};

// Keys and values of prompts are dequantised into blocks of so many keys, for attention_hopper.cu.
constexpr int DEQUANTIZED_BLOCK = 64;

constexpr int ALL_KEYS = 1 << 30;  // more than any sequence has

// Where such a block is read from.
struct Source {
    int sequence;
    int first_key;
};

// Arguments of `attend`; the same for each block. If the cache has 8 bits, k_cache and v_cache are
// read as bytes, and block_stride is in bytes.
template <typename T>
struct Arguments {
    const T* q;
    const T* k_cache;
    const T* v_cache;
    T* out;
    const int* block_tables;
    long long q_stride;      // elements from token to token
    long long block_stride;  // elements from block to block of the cache
    int table_stride;
    int block_shift;  // log2 of the block size
    int num_heads;
    int num_kv_heads;
    int group;
    float scale;     // of the scores, times log2(e) unless soft-capped
    float soft_cap;  // 0 for none
    int window;
    const float* sinks;      // [num_heads]; null for none
    unsigned group_inverse;  // 2^32 / group, rounded up

    __device__ __forceinline__ Arguments(const T* q, const T* k_cache, const T* v_cache, T* out,
                                         const int* block_tables, long long q_stride,
                                         long long block_stride, int table_stride, int block_shift,
                                         int num_heads, int num_kv_heads, float scale,
                                         float soft_cap, int window, const float* sinks)
        : q(q),
          k_cache(k_cache),
          v_cache(v_cache),
          out(out),
          block_tables(block_tables),
          q_stride(q_stride),
          block_stride(block_stride),
          table_stride(table_stride),
          block_shift(block_shift),
          num_heads(num_heads),
          num_kv_heads(num_kv_heads),
          group(num_heads / num_kv_heads),
          scale(soft_cap > 0.0f ? scale : scale * LOG2_E),
          soft_cap(soft_cap),
          window(window),
          sinks(sinks),
          group_inverse(0xffffffffu / group + 1) {}

    // The token of a row, for rows below 2^32 / group.
    __device__ __forceinline__ int token_of(int row) const {
        return group == 1 ? row : __umulhi(row, group_inverse);
    }
};

// Position of a block: a unit, and its tiles that are in the share.
struct Unit {
    Item item;
    int head;      // its index in the item: the KV head if HEADS is 1
    int from, to;  // tiles of the item
    int num_rows;  // valid ones of ROWS

    __device__ __forceinline__ bool whole() const { return from == 0 && to == item.kv_tiles; }
};

// The block whose share contains a tile; the inverse of `share_begin`.
__device__ __forceinline__ int share_of(int tile, int total, int num_shares) {
    const int size = total / num_shares;
    const int longer = total - size * num_shares;  // shares of size + 1 come first
    const int border = longer * (size + 1);
    return tile < border ? tile / (size + 1) : longer + (tile - border) / size;
}

__device__ __forceinline__ int share_begin(int share, int total, int num_shares) {
    const int size = total / num_shares;
    const int longer = total - size * num_shares;
    return share * size + min(share, longer);
}

__device__ __forceinline__ float max_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float sum_of_quad(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// cap * tanh(score / cap) in units of log 2, through exp2: near 0 the absolute error is
// cap * 2^-23.
struct SoftCap {
    float inner, outer;

    __device__ __forceinline__ SoftCap(float scale, float cap)
        : inner(2.0f * LOG2_E * scale / cap), outer(cap * LOG2_E) {}

    __device__ __forceinline__ float operator()(float score) const {
        const float power = ptx::exp2(score * inner);  // inf gives tanh = 1
        return outer * (1.0f - __fdividef(2.0f, 1.0f + fminf(power, 1e30f)));
    }
};

// The softmax weight of a head's sink, a further key without a value, relative to the maximum of a
// row's scores. It is added once per row, where all of the row's keys are known. If the sink
// exceeds the maximum by far, it is inf, and the row becomes 0.
template <typename T>
__device__ __forceinline__ float sink_weight(const Arguments<T>& args, int head, float max) {
    if (args.sinks == nullptr) return 0.0f;
    return ptx::exp2(fmaf(__ldg(args.sinks + head), LOG2_E, max == -CUDART_INF_F ? 0.0f : -max));
}

// Merges softmax sums relative to different maxima, rescaled to the largest one.
struct Merged {
    float4 sums;
    float max, total;

    __device__ __forceinline__ explicit Merged(float largest = -CUDART_INF_F)
        : sums(make_float4(0.0f, 0.0f, 0.0f, 0.0f)), max(largest), total(0.0f) {}

    __device__ __forceinline__ float weight_of(float other) const {
        return ptx::exp2(other - (max == -CUDART_INF_F ? 0.0f : max));
    }

    // Rescales to a new maximum, not below the current one.
    __device__ __forceinline__ void raise(float largest) {
        const float before = max;
        max = largest;
        const float weight = weight_of(before);
        sums.x *= weight;
        sums.y *= weight;
        sums.z *= weight;
        sums.w *= weight;
        total *= weight;
    }

    __device__ __forceinline__ void add(float2 state, float4 part) {
        const float weight = weight_of(state.x);
        sums.x = fmaf(part.x, weight, sums.x);
        sums.y = fmaf(part.y, weight, sums.y);
        sums.z = fmaf(part.z, weight, sums.z);
        sums.w = fmaf(part.w, weight, sums.w);
        total = fmaf(state.y, weight, total);
    }
};

// The token in the chunk, and the query head, of a row of a unit.
struct Query {
    int token, head;
};

template <class S>
__device__ __forceinline__ Query query_of(const Arguments<typename S::Element>& args,
                                          const Unit& unit, int row) {
    const int packed = unit.item.first_row + row;
    const int token = args.token_of(packed);
    return {token, S::kv_head(unit) * args.group + packed - token * args.group};
}

// Address of a query's row in `out`.
template <class S>
__device__ __forceinline__ typename S::Element* out_row(const Arguments<typename S::Element>& args,
                                                        const Unit& unit, const Query& query) {
    const long long token = unit.item.query_start + query.token;
    return args.out + (token * args.num_heads + query.head) * S::HEAD_DIM;
}

// Writes four columns of a head of `out`; zeros for a row without keys.
template <typename T>
__device__ __forceinline__ void write_columns(const Arguments<T>& args, T* columns, int head,
                                              const Merged& merged) {
    const float total = merged.total + sink_weight(args, head, merged.max);
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    *reinterpret_cast<uint2*>(columns) =
        make_uint2(ptx::pack<T>(merged.sums.x * inverse, merged.sums.y * inverse),
                   ptx::pack<T>(merged.sums.z * inverse, merged.sums.w * inverse));
}

// The same of a row of a unit.
template <class S>
__device__ __forceinline__ void write_out(const Arguments<typename S::Element>& args,
                                          const Unit& unit, int row, int column,
                                          const Merged& merged) {
    const Query query = query_of<S>(args, unit, row);
    write_columns(args, out_row<S>(args, unit, query) + column, query.head, merged);
}

// Partial sums of blocks: two slots each, 2b for a unit that began in an earlier block, 2b + 1 for
// one that begins in block b and continues.
template <class S>
struct Slots {
    static constexpr int ROWS = S::HEADS * S::ROWS;
    float* sums;     // [slots, ROWS, HEAD_DIM]
    float2* states;  // [slots, ROWS]: maximum and total

    // For the rows from `first_row` on.
    __device__ __forceinline__ explicit Slots(float* base, int first_row = 0)
        : sums(base + first_row * S::HEAD_DIM),
          states(reinterpret_cast<float2*>(base + 2ll * gridDim.x * ROWS * S::HEAD_DIM) +
                 first_row) {}

    __device__ __forceinline__ static int own(const Unit& unit) {
        return 2 * blockIdx.x + (unit.from == 0 ? 1 : 0);
    }
    __device__ __forceinline__ float* row(int slot, int row) const {
        return sums + (static_cast<long long>(slot) * ROWS + row) * S::HEAD_DIM;
    }
    __device__ __forceinline__ float2* state(int slot, int row) const {
        return states + slot * ROWS + row;
    }
};

// The blocks that process a unit. A block begins at most one unit that it does not end, so `first`
// identifies a split unit.
struct Blocks {
    int first, last;

    __device__ __forceinline__ Blocks(const Unit& unit, const Share& share)
        : first(blockIdx.x - share.piece), last(first + share.pieces - 1) {
        if (share.pieces == 0) *this = Blocks(unit, share.total);
    }

    // For equal shares.
    __device__ __forceinline__ Blocks(const Unit& unit, int total) {
        const int first_tile = unit.item.first_tile + unit.head * unit.item.kv_tiles;
        first = share_of(first_tile, total, gridDim.x);
        last = share_of(first_tile + unit.item.kv_tiles - 1, total, gridDim.x);
    }
};

// Merges the slots of a unit and hands the rows [begin, end) to emit(row, column, merged), four
// columns at a time; `thread` is one of THREADS.
template <class S, int THREADS, class Emit>
__device__ __forceinline__ void merge_slots(const Slots<S>& slots, const Blocks& blocks, int begin,
                                            int end, int thread, const Emit& emit) {
    constexpr int QUARTERS = S::HEAD_DIM / 4;
    // Loads in flight together: the L2 latency dominates here.
    constexpr int AT_ONCE = 8;
#pragma unroll 1
    for (int index = begin * QUARTERS + thread; index < end * QUARTERS; index += THREADS) {
        const int row = index / QUARTERS;
        const int column = index % QUARTERS * 4;
        Merged merged(-CUDART_INF_F);
#pragma unroll 1
        for (int b = blocks.first; b <= blocks.last; b += AT_ONCE) {
            float2 states[AT_ONCE];
            float4 parts[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int slot = 2 * (b + i) + (b + i == blocks.first ? 1 : 0);
                const bool exists = b + i <= blocks.last;
                states[i] = ptx::load_if(exists, slots.state(slot, row), -CUDART_INF_F);
                parts[i] = ptx::load_if(
                    exists, reinterpret_cast<const float4*>(slots.row(slot, row) + column));
            }
            float largest = merged.max;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) largest = fmaxf(largest, states[i].x);
            merged.raise(largest);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) merged.add(states[i], parts[i]);
        }
        emit(row, column, merged);
    }
}

}  // namespace attention
