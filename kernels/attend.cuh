// Attention of eight query rows over units of a cache, by one warp: packed blocks of 32 tokens and dense units of eight.
// Before this header: HEAD_DIM, WARPS.
//
// Scores are K q^T and outputs V^T p^T, so that keys and values are the wide operand of the tensor cores and the eight columns are the
// query rows that share a KV head. Masking a word gives codes as subnormal halfs, 2^-24 f code, with f = 2^(BITS place) the place of a
// code in its byte; tensor cores take them as they are. Places are tokens: f leaves again with a score, and comes in with a probability.
// `wqlab.layouts.fragments` says where each code lies.
#pragma once
#include "warp.cuh"

constexpr int TILES = HEAD_DIM / 16;
constexpr int BLOCK = 32;       // tokens of a packed unit
constexpr int DENSE_UNIT = 8;   // tokens of a dense unit
constexpr int ROW_BYTES = 2 * HEAD_DIM;         // a dense token
constexpr int META_BYTES = 4 * HEAD_DIM * 2;    // key scale, key minimum, value scale, value minimum
constexpr int ROWS = 8;         // query rows of a program
constexpr float LEEWAY = 8.0f;  // scores may pass `top` by this much (in powers of two) before sums are rescaled
// In front of codes probabilities are larger by 2^LIFT, so that those divided by an f stay normal halfs; sums over codes and all that
// joins them are then smaller by UNIT.
constexpr float LIFT = 6.0f, UNIT = 1.0f / (1 << 18);
constexpr float CODE = 1.0f / (1 << 24);

__host__ __device__ constexpr int code_bytes(int bits) { return 2 * BLOCK * HEAD_DIM * bits / 8; }
constexpr int DENSE_BYTES = 2 * DENSE_UNIT * ROW_BYTES;

struct Warp {
    int lane, g, t;
    Columns8 query[TILES];
    Tile out[TILES];        // rows: channels; columns: query rows
    float top[2], total[2]; // of query rows 2t and 2t + 1; top is a bound, at most LEEWAY below the true maximum
};

__device__ __forceinline__ void rescale(Warp& w, float first, float second) {
    w.total[0] *= first, w.total[1] *= second;
#pragma unroll
    for (int i = 0; i < TILES; ++i) w.out[i].c0 *= first, w.out[i].c2 *= first, w.out[i].c1 *= second, w.out[i].c3 *= second;
}

// Probabilities, as the operand of the second product. argument(octet, n, top) is the score of token 8 octet + g and query row 2t + n,
// times log2(e), less top.
template <int OCTETS, class Argument>
__device__ __forceinline__ void softmax_step(Warp& w, u32 (&probability)[OCTETS], float lift, Argument argument) {
    float x[OCTETS][2], most[OCTETS];
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) x[i][n] = argument(i, n, w.top[n] - lift);
        most[i] = fmaxf(x[i][0], x[i][1]);
    }
    if constexpr (OCTETS == 4) most[0] = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    if (any_lane(most[0] > LEEWAY + lift)) {
        float shrink[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float best = w.top[n];
#pragma unroll
            for (int i = 0; i < OCTETS; ++i) best = fmaxf(best, argument(i, n, 0.0f));
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) best = fmaxf(best, shuffle_xor(best, lanes));
            shrink[n] = exp2_fast(w.top[n] - best);
            w.top[n] = best;
#pragma unroll
            for (int i = 0; i < OCTETS; ++i) x[i][n] = argument(i, n, best - lift);
        }
        rescale(w, shrink[0], shrink[1]);
    }
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) probability[i] = transpose8(pack2(exp2_fast(x[i][0]), exp2_fast(x[i][1])));
}

