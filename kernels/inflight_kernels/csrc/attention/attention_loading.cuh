// Copies of queries, and of tiles of keys and values, to shared memory, and of queries to
// registers.
#pragma once

#include "attention/attention_bytes.cuh"
#include "attention/attention_ptx.cuh"
#include "attention/attention_units.cuh"
#include "common.cuh"

namespace attention {

// ---------------------------------------------------------------- queries

// The row of q that is a row of a unit.
template <class S>
__device__ __forceinline__ const typename S::Element* query_row(
    const Arguments<typename S::Element>& args, const Unit& unit, int row) {
    const Query query = query_of<S>(args, unit, row);
    return args.q + (unit.item.query_start + query.token) * args.q_stride +
           query.head * S::HEAD_DIM;
}

// Copies the unit's queries; rows past the chunk become zero.
template <class S>
__device__ __forceinline__ void copy_queries(typename S::Element* shared,
                                             const Arguments<typename S::Element>& args,
                                             const Unit& unit) {
    const unsigned base = ptx::shared_address(shared);
#pragma unroll
    for (int index = threadIdx.x; index < S::ROWS * S::CHUNKS; index += S::THREADS) {
        const int row = index / S::CHUNKS;
        const int chunk = index % S::CHUNKS;
        const bool valid = row < unit.num_rows;
        ptx::copy_async(base + (row * S::PITCH + chunk * 8) * 2,
                        query_row<S>(args, unit, valid ? row : 0) + chunk * 8, valid);
    }
}

// Converts queries that were copied to operands of mma, by all threads.
template <class S>
__device__ __forceinline__ void convert_queries(typename S::Element* shared) {
    unsigned* const words = reinterpret_cast<unsigned*>(shared);
#pragma unroll 4
    for (int i = threadIdx.x; i < S::ROWS * S::PITCH / 2; i += S::THREADS)
        words[i] = as_half_operands(words[i]);
}

// Fragment `step` (16 columns) of this warp's queries; `rows` is the first of 16.
template <class S>
__device__ __forceinline__ void load_query_fragment(unsigned (&fragment)[4],
                                                    const typename S::Element* queries, int rows,
                                                    int step) {
    const int lane = threadIdx.x % 32;
    if constexpr (S::QUANTIZED) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int offset = (rows + half * 8 + lane / 4) * S::PITCH;
            const uint2 words =
                *reinterpret_cast<const uint2*>(queries + offset + step * 16 + lane % 4 * 4);
            fragment[half] = words.x;
            fragment[2 + half] = words.y;
        }
        return;
    }
    const int row = rows + lane % 16;
    const int column = step * 16 + lane / 16 * 8;
    ptx::load_matrices(fragment, ptx::shared_address(queries + row * S::PITCH + column));
}

// A lane's part of a row of a head, as in a fragment: four of each 16 columns, in two words. Beside
// bytes the four are adjacent.
template <class S>
struct HeadRow {
    static constexpr int STEPS = S::HEAD_DIM / 16;
    unsigned words[STEPS][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) words[step][0] = words[step][1] = 0;
    }
    // From those of q to operands of mma.
    __device__ __forceinline__ void become_operands() {
        if constexpr (S::QUANTIZED) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    words[step][half] = as_half_operands(words[step][half]);
        }
    }
    __device__ __forceinline__ void load(const typename S::Element* row) {
        if constexpr (S::QUANTIZED)
            load_adjacent(reinterpret_cast<const uint2*>(row) + threadIdx.x % 4,
                          typename IndicesUpTo<STEPS>::type());
        else
            load_from(reinterpret_cast<const unsigned*>(row) + threadIdx.x % 4,
                      typename IndicesUpTo<STEPS>::type());
    }

   private:
    template <int... STEP>
    __device__ __forceinline__ void load_from(const unsigned* first, Indices<STEP...>) {
        ((words[STEP][0] = load_l2<STEP * 32>(first)), ...);
        ((words[STEP][1] = load_l2<STEP * 32 + 16>(first)), ...);
    }
    template <int... STEP>
    __device__ __forceinline__ void load_adjacent(const uint2* first, Indices<STEP...>) {
        ((put(words[STEP], load_l2<STEP * 32>(first))), ...);
    }
    __device__ __forceinline__ static void put(unsigned (&pair)[2], const uint2& both) {
        pair[0] = both.x;
        pair[1] = both.y;
    }
};

