// Attention over the keys and values of a cache, for bf16 on a CPU: a tree after its context in one call.
//
// A row's result never depends on the other rows: sums run over its own visible keys, in an order that their positions
// decide (others add an exact zero). So a token gets the same bits alone, in a chain and in a tree, and on any number
// of threads.

#include "attention.h"

// How many numbers of a head a thread sums at a time. A thread that has a block alone sums all at once if vectors are
// narrow, and two lines if their sums fit in registers. Else it is one line, or less only if that does not divide a
// head: two threads would read a line that they share.
static inline int64_t wide_of(const Call *call, int64_t pace, int alone) {
    if (alone && NARROW) return call->dim;
    int64_t wide = alone && (pace < AT_ONCE || tiles(call->dim)) ? 2 * LINE / sizeof(bf16) : LINE / sizeof(bf16);
    while (call->dim % wide) wide /= 2;
    return wide;
}

static inline int64_t pace_of(int64_t lanes) {
    return lanes > AT_ONCE ? QUERIES : lanes > AT_ONCE / 2 ? AT_ONCE : AT_ONCE / 2;
}

// A block of at most `most` queries from `start` on, of one part and one key head.
static Block block_of(const Call *call, const Part *part, int64_t head, int64_t start, int64_t most) {
    int64_t queries = part->rows * call->groups, lanes = queries - start < most ? queries - start : most;
    int64_t top = start / call->groups, last = (start + lanes - 1) / call->groups;
    Block block = {.part = part, .head = head, .start = start, .lanes = lanes, .pace = pace_of(lanes)};
    block.stop = part->context + (part->whole ? part->rows : last + 1);
    block.plain = part->whole ? block.stop : part->context + (part->visible ? 0 : top + 1);
    block.first = call->window ? block.stop : 0;
    for (int64_t r = top; call->window && r <= last; r++) {
        int64_t reach = part->context + part->depth[r] - call->window + 1;
        reach = reach > 0 ? reach : 0;
        block.first = reach < block.first ? reach / STRIP * STRIP : block.first;
        block.clear = reach > block.clear ? reach : block.clear;
    }
    block.ranges = (block.stop - block.first + RANGE - 1) / RANGE;
    return block;
}

// The vectors that a block's scores and their maxima take.
static inline int64_t size_at(const Block *block, int64_t pace) {
    return block->ranges * (vectors_of(pace) + RANGE * pace / LANES);
}

static inline int64_t size_of(const Block *block) { return size_at(block, block->pace); }

static int larger_first(const void *one, const void *other) {
    int64_t a = size_of(one), b = size_of(other);
    return (a < b) - (a > b);
}

// Of blocks that are alike, some are left over when all threads have had equally many. Queries of each piece if these
// are divided among all threads.
static inline int64_t piece_of(const Block *blocks, int64_t count, int threads) {
    int64_t rest = count % threads, pieces = rest ? threads / rest : 1;
    return ((blocks->lanes + pieces - 1) / pieces + 3) / 4 * 4;
}

// Divides the blocks that are left over. Returns how many blocks there are then.
static int64_t divide_rest(const Call *call, Block *blocks, int64_t count, int threads) {
    int64_t step = piece_of(blocks, count, threads), listed = count - count % threads;
    Block rest[threads];
    memcpy(rest, blocks + listed, (count - listed) * sizeof *rest);
    for (const Block *block = rest; block < rest + count % threads; block++) {
        int64_t end = block->start + block->lanes;
        for (int64_t start = block->start; start < end; start += step)
            blocks[listed++] = block_of(call, block->part, block->head, start, step < end - start ? step : end - start);
    }
    return listed;
}

static inline void place(Block *block, vec *room) {
    block->tops = room;
    block->scores = (float *)(room + block->ranges * vectors_of(block->pace));
}

// One thread for each block, so that none waits for another.
static void attend_whole(const Call *call, const Block *blocks, int64_t count, vec *scores, int64_t largest,
                         int threads) {
    int begun = 0, taken = 0;
#pragma omp parallel num_threads(threads)
    {
        int mine, i, next;
#pragma omp atomic capture
        mine = begun++;
#pragma omp atomic capture
        i = taken++;
        for (; i < count; i = next) {
            Block block = blocks[i];
            const int64_t wide = wide_of(call, block.pace, 1), pieces = call->dim / wide;
            place(&block, scores + mine * largest);
            for (int64_t range = 0; range < block.ranges; range++) score_range(call, &block, range);
            for (int64_t range = 0; range < block.ranges; range++) soften_range(call, &block, range);
#pragma omp atomic capture
            next = taken++;  // not before: it would be taken from a thread that is yet to begin
            for (int64_t piece = 0; piece < pieces; piece++) {
                const bf16 *then = keys_of(call, blocks + (next < count ? next : i));
                if (piece + 1 < pieces) then = values_of(call, &block) + (piece + 1) * wide;
                gather_piece(call, &block, piece, wide, then);
            }
        }
    }
}

