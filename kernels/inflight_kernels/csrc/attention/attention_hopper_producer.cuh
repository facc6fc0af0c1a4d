// The producer warpgroup of attention_hopper.cu: two warps take units and copy their queries, two
// issue TMA copies of tiles of keys and values.
#pragma once

#include "attention/attention_hopper_block.cuh"

namespace attention {

// Iterates over the units of a block: from the queue, or of its share.
template <class S>
struct UnitSource {
    const Item* items;
    Queue* queue;
    Share share;
    int num_units;  // in the queue
    int heads_at_once;
    int num_kv_heads;
    int group;
    int upcoming;  // next unit from the queue, requested early to hide the latency

    // A unit without rows marks the end.
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

    // After the last one. The last block to arrive resets the queue for the next launch with this
    // plan.
    __device__ __forceinline__ void close() {
        if (num_units > 0 && atomicAdd(&queue->finished, 1) == gridDim.x - 1) {
            queue->next = 0;
            queue->finished = 0;
        }
    }
};

// Two warps: the second one publishes the units, one ahead of the copied queries; both copy
// queries. Rows past the chunk become zero.
template <class S>
__device__ __forceinline__ void produce_units(const Arguments<typename S::Element>& args,
                                           const SharedStorage<S>& shared, UnitSource<S> source,
                                           int thread) {
    constexpr int ROWS_AT_ONCE = QUERY_THREADS / S::CHUNKS;
    const int chunk = thread % S::CHUNKS;
    PipelineState<S::UNITS> at, upcoming;
    const auto publish = [&] {
        if (thread < 32) return;
        hopper::barrier_wait(upcoming.of(shared.unit_empty), upcoming.parity ^ 1);
        if (thread == 32) {
            source.next(shared.units[upcoming.index]);
            shared.totals[upcoming.index] = source.share.total;
            hopper::arrive(upcoming.of(shared.unit_full));
        }
        upcoming.advance();
    };
    if (thread == 32) source.open();
    publish();
    for (PipelineState<S::QUERY_STAGES> stage;; stage.advance(), at.advance()) {
        hopper::barrier_wait(at.of(shared.unit_full), at.parity);
        const Unit& unit = shared.units[at.index];
        const int num_rows = unit.num_rows;
        if (num_rows == 0) break;
        publish();
        const unsigned target = ptx::shared_address(shared.queries + stage.index * S::TILE_BYTES);
        const typename S::Element* const first =
            args.q + unit.item.query_start * args.q_stride +
            (unit.head * args.group * S::HEAD_DIM + chunk * 8);
        const int first_row = unit.item.first_row;
        hopper::barrier_wait(stage.of(shared.q_empty), stage.parity ^ 1);
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
        hopper::named_barrier_sync<QUERY_THREADS>(1 + S::GROUPS);
        if (thread == 0) hopper::arrive(stage.of(shared.q_full));
    }
    if (thread >= 32) pdl_launch_dependents();
    if (thread == 32) source.close();
}

// Copies the rows of a cache block that are in the sequence, and zeros the others: their weights
// are 0, but the cache may contain NaN there. `target` is the block's address in the tile.
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

// One warp: issues the copies of the tiles of keys, or of VALUES.
template <class S, bool VALUES>
__device__ __forceinline__ void produce_tiles(const Arguments<typename S::Element>& args,
                                           const SharedStorage<S>& shared, const hopper::TensorMap& map) {
    const int page = threadIdx.x % 32;  // this lane's page of a tile
    const int block_size = 1 << args.block_shift;
    const int block_bytes = S::ROW_BYTES << args.block_shift;
    const int pages = S::KEYS >> args.block_shift;
    constexpr int STAGES = VALUES ? S::VALUE_STAGES : S::KEY_STAGES;
    unsigned char* const tiles = VALUES ? shared.values : shared.keys;
    const unsigned full = VALUES ? shared.v_full : shared.k_full;
    const unsigned empty = VALUES ? shared.v_empty : shared.k_empty;

    PipelineState<STAGES> stage;
    for (PipelineState<S::UNITS> at;; at.advance()) {
        hopper::barrier_wait(at.of(shared.unit_full), at.parity);
        const Unit& unit = shared.units[at.index];
        if (unit.num_rows == 0) break;
        const int begin = unit.item.kv_begin + unit.from;
        const int last = unit.item.kv_begin + unit.to - 1;
        const int kv_len = unit.item.kv_len;
        const int head = unit.head;
        const int* const table =
            args.block_tables + static_cast<long long>(unit.item.sequence) * args.table_stride;
        // Past the sequence, where the block table ends, an invalid block: its rows become zero.
        const auto block_of = [&](int tile) {
            const int index = tile * pages + page;
            const bool valid = page < pages && tile >= begin && index << args.block_shift < kv_len;
            return valid ? __ldg(table + index) : -1;
        };
        int next = block_of(last);
        for (int tile = last; tile >= begin; --tile) {
            const int block = next;
            next = block_of(tile - 1);
            const unsigned barrier = stage.of(full);
            unsigned char* const target = tiles + stage.index * S::TILE_BYTES;
            // For the block in which the sequence ends.
            const int rows = kv_len - ((tile * pages + page) << args.block_shift);
            const bool partial = VALUES && page < pages && 0 < rows && rows < block_size;
            const unsigned partials = VALUES ? __ballot_sync(FULL_WARP, partial) : 0;
            hopper::barrier_wait(stage.of(empty), stage.parity ^ 1);
            if (page == 0)
                hopper::expect_tx(barrier, S::TILE_BYTES - (partials != 0 ? block_bytes : 0));
            __syncwarp();
            if (page < pages && !partial)
                hopper::tma_load(ptx::shared_address(target) + page * block_bytes, map,
                                 head * (S::HEAD_DIM / 64), block, barrier);
            if (partials != 0) {
                const int lane = __ffs(partials) - 1;
                copy_partial<S>(target + lane * block_bytes,
                                args.v_cache +
                                    __shfl_sync(FULL_WARP, block, lane) * args.block_stride +
                                    head * S::HEAD_DIM,
                                args.num_kv_heads * S::HEAD_DIM,
                                __shfl_sync(FULL_WARP, rows, lane), block_size);
                hopper::fence_async_proxy();
            }
            __syncwarp();
            if (page == 0) hopper::arrive(barrier);
            stage.advance();
        }
    }
}

}  // namespace attention
