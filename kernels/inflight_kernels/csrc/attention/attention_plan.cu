// Planning of attention: splits a step's chunks into items and shares, on the device, so that a
// CUDA graph can be replayed with other lengths. Items and shares are defined in
// attention_units.cuh.
//
// Items are laid end to end and split into shares of equal length (Stream-K, arXiv:2301.03598), or
// at the ends of units if that costs little, or each unit into pieces of equal size.

#include "attention/attention_plan_block.cuh"
#include "attention/attention_prefix_search.cuh"
#include "attention/attention_units.cuh"
#include "common.cuh"

namespace attention {

// Sorts item_at(0), ..., item_at(count - 1) by descending length, stably: a counting sort by tiles.
// If the longest has more tiles than there are threads, nearly equal lengths count as equal.
template <class ItemAt>
__device__ __forceinline__ void sort_items(Item* items, int count, const ItemAt& item_at) {
    __shared__ int longest, places[PLAN_THREADS];
    const int thread = threadIdx.x;
    places[thread] = 0;
    if (thread == 0) longest = 0;
    __syncthreads();
#pragma unroll 1
    for (int k = thread; k < count; k += PLAN_THREADS) atomicMax(&longest, item_at(k).kv_tiles);
    __syncthreads();
    const int step = longest / PLAN_THREADS + 1;
    const auto rank = [&](const Item& item) { return (longest - item.kv_tiles) / step; };
#pragma unroll 1
    for (int k = thread; k < count; k += PLAN_THREADS) atomicAdd(places + rank(item_at(k)), 1);
    __syncthreads();
    const int number = places[thread];
    int total;
    places[thread] = scan<PLAN_THREADS>(number, total) - number;
#pragma unroll 1
    for (int base = 0; base < count; base += PLAN_THREADS) {
        const int k = base + thread;
        Item item;
        if (k < count) item = item_at(k);
        // One warp at a time, so that the order is deterministic.
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

// An item: rows of a chunk from first_row on, which has tokens `begin` to `end` of the step.
__device__ __forceinline__ Item item_of_rows(int sequence, int first_row, int begin, int end,
                                             int kv_len, int group, int unit_rows, int unit_keys,
                                             int window) {
    Item item;
    item.first_tile = 0;
    item.sequence = sequence;
    item.query_start = begin;
    item.query_len = end - begin;
    item.kv_len = kv_len;
    item.first_row = first_row;
    const int last_row = min(first_row + unit_rows, item.query_len * group) - 1;
    const int history = kv_len - item.query_len;
    const int lowest = history + first_row / group;
    const int highest = history + last_row / group;
    item.kv_begin = max(0, lowest - window + 1) / unit_keys;
    // A row without keys still has a tile, because it must be written.
    item.kv_tiles = max(1, highest / unit_keys + 1 - item.kv_begin);
    return item;
}

// A share that is a piece of `piece` tiles; `index` counts the pieces of the item's units.
__device__ __forceinline__ Share share_of_piece(const Item& item, int k, int index, int piece,
                                                int num_tiles, int prefix_pieces) {
    const int pieces = (item.kv_tiles + piece - 1) / piece;
    const int head = index / pieces, from = index % pieces * piece;
    const int unit = item.first_tile + head * item.kv_tiles;
    return {unit + from,
            unit + min(item.kv_tiles, from + piece),
            k,
            num_tiles,
            from / piece,
            pieces,
            prefix_pieces,
            0,
            item};
}

// Cost of a split to a block, in tiles: partial sums that go through memory.
constexpr int CUT_TILES = 6;
constexpr int NONE = 1 << 30;

// The smallest piece size, in tiles, for splitting all units into at most num_shares pieces. Each
// warp tries a size, from `even`, that of equal shares, to twice that.
__device__ __forceinline__ int piece_size(const Item* items, int num_items, int num_kv_heads,
                                          int even, int num_shares) {
    __shared__ int smallest;
    if (threadIdx.x == 0) smallest = NONE;
    __syncthreads();
    const int size = even + threadIdx.x / 32 * ((even + 31) / 32);
    int count = 0;
#pragma unroll 1
    for (int k = threadIdx.x % 32; k < num_items; k += 32)
        count += (items[k].kv_tiles + size - 1) / size;
    for (int distance = 16; distance > 0; distance /= 2)
        count += __shfl_xor_sync(0xffffffffu, count, distance);
    if (threadIdx.x % 32 == 0 && count * num_kv_heads <= num_shares) atomicMin(&smallest, size);
    __syncthreads();
    return smallest;
}

// The fewest heads that give each block twice the tiles of the longest unit, so that the queue,
// which restarts with long units for the last heads, ends with short ones for all blocks.
__device__ __forceinline__ int heads_at_once(int longest, int num_tiles, int num_kv_heads,
                                             int num_blocks) {
    const int turns = min(max(num_tiles / (2 * longest * num_blocks), 1), num_kv_heads);
    return (num_kv_heads + turns - 1) / turns;
}

// Estimate of the busiest block's tiles if blocks take whole units, longest first: those of the
// first block under round robin, minus half of its excess over greedy scheduling.
__device__ __forceinline__ int queue_time(const Item* items, int units, int num_kv_heads,
                                          int num_blocks) {
    int turns = 0;
#pragma unroll 1
    for (int base = 0; base < units; base += num_blocks * PLAN_THREADS) {
        const int unit = base + num_blocks * threadIdx.x;
        int total;
        scan<PLAN_THREADS>(unit < units ? items[unit / num_kv_heads].kv_tiles : 0, total);
        turns += total;
    }
    const int longest = units > 0 ? items[0].kv_tiles : 0;
    return max(longest, turns - longest / 2);
}

// Of `plan`, or of `plan_cascade` if it CASCADES.
template <bool CASCADES>
__device__ __forceinline__ void plan_step(const int* query_start, const int* seq_lens, int n,
                                          int group, int num_kv_heads, int unit_rows, int unit_keys,
                                          int window, int min_rows, int max_rows, int num_shares,
                                          int cut_tiles, int* first_item, Item* items,
                                          Share* shares, int* arrivals, Queue* queue, bool whole,
                                          int heads_per_unit, const PrefixSearch& search) {
    const int thread = threadIdx.x;
    // Offsets of the chunks, later of the items, if they are few enough for shared memory.
    __shared__ int begins[PLAN_THREADS];
    const bool few_chunks = n <= PLAN_THREADS;
    int prefix_pieces = 0;
    int* prefix_tiles = nullptr;
    if constexpr (CASCADES) {
        __shared__ int tiles[PLAN_THREADS];
        prefix_tiles = tiles;
        prefix_pieces = find_prefixes(search, query_start, seq_lens, n, group,
                                      num_kv_heads * heads_per_unit, num_shares, tiles);
    }
    int num_items = 0;
#pragma unroll 1
    for (int base = 0; base < n; base += PLAN_THREADS) {
        const int i = base + thread;
        const int rows = i < n ? (query_start[i + 1] - query_start[i]) * group : 0;
        const int count =
            rows > min_rows && rows <= max_rows ? (rows + unit_rows - 1) / unit_rows : 0;
        int total;
        const int upto = num_items + scan<PLAN_THREADS>(count, total);
        if (i < n) first_item[i] = upto - count;
        if (i < n && few_chunks) begins[i] = upto - count;
        num_items += total;
    }
    if (thread == 0) first_item[n] = num_items;
    __syncthreads();

    const auto item_at = [&](int k) {
        // Chunks without items have the same offset as the next one: the last of them has items.
        const int chunk =
            last_at_most(k, n, [&](int i) { return few_chunks ? begins[i] : first_item[i]; });
        Item item = item_of_rows(chunk, (k - first_item[chunk]) * unit_rows, query_start[chunk],
                                 query_start[chunk + 1], seq_lens[chunk], group, unit_rows,
                                 unit_keys, window);
        if (CASCADES && chunk < PLAN_THREADS) {
            const int end = item.kv_begin + item.kv_tiles;
            item.kv_begin = max(item.kv_begin, prefix_tiles[chunk] * PREFIX_KEYS / unit_keys);
            item.kv_tiles = max(1, end - item.kv_begin);
        }
        return item;
    };
    if (queue == nullptr) {
#pragma unroll 1
        for (int k = thread; k < num_items; k += PLAN_THREADS) items[k] = item_at(k);
    } else {
        sort_items(items, num_items, item_at);
    }
    __syncthreads();

    int num_tiles = 0;
#pragma unroll 1
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
    const bool few_items = num_items <= PLAN_THREADS;
    if (few_items && thread < num_items) begins[thread] = items[thread].first_tile;
    const int longest = block_max(few_items && thread < num_items ? items[thread].kv_tiles : 0);
    const auto item_of = [&](int tile) {
        return last_at_most(tile, num_items,
                            [&](int k) { return few_items ? begins[k] : items[k].first_tile; });
    };
    // Start of each share if shares end where units end.
    __shared__ int borders[PLAN_THREADS + 1];
    const bool few_shares = num_shares <= PLAN_THREADS;
    const auto find_border = [&](int share) {
        const int tile = share_begin(share, num_tiles, num_shares);
        if (tile >= num_tiles) return tile;
        const Item& item = items[item_of(tile)];
        const int inside = tile - item.first_tile + item.kv_tiles - 1;
        return item.first_tile + inside - inside % item.kv_tiles;
    };
    const auto find_borders = [&] {
#pragma unroll 1
        for (int share = thread; few_shares && share <= num_shares; share += PLAN_THREADS)
            borders[share] = find_border(share);
        __syncthreads();
    };
    const auto unit_border = [&](int share) {
        return few_shares ? borders[share] : find_border(share);
    };
#pragma unroll 1
    for (int share = thread; share < 4 * num_shares; share += PLAN_THREADS) arrivals[share] = 0;

    Share no_share = {};
    no_share.total = num_tiles;
    no_share.prefix_pieces = prefix_pieces;
    const int even = max(1, (num_tiles + num_shares - 1) / num_shares);
    const int tolerable = even + even / 16 + 2;
    bool at_units = whole;
    if (whole) find_borders();
    if (queue == nullptr && !whole && few_items) {
        if (num_items * num_kv_heads <= num_shares) {
            const int smallest = piece_size(items, num_items, num_kv_heads, even, num_shares);
            const bool uncut = longest <= (smallest == NONE ? even : smallest) + cut_tiles;
            const int piece = uncut ? longest : smallest;
            if (uncut || piece <= tolerable) {
                const int pieces =
                    thread < num_items ? (items[thread].kv_tiles + piece - 1) / piece : 0;
                int total;
                const int upto = scan<PLAN_THREADS>(pieces * num_kv_heads, total);
                if (thread < num_items) begins[thread] = upto - pieces * num_kv_heads;
                __syncthreads();
#pragma unroll 1
                for (int share = thread; share < num_shares; share += PLAN_THREADS) {
                    shares[share] = no_share;
                    if (share >= total) continue;
                    const int k = item_of(share);
                    shares[share] = share_of_piece(items[k], k, share - begins[k], piece, num_tiles,
                                                   prefix_pieces);
                }
                return;
            }
        } else {
            int largest = 0;
            find_borders();
#pragma unroll 1
            for (int share = thread; share < num_shares; share += PLAN_THREADS)
                largest = max(largest, unit_border(share + 1) - unit_border(share));
            at_units = block_max(largest) <= tolerable;
        }
    }
#pragma unroll 1
    for (int share = thread; share < num_shares; share += PLAN_THREADS) {
        const int begin = at_units ? unit_border(share) : share_begin(share, num_tiles, num_shares);
        const int end =
            at_units ? unit_border(share + 1) : share_begin(share + 1, num_tiles, num_shares);
        shares[share] = no_share;
        if (begin == end) continue;
        const int k = item_of(begin);
        shares[share] = {begin, end, k, num_tiles, 0, 0, prefix_pieces, 0, items[k]};
    }
}

}  // namespace attention

using attention::PLAN_THREADS;

// Splits the step's chunks into items and shares. Handles only chunks with more than min_rows and
// at most max_rows rows, so that short and long chunks can have different kernels. One block of
// PLAN_THREADS threads.
//
//   query_start [n + 1], seq_lens [n]   as of `attend`; n chunks
//   cut_tiles                           cost of a cut to a unit with few tiles, in tiles
//   first_item [n + 1]                  scratch
//   items [capacity]                    at least n + rows / unit_rows
//   shares [num_shares], arrivals [4 * num_shares]   arrivals become 0
//   queue   for a kernel that can process whole units; items are then sorted by descending length.
//           May be null.
//   whole   shares end where units end, so that results do not depend on the rest of the step
//   history_ready   of query_start and seq_lens; nothing reads the memory for this plan any more
extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1)
    plan(const int* query_start, const int* seq_lens, int n, int group, int num_kv_heads,
         int unit_rows, int unit_keys, int window, int min_rows, int max_rows, int num_shares,
         int cut_tiles, int* first_item, attention::Item* items, attention::Share* shares,
         int* arrivals, attention::Queue* queue, bool whole, bool history_ready) {
    if (!history_ready) pdl_wait();
    pdl_launch_dependents();
    attention::plan_step<false>(query_start, seq_lens, n, group, num_kv_heads, unit_rows, unit_keys,
                                window, min_rows, max_rows, num_shares, cut_tiles, first_item,
                                items, shares, arrivals, queue, whole, 1, {});
    pdl_wait();  // what waits for this kernel waits for the preceding ones as well
}

// The same for a step of one chunk, if it has up to MAX_ITEMS items and num_shares is at least 16
// times the number of its units: these are always cut into pieces then. `plan` has many more
// instructions, which are fetched anew in each step, and barriers. For any number of whole warps.
template <int MAX_ITEMS>
__global__ void plan_single(const int* query_start, const int* seq_lens, int group,
                            int num_kv_heads, int unit_rows, int unit_keys, int window,
                            int min_rows, int max_rows, int num_shares, int cut_tiles,
                            int* first_item, attention::Item* items, attention::Share* shares,
                            int* arrivals, bool history_ready) {
    using namespace attention;
    if (!history_ready) pdl_wait();
    pdl_launch_dependents();
    const int begin = query_start[0], end = query_start[1], rows = (end - begin) * group;
    const bool has_items = rows > min_rows && rows <= max_rows;
    const int num_items = has_items ? (rows + unit_rows - 1) / unit_rows : 0;
    Item found[MAX_ITEMS];
    int num_tiles = 0, longest = 0;
#pragma unroll
    for (int k = 0; k < MAX_ITEMS; ++k) {
        if (k >= num_items) break;
        found[k] = item_of_rows(0, k * unit_rows, begin, end, seq_lens[0], group, unit_rows,
                                unit_keys, window);
        found[k].first_tile = num_tiles;
        num_tiles += found[k].kv_tiles * num_kv_heads;
        longest = max(longest, found[k].kv_tiles);
    }
    // Pieces of a size, of all items' units of one head.
    const auto count_of = [&](int size) {
        int count = 0;
#pragma unroll
        for (int k = 0; k < MAX_ITEMS; ++k)
            if (k < num_items) count += (found[k].kv_tiles + size - 1) / size;
        return count;
    };
    const int even = max(1, (num_tiles + num_shares - 1) / num_shares);
    // As piece_size does, by the lanes of a warp.
    const int size = even + threadIdx.x % 32 * ((even + 31) / 32);
    const unsigned fitting = __ballot_sync(FULL_WARP, count_of(size) * num_kv_heads <= num_shares);
    const int smallest = __shfl_sync(FULL_WARP, size, __ffs(fitting) - 1);
    const bool uncut = longest <= smallest + cut_tiles;
    const int piece = uncut ? longest : smallest;
    for (int share = threadIdx.x; share < num_shares; share += blockDim.x) {
        Share own = {};
        own.total = num_tiles;
        int first = 0;  // piece of item k
#pragma unroll
        for (int k = 0; k < MAX_ITEMS; ++k) {
            if (k >= num_items) break;
            const int count = (found[k].kv_tiles + piece - 1) / piece * num_kv_heads;
            if (share >= first && share < first + count)
                own = share_of_piece(found[k], k, share - first, piece, num_tiles, 0);
            first += count;
        }
        shares[share] = own;
    }
    for (int i = threadIdx.x; i < 4 * num_shares; i += blockDim.x) arrivals[i] = 0;
    pdl_wait();  // as in `plan`
    if (threadIdx.x > 0) return;
    first_item[0] = 0;
    first_item[1] = num_items;
#pragma unroll
    for (int k = 0; k < MAX_ITEMS; ++k)
        if (k < num_items) items[k] = found[k];
}

// The same as `plan` for `attend_cascade` and `attend_heads_cascade`: a prefix that chunks of one
// token share is not among their items, if enough keys need not be read (attention_prefixes.cuh).
// There is no window, and group is at most PREFIX_ROWS.
//
//   heads_per_unit   KV heads, of units that are not of a prefix
//   block_tables [n, table_stride]
//   the other arguments   of PrefixSearch
extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1)
    plan_cascade(const int* query_start, const int* seq_lens, int n, int group, int num_kv_heads,
                 int unit_rows, int unit_keys, int window, int min_rows, int max_rows,
                 int num_shares, int cut_tiles, int* first_item, attention::Item* items,
                 attention::Share* shares, int* arrivals, attention::Queue* queue,
                 int heads_per_unit, const int* block_tables, int table_stride, int block_shift,
                 int min_tiles, int min_saved, int max_pieces, attention::Prefix* prefixes,
                 attention::Member* members, int* tokens, int* arrived) {
    pdl_wait();
    pdl_launch_dependents();
    attention::plan_step<true>(query_start, seq_lens, n, group, num_kv_heads, unit_rows, unit_keys,
                               window, min_rows, max_rows, num_shares, cut_tiles, first_item, items,
                               shares, arrivals, queue, false, heads_per_unit,
                               {block_tables, table_stride, block_shift, min_tiles, min_saved,
                                max_pieces, prefixes, members, tokens, arrived});
}

