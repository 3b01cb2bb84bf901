/* The layout of quantized weights and inputs, dot products of bytes, and float16 conversion.

   Weights are scale * q + minimum in groups of 32 inputs, with q of 4 or 8 bits. A panel contains
   LANES outputs. For each group it has first the q, four inputs of each output next to each other
   (4-bit: two such quads share a byte, low nibble first), then scales and minimums as float16. With
   CODED in place of bits, q are the numbers of MXFP4, twice as large and 12 more, in codes of 4 bits.
   `dot` adds the products of four inputs of a row. */

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__linux__)
#define BYTE_PRODUCTS 4 /* AMX tiles for many rows */
#elif defined(__AVX512VNNI__)
#define BYTE_PRODUCTS 3
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define BYTE_PRODUCTS 2
#elif defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_MATMUL_INT8)
#define BYTE_PRODUCTS 5 /* matrix instructions for several rows */
#elif defined(__ARM_FEATURE_DOTPROD)
#define BYTE_PRODUCTS 1
#else
#define BYTE_PRODUCTS 0 /* plain C */
#endif
#define GROUP 32 /* inputs that share a scale */
#define CODED 5
#define PACKED(bits) ((bits) == 8 ? 8 : 4) /* bits of a number in memory */
#define GROUP_BYTES(bits) (LANES * GROUP * PACKED(bits) / 8 + LANES * 4)
#if BYTE_PRODUCTS == 4
#define TILES 1
#define INTERLEAVED 16 /* rows whose groups of bytes are interleaved */
#else
#define TILES 0
#define INTERLEAVED 8
#endif

/* The offset of four inputs of a row in an interleaved group: for AMX tiles, or for `dot`. */
ALWAYS int quad_of(const int row, const int quad) {
    return TILES ? row * GROUP + quad * 4 : (quad * INTERLEAVED + row) * 4;
}

static const uint8_t decoded[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

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
ALWAYS bytes decode(bytes b) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)decoded)), b);
}
ALWAYS ivec dot(ivec sums, bytes q, const int8_t *x, const int row,
                const int quad) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, q, _mm512_set1_epi32(four(x + quad_of(row, quad))));
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
ALWAYS bytes decode(bytes b) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)decoded)), b);
}
ALWAYS ivec dot(ivec sums, bytes q, const int8_t *x, const int row,
                const int quad) {
    __m256i quads = _mm256_set1_epi32(four(x + quad_of(row, quad)));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(quads, q));
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
ALWAYS bytes decode(bytes b) { return vqtbl1q_u8(vld1q_u8(decoded), b); }
ALWAYS ivec dot(ivec sums, bytes q, const int8_t *x, const int row,
                const int quad) {
    int8x16_t w = vreinterpretq_s8_u8(q);
    int8x16_t quads = vld1q_s8(x + quad_of(row / 4 * 4, quad)); /* four rows */
    switch (row % 4) {
    case 0: return (ivec)vdotq_laneq_s32((int32x4_t)sums, w, quads, 0);
    case 1: return (ivec)vdotq_laneq_s32((int32x4_t)sums, w, quads, 1);
    case 2: return (ivec)vdotq_laneq_s32((int32x4_t)sums, w, quads, 2);
    default: return (ivec)vdotq_laneq_s32((int32x4_t)sums, w, quads, 3);
    }
}
ALWAYS vec load_halves(const uint16_t *p) {
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
#else
#define SIGNED 1
typedef uint8_t bytes __attribute__((vector_size(LANES * 4)));
ALWAYS bytes load_bytes(const uint8_t *p) { bytes b; memcpy(&b, p, sizeof b); return b; }
ALWAYS bytes low(bytes b) { return b & 15; }
ALWAYS bytes high(bytes b) { return b >> 4; }
ALWAYS bytes decode(bytes b) {
    for (int i = 0; i < LANES * 4; i++) b[i] = decoded[b[i]];
    return b;
}
ALWAYS ivec dot(ivec sums, bytes q, const int8_t *x, const int row,
                const int quad) {
    x += quad_of(row, quad);
    /* The four bytes of each lane, lowest first: shifted to the top and back with their sign. */
    sums += ((ivec)q << 24 >> 24) * x[0];
    sums += ((ivec)q << 16 >> 24) * x[1];
    sums += ((ivec)q << 8 >> 24) * x[2];
    sums += ((ivec)q >> 24) * x[3];
    return sums;
}
#if defined(__aarch64__)
ALWAYS vec load_halves(const uint16_t *p) {
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
#else
ALWAYS vec load_halves(const uint16_t *p) {
    vec v;
    for (int i = 0; i < LANES; i++) { /* normal halves and zero; subnormal ones count as zero */
        uint32_t bits = (uint32_t)(p[i] & 0x8000) << 16, rest = p[i] & 0x7fff;
        if (rest >= 0x400) bits |= (rest << 13) + ((127 - 15) << 23);
        float f;
        memcpy(&f, &bits, 4);
        v[i] = f;
    }
    return v;
}
#endif
#endif
