// Attention's second step: sums of weighted values. A row's sum runs over its own visible slots in an order that their
// positions decide (others add an exact zero).

#include "attention.h"

// Without tiles `JOINED` neighbouring slots are weighed at once, with the same sums as one after the other: a dot
// product adds the upper halves first and rounds in between, so these are the earlier slot's value and weight.
#if JOINED == 2
typedef ivec value;
typedef int32_t weight;

static inline ivec numbers_of(const bf16 *x) { return (ivec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)x)); }

static inline value value_of(const bf16 *first, const bf16 *last) { return numbers_of(first) << 16 | numbers_of(last); }

static inline vec weigh(vec sum, value side, weight both) { return dot(sum, side, both); }

static inline float4 add_weights(float4 total, const weight *weights) {
    quad both;
    memcpy(&both, weights, sizeof both);
    return total + (float4)(both & ~0xffff) + (float4)(both << 16);
}

#else
typedef vec value;
typedef float weight;

static inline value value_of(const bf16 *first, const bf16 *last) { return widen(first); }

static inline vec weigh(vec sum, value side, weight one) { return sum + side * one; }

static inline float4 add_weights(float4 total, const weight *weights) {
    float4 some;
    memcpy(&some, weights, sizeof some);
    return total + some;
}
#endif

// Adds `count` weighted values, the next ones of a stream, to the sums of `width` lanes, `columns` vectors of each, and
// their weights to `all`.
INLINE void gather_some(const bf16 *values, const weight *weights, int64_t count, int64_t dim, int64_t pace,
                        vec sums[][COLUMNS], float4 *all, const int width, const int columns, Stream *stream,
                        int64_t bytes) {
    vec mine[AT_ONCE][COLUMNS];
    value side[COLUMNS];
    float4 total[AT_ONCE / 4];
    memcpy(mine, sums, width * sizeof *mine), memcpy(total, all, width / 4 * sizeof *total);
    for (int64_t s = 0; s < count; s += JOINED, values += JOINED * dim, weights += pace) {
        const bf16 *last = values + (s + JOINED > count ? 0 : JOINED - 1) * dim;  // a missing slot weighs nothing
        if (bytes) ask(stream, JOINED, dim * sizeof *values, bytes);
        for (int c = 0; c < columns; c++) side[c] = value_of(values + c * LANES, last + c * LANES);
        for (int k = 0; k < width; k++)
            for (int c = 0; c < columns; c++) mine[k][c] = weigh(mine[k][c], side[c], weights[k]);
        for (int k = 0; k < width; k += 4) total[k / 4] = add_weights(total[k / 4], weights + k);
    }
    memcpy(sums, mine, width * sizeof *mine), memcpy(all, total, width / 4 * sizeof *total);
}

// The same for a group of vectors and all lanes of a block. Registers hold the sums of AT_ONCE lanes, or of half as
// many with COLUMNS vectors each.
INLINE void gather_group(const Block *block, const bf16 *values, const weight *weights, int64_t count, int64_t dim,
                         vec sums[][COLUMNS], float4 *all, const int columns, Stream *stream, int64_t bytes) {
    const int step = columns == COLUMNS ? AT_ONCE / 2 : AT_ONCE;
    Stream again = *stream;
    for (int64_t l = 0; l < block->lanes; l += step) {
        int64_t asked = NARROW && l ? 0 : bytes;
        if (asked) *stream = again;
        if (step < AT_ONCE || block->lanes - l <= AT_ONCE / 2)
            gather_some(values, weights + l, count, dim, block->pace, sums + l, all + l / 4, AT_ONCE / 2, columns, stream,
                        asked);
        else
            gather_some(values, weights + l, count, dim, block->pace, sums + l, all + l / 4, AT_ONCE, columns, stream,
                        asked);
    }
}

// Sums of `wide` numbers of values, from d on, for each lane of a block, and of its weights. In ranges, so that values
// are fetched once for all lanes and groups. `then` will be read next.
INLINE void gather_ranges(const Call *call, const Block *block, int64_t d, int64_t wide, const int columns,
                          const bf16 *then, vec sums[][QUERIES][COLUMNS], float4 all[][QUERIES / 4]) {
    int64_t dim = call->dim;
    const bf16 *values = values_of(call, block) + d;
    Stream stream = stream_of(values, (block->stop - block->first) * dim, then);
    for (int64_t range = 0; range < block->ranges; range++, values += RANGE * dim) {
        const weight *weights = (const weight *)(block->scores + range * RANGE * block->pace);
        for (int64_t c = 0, g = 0; c < wide; c += columns * LANES, g++)
            gather_group(block, values + c, weights, slots_of(block, range), dim, sums[g], all[g], columns, &stream,
                         c ? 0 : wide * (int64_t)sizeof *values);
    }
}

