// Products with a bf16 weight, as fast as memory gives the weight, on vectors, or on tiles where a processor has them.
//
// A step of decoding reads every weight once, for few rows. So weights lie in the order in which they are read, memory is
// asked for them long before they are needed. A sum runs over the inputs one after the other, so a row's result never
// depends on the other rows.

#include "native.h"

#if LANES == 8
#define MOST 6  // rows that do: PANEL * MOST sums, and what they are made from, fill the registers
#else
#define MOST 12
#endif
#define MOST_TILED 32  // rows of two tiles
#define BLOCK 120  // rows that are prepared together: they and a panel stay in a core's cache
#define BLOCK_TILED 256

// Whether this processor has vectors of LANES numbers, enough registers for the sums.
int has_products(void) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return 1;
#else
    return 0;
#endif
}

// The outputs of a panel.
int panel_width(void) { return PANEL * LANES; }

// Rows as they meet a panel: in pairs of bf16, or widened to fp32.
#ifdef DOTS
typedef bf16 number;
static inline void prepare(const bf16 *x, number *to, int64_t count) { memcpy(to, x, count * sizeof *x); }
#else
typedef float number;
static inline void prepare(const bf16 *x, number *to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = up(x[i]);
}
#endif

// Sums of `rows` rows x [rows, depth] with a panel, pairs of inputs [depth / 2, PANEL, LANES, 2]. Meanwhile memory is asked
// for what lies behind `next`, `step` bytes for each pair.
INLINE void sum(const number *x, const ivec *panel, const char *next, int64_t step, int64_t depth, vec (*sums)[PANEL],
                const int rows) {
    vec mine[MOST][PANEL] = {0};  // in registers
    for (int64_t k = 0; k < depth; k += 2, panel += PANEL, next += step) {
        for (int64_t line = 0; line < PAIRS; line += LINE) later(next + line);
        for (int c = 0; c < PANEL && LANES == 16; c++) soon(panel + c);  // for half as wide vectors lines come in time
#ifdef DOTS
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * depth + k, sizeof pair);
            for (int c = 0; c < PANEL; c++) mine[r][c] = dot(mine[r][c], panel[c], pair);
        }
#else
        vec one[PANEL];
        for (int c = 0; c < PANEL; c++) one[c] = (vec)(panel[c] << 16);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < PANEL; c++) mine[r][c] += one[c] * x[r * depth + k];
        for (int c = 0; c < PANEL; c++) one[c] = (vec)(panel[c] & (int32_t)0xffff0000);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < PANEL; c++) mine[r][c] += one[c] * x[r * depth + k + 1];
#endif
    }
    memcpy(sums, mine, rows * sizeof *mine);
}

#define CASE(n) \
    case n: \
        sum(x, panel, next, step, depth, sums, n); \
        break;

static void sum_rows(const number *x, const ivec *panel, const char *next, int64_t step, int64_t depth,
                     vec (*sums)[PANEL], int64_t rows) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MOST > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

// `count` outputs of a row, from sums and a bias (unless null).
static void put(const vec sums[PANEL], const bf16 *bias, bf16 *out, int64_t count) {
    bf16 rounded[PANEL * LANES];
    for (int c = 0; c < PANEL; c++) {
        vec x = sums[c];
        for (int64_t i = c * LANES; bias && i < count && i < (c + 1) * LANES; i++) x[i % LANES] += up(bias[i]);
        down_all(x, rounded + c * LANES);
    }
    if (count == PANEL * LANES)  // a size known to the compiler
        memcpy(out, rounded, sizeof rounded);
    else
        memcpy(out, rounded, count * sizeof *out);
}

// out [rows, width] = x [rows, depth] times a weight [width, depth] in panels, and bias (unless null). `depth` is even; a
// last panel is filled up. Returns 0, or 1 if memory ran out.
int multiply(const bf16 *x, const ivec *weight, const bf16 *bias, bf16 *out, int64_t rows, int64_t depth, int64_t width,
             int threads) {
    const int tiled = tiles(depth);
    const int64_t together = tiled ? BLOCK_TILED : BLOCK, most = tiled ? MOST_TILED : MOST;
    int64_t panels = (width + PANEL * LANES - 1) / (PANEL * LANES);
    number *ready = tiled ? 0 : malloc((rows < together ? rows : together) * depth * sizeof *ready);
    if (!ready && !tiled) return 1;
    for (int64_t start = 0; start < rows; start += together) {
        int64_t block = rows - start < together ? rows - start : together, parts = (block + most - 1) / most;
        const bf16 *these = x + start * depth;
        if (!tiled) prepare(these, ready, block * depth);
#pragma omp parallel num_threads(threads) if (block * depth * width > SMALL / 4)
        {
            int64_t shaped = 0;  // rows that this thread's tiles are shaped for
#pragma omp for
            for (int64_t p = 0; p < panels; p++) {
                int64_t from = p * PANEL * LANES, count = width - from < PANEL * LANES ? width - from : PANEL * LANES;
                for (int64_t part = 0, first = 0, next; part < parts; part++, first = next) {
                    vec sums[MOST_TILED][PANEL];
                    const ivec *panel = weight + p * PANEL * depth / 2;
                    next = (part + 1) * block / parts;
                    // A panel that is read many times is not waited for if each time a part of the one behind it is
                    // asked for.
                    int64_t asked = parts == 1 ? AHEAD : PAIRS * depth / 2 * (parts + part) / parts;
                    const char *then = (const char *)panel + asked;
                    if (tiled) {
                        if (shaped != next - first) shaped = shape_tiles(next - first);
                        sum_tiles(these + first * depth, panel, then, PAIRS / parts, depth, sums, next - first);
                    } else {
                        sum_rows(ready + first * depth, panel, then, PAIRS / parts, depth, sums, next - first);
                    }
                    for (int64_t r = first; r < next; r++)
                        put(sums[r - first], bias ? bias + from : 0, out + (start + r) * width + from, count);
                }
            }
            if (tiled) leave_tiles();
        }
    }
    free(ready);
    return 0;
}