// The codes at a place of all four bytes, those of even bytes or (a word shifted by 8) of odd ones.
template <int BITS, int PLACE>
__device__ __forceinline__ u32 field(u32 word) {
    return word & ((((1u << BITS) - 1u) << (BITS * PLACE)) * 0x00010001u);
}
template <int BITS, int PLACE>
__device__ __forceinline__ Rows16 key_rows(u32 word, u32 upper) {
    return {field<BITS, PLACE>(word), field<BITS, PLACE + 1>(word), field<BITS, PLACE>(upper), field<BITS, PLACE + 1>(upper)};
}
template <int BITS, int PLACE>
__device__ __forceinline__ Rows16 value_rows(u32 word, u32 upper) {
    return {field<BITS, PLACE>(word), field<BITS, PLACE>(upper), field<BITS, PLACE + 1>(word), field<BITS, PLACE + 1>(upper)};
}

// One block of 32 tokens and its window's metadata; bit i of seen(): whether the row has token i. While only packed units were seen, `out` and `total` count
// in UNIT; `leave_codes` ends that.
template <int BITS, class Seen>
__device__ __forceinline__ void packed_unit(Warp& w, const unsigned char* codes, const unsigned char* meta, Seen seen_tokens, float scaling) {
    constexpr int PER_TILE = BITS / 2;                  // words of a lane in a channel tile
    constexpr int CHUNK = 4 / PER_TILE;                 // channel tiles in four words
    constexpr float F[4] = {1, 1.0f / (1 << BITS), BITS == 4 ? 1 : 1.0f / 16, BITS == 4 ? 1.0f / 16 : 1.0f / 64};  // 1 / f of an octet
    const uint4* lane_codes = reinterpret_cast<const uint4*>(codes) + w.lane;

    // Keys. Rows g and g + 8 of the minima's tiles are two tiles of channels, so each product has one half that means something.
    Tile score[2] = {}, even = {}, odd = {};
#pragma unroll
    for (int chunk = 0; chunk < TILES / CHUNK; ++chunk) {
        const uint4 four = load_shared16(lane_codes + 32 * chunk);
        const u32 word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int pair = 0; pair < CHUNK / 2; ++pair) {
            const int i = CHUNK * chunk + 2 * pair;
            const uint4 scale = load_shared16(meta + (2 * i + w.t) * 16);
            const uint4 minimum = load_shared16(meta + 2 * HEAD_DIM + (2 * i + w.t) * 16);
            const Columns8 scaled[2] = {{multiply2(w.query[i].b0, scale.x), multiply2(w.query[i].b1, scale.z)},
                                        {multiply2(w.query[i + 1].b0, scale.y), multiply2(w.query[i + 1].b1, scale.w)}};
            const Rows16 minima = {minimum.x, minimum.y, minimum.z, minimum.w};
#pragma unroll
            for (int k = 0; k < 2; ++k) {  // three sums in turn, because one has to wait for itself
                const u32* x = word + (2 * pair + k) * PER_TILE;
                multiply_add_in_order(score[0], key_rows<BITS, 0>(x[0], x[0] >> 8), scaled[k]);
                if constexpr (BITS == 4) {
                    multiply_add_in_order(score[1], key_rows<BITS, 0>(x[1], x[1] >> 8), scaled[k]);
                } else {
                    multiply_add_in_order(score[1], key_rows<BITS, 2>(x[0], x[0] >> 8), scaled[k]);
                }
                multiply_add_in_order(k ? odd : even, minima, w.query[i + k]);
            }
        }
    }
    const u32 seen = seen_tokens();
    if (seen != 0xFFFFFFFFu) {
        const u32 own = seen >> w.g;
        const float hidden = scaling > 0 ? minus_infinity() : -minus_infinity();
        if (!(own & 0x1)) score[0].c0 = score[0].c1 = hidden;
        if (!(own & 0x100)) score[0].c2 = score[0].c3 = hidden;
        if (!(own & 0x10000)) score[1].c0 = score[1].c1 = hidden;
        if (!(own & 0x1000000)) score[1].c2 = score[1].c3 = hidden;
    }
    const float raw[4][2] = {{score[0].c0, score[0].c1}, {score[0].c2, score[0].c3}, {score[1].c0, score[1].c1}, {score[1].c2, score[1].c3}};
    const float offset[2] = {(even.c0 + odd.c2) * scaling, (even.c1 + odd.c3) * scaling}, per_code = scaling / CODE;
    u32 probability[4];
    softmax_step(w, probability, LIFT, [&](int i, int n, float top) { return fmaf(raw[i][n], per_code * F[i], offset[n] - top); });
    constexpr u32 HALF_F[4] = {0, BITS == 4 ? 0x2C002C00 : 0x34003400, 0x2C002C00, BITS == 4 ? 0x2C002C00 : 0x24002400};
    probability[1] = multiply2(probability[1], HALF_F[1]);
    if constexpr (BITS == 2) probability[2] = multiply2(probability[2], HALF_F[2]);
    probability[3] = multiply2(probability[3], HALF_F[3]);
    const Columns8 first = {probability[0], probability[1]}, second = {probability[2], probability[3]};

    // Values. Codes of one give the sum of the probabilities, which the minimum needs.
    constexpr u32 ONE = 0x00010001;
    Tile ones = {};
    multiply_add(ones, {ONE, ONE, ONE << BITS, ONE << BITS}, first);
    if constexpr (BITS == 4) {
        multiply_add(ones, {ONE, ONE, ONE << 4, ONE << 4}, second);
    } else {
        multiply_add(ones, {ONE << 4, ONE << 4, ONE << 6, ONE << 6}, second);
    }
    w.total[0] += ones.c0, w.total[1] += ones.c1;
    lane_codes += 32 * (TILES / CHUNK);
    meta += 4 * HEAD_DIM + w.g * 16;
