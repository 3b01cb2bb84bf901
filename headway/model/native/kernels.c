/* What a decoder does on a CPU, one function a step of it; the torch twin of each is in ops.py.

   Every output element is summed in one order that depends on its own row alone: never on how many
   rows there are, how a prompt was cut, or which blocks hold its keys. So a request's arithmetic is
   the same to the bit whatever shares its batch. Plain C with the compiler's vectors; only the
   integer dot product and the half floats name an instruction set. Threads are torch's own.

   Letters: M rows (tokens), K inputs, N outputs, H query heads, G key-value heads, D head size. */

#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define VECS 2      /* vectors in a panel of weights */
#define MOST_ROWS 12 /* of a tile: rows x vectors accumulators, and what they need, fill the registers */
#elif defined(__AVX2__)
#define LANES 8
#define VECS 2
#define MOST_ROWS 6
#else
#define LANES 4
#define VECS 4
#define MOST_ROWS 6
#endif
#define PANEL (LANES * VECS) /* outputs computed together */
#define ROWS_IN_CACHE 96
#define AHEAD 64 /* inputs for which weights are fetched before they are needed */
#define GROUP 32 /* inputs that share a scale, where weights are quantized */
#define KEYS 64  /* positions attended to at a time, counted from the sequence's start */
#define MOST_QUERIES 32
#define MOST_HEAD 256
#define SPINS 2000
#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif
#define ALWAYS static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

ALWAYS vec load(const float *p) { return *(const loose *)p; }
ALWAYS void store(float *p, vec v) { *(loose *)p = v; }
ALWAYS vec splat(float x) { return x - (vec){0}; }
ALWAYS vec either(ivec which, vec a, vec b) { return (vec)((which & (ivec)a) | (~which & (ivec)b)); }
ALWAYS vec larger(vec a, vec b) { return either(a > b, a, b); }