// The block that range i of all ranges belongs to.
static const Block *holder(const Block *blocks, int64_t count, int64_t i) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        *(blocks[middle].before <= i ? &low : &high) = middle;
    }
    return blocks + low;
}

// All threads share all blocks: each loop is divided as finely as the order of its sums permits.
static void attend_together(const Call *call, const Block *blocks, int64_t count, int threads) {
    const int64_t ranges = blocks[count - 1].before + blocks[count - 1].ranges;
    const int64_t wide = wide_of(call, QUERIES, 0), pieces = call->dim / wide;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < ranges; i++) {
            const Block *block = holder(blocks, count, i);
            score_range(call, block, i - block->before);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < ranges; i++) {
            const Block *block = holder(blocks, count, i);
            soften_range(call, block, i - block->before);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count * pieces; i++) {
            const Block *block = blocks + i / pieces;
            gather_piece(call, block, i % pieces, wide, values_of(call, block));
        }
    }
}

// The same with no more blocks at a time than there is room for their scores.
static void attend_divided(const Call *call, Block *blocks, int64_t count, vec *scores, int64_t room, int threads) {
    for (int64_t start = 0, stop = 0; start < count; start = stop) {
        int64_t used = 0, before = 0;
        for (; stop < count && used + size_of(blocks + stop) <= room; stop++) {
            place(blocks + stop, scores + used);
            blocks[stop].before = before;
            used += size_of(blocks + stop), before += blocks[stop].ranges;
        }
        attend_together(call, blocks + start, stop - start, threads);
    }
}

// What rows of q [all rows, H, D] see: each part's `context` committed slots and, after them, its rows m with
// visible[r, m] (null: all up to r itself, or all of a `whole` part). Positions are context + depth[r]; nothing
// `window` or more positions back is seen (0: no limit). out is [all rows, H, D]. Returns 0, or 1 if memory ran out.
int attend(const bf16 *q, const Part *parts, int64_t count, bf16 *out, int64_t heads, int64_t kv_heads, int64_t dim,
           int64_t window, float scale, int threads) {
    Call call = {q, out, heads, heads / kv_heads, dim, window, scale};
    int64_t most = 0, listed = 0, work = 0, total = 0, largest = 0, least = INT64_MAX;
    for (int64_t p = 0; p < count; p++) {
        most += (parts[p].rows * call.groups + QUERIES - 1) / QUERIES * kv_heads;
        work += parts[p].rows * heads * (parts[p].context + parts[p].rows) * dim;
    }
    if (!most) return 0;
    if (work <= SMALL) threads = 1;
    Block *blocks = malloc((most + threads) * sizeof(Block));
    if (!blocks) return 1;
    // Listed so that a thread mostly takes blocks of one head, whose keys and values are then in its cache.
    for (int64_t p = 0; p < count; p++)
        for (int64_t first = 0; first < kv_heads; first += threads)
            for (int64_t start = 0; start < parts[p].rows * call.groups; start += QUERIES)
                for (int64_t head = first; head < first + threads && head < kv_heads; head++) {
                    blocks[listed] = block_of(&call, parts + p, head, start, QUERIES);
                    int64_t size = size_of(blocks + listed++);
                    total += size, largest = size > largest ? size : largest, least = size < least ? size : least;
                }
    if (least < largest) qsort(blocks, listed, sizeof(Block), larger_first);
    int64_t turn = threads * largest, spent = (total + turn - 1) / turn * turn;  // idle threads' time counts as well
    int alike = least == largest;
    if (alike && listed % threads)
        spent = listed / threads * turn + threads * size_at(blocks, pace_of(piece_of(blocks, listed, threads)));
    // Threads may rather be idle than share blocks, whose scores would go from one core to another, if they are idle
    // for a small share of the time, or for no longer than threads would wait for each other.
    int whole = threads == 1 || spent - total <= threads * MEETING;
    whole = whole || spent * 8 <= total * (blocks[0].pace == QUERIES ? 12 : 9);
    if (whole && alike) listed = divide_rest(&call, blocks, listed, threads);
    int64_t room = threads * (whole || largest > WAVE ? largest : WAVE);
    if (room > total && !whole) room = total;
    vec *scores = aligned_alloc(sizeof(vec), room * sizeof(vec));
    if (scores && whole)
        attend_whole(&call, blocks, listed, scores, largest, threads);
    else if (scores)
        attend_divided(&call, blocks, listed, scores, room, threads);
    free(scores), free(blocks);
    return !scores;
}