// Lists the blocks that attention_dequantize.cu fills, with the keys of each chunk of more than
// min_rows rows in consecutive ones, from the first tile of keys on that a row attends to. One block
// of PLAN_THREADS threads.
//
//   query_start [n + 1], seq_lens [n], unit_keys, window, min_rows   as of `plan`
//   tables [n, table_stride]   block tables of the filled blocks; entries of other keys are not
//                              written
//   sources [num_blocks], num_sources [1]   there must be enough blocks: further ones are left out
extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1)
    plan_dequantization(const int* query_start, const int* seq_lens, int n, int group,
                        int unit_keys, int window, int min_rows, int num_blocks, int* tables,
                        int table_stride, attention::Source* sources, int* num_sources) {
    using namespace attention;
    __shared__ int begins[PLAN_THREADS], firsts[PLAN_THREADS];
    pdl_wait();
    pdl_launch_dependents();
    const int thread = threadIdx.x;
    int filled = 0;
#pragma unroll 1
    for (int base = 0; base < n; base += PLAN_THREADS) {
        const int i = base + thread;
        int first = 0, count = 0;
        if (i < n) {
            const int query_len = query_start[i + 1] - query_start[i], kv_len = seq_lens[i];
            const int lowest = max(0, kv_len - query_len - window + 1);
            first = lowest / unit_keys * unit_keys / DEQUANTIZED_BLOCK;
            if (query_len * group > min_rows)
                count = (kv_len + DEQUANTIZED_BLOCK - 1) / DEQUANTIZED_BLOCK - first;
        }
        int total;
        begins[thread] = scan<PLAN_THREADS>(count, total) - count;
        firsts[thread] = first;
        __syncthreads();
#pragma unroll 1
        for (int k = thread; k < min(total, num_blocks - filled); k += PLAN_THREADS) {
            // Chunks without blocks begin where the next one does: the last of them has blocks.
            const int chunk =
                last_at_most(k, min(PLAN_THREADS, n - base), [&](int i) { return begins[i]; });
            const int block = firsts[chunk] + k - begins[chunk];
            sources[filled + k] = {base + chunk, block * DEQUANTIZED_BLOCK};
            tables[static_cast<long long>(base + chunk) * table_stride + block] = filled + k;
        }
        filled = min(filled + total, num_blocks);
        __syncthreads();
    }
    if (thread == 0) *num_sources = filled;
}
