/* Products of many rows with quantized weights, with the byte tiles of AMX.

   One instruction multiplies a group of 16 rows with a group of 16 outputs. The dot products are
   integers, equal to those of `dot`, and `add_group` adds them in the same order. The instructions
   are inline assembly, because GCC 12 removes memory that only its own tile functions read. */

#include <sys/syscall.h>
#include <unistd.h>

#define MIN_ROWS 32 /* from this number of rows, expanding the weights pays off */
#define MAX_INPUTS 16384 /* limit for panels that are expanded on the stack (one megabyte) */
#define USE_TILES(M, K) (has_tiles && (M) >= MIN_ROWS && (K) <= MAX_INPUTS)
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_STATE 18

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t columns[16]; /* in bytes */
    uint8_t rows[16];
} Shapes;

/* One group of a panel, expanded to one byte per q. */
typedef struct {
    uint8_t q[GROUP / 4][LANES * 4];
    float scale[LANES], minimum[LANES];
} __attribute__((aligned(64))) Expanded;

typedef int32_t Dots[INTERLEAVED][LANES] __attribute__((aligned(64)));

static int has_tiles;

/* Linux lets a process use tiles only after it has requested permission. */
__attribute__((constructor)) static void request_tiles(void) {
    has_tiles = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_STATE) == 0;
}

/* Tiles 0 and 1 hold dot products, 2 and 3 inputs, 4 and 5 weights. */
static void begin_tiles(void) {
    const Shapes shapes = {.palette = 1,
                           .columns = {LANES * 4, LANES * 4, GROUP, GROUP, LANES * 4, LANES * 4},
                           .rows = {INTERLEAVED, INTERLEAVED, INTERLEAVED, INTERLEAVED, GROUP / 4, GROUP / 4}};
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}

static void end_tiles(void) { __asm__ volatile("tilerelease"); }

#define MULTIPLY(dots, inputs, weights, x, w)                                        \
    __asm__ volatile("tileloadd (%0,%2,1), %%tmm" #inputs "\n\t"                     \
                     "tileloadd (%1,%3,1), %%tmm" #weights "\n\t"                    \
                     "tilezero %%tmm" #dots "\n\t"                                   \
                     "tdpbsud %%tmm" #weights ", %%tmm" #inputs ", %%tmm" #dots      \
                     :                                                               \
                     : "r"(x), "r"(w), "r"((int64_t)GROUP), "r"((int64_t)LANES * 4)  \
                     : "memory")
#define STORE(dots, to)                                                              \
    __asm__ volatile("tilestored %%tmm" #dots ", (%0,%1,1)"                          \
                     :                                                               \
                     : "r"(to), "r"((int64_t)LANES * 4)                              \
                     : "memory")

/* Expand the groups of panels, one after the other. */
ALWAYS void expand(const uint8_t *panel, int64_t bits, int64_t groups, Expanded *expanded) {
    for (int64_t g = 0; g < groups; g++, panel += GROUP_BYTES(bits), expanded++) {
        for (int j = 0; j < PACKED(bits); j++) {
            const bytes b = load_bytes(panel + j * LANES * 4);
            __builtin_prefetch(panel + j * LANES * 4 + PREFETCH_BYTES);
            _mm512_store_si512(expanded->q[bits == 8 ? j : 2 * j], bits == 8 ? b : half_of(b, 0, bits));
            if (bits != 8) _mm512_store_si512(expanded->q[2 * j + 1], half_of(b, 1, bits));
        }
        const uint16_t *halves = (const uint16_t *)(panel + LANES * 4 * PACKED(bits));
        store(expanded->scale, load_halves(halves));
        store(expanded->minimum, load_halves(halves + LANES));
    }
}

/* Convert dot products to floats by adding 1.5 * 2^23, first to the bits, then to the value: while
   tiles are in use, the processor has one port for conversions and products but two for sums. */
ALWAYS void add_dots(vec sums[INTERLEAVED], const Expanded *w, QuantizedRows x, int64_t g, const Dots dots) {
    const vec scale = load(w[g].scale), minimum = load(w[g].minimum);
#pragma GCC unroll 16
    for (int r = 0; r < INTERLEAVED; r++) {
        const vec whole = (vec)(*(const ivec *)dots[r] + 0x4b400000) - 12582912.0f;
        sums[r] = add_group(sums[r], whole, scale, minimum, x, g * INTERLEAVED + r);
    }
}

/* INTERLEAVED rows of one panel. Computing, storing and using dot products alternate, two groups each,
   to hide the latency of each step. */
static void expanded_tile(const Expanded *w, QuantizedRows x, float out[INTERLEAVED][LANES]) {
    const int64_t groups = x.K / GROUP;
    Dots dots[4];
    vec sums[INTERLEAVED];
#pragma GCC unroll 16
    for (int r = 0; r < INTERLEAVED; r++) sums[r] = (vec){0};
    for (int64_t g = 0; g < groups + 2; g += 2) {
        if (g < groups) MULTIPLY(0, 2, 4, x.q + g * GROUP * INTERLEAVED, w + g);
        STORE(1, dots[(g + 3) % 4]);
        if (g >= 2) add_dots(sums, w, x, g - 2, dots[(g + 2) % 4]);
        if (g + 1 < groups) MULTIPLY(1, 3, 5, x.q + (g + 1) * GROUP * INTERLEAVED, w + g + 1);
        STORE(0, dots[g % 4]);
        if (g >= 2 && g - 1 < groups) add_dots(sums, w, x, g - 1, dots[(g + 3) % 4]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < INTERLEAVED; r++) store(out[r], sums[r]);
}

/* Like panels_task. */
static void tiles_task(int64_t task, QuantizedRows x, int64_t M, const uint8_t *w, int64_t N,
                       int64_t bits, const float *bias, float *y, int64_t adds) {
    const int64_t groups = x.K / GROUP, panel = groups * GROUP_BYTES(bits);
    const int64_t from = task * QUANT_PANELS * LANES;
    const int64_t to = from + QUANT_PANELS * LANES < N ? from + QUANT_PANELS * LANES : N;
    const int64_t panels = (to - from + LANES - 1) / LANES;
    const uint8_t *narrow = w + from / LANES * panel;
    Expanded expanded[QUANT_PANELS * groups];
    begin_tiles();
    if (bits == 4) expand(narrow, 4, panels * groups, expanded);
    else if (bits == CODED) expand(narrow, CODED, panels * groups, expanded);
    else expand(narrow, 8, panels * groups, expanded);
    for (int64_t m = 0; m < M; m += INTERLEAVED) {
        const int rows = M - m < INTERLEAVED ? (int)(M - m) : INTERLEAVED;
        for (int64_t n = from; n < to; n += LANES) {
            float out[INTERLEAVED][LANES];
            for (int r = 0; r < rows; r++) fetch(y + (m + r) * N + n, LANES);
            expanded_tile(expanded + (n - from) / LANES * groups, from_row(x, m), out);
            for (int r = 0; r < rows; r++)
                put(y + (m + r) * N + n, out[r], bias ? bias + n : 0,
                    to - n < LANES ? (int)(to - n) : LANES, (int)adds);
        }
    }
    end_tiles();
}
