/* The parts of a layer between its products: rotation, and attention by block tables. */

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

/* The angles of every position; cosine 0: no rotation. Queries are multiplied by the factors of their
   positions, if there are any. */
typedef struct {
    const float *cosine, *sine, *query_scale;
    const int64_t *positions;
} Turn;

/* Norm weights of q and k, for each head or for all heads of a row together; 0: none. */
typedef struct {
    const float *q, *k;
    float epsilon;
    int is_whole;
} HeadNorms;

ALWAYS void normalize_heads(float *x, const float *norm, int64_t heads, int64_t D, const HeadNorms *norms) {
    if (!norm) return;
    if (norms->is_whole) normalize(x, norm, heads * D, norms->epsilon, x);
    else
        for (int64_t h = 0; h < heads; h++) normalize(x + h * D, norm, D, norms->epsilon, x + h * D);
}

/* For rows qkv[M, (H + 2 G) D]: normalize q and k if there are norm weights, rotate them in place
   by the angles of their positions, and store k and v in their slots (block * block_size + offset;
   negative: do not store). */
static void share_rotate_and_store(Member *me, float *qkv, int64_t M, int64_t H, const Turn *turn,
                                   const HeadNorms *norms, const int64_t *slots, const Cache *cache) {
    const int64_t G = cache->heads, D = cache->head_size, half = D / 2;
    for (int64_t m; (m = next_task(me, M)) >= 0;) {
        float *row = qkv + m * (H + 2 * G) * D;
        const int64_t position = turn->positions[m], angle = position * half;
        normalize_heads(row, norms->q, H, D, norms);
        normalize_heads(row + H * D, norms->k, G, D, norms);
        for (int64_t h = 0; turn->cosine && h < H + G; h++)
            rotate(row + h * D, turn->cosine + angle, turn->sine + angle, half);
        for (int64_t i = 0; turn->query_scale && i < H * D; i++) row[i] *= turn->query_scale[position];
        if (slots[m] < 0) continue;
        for (int64_t g = 0; g < G; g++) {
            char *key = key_of(cache, slots[m] / cache->block_size, g, slots[m] % cache->block_size);
            store_row(cache, row + (H + g) * D, key);
            store_row(cache, row + (H + G + g) * D, key + cache->value_offset);
        }
    }
}

/* Query rows of one sequence that share a key-value head. */
typedef struct {
    const float *q[MAX_QUERIES];
    float *out[MAX_QUERIES];
    int64_t begin[MAX_QUERIES], end[MAX_QUERIES]; /* positions that each row sees: [begin, end) */
    float sinks[MAX_QUERIES]; /* a logit that belongs to no position; -INFINITY: none */
    int rows;
} Queries;

/* The state of these rows: the weights of a tile's keys, their sums so far, and the largest score. */
typedef struct {
    float scores[MAX_QUERIES][KEYS], out[MAX_QUERIES][MAX_HEAD];
    float most[MAX_QUERIES], total[MAX_QUERIES];
} Rows;

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
static void find(const Cache *cache, Span span, int64_t first, const char **keys) {
    const int64_t size = cache->block_size;
    const int to = span.end - first < KEYS ? (int)(span.end - first) : KEYS;
    int j = span.begin > first ? (int)(span.begin - first) : 0;
    for (int i = 0; i < KEYS; i++) keys[i] = (const char *)nothing;
    int64_t place = (first + j) / size, offset = (first + j) % size;
    for (; j < to; place++, offset = 0) {
        const char *key = key_of(cache, span.table[place], span.head, offset);
        for (; j < to && offset < size; j++, offset++, key += cache->row_bytes) keys[j] = key;
    }
}

/* Some keys of a tile, and the addresses of those of the next one, to be prefetched. */
typedef struct {
    const char *const *keys, *const *later;
    int64_t first; /* position of the tile */
    int from, to;  /* those of its keys that may be read */
} Tile;

