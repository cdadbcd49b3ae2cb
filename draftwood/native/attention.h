// What attention.c shares with its two steps, scores.c and values.c.

#include "native.h"

#define AT_ONCE 8     // sums that go on side by side
#define QUERIES 16    // most of a block
#define NARROW (LANES == 8)       // whether vectors are narrow, and registers half as many
#define COLUMNS (NARROW ? 2 : 4)  // vectors of a head summed at once for few lanes; half as many wide ones for more
#define GROUPS (NARROW ? MOST_DIM / (COLUMNS * LANES) : 1)  // most groups of COLUMNS vectors that one thread sums
#define RANGE 256     // slots that a thread takes at a time, a multiple of 4 * LANES
#define WAVE 16384    // vectors of scores for each thread, where one block needs less
#define FAR 32768     // bytes between prefetch and use: those of a range, which another thread may take
#define MEETING 100   // vectors of scores that a thread can do in the time that threads take to wait for each other
#define STRIP 32      // slots whose values are weighed together on tiles, from a multiple of so many on
#if defined(DOTS) && !defined(TILES)
#define JOINED 2  // slots whose values are weighed at once where there are no tiles, see values.c
#else
#define JOINED 1
#endif
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (quad){__VA_ARGS__})
#endif

typedef int32_t quad __attribute__((vector_size(16)));
typedef float float4 __attribute__((vector_size(16)));

// What one call of `attend` asks for.
typedef struct {
    const bf16 *q;
    bf16 *out;
    int64_t heads, groups, dim, window;
    float scale;
} Call;

// Up to QUERIES queries of a part that share a key head, and their scores [slot - first][pace], a query a lane.
typedef struct {
    const Part *part;
    int64_t head, start, lanes, pace;  // query start + l is of row (start + l) / groups
    int64_t first, stop;               // slots that any of its rows sees
    int64_t clear, plain;              // slots that all of them see
    int64_t ranges, before;            // of RANGE slots; those of the blocks before it
    vec *tops;                         // [ranges, vectors of them]: the largest of each lane of `scores`
    float *scores;
} Block;

// Vectors of all lanes of a slot's scores, or one that several slots fill.
static inline int64_t vectors_of(int64_t pace) { return pace > LANES ? pace / LANES : 1; }

static inline int64_t row_of(const Call *call, const Block *block, int64_t l) {
    return (block->start + l) / call->groups;
}

static inline int64_t query_at(const Call *call, const Block *block, int64_t l) {
    int64_t head = block->head * call->groups + (block->start + l) % call->groups;
    return ((block->part->start + row_of(call, block, l)) * call->heads + head) * call->dim;
}

static inline int64_t slots_of(const Block *block, int64_t range) {
    int64_t left = block->stop - block->first - range * RANGE;
    return left < RANGE ? left : RANGE;
}

// The same with what fills the last strip.
static inline int64_t filled_of(const Block *block, int64_t range) {
    return (slots_of(block, range) + STRIP - 1) / STRIP * STRIP;
}

// Turns four rows of four numbers of 32 bits into columns. With narrow vectors, whose shuffles every machine has.
static inline void cross(const void *from, int64_t step, void *to, int64_t pace) {
    quad x[4];
    for (int i = 0; i < 4; i++) memcpy(x + i, (const int32_t *)from + i * step, sizeof(quad));
    quad low = SHUFFLE(x[0], x[2], 0, 4, 1, 5), high = SHUFFLE(x[0], x[2], 2, 6, 3, 7);
    quad lower = SHUFFLE(x[1], x[3], 0, 4, 1, 5), higher = SHUFFLE(x[1], x[3], 2, 6, 3, 7);
    quad turned[] = {SHUFFLE(low, lower, 0, 4, 1, 5), SHUFFLE(low, lower, 2, 6, 3, 7),
                     SHUFFLE(high, higher, 0, 4, 1, 5), SHUFFLE(high, higher, 2, 6, 3, 7)};
    for (int i = 0; i < 4; i++) memcpy((int32_t *)to + i * pace, turned + i, sizeof(quad));
}

// What is read one row after the other: `left` bytes from `at` on, and then what begins at `then`.
typedef struct {
    const char *at, *then;
    int64_t left;
} Stream;

static inline Stream stream_of(const bf16 *from, int64_t numbers, const bf16 *then) {
    return (Stream){(const char *)from, (const char *)then, numbers * (int64_t)sizeof *from};
}

// Prefetches `bytes` of each of `rows` rows, `row` bytes apart, long before they are read.
INLINE void ask(Stream *stream, int64_t rows, int64_t row, int64_t bytes) {
    for (int64_t r = 0; r < rows; r++, stream->at += row, stream->left -= row) {
        const char *far = stream->left > FAR ? stream->at + FAR : stream->then + (FAR - stream->left);
        for (int64_t line = 0; line < bytes; line += LINE) later(far + line), soon(stream->at + line);
    }
}

static inline const bf16 *keys_of(const Call *call, const Block *block) {
    return block->part->keys + (block->head * block->part->slots + block->first) * call->dim;
}

static inline const bf16 *values_of(const Call *call, const Block *block) {
    return block->part->values + (block->head * block->part->slots + block->first) * call->dim;
}

// scores.c
void score_range(const Call *call, const Block *block, int64_t range);
void soften_range(const Call *call, const Block *block, int64_t range);

// values.c
void gather_piece(const Call *call, const Block *block, int64_t piece, int64_t wide, const bf16 *then);
