/* The parts of a layer between its products: norms, gates, rotation, attention by block tables. */

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

/* y[N] = silu(x[:N]) * x[N:]. N is a multiple of LANES. */
ALWAYS void gate(const float *x, int64_t N, float *y) {
    for (int64_t i = 0; i < N; i += LANES) {
        vec gate = load(x + i), up = load(x + N + i);
        store(y + i, gate / (1.0f + exponential(-gate)) * up);
    }
}

/* The memory layout of keys and values: a block is [layers, 2, G, block_size, row]. A row has D floats
   (32 bits) or bytes and a scale (8 bits, kv_bytes.c). Strides and offsets are in bytes. */
typedef struct {
    char *blocks;
    int64_t block_stride, layer_offset, value_offset, row_bytes, block_size, heads, head_size, bits;
} Cache;

ALWAYS char *key_of(const Cache *c, int64_t block, int64_t head, int64_t offset) {
    return c->blocks + block * c->block_stride + c->layer_offset +
           (head * c->block_size + offset) * c->row_bytes;
}

ALWAYS void store_row(const Cache *c, const float *x, char *to) {
    if (c->bits == 8) store_bytes(x, c->head_size, to);
    else memcpy(to, x, (size_t)c->head_size * 4);
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
            char *key = key_of(cache, slots[m] / cache->block_size, g, slots[m] % cache->block_size);
            store_row(cache, row + (H + g) * D, key);
            store_row(cache, row + (H + G + g) * D, key + cache->value_offset);
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
}

/* Query rows of one sequence that share a key-value head. */
typedef struct {
    const float *q[MAX_QUERIES];
    float *out[MAX_QUERIES];
    int64_t end[MAX_QUERIES]; /* number of positions that each row sees */
    int rows;
    int64_t last; /* the largest value of `end` */
} Queries;

ALWAYS void score(const float *q, const char *const *keys, int count, int64_t D, float scale,
                  float *out) {
    for (int first = 0; first < count; first += LANES) {
        vec sums[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) sums[i] = (vec){0};
        for (int64_t d = 0; d < D; d += LANES) {
            vec part = load(q + d);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                sums[i] = multiply_add(part, load((const float *)keys[first + i] + d), sums[i]);
        }
        store(out + first, sums_of(sums) * scale);
    }
}