#pragma unroll
    for (int chunk = 0; chunk < TILES / CHUNK; ++chunk) {
        const uint4 four = load_shared16(lane_codes + 32 * chunk);
        const u32 word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int k = 0; k < CHUNK; ++k) {
            const int i = CHUNK * chunk + k;
            const u32* x = word + k * PER_TILE;
            Tile sums = {};
            multiply_add(sums, value_rows<BITS, 0>(x[0], x[0] >> 8), first);
            if constexpr (BITS == 4) {
                multiply_add(sums, value_rows<BITS, 0>(x[1], x[1] >> 8), second);
            } else {
                multiply_add(sums, value_rows<BITS, 2>(x[0], x[0] >> 8), second);
            }
            const unsigned char* at = meta + i / 4 * 128 + i % 4 * 4;
            const u32 scale = *reinterpret_cast<const u32*>(at), minimum = *reinterpret_cast<const u32*>(at + 2 * HEAD_DIM);
            Tile& out = w.out[i];
            out.c0 = fmaf(low_float(scale), sums.c0, fmaf(low_float(minimum), ones.c0, out.c0));
            out.c1 = fmaf(low_float(scale), sums.c1, fmaf(low_float(minimum), ones.c1, out.c1));
            out.c2 = fmaf(high_float(scale), sums.c2, fmaf(high_float(minimum), ones.c0, out.c2));
            out.c3 = fmaf(high_float(scale), sums.c3, fmaf(high_float(minimum), ones.c1, out.c3));
        }
    }
}
__device__ __forceinline__ void leave_codes(Warp& w) { rescale(w, 1.0f / UNIT, 1.0f / UNIT); }

// Where 16 bytes of a dense row lie in shared memory: eight rows at one place of theirs are in different banks.
__device__ __forceinline__ int dense_place(int row, int chunk) { return row * ROW_BYTES + (chunk ^ row) * 16; }

