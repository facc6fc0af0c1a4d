// Prefixes that sequences of a step share: what `plan` finds and the kernels execute (cascade
// inference, https://flashinfer.ai/2024/02/02/cascade-inference.html).
//
// Sequences whose block tables begin with the same blocks have the same first keys. Each of these
// is read once for the queries of many sequences, which are the rows of a unit; the keys after them
// are read by units of each sequence, as without a prefix, which begin later.
//
//   member  a sequence with a prefix, and one token in the step
//   prefix unit   PREFIX_ROWS rows: those of as many members as fit x one KV head
//   piece   consecutive tiles of PREFIX_KEYS keys of a prefix unit, the work of one block
//
// The partial sums of a member and KV head are those of its pieces, and those of its own unit. The
// last of these blocks to arrive merges them, in this order.
#pragma once

namespace attention {

constexpr int PREFIX_ROWS = 64;
constexpr int PREFIX_KEYS = 64;
constexpr int MAX_PREFIXES = 4;

struct alignas(16) Prefix {
    int sequence;      // one of its members, whose block table has the keys
    int first_member;  // its place among all members; the others follow
    int num_members;
    int tiles;
    int pieces;       // of a unit
    int piece_tiles;  // of all but the last piece of a unit
    int first_piece;  // those of a unit follow each other, as do those of KV heads
    int end_piece;    // that of the next prefix; the last one that is not null
};

// Of each sequence of the step.
struct alignas(16) Member {
    int place;        // among all members
    int row;          // of its first query head in its unit
    int first_piece;  // of its unit with KV head 0
    int pieces;       // of a unit; 0 for a sequence without a prefix
};

// Memory of the prefixes of a step.
//
//   prefixes [MAX_PREFIXES], members [n]   from `plan`
//   tokens [members]   the row of q of each
//   arrived [members, G]   blocks whose sums are there; 0 between launches
//   sums [rows, D], states [rows]   partial sums, maxima and totals: of PREFIX_ROWS rows for each
//          piece, and from own_row on of H rows for the own keys of each member
struct PrefixMemory {
    const Prefix* prefixes;
    const Member* members;
    const int* tokens;
    int* arrived;
    float* sums;
    float2* states;
    int own_row;
};

}  // namespace attention
