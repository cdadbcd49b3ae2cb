// Sums on tiles of 16 rows, for processors with matrix units (AMX): of products, of attention's scores and of its
// values. A weight's panel is read as it is, since 16 pairs of inputs of 16 outputs are a tile; so are a cache's keys.
// Each row is summed by itself, over the inputs in one order. Of every 32 inputs tiles sum even and odd ones apart:
// values.c allows for that where a slot is even in one tree and odd in another.

#ifdef TILES
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "native.h"

#if LANES != 16  // a panel is then not a row of tiles
#undef TILES
#endif

#ifdef TILES
#define TILE 16           // rows of a tile, each a line long: 32 numbers
#define NUMBERS (2 * TILE)  // inputs that a tile holds
#define ASK 0x1023        // ARCH_REQ_XCOMP_PERM of Linux: a process must ask before it uses tiles,
#define TILE_DATA 18      // which are this part of its state

static int allowed(void) { return !syscall(SYS_arch_prctl, ASK, TILE_DATA); }

// Whether tiles serve sums over so many inputs.
int tiles(int64_t depth) {
    static int may = -1;
    if (may < 0) may = allowed();
    return may && depth % NUMBERS == 0;
}

// The processor's configuration of its eight tiles: rows of each and bytes of a row.
typedef struct {
    uint8_t palette, first, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Tiles;

static void shape(Tiles all) {
    all.palette = 1;
    __asm__ volatile("" ::"r"(&all) : "memory");  // GCC's intrinsic says that it reads eight bytes
    _tile_loadconfig(&all);
}

// Tiles for up to 32 rows, in two halves: their sums in 0 to 3, inputs in 4 and 5, weights in 6 and 7.
void shape_tiles(int64_t rows) {
    Tiles all = {0};
    int64_t upper = rows < TILE ? rows : TILE, lower = rows > TILE ? rows - TILE : TILE;
    const int64_t each[] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    for (int t = 0; t < 8; t++) all.bytes[t] = LINE, all.rows[t] = (uint8_t)each[t];
    shape(all);
}

// Sums of `rows` rows x [rows, depth] with a panel, for which tiles are shaped. Meanwhile prefetches what lies from
// `next` on, `step` bytes for each pair.
void sum_tiles(const bf16 *x, const ivec *panel, const char *next, int64_t step, int64_t depth, vec (*sums)[PANEL],
               int64_t rows) {
    const int64_t row = depth * sizeof *x;
    const bf16 *below = x + TILE * depth;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += NUMBERS, panel += PANEL * TILE, next += TILE * step) {
        for (int64_t line = 0; line < TILE * step; line += LINE) later(next + line);
        _tile_loadd(6, panel, PAIRS);
        _tile_loadd(7, panel + 1, PAIRS);
        _tile_loadd(4, x + k, row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (rows <= TILE) continue;
        _tile_loadd(5, below + k, row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, &sums[0][0], PAIRS);
    _tile_stored(1, &sums[0][1], PAIRS);
    if (rows <= TILE) return;
    _tile_stored(2, &sums[TILE][0], PAIRS);
    _tile_stored(3, &sums[TILE][1], PAIRS);
}

// Tiles for scores of `pace` queries in 0, of keys in 1 and queries in 2.
void shape_tiles_of_scores(int64_t pace) {
    const uint16_t wide = pace * sizeof(float);
    shape((Tiles){.bytes = {wide, LINE, wide}, .rows = {TILE, TILE, TILE}});
}

// scores [TILE, pace] = key . query, for keys [TILE, dim] and queries in pairs [dim / 2, pace].
void score_tile(const bf16 *keys, const void *pairs, float *scores, int64_t dim, int64_t pace) {
    const int64_t wide = pace * sizeof *scores;
    _tile_zero(0);
    for (int64_t d = 0; d < dim; d += NUMBERS) {
        _tile_loadd(1, keys + d, dim * sizeof *keys);
        _tile_loadd(2, (const char *)pairs + d / 2 * wide, wide);
        _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, scores, wide);
}

// Tiles for up to 64 sums of values for `pace` queries in 0 to 3, for those of their weights in 4, for weights in 5,
// values in 6 and ones in 7.
void shape_tiles_of_values(int64_t pace) {
    bf16 ones[TILE * NUMBERS];
    Tiles all = {0};
    for (int t = 0; t < 8; t++) all.bytes[t] = LINE, all.rows[t] = t < 6 ? (uint8_t)pace : TILE;
    for (int i = 0; i < TILE * NUMBERS; i++) ones[i] = 0x3f80;
    shape(all);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_loadd(7, ones, LINE);
}

// Adds values in pairs [columns, 16 pairs of slots, 16], two or four columns, times each query's weights
// [pace, 32 slots], and adds these weights.
void weigh_tiles(const void *weights, const void *pairs, int64_t columns) {
    const char *values = pairs;
    _tile_loadd(5, weights, LINE);
    _tile_dpbf16ps(4, 5, 7);
    _tile_loadd(6, values, LINE);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(6, values + TILE * LINE, LINE);
    _tile_dpbf16ps(1, 5, 6);
    if (columns == 2) return;
    _tile_loadd(6, values + 2 * TILE * LINE, LINE);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(6, values + 3 * TILE * LINE, LINE);
    _tile_dpbf16ps(3, 5, 6);
}

// Stores the sums, `columns` of [pace, 4, 16], and those of weights [pace].
void store_tiles_of_values(void *sums, float *all, int64_t pace, int64_t columns) {
    vec *to = sums, weights[TILE];
    _tile_stored(4, weights, LINE);
    for (int64_t l = 0; l < pace; l++) all[l] = weights[l][0];
    _tile_stored(0, to, 4 * LINE);
    _tile_stored(1, to + 1, 4 * LINE);
    if (columns > 2) _tile_stored(2, to + 2, 4 * LINE);
    if (columns > 2) _tile_stored(3, to + 3, 4 * LINE);
}

// Tiles left in use would be saved at every switch of threads.
void leave_tiles(void) { _tile_release(); }
#else
int tiles(int64_t depth) { return 0 * depth; }
void shape_tiles(int64_t rows) {}
void sum_tiles(const bf16 *x, const ivec *panel, const char *next, int64_t step, int64_t depth, vec (*sums)[PANEL],
               int64_t rows) {}
void shape_tiles_of_scores(int64_t pace) {}
void score_tile(const bf16 *keys, const void *pairs, float *scores, int64_t dim, int64_t pace) {}
void shape_tiles_of_values(int64_t pace) {}
void weigh_tiles(const void *weights, const void *pairs, int64_t columns) {}
void store_tiles_of_values(void *sums, float *all, int64_t pace, int64_t columns) {}
void leave_tiles(void) {}
#endif