// Tokens `token` to `token` + 7 of those before `last`; query row 2t + n sees those before newest[n]; `mask` is the row's, or null.
__device__ __forceinline__ void dense_unit(Warp& w, const unsigned char* slot, int token, int last, const int (&newest)[2],
                                           const unsigned char* mask, float scaling) {
    const int row = w.lane % 8, matrix = w.lane / 8;
    Tile even = {}, odd = {};
    {   // the order of matrices gives rows g one tile of channels and rows g + 8 the next
        const unsigned char* at[2] = {slot + dense_place(row, matrix % 2 * 2 + matrix / 2), slot + dense_place(row, 4 + matrix % 2 * 2 + matrix / 2)};
#pragma unroll
        for (int i = 0; i < TILES; i += 2) {
            const Rows16 key = load_matrices(at[i / 2 % 2] + i / 4 * 128);
            multiply_add(even, key, w.query[i]);
            multiply_add(odd, key, w.query[i + 1]);
        }
    }
    // What a row does not have may be anything, NaN too: such a score is replaced, such a value is cleared.
    const bool whole = !mask && token + DENSE_UNIT <= last;
    auto there = [&](int at) { return at < last && (!mask || mask[at]); };
    const float raw[2] = {even.c0 + odd.c2, even.c1 + odd.c3};
    const int own = token + w.g;
    const bool own_there = there(own);
    const bool seen[2] = {own_there && own < newest[0], own_there && own < newest[1]};
    u32 probability[1];
    softmax_step(w, probability, 0.0f, [&](int, int n, float top) { return seen[n] ? fmaf(raw[n], scaling, -top) : minus_infinity(); });
    constexpr u32 ONES = 0x3C003C00;
    Tile sum = {};
    multiply_add(sum, ONES, ONES, probability[0]);
    w.total[0] += sum.c0, w.total[1] += sum.c1;
    u32 keep = 0xFFFFFFFFu;
    if (!whole) keep = (there(token + 2 * w.t) ? 0xFFFFu : 0u) | (there(token + 2 * w.t + 1) ? 0xFFFF0000u : 0u);
    slot += DENSE_UNIT * ROW_BYTES;
    const unsigned char* at[2] = {slot + dense_place(row, matrix), slot + dense_place(row, 4 + matrix)};
#pragma unroll
    for (int i = 0; i < TILES; i += 2) {
        const Rows16 value = load_matrices_transposed(at[i / 2 % 2] + i / 4 * 128);
        multiply_add(w.out[i], value.a0 & keep, value.a1 & keep, probability[0]);
        multiply_add(w.out[i + 1], value.a2 & keep, value.a3 & keep, probability[0]);
    }
}

// Eight rows of halfs, as they lie after dense_place, as the second operand.
__device__ __forceinline__ void load_query(Warp& w, const unsigned char* rows) {
#pragma unroll
    for (int i = 0; i < TILES; i += 2) {
        const Rows16 x = load_matrices(rows + dense_place(w.lane % 8, 2 * i + w.lane / 8));
        w.query[i] = {x.a0, x.a1}, w.query[i + 1] = {x.a2, x.a3};
    }
}

// Copies of a unit from a lane's own place in global memory (its first 16 bytes) to its slot.
template <int BYTES>
__device__ __forceinline__ void copy_run(unsigned char* lane_slot, const unsigned char* from) {
#pragma unroll
    for (int at = 0; at < BYTES; at += 512) copy16(lane_slot + at, from + at);
}

// The sums of several warps or programs -> one. A thread takes CHANNELS channels of one query row.
constexpr int WIDTH = HEAD_DIM + 4;             // output, maximum, sum; two more keep rows at multiples of 16 bytes and in different banks
constexpr int ROW_THREADS = 32 * WARPS / ROWS;
constexpr int CHANNELS = HEAD_DIM / ROW_THREADS;
constexpr int MOST_SPLITS = 256;
static_assert(CHANNELS * ROW_THREADS == HEAD_DIM, "threads of a row share its channels");
constexpr int GATHERED_BYTES = 4 * (WARPS * ROWS * WIDTH > 2 * ROWS * MOST_SPLITS ? WARPS * ROWS * WIDTH : 2 * ROWS * MOST_SPLITS);