// Loads the queries of this warp and, if not null, `key` as the row after them; other rows that do
// not exist are zero.
template <class S>
__device__ __forceinline__ void load_queries(HeadRow<S> (&rows)[2],
                                             const Arguments<typename S::Element>& args,
                                             const Unit& unit, const typename S::Element* key,
                                             int warp_m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = warp_m * S::WARP_ROWS + half * 8 + threadIdx.x % 32 / 4;
        const typename S::Element* from = row < unit.num_rows    ? query_row<S>(args, unit, row)
                                          : row == unit.num_rows ? key
                                                                 : nullptr;
        if (from != nullptr)
            rows[half].load(from);
        else
            rows[half].clear();
    }
}

// ---------------------------------------------------------------- keys and values

// The cache blocks of the keys that this warp copies, for 32 consecutive tiles: one per lane.
template <class S>
struct Pages {
    int first;  // tile
    int block;

    __device__ __forceinline__ void find(const int* table, int block_shift, int kv_end, int tile) {
        const int key = (tile + threadIdx.x % 32) * S::KEYS + S::first_key();
        first = tile;
        // The table ends with the sequence.
        block = key < kv_end ? load_l2(table + (key >> block_shift)) : 0;
    }
    __device__ __forceinline__ bool knows(int tile) const {
        return static_cast<unsigned>(tile - first) < 32;
    }
    __device__ __forceinline__ int of(int tile) const {
        return __shfl_sync(FULL_WARP, block, tile - first);
    }
};

// Copies rows of keys and values from `first_key` on, COPY_KEYS of them, to a tile whose part for
// them is at `target`, restricted to the keys [begin, end). Rows from kv_end on become zero.
//
//   CHUNKS         of 16 bytes in a row
//   PITCH          bytes from row to row of the tile
//   keys, values   the first row in the cache
//   row_stride     chunks from row to row there
template <class S, int CHUNKS, int PITCH>
__device__ __forceinline__ void copy_rows(unsigned target, const void* keys, const void* values,
                                          int row_stride, int first_key, int begin, int end,
                                          int kv_end) {
    static_assert(S::COPY_KEYS * CHUNKS % 32 == 0, "each lane copies the same number of chunks");
    const int lane = threadIdx.x % 32;
    const int lane_row = lane / CHUNKS;
    const int lane_chunk = lane % CHUNKS;
    const int origin = lane_row * row_stride + lane_chunk;
    const uint4* const from_keys = static_cast<const uint4*>(keys) + origin;
    const uint4* const from_values = static_cast<const uint4*>(values) + origin;
    target += lane_row * PITCH + lane_chunk * 16;
#pragma unroll
    for (int i = 0; i < S::COPY_KEYS * CHUNKS / 32; ++i) {
        // Rows and chunks relative to the lane's, the same for all lanes if they divide evenly.
        const int index = i * 32 + (32 % CHUNKS == 0 ? 0 : lane);
        const int row = index / CHUNKS - (32 % CHUNKS == 0 ? 0 : lane_row);
        const int chunk = index % CHUNKS - (32 % CHUNKS == 0 ? 0 : lane_chunk);
        const int key = first_key + lane_row + row;
        const bool copied = (begin == 0 || key >= begin) && (end == ALL_KEYS || key < end);
        const bool valid = key < kv_end;
        const unsigned place = target + row * PITCH + chunk * 16;
        const int source = row * row_stride + chunk;
        ptx::copy_async_if(copied, place, from_keys + source, valid);
        ptx::copy_async_if(copied, place + S::TILE * 2, from_values + source, valid);
    }
}

