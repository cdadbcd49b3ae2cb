// Products with a bf16 weight, as fast as memory gives the weight, on vectors, or on tiles where a processor has them.
//
// A step of decoding reads every weight once, for few rows. So weights lie in the order in which they are read, and
// they are prefetched long before they are needed. A sum runs over the inputs one after the other, so a row's result
// never depends on the other rows.

#include "native.h"

#if LANES == 8
#define MOST 6  // rows at a time: PANEL * MOST sums, and what they are made from, fill the registers
#else
#define MOST 12
#endif
#define MOST_TILED 32  // rows of two tiles
#define AHEAD 8192  // bytes between what is prefetched and what is used
#define BLOCK 120  // rows that are prepared together: they and a panel stay in a core's cache
#define BLOCK_TILED 256
#define LARGE (4 << 20)  // more bytes of results bypass the caches, where they would evict what they are made from

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

// Sums of `rows` rows x [rows, depth] with a panel, pairs of inputs [depth / 2, PANEL, LANES, 2]. Meanwhile prefetches
// what lies from `next` on, `step` bytes for each pair.
INLINE void sum(const number *x, const ivec *panel, const char *next, int64_t step, int64_t depth, vec (*sums)[PANEL],
                const int rows) {
    vec mine[MOST][PANEL] = {0};  // in registers
    for (int64_t k = 0; k < depth; k += 2, panel += PANEL, next += step) {
        for (int64_t line = 0; line < PAIRS; line += LINE) later(next + line);
        for (int c = 0; c < PANEL && LANES == 16; c++) soon(panel + c);  // with half as wide vectors lines come in time
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

// Waits for what bypassed the caches.
static inline void settle(void) {
#ifdef DOTS
    _mm_sfence();
#endif
}

// `count` outputs of a row, from sums and a bias (unless null).
static void put(const vec sums[PANEL], const bf16 *bias, bf16 *out, int64_t count) {
    bf16 numbers[PANEL * LANES];
    for (int c = 0; c < PANEL; c++) {
        vec x = sums[c];
        for (int64_t i = c * LANES; bias && i < count && i < (c + 1) * LANES; i++) x[i % LANES] += up(bias[i]);
        down_all(x, numbers + c * LANES);
    }
    memcpy(out, numbers, count * sizeof *out);
}

// The same for a whole panel; if `far`, past the caches.
INLINE void put_whole(const vec sums[PANEL], const bf16 *bias, bf16 *out, int far) {
    vec low = sums[0], high = sums[1];
    if (bias) low += widen(bias), high += widen(bias + LANES);
#ifdef DOTS
    __m512i numbers = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    if (far)
        _mm512_stream_si512((void *)out, numbers);
    else
        _mm512_storeu_si512(out, numbers);
#else
    down_all(low, out), down_all(high, out + LANES);
#endif
}

// out [rows, width] = x [rows, depth] times a weight [width, depth] in panels, plus bias (unless null). `depth` is
// even; a last panel is filled up. Returns 0, or 1 if memory ran out.
int multiply(const bf16 *x, const ivec *weight, const bf16 *bias, bf16 *out, int64_t rows, int64_t depth, int64_t width,
             int threads) {
    const int tiled = tiles(depth);
    const int64_t together = tiled ? BLOCK_TILED : BLOCK, most = tiled ? MOST_TILED : MOST;
    const int64_t panels = (width + PANEL * LANES - 1) / (PANEL * LANES);
    const int whole = (uintptr_t)out % LINE == 0 && width % (PANEL * LANES) == 0;  // rows of whole lines
    const int far = whole && rows * width * (int64_t)sizeof *out > LARGE;
    number *ready = tiled ? 0 : malloc((rows < together ? rows : together) * depth * sizeof *ready);
    if (!ready && !tiled) return 1;
    for (int64_t start = 0; start < rows; start += together) {
        int64_t block = rows - start < together ? rows - start : together, parts = (block + most - 1) / most;
        int64_t size = (block + parts - 1) / parts;  // of all parts on tiles: a row in two costs less than other shapes
        const bf16 *these = x + start * depth;
        if (!tiled) prepare(these, ready, block * depth);
#pragma omp parallel num_threads(threads) if (block * depth * width > SMALL)
        {
            if (tiled) shape_tiles(size);
#pragma omp for
            for (int64_t p = 0; p < panels; p++) {
                int64_t from = p * PANEL * LANES, count = width - from < PANEL * LANES ? width - from : PANEL * LANES;
                const ivec *panel = weight + p * PANEL * depth / 2;
                const bf16 *added = bias ? bias + from : 0;
                for (int64_t part = 0; part < parts; part++) {
                    vec sums[MOST_TILED][PANEL];
                    int64_t first = part * block / parts, mine = tiled ? size : (part + 1) * block / parts - first;
                    // A panel is read once for each part. Each time a share of the next panel is prefetched, so that it
                    // need not be waited for.
                    int64_t asked = parts == 1 ? AHEAD : PAIRS * depth / 2 * (parts + part) / parts;
                    const char *then = (const char *)panel + asked;
                    if (tiled)
                        sum_tiles(these + first * depth, panel, then, PAIRS / parts, depth, sums, mine);
                    else
                        sum_rows(ready + first * depth, panel, then, PAIRS / parts, depth, sums, mine);
                    bf16 *to = out + (start + first) * width + from;
                    for (int64_t r = 0; r < mine; r++, to += width)
                        if (count == PANEL * LANES)
                            put_whole(sums[r], added, to, far);
                        else
                            put(sums[r], added, to, count);
                }
            }
            if (tiled) leave_tiles();
            if (far) settle();
        }
    }
    free(ready);
    return 0;
}
