// Operands of routing and of the experts' products.
#pragma once

// Rows of one expert that are multiplied at once.
struct Tile {
    int expert, first, count, unused;
};

// Where the plan is kept. starts[b * num_experts + e]: the first row of expert e with a token of block
// b; while the plan is made, their number.
struct Plan {
    Tile* tiles;
    int* num_tiles;
    int* starts;
    int tile;  // rows of a tile, at most
};

// How experts are chosen. Logits are the sums of `parts` products with `rows` columns each, the last
// one of which is the gate of the shared expert, if that has one; `stride` from a token to the next.
struct RouterParams {
    const float* bias;         // [num_experts], or null
    const float* select_bias;  // [num_experts], or null
    int num_experts, top_k, parts, rows, stride;
    int flags, num_groups, top_groups, shared_gate;
    float scale;
};