/* out[rows, D] += weights[rows, count] values, a few vectors of D at a time. */
ALWAYS void gather(const int rows, const int vecs, float (*weights)[KEYS], const char *const *values,
                   int count, int64_t d, float (*out)[MAX_HEAD]) {
    vec sums[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) sums[r][v] = load(out[r] + d + v * LANES);
    for (int j = 0; j < count; j++) {
        const float *from = (const float *)values[j] + d;
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) {
            vec value = load(from + v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                sums[r][v] = multiply_add(splat(weights[r][j]), value, sums[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) store(out[r] + d + v * LANES, sums[r][v]);
}

ALWAYS void gather_all(const int rows, float (*weights)[KEYS], const char *const *values, int count,
                       int64_t D, float (*out)[MAX_HEAD]) {
    int64_t d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES) gather(rows, 4, weights, values, count, d, out);
    for (; d < D; d += LANES) gather(rows, 1, weights, values, count, d, out);
}

/* Online softmax: add one tile of keys, and rescale the earlier ones if a larger score appears. */
ALWAYS void weigh(float *scores, int64_t seen, float *most, float *total, float *out, int64_t D) {
    for (int64_t j = seen < 0 ? 0 : seen; j < KEYS; j++) scores[j] = -INFINITY;
    vec top = load(scores);
    for (int j = LANES; j < KEYS; j += LANES) top = larger(top, load(scores + j));
    float now = largest(top);
    now = now > *most ? now : *most;
    float shrink = exponential(splat(*most - now))[0];
    vec sums = {0};
    for (int j = 0; j < KEYS; j += LANES) {
        vec weight = exponential(load(scores + j) - now);
        store(scores + j, weight);
        sums += weight;
    }
    *total = *total * shrink + sum(sums);
    *most = now;
    for (int64_t d = 0; d < D; d += LANES) store(out + d, load(out + d) * shrink);
}

/* The addresses of the keys of positions [first, first + count). */
static void find(const Cache *cache, int64_t head, const int32_t *table, int64_t first, int count,
                 const char **keys) {
    const int64_t size = cache->block_size;
    int64_t place = first / size, offset = first % size;
    for (int j = 0; j < count; place++, offset = 0) {
        const char *key = key_of(cache, table[place], head, offset);
        for (; j < count && offset < size; j++, offset++, key += cache->row_bytes) keys[j] = key;
    }
}

/* Keys and values that will be read later: the first `count` positions of a sequence. */
typedef struct {
    const int32_t *table;
    int64_t head;
    int count;
} Ahead;

static void attend(const Queries *queries, const Cache *cache, int64_t head, const int32_t *table,
                   float scale, const Ahead *after) {
    const int64_t D = cache->head_size;
    const int is_bytes = cache->bits == 8;
    float scores[MAX_QUERIES][KEYS], out[MAX_QUERIES][MAX_HEAD];
    float most[MAX_QUERIES], total[MAX_QUERIES];
    Rounded rounded[MAX_QUERIES];
    for (int r = 0; r < queries->rows; r++) {
        most[r] = -INFINITY, total[r] = 0;
        memset(out[r], 0, (size_t)D * 4);
        if (is_bytes) round_all(queries->q[r], D, &rounded[r]);
    }
    for (int64_t first = 0; first < queries->last; first += KEYS) {
        const char *keys[KEYS], *values[KEYS];
        const int count = queries->last - first < KEYS ? (int)(queries->last - first) : KEYS;
        for (int j = 0; j < KEYS; j++) keys[j] = values[j] = (const char *)nothing;
        find(cache, head, table, first, count, keys);
        for (int j = 0; j < count; j++) values[j] = keys[j] + cache->value_offset;
        const int64_t rest = queries->last - first - KEYS;
        const int next = rest <= 0 ? after->count : rest < KEYS ? (int)rest : KEYS;
        const char *later[KEYS];
        if (rest > 0) find(cache, head, table, first + KEYS, next, later);
        else find(cache, after->head, after->table, 0, next, later);
        int started = 0; /* first row that sees these keys; later rows see more positions */
        while (queries->end[started] <= first) started++;
        for (int r = started, fetched = 0; r < queries->rows; r++) {
            const int upto = next * (r - started + 1) / (queries->rows - started);
            for (; fetched < upto; fetched++) /* prefetch a part of what comes next before each row */
                for (int64_t at = 0; at < cache->row_bytes; at += 64) {
                    __builtin_prefetch(later[fetched] + at, 0, 2);
                    __builtin_prefetch(later[fetched] + at + cache->value_offset, 0, 2);
                }
            if (is_bytes) score_bytes(&rounded[r], keys, count, D, scale, scores[r]);
            else score(queries->q[r], keys, count, D, scale, scores[r]);
            weigh(scores[r], queries->end[r] - first, &most[r], &total[r], out[r], D);
        }
        int r = started;
        if (is_bytes) {
            add_values(scores + r, queries->rows - r, values, count, D, out + r);
            continue;
        }
        for (; r + 4 <= queries->rows; r += 4) gather_all(4, scores + r, values, count, D, out + r);
        switch (queries->rows - r) {
        case 3: gather_all(3, scores + r, values, count, D, out + r); break;
        case 2: gather_all(2, scores + r, values, count, D, out + r); break;
        case 1: gather_all(1, scores + r, values, count, D, out + r); break;
        }
    }
    for (int r = 0; r < queries->rows; r++)
        for (int64_t d = 0; d < D; d++) queries->out[r][d] = out[r][d] / total[r];
}

/* Attention of the q in qkv rows, to out[M, H D]. Sequence s has rows [starts[s], starts[s + 1]),
   the last of its ends[s] tokens; each row sees all tokens of the sequence up to itself. A task is
   (sequence, first row), with at most `tokens` rows. It computes one key-value head at a time, or,
   if `split` is above 1, a part of the query heads of one. */
static void share_attention(Member *me, const float *qkv, int64_t H, const Cache *cache, const int32_t *tables,
                            int64_t table_width, const int32_t *starts, const int32_t *ends,
                            double scale, const int32_t *tasks, int64_t num_tasks, int64_t tokens,
                            int64_t split, float *out) {
    const int64_t G = cache->heads, D = cache->head_size, group = H / G / split;
    const int64_t stride = (H + 2 * G) * D;
    for (int64_t task; (task = next_task(me, num_tasks * G * split)) >= 0;) {
        const int64_t s = tasks[2 * (task / (G * split))], part = task % (G * split);
        const int64_t begin = tasks[2 * (task / (G * split)) + 1], rows = starts[s + 1];
        const int64_t end = begin + tokens < rows ? begin + tokens : rows;
        Queries queries = {.rows = 0};
        for (int64_t m = begin; m < end; m++)
            for (int64_t h = part * group; h < (part + 1) * group; h++) {
                queries.q[queries.rows] = qkv + m * stride + h * D;
                queries.out[queries.rows] = out + m * H * D + h * D;
                queries.end[queries.rows++] = queries.last = ends[s] - (rows - 1 - m);
            }
        Ahead after = {.count = 0};
        if (task + 1 < num_tasks * G * split) {
            const int64_t next = tasks[2 * ((task + 1) / (G * split))];
            after = (Ahead){tables + next * table_width, (task + 1) % (G * split) / split,
                            ends[next] < KEYS ? ends[next] : KEYS};
        }
        attend(&queries, cache, part / split, tables + s * table_width, (float)scale, &after);
    }
}
