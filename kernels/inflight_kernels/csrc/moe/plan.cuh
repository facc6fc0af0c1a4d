// Where the rows of experts begin in the plan of their products.
#pragma once

#include "common.cuh"
#include "moe/tile.cuh"

// Prefix sums over the experts, by one warp: from how many rows and tiles each expert has to its
// first ones. `padded`, a multiple of 32, is the number of experts rounded up; those beyond it have
// none. Returns the number of tiles.
__device__ inline int first_rows(int* rows_of, int* tiles_of, int padded) {
    const int lane = threadIdx.x % 32, each = padded / 32, first = lane * each;
    int own_rows = 0, own_tiles = 0;
    for (int e = first; e < first + each; e++) {
        own_rows += rows_of[e];
        own_tiles += tiles_of[e];
    }
    int rows = own_rows, tiles = own_tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int more_rows = __shfl_up_sync(FULL_WARP, rows, distance);
        const int more_tiles = __shfl_up_sync(FULL_WARP, tiles, distance);
        if (lane >= distance) {
            rows += more_rows;
            tiles += more_tiles;
        }
    }
    const int all_tiles = __shfl_sync(FULL_WARP, tiles, 31);
    rows -= own_rows;
    tiles -= own_tiles;
    for (int e = first; e < first + each; e++) {
        const int here = rows_of[e], tiles_here = tiles_of[e];
        rows_of[e] = rows;
        tiles_of[e] = tiles;
        rows += here;
        tiles += tiles_here;
    }
    return all_tiles;
}

// A tile of an expert with `total` rows from `first` on.
__device__ inline Tile tile_at(int expert, int first, int total, int index, int size) {
    return {expert, first + index * size, min(size, total - index * size), 0};
}
