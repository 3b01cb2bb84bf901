/* The parts of a layer between its products: norms, gates, rotation, attention by block tables. */

/* Positions per tile of keys; tiles start at position 0 of the sequence. Two tiles of keys and values
   fit in the first cache. */
#define KEYS (LANES == 4 ? 32 : 64)
#define MAX_QUERIES 32
#if LANES == 4
#define SCORED 4 /* rows that share the loads of keys; their sums fit in the registers */
#else
#define SCORED 1
#endif
#define MAX_HEAD 256

ALWAYS void normalize(const float *x, const float *weight, int64_t n, float epsilon, float *y) {
    vec squares = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) squares = multiply_add(load(x + i), load(x + i), squares);
    for (; i < n; i++) rest += x[i] * x[i];
    float factor = 1.0f / sqrtf((sum(squares) + rest) / (float)n + epsilon);
    for (i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
}

/* The place of the largest of n numbers, the first if there are several. */
static int64_t first_largest(const float *x, int64_t n) {
    vec tops[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) tops[v] = larger(tops[v], load(x + i + v * LANES));
    float top = largest(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    for (i = 0; i + 8 * LANES <= n; i += 8 * LANES) {
        ivec is_top = {0};
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) is_top |= load(x + i + v * LANES) == splat(top);
        if (sum(__builtin_convertvector(is_top, vec)) != 0) break;
    }
    for (; i < n; i++)
        if (x[i] == top) return i;
    return 0;
}

/* The activations of gates. GELU in its tanh form is x times a sigmoid too, of an odd cubic of x. */
enum { NO_GATE, SILU, GELU };
#define GELU_LINEAR 1.5957691216f /* 2 sqrt(2 / pi) */
#define GELU_CUBIC 0.0713548163f  /* 0.044715 times that */

/* y[N] = activation(x[:N]) * x[N:]. N is a multiple of LANES. */
ALWAYS void gate(const float *x, int64_t N, const int activation, float *y) {
    for (int64_t i = 0; i < N; i += LANES) {
        vec gate = load(x + i), up = load(x + N + i), slope = gate;
        if (activation == GELU)
            slope = gate * multiply_add(gate * gate, splat(GELU_CUBIC), splat(GELU_LINEAR));
        store(y + i, gate / (1.0f + exponential(-slope)) * up);
    }
}

/* The memory layout of keys and values: a block is [layers, 2, G, block_size, D]. */
typedef struct {
    float *blocks;
    int64_t block_stride, layer_offset, value_offset, block_size, heads, head_size;
} Cache;

ALWAYS float *key_of(const Cache *c, int64_t block, int64_t head, int64_t offset) {
    return c->blocks + block * c->block_stride + c->layer_offset +
           (head * c->block_size + offset) * c->head_size;
}

ALWAYS void rotate(float *x, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

/* For rows qkv[M, (H + 2 G) D]: normalize q and k if there are norm weights, rotate them in place
   by the angles of their positions, and store k and v in their slots (block * block_size + offset;
   negative: do not store). */
static void share_rotate_and_store(Member *me, float *qkv, int64_t M, int64_t H, const float *cosine,
                                   const float *sine, const int64_t *positions,
                                   const float *q_norm, const float *k_norm, double epsilon,
                                   const int64_t *slots, const Cache *cache) {
    const int64_t G = cache->heads, D = cache->head_size, half = D / 2;
    for (int64_t m; (m = next_task(me, M)) >= 0;) {
        float *row = qkv + m * (H + 2 * G) * D;
        const int64_t angle = positions[m] * half;
        for (int64_t h = 0; h < H + G; h++) {
            const float *norm = h < H ? q_norm : k_norm;
            if (norm) normalize(row + h * D, norm, D, (float)epsilon, row + h * D);
            rotate(row + h * D, cosine + angle, sine + angle, half);
        }
        if (slots[m] < 0) continue;
        for (int64_t g = 0; g < G; g++) {
            float *key = key_of(cache, slots[m] / cache->block_size, g, slots[m] % cache->block_size);
            memcpy(key, row + (H + g) * D, (size_t)D * 4);
            memcpy(key + cache->value_offset, row + (H + G + g) * D, (size_t)D * 4);
        }
    }
}

/* Fold the lanes of a and b onto half as many: every 2 * half lanes hold a's, then b's. */
#define AT(j, half, by) ((j) % (2 * (half)) < (half) ? (j) : (j) - (half) + LANES) + by
#define FOUR(j, half, by) AT(j, half, by), AT(j + 1, half, by), AT(j + 2, half, by), AT(j + 3, half, by)
#if LANES == 16
#define ALL(half, by) FOUR(0, half, by), FOUR(4, half, by), FOUR(8, half, by), FOUR(12, half, by)
#elif LANES == 8
#define ALL(half, by) FOUR(0, half, by), FOUR(4, half, by)
#else
#define ALL(half, by) FOUR(0, half, by)
#endif
#define FOLD(half)                                                                         \
    for (int i = 0; i < half; i++)                                                         \
        v[i] = __builtin_shufflevector(v[i], v[i + half], ALL(half, 0)) +                  \
               __builtin_shufflevector(v[i], v[i + half], ALL(half, half));

/* The sums over the lanes of LANES vectors, as one vector. */
ALWAYS vec sums_of(vec v[LANES]) {
#if defined(__aarch64__)
    const float32x4_t low = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
    return (vec)vpaddq_f32(low, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]));