/* Add a tile to the rows [start, stop), which see some of its keys. */
static void attend_floats(const Queries *queries, int start, int stop, const Cache *cache,
                          const Tile *tile, float scale, Rows *rows) {
    const int64_t D = cache->head_size;
    for (int r = start; r < stop; r += SCORED) {
        const int some = stop - r < SCORED ? stop - r : SCORED;
        score_some(some, queries->q + r, tile->keys, r == start ? tile->later : 0, tile->to, D, scale,
                   rows->scores + r);
        for (int i = r; i < r + some; i++)
            weigh(rows, i, queries->begin[i] - tile->first, queries->end[i] - tile->first, D);
    }
    for (int r = start; r < stop; r += 4)
        gather_some(stop - r < 4 ? stop - r : 4, rows->scores + r, tile->keys,
                    r == start ? tile->later : 0, cache->value_offset, tile->from, tile->to, D,
                    rows->out + r);
    for (int j = tile->to; j < KEYS; j++) /* the next tile may have more keys than this one */
        for (int64_t d = 0; d < D * 4; d += 64) {
            __builtin_prefetch(tile->later[j] + d);
            __builtin_prefetch(tile->later[j] + d + cache->value_offset);
        }
}

/* The same with keys and values in 8 bits. */
static void attend_bytes(const Queries *queries, int start, int stop, const Cache *cache,
                         const Tile *tile, float scale, const Rounded *rounded, Rows *rows) {
    const int64_t D = cache->head_size;
    const char *values[KEYS];
    for (int j = 0; j < KEYS; j++) {
        const int is_read = j >= tile->from && j < tile->to;
        values[j] = is_read ? tile->keys[j] + cache->value_offset : (const char *)nothing;
        for (int64_t at = 0; at < cache->row_bytes; at += 64) {
            __builtin_prefetch(tile->later[j] + at, 0, 2);
            __builtin_prefetch(tile->later[j] + at + cache->value_offset, 0, 2);
        }
    }
    for (int r = start; r < stop; r++) {
        score_bytes(&rounded[r], tile->keys, tile->to, D, scale, rows->scores[r]);
        weigh(rows, r, queries->begin[r] - tile->first, queries->end[r] - tile->first, D);
    }
    add_values(rows->scores + start, stop - start, values, tile->to, D, rows->out + start);
}

/* The attention of some rows to the keys of a span, and prefetches for the span after it. Rows without
   keys in a tile are skipped, so that a row's tiles do not depend on the other rows. Positions before
   the first row's window are not read: their blocks may belong to others. */
static void attend(const Queries *queries, const Cache *cache, Span span, float scale, Span after) {
    const int64_t D = cache->head_size;
    const char *tiles[2][KEYS];
    Rounded rounded[MAX_QUERIES];
    Rows rows;
    for (int r = 0; r < queries->rows; r++) {
        rows.most[r] = queries->sinks[r], rows.total[r] = queries->sinks[r] > -INFINITY;
        memset(rows.out[r], 0, (size_t)D * 4);
        if (cache->bits == 8) round_all(queries->q[r], D, &rounded[r]);
    }
    int64_t first = span.begin / KEYS * KEYS;
    find(cache, span, first, tiles[0]);
    for (int turn = 0; first < span.end; first += KEYS, turn = !turn) {
        const int is_last = first + KEYS >= span.end;
        if (is_last) find(cache, after, after.begin / KEYS * KEYS, tiles[!turn]);
        else find(cache, span, first + KEYS, tiles[!turn]);
        const Tile tile = {tiles[turn], tiles[!turn], first,
                           first < span.begin ? (int)(span.begin - first) : 0,
                           is_last ? (int)(span.end - first) : KEYS};
        int start = 0, stop = queries->rows; /* rows that see these keys; later rows see later ones */
        while (queries->end[start] <= first) start++;
        while (queries->begin[stop - 1] >= first + KEYS) stop--;
        if (cache->bits == 8) attend_bytes(queries, start, stop, cache, &tile, scale, rounded, &rows);
        else attend_floats(queries, start, stop, cache, &tile, scale, &rows);
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
   last `window` of these, and the sink of its head, if there are sinks. A task is (sequence, first
   row), with at most `tokens` rows. It computes one key-value head at a time, or, if `split` is above
   1, a part of the query heads of one. */
static void share_attention(Member *me, const float *qkv, const float *sinks, int64_t H, const Cache *cache,
                            const int32_t *tables, int64_t table_width, const int32_t *starts, const int32_t *ends,
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
                queries.sinks[queries.rows] = sinks ? sinks[h] : -INFINITY;
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
