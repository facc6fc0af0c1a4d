// Operands of routing and of the experts' products.
#pragma once

// Rows of one expert that are multiplied at once.
struct Tile {
    int expert, first, count, unused;
};

// Where the plan is kept. starts[b * num_experts + e]: the first row of expert e with a token of
// block b; while the plan is made, their number.
struct Plan {
    Tile* tiles;
    int* num_tiles;
    int* starts;
    int tile;  // rows of a tile, at most
};
