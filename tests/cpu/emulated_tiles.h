// Matrix units (AMX) in plain C, to be included before tiles.c, which then runs on any processor.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define syscall(...) 0  // of course it may use them

static _Thread_local struct {
    uint8_t config[64], data[8][16][64];
} unit;

static inline int bytes_of(int tile) { return unit.config[16 + 2 * tile]; }
static inline int rows_of(int tile) { return unit.config[48 + tile]; }

static inline void load(int tile, const char *from, long stride) {
    memset(unit.data[tile], 0, sizeof unit.data[tile]);
    for (int r = 0; r < rows_of(tile); r++) memcpy(unit.data[tile][r], from + r * stride, bytes_of(tile));
}

static inline void store(int tile, char *to, long stride) {
    for (int r = 0; r < rows_of(tile); r++) memcpy(to + r * stride, unit.data[tile][r], bytes_of(tile));
}

static inline float wide(const uint8_t *number) {
    uint8_t bytes[4] = {0, 0, number[0], number[1]};
    float value;
    memcpy(&value, bytes, 4);
    return value;
}

// to += left * right: pairs of a row of `left` meet a row of pairs of `right`. The first and the second of all pairs are
// summed apart, as processors do it.
static inline void multiply_tiles(int to, int left, int right) {
    for (int m = 0; m < rows_of(to); m++)
        for (int n = 0; n < bytes_of(to) / 4; n++) {
            float sum, sides[2] = {0};
            uint8_t *at = &unit.data[to][m][4 * n];
            memcpy(&sum, at, 4);
            for (int k = 0; k < bytes_of(left) / 4; k++)
                for (int i = 0; i < 2; i++)
                    sides[i] += wide(&unit.data[left][m][4 * k + 2 * i]) * wide(&unit.data[right][k][4 * n + 2 * i]);
            sum += sides[0] + sides[1];
            memcpy(at, &sum, 4);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) memcpy(unit.config, from, 64)
#define _tile_release() memset(&unit, 0, sizeof unit)
#define _tile_zero(tile) memset(unit.data[tile], 0, sizeof unit.data[tile])
#define _tile_loadd(tile, from, stride) load(tile, (const char *)(from), stride)
#define _tile_stored(tile, to, stride) store(tile, (char *)(to), stride)
#define _tile_dpbf16ps(to, left, right) multiply_tiles(to, left, right)