// The weights [pace, STRIP] of a block on tiles, of the strip that has the slot at `slot` after the first one.
static inline const bf16 *strip_at(const Block *block, int64_t slot) {
    int64_t range = slot / RANGE, strip = slot % RANGE / STRIP;
    return (const bf16 *)(block->scores + (range * RANGE + strip * LANES) * block->pace);
}

// Values of two slots side by side, `columns` vectors of STRIP slots: what a tile multiplies.
#ifdef DOTS
INLINE void lay_values(const bf16 *values, int64_t dim, ivec pairs[][LANES], const int columns) {
    for (int k = 0; k < LANES; k++, values += 2 * dim)
        for (int c = 0; c < columns; c += 2) {
            __m512i even = _mm512_loadu_si512(values + c * LANES), odd = _mm512_loadu_si512(values + dim + c * LANES);
            pairs[c][k] = (ivec)_mm512_unpacklo_epi16(even, odd), pairs[c + 1][k] = (ivec)_mm512_unpackhi_epi16(even, odd);
        }
}

// Sorts two columns of sums by their values' order: of every eight numbers one has the first four, the other the last
// four.
static inline void sort_columns(vec *sums) {
    const __m512i first = (__m512i)(ivec){0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const __m512i last = (__m512i)((ivec)first + 8);
    __m512 one = (__m512)sums[0], other = (__m512)sums[1];
    sums[0] = (vec)_mm512_permutex2var_ps(one, first, other), sums[1] = (vec)_mm512_permutex2var_ps(one, last, other);
}
#else
INLINE void lay_values(const bf16 *values, int64_t dim, ivec pairs[][LANES], const int columns) {
    for (int k = 0; k < LANES; k++, values += 2 * dim)
        for (int c = 0; c < columns; c++)
            for (int l = 0; l < LANES; l++) {
                const uint32_t even = values[c * LANES + l], odd = values[dim + c * LANES + l];
                pairs[c][k][l] = (int32_t)(even | odd << 16);
            }
}

static inline void sort_columns(vec *sums) {}
#endif

// Whether slots after the context are in another order than positions.
static inline int branches(const Part *part) { return part->visible && !part->whole; }

// The sums of `gather_ranges`, on tiles. Of every STRIP positions these sum even ones and odd ones apart, and then
// both. In a tree slots are not positions: from the strip on in which the context ends, `gather_tree` sums instead.
INLINE void gather_strips(const Call *call, const Block *block, int64_t d, const int columns, const bf16 *then,
                          vec sums[][COLUMNS], float *all) {
    const Part *part = block->part;
    int64_t dim = call->dim, seen = block->stop - block->first, stop = seen;
    if (branches(part)) stop = part->context / STRIP * STRIP - block->first;
    const bf16 *values = values_of(call, block) + d;
    ivec pairs[COLUMNS][LANES];
    Stream stream = stream_of(values, seen * dim, then);
    shape_tiles_of_values(block->pace);
    for (int64_t s = 0; s < stop; s += STRIP, values += STRIP * dim) {
        if (stop - s < STRIP) {  // a missing slot weighs nothing, but must be a number
            bf16 rest[STRIP * COLUMNS * LANES] = {0};
            for (int64_t k = 0; k < stop - s; k++)
                memcpy(rest + k * columns * LANES, values + k * dim, columns * LANES * sizeof *rest);
            lay_values(rest, columns * LANES, pairs, columns);
        } else {
            ask(&stream, STRIP, dim * sizeof *values, columns * LANES * sizeof *values);
            lay_values(values, dim, pairs, columns);
        }
        weigh_tiles(strip_at(block, s), pairs, columns);
    }
    store_tiles_of_values(sums, all, block->pace, columns);
    leave_tiles();
    for (int64_t l = 0; l < block->lanes; l++)
        for (int c = 0; c < columns; c += 2) sort_columns(sums[l] + c);
}

// The slots of a row's own path, one for each position from `from` on. Returns how many.
static int64_t path_of(const Part *part, int64_t row, int64_t from, int32_t *slots) {
    int64_t count = 0;
    for (int64_t slot = from; slot < part->context; slot++) slots[count++] = (int32_t)slot;
    for (int64_t m = 0; m <= row; m++)
        if (part->visible[row * part->rows + m] && part->context + part->depth[m] >= from)
            slots[count++] = (int32_t)(part->context + m);
    return count;
}

// A slot of a row's path: where the weights of the row's lanes are, and its values.
typedef struct {
    const bf16 *weights;  // [lanes, STRIP]
    vec values[COLUMNS];
} Step;

// Adds every other one of some steps to a lane's sums.
INLINE void gather_steps(const Step *steps, int64_t count, int64_t lane, const int columns, vec *sums, float *all) {
    for (int64_t i = 0; i < count; i += 2) {
        float weight = up(steps[i].weights[lane * STRIP]);
        for (int c = 0; c < columns; c++) sums[c] += weight * steps[i].values[c];
        *all += weight;
    }
}

// Adds up to STRIP positions of their row's path to the sums of some lanes, as tiles would: even ones and odd ones
// apart.
INLINE void gather_path(const Call *call, const Block *block, int64_t d, const int columns, const int32_t *slots,
                        int64_t count, int64_t lane, int64_t lanes, vec sums[][COLUMNS], float *all) {
    const bf16 *values = values_of(call, block) + d;
    Step steps[STRIP];
    for (int64_t i = 0; i < count; i++) {
        int64_t slot = slots[i] - block->first;
        steps[i].weights = strip_at(block, slot) + slot % STRIP;
        for (int c = 0; c < columns; c++) steps[i].values[c] = widen(values + slot * call->dim + c * LANES);
    }
    for (int64_t l = lane; l < lane + lanes; l++) {
        vec even[COLUMNS] = {0}, odd[COLUMNS] = {0};
        float weights[2] = {0};
        gather_steps(steps, count, l, columns, even, weights);
        gather_steps(steps + 1, count - 1, l, columns, odd, weights + 1);
        for (int c = 0; c < columns; c++) sums[l][c] += even[c] + odd[c];
        all[l] += weights[0] + weights[1];
    }
}

// Adds what `gather_strips` leaves out of a tree.
INLINE void gather_tree(const Call *call, const Block *block, int64_t d, const int columns, vec sums[][COLUMNS],
                        float *all) {
    const Part *part = block->part;
    int64_t from = part->context / STRIP * STRIP;
    int32_t slots[STRIP + part->rows];
    if (from < block->first) from = block->first;
    for (int64_t l = 0, next; l < block->lanes; l = next) {
        int64_t row = row_of(call, block, l), count = path_of(part, row, from, slots);
        for (next = l + 1; next < block->lanes && row_of(call, block, next) == row;) next++;
        for (int64_t i = 0; i < count; i += STRIP)
            gather_path(call, block, d, columns, slots + i, count - i < STRIP ? count - i : STRIP, l, next - l, sums, all);
    }
}

// `wide` numbers of a block's output [lanes, dim], from d on: sums of weighted values over those of weights.
INLINE void gather(const Call *call, const Block *block, int64_t d, int64_t wide, const int columns, const bf16 *then) {
    vec sums[GROUPS][QUERIES][COLUMNS];
    float4 all[GROUPS][QUERIES / 4];
    int64_t groups = wide / (columns * LANES);
    memset(sums, 0, groups * sizeof *sums), memset(all, 0, groups * sizeof *all);
    if (tiles(call->dim)) {
        gather_strips(call, block, d, columns, then, *sums, (float *)all);
        if (branches(block->part)) gather_tree(call, block, d, columns, *sums, (float *)all);
    } else
        gather_ranges(call, block, d, wide, columns, then, sums, all);
    for (int64_t l = 0; l < block->lanes; l++) {
        float sum = all[0][l / 4][l % 4], scale = 1.0f / (sum > 0.0f ? sum : 1.0f);
        bf16 *to = call->out + query_at(call, block, l) + d;
        for (int64_t g = 0; g < groups; g++)
            for (int c = 0; c < columns; c++, to += LANES) down_all(sums[g][l][c] * scale, to);
    }
}

void gather_piece(const Call *call, const Block *block, int64_t piece, int64_t wide, const bf16 *then) {
    int64_t d = piece * wide;
    if (NARROW || wide == COLUMNS * LANES)
        gather(call, block, d, wide, COLUMNS, then);
    else if (wide == COLUMNS / 2 * LANES)
        gather(call, block, d, wide, COLUMNS / 2, then);
    else
        gather(call, block, d, wide, 1, then);
}