#else
#if LANES == 16
#pragma GCC unroll 8
    FOLD(8)
#endif
#if LANES >= 8
#pragma GCC unroll 8
    FOLD(4)
#endif
#pragma GCC unroll 8
    FOLD(2)
    FOLD(1)
    return v[0];
#endif
}

/* Query rows of one sequence that share a key-value head. */
typedef struct {
    const float *q[MAX_QUERIES];
    float *out[MAX_QUERIES];
    int64_t begin[MAX_QUERIES], end[MAX_QUERIES]; /* positions that each row sees: [begin, end) */
    int rows;
} Queries;

/* The state of these rows: the weights of a tile's keys, their sums so far, and the largest score. */
typedef struct {
    float scores[MAX_QUERIES][KEYS], out[MAX_QUERIES][MAX_HEAD];
    float most[MAX_QUERIES], total[MAX_QUERIES];
} Rows;

static const float nothing[MAX_HEAD];

/* out[rows, count] = scale q keys, where `keys` has a multiple of LANES places. Prefetches the keys at
   `later`, if it is not 0, a line at a time: many at once would fill the queues of the cache. */
ALWAYS void score(const int rows, const float *const *q, const float *const *keys,
                  const float *const *later, int count, int64_t D, float scale, float (*out)[KEYS]) {
    for (int first = 0; first < count; first += LANES) {
        vec sums[SCORED][LANES];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) sums[r][i] = (vec){0};
        for (int64_t d = 0; d < D; d += LANES) {
            if (later)
                for (int64_t line = d * LANES / 16; line < (d + LANES) * LANES / 16; line++)
                    __builtin_prefetch(later[first + line % LANES] + line / LANES * 16);
            vec parts[SCORED];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) parts[r] = load(q[r] + d);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const vec key = load(keys[first + i] + d);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) sums[r][i] = multiply_add(parts[r], key, sums[r][i]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) store(out[r] + first, sums_of(sums[r]) * scale);
    }
}

/* `score` for up to SCORED rows. */
static void score_some(int rows, const float *const *q, const float *const *keys,
                       const float *const *later, int count, int64_t D, float scale,
                       float (*out)[KEYS]) {
    switch (rows) {
    case 1: score(1, q, keys, later, count, D, scale, out); break;
#if SCORED > 1
    case 2: score(2, q, keys, later, count, D, scale, out); break;
    case 3: score(3, q, keys, later, count, D, scale, out); break;
    case 4: score(4, q, keys, later, count, D, scale, out); break;
#endif
    }
}

/* out[rows, D] += weights[rows, from:to] values, a few vectors of D at a time; the values are
   `offset` floats after the keys. Prefetches like `score`. */
ALWAYS void gather(const int rows, const int vecs, float (*weights)[KEYS], const float *const *keys,
                   const float *const *later, int64_t offset, int from, int to, float (*out)[MAX_HEAD]) {
    vec sums[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) sums[r][v] = load(out[r] + v * LANES);
    int j = from;
#if defined(__aarch64__)
    for (; j + 4 <= to; j += 4) {
        float32x4_t four[4];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) four[r] = vld1q_f32(weights[r] + j);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            if (later) __builtin_prefetch(later[j + i] + offset);
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) {
                const float32x4_t value = vld1q_f32(keys[j + i] + offset + v * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    sums[r][v] = (vec)MULTIPLY_ADD((float32x4_t)sums[r][v], value, four[r], i);
            }
        }
    }
