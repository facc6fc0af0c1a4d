// Iteration over a share: the position of a block, or of one of its warps, and the copies that run
// ahead of it. Units and shares are defined in attention_units.cuh.
#pragma once

#include "attention/attention_tile.cuh"
#include "attention/attention_units.cuh"
#include "common.cuh"

namespace attention {

// Position of a block, or of one of its warps, in its share.
template <class S>
struct WorkIterator {
    const Item* items;
    Unit unit;
    int k;     // of the unit's item
    int left;  // tiles of the share after those of the unit

    __device__ __forceinline__ void begin(const Arguments<typename S::Element>& args,
                                          const Item* all, const Share& share) {
        items = all;
        k = share.item;
        unit.item = share.first;
        const int inside = share.begin - unit.item.first_tile;
        unit.head = inside / unit.item.kv_tiles;
        unit.from = inside - unit.head * unit.item.kv_tiles;
        left = share.end - share.begin;
        enter(args);
    }
    __device__ __forceinline__ void next(const Arguments<typename S::Element>& args) {
        unit.from = 0;
        if (++unit.head == args.num_kv_heads / S::HEADS) {
            unit.head = 0;
            unit.item = load_l2(items + ++k);
        }
        enter(args);
    }

   private:
    __device__ __forceinline__ void enter(const Arguments<typename S::Element>& args) {
        unit.to = min(unit.item.kv_tiles, unit.from + left);
        left -= unit.to - unit.from;
        unit.num_rows = min(S::ROWS, unit.item.query_len * args.group - unit.item.first_row);
    }
};

// Copies a warp's part of a tile of keys and values to a stage; see `load_tile`.
template <class S>
struct CopyKeysAndValues {
    using T = typename S::Element;
    __device__ __forceinline__ static void load(T* tiles, const Arguments<T>& args, int kv_head,
                                                int kv_end, int stage, int tile, int page,
                                                int from, int upto) {
        load_tile<S>(tiles + 2 * stage * S::TILE, args, kv_head, kv_end, tile, page, from, upto);
    }
};

// Issues the copies of tiles ahead of the consumers. If it CROSSES_UNITS it does not stop at the
// end of a unit, so that the next unit's keys are copied while the sums are written.
template <class S, bool ROTATES, class Copy = CopyKeysAndValues<S>>
struct TileProducer {
    using T = typename S::Element;
    static constexpr bool CROSSES_UNITS = S::CROSSES_UNITS && !ROTATES;

    WorkIterator<S> work;
    int tile, end;  // next tile to copy, and end of the unit
    int kv_end;     // end of the cached keys of this unit
    Pages<S> pages;

    // Starts at the first tile of a unit.
    __device__ __forceinline__ void begin(const Arguments<T>& args, const WorkIterator<S>& at) {
        work = at;
        enter();
        find(args);
    }
    __device__ __forceinline__ bool has_more() const { return tile < end; }
    __device__ __forceinline__ void load(T* tiles, const Arguments<T>& args, int stage, int which,
                                         int from, int upto) const {
        Copy::load(tiles, args, S::kv_head(work.unit), kv_end, stage, which, pages.of(which), from,
                   upto);
    }
    __device__ __forceinline__ void next(const Arguments<T>& args) {
        const int k = work.k;
        if (++tile == end && CROSSES_UNITS && work.left > 0) {
            work.next(args);
            enter();
        }
        if (has_more() && (work.k != k || !pages.knows(tile))) find(args);
    }

   private:
    __device__ __forceinline__ void enter() {
        const Item& item = work.unit.item;
        tile = item.kv_begin + work.unit.from;
        end = item.kv_begin + work.unit.to;
        kv_end = ROTATES ? item.kv_len - item.query_len : item.kv_len;
    }
    __device__ __forceinline__ void find(const Arguments<T>& args) {
        pages.find(args.block_tables +
                       static_cast<long long>(work.unit.item.sequence) * args.table_stride,
                   args.block_shift, kv_end, tile);
    }
};

}  // namespace attention