struct Merged {
    float value[CHANNELS], top, sum;
    __device__ __forceinline__ float output(int k) const { return sum > 0 ? value[k] / sum : 0; }  // a query that saw nothing gives 0
};

__device__ __forceinline__ int own_row() { return threadIdx.x / ROW_THREADS; }
__device__ __forceinline__ int own_channel() { return threadIdx.x % ROW_THREADS * CHANNELS; }  // the first of CHANNELS

// Writes the warps' sums to `gathered` (shared memory that no warp reads any more) and merges them; the query has `rows` rows.
__device__ __forceinline__ Merged merge_warps(const Warp& w, float* gathered, int warp, int rows) {
    sync_block();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        if (2 * w.t + n >= rows) continue;
        float* mine = gathered + (warp * ROWS + 2 * w.t + n) * WIDTH;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            mine[16 * i + w.g] = n ? w.out[i].c1 : w.out[i].c0;
            mine[16 * i + 8 + w.g] = n ? w.out[i].c3 : w.out[i].c2;
        }
        if (w.g == 0) mine[HEAD_DIM] = w.top[n], mine[HEAD_DIM + 1] = w.total[n];
    }
    sync_block();
    const float* parts = gathered + own_row() * WIDTH;
    Merged m = {{}, -1e30f, 0};
    if (own_row() >= rows) return m;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) m.top = fmaxf(m.top, parts[i * ROWS * WIDTH + HEAD_DIM]);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        const float* part = parts + i * ROWS * WIDTH;
        const float share = exp2_fast(part[HEAD_DIM] - m.top);
        m.sum = fmaf(share, part[HEAD_DIM + 1], m.sum);
#pragma unroll
        for (int k = 0; k < CHANNELS; ++k) m.value[k] = fmaf(share, part[own_channel() + k], m.value[k]);
    }
    return m;
}

// A program's part of `partial` [splits, ROWS, WIDTH].
__device__ __forceinline__ void write_part(const Merged& m, float* partial, int split, int rows) {
    if (own_row() >= rows) return;
    float* part = partial + ((long long)split * ROWS + own_row()) * WIDTH;
#pragma unroll
    for (int k = 0; k < CHANNELS; ++k) part[own_channel() + k] = m.value[k];
    if (own_channel() == 0) part[HEAD_DIM] = m.top, part[HEAD_DIM + 1] = m.sum;
}

// Merges what all programs wrote. All threads call it.
__device__ __forceinline__ Merged merge_parts(const float* partial, int splits, int rows, float* scratch) {
    const bool used = own_row() < rows;
    float* tops = scratch + own_row() * 2 * MOST_SPLITS;
    const float* parts = partial + own_row() * WIDTH;
    for (int i = threadIdx.x % ROW_THREADS; i < splits && used; i += ROW_THREADS) {
        float found[2];
        load_newest(found, parts + (long long)i * ROWS * WIDTH + HEAD_DIM);
        tops[i] = found[0], tops[MOST_SPLITS + i] = found[1];
    }
    sync_block();
    Merged m = {{}, -1e30f, 0};
    if (!used) return m;
    for (int i = 0; i < splits; ++i) m.top = fmaxf(m.top, tops[i]);
#pragma unroll 32 / CHANNELS
    for (int i = 0; i < splits; ++i) {
        const float share = exp2_fast(tops[i] - m.top);
        float part[CHANNELS];
        load_newest(part, parts + (long long)i * ROWS * WIDTH + own_channel());
        m.sum = fmaf(share, tops[MOST_SPLITS + i], m.sum);
#pragma unroll
        for (int k = 0; k < CHANNELS; ++k) m.value[k] = fmaf(share, part[k], m.value[k]);
    }
    return m;
}