#endif
    for (; j < to; j++) {
        const float *values = keys[j] + offset;
        if (later)
            for (int i = 0; i < vecs * LANES; i += 16) __builtin_prefetch(later[j] + offset + i);
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) {
            vec value = load(values + v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                sums[r][v] = multiply_add(splat(weights[r][j]), value, sums[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) store(out[r] + v * LANES, sums[r][v]);
}

#define FROM(out, d) ((float(*)[MAX_HEAD])((out)[0] + (d)))

ALWAYS void gather_all(const int rows, float (*weights)[KEYS], const float *const *keys,
                       const float *const *later, int64_t offset, int from, int to, int64_t D,
                       float (*out)[MAX_HEAD]) {
    int64_t d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES)
        gather(rows, 4, weights, keys, later, offset + d, from, to, FROM(out, d));
    for (; d < D; d += LANES)
        gather(rows, 1, weights, keys, later, offset + d, from, to, FROM(out, d));
}

/* `gather_all` for up to 4 rows. */
static void gather_some(int rows, float (*weights)[KEYS], const float *const *keys,
                        const float *const *later, int64_t offset, int from, int to, int64_t D,
                        float (*out)[MAX_HEAD]) {
    switch (rows) {
    case 1: gather_all(1, weights, keys, later, offset, from, to, D, out); break;
    case 2: gather_all(2, weights, keys, later, offset, from, to, D, out); break;
    case 3: gather_all(3, weights, keys, later, offset, from, to, D, out); break;
    case 4: gather_all(4, weights, keys, later, offset, from, to, D, out); break;
    }
}

/* Online softmax: add the keys [begin, end) of a tile to a row, and rescale the earlier ones if a larger
   score appears. */
ALWAYS void weigh(Rows *rows, int r, int64_t begin, int64_t end, int64_t D) {
    float *scores = rows->scores[r], *out = rows->out[r];
    for (int64_t j = 0; j < begin; j++) scores[j] = -INFINITY;
    for (int64_t j = end < 0 ? 0 : end; j < KEYS; j++) scores[j] = -INFINITY;
    vec top = load(scores);
    for (int j = LANES; j < KEYS; j += LANES) top = larger(top, load(scores + j));
    const float now = largest(top);
    if (now > rows->most[r]) {
        const float shrink = exponential(splat(rows->most[r] - now))[0];
        for (int64_t d = 0; d < D; d += LANES) store(out + d, load(out + d) * shrink);
        rows->total[r] *= shrink;
        rows->most[r] = now;
    }
    const float most = rows->most[r];
    vec sums = {0};
    for (int j = 0; j < KEYS; j += LANES) {
        vec weight = exponential(load(scores + j) - most);
        store(scores + j, weight);
        sums += weight;
    }
    rows->total[r] += sum(sums);
}

/* Positions of a sequence: [begin, end) of its block table, keys and values of one head. */
typedef struct {
    const int32_t *table;
    int64_t head, begin, end;
} Span;

/* The addresses of the keys in the tile at `first`, as far as the span has them; zeros elsewhere. */
static void find(const Cache *cache, Span span, int64_t first, const float **keys) {
    const int64_t size = cache->block_size, D = cache->head_size;
    const int to = span.end - first < KEYS ? (int)(span.end - first) : KEYS;
    int j = span.begin > first ? (int)(span.begin - first) : 0;
    for (int i = 0; i < KEYS; i++) keys[i] = nothing;
    int64_t place = (first + j) / size, offset = (first + j) % size;
    for (; j < to; place++, offset = 0) {
        const float *key = key_of(cache, span.table[place], span.head, offset);
        for (; j < to && offset < size; j++, offset++, key += D) keys[j] = key;
    }
}

/* Add the keys [from, to) of the tile at `first` to the rows [start, stop), which see some of them. */
static void attend_tile(const Queries *queries, int start, int stop, int64_t first, int from, int to,
                        const float *const *keys, const float *const *later, int64_t value_offset,
                        int64_t D, float scale, Rows *rows) {
    for (int r = start; r < stop; r += SCORED) {
        const int some = stop - r < SCORED ? stop - r : SCORED;
        score_some(some, queries->q + r, keys, r == start ? later : 0, to, D, scale,
                   rows->scores + r);
        for (int i = r; i < r + some; i++)
            weigh(rows, i, queries->begin[i] - first, queries->end[i] - first, D);
    }
    for (int r = start; r < stop; r += 4)
        gather_some(stop - r < 4 ? stop - r : 4, rows->scores + r, keys, r == start ? later : 0,
                    value_offset, from, to, D, rows->out + r);
}

/* The attention of some rows to the keys of a span, and prefetches for the span after it. Rows without
   keys in a tile are skipped, so that a row's tiles do not depend on the other rows. Positions before
   the first row's window are not read: their blocks may belong to others. */
static void attend(const Queries *queries, const Cache *cache, Span span, float scale, Span after) {
    const int64_t D = cache->head_size;
    const float *tiles[2][KEYS];
    Rows rows;
    for (int r = 0; r < queries->rows; r++) {
        rows.most[r] = -INFINITY, rows.total[r] = 0;
        memset(rows.out[r], 0, (size_t)D * 4);
    }
    int64_t first = span.begin / KEYS * KEYS;
    find(cache, span, first, tiles[0]);
    for (int turn = 0; first < span.end; first += KEYS, turn = !turn) {
        const float **keys = tiles[turn], **later = tiles[!turn];
        const int count = span.end - first < KEYS ? (int)(span.end - first) : KEYS;
        const int is_last = first + KEYS >= span.end;
        if (is_last) find(cache, after, after.begin / KEYS * KEYS, later);
        else find(cache, span, first + KEYS, later);
        int started = 0, stop = queries->rows; /* rows that see these keys; later rows see later ones */
        while (queries->end[started] <= first) started++;
        while (queries->begin[stop - 1] >= first + KEYS) stop--;
        attend_tile(queries, started, stop, first, first < span.begin ? (int)(span.begin - first) : 0,
                    count, keys, later, cache->value_offset, D, scale, &rows);
        for (int j = count; is_last && j < KEYS && later[j] != nothing; j++)
            for (int64_t d = 0; d < D; d += 16) { /* those that this tile was too short for */
                __builtin_prefetch(later[j] + d);
                __builtin_prefetch(later[j] + d + cache->value_offset);
            }
    }
    for (int r = 0; r < queries->rows; r++) {
        const float inverse = 1.0f / rows.total[r];
        for (int64_t d = 0; d < D; d++) queries->out[r][d] = rows.out[r][d] * inverse;
    }
}

/* The first of `end` positions that the last of them sees through a window; 0: no window. */
ALWAYS int64_t first_seen(int64_t end, int64_t window) {
    return window && end > window ? end - window : 0;
}

/* Attention of the q in qkv rows, to out[M, H D]. Sequence s has rows [starts[s], starts[s + 1]),
   the last of its ends[s] tokens; each row sees the tokens of the sequence up to itself, or only the
   last `window` of these. A task is (sequence, first row), with at most `tokens` rows. It computes
   one key-value head at a time, or, if `split` is above 1, a part of the query heads of one. */
static void share_attention(Member *me, const float *qkv, int64_t H, const Cache *cache, const int32_t *tables,
                            int64_t table_width, const int32_t *starts, const int32_t *ends,
                            int64_t window, double scale, const int32_t *tasks, int64_t num_tasks,
                            int64_t tokens, int64_t split, float *out) {
    const int64_t G = cache->heads, D = cache->head_size, group = H / G / split;
    const int64_t stride = (H + 2 * G) * D;
    for (int64_t task; (task = next_task(me, num_tasks * G * split)) >= 0;) {
        const int64_t s = tasks[2 * (task / (G * split))], part = task % (G * split);
        const int64_t begin = tasks[2 * (task / (G * split)) + 1], rows = starts[s + 1];
        const int64_t end = begin + tokens < rows ? begin + tokens : rows;
        Queries queries = {.rows = 0};
        for (int64_t m = begin; m < end; m++)
            for (int64_t h = part * group; h < (part + 1) * group; h++) {
                const int64_t seen = ends[s] - (rows - 1 - m);
                queries.q[queries.rows] = qkv + m * stride + h * D;
                queries.out[queries.rows] = out + m * H * D + h * D;
                queries.begin[queries.rows] = first_seen(seen, window);
                queries.end[queries.rows++] = seen;
            }
        const Span span = {tables + s * table_width, part / split, queries.begin[0],
                           queries.end[queries.rows - 1]};
        Span after = {.begin = 0};
        if (task + 1 < num_tasks * G * split) {
            const int32_t *then = tasks + 2 * ((task + 1) / (G * split));
            const int64_t seen = ends[then[0]] - (starts[then[0] + 1] - 1 - then[1]);
            after = (Span){tables + then[0] * table_width, (task + 1) % (G * split) / split,
                           first_seen(seen, window), ends[then[0]]};
        }
        attend(&queries, cache, span, (float)scale, after);
    }
}