// Copies this warp's part of a tile of keys and values, restricted to the keys [begin, end), with
// their scales. Rows and scales past the sequence become zero: their weight is 0, but the cache may
// contain NaN there.
template <class S>
__device__ __forceinline__ void load_byte_tile(typename S::Element* keys,
                                               const Arguments<typename S::Element>& args,
                                               int kv_head, int kv_end, int tile, int page,
                                               int begin, int end) {
    constexpr int SCALE_CHUNKS = S::COPY_KEYS / 8;  // of 16 bytes, of keys and of values each
    static_assert(S::COPY_KEYS % 8 == 0, "whole chunks of scales");
    const int lane = threadIdx.x % 32;
    const int row_stride = args.num_kv_heads * S::HEAD_DIM;
    const int first_row = S::first_key();
    const int first_key = tile * S::KEYS + first_row;
    const int offset = first_key & ((1 << args.block_shift) - 1);  // in the block
    const long long block = page * args.block_stride;
    using Bytes = const unsigned char*;
    const Bytes k_block = reinterpret_cast<Bytes>(args.k_cache) + block;
    const Bytes v_block = reinterpret_cast<Bytes>(args.v_cache) + block;
    const long long origin = static_cast<long long>(offset) * row_stride + kv_head * S::HEAD_DIM;
    const unsigned target = ptx::shared_address(keys);
    constexpr int PITCH = byte_pitch(S::HEAD_DIM);
    copy_rows<S, S::HEAD_DIM / 16, PITCH>(target + first_row * PITCH, k_block + origin,
                                          v_block + origin, row_stride / 16, first_key, begin, end,
                                          kv_end);
    // Scales of 8 keys are copied with the last of them, so once.
    const int row = lane % SCALE_CHUNKS * 8;
    const int key = first_key + row;
    const bool copied = lane < 2 * SCALE_CHUNKS && key + 7 >= begin && key + 7 < end;
    const bool of_values = lane / SCALE_CHUNKS % 2 == 1;
    const unsigned place = target + (of_values ? S::TILE * 2 : 0) +
                           S::KEYS * byte_pitch(S::HEAD_DIM) + (first_row + row) * 2;
    const long long scales = scales_offset(1 << args.block_shift, args.num_kv_heads, S::HEAD_DIM) +
                             (static_cast<long long>(kv_head) << args.block_shift) * 2 +
                             (offset + row) * 2;
    ptx::copy_part_async_if(copied, place, (of_values ? v_block : k_block) + scales,
                            min(max(kv_end - key, 0), 8) * 2);
}

// Copies this warp's part of a tile of keys and values, restricted to the keys [begin, end). Rows
// past the sequence become zero: their weight is 0, but the cache may contain NaN there.
template <class S>
__device__ __forceinline__ void load_tile(typename S::Element* keys,
                                          const Arguments<typename S::Element>& args, int kv_head,
                                          int kv_end, int tile, int page, int begin, int end) {
    if constexpr (S::QUANTIZED) {
        load_byte_tile<S>(keys, args, kv_head, kv_end, tile, page, begin, end);
        return;
    }
    const int row_stride = args.num_kv_heads * S::HEAD_DIM;
    const int first_row = S::first_key();
    const int first_key = tile * S::KEYS + first_row;
    const long long origin = page * args.block_stride +
                             (first_key & ((1 << args.block_shift) - 1)) * row_stride +
                             kv_head * S::HEAD_DIM;
    copy_rows<S, S::CHUNKS, S::PITCH * 2>(ptx::shared_address(keys + first_row * S::PITCH),
                                          args.k_cache + origin, args.v_cache + origin,
                                          row_stride / 8, first_key, begin, end, kv_end);
}

}  // namespace attention