ALWAYS float sum(vec v) {
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

ALWAYS float largest(vec v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* e^x to about one unit in the last place; 0 below e^-87, so that a masked score weighs nothing. */
ALWAYS vec exponential(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    ivec vanishes = x < splat(-87.0f);
    vec t = larger(either(x < splat(88.0f), x, splat(88.0f)), splat(-87.0f));
    vec whole = (t * 1.44269504f + magic) - magic;
    vec r = t - whole * 0.693359375f;
    r = r - whole * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    ivec power = (__builtin_convertvector(whole, ivec) + 127) << 23;
    return (vec)((ivec)(p * (vec)power) & ~vanishes);
}

/* Threads that do a piece of work together meet between its steps. They spin only for a moment: on a
   busy machine the one they wait for needs the core. */
typedef struct {
    int32_t arrived, round;
} Meeting;

static void meet(Meeting *m) {
    const int32_t all = omp_get_num_threads(), round = __atomic_load_n(&m->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&m->arrived, 1, __ATOMIC_ACQ_REL) == all) {
        m->arrived = 0;
        __atomic_store_n(&m->round, round + 1, __ATOMIC_RELEASE);
    } else
        for (int i = 0; __atomic_load_n(&m->round, __ATOMIC_ACQUIRE) == round; i++)
            if (i < SPINS) PAUSE();
            else sched_yield();
}

/* What Python must know to lay weights out: lanes, panel, whether 8-bit weights are stored signed. */
void layout(int64_t *out);

/* ---- Matrix products ------------------------------------------------------------------------ */

/* y[rows, PANEL] of x[rows, K] and one panel of weights [K, PANEL]. */
ALWAYS void tile(const int rows, const float *x, int64_t stride, const float *w, int64_t K,
                 float out[MOST_ROWS][PANEL]) {
    vec sums[MOST_ROWS][VECS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sums[r][v] = (vec){0};
    for (int64_t k = 0; k < K; k++) {
        vec b[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) b[v] = load(w + k * PANEL + v * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < PANEL; i += 16) __builtin_prefetch(w + (k + AHEAD) * PANEL + i);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sums[r][v] += x[r * stride + k] * b[v];
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) store(out[r] + v * LANES, sums[r][v]);
}

static void tile_of(int rows, const float *x, int64_t stride, const float *w, int64_t K,
                    float out[MOST_ROWS][PANEL]) {
    switch (rows) {
#define CASE(n) case n: tile(n, x, stride, w, K, out); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MOST_ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

/* A finished tile goes out: with its bias, onto what is there already if `adds`. */
ALWAYS void put(float *y, const float *from, const float *bias, int count, int adds) {
    for (int i = 0; i < count; i++) {
        float value = bias ? from[i] + bias[i] : from[i];
        y[i] = adds ? y[i] + value : value;
    }
}

/* y[M, N] = x[M, K] w + bias, or added to y; w in panels [ceil(N / PANEL), K, PANEL]. The share_...
   functions are done by all threads of a team together; the others start a team. */
static void share_linear(const float *x, int64_t M, int64_t K, const float *w, int64_t N,
                         const float *bias, float *y, int64_t adds) {
    const int64_t panels = (N + PANEL - 1) / PANEL;
    for (int64_t from = 0; from < M; from += ROWS_IN_CACHE) {
        const int64_t to = from + ROWS_IN_CACHE < M ? from + ROWS_IN_CACHE : M;
#pragma omp for schedule(dynamic, 3) nowait
        for (int64_t p = 0; p < panels; p++) {
            float out[MOST_ROWS][PANEL];
            const int64_t first = p * PANEL;
            const int width = N - first < PANEL ? (int)(N - first) : PANEL;
            for (int64_t m = from; m < to; m += MOST_ROWS) {
                const int rows = to - m < MOST_ROWS ? (int)(to - m) : MOST_ROWS;
                tile_of(rows, x + m * K, K, w + p * K * PANEL, K, out);
                for (int r = 0; r < rows; r++)
                    put(y + (m + r) * N + first, out[r], bias ? bias + first : 0, width, (int)adds);
            }
        }
    }
}

void linear(const float *x, int64_t M, int64_t K, const float *w, int64_t N, const float *bias,
            float *y, int64_t adds) {
#pragma omp parallel
    share_linear(x, M, K, w, N, bias, y, adds);
}

/* ---- Matrix products with quantized weights ------------------------------------------------- */

/* Weights are scale * q + minimum over groups of 32 inputs, q of 4 or 8 bits. Inputs are rounded to
   8 bits a group: x = s * i. Then w.x = scale * s * (q.i) + minimum * (s * sum of i), and q.i is a
   dot product of bytes. A panel holds LANES outputs; of each group first the q, four inputs of an
   output side by side (4-bit: two such quads share a byte, low half first), then the halves.
   `dot` adds the products of four inputs of a row, one of QUANT_ROWS whose quads lie side by side. */

ALWAYS int32_t four(const int8_t *x) {
    int32_t together;
    memcpy(&together, x, 4);
    return together;
}

#if defined(__AVX512VNNI__)
#define SIGNED 0
typedef __m512i bytes;
ALWAYS bytes load_bytes(const uint8_t *p) { return _mm512_loadu_si512(p); }
ALWAYS bytes low(bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
ALWAYS bytes high(bytes b) { return low(_mm512_srli_epi16(b, 4)); }
ALWAYS ivec dot(ivec sums, bytes q, const int8_t *quads, const int row) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, q, _mm512_set1_epi32(four(quads + 4 * row)));
}
ALWAYS vec load_halves(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define SIGNED 1
typedef __m256i bytes;
ALWAYS bytes load_bytes(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
ALWAYS bytes low(bytes b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
ALWAYS bytes high(bytes b) { return low(_mm256_srli_epi16(b, 4)); }
ALWAYS ivec dot(ivec sums, bytes q, const int8_t *quads, const int row) {
    __m256i x = _mm256_set1_epi32(four(quads + 4 * row));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(x, q));
    return sums + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
ALWAYS vec load_halves(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define SIGNED 1
typedef uint8x16_t bytes;
ALWAYS bytes load_bytes(const uint8_t *p) { return vld1q_u8(p); }
ALWAYS bytes low(bytes b) { return vandq_u8(b, vdupq_n_u8(15)); }
ALWAYS bytes high(bytes b) { return vshrq_n_u8(b, 4); }
ALWAYS ivec dot(ivec sums, bytes q, const int8_t *quads, const int row) {
    int8x16_t w = vreinterpretq_s8_u8(q), x = vld1q_s8(quads + row / 4 * 16); /* of four rows */
    switch (row % 4) {
    case 0: return (ivec)vdotq_laneq_s32((int32x4_t)sums, w, x, 0);
    case 1: return (ivec)vdotq_laneq_s32((int32x4_t)sums, w, x, 1);
    case 2: return (ivec)vdotq_laneq_s32((int32x4_t)sums, w, x, 2);
    default: return (ivec)vdotq_laneq_s32((int32x4_t)sums, w, x, 3);
    }
}
ALWAYS vec load_halves(const uint16_t *p) {
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
#else
#define SIGNED 1
typedef struct { uint8_t b[LANES * 4]; } bytes;
ALWAYS bytes load_bytes(const uint8_t *p) { bytes b; memcpy(&b, p, sizeof b); return b; }
ALWAYS bytes low(bytes b) { for (int i = 0; i < LANES * 4; i++) b.b[i] &= 15; return b; }
ALWAYS bytes high(bytes b) { for (int i = 0; i < LANES * 4; i++) b.b[i] >>= 4; return b; }
ALWAYS ivec dot(ivec sums, bytes q, const int8_t *quads, const int row) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++) sums[i] += (int8_t)q.b[4 * i + j] * quads[4 * row + j];
    return sums;
}
ALWAYS vec load_halves(const uint16_t *p) {
    vec v;
    for (int i = 0; i < LANES; i++) { /* normal halves and zero; smaller ones are as good as zero */
        uint32_t bits = (uint32_t)(p[i] & 0x8000) << 16, rest = p[i] & 0x7fff;
        if (rest >= 0x400) bits |= (rest << 13) + ((127 - 15) << 23);
        float f;
        memcpy(&f, &bits, 4);
        v[i] = f;
    }
    return v;
}
#endif

#define GROUP_BYTES(bits) (LANES * GROUP * (bits) / 8 + LANES * 4)
#define QUANT_ROWS 8
#define FETCHED 4096 /* bytes ahead that quantized weights are fetched */
#define QUANT_PANELS 4 /* outputs of a task: so many panels */

void layout(int64_t *out) { out[0] = LANES, out[1] = PANEL, out[2] = SIGNED; }

/* A row to 8 bits: i, and for every group its step s and s * sum of i. QUANT_ROWS rows lie turned
   side by side: quads of them, steps of them, sums of them. */
static void quantize_row(const float *x, int64_t K, int8_t *q, float *steps, float *sums) {
    for (int64_t g = 0; g < K / GROUP; g++, x += GROUP) {
        float most = 0;
        for (int i = 0; i < GROUP; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        float inverse = most > 0 ? 127.0f / most : 0;
        int total = 0;
        int8_t rounded[GROUP];
        for (int i = 0; i < GROUP; i++) rounded[i] = (int8_t)lrintf(x[i] * inverse);
        for (int i = 0; i < GROUP; i++) total += rounded[i];
        for (int i = 0; i < GROUP; i += 4) memcpy(q + (g * GROUP + i) * QUANT_ROWS, rounded + i, 4);
        steps[g * QUANT_ROWS] = most / 127.0f;
        sums[g * QUANT_ROWS] = steps[g * QUANT_ROWS] * (float)total;
    }
}

ALWAYS void quantized_tile(const int rows, const int panels, const int bits, const uint8_t *w,
                           int64_t K, const int8_t *x, const float *steps, const float *totals,
                           float out[QUANT_ROWS][QUANT_PANELS * LANES]) {
    const int64_t groups = K / GROUP, panel = groups * GROUP_BYTES(bits);
    vec sums[QUANT_ROWS][QUANT_PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) sums[r][p] = (vec){0};
    for (int64_t g = 0; g < groups; g++) {
        ivec dots[QUANT_ROWS][QUANT_PANELS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) dots[r][p] = (ivec){0};
        const uint8_t *group = w + g * GROUP_BYTES(bits);
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 16
            for (int i = 0; i < GROUP_BYTES(bits); i += 64)
                __builtin_prefetch(group + p * panel + FETCHED + i);
#pragma GCC unroll 8
        for (int j = 0; j < bits; j++) {
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                bytes b = load_bytes(group + p * panel + j * LANES * 4);
                const int8_t *from = x + (g * GROUP + j * (32 / bits)) * QUANT_ROWS;
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    if (bits == 4) {
                        dots[r][p] = dot(dots[r][p], low(b), from, r);
                        dots[r][p] = dot(dots[r][p], high(b), from + QUANT_ROWS * 4, r);
                    } else
                        dots[r][p] = dot(dots[r][p], b, from, r);
                }
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const uint16_t *halves = (const uint16_t *)(group + p * panel + LANES * 4 * bits);
            vec scale = load_halves(halves), minimum = load_halves(halves + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vec part = __builtin_convertvector(dots[r][p], vec) * steps[g * QUANT_ROWS + r];
                sums[r][p] += part * scale;
                sums[r][p] += minimum * totals[g * QUANT_ROWS + r];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) store(out[r] + p * LANES, sums[r][p]);
}

/* QUANT_PANELS panels for some rows, in pieces that fit the registers. */
ALWAYS void quantized_tiles(const int rows, const int bits, const uint8_t *w, int64_t K,
                            const int8_t *x, const float *steps, const float *totals,
                            float out[QUANT_ROWS][QUANT_PANELS * LANES]) {
    const int together = rows == 1 ? 4 : rows <= 4 ? 2 : 1;
    for (int p = 0; p < QUANT_PANELS; p += together)
        quantized_tile(rows, together, bits, w + p * (K / GROUP) * GROUP_BYTES(bits), K, x, steps,
                       totals, (float(*)[QUANT_PANELS * LANES])(out[0] + p * LANES));
}

static void quantized_tiles_of(int rows, int64_t bits, const uint8_t *w, int64_t K, const int8_t *x,
                               const float *steps, const float *totals,
                               float out[QUANT_ROWS][QUANT_PANELS * LANES]) {
#define CASE(n)                                                                  \
    case n:                                                                      \
        if (bits == 4) quantized_tiles(n, 4, w, K, x, steps, totals, out);       \
        else quantized_tiles(n, 8, w, K, x, steps, totals, out);                 \
        break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
}

/* As `linear`, with quantized weights; panels are a multiple of QUANT_PANELS. The scratch is as
   large as x, with M rounded up to QUANT_ROWS. */
static void share_quantized_linear(const float *x, int64_t M, int64_t K, const uint8_t *w, int64_t N,
                                   int64_t bits, const float *bias, float *y, int64_t adds,
                                   float *scratch, Meeting *meeting) {
    const int64_t groups = K / GROUP, panel = groups * GROUP_BYTES(bits), width = QUANT_PANELS * LANES;
    const int64_t tasks = (N + width - 1) / width;
    const int64_t whole = (M + QUANT_ROWS - 1) / QUANT_ROWS * QUANT_ROWS;
    float *steps = scratch, *totals = steps + whole * groups;
    int8_t *q = (int8_t *)(totals + whole * groups);
#pragma omp for schedule(static) nowait
    for (int64_t m = 0; m < M; m++) {
        const int64_t tile = m / QUANT_ROWS * QUANT_ROWS, row = m % QUANT_ROWS;
        quantize_row(x + m * K, K, q + tile * K + row * 4, steps + tile * groups + row,
                     totals + tile * groups + row);
    }
    meet(meeting);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t task = 0; task < tasks; task++) {
        float out[QUANT_ROWS][QUANT_PANELS * LANES];
        const int64_t first = task * width;
        const int count = N - first < width ? (int)(N - first) : (int)width;
        for (int64_t m = 0; m < M; m += QUANT_ROWS) {
            const int rows = M - m < QUANT_ROWS ? (int)(M - m) : QUANT_ROWS;
            quantized_tiles_of(rows, bits, w + task * QUANT_PANELS * panel, K, q + m * K,
                               steps + m * groups, totals + m * groups, out);
            for (int r = 0; r < rows; r++)
                put(y + (m + r) * N + first, out[r], bias ? bias + first : 0, count, (int)adds);
        }
    }
}

void quantized_linear(const float *x, int64_t M, int64_t K, const uint8_t *w, int64_t N, int64_t bits,
                      const float *bias, float *y, int64_t adds, float *scratch) {
    Meeting meeting = {0, 0};
#pragma omp parallel
    share_quantized_linear(x, M, K, w, N, bits, bias, y, adds, scratch, &meeting);
}

/* Rows `ids` of quantized weights, as floats: the embedding of tokens. */
void quantized_rows(const int64_t *ids, int64_t M, int64_t K, const uint8_t *w, int64_t bits,
                    float *y) {
    const int64_t groups = K / GROUP;
    for (int64_t m = 0; m < M; m++) {
        const uint8_t *panel = w + ids[m] / LANES * groups * GROUP_BYTES(bits);
        const int lane = (int)(ids[m] % LANES);
        for (int64_t g = 0; g < groups; g++, panel += GROUP_BYTES(bits)) {
            const uint16_t *halves = (const uint16_t *)(panel + LANES * 4 * bits);
            const float scale = load_halves(halves)[lane], minimum = load_halves(halves + LANES)[lane];
            for (int i = 0; i < GROUP; i++) {
                const int quad = bits == 4 ? i / 8 : i / 4;
                int q = panel[quad * LANES * 4 + lane * 4 + i % 4];
                if (bits == 4) q = i / 4 % 2 ? q >> 4 : q & 15;
                else if (SIGNED) q = (int8_t)q;
                y[m * K + g * GROUP + i] = scale * (float)q + minimum;
            }
        }
    }
}

/* ---- Between the products ------------------------------------------------------------------- */

ALWAYS void normalize(const float *x, const float *weight, int64_t n, float epsilon, float *y) {
    vec squares = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) squares += load(x + i) * load(x + i);
    for (; i < n; i++) rest += x[i] * x[i];
    float factor = 1.0f / sqrtf((sum(squares) + rest) / (float)n + epsilon);
    for (i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
}

/* y[M, N] = x / root mean square of its row * weight. */
static void share_rms_norm(const float *x, const float *weight, int64_t M, int64_t N, double epsilon,
                           float *y) {
#pragma omp for schedule(static) nowait
    for (int64_t m = 0; m < M; m++) normalize(x + m * N, weight, N, (float)epsilon, y + m * N);
}

void rms_norm(const float *x, const float *weight, int64_t M, int64_t N, double epsilon, float *y) {
#pragma omp parallel if (M > 4)
    share_rms_norm(x, weight, M, N, epsilon, y);
}

/* y[M, N] = silu(x[M, :N]) * x[M, N:]. N is a multiple of LANES. */
static void share_silu_multiply(const float *x, int64_t M, int64_t N, float *y) {
#pragma omp for schedule(static) nowait
    for (int64_t v = 0; v < M * N / LANES; v++) {
        const int64_t m = v / (N / LANES), i = v % (N / LANES) * LANES;
        vec gate = load(x + m * 2 * N + i), up = load(x + m * 2 * N + N + i);
        store(y + m * N + i, gate / (1.0f + exponential(-gate)) * up);
    }
}

void silu_multiply(const float *x, int64_t M, int64_t N, float *y) {
#pragma omp parallel if (M > 4)
    share_silu_multiply(x, M, N, y);
}

/* Where one token of one head lies: block [layers, 2, G, block_size, D]. */
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

/* Rows qkv[M, (H + 2 G) D]: normalize q and k if there are weights for it, rotate them in place,
   store k and v in their slots (block * block_size + offset; negative: nowhere). */
static void share_rotate_and_store(float *qkv, int64_t M, int64_t H, const float *cosine,
                                   const float *sine, const float *q_norm, const float *k_norm,
                                   double epsilon, const int64_t *slots, const Cache *cache) {
    const int64_t G = cache->heads, D = cache->head_size, half = D / 2;
#pragma omp for schedule(static) nowait
    for (int64_t m = 0; m < M; m++) {
        float *row = qkv + m * (H + 2 * G) * D;
        for (int64_t h = 0; h < H + G; h++) {
            const float *norm = h < H ? q_norm : k_norm;
            if (norm) normalize(row + h * D, norm, D, (float)epsilon, row + h * D);
            rotate(row + h * D, cosine + m * half, sine + m * half, half);
        }
        if (slots[m] < 0) continue;
        for (int64_t g = 0; g < G; g++) {
            float *key = key_of(cache, slots[m] / cache->block_size, g, slots[m] % cache->block_size);
            memcpy(key, row + (H + g) * D, (size_t)D * 4);
            memcpy(key + cache->value_offset, row + (H + G + g) * D, (size_t)D * 4);
        }
    }
}

void rotate_and_store(float *qkv, int64_t M, int64_t H, const float *cosine, const float *sine,
                      const float *q_norm, const float *k_norm, double epsilon,
                      const int64_t *slots, const Cache *cache) {
#pragma omp parallel if (M > 4)
    share_rotate_and_store(qkv, M, H, cosine, sine, q_norm, k_norm, epsilon, slots, cache);
}

/* ---- Attention through block tables ---------------------------------------------------------- */

/* Lanes of a and b, each folded onto half as many: in every 2 * half lanes, first a's, then b's. */
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

/* Sums of the lanes of LANES vectors, as one vector. */
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

/* Some query rows of one sequence that share a key-value head. */
typedef struct {
    const float *q[MOST_QUERIES];
    float *out[MOST_QUERIES];
    int64_t end[MOST_QUERIES]; /* positions each may see */
    int rows;
    int64_t last; /* the largest of them */
} Queries;

static const float nothing[MOST_HEAD];

ALWAYS void score(const float *q, const float *const *keys, int count, int64_t D, float scale,
                  float *out) {
    for (int first = 0; first < count; first += LANES) {
        vec sums[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) sums[i] = (vec){0};
        for (int64_t d = 0; d < D; d += LANES) {
            vec part = load(q + d);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) sums[i] += part * load(keys[first + i] + d);
        }
        store(out + first, sums_of(sums) * scale);
    }
}

/* out[rows, D] += weights[rows, count] values, a few vectors of D at a time. */
ALWAYS void gather(const int rows, const int vecs, float (*weights)[KEYS], const float *const *values,
                   int count, int64_t d, float (*out)[MOST_HEAD]) {
    vec sums[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) sums[r][v] = load(out[r] + d + v * LANES);
    for (int j = 0; j < count; j++) {
        const float *from = values[j] + d;
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) {
            vec value = load(from + v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][v] += weights[r][j] * value;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) store(out[r] + d + v * LANES, sums[r][v]);
}

ALWAYS void gather_all(const int rows, float (*weights)[KEYS], const float *const *values, int count,
                       int64_t D, float (*out)[MOST_HEAD]) {
    int64_t d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES) gather(rows, 4, weights, values, count, d, out);
    for (; d < D; d += LANES) gather(rows, 1, weights, values, count, d, out);
}

/* Softmax over the keys seen so far, corrected as larger scores come: one tile of keys. */
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

/* Where the keys of positions [first, first + count) lie. */
static void find(const Cache *cache, int64_t head, const int32_t *table, int64_t first, int count,
                 const float **keys) {
    const int64_t size = cache->block_size, D = cache->head_size;
    int64_t place = first / size, offset = first % size;
    for (int j = 0; j < count; place++, offset = 0) {
        const float *key = key_of(cache, table[place], head, offset);
        for (; j < count && offset < size; j++, offset++, key += D) keys[j] = key;
    }
}

static void attend(const Queries *queries, const Cache *cache, int64_t head, const int32_t *table,
                   float scale) {
    const int64_t D = cache->head_size;
    float scores[MOST_QUERIES][KEYS], out[MOST_QUERIES][MOST_HEAD];
    float most[MOST_QUERIES], total[MOST_QUERIES];
    for (int r = 0; r < queries->rows; r++) {
        most[r] = -INFINITY, total[r] = 0;
        memset(out[r], 0, (size_t)D * 4);
    }
    for (int64_t first = 0; first < queries->last; first += KEYS) {
        const float *keys[KEYS], *values[KEYS];
        const int count = queries->last - first < KEYS ? (int)(queries->last - first) : KEYS;
        for (int j = 0; j < KEYS; j++) keys[j] = nothing;
        find(cache, head, table, first, count, keys);
        for (int j = 0; j < count; j++) values[j] = keys[j] + cache->value_offset;
        const int64_t rest = queries->last - first - KEYS;
        const int next = rest < 0 ? 0 : rest < KEYS ? (int)rest : KEYS;
        const float *later[KEYS];
        find(cache, head, table, first + KEYS, next, later);
        int started = 0; /* rows before it end before these keys; later rows see further */
        while (queries->end[started] <= first) started++;
        for (int r = started, fetched = 0; r < queries->rows; r++) {
            const int upto = next * (r - started + 1) / (queries->rows - started);
            for (; fetched < upto; fetched++) /* some before every row: memory works meanwhile */
                for (int64_t d = 0; d < D; d += 16) {
                    __builtin_prefetch(later[fetched] + d);
                    __builtin_prefetch(later[fetched] + d + cache->value_offset);
                }
            score(queries->q[r], keys, count, D, scale, scores[r]);
            weigh(scores[r], queries->end[r] - first, &most[r], &total[r], out[r], D);
        }
        int r = started;
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

/* out[M, H D] of the q in qkv rows: row i of sequence s, whose rows are [starts[s], starts[s + 1]) and
   whose last row is its token number ends[s] - 1, sees all its tokens up to itself. A task is
   (sequence, first row): at most `tokens` rows from there on; each is done a key-value head at a
   time, or with `split` a part of the query heads of one. */
static void share_attention(const float *qkv, int64_t H, const Cache *cache, const int32_t *tables,
                            int64_t table_width, const int32_t *starts, const int32_t *ends,
                            double scale, const int32_t *tasks, int64_t num_tasks, int64_t tokens,
                            int64_t split, float *out) {
    const int64_t G = cache->heads, D = cache->head_size, group = H / G / split;
    const int64_t stride = (H + 2 * G) * D;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t task = 0; task < num_tasks * G * split; task++) {
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
        attend(&queries, cache, part / split, tables + s * table_width, (float)scale);
    }
}

void attention(const float *qkv, int64_t H, const Cache *cache, const int32_t *tables,
               int64_t table_width, const int32_t *starts, const int32_t *ends, double scale,
               const int32_t *tasks, int64_t num_tasks, int64_t tokens, int64_t split, float *out) {
#pragma omp parallel
    share_attention(qkv, H, cache, tables, table_width, starts, ends, scale, tasks, num_tasks,
                    tokens, split, out);
}

/* ---- A whole layer, in one call --------------------------------------------------------------- */

typedef struct {
    const void *panels;
    const float *bias;
    int64_t outputs, inputs, bits; /* 32: floats */
} Weight;

typedef struct {
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    Weight qkv, output, gate_up, down;
    double epsilon;
} Layer;

/* What all layers of one forward pass share, and room for what passes between the products. */
typedef struct {
    Cache cache;
    int64_t rows, heads;
    const float *cosine, *sine;
    const int64_t *slots;
    const int32_t *tables, *starts, *ends, *tasks;
    int64_t table_width, num_tasks, tokens, split;
    double scale;
    float *normed, *qkv, *attended, *inner, *active, *scratch;
} Pass;

static void share_multiply(const float *x, int64_t M, const Weight *w, float *y, int64_t adds,
                           float *scratch, Meeting *meeting) {
    if (w->bits == 32)
        share_linear(x, M, w->inputs, w->panels, w->outputs, w->bias, y, adds);
    else
        share_quantized_linear(x, M, w->inputs, w->panels, w->outputs, w->bits, w->bias, y, adds,
                               scratch, meeting);
    meet(meeting);
}

static void share_layer(const Layer *l, const Pass *p, float *x, Meeting *meeting) {
    const int64_t M = p->rows, hidden = l->output.outputs;
    share_rms_norm(x, l->input_norm, M, hidden, l->epsilon, p->normed);
    meet(meeting);
    share_multiply(p->normed, M, &l->qkv, p->qkv, 0, p->scratch, meeting);
    share_rotate_and_store(p->qkv, M, p->heads, p->cosine, p->sine, l->q_norm, l->k_norm, l->epsilon,
                           p->slots, &p->cache);
    meet(meeting);
    share_attention(p->qkv, p->heads, &p->cache, p->tables, p->table_width, p->starts, p->ends,
                    p->scale, p->tasks, p->num_tasks, p->tokens, p->split, p->attended);
    meet(meeting);
    share_multiply(p->attended, M, &l->output, x, 1, p->scratch, meeting);
    share_rms_norm(x, l->post_norm, M, hidden, l->epsilon, p->normed);
    meet(meeting);
    share_multiply(p->normed, M, &l->gate_up, p->inner, 0, p->scratch, meeting);
    share_silu_multiply(p->inner, M, l->down.inputs, p->active);
    meet(meeting);
    share_multiply(p->active, M, &l->down, x, 1, p->scratch, meeting);
}

/* x[M, hidden] goes through one layer, in place, by one team of threads. */
void layer(const Layer *l, const Pass *p, float *x) {
    Meeting meeting = {0, 0};
#pragma omp parallel
    share_layer(l, p, x, &meeting);
}
